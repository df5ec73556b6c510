//! f32 arithmetic.

use super::float::*;
use super::math;
use super::operand::Ty;
use super::ops;
use super::shape::*;
use crate::exec::{Exec, Level};
use crate::inst::Inst;

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    add(inst, level)
        .or_else(|| minmax(inst, level))
        .or_else(|| rounding(inst, level))
        .or_else(|| others(inst, level))
        .or_else(|| integers(inst, level))
}

/// Orders f32 bits as integers, -0 below +0.
#[inline(always)]
fn key(x: u32) -> i32 {
    (x ^ ((x as i32 >> 31) as u32 >> 1)) as i32
}

#[inline(always)]
fn is_nan(x: u32) -> bool {
    x & 0x7fff_ffff > 0x7f80_0000
}

#[inline(always)]
fn is_signalling(x: u32) -> bool {
    is_nan(x) && x & 0x40_0000 == 0
}

/// The smaller of two. A number wins over a quiet NaN. A signalling NaN wins over everything and becomes quiet.
#[inline(always)]
pub(crate) fn min32(a: u32, b: u32) -> u32 {
    let m = if key(a) < key(b) { a } else { b };
    pick(a, b, m)
}

/// The larger of two; NaNs as in [`min32`].
#[inline(always)]
pub(crate) fn max32(a: u32, b: u32) -> u32 {
    let m = if key(a) > key(b) { a } else { b };
    pick(a, b, m)
}

#[inline(always)]
fn pick(a: u32, b: u32, numbers: u32) -> u32 {
    let r = if is_nan(b) { a } else { numbers };
    let r = if is_nan(a) { b } else { r };
    let r = if is_signalling(b) { b | 0x40_0000 } else { r };
    if is_signalling(a) { a | 0x40_0000 } else { r }
}

/// The middle of three; the smallest if a NaN is among them.
#[inline(always)]
fn med3(a: u32, b: u32, c: u32) -> u32 {
    if is_nan(a) || is_nan(b) || is_nan(c) {
        return min32(min32(a, b), c);
    }
    let (ka, kb, kc) = (key(a), key(b), key(c));
    let m = ka.min(kb).max(ka.max(kb).min(kc));
    (m ^ ((m >> 31) as u32 >> 1) as i32) as u32
}

/// `x - floor(x)`, always below 1.
#[inline(always)]
fn fract(x: f32) -> f32 {
    let r = x - x.floor();
    if r >= 1.0 {
        f32::from_bits(0x3f7f_ffff)
    } else {
        r
    }
}

/// `a * 2^n`.
#[inline(always)]
fn ldexp(a: u32, n: u32) -> u32 {
    if is_nan(a) {
        return a | 0x40_0000;
    }
    // In f64 the product is exact for |n| up to 700, and one rounding to f32 follows.
    let n = (n as i32).clamp(-700, 700);
    let scale = f64::from_bits(((1023 + n) as u64) << 52);
    ((f64::from(f32::from_bits(a)) * scale) as f32).to_bits()
}

#[inline(always)]
fn frexp_mant(x: f32) -> f32 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    let bits = f64::from(x).to_bits();
    f64::from_bits(bits & 0x800f_ffff_ffff_ffff | 0x3fe0_0000_0000_0000) as f32
}

#[inline(always)]
fn frexp_exp(x: u32) -> u32 {
    let v = f32::from_bits(x);
    if v == 0.0 || !v.is_finite() {
        return 0;
    }
    let e = (f64::from(v).to_bits() >> 52 & 0x7ff) as i32 - 1022;
    e as u32
}

/// Face of the cube that a direction meets.
#[inline(always)]
fn cube(x: f32, y: f32, z: f32) -> (f32, f32, f32, f32) {
    let (ax, ay, az) = (x.abs(), y.abs(), z.abs());
    if az >= ax && az >= ay {
        let sc = if z < 0.0 { -x } else { x };
        (if z < 0.0 { 5.0 } else { 4.0 }, sc, -y, 2.0 * z)
    } else if ay >= ax {
        let tc = if y < 0.0 { -z } else { z };
        (if y < 0.0 { 3.0 } else { 2.0 }, x, tc, 2.0 * y)
    } else {
        let sc = if x < 0.0 { z } else { -z };
        (if x < 0.0 { 1.0 } else { 0.0 }, sc, -y, 2.0 * x)
    }
}

ops! {
    fn adds via float2(Arith::Add): (f32, f32) => f32 {
        V_ADD_F32 = |a, b| a + b,
    }
    fn subs via float2(Arith::Sub): (f32, f32) => f32 {
        V_SUB_F32 = |a, b| a - b,
    }
    fn subrevs via float2(Arith::SubRev): (f32, f32) => f32 {
        V_SUBREV_F32 = |a, b| b - a,
    }
    fn muls via float2(Arith::Mul): (f32, f32) => f32 {
        V_MUL_F32 = |a, b| a * b,
    }
    fn fmas via float3(Arith::Fma, false): (f32, f32, f32) => f32 {
        V_FMA_F32 | V_FMAMK_F32 | V_FMAAK_F32 = |a, b, c| a.mul_add(b, c),
    }
    fn fmacs via float3(Arith::Fma, true): (f32, f32, f32) => f32 {
        V_FMAC_F32 = |a, b, c| a.mul_add(b, c),
    }
    fn minmax2 via bits2(): (u32, u32) => u32 {
        V_MIN_F32 = |a, b| min32(a, b),
        V_MAX_F32 = |a, b| max32(a, b),
    }
    fn minmax3 via bits3(): (u32, u32, u32) => u32 {
        V_MIN3_F32 = |a, b, c| min32(min32(a, b), c),
        V_MAX3_F32 = |a, b, c| max32(max32(a, b), c),
        V_MED3_F32 = |a, b, c| med3(a, b, c),
    }
    fn rounding via float1(): (f32,) => f32 {
        V_RNDNE_F32 = |a| a.round_ties_even(),
        V_FLOOR_F32 = |a| a.floor(),
        V_CEIL_F32 = |a| a.ceil(),
        V_TRUNC_F32 = |a| a.trunc(),
        V_FRACT_F32 = |a| fract(a),
        V_RCP_F32 | V_RCP_IFLAG_F32 = |a| math::flushed(1.0 / math::flushed(a)),
        V_RSQ_F32 = |a| math::rsq(math::flushed(a)),
        V_SQRT_F32 = |a| math::flushed(a).sqrt(),
        V_EXP_F32 | V_EXP_LEGACY_F32 = |a| math::flushed(math::exp2(math::flushed(a))),
        V_LOG_F32 | V_LOG_LEGACY_F32 = |a| math::log2(math::flushed(a)),
    }
    fn scaling via bits2_int(): (u32, u32) => u32 {
        V_LDEXP_F32 = |a, b| ldexp(a, b),
    }
}

ops! { rare
    fn seldom via float1(): (f32,) => f32 {
        V_SIN_F32 = |a| math::sin_turns(a),
        V_COS_F32 = |a| math::cos_turns(a),
        V_FREXP_MANT_F32 = |a| frexp_mant(a),
    }
    fn legacy via float2(Arith::Exact): (f32, f32) => f32 {
        V_MUL_LEGACY_F32 = |a, b| if a == 0.0 || b == 0.0 { 0.0 } else { a * b },
    }
    fn others3 via float3(Arith::Exact, false): (f32, f32, f32) => f32 {
        V_CUBEID_F32 = |a, b, c| cube(a, b, c).0,
        V_CUBESC_F32 = |a, b, c| cube(a, b, c).1,
        V_CUBETC_F32 = |a, b, c| cube(a, b, c).2,
        V_CUBEMA_F32 = |a, b, c| cube(a, b, c).3,
    }
    fn integers via map1(Ty::F32): (u32,) => u32 {
        V_FREXP_EXP_I32_F32 = |a| frexp_exp(a),
    }
}

fn add(inst: &Inst, level: Level) -> Option<Exec> {
    adds(inst, level)
        .or_else(|| subs(inst, level))
        .or_else(|| subrevs(inst, level))
        .or_else(|| muls(inst, level))
        .or_else(|| fmas(inst, level))
        .or_else(|| fmacs(inst, level))
        .or_else(|| legacy(inst, level))
}

fn minmax(inst: &Inst, level: Level) -> Option<Exec> {
    minmax2(inst, level).or_else(|| minmax3(inst, level))
}

fn others(inst: &Inst, level: Level) -> Option<Exec> {
    others3(inst, level)
        .or_else(|| seldom(inst, level))
        .or_else(|| scaling(inst, level))
}
