//! The paged cache: what is written is what attention reads, wherever it lies.

use candle_core::{DType, Device, Result, Tensor};
use regard::paged::{BlockCopy, PageAllocator, Step};
use regard_candle::{Attention, CacheShape, Execution, PagedCache, attention, attention_of_step};

const CPU: Device = Device::Cpu;
const SHAPE: CacheShape =
    CacheShape { layers: 2, blocks: 12, block_size: 4, kv_heads: 2, head_dim: 8 };

fn normal(shape: &[usize], dtype: DType) -> Tensor {
    Tensor::randn(0f32, 1., shape, &CPU).and_then(|x| x.to_dtype(dtype)).expect("a tensor")
}

fn bits(x: &Tensor) -> Vec<u32> {
    let x = x.to_dtype(DType::F32).and_then(|x| x.flatten_all()).and_then(|x| x.to_vec1::<f32>());
    x.expect("floats").iter().map(|x| x.to_bits()).collect()
}

#[test]
fn sequences_that_share_pages_equal_each_alone() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let cache = PagedCache::new(SHAPE, dtype, &CPU)?;
        assert_eq!(cache.block_bytes(), 2 * 2 * 4 * 2 * 8 * dtype.size_in_bytes());
        let mut pages = PageAllocator::new(SHAPE.blocks, SHAPE.block_size).expect("sound sizes");
        let first = pages.create();
        let mut texts = vec![(first, Vec::new())];
        let mut step = Step::new();
        for round in 0..5 {
            if round == 1 {
                // Shares six tokens, one and a half pages: whoever goes on first copies the second
                // page.
                texts.push((pages.fork(first).expect("alive"), texts[0].1.clone()));
            }
            step.clear();
            let lens: Vec<usize> = (0..texts.len())
                .map(|i| if round == 0 { 6 } else { 1 + (round + i) % 3 })
                .collect();
            for ((sequence, _), &len) in texts.iter().zip(&lens) {
                step.append(&mut pages, *sequence, len).expect("room");
            }
            step.finish(&pages).expect("alive");
            assert_eq!(step.copies().len(), usize::from(round == 1));
            cache.copy_blocks(step.copies())?;

            let rows = step.tokens();
            let options = Attention { batch_invariant: true, ..attention_of_step(&step, &CPU)? };
            // Queries, keys and values side by side, as a fused projection leaves them: nothing is
            // contiguous.
            let fused = normal(&[rows, 2, 8, 8], dtype);
            let mut start = 0;
            for ((_, text), &len) in texts.iter_mut().zip(&lens) {
                text.push(fused.narrow(0, start, len)?);
                start += len;
            }
            for layer in 0..SHAPE.layers {
                let part = |x: &Tensor, first: usize, heads: usize| {
                    x.narrow(1, layer, 1)?.squeeze(1)?.narrow(1, first, heads)
                };
                cache.write(layer, &part(&fused, 4, 2)?, &part(&fused, 6, 2)?, step.slots())?;
                let out = cache.attention(
                    layer,
                    &part(&fused, 0, 4)?,
                    &options,
                    &Execution::default(),
                )?;
                let mut start = 0;
                for ((_, text), &len) in texts.iter().zip(&lens) {
                    let all = Tensor::cat(text, 0)?;
                    let new = all.narrow(0, all.dim(0)? - len, len)?;
                    let alone = attention(
                        &part(&new, 0, 4)?.unsqueeze(0)?,
                        &part(&all, 4, 2)?.unsqueeze(0)?,
                        &part(&all, 6, 2)?.unsqueeze(0)?,
                        &Attention { batch_invariant: true, ..Attention::causal() },
                    )?;
                    assert_eq!(
                        bits(&out.narrow(0, start, len)?),
                        bits(&alone),
                        "{dtype:?} round {round} layer {layer}"
                    );
                    start += len;
                }
            }
        }
    }
    Ok(())
}

/// MLA as DeepSeek's models have it: rows of 512 compressed and 64 rotary elements.
#[test]
fn a_latent_cache_holds_keys_whose_first_elements_are_values() -> Result<()> {
    let shape = CacheShape { kv_heads: 1, head_dim: 576, ..SHAPE };
    for dtype in [DType::F32, DType::BF16] {
        let cache = PagedCache::latent(shape, 512, dtype, &CPU)?;
        assert_eq!(cache.block_bytes(), 2 * 4 * 576 * dtype.size_in_bytes());
        let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound sizes");
        let first = pages.create();
        let mut step = Step::new();
        step.append(&mut pages, first, 6).expect("room");
        step.finish(&pages).expect("alive");
        let prompt = normal(&[6, 1, 576], dtype);
        (0..2).try_for_each(|layer| cache.write_latent(layer, &prompt, step.slots()))?;

        // A page that two sequences share is copied once, and not to itself.
        let second = pages.fork(first).expect("alive");
        step.clear();
        step.append(&mut pages, first, 1).expect("room");
        step.append(&mut pages, second, 3).expect("room");
        step.finish(&pages).expect("alive");
        assert_eq!(step.copies().len(), 1);
        cache.copy_blocks(step.copies())?;
        let new = normal(&[4, 1, 576], dtype);
        let options = Attention { batch_invariant: true, ..attention_of_step(&step, &CPU)? };
        let q = normal(&[4, 16, 576], dtype);
        for layer in 0..2 {
            cache.write_latent(layer, &new, step.slots())?;
            let out = cache.attention(layer, &q, &options, &Execution::default())?;
            assert_eq!(out.dims(), [4, 16, 512]);
            for (start, len) in [(0, 1), (1, 3)] {
                let rows = Tensor::cat(&[&prompt, &new.narrow(0, start, len)?], 0)?.unsqueeze(0)?;
                let alone = attention(
                    &q.narrow(0, start, len)?.unsqueeze(0)?,
                    &rows,
                    &rows.narrow(3, 0, 512)?,
                    &Attention { batch_invariant: true, ..Attention::causal() },
                )?;
                assert_eq!(bits(&out.narrow(0, start, len)?), bits(&alone), "{dtype:?} {start}");
            }
        }
        let refused = |result: Result<()>, expected: &str| {
            let error = result.expect_err(expected).to_string();
            assert!(error.contains(expected), "{error}");
        };
        refused(cache.write(0, &new, &new, &[0; 4]), "`values` is given; allowed: write_latent");
        let halves = PagedCache::new(shape, dtype, &CPU)?;
        refused(halves.write_latent(0, &new, &[0; 4]), "`values` is missing; allowed: write:");
        refused(cache.write_latent(0, &new, &[0, 1, 48, 2]), "`slots[2]` is 48; allowed: 0..48");
        refused(cache.write_latent(0, &new, &[0]), "of shape [4, 1, 576]");
        let long = PagedCache::latent(shape, 577, dtype, &CPU).map(drop);
        refused(long, "`value_dim` is 577; allowed: at most 576");
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let cache = PagedCache::new(SHAPE, DType::F32, &CPU)?;
    let rows = normal(&[3, 2, 8], DType::F32);
    let refused = |result: Result<()>, expected: &str| {
        let error = result.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    cache.write(1, &rows, &rows, &[0, 47, 5])?;
    refused(cache.write(2, &rows, &rows, &[0, 1, 2]), "`layer` is 2; allowed: 0..2");
    refused(cache.write(0, &rows, &rows, &[0, 48, 5]), "`slots[1]` is 48; allowed: 0..48");
    refused(
        cache.write(0, &rows, &rows, &[0, 1]),
        "`keys` is f32 of shape [3, 2, 8]; allowed: f32 of shape [2, 2, 8]",
    );
    refused(cache.write(0, &rows, &rows.to_dtype(DType::F16)?, &[0, 1, 2]), "`values` is f16");
    let (keys, values) = cache.pools(0)?;
    assert!(bits(keys).iter().chain(&bits(values)).all(|&x| x == 0), "nothing was written");
    refused(cache.copy_blocks(&[BlockCopy { from: 0, to: 12, slots: 1 }]), "blocks in 0..12");
    refused(cache.copy_blocks(&[BlockCopy { from: 0, to: 1, slots: 5 }]), "at most 4 slots");
    refused(cache.write(0, keys, values, &[0; 12]), "of shape [12, 4, 2, 8]");
    let (q, execution) = (normal(&[1, 4, 8], DType::F32), Execution::default());
    let untabled = cache.attention(0, &q, &Attention::causal(), &execution);
    assert!(untabled.is_err());
    Ok(())
}
