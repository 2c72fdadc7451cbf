//! A read past a guard page ends the process, and the problem that ran is named.
#![cfg(unix)]

use regard_cases::random::{Guarded, Side, crash};
use std::process::Command;

const CRASHES: &str = "REGARD_TEST_CRASHES";

#[test]
fn a_crash_names_the_problem() {
    if let Ok(side) = std::env::var(CRASHES) {
        crash::watch();
        let _noted = crash::Noted::new(7, 41);
        let (side, offset) = if side == "end" { (Side::End, 5) } else { (Side::Start, -1) };
        let guarded = Guarded::new(5, side, 1);
        // SAFETY: none: this is the read that must crash.
        let byte = unsafe { guarded.as_ptr().offset(offset).read_volatile() };
        unreachable!("{byte} was read past a guard page");
    }
    for side in ["start", "end"] {
        let mut again = Command::new(std::env::current_exe().expect("this test"));
        again.args(["a_crash_names_the_problem", "--exact", "--nocapture"]).env(CRASHES, side);
        let output = again.output().expect("this test again");
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), None, "ended by a signal: {message}");
        assert!(message.contains("--random 1 --first 41 --seed 7"), "{message}");
    }
}
