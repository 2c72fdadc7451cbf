//! Memory between two guard pages: an access past its ends crashes.

/// The end of its pages that the memory touches. The other end has some spare bytes, all of them
/// [`Guarded::SPARE`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The first byte is the first of a page, so that reads before the start crash.
    Start,
    /// The last byte is the last of a page, so that reads past the end crash.
    End,
}

/// Some bytes between guard pages (on Unix; elsewhere merely some bytes).
pub struct Guarded {
    #[cfg(unix)]
    mapping: Option<Mapping>,
    #[cfg(not(unix))]
    _mapping: Vec<u128>,
    data: *mut u8,
    bytes: usize,
}

impl Guarded {
    /// The byte between the memory and the guard page of the other side: NaN in every float type.
    pub const SPARE: u8 = 0xff;

    /// Memory of that many bytes, each of them `fill`.
    ///
    /// # Panics
    /// If the system has no memory.
    #[cfg(unix)]
    pub fn new(bytes: usize, side: Side, fill: u8) -> Guarded {
        let page = page_bytes();
        let inside = bytes.div_ceil(page).max(1) * page;
        let kept = KEPT.with_borrow_mut(|kept| kept.get_mut(&inside).and_then(Vec::pop));
        let mapping = kept.unwrap_or_else(|| Mapping::new(inside));
        let first = mapping.first.wrapping_add(page);
        let data = match side {
            Side::Start => first,
            Side::End => first.wrapping_add(inside - bytes),
        };
        // SAFETY: both ranges are inside the pages that can be written.
        unsafe {
            first.write_bytes(Guarded::SPARE, inside);
            data.write_bytes(fill, bytes);
        }
        Guarded { mapping: Some(mapping), data, bytes }
    }

    /// Memory of that many bytes, each of them `fill`.
    #[cfg(not(unix))]
    pub fn new(bytes: usize, _side: Side, fill: u8) -> Guarded {
        let mut mapping = vec![u128::from_ne_bytes([fill; 16]); bytes.div_ceil(16)];
        Guarded { data: mapping.as_mut_ptr().cast(), bytes, _mapping: mapping }
    }

    /// A copy of these bytes.
    pub fn copy_of(bytes: &[u8], side: Side) -> Guarded {
        let mut guarded = Guarded::new(bytes.len(), side, Guarded::SPARE);
        guarded.bytes_mut().copy_from_slice(bytes);
        guarded
    }

    /// The first byte.
    pub fn as_mut_ptr(&mut self) -> *mut u8 {
        self.data
    }

    /// The first byte.
    pub fn as_ptr(&self) -> *const u8 {
        self.data
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: all these bytes are there, written, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.data, self.bytes) }
    }

    /// All bytes, to write.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.bytes) }
    }
}

#[cfg(unix)]
impl Drop for Guarded {
    fn drop(&mut self) {
        let Some(mapping) = self.mapping.take() else { return };
        // Asking the system for memory takes longer than a small problem: some is kept for the next
        // one.
        let keep = |kept: &std::cell::RefCell<Kept>| {
            let mut kept = kept.borrow_mut();
            let same_size = kept.entry(mapping.inside).or_default();
            if mapping.inside <= MAX_KEPT_BYTES && same_size.len() < MAX_KEPT {
                same_size.push(mapping);
            }
        };
        // Ignored if the thread is ending.
        let _ = KEPT.try_with(keep);
    }
}

/// Pages between two guard pages.
#[cfg(unix)]
struct Mapping {
    /// The lowest byte, in a guard page.
    first: *mut u8,
    /// Bytes between the guard pages.
    inside: usize,
}

#[cfg(unix)]
type Kept = std::collections::HashMap<usize, Vec<Mapping>>;

/// Mappings of a size that are kept for later, and the largest size that is.
#[cfg(unix)]
const MAX_KEPT: usize = 16;
#[cfg(unix)]
const MAX_KEPT_BYTES: usize = 128 << 10;

#[cfg(unix)]
thread_local! {
    static KEPT: std::cell::RefCell<Kept> = std::cell::RefCell::default();
}

#[cfg(unix)]
fn page_bytes() -> usize {
    // SAFETY: asks for a number.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as usize }
}

#[cfg(unix)]
impl Mapping {
    fn new(inside: usize) -> Mapping {
        let page = page_bytes();
        let all = inside + 2 * page;
        // SAFETY: new memory of the system's choice.
        let mapping = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(std::ptr::null_mut(), all, libc::PROT_NONE, flags, -1, 0)
        };
        assert!(mapping != libc::MAP_FAILED, "no memory for {inside} bytes between guard pages");
        let first = mapping.cast::<u8>();
        let writable = first.wrapping_add(page).cast();
        // SAFETY: these pages are part of the mapping.
        let status =
            unsafe { libc::mprotect(writable, inside, libc::PROT_READ | libc::PROT_WRITE) };
        assert!(status == 0, "no memory for {inside} bytes between guard pages");
        Mapping { first, inside }
    }
}

#[cfg(unix)]
impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's own, and nothing borrows it any more.
        unsafe { libc::munmap(self.first.cast(), self.inside + 2 * page_bytes()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_touch_the_guard_page_of_their_side() {
        for bytes in [0, 1, 6, 4096, 5000] {
            let end = Guarded::new(bytes, Side::End, 7);
            let start = Guarded::new(bytes, Side::Start, 7);
            assert!(start.bytes().iter().chain(end.bytes()).all(|&byte| byte == 7));
            if cfg!(all(target_os = "linux", target_arch = "x86_64")) {
                assert_eq!(start.as_ptr() as usize % 4096, 0);
                assert_eq!((end.as_ptr() as usize + bytes) % 4096, 0);
            }
        }
        assert_eq!(Guarded::copy_of(&[1, 2, 3], Side::End).bytes(), [1, 2, 3]);
    }
}
