//! Selection: lists of all keys in order.

use super::{Broken, expect};
use crate::check::Checker;
use crate::cuda::Runner;
use crate::rows::bits;
use crate::{CacheSpec, Entries, Granularity, Keys, ListSpec, Scales, Spec};
use regard::{DType, ListEntries, Values};

/// Dense problems whose keys are listed.
fn dense() -> Vec<Spec> {
    let paged = |block_size| Keys::Paged { block_size, interleaved: false };
    let e4m3 = CacheSpec::new(DType::E4M3, Granularity::Token, Scales::Fitted);
    let plain = CacheSpec::default();
    [
        (DType::F32, (6, 2), (40, 24), Keys::Ragged { slack: 0 }, plain),
        (DType::F16, (8, 2), (64, 64), paged(16), plain),
        (DType::BF16, (16, 4), (128, 128), Keys::Batched { slack: 3 }, plain),
        (DType::BF16, (40, 1), (128, 128), paged(7), e4m3),
        (DType::BF16, (16, 1), (576, 512), paged(64), plain),
    ]
    .into_iter()
    .map(|(dtype, heads, dims, keys, cache)| {
        let spec = Spec { keys, batch_invariant: true, sinks: true, ..Spec::new("dense") };
        let latent = dims.0 == 576;
        Spec { values: if latent { Values::KeyPrefix } else { Values::Separate }, ..spec }
            .lengths(&[(1, 1300), (1, 130), (1, 0)])
            .heads(heads.0, heads.1)
            .dims(dims.0, dims.1)
            .dtype(dtype)
            .cache(cache)
            .legal()
    })
    .collect()
}

/// Lists of all keys, in every form, have the same bits in batch-invariant mode: of positions, by
/// head, longer than the sequence, and of physical slots. They are within the tolerance of dense
/// attention, whose kernels divide keys among warps otherwise.
pub fn full_lists_are_one(runner: &mut Runner) -> Result<String, Broken> {
    const LONGEST: usize = 1300;
    let mut compared = 0;
    for dense in dense() {
        let mut first = None;
        let paged = matches!(dense.keys, Keys::Paged { .. });
        for (of, per_head, len) in [
            (ListEntries::Keys, false, LONGEST),
            (ListEntries::Keys, true, LONGEST),
            (ListEntries::Keys, false, LONGEST + 200),
            (ListEntries::Slots, false, LONGEST),
        ] {
            if of == ListEntries::Slots && !paged {
                continue;
            }
            let lists = ListSpec { of, per_head, ..ListSpec::new(len, Entries::All) };
            let (case, output) = runner.generated(&dense.clone().lists(lists).legal())?;
            let name = || format!("{}, {}, {of:?}, lists of {len}", dense.dtype, dense.head_dim);
            let first = first.get_or_insert_with(|| bits(&output));
            expect(bits(&output) == *first, || format!("{}: other bits", name()))?;
            let verdict = Checker::new(&case, None).and_then(|checker| checker.check(&output));
            verdict.map_err(|failure| Broken(format!("{}: {failure}", name())))?;
            compared += 1;
        }
        let (case, output) = runner.generated(&dense)?;
        let verdict = Checker::new(&case, None).and_then(|checker| checker.check(&output));
        verdict.map_err(|failure| Broken(format!("{}, dense: {failure}", dense.dtype)))?;
    }
    Ok(format!("{compared} lists of all keys, to the bit"))
}
