//! From results and panics to a status and the text behind it.

use std::any::Any;
use std::cell::RefCell;
use std::error::Error as _;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};

use deltawave::error::{ArgumentError, ArgumentKind, Error, Result};

use crate::abi;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs the body of a function of the C interface.
pub(crate) fn guard(body: impl FnOnce() -> Result<()>) -> c_int {
    // What an error says is put together, and the error dropped, where a panic is caught too.
    let outcome = || body().map_err(|error| (status_of(&error), chain(&error)));
    let (status, text) = match catch_unwind(AssertUnwindSafe(outcome)) {
        Ok(Ok(())) => return abi::DW_OK as c_int,
        Ok(Err(said)) => said,
        Err(panic) => (abi::DW_ERROR_INTERNAL, panic_text(&*panic)),
    };
    let text = CString::new(text.replace('\0', "")).unwrap_or_default();
    // A thread that is ending has no place for the text any more; the status still says what happened.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    status as c_int
}

/// As [`guard`], for functions that return nothing: a panic there has nobody to be told to.
pub(crate) fn guard_silent(body: impl FnOnce()) {
    guard(|| {
        body();
        Ok(())
    });
}

fn status_of(error: &Error) -> u32 {
    match error {
        Error::Argument(_) => abi::DW_ERROR_ARGUMENT,
        Error::Load(_)
        | Error::NoSimulator
        | Error::NoSuchDevice { .. }
        | Error::MissingKernels { .. }
        | Error::MissingKernel { .. } => abi::DW_ERROR_DEVICE,
        _ => abi::DW_ERROR_RUNTIME,
    }
}

/// An error and what it came from.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text.push_str(": ");
        text.push_str(&error.to_string());
        source = error.source();
    }
    text
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let said = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("a bug of deltawave: {}", said.unwrap_or("a panic"))
}

/// The error of an argument.
pub(crate) fn refuse(
    argument: impl ToString,
    kind: ArgumentKind,
    was: impl ToString,
    allowed: impl ToString,
) -> ArgumentError {
    ArgumentError {
        argument: argument.to_string(),
        kind,
        was: was.to_string(),
        allowed: allowed.to_string(),
    }
}

/// An error by the names that arguments have in C, where `c_name` knows another than in Rust: of the argument and, where
/// that overlaps another, of the other.
pub(crate) fn renamed(
    error: ArgumentError,
    c_name: impl Fn(&str) -> Option<&'static str>,
) -> ArgumentError {
    const BEFORE: &str = "it overlaps ";
    let argument = c_name(&error.argument).map_or(error.argument, str::to_owned);
    let other = (error.was.strip_prefix(BEFORE))
        .filter(|_| error.kind == ArgumentKind::Overlap)
        .and_then(|rest| rest.split_once(','));
    let was = match other.and_then(|(name, rest)| Some((c_name(name)?, rest))) {
        Some((name, rest)) => format!("{BEFORE}{name},{rest}"),
        None => error.was,
    };
    ArgumentError {
        argument,
        was,
        ..error
    }
}

/// `DW_ABI_VERSION` of this library.
#[unsafe(no_mangle)]
pub extern "C" fn dw_abi_version() -> c_int {
    abi::DW_ABI_VERSION as c_int
}

/// The version of this library.
#[unsafe(no_mangle)]
pub extern "C" fn dw_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => unreachable!(),
        };
    VERSION.as_ptr()
}

/// What was wrong with this thread's last call that failed.
#[unsafe(no_mangle)]
pub extern "C" fn dw_last_error() -> *const c_char {
    LAST_ERROR
        .try_with(|last| last.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_a_status() {
        let status = guard(|| panic!("number {}", 7));
        assert_eq!(status, abi::DW_ERROR_INTERNAL as c_int);
        // SAFETY: the text is of this thread, and nothing fails in between.
        let text = unsafe { CStr::from_ptr(dw_last_error()) };
        assert_eq!(text, c"a bug of deltawave: number 7");
    }
}
