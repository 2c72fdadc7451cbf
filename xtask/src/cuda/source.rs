//! The kernels' sources: read from one folder, and held to be self-contained.

use anyhow::{Context, Result, bail};
use std::collections::BTreeMap;
use std::path::Path;

/// Every file of the folder.
pub struct Sources {
    files: BTreeMap<String, String>,
}

impl Sources {
    /// Reads the folder's `*.cu` and `*.cuh`, and checks that they include nothing else.
    pub fn read(folder: &Path) -> Result<Sources> {
        let mut files = BTreeMap::new();
        let entries =
            std::fs::read_dir(folder).with_context(|| format!("reading {}", folder.display()))?;
        for entry in entries {
            let path = entry?.path();
            let name =
                path.file_name().and_then(|name| name.to_str()).unwrap_or_default().to_string();
            if name.ends_with(".cu") || name.ends_with(".cuh") {
                let text = std::fs::read_to_string(&path)
                    .with_context(|| format!("reading {}", path.display()))?;
                files.insert(name, text);
            }
        }
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
        if !strangers.is_empty() {
            bail!(
                "kernels include nothing from outside their folder:\n  {}",
                strangers.join("\n  ")
            );
        }
        Ok(Sources { files })
    }

    /// A source's text.
    pub fn text(&self, name: &str) -> Result<&str> {
        let known = || self.files.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let text = self
            .files
            .get(name)
            .with_context(|| format!("there is no source {name:?}; there are {}", known()))?;
        Ok(text)
    }

    /// A source and all that it includes: their texts by name.
    pub fn closure<'a>(&'a self, name: &'a str) -> Result<BTreeMap<&'a str, &'a str>> {
        let (mut reached, mut open) = (BTreeMap::new(), vec![name]);
        while let Some(name) = open.pop() {
            let text = self.text(name)?;
            if reached.insert(name, text).is_none() {
                open.extend(text.lines().filter_map(included));
            }
        }
        Ok(reached)
    }

    /// Every file, by name: what a source may include.
    pub fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(name, text)| (name.as_str(), text.as_str()))
    }
}

/// The file that a line includes: what stands between quotes or angle brackets, or the rest of the line where neither does.
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
    fn what_includes_include_belongs_to_a_source() {
        let files = [
            ("decode.cu", "#include \"tile.cuh\"\n"),
            ("tile.cuh", "#include \"copy.cuh\"\n"),
            ("copy.cuh", ""),
            ("merge.cu", ""),
        ];
        let files = files.map(|(name, text)| (name.to_string(), text.to_string()));
        let sources = Sources::new(files.into()).expect("self-contained");
        let names: Vec<_> = sources.closure("decode.cu").expect("known").into_keys().collect();
        assert_eq!(names, ["copy.cuh", "decode.cu", "tile.cuh"]);
        assert!(sources.closure("prefill.cu").is_err());
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
