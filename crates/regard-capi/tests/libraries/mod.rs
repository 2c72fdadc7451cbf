//! The libraries that C links, built for the profile of the test.

#![allow(dead_code, reason = "compiled into each test on its own, and none uses all of it")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

/// The libraries, built for the profile of this test.
pub struct Libraries {
    /// To load.
    pub shared: PathBuf,
    /// To link.
    pub fixed: PathBuf,
}

/// Builds them: a test of a crate that is no Rust library does not.
pub fn libraries() -> &'static Libraries {
    static BUILT: OnceLock<Libraries> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut build = Command::new(env!("CARGO"));
        // With the features that `cargo tests` builds with: then everything below the libraries is
        // there already.
        build.args([
            "build",
            "--quiet",
            "--workspace",
            "--exclude=xtask",
            "--exclude=regard-cases",
            "--exclude=metal-host",
            "--lib",
            "--message-format=json",
        ]);
        build.arg("--manifest-path").arg(folder().join("Cargo.toml"));
        if !cfg!(debug_assertions) {
            build.arg("--release");
        }
        let output = succeed(&mut build);
        let files: Vec<PathBuf> = String::from_utf8_lossy(&output.stdout)
            .lines()
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|message| message["target"]["name"] == "regard_capi")
            .flat_map(|message| message["filenames"].as_array().cloned().unwrap_or_default())
            .filter_map(|file| file.as_str().map(PathBuf::from))
            .collect();
        let find = |extensions: &[&str]| {
            let known = |file: &&PathBuf| {
                extensions.iter().any(|known| file.extension().is_some_and(|found| found == *known))
            };
            files
                .iter()
                .find(known)
                .unwrap_or_else(|| panic!("no {extensions:?} among {files:?}"))
                .clone()
        };
        Libraries { shared: find(&["so", "dylib"]), fixed: find(&["a"]) }
    })
}

/// This crate's folder.
pub fn folder() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Runs a command that must succeed.
pub fn succeed(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        text(&output.stdout),
        text(&output.stderr)
    );
    output
}
