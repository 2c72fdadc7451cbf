//! Views that do not fit their slice: the message has the elements that they reach, and the
//! elements that there are.

mod expect;

use expect::expect;
use regard::metal::BufferView;
use regard::{
    Attention, DType, Error, Inputs, Machine, Outputs, Plan, Problem, Tensor, TensorMut, attention,
};
use std::time::{Duration, Instant};

static F32: [f32; 1024] = [0.0; 1024];

fn floats<const N: usize>(shape: [usize; N]) -> Tensor<'static> {
    Tensor::from_slice(&F32[..shape.iter().product()], &shape, None).expect("inside the slice")
}

fn error(result: Result<Tensor, Error>) -> Error {
    result.map(|_| ()).unwrap_err()
}

#[test]
fn views_outside_their_slice() {
    let outside = "reaching elements 0..=63 of a slice of 63";
    expect(
        error(Tensor::with_strides(&F32[..63], [2, 4, 8], [32, 8, 1])),
        "strides",
        outside,
        "offsets 0..63",
    );
    expect(
        error(Tensor::with_strides(&F32[..9], [2, 2], [-8, 1])),
        "strides",
        "-8..=1",
        "offsets 0..9",
    );
    expect(
        error(Tensor::new(&F32[..7], [2, 4])),
        "shape",
        "[2, 4] over a slice of 7",
        "exactly 8 elements",
    );
    expect(
        error(Tensor::new(&F32[..1], [1; 6])),
        "shape",
        "[1, 1, 1, 1, 1, 1]",
        "at most 5 dimensions",
    );
    expect(
        error(Tensor::new(&F32[..1], [usize::MAX, 3])),
        "shape",
        "[18446744073709551615, 3]",
        "2^60",
    );
    expect(
        error(Tensor::with_strides(&F32, [3], [i64::MAX])),
        "strides",
        "9223372036854775807",
        "below 2^60",
    );
    expect(
        error(Tensor::with_strides(&F32, [usize::MAX], [i64::MIN])),
        "strides",
        "-9223372036854",
        "2^60",
    );
    // SAFETY: refused before it is read.
    let unequal = unsafe { Tensor::from_raw(F32.as_ptr().cast(), DType::F32, &[2, 2], Some(&[1])) };
    expect(error(unequal), "strides", "[1] for a tensor of shape [2, 2]", "one stride a dimension");
    let mut memory = [0.0f32; 8];
    let outside = TensorMut::with_strides(&mut memory, [3, 3], [3, 1]).map(|_| ()).unwrap_err();
    expect(outside, "strides", "reaching elements 0..=8 of a slice of 8", "offsets 0..8");
}

/// Sums of reaches that overflow 128 bits do not come round to a small number.
#[test]
fn views_whose_reach_overflows() {
    let wild = [usize::MAX, usize::MAX];
    expect(
        error(Tensor::with_strides(&F32, wild, [i64::MAX; 2])),
        "strides",
        "9223372036854",
        "2^60",
    );
    expect(
        error(Tensor::with_strides(&F32, wild, [i64::MIN; 2])),
        "strides",
        "-9223372036854",
        "2^60",
    );
    let wild = [i64::MAX as usize; 4];
    expect(
        error(Tensor::with_strides(&F32, wild, [i64::MAX; 4])),
        "strides",
        "9223372036854",
        "2^60",
    );
}

#[test]
fn selections_outside_their_shape() {
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
}

#[test]
fn an_empty_view_with_wild_strides_is_harmless() {
    let empty =
        Tensor::with_strides(&F32[..0], [5, 0], [i64::MAX, i64::MIN]).expect("reaches nothing");
    assert_eq!(empty.select(0, 4).expect("inside the shape").shape(), [0]);
}

#[test]
#[should_panic(expected = "[0, 0, 1, 2] does not name each of 4 dimensions once")]
fn a_permutation_that_repeats_a_dimension() {
    let _ = floats([2, 3, 4, 8]).permute([0, 0, 1, 2]);
}

/// Checks that reading the element at `index` panics, with a message about the index.
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
    // 2 * -(2^127 - 2^64) is 2^65 modulo 2^128, which a check of the sum alone would take for a
    // reach forwards.
    let (max, min) = (usize::MAX, i64::MIN);
    for dims in 2..=5 {
        // SAFETY: refused before it is read.
        let view = unsafe {
            Tensor::from_raw(
                F32.as_ptr().cast(),
                DType::F32,
                &vec![max; dims],
                Some(&vec![min; dims]),
            )
        };
        expect(view.map(|_| ()).unwrap_err(), "strides", "-9223372036854775808", "below 2^60");
        let view = Tensor::from_slice(&F32, &vec![max; dims], Some(&vec![i64::MAX; dims]));
        expect(view.map(|_| ()).unwrap_err(), "strides", "9223372036854775807", "below 2^60");
    }
}

/// Strides of dimensions of 1, and of views without elements, can be anything. (Debug builds check
/// the arithmetic.)
#[test]
fn strides_that_nothing_is_multiplied_by() {
    let wild = [i64::MAX, i64::MIN, i64::MAX - 7];
    // One sequence, one token, one head; the last dimension of 8 has to be contiguous.
    let one = |shape: [usize; 4], tame: [i64; 4]| {
        wild.map(|stride| {
            let strides = std::array::from_fn(|i| if shape[i] <= 1 { stride } else { tame[i] });
            Tensor::with_strides(&F32, shape, strides).expect("inside the slice")
        })
    };
    let out = |q, k, v| attention::<f32>(q, k, v, &Attention::default());
    for keys in [1, 0, 3, 40] {
        let q = one([1, 1, 1, 8], [0, 0, 0, 1]);
        let k = one([1, keys, 1, 8], [0, 8, 0, 1]);
        for (q, k) in q.into_iter().zip(k) {
            assert_eq!(out(q, k, k).expect("sound"), [0.0; 8], "{keys} keys");
        }
    }
    // Several sequences and heads that have nothing.
    for stride in wild {
        let nothing =
            |shape| Tensor::with_strides(&F32[..0], shape, [stride; 4]).expect("reaches nothing");
        let keys = Tensor::with_strides(&F32[..0], [3, 0, 2, 8], [stride, stride, stride, 1])
            .expect("nothing");
        let q = floats([3, 1, 2, 8]);
        assert_eq!(out(q, keys, keys).expect("no keys"), [0.0; 48]);
        let none = Tensor::with_strides(&F32[..0], [3, 0, 2, 8], [stride, stride, stride, 1])
            .expect("nothing");
        assert_eq!(out(none, keys, keys).expect("no rows"), [0.0; 0]);
        assert!(nothing([4, 0, 4, 1]).select(0, 3).is_ok());
    }
    // Outputs, dense and ragged; many rows take another way than few.
    for rows in [1, 100] {
        for stride in wild {
            let mut memory = vec![f32::NAN; rows * 8];
            let mut lse = vec![f32::NAN; rows];
            let token = if rows == 1 { stride } else { 8 };
            let row = if rows == 1 { stride } else { 1 };
            let mut outputs = Outputs {
                out: TensorMut::with_strides(
                    &mut memory,
                    [1, rows, 1, 8],
                    [stride, token, stride, 1],
                )
                .expect("in it"),
                lse: Some(
                    TensorMut::with_strides(&mut lse, [1, rows, 1], [stride, row, stride])
                        .expect("in it"),
                ),
            };
            let q = Tensor::with_strides(&F32, [1, rows, 1, 8], [stride, token, stride, 1])
                .expect("in it");
            let inputs = Inputs::new(q, q, q, Attention::default());
            let machine = Machine::host().expect("this machine");
            let plan =
                Plan::new(&Problem::from_operands(&inputs, &outputs).expect("sound"), &machine)
                    .expect("plain");
            plan.run(&inputs, &mut outputs, &mut vec![0; plan.workspace_bytes()]).expect("sound");
            assert!(memory.iter().all(|&x| x == 0.0) && lse.iter().all(|x| x.is_finite()));
        }
    }
}

#[test]
fn two_billion_sequences_of_nothing_take_no_time_and_no_memory() {
    let begun = Instant::now();
    let max = i32::MAX as usize;
    let nothing = Tensor::new(&F32[..0], [max, 0, 1, 8]).expect("reaches nothing");
    let key = Tensor::with_strides(&F32, [max, 1, 1, 8], [0, 0, 0, 1]).expect("one row");
    let out: Vec<f32> =
        attention(nothing, nothing, nothing, &Attention::default()).expect("nothing to do");
    assert_eq!(out, []);
    let out: Vec<f32> = attention(nothing, key, key, &Attention::causal()).expect("nothing to do");
    assert_eq!(out, []);
    let problem = Problem::from_inputs(
        &Inputs::new(nothing, key, key, Attention::default()),
        DType::F32,
        true,
    );
    let plan = Plan::new(&problem.expect("sound"), &Machine::host().expect("this machine"))
        .expect("plain");
    assert!(plan.workspace_bytes() < 64 << 20, "{} bytes", plan.workspace_bytes());
    assert!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
}

/// Metal binds a buffer from the first element on, so elements before it would be out of the
/// kernel's reach.
#[test]
fn views_that_run_backwards_are_refused_for_metal() {
    // SAFETY: 8 rows of 8 elements, from the last one backwards: inside the static.
    let backwards = unsafe {
        let last = F32.as_ptr().add(56).cast();
        Tensor::from_raw(last, DType::F32, &[1, 8, 1, 8], Some(&[0, -8, 0, 1])).expect("a view")
    };
    let forwards = floats([1, 8, 1, 8]);
    // SAFETY: nothing is executed.
    let buffer = unsafe { BufferView::from_raw(0, 0, isize::MAX as usize) };
    let view = |tensor: &Tensor| {
        let place = tensor.as_ptr() as usize;
        buffer.tensor(place, DType::F32, tensor.shape(), Some(tensor.strides())).expect("a view")
    };
    let dispatch = |q: Tensor, k: Tensor| {
        let inputs = Inputs::new(view(&q), view(&k), view(&forwards), Attention::default());
        let out = buffer.tensor_mut(1 << 20, DType::F32, &[1, 8, 1, 8], None).expect("a view");
        let outputs = Outputs { out, lse: None };
        let problem = Problem::from_operands(&inputs, &outputs).expect("sound");
        let plan = Plan::new(&problem, &"m2".parse::<Machine>().expect("known")).expect("plain");
        regard::metal::dispatches(&plan, &inputs, &outputs, &buffer).map(|_| ())
    };
    dispatch(forwards, forwards).expect("forwards");
    expect(dispatch(backwards, forwards).unwrap_err(), "q", "[0, -8, 0, 1]", "strides from 0 up");
    expect(dispatch(forwards, backwards).unwrap_err(), "k", "[0, -8, 0, 1]", "strides from 0 up");
    let out: Vec<f32> =
        attention(backwards, backwards, forwards, &Attention::default()).expect("the CPU reads it");
    assert_eq!(out.len(), 64);
}
