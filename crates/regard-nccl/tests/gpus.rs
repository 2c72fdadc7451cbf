//! The laws of several ranks on GPUs, over NCCL and over peer memory: n GPUs give what the oracle
//! does.
//!
//! With fewer than two GPUs, or without NCCL, the tests pass and print SKIPPED. With
//! `REGARD_CUDA_REQUIRED` set they fail.

#![cfg(feature = "nccl")]

mod peers;
mod support;

use regard::oracle::Judge;
use regard::{DType, KeyLayout, Problem, Window, bf16, f16};
use regard_nccl::{Queries, RingPrefill, RingSequence};
use support::gpus::{all_gpus, on_gpus};
use support::ring::{CAUSAL, Law, Options, Whole};
use support::{Number, decode, ring};

/// A law of ring prefill, and its operands.
struct RingCase<T> {
    law: Law,
    whole: Whole<T>,
}

impl<T: Number> RingCase<T> {
    fn all(laws: &[Law]) -> Vec<RingCase<T>> {
        laws.iter().map(|law| RingCase { law: law.clone(), whole: Whole::new(law) }).collect()
    }

    fn problem(&self) -> Problem {
        Problem::from_inputs(&self.whole.inputs(&self.law), T::DTYPE, true).unwrap()
    }
}

/// The parts of all ranks, of each case, are what one device gives.
fn expect_cases<T: Number>(cases: &[RingCase<T>], parts: Vec<Vec<ring::Part<T>>>) {
    for (case, of_case) in cases.iter().zip(by_case(parts)) {
        let judge = Judge::new(&case.whole.inputs(&case.law), T::DTYPE).unwrap();
        ring::expect_one(&case.law, &judge, of_case);
    }
}

/// Results of all ranks for each case, from those of all cases on each rank.
fn by_case<R>(of_ranks: Vec<Vec<R>>) -> Vec<Vec<R>> {
    let mut of_ranks: Vec<_> = of_ranks.into_iter().map(Vec::into_iter).collect();
    let cases = of_ranks[0].len();
    (0..cases)
        .map(|_| of_ranks.iter_mut().map(|results| results.next().unwrap()).collect())
        .collect()
}

/// Laws of ring prefill, in one group.
fn rings_hold<T: Number>(count: usize, laws: &[Law]) {
    let cases = RingCase::<T>::all(laws);
    let parts = on_gpus(count, |rank| {
        let of_case = |case: &RingCase<T>| {
            let mut planned = ring::plan_ring(&case.law, &case.problem(), &rank).unwrap();
            ring::run_ring(&case.law, &case.whole, &rank, &mut planned).unwrap()
        };
        cases.iter().map(of_case).collect()
    });
    expect_cases(&cases, parts);
}

/// Batches, ragged batches, cached prefixes and offsets.
fn ring_laws(variant: Options) -> [Law; 6] {
    let at = |query_len, kv_len, q_offset| RingSequence { query_len, kv_len, q_offset };
    let prompts = [130, 1, 0, 71, 300, 2].map(|len| RingSequence::new(len, len));
    let prefixes = [(130, 200), (1, 330), (0, 9), (70, 70), (210, 601), (3, 5)];
    let prefixes = prefixes.map(|(rows, keys)| RingSequence::new(rows, keys));
    let offsets = [at(130, 200, 0), at(2, 90, -1), at(90, 4, 1), at(110, 300, 250), at(5, 0, 3)];
    [
        Law::batch(RingSequence::new(257, 257), 2, variant),
        Law::batch(RingSequence::new(220, 510), 2, variant),
        Law::batch(at(20, 9, -4), 1, variant),
        Law::ragged(prompts.to_vec(), variant),
        Law::ragged(prefixes.to_vec(), variant),
        Law::ragged(offsets.to_vec(), variant),
    ]
}

#[test]
fn ring_prefill_of_every_kind_of_sequences() {
    let Some((count, _gpus)) = all_gpus() else { return };
    let windows = [(None, None), (Some(60), None), (Some(90), Some(50))];
    let mut laws = [const { Vec::new() }; 3];
    for bits in 0..32 {
        let (left, right) = windows[bits % 3];
        let variant = Options::combination(bits, Window { left, right }, 110);
        for (i, law) in ring_laws(variant).into_iter().enumerate() {
            laws[(bits + i) % 3].push(law);
        }
    }
    rings_hold::<f32>(count, &laws[0]);
    rings_hold::<bf16>(count, &laws[1]);
    rings_hold::<f16>(count, &laws[2]);
}

/// Sequences that a plan has room for take the place of others.
#[test]
fn sequences_of_a_ring_are_replaced() {
    let Some((count, _gpus)) = all_gpus() else { return };
    let (short, long) = ([(30, 30), (9, 400), (1, 1)], [(400, 400), (0, 5), (300, 310), (2, 60)]);
    let law = |lens: &[(usize, usize)]| {
        let sequences = lens.iter().map(|&(rows, keys)| RingSequence::new(rows, keys));
        Law::ragged(sequences.collect(), Options { sinks: true, ..CAUSAL })
    };
    let cases = RingCase::<bf16>::all(&[law(&short), law(&long), law(&short)]);
    let bounds = cases[1].problem();
    let parts = on_gpus(count, |rank| {
        let first = &cases[0].law.sequences;
        let mut planned = RingPrefill::with_sequences(&rank, &bounds, first).unwrap();
        let mut of_case = |case: &RingCase<bf16>| {
            planned.set_sequences(&rank, &case.law.sequences).unwrap();
            ring::run_ring(&case.law, &case.whole, &rank, &mut planned).unwrap()
        };
        cases.iter().map(&mut of_case).collect()
    });
    expect_cases(&cases, parts);
}

#[test]
fn head_parallel_attention() {
    let Some((count, _gpus)) = all_gpus() else { return };
    if !ring::HEADS.is_multiple_of(count) {
        println!("SKIPPED: {} heads do not divide among {count} GPUs", ring::HEADS);
        return;
    }
    let window = Window { left: Some(110), right: None };
    let variants = [
        Options { alibi: true, sinks: true, ..CAUSAL },
        Options { window, alibi: true, ..CAUSAL },
        Options { chunk: Some(160), softcap: Some(3.0), ..CAUSAL },
        Options { causal: false, sinks: true, ..CAUSAL },
    ];
    for variant in variants {
        let law = Law::batch(RingSequence::new(60 * count, 60 * count), 1, variant);
        let law = Law { kv_heads: ring::KV_HEADS, ..law };
        let whole = Whole::<bf16>::new(&law);
        let judge = Judge::new(&whole.inputs(&law), DType::BF16).unwrap();
        let parts = on_gpus(count, |rank| ring::run_heads(&law, &whole, &rank).unwrap());
        ring::expect_heads(&law, &judge, &parts);
    }
}

/// Laws of sharded decode, in one group.
fn decodes_hold<T: Number>(count: usize, laws: &[decode::Law]) {
    let wholes: Vec<_> = laws.iter().map(|law| decode::Whole::<T>::new(law, 7)).collect();
    let cases: Vec<_> = laws.iter().zip(&wholes).collect();
    let parts = on_gpus(count, |rank| {
        let of_case = |&(law, whole): &(&decode::Law, &decode::Whole<T>)| {
            decode::run_rank(law, whole, &rank).unwrap()
        };
        cases.iter().map(of_case).collect()
    });
    for ((law, whole), of_case) in cases.into_iter().zip(by_case(parts)) {
        let keys = decode::Keys::for_shard(law, whole, decode::ONE);
        let judge = Judge::new(&decode::inputs_of_one(law, whole, &keys), T::DTYPE).unwrap();
        decode::expect_one(law, &judge, of_case);
    }
}

#[test]
fn sharded_decode() {
    let Some((count, _gpus)) = all_gpus() else { return };
    if !decode::HEADS.is_multiple_of(count) {
        println!("SKIPPED: {} heads do not divide among {count} GPUs", decode::HEADS);
        return;
    }
    let law = decode::Law::new;
    let window = Window { left: Some(60), right: None };
    let problems = [
        law(&[(1, 400)]),
        law(&[(1, 400), (1, 3), (1, 1), (1, 170)]),
        decode::Law { softcap: Some(3.0), ..law(&[(9, 330)]) },
        decode::Law { shift: -300, ..law(&[(6, 280), (6, 350)]) },
        decode::Law { window, chunk: Some(80), ..law(&[(5, 400), (5, 190)]) },
        decode::Law { alibi: true, sinks: true, ..law(&[(5, 400), (5, 2)]) },
        decode::Law { ragged: true, window, ..law(&[(3, 200), (1, 410), (0, 7), (9, 9)]) },
    ];
    let mut laws = Vec::new();
    for problem in problems {
        for layout in [KeyLayout::Contiguous, KeyLayout::RoundRobin] {
            for queries in [Queries::Sharded, Queries::Replicated] {
                for paged in [false, true] {
                    laws.push(decode::Law { layout, queries, paged, ..problem.clone() });
                }
            }
        }
    }
    decodes_hold::<f32>(count, &laws);
    decodes_hold::<bf16>(count, &laws);
}
