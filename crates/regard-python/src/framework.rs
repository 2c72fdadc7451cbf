//! The framework of an array: it decides where results are allocated, and on which stream work is
//! queued.

use crate::array::{self, Array, Place};
use crate::buffer::Buffer;
use crate::errors::argument;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple};
use regard::DType;

/// The library that an array belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Framework {
    /// PyTorch.
    Torch,
    /// NumPy.
    NumPy,
    /// CuPy.
    CuPy,
    /// JAX.
    Jax,
    /// regard's buffers, and lists.
    Own,
    /// Any other with DLPack or `__cuda_array_interface__`.
    Other,
}

impl Framework {
    /// By the module of the object's type or of the types that it derives from.
    pub fn from_object(object: &Bound<'_, PyAny>) -> PyResult<Framework> {
        let py = object.py();
        let kinds = object.get_type().getattr(intern!(py, "__mro__"))?.cast_into::<PyTuple>()?;
        for kind in kinds.iter() {
            let module = kind.getattr(intern!(py, "__module__"))?.extract::<String>()?;
            match module.split('.').next() {
                Some("torch") => return Ok(Framework::Torch),
                Some("numpy") => return Ok(Framework::NumPy),
                Some("cupy") => return Ok(Framework::CuPy),
                Some("jax" | "jaxlib") => return Ok(Framework::Jax),
                _ => {}
            }
        }
        Ok(Framework::Other)
    }

    /// Whether memory is freed in the order of the stream, as PyTorch and CuPy do. Memory of others
    /// must not be in use any more when a call returns.
    pub fn frees_in_stream_order(self) -> bool {
        matches!(self, Framework::Torch | Framework::CuPy | Framework::Own)
    }
}

/// A new array without contents, of the framework and device of `like`.
///
/// # Errors
/// If the framework fails.
pub fn empty<'py>(
    like: &Bound<'py, PyAny>,
    array: &Array,
    shape: &[usize],
    dtype: DType,
) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
    let size = PyTuple::new(py, shape)?;
    match array.framework {
        Framework::Torch => {
            if dtype == array.dtype {
                return like.call_method1(intern!(py, "new_empty"), (size,));
            }
            let options = PyDict::new(py);
            options.set_item(intern!(py, "dtype"), torch(py)?.getattr("float32")?)?;
            like.call_method(intern!(py, "new_empty"), (size,), Some(&options))
        }
        Framework::NumPy | Framework::CuPy => {
            let name = if array.framework == Framework::NumPy { "numpy" } else { "cupy" };
            let empty = py.import(name)?.getattr(intern!(py, "empty"))?;
            if dtype == array.dtype {
                empty.call1((size, like.getattr(intern!(py, "dtype"))?))
            } else {
                empty.call1((size, "float32"))
            }
        }
        Framework::Jax | Framework::Own | Framework::Other => {
            Ok(Bound::new(py, Buffer::new(shape, dtype, array.place)?)?.into_any())
        }
    }
}

/// The caller's view of an array that [`empty`] made: JAX's arrays take the memory over once it
/// is written.
///
/// # Errors
/// If the framework fails.
pub fn handed_over<'py>(
    made: Bound<'py, PyAny>,
    framework: Framework,
) -> PyResult<Bound<'py, PyAny>> {
    if framework != Framework::Jax {
        return Ok(made);
    }
    made.py().import("jax.dlpack")?.call_method1("from_dlpack", (made,))
}

fn torch(py: Python<'_>) -> PyResult<&Bound<'_, PyModule>> {
    static TORCH: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    Ok(TORCH.get_or_try_init(py, || py.import("torch").map(Bound::unbind))?.bind(py))
}

/// Whether PyTorch records gradients now.
///
/// # Errors
/// If PyTorch is not there.
pub fn is_grad_enabled(py: Python<'_>) -> PyResult<bool> {
    torch(py)?.call_method0(intern!(py, "is_grad_enabled"))?.extract()
}

/// The stream that a call on that GPU runs on: the caller's, else the current one of PyTorch or
/// CuPy if the first array is theirs, else the one that the array's interface names, else the
/// default stream.
///
/// # Errors
/// If `given` is no stream, or one of another device.
pub fn stream(
    given: Option<&Bound<'_, PyAny>>,
    first: &Bound<'_, PyAny>,
    array: &Array,
) -> PyResult<u64> {
    let Place::Cuda(ordinal) = array.place else {
        return match given {
            None => Ok(0),
            Some(_) => Err(argument("stream", "given", "a stream for GPU tensors only").into()),
        };
    };
    if let Some(given) = given {
        let stream = stream_handle(given)?;
        crate::device::expect_stream(stream, ordinal)?;
        return Ok(stream);
    }
    current_stream(first, array, ordinal)
}

/// The stream that the array's framework queues work on now.
fn current_stream(first: &Bound<'_, PyAny>, array: &Array, ordinal: i32) -> PyResult<u64> {
    let py = first.py();
    match array.framework {
        Framework::Torch => {
            if let Some(stream) = array::current_work_stream(first, ordinal)? {
                return Ok(stream);
            }
            let current = torch(py)?.getattr("cuda")?.call_method1("current_stream", (ordinal,))?;
            current.getattr("cuda_stream")?.extract()
        }
        Framework::CuPy => {
            let current = py.import("cupy.cuda")?.call_method1("get_current_stream", (ordinal,))?;
            current.getattr("ptr")?.extract()
        }
        // Other producers made this one wait for their work (`Array::from_dlpack`).
        _ => Ok(array.stream.unwrap_or(1)),
    }
}

/// The handle of a stream: a number, or an object of PyTorch, CuPy or with `__cuda_stream__`.
fn stream_handle(given: &Bound<'_, PyAny>) -> PyResult<u64> {
    let py = given.py();
    if let Ok(handle) = given.extract::<u64>() {
        return Ok(handle);
    }
    for name in [intern!(py, "cuda_stream"), intern!(py, "ptr")] {
        if let Some(handle) = given.getattr_opt(name)? {
            return handle.extract();
        }
    }
    if let Some(protocol) = given.getattr_opt(intern!(py, "__cuda_stream__"))? {
        let (_, handle): (u32, u64) = protocol.call0()?.extract()?;
        return Ok(handle);
    }
    let found = format!("of the type {}", given.get_type().qualname()?);
    Err(argument("stream", found, "a CUDA stream, or its handle as a number").into())
}

/// As [`stream`], where there is no array to ask: PyTorch's current stream if PyTorch uses a GPU.
///
/// # Errors
/// As there.
pub fn current_or_given(
    py: Python<'_>,
    given: Option<&Bound<'_, PyAny>>,
    ordinal: i32,
) -> PyResult<u64> {
    if let Some(given) = given {
        let stream = stream_handle(given)?;
        crate::device::expect_stream(stream, ordinal)?;
        return Ok(stream);
    }
    // Loading PyTorch takes seconds, and so may its start on a GPU.
    let loaded = py.import("sys")?.getattr("modules")?.contains("torch")?;
    let is_used = |cuda: &Bound<'_, PyAny>| cuda.call_method0("is_initialized")?.extract();
    if !loaded || !is_used(&torch(py)?.getattr("cuda")?)? {
        return Ok(1);
    }
    let current = torch(py)?.getattr("cuda")?.call_method1("current_stream", (ordinal,))?;
    current.getattr("cuda_stream")?.extract()
}

/// Tells PyTorch that a stream which is not its current one uses this tensor, so that its memory is
/// not given to another tensor before that stream is done with it. Objects that are no tensors are
/// left alone.
///
/// # Errors
/// If PyTorch fails.
pub fn record_stream(object: &Bound<'_, PyAny>, like: &Array, stream: u64) -> PyResult<()> {
    let Place::Cuda(ordinal) = like.place else { return Ok(()) };
    let py = object.py();
    // Streams have a method of this name too, for events.
    let is_tensor = object.hasattr(intern!(py, "is_cuda"))?;
    if like.framework != Framework::Torch || !is_tensor {
        return Ok(());
    }
    if current_stream(object, like, ordinal)? == stream {
        return Ok(());
    }
    let external = torch(py)?.getattr("cuda")?.getattr("ExternalStream")?;
    object.call_method1("record_stream", (external.call1((stream, ordinal))?,)).map(|_| ())
}
