//! The custom op against regard on plain slices, against the f64 oracle, and against candle's own
//! attention.

use candle_core::{D, DType, Device, Result, Tensor, Var, WithDType};
use candle_nn::attention::{AttnMask, flash_attn};
use half::{bf16, f16};
use regard::oracle::Judge;
use regard::{Float, Inputs};
use regard_candle::{Attention, Execution, QueryOffset, Window, attention, attention_with_lse};

const CPU: Device = Device::Cpu;

fn normal(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., shape, &CPU).expect("a tensor")
}

/// The elements in the order of the shape, for any strides.
fn elements(x: &Tensor) -> Vec<f32> {
    x.to_dtype(DType::F32)
        .expect("floats")
        .flatten_all()
        .expect("any shape")
        .to_vec1()
        .expect("f32")
}

fn bits(x: &Tensor) -> Vec<u32> {
    elements(x).iter().map(|x| x.to_bits()).collect()
}

/// Batch-invariant, so that bits do not depend on how many threads there are.
fn invariant(options: Attention) -> Attention {
    Attention { batch_invariant: true, ..options }
}

#[test]
fn strides_and_offsets_are_read_where_they_lie() -> Result<()> {
    let options = invariant(Attention::causal());
    // Everything in one tensor, as a fused projection leaves it: [batch, sequence, q heads + k
    // heads + v heads, dim].
    let fused = normal(&[2, 9, 8, 16]);
    let (q, k, v) = (fused.narrow(2, 0, 4)?, fused.narrow(2, 4, 2)?, fused.narrow(2, 6, 2)?);
    let expected = attention(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?, &options)?;
    assert_eq!(bits(&attention(&q, &k, &v, &options)?), bits(&expected));
    // [batch, head, sequence, dim] in memory.
    let head_major = |x: &Tensor| x.transpose(1, 2)?.contiguous()?.transpose(1, 2);
    assert_eq!(
        bits(&attention(&head_major(&q)?, &head_major(&k)?, &v, &options)?),
        bits(&expected)
    );
    // The last five rows of the first sequence against all of its keys; a broadcast batch.
    let (q, k, v) = (q.narrow(0, 0, 1)?.narrow(1, 4, 5)?, k.narrow(0, 0, 1)?, v.narrow(0, 0, 1)?);
    let rows = attention(&q, &k, &v, &options)?;
    assert_eq!(bits(&rows), bits(&expected.narrow(0, 0, 1)?.narrow(1, 4, 5)?));
    let wide = |x: &Tensor| x.broadcast_as((3, x.dim(1)?, x.dim(2)?, x.dim(3)?));
    let all = attention(&wide(&q)?, &wide(&k)?, &wide(&v)?, &options)?;
    assert_eq!(bits(&all.narrow(0, 2, 1)?), bits(&rows));
    Ok(())
}

/// Holds the custom op to the tolerance of the oracle, in one type.
fn judge<T: WithDType + Float>() -> Result<()> {
    let [q, k, v] = [[2, 7, 6, 40], [2, 33, 2, 40], [2, 33, 2, 24]]
        .map(|shape| normal(&shape).to_dtype(<T as WithDType>::DTYPE));
    let (q, k, v) = (q?, k?, v?);
    let data = |x: &Tensor| x.flatten_all().and_then(|x| x.to_vec1::<T>());
    let (qs, ks, vs) = (data(&q)?, data(&k)?, data(&v)?);
    let view = |data, x: &Tensor| regard::Tensor::from_slice(data, x.dims(), None).expect("whole");
    let inputs =
        Inputs::new(view(&qs, &q), view(&ks, &k), view(&vs, &v), regard::Attention::causal());
    let (out, lse) = attention_with_lse(&q, &k, &v, &Attention::causal())?;
    assert_eq!((out.dims(), lse.dims()), (&[2, 7, 6, 24][..], &[2, 7, 6][..]));
    assert_eq!(out.dtype(), <T as WithDType>::DTYPE);
    let (found, lse) = (data(&out)?, elements(&lse));
    let lse = regard::Tensor::new(&lse, [2, 7, 6]).expect("whole");
    let of_type = Judge::new(&inputs, <T as regard::Element>::DTYPE).expect("sound");
    let agreement = of_type
        .check(&regard::Tensor::from_slice(&found, out.dims(), None).expect("whole"), Some(&lse));
    agreement.unwrap_or_else(|miss| panic!("{miss:?}"));
    let wide = Execution { out_dtype: Some(DType::F32), ..Execution::default() }.attention(
        &q,
        &k,
        &v,
        &Attention::causal(),
    )?;
    let wide = wide.flatten_all()?.to_vec1::<f32>()?;
    let in_f32 = Judge::new(&inputs, regard::DType::F32).expect("sound");
    let agreement =
        in_f32.check(&regard::Tensor::from_slice(&wide, out.dims(), None).expect("whole"), None);
    agreement.unwrap_or_else(|miss| panic!("{miss:?}"));
    Ok(())
}

#[test]
fn every_type_is_within_the_oracles_tolerance() -> Result<()> {
    judge::<f32>()?;
    judge::<f16>()?;
    judge::<bf16>()
}

/// The same problem given to regard on plain slices.
fn plain(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: &regard::Attention<regard::Tensor>,
) -> Vec<u32> {
    let (qs, ks, vs) = (elements(q), elements(k), elements(v));
    let view = |data, x: &Tensor| regard::Tensor::from_slice(data, x.dims(), None).expect("whole");
    let options = regard::Attention { batch_invariant: true, ..*options };
    let out: Vec<f32> =
        regard::attention(view(&qs, q), view(&ks, k), view(&vs, v), &options).expect("sound");
    out.iter().map(|x| x.to_bits()).collect()
}

/// Checks that options of candle's tensors give the bits that the same options give on slices.
fn check(
    what: &str,
    options: Attention,
    expected: regard::Attention<regard::Tensor>,
) -> Result<()> {
    let (q, k, v) = (normal(&[2, 5, 4, 8]), normal(&[2, 12, 2, 8]), normal(&[2, 12, 2, 8]));
    let found = bits(&attention(&q, &k, &v, &invariant(options))?);
    assert_eq!(found, plain(&q, &k, &v, &expected), "{what}");
    Ok(())
}

#[test]
fn every_number_and_vector_reaches_regard() -> Result<()> {
    let window = Window { left: Some(3), right: Some(1) };
    check(
        "numbers",
        Attention {
            scale: Some(0.3),
            window,
            softcap: Some(2.5),
            q_offset: QueryOffset::Same(2),
            ..Default::default()
        },
        regard::Attention {
            scale: Some(0.3),
            window,
            softcap: Some(2.5),
            q_offset: regard::QueryOffset::Same(2),
            ..Default::default()
        },
    )?;
    let (slopes, sinks) = ([0.1f32, 0.2, 0.4, 0.8], [0.5f32, -1.0, f32::NEG_INFINITY, 3.0]);
    check(
        "vectors with an element per head",
        Attention {
            alibi_slopes: Some(Tensor::new(&slopes, &CPU)?),
            sinks: Some(Tensor::new(&sinks, &CPU)?),
            ..Attention::causal()
        },
        regard::Attention {
            alibi_slopes: Some(regard::Tensor::from(&slopes)),
            sinks: Some(regard::Tensor::from(&sinks)),
            ..regard::Attention::causal()
        },
    )?;
    let (lens, offsets) = ([7i32, 12], [-1i32, 4]);
    check(
        "vectors with an element per sequence, u32 and i32",
        Attention {
            kv_lens: Some(Tensor::new(&[7u32, 12], &CPU)?),
            q_offset: QueryOffset::PerSequence(Tensor::new(&offsets, &CPU)?),
            ..Attention::causal()
        },
        regard::Attention {
            kv_lens: Some(regard::Tensor::from(&lens)),
            q_offset: regard::QueryOffset::PerSequence(regard::Tensor::from(&offsets)),
            ..regard::Attention::causal()
        },
    )
}

#[test]
fn every_mask_reaches_regard() -> Result<()> {
    let hidden: Vec<u8> = (0..60).map(|i| u8::from(i % 7 != 3)).collect();
    check(
        "a boolean mask of any bytes, broadcast",
        Attention {
            mask: Some((Tensor::from_vec(hidden.clone(), (1, 1, 5, 12), &CPU)? * 3.0)?),
            ..Default::default()
        },
        regard::Attention {
            mask: Some(regard::Tensor::new(&hidden, [1, 1, 5, 12]).expect("whole")),
            ..Default::default()
        },
    )?;
    let bias = normal(&[2, 4, 5, 12]);
    let biases = elements(&bias);
    check(
        "an additive mask",
        Attention { mask: Some(bias), ..Default::default() },
        regard::Attention {
            mask: Some(regard::Tensor::new(&biases, [2, 4, 5, 12]).expect("whole")),
            ..Default::default()
        },
    )?;
    let tree = [1i32, 3, 5, 11, 17, 1, 3, 7, 15, 31];
    check(
        "a tree",
        Attention {
            tree_mask: Some(Tensor::from_slice(&tree, (2, 5, 1), &CPU)?),
            ..Default::default()
        },
        regard::Attention {
            tree_mask: Some(regard::Tensor::new(&tree, [2, 5, 1]).expect("whole")),
            ..Default::default()
        },
    )
}

#[test]
fn ragged_sequences_equal_each_alone() -> Result<()> {
    let (q, k, v) = (normal(&[9, 4, 16]), normal(&[20, 2, 16]), normal(&[20, 2, 16]));
    let options = invariant(Attention {
        cu_seqlens_q: Some(Tensor::new(&[0u32, 1, 6, 9], &CPU)?),
        cu_seqlens_k: Some(Tensor::new(&[0u32, 9, 15, 20], &CPU)?),
        ..Attention::causal()
    });
    let out = attention(&q, &k, &v, &options)?;
    for (rows, keys) in [(0..1, 0..9), (1..6, 9..15), (6..9, 15..20)] {
        let part = |x: &Tensor, range: &std::ops::Range<usize>| {
            x.narrow(0, range.start, range.len())?.unsqueeze(0)
        };
        let alone = attention(
            &part(&q, &rows)?,
            &part(&k, &keys)?,
            &part(&v, &keys)?,
            &invariant(Attention::causal()),
        )?;
        assert_eq!(bits(&part(&out, &rows)?), bits(&alone), "{rows:?}");
    }
    Ok(())
}

#[test]
fn a_plan_serves_many_calls() -> Result<()> {
    let (q, k, v) = (normal(&[2, 6, 4, 8]), normal(&[2, 30, 2, 8]), normal(&[2, 30, 2, 8]));
    let options = Attention::causal();
    let plan = Execution::default().plan(&q, &k, &v, &options)?;
    assert!(plan.explain().contains("4/2 heads"));
    let planned = Execution { plan: Some(plan), ..Execution::default() };
    let unplanned = attention(&q, &k, &v, &options)?;
    assert_eq!(bits(&planned.attention(&q, &k, &v, &options)?), bits(&unplanned));
    let smaller = |x: &Tensor| x.narrow(1, 0, 5);
    planned.attention(&smaller(&q)?, &smaller(&k)?, &smaller(&v)?, &options)?;
    let longer = normal(&[2, 7, 4, 8]);
    let longer = planned.attention(&longer, &k, &v, &options).expect_err("7 rows").to_string();
    assert!(longer.contains("`query_len` is 7; allowed: at most 6, as planned"), "{longer}");
    Ok(())
}

#[test]
fn bad_input_is_an_error_in_words() -> Result<()> {
    let (q, k, v) = (normal(&[1, 5, 4, 8]), normal(&[1, 12, 2, 8]), normal(&[1, 12, 2, 8]));
    let full = Attention::default;
    let refused = |q: &Tensor, k: &Tensor, v: &Tensor, options: &Attention, expected: &str| {
        let execution = Execution::default();
        let error = execution.attention(q, k, v, options).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        let error = execution.plan(q, k, v, options).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    let double = q.to_dtype(DType::F64)?;
    refused(&double, &k, &v, &full(), "`q` is of type f64; allowed: f32, f16, bf16");
    refused(
        &q.to_dtype(DType::U32)?,
        &k,
        &v,
        &full(),
        "`q` is of type i32; allowed: f32 or f16 or bf16",
    );
    refused(&q, &k.to_dtype(DType::U32)?, &v, &full(), "`k` is of type i32; allowed: f32");
    refused(&q.squeeze(0)?, &k, &v, &full(), "`q` is of shape [5, 4, 8]; allowed: 4 dimensions");
    refused(&q, &k.narrow(3, 0, 7)?, &v, &full(), "`k` is of head dim 7; allowed: 8");
    let lens = |lens: Tensor| Attention { kv_lens: Some(lens), ..Attention::default() };
    refused(&q, &k, &v, &lens(Tensor::new(&[5f32], &CPU)?), "`kv_lens` is of type f32");
    refused(&q, &k, &v, &lens(Tensor::new(&[13u32], &CPU)?), "`kv_lens[0]` is 13; allowed: 0..=12");
    refused(&q, &k, &v, &lens(Tensor::new(&[u32::MAX], &CPU)?), "`kv_lens[0]` is -1");
    for (dtype, expected) in
        [(DType::I64, "`out_dtype` is i64; allowed: that of q, or f32"), (DType::F16, "out_dtype")]
    {
        let wrong = Execution { out_dtype: Some(dtype), ..Execution::default() };
        let error = wrong.attention(&q, &k, &v, &full()).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
        let error = wrong.plan(&q, &k, &v, &full()).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
    let six = q.reshape((1, 1, 1, 5, 4, 8))?;
    refused(&six, &k, &v, &full(), "at most 5 dimensions");
    Ok(())
}

#[test]
fn a_gradient_is_refused() -> Result<()> {
    let q = Var::from_tensor(&normal(&[1, 3, 2, 8]))?;
    let out = attention(&q, &normal(&[1, 3, 2, 8]), &normal(&[1, 3, 2, 8]), &Attention::causal())?;
    let error = out.sum_all()?.backward().expect_err("no backward pass").to_string();
    assert!(error.contains("regard-attention"), "{error}");
    Ok(())
}

/// The rows of the drop-in table that run on a CPU agree; how precisely is not the point
/// here.
#[test]
fn the_table_of_calls_in_the_documentation_is_right() -> Result<()> {
    let (q, k, v) = (normal(&[1, 6, 4, 16]), normal(&[1, 10, 2, 16]), normal(&[1, 10, 2, 16]));
    let scale = 0.2;
    let close = |what: &str, ours: Tensor, theirs: Tensor| -> Result<()> {
        assert_eq!(ours.dims(), theirs.dims(), "{what}");
        let apart = (ours - theirs)?.abs()?.max_all()?.to_scalar::<f32>()?;
        assert!(apart < 1e-5, "{what}: {apart}");
        Ok(())
    };
    let ours = |options: Attention| {
        attention(&q, &k, &v, &Attention { scale: Some(scale), ..options })?.transpose(1, 2)
    };
    let theirs = |mask| flash_attn::<f32>(&q, &k, &v, scale, mask, None, None);
    close("no mask", ours(Attention::default())?, theirs(AttnMask::None)?)?;
    close(
        "causal, the last tokens",
        ours(Attention::causal())?,
        theirs(AttnMask::Causal { kv_offset: 4 })?,
    )?;
    let offset = Attention { q_offset: QueryOffset::Same(2), ..Attention::causal() };
    close("causal with an offset", ours(offset)?, theirs(AttnMask::Causal { kv_offset: 2 })?)?;
    let softcap = Attention { softcap: Some(3.0), ..Attention::default() };
    let capped = flash_attn::<f32>(&q, &k, &v, scale, AttnMask::None, None, Some(3.0))?;
    close("softcap", ours(softcap)?, capped)?;

    // Two matrix products with a softmax between them, [batch, head, sequence, dim].
    let heads = |x: &Tensor, times: usize| -> Result<Tensor> {
        let x = x.transpose(1, 2)?.unsqueeze(2)?;
        let (batch, heads, _, rows, dim) = x.dims5()?;
        x.expand((batch, heads, times, rows, dim))?.reshape((batch, heads * times, rows, dim))
    };
    let scores = (heads(&q, 1)?.matmul(&heads(&k, 2)?.t()?)? * f64::from(scale))?;
    let composed = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&heads(&v, 2)?)?;
    close("composed", ours(Attention::default())?, composed)
}
