//! MUBUF instructions: memory through a buffer resource.
//!
//! A resource (four SGPRs) holds a 48-bit base, a 14-bit stride, the number of records and a format. Swizzled
//! resources, and resources that add the lane number, are not implemented.
//!
//! The offset in the buffer is `stride * index + lane offset + immediate`. Without an index, or with stride 0, a dword
//! is in range if it ends at or before `num_records - soffset` bytes. With an index and a stride, it is in range if the
//! index is below `num_records`. Loads out of range give 0; stores and atomics out of range do nothing. Addresses in
//! range must still lie in an allocation.

use super::atomic::{self, atomic_of};
use super::lanes::{
    Addresses, bad_register, check_aligned, check_global, existing, for_kind, gather, kind, lanes,
    load_lane, load_zero, registers, scatter, store_lane,
};
use super::vmem::{attempt, dma_to_lds};
use super::{Env, Exec, Flow, Level, leveled};
use crate::fault::FaultKind;
use crate::inst::{Format, Inst, LITERAL, M0, flag};
use crate::op::Op::{self, *};
use crate::wave::{LANES, Wave};

/// The function that executes a MUBUF instruction.
pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    if inst.format != Format::Mubuf {
        return None;
    }
    if matches!(
        inst.op,
        BUFFER_INV | BUFFER_WBL2 | BUFFER_WBINVL1 | BUFFER_WBINVL1_VOL
    ) {
        return Some(nothing);
    }
    if let Some((kind, is_store)) = transfer_of(inst.op) {
        if inst.has(flag::LDS) && !is_store {
            return Some(load_lds);
        }
        return Some(match (kind, is_store) {
            (kind::B32, false) => load_b32(level),
            (kind::B64, false) => load_b64(level),
            (kind::B128, false) => load_b128(level),
            (kind::U16, false) => load_u16(level),
            (kind::B32, true) => store_b32(level),
            (kind::B64, true) => store_b64(level),
            (kind::B128, true) => store_b128(level),
            (kind::U16, true) => store_u16(level),
            (kind, false) => {
                macro_rules! pick {
                    ($kind:literal) => {
                        load::<$kind>
                    };
                }
                for_kind!(kind, pick)
            }
            (kind, true) => {
                macro_rules! pick {
                    ($kind:literal) => {
                        store::<$kind>
                    };
                }
                for_kind!(kind, pick)
            }
        });
    }
    atomic_of(inst.op)?;
    Some(atomics)
}

leveled!(fn load_b32 = load::<{ kind::B32 }>);
leveled!(fn load_b64 = load::<{ kind::B64 }>);
leveled!(fn load_b128 = load::<{ kind::B128 }>);
leveled!(fn load_u16 = load::<{ kind::U16 }>);
leveled!(fn store_b32 = store::<{ kind::B32 }>);
leveled!(fn store_u16 = store::<{ kind::U16 }>);
leveled!(fn store_b64 = store::<{ kind::B64 }>);
leveled!(fn store_b128 = store::<{ kind::B128 }>);

/// Cache operations do nothing: caches are not modelled.
unsafe fn nothing(_: &mut Wave, _: &Inst, _: &mut Env) -> Flow {
    Flow::Next
}

/// The kind of a load (false) or store (true). Format loads count as loads of 32-bit formats.
pub(crate) fn transfer_of(op: Op) -> Option<(u8, bool)> {
    Some(match op {
        BUFFER_LOAD_DWORD | BUFFER_LOAD_FORMAT_X => (kind::B32, false),
        BUFFER_LOAD_DWORDX2 | BUFFER_LOAD_FORMAT_XY => (kind::B64, false),
        BUFFER_LOAD_DWORDX3 | BUFFER_LOAD_FORMAT_XYZ => (kind::B96, false),
        BUFFER_LOAD_DWORDX4 | BUFFER_LOAD_FORMAT_XYZW => (kind::B128, false),
        BUFFER_LOAD_UBYTE => (kind::U8, false),
        BUFFER_LOAD_SBYTE => (kind::I8, false),
        BUFFER_LOAD_USHORT => (kind::U16, false),
        BUFFER_LOAD_SSHORT => (kind::I16, false),
        BUFFER_LOAD_UBYTE_D16 => (kind::U8_LOW, false),
        BUFFER_LOAD_SBYTE_D16 => (kind::I8_LOW, false),
        BUFFER_LOAD_SHORT_D16 => (kind::B16_LOW, false),
        BUFFER_LOAD_UBYTE_D16_HI => (kind::U8_HIGH, false),
        BUFFER_LOAD_SBYTE_D16_HI => (kind::I8_HIGH, false),
        BUFFER_LOAD_SHORT_D16_HI => (kind::B16_HIGH, false),
        BUFFER_STORE_DWORD | BUFFER_STORE_FORMAT_X => (kind::B32, true),
        BUFFER_STORE_DWORDX2 | BUFFER_STORE_FORMAT_XY => (kind::B64, true),
        BUFFER_STORE_DWORDX3 | BUFFER_STORE_FORMAT_XYZ => (kind::B96, true),
        BUFFER_STORE_DWORDX4 | BUFFER_STORE_FORMAT_XYZW => (kind::B128, true),
        BUFFER_STORE_BYTE => (kind::U8, true),
        BUFFER_STORE_SHORT => (kind::U16, true),
        BUFFER_STORE_BYTE_D16_HI => (kind::U8_HIGH, true),
        BUFFER_STORE_SHORT_D16_HI => (kind::B16_HIGH, true),
        _ => return None,
    })
}

/// Components of a format instruction.
fn format_components(op: Op) -> Option<u32> {
    Some(match op {
        BUFFER_LOAD_FORMAT_X | BUFFER_STORE_FORMAT_X => 1,
        BUFFER_LOAD_FORMAT_XY | BUFFER_STORE_FORMAT_XY => 2,
        BUFFER_LOAD_FORMAT_XYZ | BUFFER_STORE_FORMAT_XYZ => 3,
        BUFFER_LOAD_FORMAT_XYZW | BUFFER_STORE_FORMAT_XYZW => 4,
        _ => return None,
    })
}

/// Addresses of the lanes of a buffer instruction.
pub(crate) struct Access {
    pub addresses: Addresses,
    /// Active lanes with all their bytes in range.
    pub inside: u64,
    /// Active lanes with bytes out of range.
    pub outside: u64,
    /// For the lanes in `outside`: number of bytes that are in range.
    pub room: [u32; LANES],
}

/// The word of a scalar operand.
#[inline(always)]
fn scalar(w: &Wave, inst: &Inst, operand: u16) -> u32 {
    match operand {
        0..=127 => w.sgpr[operand as usize],
        128..=192 => u32::from(operand) - 128,
        193..=208 => (192 - i32::from(operand)) as u32,
        LITERAL => inst.literal,
        _ => 0,
    }
}

/// The resource; `None` if this instruction is not implemented for it.
#[inline(always)]
fn resource(w: &Wave, inst: &Inst) -> Option<[u32; 4]> {
    let at = inst.src[1] as usize;
    let words: [u32; 4] = std::array::from_fn(|i| w.sgpr[(at + i) & 127]);
    let swizzled = words[1] >> 31 != 0 || words[3] >> 23 & 1 != 0;
    (!swizzled && format_fits(inst.op, words[3])).then_some(words)
}

/// Addresses of the active lanes, with `size` bytes each. `None` if the address registers do not exist.
#[inline(always)]
fn locate(w: &Wave, inst: &Inst, resource: [u32; 4], size: usize) -> Option<Access> {
    let [base_low, word1, records, _] = resource;
    let base = u64::from(base_low) | u64::from(word1 & 0xffff) << 32;
    let stride = u64::from(word1 >> 16 & 0x3fff);
    let soffset = u64::from(scalar(w, inst, inst.src[2]));
    let imm = (inst.imm & 0xfff) as u64;
    let (idxen, offen) = (inst.has(flag::IDXEN), inst.has(flag::OFFEN));
    let v = match usize::from(idxen) + usize::from(offen) {
        0 => 0,
        n => existing(w, inst.src[0], n)?,
    };
    let mut offsets = [imm; LANES];
    if offen {
        let register = &w.vgpr[v + usize::from(idxen)].0;
        for (offset, x) in offsets.iter_mut().zip(register) {
            *offset += u64::from(*x);
        }
    }
    if idxen {
        for (offset, x) in offsets.iter_mut().zip(&w.vgpr[v].0) {
            *offset += stride * u64::from(*x);
        }
    }
    let mask = w.exec();
    let mut inside = 0;
    let mut room = [0; LANES];
    if idxen && stride != 0 {
        for (lane, index) in w.vgpr[v].0.iter().enumerate() {
            inside |= u64::from(*index < records) << lane;
        }
    } else {
        let limit = u64::from(records).saturating_sub(soffset);
        for (lane, offset) in offsets.iter().enumerate() {
            inside |= u64::from(offset + size as u64 <= limit) << lane;
        }
        if mask & !inside != 0 {
            for (room, offset) in room.iter_mut().zip(&offsets) {
                *room = limit.saturating_sub(*offset).min(16) as u32;
            }
        }
    }
    let mut addresses = offsets;
    for a in &mut addresses {
        *a = a.wrapping_add(base + soffset);
    }
    Some(Access {
        addresses,
        inside: inside & mask,
        outside: mask & !inside,
        room,
    })
}

/// The addresses of the active lanes; `None` if the instruction will fault.
pub(crate) fn located(w: &Wave, inst: &Inst, size: usize) -> Option<Access> {
    locate(w, inst, resource(w, inst)?, size)
}

#[inline(always)]
fn resolve(
    w: &Wave,
    inst: &Inst,
    e: &mut Env,
    size: usize,
    access: &'static str,
) -> Result<Access, Flow> {
    let Some(resource) = resource(w, inst) else {
        return Err(unimplemented(e, inst.op));
    };
    let Some(a) = locate(w, inst, resource, size) else {
        return Err(bad_register(e, inst.src[0]));
    };
    check_global(e, &a.addresses, a.inside, size, access)?;
    Ok(a)
}

/// Whether the resource's format is the plain 32-bit one that a format instruction needs here.
#[inline(always)]
fn format_fits(op: Op, word3: u32) -> bool {
    let Some(components) = format_components(op) else {
        return true;
    };
    // 32, 32_32, 32_32_32, 32_32_32_32; unsigned, signed or float.
    let data = match components {
        1 => 4,
        2 => 11,
        3 => 13,
        _ => 14,
    };
    word3 >> 15 & 15 == data && matches!(word3 >> 12 & 7, 4 | 5 | 7)
}

#[cold]
#[inline(never)]
fn unimplemented(e: &mut Env, op: Op) -> Flow {
    e.fault = Some(FaultKind::Unimplemented {
        mnemonic: format!("{op:?} with this buffer resource").to_lowercase(),
    });
    Flow::Fault
}

/// Number of dwords in range, counted from a lane's first, for a lane that is partly in range.
fn dwords_in_range(
    e: &mut Env,
    a: &Access,
    lane: usize,
    access: &'static str,
) -> Result<usize, Flow> {
    let count = a.room[lane] as usize / 4;
    if count > 0 {
        check_global(e, &a.addresses, 1 << lane, 4 * count, access)?;
    }
    Ok(count)
}

#[inline(always)]
unsafe fn load<const KIND: u8>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.vdst, kind::registers(KIND)));
    let a = attempt!(resolve(w, inst, e, kind::size(KIND), "buffer load"));
    // SAFETY: addresses inside and registers were checked.
    unsafe { gather::<KIND>(&mut w.vgpr, d, a.inside, &a.addresses) };
    if a.outside != 0 {
        for lane in lanes(a.outside) {
            load_zero::<KIND>(&mut w.vgpr, d, lane);
            if KIND <= kind::B128 {
                let count = attempt!(dwords_in_range(e, &a, lane, "buffer load"));
                for r in 0..count {
                    let address = a.addresses[lane] + 4 * r as u64;
                    // SAFETY: this dword was checked.
                    unsafe { load_lane::<{ kind::B32 }>(&mut w.vgpr, d + r, lane, address) };
                }
            }
        }
    }
    Flow::Next
}

#[inline(always)]
unsafe fn store<const KIND: u8>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.vdst, kind::registers(KIND)));
    let a = attempt!(resolve(w, inst, e, kind::size(KIND), "buffer store"));
    // SAFETY: addresses inside and registers were checked.
    unsafe { scatter::<KIND>(&w.vgpr, d, a.inside, &a.addresses) };
    if a.outside != 0 && KIND <= kind::B128 {
        for lane in lanes(a.outside) {
            let count = attempt!(dwords_in_range(e, &a, lane, "buffer store"));
            for r in 0..count {
                let address = a.addresses[lane] + 4 * r as u64;
                // SAFETY: this dword was checked.
                unsafe { store_lane::<{ kind::B32 }>(&w.vgpr, d + r, lane, address) };
            }
        }
    }
    Flow::Next
}

/// Bytes and sign extension of a load to LDS.
pub(crate) fn dma_of(op: Op) -> Option<(usize, bool)> {
    Some(match op {
        BUFFER_LOAD_DWORD => (4, false),
        BUFFER_LOAD_UBYTE => (1, false),
        BUFFER_LOAD_SBYTE => (1, true),
        BUFFER_LOAD_USHORT => (2, false),
        BUFFER_LOAD_SSHORT => (2, true),
        _ => return None,
    })
}

/// LDS address that lane 0 of a load to LDS writes.
#[inline(always)]
pub(crate) fn dma_base(w: &Wave, inst: &Inst) -> i64 {
    i64::from(w.sgpr[M0 as usize] & 0xffff) + i64::from(inst.imm & 0xfff)
}

/// Loads straight to LDS: lane l's dword goes to M0 + immediate + 4 l. Lanes out of range write 0.
unsafe fn load_lds(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    static ZERO: u32 = 0;
    let Some((size, signed)) = dma_of(inst.op) else {
        return unimplemented(e, inst.op);
    };
    let mut a = attempt!(resolve(w, inst, e, size, "buffer load to LDS"));
    for lane in lanes(a.outside) {
        a.addresses[lane] = &raw const ZERO as u64;
    }
    let base = dma_base(w, inst);
    // SAFETY: addresses inside were checked, the others point to a static.
    unsafe { dma_to_lds(e, base, size, signed, w.exec(), &a.addresses) }
}

/// Atomics; SC0 asks for the old value, which is 0 for lanes out of range.
unsafe fn atomics(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let Some(atomic) = atomic_of(inst.op) else {
        return Flow::Next;
    };
    let n = atomic.dwords();
    let operands = if atomic.has_second() { 2 * n } else { n };
    let data = attempt!(registers(w, e, inst.vdst, operands));
    let a = attempt!(resolve(w, inst, e, 4 * n, "buffer atomic"));
    attempt!(check_aligned(
        e,
        &a.addresses,
        a.inside,
        4 * n as u32,
        "buffer atomic"
    ));
    let old = inst.has(flag::SC0).then_some(data);
    // SAFETY: addresses, alignment and registers were checked.
    unsafe { atomic::perform(w, atomic, data, data + n, old, a.inside, &a.addresses) };
    if old.is_some() {
        for lane in lanes(a.outside) {
            for r in 0..n {
                w.vgpr[data + r].0[lane] = 0;
            }
        }
    }
    Flow::Next
}
