//! f16 arithmetic. Values are computed in f64, where sums and products of f16 are exact, and
//! rounded to f16 once.

use super::f32::{max32, min32};
use super::math;
use super::operand::{self, Scratch, Ty, put16_half, put32, src32};
use super::ops;
use super::shape::at;
use crate::exec::convert::{
    Round, f16_to_f32, f32_to_f16, f32_to_f16_round, f64_to_f32_odd, fma_f16_odd,
};
use crate::exec::{Env, Exec, Flow, Level};
use crate::inst::{Inst, flag};
use crate::wave::{LANES, Wave};

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    unary(inst, level)
        .or_else(|| binary(inst, level))
        .or_else(|| ternary(inst, level))
        .or_else(|| legacy(inst, level))
        .or_else(|| accumulate(inst, level))
        .or_else(|| bits(inst, level))
        .or_else(|| scaled(inst, level))
        .or_else(|| exponents(inst, level))
}

/// f16 settings of MODE and the instruction: denormals, rounding, clamp.
#[derive(Clone, Copy)]
pub(crate) struct Half {
    flush_in: bool,
    flush_out: bool,
    round: Round,
    omod: u8,
    clamp: bool,
    dx10: bool,
}

impl Half {
    #[inline(always)]
    pub(crate) fn of(w: &Wave, i: &Inst) -> Half {
        Half {
            flush_in: w.mode & 0x40 == 0,
            flush_out: w.mode & 0x80 == 0,
            round: Round::from_mode(w.mode >> 2),
            omod: i.omod,
            clamp: i.has(flag::CLAMP),
            dx10: w.mode & 0x100 != 0,
        }
    }

    /// The value of a source.
    #[inline(always)]
    pub(crate) fn load(self, x: u32) -> f32 {
        f16_to_f32(if self.flush_in { flush16(x) } else { x })
    }

    /// Rounds a result.
    #[inline(always)]
    pub(crate) fn store(self, x: f64) -> u32 {
        let mut x = x;
        if self.flush_out {
            x *= match self.omod {
                1 => 2.0,
                2 => 4.0,
                3 => 0.5,
                _ => 1.0,
            };
        }
        let v = f64_to_f32_odd(x);
        let r = if self.round == Round::Nearest {
            f32_to_f16(v)
        } else {
            f32_to_f16_round(v, self.round)
        };
        let r = if v.is_nan() { 0x7e00 } else { r };
        let r = if self.flush_out { flush16(r) } else { r };
        if self.clamp { self.clamped(r) } else { r }
    }

    /// Clamps to 0..1.
    #[inline(always)]
    pub(crate) fn clamped(self, r: u32) -> u32 {
        match r & 0xffff {
            0..=0x3c00 => r,
            0x3c01..=0x7c00 => 0x3c00,
            0x8000..=0xfc00 => 0,
            _ if self.dx10 => 0,
            _ => r,
        }
    }
}

/// Replaces a denormal by zero of the same sign.
#[inline(always)]
fn flush16(x: u32) -> u32 {
    if x & 0x7c00 == 0 { x & 0x8000 } else { x }
}

/// f16 result from up to three f16 sources. `keep` keeps the other half of the destination; `add_to` makes it the third
/// source.
#[inline(always)]
unsafe fn half(
    w: &mut Wave,
    i: &Inst,
    (count, keep, add_to): (usize, bool, bool),
    f: impl Fn(Half, [u32; 3]) -> u32,
) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    let h = Half::of(w, i);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::F16, s.at(0));
        let b = if count > 1 {
            src32(w, i, 1, Ty::F16, s.at(1))
        } else {
            a
        };
        let c = if add_to {
            operand::lanes(w, w.vreg(i.vdst))
        } else if count > 2 {
            src32(w, i, 2, Ty::F16, s.at(2))
        } else {
            b
        };
        for (l, r) in r.iter_mut().enumerate() {
            *r = f(h, [at(a, l), at(b, l), at(c, l)]);
        }
    }
    if keep {
        put16_half(w, i, &mut r);
    } else {
        put32(w, i, &r);
    }
    Flow::Next
}

#[inline(always)]
unsafe fn half1(w: &mut Wave, i: &Inst, _: &mut Env, _: (), f: impl Fn((f32,)) -> f64) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { half(w, i, (1, false, false), |h, x| h.store(f((h.load(x[0]),)))) }
}

#[inline(always)]
unsafe fn half2(w: &mut Wave, i: &Inst, _: &mut Env, _: (), f: impl Fn((f32, f32)) -> f64) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe {
        half(w, i, (2, false, false), |h, x| {
            h.store(f((h.load(x[0]), h.load(x[1]))))
        })
    }
}

#[inline(always)]
unsafe fn half3(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    (keep, add_to): (bool, bool),
    f: impl Fn((f32, f32, f32)) -> f64,
) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe {
        half(w, i, (3, keep, add_to), |h, x| {
            h.store(f((h.load(x[0]), h.load(x[1]), h.load(x[2]))))
        })
    }
}

/// Minima and maxima on f32 bits, which order as f16 does.
#[inline(always)]
unsafe fn select(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    keep: bool,
    f: impl Fn((u32, u32, u32)) -> u32,
) -> Flow {
    let count = if keep { 3 } else { 2 };
    // SAFETY: the contract of `Exec` is passed on.
    unsafe {
        half(w, i, (count, keep, false), |h, x| {
            let v = x.map(|x| h.load(x).to_bits());
            let r = f32_to_f16(f32::from_bits(f((v[0], v[1], v[2]))));
            if h.clamp { h.clamped(r) } else { r }
        })
    }
}

/// `a * b + c`, the product rounded to f16 first.
#[inline(always)]
fn mad(a: f32, b: f32, c: f32) -> f64 {
    let p = f16_to_f32(f32_to_f16(a * b));
    f64::from(p) + f64::from(c)
}

#[inline(always)]
fn med3(a: u32, b: u32, c: u32) -> u32 {
    let nan = |x: u32| x & 0x7fff_ffff > 0x7f80_0000;
    if nan(a) || nan(b) || nan(c) {
        return min32(min32(a, b), c);
    }
    max32(min32(a, b), min32(max32(a, b), c))
}

/// `x * 2^n` by the low 16 bits of `n`.
#[inline(always)]
fn ldexp(x: f32, n: i16) -> f64 {
    let n = i64::from(n).clamp(-100, 100);
    f64::from(x) * f64::from_bits(((1023 + n) as u64) << 52)
}

#[inline(always)]
unsafe fn scale(w: &mut Wave, i: &Inst, _: &mut Env, _: (), f: impl Fn((f32, i16)) -> f64) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe {
        let mut s = Scratch::<2>::new();
        let mut r = [0; LANES];
        let h = Half::of(w, i);
        let a = src32(w, i, 0, Ty::F16, s.at(0));
        let b = src32(w, i, 1, Ty::B16, s.at(1));
        for (l, r) in r.iter_mut().enumerate() {
            *r = h.store(f((h.load(at(a, l)), at(b, l) as i16)));
        }
        put32(w, i, &r);
    }
    Flow::Next
}

#[inline(always)]
unsafe fn exponent(w: &mut Wave, i: &Inst, _: &mut Env, _: (), f: impl Fn((f32,)) -> u32) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { half(w, i, (1, false, false), |h, x| f((h.load(x[0]),))) }
}

/// Mantissa in 0.5..1 and exponent of a value that came from f16.
#[inline(always)]
fn frexp(x: f32) -> (f64, u32) {
    let bits = x.to_bits();
    if x == 0.0 || !x.is_finite() {
        return (f64::from(x), 0);
    }
    let mantissa = f32::from_bits(bits & 0x807f_ffff | 0x3f00_0000);
    let e = (bits >> 23 & 255) as i32 - 126;
    (f64::from(mantissa), e as u32 & 0xffff)
}

/// Quotient `q` of `n / d`, with special cases corrected.
#[inline(always)]
fn div_fixup(q: f32, d: f32, n: f32) -> f64 {
    let negative = d.is_sign_negative() != n.is_sign_negative();
    let undefined = (d == 0.0 && n == 0.0) || (d.is_infinite() && n.is_infinite());
    if n.is_nan() || d.is_nan() || undefined {
        return f64::NAN;
    }
    let magnitude = if d == 0.0 || n.is_infinite() {
        f64::INFINITY
    } else if d.is_infinite() || n == 0.0 {
        0.0
    } else {
        f64::from(q.abs())
    };
    if negative { -magnitude } else { magnitude }
}

ops! { rare
    fn unary via half1(): (f32,) => f64 {
        V_RNDNE_F16 = |a| a.round_ties_even().into(),
        V_FLOOR_F16 = |a| a.floor().into(),
        V_CEIL_F16 = |a| a.ceil().into(),
        V_TRUNC_F16 = |a| a.trunc().into(),
        V_FRACT_F16 = |a| f64::from(a - a.floor()).min(0.99951171875),
        V_RCP_F16 = |a| 1.0 / f64::from(a),
        V_RSQ_F16 = |a| 1.0 / f64::from(a).sqrt(),
        V_SQRT_F16 = |a| f64::from(a).sqrt(),
        V_EXP_F16 = |a| math::exp2(a).into(),
        V_LOG_F16 = |a| math::log2(a).into(),
        V_SIN_F16 = |a| math::sin_turns(a).into(),
        V_COS_F16 = |a| math::cos_turns(a).into(),
        V_FREXP_MANT_F16 = |a| frexp(a).0,
    }
    fn binary via half2(): (f32, f32) => f64 {
        V_ADD_F16 = |a, b| f64::from(a) + f64::from(b),
        V_SUB_F16 = |a, b| f64::from(a) - f64::from(b),
        V_SUBREV_F16 = |a, b| f64::from(b) - f64::from(a),
        V_MUL_F16 = |a, b| f64::from(a) * f64::from(b),
    }
    fn ternary via half3(true, false): (f32, f32, f32) => f64 {
        V_FMA_F16 = |a, b, c| fma_f16_odd(a, b, c),
        V_MAD_F16 = |a, b, c| mad(a, b, c),
        V_DIV_FIXUP_F16 = |a, b, c| div_fixup(a, b, c),
    }
    fn legacy via half3(false, false): (f32, f32, f32) => f64 {
        V_FMA_LEGACY_F16 = |a, b, c| fma_f16_odd(a, b, c),
        V_MAD_LEGACY_F16 = |a, b, c| mad(a, b, c),
        V_DIV_FIXUP_LEGACY_F16 = |a, b, c| div_fixup(a, b, c),
    }
    fn accumulate via half3(false, true): (f32, f32, f32) => f64 {
        V_MAC_F16 = |a, b, c| mad(a, b, c),
    }
    fn minmax via select(false): (u32, u32, u32) => u32 {
        V_MIN_F16 = |a, b, _c| min32(a, b),
        V_MAX_F16 = |a, b, _c| max32(a, b),
    }
    fn minmax3 via select(true): (u32, u32, u32) => u32 {
        V_MIN3_F16 = |a, b, c| min32(min32(a, b), c),
        V_MAX3_F16 = |a, b, c| max32(max32(a, b), c),
        V_MED3_F16 = |a, b, c| med3(a, b, c),
    }
    fn scaled via scale(): (f32, i16) => f64 {
        V_LDEXP_F16 = |a, n| ldexp(a, n),
    }
    fn exponents via exponent(): (f32,) => u32 {
        V_FREXP_EXP_I16_F16 = |a| frexp(a).1,
    }
}

fn bits(inst: &Inst, level: Level) -> Option<Exec> {
    minmax(inst, level).or_else(|| minmax3(inst, level))
}
