//! The kernel of peer memory: its code, its parameters and its launch.

use super::memory::Shared;
use super::signals::End;
use crate::nccl::DeviceBuffer;
use crate::transport::{Exchange, Span};
use regard::Error;
use regard::cuda::cudarc::driver::{CudaContext, CudaStream, result, sys};
use regard::cuda::driver_error;
use std::ffi::{CString, c_void};
use std::sync::Arc;

/// PTX, made from exchange.cu by `cargo xtask cuda build`.
const PTX: &str = include_str!("exchange.ptx");

/// Maximum ranks.
pub const MAX_RANKS: usize = 16;

/// Maximum spans per launch.
pub const MAX_SPANS: usize = 4;

/// Maximum CTAs per launch. CTAs wait for those of other ranks, so all should be resident at once.
const MAX_CTAS: usize = 64;

const THREADS: usize = 512;

/// Bytes of a part per line, and bytes of a line with its flags.
const WORD_BYTES: usize = 8;
const LINE_BYTES: usize = 16;

/// Parts to send and to receive: part r of `from` goes to rank r, and part r of `to` comes from
/// there.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PeerSpan {
    from: u64,
    to: u64,
    part_bytes: u64,
    /// Bytes from a part of `from` to the next: 0 if every rank gets the same.
    from_stride: u64,
}

impl PeerSpan {
    pub fn gather(part: Span, all: Span) -> PeerSpan {
        let part_bytes = part.bytes as u64;
        PeerSpan { from: part.address, to: all.address, part_bytes, from_stride: 0 }
    }

    pub fn exchange(exchange: &Exchange, ranks: usize) -> PeerSpan {
        let Exchange { from, to } = exchange;
        let part_bytes = (from.bytes / ranks) as u64;
        PeerSpan { from: from.address, to: to.address, part_bytes, from_stride: part_bytes }
    }

    /// Lines of a part.
    pub fn lines(&self) -> usize {
        (self.part_bytes as usize).div_ceil(WORD_BYTES)
    }
}

#[repr(C)]
struct Parameters {
    landing: [u64; MAX_RANKS],
    spans: [PeerSpan; MAX_SPANS],
    halves: u64,
    ended: u64,
    rank: i32,
    ranks: i32,
    span_count: i32,
    lines: i32,
    cta_lines: i32,
    max_cta_lines: i32,
    max_ctas: i32,
}

/// The room of landing memory.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    pub ranks: usize,
    /// Lines of each CTA, from each rank.
    max_cta_lines: usize,
}

impl Room {
    /// Room for parts of up to `part_bytes` bytes.
    pub fn new(ranks: usize, part_bytes: usize) -> Room {
        // Indices are 32 bits wide.
        let lines = part_bytes.div_ceil(WORD_BYTES).clamp(1, 1 << 30);
        Room { ranks, max_cta_lines: lines.div_ceil(MAX_CTAS) }
    }

    /// Lines of a part, at most.
    pub fn lines(&self) -> usize {
        self.max_cta_lines * MAX_CTAS
    }

    /// Two halves of it for each rank.
    pub fn landing_bytes(&self) -> usize {
        (2 * LINE_BYTES * self.lines()).saturating_mul(self.ranks)
    }

    pub fn halves_bytes(&self) -> usize {
        MAX_CTAS * size_of::<i32>()
    }

    /// The number of CTAs for `lines` lines, and lines per CTA: the same on every rank.
    fn grid(&self, lines: usize) -> (usize, usize) {
        let needed = lines.div_ceil(self.max_cta_lines);
        let ctas = lines.div_ceil(THREADS).max(needed).clamp(1, MAX_CTAS);
        let cta_lines = lines.div_ceil(ctas);
        (lines.div_ceil(cta_lines.max(1)), cta_lines)
    }
}

/// What launches of a rank have in common.
pub struct Place<'a> {
    pub room: &'a Room,
    pub rank: usize,
    /// Begins with the landing memory of each rank.
    pub shared: &'a Shared,
    /// Per CTA: the half that it uses next.
    pub halves: &'a DeviceBuffer,
    pub end: &'a End,
}

/// The kernel in a GPU's context.
#[derive(Debug)]
pub struct Kernel {
    context: Arc<CudaContext>,
    module: sys::CUmodule,
    function: sys::CUfunction,
}

// SAFETY: a module may be used by any thread, one at a time.
unsafe impl Send for Kernel {}

impl Kernel {
    pub fn load(context: &Arc<CudaContext>) -> Result<Kernel, Error> {
        let failed = |error| driver_error("loading the kernel of peer memory", error);
        context.bind_to_thread().map_err(failed)?;
        let ptx = CString::new(PTX).expect("a text without zeros");
        // SAFETY: the context is current; the text ends in a zero.
        unsafe {
            let module = result::module::load_data(ptx.as_ptr().cast()).map_err(failed)?;
            match result::module::get_function(module, c"exchange".to_owned()) {
                Ok(function) => Ok(Kernel { context: Arc::clone(context), module, function }),
                Err(error) => {
                    let _unloaded = result::module::unload(module);
                    Err(failed(error))
                }
            }
        }
    }

    /// Queues an exchange.
    ///
    /// # Safety
    /// The memory of every rank has the room, and lives until the launch is done. Spans are memory
    /// of this GPU, as large as their parts; until the launch is done, nothing writes `from` and
    /// nothing uses `to`. There are as many spans as [`MAX_SPANS`] at most, and as many lines as
    /// there is room for.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        place: &Place,
        spans: &[PeerSpan],
    ) -> Result<(), Error> {
        let lines: usize = spans.iter().map(PeerSpan::lines).sum();
        if lines == 0 {
            return Ok(());
        }
        let Place { room, rank, shared, halves, end } = place;
        let (ctas, cta_lines) = room.grid(lines);
        let mut parameters = Parameters {
            landing: [0; MAX_RANKS],
            spans: [PeerSpan::default(); MAX_SPANS],
            halves: halves.address(),
            ended: end.ended(),
            rank: *rank as i32,
            ranks: room.ranks as i32,
            span_count: spans.len() as i32,
            lines: lines as i32,
            cta_lines: cta_lines as i32,
            max_cta_lines: room.max_cta_lines as i32,
            max_ctas: MAX_CTAS as i32,
        };
        let landing = (0..room.ranks).map(|rank| shared.address(rank));
        parameters.landing.iter_mut().zip(landing).for_each(|(to, address)| *to = address);
        parameters.spans[..spans.len()].copy_from_slice(spans);
        let failed = |error| driver_error("launching the kernel of peer memory", error);
        self.context.bind_to_thread().map_err(failed)?;
        let (grid, block) = ((ctas as u32, 1, 1), (THREADS as u32, 1, 1));
        let mut arguments = [(&raw mut parameters).cast::<c_void>()];
        // SAFETY: the kernel takes these parameters; the caller has promised the rest.
        unsafe {
            result::launch_kernel(self.function, grid, block, 0, stream.cu_stream(), &mut arguments)
        }
        .map_err(failed)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        if self.context.bind_to_thread().is_ok() {
            // SAFETY: the group waits for its launches before it ends. The status changes nothing.
            let _unloaded = unsafe { result::module::unload(self.module) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_fit_the_room() {
        for part_bytes in [0, 1, 8, 4096, 100_001, 1 << 20, 5 << 20] {
            let room = Room::new(4, part_bytes);
            assert!(room.lines() * WORD_BYTES >= part_bytes);
            assert_eq!(room.landing_bytes(), 2 * 4 * room.lines() * LINE_BYTES);
            for lines in [1, 2, 511, 512, 513, 40_000, room.lines()] {
                if lines > room.lines() {
                    continue;
                }
                let (ctas, cta_lines) = room.grid(lines);
                assert!(ctas <= MAX_CTAS && cta_lines <= room.max_cta_lines);
                assert!((ctas - 1) * cta_lines < lines && lines <= ctas * cta_lines);
            }
        }
    }

    #[test]
    fn words_and_limits_are_those_of_the_kernel() {
        let kernel = include_str!("exchange.cu");
        let limits = format!("MAX_RANKS = {MAX_RANKS}, MAX_SPANS = {MAX_SPANS};");
        assert!(kernel.contains(&limits));
        assert!(kernel.contains(&format!("WORD_BYTES = {WORD_BYTES};")));
        assert!(kernel.contains(&format!("__launch_bounds__({THREADS})")));
    }
}
