//! `regard.attention`: one call, its plan remembered.

use crate::array::{Array, Place};
use crate::errors::argument;
use crate::framework;
use crate::operands::{Call, Main, Numbers, Results, Takes};
use crate::plan::{Planned, problem, record_streams};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyTuple};
use regard::{DType, Problem};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Plans that are remembered. When there are more, all are forgotten: plans take microseconds to make.
const MAX_PLANS: usize = 512;

type Plans = HashMap<(Problem, Place, Option<usize>), Arc<Planned>>;

/// The plan for a problem, made if it is new.
fn plan_for(problem: Problem, place: Place, threads: Option<usize>) -> PyResult<Arc<Planned>> {
    static PLANS: Mutex<Option<Plans>> = Mutex::new(None);
    // Plans are inserted whole, whatever panicked.
    let lock = || PLANS.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (problem, place, threads);
    if let Some(plan) = lock().get_or_insert_default().get(&key) {
        return Ok(Arc::clone(plan));
    }
    let plan = Arc::new(Planned::new(&key.0, place, threads)?);
    let mut plans = lock();
    let plans = plans.get_or_insert_default();
    if plans.len() >= MAX_PLANS {
        plans.clear();
    }
    plans.insert(key, Arc::clone(&plan));
    Ok(plan)
}

const ATTENTION: Takes =
    Takes { function: "attention", numbers: true, out: true, threads: true, stream: true };

/// An array that a call writes: the caller's, or a new one.
fn output<'py>(
    given: Option<&Bound<'py, PyAny>>,
    main: Main<'_, 'py>,
    call: &Call,
    (shape, dtype): (&[usize], DType),
) -> PyResult<Bound<'py, PyAny>> {
    match given {
        Some(given) => Ok(given.clone()),
        None => framework::empty(main.q, &call.q, shape, dtype),
    }
}

/// Whether the log-sum-exp is asked for, and where it goes.
fn lse_wanted<'a, 'py>(call: &'a Call<'py>) -> PyResult<(bool, Option<&'a Bound<'py, PyAny>>)> {
    match &call.extra.lse {
        None => Ok((false, None)),
        Some(wanted) if wanted.is_instance_of::<PyBool>() => Ok((wanted.is_truthy()?, None)),
        Some(array) => Ok((true, Some(array))),
    }
}

/// Attention of q over k and v.
#[pyfunction]
#[pyo3(signature = (q, k, v, **options))]
pub fn attention<'py>(
    q: &Bound<'py, PyAny>,
    k: &Bound<'py, PyAny>,
    v: &Bound<'py, PyAny>,
    options: Option<&Bound<'py, PyDict>>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = q.py();
    let main = Main { q, k, v };
    let call = Call::read(ATTENTION, main, options, Numbers::default())?;
    let out_dtype = match &call.extra.out {
        Some(out) => Array::read_mut("out", out)?.dtype,
        None => call.extra.out_dtype.unwrap_or(call.q.dtype),
    };
    if let Some(wanted) = call.extra.out_dtype
        && wanted != out_dtype
    {
        return Err(argument("out", format!("of type {out_dtype}"), wanted.name()).into());
    }
    let (wants_lse, lse_given) = lse_wanted(&call)?;
    let problem = problem(&call, out_dtype, wants_lse)?;
    let plan = plan_for(problem, call.place(), call.extra.threads)?;

    // Only now is anything allocated: a view with stride 0 can claim any size.
    let mut shape = call.out_shape();
    if call.numbers.heads_first && !call.is_ragged() {
        shape.swap(1, 2);
    }
    let out = output(call.extra.out.as_ref(), main, &call, (&shape, out_dtype))?;
    let lse = if wants_lse {
        let shape = &shape[..shape.len() - 1];
        Some(output(lse_given, main, &call, (shape, DType::F32))?)
    } else {
        None
    };
    let results = Results::read(&out, lse.as_ref(), &call)?;
    let stream = framework::stream(call.extra.stream.as_ref(), q, &call.q)?;
    plan.run(py, &call, &results, stream)?;
    let written = [q, k, v, &out].into_iter().chain(lse.as_ref());
    record_streams(&call, written, options, stream)?;

    let is_new = call.extra.out.is_none();
    let hand_over = |made: Bound<'py, PyAny>, is_new: bool| {
        if is_new { framework::handed_over(made, call.q.framework) } else { Ok(made) }
    };
    drop(results);
    let out = hand_over(out, is_new)?;
    let Some(lse) = lse else { return Ok(out) };
    let lse = hand_over(lse, lse_given.is_none())?;
    Ok(PyTuple::new(py, [out, lse])?.into_any())
}

/// The element type of an argument, by name; for tests of what regard sees.
#[pyfunction]
pub fn describe(array: &Bound<'_, PyAny>) -> PyResult<(String, Vec<usize>, Vec<i64>, String)> {
    let array = Array::read("array", array)?;
    let name = array.dtype.name().to_string();
    Ok((name, array.shape().to_vec(), array.strides().to_vec(), array.place.to_string()))
}

/// Whether the wheel can run on NVIDIA GPUs, and if not why.
#[pyfunction]
pub fn cuda_devices() -> PyResult<Vec<String>> {
    #[cfg(feature = "cuda")]
    {
        let gpus = regard::cuda::gpus().map_err(crate::errors::Fault)?;
        Ok(gpus.into_iter().map(|gpu| gpu.name).collect())
    }
    #[cfg(not(feature = "cuda"))]
    {
        let _ = operands::dtype;
        Ok(Vec::new())
    }
}
