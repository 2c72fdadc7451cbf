"""Attention in f64, written to be read (docs/semantics.md), and the tolerance of the tests."""

import numpy as np

EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def attention(q, k, v, scale=None, causal=False, window=(None, None), chunk=None, softcap=None, q_offset=None, mask=None,
              alibi_slopes=None, sinks=None, kv_lens=None, key_indices=None, key_counts=None, key_offset=0, key_stride=1,
              dtype=np.float64):
    """q [B, Lq, Hq, Dk], k [B, Lk, Hkv, Dk], v [B, Lk, Hkv, Dv]; returns out and lse. `dtype` is that of all
    arithmetic."""
    rounded = (lambda x: x) if dtype == np.float64 else (lambda x: x.astype(q.dtype).astype(dtype))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    batch, rows, heads, dim = q.shape
    keys, group = k.shape[1], heads // k.shape[2]
    out = np.zeros((batch, rows, heads, v.shape[-1]), dtype)
    lse = np.full((batch, rows, heads), -np.inf)
    for b in range(batch):
        length = keys if kv_lens is None else int(kv_lens[b])
        offset = length - rows if q_offset is None else int(np.broadcast_to(q_offset, batch)[b])
        p, j = np.arange(rows)[:, None] + offset, np.arange(keys)[None, :]
        at = int(np.broadcast_to(key_offset, batch)[b]) + key_stride * j
        keep = np.broadcast_to(j < length, (rows, keys)).copy()
        if causal:
            keep &= at <= p
        if window[0] is not None:
            keep &= at >= p - window[0]
        if window[1] is not None:
            keep &= at <= p + window[1]
        if chunk is not None:
            keep &= at // chunk == p // chunk
        for h in range(heads):
            score = product(q[b, :, h], k[b, :, h // group].T)
            score = score * dtype(1 / np.sqrt(dim) if scale is None else scale)
            if softcap is not None:
                score = softcap * np.tanh(score / softcap)
            if alibi_slopes is not None:
                score = score - alibi_slopes[h] * np.abs(p - at)
            seen = keep
            times = np.ones_like(score)
            if key_indices is not None:
                times = times_listed(key_indices, key_counts, b * rows, h // group, (rows, keys))
                seen = keep & (times > 0)
            if mask is not None:
                own = np.broadcast_to(mask, (batch, heads, rows, keys))[b, h]
                seen = seen & own if own.dtype == bool else seen & (own > -np.inf)
                if own.dtype != bool:
                    score = score + np.where(own > -np.inf, own, 0)
            score = np.where(seen, score, -np.inf)
            sink = -np.inf if sinks is None else sinks[h]
            top = np.maximum(score.max(-1, initial=-np.inf), sink)
            with np.errstate(invalid="ignore", divide="ignore"):
                weight = np.where(seen, times * np.exp(score - np.where(np.isfinite(top), top, 0)[:, None]), 0)
                total = weight.sum(-1) + np.exp(sink - np.where(np.isfinite(top), top, 0))
                some = np.isfinite(top)
                out[b, :, h] = np.where(some[:, None], product(rounded(weight), v[b, :, h // group]) / total[:, None], 0)
                lse[b, :, h] = np.where(some, np.log(total) + top, -np.inf)
    return out, lse


def product(a, b):
    """a @ b. In f32 term by term, as the tolerance rule's naive computation has it: a library for matrix products
    keeps several sums, so its error is not that of naive arithmetic."""
    if a.dtype != np.float32:
        return a @ b
    total = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    for column, row in zip(a.T, b):
        total += column[:, None] * row
    return total


def times_listed(key_indices, key_counts, first_row, kv_head, shape):
    """Number of times that each of `shape` rows' lists names each key."""
    rows, keys = shape
    times = np.zeros(shape)
    head = kv_head if key_indices.shape[1] > 1 else 0
    for row in range(rows):
        entries = key_indices[first_row + row, head]
        if key_counts is not None:
            entries = entries[: key_counts[first_row + row, head]]
        for key in entries[(entries >= 0) & (entries < keys)]:
            times[row, key] += 1
    return times


def agrees(found, q, k, v, lse=None, **options):
    """err(found) <= 2 err(naive) + eps against f64, where naive is the same maths in f32 with probabilities and
    results rounded to q's type."""
    exact, exact_lse = attention(q, k, v, **options)
    naive, naive_lse = attention(q, k, v, dtype=np.float32, **options)
    epsilon = EPSILON[q.dtype.name]
    naive = naive.astype(q.dtype).astype(np.float64)
    size = np.abs(v.astype(np.float64)).max(initial=0)
    bound = 2 * np.abs(naive - exact).max(initial=0) + epsilon * size
    error = np.abs(np.asarray(found).astype(np.float64) - exact).max(initial=0)
    assert error <= bound, f"off by {error}, at most {bound} are allowed"
    if lse is not None:
        some = np.isfinite(exact_lse)
        assert (np.isneginf(lse) == ~some).all()
        exact_lse, naive_lse, lse = exact_lse[some], naive_lse[some], lse[some]
        bound = 2 * np.abs(naive_lse - exact_lse).max(initial=0)
        bound += EPSILON["float32"] * np.abs(exact_lse).max(initial=1)
        assert np.abs(lse - exact_lse).max(initial=0) <= bound
