//! Random problems on this machine's CPU.

use super::guard::{Guarded, Side};
use super::trial::{Device, How};
use regard::cpu::{self, Bf16Products, Inline, Level};
use regard::{Device as Facts, Error, Inputs, Machine, Outputs, Plan, Problem, QueryStorage};

/// This machine's CPU, in some of the ways that it can be used.
pub struct Cpu {
    machines: Vec<Machine>,
}

impl Cpu {
    /// In the way that [`Machine::host`] would use it.
    ///
    /// # Errors
    /// If `REGARD_SIMD` names a level that this CPU lacks.
    pub fn detected() -> Result<Cpu, Error> {
        Ok(Cpu { machines: vec![Machine::host()?] })
    }

    /// At every SIMD level that it has, with every way to multiply bf16 that it has there.
    ///
    /// # Errors
    /// If `REGARD_SIMD` names a level that this CPU lacks.
    pub fn all_levels() -> Result<Cpu, Error> {
        let host = Machine::host()?;
        let levels = Level::ALL.into_iter().filter(|level| level.is_available());
        let ways = levels.flat_map(|level| {
            let products =
                Bf16Products::ALL.into_iter().filter(move |&products| level.has(products));
            products.map(move |products| (level, products))
        });
        let machine =
            |(level, products)| host.clone().with_level(level).with_bf16_products(products);
        Ok(Cpu { machines: ways.map(machine).collect() })
    }
}

/// The problem with larger bounds, as an engine plans that plans once.
pub fn with_larger_bounds(mut problem: Problem) -> Problem {
    problem.batch += 3;
    problem.query_len = problem.query_len * 2 + 5;
    problem.kv_len = problem.kv_len * 3 + 700;
    if let QueryStorage::Ragged { total } = &mut problem.queries {
        *total = *total * 2 + problem.query_len;
    }
    problem
}

impl Device for Cpu {
    fn ways(&self) -> usize {
        self.machines.len()
    }

    fn way(&self, way: usize) -> String {
        match &self.machines[way].device {
            Facts::Cpu(facts) => format!("{}, bf16 {}", facts.level, facts.bf16_products),
            _ => self.machines[way].to_string(),
        }
    }

    fn run(&mut self, how: How, inputs: &Inputs, outputs: &mut Outputs) -> Result<(), Error> {
        let threads = [1, 1, 2, 3][how.plan as usize % 4];
        let machine = self.machines[how.way].clone().with_threads(threads);
        let mut problem = Problem::from_operands(inputs, outputs)?;
        if how.plan & 4 != 0 {
            problem = with_larger_bounds(problem);
        }
        let plan = Plan::new(&problem, &machine)?;
        let mut workspace = Guarded::new(plan.workspace_bytes(), Side::End, how.garbage);
        // One of the two runs of a problem has a tile map of its mask.
        if how.order & 1 != 0 && inputs.attention.mask.is_some() {
            cpu::map_mask(&plan, inputs, outputs, workspace.bytes_mut(), &Inline)?;
            return cpu::run_mapped(&plan, inputs, outputs, workspace.bytes_mut(), &Inline);
        }
        match threads {
            1 => cpu::run(&plan, inputs, outputs, workspace.bytes_mut(), &Inline),
            _ => plan.run(inputs, outputs, workspace.bytes_mut()),
        }
    }

    fn guards(&self) -> bool {
        true
    }
}
