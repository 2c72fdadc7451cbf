//! Addresses of a sequence's rows and keys. All arithmetic is in 64 bits.
//!
//! Checked beforehand: the reach of a view, `(n - 1) * stride` for each dimension. The stride of a
//! dimension of length 1, or of a view without elements, may be any number: it is multiplied by 0
//! or never used to read. Its byte offset may wrap.

use super::list_tile::{EntryPlace, ListTile};
use crate::cpu::product::prefetch::PrefetchRows;
use crate::problem::{Inputs, Sequence};
use crate::tensor::{Dims, Tensor};
use std::ops::Range;

/// The rows of one sequence in a `[B, L, H, D]` or `[total, H, D]` tensor (or one without `D`).
#[derive(Clone, Copy)]
pub struct RowAddresses {
    data: *mut u8,
    token_bytes: i64,
    head_bytes: i64,
}

impl RowAddresses {
    /// The sequence's rows in a tensor of shape `dims` at `data`. A ragged tensor starts at the
    /// sequence's `q_start`. `leading` is the number of dimensions before the head dim: 3 for
    /// batched tensors, 2 for ragged ones.
    pub fn new(data: *mut u8, dims: &Dims, leading: usize, sequence: &Sequence) -> RowAddresses {
        let size = dims.dtype().size() as i64;
        let strides = dims.strides();
        let (first, token, head) = match leading {
            3 => ((sequence.index as i64).wrapping_mul(strides[0]), strides[1], strides[2]),
            _ => ((sequence.q_start as i64).wrapping_mul(strides[0]), strides[0], strides[1]),
        };
        RowAddresses {
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

/// The keys (or values) of one sequence, starting at one key/value head.
#[derive(Clone, Copy)]
pub struct KeyAddresses<'a> {
    data: *const u8,
    key_bytes: i64,
    head_bytes: i64,
    /// 0 if keys are not paged.
    page_bytes: i64,
    paged: Option<Pages<'a>>,
    /// The entries of the tile that is being walked, if the row has a list of keys; else null.
    list: *const ListTile,
    /// The second cache, if lists name keys of one.
    second: Option<SecondPool>,
}

/// The keys of the second cache, from the same key/value head on.
#[derive(Clone, Copy)]
struct SecondPool {
    data: *const u8,
    key_bytes: i64,
    page_bytes: i64,
}

#[derive(Clone, Copy)]
struct Pages<'a> {
    table: &'a [i32],
    page_size: usize,
}

impl<'a> KeyAddresses<'a> {
    /// The sequence's keys in `tensor`, which is `inputs.k` or `inputs.v`, starting at key/value
    /// head `head`.
    pub fn new(
        inputs: &Inputs<'a>,
        tensor: &Tensor<'a>,
        sequence: &Sequence,
        head: usize,
    ) -> KeyAddresses<'a> {
        let size = tensor.dtype().size() as i64;
        let strides = tensor.strides();
        let head = head as i64;
        let page_size = tensor.shape()[1];
        let paged = inputs.block_row(sequence.index).map(|table| Pages { table, page_size });
        let is_pool = inputs.has_pool();
        let (first, key, head_stride) = if is_pool {
            (0, strides[1], strides[2])
        } else if tensor.rank() == 4 {
            ((sequence.index as i64).wrapping_mul(strides[0]), strides[1], strides[2])
        } else {
            ((sequence.kv_start as i64).wrapping_mul(strides[0]), strides[0], strides[1])
        };
        let offset = first.wrapping_add(head.wrapping_mul(head_stride)).wrapping_mul(size);
        KeyAddresses {
            data: tensor.as_ptr().wrapping_offset(offset as isize),
            key_bytes: key.wrapping_mul(size),
            head_bytes: head_stride.wrapping_mul(size),
            page_bytes: if is_pool { strides[0].wrapping_mul(size) } else { 0 },
            paged,
            list: std::ptr::null(),
            second: None,
        }
    }

    /// The scales of the sequence's keys (or values) `keys`, starting at key/value head `head`. A
    /// dimension of length 1 stands for all.
    pub fn for_scales(
        inputs: &Inputs<'a>,
        scales: &Tensor<'a>,
        keys: &Tensor<'a>,
        sequence: &Sequence,
        head: usize,
    ) -> KeyAddresses<'a> {
        let size = scales.dtype().size() as i64;
        let stride = |dim: usize| match scales.shape()[dim] {
            1 => 0,
            _ => scales.strides()[dim].wrapping_mul(size),
        };
        let (first, page_bytes, key_bytes, head_bytes) = match scales.rank() {
            3 => (sequence.index as i64, stride(0), stride(1), stride(2)),
            _ => (sequence.kv_start as i64, stride(0), stride(0), stride(1)),
        };
        let page_size = keys.shape()[1];
        let paged = inputs.block_row(sequence.index).map(|table| Pages { table, page_size });
        let is_pool = inputs.has_pool();
        let first = if is_pool { 0 } else { first.wrapping_mul(page_bytes) };
        let offset = first.wrapping_add((head as i64).wrapping_mul(head_bytes));
        KeyAddresses {
            data: scales.as_ptr().wrapping_offset(offset as isize),
            key_bytes,
            head_bytes,
            page_bytes: if is_pool { page_bytes } else { 0 },
            paged,
            list: std::ptr::null(),
            second: None,
        }
    }

    /// The same for keys that are numbered by the entries of a list. `list` holds the entries
    /// whenever addresses are asked for.
    pub fn listed(self, list: *const ListTile) -> KeyAddresses<'a> {
        KeyAddresses { list, ..self }
    }

    /// The same with keys (or values) of a second cache, from key/value head `head` on.
    pub fn with_second(self, pool: &Tensor<'a>, head: usize) -> KeyAddresses<'a> {
        let size = pool.dtype().size() as i64;
        let bytes = |dim: usize| pool.strides()[dim].wrapping_mul(size);
        self.with_second_at(pool.as_ptr(), [bytes(0), bytes(1), bytes(2)], head)
    }

    /// The same with scales of a second cache. A dimension of length 1 stands for all.
    pub fn with_second_scales(self, scales: &Tensor<'a>, head: usize) -> KeyAddresses<'a> {
        let size = scales.dtype().size() as i64;
        let bytes = |dim: usize| match scales.shape()[dim] {
            1 => 0,
            _ => scales.strides()[dim].wrapping_mul(size),
        };
        self.with_second_at(scales.as_ptr(), [bytes(0), bytes(1), bytes(2)], head)
    }

    fn with_second_at(
        self,
        data: *const u8,
        [page_bytes, key_bytes, head_bytes]: [i64; 3],
        head: usize,
    ) -> KeyAddresses<'a> {
        let data = data.wrapping_offset((head as i64).wrapping_mul(head_bytes) as isize);
        KeyAddresses { second: Some(SecondPool { data, key_bytes, page_bytes }), ..self }
    }

    /// Whether all keys have the address of key 0.
    pub fn is_constant(&self) -> bool {
        self.key_bytes == 0 && self.page_bytes == 0 && self.second.is_none()
    }

    /// The address for head `head` of a key, if all keys have the same.
    pub fn constant_address(&self, head: usize) -> *const u8 {
        self.data.wrapping_offset(self.head_offset(head) as isize)
    }

    /// Byte offset from the first head to head `head`.
    pub fn head_offset(&self, head: usize) -> i64 {
        (head as i64).wrapping_mul(self.head_bytes)
    }

    /// Writes the addresses of keys `first..first + addresses.len()`. Reads no page table entries
    /// of other keys.
    pub fn addresses(&self, first: usize, addresses: &mut [*const u8]) {
        if !self.list.is_null() {
            // SAFETY: the scratch outlives the item, and the list is not written meanwhile.
            return self.listed_addresses(unsafe { &*self.list }, first, addresses);
        }
        let Some(pages) = self.paged else {
            for (i, address) in addresses.iter_mut().enumerate() {
                let offset = ((first + i) as i64).wrapping_mul(self.key_bytes);
                *address = self.data.wrapping_offset(offset as isize);
            }
            return;
        };
        let (mut page, mut slot) = (first / pages.page_size, first % pages.page_size);
        let mut rest = addresses;
        while !rest.is_empty() {
            let count = rest.len().min(pages.page_size - slot);
            let (in_page, later) = rest.split_at_mut(count);
            let page_offset = i64::from(pages.table[page]).wrapping_mul(self.page_bytes);
            let page_data = self.data.wrapping_offset(page_offset as isize);
            for (i, address) in in_page.iter_mut().enumerate() {
                let offset = ((slot + i) as i64).wrapping_mul(self.key_bytes);
                *address = page_data.wrapping_offset(offset as isize);
            }
            (rest, page, slot) = (later, page + 1, 0);
        }
    }

    /// Rows of one head in a tile whose first key is `tile_start`.
    pub fn for_tile(data: *const u8, row_bytes: usize, tile_start: usize) -> KeyAddresses<'a> {
        KeyAddresses {
            data: data.wrapping_sub(tile_start.wrapping_mul(row_bytes)),
            key_bytes: row_bytes as i64,
            head_bytes: 0,
            page_bytes: 0,
            paged: None,
            list: std::ptr::null(),
            second: None,
        }
    }

    /// Writes the addresses of the keys of entries `first..first + addresses.len()`.
    fn listed_addresses(&self, list: &ListTile, first: usize, addresses: &mut [*const u8]) {
        for (i, address) in addresses.iter_mut().enumerate() {
            let EntryPlace { pool, block, slot } = list.place(first + i);
            let (data, page_bytes, key_bytes) = match &self.second {
                Some(second) if pool == 1 => (second.data, second.page_bytes, second.key_bytes),
                _ => (self.data, self.page_bytes, self.key_bytes),
            };
            let offset = block.wrapping_mul(page_bytes);
            let offset = offset.wrapping_add(slot.wrapping_mul(key_bytes));
            *address = data.wrapping_offset(offset as isize);
        }
    }
}

/// Maximum tokens per block of [`HeadRows`].
pub const MAX_BLOCK_TOKENS: usize = 128;

/// The K (or V) rows of several heads for the tokens of a tile.
///
/// In a token-major cache the heads of a token are adjacent, and the tokens of a head are pages
/// apart. Reading head by head then touches a few lines in each of many pages, which caches,
/// prefetchers and DRAM all handle badly. So several heads are computed together, and rows are
/// prefetched in memory order, one block of tokens ahead ([`PrefetchOrder`]).
pub struct HeadRows<'a> {
    /// The address of each token's first head. The addresses of later tokens follow, as far as
    /// known, for prefetching.
    pub addresses: &'a [*const u8],
    pub head_bytes: i64,
    pub tokens: usize,
    pub heads: usize,
    pub token_major: bool,
    /// Bytes of a head's row.
    pub row_bytes: usize,
}

impl<'a> HeadRows<'a> {
    pub fn new(
        keys: &KeyAddresses,
        addresses: &'a [*const u8],
        tokens: usize,
        heads: usize,
        row_bytes: usize,
    ) -> HeadRows<'a> {
        let head_bytes = keys.head_bytes;
        let token_major = heads > 1 && head_bytes.unsigned_abs() < keys.key_bytes.unsigned_abs();
        HeadRows { addresses, head_bytes, tokens, heads, token_major, row_bytes }
    }

    /// Byte offset from a token's first head to head `head`. With a single head the stride may be
    /// any number: see the module's documentation.
    pub fn head_offset(&self, head: usize) -> i64 {
        (head as i64).wrapping_mul(self.head_bytes)
    }

    /// The rows to prefetch while the tokens of `block` are computed: the rows of the next
    /// `block.len()` tokens, in memory order. Each head of the block prefetches the next portion of
    /// them.
    pub fn prefetch_after(&self, block: &Range<usize>) -> PrefetchOrder<'_> {
        let end = self.addresses.len().min(block.end + block.len());
        self.prefetch_order(block.end.min(end)..end)
    }

    /// The rows of these tokens, in memory order, in a portion per head.
    pub fn prefetch_order(&self, tokens: Range<usize>) -> PrefetchOrder<'_> {
        let tokens = &self.addresses[tokens];
        PrefetchOrder { rows: self, tokens, portions: 0 }
    }
}

/// The rows of the next block, in memory order.
pub struct PrefetchOrder<'a> {
    rows: &'a HeadRows<'a>,
    /// The address of each token's first head.
    tokens: &'a [*const u8],
    /// Portions so far.
    portions: usize,
}

impl PrefetchOrder<'_> {
    /// The rows of the next portion: of a head, or of as many rows as there are tokens.
    #[inline(always)]
    pub fn next_rows<'b>(
        &mut self,
        rows: &'b mut [*const u8; MAX_BLOCK_TOKENS],
    ) -> PrefetchRows<'b> {
        let HeadRows { head_bytes, heads, token_major, row_bytes, .. } = *self.rows;
        let portion = self.portions;
        self.portions += 1;
        if token_major && head_bytes == row_bytes as i64 {
            // The heads of a token are one row. A line that two of them share is prefetched once.
            let start = self.tokens.len() * portion / heads;
            let end = self.tokens.len() * (portion + 1) / heads;
            let rows = &mut rows[..end - start];
            rows.copy_from_slice(&self.tokens[start..end]);
            return PrefetchRows { rows, row_bytes: row_bytes * heads };
        }
        let rows = &mut rows[..self.tokens.len()];
        if !token_major {
            let offset = self.rows.head_offset(portion) as isize;
            for (row, address) in rows.iter_mut().zip(self.tokens) {
                *row = address.wrapping_offset(offset);
            }
            return PrefetchRows { rows, row_bytes };
        }
        // As many rows per portion as there are tokens.
        let first = portion * rows.len();
        let mut filled = 0;
        while filled < rows.len() {
            let (token, head) = ((first + filled) / heads, (first + filled) % heads);
            let count = (rows.len() - filled).min(heads - head);
            let mut offset = self.rows.head_offset(head);
            let address = self.tokens[token];
            for row in &mut rows[filled..filled + count] {
                *row = address.wrapping_offset(offset as isize);
                offset = offset.wrapping_add(head_bytes);
            }
            filled += count;
        }
        PrefetchRows { rows, row_bytes }
    }
}

/// A block of tokens of one head of a tile.
#[derive(Clone)]
pub struct HeadBlock {
    /// The head, counted from the item's first one.
    pub head: usize,
    /// The tokens, relative to the item's first key in the tile.
    pub tokens: Range<usize>,
    /// The item's first key in the tile, relative to the tile's first key.
    pub first: usize,
}

impl HeadBlock {
    /// The block's keys, relative to the tile's first key.
    #[inline(always)]
    pub fn keys(&self) -> Range<usize> {
        self.first + self.tokens.start..self.first + self.tokens.end
    }
}
