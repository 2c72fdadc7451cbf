"""ggml on the shapes of `regard bench`: the CPU backend's flash attention, from the shared libraries that the npm package
@node-llama-cpp/linux-x64 publishes. Queries and outputs are f32, as they always are there; --dtype is the type of the cache, q8_0 and
q4_0 among them: their results have the names of `regard bench --dtype bf16 --with kv=q8_0`.
`--check` exits with 0 if they are installed."""

import ctypes
import os
import sys
from pathlib import Path

import numpy

import common

# Numbers of `enum ggml_type`.
TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q4_0": 2, "q8_0": 8}
CPU_DEVICE = 0
PACKAGE = "node_modules/@node-llama-cpp/linux-x64/bins/linux-x64"

Pointer = ctypes.c_void_p


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", Pointer), ("no_alloc", ctypes.c_bool)]


class ThreadpoolParams(ctypes.Structure):
    _fields_ = [
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", ctypes.c_int),
        ("prio", ctypes.c_int),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    ]


def libraries():
    """The folder of the libraries, and the one that finds the others."""
    folder = Path(os.environ.get("GGML_LIBRARIES") or Path(sys.prefix) / PACKAGE)
    registry = next(iter(sorted(folder.glob("libggml.*so*"))), None)
    if registry is None:
        sys.exit(f"no libggml in {folder}")
    return folder, registry


class Ggml:
    """The libraries, and a CPU backend with threads of its own."""

    def __init__(self, threads):
        folder, registry = libraries()
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        self.registry = ctypes.CDLL(str(registry), ctypes.RTLD_GLOBAL)
        # Of the CPU libraries, ggml loads the one for the most instructions that this CPU has.
        self.call(self.registry, None, "ggml_backend_load_all_from_path", ctypes.c_char_p)(bytes(folder))
        init = self.call(self.registry, Pointer, "ggml_backend_init_by_type", ctypes.c_int, ctypes.c_char_p)
        self.backend = Pointer(init(CPU_DEVICE, None))
        device = Pointer(self.call(self.base, Pointer, "ggml_backend_get_device", Pointer)(self.backend))
        self.cpu = Pointer(self.call(self.base, Pointer, "ggml_backend_dev_backend_reg", Pointer)(device))
        # Without a pool of its own, the backend starts threads for every graph.
        params = ThreadpoolParams()
        init = self.call(self.base, None, "ggml_threadpool_params_init", ctypes.POINTER(ThreadpoolParams), ctypes.c_int)
        init(ctypes.byref(params), threads)
        pool = Pointer(self.cpu_function(b"ggml_threadpool_new", Pointer, ctypes.POINTER(ThreadpoolParams))(ctypes.byref(params)))
        self.cpu_function(b"ggml_backend_set_n_threads", None, Pointer, ctypes.c_int)(self.backend, threads)
        self.cpu_function(b"ggml_backend_cpu_set_threadpool", None, Pointer, Pointer)(self.backend, pool)
        self.declare()

    @staticmethod
    def call(library, result, name, *arguments):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
        return function

    def cpu_function(self, name, result, *arguments):
        """A function of the CPU library that ggml has loaded."""
        find = self.call(self.base, Pointer, "ggml_backend_reg_get_proc_address", Pointer, ctypes.c_char_p)
        return ctypes.CFUNCTYPE(result, *arguments)(find(self.cpu, name))

    def declare(self):
        number, size = ctypes.c_int64, ctypes.c_size_t
        declared = lambda result, name, *arguments: self.call(self.base, result, f"ggml_{name}", *arguments)
        self.version = declared(ctypes.c_char_p, "version")
        self.init = declared(Pointer, "init", InitParams)
        self.free = declared(None, "free", Pointer)
        self.new_tensor = declared(Pointer, "new_tensor_4d", Pointer, ctypes.c_int, *[number] * 4)
        self.permute = declared(Pointer, "permute", Pointer, Pointer, *[ctypes.c_int] * 4)
        self.flash = declared(Pointer, "flash_attn_ext", *[Pointer] * 5, *[ctypes.c_float] * 3)
        self.new_graph = declared(Pointer, "new_graph_custom", Pointer, size, ctypes.c_bool)
        self.expand = declared(None, "build_forward_expand", Pointer, Pointer)
        self.allocate = declared(Pointer, "backend_alloc_ctx_tensors", Pointer, Pointer)
        self.free_buffer = declared(None, "backend_buffer_free", Pointer)
        self.write = declared(None, "backend_tensor_set", Pointer, Pointer, size, size)
        self.read = declared(None, "backend_tensor_get", Pointer, Pointer, size, size)
        self.compute = declared(ctypes.c_int, "backend_graph_compute", Pointer, Pointer)


# Blocks of 32 values: an f16 scale and their codes, of which q4_0 has values i and i + 16 in one byte.
BLOCKS = {
    "q8_0": numpy.dtype([("scale", "<f2"), ("codes", "i1", 32)]),
    "q4_0": numpy.dtype([("scale", "<f2"), ("codes", "u1", 16)]),
}


def blocks(values, dtype):
    """The blocks of an f32 array, as GGUF defines them, and their values."""
    groups = values.reshape(*values.shape[:-1], -1, 32)
    largest = numpy.take_along_axis(groups, abs(groups).argmax(-1, keepdims=True), -1)
    scale = abs(largest) / 127 if dtype == "q8_0" else largest / -8
    scaled = groups / numpy.where(scale == 0, 1, scale)
    stored = numpy.empty(groups.shape[:-1], BLOCKS[dtype])
    stored["scale"] = scale[..., 0]
    if dtype == "q8_0":
        codes = numpy.rint(scaled).astype(numpy.int8)
        stored["codes"] = codes
    else:
        codes = numpy.minimum(numpy.floor(scaled + 8.5), 15).astype(numpy.uint8)
        stored["codes"] = codes[..., :16] | codes[..., 16:] << 4
        codes = codes.astype(numpy.int8) - 8
    return stored, (codes * stored["scale"].astype(numpy.float32)[..., None]).reshape(values.shape)


def as_stored(values, dtype):
    """The bytes of an f32 array in a cache's type, and their values."""
    if dtype == "f32":
        return values, values
    if dtype == "f16":
        stored = values.astype(numpy.float16)
        return stored, stored.astype(numpy.float32)
    if dtype in BLOCKS:
        return blocks(values, dtype)
    bits = values.view(numpy.uint32)
    stored = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(numpy.uint16)
    return stored, (stored.astype(numpy.uint32) << 16).view(numpy.float32)


class Shape:
    """Graphs for the copies of a shape's cache."""

    def __init__(self, ggml, name, dtype, random):
        batch, heads, kv_heads, dim, queries, keys, causal = common.SHAPES[name]
        self.ggml, self.shape, copies = ggml, (batch, queries, heads, dim), common.copies(name, dtype)
        # Room for descriptions of tensors and of a graph, about 400 bytes and 5 KiB; data are in the buffer.
        self.context = Pointer(ggml.init(InitParams((copies + 2) << 14, None, True)))
        tensor = lambda kind, *dims: Pointer(ggml.new_tensor(self.context, kind, *dims))
        draw = lambda *shape: random.standard_normal(shape, dtype=numpy.float32)
        q = tensor(TYPES["f32"], dim, heads, queries, batch)
        heads_first = Pointer(ggml.permute(self.context, q, 0, 2, 1, 3))
        mask = tensor(TYPES["f16"], keys, queries, 1, 1) if causal else None
        caches, self.outputs, self.graphs = [], [], []
        for _ in range(copies):
            # Head by head: up to twice as fast at decode as token by token.
            k, v = (tensor(TYPES[dtype], dim, keys, kv_heads, batch) for _ in range(2))
            out = ggml.flash(self.context, heads_first, k, v, mask, dim**-0.5, 0.0, 0.0)
            graph = Pointer(ggml.new_graph(self.context, 16, False))
            ggml.expand(graph, out)
            caches.append((k, v))
            self.outputs.append(Pointer(out))
            self.graphs.append(graph)
        self.buffer = Pointer(ggml.allocate(self.context, ggml.backend))
        self.q = draw(*self.shape)
        self.put(q, self.q)
        (k, self.k), (v, self.v) = (as_stored(draw(batch, kv_heads, keys, dim), dtype) for _ in range(2))
        for cache in caches:
            self.put(cache[0], k)
            self.put(cache[1], v)
        if mask is not None:
            hidden = numpy.arange(keys)[None] > numpy.arange(queries)[:, None] + keys - queries
            self.put(mask, numpy.where(hidden, -numpy.inf, 0).astype(numpy.float16))

    def put(self, tensor, array):
        self.ggml.write(tensor, array.ctypes.data_as(Pointer), 0, array.nbytes)

    def calls(self):
        compute, backend = self.ggml.compute, self.ggml.backend
        return [lambda graph=graph: compute(backend, graph) for graph in self.graphs]

    def output(self):
        out = numpy.empty(self.shape, numpy.float32)
        self.ggml.read(self.outputs[0], out.ctypes.data_as(Pointer), 0, out.nbytes)
        return out

    def free(self):
        self.ggml.free_buffer(self.buffer)
        self.ggml.free(self.context)


def main():
    if sys.argv[1:] == ["--check"]:
        libraries()
        return
    options = common.arguments(__doc__, "f32,bf16,f16")
    ggml = Ggml(options.threads)
    random = numpy.random.default_rng(0)
    results = []
    for name in options.names:
        for dtype in options.dtype:
            shape = Shape(ggml, name, dtype, random)
            calls = shape.calls()
            assert calls[0]() == 0, "ggml failed"
            error = common.largest_error(name, shape.q, shape.k, shape.v, shape.output())
            timing = common.measure(options, calls)
            peer = f"ggml {ggml.version().decode()}"
            queries, cache = ("bf16", dtype) if dtype in BLOCKS else (dtype, None)
            results.append(common.record(options, peer, name, queries, timing, error, cache))
            shape.free()
    common.write(options, results)


main()
