//! Tiles that a mask hides are left out on the CPU: neither their keys nor their values are read.

mod support;

use half::{bf16, f16};
use regard::{Attention, Element, Inputs, Machine, Outputs, Tensor, TensorMut};
use std::ops::Range;

const HEADS: usize = 4;
const DIM: usize = 64;
const KEYS: usize = 900;
/// Three tiles of 256 keys, of which the mask hides the second.
const HIDDEN: Range<usize> = 256..512;

fn floats(count: usize, seed: usize) -> Vec<f32> {
    (0..count).map(|i| ((i * 37 + seed * 101) % 203) as f32 / 100.0 - 1.0).collect()
}

/// Outputs do not depend on the contents of hidden keys and values. `kept` and `hidden` are
/// elements of the mask.
fn check<T: Element + Copy>(kept: T, hidden: T, rows: usize, machine: &Machine) {
    let element = |i: usize| if HIDDEN.contains(&(i % KEYS)) { hidden } else { kept };
    let mask: Vec<T> = (0..rows * KEYS).map(element).collect();
    let mask = Tensor::new(&mask, [1, 1, rows, KEYS]).unwrap();
    let queries = floats(rows * HEADS * DIM, 1);
    let run = |poison: f32| {
        let [mut keys, mut values] = [2, 3].map(|seed| floats(KEYS * DIM, seed));
        for operand in [&mut keys, &mut values] {
            operand[HIDDEN.start * DIM..HIDDEN.end * DIM].fill(poison);
        }
        let inputs = Inputs::new(
            Tensor::new(&queries, [1, rows, HEADS, DIM]).unwrap(),
            Tensor::new(&keys, [1, KEYS, 1, DIM]).unwrap(),
            Tensor::new(&values, [1, KEYS, 1, DIM]).unwrap(),
            Attention { mask: Some(mask), ..Attention::default() },
        );
        let mut out = vec![7.0f32; rows * HEADS * DIM];
        let view = TensorMut::new(&mut out, [1, rows, HEADS, DIM]).unwrap();
        support::on(machine)(&inputs, &mut Outputs { out: view, lse: None }).unwrap();
        out
    };
    let (expected, found) = (run(0.5), run(f32::NAN));
    assert!(expected.iter().all(|x| x.is_finite()));
    assert_eq!(found, expected, "{machine}, a mask of {}, {rows} rows", mask.dtype());
}

#[test]
fn tiles_that_a_mask_hides_are_not_read() {
    for machine in support::machines() {
        for rows in [1, 3, 15, 70] {
            check(true, false, rows, &machine);
            check(0.0, f32::NEG_INFINITY, rows, &machine);
            check(f16::ZERO, f16::NEG_INFINITY, rows, &machine);
            check(bf16::ZERO, bf16::NEG_INFINITY, rows, &machine);
        }
    }
}
