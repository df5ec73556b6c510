//! What kind of work an instruction is, as the rules about waiting see it.

use crate::inst::{Format, Inst, flag};
use crate::op::Op::{self, *};

/// The unit that executes an instruction, and what matters about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Scalar arithmetic, branches and the rest of SOPP.
    Scalar,
    /// Scalar memory.
    ScalarMemory,
    /// Vector arithmetic.
    Vector,
    /// A matrix product of so many passes.
    Matrix { unit: Unit, passes: u8 },
    /// LDS, and exchanges between lanes through it.
    Local,
    /// Global, scratch and buffer memory.
    Memory,
    /// Flat memory: global or LDS, known only when it is executed.
    Flat,
    /// No registers, no waiting.
    Other,
}

/// The three kinds of matrix products, which differ in how long their results take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// f32 inputs: results come one wait state earlier than those of the others.
    Single,
    /// f64.
    Double,
    /// Everything narrower, xf32 and sparse.
    Xdl,
}

impl Class {
    /// Vector memory.
    pub fn is_vmem(self) -> bool {
        matches!(self, Class::Memory | Class::Flat)
    }
}

pub(super) fn class_of(inst: &Inst) -> Class {
    match inst.format {
        Format::Sop1 | Format::Sop2 | Format::Sopk | Format::Sopc | Format::Sopp => Class::Scalar,
        Format::Smem => Class::ScalarMemory,
        Format::Vop1 | Format::Vop2 | Format::Vopc | Format::Vop3 | Format::Vop3p => Class::Vector,
        Format::Mai => matrix(inst.op),
        Format::Ds => Class::Local,
        Format::Flat => Class::Flat,
        Format::Global | Format::Scratch | Format::Mubuf | Format::Mtbuf => Class::Memory,
        Format::Invalid => Class::Other,
    }
}

/// Passes as LLVM's scheduling model of gfx942 has them (`SISchedule.td`, `SIDPGFX942FullSpeedModel`).
fn matrix(op: Op) -> Class {
    let name = op.mnemonic();
    if matches!(op, V_ACCVGPR_READ_B32 | V_ACCVGPR_WRITE_B32) {
        return Class::Vector;
    }
    let large = name.contains("_32x32x");
    let (unit, passes) = if name.starts_with("v_smfmac") {
        (Unit::Xdl, if large { 8 } else { 4 })
    } else if name.starts_with("v_mfma_f64") {
        (Unit::Double, if name.contains("_4x4x") { 4 } else { 8 })
    } else {
        let single = name.ends_with("_f32") && !name.ends_with("_xf32");
        let unit = if single { Unit::Single } else { Unit::Xdl };
        let passes = match op {
            V_MFMA_F32_4X4X1_16B_F32
            | V_MFMA_F32_4X4X4_16B_F16
            | V_MFMA_F32_4X4X4_16B_BF16
            | V_MFMA_I32_4X4X4_16B_I8 => 2,
            // The products of several blocks, and of f32, keep the units busy for twice as long.
            V_MFMA_F32_32X32X1_2B_F32
            | V_MFMA_F32_32X32X2_F32
            | V_MFMA_F32_32X32X4_2B_F16
            | V_MFMA_F32_32X32X4_2B_BF16
            | V_MFMA_I32_32X32X4_2B_I8 => 16,
            V_MFMA_F32_16X16X1_4B_F32
            | V_MFMA_F32_16X16X4_F32
            | V_MFMA_F32_16X16X4_4B_F16
            | V_MFMA_F32_16X16X4_4B_BF16
            | V_MFMA_I32_16X16X4_4B_I8 => 8,
            _ if large => 8,
            _ => 4,
        };
        (unit, passes)
    };
    Class::Matrix { unit, passes }
}

/// Whether an instruction uses the transcendental unit.
pub(super) fn is_transcendental(op: Op) -> bool {
    let name = op.mnemonic();
    [
        "v_exp_", "v_log_", "v_rcp_", "v_rsq_", "v_sqrt_", "v_sin_", "v_cos_",
    ]
    .iter()
    .any(|p| name.starts_with(p))
}

/// Whether a vector memory instruction moves data to LDS.
pub(super) fn is_dma(inst: &Inst) -> bool {
    inst.has(flag::LDS)
}
