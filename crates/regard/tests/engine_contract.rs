//! The engine contract (docs/engine-contract.md) on the CPU: prepared once, replayed with new
//! lengths, tables and pages. A run allocates nothing, starts no thread and does not look at the
//! environment. A refusal comes before anything is written.

#![cfg(target_os = "linux")]

use regard::cpu::{Cpu, Inline, Workspace};
use regard::oracle::Judge;
use regard::paged::{PageAllocator, SequenceId, Step};
use regard::{
    Append, DType, Error, Inputs, KvStorage, Outputs, Plan, Problem, QueryStorage, Tensor,
    TensorMut, Variant,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::thread::LocalKey;

/// The system's allocator, counting.
struct Counting;

// Counters per thread: runs are on the thread of the test, and the harness has threads of its own.
thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
    static LOOKUPS: Cell<usize> = const { Cell::new(0) };
}

/// Counts one more.
fn count(counter: &'static LocalKey<Cell<usize>>) {
    counter.set(counter.get() + 1);
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(&ALLOCATIONS);
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

/// The C library's function, counting. The standard library reads variables by it.
///
/// # Safety
/// As that: `name` is a string that ends with 0.
// SAFETY: a program's own function of this name replaces the C library's, with the same meaning.
#[unsafe(no_mangle)]
unsafe extern "C" fn getenv(name: *const c_char) -> *mut c_char {
    unsafe extern "C" {
        static environ: *const *mut c_char;
    }
    count(&LOOKUPS);
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
const QUERY_HEADS: usize = 6;
const KV_HEADS: usize = 2;
const DIM: usize = 32;
const BLOCKS: usize = 48;
const BLOCK_SIZE: usize = 16;
const KEYS: usize = 256;
const ROW: usize = KV_HEADS * DIM;
/// Outputs before a run: a value that no run leaves.
const UNTOUCHED: f32 = f32::from_bits(0x7fc0_1234);

/// Everything that an engine has for a layer, made once.
struct Engine {
    cpu: Cpu,
    plan: Plan,
    workspace: Workspace,
    key_pool: Vec<f32>,
    value_pool: Vec<f32>,
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

/// Numbers of no pattern, between -1 and 1.
fn numbers(seed: usize, len: usize) -> Vec<f32> {
    let number = |i: usize| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0;
    (0..len).map(number).collect()
}

impl Engine {
    fn new() -> Engine {
        // On the caller's thread: regard's own are started by the first run that has work for them.
        let cpu = Cpu::new().expect("this machine").with_executor(Inline);
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
            ..Problem::new(DType::F32, DIM)
        };
        let plan = Plan::new(&bounds, cpu.machine()).expect("a plan");
        cpu.load(&plan).expect("nothing to load");
        // The contents of a workspace mean nothing.
        let workspace = Workspace::new(vec![0xff; plan.workspace_bytes()]);
        let pool = BLOCKS * BLOCK_SIZE * ROW;
        Engine {
            cpu,
            plan,
            workspace,
            key_pool: vec![f32::NAN; pool],
            value_pool: vec![f32::NAN; pool],
            queries: numbers(1, TOKENS * QUERY_HEADS * DIM),
            keys: numbers(2, TOKENS * ROW),
            values: numbers(3, TOKENS * ROW),
            out: vec![UNTOUCHED; TOKENS * QUERY_HEADS * DIM],
            lse: vec![UNTOUCHED; TOKENS * QUERY_HEADS],
        }
    }

    /// Writes the step's new keys and values to their pages.
    fn append(&mut self, step: &Step) -> Result<(), Error> {
        let (tokens, tables) = (step.tokens(), step.tables());
        let pool = [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM];
        let rows = [tokens, KV_HEADS, DIM];
        self.cpu.append(&mut Append {
            key: Tensor::new(&self.keys[..tokens * ROW], rows)?,
            value: Tensor::new(&self.values[..tokens * ROW], rows)?,
            key_pool: TensorMut::new(&mut self.key_pool, pool)?,
            value_pool: TensorMut::new(&mut self.value_pool, pool)?,
            k_scales: None,
            v_scales: None,
            block_table: Some(tables.block_table),
            kv_lens: tables.kv_lens,
            cu_seqlens: Some(tables.cu_seqlens_q),
            rotary: None,
        })
    }

    /// Calls `work` with the operands of attention: views, which take no memory.
    fn attend(
        &mut self,
        attention: regard::Attention<Tensor>,
        tokens: usize,
        work: impl FnOnce(&Cpu, &Plan, &Inputs, &mut Outputs, &mut Workspace) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let pool = [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM];
        let rows = tokens * QUERY_HEADS;
        let inputs = Inputs::new(
            Tensor::new(&self.queries[..rows * DIM], [tokens, QUERY_HEADS, DIM])?,
            Tensor::new(&self.key_pool, pool)?,
            Tensor::new(&self.value_pool, pool)?,
            attention,
        );
        let out = &mut self.out[..rows * DIM];
        let mut outputs = Outputs {
            out: TensorMut::new(out, [tokens, QUERY_HEADS, DIM])?,
            lse: Some(TensorMut::new(&mut self.lse[..rows], [tokens, QUERY_HEADS])?),
        };
        work(&self.cpu, &self.plan, &inputs, &mut outputs, &mut self.workspace)
    }

    /// Attention of the step, as planned.
    fn run(&mut self, step: &Step) -> Result<(), Error> {
        self.attend(step.attention(), step.tokens(), Cpu::run)
    }

    /// Holds the outputs to the oracle's tolerance. Memory past them must be unchanged.
    fn judge(&mut self, step: &Step) {
        let tokens = step.tokens();
        let rows = tokens * QUERY_HEADS;
        let (out, lse) = (self.out.clone(), self.lse.clone());
        self.attend(step.attention(), tokens, |_, _, inputs, _, _| {
            let judge = Judge::new(inputs, DType::F32)?;
            let out = Tensor::new(&out[..rows * DIM], [tokens, QUERY_HEADS, DIM])?;
            let lse = Tensor::new(&lse[..rows], [tokens, QUERY_HEADS])?;
            judge.check(&out, Some(&lse)).unwrap_or_else(|miss| panic!("{miss:?}"));
            Ok(())
        })
        .expect("sound operands");
        assert!(out[rows * DIM..].iter().all(|x| x.to_bits() == UNTOUCHED.to_bits()));
    }
}

/// Bits of everything that a call could write.
fn memory(engine: &Engine) -> Vec<u32> {
    let floats = [&engine.out, &engine.lse, &engine.key_pool, &engine.value_pool];
    floats.into_iter().flatten().map(|x| x.to_bits()).collect()
}

/// One step of these sequences, each with as many new tokens.
fn fill(step: &mut Step, pages: &mut PageAllocator, sequences: &[(SequenceId, usize)]) {
    step.clear();
    for &(sequence, tokens) in sequences {
        step.append(pages, sequence, tokens).expect("room");
    }
    step.finish(pages).expect("alive");
}

/// Steps of changing sequences, lengths and pages through one plan and one workspace. Returns the
/// last step.
fn replay(engine: &mut Engine) -> Step {
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
    for (i, lens) in steps.into_iter().enumerate() {
        if i == 5 {
            // Its pages go to others.
            pages.truncate(sequences[0], 3).expect("alive");
        }
        fill(&mut step, &mut pages, &of(lens));
        engine.out.fill(UNTOUCHED);
        engine.lse.fill(UNTOUCHED);
        let (threads, allocations) = (threads(), ALLOCATIONS.get());
        let lookups = LOOKUPS.get();
        engine.append(&step).expect("a sound step");
        assert_eq!(ALLOCATIONS.get(), allocations, "the append of step {i} allocated");
        engine.run(&step).expect("a sound step");
        assert_eq!(ALLOCATIONS.get(), allocations, "the run of step {i} allocated");
        assert_eq!(LOOKUPS.get(), lookups, "step {i} read the environment");
        assert_eq!(self::threads(), threads, "step {i} started or ended a thread");
        engine.judge(&step);
    }
    step
}

/// Calls that break the contract write nothing.
fn refuse(engine: &mut Engine, step: &Step) {
    let tokens = step.tokens();
    let before = memory(engine);
    let workspace = engine.workspace.as_mut_slice().to_vec();
    let (lens, table) = (step.kv_lens().to_vec(), step.block_table().to_vec());
    let width = table.len() / lens.len();
    let refused = |engine: &mut Engine, result: Result<(), Error>, words: &str| {
        let error = result.expect_err(words).to_string();
        assert!(error.contains(words), "{error}");
        assert_eq!(memory(engine), before, "{words}: written");
        assert_eq!(engine.workspace.as_mut_slice(), workspace, "{words}: the workspace was used");
    };
    let with = |lens: &[i32], table: &[i32], engine: &mut Engine| {
        let attention = regard::Attention {
            kv_lens: Some(Tensor::from(lens)),
            block_table: Some(Tensor::new(table, [lens.len(), width])?),
            ..step.attention()
        };
        engine.attend(attention, tokens, Cpu::run)
    };

    let mut long = lens.clone();
    long[1] = (width * BLOCK_SIZE) as i32 + 1;
    let result = with(&long, &table, engine);
    refused(engine, result, "`kv_lens[1]` is");
    long[1] = -1;
    let result = with(&long, &table, engine);
    refused(engine, result, "`kv_lens[1]` is -1");
    let mut wild = table.clone();
    wild[0] = BLOCKS as i32;
    let result = with(&lens, &wild, engine);
    refused(engine, result, "`block_table[0, 0]` is 48");

    // More than was planned: a row, a feature.
    let wide = Tensor::from_slice(&table, &[lens.len(), width], None).expect("whole");
    let attention =
        regard::Attention { softcap: Some(30.0), block_table: Some(wide), ..step.attention() };
    let result = engine.attend(attention, tokens, Cpu::run);
    refused(engine, result, "`softcap` is given; allowed: not given, as planned");
    let result = engine.attend(step.attention(), tokens, |cpu, plan, inputs, outputs, _| {
        let mut short = Workspace::new(vec![0; plan.workspace_bytes() - 1]);
        cpu.run(plan, inputs, outputs, &mut short)
    });
    refused(engine, result, "`workspace` is");
    let result = engine.attend(step.attention(), tokens - 1, Cpu::run);
    refused(engine, result, "`cu_seqlens_q[4]` is");

    // An append of rows that do not fit.
    let cpu = engine.cpu.clone();
    let tables = step.tables();
    let (keys, pool) = (engine.keys.clone(), [BLOCKS, BLOCK_SIZE, KV_HEADS, DIM]);
    let result = (|| {
        cpu.append(&mut Append {
            key: Tensor::new(&keys[..tokens * ROW], [tokens, KV_HEADS, DIM])?,
            value: Tensor::new(&keys[..(tokens - 1) * ROW], [tokens - 1, KV_HEADS, DIM])?,
            key_pool: TensorMut::new(&mut engine.key_pool, pool)?,
            value_pool: TensorMut::new(&mut engine.value_pool, pool)?,
            k_scales: None,
            v_scales: None,
            block_table: Some(tables.block_table),
            kv_lens: tables.kv_lens,
            cu_seqlens: Some(tables.cu_seqlens_q),
            rotary: None,
        })
    })();
    refused(engine, result, "`value` is");

    // And the next sound step is as if nothing had been.
    engine.run(step).expect("a sound step");
    engine.judge(step);
}

// One test: threads are counted of the whole process.
#[test]
fn an_engine_prepares_once_and_replays() {
    let lookups = LOOKUPS.get();
    let _ = std::env::var("REGARD_SIMD");
    assert!(LOOKUPS.get() > lookups, "lookups are not counted here");

    let mut engine = Engine::new();
    let step = replay(&mut engine);
    refuse(&mut engine, &step);
}
