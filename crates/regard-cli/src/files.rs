//! The case files that the arguments name: files, and directories with files in them.

use regard::Error;
use std::collections::{BTreeSet, HashMap};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};
use tempfile::NamedTempFile;

/// One file to work on.
#[derive(Debug)]
pub struct Input {
    /// Its path.
    pub path: PathBuf,
    /// Its path below the directory that was named, or its file name if it was named itself.
    pub name: PathBuf,
    /// Its size, if there is such a file.
    pub bytes: u64,
}

const EXTENSION: &str = "safetensors";

/// All files: the named files, with any extension, and all `*.safetensors` below the named
/// directories, in order of their paths. A name that does not exist is kept: reading it fails
/// later.
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
        Error::argument(
            directory.display().to_string(),
            format!("unreadable ({error})"),
            "a directory",
        )
    };
    for entry in std::fs::read_dir(directory).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let path = entry.path();
        // Links to files are followed, links to directories are not: they can lead back here.
        if entry.file_type().map_err(unreadable)?.is_dir() {
            walk(root, &path, inputs)?;
        } else if path.extension().is_some_and(|extension| extension == EXTENSION) && !path.is_dir()
        {
            let bytes = path.metadata().map_or(0, |metadata| metadata.len());
            let name = path.strip_prefix(root).unwrap_or(&path).to_path_buf();
            inputs.push(Input { path, name, bytes });
        }
    }
    Ok(())
}

/// The path of each input's result: the same name below `out`.
///
/// # Errors
/// If two inputs have the same name, or a result would overwrite an input, or be in one of the
/// directories among the `arguments`: there it would be taken for a case the next time.
pub fn outputs(inputs: &[Input], arguments: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>, Error> {
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
    let directories: BTreeSet<_> =
        outputs.iter().filter_map(|output| output.parent()).map(resolved).collect();
    for argument in arguments.iter().filter(|argument| argument.is_dir()) {
        let inside = resolved(argument);
        if directories.iter().any(|directory| directory.starts_with(&inside)) {
            return Err(Error::argument(
                "--out",
                format!("{}, inside of the input directory {}", out.display(), argument.display()),
                "a directory outside of it: results would be taken for cases the next time",
            ));
        }
    }
    Ok(outputs)
}

/// An absolute path without links and dots, of a place that need not be there yet.
fn resolved(path: &Path) -> PathBuf {
    let path = match path.as_os_str().is_empty() {
        true => Path::new("."),
        false => path,
    };
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let mut resolved = PathBuf::new();
    for component in absolute.components() {
        match component {
            // `resolved` has no links here: it is the path of an existing place, or of one that
            // will be made.
            Component::ParentDir => {
                resolved.pop();
            }
            component => resolved.push(component),
        }
        if let Ok(place) = resolved.canonicalize() {
            resolved = place;
        }
    }
    resolved
}

/// Writes a file atomically: to a temporary file beside it, which is synced and then renamed. An
/// old file is replaced, not written to, because it can be a hard link of another file. Devices and
/// pipes are written to.
///
/// # Errors
/// If it cannot be written.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let Some(path) = replaceable(path)? else { return std::fs::write(path, bytes) };
    let mut file = beside(&path)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(&path).map_err(|error| error.error)?;
    Ok(())
}

/// An error if [`write()`] could not write there now.
///
/// # Errors
/// Why not.
pub fn expect_writable(path: &Path) -> io::Result<()> {
    match replaceable(path)? {
        Some(path) => beside(&path).map(drop),
        None => Ok(()),
    }
}

/// The path of the file that is to be made or replaced, links to it followed; none for a device or
/// a pipe.
fn replaceable(path: &Path) -> io::Result<Option<PathBuf>> {
    let metadata = match path.metadata() {
        Ok(metadata) => metadata,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Ok(Some(path.to_path_buf()));
        }
        Err(error) => return Err(error),
    };
    if metadata.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !metadata.is_file() {
        return Ok(None);
    }
    if metadata.permissions().readonly() {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    path.canonicalize().map(Some)
}

/// An empty file beside a path, which goes away again unless it is given that path.
fn beside(path: &Path) -> io::Result<NamedTempFile> {
    let mut builder = tempfile::Builder::new();
    builder.prefix(".regard-").suffix(".tmp");
    // As any new file, not as a secret one.
    #[cfg(unix)]
    builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    builder.tempfile_in(directory.unwrap_or(Path::new(".")))
}
