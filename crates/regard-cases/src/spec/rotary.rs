//! Keys in two parts: the rotary dims of latent rows in a tensor of their own.

use super::cache::Operand;
use super::{Caches, Keys, Spec};
use crate::array::Array;
use crate::place::{MemorySpec, Place};
use regard::Values;

impl Spec {
    /// The same with keys of `latent_dim` dims, which are the values, and `rotary_dim` more in a
    /// tensor of their own.
    pub fn two_parts(self, latent_dim: usize, rotary_dim: usize) -> Spec {
        Spec { rotary_dim, ..self.latent(latent_dim + rotary_dim, latent_dim) }
    }

    /// The two parts make latent keys in one cache, in whole blocks. Values are all of the first
    /// part.
    pub(super) fn legal_rotary(&mut self) {
        let block = self.key_dtype().values();
        self.rotary_dim =
            self.rotary_dim.next_multiple_of(block) * usize::from(self.rotary_dim > 0);
        let two_caches = self.lists.is_some_and(|lists| lists.caches != Caches::One);
        let is_latent = self.values == Values::KeyPrefix;
        if !is_latent || two_caches || self.rotary_dim >= self.head_dim {
            self.rotary_dim = 0;
        }
        if self.rotary_dim > 0 {
            self.value_dim = self.head_dim - self.rotary_dim;
        }
    }

    /// Dims of keys that are in `k`.
    pub(super) fn latent_dim(&self) -> usize {
        self.head_dim - self.rotary_dim
    }

    /// The layout of rotary rows beside keys in `keys`; `None` if keys are in one tensor. The
    /// strides of pages, tokens and heads differ from the keys' strides.
    pub(super) fn place_rotary(&self, keys: &Place) -> Option<Place> {
        let dim = self.rotary_dim / self.key_dtype().values();
        let mut shape = keys.shape.clone();
        *shape.last_mut()? = dim;
        let padding = self.padding + usize::from(matches!(self.keys, Keys::Paged { .. })) * 8;
        (dim > 0).then(|| Place::new(&shape, padding, &MemorySpec::default()))
    }

    /// The rotary rows, if keys are in two parts.
    pub(super) fn rotary_keys(&self, keys: &Place, table: &[Vec<i32>]) -> Option<Array> {
        let place = self.place_rotary(keys)?;
        Some(self.stored(&place, Operand::Rotary, table))
    }
}
