//! Time spent in a part of the work: time of the host, or of a GPU's stream.

use candle_core::{Device, Result};
use std::time::{Duration, Instant};

#[cfg(feature = "cuda")]
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, sys::CUevent_flags};

/// Adds up the time of the work that it is given.
#[derive(Debug, Default)]
pub struct Stopwatch {
    host: Duration,
    /// On a GPU work is only queued meanwhile, so its stream records when it gets there.
    #[cfg(feature = "cuda")]
    stream: Option<std::sync::Arc<CudaStream>>,
    #[cfg(feature = "cuda")]
    events: Vec<[CudaEvent; 2]>,
}

impl Stopwatch {
    /// For work on that device.
    ///
    /// # Errors
    /// If the device has no clock here.
    pub fn new(device: &Device) -> Result<Stopwatch> {
        match device {
            Device::Cpu => Ok(Stopwatch::default()),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => {
                Ok(Stopwatch { stream: Some(device.cuda_stream()), ..Stopwatch::default() })
            }
            #[allow(unreachable_patterns)]
            _ => candle_core::bail!("{device:?}: this example runs on CPUs and NVIDIA GPUs"),
        }
    }

    /// Does the work.
    ///
    /// # Errors
    /// Errors of the work, and of a GPU that records nothing.
    pub fn time<T>(&mut self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        #[cfg(feature = "cuda")]
        if let Some(stream) = &self.stream {
            let now = || {
                let event = stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT));
                event.map_err(candle_core::Error::wrap)
            };
            let begun = now()?;
            let result = work()?;
            self.events.push([begun, now()?]);
            return Ok(result);
        }
        let begun = Instant::now();
        let result = work()?;
        self.host += begun.elapsed();
        Ok(result)
    }

    /// The sum so far. Waits for a GPU.
    pub fn spent(&self) -> Duration {
        #[cfg(feature = "cuda")]
        if self.stream.is_some() {
            let milliseconds = |[begun, done]: &[CudaEvent; 2]| {
                f64::from(begun.elapsed_ms(done).expect("events of one stream"))
            };
            return Duration::from_secs_f64(
                self.events.iter().map(milliseconds).sum::<f64>() / 1e3,
            );
        }
        self.host
    }
}
