#!/usr/bin/env bash
# Compiles the decode, combine, merge, append and mask map kernels with Mesa's compiler for Apple's GPUs (AGX, M1 and
# M2), and prints registers, spills and instructions of each pipeline of scripts/metal-compile.py's table
# (docs/perf/metal.md has the last ones, and what they show).
#
#     scripts/agx.sh [PIPELINE]            those whose names contain PIPELINE
#
# Mesa 25.0 is taken from Debian 13's sources by apt-get, or from the folder that MESA names. Only the compiler is
# built, into target/agx: about 400 files, 3 minutes on one core. Nothing is installed but, by apt-get and as root, what
# the build needs where it is missing. Prefill is left out: Mesa has no matrix products.
set -euo pipefail
cd "$(dirname "$0")/.."
folder="$PWD/${CARGO_TARGET_DIR:-target}/agx"
mkdir -p "$folder"

say() { printf 'agx: %s\n' "$*"; }
# Exit status 3: cannot run here.
unavailable() { say "cannot run here: $*" >&2; exit 3; }

# The source package, by a configuration of apt of its own: the suite of Debian 13, from the archive that this machine
# uses.
fetch_mesa() {
    local archive apt="$folder/apt"
    command -v apt-get >/dev/null || unavailable "no apt-get; MESA may name a source tree of Mesa 25.0"
    archive=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -v security | sed -n 1p)
    [ -n "$archive" ] || unavailable "apt has no archive"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    touch "$apt/status"
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive trixie main" >"$apt/sources.list"
    local options=(-o "Dir::Etc::SourceList=$apt/sources.list" -o "Dir::Etc::SourceParts=/dev/null" -o "Dir::State::Lists=$apt/lists"
        -o "Dir::Cache=$apt/cache" -o "Dir::State::status=$apt/status" -o "APT::Sandbox::User=root")
    apt-get "${options[@]}" -qq update || unavailable "apt-get update failed"
    (cd "$folder" && apt-get "${options[@]}" -qq source --download-only mesa) || unavailable "apt-get source mesa failed"
    mkdir -p "$folder/mesa"
    tar -xf "$folder"/mesa_*.orig.tar.xz -C "$folder/mesa" --strip-components=1
}

# Mesa's build, cut down to the compiler and our program. Its library for textures and geometry (libagx), which would
# need another compiler to build, is replaced by a header: compute kernels call nothing of it.
prepare_mesa() {
    local asahi="$1/src/asahi"
    printf 'idep_libagx = declare_dependency(include_directories : include_directories(%s))\n' "'.'" >"$asahi/libagx/meson.build"
    {
        echo '#include <stdlib.h>'
        cat "$asahi"/compiler/*.c | grep -o 'libagx_[a-z0-9_]*(' | grep -v 'link_libagx\|libagx_frcp' | sort -u |
            sed 's/\(.*\)(/#define \1(...) ((nir_def *)(abort(), (void *)0))/'
    } >"$asahi/libagx/libagx.h"
    cat >"$asahi/meson.build" <<'END'
subdir('libagx')
subdir('compiler')
executable('agx_report', ['agx_report.c'], link_with : [libasahi_compiler], include_directories : [inc_include, inc_src],
  c_args : [pre_args, no_override_init_args], dependencies : [idep_vtn, idep_nir, idep_mesautil])
END
}

build_mesa() {
    local mesa="$1" off
    for tool in bison flex glslangValidator pkg-config; do
        command -v "$tool" >/dev/null && continue
        [ "$(id -u)" = 0 ] || unavailable "no $tool; as root: apt-get install bison flex glslang-tools pkg-config libdrm-dev"
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bison flex glslang-tools pkg-config libdrm-dev >/dev/null
    done
    [ -x "$folder/tools/bin/meson" ] || python3 -m venv "$folder/tools"
    "$folder/tools/bin/pip" install --quiet 'meson==1.7.*' ninja mako pyyaml packaging
    export PATH="$folder/tools/bin:$PATH"
    off=()
    for feature in glx egl gbm gles1 gles2 llvm valgrind libunwind zstd xmlconfig shared-glapi; do
        off+=("-D$feature=disabled")
    done
    [ -e "$folder/build/build.ninja" ] ||
        meson setup "$folder/build" "$mesa" -Dbuildtype=release -Db_ndebug=false -Dtools=asahi -Dgallium-drivers= -Dvulkan-drivers= \
            -Dplatforms= -Dvideo-codecs= -Dopengl=false -Dbuild-tests=false "${off[@]}" >"$folder/setup.log" ||
        unavailable "meson failed: $folder/setup.log"
    ninja -C "$folder/build" src/asahi/agx_report >"$folder/build.log" || unavailable "ninja failed: $folder/build.log"
}

mesa="${MESA:-$folder/mesa}"
[ -d "$mesa/src/asahi/compiler" ] || fetch_mesa
[ -e "$mesa/src/asahi/libagx/libagx.h" ] || prepare_mesa "$mesa"
cmp -s scripts/agx/report.c "$mesa/src/asahi/agx_report.c" || cp scripts/agx/report.c "$mesa/src/asahi/agx_report.c"
build_mesa "$mesa"
AGX_REPORT="$folder/build/src/asahi/agx_report" python3 scripts/agx/agx.py "$@"
