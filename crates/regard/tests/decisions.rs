//! The decisions for many problems on many machines, as a file that is reviewed as a diff:
//! `decisions.txt`.
//!
//! After a change to selection, splitting or planning, write it anew and read the diff:
//! `REGARD_WRITE_DECISIONS=1 cargo test -p regard --test decisions`.

use regard::cpu::{Bf16Products, Level};
use regard::{
    CACHE_DTYPES, CpuFacts, CudaFacts, DType, Device, KeyLayout, KvStorage, Machine, Plan, Problem,
    QueryStorage, Values, Variant, Window,
};
use std::fmt::Write;

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/decisions.txt");
const WRITE: &str = "REGARD_WRITE_DECISIONS";

/// Machines whose facts are written here: the file is the same on every machine.
fn machines() -> Vec<Machine> {
    let cpu = |level: Level, threads, l2_kib: usize, l3_mib: usize| Machine {
        name: format!("{level}-{threads}"),
        device: Device::Cpu(CpuFacts {
            level,
            bf16_products: Bf16Products::Widened,
            threads,
            l1d_bytes: Some(32 << 10),
            l2_bytes: Some(l2_kib << 10),
            l3_bytes: Some(l3_mib << 20),
        }),
    };
    let unknown = Machine {
        name: "scalar-1".into(),
        device: Device::Cpu(CpuFacts {
            level: Level::Scalar,
            bf16_products: Bf16Products::Widened,
            threads: 1,
            l1d_bytes: None,
            l2_bytes: None,
            l3_bytes: None,
        }),
    };
    let multiplying = |name: &str, products| {
        let mut machine = Machine { name: name.into(), ..cpu(Level::Avx512, 2, 1024, 32) };
        if let Device::Cpu(facts) = &mut machine.device {
            facts.bf16_products = products;
        }
        machine
    };
    let named = |name: &str| name.parse::<Machine>().expect("a known machine");
    vec![
        multiplying("avx512bf16-2", Bf16Products::Pairs),
        multiplying("amx-2", Bf16Products::Tiles),
        cpu(Level::Avx512, 2, 1024, 32),
        cpu(Level::Avx512, 16, 1024, 32),
        cpu(Level::Avx2, 2, 512, 16),
        cpu(Level::Avx2, 16, 512, 16),
        cpu(Level::Neon, 8, 1024, 16),
        unknown,
        named("h200"),
        named("a100"),
        named("m1"),
        named("m2"),
        named("m2-ultra"),
        named("m3-max"),
        named("m5"),
    ]
}

fn shard(layout: KeyLayout, problem: Problem) -> Problem {
    let variant = Variant { key_positions: Some(layout), ..problem.variant };
    Problem { variant, ..problem }
}

/// `batch` sequences of `query_len` x `kv_len` tokens with `query_heads`/`kv_heads` heads of dim
/// `dim`, bf16, causal.
fn causal(batch: usize, heads: [usize; 2], dim: usize, lens: [usize; 2]) -> Problem {
    Problem {
        batch,
        query_heads: heads[0],
        kv_heads: heads[1],
        query_len: lens[0],
        kv_len: lens[1],
        variant: Variant { causal: true, ..Variant::default() },
        ..Problem::new(DType::BF16, dim)
    }
}

/// Problems whose decisions are listed for every Apple chip. For the others a chip of each GPU
/// family, and one of many cores, will do.
const ON_EVERY_CHIP: [&str; 5] =
    ["p2048", "d4k", "d32k", "d1kb128, paged 16", "v8: verify 8 tokens"];

/// The Apple chips that [`machines`] does not have.
fn other_chips() -> Vec<Machine> {
    let listed = machines();
    let named = Machine::NAMES.iter().filter_map(|name| name.parse::<Machine>().ok());
    let is_other = |machine: &Machine| {
        matches!(machine.device, Device::Metal(_))
            && listed.iter().all(|other| other.name != machine.name)
    };
    named.filter(is_other).collect()
}

const PAGED: KvStorage = KvStorage::Paged { block_size: 16 };

fn cached(key_dtype: DType, value_dtype: DType, problem: Problem) -> Problem {
    Problem { key_dtype, value_dtype, ..problem }
}

fn problems() -> Vec<(&'static str, Problem)> {
    [prefill(), decode(), caches(), degenerate()].concat()
}

fn prefill() -> Vec<(&'static str, Problem)> {
    let full = Variant::default();
    vec![
        ("p2048", causal(1, [32, 8], 128, [2048, 2048])),
        ("p2048 f32", causal(1, [32, 8], 128, [2048, 2048]).with_dtype(DType::F32)),
        ("p512", causal(1, [32, 8], 128, [512, 512])),
        ("p1024d64", causal(1, [9, 3], 64, [1024, 1024])),
        ("enc512", Problem { variant: full, ..causal(1, [12, 12], 64, [512, 512]) }),
        ("p1024d256", causal(1, [16, 8], 256, [1024, 1024])),
        ("p128k", causal(1, [32, 8], 128, [131072, 131072])),
        (
            "p8k, window 512",
            Problem {
                variant: Variant {
                    causal: true,
                    window: Window { left: Some(512), right: None },
                    ..full
                },
                ..causal(1, [32, 8], 128, [8192, 8192])
            },
        ),
        (
            "ragged: 4096 rows, longest 1024, 16 sequences",
            Problem {
                queries: QueryStorage::Ragged { total: 4096 },
                keys: KvStorage::Ragged,
                ..causal(16, [32, 8], 128, [1024, 1024])
            },
        ),
        ("p2048d80", causal(1, [32, 32], 80, [2048, 2048])),
        (
            "p2048d64, window 127",
            Problem {
                variant: Variant {
                    causal: true,
                    window: Window { left: Some(127), right: None },
                    sinks: true,
                    ..full
                },
                ..causal(1, [64, 8], 64, [2048, 2048])
            },
        ),
        ("p2048d512", causal(8, [8, 4], 512, [2048, 2048])),
        (
            "f8192, bool mask",
            Problem {
                variant: Variant { mask: Some(DType::Bool), ..full },
                ..causal(2, [32, 8], 128, [8192, 8192])
            },
        ),
        (
            "step: chunks and single tokens, 8252 rows of 64 sequences, paged 16",
            Problem {
                queries: QueryStorage::Ragged { total: 8252 },
                keys: PAGED,
                ..causal(64, [32, 8], 128, [8252, 4096])
            },
        ),
    ]
}

fn decode() -> Vec<(&'static str, Problem)> {
    let d32k = causal(1, [32, 8], 128, [1, 32768]);
    let mla = Problem {
        value_dim: 512,
        keys: KvStorage::Paged { block_size: 64 },
        ..causal(1, [128, 1], 576, [1, 4096])
    };
    let latent = Problem { values: Values::KeyPrefix, ..mla.clone() };
    vec![
        ("d4k", causal(1, [32, 8], 128, [1, 4096])),
        ("d32k", d32k.clone()),
        ("d32k, lse", Problem { lse: true, ..d32k.clone() }),
        ("d32k, paged 16", Problem { keys: PAGED, ..d32k.clone() }),
        ("d32k, batch-invariant", Problem { batch_invariant: true, ..d32k }),
        ("d128k", causal(1, [32, 8], 128, [1, 131072])),
        ("d4kb8", causal(8, [32, 8], 128, [1, 4096])),
        ("d1kb128, paged 16", Problem { keys: PAGED, ..causal(128, [32, 8], 128, [1, 1024]) }),
        ("d2kb64 f32", causal(64, [32, 8], 128, [1, 2048]).with_dtype(DType::F32)),
        ("d2kb64d256", causal(64, [16, 8], 256, [1, 2048])),
        ("d2kb64d64", causal(64, [16, 8], 64, [1, 2048])),
        ("d2kd64", causal(1, [9, 3], 64, [1, 2048])),
        ("d100: a short cache", causal(1, [32, 8], 128, [1, 100])),
        ("v8: verify 8 tokens", causal(1, [32, 8], 128, [8, 4096])),
        (
            "v64 tree, every other variant",
            Problem {
                variant: Variant {
                    causal: false,
                    window: Window { left: Some(1023), right: Some(0) },
                    chunk: None,
                    softcap: true,
                    alibi: true,
                    sinks: true,
                    mask: Some(DType::Bool),
                    tree: true,
                    key_positions: None,
                },
                keys: PAGED,
                lse: true,
                out_dtype: DType::F32,
                ..causal(2, [32, 8], 128, [64, 4096])
            },
        ),
        (
            "d4kb8: a contiguous shard",
            shard(KeyLayout::Contiguous, causal(8, [32, 8], 128, [1, 4096])),
        ),
        (
            "d4kb8: a round-robin shard",
            shard(KeyLayout::RoundRobin, causal(8, [32, 8], 128, [1, 4096])),
        ),
        (
            "p2k: a contiguous shard",
            shard(KeyLayout::Contiguous, causal(1, [32, 8], 128, [2048, 2048])),
        ),
        (
            "p2k: a round-robin shard",
            shard(KeyLayout::RoundRobin, causal(1, [32, 8], 128, [2048, 2048])),
        ),
        ("mla of one tensor: a round-robin shard", shard(KeyLayout::RoundRobin, latent.clone())),
        ("mla: decode, dims 576/512, paged 64", mla.clone()),
        ("mla of one tensor", latent.clone()),
        (
            "mla of one tensor, 8 x 16 heads",
            Problem { query_heads: 16, batch: 8, ..latent.clone() },
        ),
        ("mla of one tensor, 2 tokens", Problem { query_len: 2, ..latent.clone() }),
        ("mla of one tensor, batch-invariant", Problem { batch_invariant: true, ..latent.clone() }),
        (
            "mla of one tensor, paged 4",
            Problem { keys: KvStorage::Paged { block_size: 4 }, ..latent.clone() },
        ),
        ("mla of two tensors", Problem { rotary_dim: 64, ..latent.clone() }),
        ("mla of two tensors, 500 tokens", Problem { rotary_dim: 64, query_len: 500, ..latent }),
    ]
}

fn caches() -> Vec<(&'static str, Problem)> {
    vec![
        ("d32k, e4m3", cached(DType::E4M3, DType::E4M3, causal(1, [32, 8], 128, [1, 32768]))),
        ("d8kb64, i8, paged 16", {
            let problem = Problem { keys: PAGED, ..causal(64, [32, 8], 128, [1, 8192]) };
            cached(DType::I8, DType::I8, problem)
        }),
        ("64 x d8k, q8_0", cached(DType::Q8_0, DType::Q8_0, causal(64, [32, 8], 128, [1, 8192]))),
        ("64 x d8k, q4_0", cached(DType::Q4_0, DType::Q4_0, causal(64, [32, 8], 128, [1, 8192]))),
        ("v8, q8_0", cached(DType::Q8_0, DType::Q8_0, causal(1, [32, 8], 128, [8, 4096]))),
        ("d4k, q4_0, D 256", cached(DType::Q4_0, DType::Q4_0, causal(1, [16, 8], 256, [1, 4096]))),
        ("d4k, keys e4m3, values q4_0", {
            cached(DType::E4M3, DType::Q4_0, causal(1, [32, 8], 128, [1, 4096]))
        }),
        ("d4k, queries f32, e4m3", {
            let problem = causal(1, [32, 8], 128, [1, 4096]).with_dtype(DType::F32);
            cached(DType::E4M3, DType::E4M3, problem)
        }),
        ("d4k, q8_0, D 512", cached(DType::Q8_0, DType::Q8_0, causal(1, [16, 8], 512, [1, 4096]))),
        ("mla: decode over f32, dims 576/512", {
            let problem = Problem { value_dim: 512, ..causal(1, [128, 1], 576, [1, 4096]) };
            cached(DType::F32, DType::F32, problem)
        }),
        ("p2048, e4m3", cached(DType::E4M3, DType::E4M3, causal(1, [32, 8], 128, [2048, 2048]))),
        ("p2048, keys e4m3, values bf16", {
            cached(DType::E4M3, DType::BF16, causal(1, [32, 8], 128, [2048, 2048]))
        }),
        ("p2048, q4_0", cached(DType::Q4_0, DType::Q4_0, causal(1, [32, 8], 128, [2048, 2048]))),
    ]
}

fn degenerate() -> Vec<(&'static str, Problem)> {
    vec![
        ("no sequence", causal(0, [32, 8], 128, [1, 4096])),
        ("no keys", causal(1, [32, 8], 128, [1, 0])),
    ]
}

fn decision(problem: &Problem, machine: &Machine) -> String {
    let plan = match Plan::new(problem, machine) {
        Ok(plan) => plan,
        // A release alone changes no decision.
        Err(refusal) => return refusal.to_string().replace(env!("CARGO_PKG_VERSION"), "VERSION"),
    };
    let (choice, split) = (plan.choice(), plan.split());
    let splits = match (split.count, split.parallel) {
        (1, _) => "whole".into(),
        (count, true) => format!("{count} x {} shared", split.keys),
        (count, false) => format!("{count} x {} in order", split.keys),
    };
    format!(
        "{:<11} tile {:>3} rows x {:>3} keys   split {splits:<19} {:>2} workers {:>10} bytes",
        choice.kernel.name(),
        choice.block_rows,
        choice.tile_keys,
        plan.workers(),
        plan.workspace_bytes(),
    )
}

fn table() -> String {
    let mut text = String::from(
        "The plan for a problem (bf16 and causal unless noted otherwise) on a machine: \
         kernel, tile, how keys are split,\n\
         threads, workspace. Made by tests/decisions.rs.\n",
    );
    for (name, problem) in problems() {
        let (heads, kv_heads) = (problem.query_heads, problem.kv_heads);
        let (rows, keys) = (problem.query_len, problem.kv_len);
        let batch = problem.batch;
        writeln!(text, "\n{name}  ({batch} x {heads}/{kv_heads} heads, {rows} x {keys} tokens)")
            .expect("writing to a String cannot fail");
        let others = if ON_EVERY_CHIP.contains(&name) { other_chips() } else { Vec::new() };
        for machine in machines().into_iter().chain(others) {
            writeln!(text, "  {:<10} {}", machine.name, decision(&problem, &machine))
                .expect("writing to a String cannot fail");
        }
    }
    text
}

#[test]
fn decisions_are_the_reviewed_ones() {
    let found = table();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(FILE, &found).expect("decisions.txt can be written");
        return;
    }
    let reviewed = std::fs::read_to_string(FILE).unwrap_or_default().replace("\r\n", "\n");
    let mut changes = String::new();
    let (mut old, mut new) = (reviewed.lines(), found.lines());
    loop {
        match (old.next(), new.next()) {
            (None, None) => break,
            (old, new) if old == new => {}
            (old, new) => {
                let (old, new) = (old.unwrap_or("(nothing)"), new.unwrap_or("(nothing)"));
                writeln!(changes, "- {old}\n+ {new}").expect("writing to a String cannot fail");
            }
        }
    }
    assert!(
        changes.is_empty(),
        "other decisions than tests/decisions.txt has. If they are meant, run\n  \
         {WRITE}=1 cargo test -p regard --test decisions\nand review the diff.\n{changes}"
    );
}

/// The workspace is bounded by threads times tile for any lengths, if the split may be chosen.
#[test]
fn workspace_does_not_grow_with_the_product_of_the_lengths() {
    for machine in machines().iter().take(6) {
        let Device::Cpu(facts) = &machine.device else { unreachable!("the first six are CPUs") };
        for kv_len in [4096, 32768, 1 << 20] {
            for query_len in [1, 32768] {
                let plan = Plan::new(&causal(1, [32, 8], 128, [query_len, kv_len]), machine)
                    .expect("a sound problem");
                assert!(
                    plan.workspace_bytes() <= facts.threads * (4 << 20),
                    "{query_len} x {kv_len} on {machine}: {} bytes",
                    plan.workspace_bytes()
                );
            }
        }
    }
}

/// No more blocks of prefill are launched than shared memory has room for at a time: two of these
/// fit into a data centre's multiprocessor.
#[test]
fn blocks_of_prefill_are_resident() {
    for (shared_bytes, blocks) in [(99 << 10, 8), (163 << 10, 16)] {
        let facts = CudaFacts {
            compute_capability: 80,
            multiprocessors: 8,
            shared_bytes,
            l2_bytes: 4 << 20,
        };
        let machine = Machine { name: "elsewhere".into(), device: Device::Cuda(facts) };
        let problem = causal(1, [8, 2], 128, [4000, 4000]).with_dtype(DType::F16);
        let plan = Plan::new(&problem, &machine).expect("a sound problem");
        assert_eq!(plan.workers(), blocks, "{}", plan.explain());
    }
}

/// Every machine takes every case of the list over caches of another type than queries.
#[test]
fn no_cache_is_refused() {
    for spec in regard_cases::list::caches() {
        for machine in machines() {
            if let Err(refusal) = Plan::new(&spec.problem(true), &machine) {
                panic!("{}: {refusal}", spec.name);
            }
        }
    }
}

/// The storage types for keys or values of that head dim.
fn formats(dim: usize) -> impl Iterator<Item = DType> {
    let fits = move |dtype: &DType| !dtype.is_latent_row() && dim.is_multiple_of(dtype.values());
    CACHE_DTYPES.into_iter().filter(fits)
}

/// No head dim is refused over any cache, with the shared memory of a consumer GPU either.
#[test]
fn a_consumer_gpu_takes_every_head_dim() {
    let facts = CudaFacts {
        compute_capability: 89,
        multiprocessors: 8,
        shared_bytes: 99 << 10,
        l2_bytes: 4 << 20,
    };
    let machine = Machine { name: "elsewhere".into(), device: Device::Cuda(facts) };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for (head_dim, value_dim) in
            [(1, 1), (64, 64), (80, 96), (256, 256), (257, 64), (512, 512), (576, 512), (576, 576)]
        {
            for (query_len, batch_invariant) in
                [(1, false), (1, true), (40, false), (40, true), (500, false)]
            {
                let sized = causal(2, [8, 2], head_dim, [query_len, 1000]);
                let same = Problem { value_dim, batch_invariant, ..sized.with_dtype(dtype) };
                for keys in formats(head_dim) {
                    for values in formats(value_dim) {
                        Plan::new(&cached(keys, values, same.clone()), &machine)
                            .expect("what a consumer GPU can run");
                    }
                }
            }
        }
    }
}
