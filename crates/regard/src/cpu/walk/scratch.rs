//! The scratch memory of a worker, and the sizes that lay it out.

use super::address::MAX_BLOCK_TOKENS;
use super::list_tile::ListTile;
use super::tiling::Tiling;
use crate::cpu::product::{ROWS, amx};
use crate::dtype::DType;
use crate::problem::{MAX_HEAD_DIM, Problem};
use crate::state::State;
use crate::variant::Values;
use std::ops::Range;

/// Alignment of everything in the workspace: a cache line, and the widest vector.
pub const ALIGNMENT: usize = 64;

/// Maximum query rows per head that [`verify`](super::verify) takes.
pub const MAX_VERIFY_ROWS: usize = 64;

/// Keys per block of [`verify`](super::verify): the next block is prefetched while one is computed.
pub const VERIFY_KEYS_PER_BLOCK: usize = 16;

/// Floats of [`Scratch::key_copy`]: the keys of one register tile.
const KEY_COPY_LEN: usize = ROWS * MAX_HEAD_DIM;

/// Floats of [`Scratch::transposed_scores`].
const TRANSPOSED_SCORES_LEN: usize = VERIFY_KEYS_PER_BLOCK * MAX_VERIFY_ROWS;

/// Blocks of depth of one product on the matrix unit whose sums are scaled together.
pub const BLOCKS_PER_PRODUCT: usize = 4;

/// Floats of [`Scratch::block_sums`].
const BLOCK_SUMS_LEN: usize = BLOCKS_PER_PRODUCT * amx::ROWS * amx::COLUMNS;

/// Maximum rows that are converted at a time.
pub const MAX_CONVERTED_ROWS: usize = MAX_BLOCK_TOKENS;

/// The sizes that lay out scratch and packed tiles.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub head_dim: usize,
    pub value_dim: usize,
    /// Head dims rounded up to the widest vector.
    pub padded_head_dim: usize,
    pub padded_value_dim: usize,
    pub tile_keys: usize,
    pub block_rows: usize,
    /// Maximum rows, over all heads, of an item that takes several heads.
    pub item_rows: usize,
    /// Bytes of a key and of a value of one head, as they are stored. For keys in two parts, the
    /// bytes of the first part.
    pub key_bytes: usize,
    pub value_bytes: usize,
    /// The padded dim of converted rows; 0 if none are converted.
    pub converted_dim: usize,
    /// Maximum key/value heads per item, if keys or values are codes with scales; else 0.
    pub scaled_heads: usize,
    /// Blocks per key, if packed tiles hold their codes ([`block_scales`](super::block_scales));
    /// else 0.
    pub key_blocks: usize,
    /// Whether an item may have a tile of rows that are keys and values
    /// ([`row_tile`](super::row_tile)). False if all walks read such rows in place.
    pub has_row_tile: bool,
    /// Whether one item may walk several splits and merge them itself.
    pub serial_splits: bool,
    /// Whether rows have lists of keys.
    pub listed: bool,
}

impl Sizes {
    /// `item_rows`: maximum rows, over all heads, of an item that takes several heads.
    /// `item_heads`: maximum key/value heads of an item.
    pub fn new(
        problem: &Problem,
        tiling: &Tiling,
        serial_splits: bool,
        item_rows: usize,
        item_heads: usize,
    ) -> Sizes {
        let widest = ALIGNMENT / size_of::<f32>();
        let stored = |dtype: DType, dim: usize| dim / dtype.values() * dtype.size();
        let caches = [problem.key_dtype, problem.value_dtype];
        let converts = caches.iter().any(|&dtype| dtype != problem.dtype);
        let in_f32 = problem.dtype == DType::F32;
        let widest_dim = problem.head_dim.max(problem.value_dim).next_multiple_of(widest);
        Sizes {
            head_dim: problem.head_dim,
            value_dim: problem.value_dim,
            padded_head_dim: problem.head_dim.next_multiple_of(widest),
            padded_value_dim: problem.value_dim.next_multiple_of(widest),
            tile_keys: tiling.tile_keys,
            block_rows: tiling.block_rows,
            item_rows,
            key_bytes: stored(problem.key_dtype, problem.head_dim - problem.rotary_dim),
            value_bytes: stored(problem.value_dtype, problem.value_dim),
            converted_dim: if converts { widest_dim } else { 0 },
            scaled_heads: if caches.iter().any(|dtype| dtype.is_code()) { item_heads } else { 0 },
            key_blocks: match tiling.packs_blocks && problem.key_dtype.is_block() {
                true => problem.head_dim / problem.key_dtype.values(),
                false => 0,
            },
            has_row_tile: problem.values == Values::KeyPrefix
                && (converts || !in_f32 || problem.rotary_dim > 0),
            serial_splits,
            listed: problem.key_lists.is_some(),
        }
    }

    /// Floats of one partial state: the padded output row, max and sum.
    pub fn partial_floats(&self) -> usize {
        self.padded_value_dim + 2
    }

    /// Bytes of scratch, a multiple of [`ALIGNMENT`].
    pub fn scratch_bytes(&self) -> usize {
        // A layout from null: only its size is used, no pointer is dereferenced.
        Scratch::layout(std::ptr::null_mut(), self).1
    }
}

/// The scratch of one worker. Rows are numbered as in
/// [`Item::all_rows`](super::item::Item::all_rows).
pub struct Scratch {
    pub queries: *mut f32,
    /// Unnormalized outputs and softmax states of the split that is being walked.
    pub output: *mut f32,
    pub states: *mut State,
    /// Merged outputs and states of the splits before it, if the item walks several.
    pub merged_output: *mut f32,
    pub merged_states: *mut State,
    /// The packed K tile, or transposed queries.
    pub keys: *mut f32,
    /// The packed V tile.
    pub values: *mut f32,
    pub scores: *mut f32,
    /// Scores of a block of keys, `[key][row]`.
    pub transposed_scores: *mut f32,
    /// A few keys copied as f32, or a block to be transposed.
    pub key_copy: *mut f32,
    /// Scales of a tile's keys and values, `[head][key]`.
    pub key_scales: *mut f32,
    pub value_scales: *mut f32,
    /// Scales of the blocks of a tile's keys, `[block][key]`.
    pub block_scales: *mut f32,
    /// Sums of products over blocks of dims, on the matrix unit.
    pub block_sums: *mut f32,
    /// A few rows of keys or values, converted to the type that products read.
    pub converted: *mut u8,
    /// A tile of rows that are keys and values, likewise.
    pub row_tile: *mut u8,
    /// Addresses of two tiles of keys and of two tiles of values.
    addresses: *mut *const u8,
    pub ranges: *mut RowRange,
    /// The entries of a tile, if rows have lists of keys.
    pub list: *mut ListTile,
}

/// The keys that a row can see by causality, window and length.
#[derive(Clone, Copy)]
pub struct RowRange {
    pub start: u32,
    pub end: u32,
}

impl RowRange {
    /// The visible part of `valid`. Both are relative to the tile's first key.
    #[inline(always)]
    pub fn within(&self, tile_start: usize, valid: &Range<usize>) -> Range<usize> {
        let relative = |key: u32| {
            (key as usize).clamp(tile_start + valid.start, tile_start + valid.end) - tile_start
        };
        relative(self.start)..relative(self.end)
    }
}

impl Scratch {
    /// Room for the addresses of two tiles of keys and of two tiles of values: the current tile,
    /// and the next one for prefetching.
    pub fn addresses(&self, sizes: &Sizes) -> [*mut [*const u8]; 2] {
        let entries = 2 * sizes.tile_keys;
        [0, entries].map(|first| {
            std::ptr::slice_from_raw_parts_mut(self.addresses.wrapping_add(first), entries)
        })
    }

    /// Lays out the scratch from `start` on. Also returns its bytes.
    pub fn layout(start: *mut u8, sizes: &Sizes) -> (Scratch, usize) {
        let mut bytes = 0;
        let mut place = |size: usize, count: usize| {
            let part = start.wrapping_add(bytes);
            bytes = (bytes + size * count).next_multiple_of(ALIGNMENT);
            part
        };
        let (rows, tile) = (sizes.block_rows.max(sizes.item_rows), sizes.tile_keys);
        let merged_rows = if sizes.serial_splits { rows } else { 0 };
        let scratch = Scratch {
            queries: place(4, rows * sizes.padded_head_dim).cast(),
            output: place(4, rows * sizes.padded_value_dim).cast(),
            states: place(size_of::<State>(), rows).cast(),
            merged_output: place(4, merged_rows * sizes.padded_value_dim).cast(),
            merged_states: place(size_of::<State>(), merged_rows).cast(),
            keys: place(4, tile.max(sizes.item_rows) * sizes.padded_head_dim).cast(),
            values: place(4, tile * sizes.padded_value_dim).cast(),
            scores: place(4, sizes.item_rows * tile).cast(),
            transposed_scores: place(4, TRANSPOSED_SCORES_LEN).cast(),
            key_copy: place(4, KEY_COPY_LEN).cast(),
            key_scales: place(4, sizes.scaled_heads * tile).cast(),
            value_scales: place(4, sizes.scaled_heads * tile).cast(),
            block_scales: place(4, sizes.key_blocks * tile).cast(),
            block_sums: place(4, if sizes.key_blocks > 0 { BLOCK_SUMS_LEN } else { 0 }).cast(),
            converted: place(4, MAX_CONVERTED_ROWS * sizes.converted_dim),
            row_tile: place(4, if sizes.has_row_tile { tile * sizes.padded_head_dim } else { 0 }),
            addresses: place(size_of::<*const u8>(), 4 * tile).cast(),
            ranges: place(size_of::<RowRange>(), rows).cast(),
            list: place(size_of::<ListTile>(), usize::from(sizes.listed)).cast(),
        };
        (scratch, bytes)
    }
}

/// Rows of one (sequence, key/value head), padded to whole vectors of the widest level.
pub const fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of(16)
}
