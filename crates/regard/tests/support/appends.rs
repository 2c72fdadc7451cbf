//! Appends to paged caches, against a few lines of f64, on any device.

use crate::numbers::{Number, numbers};
use regard::{Append, Error, Rotary, Tensor, TensorMut};

pub const BLOCKS: usize = 40;
const BLOCK_SIZE: usize = 16;
const COLUMNS: usize = 8;
const POSITIONS: usize = 100;

/// The append of a device.
pub type Run<'a> = dyn FnMut(&mut Append) -> Result<(), Error> + 'a;

/// One append to try.
#[derive(Debug, Clone, Copy)]
pub struct Trial {
    heads: usize,
    query_heads: usize,
    key_dim: usize,
    value_dim: usize,
    rotary: Option<Rotation>,
    /// Whether each sequence brings its own number of tokens.
    ragged: bool,
    /// Pools as `[blocks, heads, slots, dim]`.
    head_major: bool,
}

#[derive(Debug, Clone, Copy)]
struct Rotation {
    dims: usize,
    interleaved: bool,
}

/// New tokens of a sequence, and its tokens afterwards.
#[derive(Debug, Clone, Copy)]
struct Sequence {
    new: usize,
    len: i32,
}

/// The second brings nothing. The third has fewer tokens than it brings: the first of them have
/// negative positions. The fourth ends past its table, and past the rotary table.
const RAGGED: [Sequence; 4] = [
    Sequence { new: 5, len: 21 },
    Sequence { new: 0, len: 3 },
    Sequence { new: 6, len: 4 },
    Sequence { new: 30, len: (COLUMNS * BLOCK_SIZE) as i32 + 3 },
];
const EVEN: [Sequence; 4] = [
    Sequence { new: 3, len: 21 },
    Sequence { new: 3, len: 3 },
    Sequence { new: 3, len: 64 },
    Sequence { new: 3, len: -1 },
];
/// Rows past the last sequence's belong to none.
const SPARE_ROWS: usize = 2;

/// Blocks of a sequence are its own. Some entries name no block.
fn block_table() -> Vec<i32> {
    let mut table: Vec<i32> = (0..4 * COLUMNS as i32).collect();
    table[1] = -1;
    table[2 * COLUMNS] = BLOCKS as i32;
    table[3 * COLUMNS + 6] = i32::MIN;
    table
}

fn sequences(trial: &Trial) -> [Sequence; 4] {
    if trial.ragged { RAGGED } else { EVEN }
}

/// Cosines and sines as f32 holds them.
fn rotary_table(dims: usize) -> Vec<f32> {
    let angle = |position: usize, pair: usize| {
        position as f64 * 10_000f64.powf(-2.0 * pair as f64 / dims as f64)
    };
    let row = |position: usize| {
        (0..dims).map(move |i| match i.checked_sub(dims / 2) {
            None => angle(position, i).cos() as f32,
            Some(i) => angle(position, i).sin() as f32,
        })
    };
    (0..POSITIONS).flat_map(row).collect()
}

impl Trial {
    fn rotate(&self, vector: &mut [f64], position: i64, table: &[f32]) {
        let Some(Rotation { dims, interleaved }) = self.rotary else { return };
        let row = position.clamp(0, POSITIONS as i64 - 1) as usize;
        let angles = &table[row * dims..][..dims];
        for pair in 0..dims / 2 {
            let (a, b) = match interleaved {
                true => (2 * pair, 2 * pair + 1),
                false => (pair, pair + dims / 2),
            };
            let (cos, sin) = (f64::from(angles[pair]), f64::from(angles[dims / 2 + pair]));
            (vector[a], vector[b]) =
                (vector[a] * cos - vector[b] * sin, vector[b] * cos + vector[a] * sin);
        }
    }

    /// The element of a pool that a slot's head starts at.
    fn place(&self, block: usize, slot: usize, head: usize, dim: usize) -> usize {
        match self.head_major {
            true => ((block * self.heads + head) * BLOCK_SIZE + slot) * dim,
            false => ((block * BLOCK_SIZE + slot) * self.heads + head) * dim,
        }
    }

    fn pool_shape(&self, dim: usize) -> [usize; 4] {
        match self.head_major {
            true => [BLOCKS, self.heads, BLOCK_SIZE, dim],
            false => [BLOCKS, BLOCK_SIZE, self.heads, dim],
        }
    }

    pub fn check<T: Number>(&self, run: &mut Run) {
        let (heads, query_heads) = (self.heads, self.query_heads);
        let (key_dim, value_dim) = (self.key_dim, self.value_dim);
        let sequences = sequences(self);
        let spare = if self.ragged { SPARE_ROWS } else { 0 };
        let tokens: usize = sequences.iter().map(|sequence| sequence.new).sum::<usize>() + spare;
        let table = block_table();
        let lens = sequences.map(|sequence| sequence.len);
        let mut starts = vec![0];
        for sequence in sequences {
            starts.push(starts[starts.len() - 1] + sequence.new as i32);
        }
        let rotations = rotary_table(self.rotary.map_or(2, |rotation| rotation.dims));
        let key = numbers::<T>(1, tokens * heads * key_dim);
        let value = numbers::<T>(2, tokens * heads * value_dim);
        let mut query = numbers::<T>(3, tokens * query_heads * key_dim);
        let slots = BLOCKS * BLOCK_SIZE * heads;
        let mut keys = numbers::<T>(4, slots * key_dim);
        let mut values = numbers::<T>(5, slots * value_dim);
        let floats = |numbers: &[T]| numbers.iter().map(|x| x.to_f64()).collect::<Vec<_>>();
        let (mut expected_keys, mut expected_values) = (floats(&keys), floats(&values));
        let mut expected_query = floats(&query);

        for (i, sequence) in sequences.iter().enumerate() {
            for place in 0..sequence.new {
                let row = starts[i] as usize + place;
                let position = i64::from(sequence.len) - sequence.new as i64 + place as i64;
                for head in 0..query_heads {
                    let from = (row * query_heads + head) * key_dim;
                    let vector = &mut expected_query[from..from + key_dim];
                    self.rotate(vector, position, &rotations);
                }
                let Ok(position) = usize::try_from(position) else { continue };
                let column = position / BLOCK_SIZE;
                let Some(&block) = table[i * COLUMNS..][..COLUMNS].get(column) else { continue };
                let Ok(block) = usize::try_from(block) else { continue };
                if block >= BLOCKS {
                    continue;
                }
                for head in 0..heads {
                    let from = (row * heads + head) * key_dim;
                    let mut vector = floats(&key[from..from + key_dim]);
                    self.rotate(&mut vector, position as i64, &rotations);
                    let to = self.place(block, position % BLOCK_SIZE, head, key_dim);
                    expected_keys[to..to + key_dim].copy_from_slice(&vector);
                    let from = (row * heads + head) * value_dim;
                    let to = self.place(block, position % BLOCK_SIZE, head, value_dim);
                    let vector = floats(&value[from..from + value_dim]);
                    expected_values[to..to + value_dim].copy_from_slice(&vector);
                }
            }
        }

        let key_pool = TensorMut::new(&mut keys, self.pool_shape(key_dim)).expect("keys");
        let value_pool = TensorMut::new(&mut values, self.pool_shape(value_dim)).expect("values");
        let mut append = Append {
            key: Tensor::new(&key, [tokens, heads, key_dim]).expect("key"),
            value: Tensor::new(&value, [tokens, heads, value_dim]).expect("value"),
            key_pool: if self.head_major { key_pool.bhsd() } else { key_pool },
            value_pool: if self.head_major { value_pool.bhsd() } else { value_pool },
            k_scales: None,
            v_scales: None,
            block_table: Some(Tensor::new(&table, [4, COLUMNS]).expect("table")),
            kv_lens: Tensor::from(&lens),
            cu_seqlens: self.ragged.then(|| Tensor::from(&starts)),
            rotary: self.rotary.map(|Rotation { dims, interleaved }| Rotary {
                table: Tensor::new(&rotations, [POSITIONS, dims]).expect("rotations"),
                interleaved,
                query: Some(
                    TensorMut::new(&mut query, [tokens, query_heads, key_dim]).expect("query"),
                ),
            }),
        };
        run(&mut append).unwrap_or_else(|error| panic!("{self:?}: {error}"));
        let rotated = self.rotary.is_some();
        self.compare("keys", &keys, &expected_keys, rotated);
        self.compare("values", &values, &expected_values, false);
        self.compare("queries", &query, &expected_query, rotated);
    }

    /// Rotated numbers may be off by one rounding of the type and a few of f32, others by nothing.
    fn compare<T: Number>(&self, what: &str, found: &[T], expected: &[f64], rotated: bool) {
        let f32_epsilon = f64::from(f32::EPSILON);
        for (i, (found, &expected)) in found.iter().zip(expected).enumerate() {
            let found = found.to_f64();
            // Cancellation leaves small numbers with the error of the subtracted numbers: numbers
            // are below 1.
            let allowed = match rotated {
                true => {
                    (T::DTYPE.epsilon() / 2.0 + f32_epsilon) * expected.abs() + 2.0 * f32_epsilon
                }
                false => 0.0,
            };
            assert!(
                (found - expected).abs() <= allowed,
                "{self:?}, {:?}, {what}: element {i} is {found}, not {expected}",
                T::DTYPE
            );
        }
    }
}

/// Head dims with and without rotation, ragged and even batches, pools of both layouts.
pub fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    for (key_dim, value_dim, rotary) in [
        (128, 128, None),
        (128, 128, Some(Rotation { dims: 128, interleaved: false })),
        (64, 64, Some(Rotation { dims: 64, interleaved: true })),
        (80, 96, Some(Rotation { dims: 32, interleaved: false })),
        (576, 512, Some(Rotation { dims: 64, interleaved: true })),
        (3, 5, Some(Rotation { dims: 2, interleaved: false })),
        (3, 5, None),
    ] {
        for (ragged, head_major) in [(true, false), (true, true), (false, true)] {
            let (heads, query_heads) = (2, 6);
            let trial =
                Trial { heads, query_heads, key_dim, value_dim, rotary, ragged, head_major };
            trials.push(trial);
        }
    }
    trials
}
