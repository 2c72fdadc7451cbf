//! Coverage of kernels and features: small cases that together run every kernel with every
//! [`Feature`] that it accepts, alone and in pairs.
//!
//! Nothing of that is a list made by hand. Selection is a pure function, so descriptions of cases
//! are tried against it, without data and without a GPU: a kernel accepts a pair of features if
//! some problem with both selects it. Pairs are then covered by few cases with several features
//! each (a covering array, greedily).

#[cfg(feature = "cuda")]
pub mod cuda;
mod feature;
pub mod metal;
mod search;

pub use feature::{Feature, Features, features};
pub use search::{Coverage, Covered, cover, is_selected};

use crate::check::{Checker, Failure};
use crate::{CacheSpec, Case, Output, Spec};
use regard::oracle::Agreement;
use regard::{DType, Error, Inputs, Machine, Outputs, Values, Window};

/// A kernel to be covered, and the problems to try it with.
#[derive(Debug, Clone)]
pub struct Subject {
    /// Its name: a CUDA module, a Metal function.
    pub name: String,
    /// The types of operands to try.
    pub types: Vec<Types>,
    /// The storage of its values.
    pub values: Values,
    /// Whether its rows have lists of keys.
    pub lists: bool,
    /// Whether these are lists of pages.
    pub page_lists: bool,
    /// Its rows' window, if it runs with a short one only.
    pub window: Window,
    /// Head dims of keys and of values to try: the dims that it is compiled for first.
    pub dims: Vec<(usize, usize)>,
    /// Query tokens, query heads, key/value heads, keys, sequences to try, the cheapest first.
    pub shapes: Vec<[usize; 5]>,
    /// Keys that the kernel copies at a time: the size of large pages.
    pub page_keys: usize,
    /// Machines to plan for, the best first.
    pub machines: Vec<Machine>,
}

/// Types of operands.
#[derive(Debug, Clone, Copy)]
pub struct Types {
    /// Queries.
    pub queries: DType,
    /// The storage of keys and values.
    pub cache: CacheSpec,
}

impl Types {
    /// Keys and values as queries.
    pub fn same(dtype: DType) -> Types {
        Types { queries: dtype, cache: CacheSpec::default() }
    }
}

/// A case to run.
#[derive(Debug, Clone)]
pub struct CoverageCase {
    /// The problem.
    pub spec: Spec,
    /// Whether the log-sum-exp is asked for.
    pub lse: bool,
    /// The machine that it is planned for. Another GPU runs the plan if its architecture allows it.
    pub machine: Machine,
    /// Its features, as the kernel that it was made for sees them.
    pub features: Features,
    /// The one feature that it was made for, if it was.
    pub alone: Option<Feature>,
    /// The recipe that it was made by.
    recipe: search::Recipe,
}

impl CoverageCase {
    /// The same case with one of its features less, for every feature that the kernel does not
    /// need.
    pub fn smaller(&self, backend: &dyn Backend, subject: &Subject) -> Vec<CoverageCase> {
        let without = |feature| search::without(self, feature, backend, subject);
        self.recipe.added.iter().filter_map(without).collect()
    }

    /// The features that were added to a plain problem.
    pub fn added(&self) -> Features {
        self.recipe.added
    }

    /// Runs the case: as [`Case::run`], but the log-sum-exp is asked for only if it should be.
    ///
    /// # Errors
    /// As [`Case::run`].
    pub fn run(
        &self,
        data: &Case,
        mut runner: impl FnMut(&Inputs, &mut Outputs) -> Result<(), Error>,
    ) -> Result<Output, Error> {
        data.run(|inputs, outputs| {
            if !self.lse {
                outputs.lse = None;
            }
            runner(inputs, outputs)
        })
    }

    /// Judges a result by the oracle, the log-sum-exp if it was asked for: all rows, or about
    /// `max_rows` of them evenly spread.
    ///
    /// # Errors
    /// If it is not right.
    pub fn judge(
        &self,
        data: &Case,
        output: &Output,
        max_rows: Option<usize>,
    ) -> Result<Agreement, Failure> {
        let checker = Checker::new(data, max_rows)?;
        let (out, lse) = (output.out.view()?, output.lse.view()?);
        let lse = self.lse.then(|| data.query_order(lse));
        checker.judge().check(&data.query_order(out), lse.as_ref()).map_err(Failure::Result)
    }
}

/// A backend: its shipped kernels, and the kernels that run for a problem.
pub trait Backend: Sync {
    /// Every kernel that ships and computes attention.
    fn subjects(&self) -> Vec<Subject>;

    /// The names of the subjects that run for a case, each with the features that come from the run
    /// instead of the description.
    ///
    /// # Errors
    /// The reason why no kernel runs it.
    fn runs(
        &self,
        spec: &Spec,
        lse: bool,
        machine: &Machine,
    ) -> Result<Vec<(String, Features)>, Error>;
}
