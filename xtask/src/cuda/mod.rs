//! Builds and checks the CUDA device code that ships in the crates of images
//! ([`registry::Package`]).
//!
//! `*.cu` and `*.cuh` in the folders of `crates/regard/src/cuda/kernels` are compiled to PTX by
//! NVRTC, one module at a time, and assembled for the common generations of GPUs. PTX and machine
//! code are kept in the folder `images` of the module's crate, compressed, with an index in Rust. A
//! user of the crate needs no compiler for them. A change of them needs three wheels from PyPI
//! ([`tools`]), no GPU and no toolkit. The results of a build are recorded ([`record`]), so that
//! not every check builds again. The one kernel of `regard-nccl` is apart from them ([`exchange`]).

mod compile;
mod exchange;
mod nvrtc;
mod ptx;
mod ptxas;
mod record;
#[allow(dead_code, reason = "the crate reads more of the registry than this tool does")]
#[path = "../../../crates/regard/src/cuda/registry/mod.rs"]
mod registry;
/// As archives hold PTX. The source of the crate that reads them, which this program writes.
#[path = "../../../crates/regard-cuda-images/src/relative_ptx.rs"]
mod relative_ptx;
mod sass;
mod ship;
mod source;
#[cfg(test)]
mod tests;
mod tools;

use anyhow::{Result, bail};
use compile::{compile, judge};
use source::Sources;
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZero;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use tools::Tools;

/// Commands for the CUDA device code.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Compile the modules, assemble them for every architecture, and write the images and their
    /// record: the folder images of each crate of images.
    Build(Selection),
    /// Fail unless the images are the result of compiling the sources, assemble for every
    /// architecture, and kernels that must not spill do not. Modules that the record vouches for
    /// are not built again, but for one of each kind.
    Check {
        /// Build every module again, even if the record has it. `--only` and `--arch` imply it for
        /// the modules that they select.
        #[arg(long)]
        all: bool,
        /// Of the modules that the record vouches for, build one of each kind in this quarter of
        /// the kinds only. `.ci/run` goes by the day.
        #[arg(
            long,
            value_name = "0 to 3",
            value_parser = clap::value_parser!(u8).range(..i64::from(QUARTERS)),
            conflicts_with = "all"
        )]
        quarter: Option<u8>,
        #[command(flatten)]
        selection: Selection,
    },
    /// Print the modules that ship, one per line: name, source, macros.
    List,
    /// Write the images into a folder unpacked, a file per image, called MODULE.KIND.
    Unpack {
        /// The folder.
        into: PathBuf,
    },
}

/// The modules, and the architectures that they must run on.
#[derive(clap::Args)]
pub struct Selection {
    /// Only modules whose name contains this.
    #[arg(long, value_name = "PATTERN")]
    only: Option<String>,
    /// Assemble for these architectures only (check); repeat or separate by commas.
    #[arg(long, value_name = "SM", value_delimiter = ',')]
    arch: Vec<String>,
    /// Compilers to run at once; all cores by default.
    #[arg(long, value_name = "N")]
    jobs: Option<NonZero<usize>>,
}

/// The architectures that the images must assemble for: A100, L40, H200, B200, RTX 50.
const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"];

/// Architectures that modules ship machine code for. Code for sm_80 runs on sm_86 and sm_89 too. On
/// GPUs newer than these the driver compiles PTX.
const ASSEMBLED: [&str; 2] = ["sm_80", "sm_90a"];

/// The kind of an image that is PTX; the others are named after their architecture.
const PTX: &str = "ptx";

/// Maximum bytes per crate: a registry takes packages of 10 MiB.
const MAX_BYTES: usize = 9_900_000;

/// A module to build.
#[derive(Debug, Clone)]
pub struct Module {
    /// Its name; also its file name.
    name: String,
    /// The file in `kernels/`.
    source: String,
    /// Macros, name and value.
    defines: Vec<(String, String)>,
    /// `compute_80` or an architecture with features of its own, such as `compute_90a`.
    architecture: String,
    /// Whether it is compiled for plain scores and exact head dims only.
    specialized: bool,
    /// Whether its main loop must multiply by WGMMA.
    uses_wgmma: bool,
    /// Whether another module runs in its place on Hopper and later.
    replaced_on_hopper: bool,
    /// Whether spills and local memory are errors.
    must_not_spill: bool,
}

/// A crate of images, and the modules that ship in it.
pub struct Package {
    name: &'static str,
    modules: Vec<Module>,
}

/// The registry of the crate `regard`, in this tool's terms.
pub fn packages() -> Vec<Package> {
    let owned = |(name, value): (&str, usize)| (name.to_string(), value.to_string());
    let module = |module: &registry::Module| Module {
        name: module.name().into(),
        source: module.family().source().into(),
        defines: module.defines().into_iter().map(owned).collect(),
        architecture: module.architecture.name().into(),
        specialized: module.is_specialized(),
        uses_wgmma: module.family().uses_wgmma(),
        replaced_on_hopper: module.is_replaced_on_hopper(),
        must_not_spill: module.must_not_spill,
    };
    let package = |package: registry::Package| {
        let modules = registry::MODULES.iter().filter(|module| module.package == package);
        Package { name: package.name(), modules: modules.map(module).collect() }
    };
    registry::Package::ALL.map(package).into()
}

impl Module {
    /// The architecture that its PTX is for, as ptxas calls it.
    fn own_target(&self) -> String {
        self.architecture.replace("compute_", "sm_")
    }

    /// Whether it runs on the architecture that it is for and on no other.
    fn is_bound(&self) -> bool {
        self.architecture.ends_with('a')
    }

    /// The images of it that ship: PTX, unless it would run on one generation of GPUs only, and
    /// machine code; none for Hopper if another module runs in its place there.
    fn kinds(&self) -> Vec<&'static str> {
        let mut kinds = self.targets(&ASSEMBLED);
        kinds.retain(|&kind| !(self.replaced_on_hopper && kind == "sm_90a"));
        if !self.is_bound() {
            kinds.insert(0, PTX);
        }
        kinds
    }

    /// The architectures among these that its PTX must assemble for: its own and later ones, or its
    /// own alone.
    fn targets<'a>(&self, architectures: &[&'a str]) -> Vec<&'a str> {
        let own = self.own_target();
        let number = |name: &str| {
            name.chars()
                .filter(char::is_ascii_digit)
                .collect::<String>()
                .parse::<u32>()
                .unwrap_or(0)
        };
        let runs = |target: &str| {
            if self.is_bound() { target == own } else { number(target) >= number(&own) }
        };
        architectures.iter().filter(|&&target| runs(target)).copied().collect()
    }
}

/// The code that the driver loads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    bytes: Vec<u8>,
    /// Whether its kernels support programmatic dependent launch: they wait for the previous kernel
    /// themselves.
    starts_early: bool,
}

/// The PTX instruction of kernels that support programmatic dependent launch.
const WAIT: &str = "griddepcontrol.wait";

/// Carries out a command on the modules of each crate of images.
pub fn run(command: &Command, packages: &[Package]) -> Result<()> {
    let selection = match command {
        Command::List => {
            packages.iter().for_each(list);
            return Ok(());
        }
        Command::Unpack { into } => {
            return packages.iter().try_for_each(|Package { name, modules }| {
                ship::unpack_all(&Folders::for_package(name).images, modules, into)
            });
        }
        Command::Build(selection) | Command::Check { selection, .. } => selection,
    };
    let selected = selection.packages(packages)?;
    let tools = Tools::obtain()?;
    if selection.takes(exchange::NAME) {
        exchange::run(matches!(command, Command::Build(_)), selection, &tools)?;
    }
    for Package { name, modules } in selected {
        let folders = Folders::for_package(name);
        println!("{name}: {}", counted(modules.len(), "module"));
        if modules.is_empty() {
            nothing(command, &folders)?;
            continue;
        }
        let setup = selection.setup(&folders, &tools);
        match command {
            Command::Check { all, quarter, .. } => {
                let rebuild = match quarter {
                    _ if *all => Rebuild::All,
                    None => Rebuild::EachKind,
                    Some(quarter) => Rebuild::Quarter(*quarter),
                };
                check(modules, rebuild, selection, setup)?;
            }
            _ => build(modules, selection, setup)?,
        }
    }
    Ok(())
}

/// Prints a line for each module.
fn list(package: &Package) {
    for Module { name, source, defines, .. } in &package.modules {
        let defines: Vec<_> =
            defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
        println!("{name} {source} {}", defines.join(" "));
    }
}

/// A number and its noun.
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// The folders of sources and results.
struct Folders {
    /// `*.cu` and `*.cuh`.
    kernels: PathBuf,
    /// The images, and their record.
    images: PathBuf,
    /// PTX and assembled code for every architecture, to look at.
    scratch: PathBuf,
}

/// The context of a command.
#[derive(Clone, Copy)]
struct Setup<'a> {
    folders: &'a Folders,
    tools: &'a Tools,
    /// Compilers that run at once.
    jobs: usize,
}

impl Folders {
    /// The folders of a crate of images.
    fn for_package(package: &str) -> Folders {
        let crates = crate::workspace().join("crates");
        Folders {
            kernels: crates.join("regard/src/cuda/kernels"),
            images: crates.join(package).join("images"),
            scratch: crate::scratch().join("cuda"),
        }
    }
}

impl Selection {
    /// Whether a module of that name is selected.
    fn takes(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|pattern| name.contains(pattern))
    }

    /// The crates of images that have selected modules; all, if nothing narrows them down.
    fn packages<'a>(&self, packages: &'a [Package]) -> Result<Vec<&'a Package>> {
        let mut selected: Vec<_> = packages.iter().collect();
        if let Some(pattern) = &self.only {
            selected
                .retain(|package| package.modules.iter().any(|module| self.takes(&module.name)));
            if selected.is_empty() && !self.takes(exchange::NAME) {
                bail!("no shipped module has {pattern:?} in its name");
            }
        }
        Ok(selected)
    }

    /// The selected ones of the modules.
    fn select<'a>(&self, modules: &'a [Module]) -> Result<Vec<&'a Module>> {
        ship::check_names(modules)?;
        Ok(modules.iter().filter(|module| self.takes(&module.name)).collect())
    }

    fn architectures(&self) -> Vec<&str> {
        match self.arch.is_empty() {
            true => ARCHITECTURES.to_vec(),
            false => self.arch.iter().map(String::as_str).collect(),
        }
    }

    fn setup<'a>(&self, folders: &'a Folders, tools: &'a Tools) -> Setup<'a> {
        let cores = || std::thread::available_parallelism().map_or(1, NonZero::get);
        Setup { folders, tools, jobs: self.jobs.map_or_else(cores, NonZero::get) }
    }
}

/// An empty list needs no compilers, but its index.
fn nothing(command: &Command, folders: &Folders) -> Result<()> {
    match command {
        Command::Build(_) => {
            std::fs::create_dir_all(&folders.images)?;
            ship::remove_strangers(&folders.images, &[])?;
            ship::write_index(&folders.images, &[]).map(drop)
        }
        Command::List | Command::Unpack { .. } => Ok(()),
        Command::Check { .. } if !folders.images.exists() => Ok(()),
        Command::Check { .. } => {
            ship::check_index(&folders.images, &[])?;
            match ship::strangers(&folders.images, &[])?.first() {
                Some(complaint) => bail!("{complaint}"),
                None => Ok(()),
            }
        }
    }
}

fn build(modules: &[Module], selection: &Selection, setup: Setup) -> Result<()> {
    let Setup { folders, jobs, .. } = setup;
    let selected = selection.select(modules)?;
    let sources = Sources::read(&folders.kernels)?;
    let compiled = compile(&selected, &sources, setup)?;
    let images = compiled.iter().flat_map(|compiled| compiled.shipped());
    ship::write(&folders.images, modules, images, jobs)?;
    if selection.only.is_none() {
        ship::remove_strangers(&folders.images, modules)?;
    }
    let bytes = ship::write_index(&folders.images, modules)?;
    println!("{} ship, {bytes} bytes packed", counted(modules.len(), "module"));
    let complaints = judge(&compiled, &ARCHITECTURES, setup)?;
    for (_, complaint) in &complaints {
        println!("`cargo xtask cuda check` will complain: {complaint}");
    }
    // The record vouches only for modules that were built just now without violations.
    let good = selected
        .iter()
        .copied()
        .filter(|module| complaints.iter().all(|(of, _)| of.name != module.name));
    record::write(modules, &selected, good, &sources, setup)
}

/// The modules that a check builds again although the record vouches for them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Rebuild {
    All,
    /// One of each kind.
    EachKind,
    /// The same for a quarter of the kinds.
    Quarter(u8),
}

/// Parts of the kinds, which are built again on different days.
const QUARTERS: u8 = 4;

fn check(modules: &[Module], rebuild: Rebuild, selection: &Selection, setup: Setup) -> Result<()> {
    let folders = setup.folders;
    let selected = selection.select(modules)?;
    let sources = Sources::read(&folders.kernels)?;
    let stale = record::stale(modules, &selected, &sources, setup)?;
    let mut built = selected.clone();
    if rebuild != Rebuild::All && selection.only.is_none() && selection.arch.is_empty() {
        let sampled = sample(modules, rebuild);
        built.retain(|module| {
            [&stale, &sampled].iter().any(|names| names.contains(module.name.as_str()))
        });
        println!(
            "{} of {} are built again; the record vouches for the others",
            built.len(),
            modules.len()
        );
    }
    let compiled = compile(&built, &sources, setup)?;
    let mut complaints = Vec::new();
    for (module, kind, image) in compiled.iter().flat_map(|compiled| compiled.shipped()) {
        complaints.extend(ship::difference(&folders.images, module, kind, image));
    }
    complaints.extend(stale.iter().map(|name| record::complaint(name)));
    if selection.only.is_none() {
        complaints.extend(ship::strangers(&folders.images, modules)?);
    }
    match ship::check_index(&folders.images, modules) {
        Err(error) => complaints.push(format!("{error:#}")),
        Ok(bytes) if bytes > MAX_BYTES => complaints.push(format!(
            "{bytes} bytes ship; allowed: {MAX_BYTES}, so that the crate can be published"
        )),
        Ok(bytes) => println!("{} ship, {bytes} bytes packed", counted(modules.len(), "module")),
    }
    let judged = judge(&compiled, &selection.architectures(), setup)?;
    complaints.extend(judged.into_iter().map(|(_, complaint)| complaint));
    if !complaints.is_empty() {
        let complained = counted(complaints.len(), "complaint");
        bail!("{complained} about the CUDA device code:\n  {}", complaints.join("\n  "));
    }
    println!("what ships is what the sources compile to, and it assembles");
    Ok(())
}

/// The modules that are built again in any case: the first of each source, architecture and build,
/// or a quarter of these.
fn sample(modules: &[Module], rebuild: Rebuild) -> BTreeSet<&str> {
    let mut first = BTreeMap::new();
    for module in modules {
        first
            .entry((&module.source, &module.architecture, module.specialized))
            .or_insert(module.name.as_str());
    }
    match rebuild {
        Rebuild::Quarter(quarter) => {
            first.into_values().skip(quarter.into()).step_by(QUARTERS.into()).collect()
        }
        _ => first.into_values().collect(),
    }
}

/// Maps items on some threads, keeping their order; the first error (in that order) is returned.
fn in_parallel<T: Sync, R: Send>(
    items: &[T],
    jobs: usize,
    work: impl Fn(&T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let worker = || {
        let mut done = Vec::new();
        while let Some((index, item)) =
            Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, items.get(i)?)))
        {
            done.push((index, work(item)));
        }
        done
    };
    // NVRTC compiles on the calling thread and recurses deeply; a thread's default 2 MB are little.
    const STACK_BYTES: usize = 64 << 20;
    let mut done = std::thread::scope(|scope| -> Result<Vec<_>> {
        let spawn =
            |_| std::thread::Builder::new().stack_size(STACK_BYTES).spawn_scoped(scope, worker);
        let threads = (0..jobs.min(items.len())).map(spawn).collect::<Result<Vec<_>, _>>()?;
        Ok(threads
            .into_iter()
            .flat_map(|thread| thread.join().expect("a worker panicked"))
            .collect())
    })?;
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}
