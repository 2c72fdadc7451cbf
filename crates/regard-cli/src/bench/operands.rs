//! Operands of a problem; several copies of its keys and values if runs rotate.

use super::shapes::{Layout, Target};
use crate::models::query_lengths;
use regard::{
    DType, Error, KvStorage, Outputs, Problem, QueryStorage, SequenceKeys, Shard, Values, bf16, f16,
};
use regard_cases::{
    Array, CacheSpec, Case, Data, Entries, Granularity, KeyPositionsSpec, Keys, KvLayout,
};
use regard_cases::{Caches, ListSpec, OffsetSpec, PrefixSpec, Scales, SequenceSpec, Spec};

/// The keys of a problem whose keys are a shard: the shard of the second of two devices. Also the
/// position of the first query: queries are the last tokens.
pub fn shard_of_two(problem: &Problem) -> Option<(SequenceKeys, i64)> {
    let layout = problem.variant.key_positions?;
    let tokens = 2 * problem.kv_len;
    let keys = Shard { rank: 1, count: 2, layout }.positions(tokens).ok()?;
    Some((keys, tokens as i64 - problem.query_len as i64))
}

/// The operands of one target. The copies hold the same numbers at different addresses.
pub struct Operands {
    copies: Vec<Case>,
    out: Array,
    lse: Option<Array>,
}

/// A boolean mask hides one key in this many, at random: no tile is empty, none is full.
const HIDDEN: u64 = 8;

impl Operands {
    /// Makes them.
    ///
    /// # Errors
    /// If the layout does not fit the problem, or the problem does not fit in memory.
    pub fn new(target: &Target) -> Result<Operands, Error> {
        let case = case(target)?;
        let has_own_values = target.problem.values == Values::Separate;
        let kv_bytes = bytes(&case.k) + if has_own_values { bytes(&case.v) } else { 0 };
        let mut copies = Vec::new();
        for _ in 1..target.copies(kv_bytes) {
            let k = copy(&case.k)?;
            let v = match has_own_values {
                true => copy(&case.v)?,
                false => k.prefix(target.problem.value_dim)?,
            };
            let mut other = Case { k, v, ..case.clone() };
            // Scales are read with the codes, so they are as cold as the codes.
            for scales in [&mut other.attention.k_scales, &mut other.attention.v_scales] {
                *scales = scales.as_ref().map(copy).transpose()?;
            }
            copies.push(other);
        }
        let mut shape = case.q.shape().to_vec();
        let heads = shape.len() - 1;
        shape[heads] = target.problem.value_dim;
        let lse = target.problem.lse.then(|| Array::unwritten(DType::F32, &shape[..heads]));
        copies.push(case);
        Ok(Operands { copies, out: Array::unwritten(target.problem.out_dtype, &shape), lse })
    }

    /// The copies.
    pub fn copies(&self) -> &[Case] {
        &self.copies
    }

    /// The copies, with outputs to write in the same order of dimensions.
    ///
    /// # Errors
    /// None for operands that [`Operands::new`] made.
    pub fn parts(&mut self) -> Result<(&[Case], Outputs<'_>), Error> {
        let bhsd = is_head_major(&self.copies[0]);
        let mut out = self.out.view_mut()?;
        let mut lse = self.lse.as_mut().map(Array::view_mut).transpose()?;
        if bhsd {
            out = out.bhsd();
            lse = lse.map(|lse| lse.permute([0, 2, 1]));
        }
        Ok((&self.copies, Outputs { out, lse }))
    }

    /// The written outputs.
    pub fn outputs(&self) -> (&Array, Option<&Array>) {
        (&self.out, self.lse.as_ref())
    }

    /// Puts NaN where the next run has to write.
    pub fn unwrite(&mut self) {
        self.out = Array::unwritten(self.out.dtype(), self.out.shape());
        self.lse = self.lse.as_ref().map(|lse| Array::unwritten(lse.dtype(), lse.shape()));
    }
}

/// Maximum bytes that a target's operands take on the host with that many copies of keys and
/// values. Memory to make them, and memory that the oracle reads for a row, is included. Counted so
/// that it does not overflow, and nothing is allocated.
pub fn host_bytes(target: &Target, copies: impl FnOnce(u64) -> usize) -> u64 {
    let problem = &target.problem;
    let product =
        |numbers: &[usize]| numbers.iter().fold(1u64, |all, &n| all.saturating_mul(n as u64));
    let sum = |numbers: &[u64]| numbers.iter().fold(0u64, |all, &n| all.saturating_add(n));
    // Numbers are made as `f32`.
    const MAKING: usize = 4;
    let size = problem.dtype.size();
    // The list of cases leaves up to two blocks unused.
    let slots = match problem.keys {
        KvStorage::Paged { block_size } => {
            let blocks =
                product(&[problem.batch, problem.kv_len.div_ceil(block_size)]).saturating_add(2);
            blocks.saturating_mul(block_size as u64)
        }
        KvStorage::Batched | KvStorage::Ragged => product(&[problem.batch, problem.kv_len]),
        other => unreachable!("the bench has no shapes with {other:?} keys"),
    };
    // A second cache has the same keys, in pages of up to 66 slots.
    let slots = match problem.key_lists.and_then(|lists| lists.second) {
        Some(_) => sum(&[slots.saturating_mul(2), product(&[problem.batch, 66]), 2 * 66]),
        None => slots,
    };
    let keys = slots.saturating_mul(product(&[problem.kv_heads, problem.head_dim]));
    let values = slots.saturating_mul(product(&[problem.kv_heads, problem.value_dim]));
    let stored = |count: u64, dtype: DType| {
        (count / dtype.values() as u64).saturating_mul(dtype.size() as u64)
    };
    let scale_bytes = |dtype: DType| match (dtype.is_code(), target.granularity) {
        (false, _) => 0,
        (true, Granularity::Token) => slots.saturating_mul(product(&[problem.kv_heads, 4])),
        // A page has one slot at least.
        (true, Granularity::Page) => match problem.keys {
            KvStorage::Paged { block_size } => {
                (slots / block_size as u64).saturating_mul(product(&[problem.kv_heads, 4]))
            }
            _ => product(&[problem.batch, problem.kv_heads, 4]),
        },
        (true, _) => product(&[problem.kv_heads, 4]),
    };
    let kv_bytes = sum(&[
        stored(keys, problem.key_dtype),
        stored(values, problem.value_dtype),
        scale_bytes(problem.key_dtype),
        scale_bytes(problem.value_dtype),
    ]);
    let rows = product(&[problem.batch, problem.query_len, problem.query_heads]);
    let row_bytes =
        problem.head_dim * (size + MAKING) + 2 * problem.value_dim * problem.out_dtype.size();
    let mask = product(&[problem.query_len, problem.kv_len]);
    let mask_bytes = problem.variant.mask.map_or(0, |mask| mask.size() as u64);
    let tree = product(&[problem.batch, problem.query_len, problem.query_len.div_ceil(32)]);
    sum(&[
        kv_bytes.saturating_mul(copies(kv_bytes) as u64),
        keys.max(values).saturating_mul(MAKING as u64),
        rows.saturating_mul((row_bytes + 4 + size_of::<regard::oracle::Row>()) as u64),
        mask.saturating_mul(mask_bytes),
        if problem.variant.tree { tree.saturating_mul(4) } else { 0 },
        problem.key_lists.map_or(0, |lists| {
            let heads = if lists.per_head { problem.kv_heads } else { 1 };
            let entries = lists.len.saturating_add(lists.second.unwrap_or(0));
            product(&[problem.batch, problem.query_len, heads, entries, 4])
        }),
        // Scores and probabilities of a row, in f64, by the reference and by the naive computation.
        product(&[problem.kv_len, 4 * 8]),
        // Lengths, and block tables with at most one block per key.
        product(&[problem.batch, 64]),
        if let KvStorage::Paged { block_size } = problem.keys {
            slots / block_size as u64 * 16
        } else {
            0
        },
    ])
}

fn is_head_major(case: &Case) -> bool {
    case.layout == regard_cases::Layout::Bhsd && case.attention.cu_seqlens_q.is_none()
}

fn case(target: &Target) -> Result<Case, Error> {
    let problem = &target.problem;
    let ragged = matches!(problem.queries, QueryStorage::Ragged { .. });
    let head_major = target.layout == Layout::HeadMajor;
    let keys = match problem.keys {
        KvStorage::Batched => Keys::Batched { slack: 0 },
        KvStorage::Ragged => Keys::Ragged { slack: 0 },
        KvStorage::Paged { block_size } => Keys::Paged { block_size, interleaved: false },
        other => unreachable!("the bench has no shapes with {other:?} keys"),
    };
    if head_major && keys == (Keys::Ragged { slack: 0 }) {
        return Err(Error::argument("layout", "\"head\" with ragged keys", "token"));
    }
    let paged = matches!(keys, Keys::Paged { .. });
    let query_lens = query_lengths(problem, target.prompt_every);
    let stored = |dtype: DType| (dtype != problem.dtype).then_some(dtype);
    let sequence = |(id, q_len)| SequenceSpec { id: id as u64, q_len, kv_len: problem.kv_len };
    let shard = shard_of_two(problem);
    let spec = Spec {
        dtype: problem.dtype,
        out_dtype: problem.out_dtype,
        cache: CacheSpec {
            k: stored(problem.key_dtype),
            v: stored(problem.value_dtype),
            granularity: target.granularity,
            scales: Scales::Fitted,
        },
        values: problem.values,
        query_heads: problem.query_heads,
        kv_heads: problem.kv_heads,
        head_dim: problem.head_dim,
        value_dim: problem.value_dim,
        rotary_dim: problem.rotary_dim,
        sequences: query_lens.into_iter().enumerate().map(sequence).collect(),
        ragged_queries: ragged,
        keys,
        layout: match head_major && !paged {
            true => regard_cases::Layout::Bhsd,
            false => regard_cases::Layout::Bshd,
        },
        kv_layout: if head_major && paged { KvLayout::Hnd } else { KvLayout::Nhd },
        causal: problem.variant.causal,
        window: problem.variant.window,
        chunk: problem.variant.chunk,
        scale: target.scale,
        softcap: problem.variant.softcap.then_some(target.softcap),
        alibi: problem.variant.alibi,
        sinks: problem.variant.sinks,
        tree: problem.variant.tree,
        offset: shard.map_or(OffsetSpec::BottomRight, |(_, position)| OffsetSpec::Same(position)),
        key_positions: shard.map(|(keys, _)| KeyPositionsSpec {
            offsets: vec![keys.offset as i32],
            stride: keys.stride,
        }),
        // Different keys, spread evenly over the sequence.
        lists: problem.key_lists.map(|lists| ListSpec {
            per_head: lists.per_head,
            of: lists.entries,
            caches: lists.second.map_or(Caches::One, |second| Caches::Two { second }),
            ..ListSpec::new(lists.len + lists.second.unwrap_or(0), Entries::Sorted)
        }),
        prefixes: (problem.prefix_groups > 0).then(|| PrefixSpec {
            groups: (0..problem.prefix_groups as i32).collect(),
            lens: vec![target.shared; problem.prefix_groups],
        }),
        batch_invariant: problem.batch_invariant,
        // Numbers everywhere: only tests poison unused slots.
        poison: false,
        ..Spec::new(&target.name)
    };
    let mut case = spec.with_list_offsets().generate();
    if let Some(dtype) = problem.variant.mask {
        let shape = [1, 1, problem.query_len, problem.kv_len];
        case.attention.mask =
            Some(Array::new(mask(dtype, problem.query_len * problem.kv_len), &shape)?);
    }
    Ok(case)
}

/// A boolean mask, or an additive one of numbers between 0 and 1.
fn mask(dtype: DType, length: usize) -> Data {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut bits = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state >> 40
    };
    let mut number = || bits() as f32 / (1 << 24) as f32;
    match dtype {
        DType::Bool => (0..length)
            .map(|_| u8::from(!bits().is_multiple_of(HIDDEN)))
            .collect::<Vec<u8>>()
            .into(),
        DType::F16 => (0..length).map(|_| f16::from_f32(number())).collect::<Vec<_>>().into(),
        DType::BF16 => (0..length).map(|_| bf16::from_f32(number())).collect::<Vec<_>>().into(),
        _ => (0..length).map(|_| number()).collect::<Vec<f32>>().into(),
    }
}

/// Bytes of an array's elements.
fn bytes(array: &Array) -> u64 {
    array.data().len() as u64 * array.dtype().size() as u64
}

/// The same array somewhere else.
fn copy(array: &Array) -> Result<Array, Error> {
    let data = Data::from_le_bytes(array.dtype(), &array.data().to_le_bytes());
    Array::strided(data, 0, array.shape(), array.view()?.strides())
}

#[cfg(test)]
mod tests {
    use super::super::shapes::Wish;
    use super::*;

    #[test]
    fn operand_bytes_are_known_before_allocation() {
        let shapes = [
            "hq=1 d=8 lq=1 lk=2147483647 dtype=f32",
            "b=2147483647 hq=1 d=576 lq=1 lk=2147483647 dtype=f32",
            "hq=1 d=8 lq=1 lk=1 page=2147483647 dtype=f32",
            "hq=1 d=8 lq=2147483647 lk=2147483647 mask=f32 tree dtype=f32",
            "b=2 hq=4 hkv=2 d=16 lq=3 lk=40 dtype=f32",
        ]
        .map(String::from);
        let wish = Wish {
            named: &crate::bench::NAMED,
            names: &[],
            shapes: &shapes,
            variants: &[],
            dtypes: &[],
            layouts: &[],
            lengths: &[],
            warm: true,
        };
        let targets = wish.targets().unwrap();
        let bytes: Vec<_> =
            targets.iter().map(|target| host_bytes(target, |bytes| target.copies(bytes))).collect();
        let made = Operands::new(&targets[4]).unwrap();
        let case = &made.copies()[0];
        let all = [&case.q, &case.k, &case.v]
            .map(|array| array.data().len() as u64 * 4)
            .iter()
            .sum::<u64>();
        assert!((128 << 30..512 << 30).contains(&bytes[0]), "{bytes:?}");
        assert!(bytes[1] > 1 << 60 && bytes[2] > 128 << 30 && bytes[3] > 1 << 60, "{bytes:?}");
        assert!((all..8 * all).contains(&bytes[4]), "{} of {all}", bytes[4]);
    }

    #[test]
    fn operands_pose_the_problem_that_was_asked_for() {
        let shapes: Vec<String> = [
            "b=2 hq=4 hkv=2 d=16 lq=3 lk=40 causal window=8,0 softcap alibi sinks mask=bool lse",
            "b=2 hq=4 hkv=2 d=16 dv=8 lq=3 lk=40 page=16 mask=f16 out=f32 dtype=f16",
            "b=2 hq=4 hkv=2 d=16 lq=40 ragged tree mask=bf16 invariant",
            "b=2 hq=4 hkv=2 d=32 dv=64 lq=3 lk=40 page=16 k=e4m3 v=q4_0 scale=page-head",
            "b=1 hq=4 hkv=2 d=32 dv=64 lq=3 lk=40 k=f32 v=i8 scale=token-head",
            "b=2 hq=4 hkv=2 d=32 lq=40 ragged kv=e5m2 scale=tensor",
            "b=1 hq=4 hkv=2 d=32 lq=3 lk=40 causal page=16 list=9 list-heads",
            "b=2 hq=4 hkv=2 d=32 lq=40 ragged page=16 list=9 slots",
        ]
        .map(String::from)
        .into();
        for layouts in [[Layout::TokenMajor], [Layout::HeadMajor]] {
            let wish = Wish {
                named: &crate::bench::NAMED,
                names: &[],
                shapes: &shapes,
                variants: &[],
                dtypes: &[DType::F16],
                layouts: &layouts,
                lengths: &[],
                warm: false,
            };
            for target in wish.targets().unwrap() {
                let made = Operands::new(&target);
                if layouts == [Layout::HeadMajor] && target.problem.keys == KvStorage::Ragged {
                    assert!(made.is_err());
                    continue;
                }
                let mut operands = made.unwrap();
                // Small operands are copied many times, so that they come from memory.
                let copies = if target.problem.query_len > 16 { 1 } else { 1 << 14 };
                assert_eq!(operands.copies().len(), copies);
                let (cases, outputs) = operands.parts().unwrap();
                for case in [&cases[0], cases.last().unwrap()] {
                    let problem =
                        regard::Problem::from_operands(&case.inputs().unwrap(), &outputs).unwrap();
                    // A table has a column more than needed.
                    let wished =
                        regard::Problem { kv_len: problem.kv_len, ..target.problem.clone() };
                    assert_eq!(problem, wished);
                }
            }
        }
    }
}
