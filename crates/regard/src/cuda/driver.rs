//! The NVIDIA driver: whether it is here, what its errors mean, and the few calls that cudarc does
//! not wrap.

use super::tensor_map::Described;
use crate::dtype::DType;
use crate::error::{Error, Refusal};
use crate::params::TensorMap;
use cudarc::driver::result::DriverError;
use cudarc::driver::{result, sys};
use std::ffi::{CString, c_void};
use std::sync::OnceLock;

/// An error unless there is a driver and it finds a GPU. Nothing else of this module or of cudarc
/// may be called before: what is not loaded cannot be called.
pub(super) fn require() -> Result<(), Error> {
    static STATE: OnceLock<Result<(), String>> = OnceLock::new();
    let state = STATE.get_or_init(|| {
        // A program that links the driver has not started without it.
        #[cfg(not(feature = "cuda-linked"))]
        // SAFETY: loading the driver's library runs its initializers, as in any program that uses
        // it.
        if !unsafe { sys::is_culib_present() } {
            return Err(
                "no NVIDIA driver is installed: its library (libcuda.so.1) cannot be loaded".into(),
            );
        }
        result::init().map_err(|error| format!("the NVIDIA driver does not start: {}", text(error)))
    });
    state.clone().map_err(|reason| Refusal { machine: "an NVIDIA GPU".into(), reason }.into())
}

/// The driver's version as CUDA counts: 12.8 is `(12, 8)`.
pub(super) fn version() -> Result<(u32, u32), Error> {
    require()?;
    let mut version = 0;
    // SAFETY: the driver writes one number.
    let status = unsafe { sys::cuDriverGetVersion(&mut version) };
    status.result().map_err(|error| driver_error("asking for the driver's version", error))?;
    let version = version.max(0) as u32;
    Ok((version / 1000, version % 1000 / 10))
}

/// The driver's name and text of an error.
pub(super) fn text(error: DriverError) -> String {
    let name = error.error_name().map_or_else(|_| format!("error {}", error.0 as u32), lossy);
    match error.error_string() {
        Ok(words) => format!("{name} ({})", lossy(words)),
        Err(_) => name,
    }
}

fn lossy(text: &std::ffi::CStr) -> String {
    text.to_string_lossy().into_owned()
}

/// A call of the driver that failed, for code that calls cudarc beside regard: `doing` is what was
/// being done.
pub fn driver_error(doing: impl Into<String>, error: DriverError) -> Error {
    Error::Driver { doing: doing.into(), reason: text(error) }
}

/// Bytes of the compiler's messages that are kept.
const LOG_BYTES: usize = 8192;

/// Loads device code (PTX or machine code, followed by a zero byte) into the context that is
/// current on this thread. The driver compiles PTX for the GPU, or finds it in its cache.
pub(super) fn load_module(name: &str, image: &[u8]) -> Result<sys::CUmodule, Error> {
    assert_eq!(image.last(), Some(&0), "PTX ends in a zero byte");
    let mut log = vec![0u8; LOG_BYTES];
    let mut module = std::ptr::null_mut();
    let mut options = [
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    let mut values = [log.as_mut_ptr().cast::<c_void>(), LOG_BYTES as *mut c_void];
    // SAFETY: the image is whole, and ends in a zero byte; the options name a buffer of that size,
    // which outlives the call.
    let status = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            options.len() as u32,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    status.result().map_err(|error| {
        let mut reason = text(error);
        let message = log.split(|&byte| byte == 0).next().unwrap_or_default();
        if !message.is_empty() {
            reason.push_str(&format!(": {}", String::from_utf8_lossy(message).trim()));
        }
        if error.0 == sys::CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
            && let Ok((major, minor)) = version()
        {
            let needed = ptx_version(image).unwrap_or("a newer version");
            reason.push_str(&format!(
                "; the driver is for CUDA {major}.{minor}, the code is PTX {needed}"
            ));
        }
        Error::Driver { doing: format!("loading the kernels of module {name}"), reason }
    })?;
    Ok(module)
}

/// The version in the header of a PTX text.
fn ptx_version(image: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(image).ok()?;
    text.lines().find_map(|line| line.trim().strip_prefix(".version ")).map(str::trim)
}

/// A kernel of a loaded module. It is there at once, even where the driver loads lazily: it must
/// not be loaded while a graph is captured.
pub(super) fn load_function(
    module: sys::CUmodule,
    name: &str,
    entry: &str,
    max_shared_bytes: usize,
) -> Result<sys::CUfunction, Error> {
    let doing = || format!("looking up kernel {entry} of module {name}");
    let entry_name = CString::new(entry).map_err(|_| {
        Error::argument("kernel", format!("{entry:?}"), "a name without a zero byte")
    })?;
    // SAFETY: the module is loaded and stays so: nothing unloads it before its context goes.
    let function = unsafe { result::module::get_function(module, entry_name) }
        .map_err(|error| driver_error(doing(), error))?;
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
    // SAFETY: the function has just been found.
    let own = unsafe { result::function::get_function_attribute(function, attribute) }
        .map_err(|error| driver_error(doing(), error))?;
    let dynamic = max_shared_bytes.saturating_sub(own.max(0) as usize);
    let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    // SAFETY: as above.
    unsafe { result::function::set_function_attribute(function, attribute, dynamic as i32) }
        .map_err(|error| {
            driver_error(format!("allowing kernel {entry} {dynamic} bytes of shared memory"), error)
        })?;
    Ok(function)
}

/// Encodes the TMA tensor map of a tensor: boxes of two-byte elements are swizzled, boxes of codes
/// are not. `argument` is the operand's name.
pub(super) fn encode(
    argument: &str,
    dtype: DType,
    described: &Described,
) -> Result<TensorMap, Error> {
    let mut map = TensorMap([0; 128]);
    let element = match dtype {
        DType::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
        _ if dtype.is_code() => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        _ => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    };
    let swizzle = match dtype.is_code() {
        true => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
        false => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
    };
    let promotion = match described.fetches_256_bytes() {
        true => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        false => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    };
    // SAFETY: the driver writes 128 bytes, aligned as it wants them, and reads four dimensions,
    // three strides, and boxes of four dimensions.
    let status = unsafe {
        sys::cuTensorMapEncodeTiled(
            std::ptr::from_mut(&mut map).cast(),
            element,
            4,
            described.address as *mut c_void,
            described.dims.as_ptr(),
            described.strides.as_ptr(),
            described.box_dims.as_ptr(),
            [1; 4].as_ptr(),
            sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle,
            promotion,
            sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    status
        .result()
        .map_err(|error| driver_error(format!("describing `{argument}` ({described:?})"), error))?;
    Ok(map)
}
