//! Merging partial results in the host's memory.

use super::executor::Executor;
use super::number::Number;
use super::tasks::run_tasks;
use crate::dtype::DType;
use crate::error::Error;
use crate::merge::{Merge, MergeShape};
use crate::tensor::Dims;
use half::{bf16, f16};

/// Rows of a task.
const TASK_ROWS: usize = 64;

/// Columns that are summed at once, on the stack.
const COLUMNS: usize = 128;

/// Merges partial results. Allocates nothing.
///
/// # Errors
/// If an operand breaks the contract. Nothing is written then.
pub fn merge(merge: &mut Merge, executor: &dyn Executor) -> Result<(), Error> {
    let shape = merge.check()?;
    match merge.parts.dtype() {
        DType::F32 => to_output::<f32>(merge, shape, executor),
        DType::F16 => to_output::<f16>(merge, shape, executor),
        DType::BF16 => to_output::<bf16>(merge, shape, executor),
        _ => unreachable!("checked: parts are floating"),
    }
    Ok(())
}

fn to_output<P: Number>(merge: &mut Merge, shape: MergeShape, executor: &dyn Executor) {
    match merge.out.dtype() {
        DType::F32 => run::<P, f32>(merge, shape, executor),
        DType::F16 => run::<P, f16>(merge, shape, executor),
        DType::BF16 => run::<P, bf16>(merge, shape, executor),
        _ => unreachable!("checked: outputs are floating"),
    }
}

/// A tensor whose dimensions from `first` on, for as many as rows have, count rows.
#[derive(Clone, Copy)]
struct Rows<E> {
    data: *mut E,
    dims: Dims,
    first: usize,
}

impl<E> Rows<E> {
    /// The first element of row `row`.
    fn row(&self, mut row: usize, row_dims: usize) -> *mut E {
        let mut offset = 0;
        for i in (self.first..self.first + row_dims).rev() {
            let n = self.dims.shape()[i];
            offset += (row % n) as i64 * self.dims.strides()[i];
            row /= n;
        }
        self.data.wrapping_offset(offset as isize)
    }

    /// The stride of the first dimension, or of the last.
    fn outer_stride(&self) -> isize {
        self.dims.strides()[0] as isize
    }

    fn inner_stride(&self) -> isize {
        self.dims.strides().last().map_or(0, |&stride| stride as isize)
    }
}

/// The call that tasks share.
struct Call<P, O> {
    shape: MergeShape,
    row_dims: usize,
    parts: Rows<P>,
    part_lse: Rows<f32>,
    out: Rows<O>,
    lse: Option<Rows<f32>>,
}

// SAFETY: the pointers are to checked operands that the call borrows. Tasks write disjoint rows of
// outputs whose elements do not overlap.
unsafe impl<P, O> Sync for Call<P, O> {}

fn run<P: Number, O: Number>(merge: &mut Merge, shape: MergeShape, executor: &dyn Executor) {
    let MergeShape { count, rows, dim } = shape;
    if rows == 0 || dim == 0 {
        return;
    }
    let row_dims = merge.parts.rank() - 2;
    let lse =
        merge.lse.as_mut().map(|lse| Rows { data: lse.as_mut_ptr().cast(), dims: **lse, first: 0 });
    let call = Call::<P, O> {
        shape,
        row_dims,
        parts: Rows { data: merge.parts.as_ptr().cast_mut().cast(), dims: *merge.parts, first: 1 },
        part_lse: Rows {
            data: merge.part_lse.as_ptr().cast_mut().cast(),
            dims: *merge.part_lse,
            first: 1,
        },
        out: Rows { data: merge.out.as_mut_ptr().cast(), dims: *merge.out, first: 0 },
        lse,
    };
    let bytes = rows.saturating_mul(dim).saturating_mul((count + 1) * 4);
    run_tasks(executor, rows.div_ceil(TASK_ROWS), bytes, &|task| {
        for row in task * TASK_ROWS..rows.min((task + 1) * TASK_ROWS) {
            // SAFETY: the operands are checked, and this task alone writes this row.
            unsafe { call.merge_row(row) };
        }
    });
}

impl<P: Number, O: Number> Call<P, O> {
    /// # Safety
    /// The operands are checked, and no other thread writes the row.
    unsafe fn merge_row(&self, row: usize) {
        let MergeShape { count, dim, .. } = self.shape;
        let part_lse = self.part_lse.row(row, self.row_dims);
        let (lse_step, part_step) = (self.part_lse.outer_stride(), self.parts.outer_stride());
        // SAFETY: checked: there is a log-sum-exp of every part and row.
        let lse = |part: usize| unsafe { *part_lse.offset(part as isize * lse_step) };
        let max = (0..count).map(lse).fold(f32::NEG_INFINITY, f32::max);
        // A part that has seen no key has weight 0, even if no part has seen one.
        let weight = |part: usize| match lse(part) {
            f32::NEG_INFINITY => 0.0,
            lse => (lse - max).exp(),
        };
        let sum: f32 = (0..count).map(weight).sum();
        let inverse = if sum > 0.0 { 1.0 / sum } else { 0.0 };
        let (from, to) = (self.parts.row(row, self.row_dims), self.out.row(row, self.row_dims));
        let (from_step, to_step) = (self.parts.inner_stride(), self.out.inner_stride());
        for first in (0..dim).step_by(COLUMNS) {
            let mut sums = [0f32; COLUMNS];
            let sums = &mut sums[..COLUMNS.min(dim - first)];
            for part in 0..count {
                let share = weight(part) * inverse;
                // The output of an empty part is not read: it may be anything.
                if share == 0.0 {
                    continue;
                }
                let from = from.wrapping_offset(part as isize * part_step);
                // SAFETY: checked: every part has `dim` elements of this row, a stride apart.
                unsafe {
                    if from_step == 1 {
                        let row = std::slice::from_raw_parts(from.add(first), sums.len());
                        for (sum, x) in sums.iter_mut().zip(row) {
                            *sum += share * x.to_f32();
                        }
                    } else {
                        for (i, sum) in sums.iter_mut().enumerate() {
                            let x = *from.offset((first + i) as isize * from_step);
                            *sum += share * x.to_f32();
                        }
                    }
                }
            }
            for (i, &sum) in sums.iter().enumerate() {
                // SAFETY: checked: the output has `dim` elements of this row.
                unsafe { *to.offset((first + i) as isize * to_step) = O::from_f32(sum) };
            }
        }
        if let Some(lse) = &self.lse {
            let found = if sum > 0.0 { max + sum.ln() } else { f32::NEG_INFINITY };
            // SAFETY: checked: there is a place for the row's log-sum-exp.
            unsafe { *lse.row(row, self.row_dims) = found };
        }
    }
}
