//! What stands for [`amx`](super) on other architectures: nothing is available.

pub(super) const TILE: usize = 16;
pub(super) const DEPTH: usize = 32;

pub(super) fn is_available() -> bool {
    false
}

pub(super) struct Tiles(());

impl Tiles {
    pub unsafe fn configure() -> Tiles {
        unreachable!("this architecture has no AMX")
    }
}

#[allow(dead_code)] // Nothing here reads it.
#[derive(Clone, Copy)]
pub(super) struct TileProduct {
    pub a: *const u8,
    pub a_stride: usize,
    pub b: *const u8,
    pub b_stride: usize,
    pub steps: usize,
    pub c: *mut u8,
    pub c_stride: usize,
    pub accumulate: bool,
}

pub(super) unsafe fn product(_work: &TileProduct, _rows: usize, _columns: usize) {
    unreachable!("this architecture has no AMX")
}
