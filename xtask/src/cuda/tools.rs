//! The compilers: from three wheels of PyPI in a virtual environment under `target`, or
//! a folder that the environment names.

use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names a folder that has `libnvrtc.so.12`, `ptxas` and `nvdisasm` somewhere inside: a virtual
/// environment with the wheels, or a CUDA toolkit.
const FOLDER: &str = "REGARD_CUDA_TOOLS";

/// The exact versions: the text that ships depends on them. PTX of CUDA 12.8 is the first that
/// assembles for sm_120. (The disassembler has no wheel of that version; later ones read what
/// earlier assemblers wrote.)
const WHEELS: [&str; 3] = [
    "nvidia-cuda-nvrtc-cu12==12.8.93",
    "nvidia-cuda-nvcc-cu12==12.8.93",
    "nvidia-cuda-nvdisasm==13.2.51",
];

/// The compilers.
pub struct Tools {
    /// `libnvrtc.so.12`.
    pub nvrtc: PathBuf,
    /// `ptxas`.
    pub ptxas: PathBuf,
    /// `nvdisasm`.
    pub nvdisasm: PathBuf,
}

impl Tools {
    /// Finds the compilers, or installs them.
    pub fn obtain() -> Result<Tools> {
        if let Some(folder) = std::env::var_os(FOLDER) {
            return Tools::inside(Path::new(&folder))
                .with_context(|| format!("from the environment variable {FOLDER}"));
        }
        let folder = crate::scratch().join("cuda-tools-12.8.93");
        if let Ok(tools) = Tools::inside(&folder) {
            return Ok(tools);
        }
        install(&folder).with_context(|| {
            format!(
                "the CUDA compilers could not be installed from PyPI. They are {}; where another \
                 folder has them, name it in {FOLDER}",
                WHEELS.join(", ")
            )
        })?;
        Tools::inside(&folder)
    }

    fn inside(folder: &Path) -> Result<Tools> {
        let find = |name: &str| {
            find(folder, name)
                .with_context(|| format!("there is no {name} inside {}", folder.display()))
        };
        Ok(Tools {
            nvrtc: find("libnvrtc.so.12")?,
            ptxas: find("ptxas")?,
            nvdisasm: find("nvdisasm")?,
        })
    }
}

/// Makes a virtual environment with the wheels.
fn install(folder: &Path) -> Result<()> {
    println!("installing {} into {}", WHEELS.join(", "), folder.display());
    let python = if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" };
    succeed(Command::new("python3").args(["-m", "venv", "--clear"]).arg(folder))?;
    succeed(
        Command::new(folder.join(python))
            .args([
                "-m",
                "pip",
                "--disable-pip-version-check",
                "install",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
            ])
            .args(WHEELS),
    )
    .map(drop)
}

/// Runs a command and returns its output; its failure is an error with its messages.
pub fn succeed(command: &mut Command) -> Result<String> {
    let called = format!("{command:?}");
    let output = command.output().with_context(|| format!("{called} did not start"))?;
    if !output.status.success() {
        let messages = String::from_utf8_lossy(&output.stderr);
        bail!("{called}: {}\n{}", output.status, messages.trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The file of that name in a folder or below it; the first in the order of paths.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let mut entries: Vec<_> =
        std::fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).collect();
    entries.sort();
    let here = entries
        .iter()
        .find(|path| path.is_file() && path.file_name().is_some_and(|found| found == name));
    // Links are not followed: a virtual environment's `lib64` is one.
    let folders = || entries.iter().filter(|path| path.is_dir() && !path.is_symlink());
    here.cloned().or_else(|| folders().find_map(|path| find(path, name)))
}
