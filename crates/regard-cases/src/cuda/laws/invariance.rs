//! Invariance: batch, page order, poison and workspace contents change no bit of a result.

use super::{Broken, expect};
use crate::check::Checker;
use crate::cuda::Runner;
use crate::random;
use crate::rows::{Rows, bits, difference, rows};
use crate::{Keys, KvLayout, Layout, SequenceSpec, Spec, list};
use regard::{DType, Plan, Problem, QueryStorage, Window};

/// Seeds of random compositions beyond the seeds of the list.
const SEEDS: std::ops::Range<u64> = 1000..1300;

/// Everything composed at random.
pub fn random_compositions(runner: &mut Runner) -> Result<String, Broken> {
    let mut rows = 0;
    for seed in SEEDS {
        let (case, output) = runner.generated(&list::random(seed))?;
        let verdict = Checker::new(&case, None)
            .and_then(|checker| checker.check(&output))
            .map_err(|failure| Broken(format!("seed {seed}: {failure}")))?;
        rows += verdict.agreement.rows;
    }
    Ok(format!("{} cases, {rows} rows", SEEDS.count()))
}

/// Compositions that failed once, on outputs with gaps, twice, and in chunks.
pub fn known_compositions(runner: &mut Runner) -> Result<String, Broken> {
    let specs = random::known();
    for spec in &specs {
        random::trial(runner, spec).map_err(|broken| {
            Broken(format!("{} on {}: {}", spec.name, broken.way, broken.text))
        })?;
    }
    Ok(format!("{} compositions", specs.len()))
}

fn rows_of(runner: &mut Runner, spec: &Spec) -> Result<Rows, Broken> {
    let (case, output) = runner.generated(spec)?;
    Ok(rows(spec, &case, &output))
}

fn expect_rows(some: &Rows, all: &Rows, what: impl FnOnce() -> String) -> Result<(), Broken> {
    match difference(some, all) {
        None => Ok(()),
        Some(difference) => Err(Broken(format!("{}: {difference}", what()))),
    }
}

/// Neighbours, pages, strides and the order of the batch change no bit in batch-invariant mode.
pub fn batch_invariance(runner: &mut Runner) -> Result<String, Broken> {
    let sequence = |id, q_len, kv_len| SequenceSpec { id, q_len, kv_len };
    let together =
        [sequence(1, 70, 70), sequence(2, 3, 2300), sequence(3, 1, 1030), sequence(4, 17, 130)];
    let mut compared = 0;
    for (dtype, dims) in [
        (DType::F32, [40, 24]),
        (DType::F16, [40, 24]),
        (DType::BF16, [40, 24]),
        (DType::BF16, [128, 128]),
        (DType::F16, [256, 256]),
    ] {
        let base = Spec {
            ragged_queries: true,
            keys: Keys::Ragged { slack: 0 },
            sequences: together.to_vec(),
            ..Spec::invariant().dims(dims[0], dims[1]).dtype(dtype)
        };
        let all = rows_of(runner, &base)?;
        let mut compare = |spec: &Spec, what: &str| {
            let found = rows_of(runner, spec)?;
            compared += 1;
            // Whichever of the two has fewer rows is part of the other.
            let (some, all) =
                if found.len() <= all.len() { (&found, &all) } else { (&all, &found) };
            expect_rows(some, all, || format!("{dtype}, {dims:?}, {what}"))
        };
        compare(&base, "again")?;
        for one in together {
            let alone = Spec { sequences: vec![one], ragged_queries: false, ..base.clone() };
            let alone = Spec { keys: Keys::Batched { slack: 3 }, ..alone };
            compare(&alone, &format!("sequence {} alone", one.id))?;
        }
        let others =
            vec![together[3], sequence(9, 100, 4000), together[1], together[0], together[2]];
        compare(&Spec { sequences: others, ..base.clone() }, "among others")?;
        for (block_size, interleaved, kv_layout) in
            [(1, false, KvLayout::Nhd), (16, true, KvLayout::Hnd), (100, false, KvLayout::Hnd)]
        {
            let keys = Keys::Paged { block_size, interleaved };
            compare(&Spec { keys, kv_layout, ..base.clone() }, &format!("pages of {block_size}"))?;
        }
        compare(&Spec { padding: 5, layout: Layout::Bhsd, ..base.clone() }, "padded")?;
    }
    Ok(format!("{compared} arrangements, to the bit"))
}

/// Token by token and chunk by chunk gives the bits of the whole prompt, also under a window that
/// begins at another key for each row.
pub fn chunks_equal_prefill(runner: &mut Runner) -> Result<String, Broken> {
    const TOKENS: usize = 150;
    for (dtype, dims, left) in [
        (DType::F32, [40, 24], None),
        (DType::BF16, [128, 128], None),
        (DType::F32, [3, 62], Some(34)),
        (DType::BF16, [192, 72], Some(2)),
        (DType::F16, [256, 167], Some(50)),
        (DType::BF16, [64, 64], Some(100)),
        (DType::F16, [576, 512], Some(70)),
    ] {
        let spec = |q_len: usize, kv_len: usize| {
            let keys = Keys::Paged { block_size: 16, interleaved: false };
            let window = Window { left, right: None };
            let spec = Spec::invariant().dims(dims[0], dims[1]).dtype(dtype);
            Spec { keys, window, ..spec.lengths(&[(q_len, kv_len)]) }
        };
        let batched = Spec { keys: Keys::Batched { slack: 0 }, ..spec(TOKENS, TOKENS) };
        let prefill = rows_of(runner, &batched)?;
        for chunk in [1, 7, 64, 100] {
            for start in (0..TOKENS).step_by(chunk) {
                let end = TOKENS.min(start + chunk);
                let found = rows_of(runner, &spec(end - start, end))?;
                expect_rows(&found, &prefill, || {
                    format!("{dtype}, {dims:?}, window {left:?}, chunks of {chunk}, from {start}")
                })?;
            }
        }
    }
    Ok(format!("{TOKENS} tokens by 1, 7, 64 and 100, with and without windows, to the bit"))
}

/// The order of pages in the pool changes no bit, in any mode.
pub fn pages_permuted(runner: &mut Runner) -> Result<String, Broken> {
    for (lengths, block_size) in
        [(vec![(1, 900), (1, 70), (1, 0)], 16), (vec![(9, 300)], 7), (vec![(2, 2500)], 64)]
    {
        for batch_invariant in [false, true] {
            let mut first = None;
            for page_seed in 1..6 {
                let spec = Spec {
                    page_seed,
                    keys: Keys::Paged { block_size, interleaved: true },
                    causal: true,
                    batch_invariant,
                    ..Spec::new("pages").lengths(&lengths).dtype(DType::BF16)
                };
                let found = bits(&runner.generated(&spec)?.1);
                let first = first.get_or_insert_with(|| found.clone());
                expect(found == *first, || {
                    format!("{lengths:?} in pages of {block_size}: other bits")
                })?;
            }
        }
    }
    Ok("5 orders of pages, to the bit".into())
}

/// Elements that no row can see do not reach the output: NaN or ordinary numbers there give the
/// same bits.
pub fn poison_never_shows(runner: &mut Runner) -> Result<String, Broken> {
    let machine = runner.gpu().machine().clone();
    let all: Vec<_> = list::list_with_caches().filter(|spec| spec.has_plan_on(&machine)).collect();
    // Making numbers takes longer than running them: as many at once as there are cores.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    for specs in all.chunks(8 * cores) {
        let pairs: Vec<_> = std::thread::scope(|scope| {
            let made = |spec: &Spec| {
                [true, false].map(|poison| Spec { poison, ..spec.clone() }.generate())
            };
            let threads: Vec<_> = specs
                .chunks(8)
                .map(|some| scope.spawn(move || some.iter().map(made).collect::<Vec<_>>()))
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("no description panics"))
                .collect()
        });
        for (spec, [poisoned, clean]) in specs.iter().zip(&pairs) {
            let same = bits(&runner.output(poisoned)?) == bits(&runner.output(clean)?);
            expect(same, || format!("{} depends on what no row can see", spec.name))?;
        }
    }
    Ok(format!("{} cases, to the bit", all.len()))
}

/// The same call gives the same bits, in any mode: the order in which CTAs finish does not matter.
pub fn same_bits_twice(runner: &mut Runner) -> Result<String, Broken> {
    let lengths = [(1, 5000), (1, 3), (1, 0), (1, 1700)];
    for keys in [Keys::Ragged { slack: 1 }, Keys::Paged { block_size: 16, interleaved: false }] {
        for (dtype, dim) in [(DType::F32, 64), (DType::BF16, 128), (DType::F16, 256)] {
            let spec =
                Spec { keys, ..Spec::new("twice").lengths(&lengths).dims(dim, dim).dtype(dtype) };
            let (case, first) = runner.generated(&spec)?;
            for _ in 0..20 {
                let again = runner.output(&case)?;
                expect(bits(&again) == bits(&first), || format!("{dtype}, {keys:?}: other bits"))?;
            }
        }
    }
    Ok("6 problems, 20 times, to the bit".into())
}

/// A plan for more serves less.
pub fn plan_for_more(runner: &mut Runner) -> Result<String, Broken> {
    let mut cases = 0;
    for spec in list::core().filter(|spec| !spec.sequences.is_empty()) {
        let case = spec.generate();
        let output = case.run(|inputs, outputs| {
            let found = Problem::from_operands(inputs, outputs)?;
            let run = runner.run_planned(inputs, outputs, 1, |gpu, _, _| {
                let mut larger = found.clone();
                larger.batch += 3;
                larger.query_len = larger.query_len * 2 + 5;
                larger.kv_len = larger.kv_len * 3 + 700;
                if let QueryStorage::Ragged { total } = &mut larger.queries {
                    *total = *total * 2 + larger.query_len;
                }
                Plan::new(&larger, gpu.machine())
            });
            run.map(|_| ())
        });
        let output = output.map_err(|error| Broken(format!("{}: {error}", spec.name)))?;
        Checker::new(&case, None)
            .and_then(|checker| checker.check(&output))
            .map_err(|failure| Broken(format!("{}: {failure}", spec.name)))?;
        if spec.batch_invariant {
            let exact = bits(&runner.output(&case)?);
            expect(exact == bits(&output), || {
                format!("{}: other bits under a larger plan", spec.name)
            })?;
        }
        cases += 1;
    }
    Ok(format!("{cases} cases"))
}
