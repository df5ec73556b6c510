//! Device memory: host memory at its own address, every access checked against the allocations.

/// One allocation, `[start, end)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First address.
    pub start: u64,
    /// One past the last address.
    pub end: u64,
}

/// The allocations that a launch may touch, sorted by address.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    extents: Vec<Extent>,
}

impl Memory {
    /// From extents in any order; they do not overlap.
    pub fn new(mut extents: Vec<Extent>) -> Self {
        extents.sort_by_key(|e| e.start);
        Memory { extents }
    }

    /// These allocations and `more`; extents that are in both count once.
    pub fn with(&self, more: &[Extent]) -> Self {
        let mut memory = Memory::new([&self.extents[..], more].concat());
        memory.extents.dedup();
        memory
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

    /// Describes the allocation nearest to an address, for a fault's text.
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
