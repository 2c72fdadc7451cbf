//! Measures sharded decode and ring prefill on the GPUs of this machine, beside one GPU, and
//! compares the results:
//!
//! ```text
//! shards decode [KEYS [BATCH]]    default 1048576 and 1
//! shards prefill [TOKENS]         default 131072
//! shards links                    what exchanges take
//! shards dead                     a rank ends: the others report it
//! ```
//!
//! All GPUs take part, one thread each. With `--rank R --ranks N --id FILE` a process is one rank,
//! on GPU R; rank 0 writes the file.

use regard::cuda::cudarc::driver::sys::{
    CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use regard::cuda::cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, result};
use regard::cuda::{DeviceMemory, gpus};
use regard::{Attention, DType, Inputs, Outputs, Plan, Problem, Tensor, TensorMut, Variant, bf16};
use regard_nccl::nccl::{GpuRank, GroupId, Nccl, Options};
use regard_nccl::{
    BalancedRows, DecodeStep, Device, Exchange, Message, Queries, Rank, RingPrefill, RingStep,
    ShardedDecode, Span, Transport,
};
use std::sync::Arc;
use std::time::Duration;

type Error = Box<dyn std::error::Error + Send + Sync>;

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const SIZE: usize = size_of::<bf16>();

/// Scores have a standard deviation of 2 or so: some keys matter, and not a single one.
const SCALE: f32 = 0.5;

/// Timed samples.
const SAMPLES: usize = 9;

fn main() -> Result<(), Error> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let mut option = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        let mut taken = arguments.drain(at..(at + 2).min(arguments.len()));
        taken.nth(1)
    };
    let (rank, ranks, id) = (option("--rank"), option("--ranks"), option("--id"));
    if let (Some(rank), Some(ranks), Some(file)) = (&rank, &ranks, &id) {
        let rank: usize = rank.parse()?;
        let id = match rank {
            0 => {
                let id = GroupId::new()?;
                std::fs::write(format!("{file}.part"), id.to_bytes())?;
                std::fs::rename(format!("{file}.part"), file)?;
                id
            }
            _ => {
                while !std::path::Path::new(file).exists() {
                    std::thread::sleep(Duration::from_millis(20));
                }
                let bytes = std::fs::read(file)?.try_into().map_err(|_| "not a group's file")?;
                GroupId::from_bytes(bytes)
            }
        };
        return work(rank, ranks.parse()?, id, &arguments);
    }
    let count = match ranks {
        Some(ranks) => ranks.parse()?,
        None => gpus()?.len(),
    };
    let id = GroupId::new()?;
    let arguments = &arguments;
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..count).map(|rank| scope.spawn(move || work(rank, count, id, arguments))).collect();
        threads.into_iter().try_for_each(|thread| thread.join().map_err(|_| "a rank panicked")?)
    })
}

/// Everything that one rank does.
fn work(number: usize, count: usize, id: GroupId, arguments: &[String]) -> Result<(), Error> {
    let context = CudaContext::new(number)?;
    // SAFETY: everything is queued on streams that are ordered by hand.
    unsafe { context.disable_event_tracking() };
    let stream = context.new_stream()?;
    let mode = arguments.first().map_or("", String::as_str);
    let timeout = Duration::from_secs(if mode == "dead" { 5 } else { 60 });
    let options = Options { timeout, ..Options::default() };
    let transport = Nccl::join(&stream, id, (number, count), &options)?;
    let ranks =
        Ranks { rank: Rank { device: GpuRank::new(Arc::clone(&stream))?, transport }, stream };
    ranks.say(&format!("{count} ranks, NCCL {}", Nccl::version()?));
    let number = |i: usize, default: usize| -> Result<usize, Error> {
        Ok(arguments.get(i).map(|text| text.parse()).transpose()?.unwrap_or(default))
    };
    match mode {
        "decode" => decode(&ranks, number(1, 1 << 20)?, number(2, 1)?),
        "prefill" => prefill(&ranks, number(1, 1 << 17)?),
        "links" => links(&ranks),
        "dead" => dead(&ranks),
        _ => Err("shards decode|prefill|links|dead: see the head of examples/shards.rs".into()),
    }
}

/// A rank, with what the measurements need.
struct Ranks {
    rank: Rank<GpuRank, Nccl>,
    stream: Arc<CudaStream>,
}

/// Device memory of random numbers that depend on their place in the whole.
struct Operand {
    memory: CudaSlice<bf16>,
    address: u64,
}

impl Operand {
    fn new(stream: &Arc<CudaStream>, elements: usize) -> Result<Operand, Error> {
        let memory = stream.alloc_zeros::<bf16>(elements.max(1))?;
        let address = memory.device_ptr(stream).0;
        Ok(Operand { memory, address })
    }

    /// Elements of the whole: each range `(first, count)`, one after the other.
    fn random(ranks: &Ranks, seed: u64, ranges: &[(usize, usize)]) -> Result<Operand, Error> {
        const BLOCK: usize = (1 << 24) - 5 * 128;
        let mut state = seed;
        let numbers: Vec<bf16> = (0..BLOCK)
            .map(|_| {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                bf16::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
            })
            .collect();
        let block = ranks.stream.clone_htod(&numbers)?;
        let from = block.device_ptr(&ranks.stream).0;
        let operand = Operand::new(&ranks.stream, ranges.iter().map(|&(_, count)| count).sum())?;
        let mut to = operand.address;
        for &(first, count) in ranges {
            let (mut at, end) = (first, first + count);
            while at < end {
                let run = (BLOCK - at % BLOCK).min(end - at);
                let source = from + (at % BLOCK * SIZE) as u64;
                // SAFETY: the block has so many elements from there, and the operand room for them.
                unsafe {
                    result::memcpy_dtod_async(to, source, run * SIZE, ranks.stream.cu_stream())?;
                }
                to += (run * SIZE) as u64;
                at += run;
            }
        }
        ranks.stream.synchronize()?;
        Ok(operand)
    }

    fn tensor(&self, shape: &[usize]) -> Result<Tensor<'_, DeviceMemory>, Error> {
        // SAFETY: the memory has as many elements, and lives as long as the tensor.
        Ok(unsafe { Tensor::from_device_address(self.address, DType::BF16, shape, None)? })
    }

    fn tensor_mut(&mut self, shape: &[usize]) -> Result<TensorMut<'_, DeviceMemory>, Error> {
        // SAFETY: as above; results are read when the work is done.
        Ok(unsafe { TensorMut::from_device_address(self.address, DType::BF16, shape, None)? })
    }
}

impl Ranks {
    fn number(&self) -> usize {
        self.rank.transport.rank()
    }

    fn count(&self) -> usize {
        self.rank.transport.size()
    }

    fn say(&self, text: &str) {
        if self.number() == 0 {
            println!("{text}");
        }
    }

    /// Gathers bytes of all ranks, which also is a barrier.
    fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        Ok(self.rank.transport.all_gather_host(&self.stream, bytes)?)
    }

    /// Seconds of what `queue` queues, `repeats` times in a graph if there are several: the median
    /// of samples, each of which is that of the slowest rank.
    fn time(
        &self,
        repeats: usize,
        alone: bool,
        mut queue: impl FnMut() -> Result<(), Error>,
    ) -> Result<f64, Error> {
        let barrier = || if alone { Ok(()) } else { self.gather(&[0]).map(|_| ()) };
        for _ in 0..2 {
            queue()?;
            self.rank.wait()?;
        }
        let graph = match repeats {
            1 => None,
            _ => {
                let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
                self.stream.begin_capture(mode)?;
                let queued = (0..repeats).try_for_each(|_| queue());
                let graph = self.stream.end_capture(CUgraphInstantiate_flags(0))?;
                queued?;
                Some(graph.ok_or("an empty graph")?)
            }
        };
        let mut samples = Vec::new();
        for sample in 0..SAMPLES + 1 {
            barrier()?;
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            let begin = self.stream.record_event(flags)?;
            match &graph {
                Some(graph) => graph.launch()?,
                None => queue()?,
            }
            let end = self.stream.record_event(flags)?;
            self.rank.wait()?;
            let seconds = f64::from(begin.elapsed_ms(&end)?) / 1e3 / repeats as f64;
            if sample > 0 {
                samples.push(seconds);
            }
        }
        let bytes: Vec<u8> = samples.iter().flat_map(|x| x.to_ne_bytes()).collect();
        let all = if alone { vec![bytes] } else { self.gather(&bytes)? };
        let of = |bytes: &[u8], i: usize| -> f64 {
            f64::from_ne_bytes(bytes[8 * i..][..8].try_into().expect("8 bytes"))
        };
        let mut slowest: Vec<f64> = (0..SAMPLES)
            .map(|i| all.iter().map(|bytes| of(bytes, i)).fold(0.0, f64::max))
            .collect();
        slowest.sort_unstable_by(f64::total_cmp);
        Ok(slowest[SAMPLES / 2])
    }

    /// Elements of an operand: each range `(first, count)`, one after the other.
    fn download(&self, operand: &Operand, ranges: &[(usize, usize)]) -> Result<Vec<bf16>, Error> {
        let mut elements = Vec::new();
        for &(first, count) in ranges {
            elements.extend(self.stream.clone_dtoh(&operand.memory.slice(first..first + count))?);
        }
        Ok(elements)
    }
}

/// The largest difference of two results, relative to the largest element; an error beyond two
/// roundings of the type.
fn difference(one: &[bf16], many: &[bf16]) -> Result<f32, Error> {
    let largest = one.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
    let apart = one.iter().zip(many).map(|(a, b)| (a.to_f32() - b.to_f32()).abs());
    let found = apart.fold(0.0, f32::max) / largest;
    // NaN is not below the bound.
    match one.len() == many.len() && found <= 1.0 / 64.0 {
        true => Ok(found),
        false => Err(format!("results differ by {found} of the largest element").into()),
    }
}

fn as_bytes(elements: &[bf16]) -> Vec<u8> {
    elements.iter().flat_map(|x| x.to_bits().to_ne_bytes()).collect()
}

fn from_bytes(bytes: &[u8]) -> Vec<bf16> {
    bytes.chunks_exact(2).map(|x| bf16::from_bits(u16::from_ne_bytes([x[0], x[1]]))).collect()
}

/// One token per sequence over `keys` keys, each rank with a contiguous part of them.
fn decode(ranks: &Ranks, keys: usize, batch: usize) -> Result<(), Error> {
    let (count, number) = (ranks.count(), ranks.number());
    let row = KV_HEADS * DIM;
    let attention = Attention { scale: Some(SCALE), ..Attention::default() };
    let problem = |keys| Problem {
        batch,
        query_heads: HEADS,
        kv_heads: KV_HEADS,
        kv_len: keys,
        ..Problem::new(DType::BF16, DIM)
    };
    let repeats = (8_000_000_000 / (keys * batch * row * SIZE)).clamp(2, 200);
    // Queries and outputs have heads outermost: [Hq, B, 1, D].
    let all_q = Operand::random(ranks, 1, &[(0, HEADS * batch * DIM)])?;
    let alone = |keys: usize, out: &mut Operand, float: bool| -> Result<f64, Error> {
        let part: Vec<_> = (0..batch).map(|b| (b * keys * row, keys * row)).collect();
        let (k, v) = (Operand::random(ranks, 2, &part)?, Operand::random(ranks, 3, &part)?);
        let device = &ranks.rank.device;
        let dtype = if float { DType::F32 } else { DType::BF16 };
        let planned = Problem { out_dtype: dtype, lse: float, ..problem(keys) };
        let plan = Plan::new(&planned, device.machine())?;
        device.load(&plan)?;
        let mut workspace = device.workspace(plan.workspace_bytes())?;
        let mut scratch = device.allocate(HEADS * batch * (DIM + 1) * 4)?;
        let scratch = device.address(&mut scratch);
        let strides = [DIM as i64, DIM as i64, (batch * DIM) as i64, 1];
        let shape = [batch, 1, HEADS, DIM];
        let inputs = Inputs::new(
            // SAFETY: `all_q` has these elements.
            unsafe {
                Tensor::from_device_address(all_q.address, DType::BF16, &shape, Some(&strides))?
            },
            k.tensor(&[batch, keys, KV_HEADS, DIM])?,
            v.tensor(&[batch, keys, KV_HEADS, DIM])?,
            attention,
        );
        let to = if float { scratch } else { out.address };
        ranks.time(repeats, true, || {
            // SAFETY: there is room for the outputs, which are read when the work is done.
            unsafe {
                let lse = scratch + (HEADS * batch * DIM * 4) as u64;
                let lse = TensorMut::from_device_address(lse, DType::F32, &shape[..3], None)?;
                let mut outputs = Outputs {
                    out: TensorMut::from_device_address(to, dtype, &shape, Some(&strides))?,
                    lse: float.then_some(lse),
                };
                Ok(device.run(&plan, &inputs, &mut outputs, &mut workspace)?)
            }
        })
    };
    let mut whole = Operand::new(&ranks.stream, HEADS * batch * DIM)?;
    let (mut one, mut part) = (0.0, 0.0);
    if number == 0 {
        one = alone(keys, &mut whole, false)?;
        let mut unused = Operand::new(&ranks.stream, 1)?;
        part = alone(keys / count, &mut unused, true)?;
    }
    ranks.gather(&[0])?;

    let shard = keys / count;
    let own: Vec<_> =
        (0..batch).map(|b| ((b * keys + number * shard) * row, shard * row)).collect();
    let (k, v) = (Operand::random(ranks, 2, &own)?, Operand::random(ranks, 3, &own)?);
    let heads = HEADS / count;
    let q = Operand::random(ranks, 1, &[(number * heads * batch * DIM, heads * batch * DIM)])?;
    let mut out = Operand::new(&ranks.stream, heads * batch * DIM)?;
    let mut sharded = ShardedDecode::new(&ranks.rank, &problem(shard), Queries::Sharded)?;
    let many = ranks.time(repeats, false, || {
        let step = DecodeStep {
            q: q.tensor(&[heads, batch, 1, DIM])?,
            k: k.tensor(&[batch, shard, KV_HEADS, DIM])?,
            v: v.tensor(&[batch, shard, KV_HEADS, DIM])?,
            attention,
            out: out.tensor_mut(&[heads, batch, 1, DIM])?,
            lse: None,
        };
        // SAFETY: operands live until the work is done.
        Ok(unsafe { sharded.run(&ranks.rank, step)? })
    })?;
    let results = ranks.gather(&as_bytes(&ranks.download(&out, &[(0, heads * batch * DIM)])?))?;
    if number == 0 {
        let expected = ranks.download(&whole, &[(0, HEADS * batch * DIM)])?;
        let found = difference(&expected, &from_bytes(&results.concat()))?;
        println!(
            "decode, {keys} keys, B {batch}, {HEADS}/{KV_HEADS}, D {DIM}, bf16: one GPU {:.1} us, \
             {count} GPUs {:.1} us, {:.2}x; own part alone {:.1} us, gather, exchange and merge \
             {:.1} us; results differ by {found:.1e}",
            one * 1e6,
            many * 1e6,
            one / many,
            part * 1e6,
            (many - part) * 1e6,
        );
    }
    Ok(())
}

/// Causal prefill of one sequence.
fn prefill(ranks: &Ranks, len: usize) -> Result<(), Error> {
    let (count, number) = (ranks.count(), ranks.number());
    let attention = Attention { scale: Some(SCALE / 2.0), ..Attention::causal() };
    let problem = Problem {
        query_heads: HEADS,
        kv_heads: KV_HEADS,
        query_len: len,
        kv_len: len,
        variant: Variant { causal: true, ..Variant::default() },
        ..Problem::new(DType::BF16, DIM)
    };
    let balanced = BalancedRows { len, ranks: count };
    // Sampled rows of a rank, by their number there.
    let sampled = |rank: usize| -> Vec<usize> {
        let rows = balanced.count(rank);
        (0..64).map(|i| (i * rows / 63).min(rows - 1)).collect()
    };
    let out_row = HEADS * DIM;
    let (mut one, mut expected) = (0.0, Vec::new());
    if number == 0 {
        let whole = |seed, heads: usize| Operand::random(ranks, seed, &[(0, len * heads * DIM)]);
        let (q, k, v) = (whole(1, HEADS)?, whole(2, KV_HEADS)?, whole(3, KV_HEADS)?);
        let mut out = Operand::new(&ranks.stream, len * out_row)?;
        let device = &ranks.rank.device;
        let plan = Plan::new(&problem, device.machine())?;
        device.load(&plan)?;
        let mut workspace = device.workspace(plan.workspace_bytes())?;
        let kv = [1, len, KV_HEADS, DIM];
        one = ranks.time(1, true, || {
            let inputs = Inputs::new(
                q.tensor(&[1, len, HEADS, DIM])?,
                k.tensor(&kv)?,
                v.tensor(&kv)?,
                attention,
            );
            let mut outputs = Outputs { out: out.tensor_mut(&[1, len, HEADS, DIM])?, lse: None };
            // SAFETY: operands live until the work is done.
            Ok(unsafe { device.run(&plan, &inputs, &mut outputs, &mut workspace)? })
        })?;
        for rank in 0..count {
            let positions: Vec<usize> = balanced.chunks(rank).into_iter().flatten().collect();
            let rows: Vec<_> =
                sampled(rank).iter().map(|&i| (positions[i] * out_row, out_row)).collect();
            expected.extend(ranks.download(&out, &rows)?);
        }
    }
    ranks.gather(&[0])?;

    let rows = balanced.count(number);
    let own = |seed, heads: usize| {
        let chunks = balanced.chunks(number);
        let ranges = chunks.map(|chunk| (chunk.start * heads * DIM, chunk.len() * heads * DIM));
        Operand::random(ranks, seed, &ranges)
    };
    let (q, k, v) = (own(1, HEADS)?, own(2, KV_HEADS)?, own(3, KV_HEADS)?);
    let mut out = Operand::new(&ranks.stream, rows * out_row)?;
    let mut ring = RingPrefill::new(&ranks.rank, &problem)?;
    let kv = [1, rows, KV_HEADS, DIM];
    let many = ranks.time(1, false, || {
        let step = RingStep {
            q: q.tensor(&[1, rows, HEADS, DIM])?,
            k: k.tensor(&kv)?,
            v: v.tensor(&kv)?,
            attention,
            out: out.tensor_mut(&[1, rows, HEADS, DIM])?,
            lse: None,
        };
        // SAFETY: operands live until the work is done.
        Ok(unsafe { ring.run(&ranks.rank, step)? })
    })?;
    let ranges: Vec<_> = sampled(number).iter().map(|&i| (i * out_row, out_row)).collect();
    let results = ranks.gather(&as_bytes(&ranks.download(&out, &ranges)?))?;
    if number == 0 {
        let found = difference(&expected, &from_bytes(&results.concat()))?;
        let work = 2.0 * (HEADS * DIM) as f64 * (len as f64).powi(2);
        println!(
            "prefill, {len} tokens, causal, {HEADS}/{KV_HEADS}, D {DIM}, bf16: one GPU {:.2} ms \
             ({:.0} TFLOP/s), {count} GPUs {:.2} ms ({:.0} in all), {:.2}x; results differ by \
             {found:.1e}",
            one * 1e3,
            work / one / 1e12,
            many * 1e3,
            work / many / 1e12,
            one / many,
        );
    }
    Ok(())
}

/// What exchanges take: those of decode in a graph, and the ring's.
fn links(ranks: &Ranks) -> Result<(), Error> {
    let (count, number) = (ranks.count(), ranks.number());
    let transport = &ranks.rank.transport;
    let most = 256 << 20;
    let (from, to) = (Operand::new(&ranks.stream, most)?, Operand::new(&ranks.stream, most)?);
    let span = |operand: &Operand, bytes| Span { address: operand.address, bytes };
    for batch in [1, 8, 64, 256] {
        let (q, rows) = (HEADS * batch * DIM * SIZE, HEADS * batch);
        let gathered = ranks.time(20, false, || {
            // SAFETY: the memory is larger.
            Ok(unsafe {
                transport.all_gather(&ranks.stream, span(&from, q / count), span(&to, q))?
            })
        })?;
        let parts = [(0, rows * DIM * 4), (1 << 28, rows * 4)].map(|(at, bytes)| {
            let span = |operand: &Operand| Span { address: operand.address + at, bytes };
            Exchange { from: span(&from), to: span(&to) }
        });
        let exchanged = ranks.time(20, false, || {
            // SAFETY: the memory is larger.
            Ok(unsafe { transport.all_to_all(&ranks.stream, &parts)? })
        })?;
        ranks.say(&format!(
            "B {batch}: all-gather of queries {:.1} us, all-to-all of partial results {:.1} us",
            gathered * 1e6,
            exchanged * 1e6
        ));
    }
    for mib in [16, 64, 128, 256, 512] {
        let message =
            |operand: &Operand, peer: usize| Message { peer, span: span(operand, mib << 20) };
        let sends = [message(&from, (number + 1) % count)];
        let receives = [message(&to, (number + count - 1) % count)];
        let seconds = ranks.time(1, false, || {
            // SAFETY: the memory is as large.
            Ok(unsafe { transport.exchange(&ranks.stream, &sends, &receives)? })
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
fn dead(ranks: &Ranks) -> Result<(), Error> {
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
