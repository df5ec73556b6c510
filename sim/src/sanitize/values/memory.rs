//! Propagates undefined values through memory.

use super::Step;
use super::registers::{Origin, Registers, Undefined};
use super::vector::vectors;
use crate::exec::lanes::lanes;
use crate::exec::{Env, swizzle_source};
use crate::memory::{Memory, Written};
use crate::op::Op::*;
use crate::sanitize::accesses::{Access, Accesses, Action, Space};
use crate::sanitize::class::Class;
use crate::sanitize::uses::Role;

/// Shadow of a byte with a defined value. 0: nothing wrote it.
const DEFINED: u8 = 0xff;
/// Shadow of a byte to which an undefined value was written.
const UNDEFINED: u8 = 1;
/// Top bits of four shadow bytes: set only where defined.
const TOPS: u32 = 0x8080_8080;

/// Shadow of a workgroup's LDS, one byte per byte.
pub(in crate::sanitize) struct Lds(Vec<u8>);

impl Lds {
    pub fn new(size: usize) -> Self {
        Lds(vec![0; size])
    }

    /// Shadow of up to four bytes. Bytes outside count as defined: their access is a fault of its own.
    #[inline(always)]
    fn get(&self, address: u64, size: usize) -> u32 {
        let at = address as usize;
        let Some(from) = self.0.get(at..at + size) else {
            return !0;
        };
        let mut bytes = [0; 4];
        for (to, from) in bytes.iter_mut().zip(from) {
            *to = *from;
        }
        u32::from_le_bytes(bytes)
    }

    fn set(&mut self, address: u64, size: usize, value: u8) {
        let at = address as usize;
        if let Some(bytes) = self.0.get_mut(at..at + size) {
            bytes.fill(value);
        }
    }

    /// Whether all bytes that the lanes access are defined.
    #[inline]
    fn all(&self, a: &Access) -> bool {
        let (low, bytes) = span(a);
        if (low as usize)
            .checked_add(bytes)
            .is_none_or(|end| end > self.0.len())
        {
            return false;
        }
        fn at<const N: usize>(shadow: &[u8], address: u64) -> [u8; N] {
            let found = shadow[address as usize..].first_chunk();
            found.copied().unwrap_or([0; N])
        }
        match a.size {
            4 => each(a, |x| at::<4>(&self.0, x)),
            8 => each(a, |x| at::<8>(&self.0, x)),
            16 => each(a, |x| at::<16>(&self.0, x)),
            2 => each(a, |x| at::<2>(&self.0, x)),
            12 => each(a, |x| at::<12>(&self.0, x)),
            _ => each(a, |x| at::<1>(&self.0, x)),
        }
    }

    /// Shadow of some bytes, if they exist.
    fn part(&mut self, (address, size): (u64, usize)) -> Option<&mut [u8]> {
        let at = address as usize;
        self.0.get_mut(at..at.checked_add(size)?)
    }
}

/// The shadow of the allocation in which device memory is accessed.
struct Global<'a> {
    memory: &'a Memory,
    written: Option<&'a Written>,
}

impl<'a> Global<'a> {
    fn find(&mut self, address: u64, size: usize) -> Option<&'a Written> {
        if !self.written.is_some_and(|w| w.contains(address, size)) {
            self.written = self.memory.written(address, size);
        }
        self.written
    }

    /// Whether all bytes that the lanes access are defined.
    #[inline]
    fn all(&mut self, a: &Access) -> bool {
        let (low, bytes) = span(a);
        let Some(w) = self.find(low, bytes) else {
            return false;
        };
        // SAFETY: every lane's bytes lie between the first and the last.
        unsafe {
            match a.size {
                4 => each(a, |x| w.bytes::<4>(x)),
                8 => each(a, |x| w.bytes::<8>(x)),
                16 => each(a, |x| w.bytes::<16>(x)),
                2 => each(a, |x| w.bytes::<2>(x)),
                12 => each(a, |x| w.bytes::<12>(x)),
                1 => each(a, |x| w.bytes::<1>(x)),
                _ => false,
            }
        }
    }

    fn get(&mut self, address: u64, size: usize) -> u32 {
        self.find(address, size)
            .map_or(!0, |w| w.get(address, size))
    }
}

impl Step<'_> {
    /// Handles loads, stores, atomics, and exchanges between lanes.
    pub(super) fn memory(
        &mut self,
        lds: &mut Lds,
        accesses: &Accesses,
        env: &Env,
    ) -> Result<(), Undefined> {
        match self.inst.op {
            DS_SWIZZLE_B32 | DS_BPERMUTE_B32 | DS_PERMUTE_B32 => {
                self.exchange();
                return Ok(());
            }
            _ => {}
        }
        let exec = self.w.exec();
        for u in self.uses.reads() {
            match u.role {
                Role::Address if exec != 0 || self.uses.class == Class::ScalarMemory => {
                    self.undefined(u, exec, "an address")?;
                }
                Role::Index if exec != 0 => self.undefined(u, 0, "an address")?,
                _ => {}
            }
        }
        // Lanes outside of a buffer read 0.
        for u in self.uses.writes() {
            match u.vector(self.w.accum_offset) {
                Some(v) => {
                    for v in v..v + usize::from(u.count) {
                        self.shadow.vector[v & 511] |= exec;
                    }
                }
                None => {
                    for k in 0..usize::from(u.count) {
                        self.shadow.scalar[(usize::from(u.first) + k) & 127] = !0;
                    }
                }
            }
        }
        let mut global = Global {
            memory: env.memory,
            written: None,
        };
        // Lanes in which a load to LDS read a defined value.
        let mut moved = !0u64;
        for a in accesses.iter() {
            match a.action {
                Action::Load if a.scalar => self.scalar_load(a, &mut global),
                Action::Load => moved = self.load(a, lds, &mut global),
                Action::Store => self.store(a, lds, &mut global, moved)?,
                Action::Atomic { returns } => self.atomic(a, lds, &mut global, returns)?,
            }
        }
        Ok(())
    }

    fn scalar_load(&mut self, a: &Access, global: &mut Global) {
        let Some(u) = self.uses.writes().first().copied() else {
            return;
        };
        for k in 0..(a.size / 4) as u16 {
            let address = a.addresses[0] + 4 * u64::from(k);
            let bytes = global.get(address, 4);
            if bytes & TOPS == 0 {
                let origin = self.loaded(a, address, 0, bytes);
                self.shadow.write_scalar(u.first + k, 0, origin);
            }
        }
    }

    #[cold]
    fn loaded(&self, a: &Access, address: u64, lane: usize, bytes: u32) -> Origin {
        Origin::Loaded {
            at: self.at,
            space: match a.space {
                Space::Global => "address",
                Space::Lds => "LDS address",
                Space::Scratch => "scratch offset",
            },
            address,
            lane: lane as u8,
            stored: bytes != 0,
        }
    }

    /// Lanes in which the bytes of dword `part` of an access are defined, and the origin of the first undefined one.
    fn defined(&self, a: &Access, part: usize, lds: &Lds, global: &mut Global) -> (u64, Origin) {
        let offset = 4 * part as u64;
        let size = (a.size as usize - 4 * part).min(4);
        let mut defined = 0u64;
        let mut origin = Origin::Unknown;
        let mut found = |lane: usize, bytes: u32| {
            if bytes & TOPS != 0 {
                defined |= 1 << lane;
            } else if matches!(origin, Origin::Unknown) {
                origin = self.loaded(a, a.addresses[lane] + offset, lane, bytes);
            }
        };
        let each = lanes(a.lanes);
        match a.space {
            Space::Global => {
                for lane in each {
                    found(lane, global.get(a.addresses[lane] + offset, size));
                }
            }
            Space::Lds => {
                for lane in each {
                    found(lane, lds.get(a.addresses[lane] + offset, size));
                }
            }
            Space::Scratch => {
                for lane in each {
                    let dword = ((a.addresses[lane] + offset) & 0xffff_ffff) / 4;
                    let shadow = self
                        .shadow
                        .scratch
                        .get(dword as usize)
                        .copied()
                        .unwrap_or(!0);
                    found(lane, if shadow >> lane & 1 != 0 { !0 } else { 0 });
                }
            }
        }
        (defined, origin)
    }

    /// Handles a load. Returns the lanes that loaded a defined value.
    fn load(&mut self, a: &Access, lds: &mut Lds, global: &mut Global) -> u64 {
        let known = match a.space {
            Space::Global => !global.memory.is_tracked() || global.all(a),
            Space::Lds => lds.all(a),
            Space::Scratch => false,
        };
        if known {
            return !0;
        }
        let mut all = !0;
        for part in 0..(a.size as usize).div_ceil(4) {
            let (defined, origin) = self.defined(a, part, lds, global);
            if let Some(register) = a.register {
                self.shadow
                    .write_vector(usize::from(register) + part, a.lanes, defined, origin);
            }
            all &= defined;
        }
        all
    }

    /// Handles a store. Its data come from registers, or from memory for a load to LDS.
    fn store(
        &mut self,
        a: &Access,
        lds: &mut Lds,
        global: &mut Global,
        moved: u64,
    ) -> Result<(), Undefined> {
        let parts = (a.size as usize).div_ceil(4);
        let mut data = [moved; 4];
        if let Some(register) = a.register {
            for (part, data) in data[..parts].iter_mut().enumerate() {
                let place = (usize::from(register) + part) & 511;
                *data = self.shadow.vector[place];
                let bad = a.lanes & !*data;
                if a.space == Space::Global && bad != 0 {
                    return Err(self.undefined_data(place, bad, "what is stored to memory"));
                }
            }
        }
        match a.space {
            Space::Global => {
                if !global.memory.is_tracked() {
                    return Ok(());
                }
                if let Some((address, size)) = a.together()
                    && let Some(w) = global.find(address, size)
                {
                    w.write(address, size);
                    return Ok(());
                }
                for lane in lanes(a.lanes) {
                    let (address, size) = (a.addresses[lane], a.size as usize);
                    if let Some(w) = global.find(address, size) {
                        w.write(address, size);
                    }
                }
            }
            Space::Lds => {
                let whole = data[..parts].iter().all(|d| *d & a.lanes == a.lanes);
                if whole
                    && let Some(range) = a.together()
                    && let Some(bytes) = lds.part(range)
                {
                    bytes.fill(DEFINED);
                    return Ok(());
                }
                for lane in lanes(a.lanes) {
                    for (part, data) in data[..parts].iter().enumerate() {
                        let size = (a.size as usize - 4 * part).min(4);
                        let value = if data >> lane & 1 != 0 {
                            DEFINED
                        } else {
                            UNDEFINED
                        };
                        lds.set(a.addresses[lane] + 4 * part as u64, size, value);
                    }
                }
            }
            Space::Scratch => {
                for (part, data) in data[..parts].iter().enumerate() {
                    store_scratch(self.shadow, a, 4 * part as u64, *data);
                }
            }
        }
        Ok(())
    }

    /// Vector registers of a store's or an atomic's operands.
    fn data(&self) -> Vec<(usize, usize)> {
        let reads = self.uses.reads().iter().copied();
        vectors(
            self,
            &reads.filter(|u| u.role == Role::Data).collect::<Vec<_>>(),
        )
    }

    #[cold]
    fn undefined_data(&self, place: usize, lanes: u64, decides: &'static str) -> Undefined {
        Undefined {
            operand: 0,
            place,
            lane: Some(lanes.trailing_zeros()),
            decides,
            origin: self.shadow.origin[place],
        }
    }

    /// Handles an atomic: it returns the old value, and leaves a defined value only if old value and data were defined.
    fn atomic(
        &mut self,
        a: &Access,
        lds: &mut Lds,
        global: &mut Global,
        returns: bool,
    ) -> Result<(), Undefined> {
        let mut data = a.lanes;
        for (v, n) in self.data() {
            for place in v..v + n {
                let bad = a.lanes & !self.shadow.vector[place];
                if a.space == Space::Global && bad != 0 {
                    return Err(self.undefined_data(place, bad, "what an atomic does to memory"));
                }
                data &= !bad;
            }
        }
        let replaces =
            self.inst.op.mnemonic().contains("_swap") || self.inst.op.mnemonic().contains("xchg");
        let result = self
            .uses
            .writes()
            .first()
            .and_then(|u| u.vector(self.w.accum_offset));
        for part in 0..(a.size as usize).div_ceil(4) {
            let (defined, origin) = self.defined(a, part, lds, global);
            if returns && let Some(v) = result {
                if a.register.is_some() {
                    self.shadow.write_vector(v + part, a.lanes, defined, origin);
                } else {
                    // A counter: one value for all lanes.
                    let defined = if defined == 0 { 0 } else { !0 };
                    self.shadow.write_vector(v, self.w.exec(), defined, origin);
                }
            }
            for lane in lanes(a.lanes) {
                let address = a.addresses[lane] + 4 * part as u64;
                let now = data >> lane & 1 != 0 && (replaces || defined >> lane & 1 != 0);
                match a.space {
                    Space::Lds => lds.set(address, 4, if now { DEFINED } else { UNDEFINED }),
                    Space::Global if now => {
                        if let Some(w) = global.find(address, 4) {
                            w.write(address, 4);
                        }
                    }
                    _ => {}
                }
            }
        }
        Ok(())
    }

    /// Handles `ds_swizzle`, `ds_bpermute` and `ds_permute`: values move between lanes.
    fn exchange(&mut self) {
        let exec = self.w.exec();
        let place =
            |u: Option<&crate::sanitize::uses::Use>| u.and_then(|u| u.vector(self.w.accum_offset));
        let (Some(data), Some(to)) = (
            place(self.uses.role(Role::Data)),
            place(self.uses.writes().first()),
        ) else {
            return;
        };
        let values = self.shadow.vector[data];
        let origin = self.shadow.origin[data];
        let offset = (self.inst.imm & 0xffff) as u32;
        let Some(index) = place(self.uses.role(Role::Address)) else {
            let defined = gather(exec, values, |l| swizzle_source(offset as usize, l));
            self.shadow.write_vector(to, exec, defined, origin);
            return;
        };
        let known = self.shadow.vector[index];
        let lane_of = |l: usize| (self.w.vgpr[index].0[l].wrapping_add(offset) >> 2 & 63) as usize;
        let defined = if self.inst.op == DS_BPERMUTE_B32 {
            known & gather(exec, values, lane_of)
        } else if known & exec != exec {
            0
        } else {
            // Lanes that nobody writes to receive 0; the highest lane wins.
            lanes(exec).fold(!0, |m, l| {
                m & !(1 << lane_of(l)) | (values >> l & 1) << lane_of(l)
            })
        };
        let origin = if known & exec == exec {
            origin
        } else {
            self.shadow.origin[index]
        };
        self.shadow.write_vector(to, exec, defined, origin);
    }
}

/// Lanes that read a defined value from another lane. An inactive lane gives 0, which is defined.
fn gather(exec: u64, values: u64, from: impl Fn(usize) -> usize) -> u64 {
    lanes(exec).fold(0, |m, lane| {
        let source = from(lane) & 63;
        let defined = exec >> source & 1 == 0 || values >> source & 1 != 0;
        m | u64::from(defined) << lane
    })
}

fn store_scratch(shadow: &mut Registers, a: &Access, offset: u64, data: u64) {
    for lane in lanes(a.lanes) {
        let dword = ((a.addresses[lane] + offset) & 0xffff_ffff) / 4;
        if let Some(word) = shadow.scratch.get_mut(dword as usize) {
            let one = 1 << lane;
            if data & one != 0 {
                *word |= one;
            } else if a.size >= 4 {
                *word &= !one;
            }
        }
    }
}

/// Whether all lanes access only defined bytes, `N` each.
#[inline(always)]
fn each<const N: usize>(a: &Access, get: impl Fn(u64) -> [u8; N]) -> bool {
    let mut all = [DEFINED; N];
    for lane in lanes(a.lanes) {
        let bytes = get(a.addresses[lane]);
        for (all, b) in all.iter_mut().zip(bytes) {
            *all &= b;
        }
    }
    all == [DEFINED; N]
}

/// First address that the lanes access, and the number of bytes from there to the last.
fn span(a: &Access) -> (u64, usize) {
    let (mut low, mut high) = (u64::MAX, 0);
    for lane in lanes(a.lanes) {
        low = low.min(a.addresses[lane]);
        high = high.max(a.addresses[lane]);
    }
    let bytes = high.saturating_sub(low).saturating_add(a.size.into());
    (low, bytes as usize)
}
