//! The matrix unit of newer Intel CPUs (AMX): products of bf16 matrices of 16 rows, 16 columns and 32 elements, summed in f32.
//!
//! The compiler knows no AMX yet on the stable channel, so its instructions are written out. They need no enabled target feature; that
//! the CPU has them, and that the system lets this process use them, is asked once ([`is_available`]).

use super::matrix::{TILE, TileProduct};
use crate::race::FirstResult;
use std::arch::asm;

/// Whether the CPU has AMX with bf16 and the system lets this process use it. Linux asks to be asked.
pub(super) fn is_available() -> bool {
    static AVAILABLE: FirstResult<bool> = FirstResult::new();
    *AVAILABLE.get_or_init(|| cpu_has_it() && system_permits_it())
}

fn cpu_has_it() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const XSAVE_ON: u32 = 1 << 27;
    const AMX_BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7
        && __cpuid(1).ecx & XSAVE_ON != 0
        && __cpuid_count(7, 0).edx & AMX_BF16_AND_TILES == AMX_BF16_AND_TILES
}

/// Asks Linux to enlarge the state that it saves for this process's threads. Source: the kernel's documentation, "Using XSTATE features in
/// user space applications".
#[cfg(target_os = "linux")]
fn system_permits_it() -> bool {
    const SYS_ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let mut result = SYS_ARCH_PRCTL;
    // SAFETY: the call reads and writes no memory of this process; a kernel that does not know it says so. A system call overwrites
    // rcx and r11.
    unsafe {
        asm!(
            "syscall",
            inout("rax") result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XFEATURE_XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack),
        );
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn system_permits_it() -> bool {
    false
}

/// Sets up all eight tile registers whole on this thread, and gives them back when dropped: as long as they are in use, the system saves them
/// at every switch.
pub(super) struct Tiles(());

impl Tiles {
    /// # Safety
    /// [`is_available`] has said yes.
    pub unsafe fn configure() -> Tiles {
        #[repr(align(64))]
        struct Configuration([u8; 64]);
        /// Palette 1; from byte 16 on, the bytes a row of each tile; from byte 48 on, its rows.
        static WHOLE: Configuration = {
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
        // SAFETY: the CPU has the instruction; the configuration is one of palette 1.
        unsafe {
            asm!("ldtilecfg [{}]", in(reg) WHOLE.0.as_ptr(), out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _, options(nostack, readonly));
        }
        Tiles(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: there are tiles, or this would not exist.
        unsafe {
            asm!("tilerelease", out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _,
                out("tmm6") _, out("tmm7") _, options(nostack, nomem));
        }
    }
}

/// One of the shapes: the tiles of C that begin as zeros or are loaded, the step, and the tiles that are stored.
macro_rules! product {
    ($work:ident, zero: [$($zero:literal)*], load: [$($load:literal)*], step: [$($step:literal)*], store: [$($store:literal)*]) => {
        asm!(
            // The second row of tiles of A and of C; not every shape has one.
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
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _, out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

/// Does the product for `rows` tiles of rows and `columns` tiles of columns, one or two of each.
///
/// # Safety
/// [`Tiles`] are configured on this thread; the pointers cover whole tiles; there is a step.
pub(super) unsafe fn product(work: &TileProduct, rows: usize, columns: usize) {
    debug_assert!(work.steps > 0 && (1..=2).contains(&rows) && (1..=2).contains(&columns));
    // A's tiles are in 4 and 5, B's in 6 and 7, C's in 0 to 3, row by row.
    // SAFETY: what is loaded and stored is what the caller vouches for.
    unsafe {
        match (rows, columns) {
            (2, 2) => product!(work,
                zero: ["tmm0" "tmm1" "tmm2" "tmm3"],
                load: ["tmm0, [{c} + {c_stride}]" "tmm1, [{c} + {c_stride} + 64]"
                    "tmm2, [{c_low} + {c_stride}]" "tmm3, [{c_low} + {c_stride} + 64]"],
                step: ["tileloadd tmm4, [{a} + {a_stride}]" "tileloadd tmm6, [{b} + {b_stride}]" "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{b} + {b_stride} + 64]" "tdpbf16ps tmm1, tmm4, tmm7"
                    "tileloadd tmm5, [{a_low} + {a_stride}]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7"],
                store: ["[{c} + {c_stride}], tmm0" "[{c} + {c_stride} + 64], tmm1"
                    "[{c_low} + {c_stride}], tmm2" "[{c_low} + {c_stride} + 64], tmm3"]),
            (2, _) => product!(work,
                zero: ["tmm0" "tmm2"],
                load: ["tmm0, [{c} + {c_stride}]" "tmm2, [{c_low} + {c_stride}]"],
                step: ["tileloadd tmm4, [{a} + {a_stride}]" "tileloadd tmm6, [{b} + {b_stride}]" "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm5, [{a_low} + {a_stride}]" "tdpbf16ps tmm2, tmm5, tmm6"],
                store: ["[{c} + {c_stride}], tmm0" "[{c_low} + {c_stride}], tmm2"]),
            (_, 2) => product!(work,
                zero: ["tmm0" "tmm1"],
                load: ["tmm0, [{c} + {c_stride}]" "tmm1, [{c} + {c_stride} + 64]"],
                step: ["tileloadd tmm4, [{a} + {a_stride}]" "tileloadd tmm6, [{b} + {b_stride}]" "tdpbf16ps tmm0, tmm4, tmm6"
                    "tileloadd tmm7, [{b} + {b_stride} + 64]" "tdpbf16ps tmm1, tmm4, tmm7"],
                store: ["[{c} + {c_stride}], tmm0" "[{c} + {c_stride} + 64], tmm1"]),
            _ => product!(work,
                zero: ["tmm0"],
                load: ["tmm0, [{c} + {c_stride}]"],
                step: ["tileloadd tmm4, [{a} + {a_stride}]" "tileloadd tmm6, [{b} + {b_stride}]" "tdpbf16ps tmm0, tmm4, tmm6"],
                store: ["[{c} + {c_stride}], tmm0"]),
        }
    }
}
