# Sourced by neon.sh and apple.sh: a Rust compiler with standard libraries that rustup does not bring, from Debian.
#
# Debian has a compiler, the standard libraries of its architectures and the standard library's source in one version (rustc-web,
# libstd-rust-web-dev, rust-web-src). They are downloaded as packages and unpacked into a cache folder: nothing of them is installed, and no
# architecture is added to this machine's package database.
#
# The sourcing script sets `cache`, and defines `say` and `unavailable`.

# shellcheck source=scripts/apt.sh
. scripts/apt.sh

# Installs the given packages that are missing; needs root for that.
install_packages() {
    local packages=() package
    for package in "$@"; do
        dpkg -s "$package" >/dev/null 2>&1 || packages+=("$package")
    done
    [ ${#packages[@]} -gt 0 ] || return 0
    [ "$(id -u)" = 0 ] || unavailable "missing packages; as root: apt-get install ${packages[*]}"
    say "installing ${packages[*]}"
    lock_apt
    install_and_unlock "${packages[@]}"
}

# Libraries that the unpacked compiler links.
install_compiler_libraries() { install_packages libedit2 libxml2 libz3-4 libzstd1; }

# apt with its own lists and two architectures; the machine's own lists stay as they are.
private_apt() {
    local tool="$1"; shift
    "$tool" -qq -o APT::Architectures::=amd64 -o APT::Architectures::=arm64 -o APT::Sandbox::User=root \
        -o Dir::State="$cache/apt/state" -o Dir::State::status=/var/lib/dpkg/status -o Dir::Cache="$cache/apt/cache" "$@"
}

# unpack_toolchain PACKAGE: the compiler, its own standard library, and PACKAGE (name:architecture), all of the highest version that has them.
unpack_toolchain() {
    local wanted="$1"
    [ -x "$cache/rustc" ] && [ -e "$cache/complete" ] && return 0
    rm -rf "$cache"
    mkdir -p "$cache/apt/state/lists/partial" "$cache/apt/cache/archives/partial" "$cache/packages" "$cache/root"
    private_apt apt-get update || unavailable "apt-get update failed"
    local version dependencies package
    version=$(comm -12 \
        <(private_apt apt-cache madison "$wanted" | awk '{print $3}' | sort -u) \
        <(private_apt apt-cache madison rustc-web:amd64 | awk '{print $3}' | sort -u) | sort -V | tail -1)
    [ -n "$version" ] || unavailable "no version of rustc-web has a matching $wanted"
    # The compiler's shared library and its LLVM carry versions in their names. (Readers of pipes read to the end: what writes into a closed one
    # dies of it, at times, and takes this script along.)
    package=$(private_apt apt-cache show "libstd-rust-web-dev:amd64=$version" | grep -oE 'libstd-rust-web-[0-9.]+[0-9]' | sed -n 1p)
    dependencies=$(private_apt apt-cache show "$package:amd64=$version" | grep '^Depends:' | grep -oE 'libllvm[0-9]+' | sed -n 1p)
    say "unpacking rustc-web $version into the cache ($package, $dependencies, $wanted)"
    (
        cd "$cache/packages"
        private_apt apt-get download "rustc-web:amd64=$version" "$package:amd64=$version" "$dependencies:amd64" \
            "libstd-rust-web-dev:amd64=$version" "$wanted=$version"
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
