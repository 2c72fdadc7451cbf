//! A thread pool for calls that take microseconds: helper threads spin for the next run before they
//! sleep, and a run allocates nothing.

use super::executor::Executor;
#[cfg(feature = "rayon")]
use super::executor::Rayon;
use super::process;
use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Runs on the process's pool of named threads (`regard-1`, ...), one fewer than the machine has
/// cores. The calling thread works too.
///
/// The first parallel run starts the threads. If the system grants none, the calling thread does
/// everything. After a run the threads spin for some 50 us for the next one, then sleep. One run at
/// a time uses them. A run that starts meanwhile, from another thread or nested in the first, uses
/// its calling thread only, so that runs never wait for each other.
///
/// A forked child process starts its own threads, regardless of its parent's threads.
#[derive(Debug, Clone, Copy, Default)]
pub struct Threads;

impl Executor for Threads {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        match if copies > 1 { Pool::for_this_process() } else { None } {
            Some(pool) => pool.run(copies - 1, work),
            None => work(),
        }
    }
}

/// The threads of [`Plan::run`](crate::Plan::run): [`Threads`]. Inside a rayon pool, that pool
/// instead: its threads would be idle meanwhile.
#[derive(Debug, Clone, Copy, Default)]
pub struct DefaultExecutor;

impl Executor for DefaultExecutor {
    fn run(&self, copies: usize, work: &(dyn Fn() + Sync)) {
        #[cfg(feature = "rayon")]
        if rayon::current_thread_index().is_some() {
            return Rayon.run(copies, work);
        }
        Threads.run(copies, work);
    }
}

/// Time that an idle helper spins before it sleeps: longer than the gap between the small
/// attentions of two layers, and too short to take much time from other threads.
const HELPER_SPIN: Duration = Duration::from_micros(50);

/// Time that a caller spins for its helpers to finish before it sleeps: they finish at most one
/// item later.
const CALLER_SPIN: Duration = Duration::from_micros(200);

/// Bits of [`Pool::slots`] that count free slots; the others count runs.
const SLOT_MASK: u64 = 0xffff;

/// The work of a run, with its lifetime erased.
type Work = *const (dyn Fn() + Sync);

struct Pool {
    /// The process that the helpers belong to.
    generation: u64,
    helpers: usize,
    /// Helpers that the system has granted.
    started: AtomicUsize,
    /// Whether a run uses the helpers.
    busy: AtomicBool,
    /// The number of the current run, and its free slots: the number of helpers that may still
    /// join. A helper that has claimed a slot may read `work`.
    slots: AtomicU64,
    work: UnsafeCell<Work>,
    /// Helpers that have finished this run.
    finished: AtomicUsize,
    /// The payload of a helper's panic.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    sleeping_helpers: AtomicUsize,
    caller_sleeps: AtomicBool,
    lock: Mutex<()>,
    wake_helpers: Condvar,
    wake_caller: Condvar,
}

// SAFETY: `work` is written while no slot is free, by the one run that has set `busy`. It is read
// by helpers that have claimed a slot of that run afterwards. It points to a `Sync` value that
// lives until every helper with a slot has finished: `ActiveRun` waits for them.
unsafe impl Sync for Pool {}
// SAFETY: as above; no field is bound to a thread.
unsafe impl Send for Pool {}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No code panics while it holds these locks.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Number of helpers to wake for a run that wants `wanted`, not counting helpers that are awake
/// already: every awake helper looks for a slot before it sleeps. More helpers would find no slot,
/// and would take the lock and the caller's time.
fn to_wake(wanted: usize, started: usize, sleeping: usize) -> usize {
    wanted.saturating_sub(started.saturating_sub(sleeping)).min(sleeping)
}

impl Pool {
    /// This process's pool, started on first use; `None` if forks cannot be detected.
    ///
    /// It never waits for another thread: a child that is forked meanwhile would wait forever.
    fn for_this_process() -> Option<&'static Pool> {
        static POOL: AtomicPtr<Pool> = AtomicPtr::new(std::ptr::null_mut());
        let generation = process::fork_generation()?;
        let found = POOL.load(Ordering::Acquire);
        // SAFETY: a pool is complete when it is stored, and never freed.
        let pool = unsafe { found.as_ref() };
        if let Some(pool) = pool.filter(|pool| pool.generation == generation) {
            return Some(pool);
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let made = Box::into_raw(Box::new(Pool::new(generation, cores - 1)));
        match POOL.compare_exchange(found, made, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: it was allocated above, and now lives as long as the process.
            Ok(_) => Some(Pool::start(unsafe { &*made })),
            Err(first) => {
                // SAFETY: no other thread has a reference to this thread's pool. The other pool,
                // which another thread of this process has stored since the load above, is
                // complete.
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
            helpers: helpers.min(SLOT_MASK as usize),
            started: AtomicUsize::new(0),
            busy: AtomicBool::new(false),
            slots: AtomicU64::new(0),
            work: UnsafeCell::new(&nothing as &(dyn Fn() + Sync) as Work),
            finished: AtomicUsize::new(0),
            panic: Mutex::new(None),
            sleeping_helpers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake_helpers: Condvar::new(),
            wake_caller: Condvar::new(),
        }
    }

    /// Starts the helpers, or as many as the system grants.
    fn start(pool: &'static Pool) -> &'static Pool {
        for number in 1..=pool.helpers {
            let thread = std::thread::Builder::new().name(format!("regard-{number}"));
            // Fewer helpers are fine. If one cannot start, the next cannot either.
            if thread.spawn(|| pool.helper_loop()).is_err() {
                break;
            }
            pool.started.fetch_add(1, Ordering::Relaxed);
        }
        pool
    }

    /// Calls `work` on this thread and on up to `wanted` helpers. Returns when all calls have
    /// returned.
    fn run(&self, wanted: usize, work: &(dyn Fn() + Sync)) {
        let wanted = wanted.min(self.helpers);
        if wanted == 0 || self.busy.swap(true, Ordering::Acquire) {
            return work();
        }
        // SAFETY: only the lifetime is erased. `ActiveRun` below is dropped before `work` goes out
        // of scope, also if `work` panics, and waits for every helper that may call it.
        let erased = unsafe { std::mem::transmute::<*const (dyn Fn() + Sync + '_), Work>(work) };
        // SAFETY: this run has set `busy`, and the previous run has withdrawn its slots: no thread
        // reads the cell.
        unsafe { *self.work.get() = erased };
        self.finished.store(0, Ordering::Relaxed);
        let before = self.slots.load(Ordering::Relaxed);
        let slots = (before | SLOT_MASK).wrapping_add(1) | wanted as u64;
        // SeqCst with `sleeping_helpers`: either this thread sees the sleeping helper, or the
        // helper sees the slots.
        self.slots.store(slots, Ordering::SeqCst);
        let sleeping = self.sleeping_helpers.load(Ordering::SeqCst);
        if sleeping > 0 {
            self.wake(to_wake(wanted, self.started.load(Ordering::Relaxed), sleeping), sleeping);
        }
        let run = ActiveRun { pool: self, wanted };
        work();
        drop(run);
    }

    /// Wakes `count` of the `sleeping` helpers.
    fn wake(&self, count: usize, sleeping: usize) {
        // A helper that has found no slot holds the lock until it waits. Notified after the lock is
        // free again, helpers need not wait for the caller.
        drop(lock(&self.lock));
        if count >= sleeping {
            self.wake_helpers.notify_all();
        } else {
            (0..count).for_each(|_| self.wake_helpers.notify_one());
        }
    }

    /// The loop of a helper thread; it never ends.
    fn helper_loop(&self) {
        loop {
            let Some(work) = self.wait_for_work() else { continue };
            // SAFETY: a slot was claimed, so the caller, which borrows the work, waits until
            // `finished` counts this call.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| unsafe { (*work)() })) {
                lock(&self.panic).get_or_insert(payload);
            }
            // SeqCst with `caller_sleeps`: either the caller sees that all have finished, or this
            // thread sees that it sleeps.
            self.finished.fetch_add(1, Ordering::SeqCst);
            if self.caller_sleeps.load(Ordering::SeqCst) {
                let _guard = lock(&self.lock);
                self.wake_caller.notify_one();
            }
        }
    }

    /// Claims a slot of the current run, if one is free.
    fn claim_slot(&self) -> Option<Work> {
        use Ordering::SeqCst;
        let mut slots = self.slots.load(SeqCst);
        while slots & SLOT_MASK > 0 {
            match self.slots.compare_exchange_weak(slots, slots - 1, SeqCst, SeqCst) {
                // SAFETY: the work was written before its slots were published (SeqCst). It is not
                // written again before this slot is counted as finished.
                Ok(_) => return Some(unsafe { *self.work.get() }),
                Err(now) => slots = now,
            }
        }
        None
    }

    /// Waits for the next run's work: spins, then sleeps.
    fn wait_for_work(&self) -> Option<Work> {
        let start = Instant::now();
        while start.elapsed() < HELPER_SPIN {
            for _ in 0..32 {
                if let Some(work) = self.claim_slot() {
                    return Some(work);
                }
                std::hint::spin_loop();
            }
        }
        let mut guard = lock(&self.lock);
        self.sleeping_helpers.fetch_add(1, Ordering::SeqCst);
        let work = loop {
            if let Some(work) = self.claim_slot() {
                break Some(work);
            }
            guard = self.wake_helpers.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleeping_helpers.fetch_sub(1, Ordering::SeqCst);
        work
    }
}

/// A run in progress. Dropping it, also while unwinding, withdraws the free slots and waits for the
/// helpers that have claimed one.
struct ActiveRun<'a> {
    pool: &'a Pool,
    wanted: usize,
}

impl Drop for ActiveRun<'_> {
    fn drop(&mut self) {
        let pool = self.pool;
        if process::fork_generation() != Some(pool.generation) {
            // `work` has forked, and this is the child. It has no helpers, and does not use this
            // pool again.
            return;
        }
        let free = pool.slots.fetch_and(!SLOT_MASK, Ordering::SeqCst) & SLOT_MASK;
        let joined = self.wanted - free as usize;
        let is_done = || pool.finished.load(Ordering::SeqCst) == joined;
        if !is_done() {
            let start = Instant::now();
            while !is_done() && start.elapsed() < CALLER_SPIN {
                for _ in 0..32 {
                    std::hint::spin_loop();
                }
            }
            let mut guard = lock(&pool.lock);
            pool.caller_sleeps.store(true, Ordering::SeqCst);
            while !is_done() {
                guard = pool.wake_caller.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            pool.caller_sleeps.store(false, Ordering::SeqCst);
        }
        let payload = lock(&pool.panic).take();
        pool.busy.store(false, Ordering::Release);
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
        let generation = process::fork_generation().expect("a handler can be registered");
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
    fn as_many_helpers_wake_as_are_wanted() {
        for (wanted, started, sleeping, woken) in [
            (1, 15, 15, 1),
            (4, 15, 15, 4),
            (15, 15, 15, 15),
            // The helpers that still spin are enough, or some of them are.
            (2, 15, 12, 0),
            (5, 15, 12, 2),
            // The system granted three threads only.
            (15, 3, 3, 3),
            (1, 3, 2, 0),
            // A thread that sleeps before its start is counted.
            (1, 0, 1, 1),
        ] {
            assert_eq!(to_wake(wanted, started, sleeping), woken, "{wanted} of {started}");
        }
        let pool = started(7);
        for (wanted, pause) in [(1, 3), (2, 3), (5, 0), (1, 0), (7, 3), (3, 3), (6, 0)] {
            std::thread::sleep(Duration::from_millis(pause));
            // All of them have to be inside at the same time.
            let barrier = Barrier::new(wanted + 1);
            pool.run(wanted, &|| {
                barrier.wait();
            });
        }
    }

    #[test]
    fn nested_and_concurrent_runs_use_their_own_thread() {
        let pool = started(2);
        pool.run(2, &|| {
            let inner = AtomicUsize::new(0);
            pool.run(2, &|| {
                inner.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(inner.into_inner(), 1);
        });
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
                            // A run that found the pool taken leaves it to its nested run.
                            assert!((1..=3).contains(&inner.into_inner()));
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
