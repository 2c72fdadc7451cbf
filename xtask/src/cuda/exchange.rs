//! The kernel of `regard-nccl`: one text of PTX among that crate's sources. It is too small for an
//! archive, and the driver compiles it in a few milliseconds.

use super::nvrtc::Nvrtc;
use super::source::Sources;
use super::tools::Tools;
use super::{Module, ptx, ptxas, ship};
use anyhow::{Context, Result, bail};

/// The name of the kernel, and of its source and its PTX.
pub const NAME: &str = "exchange";

/// Compiles the kernel, and writes its PTX or fails unless it is the PTX that ships. It must
/// assemble for every architecture without spills.
pub fn run(write: bool, architectures: &[&str], tools: &Tools) -> Result<()> {
    let folder = crate::workspace().join("crates/regard-nccl/src/peer");
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
    let compiled = Nvrtc::load(&tools.nvrtc)?.compile(&Sources::read(&folder)?, &module)?;
    let text = ptx::for_older_drivers(&compiled)?;
    ptx::expect_no_path(&text)?;
    let text = ptx::stripped(&text);
    let path = folder.join(format!("{NAME}.ptx"));
    if write {
        std::fs::write(&path, &text).with_context(|| format!("writing {}", path.display()))?;
    } else if std::fs::read_to_string(&path).ok().as_ref() != Some(&text) {
        bail!("{} is not what its source compiles to; {}", path.display(), ship::REMEDY);
    }
    let scratch = crate::scratch().join("cuda");
    std::fs::create_dir_all(&scratch)?;
    std::fs::write(scratch.join(format!("{NAME}.ptx")), &text)?;
    for architecture in module.targets(architectures) {
        let assembly = ptxas::assemble(&tools.ptxas, &scratch, NAME, architecture)?;
        for usage in &assembly.kernels {
            if usage.stack_bytes > 0 || usage.spill_bytes() > 0 {
                bail!("{architecture}: kernel {} spills; allowed: no spills", usage.kernel);
            }
        }
    }
    println!("regard-nccl: {NAME}.ptx, {} bytes", text.len());
    Ok(())
}
