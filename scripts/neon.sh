#!/usr/bin/env bash
# Builds regard for 64-bit Arm and runs its tests there, on an x86-64 Debian machine, under user-mode emulation.
#
#   scripts/neon.sh                  type-check the library for aarch64, then run its tests under emulation, at the NEON level: unit
#                                    tests, the case list (of large cases one of each kind), defects, real cases, and fewer random
#                                    compositions than natively; some rows of each case are judged
#                                    (REGARD_MAX_WORK, REGARD_JUDGED_ROWS and PROPTEST_CASES override)
#   scripts/neon.sh check            only type-check
#   scripts/neon.sh test ARGS...     run `cargo test ARGS...` for aarch64 under emulation
#   scripts/neon.sh cargo ARGS...    run any cargo command with the aarch64 toolchain set up (add --target $TARGET yourself)
#
# A rustup toolchain holds the standard library of its own target only; Debian's compiler with the standard libraries of both
# architectures is unpacked into a cache folder (scripts/debian_rust.sh). The
# cross linker and the emulator (gcc-aarch64-linux-gnu, qemu-user) are ordinary packages; where they are missing they are
# installed, which needs root.
#
# Emulation proves results, not speed: qemu executes NEON exactly, at a fraction of native pace.
set -euo pipefail
cd "$(dirname "$0")/.."

export TARGET=aarch64-unknown-linux-gnu
cache="${XDG_CACHE_HOME:-$HOME/.cache}/regard-neon"

say() { printf 'neon: %s\n' "$*"; }
# Exit status 3: cannot run here.
unavailable() { say "cannot run here: $*" >&2; exit 3; }

[ "$(uname -m)" = x86_64 ] || unavailable "this script is for x86-64 machines; on aarch64 plain 'cargo test' runs NEON"
command -v apt-get >/dev/null && command -v dpkg >/dev/null || unavailable "needs apt-get and dpkg (Debian or a relative)"

# shellcheck source=scripts/debian_rust.sh
. scripts/debian_rust.sh

install_tools() {
    command -v aarch64-linux-gnu-gcc >/dev/null || install_packages gcc-aarch64-linux-gnu libc6-dev-arm64-cross
    command -v qemu-aarch64 >/dev/null || install_packages qemu-user
    install_compiler_libraries
}

run_cargo() {
    RUSTC="$cache/rustc" \
        CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/neon" \
        CARGO_PROFILE_DEV_CODEGEN_UNITS=16 \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
        cargo "$@"
}

check() {
    say "type-checking for $TARGET${1:+ with $1}"
    run_cargo check --target "$TARGET" -p regard "$@"
}

install_tools
unpack_toolchain libstd-rust-web-dev:arm64
say "$("$cache/rustc" --version), $(qemu-aarch64 --version | sed -n 1p)"
case "${1:-all}" in
    all)
        # The tests build the library with default features.
        check --no-default-features
        # Left out: the laws and the test of products of one sign, which take minutes under emulation (both are in
        # scripts/full.sh), two tests of very large operands, and most of the large cases. The scalar level runs natively. The oracle is the same everywhere and takes longer
        # than the kernels, so it judges some rows of every head.
        export REGARD_MAX_WORK="${REGARD_MAX_WORK:-100000}" REGARD_JUDGED_ROWS="${REGARD_JUDGED_ROWS:-4}" PROPTEST_CASES="${PROPTEST_CASES:-50}"
        export REGARD_SIMD=neon
        run_cargo test --target "$TARGET" -p regard --lib --test cases --test composition --test defects --test real_model -- \
            --skip a_row_past_65535 --skip element_offsets_past_2_to_the_31 \
            --skip products_of_one_sign_stray_with_the_head_dim
        ;;
    check)
        check
        check --no-default-features
        ;;
    test)
        shift
        run_cargo test --target "$TARGET" "$@"
        ;;
    cargo)
        shift
        run_cargo "$@"
        ;;
    *)
        say "unknown command '$1': check, test or cargo" >&2
        exit 2
        ;;
esac
