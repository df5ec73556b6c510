//! Kernels and variables that are embedded in a program. Implements the functions that clang's host code calls for an
//! embedded fat binary and for `kernel<<<grid, block, lds, stream>>>(..)`. Also implements the HIP functions that
//! identify a kernel or a variable by its host address.
//!
//! A fat binary is loaded on the first use of one of its kernels or variables, and again after `hipDeviceReset`.
#![allow(non_snake_case, missing_docs)]
// each is documented in HIP, or in clang's description of its host code
// As HIP documents them: pointers are null or valid, names are C strings.
#![allow(clippy::missing_safety_doc, clippy::too_many_arguments)]

use super::api::{copy, synchronous};
use super::api_module::{kernel, load_image, occupancy_of};
use super::device;
use super::state::{Outcome, call, device as state, explain, put};
use super::work::{Geometry, Kernel, enqueue, prepare_launch};
use core::ffi::{CStr, c_char, c_int, c_uint, c_void};
pub use hip_sys::hipDeviceProp_tR0000;
use hip_sys::{hipError_t, types::*};
use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Calls a macro with the functions of this module that programs link:
/// `$callback! { $($extra)* ; fn name(..) -> type; .. }`.
#[macro_export]
macro_rules! for_each_registration {
    ($callback:ident $(, $($extra:tt)*)?) => {
        $callback! {
            $($($extra)*)? ;
            fn __hipRegisterFatBinary(wrapper: *const c_void) -> *mut *mut c_void;
            fn __hipUnregisterFatBinary(binary: *mut *mut c_void) -> ();
            fn __hipRegisterFunction(binary: *mut *mut c_void, host: *const c_void, device_function: *mut c_char, name: *const c_char, thread_limit: c_uint, tid: *mut c_void, bid: *mut c_void, block: *mut c_void, grid: *mut c_void, wave_size: *mut c_int) -> ();
            fn __hipRegisterVar(binary: *mut *mut c_void, host: *const c_void, host_name: *mut c_char, name: *const c_char, external: c_int, size: usize, constant: c_int, global: c_int) -> ();
            fn __hipPushCallConfiguration(grid: dim3, block: dim3, shared_bytes: usize, stream: hipStream_t) -> hipError_t;
            fn __hipPopCallConfiguration(grid: *mut dim3, block: *mut dim3, shared_bytes: *mut usize, stream: *mut hipStream_t) -> hipError_t;
            fn hipLaunchKernel(function: *const c_void, grid: dim3, block: dim3, arguments: *mut *mut c_void, shared_bytes: usize, stream: hipStream_t) -> hipError_t;
            fn hipGetDeviceProperties(properties: *mut hipDeviceProp_tR0000, device: c_int) -> hipError_t;
            fn hipFuncGetAttributes(attributes: *mut hipFuncAttributes, function: *const c_void) -> hipError_t;
            fn hipFuncSetCacheConfig(function: *const c_void, config: c_int) -> hipError_t;
            fn hipGetFuncBySymbol(found: *mut hipFunction_t, function: *const c_void) -> hipError_t;
            fn hipOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, function: *const c_void, block_size: c_int, dynamic_shared_bytes: usize) -> hipError_t;
            fn hipOccupancyMaxPotentialBlockSize(grid: *mut c_int, block: *mut c_int, function: *const c_void, dynamic_shared_bytes: usize, limit: c_int) -> hipError_t;
            fn hipGetSymbolAddress(pointer: *mut *mut c_void, symbol: *const c_void) -> hipError_t;
            fn hipGetSymbolSize(size: *mut usize, symbol: *const c_void) -> hipError_t;
            fn hipMemcpyToSymbol(symbol: *const c_void, source: *const c_void, size: usize, offset: usize, kind: hipMemcpyKind) -> hipError_t;
            fn hipMemcpyFromSymbol(destination: *mut c_void, symbol: *const c_void, size: usize, offset: usize, kind: hipMemcpyKind) -> hipError_t;
            fn hipMemcpyToSymbolAsync(symbol: *const c_void, source: *const c_void, size: usize, offset: usize, kind: hipMemcpyKind, stream: hipStream_t) -> hipError_t;
            fn hipMemcpyFromSymbolAsync(destination: *mut c_void, symbol: *const c_void, size: usize, offset: usize, kind: hipMemcpyKind, stream: hipStream_t) -> hipError_t;
        }
    };
}

/// Dimensions of a grid or a workgroup.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub struct dim3 {
    pub x: c_uint,
    pub y: c_uint,
    pub z: c_uint,
}

impl From<dim3> for [u32; 3] {
    fn from(d: dim3) -> Self {
        [d.x, d.y, d.z]
    }
}

/// Kernel attributes of `hipFuncGetAttributes`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(non_camel_case_types)]
pub struct hipFuncAttributes {
    pub binaryVersion: c_int,
    pub cacheModeCA: c_int,
    pub constSizeBytes: usize,
    pub localSizeBytes: usize,
    pub maxDynamicSharedSizeBytes: c_int,
    pub maxThreadsPerBlock: c_int,
    pub numRegs: c_int,
    pub preferredShmemCarveout: c_int,
    pub ptxVersion: c_int,
    pub sharedSizeBytes: usize,
}

/// Wrapper that clang's host code registers: it points to the fat binary.
#[repr(C)]
struct Wrapper {
    magic: u32,
    version: u32,
    image: *const c_void,
    unused: *const c_void,
}

/// `HIPF`, little-endian.
const WRAPPER_MAGIC: u32 = 0x4849_5046;

/// A registered fat binary.
struct Binary {
    /// Address of its image in the program's memory.
    image: usize,
    /// The loaded module. A reset of the device destroys it.
    module: Option<hipModule_t>,
}

/// A kernel or a variable of a fat binary.
#[derive(Clone)]
struct Symbol {
    binary: usize,
    name: String,
}

#[derive(Default)]
struct Registry {
    binaries: HashMap<usize, Binary>,
    /// Kernels by host address.
    functions: HashMap<usize, Symbol>,
    variables: HashMap<usize, Symbol>,
    next: usize,
}

static REGISTRY: Mutex<Option<Registry>> = Mutex::new(None);

/// The registered symbols. Lock order: before the device's state, never after.
struct Registered(MutexGuard<'static, Option<Registry>>);

impl Registered {
    fn lock() -> Self {
        Registered(REGISTRY.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn get(&mut self) -> &mut Registry {
        self.0.get_or_insert_default()
    }
}

impl Registry {
    /// The module of a fat binary; loads it if necessary.
    fn module(&mut self, binary: usize) -> Outcome<hipModule_t> {
        let binary = self
            .binaries
            .get_mut(&binary)
            .ok_or(hipError_t::hipErrorInvalidImage)?;
        if let Some(module) = binary.module
            && state().modules.contains_key(&module.0.addr())
        {
            return Ok(module);
        }
        // SAFETY: a registered image stays mapped until it is unregistered.
        let module = unsafe { load_image(binary.image as *const c_void)? };
        binary.module = Some(module);
        Ok(module)
    }
}

/// Handle of the kernel with this host address.
fn registered_function(function: *const c_void) -> Outcome<usize> {
    let mut registered = Registered::lock();
    let registry = registered.get();
    let Some(symbol) = registry.functions.get(&function.addr()).cloned() else {
        return explain(
            hipError_t::hipErrorInvalidDeviceFunction,
            format!("no kernel is registered for the host function at {function:p}"),
        );
    };
    let module = registry.module(symbol.binary)?;
    let state = state();
    let key = state
        .modules
        .get(&module.0.addr())
        .and_then(|m| m.functions.get(&symbol.name))
        .copied();
    drop(state);
    key.map_or_else(
        || {
            explain(
                hipError_t::hipErrorInvalidDeviceFunction,
                format!(
                    "the program's code for gfx942 has no kernel {}",
                    symbol.name
                ),
            )
        },
        Ok,
    )
}

/// Kernel with this host address or this handle.
pub(super) fn function(function: *const c_void) -> Outcome<Arc<Kernel>> {
    kernel(function.addr()).or_else(|_| kernel(registered_function(function)?))
}

/// Address and size of the variable with this host address.
fn variable(symbol: *const c_void) -> Outcome<(u64, usize)> {
    let mut registered = Registered::lock();
    let registry = registered.get();
    let Some(found) = registry.variables.get(&symbol.addr()).cloned() else {
        return explain(
            hipError_t::hipErrorInvalidSymbol,
            format!("no variable is registered for the host address {symbol:p}"),
        );
    };
    let module = registry.module(found.binary)?;
    let state = state();
    let global = state
        .modules
        .get(&module.0.addr())
        .and_then(|m| m.code.global(&found.name))
        .ok_or(hipError_t::hipErrorInvalidSymbol)?;
    Ok((global.address, global.size as usize))
}

pub unsafe extern "C" fn __hipRegisterFatBinary(wrapper: *const c_void) -> *mut *mut c_void {
    let mut handle = 0;
    call(|| {
        if wrapper.is_null() {
            return Err(hipError_t::hipErrorInvalidValue);
        }
        // SAFETY: clang's host code passes a wrapper.
        let wrapper = unsafe { wrapper.cast::<Wrapper>().read_unaligned() };
        if wrapper.magic != WRAPPER_MAGIC || wrapper.image.is_null() {
            return explain(
                hipError_t::hipErrorInvalidImage,
                "the registered image is no fat binary",
            );
        }
        let _ = (wrapper.version, wrapper.unused);
        let mut registered = Registered::lock();
        let registry = registered.get();
        registry.next += 16;
        handle = registry.next;
        let binary = Binary {
            image: wrapper.image.addr(),
            module: None,
        };
        registry.binaries.insert(handle, binary);
        Ok(())
    });
    core::ptr::without_provenance_mut(handle)
}

/// Removes a fat binary. Its module stays loaded: programs call this when they exit, and unloading takes time.
pub unsafe extern "C" fn __hipUnregisterFatBinary(binary: *mut *mut c_void) {
    call(|| {
        let mut registered = Registered::lock();
        let registry = registered.get();
        let key = binary.addr();
        registry.binaries.remove(&key);
        registry.functions.retain(|_, s| s.binary != key);
        registry.variables.retain(|_, s| s.binary != key);
        Ok(())
    });
}

/// # Safety
/// `name` is null or a C string.
unsafe fn symbol(binary: *mut *mut c_void, name: *const c_char) -> Outcome<Symbol> {
    if name.is_null() {
        return Err(hipError_t::hipErrorInvalidValue);
    }
    // SAFETY: not null, so a C string.
    let name = unsafe { CStr::from_ptr(name) };
    Ok(Symbol {
        binary: binary.addr(),
        name: name.to_string_lossy().into_owned(),
    })
}

pub unsafe extern "C" fn __hipRegisterFunction(
    binary: *mut *mut c_void,
    host: *const c_void,
    _device_function: *mut c_char,
    name: *const c_char,
    _thread_limit: c_uint,
    _tid: *mut c_void,
    _bid: *mut c_void,
    _block: *mut c_void,
    _grid: *mut c_void,
    _wave_size: *mut c_int,
) {
    call(|| {
        // SAFETY: null or a C string.
        let symbol = unsafe { symbol(binary, name)? };
        let mut registered = Registered::lock();
        registered.get().functions.insert(host.addr(), symbol);
        Ok(())
    });
}

pub unsafe extern "C" fn __hipRegisterVar(
    binary: *mut *mut c_void,
    host: *const c_void,
    _host_name: *mut c_char,
    name: *const c_char,
    _external: c_int,
    _size: usize,
    _constant: c_int,
    _global: c_int,
) {
    call(|| {
        // SAFETY: null or a C string.
        let symbol = unsafe { symbol(binary, name)? };
        let mut registered = Registered::lock();
        registered.get().variables.insert(host.addr(), symbol);
        Ok(())
    });
}

/// Arguments of `<<< >>>`.
#[derive(Clone, Copy)]
struct Configuration {
    grid: dim3,
    block: dim3,
    shared_bytes: usize,
    stream: hipStream_t,
}

thread_local! {
    static CONFIGURATIONS: RefCell<Vec<Configuration>> = const { RefCell::new(Vec::new()) };
}

pub unsafe extern "C" fn __hipPushCallConfiguration(
    grid: dim3,
    block: dim3,
    shared_bytes: usize,
    stream: hipStream_t,
) -> hipError_t {
    call(|| {
        let configuration = Configuration {
            grid,
            block,
            shared_bytes,
            stream,
        };
        CONFIGURATIONS
            .try_with(|c| c.borrow_mut().push(configuration))
            .map_err(|_| hipError_t::hipErrorDeinitialized)
    })
}

pub unsafe extern "C" fn __hipPopCallConfiguration(
    grid: *mut dim3,
    block: *mut dim3,
    shared_bytes: *mut usize,
    stream: *mut hipStream_t,
) -> hipError_t {
    call(|| {
        let c = CONFIGURATIONS
            .try_with(|c| c.borrow_mut().pop())
            .map_err(|_| hipError_t::hipErrorDeinitialized)?
            .ok_or(hipError_t::hipErrorMissingConfiguration)?;
        // SAFETY: null or valid.
        unsafe {
            put(grid, c.grid)?;
            put(block, c.block)?;
            put(shared_bytes, c.shared_bytes)?;
            put(stream, c.stream)
        }
    })
}

pub unsafe extern "C" fn hipLaunchKernel(
    host_function: *const c_void,
    grid: dim3,
    block: dim3,
    arguments: *mut *mut c_void,
    shared_bytes: usize,
    stream: hipStream_t,
) -> hipError_t {
    call(|| {
        let kernel = function(host_function)?;
        let geometry = Geometry {
            grid: grid.into(),
            block: block.into(),
            dynamic_lds: u32::try_from(shared_bytes).unwrap_or(u32::MAX),
        };
        // SAFETY: the caller keeps hipLaunchKernel's contract, which is that of kernelParams.
        let launch = unsafe { prepare_launch(kernel, geometry, arguments, core::ptr::null_mut()) };
        enqueue(stream, |_| launch.map(Some))
    })
}

pub unsafe extern "C" fn hipGetDeviceProperties(
    properties: *mut hipDeviceProp_tR0000,
    device: c_int,
) -> hipError_t {
    call(|| {
        super::api::only_device(device)?;
        // SAFETY: null or valid.
        unsafe { put(properties, (&device::properties()).into()) }
    })
}

pub unsafe extern "C" fn hipFuncGetAttributes(
    attributes: *mut hipFuncAttributes,
    host_function: *const c_void,
) -> hipError_t {
    call(|| {
        let kernel = function(host_function)?;
        let m = &kernel.info().metadata;
        let found = hipFuncAttributes {
            binaryVersion: 94,
            ptxVersion: 94,
            localSizeBytes: m.private_segment_fixed_size as usize,
            sharedSizeBytes: m.group_segment_fixed_size as usize,
            maxDynamicSharedSizeBytes: device::LDS.saturating_sub(m.group_segment_fixed_size)
                as c_int,
            maxThreadsPerBlock: m.max_flat_workgroup_size as c_int,
            numRegs: m.vgpr_count as c_int,
            ..Default::default()
        };
        // SAFETY: null or valid.
        unsafe { put(attributes, found) }
    })
}

/// LDS and cache are separate, so there is nothing to set.
pub unsafe extern "C" fn hipFuncSetCacheConfig(
    host_function: *const c_void,
    _config: c_int,
) -> hipError_t {
    call(|| function(host_function).map(|_| ()))
}

pub unsafe extern "C" fn hipGetFuncBySymbol(
    found: *mut hipFunction_t,
    host_function: *const c_void,
) -> hipError_t {
    call(|| {
        let key = registered_function(host_function)?;
        // SAFETY: null or valid.
        unsafe { put(found, hipFunction_t(core::ptr::without_provenance_mut(key))) }
    })
}

pub unsafe extern "C" fn hipOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    host_function: *const c_void,
    block_size: c_int,
    dynamic_shared_bytes: usize,
) -> hipError_t {
    call(|| {
        let found = occupancy_of(&*function(host_function)?, block_size, dynamic_shared_bytes)?;
        // SAFETY: null or valid.
        unsafe { put(blocks, found as c_int) }
    })
}

/// Workgroup size with which most waves fit on the device, and the number of such workgroups that fill it.
pub unsafe extern "C" fn hipOccupancyMaxPotentialBlockSize(
    grid: *mut c_int,
    block: *mut c_int,
    host_function: *const c_void,
    dynamic_shared_bytes: usize,
    limit: c_int,
) -> hipError_t {
    call(|| {
        let kernel = function(host_function)?;
        let most = kernel.info().metadata.max_flat_workgroup_size as c_int;
        let most = if limit > 0 { most.min(limit) } else { most };
        let (mut best, mut found) = (0, (0, 0));
        for size in (64..=most.max(64)).rev().filter(|s| s % 64 == 0) {
            let blocks = occupancy_of(&kernel, size, dynamic_shared_bytes)? as c_int;
            if blocks * size > best {
                (best, found) = (blocks * size, (blocks, size));
            }
        }
        let units = device::properties().multiProcessorCount;
        // SAFETY: null or valid.
        unsafe {
            put(grid, found.0 * units)?;
            put(block, found.1)
        }
    })
}

pub unsafe extern "C" fn hipGetSymbolAddress(
    pointer: *mut *mut c_void,
    symbol: *const c_void,
) -> hipError_t {
    call(|| {
        let (address, _) = variable(symbol)?;
        // SAFETY: null or valid.
        unsafe { put(pointer, address as *mut c_void) }
    })
}

pub unsafe extern "C" fn hipGetSymbolSize(size: *mut usize, symbol: *const c_void) -> hipError_t {
    call(|| {
        let (_, found) = variable(symbol)?;
        // SAFETY: null or valid.
        unsafe { put(size, found) }
    })
}

/// Address of `size` bytes at `offset` in a variable.
fn inside(symbol: *const c_void, size: usize, offset: usize) -> Outcome<*mut c_void> {
    let (address, length) = variable(symbol)?;
    if offset.checked_add(size).is_none_or(|end| end > length) {
        return explain(
            hipError_t::hipErrorInvalidValue,
            format!("{size} bytes from {offset} on are more than the variable's {length}"),
        );
    }
    Ok((address + offset as u64) as *mut c_void)
}

pub unsafe extern "C" fn hipMemcpyToSymbol(
    symbol: *const c_void,
    source: *const c_void,
    size: usize,
    offset: usize,
    kind: hipMemcpyKind,
) -> hipError_t {
    call(|| synchronous(copy(inside(symbol, size, offset)?, source, size, kind)))
}

pub unsafe extern "C" fn hipMemcpyFromSymbol(
    destination: *mut c_void,
    symbol: *const c_void,
    size: usize,
    offset: usize,
    kind: hipMemcpyKind,
) -> hipError_t {
    call(|| {
        let from = inside(symbol, size, offset)?;
        synchronous(copy(destination, from, size, kind))
    })
}

pub unsafe extern "C" fn hipMemcpyToSymbolAsync(
    symbol: *const c_void,
    source: *const c_void,
    size: usize,
    offset: usize,
    kind: hipMemcpyKind,
    stream: hipStream_t,
) -> hipError_t {
    call(|| {
        let to = inside(symbol, size, offset)?;
        enqueue(stream, |_| copy(to, source, size, kind))
    })
}

pub unsafe extern "C" fn hipMemcpyFromSymbolAsync(
    destination: *mut c_void,
    symbol: *const c_void,
    size: usize,
    offset: usize,
    kind: hipMemcpyKind,
    stream: hipStream_t,
) -> hipError_t {
    call(|| {
        let from = inside(symbol, size, offset)?;
        enqueue(stream, |_| copy(destination, from, size, kind))
    })
}
