//! A model's time: the sum over its layers, from one measured layer of each kind.

use super::record::Record;
use crate::models::{MODELS, Model};

/// The name of the sum over kinds of layers.
const ALL: &str = "all layers";

/// The results, kinds of layers of a model side by side, and the sum behind each complete set of
/// them.
pub fn with_totals(records: Vec<Record>) -> Vec<Record> {
    let mut groups: Vec<(Option<String>, Vec<Record>)> = Vec::new();
    for record in records {
        let name = total_name(&record);
        let found = groups.iter_mut().find(|(total, group)| {
            name.is_some() && *total == name && group[0].dtype == record.dtype
        });
        match found {
            Some((_, group)) => group.push(record),
            None => groups.push((name, vec![record])),
        }
    }
    let mut all = Vec::new();
    for (name, group) in groups {
        let total = name.and_then(|name| total(name, &group));
        all.extend(group);
        all.extend(total);
    }
    all
}

/// The name of the sum that a result belongs to: model, workload and variant.
fn total_name(record: &Record) -> Option<String> {
    let (model, workload) = (record.model.as_ref()?, record.workload.as_ref()?);
    let varied = record.name.strip_prefix(record.base.as_deref()?)?;
    Some(format!("{model} {workload} {ALL}{varied}"))
}

/// The sum, if every layer of the model is there.
fn total(name: String, kinds: &[Record]) -> Option<Record> {
    let first = kinds.first()?;
    let model = MODELS.iter().find(|model| first.model.as_deref() == Some(model.name))?;
    let layers: usize = kinds.iter().filter_map(|record| record.layers).sum();
    if layers != Model::layer_count(model) {
        return None;
    }
    let sum = |amount: &dyn Fn(&Record) -> f64| -> f64 {
        kinds.iter().map(|record| record.layers.unwrap_or(0) as f64 * amount(record)).sum()
    };
    let seconds = sum(&|record| record.seconds);
    let flops = sum(&|record| record.gflops * record.seconds);
    let bytes = sum(&|record| record.gbytes_per_second * record.seconds);
    // The layers' time at their ceilings, over their measured time.
    let fraction = kinds
        .iter()
        .all(|record| record.fraction_of_ceiling.is_some())
        .then(|| sum(&|r| r.fraction_of_ceiling.unwrap_or(0.0) * r.seconds) / seconds);
    let highest =
        |number: fn(&Record) -> Option<f64>| kinds.iter().filter_map(number).max_by(f64::total_cmp);
    let mut kernels: Vec<&str> =
        kinds.iter().filter_map(|record| record.kernel.as_deref()).collect();
    kernels.dedup();
    Some(Record {
        base: Some(format!("{} {} {ALL}", model.name, first.workload.as_deref()?)),
        name,
        layers: Some(layers),
        kernel: Some(kernels.join(" + ")),
        copies: None,
        exact_seconds: None,
        seconds,
        fastest: None,
        quartiles: None,
        runs: None,
        gflops: flops / seconds,
        gbytes_per_second: bytes / seconds,
        flops_per_byte: Some(flops / bytes),
        read_beside: None,
        pipeline: None,
        // Kinds can have different bounds, so the sum has none.
        ceiling: None,
        bound: None,
        fraction_of_ceiling: fraction,
        max_error: highest(|record| record.max_error),
        error_of_allowed: highest(|record| record.error_of_allowed),
        busy_elsewhere: highest(|record| record.busy_elsewhere),
        ..first.clone()
    })
}

#[cfg(test)]
mod tests {
    use super::super::record::tests::record;
    use super::*;

    fn layer(kind: &str, count: usize, seconds: f64) -> Record {
        let base = format!("gpt-oss-20b decode-b8 {kind}");
        Record {
            base: Some(base.clone()),
            model: Some("gpt-oss-20b".into()),
            workload: Some("decode-b8".into()),
            layers: Some(count),
            fraction_of_ceiling: Some(if kind == "local" { 0.5 } else { 0.9 }),
            ..record(&format!("{base} page=64"), "regard", "bf16", seconds)
        }
    }

    #[test]
    fn a_model_is_the_sum_of_its_layers() {
        let other = record("d4k", "regard", "bf16", 1.0);
        let records = vec![layer("local", 12, 1.0), other, layer("global", 12, 3.0)];
        let all = with_totals(records);
        let names: Vec<_> = all.iter().map(|record| record.name.as_str()).collect();
        let expected = [
            "gpt-oss-20b decode-b8 local page=64",
            "gpt-oss-20b decode-b8 global page=64",
            "gpt-oss-20b decode-b8 all layers page=64",
            "d4k",
        ];
        assert_eq!(names, expected);
        let total = &all[2];
        assert_eq!((total.layers, total.seconds), (Some(24), 48.0));
        // (12 * 1 * 0.5 + 12 * 3 * 0.9) / 48
        assert!((total.fraction_of_ceiling.unwrap() - 0.8).abs() < 1e-12);
        // Each record did one unit of work per call, so 24 together.
        assert!((total.gflops * total.seconds - 24.0).abs() < 1e-9);
    }

    #[test]
    fn an_incomplete_model_has_no_sum() {
        let all = with_totals(vec![layer("global", 12, 3.0)]);
        assert_eq!(all.len(), 1);
    }
}
