//! Dispatch to the backends: a problem goes to the backend of its machine.

use crate::error::Error;
use crate::machine::{Device, Machine};
use crate::plan::Plan;
use crate::problem::{Inputs, Outputs, Problem};
use crate::select::Choice;
use crate::{cpu, cuda, metal};

/// The kernel for a problem on a machine.
///
/// # Errors
/// [`Error::Argument`] if the problem's numbers make no sense together, [`Error::Refused`] with the
/// reason why no kernel runs it there.
pub fn select(problem: &Problem, machine: &Machine) -> Result<Choice, Error> {
    problem.validate()?;
    match &machine.device {
        Device::Cpu(facts) => Ok(cpu::select::select(problem, facts, machine)?.0),
        Device::Cuda(facts) => Ok(cuda::select::select(problem, facts, machine)?.choice),
        Device::Metal(facts) => Ok(metal::select::select(problem, facts, machine)?.choice),
    }
}

impl Plan {
    /// Plans a problem for a machine. The problem's lengths are upper bounds: see [`Plan::run`].
    ///
    /// # Errors
    /// [`Error::Argument`] if the problem's numbers make no sense together, [`Error::Refused`] if
    /// no kernel runs it there.
    pub fn new(problem: &Problem, machine: &Machine) -> Result<Plan, Error> {
        problem.validate()?;
        match &machine.device {
            Device::Cpu(facts) => cpu::plan::plan(problem, facts, machine),
            Device::Cuda(facts) => cuda::plan::plan(problem, facts, machine),
            Device::Metal(facts) => metal::plan::plan(problem, facts, machine),
        }
    }

    /// Plans these operands for this machine's CPU.
    ///
    /// # Errors
    /// As [`Problem::from_operands`] and [`Plan::new`].
    pub fn for_operands(inputs: &Inputs, outputs: &Outputs) -> Result<Plan, Error> {
        Plan::new(&Problem::from_operands(inputs, outputs)?, &Machine::host()?)
    }

    /// Runs the plan, which has to be for a CPU ([`cuda`] runs plans for NVIDIA GPUs). `inputs` may
    /// be smaller than planned (fewer sequences, shorter queries or caches), but heads, dims, types
    /// and features are the planned ones. Allocates nothing; `workspace` needs no initialization
    /// and keeps nothing between runs.
    ///
    /// # Errors
    /// If an operand breaks the contract or exceeds the plan, or the workspace is too small.
    /// Nothing is written then.
    pub fn run(
        &self,
        inputs: &Inputs,
        outputs: &mut Outputs,
        workspace: &mut [u8],
    ) -> Result<(), Error> {
        cpu::run(self, inputs, outputs, workspace, &cpu::DefaultExecutor)
    }

    /// The launches of the kernels, if the plan is for an NVIDIA GPU.
    #[doc(hidden)]
    pub fn cuda(&self) -> Option<&cuda::Launches> {
        self.backend()
    }

    /// The launch of the kernels, if the plan is for an Apple GPU.
    #[doc(hidden)]
    pub fn metal(&self) -> Option<&metal::Launch> {
        self.backend()
    }
}
