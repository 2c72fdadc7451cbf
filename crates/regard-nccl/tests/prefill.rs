//! The law of ring prefill and of head-parallel attention: n ranks equal one.

mod support;

use regard::oracle::Judge;
use regard::{
    Attention, DType, KvStorage, Problem, QueryStorage, Tensor, TensorMut, Variant, Window, bf16,
    f16,
};
use regard_nccl::{HeadParallel, RingPrefill, RingSequence, RingStep, Transport};
use support::ring::{
    CAUSAL, DIM, HEADS, KV_HEADS, Law, Options, Whole, expect_heads, expect_one, plan_ring,
    run_heads, run_ring,
};
use support::{Number, TIMEOUT, on_ranks};

/// 1 to 4 ranks give what one device gives.
fn ring_holds<T: Number>(law: &Law) {
    let whole = Whole::<T>::new(law);
    let inputs = whole.inputs(law);
    let judge = Judge::new(&inputs, T::DTYPE).unwrap();
    let problem = Problem::from_inputs(&inputs, T::DTYPE, true).unwrap();
    for count in 1..=4 {
        let parts = on_ranks(count, TIMEOUT, |rank| {
            let mut ring = plan_ring(law, &problem, &rank).unwrap();
            run_ring(law, &whole, &rank, &mut ring).unwrap()
        });
        expect_one(law, &judge, parts);
    }
}

fn ring_holds_everywhere(len: usize, variant: Options) {
    for len in [1, 2, 5, 16, 67] {
        ring_holds::<f32>(&Law::batch(RingSequence::new(len, len), 1, variant));
        ring_holds::<f32>(&Law::batch(RingSequence::new(len, len), 3, variant));
        ring_holds::<f32>(&Law::batch(RingSequence::new(len, len + 41), 2, variant));
    }
    ring_holds::<bf16>(&Law::batch(RingSequence::new(len, len), 2, variant));
    ring_holds::<f16>(&Law::batch(RingSequence::new(len, len), 1, variant));
}

#[test]
fn causal_rings() {
    ring_holds_everywhere(97, CAUSAL);
    ring_holds_everywhere(64, Options { sinks: true, softcap: Some(2.0), ..CAUSAL });
}

#[test]
fn full_rings() {
    ring_holds_everywhere(50, Options { causal: false, sinks: true, ..CAUSAL });
}

#[test]
fn rings_with_windows() {
    for left in [0, 3, 9, 40] {
        let window = Window { left: Some(left), right: None };
        ring_holds_everywhere(80, Options { window, sinks: left == 9, ..CAUSAL });
    }
    let window = Window { left: Some(7), right: Some(12) };
    ring_holds_everywhere(70, Options { window, causal: false, ..CAUSAL });
}

#[test]
fn rings_with_alibi() {
    ring_holds_everywhere(61, Options { alibi: true, ..CAUSAL });
    ring_holds_everywhere(33, Options { alibi: true, causal: false, sinks: true, ..CAUSAL });
}

#[test]
fn rings_with_chunked_attention() {
    for chunk in [1, 7, 16, 64, 1000] {
        ring_holds_everywhere(75, Options { chunk: Some(chunk), sinks: chunk == 16, ..CAUSAL });
    }
    let window = Window { left: Some(9), right: Some(4) };
    ring_holds_everywhere(75, Options { chunk: Some(20), alibi: true, window, ..CAUSAL });
    ring_holds_everywhere(75, Options { chunk: Some(20), window, causal: false, ..CAUSAL });
}

/// Every combination of features, over every kind of sequences.
#[test]
fn all_features_over_all_sequences() {
    let at = |query_len, kv_len, q_offset| RingSequence { query_len, kv_len, q_offset };
    let prompts = [13, 1, 0, 7, 30, 2].map(|len| RingSequence::new(len, len));
    let prefixes = [(13, 20), (1, 33), (0, 9), (7, 7), (21, 60), (3, 5)];
    let prefixes = prefixes.map(|(rows, keys)| RingSequence::new(rows, keys));
    let offsets = [at(13, 20, 0), at(2, 9, -1), at(9, 4, 1), at(11, 30, 25), at(5, 0, 3)];
    let laws = |variant| {
        [
            Law::batch(RingSequence::new(22, 51), 2, variant),
            Law::batch(at(21, 40, 11), 2, variant),
            Law::batch(at(20, 9, -4), 1, variant),
            Law::ragged(prompts.to_vec(), variant),
            Law::ragged(prefixes.to_vec(), variant),
            Law::ragged(offsets.to_vec(), variant),
        ]
    };
    let windows = [(None, None), (Some(6), None), (Some(9), Some(5))];
    for bits in 0..32 {
        for (left, right) in windows {
            let variant = Options::combination(bits, Window { left, right }, 11);
            for (i, law) in laws(variant).iter().enumerate() {
                match (bits + i) % 3 {
                    0 => ring_holds::<f32>(law),
                    1 => ring_holds::<bf16>(law),
                    _ => ring_holds::<f16>(law),
                }
            }
        }
    }
}

/// Sequences that a plan has room for take the place of others.
#[test]
fn sequences_are_replaced() {
    let (short, long) = ([(3, 3), (9, 40), (1, 1)], [(40, 40), (0, 5), (30, 31), (2, 60)]);
    let law = |lens: &[(usize, usize)]| {
        let sequences = lens.iter().map(|&(rows, keys)| RingSequence::new(rows, keys));
        Law::ragged(sequences.collect(), Options { sinks: true, ..CAUSAL })
    };
    let laws = [law(&short), law(&long), law(&short)];
    let wholes = laws.each_ref().map(Whole::<f32>::new);
    let inputs = [0, 1, 2].map(|i| wholes[i].inputs(&laws[i]));
    let bounds = Problem::from_inputs(&inputs[1], DType::F32, true).unwrap();
    for count in 1..=4 {
        let mut parts = on_ranks(count, TIMEOUT, |rank| {
            let first = &laws[0].sequences;
            let mut ring = RingPrefill::with_sequences(&rank, &bounds, first).unwrap();
            [0, 1, 2].map(|i| {
                ring.set_sequences(&rank, &laws[i].sequences).unwrap();
                Some(run_ring(&laws[i], &wholes[i], &rank, &mut ring).unwrap())
            })
        });
        for i in 0..3 {
            let judge = Judge::new(&inputs[i], DType::F32).unwrap();
            let of_law = parts.iter_mut().map(|parts| parts[i].take().unwrap()).collect();
            expect_one(&laws[i], &judge, of_law);
        }
    }
}

/// The parts of each of 4 ranks.
fn parts_of_ranks(sequence: RingSequence, variant: Options) -> Vec<usize> {
    let law = Law::batch(sequence, 1, variant);
    let whole = Whole::<f32>::new(&law);
    let problem = Problem::from_inputs(&whole.inputs(&law), DType::F32, false).unwrap();
    on_ranks(4, TIMEOUT, |rank| plan_ring(&law, &problem, &rank).unwrap().parts())
}

/// A short window needs the keys of few ranks, so the ring stops early and has few parts. Rows see
/// one share of a prefix at most.
#[test]
fn a_window_shortens_the_ring() {
    let variant = Options { window: Window { left: Some(4), right: None }, ..CAUSAL };
    assert_eq!(parts_of_ranks(RingSequence::new(800, 800), variant), [2; 4]);
    assert_eq!(parts_of_ranks(RingSequence::new(800, 1200), variant), [2; 4]);
}

/// Chunks that no rows share with the keys of another rank leave nothing to pass around.
#[test]
fn short_chunks_shorten_the_ring() {
    let variant = Options { chunk: Some(100), ..CAUSAL };
    assert_eq!(parts_of_ranks(RingSequence::new(800, 800), variant), [1; 4]);
    assert_eq!(parts_of_ranks(RingSequence::new(800, 1200), variant), [1; 4]);
}

/// If only order matters, a prefix adds no parts.
#[test]
fn a_prefix_adds_no_parts() {
    assert_eq!(parts_of_ranks(RingSequence::new(800, 800), CAUSAL), [4; 4]);
    assert_eq!(parts_of_ranks(RingSequence::new(800, 1200), CAUSAL), [4; 4]);
}

fn heads_hold<T: Number>(law: &Law) {
    let whole = Whole::<T>::new(law);
    let judge = Judge::new(&whole.inputs(law), T::DTYPE).unwrap();
    for count in 1..=4 {
        let parts = on_ranks(count, TIMEOUT, |rank| run_heads(law, &whole, &rank).unwrap());
        expect_heads(law, &judge, &parts);
    }
}

#[test]
fn head_parallel_attention() {
    let law = |variant| {
        let law = Law::batch(RingSequence::new(60, 60), 1, variant);
        Law { kv_heads: KV_HEADS, ..law }
    };
    let window = Window { left: Some(11), right: None };
    heads_hold::<f32>(&law(CAUSAL));
    heads_hold::<bf16>(&law(Options { alibi: true, sinks: true, ..CAUSAL }));
    heads_hold::<f32>(&law(Options { window, alibi: true, ..CAUSAL }));
    heads_hold::<f32>(&law(Options { chunk: Some(16), softcap: Some(3.0), ..CAUSAL }));
    heads_hold::<f16>(&law(Options { causal: false, sinks: true, ..CAUSAL }));
}

/// A change of a problem.
type Change = fn(&mut Problem);

fn problem() -> Problem {
    Problem {
        query_heads: HEADS,
        kv_heads: KV_HEADS,
        query_len: 24,
        kv_len: 24,
        variant: Variant { causal: true, ..Variant::default() },
        ..Problem::new(DType::F32, DIM)
    }
}

fn ring_error(count: usize, change: impl Fn(usize, &mut Problem) + Sync) -> Vec<String> {
    on_ranks(count, TIMEOUT, |rank| {
        let mut problem = problem();
        change(rank.transport.rank(), &mut problem);
        RingPrefill::new(&rank, &problem).expect_err("an error").to_string()
    })
}

#[test]
fn ranks_with_different_prompts_are_told() {
    let found = ring_error(2, |rank, problem| {
        (problem.query_len, problem.kv_len) = (24 + rank, 24 + rank);
    });
    let expected = "`query_len` is 24 on rank 0 and 25 on rank 1; allowed: the same on every rank";
    assert_eq!(found, [expected; 2]);
}

#[test]
fn what_the_ring_does_not_pass_on_is_refused() {
    let refused: [(&str, Change); 6] = [
        ("keys", |problem| problem.keys = KvStorage::Paged { block_size: 16 }),
        ("keys", |problem| problem.queries = QueryStorage::Ragged { total: 24 }),
        ("queries", |problem| {
            problem.queries = QueryStorage::Ragged { total: 24 };
            problem.keys = KvStorage::Ragged;
        }),
        ("key_dtype", |problem| problem.key_dtype = DType::BF16),
        ("mask", |problem| problem.variant.mask = Some(DType::Bool)),
        ("tree_mask", |problem| problem.variant = Variant { tree: true, ..Variant::default() }),
    ];
    for (argument, change) in refused {
        let found = ring_error(2, |_, problem| change(problem));
        assert!(found[1].starts_with(&format!("`{argument}` is ")), "{argument}: {found:?}");
        assert!(found[1].ends_with("in ring prefill"), "{argument}: {found:?}");
    }
}

/// The error of 2 ranks that plan these sequences, for a problem of at most 3 ragged ones.
fn sequences_error(sequences: impl Fn(usize) -> Vec<RingSequence> + Sync) -> String {
    let found = on_ranks(2, TIMEOUT, |rank| {
        let problem = Problem {
            batch: 3,
            queries: QueryStorage::Ragged { total: 40 },
            keys: KvStorage::Ragged,
            ..problem()
        };
        let sequences = sequences(rank.transport.rank());
        RingPrefill::with_sequences(&rank, &problem, &sequences).expect_err("an error").to_string()
    });
    assert_eq!(found[0], found[1]);
    found[0].clone()
}

#[test]
fn wrong_sequences_are_told() {
    let fits = RingSequence::new(20, 22);
    let found = sequences_error(|rank| vec![RingSequence::new(20, 22 + rank)]);
    assert!(found.starts_with("`sequences` is 1 of RingSequence { query_len: 20, kv_len: 22, "));
    let found = sequences_error(|rank| vec![fits, RingSequence::new(1, 22 + rank)]);
    assert!(found.starts_with("`sequences` is 2 of 21 rows and 44 keys (checksum "), "{found}");
    let found = sequences_error(|_| vec![fits; 4]);
    assert_eq!(found, "`batch` is 4; allowed: at most 3, as in the problem");
    let found = sequences_error(|_| vec![fits, RingSequence::new(25, 24)]);
    assert_eq!(found, "`sequences[1].query_len` is 25; allowed: at most 24, as in the problem");
    let found = sequences_error(|_| vec![RingSequence::new(3, 25)]);
    assert_eq!(found, "`sequences[0].kv_len` is 25; allowed: at most 24, as in the problem");
    let found = sequences_error(|_| vec![fits; 3]);
    assert_eq!(found, "`query rows` is 60; allowed: at most 40, as in the problem");
    let found = sequences_error(|_| vec![RingSequence { q_offset: 1 << 31, ..fits }]);
    assert!(found.starts_with("`sequences[0].q_offset` is 2147483648; allowed: "), "{found}");
    let found = on_ranks(1, TIMEOUT, |rank| {
        let problem = Problem { batch: 2, ..problem() };
        let sequences = [fits, RingSequence::new(19, 22)];
        RingPrefill::with_sequences(&rank, &problem, &sequences).expect_err("an error").to_string()
    });
    assert!(found[0].starts_with("`sequences[1]` is RingSequence "), "{found:?}");
    assert!(found[0].ends_with("as the first: sequences of a batch are equal"), "{found:?}");
}

/// A call of one rank with operands of `rows` rows.
fn ring_call(rows: usize, attention: Attention<Tensor>) -> String {
    let found = on_ranks(1, TIMEOUT, |rank| {
        let mut ring = RingPrefill::new(&rank, &problem()).unwrap();
        let data = vec![0f32; rows * HEADS * DIM];
        let mut out = data.clone();
        let shape = [1, rows, HEADS, DIM];
        let operand = Tensor::new(&data, shape).unwrap();
        let out = TensorMut::new(&mut out, shape).unwrap();
        let step = RingStep { q: operand, k: operand, v: operand, attention, out, lse: None };
        // SAFETY: on the host, the work is done when the call returns.
        unsafe { ring.run(&rank, step) }.map_or_else(|error| error.to_string(), |()| "done".into())
    });
    found.into_iter().next().unwrap()
}

#[test]
fn wrong_operands_of_a_ring_are_told() {
    assert_eq!(ring_call(24, Attention::causal()), "done");
    let found = ring_call(20, Attention::causal());
    assert_eq!(found, "`q` is of shape [1, 20, 12, 16]; allowed: [1, 24, 12, 16]");
    let lens = [24];
    let attention = Attention { kv_lens: Some(Tensor::from(&lens)), ..Attention::causal() };
    assert!(ring_call(24, attention).starts_with("`kv_lens` is given; allowed: not given"));
    assert!(ring_call(24, Attention::default()).starts_with("`attention` is "));
    let attention = Attention { q_offset: regard::QueryOffset::Same(3), ..Attention::causal() };
    let found = ring_call(24, attention);
    assert_eq!(found, "`q_offset` is 3; allowed: 0, as planned, or not given");
    let starts = [0, 24];
    let attention = Attention { cu_seqlens_q: Some(Tensor::from(&starts)), ..Attention::causal() };
    let found = ring_call(24, attention);
    assert_eq!(found, "`cu_seqlens_q` is given; allowed: not given: it is planned, by sequences");
}

#[test]
fn a_rank_that_ends_is_an_error_in_the_ring() {
    let found = on_ranks(3, TIMEOUT, |rank| {
        let mut ring = RingPrefill::new(&rank, &problem()).unwrap();
        if rank.transport.rank() == 1 {
            return String::new();
        }
        let data = vec![0f32; 8 * HEADS * DIM];
        let mut out = data.clone();
        let operand = Tensor::new(&data, [1, 8, HEADS, DIM]).unwrap();
        let step = RingStep {
            q: operand,
            k: operand,
            v: operand,
            attention: Attention::causal(),
            out: TensorMut::new(&mut out, [1, 8, HEADS, DIM]).unwrap(),
            lse: None,
        };
        // SAFETY: on the host, the work is done when the call returns.
        unsafe { ring.run(&rank, step) }.expect_err("an error").to_string()
    });
    assert!(found[0].contains("has ended") && found[2].contains("has ended"), "{found:?}");
}

#[test]
fn heads_and_rows_divide_among_the_ranks() {
    let found = |problem: Problem, count: usize| {
        on_ranks(count, TIMEOUT, |rank| {
            HeadParallel::new(&rank, &problem).expect_err("an error").to_string()
        })
        .swap_remove(0)
    };
    let allowed = "allowed: a multiple of 5, the number of ranks";
    assert_eq!(found(problem(), 5), format!("`query_heads` is 12; {allowed}"));
    let few = Problem { kv_heads: 2, ..problem() };
    assert!(found(few, 4).starts_with("`kv_heads` is 2; allowed: a multiple of 4"));
    let odd = Problem { query_len: 26, kv_len: 26, ..problem() };
    assert!(found(odd, 4).starts_with("`query_len` is 26; allowed: a multiple of 4"));
    assert!(
        found(Problem { lse: true, ..problem() }, 2)
            .starts_with("`lse` is not what head-parallel attention takes")
    );
}
