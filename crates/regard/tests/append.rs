//! Appending to a paged cache on the CPU, against a few lines of f64.

#[path = "support/appends.rs"]
mod appends;
mod numbers;

use appends::{BLOCKS, trials};
use regard::cpu::{Cpu, Inline};
use regard::paged::{PageAllocator, Step};
use regard::{Append, DType, Rotary, Tensor, TensorMut, bf16, f16};

#[test]
fn new_tokens_land_in_their_slots_rotated_as_asked() {
    let cpu = Cpu::new().expect("a CPU");
    let inline = cpu.clone().with_executor(Inline);
    for trial in trials() {
        trial.check::<f32>(&mut |append| cpu.append(append));
        trial.check::<f16>(&mut |append| cpu.append(append));
        trial.check::<bf16>(&mut |append| cpu.append(append));
        trial.check::<bf16>(&mut |append| inline.append(append));
    }
}

/// The tables of a step lead to the slots that the step names.
#[test]
fn a_step_is_appended_where_it_says() {
    let mut pages = PageAllocator::new(BLOCKS, 4).expect("sound sizes");
    let (a, b) = (pages.create(), pages.create());
    let mut step = Step::new();
    step.append(&mut pages, a, 6).expect("room");
    step.finish(&pages).expect("alive");
    step.clear();
    step.append(&mut pages, a, 3).expect("room");
    step.append(&mut pages, b, 9).expect("room");
    step.finish(&pages).expect("alive");
    let rows: Vec<f32> = (1..=12).map(|x| x as f32).collect();
    let (mut keys, mut values) = ([0f32; 4 * BLOCKS], [0f32; 4 * BLOCKS]);
    let tables = step.tables();
    let mut append = Append {
        key: Tensor::new(&rows, [12, 1, 1]).expect("key"),
        value: Tensor::new(&rows, [12, 1, 1]).expect("value"),
        key_pool: TensorMut::new(&mut keys, [BLOCKS, 4, 1, 1]).expect("keys"),
        value_pool: TensorMut::new(&mut values, [BLOCKS, 4, 1, 1]).expect("values"),
        k_scales: None,
        v_scales: None,
        block_table: Some(tables.block_table),
        kv_lens: tables.kv_lens,
        cu_seqlens: Some(tables.cu_seqlens_q),
        rotary: None,
    };
    Cpu::new().expect("a CPU").append(&mut append).expect("sound operands");
    let mut expected = [0f32; 4 * BLOCKS];
    for (&slot, &row) in step.slots().iter().zip(&rows) {
        expected[slot as usize] = row;
    }
    assert_eq!((keys, values), (expected, expected));
}

/// The error that refuses a sound append of four tokens of two sequences, changed by `change`.
fn refusal(change: impl for<'a> FnOnce(&mut Append<'a>, &'a [f32], &'a [i32])) -> String {
    let (floats, ints) = (vec![0f32; 1024], vec![0i32; 64]);
    let (mut keys, mut values, mut query) = ([1f32; 256], [1f32; 256], [1f32; 64]);
    let view = |shape: &[usize]| {
        Tensor::from_slice(&floats[..shape.iter().product()], shape, None).expect("a view")
    };
    let mut append = Append {
        key: view(&[4, 2, 4]),
        value: view(&[4, 2, 4]),
        key_pool: TensorMut::new(&mut keys, [8, 4, 2, 4]).expect("keys"),
        value_pool: TensorMut::new(&mut values, [8, 4, 2, 4]).expect("values"),
        k_scales: None,
        v_scales: None,
        block_table: Some(Tensor::new(&ints[..6], [2, 3]).expect("table")),
        kv_lens: Tensor::from(&ints[..2]),
        cu_seqlens: Some(Tensor::from(&ints[..3])),
        rotary: Some(Rotary {
            table: view(&[5, 4]),
            interleaved: false,
            query: Some(TensorMut::new(&mut query, [4, 4, 4]).expect("query")),
        }),
    };
    change(&mut append, &floats, &ints);
    let error = Cpu::new().expect("a CPU").append(&mut append).expect_err("refused").to_string();
    assert!(keys.iter().chain(&values).chain(&query).all(|&x| x == 1.0), "nothing is written");
    error
}

#[test]
fn bad_input_is_named() {
    let starts = |error: String, words: &str| assert!(error.starts_with(words), "{error}");
    starts(
        refusal(|append, _, ints| append.key = Tensor::new(&ints[..32], [4, 2, 4]).expect("i32")),
        "`key` is of type i32; allowed: f32, f16 or bf16",
    );
    starts(
        refusal(|append, floats, _| {
            append.key = Tensor::new(&floats[..32], [8, 4]).expect("a view");
        }),
        "`key` is of shape [8, 4]; allowed: [total, Hkv, Dk]",
    );
    starts(
        refusal(|append, floats, _| {
            append.value = Tensor::new(&floats[..48], [4, 3, 4]).expect("a view");
        }),
        "`value` is f32[4, 3, 4]; allowed: f32[4, 2, 4]",
    );
    starts(
        refusal(|append, _, ints| append.kv_lens = Tensor::from(&ints[..3])),
        "`kv_lens` is i32[3] with strides [1]; allowed: i32[2] with an innermost stride of 1",
    );
    starts(
        refusal(|append, _, ints| append.cu_seqlens = Some(Tensor::from(&ints[..2]))),
        "`cu_seqlens` is i32[2]",
    );
    starts(
        refusal(|append, _, ints| {
            append.cu_seqlens = None;
            append.kv_lens = Tensor::from(&ints[..3]);
            append.block_table = Some(Tensor::new(&ints[..3], [3, 1]).expect("a view"));
        }),
        "`cu_seqlens` is missing with 4 tokens of 3 sequences; allowed: [B + 1] i32",
    );
    starts(
        refusal(|append, floats, _| {
            let rotary = append.rotary.as_mut().expect("given");
            rotary.table = Tensor::new(&floats[..30], [5, 6]).expect("a view");
        }),
        "`rotary table` is of 6 dims; allowed: an even number up to 4",
    );
    starts(
        refusal(|append, _, _| {
            let rotary = append.rotary.as_mut().expect("given");
            rotary.query = rotary.query.take().map(|query| query.permute([1, 0, 2]));
            append.key_pool = TensorMut::new::<f32, 4>(&mut [], [0, 4, 2, 4]).expect("empty");
        }),
        "`value_pool` is f32[8, 4, 2, 4]; allowed: f32[0, 4, 2, 4]",
    );
}

#[test]
fn nothing_is_appended_of_nothing() {
    let mut append: Append = Append {
        key: Tensor::new::<f32, 3>(&[], [0, 2, 4]).expect("empty"),
        value: Tensor::new::<f32, 3>(&[], [0, 2, 4]).expect("empty"),
        key_pool: TensorMut::new::<f32, 4>(&mut [], [0, 4, 2, 4]).expect("empty"),
        value_pool: TensorMut::new::<f32, 4>(&mut [], [0, 4, 2, 4]).expect("empty"),
        k_scales: None,
        v_scales: None,
        block_table: Some(Tensor::new::<i32, 2>(&[], [0, 0]).expect("empty")),
        kv_lens: Tensor::new::<i32, 1>(&[], [0]).expect("empty"),
        cu_seqlens: None,
        rotary: None,
    };
    assert_eq!(append.key.dtype(), DType::F32);
    Cpu::new().expect("a CPU").append(&mut append).expect("nothing to do");
}
