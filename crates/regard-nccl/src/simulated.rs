//! Ranks that are threads of one process, over the host's memory.

use crate::transport::{Exchange, Message, Span, Transport, failed};
use regard::Error;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// A rank of a simulated group: a thread whose device is the CPU. Messages are copied. A rank has
/// ended when this is dropped.
#[derive(Debug)]
pub struct Simulated {
    rank: usize,
    timeout: Duration,
    to: Vec<Sender<Vec<u8>>>,
    from: Vec<Receiver<Vec<u8>>>,
}

impl Simulated {
    /// A group of `size` ranks, in order. A rank that waits longer than `timeout` for another
    /// reports an error.
    pub fn group(size: usize, timeout: Duration) -> Vec<Simulated> {
        let (mut senders, mut receivers): (Vec<_>, Vec<_>) =
            (0..size).map(|_| (Vec::new(), Vec::new())).unzip();
        for to in &mut senders {
            for from in &mut receivers {
                let (sender, receiver) = channel();
                to.push(sender);
                from.push(receiver);
            }
        }
        let ends = senders.into_iter().zip(receivers).enumerate();
        ends.map(|(rank, (to, from))| Simulated { rank, timeout, to, from }).collect()
    }

    fn send(&self, peer: usize, bytes: &[u8]) -> Result<(), Error> {
        let to = self.to.get(peer).ok_or_else(|| self.no_rank(peer))?;
        to.send(bytes.to_vec()).map_err(|_| ended("sending to", peer))
    }

    fn receive(&self, peer: usize) -> Result<Vec<u8>, Error> {
        let from = self.from.get(peer).ok_or_else(|| self.no_rank(peer))?;
        from.recv_timeout(self.timeout).map_err(|error| match error {
            RecvTimeoutError::Disconnected => ended("receiving from", peer),
            RecvTimeoutError::Timeout => {
                let reason = format!("no message within {:?}", self.timeout);
                failed(format!("receiving from rank {peer}"), reason)
            }
        })
    }

    fn no_rank(&self, peer: usize) -> Error {
        Error::argument("peer", peer, format!("below {}, the number of ranks", self.to.len()))
    }
}

fn ended(doing: &str, peer: usize) -> Error {
    failed(format!("{doing} rank {peer}"), format!("rank {peer} has ended"))
}

/// The bytes of a span.
///
/// # Safety
/// The span is initialized memory of the host that nothing writes while the slice lives.
unsafe fn bytes<'a>(span: Span) -> &'a [u8] {
    if span.bytes == 0 {
        return &[];
    }
    // SAFETY: the caller's promise.
    unsafe { std::slice::from_raw_parts(span.address as *const u8, span.bytes) }
}

impl Transport for Simulated {
    type Queue = ();

    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.to.len()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    unsafe fn exchange(
        &self,
        (): &(),
        sends: &[Message],
        receives: &[Message],
    ) -> Result<(), Error> {
        for send in sends {
            // SAFETY: the caller's promise.
            self.send(send.peer, unsafe { bytes(send.span) })?;
        }
        for receive in receives {
            let message = self.receive(receive.peer)?;
            if message.len() != receive.span.bytes {
                let found = format!("{} bytes from rank {}", message.len(), receive.peer);
                let allowed = format!("{}: ranks call with the same shapes", receive.span.bytes);
                return Err(Error::argument("message", found, allowed));
            }
            let to = receive.span.address as *mut u8;
            // SAFETY: the span is memory of that size which nothing else uses.
            unsafe { std::ptr::copy_nonoverlapping(message.as_ptr(), to, message.len()) };
        }
        Ok(())
    }

    unsafe fn all_gather(&self, queue: &(), part: Span, all: Span) -> Result<(), Error> {
        let sends: Vec<_> = (0..self.size()).map(|peer| Message { peer, span: part }).collect();
        let receives: Vec<_> = (0..self.size())
            .map(|peer| Message { peer, span: all.part(peer, self.size()) })
            .collect();
        // SAFETY: the caller's promise.
        unsafe { self.exchange(queue, &sends, &receives) }
    }

    unsafe fn all_to_all(&self, queue: &(), exchanges: &[Exchange]) -> Result<(), Error> {
        let size = self.size();
        let messages = |span: fn(&Exchange) -> Span| -> Vec<Message> {
            let parts = |peer| exchanges.iter().map(move |exchange| (peer, span(exchange)));
            let parts = (0..size).flat_map(parts);
            parts.map(|(peer, span)| Message { peer, span: span.part(peer, size) }).collect()
        };
        // SAFETY: the caller's promise; parts are inside their spans.
        unsafe { self.exchange(queue, &messages(|x| x.from), &messages(|x| x.to)) }
    }

    fn all_gather_host(&self, (): &(), bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        (0..self.size()).try_for_each(|peer| self.send(peer, bytes))?;
        (0..self.size()).map(|peer| self.receive(peer)).collect()
    }

    fn wait(&self, (): &()) -> Result<(), Error> {
        Ok(())
    }
}
