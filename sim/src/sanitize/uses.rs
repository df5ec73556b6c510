//! Registers that an instruction reads and writes.
//!
//! Computed once for every instruction of a program, from the decoder's operand widths and from each operation's
//! implicit registers. A test runs every opcode on random registers and proves that execution reads and writes nothing
//! else.

use super::class::{Class, class_of};
use super::operands::{self, List};
use crate::cost::is_transcendental;
use crate::decode::table;
use crate::inst::{AGPR0, Format, Inst, M0, NONE, Operand, VGPR0};
use crate::op::Op::*;
use crate::wave::Wave;

/// The scalar condition code, numbered as the operand that reads it.
pub(crate) const SCC: Operand = 253;

/// Role of a register in an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Role {
    /// Source 0, 1 or 2 of an arithmetic instruction.
    Source0,
    Source1,
    Source2,
    /// Old value of the destination, as an addend.
    Accumulator,
    /// Old value of the destination, a part of which is kept.
    Kept,
    /// A lane mask that selects or carries.
    Mask,
    /// A part of a memory address, or the lane number of a permutation.
    Address,
    /// Data that is stored, or an operand of an atomic.
    Data,
    /// M0.
    Index,
    /// EXEC, if it selects the lanes that take part.
    Lanes,
    /// Register that is written.
    Result,
}

/// A range of registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    /// First register, as an operand.
    pub first: Operand,
    pub count: u8,
    pub role: Role,
}

impl Use {
    /// For vector registers: index of the first in the unified file.
    #[inline(always)]
    pub fn vector(&self, accum_offset: u16) -> Option<usize> {
        match self.first {
            VGPR0..AGPR0 => Some(usize::from(self.first - VGPR0)),
            AGPR0.. => Some(usize::from(self.first - AGPR0 + accum_offset) & 511),
            _ => None,
        }
    }
}

/// Maximum number of reads and writes.
const MOST: usize = 9;

/// All registers that an instruction uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uses {
    list: [Use; MOST],
    reads: u8,
    all: u8,
    /// Whether register numbers also depend on M0: see [`resolved`].
    pub relative: bool,
    pub class: Class,
    /// Whether it uses the transcendental unit.
    pub transcendental: bool,
    /// Whether it is a dot product.
    pub dot: bool,
}

impl Uses {
    /// Registers that are read.
    #[inline(always)]
    pub fn reads(&self) -> &[Use] {
        &self.list[..usize::from(self.reads)]
    }

    /// Registers that are written; of vector registers possibly only some lanes.
    #[inline(always)]
    pub fn writes(&self) -> &[Use] {
        &self.list[usize::from(self.reads)..usize::from(self.all)]
    }

    /// Registers that are read in `role`.
    pub fn role(&self, role: Role) -> Option<&Use> {
        self.reads().iter().find(|u| u.role == role)
    }

    /// Uses of one instruction, with the register numbers in its encoding.
    pub fn of(inst: &Inst) -> Uses {
        let mut list = List {
            reads: Vec::with_capacity(MOST),
            writes: Vec::new(),
        };
        if let Some(entry) = table::of(inst) {
            match inst.format {
                Format::Sop1 | Format::Sop2 | Format::Sopc | Format::Sopk | Format::Sopp => {
                    operands::scalar(&mut list, inst, entry);
                }
                Format::Smem => operands::scalar_memory(&mut list, inst, entry),
                Format::Ds => operands::local(&mut list, inst, entry),
                Format::Flat | Format::Global | Format::Scratch => {
                    operands::flat(&mut list, inst, entry)
                }
                Format::Mubuf | Format::Mtbuf => operands::buffer(&mut list, inst, entry),
                Format::Mai => operands::matrix(&mut list, inst, entry),
                _ => operands::vector(&mut list, inst, entry),
            }
        }
        let mut uses = Uses {
            list: [Use {
                first: NONE,
                count: 0,
                role: Role::Result,
            }; MOST],
            reads: list.reads.len() as u8,
            all: (list.reads.len() + list.writes.len()) as u8,
            relative: matches!(
                inst.op,
                V_MOV_B32 | S_MOVRELS_B32 | S_MOVRELS_B64 | S_MOVRELD_B32 | S_MOVRELD_B64
            ),
            class: class_of(inst),
            transcendental: is_transcendental(inst.op),
            dot: inst.op.mnemonic().starts_with("v_dot"),
        };
        for (to, from) in uses
            .list
            .iter_mut()
            .zip(list.reads.iter().chain(&list.writes))
        {
            *to = *from;
        }
        uses
    }
}

/// The instruction with the registers that M0 selects; `None` if M0 has no effect now.
pub(crate) fn resolved(w: &Wave, inst: &Inst) -> Option<Inst> {
    let m0 = w.sgpr[usize::from(M0)];
    let mut to = *inst;
    match inst.op {
        V_MOV_B32 if w.mode & crate::exec::GPR_IDX_EN != 0 => {
            let (index, which) = ((m0 & 255) as u16, m0 >> 12 & 15);
            if which & 1 != 0 && to.src[0] >= VGPR0 {
                to.src[0] += index;
            }
            if which & 8 != 0 {
                to.vdst += index;
            }
            let beyond = |r: Operand| r != NONE && r >= AGPR0;
            (!beyond(to.src[0]) && !beyond(to.vdst)).then_some(to)
        }
        S_MOVRELS_B32 | S_MOVRELS_B64 => {
            to.src[0] = shifted(to.src[0], m0)?;
            Some(to)
        }
        S_MOVRELD_B32 | S_MOVRELD_B64 => {
            to.sdst = shifted(to.sdst, m0)?;
            Some(to)
        }
        _ => None,
    }
}

fn shifted(register: Operand, by: u32) -> Option<Operand> {
    let to = u32::from(register).checked_add(by)?;
    (to < 102).then_some(to as Operand)
}

#[cfg(test)]
#[path = "uses_tests.rs"]
mod tests;
