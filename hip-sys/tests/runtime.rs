//! Tests the bindings with a real HIP runtime without a device, and with functions of this process.

use hip_sys::{Hip, HipError, LoadError, hipDeviceProp_tR0600, hipError_t};
use std::ffi::{c_int, c_void};
use std::path::Path;

/// Debian's HIP 5.2 runtime (package libamdhip64-5).
const DEBIAN: &str = "/usr/lib/x86_64-linux-gnu/libamdhip64.so.5";

/// The real runtime, or a line that says why the test is skipped.
fn debian() -> Option<Hip> {
    if Path::new(DEBIAN).exists() {
        return Some(Hip::load(Some(Path::new(DEBIAN))).expect("the file loads"));
    }
    let text = format!("skipped: {DEBIAN} is missing (package libamdhip64-5)");
    assert!(
        std::env::var_os("DELTAWAVE_REQUIRE_KERNELS").is_none_or(|v| v != "1"),
        "{text}"
    );
    println!("{text}");
    None
}

#[test]
fn a_runtime_without_devices_is_a_typed_error() {
    let Some(hip) = debian() else { return };
    let mut count: c_int = -1;
    // SAFETY: `count` is valid for the call.
    let error = unsafe { hip.hipGetDeviceCount(&mut count) };
    if error.is_ok() {
        println!("skipped: this machine has {count} devices");
        return;
    }
    let error = error.expect_err("no device");
    assert_eq!(error.code(), Some(hipError_t::hipErrorNoDevice));
    assert_eq!(error.call(), "hipGetDeviceCount");
    assert!(!error.is_poisoned());
    let text = error.to_string();
    assert!(text.contains("hipErrorNoDevice (100)"), "{text}");
    assert!(text.contains(DEBIAN), "{text}");
}

#[test]
fn a_missing_function_is_an_error_of_the_call() {
    let Some(hip) = debian() else { return };
    assert!(hip.has("hipMalloc"));
    assert!(!hip.has("hipGetDevicePropertiesR0600"));
    let mut properties = hipDeviceProp_tR0600::zeroed();
    // SAFETY: `properties` is valid for the call.
    let error = unsafe { hip.hipGetDevicePropertiesR0600(&mut properties, 0) };
    let error = error.expect_err("HIP 5.2 lacks it");
    assert!(matches!(error, HipError::MissingSymbol { .. }), "{error:?}");
    let text = error.to_string();
    assert!(text.contains("hipGetDevicePropertiesR0600") && text.contains(DEBIAN));
    let source = std::error::Error::source(&error).expect("the loader's message");
    let text = source.to_string();
    assert!(text.contains("hipGetDevicePropertiesR0600"), "{text}");
}

#[test]
fn codes_that_this_crate_does_not_know_are_named_by_the_runtime() {
    fn resolve(name: &str) -> *const c_void {
        extern "C" fn init(_: u32) -> hipError_t {
            hipError_t(4242)
        }
        extern "C" fn error_name(_: hipError_t) -> *const std::ffi::c_char {
            c"hipErrorFromTheFuture".as_ptr()
        }
        match name {
            "hipInit" => init as *const c_void,
            "hipGetErrorName" => error_name as *const c_void,
            _ => std::ptr::null(),
        }
    }
    // SAFETY: the two functions have the signatures of the table.
    let hip = unsafe { Hip::from_resolver("a test", resolve) };
    // SAFETY: no pointers are involved.
    let error = unsafe { hip.hipInit(0) }.expect_err("4242");
    assert_eq!(
        error.to_string(),
        "hipInit failed with hipErrorFromTheFuture (4242) in a test"
    );
    // SAFETY: no pointers are involved.
    let error = unsafe { hip.hipDeviceSynchronize() }.expect_err("missing");
    assert_eq!(
        error.to_string(),
        "a test has no function hipDeviceSynchronize"
    );
}

#[test]
fn a_wrong_explicit_path_is_an_error() {
    let error = Hip::load(Some(Path::new("/nonexistent/libamdhip64.so"))).expect_err("no file");
    assert!(matches!(error, LoadError::Explicit { .. }), "{error:?}");
    assert!(error.to_string().contains("/nonexistent/libamdhip64.so"));
    assert!(std::error::Error::source(&error).is_some());
}

#[test]
fn a_runtime_that_is_mapped_already_is_taken() {
    if debian().is_none() || std::env::var_os(hip_sys::LIBRARY_VARIABLE).is_some() {
        return;
    }
    let hip = Hip::load(None).expect("it is mapped");
    assert!(hip.library().starts_with("libamdhip64.so"), "{hip:?}");
}

#[test]
fn every_function_but_the_versioned_ones_is_in_hip_5() {
    let Some(hip) = debian() else { return };
    let missing: Vec<_> = Hip::FUNCTIONS.iter().filter(|f| !hip.has(f)).collect();
    assert_eq!(
        missing,
        [&"hipGetDevicePropertiesR0600", &"hipStreamGetDevice"]
    );
}
