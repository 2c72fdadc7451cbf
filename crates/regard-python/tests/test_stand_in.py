"""Streams, devices and workspaces of GPU calls, over the stand-in for the driver (scripts/python.sh)."""

import libraries
import numpy as np
import pytest
import reference
import regard

pytestmark = pytest.mark.skipif(not libraries.STAND_IN, reason="scripts/python.sh runs these over a stand-in for the driver")


@pytest.fixture
def qkv(normal):
    return normal(2, 3, 4, 64), normal(2, 9, 2, 64), normal(2, 9, 2, 64)


def refused(words, *arrays, call=regard.attention, **options):
    with pytest.raises(regard.ArgumentError) as error:
        call(*arrays, **options)
    assert str(error.value).startswith(words), error.value


def test_mixed_devices(qkv):
    q, k, v = qkv
    gpu = libraries.Interface
    refused("`k` is on cpu; allowed: cuda:0, as q", gpu(q), k, gpu(v))
    refused("`v` is on cuda:0; allowed: cpu, as q", q, k, gpu(v))
    refused("`kv_lens` is on cpu; allowed: cuda:0, as q", gpu(q), gpu(k), gpu(v), kv_lens=[1, 2])
    refused("`out` is on cpu; allowed: cuda:0, as q", gpu(q), gpu(k), gpu(v), out=np.empty_like(q))
    plan = regard.Plan(q, k, v)
    refused("`q` is on cuda:0; allowed: cpu, as planned", gpu(q), gpu(k), gpu(v), gpu(q.copy()), call=plan.run)
    plan = regard.Plan(gpu(q), gpu(k), gpu(v))
    refused("`q` is on cpu; allowed: cuda:0, as planned", q, k, v, q.copy(), call=plan.run)


def test_streams(qkv):
    q, k, v = map(libraries.Interface, qkv)
    out = libraries.Interface(np.empty_like(qkv[0]))
    words = "`stream` is of another device; allowed: a stream of cuda:0"
    refused(words, q, k, v, stream=0x1235)  # Odd: of another context, in the stand-in.
    plan = regard.Plan(q, k, v, causal=True)
    refused(words, q, k, v, out, call=plan.run, stream=0x1235)
    refused("`stream` is of the type str", q, k, v, stream="fast")

    class Stream:
        def __init__(self, **names):
            self.__dict__.update(names)

    given = [0, 1, 2, 0x1234, Stream(cuda_stream=0x1234), Stream(ptr=0x1236), Stream(__cuda_stream__=lambda: (0, 0x1238))]
    for stream in given:
        plan.prepare(stream=stream)
        out.array.fill(np.nan)
        plan.run(q, k, v, out, stream=stream)
        reference.agrees(out.array, *qkv, causal=True)


def test_types_and_alignment(qkv):
    q, k, v = qkv
    gpu = libraries.Interface
    refused("`q` is of type <f8", gpu(q.astype(np.float64)), gpu(k), gpu(v))
    refused("`kv_lens` is of type i64", gpu(q), gpu(k), gpu(v), kv_lens=gpu(np.array([1, 2])))
    shifted = np.zeros(q.nbytes + 2, np.uint8)[2:].view(np.uint8)
    odd = gpu(q)
    odd.__cuda_array_interface__["data"] = (shifted.ctypes.data, False)
    refused("`q.address` is 0x", odd, gpu(k), gpu(v))
    fixed = q.copy()
    fixed.flags.writeable = False
    refused("`out` is read-only", gpu(q), gpu(k), gpu(v), out=gpu(fixed))


def test_workspaces_grow_and_stay(normal):
    """One workspace per stream serves plans of any size, in any order."""
    gpu = libraries.Interface
    for keys in (9, 5000, 17, 20000, 9):
        q, k, v = normal(1, 1, 4, 64), normal(1, keys, 2, 64), normal(1, keys, 2, 64)
        out = np.full_like(q, np.nan)
        regard.attention(gpu(q), gpu(k), gpu(v), out=gpu(out), stream=0x2000)
        reference.agrees(out, q, k, v)


def test_a_step_has_a_workspace_of_its_own(normal):
    """A schedule and a tile map are of one plan and stream, for the shapes that they were made for."""
    gpu = libraries.Interface
    q, k, v = normal(1, 2, 4, 64), normal(1, 700, 2, 64), normal(1, 700, 2, 64)
    lens, out = gpu(np.array([650], np.int32)), np.full_like(q, np.nan)
    arrays, stream = (gpu(q), gpu(k), gpu(v)), 0x3000
    plan = regard.Plan(*arrays, kv_lens=lens)

    def run(out=out, **options):
        plan.run(*arrays, gpu(out), kv_lens=lens, **options)

    before = "`scheduled` is True; allowed: False, before schedule of this plan on this stream"
    refused(before, call=run, stream=stream, scheduled=True)
    plan.schedule(*arrays, gpu(out), kv_lens=lens, stream=stream)
    run(stream=stream, scheduled=True)
    reference.agrees(out, q, k, v, kv_lens=[650])
    # The stream's workspace is another one: it may grow, and be full of other things.
    large = normal(1, 1, 4, 64), normal(1, 30000, 2, 64), normal(1, 30000, 2, 64)
    regard.attention(*map(gpu, large), stream=stream)
    out.fill(np.nan)
    run(stream=stream, scheduled=True)
    reference.agrees(out, q, k, v, kv_lens=[650])
    refused(before, call=run, stream=0x3002, scheduled=True)
    refused("`mapped` is True; allowed: False, before map_mask of this plan", call=run, stream=stream, mapped=True)
    other = "`scheduled` is True, with operands of other shapes; allowed: operands of the shapes that schedule was given"
    small = gpu(q[:, :1].copy()), *arrays[1:], gpu(out[:, :1].copy())
    refused(other, *small, call=plan.run, kv_lens=lens, stream=stream, scheduled=True)


def test_results_without_a_framework_are_buffers(qkv):
    q, k, v = map(libraries.Interface, qkv)
    out = regard.attention(q, k, v)
    assert isinstance(out, regard.Buffer) and out.device == "cuda:0" and out.__dlpack_device__() == (2, 0)
    assert not hasattr(out, "__array_interface__")
