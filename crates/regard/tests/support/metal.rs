//! Runs plans for Apple GPUs on the host: the shipped source through msl-host, with the dispatches
//! that the library computes.
//!
//! `REGARD_METAL_BUILD=plain|fast-math|sanitized|races` picks how the kernels are compiled, plain
//! if it is not set; `scripts/metal.sh` runs all.

#![allow(
    dead_code,
    unused_imports,
    reason = "compiled into each test on its own, and none uses all of it"
)]

pub mod limits;

pub use metal_host::{gpu, run, run_case, run_tampered};

use metal_host::{Build, Compiler, Library, operand};
use regard::metal::{BufferView, MetalMemory};
use regard::{Element, Tensor, TensorMut};
use std::io::Write;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The build that is asked for.
pub fn build() -> Build {
    let name = std::env::var("REGARD_METAL_BUILD").unwrap_or_else(|_| "plain".into());
    Build::named(&name).unwrap_or_else(|| panic!("REGARD_METAL_BUILD is {name}; see Build::ALL"))
}

/// clang, or nothing and a loud line. With `REGARD_METAL_REQUIRED` set, nothing is a failure.
pub fn compiler() -> Option<Compiler> {
    match Compiler::new(concat!(env!("CARGO_TARGET_TMPDIR"), "/msl")) {
        Ok(compiler) => Some(compiler),
        Err(why) => {
            assert!(std::env::var_os("REGARD_METAL_REQUIRED").is_none(), "{why}");
            // Straight to stderr: output of a passing test is not shown.
            let _ = writeln!(std::io::stderr(), "SKIPPED: the Metal kernels are not tested: {why}");
            None
        }
    }
}

/// The kernels, compiled and loaded.
pub fn library(compiler: &Compiler, source: &str, build: Build) -> Library {
    metal_host::library(compiler, source, build).unwrap_or_else(|error| panic!("{error}"))
}

/// The source with only the instantiations of kernels whose lines begin with one of `kept`: the
/// others take nearly all of clang's time.
pub fn source_of(kept: &[&str]) -> String {
    const INSTANTIATIONS: [&str; 6] =
        ["DECODE_TYPE(", "PREFILL_TYPES(", "COMBINE(", "MERGE(", "MASK_MAP(", "APPEND("];
    let starts = |line: &str, with: &[&str]| with.iter().any(|prefix| line.starts_with(prefix));
    let source = regard::metal::source();
    let lines = source.lines().map(|line| match starts(line, &INSTANTIATIONS) {
        true if !starts(line, kept) => "",
        _ => line,
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// A slice as an operand that is read.
pub fn read<'a, T: Element>(data: &'a [T], shape: &[usize]) -> Tensor<'a, MetalMemory> {
    operand(&Tensor::from_slice(data, shape, None).expect("as many elements")).expect("a view")
}

/// A slice as an operand that is written.
pub fn written<'a, T: Element>(data: &'a mut [T], shape: &[usize]) -> TensorMut<'a, MetalMemory> {
    let place = data.as_mut_ptr() as u64;
    // SAFETY: it is memory of the host's, borrowed for as long.
    let buffer = unsafe { BufferView::from_raw(0, place, size_of_val(data)) };
    buffer.tensor_mut(0, T::DTYPE, shape, None).expect("as many elements")
}

/// Calls `work` for every item from two threads, each with a library of its own; panics with all
/// that failed.
pub fn for_all<T: Sync>(
    (compiler, source, build): (&Compiler, &str, Build),
    items: &[T],
    work: impl Fn(&mut Library, &T) -> Result<(), String> + Sync,
) {
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    // Compiled once, before both threads want it.
    let first = Mutex::new(Some(library(compiler, source, build)));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let loaded = first.lock().expect("no thread panics here").take();
                let mut library = loaded.unwrap_or_else(|| library(compiler, source, build));
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(failure) = work(&mut library, item) {
                        failures.lock().expect("no thread panics here").push(failure);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics here");
    let shown: Vec<_> = failures.iter().take(20).cloned().collect();
    assert!(
        failures.is_empty(),
        "{} of {} failed:\n{}",
        failures.len(),
        items.len(),
        shown.join("\n")
    );
}
