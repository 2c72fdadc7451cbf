#!/usr/bin/env bash
# Packs every crate that is published, and type-checks each one from its package, against the other
# packages.
#
#   scripts/packages.sh              pack and type-check
#   scripts/packages.sh verify       also build and test each package as cargo verifies it
#
# A part that a package lacks (a file outside of the crate, a dependency without a version) shows here.
# regard-candle belongs to the workspace in examples/ and depends on a published regard, so only its
# list of files is made.
set -euo pipefail
cd "$(dirname "$0")/.."

crates=(regard-cuda-images regard-cuda-images-8bit regard regard-cases regard-cli regard-capi regard-nccl)
# All crates have the version of the workspace.
version=$(sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml)
# A registry refuses packages above 10 MiB.
max_bytes=$((10 * 1024 * 1024))

case "${1:-check}" in
    check | verify) ;;
    *)
        echo "packages: unknown command '$1': check or verify" >&2
        exit 2
        ;;
esac

selected=()
for crate in "${crates[@]}"; do selected+=(-p "$crate"); done
target="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')"
unpacked="$target/unpacked"
rm -rf "$unpacked" "$target"/package/*.crate
mkdir -p "$unpacked"

# Cargo names every test that the package leaves out; that is on purpose.
cargo package --quiet --no-verify --allow-dirty "${selected[@]}" 2> >(grep -v '^warning: ignoring test' >&2)
for crate in "${crates[@]}"; do
    package="$target/package/$crate-$version.crate"
    bytes=$(stat -c %s "$package")
    tar -xzf "$package" -C "$unpacked"
    folder="$unpacked/$crate-$version"
    printf 'packages: %s: %s bytes, %s files\n' "$crate" "$bytes" "$(find "$folder" -type f | wc -l)"
    [ "$bytes" -le "$max_bytes" ] || { echo "packages: $crate is larger than a registry takes"; exit 1; }
    for file in README.md LICENSE-MIT LICENSE-APACHE; do
        [ -s "$folder/$file" ] || { echo "packages: $crate has no $file"; exit 1; }
    done
done

# A workspace of the packages alone, in which they stand for the published crates.
{
    printf '[workspace]\nresolver = "3"\nmembers = ["*"]\n\n[patch.crates-io]\n'
    for crate in "${crates[@]}"; do
        folder="$unpacked/$crate-$version"
        printf '%s = { path = "%s" }\n' "$crate" "$folder"
    done
} >"$unpacked/Cargo.toml"
cp Cargo.lock "$unpacked/Cargo.lock"
(
    cd "$unpacked"
    export CARGO_TARGET_DIR="$target"
    cargo check --quiet --workspace --all-targets
    [ "${1:-check}" = check ] || cargo test --quiet --workspace
)
[ "${1:-check}" = check ] || cargo package --quiet --allow-dirty "${selected[@]}" 2> >(grep -v '^warning: ignoring test' >&2)

listed=$(cd examples && cargo package -p regard-candle --list --allow-dirty)
for file in README.md LICENSE-MIT LICENSE-APACHE src/lib.rs; do
    grep -qx "$file" <<<"$listed" || { echo "packages: regard-candle has no $file"; exit 1; }
done
printf 'packages: regard-candle: %s files, only listed\n' "$(wc -l <<<"$listed")"
