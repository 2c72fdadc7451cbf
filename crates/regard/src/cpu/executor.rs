//! Executors: the threads that a plan runs on.

use std::ffi::c_void;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};

/// Threads to run on: regard's ([`Threads`](super::Threads)), rayon's, or the caller's own.
pub trait Executor: Sync {
    /// Calls `work` from up to `copies` threads at once, the calling thread included or not, and
    /// returns when all calls have returned. Fewer calls are allowed: the calling thread then does
    /// the rest.
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync));
}

/// Runs everything on the calling thread.
#[derive(Debug, Clone, Copy, Default)]
pub struct Inline;

impl Executor for Inline {
    fn run(&self, _copies: usize, work: &(dyn Fn() + Sync)) {
        work();
    }
}

/// Runs on the current rayon pool: the one that the caller is inside of, or the global one.
#[cfg(feature = "rayon")]
#[derive(Debug, Clone, Copy, Default)]
pub struct Rayon;

#[cfg(feature = "rayon")]
impl Executor for Rayon {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        // `join` keeps its jobs on the stack, so nothing is allocated.
        match copies {
            0 => {}
            1 => work(),
            _ => {
                let half = copies / 2;
                rayon::join(|| self.run(half, work), || self.run(copies - half, work));
            }
        }
    }
}

#[cfg(feature = "rayon")]
impl Executor for rayon::ThreadPool {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        self.install(|| Rayon.run(copies, work));
    }
}

/// Work for the threads of a C library or program, which call a function with a pointer.
struct ForeignWork<'a> {
    work: &'a (dyn Fn() + Sync),
    panicked: AtomicBool,
}

/// One call of the work. A panic is kept from the library.
unsafe extern "C" fn run_foreign_work(shared: *mut c_void) {
    // SAFETY: `run_on_foreign_threads` hands out this pointer, and outlives all calls, as its
    // caller promises.
    let shared = unsafe { &*shared.cast::<ForeignWork>() };
    if let Err(payload) = catch_unwind(AssertUnwindSafe(shared.work)) {
        std::mem::forget(payload);
        shared.panicked.store(true, Ordering::Relaxed);
    }
}

/// An [`Executor::run`] on the threads of a C library or program: `start` has a function called
/// with a pointer, once per thread.
///
/// # Panics
/// If the work did, on any of the threads; the panic does not unwind through the library.
///
/// # Safety
/// `start` lets the function be called with that pointer only, and every call has returned when
/// `start` returns.
pub unsafe fn run_on_foreign_threads(
    work: &(dyn Fn() + Sync),
    start: impl FnOnce(unsafe extern "C" fn(*mut c_void), *mut c_void),
) {
    let shared = ForeignWork { work, panicked: AtomicBool::new(false) };
    start(run_foreign_work, (&raw const shared).cast_mut().cast());
    assert!(!shared.panicked.into_inner(), "a worker panicked on a thread that is not regard's");
}
