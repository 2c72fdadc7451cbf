//! Appending to a cache in the host's memory.

use super::executor::Executor;
use super::number::Number;
use super::tasks::run_tasks;
use crate::append::{Append, AppendLatent, AppendScales, AppendShape};
use crate::dtype::DType;
use crate::error::Error;
use crate::problem::MAX_HEAD_DIM;
use crate::quantize::{dynamic_scale, quantize_blocks, quantize_row};
use crate::tensor::{Dims, Tensor, TensorMut};
use half::{bf16, f16};

/// Writes new keys and values to their slots, and rotates them and queries if asked. Lengths and
/// table entries are clamped as on a GPU: tokens without a slot are dropped. Allocates nothing.
///
/// # Errors
/// If an operand breaks the contract. Nothing is written then.
pub fn append(append: &mut Append, executor: &dyn Executor) -> Result<(), Error> {
    let shape = append.check()?;
    run_typed(append, shape, executor);
    Ok(())
}

/// [`append`] to a latent cache.
///
/// # Errors
/// As [`append`].
pub fn append_latent(append: &mut AppendLatent, executor: &dyn Executor) -> Result<(), Error> {
    let shape = append.check()?;
    run_typed(&mut append.whole(), shape, executor);
    Ok(())
}

fn run_typed(append: &mut Append, shape: AppendShape, executor: &dyn Executor) {
    match shape.dtype {
        DType::F32 => run::<f32>(append, shape, executor),
        DType::F16 => run::<f16>(append, shape, executor),
        DType::BF16 => run::<bf16>(append, shape, executor),
        _ => unreachable!("checked: keys are floating"),
    }
}

/// The rows of a tensor: heads of tokens.
#[derive(Clone, Copy)]
struct Rows<E> {
    data: *mut E,
    token_stride: i64,
    head_stride: i64,
}

impl<E> Rows<E> {
    /// The first element of a row of new tokens.
    fn row(&self, token: usize, head: usize) -> *mut E {
        let offset = token as i64 * self.token_stride + head as i64 * self.head_stride;
        self.data.wrapping_offset(offset as isize)
    }
}

/// A tensor that has something for each head of each slot: a pool, or its scales.
#[derive(Clone, Copy)]
struct SlotHeads {
    data: *mut u8,
    /// Strides of the block, the slot and the head, in bytes; 0 if the tensor is broadcast.
    strides: [i64; 3],
}

impl SlotHeads {
    fn new(data: *mut u8, dims: &Dims) -> SlotHeads {
        let bytes = dims.dtype().size() as i64;
        let stride = |i: usize| if dims.shape()[i] == 1 { 0 } else { dims.strides()[i] * bytes };
        SlotHeads { data, strides: [stride(0), stride(1), stride(2)] }
    }

    fn at(&self, slot: Slot, head: usize) -> *mut u8 {
        let [block_stride, slot_stride, head_stride] = self.strides;
        let offset = slot.block as i64 * block_stride
            + slot.slot as i64 * slot_stride
            + head as i64 * head_stride;
        self.data.wrapping_offset(offset as isize)
    }
}

/// Scales of a pool.
#[derive(Clone, Copy)]
enum Scales {
    /// The pool's format has none.
    None,
    Static(SlotHeads),
    Dynamic(SlotHeads),
}

impl Scales {
    fn new(scales: Option<&mut AppendScales>) -> Scales {
        match scales {
            None => Scales::None,
            Some(AppendScales::Static(tensor)) => {
                Scales::Static(SlotHeads::new(tensor.as_ptr().cast_mut(), tensor))
            }
            Some(AppendScales::Dynamic(tensor)) => {
                Scales::Dynamic(SlotHeads::new(tensor.as_mut_ptr(), tensor))
            }
        }
    }
}

/// A pool of keys or values.
#[derive(Clone, Copy)]
struct Pool {
    heads: SlotHeads,
    dtype: DType,
    scales: Scales,
}

impl Pool {
    fn new(pool: &mut TensorMut, scales: Option<&mut AppendScales>) -> Pool {
        let heads = SlotHeads::new(pool.as_mut_ptr(), pool);
        Pool { heads, dtype: pool.dtype(), scales: Scales::new(scales) }
    }

    /// Quantizes a row to its place.
    ///
    /// # Safety
    /// The pool has that slot and head, with as many values as the row, and no other thread uses
    /// them.
    unsafe fn quantize(&self, row: &[f32], slot: Slot, head: usize) {
        let bytes = row.len() / self.dtype.values() * self.dtype.size();
        let to = self.heads.at(slot, head);
        // SAFETY: the pool is checked: a head is `bytes` neighbours.
        let codes = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
        let scale = match self.scales {
            Scales::None => return quantize_blocks(row, self.dtype, codes),
            // SAFETY: the scales are checked: f32, for every slot and head.
            Scales::Static(scales) => unsafe { scales.at(slot, head).cast::<f32>().read() },
            Scales::Dynamic(scales) => {
                let scale = dynamic_scale(row, self.dtype);
                // SAFETY: as above, and no two share an address.
                unsafe { scales.at(slot, head).cast::<f32>().write(scale) };
                scale
            }
        };
        quantize_row(row, self.dtype, scale, codes);
    }
}

/// The destination of a token.
#[derive(Clone, Copy)]
struct Slot {
    block: usize,
    slot: usize,
}

/// Rotary position embedding.
#[derive(Clone, Copy)]
struct Rotation<'a> {
    table: *const f32,
    interleaved: bool,
    shape: &'a AppendShape,
}

/// The call that tasks share.
struct Call<'a, E> {
    shape: AppendShape,
    key: Rows<E>,
    value: Rows<E>,
    query: Option<Rows<E>>,
    key_pool: Pool,
    value_pool: Pool,
    rotation: Option<Rotation<'a>>,
    block_table: Option<Tensor<'a>>,
    kv_lens: &'a [i32],
    cu_seqlens: Option<&'a [i32]>,
}

// SAFETY: the pointers are to checked operands that the call borrows. Tasks write the rows of one
// head each: heads of a pool are disjoint (`is_injective`), and the makers of views of two pools
// promise as much of these.
unsafe impl<E> Sync for Call<'_, E> {}

fn read_rows<E>(tensor: &Tensor) -> Rows<E> {
    let strides = tensor.strides();
    let data = tensor.as_ptr().cast_mut().cast();
    Rows { data, token_stride: strides[0], head_stride: strides[1] }
}

fn ints<'a>(tensor: &Tensor<'a>) -> &'a [i32] {
    tensor.as_slice().expect("checked: an i32 vector")
}

fn run<E: Number>(append: &mut Append, shape: AppendShape, executor: &dyn Executor) {
    if shape.tokens == 0 || shape.batch == 0 {
        return;
    }
    let mut query = None;
    if let Some(tensor) = append.rotary.as_mut().and_then(|rotary| rotary.query.as_mut()) {
        let data = tensor.as_mut_ptr().cast();
        let strides = tensor.strides();
        query = Some(Rows { data, token_stride: strides[0], head_stride: strides[1] });
    }
    let rotation = append.rotary.as_ref().map(|rotary| Rotation {
        table: rotary.table.as_ptr().cast(),
        interleaved: rotary.interleaved,
        shape: &shape,
    });
    let call = Call::<E> {
        shape,
        key: read_rows(&append.key),
        value: read_rows(&append.value),
        query,
        key_pool: Pool::new(&mut append.key_pool, append.k_scales.as_mut()),
        value_pool: Pool::new(&mut append.value_pool, append.v_scales.as_mut()),
        rotation,
        block_table: append.block_table,
        kv_lens: ints(&append.kv_lens),
        cu_seqlens: append.cu_seqlens.as_ref().map(ints),
    };
    let AppendShape { tokens, kv_heads, query_heads, head_dim, value_dim, .. } = shape;
    let elements = kv_heads * (head_dim + value_dim) + query_heads * head_dim;
    let bytes = tokens.saturating_mul(elements).saturating_mul(2 * size_of::<E>());
    // A task per head: for any block table, no two threads write the same row of a slot.
    run_tasks(executor, kv_heads + query_heads, bytes, &|head| {
        for token in 0..call.shape.tokens {
            // SAFETY: the operands are checked, and this task alone writes this head.
            unsafe { call.append_token(token, head) };
        }
    });
}

impl<E: Number> Call<'_, E> {
    /// Writes key and value of one head of a token, or rotates a query head. Query heads are
    /// numbered after the key/value heads.
    ///
    /// # Safety
    /// The operands are checked, and no other thread writes this head.
    unsafe fn append_token(&self, token: usize, head: usize) {
        let Some((sequence, position)) = self.position(token) else { return };
        // SAFETY: the rows are inside the checked operands: token, head, block and slot are below
        // the dimensions that the strides belong to.
        unsafe {
            if let Some(head) = head.checked_sub(self.shape.kv_heads) {
                if let (Some(query), Some(rotation)) = (self.query, self.rotation) {
                    let row = query.row(token, head);
                    let dims = row.add(self.shape.rotary_start);
                    rotation.rotate(dims, dims, position);
                }
                return;
            }
            let Some(slot) = self.slot(sequence, position) else { return };
            self.append_key(self.key.row(token, head), position, slot, head);
            if self.shape.value_dim > 0 {
                self.append_value(self.value.row(token, head), slot, head);
            }
        }
    }

    /// # Safety
    /// As [`Call::append_token`]; `from` is a new key.
    unsafe fn append_key(&self, from: *const E, position: i64, slot: Slot, head: usize) {
        let (dims, pool) = (self.shape.head_dim, &self.key_pool);
        let start = self.shape.rotary_start;
        let rotated = start + if self.rotation.is_some() { self.shape.rotary_dim } else { 0 };
        // SAFETY: as for the caller: both rows have `dims` elements.
        unsafe {
            if pool.dtype == self.shape.dtype {
                let to = pool.heads.at(slot, head).cast::<E>();
                if let Some(rotation) = self.rotation {
                    rotation.rotate(from.add(start), to.add(start), position);
                }
                from.copy_to_nonoverlapping(to, start);
                from.add(rotated).copy_to_nonoverlapping(to.add(rotated), dims - rotated);
                return;
            }
            let mut buffer = [0.0; MAX_HEAD_DIM];
            let row = &mut buffer[..dims];
            if let Some(rotation) = self.rotation {
                rotation.rotate(from.add(start), row[start..].as_mut_ptr(), position);
            }
            read_row(from, &mut row[..start]);
            read_row(from.add(rotated), &mut row[rotated..]);
            pool.quantize(row, slot, head);
        }
    }

    /// # Safety
    /// As [`Call::append_token`]; `from` is a new value.
    unsafe fn append_value(&self, from: *const E, slot: Slot, head: usize) {
        let (dims, pool) = (self.shape.value_dim, &self.value_pool);
        // SAFETY: as for the caller: both rows have `dims` elements.
        unsafe {
            if pool.dtype == self.shape.dtype {
                let to = pool.heads.at(slot, head).cast::<E>();
                from.copy_to_nonoverlapping(to, dims);
                return;
            }
            let mut buffer = [0.0; MAX_HEAD_DIM];
            read_row(from, &mut buffer[..dims]);
            pool.quantize(&buffer[..dims], slot, head);
        }
    }

    /// The sequence of a new token, and its position there; `None` if no sequence has it.
    fn position(&self, token: usize) -> Option<(usize, i64)> {
        let (sequence, place, count) = match self.cu_seqlens {
            None => {
                let count = self.shape.tokens / self.shape.batch;
                (token / count, token % count, count as i64)
            }
            Some(cumulative) => {
                // The last sequence that starts at or before the token: empty ones before it are
                // passed over.
                let token = token as i64;
                let ends = &cumulative[1..];
                let sequence = ends.partition_point(|&end| i64::from(end) <= token);
                let (start, end) =
                    (i64::from(cumulative[sequence]), i64::from(*ends.get(sequence)?));
                (sequence, usize::try_from(token - start).ok()?, end - start)
            }
        };
        Some((sequence, i64::from(self.kv_lens[sequence]) - count + place as i64))
    }

    /// The slot of a token; `None` if the sequence has none for it.
    fn slot(&self, sequence: usize, position: i64) -> Option<Slot> {
        let position = usize::try_from(position).ok()?;
        let (column, slot) = (position / self.shape.block_size, position % self.shape.block_size);
        if column >= self.shape.table_blocks {
            return None;
        }
        let Some(table) = &self.block_table else { return Some(Slot { block: sequence, slot }) };
        let offset = sequence as i64 * table.strides()[0] + column as i64;
        // SAFETY: checked: the table is `[batch, table_blocks]` of i32 with an innermost stride of
        // 1, and has both indices.
        let block = unsafe { *table.as_ptr().cast::<i32>().offset(offset as isize) };
        let block = usize::try_from(block).ok().filter(|&block| block < self.shape.blocks)?;
        Some(Slot { block, slot })
    }
}

/// Reads the elements of a row.
///
/// # Safety
/// The row has `row.len()` elements.
unsafe fn read_row<E: Number>(from: *const E, row: &mut [f32]) {
    for (i, x) in row.iter_mut().enumerate() {
        // SAFETY: as above.
        *x = unsafe { *from.add(i) }.to_f32();
    }
}

impl Rotation<'_> {
    /// Rotates the rotary dims of a row, from one place to another or in place.
    ///
    /// # Safety
    /// Both rows have `rotary_dim` elements, and are the same or disjoint.
    unsafe fn rotate<E: Number, T: Number>(&self, from: *const E, to: *mut T, position: i64) {
        let (dims, half) = (self.shape.rotary_dim, self.shape.rotary_dim / 2);
        let last = self.shape.rotary_positions as i64 - 1;
        let angles = self.table.wrapping_add(position.clamp(0, last) as usize * dims);
        for pair in 0..half {
            let (a, b) =
                if self.interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + half) };
            // SAFETY: the table has `dims` entries for each position, the rows as many elements.
            unsafe {
                let (cosine, sine) = (*angles.add(pair), *angles.add(half + pair));
                let (x, y) = ((*from.add(a)).to_f32(), (*from.add(b)).to_f32());
                *to.add(a) = T::from_f32(x * cosine - y * sine);
                *to.add(b) = T::from_f32(y * cosine + x * sine);
            }
        }
    }
}
