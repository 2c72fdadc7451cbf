//! Builds and checks the CUDA device code that ships inside the crate.
//!
//! `*.cu` and `*.cuh` in the folders of `crates/regard/src/cuda/kernels` are compiled to PTX by NVRTC, one module at a time, and assembled for the generations of GPUs
//! that most have. PTX and machine code are kept in `images/` beside them, compressed, with an index in Rust. Whoever uses the crate needs no compiler for it; whoever
//! changes it needs three wheels from PyPI ([`tools`]), no GPU and no toolkit. What was built is recorded ([`record`]), so that not every check builds it again.

mod compile;
// Each block has its SAFETY line; one is two lines above it, where the lint does not look.
#[allow(clippy::undocumented_unsafe_blocks)]
mod nvrtc;
mod ptx;
mod ptxas;
mod record;
mod sass;
mod ship;
#[allow(dead_code, reason = "the crate reads more of the list than this tool does")]
#[path = "../../../crates/regard/src/cuda/shipped.rs"]
mod shipped;
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

/// What to do with the CUDA device code.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Compile the modules, assemble them for every architecture, and write what ships and the record of it: crates/regard/src/cuda/images.
    Build(Selection),
    /// Fail unless what ships is what the sources compile to, assembles for every architecture, and its hot kernels do not spill. Modules that the record
    /// vouches for are not built again, but for one of each kind.
    Check {
        /// Build every module again, whatever the record says. `--only` and `--arch` do so with what they name.
        #[arg(long)]
        all: bool,
        #[command(flatten)]
        selection: Selection,
    },
    /// Print the modules that ship, a line each: name, source, macros.
    List,
    /// Write what ships into a folder as it is, a file an image, called MODULE.KIND.
    Unpack {
        /// The folder.
        into: PathBuf,
    },
}

/// Which modules, and where they must run.
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

/// The architectures that what ships must assemble for: A100, L40, H200, B200, RTX 50.
const ARCHITECTURES: [&str; 5] = ["sm_80", "sm_89", "sm_90a", "sm_100", "sm_120"];

/// Those that modules ship machine code for. That for sm_80 runs on sm_86 and sm_89 too. On GPUs newer than these the driver compiles PTX.
const ASSEMBLED: [&str; 2] = ["sm_80", "sm_90a"];

/// The kind of an image that is PTX; the others are called after what they are for.
const PTX: &str = "ptx";

/// The most that may ship, in bytes: crates.io takes packages of 10 MB.
const MOST_BYTES: usize = 9_300_000;

/// A module to build, whatever list it comes from.
#[derive(Debug, Clone)]
pub struct Module {
    /// What it is called; also its file name.
    name: String,
    /// The file in `kernels/`.
    source: String,
    /// Macros, name and value.
    defines: Vec<(String, String)>,
    /// `compute_80` or an architecture with features of its own, such as `compute_90a`.
    architecture: String,
    /// Whether spills and local memory are errors.
    hot: bool,
}

/// The crate's own list, in this tool's terms.
pub fn shipped_modules() -> Vec<Module> {
    let owned = |(name, value): &(&str, &str)| (name.to_string(), value.to_string());
    let module = |module: &shipped::Module| Module {
        name: module.name.into(),
        source: module.source.into(),
        defines: module.defines.iter().map(owned).collect(),
        architecture: module.architecture.into(),
        hot: module.hot,
    };
    shipped::MODULES.iter().map(module).collect()
}

/// What the sources of the kernels that multiply by warpgroups begin with.
const HOPPER_SOURCE: &str = "prefill_sm90";

impl Module {
    /// Whether it is compiled for plain scores only: what runs where speed counts most.
    fn is_plain(&self) -> bool {
        self.defines.iter().any(|(name, value)| name == "GENERAL" && value == "0")
    }

    /// The architecture that its PTX is for, as ptxas calls it.
    fn own_target(&self) -> String {
        self.architecture.replace("compute_", "sm_")
    }

    /// Whether it runs on the architecture that it is for and on no other.
    fn is_bound(&self) -> bool {
        self.architecture.ends_with('a')
    }

    /// The images of it that ship: PTX, unless that would run on one generation of GPUs only, and machine code; none for Hopper where another of the modules is
    /// the same, made for Hopper.
    fn kinds(&self, modules: &[Module]) -> Vec<&'static str> {
        let for_hopper = format!("{}_sm90", self.name);
        let replaced = modules.iter().any(|other| other.name == for_hopper);
        let mut kinds = self.targets(&ASSEMBLED);
        kinds.retain(|&kind| !(replaced && kind == "sm_90a"));
        if !self.is_bound() {
            kinds.insert(0, PTX);
        }
        kinds
    }

    /// Those of the architectures that its PTX must assemble for: its own and later ones, or its own alone.
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

/// What the driver loads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    bytes: Vec<u8>,
    /// Whether its kernels wait for the kernel in front of them themselves, and so may be started before that has ended.
    starts_early: bool,
}

/// What kernels that start early have in their PTX.
const WAIT: &str = "griddepcontrol.wait";

/// Carries out a command on a list of modules.
pub fn run(command: &Command, modules: Vec<Module>) -> Result<()> {
    if let Command::List = command {
        for Module { name, source, defines, .. } in &modules {
            let defines: Vec<_> =
                defines.iter().map(|(name, value)| format!("-D{name}={value}")).collect();
            println!("{name} {source} {}", defines.join(" "));
        }
        return Ok(());
    }
    let folders = Folders::of_crate();
    if let Command::Unpack { into } = command {
        return ship::unpack_all(&folders.images, &modules, into);
    }
    if modules.is_empty() {
        println!("the list of shipped CUDA modules is empty: there is nothing to compile");
        return nothing(command, &folders);
    }
    let tools = Tools::obtain()?;
    match command {
        Command::Build(selection) => build(&modules, selection, &folders, &tools),
        Command::Check { all, selection } => check(&modules, *all, selection, &folders, &tools),
        Command::List | Command::Unpack { .. } => Ok(()),
    }
}

/// A number and what it counts.
fn counted(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Where sources and results lie.
struct Folders {
    /// `*.cu` and `*.cuh`.
    kernels: PathBuf,
    /// What ships, and the record of it.
    images: PathBuf,
    /// PTX and assembled code for every architecture, to look at.
    scratch: PathBuf,
}

impl Folders {
    fn of_crate() -> Folders {
        let cuda = crate::workspace().join("crates/regard/src/cuda");
        Folders {
            kernels: cuda.join("kernels"),
            images: cuda.join("images"),
            scratch: crate::scratch().join("cuda"),
        }
    }
}

impl Selection {
    /// Those of the modules that are selected.
    fn of<'a>(&self, modules: &'a [Module]) -> Result<Vec<&'a Module>> {
        ship::check_names(modules)?;
        let pattern = self.only.as_deref().unwrap_or_default();
        let selected: Vec<_> =
            modules.iter().filter(|module| module.name.contains(pattern)).collect();
        if selected.is_empty() {
            bail!("no shipped module has {pattern:?} in its name");
        }
        Ok(selected)
    }

    fn architectures(&self) -> Vec<&str> {
        match self.arch.is_empty() {
            true => ARCHITECTURES.to_vec(),
            false => self.arch.iter().map(String::as_str).collect(),
        }
    }

    fn jobs(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, NonZero::get);
        self.jobs.map_or_else(cores, NonZero::get)
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

fn build(
    modules: &[Module],
    selection: &Selection,
    folders: &Folders,
    tools: &Tools,
) -> Result<()> {
    let selected = selection.of(modules)?;
    let sources = Sources::read(&folders.kernels)?;
    let jobs = selection.jobs();
    let compiled = compile(&selected, modules, &sources, jobs, (folders, tools))?;
    let images = compiled.iter().flat_map(|compiled| compiled.shipped());
    ship::write(&folders.images, modules, images, jobs)?;
    if selection.only.is_none() {
        ship::remove_strangers(&folders.images, modules)?;
    }
    let bytes = ship::write_index(&folders.images, modules)?;
    println!("{} ship, {bytes} bytes packed", counted(modules.len(), "module"));
    let complaints = judge(&compiled, &ARCHITECTURES, jobs, (folders, tools))?;
    for (_, complaint) in &complaints {
        println!("`cargo xtask cuda check` will complain: {complaint}");
    }
    // The record vouches for what was built just now and is as it should be, and for nothing else.
    let good = selected
        .iter()
        .copied()
        .filter(|module| complaints.iter().all(|(of, _)| of.name != module.name));
    record::write(modules, &selected, good, &sources, (folders, tools))
}

fn check(
    modules: &[Module],
    all: bool,
    selection: &Selection,
    folders: &Folders,
    tools: &Tools,
) -> Result<()> {
    let selected = selection.of(modules)?;
    let sources = Sources::read(&folders.kernels)?;
    let jobs = selection.jobs();
    let stale = record::stale(modules, &selected, &sources, (folders, tools))?;
    let mut built = selected.clone();
    if !all && selection.only.is_none() && selection.arch.is_empty() {
        let sampled = sample(modules);
        built.retain(|module| {
            [&stale, &sampled].iter().any(|names| names.contains(module.name.as_str()))
        });
        println!(
            "{} of {} are built again; the record vouches for the others",
            built.len(),
            modules.len()
        );
    }
    let compiled = compile(&built, modules, &sources, jobs, (folders, tools))?;
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
        Ok(bytes) if bytes > MOST_BYTES => complaints.push(format!(
            "{bytes} bytes ship; allowed: {MOST_BYTES}, so that the crate can be published"
        )),
        Ok(bytes) => println!("{} ship, {bytes} bytes packed", counted(modules.len(), "module")),
    }
    let judged = judge(&compiled, &selection.architectures(), jobs, (folders, tools))?;
    complaints.extend(judged.into_iter().map(|(_, complaint)| complaint));
    if !complaints.is_empty() {
        let complained = counted(complaints.len(), "complaint");
        bail!("{complained} about the CUDA device code:\n  {}", complaints.join("\n  "));
    }
    println!("what ships is what the sources compile to, and it assembles");
    Ok(())
}

/// The modules that are built again whatever the record says: the first of each source, architecture and way of computing scores.
fn sample(modules: &[Module]) -> BTreeSet<&str> {
    let mut first = BTreeMap::new();
    for module in modules {
        first
            .entry((&module.source, &module.architecture, module.is_plain()))
            .or_insert(module.name.as_str());
    }
    first.into_values().collect()
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
