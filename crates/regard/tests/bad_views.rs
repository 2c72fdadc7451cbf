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

/// Whether reading the element at `index` panics, with the message that says so.
fn panics_at(tensor: Tensor, index: &[usize]) {
    let result = std::panic::catch_unwind(|| tensor.at(index));
    let payload = result.map(|value| panic!("{index:?} of {tensor:?} is {value}")).unwrap_err();
    let message = payload.downcast_ref::<String>().expect("a message");
    assert!(message.starts_with("index ["), "{message}");
}

#[test]
fn an_index_outside_the_shape_never_wraps_around() {
    // The element before the view is readable memory: only the check keeps `at` from returning it.
    let row = Tensor::new(&F32[1..5], [1, 4]).expect("inside the slice");
    for index in [[0, 4], [0, usize::MAX], [0, usize::MAX - 3], [1, 0], [usize::MAX, 0]] {
        panics_at(row, &index);
    }
    panics_at(row, &[0]);
    panics_at(row, &[0, 0, 0]);
    panics_at(row, &[]);
    panics_at(Tensor::from(&F32), &[]);
    let number = Tensor::new(&F32[..1], []).expect("a tensor without dimensions has one element");
    assert_eq!(number.at(&[]), 0.0);
    panics_at(number, &[0]);
    panics_at(floats([3, 0]), &[0, 0]);
}

#[test]
fn reaches_of_several_dimensions_whose_sum_wraps_128_bits() {
    // 2 * -(2^127 - 2^64) is 2^65 modulo 2^128, which a check of the sum alone would take for a reach forwards.
    let (most, least) = (usize::MAX, i64::MIN);
    for dims in 2..=5 {
        // SAFETY: refused before it is read.
        let view = unsafe {
            Tensor::from_raw(F32.as_ptr().cast(), DType::F32, &vec![most; dims], Some(&vec![least; dims]))
        };
        expect(view.map(|_| ()).unwrap_err(), "strides", "-9223372036854775808", "below 2^60");
        let view = Tensor::from_slice(&F32, &vec![most; dims], Some(&vec![i64::MAX; dims]));
        expect(view.map(|_| ()).unwrap_err(), "strides", "9223372036854775807", "below 2^60");
    }
}
