//! The Metal backend's host code, `metal/device.rs`, over a stand-in for the classes that it calls
//! (`crates/metal-host/stand_in`), behind which the shipped kernels run: `scripts/metal-host.sh`.
#![cfg(metal_stand_in)]

#[path = "support/appends.rs"]
mod appends;
mod numbers;
#[path = "support/quantized_appends.rs"]
mod quantized_appends;
#[path = "support/metal.rs"]
mod support;

use metal_host::{Build, Compiler, run_stand_in};
use regard::cpu::{Cpu, Inline};
use regard::metal::device::{BufferObject, Gpu, Workspace};
use regard::metal::stand_in::{self, Chip, objc2_metal};
use regard::metal::{self, Append, BufferView, MetalMemory, Rotary};
use regard::{AppendScales, DType, Error, Inputs, Merge, Outputs, Tensor, TensorMut, bf16, f16};
use regard_cases::check::Checker;
use regard_cases::coverage::metal::Metal;
use regard_cases::coverage::{Backend, cover};
use regard_cases::metal::Runner;
use regard_cases::random::{self, Device, Profile};
use regard_cases::rows::bits;
use regard_cases::{Hide, Keys, MaskSpec, Spec, list};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use support::{compiler, library, source_of};

const M2: Chip =
    Chip { name: "Apple M2", architecture: "applegpu_g14g", family: 8, max_threads: 1024 };

/// Multiplications of the largest case that runs here. `tests/metal.rs` runs the larger ones.
const LARGE: usize = 1_000_000;

/// The names of the kernels that ran.
type Ran = Arc<Mutex<Vec<String>>>;

/// A GPU whose kernels this thread runs.
fn gpu(compiler: &Compiler, source: &str, chip: Chip) -> (Gpu, Ran) {
    let mut library = library(compiler, source, Build::Plain);
    let ran = Ran::default();
    let names = ran.clone();
    stand_in::set_executor(move |kernel| {
        let mut names = names.lock().expect("no thread panics here");
        names.push(kernel.function.into());
        run_stand_in(&mut library, kernel, names.len() as u32)
    });
    stand_in::set_chip(Some(chip));
    (Gpu::system_default().expect("a GPU"), ran)
}

/// Private memory with a copy of a tensor of the host's, at an odd place.
struct Upload {
    buffer: Arc<BufferObject>,
    offset: usize,
    host: usize,
    bytes: usize,
}

impl Upload {
    fn new(gpu: &Gpu, data: *const u8, dtype: DType, shape: &[usize], strides: &[i64]) -> Upload {
        let last: i64 = shape.iter().zip(strides).map(|(&n, s)| (n as i64 - 1) * s).sum();
        let elements = if shape.contains(&0) { 0 } else { last as usize + 1 };
        let (bytes, offset) = (elements * dtype.size(), 3 * dtype.alignment());
        let buffer = gpu.private_buffer(offset + bytes).expect("memory");
        let upload = Upload { buffer, offset, host: data as usize, bytes };
        // SAFETY: both have as many bytes: strides are not negative.
        unsafe { upload.memory().copy_from(data, bytes) };
        upload
    }

    fn read(gpu: &Gpu, tensor: &Tensor) -> Upload {
        Upload::new(gpu, tensor.as_ptr(), tensor.dtype(), tensor.shape(), tensor.strides())
    }

    fn written(gpu: &Gpu, tensor: &mut TensorMut) -> Upload {
        let data = tensor.as_mut_ptr();
        Upload::new(gpu, data, tensor.dtype(), tensor.shape(), tensor.strides())
    }

    fn memory(&self) -> *mut u8 {
        objc2_metal::memory_of(&self.buffer).0.wrapping_add(self.offset)
    }

    fn tensor(&self, like: &Tensor) -> Result<Tensor<'_, MetalMemory>, Error> {
        let view = BufferView::new(&self.buffer);
        view.tensor(self.offset, like.dtype(), like.shape(), Some(like.strides()))
    }

    fn tensor_mut(&self, like: &TensorMut) -> Result<TensorMut<'_, MetalMemory>, Error> {
        let view = BufferView::new(&self.buffer);
        view.tensor_mut(self.offset, like.dtype(), like.shape(), Some(like.strides()))
    }

    fn download(&self) {
        // SAFETY: it is a copy of a tensor that the test writes, and of the gaps between its
        // elements.
        unsafe { (self.host as *mut u8).copy_from(self.memory(), self.bytes) };
    }
}

/// Runs a case in private memory; layers share a mask's tile map if they are more than one.
fn run_private(
    gpu: &Gpu,
    inputs: &Inputs,
    outputs: &mut Outputs,
    layers: usize,
) -> Result<(), Error> {
    let uploads: Vec<_> = inputs.named().map(|(_, tensor)| Upload::read(gpu, tensor)).collect();
    let mut next = uploads.iter();
    let moved = inputs.try_map(|_, tensor| next.next().expect("one per tensor").tensor(&tensor))?;
    let out = Upload::written(gpu, &mut outputs.out);
    let lse = outputs.lse.as_mut().map(|lse| Upload::written(gpu, lse));
    let lse_view = match (&lse, &outputs.lse) {
        (Some(upload), Some(lse)) => Some(upload.tensor_mut(lse)?),
        _ => None,
    };
    let mut results = Outputs { out: out.tensor_mut(&outputs.out)?, lse: lse_view };
    // Planned as an engine does that has lengths on the device: by shapes.
    let plan = gpu.plan(&moved, &results)?;
    gpu.load(&plan)?;
    let compiled = stand_in::compiled();
    let mut workspace = Workspace::for_plan(&plan, gpu)?;
    gpu.submit(|encoder| {
        // SAFETY: all memory is ours, and nothing else uses it until the work has ended.
        unsafe {
            if layers == 1 {
                return gpu.run(&plan, encoder, &moved, &mut results, &mut workspace);
            }
            gpu.map_mask(&plan, encoder, &moved, &results, &mut workspace)?;
            (0..layers).try_for_each(|_| {
                gpu.run_mapped(&plan, encoder, &moved, &mut results, &mut workspace)
            })
        }
    })?;
    assert_eq!(stand_in::compiled(), compiled, "everything was loaded");
    out.download();
    lse.iter().for_each(Upload::download);
    Ok(())
}

/// Cases of every kind, through copies in shared memory and in private memory of the caller's.
#[test]
fn every_case() {
    let Some(compiler) = compiler() else { return };
    let only = std::env::var("REGARD_METAL_CASES").unwrap_or_default();
    let mut specs: Vec<_> = list::list().chain(list::caches()).collect();
    specs.retain(|spec| spec.name.contains(&only) && spec.work() < LARGE);
    let (next, failures) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    // Compiled once, before both threads want it.
    drop(library(&compiler, &metal::source(), Build::Plain));
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let (few, _) = gpu(&compiler, &metal::source(), M2);
                let many = Gpu::system_default().expect("a GPU").with_cores(64);
                while let Some(spec) = specs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if let Err(why) = check_case(spec, &few, &many) {
                        failures.lock().expect("no thread panics").push(why);
                    }
                }
            });
        }
    });
    let failures = failures.into_inner().expect("no thread panics");
    println!("{} cases", specs.len());
    assert!(failures.is_empty(), "{} failed:\n{}", failures.len(), failures.join("\n"));
}

fn check_case(spec: &Spec, few: &Gpu, many: &Gpu) -> Result<(), String> {
    let case = spec.generate();
    let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", spec.name);
    let checker =
        Checker::new(&case, support::limits::judged_rows()).map_err(|why| failed(&why))?;
    let copied = case.run(|inputs, outputs| {
        let plan = few.plan(inputs, outputs)?;
        few.run_copied(&plan, inputs, outputs).map(|_| ())
    });
    let private = case.run(|inputs, outputs| run_private(many, inputs, outputs, 1));
    for (way, output) in [("copied", copied), ("private", private)] {
        let output = output.map_err(|why| failed(&format!("{way}: {why}")))?;
        checker.check(&output).map_err(|why| failed(&format!("{way}: {why}")))?;
    }
    Ok(())
}

/// Scales of a pool, uploaded; whether they are written.
fn upload_scales(gpu: &Gpu, scales: &mut Option<AppendScales>) -> Option<(Upload, bool)> {
    match scales.as_mut()? {
        AppendScales::Static(tensor) => Some((Upload::read(gpu, tensor), false)),
        AppendScales::Dynamic(tensor) => Some((Upload::written(gpu, tensor), true)),
        _ => None,
    }
}

fn moved_scales<'a>(
    upload: &'a Option<(Upload, bool)>,
    scales: &Option<AppendScales>,
) -> Result<Option<AppendScales<'a, MetalMemory>>, Error> {
    Ok(match (upload, scales) {
        (Some((upload, _)), Some(AppendScales::Static(tensor))) => {
            Some(AppendScales::Static(upload.tensor(tensor)?))
        }
        (Some((upload, _)), Some(AppendScales::Dynamic(tensor))) => {
            Some(AppendScales::Dynamic(upload.tensor_mut(tensor)?))
        }
        _ => None,
    })
}

/// Appends by the GPU, everything in private memory.
fn append(gpu: &Gpu, append: &mut regard::Append) -> Result<(), Error> {
    let read = |tensor: &Tensor| Upload::read(gpu, tensor);
    let (key, value) = (read(&append.key), read(&append.value));
    let kv_lens = read(&append.kv_lens);
    let cu_seqlens = append.cu_seqlens.as_ref().map(read);
    let table = append.block_table.as_ref().map(read);
    let key_pool = Upload::written(gpu, &mut append.key_pool);
    let value_pool = Upload::written(gpu, &mut append.value_pool);
    let k_scales = upload_scales(gpu, &mut append.k_scales);
    let v_scales = upload_scales(gpu, &mut append.v_scales);
    let rotations = append.rotary.as_ref().map(|rotary| read(&rotary.table));
    let query = append.rotary.as_mut().and_then(|rotary| rotary.query.as_mut());
    let query = query.map(|query| Upload::written(gpu, query));
    let mut moved = Append {
        key: key.tensor(&append.key)?,
        value: value.tensor(&append.value)?,
        key_pool: key_pool.tensor_mut(&append.key_pool)?,
        value_pool: value_pool.tensor_mut(&append.value_pool)?,
        k_scales: moved_scales(&k_scales, &append.k_scales)?,
        v_scales: moved_scales(&v_scales, &append.v_scales)?,
        block_table: match (&table, &append.block_table) {
            (Some(upload), Some(tensor)) => Some(upload.tensor(tensor)?),
            _ => None,
        },
        kv_lens: kv_lens.tensor(&append.kv_lens)?,
        cu_seqlens: match (&cu_seqlens, &append.cu_seqlens) {
            (Some(upload), Some(tensor)) => Some(upload.tensor(tensor)?),
            _ => None,
        },
        rotary: match (&rotations, &append.rotary) {
            (Some(upload), Some(rotary)) => Some(Rotary {
                table: upload.tensor(&rotary.table)?,
                interleaved: rotary.interleaved,
                query: match (&query, &rotary.query) {
                    (Some(upload), Some(query)) => Some(upload.tensor_mut(query)?),
                    _ => None,
                },
            }),
            _ => None,
        },
    };
    let compiled = stand_in::compiled();
    // SAFETY: all memory is ours, and nothing else uses it until the work has ended.
    gpu.submit(|encoder| unsafe { gpu.append(encoder, &mut moved) })?;
    assert_eq!(stand_in::compiled(), compiled, "everything was loaded");
    [&key_pool, &value_pool].into_iter().chain(&query).for_each(Upload::download);
    let scales = [&k_scales, &v_scales].into_iter().flatten();
    scales.filter(|(_, is_written)| *is_written).for_each(|(upload, _)| upload.download());
    Ok(())
}

#[test]
fn new_tokens_are_appended_rotated_and_quantized() {
    let Some(compiler) = compiler() else { return };
    let (gpu, _) = gpu(&compiler, &source_of(&["APPEND("]), M2);
    gpu.load_append().expect("three pipelines");
    for trial in appends::trials() {
        trial.check::<f32>(&mut |operands| append(&gpu, operands));
        trial.check::<f16>(&mut |operands| append(&gpu, operands));
        trial.check::<bf16>(&mut |operands| append(&gpu, operands));
    }
    quantized_appends::check_formats(&mut |operands| append(&gpu, operands));
    quantized_appends::check_dense_cache(&mut |operands| append(&gpu, operands));
}

#[test]
fn parts_are_merged_as_on_the_cpu() {
    let Some(compiler) = compiler() else { return };
    let (gpu, _) = gpu(&compiler, &source_of(&["MERGE("]), M2);
    gpu.load_merge().expect("three pipelines");
    let number = |i: usize| (i as f32 * 0.37).sin();
    let parts: Vec<f32> = (0..3 * 5 * 8).map(number).collect();
    let part_lse: Vec<f32> = (0..3 * 5).map(|i| number(7 * i)).collect();
    let mut out = vec![[0f32; 5 * 8]; 2];
    let mut lse = vec![[0f32; 5]; 2];
    let parts = Tensor::new(&parts, [3, 5, 8]).expect("parts");
    let part_lse = Tensor::new(&part_lse, [3, 5]).expect("a number for each row");
    let [expected, found] = &mut out[..] else { unreachable!() };
    let [expected_lse, found_lse] = &mut lse[..] else { unreachable!() };
    let mut merge = Merge {
        parts,
        part_lse,
        out: TensorMut::new(expected, [5, 8]).expect("out"),
        lse: Some(TensorMut::new(expected_lse, [5]).expect("lse")),
    };
    Cpu::new().expect("a CPU").with_executor(Inline).merge(&mut merge).expect("sound operands");
    let mut host_out = TensorMut::new(found, [5, 8]).expect("out");
    let mut host_lse = TensorMut::new(found_lse, [5]).expect("lse");
    let uploads = [Upload::read(&gpu, &parts), Upload::read(&gpu, &part_lse)];
    let results = [&mut host_out, &mut host_lse].map(|tensor| Upload::written(&gpu, tensor));
    let mut moved = metal::Merge {
        parts: uploads[0].tensor(&parts).expect("a view"),
        part_lse: uploads[1].tensor(&part_lse).expect("a view"),
        out: results[0].tensor_mut(&host_out).expect("a view"),
        lse: Some(results[1].tensor_mut(&host_lse).expect("a view")),
    };
    // SAFETY: all memory is ours, and nothing else uses it until the work has ended.
    gpu.submit(|encoder| unsafe { gpu.merge(encoder, &mut moved) }).expect("it runs");
    results.iter().for_each(Upload::download);
    let pairs = found.iter().zip(&*expected).chain(found_lse.iter().zip(&*expected_lse));
    for (found, expected) in pairs {
        assert!((found - expected).abs() < 1e-5, "{found}, not {expected}");
    }
}

/// A case whose mask has a tile map, and whose keys are split.
fn masked() -> Spec {
    let broadcast = [true, true, false, false];
    let mask = Some(MaskSpec { dtype: DType::Bool, hide: Hide::Infinite, broadcast });
    let spec = Spec::new("masked").lengths(&[(40, 900)]).heads(2, 1).dims(16, 16);
    Spec { mask, causal: true, keys: Keys::Batched { slack: 0 }, ..spec }
}

#[test]
fn layers_share_the_tile_map_of_a_mask() {
    let Some(compiler) = compiler() else { return };
    let source = source_of(&["PREFILL_TYPES(\"float\"", "COMBINE(float", "MASK_MAP("]);
    let (gpu, ran) = gpu(&compiler, &source, M2);
    let case = masked().generate();
    let run = |layers| {
        ran.lock().unwrap().clear();
        let output = case.run(|inputs, outputs| run_private(&gpu, inputs, outputs, layers));
        let names = ran.lock().unwrap().clone();
        let count = |prefix| names.iter().filter(|name| name.starts_with(prefix)).count();
        let counts = [count("mask_map_bool"), count("prefill_"), count("combine_")];
        (bits(&output.unwrap_or_else(|error| panic!("{error}"))), counts)
    };
    let (alone, counts) = run(1);
    assert_eq!(counts, [1, 1, 1]);
    let (shared, counts) = run(3);
    assert_eq!(counts, [1, 3, 3]);
    assert!(alone == shared);
}

/// The error that a plan is refused with, or that running it fails with.
fn failure(gpu: &Gpu) -> String {
    let case = masked().generate();
    let run = case.run(|inputs, outputs| {
        let plan = gpu.plan(inputs, outputs)?;
        gpu.run_copied(&plan, inputs, outputs).map(|_| ())
    });
    run.map(|_| ()).expect_err("it fails").to_string()
}

#[test]
fn failures_have_error_messages() {
    let Some(compiler) = compiler() else { return };
    stand_in::set_chip(None);
    let none = Gpu::system_default().expect_err("none").to_string();
    assert!(none.contains("no Metal device"), "{none}");
    stand_in::set_chip(Some(Chip { family: 6, ..M2 }));
    let old = Gpu::system_default().expect_err("too old").to_string();
    assert!(old.contains("Apple GPU family 6"), "{old}");

    let (few_threads, _) = gpu(&compiler, &source_of(&["APPEND("]), Chip { max_threads: 64, ..M2 });
    let refused = failure(&few_threads);
    assert!(refused.contains("runs with 64 threads per threadgroup"), "{refused}");

    let (broken, _) = gpu(&compiler, &source_of(&["APPEND("]), M2);
    stand_in::set_executor(|kernel| Err(format!("{} hangs", kernel.function)));
    let words = failure(&broken);
    assert!(words.contains("hangs (status 5)"), "{words}");
}

/// Two rows of three: rows are 8 apart, elements 2.
fn with_gaps(memory: &mut [f32]) -> TensorMut<'_> {
    TensorMut::with_strides(memory, [2, 3], [8, 2]).expect("it fits")
}

/// Gaps between the rows of an output may be another tensor, which others write meanwhile.
#[test]
fn copies_write_elements_and_nothing_between() {
    let Some(compiler) = compiler() else { return };
    let (gpu, _) = gpu(&compiler, &source_of(&["MERGE("]), M2);
    let mut memory = vec![1.0f32; 14];
    let copy = gpu.copy_of_output("out", &with_gaps(&mut memory)).expect("a buffer");
    memory.fill(2.0);
    copy.download(&mut with_gaps(&mut memory));
    let is_element = |at: usize| at % 8 < 5 && at % 2 == 0;
    for (at, &number) in memory.iter().enumerate() {
        assert_eq!(number, if is_element(at) { 1.0 } else { 2.0 }, "element {at}");
    }
}

#[test]
fn the_machine_is_what_the_device_says() {
    let Some(compiler) = compiler() else { return };
    let (gpu, _) =
        gpu(&compiler, &source_of(&["APPEND("]), Chip { architecture: "applegpu_g14s", ..M2 });
    assert_eq!(gpu.machine().name, "Apple M2");
    let facts = format!("{:?}", gpu.machine().device);
    assert!(facts.contains("family: 8"), "{facts}");
    let cores = metal::cores_of_architecture("applegpu_g14s").expect("an M2 Pro");
    assert!(facts.contains(&format!("cores: {cores}")), "{facts}");
}

#[test]
fn kernels_that_are_not_used_are_not_compiled() {
    let Some(compiler) = compiler() else { return };
    let (gpu, _) = gpu(&compiler, &source_of(&["MERGE("]), M2);
    let (source, pipelines) = (stand_in::source_bytes(), stand_in::compiled());
    assert_eq!((source, pipelines), (0, 0), "nothing before it is needed");
    gpu.load_merge().expect("three pipelines");
    assert_eq!(stand_in::compiled(), 3);
    let source = stand_in::source_bytes();
    assert!((1..3 * metal::source().len() / 2).contains(&source), "{source} bytes");
    gpu.load_merge().expect("they are there");
    assert_eq!((stand_in::source_bytes(), stand_in::compiled()), (source, 3));
}

#[test]
fn pipelines_are_kept_in_an_archive() {
    let Some(compiler) = compiler() else { return };
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/metal.archive");
    let _ = std::fs::remove_file(path);
    let (first, _) = gpu(&compiler, &source_of(&["MERGE("]), M2);
    let first = first.with_archive(path).expect("it need not be there");
    first.load_merge().expect("three pipelines");
    let compiled = stand_in::compiled();
    assert_eq!(compiled, 3);
    assert_eq!(first.save_archive(path).expect("it is written"), 3);
    let again = Gpu::system_default().expect("a GPU").with_archive(path).expect("it is there");
    again.load_merge().expect("three pipelines");
    assert_eq!(stand_in::compiled(), compiled, "all of them are in the archive");
    again.load_append().expect("three pipelines");
    assert_eq!(stand_in::compiled(), compiled + 3, "none of them is");
    assert_eq!(again.save_archive(path).expect("it is written"), 6);

    std::fs::write(path, "something else").expect("a file");
    let broken = Gpu::system_default().expect("a GPU").with_archive(path);
    let words = broken.expect_err("it is none").to_string();
    assert!(words.contains("it is no archive") && words.contains("metal.archive"), "{words}");
}

/// The work of `regard check --random N --device metal` on a Mac.
#[test]
fn random_problems_run_on_copies() {
    let Some(compiler) = compiler() else { return };
    let make = || -> Result<Box<dyn Device>, Error> {
        let (gpu, _) = gpu(&compiler, &metal::source(), M2);
        Ok(Box::new(Runner::new(Arc::new(gpu))))
    };
    let summary = random::test("over a stand-in for Metal's classes", 60, Profile::Small, &make);
    let summary = summary.unwrap_or_else(|failures| panic!("{failures}"));
    assert_eq!(summary.passed, 60, "{summary:?}");
}

/// The work of `regard check --coverage --device metal` on a Mac, for two pipelines.
#[test]
fn pipelines_are_covered_on_copies() {
    let Some(compiler) = compiler() else { return };
    let (gpu, _) = gpu(&compiler, &metal::source(), M2);
    let mut runner = Runner::new(Arc::new(gpu));
    for name in ["decode_float_2x1/8", "prefill_float_8x1/4"] {
        let subjects = Metal.subjects();
        let subject = subjects.iter().find(|subject| subject.name == name).expect("a pipeline");
        let coverage = cover(&Metal, subject);
        for case in coverage.cases.iter().step_by(9) {
            let failed = |why: &dyn std::fmt::Display| format!("{}: {why}", case.spec.name);
            let data = case.spec.generate();
            let output = runner.cover(subject, case, &data);
            let output = output.unwrap_or_else(|error| panic!("{}", failed(&error)));
            case.judge(&data, &output, support::limits::judged_rows())
                .unwrap_or_else(|failure| panic!("{}", failed(&failure)));
        }
    }
    let subject = &Metal.subjects()[0];
    let case = cover(&Metal, subject).cases.swap_remove(0);
    let other = regard_cases::coverage::Subject { name: "prefill_x".into(), ..subject.clone() };
    let error = runner.cover(&other, &case, &case.spec.generate()).unwrap_err().to_string();
    assert!(error.contains("allowed: prefill_x"), "{error}");
}

/// One library for each kind of kernel and type is a translation unit of its own.
#[test]
fn each_part_of_the_source_compiles_alone() {
    let Some(compiler) = compiler() else { return };
    let functions = metal::functions().chain(["merge_half", "append_bfloat", "mask_map_bool"]);
    let mut done = Vec::new();
    for function in functions {
        let source = metal::LibrarySource::of_function(function);
        if done.contains(source.name()) {
            continue;
        }
        compiler.typecheck("regard.metal", &source.text()).unwrap_or_else(|error| {
            panic!("{function}: {error}");
        });
        done.push(source.name().clone());
    }
    assert!(done.len() > 10, "{done:?}");
}
