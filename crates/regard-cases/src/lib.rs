//! Attention problems as data: one owned problem ([`Case`]), the file that holds it ([`file`]), whether a result is right
//! ([`check`]).
//!
//! The file format is described in `docs/case-files.md`, the tolerance in [`regard::oracle`].

mod array;
mod case;
pub mod check;
pub mod file;

pub use array::{Array, Data};
pub use case::{Case, KvLayout, Layout, Offset, Output};
