//! Describes a TMA tensor map: address and strides of an operand of the Hopper kernels, and the box
//! that one copy loads.
//!
//! Every operand is seen in four dimensions, the same for all: elements of a row, heads, tokens (or
//! slots of a block), sequences (or blocks). A box is 64 elements (128 bytes, swizzled) of some
//! tokens of one head.

use crate::tensor::Dims;

/// A tensor as the driver takes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Described {
    pub address: u64,
    /// Elements of a row, heads, tokens, sequences.
    pub dims: [u64; 4],
    /// From one head, token and sequence to the next, in bytes.
    pub strides: [u64; 3],
    /// As `dims`, of a box.
    pub box_dims: [u32; 4],
}

/// Elements of a row in a box.
pub(super) const BOX_ELEMENTS: u32 = 64;

/// Query tokens in a box.
pub(super) const QUERY_BOX: usize = 64;

/// Strides are below this; dimensions are at most this.
const MAX_STRIDE: u64 = 1 << 40;
const MAX_DIM: u64 = 1 << 32;

/// The four dimensions of a tensor, innermost first, and the strides of the outer three.
struct Axes {
    extents: [u64; 4],
    strides: [i64; 3],
}

impl Axes {
    /// `None` for a tensor of fewer dimensions than `[tokens, heads, elements]`.
    fn new(dims: &Dims) -> Option<Axes> {
        let (shape, strides) = (dims.shape(), dims.strides());
        let [tokens, heads, elements] = *shape.last_chunk::<3>()?;
        let [token_stride, head_stride, _] = *strides.last_chunk::<3>()?;
        let (sequences, sequence_stride) = match shape.len() {
            4 => (shape[0], strides[0]),
            _ => (1, 0),
        };
        Some(Axes {
            extents: [elements, heads, tokens, sequences].map(|n| n as u64),
            strides: [head_stride, token_stride, sequence_stride],
        })
    }
}

impl Described {
    /// A tensor of two-byte elements, `[sequences, tokens, heads, elements]` or (ragged) without
    /// the first, in boxes of `box_tokens` tokens. `None` if TMA cannot read it: it needs addresses
    /// and strides that are multiples of 16 bytes, strides of 16 to 2^40 bytes, and a tensor that
    /// is not empty.
    pub fn from_dims(address: u64, dims: &Dims, box_tokens: usize) -> Option<Described> {
        let size = dims.dtype().size() as u64;
        let Axes { extents: [elements, heads, tokens, sequences], strides } = Axes::new(dims)?;
        // Rows of one element have any stride; that of a head then counts.
        let stride = |count: u64, stride: i64| match count {
            1 => Some((elements * size).next_multiple_of(16)),
            _ => u64::try_from(stride).ok()?.checked_mul(size),
        };
        let described = Described {
            address,
            dims: [elements, heads, tokens, sequences],
            strides: [
                stride(heads, strides[0])?,
                stride(tokens, strides[1])?,
                stride(sequences, strides[2])?,
            ],
            box_dims: [BOX_ELEMENTS, 1, u32::try_from(box_tokens).ok()?, 1],
        };
        described.is_legal().then_some(described)
    }

    /// A tensor of any type as bytes, in boxes of the rows of one head of `box_tokens` tokens. The
    /// rows of all heads of a token are one row, so that heads need not start at multiples of 16
    /// bytes, which TMA wants of a box: it begins up to 15 bytes before. `None` if TMA cannot read
    /// it, or if its elements could not be read from there: the address and the strides of tokens
    /// and sequences must be multiples of 16 bytes, and those of heads too, or of 4 if elements are
    /// blocks.
    pub fn from_rows(address: u64, dims: &Dims, box_tokens: usize) -> Option<Described> {
        let size = dims.dtype().size() as u64;
        let Axes { extents: [elements, heads, tokens, sequences], strides } = Axes::new(dims)?;
        let bytes = |stride: i64| u64::try_from(stride).ok()?.checked_mul(size);
        let row = elements * size;
        let (to_last_head, head_alignment) = match heads {
            1 => (0, 16),
            _ => {
                let stride = bytes(strides[0]).filter(|&stride| stride > 0)?;
                (stride.checked_mul(heads.checked_sub(1)?)?, alignment(stride))
            }
        };
        if head_alignment < if dims.dtype().is_block() { 4 } else { 16 } {
            return None;
        }
        let all_heads = to_last_head.checked_add(row)?;
        // The stride of one token, or of one sequence, does not count; nor that of heads, of which
        // TMA sees one.
        let any = all_heads.next_multiple_of(16);
        let stride = |count: u64, stride: i64| if count == 1 { Some(any) } else { bytes(stride) };
        let box_row = (row + 16 - head_alignment).next_multiple_of(16);
        let described = Described {
            address,
            dims: [all_heads, 1, tokens, sequences],
            strides: [any, stride(tokens, strides[1])?, stride(sequences, strides[2])?],
            box_dims: [u32::try_from(box_row).ok()?, 1, u32::try_from(box_tokens).ok()?, 1],
        };
        (all_heads <= i32::MAX as u64 && described.is_legal()).then_some(described)
    }

    /// The same without the first `count` elements of each row, of two bytes each. `None` if TMA
    /// cannot read the others.
    pub fn without_first(self, count: usize) -> Option<Described> {
        let [elements, heads, tokens, sequences] = self.dims;
        let described = Described {
            address: self.address + 2 * count as u64,
            dims: [elements.checked_sub(count as u64)?, heads, tokens, sequences],
            ..self
        };
        described.is_legal().then_some(described)
    }

    /// Whether L2 fetches 256 bytes at once, not 128. From rows of a latent cache, 1152 bytes
    /// apart, 256 would reach into the next row: decode of 16 heads takes 3 to 4% longer.
    pub fn fetches_256_bytes(&self) -> bool {
        self.strides[1].is_multiple_of(256)
    }

    fn is_legal(&self) -> bool {
        let strides =
            self.strides.iter().all(|&s| s.is_multiple_of(16) && (16..MAX_STRIDE).contains(&s));
        let dims = self.dims.iter().all(|&n| (1..=MAX_DIM).contains(&n));
        let boxes = self.box_dims.iter().all(|&n| (1..=256).contains(&n));
        self.address.is_multiple_of(16) && strides && dims && boxes
    }
}

/// The largest power of two up to 16 that divides `bytes`.
fn alignment(bytes: u64) -> u64 {
    1 << bytes.trailing_zeros().min(4)
}

/// Keys per box of keys and values: `max_keys`, or for paged keys its greatest common divisor with
/// the page size; `None` if that is not a multiple of eight, because eight rows are swizzled
/// together.
pub(super) fn key_box(max_keys: usize, block_size: Option<usize>) -> Option<usize> {
    let Some(block_size) = block_size else { return Some(max_keys) };
    let (mut keys, mut rest) = (max_keys, block_size);
    while rest != 0 {
        (keys, rest) = (rest, keys % rest);
    }
    keys.is_multiple_of(8).then_some(keys)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::tensor::raw_dims;

    fn described(shape: &[usize], strides: &[i64]) -> Option<Described> {
        Described::from_dims(4096, &raw_dims(DType::BF16, shape, Some(strides)).unwrap(), 64)
    }

    #[test]
    fn rows_of_blocks_as_bytes() {
        let rows = |dtype, shape: &[usize], strides: &[i64]| {
            Described::from_rows(4096, &raw_dims(dtype, shape, Some(strides)).unwrap(), 64)
        };
        // Pages of 64 slots, 8 heads of four blocks of 34 bytes: heads start at multiples of 8
        // bytes, so a box begins up to 8 bytes before a row.
        let found = rows(DType::Q8_0, &[5, 64, 8, 4], &[2048, 32, 4, 1]).unwrap();
        assert_eq!(found.dims, [8 * 136, 1, 64, 5]);
        assert_eq!(found.strides, [1088, 1088, 64 * 1088]);
        assert_eq!(found.box_dims, [144, 1, 64, 1]);
        // Heads of two blocks: multiples of 4 bytes.
        let found = rows(DType::Q8_0, &[5, 64, 8, 2], &[1024, 16, 2, 1]).unwrap();
        assert_eq!(found.box_dims, [80, 1, 64, 1]);
        // Codes: heads must start at multiples of 16 bytes.
        let found = rows(DType::I8, &[5, 64, 8, 128], &[65536, 1024, 128, 1]).unwrap();
        assert_eq!((found.dims[0], found.box_dims[0]), (1024, 128));
        assert_eq!(rows(DType::I8, &[5, 64, 8, 128], &[69632, 1088, 136, 1]), None);
        // Heads that share rows: to the kernel a stride of 0 is no alignment.
        assert_eq!(rows(DType::Q8_0, &[5, 64, 8, 4], &[2048, 32, 0, 1]), None);
        // Head-major pages: a token's row of one head is not a multiple of 16 bytes.
        assert_eq!(rows(DType::Q8_0, &[5, 64, 8, 4], &[2048, 4, 256, 1]), None);
        assert!(rows(DType::I8, &[5, 64, 8, 128], &[65536, 128, 8192, 1]).is_some());
    }

    #[test]
    fn batched_ragged_and_paged_tensors() {
        let found = described(&[3, 100, 8, 128], &[200_000, 1024, 128, 1]).unwrap();
        assert_eq!(found.dims, [128, 8, 100, 3]);
        assert_eq!(found.strides, [256, 2048, 400_000]);
        assert_eq!(found.box_dims, [64, 1, 64, 1]);
        // Head-major: TMA takes any order of strides.
        let found = described(&[3, 100, 8, 128], &[102_400, 128, 12_800, 1]).unwrap();
        assert_eq!(found.strides, [25_600, 256, 204_800]);
        let found = described(&[1000, 8, 128], &[1024, 128, 1]).unwrap();
        assert_eq!((found.dims, found.strides[..2].to_vec()), ([128, 8, 1000, 1], vec![256, 2048]));
    }

    #[test]
    fn strides_of_what_is_there_once_are_legal_ones() {
        let found = described(&[1, 100, 1, 40], &[7, 40, 3, 1]).unwrap();
        assert_eq!((found.dims, found.strides), ([40, 1, 100, 1], [80, 80, 80]));
    }

    #[test]
    fn tensors_that_tma_cannot_address_have_no_map() {
        assert!(
            described(&[2, 100, 8, 128], &[204_800, 1024, 129, 1]).is_none(),
            "rows at odd places"
        );
        assert!(described(&[2, 100, 8, 128], &[0, 1024, 128, 1]).is_none(), "a repeated sequence");
        assert!(described(&[2, 100, 8, 128], &[204_800, -1024, 128, 1]).is_none(), "backwards");
        assert!(described(&[2, 100, 8, 128], &[1 << 39, 1024, 128, 1]).is_none(), "2^40 bytes");
        assert!(described(&[2, 100, 8, 128], &[(1 << 39) - 8, 1024, 128, 1]).is_some());
        assert!(described(&[2, 0, 8, 128], &[0, 1024, 128, 1]).is_none(), "nothing to read");
        let dims = raw_dims(DType::BF16, &[9, 1, 64], None).unwrap();
        assert!(Described::from_dims(4104, &dims, 64).is_none(), "an odd address");
    }

    #[test]
    fn last_elements_of_rows_have_the_strides_of_the_rows() {
        let rows = described(&[3, 64, 1, 576], &[36_864, 576, 576, 1]).unwrap();
        let last = rows.without_first(512).unwrap();
        assert_eq!((last.address, last.dims), (4096 + 1024, [64, 1, 64, 3]));
        assert_eq!((last.strides, last.box_dims), (rows.strides, rows.box_dims));
        assert!(!rows.fetches_256_bytes() && !last.fetches_256_bytes());
        assert!(described(&[1000, 8, 128], &[1024, 128, 1]).unwrap().fetches_256_bytes());
        assert!(rows.without_first(4).is_none(), "an odd address");
        assert!(rows.without_first(576).is_none(), "nothing to read");
    }

    #[test]
    fn boxes_of_pages() {
        assert_eq!(key_box(128, None), Some(128));
        assert_eq!(
            [8, 16, 64, 128, 256].map(|size| key_box(128, Some(size)).unwrap()),
            [8, 16, 64, 128, 128]
        );
        assert_eq!([24, 192].map(|size| key_box(128, Some(size)).unwrap()), [8, 64]);
        assert_eq!([1, 4, 12, 100].map(|size| key_box(128, Some(size))), [None; 4]);
        assert_eq!(
            [16, 32, 80, 128].map(|size| key_box(80, Some(size)).unwrap()),
            [16, 16, 80, 16]
        );
    }
}
