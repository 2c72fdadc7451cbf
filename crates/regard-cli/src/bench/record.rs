//! Results: a file with one object per shape, measured by regard or by a peer.

use super::ceiling::{Ceilings, median};
use crate::files;
use crate::output::Stop;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// One measured shape. Peers' files lack the fields that their scripts cannot know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Record {
    /// The shape and its variant.
    pub name: String,
    /// The shape alone.
    #[serde(default)]
    pub base: Option<String>,
    /// The length, if it is one of a series.
    #[serde(default)]
    pub length: Option<usize>,
    /// Query tokens of a sequence.
    #[serde(default)]
    pub query_tokens: Option<usize>,
    /// The model that it is a layer of, or all layers of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// The step of an engine that the model runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workload: Option<String>,
    /// Layers of this kind in the model; the time is of one of them. For all layers: their number
    /// and their total time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<usize>,
    /// The library that computed it.
    pub peer: String,
    /// `cpu` or `cuda`.
    pub device: String,
    /// The CPU's or GPU's model.
    #[serde(default)]
    pub machine: Option<String>,
    /// Threads in use; 0 on a GPU.
    pub threads: usize,
    /// Type of the operands.
    pub dtype: String,
    /// The kernel that ran.
    #[serde(default)]
    pub kernel: Option<String>,
    /// Its vector instructions.
    #[serde(default)]
    pub simd: Option<String>,
    /// The order of dimensions.
    #[serde(default)]
    pub layout: Option<String>,
    /// Copies of keys and values that runs rotated over.
    #[serde(default)]
    pub copies: Option<usize>,
    /// For a plan for larger bounds: seconds per call of the plan for exactly these lengths. The
    /// median of calls that alternate with the calls of `seconds`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exact_seconds: Option<f64>,
    /// Seconds per call: the median.
    pub seconds: f64,
    /// Seconds of the fastest call.
    #[serde(default)]
    pub fastest: Option<f64>,
    /// A quarter of the calls took less than the first, a quarter more than the second.
    #[serde(default)]
    pub quartiles: Option<[f64; 2]>,
    /// Samples that the median is of.
    #[serde(default)]
    pub runs: Option<usize>,
    /// GFLOP/s, a causal triangle counted as half of its square.
    pub gflops: f64,
    /// GB/s of keys and values, each read once.
    pub gbytes_per_second: f64,
    /// FLOP for each byte of keys and values.
    #[serde(default)]
    pub flops_per_byte: Option<f64>,
    /// GB/s of reading memory right before or after this shape, whichever was more; for shapes
    /// whose operands rotate.
    #[serde(default)]
    pub read_beside: Option<f64>,
    /// GFLOP/s of the model of prefill: the same products and softmax with operands in the caches,
    /// right before or after this shape, whichever was more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<f64>,
    /// The ceiling that is nearer, in GFLOP/s or GB/s by `bound`; null if none applies or none was
    /// measured.
    #[serde(default)]
    pub ceiling: Option<f64>,
    /// The kind of that ceiling.
    #[serde(default)]
    pub bound: Option<Bound>,
    /// The fraction of the ceiling that was reached, 1 being all.
    #[serde(default)]
    pub fraction_of_ceiling: Option<f64>,
    /// The largest error against the oracle on the sampled rows.
    #[serde(default)]
    pub max_error: Option<f64>,
    /// The largest error relative to the allowed error there.
    #[serde(default)]
    pub error_of_allowed: Option<f64>,
    /// Cores that other processes kept busy meanwhile.
    #[serde(default)]
    pub busy_elsewhere: Option<f64>,
    /// All ceilings of the run.
    #[serde(default)]
    pub ceilings: Option<Ceilings>,
    /// Other implementations of the same work.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub against: Vec<Against>,
}

/// The time of another implementation for the same work.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Against {
    /// The name of the implementation.
    pub peer: String,
    /// Seconds per call.
    pub seconds: f64,
    /// The peer's time over regard's: above 1 the peer is slower.
    pub ratio: f64,
    /// Cores that other processes kept busy while the peer ran.
    #[serde(default)]
    pub busy_elsewhere: Option<f64>,
}

/// A ceiling and its unit.
#[derive(Debug, Clone, Serialize, Deserialize, PartialEq)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Bound {
    /// Multiply-adds.
    Products {
        /// The instructions.
        unit: String,
        /// GFLOP/s.
        gflops: f64,
    },
    /// Reading memory in ordinary pages.
    Reads {
        /// GB/s.
        gbytes_per_second: f64,
    },
}

impl Bound {
    /// The ceiling in its unit.
    pub fn value(&self) -> f64 {
        match self {
            Bound::Products { gflops, .. } => *gflops,
            Bound::Reads { gbytes_per_second } => *gbytes_per_second,
        }
    }

    /// The fraction of the ceiling that these speeds are.
    pub fn fraction(&self, gflops: f64, gbytes: f64) -> f64 {
        match self {
            Bound::Products { .. } => gflops / self.value(),
            Bound::Reads { .. } => gbytes / self.value(),
        }
    }
}

impl Record {
    /// Checks that its numbers can be compared and drawn: a time above 0, speeds from 0 up, a
    /// length of 1 at least.
    fn check(&self) -> Result<(), String> {
        let optional = [
            ("flops_per_byte", self.flops_per_byte),
            ("exact_seconds", self.exact_seconds),
            ("fastest", self.fastest),
            ("read_beside", self.read_beside),
            ("pipeline", self.pipeline),
            ("ceiling", self.ceiling),
            ("fraction_of_ceiling", self.fraction_of_ceiling),
            ("max_error", self.max_error),
            ("error_of_allowed", self.error_of_allowed),
        ];
        let speeds = [("gflops", self.gflops), ("gbytes_per_second", self.gbytes_per_second)];
        let given = optional.into_iter().filter_map(|(name, number)| Some((name, number?)));
        for (name, number) in given.chain(speeds) {
            if !(number.is_finite() && number >= 0.0) {
                return Err(format!("{name} is {number}; allowed: a number from 0 up"));
            }
        }
        if !(self.seconds.is_finite() && self.seconds > 0.0) {
            return Err(format!("seconds is {}; allowed: a number above 0", self.seconds));
        }
        if self.length == Some(0) {
            return Err("length is 0; allowed: 1 at least".into());
        }
        let products =
            self.ceilings.iter().flat_map(|ceilings| ceilings.f32.iter().map(|f32| f32.gflops));
        let reads = self.ceilings.iter().map(|ceilings| ceilings.read);
        let bound = self.bound.iter().map(Bound::value);
        match products
            .chain(reads)
            .chain(bound)
            .find(|number| !(number.is_finite() && *number > 0.0))
        {
            Some(number) => Err(format!("a ceiling is {number}; allowed: a number above 0")),
            None => Ok(()),
        }
    }

    /// Whether two results are of the same work: comparable if the machine is the same.
    pub fn same_work(&self, other: &Record) -> bool {
        (&self.name, &self.dtype, self.threads, &self.device)
            == (&other.name, &other.dtype, other.threads, &other.device)
    }

    /// The fraction of the model of prefill that it reaches, 1 being all.
    pub fn of_pipeline(&self) -> Option<f64> {
        self.pipeline.map(|pipeline| self.gflops / pipeline)
    }

    /// Its time over the time under the plan for exactly these lengths.
    pub fn of_exact(&self) -> Option<f64> {
        self.exact_seconds.map(|exact| self.seconds / exact)
    }

    /// Whether its speed is given in GB/s: its ceiling is reading memory, or it has no ceiling and
    /// only one query per sequence.
    pub fn in_gbytes(&self) -> bool {
        match &self.bound {
            Some(bound) => matches!(bound, Bound::Reads { .. }),
            None => self.query_tokens == Some(1),
        }
    }

    /// Whether other processes took so much time that the measurement is unreliable.
    pub fn is_disturbed(&self) -> bool {
        disturbed(self.busy_elsewhere)
    }

    /// Its speed, in GB/s or GFLOP/s.
    pub fn speed(&self, in_gbytes: bool) -> f64 {
        if in_gbytes { self.gbytes_per_second } else { self.gflops }
    }

    /// Half the distance between the quartiles, relative to the median.
    pub fn spread(&self) -> Option<f64> {
        self.quartiles.map(|[low, high]| (high - low) / 2.0 / self.seconds)
    }
}

/// A measurement is disturbed if other processes keep more than this many cores busy.
const NOTICEABLE: f64 = 0.05;

/// Whether other processes that kept this many cores busy disturb a measurement.
pub fn disturbed(busy_elsewhere: Option<f64>) -> bool {
    busy_elsewhere.is_some_and(|cores| cores > NOTICEABLE)
}

/// Reads result files.
pub fn read(path: &Path) -> Result<Vec<Record>, Stop> {
    let failed =
        |error: &dyn std::fmt::Display| Stop::Failed(format!("{}: {error}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|error| failed(&error))?;
    let records: Vec<Record> = serde_json::from_str(&text)
        .map_err(|error| failed(&format!("not a result file: {error}")))?;
    for record in &records {
        record
            .check()
            .map_err(|found| failed(&format!("not a result file: {}: {found}", record.name)))?;
    }
    Ok(records)
}

/// Writes a result file.
pub fn write(records: &[Record], path: &Path) -> Result<(), Stop> {
    let text =
        serde_json::to_string_pretty(records).map_err(|error| Stop::Failed(error.to_string()))?;
    let text = text + "\n";
    files::write(path, text.as_bytes())
        .map_err(|error| Stop::Failed(format!("{}: {error}", path.display())))
}

/// Several rounds as one: of the results of one peer for the same work, the result with the median
/// time. In the order of their first appearance.
pub fn join_rounds(records: Vec<Record>) -> Vec<Record> {
    let mut groups: Vec<Vec<Record>> = Vec::new();
    for record in records {
        match groups
            .iter_mut()
            .find(|group| group[0].peer == record.peer && group[0].same_work(&record))
        {
            Some(group) => group.push(record),
            None => groups.push(vec![record]),
        }
    }
    let middle = |group: Vec<Record>| {
        let seconds = median(group.iter().map(|record| record.seconds).collect());
        group.into_iter().find(|record| record.seconds == seconds)
    };
    groups.into_iter().filter_map(middle).collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// A result with these numbers, everything else empty.
    pub fn record(name: &str, peer: &str, dtype: &str, seconds: f64) -> Record {
        let text = format!(
            r#"{{"name": "{name}", "peer": "{peer}", "device": "cpu", "threads": 2,
                 "dtype": "{dtype}", "seconds": {seconds},
                 "gflops": {}, "gbytes_per_second": {}}}"#,
            1.0 / seconds,
            0.5 / seconds
        );
        serde_json::from_str(&text).expect("a record")
    }

    #[test]
    fn rounds_are_joined_by_their_median() {
        let records = vec![
            record("a", "x", "f32", 3.0),
            record("b", "x", "f32", 9.0),
            record("a", "x", "f32", 1.0),
            record("a", "x", "f16", 7.0),
            record("a", "x", "f32", 2.0),
        ];
        let joined: Vec<_> = join_rounds(records)
            .into_iter()
            .map(|record| (record.name, record.dtype, record.seconds))
            .collect();
        let expected = [("a", "f32", 2.0), ("b", "f32", 9.0), ("a", "f16", 7.0)];
        assert_eq!(
            joined,
            expected.map(|(name, dtype, seconds)| (name.to_string(), dtype.to_string(), seconds))
        );
    }
}
