//! Device properties: the struct of `hipGetDevicePropertiesR0600`, and the struct of HIP 5.

use core::ffi::{CStr, c_char, c_int, c_uint};

/// The device properties of ROCm 6 and 7.
///
/// The suffix is part of the interface: the unversioned `hipDeviceProp_t` of HIP 5 is another struct.
/// `uuid` is `hipUUID` and `arch` the bit field `hipDeviceArch_t` (17 feature flags).
#[allow(non_camel_case_types, non_snake_case, missing_docs)]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct hipDeviceProp_tR0600 {
    pub name: [c_char; 256],
    pub uuid: [c_char; 16],
    pub luid: [c_char; 8],
    pub luidDeviceNodeMask: c_uint,
    pub totalGlobalMem: usize,
    pub sharedMemPerBlock: usize,
    pub regsPerBlock: c_int,
    pub warpSize: c_int,
    pub memPitch: usize,
    pub maxThreadsPerBlock: c_int,
    pub maxThreadsDim: [c_int; 3],
    pub maxGridSize: [c_int; 3],
    pub clockRate: c_int,
    pub totalConstMem: usize,
    pub major: c_int,
    pub minor: c_int,
    pub textureAlignment: usize,
    pub texturePitchAlignment: usize,
    pub deviceOverlap: c_int,
    pub multiProcessorCount: c_int,
    pub kernelExecTimeoutEnabled: c_int,
    pub integrated: c_int,
    pub canMapHostMemory: c_int,
    pub computeMode: c_int,
    pub maxTexture1D: c_int,
    pub maxTexture1DMipmap: c_int,
    pub maxTexture1DLinear: c_int,
    pub maxTexture2D: [c_int; 2],
    pub maxTexture2DMipmap: [c_int; 2],
    pub maxTexture2DLinear: [c_int; 3],
    pub maxTexture2DGather: [c_int; 2],
    pub maxTexture3D: [c_int; 3],
    pub maxTexture3DAlt: [c_int; 3],
    pub maxTextureCubemap: c_int,
    pub maxTexture1DLayered: [c_int; 2],
    pub maxTexture2DLayered: [c_int; 3],
    pub maxTextureCubemapLayered: [c_int; 2],
    pub maxSurface1D: c_int,
    pub maxSurface2D: [c_int; 2],
    pub maxSurface3D: [c_int; 3],
    pub maxSurface1DLayered: [c_int; 2],
    pub maxSurface2DLayered: [c_int; 3],
    pub maxSurfaceCubemap: c_int,
    pub maxSurfaceCubemapLayered: [c_int; 2],
    pub surfaceAlignment: usize,
    pub concurrentKernels: c_int,
    pub ECCEnabled: c_int,
    pub pciBusID: c_int,
    pub pciDeviceID: c_int,
    pub pciDomainID: c_int,
    pub tccDriver: c_int,
    pub asyncEngineCount: c_int,
    pub unifiedAddressing: c_int,
    pub memoryClockRate: c_int,
    pub memoryBusWidth: c_int,
    pub l2CacheSize: c_int,
    pub persistingL2CacheMaxSize: c_int,
    pub maxThreadsPerMultiProcessor: c_int,
    pub streamPrioritiesSupported: c_int,
    pub globalL1CacheSupported: c_int,
    pub localL1CacheSupported: c_int,
    pub sharedMemPerMultiprocessor: usize,
    pub regsPerMultiprocessor: c_int,
    pub managedMemory: c_int,
    pub isMultiGpuBoard: c_int,
    pub multiGpuBoardGroupID: c_int,
    pub hostNativeAtomicSupported: c_int,
    pub singleToDoublePrecisionPerfRatio: c_int,
    pub pageableMemoryAccess: c_int,
    pub concurrentManagedAccess: c_int,
    pub computePreemptionSupported: c_int,
    pub canUseHostPointerForRegisteredMem: c_int,
    pub cooperativeLaunch: c_int,
    pub cooperativeMultiDeviceLaunch: c_int,
    pub sharedMemPerBlockOptin: usize,
    pub pageableMemoryAccessUsesHostPageTables: c_int,
    pub directManagedMemAccessFromHost: c_int,
    pub maxBlocksPerMultiProcessor: c_int,
    pub accessPolicyMaxWindowSize: c_int,
    pub reservedSharedMemPerBlock: usize,
    pub hostRegisterSupported: c_int,
    pub sparseHipArraySupported: c_int,
    pub hostRegisterReadOnlySupported: c_int,
    pub timelineSemaphoreInteropSupported: c_int,
    pub memoryPoolsSupported: c_int,
    pub gpuDirectRDMASupported: c_int,
    pub gpuDirectRDMAFlushWritesOptions: c_uint,
    pub gpuDirectRDMAWritesOrdering: c_int,
    pub memoryPoolSupportedHandleTypes: c_uint,
    pub deferredMappingHipArraySupported: c_int,
    pub ipcEventSupported: c_int,
    pub clusterLaunch: c_int,
    pub unifiedFunctionPointers: c_int,
    pub reserved: [c_int; 63],
    pub hipReserved: [c_int; 32],
    pub gcnArchName: [c_char; 256],
    pub maxSharedMemoryPerMultiProcessor: usize,
    pub clockInstructionRate: c_int,
    pub arch: c_uint,
    pub hdpMemFlushCntl: *mut c_uint,
    pub hdpRegFlushCntl: *mut c_uint,
    pub cooperativeMultiDeviceUnmatchedFunc: c_int,
    pub cooperativeMultiDeviceUnmatchedGridDim: c_int,
    pub cooperativeMultiDeviceUnmatchedBlockDim: c_int,
    pub cooperativeMultiDeviceUnmatchedSharedMem: c_int,
    pub isLargeBar: c_int,
    pub asicRevision: c_int,
}

impl hipDeviceProp_tR0600 {
    /// All fields zero.
    pub const fn zeroed() -> Self {
        // SAFETY: every field is an integer, an array of integers or a raw pointer.
        unsafe { core::mem::zeroed() }
    }

    /// The device's name.
    pub fn name(&self) -> String {
        text(&self.name)
    }

    /// Architecture and features, such as `gfx942:sramecc+:xnack-`.
    pub fn arch_name(&self) -> String {
        text(&self.gcnArchName)
    }
}

impl Default for hipDeviceProp_tR0600 {
    fn default() -> Self {
        Self::zeroed()
    }
}

/// The device properties of HIP 5, where the function is `hipGetDeviceProperties`.
#[allow(non_camel_case_types, non_snake_case, missing_docs)]
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct hipDeviceProp_tR0000 {
    pub name: [c_char; 256],
    pub totalGlobalMem: usize,
    pub sharedMemPerBlock: usize,
    pub regsPerBlock: c_int,
    pub warpSize: c_int,
    pub maxThreadsPerBlock: c_int,
    pub maxThreadsDim: [c_int; 3],
    pub maxGridSize: [c_int; 3],
    pub clockRate: c_int,
    pub memoryClockRate: c_int,
    pub memoryBusWidth: c_int,
    pub totalConstMem: usize,
    pub major: c_int,
    pub minor: c_int,
    pub multiProcessorCount: c_int,
    pub l2CacheSize: c_int,
    pub maxThreadsPerMultiProcessor: c_int,
    pub computeMode: c_int,
    pub clockInstructionRate: c_int,
    pub arch: c_uint,
    pub concurrentKernels: c_int,
    pub pciDomainID: c_int,
    pub pciBusID: c_int,
    pub pciDeviceID: c_int,
    pub maxSharedMemoryPerMultiProcessor: usize,
    pub isMultiGpuBoard: c_int,
    pub canMapHostMemory: c_int,
    pub gcnArch: c_int,
    pub gcnArchName: [c_char; 256],
    pub integrated: c_int,
    pub cooperativeLaunch: c_int,
    pub cooperativeMultiDeviceLaunch: c_int,
    pub maxTexture1DLinear: c_int,
    pub maxTexture1D: c_int,
    pub maxTexture2D: [c_int; 2],
    pub maxTexture3D: [c_int; 3],
    pub hdpMemFlushCntl: *mut c_uint,
    pub hdpRegFlushCntl: *mut c_uint,
    pub memPitch: usize,
    pub textureAlignment: usize,
    pub texturePitchAlignment: usize,
    pub kernelExecTimeoutEnabled: c_int,
    pub ECCEnabled: c_int,
    pub tccDriver: c_int,
    pub cooperativeMultiDeviceUnmatchedFunc: c_int,
    pub cooperativeMultiDeviceUnmatchedGridDim: c_int,
    pub cooperativeMultiDeviceUnmatchedBlockDim: c_int,
    pub cooperativeMultiDeviceUnmatchedSharedMem: c_int,
    pub isLargeBar: c_int,
    pub asicRevision: c_int,
    pub managedMemory: c_int,
    pub directManagedMemAccessFromHost: c_int,
    pub concurrentManagedAccess: c_int,
    pub pageableMemoryAccess: c_int,
    pub pageableMemoryAccessUsesHostPageTables: c_int,
}

// Size of HIP 5.2's struct in clang's layout for x86-64.
const _: () = assert!(size_of::<hipDeviceProp_tR0000>() == 792);

impl From<&hipDeviceProp_tR0600> for hipDeviceProp_tR0000 {
    fn from(new: &hipDeviceProp_tR0600) -> Self {
        hipDeviceProp_tR0000 {
            name: new.name,
            totalGlobalMem: new.totalGlobalMem,
            sharedMemPerBlock: new.sharedMemPerBlock,
            regsPerBlock: new.regsPerBlock,
            warpSize: new.warpSize,
            maxThreadsPerBlock: new.maxThreadsPerBlock,
            maxThreadsDim: new.maxThreadsDim,
            maxGridSize: new.maxGridSize,
            clockRate: new.clockRate,
            memoryClockRate: new.memoryClockRate,
            memoryBusWidth: new.memoryBusWidth,
            totalConstMem: new.totalConstMem,
            major: new.major,
            minor: new.minor,
            multiProcessorCount: new.multiProcessorCount,
            l2CacheSize: new.l2CacheSize,
            maxThreadsPerMultiProcessor: new.maxThreadsPerMultiProcessor,
            computeMode: new.computeMode,
            clockInstructionRate: new.clockInstructionRate,
            arch: new.arch,
            concurrentKernels: new.concurrentKernels,
            pciDomainID: new.pciDomainID,
            pciBusID: new.pciBusID,
            pciDeviceID: new.pciDeviceID,
            maxSharedMemoryPerMultiProcessor: new.maxSharedMemoryPerMultiProcessor,
            isMultiGpuBoard: new.isMultiGpuBoard,
            canMapHostMemory: new.canMapHostMemory,
            gcnArchName: new.gcnArchName,
            integrated: new.integrated,
            cooperativeLaunch: new.cooperativeLaunch,
            cooperativeMultiDeviceLaunch: new.cooperativeMultiDeviceLaunch,
            maxTexture1DLinear: new.maxTexture1DLinear,
            maxTexture1D: new.maxTexture1D,
            maxTexture2D: new.maxTexture2D,
            maxTexture3D: new.maxTexture3D,
            hdpMemFlushCntl: new.hdpMemFlushCntl,
            hdpRegFlushCntl: new.hdpRegFlushCntl,
            memPitch: new.memPitch,
            textureAlignment: new.textureAlignment,
            texturePitchAlignment: new.texturePitchAlignment,
            kernelExecTimeoutEnabled: new.kernelExecTimeoutEnabled,
            ECCEnabled: new.ECCEnabled,
            tccDriver: new.tccDriver,
            cooperativeMultiDeviceUnmatchedFunc: new.cooperativeMultiDeviceUnmatchedFunc,
            cooperativeMultiDeviceUnmatchedGridDim: new.cooperativeMultiDeviceUnmatchedGridDim,
            cooperativeMultiDeviceUnmatchedBlockDim: new.cooperativeMultiDeviceUnmatchedBlockDim,
            cooperativeMultiDeviceUnmatchedSharedMem: new.cooperativeMultiDeviceUnmatchedSharedMem,
            isLargeBar: new.isLargeBar,
            asicRevision: new.asicRevision,
            managedMemory: new.managedMemory,
            directManagedMemAccessFromHost: new.directManagedMemAccessFromHost,
            concurrentManagedAccess: new.concurrentManagedAccess,
            pageableMemoryAccess: new.pageableMemoryAccess,
            pageableMemoryAccessUsesHostPageTables: new.pageableMemoryAccessUsesHostPageTables,
            gcnArch: gcn_arch(&new.arch_name()),
        }
    }
}

/// 942 for `gfx942:sramecc+`; 0 for architectures with a letter in their number, and for GPUs that are not AMD's.
fn gcn_arch(name: &str) -> c_int {
    let name = name.split(':').next().unwrap_or_default();
    let number = name.strip_prefix("gfx").and_then(|n| n.parse().ok());
    number.unwrap_or(0)
}

/// The text before the first null byte, or all of it.
fn text(chars: &[c_char; 256]) -> String {
    let bytes = chars.map(|c| c as u8);
    match CStr::from_bytes_until_nul(&bytes) {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => String::from_utf8_lossy(&bytes).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::hipDeviceProp_tR0600 as Props;
    use core::mem::{offset_of, size_of};

    #[test]
    fn layout_of_rocm_6() {
        assert_eq!(size_of::<Props>(), 1472);
        let offsets = [
            (offset_of!(Props, name), 0),
            (offset_of!(Props, totalGlobalMem), 288),
            (offset_of!(Props, warpSize), 308),
            (offset_of!(Props, maxThreadsPerBlock), 320),
            (offset_of!(Props, clockRate), 348),
            (offset_of!(Props, major), 360),
            (offset_of!(Props, multiProcessorCount), 388),
            (offset_of!(Props, surfaceAlignment), 568),
            (offset_of!(Props, pciBusID), 584),
            (offset_of!(Props, sharedMemPerMultiprocessor), 640),
            (offset_of!(Props, sharedMemPerBlockOptin), 696),
            (offset_of!(Props, reservedSharedMemPerBlock), 720),
            (offset_of!(Props, unifiedFunctionPointers), 776),
            (offset_of!(Props, gcnArchName), 1160),
            (offset_of!(Props, maxSharedMemoryPerMultiProcessor), 1416),
            (offset_of!(Props, hdpMemFlushCntl), 1432),
            (offset_of!(Props, asicRevision), 1468),
        ];
        for (index, (found, expected)) in offsets.into_iter().enumerate() {
            assert_eq!(found, expected, "entry {index}");
        }
    }

    #[test]
    fn texts_end_at_the_null_byte_or_at_the_end() {
        let mut props = Props::zeroed();
        assert_eq!(props.name(), "");
        props.gcnArchName[..6].copy_from_slice(&b"gfx942".map(|c| c as core::ffi::c_char));
        assert_eq!(props.arch_name(), "gfx942");
        props.name = [b'x' as core::ffi::c_char; 256];
        assert_eq!(props.name().len(), 256);
    }
}
