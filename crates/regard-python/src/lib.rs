//! Python bindings of regard: `regard._regard`, which `python/regard/__init__.py` exports.

mod array;
mod attention;
mod buffer;
mod cache;
mod copies;
mod device;
mod dlpack;
mod errors;
mod framework;
mod openmp;
mod operands;
mod pages;
mod plan;
mod step;

use pyo3::prelude::*;

/// The standard slopes of ALiBi (Press et al. 2021), `alibi_slopes` of `attention`: a list with a
/// number for each query head.
#[pyfunction]
fn alibi_slopes(query_heads: u16) -> Vec<f32> {
    regard::alibi_slopes(query_heads.into())
}

#[pymodule]
fn _regard(module: &Bound<'_, PyModule>) -> PyResult<()> {
    errors::register(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    pages::register(module)?;
    module.add_class::<buffer::Buffer>()?;
    module.add_class::<plan::Plan>()?;
    module.add_function(wrap_pyfunction!(attention::attention, module)?)?;
    module.add_function(wrap_pyfunction!(cache::append, module)?)?;
    module.add_function(wrap_pyfunction!(cache::append_latent, module)?)?;
    module.add_function(wrap_pyfunction!(cache::merge, module)?)?;
    module.add_function(wrap_pyfunction!(copies::copy_blocks, module)?)?;
    module.add_function(wrap_pyfunction!(alibi_slopes, module)?)?;
    module.add_function(wrap_pyfunction!(attention::describe, module)?)?;
    module.add_function(wrap_pyfunction!(attention::cuda_devices, module)?)
}
