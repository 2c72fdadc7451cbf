//! The error that a storage format of keys and values adds to attention: the exact result over
//! the stored numbers against the exact result over the numbers of the case, both in f64.
//!
//! ```text
//! cargo run --release -p regard-cases --example cache_accuracy -- testdata/*.safetensors
//! ```

use regard::oracle::{all_rows, attention_rows};
use regard::quantize::{dynamic_scale, quantize_blocks, quantize_row};
use regard::{DType, Error};
use regard_cases::{Array, Case, Data, Granularity, Layout, file};

/// One line of the table.
struct Storage {
    dtype: DType,
    granularity: Granularity,
}

const STORAGES: [Storage; 13] = [
    Storage { dtype: DType::F16, granularity: Granularity::Token },
    Storage { dtype: DType::BF16, granularity: Granularity::Token },
    Storage { dtype: DType::I8, granularity: Granularity::Token },
    Storage { dtype: DType::I8, granularity: Granularity::Head },
    Storage { dtype: DType::I8, granularity: Granularity::Tensor },
    Storage { dtype: DType::E4M3, granularity: Granularity::Token },
    Storage { dtype: DType::E4M3, granularity: Granularity::Head },
    Storage { dtype: DType::E4M3, granularity: Granularity::Tensor },
    Storage { dtype: DType::E5M2, granularity: Granularity::Token },
    Storage { dtype: DType::E5M2, granularity: Granularity::Head },
    Storage { dtype: DType::E5M2, granularity: Granularity::Tensor },
    Storage { dtype: DType::Q8_0, granularity: Granularity::Token },
    Storage { dtype: DType::Q4_0, granularity: Granularity::Token },
];

/// One row in this many is computed: an odd number, so that all heads take part.
const ROW_STEP: usize = 17;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut cases = Vec::new();
    for path in std::env::args().skip(1) {
        let name = std::path::Path::new(&path).file_stem().unwrap_or_default().to_string_lossy();
        cases.push(file::from_bytes(&name, &std::fs::read(&path)?)?);
    }
    if cases.is_empty() {
        return Err("no case files: give dense ones in f32, f16 or bf16".into());
    }
    println!("| storage | scale per | bits per value | {} |", names(&cases).join(" | "));
    println!("|---|---|--:|{}", "--:|".repeat(cases.len()));
    for storage in &STORAGES {
        let mut cells = Vec::new();
        for case in &cases {
            cells.push(format!("{:.2e}", relative_error(case, storage)?));
        }
        let scale = match (storage.dtype.is_code(), storage.granularity) {
            (false, _) => "-",
            (true, Granularity::Tensor) => "tensor",
            (true, Granularity::Head) => "head",
            (true, _) => "token and head",
        };
        let bits = bits_per_value(storage, cases[0].value_dim());
        println!("| {} | {scale} | {bits:.2} | {} |", storage.dtype, cells.join(" | "));
    }
    Ok(())
}

fn names(cases: &[Case]) -> Vec<&str> {
    cases.iter().map(|case| case.name.as_str()).collect()
}

/// Scales included, where there are many.
fn bits_per_value(storage: &Storage, dim: usize) -> f64 {
    let Storage { dtype, granularity } = storage;
    let own = (8 * dtype.size()) as f64 / dtype.values() as f64;
    match (dtype.is_code(), granularity) {
        (true, Granularity::Token) => own + 32.0 / dim as f64,
        _ => own,
    }
}

/// The root mean square of the difference, relative to the root mean square of the output.
fn relative_error(case: &Case, storage: &Storage) -> Result<f64, Error> {
    let (k, k_scales) = stored(&case.k, case.layout, storage)?;
    let (v, v_scales) = stored(&case.v, case.layout, storage)?;
    let mut other = Case { k, v, ..case.clone() };
    other.attention.k_scales = k_scales;
    other.attention.v_scales = v_scales;
    let (exact, found) = (case.inputs()?, other.inputs()?);
    let rows: Vec<_> = all_rows(&exact)?.into_iter().step_by(ROW_STEP).collect();
    let (exact, found) = (attention_rows(&exact, &rows)?.out, attention_rows(&found, &rows)?.out);
    let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|x| x * x).sum::<f64>();
    let error = squares(&mut exact.iter().zip(&found).map(|(x, y)| x - y));
    Ok((error / squares(&mut exact.iter().copied())).sqrt())
}

/// Keys or values in that storage, with their scales.
fn stored(
    floats: &Array,
    layout: Layout,
    storage: &Storage,
) -> Result<(Array, Option<Array>), Error> {
    let &Storage { dtype, granularity } = storage;
    let &[batch, first, second, dim] = floats.shape() else {
        let found = format!("of shape {:?}", floats.shape());
        return Err(Error::argument("k or v", found, "dense: four dimensions"));
    };
    let numbers: Vec<f32> = floats.numbers()?.into_iter().map(|x| x as f32).collect();
    let mut shape = vec![batch, first, second, dim / dtype.values()];
    if dtype.is_float() {
        let data = Data::from_numbers(dtype, numbers.into_iter().map(f64::from));
        return Ok((Array::new(data, &shape)?, None));
    }
    let mut bytes = vec![0; numbers.len() / dtype.values() * dtype.size()];
    let row_bytes = dim / dtype.values() * dtype.size();
    let rows = || numbers.chunks_exact(dim);
    if dtype.is_block() {
        for (row, bytes) in rows().zip(bytes.chunks_exact_mut(row_bytes)) {
            quantize_blocks(row, dtype, bytes);
        }
        return Ok((Array::new(Data::from_le_bytes(dtype, &bytes), &shape)?, None));
    }
    // The number of a row's scale.
    let (heads, head_of): (usize, Box<dyn Fn(usize) -> usize>) = match layout {
        Layout::Bshd => (second, Box::new(move |row| row % second)),
        _ => (first, Box::new(move |row| row / second % first)),
    };
    let (count, scale_of): (usize, Box<dyn Fn(usize) -> usize>) = match granularity {
        Granularity::Tensor => (1, Box::new(|_| 0)),
        Granularity::Head => (heads, head_of),
        _ => (batch * first * second, Box::new(|row| row)),
    };
    let mut scales = vec![0f32; count];
    for (index, row) in rows().enumerate() {
        let scale = &mut scales[scale_of(index)];
        *scale = scale.max(dynamic_scale(row, dtype));
    }
    for ((index, row), bytes) in rows().enumerate().zip(bytes.chunks_exact_mut(row_bytes)) {
        quantize_row(row, dtype, scales[scale_of(index)], bytes);
    }
    let codes = Array::new(Data::from_le_bytes(dtype, &bytes), &shape)?;
    shape.pop();
    match (granularity, layout) {
        (Granularity::Tensor, _) => shape.fill(1),
        (Granularity::Head, Layout::Bshd) => shape = vec![1, 1, heads],
        (Granularity::Head, _) => shape = vec![1, heads, 1],
        _ => {}
    }
    Ok((codes, Some(Array::new(scales, &shape)?)))
}
