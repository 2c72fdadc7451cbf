//! Memory of each rank that the other ranks write: offered by its rank, and opened by the others.

use crate::nccl::DeviceBuffer;
use crate::nccl::Nccl;
use crate::transport::{self, Transport};
use regard::Error;
use regard::cuda::cudarc::driver::{CudaContext, CudaStream, sys};
use regard::cuda::driver_error;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

/// Memory of this rank that others write.
#[derive(Debug)]
pub struct Offered {
    context: Arc<CudaContext>,
    buffer: DeviceBuffer,
}

/// The offered memory of all ranks of this process. A rank that opens it keeps it alive.
static OFFERED: Mutex<Vec<Weak<Offered>>> = Mutex::new(Vec::new());

/// A number that only this process has.
fn process() -> u64 {
    static PROCESS: OnceLock<u64> = OnceLock::new();
    *PROCESS.get_or_init(|| RandomState::new().build_hasher().finish())
}

/// What other ranks need to open the memory of a rank.
struct Offer {
    /// The process, as [`process`] tells.
    process: u64,
    /// Its address there.
    address: u64,
    /// The allocation, for other processes, and the offset in it.
    handle: sys::CUipcMemHandle,
    offset: u64,
}

/// Bytes of an allocation's handle.
const HANDLE_BYTES: usize = 64;

impl Offer {
    fn to_bytes(&self) -> Vec<u8> {
        let numbers = [self.process, self.address, self.offset].map(u64::to_ne_bytes);
        let handle = self.handle.reserved.map(|byte| byte as u8);
        numbers.concat().into_iter().chain(handle).collect()
    }

    fn from_bytes(bytes: &[u8]) -> Result<Offer, Error> {
        let broken =
            || transport::failed("opening the memory of a rank", "its offer is not understood");
        let (numbers, rest) = bytes.as_chunks::<8>();
        let [process, address, offset, handle @ ..] = numbers else { return Err(broken()) };
        let handle = handle.as_flattened();
        if handle.len() != HANDLE_BYTES || !rest.is_empty() {
            return Err(broken());
        }
        let mut reserved = [0; HANDLE_BYTES];
        reserved.iter_mut().zip(handle).for_each(|(to, byte)| *to = *byte as _);
        let [process, address, offset] = [*process, *address, *offset].map(u64::from_ne_bytes);
        Ok(Offer { process, address, handle: sys::CUipcMemHandle { reserved }, offset })
    }
}

impl Offered {
    /// Memory of zeros.
    fn new(context: &Arc<CudaContext>, bytes: usize) -> Result<Arc<Offered>, Error> {
        let buffer = DeviceBuffer::new(context, bytes)?;
        let memory = Arc::new(Offered { context: Arc::clone(context), buffer });
        let mut offered = OFFERED.lock().unwrap_or_else(PoisonError::into_inner);
        offered.retain(|memory| memory.strong_count() > 0);
        offered.push(Arc::downgrade(&memory));
        Ok(memory)
    }

    /// The offer to the other ranks.
    fn offer(&self) -> Result<Offer, Error> {
        let failed = |error| driver_error("offering memory to other processes", error);
        let address = self.buffer.address();
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        let (mut base, mut bytes) = (0, 0);
        self.context.bind_to_thread().map_err(failed)?;
        // SAFETY: the address is of an allocation of the current context, and the driver writes
        // its handle, its base and its size.
        unsafe {
            sys::cuIpcGetMemHandle(&mut handle, address).result().map_err(failed)?;
            sys::cuMemGetAddressRange_v2(&mut base, &mut bytes, address)
                .result()
                .map_err(failed)?;
        }
        Ok(Offer { process: process(), address, handle, offset: address - base })
    }
}

/// The memory of a rank as this rank writes it.
#[derive(Debug)]
enum Opened {
    /// Of a rank of this process, or the rank itself.
    Here(Arc<Offered>),
    /// Of another process: the base of the allocation and the address of the memory.
    Foreign { context: Arc<CudaContext>, base: u64, address: u64 },
}

impl Opened {
    fn address(&self) -> u64 {
        match self {
            Opened::Here(memory) => memory.buffer.address(),
            Opened::Foreign { address, .. } => *address,
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Opened::Foreign { context, base, .. } = self
            && context.bind_to_thread().is_ok()
        {
            // SAFETY: the base is of an allocation that `open` opened, and nothing uses it anymore.
            // Its status changes nothing.
            let _closed = unsafe { sys::cuIpcCloseMemHandle(*base) };
        }
    }
}

/// Memory of the same size on every rank.
#[derive(Debug)]
pub struct Shared {
    pub bytes: usize,
    own: Arc<Offered>,
    /// In the order of ranks.
    opened: Vec<Opened>,
}

impl Shared {
    /// Memory of zeros. All ranks call it; if one fails, all do.
    pub fn new(nccl: &Nccl, stream: &Arc<CudaStream>, bytes: usize) -> Result<Shared, Error> {
        let context = stream.context();
        let own = Offered::new(context, bytes);
        let offer = own.as_ref().map_err(Clone::clone).and_then(|own| own.offer());
        let offers = super::agree(nccl, stream, offer.map(|offer| offer.to_bytes()))?;
        let own = own?;
        let open = |(rank, offer): (usize, &Vec<u8>)| match rank == nccl.rank() {
            true => Ok(Opened::Here(Arc::clone(&own))),
            false => open(context, &Offer::from_bytes(offer)?),
        };
        let opened: Result<Vec<Opened>, Error> = offers.iter().enumerate().map(open).collect();
        let agreed = opened.as_ref().map(|_| Vec::new()).map_err(Clone::clone);
        super::agree(nccl, stream, agreed)?;
        Ok(Shared { bytes, own, opened: opened? })
    }

    /// The address of a rank's memory, as this rank's GPU sees it.
    pub fn address(&self, rank: usize) -> u64 {
        self.opened[rank].address()
    }

    /// Whether other processes have opened the memory of this rank.
    pub fn is_foreign(&self) -> bool {
        self.opened.iter().any(|opened| matches!(opened, Opened::Foreign { .. }))
    }

    /// Closes the memory of the other ranks. Nothing is sent afterwards.
    pub fn close(&mut self) {
        self.opened.clear();
    }

    /// Keeps this rank's memory until the process ends.
    pub fn keep(&self) {
        std::mem::forget(Arc::clone(&self.own));
    }
}

/// Opens the memory of another rank for the kernels of this context.
fn open(context: &Arc<CudaContext>, offer: &Offer) -> Result<Opened, Error> {
    let failed = |error| driver_error("opening the memory of another GPU", error);
    context.bind_to_thread().map_err(failed)?;
    if offer.process == process() {
        let offered = OFFERED.lock().unwrap_or_else(PoisonError::into_inner);
        let mut alive = offered.iter().filter_map(Weak::upgrade);
        let memory = alive.find(|memory| memory.buffer.address() == offer.address);
        let memory = memory.ok_or_else(|| {
            transport::failed("opening the memory of another GPU", "its rank has ended")
        })?;
        // SAFETY: both contexts are alive; this thread's is current.
        let status = unsafe { sys::cuCtxEnablePeerAccess(memory.context.cu_ctx(), 0) };
        if status != sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED {
            status.result().map_err(failed)?;
        }
        return Ok(Opened::Here(memory));
    }
    let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
    let mut base = 0;
    // SAFETY: the driver checks the handle and writes the address.
    unsafe { sys::cuIpcOpenMemHandle_v2(&mut base, offer.handle, flags) }
        .result()
        .map_err(failed)?;
    Ok(Opened::Foreign { context: Arc::clone(context), base, address: base + offer.offset })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn offers_travel_as_bytes() {
        let mut reserved = [0; HANDLE_BYTES];
        reserved.iter_mut().zip(-20..).for_each(|(byte, i)| *byte = i);
        let handle = sys::CUipcMemHandle { reserved };
        let offer = Offer { process: process(), address: 1 << 40, handle, offset: 512 };
        let bytes = offer.to_bytes();
        let found = Offer::from_bytes(&bytes).expect("whole");
        assert_eq!(found.to_bytes(), bytes);
        assert_eq!((found.process, found.address, found.offset), (process(), 1 << 40, 512));
        assert!(Offer::from_bytes(&bytes[1..]).is_err());
        assert!(Offer::from_bytes(&[]).is_err());
    }
}
