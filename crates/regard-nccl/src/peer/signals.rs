//! Signals between ranks on their streams, and the end of all waiting.
//!
//! A signal is a number of the receiver's memory: 0, and 1 from the time that the sender's stream
//! reaches the signal until the receiver's stream has waited for it. Copy engines write it and
//! streams wait for it, so that no multiprocessor is taken. It counts nothing, so graphs can be
//! replayed.

use super::kernel::MAX_RANKS;
use super::memory::Shared;
use crate::nccl::DeviceBuffer;
use regard::Error;
use regard::cuda::cudarc::driver::{CudaContext, CudaStream, result, sys};
use regard::cuda::driver_error;
use std::sync::Arc;
use std::time::Duration;

/// The kinds of signals that a rank receives from each other rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// The sender has room for a message.
    Ready,
    /// The sender's message is here.
    Arrived,
}

/// Bytes of the signals that a rank receives.
pub const SIGNAL_BYTES: usize = 2 * MAX_RANKS * size_of::<u32>();

/// The address of a signal from a rank, of the signals at an address.
fn address(signals: u64, signal: Signal, from: usize) -> u64 {
    signals + ((signal as usize * MAX_RANKS + from) * size_of::<u32>()) as u64
}

/// The signals of a rank.
#[derive(Debug)]
pub struct Signals {
    rank: usize,
    /// The signals of each rank.
    signals: Vec<u64>,
    end: Arc<End>,
}

fn failed(error: result::DriverError) -> Error {
    driver_error("exchanging messages", error)
}

impl Signals {
    /// The signals are at an offset of the shared memory.
    pub fn new(
        context: &Arc<CudaContext>,
        (rank, ranks): (usize, usize),
        shared: &Shared,
        offset: usize,
    ) -> Result<Signals, Error> {
        let signals: Vec<u64> = (0..ranks).map(|r| shared.address(r) + offset as u64).collect();
        let end = Arc::new(End::new(context, signals[rank])?);
        Ok(Signals { rank, signals, end })
    }

    /// The end of all waiting.
    pub fn end(&self) -> &Arc<End> {
        &self.end
    }

    /// Queues a signal to another rank.
    ///
    /// # Safety
    /// The shared memory lives until the work is done.
    pub unsafe fn send(&self, stream: &CudaStream, signal: Signal, to: usize) -> Result<(), Error> {
        let target = address(self.signals[to], signal, self.rank);
        // SAFETY: both are numbers of this size; the caller has promised the rest.
        unsafe { copy(stream, target, self.end.one(), size_of::<u32>()) }
    }

    /// Later work of the stream waits for a signal of another rank.
    ///
    /// # Safety
    /// As [`Signals::send`].
    pub unsafe fn receive(
        &self,
        stream: &CudaStream,
        signal: Signal,
        from: usize,
    ) -> Result<(), Error> {
        let own = address(self.signals[self.rank], signal, from);
        let equal = sys::CUstreamWaitValue_flags::CU_STREAM_WAIT_VALUE_EQ as u32;
        // SAFETY: both are numbers of this size; the caller has promised the rest.
        unsafe {
            sys::cuStreamWaitValue32_v2(stream.cu_stream(), own, 1, equal)
                .result()
                .map_err(failed)?;
            copy(stream, own, self.end.rest(), size_of::<u32>())
        }
    }
}

/// Queues a copy between memory of this GPU and of others, by a copy engine.
///
/// # Safety
/// Both are that large and live until the work is done; until then nothing writes `from` and
/// nothing uses `to`.
pub unsafe fn copy(stream: &CudaStream, to: u64, from: u64, bytes: usize) -> Result<(), Error> {
    if bytes == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }.map_err(failed)
}

/// Ends kernels and streams that wait for other ranks, without what they wait for.
#[derive(Debug)]
pub struct End {
    context: Arc<CudaContext>,
    /// Memory of the host that kernels look at: 1 at the end.
    ended: *mut i32,
    /// What signals are set to, which is 1, and what they are set to after waiting for them: 0, and
    /// 1 at the end, so that all later waits end too.
    values: DeviceBuffer,
    /// The signals of this rank.
    signals: u64,
    /// A stream that nothing waits on.
    stream: Arc<CudaStream>,
}

// SAFETY: the host's memory is a number that is written as a whole; the driver takes calls from any
// thread.
unsafe impl Send for End {}
// SAFETY: as above.
unsafe impl Sync for End {}

impl End {
    fn new(context: &Arc<CudaContext>, signals: u64) -> Result<End, Error> {
        let failed = |error| driver_error("setting up peer memory", error);
        let values = DeviceBuffer::new(context, 2 * size_of::<u32>())?;
        values.write(&[1u32, 0].map(u32::to_ne_bytes).concat())?;
        let stream = context.new_stream().map_err(failed)?;
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        context.bind_to_thread().map_err(failed)?;
        // SAFETY: the context is current; the number is written before anything reads it.
        let ended = unsafe {
            let ended = result::malloc_host(size_of::<i32>(), flags).map_err(failed)?.cast::<i32>();
            ended.write_volatile(0);
            ended
        };
        Ok(End { context: Arc::clone(context), ended, values, signals, stream })
    }

    fn one(&self) -> u64 {
        self.values.address()
    }

    fn rest(&self) -> u64 {
        self.values.address() + size_of::<u32>() as u64
    }

    /// The address of the number that kernels look at.
    pub fn ended(&self) -> u64 {
        self.ended as u64
    }

    /// Ends all waiting, of work that is queued and of later work.
    pub fn now(&self) {
        // SAFETY: the memory lives as long as this.
        unsafe { self.ended.write_volatile(1) };
        let ones = [1u8, 0, 0, 0].repeat(SIGNAL_BYTES / size_of::<u32>());
        let write = |address: u64, bytes: &[u8]| {
            // SAFETY: the memory is as large. The bytes live until the stream is done.
            let written =
                unsafe { result::memcpy_htod_async(address, bytes, self.stream.cu_stream()) };
            written.and_then(|()| self.stream.synchronize())
        };
        if self.context.bind_to_thread().is_err() {
            return;
        }
        // Errors are of a GPU that is of no more use: nothing waits on it.
        let _written = write(self.rest(), &1u32.to_ne_bytes());
        for _ in 0..2 {
            let _written = write(self.signals, &ones);
            // A copy of the 0 before may still be under way.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: no kernel is left: the group waits for its work before it ends.
            let _freed = unsafe { result::free_host(self.ended.cast()) };
        }
    }
}
