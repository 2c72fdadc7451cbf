//! Appends on GPUs, as candle's custom ops: they write pools in place.

use super::Tables;
use crate::options::CacheFormat;
#[cfg(any(feature = "cuda", feature = "metal"))]
use crate::options::{Held, Place};
use candle_core::{CpuStorage, InplaceOp2, InplaceOp3, Layout, Result, Tensor};

/// The tables of an append, locked for reading.
#[cfg(any(feature = "cuda", feature = "metal"))]
pub(crate) struct HeldTables<'a> {
    block_table: Held<'a>,
    kv_lens: Held<'a>,
    cu_seqlens: Option<Held<'a>>,
}

/// Views of the tables of an append, and what holds their memory meanwhile.
#[cfg(any(feature = "cuda", feature = "metal"))]
pub(crate) struct TableViews<'a, P: Place + 'a> {
    pub(crate) block_table: regard::Tensor<'a, P::Memory>,
    pub(crate) kv_lens: regard::Tensor<'a, P::Memory>,
    pub(crate) cu_seqlens: Option<regard::Tensor<'a, P::Memory>>,
    _guards: Vec<P::Guard<'a>>,
}

#[cfg(any(feature = "cuda", feature = "metal"))]
impl<'a> HeldTables<'a> {
    pub(crate) fn new(tables: &'a Tables) -> HeldTables<'a> {
        HeldTables {
            block_table: Held::new(&tables.block_table),
            kv_lens: Held::new(&tables.kv_lens),
            cu_seqlens: tables.cu_seqlens.as_ref().map(Held::new),
        }
    }

    pub(crate) fn views<'b, P: Place>(&'b self, place: &'b P) -> Result<TableViews<'b, P>> {
        let (block_table, table_guard) = self.block_table.view("block_table", place)?;
        let (kv_lens, lens_guard) = self.kv_lens.view("kv_lens", place)?;
        let mut guards = vec![table_guard, lens_guard];
        let cu_seqlens = match &self.cu_seqlens {
            Some(held) => {
                let (starts, guard) = held.view("cu_seqlens_q", place)?;
                guards.push(guard);
                Some(starts)
            }
            None => None,
        };
        Ok(TableViews { block_table, kv_lens, cu_seqlens, _guards: guards })
    }
}

/// An append on a GPU, in place of the keys' pool.
#[cfg_attr(
    not(any(feature = "cuda", feature = "metal")),
    expect(dead_code, reason = "only GPUs have such appends")
)]
pub(crate) struct AppendRows<'a> {
    pub(crate) value_pool: Tensor,
    /// Scales of keys and of values, written with their codes.
    pub(crate) scales: [Option<Tensor>; 2],
    /// Format of the pools' bytes.
    pub(crate) format: CacheFormat,
    pub(crate) tables: &'a Tables,
}

impl InplaceOp3 for AppendRows<'_> {
    fn name(&self) -> &'static str {
        "regard-append"
    }

    fn cpu_fwd(
        &self,
        _: &mut CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<()> {
        candle_core::bail!("{}: rows on the CPU, pools on another device", self.name())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        pool: &mut candle_core::CudaStorage,
        pool_layout: &Layout,
        keys: &candle_core::CudaStorage,
        keys_layout: &Layout,
        values: &candle_core::CudaStorage,
        values_layout: &Layout,
    ) -> Result<()> {
        let rows = [(keys, keys_layout), (values, values_layout)];
        crate::cuda::append(self, (pool, pool_layout), rows)
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        pool: &mut candle_core::MetalStorage,
        pool_layout: &Layout,
        keys: &candle_core::MetalStorage,
        keys_layout: &Layout,
        values: &candle_core::MetalStorage,
        values_layout: &Layout,
    ) -> Result<()> {
        let rows = [(keys, keys_layout), (values, values_layout)];
        crate::metal::append(self, (pool, pool_layout), rows)
    }
}

/// An append to a latent cache on a GPU, in place of its pool.
#[cfg_attr(
    not(any(feature = "cuda", feature = "metal")),
    expect(dead_code, reason = "only GPUs have such appends")
)]
pub(crate) struct AppendLatentRows<'a> {
    /// Format of the pool's bytes.
    pub(crate) format: CacheFormat,
    pub(crate) tables: &'a Tables,
}

impl InplaceOp2 for AppendLatentRows<'_> {
    fn name(&self) -> &'static str {
        "regard-append-latent"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<()> {
        candle_core::bail!("{}: rows on the CPU, the pool on another device", self.name())
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        pool: &mut candle_core::CudaStorage,
        pool_layout: &Layout,
        rows: &candle_core::CudaStorage,
        rows_layout: &Layout,
    ) -> Result<()> {
        crate::cuda::append_latent(self, (pool, pool_layout), (rows, rows_layout))
    }

    #[cfg(feature = "metal")]
    fn metal_fwd(
        &self,
        pool: &mut candle_core::MetalStorage,
        pool_layout: &Layout,
        rows: &candle_core::MetalStorage,
        rows_layout: &Layout,
    ) -> Result<()> {
        crate::metal::append_latent(self, (pool, pool_layout), (rows, rows_layout))
    }
}
