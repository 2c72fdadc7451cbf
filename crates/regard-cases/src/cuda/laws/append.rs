//! Appending to pages, with and without rotation, against a few lines of arithmetic.

use super::{Broken, expect};
use crate::cuda::MirrorMut;
use crate::cuda::Runner;
use crate::cuda::mirror::Mirror;
use crate::noise::Noise;
use crate::{Array, Data};
use regard::cuda::{Append, AppendLatent, Rotary};
use regard::{DType, Error};

const BLOCKS: usize = 40;
const BLOCK_SIZE: usize = 16;
const POSITIONS: usize = 600;

/// One append to try.
#[derive(Debug, Clone, Copy)]
struct Trial {
    dtype: DType,
    /// Key/value heads, query heads, Dk, Dv.
    heads: [usize; 2],
    dims: [usize; 2],
    /// Dims that are rotated, and whether neighbours make pairs: the leading ones, and the last
    /// ones in a latent cache.
    rotary: Option<(usize, bool)>,
    /// Whether each sequence brings its own number of tokens.
    ragged: bool,
    /// Pools as `[blocks, heads, slots, dim]`.
    head_major: bool,
    /// Whether rows go to a latent cache; values then stay as they were.
    latent: bool,
}

/// New tokens of each sequence, and its tokens afterwards.
const RAGGED: [(usize, usize); 4] = [(5, 21), (0, 3), (1, 64), (30, 30)];
const EVEN: [(usize, usize); 4] = [(3, 21), (3, 3), (3, 64), (3, 500)];

/// New keys and values land in their slots, rotated as asked; every other slot stays as it was.
pub fn append(runner: &mut Runner) -> Result<String, Broken> {
    let mut trials = 0;
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        for (dims, rotary, latent) in [
            ([128, 128], None, false),
            ([128, 128], Some((128, false)), false),
            ([64, 64], Some((64, true)), false),
            ([80, 96], Some((32, false)), false),
            ([576, 512], Some((64, true)), false),
            ([3, 5], None, false),
            ([576, 512], Some((64, true)), true),
            ([83, 80], Some((6, false)), true),
            ([128, 128], None, true),
        ] {
            for (ragged, head_major) in [(true, false), (false, true)] {
                let heads = [2, 6];
                let trial = Trial { dtype, heads, dims, rotary, ragged, head_major, latent };
                trial
                    .check(runner)
                    .map_err(|Broken(words)| Broken(format!("{trial:?}: {words}")))?;
                trials += 1;
            }
        }
    }
    Ok(format!("{trials} appends, every slot of the pools compared"))
}

/// Random numbers as `dtype` holds them, and as they then are.
fn numbers(dtype: DType, shape: &[usize], seed: u64) -> Result<(Array, Vec<f64>), Error> {
    let mut noise = Noise::new(seed, &[0x6170_7065_6e64]);
    let count: usize = shape.iter().product();
    let data = Data::from_numbers(dtype, (0..count).map(|_| f64::from(noise.normal())));
    let array = Array::new(data, shape)?;
    let numbers = array.numbers()?;
    Ok((array, numbers))
}

fn ints(values: impl Iterator<Item = usize>, shape: &[usize]) -> Result<Array, Error> {
    Array::new(values.map(|n| n as i32).collect::<Vec<_>>(), shape)
}

/// A sequence's page numbers: its new tokens go to pages that it does not share.
fn block_of(sequence: usize, column: usize) -> usize {
    (sequence * 10 + column % 10) % BLOCKS
}

fn block_table() -> Result<Array, Error> {
    let columns = 500usize.div_ceil(BLOCK_SIZE);
    let blocks = |sequence| (0..columns).map(move |column| block_of(sequence, column));
    ints((0..4).flat_map(blocks), &[4, columns])
}

/// The start of each sequence's new tokens, and the end of the last one's.
fn starts(sequences: &[(usize, usize)]) -> Vec<usize> {
    let mut starts = vec![0];
    for (new, _) in sequences {
        starts.push(starts[starts.len() - 1] + new);
    }
    starts
}

/// The rotation angle of a pair of elements.
fn angle(position: usize, pair: usize, dims: usize) -> f64 {
    position as f64 * 10_000f64.powf(-2.0 * pair as f64 / dims as f64)
}

fn rotary_table(dims: usize) -> Result<Array, Error> {
    let half = dims / 2;
    let rotations = (0..POSITIONS).flat_map(|position| {
        (0..dims).map(move |i| match i.checked_sub(half) {
            None => angle(position, i, dims).cos(),
            Some(i) => angle(position, i, dims).sin(),
        })
    });
    Array::new(Data::from_numbers(DType::F32, rotations), &[POSITIONS, dims])
}

/// Numbers of queries and pools, on the host.
struct Expected {
    query: Vec<f64>,
    keys: Vec<f64>,
    values: Vec<f64>,
}

impl Trial {
    fn pool_shape(&self, dim: usize) -> [usize; 4] {
        let heads = self.heads[0];
        match self.head_major {
            true => [BLOCKS, heads, BLOCK_SIZE, dim],
            false => [BLOCKS, BLOCK_SIZE, heads, dim],
        }
    }

    /// The first element of a slot's head in a pool.
    fn place(&self, block: usize, slot: usize, head: usize, dim: usize) -> usize {
        let heads = self.heads[0];
        match self.head_major {
            true => ((block * heads + head) * BLOCK_SIZE + slot) * dim,
            false => ((block * BLOCK_SIZE + slot) * heads + head) * dim,
        }
    }

    fn check(&self, runner: &mut Runner) -> Result<(), Broken> {
        let stream = runner.stream().clone();
        let [heads, query_heads] = self.heads;
        let [key_dim, value_dim] = self.dims;
        let sequences = self.sequences();
        let tokens: usize = sequences.iter().map(|(new, _)| new).sum();
        let (key, key_numbers) = numbers(self.dtype, &[tokens, heads, key_dim], 1)?;
        let (value, value_numbers) = numbers(self.dtype, &[tokens, heads, value_dim], 2)?;
        let (mut query, query_numbers) = numbers(self.dtype, &[tokens, query_heads, key_dim], 3)?;
        let pools = [key_dim, value_dim].map(|dim| self.pool_shape(dim));
        let (mut keys, expected_keys) = numbers(self.dtype, &pools[0], 4)?;
        let (mut values, expected_values) = numbers(self.dtype, &pools[1], 5)?;
        let table = block_table()?;
        let lens = ints(sequences.iter().map(|&(_, len)| len), &[4])?;
        let starts = starts(&sequences);
        let cumulative = ints(starts.iter().copied(), &[5])?;
        let rotations = rotary_table(self.rotary_dim())?;

        // On the GPU.
        let up = |array: &Array| Mirror::new(&array.view()?, &stream);
        let (device_key, device_value, device_table) = (up(&key)?, up(&value)?, up(&table)?);
        let (device_lens, device_cumulative, device_rotations) =
            (up(&lens)?, up(&cumulative)?, up(&rotations)?);
        let written = |array: &mut Array| MirrorMut::filled(&mut array.view_mut()?, &stream);
        let (device_keys, device_values) = (written(&mut keys)?, written(&mut values)?);
        let device_query = written(&mut query)?;
        let pool = |mirror| {
            let view = MirrorMut::view(mirror);
            if self.head_major { view.bhsd() } else { view }
        };
        let append = Append {
            key: device_key.view(),
            value: device_value.view(),
            key_pool: pool(&device_keys),
            value_pool: pool(&device_values),
            k_scales: None,
            v_scales: None,
            block_table: Some(device_table.view()),
            kv_lens: device_lens.view(),
            cu_seqlens: self.ragged.then(|| device_cumulative.view()),
            rotary: self.rotary.map(|(_, interleaved)| Rotary {
                table: device_rotations.view(),
                interleaved,
                query: Some(device_query.view()),
            }),
        };
        self.run(runner, append)?;

        device_keys.download(&mut keys.view_mut()?, &stream)?;
        device_values.download(&mut values.view_mut()?, &stream)?;
        device_query.download(&mut query.view_mut()?, &stream)?;

        let mut expected =
            Expected { query: query_numbers, keys: expected_keys, values: expected_values };
        self.append_on_host(&mut expected, &key_numbers, &value_numbers);
        self.compare("keys", &keys.numbers()?, &expected.keys, self.rotary.is_some())?;
        self.compare("values", &values.numbers()?, &expected.values, false)?;
        self.compare("queries", &query.numbers()?, &expected.query, self.rotary.is_some())
    }

    /// New tokens and all tokens of each sequence.
    fn sequences(&self) -> [(usize, usize); 4] {
        if self.ragged { RAGGED } else { EVEN }
    }

    fn rotary_dim(&self) -> usize {
        self.rotary.map_or(2, |(dims, _)| dims)
    }

    /// Expected pools and queries after the append.
    fn append_on_host(&self, expected: &mut Expected, new_keys: &[f64], new_values: &[f64]) {
        let [heads, query_heads] = self.heads;
        let [key_dim, value_dim] = self.dims;
        let sequences = self.sequences();
        let starts = starts(&sequences);
        let angle = |position: usize, pair: usize| angle(position, pair, self.rotary_dim());
        for (sequence, &(new, len)) in sequences.iter().enumerate() {
            for i in 0..new {
                let (token, row) = (len - new + i, starts[sequence] + i);
                let (block, slot) = (block_of(sequence, token / BLOCK_SIZE), token % BLOCK_SIZE);
                for head in 0..heads {
                    let from = (row * heads + head) * key_dim;
                    let mut vector = new_keys[from..from + key_dim].to_vec();
                    self.rotate(&mut vector, |pair| angle(token, pair));
                    let to = self.place(block, slot, head, key_dim);
                    expected.keys[to..to + key_dim].copy_from_slice(&vector);
                    if !self.latent {
                        let new = &new_values[(row * heads + head) * value_dim..][..value_dim];
                        let to = self.place(block, slot, head, value_dim);
                        expected.values[to..to + value_dim].copy_from_slice(new);
                    }
                }
                let queries = &mut expected.query[row * query_heads * key_dim..];
                for vector in queries.chunks_mut(key_dim).take(query_heads) {
                    self.rotate(vector, |pair| angle(token, pair));
                }
            }
        }
    }

    fn run(&self, runner: &Runner, mut append: Append) -> Result<(), Error> {
        let stream = runner.stream();
        if !self.latent {
            return runner.gpu().append(stream, &mut append);
        }
        let Append { key, key_pool, k_scales, block_table, kv_lens, cu_seqlens, rotary, .. } =
            append;
        let mut append =
            AppendLatent { key, key_pool, k_scales, block_table, kv_lens, cu_seqlens, rotary };
        runner.gpu().append_latent(stream, &mut append)
    }

    fn rotate(&self, vector: &mut [f64], angle: impl Fn(usize) -> f64) {
        let Some((dims, interleaved)) = self.rotary else { return };
        let start = if self.latent { vector.len() - dims } else { 0 };
        let vector = &mut vector[start..];
        for pair in 0..dims / 2 {
            let (a, b) =
                if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + dims / 2) };
            // As the table holds them.
            let (sin, cos) = angle(pair).sin_cos();
            let (sin, cos) = (f64::from(sin as f32), f64::from(cos as f32));
            (vector[a], vector[b]) =
                (vector[a] * cos - vector[b] * sin, vector[b] * cos + vector[a] * sin);
        }
    }

    /// Rotated numbers may be off by one rounding of the type and a few of f32, others by nothing.
    fn compare(
        &self,
        what: &str,
        found: &[f64],
        expected: &[f64],
        rotated: bool,
    ) -> Result<(), Broken> {
        let slack =
            if rotated { self.dtype.epsilon() / 2.0 + 4.0 * f64::from(f32::EPSILON) } else { 0.0 };
        for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
            // Cancellation leaves small numbers with the error of the subtracted numbers: normal
            // numbers are below 6.
            let allowed = slack * expected.abs()
                + if rotated { 8.0 * f64::from(f32::EPSILON) * 6.0 } else { 0.0 };
            expect((found - expected).abs() <= allowed, || {
                format!("{what}: element {i} is {found}, not {expected}")
            })?;
        }
        Ok(())
    }
}
