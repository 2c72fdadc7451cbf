//! The C structs of DLPack 1.3, and NumPy's `__array_struct__`.
//!
//! Source: <https://dmlc.github.io/dlpack/latest/c_api.html> and NumPy's array interface protocol.

use std::ffi::{c_char, c_int, c_void};

/// Name of a capsule of the first kind, and of one that was consumed.
pub const LEGACY: &std::ffi::CStr = c"dltensor";
/// See [`LEGACY`].
pub const USED_LEGACY: &std::ffi::CStr = c"used_dltensor";
/// Name of a capsule with a version, and of one that was consumed.
pub const VERSIONED: &std::ffi::CStr = c"dltensor_versioned";
/// See [`VERSIONED`].
pub const USED_VERSIONED: &std::ffi::CStr = c"used_dltensor_versioned";
/// Name of the capsule with an [`ExchangeApi`].
pub const EXCHANGE_API: &std::ffi::CStr = c"dlpack_exchange_api";

/// The major version whose structs these are.
pub const MAJOR_VERSION: u32 = 1;

/// `kDLCPU`.
pub const CPU: i32 = 1;
/// `kDLCUDA`.
pub const CUDA: i32 = 2;
/// `kDLCUDAHost`: pinned host memory.
pub const CUDA_HOST: i32 = 3;
/// `kDLCUDAManaged`.
pub const CUDA_MANAGED: i32 = 13;

/// `kDLInt`.
pub const INT: u8 = 0;
/// `kDLUInt`.
pub const UINT: u8 = 1;
/// `kDLFloat`.
pub const FLOAT: u8 = 2;
/// `kDLBfloat`.
pub const BFLOAT: u8 = 4;
/// `kDLBool`.
pub const BOOL: u8 = 6;
/// `kDLFloat8_e4m3fn`.
pub const FLOAT8_E4M3FN: u8 = 10;
/// `kDLFloat8_e5m2`.
pub const FLOAT8_E5M2: u8 = 12;

/// `DLPACK_FLAG_BITMASK_READ_ONLY`.
pub const READ_ONLY: u64 = 1;

/// `DLDevice`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Kind of device.
    pub kind: i32,
    /// Number among the devices of that kind.
    pub id: i32,
}

/// `DLDataType`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataType {
    /// Kind of number.
    pub code: u8,
    /// Bits of one.
    pub bits: u8,
    /// Numbers of an element; 1 but for vector types.
    pub lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
#[derive(Debug)]
pub struct Tensor {
    /// Start of the memory.
    pub data: *mut c_void,
    /// Device of the memory.
    pub device: Device,
    /// Number of dimensions.
    pub rank: i32,
    /// Element type.
    pub dtype: DataType,
    /// `rank` sizes.
    pub shape: *mut i64,
    /// `rank` strides in elements, or null if contiguous.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
pub struct Managed {
    /// The tensor.
    pub tensor: Tensor,
    /// The producer's own.
    pub context: *mut c_void,
    /// Gives the tensor back.
    pub deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
pub struct ManagedVersioned {
    /// Major and minor version.
    pub version: [u32; 2],
    /// The producer's own.
    pub context: *mut c_void,
    /// Gives the tensor back.
    pub deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    /// [`READ_ONLY`] and others.
    pub flags: u64,
    /// The tensor.
    pub tensor: Tensor,
}

/// `DLPackExchangeAPI`: a framework's C functions, found at its array type.
#[repr(C)]
pub struct ExchangeApi {
    /// Major and minor version.
    pub version: [u32; 2],
    /// An older table, or null.
    pub previous: *mut ExchangeApi,
    allocate: *const c_void,
    /// A new reference to the tensor of a Python object, without synchronization; -1 with a Python
    /// error set.
    pub managed_from_object:
        Option<unsafe extern "C" fn(*mut c_void, *mut *mut ManagedVersioned) -> c_int>,
    to_object: *const c_void,
    view_from_object: *const c_void,
    /// The stream that the framework queues work on now; -1 with a Python error set.
    pub current_work_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

// SAFETY: frameworks write their tables before they hand them out, and never again.
unsafe impl Send for ExchangeApi {}
// SAFETY: as above.
unsafe impl Sync for ExchangeApi {}

/// NumPy's `PyArrayInterface`, the contents of `__array_struct__`.
#[repr(C)]
pub struct ArrayInterface {
    /// 2.
    pub two: c_int,
    /// Number of dimensions.
    pub rank: c_int,
    /// Kind of number: `f`, `i`, `u`, `b`, or `V` for those that NumPy does not know.
    pub kind: c_char,
    /// Bytes of an element.
    pub item_size: c_int,
    /// Flags of the array.
    pub flags: c_int,
    /// Sizes.
    pub shape: *mut isize,
    /// Strides in bytes.
    pub strides: *mut isize,
    /// First element.
    pub data: *mut c_void,
}

/// `NPY_ARRAY_NOTSWAPPED`.
pub const NOT_SWAPPED: c_int = 0x200;
/// `NPY_ARRAY_WRITEABLE`.
pub const WRITEABLE: c_int = 0x400;
