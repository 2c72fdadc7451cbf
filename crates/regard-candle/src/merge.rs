//! Merging partial results, as a custom op.

use crate::attention::{RayonPool, zeros};
use crate::options::{CacheFormat, Place};
use crate::prepare::unit_stride;
use crate::view::{Cpu, refuse, wrap};
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, CustomOp2, Layout, Result, Shape, Storage, Tensor};
use half::{bf16, f16};
use regard::{DType, Float, Merge, TensorMut};
use std::sync::{Arc, Mutex};

/// Merges outputs and log-sum-exps over disjoint sets of keys into those over all of them, in new
/// tensors: a shared prefix and what follows it, or caches spread over devices.
///
/// `parts` is `[parts, rows.., dim]`, f32, f16 or bf16, and `part_lse` `[parts, rows..]`, f32: what
/// [`attention_with_lse`](crate::attention_with_lse) returned for each, stacked. A part whose
/// log-sum-exp is minus infinity has seen no key, and its output is not read.
///
/// # Errors
/// If shapes or types do not fit, or the tensors are on different devices.
pub fn merge(parts: &Tensor, part_lse: &Tensor) -> Result<(Tensor, Tensor)> {
    // The GPU's kernel reads rows without gaps between them.
    let [parts, part_lse] = match parts.device().is_cpu() {
        true => [unit_stride(parts)?, part_lse.clone()],
        false => [parts.contiguous()?, part_lse.contiguous()?],
    };
    if parts.rank() < 2 {
        let found = format!("of shape {:?}", parts.dims());
        return Err(refuse("parts", found, "[parts, rows.., dim]"));
    }
    let lse = Arc::new(Mutex::new(None));
    let out = parts.apply_op2(&part_lse, MergeParts { lse: lse.clone() })?;
    let lse = lse.lock().expect("no pass has panicked").take();
    let lse = lse.expect("the forward pass has run");
    let rows = &out.dims()[..out.rank() - 1];
    let lse = Tensor::from_storage(lse, rows, BackpropOp::none(), false);
    Ok((out, lse))
}

pub(crate) struct MergeParts {
    /// Receives the log-sum-exp: a custom op returns one tensor only.
    pub(crate) lse: Arc<Mutex<Option<Storage>>>,
}

impl CustomOp2 for MergeParts {
    fn name(&self) -> &'static str {
        "regard-merge"
    }

    fn cpu_fwd(
        &self,
        parts: &CpuStorage,
        parts_layout: &Layout,
        part_lse: &CpuStorage,
        part_lse_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let place = Cpu { format: CacheFormat::default() };
        let (parts, ()) = place.view("parts", parts, parts_layout)?;
        let (part_lse, ()) = place.view("part_lse", part_lse, part_lse_layout)?;
        let shape = parts.shape()[1..].to_vec();
        let storage = match parts.dtype() {
            DType::F16 => CpuStorage::F16(self.run::<f16>(parts, part_lse, &shape)?),
            DType::BF16 => CpuStorage::BF16(self.run::<bf16>(parts, part_lse, &shape)?),
            // Parts of a type that is not floating are refused in there, by name.
            _ => CpuStorage::F32(self.run::<f32>(parts, part_lse, &shape)?),
        };
        Ok((storage, Shape::from(shape)))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        parts: &candle_core::CudaStorage,
        parts_layout: &Layout,
        part_lse: &candle_core::CudaStorage,
        part_lse_layout: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        crate::cuda::merge(self, (parts, parts_layout), (part_lse, part_lse_layout))
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        parts: &candle_core::MetalStorage,
        parts_layout: &Layout,
        part_lse: &candle_core::MetalStorage,
        part_lse_layout: &Layout,
    ) -> Result<(candle_core::MetalStorage, Shape)> {
        crate::metal::merge(self, (parts, parts_layout), (part_lse, part_lse_layout))
    }
}

impl MergeParts {
    fn run<T: Float>(
        &self,
        parts: regard::Tensor,
        part_lse: regard::Tensor,
        shape: &[usize],
    ) -> Result<Vec<T>> {
        let rows = &shape[..shape.len() - 1];
        let mut out = zeros::<T>("out", shape)?;
        let mut lse = zeros::<f32>("lse", rows)?;
        let mut merge = Merge {
            parts,
            part_lse,
            out: TensorMut::from_slice(&mut out, shape, None).map_err(wrap)?,
            lse: Some(TensorMut::from_slice(&mut lse, rows, None).map_err(wrap)?),
        };
        let cpu = regard::cpu::Cpu::new().map_err(wrap)?.with_executor(RayonPool);
        cpu.merge(&mut merge).map_err(wrap)?;
        *self.lse.lock().expect("no pass has panicked") = Some(Storage::Cpu(CpuStorage::F32(lse)));
        Ok(out)
    }
}
