//! Launches of a kernel with its argument struct.

use std::ffi::c_void;
use std::ptr;

use hip_sys::hipStream_t;

use super::context::Context;
use super::stream::Stream;
use crate::error::Result;
use crate::kernels::Kernel;

impl Context {
    /// Launches a kernel with its argument struct.
    ///
    /// # Safety
    /// The pointers in `arguments` are valid for all accesses of the kernel.
    pub(crate) unsafe fn launch<A>(
        &self,
        stream: &Stream,
        kernel: Kernel<A>,
        workgroups: u32,
        threads: u32,
        arguments: &A,
    ) -> Result<()> {
        // SAFETY: the caller keeps the contract.
        unsafe { self.launch_with(stream, kernel, workgroups, threads, arguments, ptr::null()) }
    }

    /// Launches a kernel with its argument struct and what `maps` points to, which only kernels for NVIDIA GPUs that
    /// copy boxes of tensors take.
    ///
    /// # Safety
    /// As [`Context::launch`]. `maps` is valid for reads of what the kernel takes.
    pub(crate) unsafe fn launch_with<A>(
        &self,
        stream: &Stream,
        kernel: Kernel<A>,
        workgroups: u32,
        threads: u32,
        arguments: &A,
        maps: *const c_void,
    ) -> Result<()> {
        let function = self.function(kernel);
        let mut parameters = [ptr::from_ref(arguments).cast_mut().cast(), maps.cast_mut()];
        // SAFETY: the function is loaded; the runtime copies the arguments, whose sizes the code object states.
        let launched = unsafe {
            self.hip().hipModuleLaunchKernel(
                function.handle,
                workgroups,
                1,
                1,
                threads,
                1,
                1,
                function.shared_bytes,
                hipStream_t(stream.handle()),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        launched.map_err(|error| stream.refusal(error))
    }

    /// Launches a kernel that may begin before earlier kernels of the stream end. It must wait for them itself.
    ///
    /// # Safety
    /// As [`Context::launch_with`], and the kernel calls `wait_for_previous_kernel`.
    pub(crate) unsafe fn launch_overlapping<A>(
        &self,
        stream: &Stream,
        kernel: Kernel<A>,
        workgroups: u32,
        threads: u32,
        arguments: &A,
        maps: *const c_void,
    ) -> Result<()> {
        let function = self.function(kernel);
        let mut parameters = [ptr::from_ref(arguments).cast_mut().cast(), maps.cast_mut()];
        // SAFETY: as in `launch`.
        let launched = unsafe {
            self.hip().launch_overlapping(
                function.handle,
                workgroups,
                threads,
                function.shared_bytes,
                hipStream_t(stream.handle()),
                parameters.as_mut_ptr(),
            )
        };
        launched.map_err(|error| stream.refusal(error))
    }
}
