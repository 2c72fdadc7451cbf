//! Structs with public fields, filled in by hand: facts of machines that disagree, problems that
//! make no sense. The answer is an error that names the wrong number, never a panic, and nothing
//! reads past an operand.

mod expect;
#[cfg(unix)]
#[path = "support/guarded.rs"]
mod memory;

use expect::expect;
use regard::cpu::{Bf16Products, Level};
use regard::state::merge_rows;
use regard::{
    CpuFacts, DType, Device, Error, KvStorage, Machine, MetalFacts, Plan, Problem, Variant, select,
};

fn problem(head_dim: usize, dtype: DType) -> Problem {
    Problem { query_heads: 2, kv_len: 33, ..Problem::new(dtype, head_dim) }
}

fn cpu(level: Level, bf16_products: Bf16Products) -> Machine {
    let facts = CpuFacts {
        level,
        bf16_products,
        threads: 1,
        l1d_bytes: None,
        l2_bytes: None,
        l3_bytes: Some(usize::MAX),
    };
    Machine { name: "by hand".into(), device: Device::Cpu(facts) }
}

#[test]
fn facts_of_a_cpu_that_disagree_are_refused() {
    for level in Level::ALL {
        for products in Bf16Products::ALL {
            let agree = products == Bf16Products::Widened || level == Level::Avx512;
            for dtype in [DType::F32, DType::BF16] {
                let machine = cpu(level, products);
                let planned = Plan::new(&problem(20, dtype), &machine);
                assert_eq!(planned.is_ok(), agree, "{level} with {products} in {dtype}");
                assert_eq!(select(&problem(20, dtype), &machine).is_ok(), agree);
                let Err(error) = planned else { continue };
                let Error::Refused(refusal) = &error else { panic!("not a refusal: {error}") };
                let message = refusal.to_string();
                assert!(
                    message.contains("facts disagree") && message.contains(level.name()),
                    "{message}"
                );
                assert!(message.contains("by hand") && message.contains("avx512"), "{message}");
            }
        }
    }
}

/// The kernel reads whole vectors if rows are few, so the rule "whole vectors" is the rule of the
/// kernel that runs.
#[cfg(unix)]
mod guarded {
    use super::*;
    use regard::{Attention, Element, Inputs, Outputs, Tensor, TensorMut, bf16, f16};

    use crate::memory::{Edge, Guarded};

    /// Runs with every operand against an inaccessible page.
    fn check<T: Element>(machine: &Machine, dim: usize, rows: usize, keys: usize, one: T) {
        for edge in [Edge::End, Edge::Start] {
            let q = Guarded::new(&vec![one; rows * 2 * dim], edge);
            let k = Guarded::new(&vec![one; keys * dim], edge);
            let v = Guarded::new(&vec![one; keys * dim], edge);
            let mut out = Guarded::new(&vec![f32::NAN; rows * 2 * dim], edge);
            let mut lse = Guarded::new(&vec![f32::NAN; rows * 2], edge);
            let inputs = Inputs::new(
                Tensor::new(&q, [1, rows, 2, dim]).expect("whole"),
                Tensor::new(&k, [1, keys, 1, dim]).expect("whole"),
                Tensor::new(&v, [1, keys, 1, dim]).expect("whole"),
                Attention::default(),
            );
            let mut outputs = Outputs {
                out: TensorMut::new(&mut out, [1, rows, 2, dim]).expect("whole"),
                lse: Some(TensorMut::new(&mut lse, [1, rows, 2]).expect("whole")),
            };
            let plan = match Plan::new(
                &Problem::from_operands(&inputs, &outputs).expect("sound"),
                machine,
            ) {
                Ok(plan) => plan,
                Err(Error::Refused(_)) => continue,
                Err(other) => panic!("{machine}: {other}"),
            };
            let mut workspace = Guarded::new(&vec![0xffu8; plan.workspace_bytes()], edge);
            match plan.run(&inputs, &mut outputs, &mut workspace) {
                Ok(()) => {
                    // All values are 1, and so is their average; equal scores of `dim` products
                    // each.
                    assert!(
                        out.iter().all(|&x| (x - 1.0).abs() < 1e-2),
                        "{machine} dim {dim}: {:?}",
                        &out[..]
                    );
                    assert!(lse.iter().all(|x| x.is_finite()), "{machine} dim {dim}");
                }
                // Instructions that are not here.
                Err(Error::Refused(_)) => assert!(out.iter().all(|x| x.is_nan())),
                Err(other) => panic!("{machine}: {other}"),
            }
        }
    }

    #[test]
    fn no_facts_make_a_kernel_read_past_an_operand() {
        for level in Level::ALL {
            for products in Bf16Products::ALL {
                let machine = cpu(level, products);
                for dim in [1, 2, 3, 4, 8, 12, 16, 20, 31, 32, 36, 64, 100] {
                    for (rows, keys) in [(1, 1), (1, 33), (3, 5), (20, 67), (70, 130)] {
                        check(&machine, dim, rows, keys, bf16::ONE);
                        check(&machine, dim, rows, keys, f16::ONE);
                        check(&machine, dim, rows, keys, 1f32);
                    }
                }
            }
        }
    }
}

#[test]
fn problems_that_make_no_sense_select_nothing() {
    let m2 = "m2".parse::<Machine>().expect("a known machine");
    let metal = MetalFacts { family: 8, cores: 0, threadgroup_bytes: 0 };
    let odd = Machine { name: "odd".into(), device: Device::Metal(metal) };
    let machines = [
        cpu(Level::Scalar, Bf16Products::Widened),
        "h200".parse::<Machine>().expect("a known machine"),
        "a100".parse::<Machine>().expect("a known machine"),
        m2,
        odd,
    ];
    let change = |machine: &Machine, change: fn(&mut Problem)| {
        let mut problem = problem(64, DType::F16);
        change(&mut problem);
        select(&problem, machine).expect_err("no such problem")
    };
    for machine in &machines {
        expect(change(machine, |p| p.kv_heads = 0), "kv_heads", "0", "1..=");
        expect(change(machine, |p| p.query_heads = 0), "query_heads", "0", "1..=");
        expect(
            change(machine, |p| p.head_dim = usize::MAX),
            "head_dim",
            "18446744073709551615",
            "1..=576",
        );
        expect(change(machine, |p| p.value_dim = 0), "value_dim", "0", "1..=576");
        expect(change(machine, |p| p.batch = usize::MAX), "batch", "18446744073709551615", "0..=");
        expect(change(machine, |p| p.dtype = DType::Bool), "dtype", "bool", "f32");
        expect(
            change(machine, |p| p.keys = KvStorage::Paged { block_size: 0 }),
            "block_size",
            "0",
            "1..=",
        );
    }
    let none = Problem { kv_heads: 0, ..problem(64, DType::F16) };
    assert_eq!(none.group(), 0);
    let variant = Variant { causal: true, ..Variant::default() };
    for rows in [0, 1, 1 << 63, usize::MAX] {
        for position in [i64::MIN, -1, 0, i64::MAX] {
            let visible = variant.visible_to_rows(position, rows, usize::MAX);
            assert!(visible.start <= visible.end, "{visible:?}");
        }
    }
}

#[test]
fn merged_rows_whose_number_of_elements_wraps() {
    let merge = |rows: usize, elements: usize, value_dim: usize| {
        let (mut out, mut lse) = (vec![0.0; elements], vec![0.0; rows]);
        merge_rows(&mut out, &mut lse, &vec![0.0; elements], &vec![0.0; rows], value_dim)
    };
    merge(2, 6, 3).expect("two rows of three");
    merge(0, 0, usize::MAX).expect("no rows");
    // 2 * 2^63 is 0 modulo 2^64: as many elements as there are.
    expect(
        merge(2, 0, 1 << 63).unwrap_err(),
        "value_dim",
        "9223372036854775808 with 2 rows",
        "as many",
    );
    expect(
        merge(3, 9, usize::MAX).unwrap_err(),
        "value_dim",
        "18446744073709551615 with 3 rows",
        "as many",
    );
    expect(merge(2, 0, 0).unwrap_err(), "value_dim", "0", "1 or more");
    expect(merge(2, 6, 2).unwrap_err(), "out", "6 elements long", "4 (rows x value_dim)");
}
