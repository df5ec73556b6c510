//! A device with all kernels loaded.

use std::ffi::{CString, c_int};
use std::path::Path;
use std::sync::Arc;

#[cfg(feature = "simulator")]
use deltawave_sim::hip::Session;
use hip_sys::{
    Hip, hipDeviceProp_tR0600, hipError_t, hipFuncAttribute, hipFunction_attribute, hipFunction_t,
    hipModule_t,
};

use super::{Backend, DeviceInfo, KernelInfo};
use crate::code_objects;
use crate::error::{ArgumentError, ArgumentKind, Error, Result};
use crate::kernels::{self, Kernel, TABLE, Target};

/// Without the simulator no context has a session.
#[cfg(not(feature = "simulator"))]
enum Session {}

#[cfg(not(feature = "simulator"))]
impl Session {
    fn enter(&self) {
        match *self {}
    }
}

struct Inner {
    hip: Hip,
    backend: Backend,
    device: c_int,
    info: DeviceInfo,
    target: &'static Target,
    /// Loaded kernels, in the order of [`TABLE`].
    functions: Vec<Function>,
    modules: Vec<hipModule_t>,
    /// The simulator's session, which keeps faults of other contexts apart.
    session: Option<Session>,
}

impl Inner {
    /// Loads the kernels. After a failure, dropping `self` unloads the modules loaded so far.
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
    /// Unloads the kernels after the device has finished. Failures are ignored.
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
            // Restores the current device of the dropping thread.
            if current != self.device {
                let _ = self.hip.hipSetDevice(current);
            }
        }
    }
}

/// A loaded kernel, and the bytes of shared memory with which it is launched.
#[derive(Clone, Copy)]
pub(super) struct Function {
    pub(super) handle: hipFunction_t,
    pub(super) shared_bytes: u32,
}

// SAFETY: handles of the HIP runtime may be used from any thread; nothing here changes after construction.
unsafe impl Send for Inner {}
// SAFETY: as above.
unsafe impl Sync for Inner {}

/// One device with all kernels loaded. Make it once and share it.
///
/// A new context loads the code objects; later calls load and compile nothing. Clones, plans, buffers, streams, events
/// and [`Graph`](super::Graph)s keep the context alive. The last of them to be dropped unloads the code objects. That
/// waits for the device, as freeing memory does, so do not drop it during a stream capture.
///
/// On the simulator faults belong to one context: after a fault its calls fail, and a new context works.
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
                    // If the named library cannot be used, that is an error: no other is tried.
                    Err(error)
                        if std::env::var_os(hip_sys::LIBRARY_VARIABLE)
                            .is_some_and(|name| !name.is_empty()) =>
                    {
                        Err(error)
                    }
                    // A device out of range is an error too, if there are devices.
                    Err(error @ Error::NoSuchDevice { count: 1.., .. }) => Err(error),
                    Err(error) => match Self::on_simulator(device) {
                        // Without a simulator, report the error of the GPU.
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
    /// As [`Context::new`]. If the path fails, no other library is tried. The library is trusted: it runs with all
    /// rights of the process.
    pub fn with_library(path: &Path, device: usize) -> Result<Context> {
        Self::on_hip(Hip::load(Some(path))?, device)
    }

    /// A context on a device of an already loaded runtime.
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
            // Runtimes report this on a machine without a GPU.
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

    /// The runtime's function table, for calls that this crate does not wrap.
    pub fn hip(&self) -> &Hip {
        &self.0.hip
    }

    /// The runtime that executes the kernels, in words: `HIP runtime libamdhip64.so.6`, `CUDA driver libcuda.so.1`,
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

    /// Resources of every kernel, as reported by the runtime.
    ///
    /// # Errors
    /// The runtime does not report them.
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

    /// Waits for all work of the device.
    ///
    /// # Errors
    /// Work that failed since the last call.
    pub fn synchronize(&self) -> Result<()> {
        self.make_current()?;
        // SAFETY: no arguments.
        unsafe { self.0.hip.hipDeviceSynchronize()? };
        Ok(())
    }

    /// Makes the device current in the calling thread. Calls through [`Context::hip`] need this.
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

    /// The loaded kernel of a row of [`TABLE`].
    pub(super) fn function<A>(&self, kernel: Kernel<A>) -> Function {
        self.0.functions[kernel.index()]
    }

    /// Launch parameters of this device's kernels.
    pub(crate) fn target(&self) -> &'static Target {
        self.0.target
    }

    /// Number of dies, to which the device deals workgroups in turn.
    pub(crate) fn dies(&self) -> u32 {
        kernels::dies(&self.0.info.arch, self.0.info.compute_units)
    }

    pub(crate) fn is_same(&self, other: &Context) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Checks that a handle belongs to the context that uses it: other runtimes and devices do not know it.
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
