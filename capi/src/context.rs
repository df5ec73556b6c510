//! Devices, and memory for callers that have no runtime of their own.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;

use deltawave::runtime::{Backend, Context};
use hip_sys::hipMemcpyKind;

use crate::abi::{self, dw_context, dw_device_info};
use crate::read::{self, Checked};
use crate::status::{guard, guard_silent};

/// # Safety
/// The handle is null, or [`dw_context_create`] made it and it was not destroyed.
pub(crate) unsafe fn context<'a>(handle: *const dw_context) -> Checked<&'a Context> {
    // SAFETY: the caller keeps the promise under `# Safety`.
    unsafe { read::reference("context", handle.cast::<Context>()) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_context_create(
    backend: c_int,
    device: c_int,
    context: *mut *mut dw_context,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes a null or valid pointer.
        let out = unsafe { read::output("context", context) }?;
        *out = ptr::null_mut();
        let backends = [
            (abi::DW_BACKEND_AUTO, "DW_BACKEND_AUTO", Backend::Auto),
            (abi::DW_BACKEND_HIP, "DW_BACKEND_HIP", Backend::Hip),
            (
                abi::DW_BACKEND_SIMULATOR,
                "DW_BACKEND_SIMULATOR",
                Backend::Simulator,
            ),
        ];
        let backend = read::choice("backend", backend, &backends)?;
        let made = Context::new(backend, read::natural("device", device)?)?;
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_context_destroy(context: *mut dw_context) {
    guard_silent(|| {
        if !context.is_null() {
            // SAFETY: `dw_context_create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(context.cast::<Context>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_context_info(
    context: *const dw_context,
    info: *mut dw_device_info,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (context, size) =
            unsafe { (self::context(context)?, read::size_of_caller("info", info)?) };
        let device = context.device();
        let mut filled = dw_device_info {
            size,
            memory_bytes: device.memory_bytes,
            compute_units: device.compute_units,
            ..Default::default()
        };
        put(&mut filled.backend, context.backend().name());
        put(&mut filled.arch, &device.arch);
        put(&mut filled.name, &device.name);
        let known = size.min(size_of::<dw_device_info>());
        let bytes = ptr::from_ref(&filled).cast::<u8>();
        // SAFETY: the caller's struct has `size` bytes.
        unsafe { bytes.copy_to_nonoverlapping(info.cast(), known) };
        Ok(())
    })
}

/// Copies a text, cut to fit, and a NUL.
fn put(field: &mut [c_char], text: &str) {
    let room = field.len() - 1;
    for (to, from) in field[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_malloc(
    context: *const dw_context,
    bytes: usize,
    address: *mut *mut c_void,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (context, out) =
            unsafe { (self::context(context)?, read::output("address", address)?) };
        *out = ptr::null_mut();
        context.make_current()?;
        if bytes > 0 {
            // SAFETY: the address is valid for a write.
            unsafe { context.hip().hipMalloc(out, bytes) }?;
        }
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_free(context: *const dw_context, address: *mut c_void) -> c_int {
    guard(|| {
        // SAFETY: the caller passes a null or valid pointer.
        let context = unsafe { self::context(context) }?;
        if !address.is_null() {
            context.make_current()?;
            // SAFETY: the runtime refuses addresses that it did not allocate.
            unsafe { context.hip().hipFree(address) }?;
        }
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_copy(
    context: *const dw_context,
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
    direction: c_int,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes a null or valid pointer.
        let context = unsafe { self::context(context) }?;
        let directions = [
            (
                abi::DW_TO_DEVICE,
                "DW_TO_DEVICE",
                hipMemcpyKind::hipMemcpyHostToDevice,
            ),
            (
                abi::DW_TO_HOST,
                "DW_TO_HOST",
                hipMemcpyKind::hipMemcpyDeviceToHost,
            ),
            (
                abi::DW_ON_DEVICE,
                "DW_ON_DEVICE",
                hipMemcpyKind::hipMemcpyDeviceToDevice,
            ),
        ];
        let kind = read::choice("direction", direction, &directions)?;
        if bytes > 0 {
            read::given("to", to)?;
            read::given("from", from)?;
            context.make_current()?;
            // SAFETY: the caller passes two valid ranges of `bytes` bytes.
            unsafe { context.hip().hipMemcpy(to, from, bytes, kind)? };
        }
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_synchronize(context: *const dw_context, stream: *mut c_void) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let context = unsafe { self::context(context) }?;
        context.make_current()?;
        // SAFETY: the caller passes a stream of the device, or null.
        unsafe { context.borrow_stream(stream) }.synchronize()
    })
}
