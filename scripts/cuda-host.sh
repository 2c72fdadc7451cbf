#!/usr/bin/env bash
# Tests the host's side of the CUDA backend without a GPU: every case and law runs over a stand-in for the driver (stand-in-driver/), which computes what
# the kernels' parameters ask for, naively. What is wrong with an address, a stride, a length, a flag, a graph or a workspace shows here.
#
#     scripts/cuda-host.sh
#
# Needs g++. Exit status 3: it cannot run here.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v g++ >/dev/null; then
    echo "g++ is not installed"
    exit 3
fi
target="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')"
folder="$target/stand-in-driver"
mkdir -p "$folder"
g++ -O3 -Wall -shared -fPIC -o "$folder/libcuda.so.1" scripts/stand-in-driver/driver.cpp
ln -sf libcuda.so.1 "$folder/libcuda.so"
cargo build --release --quiet -p regard-cli --features cuda-prefill
run() { LD_LIBRARY_PATH="$folder" "$target/release/regard" "$@"; }
run info | grep stand-in
if ! run plan --machine cuda --shape "hq=1 d=64 lq=1"; then
    echo "this version has no CUDA kernels"
    exit 3
fi
# A line a case is too much: failures, laws and the totals.
run check --device cuda --cases --laws | awk '!/^ok/ || /law\//'
