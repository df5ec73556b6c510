//! Additions with carry, and the 64-bit multiply-add that shares their operand form.

use super::operand::{
    Scratch, Ty, pack_mask, put32, put64, scalar64, spread_mask, src32, src64, written_lanes,
};
use super::shape::{at, at64};
use crate::exec::{Env, Exec, Flow, Level, leveled};
use crate::inst::{Inst, NONE, VCC, VGPR0, flag};
use crate::op::Op;
use crate::wave::{LANES, Wave};

#[inline(always)]
fn put_carry(w: &mut Wave, i: &Inst, mask: u64, lanes: u64) {
    let sdst = if i.sdst == NONE { VCC } else { i.sdst };
    w.set_s64(sdst, mask & lanes);
}

/// `f(a, b, carry in) -> (sum, carry out)`.
#[inline(always)]
unsafe fn carry(
    w: &mut Wave,
    i: &Inst,
    carry_in: bool,
    f: impl Fn(u32, u32, u32) -> (u32, bool),
) -> Flow {
    let mut s = Scratch::<2>::new();
    let (mut r, mut c) = ([0; LANES], [0u8; LANES]);
    let lanes = written_lanes(w, i);
    let from = if i.src[2] >= VGPR0 { VCC } else { i.src[2] };
    let mask = if carry_in {
        scalar64(w, i, from, Ty::B64)
    } else {
        0
    };
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::B32, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(1));
        let m = spread_mask(mask);
        for l in 0..LANES {
            let (x, out) = f(at(a, l), at(b, l), m[l] & 1);
            let saturated = if out { carry_clamp(i.op) } else { x };
            r[l] = if i.has(flag::CLAMP) { saturated } else { x };
            c[l] = u8::from(out);
        }
    }
    put32(w, i, &r);
    put_carry(w, i, pack_mask(&c), lanes);
    Flow::Next
}

/// Saturated value of an overflowing result.
#[inline(always)]
fn carry_clamp(op: Op) -> u32 {
    match op {
        Op::V_ADD_CO_U32 | Op::V_ADDC_CO_U32 => !0,
        _ => 0,
    }
}

#[inline(always)]
fn add(a: u32, b: u32, c: u32) -> (u32, bool) {
    let s = u64::from(a) + u64::from(b) + u64::from(c);
    (s as u32, s >> 32 != 0)
}

#[inline(always)]
fn sub(a: u32, b: u32, c: u32) -> (u32, bool) {
    let d = u64::from(a)
        .wrapping_sub(u64::from(b))
        .wrapping_sub(u64::from(c));
    (d as u32, d >> 63 != 0)
}

#[inline(always)]
unsafe fn add_co(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { carry(w, i, false, add) }
}

#[inline(always)]
unsafe fn addc(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { carry(w, i, true, add) }
}

#[inline(always)]
unsafe fn sub_co(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { carry(w, i, false, sub) }
}

#[inline(always)]
unsafe fn subb(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { carry(w, i, true, sub) }
}

#[inline(always)]
unsafe fn subrev_co(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { carry(w, i, false, |a, b, c| sub(b, a, c)) }
}

#[inline(always)]
unsafe fn subbrev(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { carry(w, i, true, |a, b, c| sub(b, a, c)) }
}

/// `a * b + c`: the low 64 bits of the sum, and bit 64 as carry. `product` computes 64 bits; `top` computes bit 64 from
/// the product, `c` and the low bits of the sum.
#[inline(always)]
unsafe fn mad64(
    w: &mut Wave,
    i: &Inst,
    ty: Ty,
    product: impl Fn(u32, u32) -> u64,
    top: impl Fn(u64, u64, u64) -> bool,
) -> Flow {
    let mut s = Scratch::<4>::new();
    let (mut lo, mut hi, mut o) = ([0; LANES], [0; LANES], [0u8; LANES]);
    let lanes = written_lanes(w, i);
    // SAFETY: sources are 64 lanes; the buffers of a 64-bit source are neighbours.
    unsafe {
        let a = src32(w, i, 0, Ty::B32, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(1));
        let c = src64(w, i, 2, ty, s.at(2));
        for l in 0..LANES {
            let (p, c) = (product(at(a, l), at(b, l)), at64(c, l));
            let sum = p.wrapping_add(c);
            (lo[l], hi[l]) = (sum as u32, (sum >> 32) as u32);
            o[l] = u8::from(top(p, c, sum));
        }
    }
    put64(w, i, &lo, &hi);
    put_carry(w, i, pack_mask(&o), lanes);
    Flow::Next
}

#[inline(always)]
unsafe fn mad_u64(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe {
        mad64(
            w,
            i,
            Ty::B64,
            |a, b| u64::from(a) * u64::from(b),
            |p, _, s| s < p,
        )
    }
}

#[inline(always)]
unsafe fn mad_i64(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe {
        mad64(
            w,
            i,
            Ty::I64,
            |a, b| (i64::from(a as i32) * i64::from(b as i32)) as u64,
            // The operands are sign-extended: bit 64 is the sign of the sum, even if 63 bits cannot hold the sum.
            |p, c, s| (p & c | (p | c) & s) >> 63 != 0,
        )
    }
}

leveled!(fn add_co_exec = add_co);
leveled!(fn addc_exec = addc);
leveled!(fn sub_co_exec = sub_co);
leveled!(fn subb_exec = subb);
leveled!(fn subrev_co_exec = subrev_co);
leveled!(fn subbrev_exec = subbrev);
leveled!(fn mad_u64_exec = mad_u64);
leveled!(fn mad_i64_exec = mad_i64);

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    Some(match inst.op {
        Op::V_ADD_CO_U32 => add_co_exec(level),
        Op::V_ADDC_CO_U32 => addc_exec(level),
        Op::V_SUB_CO_U32 => sub_co_exec(level),
        Op::V_SUBB_CO_U32 => subb_exec(level),
        Op::V_SUBREV_CO_U32 => subrev_co_exec(level),
        Op::V_SUBBREV_CO_U32 => subbrev_exec(level),
        Op::V_MAD_U64_U32 => mad_u64_exec(level),
        Op::V_MAD_I64_I32 => mad_i64_exec(level),
        _ => return None,
    })
}
