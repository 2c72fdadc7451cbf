//! Cases, coverage and random problems on an Apple GPU. Operands are copied to buffers of the
//! GPU's, and results back.

use crate::case::{Case, Output};
use crate::coverage::{self, CoverageCase, Subject};
use crate::random::{self, How};
use regard::metal::device::Gpu;
use regard::{Device, Error, Inputs, Machine, Outputs, Plan, Problem};
use std::sync::Arc;
use std::time::Duration;

/// Cores that random problems are planned for besides the GPU's own: bits may depend on them, but
/// no result is wrong.
const CORES: [usize; 4] = [1, 8, 40, 64];

/// Runs problems on an Apple GPU.
#[derive(Debug)]
pub struct Runner {
    gpu: Arc<Gpu>,
    ran: String,
}

impl Runner {
    /// Runs on that GPU. Runners on several threads share its compiled pipelines.
    pub fn new(gpu: Arc<Gpu>) -> Runner {
        Runner { gpu, ran: String::new() }
    }

    /// The GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Runs a case of the coverage of Metal's pipelines, by the plan for the GPU that it was made
    /// for: any GPU runs the pipelines that are tuned for another.
    ///
    /// # Errors
    /// If the GPU fails or refuses, and if another pipeline runs than the case was made for.
    pub fn cover(
        &mut self,
        subject: &Subject,
        case: &CoverageCase,
        data: &Case,
    ) -> Result<Output, Error> {
        case.run(data, |inputs, outputs| {
            let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, &case.machine)?;
            let used = coverage::metal::names(&plan);
            if !used.iter().any(|(name, _)| *name == subject.name) {
                let used: Vec<_> = used.into_iter().map(|(name, _)| name).collect();
                return Err(Error::argument("kernel", used.join(", "), &subject.name));
            }
            self.run_over(0xff, &plan, inputs, outputs).map(|_| ())
        })
    }

    /// Runs a plan with the workspace full of `garbage`.
    fn run_over(
        &self,
        garbage: u8,
        plan: &Plan,
        inputs: &Inputs,
        outputs: &mut Outputs,
    ) -> Result<Duration, Error> {
        self.gpu.run_copied_over(garbage, plan, inputs, outputs)
    }

    /// The GPU with one of several numbers of cores.
    fn machine(&self, number: u64) -> Machine {
        let mut machine = self.gpu.machine().clone();
        let choice = (number % (CORES.len() as u64 + 1)) as usize;
        if let (Device::Metal(facts), Some(&cores)) = (&mut machine.device, CORES.get(choice)) {
            facts.cores = cores;
        }
        machine
    }
}

impl random::Device for Runner {
    fn way(&self, _way: usize) -> String {
        self.ran.clone()
    }

    /// A GPU takes threadgroups in an order of its own.
    fn run(&mut self, how: How, inputs: &Inputs, outputs: &mut Outputs) -> Result<(), Error> {
        let machine = self.machine(how.plan);
        self.ran = machine.to_string();
        let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, &machine)?;
        self.run_over(how.garbage, &plan, inputs, outputs).map(|_| ())
    }

    fn reads_cache(&self, spec: &crate::spec::Spec) -> bool {
        (0..=CORES.len() as u64).all(|number| spec.has_plan_on(&self.machine(number)))
    }
}
