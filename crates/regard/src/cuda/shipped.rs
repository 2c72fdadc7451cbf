//! The list of CUDA modules that ship inside the crate.
//!
//! `cargo xtask cuda build` compiles each from `kernels/` into `images/`, and compiles this very file to learn what there is: it may name
//! nothing but `core`.

/// One module: a source of `kernels/`, compiled with some macros defined.
#[derive(Debug, Clone, Copy)]
pub struct Module {
    /// What it is called, and the file of its images but for the type: letters, digits and `_`.
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
        self.defines
            .iter()
            .find(|(defined, _)| *defined == name)
            .and_then(|(_, value)| value.parse().ok())
    }

    /// Whether a GPU of that compute capability (90 is 9.0) can run it.
    pub fn runs_on(&self, compute_capability: u32) -> bool {
        match self.architecture {
            "compute_90a" => compute_capability == 90,
            "compute_90" => compute_capability >= 90,
            _ => compute_capability >= 80,
        }
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

/// Modules of the prefill kernel for Hopper. A line: type, head dims, `plain` (scores are dot products times the scale, dims and the type of the output
/// as they stand here) or `general`; then the shape of a thread block, which the kernel has from here and the host too: query tokens and keys a tile,
/// threads, dynamic shared memory; and whether it must not spill. `short`: for fewer keys, or for causal rows of fewer keys, than the others are good at.
macro_rules! prefill_sm90 {
    ($($type:literal $type_name:literal $dk:literal $dv:literal $kind:ident $use:ident $rows:literal $keys:literal $threads:literal $shared:literal $hot:literal;)*) => {
        &[$(Module {
            name: concat!("prefill_", $type_name, "_", $dk, "_", $dv, "_", stringify!($kind), prefill_sm90!(@suffix $use)),
            source: "prefill_sm90.cu",
            defines: &[
                ("ELEMENT_TYPE", $type),
                ("HEAD_DIM", $dk),
                ("VALUE_DIM", $dv),
                ("GENERAL", decode!(@general $kind)),
                ("TILE_ROWS", $rows),
                ("TILE_KEYS", $keys),
                ("THREADS", $threads),
                ("SHARED_BYTES", $shared),
                ("BLOCKS", "1"),
                ("MOST_KEYS", prefill_sm90!(@most_keys $use)),
                ("CAUSAL", prefill_sm90!(@causal $use)),
            ],
            architecture: "compute_90a",
            hot: $hot,
        }),*]
    };
    (@suffix all) => { "_sm90" };
    (@suffix $short:ident) => { "_sm90_short" };
    (@most_keys all) => { "0" };
    (@most_keys $short:ident) => { "1024" };
    (@causal short_causal) => { "1" };
    (@causal $other:ident) => { "0" };
}

/// The same for large head dims: a cluster of two thread blocks has a tile.
macro_rules! prefill_sm90_wide {
    ($($type:literal $type_name:literal $dk:literal $dv:literal $kind:ident $shared:literal $hot:literal;)*) => {
        &[$(Module {
            name: concat!("prefill_", $type_name, "_", $dk, "_", $dv, "_", stringify!($kind), "_sm90_wide"),
            source: "prefill_sm90_wide.cu",
            defines: &[
                ("ELEMENT_TYPE", $type),
                ("HEAD_DIM", $dk),
                ("VALUE_DIM", $dv),
                ("GENERAL", decode!(@general $kind)),
                ("TILE_ROWS", "128"),
                ("TILE_KEYS", "128"),
                ("THREADS", "384"),
                ("SHARED_BYTES", $shared),
                ("BLOCKS", "1"),
                ("CLUSTER", "2"),
                ("BOX_KEYS", "32"),
            ],
            architecture: "compute_90a",
            hot: $hot,
        }),*]
    };
}

macro_rules! prefill_hopper {
    ($type:literal $name:literal) => {
        prefill_sm90! {
            $type $name "64" "64" plain short_causal "128" "128" "384" "148480" true;
            $type $name "64" "64" plain all "192" "128" "512" "173056" false;
            $type $name "96" "96" plain all "128" "128" "384" "197632" true;
            $type $name "128" "128" plain all "128" "128" "384" "197632" true;
            $type $name "192" "128" plain all "128" "112" "384" "226304" true;
            $type $name "256" "256" plain short "128" "64" "384" "197632" true;
            $type $name "256" "256" plain all "128" "80" "384" "230400" true;
            $type $name "64" "64" general all "128" "128" "384" "148480" false;
            $type $name "96" "96" general all "128" "128" "384" "197632" false;
            $type $name "128" "128" general all "128" "128" "384" "197632" false;
            $type $name "192" "128" general all "128" "112" "384" "226304" false;
            $type $name "192" "192" general all "128" "112" "384" "222208" false;
            $type $name "256" "256" general all "128" "80" "384" "230400" false;
        }
    };
}

macro_rules! prefill_hopper_wide {
    ($type:literal $name:literal) => {
        prefill_sm90_wide! {
            $type $name "512" "512" plain "231424" true;
            $type $name "576" "512" plain "223232" true;
            $type $name "512" "512" general "231424" false;
            $type $name "576" "512" general "223232" false;
        }
    };
}

const HOPPER_F16: &[Module] = prefill_hopper!("0" "f16");
const HOPPER_BF16: &[Module] = prefill_hopper!("1" "bf16");
const HOPPER_WIDE_F16: &[Module] = prefill_hopper_wide!("0" "f16");
const HOPPER_WIDE_BF16: &[Module] = prefill_hopper_wide!("1" "bf16");

/// Modules of the prefill kernel for every GPU. A line: type, head dims, `plain` or `general`, and a name for what fits into less shared memory; query
/// tokens and keys a tile; rows a warp and warps that share them; slots; threads, dynamic shared memory, blocks a multiprocessor.
macro_rules! prefill_sm80 {
    ($($type:literal $type_name:literal $dk:literal $dv:literal $kind:ident $suffix:literal $rows:literal $keys:literal $warp_rows:literal $value_warps:literal $slots:literal $threads:literal $shared:literal $blocks:literal;)*) => {
        &[$(Module {
            name: concat!("prefill_", $type_name, "_", $dk, "_", $dv, "_", stringify!($kind), "_sm80", $suffix),
            source: "prefill_sm80.cu",
            defines: &[
                ("ELEMENT_TYPE", $type),
                ("HEAD_DIM", $dk),
                ("VALUE_DIM", $dv),
                ("GENERAL", decode!(@general $kind)),
                ("TILE_ROWS", $rows),
                ("TILE_KEYS", $keys),
                ("WARP_ROWS", $warp_rows),
                ("VALUE_WARPS", $value_warps),
                ("SLOTS", $slots),
                ("THREADS", $threads),
                ("SHARED_BYTES", $shared),
                ("BLOCKS", $blocks),
            ],
            architecture: "compute_80",
            hot: false,
        }),*]
    };
}

/// All of it for one 16-bit type. Of equal head dims the first that fits into a block's shared memory is taken: a data centre's GPUs have 163 to 227
/// KiB, others 99.
macro_rules! prefill_sixteen_bit {
    ($type:literal $name:literal) => {
        prefill_sm80! {
            $type $name "64" "64" plain "" "128" "64" "32" "1" "4" "128" "50176" "2";
            $type $name "128" "128" plain "" "128" "64" "32" "1" "2" "128" "66560" "2";
            $type $name "256" "256" plain "" "128" "64" "32" "2" "4" "256" "215040" "1";
            $type $name "512" "512" plain "" "64" "64" "32" "4" "2" "256" "206848" "1";
            $type $name "64" "64" general "" "128" "64" "32" "1" "4" "128" "50176" "2";
            $type $name "96" "96" general "" "128" "64" "32" "1" "2" "128" "50176" "2";
            $type $name "128" "128" general "" "128" "64" "32" "1" "2" "128" "66560" "2";
            $type $name "192" "128" general "" "128" "64" "32" "2" "2" "256" "108544" "1";
            $type $name "256" "256" general "" "128" "64" "32" "2" "2" "256" "149504" "1";
            $type $name "256" "256" general "_small" "64" "32" "32" "2" "2" "128" "71168" "2";
            $type $name "512" "512" general "" "64" "64" "32" "4" "2" "256" "206848" "1";
            $type $name "512" "512" general "_small" "64" "32" "16" "2" "2" "256" "136704" "1";
            $type $name "576" "512" general "" "64" "32" "32" "4" "2" "256" "149504" "1";
            $type $name "576" "576" general "" "64" "16" "16" "2" "1" "256" "97792" "1";
        }
    };
}

const PREFILL_F16: &[Module] = prefill_sixteen_bit!("0" "f16");
const PREFILL_BF16: &[Module] = prefill_sixteen_bit!("1" "bf16");
const PREFILL_F32: &[Module] = prefill_sm80! {
    "2" "f32" "64" "64" general "" "64" "32" "16" "1" "2" "128" "33792" "2";
    "2" "f32" "128" "128" general "" "64" "32" "16" "1" "2" "128" "66560" "2";
    "2" "f32" "256" "256" general "" "32" "32" "16" "2" "2" "128" "103680" "2";
    "2" "f32" "576" "576" general "" "16" "16" "16" "2" "1" "64" "75904" "3";
};

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

const OTHERS: &[Module] = &[
    plain("append", "append.cu"),
    plain("merge", "merge.cu"),
    plain("ceiling", "ceiling.cu"),
    plain("mask_map", "mask_map.cu"),
];

const LISTS: [&[Module]; 11] = [
    F16,
    BF16,
    F32,
    HOPPER_F16,
    HOPPER_BF16,
    HOPPER_WIDE_F16,
    HOPPER_WIDE_BF16,
    PREFILL_F16,
    PREFILL_BF16,
    PREFILL_F32,
    OTHERS,
];

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
