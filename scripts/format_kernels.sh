#!/usr/bin/env bash
# Formats the CUDA kernels by .clang-format, and checks that no line of a Metal kernel is wider than 120 columns.
#
#     scripts/format_kernels.sh            rewrite them
#     scripts/format_kernels.sh --check    fail where one is not formatted
#
# Needs python3 with pip once, to install the fixed version of clang-format (other versions format otherwise).
set -euo pipefail
cd "$(dirname "$0")/.."
version=23.1.5
folder="${CARGO_TARGET_DIR:-target}/clang-format-$version"
if [ ! -x "$folder/bin/clang-format" ]; then
    echo "format: installing clang-format $version into $folder"
    python3 -m venv --clear "$folder"
    "$folder/bin/python" -m pip --disable-pip-version-check install --quiet --only-binary=:all: "clang-format==$version"
fi
# parameters.cuh is generated (`regard::params`).
mapfile -t files < <(find crates/regard/src/cuda/kernels crates/regard-nccl/src/peer \( -name '*.cu' -o -name '*.cuh' \) ! -name parameters.cuh | sort)
if ! awk 'length($0) > 120 { print FILENAME ":" FNR ": wider than 120 columns"; wide = 1 } END { exit wide }' \
    crates/regard/src/metal/kernels/*.metal; then
    exit 1
fi
case "${1:-}" in
    "") "$folder/bin/clang-format" -i "${files[@]}" ;;
    --check) "$folder/bin/clang-format" --dry-run --Werror "${files[@]}" ;;
    *)
        echo "format: unknown option $1: --check"
        exit 2
        ;;
esac
