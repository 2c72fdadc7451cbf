#!/usr/bin/env bash
# Builds the C interface for installation and installs it: shared library with a SONAME, static
# library, header, pkg-config file.
#
#   scripts/install_capi.sh [--prefix DIR] [--libdir DIR] [--destdir DIR] [CARGO OPTIONS...]
#
#   --prefix     /usr/local if it is not given
#   --libdir     PREFIX/lib if it is not given
#   --destdir    is put in front of every path (for packagers); not part of the pkg-config file
#
# CARGO OPTIONS go to the build: --no-default-features leaves CUDA out. Linux and macOS.
#
# The SONAME is libregard_capi.so.N, where N is REGARD_ABI_VERSION. The build in target/release has
# none, so that a program can be linked and run there without an installation.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=/usr/local libdir="" destdir=""
while [ $# -gt 0 ]; do
    case "$1" in
        --prefix) prefix="$2" ;;
        --libdir) libdir="$2" ;;
        --destdir) destdir="$2" ;;
        *) break ;;
    esac
    shift 2
done
libdir="${libdir:-$prefix/lib}"

header=crates/regard-capi/include/regard.h
abi=$(sed -n 's/^#define REGARD_ABI_VERSION //p' "$header")
read -r version target < <(cargo metadata --format-version 1 --no-deps | python3 -c '
import json, sys
metadata = json.load(sys.stdin)
version = next(package["version"] for package in metadata["packages"] if package["name"] == "regard-capi")
print(version, metadata["target_directory"])')

case "$(uname -s)" in
    Linux)
        built=libregard_capi.so versioned="libregard_capi.so.$abi"
        flag="-Wl,-soname,$versioned"
        ;;
    Darwin)
        built=libregard_capi.dylib versioned="libregard_capi.$abi.dylib"
        flag="-Wl,-install_name,$libdir/$versioned"
        ;;
    *)
        echo "install_capi: Linux and macOS only" >&2
        exit 3
        ;;
esac
cargo rustc --quiet -p regard-capi --lib --profile dist "$@" -- -C link-arg="$flag"

install -d "$destdir$libdir/pkgconfig" "$destdir$prefix/include"
install -m 755 "$target/dist/$built" "$destdir$libdir/$versioned"
ln -sf "$versioned" "$destdir$libdir/$built"
install -m 644 "$target/dist/libregard_capi.a" "$destdir$libdir/libregard_capi.a"
install -m 644 "$header" "$destdir$prefix/include/regard.h"
sed -e '/^#/d' -e "s|@PREFIX@|$prefix|" -e "s|@LIBDIR@|$libdir|" -e "s|@VERSION@|$version|" crates/regard-capi/regard.pc.in \
    >"$destdir$libdir/pkgconfig/regard.pc"
echo "install_capi: $destdir$libdir/$versioned, version $version, ABI $abi"
