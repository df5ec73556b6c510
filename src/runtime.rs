//! Devices, streams, events and graphs: what a launch needs, and nothing that a launch does by itself.

use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use deltawave_sim::hip::Session;
use hip_sys::{
    HIP_STREAM_NON_BLOCKING, Hip, HipError, hipDeviceProp_tR0600, hipError_t, hipEvent_t,
    hipFuncAttribute, hipFunction_attribute, hipFunction_t, hipGraph_t, hipGraphExec_t,
    hipModule_t, hipStream_t, hipStreamCaptureMode,
};

use crate::code_objects;
use crate::error::{ArgumentError, ArgumentKind, Error, Result};
use crate::kernels::{self, Kernel, TABLE, Target};

/// Which runtime executes the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Backend {
    /// A GPU where one is found that this crate has kernels for, else the simulator. `DELTAWAVE_BACKEND` (`hip`,
    /// `simulator`) decides it from outside.
    #[default]
    Auto,
    /// A GPU: an AMD one through the HIP runtime, or an NVIDIA one through the CUDA driver under HIP's names
    /// ([`Hip::load`] says which; [`Context::runtime`] says it for people).
    Hip,
    /// The gfx942 simulator, if the crate is built with its feature `simulator`, which is on by default.
    Simulator,
}

impl Backend {
    /// `hip` or `simulator`, where it is decided.
    pub fn name(self) -> &'static str {
        match self {
            Backend::Auto => "auto",
            Backend::Hip => "hip",
            Backend::Simulator => "simulator",
        }
    }
}

/// What a device is.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Its architecture without features: `gfx942`, `sm_90a`.
    pub arch: String,
    /// Compute units.
    pub compute_units: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

/// What a compiled kernel takes of a compute unit.
#[derive(Clone, Debug)]
pub struct KernelInfo {
    /// Its name.
    pub name: &'static str,
    /// Vector registers, both kinds.
    pub registers: u32,
    /// Bytes of LDS.
    pub lds_bytes: u32,
    /// Bytes of private memory per lane.
    pub private_bytes: u32,
}

struct Inner {
    hip: Hip,
    backend: Backend,
    device: c_int,
    info: DeviceInfo,
    target: &'static Target,
    /// The rows of [`TABLE`], in its order.
    functions: Vec<Function>,
    modules: Vec<hipModule_t>,
    /// On the simulator: faults of other contexts are not this one's.
    session: Option<Session>,
}

impl Inner {
    /// Loads the kernels. What was loaded before a failure is unloaded with this value.
    fn load_functions(&mut self) -> Result<()> {
        let (hip, info) = (&self.hip, &self.info);
        for rows in TABLE.chunk_by(|a, b| a.object == b.object) {
            let object = rows[0].object;
            let code = code_objects::for_arch(&info.arch)
                .find(|c| c.name == object)
                .ok_or_else(|| Error::MissingKernels {
                    arch: info.arch.clone(),
                    device: info.name.clone(),
                    object,
                    reason: code_objects::why_missing(&info.arch),
                })?;
            let mut module = hipModule_t::NULL;
            // SAFETY: the bytes are a whole code object, which the runtime copies.
            unsafe { hip.hipModuleLoadData(&mut module, code.bytes.as_ptr().cast())? };
            self.modules.push(module);
            for row in rows {
                let name = CString::new(row.name).expect("kernel names have no NUL");
                let mut handle = hipFunction_t::NULL;
                // SAFETY: the module was just loaded, the name is a C string.
                let found = unsafe { hip.hipModuleGetFunction(&mut handle, module, name.as_ptr()) };
                found.map_err(|source| Error::MissingKernel {
                    object,
                    kernel: row.name.to_owned(),
                    source,
                })?;
                let shared_bytes = self.target.shared_bytes(row.role);
                if shared_bytes > 0 {
                    // SAFETY: the function was just loaded.
                    unsafe {
                        hip.hipFuncSetAttribute(
                            handle.0.cast_const().cast(),
                            hipFuncAttribute::hipFuncAttributeMaxDynamicSharedMemorySize,
                            shared_bytes as c_int,
                        )?
                    };
                }
                self.functions.push(Function {
                    handle,
                    shared_bytes,
                });
            }
        }
        Ok(())
    }
}

impl Drop for Inner {
    /// Unloads the kernels once the device is done with them. A failure leaves nothing to do.
    fn drop(&mut self) {
        if self.modules.is_empty() {
            return;
        }
        let mut current = self.device;
        // SAFETY: `current` is valid for a write; nobody can launch the kernels any more.
        unsafe {
            let _ = self.hip.hipGetDevice(&mut current);
            let _ = self.hip.hipSetDevice(self.device);
            let _ = self.hip.hipDeviceSynchronize();
            for module in self.modules.drain(..) {
                let _ = self.hip.hipModuleUnload(module);
            }
            // Whoever drops the last handle keeps the device that was current.
            if current != self.device {
                let _ = self.hip.hipSetDevice(current);
            }
        }
    }
}

/// A loaded kernel, and the shared memory with which it is launched.
#[derive(Clone, Copy)]
struct Function {
    handle: hipFunction_t,
    shared_bytes: u32,
}

// SAFETY: handles of the HIP runtime may be used from any thread; nothing here changes after construction.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// One device with all kernels loaded: made once, shared by everything.
///
/// Making it loads the code objects; no later call of this crate loads, compiles or allocates on its own account. They
/// are unloaded with the last value that needs them: clones, plans, buffers, streams, events and [`Graph`]s keep the
/// context. Dropping that last value waits for the device, as freeing memory does: not while a stream is being captured.
///
/// On the simulator each context has faults of its own: after one, its calls fail, and a new context works.
#[derive(Clone)]
pub struct Context(Arc<Inner>);

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context")
            .field("backend", &self.0.backend)
            .field("device", &self.0.info)
            .finish()
    }
}

impl Context {
    /// A context on a device of a backend.
    ///
    /// # Errors
    /// No runtime, no such device, no kernels for its architecture, or a runtime that refuses them.
    pub fn new(backend: Backend, device: usize) -> Result<Context> {
        match backend {
            Backend::Hip => Self::on_hip(Hip::load(None)?, device),
            Backend::Simulator => Self::on_simulator(device),
            Backend::Auto => match std::env::var("DELTAWAVE_BACKEND").as_deref() {
                Ok("hip") => Self::new(Backend::Hip, device),
                Ok("simulator") => Self::on_simulator(device),
                Ok(other) if !other.is_empty() => Err(ArgumentError::new(
                    "DELTAWAVE_BACKEND",
                    ArgumentKind::Value,
                    format!("`{other}`"),
                    "it must be hip or simulator",
                )
                .into()),
                _ => match Self::new(Backend::Hip, device) {
                    Ok(context) => Ok(context),
                    // A library that was named and cannot be used is an error, never a reason to take another.
                    Err(error)
                        if std::env::var_os(hip_sys::LIBRARY_VARIABLE)
                            .is_some_and(|name| !name.is_empty()) =>
                    {
                        Err(error)
                    }
                    // Nor is one of several devices.
                    Err(error @ Error::NoSuchDevice { count: 1.., .. }) => Err(error),
                    Err(error) => match Self::on_simulator(device) {
                        // Without a simulator it is the GPU that is missing.
                        Err(Error::NoSimulator) => Err(error),
                        other => other,
                    },
                },
            },
        }
    }

    /// A context on a device of the HIP runtime at a path.
    ///
    /// # Errors
    /// As [`Context::new`]; a path that fails is never replaced by another. The library is trusted: it runs with all
    /// rights of the process.
    pub fn with_library(path: &Path, device: usize) -> Result<Context> {
        Self::on_hip(Hip::load(Some(path))?, device)
    }

    /// A context on a device of a runtime that the caller has bound.
    ///
    /// # Errors
    /// As [`Context::new`].
    pub fn with_runtime(hip: Hip, device: usize) -> Result<Context> {
        Self::on_hip(hip, device)
    }

    /// A context on the simulator.
    ///
    /// # Errors
    /// The crate was built without kernels for gfx942, or without its feature `simulator` ([`Error::NoSimulator`]).
    pub fn simulator() -> Result<Context> {
        Self::on_simulator(0)
    }

    #[cfg(not(feature = "simulator"))]
    fn on_simulator(_: usize) -> Result<Context> {
        Err(Error::NoSimulator)
    }

    #[cfg(feature = "simulator")]
    fn on_simulator(device: usize) -> Result<Context> {
        let session = Session::new();
        session.enter();
        let hip = deltawave_sim::hip::runtime();
        Self::load(hip, Backend::Simulator, device, Some(session))
    }

    fn on_hip(hip: Hip, device: usize) -> Result<Context> {
        Self::load(hip, Backend::Hip, device, None)
    }

    fn load(
        hip: Hip,
        backend: Backend,
        device: usize,
        session: Option<Session>,
    ) -> Result<Context> {
        let mut count: c_int = 0;
        // SAFETY: `count` is valid for a write.
        match unsafe { hip.hipGetDeviceCount(&mut count) } {
            // What runtimes say on a machine without a GPU.
            Err(error) if error.code() == Some(hipError_t::hipErrorNoDevice) => count = 0,
            outcome => outcome?,
        }
        let count = usize::try_from(count).unwrap_or(0);
        if device >= count {
            return Err(Error::NoSuchDevice {
                device,
                count,
                library: hip.library().to_owned(),
            });
        }
        let device = device as c_int;
        let mut properties = hipDeviceProp_tR0600::zeroed();
        // SAFETY: `properties` is valid for a write of that struct.
        unsafe {
            hip.hipSetDevice(device)?;
            hip.hipGetDevicePropertiesR0600(&mut properties, device)?;
        }
        let full_arch = properties.arch_name();
        let info = DeviceInfo {
            name: properties.name(),
            arch: full_arch.split(':').next().unwrap_or_default().to_owned(),
            compute_units: u32::try_from(properties.multiProcessorCount).unwrap_or(0),
            memory_bytes: properties.totalGlobalMem as u64,
        };
        let target = Target::of(&info.arch);
        let mut inner = Inner {
            hip,
            backend,
            device,
            info,
            target,
            functions: Vec::with_capacity(TABLE.len()),
            modules: Vec::new(),
            session,
        };
        inner.load_functions()?;
        Ok(Context(Arc::new(inner)))
    }

    /// The runtime's table of functions, for callers that need more of it than this crate wraps.
    pub fn hip(&self) -> &Hip {
        &self.0.hip
    }

    /// What executes the kernels, and from which library: `HIP runtime libamdhip64.so.6`, `CUDA driver libcuda.so.1`,
    /// `simulator`.
    pub fn runtime(&self) -> String {
        let hip = &self.0.hip;
        match self.0.backend {
            Backend::Simulator => "simulator".to_owned(),
            _ if hip.is_cuda() => format!("CUDA driver {}", hip.library()),
            _ => format!("HIP runtime {}", hip.library()),
        }
    }

    /// [`Backend::Hip`] or [`Backend::Simulator`].
    pub fn backend(&self) -> Backend {
        self.0.backend
    }

    /// The device.
    pub fn device(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// What the kernels take of a compute unit, as the runtime reports it.
    ///
    /// # Errors
    /// The runtime cannot say.
    pub fn kernels(&self) -> Result<Vec<KernelInfo>> {
        self.make_current()?;
        let attribute = |function, which| -> Result<u32> {
            let mut value: c_int = 0;
            // SAFETY: the function is loaded, `value` is valid for a write.
            unsafe {
                self.0
                    .hip
                    .hipFuncGetAttribute(&mut value, which, function)?
            };
            Ok(u32::try_from(value).unwrap_or(0))
        };
        let rows = TABLE.iter().zip(&self.0.functions);
        rows.map(|(row, loaded)| {
            let function = loaded.handle;
            Ok(KernelInfo {
                name: row.name,
                registers: attribute(function, hipFunction_attribute::HIP_FUNC_ATTRIBUTE_NUM_REGS)?,
                lds_bytes: attribute(
                    function,
                    hipFunction_attribute::HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
                )?,
                private_bytes: attribute(
                    function,
                    hipFunction_attribute::HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES,
                )?,
            })
        })
        .collect()
    }

    /// A stream of its own.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn stream(&self) -> Result<Stream> {
        self.make_current()?;
        let mut handle = hipStream_t::NULL;
        // SAFETY: `handle` is valid for a write.
        unsafe {
            self.0
                .hip
                .hipStreamCreateWithFlags(&mut handle, HIP_STREAM_NON_BLOCKING)?
        };
        Ok(Stream {
            context: self.clone(),
            handle,
            owned: true,
        })
    }

    /// A stream that belongs to the caller, which outlives the returned value.
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

    /// Waits for everything on the device.
    ///
    /// # Errors
    /// Work that failed since the last call.
    pub fn synchronize(&self) -> Result<()> {
        self.make_current()?;
        // SAFETY: no arguments.
        unsafe { self.0.hip.hipDeviceSynchronize()? };
        Ok(())
    }

    /// Makes the device the calling thread's current one, as calls through [`Context::hip`] need it.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn make_current(&self) -> Result<()> {
        if let Some(session) = &self.0.session {
            session.enter();
        }
        // SAFETY: the device exists.
        unsafe { self.0.hip.hipSetDevice(self.0.device)? };
        Ok(())
    }

    /// Launches a kernel with its argument struct.
    ///
    /// # Safety
    /// The pointers in `arguments` must be valid for what the kernel does with them.
    pub(crate) unsafe fn launch<A>(
        &self,
        stream: &Stream,
        kernel: Kernel<A>,
        workgroups: u32,
        threads: u32,
        arguments: &A,
    ) -> Result<()> {
        let function = self.0.functions[kernel.index()];
        let mut parameters: [*mut c_void; 1] = [ptr::from_ref(arguments).cast_mut().cast()];
        // SAFETY: the function is loaded; the runtime copies the one argument, whose size the code object states.
        let launched = unsafe {
            self.0.hip.hipModuleLaunchKernel(
                function.handle,
                workgroups,
                1,
                1,
                threads,
                1,
                1,
                function.shared_bytes,
                stream.handle,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        launched.map_err(|error| stream.refusal(error))
    }

    /// Launches a kernel that waits by itself for those before it in the stream, so that it may begin while they end.
    ///
    /// # Safety
    /// As for [`Context::launch`]; the kernel calls `wait_for_previous_kernel`.
    pub(crate) unsafe fn launch_overlapping<A>(
        &self,
        stream: &Stream,
        kernel: Kernel<A>,
        workgroups: u32,
        threads: u32,
        arguments: &A,
    ) -> Result<()> {
        let function = self.0.functions[kernel.index()];
        let mut parameters: [*mut c_void; 1] = [ptr::from_ref(arguments).cast_mut().cast()];
        // SAFETY: as in `launch`.
        let launched = unsafe {
            self.0.hip.launch_overlapping(
                function.handle,
                workgroups,
                threads,
                function.shared_bytes,
                stream.handle,
                parameters.as_mut_ptr(),
            )
        };
        launched.map_err(|error| stream.refusal(error))
    }

    /// How the kernels of this device divide work.
    pub(crate) fn target(&self) -> &'static Target {
        self.0.target
    }

    /// Dies to which the device deals workgroups in turn.
    pub(crate) fn dies(&self) -> u32 {
        kernels::dies(&self.0.info.arch, self.0.info.compute_units)
    }

    pub(crate) fn is_same(&self, other: &Context) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
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

/// Threads that launch on one stream take turns at the lock of its handle, so that the kernels of a launch are enqueued
/// without another launch's between them. Contexts may borrow one stream, so the locks are the process's; streams that
/// share one wait for each other's calls of the runtime, never for the device.
static TURNS: [Turn; 64] = [const { Turn(Mutex::new(())) }; 64];

/// A lock in a cache line of its own.
#[repr(align(64))]
struct Turn(Mutex<()>);

impl Stream {
    /// The right to enqueue a whole launch: other launches on the stream wait until it is dropped.
    pub(crate) fn turn(&self) -> MutexGuard<'static, ()> {
        // Handles are addresses or small numbers; Fibonacci hashing spreads both.
        let hash = (self.handle.0.addr() as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let Turn(lock) = &TURNS[(hash >> 58) as usize];
        // Whoever panicked holding it left nothing behind but a launch of its own.
        lock.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The context that it belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The runtime's handle.
    pub fn handle(&self) -> *mut c_void {
        self.handle.0
    }

    /// What a call on this stream failed with: an error of the argument where the runtime does not know a caller's handle.
    fn refusal(&self, error: HipError) -> Error {
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

    /// Waits for all its work.
    ///
    /// # Errors
    /// Work that failed.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive, or the runtime refuses it.
        let waited = unsafe { self.context.0.hip.hipStreamSynchronize(self.handle) };
        waited.map_err(|error| self.refusal(error))
    }

    /// Records an event after the work so far.
    ///
    /// # Errors
    /// The runtime refuses.
    pub fn record(&self) -> Result<Event> {
        let mut handle = hipEvent_t::NULL;
        self.context.make_current()?;
        // SAFETY: `handle` is valid for a write, the stream is alive.
        unsafe {
            self.context
                .0
                .hip
                .hipEventCreateWithFlags(&mut handle, hip_sys::HIP_EVENT_DEFAULT)?;
            let event = Event {
                context: self.context.clone(),
                handle,
            };
            let recorded = self.context.0.hip.hipEventRecord(handle, self.handle);
            recorded.map_err(|error| self.refusal(error))?;
            Ok(event)
        }
    }

    /// Makes later work wait for an event.
    ///
    /// # Errors
    /// An event of another context; the runtime refuses.
    pub fn wait(&self, event: &Event) -> Result<()> {
        same_context("event", &event.context, &self.context)?;
        // SAFETY: stream and event are alive.
        unsafe {
            self.context
                .0
                .hip
                .hipStreamWaitEvent(self.handle, event.handle, 0)?
        };
        Ok(())
    }

    /// Records what `work` enqueues into a graph, instead of running it.
    ///
    /// # Errors
    /// What `work` returns, or a capture that the runtime refuses or `work` broke.
    pub fn capture(&self, work: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
        let hip = &self.context.0.hip;
        // SAFETY: the stream is alive.
        unsafe {
            hip.hipStreamBeginCapture(
                self.handle,
                hipStreamCaptureMode::hipStreamCaptureModeThreadLocal,
            )
            .map_err(|error| self.refusal(error))?
        };
        // A panic in `work` must not leave the stream, and with it the device, recording for ever.
        let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work(self)));
        let mut graph = hipGraph_t::NULL;
        // SAFETY: the capture that was begun above ends here whatever `work` did.
        let ended = unsafe { hip.hipStreamEndCapture(self.handle, &mut graph) };
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
            context: self.context.clone(),
            handle,
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: it was created here and is destroyed once; a failure leaves nothing to do.
            let _ = unsafe { self.context.0.hip.hipStreamDestroy(self.handle) };
        }
    }
}

/// Handles mean something to the runtime and device that made them alone.
pub(crate) fn same_context(argument: &str, given: &Context, wanted: &Context) -> Result<()> {
    if given.is_same(wanted) {
        return Ok(());
    }
    let allowed = "it must be of the same context";
    Err(ArgumentError::new(
        argument,
        ArgumentKind::Device,
        "it is of another context",
        allowed,
    )
    .into())
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
    /// Waits until it has happened.
    ///
    /// # Errors
    /// Work before it that failed.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the event is alive.
        unsafe { self.context.0.hip.hipEventSynchronize(self.handle)? };
        Ok(())
    }

    /// Milliseconds from `earlier` to this event, once both have happened. On the simulator: host time.
    ///
    /// # Errors
    /// An event of another context; one of them has not happened.
    pub fn milliseconds_since(&self, earlier: &Event) -> Result<f32> {
        same_context("earlier", &earlier.context, &self.context)?;
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive, `milliseconds` is valid for a write.
        unsafe {
            self.context.0.hip.hipEventElapsedTime(
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
        let _ = unsafe { self.context.0.hip.hipEventDestroy(self.handle) };
    }
}

/// Captured work, ready to be launched again and again.
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
    /// ([`Prefill`](crate::prefill::Prefill)), which holds the lengths. The kernels are: a graph keeps its context. What
    /// the graph shares with launches or graphs on other streams, such as a workspace, they use in an order that the
    /// caller makes.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        same_context("stream", &stream.context, &self.context)?;
        let _turn = stream.turn();
        // SAFETY: graph and stream are alive; the caller answers for the memory.
        unsafe {
            self.context
                .0
                .hip
                .hipGraphLaunch(self.handle, stream.handle)?
        };
        Ok(())
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: it was created here and is destroyed once.
        let _ = unsafe { self.context.0.hip.hipGraphExecDestroy(self.handle) };
    }
}
