//! Reads which files of a crate use which others, from the text of their paths.

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::Path;

/// A path in one file to something of another.
#[derive(Debug, Clone)]
pub struct Import {
    /// The file, from the source folder on.
    pub from: String,
    pub line: usize,
    /// The path as it is resolved from the crate's root.
    pub path: String,
    /// The file that it leads to.
    pub to: String,
}

impl fmt::Display for Import {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "src/{}:{}: {} ({})", self.from, self.line, self.path, self.to)
    }
}

/// A word or a punctuation mark, with its line.
#[derive(Debug, Clone, PartialEq)]
struct Token {
    text: String,
    line: usize,
}

/// A module: its path from the root, and the file that holds it.
type Modules = BTreeMap<Vec<String>, String>;

/// One path of a file, absolute.
struct Use {
    segments: Vec<String>,
    line: usize,
    /// A re-export (`pub use`), and the name that it gives.
    exported: Option<String>,
}

/// Every path from one file below `source` to another.
pub fn imports(source: &Path) -> Vec<Import> {
    let mut modules = Modules::new();
    find_modules(source, &[], "", &mut modules);
    let uses: BTreeMap<&Vec<String>, Vec<Use>> = modules
        .iter()
        .map(|(module, file)| {
            let text = fs::read_to_string(source.join(file)).expect("a source file");
            (module, uses_of(&tokens(&text), module, &modules))
        })
        .collect();
    let exports: BTreeMap<Vec<String>, Vec<String>> = uses
        .iter()
        .flat_map(|(module, uses)| {
            uses.iter().filter_map(|found| {
                let mut name = (*module).clone();
                name.push(found.exported.clone()?);
                Some((name, found.segments.clone()))
            })
        })
        .collect();
    let mut imports = Vec::new();
    for (module, uses) in &uses {
        for found in uses.iter().filter(|found| found.exported.is_none()) {
            let target = file_module(&resolved(&found.segments, &exports, &modules), &modules);
            imports.push(Import {
                from: modules[*module].clone(),
                line: found.line,
                path: found.segments.join("::"),
                to: modules[&target].clone(),
            });
        }
    }
    imports
}

/// The modules that are files: `name.rs` or `name/mod.rs`, and the files in `name/`.
fn find_modules(source: &Path, module: &[String], folder: &str, modules: &mut Modules) {
    let mut entries: Vec<_> = fs::read_dir(source.join(folder))
        .expect("a source folder")
        .map(|entry| entry.expect("an entry"))
        .collect();
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().into_string().expect("a name in UTF-8");
        let path = format!("{folder}{name}");
        let mut child = module.to_vec();
        if entry.path().is_dir() {
            child.push(name);
            find_modules(source, &child, &format!("{path}/"), modules);
        } else if let Some(stem) = name.strip_suffix(".rs") {
            if !["lib", "mod"].contains(&stem) {
                child.push(stem.to_string());
            }
            // Unit tests in files of their own.
            if stem != "tests" {
                modules.insert(child, path);
            }
        }
    }
}

/// Words and punctuation, without comments, strings and lifetimes. `::` is one mark.
fn tokens(text: &str) -> Vec<Token> {
    let chars: Vec<char> = text.chars().collect();
    let (mut found, mut line, mut i) = (Vec::new(), 1, 0);
    let at = |i: usize| chars.get(i).copied().unwrap_or('\0');
    while i < chars.len() {
        let start = i;
        match at(i) {
            '/' if at(i + 1) == '/' => i += chars[i..].iter().take_while(|&&c| c != '\n').count(),
            '/' if at(i + 1) == '*' => {
                while i < chars.len() && !(at(i) == '*' && at(i + 1) == '/') {
                    i += 1;
                }
                i += 2;
            }
            'r' if at(i + 1) == '"' || (at(i + 1) == '#' && at(i + 2) == '"') => {
                let hashes = usize::from(at(i + 1) == '#');
                i += hashes + 2;
                while i < chars.len() && !(at(i) == '"' && (hashes == 0 || at(i + 1) == '#')) {
                    i += 1;
                }
                i += 1 + hashes;
            }
            '"' => {
                i += 1;
                while i < chars.len() && at(i) != '"' {
                    i += if at(i) == '\\' { 2 } else { 1 };
                }
                i += 1;
            }
            // A character, or else a lifetime, whose name then reads as a word.
            '\'' if at(i + 1) == '\\' || at(i + 2) == '\'' => {
                i += 2;
                while i < chars.len() && at(i) != '\'' {
                    i += 1;
                }
                i += 1;
            }
            c if c.is_alphanumeric() || c == '_' => {
                while at(i).is_alphanumeric() || at(i) == '_' {
                    i += 1;
                }
                found.push(Token { text: chars[start..i].iter().collect(), line });
            }
            ':' if at(i + 1) == ':' => {
                i += 2;
                found.push(Token { text: "::".into(), line });
            }
            c => {
                i += 1;
                if !c.is_whitespace() {
                    found.push(Token { text: c.into(), line });
                }
            }
        }
        line += chars[start..i.min(chars.len())].iter().filter(|&&c| c == '\n').count();
    }
    found
}

/// Reads the paths of one file.
struct Reader<'a> {
    tokens: &'a [Token],
    at: usize,
    modules: &'a Modules,
    /// The module that the file is, and the modules inside the file that the place is in, each with
    /// the depth of braces where it ends.
    module: Vec<String>,
    inline: Vec<usize>,
    depth: usize,
    uses: Vec<Use>,
}

fn uses_of(tokens: &[Token], module: &[String], modules: &Modules) -> Vec<Use> {
    let mut reader = Reader {
        tokens,
        at: 0,
        modules,
        module: module.to_vec(),
        inline: Vec::new(),
        depth: 0,
        uses: Vec::new(),
    };
    while reader.at < tokens.len() {
        reader.step();
    }
    reader.uses
}

impl Reader<'_> {
    fn text(&self, offset: usize) -> &str {
        self.tokens.get(self.at + offset).map_or("", |token| &token.text)
    }

    fn is(&self, words: &[&str]) -> bool {
        words.iter().enumerate().all(|(i, word)| self.text(i) == *word)
    }

    fn step(&mut self) {
        if self.is(&["#", "[", "cfg", "(", "test", ")", "]"]) {
            self.at += 7;
            self.skip_item();
        } else if self.text(0) == "mod" && self.text(2) == "{" {
            self.module.push(self.text(1).to_string());
            self.inline.push(self.depth);
            self.depth += 1;
            self.at += 3;
        } else if self.text(0) == "{" {
            self.depth += 1;
            self.at += 1;
        } else if self.text(0) == "}" {
            self.depth -= 1;
            if self.inline.last() == Some(&self.depth) {
                self.inline.pop();
                self.module.pop();
            }
            self.at += 1;
        } else if self.text(0) == "use" && self.text(1) != "<" {
            let exported = self.is_exported();
            self.at += 1;
            self.read_use(&[], exported);
        } else if self.text(1) == "::" && (self.at == 0 || self.tokens[self.at - 1].text != "::") {
            self.read_path();
        } else {
            self.at += 1;
        }
    }

    /// Whether the `use` at this place is a re-export: `pub` or `pub(...)` stands before it, in the
    /// file's own module.
    fn is_exported(&self) -> bool {
        let before = |count: usize| self.at.checked_sub(count).map(|i| &*self.tokens[i].text);
        let public = before(1) == Some("pub")
            || (before(1) == Some(")") && (2..6).any(|count| before(count) == Some("pub")));
        public && self.inline.is_empty()
    }

    /// Skips an item: to the end of its braces, or its semicolon.
    fn skip_item(&mut self) {
        let mut depth = 0;
        while self.at < self.tokens.len() {
            match self.text(0) {
                "{" => depth += 1,
                "}" => depth -= 1,
                _ => {}
            }
            let ends = depth == 0 && ["}", ";"].contains(&self.text(0));
            self.at += 1;
            if ends {
                return;
            }
        }
    }

    /// Reads a tree of a `use` declaration that continues `prefix`, up to its end.
    fn read_use(&mut self, prefix: &[String], exported: bool) {
        let (mut path, mut name) = (prefix.to_vec(), None);
        let line = self.tokens[self.at].line;
        loop {
            match self.text(0) {
                "{" => {
                    self.at += 1;
                    while self.text(0) != "}" {
                        self.read_use(&path, exported);
                        if self.text(0) == "," {
                            self.at += 1;
                        }
                    }
                    self.at += 1;
                    if prefix.is_empty() {
                        self.at += 1;
                    }
                    return;
                }
                "as" => {
                    name = Some(self.text(1).to_string());
                    self.at += 2;
                }
                "," | "}" | ";" | "" => break,
                "::" => self.at += 1,
                _ => {
                    path.push(self.text(0).to_string());
                    self.at += 1;
                }
            }
        }
        if prefix.is_empty() {
            self.at += 1;
        }
        if path.last().is_some_and(|last| last == "self") {
            path.pop();
        }
        let Some(segments) = self.absolute(&path) else { return };
        let last = segments.last().cloned().unwrap_or_default();
        let exported = exported.then(|| name.unwrap_or(last));
        self.uses.push(Use { segments, line, exported });
    }

    /// Reads a path in an expression or a type.
    fn read_path(&mut self) {
        let line = self.tokens[self.at].line;
        let mut path = vec![self.text(0).to_string()];
        self.at += 1;
        let is_name = |text: &str| text.starts_with(|c: char| c.is_alphabetic() || c == '_');
        while self.text(0) == "::" && is_name(self.text(1)) {
            path.push(self.text(1).to_string());
            self.at += 2;
        }
        if let Some(segments) = self.absolute(&path) {
            self.uses.push(Use { segments, line, exported: None });
        }
    }

    /// The path from the crate's root, if it is one of this crate.
    fn absolute(&self, path: &[String]) -> Option<Vec<String>> {
        let mut base = self.module.clone();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => {
                base.clear();
                rest = &path[1..];
            }
            "self" => rest = &path[1..],
            "super" => {
                while rest.first().is_some_and(|first| first == "super") {
                    base.pop();
                    rest = &rest[1..];
                }
            }
            child => {
                base.push(child.to_string());
                if !self.modules.contains_key(&base) {
                    return None;
                }
                base.pop();
            }
        }
        base.extend_from_slice(rest);
        Some(base)
    }
}

/// The path with re-exports replaced by their targets.
fn resolved(
    path: &[String],
    exports: &BTreeMap<Vec<String>, Vec<String>>,
    modules: &Modules,
) -> Vec<String> {
    let mut path = path.to_vec();
    // A re-export may lead to another one.
    'again: for _ in 0..8 {
        for end in 1..=path.len() {
            // A function may be called like a module, but nothing is inside a function.
            if end < path.len() && modules.contains_key(&path[..end]) {
                continue;
            }
            if let Some(target) = exports.get(&path[..end])
                && *target != path[..end]
            {
                path = target.iter().chain(&path[end..]).cloned().collect();
                continue 'again;
            }
        }
        break;
    }
    path
}

/// The innermost module of a path that is a file.
fn file_module(path: &[String], modules: &Modules) -> Vec<String> {
    let ends = (0..=path.len()).rev();
    let found = ends.map(|end| &path[..end]).find(|part| modules.contains_key(*part));
    found.expect("the root is a module").to_vec()
}
