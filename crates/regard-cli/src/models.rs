//! The attention layers of models by name, and the steps of an engine that they are run in.
//!
//! Every number is from the model's `config.json` on Hugging Face, whose repository is
//! [`Model::config`]. Comments name the config's fields if their names differ.

use crate::shape;
use regard::{Error, Problem, QueryStorage};

/// A model: its attention layers, by kind.
#[derive(Debug)]
pub struct Model {
    /// Its name on the command line and in results.
    pub name: &'static str,
    /// The repository whose `config.json` the numbers are from.
    pub config: &'static str,
    /// Its kinds of layers.
    pub layers: &'static [Layer],
}

/// Layers of one kind.
#[derive(Debug, Clone, Copy)]
pub struct Layer {
    /// `global`, `local` (a window), `chunked` or `mla`.
    pub kind: &'static str,
    /// Number of the model's layers of this kind.
    pub count: usize,
    /// Heads against the cache.
    pub heads: Heads,
    /// Heads of a prompt without a cache, if they differ: MLA expands the latent vectors into keys
    /// and values of each head.
    prompt_heads: Option<Heads>,
    /// `sliding_window`: keys that a query sees, the one at its own position included.
    window: Option<usize>,
    /// `attention_chunk_size`.
    chunk: Option<usize>,
    /// `attn_logit_softcapping`.
    pub softcap: Option<f32>,
    /// Whether heads have a sink logit.
    sinks: bool,
    /// The softmax scale, if it is not 1/sqrt(head dim).
    pub scale: Option<f32>,
}

/// Heads and head dims.
#[derive(Debug, Clone, Copy)]
pub struct Heads {
    /// `num_attention_heads`.
    query: usize,
    /// `num_key_value_heads`.
    kv: usize,
    /// `head_dim`, or `hidden_size / num_attention_heads` if a config has none.
    dim: usize,
    /// As `dim`, except for MLA.
    value_dim: usize,
}

/// `count` layers of plain causal attention.
const fn global(count: usize, query: usize, kv: usize, dim: usize) -> Layer {
    Layer {
        kind: "global",
        count,
        heads: Heads { query, kv, dim, value_dim: dim },
        prompt_heads: None,
        window: None,
        chunk: None,
        softcap: None,
        sinks: false,
        scale: None,
    }
}

/// The same layers, `count` of them, with a sliding window.
const fn local(count: usize, window: usize, like: Layer) -> Layer {
    Layer { kind: "local", count, window: Some(window), ..like }
}

/// DeepSeek's MLA: `kv_lora_rank` 512 and `qk_rope_head_dim` 64 in the cache; `qk_nope_head_dim`
/// 128 and `v_head_dim` 128 when expanded.
const fn mla(count: usize, query: usize, scale: f32) -> Layer {
    Layer {
        kind: "mla",
        heads: Heads { query, kv: 1, dim: 512 + 64, value_dim: 512 },
        prompt_heads: Some(Heads { query, kv: query, dim: 128 + 64, value_dim: 128 }),
        scale: Some(scale),
        ..global(count, query, 1, 0)
    }
}

/// Gemma 2 alternates windows and full attention, all capped at 50: `attn_logit_softcapping`.
const fn gemma_2(like: Layer) -> [Layer; 2] {
    let layer = Layer { softcap: Some(50.0), ..like };
    [local(layer.count, 4096, layer), layer]
}

/// gpt-oss: `layer_types` alternates windows of 128 and full attention; both have sinks. 64 query
/// heads.
const fn gpt_oss(count: usize) -> [Layer; 2] {
    let layer = Layer { sinks: true, ..global(count, 64, 8, 64) };
    [local(count, 128, layer), layer]
}

/// Llama 4: `no_rope_layers` repeats 1, 1, 1, 0. Layers with RoPE are chunked, the others see
/// everything.
const LLAMA_4: [Layer; 2] = {
    let layer = global(12, 40, 8, 128);
    [Layer { kind: "chunked", count: 36, chunk: Some(8192), ..layer }, layer]
};

/// 256^-0.5 is the default of its head dim: `query_pre_attn_scalar` 256.
const GEMMA_2_9B: [Layer; 2] = gemma_2(global(21, 16, 8, 256));

/// `query_pre_attn_scalar` 144, at head dim 128.
const GEMMA_2_27B: [Layer; 2] =
    gemma_2(Layer { scale: Some(1.0 / 12.0), ..global(23, 32, 16, 128) });

/// Gemma 3: every sixth layer is global (`sliding_window_pattern` 6). `query_pre_attn_scalar` 256.
const GEMMA_3_4B: [Layer; 2] = {
    let layer = global(5, 8, 4, 256);
    [local(29, 1024, layer), layer]
};

/// As the 4B model.
const GEMMA_3_12B: [Layer; 2] = {
    let layer = global(8, 16, 8, 256);
    [local(40, 1024, layer), layer]
};

/// `query_pre_attn_scalar` 168, at head dim 128.
const GEMMA_3_27B: [Layer; 2] = {
    let layer = Layer { scale: Some(0.077_151_67), ..global(10, 32, 16, 128) };
    [local(52, 1024, layer), layer]
};

/// Softmax scale of DeepSeek-V3: 192^-0.5 m^2 with m = 0.1 ln 40 + 1 (`rope_scaling`: `factor` 40,
/// `mscale_all_dim` 1).
const DEEPSEEK_V3_SCALE: f32 = 0.135_233_8;

/// Softmax scale of Kimi K2 (0905): the same with `factor` 64.
const KIMI_K2_SCALE: f32 = 0.144_679_6;

const fn model(name: &'static str, config: &'static str, layers: &'static [Layer]) -> Model {
    Model { name, config, layers }
}

/// Every model, family by family.
pub static MODELS: [Model; 25] = [
    model("llama-3.2-1b", "meta-llama/Llama-3.2-1B", &[global(16, 32, 8, 64)]),
    model("llama-3.1-8b", "meta-llama/Llama-3.1-8B", &[global(32, 32, 8, 128)]),
    model("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", &[global(80, 64, 8, 128)]),
    model("llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E", &LLAMA_4),
    model("qwen3-8b", "Qwen/Qwen3-8B", &[global(36, 32, 8, 128)]),
    model("qwen3-32b", "Qwen/Qwen3-32B", &[global(64, 64, 8, 128)]),
    model("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", &[global(48, 32, 4, 128)]),
    model("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", &[global(94, 64, 4, 128)]),
    model("gemma-2-9b", "google/gemma-2-9b", &GEMMA_2_9B),
    model("gemma-2-27b", "google/gemma-2-27b", &GEMMA_2_27B),
    model("gemma-3-4b", "google/gemma-3-4b-pt", &GEMMA_3_4B),
    model("gemma-3-12b", "google/gemma-3-12b-pt", &GEMMA_3_12B),
    model("gemma-3-27b", "google/gemma-3-27b-pt", &GEMMA_3_27B),
    model("gpt-oss-20b", "openai/gpt-oss-20b", &gpt_oss(12)),
    model("gpt-oss-120b", "openai/gpt-oss-120b", &gpt_oss(18)),
    model(
        "mistral-7b-v0.1",
        "mistralai/Mistral-7B-v0.1",
        &[local(32, 4096, global(32, 32, 8, 128))],
    ),
    model(
        "mistral-small-24b",
        "mistralai/Mistral-Small-24B-Instruct-2501",
        &[global(40, 32, 8, 128)],
    ),
    model("phi-2", "microsoft/phi-2", &[global(32, 32, 32, 80)]),
    model(
        "phi-3-mini-4k",
        "microsoft/Phi-3-mini-4k-instruct",
        &[local(32, 2047, global(32, 32, 32, 96))],
    ),
    model("phi-4", "microsoft/phi-4", &[global(40, 40, 10, 128)]),
    model("deepseek-v3", "deepseek-ai/DeepSeek-V3", &[mla(61, 128, DEEPSEEK_V3_SCALE)]),
    model("kimi-k2", "moonshotai/Kimi-K2-Instruct-0905", &[mla(61, 64, KIMI_K2_SCALE)]),
    model("glm-4-9b", "THUDM/GLM-4-9B-0414", &[global(40, 32, 2, 128)]),
    model("glm-4.5", "zai-org/GLM-4.5", &[global(92, 96, 8, 128)]),
    model("smollm2-135m", "HuggingFaceTB/SmolLM2-135M", &[global(30, 9, 3, 64)]),
];

/// One step of an engine.
#[derive(Debug)]
pub struct Workload {
    /// Its name on the command line and in results.
    pub name: &'static str,
    /// Sequences, tokens and storage, in the words of `--shape`.
    words: &'static str,
    /// Whether it runs without a cache.
    prompt: bool,
    /// One sequence in this many has all query tokens of the problem, the others have one.
    pub prompt_every: Option<usize>,
    /// The devices that it runs on by default.
    default_on: &'static [Place],
}

/// The device that a workload is sized for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Seconds for a model.
    Cpu,
    /// A data-centre GPU.
    Gpu,
}

const fn decode(name: &'static str, words: &'static str, default_on: &'static [Place]) -> Workload {
    Workload { name, words, prompt: false, prompt_every: None, default_on }
}

/// Every workload. Caches are paged, 16 tokens per page.
pub static WORKLOADS: [Workload; 7] = [
    decode("decode-b1", "b=1 lq=1 lk=8192 page=16 causal", &[Place::Cpu, Place::Gpu]),
    decode("decode-b8", "b=8 lq=1 lk=8192 page=16 causal", &[Place::Cpu, Place::Gpu]),
    decode("decode-b64", "b=64 lq=1 lk=8192 page=16 causal", &[Place::Gpu]),
    Workload { prompt: true, ..decode("prefill-2k", "lq=2048 causal", &[Place::Cpu, Place::Gpu]) },
    Workload { prompt: true, ..decode("prefill-32k", "lq=32768 causal", &[Place::Gpu]) },
    Workload {
        prompt_every: Some(16),
        ..decode("mixed", "b=64 lq=2048 lk=8192 page=16 ragged causal", &[Place::Gpu])
    },
    Workload {
        prompt_every: Some(8),
        ..decode("mixed-small", "b=8 lq=512 lk=2048 page=16 ragged causal", &[Place::Cpu])
    },
];

/// The default workloads of `regard plan --model`.
pub const PLANNED: [&str; 2] = ["decode-b8", "prefill-2k"];

impl Model {
    /// Layers of all kinds.
    pub fn layer_count(&self) -> usize {
        self.layers.iter().map(|layer| layer.count).sum()
    }
}

impl Layer {
    /// This layer in that workload, in the words of `--shape`. Models are served in bf16.
    pub fn words(&self, workload: &Workload) -> String {
        let heads = if workload.prompt { self.prompt_heads } else { None }.unwrap_or(self.heads);
        let Heads { query, kv, dim, value_dim } = heads;
        let mut words =
            format!("hq={query} hkv={kv} d={dim} dv={value_dim} dtype=bf16 {}", workload.words);
        if kv == 1 && value_dim < dim {
            words += " latent";
        }
        if let Some(window) = self.window {
            // `window` counts the keys before the query's own position.
            words += &format!(" window={},0", window - 1);
        }
        if let Some(chunk) = self.chunk {
            words += &format!(" chunk={chunk}");
        }
        if self.softcap.is_some() {
            words += " softcap";
        }
        if self.sinks {
            words += " sinks";
        }
        words
    }

    /// The same as a problem.
    ///
    /// # Errors
    /// None for the layers and workloads of this file.
    pub fn problem(&self, workload: &Workload) -> Result<Problem, Error> {
        Ok(mixed(shape::parse(&self.words(workload))?, workload.prompt_every))
    }
}

/// The problem in which one sequence in `prompt_every` has all query tokens and the others have
/// one.
pub fn mixed(problem: Problem, prompt_every: Option<usize>) -> Problem {
    let Some(every) = prompt_every else { return problem };
    let prompts = problem.batch.div_ceil(every);
    let total = prompts.saturating_mul(problem.query_len).saturating_add(problem.batch - prompts);
    Problem { queries: QueryStorage::Ragged { total }, ..problem }
}

/// Query tokens of each sequence of such a problem.
pub fn query_lengths(problem: &Problem, prompt_every: Option<usize>) -> Vec<usize> {
    let brings_all = |i: usize| prompt_every.is_none_or(|every| i.is_multiple_of(every));
    (0..problem.batch).map(|i| if brings_all(i) { problem.query_len } else { 1 }).collect()
}

/// The models of those names, or all for `all`.
///
/// # Errors
/// If a name is not one of them.
pub fn models(names: &[String]) -> Result<Vec<&'static Model>, Error> {
    if names.iter().any(|name| name == "all") {
        return Ok(MODELS.iter().collect());
    }
    let found = |name: &String| {
        MODELS.iter().find(|model| model.name == name).ok_or_else(|| {
            Error::argument("model", format!("\"{name}\""), format!("{}, all", model_names()))
        })
    };
    names.iter().map(found).collect()
}

/// The workloads of those names, all for `all`, or the workloads of that place if there are no
/// names.
///
/// # Errors
/// If a name is not one of them.
pub fn workloads(names: &[String], place: Place) -> Result<Vec<&'static Workload>, Error> {
    if names.is_empty() {
        let here = |workload: &&Workload| workload.default_on.contains(&place);
        return Ok(WORKLOADS.iter().filter(here).collect());
    }
    if names.iter().any(|name| name == "all") {
        return Ok(WORKLOADS.iter().collect());
    }
    let found = |name: &String| {
        WORKLOADS.iter().find(|workload| workload.name == name).ok_or_else(|| {
            Error::argument("workload", format!("\"{name}\""), format!("{}, all", workload_names()))
        })
    };
    names.iter().map(found).collect()
}

/// The names of all models, for the help.
pub fn model_names() -> String {
    MODELS.iter().map(|model| model.name).collect::<Vec<_>>().join(", ")
}

/// The names of all workloads, for the help.
pub fn workload_names() -> String {
    WORKLOADS.iter().map(|workload| workload.name).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use regard::{KvStorage, Window};

    fn layer(name: &str, kind: &str) -> Layer {
        let model = MODELS.iter().find(|model| model.name == name).unwrap();
        *model.layers.iter().find(|layer| layer.kind == kind).unwrap()
    }

    fn workload(name: &str) -> &'static Workload {
        WORKLOADS.iter().find(|workload| workload.name == name).unwrap()
    }

    #[test]
    fn every_layer_is_a_problem_in_every_workload() {
        for model in &MODELS {
            for layer in model.layers {
                for workload in &WORKLOADS {
                    let problem = layer.problem(workload).unwrap();
                    assert!(problem.variant.causal, "{} {}", model.name, workload.name);
                    assert_eq!(problem.variant.softcap, layer.softcap.is_some());
                }
            }
        }
    }

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = MODELS.iter().map(|model| model.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MODELS.len());
    }

    #[test]
    fn kinds_of_layers_add_up() {
        // `num_hidden_layers`.
        let expected = [
            ("llama-4-scout", 48),
            ("gemma-2-9b", 42),
            ("gemma-2-27b", 46),
            ("gemma-3-4b", 34),
            ("gemma-3-12b", 48),
            ("gemma-3-27b", 62),
            ("gpt-oss-20b", 24),
            ("gpt-oss-120b", 36),
        ];
        for (name, layers) in expected {
            let model = MODELS.iter().find(|model| model.name == name).unwrap();
            assert_eq!(model.layer_count(), layers, "{name}");
        }
    }

    #[test]
    fn scales_follow_from_their_formulas() {
        let mla = |factor: f64| (0.1 * factor.ln() + 1.0).powi(2) / 192f64.sqrt();
        for (name, kind, scale) in [
            ("gemma-2-27b", "local", 144f64.powf(-0.5)),
            ("gemma-3-27b", "global", 168f64.powf(-0.5)),
            ("deepseek-v3", "mla", mla(40.0)),
            ("kimi-k2", "mla", mla(64.0)),
        ] {
            let found = f64::from(layer(name, kind).scale.unwrap());
            assert!((found / scale - 1.0).abs() < 1e-6, "{name}: {found} instead of {scale}");
        }
    }

    #[test]
    fn windows_count_the_query_itself() {
        let problem = layer("gpt-oss-20b", "local").problem(workload("decode-b8")).unwrap();
        assert_eq!(problem.variant.window, Window { left: Some(127), right: Some(0) });
        assert!(problem.variant.sinks);
        assert_eq!(problem.keys, KvStorage::Paged { block_size: 16 });
    }

    #[test]
    fn mla_expands_keys_in_a_prompt() {
        let layer = layer("deepseek-v3", "mla");
        let dims = |name: &str| {
            let problem = layer.problem(workload(name)).unwrap();
            [problem.query_heads, problem.kv_heads, problem.head_dim, problem.value_dim]
        };
        assert_eq!(dims("decode-b1"), [128, 1, 576, 512]);
        assert_eq!(dims("prefill-2k"), [128, 128, 192, 128]);
    }

    #[test]
    fn a_mixed_step_has_prompts_among_single_tokens() {
        let workload = workload("mixed");
        let problem = layer("llama-4-scout", "chunked").problem(workload).unwrap();
        let lengths = query_lengths(&problem, workload.prompt_every);
        assert_eq!(lengths.iter().filter(|&&tokens| tokens == 2048).count(), 4);
        let total = lengths.iter().sum();
        assert_eq!(problem.queries, QueryStorage::Ragged { total });
        assert_eq!(problem.variant.chunk, Some(8192));
    }

    #[test]
    fn unknown_names_are_answered_with_the_known_ones() {
        let error = models(&["llama-9".into()]).unwrap_err().to_string();
        assert!(error.starts_with("`model` is \"llama-9\"; allowed: llama-3.2-1b, "), "{error}");
        let error = workloads(&["train".into()], Place::Cpu).unwrap_err().to_string();
        assert!(error.starts_with("`workload` is \"train\"; allowed: decode-b1, "), "{error}");
        assert_eq!(models(&["all".into()]).unwrap().len(), MODELS.len());
    }
}
