# Sourced by cuda-host.sh and cuda-emulate.sh: the stand-in for NVIDIA's driver, and the command with everything that runs over it. Exit status 3 where there
# is no compiler for it. Sets `target` (cargo's folder), `driver` (the folder with libcuda.so.1) and `images` (what ships, unpacked).
if ! command -v g++ >/dev/null; then
    echo "g++ is not installed"
    exit 3
fi
target="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')"
driver="$target/stand-in-driver"
mkdir -p "$driver"
g++ -O3 -march=native -fopenmp -Wall -shared -fPIC -o "$driver/libcuda.so.1" scripts/stand-in-driver/driver.cpp
ln -sf libcuda.so.1 "$driver/libcuda.so"
# Its threads sleep between kernels: spinning, they take a core from everything else.
export OMP_WAIT_POLICY=passive
# The command, as the workspace's tests have it: where they were run it is there already.
cargo tests --quiet --test command --no-run
# The driver knows modules by their images.
images="$driver/images"
rm -rf "$images"
cargo xtask cuda unpack "$images"
run() { LD_LIBRARY_PATH="$driver" REGARD_IMAGES="$images" "$target/release/regard" "$@"; }
