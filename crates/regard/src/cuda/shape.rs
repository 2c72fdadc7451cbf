//! The shape of a decode kernel's thread block: `kernels/decode/decode_shape.cuh`, for the host.

use super::registry::Element;

/// Bytes of keys and values that a multiprocessor should have under way or at hand: more does not
/// make reading faster.
const ENOUGH_BYTES: usize = 132 << 10;

/// Warps a block, at most: with 255 registers a thread, that is all of a multiprocessor's
/// registers.
const MAX_WARPS: usize = 8;

/// The largest stage of which a ring has two. One of f32 at head dim 576 is larger: two would not
/// fit into the 99 KB of a consumer GPU.
const MAX_STAGE_BYTES: usize = 48 << 10;

/// What a kernel is compiled for.
pub(super) struct Shape {
    element_bytes: usize,
    head_dim: usize,
    value_dim: usize,
    rows: usize,
}

impl Shape {
    pub fn new(element: Element, head_dim: usize, value_dim: usize, rows: usize) -> Shape {
        Shape { element_bytes: element.bytes(), head_dim, value_dim, rows }
    }

    /// Keys that a group of warps takes at a time.
    pub fn strip_keys(&self) -> usize {
        let max_dims = if self.rows == 8 { 128 } else { 256 };
        if self.head_dim + self.value_dim <= max_dims && self.element_bytes == 2 { 32 } else { 16 }
    }

    /// Bytes of a key and its value.
    pub fn key_bytes(&self) -> usize {
        (self.head_dim + self.value_dim) * self.element_bytes
    }

    /// Warps that share the keys of a group.
    pub fn group_warps(&self) -> usize {
        let value_warps = if self.value_dim > 256 { 2 } else { 1 };
        let max_row_tiles = match self.value_dim / value_warps {
            0..=128 => 2,
            _ => 1,
        };
        let row_tiles = (self.rows / 8).min(max_row_tiles);
        self.rows / 8 / row_tiles * value_warps
    }

    /// Bytes of a stage of a group's ring.
    fn stage_bytes(&self) -> usize {
        let pitch = |dim: usize| (dim * self.element_bytes).next_multiple_of(128);
        self.strip_keys() * (pitch(self.head_dim) + pitch(self.value_dim))
    }

    /// Stages of a group's ring: as `STAGES` there.
    fn stages(&self) -> usize {
        if self.stage_bytes() > MAX_STAGE_BYTES { 1 } else { 2 }
    }

    /// Where the rings start.
    fn ring_at(&self) -> usize {
        let pitch = (self.head_dim * self.element_bytes).next_multiple_of(128);
        (1024 + 128 * self.rows) + self.rows * pitch
    }

    /// Dynamic shared memory of a block with so many groups.
    pub fn shared_bytes(&self, groups: usize) -> usize {
        let rings = self.stages() * self.stage_bytes();
        let states = self.rows * (self.value_dim + 4) * 4;
        self.ring_at() + groups * rings.max(states)
    }

    /// Bytes of a partial state in the workspace.
    pub fn partial_bytes(&self) -> usize {
        self.rows * (self.value_dim + 2) * 4
    }
}

/// The most groups of a block with so much shared memory; one at least, whether or not that fits.
pub(super) fn max_key_groups(shape: &Shape, shared_bytes: usize) -> usize {
    let by_warps = (MAX_WARPS / shape.group_warps()).max(1);
    let enough = ENOUGH_BYTES.div_ceil(shape.stages() * shape.stage_bytes()).max(3);
    let fits = |groups: &usize| shape.shared_bytes(*groups) <= shared_bytes;
    (1..=by_warps.min(enough)).rev().find(fits).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_measured_shapes() {
        let h200 = 227 << 10;
        let groups = |dim, rows| max_key_groups(&Shape::new(Element::Bf16, dim, dim, rows), h200);
        assert_eq!([groups(64, 8), groups(128, 8), groups(256, 8), groups(512, 8)], [8, 8, 5, 3]);
        assert_eq!([groups(128, 32), groups(128, 64), groups(256, 32)], [4, 2, 2]);
        for (dim, rows) in [(64, 64), (128, 64), (256, 32), (512, 8), (576, 8)] {
            let shape = Shape::new(Element::Bf16, dim, dim, rows);
            assert!(shape.shared_bytes(1) <= 99 << 10, "{dim} {rows}: {}", shape.shared_bytes(1));
        }
    }
}
