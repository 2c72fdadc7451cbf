//! Merging partial results on the CPU: against a few lines of f64, and against attention over all
//! of the keys at once.

mod numbers;

use numbers::{Number, numbers};
use regard::cpu::{Cpu, Workspace};
use regard::oracle::Judge;
use regard::{Attention, DType, Inputs, Merge, Outputs, Tensor, TensorMut, bf16, f16};

/// One merge to try.
#[derive(Debug, Clone, Copy)]
struct Trial {
    parts: usize,
    rows: usize,
    dim: usize,
    /// Elements between one part and the next, beyond a part's own.
    gap: usize,
    /// Elements between one element of a row and the next.
    step: usize,
    /// Whether the log-sum-exp is wanted.
    lse: bool,
}

impl Trial {
    fn check<P: Number, O: Number>(&self, cpu: &Cpu) {
        let &Trial { parts, rows, dim, gap, step, lse } = self;
        let part = rows * dim * step + gap;
        let mut outs = numbers::<P>(1, (parts * part).max(1));
        let mut weights: Vec<f32> =
            numbers::<f32>(2, parts * rows).into_iter().map(|x| 20.0 * x).collect();
        for row in 0..rows {
            for k in 0..parts {
                // Some parts have seen nothing of a row, and of the last row none has; the contents
                // of such parts must not matter.
                if (row + k) % 3 == 0 && parts > 1 || row == 3 {
                    weights[k * rows + row] = f32::NEG_INFINITY;
                    outs[k * part + row * dim * step..][..dim * step].fill(P::from_f64(f64::NAN));
                }
            }
        }
        let strides = [part as i64, (dim * step) as i64, step as i64];
        let mut out = numbers::<O>(3, rows * dim * step);
        let mut out_lse = vec![f32::NAN; rows];
        let out_strides = [(dim * step) as i64, step as i64];
        let mut merge = Merge {
            parts: Tensor::with_strides(&outs, [parts, rows, dim], strides).expect("parts"),
            part_lse: Tensor::new(&weights, [parts, rows]).expect("weights"),
            out: TensorMut::with_strides(&mut out, [rows, dim], out_strides).expect("out"),
            lse: lse.then(|| TensorMut::new(&mut out_lse, [rows]).expect("lse")),
        };
        cpu.merge(&mut merge).unwrap_or_else(|error| panic!("{self:?}: {error}"));

        for row in 0..rows {
            let weight_of = |k: usize| f64::from(weights[k * rows + row]);
            let seen = || (0..parts).filter(|&k| weight_of(k) != f64::NEG_INFINITY);
            let max = seen().map(weight_of).fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = seen().map(|k| (weight_of(k) - max).exp()).sum();
            let expected_lse = if sum > 0.0 { max + sum.ln() } else { f64::NEG_INFINITY };
            let close = |found: f64, expected: f64, scale: f64, dtype: DType| {
                // One rounding to the type (f16's steps are even below its normal numbers), and in
                // f32 one of each part's weight and product: exponents of up to 40 have errors of
                // 40 roundings.
                let min_rounding = if dtype == DType::F16 { 2f64.powi(-25) } else { 0.0 };
                let rounding = (dtype.epsilon() / 2.0 * expected.abs()).max(min_rounding);
                let slack = rounding + (64.0 + parts as f64) * f64::from(f32::EPSILON) * scale;
                found == expected || (found - expected).abs() <= slack
            };
            let found = f64::from(out_lse[row]);
            let scale = expected_lse.abs().max(1.0);
            assert!(
                if lse { close(found, expected_lse, scale, DType::F32) } else { found.is_nan() },
                "{self:?}: log-sum-exp of row {row} is {found}, not {expected_lse}"
            );
            for i in 0..dim {
                let at = |k: usize| outs[k * part + (row * dim + i) * step].to_f64();
                let share = |k: usize| (weight_of(k) - max).exp() / sum;
                let expected: f64 = seen().map(|k| share(k) * at(k)).sum();
                let scale: f64 = seen().map(|k| share(k) * at(k).abs()).sum();
                let found = out[(row * dim + i) * step].to_f64();
                assert!(
                    close(found, expected, scale, O::DTYPE),
                    "{self:?}: element {i} of row {row} is {found}, not {expected}"
                );
            }
        }
    }
}

#[test]
fn parts_of_any_shape_type_and_stride() {
    let cpu = Cpu::new().expect("a CPU");
    for (parts, rows, dim) in
        [(1, 1, 1), (2, 300, 128), (3, 7, 80), (16, 32, 512), (33, 5, 576), (70, 9, 3), (0, 4, 64)]
    {
        for (gap, step, lse) in [(0, 1, true), (1, 1, false), (32, 3, true)] {
            let trial = Trial { parts, rows, dim, gap, step, lse };
            trial.check::<f32, f32>(&cpu);
            trial.check::<bf16, bf16>(&cpu);
            trial.check::<f16, f16>(&cpu);
            trial.check::<f32, bf16>(&cpu);
            trial.check::<f16, f32>(&cpu);
            trial.check::<bf16, f16>(&cpu);
        }
    }
}

/// Attention over pieces of a cache, merged, against the oracle over the whole of it.
#[test]
fn pieces_of_a_cache() {
    const SHAPE: [usize; 4] = [2, 3, 8, 64];
    const KV_HEADS: usize = 2;
    const KEYS: usize = 700;
    let cpu = Cpu::new().expect("a CPU");
    let [batch, q_len, heads, dim] = SHAPE;
    let rows = batch * q_len * heads;
    let q = numbers::<f32>(5, rows * dim);
    let k = numbers::<f32>(6, batch * KEYS * KV_HEADS * dim);
    let v = numbers::<f32>(7, batch * KEYS * KV_HEADS * dim);
    let q = Tensor::new(&q, SHAPE).expect("q");
    let pieces = [0..1, 1..1, 1..300, 300..KEYS];
    let mut outs = vec![0f32; pieces.len() * rows * dim];
    let mut lses = vec![0f32; pieces.len() * rows];
    let mut workspace = Workspace::default();
    let parts = outs.chunks_mut(rows * dim).zip(lses.chunks_mut(rows));
    for (keys, (out, lse)) in pieces.iter().zip(parts) {
        let shape = [batch, keys.len(), KV_HEADS, dim];
        let step = (KV_HEADS * dim) as i64;
        let strides = [KEYS as i64 * step, step, dim as i64, 1];
        let piece = |all| {
            let all: &[f32] = all;
            let from = &all[keys.start * KV_HEADS * dim..];
            Tensor::with_strides(from, shape, strides).expect("a piece")
        };
        let inputs = Inputs::new(q, piece(&k), piece(&v), Attention::default());
        let mut outputs = Outputs {
            out: TensorMut::new(out, SHAPE).expect("out"),
            lse: Some(TensorMut::new(lse, [batch, q_len, heads]).expect("lse")),
        };
        let plan = cpu.plan(&inputs, &outputs).expect("planned");
        cpu.load(&plan).expect("for this CPU");
        if workspace.bytes() < plan.workspace_bytes() {
            workspace = Workspace::for_plan(&plan).expect("memory");
        }
        cpu.run(&plan, &inputs, &mut outputs, &mut workspace).expect("sound operands");
    }
    let (mut out, mut lse) = (vec![0f32; rows * dim], vec![0f32; rows]);
    let mut merge = Merge {
        parts: Tensor::new(&outs, [pieces.len(), batch, q_len, heads, dim]).expect("parts"),
        part_lse: Tensor::new(&lses, [pieces.len(), batch, q_len, heads]).expect("part_lse"),
        out: TensorMut::new(&mut out, SHAPE).expect("out"),
        lse: Some(TensorMut::new(&mut lse, [batch, q_len, heads]).expect("lse")),
    };
    cpu.merge(&mut merge).expect("sound operands");
    let whole = [batch, KEYS, KV_HEADS, dim];
    let (k, v) = (Tensor::new(&k, whole).expect("k"), Tensor::new(&v, whole).expect("v"));
    let inputs = Inputs::new(q, k, v, Attention::default());
    let out = Tensor::new(&out, SHAPE).expect("out");
    let lse = Tensor::new(&lse, [batch, q_len, heads]).expect("lse");
    let judge = Judge::new(&inputs, DType::F32).expect("sound operands");
    judge.check(&out, Some(&lse)).unwrap_or_else(|mismatch| panic!("{mismatch}"));
}

#[test]
fn bad_input_is_named() {
    let cpu = Cpu::new().expect("a CPU");
    let (floats, ints) = (vec![0f32; 256], vec![0i32; 256]);
    let view = |shape: &[usize]| {
        Tensor::from_slice(&floats[..shape.iter().product()], shape, None).expect("a view")
    };
    let int_view = Tensor::new(&ints[..64], [2, 4, 8]).expect("a view");
    let refused = |parts, part_lse, out_shape: &[usize], lse_len: usize| {
        let (mut out, mut lse) = (vec![1f32; out_shape.iter().product()], vec![1f32; lse_len]);
        let mut merge = Merge {
            parts,
            part_lse,
            out: TensorMut::from_slice(&mut out, out_shape, None).expect("out"),
            lse: Some(TensorMut::new(&mut lse, [lse_len]).expect("lse")),
        };
        let error = cpu.merge(&mut merge).expect_err("refused").to_string();
        assert!(out.iter().chain(&lse).all(|&x| x == 1.0), "nothing is written");
        error
    };
    let (parts, lse) = (view(&[2, 4, 8]), view(&[2, 4]));
    let errors = [
        (
            refused(view(&[2]), lse, &[4, 8], 4),
            "`parts` is of shape [2]; allowed: [parts, rows, dim]",
        ),
        (refused(int_view, lse, &[4, 8], 4), "`parts` is of type i32; allowed: f32, f16 or bf16"),
        (refused(parts, view(&[2, 5]), &[4, 8], 4), "`part_lse` is f32[2, 5] with strides [5, 1]"),
        (
            refused(parts, lse, &[4, 9], 4),
            "`out` is f32[4, 9] with strides [9, 1]; allowed: [4, 8]",
        ),
        (refused(parts, lse, &[4, 8], 5), "`lse` is f32[5] with strides [1]; allowed: f32[4]"),
    ];
    for (error, words) in errors {
        assert!(error.starts_with(words), "{error}");
    }
    let mut memory = vec![0f32; 64];
    let raw = |memory: &mut [f32], shape: &[usize], strides: &[i64]| {
        // SAFETY: the call is refused, so nothing is written.
        unsafe { TensorMut::from_raw(memory.as_mut_ptr().cast(), DType::F32, shape, Some(strides)) }
            .expect("a view")
    };
    let out = raw(&mut memory, &[4, 8], &[1, 1]);
    let error =
        cpu.merge(&mut Merge { parts, part_lse: lse, out, lse: None }).expect_err("refused");
    assert!(error.to_string().ends_with("strides that give every element a place of its own"));
    let (out, out_lse) = (raw(&mut memory, &[4, 8], &[8, 1]), raw(&mut memory, &[4], &[1]));
    let mut merge = Merge { parts, part_lse: lse, out, lse: Some(out_lse) };
    let error = cpu.merge(&mut merge).expect_err("refused").to_string();
    assert_eq!(error, "`lse` is memory shared with `out`; allowed: memory of its own");
}
