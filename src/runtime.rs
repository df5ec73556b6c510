//! Devices, streams, events and graphs: what a launch needs, and nothing that a launch does by itself.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::sync::Arc;

use hip_sys::{
    HIP_STREAM_NON_BLOCKING, Hip, HipError, hipDeviceProp_tR0600, hipEvent_t, hipFuncAttribute,
    hipFunction_attribute, hipFunction_t, hipGraph_t, hipGraphExec_t, hipModule_t, hipStream_t,
    hipStreamCaptureMode,
};

use crate::code_objects;
use crate::error::{ArgumentError, ArgumentKind, Error, Result};
use crate::launch::{self, LaunchShape};

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

/// The kernels of this crate, by code object.
pub(crate) const KERNELS: &[(&str, &[&str])] = &[
    ("commit", &["dw_commit"]),
    ("conv", &["dw_conv_bf16", "dw_conv_f16"]),
    (
        "decode",
        &[
            "dw_decode_bf16_k128",
            "dw_decode_bf16_k256",
            "dw_decode_f16_k128",
            "dw_decode_f16_k256",
            "dw_decode_norm_bf16",
            "dw_decode_norm_f16",
        ],
    ),
    ("gate", &["dw_gate"]),
    ("norm", &["dw_norm_bf16", "dw_norm_f16"]),
    ("prefill_lengths", &["dw_prefill_lengths"]),
    (
        "prefill_prepare",
        &["dw_prefill_prepare_bf16", "dw_prefill_prepare_f16"],
    ),
    (
        "prefill_scan",
        &[
            "dw_prefill_scan_bf16_k64",
            "dw_prefill_scan_bf16_k96",
            "dw_prefill_scan_bf16_k128",
            "dw_prefill_scan_bf16_k192",
            "dw_prefill_scan_bf16_k256",
            "dw_prefill_scan_f16_k64",
            "dw_prefill_scan_f16_k96",
            "dw_prefill_scan_f16_k128",
            "dw_prefill_scan_f16_k192",
            "dw_prefill_scan_f16_k256",
        ],
    ),
    (
        "prefill_summarise",
        &[
            "dw_prefill_summarise_bf16_k64",
            "dw_prefill_summarise_bf16_k96",
            "dw_prefill_summarise_bf16_k128",
            "dw_prefill_summarise_bf16_k192",
            "dw_prefill_summarise_bf16_k256",
            "dw_prefill_summarise_f16_k64",
            "dw_prefill_summarise_f16_k96",
            "dw_prefill_summarise_f16_k128",
            "dw_prefill_summarise_f16_k192",
            "dw_prefill_summarise_f16_k256",
        ],
    ),
    (
        "prefill_combine",
        &[
            "dw_prefill_combine_k64",
            "dw_prefill_combine_k96",
            "dw_prefill_combine_k128",
            "dw_prefill_combine_k192",
            "dw_prefill_combine_k256",
        ],
    ),
];

struct Inner {
    hip: Hip,
    backend: Backend,
    device: c_int,
    info: DeviceInfo,
    launch_shape: &'static LaunchShape,
    functions: HashMap<&'static str, Function>,
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
/// Making it loads the code objects; no later call of this crate loads, compiles or allocates on its own account.
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
        Self::load(deltawave_sim::hip::runtime(), Backend::Simulator, device)
    }

    fn on_hip(hip: Hip, device: usize) -> Result<Context> {
        Self::load(hip, Backend::Hip, device)
    }

    fn load(hip: Hip, backend: Backend, device: usize) -> Result<Context> {
        let mut count: c_int = 0;
        // SAFETY: `count` is valid for a write.
        unsafe { hip.hipGetDeviceCount(&mut count)? };
        if device >= usize::try_from(count).unwrap_or(0) {
            return Err(Error::NoSuchDevice {
                device,
                count: usize::try_from(count).unwrap_or(0),
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
        let launch_shape = LaunchShape::of(&info.arch);
        let functions = Self::load_functions(&hip, &info, launch_shape)?;
        Ok(Context(Arc::new(Inner {
            hip,
            backend,
            device,
            info,
            launch_shape,
            functions,
        })))
    }

    fn load_functions(
        hip: &Hip,
        info: &DeviceInfo,
        launch_shape: &LaunchShape,
    ) -> Result<HashMap<&'static str, Function>> {
        let mut functions = HashMap::new();
        for &(object, kernels) in KERNELS {
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
            for &kernel in kernels {
                let name = CString::new(kernel).expect("kernel names have no NUL");
                let mut handle = hipFunction_t::NULL;
                // SAFETY: the module was just loaded, the name is a C string.
                let found = unsafe { hip.hipModuleGetFunction(&mut handle, module, name.as_ptr()) };
                found.map_err(|source| Error::MissingKernel {
                    object,
                    kernel: kernel.to_owned(),
                    source,
                })?;
                let shared_bytes = launch_shape.shared_bytes(kernel);
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
                let function = Function {
                    handle,
                    shared_bytes,
                };
                functions.insert(kernel, function);
            }
        }
        Ok(functions)
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
        let names = KERNELS.iter().flat_map(|(_, kernels)| kernels.iter());
        names
            .map(|&name| {
                let function = self.0.functions[name].handle;
                Ok(KernelInfo {
                    name,
                    registers: attribute(
                        function,
                        hipFunction_attribute::HIP_FUNC_ATTRIBUTE_NUM_REGS,
                    )?,
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
        kernel: &str,
        workgroups: u32,
        threads: u32,
        arguments: &A,
    ) -> Result<()> {
        let function = self.0.functions[kernel];
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
        Ok(launched?)
    }

    /// Launches a kernel that waits by itself for those before it in the stream, so that it may begin while they end.
    ///
    /// # Safety
    /// As for [`Context::launch`]; the kernel calls `wait_for_previous_kernel`.
    pub(crate) unsafe fn launch_overlapping<A>(
        &self,
        stream: &Stream,
        kernel: &str,
        workgroups: u32,
        threads: u32,
        arguments: &A,
    ) -> Result<()> {
        let function = self.0.functions[kernel];
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
        Ok(launched?)
    }

    /// How the kernels of this device divide work.
    pub(crate) fn launch_shape(&self) -> &'static LaunchShape {
        self.0.launch_shape
    }

    /// Dies to which the device deals workgroups in turn.
    pub(crate) fn dies(&self) -> u32 {
        launch::dies(&self.0.info.arch, self.0.info.compute_units)
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

impl Stream {
    /// The context that it belongs to.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The runtime's handle.
    pub fn handle(&self) -> *mut c_void {
        self.handle.0
    }

    /// Waits for all its work.
    ///
    /// # Errors
    /// Work that failed.
    pub fn synchronize(&self) -> Result<()> {
        // SAFETY: the stream is alive.
        unsafe { self.context.0.hip.hipStreamSynchronize(self.handle)? };
        Ok(())
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
            self.context.0.hip.hipEventRecord(handle, self.handle)?;
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
            )?
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
    /// ([`Prefill`](crate::prefill::Prefill)), which holds the lengths.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        same_context("stream", &stream.context, &self.context)?;
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
