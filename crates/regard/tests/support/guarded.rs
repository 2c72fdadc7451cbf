//! Memory with an inaccessible page on either side, so that an access past the first or the last
//! element ends the process.

use regard::Element;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

/// A copy of some elements that ends (or starts) at the end (or start) of a page.
pub struct Guarded<T> {
    mapping: *mut u8,
    mapped: usize,
    data: *mut T,
    len: usize,
    element: PhantomData<T>,
}

/// The end of the elements that touches an inaccessible page. The other end is as near to one as
/// alignment allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Edge {
    /// The last element is followed by the page.
    End,
    /// The first element follows the page.
    Start,
}

impl<T: Element> Guarded<T> {
    /// Copies the elements.
    pub fn new(elements: &[T], edge: Edge) -> Guarded<T> {
        // SAFETY: the call reads and writes no memory.
        let page =
            usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).expect("a page size");
        let bytes = size_of_val(elements);
        let inside = bytes.next_multiple_of(page);
        let mapped = inside + 2 * page;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, which overlaps nothing.
        let mapping =
            unsafe { libc::mmap(std::ptr::null_mut(), mapped, libc::PROT_NONE, flags, -1, 0) };
        assert_ne!(mapping, libc::MAP_FAILED, "{mapped} bytes of address space");
        let mapping = mapping.cast::<u8>();
        let offset = page + if edge == Edge::End { inside - bytes } else { 0 };
        // SAFETY: the pages between the first and the last of the mapping; the elements fit into
        // them. The offset is a multiple of the element's size, because pages are.
        let data = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            let opened = libc::mprotect(mapping.add(page).cast(), inside, access);
            assert!(inside == 0 || opened == 0, "opening {inside} bytes");
            let data = mapping.add(offset).cast::<T>();
            data.copy_from_nonoverlapping(elements.as_ptr(), elements.len());
            data
        };
        Guarded { mapping, mapped, data, len: elements.len(), element: PhantomData }
    }
}

impl<T> Deref for Guarded<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `new` has put that many elements there, aligned, and the mapping is ours alone.
        unsafe { std::slice::from_raw_parts(self.data, self.len) }
    }
}

impl<T> DerefMut for Guarded<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.len) }
    }
}

impl<T> Drop for Guarded<T> {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, whole.
        unsafe { libc::munmap(self.mapping.cast(), self.mapped) };
    }
}
