//! Semantics of the simulated HIP runtime, without faults: a fault poisons the whole process (`hip_fault.rs`).

use hip_sys::{Hip, HipError, hipDeviceProp_tR0600, hipError_t, types::*};
use std::ffi::{CStr, c_void};
use std::ptr::null_mut;

const GLOBAL: hipStreamCaptureMode = hipStreamCaptureMode::hipStreamCaptureModeGlobal;
const RELAXED: hipStreamCaptureMode = hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
const ANY: hipMemcpyKind = hipMemcpyKind::hipMemcpyDefault;
const TO_DEVICE: hipMemcpyKind = hipMemcpyKind::hipMemcpyHostToDevice;
const TO_HOST: hipMemcpyKind = hipMemcpyKind::hipMemcpyDeviceToHost;

/// A capture in global mode forbids calls of other threads: one test at a time.
static ONE_AT_A_TIME: std::sync::Mutex<()> = std::sync::Mutex::new(());

struct Runtime {
    hip: Hip,
    _alone: std::sync::MutexGuard<'static, ()>,
}

impl std::ops::Deref for Runtime {
    type Target = Hip;
    fn deref(&self) -> &Hip {
        &self.hip
    }
}

fn runtime() -> Runtime {
    let alone = ONE_AT_A_TIME.lock().unwrap_or_else(|e| e.into_inner());
    Runtime {
        hip: deltawave_sim::hip::runtime(),
        _alone: alone,
    }
}

fn code(result: Result<(), HipError>) -> hipError_t {
    result
        .err()
        .and_then(|e| e.code())
        .unwrap_or(hipError_t::hipSuccess)
}

fn stream(hip: &Hip, flags: u32) -> hipStream_t {
    let mut stream = hipStream_t::NULL;
    // SAFETY: the pointer is valid for the call.
    unsafe { hip.hipStreamCreateWithFlags(&mut stream, flags) }.expect("a stream");
    stream
}

fn event(hip: &Hip) -> hipEvent_t {
    let mut event = hipEvent_t::NULL;
    // SAFETY: the pointer is valid for the call.
    unsafe { hip.hipEventCreateWithFlags(&mut event, HIP_EVENT_DEFAULT) }.expect("an event");
    event
}

fn allocate(hip: &Hip, size: usize) -> *mut c_void {
    let mut pointer = null_mut();
    // SAFETY: the pointer is valid for the call.
    unsafe { hip.hipMalloc(&mut pointer, size) }.expect("memory");
    pointer
}

#[test]
fn the_device() {
    let hip = runtime();
    let mut p = hipDeviceProp_tR0600::zeroed();
    // SAFETY: all pointers are valid for the calls.
    unsafe {
        hip.hipInit(0).unwrap();
        hip.hipSetDevice(0).unwrap();
        assert_eq!(code(hip.hipSetDevice(1)), hipError_t::hipErrorInvalidDevice);
        hip.hipGetDevicePropertiesR0600(&mut p, 0).unwrap();
        assert_eq!(p.arch_name(), "gfx942:sramecc+:xnack-");
        assert_eq!(
            (p.multiProcessorCount, p.warpSize, p.major, p.minor),
            (304, 64, 9, 4)
        );
        for (attribute, expected) in [
            (
                hipDeviceAttribute_t::hipDeviceAttributeMultiprocessorCount,
                304,
            ),
            (hipDeviceAttribute_t::hipDeviceAttributeWarpSize, 64),
            (
                hipDeviceAttribute_t::hipDeviceAttributeMaxSharedMemoryPerBlock,
                65536,
            ),
        ] {
            let mut value = 0;
            hip.hipDeviceGetAttribute(&mut value, attribute, 0).unwrap();
            assert_eq!(value, expected);
        }
        let name = hip.hipGetErrorName(hipError_t::hipErrorNoDevice).unwrap();
        assert_eq!(CStr::from_ptr(name), c"hipErrorNoDevice");
        assert_eq!(
            hip.hipGetLastError().unwrap(),
            hipError_t::hipErrorInvalidDevice
        );
        assert_eq!(hip.hipGetLastError().unwrap(), hipError_t::hipSuccess);
    }
}

#[test]
fn copies_stay_inside_allocations() {
    let hip = runtime();
    let (a, b) = (allocate(&hip, 100), allocate(&hip, 100 << 20));
    assert_eq!(a.addr() % 256, 0);
    assert_eq!(b.addr() % 256, 0);
    let mut host = [7u8; 101];
    let h = host.as_mut_ptr().cast::<c_void>();
    // SAFETY: what is out of bounds is refused, the rest is in bounds.
    unsafe {
        assert_eq!(
            code(hip.hipMemcpy(a, h, 101, TO_DEVICE)),
            hipError_t::hipErrorInvalidValue
        );
        assert_eq!(
            code(hip.hipMemcpy(a, h, 101, ANY)),
            hipError_t::hipErrorInvalidValue
        );
        let message = deltawave_sim::hip::last_message().unwrap();
        assert!(message.contains("101 bytes"), "{message}");
        assert_eq!(
            code(hip.hipMemcpy(h, a, 101, TO_HOST)),
            hipError_t::hipErrorInvalidValue
        );
        assert_eq!(
            code(hip.hipMemcpy(h, h, 1, TO_DEVICE)),
            hipError_t::hipErrorInvalidValue
        );
        assert_eq!(
            code(hip.hipMemset(a, 0, 101)),
            hipError_t::hipErrorInvalidValue
        );
        let odd = a.wrapping_byte_add(1);
        let word = hip.hipMemsetD32Async(odd, 0, 1, hipStream_t::NULL);
        assert_eq!(code(word), hipError_t::hipErrorInvalidValue);
        let kind = hipMemcpyKind(9);
        assert_eq!(
            code(hip.hipMemcpy(a, h, 1, kind)),
            hipError_t::hipErrorInvalidMemcpyDirection
        );
        hip.hipMemcpy(a, h, 100, ANY).unwrap();
        hip.hipMemcpy(b.wrapping_byte_add(5), a, 100, ANY).unwrap();
        host = [0; 101];
        hip.hipMemcpy(h, b, 101, ANY).unwrap();
        assert_eq!(host[..5], [0; 5]);
        assert_eq!(host[5..], [7; 96]);
        hip.hipMemcpy(null_mut(), h, 0, TO_DEVICE).unwrap();

        let mut attributes = hipPointerAttribute_t::default();
        hip.hipPointerGetAttributes(&mut attributes, b.wrapping_byte_add(9))
            .unwrap();
        assert_eq!(attributes.r#type, hipMemoryType::hipMemoryTypeDevice);
        hip.hipPointerGetAttributes(&mut attributes, h).unwrap();
        assert_eq!(attributes.r#type, hipMemoryType::hipMemoryTypeUnregistered);

        let mut pinned = null_mut();
        hip.hipHostMalloc(&mut pinned, 64, 0).unwrap();
        hip.hipPointerGetAttributes(&mut attributes, pinned)
            .unwrap();
        assert_eq!(attributes.r#type, hipMemoryType::hipMemoryTypeHost);
        assert_eq!(code(hip.hipFree(pinned)), hipError_t::hipErrorInvalidValue);
        hip.hipHostFree(pinned).unwrap();

        let (mut free, mut total) = (0, 0);
        hip.hipMemGetInfo(&mut free, &mut total).unwrap();
        assert_eq!((total, total - free), (192 << 30, 100 + (100 << 20)));
        let mut huge = null_mut();
        let error = code(hip.hipMalloc(&mut huge, total));
        assert_eq!(error, hipError_t::hipErrorOutOfMemory);
        hip.hipFree(a).unwrap();
        hip.hipFree(b).unwrap();
        assert_eq!(
            code(hip.hipMemcpy(a, h, 1, TO_DEVICE)),
            hipError_t::hipErrorInvalidValue
        );
    }
}

#[test]
fn handles_that_are_gone_are_refused() {
    let hip = runtime();
    let (s, e) = (stream(&hip, 0), event(&hip));
    // SAFETY: only handles are passed.
    unsafe {
        hip.hipStreamDestroy(s).unwrap();
        assert_eq!(
            code(hip.hipStreamSynchronize(s)),
            hipError_t::hipErrorContextIsDestroyed
        );
        let mut ms = 0.0;
        let early = hip.hipEventElapsedTime(&mut ms, e, e);
        assert_eq!(code(early), hipError_t::hipErrorInvalidHandle);
        hip.hipEventDestroy(e).unwrap();
        assert_eq!(
            code(hip.hipEventQuery(e)),
            hipError_t::hipErrorInvalidHandle
        );
        assert_eq!(
            code(hip.hipModuleUnload(hipModule_t::NULL)),
            hipError_t::hipErrorInvalidHandle
        );
        assert_eq!(
            code(hip.hipStreamDestroy(hipStream_t::NULL)),
            hipError_t::hipErrorInvalidHandle
        );
    }
}

#[test]
fn a_capture_with_a_forked_stream() {
    let hip = runtime();
    let (s, t) = (
        stream(&hip, HIP_STREAM_NON_BLOCKING),
        stream(&hip, HIP_STREAM_NON_BLOCKING),
    );
    let (fork, join) = (event(&hip), event(&hip));
    let d = allocate(&hip, 8);
    let mut host = [0u32; 2];
    // SAFETY: the memory outlives the graph's launches.
    unsafe {
        hip.hipStreamBeginCapture(s, GLOBAL).unwrap();
        hip.hipMemsetD32Async(d, 5, 2, s).unwrap();
        hip.hipEventRecord(fork, s).unwrap();
        hip.hipStreamWaitEvent(t, fork, 0).unwrap();
        hip.hipMemsetD32Async(d, 6, 1, t).unwrap();
        let mut status = hipStreamCaptureStatus::hipStreamCaptureStatusNone;
        hip.hipStreamIsCapturing(t, &mut status).unwrap();
        assert_eq!(status, hipStreamCaptureStatus::hipStreamCaptureStatusActive);
        hip.hipEventRecord(join, t).unwrap();
        hip.hipStreamWaitEvent(s, join, 0).unwrap();
        hip.hipMemcpyAsync(host.as_mut_ptr().cast(), d, 8, TO_HOST, s)
            .unwrap();
        let mut graph = hipGraph_t::NULL;
        hip.hipStreamEndCapture(s, &mut graph).unwrap();
        hip.hipStreamIsCapturing(t, &mut status).unwrap();
        assert_eq!(status, hipStreamCaptureStatus::hipStreamCaptureStatusNone);
        assert_eq!(host, [0, 0]);
        assert_eq!(
            code(hip.hipEventSynchronize(join)),
            hipError_t::hipErrorCapturedEvent
        );
        let mut executable = hipGraphExec_t::NULL;
        hip.hipGraphInstantiate(&mut executable, graph, null_mut(), null_mut(), 0)
            .unwrap();
        hip.hipGraphLaunch(executable, t).unwrap();
        hip.hipStreamSynchronize(t).unwrap();
        assert_eq!(host, [6, 5]);

        // A graph launched into a capture becomes part of it.
        host = [0; 2];
        hip.hipStreamBeginCapture(s, RELAXED).unwrap();
        hip.hipGraphLaunch(executable, s).unwrap();
        let mut outer = hipGraph_t::NULL;
        hip.hipStreamEndCapture(s, &mut outer).unwrap();
        hip.hipGraphExecDestroy(executable).unwrap();
        hip.hipGraphInstantiate(&mut executable, outer, null_mut(), null_mut(), 0)
            .unwrap();
        assert_eq!(host, [0, 0]);
        hip.hipGraphLaunch(executable, s).unwrap();
        assert_eq!(host, [6, 5]);

        // Without the join the capture is refused.
        hip.hipStreamBeginCapture(s, GLOBAL).unwrap();
        hip.hipMemsetD32Async(d, 5, 2, s).unwrap();
        hip.hipEventRecord(fork, s).unwrap();
        hip.hipStreamWaitEvent(t, fork, 0).unwrap();
        hip.hipMemsetD32Async(d, 6, 1, t).unwrap();
        let mut none = hipGraph_t::NULL;
        let unjoined = hip.hipStreamEndCapture(s, &mut none);
        assert_eq!(code(unjoined), hipError_t::hipErrorStreamCaptureUnjoined);
        assert!(none.is_null());
        hip.hipGraphExecDestroy(executable).unwrap();
        hip.hipGraphDestroy(graph).unwrap();
        hip.hipGraphDestroy(outer).unwrap();
        hip.hipStreamDestroy(s).unwrap();
        hip.hipStreamDestroy(t).unwrap();
        hip.hipFree(d).unwrap();
    }
}

/// Begins a capture of a blocking stream, makes a call, and says what it and the end of the capture
/// return.
fn under_capture(
    hip: &Hip,
    mode: hipStreamCaptureMode,
    call: impl FnOnce(hipStream_t) -> Result<(), HipError>,
) -> (hipError_t, hipError_t) {
    let s = stream(hip, HIP_STREAM_DEFAULT);
    // SAFETY: all pointers are valid for the calls.
    unsafe {
        hip.hipStreamBeginCapture(s, mode).expect("a capture");
        let during = code(call(s));
        let mut graph = hipGraph_t::NULL;
        let end = code(hip.hipStreamEndCapture(s, &mut graph));
        if !graph.is_null() {
            hip.hipGraphDestroy(graph).expect("a graph");
        }
        hip.hipStreamDestroy(s).expect("a stream");
        (during, end)
    }
}

#[test]
fn what_a_capture_forbids() {
    use hipError_t as E;
    let hip = runtime();
    let d = allocate(&hip, 4);
    let h = [0u8; 4];
    let outside = event(&hip);
    const SPOILT: (E, E) = (
        E::hipErrorStreamCaptureUnsupported,
        E::hipErrorStreamCaptureInvalidated,
    );
    const FINE: (E, E) = (E::hipSuccess, E::hipSuccess);
    // SAFETY: all pointers are valid for the calls.
    unsafe {
        hip.hipEventRecord(outside, hipStream_t::NULL).unwrap();
        let sync = |s| hip.hipStreamSynchronize(s);
        assert_eq!(under_capture(&hip, RELAXED, sync), SPOILT);
        assert_eq!(
            under_capture(&hip, GLOBAL, |s| hip.hipStreamQuery(s)),
            SPOILT
        );
        assert_eq!(
            under_capture(&hip, GLOBAL, |_| hip.hipDeviceSynchronize()),
            SPOILT
        );
        assert_eq!(
            under_capture(&hip, RELAXED, |_| hip.hipDeviceSynchronize()),
            FINE
        );
        let copy = |_| hip.hipMemcpy(d, h.as_ptr().cast(), 4, TO_DEVICE);
        assert_eq!(under_capture(&hip, GLOBAL, copy), SPOILT);
        let malloc = |_| {
            let mut p = null_mut();
            hip.hipMalloc(&mut p, 4)?;
            hip.hipFree(p)
        };
        assert_eq!(under_capture(&hip, GLOBAL, malloc), SPOILT);
        assert_eq!(under_capture(&hip, RELAXED, malloc), FINE);
        let implicit = |_| hip.hipMemsetAsync(d, 0, 4, hipStream_t::NULL);
        assert_eq!(
            under_capture(&hip, RELAXED, implicit),
            (
                E::hipErrorStreamCaptureImplicit,
                E::hipErrorStreamCaptureInvalidated
            )
        );
        let wait = |s| hip.hipStreamWaitEvent(s, outside, 0);
        assert_eq!(
            under_capture(&hip, RELAXED, wait),
            (
                E::hipErrorStreamCaptureIsolation,
                E::hipErrorStreamCaptureInvalidated
            )
        );
        let again = |s| hip.hipStreamBeginCapture(s, RELAXED);
        assert_eq!(
            under_capture(&hip, RELAXED, again),
            (E::hipErrorIllegalState, E::hipSuccess)
        );
        let thread = |s| {
            let mut graph = hipGraph_t::NULL;
            std::thread::scope(|scope| {
                let end = || hip.hip.hipStreamEndCapture(s, &mut graph);
                scope.spawn(end).join().expect("no panic")
            })
        };
        assert_eq!(
            under_capture(&hip, GLOBAL, thread),
            (E::hipErrorStreamCaptureWrongThread, E::hipSuccess)
        );
        let null = hip.hipStreamBeginCapture(hipStream_t::NULL, GLOBAL);
        assert_eq!(code(null), E::hipErrorStreamCaptureUnsupported);
        let mut graph = hipGraph_t::NULL;
        let s = stream(&hip, 0);
        assert_eq!(
            code(hip.hipStreamEndCapture(s, &mut graph)),
            E::hipErrorIllegalState
        );
        hip.hipFree(d).unwrap();
    }
}
