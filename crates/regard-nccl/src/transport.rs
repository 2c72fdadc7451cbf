//! Moving bytes between ranks.

use regard::Error;
use std::time::Duration;

/// Contiguous memory of a rank's device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The address of the first byte: a pointer of the host, or a `CUdeviceptr`.
    pub address: u64,
    /// Its size.
    pub bytes: usize,
}

impl Span {
    /// Part `index` of `count` equal parts.
    pub fn part(self, index: usize, count: usize) -> Span {
        let bytes = self.bytes / count;
        Span { address: self.address + (index * bytes) as u64, bytes }
    }
}

/// A message to a rank, or from one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// The other rank.
    pub peer: usize,
    /// The memory to send, or to receive into.
    pub span: Span,
}

/// The buffers of an all-to-all: part r of `from` goes to rank r, and part r of `to` comes from
/// there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exchange {
    /// The memory to send, in as many equal parts as there are ranks.
    pub from: Span,
    /// The memory to receive into, likewise.
    pub to: Span,
}

/// An exchange of device memory between the ranks of a group. Every rank makes the same calls in
/// the same order.
///
/// Work is queued on a queue of the device (a CUDA stream) and calls return before it is done. On
/// the host it is done at once. No method that queues work allocates device memory, so that a CUDA
/// graph can capture it.
pub trait Transport {
    /// A queue of the device: a CUDA stream; `()` on the host.
    type Queue;

    /// This rank's number.
    fn rank(&self) -> usize;

    /// The number of ranks.
    fn size(&self) -> usize;

    /// Time that a rank waits for another before it reports an error.
    fn timeout(&self) -> Duration;

    /// Sends and receives, all at once. Messages between two ranks arrive in the order of the call.
    ///
    /// # Errors
    /// If a rank does not answer, or the transport fails. A transport that sees the sizes of both
    /// ends also reports sizes that differ.
    ///
    /// # Safety
    /// Every span is memory of this rank's device. Until the queued work is done, nothing writes
    /// the sent memory and nothing uses the received memory.
    unsafe fn exchange(
        &self,
        queue: &Self::Queue,
        sends: &[Message],
        receives: &[Message],
    ) -> Result<(), Error>;

    /// Gathers `part` of every rank into `all`, in the order of ranks.
    ///
    /// # Errors
    /// As [`Transport::exchange`].
    ///
    /// # Safety
    /// As [`Transport::exchange`]; `all` has the size of `part` times the number of ranks.
    unsafe fn all_gather(&self, queue: &Self::Queue, part: Span, all: Span) -> Result<(), Error>;

    /// Exchanges the parts of several spans at once.
    ///
    /// # Errors
    /// As [`Transport::exchange`].
    ///
    /// # Safety
    /// As [`Transport::exchange`]; both spans of an exchange have the same size, a multiple of the
    /// number of ranks.
    unsafe fn all_to_all(&self, queue: &Self::Queue, exchanges: &[Exchange]) -> Result<(), Error>;

    /// Memory of the transport for messages to this rank, of at least `bytes` bytes: they arrive
    /// there without a copy. `None` if messages arrive equally well anywhere. It lives as long as
    /// the transport, and later calls may return it again. For setting up: every rank calls it,
    /// with the same size.
    ///
    /// In an exchange that receives into it, every rank sends one message for each that it
    /// receives, and message k arrives at the same place of this memory on every rank.
    ///
    /// # Errors
    /// As [`Transport::exchange`]; if memory does not suffice.
    fn inbox(&self, queue: &Self::Queue, bytes: usize) -> Result<Option<Span>, Error> {
        let _ = (queue, bytes);
        Ok(None)
    }

    /// Gathers bytes of the host's memory, as many on every rank, and waits for them. For setting
    /// up: it may allocate.
    ///
    /// # Errors
    /// As [`Transport::exchange`].
    fn all_gather_host(&self, queue: &Self::Queue, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error>;

    /// Waits for the queued work. After an error the transport is of no more use.
    ///
    /// # Errors
    /// If it is not done within the [timeout](Transport::timeout), or the transport or the device
    /// fails.
    fn wait(&self, queue: &Self::Queue) -> Result<(), Error>;
}

/// A transport that is selected when the program runs.
impl<T: Transport + ?Sized> Transport for Box<T> {
    type Queue = T::Queue;

    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn size(&self) -> usize {
        (**self).size()
    }

    fn timeout(&self) -> Duration {
        (**self).timeout()
    }

    unsafe fn exchange(
        &self,
        queue: &T::Queue,
        sends: &[Message],
        receives: &[Message],
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { (**self).exchange(queue, sends, receives) }
    }

    unsafe fn all_gather(&self, queue: &T::Queue, part: Span, all: Span) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { (**self).all_gather(queue, part, all) }
    }

    unsafe fn all_to_all(&self, queue: &T::Queue, exchanges: &[Exchange]) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { (**self).all_to_all(queue, exchanges) }
    }

    fn inbox(&self, queue: &T::Queue, bytes: usize) -> Result<Option<Span>, Error> {
        (**self).inbox(queue, bytes)
    }

    fn all_gather_host(&self, queue: &T::Queue, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        (**self).all_gather_host(queue, bytes)
    }

    fn wait(&self, queue: &T::Queue) -> Result<(), Error> {
        (**self).wait(queue)
    }
}

/// The error of an exchange with a rank.
pub(crate) fn failed(doing: impl Into<String>, reason: impl Into<String>) -> Error {
    Error::Driver { doing: doing.into(), reason: reason.into() }
}
