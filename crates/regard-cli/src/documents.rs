//! The commands that the documents show are commands that this program takes.

use super::{Arguments, Command};
use crate::shape;
use clap::Parser;
use clap::error::ErrorKind;
use std::path::{Path, PathBuf};

/// The Markdown files of the repository: at its root, in `docs` and `bench`, and beside crates.
fn documents(root: &Path) -> Vec<PathBuf> {
    let folders =
        ["", "docs", "docs/perf", "bench/peers", "bench/results"].map(|folder| root.join(folder));
    let crates = std::fs::read_dir(root.join("crates"))
        .expect("crates")
        .map(|entry| entry.expect("an entry").path());
    folders
        .into_iter()
        .chain(crates)
        .flat_map(|folder| std::fs::read_dir(folder).expect("a folder"))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "md"))
        .collect()
}

/// The pieces of a document that may be commands: lines of fenced code, and inline code.
fn code(text: &str) -> Vec<&str> {
    let mut fenced = false;
    let mut pieces = Vec::new();
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if fenced {
            pieces.push(line.trim());
        } else {
            pieces.extend(line.split('`').skip(1).step_by(2));
        }
    }
    pieces
}

/// The words of a command line, quotes removed, placeholders replaced and the comment left out.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    for (i, piece) in line.split('"').enumerate() {
        match i % 2 {
            1 => words.push(piece.to_string()),
            _ => words.extend(piece.split_whitespace().map(String::from)),
        }
    }
    let end = words.iter().position(|word| word == "#" || word == "|" || word == ">");
    words.truncate(end.unwrap_or(words.len()));
    let placeholder = |word: String| match word.as_str() {
        "N" => "5".to_string(),
        _ => word,
    };
    words.into_iter().map(placeholder).collect()
}

#[test]
fn documented_commands_are_understood() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !root.join("docs/cli.md").exists() {
        println!("SKIPPED: not in the repository");
        return;
    }
    let (mut count, mut wrong) = (0, Vec::new());
    for path in documents(&root) {
        let text = std::fs::read_to_string(&path).expect("a document");
        for line in code(&text).into_iter().filter_map(command_line) {
            count += 1;
            if let Err(error) = parse(words(line)) {
                wrong.push(format!("{}: {line}\n{error}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 20, "only {count} commands found");
}

/// What follows the name of the program, if this is a command with arguments.
fn command_line(piece: &str) -> Option<&str> {
    let prefixes = ["regard ", "cargo run --release -p regard-cli -- "];
    let line = prefixes.iter().find_map(|prefix| piece.strip_prefix(prefix))?;
    let (command, arguments) = line.split_once(' ')?;
    let known = ["info", "plan", "run", "check", "bench"];
    (known.contains(&command) && !arguments.is_empty()).then_some(line)
}

/// Whether the program takes these arguments, the shape of a plan included.
fn parse(words: Vec<String>) -> Result<(), String> {
    let arguments = Arguments::try_parse_from(["regard".into()].into_iter().chain(words));
    let shape = match arguments {
        Ok(Arguments { command: Command::Plan(plan) }) => plan.shape,
        Ok(_) => None,
        Err(error) if error.kind() == ErrorKind::DisplayHelp => None,
        Err(error) => return Err(error.to_string()),
    };
    match shape.filter(|shape| shape != "...") {
        Some(shape) => shape::describe(&shape).map(|_| ()).map_err(|error| error.to_string()),
        None => Ok(()),
    }
}
