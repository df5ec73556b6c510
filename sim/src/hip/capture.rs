//! Stream capture, and the graphs that it records.
//!
//! Nodes are kept in the order of the calls, each with the nodes that it depends on. That order is a legal execution,
//! so a graph is replayed in it. The dependencies show whether all streams of a capture were joined.

use super::state::{Captured, Device, Outcome};
use super::work::Operation;
use hip_sys::{hipError_t, hipStreamCaptureMode, hipStreamCaptureStatus};
use std::collections::BTreeSet;
use std::thread::ThreadId;

/// One operation of a graph.
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub operation: Operation,
    after: Vec<usize>,
}

/// Operations in a legal order.
#[derive(Clone, Debug, Default)]
pub(super) struct Graph {
    pub nodes: Vec<Node>,
}

impl Graph {
    /// The nodes in `frontier` and all nodes that they depend on.
    fn ancestors(&self, frontier: &[usize]) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        let mut open = frontier.to_vec();
        while let Some(node) = open.pop() {
            if found.insert(node) {
                open.extend(&self.nodes[node].after);
            }
        }
        found
    }
}

/// A capture in progress.
#[derive(Debug)]
pub(super) struct Capture {
    origin: usize,
    mode: hipStreamCaptureMode,
    thread: ThreadId,
    graph: Graph,
    invalidated: bool,
}

impl Device {
    fn captured(&self, stream: usize) -> Option<&Captured> {
        self.streams.get(&stream)?.capture.as_ref()
    }

    /// Whether a stream's work is being recorded instead of run.
    pub fn is_capturing(&self, stream: usize) -> bool {
        self.captured(stream).is_some()
    }

    /// Capture status of a stream.
    pub fn capture_status(&self, stream: usize) -> hipStreamCaptureStatus {
        match self.captured(stream) {
            None => hipStreamCaptureStatus::hipStreamCaptureStatusNone,
            Some(c) if self.captures.get(&c.capture).is_none_or(|c| c.invalidated) => {
                hipStreamCaptureStatus::hipStreamCaptureStatusInvalidated
            }
            Some(_) => hipStreamCaptureStatus::hipStreamCaptureStatusActive,
        }
    }

    /// Refuses a call that would wait for the device or run outside of stream order, if a capture forbids it.
    /// Invalidates the captures that do.
    pub fn outside_captures(&mut self) -> Outcome {
        let here = std::thread::current().id();
        let mut forbidden = false;
        for capture in self.captures.values_mut() {
            let forbids = match capture.mode {
                hipStreamCaptureMode::hipStreamCaptureModeRelaxed => false,
                hipStreamCaptureMode::hipStreamCaptureModeThreadLocal => capture.thread == here,
                _ => true,
            };
            if forbids {
                capture.invalidated = true;
                forbidden = true;
            }
        }
        if forbidden {
            Err(hipError_t::hipErrorStreamCaptureUnsupported)
        } else {
            Ok(())
        }
    }

    /// Refuses a call that would wait for a stream that is being captured, and invalidates the capture.
    pub fn may_wait(&mut self, stream: usize) -> Outcome {
        let Some(id) = self.captured(stream).map(|c| c.capture) else {
            return Ok(());
        };
        self.spoil(id);
        Err(hipError_t::hipErrorStreamCaptureUnsupported)
    }

    /// Invalidates a capture after a call that it forbids.
    pub fn spoil(&mut self, id: usize) {
        if let Some(capture) = self.captures.get_mut(&id) {
            capture.invalidated = true;
        }
    }

    /// Refuses work of the default stream while a stream that synchronises with it is being captured.
    pub fn no_implicit_dependency(&mut self, stream: usize) -> Outcome {
        if stream != 0 {
            return Ok(());
        }
        let blocking = |s: &super::state::Stream| s.flags & hip_sys::HIP_STREAM_NON_BLOCKING == 0;
        let streams = self.streams.values().filter(|s| blocking(s));
        let ids: BTreeSet<usize> = streams
            .filter_map(|s| Some(s.capture.as_ref()?.capture))
            .collect();
        for id in &ids {
            self.spoil(*id);
        }
        if ids.is_empty() {
            Ok(())
        } else {
            Err(hipError_t::hipErrorStreamCaptureImplicit)
        }
    }

    /// The capture `id`, if it is still valid.
    fn active(&mut self, id: usize) -> Outcome<&mut Capture> {
        match self.captures.get_mut(&id) {
            Some(capture) if !capture.invalidated => Ok(capture),
            _ => Err(hipError_t::hipErrorStreamCaptureInvalidated),
        }
    }

    /// Records operations of a stream that is being captured.
    pub fn capture(
        &mut self,
        stream: usize,
        operations: impl IntoIterator<Item = Operation>,
    ) -> Outcome {
        let Some(Captured {
            capture: id,
            mut frontier,
        }) = self.captured(stream).cloned()
        else {
            return Err(hipError_t::hipErrorIllegalState);
        };
        let capture = self.active(id)?;
        for operation in operations {
            let node = Node {
                operation,
                after: frontier,
            };
            frontier = vec![capture.graph.nodes.len()];
            capture.graph.nodes.push(node);
        }
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.capture = Some(Captured {
                capture: id,
                frontier,
            });
        }
        Ok(())
    }

    /// Implements `hipStreamBeginCapture`.
    pub fn begin_capture(&mut self, stream: usize, mode: hipStreamCaptureMode) -> Outcome {
        if mode.0 > hipStreamCaptureMode::hipStreamCaptureModeRelaxed.0 {
            return Err(hipError_t::hipErrorInvalidValue);
        }
        if stream == 0 {
            return Err(hipError_t::hipErrorStreamCaptureUnsupported);
        }
        if self.is_capturing(stream) {
            return Err(hipError_t::hipErrorIllegalState);
        }
        let id = self.handle();
        let capture = Capture {
            origin: stream,
            mode,
            thread: std::thread::current().id(),
            graph: Graph::default(),
            invalidated: false,
        };
        self.captures.insert(id, capture);
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.capture = Some(Captured {
                capture: id,
                frontier: Vec::new(),
            });
        }
        Ok(())
    }

    /// Implements `hipStreamEndCapture`.
    pub fn end_capture(&mut self, stream: usize) -> Outcome<Graph> {
        let Some(Captured {
            capture: id,
            frontier,
        }) = self.captured(stream).cloned()
        else {
            return Err(hipError_t::hipErrorIllegalState);
        };
        let capture = self
            .captures
            .get_mut(&id)
            .ok_or(hipError_t::hipErrorStreamCaptureInvalidated)?;
        if capture.origin != stream {
            capture.invalidated = true;
            return Err(hipError_t::hipErrorStreamCaptureUnmatched);
        }
        let relaxed = capture.mode == hipStreamCaptureMode::hipStreamCaptureModeRelaxed;
        if !relaxed && capture.thread != std::thread::current().id() {
            return Err(hipError_t::hipErrorStreamCaptureWrongThread);
        }
        let Some(capture) = self.abandon_capture(id) else {
            return Err(hipError_t::hipErrorStreamCaptureInvalidated);
        };
        if capture.invalidated {
            return Err(hipError_t::hipErrorStreamCaptureInvalidated);
        }
        if capture.graph.ancestors(&frontier).len() != capture.graph.nodes.len() {
            return Err(hipError_t::hipErrorStreamCaptureUnjoined);
        }
        Ok(capture.graph)
    }

    /// Ends a capture. Its streams run work again.
    fn abandon_capture(&mut self, id: usize) -> Option<Capture> {
        for stream in self.streams.values_mut() {
            if stream.capture.as_ref().is_some_and(|c| c.capture == id) {
                stream.capture = None;
            }
        }
        self.captures.remove(&id)
    }

    /// Handles the destruction of a stream: ends a capture that began in it, invalidates one that it takes part in.
    pub fn leave_capture(&mut self, stream: usize) {
        let Some(id) = self.captured(stream).map(|c| c.capture) else {
            return;
        };
        match self.captures.get_mut(&id) {
            Some(capture) if capture.origin != stream => capture.invalidated = true,
            _ => drop(self.abandon_capture(id)),
        }
    }

    /// Records an event in a stream that is being captured.
    pub fn capture_event(&mut self, stream: usize, event: usize) -> Outcome {
        let Some(captured) = self.captured(stream).cloned() else {
            return Err(hipError_t::hipErrorIllegalState);
        };
        self.active(captured.capture)?;
        if let Some(event) = self.events.get_mut(&event) {
            event.captured = Some(captured);
            event.recorded = None;
        }
        Ok(())
    }

    /// Implements `hipStreamWaitEvent` if the stream or the event is part of a capture.
    pub fn capture_wait(&mut self, stream: usize, event: Option<Captured>) -> Outcome {
        let waiting = self.captured(stream).cloned();
        match (waiting, event) {
            (None, None) => Ok(()),
            // An event from outside the capture: no node represents it.
            (Some(waiting), None) => {
                self.active(waiting.capture)?.invalidated = true;
                Err(hipError_t::hipErrorStreamCaptureIsolation)
            }
            (None, Some(event)) => {
                // An event of a capture that has ended represents nothing.
                if !self.captures.contains_key(&event.capture) {
                    return Err(hipError_t::hipErrorCapturedEvent);
                }
                self.active(event.capture)?;
                if stream == 0 {
                    return Err(hipError_t::hipErrorStreamCaptureImplicit);
                }
                if let Some(stream) = self.streams.get_mut(&stream) {
                    stream.capture = Some(event);
                }
                Ok(())
            }
            (Some(mut waiting), Some(event)) => {
                if waiting.capture != event.capture {
                    self.active(waiting.capture)?.invalidated = true;
                    return Err(hipError_t::hipErrorStreamCaptureMerge);
                }
                self.active(waiting.capture)?;
                for node in event.frontier {
                    if !waiting.frontier.contains(&node) {
                        waiting.frontier.push(node);
                    }
                }
                if let Some(stream) = self.streams.get_mut(&stream) {
                    stream.capture = Some(waiting);
                }
                Ok(())
            }
        }
    }
}
