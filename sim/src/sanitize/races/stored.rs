//! Compares the bytes of stores: two stores of the same bytes are no race.
//!
//! A store is compared with the bytes in its place. For LDS, they are LDS itself. For global memory, they are a copy of
//! the workgroup's stores ([`Values`]), because other workgroups may run at the same time. A store whose bytes a later
//! one has changed is remembered as lost (`Page::lost`): a third store differs from one of the two, whatever it writes.

use super::dwords::{DWORDS, Dwords, PAGE};
use super::shadow::Shadow;
use crate::exec::lanes::lanes;
use crate::inst::Inst;
use crate::op::Op::*;
use crate::sanitize::accesses::Access;
use crate::wave::Wave;

/// Last bytes that a workgroup, or the launch, stored to a page.
#[derive(Clone)]
pub(super) struct Values {
    pub data: [u32; DWORDS],
    /// Bytes of each dword that were stored.
    known: [u8; DWORDS],
    /// Bytes that were stored since the last entry in the ledger.
    fresh: [u8; DWORDS],
    /// Bytes of `fresh` that were stored more than once with different values.
    changed: [u8; DWORDS],
}

impl Default for Values {
    fn default() -> Self {
        Values {
            data: [0; DWORDS],
            known: [0; DWORDS],
            fresh: [0; DWORDS],
            changed: [0; DWORDS],
        }
    }
}

impl Values {
    /// Stores some bytes of a dword. Returns the bytes that change.
    #[inline(always)]
    fn store(&mut self, dword: usize, bytes: u8, value: u32) -> u8 {
        let differs = differing(self.data[dword], value) & bytes & self.known[dword];
        self.changed[dword] |= differs & self.fresh[dword];
        self.known[dword] |= bytes;
        self.fresh[dword] |= bytes;
        let mask = spread(bytes);
        self.data[dword] = self.data[dword] & !mask | value & mask;
        differs
    }

    /// Bytes of a dword that two parties stored with different values: a race.
    pub fn unlike(&self, other: &Values, dword: usize) -> u8 {
        differing(self.data[dword], other.data[dword]) | self.changed[dword] | other.changed[dword]
    }

    /// Takes over bytes that another workgroup has stored.
    pub fn take(&mut self, from: &Values, dwords: &Dwords, bytes: u8) {
        let mask = spread(bytes);
        for dword in dwords.iter() {
            self.data[dword] = self.data[dword] & !mask | from.data[dword] & mask;
            self.changed[dword] = self.changed[dword] & !bytes | from.changed[dword] & bytes;
        }
    }

    /// Resets the fresh bytes after an entry in the ledger.
    pub fn entered(&mut self) {
        self.fresh = [0; DWORDS];
        self.changed = [0; DWORDS];
    }
}

/// Bytes in which two dwords differ, one bit each.
#[inline(always)]
fn differing(a: u32, b: u32) -> u8 {
    let x = a ^ b;
    // The top bit of each byte that is not zero; the product moves the four to the top.
    let tops = (x & 0x7f7f_7f7f).wrapping_add(0x7f7f_7f7f) | x;
    ((tops >> 7 & 0x0101_0101).wrapping_mul(0x1020_4080) >> 28) as u8
}

/// Mask of bits for a set of bytes.
#[inline(always)]
fn spread(bytes: u8) -> u32 {
    let bytes = u32::from(bytes);
    (bytes & 1 | (bytes & 2) << 7 | (bytes & 4) << 14 | (bytes & 8) << 21) * 255
}

/// Changed bytes of some dwords of a page, the same bytes of each.
pub(super) struct Changed {
    pub base: u64,
    pub bytes: u8,
    pub dwords: Dwords,
}

/// Bytes stored before that an access changes.
#[derive(Default)]
pub(super) struct Changes(Vec<Changed>);

impl Changes {
    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds some bytes of the dword at an address.
    fn add(&mut self, address: u64, bytes: u8) {
        let base = address / PAGE * PAGE;
        let dword = ((address - base) / 4) as usize;
        let mut known = self.0.iter_mut().rev();
        if let Some(same) = known.find(|c| c.base == base && c.bytes == bytes) {
            return same.dwords.insert(dword, dword);
        }
        let mut dwords = Dwords::default();
        dwords.insert(dword, dword);
        self.0.push(Changed {
            base,
            bytes,
            dwords,
        });
    }

    /// Changed bytes in the page that begins at address `base`.
    pub fn of_page(&self, base: u64) -> impl Iterator<Item = &Changed> + Clone {
        self.0.iter().filter(move |c| c.base == base)
    }

    /// Changed bytes of a dword in the page that begins at address `base`.
    pub fn of_dword(&self, base: u64, dword: usize) -> u8 {
        let here = self.of_page(base).filter(|c| c.dwords.contains(dword));
        here.fold(0, |bytes, c| bytes | c.bytes)
    }

    /// Adds all bytes of an access whose result is not known before it is executed.
    pub fn add_all(&mut self, access: &Access) {
        access.stretches(|start, end| {
            pieces(start, end.saturating_sub(start), |address, bytes, _| {
                self.add(address, bytes);
            });
        });
    }

    /// Adds the bytes of LDS that a store will change. Bytes outside count as changed: the store will fault.
    pub fn add_lds(&mut self, store: &Store, lds: &[u8]) {
        store.dwords(|address, bytes, value| {
            let old = usize::try_from(address).ok().and_then(|at| {
                let rest = lds.get(at..)?;
                let mut old = [0; 4];
                let size = rest.len().min(4);
                old[..size].copy_from_slice(&rest[..size]);
                let inside = bytes >> size == 0;
                inside.then(|| u32::from_le_bytes(old))
            });
            let differs = old.map_or(bytes, |old| differing(old, value) & bytes);
            if differs != 0 {
                self.add(address, differs);
            }
        });
    }

    /// Records a store to global memory, and adds the bytes that it changes among those that the workgroup has stored.
    pub fn add_global(&mut self, store: &Store, shadow: &mut Shadow) {
        let mut last = (u64::MAX, 0);
        store.dwords(|address, bytes, value| {
            let number = address / PAGE;
            if last.0 != number {
                last = (number, shadow.find(address));
            }
            let page = &mut shadow.pages[last.1 as usize];
            let dword = (address % PAGE / 4) as usize;
            let values = page.values.get_or_insert_with(Box::default);
            let differs = values.store(dword, bytes, value);
            if differs != 0 {
                self.add(address, differs);
            }
        });
    }
}

/// Splits bytes into dwords: address of each, its bytes, and the offset of its first byte in the whole.
#[inline(always)]
fn pieces(start: u64, size: u64, mut visit: impl FnMut(u64, u8, i64)) {
    let end = start.wrapping_add(size);
    let mut at = start & !3;
    while at < end {
        let low = start.saturating_sub(at).min(4) as u32;
        let high = (end - at).min(4) as u32;
        let bytes = ((1u32 << high) - (1u32 << low)) as u8;
        visit(at, bytes, at.wrapping_sub(start) as i64);
        let Some(next) = at.checked_add(4) else {
            return;
        };
        at = next;
    }
}

/// A store that is about to be executed.
pub(super) struct Store<'a> {
    wave: &'a Wave,
    access: &'a Access,
    register: usize,
    /// Whether the bytes lie in the upper half of the register.
    high: bool,
}

impl<'a> Store<'a> {
    /// `None` if the bytes do not come from vector registers.
    pub fn new(wave: &'a Wave, inst: &Inst, access: &'a Access) -> Option<Self> {
        let high = matches!(
            inst.op,
            DS_WRITE_B8_D16_HI
                | DS_WRITE_B16_D16_HI
                | GLOBAL_STORE_BYTE_D16_HI
                | GLOBAL_STORE_SHORT_D16_HI
                | FLAT_STORE_BYTE_D16_HI
                | FLAT_STORE_SHORT_D16_HI
                | BUFFER_STORE_BYTE_D16_HI
                | BUFFER_STORE_SHORT_D16_HI
        );
        Some(Store {
            wave,
            access,
            register: usize::from(access.register?),
            high,
        })
    }

    /// Dwords that the lanes write, in ascending order of lanes: address, bytes, and the value in its place.
    #[inline(always)]
    fn dwords(&self, mut visit: impl FnMut(u64, u8, u32)) {
        let size = u64::from(self.access.size);
        let file = &self.wave.vgpr;
        for lane in lanes(self.access.lanes) {
            let start = self.access.addresses[lane];
            if (start | size) & 3 == 0 {
                for i in 0..size / 4 {
                    let value = file[self.register + i as usize].0[lane];
                    visit(start.wrapping_add(4 * i), 15, value);
                }
                continue;
            }
            let mut bytes = [0u8; 16];
            for (i, four) in bytes.chunks_exact_mut(4).enumerate() {
                if 4 * i < size as usize {
                    let value = file[self.register + i].0[lane];
                    let value = if self.high { value >> 16 } else { value };
                    four.copy_from_slice(&value.to_le_bytes());
                }
            }
            pieces(start, size, |address, mask, first| {
                let value: [u8; 4] = std::array::from_fn(|i| {
                    let at = usize::try_from(first + i as i64).ok();
                    at.and_then(|at| bytes.get(at).copied()).unwrap_or(0)
                });
                visit(address, mask, u32::from_le_bytes(value));
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_differ() {
        for a in [0u32, 1, 0x8000_0000, 0x0180_ff00, !0] {
            for b in [0u32, 0x8000_0000, 0x0180_ff01, 0x7fff_ffff, !0] {
                let pairs = a.to_le_bytes().into_iter().zip(b.to_le_bytes());
                let expected = pairs
                    .enumerate()
                    .fold(0, |m, (i, (a, b))| m | u8::from(a != b) << i);
                assert_eq!(differing(a, b), expected, "{a:#x}, {b:#x}");
            }
        }
        assert_eq!(spread(0b1010), 0xff00_ff00);
        assert_eq!(spread(0b0101), 0x00ff_00ff);
    }

    #[test]
    fn dwords_of_bytes_at_any_place() {
        let mut found = Vec::new();
        pieces(6, 7, |address, bytes, first| {
            found.push((address, bytes, first))
        });
        assert_eq!(found, [(4, 0b1100, -2), (8, 0b1111, 2), (12, 0b0001, 6)]);
    }

    #[test]
    fn values_that_change() {
        let mut values = Values::default();
        assert_eq!(values.store(3, 0b0011, 0x1234_5678), 0);
        assert_eq!(values.data[3], 0x5678);
        assert_eq!(values.store(3, 0b1111, 0x1234_5678), 0);
        assert_eq!(values.store(3, 0b1111, 0x1234_5670), 1);
        let mut same = Values::default();
        same.store(3, 0b1111, 0x1234_5670);
        assert_eq!(same.unlike(&values, 3), 1);
        values.entered();
        assert_eq!(same.unlike(&values, 3), 0);
    }
}
