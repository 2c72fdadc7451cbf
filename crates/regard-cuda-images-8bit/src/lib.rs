//! The compiled CUDA kernels of `regard` for caches in 8 and 4 bits and in mixed formats: machine
//! code and PTX of each module, compressed.
//!
//! `cargo xtask cuda build` of regard's repository writes the archives and the index.
//! `regard` selects, unpacks and loads an image; its API hides this crate.
#![no_std]

pub use regard_cuda_images::{Archive, Image, Index};

/// The index of what ships.
pub static INDEX: Index = include!("../images/index.rs");
