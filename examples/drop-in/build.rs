//! Finds the sources of candle-transformers, and writes a module that contains two of its models.

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

/// The files that the two models consist of. `crate` and `super` in them are the modules that
/// `modules` writes.
const FILES: [&str; 5] = [
    "utils.rs",
    "quantized_var_builder.rs",
    "models/with_tracing.rs",
    "models/llama.rs",
    "models/gemma3.rs",
];

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=Cargo.toml");
    let sources = sources();
    let out = PathBuf::from(variable("OUT_DIR"));
    fs::write(out.join("models.rs"), modules(&sources)).expect("OUT_DIR can be written");
}

fn variable(name: &str) -> String {
    env::var(name).unwrap_or_else(|_| panic!("cargo sets {name} for build scripts"))
}

/// The folder `src` of candle-transformers, which cargo downloads if it has to.
fn sources() -> PathBuf {
    let output = Command::new(variable("CARGO"))
        .args(["metadata", "--format-version=1", "--locked", "--features=sources"])
        .args(["--filter-platform", &variable("TARGET"), "--manifest-path"])
        .arg(Path::new(&variable("CARGO_MANIFEST_DIR")).join("Cargo.toml"))
        .output()
        .expect("cargo runs");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "cargo metadata: {errors}");
    let metadata: Value = serde_json::from_slice(&output.stdout).expect("cargo writes JSON");
    let packages = metadata["packages"].as_array().expect("a list of packages");
    let package = packages.iter().find(|package| package["name"] == "candle-transformers");
    let manifest = package.and_then(|package| package["manifest_path"].as_str());
    Path::new(manifest.expect("a dependency of this package")).with_file_name("src")
}

/// The modules of the files, where the models expect them.
fn modules(sources: &Path) -> String {
    let module = |file: &str| {
        let path = sources.join(file);
        assert!(path.is_file(), "candle-transformers has no {}", path.display());
        let name = path.file_stem().and_then(|stem| stem.to_str()).expect("a name").to_string();
        format!("#[path = {path:?}]\npub mod {name};\n")
    };
    let (outer, models): (Vec<&str>, Vec<&str>) =
        FILES.into_iter().partition(|file| !file.starts_with("models/"));
    let all = |files: Vec<&str>| files.into_iter().map(module).collect::<String>();
    format!("{}pub mod models {{\n{}}}\n", all(outer), all(models))
}
