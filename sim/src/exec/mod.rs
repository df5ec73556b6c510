//! Execution of instructions.
//!
//! A function of type [`Exec`] executes an instruction. It is chosen once, when a program is prepared ([`prepare`]).
//! Instructions over 64 lanes are compiled several times, for the host's vector extensions ([`Level`]), and the best
//! version is chosen at run time.

pub(crate) mod atomic;
pub(crate) mod convert;
pub(crate) mod lanes;
pub(crate) mod lds;
mod level;
mod mfma;
pub(crate) mod mubuf;
mod salu;
pub(crate) mod smem;
mod valu;
pub(crate) mod vmem;

pub(crate) use lds::swizzle_source;
pub use level::Level;
pub(crate) use level::{leveled, leveled_narrow, unleveled};
pub(crate) use salu::GPR_IDX_EN;
pub(crate) use valu::operand::{Ty, dpp_sources, scalar32, scalar64, written_lanes};

use crate::fault::FaultKind;
use crate::inst::Inst;
use crate::memory::{Extent, Memory};
use crate::wave::Wave;

/// Arithmetic of MFMA instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum MfmaMode {
    /// A chain of f32 fused multiply-adds.
    #[default]
    Fast,
    /// The published model of CDNA3's matrix units.
    Exact,
}

/// State that a wave needs to run, besides its registers.
pub struct Env<'a> {
    /// Local data share of the workgroup.
    pub lds: &'a mut [u8],
    /// The allocations that the kernel may touch.
    pub memory: &'a Memory,
    /// The allocation that was accessed last.
    pub hint: Extent,
    /// MFMA arithmetic.
    pub mfma: MfmaMode,
    /// The program, for `s_getpc`, `s_setpc`, `s_swappc`.
    pub program: &'a crate::inst::Program,
    /// XCC of this workgroup (`s_getreg_b32 hwreg(HW_REG_XCC_ID)`).
    pub xcc: u32,
    /// Simulated clock, for `s_memtime` and `s_memrealtime`.
    pub clock: u64,
    /// Set by the instruction that returns [`Flow::Fault`].
    pub fault: Option<FaultKind>,
}

impl<'a> Env<'a> {
    /// Environment at the start of a workgroup: XCC 0, fast matrix products.
    pub fn new(
        lds: &'a mut [u8],
        memory: &'a Memory,
        program: &'a crate::inst::Program,
    ) -> Env<'a> {
        Env {
            lds,
            memory,
            hint: Extent { start: 0, end: 0 },
            mfma: MfmaMode::Fast,
            program,
            xcc: 0,
            clock: 0,
            fault: None,
        }
    }
}

/// High 32 bits of flat addresses in LDS.
pub const SHARED_BASE_HI: u32 = 0x0001_0000;
/// High 32 bits of flat addresses in scratch.
pub const PRIVATE_BASE_HI: u32 = 0x0002_0000;

/// Control flow after an instruction. `Wave::pc` points to the next instruction when an instruction runs; branches
/// change it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Flow {
    /// The wave goes on.
    Next,
    /// The wave waits at a barrier.
    Barrier,
    /// The wave lets others run (`s_sleep`), but could go on.
    Yield,
    /// The wave has ended.
    End,
    /// The launch must stop; [`Env::fault`] holds the reason.
    Fault,
}

/// Executes one instruction.
///
/// # Safety
/// The host must support the [`Level`] that the function was chosen for, and every extent of
/// `Env::memory` must be valid host memory.
pub type Exec = unsafe fn(&mut Wave, &Inst, &mut Env) -> Flow;

/// Finds the function that executes an instruction on a host of the given level.
///
/// Each module of `exec` covers the formats that it implements, by `pub(crate) fn handler(inst: &Inst, level: Level) ->
/// Option<Exec>`.
pub fn prepare(inst: &Inst, level: Level) -> Exec {
    handler(inst, level).unwrap_or(unimplemented_instruction)
}

/// Whether the simulator implements an instruction. If not, a wave that reaches it faults.
pub fn is_implemented(inst: &Inst) -> bool {
    handler(inst, Level::Baseline).is_some()
}

fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    salu::handler(inst)
        .or_else(|| mfma::handler(inst, level))
        .or_else(|| valu::handler(inst, level))
        .or_else(|| lds::handler(inst, level))
        .or_else(|| vmem::handler(inst, level))
        .or_else(|| mubuf::handler(inst, level))
        .or_else(|| smem::handler(inst, level))
}

/// Faults, because nothing implements this instruction.
unsafe fn unimplemented_instruction(_: &mut Wave, inst: &Inst, env: &mut Env) -> Flow {
    env.fault = Some(match inst.op {
        crate::op::Op::INVALID => FaultKind::InvalidInstruction {
            bytes: vec![inst.literal],
        },
        op => FaultKind::Unimplemented {
            mnemonic: format!("{op:?}").to_lowercase(),
        },
    });
    Flow::Fault
}
