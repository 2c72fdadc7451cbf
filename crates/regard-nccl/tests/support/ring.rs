//! Problems of ring prefill and of head-parallel attention, run on ranks of any device.

use super::{Number, Operands, Output, Random, TestDevice};
use regard::oracle::Judge;
use regard::{Attention, Error, Inputs, Problem, QueryOffset, Tensor, Window};
use regard_nccl::{HeadParallel, HeadStep, Rank, RingPrefill, RingSequence, RingStep, Transport};

pub const HEADS: usize = 12;
pub const KV_HEADS: usize = 12;
pub const DIM: usize = 16;
pub const VALUE_DIM: usize = 8;

/// A problem of the law.
#[derive(Debug, Clone)]
pub struct Law {
    pub sequences: Vec<RingSequence>,
    pub ragged: bool,
    pub kv_heads: usize,
    pub variant: Options,
}

/// The features of a law.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub causal: bool,
    pub window: Window,
    pub chunk: Option<usize>,
    pub alibi: bool,
    pub sinks: bool,
    pub softcap: Option<f32>,
}

pub const CAUSAL: Options = Options {
    causal: true,
    window: Window { left: None, right: None },
    chunk: None,
    alibi: false,
    sinks: false,
    softcap: None,
};

impl Options {
    /// Combination `bits` of 32 of all features, with chunks of that many keys.
    pub fn combination(bits: usize, window: Window, chunk: usize) -> Options {
        let is = |bit: usize| bits >> bit & 1 == 1;
        Options {
            causal: is(0),
            window,
            chunk: is(1).then_some(chunk),
            alibi: is(2),
            sinks: is(3),
            softcap: is(4).then_some(2.0),
        }
    }
}

impl Law {
    /// A batch of sequences like this one.
    pub fn batch(sequence: RingSequence, count: usize, variant: Options) -> Law {
        Law { sequences: vec![sequence; count], ragged: false, kv_heads: 4, variant }
    }

    pub fn ragged(sequences: Vec<RingSequence>, variant: Options) -> Law {
        Law { sequences, ragged: true, kv_heads: 4, variant }
    }

    /// The rows of all sequences.
    pub fn rows(&self) -> usize {
        self.sequences.iter().map(|it| it.query_len).sum()
    }

    /// The keys of all sequences.
    pub fn keys(&self) -> usize {
        self.sequences.iter().map(|it| it.kv_len).sum()
    }

    /// The rows and the keys of a rank in the order of its tensors, by their number among the rows
    /// and keys of all sequences.
    pub fn of_rank(&self, rank: usize, ranks: usize) -> (Vec<usize>, Vec<usize>) {
        let (mut row, mut key) = (0, 0);
        // Of each sequence: its early and late rows; its share of the prefix with the early keys,
        // and the late keys.
        let mut rows: [Vec<Vec<usize>>; 2] = [Vec::new(), Vec::new()];
        let mut keys = rows.clone();
        for sequence in &self.sequences {
            for (of, chunk) in rows.iter_mut().zip(sequence.rows(rank, ranks)) {
                of.push(chunk.map(|i| row + i).collect());
            }
            let [prefix, early, late] = sequence.keys(rank, ranks);
            keys[0].push(prefix.chain(early).map(|j| key + j).collect());
            keys[1].push(late.map(|j| key + j).collect());
            (row, key) = (row + sequence.query_len, key + sequence.kv_len);
        }
        let order = |[early, late]: [Vec<Vec<usize>>; 2]| -> Vec<usize> {
            match self.ragged {
                true => early.into_iter().chain(late).flatten().collect(),
                false => early.into_iter().zip(late).flat_map(|(a, b)| [a, b]).flatten().collect(),
            }
        };
        (order(rows), order(keys))
    }

    /// The shape of a tensor of `tokens` tokens, `row` each.
    pub fn shape(&self, tokens: usize, row: &[usize]) -> Vec<usize> {
        let entries = self.sequences.len();
        let outer = if self.ragged { vec![tokens] } else { vec![entries, tokens / entries] };
        [&outer[..], row].concat()
    }
}

/// The operands of the whole.
pub struct Whole<T> {
    pub q: Vec<T>,
    pub k: Vec<T>,
    pub v: Vec<T>,
    pub slopes: Vec<f32>,
    pub sinks: Vec<f32>,
    pub cu_seqlens_q: Vec<i32>,
    pub cu_seqlens_k: Vec<i32>,
    pub q_offset: Vec<i32>,
}

impl<T: Number> Whole<T> {
    pub fn new(law: &Law) -> Whole<T> {
        let mut random = Random(law.rows() as u64);
        let sums = |of: fn(&RingSequence) -> usize| -> Vec<i32> {
            let ends = law.sequences.iter().scan(0, |end, it| {
                *end += of(it) as i32;
                Some(*end)
            });
            [0].into_iter().chain(ends).collect()
        };
        Whole {
            q: random.numbers(law.rows() * HEADS * DIM),
            k: random.numbers(law.keys() * law.kv_heads * DIM),
            v: random.numbers(law.keys() * law.kv_heads * VALUE_DIM),
            slopes: random.numbers::<f32>(HEADS).iter().map(|x| x * 0.1).collect(),
            sinks: random.numbers(HEADS),
            cu_seqlens_q: sums(|it| it.query_len),
            cu_seqlens_k: sums(|it| it.kv_len),
            q_offset: law.sequences.iter().map(|it| it.q_offset as i32).collect(),
        }
    }

    /// The options for heads `heads` of the whole, without lengths and positions.
    pub fn attention(&self, law: &Law, heads: std::ops::Range<usize>) -> Attention<Tensor<'_>> {
        let Options { causal, window, chunk, alibi, sinks, softcap } = law.variant;
        Attention {
            causal,
            window,
            chunk,
            softcap,
            alibi_slopes: alibi.then(|| Tensor::from(&self.slopes[heads.clone()])),
            sinks: sinks.then(|| Tensor::from(&self.sinks[heads])),
            ..Attention::default()
        }
    }

    pub fn inputs(&self, law: &Law) -> Inputs<'_> {
        Inputs::new(
            Tensor::from_slice(&self.q, &law.shape(law.rows(), &[HEADS, DIM]), None).unwrap(),
            Tensor::from_slice(&self.k, &law.shape(law.keys(), &[law.kv_heads, DIM]), None)
                .unwrap(),
            Tensor::from_slice(&self.v, &law.shape(law.keys(), &[law.kv_heads, VALUE_DIM]), None)
                .unwrap(),
            Attention {
                cu_seqlens_q: law.ragged.then(|| Tensor::from(&self.cu_seqlens_q)),
                cu_seqlens_k: law.ragged.then(|| Tensor::from(&self.cu_seqlens_k)),
                q_offset: QueryOffset::PerSequence(Tensor::from(&self.q_offset)),
                ..self.attention(law, 0..HEADS)
            },
        )
    }
}

/// Copies rows of `row` elements.
pub fn gather<T: Copy>(whole: &[T], rows: &[usize], row: usize) -> Vec<T> {
    rows.iter().flat_map(|&i| &whole[i * row..][..row]).copied().collect()
}

/// A rank's rows, by their number among all, with outputs and log-sum-exps.
pub type Part<T> = (Vec<usize>, Vec<T>, Vec<f32>);

pub fn plan_ring<D: TestDevice, T: Transport<Queue = D::Queue>>(
    law: &Law,
    problem: &Problem,
    rank: &Rank<D, T>,
) -> Result<RingPrefill<D>, Error> {
    let last_rows = |it: &RingSequence| *it == RingSequence::new(it.query_len, it.kv_len);
    match !law.ragged && law.sequences.iter().all(last_rows) {
        true => RingPrefill::new(rank, problem),
        false => RingPrefill::with_sequences(rank, problem, &law.sequences),
    }
}

pub fn run_ring<N: Number, D: TestDevice, T: Transport<Queue = D::Queue>>(
    law: &Law,
    whole: &Whole<N>,
    rank: &Rank<D, T>,
    ring: &mut RingPrefill<D>,
) -> Result<Part<N>, Error> {
    let (rows, keys) = law.of_rank(rank.transport.rank(), rank.transport.size());
    let q = gather(&whole.q, &rows, HEADS * DIM);
    let k = gather(&whole.k, &keys, law.kv_heads * DIM);
    let v = gather(&whole.v, &keys, law.kv_heads * VALUE_DIM);
    let operands = Operands::new(&rank.device);
    let operand = |numbers: &[N], shape: &[usize]| -> Result<_, Error> {
        operands.copy(&Tensor::from_slice(numbers, shape, None)?)
    };
    let q = operand(&q, &law.shape(rows.len(), &[HEADS, DIM]))?;
    let k = operand(&k, &law.shape(keys.len(), &[law.kv_heads, DIM]))?;
    let v = operand(&v, &law.shape(keys.len(), &[law.kv_heads, VALUE_DIM]))?;
    let attention = whole.attention(law, 0..HEADS).try_map(|_, it| operands.copy(&it))?;
    let mut out = Output::new(&rank.device, rows.len() * HEADS * VALUE_DIM)?;
    let mut lse = Output::new(&rank.device, rows.len() * HEADS)?;
    // Twice: nothing of a call stays in the next.
    for _ in 0..2 {
        let step = RingStep {
            q,
            k,
            v,
            attention,
            out: out.view(&law.shape(rows.len(), &[HEADS, VALUE_DIM]))?,
            lse: Some(lse.view(&law.shape(rows.len(), &[HEADS]))?),
        };
        // SAFETY: the operands live until the work is done.
        unsafe { ring.run(rank, step)? };
        rank.wait()?;
    }
    Ok((rows, out.read()?, lse.read()?))
}

/// The results of all ranks are what one device gives, within its tolerance.
pub fn expect_one<T: Number>(law: &Law, judge: &Judge, parts: Vec<Part<T>>) {
    let row = HEADS * VALUE_DIM;
    let mut out = vec![T::from_f32(f32::NAN); law.rows() * row];
    let mut lse = vec![f32::NAN; law.rows() * HEADS];
    let count = parts.len();
    for (rows, part, part_lse) in parts {
        for (from, to) in rows.into_iter().enumerate() {
            out[to * row..][..row].copy_from_slice(&part[from * row..][..row]);
            lse[to * HEADS..][..HEADS].copy_from_slice(&part_lse[from * HEADS..][..HEADS]);
        }
    }
    let out = Tensor::from_slice(&out, &law.shape(law.rows(), &[HEADS, VALUE_DIM]), None).unwrap();
    let lse = Tensor::from_slice(&lse, &law.shape(law.rows(), &[HEADS]), None).unwrap();
    let verdict = judge.check(&out, Some(&lse));
    assert!(verdict.is_ok(), "{count} ranks, {law:?}: {}", verdict.unwrap_err());
}

/// A rank's heads of all rows: `[HEADS, rows, VALUE_DIM]` of its own rows.
pub fn run_heads<N: Number, D: TestDevice, T: Transport<Queue = D::Queue>>(
    law: &Law,
    whole: &Whole<N>,
    rank: &Rank<D, T>,
) -> Result<Vec<N>, Error> {
    let problem = Problem::from_inputs(&whole.inputs(law), N::DTYPE, false)?;
    let mut heads = HeadParallel::new(rank, &problem)?;
    let (number, count) = (rank.transport.rank(), rank.transport.size());
    let rows = law.rows() / count;
    let own: Vec<usize> = (number * rows..(number + 1) * rows).collect();
    // Heads outermost.
    let cut = |whole: &[N], heads: usize, dim: usize| -> Vec<N> {
        let rows_first = gather(whole, &own, heads * dim);
        let order = (0..heads).flat_map(|head| (0..rows).map(move |i| (i * heads + head) * dim));
        order.flat_map(|at| rows_first[at..][..dim].to_vec()).collect()
    };
    let q = cut(&whole.q, HEADS, DIM);
    let (k, v) = (cut(&whole.k, law.kv_heads, DIM), cut(&whole.v, law.kv_heads, VALUE_DIM));
    let own_heads = number * HEADS / count..(number + 1) * HEADS / count;
    let operands = Operands::new(&rank.device);
    let operand = |numbers: &[N], shape| operands.copy(&Tensor::new(numbers, shape)?);
    let q = operand(&q, [HEADS, rows, DIM])?;
    let k = operand(&k, [law.kv_heads, rows, DIM])?;
    let v = operand(&v, [law.kv_heads, rows, VALUE_DIM])?;
    let attention = whole.attention(law, own_heads).try_map(|_, it| operands.copy(&it))?;
    let mut out = Output::new(&rank.device, HEADS * rows * VALUE_DIM)?;
    for _ in 0..2 {
        let out = out.view(&[HEADS, rows, VALUE_DIM])?;
        // SAFETY: the operands live until the work is done.
        unsafe { heads.run(rank, HeadStep { q, k, v, attention, out })? };
        rank.wait()?;
    }
    out.read()
}

/// The results of all ranks of head-parallel attention are what one device gives.
pub fn expect_heads<T: Number>(law: &Law, judge: &Judge, parts: &[Vec<T>]) {
    let (len, count) = (law.rows(), parts.len());
    let rows = len / count;
    let mut out = vec![T::from_f32(f32::NAN); len * HEADS * VALUE_DIM];
    for (p, head) in (0..len).flat_map(|p| (0..HEADS).map(move |head| (p, head))) {
        let from = (head * rows + p % rows) * VALUE_DIM;
        out[(p * HEADS + head) * VALUE_DIM..][..VALUE_DIM]
            .copy_from_slice(&parts[p / rows][from..][..VALUE_DIM]);
    }
    let verdict = judge.check(&Tensor::new(&out, [1, len, HEADS, VALUE_DIM]).unwrap(), None);
    assert!(verdict.is_ok(), "{count} ranks, {law:?}: {}", verdict.unwrap_err());
}
