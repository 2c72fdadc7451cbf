"""The array libraries that tests run with: how to make an array of each, and to read one back."""

import ast
import os
from pathlib import Path

import numpy as np
import pytest

CUDA_REQUIRED = os.environ.get("REGARD_CUDA_REQUIRED") == "1"
STAND_IN = os.environ.get("REGARD_STAND_IN") == "1"


def skip(reason, of_gpu=False):
    if of_gpu and CUDA_REQUIRED:
        pytest.fail(f"REGARD_CUDA_REQUIRED=1, but {reason}")
    pytest.skip(reason)


def stub_arguments(file, name):
    """The arguments of a function in one of the package's stubs; the last definition if it is overloaded."""
    import regard

    tree = ast.parse((Path(regard.__file__).parent / file).read_text())
    (*_, node) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    return {argument.arg for argument in node.args.args + node.args.kwonlyargs}


def bfloat16():
    return np.dtype(pytest.importorskip("ml_dtypes").bfloat16)


class NumPy:
    name, dtypes = "numpy", ("float32", "float16", "bfloat16")

    def make(self, array):
        return array

    def read(self, array):
        assert isinstance(array, np.ndarray)
        return array

    def synchronize(self):
        pass


class Torch:
    name, dtypes = "torch", ("float32", "float16", "bfloat16")
    device = "cpu"

    def __init__(self):
        self.torch = pytest.importorskip("torch")

    def make(self, array):
        if array.dtype.name == "bfloat16":
            bits = self.torch.from_numpy(np.ascontiguousarray(array).view(np.int16).copy())
            return bits.view(self.torch.bfloat16).to(self.device)
        return self.torch.from_numpy(np.ascontiguousarray(array).copy()).to(self.device)

    def read(self, array):
        assert isinstance(array, self.torch.Tensor) and array.device.type == self.device
        if array.dtype == self.torch.bfloat16:
            return array.cpu().view(self.torch.int16).numpy().view(bfloat16())
        return array.cpu().numpy()

    def synchronize(self):
        pass


class TorchCuda(Torch):
    name, device = "torch-cuda", "cuda"

    def __init__(self):
        super().__init__()
        if not self.torch.cuda.is_available():
            skip("PyTorch sees no NVIDIA GPU", of_gpu=True)

    def synchronize(self):
        self.torch.cuda.synchronize()


class CuPy:
    name, dtypes = "cupy", ("float32", "float16")

    def __init__(self):
        try:
            import cupy

            cupy.cuda.runtime.getDeviceCount()
        except Exception as error:  # noqa: BLE001: whatever keeps it from working
            skip(f"CuPy does not run here: {error}", of_gpu=CUDA_REQUIRED and "No module" not in str(error))
        self.cupy = cupy

    def make(self, array):
        return self.cupy.asarray(array)

    def read(self, array):
        assert isinstance(array, self.cupy.ndarray)
        return self.cupy.asnumpy(array)

    def synchronize(self):
        self.cupy.cuda.runtime.deviceSynchronize()


class Jax:
    name, dtypes = "jax", ("float32", "float16", "bfloat16")
    platform = "cpu"

    def __init__(self):
        self.jax = pytest.importorskip("jax")
        try:
            self.device = self.jax.devices(self.platform)[0]
        except RuntimeError as error:
            skip(f"JAX has no {self.platform}: {error}", of_gpu=self.platform == "cuda")

    def make(self, array):
        return self.jax.device_put(array, self.device)

    def read(self, array):
        assert isinstance(array, self.jax.Array), type(array)
        assert array.devices() == {self.device}
        return np.asarray(array)

    def synchronize(self):
        pass


class JaxCuda(Jax):
    name, platform = "jax-cuda", "cuda"


class Interface:
    """A device array with nothing but `__cuda_array_interface__`; the stand-in's device memory is the host's."""

    def __init__(self, array, stream=None):
        self.array = array
        self.dtype = array.dtype
        kind = "<V2" if array.dtype.name == "bfloat16" else array.dtype.str
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": kind,
            "data": (array.ctypes.data, not array.flags.writeable),
            "strides": array.strides,
            "version": 3,
            "stream": stream,
        }


class StandIn:
    name, dtypes = "stand-in", ("float32", "float16", "bfloat16")

    def __init__(self):
        if not STAND_IN:
            skip("scripts/python.sh runs these over a stand-in for the driver")

    def make(self, array):
        return Interface(array)

    def read(self, array):
        if isinstance(array, Interface):
            return array.array
        import ctypes

        # A buffer of regard's on the stand-in's device, which is the host.
        count = int(np.prod(array.shape, dtype=int))
        names = {"f32": "<f4", "f16": "<f2", "bf16": bfloat16(), "i32": "<i4"}
        dtype = np.dtype(names[array.dtype])
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        capsule = array.__dlpack__()
        address = ctypes.c_void_p.from_address(get(capsule, b"dltensor")).value
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return np.frombuffer(memory, dtype).reshape(array.shape).copy()

    def synchronize(self):
        pass


ALL = [NumPy, Torch, Jax, StandIn, TorchCuda, CuPy, JaxCuda]
GPU = [StandIn, TorchCuda, CuPy, JaxCuda]
