//! Memory lines that a launch touched, and the accelerator dies that touched them.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::memory::Memory;

/// Log2 of the bytes of a line of L2 and of the Infinity Cache.
pub(crate) const LINE_BITS: u32 = 7;
/// Log2 of the bytes of a half line, the least that a cache requests from the next one.
pub(crate) const SECTOR_BITS: u32 = 6;
/// Maximum number of dies that are told apart.
pub(crate) const DIES: u32 = 16;

/// Memory traffic in bytes of lines, each line counted once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Lines that were read, in bytes.
    pub read_bytes: u64,
    /// Lines that were written, in bytes.
    pub write_bytes: u64,
    /// Lines that were read or written, in bytes.
    pub unique_bytes: u64,
    /// Lines that were read or written, counted once per die, in bytes.
    pub l2_fill_bytes: u64,
}

/// The lines of every allocation. Threads mark them concurrently; the result does not depend on the order.
pub(crate) struct Lines {
    tables: Vec<Table>,
}

struct Table {
    first: u64,
    count: usize,
    /// For each line: the dies that read it, and from bit [`DIES`] on the dies that wrote it. Allocated on first use.
    dies: OnceLock<Box<[AtomicU32]>>,
}

impl Table {
    fn dies(&self) -> &[AtomicU32] {
        self.dies.get_or_init(|| {
            // Zeroed memory from the system: pages without marked lines cost nothing.
            let zeros = vec![0u32; self.count].into_boxed_slice();
            // SAFETY: an `AtomicU32` has the size, alignment and bit validity of a `u32`.
            unsafe { Box::from_raw(Box::into_raw(zeros) as *mut [AtomicU32]) }
        })
    }
}

impl Lines {
    /// Creates the map for the allocations that a launch may touch.
    pub fn new(memory: &Memory) -> Self {
        let tables = memory.extents().iter().map(|e| {
            let first = e.start >> LINE_BITS;
            let end = e.end.max(e.start + 1).next_multiple_of(1 << LINE_BITS) >> LINE_BITS;
            Table {
                first,
                count: (end - first) as usize,
                dies: OnceLock::new(),
            }
        });
        Lines {
            tables: tables.collect(),
        }
    }

    /// Marks a line as read or written by die `die`. `hint` caches the allocation.
    #[inline]
    pub fn mark(&self, hint: &mut usize, line: u64, die: u32, write: bool) {
        let inside = |t: &Table| line.wrapping_sub(t.first) < t.count as u64;
        if !self.tables.get(*hint).is_some_and(inside) {
            let after = self.tables.partition_point(|t| t.first <= line);
            match after.checked_sub(1) {
                Some(i) if inside(&self.tables[i]) => *hint = i,
                // The access will fault.
                _ => return,
            }
        }
        let table = &self.tables[*hint];
        let cell = &table.dies()[(line - table.first) as usize];
        let bit = 1 << (die % DIES + if write { DIES } else { 0 });
        // Most lines are marked already, and a read leaves them in every core's cache.
        if cell.load(Ordering::Relaxed) & bit == 0 {
            cell.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Sums up the marked lines.
    pub fn traffic(&self) -> Traffic {
        let (mut read, mut written, mut unique, mut fills) = (0u64, 0u64, 0u64, 0u64);
        let tables = self.tables.iter().filter_map(|t| t.dies.get());
        for cell in tables.flatten() {
            let dies = cell.load(Ordering::Relaxed);
            if dies != 0 {
                let (reads, writes) = (dies & ((1 << DIES) - 1), dies >> DIES);
                read += u64::from(reads != 0);
                written += u64::from(writes != 0);
                unique += 1;
                fills += u64::from((reads | writes).count_ones());
            }
        }
        Traffic {
            read_bytes: read << LINE_BITS,
            write_bytes: written << LINE_BITS,
            unique_bytes: unique << LINE_BITS,
            l2_fill_bytes: fills << LINE_BITS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Extent;

    #[test]
    fn lines_count_once_for_each_die() {
        let memory = Memory::new(vec![
            Extent {
                start: 0x1000,
                end: 0x1081,
            },
            // Starts in the line in which the previous allocation ends.
            Extent {
                start: 0x10f0,
                end: 0x1200,
            },
        ]);
        let lines = Lines::new(&memory);
        let mut hint = 0;
        for (address, die, write) in [
            (0x1000, 0, false),
            (0x1040, 0, false),
            (0x1040, 3, false),
            (0x1080, 3, true),
            (0x10f0, 3, false),
            (0x1180, 7, true),
            (0x5000, 0, false),
        ] {
            lines.mark(&mut hint, address >> LINE_BITS, die, write);
        }
        let traffic = Traffic {
            read_bytes: 2 * 128,
            write_bytes: 2 * 128,
            unique_bytes: 3 * 128,
            l2_fill_bytes: 4 * 128,
        };
        assert_eq!(lines.traffic(), traffic);
    }
}
