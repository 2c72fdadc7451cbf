//! Problems, machines and plans that make no sense: the message names what is wrong, and nothing is
//! written.

mod dense_problem;
mod expect;

use dense_problem::dense_problem;
use expect::expect;
use regard::cpu::{Bf16Products, Level};
use regard::{
    Attention, CpuFacts, CudaFacts, DType, Device, Error, Inputs, KvStorage, Machine, MetalFacts,
    Outputs, Plan, Problem, QueryStorage, Refusal, Tensor, TensorMut,
};

const SENTINEL: f32 = 42.0;

/// The refusal of a plan for [`dense_problem`] that cannot run on this machine's CPU. Nothing is
/// written.
fn refused_here(plan: &Plan) -> Refusal {
    let (q, k, v) = ([0.0f32; 2 * 3 * 4 * 8], [0.0f32; 2 * 5 * 2 * 8], [0.0f32; 2 * 5 * 2 * 4]);
    let inputs = Inputs::new(
        Tensor::new(&q, [2, 3, 4, 8]).expect("a view"),
        Tensor::new(&k, [2, 5, 2, 8]).expect("a view"),
        Tensor::new(&v, [2, 5, 2, 4]).expect("a view"),
        Attention::default(),
    );
    let mut out = [SENTINEL; 2 * 3 * 4 * 4];
    let view = TensorMut::new(&mut out, [2, 3, 4, 4]).expect("a view");
    let mut outputs = Outputs { out: view, lse: None };
    let error = plan.run(&inputs, &mut outputs, &mut vec![0; plan.workspace_bytes()]).unwrap_err();
    assert!(out.iter().all(|&x| x == SENTINEL));
    match error {
        Error::Refused(refusal) => refusal,
        other => panic!("not a refusal: {other}"),
    }
}

#[test]
fn problems_that_make_no_sense() {
    let host = Machine::host().expect("this machine");
    let change = |change: fn(&mut Problem)| {
        let mut problem = dense_problem();
        change(&mut problem);
        Plan::new(&problem, &host).expect_err("no such problem")
    };
    expect(change(|p| p.batch = usize::MAX), "batch", "18446744073709551615", "0..=2147483647");
    expect(change(|p| p.query_heads = 0), "query_heads", "0", "1..=");
    expect(change(|p| p.query_heads = 5), "query_heads", "5 with 2", "a multiple");
    expect(change(|p| p.kv_heads = 0), "kv_heads", "0", "1..=");
    expect(change(|p| p.head_dim = 0), "head_dim", "0", "1..=576");
    expect(change(|p| p.value_dim = 577), "value_dim", "577", "1..=576");
    expect(change(|p| p.query_len = 1 << 40), "query_len", "1099511627776", "0..=2147483647");
    expect(change(|p| p.kv_len = 1 << 31), "kv_len", "2147483648", "0..=2147483647");
    expect(change(|p| p.dtype = DType::I32), "dtype", "i32", "f32 or f16 or bf16");
    expect(change(|p| p.out_dtype = DType::BF16), "out_dtype", "bf16", "f32");
    expect(change(|p| p.variant.mask = Some(DType::I32)), "mask", "i32", "bool or f32");
    expect(change(|p| p.keys = KvStorage::Paged { block_size: 0 }), "block_size", "0", "1..=");
    expect(change(|p| p.queries = QueryStorage::Ragged { total: 2 }), "query_len", "3", "0..=2");
    expect(
        change(|p| p.queries = QueryStorage::Ragged { total: 1 << 31 }),
        "query rows",
        "2147483648",
        "0..=",
    );
}

/// The largest numbers that a problem can have are planned, or refused, without overflow.
#[test]
fn the_largest_problems_and_machines() {
    let max = i32::MAX as usize;
    let ragged = QueryStorage::Ragged { total: max };
    let batched = QueryStorage::Batched;
    for (batch, query_len, heads, queries) in [
        (max, 1, 1 << 19, batched),
        (1 << 19, max, 2, batched),
        (max, max, 1 << 19, ragged),
        (1, 1, max, batched),
        (1, max, 1, batched),
        (1, 1, 1, batched),
    ] {
        for (threads, batch_invariant) in
            [(1, false), (2, false), (2, true), (usize::MAX, false), (usize::MAX, true)]
        {
            let problem = Problem {
                batch,
                query_len,
                query_heads: heads,
                kv_heads: heads,
                head_dim: 576,
                value_dim: 576,
                kv_len: max,
                queries,
                batch_invariant,
                ..dense_problem()
            };
            match Plan::new(&problem, &Machine::host().expect("this machine").with_threads(threads))
            {
                Ok(plan) => assert!(plan.workspace_bytes() < isize::MAX as usize),
                Err(error) => expect(error, "problem", "batch: ", "a workspace below "),
            }
        }
    }
}

#[test]
fn machines() {
    let names = &Machine::NAMES.join(", ");
    expect("h100x".parse::<Machine>().unwrap_err(), "machine", "\"h100x\"", names);
    expect("".parse::<Machine>().unwrap_err(), "machine", "\"\"", names);
}

#[test]
fn nvidia_gpus() {
    let facts = |compute_capability, shared_bytes| Machine {
        name: "elsewhere".into(),
        device: Device::Cuda(CudaFacts {
            compute_capability,
            multiprocessors: 8,
            shared_bytes,
            l2_bytes: 4 << 20,
        }),
    };
    let long = Problem { kv_len: i32::MAX as usize, ..dense_problem() };
    for (machine, problem, reason) in [
        (facts(75, 64 << 10), dense_problem(), "compute capability 8.0"),
        (facts(80, 16 << 10), dense_problem(), "bytes of shared memory"),
        (facts(90, 227 << 10), long, "CUDA kernels take up to"),
    ] {
        let Err(Error::Refused(refusal)) = Plan::new(&problem, &machine) else {
            panic!("{machine} was planned for");
        };
        assert!(refusal.reason.contains(reason), "{refusal}");
    }
    // A plan for a GPU does not run on the CPU instead.
    let h200 = "h200".parse::<Machine>().expect("a known machine");
    let plan = Plan::new(&dense_problem(), &h200).expect("a sound problem");
    let refusal = refused_here(&plan);
    assert!(refusal.machine.starts_with("h200"), "{refusal}");
}

#[test]
fn apple_gpus() {
    let m2 = "m2".parse::<Machine>().expect("a known machine");
    let facts = |family, threadgroup_bytes| Machine {
        name: "elsewhere".into(),
        device: Device::Metal(MetalFacts { family, cores: 4, threadgroup_bytes }),
    };
    for (machine, reason) in
        [(facts(6, 32 << 10), "GPU family 7"), (facts(7, 256), "threadgroup memory")]
    {
        let Err(Error::Refused(refusal)) = Plan::new(&dense_problem(), &machine) else {
            panic!("{machine} was planned for");
        };
        assert!(refusal.reason.contains(reason), "{refusal}");
    }
    // A plan for a GPU does not run on the CPU instead.
    let plan = Plan::new(&dense_problem(), &m2).expect("a sound problem");
    let refusal = refused_here(&plan);
    assert!(refusal.machine.starts_with("m2"), "{refusal}");
}

#[test]
fn a_plan_for_instructions_that_are_not_here() {
    let Some(level) = Level::ALL.into_iter().find(|level| !level.is_available()) else {
        return;
    };
    let facts = CpuFacts {
        level,
        bf16_products: Bf16Products::Widened,
        threads: 2,
        l1d_bytes: None,
        l2_bytes: Some(1 << 20),
        l3_bytes: None,
    };
    let machine = Machine { name: "elsewhere".into(), device: Device::Cpu(facts) };
    let plan = Plan::new(&dense_problem(), &machine).expect("planning needs no instructions");
    let refusal = refused_here(&plan);
    assert!(refusal.to_string().contains(level.name()), "{refusal}");
}

#[test]
fn the_simd_override() {
    expect(
        Level::choose(Some("sse9")).unwrap_err(),
        "REGARD_SIMD",
        "\"sse9\"",
        "scalar, avx2, avx512 or neon",
    );
    expect(
        Level::choose(Some("AVX2")).unwrap_err(),
        "REGARD_SIMD",
        "\"AVX2\"",
        "scalar, avx2, avx512 or neon",
    );
    assert_eq!(Level::choose(Some("scalar")), Ok(Level::Scalar));
    assert_eq!(Level::choose(Some("")), Level::choose(None));
    for level in Level::ALL {
        match Level::choose(Some(level.name())) {
            Ok(chosen) => assert!(level.is_available() && chosen == level),
            Err(Error::Refused(refusal)) => {
                assert!(!level.is_available());
                let message = refusal.to_string();
                assert!(message.contains(&format!("REGARD_SIMD={level}")), "{message}");
                assert!(message.contains("the widest here is"), "{message}");
            }
            Err(other) => panic!("{other}"),
        }
    }
}
