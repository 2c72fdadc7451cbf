"""`regard.append` and `regard.merge`, on every library whose arrays can be written."""

import numpy as np
import pytest
import reference
import regard

BLOCKS, SIZE, HEADS, DIM, VALUE_DIM = 6, 4, 2, 16, 8


def writable(library):
    if library.name.startswith("jax"):
        pytest.skip("JAX arrays are immutable")


def rotated(x, positions, table, interleaved):
    """RoPE in f32, token by token."""
    half = table.shape[1] // 2
    out = x.astype(np.float32).copy()
    cosine, sine = (part[positions][:, None] for part in (table[:, :half], table[:, half:]))
    if interleaved:
        first, second = (slice(i, 2 * half, 2) for i in (0, 1))
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first], out[..., second] = a * cosine - b * sine, b * cosine + a * sine
    return out


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("interleaved", [None, False, True], ids=["plain", "halves", "interleaved"])
def test_append(library, normal, dtype, interleaved):
    writable(library)
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype}")
    # Two sequences: 3 tokens after 5, and 2 after 0.
    table = np.array([[4, 0, -1], [2, -1, -1]], np.int32)
    lens, sums = np.array([8, 2], np.int32), np.array([0, 3, 5], np.int32)
    positions = [5, 6, 7, 0, 1]
    key, value, query = normal(5, HEADS, DIM, dtype=dtype), normal(5, HEADS, VALUE_DIM, dtype=dtype), normal(5, 4, DIM, dtype=dtype)
    pools = [np.zeros((BLOCKS, SIZE, HEADS, dim), key.dtype) for dim in (DIM, VALUE_DIM)]
    want = [pool.copy() for pool in pools]
    angles = normal(12, 8)
    turned, turned_query = key, query
    options = {}
    made_query = library.make(query.copy())
    if interleaved is not None:
        turned = rotated(key, positions, angles, interleaved).astype(key.dtype)
        turned_query = rotated(query, positions, angles, interleaved).astype(key.dtype)
        options = {"rotary_table": library.make(angles), "interleaved": interleaved, "query": made_query}
    for i, (block, slot) in enumerate([(0, 1), (0, 2), (0, 3), (2, 0), (2, 1)]):
        want[0][block, slot], want[1][block, slot] = turned[i], value[i]
    made = [library.make(pool) for pool in pools]
    arguments = [library.make(x) for x in (key, value)] + made + [library.make(x) for x in (table, lens)]
    regard.append(*arguments, cu_seqlens=library.make(sums), **options)
    library.synchronize()
    close = dict(rtol=reference.EPSILON[dtype], atol=4 * reference.EPSILON[dtype])
    for found, expected in [(made[0], want[0]), (made[1], want[1]), (made_query, turned_query)]:
        np.testing.assert_allclose(library.read(found).astype(np.float32), expected.astype(np.float32), **close)


def test_append_of_equal_counts_and_hnd(normal):
    key, value = normal(4, HEADS, DIM), normal(4, HEADS, DIM)
    pools = [np.zeros((BLOCKS, HEADS, SIZE, DIM), np.float32) for _ in "kv"]
    regard.append(key, value, *pools, np.array([[1], [3]], np.int32), [3, 2], kv_layout="hnd")
    assert (pools[0][1][:, 1:3].swapaxes(0, 1) == key[:2]).all()
    assert (pools[1][3][:, 0:2].swapaxes(0, 1) == value[2:]).all()


def test_append_refuses(normal):
    key, value = normal(4, HEADS, DIM), normal(4, HEADS, DIM)
    pools = [np.zeros((BLOCKS, SIZE, HEADS, DIM), np.float32) for _ in "kv"]
    table = np.zeros((3, 1), np.int32)
    with pytest.raises(regard.ArgumentError, match="`cu_seqlens` is missing with 4 tokens of 3 sequences"):
        regard.append(key, value, *pools, table, [3, 2, 1])
    with pytest.raises(regard.ArgumentError, match="`query` is given without rotary_table; allowed: both or none"):
        regard.append(key, value, *pools, table, [3, 2, 1], query=key)
    with pytest.raises(regard.ArgumentError, match="`key_pool` is of type f32; allowed: f16, e4m3"):
        regard.append(key.astype(np.float16), value.astype(np.float16), *pools, table[:2], [3, 2])
    with pytest.raises(TypeError, match="unexpected keyword argument 'rope'"):
        regard.append(key, value, *pools, table, [3, 2, 1], rope=None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_merge(library, normal, dtype):
    """Attention over two halves of the keys, merged, is attention over all of them."""
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype}")
    q, k, v = normal(2, 3, 4, DIM), normal(2, 14, HEADS, DIM), normal(2, 14, HEADS, DIM)
    parts = [regard.attention(q, k[:, rows], v[:, rows], lse=True) for rows in (slice(0, 5), slice(5, 14))]
    # A part that saw nothing: its output is not looked at.
    parts.append((np.full_like(q, np.nan), np.full(q.shape[:-1], -np.inf, np.float32)))
    outs = np.stack([out for out, _ in parts]).astype(normal(1, dtype=dtype).dtype)
    out, lse = regard.merge(library.make(outs), library.make(np.stack([lse for _, lse in parts])))
    library.synchronize()
    exact, exact_lse = reference.attention(q, k, v)
    size = np.abs(v).max()
    error = np.abs(library.read(out).astype(np.float64) - exact).max()
    assert error <= 4 * max(reference.EPSILON[dtype], reference.EPSILON["float32"]) * size
    np.testing.assert_allclose(library.read(lse), exact_lse, rtol=8 * reference.EPSILON["float32"])


def test_merge_refuses(normal):
    with pytest.raises(regard.ArgumentError, match="`part_lse` is"):
        regard.merge(normal(2, 3, 8), normal(2, 4))
    with pytest.raises(regard.ArgumentError, match="`parts` is of shape"):
        regard.merge(normal(2), normal(2))
