//! Memory beyond operands is in proportion to threads times tile, and running a plan allocates
//! nothing: counted by the allocator.

use regard::cpu::{self, Inline};
use regard::oracle::{Judge, Row};
use regard::{
    Attention, DType, Inputs, Machine, Outputs, Plan, Problem, Tensor, TensorMut, Variant,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, counting.
struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);
static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Relaxed);
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const TOKENS: usize = 32_768;

fn problem(head_dim: usize, query_heads: usize, kv_heads: usize) -> Problem {
    Problem {
        query_heads,
        kv_heads,
        query_len: TOKENS,
        kv_len: TOKENS,
        variant: Variant { causal: true, ..Variant::default() },
        lse: true,
        ..Problem::new(DType::F32, head_dim)
    }
}

/// Bytes that a thread may need: its block of rows (queries, outputs, scores against one tile, and
/// a state) and one tile of keys and values, twice for packing.
fn tile_bytes(plan: &Plan) -> usize {
    let dims = plan.problem().head_dim + plan.problem().value_dim;
    let (rows, keys) = (plan.choice().block_rows, plan.choice().tile_keys);
    2 * 4 * (rows * dims + keys * dims + rows * keys + 16 * rows) + (64 << 10)
}

// One test: the counters are for the whole process.
#[test]
fn memory_is_threads_times_tile() {
    for threads in [1, 2, 16, 128] {
        for (dim, query_heads, kv_heads) in [(64, 9, 3), (128, 32, 8), (576, 16, 1)] {
            for batch_invariant in [false, true] {
                let problem = Problem { batch_invariant, ..problem(dim, query_heads, kv_heads) };
                let plan =
                    Plan::new(&problem, &Machine::host().unwrap().with_threads(threads)).unwrap();
                let max_bytes = threads * tile_bytes(&plan);
                let found = plan.workspace_bytes();
                assert!(
                    found <= max_bytes,
                    "{found} bytes for {threads} threads, {max_bytes} allowed:\n{}",
                    plan.explain()
                );
            }
        }
    }

    // 32,768 x 32,768 for real, one causal head: a score matrix would be 4 GiB.
    let dim = 64;
    let data: Vec<f32> =
        (0..TOKENS * dim).map(|i| ((i * 7919) % 1000) as f32 / 500.0 - 1.0).collect();
    let view = || Tensor::new(&data, [1, TOKENS, 1, dim]).unwrap();
    let inputs = Inputs::new(view(), view(), view(), Attention::causal());
    let mut out = vec![f32::NAN; TOKENS * dim];
    let mut lse = vec![f32::NAN; TOKENS];

    let threads = 2;
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let mut outputs = Outputs {
        out: TensorMut::new(&mut out, [1, TOKENS, 1, dim]).unwrap(),
        lse: Some(TensorMut::new(&mut lse, [1, TOKENS, 1]).unwrap()),
    };
    let machine = Machine::host().unwrap().with_threads(threads);
    let plan = Plan::new(&Problem::from_operands(&inputs, &outputs).unwrap(), &machine).unwrap();
    let mut workspace = vec![0; plan.workspace_bytes()];
    plan.run(&inputs, &mut outputs, &mut workspace).unwrap();
    let peak = PEAK.load(Relaxed) - before;
    let max_bytes = threads * tile_bytes(&plan);
    println!(
        "peak {peak} bytes beyond operands, workspace {}, {max_bytes} allowed",
        plan.workspace_bytes()
    );
    assert!(peak <= max_bytes, "{peak} bytes at the peak, {max_bytes} allowed");

    // Running again allocates nothing at all, on regard's own threads (the first run has started
    // them) and on the calling thread alone.
    let calls = CALLS.load(Relaxed);
    plan.run(&inputs, &mut outputs, &mut workspace).unwrap();
    assert_eq!(CALLS.load(Relaxed), calls, "a run on {} threads allocated", plan.workers());
    cpu::run(&plan, &inputs, &mut outputs, &mut workspace, &Inline).unwrap();
    assert_eq!(CALLS.load(Relaxed), calls, "a run allocated");
    let rows = [0, 1, 127, 20_000, TOKENS - 1].map(|query| Row { sequence: 0, query, head: 0 });
    let judge = Judge::for_rows(&inputs, DType::F32, &rows).unwrap();
    let out = Tensor::new(&out, [1, TOKENS, 1, dim]).unwrap();
    judge.check(&out, Some(&Tensor::new(&lse, [1, TOKENS, 1]).unwrap())).unwrap();
}
