//! Kernel descriptors: 64 bytes that tell the hardware how to start a kernel.

/// The kernel descriptor `NAME.kd` of LLVM's AMDGPU ABI (code objects 3 to 6), for gfx942.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// Static LDS in bytes.
    pub group_segment_fixed_size: u32,
    /// Scratch bytes of one lane.
    pub private_segment_fixed_size: u32,
    /// Size of the kernel arguments in bytes, hidden ones included; 0 if the compiler did not record it.
    pub kernarg_size: u32,
    /// Byte offset of the first instruction from the descriptor.
    pub entry_offset: i64,
    /// `COMPUTE_PGM_RSRC1`.
    pub rsrc1: u32,
    /// `COMPUTE_PGM_RSRC2`.
    pub rsrc2: u32,
    /// `COMPUTE_PGM_RSRC3`.
    pub rsrc3: u32,
    /// `KERNEL_CODE_PROPERTIES`.
    pub properties: u16,
    /// `KERNARG_PRELOAD`.
    pub preload: u16,
}

/// Bits of [`Descriptor::properties`]: the user SGPRs that are set up, in this order.
#[allow(missing_docs)]
pub mod property {
    pub const PRIVATE_SEGMENT_BUFFER: u16 = 1 << 0;
    pub const DISPATCH_PTR: u16 = 1 << 1;
    pub const QUEUE_PTR: u16 = 1 << 2;
    pub const KERNARG_SEGMENT_PTR: u16 = 1 << 3;
    pub const DISPATCH_ID: u16 = 1 << 4;
    pub const FLAT_SCRATCH_INIT: u16 = 1 << 5;
    pub const PRIVATE_SEGMENT_SIZE: u16 = 1 << 6;
    /// Waves of 32 lanes, which gfx942 does not support.
    pub const WAVE32: u16 = 1 << 10;
    /// The kernel's scratch need is not known at compile time.
    pub const DYNAMIC_STACK: u16 = 1 << 11;
}

impl Descriptor {
    /// Size of a descriptor in bytes.
    pub const SIZE: usize = 64;

    /// Parses the 64 bytes of a descriptor.
    pub fn parse(bytes: &[u8; Self::SIZE]) -> Self {
        let u16_at = |i: usize| u16::from_le_bytes([bytes[i], bytes[i + 1]]);
        let u32_at = |i: usize| u32::from(u16_at(i)) | u32::from(u16_at(i + 2)) << 16;
        Descriptor {
            group_segment_fixed_size: u32_at(0),
            private_segment_fixed_size: u32_at(4),
            kernarg_size: u32_at(8),
            entry_offset: (u64::from(u32_at(16)) | u64::from(u32_at(20)) << 32) as i64,
            rsrc3: u32_at(44),
            rsrc1: u32_at(48),
            rsrc2: u32_at(52),
            properties: u16_at(56),
            preload: u16_at(58),
        }
    }

    /// Vector registers of a wave, both architectural and accumulation, in steps of 8.
    pub fn vgprs(&self) -> u32 {
        ((self.rsrc1 & 0x3f) + 1) * 8
    }

    /// Scalar registers of a wave, in steps of 16.
    pub fn sgprs(&self) -> u32 {
        ((self.rsrc1 >> 6 & 0xf) / 2 + 1) * 16
    }

    /// First register of the accumulation part.
    pub fn accum_offset(&self) -> u32 {
        ((self.rsrc3 & 0x3f) + 1) * 4
    }

    /// `FLOAT_MODE`: rounding and denormals, as the low byte of the MODE register.
    pub fn float_mode(&self) -> u32 {
        self.rsrc1 >> 12 & 0xff
    }

    /// `ENABLE_DX10_CLAMP`.
    pub fn dx10_clamp(&self) -> bool {
        self.rsrc1 >> 21 & 1 != 0
    }

    /// `ENABLE_IEEE_MODE`.
    pub fn ieee(&self) -> bool {
        self.rsrc1 >> 23 & 1 != 0
    }

    /// `FP16_OVFL`.
    pub fn fp16_ovfl(&self) -> bool {
        self.rsrc1 >> 26 & 1 != 0
    }

    /// Initial value of a wave's MODE register.
    pub fn mode(&self) -> u32 {
        self.float_mode()
            | u32::from(self.dx10_clamp()) << 8
            | u32::from(self.ieee()) << 9
            | u32::from(self.fp16_ovfl()) << 23
    }

    /// `USER_SGPR_COUNT`.
    pub fn user_sgprs(&self) -> u32 {
        self.rsrc2 >> 1 & 0x1f
    }

    /// Whether the workgroup ids x, y, z are passed in SGPRs.
    pub fn workgroup_ids(&self) -> [bool; 3] {
        [7, 8, 9].map(|bit| self.rsrc2 >> bit & 1 != 0)
    }

    /// Whether the number of workgroup waves is passed in an SGPR.
    pub fn workgroup_info(&self) -> bool {
        self.rsrc2 >> 10 & 1 != 0
    }

    /// Number of work-item ids x, y, z that are passed in v0.
    pub fn workitem_ids(&self) -> u32 {
        (self.rsrc2 >> 11 & 3) + 1
    }

    /// Kernel arguments that are preloaded into SGPRs: first dword and number of dwords.
    pub fn preload(&self) -> (u32, u32) {
        (u32::from(self.preload >> 7), u32::from(self.preload & 0x7f))
    }

    /// Whether a [`property`] is set.
    pub fn has(&self, property: u16) -> bool {
        self.properties & property != 0
    }
}
