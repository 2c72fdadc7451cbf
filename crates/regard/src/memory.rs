//! Where operands lie. Shapes, types and strides mean the same everywhere; only the host's memory can be looked into.

use crate::error::Error;
use crate::problem::{Inputs, Problem};
use crate::tensor::Tensor;
use std::fmt::Debug;
use std::hash::Hash;

/// A kind of memory that a [`Tensor`] can be a view of: [`Host`], or a device's. Operands of one call all lie in the
/// same kind, which the compiler sees to.
pub trait Memory:
    Copy + Default + Debug + PartialEq + Eq + Hash + Send + Sync + 'static + sealed::Contents
{
}

/// The host's memory: what slices lie in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Host;

impl Memory for Host {}

pub(crate) mod sealed {
    use super::{Error, Inputs, Memory, Problem, Tensor};

    /// What checking can find out about contents. As it stands: nothing, because they cannot be read here. Lengths are then
    /// bounded by shapes, and kernels clamp what they read to that.
    pub trait Contents: Sized {
        /// Whether contents can be read here.
        const READABLE: bool = false;

        /// The longest sequence that cumulative lengths over `total` rows can describe. Their type, shape and strides have been
        /// checked, not their entries.
        fn longest(
            _argument: &str,
            _cumulative: &Tensor<Self>,
            total: usize,
        ) -> Result<usize, Error>
        where
            Self: Memory,
        {
            Ok(total)
        }

        /// Everything else that contents tell: lengths, table entries, slopes and sinks.
        fn check_contents(_inputs: &Inputs<Self>, _problem: &Problem) -> Result<(), Error>
        where
            Self: Memory,
        {
            Ok(())
        }
    }
}
