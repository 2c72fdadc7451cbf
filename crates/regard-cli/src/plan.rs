//! `regard plan`: the kernel and splits for a problem on a machine, or the reason why none runs.

use crate::models::{self, Layer, Model, PLANNED, Place, Workload};
use crate::output::{REFUSED, Stop, error, print, print_json};
use crate::{case, shape};
use regard::{
    Device, Error, KeyLayout, KvStorage, ListEntries, Machine, Plan, Problem, QueryStorage,
    Refusal, Values,
};
use serde_json::{Value, json};
use std::path::Path;

/// A request to plan.
pub struct Request<'a> {
    /// A case file, if there is no shape.
    pub file: Option<&'a Path>,
    /// A shape as text.
    pub shape: Option<&'a str>,
    /// Models whose layers are planned, if there is neither.
    pub models: &'a [String],
    /// The workloads that the layers run in.
    pub workloads: &'a [String],
    /// The machine's name.
    pub machine: &'a str,
    /// Threads, instead of all.
    pub threads: Option<usize>,
    /// JSON instead of text.
    pub json: bool,
}

/// Plans and prints.
pub fn plan(request: &Request) -> Result<u8, Stop> {
    let mut machine = machine(request.machine)?;
    if let Some(threads) = request.threads {
        if !matches!(machine.device, Device::Cpu(_)) {
            let found = format!("{threads} with machine {}", machine.name);
            return Err(Error::argument("threads", found, "a CPU's number of threads").into());
        }
        machine = machine.with_threads(threads);
    }
    if !request.models.is_empty() {
        return plan_models(request, &machine);
    }
    let problem = match (request.file, request.shape) {
        (Some(file), _) => {
            let case = case::read(file)
                .map_err(|error| Stop::Failed(format!("{}: {error}", file.display())))?;
            case::problem(&case)
                .map_err(|error| Stop::Failed(format!("{}: {error}", file.display())))?
        }
        (None, shape) => shape::parse(shape.unwrap_or_default())?,
    };
    match Plan::new(&problem, &machine) {
        Ok(plan) => {
            if request.json {
                print_json(&plan_json(&plan))?;
            } else {
                print(&plan.explain())?;
            }
            Ok(0)
        }
        Err(Error::Refused(refusal)) => {
            if request.json {
                print_json(&refusal_json(&problem, &machine, &refusal))?;
            }
            error(&refusal.to_string());
            Ok(REFUSED)
        }
        Err(other) => Err(other.into()),
    }
}

/// Plans each kind of layer of each model in each workload, and prints. Refusals do not end it.
fn plan_models(request: &Request, machine: &Machine) -> Result<u8, Stop> {
    let names: Vec<String> = match request.workloads {
        [] => PLANNED.map(String::from).into(),
        names => names.to_vec(),
    };
    let workloads = models::workloads(&names, Place::Gpu)?;
    let (mut answers, mut status) = (Vec::new(), 0);
    for model in models::models(request.models)? {
        for workload in &workloads {
            for layer in model.layers {
                let problem = layer.problem(workload)?;
                let planned = match Plan::new(&problem, machine) {
                    Ok(plan) if request.json => plan_json(&plan),
                    Ok(plan) => {
                        print(&format!("{}{}\n", heading(model, layer, workload), plan.explain()))?;
                        continue;
                    }
                    Err(Error::Refused(refusal)) => {
                        status = REFUSED;
                        if !request.json {
                            print(&heading(model, layer, workload))?;
                        }
                        error(&refusal.to_string());
                        refusal_json(&problem, machine, &refusal)
                    }
                    Err(other) => return Err(other.into()),
                };
                answers.push(layer_json(model, layer, workload, planned));
            }
        }
    }
    if request.json {
        print_json(&answers)?;
    }
    Ok(status)
}

/// The heading of a plan: the layers, the workload, and the shape in the words of `--shape`.
fn heading(model: &Model, layer: &Layer, workload: &Workload) -> String {
    let mut text = format!(
        "{} {} {}: {} of {} layers ({})\n{}",
        model.name,
        workload.name,
        layer.kind,
        layer.count,
        model.layer_count(),
        model.config,
        layer.words(workload),
    );
    if let Some(every) = workload.prompt_every {
        text += &format!("; all but one sequence in {every} bring one query token");
    }
    if let Some(scale) = layer.scale {
        text += &format!("; scale {scale}");
    }
    text + "\n"
}

fn layer_json(model: &Model, layer: &Layer, workload: &Workload, planned: Value) -> Value {
    let mut answer = json!({
        "model": model.name,
        "workload": workload.name,
        "kind": layer.kind,
        "layers": layer.count,
        "scale": layer.scale,
    });
    if let (Some(answer), Value::Object(planned)) = (answer.as_object_mut(), planned) {
        answer.extend(planned);
    }
    answer
}

fn refusal_json(problem: &Problem, machine: &Machine, refusal: &Refusal) -> Value {
    json!({
        "problem": problem_json(problem),
        "machine": machine_json(machine),
        "refused": refusal.reason,
    })
}

/// The machine of that name, or the GPU of this machine that it stands for.
fn machine(name: &str) -> Result<Machine, Error> {
    #[cfg(feature = "cuda")]
    if let ("cuda", number) = name.split_once(':').unwrap_or((name, "0")) {
        let gpu = crate::case::gpu(name, number)?;
        return Ok(Machine {
            name: format!("cuda:{}", gpu.ordinal),
            device: Device::Cuda(gpu.facts),
        });
    }
    name.parse::<Machine>()
}

fn plan_json(plan: &Plan) -> Value {
    let (choice, split) = (plan.choice(), plan.split());
    json!({
        "problem": problem_json(plan.problem()),
        "machine": machine_json(plan.machine()),
        "kernel": choice.kernel.name(),
        "tile": { "rows": choice.block_rows, "keys": choice.tile_keys, "reason": choice.reason },
        "split": {
            "keys": split.keys,
            "count": split.count,
            "parallel": split.parallel,
            "reason": split.reason,
        },
        "workers": plan.workers(),
        "workspace_bytes": plan.workspace_bytes(),
        "launches": plan.cuda().map(|launches| launches.in_order().map(|launch| json!({
            "module": launch.module,
            "entry": launch.entry,
            "grid": launch.grid,
            "threads": launch.threads,
            "shared_bytes": launch.shared_bytes,
        })).collect::<Vec<_>>()),
    })
}

fn problem_json(problem: &Problem) -> Value {
    let variant = &problem.variant;
    let query_rows = match problem.queries {
        QueryStorage::Batched => None,
        QueryStorage::Ragged { total } => Some(total),
        other => unreachable!("the command plans no {other:?} queries"),
    };
    let (keys, block_size) = match problem.keys {
        KvStorage::Batched => ("batched", None),
        KvStorage::Ragged => ("ragged", None),
        KvStorage::Paged { block_size } => ("paged", Some(block_size)),
        other => unreachable!("the command plans no {other:?} keys"),
    };
    json!({
        "batch": problem.batch,
        "query_heads": problem.query_heads,
        "kv_heads": problem.kv_heads,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "query_len": problem.query_len,
        "kv_len": problem.kv_len,
        "ragged_query_rows": query_rows,
        "keys": keys,
        "block_size": block_size,
        "dtype": problem.dtype.name(),
        "key_dtype": problem.key_dtype.name(),
        "value_dtype": problem.value_dtype.name(),
        "values": match problem.values {
            Values::KeyPrefix => "key_prefix",
            _ => "separate",
        },
        "rotary_dim": problem.rotary_dim,
        "out_dtype": problem.out_dtype.name(),
        "causal": variant.causal,
        "window": [variant.window.left, variant.window.right],
        "chunk": variant.chunk,
        "softcap": variant.softcap,
        "alibi": variant.alibi,
        "sinks": variant.sinks,
        "mask": variant.mask.map(|mask| mask.name()),
        "tree": variant.tree,
        "key_positions": variant.key_positions.map(|layout| match layout {
            KeyLayout::Contiguous => "contiguous",
            _ => "round-robin",
        }),
        "key_lists": problem.key_lists.map(|lists| {
            let entries = match lists.entries {
                ListEntries::Keys => "keys",
                ListEntries::Slots => "slots",
                ListEntries::Pages => "pages",
                _ => "numbered-pages",
            };
            json!({
                "len": lists.len,
                "per_head": lists.per_head,
                "entries": entries,
                "second": lists.second,
            })
        }),
        "prefix_groups": problem.prefix_groups,
        "lse": problem.lse,
        "batch_invariant": problem.batch_invariant,
    })
}

fn machine_json(machine: &Machine) -> Value {
    match &machine.device {
        Device::Cpu(facts) => json!({
            "name": machine.name,
            "device": "cpu",
            "simd": facts.level.name(),
            "threads": facts.threads,
            "l1d_bytes": facts.l1d_bytes,
            "l2_bytes": facts.l2_bytes,
            "l3_bytes": facts.l3_bytes,
        }),
        Device::Cuda(facts) => json!({
            "name": machine.name,
            "device": "cuda",
            "compute_capability": facts.compute_capability,
            "multiprocessors": facts.multiprocessors,
            "shared_bytes": facts.shared_bytes,
            "l2_bytes": facts.l2_bytes,
        }),
        Device::Metal(facts) => json!({
            "name": machine.name,
            "device": "metal",
            "family": facts.family,
            "cores": facts.cores,
            "threadgroup_bytes": facts.threadgroup_bytes,
        }),
        other => json!({ "name": machine.name, "device": format!("{other:?}") }),
    }
}
