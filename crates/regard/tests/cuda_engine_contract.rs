//! The engine contract (docs/engine-contract.md) on an NVIDIA GPU: append and attention are
//! captured once and replayed with new lengths, tables and pages, alone and with the schedule of a
//! step for two layers. A run allocates nothing and waits for nothing (a stream that is captured
//! allows neither), reads no variable of the environment and starts no thread. A refusal comes
//! before any launch.
//!
//! Without a GPU the test passes and print SKIPPED. With `REGARD_CUDA_REQUIRED` set it fails.

#![cfg(all(feature = "cuda", target_os = "linux"))]

use regard::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use regard::cuda::cudarc::driver::{
    CudaGraph, CudaSlice, CudaStream, DevicePtr, DeviceRepr, result,
};
use regard::cuda::{Append, COUNTER_BYTES, DeviceMemory, Gpu, RawWorkspace, gpus};
use regard::oracle::Judge;
use regard::paged::{PageAllocator, SequenceId, Step, TableLayout};
use regard::{
    Attention, DType, Error, Float, Inputs, KvStorage, Outputs, Plan, Problem, QueryStorage,
    Tensor, TensorMut, Variant, bf16,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::sync::Arc;

/// The system's allocator, counting.
struct Counting;

// Counters per thread: runs are on the thread of the test, and the driver has threads of its own.
thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static LOOKUPS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The C library's function, counting. The standard library and the driver read variables by it.
///
/// # Safety
/// As that: `name` is a string that ends with 0.
// SAFETY: a program's own function of this name replaces the C library's, with the same meaning.
#[unsafe(no_mangle)]
unsafe extern "C" fn getenv(name: *const c_char) -> *mut c_char {
    unsafe extern "C" {
        static environ: *const *mut c_char;
    }
    // Other threads, of the driver, may be at their end.
    let _ = LOOKUPS.try_with(|lookups| lookups.set(lookups.get() + 1));
    // SAFETY: the caller's promise. The environment is a list of strings that ends with null.
    unsafe {
        let name = CStr::from_ptr(name).to_bytes();
        let mut entry = environ;
        while !entry.is_null() && !(*entry).is_null() {
            let text = CStr::from_ptr(*entry).to_bytes();
            if let Some(value) = text.strip_prefix(name)
                && value.first() == Some(&b'=')
            {
                return (*entry).add(name.len() + 1);
            }
            entry = entry.add(1);
        }
    }
    std::ptr::null_mut()
}

/// Threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("Linux").count()
}

const BATCH: usize = 4;
const TOKENS: usize = 40;
/// Memory is there for a row more than planned.
const ROOM: usize = TOKENS + 1;
const QUERY_HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 64;
const BLOCKS: usize = 48;
const BLOCK_SIZE: usize = 16;
const KEYS: usize = 256;
const ROW: usize = KV_HEADS * DIM;
const POOL: [usize; 4] = [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM];
/// Every step is packed by this layout, so that each table has one address in all of them.
const LAYOUT: TableLayout = TableLayout { sequences: BATCH, max_blocks: KEYS / BLOCK_SIZE };
/// The contents of outputs before a run. No run leaves this value.
const UNTOUCHED: f32 = f32::NEG_INFINITY;

/// The needs of the test beyond [`Float`].
trait Element: Float + DeviceRepr + PartialEq {
    fn from(x: f32) -> Self;
    fn bits(self) -> u32;
}

impl Element for f32 {
    fn from(x: f32) -> f32 {
        x
    }

    fn bits(self) -> u32 {
        self.to_bits()
    }
}

impl Element for bf16 {
    fn from(x: f32) -> bf16 {
        bf16::from_f32(x)
    }

    fn bits(self) -> u32 {
        u32::from(self.to_bits())
    }
}

/// Numbers of no pattern, between -1 and 1.
fn numbers<T: Element>(seed: usize, len: usize) -> Vec<T> {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
    (0..len).map(|i| T::from(number(i))).collect()
}

/// The work that is queued for a layer.
#[derive(Debug, Clone, Copy)]
enum Work {
    Run,
    /// The schedule that layers share.
    Schedule,
    /// A run that reads the schedule.
    Scheduled,
}

/// Everything that an engine has for a layer, made once.
struct Engine<T: Element> {
    gpu: Gpu,
    stream: Arc<CudaStream>,
    plan: Plan,
    workspace: CudaSlice<u8>,
    tables: CudaSlice<i32>,
    key_pool: CudaSlice<T>,
    value_pool: CudaSlice<T>,
    queries: CudaSlice<T>,
    keys: CudaSlice<T>,
    values: CudaSlice<T>,
    out: CudaSlice<T>,
    lse: CudaSlice<f32>,
}

/// A view of a whole slice. Nothing else uses it while work is queued: the test waits.
fn view<T: DeviceRepr>(
    slice: &CudaSlice<T>,
    stream: &CudaStream,
    dtype: DType,
    shape: &[usize],
) -> Result<Tensor<'static, DeviceMemory>, Error> {
    // SAFETY: the slices are as long as the shapes of this file, and outlive all work on them.
    unsafe { Tensor::from_device_address(slice.device_ptr(stream).0, dtype, shape, None) }
}

fn view_mut<T: DeviceRepr>(
    slice: &CudaSlice<T>,
    stream: &CudaStream,
    dtype: DType,
    shape: &[usize],
) -> Result<TensorMut<'static, DeviceMemory>, Error> {
    // SAFETY: as above; each is written by the work of one stream only.
    unsafe { TensorMut::from_device_address(slice.device_ptr(stream).0, dtype, shape, None) }
}

impl<T: Element> Engine<T> {
    fn new() -> Engine<T> {
        let gpu = Gpu::new(0).expect("a GPU");
        // The test orders its work itself. Events of other streams could not be captured.
        // SAFETY: there is one stream.
        unsafe { gpu.context().disable_event_tracking() };
        let stream = gpu.context().new_stream().expect("a stream");
        let bounds = Problem {
            batch: BATCH,
            query_heads: QUERY_HEADS,
            kv_heads: KV_HEADS,
            query_len: TOKENS,
            kv_len: KEYS,
            queries: QueryStorage::Ragged { total: TOKENS },
            keys: KvStorage::Paged { block_size: BLOCK_SIZE },
            variant: Variant { causal: true, ..Variant::default() },
            lse: true,
            ..Problem::new(T::DTYPE, DIM)
        };
        let plan = Plan::new(&bounds, gpu.machine()).expect("a plan");
        gpu.load(&plan).expect("its code");
        gpu.load_append().expect("its code");
        // The contents of a workspace mean nothing, but for the counters.
        let mut scratch = vec![0xff; plan.workspace_bytes().max(COUNTER_BYTES)];
        scratch[..COUNTER_BYTES].fill(0);
        let upload = |data: &[T]| stream.clone_htod(data).expect("memory");
        let pool = vec![T::from(f32::NAN); POOL.iter().product()];
        Engine {
            workspace: stream.clone_htod(&scratch).expect("memory"),
            tables: stream.clone_htod(&vec![0; LAYOUT.len()]).expect("memory"),
            key_pool: upload(&pool),
            value_pool: upload(&pool),
            queries: upload(&numbers(1, ROOM * QUERY_HEADS * DIM)),
            keys: upload(&numbers(2, TOKENS * ROW)),
            values: upload(&numbers(3, TOKENS * ROW)),
            out: upload(&[T::from(UNTOUCHED); ROOM * QUERY_HEADS * DIM]),
            lse: stream.clone_htod(&vec![UNTOUCHED; ROOM * QUERY_HEADS]).expect("memory"),
            gpu,
            stream,
            plan,
        }
    }

    /// The step's new keys and values to their pages: `values` rows of them.
    fn append(&self, values: usize) -> Result<(), Error> {
        let stream = &*self.stream;
        let packed = view(&self.tables, stream, DType::I32, &[LAYOUT.len()])?;
        let tables = LAYOUT.tables(packed)?;
        let mut append = Append {
            key: view(&self.keys, stream, T::DTYPE, &[TOKENS, KV_HEADS, DIM])?,
            value: view(&self.values, stream, T::DTYPE, &[values, KV_HEADS, DIM])?,
            key_pool: view_mut(&self.key_pool, stream, T::DTYPE, &POOL)?,
            value_pool: view_mut(&self.value_pool, stream, T::DTYPE, &POOL)?,
            k_scales: None,
            v_scales: None,
            block_table: Some(tables.block_table),
            kv_lens: tables.kv_lens,
            cu_seqlens: Some(tables.cu_seqlens_q),
            rotary: None,
        };
        // SAFETY: the stream is of this GPU, and the only one.
        unsafe { self.gpu.append_raw(stream.cu_stream(), &mut append) }
    }

    /// Attention of that many rows. All parameters that are not in the tables are as planned.
    fn run(&self, rows: usize, softcap: Option<f32>, bytes: usize) -> Result<(), Error> {
        self.queue(rows, softcap, bytes, Work::Run)
    }

    /// Attention, or a part of it.
    fn queue(
        &self,
        rows: usize,
        softcap: Option<f32>,
        bytes: usize,
        work: Work,
    ) -> Result<(), Error> {
        let stream = &*self.stream;
        let packed = view(&self.tables, stream, DType::I32, &[LAYOUT.len()])?;
        let shape = [rows, QUERY_HEADS, DIM];
        let inputs = Inputs::new(
            view(&self.queries, stream, T::DTYPE, &shape)?,
            view(&self.key_pool, stream, T::DTYPE, &POOL)?,
            view(&self.value_pool, stream, T::DTYPE, &POOL)?,
            Attention { softcap, ..LAYOUT.tables(packed)?.attention() },
        );
        let mut outputs = Outputs {
            out: view_mut(&self.out, stream, T::DTYPE, &shape)?,
            lse: Some(view_mut(&self.lse, stream, DType::F32, &shape[..2])?),
        };
        let (address, _) = self.workspace.device_ptr(stream);
        let workspace = RawWorkspace { address, bytes };
        let (plan, stream) = (&self.plan, stream.cu_stream());
        // SAFETY: as above. The counters are zero: every run leaves them so. A schedule comes
        // before its runs, and nothing comes between.
        unsafe {
            match work {
                Work::Run => self.gpu.run_raw(plan, stream, &inputs, &mut outputs, workspace),
                Work::Schedule => self.gpu.schedule(plan, stream, &inputs, &outputs, workspace),
                Work::Scheduled => {
                    self.gpu.run_scheduled(plan, stream, &inputs, &mut outputs, workspace)
                }
            }
        }
    }

    /// A step of one layer, or of two that share its schedule.
    fn step(&self, scheduled: bool) -> Result<(), Error> {
        self.append(TOKENS)?;
        if !scheduled {
            return self.run(TOKENS, None, self.workspace.len());
        }
        for work in [Work::Schedule, Work::Scheduled, Work::Scheduled] {
            self.queue(TOKENS, None, self.workspace.len(), work)?;
        }
        Ok(())
    }

    /// One step, recorded.
    fn capture(&self, scheduled: bool) -> CudaGraph {
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).expect("a stream");
        let step = self.step(scheduled);
        let graph = self.stream.end_capture(CUgraphInstantiate_flags(0));
        step.expect("a sound step");
        graph.expect("what may be captured").expect("launches")
    }

    /// Brings a step's tables to the GPU, and clears the rest of the last step's tables.
    fn prepare(&mut self, step: &Step) {
        let mut packed = vec![0; LAYOUT.len()];
        step.pack(&LAYOUT, &mut packed).expect("room");
        let clear = vec![T::from(UNTOUCHED); self.out.len()];
        self.stream.memcpy_htod(&packed, &mut self.tables).expect("a copy");
        self.stream.memcpy_htod(&clear, &mut self.out).expect("a copy");
        self.stream.memcpy_htod(&vec![UNTOUCHED; self.lse.len()], &mut self.lse).expect("a copy");
        self.stream.synchronize().expect("copies");
    }

    fn download<E: DeviceRepr>(&self, slice: &CudaSlice<E>) -> Vec<E> {
        self.stream.clone_dtoh(slice).expect("a copy")
    }

    /// Holds the outputs to the oracle's tolerance. Memory past them must be unchanged.
    fn judge(&self, step: &Step) {
        let tokens = step.tokens();
        let rows = tokens * QUERY_HEADS;
        let [queries, key_pool, value_pool, out] =
            [&self.queries, &self.key_pool, &self.value_pool, &self.out]
                .map(|slice| self.download(slice));
        let lse = self.download(&self.lse);
        let shape = [tokens, QUERY_HEADS, DIM];
        let inputs = Inputs::new(
            Tensor::new(&queries[..rows * DIM], shape).expect("whole"),
            Tensor::new(&key_pool, POOL).expect("whole"),
            Tensor::new(&value_pool, POOL).expect("whole"),
            step.attention(),
        );
        let judge = Judge::new(&inputs, T::DTYPE).expect("sound operands");
        let found = Tensor::new(&out[..rows * DIM], shape).expect("whole");
        let found_lse = Tensor::new(&lse[..rows], [tokens, QUERY_HEADS]).expect("whole");
        judge.check(&found, Some(&found_lse)).unwrap_or_else(|miss| panic!("{miss}"));
        let untouched = T::from(UNTOUCHED);
        assert!(out[rows * DIM..].iter().all(|x| *x == untouched), "rows that no sequence has");
        assert!(lse[rows..].iter().all(|x| *x == UNTOUCHED), "rows that no sequence has");
    }

    /// Bits of everything that a call could write.
    fn memory(&self) -> (Vec<u32>, Vec<u8>) {
        let slices = [&self.out, &self.key_pool, &self.value_pool];
        let floats = slices.into_iter().flat_map(|slice| self.download(slice));
        let lse = self.download(&self.lse).into_iter().map(f32::to_bits);
        (floats.map(T::bits).chain(lse).collect(), self.download(&self.workspace))
    }
}

/// One step of these sequences, each with as many new tokens.
fn fill(step: &mut Step, pages: &mut PageAllocator, sequences: &[(SequenceId, usize)]) {
    step.clear();
    for &(sequence, tokens) in sequences {
        step.append(pages, sequence, tokens).expect("room");
    }
    step.finish(pages).expect("alive");
}

/// Steps of changing sequences, lengths and pages: the first directly, and its recording for all of
/// them.
fn replay<T: Element>(engine: &mut Engine<T>, scheduled: bool) -> Step {
    let mut pages = PageAllocator::new(BLOCKS, BLOCK_SIZE).expect("sound sizes");
    let sequences: Vec<SequenceId> = (0..BATCH).map(|_| pages.create()).collect();
    let mut step = Step::new();
    let of = |lens: &[(usize, usize)]| -> Vec<(SequenceId, usize)> {
        lens.iter().map(|&(i, tokens)| (sequences[i], tokens)).collect()
    };
    let steps: [&[(usize, usize)]; 7] = [
        &[(0, 40)],
        &[(0, 1), (1, 33)],
        &[(0, 1), (1, 1), (2, 7)],
        &[(3, 39), (2, 1)],
        &[(0, 1), (1, 1), (2, 1), (3, 1)],
        &[(2, 40)],
        &[(3, 1), (0, 17), (1, 4), (2, 2)],
    ];
    let mut graph = None;
    for (i, lens) in steps.into_iter().enumerate() {
        if i == 5 {
            // Its pages go to others.
            pages.truncate(sequences[0], 3).expect("alive");
        }
        fill(&mut step, &mut pages, &of(lens));
        engine.prepare(&step);
        match &graph {
            None => {
                // Each of the driver's functions is looked up when it is first called.
                engine.step(scheduled).expect("a sound step");
                engine.stream.synchronize().expect("a sound step");
                let free = result::mem_get_info().expect("a context").0;
                // Counting threads allocates.
                let threads = threads();
                let (allocations, lookups) = (ALLOCATIONS.get(), LOOKUPS.get());
                engine.step(scheduled).expect("a sound step");
                assert_eq!(ALLOCATIONS.get(), allocations, "the step allocated on the host");
                assert_eq!(LOOKUPS.get(), lookups, "the step read the environment");
                assert_eq!(self::threads(), threads, "the step started or ended a thread");
                engine.stream.synchronize().expect("a sound step");
                assert_eq!(result::mem_get_info().expect("a context").0, free, "on the device");
                graph = Some(engine.capture(scheduled));
            }
            Some(graph) => graph.launch().expect("a replay"),
        }
        engine.stream.synchronize().expect("a sound step");
        engine.judge(&step);
    }
    step
}

/// Calls that break the contract write nothing.
fn refuse<T: Element>(engine: &Engine<T>, step: &Step) {
    let before = engine.memory();
    let bytes = engine.plan.workspace_bytes();
    let refused = |result: Result<(), Error>, words: &str| {
        let error = result.expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
        engine.stream.synchronize().expect("nothing to wait for");
        assert!(engine.memory() == before, "{words}: written");
    };
    refused(engine.run(TOKENS, None, bytes - 1), "`workspace` is");
    refused(
        engine.run(TOKENS, Some(30.0), bytes),
        "`softcap` is given; allowed: not given, as planned",
    );
    refused(engine.run(TOKENS + 1, None, bytes), "as planned");
    refused(engine.append(TOKENS - 1), "`value` is");

    // And the next sound step is as if nothing had been.
    engine.step(false).expect("a sound step");
    engine.stream.synchronize().expect("a sound step");
    engine.judge(step);
}

#[test]
fn an_engine_captures_once_and_replays() {
    if let Err(reason) = gpus() {
        let required = std::env::var_os("REGARD_CUDA_REQUIRED").is_some();
        assert!(!required, "REGARD_CUDA_REQUIRED is set, and there is no GPU: {reason}");
        // Bypasses the capture of test output, so that a skipped test is visible.
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "\nSKIPPED, no GPU was used: {reason}");
        return;
    }
    for scheduled in [false, true] {
        let mut engine = Engine::<bf16>::new();
        let step = replay(&mut engine, scheduled);
        refuse(&engine, &step);
        let mut engine = Engine::<f32>::new();
        let step = replay(&mut engine, scheduled);
        refuse(&engine, &step);
    }
}
