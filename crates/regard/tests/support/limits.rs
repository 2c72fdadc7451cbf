//! What tests leave out where cases run slowly.

/// Multiplications of the largest case to run, but for one of each kind: `REGARD_MAX_WORK`, for
/// emulators, sanitizers and long runs; else `default`.
pub fn most_work(default: usize) -> usize {
    let given = std::env::var("REGARD_MAX_WORK");
    given.map_or(default, |number| number.parse().expect("REGARD_MAX_WORK is a number"))
}

/// Number of rows of a case that are judged: `REGARD_JUDGED_ROWS`, for emulators and sanitizers,
/// under which the oracle takes longer than the kernels; else all.
pub fn judged_rows() -> Option<usize> {
    let given = std::env::var("REGARD_JUDGED_ROWS").ok()?;
    Some(given.parse().expect("REGARD_JUDGED_ROWS is a number"))
}
