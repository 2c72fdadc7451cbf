//! Peer memory by itself: exchanges of any bytes, in any order, in graphs, and ranks that end.

use crate::support::gpus::{GpuRanks, all_gpus, on_threads, over, stream};
use crate::support::{Random, TestDevice};
use regard::Error;
use regard::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use regard::cuda::cudarc::driver::{CudaGraph, CudaStream, result};
use regard_nccl::nccl::{DeviceBuffer, GroupId, Options};
use regard_nccl::peer::{PeerMemory, PeerOptions};
use regard_nccl::{Device, Exchange, Message, Span, Transport};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes that every rank sends from.
const BYTES: usize = 24 << 20;

/// The bytes that a rank sends from.
fn contents(rank: usize) -> Vec<u8> {
    let mut random = Random(rank as u64);
    (0..BYTES / 8).flat_map(|_| random.next().to_ne_bytes()).collect()
}

/// Parts of one exchange: their bytes, and where they begin in the sender's memory and in the
/// receiver's.
#[derive(Debug, Clone, Copy)]
struct Parts {
    bytes: usize,
    from: usize,
    to: usize,
}

/// A gather, or an all-to-all of one to three spans.
#[derive(Debug, Clone)]
enum Call {
    Gather(Parts),
    AllToAll(Vec<Parts>),
}

/// Sizes at the limits of words, of CTAs and of what goes by peer memory, and any.
fn part_bytes(random: &mut Random) -> usize {
    const SIZES: [usize; 14] =
        [0, 1, 4, 7, 8, 9, 516, 4096, 4100, 16512, 66048, 1 << 20, (1 << 20) + 1, 1_500_000];
    let x = random.next() as usize;
    match x % 3 {
        0 => x / 3 % 20_000,
        _ => SIZES[x / 3 % SIZES.len()],
    }
}

/// Calls in a random order, whose results do not overlap, and the bytes of all results.
fn calls(ranks: usize, count: usize, seed: u64) -> (Vec<Call>, usize) {
    let mut random = Random(seed);
    let mut end = 0;
    let mut parts = |random: &mut Random, sent: usize| {
        let bytes = part_bytes(random);
        let from = random.next() as usize % (BYTES - sent * bytes);
        // Aligned as tensors are, or not at all.
        let align = |at: usize, odd: bool| if odd { at } else { at.next_multiple_of(16) };
        let odd = random.next().is_multiple_of(4);
        let (from, to) = (align(from, odd).min(BYTES - sent * bytes), align(end, odd));
        end = to + ranks * bytes;
        Parts { bytes, from, to }
    };
    let calls = (0..count)
        .map(|_| match random.next() % 2 {
            0 => Call::Gather(parts(&mut random, 1)),
            _ => {
                let spans = 1 + random.next() as usize % 3;
                Call::AllToAll((0..spans).map(|_| parts(&mut random, ranks)).collect())
            }
        })
        .collect();
    (calls, end)
}

/// Queues a call from the memory at `from` to the memory at `to`.
fn queue(rank: &GpuRanks, call: &Call, from: u64, to: u64) -> Result<(), Error> {
    let ranks = rank.transport.size();
    let span = |base: u64, at: usize, bytes: usize| Span { address: base + at as u64, bytes };
    // SAFETY: the memory is as large; results are read when all calls are done.
    unsafe {
        match call {
            Call::Gather(parts) => rank.transport.all_gather(
                rank.device.compute(),
                span(from, parts.from, parts.bytes),
                span(to, parts.to, ranks * parts.bytes),
            ),
            Call::AllToAll(spans) => {
                let exchange = |parts: &Parts| Exchange {
                    from: span(from, parts.from, ranks * parts.bytes),
                    to: span(to, parts.to, ranks * parts.bytes),
                };
                let exchanges: Vec<_> = spans.iter().map(exchange).collect();
                rank.transport.all_to_all(rank.device.compute(), &exchanges)
            }
        }
    }
}

/// Memory with these bytes.
fn filled(rank: &GpuRanks, contents: &[u8]) -> DeviceBuffer {
    let mut buffer = rank.device.allocate(contents.len()).unwrap();
    rank.device.write(&mut buffer, contents).unwrap();
    buffer
}

#[test]
fn any_bytes_in_any_order() {
    let Some((count, _gpus)) = all_gpus() else { return };
    let sent: Vec<_> = (0..count).map(contents).collect();
    for ranks in 2..=count {
        over(ranks, true, |rank| {
            let own = rank.transport.rank();
            let mut from = filled(&rank, &sent[own]);
            for seed in 1..4 {
                let (calls, end) = calls(ranks, 200, seed);
                let mut to = rank.device.allocate(end).unwrap();
                let (source, target) =
                    (rank.device.address(&mut from), rank.device.address(&mut to));
                for call in &calls {
                    queue(&rank, call, source, target).unwrap();
                }
                rank.wait().unwrap();
                let mut found = vec![0; end];
                rank.device.read(&mut to, &mut found);
                for call in &calls {
                    let (spans, step) = match call {
                        Call::Gather(parts) => (std::slice::from_ref(parts), 0),
                        Call::AllToAll(spans) => (&spans[..], own),
                    };
                    for Parts { bytes: part, from, to } in spans.iter().copied() {
                        for (sender, sent) in sent[..ranks].iter().enumerate() {
                            let expected = &sent[from + step * part..][..part];
                            let equal = &found[to + sender * part..][..part] == expected;
                            assert!(equal, "rank {own}, from rank {sender}: {call:?}");
                        }
                    }
                }
            }
        });
    }
}

/// The work that `queue` queues, as a graph.
fn captured(stream: &Arc<CudaStream>, queue: impl FnOnce() -> Result<(), Error>) -> CudaGraph {
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).unwrap();
    let queued = queue();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap();
    queued.unwrap();
    graph.expect("work in the graph")
}

/// A graph with an odd number of exchanges, of different sizes, runs many times.
#[test]
fn graphs_are_replayed() {
    const PART: usize = 40_004;
    const REPLAYS: usize = 101;
    let Some((count, _gpus)) = all_gpus() else { return };
    let sent: Vec<_> = (0..count).map(contents).collect();
    over(count, true, |rank| {
        let own = rank.transport.rank();
        let [mut first, mut second, mut third] =
            [(); 3].map(|()| filled(&rank, &sent[own][..count * PART]));
        let [a, b, c] =
            [&mut first, &mut second, &mut third].map(|buffer| rank.device.address(buffer));
        let all = Parts { bytes: PART, from: 0, to: 0 };
        let whole = Call::AllToAll(vec![all]);
        let few = Call::Gather(Parts { bytes: 12, from: 0, to: 0 });
        let mut small = rank.device.allocate(12 * count).unwrap();
        let small = rank.device.address(&mut small);
        queue(&rank, &few, a, small).unwrap();
        rank.wait().unwrap();
        let steps = [(a, b), (b, c), (c, a)];
        let graph = captured(rank.device.compute(), || {
            steps.into_iter().try_for_each(|(from, to)| {
                queue(&rank, &few, from, small)?;
                queue(&rank, &whole, from, to)?;
                queue(&rank, &few, to, small)
            })
        });
        (0..REPLAYS).for_each(|_| graph.launch().unwrap());
        rank.wait().unwrap();
        // Each replay exchanges the parts three times, which is once.
        let mut found = vec![0; count * PART];
        rank.device.read(&mut first, &mut found);
        for (sender, sent) in sent.iter().enumerate() {
            assert!(found[sender * PART..][..PART] == sent[own * PART..][..PART]);
        }
    });
}

/// Queues a step of a ring: every rank sends to the next.
fn pass_on(rank: &GpuRanks, from: u64, to: u64, bytes: usize) -> Result<(), Error> {
    let (number, ranks) = (rank.transport.rank(), rank.transport.size());
    let message = |address, peer| Message { peer, span: Span { address, bytes } };
    let sends = [message(from, (number + 1) % ranks)];
    let receives = [message(to, (number + ranks - 1) % ranks)];
    // SAFETY: the memory is as large; results are read when all work is done.
    unsafe { rank.transport.exchange(rank.device.compute(), &sends, &receives) }
}

/// Messages pass through two places of an inbox, one after the other and in a graph.
#[test]
fn messages_arrive_in_inboxes() {
    const MESSAGE: usize = 3_000_004;
    const STEPS: usize = 37;
    let Some((count, _gpus)) = all_gpus() else { return };
    let sent: Vec<_> = (0..count).map(contents).collect();
    for ranks in 2..=count {
        over(ranks, true, |rank| {
            let own = rank.transport.rank();
            let mut from = filled(&rank, &sent[own][..MESSAGE]);
            let from = rank.device.address(&mut from);
            let stream = rank.device.compute();
            let place = |bytes| rank.transport.inbox(stream, bytes).unwrap().expect("an inbox");
            let turns = [0, MESSAGE].map(|at| place(2 * MESSAGE).address + at as u64);
            assert!(place(10).address == turns[0] && place(3 * MESSAGE).address != turns[0]);
            let step = |step: usize| {
                let source = if step == 0 { from } else { turns[(step - 1) % 2] };
                pass_on(&rank, source, turns[step % 2], MESSAGE)
            };
            let expect = |steps: usize| {
                rank.wait().unwrap();
                let mut found = vec![0; MESSAGE];
                let address = turns[(steps - 1) % 2];
                // SAFETY: the inbox has as many bytes, and all work on it is done.
                unsafe { result::memcpy_dtoh_sync(&mut found, address) }.unwrap();
                let origin = (own + ranks * steps - steps) % ranks;
                assert!(found == sent[origin][..MESSAGE], "rank {own}, {steps} steps");
            };
            (0..STEPS).try_for_each(step).unwrap();
            expect(STEPS);
            let graph = captured(stream, || (0..2).try_for_each(step));
            (0..STEPS).for_each(|_| graph.launch().unwrap());
            expect(2);
        });
    }
}

/// Joins a group of all GPUs with other options.
fn join(
    number: usize,
    count: usize,
    id: GroupId,
    max_part_bytes: usize,
    timeout: Duration,
) -> Result<GpuRanks, Error> {
    let stream = stream(number);
    let options = PeerOptions { nccl: Options { timeout, ..Options::default() }, max_part_bytes };
    let transport = PeerMemory::join(&stream, id, (number, count), &options)?;
    let device = regard_nccl::nccl::GpuRank::new(stream)?;
    Ok(GpuRanks { device, transport: Box::new(transport) })
}

#[test]
fn ranks_with_different_room_are_an_error() {
    let Some((count, _gpus)) = all_gpus() else { return };
    let errors = on_threads(count, |rank, id| {
        let joined = join(rank, count, id, 1 << (10 + rank), Duration::from_secs(20));
        joined.err().expect("the same on every rank").to_string()
    });
    for error in errors {
        assert!(error.contains("max_part_bytes") && error.contains("ranks 0 and 1"), "{error}");
    }
}

/// Kernels that wait for a rank that has ended end too, with an error.
#[test]
fn a_rank_that_ends_is_an_error_on_the_others() {
    let Some((count, _gpus)) = all_gpus() else { return };
    let timeout = Duration::from_secs(2);
    let of_rank = |by_message: bool, number, id| {
        let rank = join(number, count, id, 1 << 20, timeout).unwrap();
        let inbox = rank.transport.inbox(rank.device.compute(), 4096).unwrap().expect("an inbox");
        if number + 1 == count {
            return None;
        }
        let mut buffer = rank.device.allocate(4096 * (count + 1)).unwrap();
        let (from, started) = (rank.device.address(&mut buffer), Instant::now());
        let call = Call::Gather(Parts { bytes: 4096, from: 0, to: 0 });
        if by_message {
            (0..3).try_for_each(|_| pass_on(&rank, from, inbox.address, 4096)).unwrap();
        } else {
            queue(&rank, &call, from, from + 4096).unwrap();
        }
        let error = rank.wait().unwrap_err().to_string();
        assert!(started.elapsed() < 10 * timeout, "{:?}", started.elapsed());
        let later = queue(&rank, &call, from, from + 4096).unwrap_err();
        // The GPU is free again.
        rank.device.compute().synchronize().unwrap();
        Some((error, later.to_string()))
    };
    let errors = [false, true]
        .map(|by_message| on_threads(count, |number, id| of_rank(by_message, number, id)));
    for (error, later) in errors.into_iter().flatten().flatten() {
        assert!(error.contains("no answer within") || error.contains("ended"), "{error}");
        assert!(later.contains("earlier error"), "{later}");
    }
}
