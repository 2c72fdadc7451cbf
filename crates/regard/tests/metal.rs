//! The shipped Metal kernels on the one list of cases, run on the host: see `support/metal.rs`.

#[path = "support/dequantized.rs"]
mod dequantized;
#[path = "support/metal.rs"]
mod support;

use dequantized::dequantized;
use metal_host::{Build, MetalHost, run_plan};
use regard::metal::{self, Binding, Merge};
use regard::{DType, Error, Machine, Outputs, Plan, Problem, Window};
use regard_cases::check::Checker;
use regard_cases::random::{self, Device, Profile};
use regard_cases::rows::{Rows, bits, rows as rows_of};
use regard_cases::{
    CacheSpec, Granularity, Keys, KvLayout, Layout, Scales, SequenceSpec, Spec, file, list,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use support::{compiler, for_all, gpu, library, read, run, run_case, source_of, written};

/// The cases of this build: slow ones run the core list.
fn specs() -> Vec<Spec> {
    let only = std::env::var("REGARD_METAL_CASES").unwrap_or_default();
    let all: Vec<_> = match support::build() {
        Build::Plain => {
            let others = list::list_with_caches().skip(list::list().count());
            list::within(support::limits::most_work(usize::MAX)).chain(others).collect()
        }
        Build::FastMath | Build::Sanitized | Build::Races => core(),
    };
    all.into_iter().filter(|spec| spec.name.contains(&only)).collect()
}

/// The core list, and cases that it lacks: every class of head dims, in decode and prefill, and
/// splits.
fn core() -> Vec<Spec> {
    let mut specs: Vec<_> = list::core().collect();
    specs.extend(list::caches().filter(|spec| spec.core));
    for (dims, dtype) in [
        (64, DType::F32),
        (80, DType::F16),
        (128, DType::BF16),
        (192, DType::F16),
        (576, DType::F32),
    ] {
        for (kind, lengths) in [("decode", (1, 290)), ("prefill", (19, 50))] {
            let spec = Spec::new(format!("core/{kind}-{dims}")).lengths(&[lengths]).heads(2, 1);
            specs.push(Spec { causal: true, sinks: true, ..spec.dims(dims, dims).dtype(dtype) });
        }
    }
    specs
}

/// The machines and orders that a case runs on: keys are split among few and among many cores, and
/// tuned for early and for late families.
fn runs(number: usize) -> Vec<(Machine, u32)> {
    let seed = 2 + number as u32;
    match support::build() {
        Build::Plain => vec![(gpu(7, 8), 0), (gpu(8, 1), 1), (gpu(9, 40), seed)],
        Build::FastMath | Build::Sanitized | Build::Races => vec![(gpu(8, 8), seed)],
    }
}

/// Multiplications up to which a case runs on every description of a GPU, and not on one of them in
/// turn: kernels run slowly on the host. `REGARD_METAL_LARGE`, for long runs.
fn large() -> usize {
    std::env::var("REGARD_METAL_LARGE")
        .map_or(0, |number| number.parse().expect("REGARD_METAL_LARGE is a number"))
}

#[test]
fn every_case() {
    let Some(compiler) = compiler() else { return };
    let specs: Vec<_> = specs().into_iter().enumerate().collect();
    let worst = Mutex::new(BTreeMap::new());
    for_all((&compiler, &metal::source(), support::build()), &specs, |library, (number, spec)| {
        let case = spec.generate();
        let checker = Checker::new(&case, support::limits::judged_rows())
            .map_err(|failure| format!("{}: {failure}", spec.name))?;
        let mut check = |case: &_, machine: &Machine, schedule| {
            let failed = |why: &dyn std::fmt::Display| {
                format!("{} on {machine}, schedule {schedule}: {why}", spec.name)
            };
            let output =
                run_case(library, case, (machine, schedule)).map_err(|why| failed(&why))?;
            let verdict = checker.check(&output).map_err(|failure| failed(&failure))?;
            let mut worst = worst.lock().expect("no thread panics here");
            let worst_of_type = worst.entry(spec.dtype.name()).or_insert((0.0, String::new()));
            if verdict.agreement.worst > worst_of_type.0 {
                *worst_of_type = (verdict.agreement.worst, spec.name.clone());
            }
            Ok::<_, String>(())
        };
        let runs = runs(*number);
        // In batch-invariant mode the prefill kernels run everything, one row too.
        let invariant = |check: &mut dyn FnMut(&_, &Machine, u32) -> Result<(), String>| {
            let mut case = case.clone();
            case.attention.batch_invariant = true;
            check(&case, &gpu(7, 8), 3 + *number as u32)
        };
        if spec.work() > large() {
            return match runs.get(number % (runs.len() + 1)) {
                Some((machine, schedule)) => check(&case, machine, *schedule),
                None => invariant(&mut check),
            };
        }
        for (machine, schedule) in runs {
            check(&case, &machine, schedule)?;
        }
        if case.attention.batch_invariant { Ok(()) } else { invariant(&mut check) }
    });
    // Shown with --nocapture: the used fraction of the tolerance.
    for (dtype, (worst, name)) in worst.into_inner().expect("no thread panics here") {
        println!(
            "{dtype}: error at most {worst:.2} of what is allowed ({name}), {} cases",
            specs.len()
        );
    }
}

/// Everything composed at random, more than the list has. `REGARD_METAL_RANDOM=n` runs n of them.
/// Calls `run` with subnormal operands and results of SSE flushed to zero, as a GPU may flush them.
#[cfg(target_arch = "x86_64")]
fn with_subnormals_flushed<R>(run: impl FnOnce() -> R) -> R {
    use std::arch::asm;
    const FLUSH_RESULTS_AND_OPERANDS: u32 = 1 << 15 | 1 << 6;
    let (mut before, mut after) = (0u32, 1.0e-38f32);
    // SAFETY: the control word is this thread's, and is restored when the kernels have run.
    unsafe { asm!("stmxcsr [{}]", in(reg) &mut before) };
    let flushing = before | FLUSH_RESULTS_AND_OPERANDS;
    // SAFETY: as above.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &flushing) };
    let result = run();
    after = std::hint::black_box(after) * std::hint::black_box(0.25);
    // SAFETY: as above.
    unsafe { asm!("ldmxcsr [{}]", in(reg) &before) };
    assert!(after == 0.0, "still flushed after the run");
    result
}

#[test]
#[cfg(target_arch = "x86_64")]
fn results_are_right_where_subnormals_are_flushed() {
    let Some(compiler) = compiler() else { return };
    let specs: Vec<_> = core().into_iter().enumerate().collect();
    for_all((&compiler, &metal::source(), support::build()), &specs, |library, (number, spec)| {
        let case = spec.generate();
        let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", spec.name);
        let checker =
            Checker::new(&case, support::limits::judged_rows()).map_err(|why| failed(&why))?;
        let machine = gpu(8, if number % 2 == 0 { 1 } else { 8 });
        let run = || run_case(library, &case, (&machine, 2 + *number as u32));
        let output = with_subnormals_flushed(run).map_err(|why| failed(&why))?;
        checker.check(&output).map(|_| ()).map_err(|why| failed(&why))
    });
}

#[test]
fn anything_composes_with_anything() {
    let Some(compiler) = compiler() else { return };
    let count = random_count(if support::build() == Build::Plain { 1000 } else { 0 });
    let seeds: Vec<u64> = (0..count).map(|seed| 10_000 + seed).collect();
    for_all((&compiler, &metal::source(), support::build()), &seeds, |library, &seed| {
        let case = list::random(seed).generate();
        let failed = |why: &dyn std::fmt::Display| format!("random composition {seed}: {why}");
        let checker = Checker::new(&case, support::limits::judged_rows())
            .map_err(|failure| failed(&failure))?;
        let machine = if seed % 2 == 0 { gpu(7, 8) } else { gpu(9, 64) };
        let output =
            run_case(library, &case, (&machine, seed as u32)).map_err(|why| failed(&why))?;
        checker.check(&output).map(|_| ()).map_err(|failure| failed(&failure))
    });
}

/// The number of random problems: `REGARD_METAL_RANDOM` if it is set, else `default`.
fn random_count(default: u64) -> u64 {
    let given = std::env::var("REGARD_METAL_RANDOM");
    given.map_or(default, |count| count.parse().expect("REGARD_METAL_RANDOM is a number"))
}

/// Wider than that, and with another seed every time: `regard check --random --device metal-host`
/// as a test.
#[test]
fn random_problems_of_a_new_seed() {
    if compiler().is_none() || support::build() != Build::Plain {
        return;
    }
    let make = || -> Result<Box<dyn Device>, Error> { Ok(Box::new(MetalHost::new()?)) };
    let count = random_count(300);
    let summary = random::test("on the Metal kernels", count, Profile::All, &make);
    let summary = summary.unwrap_or_else(|failures| panic!("{failures}"));
    assert_eq!(summary.passed, count, "{summary:?}");
}

#[test]
fn the_source_type_checks_with_address_spaces() {
    let Some(compiler) = compiler() else { return };
    compiler.typecheck("regard.metal", &metal::source()).unwrap_or_else(|error| panic!("{error}"));
}

#[test]
fn a_real_models_attention_is_right() {
    let Some(compiler) = compiler() else { return };
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    let mut paths: Vec<_> = std::fs::read_dir(&directory)
        .expect("testdata is there")
        .map(|entry| entry.unwrap().path())
        .collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "safetensors"));
    assert_eq!(paths.len(), 4);
    let cases: Vec<_> = paths.iter().map(|path| file::read(path).unwrap()).collect();
    for_all((&compiler, &metal::source(), support::build()), &cases, |library, case| {
        let checker =
            Checker::new(case, None).map_err(|failure| format!("{}: {failure}", case.name))?;
        let output = run_case(library, case, (&gpu(7, 8), 5))?;
        checker.check(&output).map_err(|failure| format!("{}: {failure}", case.name))?;
        Ok(())
    });
}

#[test]
fn batch_invariant_bits_depend_on_nothing_around_them() {
    let Some(compiler) = compiler() else { return };
    let mut library = library(&compiler, &metal::source(), support::build());
    let mut rows = |spec: &Spec, machine: &Machine, schedule: u32| -> Rows {
        let case = spec.generate();
        let output = run_case(&mut library, &case, (machine, schedule))
            .unwrap_or_else(|why| panic!("{why}"));
        rows_of(spec, &case, &output)
    };
    let sequence = |id, q_len, kv_len| SequenceSpec { id, q_len, kv_len };
    let together =
        [sequence(1, 70, 70), sequence(2, 3, 2300), sequence(3, 1, 1030), sequence(4, 17, 130)];
    for dtype in [DType::F32, DType::BF16] {
        let base = Spec {
            ragged_queries: true,
            keys: Keys::Ragged { slack: 0 },
            sequences: together.to_vec(),
            ..Spec::invariant().dtype(dtype)
        };
        // One core: splits are walked in order by one threadgroup; many: they are shared, and
        // merged.
        let all = rows(&base, &gpu(8, 1), 0);
        assert_eq!(rows(&base, &gpu(8, 64), 7), all, "{dtype}: many cores");
        for one in together {
            let alone = Spec { sequences: vec![one], ragged_queries: false, ..base.clone() };
            let alone = Spec { keys: Keys::Paged { block_size: 16, interleaved: true }, ..alone };
            let alone =
                Spec { kv_layout: KvLayout::Hnd, layout: Layout::Bhsd, padding: 5, ..alone };
            for (row, bits) in rows(&alone, &gpu(8, 10), 1) {
                assert_eq!(
                    Some(&bits),
                    all.get(&row),
                    "{dtype}: sequence {} alone, {row:?}",
                    one.id
                );
            }
        }
        // Another chunking: the last tokens of a sequence by themselves.
        let chunk =
            Spec { sequences: vec![sequence(4, 5, 130), sequence(1, 9, 70)], ..base.clone() };
        for (row, bits) in rows(&chunk, &gpu(8, 10), 4) {
            assert_eq!(Some(&bits), all.get(&row), "{dtype}: chunked, {row:?}");
        }
        // The same with a window that begins at another key for each row.
        for left in [2, 34] {
            let window = Window { left: Some(left), right: None };
            let all = rows(&Spec { window, ..base.clone() }, &gpu(8, 10), 0);
            for (row, bits) in rows(&Spec { window, ..chunk.clone() }, &gpu(8, 10), 4) {
                assert_eq!(Some(&bits), all.get(&row), "{dtype}: chunked, window {left}, {row:?}");
            }
        }
    }
}

/// Codes times a power of two are numbers of every float type, and both products and sums commute
/// with it. Blocks are dequantized exactly, to f32.
#[test]
fn codes_with_scales_of_powers_of_two_equal_their_numbers() {
    let Some(compiler) = compiler() else { return };
    if support::build() != Build::Plain {
        return;
    }
    let mut library = library(&compiler, &metal::source(), Build::Plain);
    let powers = |dtype, granularity| CacheSpec::new(dtype, granularity, Scales::PowerOfTwo);
    for (dtype, cache) in [
        (DType::F32, powers(DType::E4M3, Granularity::Token)),
        (DType::F32, powers(DType::Q8_0, Granularity::Token)),
        (DType::F32, powers(DType::Q4_0, Granularity::Token)),
        (DType::F16, powers(DType::I8, Granularity::Token)),
        (DType::F16, powers(DType::E5M2, Granularity::Head)),
        (DType::BF16, powers(DType::E4M3, Granularity::Token)),
        (DType::BF16, powers(DType::I8, Granularity::Tensor)),
    ] {
        for (rows, batch_invariant) in [(1, false), (1, true), (3, false), (40, false)] {
            let spec = Spec {
                causal: true,
                softcap: (rows == 3).then_some(20.0),
                batch_invariant,
                ..Spec::new("powers").lengths(&[(rows, 300)]).dims(64, 96).dtype(dtype)
            };
            let case = spec.cache(cache).legal().generate();
            let copy = dequantized(&case, dtype);
            let [found, expected] = [&case, &copy].map(|case| {
                run_case(&mut library, case, (&gpu(8, 8), 2)).unwrap_or_else(|why| panic!("{why}"))
            });
            let what = format!("{dtype} over {cache:?}, {rows} rows, {batch_invariant}");
            assert!(bits(&found) == bits(&expected), "{what}");
        }
    }
}

/// Codes and scales that no row sees are NaN in one run, and not in the other.
#[test]
fn poison_in_codes_and_scales_never_shows() {
    let Some(compiler) = compiler() else { return };
    if support::build() != Build::Plain {
        return;
    }
    let mut specs: Vec<_> = list::caches().filter(|spec| spec.work() < 750_000).collect();
    let only = std::env::var("REGARD_METAL_CASES").unwrap_or_default();
    specs.retain(|spec| spec.name.contains(&only));
    for_all((&compiler, &metal::source(), Build::Plain), &specs, |library, spec| {
        let mut run = |poison| {
            let case = Spec { poison, ..spec.clone() }.generate();
            run_case(library, &case, (&gpu(8, 8), 4)).map_err(|why| format!("{}: {why}", spec.name))
        };
        match bits(&run(true)?) == bits(&run(false)?) {
            true => Ok(()),
            false => Err(format!("{} depends on what no row can see", spec.name)),
        }
    });
}

/// Lengths and tables that only the device knows are clamped there: nothing outside the operands is
/// touched.
#[test]
fn lengths_and_tables_gone_wrong_stay_inside_the_operands() {
    let Some(compiler) = compiler() else { return };
    // The build that looks at every access finds accesses outside of the operands.
    let build = if support::build() == Build::Plain { Build::Races } else { support::build() };
    let source =
        source_of(&["DECODE_TYPE(float", "PREFILL_TYPES(\"float\"", "COMBINE(float", "MASK_MAP("]);
    let mut library = library(&compiler, &source, build);
    for (name, keys, ragged_queries) in [
        ("paged", Keys::Paged { block_size: 7, interleaved: false }, false),
        ("ragged", Keys::Ragged { slack: 3 }, true),
        ("batched", Keys::Batched { slack: 3 }, true),
    ] {
        for q_len in [1, 9] {
            let spec = Spec::new(name).lengths(&[(q_len, 60), (q_len, 30)]).dims(16, 16);
            let case = Spec { keys, ragged_queries, causal: true, ..spec }.generate();
            for garbage in [i32::MIN, -1, 10_000, i32::MAX] {
                // Buffers 10 to 13: kv_lens, cu_seqlens_q, cu_seqlens_k, block_table.
                for index in 10..14 {
                    let saved = Mutex::new(Vec::new());
                    let tamper = |dispatch: &metal::Dispatch| {
                        let Some(Binding { address, bytes, .. }) = dispatch.buffers[index] else {
                            return;
                        };
                        // SAFETY: the case's own array of i32; it is put back below, and nothing
                        // reads it meanwhile but the kernels.
                        let entries = unsafe {
                            std::slice::from_raw_parts_mut(address as *mut i32, bytes / 4)
                        };
                        saved.lock().unwrap().push((address, entries.to_vec()));
                        entries.fill(garbage);
                    };
                    let ran = support::run_tampered(&mut library, &case, (&gpu(8, 8), 0), tamper);
                    if let Some((address, entries)) = saved.into_inner().unwrap().into_iter().next()
                    {
                        // SAFETY: as above.
                        unsafe { (address as *mut i32).copy_from(entries.as_ptr(), entries.len()) };
                    }
                    ran.unwrap_or_else(|why| {
                        panic!("{name}, {q_len} rows, buffer {index} full of {garbage}: {why}")
                    });
                }
            }
        }
    }
}

/// A merge on the device is [`state::merge`] of all parts, in any types.
#[test]
fn merged_parts_are_what_the_state_algebra_says() {
    let Some(compiler) = compiler() else { return };
    let mut library = library(&compiler, &metal::source(), support::build());
    let none = f32::NEG_INFINITY;
    // The last row of a part that saw no key is NaN; the third row has no part that saw one.
    for (parts, rows, dim) in [(1, 3, 5), (3, 7, 40), (40, 3, 64)] {
        let element = |i: usize| (i as f32 * 0.37).sin();
        let outputs: Vec<f32> = (0..parts * rows * dim).map(element).collect();
        let lse: Vec<f32> = (0..parts * rows)
            .map(|i| if i % rows == 2 || i % 5 == 4 { none } else { element(i) * 9.0 })
            .collect();
        let mut poisoned = outputs.clone();
        for (i, row) in poisoned.chunks_mut(dim).enumerate() {
            if lse[i] == none {
                row.fill(f32::NAN);
            }
        }
        let (mut out, mut out_lse) = (vec![f32::NAN; rows * dim], vec![f32::NAN; rows]);
        let dispatch = metal::merge(&Merge {
            parts: read(&poisoned, &[parts, rows, dim]),
            part_lse: read(&lse, &[parts, rows]),
            out: written(&mut out, &[rows, dim]),
            lse: Some(written(&mut out_lse, &[rows])),
        })
        .unwrap()
        .expect("there are rows");
        run(&mut library, &dispatch, 3).unwrap_or_else(|why| panic!("{why}"));
        for row in 0..rows {
            let of_parts = (0..parts).map(|part| f64::from(lse[part * rows + row]));
            let max = of_parts.clone().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = of_parts.clone().map(|lse| (lse - max).exp()).sum();
            if max == f64::NEG_INFINITY {
                assert!(out[row * dim..][..dim].iter().all(|x| x.to_bits() == 0), "row {row}");
                assert_eq!(out_lse[row], none);
                continue;
            }
            assert!((f64::from(out_lse[row]) - max - sum.ln()).abs() < 1e-5, "row {row}");
            for d in 0..dim {
                let expected: f64 = of_parts
                    .clone()
                    .enumerate()
                    .map(|(part, lse)| {
                        (lse - max).exp() / sum * f64::from(outputs[(part * rows + row) * dim + d])
                    })
                    .sum();
                let found = f64::from(out[row * dim + d]);
                assert!((found - expected).abs() < 1e-5, "row {row}: {found}, not {expected}");
            }
        }
    }
    assert!(
        metal::merge(&Merge {
            parts: read(&[0.0f32; 0], &[2, 0, 4]),
            part_lse: read(&[0.0f32; 0], &[2, 0]),
            out: written(&mut [0.0f32; 0], &[0, 4]),
            lse: None,
        })
        .unwrap()
        .is_none()
    );
}

/// Attention in pieces has the bits of one dispatch, decode and prefill.
#[test]
fn pieces_of_a_dispatch_are_the_whole() {
    let Some(compiler) = compiler() else { return };
    let mut library = library(&compiler, &metal::source(), support::build());
    for (name, q_len, kv_len) in [("decode", 1, 300), ("prefill", 70, 90)] {
        let spec = Spec::new(name).lengths(&[(q_len, kv_len), (q_len, kv_len), (q_len, 20)]);
        let spec = Spec { causal: true, ragged_queries: true, ..spec.dims(16, 16) };
        let spec = Spec { keys: Keys::Ragged { slack: 0 }, ..spec };
        let case = spec.generate();
        let mut run_in = |pieces: usize| {
            let mut count = 0;
            let output = case.run(|inputs, outputs: &mut Outputs| -> Result<(), Error> {
                let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, &gpu(8, 64))?;
                run_plan(&plan, 0xff, inputs, outputs, |dispatch| {
                    for piece in dispatch.cut(pieces) {
                        count += 1;
                        run(&mut library, &piece, 5).unwrap_or_else(|why| panic!("{why}"));
                    }
                    Ok(())
                })
            });
            let output = output.unwrap_or_else(|error| panic!("{error}"));
            (rows_of(&spec, &case, &output), count)
        };
        let (uncut, dispatches) = run_in(1);
        for pieces in [2, 3, 7, 1000] {
            let (cut, more) = run_in(pieces);
            assert!(more > dispatches, "{name}: {more} of {pieces}");
            assert_eq!(cut, uncut, "{name} in {pieces}");
        }
    }
}
