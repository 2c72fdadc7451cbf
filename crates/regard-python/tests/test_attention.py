"""`regard.attention` of every library against f64, with every option."""

import libraries
import numpy as np
import pytest
import reference
import regard

BATCH, ROWS, KEYS, HEADS, KV_HEADS, DIM = 2, 5, 17, 4, 2, 64

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"scale": 0.3},
    "window": {"causal": True, "window": (4, None)},
    "window on both sides": {"window": (3, 2), "q_offset": 2},
    "chunk": {"causal": True, "chunk": 3},
    "softcap": {"softcap": 2.5, "causal": True},
    "q_offset": {"causal": True, "q_offset": -2},
    "contiguous shard": {"causal": True, "q_offset": 20, "key_offset": 8},
    "every third key": {"window": (20, 6), "q_offset": 25, "key_offset": 1, "key_stride": 3},
}


def arrays(library, options):
    return {name: library.make(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}


def check(library, q, k, v, options):
    made = [library.make(x) for x in (q, k, v)]
    out, lse = regard.attention(*made, lse=True, **arrays(library, options))
    library.synchronize()
    reference.agrees(library.read(out), q, k, v, lse=library.read(lse), **options)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_numbers(library, normal, dtype, options):
    if dtype not in library.dtypes:
        pytest.skip(f"{library.name} has no {dtype}")
    q = normal(BATCH, ROWS, HEADS, DIM, dtype=dtype)
    k, v = (normal(BATCH, KEYS, KV_HEADS, DIM, dtype=dtype) for _ in "kv")
    check(library, q, k, v, options)


def test_arrays_as_options(library, normal):
    q, k, v = normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, KEYS, KV_HEADS, DIM), normal(BATCH, KEYS, KV_HEADS, DIM)
    for options in (
        {"mask": normal(BATCH, 1, ROWS, KEYS) > 0},
        {"mask": normal(1, HEADS, ROWS, KEYS)},
        {"alibi_slopes": np.array([0.5, 0.25, 0.125, 1], np.float32), "causal": True},
        {"sinks": np.array([0.5, -np.inf, 3, 0], np.float32), "causal": True},
        {"kv_lens": np.array([17, 0], np.int32), "causal": True},
        {"kv_lens": np.array([9, 12], np.int32), "q_offset": np.array([3, 7], np.int32), "causal": True},
        {"key_offset": np.array([-4, 9], np.int32), "key_stride": 2, "q_offset": 21, "causal": True},
    ):
        check(library, q, k, v, options)


def test_lists_of_keys(library, normal):
    q, k, v = normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, KEYS, KV_HEADS, DIM), normal(BATCH, KEYS, KV_HEADS, DIM)
    random = np.random.default_rng(3)
    rows = BATCH * ROWS
    for heads in (1, KV_HEADS):
        indices = random.integers(-2, KEYS + 2, (rows, heads, 9)).astype(np.int32)
        counts = random.integers(0, 10, (rows, heads)).astype(np.int32)
        check(library, q, k, v, {"key_indices": indices})
        check(library, q, k, v, {"key_indices": indices, "key_counts": counts, "causal": True})


def test_physical_slots(normal):
    q, k, v = normal(2, 1, HEADS, DIM), normal(6, 4, KV_HEADS, DIM), normal(6, 4, KV_HEADS, DIM)
    slots = np.array([[[5, 0, 23, -1]], [[9, 8, 24, 1]]], np.int32)
    found = regard.attention(q, k, v, key_indices=slots, indices_are_slots=True)
    flat_k, flat_v = k.reshape(1, 24, KV_HEADS, DIM), v.reshape(1, 24, KV_HEADS, DIM)
    for row in range(2):
        want = regard.attention(q[row : row + 1], flat_k, flat_v, key_indices=slots[row : row + 1])
        np.testing.assert_allclose(found[row : row + 1], want, rtol=1e-6, atol=1e-6)
    with pytest.raises(regard.ArgumentError, match="causal"):
        regard.attention(q, k, v, key_indices=slots, indices_are_slots=True, causal=True)


def test_second_cache(normal):
    q, k, v = normal(2, 1, HEADS, DIM), normal(6, 4, KV_HEADS, DIM), normal(6, 4, KV_HEADS, DIM)
    first = np.array([[[5, 0, -1]], [[9, 24, 1]]], np.int32)
    second = np.array([[[7, 3]], [[11, 99]]], np.int32)
    want = regard.attention(q, k, v, key_indices=np.concatenate([first, second], 2), indices_are_slots=True)
    lists = {"key_indices": first, "second_indices": second, "indices_are_slots": True}
    # The same keys, in pages of another size.
    pools = [np.ascontiguousarray(x.reshape(3, 8, KV_HEADS, DIM)) for x in (k, v)]
    found = regard.attention(q, k, v, second_k=pools[0], second_v=pools[1], **lists)
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)
    heads_first = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (k, v, *pools)]
    first_k, first_v, second_k, second_v = heads_first
    found = regard.attention(q, first_k, first_v, second_k=second_k, second_v=second_v, kv_layout="hnd", **lists)
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)
    with pytest.raises(regard.ArgumentError, match="second_v"):
        regard.attention(q, k, v, second_k=pools[0], **lists)


def test_keys_in_two_parts(normal):
    q, rows = normal(2, 3, HEADS, 24), normal(6, 4, 1, 24)
    latent, rotary = (np.ascontiguousarray(x) for x in (rows[..., :16], rows[..., 16:]))
    paged = {
        "block_table": np.array([[4, 1], [0, 3]], np.int32),
        "kv_lens": np.array([5, 8], np.int32),
        "value_dim": 16,
        "causal": True,
    }
    want = regard.attention(q, rows, None, **paged)
    found = regard.attention(q, latent, None, rotary_k=rotary, **paged)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    heads_first = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (latent, rotary)]
    found = regard.attention(q, heads_first[0], None, rotary_k=heads_first[1], kv_layout="hnd", **paged)
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)
    with pytest.raises(regard.ArgumentError, match="rotary_k"):
        regard.attention(q, latent, None, rotary_k=rotary[:, :2], **paged)


def test_lists_of_pages(normal):
    q, k, v = normal(1, 2, HEADS, DIM), normal(6, 4, KV_HEADS, DIM), normal(6, 4, KV_HEADS, DIM)
    table, lens = np.array([[4, 1, 3]], np.int32), np.array([10], np.int32)
    pages, page_lens = np.repeat(table[None], KV_HEADS, 0), np.full((KV_HEADS, 1), 10, np.int32)
    lists = {"page_indices": pages, "page_list_lens": page_lens}
    want = regard.attention(q, k, v, block_table=table, kv_lens=lens)
    np.testing.assert_allclose(regard.attention(q, k, v, **lists), want, rtol=1e-6, atol=1e-6)
    numbers = np.repeat(np.arange(3, dtype=np.int32)[None, None], KV_HEADS, 0)
    want = regard.attention(q, k, v, block_table=table, kv_lens=lens, causal=True)
    found = regard.attention(q, k, v, **lists, page_numbers=numbers, q_offset=8, causal=True)
    np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6)
    with pytest.raises(regard.ArgumentError, match="causal"):
        regard.attention(q, k, v, **lists, causal=True)


def test_lengths_of_64_bits_and_lists(normal):
    q, k, v = normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, KEYS, KV_HEADS, DIM), normal(BATCH, KEYS, KV_HEADS, DIM)
    want = regard.attention(q, k, v, kv_lens=np.array([9, 12], np.int32), causal=True)
    for lens in ([9, 12], (9, 12), np.array([9, 12]), np.array([9, 0, 12, 0])[::2]):
        assert (regard.attention(q, k, v, kv_lens=lens, causal=True) == want).all()


def test_offsets_of_one_sequence(library, normal):
    q, k, v = normal(1, ROWS, HEADS, DIM), normal(1, KEYS, KV_HEADS, DIM), normal(1, KEYS, KV_HEADS, DIM)
    check(library, q, k, v, {"q_offset": np.array([6], np.int32), "causal": True})
    check(library, q, k, v, {"q_offset": 6, "causal": True})
    with pytest.raises(regard.ArgumentError, match="`q_offset` is 'last'; allowed: a number"):
        regard.attention(q, k, v, q_offset="last")


def test_layouts(library, normal):
    q, k, v = normal(BATCH, ROWS, HEADS, DIM), normal(BATCH, KEYS, KV_HEADS, DIM), normal(BATCH, KEYS, KV_HEADS, DIM)
    want, want_lse = regard.attention(q, k, v, causal=True, lse=True)
    swapped = [library.make(np.ascontiguousarray(x.swapaxes(1, 2))) for x in (q, k, v)]
    out, lse = regard.attention(*swapped, causal=True, lse=True, layout="bhsd")
    library.synchronize()
    out, lse = library.read(out), library.read(lse)
    assert out.shape == (BATCH, HEADS, ROWS, DIM) and lse.shape == (BATCH, HEADS, ROWS)
    np.testing.assert_allclose(out.swapaxes(1, 2), want, atol=4 * reference.EPSILON["float32"])
    np.testing.assert_allclose(lse.swapaxes(1, 2), want_lse, rtol=4 * reference.EPSILON["float32"])


def ragged(normal, lens, dtype="float32"):
    """Sequences of these (queries, keys), as one ragged batch; and each by itself."""
    parts = [(normal(a, HEADS, DIM, dtype=dtype), normal(b, KV_HEADS, DIM, dtype=dtype), normal(b, KV_HEADS, DIM, dtype=dtype)) for a, b in lens]
    sums = [np.cumsum([0, *(pair[i] for pair in lens)]).astype(np.int32) for i in (0, 1)]
    return [np.concatenate([part[i] for part in parts]) for i in range(3)], sums, parts


def test_ragged(library, normal):
    (q, k, v), (cu_q, cu_k), parts = ragged(normal, [(3, 7), (1, 4), (6, 6)])
    options = {"cu_seqlens_q": library.make(cu_q), "cu_seqlens_k": library.make(cu_k), "causal": True}
    out = regard.attention(library.make(q), library.make(k), library.make(v), **options)
    bounded = regard.attention(library.make(q), library.make(k), library.make(v), max_query_len=6, max_kv_len=7, **options)
    library.synchronize()
    for result in (library.read(out), library.read(bounded)):
        for i, part in enumerate(parts):
            found = result[cu_q[i] : cu_q[i + 1]]
            reference.agrees(found[None], *(x[None] for x in part), causal=True)


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
def test_paged(library, normal, kv_layout):
    pages, lens, size = regard.PageAllocator(16, 4), [7, 0, 10], 4
    sequences = [pages.create() for _ in lens]
    pools = [normal(16, size, KV_HEADS, DIM) for _ in "kv"]
    dense = [np.zeros((3, 12, KV_HEADS, DIM), np.float32) for _ in "kv"]
    for b, (sequence, length) in enumerate(zip(sequences, lens)):
        for block, slots, tokens in pages.append(sequence, length).ranges:
            for pool, flat in zip(pools, dense):
                flat[b, tokens.start : tokens.stop] = pool[block, slots.start : slots.stop]
    q = normal(3, 2, HEADS, DIM)
    if kv_layout == "hnd":
        pools = [np.ascontiguousarray(pool.swapaxes(1, 2)) for pool in pools]
    out = regard.attention(
        library.make(q),
        *map(library.make, pools),
        block_table=library.make(np.asarray(pages.block_table(sequences))),
        kv_lens=library.make(np.asarray(pages.kv_lens(sequences))),
        causal=True,
        kv_layout=kv_layout,
    )
    library.synchronize()
    reference.agrees(library.read(out), q, *dense, kv_lens=lens, causal=True)


def test_out_and_types(library, normal):
    if library.name.startswith("jax"):
        pytest.skip("JAX arrays are immutable")
    q, k, v = (library.make(normal(1, 3, 2, 16, dtype="float16")) for _ in "qkv")
    out, lse = library.make(normal(1, 3, 2, 16)), library.make(normal(1, 3, 2))
    result = regard.attention(q, k, v, out=out, lse=lse)
    assert result[0] is out and result[1] is lse
    library.synchronize()
    wide = regard.attention(q, k, v, out_dtype="f32")
    library.synchronize()
    assert library.read(wide).dtype == np.float32
    assert (library.read(wide) == library.read(out)).all()


def test_batch_invariance(normal):
    q, k, v = normal(3, 1, HEADS, DIM), normal(3, 300, KV_HEADS, DIM), normal(3, 300, KV_HEADS, DIM)
    together = regard.attention(q, k, v, batch_invariant=True)
    for b in range(3):
        alone = regard.attention(q[b : b + 1], k[b : b + 1], v[b : b + 1], batch_invariant=True)
        assert (alone[0] == together[b]).all()


def test_against_sdpa(normal):
    torch = pytest.importorskip("torch")
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.from_numpy(normal(2, 70, heads, 80)) for heads in (8, 2, 2))
    with sdpa_kernel(SDPBackend.MATH):
        want = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
    out = regard.attention(q, k, v, causal=True)
    reference.agrees(out.numpy(), q.numpy(), k.numpy(), v.numpy(), causal=True)
    reference.agrees(want.transpose(1, 2).numpy(), q.numpy(), k.numpy(), v.numpy(), causal=True)


def test_a_tree_replaces_causality(normal):
    q, k, v = normal(1, 3, 2, 16), normal(1, 8, 2, 16), normal(1, 8, 2, 16)
    sees = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    words = np.packbits(np.pad(sees, ((0, 0), (0, 29))), axis=-1, bitorder="little").view(np.int32).reshape(1, 3, 1)
    mask = np.concatenate([np.ones((3, 5), bool), sees], axis=1)[None, None]
    out = regard.attention(q, k, v, tree_mask=words, causal=True)
    reference.agrees(out, q, k, v, mask=mask)


