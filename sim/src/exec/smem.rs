//! Scalar memory.

use super::{Env, Exec, Flow, Level};
use crate::fault::FaultKind;
use crate::inst::{Format, Inst, flag};
use crate::op::Op;
use crate::wave::Wave;

/// The function that executes a scalar memory instruction.
pub(crate) fn handler(inst: &Inst, _: Level) -> Option<Exec> {
    if inst.format != Format::Smem {
        return None;
    }
    Some(match inst.op {
        Op::S_LOAD_DWORD => load::<1>,
        Op::S_LOAD_DWORDX2 => load::<2>,
        Op::S_LOAD_DWORDX4 => load::<4>,
        Op::S_LOAD_DWORDX8 => load::<8>,
        Op::S_LOAD_DWORDX16 => load::<16>,
        Op::S_MEMTIME | Op::S_MEMREALTIME => time,
        Op::S_DCACHE_INV | Op::S_DCACHE_INV_VOL | Op::S_DCACHE_WB | Op::S_DCACHE_WB_VOL => nothing,
        _ => return None,
    })
}

/// Caches are not modelled.
unsafe fn nothing(_: &mut Wave, _: &Inst, _: &mut Env) -> Flow {
    Flow::Next
}

/// The simulated clock; the real-time counter runs at the same rate.
unsafe fn time(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    w.set_s64(inst.sdst, e.clock);
    Flow::Next
}

/// Immediate and register offset.
#[inline(always)]
fn offset(w: &Wave, inst: &Inst) -> u64 {
    let mut offset = 0u64;
    if inst.has(flag::SMEM_IMM) {
        offset = inst.imm as i64 as u64;
    }
    if inst.has(flag::SMEM_SOFFSET) {
        offset = offset.wrapping_add(u64::from(w.sgpr[inst.src[1] as usize & 127]));
    }
    offset
}

/// `N` dwords. The hardware ignores the two low bits of the address.
unsafe fn load<const N: usize>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let address = w.s64(inst.src[0]).wrapping_add(offset(w, inst)) & !3;
    if !e.memory.contains(&mut e.hint, address, 4 * N as u64) {
        e.fault = Some(FaultKind::OutOfBounds {
            access: "scalar load",
            address,
            size: 4 * N as u32,
            lane: 0,
            nearest: e.memory.nearest(address),
        });
        return Flow::Fault;
    }
    for i in 0..N {
        // SAFETY: the dwords lie in an allocation, which is valid host memory.
        let value = unsafe { (address as *const u32).add(i).read() };
        w.sgpr[(inst.sdst as usize + i) & 127] = value;
    }
    Flow::Next
}
