//! What stands for [`amx`](super) on other architectures: nothing is available.

use super::matrix::TileProduct;

pub(super) fn is_available() -> bool {
    false
}

pub(super) struct Tiles(());

impl Tiles {
    pub unsafe fn configure() -> Tiles {
        unreachable!("this architecture has no AMX")
    }
}

pub(super) unsafe fn product(_work: &TileProduct, _rows: usize, _columns: usize) {
    unreachable!("this architecture has no AMX")
}
