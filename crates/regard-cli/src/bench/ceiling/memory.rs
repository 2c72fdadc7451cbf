//! A large piece of memory in ordinary or in huge pages.

use std::alloc::{self, Layout};
use std::mem::MaybeUninit;
use std::ptr::NonNull;

/// A huge page of x86-64 and aarch64 Linux, in bytes.
const HUGE_PAGE: usize = 2 << 20;

/// Memory that some threads share in equal parts, counted in cache lines. Every number in it is 1.
pub struct Buffer {
    data: NonNull<[u64; 8]>,
    layout: Layout,
}

impl Buffer {
    /// In ordinary pages.
    pub fn new(bytes: usize, threads: usize) -> Buffer {
        Buffer::made(bytes, threads, |_, _| true)
            .expect("nothing is asked of the system but memory")
    }

    /// In huge pages, if the system grants them on request.
    pub fn huge(bytes: usize, threads: usize) -> Option<Buffer> {
        Buffer::made(bytes, threads, ask_for_huge_pages)
    }

    /// `prepare` sees the memory before anything has touched it.
    fn made(
        bytes: usize,
        threads: usize,
        prepare: impl Fn(*mut u8, usize) -> bool,
    ) -> Option<Buffer> {
        let bytes = bytes.next_multiple_of(HUGE_PAGE * threads);
        let layout = Layout::from_size_align(bytes, HUGE_PAGE)
            .expect("a power of two, and a size far below the limit");
        // SAFETY: the layout's size is not 0.
        let data = unsafe { alloc::alloc(layout) };
        let Some(data) = NonNull::new(data) else { alloc::handle_alloc_error(layout) };
        let buffer = Buffer { data: data.cast(), layout };
        if !prepare(data.as_ptr(), bytes) {
            return None;
        }
        // SAFETY: `bytes` bytes were allocated with at least this alignment, are used by nothing
        // else, and need not be initialized.
        let lines = unsafe {
            std::slice::from_raw_parts_mut(
                buffer.data.as_ptr().cast::<MaybeUninit<[u64; 8]>>(),
                bytes / 64,
            )
        };
        // First touch: each part is first written by a separate thread, so that NUMA machines place
        // it near one.
        std::thread::scope(|scope| {
            for part in lines.chunks_mut(bytes / 64 / threads) {
                scope.spawn(move || part.fill(MaybeUninit::new([1; 8])));
            }
        });
        Some(buffer)
    }

    /// Its cache lines.
    pub fn lines(&self) -> &[[u64; 8]] {
        // SAFETY: allocated with this size and at least this alignment, and initialized.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr(), self.layout.size() / 64) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout.
        unsafe { alloc::dealloc(self.data.as_ptr().cast(), self.layout) };
    }
}

#[cfg(target_os = "linux")]
fn ask_for_huge_pages(data: *mut u8, bytes: usize) -> bool {
    // SAFETY: a whole number of pages of our own; the advice changes no contents.
    unsafe { libc::madvise(data.cast(), bytes, libc::MADV_HUGEPAGE) == 0 }
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_data: *mut u8, _bytes: usize) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_has_a_part_for_every_thread() {
        for buffer in [Some(Buffer::new(1, 3)), Buffer::huge(5 << 20, 2)].into_iter().flatten() {
            assert!(buffer.lines().len() * 64 >= 3 * HUGE_PAGE);
            assert!(buffer.lines().iter().all(|line| *line == [1; 8]));
        }
    }
}
