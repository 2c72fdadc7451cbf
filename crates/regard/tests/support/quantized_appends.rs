//! Appends that quantize on the way, on any device: every code, block and scale against the scalar
//! reference.

use crate::appends::Run;
use regard::format::{BlockQ8_0, E4m3};
use regard::quantize::{dynamic_scale, quantize_blocks, quantize_row};
use regard::{Append, AppendScales, DType, Rotary, Tensor, TensorMut, bf16};

const HEADS: usize = 2;
const DIM: usize = 64;
const BLOCK_SIZE: usize = 4;
const BLOCKS: usize = 6;
/// New tokens of each sequence, and its tokens afterwards.
const SEQUENCES: [(usize, i32); 2] = [(3, 6), (5, 5)];
const TOKENS: usize = 8;

/// The scales of a pool.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Scaling {
    /// By none: blocks have their own, and floats none.
    NoScales,
    PerHead,
    Dynamic,
}

fn numbers(seed: u32, count: usize) -> Vec<bf16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..count).map(|_| next()).collect()
}

/// A pool's bytes and scales, as an append leaves them.
#[derive(Debug, Clone, PartialEq)]
struct Pool {
    bytes: Vec<u8>,
    scales: Vec<f32>,
}

impl Pool {
    fn new(format: DType, scaling: Scaling) -> Pool {
        let heads = BLOCKS * BLOCK_SIZE * HEADS;
        let scales = match scaling {
            Scaling::NoScales => vec![],
            Scaling::PerHead => vec![1.0 / 64.0, 0.0],
            Scaling::Dynamic => vec![-5.0; heads],
        };
        Pool { bytes: vec![0xab; heads * head_bytes(format)], scales }
    }

    fn view(&mut self, format: DType) -> TensorMut<'_> {
        let shape = [BLOCKS, BLOCK_SIZE, HEADS, DIM / format.values()];
        let data = self.bytes.as_mut_ptr();
        // SAFETY: the vector has room for the contiguous shape; every alignment of these formats is
        // at most 2, and the view borrows the vector.
        unsafe { TensorMut::from_raw(data, format, &shape, None).expect("a pool") }
    }

    /// The bits that it holds. All NaNs of bf16 count as equal.
    fn bits(&self, format: DType) -> Vec<u8> {
        if format != DType::BF16 {
            return self.bytes.clone();
        }
        let number = |bytes: &[u8; 2]| match bf16::from_le_bytes(*bytes) {
            x if x.is_nan() => bf16::NAN.to_le_bytes(),
            x => x.to_le_bytes(),
        };
        self.bytes.as_chunks().0.iter().flat_map(number).collect()
    }

    /// Quantizes a row to a slot, by the contract.
    fn store(&mut self, format: DType, scaling: Scaling, slot: usize, head: usize, row: &[f32]) {
        let at = slot * HEADS + head;
        let codes = &mut self.bytes[at * head_bytes(format)..][..head_bytes(format)];
        match scaling {
            Scaling::NoScales if format == DType::BF16 => {
                for (x, code) in row.iter().zip(codes.as_chunks_mut().0) {
                    *code = bf16::from_f32(*x).to_le_bytes();
                }
            }
            Scaling::NoScales => quantize_blocks(row, format, codes),
            Scaling::PerHead => quantize_row(row, format, self.scales[head], codes),
            Scaling::Dynamic => {
                self.scales[at] = dynamic_scale(row, format);
                quantize_row(row, format, self.scales[at], codes);
            }
        }
    }
}

fn head_bytes(format: DType) -> usize {
    DIM / format.values() * format.size()
}

fn scales(scaling: Scaling, scales: &mut [f32]) -> Option<AppendScales<'_>> {
    match scaling {
        Scaling::NoScales => None,
        Scaling::PerHead => {
            Some(AppendScales::Static(Tensor::new(scales, [1, 1, HEADS]).expect("scales")))
        }
        Scaling::Dynamic => Some(AppendScales::Dynamic(
            TensorMut::new(scales, [BLOCKS, BLOCK_SIZE, HEADS]).expect("scales"),
        )),
    }
}

fn rotation_table(positions: usize) -> Vec<f32> {
    let angles = |position: usize| {
        (0..DIM).map(move |i| {
            let angle = position as f32 * 0.3f32.powi((i % (DIM / 2)) as i32);
            if i < DIM / 2 { angle.cos() } else { angle.sin() }
        })
    };
    (0..positions).flat_map(angles).collect()
}

fn check(formats: [DType; 2], scalings: [Scaling; 2], rotates: bool, run: &mut Run) {
    let (mut key, mut value) = (numbers(1, TOKENS * HEADS * DIM), numbers(2, TOKENS * HEADS * DIM));
    // A row of zeros, one with a NaN, one with an infinity, and one in all magnitudes.
    key[..DIM].fill(bf16::ZERO);
    value[..DIM].fill(bf16::ZERO);
    key[DIM + 7] = bf16::NAN;
    value[DIM + 40] = bf16::NAN;
    value[2 * DIM + 40] = bf16::INFINITY;
    for (i, x) in value[3 * DIM..4 * DIM].iter_mut().enumerate() {
        *x = bf16::from_f32(x.to_f32() * 2f32.powi(2 * i as i32 - 64));
    }
    let table = [4, 1, 0, 5];
    let slot_of = |sequence: usize, position: usize| {
        table[2 * sequence + position / BLOCK_SIZE] as usize * BLOCK_SIZE + position % BLOCK_SIZE
    };
    let rotations = rotation_table(4);
    let mut pools = [0, 1].map(|i| Pool::new(formats[i], scalings[i]));
    let mut expected = pools.clone();
    let mut token = 0;
    for (sequence, (new, len)) in SEQUENCES.into_iter().enumerate() {
        for i in 0..new {
            let position = len as usize - new + i;
            let slot = slot_of(sequence, position);
            for head in 0..HEADS {
                let row = |from: &[bf16]| -> Vec<f32> {
                    let at = (token * HEADS + head) * DIM;
                    from[at..at + DIM].iter().map(|x| x.to_f32()).collect()
                };
                let mut new_key = row(&key);
                if rotates {
                    let angles = &rotations[position.min(3) * DIM..][..DIM];
                    for pair in 0..DIM / 2 {
                        let (cos, sin) = (angles[pair], angles[DIM / 2 + pair]);
                        let (x, y) = (new_key[pair], new_key[pair + DIM / 2]);
                        new_key[pair] = x * cos - y * sin;
                        new_key[pair + DIM / 2] = y * cos + x * sin;
                    }
                }
                expected[0].store(formats[0], scalings[0], slot, head, &new_key);
                expected[1].store(formats[1], scalings[1], slot, head, &row(&value));
            }
            token += 1;
        }
    }
    let [keys, values] = &mut pools;
    let (lens, starts) = (SEQUENCES.map(|(_, len)| len), [0, 3, 8]);
    let mut key_scales = keys.scales.clone();
    let mut value_scales = values.scales.clone();
    let mut append = Append {
        key: Tensor::new(&key, [TOKENS, HEADS, DIM]).expect("key"),
        value: Tensor::new(&value, [TOKENS, HEADS, DIM]).expect("value"),
        key_pool: keys.view(formats[0]),
        value_pool: values.view(formats[1]),
        k_scales: scales(scalings[0], &mut key_scales),
        v_scales: scales(scalings[1], &mut value_scales),
        block_table: Some(Tensor::new(&table, [2, 2]).expect("table")),
        kv_lens: Tensor::from(&lens),
        cu_seqlens: Some(Tensor::from(&starts)),
        rotary: rotates.then(|| Rotary {
            table: Tensor::new(&rotations, [4, DIM]).expect("rotations"),
            interleaved: false,
            query: None,
        }),
    };
    run(&mut append).unwrap_or_else(|error| panic!("{formats:?}: {error}"));
    (keys.scales, values.scales) = (key_scales, value_scales);
    let same =
        |a: &[f32], b: &[f32]| a.iter().map(|x| x.to_bits()).eq(b.iter().map(|x| x.to_bits()));
    for ((pool, expected), format) in pools.iter().zip(&expected).zip(formats) {
        assert_eq!(pool.bits(format), expected.bits(format), "{formats:?} {scalings:?} {rotates}");
        assert!(same(&pool.scales, &expected.scales), "{formats:?} {scalings:?} {rotates}");
    }
}

/// Every format, with and without rotation: codes, blocks and scales are the reference's.
pub fn check_formats(run: &mut Run) {
    use DType::{BF16, E4M3, E5M2, I8, Q4_0, Q8_0};
    use Scaling::{Dynamic, NoScales, PerHead};
    for (formats, scalings) in [
        ([E4M3, E4M3], [Dynamic, Dynamic]),
        ([E4M3, I8], [PerHead, PerHead]),
        ([E5M2, E4M3], [Dynamic, PerHead]),
        ([I8, E5M2], [Dynamic, Dynamic]),
        ([Q8_0, Q4_0], [NoScales, NoScales]),
        ([Q4_0, I8], [NoScales, Dynamic]),
        ([BF16, E4M3], [NoScales, Dynamic]),
    ] {
        for rotates in [false, true] {
            check(formats, scalings, rotates, run);
        }
    }
}

/// Without a block table, sequence b is row b.
pub fn check_dense_cache(run: &mut Run) {
    let key: Vec<f32> = (1..=6).map(|x| x as f32).collect();
    let (mut keys, mut values) = ([E4m3::default(); 16], [BlockQ8_0::default(); 8]);
    let value = vec![1f32; 2 * 3 * 32];
    let mut k_scales = [0f32; 16];
    let lens = [5, 9]; // the last token of the second sequence is past its row
    let mut append = Append {
        key: Tensor::new(&key, [6, 1, 1]).expect("key"),
        value: Tensor::new(&value, [6, 1, 32]).expect("value"),
        key_pool: TensorMut::new(&mut keys, [2, 8, 1, 1]).expect("keys"),
        value_pool: TensorMut::with_strides(&mut values, [2, 8, 1, 1], [0, 1, 1, 1])
            .expect("values"),
        k_scales: Some(AppendScales::Dynamic(
            TensorMut::new(&mut k_scales, [2, 8, 1]).expect("scales"),
        )),
        v_scales: None,
        block_table: None,
        kv_lens: Tensor::from(&lens),
        cu_seqlens: None,
        rotary: None,
    };
    let error = run(&mut append).expect_err("rows overlap").to_string();
    assert!(error.starts_with("`value_pool` is a view of shape [2, 8, 1, 1]"), "{error}");
    let mut values = [BlockQ8_0::default(); 16];
    append.value_pool = TensorMut::new(&mut values, [2, 8, 1, 1]).expect("values");
    run(&mut append).expect("sound operands");
    let found: Vec<f32> =
        keys.iter().zip(k_scales).map(|(code, scale)| code.to_f32() * scale).collect();
    let mut expected = [0f32; 16];
    for (slot, x) in [(2, 1.0), (3, 2.0), (4, 3.0), (8 + 6, 4.0), (8 + 7, 5.0)] {
        expected[slot] = x;
    }
    for (found, expected) in found.iter().zip(expected) {
        assert!((found - expected).abs() <= 1e-6 * expected, "{found} {expected}");
    }
    assert_eq!(values[8 + 7], BlockQ8_0::from_f32(&[1.0; 32]));
    assert_eq!(values[8 + 5], BlockQ8_0::default());
}
