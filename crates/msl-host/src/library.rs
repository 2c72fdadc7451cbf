//! A compiled source, loaded into this process.

use crate::{Error, Generated};
use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Memory that a kernel is given.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    data: *mut u8,
    bytes: usize,
    writable: bool,
}

impl Buffer {
    /// Memory that a kernel reads.
    ///
    /// # Safety
    /// `data` is readable for `bytes` bytes while dispatches that have it run.
    pub unsafe fn read(data: *const u8, bytes: usize) -> Buffer {
        Buffer { data: data.cast_mut(), bytes, writable: false }
    }

    /// Memory that a kernel reads and writes.
    ///
    /// # Safety
    /// `data` is writable for `bytes` bytes while dispatches that have it run, and nothing else
    /// uses it meanwhile.
    pub unsafe fn write(data: *mut u8, bytes: usize) -> Buffer {
        Buffer { data, bytes, writable: true }
    }
}

/// A dispatch to run.
#[derive(Debug, Clone, Default)]
pub struct Dispatch<'a> {
    /// The kernel.
    pub kernel: &'a str,
    /// Threadgroups in each dimension.
    pub threadgroups: [u32; 3],
    /// Threads of a threadgroup in each dimension.
    pub threads: [u32; 3],
    /// Function constants, by index.
    pub constants: &'a [(u32, f64)],
    /// Buffers, by index; access to an unbound buffer faults.
    pub buffers: &'a [(u32, Buffer)],
    /// Threadgroup memory, by index, in bytes.
    pub threadgroup_bytes: &'a [(u32, usize)],
    /// Threadgroup memory that the device has, in bytes.
    pub threadgroup_limit: usize,
    /// The first threadgroup that runs, in each dimension: threadgroups before it are left out, for
    /// tests of large grids.
    pub first_threadgroup: [u32; 3],
    /// The order in which SIMD groups and lanes run: 0 ascending, 1 descending, any other number
    /// the seed of a random order. All are unfair.
    pub schedule: u32,
}

const BUFFERS: usize = 31;
const THREADGROUP_BUFFERS: usize = 8;

/// `msl_buffer` of runtime.h.
#[repr(C)]
#[derive(Clone, Copy)]
struct RawBuffer {
    data: *mut c_void,
    bytes: usize,
    writable: bool,
}

/// `msl_dispatch` of runtime.h.
#[repr(C)]
struct RawDispatch {
    kernel: *const c_char,
    threadgroups: [u32; 3],
    threads: [u32; 3],
    buffers: [RawBuffer; BUFFERS],
    threadgroup_bytes: [usize; THREADGROUP_BUFFERS],
    threadgroup_limit: usize,
    first_threadgroup: [u32; 3],
    schedule: u32,
}

type Run = unsafe extern "C" fn(
    *const RawDispatch,
    *const u32,
    *const f64,
    usize,
    extern "C" fn(*mut c_void, *const c_char),
    *mut c_void,
) -> i32;

/// A compiled source. It has one set of threadgroup variables and one schedule, so it runs one
/// dispatch at a time. Load it again to run another beside it.
pub struct Library {
    run: Run,
    generated: Generated,
    // Keeps `run` valid.
    _library: libloading::Library,
    /// The file that was loaded. It stays while the library does: sanitizers look names up in it.
    copy: PathBuf,
}

impl Drop for Library {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.copy);
    }
}

extern "C" fn collect(context: *mut c_void, finding: *const c_char) {
    // SAFETY: `run` passes on the vector that it was given, and a C string.
    unsafe {
        let findings = &mut *context.cast::<Vec<String>>();
        findings.push(CStr::from_ptr(finding).to_string_lossy().into_owned());
    }
}

impl Library {
    /// Loads a copy of the file, so that each `Library` has separate variables.
    pub(crate) fn load(path: &Path, generated: Generated) -> Result<Library, Error> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let failed =
            |error: &dyn std::fmt::Display| Error::Library(format!("{}: {error}", path.display()));
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let copy = path.with_extension(format!("{}-{number}.so", std::process::id()));
        std::fs::copy(path, &copy).map_err(|error| failed(&error))?;
        // SAFETY: the library was made by `Compiler`: its constructor only registers kernels, and
        // `msl_run` has this type.
        let loaded = unsafe {
            libloading::Library::new(&copy).and_then(|library| {
                let run = *library.get::<Run>(b"msl_run\0")?;
                Ok((library, run))
            })
        };
        match loaded {
            Ok((library, run)) => Ok(Library { run, generated, _library: library, copy }),
            Err(error) => {
                let _ = std::fs::remove_file(&copy);
                Err(failed(&error))
            }
        }
    }

    /// The generated source that it was made from.
    pub fn generated(&self) -> &Generated {
        &self.generated
    }

    /// Runs a dispatch to its end and returns the findings; empty if there are none. (A build that
    /// is [sanitized](crate::Build::Sanitized) ends the process at the first finding instead.)
    ///
    /// # Errors
    /// If there is no such kernel, or an index is out of range.
    pub fn run(&mut self, dispatch: &Dispatch) -> Result<Vec<String>, Error> {
        let missing = || Error::Library(format!("it has no kernel `{}`", dispatch.kernel));
        let kernel = CString::new(dispatch.kernel).map_err(|_| missing())?;
        let threads = dispatch.threads.iter().product::<u32>();
        if let Some(&limit) = self.generated.thread_limits.get(dispatch.kernel)
            && threads > limit
        {
            let finding = format!("{threads} threads per threadgroup, the kernel is for {limit}");
            return Ok(vec![finding]);
        }
        let nothing = RawBuffer { data: std::ptr::null_mut(), bytes: 0, writable: false };
        let mut raw = RawDispatch {
            kernel: kernel.as_ptr(),
            threadgroups: dispatch.threadgroups,
            threads: dispatch.threads,
            buffers: [nothing; BUFFERS],
            threadgroup_bytes: [0; THREADGROUP_BUFFERS],
            threadgroup_limit: dispatch.threadgroup_limit,
            first_threadgroup: dispatch.first_threadgroup,
            schedule: dispatch.schedule,
        };
        let range =
            |what: &str, index: u32| Error::Library(format!("{what} {index} is out of range"));
        for &(index, buffer) in dispatch.buffers {
            let slot = raw.buffers.get_mut(index as usize).ok_or_else(|| range("buffer", index))?;
            *slot = RawBuffer {
                data: buffer.data.cast(),
                bytes: buffer.bytes,
                writable: buffer.writable,
            };
        }
        for &(index, bytes) in dispatch.threadgroup_bytes {
            let slot = raw.threadgroup_bytes.get_mut(index as usize);
            *slot.ok_or_else(|| range("threadgroup memory", index))? = bytes;
        }
        let (indices, values): (Vec<u32>, Vec<f64>) = dispatch.constants.iter().copied().unzip();
        if let Some(&index) = indices.iter().find(|&&index| index >= 1024) {
            return Err(range("function constant", index));
        }
        let mut findings: Vec<String> = Vec::new();
        // SAFETY: the structures match runtime.h; buffers are valid by the contract of `Buffer`;
        // `&mut self` keeps a second dispatch out.
        let count = unsafe {
            (self.run)(
                &raw,
                indices.as_ptr(),
                values.as_ptr(),
                indices.len(),
                collect,
                (&raw mut findings).cast(),
            )
        };
        if count < 0 {
            return Err(missing());
        }
        Ok(findings)
    }
}
