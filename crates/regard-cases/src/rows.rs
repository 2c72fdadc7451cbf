//! Results as bits, to be compared with others.

use crate::{Array, Case, Output, Spec};
use std::collections::BTreeMap;

/// The bits of every row of a result (its output, then its log-sum-exp), by sequence, position and
/// head.
pub type Rows = BTreeMap<(u64, i64, usize), Vec<u32>>;

/// The rows of a result of `spec`'s case.
///
/// # Panics
/// If the result is not of that case.
pub fn rows(spec: &Spec, case: &Case, output: &Output) -> Rows {
    let out = case.query_order(output.out.view().expect("an array"));
    let lse = case.query_order(output.lse.view().expect("an array"));
    let (mut rows, mut token) = (Rows::new(), 0);
    for (index, sequence) in spec.sequences.iter().enumerate() {
        for row in 0..sequence.q_len {
            for head in 0..spec.query_heads {
                let place =
                    if spec.ragged_queries { vec![token, head] } else { vec![index, row, head] };
                let mut numbers = vec![0.0; spec.value_dim];
                out.read_row(&place, &mut numbers);
                numbers.push(lse.at(&place));
                let bits = numbers.iter().map(|&x| (x as f32).to_bits()).collect();
                rows.insert((sequence.id, spec.first_position(index) + row as i64, head), bits);
            }
            token += 1;
        }
    }
    rows
}

/// The first row of `some` that is not in `all` with the same bits, in words.
pub fn difference(some: &Rows, all: &Rows) -> Option<String> {
    some.iter().find(|(row, bits)| all.get(row) != Some(bits)).map(|(row, bits)| {
        format!("sequence, position, head {row:?}: {bits:x?} is not {:x?}", all.get(row))
    })
}

/// The bits of a whole result: output and log-sum-exp.
///
/// # Panics
/// If its arrays are broken.
pub fn bits(output: &Output) -> (Vec<u64>, Vec<u64>) {
    let bits =
        |array: &Array| array.numbers().expect("an array").iter().map(|x| x.to_bits()).collect();
    (bits(&output.out), bits(&output.lse))
}
