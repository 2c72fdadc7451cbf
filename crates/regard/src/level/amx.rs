//! Detection of AMX, the matrix unit of Intel's newer server CPUs.

use crate::race::FirstResult;
use std::arch::asm;

/// Whether the CPU has AMX with bf16 and the operating system lets this process use it. Linux
/// requires a request.
pub fn is_available() -> bool {
    static AVAILABLE: FirstResult<bool> = FirstResult::new();
    *AVAILABLE.get_or_init(|| cpu_has_amx() && request_permission())
}

fn cpu_has_amx() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    const XSAVE_ON: u32 = 1 << 27;
    const AMX_BF16_AND_TILES: u32 = 1 << 22 | 1 << 24;
    __cpuid(0).eax >= 7
        && __cpuid(1).ecx & XSAVE_ON != 0
        && __cpuid_count(7, 0).edx & AMX_BF16_AND_TILES == AMX_BF16_AND_TILES
}

/// Requests AMX tile state from Linux for the threads of this process. Source: the kernel's
/// documentation, "Using XSTATE features in user space applications".
#[cfg(target_os = "linux")]
fn request_permission() -> bool {
    const SYS_ARCH_PRCTL: usize = 158;
    const ARCH_REQ_XCOMP_PERM: usize = 0x1023;
    const XFEATURE_XTILEDATA: usize = 18;
    let mut result = SYS_ARCH_PRCTL;
    // SAFETY: the system call accesses no memory of this process, and fails on kernels without it.
    // A system call overwrites rcx and r11.
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
fn request_permission() -> bool {
    false
}
