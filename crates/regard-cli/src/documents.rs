//! The commands that documents and scripts show are commands that exist: commands of this program
//! are parsed. Of other commands, the files, packages, tests and examples that they name are looked
//! for.

use super::{Arguments, Command};
use crate::shape;
use clap::Parser;
use clap::error::ErrorKind;
use std::path::{Path, PathBuf};

/// The Markdown files of the repository: at its root, in `docs`, `bench` and `fuzz`, and beside
/// crates and examples.
fn documents(root: &Path) -> Vec<PathBuf> {
    let folders = ["", "docs", "docs/perf", "bench/peers", "bench/results", "fuzz"]
        .map(|folder| root.join(folder));
    let crates = ["crates", "examples"]
        .into_iter()
        .flat_map(|folder| std::fs::read_dir(root.join(folder)).expect("a folder"))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.is_dir());
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
        "$profile" => "small".to_string(),
        // A variable of a script.
        variable if variable.starts_with('$') => "5".to_string(),
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
    for (path, pieces) in documented(&root).chain(scripted(&root)) {
        for line in pieces.iter().filter_map(|piece| command_line(piece)) {
            count += 1;
            if let Err(error) = parse(words(line)) {
                wrong.push(format!("{}: {line}\n{error}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 60, "only {count} commands found");
}

#[test]
fn documented_scripts_packages_and_tests_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    if !root.join("docs/cli.md").exists() {
        println!("SKIPPED: not in the repository");
        return;
    }
    let (mut count, mut wrong) = (0, Vec::new());
    for (path, pieces) in documented(&root).chain(scripted(&root)) {
        for name in pieces.iter().flat_map(|piece| named(piece)) {
            count += 1;
            if !name.places().iter().any(|place| exists(&root, place)) {
                wrong.push(format!("{}: there is no {name:?}", path.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    assert!(count > 120, "only {count} names found");
}

/// Documents, with the pieces of each that may be commands.
fn documented(root: &Path) -> impl Iterator<Item = (PathBuf, Vec<String>)> {
    documents(root).into_iter().map(|path| {
        let text = std::fs::read_to_string(&path).expect("a document");
        let pieces = code(&text).into_iter().map(String::from).collect();
        (path, pieces)
    })
}

/// Scripts and workflows, with the commands of each: `regard` under whatever name the script calls
/// it by, and cargo. Continued lines are joined, and commands end at the shell's syntax.
fn scripted(root: &Path) -> impl Iterator<Item = (PathBuf, Vec<String>)> {
    let folders = ["scripts", "bench", ".ci", ".github/workflows"].map(|folder| root.join(folder));
    let entries =
        folders.into_iter().flat_map(|folder| std::fs::read_dir(folder).expect("a folder"));
    let paths = entries.map(|entry| entry.expect("an entry").path());
    paths
        .filter(|path| {
            path.extension().is_none_or(|extension| extension == "sh" || extension == "yml")
        })
        .filter(|path| path.is_file())
        .map(|path| {
            let text = std::fs::read_to_string(&path).expect("a script").replace("\\\n", " ");
            let pieces = text.lines().flat_map(commands).collect();
            (path, pieces)
        })
}

/// The commands of a line of a script.
fn commands(line: &str) -> Vec<String> {
    let names = ["run ", "built_regard ", "/release/regard\" ", "-p regard-cli -- ", "./regard "];
    let mut found = Vec::new();
    for part in line.split(['|', ';', '&', '>', ')', '`']) {
        // Arrays of arguments are known when the script runs.
        let kept = |word: &&str| !word.contains("[@]") && **word != *"2";
        let kept = part.split_whitespace().filter(kept).collect::<Vec<_>>().join(" ");
        let regard = names.iter().find_map(|name| Some(kept.split_once(name)?.1));
        found.extend(regard.map(|arguments| format!("regard {arguments}")));
        let other = ["cargo ", "scripts/"].iter().filter_map(|name| kept.find(name)).min();
        found.extend(other.map(|start| kept[start..].to_string()));
    }
    found
}

/// A part of the repository that a command names.
#[derive(Debug)]
enum Named {
    Script(String),
    Package(String),
    Test(String),
    Example(String),
}

impl Named {
    /// The paths that it may have. `*` stands for any folder.
    fn places(&self) -> Vec<String> {
        match self {
            Named::Script(path) => vec![path.clone(), format!("crates/*/{path}")],
            Named::Package(name) => ["crates", "examples", "."]
                .map(|folder| format!("{folder}/{name}/Cargo.toml"))
                .to_vec(),
            Named::Test(name) => {
                ["crates", "examples"].map(|folder| format!("{folder}/*/tests/{name}.rs")).to_vec()
            }
            Named::Example(name) => vec![
                format!("crates/*/examples/{name}.rs"),
                format!("crates/*/examples/{name}/main.rs"),
                format!("fuzz/examples/{name}.rs"),
            ],
        }
    }
}

/// The scripts, packages, tests and examples that a command of cargo or of the shell names.
fn named(piece: &str) -> Vec<Named> {
    let mut found = Vec::new();
    let words: Vec<_> = piece.split_whitespace().take_while(|word| *word != "#").collect();
    let Some(start) = words.iter().position(|word| {
        matches!(*word, "cargo" | "bash")
            || word.starts_with("scripts/")
            || word.starts_with("bench/")
    }) else {
        return found;
    };
    let plain = |word: &str| word.chars().all(|c| c.is_ascii_alphanumeric() || "._-/".contains(c));
    for pair in words[start..].windows(2).filter(|pair| plain(pair[1])) {
        let name = pair[1].to_string();
        match pair[0] {
            "-p" | "--package" => found.push(Named::Package(name)),
            "--test" => found.push(Named::Test(name)),
            "--example" => found.push(Named::Example(name)),
            "bash" if name.contains('/') => found.push(Named::Script(name)),
            _ => {}
        }
    }
    let script = words[start];
    if plain(script) && (script.ends_with(".sh") || script.ends_with(".py")) {
        found.push(Named::Script(script.to_string()));
    }
    found
}

/// Whether a file is there; `*` is any folder.
fn exists(root: &Path, place: &str) -> bool {
    match place.split_once("/*/") {
        Some((before, after)) => std::fs::read_dir(root.join(before)).is_ok_and(|mut all| {
            all.any(|entry| entry.is_ok_and(|entry| entry.path().join(after).is_file()))
        }),
        None => root.join(place).is_file(),
    }
}

/// The arguments after the name of the program, if this is a command with arguments.
fn command_line(piece: &str) -> Option<&str> {
    let prefixes = ["regard ", "cargo run --release -p regard-cli -- "];
    let line = prefixes.iter().find_map(|prefix| piece.strip_prefix(prefix))?;
    let (command, arguments) = line.split_once(' ')?;
    let known = ["info", "plan", "run", "check", "bench"];
    (known.contains(&command) && !arguments.is_empty()).then_some(line)
}

/// Checks that the program takes these arguments, the shape of a plan included.
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
