//! Entries of the opcode tables: operands, modifiers and flags of an instruction.

use crate::inst::{Format, Inst};
use crate::op::Op;

use super::{mem, scalar, vector};

/// An operand kind is its width in dwords, with one of these added.
pub(crate) const KIND_WIDTH: u8 = 63;
/// A 16-bit float. A literal supplies its low half.
pub(super) const F: u8 = 1 << 6;
/// A 16-bit integer. A literal supplies its low half; inline float constants supply their bits in f16.
pub(super) const I: u8 = 2 << 6;
/// Registers only. As the third source: the scalar pair of a lane mask.
pub(super) const R: u8 = 3 << 6;
/// Bits that distinguish [`F`], [`I`] and [`R`].
pub(crate) const KIND_CLASS: u8 = 3 << 6;
/// Class of 16-bit floats in [`KIND_CLASS`].
pub(crate) const CLASS_F16: u8 = F;
/// Class of 16-bit integers in [`KIND_CLASS`].
pub(crate) const CLASS_I16: u8 = I;
/// Class of operands that take registers only in [`KIND_CLASS`].
pub(crate) const CLASS_REGISTER: u8 = R;

/// VOP1, VOP2, VOPC, VOP3: the mnemonic carries the suffix of its encoding.
pub(crate) const SUFFIX: u8 = 1;
/// VOP3: has a scalar destination beside the vector one.
pub(crate) const SDST: u8 = 2;
/// VOP3: the destination is scalar.
pub(crate) const SCALAR_DST: u8 = 4;
/// VOP3P: an instruction of the matrix unit.
pub(crate) const MAI: u8 = 1;
/// DS: two 8-bit offsets in place of one of 16 bits.
pub(crate) const DS_TWO: u8 = 1;
/// DS: no offset.
pub(crate) const DS_PLAIN: u8 = 2;
/// DS: only with the GDS bit.
pub(crate) const DS_GWS: u8 = 4;
/// MUBUF: has a form that loads to LDS.
pub(crate) const TO_LDS: u8 = 1;

/// VOP3 modifiers: accepted abs bits.
pub(crate) const M_ABS: u32 = 0;
/// Position of the abs bits that have a meaning.
pub(crate) const M_ABS_REAL: u32 = 3;
/// Position of the accepted neg bits.
pub(crate) const M_NEG: u32 = 6;
/// Position of the neg bits that negate.
pub(crate) const M_NEG_REAL: u32 = 9;
/// Position of the neg bits that print as sign extension.
pub(crate) const M_SEXT: u32 = 12;
/// Takes CLAMP.
pub(crate) const M_CLAMP: u32 = 1 << 15;
/// Takes OMOD.
pub(crate) const M_OMOD: u32 = 1 << 16;
/// Takes OP_SEL.
pub(crate) const M_OP_SEL: u32 = 1 << 17;

/// SDWA or DPP form exists.
pub(crate) const X_EXISTS: u8 = 1;
/// Source 0 takes neg and abs (SDWA: otherwise sign extension).
pub(crate) const X_FLOAT0: u8 = 2;
/// Source 1 takes neg and abs.
pub(crate) const X_FLOAT1: u8 = 4;
/// SDWA: takes OMOD. DPP: modifiers are accepted and mean nothing.
pub(crate) const X_MORE: u8 = 8;
/// SDWA: no destination selection. DPP: 64-bit, only `row_newbcast`.
pub(crate) const X_SPECIAL: u8 = 16;
/// DPP: the neg bit of source 1 prints as sign extension.
pub(crate) const X_SEXT1: u8 = 32;

/// One opcode of one format.
pub(crate) struct Entry {
    /// Opcode in the encoding.
    pub code: u16,
    /// The instruction.
    pub op: Op,
    /// Operand kinds, in the order that the table states.
    pub kinds: [u8; 4],
    /// Flags of the format.
    pub flags: u8,
    /// VOP3 modifiers.
    pub mods: u32,
    /// SDWA form.
    pub sdwa: u8,
    /// DPP form.
    pub dpp: u8,
}

impl Entry {
    /// Width in dwords of an operand; 0 if there is none.
    pub fn width(&self, operand: usize) -> u8 {
        self.kinds[operand] & KIND_WIDTH
    }
}

pub(super) const fn e(code: u16, op: Op, kinds: [u8; 4]) -> Entry {
    f(code, op, kinds, 0)
}

pub(super) const fn f(code: u16, op: Op, kinds: [u8; 4], flags: u8) -> Entry {
    v(code, op, kinds, flags, 0)
}

pub(super) const fn v(code: u16, op: Op, kinds: [u8; 4], flags: u8, mods: u32) -> Entry {
    Entry {
        code,
        op,
        kinds,
        flags,
        mods,
        sdwa: 0,
        dpp: 0,
    }
}

pub(super) const fn c(code: u16, op: Op, kinds: [u8; 4], flags: u8, sdwa: u8, dpp: u8) -> Entry {
    Entry {
        code,
        op,
        kinds,
        flags,
        mods: 0,
        sdwa,
        dpp,
    }
}

fn table(format: Format) -> &'static [Entry] {
    match format {
        Format::Sop2 => scalar::SOP2,
        Format::Sopk => scalar::SOPK,
        Format::Sop1 => scalar::SOP1,
        Format::Sopc => scalar::SOPC,
        Format::Sopp => scalar::SOPP,
        Format::Smem => scalar::SMEM,
        Format::Vop1 => vector::VOP1,
        Format::Vop2 => vector::VOP2,
        Format::Vopc => vector::VOPC,
        Format::Vop3 => vector::VOP3,
        Format::Vop3p | Format::Mai => vector::VOP3P,
        Format::Ds => mem::DS,
        Format::Flat => mem::FLAT,
        Format::Global => mem::GLOBAL,
        Format::Scratch => mem::SCRATCH,
        Format::Mubuf => mem::MUBUF,
        Format::Mtbuf => mem::MTBUF,
        Format::Invalid => &[],
    }
}

/// Formats with a table of their own, in the order of [`Format`].
const TABLES: [Format; 17] = [
    Format::Sop2,
    Format::Sopk,
    Format::Sop1,
    Format::Sopc,
    Format::Sopp,
    Format::Smem,
    Format::Vop1,
    Format::Vop2,
    Format::Vopc,
    Format::Vop3,
    Format::Vop3p,
    Format::Ds,
    Format::Flat,
    Format::Global,
    Format::Scratch,
    Format::Mubuf,
    Format::Mtbuf,
];

/// All entries, each with the format that its instructions decode to.
pub(crate) fn all() -> impl Iterator<Item = (Format, &'static Entry)> {
    TABLES.into_iter().flat_map(|format| {
        table(format).iter().map(move |entry| match format {
            Format::Vop3p if entry.flags & MAI != 0 => (Format::Mai, entry),
            _ => (format, entry),
        })
    })
}

/// Finds the entry of an opcode.
pub(crate) fn find(format: Format, code: u32) -> Option<&'static Entry> {
    let table = table(format);
    let at = table
        .binary_search_by_key(&code, |e| u32::from(e.code))
        .ok()?;
    Some(&table[at])
}

/// Finds the entry that a decoded instruction came from.
pub(crate) fn of(inst: &Inst) -> Option<&'static Entry> {
    table(inst.format).iter().find(|e| e.op == inst.op)
}
