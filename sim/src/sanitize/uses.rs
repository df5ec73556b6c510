//! Which registers an instruction reads and writes.
//!
//! Found once for every instruction of a program, from the decoder's tables of operand widths and from what each
//! operation does beside its operands. A test runs every opcode on random registers and proves the list against the
//! execution itself: nothing else is read, nothing else is written.

use super::class::{Class, class_of};
use super::operands::{self, List};
use crate::cost::is_transcendental;
use crate::decode::table;
use crate::inst::{AGPR0, Format, Inst, M0, NONE, Operand, VGPR0};
use crate::op::Op::*;
use crate::wave::Wave;

/// The scalar condition code, numbered as the operand that reads it.
pub(crate) const SCC: Operand = 253;

/// What a register is to an instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Role {
    /// Source 0, 1 or 2 of an arithmetic instruction.
    Source0,
    Source1,
    Source2,
    /// The destination's old value, as a source: accumulation.
    Accumulator,
    /// The destination's old value, of which a part stays.
    Kept,
    /// A lane mask that selects or carries.
    Mask,
    /// A part of a memory address, or the lane number of a permutation.
    Address,
    /// What is stored, or combined by an atomic.
    Data,
    /// M0.
    Index,
    /// EXEC, where it says which lanes take part.
    Lanes,
    /// Written.
    Result,
}

/// Some neighbouring registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Use {
    /// The first, as an operand.
    pub first: Operand,
    pub count: u8,
    pub role: Role,
}

impl Use {
    /// Vector registers: the first one's index in the unified file.
    #[inline(always)]
    pub fn vector(&self, accum_offset: u16) -> Option<usize> {
        match self.first {
            VGPR0..AGPR0 => Some(usize::from(self.first - VGPR0)),
            AGPR0.. => Some(usize::from(self.first - AGPR0 + accum_offset) & 511),
            _ => None,
        }
    }
}

/// Reads and writes at most.
const MOST: usize = 9;

/// All registers of an instruction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uses {
    list: [Use; MOST],
    reads: u8,
    all: u8,
    /// Register numbers also depend on M0: see [`resolved`].
    pub relative: bool,
    pub class: Class,
    /// Uses the transcendental unit.
    pub transcendental: bool,
    /// A dot product.
    pub dot: bool,
}

impl Uses {
    /// What is read.
    #[inline(always)]
    pub fn reads(&self) -> &[Use] {
        &self.list[..usize::from(self.reads)]
    }

    /// What is written. Of vector registers perhaps only some lanes.
    #[inline(always)]
    pub fn writes(&self) -> &[Use] {
        &self.list[usize::from(self.reads)..usize::from(self.all)]
    }

    /// The registers read in a role.
    pub fn role(&self, role: Role) -> Option<&Use> {
        self.reads().iter().find(|u| u.role == role)
    }

    /// Of one instruction, with the register numbers that it names.
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

/// The instruction with the registers that M0 makes it use, where that is the case now.
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
