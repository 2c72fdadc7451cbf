//! From preprocessed MSL to C++: constructs that C++ lacks are rewritten. Everything else stays
//! unchanged, on its own line.
//!
//! - Kernels get an entry function that takes their arguments from the bound buffers, by the
//!   attributes of their parameters.
//! - `[[...]]` attributes are removed once they have been read.
//! - Explicit instantiations with a `host_name` become entries under that name.
//! - Function constants, and program-scope constants that are made from them, become variables that
//!   are set for each dispatch.
//! - Threadgroup variables of a body become static ones that are announced to the runtime.
//! - `vec<T, N>(...)` becomes a call, as C++ vectors have no constructors.

use crate::Error;
use crate::tokens::{Kind, Token, tokens};
use std::collections::BTreeMap;
use std::ops::Range;

/// C++ made from MSL.
#[derive(Debug, Clone)]
pub struct Generated {
    /// The C++ source; needs `msl.h`.
    pub source: String,
    /// The names of the kernels in it.
    pub kernels: Vec<String>,
    /// The function constants in it, by name.
    pub constants: BTreeMap<String, u32>,
    /// Maximum threads of a threadgroup, by kernel, if the source limits them.
    pub thread_limits: BTreeMap<String, u32>,
}

/// Parameter attributes for the position of a thread; fields of `msl_position`.
const POSITIONS: [&str; 11] = [
    "threadgroup_position_in_grid",
    "thread_position_in_threadgroup",
    "thread_position_in_grid",
    "threads_per_threadgroup",
    "threadgroups_per_grid",
    "threads_per_grid",
    "thread_index_in_simdgroup",
    "simdgroup_index_in_threadgroup",
    "thread_index_in_threadgroup",
    "simdgroups_per_threadgroup",
    "threads_per_simdgroup",
];

struct Entry {
    name: String,
    /// The function as C++ names it, template arguments included.
    function: String,
    base: String,
}

struct Generator<'a> {
    source: &'a str,
    tokens: Vec<Token>,
    /// Replacements, by position.
    edits: Vec<(Range<usize>, String)>,
    /// The expressions that each kernel function's parameters are made from.
    parameters: BTreeMap<String, Vec<String>>,
    entries: Vec<Entry>,
    constants: BTreeMap<String, u32>,
    /// Program-scope constants that are set for each dispatch.
    dynamic: Vec<String>,
    set_constants: String,
    /// `max_total_threads_per_threadgroup` of kernel functions that have it.
    limits: BTreeMap<String, u32>,
}

/// Rewrites preprocessed MSL.
///
/// # Errors
/// If something has a form that the generator does not know; the message names it and its place.
pub fn generate(source: &str) -> Result<Generated, Error> {
    let mut generator = Generator {
        source,
        tokens: tokens(source),
        edits: Vec::new(),
        parameters: BTreeMap::new(),
        entries: Vec::new(),
        constants: BTreeMap::new(),
        dynamic: Vec::new(),
        set_constants: String::new(),
        limits: BTreeMap::new(),
    };
    generator.walk()?;
    generator.finish()
}

impl<'a> Generator<'a> {
    fn text(&self, index: usize) -> &'a str {
        self.tokens.get(index).map_or("", |token| &self.source[token.span.clone()])
    }

    fn is(&self, index: usize, texts: &[&str]) -> bool {
        texts.iter().enumerate().all(|(i, text)| self.text(index + i) == *text)
    }

    fn between(&self, tokens: Range<usize>) -> &'a str {
        if tokens.is_empty() {
            return "";
        }
        &self.source[self.tokens[tokens.start].span.start..self.tokens[tokens.end - 1].span.end]
    }

    fn fault(&self, index: usize, what: &str) -> Error {
        let span = self.tokens.get(index).map_or(self.source.len(), |token| token.span.start);
        let near: String = self.source[span..].chars().take(60).collect();
        Error::Source(format!("{what}, near `{}`", near.replace('\n', " ")))
    }

    /// The token after the bracket that closes the one at `open`.
    fn after_closing(&self, open: usize) -> Result<usize, Error> {
        let mut depth = 0;
        for index in open..self.tokens.len() {
            match self.text(index) {
                "(" | "[" | "{" => depth += 1,
                ")" | "]" | "}" => {
                    depth -= 1;
                    if depth == 0 {
                        return Ok(index + 1);
                    }
                }
                _ => {}
            }
        }
        Err(self.fault(open, "a bracket that is not closed"))
    }

    /// The token after the `>` that closes the `<` at `open`.
    fn after_angle(&self, open: usize) -> Result<usize, Error> {
        let mut depth = 0;
        let mut index = open;
        while index < self.tokens.len() {
            match self.text(index) {
                "<" => depth += 1,
                ">" => {
                    depth -= 1;
                    if depth == 0 {
                        return Ok(index + 1);
                    }
                }
                "(" | "[" | "{" => {
                    index = self.after_closing(index)?;
                    continue;
                }
                ";" => break,
                _ => {}
            }
            index += 1;
        }
        Err(self.fault(open, "template arguments that are not closed"))
    }

    fn find(&self, from: usize, text: &str) -> Result<usize, Error> {
        (from..self.tokens.len())
            .find(|&index| self.text(index) == text)
            .ok_or_else(|| self.fault(from, &format!("no `{text}` follows")))
    }

    /// Replaces tokens by text, keeping the number of lines.
    fn replace(&mut self, tokens: Range<usize>, with: String) {
        let span = self.tokens[tokens.start].span.start..self.tokens[tokens.end - 1].span.end;
        let lines = self.source[span.clone()]
            .matches('\n')
            .count()
            .saturating_sub(with.matches('\n').count());
        self.edits.push((span, with + &"\n".repeat(lines)));
    }

    fn walk(&mut self) -> Result<(), Error> {
        let mut index = 0;
        let mut depth = 0usize;
        while index < self.tokens.len() {
            let text = self.text(index);
            let next = match text {
                "{" => {
                    depth += 1;
                    index + 1
                }
                "}" => {
                    depth = depth.saturating_sub(1);
                    index + 1
                }
                "template" if self.is(index + 1, &["[", "["]) => self.instantiation(index)?,
                "kernel" => self.kernel(index, index + 1)?,
                "constant" if depth == 0 || !self.in_parameters(index) => self.constant(index)?,
                "threadgroup" if self.declares_variable(index) => {
                    self.threadgroup_variable(index)?
                }
                "vec" if self.text(index + 1) == "<" => self.vector(index)?,
                "[" if self.text(index + 1) == "[" => {
                    let end = self.after_closing(index)?;
                    let inner = self.between(index + 2..end - 2);
                    self.replace(index..end, String::new());
                    // `[[kernel, ...]] void name(` is a kernel too.
                    let first = inner.split(',').next().unwrap_or_default();
                    let limit = self.thread_limit(index + 2..end - 2);
                    let next =
                        if first.trim() == "kernel" { self.kernel(index, end)? } else { end };
                    if let (Some(limit), "void") = (limit, self.text(end)) {
                        self.limits.insert(self.text(end + 1).to_string(), limit);
                    }
                    next
                }
                _ => index + 1,
            };
            index = next;
        }
        Ok(())
    }

    /// The number of `max_total_threads_per_threadgroup(N)` among attributes.
    fn thread_limit(&self, mut attributes: Range<usize>) -> Option<u32> {
        let at = attributes.find(|&at| self.text(at) == "max_total_threads_per_threadgroup")?;
        self.text(at + 2).parse().ok()
    }

    /// Whether a token stands between parentheses of a declaration (rather than at the start of
    /// one).
    fn in_parameters(&self, index: usize) -> bool {
        index > 0 && matches!(self.text(index - 1), "(" | "," | "<")
    }

    /// `template [[host_name("x")]] [[kernel]] type function<arguments>;`
    fn instantiation(&mut self, index: usize) -> Result<usize, Error> {
        let end = self.find(index, ";")? + 1;
        let attribute = self.after_closing(index + 1)?;
        if self.text(index + 3) != "host_name" {
            return Err(self.fault(index, "an explicit instantiation without host_name"));
        }
        // Neighbouring literals are one, as macros leave them.
        let name: String = (index + 5..attribute)
            .take_while(|&at| self.tokens[at].kind == Kind::Literal)
            .map(|at| self.text(at).trim_matches('"'))
            .collect();
        // The function is the last name with template arguments that is not itself inside some.
        let mut at = attribute;
        let mut function = None;
        while at < end {
            match self.text(at) {
                "[" | "(" => at = self.after_closing(at)?,
                "<" => {
                    let close = self.after_angle(at)?;
                    function = Some((self.text(at - 1), self.between(at - 1..close)));
                    at = close;
                }
                _ => at += 1,
            }
        }
        let Some((base, function)) = function else {
            return Err(self.fault(index, "an explicit instantiation without template arguments"));
        };
        self.entries.push(Entry { name, function: function.to_string(), base: base.to_string() });
        self.replace(index..end, String::new());
        Ok(end)
    }

    /// `kernel void name(parameters)`. `start` is the word or attribute that makes it a kernel,
    /// `at` the token after that.
    fn kernel(&mut self, start: usize, mut at: usize) -> Result<usize, Error> {
        while self.is(at, &["[", "["]) {
            let end = self.after_closing(at)?;
            self.replace(at..end, String::new());
            at = end;
        }
        if self.text(at) != "void" || self.text(at + 2) != "(" {
            return Err(self.fault(start, "a kernel that is not `kernel void name(...)`"));
        }
        let name = self.text(at + 1).to_string();
        let end = self.after_closing(at + 2)?;
        let mut sources = Vec::new();
        let mut from = at + 3;
        while from < end - 1 {
            let mut to = from;
            while to < end - 1 && self.text(to) != "," {
                to = match self.text(to) {
                    "(" | "[" => self.after_closing(to)?,
                    "<" => self.after_angle(to)?,
                    _ => to + 1,
                };
            }
            sources.push(self.parameter(from..to)?);
            from = to + 1;
        }
        if start == 0 || self.text(start - 1) != ">" {
            self.entries.push(Entry {
                name: name.clone(),
                function: name.clone(),
                base: name.clone(),
            });
        }
        self.parameters.insert(name, sources);
        Ok(end)
    }

    /// The C++ expression for a kernel's parameter; its attribute is removed. `P` stands for its
    /// type.
    fn parameter(&mut self, tokens: Range<usize>) -> Result<String, Error> {
        let Some(open) = tokens.clone().find(|&index| self.is(index, &["[", "["])) else {
            return Err(self.fault(tokens.start, "a kernel parameter without an attribute"));
        };
        let end = self.after_closing(open)?;
        let word = self.text(open + 2);
        let number = self.text(open + 4);
        let source = match word {
            "buffer" => format!("msl_parameter<P>::buffer(msl_bound()->buffer[{number}])"),
            "threadgroup" => {
                format!("msl_parameter<P>::buffer(msl_bound()->threadgroup_memory[{number}])")
            }
            _ if POSITIONS.contains(&word) => {
                format!("msl_parameter<P>::position(msl_where()->{word})")
            }
            _ => {
                return Err(
                    self.fault(open, &format!("a kernel parameter with the attribute `{word}`"))
                );
            }
        };
        self.replace(open..end, String::new());
        Ok(source)
    }

    /// `constant T name [[function_constant(i)]];`, or `constant T name = expression;` made from
    /// one.
    fn constant(&mut self, index: usize) -> Result<usize, Error> {
        let end = match self.find(index, ";") {
            Ok(end) => end,
            Err(_) => return Ok(index + 1),
        };
        let (ty, name) = (self.text(index + 1), self.text(index + 2));
        if self.is(index + 3, &["[", "[", "function_constant"]) {
            let number = self.text(index + 7);
            let Ok(parsed) = number.parse::<u32>() else {
                return Err(self.fault(index, "a function constant whose index is no number"));
            };
            self.constants.insert(name.to_string(), parsed);
            let set = format!(
                "{name}_value = ({ty})msl_constants[{number}].value; \
                 {name}_defined = msl_constants[{number}].defined;"
            );
            self.dynamic_constant(index..end + 1, (ty, name), &set);
            return Ok(end + 1);
        }
        if self.text(index + 3) != "=" {
            return Ok(index + 1);
        }
        let mut used: Vec<&str> = (index + 4..end)
            .map(|at| self.text(at))
            .filter(|text| self.dynamic.iter().any(|dynamic| dynamic == text))
            .collect();
        used.sort_unstable();
        used.dedup();
        if used.is_empty() {
            return Ok(index + 1);
        }
        let expression = self.between(index + 4..end).replace('\n', " ");
        if expression.contains("is_function_constant_defined") {
            return Err(self.fault(index, "is_function_constant_defined is not known here"));
        }
        let all_defined: Vec<_> = used.iter().map(|name| format!("{name}_defined")).collect();
        let set = format!(
            "{name}_defined = {}; if ({name}_defined) {name}_value = {expression};",
            all_defined.join(" && ")
        );
        self.dynamic_constant(index..end + 1, (ty, name), &set);
        Ok(end + 1)
    }

    /// Declares a constant that `set` gives its value for each dispatch.
    fn dynamic_constant(&mut self, tokens: Range<usize>, (ty, name): (&str, &str), set: &str) {
        self.dynamic.push(name.to_string());
        let declaration = format!(
            "static {ty} {name}_value; static bool {name}_defined;\n\
             #define {name} msl_constant_value({name}_value, {name}_defined, \"{name}\")\n"
        );
        let line = self.line_directive(tokens.end - 1);
        let span = self.tokens[tokens.start].span.start..self.tokens[tokens.end - 1].span.end;
        self.edits.push((span, format!("{declaration}{line}")));
        self.set_constants.push_str(set);
        self.set_constants.push_str("\n    ");
    }

    /// A directive that keeps line numbers right after an edit that adds lines.
    fn line_directive(&self, token: usize) -> String {
        let before = &self.source[..self.tokens[token].span.end];
        let marker = before
            .rmatch_indices("\n# ")
            .map(|(at, _)| at + 1)
            .next()
            .or(before.starts_with("# ").then_some(0));
        let Some(marker) = marker else { return String::new() };
        let rest = &before[marker..];
        let mut words = rest[2..].split(' ');
        let first: usize = words.next().and_then(|number| number.parse().ok()).unwrap_or(1);
        let file = words.next().unwrap_or("\"\"").lines().next().unwrap_or("\"\"");
        let passed = rest.matches('\n').count();
        format!("#line {} {file}\n", first + passed.saturating_sub(1))
    }

    /// `threadgroup T name[...];` in a body, and not a pointer or a parameter.
    fn declares_variable(&self, index: usize) -> bool {
        if index > 0 && !matches!(self.text(index - 1), ";" | "{" | "}") {
            return false;
        }
        let Ok(end) = self.find(index, ";") else { return false };
        (index + 1..end).all(|at| !matches!(self.text(at), "*" | "&" | "(" | "="))
    }

    fn threadgroup_variable(&mut self, index: usize) -> Result<usize, Error> {
        let end = self.find(index, ";")?;
        let name = (index + 1..end)
            .take_while(|&at| self.text(at) != "[")
            .filter(|&at| self.tokens[at].kind == Kind::Word)
            .last()
            .ok_or_else(|| self.fault(index, "a threadgroup variable without a name"))?;
        let declaration =
            format!("MSL_THREADGROUP({}, {});", self.text(name), self.between(index + 1..end));
        self.replace(index..end + 1, declaration);
        Ok(end + 1)
    }

    /// `vec<T, N>(...)`.
    fn vector(&mut self, index: usize) -> Result<usize, Error> {
        let close = self.after_angle(index + 1)?;
        if self.text(close) == "(" {
            self.replace(index..index + 1, "metal::make_vector".to_string());
        }
        Ok(index + 1)
    }

    fn finish(mut self) -> Result<Generated, Error> {
        self.edits.sort_by_key(|(span, _)| span.start);
        let mut text = String::from("#include \"msl.h\"\n");
        let mut at = 0;
        for (span, with) in &self.edits {
            text.push_str(&self.source[at..span.start]);
            text.push_str(with);
            at = span.end;
        }
        text.push_str(&self.source[at..]);
        text.push_str("\n#line 1 \"entries\"\n#ifndef MSL_TYPECHECK\n");
        let put = |text: &mut String, line: String| {
            text.push_str(&line);
            text.push('\n');
        };
        put(&mut text, format!("static void msl_set_constants() {{\n    {}}}", self.set_constants));
        for (i, entry) in self.entries.iter().enumerate() {
            let Some(parameters) = self.parameters.get(&entry.base) else {
                return Err(Error::Source(format!("`{}` instantiates no kernel", entry.function)));
            };
            let arguments: Vec<_> = parameters
                .iter()
                .enumerate()
                .map(|(j, source)| {
                    let of = format!("msl_signature<decltype({})>::parameter<{j}>", entry.function);
                    source.replacen("<P>", &format!("<{of}>"), 1)
                })
                .collect();
            put(
                &mut text,
                format!(
                    "static void msl_entry_{i}() {{ {}({}); }}",
                    entry.function,
                    arguments.join(", ")
                ),
            );
        }
        text.push_str("static const msl_kernel msl_kernels[] = {\n");
        for (i, entry) in self.entries.iter().enumerate() {
            put(
                &mut text,
                format!("    {{\"{}\", msl_entry_{i}, msl_set_constants}},", entry.name),
            );
        }
        put(&mut text, "};".to_string());
        put(
            &mut text,
            format!(
                "__attribute__((constructor)) static void msl_register_all() {{ \
                 msl_register(msl_kernels, {}); }}\n#else",
                self.entries.len()
            ),
        );
        // Templates are checked in full where they are instantiated.
        for (i, entry) in self.entries.iter().enumerate() {
            put(&mut text, format!("static auto* msl_check_{i} = &{};", entry.function));
        }
        text.push_str("#endif\n");
        let thread_limits = self
            .entries
            .iter()
            .filter_map(|entry| Some((entry.name.clone(), *self.limits.get(&entry.base)?)))
            .collect();
        let kernels = self.entries.into_iter().map(|entry| entry.name).collect();
        Ok(Generated { source: text, kernels, constants: self.constants, thread_limits })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewritten(source: &str) -> String {
        generate(source).unwrap().source.split("\n#line 1 \"entries\"").next().unwrap().to_string()
    }

    #[test]
    fn kernels_and_their_instantiations() {
        let generated = generate(
            "kernel void plain(device float* x [[buffer(0)]], uint i [[thread_position_in_grid]]) \
             {}\n\
             template <typename T, int N> [[kernel]] void typed(device T* x [[buffer(3)]]) {}\n\
             typedef decltype(typed<float, 1>) typed_t;\n\
             template [[host_name(\"typed_half\")]] [[kernel]] typed_t typed<half, 2>;\n\
             template [[host_name(\"typed\" \"_float\")]] [[kernel]] \
             decltype(typed<float, 1>) typed<float, 1>;",
        )
        .unwrap();
        assert_eq!(generated.kernels, ["plain", "typed_half", "typed_float"]);
        assert!(generated.source.contains("typed<half, 2>(msl_parameter<"), "{}", generated.source);
        assert!(!generated.source.contains("[["), "{}", generated.source);
    }

    #[test]
    fn constants_threadgroup_variables_and_vectors() {
        let text = rewritten(
            "constant uint N [[function_constant(4)]];\nconstant uint M = N * 2;\n\
             constant uint K = 3;\n\
             void f() { threadgroup float x[8]; threadgroup float* p = x; \
             float4 v = vec<float, 4>(1); }",
        );
        assert!(text.contains("#define N msl_constant_value"), "{text}");
        assert!(text.contains("#define M msl_constant_value"), "{text}");
        assert!(text.contains("constant uint K = 3;"), "{text}");
        assert!(text.contains("MSL_THREADGROUP(x, float x[8]);"), "{text}");
        assert!(text.contains("threadgroup float* p = x;"), "{text}");
        assert!(text.contains("metal::make_vector<float, 4>(1)"), "{text}");
    }

    #[test]
    fn unknown_syntax_is_an_error() {
        for (source, expected) in [
            ("kernel void f(device float* x) {}", "without an attribute"),
            ("kernel void f(uint x [[amplification_id]]) {}", "amplification_id"),
            ("kernel void f(", "not closed"),
            ("template [[host_name(\"x\")]] kernel t f;", "without template arguments"),
        ] {
            let error = generate(source).unwrap_err().to_string();
            assert!(error.contains(expected), "{source}: {error}");
        }
    }
}
