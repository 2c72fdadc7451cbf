#!/usr/bin/env bash
# On a Mac: checks everything on its GPU (the one list of cases, a real model's attention, every pipeline with every pair of features,
# random problems), measures the named shapes, and writes a report to attach to an issue.
#
#   scripts/mac.sh [REPORT]          metal-report.md if no name is given
#
# REGARD_MAC_RANDOM is the number of random problems (1000). Each compiles pipelines of its own, which takes most of the time. Failures are also left
# as case files, in metal-failures/.
#
# Needs an Apple silicon Mac with macOS 14 or later, and Rust. Exit status: 0 if everything was right, 1 if something was wrong (the report has it),
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
regard=target/release/regard
section "The machine" "$regard" info
section "A real model's attention" "$regard" check testdata --device metal
section "The list of cases" "$regard" check --cases --device metal
# The named shapes in f32, bf16 and f16, then wide heads, caches in 8 and 4 bits and selected keys. Results are checked too.
section "Speed" "$regard" bench --device metal --markdown
section "Speed: wide heads" "$regard" bench --device metal --markdown --dtype f16 --shape "hq=8 hkv=4 d=512 lq=512 lk=512 causal"
section "Speed: caches" "$regard" bench d4k d32k --device metal --markdown --dtype f16 --with plain --with "kv=i8 scale=token-head" \
    --with "kv=e4m3 scale=token-head" --with kv=q8_0 --with kv=q4_0
section "Every pipeline with every pair of features" "$regard" check --coverage --device metal
section "Random problems" "$regard" check --random "${REGARD_MAC_RANDOM:-1000}" --device metal --out metal-failures

echo "mac: wrote $report"
exit $failed
