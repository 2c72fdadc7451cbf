//! Compiles modules, and checks the rules: each assembles for every architecture, and those that
//! must not spill do not.

use super::nvrtc::Nvrtc;
use super::ptxas::{Assembly, Usage};
use super::source::Sources;
use super::{Image, Module, PTX, Setup, WAIT, counted, in_parallel, ptx, ptxas, sass};
use anyhow::{Context, Result};
use std::time::Instant;

/// A module as compiled now.
pub struct Compiled<'a> {
    module: &'a Module,
    /// The images that ship, by kind.
    images: Vec<(&'static str, Image)>,
    /// The output of ptxas for the machine code among them.
    assemblies: Vec<(&'static str, Assembly)>,
}

impl<'a> Compiled<'a> {
    /// Its images: module, kind, image.
    pub fn shipped(&self) -> impl Iterator<Item = (&'a Module, &'static str, &Image)> {
        self.images.iter().map(|(kind, image)| (self.module, *kind, image))
    }
}

/// Compiles some of the modules, in their order.
pub fn compile<'a>(
    selected: &[&'a Module],
    sources: &Sources,
    setup: Setup,
) -> Result<Vec<Compiled<'a>>> {
    let begun = Instant::now();
    let nvrtc = Nvrtc::load(&setup.tools.nvrtc)?;
    std::fs::create_dir_all(&setup.folders.scratch)?;
    let compiled = in_parallel(selected, setup.jobs, |module| {
        compile_one(module, sources, &nvrtc, setup)
            .with_context(|| format!("module {}", module.name))
    })?;
    let seconds = begun.elapsed().as_secs_f64();
    let modules = counted(compiled.len(), "module");
    println!("{modules} compiled with NVRTC {} in {seconds:.1} s", nvrtc.version()?);
    Ok(compiled)
}

/// Compiles one of the modules, and makes what ships of it.
fn compile_one<'a>(
    module: &'a Module,
    sources: &Sources,
    nvrtc: &Nvrtc,
    Setup { folders, tools, .. }: Setup,
) -> Result<Compiled<'a>> {
    let ptx = ptx::for_older_drivers(&nvrtc.compile(sources, module)?)?;
    ptx::expect_no_path(&ptx)?;
    let ptx = ptx::stripped(&ptx);
    std::fs::write(folders.scratch.join(format!("{}.ptx", module.name)), &ptx)?;
    let starts_early = ptx.contains(WAIT);
    let (mut images, mut assemblies) = (Vec::new(), Vec::new());
    for kind in module.kinds() {
        let bytes = if kind == PTX {
            ptx.clone().into_bytes()
        } else {
            assemblies
                .push((kind, ptxas::assemble(&tools.ptxas, &folders.scratch, &module.name, kind)?));
            std::fs::read(folders.scratch.join(format!("{}.{kind}.cubin", module.name)))?
        };
        images.push((kind, Image { bytes, starts_early }));
    }
    Ok(Compiled { module, images, assemblies })
}

/// A module and what is wrong with it.
pub type Complaint<'a> = (&'a Module, String);

/// Holds what was compiled to the rules: what is wrong is returned.
pub fn judge<'a>(
    compiled: &[Compiled<'a>],
    architectures: &[&str],
    setup: Setup,
) -> Result<Vec<Complaint<'a>>> {
    let mut complaints = assemble(compiled, architectures, setup)?;
    complaints.extend(read_assembled(compiled, architectures, setup)?);
    Ok(complaints)
}

/// Assembles what was compiled for every architecture, prints what it takes there, and returns what
/// is wrong with it.
fn assemble<'a>(
    compiled: &[Compiled<'a>],
    architectures: &[&str],
    Setup { folders, tools, jobs }: Setup,
) -> Result<Vec<Complaint<'a>>> {
    let begun = Instant::now();
    let tasks: Vec<_> = compiled
        .iter()
        .flat_map(|compiled| {
            compiled
                .module
                .targets(architectures)
                .into_iter()
                .map(move |architecture| (compiled, architecture))
        })
        .collect();
    let assembled = in_parallel(&tasks, jobs, |&(compiled, architecture)| {
        let known = compiled.assemblies.iter().find(|(kind, _)| *kind == architecture);
        Ok(match known {
            Some((_, assembly)) => Ok(assembly.clone()),
            None => {
                ptxas::assemble(&tools.ptxas, &folders.scratch, &compiled.module.name, architecture)
            }
        })
    })?;
    let mut complaints = Vec::new();
    let mut usages: Vec<(&'a Module, &str, Usage)> = Vec::new();
    for ((Compiled { module, .. }, architecture), result) in tasks.iter().zip(assembled) {
        let place = format!("module {}, {architecture}", module.name);
        match result {
            Ok(assembly) => {
                usages.extend(
                    assembly.kernels.into_iter().map(|usage| (*module, *architecture, usage)),
                );
                let losses =
                    assembly.losses.iter().map(|loss| (*module, format!("{place}: {loss}")));
                if module.must_not_spill {
                    complaints.extend(losses)
                } else {
                    losses.for_each(|(_, loss)| println!("{loss}"))
                }
            }
            Err(error) => complaints.push((module, format!("{place}: {error:#}"))),
        }
    }
    for (module, architecture, usage) in &usages {
        if module.must_not_spill && (usage.stack_bytes > 0 || usage.spill_bytes() > 0) {
            let complaint = format!(
                "module {}, {architecture}: kernel {} must not spill, but (with what it calls) \
                 uses {} bytes of local memory and spills {} bytes; allowed: none",
                module.name,
                usage.kernel,
                usage.stack_bytes,
                usage.spill_bytes()
            );
            complaints.push((*module, complaint));
        }
    }
    print!("{}", ptxas::table(&usages, architectures));
    println!("{} assemblies in {:.1} s", tasks.len(), begun.elapsed().as_secs_f64());
    Ok(complaints)
}

/// Reads the assembled code of every module, prints the main loops of the Hopper kernels, and
/// returns what is wrong.
fn read_assembled<'a>(
    compiled: &[Compiled<'a>],
    architectures: &[&str],
    Setup { folders, tools, jobs }: Setup,
) -> Result<Vec<Complaint<'a>>> {
    let tasks: Vec<_> = compiled
        .iter()
        .flat_map(|compiled| {
            let targets = compiled.module.targets(architectures);
            targets.into_iter().map(|architecture| (compiled.module, architecture))
        })
        .collect();
    let read = in_parallel(&tasks, jobs, |&(module, architecture)| {
        let name = format!("{}.{architecture}.cubin", module.name);
        let text = match sass::disassemble(&tools.nvdisasm, &folders.scratch.join(&name)) {
            Ok(text) => text,
            Err(error) => return Ok((None, vec![format!("{name}: {error:#}")])),
        };
        let lost = sass::lost_spills(&text);
        let mut wrong: Vec<String> =
            lost.into_iter().map(|spill| format!("{name}: ptxas lost a spill: {spill}")).collect();
        let mut line = None;
        if module.uses_wgmma {
            match sass::main_loop(&text) {
                Err(error) => wrong.push(format!("{name}: {error:#}")),
                Ok(sass::MainLoop { instructions, products, local }) => {
                    line = Some(format!(
                        "{name}: main loop of {instructions} instructions, {products} HGMMA, \
                         {local} to local memory"
                    ));
                    if local > 0 && module.specialized && module.must_not_spill {
                        wrong.push(format!(
                            "{name}: {local} accesses to local memory in the main loop; \
                             allowed: none"
                        ));
                    }
                }
            }
        }
        Ok((line, wrong))
    })?;
    let mut complaints = Vec::new();
    for ((module, _), (line, wrong)) in tasks.iter().zip(read) {
        if let Some(line) = line {
            println!("{line}");
        }
        complaints.extend(wrong.into_iter().map(|complaint| (*module, complaint)));
    }
    Ok(complaints)
}
