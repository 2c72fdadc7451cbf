//! candle's tensors on an NVIDIA GPU: every type and option against the oracle, the paged cache and
//! merges against the CPU's, drop-ins against `attention`, on candle's stream and without waiting.
//!
//! Without a GPU the tests pass and print SKIPPED. With `REGARD_CUDA_REQUIRED` set they fail.
//! `scripts/candle_cuda.sh` builds and runs them.
#![cfg(feature = "cuda")]

use candle_core::{DType, Device, Result, Tensor};
use half::{bf16, f16};
use regard::oracle::Judge;
use regard::paged::{PageAllocator, Step};
use regard::{DType as Stored, Inputs};
use regard_candle::{
    Attention, CacheFormat, CacheShape, Execution, PagedCache, QueryOffset, Window, attention,
    attention_of_step, attention_with_lse, merge,
};
use std::time::Instant;

#[path = "cuda/streams.rs"]
mod streams;

const CPU: Device = Device::Cpu;

/// The first GPU, or `None` and a line on standard error if there is none.
fn gpu(test: &str) -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(reason) => {
            let required = std::env::var_os("REGARD_CUDA_REQUIRED").is_some();
            assert!(!required, "REGARD_CUDA_REQUIRED is set, and there is no GPU: {reason}");
            // Bypasses the capture of test output, so that a skipped test is visible.
            use std::io::Write;
            let _ = writeln!(std::io::stderr(), "\nSKIPPED, no GPU was used: {test}: {reason}");
            None
        }
    }
}

/// The same numbers on the CPU and, rounded to a type, wherever a test needs them.
fn normal(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::randn(0f32, 1., shape, &CPU).and_then(|x| x.to_dtype(dtype)).expect("a tensor")
}

fn bits(x: &Tensor) -> Vec<u32> {
    let x = x.to_device(&CPU).and_then(|x| x.to_dtype(DType::F32));
    let x = x.and_then(|x| x.flatten_all()).and_then(|x| x.to_vec1::<f32>());
    x.expect("floats").iter().map(|x| x.to_bits()).collect()
}

/// The largest difference of two elements, on any devices.
fn distance(x: &Tensor, y: &Tensor) -> Result<f32> {
    let here = |x: &Tensor| x.to_device(&CPU)?.to_dtype(DType::F32);
    (here(x)? - here(y)?)?.abs()?.max_all()?.to_scalar::<f32>()
}

/// A tensor's elements on the host, in the order of its shape.
enum Data {
    F32(Vec<f32>),
    F16(Vec<f16>),
    BF16(Vec<bf16>),
    I32(Vec<i32>),
    Bool(Vec<u8>),
}

impl Data {
    fn new(x: &Tensor) -> Result<Data> {
        let flat = x.to_device(&CPU)?.flatten_all()?;
        Ok(match x.dtype() {
            DType::F32 => Data::F32(flat.to_vec1()?),
            DType::F16 => Data::F16(flat.to_vec1()?),
            DType::BF16 => Data::BF16(flat.to_vec1()?),
            DType::U8 => Data::Bool(flat.to_vec1()?),
            DType::I32 => Data::I32(flat.to_vec1()?),
            _ => Data::I32(flat.to_vec1::<u32>()?.iter().map(|&x| x as i32).collect()),
        })
    }

    fn tensor(&self, shape: &[usize]) -> regard::Tensor<'_> {
        let tensor = match self {
            Data::F32(data) => regard::Tensor::from_slice(data, shape, None),
            Data::F16(data) => regard::Tensor::from_slice(data, shape, None),
            Data::BF16(data) => regard::Tensor::from_slice(data, shape, None),
            Data::I32(data) => regard::Tensor::from_slice(data, shape, None),
            Data::Bool(data) => regard::Tensor::from_slice(data, shape, None),
        };
        tensor.expect("whole")
    }
}

/// Holds a result to the oracle's tolerance.
fn judge(
    what: &str,
    [q, k, v]: [&Tensor; 3],
    options: &Attention,
    out: &Tensor,
    lse: Option<&Tensor>,
) -> Result<()> {
    let data = |x: &Tensor| Ok::<_, candle_core::Error>((Data::new(x)?, x.dims().to_vec()));
    let operands = [data(q)?, data(k)?, data(v)?];
    let held = options.as_ref().try_map(|_, x| data(x))?;
    let view = |(data, shape): &'_ (Data, Vec<usize>)| -> regard::Tensor<'static> {
        // SAFETY: what it views lives to the end of this function, and so does the view.
        unsafe { std::mem::transmute(data.tensor(shape)) }
    };
    let [q, k, v] = operands.each_ref().map(view);
    let inputs = Inputs::new(q, k, v, held.as_ref().map(|_, x| view(x)));
    let (found, found_lse) = (data(out)?, lse.map(data).transpose()?);
    let dtype = view(&found).dtype();
    let agreement = Judge::new(&inputs, dtype)
        .expect("sound operands")
        .check(&view(&found), found_lse.as_ref().map(view).as_ref());
    agreement.unwrap_or_else(|miss| panic!("{what}: {miss}"));
    Ok(())
}

/// The options with every tensor on that device.
fn on(options: &Attention, device: &Device) -> Result<Attention> {
    options.as_ref().try_map(|_, x| x.to_device(device))
}

/// Every option, alone: two sequences of 7 rows against 33 keys, 6 heads over 2.
fn options(dtype: DType) -> Result<Vec<(&'static str, Attention)>> {
    let none = Attention::default;
    let float_mask = normal(&[1, 6, 7, 33], dtype);
    let keep: Vec<u8> = (0..2 * 7 * 33).map(|i| u8::from(i % 5 != 3)).collect();
    let tree = [0b1u32, 0b11, 0b101, 0b1001, 0b10011, 0b100011, 0b1000101].repeat(2);
    let lens = Tensor::new(&[33u32, 9], &CPU)?;
    Ok(vec![
        ("plain", none()),
        ("causal", Attention::causal()),
        ("scale", Attention { scale: Some(0.3), ..none() }),
        ("window", Attention { window: Window { left: Some(5), right: Some(2) }, ..none() }),
        ("softcap", Attention { softcap: Some(3.0), ..Attention::causal() }),
        ("alibi", Attention { alibi_slopes: Some(normal(&[6], DType::F32)), ..none() }),
        ("sinks", Attention { sinks: Some(normal(&[6], DType::F32)), ..Attention::causal() }),
        ("float mask", Attention { mask: Some(float_mask), ..none() }),
        ("bool mask", {
            let mask = Tensor::from_vec(keep, (2, 1, 7, 33), &CPU)?;
            Attention { mask: Some(mask), ..none() }
        }),
        ("tree mask", {
            let tree_mask = Tensor::from_vec(tree, (2, 7, 1), &CPU)?;
            Attention { tree_mask: Some(tree_mask), ..none() }
        }),
        ("kv_lens", Attention { kv_lens: Some(lens.clone()), ..Attention::causal() }),
        ("q_offset", Attention { q_offset: QueryOffset::Same(11), ..Attention::causal() }),
        ("q_offsets", {
            let offsets = Tensor::new(&[3u32, 26], &CPU)?;
            Attention { q_offset: QueryOffset::PerSequence(offsets), ..Attention::causal() }
        }),
        ("batch-invariant", Attention { batch_invariant: true, ..Attention::causal() }),
        ("many at once", {
            let window = Window { left: Some(20), right: None };
            let sinks = Some(normal(&[6], DType::F32));
            let base = Attention { kv_lens: Some(lens), window, sinks, ..Attention::causal() };
            Attention { softcap: Some(20.0), ..base }
        }),
    ])
}

#[test]
fn every_type_and_option_is_within_the_oracles_tolerance() -> Result<()> {
    let Some(device) = gpu("every_type_and_option") else { return Ok(()) };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for dims in [[64, 64], [40, 24], [128, 128]] {
            // Queries, keys and values side by side, as a fused projection leaves them: strided.
            let fused = normal(&[2, 33, 10, dims[0]], dtype);
            let q = fused.narrow(1, 3, 7)?.narrow(2, 0, 6)?;
            let k = fused.narrow(2, 6, 2)?;
            let v = fused.narrow(2, 8, 2)?.narrow(3, 0, dims[1])?;
            let there = fused.to_device(&device)?;
            let [tq, tk, tv] = [
                there.narrow(1, 3, 7)?.narrow(2, 0, 6)?,
                there.narrow(2, 6, 2)?,
                there.narrow(2, 8, 2)?.narrow(3, 0, dims[1])?,
            ];
            for (name, options) in options(dtype)? {
                let what = format!("{name}, {dtype:?}, dims {dims:?}");
                let moved = on(&options, &device)?;
                let (out, lse) = attention_with_lse(&tq, &tk, &tv, &moved)?;
                assert!(out.device().is_cuda() && out.dtype() == dtype, "{what}");
                judge(&what, [&q, &k, &v], &options, &out, Some(&lse))?;
                let wide = Execution { out_dtype: Some(DType::F32), ..Execution::default() };
                let wide = wide.attention(&tq, &tk, &tv, &moved)?;
                judge(&format!("{what}, to f32"), [&q, &k, &v], &options, &wide, None)?;
            }
        }
    }
    Ok(())
}

#[test]
fn ragged_sequences_and_long_ones() -> Result<()> {
    let Some(device) = gpu("ragged_sequences_and_long_ones") else { return Ok(()) };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (q, k, v) =
            (normal(&[9, 4, 64], dtype), normal(&[20, 2, 64], dtype), normal(&[20, 2, 64], dtype));
        let options = Attention {
            cu_seqlens_q: Some(Tensor::new(&[0u32, 1, 6, 9], &CPU)?),
            cu_seqlens_k: Some(Tensor::new(&[0u32, 9, 15, 20], &CPU)?),
            ..Attention::causal()
        };
        let [tq, tk, tv] = [&q, &k, &v].map(|x| x.to_device(&device));
        let out = attention(&tq?, &tk?, &tv?, &on(&options, &device)?)?;
        judge(&format!("ragged, {dtype:?}"), [&q, &k, &v], &options, &out, None)?;

        // Long enough for splits, and for the kernels of prefill.
        for (rows, keys) in [(1, 3000), (300, 300)] {
            let (q, k) = (normal(&[1, rows, 4, 128], dtype), normal(&[1, keys, 1, 128], dtype));
            let (tq, tk) = (q.to_device(&device)?, k.to_device(&device)?);
            let out = attention(&tq, &tk, &tk, &Attention::causal())?;
            let what = format!("{rows} rows, {keys} keys, {dtype:?}");
            judge(&what, [&q, &k, &k], &Attention::causal(), &out, None)?;
        }
    }
    Ok(())
}

#[test]
fn a_paged_cache_holds_what_the_cpus_does() -> Result<()> {
    let Some(device) = gpu("a_paged_cache_holds_what_the_cpus_does") else { return Ok(()) };
    let shape = CacheShape { layers: 2, blocks: 12, block_size: 4, kv_heads: 2, head_dim: 64 };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        // Appended by the tables of a step, written by slots, and the CPU's.
        let appended = PagedCache::new(shape, dtype, &device)?;
        let written = PagedCache::new(shape, dtype, &device)?;
        let here = PagedCache::new(shape, dtype, &CPU)?;
        let here_appended = PagedCache::new(shape, dtype, &CPU)?;
        let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound sizes");
        let first = pages.create();
        let mut sequences = vec![first];
        let mut step = Step::new();
        for round in 0..5 {
            if round == 1 {
                // Shares six tokens: the first sequence that appends copies the second page.
                sequences.push(pages.fork(first).expect("alive"));
            }
            step.clear();
            for (i, &sequence) in sequences.iter().enumerate() {
                let tokens = if round == 0 { 6 } else { 1 + (round + i) % 3 };
                step.append(&mut pages, sequence, tokens).expect("room");
            }
            step.finish(&pages).expect("alive");
            assert_eq!(step.copies().len(), usize::from(round == 1));
            for cache in [&appended, &written, &here, &here_appended] {
                cache.copy_blocks(step.copies())?;
            }
            let rows = step.tokens();
            let options = attention_of_step(&step, &CPU)?;
            let moved = attention_of_step(&step, &device)?;
            let fused = normal(&[rows, 2, 8, 64], dtype);
            let there = fused.to_device(&device)?;
            for layer in 0..shape.layers {
                let part = |x: &Tensor, first: usize, heads: usize| {
                    x.narrow(1, layer, 1)?.squeeze(1)?.narrow(1, first, heads)
                };
                let (keys, values) = (part(&fused, 4, 2)?, part(&fused, 6, 2)?);
                here.write(layer, &keys, &values, step.slots())?;
                here_appended.append(layer, &keys, &values, &options)?;
                let (keys, values) = (part(&there, 4, 2)?, part(&there, 6, 2)?);
                appended.append(layer, &keys, &values, &moved)?;
                written.write(layer, &keys, &values, step.slots())?;
                let pools = here.pools(layer)?;
                for cache in [&appended, &written, &here_appended] {
                    let found = cache.pools(layer)?;
                    assert_eq!(bits(found.0), bits(pools.0), "{dtype:?} round {round} keys");
                    assert_eq!(bits(found.1), bits(pools.1), "{dtype:?} round {round} values");
                }
                let execution = Execution::default();
                let q = part(&there, 0, 4)?;
                let out = appended.attention(layer, &q, &moved, &execution)?;
                let what = format!("{dtype:?} round {round} layer {layer}");
                let q = part(&fused, 0, 4)?.contiguous()?;
                judge(&what, [&q, pools.0, pools.1], &options, &out, None)?;
            }
        }
    }
    Ok(())
}

/// Codes, blocks and scales, appended by tables and written by slots.
#[test]
fn a_quantized_cache_holds_what_the_cpus_does() -> Result<()> {
    let Some(device) = gpu("a_quantized_cache_holds_what_the_cpus_does") else { return Ok(()) };
    let shape = CacheShape { layers: 1, blocks: 12, block_size: 4, kv_heads: 2, head_dim: 64 };
    let formats = [
        CacheFormat::new(Stored::E4M3),
        CacheFormat::new(Stored::E5M2),
        CacheFormat::new(Stored::I8),
        CacheFormat::new(Stored::Q8_0),
        CacheFormat::new(Stored::Q4_0),
        CacheFormat { keys: Some(Stored::Q8_0), values: Some(Stored::I8) },
    ];
    for format in formats {
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let new = |device| PagedCache::with_format(shape, format, device);
            let (appended, written, here) = (new(&device)?, new(&device)?, new(&CPU)?);
            let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound");
            let first = pages.create();
            let mut sequences = vec![first];
            let mut step = Step::new();
            for round in 0..3 {
                if round == 1 {
                    // Shares six tokens: the first sequence that appends copies the second page.
                    sequences.push(pages.fork(first).expect("alive"));
                }
                step.clear();
                for &sequence in &sequences {
                    let tokens = if round == 0 { 6 } else { 2 };
                    step.append(&mut pages, sequence, tokens).expect("room");
                }
                step.finish(&pages).expect("alive");
                for cache in [&appended, &written, &here] {
                    cache.copy_blocks(step.copies())?;
                }
                let rows = normal(&[step.tokens(), 8, 64], dtype);
                let there = rows.to_device(&device)?;
                let options = attention_of_step(&step, &CPU)?;
                let moved = attention_of_step(&step, &device)?;
                let part = |x: &Tensor, first, heads| x.narrow(1, first, heads);
                let (keys, values) = (part(&rows, 4, 2)?, part(&rows, 6, 2)?);
                here.append(0, &keys, &values, &options)?;
                let (keys, values) = (part(&there, 4, 2)?, part(&there, 6, 2)?);
                appended.append(0, &keys, &values, &moved)?;
                written.write(0, &keys, &values, step.slots())?;
                let what = format!("{format:?} {dtype:?} round {round}");
                let execution =
                    Execution { max_query_len: Some(step.max_query_len()), ..Execution::default() };
                let expected =
                    here.attention(0, &part(&rows, 0, 4)?.contiguous()?, &options, &execution)?;
                for cache in [&appended, &written] {
                    let (found, pools) = (cache.pools(0)?, here.pools(0)?);
                    assert_eq!(bits(found.0), bits(pools.0), "{what} keys");
                    assert_eq!(bits(found.1), bits(pools.1), "{what} values");
                    let out = cache.attention(0, &part(&there, 0, 4)?, &moved, &execution)?;
                    let off = distance(&out, &expected)?;
                    let allowed = if dtype == DType::F32 { 1e-5 } else { 0.03 };
                    assert!(off < allowed, "{what}: {off}");
                }
            }
        }
    }
    Ok(())
}

/// MLA as DeepSeek's models have it: rows of 512 compressed and 64 rotary elements.
#[test]
fn a_latent_cache_holds_what_the_cpus_does() -> Result<()> {
    let Some(device) = gpu("a_latent_cache_holds_what_the_cpus_does") else { return Ok(()) };
    let shape = CacheShape { layers: 1, blocks: 6, block_size: 4, kv_heads: 1, head_dim: 576 };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let caches = [
            PagedCache::latent(shape, 512, dtype, &device)?,
            PagedCache::latent(shape, 512, dtype, &device)?,
        ];
        let here = PagedCache::latent(shape, 512, dtype, &CPU)?;
        let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound sizes");
        let (first, second) = (pages.create(), pages.create());
        let mut step = Step::new();
        step.append(&mut pages, first, 6).expect("room");
        step.append(&mut pages, second, 1).expect("room");
        step.finish(&pages).expect("alive");
        let rows = normal(&[7, 1, 576], dtype);
        let there = rows.to_device(&device)?;
        let options = attention_of_step(&step, &CPU)?;
        let moved = attention_of_step(&step, &device)?;
        here.write_latent(0, &rows, step.slots())?;
        caches[0].append_latent(0, &there, &moved)?;
        caches[1].write_latent(0, &there, step.slots())?;
        let q = normal(&[7, 16, 576], dtype);
        for cache in &caches {
            assert_eq!(bits(cache.pools(0)?.0), bits(here.pools(0)?.0), "{dtype:?}");
            let tq = q.to_device(&device)?;
            let out = cache.attention(0, &tq, &moved, &Execution::default())?;
            let (keys, values) = here.pools(0)?;
            judge(&format!("MLA, {dtype:?}"), [&q, keys, values], &options, &out, None)?;
        }
    }
    Ok(())
}

/// Latent rows in 656 bytes.
#[test]
fn a_latent_cache_of_mla656_holds_what_the_cpus_does() -> Result<()> {
    let name = "a_latent_cache_of_mla656_holds_what_the_cpus_does";
    let Some(device) = gpu(name) else { return Ok(()) };
    let shape = CacheShape { layers: 1, blocks: 6, block_size: 4, kv_heads: 1, head_dim: 576 };
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let (there, here) = (PagedCache::mla656(shape, &device)?, PagedCache::mla656(shape, &CPU)?);
        let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound sizes");
        let (first, second) = (pages.create(), pages.create());
        let mut step = Step::new();
        step.append(&mut pages, first, 6).expect("room");
        step.append(&mut pages, second, 1).expect("room");
        step.finish(&pages).expect("alive");
        let rows = normal(&[7, 1, 576], dtype);
        let moved = attention_of_step(&step, &device)?;
        here.write_latent(0, &rows, step.slots())?;
        there.append_latent(0, &rows.to_device(&device)?, &moved)?;
        assert_eq!(bits(there.pools(0)?.0), bits(here.pools(0)?.0), "{dtype:?}");
        let q = normal(&[7, 16, 576], dtype);
        let execution = Execution::default();
        let expected = here.attention(0, &q, &attention_of_step(&step, &CPU)?, &execution)?;
        let found = there.attention(0, &q.to_device(&device)?, &moved, &execution)?;
        let off = distance(&found, &expected)?;
        let allowed = if dtype == DType::F32 { 1e-4 } else { 0.05 };
        assert!(off < allowed, "{dtype:?}: {off}");
    }
    Ok(())
}

#[test]
fn merged_parts_are_attention_over_all_keys() -> Result<()> {
    let Some(device) = gpu("merged_parts_are_attention_over_all_keys") else { return Ok(()) };
    let (q, k, v) = (
        normal(&[2, 5, 4, 64], DType::F32),
        normal(&[2, 70, 2, 64], DType::F32),
        normal(&[2, 70, 2, 64], DType::F32),
    );
    let none = Attention::default();
    for place in [&CPU, &device] {
        let mut parts = Vec::new();
        let q = q.to_device(place)?;
        for (first, keys) in [(0, 40), (40, 29), (69, 1)] {
            let part = |x: &Tensor| x.narrow(1, first, keys)?.to_device(place);
            parts.push(attention_with_lse(&q, &part(&k)?, &part(&v)?, &none)?);
        }
        let (outs, lses): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        let (outs, lses) = (Tensor::stack(&outs, 0)?, Tensor::stack(&lses, 0)?);
        let (out, lse) = merge(&outs, &lses)?;
        judge(&format!("{place:?}"), [&q, &k, &v], &none, &out, Some(&lse))?;
        for dtype in [DType::F16, DType::BF16] {
            let (out, _) = merge(&outs.to_dtype(dtype)?, &lses)?;
            assert_eq!((out.dtype(), out.dims()), (dtype, &[2, 5, 4, 64][..]));
            let on_cpu = merge(&outs.to_dtype(dtype)?.to_device(&CPU)?, &lses.to_device(&CPU)?)?;
            let (ours, theirs) = (out.to_device(&CPU)?, on_cpu.0);
            let apart = (ours.to_dtype(DType::F32)? - theirs.to_dtype(DType::F32)?)?.abs()?;
            let largest = theirs.to_dtype(DType::F32)?.abs()?.max_all()?.to_scalar::<f32>()?;
            // Both round once: one unit in the last place of the largest element at most.
            let unit = if dtype == DType::F16 { 2f32.powi(-10) } else { 2f32.powi(-7) };
            assert!(apart.max_all()?.to_scalar::<f32>()? <= unit * largest, "{place:?} {dtype:?}");
        }
    }
    Ok(())
}

#[test]
fn drop_ins_are_attention() -> Result<()> {
    use regard_candle as candle_flash_attn;
    let Some(device) = gpu("drop_ins_are_attention") else { return Ok(()) };
    let there = |shape: &[usize], dtype| normal(shape, dtype).to_device(&device);
    for dtype in [DType::F16, DType::BF16] {
        let (q, k, v) = (
            there(&[2, 6, 4, 64], dtype)?,
            there(&[2, 10, 2, 64], dtype)?,
            there(&[2, 10, 2, 64], dtype)?,
        );
        let slopes = there(&[4], DType::F32)?;
        let same = |what: &str, ours: Tensor, options: Attention| -> Result<()> {
            let options = Attention { scale: Some(0.2), ..options };
            assert_eq!(bits(&ours), bits(&attention(&q, &k, &v, &options)?), "{what} {dtype:?}");
            Ok(())
        };
        let window = Window { left: Some(3), right: Some(1) };
        let windowed = || Attention { window, ..Attention::default() };
        let sloped = |base: Attention| Attention { alibi_slopes: Some(slopes.clone()), ..base };
        let out = candle_flash_attn::flash_attn(&q, &k, &v, 0.2, true)?;
        same("flash_attn", out, Attention::causal())?;
        let out = candle_flash_attn::flash_attn_windowed(&q, &k, &v, 0.2, Some(3), Some(1))?;
        same("flash_attn_windowed", out, windowed())?;
        let out = candle_flash_attn::flash_attn_alibi(&q, &k, &v, &slopes, 0.2, false)?;
        same("flash_attn_alibi", out, sloped(Attention::default()))?;
        let out = candle_flash_attn::flash_attn_alibi_windowed_softcap(
            &q,
            &k,
            &v,
            Some(&slopes),
            0.2,
            Some(3),
            Some(1),
            5.0,
        )?;
        let all = Attention { softcap: Some(5.0), ..sloped(windowed()) };
        same("flash_attn_alibi_windowed_softcap", out, all)?;
        let heads = |x: &Tensor| x.transpose(1, 2);
        let out =
            candle_flash_attn::sdpa(&heads(&q)?, &heads(&k)?, &heads(&v)?, None, true, 0.2, 1.0)?;
        same("sdpa", heads(&out)?.contiguous()?, Attention::causal())?;

        let flat = |x: &Tensor| x.flatten(0, 1);
        let starts_q = Tensor::new(&[0u32, 6, 12], &device)?;
        let starts_k = Tensor::new(&[0u32, 10, 20], &device)?;
        let (q, k, v) = (flat(&q)?, flat(&k)?, flat(&v)?);
        let out = candle_flash_attn::flash_attn_varlen(
            &q, &k, &v, &starts_q, &starts_k, 6, 10, 0.2, true,
        )?;
        let options = Attention {
            scale: Some(0.2),
            cu_seqlens_q: Some(starts_q.to_device(&CPU)?),
            cu_seqlens_k: Some(starts_k.to_device(&CPU)?),
            ..Attention::causal()
        };
        judge("flash_attn_varlen", [&q, &k, &v], &options, &out, None)?;
    }
    Ok(())
}

/// Forms that the kernels do not read: transposed keys, lengths of i64, masks of integers, a mask
/// of two dimensions.
#[test]
fn other_forms_are_converted_there() -> Result<()> {
    let Some(device) = gpu("other_forms_are_converted_there") else { return Ok(()) };
    let (q, k) = (normal(&[1, 7, 2, 64], DType::F32), normal(&[1, 33, 2, 64], DType::F32));
    let (tq, tk) = (q.to_device(&device)?, k.to_device(&device)?);
    let transposed = tk.transpose(1, 3)?.contiguous()?.transpose(1, 3)?;
    let lens = Attention { kv_lens: Some(Tensor::new(&[20i64], &CPU)?), ..Attention::causal() };
    let out = attention(&tq, &transposed, &tk, &on(&lens, &device)?)?;
    let lens = Attention { kv_lens: Some(Tensor::new(&[20u32], &CPU)?), ..Attention::causal() };
    judge("transposed keys", [&q, &k, &k], &lens, &out, None)?;
    let keep: Vec<u32> = (0..7 * 33).map(|i| u32::from(i % 4 != 1)).collect();
    let mask = Attention {
        mask: Some(Tensor::from_vec(keep.clone(), (7, 33), &device)?),
        ..Attention::default()
    };
    let out = attention(&tq, &tk, &tk, &mask)?;
    let keep: Vec<u8> = keep.iter().map(|&x| x as u8).collect();
    let mask = Attention {
        mask: Some(Tensor::from_vec(keep, (1, 1, 7, 33), &CPU)?),
        ..Attention::default()
    };
    judge("a mask of u32", [&q, &k, &k], &mask, &out, None)
}

#[test]
fn a_plan_serves_many_calls() -> Result<()> {
    let Some(device) = gpu("a_plan_serves_many_calls") else { return Ok(()) };
    let there = |shape: &[usize]| normal(shape, DType::BF16).to_device(&device);
    let (q, k, v) = (there(&[2, 6, 4, 64])?, there(&[2, 30, 2, 64])?, there(&[2, 30, 2, 64])?);
    let options = Attention::causal();
    let plan = Execution::default().plan(&q, &k, &v, &options)?;
    assert!(plan.explain().contains("4/2 heads"));
    let planned = Execution { plan: Some(plan), ..Execution::default() };
    let unplanned = attention(&q, &k, &v, &options)?;
    assert_eq!(bits(&planned.attention(&q, &k, &v, &options)?), bits(&unplanned));
    let longer = planned.attention(&there(&[2, 7, 4, 64])?, &k, &v, &options);
    let longer = longer.expect_err("7 rows").to_string();
    assert!(longer.contains("`query_len` is 7; allowed: at most 6, as planned"), "{longer}");
    Ok(())
}

/// Calls return while the work before them on candle's stream is still running, and come after it.
#[test]
fn calls_wait_for_nothing() -> Result<()> {
    let Some(device) = gpu("calls_wait_for_nothing") else { return Ok(()) };
    let shape = CacheShape { layers: 1, blocks: 8, block_size: 16, kv_heads: 2, head_dim: 64 };
    let cache = PagedCache::new(shape, DType::BF16, &device)?;
    let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound sizes");
    let mut step = Step::new();
    let sequence = pages.create();
    step.append(&mut pages, sequence, 40).expect("room");
    step.finish(&pages).expect("alive");
    let options = attention_of_step(&step, &device)?;
    let rows = normal(&[40, 2, 64], DType::BF16).to_device(&device)?;
    let q = normal(&[40, 4, 64], DType::BF16).to_device(&device)?;
    let run = |keys: &Tensor| -> Result<Tensor> {
        cache.append(0, keys, keys, &options)?;
        let out = cache.attention(0, &q, &options, &Execution::default())?;
        let parts = Tensor::zeros((2, 40, 4, 64), DType::BF16, &device)?;
        let lse = Tensor::zeros((2, 40, 4), DType::F32, &device)?;
        out + merge(&parts, &lse)?.0
    };
    let want = bits(&run(&rows)?);
    let large = Tensor::zeros((8192, 8192), DType::F32, &device)?;
    let run_late = |products: usize| -> Result<Tensor> {
        let mut late = large.clone();
        for _ in 0..products {
            late = late.matmul(&large)?;
        }
        // Zeros, known when the products are done. Contiguous: candle sends strides to the GPU,
        // and waits for it.
        let zeros = late.flatten_all()?.narrow(0, 0, 40 * 2 * 64)?.to_dtype(DType::BF16)?;
        run(&(&rows + zeros.reshape((40, 2, 64))?)?)
    };
    // Loads candle's kernels, which waits for the GPU too.
    run_late(1)?;
    device.synchronize()?;
    let begun = Instant::now();
    let out = run_late(10)?;
    let queued = begun.elapsed();
    device.synchronize()?;
    let done = begun.elapsed();
    assert!(queued < done / 2, "queued after {queued:?}, done after {done:?}");
    assert_eq!(bits(&out), want);
    Ok(())
}

#[test]
fn bad_input_is_an_error_in_words() -> Result<()> {
    let Some(device) = gpu("bad_input_is_an_error_in_words") else { return Ok(()) };
    let there = |shape: &[usize], dtype| normal(shape, dtype).to_device(&device);
    let refused = |result: Result<Tensor>, expected: &str| {
        let error = result.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    let (q, k) = (there(&[1, 5, 4, 64], DType::F32)?, there(&[1, 12, 2, 64], DType::F32)?);
    let none = Attention::default();
    refused(attention(&q, &k.to_device(&CPU)?, &k, &none), "device");
    let lens = |lens: Tensor| Attention { kv_lens: Some(lens), ..Attention::default() };
    refused(
        attention(&q, &k, &k, &lens(Tensor::new(&[5u32], &CPU)?)),
        "`kv_lens` is on the CPU; allowed: on the CUDA device, where q is",
    );
    refused(attention(&q, &k, &k, &lens(Tensor::new(&[5f32], &device)?)), "`kv_lens` is of type");
    refused(attention(&q.to_dtype(DType::F64)?, &k, &k, &none), "`q` is of type f64");
    refused(attention(&q, &k.narrow(3, 0, 63)?, &k, &none), "`k` is of head dim 63");
    let shape = CacheShape { layers: 1, blocks: 4, block_size: 4, kv_heads: 2, head_dim: 64 };
    let cache = PagedCache::new(shape, DType::F32, &device)?;
    let rows = there(&[3, 2, 64], DType::F32)?;
    let words = |result: Result<()>, expected: &str| {
        let error = result.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    words(cache.write(0, &rows, &rows, &[0, 16, 5]), "`slots[1]` is 16; allowed: 0..16");
    words(cache.write(0, &rows, &rows.to_dtype(DType::F16)?, &[0, 1, 2]), "`values` is f16");
    words(cache.append(0, &rows, &rows, &none), "`block_table` is missing");
    let tables = Attention {
        block_table: Some(Tensor::new(&[[0u32]], &CPU)?),
        kv_lens: Some(Tensor::new(&[3u32], &device)?),
        ..Attention::default()
    };
    words(cache.append(0, &rows, &rows, &tables), "`block_table` is on the CPU");
    assert!(bits(cache.pools(0)?.0).iter().all(|&x| x == 0), "nothing was written");
    Ok(())
}
