//! Merging partial results: against a few lines of arithmetic, and against attention over all of
//! the keys at once.

use super::{Broken, expect};
use crate::cuda::mirror::Mirror;
use crate::cuda::{MirrorMut, Runner};
use crate::noise::Noise;
use crate::{Array, Data};
use regard::cuda::{DeviceMemory, Merge, driver_error};
use regard::oracle::Judge;
use regard::{
    Attention, DType, Error, Inputs, KeyLayout, Outputs, QueryOffset, Shard, Tensor, TensorMut,
    Window,
};

/// One merge to try.
#[derive(Debug, Clone, Copy)]
struct Trial {
    parts: usize,
    rows: usize,
    dim: usize,
    dtypes: [DType; 2],
    /// Elements between one part and the next.
    gap: usize,
    /// Whether the log-sum-exp is wanted.
    lse: bool,
}

/// Every shape and type; then attention over the shards of a cache equals attention over the cache;
/// then refusals.
pub fn merge(runner: &mut Runner) -> Result<String, Broken> {
    let mut trials = 0;
    for (parts, rows, dim) in
        [(1, 1, 1), (2, 300, 128), (3, 7, 80), (16, 32, 512), (33, 5, 576), (70, 9, 3), (0, 4, 64)]
    {
        for (from, to) in [
            (DType::F32, DType::F32),
            (DType::BF16, DType::BF16),
            (DType::F16, DType::F16),
            (DType::F32, DType::BF16),
            (DType::F16, DType::F32),
        ] {
            for (gap, lse) in [(0, true), (1, false), (32, true)] {
                let trial = Trial { parts, rows, dim, dtypes: [from, to], gap, lse };
                trial
                    .check(runner)
                    .map_err(|Broken(words)| Broken(format!("{trial:?}: {words}")))?;
                trials += 1;
            }
        }
    }
    let mut shards = 0;
    for layout in [KeyLayout::Contiguous, KeyLayout::RoundRobin] {
        for count in 1..=4 {
            shards_of_a_cache(runner, layout, count)?;
            shards += count;
        }
    }
    let refused = refusals(runner)?;
    Ok(format!("{trials} merges; {shards} shards of a cache; {refused} refusals"))
}

fn numbers(dtype: DType, shape: &[usize], seed: u64) -> Result<Array, Error> {
    let mut noise = Noise::new(seed, &[0x006d_6572_6765]);
    let count: usize = shape.iter().product();
    Array::new(Data::from_numbers(dtype, (0..count).map(|_| f64::from(noise.normal()))), shape)
}

impl Trial {
    /// One rounding to the type (f16's steps are even below its normal numbers), and in f32 one of
    /// each part's weight and product: exponents of up to 40 have errors of 40 roundings.
    fn is_close(&self, found: f64, expected: f64, scale: f64, dtype: DType) -> bool {
        let step = if dtype == DType::F16 { 2f64.powi(-25) } else { 0.0 };
        let rounding = (dtype.epsilon() / 2.0 * expected.abs()).max(step);
        let slack = rounding + (64.0 + self.parts as f64) * f64::from(f32::EPSILON) * scale;
        found == expected || (found - expected).abs() <= slack
    }

    fn check(&self, runner: &mut Runner) -> Result<(), Broken> {
        let &Trial { parts, rows, dim, dtypes: [from, to], gap, lse } = self;
        let stream = runner.stream().clone();
        let part = rows * dim + gap;
        let outs = numbers(from, &[(parts * part).max(1)], 1)?;
        let mut noise = Noise::new(2, &[]);
        let mut weights: Vec<f64> =
            (0..parts * rows).map(|_| f64::from(8.0 * noise.normal())).collect();
        let mut values = outs.numbers()?;
        for row in 0..rows {
            for k in 0..parts {
                // Some parts have seen nothing of a row, and of the last row none has; the contents
                // of such parts must not matter.
                if (row + k) % 3 == 0 && parts > 1 || row == 3 {
                    weights[k * rows + row] = f64::NEG_INFINITY;
                    values[k * part + row * dim..][..dim].fill(f64::NAN);
                }
            }
        }
        let strides = [part as i64, dim as i64, 1];
        let outs = Array::strided(
            Data::from_numbers(from, values.iter().copied()),
            0,
            &[parts, rows, dim],
            &strides,
        )?;
        let part_lse =
            Array::new(Data::from_numbers(DType::F32, weights.iter().copied()), &[parts, rows])?;

        let device_parts = Mirror::new(&outs.view()?, &stream)?;
        let device_part_lse = Mirror::new(&part_lse.view()?, &stream)?;
        let mut out = numbers(to, &[rows, dim], 3)?;
        let mut out_lse = numbers(DType::F32, &[rows], 4)?;
        let device_out = MirrorMut::new(&mut out.view_mut()?, &stream)?;
        let device_lse = MirrorMut::new(&mut out_lse.view_mut()?, &stream)?;
        let mut merge = Merge {
            parts: device_parts.view(),
            part_lse: device_part_lse.view(),
            out: device_out.view(),
            lse: lse.then(|| device_lse.view()),
        };
        runner.gpu().merge(&stream, &mut merge)?;
        device_out.download(&mut out.view_mut()?, &stream)?;
        device_lse.download(&mut out_lse.view_mut()?, &stream)?;

        let (found, found_lse) = (out.numbers()?, out_lse.numbers()?);
        for row in 0..rows {
            let seen = || (0..parts).filter(|k| weights[k * rows + row] != f64::NEG_INFINITY);
            let max = seen().map(|k| weights[k * rows + row]).fold(f64::NEG_INFINITY, f64::max);
            let weight = |k: usize| (weights[k * rows + row] - max).exp();
            let sum: f64 = seen().map(weight).sum();
            let expected_lse = if sum > 0.0 { max + sum.ln() } else { f64::NEG_INFINITY };
            if lse {
                let scale = expected_lse.abs().max(1.0);
                expect(self.is_close(found_lse[row], expected_lse, scale, DType::F32), || {
                    format!("log-sum-exp of row {row} is {}, not {expected_lse}", found_lse[row])
                })?;
            } else {
                expect(found_lse[row].is_nan(), || {
                    "a log-sum-exp was written, but not asked for".into()
                })?;
            }
            for i in 0..dim {
                let at = |k: usize| values[k * part + row * dim + i];
                let share = |k: usize| if sum > 0.0 { weight(k) / sum } else { 0.0 };
                let expected: f64 = seen().map(|k| share(k) * at(k)).sum();
                let scale: f64 = seen().map(|k| share(k) * at(k).abs()).sum();
                let found = found[row * dim + i];
                expect(self.is_close(found, expected, scale, to), || {
                    format!("element {i} of row {row} is {found}, not {expected}")
                })?;
            }
        }
        Ok(())
    }
}

const SHAPE: [usize; 4] = [2, 3, 8, 64];
const KV_HEADS: usize = 2;
const KEYS: usize = 700;

/// Attention over the shards of a cache, merged, against the oracle over the whole of it.
fn shards_of_a_cache(runner: &mut Runner, layout: KeyLayout, count: usize) -> Result<(), Broken> {
    let stream = runner.stream().clone();
    let [batch, q_len, heads, dim] = SHAPE;
    let q = numbers(DType::F32, &SHAPE, 5)?;
    let k = numbers(DType::F32, &[batch, KEYS, KV_HEADS, dim], 6)?;
    let v = numbers(DType::F32, &[batch, KEYS, KV_HEADS, dim], 7)?;
    let slopes = numbers(DType::F32, &[heads], 8)?;
    let all_keys = Attention {
        causal: true,
        window: Window { left: Some(550), right: None },
        alibi_slopes: Some(slopes.view()?),
        q_offset: QueryOffset::Same(KEYS as i64 - 2),
        ..Attention::default()
    };
    let rows = batch * q_len * heads;
    let (mut outs, mut lses) = (Vec::new(), Vec::new());
    for rank in 0..count {
        let shard = Shard { rank, count, layout };
        let keys = shard.positions(KEYS)?;
        let of = |array: &Array| -> Result<Array, Error> {
            let step = KV_HEADS * dim;
            let all = array.numbers()?;
            let row = |b: usize, j: usize| (b * KEYS + keys.position(j) as usize) * step;
            let taken = (0..batch).flat_map(|b| {
                let rows = (0..keys.len).map(move |j| row(b, j));
                rows.flat_map(|at| all[at..at + step].to_vec()).collect::<Vec<_>>()
            });
            Array::new(Data::from_numbers(DType::F32, taken), &[batch, keys.len, KV_HEADS, dim])
        };
        let (k, v) = (of(&k)?, of(&v)?);
        let (mut out, mut lse) = (vec![0f32; rows * dim], vec![0f32; rows]);
        let attention = Attention { key_positions: Some(shard.key_positions(KEYS)?), ..all_keys };
        let inputs = Inputs::new(q.view()?, k.view()?, v.view()?, attention);
        let mut outputs = Outputs {
            out: TensorMut::from_slice(&mut out, &SHAPE, None)?,
            lse: Some(TensorMut::from_slice(&mut lse, &SHAPE[..3], None)?),
        };
        runner.run(&inputs, &mut outputs)?;
        outs.extend(out);
        lses.extend(lse);
    }
    let parts_shape = [count, batch, q_len, heads, dim];
    let parts = Mirror::new(&Tensor::from_slice(&outs, &parts_shape, None)?, &stream)?;
    let part_lse = Mirror::new(&Tensor::from_slice(&lses, &parts_shape[..4], None)?, &stream)?;
    let (mut out, mut lse) = (vec![0f32; rows * dim], vec![0f32; rows]);
    let device_out = MirrorMut::new(&mut TensorMut::from_slice(&mut out, &SHAPE, None)?, &stream)?;
    let device_lse =
        MirrorMut::new(&mut TensorMut::from_slice(&mut lse, &SHAPE[..3], None)?, &stream)?;
    let mut merge = Merge {
        parts: parts.view(),
        part_lse: part_lse.view(),
        out: device_out.view(),
        lse: Some(device_lse.view()),
    };
    runner.gpu().load_merge()?;
    runner.gpu().merge(&stream, &mut merge)?;
    device_out.download(&mut TensorMut::from_slice(&mut out, &SHAPE, None)?, &stream)?;
    device_lse.download(&mut TensorMut::from_slice(&mut lse, &SHAPE[..3], None)?, &stream)?;
    let inputs = Inputs::new(q.view()?, k.view()?, v.view()?, all_keys);
    Judge::new(&inputs, DType::F32)?
        .check(
            &Tensor::from_slice(&out, &SHAPE, None)?,
            Some(&Tensor::from_slice(&lse, &SHAPE[..3], None)?),
        )
        .map_err(|mismatch| Broken(mismatch.to_string()))?;
    Ok(())
}

/// Merges that must not run, and give the reason.
fn refusals(runner: &Runner) -> Result<usize, Broken> {
    let (gpu, stream) = (runner.gpu(), runner.stream());
    let memory =
        stream.alloc_zeros::<f32>(4096).map_err(|error| driver_error("allocating", error))?;
    let (base, _until_queued) =
        regard::cuda::cudarc::driver::DevicePtr::device_ptr(&memory, stream);
    let at = |place: u64, dtype, shape: &[usize], strides: Option<&[i64]>| {
        // SAFETY: the call is refused, so nothing is read.
        unsafe { Tensor::<DeviceMemory>::from_device_address(base + place, dtype, shape, strides) }
    };
    let to = |place: u64, dtype, shape: &[usize], strides: Option<&[i64]>| {
        // SAFETY: the call is refused, so nothing is written.
        unsafe {
            TensorMut::<DeviceMemory>::from_device_address(base + place, dtype, shape, strides)
        }
    };
    let f32 = DType::F32;
    let good = || -> Result<Merge<'_>, Error> {
        Ok(Merge {
            parts: at(0, f32, &[2, 4, 8], None)?,
            part_lse: at(1024, f32, &[2, 4], None)?,
            out: to(2048, f32, &[4, 8], None)?,
            lse: Some(to(4096, f32, &[4], None)?),
        })
    };
    let bad = [
        ("`parts` is of shape", Merge { parts: at(0, f32, &[2], None)?, ..good()? }),
        ("`parts` is of type", Merge { parts: at(0, DType::I32, &[2, 4, 8], None)?, ..good()? }),
        (
            "contiguous from the second",
            Merge { parts: at(0, f32, &[2, 4, 8], Some(&[64, 16, 1]))?, ..good()? },
        ),
        ("`part_lse` is", Merge { part_lse: at(1024, f32, &[2, 5], None)?, ..good()? }),
        ("`part_lse` is", Merge { part_lse: at(1024, DType::BF16, &[2, 4], None)?, ..good()? }),
        ("`out` is", Merge { out: to(2048, f32, &[4, 9], None)?, ..good()? }),
        ("`out` is", Merge { out: to(2048, f32, &[4, 8], Some(&[16, 1]))?, ..good()? }),
        ("`lse` is", Merge { lse: Some(to(4096, f32, &[8], None)?), ..good()? }),
        ("memory shared with `parts`", Merge { out: to(128, f32, &[4, 8], None)?, ..good()? }),
        ("memory shared with `out`", Merge { lse: Some(to(2048, f32, &[4], None)?), ..good()? }),
    ];
    let count = bad.len();
    for (words, mut merge) in bad {
        let result = gpu.merge(stream, &mut merge);
        super::interface::expect_refused("a merge", result, words)?;
    }
    Ok(count)
}
