//! The storage of keys and values in a cache.

use candle_core::{DType, Device, Result, Tensor};
use clap::ValueEnum;
use regard_candle::{CacheFormat, CacheShape, PagedCache, regard};

/// The type of keys and values in a cache. Types of 8 and 4 bits are quantized as they are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum CacheType {
    /// As the model computes them
    #[default]
    Model,
    /// 32 bits
    #[value(name = "f32")]
    F32,
    /// 16 bits
    #[value(name = "f16")]
    F16,
    /// 16 bits
    #[value(name = "bf16")]
    Bf16,
    /// 8-bit floats, a scale per token and head
    #[value(name = "e4m3")]
    E4m3,
    /// 8-bit floats of a wider range, likewise
    #[value(name = "e5m2")]
    E5m2,
    /// 8-bit integers, likewise
    #[value(name = "i8")]
    I8,
    /// GGUF's blocks of 8 bits
    #[value(name = "q8_0")]
    Q8_0,
    /// GGUF's blocks of 4 bits
    #[value(name = "q4_0")]
    Q4_0,
}

impl CacheType {
    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            CacheType::Model => "model",
            CacheType::F32 => "f32",
            CacheType::F16 => "f16",
            CacheType::Bf16 => "bf16",
            CacheType::E4m3 => "e4m3",
            CacheType::E5m2 => "e5m2",
            CacheType::I8 => "i8",
            CacheType::Q8_0 => "q8_0",
            CacheType::Q4_0 => "q4_0",
        }
    }

    /// Empty pages, for a model that computes in `dtype`.
    ///
    /// # Errors
    /// If the head dim is no whole number of the format's blocks, or there is not that much memory.
    pub fn pages(self, shape: CacheShape, dtype: DType, device: &Device) -> Result<PagedCache> {
        let format = match self {
            CacheType::Model => return PagedCache::new(shape, dtype, device),
            CacheType::F32 => return PagedCache::new(shape, DType::F32, device),
            CacheType::F16 => return PagedCache::new(shape, DType::F16, device),
            CacheType::Bf16 => return PagedCache::new(shape, DType::BF16, device),
            CacheType::E4m3 => regard::DType::E4M3,
            CacheType::E5m2 => regard::DType::E5M2,
            CacheType::I8 => regard::DType::I8,
            CacheType::Q8_0 => regard::DType::Q8_0,
            CacheType::Q4_0 => regard::DType::Q4_0,
        };
        PagedCache::with_format(shape, CacheFormat::new(format), device)
    }
}

/// Rows as a cache takes them: in the type of its pools, if that is a float.
///
/// # Errors
/// If candle fails.
pub fn rows_for(cache: &PagedCache, rows: &Tensor) -> Result<Tensor> {
    let (keys, _) = cache.pools(0)?;
    match keys.dtype() {
        DType::U8 => Ok(rows.clone()),
        dtype => rows.to_dtype(dtype),
    }
}
