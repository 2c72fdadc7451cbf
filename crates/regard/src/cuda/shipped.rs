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

impl Module {
    /// The number that a macro is defined as.
    pub fn number(&self, name: &str) -> Option<usize> {
        self.defines.iter().find(|(defined, _)| *defined == name).and_then(|(_, value)| value.parse().ok())
    }
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

/// Modules of a prefill kernel. A line: type, head dims, `plain` (scores are dot products times the scale) or `general`, then the shape of a thread
/// block, which the kernel has from here and the host too: query tokens and keys a tile, threads, dynamic shared memory, blocks a multiprocessor.
macro_rules! prefill {
    ($source:literal $architecture:literal $suffix:literal
     $($type:literal $type_name:literal $dk:literal $dv:literal $kind:ident $rows:literal $keys:literal $threads:literal $shared:literal $blocks:literal $hot:literal;)*) => {
        &[$(Module {
            name: concat!("prefill_", $type_name, "_", $dk, "_", $dv, "_", stringify!($kind), $suffix),
            source: $source,
            defines: &[
                ("ELEMENT_TYPE", $type),
                ("HEAD_DIM", $dk),
                ("VALUE_DIM", $dv),
                ("GENERAL", decode!(@general $kind)),
                ("TILE_ROWS", $rows),
                ("TILE_KEYS", $keys),
                ("THREADS", $threads),
                ("SHARED_BYTES", $shared),
                ("BLOCKS", $blocks),
            ],
            architecture: $architecture,
            hot: $hot,
        }),*]
    };
}

/// The Hopper kernel for one 16-bit type.
macro_rules! prefill_sm90 {
    ($type:literal $name:literal) => {
        prefill! {
            "prefill_sm90.cu" "compute_90a" "_sm90"
            $type $name "64" "64" plain "192" "128" "512" "173056" "1" false;
            $type $name "64" "64" general "128" "128" "384" "148480" "1" false;
            $type $name "96" "96" plain "128" "128" "384" "197632" "1" true;
            $type $name "96" "96" general "128" "128" "384" "197632" "1" false;
            $type $name "128" "128" plain "128" "128" "384" "197632" "1" true;
            $type $name "128" "128" general "128" "128" "384" "197632" "1" false;
            $type $name "192" "128" plain "128" "112" "384" "226304" "1" true;
            $type $name "192" "128" general "128" "112" "384" "226304" "1" false;
            $type $name "192" "192" general "128" "112" "384" "222208" "1" false;
            $type $name "256" "256" plain "128" "80" "384" "230400" "1" true;
            $type $name "256" "256" general "128" "80" "384" "230400" "1" false;
        }
    };
}

const PREFILL_SM90_F16: &[Module] = prefill_sm90!("0" "f16");
const PREFILL_SM90_BF16: &[Module] = prefill_sm90!("1" "bf16");
const PREFILL_SM80: &[Module] = &[];

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

const LISTS: [&[Module]; 7] = [F16, BF16, F32, PREFILL_SM90_F16, PREFILL_SM90_BF16, PREFILL_SM80, OTHERS];

const COUNT: usize = {
    let (mut count, mut list) = (0, 0);
    while list < LISTS.len() {
        count += LISTS[list].len();
        list += 1;
    }
    count
};

const fn all() -> [Module; COUNT] {
    let mut all = [OTHERS[0]; COUNT];
    let (mut list, mut at) = (0, 0);
    while list < LISTS.len() {
        let mut i = 0;
        while i < LISTS[list].len() {
            all[at] = LISTS[list][i];
            i += 1;
            at += 1;
        }
        list += 1;
    }
    all
}

/// Everything that ships.
pub const MODULES: &[Module] = &all();
