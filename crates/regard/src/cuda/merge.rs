//! Merging partial results on a GPU.

use super::gpu::{Gpu, argument};
use super::registry::Family;
use super::{DeviceMemory, Launch};
use crate::error::Error;
use crate::merge::{self, MergeShape};
use crate::params::{ElementType, MergeParameters};
use crate::tensor::TensorMut;
use cudarc::driver::{CudaStream, sys};

/// Partial results in a GPU's memory, and where their merge goes. From the second dimension of the
/// parts on, every tensor is contiguous.
pub type Merge<'a> = merge::Merge<'a, DeviceMemory>;

/// Rows per CTA: one per warp.
const BLOCK_ROWS: i64 = 8;

/// Checks shapes, types and strides, and fills in the kernel's parameters.
fn parameters(merge: &Merge) -> Result<MergeParameters, Error> {
    let MergeShape { count, rows, dim } = merge.check()?;
    merge.check_contiguous()?;
    let Merge { parts, part_lse, out, lse } = merge;
    Ok(MergeParameters {
        parts: parts.address(),
        part_lse: part_lse.address(),
        out: out.address(),
        lse: lse.as_ref().map_or(0, TensorMut::address),
        part_stride: parts.strides()[0],
        part_lse_stride: part_lse.strides()[0],
        rows: if dim == 0 { 0 } else { rows as i64 },
        dim: dim as i32,
        count: count as i32,
        part_type: ElementType::from_dtype(parts.dtype()),
        out_type: ElementType::from_dtype(out.dtype()),
    })
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
    /// If an operand breaks the contract or was lent to another stream; nothing is queued then. Or
    /// if the driver fails.
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
        // SAFETY: the stream is of this context, and operands are lent to it, or their makers have
        // promised as much.
        unsafe { self.merge_raw(stream.cu_stream(), merge) }
    }

    /// [`Gpu::merge`] on a raw stream, for engines that manage their streams.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's context, and nothing else writes the operands, or reads
    /// what is written, until the merge is done.
    pub unsafe fn merge_raw(&self, stream: sys::CUstream, merge: &mut Merge) -> Result<(), Error> {
        let parameters = parameters(merge)?;
        if parameters.rows == 0 {
            return Ok(());
        }
        let launch = launch(parameters.rows);
        let function = self.function(&launch)?;
        // SAFETY: the kernel reads these parameters; shapes are checked, and the caller has
        // promised the rest.
        unsafe { self.launch(function, &launch, &mut [argument(&parameters)], stream) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;
    use crate::merge::is_contiguous;
    use crate::tensor::{Tensor, raw_dims};

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
        let error = parameters(&merge).map(|_| ()).unwrap_err().to_string();
        assert!(error.starts_with("`parts` is of 18446744073709551615 rows"), "{error}");
        let broadcast = raw_dims(DType::F32, &[2, 3, 8], Some(&[0, 8, 1])).expect("a view");
        assert!(is_contiguous(&broadcast, 1) && !is_contiguous(&broadcast, 0));
    }
}
