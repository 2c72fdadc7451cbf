//! AMX instructions, in inline assembly: stable Rust has no intrinsics for them.
//!
//! Inline assembly needs no enabled target feature. [`Level::has`](crate::level::Level::has) checks
//! once that the CPU has AMX and that the operating system lets this process use it.

use super::{AmxProduct, TILE};
use std::arch::asm;

/// Configures the eight tile registers of this thread at full size, and releases them when dropped:
/// while they are in use, every context switch saves them.
pub struct Tiles(());

impl Tiles {
    /// # Safety
    /// The machine has [`Bf16Products::Tiles`](crate::level::Bf16Products::Tiles).
    pub unsafe fn configure() -> Tiles {
        #[repr(align(64))]
        struct Configuration([u8; 64]);
        /// Palette 1. Bytes 16..: bytes per row of each tile (u16). Bytes 48..: rows of each tile.
        static FULL_SIZE: Configuration = {
            let mut bytes = [0; 64];
            bytes[0] = 1;
            let mut tile = 0;
            while tile < 8 {
                bytes[16 + 2 * tile] = (4 * TILE) as u8;
                bytes[48 + tile] = TILE as u8;
                tile += 1;
            }
            Configuration(bytes)
        };
        // SAFETY: the CPU has AMX; the configuration is valid for palette 1.
        unsafe {
            asm!(
                "ldtilecfg [{}]", in(reg) FULL_SIZE.0.as_ptr(),
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly)
            );
        }
        Tiles(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: `configure` created this value, so the CPU has AMX.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem)
            );
        }
    }
}

/// The assembly of one shape: zero or load the tiles of C, loop over the depth, store the tiles of
/// C.
macro_rules! product {
    (
        $work:ident,
        zero: [$($zero:literal)*],
        load: [$($load:literal)*],
        step: [$($step:literal)*],
        store: [$($store:literal)*]
    ) => {
        asm!(
            // Not every shape uses the second row of tiles; a comment keeps the operands used.
            "# {a_low}, {c_low}",
            "test {accumulate}, {accumulate}",
            "jnz 2f",
            $(concat!("tilezero ", $zero),)*
            "jmp 3f",
            "2:",
            $(concat!("tileloadd ", $load),)*
            "3:",
            $($step,)*
            "add {a}, 64",
            "add {a_low}, 64",
            "add {b}, {b_step}",
            "dec {steps}",
            "jnz 3b",
            $(concat!("tilestored ", $store),)*
            accumulate = in(reg) usize::from($work.accumulate),
            a = inout(reg) $work.a => _,
            a_low = inout(reg) $work.a.wrapping_add(TILE * $work.a_stride) => _,
            a_stride = in(reg) $work.a_stride,
            b = inout(reg) $work.b => _,
            b_stride = in(reg) $work.b_stride,
            b_step = in(reg) $work.b_stride * TILE,
            steps = inout(reg) $work.steps => _,
            c = in(reg) $work.c,
            c_low = in(reg) $work.c.wrapping_add(TILE * $work.c_stride),
            c_stride = in(reg) $work.c_stride,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Computes the product for one or two tiles of rows and one or two tiles of columns.
///
/// # Safety
/// [`Tiles`] are configured on this thread, the pointers cover whole tiles, and `steps` is not 0.
pub unsafe fn product(work: &AmxProduct, row_tiles: usize, column_tiles: usize) {
    debug_assert!(work.steps > 0);
    debug_assert!((1..=2).contains(&row_tiles) && (1..=2).contains(&column_tiles));
    // Tile registers: C in 0 to 3 (row by row), A in 4 and 5, B in 6 and 7.
    // SAFETY: the caller guarantees the memory that is loaded and stored.
    unsafe {
        match (row_tiles, column_tiles) {
            (2, 2) => product!(work,
                zero: ["tmm0" "tmm1" "tmm2" "tmm3"],
                load: ["tmm0, [{c} + {c_stride}]" "tmm1, [{c} + {c_stride} + 64]"
                    "tmm2, [{c_low} + {c_stride}]" "tmm3, [{c_low} + {c_stride} + 64]"],
                step: [
                    "tileloadd tmm4, [{a} + {a_stride}]"
                    "tileloadd tmm6, [{b} + {b_stride}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{b} + {b_stride} + 64]"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{a_low} + {a_stride}]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                    "tdpbf16ps tmm3, tmm5, tmm7"
                ],
                store: ["[{c} + {c_stride}], tmm0" "[{c} + {c_stride} + 64], tmm1"
                    "[{c_low} + {c_stride}], tmm2" "[{c_low} + {c_stride} + 64], tmm3"]),
            (2, _) => product!(work,
                zero: ["tmm0" "tmm2"],
                load: ["tmm0, [{c} + {c_stride}]" "tmm2, [{c_low} + {c_stride}]"],
                step: [
                    "tileloadd tmm4, [{a} + {a_stride}]"
                    "tileloadd tmm6, [{b} + {b_stride}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{a_low} + {a_stride}]"
                    "tdpbf16ps tmm2, tmm5, tmm6"
                ],
                store: ["[{c} + {c_stride}], tmm0" "[{c_low} + {c_stride}], tmm2"]),
            (_, 2) => product!(work,
                zero: ["tmm0" "tmm1"],
                load: ["tmm0, [{c} + {c_stride}]" "tmm1, [{c} + {c_stride} + 64]"],
                step: [
                    "tileloadd tmm4, [{a} + {a_stride}]"
                    "tileloadd tmm6, [{b} + {b_stride}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{b} + {b_stride} + 64]"
                    "tdpbf16ps tmm1, tmm4, tmm7"
                ],
                store: ["[{c} + {c_stride}], tmm0" "[{c} + {c_stride} + 64], tmm1"]),
            _ => product!(work,
                zero: ["tmm0"],
                load: ["tmm0, [{c} + {c_stride}]"],
                step: [
                    "tileloadd tmm4, [{a} + {a_stride}]"
                    "tileloadd tmm6, [{b} + {b_stride}]"
                    "tdpbf16ps tmm0, tmm4, tmm6"
                ],
                store: ["[{c} + {c_stride}], tmm0"]),
        }
    }
}
