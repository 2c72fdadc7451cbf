//! Attention problems as data: one owned problem ([`Case`]), the file that holds it ([`mod@file`]),
//! the check of results ([`check`]), and the one list of cases that every backend is tested with
//! ([`list`]).
//!
//! The file format is described in `docs/case-files.md`, the tolerance in [`regard::oracle`].

mod array;
mod case;
pub mod check;
mod contents;
pub mod coverage;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod file;
pub mod list;
#[cfg(any(metal_stand_in, all(feature = "metal", target_vendor = "apple")))]
pub mod metal;
mod noise;
mod place;
pub mod random;
pub mod rows;
mod spec;

pub use array::{Array, Data};
pub use case::{Case, KvLayout, Layout, Output};
pub use contents::{Contents, Numbers, Sinks, Slopes, Trees};
pub use place::MemorySpec;
pub use spec::{
    CacheSpec, Caches, Entries, Granularity, Hide, KeyPositionsSpec, Keys, ListSpec, MaskSpec,
    OffsetSpec, OperandMemory, PrefixSpec, Scales, SequenceSpec, Spec,
};
