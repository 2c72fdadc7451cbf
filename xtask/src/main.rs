//! Development chores of the regard workspace, run as `cargo xtask`.

extern crate alloc; // of `relative_ptx`, which is also in a crate without `std`

mod cuda;
mod header;

use clap::{Parser, Subcommand};
use std::path::PathBuf;
use std::process::ExitCode;

/// Development chores of the regard workspace.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// The CUDA device code that ships in the crates of images.
    #[command(subcommand)]
    Cuda(cuda::Command),
    /// Write the C header: crates/regard-capi/include/regard.h.
    Header {
        /// Fail if the header differs from the text that would be written.
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    let done = match Arguments::parse().chore {
        Chore::Cuda(command) => cuda::run(&command, &cuda::packages()),
        Chore::Header { check } => header::run(check),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the workspace.
fn workspace() -> PathBuf {
    let own = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    own.parent().expect("xtask is a folder of the workspace").to_path_buf()
}

/// The folder for downloads and results of chores: never part of the source tree.
fn scratch() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    workspace().join(target.unwrap_or_else(|| "target".into())).join("xtask")
}
