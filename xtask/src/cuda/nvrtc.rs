//! NVRTC, NVIDIA's run-time compiler: a shared library that turns CUDA C++ into PTX. Loaded at run
//! time; no header is needed to build this.

use super::Module;
use super::source::Sources;
use anyhow::{Context, Result, bail};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;

/// Options of every module. The first keeps NVRTC from looking for headers in the current folder.
const OPTIONS: [&str; 3] =
    ["--no-source-include", "--std=c++17", "--device-as-default-execution-space"];

/// A program under compilation (`nvrtcProgram`).
type Handle = *mut c_void;
/// 0 where a call succeeded (`nvrtcResult`).
type Status = c_int;

/// The loaded library.
pub struct Nvrtc {
    // The functions below live as long as this.
    _library: Library,
    error_string: unsafe extern "C" fn(Status) -> *const c_char,
    version: unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status,
    create_program: unsafe extern "C" fn(
        *mut Handle,
        *const c_char,
        *const c_char,
        c_int,
        *const *const c_char,
        *const *const c_char,
    ) -> Status,
    destroy_program: unsafe extern "C" fn(*mut Handle) -> Status,
    compile_program: unsafe extern "C" fn(Handle, c_int, *const *const c_char) -> Status,
    ptx_size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
    ptx: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    log_size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
    log: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
}

impl Nvrtc {
    /// Loads the library at that path.
    pub fn load(path: &Path) -> Result<Nvrtc> {
        // SAFETY: loading runs the library's initializers; it is NVIDIA's own, and these are its
        // documented signatures.
        unsafe {
            let library =
                Library::new(path).with_context(|| format!("loading {}", path.display()))?;
            Ok(Nvrtc {
                error_string: *library.get(b"nvrtcGetErrorString")?,
                version: *library.get(b"nvrtcVersion")?,
                create_program: *library.get(b"nvrtcCreateProgram")?,
                destroy_program: *library.get(b"nvrtcDestroyProgram")?,
                compile_program: *library.get(b"nvrtcCompileProgram")?,
                ptx_size: *library.get(b"nvrtcGetPTXSize")?,
                ptx: *library.get(b"nvrtcGetPTX")?,
                log_size: *library.get(b"nvrtcGetProgramLogSize")?,
                log: *library.get(b"nvrtcGetProgramLog")?,
                _library: library,
            })
        }
    }

    /// The compiler's version, `12.8`.
    pub fn version(&self) -> Result<String> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both point to integers of this frame.
        let status = unsafe { (self.version)(&mut major, &mut minor) };
        self.expect(status, "nvrtcVersion")?;
        Ok(format!("{major}.{minor}"))
    }

    /// The PTX of a module. Warnings are printed.
    pub fn compile(&self, sources: &Sources, module: &Module) -> Result<String> {
        let text = CString::new(sources.text(&module.source)?)?;
        let name = CString::new(module.source.as_str())?;
        let headers = Strings::new(sources.files().map(|(_, text)| text.to_string()))?;
        let names = Strings::new(sources.files().map(|(name, _)| name.to_string()))?;
        let mut handle = ptr::null_mut();
        // SAFETY: all strings end in NUL and live beyond the call; there are as many names as
        // headers.
        let status = unsafe {
            (self.create_program)(
                &mut handle,
                text.as_ptr(),
                name.as_ptr(),
                headers.count(),
                headers.pointers.as_ptr(),
                names.pointers.as_ptr(),
            )
        };
        self.expect(status, "nvrtcCreateProgram")?;
        let program = Program { nvrtc: self, handle };

        let options = [format!("--gpu-architecture={}", module.architecture)]
            .into_iter()
            .chain(OPTIONS.map(String::from))
            .chain(
                module.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")),
            );
        let options = Strings::new(options)?;
        // SAFETY: the program is alive, and the strings outlive the call.
        let status = unsafe {
            (self.compile_program)(program.handle, options.count(), options.pointers.as_ptr())
        };
        let log =
            program.text(self.log_size, self.log).context("reading the compiler's messages")?;
        if status != 0 {
            bail!("{}:\n{}", self.message(status), log.trim());
        }
        if !log.trim().is_empty() {
            println!("module {}:\n{}", module.name, log.trim());
        }
        program.text(self.ptx_size, self.ptx).context("reading the PTX")
    }

    fn message(&self, status: Status) -> String {
        // SAFETY: the function returns a static string for every number.
        unsafe { CStr::from_ptr((self.error_string)(status)) }.to_string_lossy().into_owned()
    }

    fn expect(&self, status: Status, call: &str) -> Result<()> {
        if status != 0 {
            bail!("{call}: {}", self.message(status));
        }
        Ok(())
    }
}

/// A program, destroyed when dropped.
struct Program<'a> {
    nvrtc: &'a Nvrtc,
    handle: Handle,
}

impl Program<'_> {
    /// A text of the program: its size in bytes (with the NUL) by one function, its bytes by
    /// another.
    fn text(
        &self,
        size: unsafe extern "C" fn(Handle, *mut usize) -> Status,
        get: unsafe extern "C" fn(Handle, *mut c_char) -> Status,
    ) -> Result<String> {
        let mut bytes = 0;
        // SAFETY: the program is alive; the size goes to this frame.
        let status = unsafe { size(self.handle, &mut bytes) };
        self.nvrtc.expect(status, "asking for a size")?;
        let mut text = vec![0u8; bytes.max(1)];
        // SAFETY: the buffer has the size that the library asked for.
        let status = unsafe { get(self.handle, text.as_mut_ptr().cast()) };
        self.nvrtc.expect(status, "asking for a text")?;
        Ok(CStr::from_bytes_until_nul(&text)?.to_str()?.to_string())
    }
}

impl Drop for Program<'_> {
    fn drop(&mut self) {
        // SAFETY: the program is alive, and this is its last use. An error would leave nothing to
        // do.
        unsafe { (self.nvrtc.destroy_program)(&mut self.handle) };
    }
}

/// Strings as C wants them: an array of pointers, valid while this lives.
struct Strings {
    _owned: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    fn new(strings: impl Iterator<Item = String>) -> Result<Strings> {
        let owned = strings.map(CString::new).collect::<Result<Vec<_>, _>>()?;
        let pointers = owned.iter().map(|string| string.as_ptr()).collect();
        Ok(Strings { _owned: owned, pointers })
    }

    fn count(&self) -> c_int {
        self.pointers.len() as c_int
    }
}
