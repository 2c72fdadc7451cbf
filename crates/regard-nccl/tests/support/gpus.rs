//! All GPUs of this machine as ranks.

use super::{TIMEOUT, TestDevice};
use regard::cuda::cudarc::driver::{CudaContext, CudaStream, result};
use regard::cuda::gpus;
use regard_nccl::nccl::{DeviceBuffer, GpuRank, GroupId, Nccl, Options};
use regard_nccl::peer::{PeerMemory, PeerOptions};
use regard_nccl::{Device, Rank, Transport};
use std::sync::{Arc, Mutex, MutexGuard};

/// A rank, over NCCL or peer memory.
pub type GpuRanks = Rank<GpuRank, Box<dyn Transport<Queue = Arc<CudaStream>>>>;

impl TestDevice for GpuRank {
    fn read(&self, buffer: &mut DeviceBuffer, bytes: &mut [u8]) {
        let address = self.address(buffer);
        self.gpu().context().bind_to_thread().unwrap();
        // SAFETY: the buffer has as many bytes, and all work on it is done.
        unsafe { result::memcpy_dtoh_sync(bytes, address) }.unwrap();
    }
}

/// One group at a time.
static GROUP: Mutex<()> = Mutex::new(());

/// The number of GPUs, of at least two, and the right to use them.
pub fn all_gpus() -> Option<(usize, MutexGuard<'static, ()>)> {
    let count = gpus().map(|gpus| gpus.len()).map_err(|error| error.to_string());
    let version = Nccl::version().map_err(|error| error.to_string());
    let reason = match (count, version) {
        (Ok(count), Ok(_)) if count > 1 => {
            return Some((count, GROUP.lock().unwrap_or_else(|poisoned| poisoned.into_inner())));
        }
        (Ok(count), Ok(_)) => format!("{count} GPUs"),
        (Err(reason), _) | (_, Err(reason)) => reason,
    };
    let required = std::env::var_os("REGARD_CUDA_REQUIRED").is_some();
    assert!(!required, "REGARD_CUDA_REQUIRED is set, and there are no two GPUs: {reason}");
    println!("SKIPPED: needs two GPUs and NCCL: {reason}");
    None
}

/// Runs `work` on every GPU, each on a thread, over NCCL and over peer memory: the results of both
/// have the same bits. Results in the order of ranks.
pub fn on_gpus<R: Send + PartialEq>(count: usize, work: impl Fn(GpuRanks) -> R + Sync) -> Vec<R> {
    let by_nccl = over(count, false, &work);
    assert!(by_nccl == over(count, true, &work), "peer memory gives other bits than NCCL");
    by_nccl
}

/// The same over one of them.
pub fn over<R: Send>(count: usize, peers: bool, work: impl Fn(GpuRanks) -> R + Sync) -> Vec<R> {
    on_threads(count, |number, id| {
        let (stream, place) = (stream(number), (number, count));
        let nccl = Options { timeout: TIMEOUT, ..Options::default() };
        let options = PeerOptions { nccl, ..PeerOptions::default() };
        let device = GpuRank::new(Arc::clone(&stream)).unwrap();
        let transport: Box<dyn Transport<Queue = _>> = match peers {
            true => Box::new(PeerMemory::join(&stream, id, place, &options).unwrap()),
            false => Box::new(Nccl::join(&stream, id, place, &nccl).unwrap()),
        };
        work(Rank { device, transport })
    })
}

/// Runs `work` for every GPU of a new group, each on a thread; results in the order of ranks.
pub fn on_threads<R: Send>(count: usize, work: impl Fn(usize, GroupId) -> R + Sync) -> Vec<R> {
    let (work, id) = (&work, GroupId::new().unwrap());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|rank| scope.spawn(move || work(rank, id))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// A stream of a GPU.
pub fn stream(number: usize) -> Arc<CudaStream> {
    let context = CudaContext::new(number).unwrap();
    // SAFETY: the tests wait for the stream before they read.
    unsafe { context.disable_event_tracking() };
    context.new_stream().unwrap()
}
