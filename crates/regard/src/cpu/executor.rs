//! Executors: which threads a plan runs on.

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
