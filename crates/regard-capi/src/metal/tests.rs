//! The C functions over a stand-in for Metal's classes, behind which the shipped kernels run:
//! `scripts/metal-host.sh`.

#[path = "../../tests/operands/mod.rs"]
mod operands;

use crate::types::{self, Append, DType, Device, DeviceKind, Merge, REGARD_OFFSET, Status, Tensor};
use crate::*;
use metal_host::{Build, Compiler, Library, library, run_stand_in};
use operands::{Results, tensor, with_operands};
use regard::metal::device::{BufferObject, Gpu};
use regard::metal::stand_in::objc2_metal::{
    MTLCommandBuffer, MTLCommandEncoder, MTLCommandQueue, MTLCreateSystemDefaultDevice, memory_of,
};
use regard::metal::stand_in::{self, Chip, objc2};
use regard::{Dims, metal};
use regard_cases::check::Checker;
use regard_cases::{Spec, list};
use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::Arc;

/// Multiplications of the largest case that runs.
const LARGE: usize = 200_000;

/// One of this many cases of a type runs: regard's own tests run all cases.
const STEP: usize = 3;

const M2: Chip =
    Chip { name: "Apple M2", architecture: "applegpu_g14g", family: 8, max_threads: 1024 };

/// A GPU whose kernels this thread runs.
fn gpu() -> Option<Gpu> {
    let compiler = match Compiler::new(std::env::temp_dir().join("regard-metal-host")) {
        Ok(compiler) => compiler,
        Err(why) => {
            assert!(std::env::var_os("REGARD_METAL_REQUIRED").is_none(), "{why}");
            return None;
        }
    };
    // Compiled when they are needed, as on a Mac.
    let mut libraries: HashMap<String, Library> = HashMap::new();
    let mut schedule = 0;
    stand_in::set_executor(move |kernel| {
        schedule += 1;
        let source = metal::LibrarySource::of_function(kernel.function);
        let library = libraries.entry(source.name().clone()).or_insert_with(|| {
            library(&compiler, &source.text(), Build::Plain).unwrap_or_else(|why| panic!("{why}"))
        });
        run_stand_in(library, kernel, schedule)
    });
    stand_in::set_chip(Some(M2));
    Some(Gpu::system_default().expect("a GPU"))
}

/// The device that C describes.
fn device() -> Device {
    Device {
        size: size_of::<Device>(),
        kind: DeviceKind::Metal as i32,
        ordinal: 0,
        context: ptr::null_mut(),
        machine: ptr::null(),
        threads: 0,
        reserved: 0,
        executor: None,
        executor_data: ptr::null_mut(),
    }
}

/// A private buffer with a copy of a host tensor, behind some other bytes.
struct Upload {
    buffer: Arc<BufferObject>,
    offset: usize,
    host: *mut u8,
    bytes: usize,
}

impl Upload {
    fn new(gpu: &Gpu, host: *mut u8, dims: &Dims) -> Upload {
        let last: i64 =
            dims.shape().iter().zip(dims.strides()).map(|(&n, s)| (n as i64 - 1) * s).sum();
        let elements = if dims.shape().contains(&0) { 0 } else { last as usize + 1 };
        let (bytes, offset) = (elements * dims.dtype().size(), 5 * dims.dtype().alignment());
        let buffer = gpu.private_buffer(offset + bytes).expect("memory");
        let upload = Upload { buffer, offset, host, bytes };
        // SAFETY: both have as many bytes: strides are not negative.
        unsafe { upload.memory().copy_from(host, bytes) };
        upload
    }

    fn memory(&self) -> *mut u8 {
        memory_of(&self.buffer).0.wrapping_add(self.offset)
    }

    fn object(&self) -> *mut c_void {
        Arc::as_ptr(&self.buffer).cast_mut().cast()
    }

    /// The tensor as C describes it.
    fn tensor(&self, dims: &Dims) -> Tensor {
        let tensor = tensor(self.object().cast(), dims);
        let options = tensor.options | REGARD_OFFSET;
        Tensor { options, offset: self.offset as u64, ..tensor }
    }

    fn download(&self) {
        // SAFETY: it is a copy of a tensor that the test writes.
        unsafe { self.host.copy_from(self.memory(), self.bytes) };
    }
}

/// Lets C's functions encode, and runs the encoded commands.
fn submit(encode: impl FnOnce(*mut c_void) -> Status) {
    objc2::rc::autoreleasepool(|_| {
        let device = MTLCreateSystemDefaultDevice().expect("a device");
        let queue = objc2_queue(&device);
        let commands = queue.commandBuffer().expect("a command buffer");
        let encoder = commands.computeCommandEncoder().expect("an encoder");
        expect_ok(encode(Arc::as_ptr(&encoder).cast_mut().cast()));
        encoder.endEncoding();
        commands.commit();
        commands.waitUntilCompleted();
        assert!(commands.error().is_none(), "{:?}", commands.error());
    });
}

fn objc2_queue(device: &regard::metal::device::DeviceObject) -> Arc<metal::device::QueueObject> {
    use regard::metal::stand_in::objc2_metal::MTLDevice;
    device.newCommandQueue().expect("a queue")
}

fn words() -> String {
    // SAFETY: never null, and copied before another call.
    unsafe { CStr::from_ptr(regard_last_error()) }.to_string_lossy().into_owned()
}

fn expect_ok(status: Status) {
    assert!(status == Status::Ok, "{status:?}: {}", words());
}

/// Runs a problem; `mapped`, with a tile map that is made before.
fn run(gpu: &Gpu, inputs: &regard::Inputs, outputs: &mut regard::Outputs, mapped: bool) {
    let out = Upload::new(gpu, outputs.out.as_mut_ptr(), &outputs.out);
    let lse = outputs.lse.as_mut().map(|lse| Upload::new(gpu, lse.as_mut_ptr(), lse));
    let results = Results {
        out: out.tensor(&outputs.out),
        lse: lse.as_ref().zip(outputs.lse.as_ref()).map(|(upload, lse)| upload.tensor(lse)),
    };
    let mut uploads: Vec<Upload> = Vec::new();
    let given = |input: &regard::Tensor| {
        let host = input.as_ptr().cast_mut();
        // Values that are a prefix of the keys are in the same memory.
        if let Some(upload) = uploads.iter().find(|upload| upload.host == host) {
            return upload.tensor(input);
        }
        let upload = Upload::new(gpu, host, input);
        let tensor = upload.tensor(input);
        uploads.push(upload);
        tensor
    };
    let device = device();
    let mut run = |operands: &types::Operands| {
        let mut plan = ptr::null_mut();
        // SAFETY: all that is pointed to lives until the work is done; the plan is destroyed once.
        unsafe {
            expect_ok(regard_plan_for(operands, &device, &mut plan));
            expect_ok(regard_plan_load(plan));
            let bytes = regard_plan_workspace_bytes(plan);
            let workspace = gpu.private_buffer(bytes).expect("memory");
            let object = Arc::as_ptr(&workspace).cast_mut().cast();
            if mapped {
                let map = expected_map(plan, operands);
                assert!(map.bytes > 0 && map.at + map.bytes <= bytes, "{map:?}");
                submit(|encoder| {
                    step::regard_plan_map_mask(plan, operands, object, bytes, encoder)
                });
                submit(|encoder| {
                    step::regard_plan_run_mapped(plan, operands, object, bytes, encoder)
                });
            } else {
                submit(|encoder| regard_plan_run(plan, operands, object, bytes, encoder));
            }
            regard_plan_destroy(plan);
        }
    };
    with_operands(inputs, &results, true, given, &mut run);
    out.download();
    lse.iter().for_each(Upload::download);
}

/// The expected place and size of the tile map.
///
/// # Safety
/// The plan lives, and the operands are operands of a run.
unsafe fn expected_map(plan: *const Plan, operands: &types::Operands) -> types::TileMap {
    let mut map = types::TileMap { size: size_of::<types::TileMap>(), ..Default::default() };
    // SAFETY: the caller's promise.
    expect_ok(unsafe { step::regard_plan_tile_map(plan, operands, &mut map) });
    map
}

fn check_case(gpu: &Gpu, spec: &Spec, mapped: bool) {
    let case = spec.generate();
    let checker = Checker::new(&case, None).unwrap_or_else(|why| panic!("{}: {why}", spec.name));
    let output = case.run(|inputs, outputs| {
        run(gpu, inputs, outputs, mapped);
        Ok(())
    });
    let output = output.unwrap_or_else(|why: regard::Error| panic!("{}: {why}", spec.name));
    checker.check(&output).unwrap_or_else(|why| panic!("{}: {why}", spec.name));
}

#[test]
fn cases_in_private_buffers_at_offsets() {
    let Some(gpu) = gpu() else { return };
    let specs: Vec<_> = list::list().chain(list::caches()).collect();
    let is_chosen = |spec: &&Spec| spec.dtype == regard::DType::F32 && spec.work() < LARGE;
    let small = specs.iter().filter(is_chosen);
    let chosen: Vec<_> = small.step_by(STEP).collect();
    assert!(chosen.len() > 50, "{} cases", chosen.len());
    chosen.into_iter().for_each(|spec| check_case(&gpu, spec, false));
}

#[test]
fn layers_share_a_tile_map() {
    let Some(gpu) = gpu() else { return };
    let is_prefill = |spec: &Spec| {
        spec.dtype == regard::DType::F32
            && spec.name.starts_with("masks/")
            && spec.name.ends_with("-prefill")
    };
    let specs: Vec<_> = list::list().filter(is_prefill).collect();
    assert!(!specs.is_empty(), "no cases");
    specs.iter().for_each(|spec| check_case(&gpu, spec, true));
}

/// A contiguous tensor of f32 in a buffer.
fn floats(gpu: &Gpu, data: &mut [f32], shape: &[usize]) -> (Upload, Tensor) {
    let host = data.as_mut_ptr();
    let view = regard::TensorMut::from_slice(data, shape, None).expect("as many elements");
    let upload = Upload::new(gpu, host.cast(), &view);
    let tensor = upload.tensor(&view);
    (upload, tensor)
}

fn integers(gpu: &Gpu, data: &mut [i32], shape: &[usize]) -> (Upload, Tensor) {
    let host = data.as_mut_ptr();
    let view = regard::TensorMut::from_slice(data, shape, None).expect("as many elements");
    let upload = Upload::new(gpu, host.cast(), &view);
    let tensor = upload.tensor(&view);
    (upload, tensor)
}

#[test]
fn tokens_are_appended_and_parts_merged() {
    let Some(gpu) = gpu() else { return };
    let device = device();
    // SAFETY: all that is pointed to lives until the work is done.
    unsafe {
        expect_ok(regard_append_load(&device));
        expect_ok(regard_merge_load(&device));
    }
    // One new token, the third of its sequence, to slot 0 of block 1.
    let (mut key, mut value) = ([1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]);
    let (mut key_pool, mut value_pool) = ([0.0; 16], [0.0; 16]);
    let (_key, key) = floats(&gpu, &mut key, &[1, 1, 4]);
    let (_value, value) = floats(&gpu, &mut value, &[1, 1, 4]);
    let (keys, key_pool_tensor) = floats(&gpu, &mut key_pool, &[2, 2, 1, 4]);
    let (values, value_pool_tensor) = floats(&gpu, &mut value_pool, &[2, 2, 1, 4]);
    let (_lens, kv_lens) = integers(&gpu, &mut [3], &[1]);
    let (_table, block_table) = integers(&gpu, &mut [0, 1], &[1, 2]);
    let append = Append {
        size: size_of::<Append>(),
        key: &key,
        value: &value,
        key_pool: &key_pool_tensor,
        value_pool: &value_pool_tensor,
        block_table: &block_table,
        kv_lens: &kv_lens,
        cu_seqlens: ptr::null(),
        rotary_table: ptr::null(),
        query: ptr::null(),
        options: 0,
        reserved: 0,
        k_scales: ptr::null(),
        v_scales: ptr::null(),
    };
    // SAFETY: as above.
    submit(|encoder| unsafe { regard_append_run(&append, &device, encoder) });
    keys.download();
    values.download();
    assert_eq!(key_pool[8..12], [1.0, 2.0, 3.0, 4.0]);
    assert_eq!(value_pool[8..12], [5.0, 6.0, 7.0, 8.0]);
    assert!(key_pool[..8].iter().chain(&key_pool[12..]).all(|&x| x == 0.0));

    let (mut parts, mut part_lse, mut out, mut lse) = ([1.0, 3.0], [0.0, 0.0], [0.0], [0.0]);
    let (_parts, parts) = floats(&gpu, &mut parts, &[2, 1, 1]);
    let (_part_lse, part_lse) = floats(&gpu, &mut part_lse, &[2, 1]);
    let (out_upload, out_tensor) = floats(&gpu, &mut out, &[1, 1]);
    let (lse_upload, lse_tensor) = floats(&gpu, &mut lse, &[1]);
    let merge = Merge {
        size: size_of::<Merge>(),
        parts: &parts,
        part_lse: &part_lse,
        out: &out_tensor,
        lse: &lse_tensor,
    };
    // SAFETY: as above.
    submit(|encoder| unsafe { regard_merge_run(&merge, &device, encoder) });
    out_upload.download();
    lse_upload.download();
    assert!((out[0] - 2.0).abs() < 1e-6 && (lse[0] - 2f32.ln()).abs() < 1e-6, "{out:?} {lse:?}");
}

#[test]
fn wrong_arguments_have_error_messages() {
    let Some(gpu) = gpu() else { return };
    let (_parts, parts) = floats(&gpu, &mut [1.0, 3.0], &[2, 1, 1]);
    let (_part_lse, part_lse) = floats(&gpu, &mut [0.0, 0.0], &[2, 1]);
    let (_out, out) = floats(&gpu, &mut [0.0], &[1, 1]);
    let merge = |parts: &Tensor, device: &Device, encoder: *mut c_void| {
        let size = size_of::<Merge>();
        let (part_lse, out, lse) = (&raw const part_lse, &raw const out, ptr::null());
        let merge = Merge { size, parts, part_lse, out, lse };
        // SAFETY: all that is pointed to lives until the call returns.
        let status = unsafe { regard_merge_run(&merge, device, encoder) };
        assert!(status != Status::Ok);
        words()
    };
    let good = device();
    let none = ptr::null_mut();
    let found = merge(&parts, &good, none);
    assert!(found.contains("`stream`") && found.contains("MTLComputeCommandEncoder"), "{found}");
    let numbered = Device { ordinal: 1, ..good };
    assert!(merge(&parts, &numbered, none).contains("`device.ordinal`"));
    let machine = c"h200".as_ptr();
    let found = merge(&parts, &Device { machine, ..good }, none);
    assert!(found.contains("no Apple GPU"), "{found}");
    let machine = c"m2".as_ptr();
    let found = merge(&parts, &Device { machine, ..good }, none);
    assert!(found.contains("is not here"), "{found}");
    let changed = |change: fn(&mut Tensor)| {
        let mut tensor = parts;
        change(&mut tensor);
        tensor
    };
    let wrong = [
        (changed(|tensor| tensor.offset = 22), "`parts.offset`", "a multiple of 4"),
        (changed(|tensor| tensor.offset = 24), "`parts.offset`", "inside of the buffer"),
        (changed(|tensor| tensor.offset = u64::MAX - 3), "`parts.offset`", "inside of the buffer"),
        (changed(|tensor| tensor.data = ptr::null_mut()), "`parts.data`", "null"),
        (changed(|tensor| tensor.options = 4), "`parts.options`", "0x4"),
        (changed(|tensor| tensor.dtype = DType::I32 as i32), "`parts", "i32"),
    ];
    submit(|encoder| {
        for (tensor, name, text) in &wrong {
            let found = merge(tensor, &good, encoder);
            assert!(found.contains(name) && found.contains(text), "{found}");
        }
        Status::Ok
    });
}

/// A path for C.
fn c_path(name: &str) -> std::ffi::CString {
    let path = std::env::temp_dir().join(format!("{name}.{}", std::process::id()));
    std::ffi::CString::new(path.into_os_string().into_encoded_bytes()).expect("no zero in it")
}

/// All of C's Metal devices of null are one device, which lives as long as the process: other tests
/// may have loaded pipelines.
#[test]
fn pipelines_are_kept_in_an_archive() {
    let Some(_gpu) = gpu() else { return };
    let (device, path) = (device(), c_path("regard-capi-archive"));
    let mut saved = 0;
    // SAFETY: all that is pointed to lives until the calls return.
    unsafe {
        expect_ok(regard_device_use_archive(&device, path.as_ptr()));
        expect_ok(regard_merge_load(&device));
        expect_ok(regard_device_save_archive(&device, path.as_ptr(), &mut saved));
        assert!(saved >= 3, "{saved} pipelines");
        expect_ok(regard_device_use_archive(&device, path.as_ptr()));
        let compiled = stand_in::compiled();
        // The stand-in's device at another address is another GPU, which has loaded nothing.
        let other = MTLCreateSystemDefaultDevice().expect("a device");
        let context = Arc::as_ptr(&other).cast_mut().cast();
        let other = Device { context, ..device };
        expect_ok(regard_device_use_archive(&other, path.as_ptr()));
        expect_ok(regard_merge_load(&other));
        assert_eq!(stand_in::compiled(), compiled, "all of them are in the archive");
        expect_ok(regard_device_save_archive(&other, path.as_ptr(), &mut saved));
        assert_eq!(saved, 3);
    }
    std::fs::write(path.to_str().expect("UTF-8"), "something else").expect("a file");
    // SAFETY: as above.
    let status = unsafe { regard_device_use_archive(&device, path.as_ptr()) };
    assert!(status == Status::Refused && words().contains("it is no archive"), "{}", words());
    let _ = std::fs::remove_file(path.to_str().expect("UTF-8"));
}
