//! Converts results and panics to a status and an error text.

use std::any::Any;
use std::cell::RefCell;
use std::error::Error as _;
use std::ffi::{CStr, CString, c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

use deltawave::error::{ArgumentError, ArgumentKind, Error, Result};

use crate::abi;

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// Runs the body of a function of the C interface.
pub(crate) fn guard(body: impl FnOnce() -> Result<()>) -> c_int {
    // Formats and drops the error inside `catch_unwind`, because both may panic.
    let outcome = || body().map_err(|error| (status_of(&error), chain(&error)));
    let (status, text) = match catch_unwind(AssertUnwindSafe(outcome)) {
        Ok(Ok(())) => return abi::DW_OK as c_int,
        Ok(Err(said)) => said,
        Err(panic) => (abi::DW_ERROR_INTERNAL, panic_text(&*panic)),
    };
    let text = CString::new(text.replace('\0', "")).unwrap_or_default();
    // A thread that is ending has no thread-local storage for the text. The status still reports the error.
    let _ = LAST_ERROR.try_with(|last| last.replace(text));
    status as c_int
}

/// [`guard`] for functions without a status: only `dw_last_error` reports their panics.
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
        Error::Ranks(_) | Error::Collective(_) => abi::DW_ERROR_RANKS,
        _ => abi::DW_ERROR_RUNTIME,
    }
}

/// Text of an error and of its sources.
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

/// Error that refuses an argument.
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

/// Renames arguments of an error to their names in C: the argument, and the other one of an overlap. `c_name` knows the
/// names that differ from Rust's.
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

/// The architectures that this library has kernels for, separated by commas.
#[unsafe(no_mangle)]
pub extern "C" fn dw_archs() -> *const c_char {
    static ARCHS: OnceLock<CString> = OnceLock::new();
    let joined = || CString::new(deltawave::code_objects::archs().join(",")).unwrap_or_default();
    ARCHS.get_or_init(joined).as_ptr()
}

/// Error text of this thread's last failed call.
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
        // SAFETY: the text belongs to this thread, and no call fails in between.
        let text = unsafe { CStr::from_ptr(dw_last_error()) };
        assert_eq!(text, c"a bug of deltawave: number 7");
    }
}
