//! The case files that the arguments name: files, and directories with files in them.

use regard::Error;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// One file to work on.
#[derive(Debug)]
pub struct Input {
    /// Where it is.
    pub path: PathBuf,
    /// Its path below the directory that was named, or its file name if it was named itself.
    pub name: PathBuf,
    /// Its size, if there is such a file.
    pub bytes: u64,
}

const EXTENSION: &str = "safetensors";

/// All files: those named, whatever their extension, and all `*.safetensors` below the directories named, in order of their paths. A
/// name that does not exist is kept: working on it will say so.
///
/// # Errors
/// If a directory cannot be read, or holds no case file.
pub fn find(arguments: &[PathBuf]) -> Result<Vec<Input>, Error> {
    let mut inputs = Vec::new();
    for argument in arguments {
        if !argument.is_dir() {
            let bytes = argument.metadata().map_or(0, |metadata| metadata.len());
            let name = argument.file_name().map_or_else(|| argument.clone(), PathBuf::from);
            inputs.push(Input { path: argument.clone(), name, bytes });
            continue;
        }
        let before = inputs.len();
        walk(argument, argument, &mut inputs)?;
        inputs[before..].sort_by(|a, b| a.path.cmp(&b.path));
        if inputs.len() == before {
            let shown = argument.display().to_string();
            return Err(Error::argument(
                shown,
                "a directory without case files",
                format!("*.{EXTENSION} in it"),
            ));
        }
    }
    Ok(inputs)
}

fn walk(root: &Path, directory: &Path, inputs: &mut Vec<Input>) -> Result<(), Error> {
    let unreadable = |error: std::io::Error| {
        Error::argument(directory.display().to_string(), format!("unreadable ({error})"), "a directory")
    };
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        // Links to files are followed, links to directories are not: they can lead back here.
        if entry.file_type().map_err(unreadable)?.is_dir() {
            walk(root, &path, inputs)?;
        } else if path.extension().is_some_and(|extension| extension == EXTENSION) && !path.is_dir() {
            let bytes = path.metadata().map_or(0, |metadata| metadata.len());
            let name = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
            inputs.push(Input { path, name, bytes });
        }
    }
    Ok(())
}

/// Where each input's result goes: the same name below `out`.
///
/// # Errors
/// If two inputs have the same name, or a result would overwrite an input.
pub fn outputs(inputs: &[Input], out: &Path) -> Result<Vec<PathBuf>, Error> {
    let outputs: Vec<_> = inputs.iter().map(|input| out.join(&input.name)).collect();
    let mut names: HashMap<&Path, &Path> = HashMap::new();
    for (input, output) in inputs.iter().zip(&outputs) {
        if let Some(other) = names.insert(output, &input.path) {
            return Err(Error::argument(
                input.path.display().to_string(),
                format!("of the same name as {}", other.display()),
                "a result file for each input",
            ));
        }
    }
    let inputs: Vec<_> = inputs.iter().filter_map(|input| input.path.canonicalize().ok()).collect();
    let inputs: std::collections::HashSet<_> = inputs.iter().collect();
    for output in &outputs {
        if output.canonicalize().is_ok_and(|output| inputs.contains(&output)) {
            return Err(Error::argument(
                "--out",
                format!("{}, where {} is an input", out.display(), output.display()),
                "a directory in which no input is overwritten",
            ));
        }
    }
    Ok(outputs)
}
