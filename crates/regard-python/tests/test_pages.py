"""The page allocator and steps, as their tests in Rust."""

import libraries
import numpy as np
import pytest
import reference
import regard


def test_tokens_fill_blocks_and_shared_blocks_are_copied():
    pages = regard.PageAllocator(4, 4)
    assert (pages.total_blocks, pages.block_size, pages.free_blocks) == (4, 4, 4)
    a = pages.create()
    first = pages.append(a, 6)
    assert first.copy is None and first.positions == range(0, 6)
    assert first.ranges == [(0, range(0, 4), range(0, 4)), (1, range(0, 2), range(4, 6))]
    assert first.slots == [0, 1, 2, 3, 4, 5]
    b = pages.fork(a)
    assert (pages.used_blocks, pages.holders(1), pages.sequences) == (2, 2, 2)
    assert pages.append(b, 1).copy == (1, 2, 2)
    assert (pages.blocks(a), pages.blocks(b)) == ([0, 1], [0, 2])
    c = pages.fork(a, 3)
    assert pages.length(c) == 3
    pages.truncate(c, 0)
    assert pages.release_before(a, 4) == 0 and pages.blocks(a) == [-1, 1]
    for sequence in (a, b, c):
        pages.free(sequence)
    assert pages.used_blocks == 0
    assert len({a, b, c, a}) == 3 and a != b


def test_tables(normal):
    pages = regard.PageAllocator(8, 2)
    a, b = pages.create(), pages.create()
    pages.append(a, 5)
    pages.append(b, 1)
    table = pages.block_table([b, a])
    assert table.tolist() == [[3, -1, -1], [0, 1, 2]] and table.shape == (2, 3) and table.dtype == "i32"
    assert np.asarray(table).tolist() == table.tolist()
    assert np.from_dlpack(table).dtype == np.int32
    out = np.zeros((2, 4), np.int32)
    assert pages.block_table([a, b], out=out) is out
    assert out.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1]]
    assert pages.kv_lens([a, b]).tolist() == [5, 1]
    with pytest.raises(regard.ArgumentError, match="`table` is 2 entries for 2 sequences"):
        pages.block_table([a, b], out=np.zeros((2, 1), np.int32))
    with pytest.raises(regard.ArgumentError, match="`out` is f32 on cpu; allowed: i32 on cpu"):
        pages.block_table([a, b], out=np.zeros((2, 4), np.float32))


def test_errors():
    pages = regard.PageAllocator(3, 2)
    a = pages.create()
    pages.append(a, 3)
    with pytest.raises(regard.OutOfPages, match="out of pages: 4 needed, 1 free of 3") as error:
        pages.append(a, 8)
    assert (error.value.needed, error.value.free, error.value.total) == (4, 1, 3)
    assert isinstance(error.value, MemoryError)
    pages.free(a)
    with pytest.raises(regard.ArgumentError, match="was not freed"):
        pages.append(a, 1)
    with pytest.raises(regard.ArgumentError, match="`block_size` is 0"):
        regard.PageAllocator(1, 0)


def test_a_step_of_continuous_batching(normal):
    """Prompts in chunks and decodes together, against each sequence by itself."""
    heads, kv_heads, dim, size = 4, 2, 32, 4
    pages, step = regard.PageAllocator(16, size), regard.Step()
    pools = [np.full((16, size, kv_heads, dim), np.nan, np.float32) for _ in "kv"]
    history = {}
    old, new = pages.create(), pages.create()
    for chunks in ([(old, 6)], [(old, 1), (new, 3)], [(new, 5), (old, 1)]):
        step.clear()
        for sequence, tokens in chunks:
            step.append(pages, sequence, tokens)
        step.finish(pages)
        k, v = (normal(step.tokens, kv_heads, dim) for _ in "kv")
        q = normal(step.tokens, heads, dim)
        regard.append(k, v, *pools, step.block_table, step.kv_lens, cu_seqlens=step.cu_seqlens_q)
        slots = step.slots.tolist()
        assert (pools[0].reshape(-1, kv_heads, dim)[slots] == k).all()
        tables = {"kv_lens": step.kv_lens, "cu_seqlens_q": step.cu_seqlens_q, "block_table": step.block_table}
        out = regard.attention(q, *pools, causal=True, **tables)
        start = 0
        for sequence, tokens in chunks:
            rows = slice(start, start + tokens)
            before = history.get(sequence, (k[:0], v[:0]))
            history[sequence] = tuple(np.concatenate([x, y[rows]]) for x, y in zip(before, (k, v)))
            reference.agrees(out[rows][None], q[rows][None], *(x[None] for x in history[sequence]), causal=True)
            start += tokens
        assert step.positions.tolist()[-1] == pages.length(chunks[-1][0]) - 1 and step.copies == []


def test_prefix_groups_of_a_step(normal):
    """Sequences that share pages attend to them together: the results are those of each by itself."""
    pages, step = regard.PageAllocator(40, 4), regard.Step()
    pools = [np.full((40, 4, 2, 32), np.nan, np.float32) for _ in "kv"]
    system, lone = pages.create(), pages.create()
    for sequence, tokens in ((system, 64), (lone, 9)):
        step.append(pages, sequence, tokens)
    step.finish(pages)
    assert step.max_query_len == max(np.diff(step.cu_seqlens_q.tolist()))
    assert not step.has_prefix_groups and step.prefix_groups.tolist() == [-1, -1]
    k, v = (normal(step.tokens, 2, 32) for _ in "kv")
    regard.append(k, v, *pools, step.block_table, step.kv_lens, cu_seqlens=step.cu_seqlens_q)
    step.clear()
    for sequence, tokens in ((lone, 2), (pages.fork(system), 1), (pages.fork(system), 3)):
        step.append(pages, sequence, tokens)
    step.finish(pages)
    assert step.has_prefix_groups and step.prefix_groups.tolist() == [-1, 0, 0] and step.prefix_lens.tolist()[0] == 64
    assert step.copies == []
    new = [normal(step.tokens, 2, 32) for _ in "kv"]
    regard.append(*new, *pools, step.block_table, step.kv_lens, cu_seqlens=step.cu_seqlens_q)
    q, groups = normal(step.tokens, 4, 32), dict(prefix_groups=step.prefix_groups, prefix_lens=step.prefix_lens)
    tables = {"kv_lens": step.kv_lens, "cu_seqlens_q": step.cu_seqlens_q, "block_table": step.block_table}
    out = regard.attention(q, *pools, causal=True, **tables, **groups)
    for before, rows in ((slice(64, 73), slice(0, 2)), (slice(0, 64), slice(2, 3)), (slice(0, 64), slice(3, 6))):
        keys, values = (np.concatenate([old[before], x[rows]])[None] for old, x in zip((k, v), new))
        reference.agrees(out[rows][None], q[rows][None], keys, values, causal=True)


def forked_step():
    """Two sequences that share a half-filled page, which the step copies."""
    pages, step = regard.PageAllocator(8, 4), regard.Step()
    first = pages.create()
    step.append(pages, first, 6)
    step.finish(pages)
    second = pages.fork(first)
    step.clear()
    for sequence, tokens in ((second, 1), (first, 2)):
        step.append(pages, sequence, tokens)
    step.finish(pages)
    assert len(step.copies) == 1
    return step


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
def test_blocks_are_copied_in_every_pool(kv_layout):
    copies = [(0, 2, 4), (2, 3, 3), *forked_step().copies]
    shapes = [(8, 4, 2, 16), (8, 4, 2), (8, 1, 2)]
    if kv_layout == "hnd":
        shapes = [(shape[0], shape[2], shape[1], *shape[3:]) for shape in shapes]
    types = (np.float16, np.float32, np.float32)
    pools = [np.arange(np.prod(shape)).reshape(shape).astype(dtype) for shape, dtype in zip(shapes, types)]
    expected = [pool.copy() for pool in pools]
    for pool in expected:
        slots = pool if kv_layout == "nhd" else pool.swapaxes(1, 2)
        for source, to, count in copies:
            slots[to, :count] = slots[source, :count]
    wrap = libraries.Interface if libraries.STAND_IN else None
    for place in (lambda array: array, wrap):
        if place is None:
            continue
        copied = [pool.copy() for pool in pools]
        regard.copy_blocks([place(pool) for pool in copied], copies, kv_layout=kv_layout)
        for found, pool in zip(copied, expected):
            assert (found == pool).all()
    regard.copy_blocks([], copies)


def test_bad_copies_are_refused():
    pool = np.zeros((8, 4, 2, 16), np.float32)
    with pytest.raises(regard.ArgumentError, match=r"`copies\[1\]` is 1 slots of block 0 to block 8"):
        regard.copy_blocks([pool], [(0, 1, 4), (0, 8, 1)])
    with pytest.raises(regard.ArgumentError, match=r"`pools\[1\]` is"):
        regard.copy_blocks([pool, pool[:4].copy()], [(0, 1, 4)])
    pool.flags.writeable = False
    with pytest.raises(regard.ArgumentError, match="`pools` is read-only"):
        regard.copy_blocks([pool], [(0, 1, 4)])


def test_tables_of_a_step_in_one_array():
    step = forked_step()
    packed = np.asarray(step.packed)
    tables = step.tables(packed)
    names = ["cu_seqlens_q", "kv_lens", "block_table", "prefix_groups", "prefix_lens"]
    assert list(tables) == names
    for name in names:
        assert tables[name].tolist() == getattr(step, name).tolist(), name
        assert np.shares_memory(tables[name], packed)
    with pytest.raises(regard.ArgumentError, match="`packed` is of shape"):
        step.tables(packed[1:])
    with pytest.raises(regard.ArgumentError, match="`step` is not finished"):
        regard.Step().packed
    torch = pytest.importorskip("torch")
    for name, table in step.tables(torch.from_dlpack(step.packed)).items():
        assert table.tolist() == getattr(step, name).tolist()


def test_standard_slopes():
    assert regard.alibi_slopes(8)[:3] == [0.5, 0.25, 0.125]
    assert len(regard.alibi_slopes(12)) == 12 and regard.alibi_slopes(0) == []
