//! The kernels' source: whole, and in parts that compile on their own.

use super::params;

/// A file of kernels: its name and text.
type File = (&'static str, &'static str);

/// Source that all kinds of kernels use.
const COMMON: [File; 2] = [
    ("common.metal", include_str!("kernels/common.metal")),
    ("scores.metal", include_str!("kernels/scores.metal")),
];

/// Kernels that need no others of the source.
struct Kind {
    /// Prefix of their names; the type follows.
    prefix: &'static str,
    /// The macro that instantiates them for a type, at the beginning of a line.
    instantiation: &'static str,
    files: &'static [File],
}

const KINDS: [Kind; 6] = [
    Kind {
        prefix: "decode_",
        instantiation: "DECODE_TYPE(",
        files: &[("decode.metal", include_str!("kernels/decode.metal"))],
    },
    Kind {
        prefix: "mask_map_",
        instantiation: "MASK_MAP(",
        files: &[("mask_map.metal", include_str!("kernels/mask_map.metal"))],
    },
    Kind {
        prefix: "prefill_",
        instantiation: "PREFILL_TYPES(",
        files: &[("prefill.metal", include_str!("kernels/prefill.metal"))],
    },
    Kind {
        prefix: "combine_",
        instantiation: "COMBINE(",
        files: &[("combine.metal", include_str!("kernels/combine.metal"))],
    },
    Kind {
        prefix: "merge_",
        instantiation: "MERGE(",
        files: &[("merge.metal", include_str!("kernels/merge.metal"))],
    },
    Kind {
        prefix: "append_",
        instantiation: "APPEND(",
        files: &[
            ("quantize.metal", include_str!("kernels/quantize.metal")),
            ("append.metal", include_str!("kernels/append.metal")),
        ],
    },
];

/// The source of all kernels, parameter structs included: one translation unit of Metal 3.1, for
/// `newLibraryWithSource` or, as a file, for `xcrun metal`.
pub fn source() -> String {
    text(KINDS.iter().flat_map(|kind| kind.files))
}

/// The text of files, with what all of them use.
fn text<'a>(files: impl Iterator<Item = &'a File>) -> String {
    let mut source = format!(
        "#include <metal_stdlib>\n#include <metal_simdgroup_matrix>\nusing namespace metal;\n\n{}",
        params::declarations()
    );
    for (name, text) in COMMON.iter().chain(files) {
        source.push_str(&format!("\n#line 1 \"{name}\"\n{text}"));
    }
    source
}

/// The kernels of one kind for one type: what is compiled when one of them is first needed.
#[derive(Debug)]
pub struct LibrarySource {
    name: String,
    kind: &'static Kind,
}

impl std::fmt::Debug for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.prefix)
    }
}

impl LibrarySource {
    /// The source that has a kernel.
    pub fn of_function(function: &str) -> LibrarySource {
        let kind = KINDS
            .iter()
            .find(|kind| function.starts_with(kind.prefix))
            .expect("every kernel is of a kind");
        let mut names = kind.instantiations().filter(|name| instantiates(name, function));
        let name = names.next().expect("every kernel is instantiated");
        LibrarySource { name, kind }
    }

    /// The beginning of its kernels' names: `decode_half`.
    pub fn name(&self) -> &String {
        &self.name
    }

    /// The text, without the instantiations for other types.
    pub fn text(&self) -> String {
        let whole = text(self.kind.files.iter());
        let is_kept = |line: &&str| self.kind.instantiated(line).is_none_or(|it| it == self.name);
        // Lines stay where they are: the compiler's messages name them.
        let lines = whole.lines().map(|line| if is_kept(&line) { line } else { "" });
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// Whether kernels whose names begin with `name` include `function`: in `prefill_half_8x1`, the
/// type is `half`.
fn instantiates(name: &str, function: &str) -> bool {
    function.strip_prefix(name).is_some_and(|rest| {
        let mut rest = rest.chars();
        match (rest.next(), rest.next()) {
            (None, _) => true,
            (Some('_'), Some(next)) => next.is_ascii_digit(),
            _ => false,
        }
    })
}

impl Kind {
    /// The beginnings of the names of the kernels that the lines of the files instantiate.
    fn instantiations(&self) -> impl Iterator<Item = String> {
        let lines = self.files.iter().flat_map(|(_, text)| text.lines());
        lines.filter_map(|line| self.instantiated(line))
    }

    /// The beginning of the names of the kernels that a line instantiates.
    fn instantiated(&self, line: &str) -> Option<String> {
        let ty = line.strip_prefix(self.instantiation)?.split([',', ')']).next()?;
        Some(format!("{}{}", self.prefix, ty.trim_matches('"')))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metal::functions;

    #[test]
    fn each_kernel_is_in_one_part_of_the_source() {
        let mut names: Vec<_> = functions().collect();
        names.extend(["combine_half", "merge_bfloat", "append_float", "mask_map_bool"]);
        for function in names {
            let source = LibrarySource::of_function(function);
            assert!(instantiates(source.name(), function), "{function}: {}", source.name());
            let text = source.text();
            let lines = text.lines().filter_map(|line| source.kind.instantiated(line));
            assert_eq!(lines.collect::<Vec<_>>(), [source.name().clone()], "{function}");
        }
    }
}
