//! A loaded HIP runtime, and calls of its functions.

use crate::load::{Found, Loaded};
use crate::{Attempt, HipError, LoadError, cuda, hipDeviceProp_tR0600, hipError_t, types::*};
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Finds a function by its name; null if there is none.
pub type Resolver = fn(&str) -> *const c_void;

/// Source of the function addresses.
enum Provider {
    /// A shared library. Never unloaded: the runtime's threads and exit handlers outlive any user.
    Library(ManuallyDrop<libloading::Library>),
    /// Functions of this process.
    InProcess(Resolver),
    /// Functions of this crate that call the CUDA driver.
    Cuda,
}

/// A HIP runtime.
///
/// Each function is looked up when it is called for the first time. `Hip` may be shared by threads.
pub struct Hip {
    provider: Provider,
    library: Arc<str>,
    addresses: [AtomicPtr<c_void>; COUNT],
}

macro_rules! methods {
    (;
        status { $($(#[$meta:meta])* fn $name:ident($($arg:ident: $type:ty),*);)* }
        other { $($(#[$other_meta:meta])* fn $other:ident($($other_arg:ident: $other_type:ty),*) -> $result:ty;)* }
    ) => {
        /// Index of each function in [`Hip::addresses`].
        #[allow(non_camel_case_types, clippy::enum_variant_names)]
        #[derive(Clone, Copy)]
        enum Function { $($name,)* $($other,)* }

        const NAMES: &[&str] = &[$(stringify!($name),)* $(stringify!($other),)*];
        const COUNT: usize = NAMES.len();

        /// Calls the runtime's functions of the same names.
        ///
        /// # Safety
        /// As HIP documents. Pointers must be valid for all that the function reads and writes, until the enqueued work
        /// is done. Handles must be alive.
        #[allow(non_snake_case, clippy::too_many_arguments, clippy::missing_safety_doc)]
        impl Hip {
            $(
                $(#[$meta])*
                #[inline]
                pub unsafe fn $name(&self, $($arg: $type),*) -> Result<(), HipError> {
                    type Signature = unsafe extern "C" fn($($type),*) -> hipError_t;
                    let address = self.address(Function::$name)?;
                    // SAFETY: the address is that of the function of this name and signature.
                    let function = unsafe { core::mem::transmute::<*mut c_void, Signature>(address) };
                    // SAFETY: the caller keeps the function's contract.
                    let code = unsafe { function($($arg),*) };
                    self.check(stringify!($name), code)
                }
            )*
            $(
                $(#[$other_meta])*
                #[inline]
                pub unsafe fn $other(&self, $($other_arg: $other_type),*) -> Result<$result, HipError> {
                    type Signature = unsafe extern "C" fn($($other_type),*) -> $result;
                    let address = self.address(Function::$other)?;
                    // SAFETY: the address is that of the function of this name and signature.
                    let function = unsafe { core::mem::transmute::<*mut c_void, Signature>(address) };
                    // SAFETY: the caller keeps the function's contract.
                    Ok(unsafe { function($($other_arg),*) })
                }
            )*
        }
    };
}
crate::for_each_function!(methods);

impl Hip {
    /// The names of all functions, as the runtime exports them.
    pub const FUNCTIONS: &'static [&'static str] = NAMES;

    /// Loads a HIP runtime. Tries `path` if given; else the library that `DELTAWAVE_HIP_LIBRARY` names; else a
    /// `libamdhip64` that this process has mapped already; else `libamdhip64.so.7`, `.so.6`, `.so.5`, `.so` by the
    /// dynamic loader's search; else the same names in `$ROCM_PATH/lib` and `/opt/rocm/lib`.
    ///
    /// The word `cuda` as `path` or variable binds the functions to the CUDA driver instead, so that the device is an
    /// NVIDIA GPU ([`Hip::is_cuda`]). The path of a CUDA driver does the same. Without `path` and variable, the CUDA
    /// driver is used if it has a GPU and no HIP runtime is found or has a device.
    ///
    /// # Errors
    /// [`LoadError`]. A library that `path` or the variable names is the only one tried.
    pub fn load(path: Option<&Path>) -> Result<Hip, LoadError> {
        match crate::load::load(path) {
            Ok(Found::Named(Loaded { library, name })) => Ok(Self::of_library(library, name)),
            Ok(Found::Cuda(driver)) => Ok(Self::of_cuda(driver)),
            Ok(Found::Searched(Loaded { library, name })) => {
                let hip = Self::of_library(library, name);
                // The HIP runtime is asked last: it starts slowly, and is rarely installed beside a CUDA driver.
                let cuda = crate::load::cuda().map(Self::of_cuda).ok();
                let cuda = cuda.filter(|cuda| cuda.count_devices().is_ok());
                Ok(match cuda {
                    Some(cuda) if hip.count_devices().is_err() => cuda,
                    _ => hip,
                })
            }
            Err(LoadError::NotFound { mut tried }) => {
                let cuda = crate::load::cuda().map(Self::of_cuda);
                let cuda = cuda.and_then(|hip| match hip.count_devices() {
                    Ok(_) => Ok(hip),
                    Err(error) => Err(error.into()),
                });
                cuda.map_err(|error| {
                    let library = cuda::LIBRARY.to_owned();
                    tried.push(Attempt { library, error });
                    LoadError::NotFound { tried }
                })
            }
            Err(error) => Err(error),
        }
    }

    /// Wraps a runtime that is part of this process, such as a simulator. `name` stands for the library in errors.
    ///
    /// # Safety
    /// Each address that `resolver` returns for one of [`Hip::FUNCTIONS`] must be a function with the signature in
    /// [`for_each_function!`](crate::for_each_function), valid for the rest of the process.
    pub unsafe fn from_resolver(name: impl Into<String>, resolver: Resolver) -> Hip {
        Self::new(Provider::InProcess(resolver), name.into().into())
    }

    /// Number of devices, at least one.
    fn count_devices(&self) -> Result<c_int, HipError> {
        let mut count = 0;
        // SAFETY: `count` is valid for a write.
        unsafe { self.hipGetDeviceCount(&mut count)? };
        match count {
            1.. => Ok(count),
            _ => Err(self.failure("hipGetDeviceCount", hipError_t::hipErrorNoDevice)),
        }
    }

    fn of_library(library: libloading::Library, name: String) -> Hip {
        Self::new(Provider::Library(ManuallyDrop::new(library)), name.into())
    }

    fn of_cuda(driver: &cuda::Driver) -> Hip {
        Self::new(Provider::Cuda, driver.name().into())
    }

    fn new(provider: Provider, library: Arc<str>) -> Hip {
        Hip {
            provider,
            library,
            addresses: [const { AtomicPtr::new(null_mut()) }; COUNT],
        }
    }

    /// Name or path that the library was loaded by.
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Whether the functions are implemented on the CUDA driver, so that devices are NVIDIA GPUs.
    pub fn is_cuda(&self) -> bool {
        matches!(self.provider, Provider::Cuda)
    }

    /// Describes a tensor to kernels that copy boxes of it. `None`: the runtime is not the CUDA driver, the tensor breaks a
    /// limit of [`BoxedTensor`](cuda::BoxedTensor), or the driver refuses it or lacks the function. The last error
    /// (`hipGetLastError`) stays as it was.
    pub fn tensor_map(&self, tensor: &cuda::BoxedTensor) -> Option<cuda::TensorMap> {
        self.is_cuda().then(|| cuda::tensor_map(tensor)).flatten()
    }

    /// Launches a kernel that may begin while earlier kernels of the stream still end. The kernel itself waits for them
    /// (`griddepcontrol.wait`). HIP runtimes have no such launch: there it is
    /// [`hipModuleLaunchKernel`](Hip::hipModuleLaunchKernel).
    ///
    /// # Safety
    /// As for `hipModuleLaunchKernel`. Before it has waited, the kernel may touch nothing that earlier kernels still
    /// use.
    pub unsafe fn launch_overlapping(
        &self,
        function: hipFunction_t,
        workgroups: c_uint,
        threads: c_uint,
        shared_bytes: c_uint,
        stream: hipStream_t,
        parameters: *mut *mut c_void,
    ) -> Result<(), HipError> {
        if self.is_cuda() {
            // SAFETY: the caller keeps the contract.
            let code = unsafe {
                cuda::launch_overlapping(
                    function,
                    workgroups,
                    threads,
                    shared_bytes,
                    stream,
                    parameters,
                )
            };
            return self.check("hipModuleLaunchKernel", code);
        }
        // SAFETY: the caller keeps the contract.
        unsafe {
            self.hipModuleLaunchKernel(
                function,
                workgroups,
                1,
                1,
                threads,
                1,
                1,
                shared_bytes,
                stream,
                parameters,
                null_mut(),
            )
        }
    }

    /// Whether the runtime has function `name`. False for names that are not in [`Hip::FUNCTIONS`].
    pub fn has(&self, name: &str) -> bool {
        let index = NAMES.iter().position(|n| *n == name);
        index.is_some_and(|index| self.resolve(index).is_ok())
    }

    #[inline]
    fn address(&self, function: Function) -> Result<*mut c_void, HipError> {
        let index = function as usize;
        // Relaxed is enough: the address is all that is published.
        let address = self.addresses[index].load(Ordering::Relaxed);
        if address.is_null() {
            self.resolve(index)
        } else {
            Ok(address)
        }
    }

    #[cold]
    fn resolve(&self, index: usize) -> Result<*mut c_void, HipError> {
        let symbol = NAMES[index];
        let missing = |source| HipError::MissingSymbol {
            symbol,
            library: self.library.clone(),
            behind: match self.provider {
                Provider::Cuda => cuda::missing(symbol),
                _ => None,
            },
            source,
        };
        let address = match &self.provider {
            Provider::Library(library) => {
                // SAFETY: the symbol is only read as an address here.
                let found = unsafe { library.get::<*mut c_void>(symbol.as_bytes()) };
                *found.map_err(|e| missing(Some(Arc::new(e))))?
            }
            Provider::InProcess(resolver) => resolver(symbol).cast_mut(),
            Provider::Cuda => cuda::resolver(symbol).cast_mut(),
        };
        if address.is_null() {
            return Err(missing(None));
        }
        self.addresses[index].store(address, Ordering::Relaxed);
        Ok(address)
    }

    #[inline]
    fn check(&self, call: &'static str, code: hipError_t) -> Result<(), HipError> {
        if code.is_success() {
            Ok(())
        } else {
            Err(self.failure(call, code))
        }
    }

    #[cold]
    fn failure(&self, call: &'static str, code: hipError_t) -> HipError {
        HipError::Status {
            call,
            code,
            name: self.name_of(code),
            poisoned: code.is_poisoned(),
            library: self.library.clone(),
            detail: match self.provider {
                Provider::Cuda => cuda::last_failure().map(Arc::from),
                _ => None,
            },
        }
    }

    /// Name of a code: this crate's, or the runtime's if the code is newer than this crate.
    fn name_of(&self, code: hipError_t) -> Arc<str> {
        if let Some(name) = code.name() {
            return name.into();
        }
        // SAFETY: any integer is a valid argument.
        match unsafe { self.hipGetErrorName(code) } {
            // SAFETY: a non-null answer is a C string that lives as long as the runtime.
            Ok(name) if !name.is_null() => unsafe { CStr::from_ptr(name) }.to_string_lossy().into(),
            _ => "unknown error".into(),
        }
    }
}

impl fmt::Debug for Hip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hip")
            .field("library", &self.library)
            .finish_non_exhaustive()
    }
}
