//! regard's errors as Python exceptions, in the same words.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};
use regard::Error;

/// An error of regard on its way to Python.
#[derive(Debug)]
pub struct Fault(pub Error);

impl From<Error> for Fault {
    fn from(error: Error) -> Fault {
        Fault(error)
    }
}

/// An argument error: "`argument` is found; allowed: allowed".
pub fn argument(
    argument: impl Into<String>,
    found: impl std::fmt::Display,
    allowed: impl Into<String>,
) -> Fault {
    Fault(Error::argument(argument, found, allowed))
}

/// The exception types. Each has a built-in one as its second base, so that callers who do not know
/// regard catch it too.
struct Exceptions {
    error: Py<PyType>,
    argument: Py<PyType>,
    refusal: Py<PyType>,
    out_of_pages: Py<PyType>,
    driver: Py<PyType>,
}

static EXCEPTIONS: PyOnceLock<Exceptions> = PyOnceLock::new();

fn make(py: Python<'_>, name: &str, doc: &str, bases: &[&Py<PyType>]) -> PyResult<Py<PyType>> {
    let members = PyDict::new(py);
    members.set_item("__module__", "regard")?;
    members.set_item("__doc__", doc)?;
    let bases = PyTuple::new(py, bases)?;
    let kind = py.get_type::<PyType>().call1((name, bases, members))?;
    Ok(kind.cast_into::<PyType>()?.unbind())
}

fn exceptions(py: Python<'_>) -> PyResult<&Exceptions> {
    EXCEPTIONS.get_or_try_init(py, || {
        use pyo3::exceptions::{PyException, PyMemoryError, PyRuntimeError, PyValueError};
        let error = make(
            py,
            "Error",
            "What went wrong. Nothing was written to any output.",
            &[&py.get_type::<PyException>().unbind()],
        )?;
        let derived =
            |name, doc, base: Bound<'_, PyType>| make(py, name, doc, &[&error, &base.unbind()]);
        Ok(Exceptions {
            argument: derived(
                "ArgumentError",
                "An argument breaks the contract. Attributes: argument, found, allowed.",
                py.get_type::<PyValueError>(),
            )?,
            refusal: derived(
                "Refusal",
                "A sound request that cannot run on the machine. Attributes: machine, reason.",
                py.get_type::<PyRuntimeError>(),
            )?,
            out_of_pages: derived(
                "OutOfPages",
                "A PageAllocator has too few free blocks. Attributes: needed, free, total.",
                py.get_type::<PyMemoryError>(),
            )?,
            driver: derived(
                "DriverError",
                "A device's driver failed. Attributes: doing, reason.",
                py.get_type::<PyRuntimeError>(),
            )?,
            error,
        })
    })
}

/// Adds the exception types to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let found = exceptions(module.py())?;
    module.add("Error", &found.error)?;
    module.add("ArgumentError", &found.argument)?;
    module.add("Refusal", &found.refusal)?;
    module.add("OutOfPages", &found.out_of_pages)?;
    module.add("DriverError", &found.driver)
}

fn raised(py: Python<'_>, error: &Error) -> PyResult<PyErr> {
    let found = exceptions(py)?;
    let make = |kind: &Py<PyType>| kind.bind(py).call1((error.to_string(),));
    let value = match error {
        Error::Argument { argument, found: what, allowed } => {
            let value = make(&found.argument)?;
            value.setattr("argument", argument)?;
            value.setattr("found", what)?;
            value.setattr("allowed", allowed)?;
            value
        }
        Error::Refused(refusal) => {
            let value = make(&found.refusal)?;
            value.setattr("machine", &refusal.machine)?;
            value.setattr("reason", &refusal.reason)?;
            value
        }
        Error::OutOfPages { needed, free, total } => {
            let value = make(&found.out_of_pages)?;
            value.setattr("needed", needed)?;
            value.setattr("free", free)?;
            value.setattr("total", total)?;
            value
        }
        Error::Driver { doing, reason } => {
            let value = make(&found.driver)?;
            value.setattr("doing", doing)?;
            value.setattr("reason", reason)?;
            value
        }
        _ => make(&found.error)?,
    };
    Ok(PyErr::from_value(value))
}

impl From<Fault> for PyErr {
    fn from(fault: Fault) -> PyErr {
        Python::attach(|py| raised(py, &fault.0).unwrap_or_else(|error| error))
    }
}
