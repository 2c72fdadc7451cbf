//! The storage of keys and values: the formats of a cache, and the scales of its codes.

use super::{Keys, Spec, Use, data};
use crate::array::{Array, Data};
use crate::case::{KvLayout, Layout};
use crate::contents::{Numbers, largest as largest_number};
use crate::noise::Noise;
use crate::place::{MemorySpec, Place};
use half::{bf16, f16};
use regard::format::{BLOCK_VALUES, BlockQ4_0, BlockQ8_0, E4m3, E5m2, Mla656, i8_from_f32};
use regard::{DType, Values};

/// The storage of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheSpec {
    /// The type of keys; `None` is the type of queries.
    pub k: Option<DType>,
    /// The type of values; `None` is the type of queries.
    pub v: Option<DType>,
    /// The group of codes that share a scale.
    pub granularity: Granularity,
    /// The distribution of scales.
    pub scales: Scales,
}

/// The granularity of scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Granularity {
    /// All keys.
    Tensor,
    /// The keys of a head.
    #[default]
    Head,
    /// The keys of a page and head. Without pages, the keys of a sequence and head, or of a head if
    /// sequences are ragged.
    Page,
    /// Nothing: each token and head has its own.
    Token,
}

/// The values of scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Scales {
    /// Scales that give the largest number approximately the largest code.
    #[default]
    Fitted,
    /// The next power of two above the fitted scale.
    PowerOfTwo,
    /// Powers of two, times 2^-20 to 2^20 (2^6 under f16 queries). Neighbours differ by any factor
    /// of this range; one in 16 is zero.
    Spread,
}

/// Keys or values.
#[derive(Clone, Copy)]
pub(super) enum Operand {
    Key,
    Value,
    /// The last dims of keys in two parts.
    Rotary,
}

/// One key (or value) of one head.
#[derive(Clone, Copy)]
struct KeyRow {
    /// Its sequence's id.
    id: u64,
    key: usize,
    head: usize,
}

/// A row of a cache before it is stored.
struct Row {
    numbers: Vec<f32>,
    /// Numbers are divided by this to get codes.
    divisor: f32,
    /// The scale beside the codes.
    scale: f32,
}

/// Stored elements.
enum Buffer {
    Floats(Vec<f32>),
    /// Codes of one byte, by their bits.
    Codes(Vec<u8>),
    Q8(Vec<BlockQ8_0>),
    Q4(Vec<BlockQ4_0>),
    Mla656(Vec<Mla656>),
}

impl CacheSpec {
    /// Keys and values of one type.
    pub fn new(dtype: DType, granularity: Granularity, scales: Scales) -> CacheSpec {
        CacheSpec { k: Some(dtype), v: Some(dtype), granularity, scales }
    }
}

impl Spec {
    /// The type of keys.
    pub fn key_dtype(&self) -> DType {
        self.cache.k.unwrap_or(self.dtype)
    }

    /// The type of values.
    pub fn value_dtype(&self) -> DType {
        self.cache.v.unwrap_or(self.dtype)
    }

    /// Whether some kernel of a machine takes the case:
    /// [`list::selection`](crate::list::selection) has lists of keys, which not every backend
    /// walks.
    pub fn has_plan_on(&self, machine: &regard::Machine) -> bool {
        let plan = regard::Plan::new(&self.problem(true), machine);
        !matches!(plan, Err(regard::Error::Refused(_)))
    }

    /// The same with keys and values stored like this.
    pub fn cache(self, cache: CacheSpec) -> Spec {
        Spec { cache, ..self }
    }

    /// Dims that are whole blocks, and keys and values in one pool only if they are of one type.
    /// Values that are a prefix of the keys are no wider, and stored as they are.
    ///
    /// Rows of `mla656` are keys of 576 dims, whose first 512 dims, or all, are the values.
    pub(super) fn legal_cache(&mut self) {
        if self.key_dtype().is_latent_row() || self.value_dtype().is_latent_row() {
            self.values = Values::KeyPrefix;
            self.cache.k = Some(DType::Mla656);
            self.head_dim = Mla656::VALUES;
            if self.value_dim != Mla656::VALUES {
                self.value_dim = Mla656::LATENT_VALUES;
            }
        }
        if self.values == Values::KeyPrefix {
            self.cache.v = self.cache.k.map(|dtype| dtype.of_prefix(self.value_dim));
            self.memory.v = self.memory.k;
            if let Keys::Paged { interleaved, .. } = &mut self.keys {
                *interleaved = false;
            }
        }
        for (dim, dtype) in [
            (&mut self.head_dim, self.cache.k.unwrap_or(self.dtype)),
            (&mut self.value_dim, self.cache.v.unwrap_or(self.dtype)),
        ] {
            *dim = dim.next_multiple_of(dtype.values()).min(regard::MAX_HEAD_DIM);
        }
        if self.values == Values::KeyPrefix {
            self.value_dim = self.value_dim.min(self.head_dim);
        }
        if self.key_dtype() != self.value_dtype()
            && let Keys::Paged { interleaved, .. } = &mut self.keys
        {
            *interleaved = false;
        }
    }

    /// The last dimensions of keys and values, in elements.
    pub(super) fn stored_dims(&self) -> [usize; 2] {
        let (keys, values) = (self.key_dtype().values(), self.value_dtype().values());
        [self.latent_dim() / keys, self.value_dim / values]
    }

    /// Keys and values, and their scales.
    pub(super) fn keys_and_values(
        &self,
        [key_place, value_place]: [&Place; 2],
        table: &[Vec<i32>],
    ) -> [Array; 2] {
        if self.values == Values::KeyPrefix {
            let dtype = self.key_dtype();
            let mut pool = self.unseen_slots(dtype, key_place.end);
            self.fill(&mut pool, key_place, Operand::Key, table);
            let pool = pool.into_data(dtype);
            let keys = key_place.over(pool);
            let values = keys.prefix(self.value_dim).expect("legal: whole blocks");
            return [keys, values];
        }
        if let Keys::Paged { interleaved: true, .. } = self.keys {
            let dtype = self.key_dtype();
            let mut pool = self.unseen_slots(dtype, key_place.end.max(value_place.end));
            self.fill(&mut pool, key_place, Operand::Key, table);
            self.fill(&mut pool, value_place, Operand::Value, table);
            let pool = pool.into_data(dtype);
            return [key_place.over(pool.clone()), value_place.over(pool)];
        }
        [(key_place, Operand::Key), (value_place, Operand::Value)]
            .map(|(place, operand)| self.stored(place, operand, table))
    }

    /// An operand in memory of its own.
    pub(super) fn stored(&self, place: &Place, operand: Operand, table: &[Vec<i32>]) -> Array {
        let dtype = self.stored_as(operand);
        let mut buffer = self.unseen_slots(dtype, place.end);
        self.fill(&mut buffer, place, operand, table);
        place.over(buffer.into_data(dtype))
    }

    /// The layout of scales, in the dimension order of keys; `None` for operands without scales.
    pub(super) fn place_scales(&self, operand: Operand, keys: &Place) -> Option<Place> {
        let of_keys = self.values == Values::KeyPrefix && matches!(operand, Operand::Value);
        if !self.stored_as(operand).is_code() || of_keys {
            return None;
        }
        let rows = &keys.shape[..keys.shape.len() - 1];
        let (token, head) = match (self.keys, self.heads_first()) {
            (Keys::Ragged { .. }, _) => (0, 1),
            (_, true) => (2, 1),
            (_, false) => (1, 2),
        };
        let mut shape = rows.to_vec();
        let ragged = matches!(self.keys, Keys::Ragged { .. });
        match self.cache.granularity {
            Granularity::Tensor => shape.fill(1),
            Granularity::Token => {}
            Granularity::Page if !ragged => shape[token] = 1,
            Granularity::Head | Granularity::Page => {
                shape.fill(1);
                shape[head] = rows[head];
            }
        }
        Some(Place::new(&shape, self.padding, &MemorySpec::default()))
    }

    /// The scales of keys or values, if they are codes.
    pub(super) fn scales(
        &self,
        operand: Operand,
        keys: &Place,
        table: &[Vec<i32>],
    ) -> Option<Array> {
        let place = self.place_scales(operand, keys)?;
        let shared = place.shape.iter().product::<usize>() <= self.kv_heads * self.sequences.len();
        let mut buffer = match shared && !matches!(self.keys, Keys::Paged { .. }) {
            // Checked even if no row sees a key.
            true => vec![1.0; place.end],
            false => self.unseen(place.end),
        };
        if place.shape[0] == 1 {
            buffer.fill(1.0);
        }
        self.each_key(table, |outer, key_row| {
            let at: Vec<usize> =
                outer.iter().zip(&place.shape).map(|(&i, &n)| if n == 1 { 0 } else { i }).collect();
            let (&last, first) = at.split_last().expect("two or three dimensions");
            buffer[place.at(first) + last] = self.row(operand, key_row).scale;
        });
        Some(place.over(data(DType::F32, buffer)))
    }

    fn stored_as(&self, operand: Operand) -> DType {
        match operand {
            Operand::Key | Operand::Rotary => self.key_dtype(),
            Operand::Value => self.value_dtype(),
        }
    }

    /// Whether heads come before tokens in keys.
    fn heads_first(&self) -> bool {
        match self.keys {
            Keys::Batched { .. } => self.layout == Layout::Bhsd,
            Keys::Ragged { .. } => false,
            Keys::Paged { .. } => self.kv_layout == KvLayout::Hnd,
        }
    }

    /// Calls `visit` with the outer indices of every key that some row can see.
    fn each_key(&self, table: &[Vec<i32>], mut visit: impl FnMut(&[usize], KeyRow)) {
        let mut start_of_sequence = 0;
        for (index, sequence) in self.sequences.iter().enumerate() {
            let listed = self.listed(index);
            for key in self.visible(index) {
                for head in 0..self.kv_heads {
                    let at = key * self.kv_heads + head;
                    if listed.as_ref().is_some_and(|listed| !listed[at]) {
                        continue;
                    }
                    let row = KeyRow { id: self.key_id(index, key), key, head };
                    let (entry, slot) = match self.keys {
                        Keys::Batched { .. } => (index, key),
                        Keys::Ragged { .. } => {
                            visit(&[start_of_sequence + key, head], row);
                            continue;
                        }
                        Keys::Paged { block_size, .. } => {
                            (table[index][key / block_size] as usize, key % block_size)
                        }
                    };
                    match self.heads_first() {
                        true => visit(&[entry, head, slot], row),
                        false => visit(&[entry, slot, head], row),
                    }
                }
            }
            if let Keys::Ragged { slack } = self.keys {
                start_of_sequence += sequence.kv_len + slack;
            }
        }
    }

    fn fill(&self, buffer: &mut Buffer, place: &Place, operand: Operand, table: &[Vec<i32>]) {
        let dtype = self.stored_as(operand);
        self.each_key(table, |outer, key_row| {
            let mut row = self.row(operand, key_row);
            // Both parts of a key are parts of the same numbers.
            match operand {
                Operand::Key => row.numbers.truncate(self.latent_dim()),
                Operand::Rotary => drop(row.numbers.drain(..self.latent_dim())),
                Operand::Value => {}
            }
            buffer.store(place.at(outer), &row, dtype);
        });
    }

    /// The numbers of one key or value. They depend on the seed, the sequence, the key and the
    /// head, and on nothing else.
    fn row(&self, operand: Operand, KeyRow { id, key, head }: KeyRow) -> Row {
        let (purpose, numbers, dim) = match operand {
            Operand::Key | Operand::Rotary => (Use::Key, self.contents.k, self.head_dim),
            Operand::Value => (Use::Value, self.contents.v, self.value_dim),
        };
        let dtype = self.stored_as(operand);
        let mut noise = self.noise(purpose, [id, key as u64, head as u64]);
        let mut row = vec![0.0; dim];
        numbers.fill(&mut row, &mut noise, 1.0, largest_stored(dtype, self.dtype));
        if !dtype.is_code() {
            return Row { numbers: row, divisor: 1.0, scale: 1.0 };
        }
        let page = match self.keys {
            Keys::Paged { block_size, .. } => key / block_size,
            _ => 0,
        };
        let shared_by = match (self.cache.granularity, self.keys) {
            (Granularity::Tensor, _) => [0, 0, 0],
            (Granularity::Head, _) | (Granularity::Page, Keys::Ragged { .. }) => {
                [0, 0, head as u64]
            }
            (Granularity::Page, _) => [id, page as u64, head as u64],
            (Granularity::Token, _) => [id, key as u64, head as u64],
        };
        let mut noise = Noise::new(
            self.seed,
            &[Use::Scale as u64, purpose as u64, shared_by[0], shared_by[1], shared_by[2]],
        );
        let largest = match self.cache.granularity {
            Granularity::Token => row.iter().fold(0.0, |max: f32, x| max.max(x.abs())),
            _ => numbers.reach() * noise.pick(&[0.7, 0.8, 1.0, 1.3]),
        };
        let mut divisor = largest / dtype.largest_code();
        if self.cache.scales == Scales::PowerOfTwo && divisor > 0.0 {
            divisor = divisor.log2().ceil().exp2();
        }
        // The largest value is one of the queries' type, as outputs have to be.
        let max_divisor = largest_number(self.dtype) / dtype.largest_code();
        if divisor > max_divisor {
            divisor = max_divisor.log2().floor().exp2();
        }
        let scale = match self.cache.scales {
            Scales::Fitted | Scales::PowerOfTwo => divisor,
            Scales::Spread if noise.one_in(16) => 0.0,
            Scales::Spread => {
                let widest = if self.dtype == DType::F16 { 27 } else { 41 };
                (divisor * (noise.below(widest) as f32 - 20.0).exp2()).min(max_divisor)
            }
        };
        Row { numbers: row, divisor, scale }
    }

    /// A buffer for slots that are filled in later.
    fn unseen_slots(&self, dtype: DType, length: usize) -> Buffer {
        let mut noise = self.noise(Use::Unseen, [1, 0, 0]);
        let mut byte = |ordinary: u8| match self.poison {
            // NaN and infinity of both fp8 types, and the code that i8 caches do not use.
            true => noise.pick(&[0x7f, 0xff, 0x7c, 0xfc, 0x80]),
            false => noise.below(64) as u8 | ordinary,
        };
        let scale = if self.poison { f16::NAN } else { f16::ONE };
        match dtype {
            DType::Q8_0 => Buffer::Q8(
                (0..length)
                    .map(|_| BlockQ8_0 { scale, codes: [byte(0) as i8; BLOCK_VALUES] })
                    .collect(),
            ),
            DType::Q4_0 => Buffer::Q4(
                (0..length)
                    .map(|_| BlockQ4_0 { scale, nibbles: [byte(0); BLOCK_VALUES / 2] })
                    .collect(),
            ),
            DType::Mla656 => Buffer::Mla656(
                (0..length)
                    .map(|_| Mla656 {
                        codes: [E4m3::from_bits(byte(0)); Mla656::LATENT_VALUES],
                        scales: [scale.to_f32(); 4],
                        rotary: [bf16::from_f32(scale.to_f32()); 64],
                    })
                    .collect(),
            ),
            _ if dtype.is_code() => Buffer::Codes((0..length).map(|_| byte(0)).collect()),
            _ => Buffer::Floats(self.unseen(length)),
        }
    }
}

impl Buffer {
    fn store(&mut self, start: usize, row: &Row, dtype: DType) {
        let numbers = &row.numbers;
        let blocks = numbers.as_chunks::<BLOCK_VALUES>().0;
        match self {
            Buffer::Floats(buffer) => buffer[start..][..numbers.len()].copy_from_slice(numbers),
            Buffer::Codes(buffer) => {
                for (code, &x) in buffer[start..][..numbers.len()].iter_mut().zip(numbers) {
                    *code = code_bits(if row.divisor > 0.0 { x / row.divisor } else { 0.0 }, dtype);
                }
            }
            Buffer::Q8(buffer) => {
                for (block, x) in buffer[start..].iter_mut().zip(blocks) {
                    *block = BlockQ8_0::from_f32(x);
                    // Other writers may leave scales of either sign.
                    if x[0] < 0.0 {
                        block.scale = -block.scale;
                        block.codes = block.codes.map(|code| -code);
                    }
                }
            }
            Buffer::Q4(buffer) => {
                for (block, x) in buffer[start..].iter_mut().zip(blocks) {
                    *block = BlockQ4_0::from_f32(x);
                }
            }
            Buffer::Mla656(buffer) => {
                for (row, x) in buffer[start..].iter_mut().zip(numbers.as_chunks().0) {
                    *row = Mla656::from_f32(x);
                }
            }
        }
    }

    fn into_data(self, dtype: DType) -> Data {
        match (self, dtype) {
            (Buffer::Floats(buffer), _) => data(dtype, buffer),
            (Buffer::Codes(buffer), _) => Data::from_le_bytes(dtype, &buffer),
            (Buffer::Q8(buffer), _) => buffer.into(),
            (Buffer::Q4(buffer), _) => buffer.into(),
            (Buffer::Mla656(buffer), _) => buffer.into(),
        }
    }
}

/// The largest number that a cache of type `stored` holds under queries of type `queries`. Outputs
/// are of the queries' type, so values have to be within both.
fn largest_stored(stored: DType, queries: DType) -> f32 {
    // Rotary dims are bf16.
    let stored = if stored.is_latent_row() { DType::BF16 } else { stored };
    match (stored, queries) {
        // The largest f16 is not a bf16, and would be rounded up. This is the largest below it.
        (DType::BF16, DType::F16) => 65280.0,
        // Codes are made of such numbers by their scale.
        _ if !stored.is_float() => largest_number(queries),
        _ => largest_number(stored).min(largest_number(queries)),
    }
}

/// The nearest code of a number.
fn code_bits(x: f32, dtype: DType) -> u8 {
    match dtype {
        DType::E4M3 => E4m3::from_f32(x).to_bits(),
        DType::E5M2 => E5m2::from_f32(x).to_bits(),
        _ => i8_from_f32(x).cast_unsigned(),
    }
}

impl Numbers {
    /// About the largest magnitude.
    fn reach(self) -> f32 {
        match self {
            Numbers::Normal | Numbers::Positive | Numbers::Spread(_) => 4.0,
            Numbers::Constant(number) => number.abs(),
            Numbers::Scaled(factor) => 4.0 * factor.abs(),
            Numbers::Peaked | Numbers::Outliers => 60.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_numbers_are_near_those_meant() {
        let plain = Spec::new("f32").dims(64, 32).lengths(&[(2, 9), (2, 40)]);
        let meant = plain.clone().generate();
        let formats = [DType::E4M3, DType::E5M2, DType::I8, DType::Q8_0, DType::Q4_0];
        for (dtype, within) in formats.into_iter().zip([0.04, 0.08, 0.02, 0.02, 0.14]) {
            let cache = CacheSpec::new(dtype, Granularity::Token, Scales::Fitted);
            let case = Spec { keys: Keys::Batched { slack: 3 }, ..plain.clone().cache(cache) };
            let case = case.legal().generate();
            let inputs = case.inputs().unwrap();
            let exact = meant.inputs().unwrap();
            let scale = |at: &[usize]| {
                case.attention.k_scales.as_ref().map_or(1.0, |scales| scales.view().unwrap().at(at))
            };
            for (at, dim) in [([0, 4, 1], 5), ([1, 39, 0], 63), ([1, 0, 1], 31)] {
                let index = [at[0], at[1], at[2], dim];
                let (found, x) = (inputs.k.at(&index) * scale(&at), exact.k.at(&index));
                assert!((found - x).abs() <= within * x.abs().max(2.5), "{dtype}: {found} is {x}");
            }
        }
    }
}
