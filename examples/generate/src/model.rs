//! A Llama model from a GGUF file: everything but attention, which is left to an [`Attend`].

use crate::attend::Attend;
use candle_core::quantized::gguf_file::{Content, Value};
use candle_core::quantized::{QMatMul, QTensor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::RmsNorm;
use clap::ValueEnum;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;

/// Arithmetic of matrix products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Weights {
    /// Candle's quantized products
    Quantised,
    /// The same weights in f32, as other implementations compute them
    F32,
    /// The same weights, and all that runs through the model, in bf16
    Bf16,
}

impl Weights {
    /// The type of activations: the residual stream, queries, keys, values.
    pub fn dtype(self) -> DType {
        match self {
            Weights::Quantised | Weights::F32 => DType::F32,
            Weights::Bf16 => DType::BF16,
        }
    }
}

/// The sizes of a model, from the file's metadata.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Transformer blocks.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Dim of a head.
    pub head_dim: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// The number that norms add under the root.
    pub norm_epsilon: f64,
    /// The longest sequence that the model was trained for.
    pub context: usize,
}

/// A model without trained weights: the sizes of one that has them.
#[derive(Debug, Clone, PartialEq)]
pub struct Shape {
    /// The part of the sizes that attention depends on.
    pub config: Config,
    /// Width of the feed-forward layers.
    pub feed_forward: usize,
    /// Tokens that the model knows.
    pub vocabulary: usize,
    /// Whether the output shares the embedding's matrix.
    pub tied: bool,
}

impl Shape {
    /// Llama 3.2 1B (`meta-llama/Llama-3.2-1B`, config.json).
    pub fn llama_1b() -> Shape {
        let config = Config {
            layers: 16,
            hidden: 2048,
            heads: 32,
            kv_heads: 8,
            head_dim: 64,
            rope_base: 500_000.0,
            norm_epsilon: 1e-5,
            context: 131_072,
        };
        Shape { config, feed_forward: 8192, vocabulary: 128_256, tied: true }
    }

    /// Llama 3.1 8B (`meta-llama/Llama-3.1-8B`, config.json).
    pub fn llama_8b() -> Shape {
        let Shape { config, .. } = Shape::llama_1b();
        let config = Config { layers: 32, hidden: 4096, head_dim: 128, ..config };
        Shape { config, feed_forward: 14_336, vocabulary: 128_256, tied: false }
    }
}

impl Config {
    fn from_content(content: &Content) -> Result<Config> {
        let value = |key: &str| content.metadata.get(key);
        let architecture = match value("general.architecture") {
            Some(Value::String(name)) => name.as_str(),
            _ => "missing",
        };
        if architecture != "llama" {
            candle_core::bail!("general.architecture is {architecture}; this example runs llama");
        }
        let optional = |key: &str| match value(&format!("llama.{key}")) {
            Some(value) => value.to_u64().map(|n| Some(n as usize)),
            None => Ok(None),
        };
        let required = |key: &str| match optional(key)? {
            Some(n) => Ok(n),
            None => candle_core::bail!("the file has no llama.{key}"),
        };
        let float = |key: &str, default: f32| match value(&format!("llama.{key}")) {
            Some(value) => value.to_f32(),
            None => Ok(default),
        };
        if optional("expert_count")?.unwrap_or(0) > 0 {
            candle_core::bail!("llama.expert_count is above 0; this example runs dense models");
        }
        let (hidden, heads) = (required("embedding_length")?, required("attention.head_count")?);
        let kv_heads = optional("attention.head_count_kv")?.unwrap_or(heads);
        if heads == 0 || kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            candle_core::bail!("{heads} query heads cannot share {kv_heads} key/value heads");
        }
        let head_dim = optional("attention.key_length")?.unwrap_or(hidden / heads);
        let rope_dim = optional("rope.dimension_count")?.unwrap_or(head_dim);
        if rope_dim != head_dim || !head_dim.is_multiple_of(2) {
            candle_core::bail!(
                "rotary dim {rope_dim} of head dim {head_dim}; this example rotates whole heads"
            );
        }
        Ok(Config {
            layers: required("block_count")?,
            hidden,
            heads,
            kv_heads,
            head_dim,
            rope_base: float("rope.freq_base", 10_000.0)?,
            norm_epsilon: f64::from(float("attention.layer_norm_rms_epsilon", 1e-5)?),
            context: required("context_length")?,
        })
    }
}

/// The rows of one step: tokens of all sequences, one after the other.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// Token ids.
    pub tokens: &'a [u32],
    /// The position of each in its sequence.
    pub positions: &'a [u32],
    /// The rows whose next token is asked for.
    pub wanted: &'a [u32],
}

impl Rows<'_> {
    /// All numbers of the rows, for one upload.
    pub fn packed(&self) -> Vec<u32> {
        [self.tokens, self.positions, self.wanted].concat()
    }
}

/// [`Rows`] on the model's device.
pub struct Inputs {
    tokens: Tensor,
    positions: Tensor,
    wanted: Tensor,
}

impl Inputs {
    /// Views of [`Rows::packed`] on the device, of as many tokens and wanted rows as `rows` has.
    ///
    /// # Errors
    /// If the vector has another length.
    pub fn new(packed: &Tensor, rows: Rows) -> Result<Inputs> {
        let (count, wanted) = (rows.tokens.len(), rows.wanted.len());
        Ok(Inputs {
            tokens: packed.narrow(0, 0, count)?,
            positions: packed.narrow(0, count, count)?,
            wanted: packed.narrow(0, 2 * count, wanted)?,
        })
    }
}

/// A model, ready to run.
pub struct Llama {
    config: Config,
    weights: Weights,
    embedding: QMatMul,
    layers: Vec<Layer>,
    norm: RmsNorm,
    output: QMatMul,
    /// Cosines and sines of every position's rotation, `[context, head_dim / 2]`.
    rotation: [Tensor; 2],
    device: Device,
}

struct Layer {
    attention_norm: RmsNorm,
    query: QMatMul,
    key: QMatMul,
    value: QMatMul,
    output: QMatMul,
    feed_forward_norm: RmsNorm,
    gate: QMatMul,
    up: QMatMul,
    down: QMatMul,
}

/// The tensors of a file, by name.
struct Reader<'a> {
    content: &'a Content,
    file: BufReader<File>,
    weights: Weights,
    norm_epsilon: f64,
    device: &'a Device,
}

impl Reader<'_> {
    fn tensor(&mut self, name: &str) -> Result<QTensor> {
        self.content.tensor(&mut self.file, name, self.device)
    }

    fn product(&self, tensor: Arc<QTensor>) -> Result<QMatMul> {
        match self.weights {
            Weights::Quantised => QMatMul::from_arc(tensor),
            Weights::F32 | Weights::Bf16 => Ok(QMatMul::Tensor(self.dense(&tensor)?)),
        }
    }

    fn matrix(&mut self, name: &str) -> Result<QMatMul> {
        let tensor = self.tensor(name)?;
        self.product(Arc::new(tensor))
    }

    fn dense(&self, tensor: &QTensor) -> Result<Tensor> {
        tensor.dequantize(self.device)?.to_dtype(self.weights.dtype())
    }

    fn norm(&mut self, name: &str) -> Result<RmsNorm> {
        let tensor = self.tensor(name)?;
        Ok(RmsNorm::new(self.dense(&tensor)?, self.norm_epsilon))
    }
}

impl Llama {
    /// Reads a model to a device; also returns the file's header, which holds the tokenizer.
    ///
    /// # Errors
    /// If the file is no GGUF, or not of an architecture that this example runs.
    pub fn load(path: &Path, weights: Weights, device: &Device) -> Result<(Llama, Content)> {
        let mut file = BufReader::new(File::open(path).map_err(|error| {
            candle_core::Error::msg(format!("cannot open {}: {error}", path.display()))
        })?);
        let content = Content::read(&mut file)?;
        let config = Config::from_content(&content)?;
        let mut reader =
            Reader { content: &content, file, weights, norm_epsilon: config.norm_epsilon, device };
        let embedding = Arc::new(reader.tensor("token_embd.weight")?);
        let mut layers = Vec::with_capacity(config.layers);
        for index in 0..config.layers {
            let name = |part: &str| format!("blk.{index}.{part}.weight");
            layers.push(Layer {
                attention_norm: reader.norm(&name("attn_norm"))?,
                query: reader.matrix(&name("attn_q"))?,
                key: reader.matrix(&name("attn_k"))?,
                value: reader.matrix(&name("attn_v"))?,
                output: reader.matrix(&name("attn_output"))?,
                feed_forward_norm: reader.norm(&name("ffn_norm"))?,
                gate: reader.matrix(&name("ffn_gate"))?,
                up: reader.matrix(&name("ffn_up"))?,
                down: reader.matrix(&name("ffn_down"))?,
            });
        }
        let norm = reader.norm("output_norm.weight")?;
        let embedding = reader.product(embedding)?;
        // Without a matrix of its own the output shares the matrix of the embedding.
        let output = match content.tensor_infos.contains_key("output.weight") {
            true => reader.matrix("output.weight")?,
            false => embedding.clone(),
        };
        // Llama 3.1 and later: long wavelengths are stretched by factors that the file lists.
        let stretch = match content.tensor_infos.contains_key("rope_freqs.weight") {
            true => {
                let factors = reader.tensor("rope_freqs.weight")?.dequantize(&Device::Cpu)?;
                factors.to_vec1::<f32>()?
            }
            false => vec![1.0; config.head_dim / 2],
        };
        let rotation = rotation(&config, &stretch, weights.dtype(), device)?;
        let device = device.clone();
        let model = Llama { config, weights, embedding, layers, norm, output, rotation, device };
        Ok((model, content))
    }

    /// A model of random weights in bf16: as fast as one that was trained.
    ///
    /// # Errors
    /// If the device has not that much memory.
    pub fn random(shape: &Shape, device: &Device) -> Result<Llama> {
        let Shape { config, feed_forward, vocabulary, tied } = shape.clone();
        let Config { hidden, heads, kv_heads, head_dim, .. } = config;
        let weights = Weights::Bf16;
        let matrix = |rows: usize, columns: usize| {
            let spread = 1.0 / (columns as f32).sqrt();
            let weight = Tensor::randn(0f32, spread, (rows, columns), device)?;
            Ok::<_, candle_core::Error>(QMatMul::Tensor(weight.to_dtype(weights.dtype())?))
        };
        let norm = || {
            let ones = Tensor::ones(hidden, weights.dtype(), device)?;
            Ok::<_, candle_core::Error>(RmsNorm::new(ones, config.norm_epsilon))
        };
        let layer = || {
            Ok(Layer {
                attention_norm: norm()?,
                query: matrix(heads * head_dim, hidden)?,
                key: matrix(kv_heads * head_dim, hidden)?,
                value: matrix(kv_heads * head_dim, hidden)?,
                output: matrix(hidden, heads * head_dim)?,
                feed_forward_norm: norm()?,
                gate: matrix(feed_forward, hidden)?,
                up: matrix(feed_forward, hidden)?,
                down: matrix(hidden, feed_forward)?,
            })
        };
        let embedding = matrix(vocabulary, hidden)?;
        Ok(Llama {
            weights,
            layers: (0..config.layers).map(|_| layer()).collect::<Result<_>>()?,
            norm: norm()?,
            output: if tied { embedding.clone() } else { matrix(vocabulary, hidden)? },
            embedding,
            rotation: rotation(&config, &vec![1.0; head_dim / 2], weights.dtype(), device)?,
            device: device.clone(),
            config,
        })
    }

    /// Its device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The model's sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The arithmetic of its matrix products.
    pub fn weights(&self) -> Weights {
        self.weights
    }

    /// The scores of every token of the vocabulary for the wanted rows: `[wanted, vocabulary]`,
    /// f32.
    ///
    /// # Errors
    /// If a token is not in the vocabulary, or attention fails.
    pub fn forward(&self, rows: Rows, attend: &mut dyn Attend) -> Result<Tensor> {
        self.forward_on(&self.inputs(rows)?, attend)
    }

    /// Rows on the device: all that a pass brings there, in one upload.
    ///
    /// # Errors
    /// If the device has too little memory.
    pub fn inputs(&self, rows: Rows) -> Result<Inputs> {
        Inputs::new(&Tensor::new(rows.packed(), &self.device)?, rows)
    }

    /// [`Llama::forward`] of rows that are on the device.
    ///
    /// # Errors
    /// As there.
    pub fn forward_on(&self, inputs: &Inputs, attend: &mut dyn Attend) -> Result<Tensor> {
        let Config { heads, kv_heads, head_dim, .. } = self.config;
        let Inputs { tokens, positions, wanted } = inputs;
        let count = tokens.elem_count();
        let [cos, sin] =
            self.rotation.each_ref().map(|table| table.index_select(positions, 0)?.unsqueeze(1));
        let (cos, sin) = (cos?, sin?);
        // One row per batch entry, so that each row has its own position and nothing is transposed.
        let rotate = |x: Tensor, heads: usize| {
            let x = x.reshape((count, heads, 1, head_dim))?;
            candle_nn::rotary_emb::rope_i(&x, &cos, &sin)?.reshape((count, heads, head_dim))
        };
        let mut x = self.embedding.embedding(tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let normed = layer.attention_norm.forward(&x)?;
            let query = rotate(layer.query.forward(&normed)?, heads)?;
            let key = rotate(layer.key.forward(&normed)?, kv_heads)?;
            let value = layer.value.forward(&normed)?.reshape((count, kv_heads, head_dim))?;
            let attended =
                attend.attend(index, &query, &key, &value)?.reshape((count, heads * head_dim))?;
            x = (x + layer.output.forward(&attended)?)?;
            let normed = layer.feed_forward_norm.forward(&x)?;
            let gated = (candle_nn::ops::silu(&layer.gate.forward(&normed)?)?
                * layer.up.forward(&normed)?)?;
            x = (x + layer.down.forward(&gated)?)?;
        }
        let wanted = x.index_select(wanted, 0)?;
        self.output.forward(&self.norm.forward(&wanted)?)?.to_dtype(DType::F32)
    }
}

/// Cosines and sines of the rotation of every position, for each pair of a head.
fn rotation(
    config: &Config,
    stretch: &[f32],
    dtype: DType,
    device: &Device,
) -> Result<[Tensor; 2]> {
    let frequencies = frequencies(config, stretch);
    let angles = (0..config.context)
        .flat_map(|position| frequencies.iter().map(move |frequency| position as f32 * frequency));
    let (sin, cos): (Vec<f32>, Vec<f32>) = angles.map(f32::sin_cos).unzip();
    let shape = (config.context, frequencies.len());
    let there = |x| Tensor::from_vec(x, shape, device)?.to_dtype(dtype);
    Ok([there(cos)?, there(sin)?])
}

/// Rotation per position, for each pair of a head, its wavelength stretched by these factors.
fn frequencies(config: &Config, stretch: &[f32]) -> Vec<f32> {
    let frequency = |(i, stretch): (usize, &f32)| {
        1.0 / config.rope_base.powf(2.0 * i as f32 / config.head_dim as f32) / stretch
    };
    stretch.iter().enumerate().map(frequency).collect()
}
