//! Appending to a latent cache: whole rows, the last dims rotated.

mod expect;

use expect::expect;
use regard::cpu::Cpu;
use regard::quantize::{dynamic_scale, quantize_row};
use regard::{Append, AppendLatent, AppendScales, DType, Error, Rotary, Tensor, TensorMut, bf16};

const TOKENS: usize = 7;
const DIM: usize = 96;
const ROTARY: usize = 32;
const BLOCKS: usize = 6;
const BLOCK_SIZE: usize = 4;
const POSITIONS: usize = 12;
const QUERY_HEADS: usize = 3;
/// Tokens of the two sequences afterwards, the new ones included, and the places of the new ones.
const LENS: [i32; 2] = [6, 9];
const CUMULATIVE: [i32; 3] = [0, 5, 7];
const TABLE: [i32; 6] = [4, 1, -1, 0, 5, -1];

fn numbers(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 11) % 101) as f32 / 16.0 - 3.0).collect()
}

fn rotary_table() -> Vec<f32> {
    let angle = |p: usize, i: usize| p as f32 * 0.7f32.powi((i % (ROTARY / 2)) as i32 + 1);
    let entry = |p: usize, i: usize| match i < ROTARY / 2 {
        true => angle(p, i).cos(),
        false => angle(p, i).sin(),
    };
    (0..POSITIONS).flat_map(|p| (0..ROTARY).map(move |i| entry(p, i))).collect()
}

/// Appends rows to a pool; the rotated queries.
fn append(
    rows: Tensor,
    pool: TensorMut,
    k_scales: Option<AppendScales>,
    rotates: bool,
) -> Result<Vec<bf16>, Error> {
    let table = rotary_table();
    let mut query: Vec<bf16> =
        numbers(TOKENS * QUERY_HEADS * DIM, 5).into_iter().map(bf16::from_f32).collect();
    let rotary = match rotates {
        true => Some(Rotary {
            table: Tensor::new(&table, [POSITIONS, ROTARY])?,
            interleaved: true,
            query: match rows.dtype() {
                DType::BF16 => Some(TensorMut::new(&mut query, [TOKENS, QUERY_HEADS, DIM])?),
                _ => None,
            },
        }),
        false => None,
    };
    Cpu::new()?.append_latent(&mut AppendLatent {
        key: rows,
        key_pool: pool,
        k_scales,
        block_table: Some(Tensor::new(&TABLE, [2, 3])?),
        kv_lens: Tensor::from(&LENS),
        cu_seqlens: Some(Tensor::from(&CUMULATIVE)),
        rotary,
    })?;
    Ok(query)
}

/// The rows of a pool of floats after an append.
fn appended(rows: &[f32], rotates: bool) -> Vec<f32> {
    let mut pool = vec![f32::NAN; BLOCKS * BLOCK_SIZE * DIM];
    let pool_view = TensorMut::new(&mut pool, [BLOCKS, BLOCK_SIZE, 1, DIM]).unwrap();
    append(Tensor::new(rows, [TOKENS, 1, DIM]).unwrap(), pool_view, None, rotates).unwrap();
    pool
}

/// Slots that new tokens go to: positions 1 to 5 and 7 and 8, of which 8 has no block.
fn slots() -> Vec<(usize, usize)> {
    let positions = (1..6).map(|p| (0, p)).chain((7..9).map(|p| (1, p)));
    let slot = |(token, (sequence, position)): (usize, (usize, usize))| {
        let block = usize::try_from(TABLE[sequence * 3 + position / BLOCK_SIZE]).ok()?;
        Some((token, block * BLOCK_SIZE + position % BLOCK_SIZE))
    };
    positions.enumerate().filter_map(slot).collect()
}

#[test]
fn the_last_dims_are_rotated_and_the_others_copied() {
    let rows = numbers(TOKENS * DIM, 1);
    let plain = appended(&rows, false);
    let rotated = appended(&rows, true);
    let table = rotary_table();
    let positions = [1, 2, 3, 4, 5, 7, 8];
    let mut written = [false; BLOCKS * BLOCK_SIZE];
    for (token, slot) in slots() {
        written[slot] = true;
        let row = &rows[token * DIM..][..DIM];
        assert_eq!(&plain[slot * DIM..][..DIM], row);
        let found = &rotated[slot * DIM..][..DIM];
        assert_eq!(found[..DIM - ROTARY], row[..DIM - ROTARY]);
        let angles = &table[positions[token] * ROTARY..][..ROTARY];
        for pair in 0..ROTARY / 2 {
            let (cos, sin) = (angles[pair], angles[ROTARY / 2 + pair]);
            let at = DIM - ROTARY + 2 * pair;
            let (x, y) = (row[at], row[at + 1]);
            let expected = [x * cos - y * sin, y * cos + x * sin];
            for (found, expected) in found[at..at + 2].iter().zip(expected) {
                assert!((found - expected).abs() < 1e-5, "token {token}, dim {at}");
            }
        }
    }
    for (slot, _) in written.iter().enumerate().filter(|(_, written)| !**written) {
        assert!(rotated[slot * DIM..][..DIM].iter().all(|x| x.is_nan()), "slot {slot}");
    }
}

/// Kernels of GPUs write the rotary dims of a row as keys and the others as values.
#[test]
fn two_parts_of_rows_give_the_same_bits() {
    let start = DIM - ROTARY;
    let to_bf16 = |x: Vec<f32>| x.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
    let rows = to_bf16(numbers(TOKENS * DIM, 2));
    let table = rotary_table();
    let row_strides = [DIM as i64, DIM as i64, 1];
    let pool_strides = [(BLOCK_SIZE * DIM) as i64, DIM as i64, DIM as i64, 1];
    let scale = [0.03f32];
    for dtype in [DType::BF16, DType::E4M3, DType::I8] {
        let bytes = BLOCKS * BLOCK_SIZE * DIM * dtype.size();
        let (mut whole, mut parts) = (vec![bf16::ONE; bytes / 2], vec![bf16::ONE; bytes / 2]);
        let scales = || {
            let scales = Tensor::new(&scale, [1, 1, 1]).unwrap();
            dtype.is_code().then_some(AppendScales::Static(scales))
        };
        // SAFETY: the memory is that long, aligned for 2 bytes, and used by these views alone; the
        // two parts have no element in common.
        let view = |data: *mut bf16, first: usize, dims: usize| unsafe {
            let first = data.cast::<u8>().add(first * dtype.size());
            let shape = [BLOCKS, BLOCK_SIZE, 1, dims];
            TensorMut::from_raw(first, dtype, &shape, Some(&pool_strides)).unwrap()
        };
        let all = Tensor::new(&rows, [TOKENS, 1, DIM]).unwrap();
        let query = append(all, view(whole.as_mut_ptr(), 0, DIM), scales(), true).unwrap();

        let mut other = to_bf16(numbers(TOKENS * QUERY_HEADS * DIM, 5));
        let heads = [(QUERY_HEADS * DIM) as i64, DIM as i64, 1];
        let rotary_dims = [TOKENS, QUERY_HEADS, ROTARY];
        let data = parts.as_mut_ptr();
        let part = |first: usize, dims: usize| {
            Tensor::with_strides(&rows[first..], [TOKENS, 1, dims], row_strides).unwrap()
        };
        let mut append = Append {
            key: part(start, ROTARY),
            value: part(0, start),
            key_pool: view(data, start, ROTARY),
            value_pool: view(data, 0, start),
            k_scales: scales(),
            v_scales: scales(),
            block_table: Some(Tensor::new(&TABLE, [2, 3]).unwrap()),
            kv_lens: Tensor::from(&LENS),
            cu_seqlens: Some(Tensor::from(&CUMULATIVE)),
            rotary: Some(Rotary {
                table: Tensor::new(&table, [POSITIONS, ROTARY]).unwrap(),
                interleaved: true,
                query: Some(
                    TensorMut::with_strides(&mut other[start..], rotary_dims, heads).unwrap(),
                ),
            }),
        };
        Cpu::new().unwrap().append(&mut append).unwrap();
        let bits = |x: &[bf16]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&whole), bits(&parts), "{dtype}");
        assert_eq!(bits(&query), bits(&other), "{dtype}: queries");
    }
}

#[test]
fn a_dynamic_scale_is_that_of_the_whole_row() {
    let rows = numbers(TOKENS * DIM, 3);
    let floats = appended(&rows, true);
    let mut codes = vec![0i8; BLOCKS * BLOCK_SIZE * DIM];
    let mut scales = vec![0f32; BLOCKS * BLOCK_SIZE];
    let dynamic = TensorMut::new(&mut scales, [BLOCKS, BLOCK_SIZE, 1]).unwrap();
    append(
        Tensor::new(&rows, [TOKENS, 1, DIM]).unwrap(),
        TensorMut::new(&mut codes, [BLOCKS, BLOCK_SIZE, 1, DIM]).unwrap(),
        Some(AppendScales::Dynamic(dynamic)),
        true,
    )
    .unwrap();
    for (_, slot) in slots() {
        let row = &floats[slot * DIM..][..DIM];
        let scale = dynamic_scale(row, DType::I8);
        assert_eq!(scales[slot], scale);
        let mut expected = [0u8; DIM];
        quantize_row(row, DType::I8, scale, &mut expected);
        let found = codes[slot * DIM..][..DIM].iter().map(|code| code.cast_unsigned());
        assert!(found.eq(expected));
    }
}

#[test]
fn wrong_operands_are_named() {
    let rows = numbers(TOKENS * DIM, 4);
    let mut pool = vec![0f32; BLOCKS * BLOCK_SIZE * DIM];
    let mut run = |row_dim: usize, pool_dim: usize, rotates| {
        let pool = &mut pool[..BLOCKS * BLOCK_SIZE * pool_dim];
        let pool = TensorMut::new(pool, [BLOCKS, BLOCK_SIZE, 1, pool_dim]).unwrap();
        let rows = Tensor::new(&rows[..TOKENS * row_dim], [TOKENS, 1, row_dim]).unwrap();
        append(rows, pool, None, rotates).map(|_| ())
    };
    run(DIM, DIM, true).unwrap();
    expect(run(DIM, 64, true).unwrap_err(), "key_pool", "f32[6, 4, 1, 64]", "f32[6, 4, 1, 96]");
    expect(run(16, 16, true).unwrap_err(), "rotary table", "of 32 dims", "up to 16");
    let mut codes = vec![0i8; BLOCKS * BLOCK_SIZE * DIM];
    let codes = TensorMut::new(&mut codes, [BLOCKS, BLOCK_SIZE, 1, DIM]).unwrap();
    let all = Tensor::new(&rows, [TOKENS, 1, DIM]).unwrap();
    expect(append(all, codes, None, true).unwrap_err(), "k_scales", "missing", "scales of i8");
}
