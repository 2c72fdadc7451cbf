//! Checks of contents: lengths, table entries, slopes and sinks, of operands that the host can
//! read.

use super::{Inputs, KvStorage, MAX_FACTOR, Problem, span};
use crate::error::Error;
use crate::memory::{Host, Memory};
use crate::tensor::{MAX_RANK, Tensor};
use std::any::TypeId;

/// Whether a scale or a slope is a number that every kernel takes: NaN is not.
pub(super) fn is_within_factor_bound(factor: f32) -> bool {
    factor.abs() <= MAX_FACTOR
}

/// The longest sequence that cumulative lengths over `total` rows can describe: `total` if they
/// cannot be read. Their type, shape and strides have been checked, not their entries.
pub(super) fn longest<M: Memory>(
    argument: &str,
    cumulative: &Tensor<M>,
    total: usize,
) -> Result<usize, Error> {
    let Some(cumulative) = cumulative.as_host() else { return Ok(total) };
    check_cumulative(argument, cumulative.as_slice().expect("checked: an i32 vector"), total)
}

/// Checks lengths, table entries, slopes and sinks; nothing if the host cannot read them.
pub(super) fn check_contents<M: Memory>(
    inputs: &Inputs<M>,
    problem: &Problem,
) -> Result<(), Error> {
    let Some(inputs) = as_host(inputs) else { return Ok(()) };
    check_logits(inputs)?;
    check_static_scales("k_scales", &inputs.attention.k_scales)?;
    check_static_scales("v_scales", &inputs.attention.v_scales)?;
    check_static_scales("second_k_scales", &inputs.attention.second_k_scales)?;
    check_static_scales("second_v_scales", &inputs.attention.second_v_scales)?;
    super::selection::check_counts(inputs)?;
    super::page_lists::check_lens(inputs)?;
    check_lengths(inputs, problem)?;
    super::prefix::check_prefixes(inputs, problem)
}

/// The same inputs as views of the host's memory, if they are in it. Not a copy, which would take
/// a tenth of the shortest calls.
fn as_host<'i, 'a, M: Memory>(inputs: &'i Inputs<'a, M>) -> Option<&'i Inputs<'a>> {
    let inputs = std::ptr::from_ref(inputs).cast::<Inputs<'a, Host>>();
    // SAFETY: M is Host, so this is the reference that it was.
    (TypeId::of::<M>() == TypeId::of::<Host>()).then(|| unsafe { &*inputs })
}

/// Cumulative lengths: from 0, never falling, ending inside `total`; the longest step is returned.
fn check_cumulative(argument: &str, cumulative: &[i32], total: usize) -> Result<usize, Error> {
    let mut longest = 0;
    if cumulative[0] != 0 {
        return Err(Error::argument(format!("{argument}[0]"), cumulative[0], "0"));
    }
    for (i, pair) in cumulative.windows(2).enumerate() {
        if pair[1] < pair[0] || pair[1] as usize > total {
            return Err(Error::argument(
                format!("{argument}[{}]", i + 1),
                pair[1],
                format!("{}..={total} (never falling, within the rows there are)", pair[0]),
            ));
        }
        longest = longest.max((pair[1] - pair[0]) as usize);
    }
    let last = *cumulative.last().expect("one entry at least") as usize;
    if last != total {
        return Err(Error::argument(
            format!("{argument}[{}]", cumulative.len() - 1),
            last,
            format!("{total} (all rows belong to a sequence)"),
        ));
    }
    Ok(longest)
}

/// Slopes and sinks.
fn check_logits(inputs: &Inputs) -> Result<(), Error> {
    let slope = |x: f32| is_within_factor_bound(x);
    let sink = |x: f32| x.is_finite() || x == f32::NEG_INFINITY;
    check_vector(
        "alibi_slopes",
        &inputs.attention.alibi_slopes,
        slope,
        "a finite number of magnitude at most 2^60 (1.15e18)",
    )?;
    check_vector("sinks", &inputs.attention.sinks, sink, "a finite number or minus infinity")
}

/// Scales that all tokens share. Others can belong to a key that no row sees, and be anything.
fn check_static_scales(argument: &str, scales: &Option<Tensor>) -> Result<(), Error> {
    let Some(scales) = scales else { return Ok(()) };
    let Some((&heads, 1)) =
        scales.shape().split_last().map(|(heads, outer)| (heads, outer.iter().product::<usize>()))
    else {
        return Ok(());
    };
    let mut index = [0; MAX_RANK];
    for head in 0..heads {
        index[scales.rank() - 1] = head;
        let scale = scales.at(&index[..scales.rank()]);
        if !(0.0..=f64::from(f32::MAX)).contains(&scale) {
            let argument = format!("{argument}{:?}", &index[..scales.rank()]);
            return Err(Error::argument(argument, scale, "a finite number from 0 up"));
        }
    }
    Ok(())
}

/// Every element of a contiguous f32 vector, if it is given.
fn check_vector(
    argument: &str,
    tensor: &Option<Tensor>,
    is_allowed: impl Fn(f32) -> bool,
    allowed: &str,
) -> Result<(), Error> {
    let Some(tensor) = tensor else { return Ok(()) };
    let values = tensor.as_slice::<f32>().expect("a contiguous f32 vector");
    match values.iter().position(|&x| !is_allowed(x)) {
        Some(i) => Err(Error::argument(format!("{argument}[{i}]"), values[i], allowed)),
        None => Ok(()),
    }
}

/// Lengths, and the table entries that they make visible.
fn check_lengths(inputs: &Inputs, problem: &Problem) -> Result<(), Error> {
    let attention = &inputs.attention;
    let (mut longest_query, mut longest_kv) = (0, 0);
    let vectors = [
        &attention.kv_lens,
        &attention.cu_seqlens_q,
        &attention.cu_seqlens_k,
        &attention.block_table,
    ];
    let same_lengths = vectors.iter().all(|vector| vector.is_none());
    // Without `kv_lens` all sequences are equally long, so one check does: an empty view may have
    // 2^31 sequences.
    if same_lengths && problem.batch > 0 {
        (longest_query, longest_kv) = (problem.query_len, problem.kv_len);
    }
    for index in 0..if same_lengths { 0 } else { problem.batch } {
        // Lengths first: `sequence` trusts them.
        let capacity = match (&attention.cu_seqlens_k, problem.keys) {
            (Some(cumulative), _) => span(cumulative.as_slice().expect("checked above"), index).1,
            (None, _) => problem.kv_len,
        };
        if let Some(lens) = &attention.kv_lens {
            let len = lens.as_slice::<i32>().expect("checked above")[index];
            if len < 0 || len as usize > capacity {
                return Err(Error::argument(
                    format!("kv_lens[{index}]"),
                    len,
                    format!("0..={capacity} (the keys that sequence can hold)"),
                ));
            }
        }
        let sequence = inputs.sequence(index);
        longest_query = longest_query.max(sequence.q_len);
        longest_kv = longest_kv.max(sequence.kv_len);
        if let (Some(row), KvStorage::Paged { block_size }, None) =
            (inputs.block_row(index), problem.keys, problem.key_lists)
        {
            let visible =
                problem.variant.visible_to_rows(sequence.q_offset, sequence.q_len, sequence.keys());
            if visible.is_empty() {
                continue;
            }
            let blocks = inputs.k.shape()[0];
            let used = visible.start / block_size..visible.end.div_ceil(block_size);
            let outside = |&block: &i32| block < 0 || block as usize >= blocks;
            if let Some(i) = row[used.clone()].iter().position(outside) {
                let i = used.start + i;
                return Err(Error::argument(
                    format!("block_table[{index}, {i}]"),
                    row[i],
                    format!("0..{blocks}: keys {visible:?} of the sequence are visible"),
                ));
            }
        }
    }
    inputs.check_mask_covers(longest_query, longest_kv, problem)
}
