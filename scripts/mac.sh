#!/usr/bin/env bash
# On a Mac: runs the one list of cases and the real model's attention on its GPU, times some shapes, and writes a report to
# attach to an issue.
#
#   scripts/mac.sh [REPORT]          metal-report.md if no name is given
#
# Needs an Apple silicon Mac with macOS 14 or later, and Rust. Exit status: 0 if everything was right, 1 if something was not (it is in the report),
# 3 if this is no such Mac.
set -uo pipefail
cd "$(dirname "$0")/.."

[ "$(uname -sm)" = "Darwin arm64" ] || { echo "mac: this needs an Apple silicon Mac" >&2; exit 3; }
report="${1:-metal-report.md}"
failed=0

# section TITLE COMMAND...: its output in the report, and whether it went well.
section() {
    local title="$1" output status=0
    shift
    echo "mac: $title ..."
    output=$("$@" 2>&1) || status=$?
    [ $status = 0 ] || failed=1
    {
        printf '\n## %s\n\n`%s`: exit status %s\n\n' "$title" "$*" "$status"
        printf '```\n%s\n```\n' "$output"
    } >>"$report"
}

{
    echo "# regard on a Mac's GPU"
    echo
    echo "- $(sysctl -n machdep.cpu.brand_string), macOS $(sw_vers -productVersion)"
    echo "- GPU cores: $(ioreg -l 2>/dev/null | sed -n 's/.*"gpu-core-count" = //p' | sed -n 1p)"
    echo "- regard $(git rev-parse --short HEAD 2>/dev/null || echo '?'), $(rustc --version)"
} >"$report"

cargo build --quiet --release -p regard-cli || exit 1
section "The list of cases" cargo run --quiet --release -p regard-cli -- check --cases --device metal
section "A real model's attention" cargo run --quiet --release -p regard-cli -- check testdata --device metal
section "Speed" cargo run --quiet --release -p regard --features metal --example metal_bench

echo "mac: wrote $report"
exit $failed
