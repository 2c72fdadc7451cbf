//! What the assembled code of the Hopper kernels looks like: that the matrix unit multiplies for whole warpgroups, and that nothing goes to memory for want of
//! registers where the time is spent.

use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

/// Instructions of a kernel's main loop.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MainLoop {
    /// In all.
    pub instructions: usize,
    /// Products of a warpgroup (`HGMMA`).
    pub products: usize,
    /// Loads from and stores to local memory.
    pub local: usize,
}

/// The main loop of an assembled kernel.
pub fn main_loop(nvdisasm: &Path, cubin: &Path) -> Result<MainLoop> {
    let output = Command::new(nvdisasm)
        .arg("--print-code")
        .arg(cubin)
        .output()
        .with_context(|| format!("{} did not start", nvdisasm.display()))?;
    if !output.status.success() {
        bail!("nvdisasm: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    find(&String::from_utf8_lossy(&output.stdout))
        .context("no loop has a product of a warpgroup (HGMMA) in it")
}

/// The shortest of the loops with the most products that no shorter loop shares: the loop over keys holds both products, the loop over tiles around it
/// has further ones.
fn find(text: &str) -> Option<MainLoop> {
    let mut labels: HashMap<&str, usize> = HashMap::new();
    let mut instructions: Vec<&str> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label, instructions.len());
        } else if let Some((_, rest)) = line.strip_prefix("/*").and_then(|line| line.split_once("*/"))
            && let Some((instruction, _)) = rest.split_once(';')
        {
            instructions.push(instruction.trim());
        }
    }
    let count = |body: &[&str], names: &[&str]| {
        body.iter()
            .filter(|line| {
                line.split_whitespace().any(|word| names.iter().any(|name| word.starts_with(name)))
            })
            .count()
    };
    let back = instructions.iter().enumerate().filter_map(|(at, line)| {
        let target = line.split_once("`(")?.1.split(')').next()?;
        let from = labels.get(target).copied().filter(|&from| from <= at && line.contains("BRA"))?;
        let body = &instructions[from..=at];
        let products = count(body, &["HGMMA"]);
        (products > 0).then(|| MainLoop {
            instructions: body.len(),
            products,
            local: count(body, &["LDL", "STL"]),
        })
    });
    back.min_by_key(|body| body.instructions)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
.L_x_0:
        /*0000*/                   LDL R1, [R2] ;
.L_x_1:
        /*0010*/              @!P0 BRA `(.L_x_2) ;
        /*0020*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, !UPT ;
        /*0030*/                   STL [R2], R1 ;
        /*0040*/                   BRA `(.L_x_1) ;
.L_x_2:
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, !UPT ;
        /*0060*/               @P1 BRA `(.L_x_0) ;
.L_x_3:
        /*0070*/                   BRA `(.L_x_3) ;
";

    #[test]
    fn the_loop_over_keys_is_the_inner_one() {
        assert_eq!(find(TEXT), Some(MainLoop { instructions: 4, products: 1, local: 1 }));
        assert_eq!(find(&TEXT.replace("HGMMA", "HMMA")), None);
    }
}
