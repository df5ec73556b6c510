//! Who accessed which bytes: for every dword that a workgroup touched, each wave's last read and last write.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

/// Waves of a workgroup at most.
pub(super) const WAVES: usize = 16;
/// Dwords of a page.
pub(super) const DWORDS: usize = 256;
/// Bytes of a page.
pub(super) const PAGE: u64 = 4 * DWORDS as u64;

/// Where, and of which kind an access was.
#[derive(Clone, Copy, Default)]
pub(super) struct Tag(pub u32);

impl Tag {
    /// Atomic, or a load or store that bypasses the caches that are not shared with the other party.
    pub const COHERENT: u32 = 1 << 28;
    /// Goes through to what all workgroups see.
    pub const THROUGH: u32 = 1 << 29;
    /// The LDS side of a load to LDS.
    pub const DMA: u32 = 1 << 30;
    /// Through the scalar cache.
    pub const SCALAR: u32 = 1 << 31;

    /// Index of the instruction.
    pub fn at(self) -> u32 {
        self.0 & 0xff_ffff
    }
    /// The bytes of the dword, a bit each.
    pub fn bytes(self) -> u8 {
        (self.0 >> 24 & 15) as u8
    }
    pub fn has(self, bit: u32) -> bool {
        self.0 & bit != 0
    }
    pub fn with_bytes(self, bytes: u8) -> Self {
        Tag(self.0 & !(15 << 24) | u32::from(bytes) << 24)
    }
}

/// A wave's last access of a kind to a dword; time 0: none.
#[derive(Clone, Copy, Default)]
pub(super) struct Mark {
    pub time: u32,
    pub tag: Tag,
}

/// What the waves did to a dword.
#[derive(Clone, Copy, Default)]
pub(super) struct Cell {
    /// The stretch between barriers that `writers` and `readers` are about; what was before is ordered.
    pub epoch: u32,
    pub writers: u16,
    pub readers: u16,
    /// Bytes that the workgroup wrote and read and that the launch does not know of yet.
    pub wrote: u8,
    pub read: u8,
}

type Marks = Option<Box<[Mark; DWORDS]>>;

/// 1 KiB of memory.
pub(super) struct Page {
    /// First address.
    pub base: u64,
    pub cells: Box<[Cell; DWORDS]>,
    pub reads: [Marks; WAVES],
    pub writes: [Marks; WAVES],
}

impl Page {
    fn new(base: u64) -> Self {
        Page {
            base,
            cells: Box::new([Cell::default(); DWORDS]),
            reads: Default::default(),
            writes: Default::default(),
        }
    }

    /// The mark of a wave, if it made such an access.
    pub fn mark(&self, write: bool, wave: usize, dword: usize) -> Option<Mark> {
        let marks = if write { &self.writes } else { &self.reads };
        let mark = marks[wave].as_ref()?[dword];
        (mark.time > 0).then_some(mark)
    }
}

/// A multiplication spreads page numbers well enough.
#[derive(Default)]
pub(super) struct Spread(u64);

impl Hasher for Spread {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &b in bytes {
            self.write_u64(u64::from(b));
        }
    }
    fn write_u64(&mut self, x: u64) {
        self.0 = (self.0 ^ x)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(26);
    }
}

/// A map from addresses.
pub(super) type ByAddress<T> = HashMap<u64, T, BuildHasherDefault<Spread>>;

/// The pages that were touched.
#[derive(Default)]
pub(super) struct Shadow {
    pub pages: Vec<Page>,
    index: ByAddress<u32>,
    /// The page that was asked for last.
    last: Option<(u64, u32)>,
}

impl Shadow {
    /// The page of an address.
    #[inline]
    pub fn page(&mut self, address: u64) -> &mut Page {
        let number = address / PAGE;
        let i = match self.last {
            Some((last, i)) if last == number => i,
            _ => self.find(number),
        };
        &mut self.pages[i as usize]
    }

    fn find(&mut self, number: u64) -> u32 {
        let pages = &mut self.pages;
        let i = *self.index.entry(number).or_insert_with(|| {
            pages.push(Page::new(number * PAGE));
            (pages.len() - 1) as u32
        });
        self.last = Some((number, i));
        i
    }
}

/// The bytes of dword `dword` of a page (at `base`) that lie in `[start, end)`, a bit each.
#[inline]
pub(super) fn bytes_in(base: u64, dword: usize, start: u64, end: u64) -> u8 {
    let at = base + 4 * dword as u64;
    let low = start.saturating_sub(at).min(4) as u32;
    let high = end.saturating_sub(at).min(4) as u32;
    ((1u32 << high) - (1u32 << low)) as u8
}
