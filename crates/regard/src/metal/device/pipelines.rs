//! Compiled kernels: libraries by kind and type, pipelines, and binary archives.

#[cfg(metal_stand_in)]
use super::super::stand_in::{objc2, objc2_foundation, objc2_metal};
use super::objects::{DeviceObject, PipelineObject, description, refusal};
use crate::error::Error;
use crate::metal::library_source::LibrarySource;
use crate::metal::{CONSTANTS, ConstantType, Pipeline};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSArray, NSError, NSString, NSURL};
use objc2_metal::{
    MTLBinaryArchive, MTLBinaryArchiveDescriptor, MTLCompileOptions, MTLComputePipelineDescriptor,
    MTLComputePipelineState, MTLDataType, MTLDevice, MTLFunction, MTLFunctionConstantValues,
    MTLLanguageVersion, MTLLibrary, MTLPipelineOption,
};
use std::collections::HashMap;
use std::hash::Hash;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

type LibraryObject = ProtocolObject<dyn MTLLibrary>;
type FunctionObject = ProtocolObject<dyn MTLFunction>;
type ArchiveObject = ProtocolObject<dyn MTLBinaryArchive>;

/// The kernels of a device.
pub(super) struct Pipelines {
    device: Retained<DeviceObject>,
    machine: String,
    libraries: Libraries,
    pipelines: Slots<Pipeline, Retained<PipelineObject>>,
    archive: Archive,
}

enum Libraries {
    /// One for each kind of kernel and type, by [`LibrarySource::name`].
    Source(Slots<String, Retained<LibraryObject>>),
    Metallib(Retained<LibraryObject>),
}

/// An archive to find pipelines in, if there is one. The lock is held while Metal looks.
#[derive(Default)]
struct Archive(Mutex<Option<Retained<ArchiveObject>>>);

// SAFETY: Metal's objects may be used on any thread, and this one is used under a lock.
unsafe impl Send for Archive {}
// SAFETY: as above.
unsafe impl Sync for Archive {}

impl Pipelines {
    /// Pipelines of the shipped source.
    pub(super) fn from_source(device: Retained<DeviceObject>, machine: &str) -> Pipelines {
        Pipelines::new(device, machine, Libraries::Source(Slots::default()))
    }

    /// Pipelines of a metallib.
    pub(super) fn from_metallib(
        device: Retained<DeviceObject>,
        machine: &str,
        path: &str,
    ) -> Result<Pipelines, Error> {
        let url = NSURL::fileURLWithPath(&NSString::from_str(path));
        let library = device
            .newLibraryWithURL_error(&url)
            .map_err(|error| refusal(machine, format!("{path}: {}", description(&error))))?;
        Ok(Pipelines::new(device, machine, Libraries::Metallib(library)))
    }

    fn new(device: Retained<DeviceObject>, machine: &str, libraries: Libraries) -> Pipelines {
        let pipelines = Slots::default();
        let archive = Archive::default();
        Pipelines { device, machine: machine.into(), libraries, pipelines, archive }
    }

    /// The compiled pipeline. Only threads that want the same one wait while it compiles.
    pub(super) fn get(
        &self,
        wanted: &Pipeline,
        threads: u32,
    ) -> Result<Retained<PipelineObject>, Error> {
        self.pipelines.get(wanted, || {
            let pipeline = autoreleasepool(|_| self.compile(wanted))?;
            let allowed = pipeline.maxTotalThreadsPerThreadgroup();
            if allowed < threads as usize {
                return Err(self.refusal(format!(
                    "{} runs with {allowed} threads per threadgroup, {threads} are planned",
                    wanted.function
                )));
            }
            Ok(pipeline)
        })
    }

    fn refusal(&self, reason: String) -> Error {
        refusal(&self.machine, reason)
    }

    fn compile(&self, wanted: &Pipeline) -> Result<Retained<PipelineObject>, Error> {
        let function = self.function(wanted)?;
        if let Some(pipeline) = self.archived(&function) {
            return Ok(pipeline);
        }
        self.device
            .newComputePipelineStateWithFunction_error(&function)
            .map_err(|error| self.refusal(format!("{}: {}", wanted.function, description(&error))))
    }

    /// A kernel with its function constants.
    fn function(&self, wanted: &Pipeline) -> Result<Retained<FunctionObject>, Error> {
        let library = self.library(wanted.function)?;
        library
            .newFunctionWithName_constantValues_error(
                &NSString::from_str(wanted.function),
                &constant_values(wanted),
            )
            .map_err(|error| self.refusal(format!("{}: {}", wanted.function, description(&error))))
    }

    /// The library that has a kernel.
    fn library(&self, function: &str) -> Result<Retained<LibraryObject>, Error> {
        let libraries = match &self.libraries {
            Libraries::Metallib(library) => return Ok(library.clone()),
            Libraries::Source(libraries) => libraries,
        };
        let source = LibrarySource::of_function(function);
        libraries.get(source.name(), || {
            let options = MTLCompileOptions::new();
            // bfloat came with 3.1 (macOS 14, iOS 17).
            options.setLanguageVersion(MTLLanguageVersion::Version3_1);
            // Its replacement needs macOS 15.
            #[allow(deprecated)]
            options.setFastMathEnabled(false);
            let text = NSString::from_str(&source.text());
            self.device.newLibraryWithSource_options_error(&text, Some(&options)).map_err(|error| {
                self.refusal(format!(
                    "the kernels {} do not compile: {}",
                    source.name(),
                    description(&error)
                ))
            })
        })
    }

    /// The pipeline as the archive has it.
    fn archived(&self, function: &FunctionObject) -> Option<Retained<PipelineObject>> {
        let archive = self.archive.0.lock().unwrap_or_else(PoisonError::into_inner);
        let archives = [archive.as_ref()?.clone()];
        let descriptor = descriptor(function);
        descriptor.setBinaryArchives(Some(&NSArray::from_retained_slice(&archives)));
        let miss = MTLPipelineOption::FailOnBinaryArchiveMiss;
        self.device
            .newComputePipelineStateWithDescriptor_options_reflection_error(&descriptor, miss, None)
            .ok()
    }

    /// Takes pipelines from a file from now on, if it is there, and from no other one.
    pub(super) fn use_archive(&self, path: &str) -> Result<(), Error> {
        let archive = match Path::new(path).exists() {
            true => Some(autoreleasepool(|_| self.open_archive(path, Some(path)))?),
            false => None,
        };
        *self.archive.0.lock().unwrap_or_else(PoisonError::into_inner) = archive;
        Ok(())
    }

    /// An archive: that of a file, or an empty one.
    fn open_archive(
        &self,
        path: &str,
        file: Option<&str>,
    ) -> Result<Retained<ArchiveObject>, Error> {
        let descriptor = MTLBinaryArchiveDescriptor::new();
        let url = file.map(|file| NSURL::fileURLWithPath(&NSString::from_str(file)));
        descriptor.setUrl(url.as_deref());
        self.device
            .newBinaryArchiveWithDescriptor_error(&descriptor)
            .map_err(|error| self.archive_failure(path, &error))
    }

    fn archive_failure(&self, path: &str, error: &NSError) -> Error {
        self.refusal(format!("the archive {path}: {}", description(error)))
    }

    /// Writes every pipeline that has been compiled or taken to an archive. How many.
    pub(super) fn save_archive(&self, path: &str) -> Result<usize, Error> {
        autoreleasepool(|_| {
            let failed = |error: &NSError| self.archive_failure(path, error);
            let archive = self.open_archive(path, None)?;
            let wanted = self.pipelines.keys();
            for pipeline in &wanted {
                let descriptor = descriptor(&*self.function(pipeline)?);
                archive
                    .addComputePipelineFunctionsWithDescriptor_error(&descriptor)
                    .map_err(|error| failed(&error))?;
            }
            // Another process may be reading the file.
            let unfinished = format!("{path}.{}", std::process::id());
            let url = NSURL::fileURLWithPath(&NSString::from_str(&unfinished));
            archive.serializeToURL_error(&url).map_err(|error| failed(&error))?;
            std::fs::rename(&unfinished, path)
                .map_err(|error| self.refusal(format!("the archive {path}: {error}")))?;
            Ok(wanted.len())
        })
    }
}

fn descriptor(function: &FunctionObject) -> Retained<MTLComputePipelineDescriptor> {
    let descriptor = MTLComputePipelineDescriptor::new();
    descriptor.setComputeFunction(Some(function));
    descriptor
}

/// The function constants of a pipeline, with the types that the source declares.
fn constant_values(wanted: &Pipeline) -> Retained<MTLFunctionConstantValues> {
    let values = MTLFunctionConstantValues::new();
    for (index, ((_, ty), value)) in CONSTANTS.iter().zip(wanted.constants).enumerate() {
        let flag = value != 0;
        // SAFETY: each pointer is to a value of the type that goes with it, and is read at once.
        unsafe {
            match ty {
                ConstantType::Int => {
                    let value = NonNull::from(&value).cast();
                    values.setConstantValue_type_atIndex(value, MTLDataType::Int, index);
                }
                ConstantType::Bool => {
                    let value = NonNull::from(&flag).cast();
                    values.setConstantValue_type_atIndex(value, MTLDataType::Bool, index);
                }
            }
        }
    }
    values
}

/// An object, or nothing until it is made. The lock is held while it is.
type Slot<T> = Arc<Mutex<Option<T>>>;

/// Objects that are made when they are first asked for.
struct Slots<K, T>(Mutex<HashMap<K, Slot<T>>>);

impl<K, T> Default for Slots<K, T> {
    fn default() -> Slots<K, T> {
        Slots(Mutex::default())
    }
}

impl<K: Hash + Eq + Clone, T: Clone> Slots<K, T> {
    /// The object of a key. Only threads that want the same one wait while it is made.
    fn get(&self, key: &K, make: impl FnOnce() -> Result<T, Error>) -> Result<T, Error> {
        let mut slots = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.entry(key.clone()).or_default().clone();
        drop(slots);
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        match &*slot {
            Some(object) => Ok(object.clone()),
            None => Ok(slot.insert(make()?).clone()),
        }
    }

    /// The keys of all objects that have been made.
    fn keys(&self) -> Vec<K> {
        let slots = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let is_made =
            |slot: &Slot<T>| slot.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        slots.iter().filter(|(_, slot)| is_made(slot)).map(|(key, _)| key.clone()).collect()
    }
}
