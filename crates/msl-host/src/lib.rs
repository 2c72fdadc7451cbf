//! Runs Metal Shading Language compute kernels on the host, so that they can be tested without a
//! Mac.
//!
//! A `.metal` source is rewritten a little ([`generate`]), compiled by clang as C++ ([`Compiler`]),
//! loaded ([`Library`]) and run threadgroup by threadgroup, threads as fibers, SIMD groups of 32
//! lanes ([`Library::run`]). A run reports errors that a GPU would pass over in silence: divergence
//! at barriers and SIMD-group functions, deadlocks, too much threadgroup memory, function constants
//! that were not set. Other builds ([`Build`]) also report races, reads of uninitialized
//! threadgroup memory, accesses outside of bound buffers, and the findings of AddressSanitizer and
//! UndefinedBehaviorSanitizer.
//!
//! A run cannot show that Apple's compiler accepts the source. Nor does it show the registers that
//! the source takes, its speed, the accuracy of the GPU's `exp`, or the GPU's true memory model.
//! `README.md` has more.
#![warn(missing_docs)]

mod compile;
mod generate;
mod library;
mod tokens;

pub use compile::{Build, Compiler};
pub use generate::{Generated, generate};
pub use library::{Buffer, Dispatch, Library};

use std::fmt;

/// The reason why something did not work.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Error {
    /// There is no clang here, or it is too old; the reason names what is missing.
    Unavailable(String),
    /// The source has a form that the generator does not know, or clang does not accept it.
    Source(String),
    /// The compiled library cannot be loaded, or has no such kernel.
    Library(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Unavailable(why) => write!(f, "MSL cannot be run here: {why}"),
            Error::Source(what) => write!(f, "the MSL source: {what}"),
            Error::Library(what) => write!(f, "the compiled library: {what}"),
        }
    }
}

impl std::error::Error for Error {}
