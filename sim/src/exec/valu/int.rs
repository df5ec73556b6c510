//! Integer and bit operations on 16, 32 and 64 bits.

use super::operand::Ty;
use super::ops;
use super::shape::*;
use crate::exec::{Exec, Level};
use crate::inst::{Inst, flag};
use crate::op::Op;

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    if inst.has(flag::CLAMP) && !is_float_clamp(inst.op) {
        return clamped2(inst, level)
            .or_else(|| clamped3(inst, level))
            .or_else(|| clamped16(inst, level));
    }
    unary(inst, level)
        .or_else(|| binary(inst, level))
        .or_else(|| ternary(inst, level))
        .or_else(|| wide(inst, level))
        .or_else(|| sixteen(inst, level))
}

/// Whether the clamp of this instruction is not an integer saturation.
fn is_float_clamp(op: Op) -> bool {
    matches!(op, Op::V_MOV_B32 | Op::V_ACCVGPR_READ_B32)
}

#[inline(always)]
fn sext24(x: u32) -> i32 {
    (x << 8) as i32 >> 8
}

#[inline(always)]
fn s16(x: u32) -> i32 {
    x as u16 as i16 as i32
}

#[inline(always)]
fn bfe_u32(a: u32, offset: u32, width: u32) -> u32 {
    let (offset, width) = (offset & 31, width & 31);
    (a >> offset) & ((1 << width) - 1)
}

#[inline(always)]
fn bfe_i32(a: u32, offset: u32, width: u32) -> u32 {
    let (offset, width) = (offset & 31, width & 31);
    let field = (a >> offset) & ((1u32 << width) - 1);
    let sign = (1u32 << width) >> 1;
    // A field that reaches past bit 31 has the sign bit of the shifted source.
    if offset + width < 32 {
        (field ^ sign).wrapping_sub(sign)
    } else if width == 0 {
        0
    } else {
        (a as i32 >> offset) as u32
    }
}

/// Sum of absolute differences of four bytes.
#[inline(always)]
pub(crate) fn sad_u8(a: u32, b: u32) -> u32 {
    let d = |k: u32| (a >> k & 255).abs_diff(b >> k & 255);
    d(0) + d(8) + d(16) + d(24)
}

/// Sum of absolute differences as in [`sad_u8`], without bytes whose reference is zero.
#[inline(always)]
fn msad_u8(a: u32, b: u32) -> u32 {
    let d = |k: u32| {
        if b >> k & 255 == 0 {
            0
        } else {
            (a >> k & 255).abs_diff(b >> k & 255)
        }
    };
    d(0) + d(8) + d(16) + d(24)
}

#[inline(always)]
fn med3_i32(a: i32, b: i32, c: i32) -> i32 {
    a.min(b).max(a.max(b).min(c))
}

#[inline(always)]
fn med3_u32(a: u32, b: u32, c: u32) -> u32 {
    a.min(b).max(a.max(b).min(c))
}

#[inline(always)]
fn lerp_u8(a: u32, b: u32, c: u32) -> u32 {
    let f = |k: u32| ((a >> k & 255) + (b >> k & 255) + (c >> k & 1)) >> 1 << k;
    f(0) | f(8) | f(16) | f(24)
}

/// Four sums of absolute differences over a sliding window, each added to a 16-bit accumulator.
#[inline(always)]
fn qsad(a: u64, b: u32, c: u64, masked: bool) -> u64 {
    let mut r = 0;
    for k in 0..4 {
        let window = (a >> (8 * k)) as u32;
        let sum = if masked {
            msad_u8(window, b)
        } else {
            sad_u8(window, b)
        };
        let acc = (c >> (16 * k) & 0xffff) as u32;
        r |= u64::from((sum + acc) & 0xffff) << (16 * k);
    }
    r
}

ops! {
    fn unary via map1(Ty::B32): (u32,) => u32 {
        V_ACCVGPR_READ_B32 | V_ACCVGPR_WRITE_B32 | V_ACCVGPR_MOV_B32 = |a| a,
        V_NOT_B32 = |a| !a,
        V_BFREV_B32 = |a| a.reverse_bits(),
        V_FFBH_U32 = |a| if a == 0 { !0 } else { a.leading_zeros() },
        V_FFBL_B32 = |a| if a == 0 { !0 } else { a.trailing_zeros() },
        V_FFBH_I32 = |a| {
            let x = a ^ (a as i32 >> 31) as u32;
            if x == 0 { !0 } else { x.leading_zeros() }
        },
        V_SAT_PK_U8_I16 = |a| {
            let lo = (a as i16).clamp(0, 255) as u32;
            let hi = ((a >> 16) as i16).clamp(0, 255) as u32;
            lo | hi << 8
        },
    }
    fn binary via map2(Ty::B32): (u32, u32) => u32 {
        V_ADD_U32 | V_ADD_I32 = |a, b| a.wrapping_add(b),
        V_SUB_U32 | V_SUB_I32 = |a, b| a.wrapping_sub(b),
        V_SUBREV_U32 = |a, b| b.wrapping_sub(a),
        V_AND_B32 = |a, b| a & b,
        V_OR_B32 = |a, b| a | b,
        V_XOR_B32 = |a, b| a ^ b,
        V_XNOR_B32 = |a, b| !(a ^ b),
        V_LSHLREV_B32 = |a, b| b << (a & 31),
        V_LSHRREV_B32 = |a, b| b >> (a & 31),
        V_ASHRREV_I32 = |a, b| (b as i32 >> (a & 31)) as u32,
        V_MIN_I32 = |a, b| (a as i32).min(b as i32) as u32,
        V_MAX_I32 = |a, b| (a as i32).max(b as i32) as u32,
        V_MIN_U32 = |a, b| a.min(b),
        V_MAX_U32 = |a, b| a.max(b),
        V_MUL_LO_U32 = |a, b| a.wrapping_mul(b),
        V_MUL_HI_U32 = |a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32,
        V_MUL_HI_I32 = |a, b| ((a as i32 as i64 * b as i32 as i64) >> 32) as u32,
        V_MUL_I32_I24 = |a, b| sext24(a).wrapping_mul(sext24(b)) as u32,
        V_MUL_U32_U24 = |a, b| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff),
        V_MUL_HI_I32_I24 = |a, b| ((i64::from(sext24(a)) * i64::from(sext24(b))) >> 32) as u32,
        V_MUL_HI_U32_U24 = |a, b| ((u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff)) >> 32) as u32,
        V_BFM_B32 = |a, b| ((1u32 << (a & 31)) - 1) << (b & 31),
        V_BCNT_U32_B32 = |a, b| a.count_ones().wrapping_add(b),
        V_CVT_PK_U16_U32 = |a, b| a.min(0xffff) | b.min(0xffff) << 16,
        V_CVT_PK_I16_I32 = |a, b| {
            let s = |x: u32| (x as i32).clamp(-32768, 32767) as u32;
            s(a) & 0xffff | s(b) << 16
        },
    }
    fn ternary via map3([Ty::B32; 3]): (u32, u32, u32) => u32 {
        V_ADD3_U32 = |a, b, c| a.wrapping_add(b).wrapping_add(c),
        V_LSHL_ADD_U32 = |a, b, c| (a << (b & 31)).wrapping_add(c),
        V_ADD_LSHL_U32 = |a, b, c| a.wrapping_add(b) << (c & 31),
        V_LSHL_OR_B32 = |a, b, c| a << (b & 31) | c,
        V_AND_OR_B32 = |a, b, c| a & b | c,
        V_OR3_B32 = |a, b, c| a | b | c,
        V_XAD_U32 = |a, b, c| (a ^ b).wrapping_add(c),
        V_BFE_U32 = |a, b, c| bfe_u32(a, b, c),
        V_BFE_I32 = |a, b, c| bfe_i32(a, b, c),
        V_BFI_B32 = |a, b, c| a & b | !a & c,
        V_ALIGNBIT_B32 = |a, b, c| ((u64::from(a) << 32 | u64::from(b)) >> (c & 31)) as u32,
        V_ALIGNBYTE_B32 = |a, b, c| ((u64::from(a) << 32 | u64::from(b)) >> (8 * (c & 3))) as u32,
        V_MIN3_I32 = |a, b, c| (a as i32).min(b as i32).min(c as i32) as u32,
        V_MIN3_U32 = |a, b, c| a.min(b).min(c),
        V_MAX3_I32 = |a, b, c| (a as i32).max(b as i32).max(c as i32) as u32,
        V_MAX3_U32 = |a, b, c| a.max(b).max(c),
        V_MED3_I32 = |a, b, c| med3_i32(a as i32, b as i32, c as i32) as u32,
        V_MED3_U32 = |a, b, c| med3_u32(a, b, c),
        V_MAD_I32_I24 = |a, b, c| sext24(a).wrapping_mul(sext24(b)).wrapping_add(c as i32) as u32,
        V_MAD_U32_U24 = |a, b, c| (a & 0xff_ffff).wrapping_mul(b & 0xff_ffff).wrapping_add(c),
    }
    fn wide_moves via wide1(Ty::B64): (u64,) => u64 {
        V_MOV_B64 = |a| a,
    }
    fn wide_shifts via wide_shift(): (u32, u64) => u64 {
        V_LSHLREV_B64 = |a, b| b << (a & 63),
        V_LSHRREV_B64 = |a, b| b >> (a & 63),
        V_ASHRREV_I64 = |a, b| (b as i64 >> (a & 63)) as u64,
    }
    fn wide_adds via wide_add(): (u64, u32, u64) => u64 {
        V_LSHL_ADD_U64 = |a, b, c| (a << (b & 7)).wrapping_add(c),
    }
}

ops! { rare
    fn mixed via map3([Ty::B16, Ty::B16, Ty::B32]): (u32, u32, u32) => u32 {
        V_MAD_U32_U16 = |a, b, c| (a & 0xffff).wrapping_mul(b & 0xffff).wrapping_add(c),
        V_MAD_I32_I16 = |a, b, c| s16(a).wrapping_mul(s16(b)).wrapping_add(c as i32) as u32,
    }
    fn sums via map3([Ty::B32; 3]): (u32, u32, u32) => u32 {
        V_SAD_U8 = |a, b, c| sad_u8(a, b).wrapping_add(c),
        V_SAD_HI_U8 = |a, b, c| (sad_u8(a, b) << 16).wrapping_add(c),
        V_SAD_U32 = |a, b, c| a.abs_diff(b).wrapping_add(c),
        V_MSAD_U8 = |a, b, c| msad_u8(a, b).wrapping_add(c),
        V_LERP_U8 = |a, b, c| lerp_u8(a, b, c),
        V_SAD_U16 = |a, b, c| (a & 0xffff).abs_diff(b & 0xffff)
            .wrapping_add((a >> 16).abs_diff(b >> 16))
            .wrapping_add(c),
    }
    fn window_sums via wide_add(): (u64, u32, u64) => u64 {
        V_QSAD_PK_U16_U8 = |a, b, c| qsad(a, b, c, false),
        V_MQSAD_PK_U16_U8 = |a, b, c| qsad(a, b, c, true),
    }
    fn clamped2 via map2(Ty::B32): (u32, u32) => u32 {
        V_ADD_U32 = |a, b| a.saturating_add(b),
        V_SUB_U32 = |a, b| a.saturating_sub(b),
        V_SUBREV_U32 = |a, b| b.saturating_sub(a),
        V_ADD_I32 = |a, b| (a as i32).saturating_add(b as i32) as u32,
        V_SUB_I32 = |a, b| (a as i32).saturating_sub(b as i32) as u32,
        V_MUL_U32_U24 = |a, b| {
            let p = u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff);
            if p > 0xffff_ffff { !0 } else { p as u32 }
        },
        V_MUL_I32_I24 = |a, b| {
            let p = i64::from(sext24(a)) * i64::from(sext24(b));
            p.clamp(i32::MIN as i64, i32::MAX as i64) as u32
        },
    }
    fn clamped3 via map3([Ty::B32; 3]): (u32, u32, u32) => u32 {
        V_MAD_U32_U24 = |a, b, c| {
            let p = u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff) + u64::from(c);
            if p > 0xffff_ffff { !0 } else { p as u32 }
        },
        V_MAD_I32_I24 = |a, b, c| {
            let p = i64::from(sext24(a)) * i64::from(sext24(b)) + i64::from(c as i32);
            p.clamp(i32::MIN as i64, i32::MAX as i64) as u32
        },
        V_SAD_U8 = |a, b, c| sad_u8(a, b).saturating_add(c),
        V_SAD_HI_U8 = |a, b, c| (sad_u8(a, b) << 16).saturating_add(c),
        V_SAD_U16 = |a, b, c| (a & 0xffff).abs_diff(b & 0xffff)
            .wrapping_add((a >> 16).abs_diff(b >> 16))
            .saturating_add(c),
        V_SAD_U32 = |a, b, c| a.abs_diff(b).saturating_add(c),
        V_MSAD_U8 = |a, b, c| msad_u8(a, b).saturating_add(c),
    }
    fn low16_1 via map2(Ty::B16): (u32, u32) => u32 {
        V_ADD_U16 = |a, b| a.wrapping_add(b) & 0xffff,
        V_SUB_U16 = |a, b| a.wrapping_sub(b) & 0xffff,
        V_SUBREV_U16 = |a, b| b.wrapping_sub(a) & 0xffff,
        V_MUL_LO_U16 = |a, b| a.wrapping_mul(b) & 0xffff,
        V_LSHLREV_B16 = |a, b| b << (a & 15) & 0xffff,
        V_LSHRREV_B16 = |a, b| (b & 0xffff) >> (a & 15),
        V_ASHRREV_I16 = |a, b| (s16(b) >> (a & 15)) as u32 & 0xffff,
        V_MAX_U16 = |a, b| (a & 0xffff).max(b & 0xffff),
        V_MIN_U16 = |a, b| (a & 0xffff).min(b & 0xffff),
        V_MAX_I16 = |a, b| s16(a).max(s16(b)) as u32 & 0xffff,
        V_MIN_I16 = |a, b| s16(a).min(s16(b)) as u32 & 0xffff,
    }
    fn legacy16 via map3([Ty::B16; 3]): (u32, u32, u32) => u32 {
        V_MAD_LEGACY_U16 | V_MAD_LEGACY_I16 = |a, b, c| a.wrapping_mul(b).wrapping_add(c) & 0xffff,
    }
    fn half_binary via half2(): (u32, u32) => u32 {
        V_ADD_I16 = |a, b| a.wrapping_add(b) & 0xffff,
        V_SUB_I16 = |a, b| a.wrapping_sub(b) & 0xffff,
    }
    fn half_ternary via half3(): (u32, u32, u32) => u32 {
        V_MAD_U16 | V_MAD_I16 = |a, b, c| a.wrapping_mul(b).wrapping_add(c) & 0xffff,
        V_MIN3_U16 = |a, b, c| a.min(b).min(c),
        V_MAX3_U16 = |a, b, c| a.max(b).max(c),
        V_MED3_U16 = |a, b, c| med3_u32(a, b, c),
        V_MIN3_I16 = |a, b, c| s16(a).min(s16(b)).min(s16(c)) as u32 & 0xffff,
        V_MAX3_I16 = |a, b, c| s16(a).max(s16(b)).max(s16(c)) as u32 & 0xffff,
        V_MED3_I16 = |a, b, c| med3_i32(s16(a), s16(b), s16(c)) as u32 & 0xffff,
    }
    fn clamped16_low via map2(Ty::B16): (u32, u32) => u32 {
        V_ADD_U16 = |a, b| ((a & 0xffff) + (b & 0xffff)).min(0xffff),
        V_SUB_U16 = |a, b| (a & 0xffff).saturating_sub(b & 0xffff),
        V_SUBREV_U16 = |a, b| (b & 0xffff).saturating_sub(a & 0xffff),
    }
    fn clamped16_half via half2(): (u32, u32) => u32 {
        V_ADD_I16 = |a, b| (s16(a) + s16(b)).clamp(-32768, 32767) as u32 & 0xffff,
        V_SUB_I16 = |a, b| (s16(a) - s16(b)).clamp(-32768, 32767) as u32 & 0xffff,
    }
    fn clamped16_half3 via half3(): (u32, u32, u32) => u32 {
        V_MAD_U16 = |a, b, c| a.wrapping_mul(b).saturating_add(c).min(0xffff),
        V_MAD_I16 = |a, b, c| (s16(a) * s16(b)).saturating_add(s16(c)).clamp(-32768, 32767) as u32 & 0xffff,
    }
    fn clamped_mixed via map3([Ty::B16, Ty::B16, Ty::B32]): (u32, u32, u32) => u32 {
        V_MAD_U32_U16 = |a, b, c| ((a & 0xffff) * (b & 0xffff)).saturating_add(c),
        V_MAD_I32_I16 = |a, b, c| (s16(a) * s16(b)).saturating_add(c as i32) as u32,
    }
}

fn wide(inst: &Inst, level: Level) -> Option<Exec> {
    wide_moves(inst, level)
        .or_else(|| wide_shifts(inst, level))
        .or_else(|| wide_adds(inst, level))
        .or_else(|| mixed(inst, level))
        .or_else(|| sums(inst, level))
        .or_else(|| window_sums(inst, level))
}

fn sixteen(inst: &Inst, level: Level) -> Option<Exec> {
    low16_1(inst, level)
        .or_else(|| legacy16(inst, level))
        .or_else(|| half_binary(inst, level))
        .or_else(|| half_ternary(inst, level))
}

fn clamped16(inst: &Inst, level: Level) -> Option<Exec> {
    clamped16_low(inst, level)
        .or_else(|| clamped16_half(inst, level))
        .or_else(|| clamped16_half3(inst, level))
        .or_else(|| clamped_mixed(inst, level))
}
