//! One owned attention problem.

use crate::array::Array;
use regard::{Attention, DType, Error, Inputs, MAX_HEAD_DIM, Outputs, Tensor, Values};

/// The dimension order of `q`, `k`, `v` and `out` if they have a batch dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Layout {
    /// `[batch, sequence, head, dim]`.
    #[default]
    Bshd,
    /// `[batch, head, sequence, dim]`.
    Bhsd,
}

/// The dimension order of paged `k` and `v`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum KvLayout {
    /// `[block, slot, head, dim]`.
    #[default]
    Nhd,
    /// `[block, head, slot, dim]`.
    Hnd,
}

/// One attention problem with its data: the contents of a case file. Fields and array shapes are
/// the same as in the file (`docs/case-files.md`).
#[derive(Debug, Clone)]
pub struct Case {
    /// Its name in reports; a file's name without its extension.
    pub name: String,
    /// The dimension order of `q`, `k`, `v` and `out`.
    pub layout: Layout,
    /// The dimension order of paged `k` and `v`.
    pub kv_layout: KvLayout,
    /// `[B, Lq, Hq, Dk]` or `[B, Hq, Lq, Dk]`, or `[total, Hq, Dk]` with `cu_seqlens_q`.
    pub q: Array,
    /// `[B, Lk, Hkv, Dk]` or `[B, Hkv, Lk, Dk]`, `[total, Hkv, Dk]` with `cu_seqlens_k`, or a pool
    /// with `block_table`.
    pub k: Array,
    /// As `k`, with Dv. If values are a prefix of the keys, only Dv counts ([`Array::prefix`]).
    pub v: Array,
    /// Everything else. A mask here may have fewer than 4 dimensions: they are aligned at the last,
    /// missing ones are 1. Batch invariance is not part of a file.
    pub attention: Attention<Array>,
    /// The output of another implementation.
    pub expected_out: Option<Array>,
    /// The log-sum-exp of another implementation: the shape of `out` without its last dimension.
    pub expected_lse: Option<Array>,
    /// The type of the output. `None` is the type of `expected_out`, or else of `q`. Not part of a
    /// file.
    pub out_dtype: Option<DType>,
}

/// The outputs of a case, in the case's layout.
#[derive(Debug, Clone)]
pub struct Output {
    /// The shape of `q`, with Dv.
    pub out: Array,
    /// `f32`, the shape of `out` without its last dimension.
    pub lse: Array,
}

impl Case {
    /// A case of these operands, everything else at its default.
    pub fn new(name: impl Into<String>, q: Array, k: Array, v: Array) -> Case {
        Case {
            name: name.into(),
            layout: Layout::default(),
            kv_layout: KvLayout::default(),
            q,
            k,
            v,
            attention: Attention::default(),
            expected_out: None,
            expected_lse: None,
            out_dtype: None,
        }
    }

    /// The case as regard takes it: views in regard's dimension order. Shapes are not yet checked
    /// against each other; planning does that.
    ///
    /// # Errors
    /// If an option does not fit the arrays it is about, or an array has too many dimensions.
    pub fn inputs(&self) -> Result<Inputs<'_>, Error> {
        if self.kv_layout == KvLayout::Hnd && !self.has_pool() {
            return Err(Error::argument(
                "kv_layout",
                "\"hnd\" without a block_table",
                "hnd with paged k and v",
            ));
        }
        let attention = self.attention.as_ref().try_map(|name, array| match name {
            "mask" => mask_view(array),
            "k_scales" | "v_scales" | "rotary_k" | "second_k" | "second_v" | "second_k_scales"
            | "second_v_scales" => Ok(self.key_order(array.view()?)),
            _ => array.view(),
        })?;
        let keys = |array| -> Result<Tensor<'_>, Error> { Ok(self.key_order(Array::view(array)?)) };
        let (q, k) = (self.query_order(self.q.view()?), keys(&self.k)?);
        match self.attention.values {
            Values::KeyPrefix => Inputs::latent(q, k, self.value_dim(), attention),
            _ => Ok(Inputs::new(q, k, keys(&self.v)?, attention)),
        }
    }

    /// Dv; 0 if `v` has no dimensions.
    pub fn value_dim(&self) -> usize {
        self.v.shape().last().map_or(0, |last| last.saturating_mul(self.v.dtype().values()))
    }

    /// The type of the output.
    pub fn out_dtype(&self) -> DType {
        let expected = self.expected_out.as_ref().map(Array::dtype);
        self.out_dtype.or(expected).unwrap_or(self.q.dtype())
    }

    /// Runs the case: `runner` is given the operands and outputs to fill, which hold NaN until
    /// then.
    ///
    /// # Errors
    /// If the case breaks the contract, or the runner's error.
    pub fn run(
        &self,
        mut runner: impl FnMut(&Inputs, &mut Outputs) -> Result<(), Error>,
    ) -> Result<Output, Error> {
        let inputs = self.inputs()?;
        let mut shape = self.q.shape().to_vec();
        let value_dim = self.value_dim();
        // Before anything is allocated for it: an empty `v` can claim any head dim.
        if !(1..=MAX_HEAD_DIM).contains(&value_dim) {
            let found = format!("of shape {:?}", self.v.shape());
            return Err(Error::argument("v", found, format!("a head dim of 1..={MAX_HEAD_DIM}")));
        }
        if shape.pop().is_none() {
            return Err(Error::argument("q", "of shape []", "3 or 4 dimensions"));
        }
        let mut lse = Array::unwritten(DType::F32, &shape);
        shape.push(value_dim);
        let mut out = Array::unwritten(self.out_dtype(), &shape);

        let bhsd = self.is_bhsd(shape.len());
        let (mut out_view, mut lse_view) = (out.view_mut()?, lse.view_mut()?);
        if bhsd {
            (out_view, lse_view) = (out_view.bhsd(), lse_view.permute([0, 2, 1]));
        }
        runner(&inputs, &mut Outputs { out: out_view, lse: Some(lse_view) })?;
        Ok(Output { out, lse })
    }

    /// `q` or `out` (or `lse`, which has a dimension less) of this case's layout in regard's order.
    pub fn query_order<'a>(&self, tensor: Tensor<'a>) -> Tensor<'a> {
        match (self.layout, self.attention.cu_seqlens_q.is_some(), tensor.rank()) {
            (Layout::Bhsd, false, 4) => tensor.bhsd(),
            (Layout::Bhsd, false, 3) => tensor.permute([0, 2, 1]),
            _ => tensor,
        }
    }

    fn is_bhsd(&self, rank: usize) -> bool {
        self.layout == Layout::Bhsd && self.attention.cu_seqlens_q.is_none() && rank == 4
    }

    /// Whether `k` and `v` are pools of pages.
    fn has_pool(&self) -> bool {
        let attention = &self.attention;
        attention.block_table.is_some()
            || attention.indices_are_slots
            || attention.page_indices.is_some()
    }

    /// `k` or `v` (or their scales, which have a dimension less) in regard's order.
    fn key_order<'a>(&self, tensor: Tensor<'a>) -> Tensor<'a> {
        let swap = match &self.attention.cu_seqlens_k {
            _ if self.has_pool() => self.kv_layout == KvLayout::Hnd,
            Some(_) => false,
            None => self.layout == Layout::Bhsd,
        };
        match (swap, tensor.rank()) {
            (true, 4) => tensor.bhsd(),
            (true, 3) => tensor.permute([0, 2, 1]),
            _ => tensor,
        }
    }
}

/// The mask with dimensions of 1 put before its dimensions.
fn mask_view(mask: &Array) -> Result<Tensor<'_>, Error> {
    let view = mask.view()?;
    let missing = 4usize.saturating_sub(mask.shape().len());
    if missing == 0 {
        return Ok(view);
    }
    let mut shape = vec![1; missing];
    shape.extend(view.shape());
    let mut strides = vec![0; missing];
    strides.extend(view.strides());
    mask.reshaped(&shape, &strides)
}
