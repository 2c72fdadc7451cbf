//! Keys and values that the oracle has read: rows of one sequence and head read each of them once.

use crate::problem::Inputs;
use crate::tensor::Tensor;

/// Partial results that loops keep side by side, for vector instructions, and keys that are loaded
/// at a time.
pub(super) const LANES: usize = 8;

/// A key or a value.
pub(super) struct Stored {
    /// As it is stored: the key or value is the product of these numbers and the scale.
    pub numbers: Vec<f64>,
    pub scale: f64,
    /// The product in the type of the queries.
    pub rounded: Vec<f32>,
    /// The sum of the magnitudes of `numbers`, and the largest of them.
    pub sum: f64,
    pub largest: f64,
}

/// Keys, or values, of one sequence and key/value head.
pub(super) struct Slots {
    slots: Vec<Option<Box<Stored>>>,
    held: usize,
    /// Maximum number of slots that are held at a time.
    max_held: usize,
}

impl Slots {
    /// Reads the keys of this list that are not held yet. A key that no row keeps is not read.
    pub fn load(&mut self, keys: &[usize], read: impl Fn(usize) -> Stored) {
        if self.held + keys.len() > self.max_held {
            self.clear();
        }
        for &key in keys {
            if self.slots.len() <= key {
                self.slots.resize_with(key + 1, || None);
            }
            if self.slots[key].is_none() {
                self.slots[key] = Some(Box::new(read(key)));
                self.held += 1;
            }
        }
    }

    /// The key or value of a slot that the last `load` had in its list.
    pub fn at(&self, key: usize) -> &Stored {
        self.slots[key].as_ref().expect("it was loaded")
    }

    fn clear(&mut self) {
        self.slots.clear();
        self.held = 0;
    }
}

/// The keys and values of the sequence whose rows are computed.
pub(super) struct Cache {
    sequence: usize,
    /// For each key/value head.
    heads: Vec<[Slots; 2]>,
}

impl Cache {
    /// Numbers to hold at a time: 24 MB of keys and as much of values.
    const MAX_NUMBERS: usize = 1 << 21;

    pub fn new(inputs: &Inputs) -> Cache {
        let heads = inputs.k.shape()[inputs.k.rank() - 2];
        let slots = |tensor: &Tensor| {
            let dim = tensor.shape().last().map_or(1, |n| n * tensor.dtype().values());
            let max_held = (Self::MAX_NUMBERS / (heads * dim).max(1)).max(LANES);
            Slots { slots: Vec::new(), held: 0, max_held }
        };
        let both = |_| [slots(&inputs.k), slots(&inputs.v)];
        Cache { sequence: 0, heads: (0..heads).map(both).collect() }
    }

    /// The keys and values of a sequence and key/value head.
    pub fn of(&mut self, sequence: usize, head: usize) -> &mut [Slots; 2] {
        if self.sequence != sequence {
            self.sequence = sequence;
            self.heads.iter_mut().flatten().for_each(Slots::clear);
        }
        &mut self.heads[head]
    }
}
