//! Exchanges by themselves, and a rank that ends.

use crate::measure::{DIM, Error, HEADS, Operand, Ranks, Runs, SIZE};
use regard_nccl::{Exchange, Message, Span, Transport};
use std::time::Duration;

/// Times of exchanges: decode's in a graph, and the ring's.
pub fn links(ranks: &Ranks) -> Result<(), Error> {
    let (count, number) = (ranks.count(), ranks.number());
    let transport = &ranks.rank.transport;
    let max_bytes = 256 << 20;
    let (from, to) =
        (Operand::new(&ranks.stream, max_bytes)?, Operand::new(&ranks.stream, max_bytes)?);
    let span = |operand: &Operand, bytes| Span { address: operand.address, bytes };
    for batch in [1, 8, 64, 128, 256, 512] {
        let (q, rows) = (HEADS * batch * DIM * SIZE, HEADS * batch);
        let gathered = ranks.time(Runs::Graph(200), false, || {
            // SAFETY: the memory is larger.
            unsafe {
                transport.all_gather(&ranks.stream, span(&from, q / count), span(&to, q))?;
            }
            Ok(())
        })?;
        let parts = [(0, rows * DIM * 4), (1 << 28, rows * 4)].map(|(at, bytes)| {
            let span = |operand: &Operand| Span { address: operand.address + at, bytes };
            Exchange { from: span(&from), to: span(&to) }
        });
        let exchanged = ranks.time(Runs::Graph(200), false, || {
            // SAFETY: the memory is larger.
            unsafe { transport.all_to_all(&ranks.stream, &parts)? };
            Ok(())
        })?;
        ranks.say(&format!(
            "B {batch}: all-gather of queries {:.1} us, all-to-all of partial results {:.1} us",
            gathered * 1e6,
            exchanged * 1e6
        ));
    }
    let inbox = transport.inbox(&ranks.stream, max_bytes * SIZE)?;
    let arrival = inbox.map_or(to.address, |inbox| inbox.address);
    for mib in [16, 32, 64, 128, 256, 512] {
        let message =
            |address, peer: usize| Message { peer, span: Span { address, bytes: mib << 20 } };
        let sends = [message(from.address, (number + 1) % count)];
        let receives = [message(arrival, (number + count - 1) % count)];
        let seconds = ranks.time(Runs::Queued(20), false, || {
            // SAFETY: the memory is as large.
            unsafe { transport.exchange(&ranks.stream, &sends, &receives)? };
            Ok(())
        })?;
        let rate = (mib << 20) as f64 / seconds / 1e9;
        ranks.say(&format!(
            "ring step of {mib} MiB: {:.0} us, {rate:.0} GB/s each way",
            seconds * 1e6
        ));
    }
    Ok(())
}

/// The last rank ends before a step.
pub fn dead(ranks: &Ranks) -> Result<(), Error> {
    let (count, number) = (ranks.count(), ranks.number());
    let (from, to) =
        (Operand::new(&ranks.stream, 1 << 20)?, Operand::new(&ranks.stream, count << 20)?);
    let span = |operand: &Operand, bytes| Span { address: operand.address, bytes };
    let gather = || -> Result<(), regard::Error> {
        // SAFETY: the memory is as large.
        unsafe {
            ranks.rank.transport.all_gather(
                &ranks.stream,
                span(&from, 2 << 20),
                span(&to, count << 21),
            )?;
        }
        ranks.rank.wait()
    };
    gather()?;
    if number + 1 == count {
        println!("rank {number} ends");
        // The communicator of a rank that is killed does not end in order.
        std::thread::sleep(Duration::from_secs(12));
        return Ok(());
    }
    let started = std::time::Instant::now();
    match gather() {
        Ok(()) => Err("a gather without the last rank".into()),
        Err(error) => {
            println!("rank {number}, after {:.1} s: {error}", started.elapsed().as_secs_f64());
            Ok(())
        }
    }
}
