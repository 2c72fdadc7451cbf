//! NVIDIA GPUs of a host that write each other's memory.
//!
//! NCCL takes 10 us and more for an exchange of few bytes. Here a rank stores its parts right into
//! the memory of the others, over NVLink or PCIe, and one kernel per rank sends and receives. Parts
//! beyond [`PeerOptions::max_part_bytes`] go by NCCL.
//!
//! Messages into an [inbox](Transport::inbox) are copied by copy engines, which take no
//! multiprocessors from the kernels that they overlap with. Other messages go by NCCL.

mod kernel;
mod memory;
mod signals;

use crate::nccl::{DeviceBuffer, GroupId, Nccl, Options};
use crate::transport::{Exchange, Message, Span, Transport};
use kernel::{Kernel, MAX_RANKS, MAX_SPANS, PeerSpan, Place, Room};
use memory::Shared;
use regard::cuda::cudarc::driver::CudaStream;
use regard::{Error, Refusal};
use signals::{SIGNAL_BYTES, Signal, Signals, copy};
use std::cell::RefCell;
use std::iter;
use std::sync::Arc;
use std::time::Duration;

/// Options for joining a group of [`PeerMemory`].
#[derive(Debug, Clone, Copy)]
pub struct PeerOptions {
    /// Options of the group's NCCL.
    pub nccl: Options,
    /// Maximum bytes that a rank sends to another in a gather or an all-to-all by peer memory; more
    /// go by NCCL. It is the same on every rank. A rank takes four times as much of its GPU's
    /// memory per rank of the group.
    pub max_part_bytes: usize,
}

impl Default for PeerOptions {
    /// NCCL's defaults, and 1 MiB.
    fn default() -> PeerOptions {
        PeerOptions { nccl: Options::default(), max_part_bytes: 1 << 20 }
    }
}

/// A rank of a group of GPUs that reach each other's memory: threads of one process, or processes
/// of one host. One thread uses it.
///
/// Gathers and all-to-alls of a rank may not overlap: they are queued on one stream, or on streams
/// that wait for each other. As with [`Nccl`], the ends do not know each other's sizes.
#[derive(Debug)]
pub struct PeerMemory {
    nccl: Nccl,
    stream: Arc<CudaStream>,
    kernel: Kernel,
    room: Room,
    /// Per CTA: the half of its landing memory that it uses next.
    halves: DeviceBuffer,
    signals: Signals,
    /// Landing memory of kernels, and signals behind it.
    shared: Shared,
    inboxes: RefCell<Vec<Shared>>,
}

/// Time that ranks wait for each other when they end.
const END: Duration = Duration::from_secs(5);

impl PeerMemory {
    /// Joins a group as rank `rank` of `ranks`, on the GPU of the stream. It returns when all ranks
    /// have joined.
    ///
    /// # Errors
    /// As [`Nccl::join`]. A refusal, on every rank, if a GPU does not reach the memory of another
    /// or there are more than 16 ranks; the group has ended then, and [`Nccl::join`] takes a new
    /// one. If ranks differ in `max_part_bytes`.
    pub fn join(
        stream: &Arc<CudaStream>,
        id: GroupId,
        (rank, ranks): (usize, usize),
        options: &PeerOptions,
    ) -> Result<PeerMemory, Error> {
        let mut nccl = Nccl::join(stream, id, (rank, ranks), &options.nccl)?;
        let context = stream.context();
        let room = Room::new(ranks, options.max_part_bytes);
        let part_bytes = Ok(options.max_part_bytes.to_ne_bytes().to_vec());
        let sizes = agree(&nccl, stream, part_bytes)?;
        if let Some(other) = sizes.iter().position(|size| *size != sizes[0]) {
            let found = format!("different on ranks 0 and {other}");
            return Err(Error::argument("max_part_bytes", found, "the same on every rank"));
        }
        if ranks > MAX_RANKS {
            return Err(Error::argument("ranks", ranks, format!("at most {MAX_RANKS}")));
        }
        let own = Kernel::load(context)
            .and_then(|kernel| Ok((kernel, DeviceBuffer::new(context, room.halves_bytes())?)));
        agree(&nccl, stream, own.as_ref().map(|_| Vec::new()).map_err(Clone::clone))?;
        let (kernel, halves) = own?;
        let shared = Shared::new(&nccl, stream, room.landing_bytes() + SIGNAL_BYTES)?;
        let signals = Signals::new(context, (rank, ranks), &shared, room.landing_bytes());
        agree(&nccl, stream, signals.as_ref().map(|_| Vec::new()).map_err(Clone::clone))?;
        let signals = signals?;
        // NCCL's abort waits for the GPU, and so for kernels that wait for other ranks.
        let end = Arc::clone(signals.end());
        nccl.before_abort(Box::new(move || end.now()));
        let (stream, inboxes) = (Arc::clone(stream), RefCell::default());
        Ok(PeerMemory { nccl, stream, kernel, room, halves, signals, shared, inboxes })
    }

    /// Whether `spans` spans, with `lines` lines per part together, go by peer memory.
    fn takes(&self, spans: usize, lines: usize) -> bool {
        spans <= MAX_SPANS && lines <= self.room.lines()
    }

    /// Queues the kernel.
    ///
    /// # Safety
    /// As [`Transport::all_to_all`].
    unsafe fn launch(&self, stream: &CudaStream, spans: &[PeerSpan]) -> Result<(), Error> {
        self.nccl.expect_alive("exchanging parts")?;
        let PeerMemory { room, halves, signals, shared, .. } = self;
        let place = Place { room, rank: self.nccl.rank(), shared, halves, end: signals.end() };
        // SAFETY: the shared memory has the room, and lives as long as this; the caller has
        // promised the rest.
        unsafe { self.kernel.launch(stream, &place, spans) }
    }

    /// Sends messages to the places in the inboxes of other ranks that these receives have here.
    ///
    /// # Safety
    /// As [`Transport::exchange`].
    unsafe fn deliver(
        &self,
        stream: &CudaStream,
        inbox: &Shared,
        sends: &[Message],
        receives: &[Message],
    ) -> Result<(), Error> {
        self.nccl.expect_alive("exchanging messages")?;
        let (signals, own) = (&self.signals, inbox.address(self.nccl.rank()));
        // SAFETY: the memory of all ranks lives as long as this; messages fit the inboxes, which
        // are equally large on every rank; the caller has promised the rest.
        unsafe {
            for source in peers(receives) {
                signals.send(stream, Signal::Ready, source)?;
            }
            for target in peers(sends) {
                signals.receive(stream, Signal::Ready, target)?;
                for (send, receive) in sends.iter().zip(receives) {
                    if send.peer == target {
                        let place = inbox.address(target) + (receive.span.address - own);
                        copy(stream, place, send.span.address, send.span.bytes)?;
                    }
                }
                signals.send(stream, Signal::Arrived, target)?;
            }
            for source in peers(receives) {
                signals.receive(stream, Signal::Arrived, source)?;
            }
        }
        Ok(())
    }

    /// Whether these receives are into an inbox, and the messages that go to their places on other
    /// ranks fit there.
    fn delivers(&self, inbox: &Shared, sends: &[Message], receives: &[Message]) -> bool {
        let own = self.nccl.rank();
        let first = inbox.address(own);
        let is_other = |message: &Message| message.peer != own && message.peer < self.nccl.size();
        let fits = |(send, receive): (&Message, &Message)| {
            let at = receive.span.address.wrapping_sub(first);
            let bytes = send.span.bytes.max(receive.span.bytes);
            is_other(send)
                && is_other(receive)
                && at.checked_add(bytes as u64).is_some_and(|end| end <= inbox.bytes as u64)
        };
        !sends.is_empty() && sends.len() == receives.len() && sends.iter().zip(receives).all(fits)
    }
}

/// The ranks of these messages, each once.
fn peers(messages: &[Message]) -> impl Iterator<Item = usize> {
    let is_first = move |i: usize| messages[..i].iter().all(|other| other.peer != messages[i].peer);
    (0..messages.len()).filter(move |&i| is_first(i)).map(|i| messages[i].peer)
}

/// Bytes of a rank's message while a group is set up.
const SETUP_BYTES: usize = 512;

/// What each rank has come to, or a refusal on every rank if one has failed.
fn agree(
    nccl: &Nccl,
    stream: &Arc<CudaStream>,
    own: Result<Vec<u8>, Error>,
) -> Result<Vec<Vec<u8>>, Error> {
    let (failed, mut message) = match own {
        Ok(bytes) => (0u8, bytes),
        Err(error) => (1, error.to_string().into_bytes()),
    };
    message.truncate(SETUP_BYTES - 3);
    let mut bytes = vec![failed];
    bytes.extend((message.len() as u16).to_ne_bytes());
    bytes.extend(message);
    bytes.resize(SETUP_BYTES, 0);
    let all = nccl.all_gather_host(stream, &bytes)?;
    let message = |bytes: &[u8]| {
        let length = usize::from(u16::from_ne_bytes([bytes[1], bytes[2]]));
        bytes[3..][..length].to_vec()
    };
    if let Some(rank) = all.iter().position(|bytes| bytes[0] != 0) {
        let reason = String::from_utf8_lossy(&message(&all[rank])).into_owned();
        let machine = format!("rank {rank} of {}", all.len());
        return Err(Refusal { machine, reason }.into());
    }
    Ok(all.iter().map(|bytes| message(bytes)).collect())
}

impl Transport for PeerMemory {
    type Queue = Arc<CudaStream>;

    fn rank(&self) -> usize {
        self.nccl.rank()
    }

    fn size(&self) -> usize {
        self.nccl.size()
    }

    fn timeout(&self) -> Duration {
        self.nccl.timeout()
    }

    unsafe fn exchange(
        &self,
        queue: &Arc<CudaStream>,
        sends: &[Message],
        receives: &[Message],
    ) -> Result<(), Error> {
        let inboxes = self.inboxes.borrow();
        match inboxes.iter().find(|inbox| self.delivers(inbox, sends, receives)) {
            // SAFETY: the caller's promise.
            Some(inbox) => unsafe { self.deliver(queue, inbox, sends, receives) },
            // SAFETY: as above.
            None => unsafe { self.nccl.exchange(queue, sends, receives) },
        }
    }

    unsafe fn all_gather(
        &self,
        queue: &Arc<CudaStream>,
        part: Span,
        all: Span,
    ) -> Result<(), Error> {
        let span = PeerSpan::gather(part, all);
        match self.takes(1, span.lines()) {
            // SAFETY: the caller's promise.
            true => unsafe { self.launch(queue, &[span]) },
            // SAFETY: as above.
            false => unsafe { self.nccl.all_gather(queue, part, all) },
        }
    }

    unsafe fn all_to_all(
        &self,
        queue: &Arc<CudaStream>,
        exchanges: &[Exchange],
    ) -> Result<(), Error> {
        let span = |exchange| PeerSpan::exchange(exchange, self.size());
        let lines = exchanges.iter().map(|exchange| span(exchange).lines()).sum();
        if !self.takes(exchanges.len(), lines) {
            // SAFETY: the caller's promise.
            return unsafe { self.nccl.all_to_all(queue, exchanges) };
        }
        let mut spans = [PeerSpan::default(); MAX_SPANS];
        spans.iter_mut().zip(exchanges).for_each(|(to, exchange)| *to = span(exchange));
        // SAFETY: as above.
        unsafe { self.launch(queue, &spans[..exchanges.len()]) }
    }

    fn inbox(&self, queue: &Arc<CudaStream>, bytes: usize) -> Result<Option<Span>, Error> {
        self.nccl.expect_alive("making an inbox")?;
        let mut inboxes = self.inboxes.borrow_mut();
        let known = inboxes.iter().position(|inbox| inbox.bytes >= bytes);
        let number = known.unwrap_or(inboxes.len());
        if known.is_none() {
            // Graphs may have the addresses of the smaller ones.
            inboxes.push(Shared::new(&self.nccl, queue, bytes)?);
        }
        let inbox = &inboxes[number];
        Ok(Some(Span { address: inbox.address(self.nccl.rank()), bytes: inbox.bytes }))
    }

    fn all_gather_host(
        &self,
        queue: &Arc<CudaStream>,
        bytes: &[u8],
    ) -> Result<Vec<Vec<u8>>, Error> {
        self.nccl.all_gather_host(queue, bytes)
    }

    fn wait(&self, queue: &Arc<CudaStream>) -> Result<(), Error> {
        self.nccl.wait(queue)
    }
}

impl Drop for PeerMemory {
    fn drop(&mut self) {
        self.nccl.limit_timeout(END);
        let done = self.nccl.wait(&self.stream).is_ok();
        let mut shared: Vec<&mut Shared> =
            iter::once(&mut self.shared).chain(self.inboxes.get_mut()).collect();
        let exported = shared.iter().any(|shared| shared.is_foreign());
        shared.iter_mut().for_each(|shared| shared.close());
        // Other processes have this memory open until they end the group too.
        let barrier = || self.nccl.all_gather_host(&self.stream, &[0]).is_ok();
        if exported && !(done && barrier()) {
            shared.iter().for_each(|shared| shared.keep());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_messages_are_found_once() {
        let span = Span { address: 0, bytes: 0 };
        let messages = [3, 1, 3, 0, 1].map(|peer| Message { peer, span });
        assert_eq!(peers(&messages).collect::<Vec<_>>(), [3, 1, 0]);
        assert_eq!(peers(&[]).count(), 0);
    }
}
