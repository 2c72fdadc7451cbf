//! Calls of candle-flash-attn, and the same calls of regard-candle's functions of those names, on
//! the same tensors: times, and the largest difference of the results.

use super::measure::median;
use super::shapes::random;
use candle_core::{D, DType, Device, Result, Tensor};
use generate::stopwatch::Stopwatch;

/// Calls in a row of either, in turns, and turns.
const CALLS: usize = 20;
const TURNS: usize = 5;

/// Largest difference of two results in bf16, as a part of the largest result: each is rounded to
/// 8 bits, and so are candle-flash-attn's probabilities.
const TOLERANCE: f32 = 1.0 / 64.0;

type Run = Box<dyn Fn() -> Result<Tensor>>;

/// A function, its operands in words, and its call in both crates.
struct Call {
    function: &'static str,
    what: String,
    theirs: Run,
    ours: Run,
}

/// The same call of both crates. The operands are cloned into it.
macro_rules! call {
    ($what:expr, $function:ident($($operand:expr),* $(,)?) with $($held:ident),*) => {
        Call {
            function: stringify!($function),
            what: $what.to_string(),
            theirs: {
                $(let $held = $held.clone();)*
                Box::new(move || candle_flash_attn::$function($($operand),*))
            },
            ours: {
                $(let $held = $held.clone();)*
                Box::new(move || regard_candle::$function($($operand),*))
            },
        }
    };
}

/// The result of a call.
pub struct Measured {
    function: &'static str,
    what: String,
    /// Microseconds per call.
    theirs: f64,
    ours: f64,
    /// Part of the largest result.
    difference: f32,
}

/// Queries, keys and values `[B, L, H, D]`.
fn operands(
    batch: usize,
    tokens: usize,
    [heads, kv_heads]: [usize; 2],
    dim: usize,
    device: &Device,
) -> Result<[Tensor; 3]> {
    let rows = |heads| random(&[batch, tokens, heads, dim], device);
    Ok([rows(heads)?, rows(kv_heads)?, rows(kv_heads)?])
}

/// Prompts of one length.
fn dense(device: &Device) -> Result<Vec<Call>> {
    let slopes: Vec<f32> = (1..=32).map(|head| (-(head as f32) / 4.0).exp2()).collect();
    let slopes = Tensor::new(slopes, device)?;
    let mut calls = Vec::new();
    for (batch, tokens, dim) in [(8, 512, 128), (8, 2048, 128), (2, 8192, 128), (2, 8192, 64)] {
        let [q, k, v] = operands(batch, tokens, [32, 8], dim, device)?;
        let scale = 1.0 / (dim as f32).sqrt();
        let what = format!("{batch} x {tokens}, 32/8, D {dim}, causal");
        calls.push(call!(what, flash_attn(&q, &k, &v, scale, true) with q, k, v));
    }
    let [q, k, v] = operands(8, 2048, [32, 8], 128, device)?;
    let scale = 1.0 / 128f32.sqrt();
    let what = "8 x 2048, 32/8, D 128";
    calls.push(call!(what, flash_attn(&q, &k, &v, scale, false) with q, k, v));
    calls.push(call!(
        format!("{what}, window 512"),
        flash_attn_windowed(&q, &k, &v, scale, Some(512), Some(0)) with q, k, v
    ));
    calls.push(call!(
        format!("{what}, causal"),
        flash_attn_alibi(&q, &k, &v, &slopes, scale, true) with q, k, v, slopes
    ));
    calls.push(call!(
        format!("{what}, causal, softcap 50"),
        flash_attn_alibi_windowed_softcap(&q, &k, &v, None, scale, None, Some(0), 50.0)
            with q, k, v
    ));
    Ok(calls)
}

/// [`generate::flash::cumulative`] on a device.
fn cumulative(lengths: &[usize], device: &Device) -> Result<Tensor> {
    let lengths = lengths.iter().map(|&length| length as u32);
    Tensor::new(generate::flash::cumulative(lengths), device)
}

/// Prompts of several lengths.
fn ragged(device: &Device) -> Result<Call> {
    let lengths: Vec<usize> = (1..=16).map(|i| 117 * i).collect();
    let (total, longest) = (lengths.iter().sum(), 117 * 16);
    let [q, k, v] = operands(1, total, [32, 8], 128, device)?;
    let [q, k, v] = [q.squeeze(0)?, k.squeeze(0)?, v.squeeze(0)?];
    let (sums, scale) = (cumulative(&lengths, device)?, 1.0 / 128f32.sqrt());
    Ok(call!(
        "16 prompts of 117 to 1872, 32/8, D 128, causal",
        flash_attn_varlen(&q, &k, &v, &sums, &sums, longest, longest, scale, true)
            with q, k, v, sums
    ))
}

/// Decode over pages of 64 in random order.
fn paged(device: &Device) -> Result<Vec<Call>> {
    const BLOCK_SIZE: usize = 64;
    let scale = 1.0 / 128f32.sqrt();
    let mut calls = Vec::new();
    for (batch, keys) in [(1, 4096), (1, 32768), (8, 8192), (64, 2048), (128, 1024)] {
        let blocks = batch * keys / BLOCK_SIZE;
        let q = random(&[batch, 32, 128], device)?;
        let pool = || random(&[blocks, BLOCK_SIZE, 8, 128], device);
        let (k, v) = (pool()?, pool()?);
        let order = Tensor::rand(0f32, 1., blocks, &Device::Cpu)?;
        let table = order.arg_sort_last_dim(true)?.reshape((batch, ()))?.to_device(device)?;
        let (queries, lengths) = (vec![1; batch], vec![keys; batch]);
        let (queries, lengths) = (cumulative(&queries, device)?, cumulative(&lengths, device)?);
        calls.push(call!(
            format!("{batch} x {keys} keys in pages of {BLOCK_SIZE}, 32/8, D 128"),
            flash_attn_varlen_paged_windowed(
                &q, &k, &v, &queries, &lengths, &table, None, 1, keys, scale, None, Some(0),
                BLOCK_SIZE, None,
            ) with q, k, v, queries, lengths, table
        ));
    }
    Ok(calls)
}

/// Microseconds per call, by the clock of the GPU.
fn time(call: &Run, device: &Device) -> Result<f64> {
    let mut stopwatch = Stopwatch::new(device)?;
    stopwatch.time(|| (0..CALLS).try_for_each(|_| call().map(drop)))?;
    device.synchronize()?;
    Ok(stopwatch.spent().as_secs_f64() * 1e6 / CALLS as f64)
}

/// The largest difference of two results, as a part of the largest result.
fn difference(theirs: &Tensor, ours: &Tensor) -> Result<f32> {
    let largest = |x: Tensor| x.abs()?.flatten_all()?.max(D::Minus1)?.to_scalar::<f32>();
    let [theirs, ours] = [theirs.to_dtype(DType::F32)?, ours.to_dtype(DType::F32)?];
    Ok(largest((&theirs - &ours)?)? / largest(theirs)?)
}

/// Runs all calls on the first GPU.
///
/// # Errors
/// If a call fails, or the results of the two differ.
pub fn measure() -> Result<Vec<Measured>> {
    let device = generate::device("cuda")?;
    let (mut calls, mut measured) = (dense(&device)?, Vec::new());
    calls.push(ragged(&device)?);
    calls.extend(paged(&device)?);
    for Call { function, what, theirs, ours } in &calls {
        let difference = difference(&theirs()?, &ours()?)?;
        if difference.is_nan() || difference > TOLERANCE {
            candle_core::bail!("{function}, {what}: results differ by {difference}")
        }
        let mut times = [Vec::new(), Vec::new()];
        for _ in 0..TURNS {
            times[0].push(time(theirs, &device)?);
            times[1].push(time(ours, &device)?);
        }
        let ([theirs, ours], what) = (times.map(median), what.clone());
        measured.push(Measured { function, what, theirs, ours, difference });
    }
    Ok(measured)
}

/// The table, in Markdown.
pub fn table(measured: &[Measured]) -> String {
    let mut text = String::from(
        "| call | operands | candle-flash-attn | regard-candle | ratio | largest difference |\n\
         |---|---|---|---|---|---|\n",
    );
    for Measured { function, what, theirs, ours, difference } in measured {
        text += &format!(
            "| `{function}` | {what} | {theirs:.1} us | {ours:.1} us | {:.2}x \
             | {difference:.4} |\n",
            theirs / ours
        );
    }
    text
}
