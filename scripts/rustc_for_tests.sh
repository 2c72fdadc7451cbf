#!/bin/sh
# What .ci/run has cargo call in place of rustc for the crates of this workspace (RUSTC_WORKSPACE_WRAPPER): tests and programs
# are optimized less than what ships, because they run once. Libraries, which have the kernels and the oracle, are optimized as
# the profile says.
compiler="$1"
shift
case " $* " in
    *" --test "* | *" --crate-type bin "*) ;;
    *) exec "$compiler" "$@" ;;
esac
case " $* " in
    *" opt-level="[23]*) exec "$compiler" "$@" -C opt-level=1 ;;
    *) exec "$compiler" "$@" ;;
esac
