//! Candle's storage and layout as a regard view of the same memory.

use crate::options::{CacheFormat, Place};
use candle_core::{CpuStorage, Layout, Result, Storage};
use regard::format::{BlockQ4_0, BlockQ8_0, E4m3, E5m2, Mla656};
use regard::{DType, Element, Host, MAX_RANK, Tensor};

/// An error of regard's, as candle reports it.
pub(crate) fn wrap(error: regard::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// An argument error in regard's form.
pub(crate) fn refuse(
    argument: &str,
    found: impl std::fmt::Display,
    allowed: &str,
) -> candle_core::Error {
    wrap(regard::Error::argument(argument, found, allowed))
}

/// The host's memory.
pub(crate) struct Cpu {
    /// Formats of keys and values that are bytes.
    pub(crate) format: CacheFormat,
}

impl Place for Cpu {
    type Storage = CpuStorage;
    type Memory = Host;
    type Guard<'a> = ();

    const NAME: &'static str = "on the CPU";

    fn storage(storage: &Storage) -> Option<&CpuStorage> {
        match storage {
            Storage::Cpu(storage) => Some(storage),
            Storage::Cuda(_) | Storage::Metal(_) => None,
        }
    }

    fn view<'a>(
        &'a self,
        argument: &str,
        storage: &'a CpuStorage,
        layout: &Layout,
    ) -> Result<(Tensor<'a>, ())> {
        let tensor = match (storage, self.format.for_argument(argument)) {
            (CpuStorage::U8(data), Some(format)) => from_bytes(argument, data, layout, format),
            _ => from_storage(argument, storage, layout),
        };
        tensor.map(|tensor| (tensor, ()))
    }
}

/// `u32` is read as `i32` (what does not fit shows as negative, and is refused where lengths and
/// blocks are checked), `u8` as booleans.
fn from_storage<'a>(
    argument: &str,
    storage: &'a CpuStorage,
    layout: &Layout,
) -> Result<Tensor<'a>> {
    match storage {
        CpuStorage::F32(data) => from_slice(argument, data, layout),
        CpuStorage::F16(data) => from_slice(argument, data, layout),
        CpuStorage::BF16(data) => from_slice(argument, data, layout),
        CpuStorage::I32(data) => from_slice(argument, data, layout),
        CpuStorage::U32(data) => {
            // SAFETY: u32 and i32 have one size and alignment, and every bit pattern is a value of
            // both.
            let data =
                unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<i32>(), data.len()) };
            from_slice(argument, data, layout)
        }
        CpuStorage::U8(data) => from_slice(argument, data, layout),
        CpuStorage::F8E4M3(data) => {
            // SAFETY: `as_bytes` has made sure that an element is one byte, and every byte is an
            // `E4m3`.
            let codes = unsafe { cast::<E4m3>(as_bytes(data)) };
            from_slice(argument, codes, layout)
        }
        _ => {
            let found = candle_core::backend::BackendStorage::dtype(storage).as_str();
            Err(refuse(
                argument,
                format!("of type {found}"),
                "f32, f16, bf16, f8e4m3, i32, u32 or u8",
            ))
        }
    }
}

/// The bytes of elements of one byte.
fn as_bytes<T>(data: &[T]) -> &[u8] {
    assert_eq!(size_of::<T>(), 1, "elements of one byte");
    // SAFETY: as many initialized bytes as elements.
    unsafe { std::slice::from_raw_parts(data.as_ptr().cast(), data.len()) }
}

/// The whole elements at the beginning of bytes.
///
/// # Safety
/// `T` has no padding, any bytes are a value of it, and the bytes are aligned for it.
unsafe fn cast<T>(bytes: &[u8]) -> &[T] {
    // SAFETY: the caller's promise; what does not fill an element is left out.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), bytes.len() / size_of::<T>()) }
}

/// Bytes as elements of a cache's format.
fn from_bytes<'a>(
    argument: &str,
    data: &'a [u8],
    layout: &Layout,
    format: DType,
) -> Result<Tensor<'a>> {
    let Elements { shape, strides } = elements(argument, layout, format)?;
    let bytes = data.get(layout.start_offset()..).unwrap_or(&[]);
    if !bytes.as_ptr().addr().is_multiple_of(format.alignment()) {
        let found = format!("at an address that is no multiple of {}", format.alignment());
        return Err(refuse(argument, found, "bytes that are aligned for their format"));
    }
    let strides = Some(&strides[..]);
    // SAFETY: none of these types has padding (blocks are an f16 and bytes, rows have parts of
    // multiples of 4 bytes), any bytes are a value
    // of theirs, and the alignment was checked.
    let tensor = unsafe {
        match format {
            DType::E4M3 => Tensor::from_slice(cast::<E4m3>(bytes), &shape, strides),
            DType::E5M2 => Tensor::from_slice(cast::<E5m2>(bytes), &shape, strides),
            DType::I8 => Tensor::from_slice(cast::<i8>(bytes), &shape, strides),
            DType::Q8_0 => Tensor::from_slice(cast::<BlockQ8_0>(bytes), &shape, strides),
            DType::Mla656 => Tensor::from_slice(cast::<Mla656>(bytes), &shape, strides),
            DType::Mla656Latent => Tensor::from_slice(cast::<Mla656>(bytes), &shape, strides)
                .and_then(|rows| rows.prefix(Mla656::LATENT_VALUES)),
            _ => Tensor::from_slice(cast::<BlockQ4_0>(bytes), &shape, strides),
        }
    };
    tensor.map_err(wrap)
}

/// A layout of bytes, counted in a format's elements.
pub(crate) struct Elements {
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<i64>,
}

/// The shape and strides of bytes as elements of that format; an error where they are not whole.
pub(crate) fn elements(argument: &str, layout: &Layout, format: DType) -> Result<Elements> {
    if !format.is_code() && !format.is_block() {
        return Err(refuse(
            &format!("format of {argument}"),
            format,
            "e4m3, e5m2, i8, q8_0, q4_0 or mla656",
        ));
    }
    let size = format.size();
    let bytes = &strides(argument, layout)?[..layout.dims().len()];
    let mut shape = layout.dims().to_vec();
    let Some((last, outer)) = shape.split_last_mut() else {
        return Err(refuse(argument, "of no dimensions", "3 or 4 dimensions"));
    };
    let fits_blocks = last.is_multiple_of(size)
        && outer.iter().zip(bytes).all(|(&n, &stride)| n <= 1 || stride % size as i64 == 0);
    let unit = *last <= 1 || bytes.last() == Some(&1);
    if !fits_blocks || !unit {
        let found = format!("bytes of shape {:?} with strides {bytes:?}", layout.dims());
        return Err(refuse(argument, found, &format!("whole elements of {format}, {size} bytes")));
    }
    *last /= size;
    let mut strides: Vec<i64> = bytes.iter().map(|stride| stride / size as i64).collect();
    if let Some(innermost) = strides.last_mut() {
        *innermost = 1;
    }
    Ok(Elements { shape, strides })
}

/// The strides of a layout, as regard counts them; an error where it has too many dimensions.
pub(crate) fn strides(argument: &str, layout: &Layout) -> Result<[i64; MAX_RANK]> {
    if layout.dims().len() > MAX_RANK {
        let found = format!("of shape {:?}", layout.dims());
        return Err(refuse(argument, found, "at most 5 dimensions"));
    }
    let mut strides = [0i64; MAX_RANK];
    for (stride, &found) in strides.iter_mut().zip(layout.stride()) {
        *stride = i64::try_from(found).map_err(candle_core::Error::wrap)?;
    }
    Ok(strides)
}

fn from_slice<'a, T: Element>(
    argument: &str,
    data: &'a [T],
    layout: &Layout,
) -> Result<Tensor<'a>> {
    let strides = strides(argument, layout)?;
    let data = data.get(layout.start_offset()..).unwrap_or(&[]);
    Tensor::from_slice(data, layout.dims(), Some(&strides[..layout.dims().len()])).map_err(wrap)
}
