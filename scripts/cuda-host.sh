#!/usr/bin/env bash
# Tests the host's side of the CUDA backend without a GPU: every case and law runs over a stand-in for the driver (stand-in-driver/), which computes what
# the kernels' parameters ask for, naively. A wrong address, stride, length, flag, graph or workspace shows here.
#
#     scripts/cuda-host.sh           with coverage of every module of one type and head dim
#     scripts/cuda-host.sh short     with coverage of the modules that take every feature only, 16 rows of each case judged, one run of each case, and without
#                                    the law of poisoned slots, which runs every case twice more and is about kernels (.ci/run)
#
# Needs g++. Exit status 3: it cannot run here.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/stand_in_driver.sh
run info | grep stand-in
if ! run plan --machine cuda --shape "hq=1 d=64 lq=1"; then
    echo "this version has no CUDA kernels"
    exit 3
fi
# A line per case is too much: failures, laws and the totals. Judging a row takes longer than computing it.
judged=() fewer=()
[ "${1:-}" != short ] || judged=(--rows 16) fewer=(--repeat 1 --without poison-never-shows)
run check --device cuda --cases --laws "${judged[@]}" "${fewer[@]}" | awk '!/^ok/ || /law\//'
# The engine contract: a graph that is captured once is replayed.
LD_LIBRARY_PATH="$driver" REGARD_IMAGES="$images" REGARD_CUDA_REQUIRED=1 cargo tests --quiet --test cuda_engine_contract
# The C functions from Python: the section for devices.
cargo build --release --quiet --workspace --exclude xtask --exclude regard-cases --exclude metal-host --lib
LD_LIBRARY_PATH="$driver" REGARD_IMAGES="$images" REGARD_CUDA_REQUIRED=1 REGARD_STAND_IN=1 python3 crates/regard-capi/tests/ctypes_abi.py "$target/release/libregard_capi.so" | tail -n 1
# Another seed every time.
run check --device cuda --random 500 --out "$target/failures"
# Every feature and pair of features on the modules of one type and head dim, planned for every kind of GPU. Short keeps
# the modules that take every feature. A filter finds all names that contain it, so a name that begins with another is left out.
kept='.*'
[ "${1:-}" != short ] || kept='^prefill_.*_fallback|^decode_bf16_128_128_(bytes_)?r32_fallback'
cover() { run check --device cuda --coverage --filter "$@" | awk '!/^ok|no attention kernel:/'; }
export -f cover run
export driver images target
cargo xtask cuda list | awk '{ print $1 }' | grep bf16_128_128 | grep -E "$kept" | sort |
    awk 'NR == 1 || index($1, last) != 1 { print; last = $1 }' |
    xargs -P "$(nproc)" -I{} bash -o pipefail -c 'cover "$@"' _ {} "${judged[@]}"
# If the driver takes no machine code, the modules' PTX is loaded.
STAND_IN_TAKES_PTX_ONLY=1 run check --device cuda --cases=splits/ | awk '!/^ok/'
