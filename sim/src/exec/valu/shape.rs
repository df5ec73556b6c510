//! Loops over 64 lanes, one for each combination of source and result widths. A macro turns a table of operations into
//! instruction handlers.

use super::operand::{Scratch, Ty, put16_half, put32, put64, src32, src64};
use crate::exec::{Env, Flow};
use crate::inst::Inst;
use crate::wave::{LANES, Wave};

/// Defines a handler for a table of opcodes. `ops! { fn NAME via SHAPE(ARGS): (TYPES) -> TYPE { OP | OP = |a, b|
/// expression, } }` defines `fn NAME(&Inst, Level) -> Option<Exec>`. `SHAPE` runs the expression over the lanes,
/// compiled for the level. `ops! { rare fn .. }` compiles for the baseline only.
macro_rules! ops {
    (rare $($rest:tt)*) => {
        $crate::exec::valu::shape::ops! { @unleveled $($rest)* }
    };
    (fn $($rest:tt)*) => {
        $crate::exec::valu::shape::ops! { @leveled fn $($rest)* }
    };
    (@$leveled:ident $(fn $name:ident via $shape:ident $x:tt: $args:ty => $ret:ty {
        $($($op:ident)|+ = |$($arg:ident),*| $body:expr,)*
    })*) => {$(
        fn $name(inst: &$crate::inst::Inst, level: $crate::exec::Level) -> Option<$crate::exec::Exec> {
            use $crate::{exec::{Env, Flow}, inst::Inst, op::Op, wave::Wave};
            match inst.op {
                $($(Op::$op)|+ => {
                    #[inline(always)]
                    fn f(($($arg,)*): $args) -> $ret {
                        $body
                    }
                    #[inline(always)]
                    #[allow(unused_parens)]
                    unsafe fn body(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
                        // SAFETY: the contract of `Exec` is passed on.
                        unsafe { $shape(w, i, e, $x, f) }
                    }
                    $crate::exec::$leveled!(fn pick = body);
                    Some(pick(level))
                })*
                _ => None,
            }
        }
    )*};
}
pub(crate) use ops;

/// Reads lane `l`.
#[inline(always)]
pub(crate) unsafe fn at(p: *const u32, l: usize) -> u32 {
    // SAFETY: the caller's pointer has 64 lanes and `l` is below 64.
    unsafe { *p.add(l) }
}

/// Reads lane `l` of two halves.
#[inline(always)]
pub(crate) unsafe fn at64(p: (*const u32, *const u32), l: usize) -> u64 {
    // SAFETY: as `at`.
    unsafe { u64::from(*p.0.add(l)) | u64::from(*p.1.add(l)) << 32 }
}

/// 32 bits from one source.
#[inline(always)]
pub(crate) unsafe fn map1(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    ty: Ty,
    f: impl Fn((u32,)) -> u32,
) -> Flow {
    let mut s = Scratch::<1>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, ty, s.at(0));
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((at(a, l),));
        }
    }
    put32(w, i, &r);
    Flow::Next
}

/// 32 bits from two sources.
#[inline(always)]
pub(crate) unsafe fn map2(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    ty: Ty,
    f: impl Fn((u32, u32)) -> u32,
) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, ty, s.at(0));
        let b = src32(w, i, 1, ty, s.at(1));
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((at(a, l), at(b, l)));
        }
    }
    put32(w, i, &r);
    Flow::Next
}

/// 32 bits from three sources of the given types.
#[inline(always)]
pub(crate) unsafe fn map3(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    ty: [Ty; 3],
    f: impl Fn((u32, u32, u32)) -> u32,
) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, ty[0], s.at(0));
        let b = src32(w, i, 1, ty[1], s.at(1));
        let c = src32(w, i, 2, ty[2], s.at(2));
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((at(a, l), at(b, l), at(c, l)));
        }
    }
    put32(w, i, &r);
    Flow::Next
}

/// 16 bits from two sources; the other half of the destination is kept.
#[inline(always)]
pub(crate) unsafe fn half2(
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
        let a = src32(w, i, 0, Ty::B16, s.at(0));
        let b = src32(w, i, 1, Ty::B16, s.at(1));
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((at(a, l) & 0xffff, at(b, l) & 0xffff));
        }
    }
    put16_half(w, i, &mut r);
    Flow::Next
}

/// 16 bits from three sources; the other half of the destination is kept.
#[inline(always)]
pub(crate) unsafe fn half3(
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
        let a = src32(w, i, 0, Ty::B16, s.at(0));
        let b = src32(w, i, 1, Ty::B16, s.at(1));
        let c = src32(w, i, 2, Ty::B16, s.at(2));
        for (l, r) in r.iter_mut().enumerate() {
            *r = f((at(a, l) & 0xffff, at(b, l) & 0xffff, at(c, l) & 0xffff));
        }
    }
    put16_half(w, i, &mut r);
    Flow::Next
}

/// 64 bits from one 64-bit source.
#[inline(always)]
pub(crate) unsafe fn wide1(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    ty: Ty,
    f: impl Fn((u64,)) -> u64,
) -> Flow {
    let mut s = Scratch::<2>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src64(w, i, 0, ty, s.at(0));
        for l in 0..LANES {
            let v = f((at64(a, l),));
            (lo[l], hi[l]) = (v as u32, (v >> 32) as u32);
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}

/// 64 bits from a 32-bit and a 64-bit source.
#[inline(always)]
pub(crate) unsafe fn wide_shift(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((u32, u64)) -> u64,
) -> Flow {
    let mut s = Scratch::<3>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::B32, s.at(0));
        let b = src64(w, i, 1, Ty::B64, s.at(1));
        for l in 0..LANES {
            let v = f((at(a, l), at64(b, l)));
            (lo[l], hi[l]) = (v as u32, (v >> 32) as u32);
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}

/// 64 bits from a 64-bit, a 32-bit and a 64-bit source.
#[inline(always)]
pub(crate) unsafe fn wide_add(
    w: &mut Wave,
    i: &Inst,
    _: &mut Env,
    _: (),
    f: impl Fn((u64, u32, u64)) -> u64,
) -> Flow {
    let mut s = Scratch::<5>::new();
    let (mut lo, mut hi) = ([0; LANES], [0; LANES]);
    // SAFETY: sources are 64 lanes; the buffers of a 64-bit source are neighbours.
    unsafe {
        let a = src64(w, i, 0, Ty::B64, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(2));
        let c = src64(w, i, 2, Ty::B64, s.at(3));
        for l in 0..LANES {
            let v = f((at64(a, l), at(b, l), at64(c, l)));
            (lo[l], hi[l]) = (v as u32, (v >> 32) as u32);
        }
    }
    put64(w, i, &lo, &hi);
    Flow::Next
}
