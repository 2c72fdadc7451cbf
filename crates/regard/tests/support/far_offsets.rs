//! Operands with more than 2^31 elements between their rows.

use half::slice::HalfBitsSliceExt;
use regard::oracle::Judge;
use regard::{
    Attention, DType, Error, Inputs, Outputs, QueryOffset, Tensor, TensorMut, Window, bf16,
};

/// More than 2^31 elements without their memory: a zeroed allocation is mapped when it is touched.
fn lazily_mapped() -> Vec<u16> {
    vec![0u16; (1 << 31) + (1 << 20)]
}

fn write(buffer: &mut [u16], at: usize, dim: usize, seed: usize) {
    for (d, x) in buffer[at..at + dim].iter_mut().enumerate() {
        let number = ((seed * 37 + d * 11) % 29) as f32 / 14.0 - 1.0;
        *x = bf16::from_f32(number).to_bits();
    }
}

/// Runs problems whose elements are far apart `runs` times each, and judges each run. One buffer
/// holds queries, keys and values.
pub fn check(
    batch_invariant: bool,
    runs: usize,
    run: &mut dyn FnMut(usize, &Inputs, &mut Outputs) -> Result<(), Error>,
) {
    const DIM: usize = 8;
    let mut buffer = lazily_mapped();
    let far = 1usize << 31;
    // Strides that put the last of 3 things past 2^31.
    let stride = far / 2;
    let (k_at, v_at) = (16, 32);
    for thing in 0..3 {
        write(&mut buffer, thing * stride, DIM, thing);
        write(&mut buffer, thing * stride + k_at, DIM, 100 + thing);
        write(&mut buffer, thing * stride + v_at, DIM, 200 + thing);
    }
    let mut results = lazily_mapped();
    let table = [2i32, 0, 1];
    let lens = [3i32];
    let data: &[bf16] = buffer.reinterpret_cast();
    // The far dimension in turn: tokens, heads, sequences, or blocks.
    let whole = Attention { batch_invariant, ..Attention::default() };
    let mut check_far = |name: &str, inputs: &Inputs, place| {
        for number in 0..runs {
            check_run(name, inputs, place, &mut results, &mut |inputs, outputs| {
                run(number, inputs, outputs)
            });
        }
    };
    let strided =
        |at: usize, shape, strides| Tensor::with_strides(&data[at..], shape, strides).unwrap();
    let s = stride as i64;
    let tokens_apart = Place { shape: [1, 3, 1, DIM], strides: [1, s, 1, 1] };
    let problems = [
        ("tokens", [1, 3, 1, DIM], [1, s, 1, 1], whole),
        ("heads", [1, 1, 3, DIM], [1, 1, s, 1], whole),
        ("sequences", [3, 1, 1, DIM], [s, 1, 1, 1], whole),
    ];
    for (name, shape, strides, attention) in problems {
        let view = |at| strided(at, shape, strides);
        let inputs = Inputs::new(view(0), view(k_at), view(v_at), attention);
        check_far(name, &inputs, Place { shape, strides });
    }
    let shape = [3, 1, 1, DIM];
    let attention = Attention {
        block_table: Some(Tensor::new(&table, [1, 3]).unwrap()),
        kv_lens: Some(Tensor::from(&lens)),
        batch_invariant,
        ..Attention::causal()
    };
    let pool = |at| strided(at, shape, [s, 1, 1, 1]);
    let q = strided(0, [1, 3, 1, DIM], [1, s, 1, 1]);
    let inputs = Inputs::new(q, pool(k_at), pool(v_at), attention);
    check_far("blocks", &inputs, tokens_apart);

    // A mask whose rows are far apart: every row hides another key.
    let hide = |buffer: &mut [u16], row: usize| {
        buffer[row * stride + 64 + row] = bf16::NEG_INFINITY.to_bits();
    };
    (0..3).for_each(|row| hide(&mut buffer, row));
    let data: &[bf16] = buffer.reinterpret_cast();
    let view =
        |at: usize, shape, strides| Tensor::with_strides(&data[at..], shape, strides).unwrap();
    let tokens = |at| view(at, [1, 3, 1, DIM], [1, s, 1, 1]);
    let attention = Attention {
        mask: Some(view(64, [1, 1, 3, 3], [1, 1, s, 1])),
        q_offset: QueryOffset::Same(0),
        window: Window { left: Some(5), right: None },
        batch_invariant,
        ..Attention::default()
    };
    let inputs = Inputs::new(tokens(0), tokens(k_at), tokens(v_at), attention);
    check_far("mask rows", &inputs, tokens_apart);
}

/// The place of the output in its buffer.
#[derive(Clone, Copy)]
struct Place {
    shape: [usize; 4],
    strides: [i64; 4],
}

fn check_run(
    name: &str,
    inputs: &Inputs,
    Place { shape, strides }: Place,
    results: &mut [u16],
    run: &mut dyn FnMut(&Inputs, &mut Outputs) -> Result<(), Error>,
) {
    let judge = Judge::new(inputs, DType::BF16).unwrap();
    let memory = results.reinterpret_cast_mut::<bf16>();
    let out = TensorMut::with_strides(memory, shape, strides).unwrap();
    run(inputs, &mut Outputs { out, lse: None }).unwrap_or_else(|error| panic!("{name}: {error}"));
    let found = Tensor::with_strides(results.reinterpret_cast::<bf16>(), shape, strides).unwrap();
    judge.check(&found, None).unwrap_or_else(|mismatch| panic!("{name}: {mismatch}"));
}
