//! Operations across lanes, and operations on single lanes.

use super::operand::{Scratch, Ty, put32, scalar32, src32};
use super::shape::at;
use crate::exec::salu::GPR_IDX_EN;
use crate::exec::{Env, Exec, Flow, Level, leveled};
use crate::fault::FaultKind;
use crate::inst::{Inst, M0, NONE, VGPR0};
use crate::op::Op;
use crate::wave::{LANES, Wave};

/// Writes a lane's value to its destination, an SGPR.
fn put_scalar(w: &mut Wave, i: &Inst, value: u32) {
    let d = if i.sdst == NONE { i.vdst } else { i.sdst };
    w.sgpr[(d & 127) as usize] = value;
}

/// Value of source 0, which may be scalar, in one lane.
fn lane_of(w: &Wave, i: &Inst, lane: usize) -> u32 {
    if i.src[0] >= VGPR0 {
        w.vgpr[w.vreg(i.src[0]) & 511].0[lane & 63]
    } else {
        scalar32(w, i, i.src[0])
    }
}

unsafe fn read_first_lane(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // With no lane on, lane 0 is read.
    let lane = w.exec().trailing_zeros() & 63;
    let v = lane_of(w, i, lane as usize);
    put_scalar(w, i, v);
    Flow::Next
}

unsafe fn read_lane(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let lane = scalar_or_first(w, i, 1);
    let v = lane_of(w, i, lane as usize);
    put_scalar(w, i, v);
    Flow::Next
}

unsafe fn write_lane(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let value = scalar_or_first(w, i, 0);
    let lane = scalar_or_first(w, i, 1) & 63;
    let d = w.vreg(i.vdst) & 511;
    w.vgpr[d].0[lane as usize] = value;
    Flow::Next
}

/// A scalar source; lane 0's value if it is a vector register.
fn scalar_or_first(w: &Wave, i: &Inst, n: usize) -> u32 {
    let s = i.src[n];
    if s >= VGPR0 {
        w.vgpr[w.vreg(s) & 511].0[0]
    } else {
        scalar32(w, i, s)
    }
}

#[inline(always)]
unsafe fn mbcnt(w: &mut Wave, i: &Inst, low: bool) -> Flow {
    let mut s = Scratch::<2>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::B32, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(1));
        for (l, r) in r.iter_mut().enumerate() {
            // The lanes below this one, in the half that is counted.
            let below = (1u64 << l) - 1;
            let mask = if low {
                below as u32
            } else {
                (below >> 32) as u32
            };
            *r = (at(a, l) & mask).count_ones().wrapping_add(at(b, l));
        }
    }
    put32(w, i, &r);
    Flow::Next
}

#[inline(always)]
unsafe fn mbcnt_lo(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { mbcnt(w, i, true) }
}

#[inline(always)]
unsafe fn mbcnt_hi(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    // SAFETY: the contract of `Exec` is passed on.
    unsafe { mbcnt(w, i, false) }
}

unsafe fn swap(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    if i.src[0] < VGPR0 {
        return Flow::Next;
    }
    let (a, b) = (w.vreg(i.vdst) & 511, w.vreg(i.src[0]) & 511);
    let exec = w.exec();
    let (x, y) = (w.vgpr[a].0, w.vgpr[b].0);
    super::operand::blend(w, a, &y, exec);
    super::operand::blend(w, b, &x, exec);
    Flow::Next
}

/// A move, the only instruction that `s_set_gpr_idx_on` may precede.
#[inline(always)]
unsafe fn mov(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    if w.mode & GPR_IDX_EN != 0 {
        return indexed_mov(w, i, e);
    }
    let mut s = Scratch::<1>::new();
    // SAFETY: sources are 64 lanes; the copy leaves the register before it is written.
    let r = unsafe { *src32(w, i, 0, Ty::B32, s.at(0)).cast::<[u32; LANES]>() };
    put32(w, i, &r);
    Flow::Next
}

/// A move with M0 added to register numbers: bits 0..8 hold the index, bits 12..16 select the operands.
#[cold]
#[inline(never)]
fn indexed_mov(w: &mut Wave, i: &Inst, e: &mut Env) -> Flow {
    let m0 = w.sgpr[M0 as usize];
    let (index, which) = ((m0 & 255) as u16, m0 >> 12 & 15);
    let mut to = *i;
    if which & 1 != 0 && to.src[0] >= VGPR0 {
        to.src[0] += index;
    }
    if which & 8 != 0 {
        to.vdst += index;
    }
    let last = to.vdst.max(if to.src[0] >= VGPR0 { to.src[0] } else { 0 });
    if last >= VGPR0 + 256 {
        e.fault = Some(FaultKind::BadRegister {
            register: format!("v{}", last - VGPR0),
            limit: 256,
        });
        return Flow::Fault;
    }
    let mut s = Scratch::<1>::new();
    // SAFETY: sources are 64 lanes.
    let r = unsafe { *src32(w, &to, 0, Ty::B32, s.at(0)).cast::<[u32; LANES]>() };
    put32(w, &to, &r);
    Flow::Next
}

unsafe fn nop(_: &mut Wave, _: &Inst, _: &mut Env) -> Flow {
    Flow::Next
}

/// A byte of the 64 bits `a:b`, or a constant. Selector 8..12: sign of a word; 12: zero; above: all ones.
fn perm_byte(a: u32, b: u32, s: u32) -> u32 {
    let both = u64::from(a) << 32 | u64::from(b);
    match s {
        0..=7 => (both >> (8 * s)) as u32 & 255,
        8..=11 => (both >> (16 * (s - 8) + 15) & 1) as u32 * 255,
        12 => 0,
        _ => 255,
    }
}

/// Byte permutation. Selectors of plain bytes, nearly always one scalar, use the short loops.
#[inline(always)]
unsafe fn perm(w: &mut Wave, i: &Inst, _: &mut Env) -> Flow {
    let mut s = Scratch::<3>::new();
    let mut r = [0; LANES];
    // SAFETY: sources are 64 lanes.
    unsafe {
        let a = src32(w, i, 0, Ty::B32, s.at(0));
        let b = src32(w, i, 1, Ty::B32, s.at(1));
        let c = src32(w, i, 2, Ty::B32, s.at(2));
        let mut any = 0;
        for l in 0..LANES {
            any |= at(c, l) & 0xf8f8_f8f8;
        }
        if any != 0 {
            for (l, r) in r.iter_mut().enumerate() {
                *r = (0..4).fold(0, |r, k| {
                    r | perm_byte(at(a, l), at(b, l), at(c, l) >> (8 * k) & 255) << (8 * k)
                });
            }
        } else if i.src[2] < VGPR0 {
            for k in 0..4 {
                let sel = at(c, 0) >> (8 * k) & 7;
                let (from, shift) = (if sel & 4 != 0 { a } else { b }, 8 * (sel & 3));
                for (l, r) in r.iter_mut().enumerate() {
                    *r |= (at(from, l) >> shift & 255) << (8 * k);
                }
            }
        } else {
            for (l, r) in r.iter_mut().enumerate() {
                let (x, y, sel) = (at(a, l), at(b, l), at(c, l));
                let byte = |k: u32| {
                    let from = if sel >> k & 4 != 0 { x } else { y };
                    (from >> (8 * (sel >> k & 3)) & 255) << k
                };
                *r = byte(0) | byte(8) | byte(16) | byte(24);
            }
        }
    }
    put32(w, i, &r);
    Flow::Next
}

leveled!(fn perm_exec = perm);
leveled!(fn mov_exec = mov);
leveled!(fn mbcnt_lo_exec = mbcnt_lo);
leveled!(fn mbcnt_hi_exec = mbcnt_hi);

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    Some(match inst.op {
        Op::V_READFIRSTLANE_B32 => read_first_lane,
        Op::V_READLANE_B32 => read_lane,
        Op::V_WRITELANE_B32 => write_lane,
        Op::V_MBCNT_LO_U32_B32 => mbcnt_lo_exec(level),
        Op::V_MBCNT_HI_U32_B32 => mbcnt_hi_exec(level),
        Op::V_PERM_B32 => perm_exec(level),
        Op::V_MOV_B32 => mov_exec(level),
        Op::V_SWAP_B32 => swap,
        Op::V_NOP | Op::V_CLREXCP => nop,
        _ => return None,
    })
}
