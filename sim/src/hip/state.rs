//! State of the simulated device, and the wrapper that every HIP function runs in.

use super::KernelStatistics;
use super::capture::{Capture, Graph};
use super::counted::Counted;
use super::heap::Heap;
use super::work::Kernel;
use crate::code_object::CodeObject;
use hip_sys::hipError_t;
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// Result of a function.
pub(super) type Outcome<T = ()> = Result<T, hipError_t>;

/// A stream.
#[derive(Debug, Default)]
pub(super) struct Stream {
    /// `HIP_STREAM_NON_BLOCKING`.
    pub flags: u32,
    /// Seconds of work done.
    pub busy: f64,
    /// Capture that it takes part in.
    pub capture: Option<Captured>,
    /// Session that created it. Default streams have none: they belong to the caller's session.
    pub session: Option<u64>,
}

/// Position of a stream or an event in a capture.
#[derive(Clone, Debug)]
pub(super) struct Captured {
    /// Key in [`Device::captures`].
    pub capture: usize,
    /// Nodes that the next node depends on.
    pub frontier: Vec<usize>,
}

/// Time of an event.
#[derive(Clone, Copy, Debug)]
pub(super) struct Instant {
    pub stream: usize,
    pub stream_busy: f64,
    pub device_busy: f64,
}

/// An event.
#[derive(Debug, Default)]
pub(super) struct Event {
    pub flags: u32,
    pub recorded: Option<Instant>,
    pub captured: Option<Captured>,
    pub session: u64,
}

/// Reason why the device no longer works.
#[derive(Clone, Debug)]
pub(super) struct Poison {
    pub code: hipError_t,
    pub text: String,
}

/// A loaded code object, and the handles of its kernels.
pub(super) struct Module {
    pub code: Arc<CodeObject>,
    pub functions: HashMap<String, usize>,
}

/// All objects that handles name.
pub(super) struct Device {
    pub heap: Heap,
    pub streams: HashMap<usize, Stream>,
    pub events: HashMap<usize, Event>,
    pub modules: HashMap<usize, Module>,
    pub functions: HashMap<usize, Arc<Kernel>>,
    pub graphs: HashMap<usize, Graph>,
    pub executables: HashMap<usize, Arc<Graph>>,
    pub captures: HashMap<usize, Capture>,
    /// The first fault of each session, the latest last.
    pub faults: Vec<(u64, Poison)>,
    pub options: crate::launch::Options,
    pub statistics: BTreeMap<String, KernelStatistics>,
    pub counted: Counted,
    /// Seconds of work done by all streams.
    pub busy: f64,
    next: usize,
}

/// `hipStreamPerThread`.
const STREAM_PER_THREAD: usize = 2;

impl Device {
    fn new() -> Self {
        let mut device = Device {
            heap: Heap::default(),
            streams: HashMap::new(),
            events: HashMap::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            graphs: HashMap::new(),
            executables: HashMap::new(),
            captures: HashMap::new(),
            faults: Vec::new(),
            options: super::options_from_environment(),
            statistics: BTreeMap::new(),
            counted: Counted::from_environment(),
            busy: 0.0,
            next: 0x1000,
        };
        device.default_streams();
        device
    }

    fn default_streams(&mut self) {
        self.streams.insert(0, Stream::default());
        self.streams.insert(STREAM_PER_THREAD, Stream::default());
    }

    /// Destroys everything. The caller must hold [`Working`].
    pub fn reset(&mut self) {
        // Handles are never reused, so that old handles stay invalid.
        let next = self.next;
        let statistics = std::mem::take(&mut self.statistics);
        let counted = std::mem::replace(&mut self.counted, Counted::Kept(Vec::new()));
        let options = self.options;
        *self = Device {
            next,
            statistics,
            counted,
            options,
            ..Device::new()
        };
    }

    /// Creates a new handle.
    pub fn handle(&mut self) -> usize {
        self.next += 16;
        self.next
    }

    /// Returns the fault of the thread's session as an error, if a kernel faulted.
    pub fn alive(&self) -> Outcome {
        self.alive_for(current_session())
    }

    /// Returns the fault of `session` as an error, if a kernel faulted.
    pub fn alive_for(&self, session: u64) -> Outcome {
        match self.faults.iter().find(|(s, _)| *s == session) {
            Some((_, fault)) => Err(fault.code),
            None => Ok(()),
        }
    }

    /// Session that the work of a stream belongs to.
    pub fn session_of(&self, stream: usize) -> u64 {
        let stream = self.streams.get(&stream);
        stream
            .and_then(|s| s.session)
            .unwrap_or_else(current_session)
    }

    /// Records the first fault of the stream's session, and of the caller's, which may have borrowed the stream.
    pub fn poison(&mut self, stream: usize, code: hipError_t, text: String) {
        let (owner, caller) = (self.session_of(stream), current_session());
        if self.alive_for(owner).is_ok() || self.alive_for(caller).is_ok() {
            eprintln!("gfx942 simulator: {text}");
        }
        for session in [owner, caller] {
            if self.alive_for(session).is_ok() {
                let text = text.clone();
                self.faults.push((session, Poison { code, text }));
            }
        }
    }

    /// Key of a stream's handle.
    pub fn stream(&self, stream: hip_sys::hipStream_t) -> Outcome<usize> {
        match stream.0.addr() {
            // hipStreamLegacy is another name of the default stream.
            0 | 1 => Ok(0),
            key if self.streams.contains_key(&key) => Ok(key),
            _ => Err(hipError_t::hipErrorContextIsDestroyed),
        }
    }
}

static DEVICE: LazyLock<Mutex<Device>> = LazyLock::new(|| Mutex::new(Device::new()));
static WORK: Mutex<()> = Mutex::new(());

/// The device's state. Never held while a kernel runs.
pub(super) fn device() -> MutexGuard<'static, Device> {
    DEVICE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The right to run work, or to free memory that work may use. Lock order: before [`device`], never after.
pub(super) struct Working(#[allow(dead_code)] MutexGuard<'static, ()>);

/// Waits until no other thread runs work.
pub(super) fn working() -> Working {
    Working(WORK.lock().unwrap_or_else(PoisonError::into_inner))
}

/// A group of calls that share a kernel's fault. A fault stops one session; the others go on.
///
/// A process that creates no session has one, and then behaves as HIP specifies.
#[derive(Debug)]
pub struct Session(u64);

impl Session {
    /// Creates a session without a fault.
    #[allow(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Session(NEXT.fetch_add(1, Ordering::Relaxed))
    }

    /// Makes later calls of this thread part of the session, and also the streams and events that it creates. A call
    /// that names such a stream or event belongs to its session, whichever thread makes it.
    pub fn enter(&self) {
        let _ = SESSION.try_with(|session| session.set(self.0));
    }
}

impl Drop for Session {
    /// Removes the session's fault: nobody can ask for it any more.
    fn drop(&mut self) {
        device().faults.retain(|(session, _)| *session != self.0);
    }
}

/// The calling thread's session; 0 is the process's.
pub(super) fn current_session() -> u64 {
    SESSION.try_with(Cell::get).unwrap_or(0)
}

thread_local! {
    static SESSION: Cell<u64> = const { Cell::new(0) };
    static LAST: Cell<hipError_t> = const { Cell::new(hipError_t::hipSuccess) };
    static MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs the body of a function, converts its outcome to a status, and keeps the thread's last error.
pub(super) fn call(body: impl FnOnce() -> Outcome) -> hipError_t {
    set_message(None);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
    match outcome.unwrap_or(Err(hipError_t::hipErrorUnknown)) {
        Ok(()) => hipError_t::hipSuccess,
        Err(code) => {
            if code != hipError_t::hipErrorNotReady {
                LAST.set(code);
            }
            code
        }
    }
}

/// Fails with `code`, and a text for [`super::last_message`].
pub(super) fn explain<T>(code: hipError_t, text: impl ToString) -> Outcome<T> {
    set_message(Some(text.to_string()));
    Err(code)
}

/// Programs may call this from destructors too, after a thread's local values are gone.
fn set_message(text: Option<String>) {
    let _ = MESSAGE.try_with(|message| *message.borrow_mut() = text);
}

pub(super) fn message() -> Option<String> {
    MESSAGE.try_with(|m| m.borrow().clone()).ok().flatten()
}

/// The thread's last error.
pub(super) fn last_error(clear: bool) -> hipError_t {
    let last = LAST.get();
    if clear {
        LAST.set(hipError_t::hipSuccess);
    }
    last
}

/// Writes through a pointer that a caller passed.
///
/// # Safety
/// `pointer` is null or valid for a write of a `T`.
pub(super) unsafe fn put<T>(pointer: *mut T, value: T) -> Outcome {
    if pointer.is_null() {
        return Err(hipError_t::hipErrorInvalidValue);
    }
    // SAFETY: not null, so valid by this function's contract. C callers may pass unaligned pointers.
    unsafe { pointer.write_unaligned(value) };
    Ok(())
}
