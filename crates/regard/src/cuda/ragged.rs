//! What the host can promise of masks and trees in ragged batches, whose lengths only the device knows.
//!
//! Kernels clamp a sequence's rows and keys to those that all sequences have together. They do not clamp them to a mask's rows and
//! columns, or to a tree's rows: these must have a place for whatever the lengths on the device may say.

use super::DeviceMemory;
use crate::error::Error;
use crate::problem::Inputs;

/// An error unless mask and tree have a place for every row and key, whatever cumulative lengths say.
pub(super) fn check_places(inputs: &Inputs<DeviceMemory>) -> Result<(), Error> {
    let attention = &inputs.attention;
    let ragged = [
        ("cu_seqlens_q", "rows", attention.cu_seqlens_q.is_some(), &inputs.q),
        ("cu_seqlens_k", "keys", attention.cu_seqlens_k.is_some(), &inputs.k),
    ];
    for (i, (lengths, name, _, tensor)) in
        ragged.into_iter().enumerate().filter(|(_, (_, _, given, _))| *given)
    {
        let total = tensor.shape()[0];
        let why = format!("{lengths} is read on the device; Gpu::run_trusting_lengths takes fewer");
        if let Some(mask) =
            attention.mask.filter(|mask| mask.shape()[i + 2] != 1 && mask.shape()[i + 2] < total)
        {
            let found = format!("of shape {:?}", mask.shape());
            let allowed = format!("1, or at least {total}, in dimension {} ({name}): {why}", i + 2);
            return Err(Error::argument("mask", found, allowed));
        }
        if let Some(tree) = attention.tree_mask.filter(|tree| i == 0 && tree.shape()[1] < total) {
            let found = format!("of shape {:?}", tree.shape());
            return Err(Error::argument("tree_mask", found, format!("at least {total} rows: {why}")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Problem;
    use crate::tensor::{DType, Tensor};
    use crate::variant::Attention;

    fn tensor(dtype: DType, shape: &[usize]) -> Tensor<'static, DeviceMemory> {
        // SAFETY: nothing is run, so nothing is read.
        unsafe { Tensor::from_device_address(1 << 40, dtype, shape, None) }.expect("a plain view")
    }

    /// 10 rows and 30 keys of two sequences, ragged both; with a mask of that shape, and a tree.
    fn check(mask: Option<[usize; 4]>, tree_rows: Option<usize>, lengths: [bool; 2]) -> Result<(), Error> {
        let cumulative = |given: bool| given.then(|| tensor(DType::I32, &[3]));
        let attention = Attention {
            mask: mask.map(|shape| tensor(DType::Bool, &shape)),
            tree_mask: tree_rows.map(|rows| tensor(DType::I32, &[2, rows, rows.div_ceil(32)])),
            cu_seqlens_q: cumulative(lengths[0]),
            cu_seqlens_k: cumulative(lengths[1]),
            ..Attention::default()
        };
        let shape = |ragged: bool, total: usize| match ragged {
            true => vec![total, 4, 64],
            false => vec![2, total / 2, 4, 64],
        };
        let q = tensor(DType::F16, &shape(lengths[0], 10));
        let k = tensor(DType::F16, &shape(lengths[1], 30));
        let inputs = Inputs::new(q, k, k, attention);
        Problem::of_inputs(&inputs, DType::F16, false).expect("what shapes tell is sound");
        check_places(&inputs)
    }

    #[test]
    fn masks_and_trees_have_a_place_for_whatever_lengths_say() {
        let refused = |result: Result<(), Error>, texts: [&str; 3]| {
            let message = result.expect_err("too small").to_string();
            assert!(texts.iter().all(|text| message.contains(text)), "{message}");
        };
        for mask in [[1, 1, 1, 1], [2, 4, 10, 30], [1, 1, 12, 1], [1, 1, 1, 31]] {
            check(Some(mask), Some(10), [true, true]).expect("large enough");
        }
        let mask = |rows, keys| Some([1, 1, rows, keys]);
        refused(
            check(mask(9, 1), None, [true, true]),
            ["`mask`", "at least 10, in dimension 2", "cu_seqlens_q"],
        );
        refused(
            check(mask(1, 29), None, [true, true]),
            ["`mask`", "at least 30, in dimension 3", "cu_seqlens_k"],
        );
        refused(
            check(None, Some(9), [true, false]),
            ["`tree_mask`", "at least 10 rows", "run_trusting_lengths"],
        );
        // Of dense batches the host knows the lengths, and kernels clamp `kv_lens` to the mask's columns.
        check(mask(5, 15), Some(5), [false, false]).expect("dense");
        check(mask(5, 30), Some(5), [false, true]).expect("ragged keys alone");
        check(mask(10, 15), Some(10), [true, false]).expect("ragged rows alone");
    }
}
