//! A stand-in for the classes of Metal that `crates/regard/src/metal/device.rs` calls: with it that
//! file runs without a Mac. Under `--cfg metal_stand_in` it is compiled into `regard` in the place
//! of `objc2`, `objc2-foundation` and `objc2-metal`, with the names and signatures that `device.rs`
//! uses. `scripts/metal-host.sh` runs the tests over it.
//!
//! It is stricter than a GPU where Metal leaves freedom:
//!
//! - Memory is at other addresses than the device reports, new memory is full of NaN, and the
//!   contents of private buffers cannot be asked for.
//! - Nothing runs before its command buffer is committed. Commands that no barrier orders run last
//!   to first.
//! - Function constants that a library declares have to be set, with their types.
//! - Command buffers, encoders and pipelines want an autorelease pool.
#![allow(
    missing_docs,
    non_snake_case,
    non_upper_case_globals,
    clippy::missing_safety_doc,
    clippy::new_without_default,
    reason = "names and signatures are those of Metal's bindings"
)]

use std::alloc::{Layout, alloc, dealloc};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A dispatch of a committed command buffer.
#[derive(Debug)]
pub struct KernelLaunch<'a> {
    pub function: &'a str,
    /// Function constants, by index.
    pub constants: &'a [(u32, f64)],
    /// Memory and its length, by index.
    pub buffers: &'a [(u32, *mut u8, usize)],
    pub threadgroups: [u32; 3],
    pub threads: u32,
    pub threadgroup_bytes: usize,
}

/// The GPU that a thread finds.
#[derive(Debug, Clone, Copy)]
pub struct Chip {
    pub name: &'static str,
    pub architecture: &'static str,
    pub family: isize,
    /// Threads per threadgroup of any pipeline, at most.
    pub max_threads: usize,
}

type Executor = Box<dyn FnMut(&KernelLaunch) -> Result<(), String>>;

thread_local! {
    static EXECUTOR: RefCell<Option<Executor>> = const { RefCell::new(None) };
    static CHIP: Cell<Option<Chip>> = const { Cell::new(None) };
    static POOLS: Cell<usize> = const { Cell::new(0) };
    static COMPILED: Cell<usize> = const { Cell::new(0) };
    static SOURCE_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Runs this thread's kernels from now on.
pub fn set_executor(run: impl FnMut(&KernelLaunch) -> Result<(), String> + 'static) {
    EXECUTOR.with(|executor| *executor.borrow_mut() = Some(Box::new(run)));
}

/// Sets this thread's default device; `None` for none.
pub fn set_chip(chip: Option<Chip>) {
    CHIP.set(chip);
}

/// Pipelines that this thread has compiled.
pub fn compiled() -> usize {
    COMPILED.get()
}

/// Bytes of source that this thread has compiled.
pub fn source_bytes() -> usize {
    SOURCE_BYTES.get()
}

fn expect_pool(what: &str) {
    assert!(POOLS.get() > 0, "{what} leaves an autoreleased object to a thread without a pool");
}

/// Memory of a buffer, aligned for anything.
#[derive(Debug)]
struct Memory {
    data: *mut u8,
    layout: Layout,
}

// SAFETY: it is memory, and who uses it when is the promise of the code that encodes work.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(bytes: usize) -> Memory {
        let layout = Layout::from_size_align(bytes.max(16), 256).expect("a small number");
        // SAFETY: the size is not 0. It is filled at once.
        let data = unsafe { alloc(layout) };
        assert!(!data.is_null(), "no memory");
        // SAFETY: as long as it was asked for.
        unsafe { data.write_bytes(0xff, layout.size()) };
        Memory { data, layout }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.data, self.layout) };
    }
}

/// The binding at an index of an encoder.
#[derive(Debug, Clone)]
struct Bound {
    memory: Arc<Memory>,
    offset: usize,
    length: usize,
}

/// A kernel with its function constants.
#[derive(Debug, Clone)]
pub struct Kernel {
    function: String,
    constants: Vec<(u32, f64)>,
    max_threads: usize,
}

/// An encoded command.
#[derive(Debug)]
enum Command {
    Dispatch {
        kernel: Kernel,
        buffers: BTreeMap<usize, Bound>,
        threadgroups: [u32; 3],
        threads: u32,
        threadgroup_bytes: usize,
    },
    Barrier,
}

impl Command {
    fn run(&self) -> Result<(), String> {
        let Command::Dispatch { kernel, buffers, threadgroups, threads, threadgroup_bytes } = self
        else {
            return Ok(());
        };
        let buffers: Vec<_> = buffers
            .iter()
            .map(|(&index, bound)| {
                // Inside of the buffer: checked when it was bound.
                let data = bound.memory.data.wrapping_add(bound.offset);
                (index as u32, data, bound.length - bound.offset)
            })
            .collect();
        let launch = KernelLaunch {
            function: &kernel.function,
            constants: &kernel.constants,
            buffers: &buffers,
            threadgroups: *threadgroups,
            threads: *threads,
            threadgroup_bytes: *threadgroup_bytes,
        };
        EXECUTOR.with(|executor| match &mut *executor.borrow_mut() {
            Some(run) => run(&launch),
            None => Err("nothing runs kernels on this thread".into()),
        })
    }
}

/// Function constants that a source declares: index, and whether it is a bool.
fn declared_constants(source: &str) -> Vec<(usize, bool)> {
    let declared = |line: &str| {
        let (declaration, rest) = line.split_once("[[function_constant(")?;
        let index = rest.split_once(')')?.0.parse().ok()?;
        Some((index, declaration.trim_start().starts_with("constant bool")))
    };
    source.lines().filter_map(declared).collect()
}

pub mod objc2;

pub mod objc2_foundation;

pub mod objc2_metal {
    use super::objc2::rc::Retained;
    use super::objc2::runtime::{Protocol, ProtocolObject};
    use super::objc2_foundation::{NSArray, NSError, NSString, NSURL};
    use super::*;
    use std::ffi::c_void;
    use std::ptr::NonNull;
    use std::sync::Mutex;

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct MTLSize {
        pub width: usize,
        pub height: usize,
        pub depth: usize,
    }
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct MTLGPUFamily(pub isize);
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct MTLCommandBufferStatus(pub usize);
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum MTLBarrierScope {
        Buffers,
    }
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum MTLDataType {
        Int,
        Bool,
    }
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum MTLLanguageVersion {
        Version3_1,
    }
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum MTLResourceOptions {
        StorageModeShared,
        StorageModePrivate,
    }

    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub enum MTLPipelineOption {
        FailOnBinaryArchiveMiss,
    }

    #[derive(Debug)]
    pub struct MTLArchitecture(&'static str);

    impl MTLArchitecture {
        pub fn name(&self) -> Retained<NSString> {
            NSString::from_str(self.0)
        }
    }

    #[derive(Debug)]
    pub struct MTLCompileOptions {
        version: Cell<Option<MTLLanguageVersion>>,
        fast_math: Cell<bool>,
    }

    impl MTLCompileOptions {
        pub fn new() -> Retained<MTLCompileOptions> {
            // Metal's default is fast math.
            Arc::new(MTLCompileOptions { version: Cell::new(None), fast_math: Cell::new(true) })
        }
        pub fn setLanguageVersion(&self, version: MTLLanguageVersion) {
            self.version.set(Some(version));
        }
        pub fn setFastMathEnabled(&self, enabled: bool) {
            self.fast_math.set(enabled);
        }
    }

    #[derive(Debug)]
    pub struct MTLFunctionConstantValues(RefCell<BTreeMap<usize, (bool, f64)>>);

    impl MTLFunctionConstantValues {
        pub fn new() -> Retained<MTLFunctionConstantValues> {
            Arc::new(MTLFunctionConstantValues(RefCell::default()))
        }
        pub unsafe fn setConstantValue_type_atIndex(
            &self,
            value: NonNull<c_void>,
            ty: MTLDataType,
            index: usize,
        ) {
            // SAFETY: the caller's promise: it points to a value of that type.
            let value = unsafe {
                match ty {
                    MTLDataType::Int => f64::from(value.cast::<i32>().read()),
                    MTLDataType::Bool => f64::from(u8::from(value.cast::<bool>().read())),
                }
            };
            self.0.borrow_mut().insert(index, (ty == MTLDataType::Bool, value));
        }
    }

    #[derive(Debug)]
    pub struct MTLBinaryArchiveDescriptor(RefCell<Option<String>>);

    impl MTLBinaryArchiveDescriptor {
        pub fn new() -> Retained<MTLBinaryArchiveDescriptor> {
            Arc::new(MTLBinaryArchiveDescriptor(RefCell::default()))
        }
        pub fn setUrl(&self, url: Option<&NSURL>) {
            *self.0.borrow_mut() = url.map(|url| url.0.clone());
        }
    }

    #[derive(Debug, Default)]
    pub struct MTLComputePipelineDescriptor {
        function: RefCell<Option<Kernel>>,
        archived: RefCell<Vec<String>>,
    }

    impl MTLComputePipelineDescriptor {
        pub fn new() -> Retained<MTLComputePipelineDescriptor> {
            Arc::new(MTLComputePipelineDescriptor::default())
        }
        pub fn setComputeFunction(&self, function: Option<&ProtocolObject<dyn MTLFunction>>) {
            *self.function.borrow_mut() = function.map(|function| function.0.clone());
        }
        pub fn setBinaryArchives(
            &self,
            archives: Option<&NSArray<ProtocolObject<dyn MTLBinaryArchive>>>,
        ) {
            let archives = archives.into_iter().flat_map(|archives| &archives.0);
            let contents = archives.flat_map(|archive| archive.0.lock().unwrap().clone());
            *self.archived.borrow_mut() = contents.collect();
        }
        /// The function, and the line of an archive that has it.
        fn keyed(&self) -> (Kernel, String) {
            let function = self.function.borrow().clone().expect("a function");
            let key = format!("{} {:?}", function.function, function.constants);
            (function, key)
        }
    }

    /// The start of an archive's file. A line for each pipeline follows.
    const ARCHIVE: &str = "binary archive";

    pub trait MTLDevice {
        fn newBinaryArchiveWithDescriptor_error(
            &self,
            descriptor: &MTLBinaryArchiveDescriptor,
        ) -> Result<Retained<ProtocolObject<dyn MTLBinaryArchive>>, Retained<NSError>>;
        fn newComputePipelineStateWithDescriptor_options_reflection_error(
            &self,
            descriptor: &MTLComputePipelineDescriptor,
            options: MTLPipelineOption,
            reflection: Option<()>,
        ) -> Result<Retained<ProtocolObject<dyn MTLComputePipelineState>>, Retained<NSError>>;
        fn name(&self) -> Retained<NSString>;
        fn architecture(&self) -> Retained<MTLArchitecture>;
        fn supportsFamily(&self, family: MTLGPUFamily) -> bool;
        fn maxThreadgroupMemoryLength(&self) -> usize;
        fn newCommandQueue(&self) -> Option<Retained<ProtocolObject<dyn MTLCommandQueue>>>;
        fn newBufferWithLength_options(
            &self,
            length: usize,
            options: MTLResourceOptions,
        ) -> Option<Retained<ProtocolObject<dyn MTLBuffer>>>;
        fn newLibraryWithSource_options_error(
            &self,
            source: &NSString,
            options: Option<&MTLCompileOptions>,
        ) -> Result<Retained<ProtocolObject<dyn MTLLibrary>>, Retained<NSError>>;
        fn newLibraryWithURL_error(
            &self,
            url: &NSURL,
        ) -> Result<Retained<ProtocolObject<dyn MTLLibrary>>, Retained<NSError>>;
        fn newComputePipelineStateWithFunction_error(
            &self,
            function: &ProtocolObject<dyn MTLFunction>,
        ) -> Result<Retained<ProtocolObject<dyn MTLComputePipelineState>>, Retained<NSError>>;
    }
    pub trait MTLCommandQueue {
        fn commandBuffer(&self) -> Option<Retained<ProtocolObject<dyn MTLCommandBuffer>>>;
    }
    pub trait MTLCommandBuffer {
        fn computeCommandEncoder(
            &self,
        ) -> Option<Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>>;
        fn commit(&self);
        fn waitUntilCompleted(&self);
        fn status(&self) -> MTLCommandBufferStatus;
        fn error(&self) -> Option<Retained<NSError>>;
    }
    pub trait MTLCommandEncoder {
        fn endEncoding(&self);
    }
    pub trait MTLComputeCommandEncoder: MTLCommandEncoder {
        fn setComputePipelineState(&self, state: &ProtocolObject<dyn MTLComputePipelineState>);
        unsafe fn setBytes_length_atIndex(
            &self,
            bytes: NonNull<c_void>,
            length: usize,
            index: usize,
        );
        unsafe fn setBuffer_offset_atIndex(
            &self,
            buffer: Option<&ProtocolObject<dyn MTLBuffer>>,
            offset: usize,
            index: usize,
        );
        unsafe fn setThreadgroupMemoryLength_atIndex(&self, length: usize, index: usize);
        fn dispatchThreadgroups_threadsPerThreadgroup(
            &self,
            threadgroups: MTLSize,
            threads: MTLSize,
        );
        fn memoryBarrierWithScope(&self, scope: MTLBarrierScope);
    }
    pub trait MTLComputePipelineState {
        fn maxTotalThreadsPerThreadgroup(&self) -> usize;
    }
    pub trait MTLBinaryArchive {
        fn addComputePipelineFunctionsWithDescriptor_error(
            &self,
            descriptor: &MTLComputePipelineDescriptor,
        ) -> Result<(), Retained<NSError>>;
        fn serializeToURL_error(&self, url: &NSURL) -> Result<(), Retained<NSError>>;
    }
    pub trait MTLFunction {}
    pub trait MTLLibrary {
        fn newFunctionWithName_constantValues_error(
            &self,
            name: &NSString,
            values: &MTLFunctionConstantValues,
        ) -> Result<Retained<ProtocolObject<dyn MTLFunction>>, Retained<NSError>>;
    }
    pub trait MTLBuffer {
        fn length(&self) -> usize;
        fn contents(&self) -> NonNull<c_void>;
        fn gpuAddress(&self) -> u64;
    }

    impl Protocol for dyn MTLDevice {
        type State = Chip;
    }
    impl Protocol for dyn MTLCommandQueue {
        type State = ();
    }
    impl Protocol for dyn MTLCommandBuffer {
        type State = Commands;
    }
    impl Protocol for dyn MTLComputeCommandEncoder {
        type State = Encoder;
    }
    impl Protocol for dyn MTLComputePipelineState {
        type State = Kernel;
    }
    impl Protocol for dyn MTLFunction {
        type State = Kernel;
    }
    impl Protocol for dyn MTLLibrary {
        type State = Vec<(usize, bool)>;
    }
    impl Protocol for dyn MTLBinaryArchive {
        type State = Mutex<Vec<String>>;
    }
    impl Protocol for dyn MTLBuffer {
        type State = Contents;
    }

    #[derive(Debug)]
    pub struct Contents {
        memory: Arc<Memory>,
        length: usize,
        address: u64,
        is_private: bool,
    }

    /// The commands encoded in a command buffer, and how running it ended.
    #[derive(Debug, Default)]
    pub struct Commands {
        encoded: Arc<Mutex<Vec<Command>>>,
        encoding: Arc<Mutex<bool>>,
        /// `None` before it is committed.
        ended: Mutex<Option<Result<(), String>>>,
    }

    #[derive(Debug, Default)]
    pub struct Encoder {
        encoded: Arc<Mutex<Vec<Command>>>,
        encoding: Arc<Mutex<bool>>,
        kernel: RefCell<Option<Kernel>>,
        buffers: RefCell<BTreeMap<usize, Bound>>,
        threadgroup_bytes: Cell<usize>,
    }

    fn error<T>(words: impl Into<String>) -> Result<T, Retained<NSError>> {
        Err(Arc::new(NSError(words.into())))
    }

    pub fn MTLCreateSystemDefaultDevice() -> Option<Retained<ProtocolObject<dyn MTLDevice>>> {
        CHIP.get().map(|chip| Arc::new(ProtocolObject(chip)))
    }

    impl MTLDevice for ProtocolObject<dyn MTLDevice> {
        fn newBinaryArchiveWithDescriptor_error(
            &self,
            descriptor: &MTLBinaryArchiveDescriptor,
        ) -> Result<Retained<ProtocolObject<dyn MTLBinaryArchive>>, Retained<NSError>> {
            expect_pool("an archive");
            let Some(path) = &*descriptor.0.borrow() else {
                return Ok(Arc::new(ProtocolObject(Mutex::default())));
            };
            let text = std::fs::read_to_string(path).unwrap_or_default();
            match text.strip_prefix(ARCHIVE) {
                Some(lines) => {
                    let lines = lines.lines().map(String::from).collect();
                    Ok(Arc::new(ProtocolObject(Mutex::new(lines))))
                }
                None => error("it is no archive"),
            }
        }
        fn newComputePipelineStateWithDescriptor_options_reflection_error(
            &self,
            descriptor: &MTLComputePipelineDescriptor,
            _: MTLPipelineOption,
            _: Option<()>,
        ) -> Result<Retained<ProtocolObject<dyn MTLComputePipelineState>>, Retained<NSError>>
        {
            expect_pool("a pipeline");
            let (function, key) = descriptor.keyed();
            if !descriptor.archived.borrow().contains(&key) {
                return error("no archive has it");
            }
            let max_threads = self.0.max_threads;
            Ok(Arc::new(ProtocolObject(Kernel { max_threads, ..function })))
        }
        fn name(&self) -> Retained<NSString> {
            NSString::from_str(self.0.name)
        }
        fn architecture(&self) -> Retained<MTLArchitecture> {
            Arc::new(MTLArchitecture(self.0.architecture))
        }
        fn supportsFamily(&self, family: MTLGPUFamily) -> bool {
            (1001..=1000 + self.0.family).contains(&family.0)
        }
        fn maxThreadgroupMemoryLength(&self) -> usize {
            32 << 10
        }
        fn newCommandQueue(&self) -> Option<Retained<ProtocolObject<dyn MTLCommandQueue>>> {
            Some(Arc::new(ProtocolObject(())))
        }
        fn newBufferWithLength_options(
            &self,
            length: usize,
            options: MTLResourceOptions,
        ) -> Option<Retained<ProtocolObject<dyn MTLBuffer>>> {
            static NEXT_ADDRESS: AtomicU64 = AtomicU64::new(0x11_0000_0000);
            assert!(length > 0, "Metal has no empty buffers");
            // Addresses are page-aligned, as on a GPU, and are not addresses of host memory.
            let pages = (length as u64).next_multiple_of(16 << 10) + (16 << 10);
            let address = NEXT_ADDRESS.fetch_add(pages, Ordering::Relaxed);
            let is_private = options == MTLResourceOptions::StorageModePrivate;
            let memory = Arc::new(Memory::new(length));
            Some(Arc::new(ProtocolObject(Contents { memory, length, address, is_private })))
        }
        fn newLibraryWithSource_options_error(
            &self,
            source: &NSString,
            options: Option<&MTLCompileOptions>,
        ) -> Result<Retained<ProtocolObject<dyn MTLLibrary>>, Retained<NSError>> {
            expect_pool("a library");
            let Some(options) = options else { return error("no options") };
            if options.version.get() != Some(MTLLanguageVersion::Version3_1) {
                return error("bfloat is a type of Metal 3.1");
            }
            if options.fast_math.get() {
                return error("fast math");
            }
            SOURCE_BYTES.set(SOURCE_BYTES.get() + source.0.len());
            Ok(Arc::new(ProtocolObject(declared_constants(&source.0))))
        }
        fn newLibraryWithURL_error(
            &self,
            url: &NSURL,
        ) -> Result<Retained<ProtocolObject<dyn MTLLibrary>>, Retained<NSError>> {
            match std::fs::read_to_string(&url.0) {
                Ok(source) => Ok(Arc::new(ProtocolObject(declared_constants(&source)))),
                Err(reason) => error(reason.to_string()),
            }
        }
        fn newComputePipelineStateWithFunction_error(
            &self,
            function: &ProtocolObject<dyn MTLFunction>,
        ) -> Result<Retained<ProtocolObject<dyn MTLComputePipelineState>>, Retained<NSError>>
        {
            expect_pool("a pipeline");
            COMPILED.set(COMPILED.get() + 1);
            let max_threads = self.0.max_threads;
            Ok(Arc::new(ProtocolObject(Kernel { max_threads, ..function.0.clone() })))
        }
    }

    impl MTLBinaryArchive for ProtocolObject<dyn MTLBinaryArchive> {
        fn addComputePipelineFunctionsWithDescriptor_error(
            &self,
            descriptor: &MTLComputePipelineDescriptor,
        ) -> Result<(), Retained<NSError>> {
            let (_, key) = descriptor.keyed();
            self.0.lock().unwrap().push(key);
            Ok(())
        }
        fn serializeToURL_error(&self, url: &NSURL) -> Result<(), Retained<NSError>> {
            let lines = self.0.lock().unwrap().join("\n");
            std::fs::write(&url.0, format!("{ARCHIVE}\n{lines}\n"))
                .map_err(|reason| Arc::new(NSError(reason.to_string())))
        }
    }

    impl MTLLibrary for ProtocolObject<dyn MTLLibrary> {
        fn newFunctionWithName_constantValues_error(
            &self,
            name: &NSString,
            values: &MTLFunctionConstantValues,
        ) -> Result<Retained<ProtocolObject<dyn MTLFunction>>, Retained<NSError>> {
            expect_pool("a function");
            let values = values.0.borrow();
            let mut constants = Vec::new();
            for (index, is_bool) in &self.0 {
                match values.get(index) {
                    Some((found, value)) if found == is_bool => {
                        constants.push((*index as u32, *value));
                    }
                    Some(_) => {
                        return error(format!("function constant {index} is of another type"));
                    }
                    None => return error(format!("function constant {index} is not set")),
                }
            }
            let function = name.0.clone();
            Ok(Arc::new(ProtocolObject(Kernel { function, constants, max_threads: 0 })))
        }
    }

    impl MTLComputePipelineState for ProtocolObject<dyn MTLComputePipelineState> {
        fn maxTotalThreadsPerThreadgroup(&self) -> usize {
            self.0.max_threads
        }
    }

    impl MTLCommandQueue for ProtocolObject<dyn MTLCommandQueue> {
        fn commandBuffer(&self) -> Option<Retained<ProtocolObject<dyn MTLCommandBuffer>>> {
            expect_pool("a command buffer");
            Some(Arc::new(ProtocolObject(Commands::default())))
        }
    }

    impl MTLCommandBuffer for ProtocolObject<dyn MTLCommandBuffer> {
        fn computeCommandEncoder(
            &self,
        ) -> Option<Retained<ProtocolObject<dyn MTLComputeCommandEncoder>>> {
            expect_pool("an encoder");
            let Commands { encoded, encoding, .. } = &self.0;
            let was_encoding = std::mem::replace(&mut *encoding.lock().unwrap(), true);
            assert!(!was_encoding, "the encoder before has not ended");
            let (encoded, encoding) = (encoded.clone(), encoding.clone());
            Some(Arc::new(ProtocolObject(Encoder { encoded, encoding, ..Encoder::default() })))
        }
        fn commit(&self) {
            assert!(!*self.0.encoding.lock().unwrap(), "an encoder has not ended");
            let mut ended = self.0.ended.lock().unwrap();
            assert!(ended.is_none(), "committed twice");
            let encoded = self.0.encoded.lock().unwrap();
            let unordered = encoded.split(|command| matches!(command, Command::Barrier));
            // As on a concurrent encoder: a GPU may run commands that no barrier orders in any
            // order.
            let mut commands = unordered.flat_map(|commands| commands.iter().rev());
            *ended = Some(commands.try_for_each(Command::run));
        }
        fn waitUntilCompleted(&self) {
            assert!(self.0.ended.lock().unwrap().is_some(), "it was not committed");
        }
        fn status(&self) -> MTLCommandBufferStatus {
            MTLCommandBufferStatus(match *self.0.ended.lock().unwrap() {
                None => 0,
                Some(Ok(())) => 4,
                Some(Err(_)) => 5,
            })
        }
        fn error(&self) -> Option<Retained<NSError>> {
            match &*self.0.ended.lock().unwrap() {
                Some(Err(words)) => Some(Arc::new(NSError(words.clone()))),
                None | Some(Ok(())) => None,
            }
        }
    }

    impl MTLCommandEncoder for ProtocolObject<dyn MTLComputeCommandEncoder> {
        fn endEncoding(&self) {
            let was_encoding = std::mem::replace(&mut *self.0.encoding.lock().unwrap(), false);
            assert!(was_encoding, "it has ended");
        }
    }

    impl MTLComputeCommandEncoder for ProtocolObject<dyn MTLComputeCommandEncoder> {
        fn setComputePipelineState(&self, state: &ProtocolObject<dyn MTLComputePipelineState>) {
            expect_pool("a setter");
            *self.0.kernel.borrow_mut() = Some(state.0.clone());
        }
        unsafe fn setBytes_length_atIndex(
            &self,
            bytes: NonNull<c_void>,
            length: usize,
            index: usize,
        ) {
            assert!(length <= 4096, "Metal copies 4 KiB at most");
            let memory = Memory::new(length);
            // SAFETY: the caller's promise: there are as many bytes.
            unsafe { memory.data.copy_from(bytes.cast::<u8>().as_ptr(), length) };
            let bound = Bound { memory: Arc::new(memory), offset: 0, length };
            self.0.buffers.borrow_mut().insert(index, bound);
        }
        unsafe fn setBuffer_offset_atIndex(
            &self,
            buffer: Option<&ProtocolObject<dyn MTLBuffer>>,
            offset: usize,
            index: usize,
        ) {
            assert!(index < 31, "Metal has 31 buffers");
            let Contents { memory, length, .. } = &buffer.expect("a buffer").0;
            assert!(offset < *length, "offset {offset} of {length} bytes");
            let bound = Bound { memory: memory.clone(), offset, length: *length };
            self.0.buffers.borrow_mut().insert(index, bound);
        }
        unsafe fn setThreadgroupMemoryLength_atIndex(&self, length: usize, index: usize) {
            assert!(index == 0 && length.is_multiple_of(16), "{length} bytes at {index}");
            self.0.threadgroup_bytes.set(length);
        }
        fn dispatchThreadgroups_threadsPerThreadgroup(
            &self,
            threadgroups: MTLSize,
            threads: MTLSize,
        ) {
            assert!(*self.0.encoding.lock().unwrap(), "the encoder has ended");
            assert_eq!((threads.height, threads.depth), (1, 1));
            let kernel = self.0.kernel.borrow().clone().expect("a pipeline");
            assert!(threads.width <= kernel.max_threads, "too many threads");
            let MTLSize { width, height, depth } = threadgroups;
            assert!(width * height * depth > 0, "Metal has no empty grids");
            self.0.encoded.lock().unwrap().push(Command::Dispatch {
                kernel,
                buffers: self.0.buffers.borrow().clone(),
                threadgroups: [width, height, depth].map(|n| n as u32),
                threads: threads.width as u32,
                threadgroup_bytes: self.0.threadgroup_bytes.get(),
            });
        }
        fn memoryBarrierWithScope(&self, _: MTLBarrierScope) {
            self.0.encoded.lock().unwrap().push(Command::Barrier);
        }
    }

    impl MTLBuffer for ProtocolObject<dyn MTLBuffer> {
        fn length(&self) -> usize {
            self.0.length
        }
        fn contents(&self) -> NonNull<c_void> {
            assert!(!self.0.is_private, "the CPU sees nothing of a private buffer");
            NonNull::new(self.0.memory.data.cast()).expect("memory")
        }
        fn gpuAddress(&self) -> u64 {
            self.0.address
        }
    }

    /// The memory of a buffer, a private one too: for tests.
    pub fn memory_of(buffer: &ProtocolObject<dyn MTLBuffer>) -> (*mut u8, usize) {
        (buffer.0.memory.data, buffer.0.length)
    }
}
