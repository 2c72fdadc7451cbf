//! Shards.
fn main() {}
