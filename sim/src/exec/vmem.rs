//! FLAT, GLOBAL and SCRATCH memory instructions.

use super::atomic::{self, atomic_of};
use super::lanes::{
    Addresses, bad_register, check_aligned, check_global, existing, for_kind, gather, kind, lanes,
    registers, scatter,
};
use super::{Env, Exec, Flow, Level, PRIVATE_BASE_HI, SHARED_BASE_HI};
use crate::fault::FaultKind;
use crate::inst::{Format, Inst, M0, NONE, flag};
use crate::op::Op::{self, *};
use crate::wave::{LANES, Wave};

/// Address space of an instruction, as a const parameter.
pub(crate) const GLOBAL: u8 = 0;
pub(crate) const FLAT: u8 = 1;
pub(crate) const SCRATCH: u8 = 2;

/// The function that executes a FLAT, GLOBAL or SCRATCH instruction.
pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    let space = match inst.format {
        Format::Global => GLOBAL,
        Format::Flat => FLAT,
        Format::Scratch => SCRATCH,
        _ => return None,
    };
    if let Some((kind, is_store)) = transfer_of(inst.op) {
        macro_rules! pick {
            ($kind:literal) => {
                match (space, is_store) {
                    (GLOBAL, false) => load::<GLOBAL, $kind>(level),
                    (GLOBAL, true) => store::<GLOBAL, $kind>(level),
                    (FLAT, false) => load::<FLAT, $kind>(level),
                    (FLAT, true) => store::<FLAT, $kind>(level),
                    (_, false) => load::<SCRATCH, $kind>(level),
                    (_, true) => store::<SCRATCH, $kind>(level),
                }
            };
        }
        return Some(for_kind!(kind, pick));
    }
    if dma_of(inst.op).is_some() {
        return Some(if space == SCRATCH {
            load_lds::<SCRATCH>
        } else {
            load_lds::<GLOBAL>
        });
    }
    atomic_of(inst.op)?;
    Some(if space == FLAT {
        atomics::<FLAT>
    } else {
        atomics::<GLOBAL>
    })
}

/// [`leveled!`](super::level::leveled) for the two generic bodies.
macro_rules! leveled_transfer {
    ($name:ident, $body:ident) => {
        fn $name<const SPACE: u8, const KIND: u8>(level: Level) -> Exec {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(
                enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt,avx512f,avx512bw,avx512dq,avx512vl,avx512cd"
            )]
            unsafe fn avx512<const SPACE: u8, const KIND: u8>(
                w: &mut Wave,
                i: &Inst,
                e: &mut Env,
            ) -> Flow {
                // SAFETY: the contract of `Exec` is passed on.
                unsafe { $body::<SPACE, KIND>(w, i, e) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c,bmi1,bmi2,popcnt,lzcnt")]
            unsafe fn avx2<const SPACE: u8, const KIND: u8>(
                w: &mut Wave,
                i: &Inst,
                e: &mut Env,
            ) -> Flow {
                // SAFETY: the contract of `Exec` is passed on.
                unsafe { $body::<SPACE, KIND>(w, i, e) }
            }
            unsafe fn baseline<const SPACE: u8, const KIND: u8>(
                w: &mut Wave,
                i: &Inst,
                e: &mut Env,
            ) -> Flow {
                // SAFETY: the contract of `Exec` is passed on.
                unsafe { $body::<SPACE, KIND>(w, i, e) }
            }
            match level {
                #[cfg(target_arch = "x86_64")]
                Level::Avx512 => avx512::<SPACE, KIND>,
                #[cfg(target_arch = "x86_64")]
                Level::Avx2 => avx2::<SPACE, KIND>,
                _ => baseline::<SPACE, KIND>,
            }
        }
    };
}
leveled_transfer!(load, load_body);
leveled_transfer!(store, store_body);

/// The kind of a load (false) or store (true).
#[rustfmt::skip]
pub(crate) fn transfer_of(op: Op) -> Option<(u8, bool)> {
    Some(match op {
        GLOBAL_LOAD_DWORD | FLAT_LOAD_DWORD | SCRATCH_LOAD_DWORD => (kind::B32, false),
        GLOBAL_LOAD_DWORDX2 | FLAT_LOAD_DWORDX2 | SCRATCH_LOAD_DWORDX2 => (kind::B64, false),
        GLOBAL_LOAD_DWORDX3 | FLAT_LOAD_DWORDX3 | SCRATCH_LOAD_DWORDX3 => (kind::B96, false),
        GLOBAL_LOAD_DWORDX4 | FLAT_LOAD_DWORDX4 | SCRATCH_LOAD_DWORDX4 => (kind::B128, false),
        GLOBAL_LOAD_UBYTE | FLAT_LOAD_UBYTE | SCRATCH_LOAD_UBYTE => (kind::U8, false),
        GLOBAL_LOAD_SBYTE | FLAT_LOAD_SBYTE | SCRATCH_LOAD_SBYTE => (kind::I8, false),
        GLOBAL_LOAD_USHORT | FLAT_LOAD_USHORT | SCRATCH_LOAD_USHORT => (kind::U16, false),
        GLOBAL_LOAD_SSHORT | FLAT_LOAD_SSHORT | SCRATCH_LOAD_SSHORT => (kind::I16, false),
        GLOBAL_LOAD_UBYTE_D16 | FLAT_LOAD_UBYTE_D16 | SCRATCH_LOAD_UBYTE_D16 => (kind::U8_LOW, false),
        GLOBAL_LOAD_SBYTE_D16 | FLAT_LOAD_SBYTE_D16 | SCRATCH_LOAD_SBYTE_D16 => (kind::I8_LOW, false),
        GLOBAL_LOAD_SHORT_D16 | FLAT_LOAD_SHORT_D16 | SCRATCH_LOAD_SHORT_D16 => (kind::B16_LOW, false),
        GLOBAL_LOAD_UBYTE_D16_HI | FLAT_LOAD_UBYTE_D16_HI | SCRATCH_LOAD_UBYTE_D16_HI => (kind::U8_HIGH, false),
        GLOBAL_LOAD_SBYTE_D16_HI | FLAT_LOAD_SBYTE_D16_HI | SCRATCH_LOAD_SBYTE_D16_HI => (kind::I8_HIGH, false),
        GLOBAL_LOAD_SHORT_D16_HI | FLAT_LOAD_SHORT_D16_HI | SCRATCH_LOAD_SHORT_D16_HI => (kind::B16_HIGH, false),
        GLOBAL_STORE_DWORD | FLAT_STORE_DWORD | SCRATCH_STORE_DWORD => (kind::B32, true),
        GLOBAL_STORE_DWORDX2 | FLAT_STORE_DWORDX2 | SCRATCH_STORE_DWORDX2 => (kind::B64, true),
        GLOBAL_STORE_DWORDX3 | FLAT_STORE_DWORDX3 | SCRATCH_STORE_DWORDX3 => (kind::B96, true),
        GLOBAL_STORE_DWORDX4 | FLAT_STORE_DWORDX4 | SCRATCH_STORE_DWORDX4 => (kind::B128, true),
        GLOBAL_STORE_BYTE | FLAT_STORE_BYTE | SCRATCH_STORE_BYTE => (kind::U8, true),
        GLOBAL_STORE_SHORT | FLAT_STORE_SHORT | SCRATCH_STORE_SHORT => (kind::U16, true),
        GLOBAL_STORE_BYTE_D16_HI | FLAT_STORE_BYTE_D16_HI | SCRATCH_STORE_BYTE_D16_HI => (kind::U8_HIGH, true),
        GLOBAL_STORE_SHORT_D16_HI | FLAT_STORE_SHORT_D16_HI | SCRATCH_STORE_SHORT_D16_HI => (kind::B16_HIGH, true),
        _ => return None,
    })
}

/// Bytes and sign extension of a load to LDS.
pub(crate) fn dma_of(op: Op) -> Option<(usize, bool)> {
    Some(match op {
        GLOBAL_LOAD_LDS_DWORD | SCRATCH_LOAD_LDS_DWORD => (4, false),
        GLOBAL_LOAD_LDS_UBYTE | SCRATCH_LOAD_LDS_UBYTE => (1, false),
        GLOBAL_LOAD_LDS_SBYTE | SCRATCH_LOAD_LDS_SBYTE => (1, true),
        GLOBAL_LOAD_LDS_USHORT | SCRATCH_LOAD_LDS_USHORT => (2, false),
        GLOBAL_LOAD_LDS_SSHORT | SCRATCH_LOAD_LDS_SSHORT => (2, true),
        _ => return None,
    })
}

/// Addresses that the lanes form, before any check. For SCRATCH: offsets in the lane's own memory. `None` if the
/// registers do not exist.
#[inline(always)]
pub(crate) fn addresses<const SPACE: u8>(w: &Wave, inst: &Inst) -> Option<Addresses> {
    let mut addresses = [0; LANES];
    let imm = inst.imm as i64 as u64;
    if SPACE == SCRATCH {
        let mut base = imm;
        if inst.sdst != NONE {
            base = base.wrapping_add(u64::from(w.sgpr[inst.sdst as usize & 127]));
        }
        // Offsets are 32 bits wide.
        if inst.src[0] != NONE {
            let v = existing(w, inst.src[0], 1)?;
            for (a, x) in addresses.iter_mut().zip(&w.vgpr[v].0) {
                *a = base.wrapping_add(u64::from(*x)) & 0xffff_ffff;
            }
        } else {
            addresses = [base & 0xffff_ffff; LANES];
        }
    } else if SPACE == GLOBAL && inst.sdst != NONE {
        let base = w.s64(inst.sdst).wrapping_add(imm);
        if inst.src[0] == NONE {
            addresses = [base; LANES];
        } else {
            let v = existing(w, inst.src[0], 1)?;
            for (a, x) in addresses.iter_mut().zip(&w.vgpr[v].0) {
                *a = base.wrapping_add(u64::from(*x));
            }
        }
    } else {
        let v = existing(w, inst.src[0], 2)?;
        let (low, high) = (&w.vgpr[v].0, &w.vgpr[v + 1].0);
        for lane in 0..LANES {
            let address = u64::from(low[lane]) | u64::from(high[lane]) << 32;
            addresses[lane] = address.wrapping_add(imm);
        }
    }
    Some(addresses)
}

/// Memory that a flat address lies in.
pub(crate) enum Aperture {
    Global,
    /// Offset in the workgroup's LDS.
    Lds(u64),
    /// Offset in the lane's scratch.
    Scratch(u64),
}

/// Classifies a flat address by its high half.
#[inline(always)]
pub(crate) fn aperture(address: u64) -> Aperture {
    match (address >> 32) as u32 {
        SHARED_BASE_HI => Aperture::Lds(address & 0xffff_ffff),
        PRIVATE_BASE_HI => Aperture::Scratch(address & 0xffff_ffff),
        _ => Aperture::Global,
    }
}

/// Host addresses of the active lanes, checked.
#[inline(always)]
fn resolve<const SPACE: u8>(
    w: &Wave,
    inst: &Inst,
    e: &mut Env,
    mask: u64,
    size: usize,
    access: &'static str,
) -> Result<Addresses, Flow> {
    let Some(mut addresses) = addresses::<SPACE>(w, inst) else {
        return Err(bad_register(e, inst.src[0]));
    };
    if SPACE == SCRATCH {
        let limit = u64::from(w.scratch_stride);
        let mut outside = false;
        for (lane, a) in addresses.iter_mut().enumerate() {
            let on = mask >> lane & 1 != 0;
            outside |= on && (*a >= limit || limit - *a < size as u64);
            *a = a.wrapping_add(w.scratch + lane as u64 * limit);
        }
        if outside {
            return Err(scratch_fault(w, e, &addresses, mask, size, access));
        }
        return Ok(addresses);
    }
    if SPACE == FLAT {
        let mut special = false;
        for (lane, &a) in addresses.iter().enumerate() {
            special |= mask >> lane & 1 != 0 && !matches!(aperture(a), Aperture::Global);
        }
        if special {
            return resolve_apertures(w, e, addresses, mask, size, access);
        }
    }
    check_global(e, &addresses, mask, size, access)?;
    Ok(addresses)
}

/// Host addresses of flat accesses that lead to LDS or scratch in some lanes.
#[cold]
#[inline(never)]
fn resolve_apertures(
    w: &Wave,
    e: &mut Env,
    mut addresses: Addresses,
    mask: u64,
    size: usize,
    access: &'static str,
) -> Result<Addresses, Flow> {
    let mut global = mask;
    for lane in lanes(mask) {
        match aperture(addresses[lane]) {
            Aperture::Lds(offset) => {
                if offset + size as u64 > e.lds.len() as u64 {
                    e.fault = Some(FaultKind::LdsOutOfBounds {
                        access,
                        address: offset as u32,
                        size: size as u32,
                        lane: lane as u32,
                        limit: e.lds.len() as u32,
                    });
                    return Err(Flow::Fault);
                }
                addresses[lane] = e.lds.as_mut_ptr() as u64 + offset;
            }
            Aperture::Scratch(offset) => {
                let stride = u64::from(w.scratch_stride);
                addresses[lane] = w.scratch + lane as u64 * stride + offset;
                if offset + size as u64 > stride {
                    return Err(scratch_fault(w, e, &addresses, 1 << lane, size, access));
                }
            }
            Aperture::Global => continue,
        }
        global &= !(1 << lane);
    }
    check_global(e, &addresses, global, size, access)?;
    Ok(addresses)
}

/// Describes the first lane outside its scratch.
#[cold]
#[inline(never)]
fn scratch_fault(
    w: &Wave,
    e: &mut Env,
    addresses: &Addresses,
    mask: u64,
    size: usize,
    access: &'static str,
) -> Flow {
    let limit = u64::from(w.scratch_stride);
    let offset = |lane: usize| addresses[lane].wrapping_sub(w.scratch + lane as u64 * limit);
    let outside = |o: u64| o >= limit || limit - o < size as u64;
    let lane = lanes(mask).find(|&l| outside(offset(l))).unwrap_or(0);
    e.fault = Some(FaultKind::ScratchOutOfBounds {
        access,
        address: offset(lane),
        size: size as u32,
        lane: lane as u32,
        limit: w.scratch_stride,
    });
    Flow::Fault
}

/// Unwraps a result, or returns the flow of its error.
macro_rules! attempt {
    ($e:expr) => {
        match $e {
            Ok(x) => x,
            Err(flow) => return flow,
        }
    };
}
pub(super) use attempt;

const fn load_name(space: u8) -> &'static str {
    match space {
        GLOBAL => "global load",
        FLAT => "flat load",
        _ => "scratch load",
    }
}

const fn store_name(space: u8) -> &'static str {
    match space {
        GLOBAL => "global store",
        FLAT => "flat store",
        _ => "scratch store",
    }
}

#[inline(always)]
unsafe fn load_body<const SPACE: u8, const KIND: u8>(
    w: &mut Wave,
    inst: &Inst,
    e: &mut Env,
) -> Flow {
    let mask = w.exec();
    let d = attempt!(registers(w, e, inst.vdst, kind::registers(KIND)));
    let size = kind::size(KIND);
    let addresses = attempt!(resolve::<SPACE>(w, inst, e, mask, size, load_name(SPACE)));
    // SAFETY: the addresses and the registers were checked.
    unsafe { gather::<KIND>(&mut w.vgpr, d, mask, &addresses) };
    Flow::Next
}

#[inline(always)]
unsafe fn store_body<const SPACE: u8, const KIND: u8>(
    w: &mut Wave,
    inst: &Inst,
    e: &mut Env,
) -> Flow {
    let mask = w.exec();
    let d = attempt!(registers(w, e, inst.src[1], kind::registers(KIND)));
    let size = kind::size(KIND);
    let addresses = attempt!(resolve::<SPACE>(w, inst, e, mask, size, store_name(SPACE)));
    // SAFETY: the addresses and the registers were checked.
    unsafe { scatter::<KIND>(&w.vgpr, d, mask, &addresses) };
    Flow::Next
}

/// Loads straight to LDS: lane l's dword goes to M0 + offset + 4 l.
unsafe fn load_lds<const SPACE: u8>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let Some((size, signed)) = dma_of(inst.op) else {
        return Flow::Next;
    };
    let mask = w.exec();
    let addresses = attempt!(resolve::<SPACE>(w, inst, e, mask, size, "load to LDS"));
    let base = dma_base(w, inst);
    // SAFETY: the addresses were checked.
    unsafe { dma_to_lds(e, base, size, signed, mask, &addresses) }
}

/// LDS address that lane 0 of a load to LDS writes.
#[inline(always)]
pub(crate) fn dma_base(w: &Wave, inst: &Inst) -> i64 {
    i64::from(w.sgpr[M0 as usize] & 0xffff) + i64::from(inst.imm)
}

/// Copies `size` bytes of every active lane, extended to a dword, to `base + 4 * lane` of the LDS.
///
/// # Safety
/// The addresses of active lanes are valid for reads of `size` bytes.
pub(super) unsafe fn dma_to_lds(
    e: &mut Env,
    base: i64,
    size: usize,
    signed: bool,
    mask: u64,
    addresses: &Addresses,
) -> Flow {
    for lane in lanes(mask) {
        let at = base + 4 * lane as i64;
        let limit = e.lds.len();
        let Some(to) = usize::try_from(at)
            .ok()
            .and_then(|at| e.lds.get_mut(at..at + 4))
        else {
            e.fault = Some(FaultKind::LdsOutOfBounds {
                access: "load to LDS",
                address: at as u32,
                size: 4,
                lane: lane as u32,
                limit: limit as u32,
            });
            return Flow::Fault;
        };
        let mut bytes = [0; 4];
        // SAFETY: the address is valid, by the contract.
        unsafe {
            std::ptr::copy_nonoverlapping(addresses[lane] as *const u8, bytes.as_mut_ptr(), size);
        }
        if signed && bytes[size - 1] & 0x80 != 0 {
            bytes[size..].fill(0xff);
        }
        to.copy_from_slice(&bytes);
    }
    Flow::Next
}

/// Atomics; SC0 asks for the old value.
unsafe fn atomics<const SPACE: u8>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let Some(atomic) = atomic_of(inst.op) else {
        return Flow::Next;
    };
    let mask = w.exec();
    let n = atomic.dwords();
    let operands = if atomic.has_second() { 2 * n } else { n };
    let data = attempt!(registers(w, e, inst.src[1], operands));
    let old = if inst.has(flag::SC0) {
        Some(attempt!(registers(w, e, inst.vdst, n)))
    } else {
        None
    };
    let addresses = attempt!(resolve::<SPACE>(w, inst, e, mask, 4 * n, "atomic"));
    attempt!(check_aligned(e, &addresses, mask, 4 * n as u32, "atomic"));
    // SAFETY: addresses, alignment and registers were checked.
    unsafe { atomic::perform(w, atomic, data, data + n, old, mask, &addresses) };
    Flow::Next
}
