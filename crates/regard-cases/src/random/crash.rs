//! Prints which problems were running when the process crashes: a read past a guard page ends it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// Maximum threads whose problems are noted.
const THREADS: usize = 256;

/// The problem that each thread is at, one more than its number; 0 for none.
static RUNNING: [AtomicU64; THREADS] = [const { AtomicU64::new(0) }; THREADS];
static SEED: AtomicU64 = AtomicU64::new(0);
static THREADS_SEEN: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static SLOT: usize = THREADS_SEEN.fetch_add(1, Ordering::Relaxed) % THREADS;
}

/// Notes that a problem is running on this thread, until it is dropped.
pub struct Noted(usize);

impl Noted {
    /// The problem of that number.
    pub fn new(seed: u64, number: u64) -> Noted {
        let slot = SLOT.with(|slot| *slot);
        SEED.store(seed, Ordering::Relaxed);
        RUNNING[slot].store(number + 1, Ordering::Relaxed);
        Noted(slot)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        RUNNING[self.0].store(0, Ordering::Relaxed);
    }
}

/// From now on, a crash names the problems that were running on stderr before the process ends as
/// it would have.
#[cfg(unix)]
pub fn watch() {
    for signal in [libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGABRT] {
        // SAFETY: the handler only reads atomics and calls what may be called in a signal handler.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = handler as *const () as usize;
            // Once: raised again, the signal has its default action.
            action.sa_flags = libc::SA_ONSTACK | libc::SA_RESETHAND;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Nothing can be watched here.
#[cfg(not(unix))]
pub fn watch() {}

#[cfg(unix)]
extern "C" fn handler(signal: i32) {
    write_words(b"\nerror: the process crashed with signal ");
    write_number(signal as u64);
    write_words(b"; running problems, of which one or more read or wrote past an operand:\n");
    for running in &RUNNING {
        let number = running.load(Ordering::Relaxed);
        if number > 0 {
            write_words(b"    --random 1 --first ");
            write_number(number - 1);
            write_words(b" --seed ");
            write_number(SEED.load(Ordering::Relaxed));
            write_words(b"\n");
        }
    }
    // SAFETY: may be called in a signal handler.
    unsafe { libc::raise(signal) };
}

#[cfg(unix)]
fn write_words(words: &[u8]) {
    // SAFETY: may be called in a signal handler; the words are valid memory. Errors are
    // ignored: stderr may be closed.
    let _ = unsafe { libc::write(2, words.as_ptr().cast(), words.len()) };
}

#[cfg(unix)]
fn write_number(mut number: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    write_words(&digits[at..]);
}
