//! The memory layout of operands.

use crate::array::{Array, Data};

/// The memory layout of an operand, beyond its `Layout` and padding: dimensions in another order,
/// gaps between them, and elements before the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemorySpec {
    /// Elements before the first one. An odd number makes its address unaligned for vectors.
    pub first: usize,
    /// The outer dimensions from the slowest to the fastest; `[0, 1, 2]` is row-major. Operands of
    /// two outer dimensions leave the last one out.
    pub order: [usize; 3],
    /// Elements of padding after each of the outer dimensions, on top of [`Spec::padding`].
    ///
    /// [`Spec::padding`]: crate::Spec::padding
    pub gaps: [usize; 3],
}

impl Default for MemorySpec {
    fn default() -> MemorySpec {
        MemorySpec { first: 0, order: [0, 1, 2], gaps: [0; 3] }
    }
}

/// The offsets of an array's elements in a buffer.
#[derive(Clone)]
pub(crate) struct Place {
    pub(crate) shape: Vec<usize>,
    pub(crate) strides: Vec<i64>,
    pub(crate) offset: usize,
    pub(crate) end: usize,
}

impl Place {
    /// Rows of the last dimension, contiguous; outer dimensions by `memory`, with `padding`
    /// elements after each row and each outer dimension.
    pub(crate) fn new(shape: &[usize], padding: usize, memory: &MemorySpec) -> Place {
        let outer = shape.len() - 1;
        let mut strides = vec![1; shape.len()];
        let mut stride = shape[outer].max(1) as i64 + padding as i64;
        let inside: Vec<usize> = memory.order.into_iter().filter(|&dim| dim < outer).collect();
        for &dim in inside.iter().rev() {
            stride += memory.gaps[dim] as i64;
            strides[dim] = stride;
            stride = stride * shape[dim].max(1) as i64 + padding as i64;
        }
        // The padding after the slowest dimension stays outside.
        let end = match inside.first() {
            _ if shape.contains(&0) => 0,
            Some(&slowest) => memory.first + strides[slowest] as usize * shape[slowest],
            None => memory.first + shape[outer],
        };
        Place { shape: shape.to_vec(), strides, offset: memory.first, end }
    }

    /// The first element of a row.
    pub(crate) fn at(&self, outer: &[usize]) -> usize {
        debug_assert!(
            outer.len() + 1 == self.shape.len()
                && outer.iter().zip(&self.shape).all(|(i, n)| i < n)
        );
        self.offset
            + outer
                .iter()
                .zip(&self.strides)
                .map(|(&i, &stride)| i * stride as usize)
                .sum::<usize>()
    }

    pub(crate) fn over(&self, data: Data) -> Array {
        let array = Array::strided(data, self.offset.min(self.end), &self.shape, &self.strides);
        array.expect("a description makes arrays that fit")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dimensions_in_any_order_and_gaps_do_not_overlap() {
        let shape = [2, 3, 4, 5];
        let plain = Place::new(&shape, 2, &MemorySpec::default());
        assert_eq!((&plain.strides[..], plain.end), (&[92, 30, 7, 1][..], 184));
        for order in [[0, 1, 2], [2, 1, 0], [1, 2, 0], [0, 2, 1]] {
            let place = Place::new(&shape, 1, &MemorySpec { first: 3, order, gaps: [4, 0, 1] });
            let mut taken = vec![false; place.end];
            for a in 0..2 {
                for b in 0..3 {
                    for c in 0..4 {
                        for element in &mut taken[place.at(&[a, b, c])..][..5] {
                            assert!(!std::mem::replace(element, true), "{order:?}");
                        }
                    }
                }
            }
            assert!(taken[..3].iter().all(|taken| !taken));
        }
    }
}
