//! The paged cache: attention reads the rows that were written, for any pages.

use candle_core::{DType, Device, Result, Tensor};
use regard::paged::{BlockCopy, PageAllocator, Step};
use regard_candle::{
    Attention, CacheShape, Execution, PagedCache, attention, attention_of_step, attention_with_lse,
    grouped_attention_of_step, merge,
};

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
        let appended = PagedCache::new(SHAPE, dtype, &CPU)?;
        assert_eq!(cache.block_bytes(), 2 * 2 * 4 * 2 * 8 * dtype.size_in_bytes());
        let mut pages = PageAllocator::new(SHAPE.blocks, SHAPE.block_size).expect("sound sizes");
        let first = pages.create();
        let mut texts = vec![(first, Vec::new())];
        let mut step = Step::new();
        for round in 0..5 {
            if round == 1 {
                // Shares six tokens, one and a half pages: the first sequence that appends copies
                // the second page.
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
            appended.copy_blocks(step.copies())?;

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
                let (keys, values) = (part(&fused, 4, 2)?, part(&fused, 6, 2)?);
                cache.write(layer, &keys, &values, step.slots())?;
                appended.append(layer, &keys, &values, &options)?;
                let (written, found) = (cache.pools(layer)?, appended.pools(layer)?);
                assert_eq!(bits(found.0), bits(written.0), "{dtype:?} round {round} keys");
                assert_eq!(bits(found.1), bits(written.1), "{dtype:?} round {round} values");
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
            cache.append_latent(layer, &new, &options)?;
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
        refused(cache.append(0, &new, &new, &options), "`values` is given; allowed: append_latent");
        let halved = halves.append_latent(0, &new, &options);
        refused(halved, "`values` is missing; allowed: append:");
        refused(halves.write_latent(0, &new, &[0; 4]), "`values` is missing; allowed: write:");
        refused(cache.write_latent(0, &new, &[0, 1, 48, 2]), "`slots[2]` is 48; allowed: 0..48");
        refused(cache.write_latent(0, &new, &[0]), "of shape [4, 1, 576]");
        let long = PagedCache::latent(shape, 577, dtype, &CPU).map(drop);
        refused(long, "`value_dim` is 577; allowed: at most 576");
    }
    Ok(())
}

/// Rows of 656 bytes hold what `quantize_blocks` makes of the new ones.
#[test]
fn a_latent_cache_of_656_byte_rows() -> Result<()> {
    use regard::format::Mla656;
    let shape = CacheShape { kv_heads: 1, head_dim: 576, ..SHAPE };
    let (cache, exact) =
        (PagedCache::mla656(shape, &CPU)?, PagedCache::latent(shape, 512, DType::F32, &CPU)?);
    assert_eq!(cache.block_bytes(), 2 * 4 * 656);
    let rows = normal(&[6, 1, 576], DType::F32);
    let numbers = rows.flatten_all()?.to_vec1::<f32>()?;
    let stored = numbers.as_chunks().0.iter().flat_map(|row| Mla656::from_f32(row).to_f64());
    let stored: Vec<f32> = stored.map(|x| x as f32).collect();
    let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound sizes");
    let sequence = pages.create();
    let mut step = Step::new();
    step.append(&mut pages, sequence, 6).expect("room");
    step.finish(&pages).expect("alive");
    let options = attention_of_step(&step, &CPU)?;
    cache.write_latent(1, &rows, step.slots())?;
    exact.write_latent(1, &Tensor::from_vec(stored, (6, 1, 576), &CPU)?, step.slots())?;
    let q = normal(&[6, 16, 576], DType::F32);
    let out = |cache: &PagedCache| cache.attention(1, &q, &options, &Execution::default());
    let difference = (out(&cache)? - out(&exact)?)?.abs()?.flatten_all()?.max(0)?;
    assert!(difference.to_scalar::<f32>()? < 1e-5, "{difference}");
    let narrow = PagedCache::mla656(CacheShape { head_dim: 512, ..shape }, &CPU).map(drop);
    let error = narrow.expect_err("512 dims").to_string();
    assert!(error.contains("`head_dim` is 512; allowed: 576"), "{error}");
    Ok(())
}

#[test]
fn operands_that_do_not_fit_are_refused() -> Result<()> {
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

/// Tokens that the tables give no slot are dropped: a short table, an entry that names no block,
/// rows that no sequence has.
#[test]
fn tokens_without_a_slot_are_dropped() -> Result<()> {
    let cache = PagedCache::new(SHAPE, DType::F32, &CPU)?;
    let rows = normal(&[7, 2, 8], DType::F32);
    let tables = |lens: &[u32], table: &[[u32; 2]; 2]| -> Result<Attention> {
        Ok(Attention {
            cu_seqlens_q: Some(Tensor::new(&[0u32, 2, 6], &CPU)?),
            kv_lens: Some(Tensor::new(lens, &CPU)?),
            block_table: Some(Tensor::new(table, &CPU)?),
            ..Attention::causal()
        })
    };
    // Of the first sequence token 7 has a slot and token 8 none; of the second tokens 0 to 3 are in
    // a block that does not exist.
    cache.append(0, &rows, &rows, &tables(&[9, 4], &[[3, 1], [u32::MAX, 2]])?)?;
    let keys = cache.pools(0)?.0.reshape((48, 16))?;
    let written = keys.abs()?.sum(1)?.to_vec1::<f32>()?;
    let found: Vec<usize> = (0..48).filter(|&slot| written[slot] != 0.0).collect();
    assert_eq!(found, [4 + 3]);
    assert_eq!(bits(&keys.narrow(0, 7, 1)?), bits(&rows.narrow(0, 0, 1)?));

    let refused = |attention: &Attention, expected: &str| {
        let error = cache.append(0, &rows, &rows, attention).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(&Attention::causal(), "`block_table` is missing; allowed: a table of the step");
    let even = Attention { cu_seqlens_q: None, ..tables(&[9, 4], &[[3, 1], [0, 2]])? };
    refused(&even, "missing with 7 tokens of 2 sequences");
    refused(&tables(&[9], &[[3, 1], [0, 2]])?, "`kv_lens and cu_seqlens_q` is of 1 and 3 elements");
    Ok(())
}

#[test]
fn merged_parts_are_attention_over_all_keys() -> Result<()> {
    let (q, k, v) = (
        normal(&[2, 5, 4, 16], DType::F32),
        normal(&[2, 70, 2, 16], DType::F32),
        normal(&[2, 70, 2, 16], DType::F32),
    );
    let none = Attention::default();
    let mut parts = Vec::new();
    for (first, keys) in [(0, 40), (40, 29), (69, 1)] {
        let part = |x: &Tensor| x.narrow(1, first, keys);
        parts.push(attention_with_lse(&q, &part(&k)?, &part(&v)?, &none)?);
    }
    let (outs, lses): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    let (out, lse) = merge(&Tensor::stack(&outs, 0)?, &Tensor::stack(&lses, 0)?)?;
    let whole = attention_with_lse(&q, &k, &v, &none)?;
    for (found, expected) in [(&out, &whole.0), (&lse, &whole.1)] {
        assert_eq!(found.dims(), expected.dims());
        let apart = (found - expected)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(apart < 1e-5, "{apart}");
    }
    let alone = merge(&Tensor::stack(&outs[..1], 0)?, &Tensor::stack(&lses[..1], 0)?)?;
    assert_eq!(bits(&alone.0), bits(&outs[0]));
    let error = merge(&out, &out).expect_err("no log-sum-exps").to_string();
    assert!(error.contains("`part_lse` is"), "{error}");
    Ok(())
}

/// Sequences that share pages read them together: the result is within the tolerance of the same
/// step without groups, and the bits are those of regard on plain slices.
#[test]
fn prefix_groups_of_a_step_change_no_result() -> Result<()> {
    let shape = CacheShape { layers: 1, blocks: 40, ..SHAPE };
    let cache = PagedCache::new(shape, DType::F32, &CPU)?;
    let mut pages = PageAllocator::new(shape.blocks, shape.block_size).expect("sound sizes");
    let (common, lone) = (pages.create(), pages.create());
    let mut step = Step::new();
    step.append(&mut pages, common, 66).expect("room");
    step.append(&mut pages, lone, 9).expect("room");
    step.finish(&pages).expect("alive");
    assert!(!step.has_prefix_groups());
    let (keys, values) = (normal(&[75, 2, 8], DType::F32), normal(&[75, 2, 8], DType::F32));
    cache.write(0, &keys, &values, step.slots())?;

    step.clear();
    step.append(&mut pages, lone, 3).expect("room");
    for len in [1, 5, 1] {
        let fork = pages.fork(common).expect("alive");
        step.append(&mut pages, fork, len).expect("room");
    }
    step.finish(&pages).expect("alive");
    assert!(step.has_prefix_groups());
    assert_eq!((step.prefix_groups(), step.prefix_lens()[0]), (&[-1, 0, 0, 0][..], 64));
    cache.copy_blocks(step.copies())?;
    let (keys, values) = (normal(&[10, 2, 8], DType::F32), normal(&[10, 2, 8], DType::F32));
    cache.write(0, &keys, &values, step.slots())?;
    let q = normal(&[10, 4, 8], DType::F32);
    let run = |options: &Attention| cache.attention(0, &q, options, &Execution::default());
    let grouped = run(&grouped_attention_of_step(&step, &CPU)?)?;

    let data = |x: &Tensor| x.flatten_all().and_then(|x| x.to_vec1::<f32>());
    let (keys, values) = cache.pools(0)?;
    let (qs, ks, vs, found) = (data(&q)?, data(keys)?, data(values)?, data(&grouped)?);
    let view = |data, x: &Tensor| regard::Tensor::from_slice(data, x.dims(), None).expect("whole");
    let (q, k, v) = (view(&qs, &q), view(&ks, keys), view(&vs, values));
    let plain: Vec<f32> = regard::attention(q, k, v, &step.grouped_attention()).expect("sound");
    assert_eq!(found, plain);
    let flat = regard::Inputs::new(q, k, v, step.attention());
    let judge = regard::oracle::Judge::new(&flat, regard::DType::F32).expect("sound");
    judge.check(&view(&found, &grouped), None).unwrap_or_else(|miss| panic!("{miss:?}"));
    Ok(())
}
