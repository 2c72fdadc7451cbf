//! The kernel of `regard-nccl`: one text of PTX among that crate's sources. It is too small for an
//! archive, and the driver compiles it in a few milliseconds.

use super::compile::{compile, judge};
use super::source::Sources;
use super::tools::Tools;
use super::{Folders, Module, PTX, Selection, ship};
use anyhow::{Context, Result, bail};

/// The name of the kernel, and of its source and its PTX.
pub const NAME: &str = "exchange";

/// Compiles the kernel, and writes its PTX or fails unless it is the PTX that ships. The rules for
/// modules that must not spill hold for it.
pub fn run(write: bool, selection: &Selection, tools: &Tools) -> Result<()> {
    let folder = crate::workspace().join("crates/regard-nccl/src/peer");
    let path = folder.join(format!("{NAME}.ptx"));
    let scratch = crate::scratch().join("cuda");
    let folders = Folders { kernels: folder.clone(), images: folder, scratch };
    let setup = selection.setup(&folders, tools);
    let module = Module {
        name: NAME.into(),
        source: format!("{NAME}.cu"),
        defines: Vec::new(),
        architecture: "compute_80".into(),
        specialized: false,
        uses_wgmma: false,
        replaced_on_hopper: false,
        must_not_spill: true,
    };
    let compiled = compile(&[&module], &Sources::read(&folders.kernels)?, setup)?;
    let mut images = compiled.iter().flat_map(|compiled| compiled.shipped());
    let (_, _, ptx) = images.find(|(_, kind, _)| *kind == PTX).context("a module without PTX")?;
    if write {
        std::fs::write(&path, &ptx.bytes).with_context(|| format!("writing {}", path.display()))?;
    } else if std::fs::read(&path).ok().as_ref() != Some(&ptx.bytes) {
        bail!("{} is not what its source compiles to; {}", path.display(), ship::REMEDY);
    }
    match judge(&compiled, &selection.architectures(), setup)?.first() {
        Some((_, complaint)) => bail!("{complaint}"),
        None => Ok(()),
    }
}
