//! Module names, put together at compile time.

/// The longest name of a module.
const MAX_BYTES: usize = 48;

/// A module's name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Name {
    bytes: [u8; MAX_BYTES],
    len: usize,
}

impl Name {
    pub const fn new(text: &str) -> Name {
        Name { bytes: [0; MAX_BYTES], len: 0 }.text(text)
    }

    /// Appends a text.
    pub const fn text(mut self, text: &str) -> Name {
        let mut i = 0;
        while i < text.len() {
            self = self.byte(text.as_bytes()[i]);
            i += 1;
        }
        self
    }

    /// Appends a number in decimal digits.
    pub const fn number(self, number: usize) -> Name {
        let before = if number < 10 { self } else { self.number(number / 10) };
        before.byte(b'0' + (number % 10) as u8)
    }

    const fn byte(mut self, byte: u8) -> Name {
        self.bytes[self.len] = byte;
        self.len += 1;
        self
    }

    pub fn as_str(&self) -> &str {
        core::str::from_utf8(&self.bytes[..self.len]).expect("made of strings and digits")
    }
}

impl core::fmt::Debug for Name {
    fn fmt(&self, f: &mut core::fmt::Formatter) -> core::fmt::Result {
        self.as_str().fmt(f)
    }
}
