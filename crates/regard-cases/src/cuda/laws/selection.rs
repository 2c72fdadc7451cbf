//! Selection: a list of all keys in order is attention without lists.

use super::invariance::{expect_rows, rows_of};
use super::{Broken, expect};
use crate::cuda::Runner;
use crate::{CacheSpec, Entries, Granularity, Keys, ListSpec, Scales, Spec};
use regard::{DType, ListEntries, Values};

/// What dense attention and attention to full lists are compared over.
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

/// A list of all keys gives the bits of dense decode in batch-invariant mode: of positions, by
/// head, longer than the sequence, and of physical slots.
pub fn full_list_equals_dense(runner: &mut Runner) -> Result<String, Broken> {
    let mut compared = 0;
    for dense in dense() {
        let longest = 1300;
        let expected = rows_of(runner, &dense)?;
        let paged = matches!(dense.keys, Keys::Paged { .. });
        for (of, per_head, len) in [
            (ListEntries::Keys, false, longest),
            (ListEntries::Keys, true, longest),
            (ListEntries::Keys, false, longest + 200),
            (ListEntries::Slots, false, longest),
        ] {
            if of == ListEntries::Slots && !paged {
                continue;
            }
            let lists = ListSpec { of, per_head, ..ListSpec::new(len, Entries::All) };
            let found = rows_of(runner, &dense.clone().lists(lists).legal())?;
            expect(found.len() == expected.len(), || "other rows".to_string())?;
            // A row of slots has no position: rows are in the same order.
            let by_place = |rows: &crate::rows::Rows| rows.values().cloned().collect::<Vec<_>>();
            let what = || format!("{}, {:?}, {of:?}, lists of {len}", dense.dtype, dense.head_dim);
            if of == ListEntries::Slots {
                expect(by_place(&found) == by_place(&expected), what)?;
            } else {
                expect_rows(&found, &expected, what)?;
            }
            compared += 1;
        }
    }
    Ok(format!("{compared} kinds of lists, to the bit"))
}
