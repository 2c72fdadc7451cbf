//! Random operands, and groups of ranks that are threads.

#![allow(dead_code, reason = "compiled into each test on its own, and none uses all of it")]

pub mod decode;
#[cfg(feature = "nccl")]
pub mod gpus;
pub mod ring;

use regard::cpu::{Cpu, Inline};
use regard::{Error, Float, Tensor, TensorMut, bf16, f16};
use regard_nccl::{Device, Rank, Simulated};
use std::cell::RefCell;
use std::time::Duration;

/// A rank of the tests.
pub type HostRank = Rank<Cpu, Simulated>;

/// Element types from numbers.
pub trait Number: Float + PartialEq + Send + Sync {
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

/// A device whose results the tests read.
pub trait TestDevice: Device {
    /// Bytes of a buffer, of which all work is done.
    fn read(&self, buffer: &mut Self::Buffer, bytes: &mut [u8]);
}

impl TestDevice for Cpu {
    fn read(&self, buffer: &mut Self::Buffer, bytes: &mut [u8]) {
        let from = self.address(buffer) as *const u8;
        // SAFETY: the buffer has as many bytes, which nothing writes.
        bytes.copy_from_slice(unsafe { std::slice::from_raw_parts(from, bytes.len()) });
    }
}

/// Copies of operands in a device's memory.
pub struct Operands<'d, D: Device> {
    device: &'d D,
    buffers: RefCell<Vec<D::Buffer>>,
}

impl<'d, D: Device> Operands<'d, D> {
    pub fn new(device: &'d D) -> Operands<'d, D> {
        Operands { device, buffers: RefCell::default() }
    }

    /// A copy of a dense tensor, whose dimensions may be permuted.
    pub fn copy<'a>(&'a self, tensor: &Tensor) -> Result<Tensor<'a, D::Memory>, Error> {
        let bytes = tensor.len() * tensor.dtype().size();
        // SAFETY: the tensor's elements are as many bytes, one after the other.
        let contents = unsafe { std::slice::from_raw_parts(tensor.as_ptr(), bytes) };
        let mut buffer = self.device.allocate(bytes)?;
        self.device.write(&mut buffer, contents)?;
        let address = self.device.address(&mut buffer);
        self.buffers.borrow_mut().push(buffer);
        // SAFETY: the buffer lives as long as `self`, and nothing writes it.
        unsafe { D::tensor(address, tensor.dtype(), tensor.shape(), Some(tensor.strides())) }
    }
}

/// Numbers that a device writes; NaN before.
pub struct Output<'d, T, D: Device> {
    device: &'d D,
    buffer: D::Buffer,
    numbers: Vec<T>,
}

impl<'d, T: Number, D: TestDevice> Output<'d, T, D> {
    pub fn new(device: &'d D, count: usize) -> Result<Output<'d, T, D>, Error> {
        let mut numbers = vec![T::from_f32(f32::NAN); count];
        let mut buffer = device.allocate(size_of_val(&numbers[..]))?;
        device.write(&mut buffer, bytes_of(&mut numbers))?;
        Ok(Output { device, buffer, numbers })
    }

    pub fn view(&mut self, shape: &[usize]) -> Result<TensorMut<'_, D::Memory>, Error> {
        let address = self.device.address(&mut self.buffer);
        // SAFETY: the buffer has as many numbers; they are read when the work is done.
        unsafe { D::tensor_mut(address, T::DTYPE, shape, None) }
    }

    pub fn read(mut self) -> Result<Vec<T>, Error> {
        self.device.read(&mut self.buffer, bytes_of(&mut self.numbers));
        Ok(self.numbers)
    }
}

fn bytes_of<T: Number>(numbers: &mut [T]) -> &mut [u8] {
    let bytes = size_of_val(numbers);
    // SAFETY: numbers are that many bytes, and all bytes are numbers.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), bytes) }
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
