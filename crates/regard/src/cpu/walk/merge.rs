//! Split-KV: merges the partial states of splits. Serial splits (one item walks them in order) and
//! parallel splits (one item each) merge through the same code in key order, so their results have
//! the same bits.

use super::call::ItemContext;
use super::scratch::Sizes;
use crate::cpu::vector::Vector;
use crate::state::State;

/// Sets rows to the empty state.
///
/// # Safety
/// Output and states hold `rows` rows of the scratch layout.
pub unsafe fn clear(sizes: &Sizes, rows: usize, output: *mut f32, states: *mut State) {
    // SAFETY: same contract.
    unsafe {
        output.write_bytes(0, rows * sizes.padded_value_dim);
        for row in 0..rows {
            states.add(row).write(State::EMPTY);
        }
    }
}

/// Merges one row's state of a split into the state of the splits before it.
///
/// # Safety
/// As [`Vector`]'s methods. Both rows hold `padded_value_dim` floats.
#[inline(always)]
unsafe fn merge_row<V: Vector>(
    sizes: &Sizes,
    merged_output: *mut f32,
    merged_state: &mut State,
    split_output: *const f32,
    split_state: State,
) {
    if split_state == State::EMPTY {
        return;
    }
    let (state, merged_factor, split_factor) = merged_state.merge(split_state);
    *merged_state = state;
    // SAFETY: same contract; rows are padded to whole vectors.
    unsafe {
        let mut i = 0;
        while i < sizes.padded_value_dim {
            let to = merged_output.add(i);
            let scaled = V::load(to).mul(V::splat(merged_factor));
            V::load(split_output.add(i)).mul_add(V::splat(split_factor), scaled).store(to);
            i += V::LANES;
        }
    }
}

/// Serial splits: merges the split that has just been walked, and clears its rows for the next one.
///
/// # Safety
/// As [`run_item`](super::attend::run_item), for an item of several splits.
#[inline(always)]
pub unsafe fn merge_serial_split<V: Vector>(ctx: ItemContext) {
    let ItemContext { item, scratch, .. } = ctx;
    let (sizes, rows) = (ctx.sizes(), item.all_rows());
    // SAFETY: rows of the item.
    unsafe {
        for row in 0..rows {
            let merged_output = scratch.merged_output.add(row * sizes.padded_value_dim);
            let merged_state = &mut *scratch.merged_states.add(row);
            let split_state = *scratch.states.add(row);
            merge_row::<V>(sizes, merged_output, merged_state, ctx.output_row(row), split_state);
        }
        clear(sizes, rows, scratch.output, scratch.states);
    }
}

/// Parallel splits: stores the item's partial states in the workspace.
///
/// # Safety
/// As [`run_item`](super::attend::run_item).
pub unsafe fn store_partials(ctx: ItemContext) {
    let ItemContext { call, item, scratch } = ctx;
    let dims = ctx.sizes().padded_value_dim;
    // SAFETY: the workspace has a partial state for every row and split of the plan, and the call
    // has no more than the plan. No other item has this split of these rows.
    unsafe {
        for row in 0..item.all_rows() {
            let to = call.partial_state(item, row, item.splits.start);
            let state = *scratch.states.add(row);
            to.copy_from_nonoverlapping(ctx.output_row(row), dims);
            *to.add(dims) = state.max;
            *to.add(dims + 1) = state.sum;
        }
    }
}

/// Parallel splits: merges the partial states of all splits and writes the output.
///
/// # Safety
/// As [`run_item`](super::attend::run_item).
#[inline(always)]
pub unsafe fn merge_partials<V: Vector>(ctx: ItemContext) {
    let ItemContext { call, item, scratch } = ctx;
    let (sizes, dims) = (ctx.sizes(), ctx.sizes().padded_value_dim);
    // SAFETY: as `store_partials`. All splits of this block have been stored.
    unsafe {
        clear(sizes, item.all_rows(), scratch.output, scratch.states);
        for row in 0..item.all_rows() {
            for split in item.splits.clone() {
                let part = call.partial_state(item, row, split).cast_const();
                let split_state = State { max: *part.add(dims), sum: *part.add(dims + 1) };
                let state = &mut *scratch.states.add(row);
                merge_row::<V>(sizes, ctx.output_row(row), state, part, split_state);
            }
        }
        (call.write_output)(ctx, scratch.output, scratch.states, 0..item.all_rows());
    }
}
