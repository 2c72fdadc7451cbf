//! Detects forks. A forked child process has none of its parent's threads, and locks that they held
//! stay held.

#[cfg(any(
    target_os = "linux",
    target_os = "android",
    target_os = "freebsd",
    target_vendor = "apple"
))]
mod forks {
    use crate::race::FirstResult;
    use std::ffi::c_int;
    use std::sync::atomic::{AtomicU64, Ordering};

    type Handler = unsafe extern "C" fn();

    unsafe extern "C" {
        /// POSIX: registers functions to be called around `fork`.
        fn pthread_atfork(
            prepare: Option<Handler>,
            parent: Option<Handler>,
            child: Option<Handler>,
        ) -> c_int;
    }

    static GENERATION: AtomicU64 = AtomicU64::new(0);

    unsafe extern "C" fn count_fork() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }

    pub fn fork_generation() -> Option<u64> {
        static REGISTERED: FirstResult<bool> = FirstResult::new();
        // Threads that register at the same time count each fork more than once, which is harmless.
        let registered = REGISTERED.get_or_init(|| {
            // SAFETY: any thread may call the handler at any time: it only changes an atomic.
            unsafe { pthread_atfork(None, None, Some(count_fork)) == 0 }
        });
        registered.then(|| GENERATION.load(Ordering::Relaxed))
    }
}

/// A number that differs between a process and its forked children. `None` if forks cannot be
/// detected, because the system had no memory to register a handler. Then no pool can be used: its
/// threads might be the parent's.
#[cfg(any(
    target_os = "linux",
    target_os = "android",
    target_os = "freebsd",
    target_vendor = "apple"
))]
pub fn fork_generation() -> Option<u64> {
    forks::fork_generation()
}

/// Other systems have no fork, or forks are not detected there.
#[cfg(not(any(
    target_os = "linux",
    target_os = "android",
    target_os = "freebsd",
    target_vendor = "apple"
)))]
pub fn fork_generation() -> Option<u64> {
    Some(0)
}
