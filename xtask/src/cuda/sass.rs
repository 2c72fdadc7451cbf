//! Checks of assembled code: the main loops of the Hopper kernels multiply by warpgroups (HGMMA)
//! and do not spill, and no kernel has a register spill that ptxas lost.

use anyhow::{Context, Result, bail};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::process::Command;

/// Instructions of a kernel's main loop.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MainLoop {
    /// Their sum.
    pub instructions: usize,
    /// Products of a warpgroup (`HGMMA`).
    pub products: usize,
    /// Loads from and stores to local memory.
    pub local: usize,
}

/// The disassembly of an assembled module.
pub fn disassemble(nvdisasm: &Path, cubin: &Path) -> Result<String> {
    let output = Command::new(nvdisasm)
        .arg("--print-code")
        .arg(cubin)
        .output()
        .with_context(|| format!("{} did not start", nvdisasm.display()))?;
    if !output.status.success() {
        bail!("nvdisasm: {}\n{}", output.status, String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The main loop of a disassembled kernel.
pub fn main_loop(text: &str) -> Result<MainLoop> {
    find(text).context("no loop has a product of a warpgroup (HGMMA) in it")
}

/// Register spills that ptxas lost: stores to local memory under a predicate which the instruction
/// that computed the stored value, or one behind it, has written.
///
/// ptxas 12.8 keeps a predicated value in memory by a store under the same predicate. Where the
/// instruction leaves its carry in that predicate (`@P0 IADD3 R12, P0, -R0, R7, RZ`), the store
/// (`@P0 STL [R1+0x38], R12`) happens only with a carry, and what is loaded later is whatever was
/// in memory. No sanitizer sees it.
pub fn lost_spills(text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut lost = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(store) = instruction(line) else { continue };
        let Some((guard, rest)) = store.strip_prefix('@').and_then(|rest| rest.split_once(' '))
        else {
            continue;
        };
        let Some((_, value)) = rest.strip_prefix("STL").and_then(|rest| rest.split_once("], "))
        else {
            continue;
        };
        let Some(stored) = registers(value, width(rest)) else { continue };
        let guard = guard.trim_start_matches('!');
        // Back to the instruction that computed the value, in the same straight piece of code.
        let before = lines[..at].iter().rev().map_while(|line| instruction(line));
        let mut rewritten = false;
        for earlier in before {
            let written = destinations(earlier);
            rewritten |= written.contains(&guard);
            let first = written.first().and_then(|first| registers(first, width(earlier)));
            if first.is_some_and(|first| first.start < stored.end && stored.start < first.end) {
                if rewritten {
                    lost.push(format!("{store} behind {earlier}"));
                }
                break;
            }
        }
    }
    lost
}

/// The numbers of `count` registers from a named one on; none for a predicate or the register that
/// is always zero.
fn registers(first: &str, count: usize) -> Option<Range<usize>> {
    let first: usize = first.strip_prefix('R')?.parse().ok()?;
    Some(first..first + count)
}

/// How many registers the first operand of an instruction takes.
fn width(instruction: &str) -> usize {
    let operation =
        instruction.split_whitespace().find(|word| !word.starts_with('@')).unwrap_or_default();
    let mut parts = operation.split('.');
    let name = parts.next().unwrap_or_default();
    let has = |part: &str| operation.split('.').skip(1).any(|other| other == part);
    match name {
        "HMMA" | "IMMA" | "QMMA" => 4,
        "LDSM" if has("4") => 4,
        "LDSM" if has("2") => 2,
        "CS2R" if !has("32") => 2,
        "DADD" | "DMUL" | "DFMA" => 2,
        _ if has("128") => 4,
        _ if has("64") || has("WIDE") => 2,
        _ => 1,
    }
}

/// The instruction of a line of a disassembly, without its address; none in a line with a label.
fn instruction(line: &str) -> Option<&str> {
    let (_, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    Some(rest.split_once(';')?.0.trim())
}

/// The registers that an instruction writes: its first operand, and the predicates that follow.
fn destinations(instruction: &str) -> Vec<&str> {
    let unguarded = match instruction.strip_prefix('@') {
        Some(rest) => rest.split_once(' ').map_or("", |(_, rest)| rest.trim()),
        None => instruction,
    };
    let Some((operation, operands)) = unguarded.split_once(' ') else { return Vec::new() };
    if ["ST", "RED", "BAR", "BRA"].iter().any(|reads| operation.starts_with(reads)) {
        return Vec::new();
    }
    let is_predicate = |operand: &&str| operand.starts_with('P') || operand.starts_with("UP");
    let mut operands = operands.split(',').map(str::trim);
    let first = operands.next();
    first.into_iter().chain(operands.take_while(is_predicate)).collect()
}

/// The shortest of the loops with the most products that no shorter loop shares: the loop over keys
/// holds both products, the loop over tiles around it has further ones.
fn find(text: &str) -> Option<MainLoop> {
    let mut labels: HashMap<&str, usize> = HashMap::new();
    let mut instructions: Vec<&str> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label, instructions.len());
        } else if let Some((_, rest)) =
            line.strip_prefix("/*").and_then(|line| line.split_once("*/"))
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
        let from =
            labels.get(target).copied().filter(|&from| from <= at && line.contains("BRA"))?;
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
    fn a_spill_under_a_rewritten_predicate_is_lost() {
        let text = "\
        /*14b0*/              @P0 IADD3 R12, P0, -R0, R7, RZ ;
        /*1510*/              @P3 IADD3.X R11, R5, -0x1, RZ, P0, !PT ;
        /*15a0*/              @P0 STL [R1+0x38], R12 ;
        /*15c0*/              @P3 STL [R1+0x34], R11 ;
";
        assert_eq!(
            lost_spills(text),
            ["@P0 STL [R1+0x38], R12 behind @P0 IADD3 R12, P0, -R0, R7, RZ"]
        );
        // A value that was there before its predicate changed is lost as well; one that comes after
        // it is not.
        let later = text.replace("@P0 IADD3 R12, P0,", "ISETP.NE.AND P0, PT, R1,");
        assert!(lost_spills(&later).is_empty());
        let after = "/*1*/ @P0 FADD R12, R1, R2 ;\n/*2*/ ISETP.NE.AND P0, PT, R1, R2, PT ;\n\
            /*3*/ @P0 STL [R1], R12 ;";
        assert_eq!(lost_spills(after).len(), 1);
        let label = "/*1*/ @P0 IADD3 R12, P0, R1, R2, RZ ;\n.L_x_1:\n/*3*/ @P0 STL [R1], R12 ;";
        assert!(lost_spills(label).is_empty());
        // A value that is the upper part of what a wide instruction writes.
        let wide = "/*1*/ LDL.64 R94, [R1+0xc8] ;\n/*2*/ ISETP.NE.AND P0, PT, R1, R2, PT ;\n\
            /*3*/ @!P0 LDG.E.128.STRONG.GPU R92, [R30.64] ;\n/*4*/ @!P0 STL.64 [R1+0xc8], R94 ;";
        assert!(lost_spills(wide).is_empty());
        assert_eq!(lost_spills(&wide.replace(".128", ".64")).len(), 1);
        let pair = "/*1*/ FMUL R3, R2, R1 ;\n/*2*/ ISETP.NE.AND P0, PT, R0, RZ, PT ;\n\
            /*3*/ @P0 CS2R R2, SRZ ;\n/*4*/ @P0 STL [R1+0x20], R3 ;";
        assert!(lost_spills(pair).is_empty());
    }

    #[test]
    fn the_loop_over_keys_is_the_inner_one() {
        assert_eq!(find(TEXT), Some(MainLoop { instructions: 4, products: 1, local: 1 }));
        assert_eq!(find(&TEXT.replace("HGMMA", "HMMA")), None);
    }
}
