//! Problems of sharded decode, run on ranks of any device.

use super::{Number, Operands, Output, Random, TestDevice};
use regard::oracle::Judge;
use regard::{
    Attention, Element, Error, Inputs, KeyLayout, KeyOffset, KeyPositions, Problem, QueryOffset,
    Shard, Tensor, Window,
};
use regard_nccl::{DecodeStep, Queries, Rank, ShardedDecode, Transport};

pub const HEADS: usize = 12;
pub const KV_HEADS: usize = 4;
pub const DIM: usize = 16;
pub const VALUE_DIM: usize = 24;
pub const BLOCK: usize = 4;

/// A problem of the law.
#[derive(Debug, Clone)]
pub struct Law {
    /// Queries and keys of each sequence.
    pub sequences: Vec<(usize, usize)>,
    pub ragged: bool,
    pub paged: bool,
    pub layout: KeyLayout,
    pub queries: Queries,
    pub causal: bool,
    pub window: Window,
    pub chunk: Option<usize>,
    pub alibi: bool,
    pub sinks: bool,
    pub softcap: Option<f32>,
    /// Added to the position of queries.
    pub shift: i64,
}

impl Law {
    pub fn new(sequences: &[(usize, usize)]) -> Law {
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

    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(|&(queries, _)| queries).sum()
    }

    /// `[B, Lq]` or `[total]`.
    pub fn token_dims(&self) -> Vec<usize> {
        match self.ragged {
            true => vec![self.tokens()],
            false => vec![self.sequences.len(), self.sequences[0].0],
        }
    }

    /// Shape of `[heads, tokens]`, then `dim`.
    pub fn heads_first(&self, heads: usize, dim: Option<usize>) -> Vec<usize> {
        [heads].into_iter().chain(self.token_dims()).chain(dim).collect()
    }

    /// `[heads, tokens, dim]` in memory as regard's `[tokens, heads, dim]`.
    pub fn view<'a, T: Element>(&self, data: &'a [T], dim: Option<usize>) -> Tensor<'a> {
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
pub struct Whole<T> {
    /// `[Hq, tokens, Dk]`.
    pub q: Vec<T>,
    /// The keys of each sequence, `[Lk, Hkv, D]`.
    pub k: Vec<Vec<T>>,
    pub v: Vec<Vec<T>>,
    pub slopes: Vec<f32>,
    pub sinks: Vec<f32>,
    /// Positions of each sequence's first query.
    pub q_offset: Vec<i32>,
    pub cu_seqlens_q: Vec<i32>,
}

impl<T: Number> Whole<T> {
    pub fn new(law: &Law, seed: u64) -> Whole<T> {
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

    pub fn attention<'a>(&'a self, law: &Law, keys: &'a Keys<T>) -> Attention<Tensor<'a>> {
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

/// The shard that is the whole.
pub const ONE: Shard = Shard { rank: 0, count: 1, layout: KeyLayout::Contiguous };

/// The keys of a rank.
pub struct Keys<T> {
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub capacity: usize,
    pub lens: Vec<i32>,
    pub offsets: Vec<i32>,
    pub table: Vec<i32>,
}

impl<T: Number> Keys<T> {
    /// Keys of a shard, batched or in pages. Unused slots hold NaN.
    pub fn for_shard(law: &Law, whole: &Whole<T>, shard: Shard) -> Keys<T> {
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

    pub fn view<'a>(&self, law: &Law, data: &'a [T], dim: usize) -> Tensor<'a> {
        let batch = law.sequences.len();
        let shape = match law.paged {
            true => [batch * self.capacity / BLOCK, BLOCK, KV_HEADS, dim],
            false => [batch, self.capacity, KV_HEADS, dim],
        };
        Tensor::new(data, shape).unwrap()
    }
}

/// The inputs of one device that has all keys, which are `keys`.
pub fn inputs_of_one<'a, T: Number>(
    law: &Law,
    whole: &'a Whole<T>,
    keys: &'a Keys<T>,
) -> Inputs<'a> {
    Inputs::new(
        law.view(&whole.q, Some(DIM)),
        keys.view(law, &keys.k, DIM),
        keys.view(law, &keys.v, VALUE_DIM),
        whole.attention(law, keys),
    )
}

/// The result of one rank: `[Hq / ranks, tokens, Dv]` and its log-sum-exp.
pub fn run_rank<N: Number, D: TestDevice, T: Transport<Queue = D::Queue>>(
    law: &Law,
    whole: &Whole<N>,
    rank: &Rank<D, T>,
) -> Result<(Vec<N>, Vec<f32>), Error> {
    let (number, count) = (rank.transport.rank(), rank.transport.size());
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
    let inputs = Inputs::new(law.view(&whole.q, Some(DIM)), k, v, attention);
    let problem = Problem::from_inputs(&inputs, N::DTYPE, true)?;
    let mut decode = ShardedDecode::new(rank, &problem, law.queries)?;

    let operands = Operands::new(&rank.device);
    let q = match law.queries {
        Queries::Sharded => {
            let own = &whole.q[number * heads * tokens * DIM..][..heads * tokens * DIM];
            Tensor::from_slice(own, &law.heads_first(heads, Some(DIM)), None)?
        }
        _ => inputs.q,
    };
    let (q, k, v) = (operands.copy(&q)?, operands.copy(&k)?, operands.copy(&v)?);
    let attention = attention.try_map(|_, it| operands.copy(&it))?;
    let mut out = Output::new(&rank.device, heads * tokens * VALUE_DIM)?;
    let mut lse = Output::new(&rank.device, heads * tokens)?;
    // Twice: nothing of a step stays in the next.
    for _ in 0..2 {
        let step = DecodeStep {
            q,
            k,
            v,
            attention,
            out: out.view(&law.heads_first(heads, Some(VALUE_DIM)))?,
            lse: Some(lse.view(&law.heads_first(heads, None))?),
        };
        // SAFETY: the operands live until the work is done.
        unsafe { decode.run(rank, step)? };
        rank.wait()?;
    }
    Ok((out.read()?, lse.read()?))
}

/// The results of all ranks are what one device gives, within its tolerance.
pub fn expect_one<T: Number>(law: &Law, judge: &Judge, parts: Vec<(Vec<T>, Vec<f32>)>) {
    let count = parts.len();
    let (out, lse): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let (out, lse) = (out.concat(), lse.concat());
    let verdict = judge.check(&law.view(&out, Some(VALUE_DIM)), Some(&law.view(&lse, None)));
    assert!(verdict.is_ok(), "{count} ranks, {law:?}: {}", verdict.unwrap_err());
}
