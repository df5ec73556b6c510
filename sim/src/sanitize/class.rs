//! Classes of instructions, by the rules for wait states and counters.

use crate::cost::mfma_passes;
use crate::inst::{Format, Inst, flag};
use crate::op::Op;

/// Unit that executes an instruction, with its properties.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Scalar arithmetic, branches and the rest of SOPP.
    Scalar,
    /// Scalar memory.
    ScalarMemory,
    /// Vector arithmetic.
    Vector,
    /// A matrix product of `passes` passes.
    Matrix { unit: Unit, passes: u8 },
    /// LDS, and exchanges between lanes through its crossbar.
    Local,
    /// Global, scratch and buffer memory.
    Memory,
    /// Flat memory: global or LDS, known only on execution.
    Flat,
    /// No registers and no waiting.
    Other,
}

/// Kinds of matrix products, which differ in the latency of their results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// f32 inputs: results are ready one wait state earlier than with other inputs.
    Single,
    /// f64.
    Double,
    /// Types narrower than f32, xf32, and sparse products.
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

fn matrix(op: Op) -> Class {
    let name = op.mnemonic();
    let unit = if name.starts_with("v_mfma_f64") {
        Unit::Double
    } else if name.starts_with("v_mfma") && name.ends_with("_f32") && !name.ends_with("_xf32") {
        Unit::Single
    } else {
        Unit::Xdl
    };
    match mfma_passes(op) {
        // Moves between the halves of the register file.
        0 => Class::Vector,
        passes => Class::Matrix {
            unit,
            passes: passes as u8,
        },
    }
}

/// Whether a vector memory instruction moves data to LDS.
pub(super) fn is_dma(inst: &Inst) -> bool {
    inst.has(flag::LDS)
}
