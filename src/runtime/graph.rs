//! Graphs: work that is captured once and launched any number of times.

use std::ptr;

use hip_sys::{HipError, hipGraph_t, hipGraphExec_t, hipStream_t, hipStreamCaptureMode};

use super::context::{Context, same_context};
use super::stream::Stream;
use crate::error::Result;

impl Stream {
    /// Captures the work that `work` enqueues into a graph, without running it.
    ///
    /// # Errors
    /// The error of `work`; a capture that the runtime refuses or that `work` made invalid.
    pub fn capture(&self, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
        let hip = self.context().hip();
        // SAFETY: the stream is alive.
        unsafe {
            hip.hipStreamBeginCapture(
                hipStream_t(self.handle()),
                hipStreamCaptureMode::hipStreamCaptureModeThreadLocal,
            )
            .map_err(|error| self.refusal(error))?
        };
        // A panic in `work` must not leave the stream in capture.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(self)));
        let mut graph = hipGraph_t::NULL;
        // SAFETY: ends the capture that began above, also if `work` failed.
        let ended = unsafe { hip.hipStreamEndCapture(hipStream_t(self.handle()), &mut graph) };
        let release = |graph: hipGraph_t| {
            if !graph.is_null() {
                // SAFETY: the graph was made by the capture and is dropped once.
                let _ = unsafe { hip.hipGraphDestroy(graph) };
            }
        };
        let outcome = outcome.unwrap_or_else(|panic| {
            release(graph);
            std::panic::resume_unwind(panic)
        });
        if let Err(error) = outcome {
            release(graph);
            return Err(error);
        }
        ended?;
        let mut handle = hipGraphExec_t::NULL;
        // SAFETY: the graph is alive; no log is asked for.
        let made: std::result::Result<(), HipError> = unsafe {
            hip.hipGraphInstantiate(&mut handle, graph, ptr::null_mut(), ptr::null_mut(), 0)
        };
        release(graph);
        made?;
        Ok(Graph {
            context: self.context().clone(),
            handle,
        })
    }
}

/// Captured work, launched any number of times.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    handle: hipGraphExec_t,
}

// SAFETY: graph handles may be used from any thread.
unsafe impl Send for Graph {}

impl Graph {
    /// Enqueues the captured work.
    ///
    /// # Errors
    /// A stream of another context; the runtime refuses.
    ///
    /// # Safety
    /// All memory that the captured work uses is still allocated when it runs: the tensors, the workspace, and the plan
    /// ([`Prefill`](crate::prefill::Prefill)), which holds the lengths. Kernels stay loaded, because a graph keeps its
    /// context alive. The caller orders all work on other streams that shares memory with the graph, such as a
    /// workspace.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        same_context("stream", stream.context(), &self.context)?;
        let _turn = stream.turn();
        // SAFETY: graph and stream are alive; the caller vouches for the memory.
        unsafe {
            self.context
                .hip()
                .hipGraphLaunch(self.handle, hipStream_t(stream.handle()))?
        };
        Ok(())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: it was created here and is destroyed once.
        let _ = unsafe { self.context.hip().hipGraphExecDestroy(self.handle) };
    }
}
