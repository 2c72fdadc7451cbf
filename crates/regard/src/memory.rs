//! The memory of operands. Shapes, types and strides mean the same in any memory; only the host's
//! memory can be read.

use std::fmt::Debug;
use std::hash::Hash;

/// A kind of memory that a [`Tensor`](crate::Tensor) can be a view of: [`Host`], or a device's.
/// All operands of one call are in the same kind of memory; the compiler checks that.
pub trait Memory:
    Copy + Default + Debug + PartialEq + Eq + Hash + Send + Sync + 'static + sealed::Contents
{
}

/// The host's memory, as slices have it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Host;

impl Memory for Host {}

impl sealed::Contents for Host {
    const READABLE: bool = true;
}

pub(crate) mod sealed {
    /// Access of the host to a memory's contents.
    pub trait Contents {
        /// Whether views of this memory are views of the host's: addresses are pointers that the
        /// host may read through. In other memory, lengths are bounded by shapes, and kernels clamp
        /// the lengths that they read to these bounds.
        const READABLE: bool = false;
    }
}
