//! Text of fields with a syntax of their own.

use super::Text;
use crate::decode::table::{Entry, X_SPECIAL};
use crate::inst::{Format, Inst};

/// Decimal up to 64 (an inline constant), hexadecimal above.
pub(super) fn small_or_hex(value: u32) -> String {
    match value {
        0..=64 => value.to_string(),
        _ => format!("0x{value:x}"),
    }
}

/// The operand of `s_atc_probe`.
pub(super) fn small_or_plain(value: u32) -> String {
    small_or_hex(value)
}

/// Counters of `s_waitcnt`. A counter at its maximum is left out, unless all are at theirs.
pub(super) fn waitcnt(value: u32) -> String {
    let vm = value & 15 | value >> 14 << 4;
    let exp = value >> 4 & 7;
    let lgkm = value >> 8 & 15;
    let all = vm == 63 && exp == 7 && lgkm == 15;
    let counters = [("vmcnt", vm, 63), ("expcnt", exp, 7), ("lgkmcnt", lgkm, 15)];
    let shown: Vec<String> = counters
        .iter()
        .filter(|(_, value, max)| all || value != max)
        .map(|(name, value, _)| format!("{name}({value})"))
        .collect();
    shown.join(" ")
}

/// The operand of `s_getreg` and `s_setreg`.
pub(super) fn hwreg(value: u32) -> String {
    let (id, offset, size) = (value & 63, value >> 6 & 31, (value >> 11) + 1);
    let name = match id {
        1 => "HW_REG_MODE",
        2 => "HW_REG_STATUS",
        3 => "HW_REG_TRAPSTS",
        4 => "HW_REG_HW_ID",
        5 => "HW_REG_GPR_ALLOC",
        6 => "HW_REG_LDS_ALLOC",
        7 => "HW_REG_IB_STS",
        15 => "HW_REG_SH_MEM_BASES",
        16 => "HW_REG_TBA_LO",
        17 => "HW_REG_TBA_HI",
        18 => "HW_REG_TMA_LO",
        19 => "HW_REG_TMA_HI",
        20 => "HW_REG_XCC_ID",
        21 => "HW_REG_SQ_PERF_SNAPSHOT_DATA",
        22 => "HW_REG_SQ_PERF_SNAPSHOT_DATA1",
        23 => "HW_REG_SQ_PERF_SNAPSHOT_PC_LO",
        24 => "HW_REG_SQ_PERF_SNAPSHOT_PC_HI",
        _ => "",
    };
    let name = if name.is_empty() {
        id.to_string()
    } else {
        name.to_string()
    };
    if offset == 0 && size == 32 {
        format!("hwreg({name})")
    } else {
        format!("hwreg({name}, {offset}, {size})")
    }
}

/// The operand of `s_sendmsg`.
pub(super) fn sendmsg(value: u32) -> String {
    let (id, op, stream) = (value & 15, value >> 4 & 7, value >> 8 & 3);
    const GS_OP: [&str; 4] = ["GS_OP_NOP", "GS_OP_CUT", "GS_OP_EMIT", "GS_OP_EMIT_CUT"];
    let plain = match id {
        1 => "MSG_INTERRUPT",
        4 => "MSG_SAVEWAVE",
        5 => "MSG_STALL_WAVE_GEN",
        6 => "MSG_HALT_WAVES",
        7 => "MSG_ORDERED_PS_DONE",
        8 => "MSG_EARLY_PRIM_DEALLOC",
        9 => "MSG_GS_ALLOC_REQ",
        10 => "MSG_GET_DOORBELL",
        _ => "",
    };
    let system = match op {
        1 => "SYSMSG_OP_ECC_ERR_INTERRUPT",
        2 => "SYSMSG_OP_REG_RD",
        4 => "SYSMSG_OP_TTRACE_PC",
        _ => "",
    };
    let gs = if id == 2 { "MSG_GS" } else { "MSG_GS_DONE" };
    match id {
        2 | 3 if (1..4).contains(&op) => {
            return format!("sendmsg({gs}, {}, {stream})", GS_OP[op as usize]);
        }
        3 if op == 0 && stream == 0 => return format!("sendmsg({gs}, GS_OP_NOP)"),
        15 if !system.is_empty() && stream == 0 => return format!("sendmsg(MSG_SYSMSG, {system})"),
        _ if !plain.is_empty() && op == 0 && stream == 0 => return format!("sendmsg({plain})"),
        _ => {}
    }
    if id | op << 4 | stream << 8 == value {
        format!("sendmsg({id}, {op}, {stream})")
    } else {
        value.to_string()
    }
}

/// The operand of `s_set_gpr_idx_on` and `s_set_gpr_idx_mode`.
pub(super) fn gpr_idx(value: u32, _bits: u32) -> String {
    if value > 15 {
        return format!("0x{value:x}");
    }
    let names: Vec<&str> = ["SRC0", "SRC1", "SRC2", "DST"]
        .into_iter()
        .enumerate()
        .filter(|(i, _)| value >> i & 1 != 0)
        .map(|(_, name)| name)
        .collect();
    format!("gpr_idx({})", names.join(","))
}

/// The offset of `ds_swizzle_b32`.
pub(super) fn swizzle(value: u32) -> String {
    if value & 0xff00 == 0x8000 {
        let lane = |i: u32| value >> (2 * i) & 3;
        return format!(
            "offset:swizzle(QUAD_PERM,{},{},{},{})",
            lane(0),
            lane(1),
            lane(2),
            lane(3)
        );
    }
    if value & 0x8000 != 0 {
        return format!("offset:{value}");
    }
    let (and, or, xor) = (value & 31, value >> 5 & 31, value >> 10 & 31);
    if and == 31 && or == 0 && xor.is_power_of_two() {
        return format!("offset:swizzle(SWAP,{xor})");
    }
    if and == 31 && or == 0 && xor != 0 && (xor + 1).is_power_of_two() {
        return format!("offset:swizzle(REVERSE,{})", xor + 1);
    }
    let group = 32 - and;
    if group > 1 && group.is_power_of_two() && or < group && xor == 0 {
        return format!("offset:swizzle(BROADCAST,{group},{or})");
    }
    let mask: String = (0..5)
        .rev()
        .map(|bit| {
            let apply = |lane: u32| ((lane & and | or) ^ xor) >> bit & 1;
            match (apply(0), apply(31)) {
                (0, 0) => '0',
                (1, 1) => '1',
                (0, _) => 'p',
                _ => 'i',
            }
        })
        .collect();
    format!("offset:swizzle(BITMASK_PERM,\"{mask}\")")
}

/// The second dword of an SDWA instruction.
pub(super) fn sdwa(out: &mut Text, inst: &Inst, entry: &Entry) {
    const SEL: [&str; 8] = [
        "BYTE_0", "BYTE_1", "BYTE_2", "BYTE_3", "WORD_0", "WORD_1", "DWORD", "7",
    ];
    let sel = |lo: u32| SEL[(inst.ctrl >> lo & 7) as usize];
    if inst.format != Format::Vopc && entry.sdwa & X_SPECIAL == 0 {
        out.modifier(format!("dst_sel:{}", sel(8)));
        let unused = match inst.ctrl >> 11 & 3 {
            1 => "UNUSED_SEXT",
            2 => "UNUSED_PRESERVE",
            _ => "UNUSED_PAD",
        };
        out.modifier(format!("dst_unused:{unused}"));
    }
    out.modifier(format!("src0_sel:{}", sel(16)));
    if inst.format != Format::Vop1 {
        out.modifier(format!("src1_sel:{}", sel(24)));
    }
}

/// The second dword of a DPP instruction.
pub(super) fn dpp(out: &mut Text, ctrl: u32) {
    let selector = ctrl >> 8 & 0x1ff;
    let n = selector & 15;
    out.modifier(match selector {
        0..=0xff => format!(
            "quad_perm:[{},{},{},{}]",
            selector & 3,
            selector >> 2 & 3,
            selector >> 4 & 3,
            selector >> 6
        ),
        0x101..=0x10f => format!("row_shl:{n}"),
        0x111..=0x11f => format!("row_shr:{n}"),
        0x121..=0x12f => format!("row_ror:{n}"),
        0x130 => "wave_shl:1".to_string(),
        0x134 => "wave_rol:1".to_string(),
        0x138 => "wave_shr:1".to_string(),
        0x13c => "wave_ror:1".to_string(),
        0x140 => "row_mirror".to_string(),
        0x141 => "row_half_mirror".to_string(),
        0x142 => "row_bcast:15".to_string(),
        0x143 => "row_bcast:31".to_string(),
        _ => format!("row_newbcast:{n}"),
    });
    out.modifier(format!("row_mask:0x{:x}", ctrl >> 28));
    out.modifier(format!("bank_mask:0x{:x}", ctrl >> 24 & 15));
    if ctrl >> 19 & 1 != 0 {
        out.modifier("bound_ctrl:1");
    }
}

/// Data and number format of MTBUF; `None` for the default.
pub(super) fn buffer_format(format: u32) -> Option<String> {
    const DATA: [&str; 16] = [
        "INVALID",
        "8",
        "16",
        "8_8",
        "32",
        "16_16",
        "10_11_11",
        "11_11_10",
        "10_10_10_2",
        "2_10_10_10",
        "8_8_8_8",
        "32_32",
        "16_16_16_16",
        "32_32_32",
        "32_32_32_32",
        "RESERVED_15",
    ];
    const NUMBER: [&str; 8] = [
        "UNORM",
        "SNORM",
        "USCALED",
        "SSCALED",
        "UINT",
        "SINT",
        "RESERVED_6",
        "FLOAT",
    ];
    let (data, number) = (format & 15, format >> 4 & 7);
    let data_text = format!("BUF_DATA_FORMAT_{}", DATA[data as usize]);
    let number_text = format!("BUF_NUM_FORMAT_{}", NUMBER[number as usize]);
    match (data, number) {
        (1, 0) => None,
        (1, _) => Some(format!("format:[{number_text}]")),
        (_, 0) => Some(format!("format:[{data_text}]")),
        _ => Some(format!("format:[{data_text},{number_text}]")),
    }
}
