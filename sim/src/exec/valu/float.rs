//! Shared handling of f32 instructions: MODE (rounding, denormals), omod, clamp and NaNs.

use rustc_apfloat::ieee::{Double, Single};
use rustc_apfloat::{Float, Round as ApRound};

use super::operand::{self, Scratch, Ty, put32, src32};
use super::shape::at;
use crate::exec::convert::Round;
use crate::exec::{Env, Flow};
use crate::inst::{Inst, flag};
use crate::wave::{LANES, Wave};

/// An operation whose result depends on MODE's rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Arith {
    /// The result does not depend on rounding, or is an approximation anyway.
    Exact,
    /// `a + b`.
    Add,
    /// `a - b`.
    Sub,
    /// `b - a`.
    SubRev,
    /// `a * b`.
    Mul,
    /// `a * b + c`, rounded once.
    Fma,
}

/// Whether MODE differs from round to nearest with f32 denormals.
#[inline(always)]
pub(crate) fn special_mode32(mode: u32) -> bool {
    mode & 0x33 != 0x30
}

/// Flushes f32 denormals of a source if MODE requires it.
///
/// # Safety
/// `p` must point to 64 lanes, `buf` to 64 writable lanes.
#[cold]
#[inline(never)]
pub(crate) unsafe fn flush_source(mode: u32, p: *const u32, buf: *mut u32) -> *const u32 {
    if mode & 0x10 != 0 {
        return p;
    }
    for l in 0..LANES {
        // SAFETY: `l` is below 64.
        unsafe { buf.add(l).write(flush32(*p.add(l))) };
    }
    buf
}

/// Replaces a denormal by zero of the same sign.
#[inline(always)]
pub(crate) fn flush32(x: u32) -> u32 {
    if x & 0x7f80_0000 == 0 {
        x & 0x8000_0000
    } else {
        x
    }
}

/// NaN result of an operation with these sources: the first NaN among them, made quiet, or the default NaN.
pub(crate) fn nan32(s: [u32; 3]) -> u32 {
    for x in s {
        if x & 0x7fff_ffff > 0x7f80_0000 {
            return x | 0x40_0000;
        }
    }
    0x7fc0_0000
}

#[cold]
#[inline(never)]
unsafe fn fix_nans(r: &mut [u32; LANES], s: [*const u32; 3]) {
    for (l, r) in r.iter_mut().enumerate() {
        if *r & 0x7fff_ffff > 0x7f80_0000 {
            // SAFETY: sources are 64 lanes.
            *r = nan32(unsafe { [at(s[0], l), at(s[1], l), at(s[2], l)] });
        }
    }
}

fn ap_round(round: Round) -> ApRound {
    match round {
        Round::Nearest => ApRound::NearestTiesToEven,
        Round::Up => ApRound::TowardPositive,
        Round::Down => ApRound::TowardNegative,
        Round::Zero => ApRound::TowardZero,
    }
}

/// One f32 operation in any rounding direction.
pub(crate) fn directed32(kind: Arith, s: [u32; 3], round: Round) -> Option<u32> {
    let f = |x: u32| Single::from_bits(x.into());
    let (a, b, c, r) = (f(s[0]), f(s[1]), f(s[2]), ap_round(round));
    let v = match kind {
        Arith::Exact => return None,
        Arith::Add => a.add_r(b, r),
        Arith::Sub => a.sub_r(b, r),
        Arith::SubRev => b.sub_r(a, r),
        Arith::Mul => a.mul_r(b, r),
        Arith::Fma => a.mul_add_r(b, c, r),
    };
    Some(v.value.to_bits() as u32)
}

/// One f64 operation in any rounding direction.
pub(crate) fn directed64(kind: Arith, s: [u64; 3], round: Round) -> Option<u64> {
    let f = |x: u64| Double::from_bits(x.into());
    let (a, b, c, r) = (f(s[0]), f(s[1]), f(s[2]), ap_round(round));
    let v = match kind {
        Arith::Exact => return None,
        Arith::Add => a.add_r(b, r),
        Arith::Sub => a.sub_r(b, r),
        Arith::SubRev => b.sub_r(a, r),
        Arith::Mul => a.mul_r(b, r),
        Arith::Fma => a.mul_add_r(b, c, r),
    };
    Some(v.value.to_bits() as u64)
}

/// Clamps to 0..1; with DX10_CLAMP a NaN gives 0.
#[inline(always)]
pub(crate) fn clamp32(x: f32, dx10: bool) -> f32 {
    if x.is_nan() {
        return if dx10 { 0.0 } else { x };
    }
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

#[inline(always)]
pub(crate) fn omod32(x: f32, omod: u8) -> f32 {
    match omod {
        1 => x * 2.0,
        2 => x * 4.0,
        3 => x * 0.5,
        _ => x,
    }
}

/// Finishes a result: directed rounding, output denormals, omod, clamp.
///
/// # Safety
/// Sources must point to 64 lanes.
#[cold]
#[inline(never)]
unsafe fn finish(mode: u32, i: &Inst, kind: Arith, s: [*const u32; 3], r: &mut [u32; LANES]) {
    let round = Round::from_mode(mode);
    if round != Round::Nearest {
        for (l, r) in r.iter_mut().enumerate() {
            // SAFETY: sources are 64 lanes.
            let lane = unsafe { [at(s[0], l), at(s[1], l), at(s[2], l)] };
            if *r & 0x7fff_ffff <= 0x7f80_0000
                && let Some(v) = directed32(kind, lane, round)
            {
                *r = v;
            }
        }
    }
    finish32(mode, i, r);
}

/// Applies output denormals, omod and clamp to an f32 result.
#[cold]
#[inline(never)]
pub(crate) fn finish32(mode: u32, i: &Inst, r: &mut [u32; LANES]) {
    let flush = mode & 0x20 == 0;
    // Output modifiers work only where denormals are flushed.
    let omod = if flush { i.omod } else { 0 };
    for r in r.iter_mut() {
        let mut x = f32::from_bits(*r);
        if omod != 0 {
            x = omod32(x, omod);
        }
        if flush {
            x = f32::from_bits(flush32(x.to_bits()));
        }
        if i.has(flag::CLAMP) {
            x = clamp32(x, mode & 0x100 != 0);
        }
        *r = x.to_bits();
    }
}

/// Whether the result needs [`finish32`].
#[inline(always)]
pub(crate) fn needs_finish32(mode: u32, i: &Inst) -> bool {
    special_mode32(mode) || i.omod != 0 || i.has(flag::CLAMP)
}

/// f32 from one source; `f` works on f32 values.
#[inline(always)]
pub(crate) unsafe fn float1(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((f32,)) -> f32,
) -> Flow {
    let mut s = Scratch::<1>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, Ty::F32, s.at(0));
        if special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
        }
        let mut bad = 0;
        for (l, r) in r.iter_mut().enumerate() {
            let v = f((f32::from_bits(at(a, l)),));
            bad |= u32::from(v.is_nan());
            *r = v.to_bits();
        }
        if bad != 0 {
            fix_nans(&mut r, [a; 3]);
        }
    }
    if needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

/// f32 from one source; `f` works on bits and handles NaNs itself.
#[inline(always)]
pub(crate) unsafe fn bits2(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((u32, u32)) -> u32,
) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, Ty::F32, s.at(0));
        let mut b = src32(w, i, 1, Ty::F32, s.at(1));
        if special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
            b = flush_source(w.mode, b, s.at(1));
        }
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((at(a, l), at(b, l)));
        }
    }
    if needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

/// f32 from three sources; `f` works on bits and handles NaNs itself.
#[inline(always)]
pub(crate) unsafe fn bits3(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((u32, u32, u32)) -> u32,
) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, Ty::F32, s.at(0));
        let mut b = src32(w, i, 1, Ty::F32, s.at(1));
        let mut c = src32(w, i, 2, Ty::F32, s.at(2));
        if special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
            b = flush_source(w.mode, b, s.at(1));
            c = flush_source(w.mode, c, s.at(2));
        }
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((at(a, l), at(b, l), at(c, l)));
        }
    }
    if needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}

/// f32 from two sources.
#[inline(always)]
pub(crate) unsafe fn float2(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    kind: Arith,
    f: impl Fn((f32, f32)) -> f32,
) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, Ty::F32, s.at(0));
        let mut b = src32(w, i, 1, Ty::F32, s.at(1));
        if special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
            b = flush_source(w.mode, b, s.at(1));
        }
        let mut bad = 0;
        for (l, r) in r.iter_mut().enumerate() {
            let v = f((f32::from_bits(at(a, l)), f32::from_bits(at(b, l))));
            bad |= u32::from(v.is_nan());
            *r = v.to_bits();
        }
        if bad != 0 {
            fix_nans(&mut r, [a, b, b]);
        }
        if needs_finish32(w.mode, i) {
            finish(w.mode, i, kind, [a, b, b], &mut r);
        }
    }
    put32(w, i, &r);
    Flow::Next
}

/// f32 from three sources, or from two and the old destination.
#[inline(always)]
pub(crate) unsafe fn float3(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    (kind, accumulate): (Arith, bool),
    f: impl Fn((f32, f32, f32)) -> f32,
) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, Ty::F32, s.at(0));
        let mut b = src32(w, i, 1, Ty::F32, s.at(1));
        let mut c = if accumulate {
            operand::lanes(w, w.vreg(i.vdst))
        } else {
            src32(w, i, 2, Ty::F32, s.at(2))
        };
        if special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
            b = flush_source(w.mode, b, s.at(1));
            c = flush_source(w.mode, c, s.at(2));
        }
        let mut bad = 0;
        for (l, r) in r.iter_mut().enumerate() {
            let v = f((
                f32::from_bits(at(a, l)),
                f32::from_bits(at(b, l)),
                f32::from_bits(at(c, l)),
            ));
            bad |= u32::from(v.is_nan());
            *r = v.to_bits();
        }
        if bad != 0 {
            fix_nans(&mut r, [a, b, c]);
        }
        if needs_finish32(w.mode, i) {
            finish(w.mode, i, kind, [a, b, c], &mut r);
        }
    }
    put32(w, i, &r);
    Flow::Next
}

/// f32 from an f32 and an integer source.
#[inline(always)]
pub(crate) unsafe fn bits2_int(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((u32, u32)) -> u32,
) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, Ty::F32, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(1));
        if special_mode32(w.mode) {
            a = flush_source(w.mode, a, s.at(0));
        }
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((at(a, l), at(b, l)));
        }
    }
    if needs_finish32(w.mode, i) {
        finish32(w.mode, i, &mut r);
    }
    put32(w, i, &r);
    Flow::Next
}
