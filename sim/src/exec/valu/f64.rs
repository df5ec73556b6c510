//! f64 arithmetic.

use rustc_apfloat::Float;

use super::float::{Arith, directed64};
use super::operand::{self, Scratch, Ty, put32, put64, src32, src64};
use super::ops;
use super::shape::{at, at64};
use crate::exec::convert::Round;
use crate::exec::{Env, Exec, Flow, Level};
use crate::inst::{Inst, flag};
use crate::wave::{LANES, Wave};

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    adds(inst, level)
        .or_else(|| muls(inst, level))
        .or_else(|| fmas(inst, level))
        .or_else(|| fmacs(inst, level))
        .or_else(|| minmax(inst, level))
        .or_else(|| singles(inst, level))
        .or_else(|| scaled(inst, level))
        .or_else(|| exponents(inst, level))
}

#[inline(always)]
fn is_nan(x: u64) -> bool {
    x & !(1 << 63) > 0x7ff0_0000_0000_0000
}

/// NaN result of an operation with these sources.
fn nan64(s: [u64; 3]) -> u64 {
    for x in s {
        if is_nan(x) {
            return x | 1 << 51;
        }
    }
    0x7ff8_0000_0000_0000
}

/// Replaces a denormal by zero of the same sign.
#[inline(always)]
fn flush64(x: u64) -> u64 {
    if x & 0x7ff0_0000_0000_0000 == 0 {
        x & 1 << 63
    } else {
        x
    }
}

/// Result of one lane, with the instruction's modifiers and MODE.
#[cold]
#[inline(never)]
fn lane_special(mode: u32, i: &Inst, kind: Arith, s: [u64; 3], f: &dyn Fn([u64; 3]) -> u64) -> u64 {
    let s = if mode & 0x40 == 0 { s.map(flush64) } else { s };
    let mut r = f(s);
    let round = Round::from_mode(mode >> 2);
    if round != Round::Nearest
        && !is_nan(r)
        && let Some(v) = directed64(kind, s, round)
    {
        r = v;
    }
    if is_nan(r) {
        r = nan64(s);
    }
    let flush = mode & 0x80 == 0;
    if flush {
        let x = f64::from_bits(r);
        r = flush64(
            match i.omod {
                1 => x * 2.0,
                2 => x * 4.0,
                3 => x * 0.5,
                _ => x,
            }
            .to_bits(),
        );
    }
    if i.has(flag::CLAMP) {
        let x = f64::from_bits(r);
        let c = if x > 0.0 { x.min(1.0) } else { 0.0 };
        if !x.is_nan() || mode & 0x100 != 0 {
            r = c.to_bits();
        }
    }
    r
}

/// f64 result from up to three sources. `count` sources are read; with `accumulate`, the third is the destination.
#[inline(always)]
unsafe fn double(
    w: &mut Wave,
    i: &Inst,
    (kind, count, accumulate): (Arith, usize, bool),
    f: impl Fn([u64; 3]) -> u64,
) -> Flow {
    let mut s = Scratch::<6>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    let special = w.mode & 0xcc != 0xc0 || i.omod != 0 || i.has(flag::CLAMP);
    let mode = w.mode;
    // SAFETY: sources are 64 lanes; the buffers of a source are neighbours.
    unsafe {
        let a = src64(w, i, 0, Ty::F64, s.at(0));
        let b = if count > 1 {
            src64(w, i, 1, Ty::F64, s.at(2))
        } else {
            a
        };
        let c = if accumulate {
            let d = w.vreg(i.vdst);
            (operand::lanes(w, d), operand::lanes(w, d + 1))
        } else if count > 2 {
            src64(w, i, 2, Ty::F64, s.at(4))
        } else {
            b
        };
        for l in 0..LANES {
            let x = [at64(a, l), at64(b, l), at64(c, l)];
            let mut v = f(x);
            if special || is_nan(v) {
                v = lane_special(mode, i, kind, x, &f);
            }
            (lo[l], hi[l]) = (v as u32, (v >> 32) as u32);
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}

#[inline(always)]
unsafe fn double1(w: &mut Wave, i: &Inst, _: &mut Env, _: (), f: impl Fn((f64,)) -> f64) -> Flow {
    let g = |x: [u64; 3]| f((f64::from_bits(x[0]),)).to_bits();
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { double(w, i, (Arith::Exact, 1, false), g) }
}

#[inline(always)]
unsafe fn double2(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    kind: Arith,
    f: impl Fn((f64, f64)) -> f64,
) -> Flow {
    let g = |x: [u64; 3]| f((f64::from_bits(x[0]), f64::from_bits(x[1]))).to_bits();
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { double(w, i, (kind, 2, false), g) }
}

#[inline(always)]
unsafe fn double3(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    accumulate: bool,
    f: impl Fn((f64, f64, f64)) -> f64,
) -> Flow {
    let g = |x: [u64; 3]| {
        f((
            f64::from_bits(x[0]),
            f64::from_bits(x[1]),
            f64::from_bits(x[2]),
        ))
        .to_bits()
    };
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { double(w, i, (Arith::Fma, 3, accumulate), g) }
}

/// The smaller or larger of two; a number wins over a quiet NaN.
#[inline(always)]
fn choose(a: f64, b: f64, larger: bool) -> f64 {
    let key = |x: f64| {
        let k = x.to_bits() as i64;
        k ^ ((k >> 63) as u64 >> 1) as i64
    };
    let signalling = |x: f64| x.is_nan() && x.to_bits() >> 51 & 1 == 0;
    if a.is_nan() || b.is_nan() {
        return if signalling(a) || (a.is_nan() && b.is_nan()) {
            a
        } else if signalling(b) || a.is_nan() {
            b
        } else {
            a
        };
    }
    if (key(a) > key(b)) == larger { a } else { b }
}

#[inline(always)]
fn fract(x: f64) -> f64 {
    let r = x - x.floor();
    if r >= 1.0 { 1.0f64.next_down() } else { r }
}

/// `x * 2^n`, rounded once.
pub(crate) fn ldexp64(x: f64, n: i32) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x + x;
    }
    Float::scalbn(
        rustc_apfloat::ieee::Double::from_bits(x.to_bits().into()),
        n.clamp(-5000, 5000),
    )
    .to_bits_f64()
}

/// Reads an apfloat as the host's f64.
trait ToHost {
    fn to_bits_f64(self) -> f64;
}

impl ToHost for rustc_apfloat::ieee::Double {
    fn to_bits_f64(self) -> f64 {
        f64::from_bits(self.to_bits() as u64)
    }
}

/// Mantissa in 0.5..1 and exponent.
fn frexp(x: f64) -> (f64, i32) {
    if x == 0.0 || !x.is_finite() {
        return (x, 0);
    }
    let (y, shift) = if x.abs() < f64::MIN_POSITIVE {
        (x * 18_014_398_509_481_984.0, 54)
    } else {
        (x, 0)
    };
    let bits = y.to_bits();
    let e = (bits >> 52 & 0x7ff) as i32 - 1022 - shift;
    (f64::from_bits(bits & !(0x7ff << 52) | 1022 << 52), e)
}

#[inline(always)]
unsafe fn exponent(w: &mut Wave, i: &Inst, _: &mut Env, _: (), f: impl Fn((f64,)) -> u32) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src64(w, i, 0, Ty::F64, s.at(0));
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((f64::from_bits(at64(a, l)),));
        }
    }
    put32(w, i, &r);
    Flow::Next
}

#[inline(always)]
unsafe fn scale(w: &mut Wave, i: &Inst, _: &mut Env, _: (), f: impl Fn((f64, i32)) -> f64) -> Flow {
    let mut s = Scratch::<3>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    let mode = w.mode;
    // SAFETY: sources are 64 lanes; the buffers of a source are neighbours.
    unsafe {
        let a = src64(w, i, 0, Ty::F64, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(2));
        for l in 0..LANES {
            let (x, n) = (at64(a, l), at(b, l) as i32);
            let v = lane_special(mode, i, Arith::Exact, [x, x, x], &|s| {
                f((f64::from_bits(s[0]), n)).to_bits()
            });
            (lo[l], hi[l]) = (v as u32, (v >> 32) as u32);
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}

ops! { rare
    fn adds via double2(Arith::Add): (f64, f64) => f64 {
        V_ADD_F64 = |a, b| a + b,
    }
    fn muls via double2(Arith::Mul): (f64, f64) => f64 {
        V_MUL_F64 = |a, b| a * b,
    }
    fn fmas via double3(false): (f64, f64, f64) => f64 {
        V_FMA_F64 = |a, b, c| a.mul_add(b, c),
    }
    fn fmacs via double3(true): (f64, f64, f64) => f64 {
        V_FMAC_F64 = |a, b, c| a.mul_add(b, c),
    }
    fn minmax via double2(Arith::Exact): (f64, f64) => f64 {
        V_MIN_F64 = |a, b| choose(a, b, false),
        V_MAX_F64 = |a, b| choose(a, b, true),
    }
    fn singles via double1(): (f64,) => f64 {
        V_RNDNE_F64 = |a| a.round_ties_even(),
        V_FLOOR_F64 = |a| a.floor(),
        V_CEIL_F64 = |a| a.ceil(),
        V_TRUNC_F64 = |a| a.trunc(),
        V_FRACT_F64 = |a| fract(a),
        V_RCP_F64 = |a| 1.0 / a,
        V_RSQ_F64 = |a| 1.0 / a.sqrt(),
        V_SQRT_F64 = |a| a.sqrt(),
        V_FREXP_MANT_F64 = |a| frexp(a).0,
    }
    fn scaled via scale(): (f64, i32) => f64 {
        V_LDEXP_F64 = |a, n| ldexp64(a, n),
    }
    fn exponents via exponent(): (f64,) => u32 {
        V_FREXP_EXP_I32_F64 = |a| frexp(a).1 as u32,
    }
}
