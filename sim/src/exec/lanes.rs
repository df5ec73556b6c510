//! Moves data between registers of lanes and host memory. LDS, global, scratch and buffer instructions share this once
//! every lane's address is known.

use super::{Env, Flow};
use std::mem::MaybeUninit;

use crate::fault::FaultKind;
use crate::inst::{NONE, Operand, VGPR0};
use crate::wave::{LANES, VReg, Wave};

/// Layout of a lane's bytes in its registers. Plain numbers, so that they can be const parameters.
pub(crate) mod kind {
    pub const B32: u8 = 0;
    pub const B64: u8 = 1;
    pub const B96: u8 = 2;
    pub const B128: u8 = 3;
    pub const U8: u8 = 4;
    pub const I8: u8 = 5;
    pub const U16: u8 = 6;
    pub const I16: u8 = 7;
    /// A byte, extended to the low half; the high half is kept.
    pub const U8_LOW: u8 = 8;
    pub const I8_LOW: u8 = 9;
    /// Two bytes to the low half; the high half is kept.
    pub const B16_LOW: u8 = 10;
    /// A byte, extended to the high half; the low half is kept. Stores read from bit 16 on.
    pub const U8_HIGH: u8 = 11;
    pub const I8_HIGH: u8 = 12;
    pub const B16_HIGH: u8 = 13;

    /// Number of bytes in memory.
    pub const fn size(kind: u8) -> usize {
        match kind {
            B32 => 4,
            B64 => 8,
            B96 => 12,
            B128 => 16,
            U8 | I8 | U8_LOW | I8_LOW | U8_HIGH | I8_HIGH => 1,
            _ => 2,
        }
    }

    /// Number of registers.
    pub const fn registers(kind: u8) -> usize {
        size(kind).div_ceil(4)
    }
}

/// Calls `$f::<.., KIND>` for a kind that is known only at run time.
macro_rules! for_kind {
    ($kind:expr, $f:ident) => {
        match $kind {
            kind::B32 => $f!(0),
            kind::B64 => $f!(1),
            kind::B96 => $f!(2),
            kind::B128 => $f!(3),
            kind::U8 => $f!(4),
            kind::I8 => $f!(5),
            kind::U16 => $f!(6),
            kind::I16 => $f!(7),
            kind::U8_LOW => $f!(8),
            kind::I8_LOW => $f!(9),
            kind::B16_LOW => $f!(10),
            kind::U8_HIGH => $f!(11),
            kind::I8_HIGH => $f!(12),
            _ => $f!(13),
        }
    };
}
pub(super) use for_kind;

/// An address for each lane. Addresses of inactive lanes are unspecified.
pub(crate) type Addresses = [u64; LANES];

/// The lanes of a mask, in ascending order.
#[inline(always)]
pub(crate) fn lanes(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        (mask != 0).then(|| {
            let lane = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            lane
        })
    })
}

/// Index of a vector operand of `count` registers; `None` if not all exist.
#[inline(always)]
pub(crate) fn existing(w: &Wave, operand: Operand, count: usize) -> Option<usize> {
    if operand >= VGPR0 && operand != NONE {
        let first = w.vreg(operand);
        if first + count <= w.vgpr.len() {
            return Some(first);
        }
    }
    None
}

/// Index of a vector operand of `count` registers; a fault if not all exist.
#[inline(always)]
pub(super) fn registers(
    w: &Wave,
    e: &mut Env,
    operand: Operand,
    count: usize,
) -> Result<usize, Flow> {
    existing(w, operand, count).ok_or_else(|| bad_register(e, operand))
}

#[cold]
#[inline(never)]
pub(super) fn bad_register(e: &mut Env, operand: Operand) -> Flow {
    e.fault = Some(FaultKind::BadRegister {
        register: format!("operand {operand}"),
        limit: 512,
    });
    Flow::Fault
}

/// Lowest and highest address of the active lanes. At least one lane must be active.
#[inline(always)]
pub(super) fn span(addresses: &Addresses, mask: u64) -> (u64, u64) {
    let (mut low, mut high) = (u64::MAX, 0);
    if mask == u64::MAX {
        for &a in addresses {
            low = low.min(a);
            high = high.max(a);
        }
    } else {
        for (lane, &a) in addresses.iter().enumerate() {
            let on = mask >> lane & 1 != 0;
            low = low.min(if on { a } else { u64::MAX });
            high = high.max(if on { a } else { 0 });
        }
    }
    (low, high)
}

/// Faults unless every active lane's bytes lie in an allocation.
#[inline(always)]
pub(super) fn check_global(
    e: &mut Env,
    addresses: &Addresses,
    mask: u64,
    size: usize,
    access: &'static str,
) -> Result<(), Flow> {
    if mask == 0 {
        return Ok(());
    }
    let (low, high) = span(addresses, mask);
    let end = high.wrapping_add(size as u64);
    if low >= e.hint.start && end <= e.hint.end && end > high {
        return Ok(());
    }
    check_each(e, addresses, mask, size, access)
}

#[cold]
#[inline(never)]
fn check_each(
    e: &mut Env,
    addresses: &Addresses,
    mask: u64,
    size: usize,
    access: &'static str,
) -> Result<(), Flow> {
    for lane in lanes(mask) {
        let address = addresses[lane];
        if !e.memory.contains(&mut e.hint, address, size as u64) {
            e.fault = Some(FaultKind::OutOfBounds {
                access,
                address,
                size: size as u32,
                lane: lane as u32,
                nearest: e.memory.nearest(address),
            });
            return Err(Flow::Fault);
        }
    }
    Ok(())
}

/// Faults unless all active addresses are multiples of `align`, a power of two.
#[inline(always)]
pub(super) fn check_aligned(
    e: &mut Env,
    addresses: &Addresses,
    mask: u64,
    align: u32,
    access: &'static str,
) -> Result<(), Flow> {
    let mut bits = 0;
    for (lane, &a) in addresses.iter().enumerate() {
        bits |= if mask >> lane & 1 != 0 { a } else { 0 };
    }
    if bits & (u64::from(align) - 1) == 0 {
        return Ok(());
    }
    misaligned(e, addresses, mask, align, access);
    Err(Flow::Fault)
}

#[cold]
#[inline(never)]
fn misaligned(e: &mut Env, addresses: &Addresses, mask: u64, align: u32, access: &'static str) {
    let lane = lanes(mask)
        .find(|&l| addresses[l] & (u64::from(align) - 1) != 0)
        .unwrap_or(0);
    e.fault = Some(FaultKind::Misaligned {
        access,
        address: addresses[lane],
        align,
        lane: lane as u32,
    });
}

/// Loads from memory to the registers from `first` on.
///
/// # Safety
/// Addresses of active lanes must be valid for reads of the kind's size; the registers must exist.
#[inline(always)]
pub(super) unsafe fn gather<const KIND: u8>(
    file: &mut [VReg; 512],
    first: usize,
    mask: u64,
    addresses: &Addresses,
) {
    let (size, count) = (kind::size(KIND), kind::registers(KIND));
    debug_assert!(first + count <= file.len());
    if mask == u64::MAX && KIND <= kind::B128 {
        let mut stage = [MaybeUninit::<u32>::uninit(); 4 * LANES];
        // SAFETY: the addresses are readable, by the contract; the stage holds 64 lanes of up to
        // sixteen bytes.
        unsafe {
            if contiguous(addresses, size) {
                std::ptr::copy_nonoverlapping(
                    addresses[0] as *const u8,
                    stage.as_mut_ptr().cast::<u8>(),
                    size * LANES,
                );
            } else {
                for (lane, &a) in addresses.iter().enumerate() {
                    std::ptr::copy_nonoverlapping(
                        a as *const u8,
                        stage.as_mut_ptr().add(lane * count).cast::<u8>(),
                        size,
                    );
                }
            }
        }
        for r in 0..count {
            let register = &mut file[first + r].0;
            for (lane, x) in register.iter_mut().enumerate() {
                // SAFETY: 64 lanes of `count` dwords were written above.
                *x = unsafe { stage[lane * count + r].assume_init() };
            }
        }
        return;
    }
    for lane in lanes(mask) {
        // SAFETY: by the contract.
        unsafe { load_lane::<KIND>(file, first, lane, addresses[lane]) };
    }
}

/// Loads for one lane.
///
/// # Safety
/// As for [`gather`].
#[inline(always)]
pub(super) unsafe fn load_lane<const KIND: u8>(
    file: &mut [VReg; 512],
    first: usize,
    lane: usize,
    address: u64,
) {
    if KIND <= kind::B128 {
        for r in 0..kind::registers(KIND) {
            // SAFETY: by the contract.
            file[first + r].0[lane] = unsafe { (address as *const u32).add(r).read_unaligned() };
        }
        return;
    }
    // SAFETY: by the contract.
    let raw = unsafe {
        if kind::size(KIND) == 1 {
            u16::from((address as *const u8).read())
        } else {
            (address as *const u16).read_unaligned()
        }
    };
    let register = &mut file[first].0[lane];
    *register = merge::<KIND>(*register, raw);
}

/// Merges a loaded byte or half into a register that held `old`.
#[inline(always)]
fn merge<const KIND: u8>(old: u32, raw: u16) -> u32 {
    let half = match KIND {
        kind::I8_LOW | kind::I8_HIGH => raw as i8 as u16,
        _ => raw,
    };
    match KIND {
        kind::U8 | kind::U16 => u32::from(raw),
        kind::I8 => raw as i8 as u32,
        kind::I16 => raw as i16 as u32,
        kind::U8_LOW | kind::I8_LOW | kind::B16_LOW => old & 0xffff_0000 | u32::from(half),
        _ => old & 0xffff | u32::from(half) << 16,
    }
}

/// Register value of a lane that reads nothing: zero in place of every byte.
#[inline(always)]
pub(super) fn load_zero<const KIND: u8>(file: &mut [VReg; 512], first: usize, lane: usize) {
    for r in 0..kind::registers(KIND) {
        let register = &mut file[first + r].0[lane];
        *register = if KIND <= kind::B128 {
            0
        } else {
            merge::<KIND>(*register, 0)
        };
    }
}

/// Stores the registers from `first` on to memory, in ascending order of lanes.
///
/// # Safety
/// Addresses of active lanes must be valid for writes of the kind's size; the registers must exist.
#[inline(always)]
pub(super) unsafe fn scatter<const KIND: u8>(
    file: &[VReg; 512],
    first: usize,
    mask: u64,
    addresses: &Addresses,
) {
    let (size, count) = (kind::size(KIND), kind::registers(KIND));
    debug_assert!(first + count <= file.len());
    if mask == u64::MAX && KIND <= kind::B128 {
        let mut stage = [MaybeUninit::<u32>::uninit(); 4 * LANES];
        for r in 0..count {
            let register = &file[first + r].0;
            for (lane, x) in register.iter().enumerate() {
                stage[lane * count + r].write(*x);
            }
        }
        // SAFETY: the addresses are writable, by the contract; the stage holds 64 lanes of `count`
        // dwords, all written.
        unsafe {
            if contiguous(addresses, size) {
                std::ptr::copy_nonoverlapping(
                    stage.as_ptr().cast::<u8>(),
                    addresses[0] as *mut u8,
                    size * LANES,
                );
            } else {
                for (lane, &a) in addresses.iter().enumerate() {
                    std::ptr::copy_nonoverlapping(
                        stage.as_ptr().add(lane * count).cast::<u8>(),
                        a as *mut u8,
                        size,
                    );
                }
            }
        }
        return;
    }
    for lane in lanes(mask) {
        // SAFETY: by the contract.
        unsafe { store_lane::<KIND>(file, first, lane, addresses[lane]) };
    }
}

/// Stores for one lane.
///
/// # Safety
/// As for [`scatter`].
#[inline(always)]
pub(super) unsafe fn store_lane<const KIND: u8>(
    file: &[VReg; 512],
    first: usize,
    lane: usize,
    address: u64,
) {
    // SAFETY: by the contract.
    unsafe {
        if KIND <= kind::B128 {
            for r in 0..kind::registers(KIND) {
                (address as *mut u32)
                    .add(r)
                    .write_unaligned(file[first + r].0[lane]);
            }
            return;
        }
        let value = file[first].0[lane];
        let value = match KIND {
            kind::U8_HIGH | kind::I8_HIGH | kind::B16_HIGH => value >> 16,
            _ => value,
        };
        if kind::size(KIND) == 1 {
            (address as *mut u8).write(value as u8);
        } else {
            (address as *mut u16).write_unaligned(value as u16);
        }
    }
}

/// Whether the lanes' addresses are consecutive elements from lane 0's address on.
#[inline(always)]
fn contiguous(addresses: &Addresses, size: usize) -> bool {
    let mut difference = 0;
    for (lane, &a) in addresses.iter().enumerate() {
        difference |= a ^ addresses[0].wrapping_add((lane * size) as u64);
    }
    difference == 0
}
