//! The layers of the source: a module uses only modules below it, and no files import each other in
//! a circle.
//!
//! Paths are read from the text: `use` declarations, and paths that start with `crate`, `self`,
//! `super` or a child module. A path through a re-export counts as one to the file that has the
//! item. Unit tests may use anything.

mod paths;

use paths::{Import, imports};
use std::collections::BTreeMap;
use std::path::Path;

/// The top-level modules, from the bottom up. Modules of one line do not know each other.
const LAYERS: &[&[&str]] = &[
    &["alibi", "apple_chips", "error", "format", "race", "params", "memory", "tile_map"],
    &["level", "dtype", "state"],
    &["tensor", "quantize"],
    &["expect", "machine"],
    &["positions"],
    &["variant"],
    &["problem"],
    &["oracle", "append", "merge", "split", "select"],
    &["plan", "paged", "kernel_parameters"],
    // The backends: each knows everything below, and none knows another.
    &["cpu", "cuda", "metal"],
    &["backend"],
    &["lib"],
];

/// The layers of the CPU backend, likewise.
const CPU_LAYERS: &[&[&str]] = &[
    &["vector", "process", "executor", "number"],
    &["product", "pool", "tasks"],
    &["walk"],
    &["select", "compiled", "prefix", "mask_map"],
    &["plan", "append", "copy_blocks", "merge"],
    &["schedule", "workspace"],
    &["mod"],
    &["device"],
];

fn source_imports() -> Vec<Import> {
    imports(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"))
}

/// Imports that do not go down, with file and line. `part` names the layer's module of a file, if
/// the file is in question.
fn upward(
    imports: &[Import],
    layers: &[&[&str]],
    part: impl Fn(&str) -> Option<String>,
) -> Vec<String> {
    let layer_of = |module: &str| layers.iter().position(|layer| layer.contains(&module));
    let mut wrong = Vec::new();
    for import in imports {
        let (Some(from), Some(to)) = (part(&import.from), part(&import.to)) else { continue };
        if from == to {
            continue;
        }
        match (layer_of(&from), layer_of(&to)) {
            (Some(above), Some(below)) if above > below => {}
            (Some(_), Some(_)) => {
                wrong.push(format!("{import}: `{from}` is not in a layer above `{to}`"));
            }
            (None, _) => wrong.push(format!("{import}: `{from}` is in no layer")),
            (_, None) => wrong.push(format!("{import}: `{to}` is in no layer")),
        }
    }
    wrong
}

/// The imports of a circle of files, if there is one.
fn circle(imports: &[Import]) -> Option<Vec<&Import>> {
    let mut edges: BTreeMap<&str, Vec<&Import>> = BTreeMap::new();
    for import in imports.iter().filter(|import| import.from != import.to) {
        edges.entry(&import.from).or_default().push(import);
    }
    // Depth-first: a file on the current path that is reached again closes a circle.
    fn visit<'a>(
        file: &'a str,
        edges: &BTreeMap<&'a str, Vec<&'a Import>>,
        done: &mut Vec<&'a str>,
        path: &mut Vec<&'a Import>,
    ) -> Option<Vec<&'a Import>> {
        if done.contains(&file) {
            return None;
        }
        for &import in edges.get(file).into_iter().flatten() {
            path.push(import);
            if let Some(start) = path.iter().position(|on_path| on_path.from == import.to) {
                return Some(path[start..].to_vec());
            }
            if let Some(circle) = visit(&import.to, edges, done, path) {
                return Some(circle);
            }
            path.pop();
        }
        done.push(file);
        None
    }
    let mut done = Vec::new();
    edges.keys().find_map(|file| visit(file, &edges, &mut done, &mut Vec::new()))
}

/// The first part of a file's path, without its extension.
fn first_part(path: &str) -> String {
    let first = path.split('/').next().unwrap_or(path);
    first.strip_suffix(".rs").unwrap_or(first).to_string()
}

#[test]
fn modules_use_only_what_lies_below_them() {
    let imports = source_imports();
    assert!(imports.len() > 300, "only {} imports found", imports.len());
    let wrong = upward(&imports, LAYERS, |file| Some(first_part(file)));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let wrong = upward(&imports, CPU_LAYERS, |file| file.strip_prefix("cpu/").map(first_part));
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    let imports = source_imports();
    let circle = circle(&imports).unwrap_or_default();
    let lines: Vec<_> = circle.iter().map(ToString::to_string).collect();
    assert!(circle.is_empty(), "a circle of imports:\n{}", lines.join("\n"));
}

#[test]
fn a_circle_and_an_upward_import_are_found() {
    let import = |from: &str, to: &str| Import {
        from: from.into(),
        line: 3,
        path: "crate::x".into(),
        to: to.into(),
    };
    let imports = [import("a.rs", "b.rs"), import("b.rs", "c/mod.rs"), import("c/mod.rs", "b.rs")];
    let circle = circle(&imports).expect("b and c");
    assert_eq!(circle.len(), 2);
    assert_eq!(circle[0].to_string(), "src/b.rs:3: crate::x (c/mod.rs)");
    let wrong = upward(&imports, &[&["c"], &["b"], &["a"]], |file| Some(first_part(file)));
    assert_eq!(wrong, ["src/c/mod.rs:3: crate::x (b.rs): `c` is not in a layer above `b`"]);
    assert_eq!(upward(&imports[..1], &[&["b"]], |file| Some(first_part(file))).len(), 1);
}
