#!/usr/bin/env bash
# Builds the Python wheel and runs its tests on the CPU, and over the stand-in for NVIDIA's driver.
#
#     scripts/python.sh [PYTEST ARGUMENTS...]
#
# Needs Python 3.11 with venv and gcc. The virtual environment (PyTorch, JAX, transformers: 700 MB of
# wheels) and the build are kept in target/python; the wheel is left in target/python/wheels.
# Exit status 3: it cannot run here.
set -euo pipefail
cd "$(dirname "$0")/.."
crate=crates/regard-python
folder="$PWD/${CARGO_TARGET_DIR:-target}/python"
[[ "${CARGO_TARGET_DIR:-}" = /* ]] && folder="$CARGO_TARGET_DIR/python"
python="$folder/env/bin/python"
wheels="$folder/wheels"

if ! python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
    echo "python3 is not Python 3.11 with venv, whose wheels tests/requirements.txt names"
    exit 3
fi
if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "tests/requirements.txt names wheels for x86-64 Linux"
    exit 3
fi

# The environment is made again when its ingredients change.
stamp=$(cat $crate/tests/requirements.txt $crate/scripts/torch_without_cuda.py | sha256sum)
if [ "$(cat "$folder/env/stamp" 2>/dev/null)" != "$stamp" ]; then
    rm -rf "$folder/env"
    python3 -m venv "$folder/env"
    "$python" -m pip install --quiet --no-deps --no-compile -r $crate/tests/requirements.txt
    "$python" $crate/scripts/torch_without_cuda.py "$("$python" -c 'import site; print(site.getsitepackages()[0])')"
    "$python" -c 'import torch, transformers, jax'
    echo "$stamp" >"$folder/env/stamp"
fi

export CARGO_TARGET_DIR="$folder/build"
(cd $crate && cargo fmt --check)
rm -rf "$wheels"
"$folder/env/bin/maturin" build --quiet --release --compression-level 9 --manifest-path $crate/Cargo.toml --interpreter "$python" --out "$wheels"
(cd $crate && cargo clippy --quiet --release --all-targets -- -D warnings)
wheel=$(echo "$wheels"/*.whl)
bytes=$(stat -c %s "$wheel")
echo "$(basename "$wheel"): $bytes bytes"
if [ "$bytes" -gt 15000000 ]; then
    echo "the wheel exceeds 15 MB"
    exit 1
fi
"$python" -m pip install --quiet --no-deps --force-reinstall "$wheel"

# PyTorch's threads, and the stand-in driver's, sleep when they have nothing to do: spinning, they take a core from everything
# else.
export OMP_WAIT_POLICY=passive
# Not from the source folder: the wheel is tested.
tests="$PWD/$crate/tests"
"$python" -m pytest -c "$PWD/$crate/pyproject.toml" --rootdir "$tests" -p no:cacheprovider "$tests" "$@"

# GPU calls as far as the driver, whose memory and streams are stand-ins. Its `-march=native` and OpenMP are
# for speed only.
driver="$folder/stand-in-driver"
mkdir -p "$driver"
g++ -O2 -march=native -fopenmp -Wall -shared -fPIC -o "$driver/libcuda.so.1" scripts/stand-in-driver/driver.cpp
ln -sf libcuda.so.1 "$driver/libcuda.so"
rm -rf "$driver/images"
env -u CARGO_TARGET_DIR cargo xtask cuda unpack "$driver/images"
LD_LIBRARY_PATH="$driver" REGARD_IMAGES="$driver/images" REGARD_STAND_IN=1 \
    "$python" -m pytest -c "$PWD/$crate/pyproject.toml" --rootdir "$tests" -p no:cacheprovider "$tests" -k 'stand_in or stand-in'
