//! The shape of a decode kernel's CTA: `kernels/decode/decode_shape.cuh`, for the host.

use super::registry::{Cache, DecodeConfig, HOPPER_SHARED_BYTES, Storage};

/// Bytes of keys and values that a multiprocessor should have in flight or in shared memory: more
/// does not raise the bandwidth.
const ENOUGH_BYTES: usize = 132 << 10;

/// Maximum warps per CTA: at 255 registers per thread they take all registers of a multiprocessor.
const MAX_WARPS: usize = 8;

/// The largest stage of a two-stage pipeline. A stage of f32 at head dim 576 is larger: two would
/// not fit into the 99 KB of a consumer GPU.
const MAX_STAGE_BYTES: usize = 48 << 10;

/// The largest stage of q8_0 or q4_0 blocks of a three-stage pipeline, per key/value head.
const SMALL_STAGE_BYTES: usize = 6 << 10;

/// Maximum slots for keys or values of a group of several heads.
const MAX_SLOTS: usize = 8;

/// Bytes of a stage per row of keys or of values: the scale of its codes.
const SCALE_BYTES: usize = 4;

/// The same for rows of any format: room to convert them in place, and what is noted of each.
const STORED_ROOM: usize = 64;
const ROW_NOTE_BYTES: usize = 8;

/// The configuration that a kernel is compiled for.
pub(super) struct Shape {
    cache: Cache,
    element_bytes: usize,
    head_dim: usize,
    value_dim: usize,
    rows: usize,
    /// Key/value heads of a tile; each of several has a warp of a group.
    heads: usize,
}

impl Shape {
    pub fn new(config: &DecodeConfig) -> Shape {
        let operands = &config.operands;
        Shape {
            cache: config.cache,
            element_bytes: operands.element.bytes(),
            head_dim: operands.head_dim,
            value_dim: operands.value_dim,
            rows: config.tile_rows,
            heads: config.tile_heads,
        }
    }

    /// How keys and values are stored, with their dims.
    fn sides(&self) -> [(Storage, usize); 2] {
        let (keys, values) = self.cache.sides();
        [(keys, self.head_dim), (values, self.value_dim)]
    }

    /// Bytes of a key's or a value's row in memory, with all heads of a tile.
    fn row_bytes(&self, (storage, dim): (Storage, usize)) -> usize {
        self.heads * storage.row_bytes(dim, self.element_bytes)
    }

    /// Bytes from row to row in shared memory.
    fn pitch(&self, side: (Storage, usize)) -> usize {
        let bytes = self.row_bytes(side);
        match side.0 {
            // As far from a multiple of 32 as in memory.
            Storage::Q8_0 if self.heads > 1 && bytes.is_multiple_of(32) => ((bytes / 32) | 1) * 32,
            storage => storage.pitch(bytes),
        }
    }

    /// Keys per K tile of a group of warps.
    pub fn strip_keys(&self) -> usize {
        let max_dims = if self.rows == 8 && !self.cache.has_codes() { 128 } else { 256 };
        if self.head_dim + self.value_dim <= max_dims && self.element_bytes == 2 { 32 } else { 16 }
    }

    /// Bytes of a key and its value, with all heads of a tile.
    pub fn key_bytes(&self) -> usize {
        self.sides().map(|side| self.row_bytes(side)).iter().sum()
    }

    /// Warps of a group, which share its keys.
    pub fn group_warps(&self) -> usize {
        if self.heads > 1 {
            return self.heads;
        }
        let value_warps = if self.value_dim > 256 { 2 } else { 1 };
        let max_row_tiles = match self.value_dim / value_warps {
            // Every warp that shares keys converts their codes.
            0..=128 if self.cache.has_codes() => 4,
            0..=128 => 2,
            _ => 1,
        };
        let row_tiles = (self.rows / 8).min(max_row_tiles);
        self.rows / 8 / row_tiles * value_warps
    }

    /// Bytes per pipeline stage of a group.
    fn stage_bytes(&self) -> usize {
        let sides = self.sides();
        let more = match self.cache {
            Cache::Any => STORED_ROOM + ROW_NOTE_BYTES,
            _ if sides.iter().any(|(storage, _)| *storage == Storage::Bytes) => SCALE_BYTES,
            _ => 0,
        };
        let pitches: usize = sides.map(|side| self.pitch(side)).iter().sum();
        self.strip_keys() * (pitches + 2 * more)
    }

    /// Pipeline stages of a group: `STAGES` there.
    fn stages(&self) -> usize {
        match (self.cache, self.stage_bytes()) {
            // Rows of any format take more time to convert than to copy.
            (Cache::Any, _) => 1,
            (_, bytes) if bytes > self.heads * MAX_STAGE_BYTES => 1,
            (_, bytes)
                if bytes <= self.heads * SMALL_STAGE_BYTES
                    && self.sides().iter().all(|side| side.0.has_blocks()) =>
            {
                3
            }
            _ => 2,
        }
    }

    /// Bytes of a slot for the keys or the values of a K tile, where tiles have several heads.
    fn slot_bytes(&self) -> usize {
        self.strip_keys() * self.sides().map(|side| self.pitch(side)).into_iter().max().unwrap_or(0)
    }

    /// Slots of a group: `SLOTS` there.
    fn slots(&self) -> usize {
        let groups = MAX_WARPS / self.heads;
        ((HOPPER_SHARED_BYTES - self.ring_at()) / (groups * self.slot_bytes())).min(MAX_SLOTS)
    }

    /// Whether a CTA with all groups fits, as kernels for several heads need.
    pub fn has_all_groups(&self, shared_bytes: usize) -> bool {
        self.shared_bytes(MAX_WARPS / self.heads) <= shared_bytes
    }

    /// Threads of a CTA with this many groups. Tiles of several heads have warps that copy.
    pub fn threads(&self, groups: usize) -> usize {
        let copying = if self.heads > 1 { DecodeConfig::COPY_THREADS } else { 0 };
        self.group_warps() * groups * 32 + copying
    }

    /// Offset of the pipeline stages in shared memory.
    fn ring_at(&self) -> usize {
        let pitch = (self.head_dim * self.element_bytes).next_multiple_of(128);
        (1024 + 128 * self.rows) + self.rows * pitch
    }

    /// Dynamic shared memory of a CTA with this many groups.
    pub fn shared_bytes(&self, groups: usize) -> usize {
        let rings = match self.heads {
            1 => self.stages() * self.stage_bytes(),
            _ => self.slots() * self.slot_bytes(),
        };
        let states = self.rows * (self.value_dim + 4) * 4;
        self.ring_at() + groups * rings.max(states)
    }

    /// Bytes of a partial state in the workspace.
    pub fn partial_bytes(&self) -> usize {
        self.rows * (self.value_dim + 2) * 4
    }
}

/// Maximum groups of a CTA with this much shared memory; at least one, even if that does not fit.
pub(super) fn max_key_groups(shape: &Shape, shared_bytes: usize) -> usize {
    let by_warps = (MAX_WARPS / shape.group_warps()).max(1);
    // Stored rows fill a part of the stages that they are converted in.
    let enough = match shape.cache {
        Cache::Any => usize::MAX,
        _ => ENOUGH_BYTES.div_ceil(shape.stages() * shape.stage_bytes()).max(3),
    };
    let fits = |groups: &usize| shape.shared_bytes(*groups) <= shared_bytes;
    (1..=by_warps.min(enough)).rev().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::cuda::registry::{Build, Element, Operands};

    fn shape(cache: Cache, dim: usize, tile_rows: usize) -> Shape {
        let (element, build) = (Element::Bf16, Build::Fallback);
        let operands = Operands { element, head_dim: dim, value_dim: dim, build };
        Shape::new(&DecodeConfig::new(operands, cache, tile_rows))
    }

    #[test]
    fn the_measured_shapes() {
        let h200 = 227 << 10;
        let groups = |dim, rows| max_key_groups(&shape(Cache::Elements, dim, rows), h200);
        assert_eq!([groups(64, 8), groups(128, 8), groups(256, 8), groups(512, 8)], [8, 8, 5, 3]);
        assert_eq!([groups(128, 32), groups(128, 64), groups(256, 32)], [4, 2, 2]);
        for (dim, rows) in [(64, 64), (128, 64), (256, 32), (512, 8), (576, 8)] {
            let shape = shape(Cache::Elements, dim, rows);
            assert!(shape.shared_bytes(1) <= 99 << 10, "{dim} {rows}: {}", shape.shared_bytes(1));
        }
    }

    #[test]
    fn rows_of_blocks_do_not_share_banks() {
        // As the kernels were measured with: 8 groups of 32 keys of 144 and of 80 bytes.
        let bytes = |cache| shape(cache, 128, 8).shared_bytes(8);
        assert_eq!(
            [bytes(Cache::Bytes), bytes(Cache::Q8_0), bytes(Cache::Q4_0)],
            [139264, 151552, 126976]
        );
        for (cache, dim) in [(Cache::Q8_0, 64), (Cache::Q4_0, 256), (Cache::Q8_0, 256)] {
            let shape = shape(cache, dim, 8);
            assert!(shape.sides().iter().all(|&side| shape.pitch(side) % 32 == 16));
        }
    }

    #[test]
    fn tiles_of_several_heads_have_warps_that_copy() {
        let of = |cache| Shape { heads: 4, ..shape(cache, 128, 32) };
        let facts = |shape: Shape| (shape.slots(), shape.threads(2), shape.shared_bytes(2));
        assert_eq!(facts(of(Cache::Q8_0)), (6, 384, 222208));
        assert_eq!(facts(of(Cache::Q4_0)), (8, 384, 168960));
        assert!(of(Cache::Q8_0).has_all_groups(227 << 10));
        assert!(!of(Cache::Q8_0).has_all_groups(163 << 10));
    }
}
