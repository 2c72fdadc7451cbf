#!/usr/bin/env bash
# Measures regard's shapes at 1, 2, 4, 8 and 16 threads, as far as the machine has so many, and prints a table in markdown:
#
#     bench/scaling.sh [--regard BINARY] [--short] [--threads LIST] [--seconds S] [--wait S] [--dtype TYPES] [--out DIR] [NAME...]
#
# The table has the speed-up over the fewest threads, which is to be linear for prefill, and the share of the ceiling at the same number of
# threads, which is memory for decode. DIR (bench/results/scaling) gets scaling.json and table.md. Nothing but BINARY is needed; without
# --regard it is built. --short takes less than a minute on 16 cores: six shapes in f32 and bf16, 0.06 s each.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
regard='' threads='' seconds=0.5 wait=0 dtypes=f32,bf16,f16 out=$root/bench/results/scaling names=() effort=()
while [ $# -gt 0 ]; do
    case $1 in
        --short)
            names=(p512 p2048 d4k d32k d4kb8 tiny) seconds=0.06 dtypes=f32,bf16 effort=(--repeat 3 --rows 4)
            shift
            continue
            ;;
        --regard | --threads | --seconds | --wait | --dtype | --out)
            if [ $# -lt 2 ]; then
                echo "error: $1 has no value" >&2
                exit 2
            fi
            ;;&
        --regard) regard=$2 ;;
        --threads) threads=$2 ;;
        --seconds) seconds=$2 ;;
        --wait) wait=$2 ;;
        --dtype) dtypes=$2 ;;
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
[ ${#names[@]} -gt 0 ] || names=(p2048 p512 p1024d64 enc512 p1024d256 d4k d32k d4kb8 d2kd64 v8 tiny)

if [ -z "$regard" ]; then
    target=$(cargo metadata --format-version 1 --no-deps --manifest-path "$root/Cargo.toml" |
        sed 's/.*"target_directory":"\([^"]*\)".*/\1/')
    cargo build --release --quiet --manifest-path "$root/Cargo.toml" -p regard-cli
    regard=$target/release/regard
fi
if [ -z "$threads" ]; then
    cores=$(nproc)
    for count in 1 2 4 8 16; do
        [ "$count" -gt "$cores" ] || threads+=${threads:+,}$count
    done
fi
mkdir -p "$out"
"$regard" bench "${names[@]}" --scaling "$threads" --dtype "$dtypes" --seconds "$seconds" --wait "$wait" ${effort[@]+"${effort[@]}"} \
    --markdown --out "$out/scaling.json" | tee "$out/table.md"
