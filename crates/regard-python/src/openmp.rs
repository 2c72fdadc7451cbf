//! PyTorch's own threads, as an executor.
//!
//! PyTorch's CPU operators run on OpenMP threads, which spin for their next work. If attention ran on
//! threads of its own, both would take turns in being woken up, which costs a decode step more than its
//! attention.

use regard::cpu::{Executor, Threads};
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

/// `GOMP_parallel` of the OpenMP library that is loaded: GNU's, and those of LLVM and Intel, which have it
/// too.
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
        // SAFETY: nothing is loaded; the names end in zeros, and the symbol has this type in all of them.
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

/// What the threads are handed.
struct Shared<'a> {
    work: &'a (dyn Fn() + Sync),
    panicked: AtomicBool,
}

/// One copy of the work. A panic is kept from OpenMP.
unsafe extern "C" fn work(shared: *mut c_void) {
    // SAFETY: `OpenMp::run` hands out this pointer, and outlives all calls.
    let shared = unsafe { &*shared.cast::<Shared>() };
    if let Err(payload) = catch_unwind(AssertUnwindSafe(shared.work)) {
        std::mem::forget(payload);
        shared.panicked.store(true, Ordering::Relaxed);
    }
}

impl Executor for OpenMp {
    fn run(&self, copies: usize, copy: &(dyn Fn() + Sync)) {
        static PARALLEL: OnceLock<Option<Parallel>> = OnceLock::new();
        let Some(parallel) = PARALLEL.get_or_init(loaded) else {
            return Threads.run(copies, copy);
        };
        let shared = Shared { work: copy, panicked: AtomicBool::new(false) };
        let threads = c_uint::try_from(copies).unwrap_or(c_uint::MAX);
        // SAFETY: the function calls `work` with this pointer from up to so many threads, and returns when
        // all calls have.
        unsafe { parallel(work, (&raw const shared).cast_mut().cast(), threads, 0) };
        assert!(!shared.panicked.into_inner(), "a worker panicked on a thread of OpenMP's");
    }
}
