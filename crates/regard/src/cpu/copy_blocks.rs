//! Copies between the blocks of pools in the host's memory.

use super::executor::Executor;
use super::tasks::run_tasks;
use crate::error::Error;
use crate::paged::{BlockPart, CopyBlocks, Rows};
use crate::tensor::TensorMut;

/// The pools, each of which one task writes.
struct Pools<'a>(*mut TensorMut<'a>);

// SAFETY: tasks take different pools, whose makers promise that they have no element in common.
unsafe impl Sync for Pools<'_> {}

impl<'a> Pools<'a> {
    /// The pool of that number.
    fn pool(&self, number: usize) -> *mut TensorMut<'a> {
        self.0.wrapping_add(number)
    }
}

/// Copies blocks, one copy after the other. Allocates nothing.
///
/// # Errors
/// If an operand breaks the contract. Nothing is copied then.
pub fn copy_blocks(copy: &mut CopyBlocks, executor: &dyn Executor) -> Result<(), Error> {
    copy.check()?;
    let copies = copy.copies;
    let bytes = copy.pools.iter().flat_map(|pool| {
        copies.iter().map(|copy| BlockPart::new(pool, copy.slots).bytes().saturating_mul(2))
    });
    let bytes = bytes.fold(0, usize::saturating_add);
    let count = copy.pools.len();
    let pools = Pools(copy.pools.as_mut_ptr());
    run_tasks(executor, count, bytes, &|number| {
        // SAFETY: there are `count` pools, and each number is given to one task.
        let pool = unsafe { &mut *pools.pool(number) };
        for copy in copies {
            let part = BlockPart::new(pool, copy.slots);
            for rows in part.rows(copy.from, copy.to) {
                // SAFETY: blocks and slots are checked to be in the pool.
                unsafe { copy_rows(pool.as_mut_ptr(), rows) };
            }
        }
    });
    Ok(())
}

/// # Safety
/// The rows are in the memory that is written through `pool`. Rows of two different blocks share no
/// byte.
unsafe fn copy_rows(pool: *mut u8, rows: Rows) {
    for row in 0..rows.rows {
        let offset = (row * rows.pitch) as isize;
        // SAFETY: the caller's promise.
        unsafe {
            let from = pool.offset(rows.from as isize + offset);
            let to = pool.offset(rows.to as isize + offset);
            from.copy_to_nonoverlapping(to, rows.row_bytes);
        }
    }
}
