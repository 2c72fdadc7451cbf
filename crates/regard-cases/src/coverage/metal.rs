//! The Metal functions: which the source has, and which a plan runs.

use super::{Backend, Features, Subject};
use crate::Spec;
use regard::{DType, Device, Error, Machine, MetalFacts, Plan, metal};

/// Metal functions that compute attention.
#[derive(Debug, Clone, Copy, Default)]
pub struct Metal;

/// An Apple GPU of that family, with so many cores.
fn gpu(family: u32, cores: usize) -> Machine {
    Machine {
        name: format!("apple{family}"),
        device: Device::Metal(MetalFacts { family, cores, threadgroup_bytes: 32 << 10 }),
    }
}

impl Backend for Metal {
    fn subjects(&self) -> Vec<Subject> {
        Vec::new()
    }

    fn runs(&self, spec: &Spec, lse: bool, machine: &Machine) -> Result<Vec<(String, Features)>, Error> {
        let plan = Plan::new(&spec.problem(lse), machine)?;
        let launch = plan.metal().expect("for an Apple GPU");
        let names = std::iter::once(launch.function).chain(launch.merge);
        Ok(names.map(|name| (name.to_string(), Features::default())).collect())
    }
}

#[allow(dead_code)]
fn types() -> [(DType, &'static str); 3] {
    let _ = (gpu(7, 8), metal::source());
    [(DType::F32, "float"), (DType::F16, "half"), (DType::BF16, "bfloat")]
}
