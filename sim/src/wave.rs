//! State of one wave: registers, program counter, mode.

use crate::inst::{AGPR0, EXEC, NONE, Operand, VCC, VGPR0};

/// Lanes of a wave.
pub const LANES: usize = 64;

/// One vector register: 32 bits for each lane.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub struct VReg(pub [u32; LANES]);

/// The state of one wave.
pub struct Wave {
    /// Unified vector register file: v0.. at 0, a0.. at [`Wave::accum_offset`].
    pub vgpr: Box<[VReg; 512]>,
    /// Scalar registers by operand code: SGPRs, flat_scratch, vcc, ttmp, m0 and exec.
    /// 64-bit values lie in two neighbours, low half first.
    pub sgpr: [u32; 128],
    /// Scalar condition code.
    pub scc: bool,
    /// MODE register: bits 0..4 rounding (f32, then f64/f16), 4..8 denormals, 8 DX10_CLAMP, 9 IEEE.
    pub mode: u32,
    /// Index of the next instruction in the program.
    pub pc: u32,
    /// First register of the accumulation part.
    pub accum_offset: u16,
    /// Vector registers allocated (both parts).
    pub vgpr_count: u16,
    /// Number of this wave in its workgroup.
    pub id: u32,
    /// Address of this wave's scratch: 64 lanes of `scratch_stride` bytes.
    pub scratch: u64,
    /// Scratch bytes of one lane.
    pub scratch_stride: u32,
    /// Instructions executed.
    pub executed: u64,
    /// Whether the wave has executed `s_endpgm`.
    pub ended: bool,
}

impl Wave {
    /// A wave with all registers zero and all lanes on.
    pub fn new(id: u32) -> Self {
        let zero = vec![VReg([0; LANES]); 512].into_boxed_slice();
        let Ok(vgpr) = zero.try_into() else {
            unreachable!("512 registers")
        };
        let mut wave = Wave {
            vgpr,
            sgpr: [0; 128],
            scc: false,
            mode: 0,
            pc: 0,
            accum_offset: 256,
            vgpr_count: 512,
            id,
            scratch: 0,
            scratch_stride: 0,
            executed: 0,
            ended: false,
        };
        wave.set_exec(u64::MAX);
        wave
    }

    /// Index in the unified file of a vector operand (VGPR or AGPR).
    #[inline(always)]
    pub fn vreg(&self, operand: Operand) -> usize {
        debug_assert!(operand >= VGPR0 && operand != NONE);
        if operand < AGPR0 {
            (operand - VGPR0) as usize
        } else {
            ((operand - AGPR0) + self.accum_offset) as usize & 511
        }
    }

    /// The scalar pair that starts at `operand`.
    #[inline(always)]
    pub fn s64(&self, operand: Operand) -> u64 {
        let i = operand as usize;
        u64::from(self.sgpr[i & 127]) | u64::from(self.sgpr[(i + 1) & 127]) << 32
    }

    /// Sets the scalar pair that starts at `operand`.
    #[inline(always)]
    pub fn set_s64(&mut self, operand: Operand, value: u64) {
        let i = operand as usize;
        self.sgpr[i & 127] = value as u32;
        self.sgpr[(i + 1) & 127] = (value >> 32) as u32;
    }

    /// EXEC: the active lanes, one bit each.
    #[inline(always)]
    pub fn exec(&self) -> u64 {
        self.s64(EXEC)
    }

    /// Sets EXEC.
    #[inline(always)]
    pub fn set_exec(&mut self, mask: u64) {
        self.set_s64(EXEC, mask);
    }

    /// VCC: the vector condition code.
    #[inline(always)]
    pub fn vcc(&self) -> u64 {
        self.s64(VCC)
    }
}
