//! Appending to a paged cache in the host's memory.

use super::executor::Executor;
use super::number::Number;
use super::tasks::run_tasks;
use crate::append::{Append, AppendShape};
use crate::error::Error;
use crate::tensor::{DType, Tensor, TensorMut};
use half::{bf16, f16};

/// Writes new keys and values to their slots, and rotates them and queries if asked. Lengths and
/// table entries are clamped as on a GPU: tokens without a slot are dropped. Allocates nothing.
///
/// # Errors
/// If an operand breaks the contract. Nothing is written then.
pub fn append(append: &mut Append, executor: &dyn Executor) -> Result<(), Error> {
    let shape = append.check()?;
    match shape.dtype {
        DType::F32 => run::<f32>(append, shape, executor),
        DType::F16 => run::<f16>(append, shape, executor),
        DType::BF16 => run::<bf16>(append, shape, executor),
        _ => unreachable!("checked: keys are floating"),
    }
    Ok(())
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

/// A pool: rows of slots, in blocks.
#[derive(Clone, Copy)]
struct Pool<E> {
    slots: Rows<E>,
    block_stride: i64,
}

impl<E> Pool<E> {
    fn row(&self, slot: Slot, head: usize) -> *mut E {
        let block = slot.block as i64 * self.block_stride;
        self.slots.row(slot.slot, head).wrapping_offset(block as isize)
    }
}

/// Where a token goes.
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

/// What tasks share.
struct Call<'a, E> {
    shape: AppendShape,
    key: Rows<E>,
    value: Rows<E>,
    query: Option<Rows<E>>,
    key_pool: Pool<E>,
    value_pool: Pool<E>,
    rotation: Option<Rotation<'a>>,
    block_table: Tensor<'a>,
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

fn pool<E>(tensor: &mut TensorMut) -> Pool<E> {
    let data = tensor.as_mut_ptr().cast();
    let strides = tensor.strides();
    let slots = Rows { data, token_stride: strides[1], head_stride: strides[2] };
    Pool { slots, block_stride: strides[0] }
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
        key_pool: pool(&mut append.key_pool),
        value_pool: pool(&mut append.value_pool),
        rotation,
        block_table: append.block_table,
        kv_lens: ints(&append.kv_lens),
        cu_seqlens: append.cu_seqlens.as_ref().map(ints),
    };
    let AppendShape { tokens, kv_heads, query_heads, head_dim, value_dim, .. } = shape;
    let elements = kv_heads * (head_dim + value_dim) + query_heads * head_dim;
    let bytes = tokens.saturating_mul(elements).saturating_mul(2 * size_of::<E>());
    // A head is a task: whatever the table says, no two threads write the same slot.
    run_tasks(executor, kv_heads + query_heads, bytes, &|head| {
        for token in 0..call.shape.tokens {
            // SAFETY: the operands are checked, and this task alone writes this head.
            unsafe { call.append_token(token, head) };
        }
    });
}

impl<E: Number> Call<'_, E> {
    /// Writes key and value of one head of a token, or rotates a query head, which are numbered
    /// after the key/value heads.
    ///
    /// # Safety
    /// The operands are checked, and no other thread writes this head.
    unsafe fn append_token(&self, token: usize, head: usize) {
        let Some((sequence, position)) = self.position(token) else { return };
        // SAFETY: the rows lie inside the checked operands: token, head, block and slot are below
        // the dimensions that the strides belong to.
        unsafe {
            if let Some(head) = head.checked_sub(self.shape.kv_heads) {
                if let (Some(query), Some(rotation)) = (self.query, self.rotation) {
                    let row = query.row(token, head);
                    rotation.rotate(row, row, position);
                }
                return;
            }
            let Some(slot) = self.slot(sequence, position) else { return };
            let (from, to) = (self.key.row(token, head), self.key_pool.row(slot, head));
            let mut rotated = 0;
            if let Some(rotation) = self.rotation {
                rotation.rotate(from, to, position);
                rotated = self.shape.rotary_dim;
            }
            from.add(rotated)
                .copy_to_nonoverlapping(to.add(rotated), self.shape.head_dim - rotated);
            let (from, to) = (self.value.row(token, head), self.value_pool.row(slot, head));
            from.copy_to_nonoverlapping(to, self.shape.value_dim);
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

    /// Where a token goes; `None` if the table has no place for it.
    fn slot(&self, sequence: usize, position: i64) -> Option<Slot> {
        let position = usize::try_from(position).ok()?;
        let (column, slot) = (position / self.shape.block_size, position % self.shape.block_size);
        if column >= self.shape.table_blocks {
            return None;
        }
        let table = &self.block_table;
        let offset = sequence as i64 * table.strides()[0] + column as i64;
        // SAFETY: checked: the table is `[batch, table_blocks]` of i32 with an innermost stride of
        // 1, and has both indices.
        let block = unsafe { *table.as_ptr().cast::<i32>().offset(offset as isize) };
        let block = usize::try_from(block).ok().filter(|&block| block < self.shape.blocks)?;
        Some(Slot { block, slot })
    }
}

impl Rotation<'_> {
    /// Rotates the leading dims of a row from one place to another, or where they lie.
    ///
    /// # Safety
    /// Both rows have `rotary_dim` elements, and are the same or disjoint.
    unsafe fn rotate<E: Number>(&self, from: *const E, to: *mut E, position: i64) {
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
                *to.add(a) = E::from_f32(x * cosine - y * sine);
                *to.add(b) = E::from_f32(y * cosine + x * sine);
            }
        }
    }
}
