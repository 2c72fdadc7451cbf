//! Merging partial results: the dispatch that writes their merge.

use super::launch::{BUFFERS, Dispatch, Params, expect_forwards, read, written};
use super::{CONSTANTS, MergeParameters, MetalMemory, Pipeline, SIMD_WIDTH};
use crate::dtype::DType;
use crate::error::Error;
use crate::kernel_parameters::count;
use crate::merge::{self, MergeShape};
use crate::params::ElementType;

/// Partial results in Metal buffers, and where their merge goes. From the second dimension of the
/// parts on, every tensor is contiguous.
pub type Merge<'a> = merge::Merge<'a, MetalMemory>;

/// Rows per threadgroup, one per SIMD group: as `merge.metal` has it.
const SIMD_GROUPS: usize = 4;

/// Threads of a merge threadgroup.
pub(super) const MERGE_THREADS: u32 = (SIMD_GROUPS * SIMD_WIDTH) as u32;

/// The pipeline of a type of parts.
pub(super) fn pipeline(dtype: DType) -> Pipeline {
    let function = match dtype {
        DType::F32 => "merge_float",
        DType::F16 => "merge_half",
        _ => "merge_bfloat",
    };
    // The kernel reads none of the constants.
    Pipeline { function, constants: [0; CONSTANTS.len()] }
}

/// The type of elements as the kernel knows it.
fn element_type(dtype: DType) -> ElementType {
    match dtype {
        DType::F16 => ElementType::F16,
        DType::BF16 => ElementType::BF16,
        _ => ElementType::F32,
    }
}

/// The dispatch of a merge; `None` if there are no rows.
///
/// # Errors
/// If an operand breaks the contract.
pub fn merge(merge: &Merge) -> Result<Option<Dispatch>, Error> {
    let MergeShape { count: parts, rows, dim } = merge.check()?;
    merge.check_contiguous()?;
    let Merge { parts: tensor, part_lse, out, lse } = merge;
    expect_forwards("parts", tensor)?;
    expect_forwards("part_lse", part_lse)?;
    if rows == 0 || dim == 0 {
        return Ok(None);
    }
    let params = MergeParameters {
        part_stride: tensor.strides()[0],
        part_lse_stride: part_lse.strides()[0],
        rows: rows as i64,
        dim: count(dim),
        count: count(parts),
        out_type: element_type(out.dtype()),
        writes_lse: lse.is_some().into(),
    };
    let mut buffers = [None; BUFFERS];
    buffers[1] = read(tensor);
    buffers[2] = read(part_lse);
    buffers[3] = written(out);
    buffers[4] = lse.as_ref().and_then(written);
    Ok(Some(Dispatch {
        pipeline: pipeline(tensor.dtype()),
        params: Params::Merge(params),
        buffers,
        // At most 2^34 rows.
        grid: [rows.div_ceil(SIMD_GROUPS) as u32, 1, 1],
        threads: MERGE_THREADS,
        threadgroup_bytes: 0,
    }))
}
