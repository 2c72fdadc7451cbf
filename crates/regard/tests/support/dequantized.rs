//! Caches of codes and blocks as numbers.

use regard::DType;
use regard_cases::{Array, Case, Data};

/// The case over a copy of its cache with every value written out in that type.
pub fn dequantized(case: &Case, dtype: DType) -> Case {
    let mut copy = case.clone();
    let inputs = case.inputs().unwrap();
    let attention = &case.attention;
    for (to, codes, scales, dim) in [
        (&mut copy.k, &inputs.k, &attention.k_scales, inputs.q.shape()[3]),
        (&mut copy.v, &inputs.v, &attention.v_scales, case.value_dim()),
    ] {
        let scales = scales.as_ref().map(|scales| scales.view().unwrap());
        let [batch, keys, heads] = *codes.shape().first_chunk().unwrap();
        let mut numbers = Vec::new();
        for b in 0..batch {
            for key in 0..keys {
                for head in 0..heads {
                    let scale = scales.as_ref().map_or(1.0, |scales| {
                        let at =
                            |i: usize, dim: usize| if scales.shape()[dim] == 1 { 0 } else { i };
                        scales.at(&[at(b, 0), at(key, 1), at(head, 2)])
                    });
                    let mut row = vec![0.0; dim];
                    codes.read_row(&[b, key, head], &mut row);
                    numbers.extend(row.into_iter().map(|code| code * scale));
                }
            }
        }
        let data = Data::from_numbers(dtype, numbers.into_iter());
        *to = Array::new(data, &[batch, keys, heads, dim]).unwrap();
    }
    (copy.attention.k_scales, copy.attention.v_scales) = (None, None);
    copy
}
