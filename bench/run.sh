#!/usr/bin/env bash
# Measures regard and the peers that are installed, in alternating rounds, and prints the ratio table in markdown:
#
#     bench/run.sh [--threads N] [--rounds N] [--seconds S] [--wait S] [--dtype TYPES] [--caches TYPES] [--out DIR] [NAME...]
#
# --caches e4m3,i8,q8_0,q4_0 measures NAMEs (d4k d32k d4kb8 p512) in bf16 over caches of these types beside a bf16 cache, and ggml over those
# that it has (q8_0, q4_0), instead of everything else.
#
# Rounds alternate so that whatever changes slowly on a machine (its clock, its neighbours) affects all alike; of each peer's rounds
# the round with the median time counts. PYTHON (python3) is the interpreter that has the Python peers; what is not installed is left out,
# and the script names it. DIR (bench/results/latest) gets every round's result files, table.md and plot.svg.
set -euo pipefail
cd "$(dirname "$0")/.."

threads=$(nproc) rounds=3 seconds=1 wait=60 dtypes=f32,bf16,f16 caches='' out=bench/results/latest names=()
while [ $# -gt 0 ]; do
    case $1 in
        --threads) threads=$2 ;;
        --rounds) rounds=$2 ;;
        --seconds) seconds=$2 ;;
        --wait) wait=$2 ;;
        --dtype) dtypes=$2 ;;
        --caches) caches=$2 ;;
        --out) out=$2 ;;
        -*)
            echo "error: unknown option $1" >&2
            exit 2
            ;;
        *)
            names+=("$1")
            shift
            continue
            ;;
    esac
    shift 2
done
variants=()
if [ -n "$caches" ]; then
    [ ${#names[@]} -gt 0 ] || names=(d4k d32k d4kb8 p512)
    dtypes=bf16 variants=(--with plain)
    for cache in ${caches//,/ }; do variants+=(--with "kv=$cache"); done
fi
[ ${#names[@]} -gt 0 ] || names=(p2048 p512 p1024d64 enc512 p1024d256 d4k d32k d4kb8 d2kd64 v8 tiny)

python=${PYTHON:-python3}
target=$(cargo metadata --format-version 1 --no-deps | sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
mkdir -p "$out"
rm -f "$out"/*.json
cargo build --release --quiet -p regard-cli
peers=()
if [ -z "$caches" ]; then
    "$python" -c "import numpy, torch" 2>/dev/null && peers+=(pytorch) || echo "PyTorch is not installed: left out" >&2
    "$python" -c "import numpy, onnx, onnxruntime" 2>/dev/null && peers+=(onnxruntime) || echo "ONNX Runtime is not installed: left out" >&2
fi
"$python" bench/peers/ggml_attention.py --check 2>/dev/null && peers+=(ggml) || echo "ggml is not installed: left out" >&2
if [ -n "$caches" ]; then
    echo "PyTorch, ONNX Runtime and candle have no such caches: left out" >&2
elif CARGO_TARGET_DIR=$target/peers cargo build --release --quiet --manifest-path bench/peers/candle/Cargo.toml; then
    peers+=(candle)
else
    echo "candle does not build here: left out" >&2
fi

# The requested types that a peer has.
only() {
    local type found=()
    for type in ${dtypes//,/ }; do [[ " $* " != *" $type "* ]] || found+=("$type"); done
    [ ${#found[@]} -gt 0 ] && (IFS=, && echo "${found[*]}")
}

run_peer() {
    local file="$out/$1.$2.json" types=$dtypes
    case $1 in
        pytorch)
            "$python" bench/peers/pytorch.py --threads "$threads" --dtype "$types" --seconds "$seconds" --wait "$wait" --out "$file" "${names[@]}"
            ;;
        onnxruntime)
            types=$(only f32 f16) || return 0
            "$python" bench/peers/onnxruntime_attention.py --threads "$threads" --dtype "$types" --seconds "$seconds" --wait "$wait" --out "$file" "${names[@]}"
            ;;
        ggml)
            # The bf16 cache, and the requested types that it has.
            [ -z "$caches" ] || types=$(dtypes=bf16,$caches && only bf16 q8_0 q4_0)
            "$python" bench/peers/ggml_attention.py --threads "$threads" --dtype "$types" --seconds "$seconds" --wait "$wait" --out "$file" "${names[@]}"
            ;;
        candle)
            # Its 16-bit types take minutes a shape: one element after the other.
            types=$(only f32) || return 0
            RAYON_NUM_THREADS=$threads "$target/peers/release/regard-peer-candle" "$file" "$types" "$seconds" "$wait" "${names[@]}"
            ;;
    esac
}

for round in $(seq "$rounds"); do
    echo "round $round of $rounds" >&2
    "$target/release/regard" bench "${names[@]}" ${variants[@]+"${variants[@]}"} --threads "$threads" --dtype "$dtypes" --seconds "$seconds" \
        --wait "$wait" --out "$out/regard.$round.json" >&2
    for peer in ${peers[@]+"${peers[@]}"}; do run_peer "$peer" "$round" >&2; done
done
bounds=() series=()
if [ -z "$caches" ]; then
    "$target/release/regard" bench bounds d2kd64-idle tiny-idle --threads "$threads" --dtype "$dtypes" --seconds "$seconds" --wait "$wait" \
        --out "$out/bounds.json" >&2
    "$target/release/regard" bench p2048 --lengths 128,256,512,1024,2048,4096 --threads "$threads" --dtype "$dtypes" --seconds "$seconds" \
        --wait "$wait" --out "$out/lengths.prefill.json" >&2
    "$target/release/regard" bench d4k --lengths 256,1024,4096,8192,16384,32768,65536 --threads "$threads" --dtype "$dtypes" \
        --seconds "$seconds" --wait "$wait" --out "$out/lengths.decode.json" >&2
    bounds=(--from "$out/bounds.json")
    series=(--from "$out/lengths.prefill.json" --from "$out/lengths.decode.json")
fi

from=() against=()
for file in "$out"/regard.*.json; do from+=(--from "$file"); done
for file in "$out"/{pytorch,onnxruntime,ggml,candle}.*.json; do
    if [ -e "$file" ]; then against+=(--against "$file"); fi
done
"$target/release/regard" bench "${from[@]}" ${bounds[@]+"${bounds[@]}"} ${against[@]+"${against[@]}"} --markdown | tee "$out/table.md"
if [ -z "$caches" ]; then
    "$target/release/regard" bench "${from[@]}" "${series[@]}" --plot "$out/plot.svg" >/dev/null
fi
