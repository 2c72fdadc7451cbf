#!/usr/bin/env bash
# Builds the `regard` command to be carried to a machine with an NVIDIA GPU: one stripped file that needs glibc and the driver, and no Rust, no CUDA.
#
#     scripts/cuda-binary.sh [FILE]        # target/carried/regard
#
# There: ./regard info; ./regard check --device cuda --cases --laws; ./regard bench --device cuda
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-target/carried/regard}"
cargo build --release --quiet -p regard-cli --features cuda
built="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')/release/regard"
mkdir -p "$(dirname "$out")"
strip -o "$out" "$built"
# Requirements on the machine that it is carried to.
glibc=$(objdump -T "$out" 2>/dev/null | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -1)
needed=$(objdump -p "$out" | awk '$1 == "NEEDED" { printf "%s ", $2 }')
printf '%s: %s bytes, needs %s or newer, and %s\n' "$out" "$(stat -c %s "$out")" "$glibc" "$needed"
