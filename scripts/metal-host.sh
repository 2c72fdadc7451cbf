#!/usr/bin/env bash
# Tests the host's side of the Metal backend without a Mac: crates/regard/src/metal/device.rs, compiled with a stand-in for the classes of Metal
# that it calls (crates/metal-host/stand_in), behind which the shipped kernels run. A wrong buffer, offset, barrier, function
# constant, grid or autorelease pool shows here.
#
#     scripts/metal-host.sh            with 16 rows of each case judged (REGARD_JUDGED_ROWS overrides): the kernels are judged by scripts/metal.sh
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
export REGARD_METAL_REQUIRED=1 REGARD_JUDGED_ROWS="${REGARD_JUDGED_ROWS:-16}"
shared="${CARGO_TARGET_DIR:-target}"
# Its own folder: another cfg compiles everything again. That takes longer than the run, so it is optimized little.
export RUSTFLAGS="--cfg metal_stand_in" CARGO_TARGET_DIR="$shared/metal-host" CARGO_PROFILE_RELEASE_OPT_LEVEL=1
# The kernels that scripts/metal.sh compiled, if it ran: they are named by a hash of all that they are made of.
mkdir -p "$CARGO_TARGET_DIR/tmp/msl"
cp -n "$shared"/tmp/msl/*.so "$CARGO_TARGET_DIR/tmp/msl/" 2>/dev/null || true
cargo test --quiet --release --no-default-features -p regard -p regard-capi --test metal_device "$@"
# The C functions. Their library has no tests but these.
cargo test --quiet --release --no-default-features -p regard-capi --lib metal::tests
