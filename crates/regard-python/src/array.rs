//! One argument: what memory a Python object stands for, and what keeps that memory alive.
//!
//! In this order: regard's own buffers, DLPack's C table of the object's type (PyTorch 2.10 and
//! later), `__cuda_array_interface__` (CuPy, Numba), `__array_struct__` (NumPy), `__dlpack__`
//! (anything else, such as JAX), and for integers lists. Nothing is copied, but 64-bit integers of
//! the host.

use crate::buffer::Buffer;
use crate::dlpack;
use crate::errors::{Fault, argument};
use crate::framework::Framework;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};
use pyo3::{ffi, intern};
use regard::{DType, MAX_RANK};
use std::fmt;
use std::ptr::NonNull;

/// Device of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// Host memory.
    Cpu,
    /// Memory of the NVIDIA GPU of that number.
    Cuda(i32),
    /// Another device, by DLPack's number.
    Other(i32),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Cpu => f.write_str("cpu"),
            Place::Cuda(id) => write!(f, "cuda:{id}"),
            Place::Other(kind) => match kind {
                8 => f.write_str("a Metal GPU"),
                10 => f.write_str("a ROCm GPU"),
                _ => write!(f, "a device of DLPack kind {kind}"),
            },
        }
    }
}

impl Place {
    fn from_device(device: dlpack::Device) -> Place {
        match device.kind {
            dlpack::CPU | dlpack::CUDA_HOST => Place::Cpu,
            dlpack::CUDA | dlpack::CUDA_MANAGED => Place::Cuda(device.id),
            kind => Place::Other(kind),
        }
    }
}

/// An element type, those that regard has not included: errors name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Type {
    /// One of regard's.
    Known(DType),
    /// 64-bit integers: narrowed where the host can read them.
    I64,
    /// Any other.
    Other(dlpack::DataType),
}

impl Type {
    fn from_dlpack(dtype: dlpack::DataType) -> Type {
        match (dtype.code, dtype.bits, dtype.lanes) {
            (dlpack::FLOAT, 32, 1) => Type::Known(DType::F32),
            (dlpack::FLOAT, 16, 1) => Type::Known(DType::F16),
            (dlpack::BFLOAT, 16, 1) => Type::Known(DType::BF16),
            (dlpack::INT, 32, 1) => Type::Known(DType::I32),
            (dlpack::INT, 8, 1) => Type::Known(DType::I8),
            (dlpack::FLOAT8_E4M3FN, 8, 1) => Type::Known(DType::E4M3),
            (dlpack::FLOAT8_E5M2, 8, 1) => Type::Known(DType::E5M2),
            (dlpack::BOOL | dlpack::UINT, 8, 1) => Type::Known(DType::Bool),
            (dlpack::INT, 64, 1) => Type::I64,
            _ => Type::Other(dtype),
        }
    }
}

/// The types that arguments can have.
const ALLOWED: &str = "f32, f16, bf16, e4m3, e5m2, i8, i32 or bool";

impl fmt::Display for Type {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Type::Known(dtype) => dtype.fmt(f),
            Type::I64 => f.write_str("i64"),
            Type::Other(dtype) => {
                let kind = match dtype.code {
                    dlpack::INT => "i",
                    dlpack::UINT => "u",
                    dlpack::FLOAT => "f",
                    dlpack::BFLOAT => "bf",
                    5 => "complex",
                    _ => "DLPack type ",
                };
                write!(f, "{kind}{}", dtype.bits)
            }
        }
    }
}

/// The owner of an array's memory.
enum Owner {
    Versioned(NonNull<dlpack::ManagedVersioned>),
    Legacy(NonNull<dlpack::Managed>),
    /// A Python object that owns the memory, or holds its owner.
    Object(#[expect(dead_code, reason = "it is held, not used")] Py<PyAny>),
    /// Integers that were narrowed.
    Ints(#[expect(dead_code, reason = "it is held, not used")] Vec<i32>),
}

impl Drop for Owner {
    fn drop(&mut self) {
        // SAFETY: the tensors were handed to this owner, which gives them back once, with the GIL
        // held as their producers may need.
        unsafe {
            match self {
                Owner::Versioned(managed) => {
                    if let Some(delete) = managed.as_ref().deleter {
                        delete(managed.as_ptr());
                    }
                }
                Owner::Legacy(managed) => {
                    if let Some(delete) = managed.as_ref().deleter {
                        delete(managed.as_ptr());
                    }
                }
                Owner::Object(_) | Owner::Ints(_) => {}
            }
        }
    }
}

// SAFETY: the memory may be used from any thread; owners are given back with the GIL held, as
// arrays are only dropped by functions that Python called.
unsafe impl Send for Array {}
// SAFETY: as above.
unsafe impl Sync for Array {}

/// An argument's memory. As long as this lives, it is not freed.
pub struct Array {
    /// The argument's name, for errors.
    pub name: &'static str,
    /// First element.
    pub data: *mut u8,
    /// Element type.
    pub dtype: DType,
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [i64; MAX_RANK],
    /// Device.
    pub place: Place,
    /// Framework.
    pub framework: Framework,
    /// The stream that `__cuda_array_interface__` names: its work is on this one.
    pub stream: Option<u64>,
    read_only: bool,
    _owner: Owner,
}

/// The facts that all protocols give.
struct Facts {
    data: *mut u8,
    dtype: Type,
    rank: usize,
    shape: [usize; MAX_RANK],
    strides: [i64; MAX_RANK],
    place: Place,
    read_only: bool,
}

impl Array {
    /// Reads an argument.
    ///
    /// # Errors
    /// If the object is no array, or one that regard cannot use; the error names the argument.
    pub fn read(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let py = object.py();
        if let Ok(buffer) = object.cast::<Buffer>() {
            let facts = buffer.get().facts();
            let owner = Owner::Object(object.clone().unbind());
            return Array::from_facts(name, facts, Framework::Own, None, owner);
        }
        if let Some(kind) = NUMPY_ARRAY.get(py)
            && kind.is(object.get_type())
        {
            let capsule = object.getattr(intern!(py, "__array_struct__"))?;
            return Array::from_struct(name, object, capsule);
        }
        if let Some((table, framework)) = exchange_api(object)? {
            refuse_gradient(name, object)?;
            let mut managed = std::ptr::null_mut();
            let convert = table.managed_from_object.expect("checked: the table has it");
            // SAFETY: the table belongs to the type of this object, and the GIL is held.
            let status = unsafe { convert(object.as_ptr().cast(), &mut managed) };
            let Some(managed) = NonNull::new(managed).filter(|_| status == 0) else {
                return Err(PyErr::take(py).unwrap_or_else(|| unreadable(name, object)));
            };
            return Array::from_versioned(name, managed, framework);
        }
        if let Some(interface) = object.getattr_opt(intern!(py, "__cuda_array_interface__"))? {
            let framework = Framework::from_object(object)?;
            // JAX's names no stream to wait for: 22 of 300 calls read new arrays before their
            // transfer had ended (JAX 0.11). Its DLPack export waits.
            if framework != Framework::Jax {
                refuse_gradient(name, object)?;
                return Array::from_cuda_interface(name, object, &interface, framework);
            }
        }
        if let Some(capsule) = object.getattr_opt(intern!(py, "__array_struct__"))? {
            remember_numpy(object)?;
            return Array::from_struct(name, object, capsule);
        }
        if object.hasattr(intern!(py, "__dlpack__"))? {
            refuse_gradient(name, object)?;
            return Array::from_dlpack(name, object);
        }
        if object.cast::<PyList>().is_ok() || object.cast::<PyTuple>().is_ok() {
            return Array::from_ints(name, object);
        }
        Err(unreadable(name, object))
    }

    /// Reads an argument that will be written.
    ///
    /// # Errors
    /// As [`Array::read`], and if the memory is read-only.
    pub fn read_mut(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let array = Array::read(name, object)?;
        let found = match (&array._owner, array.framework) {
            (Owner::Ints(_), _) => "a copy in 32 bits",
            (_, Framework::Jax) => "a JAX array, which is immutable",
            _ if array.read_only => "read-only",
            _ => return Ok(array),
        };
        Err(argument(name, found, "memory that can be written").into())
    }

    fn from_facts(
        name: &'static str,
        facts: Facts,
        framework: Framework,
        stream: Option<u64>,
        owner: Owner,
    ) -> PyResult<Array> {
        let Facts { data, dtype, rank, shape, strides, place, read_only } = facts;
        if let Place::Other(_) = place {
            return Err(argument(name, format!("on {place}"), "cpu or cuda").into());
        }
        let array = |dtype, data, strides, owner| Array {
            name,
            data,
            dtype,
            rank,
            shape,
            strides,
            place,
            framework,
            stream,
            read_only,
            _owner: owner,
        };
        match dtype {
            Type::Known(dtype) => {
                // A device's alignment is checked where views of its memory are made.
                if place == Place::Cpu && !(data as usize).is_multiple_of(dtype.alignment()) {
                    let found = format!("at {data:p}");
                    let allowed = format!("a multiple of {} for {dtype}", dtype.size());
                    return Err(argument(name, found, allowed).into());
                }
                Ok(array(dtype, data, strides, owner))
            }
            Type::I64 if place == Place::Cpu => {
                // SAFETY: the producer vouches for the memory, which `owner` holds.
                let ints = unsafe { narrowed(name, &facts)? };
                let data = ints.as_ptr().cast_mut().cast();
                Ok(array(DType::I32, data, contiguous(&shape[..rank]), Owner::Ints(ints)))
            }
            _ => Err(argument(name, format!("of type {dtype}"), ALLOWED).into()),
        }
    }

    fn from_versioned(
        name: &'static str,
        managed: NonNull<dlpack::ManagedVersioned>,
        framework: Framework,
    ) -> PyResult<Array> {
        let owner = Owner::Versioned(managed);
        // SAFETY: the producer filled it in, and it lives until it is given back.
        let managed = unsafe { managed.as_ref() };
        let mut facts = facts_of(name, &managed.tensor)?;
        facts.read_only = managed.flags & dlpack::READ_ONLY != 0;
        Array::from_facts(name, facts, framework, None, owner)
    }

    fn from_dlpack(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let py = object.py();
        let framework = Framework::from_object(object)?;
        let device: (i32, i32) =
            object.call_method0(intern!(py, "__dlpack_device__"))?.extract()?;
        let options = PyDict::new(py);
        if let Place::Cuda(_) = Place::from_device(dlpack::Device { kind: device.0, id: device.1 })
        {
            // JAX's export waits for kernels, but not for a transfer from the host that is under
            // way: 3 of 300 merges of new arrays read memory that had not arrived (JAX 0.11).
            if framework == Framework::Jax {
                object.call_method0(intern!(py, "block_until_ready"))?;
            }
            // PyTorch's work is on its current stream, where regard's will be. Others make the
            // legacy default stream wait for theirs; regard then runs on that one.
            let stream = if framework == Framework::Torch { -1 } else { 1 };
            options.set_item(intern!(py, "stream"), stream)?;
        }
        let export = object.getattr(intern!(py, "__dlpack__"))?;
        options.set_item(intern!(py, "max_version"), (dlpack::MAJOR_VERSION, 0))?;
        let capsule = match export.call((), Some(&options)) {
            Err(error) if error.is_instance_of::<PyTypeError>(py) => {
                options.del_item(intern!(py, "max_version"))?;
                export.call((), Some(&options))?
            }
            other => other?,
        };
        let pointer = capsule.as_ptr();
        // SAFETY: names and pointers are asked of a live capsule. Renaming it takes the tensor
        // over, as the protocol wants it.
        unsafe {
            if ffi::PyCapsule_IsValid(pointer, dlpack::VERSIONED.as_ptr()) == 1 {
                let managed = ffi::PyCapsule_GetPointer(pointer, dlpack::VERSIONED.as_ptr());
                let managed = NonNull::new(managed.cast::<dlpack::ManagedVersioned>())
                    .expect("a valid capsule has a pointer");
                let [major, minor] = managed.as_ref().version;
                if major != dlpack::MAJOR_VERSION {
                    let found = format!("exported by DLPack {major}.{minor}");
                    return Err(argument(name, found, "DLPack 1").into());
                }
                ffi::PyCapsule_SetName(pointer, dlpack::USED_VERSIONED.as_ptr());
                return Array::from_versioned(name, managed, framework);
            }
            if ffi::PyCapsule_IsValid(pointer, dlpack::LEGACY.as_ptr()) == 1 {
                let managed = ffi::PyCapsule_GetPointer(pointer, dlpack::LEGACY.as_ptr());
                let managed = NonNull::new(managed.cast::<dlpack::Managed>())
                    .expect("a valid capsule has a pointer");
                ffi::PyCapsule_SetName(pointer, dlpack::USED_LEGACY.as_ptr());
                let owner = Owner::Legacy(managed);
                let facts = facts_of(name, &managed.as_ref().tensor)?;
                return Array::from_facts(name, facts, framework, None, owner);
            }
        }
        Err(unreadable(name, object))
    }

    fn from_struct(
        name: &'static str,
        object: &Bound<'_, PyAny>,
        capsule: Bound<'_, PyAny>,
    ) -> PyResult<Array> {
        // SAFETY: a capsule without a name holds NumPy's struct, and owns it as well as the array.
        let interface = unsafe {
            let pointer = ffi::PyCapsule_GetPointer(capsule.as_ptr(), std::ptr::null());
            let Some(interface) = pointer.cast::<dlpack::ArrayInterface>().as_ref() else {
                return Err(PyErr::fetch(object.py()));
            };
            interface
        };
        let bits = (interface.item_size as u8).saturating_mul(8);
        let code = match interface.kind as u8 {
            b'f' if interface.item_size > 1 => dlpack::FLOAT,
            b'i' => dlpack::INT,
            b'u' => dlpack::UINT,
            b'b' => dlpack::BOOL,
            // Those of `ml_dtypes`, which NumPy does not know, or knows as floats.
            _ => unknown_to_numpy(object)?,
        };
        if interface.flags & dlpack::NOT_SWAPPED == 0 {
            return Err(argument(name, "in another byte order", "this machine's byte order").into());
        }
        // SAFETY: NumPy filled in `rank` of each.
        let (shape, strides) = unsafe {
            let rank = interface.rank as usize;
            (slice(interface.shape, rank), slice(interface.strides, rank))
        };
        let mut facts = Facts {
            data: interface.data.cast(),
            dtype: Type::from_dlpack(dlpack::DataType { code, bits, lanes: 1 }),
            rank: checked_rank(name, shape.len())?,
            shape: [1; MAX_RANK],
            strides: [0; MAX_RANK],
            place: Place::Cpu,
            read_only: interface.flags & dlpack::WRITEABLE == 0,
        };
        let size = interface.item_size.max(1) as i64;
        for (i, (&n, &stride)) in shape.iter().zip(strides).enumerate() {
            facts.shape[i] = n as usize;
            facts.strides[i] = in_elements(name, stride as i64, size)?;
        }
        Array::from_facts(name, facts, Framework::NumPy, None, Owner::Object(capsule.unbind()))
    }

    fn from_cuda_interface(
        name: &'static str,
        object: &Bound<'_, PyAny>,
        interface: &Bound<'_, PyAny>,
        framework: Framework,
    ) -> PyResult<Array> {
        let py = object.py();
        let get = |key: &str| interface.get_item(key);
        let optional = |key: &str| -> PyResult<Option<Bound<'_, PyAny>>> {
            let value = interface.call_method1(intern!(py, "get"), (key,))?;
            Ok((!value.is_none()).then_some(value))
        };
        let (address, read_only): (u64, bool) = get("data")?.extract()?;
        let shape: Vec<usize> = get("shape")?.extract()?;
        let kind: String = get("typestr")?.extract()?;
        let (code, size) = match kind.as_str() {
            "<f4" => (dlpack::FLOAT, 4),
            "<f2" => (dlpack::FLOAT, 2),
            "<i4" => (dlpack::INT, 4),
            "<i8" => (dlpack::INT, 8),
            "|b1" | "|u1" => (dlpack::BOOL, 1),
            "|i1" => (dlpack::INT, 1),
            // CuPy's arrays of the types of `ml_dtypes`.
            "<V2" | "|V2" => (unknown_to_numpy(object)?, 2),
            "|V1" | "<f1" | "|f1" => (unknown_to_numpy(object)?, 1),
            _ => return Err(argument(name, format!("of type {kind}"), ALLOWED).into()),
        };
        let rank = checked_rank(name, shape.len())?;
        let mut facts = Facts {
            data: address as *mut u8,
            dtype: Type::from_dlpack(dlpack::DataType { code, bits: 8 * size, lanes: 1 }),
            rank,
            shape: [1; MAX_RANK],
            strides: contiguous(&shape),
            place: Place::Cuda(crate::device::ordinal_of(name, address, object)?),
            read_only,
        };
        facts.shape[..rank].copy_from_slice(&shape);
        if let Some(strides) = optional("strides")? {
            let strides: Vec<i64> = strides.extract()?;
            for (to, &stride) in facts.strides.iter_mut().zip(&strides) {
                *to = in_elements(name, stride, i64::from(size))?;
            }
        }
        let stream = optional("stream")?.map(|stream| stream.extract()).transpose()?;
        let owner = Owner::Object(object.clone().unbind());
        Array::from_facts(name, facts, framework, stream, owner)
    }

    /// A list or tuple of integers.
    fn from_ints(name: &'static str, object: &Bound<'_, PyAny>) -> PyResult<Array> {
        let Ok(ints) = object.extract::<Vec<i32>>() else {
            let found = format!("a {} that is not of 32-bit integers", object.get_type().name()?);
            return Err(
                argument(name, found, "an array or, for lengths, a list of integers").into()
            );
        };
        let mut shape = [1; MAX_RANK];
        shape[0] = ints.len();
        let facts = Facts {
            data: ints.as_ptr().cast_mut().cast(),
            dtype: Type::Known(DType::I32),
            rank: 1,
            shape,
            strides: contiguous(&[ints.len()]),
            place: Place::Cpu,
            read_only: true,
        };
        Array::from_facts(name, facts, Framework::Own, None, Owner::Ints(ints))
    }

    /// Sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    /// Strides in elements.
    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.rank]
    }

    /// Takes bytes (`uint8` or `int8`) for elements of a cache's format. Of blocks, the last
    /// dimension is as many bytes as the blocks of a row have.
    ///
    /// # Errors
    /// If the elements are no bytes, or no whole blocks.
    pub fn stored_as(&mut self, format: DType) -> Result<(), Fault> {
        if self.dtype == format {
            return Ok(());
        }
        if !matches!(self.dtype, DType::Bool | DType::I8) {
            let found = format!("of type {}", self.dtype);
            return Err(argument(self.name, found, format!("{format}, or bytes (uint8)")));
        }
        let size = format.size();
        let rank = self.rank;
        let Some((last, outer)) = self.shape[..rank].split_last_mut() else {
            return Err(argument(self.name, "of no dimensions", "3 or 4 dimensions"));
        };
        let strides = &mut self.strides[..rank];
        let steps = outer.iter().zip(&*strides);
        let whole = last.is_multiple_of(size)
            && steps.into_iter().all(|(&n, &stride)| n <= 1 || stride % size as i64 == 0);
        let unit = *last <= 1 || strides[rank - 1] == 1;
        if !whole || !unit || !(self.data as usize).is_multiple_of(format.alignment()) {
            let found =
                format!("bytes of shape {:?} with strides {:?}", self.shape(), self.strides());
            let allowed = format!("whole elements of {format}, {size} bytes each");
            return Err(argument(self.name, found, allowed));
        }
        *last /= size;
        strides.iter_mut().for_each(|stride| *stride /= size as i64);
        strides[rank - 1] = 1;
        self.dtype = format;
        Ok(())
    }

    /// Takes dimensions 1 and 2 for each other: heads before tokens becomes tokens before heads.
    ///
    /// # Errors
    /// If there are not `rank` dimensions.
    pub fn swap_heads(&mut self, rank: usize, layout: &str) -> Result<(), Fault> {
        if self.rank != rank {
            let found = format!("of shape {:?}", self.shape());
            let allowed = format!("{rank} dimensions, because the layout is \"{layout}\"");
            return Err(argument(self.name, found, allowed));
        }
        self.shape.swap(1, 2);
        self.strides.swap(1, 2);
        Ok(())
    }
}

impl Buffer {
    fn facts(&self) -> Facts {
        let rank = self.shape().len();
        let mut shape = [1; MAX_RANK];
        shape[..rank].copy_from_slice(self.shape());
        Facts {
            data: self.data(),
            dtype: Type::Known(self.dtype()),
            rank,
            shape,
            strides: contiguous(self.shape()),
            place: self.place(),
            read_only: false,
        }
    }
}

/// Strides in elements of a contiguous array; they matter only where there are elements.
pub fn contiguous(shape: &[usize]) -> [i64; MAX_RANK] {
    let mut strides = [0; MAX_RANK];
    let mut stride = 1i64;
    for (to, &n) in strides[..shape.len().min(MAX_RANK)].iter_mut().zip(shape).rev() {
        *to = stride;
        stride = stride.saturating_mul(i64::try_from(n.max(1)).unwrap_or(i64::MAX));
    }
    strides
}

fn checked_rank(name: &str, rank: usize) -> Result<usize, Fault> {
    if rank <= MAX_RANK {
        return Ok(rank);
    }
    Err(argument(name, format!("of {rank} dimensions"), format!("at most {MAX_RANK} dimensions")))
}

fn in_elements(name: &str, stride: i64, size: i64) -> Result<i64, Fault> {
    if stride % size == 0 {
        return Ok(stride / size);
    }
    let found = format!("a view with a stride of {stride} bytes");
    Err(argument(name, found, format!("multiples of its elements' {size} bytes")))
}

fn facts_of(name: &str, tensor: &dlpack::Tensor) -> Result<Facts, Fault> {
    let rank = checked_rank(name, tensor.rank.max(0) as usize)?;
    // SAFETY: the producer filled in `rank` of each, or leaves strides null.
    let shape = unsafe { slice(tensor.shape, rank) };
    let mut facts = Facts {
        data: tensor.data.cast::<u8>().wrapping_add(tensor.byte_offset as usize),
        dtype: Type::from_dlpack(tensor.dtype),
        rank,
        shape: [1; MAX_RANK],
        strides: [0; MAX_RANK],
        place: Place::from_device(tensor.device),
        read_only: false,
    };
    for (to, &n) in facts.shape.iter_mut().zip(shape) {
        *to = n.max(0) as usize;
    }
    if tensor.strides.is_null() {
        facts.strides = contiguous(&facts.shape[..rank]);
    } else {
        // SAFETY: as above.
        facts.strides[..rank].copy_from_slice(unsafe { slice(tensor.strides, rank) });
    }
    Ok(facts)
}

/// A slice that C handed over; null where there is nothing.
///
/// # Safety
/// There are `len` elements at `data` for as long as the result is used.
unsafe fn slice<'a, T>(data: *const T, len: usize) -> &'a [T] {
    if len == 0 {
        return &[];
    }
    // SAFETY: passed on.
    unsafe { std::slice::from_raw_parts(data, len) }
}

/// 64-bit integers as contiguous 32-bit ones.
///
/// # Safety
/// `facts` describe readable host memory of `i64`.
unsafe fn narrowed(name: &str, facts: &Facts) -> Result<Vec<i32>, Fault> {
    let shape = &facts.shape[..facts.rank];
    let count: usize = shape.iter().product();
    let mut ints = Vec::with_capacity(count);
    let mut index = [0usize; MAX_RANK];
    for _ in 0..count {
        let offset: i64 =
            index.iter().zip(facts.strides).map(|(&index, stride)| index as i64 * stride).sum();
        // SAFETY: the offset is one of the array's; its alignment is not relied on.
        let value =
            unsafe { facts.data.cast::<i64>().wrapping_offset(offset as isize).read_unaligned() };
        let Ok(value) = i32::try_from(value) else {
            return Err(argument(name, format!("{value} in one element"), "what 32 bits hold"));
        };
        ints.push(value);
        for i in (0..facts.rank).rev() {
            index[i] += 1;
            if index[i] < shape[i] {
                break;
            }
            index[i] = 0;
        }
    }
    Ok(ints)
}

fn unreadable(name: &str, object: &Bound<'_, PyAny>) -> PyErr {
    let found = match object.get_type().qualname() {
        Ok(kind) => format!("of the type {kind}"),
        Err(_) => "of an unknown type".into(),
    };
    let allowed = "an array of NumPy, PyTorch, JAX, CuPy or any other with DLPack";
    argument(name, found, allowed).into()
}

/// DLPack's code of an element type of `ml_dtypes`; 255 for one that regard does not know either.
fn unknown_to_numpy(object: &Bound<'_, PyAny>) -> PyResult<u8> {
    let name = object.getattr("dtype")?.getattr("name")?;
    Ok(match name.extract::<String>()?.as_str() {
        "bfloat16" => dlpack::BFLOAT,
        "float8_e4m3fn" => dlpack::FLOAT8_E4M3FN,
        "float8_e5m2" => dlpack::FLOAT8_E5M2,
        _ => u8::MAX,
    })
}

/// Arrays that record gradients are refused while gradients are recorded.
fn refuse_gradient(name: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = object.py();
    let Some(requires_grad) = object.getattr_opt(intern!(py, "requires_grad"))? else {
        return Ok(());
    };
    if !requires_grad.is_truthy()? || !crate::framework::is_grad_enabled(py)? {
        return Ok(());
    }
    let allowed = "for inference only: a tensor without requires_grad, or a call inside \
                   torch.inference_mode() or torch.no_grad()";
    Err(argument(name, "a tensor that requires grad", allowed).into())
}

/// Whether an object is an array or a list, and no number.
///
/// # Errors
/// If looking at it fails.
pub fn is_array(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    Ok(object.cast::<PyList>().is_ok()
        || object.cast::<PyTuple>().is_ok()
        || object.hasattr(intern!(py, "__dlpack__"))?
        || object.hasattr(intern!(py, "__cuda_array_interface__"))?)
}

/// `numpy.ndarray`, once one was seen: finding out that an array is none of the others takes longer
/// than reading it.
static NUMPY_ARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();

/// Remembers the type of an array if it is NumPy's own.
fn remember_numpy(object: &Bound<'_, PyAny>) -> PyResult<()> {
    let kind = object.get_type();
    if kind.name()? == "ndarray" && kind.module()? == "numpy" {
        NUMPY_ARRAY.get_or_init(object.py(), || kind.unbind());
    }
    Ok(())
}

/// The C table of a framework's array type.
struct Exchange {
    kind: Py<PyType>,
    table: &'static dlpack::ExchangeApi,
    framework: Framework,
}

/// The C table of the object's type, if it has one, and whose it is. The first type that had one is
/// remembered, because looking attributes up takes longer than reading the tensor.
fn exchange_api(
    object: &Bound<'_, PyAny>,
) -> PyResult<Option<(&'static dlpack::ExchangeApi, Framework)>> {
    static FIRST: PyOnceLock<Exchange> = PyOnceLock::new();
    let py = object.py();
    let kind = object.get_type();
    if let Some(first) = FIRST.get(py)
        && first.kind.is(&kind)
    {
        return Ok(Some((first.table, first.framework)));
    }
    let Some(capsule) = kind.getattr_opt(intern!(py, "__dlpack_c_exchange_api__"))? else {
        return Ok(None);
    };
    // SAFETY: pointers are asked of a live object. A framework's tables live as long as the
    // process, and each names an older one or none.
    let table = unsafe {
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), dlpack::EXCHANGE_API.as_ptr()) != 1 {
            return Ok(None);
        }
        let mut table = ffi::PyCapsule_GetPointer(capsule.as_ptr(), dlpack::EXCHANGE_API.as_ptr())
            .cast::<dlpack::ExchangeApi>();
        while let Some(found) = table.as_ref().filter(|t| t.version[0] != dlpack::MAJOR_VERSION) {
            table = found.previous;
        }
        table.as_ref().filter(|table| table.managed_from_object.is_some())
    };
    let Some(table) = table else { return Ok(None) };
    let framework = Framework::from_object(object)?;
    FIRST.get_or_init(py, || Exchange { kind: kind.unbind(), table, framework });
    Ok(Some((table, framework)))
}

/// The stream on which the framework of PyTorch's kind queues work now, if its C table tells.
///
/// # Errors
/// If the framework fails.
pub fn current_work_stream(object: &Bound<'_, PyAny>, ordinal: i32) -> PyResult<Option<u64>> {
    let Some((table, _)) = exchange_api(object)? else { return Ok(None) };
    let Some(current) = table.current_work_stream else { return Ok(None) };
    let mut stream = std::ptr::null_mut();
    // SAFETY: the function writes one pointer.
    if unsafe { current(dlpack::CUDA, ordinal, &mut stream) } != 0 {
        return Err(PyErr::fetch(object.py()));
    }
    Ok(Some(stream as u64))
}
