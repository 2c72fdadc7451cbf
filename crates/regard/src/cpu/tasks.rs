//! Numbered tasks of equal cost, shared by the threads of an executor.

use super::executor::Executor;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Bytes below which only the calling thread works: waking a thread takes longer.
const MIN_PARALLEL_BYTES: usize = 1 << 18;

/// Runs every task once. `bytes` is the memory traffic of all tasks together.
pub fn run_tasks(
    executor: &dyn Executor,
    tasks: usize,
    bytes: usize,
    task: &(dyn Fn(usize) + Sync),
) {
    let next = AtomicUsize::new(0);
    let work = || {
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= tasks {
                return;
            }
            task(number);
        }
    };
    if tasks > 1 && bytes >= MIN_PARALLEL_BYTES {
        executor.run(tasks, &work);
    }
    // All tasks, or the tasks that the executor left.
    work();
}
