"""Latent caches (MLA): values that are the first dims of keys."""

import ml_dtypes
import numpy as np
import pytest
import reference
import regard
from test_cache import rotated

HEADS, DIM, VALUE_DIM = 6, 64, 48


@pytest.fixture
def latent(normal):
    """Queries and a cache, `[B, L, H, D]`."""
    return normal(2, 3, HEADS, DIM), normal(2, 11, 1, DIM)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_values_are_the_first_dims_of_keys(library, normal, dtype):
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype}")
    q, k = normal(2, 3, HEADS, DIM, dtype=dtype), normal(2, 11, 1, DIM, dtype=dtype)
    options = dict(causal=True, scale=0.2)
    out, lse = regard.attention(library.make(q), library.make(k), None, value_dim=VALUE_DIM, lse=True, **options)
    library.synchronize()
    reference.agrees(library.read(out), q, k, k[..., :VALUE_DIM], lse=library.read(lse), **options)


def test_layouts(latent):
    q, k = latent
    want = regard.attention(q, k, None, value_dim=VALUE_DIM)
    heads_first = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in latent]
    found = regard.attention(*heads_first, None, value_dim=VALUE_DIM, layout="bhsd")
    reference.agrees(want, q, k, k[..., :VALUE_DIM])
    reference.agrees(found.swapaxes(1, 2), q, k, k[..., :VALUE_DIM])


def test_pages_and_plans(latent):
    q, k = latent
    pool, table, lens = np.full((5, 4, 1, DIM), np.nan, np.float32), np.array([[2, 0, 4], [1, 3, -1]], np.int32), [11, 7]
    for sequence, position in np.ndindex(2, 11):
        if position < lens[sequence]:
            pool[table[sequence, position // 4], position % 4] = k[sequence, position]
    plan = regard.Plan(q, pool, None, value_dim=VALUE_DIM, block_table=table, kv_lens=lens, causal=True)
    assert "values a prefix of the keys" in plan.explain()
    out = np.empty((2, 3, HEADS, VALUE_DIM), np.float32)
    plan.run(q, pool, None, out, block_table=table, kv_lens=lens)
    reference.agrees(out, q, k, k[..., :VALUE_DIM], kv_lens=lens, causal=True)
    pages_heads_first = np.ascontiguousarray(pool.swapaxes(1, 2))
    options = dict(block_table=table, kv_lens=lens, causal=True, kv_layout="hnd")
    found = regard.attention(q, pages_heads_first, None, value_dim=VALUE_DIM, **options)
    reference.agrees(found, q, k, k[..., :VALUE_DIM], kv_lens=lens, causal=True)


def test_codes_and_blocks(latent):
    q, k = latent
    scales = (np.abs(k).max(-1) / 448).astype(np.float32)
    codes = (k / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    numbers = codes.astype(np.float32) * scales[..., None]
    found = regard.attention(q, codes, None, value_dim=VALUE_DIM, k_scales=scales)
    reference.agrees(found, q, numbers, numbers[..., :VALUE_DIM])
    same = regard.attention(q, codes.view(np.uint8), None, value_dim=VALUE_DIM, kv_format="e4m3", k_scales=scales, v_scales=scales)
    assert (found == same).all()

    # Blocks of q8_0 whose scales are 1/64.
    whole = np.rint(k * 20).clip(-127, 127).astype(np.int8).reshape(2, 11, 1, DIM // 32, 32)
    heads = np.full((2, 11, 1, DIM // 32, 1), 1 / 64, np.float16).view(np.uint8)
    stored = np.concatenate([heads, whole.view(np.uint8)], -1).reshape(2, 11, 1, -1)
    numbers = (whole.astype(np.float32) / 64).reshape(2, 11, 1, DIM)
    found = regard.attention(q, stored, None, value_dim=32, kv_format="q8_0")
    reference.agrees(found, q, numbers, numbers[..., :32])
    refused("`value_dim` is 48 over keys", q, stored, value_dim=48, kv_format="q8_0")
    refused("`v_format` is given", q, stored, value_dim=32, k_format="q8_0", v_format="q4_0")


def test_rows_of_656_bytes(normal):
    q, rows = normal(2, 3, HEADS, 576), normal(8, 1, 576)
    # As append writes them: four groups of codes with a scale each, then bf16.
    groups = rows[..., :512].reshape(8, 1, 4, 128)
    scales = np.abs(groups).max(-1) / np.float32(448)
    codes = (groups / scales[..., None]).astype(ml_dtypes.float8_e4m3fn)
    rotary = rows[..., 512:].astype(ml_dtypes.bfloat16)
    parts = [codes.reshape(8, 1, 512), scales, rotary]
    stored = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], -1)
    latent = (codes.astype(np.float32) * scales[..., None]).reshape(8, 1, 512)
    numbers = np.concatenate([latent, rotary.astype(np.float32)], -1)

    pool, table, lens = np.zeros((3, 4, 1, 656), np.uint8), np.array([[2, 0]], np.int32), [8]
    regard.append_latent(rows, pool, table, lens, kv_format="mla656")
    assert (np.concatenate([pool[2], pool[0]]) == stored).all() and not pool[1].any()
    for value_dim in (512, 576):
        k = np.stack([stored] * 2)
        found = regard.attention(q, k, None, value_dim=value_dim, kv_format="mla656")
        dense = np.stack([numbers] * 2)
        reference.agrees(found, q, dense, dense[..., :value_dim])
    refused("`value_dim` is 448 over keys", q, k, value_dim=448, kv_format="mla656")
    with pytest.raises(regard.ArgumentError, match="mla656 with values Separate"):
        regard.attention(q, k, k, kv_format="mla656")


def test_operators(latent):
    torch = pytest.importorskip("torch")
    import regard.torch

    q, k = map(torch.from_numpy, latent)
    want, want_lse = regard.attention(q, k, None, value_dim=VALUE_DIM, causal=True, lse=True)

    @torch.compile(fullgraph=True, backend="eager")
    def traced(q, k):
        return regard.torch.attention_with_lse(q, k, None, value_dim=VALUE_DIM, causal=True)

    with torch.no_grad():
        out, lse = traced(q, k)
        assert torch.equal(regard.torch.attention(q, k, None, value_dim=VALUE_DIM, causal=True), want)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)


def refused(words, q, k, v=None, **options):
    with pytest.raises(regard.ArgumentError) as error:
        regard.attention(q, k, v, **options)
    assert str(error.value).startswith(words), error.value


def test_bad_input(latent):
    q, k = latent
    refused("`v` is None; allowed: an array, or None with value_dim", q, k)
    refused("`v` is given together with value_dim", q, k, k, value_dim=DIM)
    refused("`value_dim` is 65 over keys", q, k, value_dim=65)
    refused("`value_dim` is 0 over keys", q, k, value_dim=0)
    refused("`value_dim` is 'all'; allowed: a number", q, k, value_dim="all")
    refused("`out`", q, k, value_dim=VALUE_DIM, out=np.empty_like(q))
    with pytest.raises(TypeError, match="value_dim"):
        plan = regard.Plan(q, k, None, value_dim=VALUE_DIM)
        plan.run(q, k, None, np.empty((2, 3, HEADS, VALUE_DIM), np.float32), value_dim=VALUE_DIM)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("interleaved", [None, False, True], ids=["plain", "halves", "interleaved"])
def test_append(library, normal, dtype, interleaved):
    if library.name.startswith("jax"):
        pytest.skip("JAX arrays are immutable")
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype}")
    # Two sequences: 3 tokens after 5, and 2 after 0.
    table = np.array([[4, 0, -1], [2, -1, -1]], np.int32)
    lens, sums, positions = np.array([8, 2], np.int32), np.array([0, 3, 5], np.int32), [5, 6, 7, 0, 1]
    key, query = normal(5, 1, DIM, dtype=dtype), normal(5, HEADS, DIM, dtype=dtype)
    pool = np.full((6, 4, 1, DIM), 7, key.dtype)
    want, rows, queries = pool.copy(), key, query
    options, made_query = {}, library.make(query.copy())
    if interleaved is not None:
        angles = normal(12, DIM - VALUE_DIM)
        rows, queries = (with_rotated_end(x, positions, angles, interleaved) for x in (key, query))
        options = {"rotary_table": library.make(angles), "interleaved": interleaved, "query": made_query}
    for i, place in enumerate([(0, 1), (0, 2), (0, 3), (2, 0), (2, 1)]):
        want[place] = rows[i]
    made = library.make(pool)
    arguments = library.make(key), made, library.make(table), library.make(lens)
    regard.append_latent(*arguments, cu_seqlens=library.make(sums), **options)
    library.synchronize()
    close = dict(rtol=reference.EPSILON[dtype], atol=4 * reference.EPSILON[dtype])
    for found, expected in [(made, want), (made_query, queries)]:
        np.testing.assert_allclose(library.read(found).astype(np.float32), expected.astype(np.float32), **close)


def with_rotated_end(x, positions, angles, interleaved):
    """The same rows with their last dims rotated."""
    end = rotated(x[..., -angles.shape[1] :], positions, angles, interleaved)
    return np.concatenate([x[..., : -angles.shape[1]], end.astype(x.dtype)], -1)


def test_append_refuses(normal):
    key, pool, table = normal(4, 1, DIM), np.zeros((6, 4, 1, DIM), np.float32), np.array([[1], [3]], np.int32)
    pages_heads_first = np.zeros((6, 1, 4, DIM), np.float32)
    regard.append_latent(key, pages_heads_first, table, [3, 2], kv_layout="hnd")
    assert (pages_heads_first[1, 0, 1:3] == key[:2, 0]).all()
    with pytest.raises(regard.ArgumentError, match="`key_pool` is"):
        regard.append_latent(key, pool[..., :-1], table, [3, 2])
    with pytest.raises(regard.ArgumentError, match="`query` is given without rotary_table; allowed: both or none"):
        regard.append_latent(key, pool, table, [3, 2], query=key)
    with pytest.raises(TypeError, match=r"append_latent\(\) got an unexpected keyword argument 'value'"):
        regard.append_latent(key, pool, table, [3, 2], value=key)
