//! ptxas, NVIDIA's assembler: checks that PTX is valid for an architecture, and reports the
//! resources of its kernels there.

use super::Module;
use anyhow::{Context, Result, bail};
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

/// The resources of one kernel on one architecture.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Usage {
    /// The entry point.
    pub kernel: String,
    /// Registers per thread.
    pub registers: usize,
    /// Static shared memory per CTA, in bytes.
    pub shared_bytes: usize,
    /// Local memory per thread, in bytes: arrays that did not fit in registers.
    pub stack_bytes: usize,
    /// Bytes per thread that are spilled to local memory.
    pub spill_stores: usize,
    /// Bytes per thread that are loaded back.
    pub spill_loads: usize,
}

impl Usage {
    /// Bytes spilled, stored and loaded.
    pub fn spill_bytes(&self) -> usize {
        self.spill_stores + self.spill_loads
    }
}

/// The report of ptxas about a module.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Assembly {
    /// The resources of its kernels.
    pub kernels: Vec<Usage>,
    /// Performance warnings: serialized matrix products, registers that are not handed over.
    pub losses: Vec<String>,
}

/// Assembles `folder/name.ptx` to `folder/name.architecture.cubin`.
pub fn assemble(ptxas: &Path, folder: &Path, name: &str, architecture: &str) -> Result<Assembly> {
    let output = Command::new(ptxas)
        .current_dir(folder)
        .args(["--verbose", "--gpu-name", architecture, "--output-file"])
        .arg(format!("{name}.{architecture}.cubin"))
        .arg(format!("{name}.ptx"))
        .output()
        .with_context(|| format!("{} did not start", ptxas.display()))?;
    let report = String::from_utf8_lossy(&output.stderr) + String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("ptxas: {}\n{}", output.status, report.trim());
    }
    for line in report.lines().filter(|line| line.contains("warning")) {
        println!("module {name}, {architecture}: {line}");
    }
    Ok(Assembly { kernels: parse(&report)?, losses: losses(&report) })
}

/// The lines that report lost performance.
fn losses(report: &str) -> Vec<String> {
    let words =
        |line: &str| Some(line[line.find("Potential Performance Loss")?..].trim().to_string());
    report.lines().filter_map(words).collect()
}

/// Parses the report of `ptxas --verbose`. Per kernel: a line with its name, one with stack and
/// spills, one with the rest. Functions that were not inlined follow, with stack and spills of
/// their own: they count for the kernel before them.
fn parse(report: &str) -> Result<Vec<Usage>> {
    let mut kernels: Vec<Usage> = Vec::new();
    for line in report.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let kernel = rest.split('\'').next().unwrap_or_default();
            kernels.push(Usage { kernel: kernel.into(), ..Usage::default() });
        }
        let Some(usage) = kernels.last_mut() else { continue };
        if line.contains("bytes stack frame") {
            usage.stack_bytes += number_before(line, " bytes stack frame").unwrap_or_default();
            usage.spill_stores += number_before(line, " bytes spill stores").unwrap_or_default();
            usage.spill_loads += number_before(line, " bytes spill loads").unwrap_or_default();
        } else if let Some(registers) = number_before(line, " registers") {
            usage.registers = registers;
            usage.shared_bytes = number_before(line, " bytes smem").unwrap_or_default();
        }
    }
    if kernels.is_empty() || kernels.iter().any(|usage| usage.registers == 0) {
        bail!("ptxas did not report the registers of every kernel:\n{}", report.trim());
    }
    Ok(kernels)
}

/// The number that stands right before some words.
fn number_before(line: &str, words: &str) -> Option<usize> {
    let before = &line[..line.find(words)?];
    let digits = before.len() - before.bytes().rev().take_while(u8::is_ascii_digit).count();
    before[digits..].parse().ok()
}

/// A line per kernel: registers by architecture, and the maximum of everything else on any.
pub fn table(usages: &[(&Module, &str, Usage)], architectures: &[&str]) -> String {
    let mut kernels: Vec<(&str, &str)> = Vec::new();
    for (module, _, usage) in usages {
        let kernel = (module.name.as_str(), usage.kernel.as_str());
        if !kernels.contains(&kernel) {
            kernels.push(kernel);
        }
    }
    let mut rows = vec![vec!["module".to_string(), "kernel".into()]];
    rows[0].extend(architectures.iter().map(|architecture| format!("regs {architecture}")));
    rows[0].extend(["shared", "local", "spilled", "must not spill"].map(String::from));
    for (module, kernel) in kernels {
        let of_kernel: Vec<_> = usages
            .iter()
            .filter(|(of, _, usage)| of.name == module && usage.kernel == kernel)
            .collect();
        let max = |of: fn(&Usage) -> usize| {
            of_kernel.iter().map(|(_, _, usage)| of(usage)).max().unwrap_or(0)
        };
        let mut row = vec![module.to_string(), kernel.to_string()];
        for architecture in architectures {
            let found = of_kernel.iter().find(|(_, on, _)| on == architecture);
            row.push(found.map_or("-".into(), |(_, _, usage)| usage.registers.to_string()));
        }
        row.push(max(|usage| usage.shared_bytes).to_string());
        row.push(max(|usage| usage.stack_bytes).to_string());
        row.push(max(Usage::spill_bytes).to_string());
        row.push(
            if of_kernel.iter().any(|(of, _, _)| of.must_not_spill) { "yes" } else { "no" }.into(),
        );
        rows.push(row);
    }
    aligned(&rows)
}

/// Rows in columns: the first two to the left, numbers to the right.
fn aligned(rows: &[Vec<String>]) -> String {
    let widths: Vec<_> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0))
        .collect();
    let mut text = String::new();
    for row in rows {
        for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let _ = match column {
                0 | 1 => write!(text, "{cell:<width$}  "),
                _ => write!(text, "{cell:>width$}  "),
            };
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of ptxas 12.8, with a function that is not inlined.
    const REPORT: &str = "\
ptxas info    : 4 bytes gmem
ptxas info    : Compiling entry function 'decode_f16' for 'sm_80'
ptxas info    : Function properties for decode_f16
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 16 bytes cumulative stack size, \
2048 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 2.000 ms
ptxas info    : Function properties for helper
    96 bytes stack frame, 96 bytes spill stores, 96 bytes spill loads
ptxas info    : Compiling entry function 'merge' for 'sm_80'
ptxas info    : Function properties for merge
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 360 bytes cmem[0]
";

    #[test]
    fn usage_is_read_for_each_kernel() {
        let decode = Usage {
            kernel: "decode_f16".into(),
            registers: 255,
            shared_bytes: 2048,
            stack_bytes: 16 + 96,
            spill_stores: 12 + 96,
            spill_loads: 8 + 96,
        };
        let merge = Usage { kernel: "merge".into(), registers: 32, ..Usage::default() };
        assert_eq!(parse(REPORT).expect("valid"), [decode, merge]);
    }

    #[test]
    fn lost_performance_is_reported() {
        let report = "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; \
                    unable to determine register count at entry.\n";
        let loss = "Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register \
                    count at entry.";
        assert_eq!(losses(report), [loss]);
        assert!(losses(REPORT).is_empty());
    }

    #[test]
    fn an_empty_report_is_an_error() {
        assert!(parse("").is_err());
        assert!(parse("ptxas info    : Compiling entry function 'merge' for 'sm_80'\n").is_err());
    }
}
