//! What ships: one deflated image a module, and an index in Rust that includes them. The image is PTX, which the driver compiles for the GPU that is there; or
//! machine code, where the PTX would run on one generation of GPUs only.

use super::Module;
use anyhow::{Context, Result, bail};
use std::collections::BTreeSet;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

/// As small as deflate gets: it is packed once and unpacked as fast at any level.
const LEVEL: u8 = 10;

/// The index, in the same folder.
const INDEX: &str = "index.rs";

fn file_name(module: &Module) -> String {
    let kind = if module.ships_machine_code() { "cubin" } else { "ptx" };
    format!("{}.{kind}.z", module.name)
}

fn file(folder: &Path, module: &Module) -> PathBuf {
    folder.join(file_name(module))
}

/// Names become files and Rust strings: plain ones, each once.
pub fn check_names(modules: &[Module]) -> Result<()> {
    let mut seen = BTreeSet::new();
    for Module { name, .. } in modules {
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_') {
            bail!("a module is called {name:?}; allowed: letters, digits and _");
        }
        if !seen.insert(name) {
            bail!("two modules are called {name:?}; allowed: each name once");
        }
    }
    Ok(())
}

/// Writes a module's image, deflated (raw, without a header).
pub fn write(folder: &Path, module: &Module, image: &[u8]) -> Result<()> {
    fs::create_dir_all(folder)?;
    let path = file(folder, module);
    fs::write(&path, miniz_oxide::deflate::compress_to_vec(image, LEVEL))
        .with_context(|| format!("writing {}", path.display()))
}

/// The image of a module as it ships, and its deflated size.
fn read(folder: &Path, module: &Module) -> Result<(usize, Vec<u8>)> {
    let deflated =
        fs::read(file(folder, module)).with_context(|| format!("reading {}", file_name(module)))?;
    let image = miniz_oxide::inflate::decompress_to_vec(&deflated)
        .map_err(|error| anyhow::anyhow!("{} is not deflated: {error}", file_name(module)))?;
    Ok((deflated.len(), image))
}

/// How what ships differs from what was compiled, in words; `None` if it does not.
pub fn difference(folder: &Path, module: &Module, compiled: &[u8]) -> Option<String> {
    const REMEDY: &str = "run `cargo xtask cuda build` and commit what it writes";
    let name = &module.name;
    let shipped = match read(folder, module) {
        Ok((_, shipped)) => shipped,
        Err(error) => return Some(format!("module {name} does not ship: {error:#}; {REMEDY}")),
    };
    if shipped == compiled {
        return None;
    }
    if module.ships_machine_code() {
        let (old, new) = (shipped.len(), compiled.len());
        return Some(format!(
            "module {name} ships {old} bytes of machine code, its source compiles to {new} others; {REMEDY}"
        ));
    }
    let lines = |text: &[u8]| String::from_utf8_lossy(text).lines().map(String::from).collect::<Vec<_>>();
    let (old, new) = (lines(&shipped), lines(compiled));
    let at = old.iter().zip(&new).position(|(old, new)| old != new).unwrap_or(old.len().min(new.len()));
    let line = |lines: &[String]| lines.get(at).map_or("the end".into(), |line| format!("{:?}", line.trim()));
    Some(format!(
        "module {name} ships {} lines of PTX, its source compiles to {}; the first difference is line {}: {} ships, {} is \
         compiled; {REMEDY}",
        old.len(),
        new.len(),
        at + 1,
        line(&old),
        line(&new)
    ))
}

/// Files in the folder that belong to no module.
fn unlisted(folder: &Path, modules: &[Module]) -> Result<Vec<PathBuf>> {
    let mut known: BTreeSet<_> = modules.iter().map(|module| file(folder, module)).collect();
    known.insert(folder.join(INDEX));
    let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
    let paths = entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<BTreeSet<_>, _>>()?;
    Ok(paths.difference(&known).cloned().collect())
}

/// Complaints about such files.
pub fn strangers(folder: &Path, modules: &[Module]) -> Result<Vec<String>> {
    let complaint = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        format!("{name} ships, but no module is called so; run `cargo xtask cuda build`")
    };
    Ok(unlisted(folder, modules)?.into_iter().map(complaint).collect())
}

/// Removes such files.
pub fn remove_strangers(folder: &Path, modules: &[Module]) -> Result<()> {
    for path in unlisted(folder, modules)? {
        fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
    }
    Ok(())
}

/// Writes the index of what is in the folder; the bytes of all modules together are returned.
pub fn write_index(folder: &Path, modules: &[Module]) -> Result<usize> {
    let (text, bytes) = index(folder, modules)?;
    fs::write(folder.join(INDEX), text).with_context(|| format!("writing {INDEX}"))?;
    Ok(bytes)
}

/// Fails unless the index is that of what is in the folder; the bytes of all modules together are returned.
pub fn check_index(folder: &Path, modules: &[Module]) -> Result<usize> {
    let (text, bytes) = index(folder, modules)?;
    let shipped = fs::read_to_string(folder.join(INDEX)).with_context(|| format!("reading {INDEX}"))?;
    if shipped != text {
        bail!("{INDEX} is not that of the modules that ship; run `cargo xtask cuda build`");
    }
    Ok(bytes)
}

/// The index: a slice expression, so that the crate decides what its entries are. It includes it as
/// `const SHIPPED: &[Shipped] = include!("ptx/index.rs");`.
fn index(folder: &Path, modules: &[Module]) -> Result<(String, usize)> {
    let mut text = String::from("// Written by `cargo xtask cuda build`. Do not edit.\n&[\n");
    let mut bytes = 0;
    for module in modules {
        let Module { name, architecture, .. } = module;
        let (deflated, image) =
            read(folder, module).context("the index takes every module; build without --only once")?;
        bytes += deflated;
        // A line a module: the file stays short enough to be looked at.
        writeln!(
            text,
            "    Shipped {{ name: {name:?}, architecture: {architecture:?}, image_bytes: {}, deflated: include_bytes!({:?}) }},",
            image.len(),
            file_name(module)
        )?;
    }
    text.push_str("]\n");
    Ok((text, bytes))
}
