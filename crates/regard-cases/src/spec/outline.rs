//! A case without its data, as selection sees it. Thousands of descriptions can be tried in the
//! time that one case takes to be made.

use super::{Keys, MaskSpec, MaxLens, Spec};
use regard::{KeyLayout, KvStorage, Problem, QueryStorage, Variant};
use std::collections::BTreeSet;

impl Spec {
    /// The kinds of block that a mask of [`Hide::Blocks`](crate::Hide) has among keys that rows
    /// see: hidden (0), left alone (1), hidden in part (2).
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
        let MaxLens { queries: query_len, keys: longest_key } = self.max_lens();
        let columns = |block_size: usize| longest_key.div_ceil(block_size) + 1;
        let (keys, kv_len) = match self.keys {
            Keys::Batched { slack } => (KvStorage::Batched, longest_key + slack),
            Keys::Ragged { .. } if self.sequences.is_empty() => (KvStorage::Ragged, 0),
            Keys::Ragged { slack } => (KvStorage::Ragged, longest_key + slack),
            Keys::Paged { block_size, .. } => {
                (KvStorage::Paged { block_size }, columns(block_size) * block_size)
            }
        };
        let kv_len = match self.key_lists() {
            Some(lists) if self.has_listed_pool() => lists.len,
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
            rotary_dim: self.rotary_dim,
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

        fn tensor(
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

        /// A contiguous tensor, if the case has it.
        fn option(
            &mut self,
            given: bool,
            dtype: DType,
            shape: &[usize],
        ) -> Result<Option<Tensor<'static, DeviceMemory>>, Error> {
            let place = || Place::new(shape, 0, &MemorySpec::default());
            given.then(|| self.tensor(dtype, &place())).transpose()
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
        /// Calls `look` with views of device memory that does not exist, of the shapes, strides and
        /// alignments that the case's operands have when [`cuda::Runner`](crate::cuda::Runner) runs
        /// it.
        ///
        /// # Errors
        /// If the description breaks the contract. Errors of `look`.
        pub fn outlined<T>(
            &self,
            lse: bool,
            look: impl FnOnce(&Inputs<DeviceMemory>, &Outputs<DeviceMemory>) -> Result<T, Error>,
        ) -> Result<T, Error> {
            let mut addresses = Addresses(0);
            let cache = self.place_cache_with(|block_size| self.blank_table(block_size));
            let q_place = self.place_queries(self.head_dim, self.padding, &self.memory.q);
            let q = addresses.tensor(self.dtype, &q_place)?;
            let k = addresses.tensor(self.key_dtype(), &cache.keys)?;
            let v = addresses.tensor(self.value_dtype(), &cache.values)?;
            let mut scales = |operand, place: &Place| -> Result<_, Error> {
                let place = self.place_scales(operand, place);
                place.map(|place| addresses.tensor(DType::F32, &place)).transpose()
            };
            let k_scales = scales(Operand::Key, &cache.keys)?;
            let v_scales = scales(Operand::Value, &cache.values)?;
            let swap_keys = self.keys_are_head_major();
            let key_order = |scales: Tensor<'static, DeviceMemory>| match swap_keys {
                true => scales.permute([0, 2, 1]),
                false => scales,
            };
            let mut attention = self.outlined_options(&mut addresses, &cache.table)?;
            attention.k_scales = k_scales.map(key_order);
            attention.v_scales = v_scales.map(key_order);
            self.outline_second_cache(&mut addresses, &mut attention)?;
            if let Some(place) = self.place_rotary(&cache.keys) {
                let rotary = addresses.tensor(self.key_dtype(), &place)?;
                attention.rotary_k = Some(if swap_keys { rotary.bhsd() } else { rotary });
            }
            if let Some(mask) = &self.mask {
                attention.mask = Some(addresses.tensor(mask.dtype, &self.place_mask(mask))?);
            }
            let outputs = self.outlined_outputs(&mut addresses, lse)?;
            let q = if self.queries_are_head_major() { q.bhsd() } else { q };
            let (k, v) = if swap_keys { (k.bhsd(), v.bhsd()) } else { (k, v) };
            let inputs = match self.values {
                Values::KeyPrefix => Inputs::latent(q, k, self.value_dim, attention)?,
                _ => Inputs::new(q, k, v, attention),
            };
            look(&inputs, &outputs)
        }

        /// A block table of the right shape, whose entries say nothing.
        fn blank_table(&self, block_size: usize) -> Vec<Vec<i32>> {
            vec![vec![0; self.block_columns(block_size)]; self.sequences.len()]
        }

        /// The pools of the second cache and their scales, if there are two.
        fn outline_second_cache(
            &self,
            addresses: &mut Addresses,
            attention: &mut Attention<Tensor<'static, DeviceMemory>>,
        ) -> Result<(), Error> {
            let Some(second) = self.second_cache() else { return Ok(()) };
            let cache = second.place_cache_with(|block_size| second.blank_table(block_size));
            let head_major = self.keys_are_head_major();
            let mut pool = |dtype, place: &Place| -> Result<_, Error> {
                let pool = addresses.tensor(dtype, place)?;
                Ok(Some(if head_major { pool.bhsd() } else { pool }))
            };
            attention.second_k = pool(self.key_dtype(), &cache.keys)?;
            if self.values == Values::Separate {
                attention.second_v = pool(self.value_dtype(), &cache.values)?;
            }
            let mut scales = |operand, place: &Place| -> Result<_, Error> {
                let place = second.place_scales(operand, place);
                let scales = place.map(|place| addresses.tensor(DType::F32, &place)).transpose()?;
                Ok(scales.map(|scales| match head_major {
                    true => scales.permute([0, 2, 1]),
                    false => scales,
                }))
            };
            attention.second_k_scales = scales(Operand::Key, &cache.keys)?;
            attention.second_v_scales = scales(Operand::Value, &cache.values)?;
            Ok(())
        }

        /// Whether heads come before tokens in keys and values.
        fn keys_are_head_major(&self) -> bool {
            match self.keys {
                Keys::Paged { .. } => self.kv_layout == KvLayout::Hnd,
                Keys::Ragged { .. } => false,
                Keys::Batched { .. } => self.layout == Layout::Bhsd,
            }
        }

        /// The same of queries and outputs.
        fn queries_are_head_major(&self) -> bool {
            self.layout == Layout::Bhsd && !self.ragged_queries
        }

        /// All options except masks and scales. `table` is the block table.
        fn outlined_options(
            &self,
            addresses: &mut Addresses,
            table: &[Vec<i32>],
        ) -> Result<Attention<Tensor<'static, DeviceMemory>>, Error> {
            let batch = self.sequences.len();
            let longest_query = self.max_lens().queries;
            let paged = matches!(self.keys, Keys::Paged { .. }) && !self.has_listed_pool();
            let ragged_keys = matches!(self.keys, Keys::Ragged { .. });
            let of_keys = self.lists.filter(|_| !self.lists_pages());
            let lists =
                of_keys.map_or([0; 3], |lists| [self.list_rows(), self.list_heads(), lists.len]);
            let second_len = of_keys.and_then(|lists| lists.second_len());
            let has_second = second_len.is_some();
            let second = [lists[0], lists[1], second_len.unwrap_or(0)];
            let lists = [lists[0], lists[1], lists[2] - second[2]];
            let has_counts = of_keys.is_some_and(|lists| lists.counts);
            let page_lists = self.page_list_shape();
            let tree = [batch, longest_query, longest_query.div_ceil(32)];
            let pages = [table.len(), table.first().map_or(1, Vec::len)];
            let has_prefixes = self.prefixes.is_some();
            let mut ints = |given, shape: &[usize]| addresses.option(given, DType::I32, shape);
            let attention = Attention {
                q_offset: match &self.offset {
                    OffsetSpec::BottomRight => QueryOffset::BottomRight,
                    OffsetSpec::Same(offset) => QueryOffset::Same(*offset),
                    OffsetSpec::PerSequence(_) => {
                        let offsets = ints(true, &[batch])?;
                        QueryOffset::PerSequence(offsets.expect("asked for"))
                    }
                },
                key_positions: match &self.key_positions {
                    None => None,
                    Some(KeyPositionsSpec { offsets, stride }) => Some(KeyPositions {
                        offset: match (&offsets[..], ints(offsets.len() > 1, &[batch])?) {
                            (_, Some(offsets)) => KeyOffset::PerSequence(offsets),
                            (offsets, None) => KeyOffset::Same(i64::from(offsets[0])),
                        },
                        stride: *stride,
                    }),
                },
                tree_mask: ints(self.tree, &tree)?,
                kv_lens: ints(self.needs_lens(), &[batch])?,
                cu_seqlens_q: ints(self.ragged_queries, &[batch + 1])?,
                cu_seqlens_k: ints(ragged_keys, &[batch + 1])?,
                block_table: ints(paged, &pages)?,
                key_indices: ints(of_keys.is_some(), &lists)?,
                key_counts: ints(has_counts, &lists[..2])?,
                second_indices: ints(has_second, &second)?,
                second_counts: ints(has_second && has_counts, &second[..2])?,
                page_indices: ints(self.lists_pages(), &page_lists)?,
                page_list_lens: ints(self.has_page_list_lens(), &page_lists[..2])?,
                page_numbers: ints(self.has_page_numbers(), &page_lists)?,
                prefix_groups: ints(has_prefixes, &[batch])?,
                prefix_lens: ints(has_prefixes, &[self.prefix_group_count()])?,
                ..self.numbers()
            };
            let heads = [self.query_heads];
            Ok(Attention {
                alibi_slopes: addresses.option(self.alibi, DType::F32, &heads)?,
                sinks: addresses.option(self.sinks, DType::F32, &heads)?,
                ..attention
            })
        }

        fn outlined_outputs(
            &self,
            addresses: &mut Addresses,
            lse: bool,
        ) -> Result<Outputs<'static, DeviceMemory>, Error> {
            let out_place = self.place_queries(self.value_dim, 0, &MemorySpec::default());
            let mut lse_place = self.place_queries(1, 0, &MemorySpec::default());
            lse_place.shape.pop();
            lse_place.strides.pop();
            let out = output(addresses.next(), self.out_dtype, &out_place)?;
            let lse = lse.then(|| output(addresses.next(), DType::F32, &lse_place)).transpose()?;
            Ok(match self.queries_are_head_major() {
                true => Outputs { out: out.bhsd(), lse: lse.map(|lse| lse.permute([0, 2, 1])) },
                false => Outputs { out, lse },
            })
        }
    }
}
