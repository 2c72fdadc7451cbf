//! `regard.attention`: one call, its plan remembered.

use crate::array::{Array, Place};
use crate::errors::argument;
use crate::framework;
use crate::operands::{Call, Fixed, Main, Results, Takes};
use crate::plan::{Planned, problem, record_streams};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyTuple};
use regard::{DType, Problem};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Plans that are remembered. When there are more, all are forgotten: plans take microseconds to
/// make.
const MAX_PLANS: usize = 512;

type Plans = HashMap<(Problem, Place, Option<usize>), Arc<Planned>>;

/// The plan for a problem, made if it is new.
fn plan_for(problem: Problem, place: Place, threads: Option<usize>) -> PyResult<Arc<Planned>> {
    static PLANS: Mutex<Option<Plans>> = Mutex::new(None);
    // Plans are inserted complete, so the map is consistent even after a panic.
    let lock = || PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (problem, place, threads);
    if let Some(plan) = lock().get_or_insert_default().get(&key) {
        return Ok(Arc::clone(plan));
    }
    let plan = Arc::new(Planned::new(&key.0, place, threads)?);
    let mut plans = lock();
    let plans = plans.get_or_insert_default();
    if plans.len() >= MAX_PLANS {
        plans.clear();
    }
    plans.insert(key, Arc::clone(&plan));
    Ok(plan)
}

const ATTENTION: Takes = Takes {
    function: "attention",
    fixed: true,
    out: true,
    threads: true,
    stream: true,
    prepared: false,
};

/// An array that a call writes: the caller's, or a new one.
fn output<'py>(
    given: Option<&Bound<'py, PyAny>>,
    main: Main<'_, 'py>,
    call: &Call,
    (shape, dtype): (&[usize], DType),
) -> PyResult<Bound<'py, PyAny>> {
    match given {
        Some(given) => Ok(given.clone()),
        None => framework::empty(main.q, &call.q, shape, dtype),
    }
}

/// Whether the log-sum-exp is asked for, and where it goes.
fn lse_wanted<'a, 'py>(call: &'a Call<'py>) -> PyResult<(bool, Option<&'a Bound<'py, PyAny>>)> {
    match &call.extra.lse {
        None => Ok((false, None)),
        Some(wanted) if wanted.is_instance_of::<PyBool>() => Ok((wanted.is_truthy()?, None)),
        Some(array) => Ok((true, Some(array))),
    }
}

/// Attention of q over k and v: softmax(scale * q k^T) v, with every option below in any
/// combination.
///
/// Arrays are of NumPy, PyTorch, JAX, CuPy, or any with DLPack or `__cuda_array_interface__`, all
/// on one device; nothing is copied. Strides are arbitrary but for the innermost one, which is 1.
/// The result is a new array of q's library, or `out`. The plan of each shape is remembered (`Plan`
/// makes one explicitly).
///
/// B counts sequences, Lq and Lk tokens, Hq query heads, Hkv key/value heads (a divisor of Hq).
///
/// q: f32, f16 or bf16 `[B, Lq, Hq, Dk]`, or `[total, Hq, Dk]` with `cu_seqlens_q`; Dk and Dv up
///     to 576.
/// k, v: `[B, Lk, Hkv, Dk]` and `[B, Lk, Hkv, Dv]`, `[total, Hkv, D]` with `cu_seqlens_k`, or pools
///     `[blocks, block_size, Hkv, D]` with `block_table`; f32, f16, bf16, float8_e4m3fn,
///     float8_e5m2 or int8, or bytes (uint8) of a `kv_format`.
/// k_scales, v_scales: f32, multiply codes of 8 bits, for which they are needed: the shape of k and
///     v without the last dimension, any of them 1.
/// value_dim: Dv, with None for v: values are the first Dv dims of k (the latent cache of MLA), and
///     the scales and the format of k are theirs.
/// kv_format: how bytes of k and v are meant: "e4m3", "e5m2", "i8", or "q8_0" and "q4_0" as GGUF
///     stores them, with D / 32 * 34 or D / 32 * 18 bytes in the last dimension. Of a latent cache
///     (`value_dim`) also "mla656": rows of 656 bytes of 576 values.
/// k_format, v_format: of one of them, in the place of kv_format.
/// scale: multiplies scores; 1 / sqrt(Dk) if None.
/// causal: keys after the query's position are hidden.
/// window: (left, right): keys more than so many positions before or after are hidden; None is
///     unbounded.
/// chunk: keys of other chunks of so many positions are hidden (chunked attention).
/// softcap: scores become cap * tanh(score / cap).
/// q_offset: position of the first row of each sequence among its keys, a number or i32 `[B]`; the
///     default makes the rows the last ones: kv_len - q_len.
/// key_offset, key_stride: key j is at position key_offset + key_stride * j, for the keys of a
///     sequence that are spread over devices; key_offset is a number or i32 `[B]` (0), key_stride a
///     number from 1 to 32768 (1). With either of them q_offset is needed.
/// mask: `[B, Hq, Lq, Lk]`, any of them 1: bool (true where a key is seen) or floating (added to
///     scores, in natural units).
/// alibi_slopes: f32 `[Hq]`: slope * distance in positions is subtracted from scores.
/// sinks: f32 `[Hq]`: one more logit in each head's denominator, in natural units.
/// tree_mask: i32 `[B, Lq, ceil(Lq / 32)]`: bit t % 32 of word t / 32 is set if a row sees new
///     token t; replaces `causal`.
/// kv_lens: i32 `[B]`: keys in use.
/// cu_seqlens_q, cu_seqlens_k: i32 `[B + 1]`, from 0 up: rows of each sequence of a ragged batch.
/// block_table: i32 `[B, max_blocks]`: slot j of sequence b is slot j % block_size of block
///     `block_table[b, j / block_size]`; needs `kv_lens`. Entries that no row sees may be anything.
/// rotary_k: with value_dim, the last dims of keys, whose first dims are k, the values: the shape
///     of k with Dk - Dv for Dv, of its type and with its scales. Not with second_k.
/// key_indices: i32 `[rows, Hkv or 1, n]`: the keys that each row of q attends to, by position;
///     entries that are negative or not below the sequence's length are skipped.
/// key_counts: i32 `[rows, Hkv or 1]`: the entries of each list that are used; all if None.
/// page_indices: i32 `[Hkv or 1, B, n]`: the blocks of pools k and v that the rows of each sequence
///     attend to, per key/value head or for all of them, in place of `block_table`; entries that
///     are no block are skipped.
/// page_list_lens: i32 `[Hkv or 1, B]`: the keys of each list of pages; all slots if None.
/// page_numbers: i32, the shape of page_indices: the number of each listed block in its sequence;
///     needs `q_offset`. Without it nothing that needs positions may be given.
/// second_k, second_v: pools of a second cache, of the types of k and v, for second_indices; no
///     second_v with value_dim. second_k_scales, second_v_scales: their scales.
/// second_indices: i32 `[rows, Hkv or 1, n]`: slots of the second cache that each row of q attends
///     to as well, beside key_indices; needs indices_are_slots.
/// second_counts: i32 `[rows, Hkv or 1]`: the entries of each second list that are used.
/// prefix_groups: i32 `[B]`: the prefix group of each sequence, -1 for none. Sequences of a group
///     share their first keys (the first entries of their rows of `block_table` are equal), which
///     may then be read once for all of them.
/// prefix_lens: i32 `[groups]`: the keys that the sequences of each group share.
/// indices_are_slots: entries are physical slots of pools k and v, block * block_size + slot;
///     without `block_table`, and nothing that needs positions or lengths may be given.
/// batch_invariant: a row's bits depend on nothing but its own query and keys.
/// layout: "bshd", or "bhsd" if q, k, v, out and lse have heads before tokens.
/// kv_layout: "nhd", or "hnd" if pages have heads before slots.
/// max_query_len, max_kv_len: bounds of the lengths of a ragged batch, which only the GPU knows.
/// out: where the result goes: `[B, Lq, Hq, Dv]` of q's type or f32.
/// out_dtype: type of a new result: q's, or "f32".
/// lse: True, or where it goes (f32 `[B, Lq, Hq]`): the natural logarithm of each row's softmax
///     denominator, -inf for a row that sees nothing. The result is then (out, lse).
/// stream: the CUDA stream to queue on; the default is the current one of q's library.
/// threads: CPU threads to use; all cores by default.
///
/// On the CPU the call returns when the result is there, and the GIL is released meanwhile. On a
/// GPU it returns when the work is queued; PyTorch's and CuPy's memory is freed in the order of the
/// stream, and for other libraries the call waits for the GPU. Errors are `ArgumentError`,
/// `Refusal` and `DriverError`; nothing is written then.
#[pyfunction]
#[pyo3(
    signature = (q, k, v, **options),
    text_signature = "(q, k, v, *, value_dim=None, scale=None, causal=False, window=None, \
        chunk=None, softcap=None, q_offset=None, key_offset=None, key_stride=None, \
        mask=None, alibi_slopes=None, sinks=None, \
        tree_mask=None, \
        kv_lens=None, cu_seqlens_q=None, cu_seqlens_k=None, block_table=None, \
        k_scales=None, v_scales=None, rotary_k=None, key_indices=None, key_counts=None, \
        page_indices=None, page_list_lens=None, page_numbers=None, \
        second_k=None, second_v=None, second_k_scales=None, second_v_scales=None, \
        second_indices=None, second_counts=None, \
        prefix_groups=None, prefix_lens=None, indices_are_slots=False, \
        kv_format=None, k_format=None, v_format=None, \
        batch_invariant=False, layout='bshd', kv_layout='nhd', max_query_len=None, \
        max_kv_len=None, out=None, out_dtype=None, lse=None, stream=None, threads=None)"
)]
pub fn attention<'py>(
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = q.py();
    let main = Main { q, k, v };
    let call = Call::read(ATTENTION, main, options, Fixed::default())?;
    let out_dtype = match &call.extra.out {
        Some(out) => Array::read_mut("out", out)?.dtype,
        None => call.extra.out_dtype.unwrap_or(call.q.dtype),
    };
    if let Some(wanted) = call.extra.out_dtype
        && wanted != out_dtype
    {
        return Err(argument("out", format!("of type {out_dtype}"), wanted.name()).into());
    }
    let (wants_lse, lse_given) = lse_wanted(&call)?;
    let problem = problem(&call, out_dtype, wants_lse)?;
    let plan = plan_for(problem, call.place(), call.extra.threads)?;

    // Only now is anything allocated: a view with stride 0 can claim any size.
    let mut shape = call.out_shape();
    if call.choices.heads_first && !call.is_ragged() {
        shape.swap(1, 2);
    }
    let out = output(call.extra.out.as_ref(), main, &call, (&shape, out_dtype))?;
    let lse = if wants_lse {
        let shape = &shape[..shape.len() - 1];
        Some(output(lse_given, main, &call, (shape, DType::F32))?)
    } else {
        None
    };
    let results = Results::read(&out, lse.as_ref(), &call)?;
    let stream = framework::stream(call.extra.stream.as_ref(), q, &call.q)?;
    plan.run(py, &call, &results, stream)?;
    let written = [q, k, v, &out].into_iter().chain(lse.as_ref());
    record_streams(&call, written, options, stream)?;

    let is_new = call.extra.out.is_none();
    let hand_over = |made: Bound<'py, PyAny>, is_new: bool| {
        if is_new { framework::handed_over(made, call.q.framework) } else { Ok(made) }
    };
    drop(results);
    let out = hand_over(out, is_new)?;
    let Some(lse) = lse else { return Ok(out) };
    let lse = hand_over(lse, lse_given.is_none())?;
    Ok(PyTuple::new(py, [out, lse])?.into_any())
}

/// An array as regard sees it: (type, shape, strides in elements, device).
#[pyfunction]
pub fn describe(array: &Bound<'_, PyAny>) -> PyResult<(String, Vec<usize>, Vec<i64>, String)> {
    let array = Array::read("array", array)?;
    let name = array.dtype.name().to_string();
    Ok((name, array.shape().to_vec(), array.strides().to_vec(), array.place.to_string()))
}

/// The names of this machine's NVIDIA GPUs; `Refusal` gives the reason if there are none.
#[pyfunction]
pub fn cuda_devices() -> PyResult<Vec<String>> {
    let gpus = regard::cuda::gpus().map_err(crate::errors::Fault)?;
    Ok(gpus.into_iter().map(|gpu| gpu.name).collect())
}
