#!/usr/bin/env bash
# Tests the host's side of the Metal backend without a Mac: crates/regard/src/metal/device.rs, compiled with a stand-in for the classes of Metal
# that it calls (crates/metal-host/stand_in), behind which the shipped kernels run. A wrong buffer, offset, barrier, function
# constant, grid or autorelease pool shows here.
#
#     scripts/metal-host.sh
#
# Needs clang 19 or later, which scripts/metal.sh installs. Exit status 3: it cannot run here.
set -euo pipefail
cd "$(dirname "$0")/.."

for version in $(seq 40 -1 19); do
    if command -v "clang++-$version" >/dev/null; then
        export MSL_HOST_CLANG="${MSL_HOST_CLANG:-clang++-$version}"
        break
    fi
done
if [ -z "${MSL_HOST_CLANG:-}" ]; then
    echo "metal-host: cannot run here: no clang of 19 or later; scripts/metal.sh installs one" >&2
    exit 3
fi
# Its own folder: another cfg compiles everything again.
export REGARD_METAL_REQUIRED=1 RUSTFLAGS="--cfg metal_stand_in" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/metal-host"
cargo test --quiet --release --no-default-features -p regard -p regard-capi --test metal_device "$@"
# The C functions. Their library has no tests but these.
cargo test --quiet --release --no-default-features -p regard-capi --lib metal::tests
