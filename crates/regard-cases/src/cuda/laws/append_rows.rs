//! Rows of a latent cache that are quantized on the way: the bits that the CPU writes.

use super::{Broken, expect};
use crate::cuda::mirror::Mirror;
use crate::cuda::{MirrorMut, Runner};
use crate::noise::Noise;
use crate::{Array, Data};
use regard::cpu::Cpu;
use regard::{AppendLatent, AppendScales, DType, Error, Rotary};

const BLOCKS: usize = 5;
const BLOCK_SIZE: usize = 4;
const HEADS: usize = 2;
const QUERY_HEADS: usize = 3;
const TOKENS: usize = 8;
const POSITIONS: usize = 9;

/// One append to try.
#[derive(Debug, Clone, Copy)]
struct Trial {
    dtype: DType,
    pool: DType,
    /// Whether scales of codes are computed; otherwise they are given.
    dynamic: bool,
    dim: usize,
    /// Dims that are rotated, the last ones, and whether neighbours make pairs.
    rotary: Option<(usize, bool)>,
}

/// The memory that an append reads and writes, on the host.
struct Operands {
    key: Array,
    table: Array,
    lens: Array,
    angles: Array,
    query: Array,
    pool: Array,
    scales: Array,
}

/// Quantized rows and their scales have the bits that the CPU writes, in every format. Every other
/// slot stays as it was.
pub fn append_latent_rows(runner: &mut Runner) -> Result<String, Broken> {
    let pools = [
        (DType::Mla656, false, 576),
        (DType::E4M3, true, 576),
        (DType::E4M3, false, 576),
        (DType::E5M2, true, 96),
        (DType::I8, true, 96),
        (DType::I8, false, 80),
        (DType::Q8_0, false, 96),
        (DType::Q4_0, false, 320),
    ];
    let mut trials = 0;
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (pool, dynamic, dim) in pools {
            for rotary in [None, Some((64, false)), Some((64, true)), Some((dim, false))] {
                let trial = Trial { dtype, pool, dynamic, dim, rotary };
                trial
                    .check(runner)
                    .map_err(|Broken(words)| Broken(format!("{trial:?}: {words}")))?;
                trials += 1;
            }
        }
    }
    Ok(format!("{trials} appends of quantized rows, every bit of the pools compared"))
}

impl Trial {
    fn operands(&self) -> Result<Operands, Error> {
        let numbers = |seed: u64, shape: &[usize]| {
            let mut noise = Noise::new(seed, &[0x6c61_7465_6e74]);
            let count = shape.iter().product();
            (0..count).map(|_| f64::from(noise.normal())).collect::<Vec<f64>>()
        };
        let key_shape = [TOKENS, HEADS, self.dim];
        let mut key = numbers(1, &key_shape);
        // A row of zeros, one with a NaN and an infinity, and one in all magnitudes.
        key[..self.dim].fill(0.0);
        (key[self.dim + 7], key[self.dim + 70], key[2 * self.dim - 1]) =
            (f64::NAN, f64::INFINITY, f64::NAN);
        for (i, x) in key[2 * self.dim..3 * self.dim].iter_mut().enumerate() {
            *x *= 2f64.powi((i % 28) as i32 - 14);
        }
        let array = |dtype, numbers: Vec<f64>, shape: &[usize]| {
            Array::new(Data::from_numbers(dtype, numbers.into_iter()), shape)
        };
        let integers = |numbers: &[i32], shape: &[usize]| Array::new(numbers.to_vec(), shape);
        let rotary_dim = self.rotary.map_or(2, |(dims, _)| dims);
        let angles = (0..POSITIONS * rotary_dim).map(|i| (i as f64).sin()).collect();
        let query_shape = [TOKENS, QUERY_HEADS, self.dim];
        let pool_shape = [BLOCKS, BLOCK_SIZE, HEADS, self.dim / self.pool.values()];
        let bytes = vec![0x5a; pool_shape.iter().product::<usize>() * self.pool.size()];
        let scale_shape = [BLOCKS, BLOCK_SIZE, HEADS];
        Ok(Operands {
            key: array(self.dtype, key, &key_shape)?,
            table: integers(&[3, 0, -1, 1, 4, 2], &[2, 3])?,
            lens: integers(&[6, POSITIONS as i32], &[2])?,
            angles: array(DType::F32, angles, &[POSITIONS, rotary_dim])?,
            query: array(self.dtype, numbers(2, &query_shape), &query_shape)?,
            pool: Array::new(Data::from_le_bytes(self.pool, &bytes), &pool_shape)?,
            scales: array(DType::F32, vec![0.03; BLOCKS * BLOCK_SIZE * HEADS], &scale_shape)?,
        })
    }

    fn check(&self, runner: &mut Runner) -> Result<(), Broken> {
        let (mut expected, mut found) = (self.operands()?, self.operands()?);
        self.append_on_cpu(&mut expected)?;
        self.append_on_gpu(&mut found, runner)?;
        let same = |what: &str, found: &Array, expected: &Array| {
            let (found, expected) = (found.data().to_le_bytes(), expected.data().to_le_bytes());
            let place = found.iter().zip(&expected).position(|(a, b)| a != b);
            expect(place.is_none(), || format!("{what}: byte {place:?} differs from the CPU's"))
        };
        same("pool", &found.pool, &expected.pool)?;
        same("scales", &found.scales, &expected.scales)?;
        // Kernels may fuse a product of a rotation with the sum: two roundings of the type, and
        // roundings of f32 if large numbers cancel.
        let f32_epsilon = f64::from(f32::EPSILON);
        let numbers = found.query.numbers()?.into_iter().zip(expected.query.numbers()?);
        for (i, (found, expected)) in numbers.enumerate() {
            let slack = (self.dtype.epsilon() + 4.0 * f32_epsilon) * expected.abs();
            expect((found - expected).abs() <= slack + 48.0 * f32_epsilon, || {
                format!("queries: element {i} is {found}, not {expected}")
            })?;
        }
        Ok(())
    }

    fn append_on_cpu(&self, operands: &mut Operands) -> Result<(), Error> {
        let Operands { key, table, lens, angles, query, pool, scales } = operands;
        let scales = match (self.pool.is_code(), self.dynamic) {
            (false, _) => None,
            (true, false) => Some(AppendScales::Static(scales.view()?)),
            (true, true) => Some(AppendScales::Dynamic(scales.view_mut()?)),
        };
        let mut append = AppendLatent {
            key: key.view()?,
            key_pool: pool.view_mut()?,
            k_scales: scales,
            block_table: Some(table.view()?),
            kv_lens: lens.view()?,
            cu_seqlens: None,
            rotary: match self.rotary {
                Some((_, interleaved)) => {
                    let (table, query) = (angles.view()?, Some(query.view_mut()?));
                    Some(Rotary { table, interleaved, query })
                }
                None => None,
            },
        };
        Cpu::new()?.append_latent(&mut append)
    }

    fn append_on_gpu(&self, operands: &mut Operands, runner: &Runner) -> Result<(), Error> {
        let stream = runner.stream().clone();
        let Operands { key, table, lens, angles, query, pool, scales } = operands;
        let up = |array: &Array| Mirror::new(&array.view()?, &stream);
        let (key, table, lens, angles) = (up(key)?, up(table)?, up(lens)?, up(angles)?);
        let given_scales = up(scales)?;
        let written = |array: &mut Array| MirrorMut::filled(&mut array.view_mut()?, &stream);
        let (device_query, device_pool) = (written(query)?, written(pool)?);
        let device_scales = written(scales)?;
        let mut append = AppendLatent {
            key: key.view(),
            key_pool: device_pool.view(),
            k_scales: self.pool.is_code().then(|| match self.dynamic {
                true => AppendScales::Dynamic(device_scales.view()),
                false => AppendScales::Static(given_scales.view()),
            }),
            block_table: Some(table.view()),
            kv_lens: lens.view(),
            cu_seqlens: None,
            rotary: self.rotary.map(|(_, interleaved)| Rotary {
                table: angles.view(),
                interleaved,
                query: Some(device_query.view()),
            }),
        };
        runner.gpu().append_latent(&stream, &mut append)?;
        device_query.download(&mut query.view_mut()?, &stream)?;
        device_pool.download(&mut pool.view_mut()?, &stream)?;
        device_scales.download(&mut scales.view_mut()?, &stream)
    }
}
