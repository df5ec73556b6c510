//! Races: two accesses of the same byte, one of them a write, by different waves, that nothing orders.
//!
//! Every wave has vector clocks ([`order`]) of what is before it; every page remembers who accessed which of its
//! dwords ([`shadow`]). Between waves of a workgroup `s_barrier` makes order, and atomics do: what was done before an atomic (or
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
//!
//! Two stores of the same bytes ([`stored`]) are no race: memory holds them whichever is the last. Loads to LDS and
//! atomics are not compared.

mod check;
mod dwords;
mod flags;
mod ledger;
mod order;
mod progress;
mod report;
mod shadow;
mod stored;
#[cfg(test)]
mod tests;

pub(crate) use ledger::{Found, Ledger};
pub(crate) use report::{Notes, Scene};

use super::accesses::{Access, Accesses, Action, Space};
use crate::fault::FaultKind;
use crate::inst::{Format, Inst, flag};
use crate::op::Op;
use check::Check;
use dwords::Dwords;
use ledger::Set;
use order::{Clocks, Foreign, Party, View, join};
use shadow::{ByAddress, Shadow, Tag, Touch, WAVES};
use stored::{Changes, Store};

use crate::exec::Env;
use crate::wave::Wave;

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
    /// What the access that is being recorded changes of what was stored.
    changes: Changes,
    /// Stores of the same bytes, where they are asked for.
    notes: Notes,
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
            changes: Changes::default(),
            notes: Notes::default(),
            blame: None,
        }
    }

    /// Before instruction `at` of a wave.
    #[inline]
    pub fn before(
        &mut self,
        w: &Wave,
        at: u32,
        inst: &Inst,
        accesses: &Accesses,
        env: &Env,
    ) -> Result<(), FaultKind> {
        match inst.format {
            Format::Sopp => {
                if inst.op == Op::S_WAITCNT {
                    self.wait(w.id as usize, inst.imm);
                }
                Ok(())
            }
            Format::Smem
            | Format::Ds
            | Format::Flat
            | Format::Global
            | Format::Scratch
            | Format::Mubuf
            | Format::Mtbuf => self.memory(w, at, inst, accesses, env),
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
        w: &Wave,
        at: u32,
        inst: &Inst,
        accesses: &Accesses,
        env: &Env,
    ) -> Result<(), FaultKind> {
        let wave = w.id as usize;
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
            let store = match access.action {
                Action::Store => Store::new(w, inst, access),
                _ => None,
            };
            self.record(wave, access, Tag(tag), time, (store, env.lds))?;
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
        (store, lds_bytes): (Option<Store>, &[u8]),
    ) -> Result<(), FaultKind> {
        let lds = access.space == Space::Lds;
        let write = access.action != Action::Load;
        let shadow = if lds {
            &mut self.lds
        } else {
            &mut self.set.global
        };
        let touch = Touch {
            dwords: Dwords::default(),
            time,
            tag,
            epoch: self.epoch,
            wave: wave as u8,
            write,
        };
        shadow.begin();
        // What barriers have ordered matters to the ledger, and so only in global memory.
        access.stretches(|start, end| shadow.add(&touch, start, end, lds));
        let changes = &mut self.changes;
        changes.clear();
        let alone = self.set.parties.len() == 1;
        if write && !(lds && alone) {
            let overwrites = shadow.overwrites();
            match (&store, lds) {
                (Some(store), false) => changes.add_global(store, shadow),
                (Some(store), true) if overwrites => changes.add_lds(store, lds_bytes),
                (None, _) if overwrites && shadow.touched().any(|page| page.stores) => {
                    changes.add_all(access);
                }
                _ => {}
            }
        }
        let party = &self.set.parties[wave];
        let check = Check {
            touch: &touch,
            lds,
            view: &party.view,
            scalar: access.scalar.then_some(&party.scalar_view),
            changes: (store.is_some() && tag.is_plain()).then_some(changes),
        };
        if shadow.touched().any(|page| check.may_conflict(page)) {
            if let Some(conflict) = check.conflict(shadow, access) {
                return Err(conflict.report(&check, &self.scene, self.set.workgroup));
            }
            if self.scene.notes && check.changes.is_some() {
                let notes = &mut self.notes;
                check.same_stores(shadow, |other| notes.add(lds, tag.at(), other));
            }
        }
        if !changes.is_empty() && !alone {
            shadow.lose(changes);
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
        self.ledger.end(self.set, &self.scene, self.notes)
    }
}
