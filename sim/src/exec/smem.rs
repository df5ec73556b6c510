//! Scalar memory instructions.

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
    if let Some((dwords, buffer)) = load_of(inst.op) {
        return Some(match (dwords, buffer) {
            (1, false) => load::<1>,
            (2, false) => load::<2>,
            (4, false) => load::<4>,
            (8, false) => load::<8>,
            (_, false) => load::<16>,
            (1, true) => buffer_load::<1>,
            (2, true) => buffer_load::<2>,
            (4, true) => buffer_load::<4>,
            (8, true) => buffer_load::<8>,
            (_, true) => buffer_load::<16>,
        });
    }
    Some(match inst.op {
        Op::S_MEMTIME | Op::S_MEMREALTIME => time,
        Op::S_DCACHE_INV | Op::S_DCACHE_INV_VOL | Op::S_DCACHE_WB | Op::S_DCACHE_WB_VOL => nothing,
        _ => return None,
    })
}

/// Number of dwords of a scalar load, and whether it uses a buffer resource.
fn load_of(op: Op) -> Option<(usize, bool)> {
    Some(match op {
        Op::S_LOAD_DWORD => (1, false),
        Op::S_LOAD_DWORDX2 => (2, false),
        Op::S_LOAD_DWORDX4 => (4, false),
        Op::S_LOAD_DWORDX8 => (8, false),
        Op::S_LOAD_DWORDX16 => (16, false),
        Op::S_BUFFER_LOAD_DWORD => (1, true),
        Op::S_BUFFER_LOAD_DWORDX2 => (2, true),
        Op::S_BUFFER_LOAD_DWORDX4 => (4, true),
        Op::S_BUFFER_LOAD_DWORDX8 => (8, true),
        Op::S_BUFFER_LOAD_DWORDX16 => (16, true),
        _ => return None,
    })
}

/// Address and number of dwords that a scalar load reads; `None` for other instructions.
pub(crate) fn located(w: &Wave, inst: &Inst) -> Option<(u64, usize)> {
    let (dwords, buffer) = load_of(inst.op)?;
    Some(if buffer {
        buffer_range(w, inst, dwords)
    } else {
        (address(w, inst), dwords)
    })
}

/// Cache operations do nothing: caches are not modelled.
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

/// Clears the two low bits of the address, which the hardware ignores.
#[inline(always)]
fn address(w: &Wave, inst: &Inst) -> u64 {
    w.s64(inst.src[0]).wrapping_add(offset(w, inst)) & !3
}

/// Start of a load of `dwords` from a buffer, and the number of them that lie inside. The buffer's size is in bytes, or
/// in strides if it has a stride.
#[inline(always)]
fn buffer_range(w: &Wave, inst: &Inst, dwords: usize) -> (u64, usize) {
    let at = inst.src[0] as usize;
    let [low, word1, records] = std::array::from_fn(|i| w.sgpr[(at + i) & 127]);
    let stride = u64::from(word1 >> 16 & 0x3fff);
    let size = u64::from(records) * stride.max(1);
    let offset = offset(w, inst) & !3;
    let base = u64::from(low) | u64::from(word1 & 0xffff) << 32;
    let inside = (size.saturating_sub(offset) / 4).min(dwords as u64) as usize;
    ((base & !3).wrapping_add(offset), inside)
}

/// Loads `N` dwords.
unsafe fn load<const N: usize>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let address = address(w, inst);
    // SAFETY: the contract is passed on.
    unsafe { read::<N>(w, inst, e, address, N) }
}

/// Loads `N` dwords from a buffer; dwords past its end are 0.
unsafe fn buffer_load<const N: usize>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let (address, inside) = buffer_range(w, inst, N);
    // SAFETY: the contract is passed on.
    unsafe { read::<N>(w, inst, e, address, inside) }
}

/// Reads the first `inside` of `N` dwords from memory; the others are 0.
///
/// # Safety
/// As for [`Exec`].
unsafe fn read<const N: usize>(
    w: &mut Wave,
    inst: &Inst,
    e: &mut Env,
    address: u64,
    inside: usize,
) -> Flow {
    if inside > 0 && !e.memory.contains(&mut e.hint, address, 4 * inside as u64) {
        e.fault = Some(FaultKind::OutOfBounds {
            access: "scalar load",
            address,
            size: 4 * inside as u32,
            lane: 0,
            nearest: e.memory.nearest(address),
        });
        return Flow::Fault;
    }
    for i in 0..N {
        let value = if i < inside {
            // SAFETY: the dwords lie in an allocation, which is valid host memory.
            unsafe { (address as *const u32).add(i).read() }
        } else {
            0
        };
        w.sgpr[(inst.sdst as usize + i) & 127] = value;
    }
    Flow::Next
}
