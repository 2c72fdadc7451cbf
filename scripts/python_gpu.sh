#!/usr/bin/env bash
# Tests the Python wheel on a machine with an NVIDIA GPU:
#
#     scripts/python_gpu.sh WHEEL
#
# Needs python3 with PyTorch and pytest, and nothing to build with; tests of CuPy and JAX run where they are
# installed. It reads only crates/regard-python of this repository. A test that is skipped for want of a GPU fails.
set -euo pipefail
wheel=$(realpath "$1")
crate=$(realpath "$(dirname "$0")/../crates/regard-python")
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$wheel"
export PYTHONPATH="$site" PYTHONDONTWRITEBYTECODE=1 REGARD_CUDA_REQUIRED=1
# JAX would take most of the GPU's memory for itself.
export XLA_PYTHON_CLIENT_PREALLOCATE=false
python3 -c 'import regard, torch; print("regard", regard.__version__, "PyTorch", torch.__version__, *regard.cuda_devices())'
python3 -m pytest -c "$crate/pyproject.toml" --rootdir "$crate/tests" -p no:cacheprovider -s "$crate/tests" "${@:2}"
