//! The shipped Metal kernels, run on the host with large numbers: offsets past 2^31 elements, in
//! memory that is mapped when it is touched, and more than 65,535 of everything.

#[path = "support/far_offsets.rs"]
mod far_offsets;
#[path = "support/metal.rs"]
mod support;

use metal_host::{Build, On, run_from, run_plan, run_problem};
use regard::oracle::{Judge, Row};
use regard::{DType, Error, MAX_KEY_STRIDE, Plan, Problem};
use regard_cases::check::Checker;
use regard_cases::{OffsetSpec, Spec};
use support::{compiler, gpu, library, run_case, source_of};

#[test]
fn elements_may_be_more_than_2_to_the_31_apart() {
    let Some(compiler) = compiler() else { return };
    let source = source_of(&[
        "DECODE_TYPE(bfloat",
        "PREFILL_TYPES(\"bfloat\"",
        "COMBINE(bfloat",
        "MASK_MAP(",
    ]);
    let mut library = library(&compiler, &source, Build::Plain);
    let machine = gpu(8, 8);
    // The prefill kernels run everything in batch-invariant mode.
    for batch_invariant in [false, true] {
        far_offsets::check(batch_invariant, 1, &mut |_, inputs, outputs| {
            let on = On { machine: &machine, schedule: 2, garbage: 0xff };
            let kernel = run_problem(&mut library, on, inputs, outputs, |_| {})?;
            assert!(kernel.starts_with(if batch_invariant { "prefill" } else { "decode" }));
            Ok(())
        });
    }
}

/// A number that 16 bits do not hold.
const MANY: usize = 65_600;

fn check(spec: Spec) {
    let Some(compiler) = compiler() else { return };
    let source = source_of(&["DECODE_TYPE(float", "PREFILL_TYPES(\"float\"", "COMBINE(float"]);
    let mut library = library(&compiler, &source, Build::Plain);
    let case = spec.generate();
    let checker = Checker::new(&case, None).unwrap_or_else(|why| panic!("{}: {why}", spec.name));
    let output = run_case(&mut library, &case, (&gpu(8, 8), 0));
    let output = output.unwrap_or_else(|why| panic!("{}: {why}", spec.name));
    checker.check(&output).unwrap_or_else(|why| panic!("{}: {why}", spec.name));
}

fn spec(name: &str) -> Spec {
    Spec { causal: true, ..Spec::new(name).dims(4, 4).heads(1, 1).dtype(DType::F32) }
}

#[test]
fn there_may_be_more_than_65535_rows() {
    let rows = spec("rows").lengths(&[(MANY, 3)]);
    check(Spec { offset: OffsetSpec::Same(0), ..rows });
}

#[test]
fn there_may_be_more_than_65535_keys() {
    check(spec("keys").lengths(&[(1, MANY)]));
}

/// Kernels divide them by the distance of keys; they have no division of 64 bits.
#[test]
fn positions_may_be_2_to_the_32_apart() {
    let offset = OffsetSpec::Same(i64::from(i32::MAX) - 8);
    let apart = spec("apart").lengths(&[(1, 2 * MANY)]).key_positions(&[i32::MIN], MAX_KEY_STRIDE);
    check(Spec { offset, ..apart });
}

/// A grid of a threadgroup for each of more than 65,535 sequences or heads. The host takes half a
/// minute for all threadgroups, so only threadgroups from `first` on run and are judged.
fn check_grid(spec: &Spec, first: [u32; 3]) {
    let Some(compiler) = compiler() else { return };
    let source = source_of(&["DECODE_TYPE(float", "PREFILL_TYPES(\"float\"", "COMBINE(float"]);
    let mut library = library(&compiler, &source, Build::Plain);
    let case = spec.generate();
    let inputs = case.inputs().unwrap_or_else(|error| panic!("{}: {error}", spec.name));
    let [_, head, sequence] = first.map(|index| index as usize);
    let row = |i| match sequence {
        0 => Row { sequence: 0, query: 0, head: i },
        _ => Row { sequence: i, query: 0, head: 0 },
    };
    let rows: Vec<_> = (head.max(sequence)..MANY).map(row).collect();
    let judge = Judge::for_rows(&inputs, spec.dtype, &rows);
    let judge = judge.unwrap_or_else(|error| panic!("{}: {error}", spec.name));
    let output = case.run(|inputs, outputs| -> Result<(), Error> {
        let plan = Plan::new(&Problem::from_operands(inputs, outputs)?, &gpu(8, 8))?;
        let mut dispatches = 0;
        run_plan(&plan, 0xff, inputs, outputs, |dispatch| {
            dispatches += 1;
            assert_eq!(dispatch.grid.iter().max(), Some(&(MANY as u32)), "{:?}", dispatch.grid);
            run_from(&mut library, dispatch, 0, first).unwrap_or_else(|why| panic!("{why}"));
            Ok(())
        })?;
        assert_eq!(dispatches, 1, "a grid that is not cut");
        Ok(())
    });
    let output = output.unwrap_or_else(|error| panic!("{}: {error}", spec.name));
    let [out, lse] = [&output.out, &output.lse].map(|array| {
        case.query_order(array.view().unwrap_or_else(|error| panic!("{}: {error}", spec.name)))
    });
    let judged = judge.check(&out, Some(&lse));
    judged.map(|_| ()).unwrap_or_else(|mismatch| panic!("{}: {mismatch}", spec.name));
}

fn many_sequences() -> Spec {
    spec("sequences").lengths(&vec![(1, 2); MANY])
}

fn many_heads() -> Spec {
    spec("heads").lengths(&[(1, 2)]).heads(MANY, MANY)
}

#[test]
fn there_may_be_more_than_65535_sequences() {
    check_grid(&many_sequences(), [0, 0, 65_500]);
}

#[test]
fn there_may_be_more_than_65535_heads() {
    check_grid(&many_heads(), [0, 65_500, 0]);
}

/// A threadgroup each: half a minute.
#[test]
#[ignore = "long: scripts/metal.sh runs it"]
fn each_of_more_than_65535_sequences_is_right() {
    check(many_sequences());
}

/// Likewise.
#[test]
#[ignore = "long: scripts/metal.sh runs it"]
fn each_of_more_than_65535_heads_is_right() {
    check(many_heads());
}
