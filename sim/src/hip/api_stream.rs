//! HIP functions for streams, events and graphs.
#![allow(non_snake_case, missing_docs)]
// each is documented in the table it is listed in
// As HIP documents them: pointers are null or valid.
#![allow(clippy::missing_safety_doc)]

use super::state::{
    Device, Event, Instant, Outcome, Stream, call, current_session, device as state, put, working,
};
use super::work::run;
use core::ffi::{c_char, c_int, c_uint, c_void};
use hip_sys::{hipError_t, types::*};
use std::sync::Arc;

const INVALID: hipError_t = hipError_t::hipErrorInvalidValue;
const BAD_HANDLE: hipError_t = hipError_t::hipErrorInvalidHandle;

fn handle(key: usize) -> *mut c_void {
    core::ptr::without_provenance_mut(key)
}

pub unsafe extern "C" fn hipStreamCreateWithFlags(
    stream: *mut hipStream_t,
    flags: c_uint,
) -> hipError_t {
    call(|| {
        if stream.is_null() || flags > HIP_STREAM_NON_BLOCKING {
            return Err(INVALID);
        }
        let mut state = state();
        state.alive()?;
        let key = state.handle();
        let new = Stream {
            flags,
            session: Some(current_session()),
            ..Stream::default()
        };
        state.streams.insert(key, new);
        // SAFETY: null or valid.
        unsafe { put(stream, hipStream_t(handle(key))) }
    })
}

pub unsafe extern "C" fn hipStreamDestroy(stream: hipStream_t) -> hipError_t {
    call(|| {
        let _work = working();
        let mut state = state();
        let key = state.stream(stream)?;
        if stream.0.addr() <= 2 {
            return Err(BAD_HANDLE);
        }
        state.leave_capture(key);
        state.streams.remove(&key);
        Ok(())
    })
}

pub unsafe extern "C" fn hipStreamSynchronize(stream: hipStream_t) -> hipError_t {
    call(|| {
        let _work = working();
        let mut state = state();
        let key = state.stream(stream)?;
        state.may_wait(key)?;
        if key == 0 {
            state.outside_captures()?;
        }
        state.alive_for(state.session_of(key))
    })
}

pub unsafe extern "C" fn hipStreamQuery(stream: hipStream_t) -> hipError_t {
    call(|| {
        let mut state = state();
        let key = state.stream(stream)?;
        state.may_wait(key)?;
        state.alive_for(state.session_of(key))
    })
}

pub unsafe extern "C" fn hipStreamWaitEvent(
    stream: hipStream_t,
    event: hipEvent_t,
    flags: c_uint,
) -> hipError_t {
    call(|| {
        let mut state = state();
        let key = state.stream(stream)?;
        state.alive_for(state.session_of(key))?;
        if flags != 0 {
            return Err(INVALID);
        }
        let event = find(&state, event)?;
        if event.recorded.is_none() && event.captured.is_none() {
            return Ok(());
        }
        let captured = event.captured.clone();
        state.capture_wait(key, captured)
    })
}

pub unsafe extern "C" fn hipStreamGetDevice(
    stream: hipStream_t,
    device: *mut hipDevice_t,
) -> hipError_t {
    call(|| {
        state().stream(stream)?;
        // SAFETY: null or valid.
        unsafe { put(device, 0) }
    })
}

pub unsafe extern "C" fn hipStreamBeginCapture(
    stream: hipStream_t,
    mode: hipStreamCaptureMode,
) -> hipError_t {
    call(|| {
        let mut state = state();
        let key = state.stream(stream)?;
        state.alive_for(state.session_of(key))?;
        state.begin_capture(key, mode)
    })
}

pub unsafe extern "C" fn hipStreamEndCapture(
    stream: hipStream_t,
    graph: *mut hipGraph_t,
) -> hipError_t {
    call(|| {
        // SAFETY: null or valid.
        unsafe { put(graph, hipGraph_t::NULL)? };
        let mut state = state();
        let key = state.stream(stream)?;
        let captured = state.end_capture(key)?;
        let key = state.handle();
        state.graphs.insert(key, captured);
        // SAFETY: null or valid.
        unsafe { put(graph, hipGraph_t(handle(key))) }
    })
}

pub unsafe extern "C" fn hipStreamIsCapturing(
    stream: hipStream_t,
    status: *mut hipStreamCaptureStatus,
) -> hipError_t {
    call(|| {
        let state = state();
        let key = state.stream(stream)?;
        // SAFETY: null or valid.
        unsafe { put(status, state.capture_status(key)) }
    })
}

pub unsafe extern "C" fn hipGraphInstantiate(
    executable: *mut hipGraphExec_t,
    graph: hipGraph_t,
    error_node: *mut hipGraphNode_t,
    log: *mut c_char,
    log_size: usize,
) -> hipError_t {
    call(|| {
        if executable.is_null() {
            return Err(INVALID);
        }
        if !error_node.is_null() {
            // SAFETY: not null, so valid.
            unsafe { put(error_node, hipGraphNode_t::NULL)? };
        }
        if !log.is_null() && log_size > 0 {
            // SAFETY: not null, so valid for `log_size` bytes.
            unsafe { put(log, 0)? };
        }
        let mut state = state();
        let nodes = state.graphs.get(&graph.0.addr()).ok_or(INVALID)?.clone();
        let key = state.handle();
        state.executables.insert(key, Arc::new(nodes));
        // SAFETY: valid.
        unsafe { put(executable, hipGraphExec_t(handle(key))) }
    })
}

pub unsafe extern "C" fn hipGraphLaunch(
    executable: hipGraphExec_t,
    stream: hipStream_t,
) -> hipError_t {
    call(|| {
        let work = working();
        let mut state = state();
        let key = state.stream(stream)?;
        state.alive_for(state.session_of(key))?;
        let found = state.executables.get(&executable.0.addr());
        let graph = found.ok_or(INVALID)?.clone();
        if state.is_capturing(key) {
            let operations = graph.nodes.iter().map(|n| n.operation.clone());
            return state.capture(key, operations);
        }
        state.no_implicit_dependency(key)?;
        drop(state);
        for node in &graph.nodes {
            run(&work, key, &node.operation)?;
            let state = super::state::device();
            if state.alive_for(state.session_of(key)).is_err() {
                break;
            }
        }
        Ok(())
    })
}

pub unsafe extern "C" fn hipGraphDestroy(graph: hipGraph_t) -> hipError_t {
    call(|| {
        let removed = state().graphs.remove(&graph.0.addr());
        removed.map(drop).ok_or(INVALID)
    })
}

pub unsafe extern "C" fn hipGraphExecDestroy(executable: hipGraphExec_t) -> hipError_t {
    call(|| {
        let removed = state().executables.remove(&executable.0.addr());
        removed.map(drop).ok_or(INVALID)
    })
}

fn find(state: &Device, event: hipEvent_t) -> Outcome<&Event> {
    state.events.get(&event.0.addr()).ok_or(BAD_HANDLE)
}

pub unsafe extern "C" fn hipEventCreateWithFlags(
    event: *mut hipEvent_t,
    flags: c_uint,
) -> hipError_t {
    /// Accepted flags: blocking sync, disable timing, interprocess, and AMD's release flags.
    const KNOWN: c_uint = 0x7 | 0xe000_0000;
    call(|| {
        if event.is_null() || flags & !KNOWN != 0 {
            return Err(INVALID);
        }
        let mut state = state();
        let key = state.handle();
        let new = Event {
            flags,
            session: current_session(),
            ..Event::default()
        };
        state.events.insert(key, new);
        // SAFETY: valid.
        unsafe { put(event, hipEvent_t(handle(key))) }
    })
}

pub unsafe extern "C" fn hipEventRecord(event: hipEvent_t, stream: hipStream_t) -> hipError_t {
    call(|| {
        let mut state = state();
        let key = state.stream(stream)?;
        state.alive_for(state.session_of(key))?;
        find(&state, event)?;
        if state.is_capturing(key) {
            return state.capture_event(key, event.0.addr());
        }
        state.no_implicit_dependency(key)?;
        let now = Instant {
            stream: key,
            stream_busy: state.streams.get(&key).map_or(0.0, |s| s.busy),
            device_busy: state.busy,
        };
        if let Some(event) = state.events.get_mut(&event.0.addr()) {
            event.recorded = Some(now);
            event.captured = None;
        }
        Ok(())
    })
}

/// Checks that an event may be waited for. It has always happened: all work is done when it is enqueued.
fn happened(event: hipEvent_t) -> Outcome {
    let mut state = state();
    let event = find(&state, event)?;
    let session = event.session;
    if let Some(captured) = event.captured.clone() {
        state.spoil(captured.capture);
        return Err(hipError_t::hipErrorCapturedEvent);
    }
    state.alive_for(session)
}

pub unsafe extern "C" fn hipEventSynchronize(event: hipEvent_t) -> hipError_t {
    call(|| {
        let _work = working();
        happened(event)
    })
}

pub unsafe extern "C" fn hipEventQuery(event: hipEvent_t) -> hipError_t {
    call(|| happened(event))
}

pub unsafe extern "C" fn hipEventElapsedTime(
    milliseconds: *mut f32,
    start: hipEvent_t,
    stop: hipEvent_t,
) -> hipError_t {
    call(|| {
        let state = state();
        state.alive_for(find(&state, stop)?.session)?;
        let instant = |event| {
            let event = find(&state, event)?;
            if event.captured.is_some() {
                return Err(hipError_t::hipErrorCapturedEvent);
            }
            if event.flags & HIP_EVENT_DISABLE_TIMING != 0 {
                return Err(BAD_HANDLE);
            }
            event.recorded.ok_or(BAD_HANDLE)
        };
        let (start, stop) = (instant(start)?, instant(stop)?);
        // The time that work took, without the time that the host took in between.
        let seconds = if start.stream == stop.stream {
            stop.stream_busy - start.stream_busy
        } else {
            stop.device_busy - start.device_busy
        };
        // SAFETY: null or valid.
        unsafe { put(milliseconds, (seconds * 1e3) as f32) }
    })
}

pub unsafe extern "C" fn hipEventDestroy(event: hipEvent_t) -> hipError_t {
    call(|| {
        let removed = state().events.remove(&event.0.addr());
        removed.map(drop).ok_or(BAD_HANDLE)
    })
}

/// Range of stream priorities: the least and the greatest.
pub(super) const PRIORITIES: [c_int; 2] = [1, -1];
