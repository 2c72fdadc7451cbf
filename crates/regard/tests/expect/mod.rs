//! The parts that an error must have.

use regard::Error;

/// Checks an error's three parts.
#[track_caller]
pub fn expect(error: Error, argument: &str, found: &str, allowed: &str) {
    let message = error.to_string();
    let Error::Argument { argument: names, found: shows, allowed: allows } = error else {
        panic!("not an argument error: {message}");
    };
    assert_eq!(names, argument, "{message}");
    assert!(shows.contains(found), "{message}: does not show {found:?}");
    assert!(allows.contains(allowed), "{message}: does not allow {allowed:?}");
}
