//! The Metal pipelines: a function and its SIMD groups, which a plan chooses; the other function
//! constants are features.

use super::{Backend, Feature, Features, Subject, Types};
use crate::{CacheSpec, Spec};
use regard::{DType, Device, Error, Machine, MetalFacts, Plan, Values, Window, metal};
use std::collections::BTreeMap;

/// Metal pipelines that compute attention. A name is a function of the source and, except for
/// `combine`, its SIMD groups: `prefill_half_8x1/4`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Metal;

/// The function of a pipeline's name.
pub fn function(name: &str) -> &str {
    name.split_once('/').map_or(name, |(function, _)| function)
}

/// Families tuned for and cores: few threadgroups walk their keys alone, many share them.
fn machines() -> Vec<Machine> {
    let gpu = |family, cores| Machine {
        name: format!("apple{family}"),
        device: Device::Metal(MetalFacts { family, cores, threadgroup_bytes: 32 << 10 }),
    };
    vec![gpu(7, 1), gpu(9, 1), gpu(7, 40), gpu(9, 40)]
}

/// Head dims of a class, exact ones first.
const DIMS: [&[(usize, usize)]; 4] = [
    &[(64, 64), (40, 24), (56, 64)],
    &[(128, 128), (96, 80), (72, 128)],
    &[(256, 256), (192, 128), (136, 200)],
    &[(576, 576), (576, 512), (264, 320), (576, 192)],
];

/// Few rows and many, a group and none, few keys and many; small, because kernels run slowly on the
/// host.
const SHAPES: [[usize; 5]; 12] = [
    [1, 2, 2, 50, 2],
    [2, 2, 2, 50, 3],
    [1, 4, 2, 50, 3],
    [2, 4, 2, 50, 3],
    [3, 4, 2, 50, 3],
    [4, 4, 2, 50, 3],
    [9, 2, 1, 50, 3],
    [19, 2, 1, 60, 2],
    [1, 2, 2, 530, 2],
    [1, 2, 1, 530, 2],
    [4, 4, 2, 530, 1],
    [9, 2, 1, 530, 1],
];

impl Backend for Metal {
    fn subjects(&self) -> Vec<Subject> {
        let mut subjects = BTreeMap::new();
        for dims in DIMS {
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let subject = Subject {
                    name: String::new(),
                    types: vec![Types::same(dtype)],
                    values: Values::Separate,
                    lists: false,
                    page_lists: false,
                    window: Window::default(),
                    dims: dims.to_vec(),
                    shapes: SHAPES.to_vec(),
                    page_keys: 64,
                    machines: machines(),
                };
                for ran in plain(&subject, dtype)
                    .iter()
                    .flat_map(|(spec, machine)| self.runs(spec, true, machine))
                {
                    for (name, _) in ran {
                        // One function combines partial states of all head dims.
                        let dims =
                            if name.starts_with("combine") { DIMS.concat() } else { dims.to_vec() };
                        let subject = Subject { name: name.clone(), dims, ..subject.clone() };
                        subjects.entry(name).or_insert(subject);
                    }
                }
            }
        }
        subjects.into_values().collect()
    }

    fn runs(
        &self,
        spec: &Spec,
        lse: bool,
        machine: &Machine,
    ) -> Result<Vec<(String, Features)>, Error> {
        let plan = Plan::new(&spec.problem(lse), machine)?;
        Ok(names(&plan))
    }
}

/// The pipelines of a plan, with the features of the run.
pub fn names(plan: &Plan) -> Vec<(String, Features)> {
    let launch: &metal::Launch = plan.metal().expect("for an Apple GPU");
    let of_run = match launch.combine {
        Some(_) => Features::from_list(&[Feature::Combine]),
        None => Features::default(),
    };
    let name = format!("{}/{}", launch.function, launch.simd_groups);
    let combine = launch.combine.map(|combine| (combine.to_string(), of_run));
    std::iter::once((name, of_run)).chain(combine).collect()
}

/// Every shape on every machine, plain and batch-invariant, over keys of the queries' type and in
/// f32.
fn plain(subject: &Subject, dtype: DType) -> Vec<(Spec, Machine)> {
    let mut all = Vec::new();
    for &(head_dim, value_dim) in &subject.dims {
        for &[q_len, query_heads, kv_heads, kv_len, sequences] in &subject.shapes {
            for machine in &subject.machines {
                let spec = Spec::new("").lengths(&vec![(q_len, kv_len); sequences]);
                let spec = spec.heads(query_heads, kv_heads).dims(head_dim, value_dim);
                let spec = spec.dtype(dtype);
                let f32_cache = CacheSpec { k: Some(DType::F32), ..CacheSpec::default() };
                for cache in [CacheSpec::default(), f32_cache] {
                    for batch_invariant in [false, true] {
                        let spec = Spec { batch_invariant, ..spec.clone().cache(cache) };
                        all.push((spec, machine.clone()));
                    }
                }
            }
        }
    }
    all
}
