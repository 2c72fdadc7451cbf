//! Naive attention in f64.
