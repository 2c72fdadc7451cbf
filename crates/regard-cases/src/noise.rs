//! Deterministic noise: numbers that depend on nothing but a seed and their place in the problem,
//! so that the same logical problem holds the same numbers in any storage, batch or chunk.
//! (SplitMix64: Steele, Lea and Flood 2014.)

/// A stream of numbers.
#[derive(Debug, Clone)]
pub(crate) struct Noise(u64);

impl Noise {
    /// The stream for these coordinates.
    pub(crate) fn new(seed: u64, coordinates: &[u64]) -> Noise {
        let mut noise = Noise(seed);
        for &coordinate in coordinates {
            noise.0 = noise.bits() ^ coordinate;
        }
        noise.bits();
        noise
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `n`, evenly (as near as 64 bits allow).
    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// True in one of `n` cases.
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    /// One of these.
    pub(crate) fn pick<T: Copy>(&mut self, these: &[T]) -> T {
        these[self.below(these.len())]
    }

    /// Roughly normal, with mean 0 and variance 1: the sum of four uniform numbers.
    pub(crate) fn normal(&mut self) -> f32 {
        let bits = self.bits();
        let sum: u64 = (0..4).map(|i| bits >> (16 * i) & 0xffff).sum();
        (sum as f32 - 131_070.0) / 65_536.0 * 3f32.sqrt()
    }

    /// A random order of `0..n`.
    pub(crate) fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_are_roughly_normal() {
        let mut noise = Noise::new(7, &[1, 2]);
        let numbers: Vec<f32> = (0..20_000).map(|_| noise.normal()).collect();
        let mean = numbers.iter().sum::<f32>() / 20_000.0;
        let variance = numbers.iter().map(|x| x * x).sum::<f32>() / 20_000.0;
        assert!(mean.abs() < 0.03 && (variance - 1.0).abs() < 0.03, "{mean} {variance}");
        let mut order = noise.permutation(10);
        order.sort_unstable();
        assert_eq!(order, (0..10).collect::<Vec<_>>());
    }
}
