//! The end of every call: a status for the caller, an error message for this thread, and no panic
//! that unwinds into C.

use crate::types::Status;
use regard::Error;
use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

#[cfg(panic = "abort")]
compile_error!("regard-capi turns panics into error codes: build it with panic = \"unwind\"");

/// The reason why a call failed.
pub struct Failure {
    pub status: Status,
    pub text: String,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        let status = match &error {
            Error::Argument { .. } | Error::OutOfPages { .. } => Status::Argument,
            Error::Refused(_) => Status::Refused,
            Error::Driver { .. } => Status::Device,
            _ => Status::Internal,
        };
        Failure { status, text: error.to_string() }
    }
}

thread_local! {
    /// The words of this thread's last failure.
    static LAST: RefCell<CString> = RefCell::default();
}

/// A C string. Zero bytes inside are replaced.
pub fn c_text(text: String) -> CString {
    CString::new(text).unwrap_or_else(|error| {
        let clean = String::from_utf8_lossy(&error.into_vec()).replace('\0', "\u{fffd}");
        CString::new(clean).expect("no zero is left")
    })
}

/// The words of this thread's last failure; empty if there was none.
pub fn last() -> *const c_char {
    // A thread that is ending has none left.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

fn remember(text: String) {
    let text = c_text(text);
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// Runs the body of an entry point. A failure is remembered; a panic becomes one.
pub fn guarded<T>(body: impl FnOnce() -> Result<T, Failure>) -> Result<T, Status> {
    // Everything the body changes is either its own or an output, which an error leaves
    // unspecified.
    let result = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = format!("a defect in regard: {}", message(&*payload));
        // Dropping the payload could panic again.
        std::mem::forget(payload);
        Err(Failure { status: Status::Internal, text })
    });
    result.map_err(|Failure { status, text }| {
        remember(text);
        status
    })
}

/// As [`guarded`], for entry points that answer a status.
pub fn status(body: impl FnOnce() -> Result<(), Failure>) -> Status {
    guarded(body).err().unwrap_or(Status::Ok)
}

/// As [`guarded`], for entry points that answer a text, null on failure.
pub fn text(body: impl FnOnce() -> Result<*const c_char, Failure>) -> *const c_char {
    guarded(body).unwrap_or(ptr::null())
}

fn message(payload: &(dyn Any + Send)) -> &str {
    let text = payload.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic without a message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    #[test]
    fn a_panic_becomes_a_status_and_words() {
        let found = status(|| panic!("no such {}", "thing"));
        assert_eq!(found, Status::Internal);
        // SAFETY: the text lives until this thread's next failure.
        let words = unsafe { CStr::from_ptr(last()) };
        assert_eq!(words, c"a defect in regard: no such thing");
    }

    #[test]
    fn a_zero_inside_a_text_does_not_end_it() {
        assert_eq!(c_text("a\0b".into()).to_str(), Ok("a\u{fffd}b"));
    }
}
