//! The device code inside the crate, and what of it has been loaded into a context.

use super::driver;
use crate::error::Error;
use cudarc::driver::CudaContext;
use cudarc::driver::sys;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

/// A module as it ships: PTX, or machine code for one generation of GPUs.
struct Shipped {
    name: &'static str,
    #[allow(dead_code, reason = "the index names it for readers")]
    architecture: &'static str,
    image_bytes: usize,
    deflated: &'static [u8],
}

const SHIPPED: &[Shipped] = include!("ptx/index.rs");

/// The modules inside this build: name, bytes as they ship, bytes unpacked.
pub fn inside() -> impl Iterator<Item = (&'static str, usize, usize)> {
    SHIPPED.iter().map(|module| (module.name, module.deflated.len(), module.image_bytes))
}

/// A module's image with a zero byte behind it, which ends PTX.
fn image(name: &str) -> Result<Vec<u8>, Error> {
    let Some(module) = SHIPPED.iter().find(|module| module.name == name) else {
        return Err(Error::argument("module", format!("\"{name}\""), "a module that ships with regard"));
    };
    let mut image =
        miniz_oxide::inflate::decompress_to_vec_with_limit(module.deflated, module.image_bytes).map_err(
            |error| Error::Driver { doing: format!("unpacking module {name}"), reason: error.to_string() },
        )?;
    image.push(0);
    Ok(image)
}

/// A kernel that can be launched.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub handle: sys::CUfunction,
    /// Whether it may be started before the kernel in front of it has ended: PTX that has the instruction for it (`griddepcontrol.wait`, in front
    /// of everything that touches memory) waits for that itself, once it is under way.
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

/// What has been loaded into one context. It stays loaded as long as the context lives: graphs that were captured may launch it at any time.
pub(super) struct Modules {
    context: Arc<CudaContext>,
    most_shared_bytes: usize,
    functions: RwLock<HashMap<(&'static str, &'static str), Function>>,
    /// Also the lock under which things are loaded: once each.
    modules: Mutex<HashMap<&'static str, Module>>,
}

impl Modules {
    pub fn new(context: Arc<CudaContext>, most_shared_bytes: usize) -> Modules {
        Modules { context, most_shared_bytes, functions: RwLock::default(), modules: Mutex::default() }
    }

    /// A kernel, loaded if it is not yet.
    pub fn function(&self, module: &'static str, entry: &'static str) -> Result<Function, Error> {
        let known = |functions: &HashMap<_, Function>| functions.get(&(module, entry)).copied();
        // A panic leaves the maps as they were or with one entry more: there is nothing that it could break.
        if let Some(function) = known(&self.functions.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(function);
        }
        let mut modules = self.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = known(&self.functions.read().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(function);
        }
        self.context.bind_to_thread().map_err(|error| driver::failed("using the GPU's context", error))?;
        let (loaded, starts_early) = match modules.get(module) {
            Some(loaded) => (loaded.handle, loaded.starts_early),
            None => {
                let image = image(module)?;
                let wait = b"griddepcontrol.wait";
                let starts_early = image.windows(wait.len()).any(|at| at == wait);
                let handle = driver::load_module(module, &image)?;
                modules.insert(module, Module { handle, starts_early });
                (handle, starts_early)
            }
        };
        let handle = driver::load_function(loaded, module, entry, self.most_shared_bytes)?;
        let function = Function { handle, starts_early };
        self.functions.write().unwrap_or_else(PoisonError::into_inner).insert((module, entry), function);
        Ok(function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::shipped::MODULES;

    #[test]
    fn what_is_listed_is_inside_and_unpacks() {
        let inside: Vec<_> = inside().collect();
        let listed: Vec<_> = MODULES.iter().map(|module| module.name).collect();
        assert_eq!(inside.iter().map(|module| module.0).collect::<Vec<_>>(), listed);
        for (name, deflated, bytes) in inside {
            let image = image(name).unwrap();
            assert_eq!(image.len(), bytes + 1, "{name}");
            assert!(
                deflated < bytes && (image.starts_with(b".version ") || image.starts_with(b"\x7fELF")),
                "{name}"
            );
        }
        assert!(image("no such module").is_err());
    }
}
