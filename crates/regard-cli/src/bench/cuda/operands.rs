//! Operands for a GPU: gigabytes, so numbers repeat after a length that no shape divides.

use super::super::operands::shard_of_two;
use super::super::shapes::{Layout, MIXED, Target};
use super::lists::Lists;
use crate::models::query_lengths;
use regard::{
    Attention, DType, Error, KeyOffset, KeyPositions, KvStorage, Problem, QueryOffset,
    QueryStorage, Values,
};
use regard_cases::{Array, Case, Data, Granularity, KvLayout, Spec};

/// Random numbers before they repeat: a prime, so that no two rows or heads get the same.
const PERIOD: usize = 1_048_583;

/// Likewise of blocks with 32 numbers each.
const PERIOD_BLOCKS: usize = 32_771;

/// Numbers of this magnitude get the largest code. Random numbers are below 3.5.
const LARGEST: f32 = 4.0;

/// The operands of one target.
pub struct Operands {
    case: Case,
}

impl Operands {
    /// Makes them.
    ///
    /// # Errors
    /// If the target has a feature that is not measured on a GPU, or memory does not suffice.
    pub fn new(target: &Target) -> Result<Operands, Error> {
        let problem = &target.problem;
        let head_major = target.layout == Layout::HeadMajor;
        if problem.variant.tree {
            return Err(Error::argument("shape", "with a tree", "a shape without, on a GPU"));
        }
        let ragged_queries = matches!(problem.queries, QueryStorage::Ragged { .. });
        let query_lens = query_lengths(problem, target.prompt_every);
        let q = queries(target, &query_lens)?;
        let Keys { k, mut v, mut kv_lens, cu_seqlens_k, mut block_table } = Keys::new(target)?;
        let paged = block_table.is_some();
        let lists = Lists::new(target, &query_lens, block_table.as_ref())?;
        // Slots and pages of the pool have no positions.
        if lists.indices_are_slots || lists.page_indices.is_some() {
            (kv_lens, block_table) = (None, None);
        }
        let has_own_values = problem.values == Values::Separate;
        if !has_own_values {
            v = k.prefix(problem.value_dim)?;
        }
        let cu_seqlens_q = ragged_queries.then(|| starts(&query_lens)).transpose()?;
        let mask = problem
            .variant
            .mask
            .map(|dtype| mask(dtype, problem.query_len, problem.kv_len))
            .transpose()?;
        // Small vectors as the list of cases has them.
        let small = Spec {
            alibi: problem.variant.alibi,
            sinks: problem.variant.sinks,
            ..Spec::new("small")
                .lengths(&[(1, 1)])
                .heads(problem.query_heads, problem.kv_heads)
                .dims(1, 1)
        };
        let small = small.generate();
        let shard = shard_of_two(problem);
        let rotary_k = rotary_keys(problem, &k)?;
        let k_scales = scales(target, 4, &k)?;
        let v_scales = if has_own_values { scales(target, 5, &v)? } else { None };
        Ok(Operands {
            case: Case {
                layout: match head_major && !ragged_queries {
                    true => regard_cases::Layout::Bhsd,
                    false => regard_cases::Layout::Bshd,
                },
                kv_layout: if head_major && paged { KvLayout::Hnd } else { KvLayout::Nhd },
                attention: Attention {
                    causal: problem.variant.causal,
                    window: problem.variant.window,
                    chunk: problem.variant.chunk,
                    q_offset: shard.map_or(QueryOffset::BottomRight, |(_, position)| {
                        QueryOffset::Same(position)
                    }),
                    key_positions: shard.map(|(keys, _)| KeyPositions {
                        offset: KeyOffset::Same(keys.offset),
                        stride: keys.stride,
                    }),
                    scale: target.scale,
                    softcap: problem.variant.softcap.then_some(target.softcap),
                    mask,
                    kv_lens,
                    cu_seqlens_q,
                    cu_seqlens_k,
                    block_table,
                    prefix_groups: prefix_groups(problem)?,
                    prefix_lens: prefix_lens(target)?,
                    k_scales,
                    v_scales,
                    values: problem.values,
                    rotary_k,
                    key_indices: lists.key_indices,
                    indices_are_slots: lists.indices_are_slots,
                    page_indices: lists.page_indices,
                    batch_invariant: problem.batch_invariant,
                    // Slopes and sinks.
                    ..small.attention
                },
                out_dtype: Some(problem.out_dtype),
                ..Case::new(&target.name, q, k, v)
            },
        })
    }

    /// The case.
    pub fn case(&self) -> &Case {
        &self.case
    }
}

/// Queries, ragged or batched.
fn queries(target: &Target, query_lens: &[usize]) -> Result<Array, Error> {
    let problem = &target.problem;
    let noise = Noise::new(problem.dtype);
    if let QueryStorage::Ragged { .. } = problem.queries {
        let total = query_lens.iter().sum();
        return noise.array(1, &[total, problem.query_heads, problem.head_dim]);
    }
    let shape = [problem.batch, problem.query_len, problem.query_heads, problem.head_dim];
    noise.array(1, &in_order(shape, target.layout == Layout::HeadMajor))
}

/// The prefix group of each sequence, in turn.
fn prefix_groups(problem: &Problem) -> Result<Option<Array>, Error> {
    let groups = problem.prefix_groups;
    let group = |sequence: usize| (sequence % groups) as i32;
    (groups > 0)
        .then(|| ints((0..problem.batch).map(group).collect(), &[problem.batch]))
        .transpose()
}

/// Keys per shared prefix.
fn prefix_lens(target: &Target) -> Result<Option<Array>, Error> {
    let groups = target.problem.prefix_groups;
    (groups > 0).then(|| ints(vec![target.shared as i32; groups], &[groups])).transpose()
}

/// Keys and values, and the place of each sequence's.
struct Keys {
    k: Array,
    v: Array,
    kv_lens: Option<Array>,
    cu_seqlens_k: Option<Array>,
    block_table: Option<Array>,
}

impl Keys {
    fn new(target: &Target) -> Result<Keys, Error> {
        let problem = &target.problem;
        // Values that are a prefix of the keys are theirs.
        let value_dtype = match problem.values {
            Values::KeyPrefix => problem.key_dtype,
            _ => problem.value_dtype,
        };
        let stored = [Noise::new(problem.key_dtype), Noise::new(value_dtype)];
        let head_major = target.layout == Layout::HeadMajor;
        let heads = problem.kv_heads;
        let dims = [
            (problem.head_dim - problem.rotary_dim) / problem.key_dtype.values(),
            problem.value_dim / problem.value_dtype.values(),
        ];
        let lens = lengths(target);
        let (mut kv_lens, mut cu_seqlens_k, mut block_table) = (None, None, None);
        let [k, v] = match problem.keys {
            KvStorage::Batched => [0, 1].map(|i| {
                let shape = [problem.batch, problem.kv_len, heads, dims[i]];
                stored[i].array(2 + i, &in_order(shape, head_major))
            }),
            KvStorage::Ragged => {
                cu_seqlens_k = Some(starts(&lens)?);
                [0, 1].map(|i| stored[i].array(2 + i, &[lens.iter().sum(), heads, dims[i]]))
            }
            KvStorage::Paged { block_size } => {
                let shared =
                    Shared { groups: problem.prefix_groups, pages: target.shared / block_size };
                let (table, blocks) = pages(&lens, block_size, shared)?;
                block_table = Some(table);
                kv_lens = Some(ints(lens.iter().map(|&len| len as i32).collect(), &[lens.len()])?);
                [0, 1].map(|i| {
                    let shape = [blocks, block_size, heads, dims[i]];
                    stored[i].array(2 + i, &in_order(shape, head_major))
                })
            }
            other => unreachable!("the bench has no shapes with {other:?} keys"),
        };
        Ok(Keys { k: k?, v: v?, kv_lens, cu_seqlens_k, block_table })
    }
}

/// The last dims of keys beside `k`, if they are in a tensor of their own.
fn rotary_keys(problem: &Problem, k: &Array) -> Result<Option<Array>, Error> {
    let mut shape = k.shape().to_vec();
    let Some(dim) = shape.last_mut().filter(|_| problem.rotary_dim > 0) else { return Ok(None) };
    *dim = problem.rotary_dim / problem.key_dtype.values();
    Noise::new(problem.key_dtype).array(6, &shape).map(Some)
}

/// A shape with heads before tokens, if it is to be so.
fn in_order(shape: [usize; 4], head_major: bool) -> [usize; 4] {
    match head_major {
        true => [shape[0], shape[2], shape[1], shape[3]],
        false => shape,
    }
}

/// The start of each sequence, and the end of the last one.
fn starts(lens: &[usize]) -> Result<Array, Error> {
    let mut sum = 0;
    let ends = lens.iter().map(|len| {
        sum += len;
        sum as i32
    });
    ints([0].into_iter().chain(ends).collect(), &[lens.len() + 1])
}

/// Keys of each sequence.
fn lengths(target: &Target) -> Vec<usize> {
    let mut lens = vec![target.problem.kv_len; target.problem.batch];
    if target.base == MIXED.0 {
        // The long one stands among the others.
        let long = lens.len() / 2;
        lens.iter_mut().enumerate().filter(|(i, _)| *i != long).for_each(|(_, len)| *len = MIXED.1);
    }
    lens
}

/// Scales of keys or values, if they are codes: in their order of dimensions, some larger than
/// others.
fn scales(target: &Target, which: usize, codes: &Array) -> Result<Option<Array>, Error> {
    if !codes.dtype().is_code() {
        return Ok(None);
    }
    let problem = &target.problem;
    let mut shape = codes.shape()[..codes.shape().len() - 1].to_vec();
    let ragged = problem.keys == KvStorage::Ragged;
    let head_major = target.layout == Layout::HeadMajor && !ragged;
    let head = if head_major { 1 } else { shape.len() - 1 };
    let token = if head_major { 2 } else { shape.len() - 2 };
    let all = shape.clone();
    match target.granularity {
        Granularity::Tensor => shape.fill(1),
        Granularity::Token => {}
        Granularity::Page if !ragged => shape[token] = 1,
        Granularity::Head | Granularity::Page => {
            shape.fill(1);
            shape[head] = all[head];
        }
    }
    let mut random = XorShift(0x0f1e_2d3c_4b5a_6978 + which as u64);
    let fitted = LARGEST / codes.dtype().largest_code();
    let count = shape.iter().product();
    let numbers: Vec<f32> =
        (0..count).map(|_| fitted * [0.7, 0.8, 1.0, 1.3][(random.next() % 4) as usize]).collect();
    Ok(Some(Array::new(numbers, &shape)?))
}

/// Rows and keys of a block of a boolean mask.
const MASK_BLOCK: usize = 512;

/// A boolean mask that keeps every other block of rows and keys, like the black squares of a chess
/// board, or an additive one of numbers between 0 and 1; the same for all sequences and heads.
fn mask(dtype: DType, rows: usize, keys: usize) -> Result<Array, Error> {
    let mut random = XorShift(0x1357_9bdf_0246_8ace);
    let mut numbers =
        || (0..rows * keys).map(|_| random.next() as f32 / (1u64 << 53) as f32).collect::<Vec<_>>();
    let data: Data = match dtype {
        DType::Bool => {
            let kept = |i: usize| i / keys / MASK_BLOCK % 2 == i % keys / MASK_BLOCK % 2;
            (0..rows * keys).map(|i| u8::from(kept(i))).collect::<Vec<u8>>().into()
        }
        dtype => Data::from_numbers(dtype, numbers().into_iter().map(f64::from)),
    };
    Array::new(data, &[1, 1, rows, keys])
}

fn ints(values: Vec<i32>, shape: &[usize]) -> Result<Array, Error> {
    Array::new(values, shape)
}

/// A block table with pages in random order, and the number of pages.
fn pages(lens: &[usize], block_size: usize, shared: Shared) -> Result<(Array, usize), Error> {
    let needed = |len: usize| len.div_ceil(block_size);
    let columns = lens.iter().map(|&len| needed(len)).max().unwrap_or(0);
    let own: usize = lens.iter().map(|&len| needed(len) - shared.pages).sum();
    let blocks = own + shared.groups * shared.pages;
    let mut order: Vec<i32> = (0..blocks as i32).collect();
    let mut random = XorShift(0x2545_f491_4f6c_dd1d);
    for i in (1..order.len()).rev() {
        order.swap(i, (random.next() % (i as u64 + 1)) as usize);
    }
    let prefixes: Vec<i32> = order.drain(own..).collect();
    let mut order = order.into_iter();
    let mut table = vec![-1; lens.len() * columns];
    for (i, (row, &len)) in table.chunks_mut(columns.max(1)).zip(lens).enumerate() {
        if shared.pages > 0 {
            let prefix = &prefixes[i % shared.groups * shared.pages..][..shared.pages];
            row[..shared.pages].copy_from_slice(prefix);
        }
        row[shared.pages..needed(len)].fill_with(|| order.next().expect("a page for each place"));
    }
    Ok((ints(table, &[lens.len(), columns])?, blocks))
}

/// Leading pages that sequences share, dealt to groups in turn.
#[derive(Clone, Copy)]
struct Shared {
    groups: usize,
    pages: usize,
}

struct XorShift(u64);

impl XorShift {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }

    /// Roughly normal, with mean 0 and variance 1.
    fn normal(&mut self) -> f32 {
        let sum: f64 = (0..4).map(|_| self.next() as f64 / (1u64 << 53) as f64).sum();
        ((sum - 2.0) * 3f64.sqrt()) as f32
    }
}

/// One period of random numbers.
struct Noise {
    period: Data,
}

impl Noise {
    fn new(dtype: DType) -> Noise {
        let mut random = XorShift(0x9e37_79b9_7f4a_7c15);
        let count = if dtype.is_block() { PERIOD_BLOCKS * dtype.values() } else { PERIOD };
        // Codes are of numbers over a scale.
        let factor = if dtype.is_code() { dtype.largest_code() / LARGEST } else { 1.0 };
        let numbers = (0..count).map(|_| f64::from(random.normal() * factor));
        Noise { period: Data::from_numbers(dtype, numbers) }
    }

    /// An array of them, from a place of the period that is `which`'s own.
    fn array(&self, which: usize, shape: &[usize]) -> Result<Array, Error> {
        fn repeated<T: Copy>(period: &[T], which: usize, count: usize) -> Result<Data, Error>
        where
            Data: From<Vec<T>>,
        {
            let mut all = Vec::new();
            all.try_reserve_exact(count).map_err(|_| {
                Error::argument("shape", format!("{count} elements"), "what fits in memory")
            })?;
            let mut start = which * (period.len() / 5) % period.len();
            while all.len() < count {
                let here = (period.len() - start).min(count - all.len());
                all.extend_from_slice(&period[start..start + here]);
                start = 0;
            }
            Ok(all.into())
        }
        let count = shape.iter().product();
        let data = match &self.period {
            Data::F32(period) => repeated(period, which, count)?,
            Data::F16(period) => repeated(period, which, count)?,
            Data::BF16(period) => repeated(period, which, count)?,
            Data::E4M3(period) => repeated(period, which, count)?,
            Data::E5M2(period) => repeated(period, which, count)?,
            Data::I8(period) => repeated(period, which, count)?,
            Data::Q8_0(period) => repeated(period, which, count)?,
            Data::Q4_0(period) => repeated(period, which, count)?,
            Data::Mla656(period) => repeated(period, which, count)?,
            Data::I32(period) => repeated(period, which, count)?,
            Data::Bool(period) => repeated(period, which, count)?,
            _ => unreachable!("operands are made of the types above"),
        };
        Array::new(data, shape)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::shapes::{NAMED_CUDA, Wish};
    use super::*;

    #[test]
    fn operands_pose_the_problem_that_was_asked_for() {
        let shapes: Vec<String> = [
            "b=2 hq=4 hkv=2 d=16 lq=3 lk=40 causal window=8,0 softcap alibi sinks",
            "b=2 hq=4 hkv=2 d=16 dv=8 lq=3 lk=40 page=16 out=f32 mask=bool",
            "b=2 hq=4 hkv=2 d=16 lq=40 ragged invariant",
            "b=2 hq=4 hkv=2 d=32 dv=64 lq=3 lk=40 page=16 k=e4m3 v=q4_0 scale=page-head",
            "b=2 hq=4 hkv=2 d=32 dv=64 lq=3 lk=40 k=f32 v=i8 scale=token-head",
            "b=2 hq=4 hkv=2 d=32 lq=40 ragged kv=e5m2 scale=tensor",
            "b=2 hq=4 hkv=2 d=32 lq=3 lk=40 causal page=16 list=9 list-heads",
            "b=2 hq=4 hkv=1 d=32 dv=16 lq=3 lk=40 latent page=16 list=9 slots",
            "b=2 hq=4 hkv=2 d=32 lq=3 lk=64 page=16 list=32 list-pages list-heads",
        ]
        .map(String::from)
        .into();
        let wish = Wish {
            named: &NAMED_CUDA,
            names: &[],
            shapes: &shapes,
            variants: &[],
            dtypes: &[DType::F16],
            layouts: &[Layout::TokenMajor],
            lengths: &[],
            warm: false,
        };
        for target in wish.targets().unwrap() {
            let operands = Operands::new(&target).unwrap();
            let found = crate::case::problem(operands.case()).unwrap();
            // Tables have whole pages, and cases ask for the log-sum-exp.
            let wished =
                regard::Problem { kv_len: found.kv_len, lse: true, ..target.problem.clone() };
            assert_eq!(found, wished);
        }
    }

    #[test]
    fn every_named_shape_is_one() {
        let names: Vec<String> = vec!["all".into()];
        let wish = Wish {
            named: &NAMED_CUDA,
            names: &names,
            shapes: &[],
            variants: &[],
            dtypes: &[DType::BF16],
            layouts: &[],
            lengths: &[],
            warm: false,
        };
        let targets = wish.targets().unwrap();
        assert_eq!(targets.len(), NAMED_CUDA.len());
        let mixed = targets.iter().find(|target| target.base == MIXED.0).unwrap();
        assert_eq!(lengths(mixed).iter().sum::<usize>(), 131_072 + 63 * 1024);
    }
}
