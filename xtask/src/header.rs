//! The C header, written by cbindgen from the sources of `crates/regard-capi`.

use anyhow::{Context, Result, bail};
use std::fs;

/// In the order of the header: types first.
const SOURCES: [&str; 2] = ["src/types.rs", "src/lib.rs"];

/// Writes the header, or fails if it differs from the text that would be written.
pub fn run(check: bool) -> Result<()> {
    let folder = crate::workspace().join("crates/regard-capi");
    let path = folder.join("include/regard.h");
    let config =
        cbindgen::Config::from_file(folder.join("cbindgen.toml")).map_err(anyhow::Error::msg)?;
    let mut builder = cbindgen::Builder::new().with_config(config);
    for source in SOURCES {
        builder = builder.with_src(folder.join(source));
    }
    let mut header = Vec::new();
    builder.generate().context("cbindgen could not read the sources")?.write(&mut header);
    if !check {
        fs::create_dir_all(folder.join("include"))?;
        return fs::write(&path, header).with_context(|| format!("writing {}", path.display()));
    }
    let committed = fs::read(&path).with_context(|| format!("reading {}", path.display()))?;
    if committed != header {
        bail!(
            "include/regard.h does not match the sources of regard-capi; \
             run `cargo xtask header` and commit it"
        );
    }
    println!("include/regard.h matches the sources of regard-capi");
    Ok(())
}
