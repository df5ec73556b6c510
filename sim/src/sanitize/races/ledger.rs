//! Accesses of all workgroups of a launch: what two of them do to the same bytes is a race unless flags order it.
//!
//! A workgroup keeps its accesses to itself while it runs, and enters them when it ends, or before what it knows of others
//! changes. Entries are made in the order of the workgroups, so that reports do not depend on threads.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard};

use super::order::{Clocks, Foreign, Party, View};
use super::shadow::{ByAddress, DWORDS, PAGE, Page, Shadow, Tag, WAVES};
use super::{Scene, Site, action};
use crate::fault::{FaultKind, RaceReason};

/// An access of a workgroup that has been entered.
#[derive(Clone, Copy, Default)]
struct Entry {
    /// Number of the workgroup plus one; 0: no entry.
    workgroup: u32,
    /// Time of the wave, times 16, plus the wave.
    when: u32,
    tag: Tag,
}

impl Entry {
    fn wave(self) -> usize {
        (self.when % WAVES as u32) as usize
    }
    fn site(self, write: bool) -> Site {
        Site {
            workgroup: u64::from(self.workgroup) - 1,
            wave: self.wave() as u32,
            at: self.tag.at(),
            action: action(self.tag, write),
        }
    }
    /// Whether a party that knows `others` comes after it.
    fn is_before(self, write: bool, others: &Foreign) -> bool {
        let plain = write && !self.tag.has(Tag::THROUGH);
        let map = if plain { &others.full } else { &others.through };
        let clocks = map.get(&(u64::from(self.workgroup) - 1));
        clocks.is_some_and(|clocks| clocks[self.wave()] >= self.when / WAVES as u32)
    }
}

/// The last write and the last read of every dword.
struct Entries {
    last: Box<[[Entry; 2]; DWORDS]>,
    /// Some dword has more writers, in [`State::more`].
    more: bool,
}

/// A flag that workgroups, or waves, synchronise by.
#[derive(Clone, Default)]
pub(super) struct Flag {
    /// For waves of the workgroup that wrote it last.
    pub local: Option<(u64, View)>,
    pub foreign: Foreign,
}

#[derive(Default)]
pub(super) struct State {
    pages: ByAddress<Entries>,
    more: HashMap<u64, Vec<Entry>>,
    pub flags: ByAddress<Flag>,
    /// Ended workgroups whose turn has not come.
    ended: BTreeMap<u64, Set>,
    next: u64,
}

/// What all workgroups of a launch share.
#[derive(Default)]
pub(crate) struct Ledger(Mutex<State>);

/// The accesses of one workgroup.
#[derive(Default)]
pub(super) struct Set {
    pub workgroup: u64,
    pub global: Shadow,
    pub parties: Vec<Party>,
    /// Accesses up to these times have been entered.
    pub entered: Clocks,
}

/// A race that was found between two workgroups: the later workgroup, its wave and instruction, and the rest.
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

    /// Enters a workgroup that has ended, once all before it have.
    pub(super) fn end(&self, set: Set, scene: &Scene) -> Result<(), Found> {
        let mut state = self.lock();
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

impl State {
    /// Checks a workgroup's new accesses against those of others, and enters them.
    pub fn enter(&mut self, set: &mut Set, scene: &Scene) -> Result<(), Found> {
        // Of several races the one of the first wave, at its earliest time: pages come in an order that depends on
        // where the host has put the memory.
        let mut first: Option<([u32; 4], Found)> = None;
        for page in &mut set.global.pages {
            let known = self
                .pages
                .entry(page.base / PAGE)
                .or_insert_with(|| Entries {
                    last: Box::new([[Entry::default(); 2]; DWORDS]),
                    more: false,
                });
            for dword in 0..DWORDS {
                let cell = page.cells[dword];
                for (write, bytes) in [(true, cell.wrote), (false, cell.read)] {
                    if bytes == 0 {
                        continue;
                    }
                    let Some(new) = newest(page, write, dword, bytes, set.workgroup, &set.entered)
                    else {
                        continue;
                    };
                    let party = &set.parties[new.wave()];
                    let address = page.base + 4 * dword as u64;
                    let [written, read] = known.last[dword];
                    let more = match known.more {
                        true => self.more.get(&address).map_or(&[][..], |v| v),
                        false => &[],
                    };
                    let writers = std::iter::once(&written).chain(more).map(|e| (e, true));
                    let readers = write.then_some((&read, false));
                    for (old, old_write) in writers.chain(readers) {
                        let Some(reason) = conflict(*old, old_write, new, write, party) else {
                            continue;
                        };
                        let (wave, time) = (new.wave() as u32, new.when / WAVES as u32);
                        let key = [wave, time, old.workgroup, old.when];
                        if first.as_ref().is_some_and(|(other, _)| *other <= key) {
                            continue;
                        }
                        let bytes = old.tag.bytes() & bytes;
                        let at = address + u64::from(bytes.trailing_zeros());
                        let (here, there) = (new.site(write), old.site(old_write));
                        let kind = scene.race(None, at, here.action, &there, reason);
                        let found = Found {
                            workgroup: set.workgroup,
                            wave: here.wave,
                            at: here.at,
                            kind,
                        };
                        first = Some((key, found));
                    }
                    let place = &mut known.last[dword][usize::from(!write)];
                    let covered = place.tag.bytes() & !bytes == 0;
                    if write && place.workgroup != 0 && place.workgroup != new.workgroup && !covered
                    {
                        known.more = true;
                        self.more.entry(address).or_default().push(*place);
                    }
                    *place = new;
                }
                page.cells[dword].wrote = 0;
                page.cells[dword].read = 0;
            }
        }
        for (entered, party) in set.entered.iter_mut().zip(&set.parties) {
            *entered = party.progress.now;
        }
        first.map_or(Ok(()), |(_, found)| Err(found))
    }
}

/// One access that stands for those of the workgroup: a plain one rather than one that is coherent.
fn newest(
    page: &Page,
    write: bool,
    dword: usize,
    bytes: u8,
    workgroup: u64,
    entered: &Clocks,
) -> Option<Entry> {
    let mut best: Option<Entry> = None;
    for (wave, entered) in entered.iter().enumerate() {
        let Some(mark) = page.mark(write, wave, dword) else {
            continue;
        };
        let worse = best.is_some_and(|b| !b.tag.has(Tag::COHERENT) || mark.tag.has(Tag::COHERENT));
        if mark.time > *entered && !worse {
            best = Some(Entry {
                workgroup: workgroup as u32 + 1,
                when: mark.time * WAVES as u32 + wave as u32,
                tag: mark.tag.with_bytes(bytes),
            });
        }
    }
    best
}

/// Why an access of another workgroup and a new one by `party` are a race, if they are.
fn conflict(
    old: Entry,
    old_write: bool,
    new: Entry,
    write: bool,
    party: &Party,
) -> Option<RaceReason> {
    let both_coherent = old.tag.has(Tag::COHERENT) && new.tag.has(Tag::COHERENT);
    if old.workgroup == 0
        || old.workgroup == new.workgroup
        || old.tag.bytes() & new.tag.bytes() == 0
        || both_coherent
    {
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
    // What would have done?
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
