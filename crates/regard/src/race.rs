//! A value that is computed once in a process, without a lock.

use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Like `OnceLock`, but nobody waits: threads that come at the same time each compute the value, and the first result stays.
///
/// A child that is forked while another thread computes would wait for ever on a `OnceLock`: that thread is not in the child.
pub(crate) struct FirstResult<T>(AtomicPtr<T>);

// SAFETY: the value is made on one thread and shared with others by reference, from where `T` may be sent and shared.
unsafe impl<T: Send + Sync> Sync for FirstResult<T> {}

impl<T: 'static> FirstResult<T> {
    pub const fn new() -> FirstResult<T> {
        FirstResult(AtomicPtr::new(ptr::null_mut()))
    }

    /// The value, computed now if no thread has finished computing it. It lives as long as the process.
    pub fn get_or_init(&'static self, compute: impl FnOnce() -> T) -> &'static T {
        let found = self.0.load(Ordering::Acquire);
        if !found.is_null() {
            // SAFETY: whoever stored the pointer has made the value before (Release), and nobody frees it.
            return unsafe { &*found };
        }
        let made = Box::into_raw(Box::new(compute()));
        match self.0.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: as above; now it is this thread's value that stays.
            Ok(_) => unsafe { &*made },
            Err(first) => {
                // SAFETY: nobody has seen this thread's value; the other one was stored as above.
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
