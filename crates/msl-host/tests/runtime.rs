//! The runtime computes correct results, and detects memory errors, races and deadlocks.

use std::io::Write;

use msl_host::{Buffer, Build, Compiler, Dispatch, Error, Library};

const SOURCE: &str = r#"
#include <metal_stdlib>
using namespace metal;

constant uint SCALE [[function_constant(0)]];
constant uint DOUBLE_SCALE = SCALE * 2;

kernel void scale(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],
                  constant uint& count [[buffer(2)]], uint i [[thread_position_in_grid]]) {
    if (i < count) y[i] = x[i] * float(DOUBLE_SCALE);
}

// Each SIMD group's sum, through every lane function that could get an index wrong.
kernel void sums(device float* y [[buffer(1)]], uint lane [[thread_index_in_simdgroup]],
                 uint group [[simdgroup_index_in_threadgroup]],
                 uint thread_index [[thread_index_in_threadgroup]]) {
    float x = float(thread_index);
    float total = simd_sum(x);
    float up = simd_shuffle_up(x, 1);
    float across = simd_shuffle_xor(x, 31);
    if (lane == 5) {
        y[group * 4 + 0] = total;
        y[group * 4 + 1] = up;
        y[group * 4 + 2] = across;
        y[group * 4 + 3] = simd_is_first() ? 1.0f : 0.0f;
    }
}

template <typename T>
kernel void product(device const T* a [[buffer(0)]], device const T* b [[buffer(1)]],
                    device float* c [[buffer(2)]]) {
    simdgroup_matrix<T, 8, 8> left, right;
    simdgroup_float8x8 sum = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    simdgroup_load(left, a, 8);
    simdgroup_load(right, b, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(sum, left, right, sum);
    simdgroup_store(sum, c, 8);
}
typedef decltype(product<float>) product_t;
template [[host_name("product_float")]] [[kernel]] product_t product<float>;
template [[host_name("product_half")]] [[kernel]] product_t product<half>;

// Reverses 64 numbers through threadgroup memory, one barrier in between.
kernel void reverse(device float* y [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
    threadgroup float shared[64];
    shared[i] = float(i);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = shared[63 - i];
}

kernel void no_barrier(device float* y [[buffer(1)]], threadgroup float* shared [[threadgroup(0)]],
                       uint i [[thread_index_in_threadgroup]]) {
    shared[i] = float(i);
    y[i] = shared[63 - i];
}

kernel void uninitialized(device float* y [[buffer(1)]],
                          threadgroup float* shared [[threadgroup(0)]],
                          uint i [[thread_index_in_threadgroup]]) {
    y[i] = shared[i];
}

kernel void diverges(device float* y [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
    if (i % 2 == 0) y[i] = simd_sum(1.0f);
    else y[i] = simd_max(1.0f);
}

kernel void waits_for_ever(uint i [[thread_index_in_threadgroup]]) {
    if (i == 0) threadgroup_barrier(mem_flags::mem_none);
    else simdgroup_barrier(mem_flags::mem_none);
}

kernel void past_the_end(device float* y [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
    y[i + 1] = 0.0f;
}

kernel void same_place(device float* y [[buffer(1)]], uint i [[thread_index_in_threadgroup]]) {
    if (i == 0) y[0] = 1.0f;
}
"#;

/// clang, or `None` and a line on standard error. With `REGARD_METAL_REQUIRED` set, `None` is a
/// failure.
fn compiler() -> Option<Compiler> {
    match Compiler::new(concat!(env!("CARGO_TARGET_TMPDIR"), "/msl")) {
        Ok(compiler) => Some(compiler),
        Err(Error::Unavailable(why)) => {
            assert!(std::env::var_os("REGARD_METAL_REQUIRED").is_none(), "{why}");
            // Straight to stderr: output of a passing test is not shown.
            let _ = writeln!(std::io::stderr(), "SKIPPED: {why}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn run(
    library: &mut Library,
    kernel: &str,
    groups: u32,
    threads: u32,
    schedule: u32,
) -> (Vec<f32>, Vec<String>) {
    let mut y = vec![f32::NAN; 64];
    let bytes = y.len() * 4;
    // SAFETY: `y` outlives the run and is not used during it.
    let buffer = unsafe { Buffer::write(y.as_mut_ptr().cast(), bytes) };
    let findings = library
        .run(&Dispatch {
            kernel,
            threadgroups: [groups, 1, 1],
            threads: [threads, 1, 1],
            buffers: &[(1, buffer)],
            threadgroup_bytes: &[(0, 256)],
            threadgroup_limit: 32 << 10,
            schedule,
            ..Dispatch::default()
        })
        .unwrap();
    (y, findings)
}

#[test]
fn constants_buffers_and_positions() {
    let Some(compiler) = compiler() else { return };
    let mut library = compiler.library("runtime.metal", SOURCE, Build::Plain).unwrap();
    let x: Vec<f32> = (0..40).map(|i| i as f32).collect();
    let mut y = vec![f32::NAN; 40];
    let count = 37u32;
    // SAFETY: all three outlive the run.
    let buffers = unsafe {
        [
            (0, Buffer::read(x.as_ptr().cast(), 160)),
            (1, Buffer::write(y.as_mut_ptr().cast(), 160)),
            (2, Buffer::read((&raw const count).cast(), 4)),
        ]
    };
    let dispatch = Dispatch {
        kernel: "scale",
        threadgroups: [2, 1, 1],
        threads: [20, 1, 1],
        constants: &[(0, 3.0)],
        buffers: &buffers,
        ..Dispatch::default()
    };
    assert_eq!(library.run(&dispatch).unwrap(), Vec::<String>::new());
    let unset = library.run(&Dispatch { constants: &[], ..dispatch.clone() }).unwrap();
    assert!(unset.iter().any(|finding| finding.contains("DOUBLE_SCALE")), "{unset:?}");
    library.run(&dispatch).unwrap();
    assert!((0..37).all(|i| y[i] == 6.0 * x[i]) && y[37].is_nan());
    y.fill(f32::NAN);
    library.run(&Dispatch { first_threadgroup: [1, 0, 0], ..dispatch.clone() }).unwrap();
    assert!((0..20).all(|i| y[i].is_nan()) && (20..37).all(|i| y[i] == 6.0 * x[i]));
    assert!(library.run(&Dispatch { kernel: "nothing", ..dispatch }).is_err());
}

#[test]
fn simd_groups_and_matrices() {
    let Some(compiler) = compiler() else { return };
    let mut library = compiler.library("runtime.metal", SOURCE, Build::Plain).unwrap();
    for schedule in 0..4 {
        let (y, findings) = run(&mut library, "sums", 1, 64, schedule);
        assert_eq!(findings, Vec::<String>::new());
        assert_eq!(y[..8], [496.0, 4.0, 26.0, 0.0, 1520.0, 36.0, 58.0, 0.0]);
        let (y, findings) = run(&mut library, "reverse", 1, 64, schedule);
        assert_eq!(findings, Vec::<String>::new());
        assert!((0..64).all(|i| y[i] == (63 - i) as f32));
    }
    let number = |i: usize| ((i * 7 + 3) % 11) as f32 - 5.0;
    let a: Vec<f32> = (0..64).map(number).collect();
    let b: Vec<f32> = (0..64).map(|i| number(i + 13)).collect();
    let mut c = vec![f32::NAN; 64];
    // SAFETY: all three outlive the run.
    let buffers = unsafe {
        [
            (0, Buffer::read(a.as_ptr().cast(), 256)),
            (1, Buffer::read(b.as_ptr().cast(), 256)),
            (2, Buffer::write(c.as_mut_ptr().cast(), 256)),
        ]
    };
    let dispatch = Dispatch {
        kernel: "product_float",
        threadgroups: [1; 3],
        threads: [32, 1, 1],
        buffers: &buffers,
        ..Dispatch::default()
    };
    assert_eq!(library.run(&dispatch).unwrap(), Vec::<String>::new());
    for row in 0..8 {
        for column in 0..8 {
            let expected: f32 = (0..8).map(|k| a[row * 8 + k] * b[column * 8 + k]).sum();
            assert_eq!(c[row * 8 + column], expected, "{row}, {column}");
        }
    }
}

#[test]
fn memory_and_race_errors_are_detected() {
    let Some(compiler) = compiler() else { return };
    let mut plain = compiler.library("runtime.metal", SOURCE, Build::Plain).unwrap();
    let mut races = compiler.library("runtime.metal", SOURCE, Build::Races).unwrap();
    let mut expect = |races_only: bool, kernel: &str, groups: u32, what: &str| {
        let (_, findings) = run(&mut races, kernel, groups, 64, 0);
        assert!(findings.iter().any(|finding| finding.contains(what)), "{kernel}: {findings:?}");
        let (_, findings) = run(&mut plain, kernel, groups, 64, 0);
        assert_eq!(findings.is_empty(), races_only, "{kernel}: {findings:?}");
    };
    expect(false, "diverges", 1, "divergence: SIMD group");
    expect(false, "waits_for_ever", 1, "deadlock");
    expect(true, "no_barrier", 1, "read of uninitialized threadgroup memory");
    expect(true, "uninitialized", 1, "read of uninitialized threadgroup memory");
    expect(true, "past_the_end", 1, "outside every bound buffer");
    expect(true, "same_place", 2, "two threadgroups write the same place");
    // In every order some thread reads before the other has written, or after it in a way that no
    // barrier orders.
    let (_, findings) = run(&mut races, "no_barrier", 1, 64, 7);
    assert!(findings.iter().any(|finding| finding.contains("race")), "{findings:?}");
    // Without a barrier NaN shows in the values, too.
    assert!(run(&mut plain, "no_barrier", 1, 64, 0).0.iter().any(|y| y.is_nan()));
    // The clean kernel is clean.
    assert_eq!(run(&mut races, "reverse", 1, 64, 3).1, Vec::<String>::new());
    // More threadgroup memory than there is.
    let (_, findings) = run(&mut plain, "reverse", 1, 64, 0);
    assert_eq!(findings, Vec::<String>::new());
    let limited = Dispatch {
        kernel: "waits_for_ever",
        threadgroups: [1; 3],
        threads: [1; 3],
        threadgroup_bytes: &[(0, 40 << 10)],
        threadgroup_limit: 32 << 10,
        ..Dispatch::default()
    };
    let findings = plain.run(&limited).unwrap();
    assert!(findings.iter().any(|finding| finding.contains("threadgroup memory")), "{findings:?}");
}

/// The sanitizer ends the process that it finds something in, so that is another one, with the
/// sanitizer preloaded.
#[test]
fn the_sanitizer_sees_what_is_past_the_end() {
    let Some(compiler) = compiler() else { return };
    let preload = compiler.preload().unwrap_or_else(|why| panic!("{why}"));
    let run = |test: &str| {
        std::process::Command::new(std::env::current_exe().expect("this test"))
            .args(["--ignored", "--exact", test])
            .env("LD_PRELOAD", &preload)
            .env("ASAN_OPTIONS", "detect_leaks=0")
            .output()
            .expect("this test runs again")
    };
    let clean = run("nothing_is_past_the_end");
    assert!(clean.status.success(), "{}", String::from_utf8_lossy(&clean.stderr));
    let faulty = run("one_float_is_past_the_end");
    let message = String::from_utf8_lossy(&faulty.stderr);
    assert!(!faulty.status.success() && message.contains("heap-buffer-overflow"), "{message}");
}

#[test]
#[ignore = "runs in a process of its own: the_sanitizer_sees_what_is_past_the_end"]
fn nothing_is_past_the_end() {
    let mut library =
        compiler().unwrap().library("runtime.metal", SOURCE, Build::Sanitized).unwrap();
    let (y, findings) = run(&mut library, "reverse", 1, 64, 5);
    assert!(findings.is_empty() && y[0] == 63.0, "{findings:?}");
}

#[test]
#[ignore = "runs in a process of its own: the_sanitizer_sees_what_is_past_the_end"]
fn one_float_is_past_the_end() {
    let mut library =
        compiler().unwrap().library("runtime.metal", SOURCE, Build::Sanitized).unwrap();
    run(&mut library, "past_the_end", 1, 64, 0);
}

#[test]
fn types_are_checked_with_address_spaces() {
    let Some(compiler) = compiler() else { return };
    compiler.typecheck("runtime.metal", SOURCE).unwrap();
    let mixed = "using namespace metal;\n\
                 kernel void f(device float* x [[buffer(0)]], \
                 threadgroup float* y [[threadgroup(0)]]) { x = y; }";
    let error = compiler.typecheck("mixed.metal", mixed).unwrap_err().to_string();
    assert!(error.contains("mixed.metal:2"), "{error}");
}
