#!/usr/bin/env bash
# Runs the whole case list under valgrind's memcheck: what AddressSanitizer does not see, a result that depends on unwritten memory.
# It runs the levels that valgrind can execute: scalar and AVX2, not AVX-512. Exit status 3: cannot run here.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v valgrind >/dev/null || { echo "memcheck: cannot run here: no valgrind" >&2; exit 3; }
test=$(cargo test --release -p regard --test cases --no-run --message-format short 2>&1 | sed -n 's/.*Executable .*(\(.*\))$/\1/p')
test=$(realpath "$test")
cd crates/regard
exec valgrind --quiet --error-exitcode=9 "$test" --test-threads=1 every_case_on_every_level
