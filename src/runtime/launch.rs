//! Launches of a kernel with its argument struct.

use std::ffi::c_void;
use std::ptr;

use hip_sys::hipStream_t;

use super::context::Context;
use super::stream::Stream;
use crate::abi;
use crate::error::Result;
use crate::kernels::Kernel;

/// A second argument of zeros, which every kernel that takes one accepts.
#[repr(C, align(64))]
struct Zeros([u8; abi::DWK_MAPS_BYTES as usize]);

static ZEROS: Zeros = Zeros([0; abi::DWK_MAPS_BYTES as usize]);

impl Context {
    /// Launches a kernel with its argument struct, and zeros as a second argument if it takes one.
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
        unsafe {
            self.launch_with(
                stream,
                kernel,
                workgroups,
                threads,
                arguments,
                Self::no_maps(),
            )
        }
    }

    /// A second argument for kernels that shall copy without descriptions of tensors.
    pub(crate) fn no_maps() -> *const c_void {
        (&raw const ZEROS).cast()
    }

    /// Launches a kernel with its argument struct and, if it takes a second argument, what `maps` points to
    /// ([`Target::second_argument_bytes`](crate::kernels::Target::second_argument_bytes)).
    ///
    /// # Safety
    /// As [`Context::launch`]. `maps` is valid for reads of the second argument's bytes.
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
