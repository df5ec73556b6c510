//! Disassembler: instructions as text, in the syntax of LLVM's disassembler.

mod operand;
mod special;

use crate::decode::table::{self, Entry};
use crate::inst::{Format, Inst, LITERAL, NONE, Operand, flag};
use crate::op::Op;
use operand::{immediate, register as registers, source};

/// Name of a register.
pub(crate) fn register(operand: crate::inst::Operand) -> String {
    operand::register(operand, 1)
}

/// Text of an instruction at byte `offset` of its section, without comment or label.
///
/// Branch targets are printed as they are encoded, so the text does not depend on `offset`.
pub fn text(inst: &Inst, offset: u64) -> String {
    let _ = offset;
    let Some(entry) = table::of(inst) else {
        return format!(".long 0x{:08x}", inst.literal);
    };
    let mut out = Text {
        out: String::with_capacity(64),
        operands: 0,
    };
    out.word(inst.op.mnemonic());
    out.word(suffix(inst, entry));
    match inst.format {
        Format::Sop2 | Format::Sop1 | Format::Sopc => salu(&mut out, inst, entry),
        Format::Sopk => sopk(&mut out, inst, entry),
        Format::Sopp => sopp(&mut out, inst),
        Format::Smem => smem(&mut out, inst, entry),
        Format::Vop1 | Format::Vop2 | Format::Vopc | Format::Vop3 => valu(&mut out, inst, entry),
        Format::Vop3p => vop3p(&mut out, inst, entry),
        Format::Mai => mai(&mut out, inst, entry),
        Format::Ds => ds(&mut out, inst, entry),
        Format::Flat | Format::Global | Format::Scratch => flat(&mut out, inst, entry),
        Format::Mubuf | Format::Mtbuf => buffer(&mut out, inst, entry),
        Format::Invalid => {}
    }
    out.out
}

/// A line under construction: mnemonic, operands between commas, then words.
struct Text {
    out: String,
    operands: usize,
}

impl Text {
    fn word(&mut self, word: &str) {
        self.out.push_str(word);
    }

    /// Adds an operand after the comma that it needs.
    fn operand(&mut self, operand: impl AsRef<str>) {
        self.out
            .push_str(if self.operands == 0 { " " } else { ", " });
        self.out.push_str(operand.as_ref());
        self.operands += 1;
    }

    /// Adds a modifier after a blank.
    fn modifier(&mut self, modifier: impl AsRef<str>) {
        self.out.push(' ');
        self.out.push_str(modifier.as_ref());
    }

    fn modifier_if(&mut self, condition: bool, modifier: &str) {
        if condition {
            self.modifier(modifier);
        }
    }
}

fn suffix(inst: &Inst, entry: &Entry) -> &'static str {
    match inst.format {
        _ if inst.has(flag::SDWA) => "_sdwa",
        _ if inst.has(flag::DPP) => "_dpp",
        Format::Vop1 | Format::Vop2 | Format::Vopc if entry.flags & table::SUFFIX != 0 => "_e32",
        Format::Vop3 if entry.flags & table::SUFFIX != 0 => "_e64",
        _ => "",
    }
}

fn salu(out: &mut Text, inst: &Inst, entry: &Entry) {
    if inst.sdst != NONE {
        out.operand(registers(inst.sdst, entry.width(0)));
    }
    for i in 0..2 {
        if inst.src[i] != NONE {
            out.operand(source(inst, inst.src[i], entry.kinds[i + 1]));
        }
    }
    if inst.op == Op::S_SET_GPR_IDX_ON {
        out.operand(special::gpr_idx(inst.imm as u32, 8));
    }
}

fn sopk(out: &mut Text, inst: &Inst, entry: &Entry) {
    let constant = inst.imm as u32 & 0xffff;
    match inst.op {
        Op::S_SETREG_B32 | Op::S_SETREG_IMM32_B32 => {
            out.operand(special::hwreg(constant));
            if inst.src[0] == LITERAL {
                out.operand(format!("0x{:x}", inst.literal));
            } else {
                out.operand(registers(inst.src[0], 1));
            }
        }
        Op::S_GETREG_B32 => {
            out.operand(registers(inst.sdst, 1));
            out.operand(special::hwreg(constant));
        }
        op => {
            out.operand(registers(inst.sdst, entry.width(0)));
            if matches!(op, Op::S_CALL_B64 | Op::S_CBRANCH_I_FORK) {
                out.operand(constant.to_string());
            } else {
                out.operand(format!("0x{constant:x}"));
            }
        }
    }
}

fn sopp(out: &mut Text, inst: &Inst) {
    let constant = inst.imm as u32 & 0xffff;
    match inst.op {
        Op::S_NOP
        | Op::S_SETKILL
        | Op::S_SETHALT
        | Op::S_SLEEP
        | Op::S_SETPRIO
        | Op::S_TRAP
        | Op::S_INCPERFLEVEL
        | Op::S_DECPERFLEVEL => out.operand(special::small_or_hex(constant)),
        Op::S_WAITCNT => out.operand(special::waitcnt(constant)),
        Op::S_SENDMSG | Op::S_SENDMSGHALT => out.operand(special::sendmsg(constant)),
        Op::S_SET_GPR_IDX_MODE => out.operand(special::gpr_idx(constant, 16)),
        Op::S_ENDPGM if constant == 0 => {}
        op if op == Op::S_ENDPGM || op.mnemonic().contains("branch") => {
            out.operand(constant.to_string());
        }
        _ => {}
    }
}

fn smem(out: &mut Text, inst: &Inst, entry: &Entry) {
    match inst.op {
        Op::S_ATC_PROBE | Op::S_ATC_PROBE_BUFFER => out.operand(special::small_or_plain(inst.ctrl)),
        _ if inst.sdst != NONE => out.operand(registers(inst.sdst, entry.width(0))),
        _ => {}
    }
    if entry.width(1) == 0 {
        return;
    }
    out.operand(registers(inst.src[0], entry.width(1)));
    let hex = if inst.imm < 0 {
        format!("-0x{:x}", inst.imm.unsigned_abs())
    } else {
        format!("0x{:x}", inst.imm)
    };
    if inst.has(flag::SMEM_SOFFSET) {
        out.operand(registers(inst.src[1], 1));
        if inst.has(flag::SMEM_IMM) {
            out.modifier(format!("offset:{hex}"));
        }
    } else {
        out.operand(hex);
    }
    let probe = matches!(inst.op, Op::S_ATC_PROBE | Op::S_ATC_PROBE_BUFFER);
    let discard = matches!(inst.op, Op::S_DCACHE_DISCARD | Op::S_DCACHE_DISCARD_X2);
    out.modifier_if(inst.has(flag::SC0) && !probe && !discard, "glc");
}

/// A vector source with its input modifiers.
fn modified(inst: &Inst, i: usize, entry: &Entry) -> String {
    let kind = if inst.has(flag::SDWA) {
        entry.kinds[i + 1] & table::KIND_CLASS | 1
    } else {
        entry.kinds[i + 1]
    };
    let mut text = source(inst, inst.src[i], kind);
    let sext = match inst.format {
        _ if inst.has(flag::SDWA) => inst.ctrl >> (19 + 8 * i) & 1 != 0,
        _ => inst.op_sel_hi >> i & 1 != 0,
    };
    if sext {
        text = format!("sext({text})");
    }
    if inst.abs >> i & 1 != 0 {
        text = format!("|{text}|");
    }
    if inst.neg >> i & 1 != 0 {
        let constant = matches!(inst.src[i], 128..=208 | 240..=248);
        if constant && inst.abs >> i & 1 == 0 {
            text = format!("neg({text})");
        } else {
            text.insert(0, '-');
        }
    }
    text
}

fn valu(out: &mut Text, inst: &Inst, entry: &Entry) {
    if inst.vdst != NONE {
        out.operand(registers(inst.vdst, entry.width(0)));
    }
    if inst.sdst != NONE {
        let width = if inst.vdst == NONE { entry.width(0) } else { 2 };
        out.operand(registers(inst.sdst, width));
    }
    let sources = if inst.format == Format::Vop1 { 1 } else { 3 };
    for i in 0..sources {
        if inst.src[i] == NONE {
            continue;
        }
        let implied = i == 2 && matches!(inst.format, Format::Vop2) && entry.width(3) == 0;
        if inst.src[i] == LITERAL && entry.kinds.get(i + 1).is_none_or(|&k| k == 0)
            || matches!(inst.op, Op::V_FMAMK_F32 | Op::V_MADMK_F16) && i == 1
        {
            out.operand(format!("0x{:x}", inst.literal));
        } else if implied && inst.src[2] < crate::inst::VGPR0 {
            out.operand(registers(inst.src[2], 2));
        } else if implied {
            out.operand(registers(inst.src[2], 1));
        } else {
            out.operand(modified(inst, i, entry));
        }
    }
    if inst.op_sel != 0 {
        let stochastic = matches!(inst.op, Op::V_CVT_SR_FP8_F32 | Op::V_CVT_SR_BF8_F32);
        let count = if inst.src[2] == NONE && !stochastic {
            2
        } else {
            3
        };
        let mut list: Vec<u8> = (0..count).map(|i| inst.op_sel >> i & 1).collect();
        list.push(inst.op_sel >> 3);
        out.modifier(bit_list("op_sel", list));
    }
    out.modifier_if(inst.has(flag::CLAMP), "clamp");
    match inst.omod {
        1 => out.modifier("mul:2"),
        2 => out.modifier("mul:4"),
        3 => out.modifier("div:2"),
        _ => {}
    }
    if inst.has(flag::SDWA) {
        special::sdwa(out, inst, entry);
    }
    if inst.has(flag::DPP) {
        special::dpp(out, inst.ctrl);
    }
}

fn bit_list(name: &str, bits: impl IntoIterator<Item = u8>) -> String {
    let list: Vec<String> = bits.into_iter().map(|b| b.to_string()).collect();
    format!("{name}:[{}]", list.join(","))
}

fn vop3p(out: &mut Text, inst: &Inst, entry: &Entry) {
    out.operand(registers(inst.vdst, entry.width(0)));
    let mix = matches!(
        inst.op,
        Op::V_FMA_MIX_F32 | Op::V_FMA_MIXLO_F16 | Op::V_FMA_MIXHI_F16
    );
    let count = (0..3).filter(|&i| inst.src[i] != NONE).count();
    for i in 0..count {
        if mix {
            let mut plain = *inst;
            plain.op_sel_hi = 0;
            out.operand(modified(&plain, i, entry));
        } else {
            let packed = matches!(inst.src[i], 128..=248);
            let kind = if packed { 1 } else { entry.kinds[i + 1] };
            out.operand(source(inst, inst.src[i], kind));
        }
    }
    let mut list = |name: &str, bits: u8, default: u8| {
        if bits != default {
            out.modifier(bit_list(name, (0..count).map(|i| bits >> i & 1)));
        }
    };
    let all = (1u8 << count) - 1;
    list("op_sel", inst.op_sel, 0);
    list("op_sel_hi", inst.op_sel_hi, if mix { 0 } else { all });
    if !mix {
        list("neg_lo", inst.neg, 0);
        list("neg_hi", inst.abs, 0);
    }
    out.modifier_if(inst.has(flag::CLAMP), "clamp");
}

fn mai(out: &mut Text, inst: &Inst, entry: &Entry) {
    out.operand(registers(inst.vdst, entry.width(0)));
    for i in 0..3 {
        if inst.src[i] != NONE {
            out.operand(source(inst, inst.src[i], entry.kinds[i + 1]));
        }
    }
    let (cbsz, abid, blgp) = (inst.ctrl & 7, inst.ctrl >> 4 & 15, inst.ctrl >> 8);
    if cbsz != 0 {
        out.modifier(format!("cbsz:{cbsz}"));
    }
    if abid != 0 {
        out.modifier(format!("abid:{abid}"));
    }
    if blgp != 0 && inst.op.mnemonic().ends_with("_f64") {
        out.modifier(bit_list("neg", (0..3).map(|i| (blgp >> i & 1) as u8)));
    } else if blgp != 0 {
        out.modifier(format!("blgp:{blgp}"));
    }
}

fn ds(out: &mut Text, inst: &Inst, entry: &Entry) {
    for (i, operand) in [inst.vdst, inst.src[0], inst.src[1], inst.src[2]]
        .into_iter()
        .enumerate()
    {
        if operand != NONE {
            out.operand(registers(operand, entry.width(i)));
        }
    }
    let offset = inst.imm as u32 & 0xffff;
    if entry.flags & table::DS_TWO != 0 {
        for (i, offset) in [offset & 0xff, offset >> 8].into_iter().enumerate() {
            if offset != 0 {
                out.modifier(format!("offset{i}:{offset}"));
            }
        }
    } else if entry.flags & table::DS_PLAIN == 0 && offset != 0 {
        if inst.op == Op::DS_SWIZZLE_B32 {
            out.modifier(special::swizzle(offset));
        } else {
            out.modifier(format!("offset:{offset}"));
        }
    }
    out.modifier_if(inst.has(flag::GDS), "gds");
}

fn flat(out: &mut Text, inst: &Inst, entry: &Entry) {
    if inst.vdst != NONE {
        out.operand(registers(inst.vdst, entry.width(0)));
    }
    let or_off = |operand: Operand, width: u8| match operand {
        NONE => "off".to_string(),
        operand => registers(operand, width),
    };
    let wide = inst.format == Format::Flat || inst.format == Format::Global && inst.sdst == NONE;
    out.operand(or_off(inst.src[0], if wide { 2 } else { 1 }));
    if inst.src[1] != NONE {
        out.operand(registers(inst.src[1], entry.width(2)));
    }
    match inst.format {
        Format::Global => out.operand(or_off(inst.sdst, 2)),
        Format::Scratch => out.operand(or_off(inst.sdst, 1)),
        _ => {}
    }
    if inst.imm != 0 {
        out.modifier(format!("offset:{}", inst.imm));
    }
    out.modifier_if(inst.has(flag::SC0), "sc0");
    out.modifier_if(inst.has(flag::NT), "nt");
    out.modifier_if(inst.has(flag::SC1), "sc1");
}

fn buffer(out: &mut Text, inst: &Inst, entry: &Entry) {
    if inst.src[1] != NONE {
        if inst.vdst != NONE {
            out.operand(registers(inst.vdst, entry.width(0)));
        }
        let both = inst.has(flag::OFFEN) && inst.has(flag::IDXEN);
        match inst.src[0] {
            NONE if inst.op == Op::BUFFER_STORE_LDS_DWORD => {}
            NONE => out.operand("off"),
            address => out.operand(registers(address, 1 + u8::from(both))),
        }
        out.operand(registers(inst.src[1], 4));
        out.operand(match inst.src[2] {
            code @ (128..=208 | 240..=248) => immediate(code, 1),
            code => registers(code, 1),
        });
        if inst.format == Format::Mtbuf
            && let Some(format) = special::buffer_format(inst.ctrl)
        {
            out.modifier(format);
        }
        out.modifier_if(inst.has(flag::IDXEN), "idxen");
        out.modifier_if(inst.has(flag::OFFEN), "offen");
        if inst.imm != 0 {
            out.modifier(format!("offset:{}", inst.imm));
        }
    }
    let store = inst.op == Op::BUFFER_STORE_LDS_DWORD;
    out.modifier_if(store, "lds");
    out.modifier_if(inst.has(flag::SC0), "sc0");
    out.modifier_if(inst.has(flag::NT), "nt");
    out.modifier_if(inst.has(flag::SC1), "sc1");
    out.modifier_if(inst.has(flag::LDS) && !store, "lds");
}
