//! HIP functions for streams, events, captures and graphs, on the CUDA driver.

use core::ffi::{c_char, c_uint};
use std::ptr::null_mut;

use super::state::{self, current_device, given, hip_functions};
use crate::types::*;

/// Event flags that the driver supports under the same numbers: blocking, no timing, interprocess.
const EVENT_FLAGS: c_uint = 7;

hip_functions! {
    in_context fn hipStreamCreateWithFlags(stream: *mut hipStream_t, flags: c_uint) needs [cuStreamCreate] |driver| {
        driver.cuStreamCreate(given(stream)?.cast(), flags)
    }
    in_context fn hipStreamDestroy(stream: hipStream_t) needs [cuStreamDestroy_v2] |driver| {
        driver.cuStreamDestroy_v2(stream.0)
    }
    in_context fn hipStreamSynchronize(stream: hipStream_t) needs [cuStreamSynchronize] |driver| {
        driver.cuStreamSynchronize(stream.0)
    }
    in_context fn hipStreamQuery(stream: hipStream_t) needs [cuStreamQuery] |driver| {
        driver.cuStreamQuery(stream.0)
    }
    in_context fn hipStreamWaitEvent(stream: hipStream_t, event: hipEvent_t, flags: c_uint)
        needs [cuStreamWaitEvent] |driver| {
        driver.cuStreamWaitEvent(stream.0, event.0, flags)
    }
    // Drivers before 12.8 know a stream's context, not its device. The next call makes the thread's own context
    // current again.
    in_context fn hipStreamGetDevice(stream: hipStream_t, device: *mut hipDevice_t)
        needs [cuStreamGetCtx, cuCtxSetCurrent, cuCtxGetDevice] |driver| {
        let device = given(device)?;
        let mut context = null_mut();
        driver.cuStreamGetCtx(stream.0, &mut context)?;
        driver.cuCtxSetCurrent(context)?;
        let found = driver.cuCtxGetDevice(device);
        state::set_device(driver, current_device())?;
        found
    }
    in_context fn hipStreamBeginCapture(stream: hipStream_t, mode: hipStreamCaptureMode)
        needs [cuStreamBeginCapture_v2] |driver| {
        driver.cuStreamBeginCapture_v2(stream.0, mode.0)
    }
    in_context fn hipStreamEndCapture(stream: hipStream_t, graph: *mut hipGraph_t) needs [cuStreamEndCapture] |driver| {
        driver.cuStreamEndCapture(stream.0, given(graph)?.cast())
    }
    in_context fn hipStreamIsCapturing(stream: hipStream_t, status: *mut hipStreamCaptureStatus)
        needs [cuStreamIsCapturing] |driver| {
        driver.cuStreamIsCapturing(stream.0, given(status)?.cast())
    }
    // Every version of the driver has the function without a log under the same name.
    in_context fn hipGraphInstantiate(
        executable: *mut hipGraphExec_t,
        graph: hipGraph_t,
        error_node: *mut hipGraphNode_t,
        log: *mut c_char,
        log_size: usize
    ) needs [cuGraphInstantiateWithFlags] |driver| {
        if !error_node.is_null() {
            *error_node = hipGraphNode_t::NULL;
        }
        if !log.is_null() && log_size > 0 {
            *log = 0;
        }
        driver.cuGraphInstantiateWithFlags(given(executable)?.cast(), graph.0, 0)
    }
    in_context fn hipGraphLaunch(executable: hipGraphExec_t, stream: hipStream_t) needs [cuGraphLaunch] |driver| {
        driver.cuGraphLaunch(executable.0, stream.0)
    }
    in_context fn hipGraphDestroy(graph: hipGraph_t) needs [cuGraphDestroy] |driver| {
        driver.cuGraphDestroy(graph.0)
    }
    in_context fn hipGraphExecDestroy(executable: hipGraphExec_t) needs [cuGraphExecDestroy] |driver| {
        driver.cuGraphExecDestroy(executable.0)
    }
    in_context fn hipEventCreateWithFlags(event: *mut hipEvent_t, flags: c_uint) needs [cuEventCreate] |driver| {
        driver.cuEventCreate(given(event)?.cast(), flags & EVENT_FLAGS)
    }
    in_context fn hipEventRecord(event: hipEvent_t, stream: hipStream_t) needs [cuEventRecord] |driver| {
        driver.cuEventRecord(event.0, stream.0)
    }
    in_context fn hipEventSynchronize(event: hipEvent_t) needs [cuEventSynchronize] |driver| {
        driver.cuEventSynchronize(event.0)
    }
    in_context fn hipEventQuery(event: hipEvent_t) needs [cuEventQuery] |driver| {
        driver.cuEventQuery(event.0)
    }
    in_context fn hipEventElapsedTime(milliseconds: *mut f32, start: hipEvent_t, stop: hipEvent_t)
        needs [cuEventElapsedTime] |driver| {
        driver.cuEventElapsedTime(given(milliseconds)?, start.0, stop.0)
    }
    in_context fn hipEventDestroy(event: hipEvent_t) needs [cuEventDestroy_v2] |driver| {
        driver.cuEventDestroy_v2(event.0)
    }
}
