//! State around a call of the CUDA driver: initialisation, HIP's current device, the last error.

use core::cell::{Cell, RefCell};
use core::ffi::{CStr, c_char, c_int};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::driver::{
    Device, Driver, Failure, Handle, INVALID_DEVICE, NOT_READY, NOT_SUPPORTED, Outcome,
};
use crate::hipError_t;

thread_local! {
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
    static LAST_ERROR: Cell<hipError_t> = const { Cell::new(hipError_t::hipSuccess) };
    static LAST_FAILURE: RefCell<Option<Failure>> = const { RefCell::new(None) };
}

/// A device's primary context, once it is retained.
struct Primary(Handle);

// SAFETY: a context is a name that the driver gave out; any thread may use it.
unsafe impl Send for Primary {}

/// The primary contexts, by device.
static PRIMARY: Mutex<Vec<Primary>> = Mutex::new(Vec::new());

fn primary() -> MutexGuard<'static, Vec<Primary>> {
    PRIMARY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs a call that needs no context, and returns its HIP status.
pub(crate) fn without_context(work: impl FnOnce(&'static Driver) -> Outcome) -> hipError_t {
    answer(initialised().and_then(work))
}

/// Runs a call in the primary context of the thread's device, and returns its HIP status.
pub(crate) fn in_context(work: impl FnOnce(&'static Driver) -> Outcome) -> hipError_t {
    answer(entered().and_then(work))
}

/// The driver, in the primary context of the thread's device.
pub(super) fn entered() -> Outcome<&'static Driver> {
    let driver = initialised()?;
    enter(driver, DEVICE.get())?;
    Ok(driver)
}

fn answer(outcome: Outcome) -> hipError_t {
    let Err(failure) = outcome else {
        return hipError_t::hipSuccess;
    };
    let code = status(failure.code);
    // 'Not yet' is an answer, not an error.
    let kept = (failure.code != NOT_READY).then_some(failure);
    if kept.is_some() {
        LAST_ERROR.set(code);
    }
    // A thread that is ending cannot store the text any more, and a panic here would end the process.
    let _ = LAST_FAILURE.try_with(|last| last.replace(kept));
    code
}

/// The HIP code of a driver code.
fn status(code: c_int) -> hipError_t {
    const CALL_REQUIRES_NEWER_DRIVER: c_int = 36;
    match code {
        CALL_REQUIRES_NEWER_DRIVER => hipError_t::hipErrorInsufficientDriver,
        code => hipError_t(code),
    }
}

fn initialised() -> Outcome<&'static Driver> {
    static READY: AtomicBool = AtomicBool::new(false);
    let driver = Driver::get().ok_or(Failure::refused(NOT_SUPPORTED))?;
    if !READY.load(Ordering::Acquire) {
        // SAFETY: no pointers are involved.
        unsafe { driver.cuInit(0)? };
        READY.store(true, Ordering::Release);
    }
    Ok(driver)
}

/// Makes the primary context of device `ordinal` the thread's current context.
fn enter(driver: &Driver, ordinal: c_int) -> Outcome {
    let index = usize::try_from(ordinal).map_err(|_| Failure::refused(INVALID_DEVICE))?;
    let context = {
        let mut contexts = primary();
        match contexts.get(index) {
            Some(Primary(context)) if !context.is_null() => *context,
            _ => {
                let device = device(driver, ordinal)?;
                let mut context = null_mut();
                // SAFETY: `context` is valid for a write.
                unsafe { driver.cuDevicePrimaryCtxRetain(&mut context, device)? };
                while contexts.len() <= index {
                    contexts.push(Primary(null_mut()));
                }
                contexts[index] = Primary(context);
                context
            }
        }
    };
    // SAFETY: the context is retained.
    unsafe { driver.cuCtxSetCurrent(context) }
}

/// The driver's handle of device `ordinal`.
pub(crate) fn device(driver: &Driver, ordinal: c_int) -> Outcome<Device> {
    let mut device = 0;
    // SAFETY: `device` is valid for a write.
    unsafe { driver.cuDeviceGet(&mut device, ordinal)? };
    Ok(device)
}

/// The thread's current device.
pub(crate) fn current_device() -> c_int {
    DEVICE.get()
}

/// Makes device `ordinal` the thread's current one.
pub(crate) fn set_device(driver: &Driver, ordinal: c_int) -> Outcome {
    enter(driver, ordinal)?;
    DEVICE.set(ordinal);
    Ok(())
}

/// Destroys everything on the thread's device: resets its primary context.
pub(crate) fn reset(driver: &Driver) -> Outcome {
    let ordinal = DEVICE.get();
    let device = device(driver, ordinal)?;
    let mut contexts = primary();
    let known = usize::try_from(ordinal)
        .ok()
        .and_then(|i| contexts.get_mut(i));
    if let Some(context) = known.filter(|context| !context.0.is_null()) {
        // SAFETY: it was retained once, and is not used any more.
        unsafe { driver.cuDevicePrimaryCtxRelease_v2(device)? };
        context.0 = null_mut();
    }
    // SAFETY: the caller wants everything on the device gone.
    unsafe { driver.cuDevicePrimaryCtxReset_v2(device) }
}

/// Returns the thread's last error and clears it.
pub(crate) fn take_last_error() -> hipError_t {
    LAST_ERROR.replace(hipError_t::hipSuccess)
}

/// Describes the driver's failure in the thread's last call: function, code, log.
pub(crate) fn last_failure() -> Option<String> {
    let Failure {
        function,
        code,
        log,
    } = LAST_FAILURE.try_with(RefCell::take).ok()??;
    if function.is_empty() {
        return None;
    }
    let name = text(code, Driver::cuGetErrorName);
    let meaning = text(code, Driver::cuGetErrorString);
    let known = |text: Option<&CStr>| text.map(|text| text.to_string_lossy().into_owned());
    let mut out = format!(
        "{function} returned {}",
        known(name).unwrap_or_else(|| code.to_string())
    );
    if let Some(meaning) = known(meaning) {
        out += &format!(" ({meaning})");
    }
    if !log.is_empty() {
        out += "\n";
        out += log.trim_end();
    }
    Some(out)
}

type Describe = unsafe fn(&Driver, c_int, *mut *const c_char) -> Outcome;

/// The driver's text for `code`; `None` if the driver does not know the code.
pub(crate) fn text(code: c_int, describe: Describe) -> Option<&'static CStr> {
    let driver = Driver::get()?;
    let mut found = null();
    // SAFETY: `found` is valid for a write; an answer lives as long as the driver.
    unsafe {
        describe(driver, code, &mut found).ok()?;
        (!found.is_null()).then(|| CStr::from_ptr(found))
    }
}

/// Defines HIP functions. Each has a body that gives [`Outcome`] and runs in the thread's context or without one.
/// `needs` lists the driver functions that it requires.
macro_rules! hip_functions {
    ($($around:ident fn $name:ident($($arg:ident: $type:ty),*) needs [$($symbol:ident),*] |$driver:ident| $body:block)*) => {
        /// The driver functions that each HIP function needs.
        pub(super) const BEHIND: &[(&str, &[&str])] = &[$((stringify!($name), &[$(stringify!($symbol)),*]),)*];
        $(
            // A body may need no `unsafe`.
            #[allow(unused_unsafe, non_snake_case, clippy::too_many_arguments, clippy::missing_safety_doc)]
            pub unsafe extern "C" fn $name($($arg: $type),*) -> crate::hipError_t {
                // SAFETY: the caller keeps the function's contract.
                super::state::$around(|$driver| unsafe { $body })
            }
        )*
    };
}
pub(super) use hip_functions;

/// A pointer argument that must not be null.
pub(crate) fn given<T>(pointer: *mut T) -> Outcome<*mut T> {
    match pointer.is_null() {
        true => Err(Failure::refused(super::driver::INVALID_VALUE)),
        false => Ok(pointer),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of thread-local variables may own device memory, which is freed when their thread ends.
    #[test]
    fn calls_that_fail_while_a_thread_ends_return_their_status() {
        use std::sync::mpsc::{Sender, channel};

        struct Late(Sender<(hipError_t, Option<String>)>);
        impl Drop for Late {
            fn drop(&mut self) {
                assert!(LAST_FAILURE.try_with(|_| ()).is_err(), "it is still there");
                let status = answer(Err(Failure::refused(INVALID_DEVICE)));
                self.0
                    .send((status, last_failure()))
                    .expect("the test waits");
            }
        }
        thread_local! {
            static LATE: RefCell<Option<Late>> = const { RefCell::new(None) };
        }
        let (to, from) = channel();
        // Destructors run in the opposite order of first uses.
        std::thread::spawn(move || {
            LATE.set(Some(Late(to)));
            LAST_FAILURE.set(None);
        })
        .join()
        .expect("no panic");
        let expected = (hipError_t::hipErrorInvalidDevice, None);
        assert_eq!(from.recv().expect("one status"), expected);
    }

    /// Numbers that both interfaces use, from the headers of CUDA 13 and ROCm 6. The first name is the driver's.
    #[test]
    fn codes_of_equal_meaning_have_equal_numbers() {
        for (cuda, code, hip) in [
            ("INVALID_VALUE", 1, "hipErrorInvalidValue"),
            ("OUT_OF_MEMORY", 2, "hipErrorOutOfMemory"),
            ("NOT_INITIALIZED", 3, "hipErrorNotInitialized"),
            (
                "CALL_REQUIRES_NEWER_DRIVER",
                36,
                "hipErrorInsufficientDriver",
            ),
            ("NO_DEVICE", 100, "hipErrorNoDevice"),
            ("INVALID_DEVICE", 101, "hipErrorInvalidDevice"),
            ("INVALID_IMAGE", 200, "hipErrorInvalidImage"),
            ("INVALID_CONTEXT", 201, "hipErrorInvalidContext"),
            ("NO_BINARY_FOR_GPU", 209, "hipErrorNoBinaryForGpu"),
            ("ECC_UNCORRECTABLE", 214, "hipErrorECCNotCorrectable"),
            ("INVALID_PTX", 218, "hipErrorInvalidKernelFile"),
            ("INVALID_HANDLE", 400, "hipErrorInvalidHandle"),
            ("NOT_FOUND", 500, "hipErrorNotFound"),
            ("NOT_READY", 600, "hipErrorNotReady"),
            ("ILLEGAL_ADDRESS", 700, "hipErrorIllegalAddress"),
            (
                "LAUNCH_OUT_OF_RESOURCES",
                701,
                "hipErrorLaunchOutOfResources",
            ),
            ("LAUNCH_TIMEOUT", 702, "hipErrorLaunchTimeOut"),
            ("CONTEXT_IS_DESTROYED", 709, "hipErrorContextIsDestroyed"),
            ("ASSERT", 710, "hipErrorAssert"),
            ("LAUNCH_FAILED", 719, "hipErrorLaunchFailure"),
            ("NOT_SUPPORTED", 801, "hipErrorNotSupported"),
            (
                "STREAM_CAPTURE_UNSUPPORTED",
                900,
                "hipErrorStreamCaptureUnsupported",
            ),
            (
                "STREAM_CAPTURE_INVALIDATED",
                901,
                "hipErrorStreamCaptureInvalidated",
            ),
            (
                "STREAM_CAPTURE_WRONG_THREAD",
                908,
                "hipErrorStreamCaptureWrongThread",
            ),
            ("UNKNOWN", 999, "hipErrorUnknown"),
        ] {
            assert_eq!(status(code).name(), Some(hip), "CUDA_ERROR_{cuda}");
        }
        // Misaligned address: HIP has no code of this meaning.
        assert_eq!(status(716), hipError_t(716));
        assert!(status(716).is_poisoned() && !status(721 - 1).is_poisoned());
    }
}
