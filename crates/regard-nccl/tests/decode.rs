//! The law of sharded decode: n shards equal one.

mod support;

use regard::oracle::Judge;
use regard::{
    Attention, DType, Error, KeyLayout, Problem, Tensor, TensorMut, Variant, Window, bf16,
};
use regard_nccl::{DecodeStep, Queries, ShardedDecode, Transport};
use support::decode::{
    DIM, HEADS, KV_HEADS, Keys, Law, ONE, Whole, expect_one, inputs_of_one, run_rank,
};
use support::{HostRank, Number, TIMEOUT, on_ranks};

/// 1 to 4 shards give the results of one device, within its tolerance.
fn holds<T: Number>(law: &Law) {
    let whole = Whole::<T>::new(law, 7);
    let keys = Keys::for_shard(law, &whole, ONE);
    let judge = Judge::new(&inputs_of_one(law, &whole, &keys), T::DTYPE).unwrap();
    for count in 1..=4 {
        let parts = on_ranks(count, TIMEOUT, |rank| run_rank(law, &whole, &rank).unwrap());
        expect_one(law, &judge, parts);
    }
}

/// The law over every way to store and to shard.
fn holds_everywhere(law: &Law) {
    for layout in [KeyLayout::Contiguous, KeyLayout::RoundRobin] {
        for queries in [Queries::Sharded, Queries::Replicated] {
            for paged in [false, true] {
                holds::<f32>(&Law { layout, queries, paged, ..law.clone() });
            }
        }
        holds::<bf16>(&Law { layout, ..law.clone() });
    }
}

#[test]
fn one_row_per_sequence() {
    holds_everywhere(&Law::new(&[(1, 40)]));
    holds_everywhere(&Law::new(&[(1, 40), (1, 3), (1, 1), (1, 17)]));
    holds_everywhere(&Law { causal: false, ..Law::new(&[(1, 9), (1, 30)]) });
}

#[test]
fn few_rows_per_sequence() {
    holds_everywhere(&Law::new(&[(4, 40), (4, 5)]));
    holds_everywhere(&Law { softcap: Some(3.0), ..Law::new(&[(9, 33)]) });
}

#[test]
fn offsets_leave_rows_empty() {
    holds_everywhere(&Law { shift: -30, ..Law::new(&[(6, 28), (6, 35)]) });
    holds_everywhere(&Law { shift: 11, ..Law::new(&[(3, 28), (3, 5)]) });
}

#[test]
fn windows() {
    let window = Window { left: Some(6), right: None };
    holds_everywhere(&Law { window, ..Law::new(&[(5, 40), (5, 19)]) });
    let window = Window { left: Some(9), right: Some(4) };
    holds_everywhere(&Law { window, causal: false, shift: -12, ..Law::new(&[(3, 50)]) });
}

#[test]
fn chunks() {
    holds_everywhere(&Law { chunk: Some(8), ..Law::new(&[(5, 44), (5, 9)]) });
}

#[test]
fn alibi() {
    holds_everywhere(&Law { alibi: true, ..Law::new(&[(5, 40), (5, 19)]) });
    holds_everywhere(&Law { alibi: true, causal: false, shift: -9, ..Law::new(&[(2, 25)]) });
}

#[test]
fn sinks_count_once() {
    holds_everywhere(&Law { sinks: true, ..Law::new(&[(1, 40), (1, 2)]) });
    holds_everywhere(&Law { sinks: true, shift: -10, ..Law::new(&[(4, 12)]) });
}

#[test]
fn ragged_batches() {
    let law = Law { ragged: true, ..Law::new(&[(3, 20), (1, 41), (0, 7), (9, 9)]) };
    holds_everywhere(&law);
    let window = Window { left: Some(5), right: None };
    holds_everywhere(&Law { window, alibi: true, sinks: true, shift: -2, ..law });
}

/// A change of a problem.
type Change = fn(&mut Problem);

fn problem() -> Problem {
    Problem {
        batch: 2,
        query_heads: HEADS,
        kv_heads: KV_HEADS,
        kv_len: 8,
        ..Problem::new(DType::F32, DIM)
    }
}

fn message<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.expect_err("an error").to_string()
}

#[test]
fn ranks_with_different_problems_are_told_what_differs() {
    let differing: [(&str, Change); 5] = [
        ("`batch` is 2 on rank 0 and 3 on rank 2", |problem| problem.batch = 3),
        ("`head_dim` is 16 on rank 0 and 8 on rank 2", |problem| problem.head_dim = 8),
        ("`causal` is false on rank 0 and true on rank 2", |problem| {
            problem.variant = Variant { causal: true, ..problem.variant };
        }),
        ("`dtype` is f32 on rank 0 and bf16 on rank 2", |problem| {
            *problem = problem.clone().with_dtype(DType::BF16);
        }),
        ("`sinks` is false on rank 0 and true on rank 2", |problem| problem.variant.sinks = true),
    ];
    for (expected, change) in differing {
        let found = on_ranks(3, TIMEOUT, |rank| {
            let mut problem = problem();
            if rank.transport.rank() == 2 {
                change(&mut problem);
            }
            message(ShardedDecode::new(&rank, &problem, Queries::Sharded))
        });
        for found in found {
            assert!(found.starts_with(expected), "{found}");
        }
    }
    // The number of keys may differ.
    let planned = on_ranks(3, TIMEOUT, |rank| {
        let problem = Problem { kv_len: 5 + rank.transport.rank(), ..problem() };
        ShardedDecode::new(&rank, &problem, Queries::Sharded).is_ok()
    });
    assert_eq!(planned, [true; 3]);
}

#[test]
fn heads_divide_among_the_ranks() {
    let found = on_ranks(5, TIMEOUT, |rank| {
        message(ShardedDecode::new(&rank, &problem(), Queries::Sharded))
    });
    let expected = "`query_heads` is 12; allowed: a multiple of 5, the number of ranks";
    assert!(found.iter().all(|found| found == expected), "{found:?}");
}

/// A step of 2 sequences whose queries, outputs and log-sum-exps have these shapes.
fn step(
    rank: &HostRank,
    decode: &mut ShardedDecode<regard::cpu::Cpu>,
    shapes: [&[usize]; 2],
) -> String {
    let size = |shape: &[usize]| shape.iter().product::<usize>();
    let (q, keys) = (vec![0f32; size(shapes[0])], vec![0f32; 2 * 8 * KV_HEADS * DIM]);
    let mut out = vec![0f32; size(shapes[1])];
    let keys = Tensor::new(&keys, [2, 8, KV_HEADS, DIM]).unwrap();
    let step = DecodeStep {
        q: Tensor::from_slice(&q, shapes[0], None).unwrap(),
        k: keys,
        v: keys,
        attention: Attention::default(),
        out: TensorMut::from_slice(&mut out, shapes[1], None).unwrap(),
        lse: None,
    };
    // SAFETY: on the host, a step is done when the call returns.
    unsafe { decode.run(rank, step) }.map_or_else(|error| error.to_string(), |()| "done".into())
}

#[test]
fn wrong_shapes_are_told() {
    let own = [HEADS / 2, 2, 1, DIM];
    let found = on_ranks(2, TIMEOUT, |rank| {
        let mut decode = ShardedDecode::new(&rank, &problem(), Queries::Sharded).unwrap();
        let wrong = [
            [&[HEADS, 2, 1, DIM][..], &own],
            [&[HEADS / 2, 2, DIM], &own],
            [&[HEADS / 2, 3, 1, DIM], &own],
            [&own, &[HEADS, 2, 1, DIM]],
            [&own, &own],
        ];
        wrong.map(|shapes| step(&rank, &mut decode, shapes))
    });
    for found in found {
        assert_eq!(found[0], "`q` is of shape [12, 2, 1, 16]; allowed: [6, 2, 1, 16]");
        assert_eq!(found[1], "`q` is of shape [6, 2, 16]; allowed: of 4 dimensions");
        assert_eq!(found[2], "`q` is of 3 tokens; allowed: at most 2, as planned");
        assert_eq!(found[3], "`out` is of shape [12, 2, 1, 16]; allowed: [6, 2, 1, 16]");
        assert_eq!(found[4], "done");
    }
}

#[test]
fn ranks_that_call_with_different_shapes_are_told() {
    let found = on_ranks(2, TIMEOUT, |rank| {
        let mut decode = ShardedDecode::new(&rank, &problem(), Queries::Sharded).unwrap();
        let shape = [HEADS / 2, 1 + rank.transport.rank(), 1, DIM];
        step(&rank, &mut decode, [&shape, &shape])
    });
    assert!(
        found.iter().any(|found| found.contains("ranks call with the same shapes")),
        "{found:?}"
    );
}

#[test]
fn a_rank_that_ends_is_an_error_on_the_others() {
    let found = on_ranks(3, TIMEOUT, |rank| {
        let mut decode = ShardedDecode::new(&rank, &problem(), Queries::Sharded).unwrap();
        if rank.transport.rank() == 1 {
            return String::new();
        }
        let shape = [HEADS / 3, 2, 1, DIM];
        step(&rank, &mut decode, [&shape, &shape])
    });
    assert!(found[0].ends_with("rank 1 has ended"), "{found:?}");
    // Rank 0 ends in turn.
    assert!(found[2].contains("has ended"), "{found:?}");
}

#[test]
fn a_rank_that_does_not_answer_is_an_error_after_the_timeout() {
    let timeout = std::time::Duration::from_millis(300);
    let found = on_ranks(2, timeout, |rank| {
        if rank.transport.rank() == 1 {
            std::thread::sleep(4 * timeout);
            return String::new();
        }
        message(ShardedDecode::new(&rank, &problem(), Queries::Sharded))
    });
    assert_eq!(found[0], "receiving from rank 1 failed: no message within 300ms");
}

#[test]
fn positions_of_queries_are_asked_for() {
    let causal = Problem {
        query_len: 3,
        variant: Variant { causal: true, ..Variant::default() },
        ..problem()
    };
    let found = on_ranks(2, TIMEOUT, |rank| {
        let mut decode = ShardedDecode::new(&rank, &causal, Queries::Sharded).unwrap();
        let shape = [HEADS / 2, 2, 3, DIM];
        step(&rank, &mut decode, [&shape, &shape])
    });
    assert!(found[0].starts_with("`q_offset` is not given; allowed: given"), "{found:?}");
}

#[test]
fn a_log_sum_exp_that_was_not_planned_is_told() {
    let found = on_ranks(1, TIMEOUT, |rank| {
        let problem = Problem { lse: true, ..problem() };
        let mut decode = ShardedDecode::new(&rank, &problem, Queries::Sharded).unwrap();
        let shape = [HEADS, 2, 1, DIM];
        step(&rank, &mut decode, [&shape, &shape])
    });
    assert_eq!(found[0], "`lse` is not given; allowed: given, as planned");
}

#[test]
fn a_plan_explains_itself() {
    let found = on_ranks(2, TIMEOUT, |rank| {
        let decode = ShardedDecode::new(&rank, &problem(), Queries::Replicated).unwrap();
        decode.plan().explain()
    });
    assert!(found[0].contains("12/4 heads"), "{}", found[0]);
}
