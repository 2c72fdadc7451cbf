//! Caches in 8 and 4 bits: attention reads codes that the cache wrote and codes that the caller
//! wrote.

use candle_core::{D, DType, Device, Result, Tensor};
use regard_candle::regard::paged::{PageAllocator, Step};
use regard_candle::regard::quantize::{dynamic_scale, quantize_blocks, quantize_row};
use regard_candle::regard::{self, DType as Stored, format};
use regard_candle::{
    Attention, CacheFormat, CacheShape, Execution, PagedCache, attention, attention_of_step,
};

const CPU: Device = Device::Cpu;
const FORMATS: [Stored; 5] = [Stored::E4M3, Stored::E5M2, Stored::I8, Stored::Q8_0, Stored::Q4_0];

fn normal(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., shape, &CPU).expect("a tensor")
}

/// Rows in a format: bytes, a scale for each row of codes, and the numbers that they mean.
struct Quantized {
    bytes: Tensor,
    scales: Option<Tensor>,
    numbers: Tensor,
}

fn quantized(x: &Tensor, format: Stored) -> Quantized {
    let rows = x.flatten_to(x.rank() - 2).and_then(|x| x.to_vec2::<f32>()).expect("f32 rows");
    let dim = x.dim(D::Minus1).expect("dims");
    let mut bytes = vec![0; rows.len() * dim / format.values() * format.size()];
    let row_bytes = dim / format.values() * format.size();
    let (mut scales, mut numbers) = (Vec::new(), Vec::new());
    for (row, bytes) in rows.iter().zip(bytes.chunks_exact_mut(row_bytes)) {
        if format.is_block() {
            quantize_blocks(row, format, bytes);
        } else {
            scales.push(dynamic_scale(row, format));
            quantize_row(row, format, scales[scales.len() - 1], bytes);
        }
        numbers.extend(meaning(bytes, format, scales.last().copied().unwrap_or(1.0)));
    }
    let mut shape = x.dims().to_vec();
    *shape.last_mut().expect("dims") = row_bytes;
    let outer = &shape[..shape.len() - 1];
    let scales = format.is_code().then(|| Tensor::from_vec(scales, outer, &CPU).expect("scales"));
    Quantized {
        bytes: Tensor::from_vec(bytes, &shape[..], &CPU).expect("bytes"),
        scales,
        numbers: Tensor::from_vec(numbers, x.dims(), &CPU).expect("numbers"),
    }
}

/// The numbers of a row.
fn meaning(bytes: &[u8], format: Stored, scale: f32) -> Vec<f32> {
    let half = |bytes: &[u8]| half::f16::from_le_bytes([bytes[0], bytes[1]]);
    match format {
        Stored::E4M3 => {
            bytes.iter().map(|&b| scale * format::E4m3::from_bits(b).to_f32()).collect()
        }
        Stored::E5M2 => {
            bytes.iter().map(|&b| scale * format::E5m2::from_bits(b).to_f32()).collect()
        }
        Stored::I8 => bytes.iter().map(|&b| scale * f32::from(b.cast_signed())).collect(),
        Stored::Q8_0 => bytes
            .chunks_exact(34)
            .flat_map(|block| {
                let codes = std::array::from_fn(|i| block[i + 2].cast_signed());
                format::BlockQ8_0 { scale: half(block), codes }.to_f32()
            })
            .collect(),
        _ => bytes
            .chunks_exact(18)
            .flat_map(|block| {
                let nibbles = std::array::from_fn(|i| block[i + 2]);
                format::BlockQ4_0 { scale: half(block), nibbles }.to_f32()
            })
            .collect(),
    }
}

fn distance(x: &Tensor, y: &Tensor) -> Result<f32> {
    (x - y)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()
}

#[test]
fn bytes_mean_what_their_format_says() -> Result<()> {
    let (q, k, v) = (normal(&[2, 3, 4, 64]), normal(&[2, 9, 2, 64]), normal(&[2, 9, 2, 64]));
    for key_format in FORMATS {
        for value_format in [key_format, Stored::I8] {
            let (k, v) = (quantized(&k, key_format), quantized(&v, value_format));
            let format = CacheFormat { keys: Some(key_format), values: Some(value_format) };
            let options = Attention {
                k_scales: k.scales.clone(),
                v_scales: v.scales.clone(),
                ..Attention::causal()
            };
            let execution = Execution { format, ..Execution::default() };
            let out = execution.attention(&q, &k.bytes, &v.bytes, &options)?;
            let expected = attention(&q, &k.numbers, &v.numbers, &Attention::causal())?;
            assert_eq!(out.dims(), expected.dims());
            let off = distance(&out, &expected)?;
            assert!(off < 1e-5, "{key_format} {value_format}: {off}");
            let plan = execution.plan(&q, &k.bytes, &v.bytes, &options)?;
            assert_eq!(plan.problem().key_dtype, key_format);
        }
    }
    Ok(())
}

#[test]
fn candles_own_8_bit_floats_need_no_format() -> Result<()> {
    let q = normal(&[1, 2, 4, 64]);
    let k = quantized(&normal(&[1, 9, 2, 64]), Stored::E4M3);
    let scales = k.scales.expect("codes have scales");
    let options = Attention {
        k_scales: Some(scales.clone()),
        v_scales: Some(scales.clone()),
        ..Attention::causal()
    };
    let execution = Execution { format: CacheFormat::new(Stored::E4M3), ..Execution::default() };
    let by_bytes = execution.attention(&q, &k.bytes, &k.bytes, &options)?;
    let codes = k.numbers.broadcast_div(&scales.unsqueeze(3)?)?.to_dtype(DType::F8E4M3)?;
    let by_type = attention(&q, &codes, &codes, &options)?;
    assert_eq!(distance(&by_bytes, &by_type)?, 0.0);
    Ok(())
}

#[test]
fn a_paged_cache_quantizes_what_is_written() -> Result<()> {
    let shape = CacheShape { layers: 2, blocks: 12, block_size: 4, kv_heads: 2, head_dim: 64 };
    for stored in FORMATS {
        for dtype in [DType::F32, DType::BF16] {
            let cache = PagedCache::with_format(shape, CacheFormat::new(stored), &CPU)?;
            let scale_bytes = if stored.is_code() { 4 } else { 0 };
            let row_bytes = 64 / stored.values() * stored.size() + scale_bytes;
            assert_eq!(cache.block_bytes(), 2 * 2 * 4 * 2 * row_bytes);
            let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound");
            let first = pages.create();
            let mut sequences = vec![(first, Vec::new())];
            let mut step = Step::new();
            for round in 0..3 {
                if round == 1 {
                    // Shares one and a half pages: the second one is copied, its scales too.
                    let fork = pages.fork(first).expect("alive");
                    sequences.push((fork, sequences[0].1.clone()));
                }
                step.clear();
                let len = if round == 0 { 6 } else { 2 };
                for (sequence, _) in &sequences {
                    step.append(&mut pages, *sequence, len).expect("room");
                }
                step.finish(&pages).expect("alive");
                cache.copy_blocks(step.copies())?;
                let rows = normal(&[step.tokens(), 8, 64]).to_dtype(dtype)?;
                let q = rows.narrow(1, 0, 4)?;
                let (k, v) = (rows.narrow(1, 4, 2)?, rows.narrow(1, 6, 2)?);
                cache.write(1, &k, &v, step.slots())?;
                let options = attention_of_step(&step, &CPU)?;
                let out = cache.attention(1, &q, &options, &Execution::default())?;
                for (i, (_, text)) in sequences.iter_mut().enumerate() {
                    text.push(rows.narrow(0, i * len, len)?.to_dtype(DType::F32)?);
                    let all = Tensor::cat(text, 0)?.unsqueeze(0)?;
                    let [k, v] = [4, 6].map(|head| {
                        let heads = all.narrow(2, head, 2).expect("heads");
                        quantized(&heads, stored).numbers.to_dtype(DType::F32).expect("f32")
                    });
                    let q = q.narrow(0, i * len, len)?.unsqueeze(0)?.to_dtype(DType::F32)?;
                    let expected = attention(&q, &k, &v, &Attention::causal())?.squeeze(0)?;
                    let found = out.narrow(0, i * len, len)?.to_dtype(DType::F32)?;
                    let off = distance(&found, &expected)?;
                    let allowed = if dtype == DType::F32 { 1e-5 } else { 0.03 };
                    assert!(off < allowed, "{stored} {dtype:?} round {round}: {off}");
                }
            }
        }
    }
    Ok(())
}

fn refused(words: &str, found: Result<impl std::fmt::Debug>) {
    let message = found.expect_err("refused").to_string();
    assert!(message.contains(words), "{message}");
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (q, k) = (normal(&[1, 1, 4, 64]), normal(&[1, 5, 2, 64]));
    let codes = quantized(&k, Stored::I8);
    let blocks = quantized(&k, Stored::Q8_0).bytes;
    let scales = codes.scales.expect("codes have scales");
    let run = |k: &Tensor, format: Stored, scales: Option<&Tensor>| {
        let (k_scales, v_scales) = (scales.cloned(), scales.cloned());
        let options = Attention { k_scales, v_scales, ..Attention::causal() };
        Execution { format: CacheFormat::new(format), ..Execution::default() }
            .attention(&q, k, k, &options)
    };
    refused("`k_scales` is missing", run(&codes.bytes, Stored::I8, None));
    let short = scales.narrow(1, 0, 4).expect("narrow");
    refused("`k_scales` is of shape [1, 4, 2]", run(&codes.bytes, Stored::I8, Some(&short)));
    refused("`k_scales` is given", run(&blocks, Stored::Q8_0, Some(&scales)));
    refused("whole elements of q4_0, 18 bytes", run(&blocks, Stored::Q4_0, None));
    refused("`format of k` is f16", run(&codes.bytes, Stored::F16, None));
    refused("`k` is of type", attention(&q, &codes.bytes, &codes.bytes, &Attention::causal()));
    let shape = CacheShape { layers: 1, blocks: 2, block_size: 4, kv_heads: 2, head_dim: 40 };
    let made = |format| PagedCache::with_format(shape, format, &CPU);
    refused("`head_dim` is 40", made(CacheFormat::new(Stored::Q4_0)));
    refused("`format of keys` is none", made(CacheFormat::default()));
    refused("`format of values` is bf16", {
        made(CacheFormat { keys: Some(Stored::I8), values: Some(regard::DType::BF16) })
    });
}
