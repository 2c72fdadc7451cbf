//! Case files from anywhere: the reader answers with a case or an error. An accepted case is
//! refused with a reason or runs, and can be written and read again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use regard::{Plan, Problem};
use regard_cases::file;

/// The most multiply-adds to spend on one input: fuzzing is for the code that reads and checks, and
/// for the edges of the kernels.
const MAX_WORK: usize = 1 << 16;

fuzz_target!(|bytes: &[u8]| {
    let Ok(case) = file::from_bytes("fuzz", bytes) else { return };
    let _ = case.run(|inputs, outputs| {
        let problem = Problem::from_operands(inputs, outputs)?;
        let work = problem.rows().saturating_mul(problem.kv_len).saturating_mul(problem.value_dim);
        if problem.batch <= 64 && work <= MAX_WORK {
            let plan = Plan::for_operands(inputs, outputs)?;
            plan.run(inputs, outputs, &mut vec![0xa5; plan.workspace_bytes()])?;
        }
        Ok(())
    });
    let written = file::to_bytes(&case).expect("what was read can be written");
    let again = file::from_bytes("fuzz", &written).expect("what was written can be read");
    assert_eq!(file::to_bytes(&again).expect("and written again"), written);
});
