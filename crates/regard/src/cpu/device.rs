//! This machine's CPU as a device: the same verbs as a GPU has.

use super::executor::Executor;
use super::plan::plan;
use super::pool::DefaultExecutor;
use super::workspace::Workspace;
use super::{append, copy_blocks, merge};
use crate::append::{Append, AppendLatent};
use crate::error::Error;
use crate::machine::{Device, Machine};
use crate::merge::Merge;
use crate::paged::CopyBlocks;
use crate::plan::Plan;
use crate::problem::{Inputs, Outputs, Problem};
use std::fmt;
use std::sync::Arc;

/// A CPU to run plans on: a machine, and the threads of an executor. Any number of threads may use
/// one at once.
///
/// ```
/// use regard::cpu::{Cpu, Workspace};
/// use regard::{Attention, Inputs, Outputs, Tensor, TensorMut};
///
/// let cpu = Cpu::new()?;
/// // One new token against a cache of 5, 4 query heads over 2 key/value heads, head dim 8.
/// let (q, k, v) = (vec![0.5f32; 4 * 8], vec![0.25f32; 5 * 2 * 8], vec![1.0f32; 5 * 2 * 8]);
/// let mut out = vec![0f32; 4 * 8];
/// let inputs = Inputs::new(
///     Tensor::new(&q, [1, 1, 4, 8])?,
///     Tensor::new(&k, [1, 5, 2, 8])?,
///     Tensor::new(&v, [1, 5, 2, 8])?,
///     Attention::causal(),
/// );
/// let mut outputs = Outputs { out: TensorMut::new(&mut out, [1, 1, 4, 8])?, lse: None };
/// let plan = cpu.plan(&inputs, &outputs)?;
/// let mut workspace = Workspace::for_plan(&plan)?;
/// cpu.load(&plan)?;
/// cpu.run(&plan, &inputs, &mut outputs, &mut workspace)?;
/// # Ok::<(), regard::Error>(())
/// ```
#[derive(Clone)]
pub struct Cpu {
    machine: Machine,
    executor: Arc<dyn Executor + Send>,
}

impl Cpu {
    /// This machine's CPU, on the threads that [`Plan::run`] uses.
    ///
    /// # Errors
    /// As [`Machine::host`].
    pub fn new() -> Result<Cpu, Error> {
        Ok(Cpu { machine: Machine::host()?, executor: Arc::new(DefaultExecutor) })
    }

    /// The same CPU as described by `machine`: another SIMD level, or fewer threads.
    ///
    /// # Errors
    /// If the machine is not a CPU.
    pub fn with_machine(self, machine: Machine) -> Result<Cpu, Error> {
        match machine.device {
            Device::Cpu(_) => Ok(Cpu { machine, ..self }),
            _ => Err(Error::argument("machine", machine, "a CPU")),
        }
    }

    /// The same CPU on threads of the caller's choice.
    pub fn with_executor(self, executor: impl Executor + Send + 'static) -> Cpu {
        Cpu { executor: Arc::new(executor), ..self }
    }

    /// The CPU as plans are made for it.
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// Plans these operands for this CPU.
    ///
    /// # Errors
    /// As [`Problem::from_operands`] and [`Plan::new`].
    pub fn plan(&self, inputs: &Inputs, outputs: &Outputs) -> Result<Plan, Error> {
        let Device::Cpu(facts) = &self.machine.device else { unreachable!("this is a CPU") };
        plan(&Problem::from_operands(inputs, outputs)?, facts, &self.machine)
    }

    /// Checks that this CPU can run the plan. There is nothing to load.
    ///
    /// # Errors
    /// If it cannot.
    pub fn load(&self, plan: &Plan) -> Result<(), Error> {
        super::code(plan).map(|_| ())
    }

    /// Runs the plan, as [`Plan::run`].
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn run(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        super::run(plan, inputs, outputs, workspace.as_mut_slice(), &*self.executor)
    }

    /// Makes the tile map of the mask in the workspace: which tiles the mask hides, and which a
    /// boolean mask leaves alone. Layers that share a mask make it once, and run with
    /// [`Cpu::run_mapped`]. Of the operands, only shapes and the mask are read.
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn map_mask(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        super::map_mask(plan, inputs, outputs, workspace.as_mut_slice(), &*self.executor)
    }

    /// [`Cpu::run`] with the tile map in the workspace. [`Cpu::map_mask`] has made the map with
    /// this plan, this mask and operands of these shapes, or the caller has written it as
    /// [`tile_map`](super::tile_map) describes. The bits are the same as without a map. With
    /// another map results are meaningless.
    ///
    /// # Errors
    /// As [`Plan::run`].
    pub fn run_mapped(
        &self,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
        workspace: &mut Workspace,
    ) -> Result<(), Error> {
        super::run_mapped(plan, inputs, outputs, workspace.as_mut_slice(), &*self.executor)
    }

    /// Appends to a paged cache. Lengths and table entries have the same meaning as on a GPU:
    /// tokens without a slot are dropped. Allocates nothing.
    ///
    /// # Errors
    /// If an operand breaks the contract. Nothing is written then.
    pub fn append(&self, append: &mut Append) -> Result<(), Error> {
        append::append(append, &*self.executor)
    }

    /// Appends to a latent cache, as [`Cpu::append`].
    ///
    /// # Errors
    /// As [`Cpu::append`].
    pub fn append_latent(&self, append: &mut AppendLatent) -> Result<(), Error> {
        append::append_latent(append, &*self.executor)
    }

    /// Merges partial results. Allocates nothing.
    ///
    /// # Errors
    /// If an operand breaks the contract. Nothing is written then.
    pub fn merge(&self, merge: &mut Merge) -> Result<(), Error> {
        merge::merge(merge, &*self.executor)
    }

    /// Copies blocks of pools, one copy after the other, as a step asks for before it is appended.
    /// Allocates nothing.
    ///
    /// # Errors
    /// If an operand breaks the contract. Nothing is copied then.
    pub fn copy_blocks(&self, copy: &mut CopyBlocks) -> Result<(), Error> {
        copy_blocks::copy_blocks(copy, &*self.executor)
    }
}

impl fmt::Debug for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cpu({})", self.machine)
    }
}
