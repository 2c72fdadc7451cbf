//! Candle's storage and layout as a regard view of the same memory.

use candle_core::{CpuStorage, Layout, Result};
use regard::{Element, MAX_RANK, Tensor};

/// An error of regard's, as candle reports it.
pub(crate) fn wrap(error: regard::Error) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

/// An argument error in regard's form.
pub(crate) fn refuse(argument: &str, found: impl std::fmt::Display, allowed: &str) -> candle_core::Error {
    wrap(regard::Error::argument(argument, found, allowed))
}

/// The operand named `argument`, where it lies. `u32` is read as `i32` (what does not fit shows as negative, and is refused where lengths and
/// blocks are checked), `u8` as booleans.
pub(crate) fn of_storage<'a>(argument: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<Tensor<'a>> {
    match storage {
        CpuStorage::F32(data) => of_slice(argument, data, layout),
        CpuStorage::F16(data) => of_slice(argument, data, layout),
        CpuStorage::BF16(data) => of_slice(argument, data, layout),
        CpuStorage::I32(data) => of_slice(argument, data, layout),
        CpuStorage::U32(data) => {
            // SAFETY: u32 and i32 have one size and alignment, and every bit pattern is a value of both.
            let data = unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<i32>(), data.len()) };
            of_slice(argument, data, layout)
        }
        CpuStorage::U8(data) => of_slice(argument, data, layout),
        _ => {
            let found = candle_core::backend::BackendStorage::dtype(storage).as_str();
            Err(refuse(argument, format!("of type {found}"), "f32, f16, bf16, i32, u32 or u8"))
        }
    }
}

fn of_slice<'a, T: Element>(argument: &str, data: &'a [T], layout: &Layout) -> Result<Tensor<'a>> {
    let rank = layout.dims().len();
    if rank > MAX_RANK {
        let found = format!("of shape {:?}", layout.dims());
        return Err(refuse(argument, found, "at most 5 dimensions"));
    }
    let mut strides = [0i64; MAX_RANK];
    for (stride, &found) in strides.iter_mut().zip(layout.stride()) {
        *stride = i64::try_from(found).map_err(candle_core::Error::wrap)?;
    }
    let data = data.get(layout.start_offset()..).unwrap_or(&[]);
    Tensor::from_slice(data, layout.dims(), Some(&strides[..rank])).map_err(wrap)
}
