//! Order through flags: atomics, and loads and stores that bypass caches.

use std::sync::Arc;

use super::ledger::Flag;
use super::order::{Clocks, Foreign, Party, join, join_others};
use super::shadow::Tag;
use super::{Races, blame};
use crate::exec::lanes::lanes;
use crate::fault::FaultKind;
use crate::sanitize::accesses::{Access, Action, Space};

impl Races<'_> {
    /// Adds the order that an atomic, or a coherent load or store, creates.
    pub(super) fn synchronise(
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

    /// Reads a flag.
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

    /// Writes a flag. A store replaces the flag's order; an atomic adds to it.
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

    /// Handles `buffer_inv sc1`: plain loads see the stores that flags have announced.
    pub(super) fn invalidate(&mut self, wave: usize) -> Result<(), FaultKind> {
        self.acquire(wave, |party| &mut party.acquired)
    }

    /// Handles `s_dcache_inv`: scalar loads see them too, and the workgroup's vector stores that have reached the L2.
    pub(super) fn invalidate_scalar(&mut self, wave: usize) -> Result<(), FaultKind> {
        let party = &mut self.set.parties[wave];
        party.scalar_view = party.view.of(wave, &party.progress).drained;
        self.acquire(wave, |party| &mut party.acquired_by_scalar)
    }

    /// Makes the order learned from flags valid, if the load that last learned something is done.
    fn acquire(
        &mut self,
        wave: usize,
        known: fn(&mut Party) -> &mut Foreign,
    ) -> Result<(), FaultKind> {
        let party = &mut self.set.parties[wave];
        let learned = party.learned.clone();
        if party.learned_at <= party.progress.vm_done() && known(party).lacks(&learned) {
            let mut state = self.ledger.lock();
            blame(state.enter(&mut self.set, &self.scene), &mut self.blame)?;
            known(&mut self.set.parties[wave]).join(&learned);
        }
        Ok(())
    }
}
