//! Which CUDA kernel runs a problem, and how it is launched: pure functions of the problem and the GPU's facts.

use super::Launch;
use crate::error::Refusal;
use crate::machine::{CudaFacts, Machine};
use crate::problem::Problem;
use crate::select::Choice;
use crate::split::Split;

/// The kernel for a problem on a GPU, how it divides the keys, and its launch.
///
/// # Errors
/// The reason why nothing runs it there.
pub(crate) fn select(
    _problem: &Problem,
    _facts: &CudaFacts,
    machine: &Machine,
) -> Result<(Choice, Split, Launch), Refusal> {
    let version = env!("CARGO_PKG_VERSION");
    Err(Refusal {
        machine: machine.to_string(),
        reason: format!("regard {version} has no CUDA kernels, only CPU ones"),
    })
}

/// The launch of an append.
///
/// # Errors
/// The reason why nothing runs it there.
#[cfg(feature = "cuda")]
pub(crate) fn append(
    _parameters: &crate::params::AppendParameters,
    machine: &Machine,
) -> Result<Launch, Refusal> {
    let version = env!("CARGO_PKG_VERSION");
    Err(Refusal { machine: machine.to_string(), reason: format!("regard {version} has no append kernel") })
}
