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
    /// What it is compiled for: `compute_80` runs on everything from sm_80 on, `compute_90` from Hopper on, `compute_90a` on Hopper only.
    pub architecture: &'static str,
    /// Whether a spill or local memory in any of its kernels, on any architecture, is an error. Of the others, `docs/perf/cuda.md` says what they spill.
    pub hot: bool,
}

/// A module of the decode family: type, head dims, rows a tile; `plain` or `general`, and the architecture.
macro_rules! decode {
    ($($type:literal $type_name:literal $dk:literal $dv:literal $rows:literal $kind:ident $architecture:literal $suffix:literal $hot:literal;)*) => {
        &[$(Module {
            name: concat!("decode_", $type_name, "_", $dk, "_", $dv, "_r", $rows, "_", stringify!($kind), $suffix),
            source: "decode.cu",
            defines: &[
                ("ELEMENT_TYPE", $type),
                ("HEAD_DIM", $dk),
                ("VALUE_DIM", $dv),
                ("ROWS", $rows),
                ("GENERAL", decode!(@general $kind)),
                ("MOST_THREADS", "256"),
            ],
            architecture: $architecture,
            hot: $hot,
        }),*]
    };
    (@general plain) => { "0" };
    (@general general) => { "1" };
}

/// All of it for one 16-bit type. Plain kernels, for the head dims that models have, come in two builds: the one for Hopper and later can start
/// before the kernel in front of it has ended.
macro_rules! sixteen_bit {
    ($type:literal $name:literal) => {
        decode! {
            $type $name "64" "64" "8" plain "compute_90" "_sm90" true;
            $type $name "64" "64" "32" plain "compute_90" "_sm90" false;
            $type $name "64" "64" "64" plain "compute_90" "_sm90" false;
            $type $name "128" "128" "8" plain "compute_90" "_sm90" false;
            $type $name "128" "128" "32" plain "compute_90" "_sm90" false;
            $type $name "128" "128" "64" plain "compute_90" "_sm90" false;
            $type $name "256" "256" "8" plain "compute_90" "_sm90" false;
            $type $name "256" "256" "32" plain "compute_90" "_sm90" false;
            $type $name "512" "512" "8" plain "compute_90" "_sm90" false;
            $type $name "576" "512" "32" plain "compute_90" "_sm90" false;
            $type $name "64" "64" "8" plain "compute_80" "" true;
            $type $name "64" "64" "32" plain "compute_80" "" false;
            $type $name "64" "64" "64" plain "compute_80" "" false;
            $type $name "128" "128" "8" plain "compute_80" "" false;
            $type $name "128" "128" "32" plain "compute_80" "" false;
            $type $name "128" "128" "64" plain "compute_80" "" false;
            $type $name "256" "256" "8" plain "compute_80" "" false;
            $type $name "256" "256" "32" plain "compute_80" "" false;
            $type $name "64" "64" "8" general "compute_80" "" true;
            $type $name "64" "64" "32" general "compute_80" "" false;
            $type $name "64" "64" "64" general "compute_80" "" false;
            $type $name "96" "96" "8" general "compute_80" "" false;
            $type $name "96" "96" "64" general "compute_80" "" false;
            $type $name "128" "128" "8" general "compute_80" "" false;
            $type $name "128" "128" "32" general "compute_80" "" false;
            $type $name "128" "128" "64" general "compute_80" "" false;
            $type $name "192" "128" "8" general "compute_80" "" false;
            $type $name "192" "128" "64" general "compute_80" "" false;
            $type $name "256" "256" "8" general "compute_80" "" false;
            $type $name "256" "256" "32" general "compute_80" "" false;
            $type $name "512" "512" "8" general "compute_80" "" false;
            $type $name "512" "512" "32" general "compute_80" "" false;
            $type $name "576" "512" "8" general "compute_80" "" false;
            $type $name "576" "512" "32" general "compute_80" "" false;
            $type $name "576" "576" "8" general "compute_80" "" false;
            $type $name "576" "576" "32" general "compute_80" "" false;
        }
    };
}

const F16: &[Module] = sixteen_bit!("0" "f16");
const BF16: &[Module] = sixteen_bit!("1" "bf16");
const F32: &[Module] = decode! {
    "2" "f32" "64" "64" "8" general "compute_80" "" true;
    "2" "f32" "64" "64" "32" general "compute_80" "" false;
    "2" "f32" "128" "128" "8" general "compute_80" "" true;
    "2" "f32" "128" "128" "32" general "compute_80" "" false;
    "2" "f32" "256" "256" "8" general "compute_80" "" false;
    "2" "f32" "256" "256" "32" general "compute_80" "" false;
    "2" "f32" "576" "576" "8" general "compute_80" "" false;
    "2" "f32" "576" "576" "32" general "compute_80" "" false;
};

const fn plain(name: &'static str, source: &'static str) -> Module {
    Module { name, source, defines: &[], architecture: "compute_80", hot: false }
}

const OTHERS: &[Module] =
    &[plain("append", "append.cu"), plain("merge", "merge.cu"), plain("ceiling", "ceiling.cu")];

const COUNT: usize = F16.len() + BF16.len() + F32.len() + OTHERS.len();

const fn all() -> [Module; COUNT] {
    let lists = [F16, BF16, F32, OTHERS];
    let mut all = [OTHERS[0]; COUNT];
    let (mut list, mut at) = (0, 0);
    while list < lists.len() {
        let mut i = 0;
        while i < lists[list].len() {
            all[at] = lists[list][i];
            i += 1;
            at += 1;
        }
        list += 1;
    }
    all
}

/// Everything that ships.
pub const MODULES: &[Module] = &all();
