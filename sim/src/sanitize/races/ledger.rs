//! Accesses of all workgroups of a launch. Two workgroups' accesses of the same bytes are a race unless flags order
//! them.
//!
//! A workgroup keeps its accesses while it runs. It enters them in the ledger when it ends, or before its knowledge of
//! other workgroups changes. Entries are made in the order of the workgroups, so reports do not depend on threads.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};

use super::dwords::{DWORDS, Dwords, PAGE};
use super::order::{Clocks, Foreign, Party, View};
use super::report::{Notes, Scene, Site, action};
use super::shadow::{ByAddress, Mark, Page, Shadow, Tag, WAVES, WHOLE};
use super::stored::Values;
use crate::exec::lanes::lanes;
use crate::fault::{FaultKind, RaceReason};

/// An entered access of a workgroup.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Entry {
    workgroup: u32,
    /// Time in the wave, times 16, plus the number of the wave.
    when: u32,
    tag: Tag,
    /// Whether it represents plain stores only.
    plain: bool,
}

impl Entry {
    fn wave(self) -> usize {
        (self.when % WAVES as u32) as usize
    }
    fn site(self, write: bool) -> Site {
        Site {
            workgroup: u64::from(self.workgroup),
            wave: self.wave() as u32,
            at: self.tag.at(),
            action: action(self.tag, write),
        }
    }
    /// Whether this access happened before a party that knows `others`.
    fn is_before(self, write: bool, others: &Foreign) -> bool {
        let plain = write && !self.tag.has(Tag::THROUGH);
        let map = if plain { &others.full } else { &others.through };
        let clocks = map.get(&u64::from(self.workgroup));
        clocks.is_some_and(|clocks| clocks[self.wave()] >= self.when / WAVES as u32)
    }
}

/// Last write, or last read, of some dwords.
struct Known {
    dwords: Dwords,
    entry: Entry,
    write: bool,
    /// Whether another workgroup has written the dwords since: other bytes, or the same ones without order.
    older: bool,
}

/// Known accesses of a page.
#[derive(Default)]
struct KnownPage {
    known: Vec<Known>,
    values: Option<Box<Values>>,
}

/// A flag through which workgroups, or waves, synchronise.
#[derive(Clone, Default)]
pub(super) struct Flag {
    /// Order for waves of the workgroup that wrote it last.
    pub local: Option<(u64, View)>,
    pub foreign: Foreign,
}

#[derive(Default)]
pub(super) struct State {
    pages: ByAddress<KnownPage>,
    pub flags: ByAddress<Flag>,
    /// Workgroups that have ended and wait for earlier ones.
    ended: BTreeMap<u64, Set>,
    next: u64,
    /// Stores of the same bytes, if notes are requested.
    pub notes: Notes,
}

/// Race state that all workgroups of a launch share.
#[derive(Default)]
pub(crate) struct Ledger(Mutex<State>);

/// Accesses of one workgroup.
#[derive(Default)]
pub(super) struct Set {
    pub workgroup: u64,
    pub global: Shadow,
    pub parties: Vec<Party>,
    /// Times up to which accesses have been entered.
    pub entered: Clocks,
}

/// A race between two workgroups: number, wave and instruction of the later workgroup, and the fault.
pub(crate) struct Found {
    pub workgroup: u64,
    pub wave: u32,
    pub at: u32,
    pub kind: FaultKind,
}

impl Ledger {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Stores of the same bytes in all workgroups.
    pub fn notes(self) -> Notes {
        self.0.into_inner().unwrap_or_else(|e| e.into_inner()).notes
    }

    /// Enters a workgroup that has ended, once all workgroups before it have.
    pub(super) fn end(&self, set: Set, scene: &Scene, notes: Notes) -> Result<(), Found> {
        let mut state = self.lock();
        state.notes.join(notes);
        state.ended.insert(set.workgroup, set);
        while let Some(mut set) = {
            let next = state.next;
            state.ended.remove(&next)
        } {
            state.next += 1;
            state.enter(&mut set, scene)?;
        }
        Ok(())
    }
}

/// The race to report: the one of the first wave, at its earliest time. The order of pages depends on host addresses,
/// so it cannot decide.
#[derive(Default)]
struct First(Option<([u32; 4], u64, Found)>);

impl First {
    /// Rank of a race of these accesses at this address, if it comes before the race found so far.
    fn is(&self, old: Entry, new: Entry, page: u64, at: u64) -> Option<[u32; 4]> {
        let (wave, time) = (new.wave() as u32, new.when / WAVES as u32);
        let key = [wave, time, old.workgroup, old.when];
        let first = self.0.as_ref().is_none_or(|(other, address, _)| {
            key < *other || key == *other && address / PAGE == page && at < *address
        });
        first.then_some(key)
    }
}

impl State {
    /// Checks a workgroup's new accesses against other workgroups', and enters them.
    pub fn enter(&mut self, set: &mut Set, scene: &Scene) -> Result<(), Found> {
        let mut first = First::default();
        let mut news = Vec::new();
        let mut same = Vec::new();
        for page in &mut set.global.pages {
            if page.entered == page.touches.len() {
                continue;
            }
            let number = page.base / PAGE;
            let KnownPage { known, values } = self.pages.entry(number).or_default();
            let mut taken = false;
            for write in [true, false] {
                news.clear();
                newest(page, write, set.workgroup as u32, &set.entered, &mut news);
                for (dwords, new) in &news {
                    let party = &set.parties[new.wave()];
                    same.clear();
                    for k in known.iter().filter(|k| k.write || write) {
                        let both = dwords.and(&k.dwords);
                        let Some(mut dword) = both.first() else {
                            continue;
                        };
                        let Some(reason) = conflict(k.entry, k.write, *new, write, party) else {
                            continue;
                        };
                        let mut bytes = k.entry.tag.bytes() & new.tag.bytes();
                        if k.entry.plain
                            && new.plain
                            && let (Some(old), Some(now)) = (&*values, &page.values)
                        {
                            let unlike = |d: &usize| old.unlike(now, *d) & bytes;
                            let Some(first) = both.iter().find(|d| unlike(d) != 0) else {
                                same.push(k.entry);
                                if scene.notes {
                                    self.notes.add(false, new.tag.at(), k.entry.tag.at());
                                }
                                continue;
                            };
                            bytes = unlike(&first);
                            dword = first;
                        }
                        let at = page.address(dword, bytes);
                        let Some(key) = first.is(k.entry, *new, number, at) else {
                            continue;
                        };
                        let (here, there) = (new.site(write), k.entry.site(k.write));
                        let kind = scene.race(None, at, here.action, &there, reason);
                        let found = Found {
                            workgroup: set.workgroup,
                            wave: here.wave,
                            at: here.at,
                            kind,
                        };
                        first.0 = Some((key, at, found));
                    }
                    // Only flags can put a third workgroup after one of two, and not after the other.
                    if self.flags.is_empty() {
                        same.clear();
                    }
                    replace(known, *dwords, *new, write, &same);
                    if let Some(now) = page.values.as_deref().filter(|_| write) {
                        // The first workgroup's values are copied whole: values of other dwords are never read.
                        if values.is_none() {
                            *values = page.values.clone();
                            taken = true;
                        }
                        if let Some(values) = values.as_mut().filter(|_| !taken) {
                            values.take(now, dwords, new.tag.bytes());
                        }
                    }
                }
            }
            if let Some(values) = &mut page.values {
                values.entered();
            }
            page.entered = page.touches.len();
        }
        for (entered, party) in set.entered.iter_mut().zip(&set.parties) {
            *entered = party.progress.now;
        }
        first.0.map_or(Ok(()), |(.., found)| Err(found))
    }
}

/// Replaces the last accesses of a kind by a new one, except unordered stores of the same bytes (`same`).
fn replace(known: &mut Vec<Known>, dwords: Dwords, new: Entry, write: bool, same: &[Entry]) {
    for i in 0..known.len() {
        let old = &mut known[i];
        if old.write != write || old.older {
            continue;
        }
        let both = old.dwords.and(&dwords);
        if both.is_empty() {
            continue;
        }
        old.dwords = old.dwords.without(&dwords);
        let entry = old.entry;
        let covered = entry.tag.bytes() & !new.tag.bytes() == 0;
        if write && entry.workgroup != new.workgroup && (!covered || same.contains(&entry)) {
            known.push(Known {
                dwords: both,
                entry,
                write,
                older: true,
            });
        }
    }
    known.retain(|k| !k.dwords.is_empty());
    known.push(Known {
        dwords,
        entry: new,
        write,
        older: false,
    });
}

/// Chooses for each dword of a page one access that represents all that have not been entered. It prefers plain to
/// coherent accesses, then the first wave.
fn newest(
    page: &Page,
    write: bool,
    workgroup: u32,
    entered: &Clocks,
    news: &mut Vec<(Dwords, Entry)>,
) {
    let fresh = || {
        page.touches[page.entered..]
            .iter()
            .filter(|t| t.write == write)
    };
    let waves = fresh().fold(0u64, |waves, t| waves | 1 << t.wave);
    let entry = |wave: usize, time: u32, tag: Tag, plain: bool| Entry {
        workgroup,
        when: time * WAVES as u32 + wave as u32,
        tag,
        plain,
    };
    if fresh().all(|t| t.tag.bytes() == WHOLE && !t.tag.has(Tag::COHERENT)) {
        let mut taken = Dwords::default();
        for wave in lanes(waves) {
            for touch in fresh().rev().filter(|t| t.is_by(wave, write)) {
                let dwords = touch.dwords.without(&taken);
                if !dwords.is_empty() {
                    taken = taken.or(&dwords);
                    news.push((dwords, entry(wave, touch.time, touch.tag, write)));
                }
            }
        }
        return;
    }
    let mut best: [Option<(usize, Mark)>; DWORDS] = [None; DWORDS];
    for wave in lanes(waves) {
        for (best, mark) in best.iter_mut().zip(page.marks(write, wave)) {
            let coherent = mark.tag.has(Tag::COHERENT);
            let worse = best.is_some_and(|(_, b)| !b.tag.has(Tag::COHERENT) || coherent);
            if mark.time > entered[wave] && !worse {
                *best = Some((wave, mark));
            }
        }
    }
    for (dword, best) in best.into_iter().enumerate() {
        let Some((wave, mark)) = best else {
            continue;
        };
        let touched = fresh().filter(|t| t.dwords.contains(dword));
        let (bytes, plain) = touched.fold((0, write), |(bytes, plain), t| {
            (bytes | t.tag.bytes(), plain && t.tag.is_plain())
        });
        let entry = entry(wave, mark.time, mark.tag.with_bytes(bytes), plain);
        let mut one = Dwords::default();
        one.insert(dword, dword);
        match news.iter_mut().find(|(_, same)| *same == entry) {
            Some((dwords, _)) => *dwords = dwords.or(&one),
            None => news.push((one, entry)),
        }
    }
}

/// Reason why an access of another workgroup and a new one by `party` are a race; `None` if they are not.
fn conflict(
    old: Entry,
    old_write: bool,
    new: Entry,
    write: bool,
    party: &Party,
) -> Option<RaceReason> {
    let both_coherent = old.tag.has(Tag::COHERENT) && new.tag.has(Tag::COHERENT);
    if old.workgroup == new.workgroup || old.tag.bytes() & new.tag.bytes() == 0 || both_coherent {
        return None;
    }
    let (knows, scalar) = match (write, new.tag) {
        (false, tag) if tag.has(Tag::SCALAR) => (&party.acquired_by_scalar, true),
        (false, tag) if !tag.has(Tag::COHERENT) => (&party.acquired, false),
        _ => (&party.learned, false),
    };
    if old.is_before(old_write, knows) {
        return None;
    }
    // Find the missing instruction.
    Some(if old.is_before(old_write, &party.learned) {
        if scalar {
            RaceReason::ScalarCache
        } else {
            RaceReason::NoAcquire
        }
    } else if old.is_before(false, &party.learned) {
        RaceReason::NoRelease
    } else {
        RaceReason::Workgroups
    })
}
