//! Candle's storage and layout as a regard view of the same memory.

use crate::options::Place;
use candle_core::{CpuStorage, Layout, Result, Storage};
use regard::{Element, Host, MAX_RANK, Tensor};

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
pub(crate) struct Cpu;

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
        of_storage(argument, storage, layout).map(|tensor| (tensor, ()))
    }
}

/// `u32` is read as `i32` (what does not fit shows as negative, and is refused where lengths and
/// blocks are checked), `u8` as booleans.
fn of_storage<'a>(argument: &str, storage: &'a CpuStorage, layout: &Layout) -> Result<Tensor<'a>> {
    match storage {
        CpuStorage::F32(data) => of_slice(argument, data, layout),
        CpuStorage::F16(data) => of_slice(argument, data, layout),
        CpuStorage::BF16(data) => of_slice(argument, data, layout),
        CpuStorage::I32(data) => of_slice(argument, data, layout),
        CpuStorage::U32(data) => {
            // SAFETY: u32 and i32 have one size and alignment, and every bit pattern is a value of
            // both.
            let data =
                unsafe { std::slice::from_raw_parts(data.as_ptr().cast::<i32>(), data.len()) };
            of_slice(argument, data, layout)
        }
        CpuStorage::U8(data) => of_slice(argument, data, layout),
        _ => {
            let found = candle_core::backend::BackendStorage::dtype(storage).as_str();
            Err(refuse(argument, format!("of type {found}"), "f32, f16, bf16, i32, u32 or u8"))
        }
    }
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

fn of_slice<'a, T: Element>(argument: &str, data: &'a [T], layout: &Layout) -> Result<Tensor<'a>> {
    let strides = strides(argument, layout)?;
    let data = data.get(layout.start_offset()..).unwrap_or(&[]);
    Tensor::from_slice(data, layout.dims(), Some(&strides[..layout.dims().len()])).map_err(wrap)
}
