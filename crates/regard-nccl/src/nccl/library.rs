//! The functions of NCCL that are used, loaded when the program runs.
//!
//! cudarc has bindings too, but looks for `libnccl.so` alone: runtime packages and Python wheels
//! install `libnccl.so.2`, and nothing else.

use regard::{Error, Refusal};
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

/// `ncclResult_t`.
pub type Status = c_int;
pub const SUCCESS: Status = 0;
pub const IN_PROGRESS: Status = 7;

/// `ncclDataType_t` of a byte. Everything is moved as bytes.
pub const BYTE: c_int = 1;

/// `ncclComm_t`.
pub type Comm = *mut c_void;

/// `cudaStream_t`, which a `CUstream` is.
pub type Stream = *mut c_void;

/// Memory of a GPU that is sent.
pub type Source = *const c_void;

/// Memory of a GPU that is received into.
pub type Target = *mut c_void;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UniqueId(pub [c_char; 128]);

/// `ncclConfig_t` as of NCCL 2.18. A newer NCCL accepts the arguments of a program of that version.
#[repr(C)]
pub struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// The oldest version that has all that is used: 2.18, as NCCL counts.
const OLDEST: c_int = 21800;

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

impl Config {
    /// Calls return before they are done, so that a rank that does not answer blocks no other for
    /// ever. At most so many CTAs communicate.
    pub fn new(max_ctas: Option<u32>) -> Config {
        Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: OLDEST as c_uint,
            blocking: 0,
            cga_cluster_size: UNDEFINED,
            min_ctas: UNDEFINED,
            max_ctas: max_ctas.map_or(UNDEFINED, |n| n as c_int),
            net_name: std::ptr::null(),
            split_share: UNDEFINED,
        }
    }
}

/// Declares the functions as fields of [`Library`], and loads them by their names.
macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*) -> $result:ty;)*) => {
        /// NCCL's functions.
        pub struct Library {
            $(pub $field: unsafe extern "C" fn($($argument),*) -> $result,)*
            _library: libloading::Library,
        }

        impl Library {
            fn from(library: libloading::Library) -> Result<Library, String> {
                Ok(Library {
                    $($field: {
                        // SAFETY: the type is the type in NCCL's header.
                        let symbol = unsafe { library.get($name) };
                        *symbol.map_err(|error| error.to_string())?
                    },)*
                    _library: library,
                })
            }
        }
    };
}

functions! {
    get_version = b"ncclGetVersion": fn(*mut c_int) -> Status;
    get_unique_id = b"ncclGetUniqueId": fn(*mut UniqueId) -> Status;
    init = b"ncclCommInitRankConfig": fn(*mut Comm, c_int, UniqueId, c_int, *mut Config) -> Status;
    async_error = b"ncclCommGetAsyncError": fn(Comm, *mut Status) -> Status;
    finalize = b"ncclCommFinalize": fn(Comm) -> Status;
    destroy = b"ncclCommDestroy": fn(Comm) -> Status;
    abort = b"ncclCommAbort": fn(Comm) -> Status;
    error_string = b"ncclGetErrorString": fn(Status) -> *const c_char;
    last_error = b"ncclGetLastError": fn(Comm) -> *const c_char;
    group_start = b"ncclGroupStart": fn() -> Status;
    group_end = b"ncclGroupEnd": fn() -> Status;
    send = b"ncclSend": fn(Source, usize, c_int, c_int, Comm, Stream) -> Status;
    receive = b"ncclRecv": fn(Target, usize, c_int, c_int, Comm, Stream) -> Status;
    all_gather = b"ncclAllGather": fn(Source, Target, usize, c_int, Comm, Stream) -> Status;
}

/// The names that installations give the library.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// NCCL, or a refusal with the reason why it is not here.
pub fn library() -> Result<&'static Library, Error> {
    static LIBRARY: OnceLock<Result<Library, String>> = OnceLock::new();
    let library = LIBRARY.get_or_init(|| {
        let mut reasons = Vec::new();
        for name in NAMES {
            // SAFETY: loading NCCL runs its own initializers, as any program that uses it does.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => return Library::from(library).and_then(Library::new_enough),
                Err(error) => reasons.push(error.to_string()),
            }
        }
        Err(format!("NCCL cannot be loaded: {}", reasons.join("; ")))
    });
    library
        .as_ref()
        .map_err(|reason| Refusal { machine: "NCCL".into(), reason: reason.clone() }.into())
}

impl Library {
    fn new_enough(self) -> Result<Library, String> {
        match self.version() {
            Some(found) if found >= OLDEST => Ok(self),
            found => Err(format!("NCCL {found:?} is older than 2.18 ({OLDEST})")),
        }
    }

    /// The version as NCCL counts: 2.28.3 is 22803.
    pub fn version(&self) -> Option<c_int> {
        let mut version = 0;
        // SAFETY: NCCL writes one number.
        let status = unsafe { (self.get_version)(&mut version) };
        (status == SUCCESS).then_some(version)
    }

    /// NCCL's text for a status.
    pub fn text(&self, status: Status, comm: Comm) -> String {
        let of = |text: *const c_char| match text.is_null() {
            true => String::new(),
            // SAFETY: NCCL returns text that lives as long as the library.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned(),
        };
        // SAFETY: any status has a text.
        let text = of(unsafe { (self.error_string)(status) });
        // SAFETY: `comm` is null or a communicator; NCCL ignores it.
        let last = of(unsafe { (self.last_error)(comm) });
        if last.trim().is_empty() { text } else { format!("{text}: {}", last.trim()) }
    }
}
