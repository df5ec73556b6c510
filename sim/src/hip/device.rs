//! Properties and attributes of the simulated device: an MI300X, or the GPU that was chosen.

use core::ffi::{c_char, c_int};
use std::sync::{LazyLock, PoisonError, RwLock};

use hip_sys::{hipDeviceAttribute_t as Attribute, hipDeviceProp_tR0600};

use crate::gpu::{Gpu, MI300X};

/// LDS of a compute unit in bytes; one workgroup may use all of it.
pub(super) const LDS: u32 = 64 << 10;
/// Maximum number of work-items in a workgroup.
pub(super) const MAX_BLOCK: u32 = 1024;
/// Architecture and features.
pub(super) const ARCH: &str = "gfx942:sramecc+:xnack-";
/// Version of the runtime: ROCm 6.4.
pub(super) const VERSION: c_int = 60_443_482;

const MEMORY_CLOCK_KHZ: c_int = 1_300_000;
const MEMORY_BUS_BITS: c_int = 8192;
const L2_BYTES: c_int = 4 << 20;
const MAX_GRID: [c_int; 3] = [c_int::MAX, 65536, 65536];
const THREADS_PER_COMPUTE_UNIT: c_int = 2048;
/// Registers of a compute unit: 512 of 64 lanes on each of 4 SIMDs.
const REGISTERS: c_int = 4 * 512 * 64;
const PCI_BUS: c_int = 1;
const TIMER_KHZ: c_int = 100_000;

/// Bits of `hipDeviceArch_t`: all features except dynamic parallelism.
const FEATURES: u32 = (1 << 16) - 1;

/// The simulated GPU.
static GPU: LazyLock<RwLock<Gpu>> = LazyLock::new(|| {
    let named = std::env::var("DELTAWAVE_SIM_GPU").ok();
    RwLock::new(named.and_then(|name| Gpu::named(&name)).unwrap_or(MI300X))
});

pub(super) fn gpu() -> Gpu {
    *GPU.read().unwrap_or_else(PoisonError::into_inner)
}

pub(super) fn set_gpu(gpu: Gpu) {
    *GPU.write().unwrap_or_else(PoisonError::into_inner) = gpu;
}

/// Device memory in bytes.
pub(super) fn total_memory() -> usize {
    gpu().memory
}

/// Name of the device.
pub(super) fn name() -> String {
    format!("gfx942 simulator ({})", gpu().name.to_uppercase())
}

fn compute_units() -> c_int {
    gpu().cus as c_int
}

fn clock_khz() -> c_int {
    (gpu().ghz * 1e6) as c_int
}

fn set_text(target: &mut [c_char; 256], text: &str) {
    for (to, from) in target.iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

/// All device properties.
pub(super) fn properties() -> hipDeviceProp_tR0600 {
    let mut p = hipDeviceProp_tR0600::zeroed();
    set_text(&mut p.name, &name());
    set_text(&mut p.gcnArchName, ARCH);
    for (to, from) in p.uuid.iter_mut().zip(b"GPU-gfx942simula") {
        *to = *from as c_char;
    }
    p.totalGlobalMem = total_memory();
    p.sharedMemPerBlock = LDS as usize;
    p.regsPerBlock = REGISTERS;
    p.warpSize = 64;
    p.memPitch = c_int::MAX as usize;
    p.maxThreadsPerBlock = MAX_BLOCK as c_int;
    p.maxThreadsDim = [MAX_BLOCK as c_int; 3];
    p.maxGridSize = MAX_GRID;
    p.clockRate = clock_khz();
    p.totalConstMem = c_int::MAX as usize;
    p.major = 9;
    p.minor = 4;
    p.multiProcessorCount = compute_units();
    p.canMapHostMemory = 1;
    p.concurrentKernels = 1;
    p.ECCEnabled = 1;
    p.pciBusID = PCI_BUS;
    p.asyncEngineCount = 2;
    p.unifiedAddressing = 1;
    p.memoryClockRate = MEMORY_CLOCK_KHZ;
    p.memoryBusWidth = MEMORY_BUS_BITS;
    p.l2CacheSize = L2_BYTES;
    p.maxThreadsPerMultiProcessor = THREADS_PER_COMPUTE_UNIT;
    p.sharedMemPerMultiprocessor = LDS as usize;
    p.regsPerMultiprocessor = REGISTERS;
    p.sharedMemPerBlockOptin = LDS as usize;
    p.maxBlocksPerMultiProcessor = 32;
    p.maxSharedMemoryPerMultiProcessor = LDS as usize;
    p.clockInstructionRate = TIMER_KHZ;
    p.arch = FEATURES;
    p.isLargeBar = 1;
    p
}

/// Value of one device attribute; `None` if it is not known.
pub(super) fn attribute(attribute: Attribute) -> Option<c_int> {
    Some(match attribute {
        Attribute::hipDeviceAttributeEccEnabled
        | Attribute::hipDeviceAttributeCanMapHostMemory
        | Attribute::hipDeviceAttributeConcurrentKernels
        | Attribute::hipDeviceAttributeUnifiedAddressing
        | Attribute::hipDeviceAttributeFineGrainSupport
        | Attribute::hipDeviceAttributeIsLargeBar => 1,
        Attribute::hipDeviceAttributeComputeMode
        | Attribute::hipDeviceAttributeConcurrentManagedAccess
        | Attribute::hipDeviceAttributeCooperativeLaunch
        | Attribute::hipDeviceAttributeIntegrated
        | Attribute::hipDeviceAttributeKernelExecTimeout
        | Attribute::hipDeviceAttributeManagedMemory
        | Attribute::hipDeviceAttributePageableMemoryAccess
        | Attribute::hipDeviceAttributePciDeviceId
        | Attribute::hipDeviceAttributePciDomainID
        | Attribute::hipDeviceAttributeMemoryPoolsSupported
        | Attribute::hipDeviceAttributeAsicRevision => 0,
        Attribute::hipDeviceAttributeClockRate => clock_khz(),
        Attribute::hipDeviceAttributeL2CacheSize => L2_BYTES,
        Attribute::hipDeviceAttributeComputeCapabilityMajor => 9,
        Attribute::hipDeviceAttributeComputeCapabilityMinor => 4,
        Attribute::hipDeviceAttributeMaxBlocksPerMultiProcessor => 32,
        Attribute::hipDeviceAttributeMaxBlockDimX
        | Attribute::hipDeviceAttributeMaxBlockDimY
        | Attribute::hipDeviceAttributeMaxBlockDimZ
        | Attribute::hipDeviceAttributeMaxThreadsPerBlock => MAX_BLOCK as c_int,
        Attribute::hipDeviceAttributeMaxGridDimX => MAX_GRID[0],
        Attribute::hipDeviceAttributeMaxGridDimY => MAX_GRID[1],
        Attribute::hipDeviceAttributeMaxGridDimZ => MAX_GRID[2],
        Attribute::hipDeviceAttributeMaxThreadsPerMultiProcessor => THREADS_PER_COMPUTE_UNIT,
        Attribute::hipDeviceAttributeMaxPitch
        | Attribute::hipDeviceAttributeTotalConstantMemory => c_int::MAX,
        // The value does not fit; the runtime of ROCm saturates as well.
        Attribute::hipDeviceAttributeTotalGlobalMem => c_int::MAX,
        Attribute::hipDeviceAttributeMemoryBusWidth => MEMORY_BUS_BITS,
        Attribute::hipDeviceAttributeMemoryClockRate => MEMORY_CLOCK_KHZ,
        Attribute::hipDeviceAttributeMultiprocessorCount
        | Attribute::hipDeviceAttributePhysicalMultiProcessorCount => compute_units(),
        Attribute::hipDeviceAttributePciBusId => PCI_BUS,
        Attribute::hipDeviceAttributeMaxRegistersPerBlock
        | Attribute::hipDeviceAttributeMaxRegistersPerMultiprocessor => REGISTERS,
        Attribute::hipDeviceAttributeMaxSharedMemoryPerBlock
        | Attribute::hipDeviceAttributeSharedMemPerBlockOptin
        | Attribute::hipDeviceAttributeSharedMemPerMultiprocessor
        | Attribute::hipDeviceAttributeMaxSharedMemoryPerMultiprocessor => LDS as c_int,
        Attribute::hipDeviceAttributeWarpSize => 64,
        Attribute::hipDeviceAttributeClockInstructionRate
        | Attribute::hipDeviceAttributeWallClockRate => TIMER_KHZ,
        _ => return None,
    })
}
