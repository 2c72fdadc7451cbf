//! Merging partial results: outputs and log-sum-exps over disjoint sets of keys become the output
//! and log-sum-exp over all of them. The operands, and the checks that all backends share.

use crate::dtype::DType;
use crate::error::Error;
use crate::expect::{Strided, expect, expect_apart, expect_injective};
use crate::memory::{Host, Memory};
use crate::tensor::{Dims, Tensor, TensorMut};

/// Partial results over disjoint sets of keys (a shared prefix and the keys after it, caches spread
/// over devices), and the destination of their merge: [`crate::state::merge`] for any number of
/// parts.
///
/// `rows` stands for any number of dimensions, such as `B, Lq, Hq`. A part whose log-sum-exp is
/// minus infinity has seen no key: its output is not read. If no part has seen a key, zero and
/// minus infinity are written.
///
/// The CPU takes any strides. On a GPU every tensor is contiguous from the second dimension of the
/// parts on.
#[derive(Debug)]
pub struct Merge<'a, M: Memory = Host> {
    /// Each part's output, `[parts, rows, dim]`.
    pub parts: Tensor<'a, M>,
    /// Their log-sum-exps, `f32` `[parts, rows]`.
    pub part_lse: Tensor<'a, M>,
    /// The merged output: `[rows, dim]`, of any floating type.
    pub out: TensorMut<'a, M>,
    /// Its log-sum-exp: `f32` `[rows]`.
    pub lse: Option<TensorMut<'a, M>>,
}

/// Whether the dimensions from `from` on are contiguous.
pub(crate) fn is_contiguous(dims: &Dims, from: usize) -> bool {
    let mut step = 1;
    dims.is_empty()
        || (from..dims.rank()).rev().all(|i| {
            let (n, stride) = (dims.shape()[i], dims.strides()[i]);
            let holds = n == 1 || stride == step;
            // Dimensions that overflow this fit no stride.
            step = step.saturating_mul(n as i64);
            holds
        })
}

/// Maximum rows of a merge: 8 for each of 2^31 - 1 CTAs.
const MAX_ROWS: u64 = 8 * i32::MAX as u64;

/// The sizes of a merge that was checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MergeShape {
    /// Parts.
    pub count: usize,
    /// Rows of a part.
    pub rows: usize,
    /// Elements of a row.
    pub dim: usize,
}

impl<M: Memory> Merge<'_, M> {
    /// Checks shapes, types and strides.
    pub(crate) fn check(&self) -> Result<MergeShape, Error> {
        let parts = &*self.parts;
        let &[count, ref rows @ .., dim] = parts.shape() else {
            let found = format!("of shape {:?}", parts.shape());
            return Err(Error::argument("parts", found, "[parts, rows, dim]"));
        };
        expect(
            "parts",
            format_args!("of type {}", parts.dtype()),
            parts.dtype().is_float(),
            "f32, f16 or bf16",
        )?;
        let fits = |n: usize| i32::try_from(n).is_ok();
        expect(
            "parts",
            format_args!("of {count} parts of {dim} elements"),
            fits(count) && fits(dim),
            "2^31 of each at most",
        )?;
        let row_count = rows.iter().fold(1usize, |all, &n| all.saturating_mul(n));
        expect(
            "parts",
            format_args!("of {row_count} rows"),
            row_count as u64 <= MAX_ROWS,
            format_args!("at most {MAX_ROWS}"),
        )?;

        let is_lse =
            |dims: &Dims, shape: &[usize]| dims.dtype() == DType::F32 && dims.shape() == shape;
        let lse_shape = &parts.shape()[..parts.rank() - 1];
        let holds = is_lse(&self.part_lse, lse_shape);
        expect("part_lse", Strided(&self.part_lse), holds, format_args!("f32{lse_shape:?}"))?;
        let out_shape = &parts.shape()[1..];
        let holds = self.out.dtype().is_float() && self.out.shape() == out_shape;
        expect("out", Strided(&self.out), holds, format_args!("{out_shape:?} of a floating type"))?;
        if let Some(lse) = &self.lse {
            expect("lse", Strided(lse), is_lse(lse, rows), format_args!("f32{rows:?}"))?;
        }
        self.check_memory()?;
        Ok(MergeShape { count, rows: row_count, dim })
    }

    /// Checks the further requirement of GPUs: every tensor is contiguous from the second dimension
    /// of the parts on.
    pub(crate) fn check_contiguous(&self) -> Result<(), Error> {
        let from_second = "contiguous from the second dimension on";
        let Merge { parts, part_lse, out, lse } = self;
        expect("parts", Strided(parts), is_contiguous(parts, 1), from_second)?;
        expect("part_lse", Strided(part_lse), is_contiguous(part_lse, 1), from_second)?;
        expect("out", Strided(out), is_contiguous(out, 0), "contiguous")?;
        if let Some(lse) = lse {
            expect("lse", Strided(lse), is_contiguous(lse, 0), "contiguous")?;
        }
        Ok(())
    }

    /// Written operands share no memory with any other.
    fn check_memory(&self) -> Result<(), Error> {
        let read = [("parts", self.parts.byte_range()), ("part_lse", self.part_lse.byte_range())];
        for (name, tensor) in [("out", Some(&self.out)), ("lse", self.lse.as_ref())] {
            let Some(tensor) = tensor else { continue };
            expect_injective(name, tensor)?;
            for (other, range) in read {
                expect_apart(name, tensor.byte_range(), other, range)?;
            }
        }
        let lse = self.lse.as_ref().and_then(TensorMut::byte_range);
        expect_apart("lse", lse, "out", self.out.byte_range())
    }
}
