//! Checks of shapes, types and strides, for operands in any memory, before their contents are read.

use super::check_scales::check_scales;
use super::contents::{check_contents, is_within_factor_bound, longest};
use super::key_shape::KeyShape;
use super::{CACHE_DTYPES, Inputs, KvStorage, MAX_FACTOR, MAX_LEN, Outputs, Problem, QueryStorage};
use crate::dtype::DType;
use crate::error::Error;
use crate::expect::{
    expect_dtype, expect_int_vector, expect_rank, expect_shape, expect_unit_stride, one_of,
    overlaps,
};
use crate::memory::Memory;
use crate::positions::{KeyOffset, MAX_KEY_STRIDE};
use crate::tensor::Tensor;
use crate::variant::QueryOffset;

/// Sequences and query tokens, by the shapes of `q` and `cu_seqlens_q`.
struct QueryShape {
    batch: usize,
    storage: QueryStorage,
    /// Query tokens of the longest sequence.
    max_len: usize,
}

impl<M: Memory> Inputs<'_, M> {
    /// The problem that these inputs pose, once they have been checked.
    pub(crate) fn problem(&self, out_dtype: DType, lse: bool) -> Result<Problem, Error> {
        let Inputs { q, k, v, attention } = self;
        self.check_types()?;
        let queries = self.query_shape()?;
        one_of("batch", queries.batch, 0..MAX_LEN + 1)?;
        let &[query_heads, head_dim] = &q.shape()[q.rank() - 2..] else {
            unreachable!("q has 3 or 4 dimensions")
        };
        let keys = self.key_shape(queries.batch)?;
        self.check_rotary()?;
        self.check_keys_match(head_dim)?;
        let last = k.rank() - 1;
        let mut problem = Problem {
            batch: queries.batch,
            query_heads,
            kv_heads: k.shape()[last - 1],
            head_dim,
            value_dim: v.shape()[last].saturating_mul(v.dtype().values()),
            query_len: queries.max_len,
            kv_len: keys.max_len,
            queries: queries.storage,
            keys: keys.storage,
            dtype: q.dtype(),
            key_dtype: k.dtype(),
            value_dtype: v.dtype(),
            values: attention.values,
            rotary_dim: self.rotary_dim(),
            out_dtype,
            variant: attention.variant(),
            key_lists: self.key_lists(),
            prefix_groups: self.prefix_groups(),
            lse,
            batch_invariant: attention.batch_invariant,
        };
        if !M::READABLE {
            self.bound_lengths(&mut problem);
        }
        self.check_values()?;
        problem.validate()?;
        self.check_variant(&problem)?;
        self.check_list_shapes(&problem)?;
        self.check_page_list_shapes(&problem)?;
        self.check_second_list(&problem)?;
        self.check_prefix_shapes(&problem)?;
        check_scales("k_scales", ("k", k), &attention.k_scales)?;
        check_scales("v_scales", ("v", v), self.value_scales())?;
        self.check_length_shapes(&problem)?;
        check_contents(self, &problem)?;
        if !M::READABLE {
            self.check_mask_covers(problem.query_len, problem.kv_len, &problem)?;
        }
        Ok(problem)
    }

    /// Types and innermost strides of queries, keys and values.
    fn check_types(&self) -> Result<(), Error> {
        let Inputs { q, k, v, .. } = self;
        let floats = [DType::F32, DType::F16, DType::BF16];
        expect_dtype("q", q.dtype(), &floats)?;
        expect_dtype("k", k.dtype(), &CACHE_DTYPES)?;
        expect_dtype("v", v.dtype(), &CACHE_DTYPES)?;
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            expect_unit_stride(name, tensor.shape(), tensor.strides())?;
            if tensor.rank() == 0 || tensor.shape().last() == Some(&0) {
                return Err(Error::argument(
                    name,
                    format!("of shape {:?}", tensor.shape()),
                    "a head dim of 1..=576".to_string(),
                ));
            }
        }
        Ok(())
    }

    /// Batched or ragged queries.
    fn query_shape(&self) -> Result<QueryShape, Error> {
        let q = &self.q;
        let Some(cumulative) = &self.attention.cu_seqlens_q else {
            expect_rank("q", q.shape(), 4, "[B, Lq, Hq, D] (or give cu_seqlens_q)")?;
            let (batch, max_len) = (q.shape()[0], q.shape()[1]);
            return Ok(QueryShape { batch, storage: QueryStorage::Batched, max_len });
        };
        expect_rank("q", q.shape(), 3, "[total, Hq, D], because cu_seqlens_q is given")?;
        let total = q.shape()[0];
        one_of("query rows", total, 0..MAX_LEN + 1)?;
        let entries = cumulative.shape().first().copied().unwrap_or(0);
        if entries == 0 {
            let allowed = "one entry more than there are sequences";
            return Err(Error::argument("cu_seqlens_q", "empty", allowed));
        }
        expect_int_vector("cu_seqlens_q", cumulative, entries, "one more than sequences")?;
        let max_len = longest("cu_seqlens_q", cumulative, total)?;
        Ok(QueryShape { batch: entries - 1, storage: QueryStorage::Ragged { total }, max_len })
    }

    /// Paged, ragged or batched keys, or the slots or pages of lists.
    fn key_shape(&self, batch: usize) -> Result<KeyShape, Error> {
        let Inputs { k, attention, .. } = self;
        self.check_slots_stand_alone()?;
        self.check_pages_stand_alone()?;
        match (&attention.block_table, &attention.cu_seqlens_k) {
            (Some(table), Some(_)) => Err(Error::argument(
                "cu_seqlens_k",
                format!("given together with a block table of shape {:?}", table.shape()),
                "one of the two: paged keys take their lengths from kv_lens",
            )),
            (Some(table), None) => self.paged_keys(table, batch),
            (None, Some(cumulative)) => {
                expect_rank("k", k.shape(), 3, "[total, Hkv, D], because cu_seqlens_k is given")?;
                one_of("key rows", k.shape()[0], 0..MAX_LEN + 1)?;
                let entries = batch + 1;
                expect_int_vector("cu_seqlens_k", cumulative, entries, "one more than sequences")?;
                let max_len = longest("cu_seqlens_k", cumulative, k.shape()[0])?;
                Ok(KeyShape { storage: KvStorage::Ragged, max_len })
            }
            (None, None) if attention.indices_are_slots => {
                self.pool_keys("because indices_are_slots is set")
            }
            (None, None) if attention.page_indices.is_some() => {
                self.pool_keys("because page_indices is given")
            }
            (None, None) => {
                let allowed = "[B, Lk, Hkv, D] (or give cu_seqlens_k or block_table)";
                expect_rank("k", k.shape(), 4, allowed)?;
                expect_shape("k", &k.shape()[..1], &[batch], "one entry per sequence, as q has")?;
                Ok(KeyShape { storage: KvStorage::Batched, max_len: k.shape()[1] })
            }
        }
    }

    /// Keys in the pages that a block table names.
    fn paged_keys(&self, table: &Tensor<M>, batch: usize) -> Result<KeyShape, Error> {
        let k = &self.k;
        let allowed = "[blocks, block_size, Hkv, D], because block_table is given";
        expect_rank("k", k.shape(), 4, allowed)?;
        expect_rank("block_table", table.shape(), 2, "[B, max_blocks]")?;
        expect_dtype("block_table", table.dtype(), &[DType::I32])?;
        expect_unit_stride("block_table", table.shape(), table.strides())?;
        expect_shape("block_table", &table.shape()[..1], &[batch], "one row per sequence")?;
        let block_size = k.shape()[1];
        one_of("block_size", block_size, 1..MAX_LEN + 1)?;
        if self.attention.kv_lens.is_none() {
            let allowed = "[B] i32, because block_table is given";
            return Err(Error::argument("kv_lens", "missing", allowed));
        }
        let max_len = table.shape()[1].saturating_mul(block_size).min(MAX_LEN);
        Ok(KeyShape { storage: KvStorage::Paged { block_size }, max_len })
    }

    /// Checks that values have the shape of the keys, and keys the head dim of the queries.
    fn check_keys_match(&self, head_dim: usize) -> Result<(), Error> {
        let Inputs { k, v, .. } = self;
        expect_rank("v", v.shape(), k.rank(), "as k has")?;
        let last = k.rank() - 1;
        expect_shape("v", &v.shape()[..last], &k.shape()[..last], "as k has, but for the last")?;
        let stored_head_dim = k.shape()[last].saturating_mul(k.dtype().values());
        let rotary_dim = self.rotary_dim();
        if stored_head_dim.saturating_add(rotary_dim) != head_dim {
            let (found, allowed) = match &self.attention.rotary_k {
                None => (String::new(), "as q has"),
                Some(_) => {
                    (format!(" beside {rotary_dim} of rotary_k"), "as q has, in both together")
                }
            };
            return Err(Error::argument(
                "k",
                format!("of head dim {stored_head_dim}{found}"),
                format!("{head_dim}, {allowed}"),
            ));
        }
        Ok(())
    }

    /// Numbers and tensors that change scores.
    fn check_variant(&self, problem: &Problem) -> Result<(), Error> {
        let attention = &self.attention;
        if let Some(scale) = attention.scale
            && !is_within_factor_bound(scale)
        {
            return Err(Error::argument(
                "scale",
                scale,
                "a finite number of magnitude at most 2^60 (1.15e18)",
            ));
        }
        if let Some(cap) = attention.softcap
            && !(1.0 / MAX_FACTOR..=MAX_FACTOR).contains(&cap)
        {
            let allowed = "a finite number above 0, from 2^-60 (8.7e-19) to 2^60 (1.15e18)";
            return Err(Error::argument("softcap", cap, allowed));
        }
        for (name, tensor) in
            [("alibi_slopes", &attention.alibi_slopes), ("sinks", &attention.sinks)]
        {
            let Some(tensor) = tensor else { continue };
            expect_dtype(name, tensor.dtype(), &[DType::F32])?;
            expect_shape(name, tensor.shape(), &[problem.query_heads], "one per query head")?;
            expect_unit_stride(name, tensor.shape(), tensor.strides())?;
        }
        self.check_mask_shapes(problem)
    }

    /// The shapes of a mask and of a tree mask.
    fn check_mask_shapes(&self, problem: &Problem) -> Result<(), Error> {
        let attention = &self.attention;
        if let Some(mask) = &attention.mask {
            expect_rank("mask", mask.shape(), 4, "[B, Hq, Lq, Lk], any of them 1")?;
            expect_unit_stride("mask", mask.shape(), mask.strides())?;
            let full = [problem.batch, problem.query_heads];
            for (i, name) in ["batch", "heads"].iter().enumerate() {
                if mask.shape()[i] != 1 && mask.shape()[i] != full[i] {
                    return Err(Error::argument(
                        "mask",
                        format!("of shape {:?}", mask.shape()),
                        format!("1 or {} in dimension {i} ({name})", full[i]),
                    ));
                }
            }
        }
        if let Some(tree) = &attention.tree_mask {
            expect_dtype("tree_mask", tree.dtype(), &[DType::I32])?;
            expect_unit_stride("tree_mask", tree.shape(), tree.strides())?;
            let words = problem.query_len.div_ceil(32);
            let expected = [problem.batch, problem.query_len, words];
            expect_shape("tree_mask", tree.shape(), &expected, "[B, Lq, ceil(Lq / 32)]")?;
        }
        Ok(())
    }

    /// The types and shapes of lengths and positions.
    fn check_length_shapes(&self, problem: &Problem) -> Result<(), Error> {
        if let Some(lens) = &self.attention.kv_lens {
            expect_int_vector("kv_lens", lens, problem.batch, "one per sequence")?;
        }
        match &self.attention.q_offset {
            QueryOffset::BottomRight => {}
            QueryOffset::Same(offset) => expect_position("q_offset", *offset)?,
            QueryOffset::PerSequence(offsets) => {
                expect_int_vector("q_offset", offsets, problem.batch, "one per sequence")?;
            }
        }
        let Some(positions) = &self.attention.key_positions else { return Ok(()) };
        if matches!(self.attention.q_offset, QueryOffset::BottomRight) {
            let allowed = "given, because key_positions is: the keys here do not tell where the \
                           queries are";
            return Err(Error::argument("q_offset", "not given", allowed));
        }
        one_of("key_stride", positions.stride, 1..MAX_KEY_STRIDE + 1)?;
        match &positions.offset {
            KeyOffset::Same(offset) => expect_position("key_offset", *offset),
            KeyOffset::PerSequence(offsets) => {
                expect_int_vector("key_offset", offsets, problem.batch, "one per sequence")
            }
        }
    }

    /// Lengths that cannot be read here are bounded by every operand with a dimension of queries or
    /// keys.
    fn bound_lengths(&self, problem: &mut Problem) {
        let dimension =
            |tensor: &Option<Tensor<M>>, i: usize| tensor.as_ref()?.shape().get(i).copied();
        // A dimension of 1 stands for every index, and one of 0 is an error to come.
        let mask = |i| dimension(&self.attention.mask, i).filter(|&n| n > 1).unwrap_or(usize::MAX);
        if let QueryStorage::Ragged { .. } = problem.queries {
            let tree = dimension(&self.attention.tree_mask, 1).unwrap_or(usize::MAX);
            problem.query_len = problem.query_len.min(tree).min(mask(2));
        }
        if self.attention.kv_lens.is_some() || problem.keys == KvStorage::Ragged {
            problem.kv_len = problem.kv_len.min(mask(3));
        }
    }

    /// Checks that the mask has a place for each row and key of the longest sequences.
    pub(super) fn check_mask_covers(
        &self,
        longest_query: usize,
        longest_kv: usize,
        problem: &Problem,
    ) -> Result<(), Error> {
        if let Some(mask) = &self.attention.mask {
            for (i, (name, needed)) in
                [("rows", longest_query), ("keys", longest_kv)].into_iter().enumerate()
            {
                let found = mask.shape()[i + 2];
                if found != 1 && found < needed {
                    return Err(Error::argument(
                        "mask",
                        format!("of shape {:?}", mask.shape()),
                        format!("1, or at least {needed}, in dimension {} ({name})", i + 2),
                    ));
                }
            }
            if mask.is_empty() && longest_query > 0 && longest_kv > 0 && problem.batch > 0 {
                return Err(Error::argument(
                    "mask",
                    format!("of shape {:?}", mask.shape()),
                    "no empty dimension",
                ));
            }
        }
        Ok(())
    }
}

/// A position that an `i32` can hold.
fn expect_position(argument: &str, position: i64) -> Result<(), Error> {
    match i32::try_from(position) {
        Ok(_) => Ok(()),
        Err(_) => Err(Error::argument(argument, position, "-2^31..2^31")),
    }
}

impl<M: Memory> Outputs<'_, M> {
    /// Checks shapes and types of the outputs, and that they and the workspace, if there is one,
    /// share no memory with each other or with an input.
    pub(super) fn check(
        &self,
        inputs: &Inputs<M>,
        problem: &Problem,
        workspace: Option<(usize, usize)>,
    ) -> Result<(), Error> {
        let q = &inputs.q;
        let mut expected = [0; 4];
        expected[..q.rank()].copy_from_slice(q.shape());
        expected[q.rank() - 1] = problem.value_dim;
        expect_shape("out", self.out.shape(), &expected[..q.rank()], "as q, with v's head dim")?;
        expect_unit_stride("out", self.out.shape(), self.out.strides())?;
        if let Some(lse) = &self.lse {
            expect_dtype("lse", lse.dtype(), &[DType::F32])?;
            expect_shape(
                "lse",
                lse.shape(),
                &expected[..q.rank() - 1],
                "as out, without its last dimension",
            )?;
        }
        for (name, tensor) in [("out", Some(&self.out)), ("lse", self.lse.as_ref())] {
            if let Some(tensor) = tensor.filter(|tensor| !tensor.is_injective()) {
                return Err(Error::argument(
                    name,
                    format!(
                        "a view of shape {:?} with strides {:?}",
                        tensor.shape(),
                        tensor.strides()
                    ),
                    "strides that give every element a place of its own",
                ));
            }
        }
        let apart = |(name, range), (other, other_range)| match overlaps(range, other_range) {
            true => {
                let found = format!("memory shared with `{other}`");
                Err(Error::argument(name, found, "memory of its own"))
            }
            false => Ok(()),
        };
        let lse = self.lse.as_ref().and_then(|lse| lse.byte_range());
        let written = [("workspace", workspace), ("out", self.out.byte_range()), ("lse", lse)];
        for (i, &one) in written.iter().enumerate() {
            written[i + 1..].iter().try_for_each(|&other| apart(one, other))?;
        }
        for (name, tensor) in inputs.named() {
            let read = (name, tensor.byte_range());
            written.iter().try_for_each(|&one| apart(one, read))?;
        }
        Ok(())
    }

    /// Checks that a workspace, which runs write to, shares no memory with any operand.
    pub(crate) fn check_workspace(
        &self,
        inputs: &Inputs<M>,
        address: usize,
        bytes: usize,
    ) -> Result<(), Error> {
        let workspace = (bytes > 0).then(|| (address, address.saturating_add(bytes)));
        let read = inputs.named().map(|(name, tensor)| (name, tensor.byte_range()));
        let lse = self.lse.as_ref().and_then(|lse| lse.byte_range());
        let written = [("out", self.out.byte_range()), ("lse", lse)];
        match read.chain(written).find(|(_, range)| overlaps(workspace, *range)) {
            None => Ok(()),
            Some((name, _)) => Err(Error::argument(
                "workspace",
                format!("memory shared with `{name}`"),
                "memory of its own",
            )),
        }
    }
}
