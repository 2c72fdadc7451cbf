//! Append and merge on the CPU, with the checks and results of `regard::cuda`'s.

use crate::array::Array;
use crate::cache::{Append, Merge};
use crate::errors::{Fault, argument};
use half::{bf16, f16};
use regard::{DType, MAX_HEAD_DIM};

fn expect(name: &str, found: String, holds: bool, allowed: impl Into<String>) -> Result<(), Fault> {
    if holds { Ok(()) } else { Err(argument(name, found, allowed)) }
}

fn is_float(dtype: DType) -> bool {
    dtype.is_float()
}

fn shown(array: &Array) -> String {
    format!("{}{:?} with strides {:?}", array.dtype, array.shape(), array.strides())
}

/// An array of exactly this type and shape, with unit innermost stride.
fn expect_array(array: &Array, dtype: DType, shape: &[usize]) -> Result<(), Fault> {
    let unit = array.shape().last().is_none_or(|&n| n <= 1) || array.strides().last() == Some(&1);
    let holds = array.dtype == dtype && array.shape() == shape && unit;
    let allowed = format!("{dtype}{shape:?} with an innermost stride of 1");
    expect(array.name, shown(array), holds, allowed)
}

/// One element, and where it is: offsets are checked against shapes by the callers.
///
/// # Safety
/// The offset, in elements, is one of the array's.
unsafe fn load(array: &Array, offset: i64) -> f32 {
    let offset = offset as isize;
    // SAFETY: passed on.
    unsafe {
        match array.dtype {
            DType::F16 => (*array.data.cast::<f16>().wrapping_offset(offset)).to_f32(),
            DType::BF16 => (*array.data.cast::<bf16>().wrapping_offset(offset)).to_f32(),
            _ => *array.data.cast::<f32>().wrapping_offset(offset),
        }
    }
}

/// Writes one element.
///
/// # Safety
/// As [`load`], and the memory may be written.
unsafe fn store(array: &Array, offset: i64, value: f32) {
    let offset = offset as isize;
    // SAFETY: passed on.
    unsafe {
        match array.dtype {
            DType::F16 => {
                *array.data.cast::<f16>().wrapping_offset(offset) = f16::from_f32(value);
            }
            DType::BF16 => {
                *array.data.cast::<bf16>().wrapping_offset(offset) = bf16::from_f32(value);
            }
            _ => *array.data.cast::<f32>().wrapping_offset(offset) = value,
        }
    }
}

/// One integer.
///
/// # Safety
/// As [`load`]; the array holds `i32`.
unsafe fn int(array: &Array, offset: i64) -> i64 {
    // SAFETY: passed on.
    i64::from(unsafe { *array.data.cast::<i32>().wrapping_offset(offset as isize) })
}

/// The sizes of an append, after its shapes and types were checked.
struct Sizes {
    tokens: usize,
    heads: usize,
    block_size: usize,
    blocks: usize,
    batch: usize,
    table_blocks: usize,
}

fn check_append(append: &Append) -> Result<Sizes, Fault> {
    let dtype = append.key.dtype;
    expect("key", format!("of type {dtype}"), is_float(dtype), "f32, f16 or bf16")?;
    let wrong = |array: &Array, allowed: &str| {
        argument(array.name, format!("of shape {:?}", array.shape()), allowed)
    };
    let [tokens, heads, head_dim] = *append.key.shape() else {
        return Err(wrong(&append.key, "[total, Hkv, Dk]"));
    };
    let [blocks, block_size, ..] = *append.key_pool.shape() else {
        return Err(wrong(&append.key_pool, "[blocks, block_size, Hkv, Dk]"));
    };
    let [batch, table_blocks] = *append.block_table.shape() else {
        return Err(wrong(&append.block_table, "[B, max_blocks]"));
    };
    let value_dim = append.value.shape().last().copied().unwrap_or(0);
    for (array, dim) in [(&append.key, head_dim), (&append.value, value_dim)] {
        let holds = (1..=MAX_HEAD_DIM).contains(&dim);
        expect(array.name, format!("of head dim {dim}"), holds, format!("1..={MAX_HEAD_DIM}"))?;
    }
    expect("block_size", block_size.to_string(), block_size > 0, "1 or more")?;
    expect_array(&append.key, dtype, &[tokens, heads, head_dim])?;
    expect_array(&append.value, dtype, &[tokens, heads, value_dim])?;
    expect_array(&append.key_pool, dtype, &[blocks, block_size, heads, head_dim])?;
    expect_array(&append.value_pool, dtype, &[blocks, block_size, heads, value_dim])?;
    expect_array(&append.block_table, DType::I32, &[batch, table_blocks])?;
    expect_array(&append.kv_lens, DType::I32, &[batch])?;
    match &append.cu_seqlens {
        Some(cumulative) => expect_array(cumulative, DType::I32, &[batch + 1])?,
        None => {
            let even = if batch == 0 { tokens == 0 } else { tokens.is_multiple_of(batch) };
            let found = format!("missing with {tokens} tokens of {batch} sequences");
            let allowed = "[B + 1] i32, or as many tokens for every sequence";
            expect("cu_seqlens", found, even, allowed)?;
        }
    }
    if let Some(table) = &append.rotary_table {
        let [positions, dims] = *table.shape() else {
            return Err(wrong(table, "[positions, dims]"));
        };
        expect_array(table, DType::F32, &[positions, dims])?;
        expect("rotary_table", shown(table), positions > 0, "at least one position")?;
        let even = dims.is_multiple_of(2) && (2..=head_dim).contains(&dims);
        let allowed = format!("an even number up to {head_dim}");
        expect("rotary_table", format!("of {dims} dims"), even, allowed)?;
    }
    if let Some(query) = &append.query {
        let query_heads = query.shape().get(1).copied().unwrap_or(0);
        expect_array(query, dtype, &[tokens, query_heads, head_dim])?;
    }
    Ok(Sizes { tokens, heads, block_size, blocks, batch, table_blocks })
}

/// Appends new tokens to a paged cache.
///
/// # Errors
/// If an operand breaks the contract; nothing is written then.
pub fn append(append: &Append) -> Result<(), Fault> {
    let sizes = check_append(append)?;
    let even = sizes.tokens.checked_div(sizes.batch).unwrap_or(0);
    for sequence in 0..sizes.batch {
        // SAFETY: the arrays hold these elements: their shapes were checked.
        let (start, end, len) = unsafe {
            let len = int(&append.kv_lens, sequence as i64 * append.kv_lens.strides()[0]);
            match &append.cu_seqlens {
                Some(cumulative) => {
                    let at = |i: usize| int(cumulative, i as i64 * cumulative.strides()[0]);
                    (at(sequence), at(sequence + 1), len)
                }
                None => ((sequence * even) as i64, ((sequence + 1) * even) as i64, len),
            }
        };
        if start < 0 || end > sizes.tokens as i64 {
            let found = format!("{start}..{end} for sequence {sequence}");
            return Err(argument("cu_seqlens", found, format!("rows of 0..{}", sizes.tokens)));
        }
        for token in start..end {
            append_token(append, &sizes, Token { token, sequence, position: len - end + token });
        }
    }
    Ok(())
}

/// A new token: its row, its sequence, its position there.
struct Token {
    token: i64,
    sequence: usize,
    position: i64,
}

fn append_token(append: &Append, sizes: &Sizes, token: Token) {
    let Token { token, sequence, position } = token;
    let angles = append.rotary_table.as_ref().map(|table| Angles {
        table,
        row: position.clamp(0, table.shape()[0] as i64 - 1),
        dims: table.shape()[1],
        interleaved: append.interleaved,
    });
    if let (Some(angles), Some(query)) = (&angles, &append.query) {
        for head in 0..query.shape()[1] as i64 {
            let at = token * query.strides()[0] + head * query.strides()[1];
            let row: Vec<f32> = angles.rotated(query, at).collect();
            for (i, x) in row.into_iter().enumerate() {
                // SAFETY: token and head are within the shape, and the rotated dims within the head.
                unsafe { store(query, at + i as i64, x) };
            }
        }
    }
    let column = position / sizes.block_size as i64;
    if position < 0 || column >= sizes.table_blocks as i64 {
        return;
    }
    let strides = append.block_table.strides();
    // SAFETY: sequence and column are within the table.
    let block =
        unsafe { int(&append.block_table, sequence as i64 * strides[0] + column * strides[1]) };
    if !(0..sizes.blocks as i64).contains(&block) {
        return;
    }
    let slot = position % sizes.block_size as i64;
    for (from, to, angles) in [
        (&append.key, &append.key_pool, angles.as_ref()),
        (&append.value, &append.value_pool, None),
    ] {
        let dims = from.shape()[2];
        for head in 0..sizes.heads as i64 {
            let source = token * from.strides()[0] + head * from.strides()[1];
            let target = block * to.strides()[0] + slot * to.strides()[1] + head * to.strides()[2];
            let size = from.dtype.size();
            // SAFETY: token, head, block and slot are within the shapes, rows are contiguous, and a
            // new token is not in the pool yet.
            unsafe {
                let byte = |array: &Array, offset: i64| {
                    array.data.wrapping_offset(offset as isize * size as isize)
                };
                std::ptr::copy(byte(from, source), byte(to, target), dims * size);
                for (i, x) in angles.iter().flat_map(|a| a.rotated(from, source)).enumerate() {
                    store(to, target + i as i64, x);
                }
            }
        }
    }
}

/// Cosines and sines of one position.
struct Angles<'a> {
    table: &'a Array,
    row: i64,
    dims: usize,
    interleaved: bool,
}

impl Angles<'_> {
    /// The rotated leading dims of the head that starts at `at`, which has as many.
    fn rotated(&self, array: &Array, at: i64) -> impl Iterator<Item = f32> {
        let half = self.dims / 2;
        (0..self.dims).map(move |i| {
            let (is_first, pair, partner) = if self.interleaved {
                (i % 2 == 0, i / 2, i ^ 1)
            } else {
                (i < half, i % half, if i < half { i + half } else { i - half })
            };
            let row = self.row * self.table.strides()[0];
            // SAFETY: row and columns are within the table, both dims within the head.
            let (cosine, sine, x, y) = unsafe {
                (
                    load(self.table, row + pair as i64),
                    load(self.table, row + (half + pair) as i64),
                    load(array, at + i as i64),
                    load(array, at + partner as i64),
                )
            };
            if is_first { x * cosine - y * sine } else { x * cosine + y * sine }
        })
    }
}

/// Merges partial results.
///
/// # Errors
/// If an operand breaks the contract; nothing is written then.
pub fn merge(merge: &Merge) -> Result<(), Fault> {
    let Merge { parts, part_lse, out, lse } = merge;
    let [count, rows @ .., dim] = parts.shape() else {
        return Err(argument(
            "parts",
            format!("of shape {:?}", parts.shape()),
            "[parts, rows, dim]",
        ));
    };
    expect("parts", format!("of type {}", parts.dtype), is_float(parts.dtype), "f32, f16 or bf16")?;
    let shapes = [
        (part_lse, &parts.shape()[..parts.shape().len() - 1], true),
        (out, &parts.shape()[1..], false),
        (lse, rows, true),
    ];
    for (array, shape, is_f32) in shapes {
        let typed = if is_f32 { array.dtype == DType::F32 } else { is_float(array.dtype) };
        let kind = if is_f32 { "f32" } else { "a floating type, " };
        let holds = typed && array.shape() == shape;
        expect(array.name, shown(array), holds, format!("{kind}{shape:?}"))?;
    }
    let mut row = vec![0.0f32; *dim];
    let mut other = vec![0.0f32; *dim];
    for number in 0..rows.iter().product() {
        let mut sum = f32::NEG_INFINITY;
        row.fill(0.0);
        for part in 0..*count as i64 {
            let at = part * parts.strides()[0] + offset(number, rows, &parts.strides()[1..]);
            let at_lse =
                part * part_lse.strides()[0] + offset(number, rows, &part_lse.strides()[1..]);
            let step = parts.strides().last().copied().unwrap_or(1);
            // SAFETY: part, row and dims are within the shapes.
            let part_sum = unsafe {
                for (i, x) in other.iter_mut().enumerate() {
                    *x = load(parts, at + i as i64 * step);
                }
                load(part_lse, at_lse)
            };
            regard::state::merge(&mut row, &mut sum, &other, part_sum);
        }
        let (at, step) = (offset(number, rows, out.strides()), out.strides().last().copied());
        // SAFETY: as above.
        unsafe {
            for (i, &x) in row.iter().enumerate() {
                store(out, at + i as i64 * step.unwrap_or(1), x);
            }
            store(lse, offset(number, rows, lse.strides()), sum);
        }
    }
    Ok(())
}

/// Where row `number` is, counted over all of `rows` in order.
fn offset(mut number: usize, rows: &[usize], strides: &[i64]) -> i64 {
    let mut offset = 0;
    for (&n, &stride) in rows.iter().zip(strides).rev() {
        offset += (number % n) as i64 * stride;
        number /= n;
    }
    offset
}
