//! PyTorch's own threads, as an executor.
//!
//! PyTorch's CPU operators run on OpenMP threads, which spin for their next work. If attention ran
//! on threads of its own, both would take turns in being woken up, which costs a decode step more
//! than its attention.

use regard::cpu::{Executor, Threads, run_on_foreign_threads};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `GOMP_parallel` of the OpenMP library that is loaded: GNU's, and those of LLVM and Intel, which
/// have it too.
type Parallel =
    unsafe extern "C" fn(unsafe extern "C" fn(*mut c_void), *mut c_void, c_uint, c_uint);

#[cfg(target_os = "linux")]
fn loaded() -> Option<Parallel> {
    unsafe extern "C" {
        fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
        fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
    }
    // RTLD_LAZY and RTLD_NOLOAD: only a library that is there already.
    const FLAGS: c_int = 0x1 | 0x4;
    for name in [c"libgomp.so.1", c"libomp.so", c"libiomp5.so"] {
        // SAFETY: nothing is loaded; the names end in zeros, and the symbol has this type in all of
        // them.
        unsafe {
            let library = dlopen(name.as_ptr(), FLAGS);
            if library.is_null() {
                continue;
            }
            let symbol = dlsym(library, c"GOMP_parallel".as_ptr());
            if !symbol.is_null() {
                return Some(std::mem::transmute::<*mut c_void, Parallel>(symbol));
            }
        }
    }
    None
}

#[cfg(not(target_os = "linux"))]
fn loaded() -> Option<Parallel> {
    None
}

/// OpenMP's threads, or regard's own where no OpenMP library is loaded.
pub struct OpenMp;

impl Executor for OpenMp {
    fn run(&self, copies: usize, copy: &(dyn Fn() + Sync)) {
        static PARALLEL: OnceLock<Option<Parallel>> = OnceLock::new();
        let Some(parallel) = PARALLEL.get_or_init(loaded) else {
            return Threads.run(copies, copy);
        };
        let threads = c_uint::try_from(copies).unwrap_or(c_uint::MAX);
        // SAFETY: the function calls `work` with this pointer from up to so many threads, and
        // returns when all calls have.
        unsafe { run_on_foreign_threads(copy, |work, shared| parallel(work, shared, threads, 0)) };
    }
}
