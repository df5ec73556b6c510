//! Tests the HIP functions on the CUDA driver with a stand-in for the driver (`fake_cuda.c`), which logs its calls.
//!
//! A process has one driver. A test that needs another driver or environment runs one of the ignored tests here in a
//! new process.
#![cfg(target_os = "linux")]
#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "all blocks call the stand-in, with pointers to locals or to memory that it gave out"
)]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use hip_sys::*;

/// Compiles a stand-in into a folder of its own. None, and a line that says why, without a C compiler.
fn compile(folder: &str, source: &str, library: &str, defines: &[&str]) -> Option<PathBuf> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
    std::fs::create_dir_all(&folder).expect("a folder");
    let path = folder.join(library);
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests")
        .join(source);
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
        .args([&path, &source])
        .args(defines)
        .status();
    match status {
        Ok(status) => {
            assert!(status.success(), "{} does not compile", source.display());
            Some(path)
        }
        Err(error) => {
            let text = format!("skipped: cc cannot be started: {error}");
            let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
            assert!(!required, "{text}");
            println!("{text}");
            None
        }
    }
}

/// The table on the stand-in, and what the stand-in tells tests. One test at a time has it.
struct Fake {
    hip: Hip,
    library: libloading::Library,
    path: PathBuf,
}

impl Fake {
    fn get() -> Option<(&'static Fake, MutexGuard<'static, ()>)> {
        static FAKE: OnceLock<Option<Fake>> = OnceLock::new();
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let fake = FAKE.get_or_init(|| {
            let path = compile("cuda", "fake_cuda.c", "libcuda.so.1", &[])?;
            let hip = Hip::load(Some(&path)).expect("a driver");
            let library = unsafe { libloading::Library::new(&path) }.expect("the same library");
            Some(Fake { hip, library, path })
        });
        let fake = fake.as_ref()?;
        unsafe { fake.hip.hipSetDevice(0) }.expect("device 0");
        fake.log();
        unsafe { fake.hip.hipGetLastError() }.expect("no driver is asked");
        Some((fake, turn))
    }

    /// The driver's calls since the last look.
    fn log(&self) -> Vec<String> {
        let text = unsafe {
            let log = self
                .library
                .get::<extern "C" fn() -> *const c_char>(b"fake_log");
            CStr::from_ptr(log.expect("it is there")())
        };
        text.to_str()
            .expect("ASCII")
            .lines()
            .map(str::to_owned)
            .collect()
    }

    /// The next call of a function fails.
    fn fail(&self, function: &'static CStr, code: c_int) {
        unsafe {
            let fail = self
                .library
                .get::<extern "C" fn(*const c_char, c_int)>(b"fake_fail");
            fail.expect("it is there")(function.as_ptr(), code);
        }
    }

    fn retained(&self, device: c_int) -> c_int {
        unsafe {
            let retained = self
                .library
                .get::<extern "C" fn(c_int) -> c_int>(b"fake_retained");
            retained.expect("it is there")(device)
        }
    }

    /// The calls that `work` makes are these and no others.
    #[track_caller]
    fn logs(&self, work: impl FnOnce(&Hip) -> Result<(), HipError>, expected: &[&str]) {
        self.log();
        work(&self.hip).expect("success");
        assert_eq!(self.log(), expected);
    }
}

const STREAM: hipStream_t = hipStream_t(core::ptr::without_provenance_mut(0x51));
const EVENT: hipEvent_t = hipEvent_t(core::ptr::without_provenance_mut(0x71));
const FUNCTION: hipFunction_t = hipFunction_t(core::ptr::without_provenance_mut(0x91));
const MODULE: hipModule_t = hipModule_t(core::ptr::without_provenance_mut(0x81));
const GRAPH: hipGraph_t = hipGraph_t(core::ptr::without_provenance_mut(0x61));
const EXECUTABLE: hipGraphExec_t = hipGraphExec_t(core::ptr::without_provenance_mut(0x62));

#[test]
fn every_function_is_there() {
    let Some((fake, _turn)) = Fake::get() else {
        return;
    };
    assert!(fake.hip.is_cuda());
    assert_eq!(Path::new(fake.hip.library()), fake.path);
    let missing: Vec<_> = Hip::FUNCTIONS.iter().filter(|f| !fake.hip.has(f)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    // The same driver again, and no other.
    assert!(Hip::load(Some(&fake.path)).is_ok_and(|hip| hip.is_cuda()));
    if let Some(other) = compile("cuda-second", "fake_cuda.c", "libcuda.so.1", &[]) {
        let error = Hip::load(Some(&other)).expect_err("another driver");
        assert!(matches!(error, LoadError::SecondDriver { .. }), "{error:?}");
    }
}

#[test]
fn devices() {
    let Some((fake, _turn)) = Fake::get() else {
        return;
    };
    let hip = &fake.hip;
    let (mut count, mut device, mut version) = (0, -1, 0);
    unsafe {
        hip.hipInit(0).expect("initialised");
        assert!(hip.hipInit(1).is_err());
        hip.hipGetDeviceCount(&mut count).expect("a count");
        hip.hipDriverGetVersion(&mut version).expect("a version");
        assert_eq!((count, version), (2, 13000));
        hip.hipRuntimeGetVersion(&mut version).expect("a version");
        assert_eq!(version, 13000);
        hip.hipGetDevice(&mut device).expect("a device");
        assert_eq!(device, 0);
        let mut p = hipDeviceProp_tR0600::zeroed();
        hip.hipGetDevicePropertiesR0600(&mut p, 1)
            .expect("properties");
        assert_eq!(
            (p.name().as_str(), p.arch_name().as_str()),
            ("Fake GPU 1", "sm_90a")
        );
        assert_eq!(
            (p.warpSize, p.multiProcessorCount, p.totalGlobalMem),
            (32, 132, 85_899_345_920)
        );
        assert_eq!((p.major, p.minor, p.maxThreadsPerBlock), (9, 0, 1));
        assert_eq!((p.maxThreadsDim, p.maxGridSize), ([2, 3, 4], [5, 6, 7]));
        assert_eq!(
            (
                p.sharedMemPerBlock,
                p.sharedMemPerBlockOptin,
                p.regsPerBlock
            ),
            (8, 97, 12)
        );
        assert_eq!((p.l2CacheSize, p.memoryBusWidth, p.pciBusID), (38, 37, 33));
        // An attribute that the driver does not know.
        assert_eq!(p.clusterLaunch, 0);
        assert_eq!(p.uuid.map(|c| c as u8), *b"0123456789abcdef");
        type A = hipDeviceAttribute_t;
        for (attribute, value) in [
            (A::hipDeviceAttributeWarpSize, 32),
            (A::hipDeviceAttributeMultiprocessorCount, 132),
            (A::hipDeviceAttributeComputeCapabilityMajor, 9),
            (A::hipDeviceAttributeL2CacheSize, 38),
            (A::hipDeviceAttributeSharedMemPerBlockOptin, 97),
            (A::hipDeviceAttributeMaxThreadsPerBlock, 1),
            (A::hipDeviceAttributeMaxGridDimZ, 7),
            (A::hipDeviceAttributeMemoryClockRate, 36),
            (A::hipDeviceAttributeTotalGlobalMem, c_int::MAX),
        ] {
            let mut found = -1;
            hip.hipDeviceGetAttribute(&mut found, attribute, 0)
                .expect("a value");
            assert_eq!(found, value, "{attribute:?}");
        }
        let mut found = -1;
        let none = hip.hipDeviceGetAttribute(&mut found, A::hipDeviceAttributeAsicRevision, 0);
        assert_eq!(
            none.expect_err("no counterpart").code(),
            Some(hipError_t::hipErrorInvalidValue)
        );
        let none = hip
            .hipGetDevicePropertiesR0600(&mut p, 2)
            .expect_err("two devices");
        assert_eq!(none.code(), Some(hipError_t::hipErrorInvalidDevice));
        let none = hip.hipSetDevice(-1).expect_err("no such device");
        assert_eq!(none.code(), Some(hipError_t::hipErrorInvalidDevice));
        let null = hip
            .hipGetDeviceCount(null_mut())
            .expect_err("nowhere to write");
        assert_eq!(null.code(), Some(hipError_t::hipErrorInvalidValue));
    }
}

#[test]
fn each_thread_has_its_device_and_context() {
    let Some((fake, _turn)) = Fake::get() else {
        return;
    };
    fake.logs(
        |hip| unsafe { hip.hipDeviceSynchronize() },
        &["0:cuCtxSynchronize()"],
    );
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            fake.logs(
                |hip| unsafe { hip.hipSetDevice(1) },
                &["-:cuDeviceGet(1)", "-:cuDevicePrimaryCtxRetain(1)"],
            );
            fake.logs(
                |hip| unsafe { hip.hipDeviceSynchronize() },
                &["1:cuCtxSynchronize()"],
            );
            let mut device = -1;
            unsafe { fake.hip.hipGetDevice(&mut device) }.expect("a device");
            assert_eq!(device, 1);
            // A stream's device, whatever the thread's: the stand-in's streams are on device 1.
            unsafe { fake.hip.hipSetDevice(0) }.expect("device 0");
            let get = |hip: &Hip| unsafe { hip.hipStreamGetDevice(STREAM, &mut device) };
            fake.logs(get, &["0:cuStreamGetCtx(51)", "1:cuCtxGetDevice()"]);
            assert_eq!(device, 1);
            fake.logs(
                |hip| unsafe { hip.hipDeviceSynchronize() },
                &["0:cuCtxSynchronize()"],
            );
            unsafe { fake.hip.hipSetDevice(1) }.expect("device 1");
            assert_eq!(fake.retained(1), 1);
            unsafe { fake.hip.hipDeviceReset() }.expect("a reset");
            assert_eq!(fake.retained(1), 0);
            unsafe { fake.hip.hipDeviceSynchronize() }.expect("a context again");
            assert_eq!(fake.retained(1), 1);
        });
        other.join().expect("the other thread");
    });
    fake.logs(
        |hip| unsafe { hip.hipDeviceSynchronize() },
        &["0:cuCtxSynchronize()"],
    );
}

#[test]
fn memory() {
    let Some((fake, _turn)) = Fake::get() else {
        return;
    };
    let mut to = null_mut();
    let mut host = [1u8, 2, 3, 4, 5, 6, 7, 8];
    let from = host.as_mut_ptr().cast::<c_void>();
    fake.logs(
        |hip| unsafe { hip.hipMalloc(&mut to, 8) },
        &["0:cuMemAlloc_v2(8)"],
    );
    for (kind, name) in [
        (hipMemcpyKind::hipMemcpyHostToDevice, "HtoD_v2"),
        (hipMemcpyKind::hipMemcpyDeviceToDevice, "DtoD_v2"),
        (hipMemcpyKind::hipMemcpyDefault, ""),
        (hipMemcpyKind::hipMemcpyHostToHost, ""),
    ] {
        let calls = [
            format!("0:cuMemcpy{name}(8)"),
            "0:cuStreamSynchronize(0)".to_owned(),
        ];
        fake.logs(
            |hip| unsafe { hip.hipMemcpy(to, from, 8, kind) },
            &calls.each_ref().map(String::as_str),
        );
        let name = name.trim_end_matches("_v2");
        let version = if name.is_empty() { "" } else { "_v2" };
        let call = format!("0:cuMemcpy{name}Async{version}(8, 51)");
        fake.logs(
            |hip| unsafe { hip.hipMemcpyAsync(to, from, 8, kind, STREAM) },
            &[&call],
        );
    }
    let back = hipMemcpyKind::hipMemcpyDeviceToHost;
    fake.logs(
        |hip| unsafe { hip.hipMemset(to, 0x1fe, 4) },
        &["0:cuMemsetD8_v2(254, 4)", "0:cuStreamSynchronize(0)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipMemcpy(from, to, 8, back) },
        &["0:cuMemcpyDtoH_v2(8)", "0:cuStreamSynchronize(0)"],
    );
    assert_eq!(host, [254, 254, 254, 254, 5, 6, 7, 8]);
    fake.logs(
        |hip| unsafe { hip.hipMemsetAsync(to, -1, 2, STREAM) },
        &["0:cuMemsetD8Async(255, 2, 51)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipMemsetD32Async(to, -2, 2, STREAM) },
        &["0:cuMemsetD32Async(fffffffe, 2, 51)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipMemcpyAsync(from, to, 8, back, STREAM) },
        &["0:cuMemcpyDtoHAsync_v2(8, 51)"],
    );
    assert_eq!(host, [254, 255, 255, 255, 254, 255, 255, 255]);
    fake.logs(
        |hip| unsafe { hip.hipFree(to) },
        &["0:cuMemFree_v2(address)"],
    );
    // Nothing is no error for HIP.
    let default = hipMemcpyKind::hipMemcpyDefault;
    fake.logs(|hip| unsafe { hip.hipMalloc(&mut to, 0) }, &[]);
    assert!(to.is_null());
    fake.logs(|hip| unsafe { hip.hipFree(null_mut()) }, &[]);
    fake.logs(|hip| unsafe { hip.hipHostFree(null_mut()) }, &[]);
    fake.logs(
        |hip| unsafe { hip.hipMemcpy(null_mut(), null(), 0, default) },
        &[],
    );
    fake.logs(
        |hip| unsafe { hip.hipMemcpyAsync(null_mut(), null(), 0, default, STREAM) },
        &[],
    );
    fake.logs(|hip| unsafe { hip.hipMemset(null_mut(), 0, 0) }, &[]);
    fake.logs(
        |hip| unsafe { hip.hipMemsetAsync(null_mut(), 0, 0, STREAM) },
        &[],
    );
    fake.logs(
        |hip| unsafe { hip.hipMemsetD32Async(null_mut(), 0, 0, STREAM) },
        &[],
    );
    let error =
        unsafe { fake.hip.hipMemcpy(from, from, 1, hipMemcpyKind(9)) }.expect_err("no such kind");
    assert_eq!(error.code(), Some(hipError_t::hipErrorInvalidValue));

    let (mut free, mut total) = (0, 0);
    fake.logs(
        |hip| unsafe { hip.hipMemGetInfo(&mut free, &mut total) },
        &["0:cuMemGetInfo_v2()"],
    );
    assert_eq!((free, total), (10, 20));
    // HIP's own flags are left out.
    let flags = 0x8000_0006;
    fake.logs(
        |hip| unsafe { hip.hipHostMalloc(&mut to, 5, flags) },
        &["0:cuMemHostAlloc(5, 6)"],
    );
    fake.logs(|hip| unsafe { hip.hipHostFree(to) }, &["0:cuMemFreeHost()"]);
    type T = hipMemoryType;
    for (pointer, kind, device, host, managed) in [
        (0xd010, T::hipMemoryTypeDevice, 1, 0, 0),
        (0xe010, T::hipMemoryTypeHost, 1, 0xe010, 0),
        (0xf010, T::hipMemoryTypeManaged, 1, 0xf010, 1),
        (0x1000, T::hipMemoryTypeUnregistered, 0, 0, 0),
    ] {
        let mut found = hipPointerAttribute_t::default();
        let at = core::ptr::without_provenance(pointer);
        let call = format!("0:cuPointerGetAttributes(2 3 4 8 9 {pointer:x})");
        fake.logs(
            |hip| unsafe { hip.hipPointerGetAttributes(&mut found, at) },
            &[&call],
        );
        let shown = (
            found.r#type,
            found.device,
            found.hostPointer.addr(),
            found.isManaged,
        );
        assert_eq!(shown, (kind, device, host, managed));
        let known = kind != T::hipMemoryTypeUnregistered;
        assert_eq!(found.devicePointer.addr(), if known { pointer } else { 0 });
    }
}

#[test]
fn streams_events_and_graphs() {
    let Some((fake, _turn)) = Fake::get() else {
        return;
    };
    let (mut stream, mut event) = (hipStream_t::NULL, hipEvent_t::NULL);
    let (mut graph, mut executable) = (hipGraph_t::NULL, hipGraphExec_t::NULL);
    let (mut milliseconds, mut status) = (0.0, hipStreamCaptureStatus(0));
    let (mut node, mut log) = (
        hipGraphNode_t(null_mut::<c_void>().wrapping_add(1)),
        [1 as c_char; 4],
    );
    fake.logs(
        |hip| unsafe { hip.hipStreamCreateWithFlags(&mut stream, 1) },
        &["0:cuStreamCreate(1)"],
    );
    // HIP's own flags are left out.
    fake.logs(
        |hip| unsafe { hip.hipEventCreateWithFlags(&mut event, 0x4000_0002) },
        &["0:cuEventCreate(2)"],
    );
    assert_eq!((stream, event), (STREAM, EVENT));
    fake.logs(
        |hip| unsafe { hip.hipStreamSynchronize(STREAM) },
        &["0:cuStreamSynchronize(51)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipStreamWaitEvent(STREAM, EVENT, 0) },
        &["0:cuStreamWaitEvent(51, 71, 0)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipEventRecord(EVENT, STREAM) },
        &["0:cuEventRecord(71, 51)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipEventSynchronize(EVENT) },
        &["0:cuEventSynchronize(71)"],
    );
    let other = hipEvent_t(core::ptr::without_provenance_mut(0x72));
    fake.logs(
        |hip| unsafe { hip.hipEventElapsedTime(&mut milliseconds, EVENT, other) },
        &["0:cuEventElapsedTime(71, 72)"],
    );
    assert_eq!(milliseconds, 1.5);
    let mode = hipStreamCaptureMode::hipStreamCaptureModeThreadLocal;
    fake.logs(
        |hip| unsafe { hip.hipStreamBeginCapture(STREAM, mode) },
        &["0:cuStreamBeginCapture_v2(51, 1)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipStreamIsCapturing(STREAM, &mut status) },
        &["0:cuStreamIsCapturing(51)"],
    );
    assert_eq!(
        status,
        hipStreamCaptureStatus::hipStreamCaptureStatusInvalidated
    );
    fake.logs(
        |hip| unsafe { hip.hipStreamEndCapture(STREAM, &mut graph) },
        &["0:cuStreamEndCapture(51)"],
    );
    assert_eq!(graph, GRAPH);
    fake.logs(
        |hip| unsafe {
            hip.hipGraphInstantiate(&mut executable, graph, &mut node, log.as_mut_ptr(), 4)
        },
        &["0:cuGraphInstantiateWithFlags(61, 0)"],
    );
    assert_eq!(
        (executable, node, log[0]),
        (EXECUTABLE, hipGraphNode_t::NULL, 0)
    );
    fake.logs(
        |hip| unsafe { hip.hipGraphLaunch(EXECUTABLE, STREAM) },
        &["0:cuGraphLaunch(62, 51)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipGraphDestroy(GRAPH) },
        &["0:cuGraphDestroy(61)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipGraphExecDestroy(EXECUTABLE) },
        &["0:cuGraphExecDestroy(62)"],
    );
    // 'Not yet' is no error that is remembered.
    let pending = [unsafe { fake.hip.hipStreamQuery(STREAM) }, unsafe {
        fake.hip.hipEventQuery(EVENT)
    }];
    assert!(
        pending
            .iter()
            .all(|r| r.as_ref().is_err_and(HipError::is_not_ready))
    );
    assert_eq!(fake.log(), ["0:cuStreamQuery(51)", "0:cuEventQuery(71)"]);
    assert_eq!(
        unsafe { fake.hip.hipGetLastError() }.ok(),
        Some(hipError_t::hipSuccess)
    );
    fake.logs(
        |hip| unsafe { hip.hipEventDestroy(EVENT) },
        &["0:cuEventDestroy_v2(71)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipStreamDestroy(STREAM) },
        &["0:cuStreamDestroy_v2(51)"],
    );
}

#[test]
fn modules_and_launches() {
    let Some((fake, _turn)) = Fake::get() else {
        return;
    };
    let (mut module, mut function) = (hipModule_t::NULL, hipFunction_t::NULL);
    let (mut value, mut blocks, mut size, mut global) = (0, 0, 0, null_mut());
    fake.logs(
        |hip| unsafe { hip.hipModuleLoadData(&mut module, c"ptx".as_ptr().cast()) },
        &["0:cuModuleLoadDataEx(ptx, 5 6)"],
    );
    fake.logs(
        |hip| unsafe { hip.hipModuleGetFunction(&mut function, MODULE, c"kernel".as_ptr()) },
        &["0:cuModuleGetFunction(81, kernel)"],
    );
    assert_eq!((module, function), (MODULE, FUNCTION));
    let get = |hip: &Hip| unsafe {
        hip.hipModuleGetGlobal(&mut global, &mut size, MODULE, c"x".as_ptr())
    };
    fake.logs(get, &["0:cuModuleGetGlobal_v2(81, x)"]);
    assert_eq!((global.addr(), size), (0xd008, 12));
    let which = hipFunction_attribute::HIP_FUNC_ATTRIBUTE_NUM_REGS;
    fake.logs(
        |hip| unsafe { hip.hipFuncGetAttribute(&mut value, which, FUNCTION) },
        &["0:cuFuncGetAttribute(4, 91)"],
    );
    let which = hipFuncAttribute::hipFuncAttributeMaxDynamicSharedMemorySize;
    let set = |hip: &Hip| unsafe { hip.hipFuncSetAttribute(FUNCTION.0, which, 200_000) };
    fake.logs(set, &["0:cuFuncSetAttribute(91, 8, 200000)"]);
    fake.logs(
        |hip| unsafe {
            hip.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, FUNCTION, 256, 9)
        },
        &["0:cuOccupancyMaxActiveBlocksPerMultiprocessor(91, 256, 9)"],
    );
    assert_eq!((value, blocks), (77, 5));

    let launch = |parameters: *mut *mut c_void, extra: &mut [*mut c_void]| {
        let extra = if extra.is_empty() {
            null_mut()
        } else {
            extra.as_mut_ptr()
        };
        unsafe {
            fake.hip
                .hipModuleLaunchKernel(FUNCTION, 1, 2, 3, 4, 5, 6, 7, STREAM, parameters, extra)
        }
    };
    // The stand-in shows arguments as text.
    let text = c"arguments".as_ptr().cast_mut().cast::<c_void>();
    fake.log();
    launch([text].as_mut_ptr(), &mut []).expect("a launch");
    assert_eq!(
        fake.log(),
        ["0:cuLaunchKernel(91, 1 2 3, 4 5 6, 7, 51, arguments, -)"]
    );
    let overlapping = unsafe {
        let mut parameters = [text];
        let parameters = parameters.as_mut_ptr();
        (fake.hip).launch_overlapping(FUNCTION, 1, 4, 7, STREAM, parameters)
    };
    overlapping.expect("a launch");
    assert_eq!(
        fake.log(),
        ["0:cuLaunchKernelEx(91, 1 1 1, 4 1 1, 7, 51, 1: 6 1, arguments, -)"]
    );
    let mut length = 9usize;
    let length = (&raw mut length).cast::<c_void>();
    let (pointer, size, end) = (
        HIP_LAUNCH_PARAM_BUFFER_POINTER,
        HIP_LAUNCH_PARAM_BUFFER_SIZE,
        HIP_LAUNCH_PARAM_END,
    );
    for list in [
        [pointer, text, size, length, end],
        [size, length, pointer, text, end],
    ] {
        launch(null_mut(), &mut { list }).expect("a launch");
        assert_eq!(
            fake.log(),
            ["0:cuLaunchKernel(91, 1 2 3, 4 5 6, 7, 51, -, arguments)"]
        );
    }
    for list in [
        &mut [pointer, text, end][..],
        &mut [size, length, end],
        &mut [end],
        &mut [length, text, size, length, end],
        &mut [pointer, text, size, length, size, length, size, length, end],
    ] {
        let error = launch(null_mut(), list).expect_err("not a list of HIP's");
        assert_eq!(error.code(), Some(hipError_t::hipErrorInvalidValue));
        assert!(fake.log().is_empty());
    }
    fake.logs(
        |hip| unsafe { hip.hipModuleUnload(MODULE) },
        &["0:cuModuleUnload(81)"],
    );
}

#[test]
fn errors_say_what_the_driver_said() {
    let Some((fake, _turn)) = Fake::get() else {
        return;
    };
    let hip = &fake.hip;
    let library = fake.path.display();
    let mut pointer = null_mut();
    fake.fail(c"cuMemAlloc_v2", 2);
    let error = unsafe { hip.hipMalloc(&mut pointer, 64) }.expect_err("no memory");
    assert_eq!(
        error.to_string(),
        format!(
            "hipMalloc failed with hipErrorOutOfMemory (2) in {library}: cuMemAlloc_v2 returned \
             CUDA_ERROR_OUT_OF_MEMORY (out of memory)"
        )
    );
    // Another thread has no error; this one has, once.
    std::thread::scope(|scope| {
        let other = scope.spawn(|| unsafe { hip.hipGetLastError() }.expect("no driver is asked"));
        assert_eq!(other.join().expect("a code"), hipError_t::hipSuccess);
    });
    let last = || unsafe { hip.hipGetLastError() }.expect("no driver is asked");
    assert_eq!(
        (last(), last()),
        (hipError_t::hipErrorOutOfMemory, hipError_t::hipSuccess)
    );

    let mut module = hipModule_t::NULL;
    let error = unsafe { hip.hipModuleLoadData(&mut module, c"broken".as_ptr().cast()) };
    let text = error.expect_err("no PTX").to_string();
    assert!(
        text.contains("hipModuleLoadData failed with hipErrorInvalidKernelFile (218)"),
        "{text}"
    );
    assert!(
        text.ends_with("CUDA_ERROR_INVALID_PTX\nptxas fatal: line 3 is broken"),
        "{text}"
    );

    // Codes that HIP lacks keep number and name; those after which the device is lost are known.
    fake.fail(c"cuStreamSynchronize", 716);
    let error = unsafe { hip.hipStreamSynchronize(STREAM) }.expect_err("a fault");
    assert!(error.is_poisoned());
    let text = error.to_string();
    assert!(
        text.contains("failed with CUDA_ERROR_MISALIGNED_ADDRESS (716)"),
        "{text}"
    );
    assert!(
        text.contains("retrying is useless: cuStreamSynchronize"),
        "{text}"
    );
    fake.fail(c"cuModuleLoadDataEx", 222);
    let error =
        unsafe { hip.hipModuleLoadData(&mut module, c"ptx".as_ptr().cast()) }.expect_err("too new");
    assert!(
        error
            .to_string()
            .contains("CUDA_ERROR_UNSUPPORTED_PTX_VERSION (222)")
    );

    // A context that cannot be had is the call's error.
    fake.fail(c"cuCtxSetCurrent", 201);
    let error = unsafe { hip.hipDeviceSynchronize() }.expect_err("no context");
    assert!(
        error.to_string().contains("cuCtxSetCurrent returned 201"),
        "{error}"
    );
    assert_eq!(error.code(), Some(hipError_t::hipErrorInvalidContext));

    let name =
        |code| unsafe { CStr::from_ptr(hip.hipGetErrorName(hipError_t(code)).expect("a name")) };
    let meaning =
        |code| unsafe { CStr::from_ptr(hip.hipGetErrorString(hipError_t(code)).expect("a text")) };
    assert_eq!(
        (name(2), name(716), name(4242)),
        (
            c"hipErrorOutOfMemory",
            c"CUDA_ERROR_MISALIGNED_ADDRESS",
            c"unknown error"
        )
    );
    assert_eq!(
        (meaning(2), meaning(1), meaning(4242)),
        (c"out of memory", c"hipErrorInvalidValue", c"unknown error")
    );
    let mut function = hipFunction_t::NULL;
    let lacks = unsafe { hip.hipModuleGetFunction(&mut function, MODULE, c"other".as_ptr()) };
    assert_eq!(
        lacks.expect_err("no such kernel").code(),
        Some(hipError_t::hipErrorNotFound)
    );
}

/// Runs an ignored test of this file in a process of its own.
fn in_a_process(test: &str, folder: &Path, variables: &[(&str, &str)]) {
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args([test, "--exact", "--ignored", "--nocapture"])
        .env("LD_LIBRARY_PATH", folder)
        .env_remove(LIBRARY_VARIABLE)
        .envs(variables.iter().copied())
        .output()
        .expect("this program starts");
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

#[test]
fn the_driver_is_chosen_where_it_has_the_only_device() {
    let build = |folder: &str, cuda: &str, hip: &str| {
        compile(folder, "fake_hip.c", "libamdhip64.so.7", &[hip])?;
        compile(folder, "fake_cuda.c", "libcuda.so.1", &[cuda])
    };
    for (folder, cuda, hip, chosen) in [
        ("cuda-alone", "-DDEVICES=1", "-DDEVICES=0", "cuda"),
        ("cuda-beside-hip", "-DDEVICES=1", "-DDEVICES=1", "hip"),
        ("cuda-nothing", "-DDEVICES=0", "-DDEVICES=0", "hip"),
    ] {
        let Some(path) = build(folder, cuda, hip) else {
            return;
        };
        let folder = path.parent().expect("a folder");
        in_a_process("chosen", folder, &[("EXPECTED", chosen)]);
        // The variable decides, devices or not.
        in_a_process(
            "chosen",
            folder,
            &[("EXPECTED", "cuda"), (LIBRARY_VARIABLE, "cuda")],
        );
        in_a_process(
            "chosen",
            folder,
            &[("EXPECTED", "hip"), (LIBRARY_VARIABLE, "libamdhip64.so.7")],
        );
    }
}

#[test]
#[ignore = "a part of another test"]
fn chosen() {
    let hip = Hip::load(None).expect("a library");
    let expected = std::env::var("EXPECTED").expect("the other test sets it");
    assert_eq!(hip.is_cuda(), expected == "cuda", "{hip:?}");
    let library = if hip.is_cuda() {
        "libcuda.so.1"
    } else {
        "libamdhip64.so.7"
    };
    assert_eq!(hip.library(), library);
}

#[test]
fn a_driver_without_devices() {
    let library = compile("cuda-none", "fake_cuda.c", "libcuda.so.1", &["-DDEVICES=0"]);
    let Some(path) = library else { return };
    in_a_process("no_devices", path.parent().expect("a folder"), &[]);
}

#[test]
#[ignore = "a part of another test"]
fn no_devices() {
    let hip = Hip::load(Some(Path::new("cuda"))).expect("the driver");
    let mut count = -1;
    let error = unsafe { hip.hipGetDeviceCount(&mut count) }.expect_err("no device");
    assert_eq!(error.code(), Some(hipError_t::hipErrorNoDevice));
    assert!(
        error
            .to_string()
            .contains("cuInit returned CUDA_ERROR_NO_DEVICE"),
        "{error}"
    );
    let error = unsafe { hip.hipSetDevice(0) }.expect_err("no device");
    assert_eq!(error.code(), Some(hipError_t::hipErrorNoDevice));
}

/// A tensor of 4 heads of 128 columns, 100 tokens and 2 sequences.
const TENSOR: BoxedTensor = BoxedTensor {
    element_bytes: 2,
    address: core::ptr::without_provenance(0x1000),
    dimensions: [128, 4, 100, 2],
    strides: [256, 1024, 102_400],
    of_box: [1, 64, 1],
};

#[test]
fn tensors_are_described() {
    let Some((fake, _turn)) = Fake::get() else {
        return;
    };
    let described = fake.hip.tensor_map(&TENSOR);
    let words = core::array::from_fn(|i| i as u64 + 1);
    assert_eq!(described, Some(TensorMap(words)));
    // Type 1: 16 bits; then each dimension's elements, bytes to the next, elements of a box, every element of it; then
    // interleave, the 128-byte swizzle, promotion to 256 bytes of L2, zeros past the end.
    let call = "0:cuTensorMapEncodeTiled(1, 1000, 128/0/64/1 4/256/1/1 100/1024/64/1 2/102400/1/1 , 0 3 3 0)";
    assert_eq!(fake.log(), [call]);

    let of_f32 = BoxedTensor {
        element_bytes: 4,
        ..TENSOR
    };
    assert_eq!(fake.hip.tensor_map(&of_f32), described);
    // Type 2: 32 bits, of which a box has half as many.
    assert_eq!(
        fake.log(),
        [
            "0:cuTensorMapEncodeTiled(2, 1000, 128/0/32/1 4/256/1/1 100/1024/64/1 2/102400/1/1 , 0 3 3 0)"
        ]
    );

    // What the driver would refuse is not asked for.
    let unaligned = BoxedTensor {
        strides: [256, 1030, 102_400],
        ..TENSOR
    };
    assert_eq!(fake.hip.tensor_map(&unaligned), None);
    assert_eq!(fake.log(), [""; 0]);

    fake.fail(c"cuTensorMapEncodeTiled", 1);
    assert_eq!(fake.hip.tensor_map(&TENSOR), None);
    assert_eq!(fake.log(), [call]);
    unsafe { fake.hip.hipGetLastError() }.expect("a refusal is no error of the device");
}

#[test]
fn a_driver_that_lacks_functions() {
    let Some(path) = compile("cuda-old", "fake_cuda.c", "libcuda.so.1", &["-DOLD"]) else {
        return;
    };
    in_a_process("lacking_functions", path.parent().expect("a folder"), &[]);
}

#[test]
#[ignore = "a part of another test"]
fn lacking_functions() {
    let hip = Hip::load(Some(Path::new("cuda"))).expect("the driver");
    let missing: Vec<_> = Hip::FUNCTIONS.iter().filter(|f| !hip.has(f)).collect();
    assert_eq!(missing, [&"hipMemsetD32Async"]);
    let error = unsafe { hip.hipMemsetD32Async(null_mut(), 0, 1, STREAM) }.expect_err("it lacks");
    assert_eq!(
        error.to_string(),
        "libcuda.so.1 has no function cuMemsetD32Async, which hipMemsetD32Async needs"
    );
    assert_eq!(hip.tensor_map(&TENSOR), None);
    unsafe { hip.hipGetLastError() }.expect("the function is not needed");
    let mut p = hipDeviceProp_tR0600::zeroed();
    unsafe { hip.hipGetDevicePropertiesR0600(&mut p, 0) }.expect("properties without an UUID");
    assert_eq!((p.uuid, p.arch_name().as_str()), ([0; 16], "sm_90a"));
}

#[test]
fn absence_is_an_error_that_names_the_driver() {
    in_a_process(
        "no_driver",
        Path::new("/nonexistent"),
        &[(LIBRARY_VARIABLE, "cuda")],
    );
}

#[test]
#[ignore = "a part of another test"]
fn no_driver() {
    match Hip::load(None) {
        Ok(hip) => println!("skipped: this machine has {hip:?}"),
        Err(error) => {
            assert!(matches!(error, LoadError::Environment { .. }), "{error:?}");
            assert!(error.to_string().contains("libcuda.so.1"), "{error}");
        }
    }
}
