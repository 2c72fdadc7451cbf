#!/usr/bin/env bash
# The long forms of the steps of .ci/run: hours. Before a release, and after a change of
# kernels, of xtask or of the emulators.
#
#   scripts/full.sh                  every step
#   scripts/full.sh WORD...          the steps whose names contain one of the words
#
# Ends with a table of steps and seconds. A step that cannot run here prints SKIPPED and why. Random
# problems are drawn from a new seed, which is printed; REGARD_RANDOM_SEED sets it.
set -euo pipefail
cd "$(dirname "$0")/.."
export CARGO_TERM_COLOR=never CARGO_INCREMENTAL=0

target_seconds=
# shellcheck source=scripts/steps.sh
. scripts/steps.sh

unbounded=18446744073709551615

emulated() {
    local seed=()
    [ -z "${REGARD_RANDOM_SEED:-}" ] || seed=(--seed "$REGARD_RANDOM_SEED")
    scripts/cuda-emulate.sh --random 2000 ${seed[@]+"${seed[@]}"} &&
        scripts/cuda-emulate.sh --random 2000 --profile small ${seed[@]+"${seed[@]}"} 'decode_.*' "dims/ lengths/ caches/ latent/"
}

metal_host() {
    cargo run --release -p regard-metal-host --features metal-host -- \
        check --random 5000 --device metal-host --out target/failures
}

# The lists of neon.sh and asan.sh with the laws, every large case and every row judged, and more
# random compositions. Left out: two tests of very large operands, and the tests of processes and of
# memory use.
listed=(--lib)
for test in bad_input bad_numbers bad_views cases composition defects laws page_allocator real_model step; do
    listed+=(--test "$test")
done
listed+=(-- --skip a_row_past_65535 --skip element_offsets_past_2_to_the_31)
export REGARD_JUDGED_ROWS=$unbounded
neon() { REGARD_MAX_WORK=$unbounded PROPTEST_CASES=500 scripts/neon.sh test -p regard "${listed[@]}"; }
address_sanitizer() { REGARD_MAX_WORK=$unbounded PROPTEST_CASES=2000 scripts/asan.sh "${listed[@]}"; }

# The first commands of the README, as they stand there.
# The tests with every large case.
readme() { REGARD_ALL_MODULES=1 REGARD_MAX_WORK=$unbounded cargo test --release --workspace && cargo run --release -p regard-cli -- check testdata; }

candle() { (cd examples && cargo test --release --workspace); }

install_capi() {
    local folder="$PWD/target/installed"
    scripts/install_capi.sh --prefix "$folder" && python3 crates/regard-capi/tests/ctypes_abi.py "$folder/lib/libregard_capi.so"
}

step "packages: built and tested as packed" scripts/packages.sh verify
step "C interface: installed" install_capi
step "CUDA device code: every module built again" cargo xtask cuda check --all
step "README: the commands" readme
step "random: 50,000 problems on the CPU, at every SIMD level" built_regard check --random 50000 --levels all --out target/failures
step "CUDA: the host's side, coverage of every module of a type and head dim" scripts/cuda-host.sh
step "emulate: every CUDA prefill module, all its cases, 2,000 random problems" emulated
step "metal: 5,000 random problems on the host" metal_host
step "metal: every build of the kernels" scripts/metal.sh
step "metal: every pipeline by other compilers" scripts/metal-compile.py
step "metal: the host's side, every row judged" scripts/metal-host.sh
step "candle: the tests, optimized as the profile says" candle
step "metal: type check of candle's Metal tensors" scripts/apple.sh candle
step "memcheck" scripts/memcheck.sh
step "neon: every test" neon
step "asan: every test" address_sanitizer
all_passed
