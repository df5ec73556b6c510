//! DS instructions: the local data share, and exchanges between lanes through its crossbar.
//!
//! A lane's address is its 32-bit VGPR plus the offset. Two-address forms count offsets in elements (`st64`: in 64
//! elements). Loads and stores may have any alignment: the HSA driver configures the hardware so, and compilers rely on
//! it. Atomics must be aligned.

use super::atomic::{self, atomic_of};
use super::lanes::{
    Addresses, bad_register, check_aligned, existing, gather, kind, lanes, registers, scatter, span,
};
use super::vmem::attempt;
use super::{Env, Exec, Flow, Level, leveled};
use crate::fault::FaultKind;
use crate::inst::{Format, Inst, M0, flag};
use crate::op::Op::*;
use crate::wave::{LANES, Wave};

/// The function that executes a DS instruction.
#[rustfmt::skip]
pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    if inst.format != Format::Ds || inst.has(flag::GDS) {
        return None;
    }
    Some(match inst.op {
        DS_READ_B32 => read_b32(level),
        DS_READ_B64 => read_b64(level),
        DS_READ_B96 => read_b96(level),
        DS_READ_B128 => read_b128(level),
        DS_READ_U8 => read_u8(level),
        DS_READ_I8 => read_i8(level),
        DS_READ_U16 => read_u16(level),
        DS_READ_I16 => read_i16(level),
        DS_READ_U8_D16 => read_u8_d16(level),
        DS_READ_I8_D16 => read_i8_d16(level),
        DS_READ_U16_D16 => read_u16_d16(level),
        DS_READ_U8_D16_HI => read_u8_d16_hi(level),
        DS_READ_I8_D16_HI => read_i8_d16_hi(level),
        DS_READ_U16_D16_HI => read_u16_d16_hi(level),
        DS_READ2_B32 => read2_b32(level),
        DS_READ2_B64 => read2_b64(level),
        DS_READ2ST64_B32 => read2st64_b32(level),
        DS_READ2ST64_B64 => read2st64_b64(level),
        DS_WRITE_B32 => write_b32(level),
        DS_WRITE_B64 => write_b64(level),
        DS_WRITE_B96 => write_b96(level),
        DS_WRITE_B128 => write_b128(level),
        DS_WRITE_B8 => write_u8(level),
        DS_WRITE_B16 => write_u16(level),
        DS_WRITE_B8_D16_HI => write_u8_d16_hi(level),
        DS_WRITE_B16_D16_HI => write_u16_d16_hi(level),
        DS_WRITE2_B32 => write2_b32(level),
        DS_WRITE2_B64 => write2_b64(level),
        DS_WRITE2ST64_B32 => write2st64_b32(level),
        DS_WRITE2ST64_B64 => write2st64_b64(level),
        DS_WRXCHG2_RTN_B32 => exchange2::<{ kind::B32 }, 1>,
        DS_WRXCHG2_RTN_B64 => exchange2::<{ kind::B64 }, 1>,
        DS_WRXCHG2ST64_RTN_B32 => exchange2::<{ kind::B32 }, 64>,
        DS_WRXCHG2ST64_RTN_B64 => exchange2::<{ kind::B64 }, 64>,
        DS_READ_ADDTID_B32 => read_addtid,
        DS_WRITE_ADDTID_B32 => write_addtid,
        DS_SWIZZLE_B32 => swizzle_lanes(level),
        DS_PERMUTE_B32 => permute_lanes(level),
        DS_BPERMUTE_B32 => bpermute_lanes(level),
        DS_APPEND => append::<false>,
        DS_CONSUME => append::<true>,
        DS_NOP => nothing,
        op => {
            atomic_of(op)?;
            atomics
        }
    })
}

leveled!(fn read_b32 = read::<{ kind::B32 }>);
leveled!(fn read_b64 = read::<{ kind::B64 }>);
leveled!(fn read_b96 = read::<{ kind::B96 }>);
leveled!(fn read_b128 = read::<{ kind::B128 }>);
leveled!(fn read_u8 = read::<{ kind::U8 }>);
leveled!(fn read_i8 = read::<{ kind::I8 }>);
leveled!(fn read_u16 = read::<{ kind::U16 }>);
leveled!(fn read_i16 = read::<{ kind::I16 }>);
leveled!(fn read_u8_d16 = read::<{ kind::U8_LOW }>);
leveled!(fn read_i8_d16 = read::<{ kind::I8_LOW }>);
leveled!(fn read_u16_d16 = read::<{ kind::B16_LOW }>);
leveled!(fn read_u8_d16_hi = read::<{ kind::U8_HIGH }>);
leveled!(fn read_i8_d16_hi = read::<{ kind::I8_HIGH }>);
leveled!(fn read_u16_d16_hi = read::<{ kind::B16_HIGH }>);
leveled!(fn write_u8 = write::<{ kind::U8 }>);
leveled!(fn write_u16 = write::<{ kind::U16 }>);
leveled!(fn write_u8_d16_hi = write::<{ kind::U8_HIGH }>);
leveled!(fn write_u16_d16_hi = write::<{ kind::B16_HIGH }>);
leveled!(fn swizzle_lanes = swizzle);
leveled!(fn bpermute_lanes = bpermute);
leveled!(fn permute_lanes = permute);
leveled!(fn read2_b32 = read2::<{ kind::B32 }, 1>);
leveled!(fn read2_b64 = read2::<{ kind::B64 }, 1>);
leveled!(fn read2st64_b32 = read2::<{ kind::B32 }, 64>);
leveled!(fn read2st64_b64 = read2::<{ kind::B64 }, 64>);
leveled!(fn write_b32 = write::<{ kind::B32 }>);
leveled!(fn write_b64 = write::<{ kind::B64 }>);
leveled!(fn write_b96 = write::<{ kind::B96 }>);
leveled!(fn write_b128 = write::<{ kind::B128 }>);
leveled!(fn write2_b32 = write2::<{ kind::B32 }, 1>);
leveled!(fn write2_b64 = write2::<{ kind::B64 }, 1>);
leveled!(fn write2st64_b32 = write2::<{ kind::B32 }, 64>);
leveled!(fn write2st64_b64 = write2::<{ kind::B64 }, 64>);

/// `ds_nop`.
unsafe fn nothing(_: &mut Wave, _: &Inst, _: &mut Env) -> Flow {
    Flow::Next
}

/// LDS addresses of the lanes: address register plus `offset`. `None` if the register does not exist.
#[inline(always)]
pub(crate) fn addresses(w: &Wave, inst: &Inst, offset: u64) -> Option<Addresses> {
    let v = existing(w, inst.src[0], 1)?;
    let mut addresses = [0; LANES];
    for (a, x) in addresses.iter_mut().zip(&w.vgpr[v].0) {
        // Compilers fold constants into the offset even if the rest may be negative.
        *a = u64::from(x.wrapping_add(offset as u32));
    }
    Some(addresses)
}

/// Host addresses of the lanes' LDS accesses at address register plus `offset`, checked.
#[inline(always)]
fn resolve(
    w: &Wave,
    inst: &Inst,
    e: &mut Env,
    offset: u64,
    size: usize,
    align: u32,
    access: &'static str,
) -> Result<Addresses, Flow> {
    let Some(addresses) = addresses(w, inst, offset) else {
        return Err(bad_register(e, inst.src[0]));
    };
    to_host(e, addresses, w.exec(), size, align, access)
}

/// Checks LDS addresses and turns them into host addresses.
#[inline(always)]
fn to_host(
    e: &mut Env,
    mut addresses: Addresses,
    mask: u64,
    size: usize,
    align: u32,
    access: &'static str,
) -> Result<Addresses, Flow> {
    if mask == 0 {
        return Ok(addresses);
    }
    let (_, high) = span(&addresses, mask);
    if high + size as u64 > e.lds.len() as u64 {
        return Err(outside(e, &addresses, mask, size, access));
    }
    if align > 1 {
        check_aligned(e, &addresses, mask, align, access)?;
    }
    let base = e.lds.as_mut_ptr() as u64;
    for a in &mut addresses {
        *a = a.wrapping_add(base);
    }
    Ok(addresses)
}

#[cold]
#[inline(never)]
fn outside(
    e: &mut Env,
    addresses: &Addresses,
    mask: u64,
    size: usize,
    access: &'static str,
) -> Flow {
    let limit = e.lds.len() as u64;
    let lane = lanes(mask)
        .find(|&l| addresses[l] + size as u64 > limit)
        .unwrap_or(0);
    e.fault = Some(FaultKind::LdsOutOfBounds {
        access,
        address: addresses[lane] as u32,
        size: size as u32,
        lane: lane as u32,
        limit: limit as u32,
    });
    Flow::Fault
}

/// The 16-bit offset.
#[inline(always)]
pub(crate) fn offset(inst: &Inst) -> u64 {
    (inst.imm & 0xffff) as u64
}

/// The two 8-bit offsets, in bytes.
#[inline(always)]
fn offsets<const KIND: u8, const STRIDE: u64>(inst: &Inst) -> (u64, u64) {
    offsets_of(inst, kind::size(KIND) as u64 * STRIDE)
}

/// The two 8-bit offsets in bytes, in units of `unit` bytes.
#[inline(always)]
pub(crate) fn offsets_of(inst: &Inst, unit: u64) -> (u64, u64) {
    let imm = inst.imm as u64;
    ((imm & 255) * unit, (imm >> 8 & 255) * unit)
}

#[inline(always)]
unsafe fn read<const KIND: u8>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.vdst, kind::registers(KIND)));
    let (size, mask) = (kind::size(KIND), w.exec());
    let a = attempt!(resolve(w, inst, e, offset(inst), size, 1, "LDS read"));
    // SAFETY: addresses and registers were checked.
    unsafe { gather::<KIND>(&mut w.vgpr, d, mask, &a) };
    Flow::Next
}

#[inline(always)]
unsafe fn write<const KIND: u8>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.src[1], kind::registers(KIND)));
    let size = kind::size(KIND);
    let a = attempt!(resolve(w, inst, e, offset(inst), size, 1, "LDS write"));
    // SAFETY: addresses and registers were checked.
    unsafe { scatter::<KIND>(&w.vgpr, d, w.exec(), &a) };
    Flow::Next
}

#[inline(always)]
unsafe fn read2<const KIND: u8, const STRIDE: u64>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let (n, size, mask) = (kind::registers(KIND), kind::size(KIND), w.exec());
    let d = attempt!(registers(w, e, inst.vdst, 2 * n));
    let (first, second) = offsets::<KIND, STRIDE>(inst);
    let a = attempt!(resolve(w, inst, e, first, size, 1, "LDS read"));
    let b = attempt!(resolve(w, inst, e, second, size, 1, "LDS read"));
    // SAFETY: addresses and registers were checked.
    unsafe {
        gather::<KIND>(&mut w.vgpr, d, mask, &a);
        gather::<KIND>(&mut w.vgpr, d + n, mask, &b);
    }
    Flow::Next
}

#[inline(always)]
unsafe fn write2<const KIND: u8, const STRIDE: u64>(
    w: &mut Wave,
    inst: &Inst,
    e: &mut Env,
) -> Flow {
    let (n, size, mask) = (kind::registers(KIND), kind::size(KIND), w.exec());
    let x = attempt!(registers(w, e, inst.src[1], n));
    let y = attempt!(registers(w, e, inst.src[2], n));
    let (first, second) = offsets::<KIND, STRIDE>(inst);
    let a = attempt!(resolve(w, inst, e, first, size, 1, "LDS write"));
    let b = attempt!(resolve(w, inst, e, second, size, 1, "LDS write"));
    // SAFETY: addresses and registers were checked.
    unsafe {
        scatter::<KIND>(&w.vgpr, x, mask, &a);
        scatter::<KIND>(&w.vgpr, y, mask, &b);
    }
    Flow::Next
}

/// Two exchanges. Lanes take turns in ascending order.
unsafe fn exchange2<const KIND: u8, const STRIDE: u64>(
    w: &mut Wave,
    inst: &Inst,
    e: &mut Env,
) -> Flow {
    let (n, size) = (kind::registers(KIND), kind::size(KIND));
    let d = attempt!(registers(w, e, inst.vdst, 2 * n));
    let x = attempt!(registers(w, e, inst.src[1], n));
    let y = attempt!(registers(w, e, inst.src[2], n));
    let (first, second) = offsets::<KIND, STRIDE>(inst);
    let a = attempt!(resolve(
        w,
        inst,
        e,
        first,
        size,
        size as u32,
        "LDS exchange"
    ));
    let b = attempt!(resolve(
        w,
        inst,
        e,
        second,
        size,
        size as u32,
        "LDS exchange"
    ));
    for lane in lanes(w.exec()) {
        let one = 1u64 << lane;
        let mut data = [w.vgpr[x], w.vgpr[y]];
        if n == 2 {
            data = [w.vgpr[x + 1], w.vgpr[y + 1]];
        }
        let (x0, y0) = (w.vgpr[x].0[lane], w.vgpr[y].0[lane]);
        // SAFETY: addresses, alignment and registers were checked.
        unsafe {
            gather::<KIND>(&mut w.vgpr, d, one, &a);
            gather::<KIND>(&mut w.vgpr, d + n, one, &b);
            for (address, low, high) in [(a[lane], x0, data[0]), (b[lane], y0, data[1])] {
                (address as *mut u32).write(low);
                if n == 2 {
                    (address as *mut u32).add(1).write(high.0[lane]);
                }
            }
        }
    }
    Flow::Next
}

/// Atomics; the `_rtn` forms have a destination.
unsafe fn atomics(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let Some(atomic) = atomic_of(inst.op) else {
        return Flow::Next;
    };
    let n = atomic.dwords();
    let size = 4 * n;
    let mut data = attempt!(registers(w, e, inst.src[1], n));
    let mut second = data;
    if atomic.has_second() {
        second = attempt!(registers(w, e, inst.src[2], n));
        // Compare-and-swap has the comparand first.
        if matches!(
            atomic.change,
            atomic::Change::Cmpswap | atomic::Change::CmpswapFloat
        ) {
            (data, second) = (second, data);
        }
    }
    let old = if inst.vdst == crate::inst::NONE {
        None
    } else {
        Some(attempt!(registers(w, e, inst.vdst, n)))
    };
    let a = attempt!(resolve(
        w,
        inst,
        e,
        offset(inst),
        size,
        size as u32,
        "LDS atomic"
    ));
    // SAFETY: addresses, alignment and registers were checked.
    unsafe { atomic::perform(w, atomic, data, second, old, w.exec(), &a) };
    Flow::Next
}

/// LDS address M0 + offset.
#[inline(always)]
pub(crate) fn m0_base(w: &Wave, inst: &Inst) -> u64 {
    u64::from(w.sgpr[M0 as usize] & 0xffff) + offset(inst)
}

/// Addresses M0 + offset + 4 * lane.
pub(crate) fn addtid_addresses(w: &Wave, inst: &Inst) -> Addresses {
    let base = m0_base(w, inst);
    std::array::from_fn(|lane| base + 4 * lane as u64)
}

fn addtid(w: &Wave, inst: &Inst, e: &mut Env, access: &'static str) -> Result<Addresses, Flow> {
    let addresses = addtid_addresses(w, inst);
    to_host(e, addresses, w.exec(), 4, 4, access)
}

unsafe fn read_addtid(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.vdst, 1));
    let a = attempt!(addtid(w, inst, e, "LDS read"));
    let mask = w.exec();
    // SAFETY: addresses and registers were checked.
    unsafe { gather::<{ kind::B32 }>(&mut w.vgpr, d, mask, &a) };
    Flow::Next
}

unsafe fn write_addtid(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.src[1], 1));
    let a = attempt!(addtid(w, inst, e, "LDS write"));
    // SAFETY: addresses and registers were checked.
    unsafe { scatter::<{ kind::B32 }>(&w.vgpr, d, w.exec(), &a) };
    Flow::Next
}

/// `ds_append` adds the number of active lanes to a counter at M0 + offset, `ds_consume` subtracts it. All active lanes
/// get the old value.
unsafe fn append<const CONSUME: bool>(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.vdst, 1));
    let mask = w.exec();
    let at = m0_base(w, inst);
    let a = attempt!(to_host(e, [at; LANES], 1, 4, 4, "LDS counter"));
    let count = mask.count_ones();
    let cell = a[0] as *mut u32;
    // SAFETY: the address was checked, and LDS belongs to this workgroup, which runs one wave at a time.
    let old = unsafe {
        let old = cell.read_unaligned();
        cell.write_unaligned(if CONSUME {
            old.wrapping_sub(count)
        } else {
            old.wrapping_add(count)
        });
        old
    };
    for lane in lanes(mask) {
        w.vgpr[d].0[lane] = old;
    }
    Flow::Next
}

/// Gives every active lane the data of lane `from(lane)`, or 0 if that lane is inactive.
#[inline(always)]
fn pull(w: &mut Wave, d: usize, data: usize, from: impl Fn(&Wave, usize) -> usize) {
    let mask = w.exec();
    let values = w.vgpr[data].0;
    let mut out = w.vgpr[d].0;
    for (lane, out) in out.iter_mut().enumerate() {
        let source = from(w, lane) & 63;
        let value = if mask >> source & 1 != 0 {
            values[source]
        } else {
            0
        };
        if mask >> lane & 1 != 0 {
            *out = value;
        }
    }
    w.vgpr[d].0 = out;
}

/// Fixed patterns: quads (offset bit 15), rotations (0xc000 on), FFT (0xe000 on), else bit masks.
#[inline(always)]
unsafe fn swizzle(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.vdst, 1));
    let data = attempt!(registers(w, e, inst.src[0], 1));
    let pattern = (inst.imm & 0xffff) as usize;
    pull(w, d, data, |_, lane| swizzle_source(pattern, lane));
    Flow::Next
}

/// The lane that `lane` reads under a swizzle pattern. Patterns work within 32 lanes.
#[inline(always)]
pub(crate) fn swizzle_source(pattern: usize, lane: usize) -> usize {
    let (half, i) = (lane & 32, lane & 31);
    let low = pattern & 31;
    half | match pattern {
        0xe000.. => {
            let reversed = (i as u8).reverse_bits() as usize >> 3;
            (reversed >> low.count_ones()) | (i & low)
        }
        0xc000.. => {
            let amount = pattern >> 5 & 31;
            let moved = if pattern & 0x400 != 0 {
                i + 32 - amount
            } else {
                i + amount
            };
            (i & low) | (moved & !low & 31)
        }
        0x8000.. => (i & !3) | (pattern >> (2 * (i & 3)) & 3),
        _ => ((i & low) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31),
    }
}

/// Every active lane reads from the lane that it names.
#[inline(always)]
unsafe fn bpermute(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.vdst, 1));
    let index = attempt!(registers(w, e, inst.src[0], 1));
    let data = attempt!(registers(w, e, inst.src[1], 1));
    let offset = offset(inst) as u32;
    pull(w, d, data, |w, lane| {
        (w.vgpr[index].0[lane].wrapping_add(offset) >> 2) as usize
    });
    Flow::Next
}

/// Every active lane writes to the lane that it names; the highest lane wins. Lanes that nothing writes get 0.
#[inline(always)]
unsafe fn permute(w: &mut Wave, inst: &Inst, e: &mut Env) -> Flow {
    let d = attempt!(registers(w, e, inst.vdst, 1));
    let index = attempt!(registers(w, e, inst.src[0], 1));
    let data = attempt!(registers(w, e, inst.src[1], 1));
    let mut out = [0; LANES];
    for lane in lanes(w.exec()) {
        let to = w.vgpr[index].0[lane].wrapping_add(offset(inst) as u32) >> 2 & 63;
        out[to as usize] = w.vgpr[data].0[lane];
    }
    for lane in lanes(w.exec()) {
        w.vgpr[d].0[lane] = out[lane];
    }
    Flow::Next
}

#[cfg(test)]
mod tests {
    use super::swizzle_source;

    #[test]
    fn swizzle_patterns() {
        // SWAP,16 is an exclusive or with 16.
        assert_eq!(swizzle_source(0x401f, 3), 19);
        assert_eq!(swizzle_source(0x401f, 40), 56);
        // BROADCAST,2,1: lane 1 of every pair.
        assert_eq!(swizzle_source(0x003e, 4), 5);
        assert_eq!(swizzle_source(0x003e, 5), 5);
        // Quad: reverse.
        assert_eq!(swizzle_source(0x801b, 33), 34);
        // Rotations by 1, up and down.
        assert_eq!(swizzle_source(0xc020, 31), 0);
        assert_eq!(swizzle_source(0xc420, 0), 31);
        // FFT with an empty mask reverses five bits.
        assert_eq!(swizzle_source(0xe000, 1), 16);
    }
}
