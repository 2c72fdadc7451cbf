//! A case without its data: what selection looks at. Thousands of descriptions can be tried in the
//! time that one case takes to be made.

use super::{Keys, MaskSpec, Spec};
use regard::{KeyLayout, KvStorage, Problem, QueryStorage, Variant};
use std::collections::BTreeSet;

impl Spec {
    /// The kinds of block that a mask of [`Hide::Blocks`](crate::Hide) has where rows see keys:
    /// hidden (0), left alone (1), hidden in part (2).
    pub(crate) fn mask_blocks(&self, mask: &MaskSpec) -> BTreeSet<usize> {
        let mut kinds = BTreeSet::new();
        for (index, sequence) in self.sequences.iter().enumerate() {
            let visible = self.visible(index);
            if visible.is_empty() {
                continue;
            }
            let first = self.first_position(index);
            let rows = [first, first + sequence.q_len as i64 - 1].map(|row| row as u64);
            let keys = [visible.start as u64, visible.end as u64 - 1];
            for head in 0..self.query_heads as u64 {
                for (row, key) in rows.into_iter().flat_map(|row| keys.map(|key| (row, key))) {
                    let mut at = [sequence.id, head, row, key];
                    at.iter_mut()
                        .zip(mask.broadcast)
                        .for_each(|(at, broadcast)| *at *= u64::from(!broadcast));
                    kinds.insert(self.mask_block(at));
                }
            }
        }
        kinds
    }

    /// The problem as the host sees it, which can read lengths.
    pub fn problem(&self, lse: bool) -> Problem {
        let (query_len, longest_key) = self.longest();
        let columns = |block_size: usize| longest_key.div_ceil(block_size) + 1;
        let (keys, kv_len) = match self.keys {
            Keys::Batched { slack } => (KvStorage::Batched, longest_key + slack),
            Keys::Ragged { .. } if self.sequences.is_empty() => (KvStorage::Ragged, 0),
            Keys::Ragged { slack } => (KvStorage::Ragged, longest_key + slack),
            Keys::Paged { block_size, .. } => {
                (KvStorage::Paged { block_size }, columns(block_size) * block_size)
            }
        };
        let kv_len = match self.lists {
            Some(lists) if lists.slots => lists.len,
            _ => kv_len,
        };
        let total = self.sequences.iter().map(|sequence| sequence.q_len).sum();
        Problem {
            batch: self.sequences.len(),
            query_heads: self.query_heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            value_dim: self.value_dim,
            query_len,
            kv_len,
            queries: match self.ragged_queries {
                true => QueryStorage::Ragged { total },
                false => QueryStorage::Batched,
            },
            keys,
            dtype: self.dtype,
            key_dtype: self.key_dtype(),
            value_dtype: self.value_dtype(),
            values: self.values,
            out_dtype: self.out_dtype,
            variant: Variant {
                causal: self.causal && !self.tree,
                window: self.window,
                chunk: self.chunk,
                softcap: self.softcap.is_some(),
                alibi: self.alibi,
                sinks: self.sinks,
                mask: self.mask.map(|mask| mask.dtype),
                tree: self.tree,
                key_positions: self.key_positions.as_ref().map(|positions| {
                    match positions.stride {
                        1 => KeyLayout::Contiguous,
                        _ => KeyLayout::RoundRobin,
                    }
                }),
            },
            key_lists: self.key_lists(),
            prefix_groups: self.prefix_group_count(),
            lse,
            batch_invariant: self.batch_invariant,
        }
    }
}

#[cfg(feature = "cuda")]
mod device {
    use super::super::{KeyPositionsSpec, Keys, MemorySpec, OffsetSpec, Operand, Place, Spec};
    use crate::case::{KvLayout, Layout};
    use regard::cuda::DeviceMemory;
    use regard::{
        Attention, DType, Error, Inputs, KeyOffset, KeyPositions, Outputs, QueryOffset, Tensor,
        TensorMut, Values,
    };

    /// Made-up device memory, each operand far from the others. Nothing reads it.
    struct Addresses(u64);

    impl Addresses {
        fn next(&mut self) -> u64 {
            self.0 += 1 << 36;
            self.0
        }

        fn of(
            &mut self,
            dtype: DType,
            place: &Place,
        ) -> Result<Tensor<'static, DeviceMemory>, Error> {
            let address = self.next() + (place.offset * dtype.size()) as u64;
            // SAFETY: nothing runs on this view: it is looked at for its shape and address.
            unsafe {
                Tensor::from_device_address(address, dtype, &place.shape, Some(&place.strides))
            }
        }

        fn vector(
            &mut self,
            dtype: DType,
            shape: &[usize],
        ) -> Result<Tensor<'static, DeviceMemory>, Error> {
            self.of(dtype, &Place::new(shape, 0, &MemorySpec::default()))
        }
    }

    fn output(
        address: u64,
        dtype: DType,
        place: &Place,
    ) -> Result<TensorMut<'static, DeviceMemory>, Error> {
        // SAFETY: as for inputs.
        unsafe {
            TensorMut::from_device_address(address, dtype, &place.shape, Some(&place.strides))
        }
    }

    impl Spec {
        /// Calls `look` with views of device memory that is not there, of the shapes, strides and
        /// alignments that the case's operands have when [`cuda::Runner`](crate::cuda::Runner) runs
        /// it.
        ///
        /// # Errors
        /// If the description breaks the contract, or what `look` says.
        pub fn outlined<T>(
            &self,
            lse: bool,
            look: impl FnOnce(&Inputs<DeviceMemory>, &Outputs<DeviceMemory>) -> Result<T, Error>,
        ) -> Result<T, Error> {
            let mut addresses = Addresses(0);
            let batch = self.sequences.len();
            let (longest_query, _) = self.longest();
            let bhsd = self.layout == Layout::Bhsd;
            let (key_place, value_place, table) = self.place_cache();
            let q = addresses
                .of(self.dtype, &self.place_queries(self.head_dim, self.padding, &self.memory.q))?;
            let k = addresses.of(self.key_dtype(), &key_place)?;
            let v = addresses.of(self.value_dtype(), &value_place)?;
            let mut scales = |operand, place: &Place| -> Result<_, Error> {
                let place = self.place_scales(operand, place);
                place.map(|place| addresses.of(DType::F32, &place)).transpose()
            };
            let k_scales = scales(Operand::Key, &key_place)?;
            let v_scales = scales(Operand::Value, &value_place)?;
            let swap_keys = match self.keys {
                Keys::Paged { .. } => self.kv_layout == KvLayout::Hnd,
                Keys::Ragged { .. } => false,
                Keys::Batched { .. } => bhsd,
            };
            let mut option = |there: bool, dtype, shape: &[usize]| {
                there.then(|| addresses.vector(dtype, shape)).transpose()
            };
            let paged = matches!(self.keys, Keys::Paged { .. }) && !self.lists_slots();
            let lists =
                self.lists.map_or([0; 3], |lists| [self.list_rows(), self.list_heads(), lists.len]);
            let mut attention = Attention {
                q_offset: match &self.offset {
                    OffsetSpec::BottomRight => QueryOffset::BottomRight,
                    OffsetSpec::Same(offset) => QueryOffset::Same(*offset),
                    OffsetSpec::PerSequence(_) => {
                        let offsets = option(true, DType::I32, &[batch])?;
                        QueryOffset::PerSequence(offsets.expect("asked for"))
                    }
                },
                key_positions: match &self.key_positions {
                    None => None,
                    Some(KeyPositionsSpec { offsets, stride }) => Some(KeyPositions {
                        offset: match (
                            &offsets[..],
                            option(offsets.len() > 1, DType::I32, &[batch])?,
                        ) {
                            (_, Some(offsets)) => KeyOffset::PerSequence(offsets),
                            (offsets, None) => KeyOffset::Same(i64::from(offsets[0])),
                        },
                        stride: *stride,
                    }),
                },
                alibi_slopes: option(self.alibi, DType::F32, &[self.query_heads])?,
                sinks: option(self.sinks, DType::F32, &[self.query_heads])?,
                tree_mask: option(
                    self.tree,
                    DType::I32,
                    &[batch, longest_query, longest_query.div_ceil(32)],
                )?,
                kv_lens: option(self.needs_lens(), DType::I32, &[batch])?,
                cu_seqlens_q: option(self.ragged_queries, DType::I32, &[batch + 1])?,
                cu_seqlens_k: option(
                    matches!(self.keys, Keys::Ragged { .. }),
                    DType::I32,
                    &[batch + 1],
                )?,
                block_table: option(
                    paged,
                    DType::I32,
                    &[table.len(), table.first().map_or(1, Vec::len)],
                )?,
                key_indices: option(self.lists.is_some(), DType::I32, &lists)?,
                key_counts: option(
                    self.lists.is_some_and(|lists| lists.counts),
                    DType::I32,
                    &lists[..2],
                )?,
                prefix_groups: option(self.prefixes.is_some(), DType::I32, &[batch])?,
                prefix_lens: option(
                    self.prefixes.is_some(),
                    DType::I32,
                    &[self.prefix_group_count()],
                )?,
                ..self.numbers()
            };
            let key_order = |scales: Tensor<'static, DeviceMemory>| match swap_keys {
                true => scales.permute([0, 2, 1]),
                false => scales,
            };
            attention.k_scales = k_scales.map(key_order);
            attention.v_scales = v_scales.map(key_order);
            if let Some(mask) = &self.mask {
                attention.mask = Some(addresses.of(mask.dtype, &self.place_mask(mask))?);
            }
            let out_place = self.place_queries(self.value_dim, 0, &MemorySpec::default());
            let mut lse_place = self.place_queries(1, 0, &MemorySpec::default());
            lse_place.shape.pop();
            lse_place.strides.pop();
            let mut out = output(addresses.next(), self.out_dtype, &out_place)?;
            let mut lse =
                lse.then(|| output(addresses.next(), DType::F32, &lse_place)).transpose()?;
            let queries_swap = bhsd && !self.ragged_queries;
            if queries_swap {
                out = out.bhsd();
                lse = lse.map(|lse| lse.permute([0, 2, 1]));
            }
            let q = if queries_swap { q.bhsd() } else { q };
            let (k, v) = if swap_keys { (k.bhsd(), v.bhsd()) } else { (k, v) };
            let inputs = match self.values {
                Values::KeyPrefix => Inputs::latent(q, k, self.value_dim, attention)?,
                _ => Inputs::new(q, k, v, attention),
            };
            look(&inputs, &Outputs { out, lse })
        }
    }
}
