//! Streams and events: the order in which work runs, and the turns that threads take to enqueue it.

use std::ffi::c_void;
use std::sync::{Mutex, MutexGuard, PoisonError};

use hip_sys::{HIP_STREAM_NON_BLOCKING, HipError, hipError_t, hipEvent_t, hipStream_t};

use super::context::{Context, same_context};
use crate::error::{ArgumentError, ArgumentKind, Error, Result};

impl Context {
    /// Creates a stream.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn stream(&self) -> Result<Stream> {
        self.make_current()?;
        let mut handle = hipStream_t::NULL;
        // SAFETY: `handle` is valid for a write.
        unsafe {
            self.hip()
                .hipStreamCreateWithFlags(&mut handle, HIP_STREAM_NON_BLOCKING)?
        };
        Ok(Stream {
            context: self.clone(),
            handle,
            owned: true,
        })
    }

    /// Wraps a stream that belongs to the caller and outlives the returned value.
    ///
    /// # Safety
    /// `handle` is a stream of this context's device and runtime (null: the default stream) while the value is used.
    pub unsafe fn borrow_stream(&self, handle: *mut c_void) -> Stream {
        Stream {
            context: self.clone(),
            handle: hipStream_t(handle),
            owned: false,
        }
    }
}

/// An ordered queue of work.
pub struct Stream {
    context: Context,
    handle: hipStream_t,
    owned: bool,
}

// SAFETY: stream handles may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above; the runtime orders concurrent calls.
unsafe impl Sync for Stream {}

impl std::fmt::Debug for Stream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stream")
            .field("handle", &self.handle.0)
            .finish()
    }
}

/// Locks, by hash of a stream's handle, that keep the kernels of a launch together: other threads' launches on the
/// stream wait. The locks are global, because several contexts may borrow one stream. Streams that share a lock wait
/// for each other's runtime calls, never for the device.
static TURNS: [Turn; 64] = [const { Turn(Mutex::new(())) }; 64];

/// A lock in a cache line of its own.
#[repr(align(64))]
struct Turn(Mutex<()>);

impl Stream {
    /// Takes the stream's lock to enqueue a whole launch. Other launches on the stream wait until it is dropped.
    pub(crate) fn turn(&self) -> MutexGuard<'static, ()> {
        // Handles are addresses or small numbers; Fibonacci hashing spreads both.
        let hash = (self.handle.0.addr() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let Turn(lock) = &TURNS[(hash >> 58) as usize];
        // A panic while the lock was held leaves no state to repair.
        lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Context of the stream.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The runtime's handle.
    pub fn handle(&self) -> *mut c_void {
        self.handle.0
    }

    /// Converts the error of a call on this stream. If the runtime does not know a caller's handle, the argument is at
    /// fault.
    pub(super) fn refusal(&self, error: HipError) -> Error {
        match error.code() {
            Some(
                code @ (hipError_t::hipErrorContextIsDestroyed | hipError_t::hipErrorInvalidHandle),
            ) if !self.owned && !self.handle.is_null() => {
                let was = format!("{:p}, for which the runtime says {code}", self.handle.0);
                let allowed = "it must be a stream of the device, or null";
                ArgumentError::new("stream", ArgumentKind::Device, was, allowed).into()
            }
            _ => error.into(),
        }
    }

    /// Waits for all work of the stream.
    ///
    /// # Errors
    /// Work that failed.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive, or the runtime refuses it.
        let waited = unsafe { self.context.hip().hipStreamSynchronize(self.handle) };
        waited.map_err(|error| self.refusal(error))
    }

    /// Records an event after the work that was enqueued so far.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn record(&self) -> Result<Event> {
        let mut handle = hipEvent_t::NULL;
        self.context.make_current()?;
        // SAFETY: `handle` is valid for a write, the stream is alive.
        unsafe {
            self.context
                .hip()
                .hipEventCreateWithFlags(&mut handle, hip_sys::HIP_EVENT_DEFAULT)?;
            let event = Event {
                context: self.context.clone(),
                handle,
            };
            let recorded = self.context.hip().hipEventRecord(handle, self.handle);
            recorded.map_err(|error| self.refusal(error))?;
            Ok(event)
        }
    }

    /// Makes work that is enqueued later wait for an event.
    ///
    /// # Errors
    /// An event of another context; the runtime refuses.
    pub fn wait(&self, event: &Event) -> Result<()> {
        same_context("event", &event.context, &self.context)?;
        // SAFETY: stream and event are alive.
        unsafe {
            self.context
                .hip()
                .hipStreamWaitEvent(self.handle, event.handle, 0)?
        };
        Ok(())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: it was created here and is destroyed once; a failure leaves nothing to do.
            let _ = unsafe { self.context.hip().hipStreamDestroy(self.handle) };
        }
    }
}

/// A point in a stream.
#[derive(Debug)]
pub struct Event {
    context: Context,
    handle: hipEvent_t,
}

// SAFETY: event handles may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Waits until the event has happened.
    ///
    /// # Errors
    /// Work before it that failed.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the event is alive.
        unsafe { self.context.hip().hipEventSynchronize(self.handle)? };
        Ok(())
    }

    /// Milliseconds from `earlier` to this event. Both must have happened. The simulator returns host time.
    ///
    /// # Errors
    /// An event of another context; one of them has not happened.
    pub fn milliseconds_since(&self, earlier: &Event) -> Result<f32> {
        same_context("earlier", &earlier.context, &self.context)?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive, `milliseconds` is valid for a write.
        unsafe {
            self.context.hip().hipEventElapsedTime(
                &mut milliseconds,
                earlier.handle,
                self.handle,
            )?
        };
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: it was created here and is destroyed once.
        let _ = unsafe { self.context.hip().hipEventDestroy(self.handle) };
    }
}
