#!/usr/bin/env bash
# Builds regard for 64-bit Arm and runs its tests there, on an x86-64 Debian machine, under user-mode emulation.
#
#   scripts/neon.sh                  type-check the library for aarch64, then run its tests under emulation: unit tests, the whole
#                                    case list, defects, real cases, and fewer random compositions than natively (PROPTEST_CASES overrides)
#   scripts/neon.sh check            only type-check
#   scripts/neon.sh test ARGS...     run `cargo test ARGS...` for aarch64 under emulation
#   scripts/neon.sh cargo ARGS...    run any cargo command with the aarch64 toolchain set up (add --target $TARGET yourself)
#
# A rustup toolchain holds the standard library of its own target only. Debian has a compiler and the standard libraries of
# both architectures in one version (rustc-web, libstd-rust-web-dev), so these are downloaded as packages and unpacked into a
# cache folder: nothing of them is installed, and no architecture is added to this machine's package database. The
# cross linker and the emulator (gcc-aarch64-linux-gnu, qemu-user) are ordinary packages; where they are missing they are
# installed, which needs root.
#
# Emulation proves results, not speed: qemu executes NEON exactly, at a fraction of native pace.
set -euo pipefail
cd "$(dirname "$0")/.."

export TARGET=aarch64-unknown-linux-gnu
cache="${XDG_CACHE_HOME:-$HOME/.cache}/regard-neon"

say() { printf 'neon: %s\n' "$*"; }
# Exit status 3: cannot run here.
unavailable() { say "cannot run here: $*" >&2; exit 3; }

[ "$(uname -m)" = x86_64 ] || unavailable "this script is for x86-64 machines; on aarch64 plain 'cargo test' runs NEON"
command -v apt-get >/dev/null && command -v dpkg >/dev/null || unavailable "needs apt-get and dpkg (Debian or a relative)"

install_tools() {
    # The last four are libraries that the unpacked compiler links.
    local packages=() package
    command -v aarch64-linux-gnu-gcc >/dev/null || packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross)
    command -v qemu-aarch64 >/dev/null || packages+=(qemu-user)
    for package in libedit2 libxml2 libz3-4 libzstd1; do
        dpkg -s "$package" >/dev/null 2>&1 || packages+=("$package")
    done
    [ ${#packages[@]} -gt 0 ] || return 0
    [ "$(id -u)" = 0 ] || unavailable "missing packages; as root: apt-get install ${packages[*]}"
    say "installing ${packages[*]}"
    apt-get update -qq || unavailable "apt-get update failed"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null ||
        unavailable "apt-get could not install ${packages[*]}"
}

# apt with its own lists and two architectures; the machine's own lists stay as they are.
private_apt() {
    local tool="$1"; shift
    "$tool" -qq -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root \
        -o Dir::State="$cache/apt/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$cache/apt/cache" "$@"
}

unpack_toolchain() {
    [ -x "$cache/rustc" ] && [ -e "$cache/complete" ] && return 0
    rm -rf "$cache"
    mkdir -p "$cache/apt/state/lists/partial" "$cache/apt/cache/archives/partial" "$cache/packages" "$cache/root"
    private_apt apt-get update || unavailable "apt-get update failed"
    # The highest version that both architectures have.
    local version dependencies package
    version=$(comm -12 \
        <(private_apt apt-cache madison libstd-rust-web-dev:arm64 | awk '{print $3}' | sort -u) \
        <(private_apt apt-cache madison rustc-web:amd64 | awk '{print $3}' | sort -u) | sort -V | tail -1)
    [ -n "$version" ] || unavailable "no version of rustc-web has a matching libstd-rust-web-dev for arm64"
    # The compiler's shared library and its LLVM carry versions in their names.
    package=$(private_apt apt-cache show "libstd-rust-web-dev:amd64=$version" | grep -oE 'libstd-rust-web-[0-9.]+[0-9]' | head -1)
    dependencies=$(private_apt apt-cache show "$package:amd64=$version" | grep -m1 '^Depends:' | grep -oE 'libllvm[0-9]+')
    say "unpacking rustc-web $version into the cache ($package, $dependencies)"
    (
        cd "$cache/packages"
        private_apt apt-get download "rustc-web:amd64=$version" "$package:amd64=$version" "$dependencies:amd64" \
            "libstd-rust-web-dev:amd64=$version" "libstd-rust-web-dev:arm64=$version"
        for package in *.deb; do dpkg -x "$package" "$cache/root"; done
    )
    rm -rf "$cache/packages" "$cache/apt"
    cat >"$cache/rustc" <<WRAPPER
#!/bin/sh
root="\$(dirname "\$0")/root/usr"
LD_LIBRARY_PATH="\$root/lib/x86_64-linux-gnu" exec "\$root/bin/rustc" --sysroot "\$root" "\$@"
WRAPPER
    chmod +x "$cache/rustc"
    "$cache/rustc" --version >/dev/null || unavailable "the unpacked compiler does not start"
    touch "$cache/complete"
}

run_cargo() {
    RUSTC="$cache/rustc" \
        CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/neon" \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
        CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
        cargo "$@"
}

check() {
    say "type-checking for $TARGET"
    run_cargo check --target "$TARGET" -p regard
    run_cargo check --target "$TARGET" -p regard --no-default-features
}

install_tools
unpack_toolchain
say "$("$cache/rustc" --version), $(qemu-aarch64 --version | head -1)"
case "${1:-all}" in
    all)
        check
        # Left out: the laws, which take minutes under emulation, and two tests of sheer size.
        PROPTEST_CASES="${PROPTEST_CASES:-50}" run_cargo test --target "$TARGET" -p regard --lib --test cases \
            --test composition --test defects --test real_model --test page_allocator -- \
            --skip a_row_past_65535 --skip element_offsets_past_2_to_the_31
        ;;
    check) check ;;
    test)
        shift
        run_cargo test --target "$TARGET" "$@"
        ;;
    cargo)
        shift
        run_cargo "$@"
        ;;
    *)
        say "unknown command '$1': check, test or cargo" >&2
        exit 2
        ;;
esac
