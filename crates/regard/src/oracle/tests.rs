//! The oracle against numbers worked out by hand.

use super::*;
use crate::{Attention, QueryOffset, Window};
use std::f64::consts::LN_2;

fn close(a: &[f64], b: &[f64]) {
    assert_eq!(a.len(), b.len());
    for (x, y) in a.iter().zip(b) {
        assert!((x - y).abs() < 1e-12 || x == y, "{a:?} against {b:?}");
    }
}

/// One head, head dims 1: keys are their own scores for a query of 1, with scale 1.
fn one_head<'a>(
    q: &'a [f32],
    k: &'a [f32],
    v: &'a [f32],
    attention: Attention<Tensor<'a>>,
) -> Inputs<'a> {
    let view = |data: &'a [f32]| Tensor::new(data, [1, data.len(), 1, 1]).unwrap();
    Inputs::new(
        view(q),
        view(k),
        view(v),
        Attention { scale: attention.scale.or(Some(1.0)), ..attention },
    )
}

const LN2: f32 = std::f32::consts::LN_2;
/// ln 2 as the f32 that the inputs hold.
fn ln2() -> f64 {
    f64::from(LN2)
}

#[test]
fn equal_scores_average_values() {
    let inputs = one_head(&[1.0], &[0.0, 0.0], &[1.0, 3.0], Attention::default());
    let reference = attention(&inputs).unwrap();
    close(&reference.out, &[2.0]);
    close(&reference.lse, &[LN_2]);
}

#[test]
fn probabilities_follow_the_exponential_of_the_score() {
    // Scores 0 and ln 2: weights 1/3 and 2/3.
    let reference =
        attention(&one_head(&[1.0], &[0.0, LN2], &[3.0, 6.0], Attention::default())).unwrap();
    let weight = ln2().exp();
    close(&reference.out, &[(3.0 + 6.0 * weight) / (1.0 + weight)]);
    assert!((reference.out[0] - 5.0).abs() < 1e-7);
    // Default scale: 1 / sqrt(4); the score of (1, 1, 1, 1) with (2, 0, 0, 0) is 1.
    let (q, k, v) = ([1.0f32; 4], [2.0f32, 0.0, 0.0, 0.0], [7.0f32]);
    let view = |data| Tensor::from_slice(data, &[1, 1, 1, 4], None).unwrap();
    let inputs = Inputs::new(
        view(&q),
        view(&k),
        Tensor::new(&v, [1, 1, 1, 1]).unwrap(),
        Attention::default(),
    );
    let reference = attention(&inputs).unwrap();
    close(&reference.lse, &[1.0]);
    close(&reference.out, &[7.0]);
}

#[test]
fn causal_rows_stand_last_by_default() {
    // 2 queries, 3 keys: positions 1 and 2.
    let (q, k, v) = ([1.0, 1.0], [0.0; 3], [0.0, 2.0, 7.0]);
    close(&attention(&one_head(&q, &k, &v, Attention::causal())).unwrap().out, &[1.0, 3.0]);
    // Positions 0 and 1.
    let top_left = Attention { q_offset: QueryOffset::Same(0), ..Attention::causal() };
    close(&attention(&one_head(&q, &k, &v, top_left)).unwrap().out, &[0.0, 1.0]);
    // Positions -1 (empty) and 0.
    let before = Attention { q_offset: QueryOffset::Same(-1), ..Attention::causal() };
    let reference = attention(&one_head(&q, &k, &v, before)).unwrap();
    close(&reference.out, &[0.0, 0.0]);
    close(&reference.lse, &[f64::NEG_INFINITY, 0.0]);
    assert_eq!(reference.rounding.iter().map(|r| r.empty).collect::<Vec<_>>(), [true, false]);
}

#[test]
fn windows_reach_both_ways_and_hide_what_is_not_read() {
    let nan = f32::NAN;
    let (q, k, v) = ([1.0], [nan, 0.0, 0.0, 0.0, nan], [nan, 1.0, 2.0, 6.0, nan]);
    let attention_ = Attention {
        q_offset: QueryOffset::Same(2),
        window: Window { left: Some(1), right: Some(1) },
        ..Attention::default()
    };
    close(&attention(&one_head(&q, &k, &v, attention_)).unwrap().out, &[3.0]);
    let left_only =
        Attention { causal: true, window: Window { left: Some(1), right: None }, ..attention_ };
    close(&attention(&one_head(&q, &k, &v, left_only)).unwrap().out, &[1.5]);
}

#[test]
fn softcap_comes_before_biases_and_alibi_punishes_distance() {
    let slopes = [0.5f32];
    let attention_ = Attention {
        softcap: Some(2.0),
        alibi_slopes: Some(Tensor::from(&slopes)),
        q_offset: QueryOffset::Same(0),
        ..Attention::default()
    };
    let reference = attention(&one_head(&[1.0], &[3.0, 3.0], &[1.0, 0.0], attention_)).unwrap();
    let capped = 2.0 * 1.5f64.tanh();
    // Key 1 is one step away: e^-0.5 the weight of key 0.
    close(&reference.out, &[1.0 / (1.0 + (-0.5f64).exp())]);
    close(&reference.lse, &[capped + (1.0 + (-0.5f64).exp()).ln()]);
}

#[test]
fn a_sink_joins_the_denominator_only() {
    let sinks = [0.0f32];
    let attention_ = Attention { sinks: Some(Tensor::from(&sinks)), ..Attention::causal() };
    let reference = attention(&one_head(&[1.0, 1.0], &[0.0], &[4.0], attention_)).unwrap();
    // Row 0 stands at position -1: only the sink is left.
    close(&reference.out, &[0.0, 2.0]);
    close(&reference.lse, &[0.0, LN_2]);
    assert!(reference.rounding[0].empty);
}

#[test]
fn masks_hide_or_add() {
    let (q, k, v) = ([1.0, 1.0], [0.0; 2], [1.0, 5.0]);
    let hide = [true, false, false, false];
    let mask = Tensor::new(&hide, [1, 1, 2, 2]).unwrap();
    let reference =
        attention(&one_head(&q, &k, &v, Attention { mask: Some(mask), ..Attention::default() }));
    let reference = reference.unwrap();
    close(&reference.out, &[1.0, 0.0]);
    close(&reference.lse, &[0.0, f64::NEG_INFINITY]);

    let add = [-1e5f32, -1e5, f32::NEG_INFINITY, 0.0];
    let mask = Tensor::new(&add, [1, 1, 2, 2]).unwrap();
    let reference =
        attention(&one_head(&q, &k, &v, Attention { mask: Some(mask), ..Attention::default() }));
    let reference = reference.unwrap();
    close(&reference.out, &[3.0, 5.0]);
    close(&reference.lse, &[-1e5 + LN_2, 0.0]);

    // One row of mask for all queries.
    let add = [f32::NEG_INFINITY, 0.5];
    let mask = Tensor::new(&add, [1, 1, 1, 2]).unwrap();
    let reference =
        attention(&one_head(&q, &k, &v, Attention { mask: Some(mask), ..Attention::default() }));
    close(&reference.unwrap().lse, &[0.5, 0.5]);
}

#[test]
fn a_tree_row_sees_the_prefix_and_its_bits() {
    // Prefix of 1, then tokens 0..3; row 2 is a child of token 0, beside token 1.
    let tree = [0b001i32, 0b011, 0b101];
    let tree = Tensor::new(&tree, [1, 3, 1]).unwrap();
    let attention_ = Attention { tree_mask: Some(tree), ..Attention::causal() };
    let reference =
        attention(&one_head(&[1.0; 3], &[0.0; 4], &[0.0, 2.0, 4.0, 7.0], attention_)).unwrap();
    close(&reference.out, &[1.0, 2.0, 3.0]);
}

#[test]
fn pages_and_ragged_sequences_are_found() {
    let nan = f32::NAN;
    // Two sequences of 1 and 2 queries; pages of 2 slots; key lengths 3 and 1. Two query heads over
    // one key/value head.
    let q = [1.0f32; 6];
    let pool_k = [nan, nan, 0.0, 0.0, 0.0, nan, 0.0, nan];
    let pool_v = [nan, nan, 1.0, 2.0, 6.0, nan, 9.0, nan];
    let (table, lens, cumulative) = ([1, 2, 3, -1], [3, 1], [0, 1, 3]);
    let inputs = Inputs::new(
        Tensor::new(&q, [3, 2, 1]).unwrap(),
        Tensor::new(&pool_k, [4, 2, 1, 1]).unwrap(),
        Tensor::new(&pool_v, [4, 2, 1, 1]).unwrap(),
        Attention {
            cu_seqlens_q: Some(Tensor::from(&cumulative)),
            block_table: Some(Tensor::new(&table, [2, 2]).unwrap()),
            kv_lens: Some(Tensor::from(&lens)),
            ..Attention::causal()
        },
    );
    let reference = attention(&inputs).unwrap();
    close(&reference.out, &[3.0, 3.0, 0.0, 0.0, 9.0, 9.0]);
    let sample = [Row { sequence: 1, query: 1, head: 0 }];
    close(&attention_rows(&inputs, &sample).unwrap().out, &[9.0]);
}

#[test]
fn naive_rounds_where_an_unfused_composition_does() {
    let inputs = one_head(&[1.0], &[0.0, 0.1], &[1.0, 2.0], Attention::default());
    let exact = attention(&inputs).unwrap();
    let f32_naive = naive(&inputs, DType::F32, &exact.rows).unwrap();
    assert!((f32_naive.out[0] - exact.out[0]).abs() < 1e-6 && f32_naive.out != exact.out);

    let half = |x: f32| bf16::from_f32(x);
    let (q, k, v) = ([half(1.0)], [half(0.0), half(0.1)], [half(1.0), half(2.0)]);
    let inputs = Inputs::new(
        Tensor::new(&q, [1, 1, 1, 1]).unwrap(),
        Tensor::new(&k, [1, 2, 1, 1]).unwrap(),
        Tensor::new(&v, [1, 2, 1, 1]).unwrap(),
        Attention { scale: Some(1.0), ..Attention::default() },
    );
    let rounded = naive(&inputs, DType::BF16, &exact.rows).unwrap();
    assert_eq!(rounded.out[0], half(rounded.out[0] as f32).to_f64());
}

#[test]
fn the_judge_allows_rounding_and_nothing_else() {
    let inputs = one_head(&[1.0, 1.0], &[0.5, -0.25], &[1.0, -2.0], Attention::causal());
    let judge = Judge::new(&inputs, DType::F32).unwrap();
    let exact: Vec<f32> = judge.reference().out.iter().map(|&x| x as f32).collect();
    let exact_lse: Vec<f32> = judge.reference().lse.iter().map(|&x| x as f32).collect();
    let check = |out: &[f32], lse: &[f32]| {
        let out = Tensor::from_slice(out, &[1, 2, 1, 1], None).unwrap();
        let lse = Tensor::from_slice(lse, &[1, 2, 1], None).unwrap();
        judge.check(&out, Some(&lse)).map_err(|mismatch| mismatch.to_string())
    };
    let agreement = check(&exact, &exact_lse).unwrap();
    assert_eq!((agreement.rows, agreement.unjudged), (2, 0));
    assert!(agreement.worst <= 1.0);

    let wrong = check(&[exact[0], exact[1] + 1e-5], &exact_lse).unwrap_err();
    assert!(wrong.starts_with("out of sequence 0, query 1, head 0, dim 0 is"), "{wrong}");
    let wrong = check(&[f32::NAN, exact[1]], &exact_lse).unwrap_err();
    assert!(wrong.contains("NaN"), "{wrong}");
    let wrong = check(&exact, &[exact_lse[0], f32::INFINITY]).unwrap_err();
    assert!(wrong.starts_with("lse of sequence 0, query 1, head 0 is inf"), "{wrong}");
}

#[test]
fn a_key_that_is_listed_often_is_rounded_as_one() {
    let probabilities = |indices: &[i32]| {
        let indices = Tensor::from_slice(indices, &[1, 1, indices.len()], None).unwrap();
        let listed = Attention { key_indices: Some(indices), ..Attention::default() };
        let inputs = one_head(&[0.0], &[0.5, 0.25], &[1.0, -1.0], listed);
        attention(&inputs).unwrap().rounding[0].probabilities
    };
    // Two probabilities of 1/2, each of one key or of four equal entries.
    let expected = 0.5f64.sqrt();
    for indices in [&[0, 1][..], &[0, 1, 1, 0, 0, 1, 0, 1]] {
        assert!((probabilities(indices) - expected).abs() < 1e-12, "{indices:?}");
    }
    // Entries that name no key count for nothing.
    assert!((probabilities(&[1, -1, 7, 0]) - expected).abs() < 1e-12);
}

#[test]
fn the_judge_wants_empty_rows_exact() {
    let before = Attention { q_offset: QueryOffset::Same(-1), ..Attention::causal() };
    let inputs = one_head(&[1.0], &[0.5], &[1.0], before);
    let judge = Judge::new(&inputs, DType::F32).unwrap();
    let check = |out: f32, lse: f32| {
        let (out, lse) = ([out], [lse]);
        let out = Tensor::new(&out, [1, 1, 1, 1]).unwrap();
        let lse = Tensor::new(&lse, [1, 1, 1]).unwrap();
        judge.check(&out, Some(&lse)).is_ok()
    };
    assert!(check(0.0, f32::NEG_INFINITY));
    for (out, lse) in [
        (1e-40, f32::NEG_INFINITY),
        (f32::NAN, f32::NEG_INFINITY),
        (0.0, -1e30),
        (0.0, f32::NAN),
        (0.0, f32::INFINITY),
    ] {
        assert!(!check(out, lse), "{out} {lse}");
    }
}

#[test]
fn finite_masks_hide_nothing_however_low() {
    let mask = |values: &'static [f32]| {
        Some(Tensor::from_slice(values, &[1, 1, 1, values.len()], None).unwrap())
    };
    let run = |values: &'static [f32]| {
        let masked = Attention { mask: mask(values), ..Attention::default() };
        attention(&one_head(&[0.0], &[0.0, 0.0], &[1.0, 2.0], masked)).unwrap()
    };
    close(&run(&[-3.4028e38, -2.4e38]).out, &[2.0]);
    let lowest = run(&[f32::MIN, f32::MIN]);
    close(&lowest.out, &[1.5]);
    close(&lowest.lse, &[f64::from(f32::MIN)]);
    assert!(!lowest.rounding[0].empty);
    close(&run(&[3e38, f32::MAX]).out, &[2.0]);
    assert!(run(&[f32::NEG_INFINITY, f32::NEG_INFINITY]).rounding[0].empty);
    // A sum of score and mask past the range of f32 counts as its largest number: the keys are
    // equal.
    let masked = Attention { mask: mask(&[f32::MIN, f32::MIN]), ..Attention::default() };
    let scores = [-1e30, -1.2e30];
    close(&attention(&one_head(&[1.0], &scores, &[1.0, 2.0], masked)).unwrap().out, &[1.5]);
}

#[test]
fn nan_stays_nan() {
    // One key, or all of them: a maximum that drops NaN would call the row empty.
    for keys in [[f32::NAN, f32::NAN], [f32::NAN, 1.0], [1.0, f32::NAN]] {
        let reference =
            attention(&one_head(&[1.0], &keys, &[1.0, 2.0], Attention::default())).unwrap();
        assert!(reference.out[0].is_nan() && reference.lse[0].is_nan(), "{keys:?}: {reference:?}");
        let naive = naive(
            &one_head(&[1.0], &keys, &[1.0, 2.0], Attention::default()),
            DType::F32,
            &reference.rows,
        );
        assert!(naive.unwrap().out[0].is_nan());
    }
    // Beyond the range of f32 the contract defines nothing.
    let large =
        attention(&one_head(&[1e20], &[1e20, -1e20], &[1.0, 2.0], Attention::default())).unwrap();
    assert!(large.out[0].is_nan());
    let values =
        attention(&one_head(&[1.0], &[1.0, 1.0], &[1e37, 1.0], Attention::default())).unwrap();
    assert!(values.out[0].is_nan() && values.lse[0].is_finite());
}

#[test]
fn codes_are_multiplied_with_the_scale_of_their_place() {
    // Two keys of two heads, one query row; scores 0, so each head averages its values.
    let (q, k) = ([0.0f32; 2], [0i8; 4]);
    let (v, scales) = ([1i8, 10, 3, 30], [2.0f32, 0.5, 4.0, 0.25]);
    let result = |scales: Tensor| {
        let k_scales = Some(Tensor::new(&[1.0f32], [1, 1, 1]).unwrap());
        let options = Attention { k_scales, v_scales: Some(scales), ..Attention::default() };
        let inputs = Inputs::new(
            Tensor::new(&q, [1, 1, 2, 1]).unwrap(),
            Tensor::new(&k, [1, 2, 2, 1]).unwrap(),
            Tensor::new(&v, [1, 2, 2, 1]).unwrap(),
            options,
        );
        attention(&inputs).unwrap().out
    };
    close(&result(Tensor::new(&scales[..1], [1, 1, 1]).unwrap()), &[4.0, 40.0]);
    close(&result(Tensor::new(&scales[..2], [1, 1, 2]).unwrap()), &[4.0, 10.0]);
    close(&result(Tensor::new(&scales, [1, 2, 2]).unwrap()), &[7.0, 6.25]);
    close(&result(Tensor::new(&scales[..2], [1, 2, 1]).unwrap()), &[1.75, 17.5]);
}

#[test]
fn tiny_probabilities_over_codes_may_be_0_under_16_bit_queries() {
    // Scores 0 and -28, so the second probability is 2^-40.4, and it alone has a value.
    let (k, v, one) = ([0i8, -28], [0i8, 100], [1.0f32]);
    let accepts = |q: Tensor, out: f32| {
        let scales = || Some(Tensor::new(&one, [1, 1, 1]).unwrap());
        let options = Attention {
            scale: Some(1.0),
            k_scales: scales(),
            v_scales: scales(),
            ..Attention::default()
        };
        let view = |codes| Tensor::new(codes, [1, 2, 1, 1]).unwrap();
        let judge = Judge::new(&Inputs::new(q, view(&k), view(&v), options), DType::F32).unwrap();
        judge.check(&Tensor::new(&[out], [1, 1, 1, 1]).unwrap(), None).is_ok()
    };
    let half_precision = [half::bf16::ONE];
    let (exact, step) = (100.0 * (-28f32).exp(), 100.0 * (-39f32).exp2());
    let under_bf16 = |out| accepts(Tensor::new(&half_precision, [1, 1, 1, 1]).unwrap(), out);
    let under_f32 = |out| accepts(Tensor::new(&one, [1, 1, 1, 1]).unwrap(), out);
    assert_eq!([exact, 0.0, step].map(under_bf16), [true, true, false]);
    assert_eq!([exact, 0.0, step].map(under_f32), [true, false, false]);
}

#[test]
fn blocks_bring_their_own_scales() {
    use crate::format::{BlockQ4_0, BlockQ8_0};
    let q = [1.0f32; 32];
    let keys = [BlockQ8_0 { scale: f16::from_f32(0.5), codes: [1; 32] }, BlockQ8_0::default()];
    let values =
        [2.0, 3.0].map(|scale| BlockQ4_0 { scale: f16::from_f32(scale), nibbles: [0x9a; 16] });
    let inputs = Inputs::new(
        Tensor::new(&q, [1, 1, 1, 32]).unwrap(),
        Tensor::new(&keys, [1, 2, 1, 1]).unwrap(),
        Tensor::new(&values, [1, 2, 1, 1]).unwrap(),
        Attention { scale: Some(LN2 / 16.0), ..Attention::default() },
    );
    // Scores ln 2 and 0. Low nibbles are 10 - 8, high ones 9 - 8.
    let reference = attention(&inputs).unwrap();
    let first = ln2().exp() / (ln2().exp() + 1.0);
    let average = 2.0 * first + 3.0 * (1.0 - first);
    close(&reference.out[..16], &[2.0 * average; 16]);
    close(&reference.out[16..], &[average; 16]);
    assert_eq!(inputs.problem(DType::F32, true).unwrap().value_dim, 32);
}
