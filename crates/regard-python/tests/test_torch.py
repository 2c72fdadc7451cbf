"""`regard.torch`: operators of PyTorch that can be traced and compiled."""

import pytest
import regard

torch = pytest.importorskip("torch")
import libraries  # noqa: E402
import regard.torch  # noqa: E402


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        libraries.skip("PyTorch sees no NVIDIA GPU", of_gpu=True)
    return request.param


@pytest.fixture
def qkv(device):
    torch.manual_seed(0)
    return [torch.randn(2, rows, heads, 64, device=device) for rows, heads in ((5, 4), (9, 2), (9, 2))]


def test_the_operators_are_regard(qkv):
    options = dict(causal=True, window=(6, None), softcap=4.0, scale=0.2)
    want, want_lse = regard.attention(*qkv, lse=True, **options)
    assert torch.equal(regard.torch.attention(*qkv, **options), want)
    out, lse = regard.torch.attention_with_lse(*qkv, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def test_opcheck(qkv):
    """PyTorch's own checks of an operator: schema, fake tensors, autograd registration."""
    mask = torch.ones(2, 1, 5, 9, dtype=torch.bool, device=qkv[0].device)
    for operator in (torch.ops.regard.attention, torch.ops.regard.attention_with_lse):
        torch.library.opcheck(operator.default, tuple(qkv), {"causal": True, "mask": mask})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_whole(qkv, dtype):
    """`fullgraph=True` refuses graph breaks. Shapes change between calls."""
    q, k, v = (x.to(dtype) for x in qkv)

    def layer(q, k, v, weight):
        out = regard.torch.attention(q * 1.5, k, v, causal=True)
        return out.flatten(-2) @ weight

    weight = torch.randn(256, 8, device=q.device, dtype=dtype)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for rows in (5, 3, 1):
            arguments = q[:, :rows], k, v, weight
            assert torch.equal(compiled(*arguments), layer(*arguments))


def test_gradients_are_refused(qkv):
    q, k, v = qkv
    q.requires_grad_()
    out = regard.torch.attention(q, k, v)
    with pytest.raises(RuntimeError, match="inference only, no gradients"):
        out.sum().backward()
    out, lse = regard.torch.attention_with_lse(q, k, v)
    with pytest.raises(RuntimeError, match="inference only, no gradients"):
        lse.sum().backward()
    # Parameters as keys, under no_grad: nothing to refuse.
    with torch.no_grad():
        regard.torch.attention(q, torch.nn.Parameter(k), v)


def test_errors_have_the_same_words(qkv):
    q, k, v = qkv
    with pytest.raises(regard.ArgumentError, match="`k` is of type i32; allowed: f32 or f16"):
        regard.torch.attention(q, k.int(), v)


def test_a_compiled_step_writes_its_cache(device):
    """Append and attention in one graph: pools are written in place, codes and their scales included."""
    torch.manual_seed(1)
    table, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 0], [1, -1]], [6, 3]))

    def step(q, k, v, pools, scales):
        names = dict(zip(("k_scales", "v_scales"), scales))
        computed = dict(dynamic_k_scales=True, dynamic_v_scales=True) if scales else {}
        regard.torch.append(k.flatten(0, 1), v.flatten(0, 1), *pools, table, lens, **names, **computed)
        return regard.torch.attention(q, *pools, block_table=table, kv_lens=lens, causal=True, **names)

    for dtype in (torch.float32, torch.int8):
        q, k, v = (torch.randn(2, 3, heads, 64, device=device) for heads in (4, 2, 2))
        runs = []
        for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
            pools = [torch.zeros(3, 4, 2, 64, dtype=dtype, device=device) for _ in "kv"]
            scales = [torch.zeros(3, 4, 2, device=device) for _ in "kv"] if dtype == torch.int8 else []
            with torch.no_grad():
                out = function(q, k, v, pools, scales)
            assert pools[0].any() and all(scale.any() for scale in scales)
            runs.append([out, *pools, *scales])
        assert all(torch.equal(a, b) for a, b in zip(*runs))
    pools = [torch.zeros(3, 4, 2, 64, device=device) for _ in "kv"]
    arguments = [k.flatten(0, 1), v.flatten(0, 1), pools, "key_pool value_pool", table, lens]
    torch.library.opcheck(torch.ops.regard.append.default, tuple(arguments))
