//! Operations across lanes and on single lanes.

use super::operand::{Scratch, Ty, put32, scalar32, src32};
use super::shape::at;
use crate::exec::{Env, Exec, Flow, Level, leveled};
use crate::inst::{Inst, NONE, VGPR0};
use crate::op::Op;
use crate::wave::{LANES, Wave};

/// Where a lane's value goes: an SGPR.
fn put_scalar(w: &mut Wave, i: &Inst, value: u32) {
    let d = if i.sdst == NONE { i.vdst } else { i.sdst };
    w.sgpr[(d & 127) as usize] = value;
}

/// A lane of source 0, which may be a scalar.
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

/// A source that should be scalar.
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

unsafe fn nop(_: &mut Wave, _: &Inst, _: &mut Env) -> Flow {
    Flow::Next
}

leveled!(fn mbcnt_lo_exec = mbcnt_lo);
leveled!(fn mbcnt_hi_exec = mbcnt_hi);

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    Some(match inst.op {
        Op::V_READFIRSTLANE_B32 => read_first_lane,
        Op::V_READLANE_B32 => read_lane,
        Op::V_WRITELANE_B32 => write_lane,
        Op::V_MBCNT_LO_U32_B32 => mbcnt_lo_exec(level),
        Op::V_MBCNT_HI_U32_B32 => mbcnt_hi_exec(level),
        Op::V_SWAP_B32 => swap,
        Op::V_NOP | Op::V_CLREXCP => nop,
        _ => return None,
    })
}
