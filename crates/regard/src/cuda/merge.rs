//! Merging partial results: outputs and log-sum-exps over disjoint sets of keys become those over all of them.

use super::gpu::{Gpu, argument};
use super::registry::Family;
use super::{DeviceMemory, Launch};
use crate::error::Error;
use crate::params::MergeParameters;
use crate::problem::overlaps;
use crate::tensor::{DType, Dims, Tensor, TensorMut};
use cudarc::driver::{CudaStream, sys};

/// Partial results over disjoint sets of keys (a shared prefix and what follows it, caches spread over devices), and where their merge goes:
/// [`crate::state::merge`] for any number of parts.
///
/// `rows` stands for any number of dimensions, such as `B, Lq, Hq`; from the second dimension of the parts on, every tensor is contiguous. A part
/// whose log-sum-exp is minus infinity has seen no key: its output is not looked at. Where that is so of every part, zero and minus infinity are
/// written.
#[derive(Debug)]
pub struct Merge<'a> {
    /// Each part's output, `[parts, rows, dim]`.
    pub parts: Tensor<'a, DeviceMemory>,
    /// Their log-sum-exps, `f32` `[parts, rows]`.
    pub part_lse: Tensor<'a, DeviceMemory>,
    /// Where the output goes: `[rows, dim]`, of any floating type.
    pub out: TensorMut<'a, DeviceMemory>,
    /// Where its log-sum-exp goes: `f32` `[rows]`.
    pub lse: Option<TensorMut<'a, DeviceMemory>>,
}

/// Rows that a thread block takes: one a warp.
const BLOCK_ROWS: i64 = 8;

/// The last block's number is an `i32`.
const MOST_ROWS: i64 = BLOCK_ROWS * i32::MAX as i64;

fn expect(
    argument: &str,
    found: String,
    holds: bool,
    allowed: impl Into<String>,
) -> Result<(), Error> {
    if holds { Ok(()) } else { Err(Error::argument(argument, found, allowed)) }
}

/// Whether the dimensions from `from` on lie without gaps.
fn is_contiguous(dims: &Dims, from: usize) -> bool {
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

fn element_type(dtype: DType) -> i32 {
    match dtype {
        DType::F16 => 0,
        DType::BF16 => 1,
        _ => 2,
    }
}

impl Merge<'_> {
    /// Checks everything that shapes, types and strides tell, and fills in what the kernel reads.
    fn parameters(&self) -> Result<MergeParameters, Error> {
        let shown = |dims: &Dims| format!("{dims:?} with strides {:?}", dims.strides());
        let parts = &*self.parts;
        let [count, rows @ .., dim] = parts.shape() else {
            return Err(Error::argument(
                "parts",
                format!("of shape {:?}", parts.shape()),
                "[parts, rows, dim]",
            ));
        };
        expect(
            "parts",
            format!("of type {}", parts.dtype()),
            parts.dtype().is_float(),
            "f32, f16 or bf16",
        )?;
        expect(
            "parts",
            shown(parts),
            is_contiguous(parts, 1),
            "contiguous from the second dimension on",
        )?;
        let fits = |n: usize| i32::try_from(n).is_ok();
        expect(
            "parts",
            format!("of {count} parts of {dim} elements"),
            fits(*count) && fits(*dim),
            "2^31 of each at most",
        )?;
        let row_count = rows.iter().fold(1usize, |all, &n| all.saturating_mul(n));
        let found = format!("of {row_count} rows");
        expect(
            "parts",
            found,
            row_count as u64 <= MOST_ROWS as u64,
            format!("at most {MOST_ROWS}"),
        )?;

        let lse_shape = &parts.shape()[..parts.rank() - 1];
        let lse_holds = |dims: &Dims, shape: &[usize], from: usize| {
            dims.dtype() == DType::F32 && dims.shape() == shape && is_contiguous(dims, from)
        };
        let holds = lse_holds(&self.part_lse, lse_shape, 1);
        let allowed = format!("f32{lse_shape:?}, contiguous from the second dimension on");
        expect("part_lse", shown(&self.part_lse), holds, allowed)?;
        let out_shape = &parts.shape()[1..];
        let holds = self.out.dtype().is_float()
            && self.out.shape() == out_shape
            && is_contiguous(&self.out, 0);
        expect(
            "out",
            shown(&self.out),
            holds,
            format!("{out_shape:?} of a floating type, contiguous"),
        )?;
        if let Some(lse) = &self.lse {
            expect("lse", shown(lse), lse_holds(lse, rows, 0), format!("f32{rows:?}, contiguous"))?;
        }
        self.check_memory()?;
        Ok(MergeParameters {
            parts: self.parts.address(),
            part_lse: self.part_lse.address(),
            out: self.out.address(),
            lse: self.lse.as_ref().map_or(0, TensorMut::address),
            part_stride: parts.strides()[0],
            part_lse_stride: self.part_lse.strides()[0],
            rows: if *dim == 0 { 0 } else { row_count as i64 },
            dim: *dim as i32,
            count: *count as i32,
            part_type: element_type(parts.dtype()),
            out_type: element_type(self.out.dtype()),
        })
    }

    /// What is written shares no memory with anything else.
    fn check_memory(&self) -> Result<(), Error> {
        let out = ("out", self.out.byte_range());
        let lse = ("lse", self.lse.as_ref().and_then(TensorMut::byte_range));
        let read = [("parts", self.parts.byte_range()), ("part_lse", self.part_lse.byte_range())];
        let pairs =
            read.into_iter().flat_map(|read| [(out, read), (lse, read)]).chain([(lse, out)]);
        for ((name, range), (other, other_range)) in pairs {
            let apart = !overlaps(range, other_range);
            expect(name, format!("memory shared with `{other}`"), apart, "memory of its own")?;
        }
        Ok(())
    }
}

fn launch(rows: i64) -> Launch {
    Launch {
        module: Family::Merge.name(),
        entry: "merge",
        grid: [(rows as u64).div_ceil(BLOCK_ROWS as u64).max(1) as u32, 1, 1],
        threads: BLOCK_ROWS as u32 * 32,
        ..Launch::default()
    }
}

impl Gpu {
    /// Loads what [`Gpu::merge`] runs, so that nothing is left to load while a graph is captured.
    ///
    /// # Errors
    /// If the driver does not take the code.
    pub fn load_merge(&self) -> Result<(), Error> {
        self.function(&launch(0)).map(|_| ())
    }

    /// Queues a merge on `stream`, and returns.
    ///
    /// # Errors
    /// If an operand breaks the contract or was lent to another stream; nothing is queued then. Or if the driver fails.
    pub fn merge(&self, stream: &CudaStream, merge: &mut Merge) -> Result<(), Error> {
        self.expect_context(stream)?;
        let lse = merge.lse.as_ref().map(|lse| ("lse", lse.memory()));
        let memories = [
            ("parts", merge.parts.memory()),
            ("part_lse", merge.part_lse.memory()),
            ("out", merge.out.memory()),
        ];
        for (name, memory) in memories.into_iter().chain(lse) {
            memory.expect_stream(name, stream)?;
        }
        // SAFETY: the stream is of this context, and operands are lent to it, or their makers have promised as much.
        unsafe { self.merge_raw(stream.cu_stream(), merge) }
    }

    /// [`Gpu::merge`] for engines with streams of their own.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's context, and nothing else writes the operands, or reads what is written, until the merge is done.
    pub unsafe fn merge_raw(&self, stream: sys::CUstream, merge: &mut Merge) -> Result<(), Error> {
        let parameters = merge.parameters()?;
        if parameters.rows == 0 {
            return Ok(());
        }
        let launch = launch(parameters.rows);
        let function = self.function(&launch)?;
        // SAFETY: the kernel reads these parameters; shapes are checked, and the caller has promised the rest.
        unsafe { self.launch(function, &launch, &mut [argument(&parameters)], stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::raw_dims;

    #[test]
    fn empty_parts_of_wild_shapes_are_refused() {
        // No elements, and rows whose product overflows.
        let shape = [0, 1 << 33, 1 << 33, 8];
        // SAFETY: tensors without elements reach no memory.
        let merge = unsafe {
            let part_lse = &shape[..3];
            Merge {
                parts: Tensor::from_device_address(0, DType::F32, &shape, Some(&[1, 1, 1, 1]))
                    .expect("empty"),
                part_lse: Tensor::from_device_address(0, DType::F32, part_lse, Some(&[1, 1, 1]))
                    .expect("empty"),
                out: TensorMut::from_device_address(0, DType::F32, &[0, 8], None).expect("empty"),
                lse: None,
            }
        };
        let error = merge.parameters().map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("`parts` is of 18446744073709551615 rows"), "{error}");
        let broadcast = raw_dims(DType::F32, &[2, 3, 8], Some(&[0, 8, 1])).expect("a view");
        assert!(is_contiguous(&broadcast, 1) && !is_contiguous(&broadcast, 0));
    }
}
