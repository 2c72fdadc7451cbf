//! Splits preprocessed C++ into tokens, as far as the generator distinguishes them.

use std::ops::Range;

/// The kind of a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// An identifier or keyword.
    Word,
    /// A number, string or character.
    Literal,
    /// One character of punctuation.
    Mark,
}

/// A token: a piece of the source.
#[derive(Debug, Clone)]
pub struct Token {
    /// Its kind.
    pub kind: Kind,
    /// Its place in the source, in bytes.
    pub span: Range<usize>,
}

/// The tokens of `source`. Comments and lines that start with `#` are skipped.
pub fn tokens(source: &str) -> Vec<Token> {
    let bytes = source.as_bytes();
    let mut tokens = Vec::new();
    let mut at = 0;
    let mut line_begins = true;
    while at < bytes.len() {
        let start = at;
        let byte = bytes[at];
        if byte.is_ascii_whitespace() {
            line_begins |= byte == b'\n';
            at += 1;
            continue;
        }
        if byte == b'#' && line_begins || bytes[at..].starts_with(b"//") {
            at = source[at..].find('\n').map_or(bytes.len(), |length| at + length);
            continue;
        }
        if bytes[at..].starts_with(b"/*") {
            at = source[at..].find("*/").map_or(bytes.len(), |length| at + length + 2);
            continue;
        }
        line_begins = false;
        let kind = if byte == b'"' || byte == b'\'' {
            at += 1;
            while at < bytes.len() && bytes[at] != byte {
                at += if bytes[at] == b'\\' { 2 } else { 1 };
            }
            at = (at + 1).min(bytes.len());
            Kind::Literal
        } else if byte.is_ascii_digit() {
            while at < bytes.len()
                && (bytes[at].is_ascii_alphanumeric()
                    || bytes[at] == b'.'
                    || matches!(bytes[at], b'+' | b'-') && matches!(bytes[at - 1], b'e' | b'E'))
            {
                at += 1;
            }
            Kind::Literal
        } else if byte.is_ascii_alphabetic() || byte == b'_' {
            while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'_') {
                at += 1;
            }
            Kind::Word
        } else {
            at += source[at..].chars().next().map_or(1, char::len_utf8);
            Kind::Mark
        };
        tokens.push(Token { kind, span: start..at });
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(source: &str) -> Vec<&str> {
        tokens(source).into_iter().map(|token| &source[token.span]).collect()
    }

    #[test]
    fn words_numbers_strings_and_marks() {
        assert_eq!(texts("a_1 += 1.5e-3f;"), ["a_1", "+", "=", "1.5e-3f", ";"]);
        assert_eq!(
            texts("f(\"a \\\" b\", 'c') // no\n/* nor\nthis */ x"),
            ["f", "(", "\"a \\\" b\"", ",", "'c'", ")", "x"]
        );
        assert_eq!(
            texts("# 1 \"file\"\n[[buffer(0)]]"),
            ["[", "[", "buffer", "(", "0", ")", "]", "]"]
        );
    }
}
