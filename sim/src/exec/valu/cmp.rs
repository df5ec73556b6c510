//! Comparisons (`v_cmp_*`, `v_cmpx_*`) and `v_cndmask`.

use super::operand::{Scratch, Ty, pack_mask, put32, spread_mask, src32, src64, written_lanes};
use super::shape::{at, at64};
use crate::exec::convert::f16_to_f32;
use crate::exec::{Env, Exec, Flow, Level, leveled, leveled_narrow, unleveled};
use crate::inst::{EXEC, Inst, NONE, VCC, VGPR0, flag};
use crate::op::Op;
use crate::wave::{LANES, Wave};

/// Writes the mask of a comparison, and EXEC for `v_cmpx`.
#[inline(always)]
fn put_mask(w: &mut Wave, i: &Inst, mask: u64, to_exec: bool) {
    let mask = mask & written_lanes(w, i);
    let sdst = if i.sdst == NONE { VCC } else { i.sdst };
    w.set_s64(sdst, mask);
    if to_exec {
        w.set_s64(EXEC, mask);
    }
}

#[inline(always)]
unsafe fn compare32(
    w: &mut Wave,
    i: &Inst,
    ty: Ty,
    to_exec: bool,
    f: impl Fn(u32, u32) -> bool,
) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0u8; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let mut a = src32(w, i, 0, ty, s.at(0));
        let mut b = src32(w, i, 1, ty, s.at(1));
        if ty == Ty::F32 && w.mode & 0x10 == 0 {
            a = super::float::flush_source(w.mode, a, s.at(0));
            b = super::float::flush_source(w.mode, b, s.at(1));
        }
        for (l, r) in r.iter_mut().enumerate() {
            *r = u8::from(f(at(a, l), at(b, l)));
        }
    }
    put_mask(w, i, pack_mask(&r), to_exec);
    Flow::Next
}

#[inline(always)]
unsafe fn compare64(
    w: &mut Wave,
    i: &Inst,
    ty: Ty,
    to_exec: bool,
    f: impl Fn(u64, u64) -> bool,
) -> Flow {
    let mut s = Scratch::<4>::new();
    let mut r = [0u8; LANES];
    // SAFETY: sources are 64 lanes; the buffers of a source are neighbours.
    unsafe {
        let a = src64(w, i, 0, ty, s.at(0));
        let b = src64(w, i, 1, ty, s.at(2));
        for (l, r) in r.iter_mut().enumerate() {
            *r = u8::from(f(at64(a, l), at64(b, l)));
        }
    }
    put_mask(w, i, pack_mask(&r), to_exec);
    Flow::Next
}

/// The class bits of a number: sNaN, qNaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal, +inf.
#[inline(always)]
fn class(sign: bool, exponent_max: bool, exponent_zero: bool, fraction: u64, quiet: bool) -> u32 {
    let bit = match (exponent_max, exponent_zero, fraction) {
        (true, _, 0) => 9,
        (true, _, _) => return if quiet { 2 } else { 1 },
        (_, true, 0) => 6,
        (_, true, _) => 7,
        _ => 8,
    };
    1 << if sign { 11 - bit } else { bit }
}

#[inline(always)]
fn class16(x: u32) -> u32 {
    let e = x & 0x7c00;
    class(
        x & 0x8000 != 0,
        e == 0x7c00,
        e == 0,
        u64::from(x & 0x3ff),
        x & 0x200 != 0,
    )
}

#[inline(always)]
fn class32(x: u32) -> u32 {
    let e = x & 0x7f80_0000;
    let quiet = x & 0x40_0000 != 0;
    class(
        x >> 31 != 0,
        e == 0x7f80_0000,
        e == 0,
        u64::from(x & 0x7f_ffff),
        quiet,
    )
}

#[inline(always)]
fn class64(x: u64) -> u32 {
    let e = x >> 52 & 0x7ff;
    class(
        x >> 63 != 0,
        e == 0x7ff,
        e == 0,
        x & ((1 << 52) - 1),
        x >> 51 & 1 != 0,
    )
}

/// `v_cmp_class`. The second source is a plain integer, so modifiers apply only to the first.
#[inline(always)]
unsafe fn classify(w: &mut Wave, i: &Inst, ty: Ty, to_exec: bool, f: impl Fn(u32) -> u32) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0u8; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, ty, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(1));
        for (l, r) in r.iter_mut().enumerate() {
            *r = u8::from(f(at(a, l)) & at(b, l) != 0);
        }
    }
    put_mask(w, i, pack_mask(&r), to_exec);
    Flow::Next
}

#[inline(always)]
unsafe fn classify64(w: &mut Wave, i: &Inst, to_exec: bool) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0u8; LANES];
    // SAFETY: sources are 64 lanes; the buffers of a source are neighbours.
    unsafe {
        let a = src64(w, i, 0, Ty::F64, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(2));
        for (l, r) in r.iter_mut().enumerate() {
            *r = u8::from(class64(at64(a, l)) & at(b, l) != 0);
        }
    }
    put_mask(w, i, pack_mask(&r), to_exec);
    Flow::Next
}

/// Defines a pair of handlers, `v_cmp` and `v_cmpx`, for each condition.
macro_rules! compares {
    ($($leveled:ident fn $name:ident via $shape:ident($ty:expr): $bits:ty as $view:expr => {
        $($op:ident, $opx:ident = |$a:ident, $b:ident| $body:expr,)*
    })*) => {$(
        fn $name(inst: &Inst, level: Level) -> Option<Exec> {
            match inst.op {
                $(Op::$op | Op::$opx => {
                    #[inline(always)]
                    #[allow(
                        clippy::eq_op,
                        clippy::double_comparisons,
                        clippy::neg_cmp_op_on_partial_ord,
                        clippy::nonminimal_bool,
                        unused_variables
                    )]
                    fn f(a: $bits, b: $bits) -> bool {
                        let ($a, $b) = ($view(a), $view(b));
                        $body
                    }
                    #[inline(always)]
                    unsafe fn body(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
                        let to_exec = i.op == Op::$opx;
                        // SAFETY: the contract of `Exec` is passed on.
                        unsafe { $shape(w, i, $ty, to_exec, f) }
                    }
                    $leveled!(fn pick = body);
                    Some(pick(level))
                })*
                _ => None,
            }
        }
    )*};
}

#[inline(always)]
fn i16_of(x: u32) -> i16 {
    x as i16
}
#[inline(always)]
fn u16_of(x: u32) -> u16 {
    x as u16
}
#[inline(always)]
fn i32_of(x: u32) -> i32 {
    x as i32
}
#[inline(always)]
fn u32_of(x: u32) -> u32 {
    x
}
#[inline(always)]
fn i64_of(x: u64) -> i64 {
    x as i64
}
#[inline(always)]
fn u64_of(x: u64) -> u64 {
    x
}

compares! {
    leveled fn f32_compares via compare32(Ty::F32): u32 as f32::from_bits => {
        V_CMP_F_F32, V_CMPX_F_F32 = |a, b| false,
        V_CMP_LT_F32, V_CMPX_LT_F32 = |a, b| a < b,
        V_CMP_EQ_F32, V_CMPX_EQ_F32 = |a, b| a == b,
        V_CMP_LE_F32, V_CMPX_LE_F32 = |a, b| a <= b,
        V_CMP_GT_F32, V_CMPX_GT_F32 = |a, b| a > b,
        V_CMP_LG_F32, V_CMPX_LG_F32 = |a, b| a < b || a > b,
        V_CMP_GE_F32, V_CMPX_GE_F32 = |a, b| a >= b,
        V_CMP_O_F32, V_CMPX_O_F32 = |a, b| a == a && b == b,
        V_CMP_U_F32, V_CMPX_U_F32 = |a, b| a != a || b != b,
        V_CMP_NGE_F32, V_CMPX_NGE_F32 = |a, b| !(a >= b),
        V_CMP_NLG_F32, V_CMPX_NLG_F32 = |a, b| !(a < b || a > b),
        V_CMP_NGT_F32, V_CMPX_NGT_F32 = |a, b| !(a > b),
        V_CMP_NLE_F32, V_CMPX_NLE_F32 = |a, b| !(a <= b),
        V_CMP_NEQ_F32, V_CMPX_NEQ_F32 = |a, b| a != b,
        V_CMP_NLT_F32, V_CMPX_NLT_F32 = |a, b| !(a < b),
        V_CMP_TRU_F32, V_CMPX_TRU_F32 = |a, b| true,
    }
    leveled fn i32_compares via compare32(Ty::B32): u32 as i32_of => {
        V_CMP_F_I32, V_CMPX_F_I32 = |a, b| false,
        V_CMP_LT_I32, V_CMPX_LT_I32 = |a, b| a < b,
        V_CMP_EQ_I32, V_CMPX_EQ_I32 = |a, b| a == b,
        V_CMP_LE_I32, V_CMPX_LE_I32 = |a, b| a <= b,
        V_CMP_GT_I32, V_CMPX_GT_I32 = |a, b| a > b,
        V_CMP_NE_I32, V_CMPX_NE_I32 = |a, b| a != b,
        V_CMP_GE_I32, V_CMPX_GE_I32 = |a, b| a >= b,
        V_CMP_T_I32, V_CMPX_T_I32 = |a, b| true,
    }
    leveled fn u32_compares via compare32(Ty::B32): u32 as u32_of => {
        V_CMP_F_U32, V_CMPX_F_U32 = |a, b| false,
        V_CMP_LT_U32, V_CMPX_LT_U32 = |a, b| a < b,
        V_CMP_EQ_U32, V_CMPX_EQ_U32 = |a, b| a == b,
        V_CMP_LE_U32, V_CMPX_LE_U32 = |a, b| a <= b,
        V_CMP_GT_U32, V_CMPX_GT_U32 = |a, b| a > b,
        V_CMP_NE_U32, V_CMPX_NE_U32 = |a, b| a != b,
        V_CMP_GE_U32, V_CMPX_GE_U32 = |a, b| a >= b,
        V_CMP_T_U32, V_CMPX_T_U32 = |a, b| true,
    }
    unleveled fn f64_compares via compare64(Ty::F64): u64 as f64::from_bits => {
        V_CMP_F_F64, V_CMPX_F_F64 = |a, b| false,
        V_CMP_LT_F64, V_CMPX_LT_F64 = |a, b| a < b,
        V_CMP_EQ_F64, V_CMPX_EQ_F64 = |a, b| a == b,
        V_CMP_LE_F64, V_CMPX_LE_F64 = |a, b| a <= b,
        V_CMP_GT_F64, V_CMPX_GT_F64 = |a, b| a > b,
        V_CMP_LG_F64, V_CMPX_LG_F64 = |a, b| a < b || a > b,
        V_CMP_GE_F64, V_CMPX_GE_F64 = |a, b| a >= b,
        V_CMP_O_F64, V_CMPX_O_F64 = |a, b| a == a && b == b,
        V_CMP_U_F64, V_CMPX_U_F64 = |a, b| a != a || b != b,
        V_CMP_NGE_F64, V_CMPX_NGE_F64 = |a, b| !(a >= b),
        V_CMP_NLG_F64, V_CMPX_NLG_F64 = |a, b| !(a < b || a > b),
        V_CMP_NGT_F64, V_CMPX_NGT_F64 = |a, b| !(a > b),
        V_CMP_NLE_F64, V_CMPX_NLE_F64 = |a, b| !(a <= b),
        V_CMP_NEQ_F64, V_CMPX_NEQ_F64 = |a, b| a != b,
        V_CMP_NLT_F64, V_CMPX_NLT_F64 = |a, b| !(a < b),
        V_CMP_TRU_F64, V_CMPX_TRU_F64 = |a, b| true,
    }
    leveled_narrow fn i64_compares via compare64(Ty::I64): u64 as i64_of => {
        V_CMP_F_I64, V_CMPX_F_I64 = |a, b| false,
        V_CMP_LT_I64, V_CMPX_LT_I64 = |a, b| a < b,
        V_CMP_EQ_I64, V_CMPX_EQ_I64 = |a, b| a == b,
        V_CMP_LE_I64, V_CMPX_LE_I64 = |a, b| a <= b,
        V_CMP_GT_I64, V_CMPX_GT_I64 = |a, b| a > b,
        V_CMP_NE_I64, V_CMPX_NE_I64 = |a, b| a != b,
        V_CMP_GE_I64, V_CMPX_GE_I64 = |a, b| a >= b,
        V_CMP_T_I64, V_CMPX_T_I64 = |a, b| true,
    }
    leveled_narrow fn u64_compares via compare64(Ty::B64): u64 as u64_of => {
        V_CMP_F_U64, V_CMPX_F_U64 = |a, b| false,
        V_CMP_LT_U64, V_CMPX_LT_U64 = |a, b| a < b,
        V_CMP_EQ_U64, V_CMPX_EQ_U64 = |a, b| a == b,
        V_CMP_LE_U64, V_CMPX_LE_U64 = |a, b| a <= b,
        V_CMP_GT_U64, V_CMPX_GT_U64 = |a, b| a > b,
        V_CMP_NE_U64, V_CMPX_NE_U64 = |a, b| a != b,
        V_CMP_GE_U64, V_CMPX_GE_U64 = |a, b| a >= b,
        V_CMP_T_U64, V_CMPX_T_U64 = |a, b| true,
    }
    unleveled fn f16_compares via compare32(Ty::F16): u32 as f16_to_f32 => {
        V_CMP_F_F16, V_CMPX_F_F16 = |a, b| false,
        V_CMP_LT_F16, V_CMPX_LT_F16 = |a, b| a < b,
        V_CMP_EQ_F16, V_CMPX_EQ_F16 = |a, b| a == b,
        V_CMP_LE_F16, V_CMPX_LE_F16 = |a, b| a <= b,
        V_CMP_GT_F16, V_CMPX_GT_F16 = |a, b| a > b,
        V_CMP_LG_F16, V_CMPX_LG_F16 = |a, b| a < b || a > b,
        V_CMP_GE_F16, V_CMPX_GE_F16 = |a, b| a >= b,
        V_CMP_O_F16, V_CMPX_O_F16 = |a, b| a == a && b == b,
        V_CMP_U_F16, V_CMPX_U_F16 = |a, b| a != a || b != b,
        V_CMP_NGE_F16, V_CMPX_NGE_F16 = |a, b| !(a >= b),
        V_CMP_NLG_F16, V_CMPX_NLG_F16 = |a, b| !(a < b || a > b),
        V_CMP_NGT_F16, V_CMPX_NGT_F16 = |a, b| !(a > b),
        V_CMP_NLE_F16, V_CMPX_NLE_F16 = |a, b| !(a <= b),
        V_CMP_NEQ_F16, V_CMPX_NEQ_F16 = |a, b| a != b,
        V_CMP_NLT_F16, V_CMPX_NLT_F16 = |a, b| !(a < b),
        V_CMP_TRU_F16, V_CMPX_TRU_F16 = |a, b| true,
    }
    unleveled fn i16_compares via compare32(Ty::B16): u32 as i16_of => {
        V_CMP_F_I16, V_CMPX_F_I16 = |a, b| false,
        V_CMP_LT_I16, V_CMPX_LT_I16 = |a, b| a < b,
        V_CMP_EQ_I16, V_CMPX_EQ_I16 = |a, b| a == b,
        V_CMP_LE_I16, V_CMPX_LE_I16 = |a, b| a <= b,
        V_CMP_GT_I16, V_CMPX_GT_I16 = |a, b| a > b,
        V_CMP_NE_I16, V_CMPX_NE_I16 = |a, b| a != b,
        V_CMP_GE_I16, V_CMPX_GE_I16 = |a, b| a >= b,
        V_CMP_T_I16, V_CMPX_T_I16 = |a, b| true,
    }
    unleveled fn u16_compares via compare32(Ty::B16): u32 as u16_of => {
        V_CMP_F_U16, V_CMPX_F_U16 = |a, b| false,
        V_CMP_LT_U16, V_CMPX_LT_U16 = |a, b| a < b,
        V_CMP_EQ_U16, V_CMPX_EQ_U16 = |a, b| a == b,
        V_CMP_LE_U16, V_CMPX_LE_U16 = |a, b| a <= b,
        V_CMP_GT_U16, V_CMPX_GT_U16 = |a, b| a > b,
        V_CMP_NE_U16, V_CMPX_NE_U16 = |a, b| a != b,
        V_CMP_GE_U16, V_CMPX_GE_U16 = |a, b| a >= b,
        V_CMP_T_U16, V_CMPX_T_U16 = |a, b| true,
    }
}

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    f32_compares(inst, level)
        .or_else(|| i32_compares(inst, level))
        .or_else(|| u32_compares(inst, level))
        .or_else(|| f64_compares(inst, level))
        .or_else(|| i64_compares(inst, level))
        .or_else(|| u64_compares(inst, level))
        .or_else(|| f16_compares(inst, level))
        .or_else(|| i16_compares(inst, level))
        .or_else(|| u16_compares(inst, level))
        .or_else(|| others(inst, level))
}

#[inline(always)]
unsafe fn class16_body(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { classify(w, i, Ty::F16, i.op == Op::V_CMPX_CLASS_F16, class16) }
}

#[inline(always)]
unsafe fn class32_body(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { classify(w, i, Ty::F32, i.op == Op::V_CMPX_CLASS_F32, class32) }
}

#[inline(always)]
unsafe fn class64_body(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { classify64(w, i, i.op == Op::V_CMPX_CLASS_F64) }
}

/// `mask ? src1 : src0`.
#[inline(always)]
unsafe fn cndmask(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    let select = if i.src[2] >= VGPR0 { VCC } else { i.src[2] };
    let mask = super::operand::scalar64(w, i, select, Ty::B64);
    let ty = if i.has(flag::SDWA) { Ty::B32 } else { Ty::F32 };
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, ty, s.at(0));
        let b = src32(w, i, 1, ty, s.at(1));
        let m = spread_mask(mask);
        for (l, r) in r.iter_mut().enumerate() {
            *r = at(b, l) & m[l] | at(a, l) & !m[l];
        }
    }
    put32(w, i, &r);
    Flow::Next
}

unleveled!(fn class16_exec = class16_body);
unleveled!(fn class32_exec = class32_body);
unleveled!(fn class64_exec = class64_body);
leveled!(fn cndmask_exec = cndmask);

fn others(inst: &Inst, level: Level) -> Option<Exec> {
    match inst.op {
        Op::V_CMP_CLASS_F16 | Op::V_CMPX_CLASS_F16 => Some(class16_exec(level)),
        Op::V_CMP_CLASS_F32 | Op::V_CMPX_CLASS_F32 => Some(class32_exec(level)),
        Op::V_CMP_CLASS_F64 | Op::V_CMPX_CLASS_F64 => Some(class64_exec(level)),
        Op::V_CNDMASK_B32 => Some(cndmask_exec(level)),
        _ => None,
    }
}
