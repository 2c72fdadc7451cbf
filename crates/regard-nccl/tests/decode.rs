//! The law of sharded decode: n shards equal one.

mod support;

use regard::oracle::Judge;
use regard::{
    Attention, DType, Element, Error, Inputs, KeyLayout, KeyOffset, KeyPositions, Problem,
    QueryOffset, Shard, Tensor, TensorMut, Variant, Window, bf16,
};
use regard_nccl::{DecodeStep, Queries, ShardedDecode, Transport};
use support::{HostRank, Number, Random, TIMEOUT, on_ranks};

const HEADS: usize = 12;
const KV_HEADS: usize = 4;
const DIM: usize = 16;
const VALUE_DIM: usize = 24;
const BLOCK: usize = 4;

/// A problem of the law.
#[derive(Debug, Clone)]
struct Law {
    /// Queries and keys of each sequence.
    sequences: Vec<(usize, usize)>,
    ragged: bool,
    paged: bool,
    layout: KeyLayout,
    queries: Queries,
    causal: bool,
    window: Window,
    chunk: Option<usize>,
    alibi: bool,
    sinks: bool,
    softcap: Option<f32>,
    /// Added to the position of queries.
    shift: i64,
}

impl Law {
    fn new(sequences: &[(usize, usize)]) -> Law {
        Law {
            sequences: sequences.to_vec(),
            ragged: false,
            paged: false,
            layout: KeyLayout::RoundRobin,
            queries: Queries::Sharded,
            causal: true,
            window: Window::default(),
            chunk: None,
            alibi: false,
            sinks: false,
            softcap: None,
            shift: 0,
        }
    }

    fn tokens(&self) -> usize {
        self.sequences.iter().map(|&(queries, _)| queries).sum()
    }

    /// `[B, Lq]` or `[total]`.
    fn token_dims(&self) -> Vec<usize> {
        match self.ragged {
            true => vec![self.tokens()],
            false => vec![self.sequences.len(), self.sequences[0].0],
        }
    }

    /// Shape of `[heads, tokens]`, then `dim`.
    fn heads_first(&self, heads: usize, dim: Option<usize>) -> Vec<usize> {
        [heads].into_iter().chain(self.token_dims()).chain(dim).collect()
    }

    /// `[heads, tokens, dim]` in memory as regard's `[tokens, heads, dim]`.
    fn view<'a, T: Element>(&self, data: &'a [T], dim: Option<usize>) -> Tensor<'a> {
        let tensor = Tensor::from_slice(data, &self.heads_first(HEADS, dim), None).unwrap();
        match (self.ragged, dim.is_some()) {
            (true, true) => tensor.permute([1, 0, 2]),
            (true, false) => tensor.permute([1, 0]),
            (false, true) => tensor.permute([1, 2, 0, 3]),
            (false, false) => tensor.permute([1, 2, 0]),
        }
    }
}

/// The operands of the whole.
struct Whole<T> {
    /// `[Hq, tokens, Dk]`.
    q: Vec<T>,
    /// The keys of each sequence, `[Lk, Hkv, D]`.
    k: Vec<Vec<T>>,
    v: Vec<Vec<T>>,
    slopes: Vec<f32>,
    sinks: Vec<f32>,
    /// Positions of each sequence's first query.
    q_offset: Vec<i32>,
    cu_seqlens_q: Vec<i32>,
}

impl<T: Number> Whole<T> {
    fn new(law: &Law, seed: u64) -> Whole<T> {
        let mut random = Random(seed);
        let sequences = &law.sequences;
        let mut of = |dim: usize| -> Vec<Vec<T>> {
            sequences.iter().map(|&(_, keys)| random.numbers(keys * KV_HEADS * dim)).collect()
        };
        let (k, v) = (of(DIM), of(VALUE_DIM));
        let mut ends = vec![0];
        ends.extend(sequences.iter().scan(0, |end, &(queries, _)| {
            *end += queries as i32;
            Some(*end)
        }));
        let offset =
            |&(queries, keys): &(usize, usize)| (keys as i64 - queries as i64 + law.shift) as i32;
        Whole {
            q: random.numbers(HEADS * law.tokens() * DIM),
            k,
            v,
            slopes: random.numbers::<f32>(HEADS).iter().map(|x| x * 0.1).collect(),
            sinks: random.numbers(HEADS),
            q_offset: sequences.iter().map(offset).collect(),
            cu_seqlens_q: ends,
        }
    }

    fn attention<'a>(&'a self, law: &Law, keys: &'a Keys<T>) -> Attention<Tensor<'a>> {
        Attention {
            causal: law.causal,
            window: law.window,
            chunk: law.chunk,
            softcap: law.softcap,
            q_offset: QueryOffset::PerSequence(Tensor::from(&self.q_offset)),
            alibi_slopes: law.alibi.then(|| Tensor::from(&self.slopes)),
            sinks: law.sinks.then(|| Tensor::from(&self.sinks)),
            cu_seqlens_q: law.ragged.then(|| Tensor::from(&self.cu_seqlens_q)),
            kv_lens: Some(Tensor::from(&keys.lens)),
            block_table: law.paged.then(|| {
                let columns = keys.capacity.div_ceil(BLOCK);
                Tensor::new(&keys.table, [law.sequences.len(), columns]).unwrap()
            }),
            ..Attention::default()
        }
    }
}

/// The keys of a rank.
struct Keys<T> {
    k: Vec<T>,
    v: Vec<T>,
    capacity: usize,
    lens: Vec<i32>,
    offsets: Vec<i32>,
    table: Vec<i32>,
}

impl<T: Number> Keys<T> {
    /// Keys of a shard, batched or in pages. Unused slots hold NaN.
    fn for_shard(law: &Law, whole: &Whole<T>, shard: Shard) -> Keys<T> {
        let parts: Vec<_> =
            law.sequences.iter().map(|&(_, keys)| shard.positions(keys).unwrap()).collect();
        let max_len = parts.iter().map(|part| part.len).max().unwrap_or(0).max(1);
        let capacity = if law.paged { max_len.next_multiple_of(BLOCK) } else { max_len };
        let batch = parts.len();
        let columns = capacity.div_ceil(BLOCK);
        // Pages of the sequences in turns, from the last to the first.
        let block = |sequence: usize, column: usize| {
            (columns - 1 - column) * batch + (batch - 1 - sequence)
        };
        let copy = |from: &[Vec<T>], dim: usize| {
            let row = KV_HEADS * dim;
            let mut to = vec![T::from_f32(f32::NAN); batch * capacity * row];
            for (sequence, part) in parts.iter().enumerate() {
                for j in 0..part.len {
                    let slot = match law.paged {
                        true => block(sequence, j / BLOCK) * BLOCK + j % BLOCK,
                        false => sequence * capacity + j,
                    };
                    let at = part.position(j) as usize * row;
                    to[slot * row..][..row].copy_from_slice(&from[sequence][at..][..row]);
                }
            }
            to
        };
        let cells = (0..batch).flat_map(|b| (0..columns).map(move |column| (b, column)));
        Keys {
            k: copy(&whole.k, DIM),
            v: copy(&whole.v, VALUE_DIM),
            capacity,
            lens: parts.iter().map(|part| part.len as i32).collect(),
            offsets: parts.iter().map(|part| part.offset as i32).collect(),
            table: cells.map(|(b, column)| block(b, column) as i32).collect(),
        }
    }

    fn view<'a>(&self, law: &Law, data: &'a [T], dim: usize) -> Tensor<'a> {
        let batch = law.sequences.len();
        let shape = match law.paged {
            true => [batch * self.capacity / BLOCK, BLOCK, KV_HEADS, dim],
            false => [batch, self.capacity, KV_HEADS, dim],
        };
        Tensor::new(data, shape).unwrap()
    }
}

/// The result of one rank: `[Hq / ranks, tokens, Dv]` and its log-sum-exp.
fn run_rank<T: Number>(
    law: &Law,
    whole: &Whole<T>,
    rank: &HostRank,
    count: usize,
) -> Result<(Vec<T>, Vec<f32>), Error> {
    let number = rank.transport.rank();
    let shard = Shard { rank: number, count, layout: law.layout };
    let keys = Keys::for_shard(law, whole, shard);
    let (heads, tokens) = (HEADS / count, law.tokens());
    let stride = shard.positions(0)?.stride;
    let attention = Attention {
        key_positions: Some(KeyPositions {
            offset: KeyOffset::PerSequence(Tensor::from(&keys.offsets)),
            stride,
        }),
        ..whole.attention(law, &keys)
    };
    let (k, v) = (keys.view(law, &keys.k, DIM), keys.view(law, &keys.v, VALUE_DIM));
    let q = match law.queries {
        Queries::Sharded => {
            let own = &whole.q[number * heads * tokens * DIM..][..heads * tokens * DIM];
            Tensor::from_slice(own, &law.heads_first(heads, Some(DIM)), None)?
        }
        _ => law.view(&whole.q, Some(DIM)),
    };
    let inputs = Inputs::new(law.view(&whole.q, Some(DIM)), k, v, attention);
    let problem = Problem::from_inputs(&inputs, T::DTYPE, true)?;
    let mut decode = ShardedDecode::new(rank, &problem, law.queries)?;
    let mut out = vec![T::from_f32(f32::NAN); heads * tokens * VALUE_DIM];
    let mut lse = vec![f32::NAN; heads * tokens];
    // Twice: nothing of a step stays in the next.
    for _ in 0..2 {
        let step = DecodeStep {
            q,
            k,
            v,
            attention,
            out: TensorMut::from_slice(&mut out, &law.heads_first(heads, Some(VALUE_DIM)), None)?,
            lse: Some(TensorMut::from_slice(&mut lse, &law.heads_first(heads, None), None)?),
        };
        // SAFETY: on the host, a step is done when the call returns.
        unsafe { decode.run(rank, step)? };
    }
    Ok((out, lse))
}

/// 1 to 4 shards give the results of one device, within its tolerance.
fn holds<T: Number>(law: &Law) {
    let whole = Whole::<T>::new(law, 7);
    let one =
        Keys::for_shard(law, &whole, Shard { rank: 0, count: 1, layout: KeyLayout::Contiguous });
    let inputs = Inputs::new(
        law.view(&whole.q, Some(DIM)),
        one.view(law, &one.k, DIM),
        one.view(law, &one.v, VALUE_DIM),
        whole.attention(law, &one),
    );
    let judge = Judge::new(&inputs, T::DTYPE).unwrap();
    for count in 1..=4 {
        let parts = on_ranks(count, TIMEOUT, |rank| run_rank(law, &whole, &rank, count).unwrap());
        let (out, lse): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let (out, lse) = (out.concat(), lse.concat());
        let verdict = judge.check(&law.view(&out, Some(VALUE_DIM)), Some(&law.view(&lse, None)));
        assert!(verdict.is_ok(), "{count} ranks, {law:?}: {}", verdict.unwrap_err());
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
