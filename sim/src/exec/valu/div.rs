//! Correctly rounded division in three steps: `v_div_scale`, `v_div_fmas`, `v_div_fixup`.

use rustc_apfloat::ieee::{Double, Quad};
use rustc_apfloat::{Float, FloatConvert, Round as ApRound, Status};

use super::f64::ldexp64;
use super::float::{finish32, needs_finish32};
use super::operand::{Scratch, Ty, pack_mask, put32, put64, src32, src64, written_lanes};
use super::shape::{at, at64};
use crate::exec::convert::{Round, f64_to_f32_round};
use crate::exec::{Env, Exec, Flow, Level, leveled_narrow};
use crate::inst::{Inst, NONE, VCC};
use crate::op::Op;
use crate::wave::{LANES, Wave};

/// Limits that the steps use for a format.
struct Format {
    /// Difference of exponents from which the quotient is near overflow.
    large: i32,
    /// Exponent of the scale.
    scale: i32,
    /// Biased exponent up to which a numerator is tiny.
    tiny: i32,
    /// Smallest exponent of a normal number.
    min: i32,
}

const F32: Format = Format {
    large: 96,
    scale: 64,
    tiny: 23,
    min: -126,
};
const F64: Format = Format {
    large: 768,
    scale: 128,
    tiny: 53,
    min: -1022,
};

/// Biased exponent of an f32 that is held as f64, or of an f64.
fn biased(x: f64, format: &Format) -> i32 {
    if x == 0.0 {
        return 0;
    }
    let e = if x.abs() < f64::MIN_POSITIVE {
        -1023
    } else {
        (x.to_bits() >> 52 & 0x7ff) as i32 - 1023
    };
    if e == 1024 {
        return 2 * (2 - format.min) - 1;
    }
    (e + 1 - format.min).max(0)
}

/// Whether a quotient is below the normal numbers; exponents decide, mantissas break the tie.
fn quotient_denormal(n: f64, d: f64, format: &Format) -> bool {
    let q = (n / d).abs();
    if format.min == -126 {
        q < f64::from(f32::MIN_POSITIVE)
    } else {
        q < f64::MIN_POSITIVE
    }
}

/// Scales `s0`, which is the denominator `d` or the numerator `n`. The second result: whether `v_div_fmas` must scale
/// back.
fn div_scale(s0: f64, d: f64, n: f64, format: &Format) -> (f64, bool) {
    let is_d = s0.to_bits() == d.to_bits();
    let is_n = s0.to_bits() == n.to_bits();
    let up = || ldexp64(s0, format.scale);
    if n == 0.0 || d == 0.0 {
        return (f64::NAN, false);
    }
    if n.is_nan() || d.is_nan() || n.is_infinite() || d.is_infinite() {
        return (s0, false);
    }
    let (en, ed) = (biased(n, format), biased(d, format));
    let inverse_denormal = quotient_denormal(1.0, d, format);
    let result_denormal = quotient_denormal(n, d, format);
    if en - ed >= format.large {
        return (if is_d { up() } else { s0 }, true);
    }
    if ed == 0 {
        return (up(), false);
    }
    if inverse_denormal && result_denormal {
        let down = ldexp64(s0, -format.scale);
        return (if is_d { down } else { s0 }, true);
    }
    if inverse_denormal {
        return (ldexp64(s0, -format.scale), false);
    }
    if result_denormal {
        return (if is_n { up() } else { s0 }, true);
    }
    if en <= format.tiny {
        return (up(), false);
    }
    (s0, false)
}

unsafe fn scale32(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<3>::new();
    let (mut r, mut m) = ([0; LANES], [0u8; LANES]);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::F32, s.at(0));
        let b = src32(w, i, 1, Ty::F32, s.at(1));
        let c = src32(w, i, 2, Ty::F32, s.at(2));
        for l in 0..LANES {
            let f = |p| f64::from(f32::from_bits(at(p, l)));
            let (v, post) = div_scale(f(a), f(b), f(c), &F32);
            r[l] = if v.is_nan() {
                0x7fc0_0000
            } else {
                (v as f32).to_bits()
            };
            m[l] = u8::from(post);
        }
    }
    put_post(w, i, &m);
    put32(w, i, &r);
    Flow::Next
}

unsafe fn scale64(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<6>::new();
    let (mut lo, mut hi, mut m) = ([0; LANES], [0; LANES], [0u8; LANES]);
    // SAFETY: sources are 64 lanes; the buffers of a source are neighbours.
    unsafe {
        let a = src64(w, i, 0, Ty::F64, s.at(0));
        let b = src64(w, i, 1, Ty::F64, s.at(2));
        let c = src64(w, i, 2, Ty::F64, s.at(4));
        for l in 0..LANES {
            let f = |p| f64::from_bits(at64(p, l));
            let (v, post) = div_scale(f(a), f(b), f(c), &F64);
            let v = if v.is_nan() {
                0x7ff8 << 48
            } else {
                v.to_bits()
            };
            (lo[l], hi[l]) = (v as u32, (v >> 32) as u32);
            m[l] = u8::from(post);
        }
    }
    put_post(w, i, &m);
    put64(w, i, &lo, &hi);
    Flow::Next
}

fn put_post(w: &mut Wave, i: &Inst, m: &[u8; LANES]) {
    let lanes = written_lanes(w, i);
    let sdst = if i.sdst == NONE { VCC } else { i.sdst };
    w.set_s64(sdst, pack_mask(m) & lanes);
}

/// `a * b + c`, with the scale removed in the lanes of VCC; rounded once.
#[inline(always)]
unsafe fn fmas32(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    let (vcc, round) = (w.vcc(), Round::from_mode(w.mode));
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::F32, s.at(0));
        let b = src32(w, i, 1, Ty::F32, s.at(1));
        let c = src32(w, i, 2, Ty::F32, s.at(2));
        for (l, r) in r.iter_mut().enumerate() {
            let [x, y, z] = [a, b, c].map(|p| f32::from_bits(at(p, l)));
            let v = if vcc >> l & 1 != 0 {
                let up = z.to_bits() >> 23 & 255 > 127;
                let scaled = fma_odd(x, y, z) * if up { TWO_64 } else { 1.0 / TWO_64 };
                f64_to_f32_round(scaled, round)
            } else if round == Round::Nearest {
                x.mul_add(y, z)
            } else {
                f64_to_f32_round(fma_odd(x, y, z), round)
            };
            *r = if v.is_nan() {
                super::float::nan32([x.to_bits(), y.to_bits(), z.to_bits()])
            } else {
                v.to_bits()
            };
        }
    }
    if needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

const TWO_64: f64 = 18_446_744_073_709_551_616.0;

/// `a * b + c` in f64, rounded to odd: rounding it to f32 is the single rounding of the exact value.
#[inline(always)]
fn fma_odd(a: f32, b: f32, c: f32) -> f64 {
    crate::exec::convert::fma_f16_odd(a, b, c)
}

const TWO_128: f64 = TWO_64 * TWO_64;

/// `(a * b + c) / 2^128`, rounded once even though the result is denormal.
#[cold]
fn fma_down(a: f64, b: f64, c: f64) -> f64 {
    let mut exact = false;
    let [a, b, c] = [a, b, c].map(|x| -> Quad {
        FloatConvert::convert(Double::from_bits(x.to_bits().into()), &mut exact).value
    });
    // Rounded to odd, with far more bits than the result has.
    let sum = a.mul_add_r(b, c, ApRound::TowardZero);
    let odd = u128::from(sum.status.contains(Status::INEXACT));
    let scaled = Quad::from_bits(sum.value.to_bits() | odd).scalbn(-128);
    let result: Double = scaled.convert(&mut exact).value;
    f64::from_bits(result.to_bits() as u64)
}

unsafe fn fmas64(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<6>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    let vcc = w.vcc();
    // SAFETY: sources are 64 lanes; the buffers of a source are neighbours.
    unsafe {
        let a = src64(w, i, 0, Ty::F64, s.at(0));
        let b = src64(w, i, 1, Ty::F64, s.at(2));
        let c = src64(w, i, 2, Ty::F64, s.at(4));
        for l in 0..LANES {
            let [x, y, z] = [a, b, c].map(|p| f64::from_bits(at64(p, l)));
            let fused = x.mul_add(y, z);
            let v = if vcc >> l & 1 == 0 {
                fused
            } else if z.to_bits() >> 52 & 0x7ff > 1023 {
                ldexp64(fused, 128)
            } else if fused.abs() < TWO_128 * f64::MIN_POSITIVE * 2.0 {
                fma_down(x, y, z)
            } else {
                ldexp64(fused, -128)
            };
            let v = if v.is_nan() {
                0x7ff8 << 48
            } else {
                v.to_bits()
            };
            (lo[l], hi[l]) = (v as u32, (v >> 32) as u32);
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}

/// Quotient `q` of `n / d`, with special cases corrected.
fn div_fixup(q: f64, d: f64, n: f64, format: &Format) -> f64 {
    let negative = d.is_sign_negative() != n.is_sign_negative();
    if n.is_nan() {
        return n;
    }
    if d.is_nan() {
        return d;
    }
    if (d == 0.0 && n == 0.0) || (d.is_infinite() && n.is_infinite()) {
        return -f64::NAN;
    }
    let below = if format.min == -126 { -150 } else { -1075 };
    let magnitude = if d == 0.0 || n.is_infinite() {
        f64::INFINITY
    } else if d.is_infinite() || n == 0.0 || biased(n, format) - biased(d, format) < below {
        0.0
    } else if q.is_nan() {
        // The steps went through infinities: the quotient of finite numbers has overflowed.
        f64::INFINITY
    } else {
        q.abs()
    };
    if negative { -magnitude } else { magnitude }
}

unsafe fn fixup32(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::F32, s.at(0));
        let b = src32(w, i, 1, Ty::F32, s.at(1));
        let c = src32(w, i, 2, Ty::F32, s.at(2));
        for (l, r) in r.iter_mut().enumerate() {
            let f = |p| f64::from(f32::from_bits(at(p, l)));
            let (q, d, n) = (f(a), f(b), f(c));
            let v = div_fixup(q, d, n, &F32);
            *r = if !v.is_nan() {
                (v as f32).to_bits()
            } else if n.is_nan() || d.is_nan() {
                super::float::nan32([at(c, l), at(b, l), 0])
            } else {
                0xffc0_0000
            };
        }
    }
    if needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

unsafe fn fixup64(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<6>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    // SAFETY: sources are 64 lanes; the buffers of a source are neighbours.
    unsafe {
        let a = src64(w, i, 0, Ty::F64, s.at(0));
        let b = src64(w, i, 1, Ty::F64, s.at(2));
        let c = src64(w, i, 2, Ty::F64, s.at(4));
        for l in 0..LANES {
            let f = |p| f64::from_bits(at64(p, l));
            let v = div_fixup(f(a), f(b), f(c), &F64).to_bits();
            let nan = v & !(1 << 63) > 0x7ff0_0000_0000_0000;
            let v = if nan { v | 1 << 51 } else { v };
            (lo[l], hi[l]) = (v as u32, (v >> 32) as u32);
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}

leveled_narrow!(fn fmas32_exec = fmas32);

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    Some(match inst.op {
        Op::V_DIV_SCALE_F32 => scale32,
        Op::V_DIV_SCALE_F64 => scale64,
        Op::V_DIV_FMAS_F32 => fmas32_exec(level),
        Op::V_DIV_FMAS_F64 => fmas64,
        Op::V_DIV_FIXUP_F32 => fixup32,
        Op::V_DIV_FIXUP_F64 => fixup64,
        _ => return None,
    })
}
