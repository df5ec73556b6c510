//! Registers that each encoding reads and writes.

use super::uses::{Role, SCC, Use};
use crate::decode::table::Entry;
use crate::inst::{EXEC, Format, Inst, LITERAL, M0, NONE, Operand, VCC, VGPR0, flag};
use crate::op::Op::{self, *};

/// The uses of an instruction while they are being collected.
pub(super) struct List {
    pub reads: Vec<Use>,
    pub writes: Vec<Use>,
}

impl List {
    /// Adds a source operand: registers, or the registers that a constant operand stands for.
    fn read(&mut self, operand: Operand, count: u8, role: Role) {
        let (first, count) = match operand {
            NONE | LITERAL => return,
            // vccz, execz, scc.
            251 => (VCC, 2),
            252 => (EXEC, 2),
            SCC => (SCC, 1),
            128..VGPR0 => return,
            _ => (operand, count),
        };
        if count > 0 {
            self.reads.push(Use { first, count, role });
        }
    }

    fn write(&mut self, first: Operand, count: u8) {
        if first != NONE && count > 0 {
            let role = Role::Result;
            self.writes.push(Use { first, count, role });
        }
    }

    fn lanes(&mut self) {
        self.read(EXEC, 2, Role::Lanes);
    }
}

pub(super) fn scalar(list: &mut List, inst: &Inst, entry: &Entry) {
    use Role::*;
    let name = entry.op.mnemonic();
    let op = entry.op;
    // Sources. SOPK reads its destination, if anything.
    let sopk_reads = name.starts_with("s_cmpk")
        || matches!(op, S_ADDK_I32 | S_MULK_I32 | S_CMOVK_I32 | S_SETREG_B32);
    if inst.format != Format::Sopk {
        list.read(inst.src[0], entry.width(1), Source0);
        list.read(inst.src[1], entry.width(2), Source1);
    } else if sopk_reads {
        list.read(inst.sdst, entry.width(0), Source0);
    }
    if matches!(
        op,
        S_CMOV_B32 | S_CMOV_B64 | S_BITSET0_B32 | S_BITSET0_B64 | S_BITSET1_B32 | S_BITSET1_B64
    ) {
        list.read(inst.sdst, entry.width(0), Accumulator);
    }
    if matches!(
        op,
        S_ADDC_U32
            | S_SUBB_U32
            | S_CSELECT_B32
            | S_CSELECT_B64
            | S_CMOV_B32
            | S_CMOV_B64
            | S_CMOVK_I32
            | S_CBRANCH_SCC0
            | S_CBRANCH_SCC1
    ) {
        list.read(SCC, 1, Mask);
    }
    let masks_exec = name.contains("_saveexec_") || name.contains("_wrexec_");
    if masks_exec {
        list.read(EXEC, 2, Source1);
    }
    match op {
        S_CBRANCH_VCCZ | S_CBRANCH_VCCNZ => list.read(VCC, 2, Mask),
        S_CBRANCH_EXECZ | S_CBRANCH_EXECNZ => list.read(EXEC, 2, Mask),
        // STATUS has SCC, EXECZ and VCCZ.
        S_GETREG_B32 if inst.imm & 63 == 2 => {
            list.read(SCC, 1, Source0);
            list.read(EXEC, 2, Source0);
            list.read(VCC, 2, Source0);
        }
        S_MOVRELS_B32 | S_MOVRELS_B64 | S_MOVRELD_B32 | S_MOVRELD_B64 => list.read(M0, 1, Index),
        S_SET_GPR_IDX_ON | S_SET_GPR_IDX_IDX | S_SET_GPR_IDX_MODE => {
            list.read(M0, 1, Kept);
            list.write(M0, 1);
        }
        _ => {}
    }
    // Results.
    let sopk_keeps = name.starts_with("s_cmpk") || op == S_SETREG_B32;
    if !(inst.format == Format::Sopk && sopk_keeps) {
        list.write(inst.sdst, entry.width(0));
    }
    if masks_exec {
        list.write(EXEC, 2);
    }
    if writes_scc(inst.format, op, name) {
        list.write(SCC, 1);
    }
}

fn writes_scc(format: Format, op: Op, name: &str) -> bool {
    match format {
        Format::Sop2 => !matches!(
            op,
            S_MUL_I32
                | S_MUL_HI_U32
                | S_MUL_HI_I32
                | S_BFM_B32
                | S_BFM_B64
                | S_CSELECT_B32
                | S_CSELECT_B64
                | S_PACK_LL_B32_B16
                | S_PACK_LH_B32_B16
                | S_PACK_HH_B32_B16
                | S_CBRANCH_G_FORK
                | S_RFE_RESTORE_B64
        ),
        Format::Sop1 => {
            matches!(
                op,
                S_NOT_B32
                    | S_NOT_B64
                    | S_WQM_B32
                    | S_WQM_B64
                    | S_QUADMASK_B32
                    | S_QUADMASK_B64
                    | S_ABS_I32
            ) || name.starts_with("s_bcnt")
                || name.contains("exec_")
        }
        Format::Sopc => name.starts_with("s_cmp") || name.starts_with("s_bitcmp"),
        Format::Sopk => name.starts_with("s_cmpk") || op == S_ADDK_I32,
        _ => false,
    }
}

pub(super) fn scalar_memory(list: &mut List, inst: &Inst, entry: &Entry) {
    if entry.width(1) > 0 {
        list.read(inst.src[0], entry.width(1), Role::Address);
        if inst.has(flag::SMEM_SOFFSET) {
            list.read(inst.src[1], 1, Role::Address);
        }
    }
    let name = entry.op.mnemonic();
    if name.contains("_load_") || name.starts_with("s_mem") {
        list.write(inst.sdst, entry.width(0));
    } else {
        list.read(inst.sdst, entry.width(0), Role::Data);
    }
}

/// VOP1, VOP2, VOPC, VOP3, VOP3P.
pub(super) fn vector(list: &mut List, inst: &Inst, entry: &Entry) {
    use Role::*;
    const SOURCES: [Role; 3] = [Source0, Source1, Source2];
    let op = entry.op;
    let name = op.mnemonic();
    if matches!(op, V_NOP | V_CLREXCP) {
        return;
    }
    // Packed f32: the halves that op_sel and op_sel_hi name.
    let picks = matches!(
        op,
        V_PK_FMA_F32 | V_PK_MUL_F32 | V_PK_ADD_F32 | V_PK_MOV_B32
    );
    for (n, role) in SOURCES.into_iter().enumerate() {
        let (mut operand, mut width) = (inst.src[n], entry.width(n + 1));
        if operand == NONE {
            continue;
        }
        let mask = n == 2 && reads_mask(op);
        if mask {
            // e32 forms imply VCC.
            list.read(if operand >= VGPR0 { VCC } else { operand }, 2, Mask);
            continue;
        }
        if n == 2 && width == 0 {
            // The register of v_fmaak and v_fmamk.
            width = 1;
        }
        if picks && !(128..VGPR0).contains(&operand) {
            let low = inst.op_sel >> n & 1;
            let high = if op == V_PK_MOV_B32 {
                low
            } else {
                inst.op_sel_hi >> n & 1
            };
            operand += u16::from(low.min(high));
            width = 1 + u8::from(low != high);
        }
        list.read(operand, width, role);
    }
    if op == V_SWAP_B32 {
        list.read(inst.vdst, 1, Source1);
        list.write(inst.src[0], 1);
    }
    if matches!(op, V_DIV_FMAS_F32 | V_DIV_FMAS_F64) {
        list.read(VCC, 2, Mask);
    }
    if accumulates(op) {
        list.read(inst.vdst, entry.width(0), Accumulator);
    }
    if keeps_part(inst, name) {
        list.read(inst.vdst, 1, Kept);
    }
    if !matches!(op, V_READLANE_B32 | V_WRITELANE_B32) {
        list.lanes();
    }

    if inst.vdst != NONE {
        list.write(inst.vdst, entry.width(0));
    }
    let scalar = match op {
        V_READLANE_B32 | V_READFIRSTLANE_B32 => 1,
        _ => 2,
    };
    list.write(inst.sdst, scalar);
    if name.starts_with("v_cmpx") {
        list.write(EXEC, 2);
    }
}

/// Whether source 2 is a mask: a carry, or the selection of `v_cndmask`.
fn reads_mask(op: Op) -> bool {
    matches!(
        op,
        V_CNDMASK_B32 | V_ADDC_CO_U32 | V_SUBB_CO_U32 | V_SUBBREV_CO_U32
    )
}

/// Whether the destination is also an addend.
fn accumulates(op: Op) -> bool {
    matches!(
        op,
        V_FMAC_F32
            | V_FMAC_F64
            | V_MAC_F16
            | V_PK_FMAC_F16
            | V_DOT2C_F32_F16
            | V_DOT2C_I32_I16
            | V_DOT4C_I32_I8
            | V_DOT8C_I32_I4
    )
}

/// Whether a part of the destination is kept.
fn keeps_part(inst: &Inst, name: &str) -> bool {
    if inst.has(flag::SDWA) && inst.format != Format::Vopc {
        let (sel, unused) = (inst.ctrl >> 8 & 7, inst.ctrl >> 11 & 3);
        return sel < 6 && unused == 2;
    }
    matches!(
        inst.op,
        V_ADD_I16
            | V_SUB_I16
            | V_MAD_U16
            | V_MAD_I16
            | V_MIN3_U16
            | V_MAX3_U16
            | V_MED3_U16
            | V_MIN3_I16
            | V_MAX3_I16
            | V_MED3_I16
            | V_FMA_F16
            | V_MAD_F16
            | V_DIV_FIXUP_F16
            | V_MIN3_F16
            | V_MAX3_F16
            | V_MED3_F16
            | V_FMA_MIXLO_F16
            | V_FMA_MIXHI_F16
            | V_CVT_PKACCUM_U8_F32
    ) || name.starts_with("v_cvt_sr_")
        || matches!(inst.op, V_CVT_PK_FP8_F32 | V_CVT_PK_BF8_F32)
}

/// MFMA and moves between the parts of the file.
pub(super) fn matrix(list: &mut List, inst: &Inst, entry: &Entry) {
    use Role::*;
    list.read(inst.src[0], entry.width(1), Source0);
    list.read(inst.src[1], entry.width(2), Source1);
    list.read(inst.src[2], entry.width(3), Source2);
    match entry.op {
        V_ACCVGPR_READ_B32 | V_ACCVGPR_WRITE_B32 => list.lanes(),
        op if op.mnemonic().starts_with("v_smfmac") => {
            list.read(inst.vdst, entry.width(0), Accumulator)
        }
        _ => {}
    }
    list.write(inst.vdst, entry.width(0));
}

fn keeps_half(name: &str) -> bool {
    name.contains("_d16") && (name.contains("load") || name.contains("read"))
}

pub(super) fn local(list: &mut List, inst: &Inst, entry: &Entry) {
    use Role::*;
    if entry.op == DS_NOP {
        return;
    }
    // A swizzle moves the value in the address register.
    let swizzle = entry.op == DS_SWIZZLE_B32;
    list.read(
        inst.src[0],
        entry.width(1),
        if swizzle { Data } else { Address },
    );
    list.read(inst.src[1], entry.width(2), Data);
    list.read(inst.src[2], entry.width(3), Data);
    if matches!(
        entry.op,
        DS_READ_ADDTID_B32 | DS_WRITE_ADDTID_B32 | DS_APPEND | DS_CONSUME
    ) {
        list.read(M0, 1, Index);
    }
    if keeps_half(entry.op.mnemonic()) {
        list.read(inst.vdst, 1, Kept);
    }
    list.lanes();
    list.write(inst.vdst, entry.width(0));
}

pub(super) fn flat(list: &mut List, inst: &Inst, entry: &Entry) {
    use Role::*;
    let (vector, scalar) = match inst.format {
        Format::Scratch => (1, 1),
        Format::Global if inst.sdst != NONE => (1, 2),
        _ => (2, 0),
    };
    list.read(inst.src[0], vector, Address);
    if scalar > 0 {
        list.read(inst.sdst, scalar, Address);
    }
    list.read(inst.src[1], entry.width(2), Data);
    if inst.has(flag::LDS) {
        list.read(M0, 1, Index);
    }
    if keeps_half(entry.op.mnemonic()) {
        list.read(inst.vdst, 1, Kept);
    }
    list.lanes();
    list.write(inst.vdst, entry.width(0));
}

pub(super) fn buffer(list: &mut List, inst: &Inst, entry: &Entry) {
    use Role::*;
    let name = entry.op.mnemonic();
    if entry.width(0) == 0 {
        return;
    }
    let indices = u8::from(inst.has(flag::OFFEN)) + u8::from(inst.has(flag::IDXEN));
    list.read(inst.src[0], indices, Address);
    list.read(inst.src[1], 4, Address);
    list.read(inst.src[2], 1, Address);
    let width = entry.width(0);
    if inst.has(flag::LDS) {
        list.read(M0, 1, Index);
    } else if name.contains("_load_") {
        if keeps_half(name) {
            list.read(inst.vdst, 1, Kept);
        }
        list.write(inst.vdst, width);
    } else {
        list.read(inst.vdst, width, Data);
        if name.contains("_atomic_") && inst.has(flag::SC0) {
            // Compare-and-swap takes two operands and gives one.
            let given = if name.contains("cmpswap") {
                width / 2
            } else {
                width
            };
            list.write(inst.vdst, given);
        }
    }
    list.lanes();
}
