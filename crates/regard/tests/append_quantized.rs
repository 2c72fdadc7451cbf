//! Appending that quantizes on the way, on the CPU: every code, block and scale against the scalar
//! reference.

#[path = "support/appends.rs"]
#[allow(dead_code, reason = "used for the type of what appends")]
mod appends;
mod numbers;
#[path = "support/quantized_appends.rs"]
mod quantized_appends;

use regard::cpu::{Cpu, Inline};
use regard::format::{BlockQ8_0, E4m3, Mla656};
use regard::{Append, AppendLatent, AppendScales, Element, Tensor, TensorMut};

#[test]
fn every_format_is_written_as_the_reference_has_it() {
    let cpu = Cpu::new().expect("a CPU").with_executor(Inline);
    quantized_appends::check_formats(&mut |append| cpu.append(append));
}

#[test]
fn a_dense_cache_takes_new_tokens() {
    let cpu = Cpu::new().expect("a CPU");
    quantized_appends::check_dense_cache(&mut |append| cpu.append(append));
}

/// The refusal of an append to pools of these formats.
fn refusal<K: Element + Default, V: Element + Default>(
    dim: usize,
    k_scales: Option<AppendScales>,
    v_scales: Option<AppendScales>,
) -> String {
    let rows = vec![0f32; 2 * dim];
    let mut keys = vec![K::default(); 2 * (dim / K::DTYPE.values())];
    let mut values = vec![V::default(); 2 * (dim / V::DTYPE.values())];
    let (lens, table) = ([2], [0]);
    let mut append = Append {
        key: Tensor::new(&rows, [2, 1, dim]).expect("key"),
        value: Tensor::new(&rows, [2, 1, dim]).expect("value"),
        key_pool: TensorMut::new(&mut keys, [1, 2, 1, dim / K::DTYPE.values()]).expect("keys"),
        value_pool: TensorMut::new(&mut values, [1, 2, 1, dim / V::DTYPE.values()])
            .expect("values"),
        k_scales,
        v_scales,
        block_table: Some(Tensor::new(&table, [1, 1]).expect("table")),
        kv_lens: Tensor::from(&lens),
        cu_seqlens: None,
        rotary: None,
    };
    Cpu::new().expect("a CPU").append(&mut append).expect_err("refused").to_string()
}

#[test]
fn bad_scales_are_named() {
    let one = |scale: &'static [f32; 1]| {
        Some(AppendScales::Static(Tensor::new(scale, [1, 1, 1]).expect("a scale")))
    };
    let starts = |error: String, words: &str| assert!(error.starts_with(words), "{error}");
    starts(refusal::<E4m3, f32>(32, None, None), "`k_scales` is missing; allowed: scales of e4m3");
    starts(
        refusal::<f32, BlockQ8_0>(32, None, one(&[1.0])),
        "`v_scales` is given; allowed: none for a pool of q8_0",
    );
    starts(
        refusal::<i8, f32>(32, one(&[f32::NAN]), None),
        "`k_scales[0, 0, 0]` is NaN; allowed: a finite number from 0 up",
    );
    starts(refusal::<i8, f32>(32, one(&[-1.0]), None), "`k_scales[0, 0, 0]` is -1");
    let flat = AppendScales::Static(Tensor::from(&[1f32]));
    starts(refusal::<i8, f32>(32, Some(flat), None), "`k_scales` is f32[1]; allowed: f32[1, 2, 1]");
    let mut few = [0f32; 1];
    let few = AppendScales::Dynamic(TensorMut::new(&mut few, [1, 1, 1]).expect("a scale"));
    starts(
        refusal::<i8, f32>(32, Some(few), None),
        "`k_scales` is f32[1, 1, 1]; allowed: f32[1, 2, 1] ([blocks, block_size, Hkv])",
    );
    starts(
        refusal::<Mla656, f32>(576, None, None),
        "`key_pool` is of type mla656 with values of their own; allowed: \
         mla656 in an append to a latent cache only",
    );
    starts(
        refusal::<f32, BlockQ8_0>(48, None, None),
        "`value_pool` is of q8_0 for a head dim of 48; allowed: \
         head dims that are a multiple of 32",
    );
}

/// Appends two rows to a latent cache of `mla656`.
fn append_rows(rows: &[f32], dim: usize, pool: &mut [Mla656]) -> Result<(), regard::Error> {
    let (lens, table) = ([3], [1, 0]);
    let slots = pool.len() / 2;
    Cpu::new()?.append_latent(&mut AppendLatent {
        key: Tensor::new(rows, [2, 1, dim])?,
        key_pool: TensorMut::new(pool, [2, slots, 1, 1])?,
        k_scales: None,
        block_table: Some(Tensor::new(&table, [1, 2])?),
        kv_lens: Tensor::from(&lens),
        cu_seqlens: None,
        rotary: None,
    })
}

#[test]
fn latent_rows_are_written_as_the_format_has_them() {
    let rows: Vec<f32> = (0..2 * 576).map(|i| (i as f32 * 0.37).sin() * 3.0).collect();
    let mut pool = [Mla656::default(); 4];
    append_rows(&rows, 576, &mut pool).expect("sound operands");
    let new = rows.as_chunks().0;
    // Positions 1 and 2: the second slot of page 1, and the first of page 0.
    let expected = [
        Mla656::from_f32(&new[1]),
        Mla656::default(),
        Mla656::default(),
        Mla656::from_f32(&new[0]),
    ];
    assert_eq!(pool, expected);
    let error = append_rows(&rows[..2 * 512], 512, &mut pool).expect_err("512 dims").to_string();
    let allowed = "allowed: head dims that are a multiple of 576";
    assert_eq!(error, format!("`key_pool` is of mla656 for a head dim of 512; {allowed}"));
}
