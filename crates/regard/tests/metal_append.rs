//! Appending by the shipped Metal kernel, run on the host: the tests of the CPU's append, and the
//! bits of its results.

#[path = "support/appends.rs"]
mod appends;
mod numbers;
#[path = "support/quantized_appends.rs"]
mod quantized_appends;
#[path = "support/metal.rs"]
mod support;

use appends::trials;
use metal_host::{Build, Library, operand, operand_mut};
use regard::cpu::Cpu;
use regard::metal::{self, Append, MetalMemory, Rotary};
use regard::{AppendLatent, AppendScales, DType, Error, Tensor, TensorMut, bf16, f16};
use support::{compiler, library, read, run, source_of, written};

/// Scales in the host's memory as scales on a Mac.
fn scales_on_metal<'a>(
    scales: &'a mut Option<AppendScales>,
) -> Result<Option<AppendScales<'a, MetalMemory>>, Error> {
    let moved = |scales: &'a mut AppendScales| match scales {
        AppendScales::Static(tensor) => operand(tensor).map(AppendScales::Static),
        AppendScales::Dynamic(tensor) => operand_mut(tensor).map(AppendScales::Dynamic),
        _ => unreachable!("no other kind is made here"),
    };
    scales.as_mut().map(moved).transpose()
}

/// A rotation, likewise.
fn rotary_on_metal<'a>(rotary: &'a mut regard::Rotary) -> Result<Rotary<'a>, Error> {
    Ok(Rotary {
        table: operand(&rotary.table)?,
        interleaved: rotary.interleaved,
        query: rotary.query.as_mut().map(operand_mut).transpose()?,
    })
}

/// New rows of a latent cache, likewise.
fn latent_on_metal<'a>(append: &'a mut AppendLatent) -> Result<metal::AppendLatent<'a>, Error> {
    Ok(metal::AppendLatent {
        key: operand(&append.key)?,
        key_pool: operand_mut(&mut append.key_pool)?,
        k_scales: scales_on_metal(&mut append.k_scales)?,
        block_table: append.block_table.as_ref().map(operand).transpose()?,
        kv_lens: operand(&append.kv_lens)?,
        cu_seqlens: append.cu_seqlens.as_ref().map(operand).transpose()?,
        rotary: append.rotary.as_mut().map(rotary_on_metal).transpose()?,
    })
}

/// Operands in the host's memory as operands on a Mac.
fn on_metal<'a>(append: &'a mut regard::Append) -> Result<Append<'a>, Error> {
    Ok(Append {
        key: operand(&append.key)?,
        value: operand(&append.value)?,
        key_pool: operand_mut(&mut append.key_pool)?,
        value_pool: operand_mut(&mut append.value_pool)?,
        k_scales: scales_on_metal(&mut append.k_scales)?,
        v_scales: scales_on_metal(&mut append.v_scales)?,
        block_table: append.block_table.as_ref().map(operand).transpose()?,
        kv_lens: operand(&append.kv_lens)?,
        cu_seqlens: append.cu_seqlens.as_ref().map(operand).transpose()?,
        rotary: append.rotary.as_mut().map(rotary_on_metal).transpose()?,
    })
}

/// Appends by the kernel.
fn append_by(library: &mut Library, append: &mut regard::Append) -> Result<(), Error> {
    let Some(dispatch) = metal::append(&on_metal(append)?)? else { return Ok(()) };
    run(library, &dispatch, 3).unwrap_or_else(|why| panic!("{why}"));
    Ok(())
}

#[test]
fn new_tokens_land_in_their_slots_rotated_as_asked() {
    let Some(compiler) = compiler() else { return };
    let mut library = library(&compiler, &source_of(&["APPEND("]), support::build());
    for trial in trials() {
        trial.check::<f32>(&mut |append| append_by(&mut library, append));
        trial.check::<f16>(&mut |append| append_by(&mut library, append));
        trial.check::<bf16>(&mut |append| append_by(&mut library, append));
    }
}

/// The reference is the CPU's too, so both write the same bits.
#[test]
fn every_format_is_written_as_the_reference_has_it() {
    let Some(compiler) = compiler() else { return };
    // Fast math divides otherwise.
    if support::build() == Build::FastMath {
        return;
    }
    let mut library = library(&compiler, &source_of(&["APPEND("]), support::build());
    quantized_appends::check_formats(&mut |append| append_by(&mut library, append));
}

#[test]
fn a_dense_cache_takes_new_tokens() {
    let Some(compiler) = compiler() else { return };
    if support::build() == Build::FastMath {
        return;
    }
    let mut library = library(&compiler, &source_of(&["APPEND("]), support::build());
    quantized_appends::check_dense_cache(&mut |append| append_by(&mut library, append));
}

/// The kernel writes the rotary dims of a latent row that is not quantized and the others apart;
/// the CPU writes rows.
#[test]
fn latent_rows_have_the_bits_that_the_cpu_writes() {
    let Some(compiler) = compiler() else { return };
    if support::build() == Build::FastMath {
        return;
    }
    let mut library = library(&compiler, &source_of(&["APPEND("]), support::build());
    let given = [DType::F16, DType::E4M3, DType::E5M2, DType::I8, DType::Q8_0, DType::Q4_0];
    let given = given.map(|dtype| (dtype, 96, false));
    let others = [
        (DType::Mla656, 576, false),
        (DType::E4M3, 576, true),
        (DType::E5M2, 96, true),
        (DType::I8, 96, true),
    ];
    for trial in given.into_iter().chain(others) {
        for rotates in [false, true] {
            let expected =
                latent_append(trial, rotates, |append| Cpu::new()?.append_latent(append));
            let found = latent_append(trial, rotates, |append| {
                let dispatch = metal::append_latent(&mut latent_on_metal(append)?)?;
                let dispatch = dispatch.expect("new rows");
                run(&mut library, &dispatch, 3).unwrap_or_else(|why| panic!("{why}"));
                Ok(())
            });
            assert_eq!(found, expected, "{trial:?}, rotated: {rotates}");
        }
    }
}

/// The bytes of a pool of this type, of its dynamic scales and of queries, after `run` has appended
/// 4 rows of `dim` dims to each of two sequences.
fn latent_append(
    (dtype, dim, is_dynamic): (DType, usize, bool),
    rotates: bool,
    run: impl FnOnce(&mut AppendLatent) -> Result<(), Error>,
) -> (Vec<u32>, Vec<u32>, Vec<u16>) {
    let numbers = |count: usize| -> Vec<f16> {
        (0..count).map(|i| f16::from_f32((i * 37 % 101) as f32 / 16.0 - 3.0)).collect()
    };
    let (rows, mut query) = (numbers(8 * dim), numbers(8 * 3 * dim));
    let angles: Vec<f32> = (0..9 * 32).map(|i| (i as f32).sin()).collect();
    let mut pool = vec![0x5a5a_5a5au32; 5 * 4 * dim / dtype.values() * dtype.size() / 4];
    let mut dynamic = [-5f32; 20];
    let scale = [0.03f32];
    let scales = Tensor::new(&scale, [1, 1, 1]).unwrap();
    let shape = [5, 4, 1, dim / dtype.values()];
    // SAFETY: the memory is that long, aligned for 4 bytes, and used by this view alone.
    let key_pool =
        unsafe { TensorMut::from_raw(pool.as_mut_ptr().cast(), dtype, &shape, None).unwrap() };
    let mut append = AppendLatent {
        key: Tensor::new(&rows, [8, 1, dim]).unwrap(),
        key_pool,
        k_scales: dtype.is_code().then(|| match is_dynamic {
            true => AppendScales::Dynamic(TensorMut::new(&mut dynamic, [5, 4, 1]).unwrap()),
            false => AppendScales::Static(scales),
        }),
        block_table: Some(Tensor::new(&[3, 0, -1, 1, 4, 2], [2, 3]).unwrap()),
        kv_lens: Tensor::from(&[6, 9]),
        cu_seqlens: None,
        rotary: rotates.then(|| regard::Rotary {
            table: Tensor::new(&angles, [9, 32]).unwrap(),
            interleaved: false,
            query: Some(TensorMut::new(&mut query, [8, 3, dim]).unwrap()),
        }),
    };
    run(&mut append).unwrap();
    (pool, dynamic.map(f32::to_bits).to_vec(), query.into_iter().map(f16::to_bits).collect())
}

/// The cache that `append` should leave: each new token is in its place.
#[test]
fn appended_tokens_are_where_the_tables_say() {
    let Some(compiler) = compiler() else { return };
    let mut library = library(&compiler, &source_of(&["APPEND("]), support::build());
    let (heads, dk, dv) = (2, 40, 7);
    let lens = [5i32, 0, 9];
    // Ragged: 2, 0 and 6 new tokens; not ragged: 2 each, of which the second sequence has no place
    // for any.
    let cumulative = [0i32, 2, 2, 8];
    // Pages of 4 slots, and one block per sequence as of a cache without pages, which has no place
    // for the last token of the third.
    for (blocks, block, table) in [(7, 4, &[3i32, 0, -1, 6, 6, 6, 1, 5, 2][..]), (3, 8, &[0, 1, 2])]
    {
        for ragged in [false, true] {
            let rows = if ragged { 8 } else { 6 };
            let new = |dim: usize, sign: f32| -> Vec<f32> {
                (0..rows * heads * dim).map(|i| sign * (i + 1) as f32).collect()
            };
            let (new_k, new_v) = (new(dk, 1.0), new(dv, -1.0));
            let empty = |dim: usize| vec![0.5f32; blocks * block * heads * dim];
            let (mut k, mut v) = (empty(dk), empty(dv));
            let (mut expected_k, mut expected_v) = (k.clone(), v.clone());
            for (sequence, &len) in lens.iter().enumerate() {
                let (start, count) = match ragged {
                    true => (
                        cumulative[sequence] as usize,
                        (cumulative[sequence + 1] - cumulative[sequence]) as usize,
                    ),
                    false => (sequence * 2, 2),
                };
                for token in 0..count {
                    let Some(key) = (len as usize + token).checked_sub(count) else { continue };
                    let columns = table.len() / 3;
                    if key / block >= columns {
                        continue;
                    }
                    let page = table[sequence * columns + key / block] as usize;
                    let slot = page * block + key % block;
                    let copy = |from: &[f32], to: &mut [f32], dim: usize| {
                        let row = heads * dim;
                        let from = &from[(start + token) * row..][..row];
                        to[slot * row..][..row].copy_from_slice(from);
                    };
                    copy(&new_k, &mut expected_k, dk);
                    copy(&new_v, &mut expected_v, dv);
                }
            }
            let pool = |dim| [blocks, block, heads, dim];
            let dispatch = metal::append(&Append {
                key: read(&new_k, &[rows, heads, dk]),
                value: read(&new_v, &[rows, heads, dv]),
                key_pool: written(&mut k, &pool(dk)),
                value_pool: written(&mut v, &pool(dv)),
                k_scales: None,
                v_scales: None,
                block_table: Some(read(table, &[3, table.len() / 3])),
                kv_lens: read(&lens, &[3]),
                cu_seqlens: ragged.then(|| read(&cumulative, &[4])),
                rotary: None,
            })
            .unwrap()
            .expect("there are new tokens");
            run(&mut library, &dispatch, 0).unwrap_or_else(|why| panic!("{why}"));
            assert!(k == expected_k && v == expected_v, "ragged {ragged}, pages of {block}");
        }
    }
}

/// RoPE of one head, by complex multiplication in f64.
fn rotate(head: &mut [f32], angles: &[f32], interleaved: bool) {
    let pairs = angles.len() / 2;
    for pair in 0..pairs {
        let (a, b) = if interleaved { (2 * pair, 2 * pair + 1) } else { (pair, pair + pairs) };
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        let (cosine, sine) = (f64::from(angles[pair]), f64::from(angles[pairs + pair]));
        head[a] = (x * cosine - y * sine) as f32;
        head[b] = (y * cosine + x * sine) as f32;
    }
}

#[test]
fn keys_and_queries_are_rotated_to_their_positions() {
    let Some(compiler) = compiler() else { return };
    let mut library = library(&compiler, &source_of(&["APPEND("]), support::build());
    let (heads, query_heads, dim, rotated, positions) = (2, 3, 10, 6, 5);
    // Positions 2 and 3, and 5 and 6, which are past the table.
    let lens = [4i32, 7];
    let table: Vec<f32> = (0..positions * rotated).map(|i| (i as f32).sin()).collect();
    for interleaved in [false, true] {
        let values = |n: usize| (0..n).map(|i| (i as f32 * 0.7).cos()).collect::<Vec<_>>();
        let (new_k, new_v) = (values(4 * heads * dim), values(4 * heads));
        let mut query = values(4 * query_heads * dim);
        let (mut k, mut v) = (vec![0.0f32; 2 * 8 * heads * dim], vec![0.0f32; 2 * 8 * heads]);
        let (mut expected_k, mut expected_v) = (k.clone(), v.clone());
        let mut expected_query = query.clone();
        for token in 0..4 {
            let position = lens[token / 2] as usize - 2 + token % 2;
            let angles = &table[position.min(positions - 1) * rotated..][..rotated];
            let slot = token / 2 * 8 + position;
            for head in 0..heads {
                let row = &mut expected_k[(slot * heads + head) * dim..][..dim];
                row.copy_from_slice(&new_k[(token * heads + head) * dim..][..dim]);
                rotate(row, angles, interleaved);
                expected_v[slot * heads + head] = new_v[token * heads + head];
            }
            for head in 0..query_heads {
                let row = &mut expected_query[(token * query_heads + head) * dim..][..dim];
                rotate(row, angles, interleaved);
            }
        }
        let dispatch = metal::append(&Append {
            key: read(&new_k, &[4, heads, dim]),
            value: read(&new_v, &[4, heads, 1]),
            key_pool: written(&mut k, &[2, 8, heads, dim]),
            value_pool: written(&mut v, &[2, 8, heads, 1]),
            k_scales: None,
            v_scales: None,
            block_table: Some(read(&[0i32, 1], &[2, 1])),
            kv_lens: read(&lens, &[2]),
            cu_seqlens: None,
            rotary: Some(Rotary {
                table: read(&table, &[positions, rotated]),
                interleaved,
                query: Some(written(&mut query, &[4, query_heads, dim])),
            }),
        })
        .unwrap()
        .expect("there are new tokens");
        run(&mut library, &dispatch, 7).unwrap_or_else(|why| panic!("{why}"));
        assert_eq!(v, expected_v);
        for (name, found, expected) in [("k", &k, &expected_k), ("q", &query, &expected_query)] {
            let worst = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(
                worst <= 2.0 * f32::EPSILON,
                "{name}, interleaved {interleaved}: off by {worst}"
            );
        }
    }
}

#[test]
fn bad_appends_are_refused() {
    let (new, lens, table) = ([0.0f32; 12], [3i32], [0i32]);
    let mut cache = [0.0f32; 48];
    let (left, right) = cache.split_at_mut(24);
    let mut append = |key: [usize; 3], value: [usize; 3], pool: [usize; 4]| {
        metal::append(&Append {
            key: read(&new[..key.iter().product()], &key),
            value: read(&new[..value.iter().product()], &value),
            key_pool: written(&mut left[..pool.iter().product()], &pool),
            value_pool: written(&mut right[..20], &[1, 5, 2, 2]),
            k_scales: None,
            v_scales: None,
            block_table: Some(read(&table, &[1, 1])),
            kv_lens: read(&lens, &[1]),
            cu_seqlens: None,
            rotary: None,
        })
    };
    assert!(append([3, 2, 2], [3, 2, 2], [1, 5, 2, 2]).unwrap().is_some());
    assert!(append([0, 2, 2], [0, 2, 2], [1, 5, 2, 2]).unwrap().is_none());
    for (key, value, pool, argument) in [
        ([3, 2, 2], [2, 2, 2], [1, 5, 2, 2], "value"),
        ([3, 2, 2], [3, 2, 2], [1, 5, 2, 1], "key_pool"),
        ([3, 1, 2], [3, 1, 2], [1, 5, 1, 2], "value_pool"),
    ] {
        let error = append(key, value, pool).unwrap_err().to_string();
        assert!(error.starts_with(&format!("`{argument}`")), "{error}");
    }
}
