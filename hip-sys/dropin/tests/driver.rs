//! The drop-in over a stand-in for the CUDA driver, as a HIP program sees it.
#![cfg(target_os = "linux")]

use std::ffi::{CStr, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::null_mut;

use hip_sys::{Hip, HipError, hipDeviceProp_tR0000, hipDeviceProp_tR0600, hipError_t};

/// The drop-in lies beside the test, where cargo puts it.
fn drop_in() -> PathBuf {
    let test = std::env::current_exe().expect("this test's path");
    test.with_file_name("libhip_on_cuda.so")
}

fn open() -> Hip {
    Hip::load(Some(&drop_in())).expect("the drop-in loads")
}

/// Runs an ignored test of this file in a process of its own, in which the loader looks into a folder first.
fn run_alone(test: &str, folder: &Path) -> String {
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args([test, "--exact", "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", folder)
        .output()
        .expect("it starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(
        output.status.success() && out.contains("1 passed"),
        "{out}{err}"
    );
    err
}

/// Compiles the stand-in. None, and a line that says why, without a C compiler.
fn stand_in() -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("driver");
    std::fs::create_dir_all(&folder).expect("a folder");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fake_cuda.c");
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&folder.join("libcuda.so.1"), &source])
        .status();
    match status {
        Ok(status) => {
            assert!(status.success(), "the stand-in does not compile");
            Some(folder)
        }
        Err(error) => {
            let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
            assert!(!required, "cc: {error}");
            println!("skipped: cc: {error}");
            None
        }
    }
}

#[test]
fn a_hip_program_finds_the_drivers_devices() {
    if let Some(folder) = stand_in() {
        run_alone("with_a_driver", &folder);
    }
}

#[test]
#[ignore = "runs in a process of its own"]
fn with_a_driver() {
    let hip = open();
    assert!(!hip.is_cuda(), "it is bound as a HIP runtime");
    let missing: Vec<_> = Hip::FUNCTIONS.iter().filter(|f| !hip.has(f)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    let mut count = 0;
    let mut memory: *mut c_void = null_mut();
    let mut new = hipDeviceProp_tR0600::zeroed();
    // SAFETY: all pointers are to locals.
    let name = unsafe {
        hip.hipGetDeviceCount(&mut count).expect("a count");
        hip.hipSetDevice(1).expect("the second of two");
        hip.hipGetDevicePropertiesR0600(&mut new, 1)
            .expect("properties");
        hip.hipMalloc(&mut memory, 64).expect("memory");
        hip.hipFree(memory).expect("memory");
        CStr::from_ptr(hip.hipGetErrorName(hipError_t(700)).expect("a name"))
    };
    assert_eq!(count, 2);
    assert_eq!(new.name(), "Fake GPU 1");
    assert_eq!(name, c"hipErrorIllegalAddress");

    // Codes pass through.
    // SAFETY: no pointers are involved.
    let refused = unsafe { hip.hipSetDevice(7) };
    let code = hipError_t::hipErrorInvalidDevice;
    assert!(matches!(refused, Err(HipError::Status { code: c, .. }) if c == code));
    // SAFETY: as above.
    assert_eq!(unsafe { hip.hipGetLastError() }.expect("a code"), code);

    // The function that programs of HIP 5 call.
    type Properties = unsafe extern "C" fn(*mut hipDeviceProp_tR0000, c_int) -> hipError_t;
    // SAFETY: the library is loaded already; the signature is that of the function.
    let (code, old) = unsafe {
        let library = libloading::Library::new(drop_in()).expect("the drop-in");
        let properties = library.get::<Properties>(b"hipGetDeviceProperties");
        let properties = properties.expect("it is exported");
        let mut old: hipDeviceProp_tR0000 = std::mem::zeroed();
        let code = properties(&mut old, 1);
        assert_eq!(properties(null_mut(), 1), hipError_t::hipErrorInvalidValue);
        (code, old)
    };
    assert_eq!(code, hipError_t::hipSuccess);
    assert_eq!(old.gcnArchName, new.gcnArchName);
    assert_eq!(old.multiProcessorCount, new.multiProcessorCount);
    assert_eq!(old.gcnArch, 0);
}

#[test]
fn without_a_driver_there_is_no_device() {
    let broken = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-driver");
    std::fs::create_dir_all(&broken).expect("a folder");
    // The loader takes the first file of the name, and fails on this one.
    std::fs::write(broken.join("libcuda.so.1"), "no library").expect("a file");
    let said = run_alone("with_no_driver", &broken);
    assert_eq!(said.matches("libamdhip64 on CUDA: ").count(), 1, "{said}");
    assert!(said.contains("libcuda.so.1"), "{said}");
}

#[test]
#[ignore = "runs in a process of its own"]
fn with_no_driver() {
    let hip = open();
    let mut count = 0;
    for _ in 0..2 {
        // SAFETY: `count` is valid for a write.
        let refused = unsafe { hip.hipGetDeviceCount(&mut count) };
        let error = refused.expect_err("no driver").to_string();
        assert!(error.contains("hipErrorNoDevice"), "{error}");
    }
}
