//! HIP functions for modules and kernels.
#![allow(non_snake_case, missing_docs)]
// each is documented in the table it is listed in
// As HIP documents them: pointers are null or valid, names are C strings.
#![allow(clippy::missing_safety_doc)]

use super::device::LDS;
use super::state::{Module, Outcome, call, device as state, explain, put, working};
use super::work::{Geometry, Kernel, enqueue, prepare_launch};
use crate::code_object::{CodeObject, LoadError};
use crate::occupancy::Occupancy;
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
use hip_sys::{hipError_t, types::*};
use std::collections::HashMap;
use std::sync::Arc;

const INVALID: hipError_t = hipError_t::hipErrorInvalidValue;
const BAD_HANDLE: hipError_t = hipError_t::hipErrorInvalidHandle;

fn handle(key: usize) -> *mut c_void {
    core::ptr::without_provenance_mut(key)
}

/// Status of a refused code object.
fn code_of(error: &LoadError) -> hipError_t {
    match error {
        LoadError::NoTarget { .. } | LoadError::WrongArch { .. } | LoadError::Xnack => {
            hipError_t::hipErrorNoBinaryForGpu
        }
        LoadError::Undefined { .. } => hipError_t::hipErrorSharedObjectSymbolNotFound,
        LoadError::OutOfMemory { .. } => hipError_t::hipErrorOutOfMemory,
        _ => hipError_t::hipErrorInvalidImage,
    }
}

/// Loads a code object or an offload bundle.
pub(super) fn load(bytes: &[u8]) -> Outcome<hipModule_t> {
    let code = match CodeObject::load(bytes) {
        Ok(code) => Arc::new(code),
        Err(error) => return explain(code_of(&error), error),
    };
    let mut state = state();
    state.alive()?;
    let mut functions = HashMap::new();
    for (index, kernel) in code.kernels().iter().enumerate() {
        let key = state.handle();
        functions.insert(kernel.name().to_owned(), key);
        let kernel = Kernel {
            code: code.clone(),
            index,
        };
        state.functions.insert(key, Arc::new(kernel));
    }
    state.heap.add_image(code.extent());
    let key = state.handle();
    state.modules.insert(key, Module { code, functions });
    Ok(hipModule_t(handle(key)))
}

/// Loads a code object or an offload bundle, with its length from its headers.
///
/// # Safety
/// `image` points to a whole code object or bundle.
pub(super) unsafe fn load_image(image: *const c_void) -> Outcome<hipModule_t> {
    // SAFETY: passed on.
    let bytes = match unsafe { CodeObject::length_at(image.cast()) } {
        // SAFETY: its headers say that it is this long.
        Ok(length) => unsafe { core::slice::from_raw_parts(image.cast::<u8>(), length) },
        Err(error) => return explain(code_of(&error), error),
    };
    load(bytes)
}

pub unsafe extern "C" fn hipModuleLoadData(
    module: *mut hipModule_t,
    image: *const c_void,
) -> hipError_t {
    call(|| {
        if module.is_null() || image.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not null, so a whole code object or bundle.
        let loaded = unsafe { load_image(image)? };
        // SAFETY: valid.
        unsafe { put(module, loaded) }
    })
}

pub unsafe extern "C" fn hipModuleUnload(module: hipModule_t) -> hipError_t {
    call(|| {
        let _work = working();
        let mut state = state();
        let module = state.modules.remove(&module.0.addr()).ok_or(BAD_HANDLE)?;
        for key in module.functions.values() {
            state.functions.remove(key);
        }
        state.heap.remove_image(module.code.extent());
        Ok(())
    })
}

/// Text of a C string that a caller passed.
///
/// # Safety
/// `name` is null or a C string.
pub(super) unsafe fn text<'a>(name: *const c_char) -> Outcome<&'a str> {
    if name.is_null() {
        return Err(INVALID);
    }
    // SAFETY: not null, so a C string.
    unsafe { CStr::from_ptr(name) }
        .to_str()
        .map_err(|_| hipError_t::hipErrorNotFound)
}

pub unsafe extern "C" fn hipModuleGetFunction(
    function: *mut hipFunction_t,
    module: hipModule_t,
    name: *const c_char,
) -> hipError_t {
    call(|| {
        // SAFETY: null or a C string.
        let name = unsafe { text(name)? };
        let state = state();
        let module = state.modules.get(&module.0.addr()).ok_or(BAD_HANDLE)?;
        let Some(key) = module.functions.get(name) else {
            let names: Vec<&str> = module.code.kernels().iter().map(|k| k.name()).collect();
            return explain(
                hipError_t::hipErrorNotFound,
                format!("no kernel {name} in the module, only {}", names.join(", ")),
            );
        };
        // SAFETY: null or valid.
        unsafe { put(function, hipFunction_t(handle(*key))) }
    })
}

pub unsafe extern "C" fn hipModuleGetGlobal(
    pointer: *mut hipDeviceptr_t,
    size: *mut usize,
    module: hipModule_t,
    name: *const c_char,
) -> hipError_t {
    call(|| {
        // SAFETY: null or a C string.
        let name = unsafe { text(name)? };
        let state = state();
        let module = state.modules.get(&module.0.addr()).ok_or(BAD_HANDLE)?;
        let global = module
            .code
            .global(name)
            .ok_or(hipError_t::hipErrorNotFound)?;
        if !pointer.is_null() {
            // SAFETY: not null, so valid.
            unsafe { put(pointer, global.address as *mut c_void)? };
        }
        if !size.is_null() {
            // SAFETY: not null, so valid.
            unsafe { put(size, global.size as usize)? };
        }
        Ok(())
    })
}

/// Finds the kernel of a handle.
pub(super) fn kernel(function: usize) -> Outcome<Arc<Kernel>> {
    state().functions.get(&function).cloned().ok_or(BAD_HANDLE)
}

pub unsafe extern "C" fn hipFuncGetAttribute(
    value: *mut c_int,
    attribute: hipFunction_attribute,
    function: hipFunction_t,
) -> hipError_t {
    use hipFunction_attribute as A;
    call(|| {
        let kernel = kernel(function.0.addr())?;
        let m = &kernel.info().metadata;
        let found = match attribute {
            A::HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK => m.max_flat_workgroup_size,
            A::HIP_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES => m.group_segment_fixed_size,
            A::HIP_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES => m.private_segment_fixed_size,
            A::HIP_FUNC_ATTRIBUTE_NUM_REGS => m.vgpr_count,
            A::HIP_FUNC_ATTRIBUTE_PTX_VERSION | A::HIP_FUNC_ATTRIBUTE_BINARY_VERSION => 94,
            A::HIP_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES => {
                LDS.saturating_sub(m.group_segment_fixed_size)
            }
            A::HIP_FUNC_ATTRIBUTE_CONST_SIZE_BYTES
            | A::HIP_FUNC_ATTRIBUTE_CACHE_MODE_CA
            | A::HIP_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT => 0,
            _ => return Err(INVALID),
        };
        // SAFETY: null or valid.
        unsafe { put(value, found as c_int) }
    })
}

/// Checks the request. Every kernel may use all of the LDS, so there is nothing to set.
pub unsafe extern "C" fn hipFuncSetAttribute(
    function: *const c_void,
    attribute: hipFuncAttribute,
    value: c_int,
) -> hipError_t {
    call(|| {
        let kernel = super::registration::function(function)?;
        let most = match attribute {
            hipFuncAttribute::hipFuncAttributeMaxDynamicSharedMemorySize => {
                LDS.saturating_sub(kernel.info().metadata.group_segment_fixed_size)
            }
            hipFuncAttribute::hipFuncAttributePreferredSharedMemoryCarveout => 100,
            _ => return Err(INVALID),
        };
        if i64::from(value) <= i64::from(most) {
            Ok(())
        } else {
            Err(INVALID)
        }
    })
}

pub unsafe extern "C" fn hipModuleLaunchKernel(
    function: hipFunction_t,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: hipStream_t,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> hipError_t {
    call(|| {
        let kernel = kernel(function.0.addr())?;
        let geometry = Geometry {
            grid: [grid_x, grid_y, grid_z],
            block: [block_x, block_y, block_z],
            dynamic_lds: shared_bytes,
        };
        // SAFETY: the caller keeps hipModuleLaunchKernel's contract.
        let launch = unsafe { prepare_launch(kernel, geometry, parameters, extra) };
        enqueue(stream, |_| launch.map(Some))
    })
}

pub unsafe extern "C" fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    function: hipFunction_t,
    block_size: c_int,
    dynamic_shared_bytes: usize,
) -> hipError_t {
    call(|| {
        let kernel = kernel(function.0.addr())?;
        let found = occupancy_of(&kernel, block_size, dynamic_shared_bytes)?;
        // SAFETY: null or valid.
        unsafe { put(blocks, found as c_int) }
    })
}

/// Number of workgroups of a kernel that fit on a compute unit.
pub(super) fn occupancy_of(
    kernel: &Kernel,
    block_size: c_int,
    dynamic_shared_bytes: usize,
) -> Outcome<u32> {
    let info = kernel.info();
    let size = u32::try_from(block_size).ok().filter(|s| *s > 0);
    let waves = size.ok_or(INVALID)?.div_ceil(64);
    let lds = u32::try_from(dynamic_shared_bytes)
        .unwrap_or(u32::MAX)
        .saturating_add(info.metadata.group_segment_fixed_size)
        .min(LDS + 1);
    Ok(Occupancy::of(info, waves, lds).workgroups)
}
