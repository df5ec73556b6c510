//! Finds the bytes that an instruction is about to access, lane by lane.
//!
//! The functions that execute the instruction compute the addresses. An instruction that will fault before it touches
//! memory may get no accesses, or the accesses that it would have made.

use crate::exec::atomic::atomic_of;
use crate::exec::lanes::{Addresses, existing, kind, lanes};
use crate::exec::{lds, mubuf, smem, vmem};
use crate::inst::{Format, Inst, Operand, flag};
use crate::op::Op::*;
use crate::wave::{LANES, Wave};

/// Memory that an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Device memory. The device address is also the host address.
    Global,
    /// LDS. The address is an offset in the workgroup's LDS.
    Lds,
    /// Scratch. The address is an offset in the lane's own scratch.
    Scratch,
}

/// Action on the accessed bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Load,
    Store,
    /// A read-modify-write. `returns`: the old value is written to a register.
    Atomic {
        returns: bool,
    },
}

/// One access by some lanes of a wave.
#[derive(Clone, Debug)]
pub(crate) struct Access {
    pub space: Space,
    pub action: Action,
    /// Whether the scalar unit makes it, through the scalar cache. It then is one access of the whole wave, in lane 0.
    pub scalar: bool,
    /// Bytes per lane.
    pub size: u32,
    /// Mask of the lanes that access memory.
    pub lanes: u64,
    /// Address of the first byte for each lane in `lanes`; unspecified for other lanes.
    pub addresses: Addresses,
    /// First vector register, by its index in the unified file, that receives loaded bytes or holds stored bytes or an
    /// atomic's operand. `None` for scalar loads, loads to LDS, and counters.
    pub register: Option<u16>,
}

impl Access {
    /// The bytes of all lanes together, if lane l accesses element l of an array.
    #[inline]
    pub fn together(&self) -> Option<(u64, usize)> {
        let (first, size) = (self.addresses[0], u64::from(self.size));
        if self.lanes != !0 {
            return None;
        }
        let mut difference = 0;
        for (lane, x) in self.addresses.iter().enumerate() {
            difference |= x ^ first.wrapping_add(lane as u64 * size);
        }
        (difference == 0).then_some((first, LANES * self.size as usize))
    }

    /// Address ranges that are accessed, in the order of the lanes. Lanes in a row are joined if they access adjacent
    /// or the same bytes.
    #[inline]
    pub fn stretches(&self, mut visit: impl FnMut(u64, u64)) {
        if let Some((start, bytes)) = self.together() {
            return visit(start, start.wrapping_add(bytes as u64));
        }
        let size = u64::from(self.size);
        let mut stretch: Option<(u64, u64)> = None;
        for lane in lanes(self.lanes) {
            let at = self.addresses[lane];
            let after = at.wrapping_add(size);
            match &mut stretch {
                Some((_, end)) if at == *end => *end = after,
                Some((start, end)) if at == *start && after == *end => {}
                _ => {
                    if let Some((start, end)) = stretch.replace((at, after)) {
                        visit(start, end);
                    }
                }
            }
        }
        if let Some((start, end)) = stretch {
            visit(start, end);
        }
    }
}

/// Accesses of one instruction: none, one or several. Several come from two-address forms, loads to LDS, flat addresses
/// in different memories, and lanes that are partly inside of a buffer.
#[derive(Default)]
pub(crate) struct Accesses(Vec<Access>);

impl std::ops::Deref for Accesses {
    type Target = [Access];

    fn deref(&self) -> &[Access] {
        &self.0
    }
}

impl Accesses {
    /// Finds the accesses of `inst`, which `w` is about to execute. They replace the previous instruction's.
    #[inline]
    pub fn find(&mut self, w: &Wave, inst: &Inst) {
        self.0.clear();
        // An instruction whose registers do not exist accesses nothing.
        let _ = match inst.format {
            Format::Ds if !inst.has(flag::GDS) => self.ds(w, inst),
            Format::Global => self.vmem::<{ vmem::GLOBAL }>(w, inst),
            Format::Flat => self.vmem::<{ vmem::FLAT }>(w, inst),
            Format::Scratch => self.vmem::<{ vmem::SCRATCH }>(w, inst),
            Format::Mubuf => self.mubuf(w, inst),
            Format::Smem => self.smem(w, inst),
            _ => None,
        };
        debug_assert!(self.0.iter().all(|a| a.lanes != 0));
    }

    fn push(&mut self, access: Access) {
        if access.lanes != 0 {
            self.0.push(access);
        }
    }

    fn smem(&mut self, w: &Wave, inst: &Inst) -> Option<()> {
        let (address, dwords) = smem::located(w, inst)?;
        self.push(Access {
            space: Space::Global,
            action: Action::Load,
            scalar: true,
            size: 4 * dwords as u32,
            lanes: u64::from(dwords > 0),
            addresses: [address; LANES],
            register: None,
        });
        Some(())
    }

    fn ds(&mut self, w: &Wave, inst: &Inst) -> Option<()> {
        let vector = |size: usize, action, lanes, addresses, register| Access {
            space: Space::Lds,
            action,
            scalar: false,
            size: size as u32,
            lanes,
            addresses,
            register,
        };
        let returns = Action::Atomic { returns: true };
        match inst.op {
            DS_APPEND | DS_CONSUME => {
                // One read-modify-write for all lanes, even if none is on.
                let at = [lds::m0_base(w, inst); LANES];
                self.push(vector(4, returns, 1, at, None));
                return Some(());
            }
            DS_READ_ADDTID_B32 | DS_WRITE_ADDTID_B32 => {
                let at = lds::addtid_addresses(w, inst);
                let (action, operand) = match inst.op {
                    DS_READ_ADDTID_B32 => (Action::Load, inst.vdst),
                    _ => (Action::Store, inst.src[1]),
                };
                let register = register(w, operand, 1)?;
                self.push(vector(4, action, w.exec(), at, Some(register)));
                return Some(());
            }
            _ => {}
        }
        if let Some(atomic) = atomic_of(inst.op) {
            let action = Action::Atomic {
                returns: inst.vdst != crate::inst::NONE,
            };
            let data = register(w, inst.src[1], atomic.dwords())?;
            let at = lds::addresses(w, inst, lds::offset(inst))?;
            let size = 4 * atomic.dwords();
            self.push(vector(size, action, w.exec(), at, Some(data)));
            return Some(());
        }
        let (kind, action, pair) = lds_transfer(inst.op)?;
        let (size, count) = (kind::size(kind), kind::registers(kind));
        let (offsets, n) = match pair {
            None => ([lds::offset(inst), 0], 1),
            Some(stride) => {
                let (a, b) = lds::offsets_of(inst, size as u64 * stride);
                ([a, b], 2)
            }
        };
        for (i, &offset) in offsets[..n].iter().enumerate() {
            let data = match action {
                Action::Load => register(w, inst.vdst, n * count)? + (i * count) as u16,
                _ => register(w, inst.src[1 + i], count)?,
            };
            let at = lds::addresses(w, inst, offset)?;
            self.push(vector(size, action, w.exec(), at, Some(data)));
        }
        Some(())
    }

    fn vmem<const SPACE: u8>(&mut self, w: &Wave, inst: &Inst) -> Option<()> {
        let (size, action, data) = if let Some((kind, store)) = vmem::transfer_of(inst.op) {
            let (action, operand) = match store {
                true => (Action::Store, inst.src[1]),
                false => (Action::Load, inst.vdst),
            };
            let data = register(w, operand, kind::registers(kind))?;
            (kind::size(kind), action, Some(data))
        } else if let Some((size, _)) = vmem::dma_of(inst.op) {
            (size, Action::Load, None)
        } else {
            let n = atomic_of(inst.op)?.dwords();
            let returns = inst.has(flag::SC0);
            let data = register(w, inst.src[1], n)?;
            (4 * n, Action::Atomic { returns }, Some(data))
        };
        let mut access = Access {
            space: match SPACE {
                vmem::SCRATCH => Space::Scratch,
                _ => Space::Global,
            },
            action,
            scalar: false,
            size: size as u32,
            lanes: w.exec(),
            addresses: vmem::addresses::<SPACE>(w, inst)?,
            register: data,
        };
        if SPACE == vmem::FLAT {
            self.split_apertures(&mut access);
        }
        self.push(access);
        if vmem::dma_of(inst.op).is_some() {
            self.dma(w.exec(), vmem::dma_base(w, inst));
        }
        Some(())
    }

    /// Moves lanes of a flat access that address LDS or scratch into accesses of their own.
    fn split_apertures(&mut self, flat: &mut Access) {
        let (mut shared, mut private) = (0, 0);
        for lane in lanes(flat.lanes) {
            match vmem::aperture(flat.addresses[lane]) {
                vmem::Aperture::Global => {}
                vmem::Aperture::Lds(_) => shared |= 1 << lane,
                vmem::Aperture::Scratch(_) => private |= 1 << lane,
            }
        }
        flat.lanes &= !(shared | private);
        for (space, mask) in [(Space::Lds, shared), (Space::Scratch, private)] {
            if mask != 0 {
                let mut part = Access {
                    space,
                    lanes: mask,
                    ..flat.clone()
                };
                // The low half of the address is the offset in either.
                for a in &mut part.addresses {
                    *a &= 0xffff_ffff;
                }
                self.push(part);
            }
        }
    }

    /// Adds the write of a load to LDS: a dword of every active lane.
    fn dma(&mut self, mask: u64, base: i64) {
        self.push(Access {
            space: Space::Lds,
            action: Action::Store,
            scalar: false,
            size: 4,
            lanes: mask,
            addresses: std::array::from_fn(|lane| (base + 4 * lane as i64) as u64),
            register: None,
        });
    }

    fn mubuf(&mut self, w: &Wave, inst: &Inst) -> Option<()> {
        let global = |size, action, lanes, addresses, register| Access {
            space: Space::Global,
            action,
            scalar: false,
            size,
            lanes,
            addresses,
            register,
        };
        let Some((kind, store)) = mubuf::transfer_of(inst.op) else {
            // Lanes out of range do nothing.
            let n = atomic_of(inst.op)?.dwords();
            let data = Some(register(w, inst.vdst, n)?);
            let a = mubuf::located(w, inst, 4 * n)?;
            let returns = inst.has(flag::SC0);
            let action = Action::Atomic { returns };
            self.push(global(4 * n as u32, action, a.inside, a.addresses, data));
            return Some(());
        };
        if inst.has(flag::LDS) && !store {
            let (size, _) = mubuf::dma_of(inst.op)?;
            let a = mubuf::located(w, inst, size)?;
            let size = size as u32;
            self.push(global(size, Action::Load, a.inside, a.addresses, None));
            // Lanes out of range write 0.
            self.dma(w.exec(), mubuf::dma_base(w, inst));
            return Some(());
        }
        let data = Some(register(w, inst.vdst, kind::registers(kind))?);
        let a = mubuf::located(w, inst, kind::size(kind))?;
        let action = if store { Action::Store } else { Action::Load };
        let size = kind::size(kind) as u32;
        self.push(global(size, action, a.inside, a.addresses, data));
        if a.outside != 0 && kind <= kind::B128 {
            // Whole dwords of lanes that are partly in range.
            for dwords in 1..=3 {
                let mask = lanes(a.outside)
                    .filter(|&l| a.room[l] / 4 == dwords)
                    .fold(0, |mask, l| mask | 1 << l);
                self.push(global(4 * dwords, action, mask, a.addresses, data));
            }
        }
        Some(())
    }
}

/// Index of a vector operand in the unified file.
fn register(w: &Wave, operand: Operand, count: usize) -> Option<u16> {
    existing(w, operand, count).map(|i| i as u16)
}

/// Layout, action and, for two-address forms, the unit of the offsets in elements, of a DS load, store or exchange.
fn lds_transfer(op: crate::op::Op) -> Option<(u8, Action, Option<u64>)> {
    use Action::{Load, Store};
    let exchange = Action::Atomic { returns: true };
    Some(match op {
        DS_READ_B32 => (kind::B32, Load, None),
        DS_READ_B64 => (kind::B64, Load, None),
        DS_READ_B96 => (kind::B96, Load, None),
        DS_READ_B128 => (kind::B128, Load, None),
        DS_READ_U8 | DS_READ_I8 => (kind::U8, Load, None),
        DS_READ_U16 | DS_READ_I16 => (kind::U16, Load, None),
        DS_READ_U8_D16 | DS_READ_I8_D16 => (kind::U8, Load, None),
        DS_READ_U8_D16_HI | DS_READ_I8_D16_HI => (kind::U8, Load, None),
        DS_READ_U16_D16 | DS_READ_U16_D16_HI => (kind::U16, Load, None),
        DS_READ2_B32 => (kind::B32, Load, Some(1)),
        DS_READ2_B64 => (kind::B64, Load, Some(1)),
        DS_READ2ST64_B32 => (kind::B32, Load, Some(64)),
        DS_READ2ST64_B64 => (kind::B64, Load, Some(64)),
        DS_WRITE_B32 => (kind::B32, Store, None),
        DS_WRITE_B64 => (kind::B64, Store, None),
        DS_WRITE_B96 => (kind::B96, Store, None),
        DS_WRITE_B128 => (kind::B128, Store, None),
        DS_WRITE_B8 | DS_WRITE_B8_D16_HI => (kind::U8, Store, None),
        DS_WRITE_B16 | DS_WRITE_B16_D16_HI => (kind::U16, Store, None),
        DS_WRITE2_B32 => (kind::B32, Store, Some(1)),
        DS_WRITE2_B64 => (kind::B64, Store, Some(1)),
        DS_WRITE2ST64_B32 => (kind::B32, Store, Some(64)),
        DS_WRITE2ST64_B64 => (kind::B64, Store, Some(64)),
        DS_WRXCHG2_RTN_B32 => (kind::B32, exchange, Some(1)),
        DS_WRXCHG2_RTN_B64 => (kind::B64, exchange, Some(1)),
        DS_WRXCHG2ST64_RTN_B32 => (kind::B32, exchange, Some(64)),
        DS_WRXCHG2ST64_RTN_B64 => (kind::B64, exchange, Some(64)),
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
