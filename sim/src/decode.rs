//! Decodes machine code to instructions.

mod mem;
mod scalar;
pub(crate) mod table;
mod vector;

use crate::inst::{AGPR0, Format, Inst, LITERAL, NONE, Operand, Program, VCC, VGPR0, flag};
use crate::op::Op;
use table::Entry;

/// Bits `lo..lo + count` of a dword.
#[inline(always)]
fn bits(word: u32, lo: u32, count: u32) -> u32 {
    (word >> lo) & ((1u64 << count) - 1) as u32
}

/// The lowest `count` bits, sign-extended.
#[inline(always)]
fn signed(word: u32, count: u32) -> i32 {
    (word << (32 - count)) as i32 >> (32 - count)
}

/// The instruction that represents invalid bytes.
fn invalid(word: u32) -> Inst {
    let mut inst = blank(Op::INVALID, Format::Invalid, 4);
    inst.literal = word;
    inst
}

fn blank(op: Op, format: Format, size: u8) -> Inst {
    Inst {
        op,
        format,
        size,
        flags: 0,
        vdst: NONE,
        sdst: NONE,
        src: [NONE; 3],
        imm: 0,
        literal: 0,
        ctrl: 0,
        target: u32::MAX,
        neg: 0,
        abs: 0,
        op_sel: 0,
        op_sel_hi: 0,
        omod: 0,
    }
}

/// Decodes the instruction at the start of `dwords`; two dwords are enough.
///
/// Bytes that are no gfx942 instruction give [`Op::INVALID`]. Register tuples must be aligned and inside the register
/// file, as the hardware requires. A VOP3 neg or abs bit that an opcode ignores is dropped.
///
/// Operands that the table at [`Inst`] leaves open:
///
/// - `v_fmamk`, `v_madmk`: constant in `src[1]`; `v_fmaak`, `v_madak`: in `src[2]` (both [`LITERAL`]).
/// - SOPK: the register is both `sdst` and `src[0]`.
/// - `v_swap_b32` exchanges `vdst` and `src[0]`.
/// - MTBUF: data format (4 bits) and above it the number format (3 bits) in `ctrl`.
/// - VOP3 sign-extension bits, which have no effect, in `op_sel_hi`.
/// - `s_setreg_imm32_b32`: [`LITERAL`] in `src[0]`.
pub fn decode(dwords: &[u32]) -> Inst {
    let Some(&w0) = dwords.first() else {
        return invalid(0);
    };
    one(w0, dwords.get(1).copied()).unwrap_or_else(|| invalid(w0))
}

fn one(w0: u32, w1: Option<u32>) -> Option<Inst> {
    match w0 >> 26 {
        0..=0x1f => match w0 >> 25 {
            0x3f => vop1(w0, w1),
            0x3e => vopc(w0, w1),
            _ => vop2(w0, w1),
        },
        0x20..=0x2f => match w0 >> 23 {
            0x17d => sop1(w0, w1),
            0x17e => sopc(w0, w1),
            0x17f => sopp(w0),
            _ if w0 >> 28 == 0xb => sopk(w0, w1),
            _ => sop2(w0, w1),
        },
        0x30 => smem(w0, w1?),
        0x34 if w0 >> 23 == 0x1a7 => vop3p(w0, w1?),
        0x34 => vop3(w0, w1?),
        0x36 => ds(w0, w1?),
        0x37 => flat(w0, w1?),
        0x38 => mubuf(w0, w1?),
        0x3a => mtbuf(w0, w1?),
        _ => None,
    }
}

/// Every opcode of gfx942: format, number in that format, instruction. VOP1, VOP2 and VOPC instructions appear a second
/// time as VOP3, their e64 encoding.
pub fn opcodes() -> impl Iterator<Item = (Format, u16, Op)> {
    table::all().map(|(format, entry)| (format, entry.code, entry.op))
}

fn find(format: Format, code: u32) -> Option<&'static Entry> {
    table::find(format, code)
}

/// A scalar register of `width` dwords.
fn sreg(code: u32, width: u8) -> Option<Operand> {
    let align = match width {
        0 | 1 => 1,
        2 => 2,
        _ => 4,
    };
    let end = code + u32::from(width);
    let ok = match code {
        0..=101 => {
            let start = code & !(align - 1);
            return (start + u32::from(width) <= if width < 4 { 102 } else { 106 })
                .then_some(start as Operand);
        }
        102..=107 | 126..=127 => width == 1 || width == 2 && code.is_multiple_of(2),
        108..=123 => {
            let start = code - (code - 108) % align;
            return (start + u32::from(width) <= 124).then_some(start as Operand);
        }
        124 => width == 1,
        _ => false,
    };
    (ok && end <= 128).then_some(code as Operand)
}

fn is_constant(code: u32) -> bool {
    matches!(code, 128..=208 | 240..=248)
}

/// A scalar source: register, inline constant, special value, or the literal.
fn ssrc(code: u32, width: u8) -> Option<Operand> {
    match code {
        0..=127 => sreg(code, width),
        128..=208 | 235..=248 | 251..=253 => Some(code as Operand),
        LIT => Some(LITERAL),
        _ => None,
    }
}

const LIT: u32 = LITERAL as u32;

fn vgpr(number: u32, width: u8) -> Option<Operand> {
    (number + u32::from(width) <= 256).then_some(VGPR0 + number as Operand)
}

fn vector_or_acc(number: u32, width: u8, acc: bool) -> Option<Operand> {
    vgpr(number, width).map(|r| if acc { r + (AGPR0 - VGPR0) } else { r })
}

/// A 9-bit vector source.
fn vsrc(code: u32, kind: u8) -> Option<Operand> {
    let width = kind & table::KIND_WIDTH;
    match code {
        256..=511 => vgpr(code - 256, width),
        _ if kind & table::KIND_CLASS == table::CLASS_REGISTER => None,
        _ => ssrc(code, width),
    }
}

/// Takes the literal that follows if any source asks for it.
fn take_literal(inst: &mut Inst, w1: Option<u32>) -> Option<()> {
    if inst.src.contains(&LITERAL) {
        inst.literal = w1?;
        inst.flags |= flag::LITERAL;
        inst.size = 8;
    }
    Some(())
}

fn sop2(w0: u32, w1: Option<u32>) -> Option<Inst> {
    let entry = find(Format::Sop2, bits(w0, 23, 7))?;
    let mut inst = blank(entry.op, Format::Sop2, 4);
    if entry.width(0) != 0 {
        inst.sdst = sreg(bits(w0, 16, 7), entry.width(0))?;
    }
    inst.src[0] = ssrc(bits(w0, 0, 8), entry.width(1))?;
    inst.src[1] = ssrc(bits(w0, 8, 8), entry.width(2))?;
    take_literal(&mut inst, w1)?;
    Some(inst)
}

fn sop1(w0: u32, w1: Option<u32>) -> Option<Inst> {
    let entry = find(Format::Sop1, bits(w0, 8, 8))?;
    let mut inst = blank(entry.op, Format::Sop1, 4);
    if entry.width(0) != 0 {
        inst.sdst = sreg(bits(w0, 16, 7), entry.width(0))?;
    }
    if entry.width(1) != 0 {
        let code = bits(w0, 0, 8);
        let register = matches!(
            entry.op,
            Op::S_SETPC_B64
                | Op::S_RFE_B64
                | Op::S_MOVRELS_B32
                | Op::S_MOVRELS_B64
                | Op::S_CBRANCH_JOIN
        );
        if register && (is_constant(code) || code == LIT) {
            return None;
        }
        inst.src[0] = ssrc(code, entry.width(1))?;
    }
    take_literal(&mut inst, w1)?;
    Some(inst)
}

fn sopc(w0: u32, w1: Option<u32>) -> Option<Inst> {
    let entry = find(Format::Sopc, bits(w0, 16, 7))?;
    let mut inst = blank(entry.op, Format::Sopc, 4);
    inst.src[0] = ssrc(bits(w0, 0, 8), entry.width(1))?;
    if entry.op == Op::S_SET_GPR_IDX_ON {
        inst.imm = bits(w0, 8, 8) as i32;
    } else {
        inst.src[1] = ssrc(bits(w0, 8, 8), entry.width(2))?;
    }
    take_literal(&mut inst, w1)?;
    Some(inst)
}

fn sopk(w0: u32, w1: Option<u32>) -> Option<Inst> {
    let entry = find(Format::Sopk, bits(w0, 23, 5))?;
    let mut inst = blank(entry.op, Format::Sopk, 4);
    inst.imm = signed(w0, 16);
    if entry.op == Op::S_SETREG_IMM32_B32 {
        inst.src[0] = LITERAL;
    } else {
        inst.sdst = sreg(bits(w0, 16, 7), entry.width(0))?;
        inst.src[0] = inst.sdst;
    }
    take_literal(&mut inst, w1)?;
    Some(inst)
}

fn sopp(w0: u32) -> Option<Inst> {
    let entry = find(Format::Sopp, bits(w0, 16, 7))?;
    let mut inst = blank(entry.op, Format::Sopp, 4);
    inst.imm = signed(w0, 16);
    let plain = matches!(
        entry.op,
        Op::S_WAKEUP
            | Op::S_BARRIER
            | Op::S_ICACHE_INV
            | Op::S_TTRACEDATA
            | Op::S_ENDPGM_SAVED
            | Op::S_SET_GPR_IDX_OFF
            | Op::S_ENDPGM_ORDERED_PS_DONE
    );
    (!plain || inst.imm == 0).then_some(inst)
}

fn smem(w0: u32, w1: u32) -> Option<Inst> {
    let entry = find(Format::Smem, bits(w0, 18, 8))?;
    let mut inst = blank(entry.op, Format::Smem, 8);
    let has_imm = w0 >> 17 & 1 != 0;
    let has_soffset = w0 >> 14 & 1 != 0;
    if w0 >> 16 & 1 != 0 {
        inst.flags |= flag::SC0;
    }
    let data = bits(w0, 6, 7);
    match entry.op {
        Op::S_ATC_PROBE | Op::S_ATC_PROBE_BUFFER => inst.ctrl = data,
        _ if entry.width(0) != 0 => inst.sdst = sreg(data, entry.width(0))?,
        _ => {}
    }
    if entry.width(1) == 0 {
        return (!has_imm).then_some(inst);
    }
    inst.src[0] = sreg(bits(w0, 0, 6) << 1, entry.width(1))?;
    if has_imm {
        inst.flags |= flag::SMEM_IMM;
        inst.imm = signed(w1, 21);
    }
    if has_soffset {
        inst.flags |= flag::SMEM_SOFFSET;
        inst.src[1] = sreg(bits(w1, 25, 7), 1)?;
    } else if !has_imm {
        inst.flags |= flag::SMEM_SOFFSET;
        inst.src[1] = sreg(bits(w1, 0, 7), 1)?;
    }
    Some(inst)
}

/// Fills the carry and condition operands that e32, SDWA and DPP imply.
fn implied(inst: &mut Inst) {
    match inst.op {
        Op::V_CNDMASK_B32 => inst.src[2] = VCC,
        Op::V_ADD_CO_U32 | Op::V_SUB_CO_U32 | Op::V_SUBREV_CO_U32 => inst.sdst = VCC,
        Op::V_ADDC_CO_U32 | Op::V_SUBB_CO_U32 | Op::V_SUBBREV_CO_U32 => {
            inst.sdst = VCC;
            inst.src[2] = VCC;
        }
        _ => {}
    }
}

/// Source 0 of VOP1, VOP2 and VOPC: plain, or the SDWA or DPP form with its second dword.
fn source0(inst: &mut Inst, entry: &Entry, w0: u32, w1: Option<u32>) -> Option<()> {
    let code = bits(w0, 0, 9);
    match code {
        249 => sdwa(inst, entry, bits(w0, 9, 8), w1?),
        250 => dpp(inst, entry, w1?),
        _ => {
            inst.src[0] = vsrc(code, entry.kinds[1])?;
            Some(())
        }
    }
}

fn sdwa(inst: &mut Inst, entry: &Entry, vsrc1: u32, ctrl: u32) -> Option<()> {
    if entry.sdwa & table::X_EXISTS == 0 {
        return None;
    }
    inst.size = 8;
    inst.flags |= flag::SDWA;
    inst.ctrl = ctrl;
    let source = |number: u32, scalar: bool| {
        if scalar {
            ssrc(number, 1).filter(|&s| s < 128 || s != LITERAL && s > 127)
        } else {
            vgpr(number, 1)
        }
    };
    inst.src[0] = source(bits(ctrl, 0, 8), ctrl >> 23 & 1 != 0)?;
    modifiers(
        inst,
        0,
        bits(ctrl, 19, 3),
        entry.sdwa & table::X_FLOAT0 != 0,
    )?;
    if bits(ctrl, 16, 3) == 7 || inst.format == Format::Vop1 && ctrl & 0xbf00_0000 != 0 {
        return None;
    }
    if inst.format == Format::Vopc {
        inst.sdst = if ctrl >> 15 & 1 != 0 {
            sreg(bits(ctrl, 8, 7), 2)?
        } else {
            VCC
        };
    } else {
        if ctrl >> 13 & 1 != 0 {
            inst.flags |= flag::CLAMP;
        }
        inst.omod = bits(ctrl, 14, 2) as u8;
        if inst.omod != 0 && entry.sdwa & table::X_MORE == 0 {
            return None;
        }
        let whole = entry.sdwa & table::X_SPECIAL != 0;
        if bits(ctrl, 8, 3) == 7 || whole && bits(ctrl, 8, 3) != 6 {
            return None;
        }
    }
    if inst.format != Format::Vop1 {
        inst.src[1] = source(vsrc1, ctrl >> 31 & 1 != 0)?;
        modifiers(
            inst,
            1,
            bits(ctrl, 27, 3),
            entry.sdwa & table::X_FLOAT1 != 0,
        )?;
        if bits(ctrl, 24, 3) == 7 {
            return None;
        }
    }
    Some(())
}

/// The SDWA bits sext, neg, abs of one source.
fn modifiers(inst: &mut Inst, source: u32, sext_neg_abs: u32, float: bool) -> Option<()> {
    let allowed = if float { 6 } else { 1 };
    if sext_neg_abs & !allowed != 0 {
        return None;
    }
    inst.neg |= ((sext_neg_abs >> 1 & 1) << source) as u8;
    inst.abs |= ((sext_neg_abs >> 2) << source) as u8;
    Some(())
}

fn dpp(inst: &mut Inst, entry: &Entry, ctrl: u32) -> Option<()> {
    if entry.dpp & table::X_EXISTS == 0 {
        return None;
    }
    inst.size = 8;
    inst.flags |= flag::DPP;
    inst.ctrl = ctrl;
    let selector = bits(ctrl, 8, 9);
    let known = matches!(
        selector,
        0..=0xff | 0x101..=0x10f | 0x111..=0x11f | 0x121..=0x12f | 0x130 | 0x134 | 0x138 | 0x13c
            | 0x140..=0x143 | 0x150..=0x15f
    );
    if !known || entry.dpp & table::X_SPECIAL != 0 && selector < 0x150 {
        return None;
    }
    inst.src[0] = vgpr(bits(ctrl, 0, 8), entry.width(1))?;
    let used = if inst.format == Format::Vop1 { 1 } else { 2 };
    for source in 0..2 {
        let neg = ctrl >> (20 + 2 * source) & 1;
        let abs = ctrl >> (21 + 2 * source) & 1;
        let float = entry.dpp & (table::X_FLOAT0 << source) != 0;
        if float {
            inst.neg |= (neg << source) as u8;
            inst.abs |= (abs << source) as u8;
        } else if source == 1 && entry.dpp & table::X_SEXT1 != 0 {
            inst.op_sel_hi |= (neg << 1) as u8;
        } else if (neg | abs) != 0 && (entry.dpp & table::X_MORE == 0 || source >= used) {
            return None;
        }
    }
    Some(())
}

fn vop1(w0: u32, w1: Option<u32>) -> Option<Inst> {
    let entry = find(Format::Vop1, bits(w0, 9, 8))?;
    let mut inst = blank(entry.op, Format::Vop1, 4);
    let dst = bits(w0, 17, 8);
    match entry.op {
        Op::V_NOP if matches!(bits(w0, 0, 9), 249 | 250) => return None,
        Op::V_NOP | Op::V_CLREXCP => return (dst == 0).then_some(inst),
        Op::V_READFIRSTLANE_B32 => {
            inst.sdst = sreg(dst, 1)?;
            inst.src[0] = vgpr(bits(w0, 0, 9).checked_sub(256)?, 1)?;
            return Some(inst);
        }
        Op::V_SWAP_B32 => {
            inst.vdst = vgpr(dst, 1)?;
            inst.src[0] = vgpr(bits(w0, 0, 9).checked_sub(256)?, 1)?;
            return Some(inst);
        }
        Op::V_ACCVGPR_MOV_B32 => {
            inst.vdst = AGPR0 + dst as Operand;
            inst.src[0] = AGPR0 + bits(w0, 0, 9).checked_sub(256)? as Operand;
            return Some(inst);
        }
        _ => inst.vdst = vgpr(dst, entry.width(0))?,
    }
    source0(&mut inst, entry, w0, w1)?;
    take_literal(&mut inst, w1)?;
    Some(inst)
}

fn vop2(w0: u32, w1: Option<u32>) -> Option<Inst> {
    let entry = find(Format::Vop2, bits(w0, 25, 6))?;
    let mut inst = blank(entry.op, Format::Vop2, 4);
    inst.vdst = vgpr(bits(w0, 17, 8), entry.width(0))?;
    match entry.op {
        Op::V_FMAMK_F32 | Op::V_MADMK_F16 => inst.src[1] = LITERAL,
        Op::V_FMAAK_F32 | Op::V_MADAK_F16 => inst.src[2] = LITERAL,
        _ => {}
    }
    source0(&mut inst, entry, w0, w1)?;
    let register = vgpr(bits(w0, 9, 8), entry.width(2));
    if inst.src[1] == LITERAL {
        inst.src[2] = register?;
    } else if !inst.has(flag::SDWA) {
        inst.src[1] = register?;
    }
    implied(&mut inst);
    if !inst.has(flag::SDWA | flag::DPP) {
        take_literal(&mut inst, w1)?;
    }
    Some(inst)
}

fn vopc(w0: u32, w1: Option<u32>) -> Option<Inst> {
    let entry = find(Format::Vopc, bits(w0, 17, 8))?;
    let mut inst = blank(entry.op, Format::Vopc, 4);
    inst.sdst = VCC;
    source0(&mut inst, entry, w0, w1)?;
    if !inst.has(flag::SDWA) {
        inst.src[1] = vgpr(bits(w0, 9, 8), entry.width(2))?;
        take_literal(&mut inst, w1)?;
    }
    Some(inst)
}

fn vop3(w0: u32, w1: u32) -> Option<Inst> {
    let entry = find(Format::Vop3, bits(w0, 16, 10))?;
    let mut inst = blank(entry.op, Format::Vop3, 8);
    if entry.code < 0x1c0 {
        inst.flags |= flag::E64;
    }
    let dst = bits(w0, 0, 8);
    if entry.flags & table::SCALAR_DST != 0 {
        inst.sdst = sreg(dst, entry.width(0))?;
    } else if entry.width(0) != 0 {
        inst.vdst = vgpr(dst, entry.width(0))?;
    } else if dst != 0 {
        return None;
    }
    for i in 0..3 {
        let code = bits(w1, 9 * i as u32, 9);
        let kind = entry.kinds[i + 1];
        let mask = i == 2 && kind == table::CLASS_REGISTER | 2;
        inst.src[i] = match kind {
            0 if code == 0 => NONE,
            0 => return None,
            _ if mask => sreg(code, 2)?,
            _ if code == LIT => return None,
            _ => vsrc(code, kind)?,
        };
    }
    let neg = bits(w1, 29, 3);
    let abs = bits(w0, 8, 3);
    let mods = entry.mods;
    if entry.flags & table::SDST != 0 {
        inst.sdst = sreg(bits(w0, 8, 7), 2)?;
    } else {
        if abs & !(mods >> table::M_ABS & 7) != 0 {
            return None;
        }
        inst.abs = (abs & (mods >> table::M_ABS_REAL)) as u8;
        if mods & table::M_OP_SEL != 0 {
            inst.op_sel = bits(w0, 11, 4) as u8;
            let stochastic = matches!(entry.op, Op::V_CVT_SR_FP8_F32 | Op::V_CVT_SR_BF8_F32);
            if entry.width(3) == 0 && inst.op_sel & 4 != 0 && !stochastic {
                return None;
            }
        }
    }
    if neg & !(mods >> table::M_NEG & 7) != 0 {
        return None;
    }
    inst.neg = (neg & (mods >> table::M_NEG_REAL)) as u8;
    inst.op_sel_hi = (neg & (mods >> table::M_SEXT) & 7) as u8;
    if w0 >> 15 & 1 != 0 {
        if mods & table::M_CLAMP == 0 {
            return None;
        }
        inst.flags |= flag::CLAMP;
    }
    inst.omod = bits(w1, 27, 2) as u8;
    if inst.omod != 0 && mods & table::M_OMOD == 0 {
        return None;
    }
    Some(inst)
}

fn vop3p(w0: u32, w1: u32) -> Option<Inst> {
    let entry = find(Format::Vop3p, bits(w0, 16, 7))?;
    if entry.flags & table::MAI != 0 {
        return mai(entry, w0, w1);
    }
    let mut inst = blank(entry.op, Format::Vop3p, 8);
    inst.vdst = vgpr(bits(w0, 0, 8), entry.width(0))?;
    for i in 0..3 {
        let code = bits(w1, 9 * i as u32, 9);
        inst.src[i] = match entry.kinds[i + 1] {
            0 if code == 0 => NONE,
            0 => return None,
            _ if code == LIT => return None,
            kind => vsrc(code, kind)?,
        };
    }
    inst.neg = bits(w1, 29, 3) as u8;
    inst.abs = bits(w0, 8, 3) as u8;
    inst.op_sel = bits(w0, 11, 3) as u8;
    inst.op_sel_hi = (bits(w1, 27, 2) | bits(w0, 14, 1) << 2) as u8;
    if entry.width(3) == 0 {
        if (inst.neg | inst.abs | inst.op_sel) & 4 != 0 {
            return None;
        }
        inst.op_sel_hi &= 3;
    }
    if w0 >> 15 & 1 != 0 {
        inst.flags |= flag::CLAMP;
    }
    Some(inst)
}

fn mai(entry: &Entry, w0: u32, w1: u32) -> Option<Inst> {
    let mut inst = blank(entry.op, Format::Mai, 8);
    let dst = bits(w0, 0, 8);
    let code = |i: u32| bits(w1, 9 * i, 9);
    match entry.op {
        Op::V_ACCVGPR_READ_B32 => {
            if w0 & 0x3f00 != 0 || w1 >> 29 != 0 || code(1) != 0 || code(2) != 0 {
                return None;
            }
            inst.vdst = vgpr(dst, 1)?;
            inst.src[0] = AGPR0 + code(0).checked_sub(256)? as Operand;
            return Some(inst);
        }
        Op::V_ACCVGPR_WRITE_B32 => {
            if w0 & 0x3f00 != 0 || w1 >> 29 != 0 || code(1) != 0 || code(2) != 0 || code(0) == LIT {
                return None;
            }
            inst.vdst = AGPR0 + dst as Operand;
            inst.src[0] = vsrc(code(0), 1)?;
            return Some(inst);
        }
        _ => {}
    }
    let acc_cd = w0 >> 15 & 1 != 0;
    inst.vdst = vector_or_acc(dst, entry.width(0), acc_cd)?;
    for i in 0..2u32 {
        let number = code(i).checked_sub(256)?;
        let acc = w1 >> (27 + i) & 1 != 0;
        inst.src[i as usize] = vector_or_acc(number, entry.width(i as usize + 1), acc)?;
    }
    let sparse = entry.op.mnemonic().starts_with("v_smfmac");
    inst.src[2] = match code(2) {
        number @ 256.. => vector_or_acc(number - 256, entry.width(3), acc_cd && !sparse)?,
        constant if is_constant(constant) && !sparse => constant as Operand,
        _ => return None,
    };
    let blgp = bits(w1, 29, 3);
    if sparse && blgp != 0 {
        return None;
    }
    inst.ctrl = bits(w0, 8, 3) | bits(w0, 11, 4) << 4 | blgp << 8;
    Some(inst)
}

fn ds(w0: u32, w1: u32) -> Option<Inst> {
    let entry = find(Format::Ds, bits(w0, 17, 8))?;
    let mut inst = blank(entry.op, Format::Ds, 8);
    let acc = w0 >> 25 & 1 != 0;
    inst.imm = bits(w0, 0, 16) as i32;
    if entry.op == Op::DS_NOP && inst.imm != 0 {
        return None;
    }
    let operand = |number: u32, i: usize, acc: bool| match entry.width(i) {
        0 => (number == 0).then_some(NONE),
        width => vector_or_acc(number, width, acc),
    };
    inst.vdst = operand(bits(w1, 24, 8), 0, acc)?;
    let gws = entry.flags & table::DS_GWS != 0;
    inst.src[0] = operand(bits(w1, 0, 8), 1, acc && gws)?;
    if gws && acc && inst.src[0] == NONE {
        return None;
    }
    inst.src[1] = operand(bits(w1, 8, 8), 2, acc)?;
    inst.src[2] = operand(bits(w1, 16, 8), 3, acc)?;
    if w0 >> 16 & 1 != 0 {
        match entry.op {
            Op::DS_NOP | Op::DS_PERMUTE_B32 | Op::DS_BPERMUTE_B32 => return None,
            _ if entry.flags & table::DS_GWS != 0 => inst.flags |= flag::GDS,
            _ => {}
        }
    } else if entry.flags & table::DS_GWS != 0 {
        return None;
    }
    Some(inst)
}

fn flat(w0: u32, w1: u32) -> Option<Inst> {
    let format = match bits(w0, 14, 2) {
        0 => Format::Flat,
        1 => Format::Scratch,
        2 => Format::Global,
        _ => return None,
    };
    let entry = find(format, bits(w0, 18, 7))?;
    let mut inst = blank(entry.op, format, 8);
    for (bit, flag) in [(16, flag::SC0), (17, flag::NT), (25, flag::SC1)] {
        if w0 >> bit & 1 != 0 {
            inst.flags |= flag;
        }
    }
    let bit13 = w0 >> 13 & 1 != 0;
    let saddr = bits(w1, 16, 7);
    let addr = bits(w1, 0, 8);
    inst.imm = signed(w0, 13);
    match format {
        Format::Scratch => {
            if bit13 {
                inst.src[0] = vgpr(addr, 1)?;
            }
            if saddr != 0x7f {
                inst.sdst = sreg(saddr, 1)?;
            }
        }
        _ if bit13 => return None,
        Format::Global if saddr != 0x7f => {
            inst.sdst = sreg(saddr, 2)?;
            inst.src[0] = vgpr(addr, 1)?;
        }
        Format::Global => inst.src[0] = vgpr(addr, 2)?,
        _ if saddr != 0 => return None,
        _ => {
            inst.imm = bits(w0, 0, 13) as i32;
            inst.src[0] = vgpr(addr, 2)?;
        }
    }
    let acc = w1 >> 23 & 1 != 0;
    let atomic = entry.op.mnemonic().contains("_atomic_");
    let operand = |number: u32, width: u8| match width {
        0 => Some(NONE),
        _ => vector_or_acc(number, width, acc),
    };
    inst.src[1] = operand(bits(w1, 8, 8), entry.width(2))?;
    let returns = !atomic || inst.has(flag::SC0);
    inst.vdst = operand(bits(w1, 24, 8), if returns { entry.width(0) } else { 0 })?;
    if acc && inst.src[1] == NONE && inst.vdst == NONE {
        return None;
    }
    if entry.op.mnemonic().contains("_load_lds_") {
        inst.flags |= flag::LDS;
    }
    Some(inst)
}

/// Fields that MUBUF and MTBUF have in common.
fn buffer(inst: &mut Inst, entry: &Entry, w0: u32, w1: u32) -> Option<()> {
    inst.imm = bits(w0, 0, 12) as i32;
    let offen = w0 >> 12 & 1 != 0;
    let idxen = w0 >> 13 & 1 != 0;
    if offen {
        inst.flags |= flag::OFFEN;
    }
    if idxen {
        inst.flags |= flag::IDXEN;
    }
    if w0 >> 14 & 1 != 0 {
        inst.flags |= flag::SC0;
    }
    let addr = bits(w1, 0, 8);
    match u8::from(offen) + u8::from(idxen) {
        0 => {}
        width => inst.src[0] = vgpr(addr, width)?,
    }
    inst.src[1] = sreg(bits(w1, 16, 5) << 2, 4)?;
    let soffset = bits(w1, 24, 8);
    if soffset == LIT {
        return None;
    }
    inst.src[2] = ssrc(soffset, 1)?;
    if inst.has(flag::LDS) || entry.width(0) == 0 {
        return (w1 >> 23 & 1 == 0).then_some(());
    }
    inst.vdst = vector_or_acc(bits(w1, 8, 8), entry.width(0), w1 >> 23 & 1 != 0)?;
    Some(())
}

fn mubuf(w0: u32, w1: u32) -> Option<Inst> {
    let entry = find(Format::Mubuf, bits(w0, 18, 7))?;
    let mut inst = blank(entry.op, Format::Mubuf, 8);
    for (bit, flag) in [(14, flag::SC0), (15, flag::SC1), (17, flag::NT)] {
        if w0 >> bit & 1 != 0 {
            inst.flags |= flag;
        }
    }
    let lds = w0 >> 16 & 1 != 0;
    match entry.op {
        Op::BUFFER_WBL2 | Op::BUFFER_INV | Op::BUFFER_WBINVL1 | Op::BUFFER_WBINVL1_VOL => {
            let scopes = matches!(entry.op, Op::BUFFER_WBL2 | Op::BUFFER_INV);
            let fixed = if scopes { 0x0001_3000 } else { 0x0001_f000 };
            inst.flags &= !flag::NT;
            return (w0 & fixed == 0 && w1 >> 23 & 1 == 0).then_some(inst);
        }
        Op::BUFFER_STORE_LDS_DWORD if !lds || bits(w0, 12, 2) != 0 => return None,
        Op::BUFFER_STORE_LDS_DWORD => {}
        _ if lds && entry.flags & table::TO_LDS == 0 => return None,
        _ => {}
    }
    if lds {
        inst.flags |= flag::LDS;
    }
    buffer(&mut inst, entry, w0, w1)?;
    Some(inst)
}

fn mtbuf(w0: u32, w1: u32) -> Option<Inst> {
    let entry = find(Format::Mtbuf, bits(w0, 15, 4))?;
    let mut inst = blank(entry.op, Format::Mtbuf, 8);
    if w1 >> 21 & 1 != 0 {
        inst.flags |= flag::SC1;
    }
    if w1 >> 22 & 1 != 0 {
        inst.flags |= flag::NT;
    }
    inst.ctrl = bits(w0, 19, 7);
    buffer(&mut inst, entry, w0, w1)?;
    Some(inst)
}

/// Whether an instruction may continue at [`Inst::target`].
fn is_branch(op: Op) -> bool {
    matches!(
        op,
        Op::S_BRANCH
            | Op::S_CBRANCH_SCC0
            | Op::S_CBRANCH_SCC1
            | Op::S_CBRANCH_VCCZ
            | Op::S_CBRANCH_VCCNZ
            | Op::S_CBRANCH_EXECZ
            | Op::S_CBRANCH_EXECNZ
            | Op::S_CBRANCH_CDBGSYS
            | Op::S_CBRANCH_CDBGUSER
            | Op::S_CBRANCH_CDBGSYS_OR_USER
            | Op::S_CBRANCH_CDBGSYS_AND_USER
            | Op::S_CALL_B64
            | Op::S_CBRANCH_I_FORK
    )
}

/// Decodes a whole `.text` that is loaded at address `base`. Bytes after the last whole dword are dropped.
pub fn program(text: &[u8], base: u64) -> Program {
    let words: Vec<u32> = text
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
        .collect();
    let mut program = Program {
        base,
        index_of_dword: vec![u32::MAX; words.len()],
        ..Program::default()
    };
    let mut at = 0;
    while at < words.len() {
        let inst = decode(&words[at..words.len().min(at + 2)]);
        program.index_of_dword[at] = program.insts.len() as u32;
        program.offsets.push(at as u32 * 4);
        at += usize::from(inst.size / 4);
        program.insts.push(inst);
    }
    for (inst, &offset) in program.insts.iter_mut().zip(&program.offsets) {
        if is_branch(inst.op) {
            let dword = i64::from(offset / 4) + 1 + i64::from(inst.imm);
            inst.target = usize::try_from(dword)
                .ok()
                .and_then(|dword| program.index_of_dword.get(dword).copied())
                .unwrap_or(u32::MAX);
        }
    }
    program
}
