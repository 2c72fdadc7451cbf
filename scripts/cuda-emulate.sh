#!/usr/bin/env bash
# Runs the CUDA attention kernels without a GPU, emulated: their shipped sources, translated to C++ (cuda-emulator/), launched by regard's host code over the
# stand-in driver, on the case list, judged by the oracle.
#
#     scripts/cuda-emulate.sh                    all prefill modules, on the cases of prefill and of head dims past 256
#     scripts/cuda-emulate.sh MODULES CASES      modules whose names match a regular expression, cases whose names contain one of some words ("": none)
#     scripts/cuda-emulate.sh --random N [--seed S] [--profile P] ...      N random problems too (`regard check --random`), from a new seed or this one; of
#                                                                          prefill, or of another profile: `small` for decode
#
# Needs g++ with _Float16 (12 or later) on x86-64. Exit status 3: it cannot run here.
set -euo pipefail
cd "$(dirname "$0")/.."
problems=0 profile=prefill seed=$(($(date +%s%N) / 1000 % 1000000007))
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --random) problems="$2" ;;
        --seed) seed="$2" ;;
        --profile) profile="$2" ;;
        *)
            echo "emulate: unknown option $1: --random N, --seed S, --profile P"
            exit 2
            ;;
    esac
    shift 2
done
modules="${1:-prefill_.*|mask_map|widen}" cases="${2-prefill/ wide/}"
if [ "$(uname -m)" != x86_64 ]; then
    echo "emulate: cannot run here: needs x86-64"
    exit 3
fi
. scripts/stand_in_driver.sh
folder="$target/cuda-emulator"
rm -rf "$folder"
mkdir -p "$folder/source"
python3 scripts/cuda-emulator/translate.py crates/regard/src/cuda/kernels "$folder/source"
compile() {
    local name="$1" source="$2" kind=""
    shift 2
    [ "$source" = mask_map.cu ] && kind=-DMASK_MAP
    [ "$source" = append.cu ] && kind=-DAPPEND
    [ "$source" = widen.cu ] && kind=-DWIDEN
    [ "$source" = combine_splits.cu ] && kind=-DCOMBINE_SPLITS
    [ "$source" = decode.cu ] && kind=-DDECODE
    [ "$source" = decode_pages.cu ] && kind=-DDECODE_PAGES
    [ "$source" = decode_wgmma_sm90.cu ] && kind=-DDECODE_WGMMA
    [ "$source" = decode_latent_sm90.cu ] && kind=-DDECODE_LATENT
    case "$source" in prefill_sm90* | prefix_sm90*) kind="-DHOPPER=\"hopper/$source\"" ;; esac
    g++ -O2 -std=c++17 -w -Wno-psabi -fno-strict-aliasing -mf16c -mavx2 -mfma -shared -fPIC -I"$folder/source" ${kind:+"$kind"} "$@" "$folder/source/emulator.cpp" -o "$folder/$name.so"
}
export -f compile
export folder
cargo xtask cuda list | awk '$2 ~ /^(decode|prefill_|prefix_|mask_map|append|widen|combine_splits)/' | grep -E "^($modules|combine_splits) " |
    xargs -P "$(nproc)" -I{} bash -c 'compile {}'
echo "emulate: $(ls "$folder"/*.so | wc -l) modules"
# One process a part, as many at once as there are cores: the emulation is one thread.
check() { REGARD_EMULATED="$folder" run check --device cuda --cases --repeat 1 --filter "$1" | awk '!/^ok/'; }
export -f check run
export driver images target
[ -z "$cases" ] || printf '%s\n' $cases | xargs -P "$(nproc)" -I{} bash -o pipefail -c 'check {}'
# Every process has a part of the numbers, from the same seed.
random() {
    REGARD_EMULATED="$folder" run check --device cuda --random "$part" --first "$1" --seed "$seed" --profile "$profile" --out "$folder/failures"
}
export -f random
if [ "$problems" -gt 0 ]; then
    part=$(((problems + $(nproc) - 1) / $(nproc)))
    export part seed profile
    seq 0 "$part" $((problems - 1)) | xargs -P "$(nproc)" -I{} bash -c 'random {}'
fi
