"""`regard.torch`: operators of PyTorch that can be traced and compiled."""

import pytest
import regard

torch = pytest.importorskip("torch")
import libraries  # noqa: E402
import regard.torch  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        libraries.skip("PyTorch sees no NVIDIA GPU", of_gpu=True)
    return request.param


@pytest.fixture(autouse=True)
def compile_anew():
    """The compiler counts how often it compiles a function, over all tests that have it."""
    torch._dynamo.reset()


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


def options_of(device):
    """Options by name, for queries [2, 5, 4, 64] and keys [2, 9, 2, 64]."""

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    tree = [[1, 3, 5, 9, 17]] * 2
    return {
        "mask": {"causal": True, "mask": torch.ones(2, 1, 5, 9, dtype=torch.bool, device=device)},
        "tree": {"tree_mask": ints(*tree).unsqueeze(-1)},
        "window": {"causal": True, "window": (3, None), "chunk": 6},
        "offset": {"causal": True, "q_offset": 2},
        "offsets": {"causal": True, "q_offset": ints(3, 1), "kv_lens": ints(9, 6)},
        "keys of a shard": {"causal": True, "q_offset": 25, "key_offset": 1, "key_stride": 3},
        "keys of shards": {"causal": True, "q_offset": ints(25, 21), "key_offset": ints(1, 4), "key_stride": 3},
        "bounds": {"max_query_len": 7, "max_kv_len": 12},
        "threads": {"threads": 1},
        "layout": {"layout": "bhsd"},
    }


def call_operator(function, arguments, options):
    """The call of PyTorch's dispatcher that a function of regard.torch makes."""
    calls = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "regard":
                calls.append((operator, args, kwargs or {}))
            return operator(*args, **(kwargs or {}))

    with torch.no_grad(), Recorder():
        function(*arguments, **options)
    (call,) = calls
    return call


def check_operator(function, *arguments, **options):
    """PyTorch's own checks of an operator: schema, fake tensors, autograd registration."""
    operator, args, kwargs = call_operator(function, arguments, options)
    torch.library.opcheck(operator, args, kwargs)


@pytest.mark.parametrize("name", options_of("cpu"))
def test_options(qkv, name):
    """The numbers of regard, PyTorch's checks, and the same with `out`."""
    if name == "threads" and qkv[0].is_cuda:
        pytest.skip("threads are of the CPU")
    options = options_of(qkv[0].device)[name]
    if name == "layout":
        qkv = [x.transpose(1, 2) for x in qkv]
    want, want_lse = regard.attention(*qkv, lse=True, **options)
    out, lse = regard.torch.attention_with_lse(*qkv, **options)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
    assert torch.equal(regard.torch.attention(*qkv, **options), want)
    for function in (regard.torch.attention, regard.torch.attention_with_lse):
        check_operator(function, *qkv, **options)
    out, lse = torch.zeros_like(want), torch.zeros_like(want_lse)
    assert regard.torch.attention(*qkv, out=out, **options) is out
    assert torch.equal(out, want)
    new, given = regard.torch.attention_with_lse(*qkv, lse=lse, **options)
    assert given is lse and torch.equal(lse, want_lse) and torch.equal(new, want)
    check_operator(regard.torch.attention, *qkv, out=out, **options)
    check_operator(regard.torch.attention_with_lse, *qkv, out=out, **options)


def test_types_and_shapes_of_results(device):
    """The fake implementation knows what `out_dtype`, `value_dim` and blocks of 32 values give."""
    q, k, v = (torch.randn(2, 5, heads, 64, device=device, dtype=torch.bfloat16) for heads in (4, 2, 2))
    for dtype in (torch.float32, "f32", "float32"):
        assert torch.equal(regard.torch.attention(q, k, v, out_dtype=dtype), regard.attention(q, k, v, out_dtype="f32"))
    blocks = torch.zeros(2, 5, 2, 34, dtype=torch.uint8, device=device)
    calls = {
        torch.float32: ((q, k, v), {"out_dtype": "f32"}),
        torch.bfloat16: ((q, k, None), {"value_dim": 48}),
        torch.float16: ((q.half(), k.half(), blocks), {"v_format": "q8_0"}),
    }
    for dtype, (arguments, options) in calls.items():
        want = regard.attention(*arguments, **options)
        check_operator(regard.torch.attention, *arguments, **options)
        check_operator(regard.torch.attention_with_lse, *arguments, **options)
        # The compiler's shapes and types of the result are those of the result.
        believed = []

        def traced(*arguments):
            out = regard.torch.attention(*arguments, **options)  # noqa: B023
            believed.append((out.shape, out.dtype))  # noqa: B023
            return out

        with torch.no_grad():
            out = torch.compile(traced, fullgraph=True, backend="eager")(*arguments)
        assert torch.equal(out, want) and out.dtype == dtype and believed == [(out.shape, out.dtype)]
    errors = []
    for function in (regard.torch.attention, regard.attention):
        with pytest.raises(regard.ArgumentError, match="`out_dtype` is 'f64'; allowed: ") as error:
            function(q, k, v, out_dtype="f64")
        errors.append((str(error.value), error.value.argument, error.value.found, error.value.allowed))
    assert errors[0] == errors[1]
    with pytest.raises(regard.ArgumentError, match="`out_dtype` is torch.float64"):
        regard.torch.attention(q, k, v, out_dtype=torch.float64)


def test_offsets_that_change_do_not_compile_anew(qkv):
    """Offsets of each sequence are a tensor, so that a step of decode compiles once."""
    counter = CompileCounterWithBackend("aot_eager")

    def step(q, k, v, offsets):
        return regard.torch.attention(q, k, v, causal=True, q_offset=offsets)

    compiled = torch.compile(step, fullgraph=True, backend=counter)
    with torch.no_grad():
        for offsets in ([0, 3], [1, 4], [4, 0]):
            offsets = torch.tensor(offsets, dtype=torch.int32, device=qkv[0].device)
            assert torch.equal(compiled(*qkv, offsets), regard.attention(*qkv, causal=True, q_offset=offsets))
    assert counter.frame_count == 1


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
    part, part_lse = (x.detach()[None].requires_grad_() for x in (out, lse))
    with pytest.raises(RuntimeError, match="inference only, no gradients"):
        regard.torch.merge(part, part_lse)[0].sum().backward()
    # PyTorch registers no backward pass for what is written.
    for call in (
        lambda: regard.torch.attention(q, k, v, out=torch.empty_like(q)),
        lambda: regard.torch.attention_with_lse(q, k, v, lse=torch.empty(2, 5, 4, device=q.device)),
        lambda: regard.torch.merge(part, part_lse, out=torch.empty_like(q)),
    ):
        with pytest.raises(RuntimeError, match="inference only, no gradients"):
            call()
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
    check_operator(regard.torch.append, k.flatten(0, 1), v.flatten(0, 1), *pools, table, lens)
    with pytest.raises(regard.ArgumentError, match="`k_scales` is missing with dynamic_k_scales"):
        regard.torch.append(k.flatten(0, 1), v.flatten(0, 1), *pools, table, lens, dynamic_k_scales=True)


@pytest.mark.parametrize("kv_format", [None, "i8", "mla656"])
def test_a_compiled_step_of_a_latent_cache(device, kv_format):
    """Rows are written and rotated in place, and computed scales are written too."""
    torch.manual_seed(2)
    dim, value_dim = (576, 512) if kv_format == "mla656" else (64, 48)
    table, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 0], [1, -1]], [6, 3]))
    rotary = torch.randn(8, dim - value_dim, device=device)
    key, query = (torch.randn(6, heads, dim, device=device) for heads in (1, 4))

    def step(key, query, pool, scales):
        options = dict(k_scales=scales) if kv_format == "i8" else {}
        options.update(kv_format=kv_format, kv_layout="hnd")
        computed = dict(dynamic_k_scales=True) if kv_format == "i8" else {}
        regard.torch.append_latent(
            key, pool, table, lens, query=query, rotary_table=rotary, interleaved=True, **options, **computed
        )
        q = query.unflatten(0, (2, 3))
        return regard.torch.attention(
            q, pool, None, value_dim=value_dim, block_table=table, kv_lens=lens, causal=True, **options
        )

    runs = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        pool = torch.zeros(3, 1, 4, dim, device=device)
        if kv_format is not None:
            pool = torch.zeros(3, 1, 4, 656 if kv_format == "mla656" else dim, dtype=torch.uint8, device=device)
        scales, written = torch.zeros(3, 1, 4, device=device), query.clone()
        with torch.no_grad():
            out = function(key, written, pool, scales)
        assert pool.any() and not torch.equal(written, query)
        assert scales.any() == (kv_format == "i8")
        runs.append([out, pool, scales, written])
    assert all(torch.equal(a, b) for a, b in zip(*runs))
    if kv_format is None:
        check_operator(regard.torch.append_latent, key, pool, table, lens, kv_layout="hnd")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(qkv, dtype):
    """A prefix and what follows it, in one graph."""
    q, k, v = (x.to(dtype) for x in qkv)

    def layer(q, k, v):
        parts = [regard.torch.attention_with_lse(q, k[:, rows], v[:, rows]) for rows in (slice(0, 4), slice(4, 9))]
        return regard.torch.merge(*(torch.stack(results) for results in zip(*parts)))

    parts = [regard.attention(q, k[:, rows], v[:, rows], lse=True) for rows in (slice(0, 4), slice(4, 9))]
    parts = [torch.stack(results) for results in zip(*parts)]
    want = regard.merge(*parts)
    with torch.no_grad():
        found = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)(q, k, v)
    for results in (found, layer(q, k, v)):
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(results, want))
    out, lse = torch.zeros(q.shape, device=q.device), torch.zeros_like(want[1])
    assert regard.torch.merge(*parts, out=out)[0] is out
    assert torch.equal(out.to(dtype), want[0])
    assert regard.torch.merge(*parts, lse=lse)[1] is lse and torch.equal(lse, want[1])
    check_operator(regard.torch.merge, *parts)
    check_operator(regard.torch.merge, *parts, out=out, lse=lse)
    with pytest.raises(regard.ArgumentError, match="`part_lse` is"):
        regard.torch.merge(parts[0], parts[1][:1])


def test_copy_blocks(device):
    """Copies as a list and as a tensor, which may change without compiling anew."""
    made = [torch.randn(8, 4, 2, 16, device=device), torch.randn(8, 4, 2, device=device)]
    lists = [[(0, 2, 4), (2, 3, 3), (7, 0, 4), (1, 4, 2), (4, 5, 1)], [(5, 1, 2), (1, 6, 1), (7, 0, 4)]]

    def copied(function, copies):
        pools = [pool.clone() for pool in made]
        function(pools, copies)
        return pools

    def step(pools, copies):
        regard.torch.copy_blocks(pools, copies, kv_layout="nhd")

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for copies in lists:
        want = copied(regard.copy_blocks, copies)
        assert all(map(torch.equal, copied(step, copies), want))
        assert all(map(torch.equal, copied(compiled, torch.tensor(copies)), want))
    assert counter.frame_count == 1
    once = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, copied(once, lists[0]), copied(regard.copy_blocks, lists[0])))
    check_operator(regard.torch.copy_blocks, [pool.clone() for pool in made], lists[0])
    assert all(map(torch.equal, copied(step, []), made))
    regard.torch.copy_blocks([], lists[0])
    with pytest.raises(regard.ArgumentError, match=r"`copies\[0\]` is 1 slots of block 0 to block 8"):
        regard.torch.copy_blocks(made, [(0, 8, 1)])


def test_pools_that_are_views_of_one_tensor(device):
    """Keys and values of a cache are often the halves of one tensor."""
    cache = torch.zeros(2, 3, 4, 2, 64, device=device)
    table, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([[2, 0]], [6]))
    key, value = (torch.randn(3, 2, 64, device=device) for _ in "kv")

    def step(cache):
        regard.torch.append(key, value, cache[0], cache[1], table, lens)
        regard.torch.copy_blocks([cache[0], cache[1]], [(0, 1, 4)])

    caches = [cache.clone(), cache.clone()]
    with torch.inference_mode():
        step(caches[0])
    with torch.no_grad():
        torch.compile(step, fullgraph=True, backend="aot_eager")(caches[1])
    assert torch.equal(*caches) and caches[0][:, 1].any() and torch.equal(caches[0][:, 0], caches[0][:, 1])


def test_the_operators_take_what_the_stub_names():
    """Each name of the stub is one of the operator's schema, and the other way round."""
    split = {"window_left": "window", "window_right": "window", "q_offsets": "q_offset", "key_offsets": "key_offset"}
    for name, (added, left_out) in {
        "attention": ({"out", "kv_format"}, set()),
        "attention_with_lse": ({"out", "lse", "kv_format"}, set()),
        "append": ({"query", "key_pool", "value_pool", "kv_format"}, {"written", "names"}),
        "append_latent": ({"query", "key_pool", "kv_format"}, {"written", "names"}),
        "merge": ({"out", "lse"}, set()),
        "copy_blocks": (set(), set()),
    }.items():
        schema = getattr(torch.ops.regard, name).default._schema
        taken = {split.get(argument.name, argument.name) for argument in schema.arguments} - left_out
        assert taken | added == libraries.stub_arguments("torch.pyi", name), name
        assert getattr(regard.torch, name).__doc__
