//! The standard slopes of ALiBi.

/// The slopes of [`Attention::alibi_slopes`](crate::Attention::alibi_slopes) as models are trained
/// with them (Press et al., *Train Short, Test Long*): for a power of two n of heads, `2^(-8 i /
/// n)` for i from 1 to n. For other n: the slopes of m heads, the largest power of two below n, and
/// then the first, third, ... slope of 2 m heads.
///
/// ```
/// assert_eq!(regard::alibi_slopes(8)[..3], [0.5, 0.25, 0.125]);
/// ```
pub fn alibi_slopes(heads: usize) -> Vec<f32> {
    if heads == 0 {
        return Vec::new();
    }
    let powers = 1usize << heads.ilog2();
    let slope = |i: usize, n: usize| (-8.0 * i as f64 / n as f64).exp2() as f32;
    let first = (1..=powers).map(|i| slope(i, powers));
    let others = (0..heads - powers).map(|i| slope(2 * i + 1, 2 * powers));
    first.chain(others).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slopes_are_those_of_the_paper() {
        assert_eq!(alibi_slopes(0), []);
        assert_eq!(alibi_slopes(1), [1.0 / 256.0]);
        assert_eq!(alibi_slopes(4), [0.25, 0.0625, 0.015625, 0.00390625]);
        // BLOOM-like: 12 heads have the slopes of 8 heads, then every other slope of 16 heads.
        let twelve = alibi_slopes(12);
        assert_eq!(twelve[..8], alibi_slopes(8));
        let sixteen = alibi_slopes(16);
        assert_eq!(twelve[8..], [sixteen[0], sixteen[2], sixteen[4], sixteen[6]]);
    }
}
