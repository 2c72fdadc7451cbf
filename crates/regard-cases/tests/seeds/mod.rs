//! Small sound cases that together use every tensor and every key of the format. Hostile files are
//! made from them, here and by the fuzz target.

use regard::{QueryOffset, Window};
use regard_cases::{Array, Case, Data, KvLayout, Layout};

/// Numbers between -1 and 1, all representable in every type.
fn floats(dtype: regard::DType, shape: &[usize]) -> Array {
    let length: usize = shape.iter().product();
    let numbers = (0..length).map(|i| ((i * 7) % 17) as f64 * 0.125 - 1.0);
    Array::new(Data::from_numbers(dtype, numbers), shape).expect("as many numbers as the shape has")
}

fn ints(numbers: &[i32], shape: &[usize]) -> Array {
    Array::new(numbers.to_vec(), shape).expect("as many numbers as the shape has")
}

fn case(name: &str, dtype: regard::DType, shapes: [&[usize]; 3]) -> Case {
    let [q, k, v] = shapes.map(|shape| floats(dtype, shape));
    Case::new(name, q, k, v)
}

/// The cases.
pub fn cases() -> Vec<Case> {
    use regard::DType::{BF16, Bool, F16, F32};

    let mut dense = case("dense", F32, [&[1, 2, 2, 4], &[1, 3, 1, 4], &[1, 3, 1, 4]]);
    dense.attention.causal = true;
    dense.expected_out = Some(floats(F32, &[1, 2, 2, 4]));
    dense.expected_lse = Some(floats(F32, &[1, 2, 2]));

    let mut heads_first = case("heads-first", BF16, [&[2, 2, 2, 3], &[2, 2, 4, 3], &[2, 2, 4, 5]]);
    heads_first.layout = Layout::Bhsd;
    heads_first.attention.scale = Some(0.3);
    heads_first.attention.softcap = Some(20.5);
    heads_first.attention.q_offset = QueryOffset::PerSequence(ints(&[-1, 2], &[2]));
    heads_first.attention.kv_lens = Some(ints(&[0, 3], &[2]));
    heads_first.attention.alibi_slopes = Some(floats(F32, &[2]));
    heads_first.attention.sinks = Some(floats(F32, &[2]));
    heads_first.attention.mask = Some(floats(F32, &[1, 2, 2, 4]));

    let mut ragged = case("ragged", F16, [&[3, 2, 2], &[5, 1, 2], &[5, 1, 2]]);
    ragged.attention.cu_seqlens_q = Some(ints(&[0, 1, 1, 3], &[4]));
    ragged.attention.cu_seqlens_k = Some(ints(&[0, 2, 2, 5], &[4]));
    ragged.attention.q_offset = QueryOffset::Same(1);
    ragged.attention.window = Window { left: Some(2), right: Some(0) };

    let mut pages = case("pages", F32, [&[2, 1, 2, 2], &[4, 2, 1, 2], &[4, 2, 1, 2]]);
    pages.attention.causal = true;
    pages.attention.kv_lens = Some(ints(&[3, 4], &[2]));
    pages.attention.block_table = Some(ints(&[3, 1, 0, 2], &[2, 2]));
    pages.attention.window = Window { left: Some(1), right: None };

    let mut tree = case("tree", F16, [&[1, 3, 2, 2], &[3, 1, 2, 2], &[3, 1, 2, 2]]);
    tree.kv_layout = KvLayout::Hnd;
    tree.attention.kv_lens = Some(ints(&[5], &[1]));
    tree.attention.block_table = Some(ints(&[2, 0, 1], &[1, 3]));
    tree.attention.tree_mask = Some(ints(&[1, 3, 5], &[1, 3, 1]));

    let mut boolean = case("boolean", BF16, [&[1, 2, 1, 2], &[1, 3, 1, 2], &[1, 3, 1, 2]]);
    boolean.attention.mask = Some(
        Array::new(Data::from_numbers(Bool, [1.0, 0.0, 1.0].into_iter()), &[1, 3]).expect("fits"),
    );

    let empty = case("empty", F32, [&[0, 1, 1, 2], &[0, 3, 1, 2], &[0, 3, 1, 2]]);

    vec![dense, heads_first, ragged, pages, tree, boolean, empty]
}
