//! Images of the modules, in compressed archives, and an index in Rust that includes them.
//!
//! An image is PTX, which the driver compiles for the GPU that is there, or the machine code of one
//! generation of GPUs. Images of one kind share an archive if their modules differ only in types
//! and in rows of tiles. Such images are similar: together they compress to little more than one of
//! them. An archive starts with a line for each image (name, bytes, and whether its kernels start
//! early) and an empty line; the images follow, PTX with relative numbers. It is an LZMA file.

use super::{Image, Module, relative_ptx};
use anyhow::{Context, Result, bail};
use lzma_rust2::{LzmaOptions, LzmaReader, LzmaWriter};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

/// The preset that packs most: it is packed once and unpacked as fast by any.
const PRESET: u32 = 9;

/// The index, in the same folder.
const INDEX: &str = "index.rs";

/// The error of an archive with an invalid format.
const BROKEN: &str = "the archive is broken";

/// The remedy for a difference.
pub const REMEDY: &str = "run `cargo xtask cuda build` and commit what it writes";

/// The archive of a module's image of that kind: named after the module, without its types, the
/// rows of its tiles, its cache, its build and its main loop (`f16`, `r32`, `q8_0`, `plain`,
/// `sm90`). The rest of the name is above all the head dims: modules of the same dims share most of
/// their text. Only Hopper's machine code is in such small archives, which unpack in 30 ms. The
/// others are named after the family alone: together they are smaller, and unpack in less than a
/// second.
fn archive_name(module: &Module, kind: &str) -> String {
    const OWN: [&str; 13] = [
        "f16", "bf16", "f32", "bytes", "q8", "q4", "0", "any", "lists", "fallback", "plain",
        "sm80", "sm90",
    ];
    let is_rows = |word: &str| {
        // And key/value heads.
        word.strip_prefix(['r', 'h']).is_some_and(|n| n.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let shared = |word: &&str| !OWN.contains(word) && !is_rows(word);
    // Prefill over prefix groups has the text of prefill.
    let family = |word| if word == "prefix" { "prefill" } else { word };
    let mut words: Vec<_> = module.name.split('_').filter(shared).map(family).collect();
    if kind != "sm_90a" && ["decode", "prefill"].contains(&words[0]) {
        words.truncate(1);
    }
    format!("{}.{kind}.lzma", words.join("_"))
}

/// Names become files and Rust strings: plain ones, each once.
pub fn check_names(modules: &[Module]) -> Result<()> {
    let mut seen = BTreeSet::new();
    for Module { name, .. } in modules {
        if name.is_empty() || !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
        {
            bail!("a module is called {name:?}; allowed: letters, digits and _");
        }
        if !seen.insert(name) {
            bail!("two modules are called {name:?}; allowed: each name once");
        }
    }
    Ok(())
}

/// Images of one kind by their modules' names.
type Archive = BTreeMap<String, Image>;

/// The options for an archive. Instructions of machine code have 16 bytes: the meaning of a byte
/// depends on its place among them. In PTX, a text, it depends on the byte before.
fn options(kind: &str, bytes: usize) -> LzmaOptions {
    let mut options = LzmaOptions::with_preset(PRESET);
    options.dict_size = u32::try_from(bytes.next_multiple_of(1 << 12)).unwrap_or(u32::MAX);
    if kind == super::PTX {
        (options.lc, options.lp, options.pb) = (4, 0, 0);
        // Long matches are worth a longer search there: archives are 1.6% smaller.
        (options.nice_len, options.depth_limit) = (128, 1000);
    } else {
        (options.lc, options.lp, options.pb) = (0, 4, 4);
        options.nice_len = 128; // 0.5%
    }
    options
}

/// An image as it is stored in an archive: PTX with relative numbers.
fn to_stored(kind: &str, image: &[u8]) -> Result<Vec<u8>> {
    if kind != super::PTX {
        return Ok(image.into());
    }
    let stored = relative_ptx::encode(image);
    if relative_ptx::decode(&stored) != image {
        bail!("relative numbers do not give this PTX back");
    }
    Ok(stored)
}

fn from_stored(kind: &str, stored: &[u8]) -> Vec<u8> {
    if kind == super::PTX { relative_ptx::decode(stored) } else { stored.into() }
}

fn pack(kind: &str, archive: &Archive) -> Result<Vec<u8>> {
    let (mut head, mut stored) = (String::new(), Vec::new());
    for (name, image) in archive {
        let bytes = to_stored(kind, &image.bytes).with_context(|| format!("packing {name}"))?;
        writeln!(head, "{name} {} {}", bytes.len(), image.starts_early)?;
        stored.extend(bytes);
    }
    let mut content = (head + "\n").into_bytes();
    content.extend(stored);
    let (options, bytes) = (options(kind, content.len()), Some(content.len() as u64));
    let mut writer = LzmaWriter::new_use_header(Vec::new(), &options, bytes)?;
    writer.write_all(&content).context("compressing an archive")?;
    writer.finish().context("compressing an archive")
}

/// An image in an archive.
struct Packed {
    /// The module's name.
    module: String,
    /// Its offset and its size in the unpacked content.
    at: usize,
    bytes: usize,
    image: Image,
}

/// The images of an archive of that kind.
fn unpack(kind: &str, packed: &[u8]) -> Result<Vec<Packed>> {
    let mut content = Vec::new();
    let mut reader = LzmaReader::new_mem_limit(packed, u32::MAX, None).context(BROKEN)?;
    reader.read_to_end(&mut content).context(BROKEN)?;
    let mut at = content.windows(2).position(|two| two == b"\n\n").context(BROKEN)? + 2;
    let head = std::str::from_utf8(&content[..at]).context(BROKEN)?;
    let mut images = Vec::new();
    for line in head.lines().filter(|line| !line.is_empty()) {
        let words: Vec<_> = line.split(' ').collect();
        let [name, bytes, starts_early] = words[..] else { bail!(BROKEN) };
        let stored: usize = bytes.parse().context(BROKEN)?;
        let bytes = from_stored(kind, content.get(at..at + stored).context(BROKEN)?);
        let starts_early = starts_early.parse().context(BROKEN)?;
        let image = Image { bytes, starts_early };
        images.push(Packed { module: name.into(), at, bytes: stored, image });
        at += stored;
    }
    Ok(images)
}

/// An archive's size and its images.
fn read(folder: &Path, archive: &str) -> Result<(usize, Vec<Packed>)> {
    let packed = fs::read(folder.join(archive)).with_context(|| format!("reading {archive}"))?;
    let kind = archive.rsplit('.').nth(1).unwrap_or_default();
    let images = unpack(kind, &packed).with_context(|| format!("reading {archive}"))?;
    Ok((packed.len(), images))
}

/// Writes the archives of some of the modules. Images of other modules in them stay.
pub fn write<'a>(
    folder: &Path,
    modules: &[Module],
    images: impl Iterator<Item = (&'a Module, &'static str, &'a Image)>,
    jobs: usize,
) -> Result<()> {
    let listed = archives(modules);
    let mut archives: BTreeMap<String, Archive> = BTreeMap::new();
    for (module, kind, image) in images {
        let name = archive_name(module, kind);
        archives.entry(name).or_default().insert(module.name.clone(), image.clone());
    }
    fs::create_dir_all(folder)?;
    for (name, new) in &mut archives {
        for Packed { module, image, .. } in
            read(folder, name).map_or_else(|_| Vec::new(), |(_, images)| images)
        {
            if listed.get(name).is_some_and(|(_, names)| names.contains(module.as_str())) {
                new.entry(module).or_insert(image);
            }
        }
    }
    let archives: Vec<_> = archives.iter().collect();
    super::in_parallel(&archives, jobs, |(name, archive)| {
        let kind = listed.get(*name).map_or(super::PTX, |(kind, _)| kind);
        fs::write(folder.join(name), pack(kind, archive)?)
            .with_context(|| format!("writing {name}"))
    })?;
    Ok(())
}

/// The images that ship, as they are: of each module by its name, with their kinds.
pub fn all(folder: &Path, modules: &[Module]) -> BTreeMap<String, Vec<(&'static str, Image)>> {
    let mut images: BTreeMap<_, Vec<_>> = BTreeMap::new();
    for (archive, (kind, _)) in archives(modules) {
        // An unreadable archive counts as missing; `check` reports why.
        for Packed { module, image, .. } in
            read(folder, &archive).map_or_else(|_| Vec::new(), |(_, images)| images)
        {
            images.entry(module).or_default().push((kind, image));
        }
    }
    images
}

/// The image of that kind of a module, as it ships.
fn shipped(folder: &Path, module: &Module, kind: &str) -> Result<Image> {
    let archive = archive_name(module, kind);
    let (_, images) = read(folder, &archive)?;
    let found = images.into_iter().find(|packed| packed.module == module.name);
    Ok(found.with_context(|| format!("{archive} does not hold it"))?.image)
}

/// The difference between the shipped and the compiled image, in words; `None` if there is none.
pub fn difference(folder: &Path, module: &Module, kind: &str, compiled: &Image) -> Option<String> {
    let name = &module.name;
    let shipped = match shipped(folder, module, kind) {
        Ok(shipped) => shipped,
        Err(error) => {
            return Some(format!("module {name} does not ship as {kind}: {error:#}; {REMEDY}"));
        }
    };
    if shipped == *compiled {
        return None;
    }
    if kind != super::PTX {
        let (old, new) = (shipped.bytes.len(), compiled.bytes.len());
        return Some(format!(
            "module {name} ships {old} bytes of machine code for {kind}, its source compiles to \
             {new} others; {REMEDY}"
        ));
    }
    let lines =
        |text: &[u8]| String::from_utf8_lossy(text).lines().map(String::from).collect::<Vec<_>>();
    let (old, new) = (lines(&shipped.bytes), lines(&compiled.bytes));
    let at =
        old.iter().zip(&new).position(|(old, new)| old != new).unwrap_or(old.len().min(new.len()));
    let line = |lines: &[String]| {
        lines.get(at).map_or("the end".into(), |line| format!("{:?}", line.trim()))
    };
    Some(format!(
        "module {name} ships {} lines of PTX, its source compiles to {}; the first difference is \
         line {}: {} ships, {} is compiled; {REMEDY}",
        old.len(),
        new.len(),
        at + 1,
        line(&old),
        line(&new)
    ))
}

/// The archives that the modules make, and the modules in each with the kind.
fn archives(modules: &[Module]) -> BTreeMap<String, (&'static str, BTreeSet<&str>)> {
    let mut archives: BTreeMap<_, (_, BTreeSet<_>)> = BTreeMap::new();
    for module in modules {
        for kind in module.kinds() {
            let archive =
                archives.entry(archive_name(module, kind)).or_insert((kind, BTreeSet::new()));
            archive.1.insert(module.name.as_str());
        }
    }
    archives
}

/// Files in the folder that no module makes.
fn unlisted(folder: &Path, modules: &[Module]) -> Result<Vec<PathBuf>> {
    let mut known: BTreeSet<_> = archives(modules).keys().map(|name| folder.join(name)).collect();
    known.insert(folder.join(INDEX));
    known.insert(folder.join(super::record::FILE));
    let Ok(entries) = fs::read_dir(folder) else { return Ok(Vec::new()) };
    let paths =
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<BTreeSet<_>, _>>()?;
    Ok(paths.difference(&known).cloned().collect())
}

/// Complaints about such files.
pub fn strangers(folder: &Path, modules: &[Module]) -> Result<Vec<String>> {
    let complaint = |path: PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        format!("{name} ships, but no module makes it; {REMEDY}")
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

/// Writes the index of the folder's contents. Returns the bytes of all archives together.
pub fn write_index(folder: &Path, modules: &[Module]) -> Result<usize> {
    let (text, bytes) = index(folder, modules)?;
    fs::write(folder.join(INDEX), text).with_context(|| format!("writing {INDEX}"))?;
    Ok(bytes)
}

/// Fails unless the index matches the folder; the bytes of all archives together are
/// returned.
pub fn check_index(folder: &Path, modules: &[Module]) -> Result<usize> {
    let (text, bytes) = index(folder, modules)?;
    let shipped =
        fs::read_to_string(folder.join(INDEX)).with_context(|| format!("reading {INDEX}"))?;
    if shipped != text {
        bail!("{INDEX} does not match the modules that ship; {REMEDY}");
    }
    Ok(bytes)
}

/// The index: a struct expression, which the crate of images includes. `regard-cuda-images` defines
/// its types.
fn index(folder: &Path, modules: &[Module]) -> Result<(String, usize)> {
    let (mut included, mut listed, mut bytes) = (String::new(), String::new(), 0);
    for (number, (archive, (kind, names))) in archives(modules).iter().enumerate() {
        let (packed, images) = read(folder, archive)
            .context("the index takes every module; build without --only once")?;
        bytes += packed;
        if !images.iter().map(|packed| packed.module.as_str()).eq(names.iter().copied()) {
            bail!(
                "{archive} does not hold what it should: {}; {REMEDY}",
                names.iter().copied().collect::<Vec<_>>().join(", ")
            );
        }
        let content: usize = images.last().map_or(0, |last| last.at + last.bytes);
        writeln!(
            included,
            "        Archive {{ bytes: {content}, packed: include_bytes!({archive:?}) }},"
        )?;
        for Packed { module, at, bytes, image: Image { starts_early, .. } } in images {
            // A line per image: the file stays short enough to read.
            writeln!(
                listed,
                "        Image {{ module: {module:?}, kind: {kind:?}, starts_early: \
                 {starts_early}, archive: {number}, at: {at}, bytes: {bytes} }},"
            )?;
        }
    }
    let text = format!(
        "// Written by `cargo xtask cuda build`. Do not edit.\nIndex {{\n    archives: &[\n\
         {included}    ],\n    images: &[\n{listed}    ],\n}}\n"
    );
    Ok((text, bytes))
}

/// Writes every image into a folder as it is, under its module's name and its kind.
pub fn unpack_all(folder: &Path, modules: &[Module], into: &Path) -> Result<()> {
    fs::create_dir_all(into)?;
    for (archive, (kind, _)) in archives(modules) {
        for Packed { module, image, .. } in read(folder, &archive)?.1 {
            fs::write(into.join(format!("{module}.{kind}")), image.bytes)?;
        }
    }
    Ok(())
}
