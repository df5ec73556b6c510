//! Conversions between integer and float types.

use super::f16::Half;
use super::float::{finish32, flush_source, needs_finish32, special_mode32};
use super::operand::{Scratch, Ty, put16_half, put32, put64, src32, src64};
use super::ops;
use super::shape::*;
use crate::exec::convert::{Fnuz, Round, f16_to_f32, f32_to_f16, f32_to_f16_rtz, f64_to_f32_round};
use crate::exec::{Env, Exec, Flow, Level};
use crate::inst::{Inst, flag};
use crate::op::Op;
use crate::wave::{LANES, Wave};

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    common(inst, level)
        .or_else(|| from_half(inst, level))
        .or_else(|| to_half(inst, level))
        .or_else(|| pairs(inst, level))
        .or_else(|| rare(inst, level))
        .or_else(|| eight_bits(inst))
}

/// f32 from one source of type `ty`. `f` returns the exact value, which is rounded by MODE.
#[inline(always)]
unsafe fn to_f32(w: &mut Wave, i: &Inst, _: &mut Env, ty: Ty, f: impl Fn((u32,)) -> f64) -> Flow {
    let mut s = Scratch::<1>::new();
    let mut r = [0; LANES];
    let round = Round::from_mode(w.mode);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, ty, s.at(0));
        for (l, r) in r.iter_mut().enumerate() {
            *r = (f((at(a, l),)) as f32).to_bits();
        }
        if round != Round::Nearest {
            for (l, r) in r.iter_mut().enumerate() {
                *r = f64_to_f32_round(f((at(a, l),)), round).to_bits();
            }
        }
    }
    if needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

/// An integer from an f32.
#[inline(always)]
unsafe fn from_f32(w: &mut Wave, i: &Inst, _: &mut Env, _: (), f: impl Fn((f32,)) -> u32) -> Flow {
    let mut s = Scratch::<1>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, Ty::F32, s.at(0));
        if special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
        }
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((f32::from_bits(at(a, l)),));
        }
    }
    put32(w, i, &r);
    Flow::Next
}

/// f32 from f16 bits.
#[inline(always)]
unsafe fn half_to_f32(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((u32,)) -> u32,
) -> Flow {
    let mut s = Scratch::<1>::new();
    let mut r = [0; LANES];
    let h = Half::of(w, i);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::F16, s.at(0));
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((h.load(at(a, l)).to_bits(),));
        }
    }
    if i.omod != 0 || i.has(flag::CLAMP) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

/// f16 from an f32.
#[inline(always)]
unsafe fn f32_to_half(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((f32,)) -> f32,
) -> Flow {
    let mut s = Scratch::<1>::new();
    let mut r = [0; LANES];
    let h = Half::of(w, i);
    let plain = w.mode & 0xcc == 0xc0 && i.omod == 0 && !i.has(flag::CLAMP);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, Ty::F32, s.at(0));
        if special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
        }
        if plain {
            for (l, r) in r.iter_mut().enumerate() {
                *r = f32_to_f16(f((f32::from_bits(at(a, l)),)));
            }
        } else {
            for (l, r) in r.iter_mut().enumerate() {
                let x = f((f32::from_bits(at(a, l)),));
                *r = if x.is_nan() {
                    f32_to_f16(x)
                } else {
                    h.store(x.into())
                };
            }
        }
    }
    put32(w, i, &r);
    Flow::Next
}

/// f16 from an integer, exact in f32.
#[inline(always)]
unsafe fn int_to_half(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((u32,)) -> f64,
) -> Flow {
    let mut s = Scratch::<1>::new();
    let mut r = [0; LANES];
    let h = Half::of(w, i);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::B16, s.at(0));
        for (l, r) in r.iter_mut().enumerate() {
            *r = h.store(f((at(a, l),)));
        }
    }
    put32(w, i, &r);
    Flow::Next
}

/// 32-bit result from an f64 source; `f` computes it for a rounding mode.
#[inline(always)]
unsafe fn from_f64(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    float: bool,
    f: impl Fn((f64, Round)) -> u32,
) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    let round = Round::from_mode(w.mode);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src64(w, i, 0, Ty::F64, s.at(0));
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((f64::from_bits(at64(a, l)), round));
        }
    }
    if float && needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

/// f64 from a 32-bit source.
#[inline(always)]
unsafe fn to_f64(w: &mut Wave, i: &Inst, _: &mut Env, ty: Ty, f: impl Fn((u32,)) -> f64) -> Flow {
    let mut s = Scratch::<1>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, ty, s.at(0));
        if ty == Ty::F32 && special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
        }
        for l in 0..LANES {
            let mut v = f((at(a, l),));
            if i.has(flag::CLAMP) {
                v = if v > 0.0 { v.min(1.0) } else { 0.0 };
            }
            let v = v.to_bits();
            (lo[l], hi[l]) = (v as u32, (v >> 32) as u32);
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}

/// Two f32 sources, two 16-bit results.
#[inline(always)]
unsafe fn pack(w: &mut Wave, i: &Inst, _: &mut Env, ty: Ty, f: impl Fn((f32, f32)) -> u32) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, ty, s.at(0));
        let mut b = src32(w, i, 1, ty, s.at(1));
        if ty == Ty::F32 && special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
            b = flush_source(w.mode, b, s.at(1));
        }
        for (l, r) in r.iter_mut().enumerate() {
            let load = |x: u32| {
                if ty == Ty::F16 {
                    f16_to_f32(x)
                } else {
                    f32::from_bits(x)
                }
            };
            *r = f((load(at(a, l)), load(at(b, l))));
        }
    }
    put32(w, i, &r);
    Flow::Next
}

#[inline(always)]
fn snorm16(x: f32) -> u32 {
    let v = f64::from(x).clamp(-1.0, 1.0) * 32767.0;
    v.round_ties_even() as i32 as u32 & 0xffff
}

#[inline(always)]
fn unorm16(x: f32) -> u32 {
    let v = f64::from(x).clamp(0.0, 1.0) * 65535.0;
    v.round_ties_even() as u32 & 0xffff
}

ops! {
    fn common via to_f32(Ty::B32): (u32,) => f64 {
        V_CVT_F32_I32 = |a| f64::from(a as i32),
        V_CVT_F32_U32 = |a| f64::from(a),
        V_CVT_F32_UBYTE0 = |a| f64::from(a & 255),
        V_CVT_F32_UBYTE1 = |a| f64::from(a >> 8 & 255),
        V_CVT_F32_UBYTE2 = |a| f64::from(a >> 16 & 255),
        V_CVT_F32_UBYTE3 = |a| f64::from(a >> 24),
        V_CVT_OFF_F32_I4 = |a| f64::from((a << 28) as i32 >> 28) / 16.0,
    }
    fn from_half via half_to_f32(): (u32,) => u32 {
        V_CVT_F32_F16 = |a| if a & 0x7fff_ffff > 0x7f80_0000 { a | 0x40_0000 } else { a },
    }
    fn to_half via f32_to_half(): (f32,) => f32 {
        V_CVT_F16_F32 = |a| a,
    }
    fn pairs via pack(Ty::F32): (f32, f32) => u32 {
        V_CVT_PKRTZ_F16_F32 = |a, b| f32_to_f16_rtz(a) | f32_to_f16_rtz(b) << 16,
    }
}

ops! { rare
    fn integers via from_f32(): (f32,) => u32 {
        V_CVT_I32_F32 = |a| a as i32 as u32,
        V_CVT_U32_F32 = |a| a as u32,
        V_CVT_FLR_I32_F32 = |a| a.floor() as i32 as u32,
        V_CVT_RPI_I32_F32 = |a| (f64::from(a) + 0.5).floor() as i32 as u32,
    }
    fn doubles via from_f64(false): (f64, Round) => u32 {
        V_CVT_I32_F64 = |a, _r| a as i32 as u32,
        V_CVT_U32_F64 = |a, _r| a as u32,
    }
    fn singles via from_f64(true): (f64, Round) => u32 {
        V_CVT_F32_F64 = |a, r| {
            let v = f64_to_f32_round(a, r).to_bits();
            if a.is_nan() {
                // The payload's high bits survive, quiet.
                let b = a.to_bits();
                (b >> 32) as u32 & 0x8000_0000 | 0x7fc0_0000 | (b >> 29) as u32 & 0x3f_ffff
            } else {
                v
            }
        },
    }
    fn widen via to_f64(Ty::B32): (u32,) => f64 {
        V_CVT_F64_I32 = |a| f64::from(a as i32),
        V_CVT_F64_U32 = |a| f64::from(a),
    }
    fn widen_float via to_f64(Ty::F32): (u32,) => f64 {
        V_CVT_F64_F32 = |a| {
            if a & 0x7fff_ffff > 0x7f80_0000 {
                let sign = u64::from(a >> 31) << 63;
                f64::from_bits(sign | 0x7ff8 << 48 | u64::from(a & 0x3f_ffff) << 29)
            } else {
                f64::from(f32::from_bits(a))
            }
        },
    }
    fn half_integers via half_to_f32(): (u32,) => u32 {
        V_CVT_U16_F16 = |a| u32::from(f32::from_bits(a) as u16),
        V_CVT_I16_F16 = |a| u32::from(f32::from_bits(a) as i16 as u16),
        V_CVT_NORM_I16_F16 = |a| snorm16(f32::from_bits(a)),
        V_CVT_NORM_U16_F16 = |a| unorm16(f32::from_bits(a)),
    }
    fn integer_halves via int_to_half(): (u32,) => f64 {
        V_CVT_F16_U16 = |a| f64::from(a as u16),
        V_CVT_F16_I16 = |a| f64::from(a as i16),
    }
    fn norms via pack(Ty::F32): (f32, f32) => u32 {
        V_CVT_PKNORM_I16_F32 = |a, b| snorm16(a) | snorm16(b) << 16,
        V_CVT_PKNORM_U16_F32 = |a, b| unorm16(a) | unorm16(b) << 16,
    }
    fn half_norms via pack(Ty::F16): (f32, f32) => u32 {
        V_CVT_PKNORM_I16_F16 = |a, b| snorm16(a) | snorm16(b) << 16,
        V_CVT_PKNORM_U16_F16 = |a, b| unorm16(a) | unorm16(b) << 16,
    }
    fn bytes via map3([Ty::F32, Ty::B32, Ty::B32]): (u32, u32, u32) => u32 {
        V_CVT_PK_U8_F32 = |a, b, c| {
            let shift = 8 * (b & 3);
            c & !(255 << shift) | u32::from(f32::from_bits(a) as u8) << shift
        },
    }
    fn packs via map2(Ty::F16): (u32, u32) => u32 {
        V_PACK_B32_F16 = |a, b| a & 0xffff | b << 16,
    }
}

fn rare(inst: &Inst, level: Level) -> Option<Exec> {
    integers(inst, level)
        .or_else(|| doubles(inst, level))
        .or_else(|| singles(inst, level))
        .or_else(|| widen(inst, level))
        .or_else(|| widen_float(inst, level))
        .or_else(|| half_integers(inst, level))
        .or_else(|| integer_halves(inst, level))
        .or_else(|| norms(inst, level))
        .or_else(|| half_norms(inst, level))
        .or_else(|| bytes(inst, level))
        .or_else(|| packs(inst, level))
}

fn format_of(op: Op) -> Fnuz {
    match op {
        Op::V_CVT_F32_BF8 | Op::V_CVT_PK_F32_BF8 | Op::V_CVT_PK_BF8_F32 | Op::V_CVT_SR_BF8_F32 => {
            Fnuz::Bf8
        }
        _ => Fnuz::Fp8,
    }
}

/// f32 from an 8-bit float; SDWA selects the byte.
unsafe fn from_eight(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<1>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::B32, s.at(0));
        for (l, r) in r.iter_mut().enumerate() {
            *r = format_of(i.op).decode(at(a, l)).to_bits();
        }
    }
    if needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

/// Two f32 from two 8-bit floats; SDWA selects the word.
unsafe fn from_eight_pair(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<1>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::B32, s.at(0));
        for l in 0..LANES {
            let x = at(a, l);
            lo[l] = format_of(i.op).decode(x).to_bits();
            hi[l] = format_of(i.op).decode(x >> 8).to_bits();
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}

/// MODE bit 23 (FP16_OVFL) makes overflow saturate.
fn saturates(mode: u32) -> bool {
    mode >> 23 & 1 != 0
}

/// Two 8-bit floats into the half of the destination that `op_sel` names.
unsafe fn to_eight_pair(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    let (format, sat) = (format_of(i.op), saturates(w.mode));
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::F32, s.at(0));
        let b = src32(w, i, 1, Ty::F32, s.at(1));
        for (l, r) in r.iter_mut().enumerate() {
            let f = |p| format.encode(f32::from_bits(at(p, l)), None, sat);
            *r = f(a) | f(b) << 8;
        }
    }
    put16_half(w, i, &mut r);
    Flow::Next
}

/// One 8-bit float, stochastically rounded, into the byte that `op_sel` names.
unsafe fn to_eight_random(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    let (format, sat) = (format_of(i.op), saturates(w.mode));
    let shift = 8 * u32::from(i.op_sel >> 2 & 3);
    let old = w.vgpr[w.vreg(i.vdst) & 511].0;
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::F32, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(1));
        for (l, r) in r.iter_mut().enumerate() {
            let v = format.encode(f32::from_bits(at(a, l)), Some(at(b, l)), sat);
            *r = old[l] & !(255 << shift) | v << shift;
        }
    }
    put32(w, i, &r);
    Flow::Next
}

fn eight_bits(inst: &Inst) -> Option<Exec> {
    Some(match inst.op {
        Op::V_CVT_F32_FP8 | Op::V_CVT_F32_BF8 => from_eight,
        Op::V_CVT_PK_F32_FP8 | Op::V_CVT_PK_F32_BF8 => from_eight_pair,
        Op::V_CVT_PK_FP8_F32 | Op::V_CVT_PK_BF8_F32 => to_eight_pair,
        Op::V_CVT_SR_FP8_F32 | Op::V_CVT_SR_BF8_F32 => to_eight_random,
        Op::V_CVT_PKACCUM_U8_F32 => accumulate_byte,
        _ => return None,
    })
}

/// An f32 as a byte into the byte of the destination that source 1 names.
unsafe fn accumulate_byte(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    let old = w.vgpr[w.vreg(i.vdst) & 511].0;
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::F32, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(1));
        for (l, r) in r.iter_mut().enumerate() {
            let shift = 8 * (at(b, l) & 3);
            let v = u32::from(f32::from_bits(at(a, l)) as u8);
            *r = old[l] & !(255 << shift) | v << shift;
        }
    }
    put32(w, i, &r);
    Flow::Next
}
