//! The arguments of an attention call, read from Python, as regard's operands. Only this file knows
//! how [`Attention`] is filled in.

use crate::array::{self, Array, Place};
use crate::errors::{Fault, argument};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use regard::{
    Attention, DType, Error, Host, Inputs, KeyOffset, KeyPositions, Memory, Outputs, QueryOffset,
    Tensor, TensorMut, Window,
};
use std::convert::Infallible;

/// Views of arrays in one kind of memory.
pub trait View: Memory {
    /// A view that is read.
    ///
    /// # Safety
    /// The array is in this memory, and outlives the work that uses the view.
    unsafe fn input(array: &Array) -> Result<Tensor<'_, Self>, Error>;

    /// A view that is written.
    ///
    /// # Safety
    /// As above, and nothing else uses the memory meanwhile.
    unsafe fn output(array: &Array) -> Result<TensorMut<'_, Self>, Error>;
}

/// A view of an array that may not be there.
///
/// # Safety
/// As [`View::input`].
pub unsafe fn optional<M: View>(array: &Option<Array>) -> Result<Option<Tensor<'_, M>>, Error> {
    // SAFETY: passed on.
    array.as_ref().map(|array| unsafe { M::input(array) }).transpose()
}

/// Names the argument in errors about views.
fn with_argument(name: &str, error: Error) -> Error {
    match error {
        Error::Argument { argument, found, allowed } if argument != name => {
            Error::Argument { argument: format!("{name}.{argument}"), found, allowed }
        }
        other => other,
    }
}

impl View for Host {
    unsafe fn input(array: &Array) -> Result<Tensor<'_, Host>, Error> {
        // SAFETY: `Array` has checked the alignment; the producer vouches for the memory, which the
        // array holds.
        unsafe { Tensor::from_raw(array.data, array.dtype, array.shape(), Some(array.strides())) }
            .map_err(|error| with_argument(array.name, error))
    }

    unsafe fn output(array: &Array) -> Result<TensorMut<'_, Host>, Error> {
        // SAFETY: as above; it may be written (`Array::read_mut`).
        unsafe {
            TensorMut::from_raw(array.data, array.dtype, array.shape(), Some(array.strides()))
        }
        .map_err(|error| with_argument(array.name, error))
    }
}

impl View for regard::cuda::DeviceMemory {
    unsafe fn input(array: &Array) -> Result<Tensor<'_, Self>, Error> {
        let (address, strides) = (array.data as u64, Some(array.strides()));
        // SAFETY: the producer vouches for the memory, which is freed in the order of the stream.
        unsafe { Tensor::from_device_address(address, array.dtype, array.shape(), strides) }
            .map_err(|error| with_argument(array.name, error))
    }

    unsafe fn output(array: &Array) -> Result<TensorMut<'_, Self>, Error> {
        let (address, strides) = (array.data as u64, Some(array.strides()));
        // SAFETY: as above.
        unsafe { TensorMut::from_device_address(address, array.dtype, array.shape(), strides) }
            .map_err(|error| with_argument(array.name, error))
    }
}

/// The layout of arrays, and bounds of lengths that only a GPU knows.
#[derive(Debug, Clone, Copy, Default)]
pub struct Choices {
    /// Format of keys that are bytes, if it is one that arrays cannot name.
    pub k_format: Option<DType>,
    /// The format of bytes of values, likewise.
    pub v_format: Option<DType>,
    /// The head dim of values that are the first dims of keys: there is no array of them.
    pub value_dim: Option<usize>,
    /// Whether q, k, v and out have heads before tokens.
    pub heads_first: bool,
    /// Whether pages have heads before slots.
    pub pages_heads_first: bool,
    /// The longest query of a ragged batch whose lengths only a GPU knows.
    pub max_query_len: Option<usize>,
    /// Maximum keys of a sequence, likewise.
    pub max_kv_len: Option<usize>,
}

/// The operands that are fixed when a plan is made.
#[derive(Debug, Clone, Copy, Default)]
pub struct Fixed {
    /// Numbers; there is no array, and every run has its own offset.
    attention: Attention<Infallible>,
    choices: Choices,
}

/// Arguments that are not arrays to compute on, of one call.
#[derive(Default)]
pub struct Extra<'py> {
    /// Destination of the output.
    pub out: Option<Bound<'py, PyAny>>,
    /// Destination of the log-sum-exp, or whether it is asked for.
    pub lse: Option<Bound<'py, PyAny>>,
    /// The stream.
    pub stream: Option<Bound<'py, PyAny>>,
    /// The type of the output.
    pub out_dtype: Option<DType>,
    /// Threads of a CPU plan.
    pub threads: Option<usize>,
    /// Whether the run reads the schedule that `Plan.schedule` has left.
    pub scheduled: bool,
    /// Whether the run reads the tile map that `Plan.map_mask` has left.
    pub mapped: bool,
}

/// The argument of that name, if it is an array and nothing else.
fn tensor<'a>(
    attention: &'a mut Attention<Array>,
    name: &str,
) -> Option<(&'static str, &'a mut Option<Array>)> {
    Some(match name {
        "kv_lens" => ("kv_lens", &mut attention.kv_lens),
        "block_table" => ("block_table", &mut attention.block_table),
        "cu_seqlens_q" => ("cu_seqlens_q", &mut attention.cu_seqlens_q),
        "cu_seqlens_k" => ("cu_seqlens_k", &mut attention.cu_seqlens_k),
        "mask" => ("mask", &mut attention.mask),
        "alibi_slopes" => ("alibi_slopes", &mut attention.alibi_slopes),
        "sinks" => ("sinks", &mut attention.sinks),
        "tree_mask" => ("tree_mask", &mut attention.tree_mask),
        "k_scales" => ("k_scales", &mut attention.k_scales),
        "v_scales" => ("v_scales", &mut attention.v_scales),
        "rotary_k" => ("rotary_k", &mut attention.rotary_k),
        "key_indices" => ("key_indices", &mut attention.key_indices),
        "key_counts" => ("key_counts", &mut attention.key_counts),
        "page_indices" => ("page_indices", &mut attention.page_indices),
        "page_list_lens" => ("page_list_lens", &mut attention.page_list_lens),
        "page_numbers" => ("page_numbers", &mut attention.page_numbers),
        "second_k" => ("second_k", &mut attention.second_k),
        "second_v" => ("second_v", &mut attention.second_v),
        "second_k_scales" => ("second_k_scales", &mut attention.second_k_scales),
        "second_v_scales" => ("second_v_scales", &mut attention.second_v_scales),
        "second_indices" => ("second_indices", &mut attention.second_indices),
        "second_counts" => ("second_counts", &mut attention.second_counts),
        "prefix_groups" => ("prefix_groups", &mut attention.prefix_groups),
        "prefix_lens" => ("prefix_lens", &mut attention.prefix_lens),
        _ => return None,
    })
}

/// The positions of keys, to fill in: `key_offset` or `key_stride` gives them.
fn key_positions(attention: &mut Attention<Array>) -> &mut KeyPositions<Array> {
    let plain = KeyPositions { offset: KeyOffset::Same(0), stride: 1 };
    attention.key_positions.get_or_insert(plain)
}

/// Arguments that a function takes.
#[derive(Debug, Clone, Copy)]
pub struct Takes {
    /// The function's name.
    pub function: &'static str,
    /// The contents of [`Fixed`].
    pub fixed: bool,
    /// `out`.
    pub out: bool,
    /// `threads`.
    pub threads: bool,
    /// `stream`.
    pub stream: bool,
    /// `scheduled` and `mapped`.
    pub prepared: bool,
}

impl Takes {
    /// None of them.
    pub const NOTHING: Takes = Takes {
        function: "",
        fixed: false,
        out: false,
        threads: false,
        stream: false,
        prepared: false,
    };
}

/// An attention call's arguments.
pub struct Call<'py> {
    /// Queries.
    pub q: Array,
    /// Keys.
    pub k: Array,
    /// Values, unless they are the first dims of keys.
    pub v: Option<Array>,
    /// All other operands.
    pub attention: Attention<Array>,
    /// The layout of arrays.
    pub choices: Choices,
    /// The others.
    pub extra: Extra<'py>,
}

/// q, k and v as Python has them.
#[derive(Clone, Copy)]
pub struct Main<'a, 'py> {
    /// Queries.
    pub q: &'a Bound<'py, PyAny>,
    /// Keys.
    pub k: &'a Bound<'py, PyAny>,
    /// Values, or `None`.
    pub v: &'a Bound<'py, PyAny>,
}

impl<'py> Call<'py> {
    /// Reads a call's arguments; `fixed` is a plan's, or the defaults.
    ///
    /// # Errors
    /// If one is unknown, of the wrong type, or on another device than q.
    pub fn read(
        takes: Takes,
        main: Main<'_, 'py>,
        options: Option<&Bound<'py, PyDict>>,
        fixed: Fixed,
    ) -> PyResult<Call<'py>> {
        let mut call = Call {
            q: Array::read("q", main.q)?,
            k: Array::read("k", main.k)?,
            v: if main.v.is_none() { None } else { Some(Array::read("v", main.v)?) },
            attention: fixed.attention.map(|_, array| match array {}),
            choices: fixed.choices,
            extra: Extra::default(),
        };
        if let Some(options) = options {
            for (name, value) in options.iter() {
                let name = name.cast::<PyString>()?;
                call.set(takes, name.to_str()?, value)?;
            }
        }
        call.expect_values()?;
        call.lay_out()?;
        call.expect_one_place()?;
        Ok(call)
    }

    /// The fixed operands of a plan of this call.
    pub fn fixed(&self) -> Fixed {
        let Ok(numbers) = self.attention.as_ref().try_filter_map(|_, _| Ok::<_, Infallible>(None));
        let key_positions = self
            .attention
            .key_positions
            .as_ref()
            .map(|positions| KeyPositions { offset: KeyOffset::Same(0), stride: positions.stride });
        let q_offset = QueryOffset::BottomRight;
        let attention = Attention { q_offset, key_positions, ..numbers };
        Fixed { attention, choices: self.choices }
    }

    fn set(&mut self, takes: Takes, name: &str, value: Bound<'py, PyAny>) -> PyResult<()> {
        let Call { attention, choices, extra, .. } = self;
        let array = |name| {
            if value.is_none() { Ok(None) } else { Array::read(name, &value).map(Some) }
        };
        if let Some((name, tensor)) = tensor(attention, name) {
            *tensor = array(name)?;
            return Ok(());
        }
        match name {
            "q_offset" => {
                // A GPU's array of one element converts to a number too, but waits for the GPU.
                let offset = if value.is_none() || array::is_array(&value)? {
                    array("q_offset")?.map(QueryOffset::PerSequence)
                } else {
                    number("q_offset", &value)?.map(QueryOffset::Same)
                };
                attention.q_offset = offset.unwrap_or(QueryOffset::BottomRight);
            }
            "key_offset" => {
                let offset = if value.is_none() || array::is_array(&value)? {
                    array("key_offset")?.map(KeyOffset::PerSequence)
                } else {
                    number("key_offset", &value)?.map(KeyOffset::Same)
                };
                if let Some(offset) = offset {
                    key_positions(attention).offset = offset;
                }
            }
            "key_stride" if takes.fixed => {
                if let Some(stride) = number("key_stride", &value)? {
                    key_positions(attention).stride = stride;
                }
            }
            "lse" => extra.lse = given(value),
            "out" if takes.out => extra.out = given(value),
            "stream" if takes.stream => extra.stream = given(value),
            "threads" if takes.threads => extra.threads = number("threads", &value)?,
            "scheduled" if takes.prepared => extra.scheduled = value.is_truthy()?,
            "mapped" if takes.prepared => extra.mapped = value.is_truthy()?,
            "scale" if takes.fixed => attention.scale = number("scale", &value)?,
            "causal" if takes.fixed => attention.causal = value.is_truthy()?,
            "window" if takes.fixed => attention.window = window(&value)?,
            "chunk" if takes.fixed => attention.chunk = number("chunk", &value)?,
            "softcap" if takes.fixed => attention.softcap = number("softcap", &value)?,
            "batch_invariant" if takes.fixed => attention.batch_invariant = value.is_truthy()?,
            "indices_are_slots" if takes.fixed => {
                attention.indices_are_slots = value.is_truthy()?;
            }
            "kv_format" if takes.fixed => {
                let format = format("kv_format", &value)?;
                choices.k_format = choices.k_format.or(format);
                choices.v_format = choices.v_format.or(format);
            }
            "k_format" if takes.fixed => {
                choices.k_format = format("k_format", &value)?.or(choices.k_format);
            }
            "v_format" if takes.fixed => {
                choices.v_format = format("v_format", &value)?.or(choices.v_format);
            }
            "value_dim" if takes.fixed => choices.value_dim = number("value_dim", &value)?,
            "layout" if takes.fixed => {
                choices.heads_first = one_of_two("layout", &value, ["bshd", "bhsd"])?;
            }
            "kv_layout" if takes.fixed => {
                choices.pages_heads_first = is_hnd(&value)?;
            }
            "max_query_len" if takes.fixed => {
                choices.max_query_len = number("max_query_len", &value)?;
            }
            "max_kv_len" if takes.fixed => choices.max_kv_len = number("max_kv_len", &value)?,
            "out_dtype" if takes.fixed => extra.out_dtype = out_dtype(&value)?,
            _ => {
                let function = takes.function;
                let text = format!("{function}() got an unexpected keyword argument '{name}'");
                return Err(PyTypeError::new_err(text));
            }
        }
        Ok(())
    }

    /// Values are an array, or the first dims of keys.
    fn expect_values(&self) -> Result<(), Fault> {
        let Choices { k_format, v_format, value_dim, .. } = self.choices;
        match (&self.v, value_dim) {
            (Some(_), None) => Ok(()),
            (None, None) => Err(argument("v", "None", "an array, or None with value_dim")),
            (Some(_), Some(_)) => {
                Err(argument("v", "given together with value_dim", "one of the two"))
            }
            (None, Some(_)) if v_format != k_format => {
                Err(argument("v_format", "given", "the format of keys, of which values are a part"))
            }
            (None, Some(_)) => Ok(()),
        }
    }

    /// Brings dimensions into regard's order.
    fn lay_out(&mut self) -> Result<(), Fault> {
        let Choices { k_format, v_format, .. } = self.choices;
        k_format.map_or(Ok(()), |format| self.k.stored_as(format))?;
        if let (Some(v), Some(format)) = (&mut self.v, v_format) {
            v.stored_as(format)?;
        }
        let Attention { rotary_k, second_k, second_v, .. } = &mut self.attention;
        for (pool, format) in [(rotary_k, k_format), (second_k, k_format), (second_v, v_format)] {
            if let (Some(pool), Some(format)) = (pool, format) {
                pool.stored_as(format)?;
            }
        }
        let paged = self.attention.block_table.is_some()
            || self.attention.indices_are_slots
            || self.attention.page_indices.is_some();
        if self.choices.heads_first {
            if self.attention.cu_seqlens_q.is_none() {
                self.q.swap_heads(4, "bhsd")?;
            }
            if self.attention.cu_seqlens_k.is_none() && !paged {
                self.swap_keys("bhsd")?;
            }
        }
        if paged && self.choices.pages_heads_first {
            self.swap_keys("hnd")?;
        }
        Ok(())
    }

    /// Tokens before heads, in keys, values and their scales.
    fn swap_keys(&mut self, layout: &str) -> Result<(), Fault> {
        self.k.swap_heads(4, layout)?;
        self.v.as_mut().map_or(Ok(()), |v| v.swap_heads(4, layout))?;
        let Attention {
            k_scales,
            v_scales,
            rotary_k,
            second_k,
            second_v,
            second_k_scales,
            second_v_scales,
            ..
        } = &mut self.attention;
        let mut pools = [rotary_k, second_k, second_v].into_iter().flatten();
        pools.try_for_each(|pool| pool.swap_heads(4, layout))?;
        let scales = [k_scales, v_scales, second_k_scales, second_v_scales];
        scales.into_iter().flatten().try_for_each(|scales| scales.swap_heads(3, layout))
    }

    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let optional = self.attention.named().map(|(_, array)| array);
        [&self.q, &self.k].into_iter().chain(&self.v).chain(optional)
    }

    fn expect_one_place(&self) -> Result<(), Fault> {
        self.arrays().try_for_each(|array| expect_place(array, self.q.place, "as q"))
    }

    /// Device of the call.
    pub fn place(&self) -> Place {
        self.q.place
    }

    /// Whether all memory is freed in the order of the stream.
    pub fn frees_in_stream_order(&self) -> bool {
        self.arrays().all(|array| array.framework.frees_in_stream_order())
    }

    /// Whether queries are ragged.
    pub fn is_ragged(&self) -> bool {
        self.attention.cu_seqlens_q.is_some()
    }

    /// The shape of the output in regard's order.
    pub fn out_shape(&self) -> Vec<usize> {
        let mut shape = self.q.shape().to_vec();
        let dim_of = |v: &Array| Some(v.shape().last()?.saturating_mul(v.dtype.values()));
        let dim = self.v.as_ref().map_or(self.choices.value_dim, dim_of);
        if let (Some(last), Some(dim)) = (shape.last_mut(), dim) {
            *last = dim;
        }
        shape
    }

    /// The operands.
    ///
    /// # Safety
    /// All arrays are in this memory.
    pub unsafe fn inputs<M: View>(&self) -> Result<Inputs<'_, M>, Error> {
        // SAFETY: passed on, for all of them.
        unsafe {
            let attention = self.attention.as_ref().try_map(|_, array| M::input(array))?;
            let (q, k) = (M::input(&self.q)?, M::input(&self.k)?);
            match &self.v {
                Some(v) => Ok(Inputs::new(q, k, M::input(v)?, attention)),
                None => Inputs::latent(q, k, self.choices.value_dim.unwrap_or(0), attention),
            }
        }
    }
}

/// Destinations of a call's results.
pub struct Results {
    /// The output, in regard's order.
    pub out: Array,
    /// The log-sum-exp, in regard's order: `[B, Lq, Hq]`.
    pub lse: Option<Array>,
}

impl Results {
    /// The outputs.
    ///
    /// # Safety
    /// As [`View::output`].
    pub unsafe fn outputs<M: View>(&self) -> Result<Outputs<'_, M>, Error> {
        // SAFETY: passed on.
        unsafe {
            let lse = self.lse.as_ref().map(|lse| M::output(lse)).transpose()?;
            Ok(Outputs { out: M::output(&self.out)?, lse })
        }
    }
}

/// An error unless the array is there.
///
/// # Errors
/// If it is on another device.
pub fn expect_place(array: &Array, place: Place, why: &str) -> Result<(), Fault> {
    if array.place == place {
        return Ok(());
    }
    Err(argument(array.name, format!("on {}", array.place), format!("{place}, {why}")))
}

fn number<'py, T>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py>,
{
    if value.is_none() {
        return Ok(None);
    }
    value.extract().map(Some).map_err(|_| {
        let found = value.repr().map_or_else(|_| "unreadable".into(), |text| text.to_string());
        argument(name, found, "a number").into()
    })
}

fn given(value: Bound<'_, PyAny>) -> Option<Bound<'_, PyAny>> {
    (!value.is_none()).then_some(value)
}

/// `None`, or (left, right), each a number or `None` for unbounded.
fn window(value: &Bound<'_, PyAny>) -> PyResult<Window> {
    if value.is_none() {
        return Ok(Window::default());
    }
    let Ok((left, right)) = value.extract() else {
        let allowed = "None or (left, right), each a number of keys or None";
        return Err(argument("window", value.repr()?, allowed).into());
    };
    Ok(Window { left, right })
}

/// Whether a word is the second of two.
fn one_of_two(name: &str, value: &Bound<'_, PyAny>, words: [&str; 2]) -> PyResult<bool> {
    let word = value.extract::<String>();
    match words.iter().position(|known| word.as_ref().is_ok_and(|word| word == known)) {
        Some(place) => Ok(place == 1),
        None => {
            let [first, second] = words;
            let allowed = format!("\"{first}\" or \"{second}\"");
            Err(argument(name, value.repr()?, allowed).into())
        }
    }
}

/// Whether pages have heads before slots.
///
/// # Errors
/// If the word is neither "nhd" nor "hnd".
pub fn is_hnd(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    one_of_two("kv_layout", value, ["nhd", "hnd"])
}

/// A word of [`DType::name`], or `None` for the type of q.
pub fn out_dtype(value: &Bound<'_, PyAny>) -> PyResult<Option<DType>> {
    if value.is_none() {
        return Ok(None);
    }
    dtype("out_dtype", value).map(Some)
}

/// A cache's format by its name, or `None` for the array's own type.
///
/// # Errors
/// If it is none.
pub fn format(argument_name: &str, value: &Bound<'_, PyAny>) -> PyResult<Option<DType>> {
    if value.is_none() {
        return Ok(None);
    }
    let word = value.str()?;
    match word.to_str()? {
        "e4m3" => Ok(Some(DType::E4M3)),
        "e5m2" => Ok(Some(DType::E5M2)),
        "i8" => Ok(Some(DType::I8)),
        "q8_0" => Ok(Some(DType::Q8_0)),
        "q4_0" => Ok(Some(DType::Q4_0)),
        "mla656" => Ok(Some(DType::Mla656)),
        _ => {
            let allowed = "\"e4m3\", \"e5m2\", \"i8\", \"q8_0\", \"q4_0\" or \"mla656\"";
            Err(argument(argument_name, value.repr()?, allowed).into())
        }
    }
}

/// A floating type by its name.
///
/// # Errors
/// If it has none.
pub fn dtype(argument_name: &str, value: &Bound<'_, PyAny>) -> PyResult<DType> {
    let name = value.str()?;
    match name.to_str()?.trim_start_matches("torch.") {
        "f32" | "float32" => Ok(DType::F32),
        "f16" | "float16" => Ok(DType::F16),
        "bf16" | "bfloat16" => Ok(DType::BF16),
        _ => Err(argument(argument_name, value.repr()?, "\"f32\", \"f16\" or \"bf16\"").into()),
    }
}
