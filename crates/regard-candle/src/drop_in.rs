//! Functions with the names and signatures of candle-flash-attn's, and candle-nn's `sdpa`.
//!
//! Names of arguments are those of candle too. The crate's documentation lists the differences.

use crate::options::{Attention, Execution};
use crate::view::refuse;
use candle_core::{DType, Result, Tensor};
use regard::Window;

/// `candle_nn::ops::sdpa`: attention of tensors `[batch, head, sequence, dim]`.
///
/// `mask` is broadcast to `[B, Hq, Lq, Lk]`, from as many dimensions as it has. Floats are added to
/// the scores; of integers, 0 hides the key and anything else keeps it (candle's own function takes
/// floats of `q`'s type only, and the whole shape). `do_causal` puts the last query on the last
/// key. `softcapping` of 1 is none.
///
/// The result is a view `[B, Hq, Lq, Dv]` of memory `[B, Lq, Hq, Dv]`: the `transpose(1, 2)` and
/// `reshape` that follow in most models copy nothing.
///
/// # Errors
/// As [`attention()`](crate::attention()), with shapes in the order `[B, L, H, D]`.
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    for (argument, x) in [("q", q), ("k", k), ("v", v)] {
        if x.rank() != 4 {
            let found = format!("of shape {:?}", x.dims());
            return Err(refuse(argument, found, "4 dimensions: [B, H, L, D]"));
        }
    }
    let attention = Attention {
        scale: Some(scale),
        causal: do_causal,
        softcap: (softcapping != 1.0).then_some(softcapping),
        mask: mask.cloned(),
        ..Attention::default()
    };
    let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
    crate::attention(&q, &k, &v, &attention)?.transpose(1, 2)
}

/// `candle_flash_attn::flash_attn`: `q` is `[B, Lq, Hq, D]`, `k` and `v` are `[B, Lk, Hkv, D]`.
///
/// # Errors
/// As [`attention()`](crate::attention()).
pub fn flash_attn(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    crate::attention(q, k, v, &scaled(softmax_scale, Window::default(), causal))
}

/// `candle_flash_attn::flash_attn_windowed`: [`flash_attn`] with a window; a right side of 0 is
/// causal.
///
/// # Errors
/// As [`attention()`](crate::attention()).
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    crate::attention(q, k, v, &windowed(softmax_scale, window_size_left, window_size_right))
}

/// `candle_flash_attn::flash_attn_alibi`: [`flash_attn`] with ALiBi slopes `[Hq]`.
///
/// # Errors
/// As [`attention()`](crate::attention()).
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let attention = Attention {
        alibi_slopes: Some(alibi_slopes.clone()),
        ..scaled(softmax_scale, Window::default(), causal)
    };
    crate::attention(q, k, v, &attention)
}

/// `candle_flash_attn::flash_attn_alibi_windowed`: [`flash_attn_windowed`] with ALiBi slopes.
///
/// # Errors
/// As [`attention()`](crate::attention()).
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let attention = Attention {
        alibi_slopes: Some(alibi_slopes.clone()),
        ..windowed(softmax_scale, window_size_left, window_size_right)
    };
    crate::attention(q, k, v, &attention)
}

/// `candle_flash_attn::flash_attn_alibi_windowed_softcap`: [`flash_attn_windowed`] with ALiBi
/// slopes if there are any, and a softcap; 0 is none.
///
/// # Errors
/// As [`attention()`](crate::attention()).
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let attention = Attention {
        alibi_slopes: alibi_slopes.cloned(),
        softcap: nonzero(softcap),
        ..windowed(softmax_scale, window_size_left, window_size_right)
    };
    crate::attention(q, k, v, &attention)
}

/// `candle_flash_attn::flash_attn_varlen`: sequences one after the other. `q` is `[total, Hq, D]`,
/// `k` and `v` are `[total, Hkv, D]`; `seqlens_q` and `seqlens_k` are cumulative lengths `[B + 1]`.
///
/// On a GPU, the host does not read the lengths and plans for the given maximum lengths. On
/// the CPU they are read, and `max_seqlen_q` and `max_seqlen_k` are not used.
///
/// # Errors
/// As [`attention()`](crate::attention()).
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let attention = scaled(softmax_scale, Window::default(), causal);
    let execution = of_longest(max_seqlen_q, max_seqlen_k);
    ragged([q, k, v], [seqlens_q, seqlens_k], &execution, attention)
}

/// `candle_flash_attn::flash_attn_varlen_windowed`: [`flash_attn_varlen`] with a window.
///
/// # Errors
/// As [`attention()`](crate::attention()).
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let attention = windowed(softmax_scale, window_size_left, window_size_right);
    let execution = of_longest(max_seqlen_q, max_seqlen_k);
    ragged([q, k, v], [seqlens_q, seqlens_k], &execution, attention)
}

/// `candle_flash_attn::flash_attn_varlen_alibi`: [`flash_attn_varlen`] with ALiBi slopes.
///
/// # Errors
/// As [`attention()`](crate::attention()).
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let attention = Attention {
        alibi_slopes: Some(alibi_slopes.clone()),
        ..scaled(softmax_scale, Window::default(), causal)
    };
    let execution = of_longest(max_seqlen_q, max_seqlen_k);
    ragged([q, k, v], [seqlens_q, seqlens_k], &execution, attention)
}

/// `candle_flash_attn::flash_attn_varlen_alibi_windowed`: [`flash_attn_varlen_windowed`] with ALiBi
/// slopes.
///
/// # Errors
/// As [`attention()`](crate::attention()).
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let attention = Attention {
        alibi_slopes: Some(alibi_slopes.clone()),
        ..windowed(softmax_scale, window_size_left, window_size_right)
    };
    let execution = of_longest(max_seqlen_q, max_seqlen_k);
    ragged([q, k, v], [seqlens_q, seqlens_k], &execution, attention)
}

/// `candle_flash_attn::flash_attn_varlen_alibi_windowed_softcap`: [`flash_attn_varlen_windowed`]
/// with ALiBi slopes if there are any, and a softcap; 0 is none.
///
/// # Errors
/// As [`attention()`](crate::attention()).
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let attention = Attention {
        alibi_slopes: alibi_slopes.cloned(),
        softcap: nonzero(softcap),
        ..windowed(softmax_scale, window_size_left, window_size_right)
    };
    let execution = of_longest(max_seqlen_q, max_seqlen_k);
    ragged([q, k, v], [seqlens_q, seqlens_k], &execution, attention)
}

/// `candle_flash_attn::flash_attn_varlen_paged_windowed`: queries `[total, Hq, D]` over pools
/// `[blocks, page_block_size, Hkv, D]` behind a block table `[B, max_blocks]`.
///
/// `seqlens_k` are the cumulative key counts of the sequences.
///
/// # Errors
/// As [`attention()`](crate::attention()), or if `page_block_size` is not that of the pools, or if
/// there are `mm_prefix_ranges`: ranges whose tokens see each other outside the window too. Give
/// such calls a [`mask`](regard::Attention::mask) instead.
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    if let Some(ranges) = mm_prefix_ranges {
        let found = format!("given, of shape {:?}", ranges.dims());
        return Err(refuse("mm_prefix_ranges", found, "none; a mask has the same effect"));
    }
    if k.rank() != 4 || k.dims()[1] != page_block_size {
        let allowed = format!("[blocks, {page_block_size}, Hkv, D], by page_block_size");
        return Err(refuse("k", format!("of shape {:?}", k.dims()), &allowed));
    }
    let entries = seqlens_k.dims1()?;
    if entries == 0 {
        return Err(refuse("seqlens_k", "empty", "one entry more than there are sequences"));
    }
    // Of 64 bits, so that a cumulative length that falls is a negative length, which is an error.
    let cumulative = seqlens_k.to_dtype(DType::I64)?;
    let starts = cumulative.narrow(0, 0, entries - 1)?;
    let attention = Attention {
        cu_seqlens_q: Some(seqlens_q.clone()),
        kv_lens: Some((cumulative.narrow(0, 1, entries - 1)? - starts)?),
        block_table: Some(block_table.clone()),
        softcap: softcap.and_then(nonzero),
        ..windowed(softmax_scale, window_size_left, window_size_right)
    };
    let execution = of_longest(max_seqlen_q, max_seqlen_k);
    execution.attention(q, k, v, &attention)
}

/// Bounds of lengths that are on a device.
fn of_longest(max_query_len: usize, max_kv_len: usize) -> Execution {
    Execution {
        max_query_len: Some(max_query_len),
        max_kv_len: Some(max_kv_len),
        ..Execution::default()
    }
}

/// Sequences one after the other, queries and keys.
fn ragged(
    [q, k, v]: [&Tensor; 3],
    [seqlens_q, seqlens_k]: [&Tensor; 2],
    execution: &Execution,
    attention: Attention,
) -> Result<Tensor> {
    let attention = Attention {
        cu_seqlens_q: Some(seqlens_q.clone()),
        cu_seqlens_k: Some(seqlens_k.clone()),
        ..attention
    };
    execution.attention(q, k, v, &attention)
}

/// A window as candle-flash-attn gives it: nothing to the right is causal.
fn windowed(softmax_scale: f32, left: Option<usize>, right: Option<usize>) -> Attention {
    match right {
        Some(0) => scaled(softmax_scale, Window { left, right: None }, true),
        _ => scaled(softmax_scale, Window { left, right }, false),
    }
}

fn scaled(softmax_scale: f32, window: Window, causal: bool) -> Attention {
    Attention { scale: Some(softmax_scale), window, causal, ..Attention::default() }
}

/// A softcap as candle-flash-attn gives it: 0 is none.
fn nonzero(softcap: f32) -> Option<f32> {
    (softcap != 0.0).then_some(softcap)
}
