#!/usr/bin/env bash
# Type-checks, on an x86-64 Debian machine, the code that only Apple's systems compile: the Metal host code of regard, its examples and tests, the C
# interface and the command, for aarch64-apple-darwin. Nothing is linked or run.
#
#   scripts/apple.sh                 type-check with clippy's lints off and warnings as errors
#   scripts/apple.sh candle          regard-candle with its feature metal; candle brings some hundred crates
#   scripts/apple.sh cargo ARGS...   run any cargo command with the toolchain set up (add --target aarch64-apple-darwin yourself)
#
# No Rust toolchain for Linux holds Apple's standard library; it is built from source (cargo's build-std), by a compiler of the same
# version: both come from Debian, as for scripts/neon.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

TARGET=aarch64-apple-darwin
cache="${XDG_CACHE_HOME:-$HOME/.cache}/regard-apple"

say() { printf 'apple: %s\n' "$*"; }
# Exit status 3: cannot run here.
unavailable() { say "cannot run here: $*" >&2; exit 3; }

[ "$(uname -m)" = x86_64 ] || unavailable "this script is for x86-64 machines; on a Mac plain 'cargo check' does this"
command -v apt-get >/dev/null && command -v dpkg >/dev/null || unavailable "needs apt-get and dpkg (Debian or a relative)"

# shellcheck source=scripts/debian_rust.sh
. scripts/debian_rust.sh

run_cargo() {
    RUSTC="$cache/rustc" RUSTC_BOOTSTRAP=1 RUSTFLAGS="-D warnings" CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/apple" \
        cargo "$@" -Zbuild-std=std,panic_abort
}

install_compiler_libraries
unpack_toolchain rust-web-src:amd64
case "${1:-check}" in
    check)
        say "type-checking for $TARGET with $("$cache/rustc" --version)"
        # In one selection, so that nothing is checked twice for other features.
        run_cargo check --quiet --target "$TARGET" -p regard -p regard-cli -p regard-capi --lib --bins --examples \
            --no-default-features --features regard/metal,regard-cli/metal,regard-capi/metal
        ;;
    candle)
        run_cargo check --quiet --target "$TARGET" --manifest-path examples/Cargo.toml -p regard-candle --features metal
        ;;
    cargo)
        shift
        run_cargo "$@"
        ;;
    *)
        say "unknown command '$1': check, candle or cargo" >&2
        exit 2
        ;;
esac
