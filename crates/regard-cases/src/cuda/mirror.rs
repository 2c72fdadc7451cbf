//! Copies of host tensors on a GPU: the same strides, the same alignment modulo 16 bytes, NaN
//! around them.

use regard::cuda::cudarc::driver::{CudaSlice, CudaStream, CudaView, DevicePtr, result};
use regard::cuda::{DeviceMemory, driver_error};
use regard::{DType, Dims, Error, Tensor, TensorMut};
use std::sync::Arc;

/// Bytes of NaN before and after the copied bytes.
const GUARD: usize = 512;

/// All bits set: NaN in every floating type, -1 in integers.
const NAN: u8 = 0xff;

/// New memory, every byte the same.
pub(super) fn filled(
    bytes: usize,
    byte: u8,
    stream: &Arc<CudaStream>,
) -> Result<CudaSlice<u8>, Error> {
    let doing = |error| driver_error(format!("allocating {bytes} bytes"), error);
    // SAFETY: it is written before it is read.
    let memory = unsafe { stream.alloc::<u8>(bytes.max(1)) }.map_err(doing)?;
    let address = memory.device_ptr(stream).0;
    // SAFETY: the memory is that long, and of the stream's context.
    unsafe { result::memset_d8_async(address, byte, memory.len(), stream.cu_stream()) }
        .map_err(doing)?;
    Ok(memory)
}

/// A part of device memory, read when all that was queued is done.
pub(super) fn downloaded(view: &CudaView<u8>, stream: &Arc<CudaStream>) -> Result<Vec<u8>, Error> {
    if view.is_empty() {
        return Ok(Vec::new());
    }
    let bytes =
        stream.clone_dtoh(view).map_err(|error| driver_error("copying from the GPU", error))?;
    stream.synchronize().map_err(|error| driver_error("waiting for the GPU", error))?;
    Ok(bytes)
}

/// The bytes that a view reaches, as distances from its first element; nothing for an empty view.
fn reach(dims: &Dims) -> (isize, usize) {
    if dims.is_empty() {
        return (0, 0);
    }
    let (mut low, mut high) = (0i64, 0i64);
    for (&n, &stride) in dims.shape().iter().zip(dims.strides()) {
        let far = (n as i64 - 1) * stride;
        low += far.min(0);
        high += far.max(0);
    }
    let size = dims.dtype().size();
    (low as isize * size as isize, (high - low + 1) as usize * size)
}

/// The byte range of some dims at a host address.
struct Place {
    dtype: DType,
    shape: Vec<usize>,
    strides: Vec<i64>,
    /// The lowest byte in host memory, and the number of bytes.
    low: *const u8,
    bytes: usize,
    /// The device addresses of that byte and of the first element.
    start: usize,
    first: usize,
}

impl Place {
    fn new(data: *const u8, dims: &Dims) -> Place {
        let (offset, bytes) = reach(dims);
        let low = data.wrapping_offset(offset);
        let start = GUARD + low as usize % 16;
        Place {
            dtype: dims.dtype(),
            shape: dims.shape().to_vec(),
            strides: dims.strides().to_vec(),
            low,
            bytes,
            start,
            first: start + offset.unsigned_abs(),
        }
    }

    fn allocate(&self, stream: &Arc<CudaStream>) -> Result<CudaSlice<u8>, Error> {
        filled(self.start + self.bytes + GUARD, NAN, stream)
    }

    /// Queues a copy of the host's bytes.
    fn upload(&self, memory: &mut CudaSlice<u8>, stream: &Arc<CudaStream>) -> Result<(), Error> {
        if self.bytes == 0 {
            return Ok(());
        }
        // SAFETY: a view's constructor guarantees that everything it reaches, gaps included, is one
        // live allocation.
        let bytes = unsafe { std::slice::from_raw_parts(self.low, self.bytes) };
        stream
            .memcpy_htod(bytes, &mut memory.slice_mut(self.start..self.start + self.bytes))
            .map_err(|error| driver_error("copying to the GPU", error))
    }

    fn address(&self, memory: &CudaSlice<u8>) -> u64 {
        memory.device_ptr(memory.stream()).0 + self.first as u64
    }
}

/// A tensor that is read.
pub(super) struct Mirror {
    memory: CudaSlice<u8>,
    place: Place,
}

impl Mirror {
    pub fn new(tensor: &Tensor, stream: &Arc<CudaStream>) -> Result<Mirror, Error> {
        let place = Place::new(tensor.as_ptr(), tensor);
        let mut memory = place.allocate(stream)?;
        place.upload(&mut memory, stream)?;
        Ok(Mirror { memory, place })
    }

    pub fn view(&self) -> Tensor<'_, DeviceMemory> {
        let Place { dtype, shape, strides, .. } = &self.place;
        // SAFETY: the memory holds all that the view reaches, and lives as long as the mirror.
        unsafe {
            Tensor::from_device_address(
                self.place.address(&self.memory),
                *dtype,
                shape,
                Some(strides),
            )
        }
        .expect("dims of a tensor that there is, as aligned as there")
    }

    pub fn replace(&mut self, with: &Tensor, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let place = Place::new(with.as_ptr(), with);
        let Place { dtype, shape, strides, .. } = &self.place;
        if (&place.shape, &place.strides, place.dtype) != (shape, strides, *dtype) {
            let found = format!("{with:?} with strides {:?}", with.strides());
            return Err(Error::argument(
                "replacement",
                found,
                format!("{dtype}{shape:?} with {strides:?}"),
            ));
        }
        let start = self.place.start;
        Place { start, ..place }.upload(&mut self.memory, stream)
    }
}

/// Memory on the GPU for a host tensor that is written, NaN around it.
pub struct MirrorMut {
    memory: CudaSlice<u8>,
    place: Place,
}

impl MirrorMut {
    /// Allocates device memory with the layout of the host's tensor, filled with NaN.
    ///
    /// # Errors
    /// If the device is out of memory.
    pub fn new(tensor: &mut TensorMut, stream: &Arc<CudaStream>) -> Result<MirrorMut, Error> {
        let place = Place::new(tensor.as_mut_ptr(), tensor);
        let memory = place.allocate(stream)?;
        Ok(MirrorMut { memory, place })
    }

    /// A view of it.
    ///
    /// # Panics
    /// Never: the dims come from an existing tensor.
    pub fn view(&self) -> TensorMut<'_, DeviceMemory> {
        let Place { dtype, shape, strides, .. } = &self.place;
        // SAFETY: as for `Mirror`; nothing else looks at it until it has been downloaded.
        unsafe {
            TensorMut::from_device_address(
                self.place.address(&self.memory),
                *dtype,
                shape,
                Some(strides),
            )
        }
        .expect("dims of a tensor that there is, as aligned as there")
    }

    /// The same with the contents of the host's tensor.
    ///
    /// # Errors
    /// If memory does not suffice.
    pub fn filled(tensor: &mut TensorMut, stream: &Arc<CudaStream>) -> Result<MirrorMut, Error> {
        let mut mirror = MirrorMut::new(tensor, stream)?;
        mirror.place.upload(&mut mirror.memory, stream)?;
        Ok(mirror)
    }

    /// Queues that it holds NaN again.
    ///
    /// # Errors
    /// If the driver fails.
    pub fn clear(&self, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let address = self.memory.device_ptr(stream).0;
        // SAFETY: the memory is that long, and of the stream's context.
        unsafe { result::memset_d8_async(address, NAN, self.memory.len(), stream.cu_stream()) }
            .map_err(|error| driver_error("clearing an output", error))
    }

    /// Waits, copies the written elements to a host tensor with the layout of the mirrored tensor,
    /// and checks the surroundings.
    ///
    /// # Errors
    /// If something was written beside it.
    ///
    /// # Panics
    /// If the tensor has another layout.
    pub fn download(&self, to: &mut TensorMut, stream: &Arc<CudaStream>) -> Result<(), Error> {
        let Place { low, bytes, .. } = Place::new(to.as_mut_ptr(), to);
        let start = self.place.start;
        assert_eq!(bytes, self.place.bytes, "a tensor of the same layout");
        let all = downloaded(&self.memory.as_view(), stream)?;
        let mut around = all[..start].iter().chain(&all[start + bytes..]);
        if around.any(|&byte| byte != NAN) {
            return Err(Error::argument(
                "output",
                "written beside its elements",
                "its own elements only",
            ));
        }
        // SAFETY: all that the tensor reaches, from `low` on, is one live allocation, borrowed for
        // writing.
        unsafe { std::ptr::copy_nonoverlapping(all[start..].as_ptr(), low.cast_mut(), bytes) };
        Ok(())
    }
}
