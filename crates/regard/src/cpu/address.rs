//! From indices to addresses: where a sequence's rows and keys lie, and what to fetch of them ahead. All arithmetic is in 64 bits.
//!
//! What has been checked is the reach of a view: `(n - 1) * stride` of each dimension. The stride of a dimension of 1, or of a view
//! without elements, can be any number. It is multiplied by 0, or nothing is read; its bytes may wrap on the way there.

use super::vector::Vector;
use crate::problem::{Inputs, Sequence};
use crate::tensor::{Dims, Tensor};
use std::cell::Cell;

/// The rows of one sequence in a `[B, L, H, D]` or `[total, H, D]` tensor (or one without `D`).
#[derive(Clone, Copy)]
pub(super) struct Rows {
    data: *mut u8,
    token_bytes: i64,
    head_bytes: i64,
}

impl Rows {
    /// The sequence's rows in a tensor at `data` of the shape `dims`, which starts at row `start` if it is ragged.
    /// `leading` is the number of dimensions before the head dim: 3 for batched tensors, 2 for ragged ones.
    pub fn of(data: *mut u8, dims: &Dims, leading: usize, sequence: &Sequence, start: usize) -> Rows {
        let size = dims.dtype().size() as i64;
        let strides = dims.strides();
        let (first, token, head) = match leading {
            3 => ((sequence.index as i64).wrapping_mul(strides[0]), strides[1], strides[2]),
            _ => ((start as i64).wrapping_mul(strides[0]), strides[0], strides[1]),
        };
        Rows {
            data: data.wrapping_offset(first.wrapping_mul(size) as isize),
            token_bytes: token.wrapping_mul(size),
            head_bytes: head.wrapping_mul(size),
        }
    }

    /// The address of row `token` of head `head`.
    pub fn address(&self, token: usize, head: usize) -> *mut u8 {
        let token = (token as i64).wrapping_mul(self.token_bytes);
        let head = (head as i64).wrapping_mul(self.head_bytes);
        self.data.wrapping_offset(token.wrapping_add(head) as isize)
    }
}

/// The keys (or values) of one sequence, from one head on.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    data: *const u8,
    key_bytes: i64,
    head_bytes: i64,
    paged: Option<Pages<'a>>,
}

#[derive(Clone, Copy)]
struct Pages<'a> {
    table: &'a [i32],
    block_size: usize,
    block_bytes: i64,
}

impl<'a> Keys<'a> {
    /// The sequence's keys from key/value head `head` on in `tensor`, which is `inputs.k` or `inputs.v`.
    pub fn of(inputs: &Inputs<'a>, tensor: &Tensor<'a>, sequence: &Sequence, head: usize) -> Keys<'a> {
        let size = tensor.dtype().size() as i64;
        let strides = tensor.strides();
        let head = head as i64;
        let paged = inputs.block_row(sequence.index).map(|table| Pages {
            table,
            block_size: tensor.shape()[1],
            block_bytes: strides[0].wrapping_mul(size),
        });
        let (first, key, head_stride) = if paged.is_some() {
            (0, strides[1], strides[2])
        } else if tensor.rank() == 4 {
            ((sequence.index as i64).wrapping_mul(strides[0]), strides[1], strides[2])
        } else {
            ((sequence.kv_start as i64).wrapping_mul(strides[0]), strides[0], strides[1])
        };
        let offset = first.wrapping_add(head.wrapping_mul(head_stride)).wrapping_mul(size);
        Keys {
            data: tensor.as_ptr().wrapping_offset(offset as isize),
            key_bytes: key.wrapping_mul(size),
            head_bytes: head_stride.wrapping_mul(size),
            paged,
        }
    }

    /// Bytes from a key to the next (within a block, if paged).
    pub fn key_bytes(&self) -> i64 {
        self.key_bytes
    }

    /// Bytes from a key to the next head's.
    pub fn head_bytes(&self) -> i64 {
        self.head_bytes
    }

    /// Writes the addresses of keys `first..first + addresses.len()`. Table entries of other keys' blocks are not looked at.
    pub fn addresses(&self, first: usize, addresses: &mut [*const u8]) {
        let Some(pages) = self.paged else {
            for (i, address) in addresses.iter_mut().enumerate() {
                *address =
                    self.data.wrapping_offset(((first + i) as i64).wrapping_mul(self.key_bytes) as isize);
            }
            return;
        };
        let (mut block, mut slot) = (first / pages.block_size, first % pages.block_size);
        let mut rest = addresses;
        while !rest.is_empty() {
            let here = rest.len().min(pages.block_size - slot);
            let (now, later) = rest.split_at_mut(here);
            let page = self
                .data
                .wrapping_offset(i64::from(pages.table[block]).wrapping_mul(pages.block_bytes) as isize);
            for (i, address) in now.iter_mut().enumerate() {
                *address = page.wrapping_offset(((slot + i) as i64).wrapping_mul(self.key_bytes) as isize);
            }
            (rest, block, slot) = (later, block + 1, 0);
        }
    }

    /// Fills `addresses` with those of `keys`, as far as there is room. Past the last there is nothing to ask for: it is repeated.
    pub fn addresses_ahead(&self, keys: std::ops::Range<usize>, addresses: &mut [*const u8]) {
        let known = keys.len().min(addresses.len());
        self.addresses(keys.start, &mut addresses[..known]);
        let last = addresses[known - 1];
        addresses[known..].fill(last);
    }
}

/// Rows to fetch while others are computed, a few cache lines at a time: a burst would hold up what is needed now. Lines are asked for in the
/// order of memory, in which the hardware recognises a stream and runs ahead of it.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    pub rows: &'a [*const u8],
    pub row_bytes: usize,
}

impl Ahead<'_> {
    /// Cache lines in all.
    pub fn lines(&self) -> usize {
        self.rows.len() * self.row_bytes.div_ceil(64)
    }
}

/// How far an [`Ahead`] has been asked for.
#[derive(Default, Clone, Copy)]
pub(super) struct Asked {
    row: usize,
    offset: usize,
}

impl Asked {
    /// Asks for the next line, if there is one left.
    ///
    /// # Safety
    /// As [`Vector`]'s methods; the rows may be anything.
    #[inline(always)]
    pub unsafe fn line<V: Vector>(&mut self, ahead: &Ahead) {
        if let Some(row) = ahead.rows.get(self.row) {
            // SAFETY: prefetching has no effect but on caches.
            unsafe { V::prefetch(row.wrapping_add(self.offset)) };
            self.offset += 64;
            if self.offset >= ahead.row_bytes {
                (self.row, self.offset) = (self.row + 1, 0);
            }
        }
    }
}

/// Rows that a sequence of products fetches between its steps.
pub(super) struct Fetch<'a> {
    ahead: Ahead<'a>,
    asked: Cell<Asked>,
    /// Cache lines a time.
    lines: usize,
}

impl<'a> Fetch<'a> {
    /// To be asked for in (at least) `times` portions.
    pub fn new(ahead: Ahead<'a>, times: usize) -> Fetch<'a> {
        Fetch { ahead, asked: Cell::default(), lines: ahead.lines().div_ceil(times) }
    }

    /// Nothing to be fetched.
    pub fn none() -> Fetch<'static> {
        Fetch::new(Ahead { rows: &[], row_bytes: 0 }, 1)
    }

    /// Asks for the next portion.
    ///
    /// # Safety
    /// As [`Asked::line`].
    #[inline(always)]
    pub unsafe fn portion<V: Vector>(&self) {
        let mut asked = self.asked.get();
        if asked.row >= self.ahead.rows.len() {
            return;
        }
        for _ in 0..self.lines {
            // SAFETY: passed on.
            unsafe { asked.line::<V>(&self.ahead) };
        }
        self.asked.set(asked);
    }
}
