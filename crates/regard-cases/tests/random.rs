//! The generator of random problems.

use regard_cases::random::{Profile, axes, describe, problem};
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Problems in which every pair of values has to come up: as many as a run on a GPU takes.
const PROBLEMS: u64 = 50_000;

#[test]
fn the_same_seed_and_number_give_the_same_problem() {
    for profile in [Profile::All, Profile::Small, Profile::Prefill, Profile::Batches] {
        for number in 0..200 {
            let spec = problem(9, number, profile);
            assert_eq!(spec, problem(9, number, profile));
            assert_ne!(spec, problem(10, number, profile), "{number}");
            assert_ne!(describe(&spec), describe(&problem(9, number + 1, profile)), "{number}");
        }
    }
    // Another number, the same data: operands are made from the description alone.
    let spec = problem(9, 3, Profile::Small);
    let numbers = |spec: &regard_cases::Spec| {
        spec.generate().k.numbers().unwrap().iter().map(|x| x.to_bits()).collect::<Vec<_>>()
    };
    assert_eq!(numbers(&spec), numbers(&spec.clone()));
}

/// Whether no problem can have both.
fn impossible(a: (&str, &str), b: (&str, &str)) -> bool {
    let both = |x: (&str, &str), y: (&str, &str)| (a == x && b == y) || (a == y && b == x);
    let of = |axis: &str, other: &str| {
        [(a, b), (b, a)].into_iter().find(|(a, b)| a.0 == axis && b.0 == other)
    };
    // f32 inputs have f32 outputs, which is as they are.
    both(("dtype", "f32"), ("out", "f32"))
        // Only pages come in another order.
        || of("pages", "storage")
            .is_some_and(|(pages, storage)| pages.1 == "hnd" && !storage.1.contains("pages"))
        // Masks go with masks.
        || of("mask", "mask hides").is_some_and(|(a, b)| (a.1 == "no") != (b.1 == "no mask"))
        || of("mask", "mask broadcast").is_some_and(|(a, b)| (a.1 == "no") != (b.1 == "no mask"))
        || of("mask hides", "mask broadcast")
            .is_some_and(|(a, b)| (a.1 == "no mask") != (b.1 == "no mask"))
        // Without sequences there are neither rows nor keys.
        || of("batch", "rows").is_some_and(|(a, b)| a.1 == "none" && b.1 != "none")
        || of("batch", "keys").is_some_and(|(a, b)| a.1 == "none" && b.1 != "none")
        // Codes have scales, and nothing else has.
        || of("keys as", "scale per").is_some_and(|(a, b)| a.1 == "codes" && b.1 == "nothing")
        || of("values as", "scale per").is_some_and(|(a, b)| a.1 == "codes" && b.1 == "nothing")
        || of("keys as", "scales").is_some_and(|(a, b)| a.1 == "codes" && b.1 == "none")
        || of("values as", "scales").is_some_and(|(a, b)| a.1 == "codes" && b.1 == "none")
        || of("scale per", "scales").is_some_and(|(a, b)| (a.1 == "nothing") != (b.1 == "none"))
        // Blocks are of 32 values and more.
        || both(("keys as", "blocks"), ("Dk", "up to 31"))
        // Values that are a prefix of the keys have no half of a page of their own.
        || of("values in", "storage").is_some_and(|(values, storage)| {
            values.1.starts_with("the keys") && storage.1.starts_with("interleaved pages")
        })
        // Keys in two parts have more dims than values, and no second cache.
        || of("values in", "Dv")
            .is_some_and(|(values, dim)| values.1.contains("two parts") && dim.1 == "as Dk")
        || of("values in", "lists").is_some_and(|(values, lists)| {
            values.1.contains("two parts") && lists.1.contains("two caches")
        })
        || both(("batch", "some"), ("rows", "none"))
        || both(("batch", "some"), ("keys", "none"))
        // Entries go with lists, and slots of a pool have no positions.
        || of("lists", "list entries").is_some_and(|(a, b)| (a.1 == "no") != (b.1 == "no lists"))
        // Rows among keys at positions of their own have positions themselves, and no tree.
        || of("key positions", "offset")
            .is_some_and(|(a, b)| a.1 != "none" && b.1 == "bottom right")
        || of("key positions", "tree").is_some_and(|(a, b)| a.1 != "none" && b.1 != "no")
        || groups_without_pages(a, b)
        || groups_without_pages(b, a)
        || slots_with_positions(a, b)
        || slots_with_positions(b, a)
}

/// Prefix groups are of sequences that share pages, and of rows without lists.
fn groups_without_pages(groups: (&str, &str), other: (&str, &str)) -> bool {
    let lacks = match other.0 {
        "lists" => other.1 != "no",
        "list entries" => other.1 != "no lists",
        "batch" => other.1 == "none",
        "storage" => !other.1.contains("pages"),
        _ => false,
    };
    groups == ("prefix groups", "yes") && lacks
}

/// Slots and pages are of pools. Slots, and pages without numbers, have no positions; pages with
/// numbers need positions of queries.
fn slots_with_positions(lists: (&str, &str), other: (&str, &str)) -> bool {
    let numbered = lists.1.starts_with("numbered pages");
    let asks = match other.0 {
        "alibi" | "causal" | "chunk" => !numbered && other.1 != "no",
        "mask" | "tree" => other.1 != "no",
        "mask hides" | "mask broadcast" => other.1 != "no mask",
        "offset" => numbered == (other.1 == "bottom right"),
        "key positions" => other.1 != "none",
        "window" => !numbered && other.1 != "none",
        "storage" => !other.1.contains("pages"),
        _ => false,
    };
    let of_pool = ["slots", "pages", "numbered pages"].iter().any(|kind| lists.1.starts_with(kind));
    lists.0 == "lists" && of_pool && asks
}

#[test]
fn every_pair_of_features_comes_up() {
    let mut values: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut pairs = HashMap::new();
    for number in 0..PROBLEMS {
        let axes = axes(&problem(1, number, Profile::All));
        for (i, &one) in axes.iter().enumerate() {
            values.entry(one.0).or_default().insert(one.1);
            for &other in &axes[i + 1..] {
                *pairs.entry((one, other)).or_insert(0u64) += 1;
            }
        }
    }
    assert!(values.len() > 30 && values.values().all(|values| values.len() > 1), "{values:?}");
    let mut missing = Vec::new();
    let names: Vec<_> = values.keys().copied().collect();
    for (i, &axis) in names.iter().enumerate() {
        for &other in &names[i + 1..] {
            for &a in &values[axis] {
                for &b in &values[other] {
                    let (a, b) = ((axis, a), (other, b));
                    let met = pairs.contains_key(&(a, b)) || pairs.contains_key(&(b, a));
                    if !met && !impossible(a, b) {
                        missing.push(format!("{} {} with {} {}", a.0, a.1, b.0, b.1));
                    }
                    assert!(!(met && impossible(a, b)), "{a:?} with {b:?} is possible");
                }
            }
        }
    }
    assert!(missing.is_empty(), "{} pairs never come up:\n{}", missing.len(), missing.join("\n"));
}

#[test]
fn prefill_problems_are_prefill() {
    for number in 0..2000 {
        let spec = problem(4, number, Profile::Prefill);
        let rows = spec.sequences.iter().map(|sequence| sequence.q_len).max();
        assert!(
            rows.is_some_and(|rows| (65..=257).contains(&rows)) && !spec.batch_invariant,
            "{spec:?}"
        );
        assert!(spec.work() <= 10_000_000);
    }
}
