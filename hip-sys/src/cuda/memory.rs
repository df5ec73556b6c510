//! HIP functions for device memory, on the CUDA driver: allocations, copies, fills.

use core::ffi::{c_int, c_uint, c_void};
use std::ptr::{from_mut, null_mut};

use super::driver::{Address, Driver, Failure, Handle, INVALID_VALUE, Outcome};
use super::state::{given, hip_functions};
use crate::{hipDeviceptr_t, hipMemcpyKind, hipMemoryType, hipPointerAttribute_t, hipStream_t};

/// Flags of `hipHostMalloc` that the driver supports under the same numbers: portable, mapped, write-combined.
const HOST_FLAGS: c_uint = 7;

/// A pointer as the driver's number. Addresses are unified: the driver identifies host memory by its pointer.
fn address(pointer: *const c_void) -> Address {
    pointer.expose_provenance() as Address
}

hip_functions! {
    // HIP gives null for 0 bytes, where the driver refuses.
    in_context fn hipMalloc(pointer: *mut *mut c_void, size: usize) needs [cuMemAlloc_v2] |driver| {
        let mut found: Address = 0;
        let pointer = given(pointer)?;
        if size > 0 {
            driver.cuMemAlloc_v2(&mut found, size)?;
        }
        *pointer = core::ptr::with_exposed_provenance_mut(found as usize);
        Ok(())
    }
    in_context fn hipFree(pointer: *mut c_void) needs [cuMemFree_v2] |driver| {
        match pointer.is_null() {
            true => Ok(()),
            false => driver.cuMemFree_v2(address(pointer)),
        }
    }
    in_context fn hipMemGetInfo(free: *mut usize, total: *mut usize) needs [cuMemGetInfo_v2] |driver| {
        let (mut unused, mut ignored) = (0, 0);
        let free = if free.is_null() { from_mut(&mut unused) } else { free };
        let total = if total.is_null() { from_mut(&mut ignored) } else { total };
        driver.cuMemGetInfo_v2(free, total)
    }
    in_context fn hipHostMalloc(pointer: *mut *mut c_void, size: usize, flags: c_uint) needs [cuMemHostAlloc] |driver| {
        let pointer = given(pointer)?;
        if size == 0 {
            *pointer = null_mut();
            return Ok(());
        }
        driver.cuMemHostAlloc(pointer, size, flags & HOST_FLAGS)
    }
    in_context fn hipHostFree(pointer: *mut c_void) needs [cuMemFreeHost] |driver| {
        match pointer.is_null() {
            true => Ok(()),
            false => driver.cuMemFreeHost(pointer),
        }
    }
    // The driver may return while the last bytes of a copy are still on their way.
    in_context fn hipMemcpy(to: *mut c_void, from: *const c_void, size: usize, kind: hipMemcpyKind)
        needs [cuMemcpy, cuMemcpyHtoD_v2, cuMemcpyDtoH_v2, cuMemcpyDtoD_v2, cuStreamSynchronize] |driver| {
        if size == 0 {
            return Ok(());
        }
        match kind {
            hipMemcpyKind::hipMemcpyHostToDevice => driver.cuMemcpyHtoD_v2(address(to), from, size)?,
            hipMemcpyKind::hipMemcpyDeviceToHost => driver.cuMemcpyDtoH_v2(to, address(from), size)?,
            hipMemcpyKind::hipMemcpyDeviceToDevice => driver.cuMemcpyDtoD_v2(address(to), address(from), size)?,
            hipMemcpyKind::hipMemcpyHostToHost | hipMemcpyKind::hipMemcpyDefault => {
                driver.cuMemcpy(address(to), address(from), size)?;
            }
            _ => return Err(Failure::refused(INVALID_VALUE)),
        }
        driver.cuStreamSynchronize(null_mut())
    }
    in_context fn hipMemcpyAsync(to: *mut c_void, from: *const c_void, size: usize, kind: hipMemcpyKind, stream: hipStream_t)
        needs [cuMemcpyAsync, cuMemcpyHtoDAsync_v2, cuMemcpyDtoHAsync_v2, cuMemcpyDtoDAsync_v2] |driver| {
        if size == 0 {
            return Ok(());
        }
        match kind {
            hipMemcpyKind::hipMemcpyHostToDevice => driver.cuMemcpyHtoDAsync_v2(address(to), from, size, stream.0),
            hipMemcpyKind::hipMemcpyDeviceToHost => driver.cuMemcpyDtoHAsync_v2(to, address(from), size, stream.0),
            hipMemcpyKind::hipMemcpyDeviceToDevice => {
                driver.cuMemcpyDtoDAsync_v2(address(to), address(from), size, stream.0)
            }
            hipMemcpyKind::hipMemcpyHostToHost | hipMemcpyKind::hipMemcpyDefault => {
                driver.cuMemcpyAsync(address(to), address(from), size, stream.0)
            }
            _ => Err(Failure::refused(INVALID_VALUE)),
        }
    }
    // HIP takes the lowest byte of the value, as the driver does.
    in_context fn hipMemset(to: *mut c_void, value: c_int, size: usize) needs [cuMemsetD8_v2, cuStreamSynchronize] |driver| {
        if size == 0 {
            return Ok(());
        }
        driver.cuMemsetD8_v2(address(to), value as u8, size)?;
        driver.cuStreamSynchronize(null_mut())
    }
    in_context fn hipMemsetAsync(to: *mut c_void, value: c_int, size: usize, stream: hipStream_t)
        needs [cuMemsetD8Async] |driver| {
        match size {
            0 => Ok(()),
            _ => driver.cuMemsetD8Async(address(to), value as u8, size, stream.0),
        }
    }
    in_context fn hipMemsetD32Async(to: hipDeviceptr_t, value: c_int, count: usize, stream: hipStream_t)
        needs [cuMemsetD32Async] |driver| {
        match count {
            0 => Ok(()),
            _ => driver.cuMemsetD32Async(address(to), value as c_uint, count, stream.0),
        }
    }
    in_context fn hipPointerGetAttributes(attributes: *mut hipPointerAttribute_t, pointer: *const c_void)
        needs [cuPointerGetAttributes] |driver| {
        *given(attributes)? = pointer_attributes(driver, given(pointer.cast_mut())?)?;
        Ok(())
    }
}

/// Kind and device of the memory at `pointer`. Pointers that the driver does not know give no information.
fn pointer_attributes(driver: &Driver, pointer: *mut c_void) -> Outcome<hipPointerAttribute_t> {
    // `CU_POINTER_ATTRIBUTE_*` and `CU_MEMORYTYPE_*` of cuda.h.
    const MEMORY_TYPE: c_uint = 2;
    const DEVICE_POINTER: c_uint = 3;
    const HOST_POINTER: c_uint = 4;
    const IS_MANAGED: c_uint = 8;
    const DEVICE_ORDINAL: c_uint = 9;
    const HOST: c_uint = 1;
    const DEVICE: c_uint = 2;
    let mut memory: c_uint = 0;
    let mut on_device: Address = 0;
    let mut on_host: Handle = null_mut();
    let mut managed: c_uint = 0;
    let mut device: c_int = 0;
    let names = [
        MEMORY_TYPE,
        DEVICE_POINTER,
        HOST_POINTER,
        IS_MANAGED,
        DEVICE_ORDINAL,
    ];
    let mut values: [*mut c_void; 5] = [
        from_mut(&mut memory).cast(),
        from_mut(&mut on_device).cast(),
        from_mut(&mut on_host).cast(),
        from_mut(&mut managed).cast(),
        from_mut(&mut device).cast(),
    ];
    // SAFETY: each value is valid for a write of its attribute's type.
    unsafe {
        driver.cuPointerGetAttributes(
            names.len() as c_uint,
            names.as_ptr(),
            values.as_mut_ptr(),
            address(pointer),
        )?;
    }
    let mut found = hipPointerAttribute_t::default();
    found.r#type = match (memory, managed) {
        (_, 1..) => hipMemoryType::hipMemoryTypeManaged,
        (HOST, _) => hipMemoryType::hipMemoryTypeHost,
        (DEVICE, _) => hipMemoryType::hipMemoryTypeDevice,
        _ => return Ok(found),
    };
    found.device = device;
    found.devicePointer = core::ptr::with_exposed_provenance_mut(on_device as usize);
    found.hostPointer = on_host;
    found.isManaged = c_int::from(managed > 0);
    Ok(found)
}
