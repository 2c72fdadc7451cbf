//! NVIDIA GPUs over NCCL. The driver and NCCL (2.18 or newer) are loaded when the program runs.
//!
//! A communicator never blocks for ever. A rank that does not answer within the timeout is an error
//! on the others. The communicator is then aborted; this also ends kernels that wait.

mod gpu;
mod library;

use crate::transport::{Exchange, Message, Span, Transport, failed};
pub use gpu::{DeviceBuffer, GpuRank};
use library::{BYTE, Comm, Config, IN_PROGRESS, Library, SUCCESS, Status, UniqueId, library};
use regard::Error;
use regard::cuda::cudarc::driver::sys::{self, CUresult};
use regard::cuda::cudarc::driver::{CudaStream, result};
use regard::cuda::driver_error;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The shared identity of a group of ranks. Rank 0 makes it and gives it to the others: to threads
/// as it is, to processes as bytes.
#[derive(Clone, Copy)]
pub struct GroupId(UniqueId);

impl GroupId {
    /// A new group.
    ///
    /// # Errors
    /// If NCCL is not installed, or does not find an interface to listen on.
    pub fn new() -> Result<GroupId, Error> {
        let library = library()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: NCCL fills in the id.
        let status = unsafe { (library.get_unique_id)(&mut id) };
        match status {
            SUCCESS => Ok(GroupId(id)),
            _ => Err(failed("making an NCCL group", library.text(status, std::ptr::null_mut()))),
        }
    }

    /// The bytes of a group, for other processes.
    pub fn to_bytes(self) -> [u8; 128] {
        self.0.0.map(|x| x as u8)
    }

    /// The group of these bytes.
    pub fn from_bytes(bytes: [u8; 128]) -> GroupId {
        GroupId(UniqueId(bytes.map(|x| x as _)))
    }
}

impl fmt::Debug for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GroupId")
    }
}

/// Options for joining a group.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Time that a rank waits for another. An exchange on the GPU counts from [`Transport::wait`].
    pub timeout: Duration,
    /// Maximum CTAs that communicate; `None` is NCCL's choice. CTAs that transfers take while
    /// kernels run are not free for the kernels.
    pub max_ctas: Option<u32>,
}

impl Default for Options {
    /// 60 seconds, NCCL's choice.
    fn default() -> Options {
        Options { timeout: Duration::from_secs(60), max_ctas: None }
    }
}

/// A rank of an NCCL group. One thread uses it.
///
/// The ends of an exchange do not know each other's sizes: ranks that call with different shapes
/// get wrong results or a timeout.
pub struct Nccl {
    library: &'static Library,
    comm: Comm,
    rank: usize,
    size: usize,
    timeout: Duration,
    /// Whether the communicator was aborted.
    aborted: Cell<bool>,
    before_abort: Option<Box<dyn Fn() + Send>>,
}

// SAFETY: a communicator may be used by any thread, one at a time.
unsafe impl Send for Nccl {}

impl Nccl {
    /// Joins a group as rank `rank` of `size`, on the GPU of the stream. It returns when all ranks
    /// have joined.
    ///
    /// # Errors
    /// If NCCL is not installed or older than 2.18; if not all ranks join within the timeout.
    pub fn join(
        stream: &CudaStream,
        id: GroupId,
        (rank, size): (usize, usize),
        options: &Options,
    ) -> Result<Nccl, Error> {
        if rank >= size {
            return Err(Error::argument("rank", rank, format!("below {size}, the group's size")));
        }
        let library = library()?;
        stream
            .context()
            .bind_to_thread()
            .map_err(|error| driver_error("using the GPU's context", error))?;
        let mut nccl = Nccl {
            library,
            comm: std::ptr::null_mut(),
            rank,
            size,
            timeout: options.timeout,
            aborted: Cell::new(false),
            before_abort: None,
        };
        let mut config = Config::new(options.max_ctas);
        // SAFETY: NCCL reads the configuration and writes the communicator before it returns.
        let status =
            unsafe { (library.init)(&mut nccl.comm, size as i32, id.0, rank as i32, &mut config) };
        nccl.settle("joining an NCCL group", status)?;
        Ok(nccl)
    }

    /// NCCL's version, as it counts: 2.28.3 is 22803.
    ///
    /// # Errors
    /// If it is not installed.
    pub fn version() -> Result<usize, Error> {
        Ok(library()?.version().unwrap_or(0) as usize)
    }

    /// Calls this before the communicator is aborted.
    pub(crate) fn before_abort(&mut self, call: Box<dyn Fn() + Send>) {
        self.before_abort = Some(call);
    }

    /// From now on waits no longer than this.
    pub(crate) fn limit_timeout(&mut self, timeout: Duration) {
        self.timeout = self.timeout.min(timeout);
    }

    /// Waits until a call that NCCL works on is queued.
    fn settle(&self, doing: &str, status: Status) -> Result<(), Error> {
        let started = Instant::now();
        let mut status = status;
        while status == IN_PROGRESS {
            if started.elapsed() > self.timeout {
                return Err(self.give_up(doing));
            }
            std::thread::yield_now();
            // SAFETY: the communicator is valid until it is aborted.
            let asked = unsafe { (self.library.async_error)(self.comm, &mut status) };
            if asked != SUCCESS {
                status = asked;
            }
        }
        if status == SUCCESS { Ok(()) } else { Err(self.fail(doing, status)) }
    }

    /// The error of a status; ends the communicator.
    fn fail(&self, doing: &str, status: Status) -> Error {
        let reason = self.library.text(status, self.comm);
        self.abort();
        failed(format!("{doing} (rank {} of {})", self.rank, self.size), reason)
    }

    /// The error of a rank that does not answer; ends the communicator.
    fn give_up(&self, doing: &str) -> Error {
        self.abort();
        let reason = format!(
            "no answer within {:?}: a rank has ended, or makes other calls; the communicator was \
             aborted",
            self.timeout
        );
        failed(format!("{doing} (rank {} of {})", self.rank, self.size), reason)
    }

    fn abort(&self) {
        if !self.aborted.replace(true) && !self.comm.is_null() {
            if let Some(before) = &self.before_abort {
                before();
            }
            // SAFETY: the communicator is valid, and not used again. Its status changes nothing.
            unsafe { (self.library.abort)(self.comm) };
        }
    }

    pub(crate) fn expect_alive(&self, doing: &str) -> Result<(), Error> {
        match self.aborted.get() {
            false => Ok(()),
            true => Err(failed(doing, "the communicator was aborted after an earlier error")),
        }
    }

    /// Queues sends and receives as one group.
    fn group(&self, doing: &str, queue: impl Fn() -> Status) -> Result<(), Error> {
        self.expect_alive(doing)?;
        // SAFETY: groups start and end on this thread.
        let started = unsafe { (self.library.group_start)() };
        let queued = if started == SUCCESS { queue() } else { started };
        // SAFETY: as above.
        let ended = unsafe { (self.library.group_end)() };
        let failed = |status: Status| status != SUCCESS && status != IN_PROGRESS;
        self.settle(doing, if failed(queued) { queued } else { ended })
    }

    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn send(&self, stream: &CudaStream, peer: usize, span: Span) -> Status {
        let Span { address, bytes } = span;
        let (comm, stream) = (self.comm, stream.cu_stream().cast());
        // SAFETY: the caller's promise.
        unsafe { (self.library.send)(address as *const _, bytes, BYTE, peer as i32, comm, stream) }
    }

    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn receive(&self, stream: &CudaStream, peer: usize, span: Span) -> Status {
        let Span { address, bytes } = span;
        let (comm, stream) = (self.comm, stream.cu_stream().cast());
        // SAFETY: the caller's promise.
        unsafe { (self.library.receive)(address as *mut _, bytes, BYTE, peer as i32, comm, stream) }
    }
}

/// The first status that is an error, or the last.
fn first_error(statuses: impl Iterator<Item = Status>) -> Status {
    let mut last = SUCCESS;
    for status in statuses {
        last = status;
        if status != SUCCESS && status != IN_PROGRESS {
            break;
        }
    }
    last
}

impl Transport for Nccl {
    type Queue = Arc<CudaStream>;

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    unsafe fn exchange(
        &self,
        queue: &Arc<CudaStream>,
        sends: &[Message],
        receives: &[Message],
    ) -> Result<(), Error> {
        for message in sends.iter().chain(receives) {
            if message.peer >= self.size {
                let allowed = format!("below {}, the number of ranks", self.size);
                return Err(Error::argument("peer", message.peer, allowed));
            }
        }
        self.group("exchanging messages", || {
            // SAFETY: the caller's promise.
            let send = |message: &Message| unsafe { self.send(queue, message.peer, message.span) };
            let receive =
                // SAFETY: as above.
                |message: &Message| unsafe { self.receive(queue, message.peer, message.span) };
            first_error(sends.iter().map(send).chain(receives.iter().map(receive)))
        })
    }

    unsafe fn all_gather(
        &self,
        queue: &Arc<CudaStream>,
        part: Span,
        all: Span,
    ) -> Result<(), Error> {
        self.expect_alive("gathering")?;
        let (from, to) = (part.address as *const _, all.address as *mut _);
        let stream = queue.cu_stream().cast();
        // SAFETY: the caller's promise.
        let status =
            unsafe { (self.library.all_gather)(from, to, part.bytes, BYTE, self.comm, stream) };
        self.settle("gathering", status)
    }

    unsafe fn all_to_all(
        &self,
        queue: &Arc<CudaStream>,
        exchanges: &[Exchange],
    ) -> Result<(), Error> {
        self.group("exchanging parts", || {
            let pairs = (0..self.size).flat_map(|peer| exchanges.iter().map(move |x| (peer, x)));
            first_error(pairs.map(|(peer, exchange)| {
                let (from, to) =
                    (exchange.from.part(peer, self.size), exchange.to.part(peer, self.size));
                // SAFETY: the caller's promise; parts are inside their spans.
                let sent = unsafe { self.send(queue, peer, from) };
                if sent != SUCCESS && sent != IN_PROGRESS {
                    return sent;
                }
                // SAFETY: as above.
                unsafe { self.receive(queue, peer, to) }
            }))
        })
    }

    fn all_gather_host(
        &self,
        queue: &Arc<CudaStream>,
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>, Error> {
        let part = DeviceBuffer::new(queue.context(), bytes.len())?;
        let all = DeviceBuffer::new(queue.context(), bytes.len() * self.size)?;
        part.write(bytes)?;
        let span = |buffer: &DeviceBuffer, bytes| Span { address: buffer.address(), bytes };
        // SAFETY: the buffers are of these sizes, and live until the work is done or aborted.
        unsafe {
            self.all_gather(queue, span(&part, bytes.len()), span(&all, bytes.len() * self.size))?;
        }
        self.wait(queue)?;
        let mut gathered = vec![0u8; bytes.len() * self.size];
        // SAFETY: the buffer is of that size, and the work that wrote it is done.
        unsafe { result::memcpy_dtoh_sync(&mut gathered, all.address()) }
            .map_err(|error| driver_error("copying from the GPU", error))?;
        Ok(gathered.chunks(bytes.len().max(1)).map(<[u8]>::to_vec).collect())
    }

    fn wait(&self, queue: &Arc<CudaStream>) -> Result<(), Error> {
        const DOING: &str = "waiting for the GPU";
        self.expect_alive(DOING)?;
        queue.context().bind_to_thread().map_err(|error| driver_error(DOING, error))?;
        let started = Instant::now();
        loop {
            // SAFETY: the stream is valid.
            let done = unsafe { sys::cuStreamQuery(queue.cu_stream()) };
            if done != CUresult::CUDA_ERROR_NOT_READY {
                done.result().map_err(|error| driver_error(DOING, error))?;
            }
            let mut status = SUCCESS;
            // SAFETY: the communicator is valid until it is aborted.
            let asked = unsafe { (self.library.async_error)(self.comm, &mut status) };
            let status = if asked == SUCCESS { status } else { asked };
            if status != SUCCESS && status != IN_PROGRESS {
                return Err(self.fail(DOING, status));
            }
            if done == CUresult::CUDA_SUCCESS {
                return Ok(());
            }
            if started.elapsed() > self.timeout {
                return Err(self.give_up(DOING));
            }
            // A step takes tens of microseconds; sleeping would take longer.
            match started.elapsed() < Duration::from_millis(1) {
                true => std::thread::yield_now(),
                false => std::thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}

/// Time that a group may take to end in order.
const END: Duration = Duration::from_secs(5);

impl Drop for Nccl {
    fn drop(&mut self) {
        if self.aborted.get() || self.comm.is_null() {
            return;
        }
        let started = Instant::now();
        // SAFETY: the communicator is valid, and not used again.
        let mut status = unsafe { (self.library.finalize)(self.comm) };
        while status == IN_PROGRESS && started.elapsed() < END {
            std::thread::sleep(Duration::from_micros(100));
            // SAFETY: as above.
            let asked = unsafe { (self.library.async_error)(self.comm, &mut status) };
            if asked != SUCCESS {
                status = asked;
            }
        }
        match status {
            // SAFETY: it was finalized, and is not used again.
            SUCCESS => unsafe { (self.library.destroy)(self.comm) },
            // SAFETY: it is not used again.
            _ => unsafe { (self.library.abort)(self.comm) },
        };
    }
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Nccl(rank {} of {})", self.rank, self.size)
    }
}
