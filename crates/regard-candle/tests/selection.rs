//! Lists of keys and of slots in candle's tensors, against regard on plain slices.

use candle_core::{DType, Device, Result, Tensor};
use regard::Values;
use regard_candle::{Attention, attention};

const CPU: Device = Device::Cpu;

fn normal(shape: &[usize]) -> Tensor {
    Tensor::randn(0f32, 1., shape, &CPU).expect("a tensor")
}

fn elements(x: &Tensor) -> Vec<f32> {
    x.flatten_all().and_then(|x| x.to_vec1()).expect("f32")
}

/// The bits of a result.
fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

fn view<'a>(data: &'a [f32], x: &Tensor) -> regard::Tensor<'a> {
    regard::Tensor::from_slice(data, x.dims(), None).expect("whole")
}

/// regard's own form of the options, batch-invariant.
fn plain([q, k, v]: [&Tensor; 3], options: &regard::Attention<regard::Tensor>) -> Vec<u32> {
    let [qs, ks, vs] = [q, k, v].map(elements);
    let options = regard::Attention { batch_invariant: true, ..*options };
    let out: Vec<f32> =
        regard::attention(view(&qs, q), view(&ks, k), view(&vs, v), &options).expect("sound");
    bits(&out)
}

fn found([q, k, v]: [&Tensor; 3], options: Attention) -> Result<Vec<u32>> {
    let options = Attention { batch_invariant: true, ..options };
    Ok(bits(&elements(&attention(q, k, v, &options)?)))
}

/// Positions, in each type of integer that candle has for them, with counts.
#[test]
fn lists_of_positions_reach_regard() -> Result<()> {
    let (q, k, v) = (normal(&[2, 3, 4, 8]), normal(&[2, 12, 2, 8]), normal(&[2, 12, 2, 8]));
    let entries: Vec<i32> = (0..6 * 5).map(|i| (i * 7 + 3) % 14 - 1).collect();
    let counts = [5i32, 0, 3, 4, 5, 1];
    let expected = plain(
        [&q, &k, &v],
        &regard::Attention {
            key_indices: Some(regard::Tensor::new(&entries, [6, 1, 5]).expect("whole")),
            key_counts: Some(regard::Tensor::new(&counts, [6, 1]).expect("whole")),
            ..regard::Attention::causal()
        },
    );
    let entries: Vec<i64> = entries.into_iter().map(i64::from).collect();
    let lists = Tensor::from_vec(entries, (6, 1, 5), &CPU)?;
    let counts = Tensor::new(&[5u32, 0, 3, 4, 5, 1], &CPU)?.reshape((6, 1))?;
    for (lists, counts) in [
        (lists.clone(), counts.clone()),
        (lists.to_dtype(DType::I32)?, counts.to_dtype(DType::I64)?),
    ] {
        let options =
            Attention { key_indices: Some(lists), key_counts: Some(counts), ..Attention::causal() };
        assert_eq!(found([&q, &k, &v], options)?, expected);
    }
    Ok(())
}

/// Slots of two caches.
#[test]
fn lists_into_a_second_cache_reach_regard() -> Result<()> {
    let (q, k, v) = (normal(&[2, 1, 4, 8]), normal(&[6, 4, 2, 8]), normal(&[6, 4, 2, 8]));
    let (second_k, second_v) = (normal(&[5, 3, 2, 8]), normal(&[5, 3, 2, 8]));
    let (first, second) = ([0u32, 23, 9, 8, 24, 2], [14u32, 3, 15, 7]);
    let counts = [2u32, 1];
    let list = first.map(u32::cast_signed);
    let (second_list, second_counts) = (second.map(u32::cast_signed), counts.map(u32::cast_signed));
    let (second_ks, second_vs) = (elements(&second_k), elements(&second_v));
    let expected = plain(
        [&q, &k, &v],
        &regard::Attention {
            key_indices: Some(regard::Tensor::new(&list, [2, 1, 3]).expect("whole")),
            indices_are_slots: true,
            second_k: Some(view(&second_ks, &second_k)),
            second_v: Some(view(&second_vs, &second_v)),
            second_indices: Some(regard::Tensor::new(&second_list, [2, 1, 2]).expect("whole")),
            second_counts: Some(regard::Tensor::new(&second_counts, [2, 1]).expect("whole")),
            ..regard::Attention::default()
        },
    );
    let options = Attention {
        key_indices: Some(Tensor::new(&first, &CPU)?.reshape((2, 1, 3))?),
        indices_are_slots: true,
        second_k: Some(second_k.clone()),
        second_v: Some(second_v),
        second_indices: Some(Tensor::new(&second, &CPU)?.reshape((2, 1, 2))?),
        second_counts: Some(Tensor::new(&counts, &CPU)?.reshape((2, 1))?),
        ..Attention::default()
    };
    assert_eq!(found([&q, &k, &v], options.clone())?, expected);
    // A second cache without its values is named.
    let error = attention(&q, &k, &v, &Attention { second_v: None, ..options });
    let error = error.expect_err("half a cache").to_string();
    assert!(error.contains("`second_v` is missing"), "{error}");
    Ok(())
}

/// Latent and rotary rows in two tensors.
#[test]
fn keys_in_two_parts_reach_regard() -> Result<()> {
    let (q, k, rotary) = (normal(&[2, 3, 4, 24]), normal(&[2, 9, 1, 16]), normal(&[2, 9, 1, 8]));
    let rotaries = elements(&rotary);
    let expected = {
        let [qs, ks] = [&q, &k].map(elements);
        let options = regard::Attention {
            values: Values::KeyPrefix,
            rotary_k: Some(view(&rotaries, &rotary)),
            batch_invariant: true,
            ..regard::Attention::causal()
        };
        let keys = view(&ks, &k);
        let out: Vec<f32> = regard::attention(view(&qs, &q), keys, keys, &options).expect("sound");
        bits(&out)
    };
    let options =
        Attention { values: Values::KeyPrefix, rotary_k: Some(rotary), ..Attention::causal() };
    assert_eq!(found([&q, &k, &k], options)?, expected);
    Ok(())
}
