//! Device memory: host memory at its own address, with every access checked against the allocations.

use memmap2::MmapMut;
use std::sync::Arc;

/// Address range of one allocation, `[start, end)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First address.
    pub start: u64,
    /// Address past the last byte.
    pub end: u64,
}

/// The allocations that a launch may touch, sorted by address.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    extents: Vec<Extent>,
    /// Sorted by address; empty if nothing tracks writes.
    written: Vec<Arc<Written>>,
}

/// The bytes of an allocation that have been written, for the [uninitialized](crate::sanitize::Checks::uninitialized)
/// check. Allocations without a `Written` count as written.
#[derive(Debug)]
pub struct Written {
    extent: Extent,
    /// One byte for each byte: 0, or 255 once it is written. Accessed through raw pointers only, because several
    /// threads run kernels.
    shadow: MmapMut,
}

impl Written {
    /// Tracks an allocation that has not been written yet.
    pub fn nothing(extent: Extent) -> std::io::Result<Written> {
        let size = (extent.end - extent.start) as usize;
        let options = memmap2::MmapOptions::new()
            .len(size.max(1))
            .no_reserve_swap()
            .map_anon();
        Ok(Written {
            extent,
            shadow: options?,
        })
    }

    /// Whether `[address, address + size)` lies in this allocation.
    #[inline(always)]
    pub fn contains(&self, address: u64, size: usize) -> bool {
        address >= self.extent.start
            && self.extent.end.saturating_sub(address) >= size as u64
            && address < self.extent.end
    }

    /// Marks bytes as written. Does nothing unless all of them lie in the allocation.
    pub fn write(&self, address: u64, size: usize) {
        if self.contains(address, size) {
            let at = (address - self.extent.start) as usize;
            // SAFETY: inside of the map, which no reference points into.
            unsafe { std::ptr::write_bytes(self.shadow.as_ptr().add(at).cast_mut(), 0xff, size) };
        }
    }

    /// Up to four bytes of the shadow, the first in the low bits. All ones if any byte lies outside of the allocation.
    #[inline(always)]
    pub fn get(&self, address: u64, size: usize) -> u32 {
        if !self.contains(address, size) {
            return !0;
        }
        let mut bytes = [0u8; 4];
        for (address, byte) in (address..).zip(&mut bytes).take(size) {
            // SAFETY: contained.
            [*byte] = unsafe { self.bytes::<1>(address) };
        }
        u32::from_le_bytes(bytes)
    }

    /// The shadow of `N` bytes.
    ///
    /// # Safety
    /// [`Written::contains`] must hold for these bytes.
    #[inline(always)]
    pub unsafe fn bytes<const N: usize>(&self, address: u64) -> [u8; N] {
        let at = (address - self.extent.start) as usize;
        // SAFETY: inside of the map; what other threads write there is one of two values of a byte.
        unsafe {
            let from = self.shadow.as_ptr().add(at);
            from.cast::<[u8; N]>().read_unaligned()
        }
    }

    /// Copies the shadow of `size` bytes to address `to`. `from`: the source's tracker and address; `None`: all bytes
    /// count as written.
    pub fn copy(&self, to: u64, from: Option<(&Written, u64)>, size: usize) {
        let Some((from, source)) = from else {
            self.write(to, size);
            return;
        };
        if self.contains(to, size) && from.contains(source, size) {
            let (to, source) = (to - self.extent.start, source - from.extent.start);
            // SAFETY: both ranges are inside of their maps.
            unsafe {
                std::ptr::copy(
                    from.shadow.as_ptr().add(source as usize),
                    self.shadow.as_ptr().add(to as usize).cast_mut(),
                    size,
                );
            }
        }
    }
}

impl Memory {
    /// Creates the list from extents in any order. They must not overlap.
    pub fn new(mut extents: Vec<Extent>) -> Self {
        extents.sort_by_key(|e| e.start);
        Memory {
            extents,
            written: Vec::new(),
        }
    }

    /// Tracks writes of kernels to the allocations in `written`.
    pub fn track(mut self, mut written: Vec<Arc<Written>>) -> Self {
        written.sort_by_key(|w| w.extent.start);
        self.written = written;
        self
    }

    /// Whether writes to any allocation are tracked.
    #[inline(always)]
    pub fn is_tracked(&self) -> bool {
        !self.written.is_empty()
    }

    /// The tracker of the allocation that holds these bytes, if it is tracked.
    pub fn written(&self, address: u64, size: usize) -> Option<&Written> {
        let i = self.written.partition_point(|w| w.extent.start <= address);
        let found = &self.written[i.checked_sub(1)?];
        found.contains(address, size).then_some(found)
    }

    /// These allocations and `more`; an extent in both is kept once.
    pub fn with(&self, more: &[Extent]) -> Self {
        let mut memory = Memory::new([&self.extents[..], more].concat());
        memory.extents.dedup();
        memory.written = self.written.clone();
        memory
    }

    /// The allocations, sorted by address.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Whether `[address, address + size)` lies in one allocation. `hint` remembers the last one.
    #[inline(always)]
    pub fn contains(&self, hint: &mut Extent, address: u64, size: u64) -> bool {
        let end = address.wrapping_add(size);
        if address >= hint.start && end <= hint.end && end >= address {
            return true;
        }
        self.find(hint, address, end)
    }

    #[cold]
    #[inline(never)]
    fn find(&self, hint: &mut Extent, address: u64, end: u64) -> bool {
        let i = self.extents.partition_point(|e| e.start <= address);
        match i.checked_sub(1).map(|i| self.extents[i]) {
            Some(e) if end <= e.end && end >= address => {
                *hint = e;
                true
            }
            _ => false,
        }
    }

    /// The allocation that contains `address`.
    pub fn containing(&self, address: u64) -> Option<Extent> {
        let i = self.extents.partition_point(|e| e.start <= address);
        let e = self.extents[i.checked_sub(1)?];
        (address < e.end).then_some(e)
    }

    /// Describes the allocation nearest to `address`, for the text of a fault.
    pub fn nearest(&self, address: u64) -> Option<String> {
        let i = self.extents.partition_point(|e| e.start <= address);
        let below = i.checked_sub(1).map(|i| self.extents[i]);
        let above = self.extents.get(i).copied();
        let gap = |e: &Extent| {
            if address < e.start {
                e.start - address
            } else {
                address - e.end.min(address)
            }
        };
        let e = [below, above].into_iter().flatten().min_by_key(gap)?;
        let place = if address < e.start {
            format!("it is {} bytes below", e.start - address)
        } else if address >= e.end {
            format!("it is {} bytes past the end of", address - e.end)
        } else {
            format!("it starts {} bytes before the end of", e.end - address)
        };
        Some(format!(
            "{place} the nearest one, {:#x}..{:#x} ({} bytes)",
            e.start,
            e.end,
            e.end - e.start
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_allocation_is_named() {
        let memory = Memory::default().with(&[Extent {
            start: 0x100,
            end: 0x122,
        }]);
        for (address, text) in [
            (0xf0, "16 bytes below"),
            (0x120, "starts 2 bytes before the end"),
            (0x122, "0 bytes past the end"),
            (0x130, "14 bytes past the end"),
        ] {
            let found = memory.nearest(address).unwrap();
            assert!(found.contains(text), "{found}");
        }
    }
}
