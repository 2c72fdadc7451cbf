//! PTX with relative numbers, which compresses to about half of the size.
//!
//! Compilers give each register and label of PTX a number of its own: `%r1204`, `$L__BB0_37`. Code
//! that repeats has other numbers each time, so a compressor finds no repetition. In relative PTX,
//! a number is the difference to the one before it of the same class (`%r`, `$L__BB0_`). There,
//! code that repeats is the same text.

use alloc::string::ToString;
use alloc::vec::Vec;

/// What labels begin with; the number of the function, `_` and the label's own number follow.
const LABEL: &[u8] = b"$L__BB";

/// Makes the numbers of registers and labels relative.
#[must_use]
pub fn encode(text: &[u8]) -> Vec<u8> {
    renumber(text, |number, before| Renumbered { written: number - before, absolute: number })
}

/// Undoes [`encode`]. Of other text it makes nothing of use.
#[must_use]
pub fn decode(text: &[u8]) -> Vec<u8> {
    renumber(text, |difference, before| {
        let absolute = before.saturating_add(difference);
        Renumbered { written: absolute, absolute }
    })
}

struct Renumbered {
    written: i64,
    absolute: i64,
}

/// Replaces the number of every register and label. `step` gets it and the absolute number before
/// it of its class, 0 at first.
fn renumber(text: &[u8], step: impl Fn(i64, i64) -> Renumbered) -> Vec<u8> {
    let mut classes: Vec<(&[u8], i64)> = Vec::new();
    let mut out = Vec::with_capacity(text.len() + text.len() / 4);
    let mut rest = text;
    while let Some(&first) = rest.first() {
        let class_len = class_len(rest);
        let number_len = number_len(&rest[class_len..]);
        if class_len == 0 || number_len == 0 {
            out.push(first);
            rest = &rest[1..];
            continue;
        }
        let (class, after) = rest.split_at(class_len);
        let (number, after) = after.split_at(number_len);
        rest = after;
        let place = classes.iter().position(|(known, _)| *known == class).unwrap_or_else(|| {
            classes.push((class, 0));
            classes.len() - 1
        });
        let before = &mut classes[place].1;
        let Renumbered { written, absolute } = step(parse(number), *before);
        *before = absolute;
        out.extend_from_slice(class);
        out.extend_from_slice(written.to_string().as_bytes());
    }
    out
}

/// The length of a register's or label's class at the start of a text; 0 if there is none.
fn class_len(text: &[u8]) -> usize {
    let run = |from: usize, is_in: fn(&u8) -> bool| {
        text[from..].iter().position(|byte| !is_in(byte)).unwrap_or(text.len() - from)
    };
    if text.first() == Some(&b'%') {
        return 1 + run(1, u8::is_ascii_lowercase);
    }
    if !text.starts_with(LABEL) {
        return 0;
    }
    let end = LABEL.len() + run(LABEL.len(), u8::is_ascii_digit);
    if text.get(end) == Some(&b'_') { end + 1 } else { 0 }
}

/// The length of the number at the start of a text, with its sign; 0 if there is none.
fn number_len(text: &[u8]) -> usize {
    let sign = usize::from(text.first() == Some(&b'-'));
    match text[sign..].iter().take_while(|byte| byte.is_ascii_digit()).count() {
        0 => 0,
        digits => sign + digits,
    }
}

fn parse(number: &[u8]) -> i64 {
    let digits = number.strip_prefix(b"-");
    let value = digits.unwrap_or(number).iter().fold(0i64, |value, digit| {
        value.saturating_mul(10).saturating_add(i64::from(digit - b'0'))
    });
    if digits.is_some() { -value } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_count_from_the_one_before_of_their_class() {
        let ptx = b"$L__BB0_7:\n@%p2 bra $L__BB0_9;\nadd.s32 %r12, %r10, 5;\nld [%rd3+-16];\n";
        let relative = encode(ptx);
        assert_eq!(
            relative,
            b"$L__BB0_7:\n@%p2 bra $L__BB0_2;\nadd.s32 %r12, %r-2, 5;\nld [%rd3+-16];\n"
        );
        assert_eq!(decode(&relative), ptx);
    }

    #[test]
    fn any_text_comes_back_or_is_left() {
        for text in ["", "%", "%r", "% 5", "$L__BB", "$L__BB12", "%tid.x %r<90> %r-3 -4 %clock64"] {
            assert_eq!(decode(&encode(text.as_bytes())), text.as_bytes());
        }
        let long = decode(b"%r99999999999999999999 %r9 %r-99999999999999999999");
        assert!(long.starts_with(b"%r9223372036854775807 %r9223372036854775807 %r"));
    }
}
