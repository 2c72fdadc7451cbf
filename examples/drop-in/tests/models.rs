//! Two models of candle-transformers, as their files are: the crate that they call
//! `candle_flash_attn` is regard-candle. Their own attention, of candle's matrix products and
//! softmax, is the reference.

#[allow(warnings, clippy::all, reason = "sources of candle-transformers")]
mod sources {
    include!(concat!(env!("OUT_DIR"), "/models.rs"));
}
// The models import each other's files as `crate::utils` and `crate::models::with_tracing`.
use sources::{models, quantized_var_builder, utils};

use candle::{D, DType, Device, Result, Tensor};
use candle_nn::{Activation, VarBuilder, VarMap};
use models::{gemma3, llama};
use std::collections::HashMap;

const CPU: Device = Device::Cpu;
const VOCABULARY: u32 = 96;
/// A prompt, tokens one by one, a second question in one piece, and its answer.
const STEPS: [usize; 8] = [13, 1, 1, 1, 6, 1, 1, 1];
const BATCH: usize = 2;

/// A model with its cache. Arguments: tokens `[batch, n]`, and the number of tokens before them.
/// Returns the logits `[batch, vocabulary]` of the last token.
type Forward = Box<dyn FnMut(&Tensor, usize) -> Result<Tensor>>;

/// Weights as an initialization draws them, of the names that a model asks for.
fn weights(load: impl Fn(VarBuilder) -> Result<()>) -> Result<HashMap<String, Tensor>> {
    let map = VarMap::new();
    load(VarBuilder::from_varmap(&map, DType::F32, &CPU))?;
    let data = map.data().lock().expect("no other thread");
    Ok(data.iter().map(|(name, weight)| (name.clone(), weight.as_tensor().clone())).collect())
}

/// Attention of regard (`true`) or of candle, and the type of everything.
#[derive(Clone, Copy)]
struct Choice {
    regard: bool,
    dtype: DType,
}

fn llama(weights: &HashMap<String, Tensor>, choice: Choice) -> Result<Forward> {
    let config = llama_config(choice.regard);
    let weights = VarBuilder::from_tensors(weights.clone(), choice.dtype, &CPU);
    let model = llama::Llama::load(weights, &config)?;
    let mut cache = llama::Cache::new(true, choice.dtype, &config, &CPU)?;
    Ok(Box::new(move |tokens, position| model.forward(tokens, position, &mut cache)))
}

fn llama_config(use_flash_attn: bool) -> llama::Config {
    llama::Config {
        hidden_size: 96,
        intermediate_size: 128,
        vocab_size: VOCABULARY as usize,
        num_hidden_layers: 3,
        num_attention_heads: 6,
        num_key_value_heads: 2,
        use_flash_attn,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: 64,
        tie_word_embeddings: false,
    }
}

fn gemma(weights: &HashMap<String, Tensor>, choice: Choice) -> Result<Forward> {
    let weights = VarBuilder::from_tensors(weights.clone(), choice.dtype, &CPU);
    let mut model = gemma3::Model::new(choice.regard, &gemma_config(), weights)?;
    Ok(Box::new(move |tokens, position| model.forward(tokens, position)?.squeeze(1)))
}

/// The window is longer than the text: before candle-flash-attn, the model leaves it out.
fn gemma_config() -> gemma3::Config {
    gemma3::Config {
        attention_bias: false,
        head_dim: 24,
        hidden_activation: Activation::GeluPytorchTanh,
        hidden_size: 64,
        intermediate_size: 96,
        num_attention_heads: 4,
        num_hidden_layers: 3,
        num_key_value_heads: 1,
        rms_norm_eps: 1e-6,
        rope_theta: 1e6,
        rope_local_base_freq: 1e4,
        vocab_size: VOCABULARY as usize,
        final_logit_softcapping: Some(30.0),
        attn_logit_softcapping: None,
        query_pre_attn_scalar: 24,
        sliding_window: 64,
        sliding_window_pattern: 2,
        max_position_embeddings: 64,
    }
}

/// Logits after each step of a given text.
fn logits(mut model: Forward) -> Result<Tensor> {
    let text: Vec<u32> = (0..27 * BATCH as u32).map(|i| i * i * 31 % VOCABULARY).collect();
    let text = Tensor::from_vec(text, (BATCH, 27), &CPU)?;
    let mut position = 0;
    let steps = STEPS.iter().map(|&len| {
        let tokens = text.narrow(1, position, len)?.contiguous()?;
        let logits = model(&tokens, position)?.to_dtype(DType::F32)?;
        position += len;
        Ok(logits)
    });
    Tensor::stack(&steps.collect::<Result<Vec<_>>>()?, 0)
}

/// The most likely tokens, one after the other.
fn answer(mut model: Forward) -> Result<Vec<Vec<u32>>> {
    let prompt = Tensor::arange(0u32, 11 * BATCH as u32, &CPU)?.reshape((BATCH, 11))?;
    let (mut tokens, mut position, mut text) = (prompt, 0, Vec::new());
    for _ in 0..20 {
        let next = model(&tokens, position)?.argmax(D::Minus1)?;
        position += tokens.dim(1)?;
        text.push(next.to_vec1::<u32>()?);
        tokens = next.unsqueeze(1)?;
    }
    Ok(text)
}

fn apart(a: &Tensor, b: &Tensor) -> Result<f32> {
    assert_eq!(a.dims(), b.dims());
    (a - b)?.abs()?.max_all()?.to_scalar()
}

/// In bf16 regard's distance from candle's f32 is at most twice the distance of candle's bf16. In
/// f32 it is at least a thousand times nearer than that: f32 has 2^16 times the precision.
fn judge(load: impl Fn(Choice) -> Result<Forward>) -> Result<()> {
    let of = |regard, dtype| logits(load(Choice { regard, dtype })?);
    let reference = of(false, DType::F32)?;
    let rounding = apart(&of(false, DType::BF16)?, &reference)?;
    assert!(rounding > 0.0);
    let (wide, narrow) = (of(true, DType::F32)?, of(true, DType::BF16)?);
    let (wide, narrow) = (apart(&wide, &reference)?, apart(&narrow, &reference)?);
    assert!(wide > 0.0, "the very bits of candle's attention: regard's did not run");
    assert!(wide < rounding / 1000.0, "f32: {wide}, candle's bf16: {rounding}");
    assert!(narrow <= 2.0 * rounding, "bf16: {narrow}, candle's: {rounding}");

    let answer_of = |regard| answer(load(Choice { regard, dtype: DType::F32 })?);
    assert_eq!(answer_of(true)?, answer_of(false)?);
    Ok(())
}

#[test]
fn llama_is_the_same_on_regard() -> Result<()> {
    let weights = weights(|builder| llama::Llama::load(builder, &llama_config(false)).map(drop))?;
    judge(|choice| llama(&weights, choice))
}

#[test]
fn gemma_3_is_the_same_on_regard() -> Result<()> {
    let weights = weights(|builder| gemma3::Model::new(false, &gemma_config(), builder).map(drop))?;
    judge(|choice| gemma(&weights, choice))
}
