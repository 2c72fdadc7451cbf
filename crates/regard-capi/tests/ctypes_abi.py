"""The C interface from Python, with nothing but the standard library: one problem against naive maths, errors, a refusal.

    python3 ctypes_abi.py PATH_OF_THE_SHARED_LIBRARY

On the CPU, and on the first NVIDIA GPU if there is one. With REGARD_CUDA_REQUIRED set, a missing GPU is a failure.
With REGARD_STAND_IN set, the driver is the stand-in of scripts/cuda-host.sh.
"""

import array
import ctypes
import math
import os
import random
import sys
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p

OK, ARGUMENT, REFUSED = 0, 1, 2
F32, I32, BOOL, I8 = 1, 4, 5, 8
CAUSAL, WINDOW_LEFT, SOFTCAP = 1 << 0, 1 << 1, 1 << 3
STRIDED = 1 << 0
APPEND_LATENT, DYNAMIC_K_SCALES = 1 << 1, 1 << 2
PREPARED_SCHEDULE, PREPARED_TILE_MAP = 1 << 0, 1 << 1
CUDA = 1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_uint32),
        ("shape", c_int64 * 5),
        ("strides", c_int64 * 5),
        ("options", c_uint32),
        ("reserved", c_uint32),
    ]


class Operands(ctypes.Structure):
    _fields_ = (
        [("size", c_size_t)]
        + [(name, POINTER(Tensor)) for name in ("q", "k", "v", "out", "lse")]
        + [(name, POINTER(Tensor)) for name in ("mask", "alibi_slopes", "sinks", "tree_mask")]
        + [(name, POINTER(Tensor)) for name in ("kv_lens", "q_offsets", "cu_seqlens_q", "cu_seqlens_k", "block_table")]
        + [("options", c_uint32), ("scale", c_float), ("softcap", c_float), ("chunk", c_uint32)]
        + [("window_left", c_int64), ("window_right", c_int64), ("q_offset", c_int64)]
        + [(name, POINTER(Tensor)) for name in ("k_scales", "v_scales", "key_indices", "key_counts", "key_offsets")]
        + [("key_offset", c_int64), ("key_stride", c_int64)]
        + [(name, POINTER(Tensor)) for name in ("prefix_groups", "prefix_lens")]
        + [(name, POINTER(Tensor)) for name in ("page_indices", "page_list_lens", "page_numbers")]
        + [(name, POINTER(Tensor)) for name in ("second_k", "second_v", "second_k_scales", "second_v_scales")]
        + [(name, POINTER(Tensor)) for name in ("second_indices", "second_counts", "rotary_k")]
    )


class Problem(ctypes.Structure):
    _fields_ = (
        [("size", c_size_t)]
        + [(name, c_int64) for name in ("batch", "query_heads", "kv_heads", "head_dim", "value_dim", "query_len", "kv_len")]
        + [(name, c_int64) for name in ("query_rows", "block_size", "window_left", "window_right")]
        + [("dtype", c_int32), ("out_dtype", c_int32), ("mask_dtype", c_int32), ("options", c_uint32)]
        + [("chunk", c_uint32), ("reserved", c_uint32), ("key_dtype", c_int32), ("value_dtype", c_int32)]
        + [("list_len", c_int64), ("key_stride", c_int64), ("prefix_groups", c_int64), ("second_list_len", c_int64)]
        + [("rotary_dim", c_int64)]
    )


class Append(ctypes.Structure):
    _fields_ = (
        [("size", c_size_t)]
        + [(name, POINTER(Tensor)) for name in ("key", "value", "key_pool", "value_pool", "block_table", "kv_lens")]
        + [(name, POINTER(Tensor)) for name in ("cu_seqlens", "rotary_table", "query")]
        + [("options", c_uint32), ("reserved", c_uint32)]
        + [(name, POINTER(Tensor)) for name in ("k_scales", "v_scales")]
    )


class Merge(ctypes.Structure):
    _fields_ = [("size", c_size_t)] + [(name, POINTER(Tensor)) for name in ("parts", "part_lse", "out", "lse")]


class TileMap(ctypes.Structure):
    _fields_ = [(name, c_size_t) for name in ("size", "at", "bytes")] + [
        (name, c_int64) for name in ("batch", "heads", "row_blocks", "key_tiles", "block_rows", "tile_keys")
    ]


class BlockCopy(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("from_block", "to_block", "slots")]


class BlockCopies(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("pools", POINTER(POINTER(Tensor))),
        ("pool_count", c_size_t),
        ("copies", POINTER(BlockCopy)),
        ("copy_count", c_size_t),
    ]


class Device(ctypes.Structure):
    _fields_ = [
        ("size", c_size_t),
        ("kind", c_int32),
        ("ordinal", c_int32),
        ("context", c_void_p),
        ("machine", c_char_p),
        ("threads", c_uint32),
        ("reserved", c_uint32),
        ("executor", c_void_p),
        ("executor_data", c_void_p),
    ]


def load(path):
    regard = ctypes.CDLL(path)
    signatures = {
        "regard_version": (c_char_p, []),
        "regard_abi_version": (c_uint32, []),
        "regard_last_error": (c_char_p, []),
        "regard_machine_facts": (c_char_p, [POINTER(Device)]),
        "regard_can_implement": (c_int32, [POINTER(Problem), POINTER(Device), POINTER(c_char_p)]),
        "regard_plan_for": (c_int32, [POINTER(Operands), POINTER(Device), POINTER(c_void_p)]),
        "regard_plan_destroy": (None, [c_void_p]),
        "regard_plan_workspace_bytes": (c_size_t, [c_void_p]),
        "regard_plan_zeroed_bytes": (c_size_t, [c_void_p]),
        "regard_plan_load": (c_int32, [c_void_p]),
        "regard_plan_explain": (c_char_p, [c_void_p]),
        "regard_device_use_archive": (c_int32, [POINTER(Device), c_char_p]),
        "regard_device_save_archive": (c_int32, [POINTER(Device), c_char_p, POINTER(c_size_t)]),
        "regard_append_run": (c_int32, [POINTER(Append), POINTER(Device), c_void_p]),
        "regard_merge_run": (c_int32, [POINTER(Merge), POINTER(Device), c_void_p]),
        "regard_plan_run_prepared": (c_int32, [c_void_p, POINTER(Operands), c_void_p, c_size_t, c_void_p, c_uint32]),
        "regard_plan_tile_map": (c_int32, [c_void_p, POINTER(Operands), POINTER(TileMap)]),
        "regard_copy_blocks": (c_int32, [POINTER(BlockCopies), POINTER(Device), c_void_p]),
    }
    for name in ("run", "schedule", "run_scheduled", "map_mask", "run_mapped"):
        signatures[f"regard_plan_{name}"] = (c_int32, [c_void_p, POINTER(Operands), c_void_p, c_size_t, c_void_p])
    for name, (result, arguments) in signatures.items():
        function = getattr(regard, name)
        function.restype, function.argtypes = result, arguments
    return regard


class Host:
    """Operands where Python has them."""

    device = None

    def __init__(self):
        # C has their addresses only.
        self.operands = []

    def put(self, values):
        self.operands.append(values)
        return values.buffer_info()[0]

    def fetch(self, values, address):
        pass

    def fill(self, address, byte, size):
        ctypes.memset(address, byte, size)

    def workspace(self, size, zeroed):
        self.kept = (ctypes.c_uint8 * size)()
        return ctypes.addressof(self.kept)


def skip(regard):
    """Reports a test that cannot run on a GPU; fails if a GPU is required."""
    reason = regard.regard_last_error().decode()
    assert "REGARD_CUDA_REQUIRED" not in os.environ, f"REGARD_CUDA_REQUIRED is set: {reason}"
    print(f"SKIPPED: on a GPU: {reason}")


class Cuda:
    """Operands in the memory of the first GPU, by the driver's own calls."""

    def __init__(self):
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.device = ctypes.pointer(Device(size=ctypes.sizeof(Device), kind=CUDA))
        context = c_void_p()
        self.call("cuInit", c_uint32(0))
        self.call("cuDevicePrimaryCtxRetain", byref(context), c_int32(0))
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        status = getattr(self.driver, name)(*arguments)
        assert status == 0, f"{name}: {status}"

    def allocate(self, size):
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), c_size_t(size))
        return address.value

    def put(self, values):
        address, length = values.buffer_info()
        size = length * values.itemsize
        place = self.allocate(size)
        self.call("cuMemcpyHtoD_v2", c_uint64(place), c_void_p(address), c_size_t(size))
        return place

    def fetch(self, values, address):
        place, length = values.buffer_info()
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", c_void_p(place), c_uint64(address), c_size_t(length * values.itemsize))

    def fill(self, address, byte, size):
        self.call("cuMemsetD8_v2", c_uint64(address), ctypes.c_ubyte(byte), c_size_t(size))

    def workspace(self, size, zeroed):
        place = self.allocate(max(size, 1))
        self.call("cuMemsetD8_v2", c_uint64(place), ctypes.c_ubyte(0), c_size_t(zeroed))
        return place


def tensor(memory, values, *shape):
    """A contiguous tensor over an array of floats, of integers of 32 or 8 bits or of booleans (bytes), in that memory."""
    assert len(values) == math.prod(shape)
    dtype = {"f": F32, "i": I32, "b": I8, "B": BOOL}[values.typecode]
    return ctypes.pointer(Tensor(memory.put(values), dtype, len(shape), (c_int64 * 5)(*shape)))


def expanded(memory, values, *shape):
    """The one element of an array, seen at every index of a shape: what torch's `expand` makes."""
    assert len(values) == 1
    view = tensor(memory, values, 1)
    view.contents.rank, view.contents.options = len(shape), STRIDED
    view.contents.shape = (c_int64 * 5)(*shape)
    return view


def naive(q, k, v, heads, kv_heads, dim, kv_len, window, cap):
    """Row i of every head, causal with the queries last, in float64. q is [rows, heads, dim], k and v [keys, kv_heads, dim]."""
    rows = len(q) // (heads * dim)
    out = []
    for i in range(rows):
        position = kv_len - rows + i
        for h in range(heads):
            at = lambda j: (j * kv_heads + h // (heads // kv_heads)) * dim
            query = q[(i * heads + h) * dim :][:dim]
            seen = range(max(0, position - window), position + 1)
            dots = [math.fsum(a * b for a, b in zip(query, k[at(j) : at(j) + dim])) for j in seen]
            weights = [math.exp(cap * math.tanh(dot / math.sqrt(dim) / cap)) for dot in dots]
            for d in range(dim):
                out.append(math.fsum(w * v[at(j) + d] for w, j in zip(weights, seen)) / math.fsum(weights))
    return out


def attend(regard, memory):
    """3 new tokens against 50 keys in a cache of 64, 6 query heads over 2 key/value heads, head dim 24."""
    rows, heads, kv_heads, dim, slots, kv_len, window, cap = 3, 6, 2, 24, 64, 50, 20, 5.0
    random.seed(1)
    noise = lambda count: array.array("f", (random.gauss(0, 1) for _ in range(count)))
    q, k, v = noise(rows * heads * dim), noise(slots * kv_heads * dim), noise(slots * kv_heads * dim)
    out = array.array("f", [math.nan] * (rows * heads * dim))
    kv_lens = array.array("i", [kv_len])
    operands = Operands(
        size=ctypes.sizeof(Operands),
        q=tensor(memory, q, 1, rows, heads, dim),
        k=tensor(memory, k, 1, slots, kv_heads, dim),
        v=tensor(memory, v, 1, slots, kv_heads, dim),
        out=tensor(memory, out, 1, rows, heads, dim),
        kv_lens=tensor(memory, kv_lens, 1),
        options=CAUSAL | WINDOW_LEFT | SOFTCAP,
        softcap=cap,
        window_left=window,
    )
    plan = c_void_p()
    status = regard.regard_plan_for(byref(operands), memory.device, byref(plan))
    if status == REFUSED and memory.device:
        skip(regard)
        return
    assert status == OK, regard.regard_last_error()
    print(regard.regard_plan_explain(plan).decode(), end="")
    assert regard.regard_plan_load(plan) == OK, regard.regard_last_error()
    # Archives of compiled pipelines are Metal's.
    pipelines = c_size_t(7)
    assert regard.regard_device_use_archive(memory.device, b"no such file") == OK
    assert regard.regard_device_save_archive(memory.device, b"no such folder/file", byref(pipelines)) == OK
    assert pipelines.value == 0
    size = regard.regard_plan_workspace_bytes(plan)
    workspace = memory.workspace(size, regard.regard_plan_zeroed_bytes(plan))
    run = lambda bytes: regard.regard_plan_run(plan, byref(operands), workspace, bytes, None)
    assert run(size) == OK, regard.regard_last_error()
    memory.fetch(out, operands.out.contents.data)
    expected = naive(q, k, v, heads, kv_heads, dim, kv_len, window, cap)
    worst = max(abs(a - b) for a, b in zip(out, expected))
    print(f"largest difference from the naive computation: {worst:.2e}")
    assert worst < 1e-5

    if size > 0:
        assert run(size - 1) == ARGUMENT
        assert b"`workspace` is" in regard.regard_last_error()
    if memory.device is None:
        kv_lens[0] = slots + 1
        assert run(size) == ARGUMENT
        assert b"`kv_lens[0]` is 65; allowed: 0..=64" in regard.regard_last_error()
    regard.regard_plan_destroy(plan)


def broadcast(regard, memory):
    """A mask whose strides are all 0 is one number for all, and lengths whose stride is 0 are an error: neither is taken for contiguous."""
    noise = lambda count: array.array("f", (random.gauss(0, 1) for _ in range(count)))
    batch, rows, heads, dim = 2, 3, 4, 8
    q, k, v = noise(batch * rows * heads * dim), noise(batch * heads * dim), noise(batch * heads * dim)
    out, lse = array.array("f", [math.nan] * len(q)), array.array("f", [math.nan] * (batch * rows * heads))
    # One key: the output is its value, for any bias of the mask.
    operands = Operands(
        size=ctypes.sizeof(Operands),
        q=tensor(memory, q, batch, rows, heads, dim),
        k=tensor(memory, k, batch, 1, heads, dim),
        v=tensor(memory, v, batch, 1, heads, dim),
        out=tensor(memory, out, batch, rows, heads, dim),
        lse=tensor(memory, lse, batch, rows, heads),
    )

    def run():
        plan = c_void_p()
        status = regard.regard_plan_for(byref(operands), memory.device, byref(plan))
        if status != OK:
            return status
        size = regard.regard_plan_workspace_bytes(plan)
        workspace = memory.workspace(size, regard.regard_plan_zeroed_bytes(plan))
        status = regard.regard_plan_run(plan, byref(operands), workspace, size, None)
        memory.fetch(lse, operands.lse.contents.data)
        regard.regard_plan_destroy(plan)
        return status

    assert run() == OK, regard.regard_last_error()
    plain = list(lse)
    bias = array.array("f", [-3.5])
    operands.mask = expanded(memory, bias, batch, heads, rows, 1)
    assert run() == OK, regard.regard_last_error()
    worst = max(abs(a - 3.5 - b) for a, b in zip(plain, lse))
    assert worst < 1e-5, worst

    # Two lengths over one number: as a contiguous vector the second would be out of bounds.
    kv_lens = array.array("i", [1])
    operands.kv_lens = expanded(memory, kv_lens, batch)
    assert run() == ARGUMENT
    assert b"`kv_lens` is a view with strides [0]; allowed: an innermost stride of 1" in regard.regard_last_error()
    operands.kv_lens.contents.options = 0
    operands.kv_lens.contents.strides[0] = 1
    assert run() == ARGUMENT
    assert b"`kv_lens.strides` is [1] without REGARD_STRIDED" in regard.regard_last_error()


def step(regard, memory, rows):
    """The schedule and the tile map of a mask, which the layers of a step share: runs that read them give the bits of a plain run."""
    heads, kv_heads, dim, slots, kv_len = 4, 2, 16, 600, 550
    random.seed(2)
    noise = lambda count: array.array("f", (random.gauss(0, 1) for _ in range(count)))
    q, k, v = noise(rows * heads * dim), noise(slots * kv_heads * dim), noise(slots * kv_heads * dim)
    # Entire tiles hidden, entire tiles kept, and others.
    kept = lambda row, key: 0 if key < 260 else 1 if key < 520 else (row + key) % 3 > 0
    mask = array.array("B", (int(kept(row, key)) for row in range(rows) for key in range(slots)))
    out = array.array("f", [math.nan] * len(q))
    operands = Operands(
        size=ctypes.sizeof(Operands),
        q=tensor(memory, q, 1, rows, heads, dim),
        k=tensor(memory, k, 1, slots, kv_heads, dim),
        v=tensor(memory, v, 1, slots, kv_heads, dim),
        out=tensor(memory, out, 1, rows, heads, dim),
        mask=tensor(memory, mask, 1, 1, rows, slots),
        kv_lens=tensor(memory, array.array("i", [kv_len]), 1),
    )
    plan = c_void_p()
    status = regard.regard_plan_for(byref(operands), memory.device, byref(plan))
    if status == REFUSED and memory.device:
        skip(regard)
        return
    assert status == OK, regard.regard_last_error()
    assert regard.regard_plan_load(plan) == OK, regard.regard_last_error()
    size = regard.regard_plan_workspace_bytes(plan)
    workspace = memory.workspace(size, regard.regard_plan_zeroed_bytes(plan))
    call = lambda name, *more, size=size: getattr(regard, f"regard_plan_{name}")(plan, byref(operands), workspace, size, None, *more)

    def result(name, *more):
        memory.fill(operands.out.contents.data, 0xFF, len(out) * out.itemsize)
        assert call(name, *more) == OK, regard.regard_last_error()
        memory.fetch(out, operands.out.contents.data)
        return out.tobytes()

    plain = result("run")
    assert call("schedule") == OK and call("map_mask") == OK, regard.regard_last_error()
    for layer in range(2):
        assert result("run_scheduled") == plain
        assert result("run_mapped") == plain
        assert result("run_prepared", PREPARED_SCHEDULE | PREPARED_TILE_MAP) == plain
    assert result("run_prepared", 0) == plain

    place = TileMap(size=ctypes.sizeof(TileMap))
    assert regard.regard_plan_tile_map(plan, byref(operands), byref(place)) == OK, regard.regard_last_error()
    # Few rows have none on a GPU.
    assert place.bytes == place.batch * place.heads * place.row_blocks * place.key_tiles
    assert place.bytes > 0 or (memory.device and rows == 1)
    if place.bytes > 0:
        assert place.at + place.bytes <= size and place.key_tiles >= 2
        # Nothing is known of any tile; then all are hidden.
        memory.fill(workspace + place.at, 2, place.bytes)
        result("run_mapped")
        whole = array.array("f", plain)
        assert max(abs(a - b) for a, b in zip(out, whole)) < 1e-5
        memory.fill(workspace + place.at, 0, place.bytes)
        assert result("run_mapped") != plain, "the caller's map is not read"

    assert call("run_prepared", 4) == ARGUMENT
    assert b"`prepared` is 0x4" in regard.regard_last_error()
    for name in ("schedule", "map_mask", "run_mapped"):
        if name != "schedule" or memory.device:
            assert call(name, size=size - 1) == ARGUMENT
            assert b"`workspace` is" in regard.regard_last_error()
    place.size = 7
    assert regard.regard_plan_tile_map(plan, byref(operands), byref(place)) == ARGUMENT
    assert b"`map.size` is 7" in regard.regard_last_error()
    regard.regard_plan_destroy(plan)


def append(regard, memory):
    """One new token for each of two sequences of a cache of 3 blocks of 4 slots: token 4 of the first, token 1 of the second."""
    key, value = (array.array("f", (base + i for i in range(2 * 8))) for base in (100, 200))
    pools = [array.array("f", [0] * (3 * 4 * 8)) for _ in range(2)]
    tensors = [tensor(memory, pool, 3, 4, 1, 8) for pool in pools]
    request = Append(
        size=ctypes.sizeof(Append),
        key=tensor(memory, key, 2, 1, 8),
        value=tensor(memory, value, 2, 1, 8),
        key_pool=tensors[0],
        value_pool=tensors[1],
        block_table=tensor(memory, array.array("i", [2, 0, 1, -1]), 2, 2),
        kv_lens=tensor(memory, array.array("i", [5, 2]), 2),
    )
    status = regard.regard_append_run(byref(request), memory.device, None)
    if status == REFUSED:
        skip(regard)
        return
    assert status == OK, regard.regard_last_error()
    for new, pool, written in zip((key, value), pools, tensors):
        memory.fetch(pool, written.contents.data)
        slots = [list(pool[slot * 8 :][:8]) for slot in range(3 * 4)]
        expected = [[0.0] * 8 for _ in slots]
        # Block 0, slot 0; and block 1, slot 1.
        expected[0], expected[5] = list(new[:8]), list(new[8:])
        assert slots == expected, slots


def append_latent(regard, memory):
    """The same tokens in a latent cache: one pool, and the last 2 of 8 dims rotated by a quarter turn per position."""
    key, query = (array.array("f", (base + i for i in range(2 * 8))) for base in (100, 200))
    pool = array.array("f", [0] * (3 * 4 * 8))
    turns = array.array("f", (x for angle in range(8) for x in ((1, 0), (0, 1), (-1, 0), (0, -1))[angle % 4]))
    written, written_query = tensor(memory, pool, 3, 4, 1, 8), tensor(memory, query, 2, 1, 8)
    request = Append(
        size=ctypes.sizeof(Append),
        key=tensor(memory, key, 2, 1, 8),
        key_pool=written,
        block_table=tensor(memory, array.array("i", [2, 0, 1, -1]), 2, 2),
        kv_lens=tensor(memory, array.array("i", [5, 2]), 2),
        rotary_table=tensor(memory, turns, 8, 2),
        query=written_query,
        options=APPEND_LATENT,
    )

    def rotated(row, position):
        (x, y), (cos, sin) = row[6:], turns[2 * position :][:2]
        return [*row[:6], x * cos - y * sin, y * cos + x * sin]

    # Before the run: it rotates queries in place.
    queries = [rotated(query[:8], 4), rotated(query[8:], 1)]
    assert regard.regard_append_run(byref(request), memory.device, None) == OK, regard.regard_last_error()
    memory.fetch(pool, written.contents.data)
    memory.fetch(query, written_query.contents.data)
    slots = [list(pool[slot * 8 :][:8]) for slot in range(3 * 4)]
    expected = [[0.0] * 8 for _ in slots]
    expected[0], expected[5] = rotated(key[:8], 4), rotated(key[8:], 1)
    assert slots == expected, slots
    assert [list(query[:8]), list(query[8:])] == queries, query


def append_quantized(regard, memory):
    """The same tokens in i8: keys with a scale per token and head that is computed, values with one given scale."""
    key, value = (array.array("f", (base + i for i in range(2 * 8))) for base in (100, 200))
    pools, scales = [array.array("b", [0] * (3 * 4 * 8)) for _ in range(2)], array.array("f", [0] * (3 * 4))
    tensors = [tensor(memory, pool, 3, 4, 1, 8) for pool in pools]
    written_scales, given_scale = tensor(memory, scales, 3, 4, 1), tensor(memory, array.array("f", [2]), 1, 1, 1)
    request = Append(
        size=ctypes.sizeof(Append),
        key=tensor(memory, key, 2, 1, 8),
        value=tensor(memory, value, 2, 1, 8),
        key_pool=tensors[0],
        value_pool=tensors[1],
        block_table=tensor(memory, array.array("i", [2, 0, 1, -1]), 2, 2),
        kv_lens=tensor(memory, array.array("i", [5, 2]), 2),
        k_scales=written_scales,
        v_scales=given_scale,
        options=DYNAMIC_K_SCALES,
    )
    assert regard.regard_append_run(byref(request), memory.device, None) == OK, regard.regard_last_error()
    for pool, written in zip((*pools, scales), (*tensors, written_scales)):
        memory.fetch(pool, written.contents.data)
    for token, slot in enumerate((0, 5)):
        row = key[token * 8 :][:8]
        assert math.isclose(scales[slot], max(row) / 127, rel_tol=1e-6)
        assert list(pools[0][slot * 8 :][:8]) == [round(x / scales[slot]) for x in row]
        # Halves round to even, as Python's round does.
        assert list(pools[1][slot * 8 :][:8]) == [round(x / 2) for x in value[token * 8 :][:8]]
    assert sum(1 for scale in scales if scale) == 2, scales


def merge(regard, memory):
    """Two parts of two rows: the first row's weigh 1 and 3, of the second row only the second part has seen a key."""
    out, lse = array.array("f", [0] * 8), array.array("f", [0] * 2)
    parts = array.array("f", [1, 2, 3, 4, math.nan, 0, 0, 0, 5, 6, 7, 8, 9, 10, 11, 12])
    part_lse = array.array("f", [0, -math.inf, math.log(3), 2])
    to, to_lse = tensor(memory, out, 2, 4), tensor(memory, lse, 2)
    request = Merge(
        size=ctypes.sizeof(Merge),
        parts=tensor(memory, parts, 2, 2, 4),
        part_lse=tensor(memory, part_lse, 2, 2),
        out=to,
        lse=to_lse,
    )
    status = regard.regard_merge_run(byref(request), memory.device, None)
    assert status == OK, regard.regard_last_error()
    memory.fetch(out, to.contents.data)
    memory.fetch(lse, to_lse.contents.data)
    for found, expected in zip([*out, *lse], [4, 5, 6, 7, 9, 10, 11, 12, math.log(4), 2]):
        assert math.isclose(found, expected, rel_tol=1e-6), (found, expected)


def copy_blocks(regard, memory):
    """A block to another, part of that to a third, in a pool by slots and heads and one by heads and slots."""
    blocks, slots, heads, dim = 4, 4, 2, 8
    data = [array.array("f", range(blocks * slots * heads * dim)) for _ in range(2)]
    pools = [tensor(memory, values, blocks, slots, heads, dim) for values in data]
    strides = [heads * slots * dim, dim, slots * dim, 1]
    pools[1].contents.options, pools[1].contents.strides = STRIDED, (c_int64 * 5)(*strides)
    listed = [(0, 2, 4), (2, 3, 3)]
    request = BlockCopies(
        size=ctypes.sizeof(BlockCopies),
        pools=(POINTER(Tensor) * 2)(*pools),
        pool_count=2,
        copies=(BlockCopy * 2)(*listed),
        copy_count=2,
    )
    status = regard.regard_copy_blocks(byref(request), memory.device, None)
    assert status == OK, regard.regard_last_error()
    for pool, values, (slot, head) in zip(pools, data, [(heads * dim, dim), (dim, slots * dim)]):
        expected = array.array("f", range(len(values)))
        for from_block, to_block, count in listed:
            for s in range(count):
                for h in range(heads):
                    at, to = (block * slots * heads * dim + s * slot + h * head for block in (from_block, to_block))
                    expected[to : to + dim] = expected[at : at + dim]
        memory.fetch(values, pool.contents.data)
        assert values == expected


def main(path):
    regard = load(path)
    assert regard.regard_abi_version() == 2
    assert regard.regard_machine_facts(None).startswith(b"host (CPU")
    attend(regard, Host())
    broadcast(regard, Host())
    step(regard, Host(), 1)
    step(regard, Host(), 70)
    append(regard, Host())
    append_latent(regard, Host())
    append_quantized(regard, Host())
    merge(regard, Host())
    copy_blocks(regard, Host())

    problem = Problem(ctypes.sizeof(Problem), 1, 32, 8, 128, 0, 1, 4096, dtype=F32)
    reason = c_char_p()
    assert regard.regard_can_implement(byref(problem), None, byref(reason)) == OK and reason.value is None
    device = Device(size=ctypes.sizeof(Device), kind=CUDA, ordinal=1000)
    assert regard.regard_can_implement(byref(problem), byref(device), byref(reason)) != OK
    print(f"as it should: {reason.value.decode()}")

    device.ordinal = 0
    facts = regard.regard_machine_facts(byref(device))
    if facts is None:
        skip(regard)
    else:
        print(facts.decode())
        attend(regard, Cuda())
        broadcast(regard, Cuda())
        step(regard, Cuda(), 1)
        step(regard, Cuda(), 70)
        append(regard, Cuda())
        append_latent(regard, Cuda())
        if "REGARD_STAND_IN" in os.environ:
            print("SKIPPED: appending in i8: the stand-in driver does not quantize")
        else:
            append_quantized(regard, Cuda())
        merge(regard, Cuda())
        copy_blocks(regard, Cuda())
    print("all as expected")


if __name__ == "__main__":
    main(sys.argv[1])
