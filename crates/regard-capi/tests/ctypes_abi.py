"""The C interface from Python, with nothing but the standard library: one problem against naive maths, an error, a refusal.

    python3 ctypes_abi.py PATH_OF_THE_SHARED_LIBRARY
"""

import array
import ctypes
import math
import random
import sys
from ctypes import POINTER, byref, c_char_p, c_float, c_int32, c_int64, c_size_t, c_uint32, c_void_p

OK, ARGUMENT, REFUSED = 0, 1, 2
F32, I32 = 1, 4
CAUSAL, WINDOW_LEFT, SOFTCAP = 1 << 0, 1 << 1, 1 << 3
CUDA = 1


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("dtype", c_int32),
        ("rank", c_uint32),
        ("shape", c_int64 * 5),
        ("strides", c_int64 * 5),
    ]


class Operands(ctypes.Structure):
    _fields_ = (
        [("size", c_size_t)]
        + [(name, POINTER(Tensor)) for name in ("q", "k", "v", "out", "lse")]
        + [(name, POINTER(Tensor)) for name in ("mask", "alibi_slopes", "sinks", "tree_mask")]
        + [(name, POINTER(Tensor)) for name in ("kv_lens", "q_offsets", "cu_seqlens_q", "cu_seqlens_k", "block_table")]
        + [("options", c_uint32), ("scale", c_float), ("softcap", c_float), ("reserved", c_uint32)]
        + [("window_left", c_int64), ("window_right", c_int64), ("q_offset", c_int64)]
    )


class Problem(ctypes.Structure):
    _fields_ = (
        [("size", c_size_t)]
        + [(name, c_int64) for name in ("batch", "query_heads", "kv_heads", "head_dim", "value_dim", "query_len", "kv_len")]
        + [(name, c_int64) for name in ("query_rows", "block_size", "window_left", "window_right")]
        + [("dtype", c_int32), ("out_dtype", c_int32), ("mask_dtype", c_int32), ("options", c_uint32)]
    )


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
        "regard_plan_explain": (c_char_p, [c_void_p]),
        "regard_plan_run": (c_int32, [c_void_p, POINTER(Operands), c_void_p, c_size_t, c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(regard, name)
        function.restype, function.argtypes = result, arguments
    return regard


def tensor(values, *shape):
    """A contiguous tensor over an array of floats or 32-bit integers."""
    address, length = values.buffer_info()
    assert length == math.prod(shape)
    dtype = {"f": F32, "i": I32}[values.typecode]
    return ctypes.pointer(Tensor(address, dtype, len(shape), (c_int64 * 5)(*shape)))


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


def main(path):
    regard = load(path)
    assert regard.regard_abi_version() == 1
    assert regard.regard_machine_facts(None).startswith(b"host (CPU")

    # 3 new tokens against 50 keys in a cache of 64, 6 query heads over 2 key/value heads, head dim 24.
    rows, heads, kv_heads, dim, slots, kv_len, window, cap = 3, 6, 2, 24, 64, 50, 20, 5.0
    random.seed(1)
    noise = lambda count: array.array("f", (random.gauss(0, 1) for _ in range(count)))
    q, k, v = noise(rows * heads * dim), noise(slots * kv_heads * dim), noise(slots * kv_heads * dim)
    out = array.array("f", [math.nan] * (rows * heads * dim))
    kv_lens = array.array("i", [kv_len])
    operands = Operands(
        size=ctypes.sizeof(Operands),
        q=tensor(q, 1, rows, heads, dim),
        k=tensor(k, 1, slots, kv_heads, dim),
        v=tensor(v, 1, slots, kv_heads, dim),
        out=tensor(out, 1, rows, heads, dim),
        kv_lens=tensor(kv_lens, 1),
        options=CAUSAL | WINDOW_LEFT | SOFTCAP,
        softcap=cap,
        window_left=window,
    )
    plan = c_void_p()
    assert regard.regard_plan_for(byref(operands), None, byref(plan)) == OK, regard.regard_last_error()
    print(regard.regard_plan_explain(plan).decode(), end="")
    workspace = (ctypes.c_uint8 * regard.regard_plan_workspace_bytes(plan))()
    run = lambda size: regard.regard_plan_run(plan, byref(operands), workspace, size, None)
    assert run(len(workspace)) == OK, regard.regard_last_error()
    expected = naive(q, k, v, heads, kv_heads, dim, kv_len, window, cap)
    worst = max(abs(a - b) for a, b in zip(out, expected))
    print(f"largest difference from the naive computation: {worst:.2e}")
    assert worst < 1e-5

    assert run(len(workspace) - 1) == ARGUMENT
    assert b"`workspace` is" in regard.regard_last_error()
    kv_lens[0] = slots + 1
    assert run(len(workspace)) == ARGUMENT
    assert b"`kv_lens[0]` is 65; allowed: 0..=64" in regard.regard_last_error()
    regard.regard_plan_destroy(plan)

    problem = Problem(ctypes.sizeof(Problem), 1, 32, 8, 128, 0, 1, 4096, dtype=F32)
    reason = c_char_p()
    assert regard.regard_can_implement(byref(problem), None, byref(reason)) == OK and reason.value is None
    device = Device(size=ctypes.sizeof(Device), kind=CUDA, ordinal=1000)
    assert regard.regard_can_implement(byref(problem), byref(device), byref(reason)) != OK
    print(f"as it should: {reason.value.decode()}")


if __name__ == "__main__":
    main(sys.argv[1])
