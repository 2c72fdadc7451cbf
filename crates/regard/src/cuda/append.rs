//! Appending on a GPU.

use super::gpu::{Gpu, argument};
use super::{DeviceMemory, select};
use crate::append::{self, AppendScales, AppendShape};
use crate::error::Error;
use crate::kernel_parameters::{count, row_strides, scale_strides, token_strides};
use crate::params::{AppendParameters, CacheFormat, ElementType, KvTensor, TokenTensor};
use crate::tensor::{Dims, Tensor};
use cudarc::driver::{CudaStream, sys};

/// New tokens for a cache in a GPU's memory.
pub type Append<'a> = append::Append<'a, DeviceMemory>;

/// New rows for a latent cache in a GPU's memory.
pub type AppendLatent<'a> = append::AppendLatent<'a, DeviceMemory>;

/// Rotary position embedding by a table in a GPU's memory.
pub type Rotary<'a> = append::Rotary<'a, DeviceMemory>;

/// A tensor `[total, H, D]`.
fn token_tensor(pointer: u64, dims: &Dims) -> TokenTensor {
    TokenTensor { pointer, strides: token_strides(dims) }
}

/// A pool `[blocks, block_size, H, D]`.
fn pool_tensor(pointer: u64, dims: &Dims) -> KvTensor {
    KvTensor { pointer, strides: row_strides(dims, 3) }
}

/// The kernel's parameters, from checked operands.
fn parameters(append: &Append, shape: &AppendShape) -> AppendParameters {
    let mut parameters = AppendParameters {
        new_keys: token_tensor(append.key.address(), &append.key),
        new_values: token_tensor(append.value.address(), &append.value),
        keys: pool_tensor(append.key_pool.address(), &append.key_pool),
        values: pool_tensor(append.value_pool.address(), &append.value_pool),
        block_table: append.block_table.as_ref().map_or(0, Tensor::address),
        kv_lens: append.kv_lens.address(),
        cu_seqlens: append.cu_seqlens.as_ref().map_or(0, Tensor::address),
        block_table_stride: append.block_table.as_ref().map_or(0, |table| table.strides()[0]),
        batch: count(shape.batch),
        tokens: count(shape.tokens),
        new_tokens: count(shape.tokens.checked_div(shape.batch).unwrap_or(0)),
        kv_heads: count(shape.kv_heads),
        head_dim: count(shape.head_dim),
        value_dim: count(shape.value_dim),
        block_size: count(shape.block_size),
        blocks: count(shape.blocks),
        table_blocks: count(shape.table_blocks),
        element_bytes: count(shape.dtype.size()),
        element_type: ElementType::from_dtype(shape.dtype),
        ..AppendParameters::default()
    };
    set_cache(append, shape, &mut parameters);
    if let Some(rotary) = &append.rotary {
        set_rotary(rotary, shape, &mut parameters);
    }
    parameters
}

/// Fills in formats and scales of the pools.
fn set_cache(append: &Append, shape: &AppendShape, parameters: &mut AppendParameters) {
    parameters.cache.key_format = CacheFormat::from_dtype(shape.key_dtype);
    parameters.cache.value_format = CacheFormat::from_dtype(shape.value_dtype);
    if let Some(scales) = &append.k_scales {
        parameters.cache.key_scales = scales.address();
        parameters.cache.key_scale_strides = scale_strides(scales.dims());
        parameters.dynamic_key_scales = scales.is_dynamic().into();
    }
    if let Some(scales) = &append.v_scales {
        parameters.cache.value_scales = scales.address();
        parameters.cache.value_scale_strides = scale_strides(scales.dims());
        parameters.dynamic_value_scales = scales.is_dynamic().into();
    }
}

/// Fills in the parameters of a rotation.
fn set_rotary(rotary: &Rotary, shape: &AppendShape, parameters: &mut AppendParameters) {
    parameters.rotary = rotary.table.address();
    parameters.rotary_dim = shape.rotary_dim as i32;
    parameters.rotary_start = shape.rotary_start as i32;
    parameters.rotary_positions = shape.rotary_positions as i32;
    parameters.rotary_interleaved = rotary.interleaved.into();
    if let Some(query) = &rotary.query {
        parameters.query = token_tensor(query.address(), query);
        parameters.query_heads = shape.query_heads as i32;
    }
}

/// All operands that the stream uses.
fn memories(append: &Append) -> [(&'static str, Option<DeviceMemory>); 11] {
    let rotary = append.rotary.as_ref();
    let query = rotary.and_then(|rotary| rotary.query.as_ref());
    [
        ("key", Some(append.key.memory())),
        ("value", Some(append.value.memory())),
        ("key_pool", Some(append.key_pool.memory())),
        ("value_pool", Some(append.value_pool.memory())),
        ("block_table", append.block_table.map(|tensor| tensor.memory())),
        ("k_scales", append.k_scales.as_ref().map(AppendScales::memory)),
        ("v_scales", append.v_scales.as_ref().map(AppendScales::memory)),
        ("kv_lens", Some(append.kv_lens.memory())),
        ("cu_seqlens", append.cu_seqlens.map(|tensor| tensor.memory())),
        ("rotary table", rotary.map(|rotary| rotary.table.memory())),
        ("query", query.map(|query| query.memory())),
    ]
}

impl Gpu {
    /// Loads the kernel of [`Gpu::append`]. Modules cannot be loaded while a graph is captured.
    ///
    /// # Errors
    /// If the driver rejects the code.
    pub fn load_append(&self) -> Result<(), Error> {
        self.function(&select::append(&AppendParameters::default(), self.machine())?).map(|_| ())
    }

    /// Queues an append on `stream`, and returns. Lengths and table entries are read when the
    /// kernel runs.
    ///
    /// # Errors
    /// If an operand breaks the contract or was lent to another stream; nothing is queued then. Or
    /// if the driver fails.
    pub fn append(&self, stream: &CudaStream, append: &mut Append) -> Result<(), Error> {
        self.expect_owned(stream, append)?;
        // SAFETY: the stream is of this context, and operands are lent to it, or their makers have
        // promised as much.
        unsafe { self.append_raw(stream.cu_stream(), append) }
    }

    /// Checks that a stream is of this GPU, and that the operands are lent to it.
    fn expect_owned(&self, stream: &CudaStream, append: &Append) -> Result<(), Error> {
        self.expect_context(stream)?;
        memories(append).into_iter().try_for_each(|(name, memory)| {
            memory.map_or(Ok(()), |memory| memory.expect_stream(name, stream))
        })
    }

    /// [`Gpu::append`] to a latent cache. Rows that are not quantized are written as the rotary
    /// dims and the others.
    ///
    /// # Errors
    /// As there, or if rows that are not quantized have only rotary dims.
    pub fn append_latent(
        &self,
        stream: &CudaStream,
        append: &mut AppendLatent,
    ) -> Result<(), Error> {
        self.expect_owned(stream, &append.whole())?;
        // SAFETY: as for an append.
        unsafe { self.append_latent_raw(stream.cu_stream(), append) }
    }

    /// [`Gpu::append`] on a raw stream, for engines that manage their streams.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// `stream` is a stream of this GPU's context, and nothing else writes the operands, or reads
    /// what is written, until the append is done.
    pub unsafe fn append_raw(
        &self,
        stream: sys::CUstream,
        append: &mut Append,
    ) -> Result<(), Error> {
        let shape = append.check()?;
        // SAFETY: passed on.
        unsafe { self.append_checked(stream, append, &shape) }
    }

    /// Launches the kernel on checked operands.
    ///
    /// # Safety
    /// As [`Gpu::append_raw`]; the operands have been checked, and have these sizes.
    unsafe fn append_checked(
        &self,
        stream: sys::CUstream,
        append: &Append,
        shape: &AppendShape,
    ) -> Result<(), Error> {
        let parameters = parameters(append, shape);
        if parameters.tokens == 0 || parameters.batch == 0 {
            return Ok(());
        }
        let launch = select::append(&parameters, self.machine())?;
        let function = self.function(&launch)?;
        // SAFETY: the kernel reads these parameters; shapes are checked, and the caller has
        // promised the rest.
        unsafe { self.launch(function, &launch, &mut [argument(&parameters)], stream) }
    }

    /// [`Gpu::append_latent`] on a raw stream, for engines that manage their streams.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As [`Gpu::append_raw`].
    pub unsafe fn append_latent_raw(
        &self,
        stream: sys::CUstream,
        append: &mut AppendLatent,
    ) -> Result<(), Error> {
        let (append, shape) = append.on_gpu()?;
        // SAFETY: passed on.
        unsafe { self.append_checked(stream, &append, &shape) }
    }
}
