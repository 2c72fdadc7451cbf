//! Borrowed strided views of the caller's memory.
//!
//! Every operand is a [`Tensor`] (read) or a [`TensorMut`] (written): a pointer, an element type, a
//! shape and strides. Strides are in elements and 64 bits wide; the innermost stride of anything
//! with a head dimension is 1. regard has one dimension order: batch, sequence, head, dimension.
//! Other layouts are the same view with its dimensions permuted ([`Tensor::bhsd`]), so kernels only
//! ever see strides.

mod columns;

use crate::dtype::{DType, Element};
use crate::error::Error;
use crate::format::{BlockQ4_0, BlockQ8_0, E4m3, E5m2, Mla656};
use crate::memory::{Host, Memory};
use half::{bf16, f16};
use std::fmt;
use std::marker::PhantomData;

/// Maximum number of dimensions: an interleaved pool `[blocks, 2, block_size, heads, dim]` has
/// five.
pub const MAX_RANK: usize = 5;

/// Shape and strides, without memory. Both views deref to it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Dims {
    rank: u8,
    dtype: DType,
    shape: [usize; MAX_RANK],
    strides: [i64; MAX_RANK],
}

impl Dims {
    fn new(dtype: DType, shape: &[usize], strides: &[i64]) -> Result<Dims, Error> {
        if shape.len() != strides.len() || shape.len() > MAX_RANK {
            return Err(Error::argument(
                "strides",
                format!("{strides:?} for a tensor of shape {shape:?}"),
                format!("one stride a dimension, at most {MAX_RANK} dimensions"),
            ));
        }
        let mut dims =
            Dims { rank: shape.len() as u8, dtype, shape: [1; MAX_RANK], strides: [0; MAX_RANK] };
        dims.shape[..shape.len()].copy_from_slice(shape);
        dims.strides[..shape.len()].copy_from_slice(strides);
        Ok(dims)
    }

    fn contiguous(dtype: DType, shape: &[usize]) -> Result<Dims, Error> {
        if shape.len() > MAX_RANK {
            return Err(Error::argument(
                "shape",
                format!("{shape:?}"),
                format!("at most {MAX_RANK} dimensions"),
            ));
        }
        let mut strides = [0i64; MAX_RANK];
        let mut stride = 1i64;
        for i in (0..shape.len()).rev() {
            strides[i] = stride;
            stride = i64::try_from(shape[i])
                .ok()
                .and_then(|n| stride.checked_mul(n.max(1)))
                .filter(|&n| n <= i64::MAX / 8)
                .ok_or_else(|| {
                    Error::argument(
                        "shape",
                        format!("{shape:?}"),
                        "at most 2^60 elements".to_string(),
                    )
                })?;
        }
        Dims::new(dtype, shape, &strides[..shape.len()])
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        self.rank as usize
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Elements in each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape[..self.rank()]
    }

    /// Elements between neighbours in each dimension.
    pub fn strides(&self) -> &[i64] {
        &self.strides[..self.rank()]
    }

    /// The number of elements (the largest `usize` if the product overflows it).
    pub fn len(&self) -> usize {
        if self.is_empty() {
            0
        } else {
            self.shape().iter().fold(1, |all, &n| all.saturating_mul(n))
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape().contains(&0)
    }

    /// The minimum and maximum element offset of the view, or `None` if it is empty; an error if a
    /// 64-bit byte offset overflows.
    pub(crate) fn extent(&self) -> Result<Option<(i64, i64)>, Error> {
        if self.is_empty() {
            return Ok(None);
        }
        let limit = i64::MAX / 8.max(self.dtype.size() as i64);
        self.reach().filter(|&(low, high)| low >= -limit && high <= limit).map(Some).ok_or_else(
            || {
                Error::argument(
                    "strides",
                    format!("{:?}", self.strides()),
                    "a reach below 2^60 elements",
                )
            },
        )
    }

    /// The minimum and maximum element offset of a view that is not empty, if 64 bits hold them.
    fn reach(&self) -> Option<(i64, i64)> {
        let (mut low, mut high) = (0i64, 0i64);
        for (&n, &stride) in self.shape().iter().zip(self.strides()) {
            // A dimension that is broadcast may be of any length.
            if stride != 0 {
                let reach = i64::try_from(n - 1).ok()?.checked_mul(stride)?;
                low = low.checked_add(reach.min(0))?;
                high = high.checked_add(reach.max(0))?;
            }
        }
        Some((low, high))
    }

    fn permuted(mut self, order: &[usize]) -> Dims {
        // A dimension named twice would reach past the memory that the view was checked against.
        let old = self;
        let once = |dim: usize| order.iter().filter(|&&named| named == dim).count() == 1;
        assert!(
            order.len() == old.rank() && (0..old.rank()).all(once),
            "{order:?} does not name each of {} dimensions once",
            old.rank()
        );
        for (new, &from) in order.iter().enumerate() {
            self.shape[new] = old.shape[from];
            self.strides[new] = old.strides[from];
        }
        self
    }
}

impl fmt::Debug for Dims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{:?}", self.dtype, self.shape())
    }
}

/// A read-only view of the caller's memory: the host's, or a device's.
#[derive(Clone, Copy)]
pub struct Tensor<'a, M: Memory = Host> {
    data: *const u8,
    dims: Dims,
    memory: M,
    lifetime: PhantomData<&'a [u8]>,
}

/// A view of memory that a kernel writes.
pub struct TensorMut<'a, M: Memory = Host> {
    data: *mut u8,
    dims: Dims,
    memory: M,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: a view is a borrow of plain numbers: `&[T]` and `&mut [T]` of `Element` types are Send
// and Sync; the caller of `from_raw` promises as much. `M` is Send and Sync.
unsafe impl<M: Memory> Send for Tensor<'_, M> {}
// SAFETY: as above.
unsafe impl<M: Memory> Sync for Tensor<'_, M> {}
// SAFETY: as above.
unsafe impl<M: Memory> Send for TensorMut<'_, M> {}
// SAFETY: as above; a shared `TensorMut` offers no writing.
unsafe impl<M: Memory> Sync for TensorMut<'_, M> {}

impl<M: Memory> std::ops::Deref for Tensor<'_, M> {
    type Target = Dims;
    fn deref(&self) -> &Dims {
        &self.dims
    }
}

impl<M: Memory> std::ops::Deref for TensorMut<'_, M> {
    type Target = Dims;
    fn deref(&self) -> &Dims {
        &self.dims
    }
}

impl<M: Memory> fmt::Debug for Tensor<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dims.fmt(f)
    }
}

impl<M: Memory> fmt::Debug for TensorMut<'_, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.dims.fmt(f)
    }
}

fn check_contiguous(length: usize, dims: &Dims) -> Result<(), Error> {
    if length != dims.len() {
        return Err(Error::argument(
            "shape",
            format!("{:?} over a slice of {length} elements", dims.shape()),
            format!("a slice of exactly {} elements", dims.len()),
        ));
    }
    Ok(())
}

fn check_strided(length: usize, dims: &Dims) -> Result<(), Error> {
    if let Some((low, high)) = dims.extent()?
        && (low < 0 || high >= length as i64)
    {
        return Err(Error::argument(
            "strides",
            format!(
                "{:?} with shape {:?}, reaching elements {low}..={high} of a slice of {length}",
                dims.strides(),
                dims.shape()
            ),
            format!("offsets 0..{length}"),
        ));
    }
    Ok(())
}

/// The dims of a view over `length` elements; `strides` of `None` means contiguous, over all of
/// them.
pub(crate) fn checked_dims<T: Element>(
    length: usize,
    shape: &[usize],
    strides: Option<&[i64]>,
) -> Result<Dims, Error> {
    let Some(strides) = strides else {
        let dims = Dims::contiguous(T::DTYPE, shape)?;
        check_contiguous(length, &dims)?;
        return Ok(dims);
    };
    let dims = Dims::new(T::DTYPE, shape, strides)?;
    check_strided(length, &dims)?;
    Ok(dims)
}

/// The dims of a view of raw memory; `strides` of `None` means contiguous.
pub(crate) fn raw_dims(
    dtype: DType,
    shape: &[usize],
    strides: Option<&[i64]>,
) -> Result<Dims, Error> {
    let dims = match strides {
        Some(strides) => Dims::new(dtype, shape, strides)?,
        None => Dims::contiguous(dtype, shape)?,
    };
    dims.extent()?;
    Ok(dims)
}

impl<'a> Tensor<'a> {
    /// A contiguous (row-major) view of the whole slice.
    pub fn new<T: Element, const N: usize>(
        data: &'a [T],
        shape: [usize; N],
    ) -> Result<Self, Error> {
        let dims = checked_dims::<T>(data.len(), &shape, None)?;
        Ok(Tensor { data: data.as_ptr().cast(), dims, memory: Host, lifetime: PhantomData })
    }

    /// A view with the given strides, in elements, from the slice's first element; every element it
    /// reaches must be in the slice.
    pub fn with_strides<T: Element, const N: usize>(
        data: &'a [T],
        shape: [usize; N],
        strides: [i64; N],
    ) -> Result<Self, Error> {
        let dims = checked_dims::<T>(data.len(), &shape, Some(&strides))?;
        Ok(Tensor { data: data.as_ptr().cast(), dims, memory: Host, lifetime: PhantomData })
    }

    /// A view of a slice whose number of dimensions is only known at run time. `strides` of `None`
    /// means contiguous, over the whole slice.
    pub fn from_slice<T: Element>(
        data: &'a [T],
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Self, Error> {
        let dims = checked_dims::<T>(data.len(), shape, strides)?;
        Ok(Tensor { data: data.as_ptr().cast(), dims, memory: Host, lifetime: PhantomData })
    }

    /// A view of raw memory. `strides` of `None` means contiguous.
    ///
    /// # Safety
    /// `data` is aligned for `dtype`, every element that shape and strides reach is initialized
    /// memory of that type, and it is neither freed nor written while the view lives.
    pub unsafe fn from_raw(
        data: *const u8,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Self, Error> {
        let dims = raw_dims(dtype, shape, strides)?;
        Ok(Tensor { data, dims, memory: Host, lifetime: PhantomData })
    }

    /// The first element.
    pub fn as_ptr(&self) -> *const u8 {
        self.data
    }

    /// The elements of a contiguous 1-dimensional tensor, or `None` if it is not one of `T`.
    pub fn as_slice<T: Element>(&self) -> Option<&'a [T]> {
        if T::DTYPE != self.dtype()
            || self.rank() != 1
            || (self.strides()[0] != 1 && self.shape()[0] > 1)
        {
            return None;
        }
        if self.is_empty() {
            return Some(&[]);
        }
        // `bool` may only hold 0 and 1, which a view made from bytes does not promise.
        if std::any::TypeId::of::<T>() == std::any::TypeId::of::<bool>() {
            return None;
        }
        // SAFETY: the view is not empty, so it covers `shape[0]` contiguous, initialized, aligned
        // elements of its type for 'a; T is that type. `bool`, which may not have every value, has
        // been ruled out.
        Some(unsafe { std::slice::from_raw_parts(self.data.cast(), self.shape()[0]) })
    }

    /// The value at `index` (one index per dimension, the last in values) as a number: exact for
    /// every type, 1 for true. A code is a number without its scale, a block's value has it.
    ///
    /// # Panics
    /// If the index is outside the shape, or does not have one entry per dimension.
    pub fn at(&self, index: &[usize]) -> f64 {
        assert!(
            index.len() == self.rank(),
            "index {index:?} into a tensor of shape {:?}",
            self.shape()
        );
        let mut element = [0.0];
        let (last, outer) = index.split_last().map_or((0, index), |(&last, outer)| (last, outer));
        self.read(outer, last, &mut element);
        element[0]
    }

    /// The whole innermost row at `index` (one index for each dimension but the last) as numbers:
    /// exact for every type, as [`Tensor::at`].
    ///
    /// # Panics
    /// If the index is outside the shape, or `row` does not have as many elements as the last
    /// dimension has values.
    pub fn read_row(&self, index: &[usize], row: &mut [f64]) {
        assert_eq!(Some(row.len()), self.columns(), "a row of the last dimension's length");
        self.read(index, 0, row);
    }

    /// Values in the last dimension.
    fn columns(&self) -> Option<usize> {
        Some(self.shape().last()?.saturating_mul(self.dtype().values()))
    }

    /// Whether the last dimension has `count` values from `first` on. A tensor without dimensions
    /// has one element.
    fn has_columns(&self, first: usize, count: usize) -> bool {
        let columns = self.columns().unwrap_or(self.dtype().values());
        columns.checked_sub(first).is_some_and(|left| count <= left)
    }

    /// The elements from `first` on along the last dimension, at `outer` in the others.
    fn read(&self, outer: &[usize], first: usize, row: &mut [f64]) {
        let outer_dims = self.rank().saturating_sub(1);
        let inside = outer.len() == outer_dims
            && outer.iter().zip(self.shape()).all(|(index, n)| index < n)
            && self.has_columns(first, row.len());
        assert!(inside, "index {outer:?}, {first}.. is outside shape {:?}", self.shape());
        if row.is_empty() {
            return;
        }
        let step = self.strides().last().copied().unwrap_or(0);
        let start = outer
            .iter()
            .zip(self.strides())
            .map(|(&index, stride)| index as i64 * stride)
            .sum::<i64>();
        // The element that holds the first value, and that value's place in it.
        let values = self.dtype().values();
        let start = (start + (first / values) as i64 * step) as isize;
        let (step, skip) = (step as isize, first % values);
        // SAFETY: the indices were checked against the shape without overflow, so the view is not
        // empty. Its constructor has made sure (`extent`) that offsets inside the shape fit 61
        // bits, and that each of them has initialized, aligned memory of this type, for 'a.
        unsafe {
            match self.dtype() {
                DType::F32 => gather(self.data.cast::<f32>().offset(start), step, row, f64::from),
                DType::F16 => gather(self.data.cast::<f16>().offset(start), step, row, f16_number),
                DType::BF16 => {
                    gather(self.data.cast::<bf16>().offset(start), step, row, bf16_number)
                }
                DType::I32 => gather(self.data.cast::<i32>().offset(start), step, row, f64::from),
                DType::Bool => {
                    gather(self.data.offset(start), step, row, |x| f64::from(u8::from(x != 0)));
                }
                DType::E4M3 => {
                    gather(self.data.cast::<E4m3>().offset(start), step, row, |x| x.to_f32().into())
                }
                DType::E5M2 => {
                    gather(self.data.cast::<E5m2>().offset(start), step, row, |x| x.to_f32().into())
                }
                DType::I8 => gather(self.data.cast::<i8>().offset(start), step, row, f64::from),
                DType::Q8_0 => {
                    let from = self.data.cast::<BlockQ8_0>().offset(start);
                    gather_blocks(from, step, skip, row, |block| block.to_f32());
                }
                DType::Q4_0 => {
                    let from = self.data.cast::<BlockQ4_0>().offset(start);
                    gather_blocks(from, step, skip, row, |block| block.to_f32());
                }
                DType::Mla656 => {
                    let from = self.data.cast::<Mla656>().offset(start);
                    gather_blocks(from, step, skip, row, |record| record.to_f64());
                }
                DType::Mla656Latent => {
                    let from = self.data.cast::<Mla656>().offset(start);
                    gather_blocks(from, step, skip, row, |record| record.latent_to_f64());
                }
            }
        }
    }
}

/// `f16::to_f64`, in a form that compilers make vector instructions of: its exponent differs from
/// the exponent of an `f32` in the bias only.
fn f16_number(x: f16) -> f64 {
    let magnitude = u32::from(x.to_bits() & 0x7fff) << 13;
    let sign = u32::from(x.to_bits() & 0x8000) << 16;
    const BIAS: f32 = f32::from_bits((127 + 127 - 15) << 23);
    let finite = (f32::from_bits(magnitude) * BIAS).to_bits();
    let number = if magnitude >= 0x7c00 << 13 { magnitude | 0x7f80_0000 } else { finite };
    f64::from(f32::from_bits(number | sign))
}

/// `bf16::to_f64`, likewise: the upper half of an `f32`.
fn bf16_number(x: bf16) -> f64 {
    f64::from(f32::from_bits(u32::from(x.to_bits()) << 16))
}

/// Elements `step` apart, as numbers: exact for every type.
///
/// # Safety
/// `row.len()` elements from `from` on, `step` apart, are initialized and aligned.
unsafe fn gather<T: Copy>(from: *const T, step: isize, row: &mut [f64], number: impl Fn(T) -> f64) {
    // A loop of its own, which the compiler can vectorize.
    if step == 1 {
        // SAFETY: as above.
        let numbers = unsafe { std::slice::from_raw_parts(from, row.len()) };
        for (x, &stored) in row.iter_mut().zip(numbers) {
            *x = number(stored);
        }
        return;
    }
    for (i, x) in row.iter_mut().enumerate() {
        // SAFETY: as above.
        *x = number(unsafe { *from.offset(i as isize * step) });
    }
}

/// Values of blocks `step` apart, from value `skip` of the first on.
///
/// # Safety
/// The blocks of these values, from `from` on, `step` apart, are initialized and aligned.
unsafe fn gather_blocks<T: Copy, X: Copy + Into<f64>, const VALUES: usize>(
    from: *const T,
    step: isize,
    skip: usize,
    row: &mut [f64],
    values: impl Fn(T) -> [X; VALUES],
) {
    let mut left = row.iter_mut();
    let mut skip = skip;
    for i in 0.. {
        if left.len() == 0 {
            return;
        }
        // SAFETY: as above: some values of this block are asked for.
        let block = values(unsafe { *from.offset(i * step) });
        // The block first: `zip` takes one from its first iterator before it sees the end of the
        // second.
        for (value, x) in block[skip..].iter().zip(left.by_ref()) {
            *x = (*value).into();
        }
        skip = 0;
    }
}

impl<'a, M: Memory> Tensor<'a, M> {
    /// The same view as one of the host's memory, if it is one.
    pub(crate) fn as_host(&self) -> Option<Tensor<'a>> {
        let Tensor { data, dims, lifetime, .. } = *self;
        M::READABLE.then_some(Tensor { data, dims, memory: Host, lifetime })
    }

    /// The elements from `first` on of a contiguous vector, in another shape.
    ///
    /// # Errors
    /// If the vector has fewer.
    pub(crate) fn part(&self, first: usize, shape: &[usize]) -> Result<Self, Error> {
        let dims = Dims::contiguous(self.dtype(), shape)?;
        let inside = first.checked_add(dims.len()).is_some_and(|end| end <= self.len());
        if self.rank() != 1 || !inside {
            let found = format!("{shape:?} from element {first} of {} on", self.len());
            return Err(Error::argument("shape", found, "what the vector has"));
        }
        Ok(Tensor { data: self.data.wrapping_add(first * self.dtype().size()), dims, ..*self })
    }
}

impl<M: Memory> Tensor<'_, M> {
    /// A view of a device's memory. The caller has checked that it may be read.
    pub(crate) fn on_device(data: *const u8, dims: Dims, memory: M) -> Self {
        Tensor { data, dims, memory, lifetime: PhantomData }
    }

    /// The address of the first element, in any memory.
    pub(crate) fn address(&self) -> u64 {
        self.data as u64
    }

    /// The memory.
    pub(crate) fn memory(&self) -> M {
        self.memory
    }

    /// The same memory with its dimensions in another order: dimension `i` of the result is
    /// dimension `order[i]` of this.
    ///
    /// # Panics
    /// If `order` is not a permutation of this tensor's dimensions.
    pub fn permute<const N: usize>(self, order: [usize; N]) -> Self {
        Tensor { dims: self.dims.permuted(&order), ..self }
    }

    /// Takes a 4-dimensional tensor stored as `[batch, head, sequence, dim]` (or a paged pool
    /// stored as `[block, head, slot, dim]`, "HND") to regard's order `[batch, sequence, head,
    /// dim]`.
    ///
    /// # Panics
    /// If the tensor has not 4 dimensions.
    pub fn bhsd(self) -> Self {
        self.permute([0, 2, 1, 3])
    }

    /// The slice `index` of dimension `dim`, which goes away. An interleaved pool `[blocks, 2,
    /// block_size, heads, dim]` gives its keys as `select(1, 0)` and its values as `select(1, 1)`.
    pub fn select(self, dim: usize, index: usize) -> Result<Self, Error> {
        if dim >= self.rank() || index >= self.dims.shape[dim] {
            return Err(Error::argument(
                "index",
                format!("{index} in dimension {dim} of shape {:?}", self.shape()),
                "an index inside the shape",
            ));
        }
        // In range for a view that has elements, and 0 in a dimension of 1 with any stride. An
        // empty view can have any strides, so its pointer is kept.
        let offset = self.dims.strides[dim]
            .wrapping_mul(index as i64)
            .wrapping_mul(self.dtype().size() as i64);
        let mut dims = self.dims;
        dims.rank -= 1;
        for i in dim..dims.rank() {
            dims.shape[i] = self.dims.shape[i + 1];
            dims.strides[i] = self.dims.strides[i + 1];
        }
        dims.shape[dims.rank()] = 1;
        dims.strides[dims.rank()] = 0;
        // A tensor with no elements may dangle: it is never read, so its pointer need not move.
        let data =
            if self.is_empty() { self.data } else { self.data.wrapping_offset(offset as isize) };
        Ok(Tensor { data, dims, ..self })
    }

    pub(crate) fn byte_range(&self) -> Option<(usize, usize)> {
        byte_range(self.data as usize, &self.dims)
    }
}

impl<'a, T: Element> From<&'a [T]> for Tensor<'a> {
    fn from(data: &'a [T]) -> Self {
        let dims = Dims::contiguous(T::DTYPE, &[data.len()])
            .expect("a slice is smaller than 2^60 elements");
        Tensor { data: data.as_ptr().cast(), dims, memory: Host, lifetime: PhantomData }
    }
}

impl<'a, T: Element> From<&'a Vec<T>> for Tensor<'a> {
    fn from(data: &'a Vec<T>) -> Self {
        Tensor::from(data.as_slice())
    }
}

impl<'a, T: Element, const N: usize> From<&'a [T; N]> for Tensor<'a> {
    fn from(data: &'a [T; N]) -> Self {
        Tensor::from(data.as_slice())
    }
}

impl<'a> TensorMut<'a> {
    /// A contiguous (row-major) view of the whole slice.
    pub fn new<T: Element, const N: usize>(
        data: &'a mut [T],
        shape: [usize; N],
    ) -> Result<Self, Error> {
        let dims = checked_dims::<T>(data.len(), &shape, None)?;
        Ok(TensorMut { data: data.as_mut_ptr().cast(), dims, memory: Host, lifetime: PhantomData })
    }

    /// A view with the given strides, in elements, from the slice's first element.
    pub fn with_strides<T: Element, const N: usize>(
        data: &'a mut [T],
        shape: [usize; N],
        strides: [i64; N],
    ) -> Result<Self, Error> {
        let dims = checked_dims::<T>(data.len(), &shape, Some(&strides))?;
        Ok(TensorMut { data: data.as_mut_ptr().cast(), dims, memory: Host, lifetime: PhantomData })
    }

    /// A view of a slice whose number of dimensions is only known at run time, as
    /// [`Tensor::from_slice`].
    pub fn from_slice<T: Element>(
        data: &'a mut [T],
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Self, Error> {
        let dims = checked_dims::<T>(data.len(), shape, strides)?;
        Ok(TensorMut { data: data.as_mut_ptr().cast(), dims, memory: Host, lifetime: PhantomData })
    }

    /// A view of raw memory. `strides` of `None` means contiguous.
    ///
    /// # Safety
    /// `data` is aligned for `dtype`, every element that shape and strides reach can be written,
    /// and nothing else reads or writes it while the view lives.
    pub unsafe fn from_raw(
        data: *mut u8,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Self, Error> {
        let dims = raw_dims(dtype, shape, strides)?;
        Ok(TensorMut { data, dims, memory: Host, lifetime: PhantomData })
    }

    /// The first element.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.data
    }
}

impl<M: Memory> TensorMut<'_, M> {
    /// A view of a device's memory. The caller has checked that it may be written.
    pub(crate) fn on_device(data: *mut u8, dims: Dims, memory: M) -> Self {
        TensorMut { data, dims, memory, lifetime: PhantomData }
    }

    /// The address of the first element, in any memory.
    pub(crate) fn address(&self) -> u64 {
        self.data as u64
    }

    /// The memory.
    pub(crate) fn memory(&self) -> M {
        self.memory
    }

    /// The same memory with its dimensions in another order, as [`Tensor::permute`].
    ///
    /// # Panics
    /// If `order` is not a permutation of this tensor's dimensions.
    pub fn permute<const N: usize>(self, order: [usize; N]) -> Self {
        TensorMut { dims: self.dims.permuted(&order), ..self }
    }

    /// From `[batch, head, sequence, dim]` to regard's order, as [`Tensor::bhsd`].
    ///
    /// # Panics
    /// If the tensor has not 4 dimensions.
    pub fn bhsd(self) -> Self {
        self.permute([0, 2, 1, 3])
    }

    pub(crate) fn byte_range(&self) -> Option<(usize, usize)> {
        byte_range(self.data as usize, &self.dims)
    }

    /// Whether no two indices name the same element. Dimensions are taken from the smallest stride
    /// up; each must step over all that the smaller ones reach. (Views that interleave in stranger
    /// ways are taken to overlap.)
    pub(crate) fn is_injective(&self) -> bool {
        if self.is_empty() {
            return true;
        }
        let mut order = [0usize, 1, 2, 3, 4];
        order[..self.rank()].sort_unstable_by_key(|&i| self.strides()[i].unsigned_abs());
        let mut reach = 0u64;
        for &i in &order[..self.rank()] {
            if self.shape()[i] > 1 {
                if self.strides()[i].unsigned_abs() <= reach {
                    return false;
                }
                reach += (self.shape()[i] as u64 - 1) * self.strides()[i].unsigned_abs();
            }
        }
        true
    }
}

/// The addresses `start..end` that a view reaches, `None` if it is empty.
fn byte_range(data: usize, dims: &Dims) -> Option<(usize, usize)> {
    let size = dims.dtype().size();
    let (low, high) = dims.extent().ok()??;
    Some((
        data.wrapping_add_signed(low as isize * size as isize),
        data.wrapping_add_signed((high as isize + 1) * size as isize),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_several_blocks_are_whole() {
        let number = |i: usize| i as f32 - 48.0;
        let blocks: [BlockQ8_0; 3] = std::array::from_fn(|block| BlockQ8_0 {
            scale: f16::ONE,
            codes: std::array::from_fn(|i| number(32 * block + i) as i8),
        });
        let tensor = Tensor::new(&blocks, [1, 3]).unwrap();
        let mut row = [0.0; 96];
        tensor.read_row(&[0], &mut row);
        for (i, &x) in row.iter().enumerate() {
            assert_eq!(x, f64::from(number(i)));
            assert_eq!(tensor.at(&[0, i]), x);
        }
    }

    #[test]
    fn numbers_of_16_bits_are_exact() {
        let same = |ours: f64, theirs: f64| ours == theirs || ours.is_nan() && theirs.is_nan();
        for bits in 0..=u16::MAX {
            assert!(
                same(f16_number(f16::from_bits(bits)), f16::from_bits(bits).to_f64()),
                "f16 {bits:#x}"
            );
            assert!(
                same(bf16_number(bf16::from_bits(bits)), bf16::from_bits(bits).to_f64()),
                "bf16 {bits:#x}"
            );
        }
    }
}
