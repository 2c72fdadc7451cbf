//! Threads of regard's own, for calls that take microseconds: they look out for the next call for a moment before they sleep, and handing
//! them work allocates nothing.

use super::{Executor, process};
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Runs on the process's pool of named threads (`regard-1`, ...), one less than the machine has cores; the calling thread works too.
///
/// The threads are started by the first run that is worth sharing; where the system grants none, the calling thread does everything.
/// Between runs they look out for the next one for some 50 us, then sleep. One run at a time has them: another that comes
/// meanwhile, from another thread or from inside the first, runs on its calling thread alone, so nothing waits for what waits for it.
///
/// A child that was forked starts threads of its own, whatever its parent's were doing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Threads;

impl Executor for Threads {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        match if copies > 1 { Pool::of_this_process() } else { None } {
            Some(pool) => pool.run(copies - 1, work),
            None => work(),
        }
    }
}

/// How long a thread that found nothing to do looks out for more before it sleeps: longer than what lies between two
/// layers' small attentions, and too short to matter to anybody else.
const LOOK_OUT: Duration = Duration::from_micros(50);

/// How long a caller spins until its helpers are done before it sleeps: they finish at most an item later than it does.
const LINGER: Duration = Duration::from_micros(200);

/// Bits of [`Pool::offer`] that count places; the others count runs.
const PLACES: u64 = 0xffff;

/// The work of a run, its lifetime erased.
type Work = *const (dyn Fn() + Sync);

struct Pool {
    /// The process that the helpers are threads of.
    generation: u64,
    helpers: usize,
    /// Whether a run has the helpers.
    taken: AtomicBool,
    /// Which run is on, and how many helpers may still join it. Whoever takes a place may read `work`.
    offer: AtomicU64,
    work: UnsafeCell<Work>,
    /// Helpers of this run that are done.
    done: AtomicUsize,
    /// What a helper panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    asleep: AtomicUsize,
    caller_asleep: AtomicBool,
    lock: Mutex<()>,
    wake_helpers: Condvar,
    wake_caller: Condvar,
}

// SAFETY: `work` is written while no place is on offer, by the one run that has `taken`, and read by helpers that took a place of that
// run afterwards. What it points to is `Sync`, and stays until every helper that took a place is done: `Run` waits for them.
unsafe impl Sync for Pool {}
// SAFETY: as above; nothing in it belongs to a thread.
unsafe impl Send for Pool {}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing panics under these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// This process's pool, started now if it has none; `None` if it cannot tell whether it has.
    ///
    /// Nothing here waits for another thread: a child that is forked meanwhile would wait for ever.
    fn of_this_process() -> Option<&'static Pool> {
        static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());
        let generation = process::generation()?;
        let found = POOL.load(Ordering::Acquire);
        // SAFETY: a pool is complete when it is stored, and is never freed.
        let pool = unsafe { found.as_ref() };
        if let Some(pool) = pool.filter(|pool| pool.generation == generation) {
            return Some(pool);
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let made = Box::into_raw(Box::new(Pool::new(generation, cores - 1)));
        match POOL.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it has just been made, and now lives as long as the process.
            Ok(_) => Some(Pool::start(unsafe { &*made })),
            Err(first) => {
                // SAFETY: nobody has seen this thread's pool. The other one, which another thread of this process has stored since the
                // load above, is complete.
                unsafe {
                    drop(Box::from_raw(made));
                    Some(&*first)
                }
            }
        }
    }

    fn new(generation: u64, helpers: usize) -> Pool {
        fn nothing() {}
        Pool {
            generation,
            helpers: helpers.min(PLACES as usize),
            taken: AtomicBool::new(false),
            offer: AtomicU64::new(0),
            work: UnsafeCell::new(&nothing as &(dyn Fn() + Sync) as Work),
            done: AtomicUsize::new(0),
            panic: Mutex::new(None),
            asleep: AtomicUsize::new(0),
            caller_asleep: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake_helpers: Condvar::new(),
            wake_caller: Condvar::new(),
        }
    }

    /// Starts the helpers, or as many as the system grants.
    fn start(pool: &'static Pool) -> &'static Pool {
        for number in 1..=pool.helpers {
            // A thread that cannot be had is one fewer: callers never count on any. The next one cannot be had either.
            if std::thread::Builder::new().name(format!("regard-{number}")).spawn(|| pool.help()).is_err() {
                break;
            }
        }
        pool
    }

    /// Calls `work` here, and meanwhile on as many as `wanted` helpers; returns when every call has returned.
    fn run(&self, wanted: usize, work: &(dyn Fn() + Sync)) {
        let wanted = wanted.min(self.helpers);
        if wanted == 0 || self.taken.swap(true, Ordering::Acquire) {
            return work();
        }
        // SAFETY: only the lifetime is erased. `Run` below, which is dropped before `work` ends also where `work` panics, waits for every
        // helper that can call it.
        let erased = unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), Work>(work) };
        // SAFETY: this run has `taken`, and the run before has taken back its places: nobody reads the cell.
        unsafe { *self.work.get() = erased };
        self.done.store(0, Ordering::Relaxed);
        let before = self.offer.load(Ordering::Relaxed);
        let offer = (before | PLACES).wrapping_add(1) | wanted as u64;
        // In one order with `asleep`: either this thread sees the sleeper, or the sleeper sees the offer.
        self.offer.store(offer, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) > 0 {
            let _guard = locked(&self.lock);
            self.wake_helpers.notify_all();
        }
        let run = Run { pool: self, wanted };
        work();
        drop(run);
    }

    /// What a helper does, for ever.
    fn help(&self) {
        loop {
            let Some(work) = self.next() else { continue };
            // SAFETY: a place was taken, so the caller, whose borrow of the work this is, waits until `done` counts this call.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| unsafe { (*work)() })) {
                locked(&self.panic).get_or_insert(payload);
            }
            // In one order with `caller_asleep`: either the caller sees that all are done, or this thread sees it asleep.
            self.done.fetch_add(1, Ordering::SeqCst);
            if self.caller_asleep.load(Ordering::SeqCst) {
                let _guard = locked(&self.lock);
                self.wake_caller.notify_one();
            }
        }
    }

    /// Takes a place in the run that is on, if there is one.
    fn take(&self) -> Option<Work> {
        let mut offer = self.offer.load(Ordering::SeqCst);
        while offer & PLACES > 0 {
            match self.offer.compare_exchange_weak(offer, offer - 1, Ordering::SeqCst, Ordering::SeqCst) {
                // SAFETY: the work was written before its places were offered (SeqCst), and is not written again before this place is
                // counted as done.
                Ok(_) => return Some(unsafe { *self.work.get() }),
                Err(now) => offer = now,
            }
        }
        None
    }

    /// The next run's work: looked out for, then slept for.
    fn next(&self) -> Option<Work> {
        let begun = Instant::now();
        while begun.elapsed() < LOOK_OUT {
            for _ in 0..32 {
                if let Some(work) = self.take() {
                    return Some(work);
                }
                std::hint::spin_loop();
            }
        }
        let mut guard = locked(&self.lock);
        self.asleep.fetch_add(1, Ordering::SeqCst);
        let work = loop {
            if let Some(work) = self.take() {
                break Some(work);
            }
            guard = self.wake_helpers.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.asleep.fetch_sub(1, Ordering::SeqCst);
        work
    }
}

/// A run that is on. Dropping it, also while unwinding, takes back the places that nobody took and waits for the others.
struct Run<'a> {
    pool: &'a Pool,
    wanted: usize,
}

impl Drop for Run<'_> {
    fn drop(&mut self) {
        let pool = self.pool;
        if process::generation() != Some(pool.generation) {
            // `work` has forked, and this is the child: its helpers are not here, and the pool is not used again.
            return;
        }
        let left = pool.offer.fetch_and(!PLACES, Ordering::SeqCst) & PLACES;
        let joined = self.wanted - left as usize;
        let is_done = || pool.done.load(Ordering::SeqCst) == joined;
        if !is_done() {
            let begun = Instant::now();
            while !is_done() && begun.elapsed() < LINGER {
                for _ in 0..32 {
                    std::hint::spin_loop();
                }
            }
            let mut guard = locked(&pool.lock);
            pool.caller_asleep.store(true, Ordering::SeqCst);
            while !is_done() {
                guard = pool.wake_caller.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            pool.caller_asleep.store(false, Ordering::SeqCst);
        }
        let payload = locked(&pool.panic).take();
        pool.taken.store(false, Ordering::Release);
        if let Some(payload) = payload
            && !std::thread::panicking()
        {
            resume_unwind(payload);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Barrier;

    fn started(helpers: usize) -> &'static Pool {
        let generation = process::generation().expect("a handler can be registered");
        Pool::start(Box::leak(Box::new(Pool::new(generation, helpers))))
    }

    #[test]
    fn every_copy_runs_and_has_returned() {
        let pool = started(3);
        for round in 0..2000 {
            let (calls, wanted) = (AtomicUsize::new(0), 1 + round % 5);
            let place = AtomicUsize::new(0);
            let mut results = [0u64; 64];
            let cells = results.each_mut().map(Mutex::new);
            pool.run(wanted, &|| {
                calls.fetch_add(1, Ordering::Relaxed);
                while let Some(cell) = cells.get(place.fetch_add(1, Ordering::Relaxed)) {
                    **cell.lock().unwrap() += 1;
                }
            });
            assert!((1..=1 + wanted.min(3)).contains(&calls.into_inner()));
            assert_eq!(results, [1; 64]);
            if round % 500 == 0 {
                // Long enough for the helpers to fall asleep.
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    #[test]
    fn helpers_do_help() {
        let pool = started(2);
        // All three have to be inside at the same time.
        let barrier = Barrier::new(3);
        for pause in [0, 0, 3, 3] {
            std::thread::sleep(Duration::from_millis(pause));
            pool.run(2, &|| {
                barrier.wait();
            });
        }
    }

    #[test]
    fn nested_and_concurrent_runs_use_their_own_thread() {
        let pool = started(2);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let calls = AtomicUsize::new(0);
                        pool.run(2, &|| {
                            let inner = AtomicUsize::new(0);
                            pool.run(2, &|| {
                                inner.fetch_add(1, Ordering::Relaxed);
                            });
                            assert_eq!(inner.into_inner(), 1);
                            calls.fetch_add(1, Ordering::Relaxed);
                        });
                        total.fetch_add(calls.into_inner(), Ordering::Relaxed);
                    }
                });
            }
        });
        assert!(total.into_inner() >= 800);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        let pool = started(1);
        let caller = std::thread::current().id();
        for helper_panics in [true, false] {
            let barrier = Barrier::new(2);
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(1, &|| {
                    barrier.wait();
                    assert_ne!(helper_panics, std::thread::current().id() != caller, "meant");
                });
            }));
            assert!(result.is_err());
            let barrier = Barrier::new(2);
            pool.run(1, &|| {
                barrier.wait();
            });
        }
    }
}
