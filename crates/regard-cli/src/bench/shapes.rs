//! The shapes to measure: named shapes, shapes in words, and variants of either.

use crate::models::{self, Model, Workload};
use crate::shape;
use regard::{DType, Error, Problem};
use regard_cases::Granularity;
use std::time::Duration;

/// A shape with a name, in the words of `--shape`.
pub struct Named {
    /// Its name, the same in every result file.
    pub name: &'static str,
    /// Its words.
    pub words: &'static str,
    /// The groups that stand for it too.
    group: &'static str,
    /// Whether its operands stay in the caches between runs.
    warm: bool,
    /// The bounds that it is planned for, if not its own lengths.
    bounds: Option<Bounds>,
    /// Pause of the caller before each run.
    pause: Duration,
}

/// Upper bounds that a plan is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bounds {
    /// Sequences.
    pub batch: usize,
    /// Keys of a sequence.
    pub kv_len: usize,
}

const fn named(name: &'static str, group: &'static str, words: &'static str) -> Named {
    Named { name, words, group, warm: false, bounds: None, pause: Duration::ZERO }
}

/// Under a plan for larger bounds.
const fn planned_for(batch: usize, kv_len: usize, named: Named) -> Named {
    Named { bounds: Some(Bounds { batch, kv_len }), ..named }
}

/// Every named shape.
pub const NAMED: [Named; 17] = [
    named("p2048", "prefill", "hq=32 hkv=8 d=128 lq=2048 causal"),
    named("p512", "prefill", "hq=32 hkv=8 d=128 lq=512 causal"),
    named("p1024d64", "prefill", "hq=9 hkv=3 d=64 lq=1024 causal"),
    named("enc512", "prefill", "hq=12 d=64 lq=512"),
    named("p1024d256", "prefill", "hq=16 hkv=8 d=256 lq=1024 causal"),
    named("d4k", "decode", "hq=32 hkv=8 d=128 lq=1 lk=4096"),
    named("d32k", "decode", "hq=32 hkv=8 d=128 lq=1 lk=32768"),
    named("d4kb8", "decode", "b=8 hq=32 hkv=8 d=128 lq=1 lk=4096"),
    named("d2kd64", "decode", "hq=9 hkv=3 d=64 lq=1 lk=2048"),
    named("mla16-d4k", "mla", "hq=16 hkv=1 d=576 dv=512 lq=1 lk=4096 latent"),
    named("v8", "verify", "hq=32 hkv=8 d=128 lq=8 lk=4096 causal"),
    named("d8k", "bounds", "hq=32 hkv=8 d=128 lq=1 lk=8192"),
    planned_for(8, 8192, named("d8k-of-b8", "bounds", "hq=32 hkv=8 d=128 lq=1 lk=8192")),
    planned_for(1, 131_072, named("d4k-of-128k", "bounds", "hq=32 hkv=8 d=128 lq=1 lk=4096")),
    Named {
        pause: Duration::from_millis(1),
        ..named("d2kd64-idle", "latency", "hq=9 hkv=3 d=64 lq=1 lk=2048")
    },
    Named {
        warm: true,
        pause: Duration::from_millis(1),
        ..named("tiny-idle", "latency", "hq=9 hkv=3 d=64 lq=1 lk=64")
    },
    Named { warm: true, ..named("tiny", "latency", "hq=9 hkv=3 d=64 lq=1 lk=64") },
];

/// Every shape named for GPUs: the shapes of [`NAMED`], without the shapes that are only small on a
/// GPU, and more.
#[cfg(feature = "cuda")]
pub const NAMED_CUDA: [Named; 86] = [
    named("d4k", "decode", "hq=32 hkv=8 d=128 lq=1 lk=4096"),
    named("d32k", "decode", "hq=32 hkv=8 d=128 lq=1 lk=32768"),
    named("d128k", "decode", "hq=32 hkv=8 d=128 lq=1 lk=131072"),
    named("d4kb8", "decode", "b=8 hq=32 hkv=8 d=128 lq=1 lk=4096"),
    named("d8kb64", "decode", "b=64 hq=32 hkv=8 d=128 lq=1 lk=8192"),
    named("d1kb128", "decode", "b=128 hq=32 hkv=8 d=128 lq=1 lk=1024"),
    named("d2kb128h64", "decode", "b=128 hq=64 hkv=8 d=128 lq=1 lk=2048"),
    named("d64kkv4", "decode", "hq=32 hkv=4 d=128 lq=1 lk=65536"),
    named("d32kh64", "decode", "hq=64 hkv=8 d=128 lq=1 lk=32768"),
    named("d16kmha", "decode", "hq=32 d=128 lq=1 lk=16384"),
    named("d16kb16d64", "decode", "b=16 hq=32 hkv=4 d=64 lq=1 lk=16384"),
    named("d16kb8d256", "decode", "b=8 hq=16 hkv=8 d=256 lq=1 lk=16384"),
    named("d16kb8d512", "decode", "b=8 hq=8 hkv=4 d=512 lq=1 lk=16384"),
    named("d16kb8mla", "decode", "b=8 hq=16 hkv=1 d=576 dv=512 lq=1 lk=16384 latent"),
    named("d2kd64", "decode", "hq=9 hkv=3 d=64 lq=1 lk=2048"),
    named("d4k-e4m3", "cache", "hq=32 hkv=8 d=128 lq=1 lk=4096 dtype=bf16 kv=e4m3"),
    named("d32k-e4m3", "cache", "hq=32 hkv=8 d=128 lq=1 lk=32768 dtype=bf16 kv=e4m3"),
    named("d128k-e4m3", "cache", "hq=32 hkv=8 d=128 lq=1 lk=131072 dtype=bf16 kv=e4m3"),
    named("d8kb64-e4m3", "cache", "b=64 hq=32 hkv=8 d=128 lq=1 lk=8192 dtype=bf16 kv=e4m3"),
    named("d2kb128h64-e4m3", "cache", "b=128 hq=64 hkv=8 d=128 lq=1 lk=2048 dtype=bf16 kv=e4m3"),
    named("d64kkv4-e4m3", "cache", "hq=32 hkv=4 d=128 lq=1 lk=65536 dtype=bf16 kv=e4m3"),
    named("d32k-i8", "cache", "hq=32 hkv=8 d=128 lq=1 lk=32768 dtype=bf16 kv=i8 scale=token-head"),
    named("d8kb64-q8_0", "cache", "b=64 hq=32 hkv=8 d=128 lq=1 lk=8192 dtype=bf16 kv=q8_0"),
    named("d8kb64-q4_0", "cache", "b=64 hq=32 hkv=8 d=128 lq=1 lk=8192 dtype=bf16 kv=q4_0"),
    named("v8d32k-e4m3", "cache", "hq=32 hkv=8 d=128 lq=8 lk=32768 causal dtype=bf16 kv=e4m3"),
    named("mla16-d16k", "mla", "hq=16 hkv=1 d=576 dv=512 lq=1 lk=16384 latent page=64"),
    named("mla16-d16kb8", "mla", "b=8 hq=16 hkv=1 d=576 dv=512 lq=1 lk=16384 latent page=64"),
    named("mla16-d4kb64", "mla", "b=64 hq=16 hkv=1 d=576 dv=512 lq=1 lk=4096 latent page=64"),
    named("mla64-d16kb8", "mla", "b=8 hq=64 hkv=1 d=576 dv=512 lq=1 lk=16384 latent page=64"),
    named("mla128-d16kb8", "mla", "b=8 hq=128 hkv=1 d=576 dv=512 lq=1 lk=16384 latent page=64"),
    named("mla128-d4kb128", "mla", "b=128 hq=128 hkv=1 d=576 dv=512 lq=1 lk=4096 latent page=64"),
    named(
        "mla128-v2d4kb128",
        "mla",
        "b=128 hq=128 hkv=1 d=576 dv=512 lq=2 lk=4096 latent causal page=64",
    ),
    named(
        "s16b8",
        "selected",
        "b=8 hq=16 hkv=1 d=576 dv=512 lq=1 lk=65536 latent page=64 slots list=2048",
    ),
    named(
        "s64b8",
        "selected",
        "b=8 hq=64 hkv=1 d=576 dv=512 lq=1 lk=65536 latent page=64 slots list=2048",
    ),
    named(
        "s128b8",
        "selected",
        "b=8 hq=128 hkv=1 d=576 dv=512 lq=1 lk=65536 latent page=64 slots list=2048",
    ),
    named(
        "s64b128",
        "selected",
        "b=128 hq=64 hkv=1 d=576 dv=512 lq=1 lk=4096 latent page=64 slots list=2048",
    ),
    named(
        "s128b128",
        "selected",
        "b=128 hq=128 hkv=1 d=576 dv=512 lq=1 lk=4096 latent page=64 slots list=2048",
    ),
    named(
        "s128b128v2",
        "selected",
        "b=128 hq=128 hkv=1 d=576 dv=512 lq=2 lk=4096 latent page=64 slots list=2048",
    ),
    named(
        "s64p4k",
        "selected",
        "hq=64 hkv=1 d=576 dv=512 lq=4096 lk=32768 latent page=64 slots list=2048",
    ),
    named(
        "s128p4k",
        "selected",
        "hq=128 hkv=1 d=576 dv=512 lq=4096 lk=32768 latent page=64 slots list=2048",
    ),
    named(
        "s128kpages",
        "selected",
        "hq=32 hkv=8 d=128 lq=1 lk=131072 page=64 list=16384 list-pages list-heads",
    ),
    named("x8kb64", "prefix", "b=64 hq=32 hkv=8 d=128 lq=1 lk=8704 page=16 groups=1 shared=8192"),
    named("x4kb16", "prefix", "b=16 hq=32 hkv=8 d=128 lq=1 lk=4608 page=16 groups=1 shared=4096"),
    named("x2kb256", "prefix", "b=256 hq=32 hkv=8 d=128 lq=1 lk=2304 page=16 groups=1 shared=2048"),
    named("x512b64", "prefix", "b=64 hq=32 hkv=8 d=128 lq=1 lk=1024 page=16 groups=1 shared=512"),
    named("x0b64", "prefix", "b=64 hq=32 hkv=8 d=128 lq=1 lk=4096 page=16 groups=64 shared=0"),
    named("d128kmixed", "mixed", "b=64 hq=32 hkv=8 d=128 lq=1 lk=131072 page=16"),
    named("p2kmixed", "mixed", "b=64 hq=32 hkv=8 d=128 lq=2048 lk=4096 page=16 ragged causal"),
    named("v8", "verify", "hq=32 hkv=8 d=128 lq=8 lk=4096 causal"),
    named("v8d32k", "verify", "hq=32 hkv=8 d=128 lq=8 lk=32768 causal"),
    named("v8b8", "verify", "b=8 hq=32 hkv=8 d=128 lq=8 lk=4096 causal"),
    named("v8b64", "verify", "b=64 hq=32 hkv=8 d=128 lq=8 lk=8192 causal"),
    Named { warm: true, ..named("tiny", "latency", "hq=9 hkv=3 d=64 lq=1 lk=64") },
    named("p2048", "small", "hq=32 hkv=8 d=128 lq=2048 causal"),
    named("p512", "small", "hq=32 hkv=8 d=128 lq=512 causal"),
    named("p1024d64", "small", "hq=9 hkv=3 d=64 lq=1024 causal"),
    named("enc512", "small", "hq=12 d=64 lq=512"),
    named("p1024d256", "small", "hq=16 hkv=8 d=256 lq=1024 causal"),
    named("p512b32d64", "prefill", "b=32 hq=32 hkv=8 d=64 lq=512 causal"),
    named("f512b32d64", "prefill", "b=32 hq=32 hkv=8 d=64 lq=512"),
    named("p2048b8d64", "prefill", "b=8 hq=32 hkv=8 d=64 lq=2048 causal"),
    named("f2048b8d64", "prefill", "b=8 hq=32 hkv=8 d=64 lq=2048"),
    named("p8192b2d64", "prefill", "b=2 hq=32 hkv=8 d=64 lq=8192 causal"),
    named("f8192b2d64", "prefill", "b=2 hq=32 hkv=8 d=64 lq=8192"),
    named("p16kd64", "prefill", "hq=32 hkv=8 d=64 lq=16384 causal"),
    named("f16kd64", "prefill", "hq=32 hkv=8 d=64 lq=16384"),
    named("p512b32", "prefill", "b=32 hq=32 hkv=8 d=128 lq=512 causal"),
    named("f512b32", "prefill", "b=32 hq=32 hkv=8 d=128 lq=512"),
    named("p2048b8", "prefill", "b=8 hq=32 hkv=8 d=128 lq=2048 causal"),
    named("f2048b8", "prefill", "b=8 hq=32 hkv=8 d=128 lq=2048"),
    named("p8192b2", "prefill", "b=2 hq=32 hkv=8 d=128 lq=8192 causal"),
    named("f8192b2", "prefill", "b=2 hq=32 hkv=8 d=128 lq=8192"),
    named("p16k", "prefill", "hq=32 hkv=8 d=128 lq=16384 causal"),
    named("f16k", "prefill", "hq=32 hkv=8 d=128 lq=16384"),
    named("p512b32d256", "prefill", "b=32 hq=16 hkv=8 d=256 lq=512 causal"),
    named("f512b32d256", "prefill", "b=32 hq=16 hkv=8 d=256 lq=512"),
    named("p2048b8d256", "prefill", "b=8 hq=16 hkv=8 d=256 lq=2048 causal"),
    named("f2048b8d256", "prefill", "b=8 hq=16 hkv=8 d=256 lq=2048"),
    named("p8192b2d256", "prefill", "b=2 hq=16 hkv=8 d=256 lq=8192 causal"),
    named("f8192b2d256", "prefill", "b=2 hq=16 hkv=8 d=256 lq=8192"),
    named("p16kd256", "prefill", "hq=16 hkv=8 d=256 lq=16384 causal"),
    named("f16kd256", "prefill", "hq=16 hkv=8 d=256 lq=16384"),
    named("p2048b8d512", "prefill", "b=8 hq=8 hkv=4 d=512 lq=2048 causal"),
    named("f2048b8d512", "prefill", "b=8 hq=8 hkv=4 d=512 lq=2048"),
    named("p8192b2d512", "prefill", "b=2 hq=8 hkv=4 d=512 lq=8192 causal"),
    named("f8192b2d512", "prefill", "b=2 hq=8 hkv=4 d=512 lq=8192"),
];

/// The shape whose first sequence is as long as in its words, and whose others have this many
/// keys.
#[cfg(feature = "cuda")]
pub const MIXED: (&str, usize) = ("d128kmixed", 1024);

/// The shape of which one sequence in this many brings as many query tokens as in its words; the
/// others bring one.
const MIXED_PREFILL: (&str, usize) = ("p2kmixed", 16);

/// Total bytes of the copies of keys and values that a run rotates over: more than any cache holds.
pub const ROTATED_BYTES: u64 = 400_000_000;

/// Maximum copies: tiny operands would need too many.
const MAX_COPIES: usize = 1 << 14;

/// Up to this many query tokens per sequence, operands rotate: an engine that decodes finds no
/// layer's cache where it left it.
const ROTATED_TOKENS: usize = 16;

/// The order of dimensions in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `[batch, sequence, head, dim]`; pages are `[slot, head, dim]`.
    TokenMajor,
    /// `[batch, head, sequence, dim]`; pages are `[head, slot, dim]`.
    HeadMajor,
}

/// One thing to measure.
#[derive(Debug, Clone, PartialEq)]
pub struct Target {
    /// Its name in results: the shape's name and the variant.
    pub name: String,
    /// Its name without its variant.
    pub base: String,
    /// The length if it is one of a series over lengths.
    pub length: Option<usize>,
    /// Its problem.
    pub problem: Problem,
    /// The group of codes that share a scale.
    pub granularity: Granularity,
    /// Keys that the sequences of each prefix group share.
    pub shared: usize,
    /// Its memory order.
    pub layout: Layout,
    /// Whether operands stay in the caches between runs.
    pub warm: bool,
    /// The bounds that it is planned for, if not its own lengths. Only on CPUs.
    pub bounds: Option<Bounds>,
    /// Pause of the caller before each run. Only on CPUs.
    pub pause: Duration,
    /// One sequence in this many has all query tokens of the problem, the others have one.
    pub prompt_every: Option<usize>,
    /// The scale of scores, if it is not 1/sqrt(head dim).
    pub scale: Option<f32>,
    /// The cap of scores, if the problem has one.
    pub softcap: f32,
    /// The layers of a model that it stands for.
    pub layers: Option<Layers>,
}

/// The layers of a model that a target stands for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layers {
    /// The model's name.
    pub model: &'static str,
    /// The name of the workload.
    pub workload: &'static str,
    /// Number of the model's layers of this kind.
    pub count: usize,
}

/// The cap of scores if a shape's words ask for one.
const SOFTCAP: f32 = 50.0;

/// The shapes that the command line selects.
pub struct Wish<'a> {
    /// The shapes that have names.
    pub named: &'static [Named],
    /// Names of shapes and groups.
    pub names: &'a [String],
    /// Shapes in words.
    pub shapes: &'a [String],
    /// Variants, each in words or `plain`; none is `plain`.
    pub variants: &'a [String],
    /// Types of operands; none is all three types, or the type in a shape's own words.
    pub dtypes: &'a [DType],
    /// Memory orders; none is token-major.
    pub layouts: &'a [Layout],
    /// Lengths to run every shape at, instead of its own.
    pub lengths: &'a [usize],
    /// Whether operands stay in the caches between runs.
    pub warm: bool,
}

impl Wish<'_> {
    /// All targets of the wish: shape by shape, each with its variants, lengths, memory orders and
    /// types.
    ///
    /// # Errors
    /// If a name or a word is not known; the message names it and the allowed ones.
    pub fn targets(&self) -> Result<Vec<Target>, Error> {
        let mut shapes: Vec<Shape> = Vec::new();
        for name in self.names {
            let named = self.named.iter();
            let found =
                named.filter(|named| *name == named.name || *name == named.group || name == "all");
            let before = shapes.len();
            shapes.extend(found.map(Shape::named));
            if shapes.len() == before {
                let mut allowed: Vec<_> = self.named.iter().map(|named| named.name).collect();
                let mut groups: Vec<_> = self.named.iter().map(|named| named.group).collect();
                groups.dedup();
                allowed.extend(groups.into_iter().chain(["all"]));
                return Err(Error::argument("shape", format!("\"{name}\""), allowed.join(", ")));
            }
        }
        for words in self.shapes {
            let name: Vec<_> =
                words.split_whitespace().filter(|word| !word.starts_with("dtype=")).collect();
            shapes.push(Shape::new(name.join(" "), words.clone()));
        }
        if self.names.is_empty() && self.shapes.is_empty() {
            shapes.extend(self.named.iter().map(Shape::named));
        }
        self.varied(&shapes)
    }

    /// Every kind of layer of each model in each workload, varied like shapes.
    ///
    /// # Errors
    /// If a variant's word is not known.
    pub fn model_targets(
        &self,
        models: &[&'static Model],
        workloads: &[&'static Workload],
    ) -> Result<Vec<Target>, Error> {
        let mut shapes = Vec::new();
        for model in models {
            for workload in workloads {
                for layer in model.layers {
                    let name = format!("{} {} {}", model.name, workload.name, layer.kind);
                    shapes.push(Shape {
                        prompt_every: workload.prompt_every,
                        scale: layer.scale,
                        softcap: layer.softcap.unwrap_or(SOFTCAP),
                        layers: Some(Layers {
                            model: model.name,
                            workload: workload.name,
                            count: layer.count,
                        }),
                        ..Shape::new(name, layer.words(workload))
                    });
                }
            }
        }
        self.varied(&shapes)
    }

    /// Each shape with its variants, memory orders, lengths and types.
    fn varied(&self, shapes: &[Shape]) -> Result<Vec<Target>, Error> {
        let plain = ["plain".to_string()];
        let variants = if self.variants.is_empty() { &plain } else { self.variants };
        let layouts =
            if self.layouts.is_empty() { &[Layout::TokenMajor][..] } else { self.layouts };
        let lengths: Vec<_> = match self.lengths {
            [] => vec![None],
            lengths => lengths.iter().copied().map(Some).collect(),
        };
        let mut targets = Vec::new();
        for shape in shapes {
            let shape = Shape { warm: shape.warm || self.warm, ..shape.clone() };
            for variant in variants {
                for layout in layouts {
                    for length in &lengths {
                        shape.targets(variant, *layout, *length, self.dtypes, &mut targets)?;
                    }
                }
            }
        }
        Ok(targets)
    }
}

/// A shape before it is varied.
#[derive(Clone)]
struct Shape {
    name: String,
    words: String,
    warm: bool,
    bounds: Option<Bounds>,
    pause: Duration,
    prompt_every: Option<usize>,
    scale: Option<f32>,
    softcap: f32,
    layers: Option<Layers>,
}

impl Shape {
    fn new(name: String, words: String) -> Shape {
        Shape {
            name,
            words,
            warm: false,
            bounds: None,
            pause: Duration::ZERO,
            prompt_every: None,
            scale: None,
            softcap: SOFTCAP,
            layers: None,
        }
    }

    fn named(named: &Named) -> Shape {
        Shape {
            warm: named.warm,
            bounds: named.bounds,
            pause: named.pause,
            prompt_every: (named.name == MIXED_PREFILL.0).then_some(MIXED_PREFILL.1),
            ..Shape::new(named.name.into(), named.words.into())
        }
    }

    fn targets(
        &self,
        variant: &str,
        layout: Layout,
        length: Option<usize>,
        dtypes: &[DType],
        targets: &mut Vec<Target>,
    ) -> Result<(), Error> {
        let mut words = self.words.clone();
        let mut name = self.name.clone();
        if variant != "plain" {
            words = replace(&words, variant);
            name = format!("{name} {}", variant.split_whitespace().collect::<Vec<_>>().join(" "));
        }
        if layout == Layout::HeadMajor {
            name += " head-major";
        }
        if let Some(length) = length {
            let problem = shape::parse(&words)?;
            let square = problem.query_len == problem.kv_len;
            words = replace(&words, &format!("lk={length}"));
            if square {
                words = replace(&words, &format!("lq={length}"));
            }
            name = format!("{name} at {length}");
        }
        let own = words.split_whitespace().find(|word| word.starts_with("dtype="));
        let dtypes = match (dtypes, own) {
            ([], Some(_)) => vec![shape::parse(&words)?.dtype],
            ([], None) => vec![DType::F32, DType::BF16, DType::F16],
            (dtypes, _) => dtypes.to_vec(),
        };
        for dtype in dtypes {
            let described = shape::describe(&replace(&words, &format!("dtype={dtype}")))?;
            let problem = described.problem;
            if problem.batch == 0 || problem.query_len == 0 || problem.kv_len == 0 {
                return Err(Error::argument(
                    "shape",
                    format!("\"{words}\""),
                    "one sequence, query and key at least",
                ));
            }
            targets.push(Target {
                name: name.clone(),
                base: self.name.clone(),
                length,
                problem: models::mixed(problem, self.prompt_every),
                granularity: described.granularity,
                shared: described.shared,
                layout,
                warm: self.warm,
                bounds: self.bounds,
                pause: self.pause,
                prompt_every: self.prompt_every,
                scale: self.scale,
                softcap: self.softcap,
                layers: self.layers,
            });
        }
        Ok(())
    }
}

impl Target {
    /// Whether runs rotate over copies of keys and values.
    pub fn rotates(&self) -> bool {
        !self.warm && self.problem.query_len <= ROTATED_TOKENS
    }

    /// The problem that it is planned for.
    pub fn planned(&self, problem: Problem) -> Problem {
        match self.bounds {
            Some(bounds) => Problem {
                batch: problem.batch.max(bounds.batch),
                kv_len: problem.kv_len.max(bounds.kv_len),
                ..problem
            },
            None => problem,
        }
    }

    /// The number of copies of `kv_bytes` bytes each.
    pub fn copies(&self, kv_bytes: u64) -> usize {
        if !self.rotates() {
            return 1;
        }
        usize::try_from(ROTATED_BYTES.div_ceil(kv_bytes.max(1))).unwrap_or(1).clamp(1, MAX_COPIES)
    }
}

/// The words. `others` replace words with the same keys.
fn replace(words: &str, others: &str) -> String {
    let key = |word: &str| word.split_once('=').map_or(word, |(key, _)| key).to_string();
    let replaced: Vec<_> = others.split_whitespace().map(key).collect();
    let kept = words.split_whitespace().filter(|word| !replaced.contains(&key(word)));
    kept.chain(others.split_whitespace()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use regard::KvStorage;

    const NOTHING: Wish = Wish {
        named: &NAMED,
        names: &[],
        shapes: &[],
        variants: &[],
        dtypes: &[],
        layouts: &[],
        lengths: &[],
        warm: false,
    };

    #[test]
    fn every_named_shape_is_one() {
        let targets = NOTHING.targets().unwrap();
        assert_eq!(targets.len(), 3 * NAMED.len());
        let decode = targets.iter().find(|target| target.name == "d4kb8").unwrap();
        assert_eq!(
            (decode.problem.batch, decode.problem.query_heads, decode.problem.kv_len),
            (8, 32, 4096)
        );
        assert_eq!(decode.copies(268_435_456), 2);
        assert_eq!(targets[0].copies(16_777_216), 1, "prefill does not rotate");
        assert!(targets.last().unwrap().warm);
    }

    #[test]
    fn variants_lengths_and_types_multiply() {
        let wish = Wish {
            names: &["p512".into(), "d4k".into()],
            variants: &["plain".into(), "softcap  page=16".into()],
            dtypes: &[DType::F16],
            layouts: &[Layout::TokenMajor, Layout::HeadMajor],
            lengths: &[64, 128],
            ..NOTHING
        };
        let targets = wish.targets().unwrap();
        assert_eq!(targets.len(), 2 * 2 * 2 * 2);
        assert_eq!(targets[0].name, "p512 at 64");
        assert_eq!((targets[0].problem.query_len, targets[0].problem.kv_len), (64, 64));
        let last = targets.last().unwrap();
        assert_eq!(last.name, "d4k softcap page=16 head-major at 128");
        assert_eq!(
            (last.base.as_str(), last.problem.query_len, last.problem.kv_len),
            ("d4k", 1, 128)
        );
        assert_eq!(last.problem.keys, KvStorage::Paged { block_size: 16 });
    }

    #[test]
    fn a_shape_in_words_keeps_its_type_unless_told() {
        let shapes = ["hq=2 d=8 lq=4 dtype=bf16 causal".to_string()];
        let targets = Wish { shapes: &shapes, ..NOTHING }.targets().unwrap();
        assert_eq!((targets.len(), targets[0].problem.dtype), (1, DType::BF16));
        assert_eq!(targets[0].name, "hq=2 d=8 lq=4 causal");
        let targets = Wish { shapes: &shapes, dtypes: &[DType::F32], ..NOTHING }.targets().unwrap();
        assert_eq!((targets.len(), targets[0].problem.dtype), (1, DType::F32));
    }

    #[test]
    fn a_mistake_is_named() {
        let names = ["p99".to_string()];
        let error = Wish { names: &names, ..NOTHING }.targets().unwrap_err().to_string();
        assert!(error.starts_with("`shape` is \"p99\"; allowed: p2048, p512"), "{error}");
        let variants = ["soft".to_string()];
        let error = Wish { variants: &variants, ..NOTHING }.targets().unwrap_err().to_string();
        assert!(error.starts_with("`shape key` is \"soft\""), "{error}");
        let shapes = ["hq=2 d=8 lq=0".to_string()];
        assert!(Wish { shapes: &shapes, ..NOTHING }.targets().is_err());
    }
}
