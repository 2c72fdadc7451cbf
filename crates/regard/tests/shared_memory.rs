//! Written memory (out, lse, workspace) shares no bytes with any operand, nor with each other.
//! References cannot overlap; raw addresses can.

mod dense_problem;
mod expect;

use dense_problem::dense_problem;
use expect::expect;
use regard::{
    Attention, DType, Inputs, Machine, Outputs, Plan, Problem, Tensor, TensorMut, Variant,
};

const SENTINEL: f32 = 42.0;

#[test]
fn outputs_that_share_memory() {
    // q at 0, k at 192, v at 352, room for out at 432 and for lse at 528, sinks at 596.
    let mut memory = [SENTINEL; 600];
    let start = memory.as_mut_ptr();
    // SAFETY: every view is in `memory`. The overlapping ones break the contract of `from_raw` on
    // purpose; nothing reads or writes through them, because they are refused.
    let read = |at: usize, shape: &[usize]| unsafe {
        Tensor::from_raw(start.add(at).cast(), DType::F32, shape, None).expect("contiguous")
    };
    // SAFETY: as above.
    let write = |at: usize, shape: &[usize]| unsafe {
        TensorMut::from_raw(start.add(at).cast(), DType::F32, shape, None).expect("contiguous")
    };
    let attention = Attention { sinks: Some(read(596, &[4])), ..Attention::default() };
    let (q, k, v) = (read(0, &[2, 3, 4, 8]), read(192, &[2, 5, 2, 8]), read(352, &[2, 5, 2, 4]));
    let inputs = Inputs::new(q, k, v, attention);
    let check = |out, lse| {
        let outputs = Outputs { out: write(out, &[2, 3, 4, 4]), lse: Some(write(lse, &[2, 3, 4])) };
        Problem::from_operands(&inputs, &outputs)
    };
    for (out, lse, argument, other) in [
        (191, 528, "out", "`q`"),
        (100, 528, "out", "`q`"),
        (192, 528, "out", "`k`"),
        (431, 540, "out", "`v`"),
        (501, 432, "out", "`sinks`"),
        (432, 527, "out", "`lse`"),
        (432, 400, "lse", "`v`"),
        (432, 576, "lse", "`sinks`"),
    ] {
        let error = check(out, lse).unwrap_err();
        expect(error, argument, &format!("memory shared with {other}"), "memory of its own");
    }
    check(432, 528).expect("side by side is fine");
    assert!(memory.iter().all(|&x| x == SENTINEL));
}

#[test]
fn a_workspace_that_shares_memory() {
    let problem = Problem {
        variant: Variant { sinks: true, ..Variant::default() },
        lse: true,
        ..dense_problem()
    };
    let plan = Plan::new(&problem, &Machine::host().expect("this machine")).expect("a plan");
    // Each operand is so far from the next that the workspace fits between them.
    let bytes = plan.workspace_bytes();
    let step = 192 + bytes.div_ceil(4);
    let mut memory = vec![SENTINEL; 7 * step];
    let length = memory.len();
    let start = memory.as_mut_ptr();
    // SAFETY: every view is in `memory`. If the workspace overlaps a view, nothing reads or writes
    // through either, because the run is refused.
    let read = |i: usize, shape: &[usize]| unsafe {
        Tensor::from_raw(start.add(i * step).cast(), DType::F32, shape, None).expect("contiguous")
    };
    // SAFETY: as above.
    let write = |i: usize, shape: &[usize]| unsafe {
        TensorMut::from_raw(start.add(i * step).cast(), DType::F32, shape, None)
            .expect("contiguous")
    };
    let run = |first_byte: usize| {
        let attention = Attention { sinks: Some(read(3, &[4])), ..Attention::default() };
        let (q, k, v) = (read(0, &[2, 3, 4, 8]), read(1, &[2, 5, 2, 8]), read(2, &[2, 5, 2, 4]));
        let inputs = Inputs::new(q, k, v, attention);
        let mut outputs = Outputs { out: write(4, &[2, 3, 4, 4]), lse: Some(write(5, &[2, 3, 4])) };
        assert!(first_byte + bytes <= 4 * length);
        // SAFETY: as above.
        let workspace =
            unsafe { std::slice::from_raw_parts_mut(start.cast::<u8>().add(first_byte), bytes) };
        plan.run(&inputs, &mut outputs, workspace)
    };
    let operands =
        [("`q`", 192), ("`k`", 160), ("`v`", 80), ("`sinks`", 4), ("`out`", 96), ("`lse`", 24)];
    for (i, (name, elements)) in operands.into_iter().enumerate() {
        let (first, last) = (4 * i * step, 4 * (i * step + elements) - 1);
        // Over its first byte, over its last, and inside of it or around it.
        let places = [(first + 1).checked_sub(bytes), Some(last), Some(first + 2)];
        for at in places.into_iter().flatten() {
            expect(run(at).unwrap_err(), "workspace", name, "memory of its own");
        }
    }
    // SAFETY: nothing writes it now.
    let untouched = unsafe { std::slice::from_raw_parts(start, length) };
    assert!(untouched.iter().all(|&x| x == SENTINEL));
    run(4 * 192).expect("side by side is fine");
}
