"""An NVIDIA GPU through PyTorch: FlashAttention and cuDNN as second oracles, streams, graphs, lifetimes.

Skipped without one; `REGARD_CUDA_REQUIRED=1` makes that a failure."""

import time

import libraries
import numpy as np
import pytest
import regard

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.fixture(autouse=True)
def gpu():
    if not torch.cuda.is_available():
        libraries.skip("PyTorch sees no NVIDIA GPU", of_gpu=True)
    torch.manual_seed(0)


def qkv(batch=2, rows=128, keys=128, heads=8, kv_heads=2, dim=128, dtype=torch.bfloat16, device="cuda"):
    shapes = (rows, heads), (keys, kv_heads), (keys, kv_heads)
    return [torch.randn(batch, n, h, dim, device=device, dtype=dtype) for n, h in shapes]


def exact(q, k, v, causal):
    """f64, the new rows last."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    rows, keys = q.shape[2], k.shape[2]
    mask = torch.ones(rows, keys, dtype=torch.bool, device=q.device).tril(keys - rows) if causal else None
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("rows, keys", [(128, 128), (1000, 1000), (1, 777)])
@pytest.mark.parametrize("dim", [64, 128])
def test_no_further_from_f64_than_its_peers(backend, rows, keys, dim):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = qkv(rows=rows, keys=keys, dim=dim)
    causal = rows == keys
    with sdpa_kernel(getattr(SDPBackend, backend)):
        peer = F.scaled_dot_product_attention(
            *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
        ).transpose(1, 2)
    out = regard.attention(q, k, v, causal=causal)
    right = exact(q, k, v, causal)
    error, theirs = (float((x.double() - right).abs().max()) for x in (out, peer))
    assert error <= 2 * theirs + 2.0**-7 * float(v.abs().max())


def test_the_current_stream():
    """Work before and after a call on one stream of PyTorch needs no synchronization."""
    stream = torch.cuda.Stream()
    q, k, v = qkv(rows=512, keys=512)
    want = regard.attention(q, k, v, causal=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            late = [torch.zeros_like(x) for x in (q, k, v)]
            torch.cuda._sleep(2_000_000)
            for to, x in zip(late, (q, k, v)):
                to.copy_(x)
            out = regard.attention(*late, causal=True)
            copied = out.clone()
    stream.synchronize()
    assert torch.equal(copied, want)


def test_a_given_stream():
    stream = torch.cuda.Stream()
    q, k, v = qkv()
    want = regard.attention(q, k, v)
    torch.cuda.synchronize()
    for given in (stream, stream.cuda_stream):
        out = torch.empty_like(q)
        stream.wait_stream(torch.cuda.current_stream())
        regard.attention(q, k, v, out=out, stream=given)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(out, want)


def test_tensors_freed_while_in_use():
    """Tensors are dropped right after calls that are still queued; their memory is taken again at once."""
    q, k, v = qkv(rows=2048, keys=2048)
    want = regard.attention(q, k, v, causal=True)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for stream in (None, side):
        outs = []
        for _ in range(10):
            copies = [x.clone() for x in (q, k, v)]
            out = torch.empty_like(q)
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            regard.attention(*copies, out=out, causal=True, **({} if stream is None else {"stream": stream}))
            del copies
            # The allocator hands the same memory out if it may.
            for x in (q, k, v):
                torch.full_like(x, float("nan"))
            outs.append(out)
        torch.cuda.synchronize()
        assert all(torch.equal(out, want) for out in outs)


def test_graphs_replay_with_new_contents_and_lengths():
    q, k, v = qkv(rows=1, keys=4096)
    lens = torch.full((2,), 100, dtype=torch.int32, device="cuda")
    plan = regard.Plan(q, k, v, kv_lens=lens, causal=True)
    out, stream = torch.empty_like(q), torch.cuda.Stream()
    plan.prepare(stream=stream)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        plan.run(q, k, v, out, kv_lens=lens)
    for length in (1, 4096, 777):
        lens.fill_(length)
        q.normal_()
        graph.replay()
        right = exact(q, k[:, :length], v[:, :length], causal=False)
        assert float((out.double() - right).abs().max()) <= 2.0**-6 * float(v.abs().max())


def test_an_unprepared_call_can_be_captured():
    q, k, v = qkv(rows=3, keys=2000, dim=96)
    want = None
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            out = regard.attention(q, k, v, causal=True)
    except regard.DriverError as error:
        pytest.fail(f"loading while a stream captures: {error}")
    graph.replay()
    want = regard.attention(q, k, v, causal=True)
    assert torch.equal(out, want)


def test_compiled_with_graphs():
    import regard.torch

    pytest.importorskip("triton")

    def layer(q, k, v):
        return regard.torch.attention(q * 2, k, v, causal=True) + 1

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            q, k, v = qkv()
            torch.testing.assert_close(compiled(q, k, v), layer(q, k, v))


def test_bad_input():
    q, k, v = qkv()
    for words, arrays in (
        ("`k` is on cpu; allowed: cuda:0, as q", (q, k.cpu(), v)),
        ("`v` is on cuda:0; allowed: cpu, as q", (q.cpu(), k.cpu(), v)),
        ("`k` is a view with strides", (q, k.mT.contiguous().mT, v)),
        ("`q` is a tensor that requires grad", (q.clone().requires_grad_(), k, v)),
    ):
        with pytest.raises(regard.ArgumentError) as error:
            regard.attention(*arrays)
        assert str(error.value).startswith(words)


def test_a_second_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    q, k, v = qkv(device="cuda:1")
    with torch.cuda.device(0):
        out = regard.attention(q, k, v)
        assert torch.cuda.current_device() == 0
        torch.zeros(1, device="cuda") + 1
    assert out.device == q.device
    other = torch.cuda.Stream(device="cuda:0")
    with pytest.raises(regard.ArgumentError, match="`stream` is of another device; allowed: a stream of cuda:1"):
        regard.attention(q, k, v, stream=other)


def test_new_arrays_of_jax():
    """Their transfers may be under way when a call begins."""
    library, random = libraries.JaxCuda(), np.random.default_rng(0)
    for _ in range(100):
        q, k = random.standard_normal((2, 3, 6, 64), np.float32), random.standard_normal((2, 11, 1, 64), np.float32)
        found = library.read(regard.attention(library.make(q), library.make(k), None, value_dim=48))
        np.testing.assert_allclose(found, regard.attention(q, k, None, value_dim=48), atol=1e-5)


def test_the_time_of_a_call():
    """The host's time of a planned run; the GPU's time is measured by bench."""
    q, k, v = qkv(batch=1, rows=1, keys=16, heads=2, kv_heads=1, dim=64)
    out, plan = torch.empty_like(q), regard.Plan(q, k, v)
    arguments = [x.transpose(1, 2) for x in (q, k, v)]

    def microseconds(call):
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(100):
                call()
            best = min(best, (time.perf_counter() - start) / 100)
        return best * 1e6

    print(f"\nplanned run: {microseconds(lambda: plan.run(q, k, v, out)):.2f} us")
    print(f"regard.attention: {microseconds(lambda: regard.attention(q, k, v)):.2f} us")
    print(f"PyTorch's SDPA: {microseconds(lambda: F.scaled_dot_product_attention(*arguments, enable_gqa=True)):.2f} us")
