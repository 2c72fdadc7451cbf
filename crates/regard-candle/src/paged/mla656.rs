//! A latent cache whose rows are stored in 656 bytes.

use super::{CacheFormat, CacheShape, PagedCache};
use crate::view::refuse;
use candle_core::{DType, Device, Result, Tensor};
use regard::format::Mla656;

impl PagedCache {
    /// An empty latent cache of `mla656` rows: 512 compressed dims in `e4m3` with a scale per 128
    /// of them, and 64 rotary dims in `bf16`. [`PagedCache::write_latent`] and
    /// [`PagedCache::append_latent`] quantize rows of f32, f16 or bf16.
    ///
    /// ```
    /// use candle_core::Device;
    /// use regard_candle::{CacheShape, PagedCache};
    ///
    /// let shape =
    ///     CacheShape { layers: 2, blocks: 8, block_size: 64, kv_heads: 1, head_dim: 576 };
    /// let cache = PagedCache::mla656(shape, &Device::Cpu)?;
    /// assert_eq!(cache.block_bytes(), 2 * 64 * 656);
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    /// If the head dim is not 576, or the device has too little memory.
    pub fn mla656(shape: CacheShape, device: &Device) -> Result<PagedCache> {
        let CacheShape { layers, blocks, block_size, kv_heads, head_dim } = shape;
        if head_dim != Mla656::VALUES {
            return Err(refuse("head_dim", head_dim, "576, for mla656"));
        }
        let pools = (0..layers).map(|_| {
            let bytes = (blocks, block_size, kv_heads, size_of::<Mla656>());
            let rows = Tensor::zeros(bytes, DType::U8, device)?;
            Ok([rows.clone(), rows])
        });
        let format = CacheFormat {
            keys: Some(regard::DType::Mla656),
            values: Some(regard::DType::Mla656Latent),
        };
        let (pools, scales) = (pools.collect::<Result<_>>()?, vec![[None, None]; layers]);
        Ok(PagedCache { shape, pools, format, scales, is_latent: true })
    }
}
