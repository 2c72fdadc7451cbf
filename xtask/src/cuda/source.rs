//! The kernels' sources: read from one folder and the folders inside it, and held to be
//! self-contained.

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// Every file, by its path from the kernels' folder: includes name it so. A module names its source
/// by the file name alone, which is unique.
pub struct Sources {
    files: BTreeMap<String, String>,
}

impl Sources {
    /// Reads the `*.cu` and `*.cuh` of the folder and of the folders inside it, and checks that
    /// they include nothing else.
    pub fn read(folder: &Path) -> Result<Sources> {
        let mut files = BTreeMap::new();
        read_folder(folder, "", &mut files)?;
        Sources::new(files)
    }

    /// Sources by name, checked.
    pub fn new(files: BTreeMap<String, String>) -> Result<Sources> {
        let mut strangers = Vec::new();
        for (name, text) in &files {
            for (number, line) in text.lines().enumerate() {
                let Some(included) = included(line) else { continue };
                if !files.contains_key(included) {
                    strangers.push(format!(
                        "{name}:{}: {included:?} is not a file of the kernels' folder",
                        number + 1
                    ));
                }
            }
        }
        let mut names = BTreeMap::new();
        for path in files.keys() {
            if let Some(other) = names.insert(file_name(path), path) {
                bail!("{other} and {path} have the same file name; modules name a source by it");
            }
        }
        if !strangers.is_empty() {
            bail!(
                "kernels include nothing from outside their folder:\n  {}",
                strangers.join("\n  ")
            );
        }
        Ok(Sources { files })
    }

    /// A source by its file name: its path and its text.
    fn source(&self, name: &str) -> Result<(&str, &str)> {
        let known = || self.files.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        self.files()
            .find(|(path, _)| file_name(path) == name)
            .with_context(|| format!("there is no source {name:?}; there are {}", known()))
    }

    /// The text of the source with that file name.
    pub fn text(&self, name: &str) -> Result<&str> {
        Ok(self.source(name)?.1)
    }

    /// The source with that file name and all that it includes: their texts by path.
    pub fn closure(&self, name: &str) -> Result<BTreeMap<&str, &str>> {
        let (mut reached, mut open) = (BTreeMap::new(), vec![self.source(name)?]);
        while let Some((path, text)) = open.pop() {
            if reached.insert(path, text).is_none() {
                let included = text.lines().filter_map(included);
                open.extend(
                    included.filter_map(|path| Some((path, self.files.get(path)?.as_str()))),
                );
            }
        }
        Ok(reached)
    }

    /// Every file that a source may include, by path.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(name, text)| (name.as_str(), text.as_str()))
    }
}

/// Reads the sources of a folder; `prefix` is its path from the kernels' folder, with a slash
/// behind each name.
fn read_folder(folder: &Path, prefix: &str, files: &mut BTreeMap<String, String>) -> Result<()> {
    let reading = || format!("reading {}", folder.display());
    for entry in std::fs::read_dir(folder).with_context(reading)? {
        let path = entry.with_context(reading)?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if path.is_dir() {
            read_folder(&path, &format!("{prefix}{name}/"), files)?;
        } else if name.ends_with(".cu") || name.ends_with(".cuh") {
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("reading {}", path.display()))?;
            files.insert(format!("{prefix}{name}"), text);
        }
    }
    Ok(())
}

/// The part of a path behind its folders.
fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// The file that a line includes: the text between quotes or angle brackets, or the rest of the
/// line if there are neither.
fn included(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.trim();
    let delimited = rest
        .strip_prefix('"')
        .and_then(|rest| rest.split_once('"'))
        .or_else(|| rest.strip_prefix('<').and_then(|rest| rest.split_once('>')));
    Some(delimited.map_or(rest, |(name, _)| name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn includes_are_found_however_they_are_written() {
        assert_eq!(included("#include \"tile.cuh\""), Some("tile.cuh"));
        assert_eq!(included("  #  include <cuda_fp16.h> // why"), Some("cuda_fp16.h"));
        assert_eq!(included("#include HEADER"), Some("HEADER"));
        assert_eq!(included("// #include \"no.cuh\""), None);
        assert_eq!(included("#define include"), None);
    }

    #[test]
    fn nested_includes_belong_to_a_source() {
        let files = [
            ("decode/decode.cu", "#include \"decode/tile.cuh\"\n"),
            ("decode/tile.cuh", "#include \"common/copy.cuh\"\n"),
            ("common/copy.cuh", ""),
            ("merge.cu", ""),
        ];
        let files = files.map(|(name, text)| (name.to_string(), text.to_string()));
        let sources = Sources::new(files.into()).expect("self-contained");
        let names: Vec<_> = sources.closure("decode.cu").expect("known").into_keys().collect();
        assert_eq!(names, ["common/copy.cuh", "decode/decode.cu", "decode/tile.cuh"]);
        assert!(sources.closure("prefill.cu").is_err());
    }

    #[test]
    fn file_names_are_unique() {
        let files = ["decode/tile.cuh", "prefill/tile.cuh"];
        let files = files.map(|path| (path.to_string(), String::new()));
        let error = Sources::new(files.into()).err().expect("an error").to_string();
        assert!(error.contains("decode/tile.cuh and prefill/tile.cuh"), "{error}");
    }

    #[test]
    fn an_include_from_outside_the_folder_is_named_with_its_line() {
        let files =
            [("decode.cu", "#include \"tile.cuh\"\n#include <cuda_fp16.h>\n"), ("tile.cuh", "")];
        let files = files.map(|(name, text)| (name.to_string(), text.to_string()));
        let error = Sources::new(files.into()).err().expect("an error").to_string();
        assert!(error.contains("decode.cu:2: \"cuda_fp16.h\""), "{error}");
        assert!(!error.contains("tile.cuh"), "{error}");
    }
}
