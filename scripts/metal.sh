#!/usr/bin/env bash
# Runs the shipped Metal kernels on the host, compiled by clang in each of msl-host's ways (docs/metal.md describes what that shows).
#
#   scripts/metal.sh                 all of them: the whole list of cases plainly; every pipeline with every pair of features; a core list with fast math, under AddressSanitizer and
#                                    UndefinedBehaviorSanitizer, and under the race checker; the type check with real address spaces; and the test of
#                                    the tests: every threadgroup barrier deleted in turn
#   scripts/metal.sh short           the plain build alone, with one large case of each kind (REGARD_MAX_WORK), 16 rows of each case judged (REGARD_JUDGED_ROWS)
#                                    and fewer random problems (REGARD_METAL_RANDOM), and the tests of
#                                    msl-host (.ci/run)
#   scripts/metal.sh plain|fast-math|sanitized|races [ARGS...]     one of them; arguments go to the tests
#
# Needs clang 19 or later with its sanitizers; on Debian they are installed where they are missing, which needs root.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { printf 'metal: %s\n' "$*"; }
# Exit status 3: cannot run here.
unavailable() { say "cannot run here: $*" >&2; exit 3; }

[ "$(uname -sm)" = "Linux x86_64" ] || unavailable "the runtime is for x86-64 Linux"

# The newest clang of 19 or later that is installed.
find_clang() {
    local version
    for version in $(seq 40 -1 19); do
        command -v "clang++-$version" >/dev/null && echo "$version" && return 0
    done
    return 1
}

if ! version=$(find_clang); then
    command -v apt-get >/dev/null || unavailable "no clang of 19 or later, and no apt-get"
    [ "$(id -u)" = 0 ] || unavailable "no clang of 19 or later; as root: apt-get install clang-22 libclang-rt-22-dev"
    # shellcheck source=scripts/apt.sh
    . scripts/apt.sh
    lock_apt
    version=$(apt-cache --names-only search '^clang-[0-9]+$' | sed -E 's/^clang-([0-9]+) .*/\1/' | sort -n | tail -1)
    [ "${version:-0}" -ge 19 ] || unavailable "apt has no clang of 19 or later"
    say "installing clang-$version"
    install_and_unlock "clang-$version" "libclang-rt-$version-dev"
fi
export MSL_HOST_CLANG="clang++-$version" REGARD_METAL_REQUIRED=1
say "$("$MSL_HOST_CLANG" --version | sed -n 1p)"

run() {
    local build="$1"; shift
    local preload="" start=$SECONDS tests=(--test metal --test metal_append --test metal_mask_map)
    # The others run the same text, and show nothing more there.
    [ "$build" != plain ] || tests+=(--test metal_limits --test metal_bits)
    if [ "$build" = sanitized ]; then
        preload=$("$MSL_HOST_CLANG" --print-file-name=libclang_rt.asan-x86_64.so)
        [ -e "$preload" ] || preload=$("$MSL_HOST_CLANG" --print-file-name=libclang_rt.asan.so)
        [ -e "$preload" ] || unavailable "clang-$version has no AddressSanitizer (libclang-rt-$version-dev)"
    fi
    # The runner preloads the sanitizer into the tests alone, not into cargo.
    REGARD_METAL_BUILD="$build" ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}" UBSAN_OPTIONS="print_stacktrace=1" \
        CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER="env ${preload:+LD_PRELOAD=$preload}" \
        cargo tests --quiet "${tests[@]}" "$@"
    say "$build: $((SECONDS - start)) s"
}

case "${1:-all}" in
    short)
        # Kernels run slowly on the host. Of large cases, there is one of each kind.
        export REGARD_MAX_WORK="${REGARD_MAX_WORK:-300000}" REGARD_JUDGED_ROWS="${REGARD_JUDGED_ROWS:-16}" REGARD_METAL_RANDOM="${REGARD_METAL_RANDOM:-100}"
        cargo tests --quiet --test runtime
        run plain
        ;;
    all)
        # Every case but large ones on every description of a GPU.
        export REGARD_METAL_LARGE="${REGARD_METAL_LARGE:-3000000}"
        cargo test --quiet --release -p msl-host
        run plain
        # The long tests: 65,600 sequences and heads, and every pipeline of the core list on its own.
        cargo tests --quiet --test metal_limits --test metal_bits -- --ignored
        run fast-math
        run sanitized
        # The others take minutes under the tracer, and show nothing more there.
        run races every_case
        cargo tests --quiet --test metal_coverage
        cargo tests --quiet --test metal_barriers
        ;;
    plain | fast-math | sanitized | races)
        build="$1"
        shift
        run "$build" "$@"
        ;;
    *)
        say "unknown command '$1': short, plain, fast-math, sanitized or races" >&2
        exit 2
        ;;
esac
