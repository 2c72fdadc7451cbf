//! Stub for architectures without AMX.

use super::AmxProduct;

pub struct Tiles(());

impl Tiles {
    pub unsafe fn configure() -> Tiles {
        unreachable!("this architecture has no AMX")
    }
}

pub unsafe fn product(_work: &AmxProduct, _row_tiles: usize, _column_tiles: usize) {
    unreachable!("this architecture has no AMX")
}
