#!/usr/bin/env bash
# Runs regard's tests under AddressSanitizer, once for each SIMD level that this CPU has.
#
#   scripts/asan.sh                  every available level, the library's unit and integration tests
#   scripts/asan.sh LEVEL...         only these levels (scalar, avx2, avx512, neon)
#   TESTS="--lib" scripts/asan.sh    other arguments for cargo test
#
# What it covers: every load and store of regard itself, the vector kernels' included: reads and writes outside any
# allocation, use after free, use after scope, leaks. The test profile keeps debug assertions, integer overflow checks and
# the library's checks of unsafe preconditions on. What it does not cover: reads of uninitialised memory, data races, and
# aliasing rules (Miri would see these, but it is not part of a stable toolchain and executes no AVX-512).
#
# The stable toolchain carries the sanitizer's run-time library; RUSTC_BOOTSTRAP=1 unlocks the compiler's flag, for this run only.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(rustc -vV | sed -n 's/^host: //p')
runtime="$(rustc --print sysroot)/lib/rustlib/$target/lib"
if ! ls "$runtime"/librustc-*_rt.asan.a >/dev/null 2>&1; then
    echo "asan: the toolchain has no AddressSanitizer run-time library for $target" >&2
    exit 3
fi

has() { grep -qw "$1" /proc/cpuinfo; }
levels=("$@")
if [ ${#levels[@]} -eq 0 ]; then
    levels=(scalar)
    if [ "$(uname -m)" = aarch64 ]; then levels+=(neon); fi
    if has avx2 && has fma && has f16c; then levels+=(avx2); fi
    if has avx512f && has avx512bw && has avx512dq && has avx512vl; then levels+=(avx512); fi
fi

# The flags go to what is built for the target only: with --target, build scripts and macros stay plain.
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/asan"
export ASAN_OPTIONS="detect_stack_use_after_return=1:${ASAN_OPTIONS:-}"
read -r -a tests <<<"${TESTS:---lib --tests}"
for level in "${levels[@]}"; do
    echo "asan: REGARD_SIMD=$level"
    REGARD_SIMD="$level" cargo test --target "$target" -p regard "${tests[@]}"
done
