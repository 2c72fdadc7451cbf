//! A rank, its operands, and times.

use regard::cuda::DeviceMemory;
use regard::cuda::cudarc::driver::sys::{
    CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use regard::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr, result};
use regard::{DType, Tensor, TensorMut, bf16};
use regard_nccl::nccl::GpuRank;
use regard_nccl::{Rank, Transport};
use std::sync::Arc;

pub type Error = Box<dyn std::error::Error + Send + Sync>;

pub const HEADS: usize = 32;
pub const KV_HEADS: usize = 8;
pub const DIM: usize = 128;
pub const SIZE: usize = size_of::<bf16>();

/// Scores have a standard deviation of 2 or so: some keys matter, and not a single one.
pub const SCALE: f32 = 0.5;

/// Timed samples.
const SAMPLES: usize = 9;

/// A transport between GPUs.
pub type Link = Box<dyn Transport<Queue = Arc<CudaStream>>>;

/// A rank, with the state of the measurements.
pub struct Ranks {
    pub rank: Rank<GpuRank, Link>,
    pub stream: Arc<CudaStream>,
}

/// Runs of a sample, one after the other: so ranks that start at different times do not count.
#[derive(Clone, Copy)]
pub enum Runs {
    /// In a CUDA graph, for short ones.
    Graph(usize),
    /// Queued one by one.
    Queued(usize),
}

impl Runs {
    /// Of a prefill.
    pub fn of_prefill(tokens: usize) -> Runs {
        Runs::Queued(((1 << 34) / tokens.max(1).pow(2)).clamp(3, 16))
    }
}

/// Device memory of random numbers that depend on their place in the whole.
pub struct Operand {
    memory: CudaSlice<bf16>,
    /// Its address.
    pub address: u64,
}

impl Operand {
    pub fn new(stream: &Arc<CudaStream>, elements: usize) -> Result<Operand, Error> {
        let memory = stream.alloc_zeros::<bf16>(elements.max(1))?;
        let address = memory.device_ptr(stream).0;
        Ok(Operand { memory, address })
    }

    /// Elements of the whole: each range `(first, count)`, one after the other.
    pub fn random(ranks: &Ranks, seed: u64, ranges: &[(usize, usize)]) -> Result<Operand, Error> {
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
                // SAFETY: the block has that many elements from there, and the operand has room for
                // them.
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

    pub fn tensor(&self, shape: &[usize]) -> Result<Tensor<'_, DeviceMemory>, Error> {
        // SAFETY: the memory has as many elements, and lives as long as the tensor.
        Ok(unsafe { Tensor::from_device_address(self.address, DType::BF16, shape, None)? })
    }

    pub fn tensor_mut(&mut self, shape: &[usize]) -> Result<TensorMut<'_, DeviceMemory>, Error> {
        // SAFETY: as above; results are read when the work is done.
        Ok(unsafe { TensorMut::from_device_address(self.address, DType::BF16, shape, None)? })
    }
}

impl Ranks {
    pub fn number(&self) -> usize {
        self.rank.transport.rank()
    }

    pub fn count(&self) -> usize {
        self.rank.transport.size()
    }

    pub fn say(&self, text: &str) {
        if self.number() == 0 {
            println!("{text}");
        }
    }

    /// Gathers bytes of all ranks, which also is a barrier.
    pub fn gather(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, Error> {
        Ok(self.rank.transport.all_gather_host(&self.stream, bytes)?)
    }

    /// Seconds of a run of the work that `queue` queues. The median of samples; a sample is the
    /// time of the slowest rank.
    pub fn time(
        &self,
        runs: Runs,
        alone: bool,
        mut queue: impl FnMut() -> Result<(), Error>,
    ) -> Result<f64, Error> {
        let barrier = || if alone { Ok(()) } else { self.gather(&[0]).map(|_| ()) };
        for _ in 0..2 {
            queue()?;
            self.rank.wait()?;
        }
        let (Runs::Graph(repeats) | Runs::Queued(repeats)) = runs;
        let graph = match runs {
            Runs::Queued(_) => None,
            Runs::Graph(_) => {
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
                None => (0..repeats).try_for_each(|_| queue())?,
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
    pub fn download(
        &self,
        operand: &Operand,
        ranges: &[(usize, usize)],
    ) -> Result<Vec<bf16>, Error> {
        let mut elements = Vec::new();
        for &(first, count) in ranges {
            elements.extend(self.stream.clone_dtoh(&operand.memory.slice(first..first + count))?);
        }
        Ok(elements)
    }
}

/// The largest difference of two results, relative to the largest element; an error beyond two
/// roundings of the type.
pub fn difference(one: &[bf16], many: &[bf16]) -> Result<f32, Error> {
    let largest = one.iter().map(|x| x.to_f32().abs()).fold(0.0, f32::max);
    let apart = one.iter().zip(many).map(|(a, b)| (a.to_f32() - b.to_f32()).abs());
    let found = apart.fold(0.0, f32::max) / largest;
    // NaN is not below the bound.
    match one.len() == many.len() && found <= 1.0 / 64.0 {
        true => Ok(found),
        false => Err(format!("results differ by {found} of the largest element").into()),
    }
}

pub fn as_bytes(elements: &[bf16]) -> Vec<u8> {
    elements.iter().flat_map(|x| x.to_bits().to_ne_bytes()).collect()
}

pub fn from_bytes(bytes: &[u8]) -> Vec<bf16> {
    bytes.chunks_exact(2).map(|x| bf16::from_bits(u16::from_ne_bytes([x[0], x[1]]))).collect()
}
