//! Views of device memory: of cudarc's slices, checked as host slices are, or of raw addresses.

use crate::dtype::{DType, Element};
use crate::error::Error;
use crate::memory::{Memory, sealed};
use crate::tensor::{Tensor, TensorMut, checked_dims, raw_dims};
use cudarc::driver::{CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop};
use std::fmt;
use std::marker::PhantomData;

/// Memory of an NVIDIA GPU. Views of a [`DeviceView`] or [`DeviceViewMut`] slice remember the
/// stream that it was lent to, so that they run there and nowhere else; views of raw addresses run
/// on any.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct DeviceMemory {
    stream: Option<StreamIdentity>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct StreamIdentity {
    context: usize,
    stream: usize,
}

impl Memory for DeviceMemory {}
impl sealed::Contents for DeviceMemory {}

impl DeviceMemory {
    fn lent_to(stream: &CudaStream) -> DeviceMemory {
        let context = stream.context().cu_ctx() as usize;
        DeviceMemory {
            stream: Some(StreamIdentity { context, stream: stream.cu_stream() as usize }),
        }
    }

    /// An error unless work on that stream may use the memory.
    pub(super) fn expect_stream(self, argument: &str, stream: &CudaStream) -> Result<(), Error> {
        if self.stream.is_none() || self == DeviceMemory::lent_to(stream) {
            return Ok(());
        }
        Err(Error::argument(
            argument,
            "lent to another stream",
            "memory lent to the stream of the run",
        ))
    }
}

/// A device slice that work on a stream reads until this is dropped: the stream waits for all work
/// that was writing the slice, and what writes or frees it later waits for the stream. That is
/// cudarc's bookkeeping, with its events. If it is off (`CudaContext::disable_event_tracking`),
/// this costs nothing and orders nothing.
pub struct DeviceView<'a, T> {
    address: u64,
    length: usize,
    memory: DeviceMemory,
    _until_dropped: SyncOnDrop<'a>,
    element: PhantomData<&'a [T]>,
}

/// A device slice that work on a stream writes until this is dropped; otherwise as [`DeviceView`].
pub struct DeviceViewMut<'a, T> {
    address: u64,
    length: usize,
    memory: DeviceMemory,
    _until_dropped: SyncOnDrop<'a>,
    element: PhantomData<&'a mut [T]>,
}

impl<'a, T: Element> DeviceView<'a, T> {
    /// Lends a `CudaSlice` or `CudaView` to a stream.
    pub fn new(slice: &'a impl DevicePtr<T>, stream: &'a CudaStream) -> DeviceView<'a, T> {
        let length = slice.len();
        let (address, until_dropped) = slice.device_ptr(stream);
        let memory = DeviceMemory::lent_to(stream);
        DeviceView { address, length, memory, _until_dropped: until_dropped, element: PhantomData }
    }

    /// A view of the slice. `strides` of `None` means contiguous, over the whole slice; otherwise
    /// every element that they reach must be in it.
    ///
    /// # Errors
    /// If shape and strides reach outside the slice.
    pub fn tensor(
        &self,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Tensor<'_, DeviceMemory>, Error> {
        let dims = checked_dims::<T>(self.length, shape, strides)?;
        Ok(Tensor::on_device(self.address as *const u8, dims, self.memory))
    }
}

impl<'a, T: Element> DeviceViewMut<'a, T> {
    /// Lends a `CudaSlice` or `CudaViewMut` to a stream.
    pub fn new(
        slice: &'a mut impl DevicePtrMut<T>,
        stream: &'a CudaStream,
    ) -> DeviceViewMut<'a, T> {
        let length = slice.len();
        let (address, until_dropped) = slice.device_ptr_mut(stream);
        let memory = DeviceMemory::lent_to(stream);
        DeviceViewMut {
            address,
            length,
            memory,
            _until_dropped: until_dropped,
            element: PhantomData,
        }
    }

    /// A view of the slice, as [`DeviceView::tensor`].
    ///
    /// # Errors
    /// If shape and strides reach outside the slice.
    pub fn tensor(
        &mut self,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<TensorMut<'_, DeviceMemory>, Error> {
        let dims = checked_dims::<T>(self.length, shape, strides)?;
        Ok(TensorMut::on_device(self.address as *mut u8, dims, self.memory))
    }
}

impl<T> fmt::Debug for DeviceView<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceView({} elements at {:#x})", self.length, self.address)
    }
}

impl<T> fmt::Debug for DeviceViewMut<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceViewMut({} elements at {:#x})", self.length, self.address)
    }
}

/// An address of device memory, if it is aligned for the type.
fn checked_address(address: u64, dtype: DType) -> Result<u64, Error> {
    if address.is_multiple_of(dtype.alignment() as u64) {
        return Ok(address);
    }
    let allowed = format!("a multiple of {} for {dtype}", dtype.alignment());
    Err(Error::argument("address", format!("{address:#x}"), allowed))
}

impl Tensor<'_, DeviceMemory> {
    /// A view of device memory at `address` (a `CUdeviceptr`). `strides` of `None` means
    /// contiguous.
    ///
    /// # Errors
    /// If the address is not aligned for the type, or shape and strides make no sense together.
    ///
    /// # Safety
    /// Every element that shape and strides reach is memory of the GPU that the view is used on;
    /// while it is used, by work that may still be queued when the call returns, it is neither
    /// freed nor written.
    pub unsafe fn from_device_address(
        address: u64,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Self, Error> {
        let (address, dims) = (checked_address(address, dtype)?, raw_dims(dtype, shape, strides)?);
        Ok(Tensor::on_device(address as *const u8, dims, DeviceMemory::default()))
    }

    /// The address of the first element: a `CUdeviceptr`.
    pub fn device_address(&self) -> u64 {
        self.address()
    }
}

impl TensorMut<'_, DeviceMemory> {
    /// A view of device memory that is written, as [`Tensor::from_device_address`].
    ///
    /// # Errors
    /// As there.
    ///
    /// # Safety
    /// As there, and nothing else reads it either until the work that writes it is done.
    pub unsafe fn from_device_address(
        address: u64,
        dtype: DType,
        shape: &[usize],
        strides: Option<&[i64]>,
    ) -> Result<Self, Error> {
        let (address, dims) = (checked_address(address, dtype)?, raw_dims(dtype, shape, strides)?);
        Ok(TensorMut::on_device(address as *mut u8, dims, DeviceMemory::default()))
    }

    /// The address of the first element: a `CUdeviceptr`.
    pub fn device_address(&self) -> u64 {
        self.address()
    }
}
