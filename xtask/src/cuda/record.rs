//! The record of builds: a fingerprint per module, beside the images, of all inputs and of the
//! images themselves.
//!
//! A module whose fingerprint is in the record was compiled by these compilers from these sources
//! to these images, which assemble everywhere as they should. Only `cargo xtask cuda build` writes
//! the record, and only of modules that it has built in that very run. Any later change of sources,
//! options, compilers, this tool's own treatment of PTX, or the images (by a merge of two branches,
//! say) changes the fingerprint.

use super::source::Sources;
use super::tools::{Tools, succeed};
use super::{ARCHITECTURES, Folders, Image, Module, Setup, nvrtc::Nvrtc, ship};
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::process::Command;

/// The record's file, in the folder of the images.
pub const FILE: &str = "record.txt";

/// This tool's own part in the images and in the rules for them.
const TREATMENT: [&str; 5] = [
    include_str!("compile.rs"),
    include_str!("nvrtc.rs"),
    include_str!("ptx.rs"),
    include_str!("ptxas.rs"),
    include_str!("sass.rs"),
];

/// FNV-1a of 128 bits. It detects mistakes, not attacks: an attacker could change the check as
/// well.
struct Fingerprint(u128);

impl Fingerprint {
    fn new() -> Fingerprint {
        Fingerprint(0x6c62272e07bb014262b821756295c58d)
    }

    /// Takes in some bytes and their number.
    fn add(&mut self, bytes: &[u8]) {
        for &byte in (bytes.len() as u64).to_le_bytes().iter().chain(bytes) {
            self.0 = (self.0 ^ u128::from(byte)).wrapping_mul(0x0000000001000000000000000000013b);
        }
    }
}

/// The versions of the compilers, as they give them themselves.
fn compilers(tools: &Tools) -> Result<String> {
    let version = Nvrtc::load(&tools.nvrtc)?.version()?;
    let version_of = |tool| succeed(Command::new(tool).arg("--version"));
    Ok(format!("{version}\n{}\n{}", version_of(&tools.ptxas)?, version_of(&tools.nvdisasm)?))
}

/// The fingerprint of each of some of the modules, by name, as things are.
fn fingerprints<'a>(
    modules: &[Module],
    selected: &[&'a Module],
    sources: &Sources,
    Setup { folders, tools, .. }: Setup,
) -> Result<BTreeMap<&'a str, String>> {
    let compilers = compilers(tools)?;
    let shipped = ship::all(&folders.images, modules);
    let of = |module: &'a Module| {
        let mut all = Fingerprint::new();
        all.add(compilers.as_bytes());
        TREATMENT.iter().chain(&ARCHITECTURES).for_each(|part| all.add(part.as_bytes()));
        all.add(format!("{module:?} {:?}", module.kinds()).as_bytes());
        for (name, text) in sources.closure(&module.source)? {
            all.add(name.as_bytes());
            all.add(text.as_bytes());
        }
        for (kind, Image { bytes, starts_early }) in shipped.get(&module.name).into_iter().flatten()
        {
            all.add(format!("{kind} {starts_early}").as_bytes());
            all.add(bytes);
        }
        Ok((module.name.as_str(), format!("{:032x}", all.0)))
    };
    selected.iter().copied().map(of).collect()
}

/// The record: fingerprints by modules' names. Empty if there is none.
fn read(folders: &Folders) -> BTreeMap<String, String> {
    let text = fs::read_to_string(folders.images.join(FILE)).unwrap_or_default();
    let line = |line: &str| {
        line.split_once(' ').map(|(name, print)| (name.to_string(), print.to_string()))
    };
    text.lines().filter_map(line).collect()
}

/// The names of the selected modules without a valid fingerprint in the record.
pub fn stale<'a>(
    modules: &[Module],
    selected: &[&'a Module],
    sources: &Sources,
    setup: Setup,
) -> Result<BTreeSet<&'a str>> {
    let recorded = read(setup.folders);
    let now = fingerprints(modules, selected, sources, setup)?;
    Ok(now
        .into_iter()
        .filter(|(name, print)| recorded.get(*name) != Some(print))
        .map(|(name, _)| name)
        .collect())
}

/// The error for such a module, with the remedy.
pub fn complaint(module: &str) -> String {
    format!(
        "module {module}: {FILE} has no fingerprint of these sources and images; {}",
        ship::REMEDY
    )
}

/// Writes the record after `built` were built, of which the good ones are vouched for. Its
/// lines for other modules stay.
pub fn write<'a>(
    modules: &[Module],
    built: &[&'a Module],
    good: impl Iterator<Item = &'a Module>,
    sources: &Sources,
    setup: Setup,
) -> Result<()> {
    let mut record = read(setup.folders);
    record.retain(|name, _| {
        modules.iter().any(|module| module.name == *name)
            && built.iter().all(|module| module.name != *name)
    });
    let good: Vec<_> = good.collect();
    let prints = fingerprints(modules, &good, sources, setup)?;
    record.extend(prints.into_iter().map(|(name, print)| (name.to_string(), print)));
    let mut text = String::new();
    for (name, print) in record {
        writeln!(text, "{name} {print}")?;
    }
    fs::write(setup.folders.images.join(FILE), text).with_context(|| format!("writing {FILE}"))
}
