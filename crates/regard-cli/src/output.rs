//! The end of a command, and its output: results on stdout, errors and progress on stderr.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use regard::Error;
use serde::Serialize;
use std::borrow::Cow;
use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

/// Exit status: something was run or checked and failed, or there was nothing to check.
pub const FAILED: u8 = 1;
/// Exit status: the command was not understood (also clap's).
pub const USAGE: u8 = 2;
/// Exit status: no kernel of this version runs that there.
pub const REFUSED: u8 = 3;
/// Exit status if the output pipe is closed: the status that a shell reports for SIGPIPE.
const PIPE_CLOSED: u8 = 128 + 13;

/// The reason why a command stops before its end.
#[derive(Debug)]
pub enum Stop {
    /// The command was not understood.
    Usage(String),
    /// No kernel runs it there.
    Refused(String),
    /// It could not be done.
    Failed(String),
    /// The output cannot be written.
    Output(io::Error),
}

impl From<Error> for Stop {
    fn from(error: Error) -> Stop {
        match error {
            Error::Refused(refusal) => Stop::Refused(refusal.to_string()),
            Error::Driver { .. } => Stop::Failed(error.to_string()),
            error => Stop::Usage(error.to_string()),
        }
    }
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Stop {
        Stop::Output(error)
    }
}

impl Stop {
    /// Prints the reason on stderr and returns the exit status.
    pub fn report(self) -> u8 {
        let (message, status) = match self {
            Stop::Usage(message) => (message, USAGE),
            Stop::Refused(message) => (message, REFUSED),
            Stop::Failed(message) => (message, FAILED),
            Stop::Output(error) if error.kind() == io::ErrorKind::BrokenPipe => return PIPE_CLOSED,
            Stop::Output(error) => (format!("cannot write the output: {error}"), FAILED),
        };
        error(&message);
        status
    }
}

/// One line on stderr. Errors are ignored: stderr may be closed.
pub fn error(message: &str) {
    let _ = writeln!(io::stderr(), "error: {}", printable(&message.replace('\n', " ")));
}

/// Prints an error of the command line's parser on stderr.
pub fn usage_error(message: &str) {
    let _ = write!(io::stderr(), "{}", printable(message));
}

/// Text on stdout.
pub fn print(text: &str) -> Result<(), Stop> {
    print_as_it_is(&printable(text))
}

fn print_as_it_is(text: &str) -> Result<(), Stop> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}

/// Text that does nothing to a terminal but show itself: names of files, and strings in them, can
/// hold anything. Control characters other than the ends of lines become `\u{1b}` and the like.
pub fn printable(text: &str) -> Cow<'_, str> {
    match text.contains(is_control) {
        false => text.into(),
        true => text
            .chars()
            .fold(String::new(), |mut shown, c| {
                if is_control(c) {
                    shown.extend(c.escape_unicode());
                } else {
                    shown.push(c);
                }
                shown
            })
            .into(),
    }
}

/// Characters that terminals interpret: control characters, and characters that change the text
/// direction.
fn is_control(c: char) -> bool {
    const DIRECTIONS: [char; 12] = [
        '\u{61c}', '\u{200e}', '\u{200f}', '\u{202a}', '\u{202b}', '\u{202c}', '\u{202d}',
        '\u{202e}', '\u{2066}', '\u{2067}', '\u{2068}', '\u{2069}',
    ];
    c.is_control() && c != '\n' || DIRECTIONS.contains(&c)
}

/// A value as indented JSON on stdout.
pub fn print_json(value: &impl Serialize) -> Result<(), Stop> {
    let text =
        serde_json::to_string_pretty(value).map_err(|error| Stop::Failed(error.to_string()))?;
    // Characters that JSON need not escape but terminals interpret. They occur in strings only.
    let escaped = text.chars().fold(String::with_capacity(text.len() + 1), |mut escaped, c| {
        match is_control(c) {
            true => escaped += &format!("\\u{:04x}", u32::from(c)),
            false => escaped.push(c),
        }
        escaped
    });
    print_as_it_is(&(escaped + "\n"))
}

/// A progress bar on stderr, for work that turns out to be long: shown after half a second, and
/// only on a terminal.
pub struct Progress {
    bar: ProgressBar,
    started: Instant,
    terminal: bool,
}

impl Progress {
    /// A bar for that many files; never shown if not `wanted`.
    pub fn new(steps: usize, wanted: bool) -> Progress {
        Progress::for_steps("files", steps, wanted)
    }

    /// A bar for that many steps, called so; never shown if not `wanted`.
    pub fn for_steps(steps_name: &str, steps: usize, wanted: bool) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(steps as u64), ProgressDrawTarget::hidden());
        let template = format!("{{bar:40}} {{pos}}/{{len}} {steps_name}, {{eta}} left  {{msg}}");
        if let Ok(style) = ProgressStyle::with_template(&template) {
            bar.set_style(style);
        }
        Progress { bar, started: Instant::now(), terminal: wanted && io::stderr().is_terminal() }
    }

    /// Sets the subject of the next step.
    pub fn about(&self, what: &str) {
        self.bar.set_message(printable(what).into_owned());
    }

    /// One step done.
    pub fn step(&self) {
        if self.terminal
            && self.bar.is_hidden()
            && self.started.elapsed() > Duration::from_millis(500)
        {
            self.bar.set_draw_target(ProgressDrawTarget::stderr());
        }
        self.bar.inc(1);
    }

    /// Does something that prints, the bar out of the way.
    pub fn aside<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    /// Takes the bar away.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(
            printable("a\u{1b}[31m\tb\n\u{9b}c\u{202e}d\r"),
            "a\\u{1b}[31m\\u{9}b\n\\u{9b}c\\u{202e}d\\u{d}"
        );
        assert!(matches!(printable("plain, caf\u{e9}, \u{65e5}\n"), Cow::Borrowed(_)));
    }
}
