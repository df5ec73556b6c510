//! Text of operands.

use crate::decode::table::{CLASS_F16, CLASS_I16, KIND_CLASS, KIND_WIDTH};
use crate::inst::{AGPR0, Inst, LITERAL, NONE, Operand, VGPR0};

fn tuple(file: &str, first: Operand, width: u8) -> String {
    match width {
        0 | 1 => format!("{file}{first}"),
        _ => format!("{file}[{first}:{}]", first + Operand::from(width) - 1),
    }
}

/// Inline float constants, in the order of their codes from 240 on, and their bits in f16.
const FLOAT: [&str; 9] = [
    "0.5",
    "-0.5",
    "1.0",
    "-1.0",
    "2.0",
    "-2.0",
    "4.0",
    "-4.0",
    "0.15915494",
];
const HALF: [u16; 9] = [
    0x3800, 0xb800, 0x3c00, 0xbc00, 0x4000, 0xc000, 0x4400, 0xc400, 0x3118,
];

/// A register of `width` dwords.
pub(super) fn register(operand: Operand, width: u8) -> String {
    let pair = |name: &str| match (width, operand % 2) {
        (2.., _) => name.to_string(),
        (_, 0) => format!("{name}_lo"),
        _ => format!("{name}_hi"),
    };
    match operand {
        NONE => "off".to_string(),
        AGPR0.. => tuple("a", operand - AGPR0, width),
        VGPR0.. => tuple("v", operand - VGPR0, width),
        0..=101 => tuple("s", operand, width),
        102..=103 => pair("flat_scratch"),
        104..=105 => pair("xnack_mask"),
        106..=107 => pair("vcc"),
        108..=123 => tuple("ttmp", operand - 108, width),
        124 => "m0".to_string(),
        125 => "null".to_string(),
        126..=127 => pair("exec"),
        235 => "src_shared_base".to_string(),
        236 => "src_shared_limit".to_string(),
        237 => "src_private_base".to_string(),
        238 => "src_private_limit".to_string(),
        239 => "src_pops_exiting_wave_id".to_string(),
        251 => "src_vccz".to_string(),
        252 => "src_execz".to_string(),
        253 => "src_scc".to_string(),
        _ => immediate(operand, width),
    }
}

/// An inline constant.
pub(super) fn immediate(operand: Operand, kind: u8) -> String {
    let i = usize::from(operand.wrapping_sub(240)) & 15;
    match operand {
        128..=192 => (operand - 128).to_string(),
        193..=208 => format!("-{}", operand - 192),
        240..=248 if kind & KIND_CLASS == CLASS_I16 => {
            format!("0x{:x}", HALF[i])
        }
        248 if kind & KIND_WIDTH == 2 => "0.15915494309189532".to_string(),
        240..=248 => FLOAT[i].to_string(),
        _ => format!("<operand {operand}>"),
    }
}

/// A source operand of the given kind.
pub(super) fn source(inst: &Inst, operand: Operand, kind: u8) -> String {
    match operand {
        LITERAL => literal(inst, kind),
        128..=208 | 240..=248 => immediate(operand, kind),
        _ => register(operand, kind & KIND_WIDTH),
    }
}

/// The literal constant. LLVM prints a literal that equals an inline constant like that constant.
fn literal(inst: &Inst, kind: u8) -> String {
    const SINGLE: [u32; 9] = [
        0x3f00_0000,
        0xbf00_0000,
        0x3f80_0000,
        0xbf80_0000,
        0x4000_0000,
        0xc000_0000,
        0x4080_0000,
        0xc080_0000,
        0x3e22_f983,
    ];
    const DOUBLE: [u32; 8] = [
        0x3fe0_0000,
        0xbfe0_0000,
        0x3ff0_0000,
        0xbff0_0000,
        0x4000_0000,
        0xc000_0000,
        0x4010_0000,
        0xc010_0000,
    ];
    let value = inst.literal;
    let low = value as u16;
    let small = |value: i32| (-16..=64).contains(&value).then(|| value.to_string());
    let float = |at: Option<usize>| at.map(|at| FLOAT[at].to_string());
    let known = match kind & KIND_CLASS {
        CLASS_F16 => small(i32::from(low as i16)).or(float(HALF.iter().position(|&c| c == low))),
        _ if kind & KIND_WIDTH == 2 => match inst.op.mnemonic().contains("f64") {
            true if value == 0 => Some("0".to_string()),
            true => float(DOUBLE.iter().position(|&c| c == value)),
            false => (value <= 64).then(|| value.to_string()),
        },
        _ => small(value as i32).or(float(SINGLE.iter().position(|&c| c == value))),
    };
    known.unwrap_or_else(|| match kind & KIND_CLASS {
        CLASS_F16 | CLASS_I16 => format!("0x{low:x}"),
        _ => format!("0x{value:x}"),
    })
}
