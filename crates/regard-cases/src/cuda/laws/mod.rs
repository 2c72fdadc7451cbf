//! Laws that hold on a GPU for any numbers, and tests of GPU-only features: graphs, workspaces,
//! very large tensors.

mod append;
mod append_rows;
mod copies;
mod extremes;
mod graphs;
mod interface;
mod invariance;
mod mask_map;
mod merge;
mod schedule;
mod selection;

use super::Runner;
use crate::check::Failure;
use crate::{Case, Output, Spec};
use regard::Error;

/// One law.
pub struct Law {
    /// Its name.
    pub name: &'static str,
    /// Checks the law. Returns words about the tried problems, or a description of the violation.
    pub check: fn(&mut Runner) -> Result<String, Broken>,
}

/// The prefix of the result of a law that was skipped for lack of memory.
pub const SKIPPED: &str = "SKIPPED";

/// Every law.
pub const LAWS: &[Law] = &[
    Law { name: "random-compositions", check: invariance::random_compositions },
    Law { name: "known-compositions", check: invariance::known_compositions },
    Law { name: "batch-invariance", check: invariance::batch_invariance },
    Law { name: "chunks-equal-prefill", check: invariance::chunks_equal_prefill },
    Law { name: "pages-permuted", check: invariance::pages_permuted },
    Law { name: "poison-never-shows", check: invariance::poison_never_shows },
    Law { name: "same-bits-twice", check: invariance::same_bits_twice },
    Law { name: "plan-for-more", check: invariance::plan_for_more },
    Law { name: "full-lists-are-one", check: selection::full_lists_are_one },
    Law { name: "graph-decode", check: graphs::decode },
    Law { name: "graph-ragged", check: graphs::ragged },
    Law { name: "graph-shards", check: graphs::shards },
    Law { name: "graph-scheduled", check: graphs::scheduled },
    Law { name: "scheduled-equals-plain", check: schedule::scheduled_equals_plain },
    Law { name: "mapped-equals-plain", check: mask_map::mapped_equals_plain },
    Law { name: "refusals", check: interface::refusals },
    Law { name: "slices-and-shared-workspace", check: interface::slices_and_shared_workspace },
    Law { name: "append", check: append::append },
    Law { name: "copies", check: copies::copies },
    Law { name: "append-latent-rows", check: append_rows::append_latent_rows },
    Law { name: "merge", check: merge::merge },
    Law { name: "many-rows", check: extremes::many_rows },
    Law { name: "many-sequences", check: extremes::many_sequences },
    Law { name: "far-pages", check: extremes::far_pages },
    Law { name: "far-strides", check: extremes::far_strides },
];

/// A description of how a law is broken.
#[derive(Debug)]
pub struct Broken(pub String);

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<Error> for Broken {
    fn from(error: Error) -> Broken {
        Broken(error.to_string())
    }
}

impl From<Failure> for Broken {
    fn from(failure: Failure) -> Broken {
        Broken(failure.to_string())
    }
}

/// Broken, with these words, unless it holds.
fn expect(holds: bool, words: impl FnOnce() -> String) -> Result<(), Broken> {
    if holds { Ok(()) } else { Err(Broken(words())) }
}

impl Runner {
    /// Runs a case as it is.
    fn output(&mut self, case: &Case) -> Result<Output, Broken> {
        let output = case.run(|inputs, outputs| self.run(inputs, outputs));
        output.map_err(|error| Broken(format!("{}: {error}", case.name)))
    }

    /// Runs the case of a description.
    fn generated(&mut self, spec: &Spec) -> Result<(Case, Output), Broken> {
        let case = spec.generate();
        let output = self.output(&case)?;
        Ok((case, output))
    }
}
