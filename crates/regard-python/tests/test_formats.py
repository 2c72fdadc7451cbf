"""Caches in 8 and 4 bits: attention over codes is attention over the numbers that they mean."""

import libraries
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


# Two sequences: 3 tokens after 5, and 2 after 0; the slots that they go to.
TABLE, LENS, SUMS = np.array([[4, 0], [2, -1]], np.int32), np.array([8, 2], np.int32), np.array([0, 3, 5], np.int32)
SLOTS = ([0, 0, 0, 2, 2], [1, 2, 3, 0, 1])


def appended(library, rows, pools, scales, **options):
    """Appends rows of keys and values with new arrays of the library; returns pools and scales."""
    pools = [library.make(pool) for pool in pools]
    scales = {name: library.make(array) for name, array in scales.items()}
    tables = library.make(TABLE), library.make(LENS)
    regard.append(*map(library.make, rows), *pools, *tables, cu_seqlens=library.make(SUMS), **scales, **options)
    library.synchronize()
    return [library.read(pool) for pool in pools] + [library.read(array) for array in scales.values()]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CODES)
def test_append_of_codes(library, normal, name, dtype):
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype}")
    rows = [normal(5, 2, 32, dtype=dtype) for _ in "kv"]
    pools = [np.full((6, 4, 2, 32), 7, np.uint8) for _ in "kv"]
    # Keys with a scale per token and head, which append computes; values with one for all.
    computed, given = np.full((6, 4, 2), 9, np.float32), np.full((1, 1, 1), 2 / LARGEST[name], np.float32)
    want_scales = computed.copy()
    want_scales[SLOTS] = per_token(rows[0].astype(np.float32), name)
    limited = np.clip(rows[1].astype(np.float32), -2, 2)
    want = [pool.copy() for pool in pools]
    want[0][SLOTS] = codes(rows[0].astype(np.float32), name, want_scales[SLOTS])[0].view(np.uint8)
    want[1][SLOTS] = codes(limited, name, given[0])[0].view(np.uint8)
    scales = dict(k_scales=computed, v_scales=given)
    keys, values, found, unchanged = appended(library, rows, pools, scales, kv_format=name, dynamic_k_scales=True)
    assert np.array_equal(found, want_scales) and np.array_equal(unchanged, given)
    assert np.array_equal(keys, want[0]) and np.array_equal(values, want[1])

    # Both the other way round, and pages of heads before slots.
    heads_first = [np.ascontiguousarray(pool.swapaxes(1, 2)) for pool in pools]
    scales = dict(k_scales=given, v_scales=np.ascontiguousarray(computed.swapaxes(1, 2)))
    options = dict(kv_format=name, dynamic_v_scales=True, kv_layout="hnd")
    keys, values, _, found = appended(library, [rows[1], rows[0]], heads_first, scales, **options)
    assert np.array_equal(found.swapaxes(1, 2), want_scales)
    assert np.array_equal(keys.swapaxes(1, 2), want[1]) and np.array_equal(values.swapaxes(1, 2), want[0])


# The stand-in for the driver appends floats only.
test_append_of_codes.libraries = [libraries.NumPy, libraries.Torch, libraries.TorchCuda, libraries.CuPy]


def test_append_of_blocks(normal):
    """Keys in blocks beside values in codes: attention over both is attention over what they mean."""
    q, key, value = normal(5, 4, 64), normal(5, 2, 64), normal(5, 2, 64)
    for name, size in (("q8_0", 34), ("q4_0", 18)):
        key_pool, value_pool = np.zeros((6, 4, 2, 2 * size), np.uint8), np.zeros((6, 4, 2, 64), np.int8)
        scales, sums, table = np.zeros((6, 4, 2), np.float32), np.array([0, 5], np.int32), np.array([[4, 1]], np.int32)
        options = dict(cu_seqlens=sums, k_format=name, v_scales=scales)
        regard.append(key, value, key_pool, value_pool, table, [5], dynamic_v_scales=True, **options)
        slots = ([4, 4, 4, 4, 1], [0, 1, 2, 3, 0])
        parts = key_pool[slots].reshape(5, 2, 2, size)
        heads, stored = parts[..., :2].copy().view(np.float16).astype(np.float32), parts[..., 2:]
        if name == "q8_0":
            numbers = stored.copy().view(np.int8).astype(np.float32)
        else:
            numbers = np.concatenate([stored & 15, stored >> 4], -1).astype(np.float32) - 8
        keys = (numbers * heads).reshape(5, 2, 64)
        # Half a step of a block at most; GGUF's four bits go from -8 to 7 steps.
        largest = np.abs(key.reshape(5, 2, 2, 32)).max(-1)[..., None] / (127 if name == "q8_0" else 8)
        assert (np.abs(keys - key).reshape(5, 2, 2, 32) <= (0.51 if name == "q8_0" else 1.01) * largest).all()
        values = value_pool[slots] * scales[slots][..., None]
        tables = dict(block_table=table, kv_lens=[5], causal=True)
        out = regard.attention(q[None], key_pool, value_pool, k_format=name, v_scales=scales, **tables)
        agrees(out, q[None], keys[None], values[None], causal=True)


def test_append_of_latent_codes(normal):
    key, table = normal(4, 1, 64), np.array([[1], [3]], np.int32)
    slots = ([1, 1, 3, 3], [1, 2, 0, 1])
    pool, scales = np.zeros((6, 4, 1, 64), np.int8), np.full((1, 1, 1), 0.05, np.float32)
    regard.append_latent(key, pool, table, [3, 2], k_scales=scales)
    assert np.array_equal(pool[slots], codes(key, "i8", scales[0])[0])
    scales = np.zeros((6, 4, 1), np.float32)
    regard.append_latent(key, pool, table, [3, 2], k_scales=scales, dynamic_k_scales=True)
    assert np.array_equal(scales[slots], per_token(key, "i8"))
    assert np.array_equal(pool[slots], codes(key, "i8", scales[slots])[0])
    with pytest.raises(TypeError, match=r"append_latent\(\) got an unexpected keyword argument 'v_scales'"):
        regard.append_latent(key, pool, table, [3, 2], k_scales=scales, v_scales=scales)


def test_append_refuses(normal):
    key, table = normal(4, 2, 64), np.array([[1], [3]], np.int32)
    pool, scales = np.zeros((6, 4, 2, 64), np.int8), np.zeros((6, 4, 2), np.float32)
    call = lambda **options: regard.append(key, key, pool, pool.copy(), table, [3, 2], **options)
    refused("`k_scales` is missing", call=call, v_scales=scales)
    refused("`v_scales` is missing with dynamic_v_scales; allowed: f32 [blocks", call=call, k_scales=scales, dynamic_v_scales=True)
    per_head = np.ones((1, 1, 2), np.float32)
    refused("`v_scales` is", call=call, k_scales=per_head, v_scales=per_head, dynamic_v_scales=True)
    refused("`v_scales[0, 0, 0]` is -1", call=call, k_scales=per_head, v_scales=-per_head)
    refused("`k_scales` is", call=call, k_scales=np.ones((6, 3, 2), np.float32), v_scales=per_head)
    refused("`key_pool` is bytes of shape [6, 4, 2, 64]", call=call, k_format="q8_0", v_scales=per_head)
    fixed = scales.copy()
    fixed.flags.writeable = False
    refused("`k_scales` is read-only", call=call, k_scales=fixed, v_scales=per_head, dynamic_k_scales=True)
    assert not pool.any() and not scales.any()


def refused(words, *arrays, call=regard.attention, **options):
    with pytest.raises(regard.ArgumentError) as error:
        call(*arrays, **options)
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
