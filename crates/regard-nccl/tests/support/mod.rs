//! Random operands, and groups of ranks that are threads.

#![allow(dead_code, reason = "compiled into each test on its own, and none uses all of it")]

use regard::cpu::{Cpu, Inline};
use regard::{Float, bf16, f16};
use regard_nccl::{Rank, Simulated};
use std::time::Duration;

/// A rank of the tests.
pub type HostRank = Rank<Cpu, Simulated>;

/// Element types from numbers.
pub trait Number: Float + Send + Sync {
    fn from_f32(x: f32) -> Self;
}

impl Number for f32 {
    fn from_f32(x: f32) -> f32 {
        x
    }
}

impl Number for bf16 {
    fn from_f32(x: f32) -> bf16 {
        bf16::from_f32(x)
    }
}

impl Number for f16 {
    fn from_f32(x: f32) -> f16 {
        f16::from_f32(x)
    }
}

/// Numbers between -1 and 1 (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    pub fn numbers<T: Number>(&mut self, count: usize) -> Vec<T> {
        let unit = |x: u64| (x >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        (0..count).map(|_| T::from_f32(unit(self.next()))).collect()
    }
}

/// Runs `work` on every rank of a group, each on a thread; results in the order of ranks.
pub fn on_ranks<R: Send>(
    count: usize,
    timeout: Duration,
    work: impl Fn(HostRank) -> R + Sync,
) -> Vec<R> {
    let work = &work;
    std::thread::scope(|scope| {
        let ranks = Simulated::group(count, timeout).into_iter();
        let threads: Vec<_> = ranks
            .map(|transport| {
                scope.spawn(move || {
                    let device = Cpu::new().unwrap().with_executor(Inline);
                    work(Rank { device, transport })
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub const TIMEOUT: Duration = Duration::from_secs(60);
