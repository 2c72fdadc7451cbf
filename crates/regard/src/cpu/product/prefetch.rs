//! Software prefetch, interleaved with the products: a few cache lines at a time, because a burst
//! of prefetches delays the loads of the product itself. Lines are prefetched in memory order, so
//! that the hardware prefetcher recognizes a stream and runs ahead.

use crate::cpu::vector::Vector;
use std::cell::Cell;

/// Bytes of a cache line.
pub const CACHE_LINE: usize = 64;

/// Rows to prefetch.
#[derive(Clone, Copy)]
pub struct PrefetchRows<'a> {
    pub rows: &'a [*const u8],
    pub row_bytes: usize,
}

impl PrefetchRows<'_> {
    /// Total cache lines.
    pub fn lines(&self) -> usize {
        self.rows.len() * self.row_bytes.div_ceil(CACHE_LINE)
    }
}

/// The position in [`PrefetchRows`].
#[derive(Default, Clone, Copy)]
pub struct PrefetchCursor {
    row: usize,
    offset: usize,
}

impl PrefetchCursor {
    /// Prefetches the next `count` cache lines, as far as there are some left.
    ///
    /// # Safety
    /// As [`PrefetchCursor::prefetch_line`].
    #[inline(always)]
    pub unsafe fn prefetch_lines<V: Vector>(&mut self, prefetch: &PrefetchRows, count: usize) {
        for _ in 0..count {
            // SAFETY: same contract.
            unsafe { self.prefetch_line::<V>(prefetch) };
        }
    }

    /// Prefetches the next cache line, if one is left.
    ///
    /// # Safety
    /// As [`Vector`]'s methods. The rows may be any addresses.
    #[inline(always)]
    pub unsafe fn prefetch_line<V: Vector>(&mut self, prefetch: &PrefetchRows) {
        if let Some(row) = prefetch.rows.get(self.row) {
            // SAFETY: a prefetch never faults.
            unsafe { V::prefetch(row.wrapping_add(self.offset)) };
            self.offset += CACHE_LINE;
            if self.offset >= prefetch.row_bytes {
                (self.row, self.offset) = (self.row + 1, 0);
            }
        }
    }
}

/// Rows that a sequence of products prefetches in portions, between its steps.
pub struct PrefetchQueue<'a> {
    rows: PrefetchRows<'a>,
    cursor: Cell<PrefetchCursor>,
    lines_per_portion: usize,
}

impl<'a> PrefetchQueue<'a> {
    /// A queue that is empty after `portions` portions.
    pub fn new(rows: PrefetchRows<'a>, portions: usize) -> PrefetchQueue<'a> {
        PrefetchQueue {
            rows,
            cursor: Cell::default(),
            lines_per_portion: rows.lines().div_ceil(portions),
        }
    }

    pub fn empty() -> PrefetchQueue<'static> {
        PrefetchQueue::new(PrefetchRows { rows: &[], row_bytes: 0 }, 1)
    }

    /// Prefetches the next portion.
    ///
    /// # Safety
    /// As [`PrefetchCursor::prefetch_line`].
    #[inline(always)]
    pub unsafe fn prefetch_portion<V: Vector>(&self) {
        let mut cursor = self.cursor.get();
        if cursor.row >= self.rows.rows.len() {
            return;
        }
        // SAFETY: same contract.
        unsafe { cursor.prefetch_lines::<V>(&self.rows, self.lines_per_portion) };
        self.cursor.set(cursor);
    }
}

/// The keys and values to prefetch during a tile. The products that compute scores prefetch keys.
/// The products that accumulate the output prefetch values.
pub struct TilePrefetch<'a> {
    pub k: PrefetchQueue<'a>,
    pub v: PrefetchQueue<'a>,
}
