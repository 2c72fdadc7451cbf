//! A value that is computed once per process, without a lock.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Like `OnceLock`, but no thread waits: threads that race each compute the value, and the first
/// result is kept.
///
/// A child that is forked while another thread computes would wait forever on a `OnceLock`: that
/// thread does not exist in the child.
pub(crate) struct FirstResult<T>(AtomicPtr<T>);

// SAFETY: the value is computed on one thread and shared with others by reference, and `T` is
// `Send` and `Sync`.
unsafe impl<T: Send + Sync> Sync for FirstResult<T> {}

impl<T: 'static> FirstResult<T> {
    pub const fn new() -> FirstResult<T> {
        FirstResult(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value, computed now if no thread has finished computing it. It lives as long as the
    /// process.
    pub fn get_or_init(&'static self, compute: impl FnOnce() -> T) -> &'static T {
        let found = self.0.load(Ordering::Acquire);
        if !found.is_null() {
            // SAFETY: the value was complete before its pointer was stored (Release), and is never
            // freed.
            return unsafe { &*found };
        }
        let made = Box::into_raw(Box::new(compute()));
        match self.0.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as above; this thread's value is the one that is kept.
            Ok(_) => unsafe { &*made },
            Err(first) => {
                // SAFETY: no other thread has a reference to this thread's value. The other value
                // was stored as above.
                unsafe {
                    drop(Box::from_raw(made));
                    &*first
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    #[test]
    fn all_threads_see_the_same_value() {
        static VALUE: FirstResult<String> = FirstResult::new();
        let barrier = Barrier::new(4);
        let addresses = std::thread::scope(|scope| {
            let threads = [0, 1, 2, 3].map(|i| {
                let barrier = &barrier;
                scope.spawn(move || {
                    barrier.wait();
                    ptr::from_ref(VALUE.get_or_init(|| i.to_string())) as usize
                })
            });
            threads.map(|thread| thread.join().expect("no panic"))
        });
        assert!(addresses.iter().all(|&address| address == addresses[0]));
        assert_eq!(ptr::from_ref(VALUE.get_or_init(String::new)) as usize, addresses[0]);
    }
}
