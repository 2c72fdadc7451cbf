//! Loads device code of the crates of images into a context, once per module.

use super::driver;
use crate::error::Error;
use crate::machine::CudaFacts;
use cudarc::driver::CudaContext;
use cudarc::driver::sys;
use lzma_rust2::LzmaReader;
use regard_cuda_images::{Archive, Image, Index, relative_ptx};
use std::collections::HashMap;
use std::io::Read;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// The image indexes, one per crate.
static INDEXES: [&Index; 2] = [&regard_cuda_images::INDEX, &regard_cuda_images_8bit::INDEX];

/// An image and its archive.
#[derive(Clone, Copy)]
struct Shipped {
    image: &'static Image,
    archive: &'static Archive,
}

/// Everything that ships.
fn shipped() -> impl Iterator<Item = Shipped> {
    INDEXES.into_iter().flat_map(|index| {
        let of = |image: &'static Image| Shipped { image, archive: &index.archives[image.archive] };
        index.images.iter().map(of)
    })
}

/// Whether an image is PTX, which the driver compiles when it loads the module.
fn is_ptx(image: &Image) -> bool {
    image.kind == "ptx"
}

/// Whether an image runs on a GPU of that compute capability (90 is 9.0). Machine code runs on GPUs
/// of the same major version and the same or a later minor version, but not on embedded GPUs (8.7).
/// Architecture-specific machine code (`sm_90a`) runs on that architecture only. Modules whose PTX
/// is too new for the GPU are never selected.
fn runs_on(image: &Image, compute_capability: u32) -> bool {
    let Some(architecture) = image.kind.strip_prefix("sm_") else { return true };
    let own: u32 = architecture.trim_end_matches('a').parse().unwrap_or(u32::MAX);
    let later = own / 10 == compute_capability / 10 && own <= compute_capability;
    own == compute_capability || later && compute_capability != 87 && !architecture.ends_with('a')
}

/// An image with a zero byte behind it, which ends PTX.
fn unpack(Shipped { image, archive }: Shipped) -> Result<Vec<u8>, Error> {
    let content = unpack_archive(archive).map_err(|reason| Error::Driver {
        doing: format!("unpacking module {}", image.module),
        reason,
    })?;
    Ok(from_archive(image, content))
}

/// All images of an archive.
fn unpack_archive(archive: &Archive) -> Result<Vec<u8>, String> {
    let Archive { bytes, packed } = *archive;
    let mut content = Vec::with_capacity(bytes);
    LzmaReader::new_mem_limit(packed, u32::MAX, None)
        .and_then(|mut reader| reader.read_to_end(&mut content))
        .map_err(|error| error.to_string())?;
    match content.len() == bytes {
        true => Ok(content),
        false => Err(format!("{} bytes of {bytes}", content.len())),
    }
}

/// An image out of its unpacked archive, as [`unpack`] returns it.
fn from_archive(image: &Image, mut content: Vec<u8>) -> Vec<u8> {
    content.truncate(image.at + image.bytes);
    content.drain(..image.at);
    if is_ptx(image) {
        content = relative_ptx::decode(&content);
    }
    content.push(0);
    content
}

/// The images of a module for a GPU of that compute capability: machine code first, then what the
/// driver has to compile.
fn images(module: &str, compute_capability: u32) -> impl Iterator<Item = Shipped> {
    let of_module = move |ptx| {
        shipped().filter(move |Shipped { image, .. }| {
            image.module == module && is_ptx(image) == ptx && runs_on(image, compute_capability)
        })
    };
    of_module(false).chain(of_module(true))
}

/// A kernel that can be launched.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    /// Whether it supports programmatic dependent launch: it may start before the previous kernel
    /// has ended, because it executes `griddepcontrol.wait` before its first memory access.
    pub starts_early: bool,
}

// SAFETY: a function handle is a name; the driver lets any thread use it.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

struct Module {
    handle: sys::CUmodule,
    /// As [`Function::starts_early`].
    starts_early: bool,
}

// SAFETY: as for `Function`.
unsafe impl Send for Module {}

/// The modules of one context. They stay loaded as long as the context lives: captured graphs may
/// launch them at any time.
pub(super) struct Modules {
    context: Arc<CudaContext>,
    facts: CudaFacts,
    functions: RwLock<HashMap<(&'static str, &'static str), Function>>,
    /// Also the lock under which things are loaded: once each.
    modules: Mutex<HashMap<&'static str, Module>>,
}

impl Modules {
    pub fn new(context: Arc<CudaContext>, facts: CudaFacts) -> Modules {
        Modules { context, facts, functions: RwLock::default(), modules: Mutex::default() }
    }

    /// A kernel, loaded if it is not yet.
    pub fn function(&self, module: &'static str, entry: &'static str) -> Result<Function, Error> {
        let known = |functions: &HashMap<_, Function>| functions.get(&(module, entry)).copied();
        // Poisoning is ignored: a panic leaves the map unchanged or with one complete entry more.
        if let Some(function) =
            known(&self.functions.read().unwrap_or_else(PoisonError::into_inner))
        {
            return Ok(function);
        }
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) =
            known(&self.functions.read().unwrap_or_else(PoisonError::into_inner))
        {
            return Ok(function);
        }
        self.context
            .bind_to_thread()
            .map_err(|error| driver::driver_error("using the GPU's context", error))?;
        let (loaded, starts_early) = match modules.get(module) {
            Some(loaded) => (loaded.handle, loaded.starts_early),
            None => {
                let Module { handle, starts_early } = self.load(module)?;
                modules.insert(module, Module { handle, starts_early });
                (handle, starts_early)
            }
        };
        let handle = driver::load_function(loaded, module, entry, self.facts.shared_bytes)?;
        let function = Function { handle, starts_early };
        self.functions
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert((module, entry), function);
        Ok(function)
    }

    /// Loads a module from the first of its images that the driver takes.
    fn load(&self, module: &'static str) -> Result<Module, Error> {
        let mut refused =
            Error::argument("module", format!("\"{module}\""), "a module that ships for this GPU");
        for shipped in images(module, self.facts.compute_capability) {
            match driver::load_module(module, &unpack(shipped)?) {
                Ok(handle) => {
                    return Ok(Module { handle, starts_early: shipped.image.starts_early });
                }
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::registry::{MODULES, Package};

    #[test]
    fn every_listed_image_is_in_its_archive_and_unpacks() {
        for (package, index) in Package::ALL.into_iter().zip(INDEXES) {
            let of_package = MODULES.iter().filter(|module| module.package == package);
            let mut listed: Vec<_> = of_package.map(|module| module.name()).collect();
            let mut inside: Vec<_> = index.images.iter().map(|image| image.module).collect();
            inside.sort_unstable();
            inside.dedup();
            listed.sort_unstable();
            assert_eq!(inside, listed, "{}", package.name());
        }
        // An archive holds several images: each is unpacked once.
        let mut archives: HashMap<*const u8, Vec<Shipped>> = HashMap::new();
        for shipped in shipped() {
            archives.entry(shipped.archive.packed.as_ptr()).or_default().push(shipped);
        }
        for images in archives.into_values() {
            let content = unpack_archive(images[0].archive).unwrap();
            for shipped in images {
                check_image(shipped, from_archive(shipped.image, content.clone()));
            }
        }
        let first = shipped().next().unwrap();
        let content = unpack_archive(first.archive).unwrap();
        assert_eq!(unpack(first).unwrap(), from_archive(first.image, content));
    }

    /// That an image matches its entry in the index.
    fn check_image(Shipped { image, .. }: Shipped, bytes: Vec<u8>) {
        let (&last, content) = bytes.split_last().unwrap();
        let stored =
            if is_ptx(image) { relative_ptx::encode(content).len() } else { content.len() };
        assert_eq!((stored, last), (image.bytes, 0), "{}", image.module);
        let start: &[u8] = if is_ptx(image) { b".version " } else { b"\x7fELF" };
        assert!(bytes.starts_with(start), "{} {}", image.module, image.kind);
        if is_ptx(image) {
            // Kernels that start early are marked, and the other images of the module agree.
            let text = String::from_utf8(bytes).unwrap();
            let waits = text.contains("griddepcontrol.wait");
            assert_eq!(image.starts_early, waits, "{}", image.module);
            let mut others = shipped().filter(|other| other.image.module == image.module);
            assert!(others.all(|other| other.image.starts_early == image.starts_early));
        }
    }

    #[test]
    fn machine_code_comes_first_and_only_where_it_runs() {
        let kinds = |module, capability| {
            images(module, capability).map(|shipped| shipped.image.kind).collect::<Vec<_>>()
        };
        for capability in [80, 86, 89] {
            assert_eq!(kinds("merge", capability), ["sm_80", "ptx"], "{capability}");
        }
        assert_eq!(kinds("merge", 90), ["sm_90a", "ptx"]);
        for capability in [87, 100, 103, 110, 120, 121] {
            assert_eq!(kinds("merge", capability), ["ptx"], "{capability}");
        }
        assert_eq!(kinds("decode_bf16_128_128_r8_plain", 90), ["ptx"]);
        assert_eq!(kinds("decode_bf16_128_128_r8_plain_sm90", 90), ["sm_90a", "ptx"]);
        assert_eq!(kinds("prefill_bf16_128_128_plain_sm90", 90), ["sm_90a"]);
        assert!(kinds("no such module", 90).is_empty());
    }
}
