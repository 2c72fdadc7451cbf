//! The split of a sequence's keys among workers: a pure function.
//!
//! A work item is one row block of one (sequence, key/value head). If there are enough items to
//! keep every worker busy, each walks all keys of its rows. If there are few (decode), the keys are
//! split too: each split leaves a partial state (output, max, sum), and a second pass merges them.

/// The numbers that a split depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Work {
    /// Sequences times key/value heads (or groups of them that share an item) times row blocks, at
    /// most.
    pub items: usize,
    /// Query rows of one (sequence, key/value head) or group of heads, at most.
    pub rows: usize,
    /// Query rows per block.
    pub block_rows: usize,
    /// Maximum keys of a sequence.
    pub kv_len: usize,
    /// Keys per tile; splits start at multiples of it.
    pub tile_keys: usize,
    /// Workers that share the items.
    pub workers: usize,
    /// Target splits per worker if there are fewer items than workers: all splits have one length
    /// then. [`ITEMS_PER_WORKER`], or fewer if a split starts slowly.
    pub splits_per_worker: usize,
    /// Whether the split may depend on nothing but the key's index.
    pub batch_invariant: bool,
}

/// The split of the keys.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Split {
    /// Keys per split: a multiple of the tile. Split s covers keys `s * keys..(s + 1) * keys`,
    /// whether or not a row sees them.
    pub keys: usize,
    /// Splits of the longest sequence.
    pub count: usize,
    /// Whether each split is an item, and a second pass merges them (`true`), or one item walks
    /// them in order (`false`).
    pub parallel: bool,
    /// The reason for this split.
    pub reason: String,
}

/// Target items per worker, so that an uneven last item costs little. The last item to finish holds
/// up the other workers by half an item on average: 1/8 of a worker's time at 4.
pub(crate) const ITEMS_PER_WORKER: usize = 4;

/// The fewest keys worth a split: below this, storing and merging a partial state costs more than
/// the imbalance.
pub(crate) const MIN_KEYS: usize = 256;

/// Maximum partial states, in row blocks per worker. It bounds the workspace to threads times tile
/// in batch-invariant mode, in which the number of splits grows with the keys. Otherwise
/// [`ITEMS_PER_WORKER`] bounds it already.
pub(crate) const PARTIAL_BLOCKS_PER_WORKER: usize = 8;

/// Keys per split in batch-invariant mode, always.
pub const INVARIANT_KEYS: usize = 1024;

/// A split without its reason, as a run decides it for the lengths in use, without allocating.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cut {
    /// As [`Split::keys`].
    pub keys: usize,
    /// As [`Split::count`].
    pub count: usize,
    /// As [`Split::parallel`].
    pub parallel: bool,
}

impl Work {
    /// Whether every worker has enough items without splitting keys.
    fn has_enough_items(&self) -> bool {
        self.workers <= 1 || self.items >= self.workers.saturating_mul(ITEMS_PER_WORKER)
    }
}

/// Cuts keys. A tile or row block of size 0 counts as size 1; arithmetic saturates.
pub(crate) fn cut(work: &Work) -> Cut {
    let Work { items, rows, kv_len, workers, splits_per_worker, batch_invariant, .. } = *work;
    let (block_rows, tile_keys) = (work.block_rows.max(1), work.tile_keys.max(1));
    let whole_tiles = |keys: usize| keys.checked_next_multiple_of(tile_keys).unwrap_or(usize::MAX);
    let enough = work.has_enough_items();
    if batch_invariant {
        let count = kv_len.div_ceil(INVARIANT_KEYS).max(1);
        let heads = items.div_ceil(rows.div_ceil(block_rows).max(1));
        let states = heads.saturating_mul(rows).saturating_mul(count);
        let max_states =
            workers.saturating_mul(PARTIAL_BLOCKS_PER_WORKER).saturating_mul(block_rows);
        let parallel = !enough && count > 1 && states <= max_states;
        return Cut { keys: INVARIANT_KEYS, count, parallel };
    }
    let unsplit = Cut { keys: whole_tiles(kv_len).max(tile_keys), count: 1, parallel: false };
    if enough {
        return unsplit;
    }
    let items_per_worker = if items < workers { splits_per_worker } else { ITEMS_PER_WORKER };
    let wanted = workers.saturating_mul(items_per_worker).div_ceil(items.max(1)).max(1);
    let keys = whole_tiles(kv_len.div_ceil(wanted).max(MIN_KEYS));
    match kv_len.div_ceil(keys) {
        0 | 1 => unsplit,
        count => Cut { keys, count, parallel: true },
    }
}

/// Chooses the split, as [`cut`], with the reason.
pub(crate) fn split(work: &Work) -> Split {
    let Cut { keys, count, parallel } = cut(work);
    let Work { items, kv_len, workers, .. } = *work;
    let reason = if work.batch_invariant {
        let shared = if parallel { "shared" } else { "not shared" };
        format!(
            "batch-invariant: always {INVARIANT_KEYS} keys per split, merged in key order, \
             {shared} among workers"
        )
    } else if work.has_enough_items() {
        format!("{items} items keep {workers} workers busy without splitting keys")
    } else if parallel {
        format!(
            "{items} items are too few for {workers} workers: {kv_len} keys in {count} splits of \
             {keys}"
        )
    } else {
        format!("{items} items for {workers} workers, but {kv_len} keys are too few to split")
    };
    Split { keys, count, parallel, reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_work_is_split_without_overflow() {
        let numbers = [0, 1, 2, 255, 1 << 31, usize::MAX - 1, usize::MAX];
        for items in numbers {
            for size in numbers {
                for kv_len in numbers {
                    for workers in numbers {
                        for batch_invariant in [false, true] {
                            let split = split(&Work {
                                items,
                                rows: size,
                                block_rows: size,
                                kv_len,
                                tile_keys: size,
                                workers,
                                splits_per_worker: size,
                                batch_invariant,
                            });
                            assert!(split.keys > 0 && split.count > 0, "{split:?}");
                            let covered = split.keys.saturating_mul(split.count);
                            assert!(covered >= kv_len, "{split:?} of {kv_len} keys");
                        }
                    }
                }
            }
        }
    }
}
