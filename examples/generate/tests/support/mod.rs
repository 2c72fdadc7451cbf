//! A tiny Llama with random weights, written as a GGUF file with a tokenizer of single bytes. Tests
//! run it, so none has to download anything.

#![allow(dead_code, reason = "compiled into each test on its own, and none uses all of it")]

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use generate::engine::Request;
use generate::model::{Llama, Weights};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::path::PathBuf;

const HIDDEN: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const FEED_FORWARD: usize = 128;
const LAYERS: usize = 2;
/// One token a byte, and two that stand for the beginning and the end.
pub const VOCABULARY: usize = 258;
pub const END: u32 = 257;
pub const CONTEXT: usize = 512;

/// The bytes of the vocabulary as GPT-2 writes them: printable bytes stand for themselves, the rest
/// follows from 256 on.
fn byte_names() -> Vec<String> {
    let printable = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut next = 256;
    let mut name = |byte: u32| {
        let code = match printable(byte) {
            true => byte,
            false => {
                next += 1;
                next - 1
            }
        };
        char::from_u32(code).expect("below 512").to_string()
    };
    (0..256).map(&mut name).collect()
}

/// Writes the model and returns its path.
pub fn write(name: &str) -> PathBuf {
    let mut random = StdRng::seed_from_u64(7);
    let mut tensors: Vec<(String, QTensor)> = Vec::new();
    let mut matrix = |name: String, rows: usize, columns: usize, gain: f32| {
        // Uniform, so large that answers depend on the whole text and do not repeat one token for
        // ever.
        let spread = gain * (3.0 / columns as f32).sqrt();
        let data: Vec<f32> =
            (0..rows * columns).map(|_| random.random_range(-spread..spread)).collect();
        let tensor = Tensor::from_vec(data, (rows, columns), &Device::Cpu).expect("a matrix");
        tensors.push((
            name,
            QTensor::quantize(&tensor, GgmlDType::Q8_0).expect("rows of whole blocks"),
        ));
    };
    matrix("token_embd.weight".into(), VOCABULARY, HIDDEN, 1.0);
    for layer in 0..LAYERS {
        let kv = KV_HEADS * HIDDEN / HEADS;
        let mut weight = |part: &str, rows, columns| {
            matrix(format!("blk.{layer}.{part}.weight"), rows, columns, 2.0)
        };
        weight("attn_q", HIDDEN, HIDDEN);
        weight("attn_k", kv, HIDDEN);
        weight("attn_v", kv, HIDDEN);
        weight("attn_output", HIDDEN, HIDDEN);
        weight("ffn_gate", FEED_FORWARD, HIDDEN);
        weight("ffn_up", FEED_FORWARD, HIDDEN);
        weight("ffn_down", HIDDEN, FEED_FORWARD);
    }
    let mut norm = |name: String| {
        let ones = Tensor::ones(HIDDEN, candle_core::DType::F32, &Device::Cpu).expect("a vector");
        tensors.push((name, QTensor::quantize(&ones, GgmlDType::F32).expect("f32 as it is")));
    };
    norm("output_norm.weight".into());
    for layer in 0..LAYERS {
        norm(format!("blk.{layer}.attn_norm.weight"));
        norm(format!("blk.{layer}.ffn_norm.weight"));
    }

    let mut names = byte_names();
    names.extend(["<begin>".to_string(), "<end>".to_string()]);
    let strings =
        |names: &[String]| Value::Array(names.iter().cloned().map(Value::String).collect());
    let metadata = [
        ("general.architecture", Value::String("llama".into())),
        ("llama.block_count", Value::U32(LAYERS as u32)),
        ("llama.embedding_length", Value::U32(HIDDEN as u32)),
        ("llama.context_length", Value::U32(CONTEXT as u32)),
        ("llama.attention.head_count", Value::U32(HEADS as u32)),
        ("llama.attention.head_count_kv", Value::U32(KV_HEADS as u32)),
        ("llama.rope.freq_base", Value::F32(10_000.0)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("tokenizer.ggml.model", Value::String("gpt2".into())),
        ("tokenizer.ggml.pre", Value::String("smollm".into())),
        ("tokenizer.ggml.tokens", strings(&names)),
        ("tokenizer.ggml.merges", strings(&[])),
        ("tokenizer.ggml.bos_token_id", Value::U32(256)),
        ("tokenizer.ggml.eos_token_id", Value::U32(END)),
    ];
    let metadata: Vec<(&str, &Value)> = metadata.iter().map(|(key, value)| (*key, value)).collect();
    let tensors: Vec<(&str, &QTensor)> =
        tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    // Tests that were built on another machine have no folder of cargo's.
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let folder = if folder.exists() { folder } else { std::env::temp_dir() };
    let path = folder.join(name);
    let mut file = std::fs::File::create(&path).expect("a file in a folder for such files");
    gguf_file::write(&mut file, &metadata, &tensors).expect("room on the disk");
    path
}

/// The model.
pub fn model(name: &str, weights: Weights) -> Llama {
    model_on(&Device::Cpu, name, weights)
}

/// The model on a device.
pub fn model_on(device: &Device, name: &str, weights: Weights) -> Llama {
    Llama::load(&write(name), weights, device).expect("what was just written").0
}

/// A request with random tokens after the given ones.
pub fn request(
    random: &mut impl Rng,
    beginning: &[u32],
    tokens: usize,
    max_tokens: usize,
) -> Request {
    let mut prompt = beginning.to_vec();
    prompt.extend((0..tokens).map(|_| random.random_range(0..256)));
    Request { prompt, max_tokens, stop: vec![END] }
}
