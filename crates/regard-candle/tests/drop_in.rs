//! The functions with candle's signatures, and the forms of operands that candle's models have,
//! against candle's own matrix products and softmax on the CPU.

use candle_core::{D, DType, Device, Result, Tensor};
use candle_nn::attention::flash_attn_varlen_unfused;
use regard_candle as candle_flash_attn;
use regard_candle::{Attention, Execution, QueryOffset, Window, attention, sdpa};

const CPU: Device = Device::Cpu;
const SCALE: f32 = 0.2;

fn normal(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., shape, &CPU).expect("a tensor")
}

fn bits(x: &Tensor) -> Vec<u32> {
    let x = x.to_dtype(DType::F32).and_then(|x| x.flatten_all()).and_then(|x| x.to_vec1::<f32>());
    x.expect("floats").iter().map(|x| x.to_bits()).collect()
}

/// The modifications of scores, as candle's models apply them.
#[derive(Clone, Default)]
struct Scores {
    softcap: Option<f64>,
    causal: bool,
    left: Option<usize>,
    right: Option<usize>,
    slopes: Option<Vec<f32>>,
    /// Added, of any shape that can be broadcast.
    mask: Option<Tensor>,
}

impl Scores {
    /// The bias of ALiBi, window and causal mask: `[H, Lq, Lk]`, the last query on the last key.
    fn bias(&self, heads: usize, queries: usize, keys: usize) -> Result<Tensor> {
        let mut bias = Vec::new();
        for head in 0..heads {
            for (i, j) in (0..queries).flat_map(|i| (0..keys).map(move |j| (i, j))) {
                let distance = (i + keys).abs_diff(j + queries);
                let before = i + keys >= j + queries;
                let seen = if before {
                    self.left.is_none_or(|left| distance <= left)
                } else {
                    !self.causal && self.right.is_none_or(|right| distance <= right)
                };
                let slope = self.slopes.as_ref().map_or(0.0, |slopes| slopes[head]);
                let finite = -f64::from(slope) * distance as f64;
                bias.push(if seen { finite } else { f64::NEG_INFINITY });
            }
        }
        Tensor::from_vec(bias, (heads, queries, keys), &CPU)
    }
}

/// The matrix product of `[B, H, M, K]` and `[B, H, K, N]`. In f32 term by term, as the tolerance
/// rule's naive computation has it: candle keeps several sums, so its error is smaller by chance.
fn product(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    if a.dtype() != DType::F32 {
        return a.matmul(b);
    }
    let term = |i| a.narrow(3, i, 1)?.broadcast_mul(&b.narrow(2, i, 1)?);
    (1..a.dim(3)?).try_fold(term(0)?, |sum, i| sum + term(i)?)
}

/// Attention of `[B, L, H, D]` by candle's operations, in that type.
fn composed([q, k, v]: [&Tensor; 3], scores: &Scores, dtype: DType) -> Result<Tensor> {
    let query_heads = q.dim(2)?;
    let heads = |x: &Tensor| -> Result<Tensor> {
        let x = x.to_dtype(dtype)?.transpose(1, 2)?.unsqueeze(2)?;
        let (batch, heads, _, rows, dim) = x.dims5()?;
        x.expand((batch, heads, query_heads / heads, rows, dim))?
            .reshape((batch, query_heads, rows, dim))?
            .contiguous()
    };
    let (q, k, v) = (heads(q)?, heads(k)?, heads(v)?);
    let mut s = (product(&q, &k.t()?)? * f64::from(SCALE))?;
    if let Some(cap) = scores.softcap {
        s = ((s / cap)?.tanh()? * cap)?;
    }
    s = s.broadcast_add(&scores.bias(query_heads, q.dim(2)?, k.dim(2)?)?.to_dtype(dtype)?)?;
    if let Some(mask) = &scores.mask {
        s = s.broadcast_add(&mask.to_dtype(dtype)?)?;
    }
    product(&candle_nn::ops::softmax(&s, D::Minus1)?, &v)?.transpose(1, 2)
}

/// The tolerance of the oracle, with candle as the oracle in f64 and as the naive computation in
/// the type of `found`: twice the naive one's error, and one rounding.
fn judge(what: &str, found: &Tensor, expected: impl Fn(DType) -> Result<Tensor>) -> Result<()> {
    let dtype = found.dtype();
    let exact = expected(DType::F64)?;
    assert_eq!(found.dims(), exact.dims(), "{what}");
    let error = |x: &Tensor| -> Result<f64> {
        (x.to_dtype(DType::F64)? - &exact)?.abs()?.max_all()?.to_scalar()
    };
    let naive = error(&expected(dtype)?)?;
    let rounding = match dtype {
        DType::F32 => f64::from(f32::EPSILON),
        DType::F16 => 2f64.powi(-10),
        _ => 2f64.powi(-7),
    };
    let largest = exact.abs()?.max_all()?.to_scalar::<f64>()?;
    let found = error(found)?;
    assert!(found <= 2.0 * naive + rounding * largest, "{what}: {found}, candle's: {naive}");
    Ok(())
}

/// Slopes of four heads.
fn slopes() -> (Tensor, Vec<f32>) {
    let slopes = vec![0.5f32, 0.25, 0.125, 0.0625];
    (Tensor::new(&slopes[..], &CPU).expect("a vector"), slopes)
}

#[test]
fn dense_calls_equal_candles_computation() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let tensor = |shape: &[usize]| normal(shape).to_dtype(dtype);
        let (q, k) = (tensor(&[2, 7, 4, 24])?, tensor(&[2, 11, 2, 24])?);
        let v = tensor(&[2, 11, 2, 24])?;
        let (alibi, slopes) = slopes();
        let check = |what: &str, found: Result<Tensor>, scores: Scores| {
            judge(what, &found?, |dtype| composed([&q, &k, &v], &scores, dtype))
        };
        for causal in [false, true] {
            let scores = Scores { causal, ..Scores::default() };
            let found = candle_flash_attn::flash_attn(&q, &k, &v, SCALE, causal);
            check("flash_attn", found, scores.clone())?;
            let scores = Scores { slopes: Some(slopes.clone()), ..scores };
            let found = candle_flash_attn::flash_attn_alibi(&q, &k, &v, &alibi, SCALE, causal);
            check("flash_attn_alibi", found, scores)?;
        }
        for (left, right) in [
            (None, None),
            (None, Some(0)),
            (Some(3), Some(0)),
            (Some(2), Some(1)),
            (Some(4), None),
            (None, Some(2)),
            (Some(100), Some(100)),
        ] {
            let scores = Scores { left, right, ..Scores::default() };
            let found = candle_flash_attn::flash_attn_windowed(&q, &k, &v, SCALE, left, right);
            check("flash_attn_windowed", found, scores.clone())?;
            let sloped = Scores { slopes: Some(slopes.clone()), ..scores.clone() };
            let found = candle_flash_attn::flash_attn_alibi_windowed(
                &q, &k, &v, &alibi, SCALE, left, right,
            );
            check("flash_attn_alibi_windowed", found, sloped.clone())?;
            for (softcap, cap) in [(0.0, None), (1.5, Some(1.5))] {
                for (alibi, scores) in [(None, &scores), (Some(&alibi), &sloped)] {
                    let found = candle_flash_attn::flash_attn_alibi_windowed_softcap(
                        &q, &k, &v, alibi, SCALE, left, right, softcap,
                    );
                    let scores = Scores { softcap: cap, ..scores.clone() };
                    check("flash_attn_alibi_windowed_softcap", found, scores)?;
                }
            }
        }
    }
    Ok(())
}

/// Lengths of queries and of keys of three sequences, and their sums.
const LENS: [(usize, usize); 3] = [(1, 9), (5, 6), (3, 5)];
const SUMS: [[u32; 4]; 2] = [[0, 1, 6, 9], [0, 9, 15, 20]];

/// Each sequence alone, by candle's operations, one after the other.
fn composed_ragged([q, k, v]: [&Tensor; 3], scores: &Scores, dtype: DType) -> Result<Tensor> {
    let sequences = (0..LENS.len()).map(|i| {
        let part = |x: &Tensor, sums: &[u32], len| x.narrow(0, sums[i] as usize, len)?.unsqueeze(0);
        let (queries, keys) = LENS[i];
        let q = part(q, &SUMS[0], queries)?;
        let (k, v) = (part(k, &SUMS[1], keys)?, part(v, &SUMS[1], keys)?);
        composed([&q, &k, &v], scores, dtype)?.squeeze(0)
    });
    Tensor::cat(&sequences.collect::<Result<Vec<_>>>()?, 0)
}

#[test]
fn ragged_calls_equal_candles_computation() -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        let tensor = |shape: &[usize]| normal(shape).to_dtype(dtype);
        let (q, k) = (tensor(&[9, 4, 16])?, tensor(&[20, 2, 16])?);
        let v = tensor(&[20, 2, 16])?;
        let (alibi, slopes) = slopes();
        let [sums_q, sums_k] = SUMS.map(|sums| Tensor::new(&sums, &CPU));
        let (sums_q, sums_k) = (sums_q?, sums_k?);
        let check = |what: &str, found: Result<Tensor>, scores: Scores| {
            judge(what, &found?, |dtype| composed_ragged([&q, &k, &v], &scores, dtype))
        };
        for causal in [false, true] {
            let scores = Scores { causal, ..Scores::default() };
            let found = candle_flash_attn::flash_attn_varlen(
                &q, &k, &v, &sums_q, &sums_k, 5, 9, SCALE, causal,
            );
            check("flash_attn_varlen", found, scores.clone())?;
            let found = candle_flash_attn::flash_attn_varlen_alibi(
                &q, &k, &v, &alibi, &sums_q, &sums_k, 5, 9, SCALE, causal,
            );
            let scores = Scores { slopes: Some(slopes.clone()), ..scores };
            check("flash_attn_varlen_alibi", found, scores)?;
        }
        for (left, right) in [(None, None), (Some(3), Some(0)), (Some(2), Some(1))] {
            let scores = Scores { left, right, ..Scores::default() };
            let sloped = Scores { slopes: Some(slopes.clone()), ..scores.clone() };
            let found = candle_flash_attn::flash_attn_varlen_windowed(
                &q, &k, &v, &sums_q, &sums_k, 5, 9, SCALE, left, right,
            );
            check("flash_attn_varlen_windowed", found, scores)?;
            let found = candle_flash_attn::flash_attn_varlen_alibi_windowed(
                &q, &k, &v, &alibi, &sums_q, &sums_k, 5, 9, SCALE, left, right,
            );
            check("flash_attn_varlen_alibi_windowed", found, sloped.clone())?;
            let found = candle_flash_attn::flash_attn_varlen_alibi_windowed_softcap(
                &q,
                &k,
                &v,
                Some(&alibi),
                &sums_q,
                &sums_k,
                5,
                9,
                SCALE,
                left,
                right,
                1.5,
            );
            let capped = Scores { softcap: Some(1.5), ..sloped };
            check("flash_attn_varlen_alibi_windowed_softcap", found, capped)?;
        }
    }
    Ok(())
}

/// candle-nn's function of the same name takes lengths in the place of their sums.
#[test]
fn ragged_calls_equal_candle_nns() -> Result<()> {
    let (q, k, v) = (normal(&[9, 4, 16]), normal(&[20, 2, 16]), normal(&[20, 2, 16]));
    let (alibi, _) = slopes();
    let [sums_q, sums_k] = SUMS.map(|sums| Tensor::new(&sums, &CPU));
    let (sums_q, sums_k) = (sums_q?, sums_k?);
    let lens_q = Tensor::new(&LENS.map(|(queries, _)| queries as u32), &CPU)?;
    let lens_k = Tensor::new(&LENS.map(|(_, keys)| keys as u32), &CPU)?;
    for (left, right) in [(Some(100), Some(0)), (Some(3), Some(0)), (Some(2), Some(1))] {
        let found = candle_flash_attn::flash_attn_varlen_alibi_windowed(
            &q, &k, &v, &alibi, &sums_q, &sums_k, 5, 9, SCALE, left, right,
        )?;
        judge("candle-nn", &found, |dtype| {
            let [q, k, v] = [&q, &k, &v].map(|x| x.to_dtype(dtype));
            flash_attn_varlen_unfused(
                &q?,
                &k?,
                &v?,
                Some(&alibi),
                &lens_q,
                &lens_k,
                5,
                9,
                SCALE,
                false,
                left,
                right,
            )
        })?;
    }
    Ok(())
}

#[test]
fn paged_calls_equal_ragged_ones() -> Result<()> {
    let (q, pools) = (normal(&[9, 4, 16]), [normal(&[8, 4, 2, 16]), normal(&[8, 4, 2, 16])]);
    let table = [[5u32, 2, 7], [0, 3, 0], [6, 1, 0]];
    let rows = |pool: &Tensor| -> Result<Tensor> {
        let sequences = table.iter().zip(LENS).map(|(blocks, (_, keys))| {
            let blocks = Tensor::new(blocks, &CPU)?;
            pool.index_select(&blocks, 0)?.flatten(0, 1)?.narrow(0, 0, keys)
        });
        Tensor::cat(&sequences.collect::<Result<Vec<_>>>()?, 0)
    };
    let (k, v) = (rows(&pools[0])?, rows(&pools[1])?);
    let table = Tensor::new(&table, &CPU)?;
    let [sums_q, sums_k] = SUMS.map(|sums| Tensor::new(&sums, &CPU));
    let (sums_q, sums_k) = (sums_q?, sums_k?);
    let paged = |ranges: Option<&Tensor>, block_size, sums_k: &Tensor, left, right, softcap| {
        candle_flash_attn::flash_attn_varlen_paged_windowed(
            &q, &pools[0], &pools[1], &sums_q, sums_k, &table, ranges, 5, 9, SCALE, left, right,
            block_size, softcap,
        )
    };
    for (left, right, softcap) in [(None, Some(0), None), (Some(3), Some(0), Some(1.5))] {
        let scores = Scores { left, right, softcap: softcap.map(f64::from), ..Scores::default() };
        let found = paged(None, 4, &sums_k, left, right, softcap)?;
        judge("paged", &found, |dtype| composed_ragged([&q, &k, &v], &scores, dtype))?;
    }
    let refused = |found: Result<Tensor>, expected: &str| {
        let error = found.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    let ranges = Tensor::zeros((3, 1, 2), DType::I32, &CPU)?;
    let given = "`mm_prefix_ranges` is given, of shape [3, 1, 2]; allowed: none";
    refused(paged(Some(&ranges), 4, &sums_k, None, None, None), given);
    refused(paged(None, 8, &sums_k, None, None, None), "[blocks, 8, Hkv, D]");
    let falling = Tensor::new(&[0u32, 9, 4, 20], &CPU)?;
    refused(paged(None, 4, &falling, None, None, None), "`kv_lens[1]` is -5");
    refused(paged(None, 4, &sums_k.narrow(0, 0, 0)?, None, None, None), "`seqlens_k` is empty");
    Ok(())
}

#[test]
fn sdpa_equals_candles_computation() -> Result<()> {
    let (q, k, v) = (normal(&[2, 7, 4, 16]), normal(&[2, 11, 2, 16]), normal(&[2, 11, 2, 24]));
    let heads_first = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let (first_q, first_k, first_v) = (heads_first(&q)?, heads_first(&k)?, heads_first(&v)?);
    let call = |mask: Option<&Tensor>, causal, cap| {
        sdpa(&first_q, &first_k, &first_v, mask, causal, SCALE, cap)?.transpose(1, 2)
    };
    let check = |what: &str, found: Result<Tensor>, scores: Scores| {
        judge(what, &found?, |dtype| composed([&q, &k, &v], &scores, dtype))
    };
    check("plain", call(None, false, 1.0), Scores::default())?;
    check("causal", call(None, true, 1.0), Scores { causal: true, ..Scores::default() })?;
    let capped = Scores { softcap: Some(0.8), ..Scores::default() };
    check("softcap", call(None, false, 0.8), capped)?;

    // Floats of any shape that candle broadcasts, with and without causality.
    for shape in [&[2, 4, 7, 11][..], &[2, 1, 1, 11], &[4, 7, 11], &[1, 7, 11], &[7, 11], &[11]] {
        for causal in [false, true] {
            let mask = normal(shape);
            let scores = Scores { mask: Some(mask.clone()), causal, ..Scores::default() };
            check(&format!("mask {shape:?}"), call(Some(&mask), causal, 1.0), scores.clone())?;
            let wide = mask.broadcast_as((2, 4, 7, 11))?;
            check(&format!("strides of 0, {shape:?}"), call(Some(&wide), causal, 1.0), scores)?;
        }
    }
    let three = first_q.narrow(0, 0, 1)?.squeeze(0)?;
    let error = sdpa(&three, &first_k, &first_v, None, false, SCALE, 1.0).expect_err("rank 3");
    assert!(error.to_string().contains("allowed: 4 dimensions: [B, H, L, D]"), "{error}");
    Ok(())
}

/// Bits of attention with these options.
fn run(operands: [&Tensor; 3], options: Attention) -> Result<Vec<u32>> {
    let [q, k, v] = operands;
    let options = Attention { batch_invariant: true, ..options };
    let planned = Execution {
        plan: Some(Execution::default().plan(q, k, v, &options)?),
        ..Execution::default()
    };
    let out = bits(&attention(q, k, v, &options)?);
    assert_eq!(bits(&planned.attention(q, k, v, &options)?), out);
    Ok(out)
}

#[test]
fn masks_of_every_integer_type_and_rank_are_read() -> Result<()> {
    let (q, k, v) = (normal(&[2, 5, 4, 8]), normal(&[2, 12, 2, 8]), normal(&[2, 12, 2, 8]));
    let of =
        |mask: Tensor| run([&q, &k, &v], Attention { mask: Some(mask), ..Attention::default() });
    let kept = Tensor::from_iter((0..60).map(|i| u32::from(i % 7 != 3) * 256), &CPU)?;
    let kept = kept.reshape((5, 12))?;
    let expected = of(kept.ne(0u32)?.reshape((1, 1, 5, 12))?)?;
    for dtype in [DType::U32, DType::I16, DType::I32, DType::I64] {
        assert_eq!(of(kept.to_dtype(dtype)?)?, expected, "{dtype:?}");
        let wide = kept.to_dtype(dtype)?.broadcast_as((2, 4, 5, 12))?;
        assert_eq!(of(wide)?, expected, "{dtype:?}, strides of 0");
    }
    assert_eq!(of(kept.ne(0u32)?)?, expected, "u8");
    let across = kept.t()?.contiguous()?.t()?;
    assert_eq!(of(across.ne(0u32)?)?, expected);
    assert_eq!(of(across.clone())?, expected, "transposed");

    // Hides whole sequences and heads of rows: one number for every key.
    let rows = Tensor::from_iter((0..5).map(|i| u8::from(i != 2)), &CPU)?.reshape((5, 1))?;
    let every_key = rows.broadcast_as((5, 12))?;
    assert_eq!(every_key.stride(), [1, 0]);
    assert_eq!(of(every_key.clone())?, of(every_key.contiguous()?)?);

    let bias = normal(&[5, 12]);
    assert_eq!(of(bias.to_dtype(DType::F64)?)?, of(bias.clone())?);
    let error = of(kept.narrow(1, 0, 11)?).expect_err("11 of 12 keys").to_string();
    assert!(error.contains("`mask` is of shape [1, 1, 5, 11]"), "{error}");
    Ok(())
}

#[test]
fn lengths_positions_and_tables_of_64_bits_are_read() -> Result<()> {
    let (q, k, v) = (normal(&[2, 5, 4, 8]), normal(&[2, 12, 2, 8]), normal(&[2, 12, 2, 8]));
    let (lens, offsets) = ([7i64, 12], [-1i64, 4]);
    let of = |dtype| -> Result<Vec<u32>> {
        let options = Attention {
            kv_lens: Some(Tensor::new(&lens, &CPU)?.to_dtype(dtype)?),
            q_offset: QueryOffset::PerSequence(Tensor::new(&offsets, &CPU)?.to_dtype(dtype)?),
            ..Attention::causal()
        };
        run([&q, &k, &v], options)
    };
    assert_eq!(of(DType::I64)?, of(DType::I32)?);

    let (rows, pools) = (normal(&[9, 4, 8]), [normal(&[8, 4, 2, 8]), normal(&[8, 4, 2, 8])]);
    let of = |dtype| -> Result<Vec<u32>> {
        let table = Tensor::new(&[[5u32, 2, 7], [0, 3, 0], [6, 1, 0]], &CPU)?;
        let options = Attention {
            cu_seqlens_q: Some(Tensor::new(&SUMS[0], &CPU)?.to_dtype(dtype)?),
            kv_lens: Some(Tensor::new(&[9u32, 6, 5], &CPU)?.to_dtype(dtype)?),
            block_table: Some(table.to_dtype(dtype)?),
            ..Attention::causal()
        };
        run([&rows, &pools[0], &pools[1]], options)
    };
    assert_eq!(of(DType::I64)?, of(DType::U32)?);

    let refused = |lens: &[i64], expected: &str| -> Result<()> {
        let lens = Tensor::new(lens, &CPU)?;
        let options = Attention { kv_lens: Some(lens), ..Attention::default() };
        let error = attention(&q, &k, &v, &options).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        Ok(())
    };
    refused(&[13, 12], "`kv_lens[0]` is 13; allowed: 0..=12")?;
    refused(&[7, -1], "`kv_lens[1]` is -1")?;
    // 2^32 + 7 is not 7.
    refused(&[7, (1 << 32) + 7], "`kv_lens[1]` is 2147483647")?;
    refused(&[-(1 << 32) + 7, 7], "`kv_lens[0]` is -2147483648")
}

#[test]
fn operands_with_any_strides_are_read() -> Result<()> {
    let (q, k, v) = (normal(&[2, 5, 4, 8]), normal(&[2, 12, 2, 8]), normal(&[2, 12, 2, 8]));
    let window = Window { left: Some(5), right: None };
    let options = || Attention { window, ..Attention::causal() };
    let expected = run([&q, &k, &v], options())?;
    // `[B, H, D, L]` in memory, as caches of transposed keys are.
    let across = |x: &Tensor| {
        let x = x.permute((0, 2, 3, 1))?.contiguous()?.permute((0, 3, 1, 2))?;
        assert_ne!(x.stride()[3], 1);
        Ok::<_, candle_core::Error>(x)
    };
    assert_eq!(run([&q, &across(&k)?, &v], options())?, expected, "transposed keys");
    assert_eq!(run([&across(&q)?, &across(&k)?, &across(&v)?], options())?, expected, "all");

    // One key and value for every element of the head dim, every head, and every sequence.
    let flat = normal(&[1, 12, 1, 1]).broadcast_as((2, 12, 2, 8))?;
    assert_eq!(flat.stride(), [0, 1, 0, 0]);
    let copied = flat.contiguous()?;
    assert_eq!(run([&q, &flat, &flat], options())?, run([&q, &copied, &copied], options())?);
    let wide = normal(&[1, 1, 2, 8]).broadcast_as((2, 12, 2, 8))?;
    let copied = wide.contiguous()?;
    assert_eq!(run([&q, &wide, &wide], options())?, run([&q, &copied, &copied], options())?);

    // Slopes and sinks: one for all heads, a column, and of another type.
    let of = |slopes: Tensor, sinks: Tensor| {
        let options =
            Attention { alibi_slopes: Some(slopes), sinks: Some(sinks), ..Attention::causal() };
        run([&q, &k, &v], options)
    };
    let one = |x: f32| Tensor::full(x, 1, &CPU)?.broadcast_as(4);
    assert_eq!(of(one(0.5)?, one(2.0)?)?, of(one(0.5)?.contiguous()?, one(2.0)?.contiguous()?)?);
    let columns = normal(&[4, 2]);
    let column = |i| columns.narrow(1, i, 1)?.squeeze(1);
    assert_eq!(
        of(column(0)?, column(1)?)?,
        of(column(0)?.contiguous()?, column(1)?.contiguous()?)?
    );
    let half = columns.to_dtype(DType::BF16)?;
    let (slopes, sinks) = (half.narrow(1, 0, 1)?.squeeze(1)?, half.narrow(1, 1, 1)?.squeeze(1)?);
    let single = |x: &Tensor| x.to_dtype(DType::F32)?.contiguous();
    assert_eq!(of(slopes.clone(), sinks.clone())?, of(single(&slopes)?, single(&sinks)?)?);

    // A pool is not copied for a call: its rows have to be contiguous.
    let pool = normal(&[4, 3, 2, 8]);
    let options = Attention {
        kv_lens: Some(Tensor::new(&[5u32, 6], &CPU)?),
        block_table: Some(Tensor::new(&[[0u32, 1], [2, 3]], &CPU)?),
        ..Attention::causal()
    };
    let error = attention(&q, &across(&pool)?, &pool, &options).expect_err("a pool").to_string();
    assert!(error.contains("an innermost stride of 1"), "{error}");
    Ok(())
}
