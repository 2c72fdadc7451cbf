//! One problem on one device: run twice, judged, and rearranged if its bits must not change.

use super::arrange::{self, Arrangement};
use super::guard::{Guarded, Side};
use crate::array::{Array, Data};
use crate::case::{Case, Layout, Output};
use crate::check::{Checker, Failure};
use crate::noise::Noise;
use crate::place::Place;
use crate::rows::{Rows, rows};
use crate::spec::Spec;
use regard::oracle::Mismatch;
use regard::{DType, Error, Inputs, Outputs, Tensor, TensorMut};
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Something that runs problems whose operands are in the host's memory.
pub trait Device {
    /// Number of ways in which it can run a problem. All are tried.
    fn ways(&self) -> usize {
        1
    }

    /// The name of a way: a kernel, a level, a description of a GPU.
    fn way(&self, way: usize) -> String;

    /// Runs a problem.
    ///
    /// # Errors
    /// If it is refused, or something is found wrong.
    fn run(&mut self, how: How, inputs: &Inputs, outputs: &mut Outputs) -> Result<(), Error>;

    /// Whether the device reads the problem's cache and lists of keys. If not, the problem is tried
    /// without lists instead, and at last over a cache of the queries' type.
    fn reads_cache(&self, spec: &Spec) -> bool {
        let _ = spec;
        true
    }

    /// Whether operands should be between guard pages: if the device reads the host's memory
    /// directly.
    fn guards(&self) -> bool {
        false
    }
}

/// The settings of one run of a problem.
#[derive(Debug, Clone, Copy)]
pub struct How {
    /// The number of the device's way.
    pub way: usize,
    /// The initial value of every byte of the workspace.
    pub garbage: u8,
    /// Chooses between plans: a number of threads, of cores. Bits may depend on it, but for
    /// batch-invariant problems.
    pub plan: u64,
    /// Chooses between orders of execution. Bits may never depend on it.
    pub order: u64,
}

/// The kind of a failure. Two failures count as the same if their kinds are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "its fields are documented")]
pub enum Kind {
    /// Not run: sound, but no kernel takes it.
    Refused,
    /// Not run, though the problem is sound.
    Error,
    /// A driver failed: the device may be lost.
    Driver,
    Panic,
    /// An output, or a log-sum-exp, is too far off.
    Out,
    LogSumExp,
    /// Two runs differ.
    Twice,
    /// Something beside the elements of an output was written.
    Beside,
    /// A rearrangement that must not change a bit does.
    Arranged(Arrangement),
}

/// A failure.
#[derive(Debug, Clone)]
pub struct Broken {
    /// The kind.
    pub kind: Kind,
    /// The way that ran.
    pub way: String,
    /// In words.
    pub text: String,
}

/// The cost of a problem that passed.
#[derive(Debug, Clone, Copy, Default)]
pub struct Passed {
    /// Rows judged.
    pub rows: usize,
    /// The largest error, relative to the allowed error.
    pub worst: f64,
    /// Rearrangements compared.
    pub arrangements: usize,
}

/// The runs of a problem.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Run {
    /// Workspace and outputs hold NaN before.
    First,
    /// They hold ordinary numbers, things happen in another order, and operands touch the guard
    /// page of their other side.
    Again,
}

/// Multiplications that the oracle may spend on a problem, but for one row at least.
const JUDGED_WORK: usize = 600_000;

/// Tries a problem in every way that the device has.
///
/// # Errors
/// The first failure.
pub fn trial(device: &mut dyn Device, spec: &Spec) -> Result<Passed, Broken> {
    let case = spec.generate();
    let broken = |kind, way: &str, text: String| Broken { kind, way: way.to_string(), text };
    let checker = Checker::new(&case, Some(judged_rows(spec)))
        .map_err(|failure| broken(Kind::Error, "the oracle", failure.to_string()))?;
    let arranged = if spec.batch_invariant { arrange::arrangements(spec) } else { Vec::new() };
    let arranged: Vec<_> = arranged.into_iter().map(|one| (one.generate(), one)).collect();
    let mut passed = Passed { rows: checker.judge().reference().rows.len(), ..Passed::default() };
    for way in 0..device.ways() {
        let first = execute(device, way, (spec, &case), Run::First)?;
        let again = execute(device, way, (spec, &case), Run::Again)?;
        let name = device.way(way);
        let all = rows(spec, &case, &first);
        if let Some(difference) = difference(&rows(spec, &case, &again), &all) {
            return Err(broken(Kind::Twice, &name, format!("two runs differ: {difference}")));
        }
        let worst = judge(&checker, spec, &case, &first).map_err(|failure| {
            let kind = match &failure {
                Failure::Result(mismatch) if mismatch.tensor == "lse" => Kind::LogSumExp,
                _ => Kind::Out,
            };
            broken(kind, &name, failure.to_string())
        })?;
        passed.worst = passed.worst.max(worst);
        for (case, one) in &arranged {
            let output = execute(device, way, (one, case), Run::Again)?;
            let found = rows(one, case, &output);
            // Whichever of the two has fewer rows is part of the other.
            let (some, whole) =
                if found.len() <= all.len() { (&found, &all) } else { (&all, &found) };
            if let Some(difference) = difference(some, whole) {
                let kind = Kind::Arranged(arrange::kind_of(one));
                let text = format!("{}: {difference}", arrange::words(spec, one));
                return Err(broken(kind, &name, text));
            }
            passed.arrangements += 1;
        }
    }
    Ok(passed)
}

/// The first element of `some` that is not in `all` with the same bits, in words.
fn difference(some: &Rows, all: &Rows) -> Option<String> {
    let (row, bits) = some.iter().find(|(row, bits)| all.get(row) != Some(bits))?;
    let (sequence, position, head) = row;
    let place = format!("sequence {sequence}, position {position}, head {head}");
    let Some(other) = all.get(row) else { return Some(format!("{place} is not there")) };
    let dim = bits.iter().zip(other).position(|(a, b)| a != b).unwrap_or(0);
    let what = if dim + 1 == bits.len() { "lse".to_string() } else { format!("dim {dim}") };
    let [one, other] = [bits[dim], other[dim]].map(f32::from_bits);
    Some(format!("{place}, {what}: {one:e} is not {other:e}"))
}

/// Rows to judge: all if that is cheap.
fn judged_rows(spec: &Spec) -> usize {
    let max_keys = spec.sequences.iter().map(|sequence| sequence.kv_len).max().unwrap_or(0);
    (JUDGED_WORK / (max_keys * (spec.head_dim + spec.value_dim)).max(1)).max(4)
}

fn judge(checker: &Checker, spec: &Spec, case: &Case, output: &Output) -> Result<f64, Failure> {
    let out = case.query_order(output.out.view()?);
    let lse = case.query_order(output.lse.view()?);
    let check = checker.judge().check(&out, spec.lse.then_some(&lse));
    Ok(check.map_err(|mismatch: Box<Mismatch>| Failure::Result(mismatch))?.worst)
}

/// Runs a case, with outputs full of garbage and placed by its description.
fn execute(
    device: &mut dyn Device,
    way: usize,
    (spec, case): (&Spec, &Case),
    run: Run,
) -> Result<Output, Broken> {
    // The caller fills in the way.
    let broken = |kind, text: String| Broken { kind, way: String::new(), text };
    let failed = |error: Error| {
        let kind = match &error {
            Error::Refused(_) => Kind::Refused,
            Error::Driver { .. } => Kind::Driver,
            Error::Argument { found, .. } if found.starts_with("written") => Kind::Beside,
            _ => Kind::Error,
        };
        broken(kind, error.to_string())
    };
    let again = run == Run::Again;
    let mut noise = Noise::new(spec.seed, &[0x72_756e]);
    // Threads and cores may differ between the runs if bits must not depend on them.
    let plan = noise.bits().wrapping_add(u64::from(spec.batch_invariant && again));
    let how = How {
        way,
        garbage: if again { 0x3c } else { 0xff },
        plan,
        order: noise.bits() ^ u64::from(again),
    };
    // Guard pages are looked at on both sides. A device that copies operands keeps their alignment,
    // and the alignment may choose its kernel. So both runs have the same placement there.
    let side = if noise.one_in(2) != (again && device.guards()) { Side::Start } else { Side::End };
    let garbage = how.garbage;
    let mut attempt = || -> Result<Output, Broken> {
        let inputs = case.inputs().map_err(failed)?;
        let mut lse = Placed::new(spec, case, (DType::F32, None), garbage, side);
        let mut out =
            Placed::new(spec, case, (case.out_dtype(), Some(spec.value_dim)), garbage, side);
        {
            let lse = if spec.lse { Some(lse.view(case)) } else { None };
            let mut outputs = Outputs { out: out.view(case), lse };
            if device.guards() {
                let operands = Operands::new(&inputs, side);
                device.run(how, &operands.inputs(), &mut outputs).map_err(failed)?;
            } else {
                device.run(how, &inputs, &mut outputs).map_err(failed)?;
            }
        }
        let out =
            out.taken(garbage).map_err(|text| broken(Kind::Beside, format!("out: {text}")))?;
        let lse = match spec.lse {
            true => {
                lse.taken(garbage).map_err(|text| broken(Kind::Beside, format!("lse: {text}")))?
            }
            false => {
                let shape = &out.shape()[..out.shape().len() - 1];
                let zeros = vec![0f32; shape.iter().product()];
                Array::new(zeros, shape).expect("as many zeros as that")
            }
        };
        Ok(Output { out, lse })
    };
    let result = catch_unwind(AssertUnwindSafe(&mut attempt)).unwrap_or_else(|panic| {
        let words = panic.downcast_ref::<String>().cloned();
        let words = words.or_else(|| Some((*panic.downcast_ref::<&str>()?).to_string()));
        Err(broken(Kind::Panic, format!("panic: {}", words.unwrap_or_default())))
    });
    result.map_err(|broken| Broken { way: device.way(way), ..broken })
}

/// An output in separate memory, with gaps that must stay unchanged.
struct Placed {
    dtype: DType,
    memory: Guarded,
    place: Place,
    /// The shape, in the case's layout.
    shape: Vec<usize>,
}

impl Placed {
    /// An output of the shape of the queries, with that last dimension or without one.
    fn new(
        spec: &Spec,
        case: &Case,
        (dtype, dim): (DType, Option<usize>),
        garbage: u8,
        side: Side,
    ) -> Placed {
        let mut shape = case.q.shape().to_vec();
        shape.pop();
        // The log-sum-exp is stored as if it had a last dimension of 1.
        shape.push(dim.unwrap_or(1));
        let place = Place::new(&shape, spec.padding, &spec.memory.out);
        // From the first element to the last one: the guard page follows right behind.
        let reach = match shape.contains(&0) {
            true => 0,
            false => {
                1 + shape
                    .iter()
                    .zip(&place.strides)
                    .map(|(&n, &s)| (n - 1) * s as usize)
                    .sum::<usize>()
            }
        };
        let memory = Guarded::new(reach * dtype.size(), side, garbage);
        if dim.is_none() {
            shape.pop();
        }
        Placed { dtype, memory, place: Place { offset: 0, ..place }, shape }
    }

    fn strides(&self) -> &[i64] {
        &self.place.strides[..self.shape.len()]
    }

    /// In regard's order of dimensions.
    fn view(&mut self, case: &Case) -> TensorMut<'_> {
        let data = self.memory.as_mut_ptr();
        // SAFETY: the memory is as long as the view reaches, and of whole elements at either side;
        // it is borrowed with `self`.
        let view = unsafe {
            TensorMut::from_raw(
                data,
                self.dtype,
                &self.shape,
                Some(&self.place.strides[..self.shape.len()]),
            )
        };
        let view = view.expect("a shape and strides of the same rank");
        match (case.layout, case.attention.cu_seqlens_q.is_some(), self.shape.len()) {
            (Layout::Bhsd, false, 4) => view.bhsd(),
            (Layout::Bhsd, false, 3) => view.permute([0, 2, 1]),
            _ => view,
        }
    }

    /// The elements without gaps, if the gaps are unchanged.
    fn taken(&self, garbage: u8) -> Result<Array, String> {
        let bytes = self.memory.bytes();
        let size = self.dtype.size();
        let mut gaps = vec![true; bytes.len() / size];
        let mut elements = Vec::with_capacity(bytes.len());
        let count: usize = self.shape.iter().product();
        let mut index = vec![0; self.shape.len()];
        for _ in 0..count {
            let at: usize =
                index.iter().zip(self.strides()).map(|(&i, &s): (&usize, _)| i * s as usize).sum();
            gaps[at] = false;
            elements.extend_from_slice(&bytes[at * size..(at + 1) * size]);
            for (i, &n) in index.iter_mut().zip(&self.shape).rev() {
                *i += 1;
                if *i < n {
                    break;
                }
                *i = 0;
            }
        }
        let written =
            |&at: &usize| bytes[at * size..(at + 1) * size].iter().any(|&byte| byte != garbage);
        if let Some(at) = (0..gaps.len()).filter(|&at| gaps[at]).find(written) {
            return Err(format!("written between its elements, {at} elements after the first"));
        }
        let data = Data::from_le_bytes(self.dtype, &elements);
        Array::new(data, &self.shape).map_err(|error| error.to_string())
    }
}

/// Copies of all operands between guard pages.
struct Operands<'a> {
    host: Inputs<'a>,
    copies: HashMap<&'static str, Guarded>,
}

impl<'a> Operands<'a> {
    fn new(host: &Inputs<'a>, side: Side) -> Operands<'a> {
        let copy = |(name, tensor): (&'static str, &Tensor<'a>)| {
            let reach = |(&n, &stride): (&usize, &i64)| (n - 1) * stride as usize;
            let elements = match tensor.is_empty() {
                true => 0,
                false => 1 + tensor.shape().iter().zip(tensor.strides()).map(reach).sum::<usize>(),
            };
            let bytes = elements * tensor.dtype().size();
            // SAFETY: a view reaches live memory; strides of cases are not negative, so from its
            // first element on.
            let bytes = unsafe { std::slice::from_raw_parts(tensor.as_ptr(), bytes) };
            (name, Guarded::copy_of(bytes, side))
        };
        Operands { host: *host, copies: host.named().map(copy).collect() }
    }

    fn inputs(&self) -> Inputs<'_> {
        self.host.map(|name, tensor| {
            let address = self.copies[name].as_ptr();
            let (shape, strides) = (tensor.shape(), Some(tensor.strides()));
            // SAFETY: the copy is as long as the tensor reaches and of whole elements at either
            // side.
            let view = unsafe { Tensor::from_raw(address, tensor.dtype(), shape, strides) };
            view.expect("dims of a tensor that there is")
        })
    }
}
