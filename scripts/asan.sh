#!/usr/bin/env bash
# Runs regard's tests under AddressSanitizer: the case list and random compositions on every SIMD level that this
# CPU has (the tests force each level themselves), historical defects, real cases, append and merge, the misuse of every argument.
#
#   scripts/asan.sh                  all of that, with one case of each kind that is not small, some rows of each judged, and fewer
#                                    random compositions than a plain test run (REGARD_MAX_WORK, REGARD_JUDGED_ROWS and PROPTEST_CASES
#                                    override); the unit tests, for which the library is compiled once more, are in scripts/full.sh
#   scripts/asan.sh ARGS...          other arguments for cargo test
#
# Covered: every load and store of regard itself, the vector kernels' included: reads and writes outside any
# allocation, use after free, use after scope, leaks. The test profile keeps debug assertions, integer overflow checks and
# the library's checks of unsafe preconditions on. Not covered: reads of uninitialized memory, data races, aliasing
# rules (Miri would see these, but it is not part of a stable toolchain and executes no AVX-512), and a kernel that strays inside its own
# workspace or operand.
#
# The stable toolchain carries the sanitizer's run-time library; RUSTC_BOOTSTRAP=1 unlocks the compiler's flag, for this run only.
# Exit status 3: cannot run here.
set -euo pipefail
cd "$(dirname "$0")/.."

target=$(rustc -vV | sed -n 's/^host: //p')
runtime="$(rustc --print sysroot)/lib/rustlib/$target/lib"
if ! ls "$runtime"/librustc-*_rt.asan.a >/dev/null 2>&1; then
    echo "asan: cannot run here: the toolchain has no AddressSanitizer run-time library for $target" >&2
    exit 3
fi
# Left out: the laws (the same kernels again, with slow references), two tests of sheer size, and a test of rounding errors.
[ $# -gt 0 ] || set -- --test append --test bad_input --test cases --test composition --test defects --test merge \
    --test real_model -- --skip a_row_past_65535 --skip element_offsets_past_2_to_the_31 \
    --skip products_of_one_sign_stray_with_the_head_dim

# The flags go to what is built for the target only: with --target, build scripts and macros stay plain.
# Every access is checked by a call: checks in line make the vector kernels so large that compiling takes minutes.
export RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=address -Cllvm-args=-asan-instrumentation-with-call-threshold=0"
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/asan"
# A test asks for more memory than any machine has, and is answered with an error: the sanitizer must let it.
export ASAN_OPTIONS="detect_stack_use_after_return=1:allocator_may_return_null=1:${ASAN_OPTIONS:-}"
# The oracle has no unsafe code of its own but loads, and takes longer than the kernels: it judges some rows of every head.
export REGARD_MAX_WORK="${REGARD_MAX_WORK:-200000}" REGARD_JUDGED_ROWS="${REGARD_JUDGED_ROWS:-4}" PROPTEST_CASES="${PROPTEST_CASES:-100}"
# Fewer pieces than that profile has: each repeats what the others instantiate.
export CARGO_PROFILE_DEV_CODEGEN_UNITS=16
cargo test --target "$target" -p regard "$@"
