//! The list of CUDA modules that ship inside the crate.
//!
//! `cargo xtask cuda build` compiles each from `kernels/` into `ptx/`, and compiles this very file to learn what there is: it may name
//! nothing but `core`.

/// One module: a source of `kernels/`, compiled with some macros defined.
#[derive(Debug, Clone, Copy)]
pub struct Module {
    /// What it is called, and its file in `ptx/`: letters, digits and `_`.
    pub name: &'static str,
    /// The file in `kernels/`.
    pub source: &'static str,
    /// Macros defined for it: name and value.
    pub defines: &'static [(&'static str, &'static str)],
    /// What it is compiled for: `compute_80` runs on everything from sm_80 on, `compute_90a` on Hopper only.
    pub architecture: &'static str,
    /// Whether a spill or local memory in any of its kernels is an error.
    pub hot: bool,
}

/// Everything that ships.
pub const MODULES: &[Module] =
    &[Module { name: "ceiling", source: "ceiling.cu", defines: &[], architecture: "compute_80", hot: false }];
