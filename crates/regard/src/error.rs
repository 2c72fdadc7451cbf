//! Errors: bad input ([`Error::Argument`]), a request that no kernel here can serve
//! ([`Refusal`]), a full cache, or a driver's own error.

use std::fmt;

/// The reason why a call did not run. Nothing has been written to any output when one of these is
/// returned.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// An argument breaks the contract.
    Argument {
        /// The argument, as the caller knows it: `kv_lens[3]`, `q`, `scale`.
        argument: String,
        /// Its value.
        found: String,
        /// The values that are accepted.
        allowed: String,
    },
    /// The request is sound, but nothing here can run it.
    Refused(Refusal),
    /// A [`PageAllocator`](crate::paged::PageAllocator) has too few free blocks.
    OutOfPages {
        /// Blocks that the call would take.
        needed: usize,
        /// Blocks that are free.
        free: usize,
        /// Blocks of the pool.
        total: usize,
    },
    /// A device's driver failed at something that should have worked.
    Driver {
        /// The operation that failed: "loading the kernels of module x".
        doing: String,
        /// The driver's message.
        reason: String,
    },
}

/// A sound request that cannot run on the machine it was planned for, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The machine it was planned for.
    pub machine: String,
    /// The reason why no kernel runs there.
    pub reason: String,
}

impl Error {
    /// An argument error. All three are sentence fragments: they print as
    /// "`argument` is found; allowed: allowed".
    pub fn argument(
        argument: impl Into<String>,
        found: impl fmt::Display,
        allowed: impl Into<String>,
    ) -> Error {
        Error::Argument {
            argument: argument.into(),
            found: found.to_string(),
            allowed: allowed.into(),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Argument { argument, found, allowed } => {
                write!(f, "`{argument}` is {found}; allowed: {allowed}")
            }
            Error::Refused(refusal) => refusal.fmt(f),
            Error::OutOfPages { needed, free, total } => {
                write!(f, "out of pages: {needed} needed, {free} free of {total}")
            }
            Error::Driver { doing, reason } => write!(f, "{doing} failed: {reason}"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot run on {}: {}", self.machine, self.reason)
    }
}

impl std::error::Error for Error {}
impl std::error::Error for Refusal {}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Error {
        Error::Refused(refusal)
    }
}
