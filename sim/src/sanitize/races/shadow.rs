//! Accesses of a workgroup's waves to bytes of LDS or global memory.
//!
//! A page keeps a list of its accesses, each with the set of dwords that it touched. An instruction of 64 lanes costs
//! one entry in every page that it touches. A wave's last access to a dword ([`Mark`]) is found by a search of the
//! list, which happens only where two waves meet.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::dwords::{DWORDS, Dwords, PAGE};
use super::stored::{Changes, Values};
use crate::exec::lanes::lanes;

/// Maximum number of waves in a workgroup.
pub(super) const WAVES: usize = 16;
/// All bytes of a dword.
pub(super) const WHOLE: u8 = 15;

/// Place and kind of an access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tag(pub u32);

impl Tag {
    /// Atomic, or a load or store that bypasses the caches that the other party does not share.
    pub const COHERENT: u32 = 1 << 28;
    /// Reaches the memory that all workgroups see.
    pub const THROUGH: u32 = 1 << 29;
    /// The LDS side of a load to LDS.
    pub const DMA: u32 = 1 << 30;
    /// Made through the scalar cache.
    pub const SCALAR: u32 = 1 << 31;

    /// Index of the instruction.
    pub fn at(self) -> u32 {
        self.0 & 0xff_ffff
    }
    /// Bytes of the dword, one bit each.
    pub fn bytes(self) -> u8 {
        (self.0 >> 24 & 15) as u8
    }
    pub fn has(self, bit: u32) -> bool {
        self.0 & bit != 0
    }
    /// For a write: whether it is a store of bytes from registers, neither coherent nor a load to LDS.
    pub fn is_plain(self) -> bool {
        !self.has(Tag::COHERENT | Tag::DMA)
    }
    pub fn with_bytes(self, bytes: u8) -> Self {
        Tag(self.0 & !(15 << 24) | u32::from(bytes) << 24)
    }
}

/// Last access of a kind by a wave to a dword. Time 0: none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Mark {
    pub time: u32,
    pub tag: Tag,
    epoch: u32,
}

/// Access of one instruction to some dwords of a page, the same bytes of each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    pub dwords: Dwords,
    pub time: u32,
    pub tag: Tag,
    /// Stretch between barriers. Accesses of earlier stretches are ordered.
    pub epoch: u32,
    pub wave: u8,
    pub write: bool,
}

impl Touch {
    pub fn is_by(&self, wave: usize, write: bool) -> bool {
        usize::from(self.wave) == wave && self.write == write
    }

    /// Combines this access with the wave's former one, `old`.
    pub fn mark(&self, old: Mark) -> Mark {
        let same = old.time > 0 && old.epoch == self.epoch;
        let mut bytes = self.tag.bytes();
        if same {
            bytes |= old.tag.bytes();
        }
        // A coherent access does not repair a plain one before it.
        let coherent = self.tag.has(Tag::COHERENT);
        if same && coherent && !old.tag.has(Tag::COHERENT) {
            return Mark {
                tag: old.tag.with_bytes(bytes),
                ..old
            };
        }
        Mark {
            time: self.time,
            tag: self.tag.with_bytes(bytes),
            epoch: self.epoch,
        }
    }

    /// Whether a mark of the common dwords would be the same without `old`, an earlier access of the wave.
    fn covers(&self, old: &Touch) -> bool {
        self.wave == old.wave
            && self.write == old.write
            && old.tag.bytes() & !self.tag.bytes() == 0
            && (!self.tag.has(Tag::COHERENT) || old.tag.has(Tag::COHERENT))
            // A store may be no race in a place where an atomic is one.
            && (!self.write || self.tag.is_plain() == old.tag.is_plain())
    }
}

/// 1 KiB of memory.
pub(super) struct Page {
    /// Address of the first byte.
    pub base: u64,
    /// Accesses in the order in which they were made.
    pub touches: Vec<Touch>,
    /// Number of `touches` that have been entered in the launch's ledger.
    pub entered: usize,
    /// Number of the instruction that is being recorded, and its first access in this page.
    stamp: u32,
    pub since: usize,
    /// Waves that wrote, and waves that read, in this page in an epoch, one bit each.
    epoch: u32,
    pub writers: u16,
    pub readers: u16,
    /// Whether any wave wrote to this page in any epoch.
    pub written: bool,
    /// Dwords that were written: in all epochs if nothing is ever forgotten, else in the current epoch.
    stored: Dwords,
    /// Whether there were plain stores in the epoch.
    pub stores: bool,
    /// Stores of the epoch with bytes that other waves, or later stores of the wave, have changed since.
    pub lost: Vec<Touch>,
    /// Stored bytes, for global memory only.
    pub values: Option<Box<Values>>,
    /// Length at which the list is shortened.
    limit: usize,
}

impl Page {
    const SHORT: usize = 64;

    fn new(base: u64) -> Self {
        Page {
            base,
            touches: Vec::with_capacity(8),
            entered: 0,
            stamp: 0,
            since: 0,
            epoch: 0,
            writers: 0,
            readers: 0,
            written: false,
            stored: Dwords::default(),
            stores: false,
            lost: Vec::new(),
            values: None,
            limit: Page::SHORT,
        }
    }

    /// Starts an instruction's access to the page. `forget`: accesses before the epoch no longer matter.
    #[inline]
    fn begin(&mut self, touch: &Touch, stamp: u32, forget: bool) {
        if self.epoch != touch.epoch {
            self.epoch = touch.epoch;
            self.writers = 0;
            self.readers = 0;
            self.stores = false;
            self.lost.clear();
            if forget {
                self.touches.clear();
                self.stored = Dwords::default();
            }
        }
        if self.touches.len() >= self.limit {
            self.thin();
        }
        self.stamp = stamp;
        self.since = self.touches.len();
        let waves = if touch.write {
            self.written = true;
            self.stores |= touch.tag.is_plain();
            &mut self.writers
        } else {
            &mut self.readers
        };
        *waves |= 1 << touch.wave;
    }

    /// Adds `[start, end)`, which must lie in the page, to the instruction's accesses.
    #[inline]
    fn add(&mut self, touch: &Touch, start: u64, end: u64) {
        let (first, last) = self.dwords(start, end);
        if (start | end) & 3 == 0 {
            return self.add_bytes(touch, WHOLE, first, last);
        }
        for dword in first..=last {
            self.add_bytes(touch, self.bytes_in(dword, start, end), dword, dword);
        }
    }

    #[inline]
    fn add_bytes(&mut self, touch: &Touch, bytes: u8, first: usize, last: usize) {
        let now = &mut self.touches[self.since..];
        if let Some(same) = now.iter_mut().find(|t| t.tag.bytes() == bytes) {
            return same.dwords.insert(first, last);
        }
        self.touches.push(*touch);
        if let Some(new) = self.touches.last_mut() {
            new.tag = touch.tag.with_bytes(bytes);
            new.dwords.insert(first, last);
        }
    }

    /// Address past the last byte.
    pub fn end(&self) -> u64 {
        self.base.saturating_add(PAGE)
    }

    /// Address of the first of `bytes` in a dword.
    pub fn address(&self, dword: usize, bytes: u8) -> u64 {
        self.base + 4 * dword as u64 + u64::from(bytes.trailing_zeros())
    }

    /// First and last dword of `[start, end)`.
    pub fn dwords(&self, start: u64, end: u64) -> (usize, usize) {
        let dword = |address: u64| ((address - self.base) / 4) as usize;
        (dword(start), dword(end - 1))
    }

    /// Bytes of a dword that lie in `[start, end)`, one bit each.
    pub fn bytes_in(&self, dword: usize, start: u64, end: u64) -> u8 {
        let at = self.base + 4 * dword as u64;
        let low = start.saturating_sub(at).min(4) as u32;
        let high = end.saturating_sub(at).min(4) as u32;
        ((1u32 << high) - (1u32 << low)) as u8
    }

    /// Accesses before the instruction that is being recorded, latest first, that barriers do not order.
    pub fn unordered(&self) -> impl Iterator<Item = &Touch> {
        let before = self.touches[..self.since].iter().rev();
        before.take_while(|t| t.epoch == self.epoch)
    }

    /// Records a write of the instruction. Returns whether any of its dwords was written before.
    #[inline]
    fn overwrites(&mut self) -> bool {
        let mut before = false;
        for touch in &self.touches[self.since..] {
            before |= touch.dwords.intersects(&self.stored);
            self.stored = self.stored.or(&touch.dwords);
        }
        before
    }

    /// Records that the instruction changes bytes that stores of the epoch have written.
    #[inline(never)]
    fn lose(&mut self, changes: &Changes) {
        let changed = changes.of_page(self.base);
        let all = changed
            .clone()
            .fold(Dwords::default(), |all, c| all.or(&c.dwords));
        for wave in lanes(u64::from(self.writers)) {
            let mut left = all;
            for i in (0..self.since).rev() {
                let touch = self.touches[i];
                if touch.epoch != self.epoch || left.is_empty() {
                    break;
                }
                if !touch.is_by(wave, true) || !touch.tag.is_plain() {
                    continue;
                }
                let of_touch = changed
                    .clone()
                    .filter(|c| c.bytes & touch.tag.bytes() != 0)
                    .fold(Dwords::default(), |all, c| all.or(&c.dwords));
                let dwords = of_touch.and(&touch.dwords).and(&left);
                if dwords.is_empty() {
                    continue;
                }
                if touch.tag.bytes() == WHOLE {
                    left = left.without(&dwords);
                }
                self.remember_lost(Touch { dwords, ..touch });
            }
        }
    }

    /// Adds a lost store. For each wave and dword, the last lost store is enough.
    fn remember_lost(&mut self, new: Touch) {
        for old in &mut self.lost {
            if old.time <= new.time && new.covers(old) {
                old.dwords = old.dwords.without(&new.dwords);
            }
        }
        self.lost.retain(|t| !t.dwords.is_empty());
        let same = |t: &&mut Touch| t.wave == new.wave && t.time == new.time && t.tag == new.tag;
        match self.lost.iter_mut().find(same) {
            Some(old) => old.dwords = old.dwords.or(&new.dwords),
            None => self.lost.push(new),
        }
    }

    /// Last access of a wave to a dword.
    pub fn mark(&self, write: bool, wave: usize, dword: usize) -> Option<Mark> {
        let of_wave = self.touches.iter().filter(|t| t.is_by(wave, write));
        let mark = of_wave
            .filter(|t| t.dwords.contains(dword))
            .fold(Mark::default(), |mark, t| t.mark(mark));
        (mark.time > 0).then_some(mark)
    }

    /// Last access of a wave to each dword.
    pub fn marks(&self, write: bool, wave: usize) -> [Mark; DWORDS] {
        let mut marks = [Mark::default(); DWORDS];
        for touch in self.touches.iter().filter(|t| t.is_by(wave, write)) {
            for dword in touch.dwords.iter() {
                marks[dword] = touch.mark(marks[dword]);
            }
        }
        marks
    }

    /// Removes accesses from the list that later ones cover.
    #[cold]
    fn thin(&mut self) {
        let mut later: Vec<Touch> = Vec::new();
        for touch in self.touches.iter_mut().rev() {
            let made = *touch;
            let mut same = None;
            for (i, l) in later.iter_mut().enumerate() {
                if l.covers(&made) {
                    touch.dwords = touch.dwords.without(&l.dwords);
                    same = made.covers(l).then_some(i).or(same);
                }
            }
            match same {
                Some(i) => later[i].dwords = later[i].dwords.or(&made.dwords),
                None => later.push(made),
            }
        }
        let known = self.touches[..self.entered].iter();
        self.entered = known.filter(|t| !t.dwords.is_empty()).count();
        self.touches.retain(|t| !t.dwords.is_empty());
        self.limit = Page::SHORT.max(2 * self.touches.len());
    }
}

/// Hash function for page numbers: one multiplication spreads them well enough.
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

/// A map with addresses as keys.
pub(super) type ByAddress<T> = HashMap<u64, T, BuildHasherDefault<Spread>>;

/// Number of pages that are found without the map. They are neighbours: all of LDS, or the rows of a tile.
const RECENT: usize = 256;

/// All pages that were touched.
pub(super) struct Shadow {
    pub pages: Vec<Page>,
    index: ByAddress<u32>,
    /// Number and index of the last page that was looked up, for each value of the number's low bits.
    recent: Box<[(u64, u32); RECENT]>,
    /// Number of the instruction that is being recorded, and the pages that it touches.
    stamp: u32,
    touched: Vec<u32>,
}

impl Default for Shadow {
    fn default() -> Self {
        Shadow {
            pages: Vec::new(),
            index: ByAddress::default(),
            recent: Box::new([(u64::MAX, 0); RECENT]),
            stamp: 0,
            touched: Vec::new(),
        }
    }
}

impl Shadow {
    /// Starts to record another instruction.
    pub fn begin(&mut self) {
        self.stamp += 1;
        self.touched.clear();
    }

    /// Records its access to `[start, end)`. `touch` gives everything but the dwords.
    #[inline]
    pub fn add(&mut self, touch: &Touch, start: u64, end: u64, forget: bool) {
        let mut from = start;
        while from < end {
            let i = self.find(from);
            let page = &mut self.pages[i as usize];
            if page.stamp != self.stamp {
                page.begin(touch, self.stamp, forget);
                self.touched.push(i);
            }
            let to = end.min(page.end());
            page.add(touch, from, to);
            from = to;
        }
    }

    /// Pages that the instruction touches.
    pub fn touched(&self) -> impl Iterator<Item = &Page> {
        self.touched.iter().map(|i| &self.pages[*i as usize])
    }

    /// Records a write of the instruction. Returns whether any of its dwords was written before.
    #[inline]
    pub fn overwrites(&mut self) -> bool {
        let mut before = false;
        for &i in &self.touched {
            before |= self.pages[i as usize].overwrites();
        }
        before
    }

    /// Records that the instruction changes bytes that stores have written.
    pub fn lose(&mut self, changes: &Changes) {
        for &i in &self.touched {
            self.pages[i as usize].lose(changes);
        }
    }

    /// Page of an address.
    pub fn page(&mut self, address: u64) -> &Page {
        let i = self.find(address);
        &self.pages[i as usize]
    }

    #[inline(always)]
    pub fn find(&mut self, address: u64) -> u32 {
        let number = address / PAGE;
        let (recent, i) = self.recent[number as usize % RECENT];
        if recent == number {
            return i;
        }
        self.find_in_map(number)
    }

    #[inline(never)]
    fn find_in_map(&mut self, number: u64) -> u32 {
        let pages = &mut self.pages;
        let i = *self.index.entry(number).or_insert_with(|| {
            pages.push(Page::new(number * PAGE));
            (pages.len() - 1) as u32
        });
        self.recent[number as usize % RECENT] = (number, i);
        i
    }
}
