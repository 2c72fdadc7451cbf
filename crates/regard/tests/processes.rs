//! The library in unusual processes: children are forked while it works, and systems grant no
//! threads.
#![cfg(unix)]

use regard::cpu::{self, Executor, Threads};
use regard::paged::PageAllocator;
use regard::{Attention, Inputs, Machine, Outputs, Plan, Problem, Tensor, TensorMut, attention};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Too many for an item of several heads: each item is one head.
const ROWS: usize = 80;
const DIM: usize = 32;

/// A problem that is worth sharing among threads, and its expected result.
struct Work {
    data: Vec<f32>,
    expected: Vec<f32>,
}

impl Work {
    fn new() -> Work {
        let data: Vec<f32> =
            (0..ROWS * DIM * 8).map(|i| ((i * 7919) % 100) as f32 / 50.0 - 1.0).collect();
        let mut work = Work { data, expected: Vec::new() };
        work.expected = work.run(1);
        work
    }

    fn inputs(&self) -> Inputs<'_> {
        let view = || Tensor::new(&self.data, [1, ROWS, 8, DIM]).expect("whole");
        Inputs::new(view(), view(), view(), Attention::causal())
    }

    /// The output, on at most that many threads.
    fn run(&self, threads: usize) -> Vec<f32> {
        let inputs = self.inputs();
        let mut out = vec![f32::NAN; self.data.len()];
        let view = TensorMut::new(&mut out, [1, ROWS, 8, DIM]).expect("whole");
        let mut outputs = Outputs { out: view, lse: None };
        let machine = Machine::host().expect("this machine").with_threads(threads);
        let plan = Plan::new(&Problem::from_operands(&inputs, &outputs).expect("sound"), &machine)
            .expect("plain");
        assert_eq!(plan.workers(), threads, "worth sharing");
        plan.run(&inputs, &mut outputs, &mut vec![0; plan.workspace_bytes()]).expect("sound");
        out
    }
}

/// Forks; the child does `work`, and ends with status 0 if that is true. It has ten seconds.
fn child(work: impl FnOnce() -> bool) -> libc::pid_t {
    // SAFETY: the child uses nothing that another thread of this process may have locked, except
    // the tested code and the allocator, which the C library makes usable in a child. It ends
    // without unwinding or running destructors.
    match unsafe { libc::fork() } {
        0 => {
            // SAFETY: as above.
            unsafe { libc::alarm(10) };
            let status = if work() { 0 } else { 3 };
            // SAFETY: as above.
            unsafe { libc::_exit(status) }
        }
        child => child,
    }
}

/// Waits for a child to end well.
fn expect_success(child: libc::pid_t) {
    assert!(child > 0, "no child could be forked");
    let mut status = 0;
    // SAFETY: the status is this function's.
    assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
    assert!(!libc::WIFSIGNALED(status), "a child hung, or died: signal {}", libc::WTERMSIG(status));
    assert_eq!(libc::WEXITSTATUS(status), 0, "a child computed something else");
}

#[test]
fn children_forked_under_load_work() {
    let work = Work::new();
    /// Ends the load, also if the test fails.
    struct Stop<'a>(&'a AtomicBool);
    impl Drop for Stop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let stop = AtomicBool::new(false);
    let runs = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let stopped = Stop(&stop);
        // Small runs with pauses in which helpers fall asleep: most of the time some thread has the
        // pool's lock, to sleep or to wake.
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let number = runs.fetch_add(1, Ordering::Relaxed);
                match number % 32 {
                    0 => assert_eq!(work.run(4), work.expected),
                    _ => Threads.run(4, &|| ()),
                }
                std::thread::sleep(Duration::from_micros(60));
            }
        });
        let begun = Instant::now();
        let mut children = 0;
        // As many as fit: the more, the likelier one is forked at an unlucky moment.
        while children < 300 || (children < 4000 && begun.elapsed() < Duration::from_secs(8)) {
            expect_success(child(|| work.run(4) == work.expected && work.run(2) == work.expected));
            children += 1;
        }
        drop(stopped);
        println!("{children} children, {} runs of the parent", runs.load(Ordering::Relaxed));
    });
}

#[test]
fn a_child_has_helpers_of_its_own_and_so_has_its_child() {
    let work = Work::new();
    assert_eq!(work.run(2), work.expected);
    // True if two threads are inside at the same time, which takes a helper.
    let meet = || {
        let inside = AtomicUsize::new(0);
        let begun = Instant::now();
        Threads.run(2, &|| {
            inside.fetch_add(1, Ordering::SeqCst);
            while inside.load(Ordering::SeqCst) < 2 && begun.elapsed() < Duration::from_secs(4) {
                std::thread::yield_now();
            }
        });
        inside.into_inner() == 2
    };
    let has_helpers = std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1);
    expect_success(child(|| {
        if has_helpers && !meet() {
            return false;
        }
        expect_success(child(|| !has_helpers || meet()));
        true
    }));
}

#[test]
fn work_that_forks_returns_in_the_child_too() {
    let work = Work::new();
    let forked = AtomicBool::new(false);
    let mut is_child = false;
    let child = AtomicUsize::new(0);
    // All copies are inside when one of them forks: the child would wait for the others.
    let arrived = AtomicUsize::new(0);
    let begun = Instant::now();
    let caller = std::thread::current().id();
    Threads.run(4, &|| {
        arrived.fetch_add(1, Ordering::SeqCst);
        while arrived.load(Ordering::SeqCst) < 2 && begun.elapsed() < Duration::from_secs(1) {
            std::thread::yield_now();
        }
        if std::thread::current().id() == caller && !forked.swap(true, Ordering::SeqCst) {
            // SAFETY: as in `child`, which cannot be used here: the child is to return from the
            // run.
            match unsafe { libc::fork() } {
                0 => {
                    // SAFETY: as there.
                    unsafe { libc::alarm(10) };
                }
                other => child.store(other as usize, Ordering::SeqCst),
            }
        }
    });
    if child.load(Ordering::SeqCst) == 0 {
        is_child = true;
    }
    if is_child {
        let equal = work.run(4) == work.expected;
        // SAFETY: the child ends here.
        unsafe { libc::_exit(if equal { 0 } else { 3 }) };
    }
    expect_success(child.load(Ordering::SeqCst) as libc::pid_t);
}

/// Set in the process that [`no_thread_can_be_had`] starts.
const CHILD: &str = "REGARD_TEST_WITHOUT_THREADS";

/// Bounds this process's address space to little more than it has: the stack of a new thread does
/// not fit. This bound holds for root too. A bound on the number of processes does not.
fn forbid_threads() {
    // Memory that the allocator keeps for later must not be large enough for a stack. It keeps
    // enough for small allocations.
    drop(std::hint::black_box(vec![1u8; 8 << 20]));
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux reports it");
    let line = status.lines().find(|line| line.starts_with("VmSize:")).expect("Linux reports it");
    let kib: u64 =
        line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number of KiB");
    let bytes = (kib << 10) + (1 << 20);
    let limit = libc::rlimit { rlim_cur: bytes as libc::rlim_t, rlim_max: bytes as libc::rlim_t };
    // SAFETY: the call reads the struct.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
    let refused = std::thread::Builder::new().spawn(|| ());
    assert!(refused.is_err(), "a thread could be started: this test would show nothing");
}

/// Planning and running works on the calling thread, with one thread asked for and with many.
#[test]
#[cfg(target_os = "linux")]
fn no_thread_can_be_had() {
    if std::env::var_os(CHILD).is_none() {
        let this = std::env::current_exe().expect("this program");
        // On the main thread: with several, the harness starts one for each test.
        let arguments = ["no_thread_can_be_had", "--exact", "--nocapture", "--test-threads", "1"];
        let output =
            Command::new(this).args(arguments).env(CHILD, "1").output().expect("this program runs");
        let text =
            String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("without threads"), "{text}");
        return;
    }
    forbid_threads();
    // First without any preparation: the machine, and all steps from operands to an
    // output.
    let machine = Machine::host().expect("this machine");
    let view = |data| Tensor::new(data, [1, ROWS, 8, DIM]).expect("whole");
    let data = vec![0.25f32; ROWS * 8 * DIM];
    let out: Vec<f32> = attention(view(&data), view(&data), view(&data), &Attention::causal())
        .expect("sound operands");
    assert!(out.iter().all(|x| (x - 0.25).abs() < 1e-5));
    let work = Work::new();
    for threads in [1, 2, 8] {
        assert_eq!(work.run(threads), work.expected);
    }
    let calls = AtomicUsize::new(0);
    cpu::Threads.run(16, &|| {
        calls.fetch_add(1, Ordering::SeqCst);
    });
    assert_eq!(calls.into_inner(), 1);
    // Nor is there memory to count two billion blocks, which ends nothing.
    let error = PageAllocator::new(i32::MAX as usize, 1).expect_err("16 GiB").to_string();
    assert!(error.starts_with("`blocks` is 2147483647; allowed: as many as memory"), "{error}");
    println!("without threads: {machine}");
}
