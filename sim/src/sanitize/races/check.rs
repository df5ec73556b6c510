//! Conflicts between two waves of a workgroup at the same bytes.

use super::order::{Clocks, View};
use super::report::{Scene, Site, action};
use super::shadow::{Mark, Page, Shadow, Tag, Touch};
use super::stored::Changes;
use crate::exec::lanes::lanes;
use crate::fault::{FaultKind, RaceReason};
use crate::sanitize::accesses::Access;

/// An access that is being made, and has been recorded.
pub(super) struct Check<'a> {
    /// The access, without its dwords.
    pub touch: &'a Touch,
    pub lds: bool,
    /// Accesses that happened before it.
    pub view: &'a View,
    /// For scalar loads: the workgroup's stores that the scalar cache sees.
    pub scalar: Option<&'a Clocks>,
    /// For plain stores: earlier stored bytes that they change. Stores of the same bytes do not conflict.
    pub changes: Option<&'a Changes>,
}

/// Another wave's access that is not ordered with this one.
pub(super) struct Conflict {
    address: u64,
    wave: usize,
    write: bool,
    mark: Mark,
    scalar: bool,
}

impl Conflict {
    #[cold]
    pub fn report(self, check: &Check, scene: &Scene, workgroup: u64) -> FaultKind {
        let other = Site {
            workgroup,
            wave: self.wave as u32,
            at: self.mark.tag.at(),
            action: action(self.mark.tag, self.write),
        };
        let lds = check.lds.then_some(workgroup);
        let action = action(check.touch.tag, check.touch.write);
        let reason = self.reason(check);
        scene.race(lds, self.address, action, &other, reason)
    }

    fn reason(&self, check: &Check) -> RaceReason {
        let issued = check.view.vector[self.wave] >= self.mark.time;
        match (self.scalar, check.lds, self.mark.tag.has(Tag::DMA)) {
            (true, ..) => RaceReason::ScalarCache,
            (_, true, true) if issued => RaceReason::Undrained { counter: "vmcnt" },
            (_, true, false) if issued => RaceReason::Undrained { counter: "lgkmcnt" },
            _ => RaceReason::Waves,
        }
    }
}

impl Check<'_> {
    /// Time up to which a wave's accesses of a kind happened before this one.
    fn clock(&self, wave: usize, tag: Tag) -> u32 {
        match (self.lds, tag.has(Tag::DMA)) {
            (false, _) => self.view.vector[wave],
            (true, true) => self.view.drained[wave],
            (true, false) => self.view.lds[wave],
        }
    }

    /// Whether an access at `time` is neither ordered before this one nor allowed beside it.
    fn races_with(&self, wave: usize, time: u32, tag: Tag) -> bool {
        let both_coherent = tag.has(Tag::COHERENT) && self.touch.tag.has(Tag::COHERENT);
        self.clock(wave, tag) < time && !both_coherent
    }

    /// Whether a page may hold a conflict; if false, it holds none.
    #[inline]
    pub fn may_conflict(&self, page: &Page) -> bool {
        let readers = if self.touch.write { page.readers } else { 0 };
        let others = (page.writers | readers) & !(1 << self.touch.wave);
        (others != 0 && self.meets(page)) || self.scalar.is_some() && page.written
    }

    /// Accesses of other waves that may conflict with this instruction's.
    fn others<'p>(&self, page: &'p Page) -> impl Iterator<Item = &'p Touch> {
        let (wave, write) = (self.touch.wave, self.touch.write);
        let other = page.unordered().filter(move |t| t.wave != wave);
        other.filter(move |t| write || t.write)
    }

    /// Whether the instruction touches bytes of an earlier access that is not ordered with it.
    fn touches(&self, page: &Page, other: &Touch) -> bool {
        let mut now = page.touches[page.since..].iter();
        self.races_with(other.wave.into(), other.time, other.tag)
            && now.any(|n| {
                n.tag.bytes() & other.tag.bytes() != 0 && n.dwords.intersects(&other.dwords)
            })
    }

    /// Whether a store that changes nothing may conflict in a page. It may with accesses other than stores, or with a
    /// store whose bytes are lost.
    fn meets_more_than_stores(&self, page: &Page) -> bool {
        let others = self.others(page);
        let more = others.filter(|t| !(t.write && t.tag.is_plain()));
        let lost = page.lost.iter().filter(|t| t.wave != self.touch.wave);
        more.chain(lost).any(|t| self.touches(page, t))
    }

    /// Instructions whose unordered stores wrote the same bytes as this one.
    #[cold]
    pub fn same_stores(&self, shadow: &Shadow, mut visit: impl FnMut(u32)) {
        for page in shadow.touched() {
            let stores = self.others(page).filter(|t| t.write && t.tag.is_plain());
            for store in stores.filter(|t| self.touches(page, t)) {
                visit(store.tag.at());
            }
        }
    }

    /// Bytes of a dword that another wave has written with other values than this store.
    fn unlike(&self, changes: &Changes, page: &Page, wave: usize, dword: usize) -> u8 {
        let by_wave = |t: &&Touch| t.is_by(wave, true) && t.dwords.contains(dword);
        let others = page.unordered().filter(|t| !t.tag.is_plain());
        others
            .chain(&page.lost)
            .filter(by_wave)
            .filter(|t| self.races_with(wave, t.time, t.tag))
            .fold(changes.of_dword(page.base, dword), |bytes, t| {
                bytes | t.tag.bytes()
            })
    }

    fn meets(&self, page: &Page) -> bool {
        let others = || self.others(page);
        let now = &page.touches[page.since..];
        others()
            .filter(|t| self.races_with(t.wave.into(), t.time, t.tag))
            .any(|t| {
                now.iter().any(|n| {
                    let both = n.dwords.and(&t.dwords);
                    // The last access represents all bytes that the wave has touched.
                    !both.is_empty()
                        && others()
                            .filter(|o| o.is_by(t.wave.into(), t.write))
                            .filter(|o| o.dwords.intersects(&both))
                            .any(|o| o.tag.bytes() & n.tag.bytes() != 0)
                })
            })
    }

    /// The first conflict in the order of the lanes.
    #[cold]
    pub fn conflict(&self, shadow: &mut Shadow, access: &Access) -> Option<Conflict> {
        if self.changes.is_some_and(Changes::is_empty)
            && !shadow.touched().any(|p| self.meets_more_than_stores(p))
        {
            return None;
        }
        let mut stretches = Vec::new();
        access.stretches(|start, end| stretches.push((start, end)));
        for (start, end) in stretches {
            let mut from = start;
            while from < end {
                let page = shadow.page(from);
                let to = end.min(page.end());
                let found = self.unseen_by_scalar_cache(page, from, to);
                if let Some(conflict) = found.or_else(|| self.conflict_in(page, from, to)) {
                    return Some(conflict);
                }
                from = to;
            }
        }
        None
    }

    fn conflict_in(&self, page: &Page, start: u64, end: u64) -> Option<Conflict> {
        let (first, last) = page.dwords(start, end);
        let others = (page.writers | page.readers) & !(1 << self.touch.wave);
        let kinds = if self.touch.write {
            &[true, false][..]
        } else {
            &[true]
        };
        for dword in first..=last {
            let wanted = page.bytes_in(dword, start, end);
            for wave in lanes(u64::from(others)) {
                for &write in kinds {
                    let Some(mark) = page.mark(write, wave, dword) else {
                        continue;
                    };
                    let mut bytes = mark.tag.bytes() & wanted;
                    if bytes == 0 || !self.races_with(wave, mark.time, mark.tag) {
                        continue;
                    }
                    if let Some(changes) = self.changes.filter(|_| write) {
                        bytes &= self.unlike(changes, page, wave, dword);
                    }
                    if bytes != 0 {
                        return Some(Conflict {
                            address: page.address(dword, bytes),
                            wave,
                            write,
                            mark,
                            scalar: false,
                        });
                    }
                }
            }
        }
        None
    }

    /// A scalar load of bytes that vector stores wrote, this wave's own included. The scalar cache sees them only after
    /// they are drained and the cache is invalidated.
    fn unseen_by_scalar_cache(&self, page: &Page, start: u64, end: u64) -> Option<Conflict> {
        let (first, last) = page.dwords(start, end);
        for (wave, seen) in self.scalar?.iter().enumerate() {
            if !page.touches.iter().any(|t| t.is_by(wave, true)) {
                continue;
            }
            for dword in first..=last {
                if let Some(mark) = page.mark(true, wave, dword)
                    && *seen < mark.time
                {
                    return Some(Conflict {
                        address: page.address(dword, 1),
                        wave,
                        write: true,
                        mark,
                        scalar: true,
                    });
                }
            }
        }
        None
    }
}
