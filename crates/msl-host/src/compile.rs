//! Calls clang.

use crate::generate::generate;
use crate::{Error, Library};
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::{env, fs};

const RUNTIME: [(&str, &str); 6] = [
    ("runtime.h", include_str!("../runtime/runtime.h")),
    ("msl.h", include_str!("../runtime/msl.h")),
    ("scheduler.h", include_str!("../runtime/scheduler.h")),
    ("scheduler.cpp", include_str!("../runtime/scheduler.cpp")),
    ("shadow.cpp", include_str!("../runtime/shadow.cpp")),
    ("switch.h", include_str!("../runtime/switch.h")),
];

/// The oldest clang with all that is needed: `__bf16` arithmetic, and rounding after every
/// half-precision operation.
const MIN_CLANG: u32 = 19;

/// The build of the kernels. It decides what a run can find.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Build {
    /// Optimised; locals that are not initialized hold a pattern. For values.
    Plain,
    /// With `-ffast-math`, as a library might be compiled for the GPU: tests for infinity and NaN
    /// may be folded away.
    FastMath,
    /// AddressSanitizer and UndefinedBehaviorSanitizer. The process needs clang's AddressSanitizer
    /// preloaded: [`Compiler::preload`].
    Sanitized,
    /// Not optimized, every load and store traced: races, uninitialized threadgroup memory,
    /// accesses outside of bound buffers.
    Races,
}

impl Build {
    /// All of them.
    pub const ALL: [Build; 4] = [Build::Plain, Build::FastMath, Build::Sanitized, Build::Races];

    /// Its name in paths and reports.
    pub fn name(self) -> &'static str {
        match self {
            Build::Plain => "plain",
            Build::FastMath => "fast-math",
            Build::Sanitized => "sanitized",
            Build::Races => "races",
        }
    }

    /// The build of that name.
    pub fn named(name: &str) -> Option<Build> {
        Build::ALL.into_iter().find(|build| build.name() == name)
    }

    fn kernel_flags(self) -> &'static [&'static str] {
        match self {
            Build::Plain => &["-O2", "-g1", "-ftrivial-auto-var-init=pattern"],
            Build::FastMath => &["-O2", "-g1", "-ffast-math"],
            Build::Sanitized => &[
                "-O1",
                "-g1",
                "-fno-omit-frame-pointer",
                "-fsanitize=address,undefined",
                "-fno-sanitize-recover=all",
                "-fsanitize-address-use-after-return=never",
            ],
            Build::Races => &["-O0", "-g1", "-fsanitize-coverage=func,trace-loads,trace-stores"],
        }
    }

    fn link_flags(self) -> &'static [&'static str] {
        match self {
            Build::Sanitized => &["-fsanitize=address,undefined", "-shared-libasan"],
            _ => &[],
        }
    }
}

/// A clang, and a folder to compile in.
#[derive(Debug, Clone)]
pub struct Compiler {
    clang: PathBuf,
    folder: PathBuf,
}

fn succeeded(command: &mut Command) -> Result<Vec<u8>, String> {
    match command.output() {
        Ok(output) if output.status.success() => Ok(output.stdout),
        Ok(output) => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        Err(error) => Err(error.to_string()),
    }
}

impl Compiler {
    /// Finds clang: the program that `MSL_HOST_CLANG` names, or the newest `clang++-N`, or
    /// `clang++`. Libraries are kept in `folder`, by the hash of their sources and options.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if there is none that will do.
    pub fn new(folder: impl Into<PathBuf>) -> Result<Compiler, Error> {
        if !cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            return Err(Error::Unavailable("the runtime is for x86-64 Linux".into()));
        }
        let folder = folder.into();
        let names: Vec<String> = match env::var("MSL_HOST_CLANG") {
            Ok(name) => vec![name],
            Err(_) => (MIN_CLANG..40)
                .rev()
                .map(|version| format!("clang++-{version}"))
                .chain(["clang++".to_string()])
                .collect(),
        };
        for name in &names {
            let Ok(version) = succeeded(Command::new(name).arg("-dumpversion")) else { continue };
            let version = String::from_utf8_lossy(&version).into_owned();
            let major =
                version.split('.').next().and_then(|major| major.trim().parse::<u32>().ok());
            if major.is_some_and(|major| major >= MIN_CLANG) {
                fs::create_dir_all(&folder).map_err(|error| {
                    Error::Unavailable(format!("{}: {error}", folder.display()))
                })?;
                return Ok(Compiler { clang: name.into(), folder });
            }
        }
        Err(Error::Unavailable(format!(
            "no clang of version {MIN_CLANG} or later (tried {} to {}; MSL_HOST_CLANG names \
             another)",
            names[0],
            names[names.len() - 1]
        )))
    }

    /// The library that `LD_PRELOAD` has to name for [`Build::Sanitized`] libraries to load.
    ///
    /// # Errors
    /// [`Error::Unavailable`] if clang has no AddressSanitizer (Debian: `libclang-rt-N-dev`).
    pub fn preload(&self) -> Result<PathBuf, Error> {
        let mut command = Command::new(&self.clang);
        for name in ["libclang_rt.asan-x86_64.so", "libclang_rt.asan.so"] {
            let output =
                succeeded(command.arg(format!("--print-file-name={name}"))).unwrap_or_default();
            let path =
                PathBuf::from(String::from_utf8_lossy(&output).lines().last().unwrap_or("").trim());
            if path.is_absolute() && path.exists() {
                return Ok(path);
            }
        }
        Err(Error::Unavailable(
            "this clang has no shared AddressSanitizer (Debian: libclang-rt-N-dev)".into(),
        ))
    }

    /// Compiles MSL and loads it. `name` appears in reports in place of a file's name.
    ///
    /// # Errors
    /// If the source is not understood or not accepted, or the library does not load.
    pub fn library(&self, name: &str, msl: &str, build: Build) -> Result<Library, Error> {
        let generated = generate(&self.preprocess(name, msl)?)?;
        let mut hash = DefaultHasher::new();
        (&generated.source, build, &self.clang, RUNTIME, build.kernel_flags()).hash(&mut hash);
        let path = self.folder.join(format!("{name}-{}-{:016x}.so", build.name(), hash.finish()));
        // Other threads that want the same library wait for it.
        static BUILDING: Mutex<BTreeMap<PathBuf, Arc<Mutex<()>>>> = Mutex::new(BTreeMap::new());
        let mut all = BUILDING.lock().unwrap_or_else(PoisonError::into_inner);
        let this = all.entry(path.clone()).or_default().clone();
        drop(all);
        let building = this.lock().unwrap_or_else(PoisonError::into_inner);
        if !path.exists() {
            self.build(&generated.source, build, &path)?;
        }
        drop(building);
        Library::load(&path, generated)
    }

    /// Checks MSL with real, distinct address spaces, without running it.
    ///
    /// # Errors
    /// The output of clang.
    pub fn typecheck(&self, name: &str, msl: &str) -> Result<(), Error> {
        let generated = generate(&self.preprocess(name, msl)?)?;
        let folder = self.scratch()?;
        let source = folder.join("kernels.cpp");
        let result = write(&source, &generated.source).and_then(|()| {
            let mut command = self.clang(&folder);
            command.args(["-fsyntax-only", "-DMSL_TYPECHECK", "-Wall", "-Wextra", "-Werror"]);
            command.args([
                "-Wno-unused-variable",
                "-Wno-unused-function",
                "-Wno-unused-const-variable",
                "-Wno-unknown-pragmas",
            ]);
            succeeded(command.arg(&source)).map(|_| ()).map_err(Error::Source)
        });
        let _ = fs::remove_dir_all(&folder);
        result
    }

    /// Expands macros. Metal's own headers are dropped; line markers stay.
    fn preprocess(&self, name: &str, msl: &str) -> Result<String, Error> {
        let folder = self.scratch()?;
        let source = folder.join(name);
        let own: String = msl
            .lines()
            .map(|line| if line.trim_start().starts_with("#include <metal_") { "" } else { line })
            .fold(String::new(), |all, line| all + line + "\n");
        let result = write(&source, &own).and_then(|()| {
            let mut command = Command::new(&self.clang);
            command.current_dir(&folder).args(["-E", "-x", "c++", "-nostdinc", name]);
            command.args(["-D__METAL_VERSION__=310", "-D__METAL__=1"]);
            succeeded(&mut command).map_err(Error::Source)
        });
        let _ = fs::remove_dir_all(&folder);
        Ok(String::from_utf8_lossy(&result?).into_owned())
    }

    fn build(&self, source: &str, build: Build, library: &Path) -> Result<(), Error> {
        let folder = self.scratch()?;
        let result = self.build_in(&folder, source, build).and_then(|built| {
            fs::rename(&built, library)
                .map_err(|error| Error::Library(format!("{}: {error}", library.display())))
        });
        let _ = fs::remove_dir_all(&folder);
        result
    }

    fn build_in(&self, folder: &Path, source: &str, build: Build) -> Result<PathBuf, Error> {
        write(&folder.join("kernels.cpp"), source)?;
        let compile = |file: &str, flags: &[&str]| {
            let mut command = self.clang(folder);
            command.args(flags).args(["-fPIC", "-c"]).arg(folder.join(file));
            command.arg("-o").arg(folder.join(file).with_extension("o"));
            succeeded(&mut command).map_err(Error::Source)
        };
        compile("kernels.cpp", build.kernel_flags())?;
        compile("scheduler.cpp", &["-O2", "-g1"])?;
        compile("shadow.cpp", &["-O2", "-g1"])?;
        let built = folder.join("library.so");
        let mut link = self.clang(folder);
        link.args(["-shared", "--rtlib=compiler-rt", "-Wl,-Bsymbolic", "-ldl"])
            .args(build.link_flags());
        link.args(["kernels.o", "scheduler.o", "shadow.o"].map(|object| folder.join(object)));
        succeeded(link.arg("-o").arg(&built)).map_err(Error::Library)?;
        Ok(built)
    }

    /// clang with the flags that all compilations share, and the runtime's files in `folder`.
    fn clang(&self, folder: &Path) -> Command {
        for (name, text) in RUNTIME {
            // A failure shows when clang does not find the file.
            let _ = fs::write(folder.join(name), text);
        }
        let mut command = Command::new(&self.clang);
        command.args(["-std=c++17", "-mf16c", "-mfma", "-ffp-contract=off"]).arg("-I").arg(folder);
        // Every operation in half and bfloat rounds, as on the GPU.
        for excess in ["-ffloat16-excess-precision=none", "-fbfloat16-excess-precision=none"] {
            command.args(["-Xclang", excess]);
        }
        command.args([
            "-Wno-user-defined-literals",
            "-Wno-duplicate-decl-specifier",
            "-Wno-unknown-attributes",
            // For `#pragma METAL fp contract(off)`: every build here is without contraction.
            "-Wno-unknown-pragmas",
        ]);
        command.args([
            "-Wno-nan-infinity-disabled",
            "-Wno-psabi",
            "-Wno-pass-failed",
            "-Wno-ignored-attributes",
        ]);
        command
    }

    fn scratch(&self) -> Result<PathBuf, Error> {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let folder = self.folder.join(format!("build-{}-{number}", std::process::id()));
        fs::create_dir_all(&folder)
            .map_err(|error| Error::Library(format!("{}: {error}", folder.display())))?;
        Ok(folder)
    }
}

fn write(path: &Path, text: &str) -> Result<(), Error> {
    fs::write(path, text).map_err(|error| Error::Library(format!("{}: {error}", path.display())))
}
