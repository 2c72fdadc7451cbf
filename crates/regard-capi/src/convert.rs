//! From the structs of C to regard's own, every number and pointer checked.

use crate::lists::{key_lists, list_options};
use crate::status::Failure;
use crate::types::{self, *};
use regard::{
    Attention, DType, Error, Host, Inputs, KeyLayout, KeyOffset, KeyPositions, KvStorage,
    MAX_KEY_STRIDE, Memory, Outputs, QueryOffset, QueryStorage, TensorMut, Values, Window,
};
use std::ffi::c_void;
use std::mem::MaybeUninit;

/// An argument error.
pub fn bad(
    argument: impl Into<String>,
    found: impl std::fmt::Display,
    allowed: impl Into<String>,
) -> Failure {
    Error::argument(argument, found, allowed).into()
}

/// A struct whose first field is its size in bytes, as the caller knows it. Every one is plain data
/// that all zeros are a value of.
///
/// # Safety
/// The type is `repr(C)`, its first field is `size: usize`, and any bytes are a value of it.
/// Function pointers are `Option`s.
pub unsafe trait Versioned: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// Its size in the first version of the ABI.
    const FIRST_SIZE: usize;
}

// SAFETY: see the definitions.
unsafe impl Versioned for Operands {
    const NAME: &'static str = "regard_operands";
    const FIRST_SIZE: usize = std::mem::offset_of!(Operands, k_scales);
}
// SAFETY: see the definitions.
unsafe impl Versioned for types::Problem {
    const NAME: &'static str = "regard_problem";
    const FIRST_SIZE: usize = std::mem::offset_of!(types::Problem, chunk);
}
// SAFETY: see the definitions.
unsafe impl Versioned for Append {
    const NAME: &'static str = "regard_append";
    const FIRST_SIZE: usize = std::mem::offset_of!(Append, k_scales);
}
// SAFETY: see the definitions.
unsafe impl Versioned for types::Merge {
    const NAME: &'static str = "regard_merge";
    const FIRST_SIZE: usize = size_of::<types::Merge>();
}
// SAFETY: see the definitions.
unsafe impl Versioned for types::BlockCopies {
    const NAME: &'static str = "regard_block_copies";
    const FIRST_SIZE: usize = size_of::<types::BlockCopies>();
}
// SAFETY: see the definitions.
unsafe impl Versioned for types::Device {
    const NAME: &'static str = "regard_device";
    const FIRST_SIZE: usize = size_of::<types::Device>();
}
// SAFETY: see the definitions.
unsafe impl Versioned for types::TileMap {
    const NAME: &'static str = "regard_tile_map";
    const FIRST_SIZE: usize = size_of::<types::TileMap>();
}

/// The size in the caller's struct, if that makes sense.
///
/// # Safety
/// `given` is null, or points to at least a `size_t`.
unsafe fn size_of_given<T: Versioned>(argument: &str, given: *const T) -> Result<usize, Failure> {
    if given.is_null() {
        return Err(bad(argument, "null", format!("a pointer to a {}", T::NAME)));
    }
    // SAFETY: the caller promises it.
    let size = unsafe { given.cast::<usize>().read_unaligned() };
    // A forgotten size is a small or a wild number.
    const MOST: usize = 1 << 16;
    if !(T::FIRST_SIZE..=MOST).contains(&size) {
        return Err(bad(
            format!("{argument}.size"),
            size,
            format!("sizeof({}), {}", T::NAME, size_of::<T>()),
        ));
    }
    Ok(size)
}

/// Copies a caller's struct. Fields that the caller does not know yet become zero; fields that this
/// library does not know yet must be zero.
///
/// # Safety
/// `given` is null, or points to as many readable bytes as in its `size` field.
pub unsafe fn read<T: Versioned>(argument: &str, given: *const T) -> Result<T, Failure> {
    // SAFETY: passed on.
    let size = unsafe { size_of_given(argument, given)? };
    let known = size.min(size_of::<T>());
    // SAFETY: `size` bytes can be read, and any bytes are a value.
    unsafe {
        let beyond = std::slice::from_raw_parts(given.cast::<u8>().add(known), size - known);
        if beyond.iter().any(|&byte| byte != 0) {
            let found = format!("{size} with fields in use that this library does not know");
            return Err(bad(
                format!("{argument}.size"),
                found,
                format!("{}, or zeros beyond it", size_of::<T>()),
            ));
        }
        let mut copy = MaybeUninit::<T>::zeroed();
        given.cast::<u8>().copy_to_nonoverlapping(copy.as_mut_ptr().cast::<u8>(), known);
        Ok(copy.assume_init())
    }
}

/// Writes a struct to the caller's, as much of it as the caller knows. Its `size` field stays the
/// caller's.
///
/// # Safety
/// `given` is null, or points to as many writable bytes as in its `size` field.
pub unsafe fn write<T: Versioned>(argument: &str, given: *mut T, value: &T) -> Result<(), Failure> {
    // SAFETY: passed on.
    let size = unsafe { size_of_given(argument, given)? };
    let header = size_of::<usize>();
    let known = size.min(size_of::<T>());
    // SAFETY: `size` bytes can be written; the value has `known` of them.
    unsafe {
        given.cast::<u8>().add(known).write_bytes(0, size - known);
        let value = (value as *const T).cast::<u8>();
        value.add(header).copy_to_nonoverlapping(given.cast::<u8>().add(header), known - header);
    }
    Ok(())
}

/// The element type of that number.
fn dtype(argument: &str, number: i32) -> Result<DType, Failure> {
    use types::DType as Known;
    Ok(match number {
        n if n == Known::F32 as i32 => DType::F32,
        n if n == Known::F16 as i32 => DType::F16,
        n if n == Known::Bf16 as i32 => DType::BF16,
        n if n == Known::I32 as i32 => DType::I32,
        n if n == Known::Bool as i32 => DType::Bool,
        n if n == Known::E4m3 as i32 => DType::E4M3,
        n if n == Known::E5m2 as i32 => DType::E5M2,
        n if n == Known::I8 as i32 => DType::I8,
        n if n == Known::Q8_0 as i32 => DType::Q8_0,
        n if n == Known::Q4_0 as i32 => DType::Q4_0,
        n if n == Known::Mla656 as i32 => DType::Mla656,
        n if n == Known::Mla656Latent as i32 => DType::Mla656Latent,
        _ => {
            let allowed = "REGARD_DTYPE_F32 (1), _F16 (2), _BF16 (3), _I32 (4), _BOOL (5), \
                           _E4M3 (6), _E5M2 (7), _I8 (8), _Q8_0 (9), _Q4_0 (10), _MLA656 (11) or \
                           _MLA656_LATENT (12)";
            return Err(bad(argument, number, allowed));
        }
    })
}

/// The number of that element type.
fn dtype_number(dtype: DType) -> i32 {
    use types::DType as Known;
    (match dtype {
        DType::F32 => Known::F32,
        DType::F16 => Known::F16,
        DType::BF16 => Known::Bf16,
        DType::I32 => Known::I32,
        DType::Bool => Known::Bool,
        DType::E4M3 => Known::E4m3,
        DType::E5M2 => Known::E5m2,
        DType::I8 => Known::I8,
        DType::Q8_0 => Known::Q8_0,
        DType::Q4_0 => Known::Q4_0,
        DType::Mla656 => Known::Mla656,
        DType::Mla656Latent => Known::Mla656Latent,
        other => unreachable!("no operand of the C interface has element type {other}"),
    }) as i32
}

/// A count, as regard wants it.
pub fn count(argument: &str, number: i64) -> Result<usize, Failure> {
    usize::try_from(number).map_err(|_| bad(argument, number, "a number from 0 up"))
}

/// A C tensor, checked as far as it can be without knowing its kind of memory.
pub struct View {
    /// The address of the first element, or the base that `offset` counts from.
    pub data: *mut u8,
    /// Bytes from there to the first element.
    pub offset: u64,
    pub dtype: DType,
    rank: usize,
    shape: [usize; REGARD_MAX_RANK],
    strides: Option<[i64; REGARD_MAX_RANK]>,
}

/// Copies a caller's tensor. Only one with [`REGARD_OFFSET`] has the fields that came with it.
///
/// # Safety
/// `tensor` can be read, up to `offset` or with it.
unsafe fn copy_tensor(tensor: *const Tensor) -> Tensor {
    const FIRST_SIZE: usize = std::mem::offset_of!(Tensor, offset);
    let mut copy = MaybeUninit::<Tensor>::zeroed();
    // SAFETY: the caller promises it; any bytes are a value.
    unsafe {
        tensor.cast::<u8>().copy_to_nonoverlapping(copy.as_mut_ptr().cast(), FIRST_SIZE);
        let mut copy = copy.assume_init();
        if copy.options & REGARD_OFFSET != 0 {
            copy.offset = (&raw const (*tensor).offset).read_unaligned();
        }
        copy
    }
}

impl View {
    /// # Safety
    /// `tensor` is null, or can be read.
    unsafe fn read(name: &str, tensor: *const Tensor) -> Result<Option<View>, Failure> {
        if tensor.is_null() {
            return Ok(None);
        }
        // SAFETY: the caller promises it.
        let tensor = unsafe { copy_tensor(tensor) };
        let rank = tensor.rank as usize;
        if !(1..=REGARD_MAX_RANK).contains(&rank) {
            return Err(bad(format!("{name}.rank"), rank, format!("1..={REGARD_MAX_RANK}")));
        }
        let dtype = dtype(&format!("{name}.dtype"), tensor.dtype)?;
        let mut shape = [0; REGARD_MAX_RANK];
        for (i, n) in tensor.shape.iter().enumerate().take(rank) {
            shape[i] = count(&format!("{name}.shape[{i}]"), *n)?;
        }
        let options = Options::new(name, tensor.options, REGARD_STRIDED | REGARD_OFFSET)?;
        expect_zero(&format!("{name}.reserved"), tensor.reserved)?;
        let strided = options.has(REGARD_STRIDED);
        let strides = &tensor.strides[..rank];
        if !strided && strides.iter().any(|&stride| stride != 0) {
            let found = format!("{strides:?} without REGARD_STRIDED");
            return Err(bad(format!("{name}.strides"), found, "zeros, or that option"));
        }
        if tensor.data.is_null() && !shape[..rank].contains(&0) {
            return Err(bad(format!("{name}.data"), "null", "where the elements are"));
        }
        let strides = strided.then_some(tensor.strides);
        let (data, offset) = (tensor.data.cast(), tensor.offset);
        Ok(Some(View { data, offset, dtype, rank, shape, strides }))
    }

    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank]
    }

    pub fn strides(&self) -> Option<&[i64]> {
        self.strides.as_ref().map(|strides| &strides[..self.rank])
    }

    /// The address of the first element, if `data` is an address.
    pub fn address(&self) -> *mut u8 {
        self.data.wrapping_add(self.offset as usize)
    }

    /// An error if the first element has no address, or none that suits its type.
    fn expect_address(&self, name: &str) -> Result<(), Failure> {
        let (address, alignment) = (self.address() as usize, self.dtype.alignment());
        if !address.is_multiple_of(alignment) {
            let allowed = format!("a multiple of {alignment}, as {} needs", self.dtype);
            return Err(bad(format!("{name}.data"), format!("{address:#x}"), allowed));
        }
        let last = usize::try_from(self.offset).ok();
        match last.and_then(|offset| (self.data as usize).checked_add(offset)) {
            Some(_) => Ok(()),
            None => Err(bad(
                format!("{name}.offset"),
                self.offset,
                "bytes to an address of the same address space",
            )),
        }
    }

    /// An error if addresses of elements overflow: no memory is there, and such address ranges
    /// cannot be compared.
    fn expect_addresses(&self, name: &str, strides: &[i64]) -> Result<(), Failure> {
        if self.shape().contains(&0) {
            return Ok(());
        }
        let size = self.dtype.size() as i128;
        let first = self.address() as usize as i128;
        let (mut start, mut end) = (first, first + size);
        for (&n, &stride) in self.shape().iter().zip(strides) {
            // The extent of a view is below 2^60 elements: its constructor has checked that.
            let reach = (n as i128 - 1) * i128::from(stride) * size;
            start += reach.min(0);
            end += reach.max(0);
        }
        if start >= 0 && end <= usize::MAX as i128 {
            return Ok(());
        }
        let found =
            format!("{first:#x}, from which the tensor reaches past the end of the address space");
        Err(bad(format!("{name}.data"), found, "the address of memory that holds the tensor"))
    }
}

/// An error of a view's constructor, under the operand's name.
fn named(name: &str, error: Error) -> Failure {
    match error {
        Error::Argument { argument, found, allowed } => {
            bad(format!("{name}.{argument}"), found, allowed)
        }
        other => other.into(),
    }
}

/// A kind of memory of operands.
pub trait Place: Memory {
    /// Whether `data` is an address. Otherwise it is an object, which knows how long its memory is.
    const HAS_ADDRESSES: bool = true;

    /// A view to read.
    ///
    /// # Safety
    /// The memory that the view describes is of this kind, initialized and aligned, and is not
    /// written for `'a`, or until work that reads it is done.
    unsafe fn input<'a>(view: &View) -> Result<regard::Tensor<'a, Self>, Error>;

    /// A view to write.
    ///
    /// # Safety
    /// As above, and nothing else reads it either.
    unsafe fn output<'a>(view: &View) -> Result<TensorMut<'a, Self>, Error>;
}

impl Place for Host {
    unsafe fn input<'a>(view: &View) -> Result<regard::Tensor<'a>, Error> {
        // SAFETY: passed on; the address is aligned.
        unsafe {
            regard::Tensor::from_raw(view.address(), view.dtype, view.shape(), view.strides())
        }
    }

    unsafe fn output<'a>(view: &View) -> Result<TensorMut<'a>, Error> {
        // SAFETY: passed on; the address is aligned.
        unsafe { TensorMut::from_raw(view.address(), view.dtype, view.shape(), view.strides()) }
    }
}

/// An input, if it is given.
///
/// # Safety
/// `tensor` is null or can be read; the memory that it describes is as [`Place::input`] requires.
pub unsafe fn input<'a, M: Place>(
    name: &str,
    tensor: *const Tensor,
) -> Result<Option<regard::Tensor<'a, M>>, Failure> {
    // SAFETY: passed on.
    let Some(view) = (unsafe { View::read(name, tensor)? }) else { return Ok(None) };
    if M::HAS_ADDRESSES {
        view.expect_address(name)?;
    }
    // SAFETY: passed on.
    let tensor = unsafe { M::input(&view) }.map_err(|error| named(name, error))?;
    if M::HAS_ADDRESSES {
        view.expect_addresses(name, tensor.strides())?;
    }
    Ok(Some(tensor))
}

/// An output, if it is given.
///
/// # Safety
/// `tensor` is null or can be read; the memory that it describes is as [`Place::output`] requires.
pub unsafe fn output<'a, M: Place>(
    name: &str,
    tensor: *const Tensor,
) -> Result<Option<TensorMut<'a, M>>, Failure> {
    // SAFETY: passed on.
    let Some(view) = (unsafe { View::read(name, tensor)? }) else { return Ok(None) };
    if M::HAS_ADDRESSES {
        view.expect_address(name)?;
    }
    // SAFETY: passed on.
    let tensor = unsafe { M::output(&view) }.map_err(|error| named(name, error))?;
    if M::HAS_ADDRESSES {
        view.expect_addresses(name, tensor.strides())?;
    }
    Ok(Some(tensor))
}

pub fn required<T>(name: &str, tensor: Option<T>) -> Result<T, Failure> {
    tensor.ok_or_else(|| bad(name, "null", "a pointer to a regard_tensor"))
}

/// Options that a caller set, among the options that mean something here.
pub struct Options(u32);

impl Options {
    pub fn new(argument: &str, bits: u32, meaningful: u32) -> Result<Options, Failure> {
        match bits & !meaningful {
            0 => Ok(Options(bits)),
            strange => Err(bad(
                format!("{argument}.options"),
                format!("{bits:#x}, with {strange:#x} among it"),
                format!("bits of {meaningful:#x}"),
            )),
        }
    }

    pub fn has(&self, option: u32) -> bool {
        self.0 & option != 0
    }

    /// A number that counts with its option only; given without it, something was forgotten.
    pub fn number<T: Default + PartialEq + std::fmt::Display>(
        &self,
        name: &str,
        option: (u32, &str),
        value: T,
    ) -> Result<Option<T>, Failure> {
        match self.has(option.0) {
            true => Ok(Some(value)),
            false if value == T::default() => Ok(None),
            false => Err(bad(name, format!("{value} without {}", option.1), "0, or that option")),
        }
    }

    fn window(&self, left: i64, right: i64) -> Result<Window, Failure> {
        let bound = |name, option, value| {
            self.number(name, option, value)?.map(|value| count(name, value)).transpose()
        };
        Ok(Window {
            left: bound("window_left", (REGARD_WINDOW_LEFT, "REGARD_WINDOW_LEFT"), left)?,
            right: bound("window_right", (REGARD_WINDOW_RIGHT, "REGARD_WINDOW_RIGHT"), right)?,
        })
    }

    fn values(&self) -> Values {
        match self.has(REGARD_VALUES_KEY_PREFIX) {
            true => Values::KeyPrefix,
            false => Values::Separate,
        }
    }

    fn chunk(&self, chunk: u32) -> Result<Option<usize>, Failure> {
        let chunk = self.number("chunk", (REGARD_CHUNK, "REGARD_CHUNK"), chunk)?;
        Ok(chunk.map(|chunk| chunk as usize))
    }

    /// The stride of keys, which counts with its option only.
    fn key_stride(&self, stride: i64) -> Result<Option<usize>, Failure> {
        let option = (REGARD_KEY_POSITIONS, "REGARD_KEY_POSITIONS");
        let stride = self.number("key_stride", option, stride)?;
        stride.map(|stride| count("key_stride", stride)).transpose()
    }

    fn key_positions<T>(
        &self,
        operands: &Operands,
        offsets: Option<T>,
    ) -> Result<Option<KeyPositions<T>>, Failure> {
        let option = (REGARD_KEY_POSITIONS, "REGARD_KEY_POSITIONS");
        let offset = self.number("key_offset", option, operands.key_offset)?;
        let stride = self.key_stride(operands.key_stride)?;
        let Some((offset, stride)) = offset.zip(stride) else {
            return match offsets {
                None => Ok(None),
                Some(_) => {
                    Err(bad("key_offsets", "given without REGARD_KEY_POSITIONS", "that option"))
                }
            };
        };
        let offset = match (offset, offsets) {
            (offset, None) => KeyOffset::Same(offset),
            (0, Some(offsets)) => KeyOffset::PerSequence(offsets),
            (offset, Some(_)) => {
                return Err(bad("key_offset", format!("{offset} with key_offsets"), "0"));
            }
        };
        Ok(Some(KeyPositions { offset, stride }))
    }
}

/// Options that mean something to operands and to problems.
const SHARED: u32 = REGARD_CAUSAL
    | REGARD_WINDOW_LEFT
    | REGARD_WINDOW_RIGHT
    | REGARD_CHUNK
    | REGARD_SOFTCAP
    | REGARD_INDICES_ARE_SLOTS
    | REGARD_KEY_POSITIONS
    | REGARD_BATCH_INVARIANT
    | REGARD_VALUES_KEY_PREFIX;
const OF_OPERANDS: u32 = SHARED | REGARD_SCALE | REGARD_Q_OFFSET;
const OF_PROBLEM: u32 = SHARED
    | REGARD_ALIBI
    | REGARD_SINKS
    | REGARD_TREE
    | REGARD_LSE
    | REGARD_KEY_LISTS
    | REGARD_LISTS_PER_HEAD
    | REGARD_LISTS_OF_PAGES
    | REGARD_PAGE_NUMBERS
    | REGARD_SECOND_LISTS
    | REGARD_RAGGED_QUERIES
    | REGARD_RAGGED_KEYS;

pub fn expect_zero(argument: &str, found: u32) -> Result<(), Failure> {
    if found == 0 { Ok(()) } else { Err(bad(argument, found, "0")) }
}

/// Operands in one kind of memory.
///
/// # Safety
/// The tensors can be read, and describe memory as [`Place`] wants it for `'a`.
pub unsafe fn operands<'a, M: Place>(
    operands: &Operands,
) -> Result<(Inputs<'a, M>, Outputs<'a, M>), Failure> {
    let options = Options::new("operands", operands.options, OF_OPERANDS)?;
    let given = |tensor: *const Tensor| (!tensor.is_null()).then_some(tensor);
    let offset =
        options.number("q_offset", (REGARD_Q_OFFSET, "REGARD_Q_OFFSET"), operands.q_offset)?;
    let attention = Attention {
        scale: options.number("scale", (REGARD_SCALE, "REGARD_SCALE"), operands.scale)?,
        causal: options.has(REGARD_CAUSAL),
        window: options.window(operands.window_left, operands.window_right)?,
        chunk: options.chunk(operands.chunk)?,
        softcap: options.number("softcap", (REGARD_SOFTCAP, "REGARD_SOFTCAP"), operands.softcap)?,
        q_offset: match (offset, given(operands.q_offsets)) {
            (None, None) => QueryOffset::BottomRight,
            (Some(offset), None) => QueryOffset::Same(offset),
            (None, Some(offsets)) => QueryOffset::PerSequence(offsets),
            (Some(_), Some(_)) => {
                return Err(bad(
                    "q_offsets",
                    "given together with REGARD_Q_OFFSET",
                    "one of the two",
                ));
            }
        },
        mask: given(operands.mask),
        alibi_slopes: given(operands.alibi_slopes),
        sinks: given(operands.sinks),
        tree_mask: given(operands.tree_mask),
        kv_lens: given(operands.kv_lens),
        cu_seqlens_q: given(operands.cu_seqlens_q),
        cu_seqlens_k: given(operands.cu_seqlens_k),
        block_table: given(operands.block_table),
        k_scales: given(operands.k_scales),
        v_scales: given(operands.v_scales),
        values: options.values(),
        rotary_k: given(operands.rotary_k),
        key_indices: given(operands.key_indices),
        key_counts: given(operands.key_counts),
        key_positions: options.key_positions(operands, given(operands.key_offsets))?,
        indices_are_slots: options.has(REGARD_INDICES_ARE_SLOTS),
        prefix_groups: given(operands.prefix_groups),
        prefix_lens: given(operands.prefix_lens),
        page_indices: given(operands.page_indices),
        page_list_lens: given(operands.page_list_lens),
        page_numbers: given(operands.page_numbers),
        second_k: given(operands.second_k),
        second_v: given(operands.second_v),
        second_k_scales: given(operands.second_k_scales),
        second_v_scales: given(operands.second_v_scales),
        second_indices: given(operands.second_indices),
        second_counts: given(operands.second_counts),
        batch_invariant: options.has(REGARD_BATCH_INVARIANT),
    };
    let needed = |name, tensor| {
        // SAFETY: passed on.
        required(name, unsafe { input(name, tensor)? })
    };
    let attention = attention.try_map(|name, tensor| {
        // In C the position of all sequences and the tensor of positions are two fields.
        let field = match name {
            "q_offset" => "q_offsets",
            "key_offset" => "key_offsets",
            name => name,
        };
        needed(field, tensor)
    })?;
    let (q, k) = (needed("q", operands.q)?, needed("k", operands.k)?);
    let v = match (attention.values, given(operands.v)) {
        (Values::KeyPrefix, None) => None,
        _ => Some(needed("v", operands.v)?),
    };
    // SAFETY: passed on.
    let (out, lse) = unsafe { (output("out", operands.out)?, output("lse", operands.lse)?) };
    let out = required("out", out)?;
    let inputs = match v {
        Some(v) => Inputs::new(q, k, v, attention),
        None => {
            let dim = out.shape().last().copied().unwrap_or(0);
            Inputs::latent(q, k, dim, attention).map_err(|_| {
                let found = format!("of head dim {dim}, that of values, without `v`");
                bad("out", found, "1 or more, at most the head dim of `k`, in whole blocks")
            })?
        }
    };
    Ok((inputs, Outputs { out, lse }))
}

/// A caller's problem, as regard knows it. Does not check that its numbers make sense together.
pub fn problem(given: &types::Problem) -> Result<regard::Problem, Failure> {
    let options = Options::new("problem", given.options, OF_PROBLEM)?;
    let rows = (REGARD_RAGGED_QUERIES, "REGARD_RAGGED_QUERIES");
    let rows = options.number("query_rows", rows, given.query_rows)?;
    let head_dim = count("head_dim", given.head_dim)?;
    let block_size = count("block_size", given.block_size)?;
    let in_type = dtype("dtype", given.dtype)?;
    let or_in_type =
        |argument, number| if number == 0 { Ok(in_type) } else { dtype(argument, number) };
    let tree = options.has(REGARD_TREE);
    if block_size > 0 && options.has(REGARD_RAGGED_KEYS) {
        return Err(bad(
            "block_size",
            format!("{block_size} with REGARD_RAGGED_KEYS"),
            "one of the two",
        ));
    }
    Ok(regard::Problem {
        batch: count("batch", given.batch)?,
        query_heads: count("query_heads", given.query_heads)?,
        kv_heads: count("kv_heads", given.kv_heads)?,
        head_dim,
        value_dim: if given.value_dim == 0 {
            head_dim
        } else {
            count("value_dim", given.value_dim)?
        },
        query_len: count("query_len", given.query_len)?,
        kv_len: count("kv_len", given.kv_len)?,
        queries: match rows {
            Some(rows) => QueryStorage::Ragged { total: count("query_rows", rows)? },
            None => QueryStorage::Batched,
        },
        keys: match block_size {
            0 if options.has(REGARD_RAGGED_KEYS) => KvStorage::Ragged,
            0 => KvStorage::Batched,
            block_size => KvStorage::Paged { block_size },
        },
        dtype: in_type,
        key_dtype: or_in_type("key_dtype", given.key_dtype)?,
        value_dtype: or_in_type("value_dtype", given.value_dtype)?,
        values: options.values(),
        rotary_dim: count("rotary_dim", given.rotary_dim)?,
        out_dtype: or_in_type("out_dtype", given.out_dtype)?,
        variant: regard::Variant {
            causal: options.has(REGARD_CAUSAL) && !tree,
            window: options.window(given.window_left, given.window_right)?,
            chunk: options.chunk(given.chunk)?,
            softcap: options.has(REGARD_SOFTCAP),
            alibi: options.has(REGARD_ALIBI),
            sinks: options.has(REGARD_SINKS),
            mask: match given.mask_dtype {
                0 => None,
                number => Some(dtype("mask_dtype", number)?),
            },
            tree,
            key_positions: match options.key_stride(given.key_stride)? {
                None => None,
                Some(stride) if !(1..=MAX_KEY_STRIDE).contains(&stride) => {
                    return Err(bad("key_stride", stride, format!("1..={MAX_KEY_STRIDE}")));
                }
                Some(1) => Some(KeyLayout::Contiguous),
                Some(_) => Some(KeyLayout::RoundRobin),
            },
        },
        key_lists: key_lists(&options, given)?,
        prefix_groups: count("prefix_groups", given.prefix_groups)?,
        lse: options.has(REGARD_LSE),
        batch_invariant: options.has(REGARD_BATCH_INVARIANT),
    })
}

/// A problem of regard's, as C knows it.
pub fn c_problem(problem: &regard::Problem) -> types::Problem {
    let variant = &problem.variant;
    let features = [
        (variant.causal, REGARD_CAUSAL),
        (variant.window.left.is_some(), REGARD_WINDOW_LEFT),
        (variant.window.right.is_some(), REGARD_WINDOW_RIGHT),
        (variant.chunk.is_some(), REGARD_CHUNK),
        (variant.softcap, REGARD_SOFTCAP),
        (variant.alibi, REGARD_ALIBI),
        (variant.sinks, REGARD_SINKS),
        (variant.tree, REGARD_TREE),
        (variant.key_positions.is_some(), REGARD_KEY_POSITIONS),
        (problem.lse, REGARD_LSE),
        (problem.batch_invariant, REGARD_BATCH_INVARIANT),
        (problem.values == Values::KeyPrefix, REGARD_VALUES_KEY_PREFIX),
        (matches!(problem.queries, QueryStorage::Ragged { .. }), REGARD_RAGGED_QUERIES),
        (problem.keys == KvStorage::Ragged, REGARD_RAGGED_KEYS),
    ];
    let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    types::Problem {
        size: size_of::<types::Problem>(),
        batch: number(problem.batch),
        query_heads: number(problem.query_heads),
        kv_heads: number(problem.kv_heads),
        head_dim: number(problem.head_dim),
        value_dim: number(problem.value_dim),
        query_len: number(problem.query_len),
        kv_len: number(problem.kv_len),
        query_rows: match problem.queries {
            QueryStorage::Batched => 0,
            QueryStorage::Ragged { total } => number(total),
            other => unreachable!("the C interface has no {other:?} queries"),
        },
        block_size: match problem.keys {
            KvStorage::Batched | KvStorage::Ragged => 0,
            KvStorage::Paged { block_size } => number(block_size),
            other => unreachable!("the C interface has no {other:?} keys"),
        },
        window_left: variant.window.left.map_or(0, number),
        window_right: variant.window.right.map_or(0, number),
        dtype: dtype_number(problem.dtype),
        out_dtype: dtype_number(problem.out_dtype),
        mask_dtype: variant.mask.map_or(0, dtype_number),
        options: features
            .into_iter()
            .chain(list_options(problem.key_lists))
            .filter(|(used, _)| *used)
            .fold(0, |bits, (_, option)| bits | option),
        // A plan's chunk is below 2^31.
        chunk: variant.chunk.map_or(0, |chunk| u32::try_from(chunk).unwrap_or(u32::MAX)),
        reserved: 0,
        key_dtype: dtype_number(problem.key_dtype),
        value_dtype: dtype_number(problem.value_dtype),
        rotary_dim: number(problem.rotary_dim),
        list_len: problem.key_lists.map_or(0, |lists| number(lists.len)),
        second_list_len: problem.key_lists.map_or(0, |lists| number(lists.second.unwrap_or(0))),
        key_stride: match variant.key_positions {
            None => 0,
            Some(KeyLayout::Contiguous) => 1,
            // A problem does not hold the stride itself: any but 1.
            Some(_) => 2,
        },
        prefix_groups: number(problem.prefix_groups),
    }
}

/// The caller's workspace on the host: as much of it as is needed.
///
/// # Safety
/// `data` is null, or `bytes` bytes there are writable, and nothing else uses them for `'a`.
/// Operands may overlap them until that has been checked.
pub unsafe fn workspace<'a>(
    data: *mut c_void,
    bytes: usize,
    needed: usize,
) -> Result<&'a mut [u8], Failure> {
    if bytes == 0 {
        return Ok(&mut []);
    }
    if data.is_null() {
        return Err(bad(
            "workspace",
            format!("null with {bytes} bytes"),
            "an address of as many bytes",
        ));
    }
    if bytes > isize::MAX as usize {
        return Err(bad("workspace_bytes", bytes, format!("at most {}", isize::MAX)));
    }
    if (data as usize).checked_add(bytes).is_none() {
        let found = format!("{:#x} with {bytes} bytes", data as usize);
        return Err(bad("workspace", found, "an address of as many bytes"));
    }
    // The rest of the caller's workspace is not touched: operands may be there.
    let bytes = bytes.min(needed);
    // SAFETY: passed on. A run never reads a byte of it before writing it.
    Ok(unsafe { std::slice::from_raw_parts_mut(data.cast(), bytes) })
}
