//! The decoded form of one instruction.

use crate::op::Op;

/// Encoding of an instruction. It decides the meaning of the fields of [`Inst`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Format {
    Sop2,
    Sopk,
    Sop1,
    Sopc,
    Sopp,
    Smem,
    Vop1,
    Vop2,
    Vopc,
    Vop3,
    Vop3p,
    /// VOP3P-MAI: MFMA and accumulator moves.
    Mai,
    Ds,
    /// FLAT segment of the FLAT encoding.
    Flat,
    /// GLOBAL segment of the FLAT encoding.
    Global,
    /// SCRATCH segment of the FLAT encoding.
    Scratch,
    Mubuf,
    Mtbuf,
    /// Bytes that are no instruction. Execution is a fault.
    Invalid,
}

/// An operand, in one number space for all encodings; the numbers are the machine's.
///
/// | code | operand |
/// |---|---|
/// | 0..=101 | SGPR |
/// | 102..=103 | flat_scratch |
/// | 104..=105 | xnack_mask |
/// | 106..=107 | vcc |
/// | 108..=123 | ttmp0..15 |
/// | 124 | m0 |
/// | 126..=127 | exec |
/// | 128..=192 | integers 0..=64 |
/// | 193..=208 | integers -1..=-16 |
/// | 235..=239 | src_shared_base, shared_limit, private_base, private_limit, pops_exiting_wave_id |
/// | 240..=248 | 0.5, -0.5, 1, -1, 2, -2, 4, -4, 1/(2 pi) |
/// | 251..=253 | vccz, execz, scc |
/// | 255 | the 32-bit literal in [`Inst::literal`] |
/// | 256..=511 | v0..v255 |
/// | 512..=767 | a0..a255 |
/// | [`NONE`] | absent (`off`, unused) |
pub type Operand = u16;

/// An absent operand.
pub const NONE: Operand = u16::MAX;
/// v0.
pub const VGPR0: Operand = 256;
/// a0.
pub const AGPR0: Operand = 512;
/// vcc_lo.
pub const VCC: Operand = 106;
/// m0.
pub const M0: Operand = 124;
/// exec_lo.
pub const EXEC: Operand = 126;
/// The literal constant.
pub const LITERAL: Operand = 255;

/// Bits of [`Inst::flags`].
pub mod flag {
    /// Result clamped (VOP3 CLAMP, VOP3P CLAMP, SDWA CLAMP).
    pub const CLAMP: u16 = 1 << 0;
    /// An SDWA instruction: [`super::Inst::ctrl`] holds its second dword.
    pub const SDWA: u16 = 1 << 1;
    /// A DPP instruction: [`super::Inst::ctrl`] holds its second dword.
    pub const DPP: u16 = 1 << 2;
    /// GLC of SMEM; SC0 of FLAT and MUBUF (for atomics: return the old value).
    pub const SC0: u16 = 1 << 3;
    /// SC1 of FLAT and MUBUF.
    pub const SC1: u16 = 1 << 4;
    /// NT (SLC) of FLAT and MUBUF.
    pub const NT: u16 = 1 << 5;
    /// MUBUF OFFEN.
    pub const OFFEN: u16 = 1 << 6;
    /// MUBUF IDXEN.
    pub const IDXEN: u16 = 1 << 7;
    /// LDS DMA form of MUBUF and FLAT loads.
    pub const LDS: u16 = 1 << 8;
    /// GDS bit of DS.
    pub const GDS: u16 = 1 << 9;
    /// A literal follows the instruction word (it is in [`super::Inst::literal`]).
    pub const LITERAL: u16 = 1 << 10;
    /// SMEM has an immediate offset in [`super::Inst::imm`].
    pub const SMEM_IMM: u16 = 1 << 11;
    /// SMEM has a register offset in `src[1]`.
    pub const SMEM_SOFFSET: u16 = 1 << 12;
    /// The e64 encoding of an opcode that also exists as VOP1, VOP2 or VOPC.
    pub const E64: u16 = 1 << 13;
}

/// A decoded instruction.
///
/// Operands by format:
///
/// | format | `vdst` | `sdst` | `src` |
/// |---|---|---|---|
/// | SOP1, SOP2, SOPK | - | destination | ssrc0, ssrc1 (SOPK: constant in `imm`, sign-extended) |
/// | SOPC | - | - | ssrc0, ssrc1 |
/// | SOPP | - | - | constant in `imm` (sign-extended), branch: also `target` |
/// | SMEM | - | data (destination or source) | sbase (SGPR number), soffset |
/// | VOP1, VOP2, VOP3 | destination (`v_readfirstlane`, `v_readlane`: NONE) | carry out, or the SGPR of `v_readlane` | src0..2 (VOP2 carry in: src2 = VCC; `v_cndmask` e32: src2 = VCC; `v_fmac`: destination is also the addend; `v_fmamk`, `v_fmaak`: LITERAL stands as src1, src2) |
/// | VOPC | - | destination mask (VCC for e32) | src0, src1 |
/// | VOP3P, MAI | destination | - | src0..2 |
/// | DS | destination | - | addr, data0, data1 (offsets: `imm` low 16 bits; two-offset forms: bytes 0 and 1 of `imm`) |
/// | FLAT, GLOBAL, SCRATCH | destination | saddr or NONE | addr, data (offset: `imm`, sign-extended) |
/// | MUBUF, MTBUF | destination or data | - | vaddr, srsrc (SGPR number), soffset (offset: `imm`) |
#[derive(Clone, Copy, Debug)]
pub struct Inst {
    /// Operation. One [`Op`] serves all encodings of a mnemonic (e32, e64, SDWA, DPP).
    pub op: Op,
    /// Encoding.
    pub format: Format,
    /// Length in bytes: 4 or 8.
    pub size: u8,
    /// Bits of [`flag`].
    pub flags: u16,
    /// Vector destination.
    pub vdst: Operand,
    /// Scalar destination.
    pub sdst: Operand,
    /// Sources.
    pub src: [Operand; 3],
    /// Constant, memory offset.
    pub imm: i32,
    /// The 32-bit literal. For [`Format::Invalid`]: the bytes.
    pub literal: u32,
    /// The second dword of SDWA and DPP. MAI: cbsz (bits 0..3), abid (4..8), blgp (8..11).
    pub ctrl: u32,
    /// For branches: index of the target in the program, `u32::MAX` if there is none.
    pub target: u32,
    /// Negate, bit per source (VOP3, SDWA, DPP; VOP3P: neg_lo).
    pub neg: u8,
    /// Absolute value, bit per source (VOP3, SDWA, DPP; VOP3P: neg_hi).
    pub abs: u8,
    /// op_sel: bit per source, bit 3 = destination.
    pub op_sel: u8,
    /// op_sel_hi: bit per source (VOP3P).
    pub op_sel_hi: u8,
    /// Output modifier: 0 none, 1 *2, 2 *4, 3 /2.
    pub omod: u8,
}

impl Inst {
    /// Whether a bit of [`flag`] is set.
    #[inline(always)]
    pub fn has(&self, flag: u16) -> bool {
        self.flags & flag != 0
    }
}

/// The decoded `.text` of a code object.
#[derive(Debug, Default)]
pub struct Program {
    /// Instructions in address order.
    pub insts: Vec<Inst>,
    /// Byte offset in `.text` of each instruction.
    pub offsets: Vec<u32>,
    /// For each dword of `.text`: the index of the instruction that starts there, or `u32::MAX`.
    pub index_of_dword: Vec<u32>,
    /// Device address of the loaded `.text`, the base of `s_getpc_b64`.
    pub base: u64,
}
