//! Views that do not fit their slice: the message says what they reach, and what there is.

mod expect;

use expect::expect;
use regard::{DType, Error, Tensor, TensorMut};

static F32: [f32; 1024] = [0.0; 1024];

fn floats<const N: usize>(shape: [usize; N]) -> Tensor<'static> {
    Tensor::from_slice(&F32[..shape.iter().product()], &shape, None).expect("inside the slice")
}

#[test]
fn views_outside_their_slice() {
    let error = |result: Result<Tensor, Error>| result.map(|_| ()).unwrap_err();
    let outside = "reaching elements 0..=63 of a slice of 63";
    expect(
        error(Tensor::with_strides(&F32[..63], [2, 4, 8], [32, 8, 1])),
        "strides",
        outside,
        "offsets 0..63",
    );
    expect(error(Tensor::with_strides(&F32[..9], [2, 2], [-8, 1])), "strides", "-8..=1", "offsets 0..9");
    expect(error(Tensor::new(&F32[..7], [2, 4])), "shape", "[2, 4] over a slice of 7", "exactly 8 elements");
    expect(error(Tensor::new(&F32[..1], [1; 6])), "shape", "[1, 1, 1, 1, 1, 1]", "at most 5 dimensions");
    expect(error(Tensor::new(&F32[..1], [usize::MAX, 3])), "shape", "[18446744073709551615, 3]", "2^60");
    expect(
        error(Tensor::with_strides(&F32, [3], [i64::MAX])),
        "strides",
        "9223372036854775807",
        "below 2^60",
    );
    expect(error(Tensor::with_strides(&F32, [usize::MAX], [i64::MIN])), "strides", "-9223372036854", "2^60");
    // Sums of reaches that overflow 128 bits: they must not come round to a small number.
    let wild = [usize::MAX, usize::MAX];
    expect(error(Tensor::with_strides(&F32, wild, [i64::MAX; 2])), "strides", "9223372036854", "2^60");
    expect(error(Tensor::with_strides(&F32, wild, [i64::MIN; 2])), "strides", "-9223372036854", "2^60");
    let wild = [i64::MAX as usize; 4];
    expect(error(Tensor::with_strides(&F32, wild, [i64::MAX; 4])), "strides", "9223372036854", "2^60");
    // SAFETY: refused before it is read.
    let unequal = unsafe { Tensor::from_raw(F32.as_ptr().cast(), DType::F32, &[2, 2], Some(&[1])) };
    expect(error(unequal), "strides", "[1] for a tensor of shape [2, 2]", "one stride a dimension");
    expect(
        error(floats([2, 3]).select(2, 0)),
        "index",
        "0 in dimension 2 of shape [2, 3]",
        "inside the shape",
    );
    expect(
        error(floats([2, 3]).select(0, 2)),
        "index",
        "2 in dimension 0 of shape [2, 3]",
        "inside the shape",
    );
    let mut memory = [0.0f32; 8];
    let outside = TensorMut::with_strides(&mut memory, [3, 3], [3, 1]).map(|_| ()).unwrap_err();
    expect(outside, "strides", "reaching elements 0..=8 of a slice of 8", "offsets 0..8");
}

#[test]
fn an_empty_view_with_wild_strides_is_harmless() {
    let empty = Tensor::with_strides(&F32[..0], [5, 0], [i64::MAX, i64::MIN]).expect("reaches nothing");
    assert_eq!(empty.select(0, 4).expect("inside the shape").shape(), [0]);
}

#[test]
#[should_panic(expected = "[0, 0, 1, 2] does not name each of 4 dimensions once")]
fn a_permutation_that_repeats_a_dimension() {
    let _ = floats([2, 3, 4, 8]).permute([0, 0, 1, 2]);
}
