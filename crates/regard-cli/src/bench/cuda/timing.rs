//! Times of launches, and the speed of the GPU's memory.

use super::super::Effort;
use super::super::ceiling::{Ceilings, median};
use super::Bench;
use regard::Error;
use regard::cuda::cudarc::driver::sys::{
    CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use regard::cuda::cudarc::driver::{CudaGraph, DevicePtr, result};
use regard::cuda::driver_error;
use std::time::{Duration, Instant};

/// Approximate time of one graph: events are a microsecond apart at best, and a launch of a graph
/// takes a few.
const GRAPH: Duration = Duration::from_millis(8);

/// Maximum launches in a graph.
const MAX_LAUNCHES: usize = 8192;

/// However slow something is, runs that count end after this.
const LIMIT: Duration = Duration::from_secs(10);

/// Seconds that the GPU takes for the work that is queued meanwhile.
fn seconds(bench: &Bench, queue: impl FnOnce() -> Result<(), Error>) -> Result<f64, Error> {
    let doing = |error| driver_error("timing", error);
    let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
    let begin = bench.stream.record_event(flags).map_err(doing)?;
    queue()?;
    let end = bench.stream.record_event(flags).map_err(doing)?;
    Ok(f64::from(begin.elapsed_ms(&end).map_err(doing)?) / 1e3)
}

/// Records launches `0..count` as a graph.
fn capture(
    bench: &Bench,
    count: usize,
    launch: &impl Fn(usize) -> Result<(), Error>,
) -> Result<CudaGraph, Error> {
    let doing = |error| driver_error("capturing a graph", error);
    bench
        .stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .map_err(doing)?;
    let launched = (0..count).try_for_each(launch);
    let graph = bench.stream.end_capture(CUgraphInstantiate_flags(0)).map_err(doing)?;
    launched?;
    graph.ok_or_else(|| Error::argument("graph", "empty", "launches"))
}

/// Seconds per launch, graph by graph. `launch(i)` queues number `i`; graphs hold whole rounds of
/// `copies`.
pub fn time(
    bench: &Bench,
    copies: usize,
    launch: impl Fn(usize) -> Result<(), Error>,
    effort: &Effort,
) -> Result<Vec<f64>, Error> {
    // The first launches also bring the GPU to its working frequency.
    let warm = |count: usize| seconds(bench, || (0..count).try_for_each(&launch));
    warm(copies)?;
    let one = warm(copies)? / copies as f64;
    let rounds = (GRAPH.as_secs_f64() / one.max(1e-7) / copies as f64).ceil().max(1.0) as usize;
    let count = (rounds * copies).min(MAX_LAUNCHES.next_multiple_of(copies));
    let graph = capture(bench, count, &launch)?;
    let sample = || {
        if let Some(pause) = effort.pause {
            std::thread::sleep(pause);
        }
        let all = seconds(bench, || {
            graph.launch().map_err(|error| driver_error("launching a graph", error))
        })?;
        Ok::<f64, Error>(all / count as f64)
    };
    for _ in 0..3 {
        sample()?;
    }
    let mut times = Vec::new();
    let started = Instant::now();
    while started.elapsed() < effort.time
        || (times.len() < effort.repetitions && started.elapsed() < LIMIT)
    {
        times.push(sample()?);
    }
    Ok(times)
}

/// Bytes that are read and copied.
const BYTES: usize = 4 << 30;
const SAMPLES: usize = 9;

/// The memory bandwidth.
pub fn ceilings(bench: &Bench) -> Result<Ceilings, Error> {
    let stream = &bench.stream;
    let allocate = || {
        // The GPU may have less memory than an H200.
        let (free, _) = bench
            .gpu
            .context()
            .mem_get_info()
            .map_err(|error| driver_error("asking for memory", error))?;
        let bytes = BYTES.min(free / 3) & !4095;
        stream
            .alloc_zeros::<u8>(bytes)
            .map_err(|error| driver_error("allocating memory to read", error))
    };
    let (from, to) = (allocate()?, allocate()?);
    let bytes = from.len().min(to.len());
    let (from, to) = (from.device_ptr(stream).0, to.device_ptr(stream).0);
    let rate = |moved: usize, queue: &dyn Fn() -> Result<(), Error>| -> Result<f64, Error> {
        seconds(bench, queue)?;
        let times = (0..SAMPLES).map(|_| seconds(bench, queue)).collect::<Result<Vec<_>, _>>()?;
        Ok(moved as f64 / median(times) / 1e9)
    };
    // SAFETY: both are memory of that size, and alive until the work is done: reading the times
    // waits for it.
    let read = || unsafe { bench.gpu.read_memory(stream.cu_stream(), from, bytes) };
    let copy = || {
        // SAFETY: as above.
        unsafe { result::memcpy_dtod_async(to, from, bytes, stream.cu_stream()) }
            .map_err(|error| driver_error("copying memory", error))
    };
    Ok(Ceilings {
        threads: 0,
        f32: Vec::new(),
        bf16: None,
        tiles: None,
        read: rate(bytes, &read)?,
        read_huge: None,
        copy: Some(rate(2 * bytes, &copy)?),
        busy_elsewhere: None,
    })
}
