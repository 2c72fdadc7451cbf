//! Memory of regard's own, for results that no framework was asked to hold.

use crate::array::{Place, contiguous};
use crate::dlpack;
use crate::errors::argument;
use pyo3::exceptions::{PyAttributeError, PyBufferError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyAny, PyDict, PyList, PyTuple};
use regard::DType;
use std::alloc::Layout;
use std::ffi::c_void;
use std::ptr::NonNull;

/// Alignment that XLA wants of memory that it takes over without a copy.
const ALIGNMENT: usize = 64;

enum Memory {
    Host { data: NonNull<u8>, layout: Layout },
    Cuda(crate::device::Allocation),
}

// SAFETY: plain memory; who reads and writes it when is the caller's affair, as with any array.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Memory::Host { data, layout } = self {
            // SAFETY: it was allocated with this layout.
            unsafe { std::alloc::dealloc(data.as_ptr(), *layout) };
        }
    }
}

/// A contiguous array in regard's own memory. `numpy.asarray`, `torch.from_dlpack` and
/// `jax.dlpack.from_dlpack` make views of it, and regard takes it where it takes arrays.
#[pyclass(frozen, module = "regard")]
pub struct Buffer {
    memory: Memory,
    dtype: DType,
    shape: Vec<usize>,
    place: Place,
}

impl Buffer {
    /// A buffer of that shape; host memory is zero, a GPU's is not.
    ///
    /// # Errors
    /// If there is not so much memory.
    pub fn new(shape: &[usize], dtype: DType, place: Place) -> PyResult<Buffer> {
        let bytes = shape.iter().try_fold(dtype.size(), |all, &n| all.checked_mul(n));
        let layout = bytes.and_then(|bytes| Layout::from_size_align(bytes.max(1), ALIGNMENT).ok());
        let Some(layout) = layout else {
            return Err(argument("shape", format!("{shape:?}"), "what fits in memory").into());
        };
        let memory = match place {
            Place::Cuda(ordinal) => {
                Memory::Cuda(crate::device::Allocation::new(ordinal, layout.size())?)
            }
            _ => {
                // SAFETY: the layout is not empty.
                let data = NonNull::new(unsafe { std::alloc::alloc_zeroed(layout) });
                let Some(data) = data else {
                    let found = format!("{} bytes", layout.size());
                    return Err(argument("shape", found, "what fits in memory").into());
                };
                Memory::Host { data, layout }
            }
        };
        Ok(Buffer { memory, dtype, shape: shape.to_vec(), place })
    }

    /// A buffer of these integers.
    ///
    /// # Errors
    /// If there is not so much memory.
    pub fn from_ints(ints: &[i32], shape: &[usize]) -> PyResult<Buffer> {
        debug_assert_eq!(ints.len(), shape.iter().product::<usize>());
        let buffer = Buffer::new(shape, DType::I32, Place::Cpu)?;
        // SAFETY: the buffer is new, and holds as many integers.
        unsafe { buffer.data().cast::<i32>().copy_from_nonoverlapping(ints.as_ptr(), ints.len()) };
        Ok(buffer)
    }

    /// First element.
    pub fn data(&self) -> *mut u8 {
        match &self.memory {
            Memory::Host { data, .. } => data.as_ptr(),
            Memory::Cuda(allocation) => allocation.address() as *mut u8,
        }
    }

    /// Device.
    pub fn place(&self) -> Place {
        self.place
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Sizes of the dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn device(&self) -> (i32, i32) {
        match self.place {
            Place::Cuda(id) => (dlpack::CUDA, id),
            _ => (dlpack::CPU, 0),
        }
    }
}

/// The contents of a capsule: the struct that consumers see comes first.
#[repr(C)]
struct Exported {
    managed: dlpack::Managed,
    shape: Vec<i64>,
    strides: Vec<i64>,
    owner: Py<Buffer>,
}

unsafe extern "C" fn delete_exported(managed: *mut dlpack::Managed) {
    // SAFETY: it is the first field of a boxed `Exported`, which is given back once. Consumers may
    // have released the GIL.
    Python::attach(|_| drop(unsafe { Box::from_raw(managed.cast::<Exported>()) }));
}

/// Frees what no consumer took.
unsafe extern "C" fn delete_capsule(capsule: *mut ffi::PyObject) {
    // SAFETY: a capsule of `__dlpack__`; consumers rename it when they take the tensor.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, dlpack::LEGACY.as_ptr()) == 1 {
            let managed = ffi::PyCapsule_GetPointer(capsule, dlpack::LEGACY.as_ptr());
            delete_exported(managed.cast());
        }
    }
}

#[pymethods]
impl Buffer {
    /// Sizes of the dimensions.
    #[getter(shape)]
    fn python_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// The element type: "f32", "f16", "bf16", "i32" or "bool".
    #[getter(dtype)]
    fn python_dtype(&self) -> &'static str {
        self.dtype.name()
    }

    /// Device of the memory: "cpu" or "cuda:0".
    #[getter(device)]
    fn python_device(&self) -> String {
        self.place.to_string()
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        self.device()
    }

    /// The array as a capsule of DLPack. `stream`, `max_version`, `dl_device` and `copy` are as in
    /// the protocol; work that wrote a buffer is done before a caller has it.
    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__<'py>(
        slf: Bound<'py, Self>,
        stream: Option<Bound<'py, PyAny>>,
        max_version: Option<Bound<'py, PyAny>>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let _ = (stream, max_version);
        let py = slf.py();
        let this = slf.get();
        if copy == Some(true) || dl_device.is_some_and(|device| device != this.device()) {
            return Err(PyBufferError::new_err(
                "regard exports its buffers where they are, uncopied",
            ));
        }
        let (code, bits) = match this.dtype {
            DType::F16 => (dlpack::FLOAT, 16),
            DType::BF16 => (dlpack::BFLOAT, 16),
            DType::I32 => (dlpack::INT, 32),
            DType::Bool => (dlpack::BOOL, 8),
            _ => (dlpack::FLOAT, 32),
        };
        let (kind, id) = this.device();
        let mut exported = Box::new(Exported {
            managed: dlpack::Managed {
                tensor: dlpack::Tensor {
                    data: this.data().cast::<c_void>(),
                    device: dlpack::Device { kind, id },
                    rank: this.shape.len() as i32,
                    dtype: dlpack::DataType { code, bits, lanes: 1 },
                    shape: std::ptr::null_mut(),
                    strides: std::ptr::null_mut(),
                    byte_offset: 0,
                },
                context: std::ptr::null_mut(),
                deleter: Some(delete_exported),
            },
            shape: this.shape.iter().map(|&n| n as i64).collect(),
            strides: contiguous(&this.shape)[..this.shape.len()].to_vec(),
            owner: slf.clone().unbind(),
        });
        exported.managed.tensor.shape = exported.shape.as_mut_ptr();
        exported.managed.tensor.strides = exported.strides.as_mut_ptr();
        let _ = &exported.owner;
        let managed = Box::into_raw(exported).cast::<c_void>();
        // SAFETY: the capsule takes the pointer, which its destructor or its consumer gives back.
        unsafe {
            let capsule =
                ffi::PyCapsule_New(managed, dlpack::LEGACY.as_ptr(), Some(delete_capsule));
            Bound::from_owned_ptr_or_err(py, capsule)
        }
    }

    /// NumPy's array interface, for buffers of the host.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let kind = match (self.place, self.dtype) {
            (Place::Cpu, DType::F32) => "<f4",
            (Place::Cpu, DType::F16) => "<f2",
            (Place::Cpu, DType::I32) => "<i4",
            (Place::Cpu, DType::Bool) => "|b1",
            _ => return Err(PyAttributeError::new_err("__array_interface__")),
        };
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", kind)?;
        interface.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        interface.set_item("data", (self.data() as usize, false))?;
        Ok(interface)
    }

    /// The elements as nested lists; buffers of integers only.
    fn tolist<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.dtype != DType::I32 || self.place != Place::Cpu {
            let found = format!("{} on {}", self.dtype, self.place);
            return Err(argument("buffer", found, "i32 on cpu").into());
        }
        let count = self.shape.iter().product();
        // SAFETY: the buffer holds so many integers, and the GIL keeps writers of Python's out.
        let ints = unsafe { std::slice::from_raw_parts(self.data().cast::<i32>(), count) };
        nested(py, ints, &self.shape)
    }

    fn __repr__(&self) -> String {
        format!("regard.Buffer({}{:?} on {})", self.dtype, self.shape, self.place)
    }
}

fn nested<'py>(py: Python<'py>, ints: &[i32], shape: &[usize]) -> PyResult<Bound<'py, PyAny>> {
    let [rows, inner @ ..] = shape else {
        return Ok(ints[0].into_pyobject(py)?.into_any());
    };
    let list = PyList::empty(py);
    let each = ints.len().checked_div(*rows).unwrap_or(0);
    for row in 0..*rows {
        list.append(nested(py, &ints[row * each..][..each], inner)?)?;
    }
    Ok(list.into_any())
}
