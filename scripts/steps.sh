# Sourced by .ci/run and full.sh: runs named steps, and prints a table of their seconds and of the
# processor's seconds at the end, also after a failure. The sourcing script sets `target_seconds`, or
# leaves it empty. Its arguments are words: of the steps, those run whose names contain one of them.

wanted_words=("$@")
skipped=()
table=()
begun=$SECONDS

# Sets `processor` to the seconds of processor time that this script's commands have taken so far.
# On a machine that does other work too, they tell more than the time that has passed. `times` has to
# run in this shell: in $(...) it would count the commands of that.
times_file=$(mktemp)
processor_seconds() {
    times >"$times_file"
    processor=$(awk 'NR == 2 { gsub(/[ms]/, " "); printf "%.0f", 60 * $1 + $2 + 60 * $3 + $4 }' "$times_file")
}

# The steps so far and their seconds, longest first.
report() {
    rm -f "$times_file"
    local i
    for i in "${!lanes[@]}"; do
        kill -- "-${lane_processes[$i]}" 2>/dev/null || true
        rm -rf "${lanes[$i]}"
    done
    [ ${#table[@]} -gt 0 ] || return 0
    printf '\n=== steps, their seconds, and seconds of processor time\n'
    printf '%s\n' "${table[@]}" | sort -s -t $'\t' -k1,1nr | awk -F '\t' '{ printf "%6s s %6s s  %-7s  %s\n", $1, $2, $3, $4 }'
    local processor
    processor=$(printf '%s\n' "${table[@]}" | awk -F '\t' '{ sum += $2 } END { print sum }')
    printf '%6s s %6s s  in all%s\n' $((SECONDS - begun)) "$processor" "${target_seconds:+, target: below $target_seconds s}"
}
trap report EXIT

# wanted NAME: whether the step was asked for.
wanted() {
    local word
    [ ${#wanted_words[@]} -gt 0 ] || return 0
    for word in "${wanted_words[@]}"; do
        [[ "$1" != *"$word"* ]] || return 0
    done
    return 1
}

# step NAME COMMAND...: a heading, the command, the seconds it took. Exit status 3 means that it
# cannot run here.
step() {
    local name="$1" start=$SECONDS status=0 seconds processor before
    wanted "$name" || return 0
    processor_seconds
    before=$processor
    shift
    printf '\n=== %s\n' "$name"
    "$@" || status=$?
    seconds=$((SECONDS - start))
    processor_seconds
    processor=$((processor - before))
    case $status in
        0)
            printf -- '--- %s: %s s\n' "$name" "$seconds"
            table+=("$seconds"$'\t'"$processor"$'\t'"ok"$'\t'"$name")
            ;;
        3)
            printf -- '--- %s: SKIPPED, see above\n' "$name"
            skipped+=("$name")
            table+=("$seconds"$'\t'"$processor"$'\t'"SKIPPED"$'\t'"$name")
            ;;
        *)
            printf -- '--- %s: FAILED with exit status %s after %s s\n' "$name" "$status" "$seconds"
            table+=("$seconds"$'\t'"$processor"$'\t'"FAILED"$'\t'"$name")
            exit 1
            ;;
    esac
}

# beside FUNCTION: runs its steps beside those that follow, until `joined`. Their output is kept
# until then. They must share no target folder with the others, and install packages under a lock.
lanes=() lane_processes=()
beside() {
    local lane
    lane=$(mktemp -d)
    # A process group of its own, so that all of it ends if a step of the others fails.
    set -m
    (
        trap 'declare -p table skipped >"$lane/results"' EXIT
        table=() skipped=() lanes=() times_file="$lane/times"
        "$1"
    ) >"$lane/output" 2>&1 &
    lanes+=("$lane") lane_processes+=($!)
    set +m
}

# Waits for the steps of `beside`, and prints their output. Fails if one of them did.
joined() {
    local i failed=0 all=("${table[@]}") all_skipped=("${skipped[@]}")
    for i in "${!lanes[@]}"; do
        wait "${lane_processes[$i]}" || failed=1
        cat "${lanes[$i]}/output"
        # shellcheck source=/dev/null
        . <(sed 's/^declare -a/declare -ga/' "${lanes[$i]}/results")
        all+=("${table[@]}") all_skipped+=("${skipped[@]}")
        rm -r "${lanes[$i]}"
    done
    lanes=() lane_processes=() table=("${all[@]}") skipped=("${all_skipped[@]}")
    [ "$failed" = 0 ] || exit 1
}

# The last line of a run in which no step failed.
all_passed() {
    printf '\n=== all steps passed in %s s' $((SECONDS - begun))
    if [ ${#skipped[@]} -gt 0 ]; then
        printf ', but NOT RUN:'
        printf ' [%s]' "${skipped[@]}"
    fi
    printf '\n'
}

# The command as the workspace's tests build it. `cargo run -p regard-cli` selects other features of
# its dependencies, and would compile it and regard-cases again.
built_regard() {
    local folder
    cargo tests --quiet --test command --no-run || return
    folder="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')"
    "$folder/release/regard" "$@"
}
