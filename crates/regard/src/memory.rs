//! Where operands lie. Shapes, types and strides mean the same everywhere; only the host's memory
//! can be looked into.

use std::fmt::Debug;
use std::hash::Hash;

/// A kind of memory that a [`Tensor`](crate::Tensor) can be a view of: [`Host`], or a device's.
/// Operands of one call all lie in the same kind, which the compiler sees to.
pub trait Memory:
    Copy + Default + Debug + PartialEq + Eq + Hash + Send + Sync + 'static + sealed::Contents
{
}

/// The host's memory: what slices lie in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Host;

impl Memory for Host {}

impl sealed::Contents for Host {
    const READABLE: bool = true;
}

pub(crate) mod sealed {
    /// Whether contents can be looked into.
    pub trait Contents {
        /// Whether views of this memory are views of the host's: addresses are pointers that the
        /// host may read through. Elsewhere, lengths are bounded by shapes, and kernels clamp what
        /// they read to that.
        const READABLE: bool = false;
    }
}
