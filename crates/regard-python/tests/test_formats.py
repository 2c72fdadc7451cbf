"""Caches in 8 and 4 bits: attention over codes is attention over the numbers that they mean."""

import ml_dtypes
import numpy as np
import pytest
import regard
from reference import agrees

FLOAT8 = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3": 448.0, "e5m2": 57344.0, "i8": 127.0}
CODES = ["e4m3", "e5m2", "i8"]
BLOCKS = ["q8_0", "q4_0"]


def codes(x, name, scales):
    """Codes of 8 bits in the type that has their name, and the numbers that they mean."""
    quotient = np.divide(x, scales[..., None])
    coded = np.rint(quotient).astype(np.int8) if name == "i8" else quotient.astype(FLOAT8[name])
    return coded, coded.astype(np.float32) * scales[..., None]


def per_token(x, name):
    return (np.abs(x).max(-1) / LARGEST[name]).astype(np.float32)


def blocks(x, name):
    """GGUF's blocks as bytes, and the numbers that they mean."""
    parts = x.reshape(*x.shape[:-1], -1, 32)
    if name == "q8_0":
        scale = (np.abs(parts).max(-1) / 127).astype(np.float16)
        coded = np.rint(parts / scale.astype(np.float32)[..., None]).clip(-127, 127).astype(np.int8)
        stored, numbers = coded.view(np.uint8), coded.astype(np.float32)
    else:
        scale = (np.abs(parts).max(-1) / 7).astype(np.float16)
        coded = (np.rint(parts / scale.astype(np.float32)[..., None]).clip(-8, 7) + 8).astype(np.uint8)
        stored, numbers = coded[..., :16] | coded[..., 16:] << 4, coded.astype(np.float32) - 8
    heads = scale[..., None].view(np.uint8)
    data = np.concatenate([heads, stored], -1).reshape(*x.shape[:-1], -1)
    return np.ascontiguousarray(data), (numbers * scale.astype(np.float32)[..., None]).reshape(x.shape)


@pytest.fixture
def qkv(normal):
    return normal(2, 3, 4, 64), normal(2, 9, 2, 64), normal(2, 9, 2, 64)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", CODES)
def test_codes(qkv, name, dtype):
    q, k, v = qkv
    q = q.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    k_scales, v_scales = per_token(k, name), per_token(v, name).max(keepdims=True)
    (k, k_numbers), (v, v_numbers) = codes(k, name, k_scales), codes(v, name, v_scales)
    options = dict(k_scales=k_scales, v_scales=v_scales, causal=True)
    out, lse = regard.attention(q, k, v, lse=True, **options)
    agrees(out, q, k_numbers.astype(q.dtype), v_numbers.astype(q.dtype), causal=True) if dtype == "float32" else None
    assert np.isfinite(lse).all()
    # The same codes as bytes.
    same = regard.attention(q, k.view(np.uint8), v.view(np.uint8), kv_format=name, **options)
    assert np.array_equal(np.asarray(out).view(np.uint8), np.asarray(same).view(np.uint8))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(qkv, name):
    q, k, v = qkv
    (k, k_numbers), (v, v_numbers) = blocks(k, name), blocks(v, name)
    out, lse = regard.attention(q, k, v, kv_format=name, causal=True, lse=True)
    assert out.shape == q.shape
    agrees(out, q, k_numbers, v_numbers, lse=lse, causal=True)
    mixed = regard.attention(q, k, v_numbers, k_format=name, causal=True)
    agrees(mixed, q, k_numbers, v_numbers, causal=True)


def test_layouts_and_plans(qkv):
    q, k, v = qkv
    scales = per_token(k, "i8")
    (k, k_numbers), (v, v_numbers) = codes(k, "i8", scales), codes(v, "i8", scales)
    heads_first = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, scales)]
    out = regard.attention(*heads_first[:3], layout="bhsd", k_scales=heads_first[3], v_scales=heads_first[3])
    agrees(out.swapaxes(1, 2), q, k_numbers, v_numbers)
    plan = regard.Plan(q, k, v, k_scales=scales, v_scales=scales)
    assert "over i8" in plan.explain()
    out = np.empty_like(q)
    plan.run(q, k, v, out, k_scales=scales, v_scales=scales)
    agrees(out, q, k_numbers, v_numbers)


def test_torch(qkv):
    torch = pytest.importorskip("torch")
    import regard.torch

    q, k, v = map(torch.from_numpy, qkv)
    for dtype, largest in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0), (torch.int8, 127.0)):
        scales = k.abs().amax(-1) / largest
        coded = k / scales[..., None]
        coded = (coded.round() if dtype == torch.int8 else coded).to(dtype)
        numbers = (coded.float() * scales[..., None])
        out = regard.attention(q, coded, coded, k_scales=scales, v_scales=scales, layout="bshd")
        heads = [x.transpose(1, 2) for x in (q, numbers.repeat_interleave(2, 2), numbers.repeat_interleave(2, 2))]
        want = torch.nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2)
        assert torch.allclose(out, want, atol=1e-5)
        traced = regard.torch.attention(q, coded, coded, k_scales=scales, v_scales=scales)
        assert torch.equal(out, traced)
    bytes_, numbers = blocks(qkv[1], "q4_0")
    bytes_ = torch.from_numpy(bytes_)
    out = regard.torch.attention(q, bytes_, bytes_, kv_format="q4_0")
    assert out.shape == q.shape
    agrees(out.numpy(), qkv[0], numbers, numbers)


def refused(words, *arrays, **options):
    with pytest.raises(regard.ArgumentError) as error:
        regard.attention(*arrays, **options)
    assert str(error.value).startswith(words), error.value


def test_bad_input(qkv):
    q, k, v = qkv
    scales = per_token(k, "i8")
    coded, _ = codes(k, "i8", scales)
    refused("`k_scales` is missing", q, coded, coded, v_scales=scales)
    refused("`v_scales` is missing", q, coded, coded, k_scales=scales)
    refused("`k_scales` is of shape [2, 8, 2]", q, coded, coded, k_scales=scales[:, :8], v_scales=scales)
    refused("`k_scales` is given", q, k, v, k_scales=scales)
    refused("`kv_format` is 'int4'; allowed: \"e4m3\"", q, coded, coded, kv_format="int4")
    refused("`k` is of type f32; allowed: q8_0, or bytes (uint8)", q, k, v, kv_format="q8_0")
    refused("`k` is bytes of shape [2, 9, 2, 64]", q, coded, coded, kv_format="q4_0")
    refused("`q` is of type i8", coded, coded, coded, k_scales=scales, v_scales=scales)
    negative = -np.ones((1, 1, 1), np.float32)
    refused("`k_scales", q, coded, coded, k_scales=negative, v_scales=negative)
