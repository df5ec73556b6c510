//! Race check: finds two accesses of the same byte by different waves, at least one a write, that nothing orders.
//!
//! Every wave has vector clocks ([`order`]) of the accesses that happened before. Every page remembers the accesses to
//! its dwords ([`shadow`]).
//!
//! Between waves of a workgroup, `s_barrier` orders, and so do atomics. Accesses before an atomic (or a store with sc0
//! or sc1) come before another wave's accesses after an atomic that returns (or a load with sc0 or sc1) on the same
//! dword. `s_barrier` does not wait for memory: it does not order LDS accesses that no `s_waitcnt` drained. It does
//! order a workgroup's stores to global memory, because the L1 of the compute unit keeps them in order. LLVM's memory
//! model for gfx942 relies on that.
//!
//! Between workgroups ([`ledger`]) that model requires more, because each accelerator die has an L2 of its own:
//!
//! 1. A plain store becomes visible after `buffer_wbl2 sc1` and `s_waitcnt vmcnt(0)`, a store with sc1 or an atomic
//!    after `s_waitcnt vmcnt(0)`.
//! 2. Then a flag is written and read, both with sc1 or as atomics.
//! 3. Then `buffer_inv sc1` makes it visible to plain loads, `s_dcache_inv` to scalar loads.
//!
//! Source: LLVM's AMDGPU usage guide, memory model GFX942.
//!
//! Two stores of the same bytes ([`stored`]) are no race: memory holds these bytes whichever is last. Loads to LDS and
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

/// Race check of one workgroup while it runs.
pub(crate) struct Races<'a> {
    ledger: &'a Ledger,
    scene: Scene<'a>,
    set: Set,
    lds: Shadow,
    /// Atomics in LDS through which waves synchronise.
    lds_flags: ByAddress<View>,
    /// Number of the current stretch between barriers, from 1. Earlier stretches are ordered before it.
    epoch: u32,
    /// Stored bytes that the access being recorded changes.
    changes: Changes,
    /// Stores of the same bytes, if notes are requested.
    notes: Notes,
    /// Wave and instruction of a fault, if they are not the ones that were being checked.
    pub blame: Option<(u32, u32)>,
}

/// Converts a race of an earlier access to a fault.
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

    /// Checks instruction `at` of a wave before it is executed.
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
    /// Checks an access and records it.
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
        // Accesses that barriers have ordered still matter to the ledger, so only in global memory.
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

    /// Orders the waves at a barrier. All waves that have not ended pass it; waves that have ended come before it.
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
        // Earlier accesses can then not conflict with later ones.
        self.epoch += u32::from(quiet);
        Ok(())
    }

    /// Ends the check: the workgroup has ended.
    pub fn end(self) -> Result<(), Found> {
        self.ledger.end(self.set, &self.scene, self.notes)
    }
}
