"""Each wrong input has an error that names the argument, what it was and what is allowed."""

import numpy as np
import pytest
import regard


@pytest.fixture
def qkv(normal):
    return normal(1, 3, 4, 16), normal(1, 5, 2, 16), normal(1, 5, 2, 16)


def refused(words, *arrays, call=regard.attention, **options):
    with pytest.raises(regard.ArgumentError) as error:
        call(*arrays, **options)
    assert str(error.value).startswith(words), error.value
    assert "; allowed: " in str(error.value)
    assert isinstance(error.value, ValueError) and isinstance(error.value, regard.Error)
    return error.value


def test_errors_have_parts(qkv):
    q, k, v = qkv
    error = refused("`k` is of head dim 8; allowed: 16, as q has", q, k[..., :8], v)
    assert (error.argument, error.found, error.allowed) == ("k", "of head dim 8", "16, as q has")


def test_innermost_stride(qkv):
    q, k, v = qkv
    sparse = np.zeros((1, 5, 2, 32), np.float32)[..., ::2]
    refused("`v` is a view with strides [320, 64, 32, 2]; allowed: an innermost stride of 1", q, k, sparse)


def test_innermost_stride_of_torch(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, qkv)
    sparse = torch.zeros(1, 5, 16, 2).transpose(2, 3)
    refused("`k` is a view with strides [160, 32, 1, 2]; allowed: an innermost stride of 1", q, sparse, v)


def test_shapes(qkv):
    q, k, v = qkv
    refused("`q` is of shape [3, 4, 16]", q[0], k, v)
    refused("`q` is of shape [3, 4, 16]; allowed: 4 dimensions, because the layout is \"bhsd\"", q[0], k, v, layout="bhsd")
    refused("`q` is of 6 dimensions; allowed: at most 5", q[None, None], k, v)
    refused("`kv_lens` is of shape [2]", q, k, v, kv_lens=[1, 2])
    refused("`out` is of shape [1, 3, 4, 8]", q, k, v, out=np.zeros((1, 3, 4, 8), np.float32))


def test_types(qkv):
    q, k, v = qkv
    refused("`q` is of type f64; allowed: f32, f16, bf16", q.astype(np.float64), k, v)
    refused("`q` is in another byte order", q.astype(">f4"), k, v)
    refused("`kv_lens` is of type f32; allowed: i32", q, k, v, kv_lens=np.ones(1, np.float32))
    refused("`kv_lens` is a list that is not of 32-bit integers", q, k, v, kv_lens=[1.5])
    refused("`kv_lens` is 4294967296 in one element; allowed: what 32 bits hold", q, k, v, kv_lens=np.array([2**32]))
    refused("`q` is of the type str; allowed: an array of NumPy", "q", k, v)
    refused("`q` is of the type NoneType", None, k, v)


def test_options(qkv):
    q, k, v = qkv
    refused("`window` is 3; allowed: None or (left, right)", q, k, v, window=3)
    refused("`layout` is 'BSHD'; allowed: \"bshd\" or \"bhsd\"", q, k, v, layout="BSHD")
    refused("`softcap` is", q, k, v, softcap=0.0)
    refused("`scale` is 'much'; allowed: a number", q, k, v, scale="much")
    refused("`threads` is 0; allowed: 1 or more", q, k, v, threads=0)
    refused("`out_dtype` is 'f64'", q, k, v, out_dtype="f64")
    refused("`stream` is given; allowed: a stream for GPU tensors only", q, k, v, stream=1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'causel'"):
        regard.attention(q, k, v, causel=True)
    plan = regard.Plan(q, k, v)
    with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
        plan.run(q, k, v, np.empty_like(q), causal=True)


def test_read_only_and_shared_outputs(qkv):
    q, k, v = qkv
    out = np.zeros_like(q)
    out.flags.writeable = False
    refused("`out` is read-only; allowed: memory that can be written", q, k, v, out=out)
    refused("`out` is memory shared with `q`; allowed: memory of its own", q, k, v, out=q)
    # Inputs may be read-only.
    k.flags.writeable = False
    regard.attention(q, k, v)


def test_misaligned(qkv):
    q, k, v = qkv
    bytes_ = np.zeros(q.nbytes + 1, np.uint8)[1:]
    refused("`q` is at 0x", bytes_.view(np.float32).reshape(q.shape), k, v)


def test_gradients(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, qkv)
    q.requires_grad_()
    words = "`q` is a tensor that requires grad; allowed: for inference only"
    refused(words, q, k, v)
    refused("`out` is a tensor that requires grad", k, k, v, out=torch.zeros(1, 5, 2, 16, requires_grad=True))
    with torch.no_grad():
        regard.attention(q, k, v)
    with torch.inference_mode():
        regard.attention(q, k, v)
    regard.attention(q.detach(), k, v)


def test_mixed_libraries_are_fine_on_one_device(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = qkv
    out = regard.attention(torch.from_numpy(q), k, torch.from_numpy(v))
    assert isinstance(out, torch.Tensor)
    assert (out.numpy() == regard.attention(q, k, v)).all()


def test_other_devices(qkv):
    torch = pytest.importorskip("torch")
    q, k, v = map(torch.from_numpy, qkv)
    with pytest.raises(Exception):  # noqa: B017: PyTorch's own error, whatever its type
        regard.attention(q.to("meta"), k, v)

    class OnMetal:
        def __dlpack_device__(self):
            return 8, 0

        def __dlpack__(self, **_):
            return torch.zeros(1, 3, 4, 16).__dlpack__()

    class Broken:
        def __dlpack_device__(self):
            raise RuntimeError("not today")

        __dlpack__ = None

    with pytest.raises(RuntimeError, match="not today"):
        regard.attention(Broken(), k, v)
    regard.attention(OnMetal(), k, v)  # What counts is where the exported tensor is.


def test_jax_arrays_are_not_written(qkv):
    jax = pytest.importorskip("jax")
    q, k, v = qkv
    out = jax.numpy.zeros(q.shape, "float32")
    refused("`out` is a JAX array, which is immutable", q, k, v, out=out)


def test_plans_refuse_what_they_do_not_cover(qkv, normal):
    q, k, v = qkv
    plan = regard.Plan(q, k, v)
    longer = normal(1, 6, 2, 16), normal(1, 6, 2, 16)
    refused("`kv_len` is 6; allowed: at most 5, as planned", q, *longer, np.empty_like(q), call=plan.run)
    refused("`lse` is given; allowed: not given, as planned", q, k, v, np.empty_like(q), call=plan.run, lse=np.empty((1, 3, 4), np.float32))
    refused("`lse` is an array; allowed: True or False", q, k, v, call=regard.Plan, lse=np.empty((1, 3, 4), np.float32))


def test_nothing_is_written_where_a_call_is_refused(qkv):
    q, k, v = qkv
    out = np.full_like(q, 7)
    refused("`kv_lens[0]`", q, k, v, out=out, kv_lens=[6])
    assert (out == 7).all()
