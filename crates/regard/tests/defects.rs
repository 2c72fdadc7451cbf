//! Defects that other attention kernels had or have, each a test named after it. A public report is
//! cited if there is one. The other defects were found by reading kernels.

#[path = "support/far_offsets.rs"]
mod far_offsets;
mod support;

use regard::{DType, Error, Machine, Plan, Problem, QueryOffset};
use regard_cases::check::Checker;
use regard_cases::{
    Array, Case, Contents, Hide, Keys, KvLayout, Layout, MaskSpec, Numbers, OffsetSpec, Output,
    Spec,
};

/// Right on every level and thread count; the last output.
fn check_case(case: &Case) -> Output {
    let checker = Checker::new(case, support::limits::judged_rows())
        .unwrap_or_else(|failure| panic!("{}: {failure}", case.name));
    let mut last = None;
    for machine in support::machines() {
        let output = support::run(case, &machine);
        checker
            .check(&output)
            .unwrap_or_else(|failure| panic!("{} on {machine}: {failure}", case.name));
        last = Some(output);
    }
    last.expect("there is always the scalar level")
}

fn check(spec: Spec) -> Output {
    check_case(&spec.legal().generate())
}

fn spec(name: &str) -> Spec {
    Spec::new(name)
}

#[test]
fn fully_masked_rows_give_nan() {
    // pytorch#103963
    for (dtype, nothing) in
        [(DType::Bool, 0.0), (DType::F32, f64::NEG_INFINITY), (DType::F16, f64::NEG_INFINITY)]
    {
        let mut case = spec("fully-masked").lengths(&[(6, 70)]).generate();
        let data = regard_cases::Data::from_numbers(dtype, std::iter::repeat_n(nothing, 6 * 70));
        case.attention.mask = Some(Array::new(data, &[1, 1, 6, 70]).unwrap());
        let output = check_case(&case);
        assert!(output.out.numbers().unwrap().iter().all(|&x| x == 0.0));
        assert!(output.lse.numbers().unwrap().iter().all(|&x| x == f64::NEG_INFINITY));
    }
}

#[test]
fn nan_in_unused_value_slots_leaks() {
    // flash-attention#1745, vllm#936: 0 * NaN is NaN.
    for keys in [
        Keys::Batched { slack: 70 },
        Keys::Ragged { slack: 9 },
        Keys::Paged { block_size: 64, interleaved: true },
    ] {
        for kv_len in [1, 3, 15, 63, 65] {
            check(Spec {
                keys,
                causal: true,
                ..spec("unused-slots").lengths(&[(2, kv_len), (2, kv_len + 2)])
            });
        }
    }
}

#[test]
fn causal_alignment_surprises_when_lengths_differ() {
    // flash-attention#517, mlx#2967: the last query sees the last key, unless q_offset says
    // otherwise.
    let bottom_right = Spec { causal: true, ..spec("bottom-right").lengths(&[(3, 9)]) };
    let explicit = Spec { offset: OffsetSpec::Same(6), ..bottom_right.clone() };
    let (a, b) = (check(bottom_right.clone()), check(explicit));
    assert_eq!(a.out.numbers().unwrap(), b.out.numbers().unwrap());
    let top_left = check(Spec { offset: OffsetSpec::Same(0), ..bottom_right });
    assert_ne!(a.out.numbers().unwrap(), top_left.out.numbers().unwrap());
    // More queries than keys: the first ones see nothing.
    let more = check(Spec { causal: true, ..spec("more-queries").lengths(&[(9, 3)]) });
    let lse = more.lse.numbers().unwrap();
    assert!(
        lse[..6 * 4].iter().all(|&x| x == f64::NEG_INFINITY)
            && lse[6 * 4..].iter().all(|x| x.is_finite())
    );
}

#[test]
fn causal_without_an_offset_sees_one_key_at_decode() {
    // Top-left causality at decode sees the first key only.
    let output = check(Spec { causal: true, ..spec("decode").lengths(&[(1, 50)]) });
    let full = check(spec("decode").lengths(&[(1, 50)]));
    assert_eq!(output.out.numbers().unwrap(), full.out.numbers().unwrap());
}

#[test]
fn no_arbitrary_mask_on_the_fast_path() {
    // flash-attention#352
    for broadcast in [[true, true, false, false], [false; 4]] {
        let mask = Some(MaskSpec { dtype: DType::F16, hide: Hide::Infinite, broadcast });
        check(Spec { mask, ..spec("arbitrary-mask").lengths(&[(70, 300)]).dtype(DType::F16) });
    }
}

#[test]
fn head_dims_are_refused() {
    // flash-attention#2427, vllm#1455
    for dim in [5, 33, 72, 88, 104, 112, 120, 160, 224, 320, 575] {
        check(Spec { causal: true, ..spec("head-dims").dims(dim, dim).dtype(DType::BF16) });
    }
}

#[test]
fn dims_are_lost_at_80() {
    // A kernel made for multiples of 32 or 64 that drops the rest.
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        check(spec("dim-80").dims(80, 80).dtype(dtype));
        check(Spec {
            causal: true,
            ..spec("dim-80").dims(80, 80).dtype(dtype).lengths(&[(1, 200)])
        });
    }
}

#[test]
fn page_sizes_are_limited() {
    // flash-attention#828
    for block_size in [1, 2, 3, 15, 17, 63] {
        let keys = Keys::Paged { block_size, interleaved: false };
        check(Spec { keys, causal: true, ..spec("page-sizes").lengths(&[(1, 100), (1, 17)]) });
    }
}

#[test]
fn block_sizes_above_64_overflow() {
    for block_size in [65, 96, 128, 200, 256, 1000, 2048] {
        for kv_layout in [KvLayout::Nhd, KvLayout::Hnd] {
            let keys = Keys::Paged { block_size, interleaved: false };
            check(Spec { keys, kv_layout, ..spec("large-pages").lengths(&[(2, 300)]).dims(8, 8) });
        }
    }
}

#[test]
fn strides_are_ignored() {
    // flash-attention#2886
    for padding in [1, 4, 64] {
        for layout in [Layout::Bshd, Layout::Bhsd] {
            check(Spec {
                padding,
                layout,
                causal: true,
                ..spec("strides").lengths(&[(5, 70), (5, 70)])
            });
        }
    }
}

#[test]
fn bits_depend_on_the_batch() {
    // flash-attention#1897, flashinfer#2424
    let machine = Machine::host().unwrap();
    let base = Spec { batch_invariant: true, causal: true, ..spec("batch").lengths(&[(1, 3000)]) };
    let alone = support::run(&base.generate(), &machine).out.numbers().unwrap();
    let batch = base.lengths(&[(1, 3000), (1, 17), (1, 2000), (1, 1), (1, 900)]);
    let among = support::run(&batch.generate(), &machine).out.numbers().unwrap();
    assert_eq!(alone[..], among[..alone.len()]);
}

#[test]
fn workspace_is_over_requested() {
    // vllm#40023: 16 times the needed size. Here: a few tiles per thread for any lengths.
    let problem = |q_len, kv_len| {
        let case = Spec {
            causal: true,
            ..spec("workspace").lengths(&[(1, 1)]).heads(32, 8).dims(128, 128)
        }
        .generate();
        let mut problem = None;
        case.run(|inputs, outputs| {
            problem = Some(Problem::from_operands(inputs, outputs)?);
            Ok(())
        })
        .unwrap();
        Problem { query_len: q_len, kv_len, ..problem.unwrap() }
    };
    for threads in [1, 8, 64] {
        let machine = Machine::host().unwrap().with_threads(threads);
        for (q_len, kv_len) in [(1, 4096), (1, 1 << 20), (4096, 4096), (1 << 20, 1 << 20)] {
            let plan = Plan::new(&problem(q_len, kv_len), &machine).unwrap();
            // Two blocks of rows and two tiles of keys, each Dk + Dv wide, scores, and a little;
            // and at most eight blocks of partial results.
            let (rows, keys) = (plan.choice().block_rows, plan.choice().tile_keys);
            let tile =
                4 * (2 * (rows + keys) * 256 + 2 * rows * keys) + 8 * 4 * rows * 256 + (64 << 10);
            let max_bytes = threads * tile;
            assert!(
                plan.workspace_bytes() <= max_bytes,
                "{} > {max_bytes}: {}",
                plan.workspace_bytes(),
                plan.explain()
            );
        }
    }
}

#[test]
fn padded_blocks_are_live_under_a_larger_plan() {
    // flashinfer#5176: operands that a plan was made for and a call does not have must not be
    // touched.
    let large =
        Spec { causal: true, ..spec("planned").lengths(&[(1, 4000), (1, 4000), (1, 4000)]) };
    let small =
        Spec { keys: Keys::Ragged { slack: 0 }, ..large.clone().lengths(&[(1, 3), (1, 0)]) };
    for machine in support::machines() {
        let case = small.generate();
        let output = case.run(|inputs, outputs| {
            let found = Problem::from_operands(inputs, outputs)?;
            let plan = Plan::new(&Problem { batch: 3, kv_len: 4000, ..found }, &machine)?;
            // A plan runs again and again over the same workspace.
            let mut workspace = vec![0xff; plan.workspace_bytes()];
            plan.run(inputs, outputs, &mut workspace)?;
            plan.run(inputs, outputs, &mut workspace)
        });
        Checker::new(&case, None).unwrap().check(&output.unwrap()).unwrap();
    }
}

#[test]
fn a_slow_path_is_taken_in_silence() {
    // mlx#3658: a problem that cannot run is refused; the kernel that runs is named.
    let case = spec("explained").generate();
    case.run(|inputs, outputs| {
        let problem = Problem::from_operands(inputs, outputs)?;
        let elsewhere = Plan::new(&problem, &"h200".parse::<Machine>()?)?;
        let refused = elsewhere.run(inputs, outputs, &mut vec![0; elsewhere.workspace_bytes()]);
        assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
        let plan = Plan::new(&problem, &Machine::host()?)?;
        assert!(plan.explain().contains(plan.choice().kernel.name()));
        Ok(())
    })
    .unwrap();
}

#[test]
fn alibi_is_zero_at_decode() {
    // keras-hub#2862: the one query row is not at distance 0 from every key.
    let decode = Spec { causal: true, alibi: true, ..spec("alibi-decode").lengths(&[(1, 60)]) };
    let without = check(Spec { alibi: false, ..decode.clone() });
    assert_ne!(check(decode).lse.numbers().unwrap(), without.lse.numbers().unwrap());
}

#[test]
fn alibi_has_the_wrong_sign() {
    // Equal scores, and values that tell near from far: the near key must weigh more, on either
    // side.
    let ones = |n: usize| Array::new(vec![1f32; n], &[1, n, 1, 1]).unwrap();
    let values = Array::new(
        (0..9).map(|j| if j < 4 { 1.0 } else { 0.0 }).collect::<Vec<f32>>(),
        &[1, 9, 1, 1],
    )
    .unwrap();
    let mut case = Case::new("alibi-sign", ones(1), ones(9), values);
    case.attention.alibi_slopes = Some(Array::new(vec![0.5f32], &[1]).unwrap());
    let half = 4.0 / 9.0;
    let first = |output: Output| output.out.numbers().unwrap()[0];
    for (position, near) in [(0, true), (8, false), (-3, true), (20, false)] {
        case.attention.q_offset = QueryOffset::Same(position);
        assert_eq!(first(check_case(&case)) > half, near, "query at {position}");
    }
}

#[test]
fn sinks_work_on_one_architecture_only() {
    // flash-attention#1797: every level, with and without rows that see nothing.
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        check(Spec { sinks: true, causal: true, ..spec("sinks").dtype(dtype).lengths(&[(9, 4)]) });
        check(Spec { sinks: true, ..spec("sinks").dtype(dtype).lengths(&[(1, 1500)]) });
    }
    let mut case = Spec { sinks: true, ..spec("no-sink") }.generate();
    case.attention.sinks = Some(Array::new(vec![f32::NEG_INFINITY; 4], &[4]).unwrap());
    check_case(&case);
}

#[test]
fn no_keys_give_nan_or_nothing_written() {
    for q_len in [1, 5, 70] {
        for keys in [
            Keys::Batched { slack: 0 },
            Keys::Ragged { slack: 4 },
            Keys::Paged { block_size: 16, interleaved: false },
        ] {
            let output = check(Spec {
                keys,
                causal: true,
                ..spec("no-keys").lengths(&[(q_len, 0), (q_len, 0)])
            });
            assert!(output.out.numbers().unwrap().iter().all(|x| x.to_bits() == 0));
        }
    }
}

#[test]
fn the_tail_of_keys_is_over_read() {
    // Keys end at the end of their memory: a vector too far is out of bounds (AddressSanitizer sees
    // it), or 0 * NaN.
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for dim in [1, 3, 9, 20] {
            for kv_len in [1, 2, 5, 13, 67] {
                check(spec("tail").lengths(&[(2, kv_len)]).heads(1, 1).dims(dim, dim).dtype(dtype));
            }
        }
    }
}

#[test]
fn a_causal_chunk_reaches_past_the_aligned_key_length() {
    // Positions past the last key, with lengths on and beside a tile's end.
    for kv_len in [63, 64, 65, 100, 128] {
        for past in [1, 5, 64] {
            let offset = OffsetSpec::Same(kv_len as i64 - 20 + past);
            let keys = Keys::Batched { slack: 130 };
            check(Spec { causal: true, offset, keys, ..spec("chunk").lengths(&[(20, kv_len)]) });
        }
    }
}

#[test]
fn mask_rows_past_the_queries_are_read() {
    // The generated mask has a row more than there are queries and two columns more than keys, full
    // of NaN.
    for q_len in [1, 3, 63, 65] {
        let mask = Some(MaskSpec {
            dtype: DType::F32,
            hide: Hide::Nothing,
            broadcast: [true, true, false, false],
        });
        check(Spec { mask, ..spec("mask-rows").lengths(&[(q_len, 65)]) });
    }
    // And a mask at the end of its memory.
    let mut case = spec("mask-end").lengths(&[(3, 21)]).generate();
    case.attention.mask = Some(Array::new(vec![0.25f32; 63], &[1, 1, 3, 21]).unwrap());
    check_case(&case);
}

#[test]
fn an_additive_mask_is_squeezed_through_f16() {
    // -1e5 becomes minus infinity in f16: a row that holds nothing else would come out empty.
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let mut case = spec("minus-1e5").lengths(&[(3, 70)]).dtype(dtype).generate();
        case.attention.mask = Some(Array::new(vec![-1e5f32; 70], &[70]).unwrap());
        let output = check_case(&case);
        for lse in output.lse.numbers().unwrap() {
            assert!((-1e5 - 1.0..-9.9e4).contains(&lse), "{lse}");
        }
        assert!(output.out.numbers().unwrap().iter().any(|&x| x != 0.0));
    }
}

#[test]
fn more_scratch_is_needed_than_there_is() {
    // The largest head dims run in the kernel of the plan, on every level.
    for (head_dim, value_dim) in [(576, 576), (576, 512), (1, 576)] {
        let base = spec("scratch").heads(16, 1).dims(head_dim, value_dim);
        check(Spec { causal: true, ..base.clone().lengths(&[(40, 130)]) });
        check(Spec {
            causal: true,
            keys: Keys::Paged { block_size: 64, interleaved: false },
            ..base.lengths(&[(1, 600)])
        });
    }
}

#[test]
fn a_row_past_65535_is_lost() {
    // A 16-bit row index.
    let (rows, dim) = (65_600, 4);
    let case =
        Spec { causal: true, ..spec("rows").lengths(&[(rows, 3)]).heads(1, 1).dims(dim, dim) };
    let case = Spec { offset: OffsetSpec::Same(0), ..case }.generate();
    let checker = Checker::new(&case, None).unwrap();
    for machine in support::machines() {
        checker.check(&support::run(&case, &machine)).unwrap();
    }
    // Sequences, heads and keys past it.
    let many = vec![(1, 1); rows];
    check(Spec { causal: true, ..spec("sequences").lengths(&many).heads(1, 1).dims(2, 2) });
    check(spec("heads").lengths(&[(1, 2)]).heads(65_600, 65_600).dims(1, 1));
    check(Spec { causal: true, ..spec("keys").lengths(&[(1, 70_000)]).heads(2, 1).dims(4, 4) });
}

#[test]
fn element_offsets_past_2_to_the_31_are_wrong() {
    // vllm#50427, and 32-bit key/value offsets in several kernels.
    let machines = support::machines();
    far_offsets::check(false, machines.len(), &mut |number, inputs, outputs| {
        support::on(&machines[number])(inputs, outputs)
    });
}

/// One row of zeros against keys of zeros: the scores are the mask.
fn masked_alone(mask: &[f32], values: &[f32]) -> Case {
    let view = |data: Vec<f32>| Array::new(data, &[1, values.len(), 1, 1]).unwrap();
    let q = Array::new(vec![0f32], &[1, 1, 1, 1]).unwrap();
    let mut case =
        Case::new("masked-alone", q, view(vec![0.0; values.len()]), view(values.to_vec()));
    case.attention.mask = Some(Array::new(mask.to_vec(), &[1, 1, 1, mask.len()]).unwrap());
    case
}

#[test]
fn masks_beyond_f32_max_over_log2_e_overflow() {
    // Scores in base 2 end at 2.36e38 in natural units. Lower scores would be hidden or equal.
    for (mask, out, lse) in [
        ([-3.4028e38, -2.4e38], 2.0, -2.4e38),
        ([f32::MIN, f32::MIN], 1.5, f32::MIN),
        ([f32::MIN, f32::NEG_INFINITY], 1.0, f32::MIN),
        ([f32::MIN, 0.0], 2.0, 0.0),
        ([3e38, 2e38], 1.0, 3e38),
        ([f32::MAX, f32::MIN], 1.0, f32::MAX),
    ] {
        let output = check_case(&masked_alone(&mask, &[1.0, 2.0]));
        assert_eq!(output.out.numbers().unwrap()[0], out, "{mask:?}");
        // A rounding into base 4, and one back.
        let (found, lse) = (output.lse.numbers().unwrap()[0], f64::from(lse));
        assert!(
            (found - lse).abs() <= lse.abs() * f64::from(f32::EPSILON),
            "{mask:?}: {found} for {lse}"
        );
    }
    // With a tile of hidden keys before and after the visible keys, and with sinks of any size.
    for lowest in [f32::MIN, -3e38, -2.4e38] {
        for sink in [None, Some(f32::MIN), Some(-2.9e38), Some(f32::MAX)] {
            let mut mask = vec![lowest; 700];
            mask[300..310].fill(-2.3e38);
            let mut case = masked_alone(&mask, &(0..700).map(|j| j as f32).collect::<Vec<_>>());
            case.attention.sinks = sink.map(|sink| Array::new(vec![sink], &[1]).unwrap());
            let output = check_case(&case);
            let sunk = matches!(sink, Some(f32::MAX));
            assert_eq!(
                output.out.numbers().unwrap()[0],
                if sunk { 0.0 } else { 304.5 },
                "{lowest} {sink:?}"
            );
        }
    }
}

#[test]
fn rows_masked_by_the_lowest_number_are_not_empty() {
    // The numbers that transformers puts into its masks, in every type, at decode, verify and
    // prefill. Scores are so large that their sums with the mask reach and pass the range of f32.
    for (q_len, kv_len) in [(1, 300), (5, 70), (40, 130), (100, 200)] {
        for (dtype, mask_dtype) in [
            (DType::F32, DType::F32),
            (DType::F16, DType::F32),
            (DType::BF16, DType::BF16),
            (DType::F32, DType::F16),
        ] {
            let mask = MaskSpec {
                dtype: mask_dtype,
                hide: Hide::Lowest,
                broadcast: [true, true, false, false],
            };
            let base = Spec {
                mask: Some(mask),
                ..spec("lowest").lengths(&[(q_len, kv_len)]).dtype(dtype)
            };
            for scale in [None, Some((1u64 << 60) as f32)] {
                for sinks in [false, true] {
                    let output = check(Spec { scale, sinks, ..base.clone() });
                    assert!(output.lse.numbers().unwrap().iter().all(|x| x.is_finite()));
                }
            }
        }
    }
}

#[test]
fn parameters_at_their_bounds_give_nan() {
    let large = (1u64 << 60) as f32;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for q_len in [1, 20, 80] {
            let base = spec("bounds").lengths(&[(q_len, 150)]).dtype(dtype);
            for scale in [large, -large, 1.0 / large, 1e-38, 0.0] {
                check(Spec { scale: Some(scale), ..base.clone() });
                for cap in [large, 1.0 / large] {
                    check(Spec { scale: Some(scale), softcap: Some(cap), ..base.clone() });
                }
            }
            for slope in [large, -large] {
                for offset in [0, i64::from(i32::MAX), i64::from(i32::MIN)] {
                    let mut case =
                        Spec { alibi: true, offset: OffsetSpec::Same(offset), ..base.clone() }
                            .generate();
                    case.attention.alibi_slopes =
                        Some(Array::new(vec![slope, -slope, 0.0, 0.5], &[4]).unwrap());
                    check_case(&case);
                }
            }
            for sink in [f32::MAX, f32::MIN, 2.4e38, -2.4e38] {
                let mut case = Spec { sinks: true, ..base.clone() }.generate();
                case.attention.sinks =
                    Some(Array::new(vec![sink, 0.0, f32::NEG_INFINITY, -sink], &[4]).unwrap());
                check_case(&case);
            }
        }
    }
}

#[test]
fn products_of_one_sign_stray_with_the_head_dim() {
    // One row, one key: the lse is the score, and q * k * D is exact.
    let ones = |dim: usize, number: f32| Array::new(vec![number; dim], &[1, 1, 1, dim]).unwrap();
    for dim in [64, 128, 192, 256, 320, 512, 576] {
        let mut case = Case::new("one-sign", ones(dim, 0.5), ones(dim, 0.25), ones(dim, 1.0));
        case.attention.scale = Some(1.0);
        let lse = check_case(&case).lse.numbers().unwrap()[0];
        let exact = dim as f64 / 8.0;
        // Rounded to f32 after the product: into base 4, and back.
        assert!((lse - exact).abs() <= exact * f64::from(f32::EPSILON), "{dim}: {lse} for {exact}");
    }
    // As after a ReLU, and with all products equal and inexact; few keys and many, on every walk.
    for numbers in [Numbers::Positive, Numbers::Constant(0.3), Numbers::Constant(0.7)] {
        for dim in [4, 48, 128, 256, 320, 448, 576] {
            for (q_len, kv_len) in [(1, 1), (1, 300), (6, 70), (40, 100), (90, 700)] {
                for dtype in [DType::F32, DType::BF16] {
                    let base = spec("one-sign")
                        .lengths(&[(q_len, kv_len)])
                        .heads(2, 1)
                        .dims(dim, dim.min(64));
                    check(Spec { contents: Contents::from_numbers(numbers), ..base.dtype(dtype) });
                }
            }
        }
    }
}

#[test]
fn sums_over_many_equal_keys_stray() {
    // The same for the sum over keys: constant values, thousands of them.
    for value in [0.1, 0.3, 0.7] {
        for (q_len, batch_invariant) in [(1, false), (1, true), (20, false), (70, false)] {
            let base = spec("equal-keys").lengths(&[(q_len, 5000)]).heads(1, 1).dims(16, 16);
            let contents = Contents {
                v: Numbers::Constant(value),
                k: Numbers::Constant(0.5),
                ..Contents::default()
            };
            check(Spec { contents, batch_invariant, ..base });
        }
    }
}

#[test]
fn nan_in_a_key_is_lost() {
    // Rows that see it are NaN, and a check reports a kernel that hides it; other sequences and
    // heads are not touched.
    for q_len in [1, 20, 80] {
        let mut case = spec("nan-key").lengths(&[(q_len, 90), (q_len, 90)]).heads(2, 2).generate();
        let mut keys: Vec<f32> = case.k.numbers().unwrap().into_iter().map(|x| x as f32).collect();
        keys[..32].fill(f32::NAN);
        case.k = Array::new(keys, &[2, 90, 2, 32]).unwrap();
        let output = check_case(&case);
        let lse = output.lse.numbers().unwrap();
        for (i, x) in lse.iter().enumerate() {
            assert_eq!(x.is_nan(), i < q_len * 2 && i % 2 == 0, "{i}: {x}");
        }
    }
}
