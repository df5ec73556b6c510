//! Device attributes and properties, translated to the CUDA driver's numbers.

use core::ffi::{c_char, c_int, c_uint};

use super::driver::{Device, Driver, Failure, INVALID_VALUE, Outcome};
use crate::{hipDeviceAttribute_t, hipDeviceProp_tR0600};

macro_rules! attributes {
    ($($name:ident = $number:literal,)*) => {
        $(const $name: c_uint = $number;)*
    };
}

// `CU_DEVICE_ATTRIBUTE_*` of cuda.h.
attributes! {
    MAX_THREADS_PER_BLOCK = 1,
    MAX_BLOCK_DIM_X = 2,
    MAX_BLOCK_DIM_Y = 3,
    MAX_BLOCK_DIM_Z = 4,
    MAX_GRID_DIM_X = 5,
    MAX_GRID_DIM_Y = 6,
    MAX_GRID_DIM_Z = 7,
    MAX_SHARED_MEMORY_PER_BLOCK = 8,
    TOTAL_CONSTANT_MEMORY = 9,
    WARP_SIZE = 10,
    MAX_PITCH = 11,
    MAX_REGISTERS_PER_BLOCK = 12,
    CLOCK_RATE = 13,
    TEXTURE_ALIGNMENT = 14,
    MULTIPROCESSOR_COUNT = 16,
    KERNEL_EXEC_TIMEOUT = 17,
    INTEGRATED = 18,
    CAN_MAP_HOST_MEMORY = 19,
    COMPUTE_MODE = 20,
    SURFACE_ALIGNMENT = 30,
    CONCURRENT_KERNELS = 31,
    ECC_ENABLED = 32,
    PCI_BUS_ID = 33,
    PCI_DEVICE_ID = 34,
    TCC_DRIVER = 35,
    MEMORY_CLOCK_RATE = 36,
    GLOBAL_MEMORY_BUS_WIDTH = 37,
    L2_CACHE_SIZE = 38,
    MAX_THREADS_PER_MULTIPROCESSOR = 39,
    ASYNC_ENGINE_COUNT = 40,
    UNIFIED_ADDRESSING = 41,
    PCI_DOMAIN_ID = 50,
    TEXTURE_PITCH_ALIGNMENT = 51,
    COMPUTE_CAPABILITY_MAJOR = 75,
    COMPUTE_CAPABILITY_MINOR = 76,
    STREAM_PRIORITIES_SUPPORTED = 78,
    GLOBAL_L1_CACHE_SUPPORTED = 79,
    LOCAL_L1_CACHE_SUPPORTED = 80,
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
    MAX_REGISTERS_PER_MULTIPROCESSOR = 82,
    MANAGED_MEMORY = 83,
    MULTI_GPU_BOARD = 84,
    MULTI_GPU_BOARD_GROUP_ID = 85,
    HOST_NATIVE_ATOMIC_SUPPORTED = 86,
    SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO = 87,
    PAGEABLE_MEMORY_ACCESS = 88,
    CONCURRENT_MANAGED_ACCESS = 89,
    COMPUTE_PREEMPTION_SUPPORTED = 90,
    CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
    COOPERATIVE_LAUNCH = 95,
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    HOST_REGISTER_SUPPORTED = 99,
    MAX_BLOCKS_PER_MULTIPROCESSOR = 106,
    MAX_PERSISTING_L2_CACHE_SIZE = 108,
    MAX_ACCESS_POLICY_WINDOW_SIZE = 109,
    RESERVED_SHARED_MEMORY_PER_BLOCK = 111,
    MEMORY_POOLS_SUPPORTED = 115,
    CLUSTER_LAUNCH = 120,
}

/// The CUDA attribute for a HIP attribute, if there is one.
fn counterpart(attribute: hipDeviceAttribute_t) -> Option<c_uint> {
    use hipDeviceAttribute_t as A;
    Some(match attribute {
        A::hipDeviceAttributeEccEnabled => ECC_ENABLED,
        A::hipDeviceAttributeCanMapHostMemory => CAN_MAP_HOST_MEMORY,
        A::hipDeviceAttributeClockRate => CLOCK_RATE,
        A::hipDeviceAttributeComputeMode => COMPUTE_MODE,
        A::hipDeviceAttributeConcurrentKernels => CONCURRENT_KERNELS,
        A::hipDeviceAttributeConcurrentManagedAccess => CONCURRENT_MANAGED_ACCESS,
        A::hipDeviceAttributeCooperativeLaunch => COOPERATIVE_LAUNCH,
        A::hipDeviceAttributeIntegrated => INTEGRATED,
        A::hipDeviceAttributeKernelExecTimeout => KERNEL_EXEC_TIMEOUT,
        A::hipDeviceAttributeL2CacheSize => L2_CACHE_SIZE,
        A::hipDeviceAttributeComputeCapabilityMajor => COMPUTE_CAPABILITY_MAJOR,
        A::hipDeviceAttributeComputeCapabilityMinor => COMPUTE_CAPABILITY_MINOR,
        A::hipDeviceAttributeManagedMemory => MANAGED_MEMORY,
        A::hipDeviceAttributeMaxBlocksPerMultiProcessor => MAX_BLOCKS_PER_MULTIPROCESSOR,
        A::hipDeviceAttributeMaxBlockDimX => MAX_BLOCK_DIM_X,
        A::hipDeviceAttributeMaxBlockDimY => MAX_BLOCK_DIM_Y,
        A::hipDeviceAttributeMaxBlockDimZ => MAX_BLOCK_DIM_Z,
        A::hipDeviceAttributeMaxGridDimX => MAX_GRID_DIM_X,
        A::hipDeviceAttributeMaxGridDimY => MAX_GRID_DIM_Y,
        A::hipDeviceAttributeMaxGridDimZ => MAX_GRID_DIM_Z,
        A::hipDeviceAttributeMaxThreadsPerBlock => MAX_THREADS_PER_BLOCK,
        A::hipDeviceAttributeMaxThreadsPerMultiProcessor => MAX_THREADS_PER_MULTIPROCESSOR,
        A::hipDeviceAttributeMaxPitch => MAX_PITCH,
        A::hipDeviceAttributeMemoryBusWidth => GLOBAL_MEMORY_BUS_WIDTH,
        A::hipDeviceAttributeMemoryClockRate => MEMORY_CLOCK_RATE,
        A::hipDeviceAttributeMultiprocessorCount
        | A::hipDeviceAttributePhysicalMultiProcessorCount => MULTIPROCESSOR_COUNT,
        A::hipDeviceAttributePageableMemoryAccess => PAGEABLE_MEMORY_ACCESS,
        A::hipDeviceAttributePciBusId => PCI_BUS_ID,
        A::hipDeviceAttributePciDeviceId => PCI_DEVICE_ID,
        A::hipDeviceAttributePciDomainID => PCI_DOMAIN_ID,
        A::hipDeviceAttributeMaxRegistersPerBlock => MAX_REGISTERS_PER_BLOCK,
        A::hipDeviceAttributeMaxRegistersPerMultiprocessor => MAX_REGISTERS_PER_MULTIPROCESSOR,
        A::hipDeviceAttributeMaxSharedMemoryPerBlock => MAX_SHARED_MEMORY_PER_BLOCK,
        A::hipDeviceAttributeSharedMemPerBlockOptin => MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
        A::hipDeviceAttributeSharedMemPerMultiprocessor
        | A::hipDeviceAttributeMaxSharedMemoryPerMultiprocessor => {
            MAX_SHARED_MEMORY_PER_MULTIPROCESSOR
        }
        A::hipDeviceAttributeTotalConstantMemory => TOTAL_CONSTANT_MEMORY,
        A::hipDeviceAttributeUnifiedAddressing => UNIFIED_ADDRESSING,
        A::hipDeviceAttributeWarpSize => WARP_SIZE,
        A::hipDeviceAttributeMemoryPoolsSupported => MEMORY_POOLS_SUPPORTED,
        _ => return None,
    })
}

/// One attribute of a device, by HIP's number.
pub(super) fn attribute(
    driver: &Driver,
    attribute: hipDeviceAttribute_t,
    device: Device,
) -> Outcome<c_int> {
    if attribute == hipDeviceAttribute_t::hipDeviceAttributeTotalGlobalMem {
        return Ok(c_int::try_from(total_memory(driver, device)?).unwrap_or(c_int::MAX));
    }
    let number = counterpart(attribute).ok_or(Failure::refused(INVALID_VALUE))?;
    read(driver, number, device)
}

fn read(driver: &Driver, attribute: c_uint, device: Device) -> Outcome<c_int> {
    let mut value = 0;
    // SAFETY: `value` is valid for a write.
    unsafe { driver.cuDeviceGetAttribute(&mut value, attribute, device)? };
    Ok(value)
}

fn total_memory(driver: &Driver, device: Device) -> Outcome<usize> {
    let mut bytes = 0;
    // SAFETY: `bytes` is valid for a write.
    unsafe { driver.cuDeviceTotalMem_v2(&mut bytes, device)? };
    Ok(bytes)
}

/// All properties of a device that CUDA has too; the others are 0.
pub(super) fn properties(driver: &Driver, device: Device) -> Outcome<hipDeviceProp_tR0600> {
    // A driver that does not know an attribute is older than the feature that the attribute describes.
    let number = |attribute| read(driver, attribute, device).unwrap_or(0);
    let size = |attribute| usize::try_from(number(attribute)).unwrap_or(0);
    let mut p = hipDeviceProp_tR0600::zeroed();
    // SAFETY: name and uuid are valid for writes of their lengths.
    unsafe {
        driver.cuDeviceGetName(p.name.as_mut_ptr(), p.name.len() as c_int, device)?;
        // Drivers before 11.4 lack the function.
        let _ = driver.cuDeviceGetUuid_v2(p.uuid.as_mut_ptr(), device);
    }
    p.totalGlobalMem = total_memory(driver, device)?;
    p.major = read(driver, COMPUTE_CAPABILITY_MAJOR, device)?;
    p.minor = read(driver, COMPUTE_CAPABILITY_MINOR, device)?;
    p.multiProcessorCount = read(driver, MULTIPROCESSOR_COUNT, device)?;
    p.warpSize = read(driver, WARP_SIZE, device)?;
    p.sharedMemPerBlock = size(MAX_SHARED_MEMORY_PER_BLOCK);
    p.sharedMemPerBlockOptin = size(MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    p.sharedMemPerMultiprocessor = size(MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    p.maxSharedMemoryPerMultiProcessor = p.sharedMemPerMultiprocessor;
    p.reservedSharedMemPerBlock = size(RESERVED_SHARED_MEMORY_PER_BLOCK);
    p.regsPerBlock = number(MAX_REGISTERS_PER_BLOCK);
    p.regsPerMultiprocessor = number(MAX_REGISTERS_PER_MULTIPROCESSOR);
    p.memPitch = size(MAX_PITCH);
    p.maxThreadsPerBlock = number(MAX_THREADS_PER_BLOCK);
    p.maxThreadsDim = [MAX_BLOCK_DIM_X, MAX_BLOCK_DIM_Y, MAX_BLOCK_DIM_Z].map(number);
    p.maxGridSize = [MAX_GRID_DIM_X, MAX_GRID_DIM_Y, MAX_GRID_DIM_Z].map(number);
    p.maxThreadsPerMultiProcessor = number(MAX_THREADS_PER_MULTIPROCESSOR);
    p.maxBlocksPerMultiProcessor = number(MAX_BLOCKS_PER_MULTIPROCESSOR);
    p.clockRate = number(CLOCK_RATE);
    p.totalConstMem = size(TOTAL_CONSTANT_MEMORY);
    p.textureAlignment = size(TEXTURE_ALIGNMENT);
    p.texturePitchAlignment = size(TEXTURE_PITCH_ALIGNMENT);
    p.surfaceAlignment = size(SURFACE_ALIGNMENT);
    p.deviceOverlap = c_int::from(number(ASYNC_ENGINE_COUNT) > 0);
    p.asyncEngineCount = number(ASYNC_ENGINE_COUNT);
    p.kernelExecTimeoutEnabled = number(KERNEL_EXEC_TIMEOUT);
    p.integrated = number(INTEGRATED);
    p.canMapHostMemory = number(CAN_MAP_HOST_MEMORY);
    p.computeMode = number(COMPUTE_MODE);
    p.concurrentKernels = number(CONCURRENT_KERNELS);
    p.ECCEnabled = number(ECC_ENABLED);
    p.pciBusID = number(PCI_BUS_ID);
    p.pciDeviceID = number(PCI_DEVICE_ID);
    p.pciDomainID = number(PCI_DOMAIN_ID);
    p.tccDriver = number(TCC_DRIVER);
    p.unifiedAddressing = number(UNIFIED_ADDRESSING);
    p.memoryClockRate = number(MEMORY_CLOCK_RATE);
    p.memoryBusWidth = number(GLOBAL_MEMORY_BUS_WIDTH);
    p.l2CacheSize = number(L2_CACHE_SIZE);
    p.persistingL2CacheMaxSize = number(MAX_PERSISTING_L2_CACHE_SIZE);
    p.accessPolicyMaxWindowSize = number(MAX_ACCESS_POLICY_WINDOW_SIZE);
    p.streamPrioritiesSupported = number(STREAM_PRIORITIES_SUPPORTED);
    p.globalL1CacheSupported = number(GLOBAL_L1_CACHE_SUPPORTED);
    p.localL1CacheSupported = number(LOCAL_L1_CACHE_SUPPORTED);
    p.managedMemory = number(MANAGED_MEMORY);
    p.isMultiGpuBoard = number(MULTI_GPU_BOARD);
    p.multiGpuBoardGroupID = number(MULTI_GPU_BOARD_GROUP_ID);
    p.hostNativeAtomicSupported = number(HOST_NATIVE_ATOMIC_SUPPORTED);
    p.singleToDoublePrecisionPerfRatio = number(SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO);
    p.pageableMemoryAccess = number(PAGEABLE_MEMORY_ACCESS);
    p.concurrentManagedAccess = number(CONCURRENT_MANAGED_ACCESS);
    p.computePreemptionSupported = number(COMPUTE_PREEMPTION_SUPPORTED);
    p.canUseHostPointerForRegisteredMem = number(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM);
    p.cooperativeLaunch = number(COOPERATIVE_LAUNCH);
    p.hostRegisterSupported = number(HOST_REGISTER_SUPPORTED);
    p.memoryPoolsSupported = number(MEMORY_POOLS_SUPPORTED);
    p.clusterLaunch = number(CLUSTER_LAUNCH);
    let arch = arch_name(p.major, p.minor);
    for (to, from) in p.gcnArchName.iter_mut().zip(arch.bytes()) {
        *to = from as c_char;
    }
    Ok(p)
}

/// Compiler name of a compute capability, such as `sm_90a`. From 9.0 on, instructions that only GPUs of exactly that
/// capability have (such as `wgmma`) need the target with the suffix `a`.
fn arch_name(major: c_int, minor: c_int) -> String {
    let own = if major >= 9 { "a" } else { "" };
    format!("sm_{major}{minor}{own}")
}

#[cfg(test)]
mod tests {
    use super::arch_name;

    #[test]
    fn architectures_are_named_as_compilers_name_them() {
        for (capability, name) in [
            ((8, 0), "sm_80"),
            ((8, 9), "sm_89"),
            ((9, 0), "sm_90a"),
            ((10, 0), "sm_100a"),
        ] {
            assert_eq!(arch_name(capability.0, capability.1), name);
        }
    }
}
