//! Runs the command, and returns its output.
#![allow(dead_code, reason = "each test program uses a part of it")]

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// The command with these arguments.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_regard"));
    command.args(arguments);
    command
}

/// Output and exit status of a run of the command.
pub struct Ran {
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ran {
    fn from(output: Output) -> Ran {
        Ran {
            status: output.status.code().expect("ended by itself"),
            stdout: String::from_utf8(output.stdout).expect("UTF-8"),
            stderr: String::from_utf8(output.stderr).expect("UTF-8"),
        }
    }
}

impl Ran {
    /// All is well: nothing on stderr.
    #[track_caller]
    pub fn done(self) -> String {
        assert_eq!((self.status, self.stderr.as_str()), (0, ""), "{}", self.stdout);
        self.stdout
    }

    /// The parsed output of a run with `--json`.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout)
            .unwrap_or_else(|error| panic!("{error}: {}", self.stdout))
    }

    /// Ended with that status and one line that starts with "error: " and holds these texts.
    #[track_caller]
    pub fn failed(&self, status: i32, texts: &[&str]) {
        assert_eq!(self.status, status, "{}{}", self.stdout, self.stderr);
        let lines: Vec<_> = self.stderr.lines().collect();
        assert!(
            lines.len() == 1 && lines[0].starts_with("error: "),
            "not one error line: {}",
            self.stderr
        );
        for text in texts {
            assert!(lines[0].contains(text), "{}: lacks {text:?}", lines[0]);
        }
    }
}

/// Runs a command to its end.
#[track_caller]
pub fn run(command: &mut Command) -> Ran {
    command.output().expect("the command starts").into()
}

/// Runs the command with these arguments.
#[track_caller]
pub fn regard(arguments: &[&str]) -> Ran {
    run(&mut command(arguments))
}

/// An empty directory of the test's own.
pub fn directory(test: &str) -> PathBuf {
    let name = format!("{}-{test}", env!("CARGO_CRATE_NAME"));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).expect("a directory");
    path
}

/// A path as an argument.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}
