//! Every CUDA module that ships is selected by some problem, and no pair of features that it
//! accepts lacks a case.
#![cfg(feature = "cuda")]

use regard::cuda::registry::{Cache, MODULES};
use regard::cuda::{DeviceMemory, launches};
use regard::{Outputs, Plan, Problem, Tensor, TensorMut};
use regard_cases::coverage::cuda::{Cuda, OTHERS};
use regard_cases::coverage::{Backend, Coverage, Feature, cover, is_selected};
use regard_cases::list;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Whether a module is covered. f16 modules accept the same as bf16 modules, and modules for head
/// dims 64 and 256 the same as their twins for head dim 128, if they have one. So only f16 modules
/// for head dim 128 are covered, and no such twins. `REGARD_ALL_MODULES=1` covers all.
fn is_covered(name: &str) -> bool {
    let all = std::env::var("REGARD_ALL_MODULES").is_ok_and(|all| all == "1");
    let has_twin = |dims: &str| {
        let twin = name.replace(dims, "_128_128_");
        twin != name && MODULES.iter().any(|module| module.name() == twin)
    };
    let is_of_bf16_alone = !name.contains("_f16_") || name.contains("_f16_128_128_");
    all || is_of_bf16_alone && !has_twin("_64_64_") && !has_twin("_256_256_")
}

/// Those that are not covered are selected by some problem at least.
#[test]
fn every_module_is_selected() {
    let backend = Cuda::all();
    let subjects = backend.subjects();
    let unselected: Vec<_> =
        subjects.iter().filter(|subject| !is_selected(&backend, subject)).collect();
    let names: Vec<_> = unselected.iter().map(|subject| &subject.name).collect();
    assert!(names.is_empty(), "no problem selects {names:?}");
}

/// The modules, covered.
fn coverages() -> &'static [Coverage] {
    static ALL: OnceLock<Vec<Coverage>> = OnceLock::new();
    ALL.get_or_init(|| {
        let backend = Cuda::all();
        let subjects: Vec<_> =
            backend.subjects().into_iter().filter(|subject| is_covered(&subject.name)).collect();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut all = Vec::new();
            while let Some(subject) = subjects.get(next.fetch_add(1, Ordering::Relaxed)) {
                all.push(cover(&backend, subject));
            }
            all
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..2).map(|_| scope.spawn(work)).collect();
            threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
        })
    })
}

#[test]
fn every_module_has_a_case_for_each_pair_of_features() {
    let (mut cases, mut wrong) = (0, Vec::new());
    for coverage in coverages() {
        let name = &coverage.subject.name;
        let (features, pairs) = coverage.empty(&coverage.covered(coverage.cases.iter()));
        if coverage.cases.is_empty() || !features.is_empty() || !pairs.is_empty() {
            wrong.push(format!(
                "{name}: {} cases, none with {features:?} {pairs:?}",
                coverage.cases.len()
            ));
        }
        println!(
            "{name}: {} features, {} pairs in {} cases; not {:?}; pairs {:?}",
            coverage.accepted().len(),
            coverage.accepted_pairs.len(),
            coverage.cases.len(),
            coverage.not_accepted,
            coverage.pairs_not_accepted,
        );
        cases += coverage.cases.len();
    }
    println!("{} modules, {cases} cases", coverages().len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let covered: BTreeSet<_> =
        coverages().iter().map(|coverage| coverage.subject.name.as_str()).collect();
    let shipped = MODULES.iter().map(|module| module.name());
    let shipped: BTreeSet<_> = shipped.filter(|name| is_covered(name)).collect();
    let others = OTHERS.iter().map(|(name, _)| *name);
    let others: BTreeSet<_> = others.filter(|name| is_covered(name)).collect();
    assert_eq!(shipped.difference(&covered).copied().collect::<BTreeSet<_>>(), others);
}

/// The modules for f16 and for bf16 accept the same.
#[test]
fn sixteen_bit_types_are_alike() {
    let of_type = |text: &str| -> BTreeMap<String, _> {
        let of_type = coverages().iter().filter(|coverage| coverage.subject.name.contains(text));
        of_type
            .map(|coverage| {
                let accepted = (coverage.accepted(), coverage.accepted_pairs.clone());
                (coverage.subject.name.replace(text, "_"), accepted)
            })
            .collect()
    };
    let (f16, mut bf16) = (of_type("_f16_"), of_type("_bf16_"));
    // f16 cannot hold the rotary dims of mla656, nor all products of codes and scales; and two
    // elements of it have enough bits of every key.
    bf16.retain(|name, _| {
        is_covered(&name.replacen('_', "_f16_", 1))
            && !name.contains("_mla656_")
            && !name.contains("_any_plain_")
            && !name.contains("_scaled_")
            && !name.contains("_terms3_")
    });
    assert!(!f16.is_empty() && f16.keys().eq(bf16.keys()));
    for (name, accepted) in f16 {
        let other = &bf16[&name];
        if name.contains("_terms_") {
            // f16's take codes with a scale per key too, for which bf16 has others. So they have
            // more pairs, and other recipes.
            assert!(accepted.0.has_all(other.0), "{name}");
        } else {
            assert_eq!(accepted, *other, "{name}");
        }
    }
}

/// Each head dim has one fallback module that all others fall back on. Fallback modules accept
/// every feature but the features of other kernels.
#[test]
fn fallback_modules_accept_everything() {
    let is_fallback = |name: &str| name.contains("_fallback") && !name.contains("_sm90");
    let mut names: Vec<_> =
        Cuda::all().subjects().into_iter().map(|subject| subject.name).collect();
    names.retain(|name| is_fallback(name));
    assert!(names.len() > 40, "{names:?}");
    let is_of_pair = |name: &str| {
        let is_pair = |cache| matches!(cache, Cache::Pair(..));
        MODULES.iter().any(|module| module.name() == name && is_pair(module.cache()))
    };
    let mut fallbacks = 0;
    for coverage in coverages() {
        let name = &coverage.subject.name;
        if !is_fallback(name) {
            continue;
        }
        fallbacks += 1;
        let others = |feature| match feature {
            Feature::OutF32 => name.contains("_f32_"),
            // Tiles of 8 rows, and tiles over caches in any format, are joined at once.
            Feature::Combine => {
                name.starts_with("prefill") || name.contains("_r8_") || name.contains("_any_")
            }
            // Strips of another length would give other bits.
            Feature::BatchInvariant => name.starts_with("prefill") || name.contains("_r8_"),
            // Caches of q8_0 and q4_0 blocks run in decode for any number of rows.
            Feature::Beside => name.contains("_q8_0_") || name.contains("_q4_0_"),
            // Modules for lists are others.
            Feature::KeyLists
            | Feature::HeadLists
            | Feature::ListCounts
            | Feature::SlotLists
            | Feature::SecondLists
            | Feature::PageLists
            | Feature::PageNumbers => true,
            // Keys of one type and values of another are not in one pool, nor parts of each other.
            Feature::OnePool | Feature::KeyPrefix => is_of_pair(name),
            // Keys in two parts are decoded by modules for caches in any format.
            Feature::TwoParts => name.starts_with("prefill") || !name.contains("_any_"),
            // Copies are read by other modules.
            Feature::HeadParts => true,
            // With WGMMA only.
            Feature::KeySplits => true,
            // A module reads one kind of cache.
            Feature::CodeCache | Feature::BlockCache | Feature::FloatCache => true,
            _ => false,
        };
        for (feature, why) in &coverage.not_accepted {
            assert!(others(*feature), "{name} does not accept {feature}: {why}");
        }
    }
    assert_eq!(fallbacks, names.iter().filter(|name| is_covered(name)).count());
}

fn on_device<'a>(tensor: &Tensor) -> Tensor<'a, DeviceMemory> {
    // SAFETY: nothing runs on this view.
    unsafe {
        let address = tensor.as_ptr() as u64;
        Tensor::from_device_address(address, tensor.dtype(), tensor.shape(), Some(tensor.strides()))
            .unwrap()
    }
}

/// A description and its case give the same problem and the same launches, for all GPUs.
#[test]
fn descriptions_select_what_their_cases_do() {
    let mut specs: Vec<_> = list::within(2_000_000).collect();
    for coverage in coverages() {
        specs.extend(coverage.cases.iter().step_by(100).map(|case| case.spec.clone()));
    }
    let machines = Cuda::all().subjects().pop().expect("there are modules").machines;
    for (i, spec) in specs.iter().enumerate() {
        let lse = i % 2 == 0;
        let machine = &machines[i % machines.len()];
        let case = spec.generate();
        let mut expected = None;
        case.run(|inputs, outputs| {
            if !lse {
                outputs.lse = None;
            }
            assert_eq!(
                Problem::from_operands(inputs, outputs)?,
                spec.problem(lse),
                "{}",
                spec.name
            );
            let out_view = |tensor: &mut TensorMut| {
                let address = tensor.as_mut_ptr() as u64;
                let (dtype, shape, strides) =
                    (tensor.dtype(), tensor.shape().to_vec(), tensor.strides().to_vec());
                // SAFETY: nothing runs on this view.
                unsafe {
                    TensorMut::from_device_address(address, dtype, &shape, Some(&strides)).unwrap()
                }
            };
            let inputs = inputs.map(|_, tensor| on_device(&tensor));
            let outputs = Outputs {
                out: out_view(&mut outputs.out),
                lse: outputs.lse.as_mut().map(out_view),
            };
            let plan = Plan::new(&Problem::from_operands(&inputs, &outputs)?, machine)?;
            expected = Some((plan.problem().clone(), launches(&plan, &inputs, &outputs)?));
            Ok(())
        })
        .unwrap_or_else(|error| panic!("{}: {error}", spec.name));
        let found = spec.outlined(lse, |inputs, outputs| {
            let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, machine)?;
            Ok((plan.problem().clone(), launches(&plan, inputs, outputs)?))
        });
        assert_eq!(found.unwrap(), expected.expect("the runner was called"), "{}", spec.name);
    }
}
