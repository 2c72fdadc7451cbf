#!/usr/bin/env bash
# regard-candle and `generate` with candle's CUDA feature, without a CUDA toolkit on the machine.
#
#     scripts/candle_cuda.sh toolkit           prints the lines that a build with candle's feature `cuda` needs
#     scripts/candle_cuda.sh build [FOLDER]    builds tests and programs, stripped, into FOLDER (target/candle-cuda/carried)
#     scripts/candle_cuda.sh test [FOLDER]     runs those tests, on a machine with an NVIDIA GPU
#     scripts/candle_cuda.sh libraries         prints where PyTorch's wheels have CUDA's libraries
#
# candle compiles CUDA kernels with nvcc; regard does not. The compiler and its headers are five wheels of PyPI,
# kept in target/candle-cuda (270 MB). candle links CUDA's libraries, of which wheels have no file to link with:
# libraries of the same names without content are made from the names that cudarc declares. The real ones are
# needed where the program runs: the wheels nvidia-cublas, nvidia-curand, nvidia-cuda-nvrtc and
# nvidia-cuda-runtime, which PyTorch brings too, in LD_LIBRARY_PATH. `test` looks for PyTorch's.
#
# CUDA_COMPUTE_CAP is the GPU's (90, Hopper, if it is not set).
set -euo pipefail
cd "$(dirname "$0")/.."
folder="$PWD/target/candle-cuda"
home="$folder/nvidia/cu13"
# Any driver from 580 on takes what this compiler writes.
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96)

# A library LIBRARY that candle is linked with: SONAME, and the part of cudarc that declares its functions.
stub() {
    local library=$1 soname=$2 sources=$3
    grep -ohE '\bfn (cu|nvrtc)[A-Za-z0-9_]+' "$sources" | sort -u | sed 's/^fn \(.*\)/void \1(void) {}/' |
        gcc -x c -w -fno-builtin -shared -fPIC -Wl,-soname,"$soname" -o "$home/lib/stubs/lib$library.so" -
}

toolkit() {
    [ -e "$folder/complete" ] && return
    rm -rf "$folder/nvidia"
    python3 -m pip install --quiet --no-deps --no-compile --upgrade --target "$folder" "${wheels[@]}" >&2
    chmod +x "$home"/bin/* "$home"/nvvm/bin/*
    mkdir -p "$home/lib/stubs"
    ln -sf ../libcudart.so.13 "$home/lib/stubs/libcudart.so"
    local cudarc
    cudarc=$(cd examples && cargo metadata --format-version 1 --features regard-candle/cuda | python3 -c '
import json, os, sys
packages = json.load(sys.stdin)["packages"]
print(next(os.path.dirname(p["manifest_path"]) for p in packages if p["name"] == "cudarc"))')
    stub cuda libcuda.so.1 "$cudarc/src/driver/sys/mod.rs"
    stub nvrtc libnvrtc.so.13 "$cudarc/src/nvrtc/sys/mod.rs"
    stub curand libcurand.so.10 "$cudarc/src/curand/sys/mod.rs"
    stub cublas libcublas.so.13 "$cudarc/src/cublas/sys/mod.rs"
    stub cublasLt libcublasLt.so.13 "$cudarc/src/cublaslt/sys/mod.rs"
    touch "$folder/complete"
}

environment() {
    export CUDA_HOME="$home" CUDA_COMPUTE_CAP="${CUDA_COMPUTE_CAP:-90}" PATH="$home/bin:$PATH"
    # The libraries that candle-kernels links are here: stubs, as in the toolkit's own folders.
    export LIBRARY_PATH="$home/lib/stubs${LIBRARY_PATH:+:$LIBRARY_PATH}"
}

# Both packages in every build, so that features are the same and candle is compiled once.
packages=(-p regard-candle -p generate --features regard-candle/cuda,generate/cuda)

# The file that cargo built for a test.
test_binary() {
    cargo test --release --quiet --no-run --message-format json "${packages[@]}" --test "$1" | python3 -c '
import json, sys
built = [json.loads(line) for line in sys.stdin if line.startswith("{")]
print(next(found["executable"] for found in built if found.get("executable") and found["profile"]["test"]))'
}

build() {
    local out=$1 test
    toolkit
    environment
    mkdir -p "$out"
    cd examples
    test=$(test_binary cuda)
    strip -o "$out/regard-candle-tests" "$test"
    test=$(test_binary graphs)
    strip -o "$out/generate-tests" "$test"
    cargo build --release --quiet "${packages[@]}"
    for program in generate speed; do strip -o "$out/$program" "target/release/$program"; done
    cp generate/prompts.txt "$out"
    (cd "$out" && ls -l)
}

# The folders of CUDA's libraries in PyTorch's wheels, one after the other.
libraries() {
    python3 -c '
import glob, importlib.util, os
spec = importlib.util.find_spec("nvidia")
folders = [folder for root in (spec.submodule_search_locations if spec else []) for folder in glob.glob(root + "/*/lib")]
print(":".join(sorted(folders)))'
}

case "${1:-}" in
    toolkit)
        toolkit
        environment
        printf 'export CUDA_HOME=%q CUDA_COMPUTE_CAP=%q PATH=%q:"$PATH" LIBRARY_PATH=%q\n' \
            "$CUDA_HOME" "$CUDA_COMPUTE_CAP" "$home/bin" "$LIBRARY_PATH"
        ;;
    build) build "$(realpath -m "${2:-$folder/carried}")" ;;
    libraries) libraries ;;
    test)
        carried=$(realpath "${2:-$folder/carried}")
        export REGARD_CUDA_REQUIRED=1 LD_LIBRARY_PATH="$(libraries)${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
        # One after the other: one measures when a call returns.
        "$carried/regard-candle-tests" --test-threads 1 "${@:3}"
        "$carried/generate-tests" --test-threads 1 "${@:3}"
        ;;
    *) echo "candle_cuda.sh: toolkit, build, libraries or test, not '${1:-}'" >&2 && exit 2 ;;
esac
