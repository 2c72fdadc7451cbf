//! The compiled CUDA kernels of `regard`: machine code and PTX of each module, compressed.
//!
//! `cargo xtask cuda build` of regard's repository writes the archives and the index.
//! `regard` selects, unpacks and loads an image; its API hides this crate.
#![no_std]

extern crate alloc;

pub mod relative_ptx;

/// Everything that ships.
#[derive(Debug, Clone, Copy)]
pub struct Index {
    /// Compressed archives, each of one or more images.
    pub archives: &'static [Archive],
    /// The images of all modules, by the archive that holds them.
    pub images: &'static [Image],
}

/// Images, compressed together by LZMA.
#[derive(Debug, Clone, Copy)]
pub struct Archive {
    /// The size when unpacked, in bytes.
    pub bytes: usize,
    /// The LZMA file.
    pub packed: &'static [u8],
}

/// A module compiled for one architecture.
#[derive(Debug, Clone, Copy)]
pub struct Image {
    /// The name of the module.
    pub module: &'static str,
    /// `ptx`, or the architecture of the machine code: `sm_80`, `sm_90a`.
    pub kind: &'static str,
    /// Whether its kernels wait for the kernel in front of them themselves (`griddepcontrol.wait`),
    /// and so may be launched before that has ended.
    pub starts_early: bool,
    /// The number of its archive.
    pub archive: usize,
    /// Its offset in the unpacked archive, in bytes.
    pub at: usize,
    /// Its size there, in bytes. PTX has relative numbers there ([`relative_ptx`]).
    pub bytes: usize,
}

/// The index of what ships.
pub static INDEX: Index = include!("../images/index.rs");
