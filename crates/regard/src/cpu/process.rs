//! Which process this is: a child that was forked has none of its parent's threads, and locks that they held stay held.

#[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd", target_vendor = "apple"))]
mod forks {
    use crate::race::FirstResult;
    use std::ffi::c_int;
    use std::sync::atomic::{AtomicU64, Ordering};

    type Handler = unsafe extern "C" fn();

    unsafe extern "C" {
        /// POSIX: registers functions to be called around `fork`.
        fn pthread_atfork(prepare: Option<Handler>, parent: Option<Handler>, child: Option<Handler>)
        -> c_int;
    }

    static GENERATION: AtomicU64 = AtomicU64::new(0);

    unsafe extern "C" fn count_fork() {
        GENERATION.fetch_add(1, Ordering::Relaxed);
    }

    pub fn generation() -> Option<u64> {
        static REGISTERED: FirstResult<bool> = FirstResult::new();
        // Threads that register at the same time count each fork more than once, which does no harm.
        let registered = REGISTERED.get_or_init(|| {
            // SAFETY: the handler can be called at any time and by any thread: it changes an atomic and nothing else.
            unsafe { pthread_atfork(None, None, Some(count_fork)) == 0 }
        });
        registered.then(|| GENERATION.load(Ordering::Relaxed))
    }
}

/// A number that is another one in a child than in the process that forked it; `None` where the system does not tell (it has no
/// memory to register a handler), so that threads of an earlier process could be waited for.
#[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd", target_vendor = "apple"))]
pub(super) fn generation() -> Option<u64> {
    forks::generation()
}

/// Elsewhere processes do not fork, or nobody has looked how to notice.
#[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd", target_vendor = "apple")))]
pub(super) fn generation() -> Option<u64> {
    Some(0)
}
