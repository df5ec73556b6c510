//! Races: two accesses of the same byte, one of them a write, by different waves, that nothing orders.
//!
//! Every wave has vector clocks ([`order`]) of what is before it; every dword remembers each wave's last accesses
//! ([`shadow`]). Between waves of a workgroup `s_barrier` makes order, and atomics do: what was done before an atomic (or
//! a store with sc0 or sc1) is before what another wave does after an atomic that returns (or a load with sc0 or sc1)
//! on the same dword. `s_barrier` does not wait for memory: LDS that no `s_waitcnt` drained before is not ordered by it.
//! The stores of a workgroup to global memory are, because its compute unit's L1 keeps them in order, which is what
//! LLVM's memory model for gfx942 relies on.
//!
//! Between workgroups ([`ledger`]) the same model wants more, because each accelerator die has an L2 of its own: a
//! plain store is visible after `buffer_wbl2 sc1` and `s_waitcnt vmcnt(0)`, a store with sc1 or an atomic after
//! `s_waitcnt vmcnt(0)`; then a flag is written (sc1 or an atomic) and read (sc1 or an atomic), and then `buffer_inv sc1`
//! lets plain loads see it, `s_dcache_inv` scalar loads.
//! LLVM: AMDGPU usage, memory model GFX942.

mod ledger;
mod order;
mod progress;
mod shadow;

pub(crate) use ledger::{Found, Ledger};

use std::sync::Arc;

use super::accesses::{Access, Accesses, Action, Space};
use crate::disasm;
use crate::exec::lanes::lanes;
use crate::fault::{FaultKind, Race, RacePlace, RaceReason};
use crate::inst::{Format, Inst, Program, flag};
use crate::memory::Memory;
use crate::op::Op;
use ledger::{Flag, Set};
use order::{Clocks, Foreign, Party, View, join, join_others};
use shadow::{ByAddress, DWORDS, Mark, Page, Shadow, Tag, WAVES, bytes_in};

/// What the text of a report needs.
#[derive(Clone, Copy)]
pub(crate) struct Scene<'a> {
    pub program: &'a Program,
    pub memory: &'a Memory,
    /// Workgroups in x, y, z.
    pub counts: [u32; 3],
}

/// Where one of two racing accesses was made.
struct Site {
    workgroup: u64,
    wave: u32,
    at: u32,
    action: &'static str,
}

impl Scene<'_> {
    /// `lds`: the address is one of LDS, of a workgroup.
    #[cold]
    fn race(
        &self,
        lds: Option<u64>,
        address: u64,
        action: &'static str,
        other: &Site,
        reason: RaceReason,
    ) -> FaultKind {
        let pc = self.program.offsets.get(other.at as usize);
        let pc = u64::from(pc.copied().unwrap_or_default());
        let inst = self.program.insts.get(other.at as usize);
        FaultKind::Race(Box::new(Race {
            place: match lds {
                Some(_) => RacePlace::Lds { address },
                None => RacePlace::Global {
                    address,
                    within: self.memory.containing(address),
                },
            },
            action,
            other_action: other.action,
            other_workgroup: crate::launch::place(other.workgroup, self.counts),
            other_wave: other.wave,
            other_pc: pc,
            other_instruction: inst.map(|i| disasm::text(i, pc)).unwrap_or_default(),
            reason,
        }))
    }
}

fn action(tag: Tag, write: bool) -> &'static str {
    match (write, tag) {
        (true, tag) if tag.has(Tag::DMA) => "load to LDS",
        (true, tag) if tag.has(Tag::COHERENT) => "atomic or coherent store",
        (true, _) => "store",
        (false, tag) if tag.has(Tag::SCALAR) => "scalar load",
        (false, tag) if tag.has(Tag::COHERENT) => "coherent load",
        (false, _) => "load",
    }
}

/// The check of one workgroup while it runs.
pub(crate) struct Races<'a> {
    ledger: &'a Ledger,
    scene: Scene<'a>,
    set: Set,
    lds: Shadow,
    /// Atomics in LDS that waves synchronise by.
    lds_flags: ByAddress<View>,
    /// Stretches between barriers before which everything is ordered, counted from 1.
    epoch: u32,
    /// The wave and the instruction that a fault is about, if not the one that was checked.
    pub blame: Option<(u32, u32)>,
}

/// An earlier access turned out to be a race.
fn blame(found: Result<(), Found>, blame: &mut Option<(u32, u32)>) -> Result<(), FaultKind> {
    found.map_err(|found| {
        *blame = Some((found.wave, found.at));
        found.kind
    })
}

impl<'a> Races<'a> {
    pub fn new(ledger: &'a Ledger, scene: Scene<'a>, workgroup: u64, waves: usize) -> Self {
        let mut set = Set {
            workgroup,
            ..Set::default()
        };
        set.parties.resize_with(waves, Party::default);
        Races {
            ledger,
            scene,
            set,
            lds: Shadow::default(),
            lds_flags: ByAddress::default(),
            epoch: 1,
            blame: None,
        }
    }

    /// Before instruction `at` of a wave.
    #[inline]
    pub fn before(
        &mut self,
        wave: usize,
        at: u32,
        inst: &Inst,
        accesses: &Accesses,
    ) -> Result<(), FaultKind> {
        match inst.format {
            Format::Sopp => {
                if inst.op == Op::S_WAITCNT {
                    self.wait(wave, inst.imm);
                }
                Ok(())
            }
            Format::Smem
            | Format::Ds
            | Format::Flat
            | Format::Global
            | Format::Scratch
            | Format::Mubuf
            | Format::Mtbuf => self.memory(wave, at, inst, accesses),
            _ => Ok(()),
        }
    }

    fn wait(&mut self, wave: usize, constant: i32) {
        let party = &mut self.set.parties[wave];
        party.progress.wait(constant);
        if let Some((time, clocks)) = &party.writing_back
            && party.progress.vm_done() >= *time
        {
            join(&mut party.written_back, clocks);
            party.writing_back = None;
        }
    }

    fn memory(
        &mut self,
        wave: usize,
        at: u32,
        inst: &Inst,
        accesses: &Accesses,
    ) -> Result<(), FaultKind> {
        let time = self.set.parties[wave].progress.issue(inst);
        match inst.op {
            Op::BUFFER_WBL2 if inst.has(flag::SC1) => {
                let party = &mut self.set.parties[wave];
                let mut clocks = party.view.vector;
                clocks[wave] = time;
                party.writing_back = Some((time, clocks));
            }
            Op::BUFFER_INV if inst.has(flag::SC1) => self.invalidate(wave)?,
            Op::S_DCACHE_INV | Op::S_DCACHE_INV_VOL => self.invalidate_scalar(wave)?,
            _ => {}
        }
        for access in accesses.iter() {
            let atomic = matches!(access.action, Action::Atomic { .. });
            let global = access.space == Space::Global;
            if access.space == Space::Scratch {
                continue;
            }
            let coherent =
                atomic || global && !access.scalar && (inst.has(flag::SC0) || inst.has(flag::SC1));
            let mut tag = at & 0xff_ffff;
            if coherent {
                tag |= Tag::COHERENT;
                if atomic || inst.has(flag::SC1) {
                    tag |= Tag::THROUGH;
                }
            }
            if access.scalar {
                tag |= Tag::SCALAR;
            }
            if access.space == Space::Lds {
                let progress = &mut self.set.parties[wave].progress;
                if inst.format == Format::Ds || inst.format == Format::Flat {
                    progress.last_lds = time;
                } else {
                    progress.last_dma = time;
                    tag |= Tag::DMA;
                }
            }
            self.record(wave, access, Tag(tag), time)?;
            if coherent {
                self.synchronise(wave, access, Tag(tag), time)?;
            }
        }
        Ok(())
    }

    /// Checks an access, and remembers it.
    fn record(
        &mut self,
        wave: usize,
        access: &Access,
        tag: Tag,
        time: u32,
    ) -> Result<(), FaultKind> {
        let size = u64::from(access.size);
        let mut run: Option<(u64, u64)> = None;
        for lane in lanes(access.lanes) {
            let at = access.addresses[lane];
            match &mut run {
                Some((_, end)) if at == *end => *end += size,
                // Many lanes, one place.
                Some((start, end)) if at == *start && *end == at + size => {}
                _ => {
                    if let Some((start, end)) = run {
                        self.record_run(wave, access, tag, time, start, end)?;
                    }
                    run = Some((at, at + size));
                }
            }
        }
        match run {
            Some((start, end)) => self.record_run(wave, access, tag, time, start, end),
            None => Ok(()),
        }
    }

    fn record_run(
        &mut self,
        wave: usize,
        access: &Access,
        tag: Tag,
        time: u32,
        start: u64,
        end: u64,
    ) -> Result<(), FaultKind> {
        let lds = access.space == Space::Lds;
        let write = access.action != Action::Load;
        let shadow = if lds {
            &mut self.lds
        } else {
            &mut self.set.global
        };
        let party = &self.set.parties[wave];
        let mut from = start;
        while from < end {
            let page = shadow.page(from);
            let to = end.min(page.base + shadow::PAGE);
            let touch = Touch {
                wave,
                write,
                lds,
                tag,
                time,
                epoch: self.epoch,
                view: &party.view,
                scalar: access.scalar.then_some(&party.scalar_view),
            };
            if let Err(conflict) = touch.make(page, from, to) {
                let reason = conflict.reason(lds, &party.view);
                let other = Site {
                    workgroup: self.set.workgroup,
                    wave: conflict.wave as u32,
                    at: conflict.mark.tag.at(),
                    action: action(conflict.mark.tag, conflict.write),
                };
                let lds = lds.then_some(self.set.workgroup);
                let (address, action) = (conflict.address, action(tag, write));
                return Err(self.scene.race(lds, address, action, &other, reason));
            }
            from = to;
        }
        Ok(())
    }

    /// The order that an atomic, or a coherent load or store, makes.
    fn synchronise(
        &mut self,
        wave: usize,
        access: &Access,
        tag: Tag,
        time: u32,
    ) -> Result<(), FaultKind> {
        let reads = access.action == Action::Load;
        let learns = reads || access.action == Action::Atomic { returns: true };
        let mut last = u64::MAX;
        for lane in lanes(access.lanes) {
            let address = access.addresses[lane] & !3;
            if address == last {
                continue;
            }
            last = address;
            if access.space == Space::Lds {
                let party = &mut self.set.parties[wave];
                let flag = self.lds_flags.entry(address).or_default();
                if learns {
                    party.view.join(flag);
                }
                // LDS executes a wave's operations in order.
                let mut view = party.view.of(wave, &party.progress);
                view.lds[wave] = time;
                flag.join(&view);
                continue;
            }
            if learns {
                self.learn(wave, address, tag, time)?;
            }
            if !reads {
                self.publish(wave, address, tag, access.action == Action::Store);
            }
        }
        Ok(())
    }

    /// A flag is read.
    fn learn(&mut self, wave: usize, address: u64, tag: Tag, time: u32) -> Result<(), FaultKind> {
        let mut state = self.ledger.lock();
        let Some(flag) = state.flags.get(&address).cloned() else {
            return Ok(());
        };
        if tag.has(Tag::THROUGH) && self.set.parties[wave].learned.lacks(&flag.foreign) {
            blame(state.enter(&mut self.set, &self.scene), &mut self.blame)?;
            let party = &mut self.set.parties[wave];
            party.learned.join(&flag.foreign);
            party.learned_at = time;
        }
        if let Some((workgroup, view)) = &flag.local
            && *workgroup == self.set.workgroup
        {
            self.set.parties[wave].view.join(view);
        }
        Ok(())
    }

    /// A flag is written: a store begins anew, an atomic goes on with what was there.
    fn publish(&mut self, wave: usize, address: u64, tag: Tag, store: bool) {
        let workgroup = self.set.workgroup;
        let party = &self.set.parties[wave];
        let view = party.view.of(wave, &party.progress);
        let mut new = Flag::default();
        if tag.has(Tag::THROUGH) {
            new.foreign = party.learned.clone();
            let with = |clocks: Clocks| Arc::new([(workgroup, clocks)].into_iter().collect());
            let mut through = view.vector;
            through[wave] = view.drained[wave];
            join(&mut through, &party.written_back);
            join_others(&mut new.foreign.full, &with(party.written_back));
            join_others(&mut new.foreign.through, &with(through));
        }
        let mut state = self.ledger.lock();
        let flag = state.flags.entry(address).or_default();
        if store {
            *flag = Flag {
                local: Some((workgroup, view)),
                ..new
            };
            return;
        }
        flag.foreign.join(&new.foreign);
        match &mut flag.local {
            Some((old, local)) if *old == workgroup => local.join(&view),
            local => *local = Some((workgroup, view)),
        }
    }

    /// `buffer_inv sc1`: plain loads see what flags have told, if the flag's load is done.
    fn invalidate(&mut self, wave: usize) -> Result<(), FaultKind> {
        let party = &self.set.parties[wave];
        let done = party.learned_at <= party.progress.vm_done();
        if done && party.acquired.lacks(&party.learned) {
            let mut state = self.ledger.lock();
            blame(state.enter(&mut self.set, &self.scene), &mut self.blame)?;
            let party = &mut self.set.parties[wave];
            party.acquired.join(&party.learned);
        }
        Ok(())
    }

    /// `s_dcache_inv`: scalar loads do, and see what the workgroup's vector stores have brought to the L2.
    fn invalidate_scalar(&mut self, wave: usize) -> Result<(), FaultKind> {
        let party = &mut self.set.parties[wave];
        party.scalar_view = party.view.of(wave, &party.progress).drained;
        let done = party.learned_at <= party.progress.vm_done();
        if done && party.acquired_by_scalar.lacks(&party.learned) {
            let mut state = self.ledger.lock();
            blame(state.enter(&mut self.set, &self.scene), &mut self.blame)?;
            let party = &mut self.set.parties[wave];
            party.acquired_by_scalar.join(&party.learned);
        }
        Ok(())
    }

    /// All waves that have not ended pass a barrier; those that have ended are before it.
    pub fn barrier(&mut self, waits: impl Fn(usize) -> bool) -> Result<(), FaultKind> {
        let parties = &mut self.set.parties;
        let mut view = View::default();
        let (mut learned, mut acquired, mut by_scalar) =
            (Foreign::default(), Foreign::default(), Foreign::default());
        let mut written_back: Clocks = [0; WAVES];
        let mut scalar_view: Clocks = [0; WAVES];
        for (i, party) in parties.iter().enumerate() {
            view.join(&party.view.of(i, &party.progress));
            learned.join(&party.learned);
            acquired.join(&party.acquired);
            by_scalar.join(&party.acquired_by_scalar);
            join(&mut written_back, &party.written_back);
            join(&mut scalar_view, &party.scalar_view);
        }
        let news = parties.iter().any(|p| {
            p.learned.lacks(&learned)
                || p.acquired.lacks(&acquired)
                || p.acquired_by_scalar.lacks(&by_scalar)
        });
        if news {
            let mut state = self.ledger.lock();
            blame(state.enter(&mut self.set, &self.scene), &mut self.blame)?;
        }
        let mut quiet = true;
        for (i, party) in self.set.parties.iter_mut().enumerate() {
            quiet &= party.progress.lds_is_quiet();
            if waits(i) {
                party.view = view;
                party.written_back = written_back;
                party.scalar_view = scalar_view;
                if news {
                    party.learned = learned.clone();
                    party.acquired = acquired.clone();
                    party.acquired_by_scalar = by_scalar.clone();
                }
            }
        }
        // Then nothing from before can conflict with anything after it.
        self.epoch += u32::from(quiet);
        Ok(())
    }

    /// The workgroup has ended.
    pub fn end(self) -> Result<(), Found> {
        self.ledger.end(self.set, &self.scene)
    }
}

/// An access to some bytes of a page.
struct Touch<'a> {
    wave: usize,
    write: bool,
    lds: bool,
    tag: Tag,
    time: u32,
    epoch: u32,
    view: &'a View,
    /// For scalar loads: what they see of the workgroup's stores.
    scalar: Option<&'a Clocks>,
}

/// Another wave's access that is not ordered with this one.
struct Conflict {
    address: u64,
    wave: usize,
    write: bool,
    mark: Mark,
    scalar: bool,
}

impl Conflict {
    #[cold]
    fn reason(&self, lds: bool, view: &View) -> RaceReason {
        let issued = view.vector[self.wave] >= self.mark.time;
        match (self.scalar, lds, self.mark.tag.has(Tag::DMA)) {
            (true, ..) => RaceReason::ScalarCache,
            (_, true, true) if issued => RaceReason::Undrained { counter: "vmcnt" },
            (_, true, false) if issued => RaceReason::Undrained { counter: "lgkmcnt" },
            _ => RaceReason::Waves,
        }
    }
}

impl Touch<'_> {
    #[inline]
    fn make(&self, page: &mut Page, start: u64, end: u64) -> Result<(), Conflict> {
        let bit = 1u16 << self.wave;
        let first = ((start - page.base) / 4) as usize;
        let last = ((end - 1 - page.base) / 4) as usize;
        if self.scalar.is_some() {
            self.check_scalar(page, first, last)?;
        }
        for dword in first..=last {
            let bytes = bytes_in(page.base, dword, start, end);
            let cell = &mut page.cells[dword];
            if cell.epoch != self.epoch {
                cell.epoch = self.epoch;
                cell.writers = 0;
                cell.readers = 0;
            }
            let others = cell.writers | if self.write { cell.readers } else { 0 };
            if others & !bit != 0 {
                self.check(page, dword, bytes, others & !bit)?;
            }
            let cell = &mut page.cells[dword];
            let (set, marks) = if self.write {
                cell.wrote |= bytes;
                (&mut cell.writers, &mut page.writes[self.wave])
            } else {
                cell.read |= bytes;
                (&mut cell.readers, &mut page.reads[self.wave])
            };
            let marks = marks.get_or_insert_with(|| Box::new([Mark::default(); DWORDS]));
            let mark = &mut marks[dword];
            let mut all = bytes;
            let mut keep = false;
            if *set & bit != 0 {
                all |= mark.tag.bytes();
                // A plain access is not made good by a coherent one after it.
                keep = self.tag.has(Tag::COHERENT) && !mark.tag.has(Tag::COHERENT);
            }
            *set |= bit;
            if keep {
                mark.tag = mark.tag.with_bytes(all);
            } else {
                *mark = Mark {
                    time: self.time,
                    tag: self.tag.with_bytes(all),
                };
            }
        }
        Ok(())
    }

    /// Against the other waves that accessed a dword since the last barrier that ordered everything.
    fn check(&self, page: &Page, dword: usize, bytes: u8, others: u16) -> Result<(), Conflict> {
        for wave in lanes(u64::from(others)) {
            for write in [true, false] {
                if !write && !self.write {
                    continue;
                }
                let Some(mark) = page.mark(write, wave, dword) else {
                    continue;
                };
                let both = mark.tag.has(Tag::COHERENT) && self.tag.has(Tag::COHERENT);
                if both || mark.tag.bytes() & bytes == 0 {
                    continue;
                }
                let clocks = match (self.lds, mark.tag.has(Tag::DMA)) {
                    (false, _) => &self.view.vector,
                    (true, true) => &self.view.drained,
                    (true, false) => &self.view.lds,
                };
                if clocks[wave] < mark.time {
                    let byte = (mark.tag.bytes() & bytes).trailing_zeros();
                    return Err(Conflict {
                        address: page.base + 4 * dword as u64 + u64::from(byte),
                        wave,
                        write,
                        mark,
                        scalar: false,
                    });
                }
            }
        }
        Ok(())
    }

    /// The scalar cache sees nothing that vector stores wrote, this wave's own included, until they are drained and
    /// it is invalidated.
    fn check_scalar(&self, page: &Page, first: usize, last: usize) -> Result<(), Conflict> {
        let Some(seen) = self.scalar else {
            return Ok(());
        };
        for (wave, seen) in seen.iter().enumerate() {
            if page.writes[wave].is_none() {
                continue;
            }
            for dword in first..=last {
                if let Some(mark) = page.mark(true, wave, dword)
                    && *seen < mark.time
                {
                    return Err(Conflict {
                        address: page.base + 4 * dword as u64,
                        wave,
                        write: true,
                        mark,
                        scalar: true,
                    });
                }
            }
        }
        Ok(())
    }
}
