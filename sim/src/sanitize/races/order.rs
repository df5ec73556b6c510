//! What has happened before what a wave does now: vector clocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::progress::Progress;
use super::shadow::WAVES;

/// For each wave of a workgroup: the time up to which its accesses are before.
pub(super) type Clocks = [u32; WAVES];

/// Raises clocks to those of another party.
pub(super) fn join(to: &mut Clocks, from: &Clocks) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = (*to).max(*from);
    }
}

/// Clocks by what has to be waited for. The vector L1 of a compute unit keeps the accesses of a workgroup to global
/// memory in order; the queues of LDS, of loads to LDS and of the scalar cache do not.
#[derive(Clone, Copy, Default)]
pub(super) struct View {
    /// Global memory: what was issued.
    pub vector: Clocks,
    /// LDS: what lgkmcnt says is done.
    pub lds: Clocks,
    /// Loads to LDS, and global memory as the scalar cache sees it: what vmcnt says is done.
    pub drained: Clocks,
}

impl View {
    pub fn join(&mut self, from: &View) {
        join(&mut self.vector, &from.vector);
        join(&mut self.lds, &from.lds);
        join(&mut self.drained, &from.drained);
    }

    /// What a wave's `progress` lets others see of it when they synchronise with it.
    pub fn of(&self, wave: usize, progress: &Progress) -> View {
        let mut view = *self;
        view.vector[wave] = progress.now;
        view.lds[wave] = progress.lgkm_done();
        view.drained[wave] = progress.vm_done();
        view
    }
}

/// Clocks of other workgroups.
pub(super) type Others = Arc<BTreeMap<u64, Clocks>>;

/// Raises `to` to `from`; whether that changed anything.
pub(super) fn join_others(to: &mut Others, from: &Others) -> bool {
    if Arc::ptr_eq(to, from) || from.is_empty() {
        return false;
    }
    if to.is_empty() {
        *to = from.clone();
        return true;
    }
    let news = |(workgroup, clocks): (&u64, &Clocks)| {
        let known = to.get(workgroup);
        known.is_none_or(|known| known.iter().zip(clocks).any(|(k, c)| k < c))
    };
    if !from.iter().any(news) {
        return false;
    }
    let map = Arc::make_mut(to);
    for (workgroup, clocks) in from.iter() {
        join(map.entry(*workgroup).or_insert([0; WAVES]), clocks);
    }
    true
}

/// What one party knows of other workgroups.
#[derive(Clone, Default)]
pub(super) struct Foreign {
    /// Their plain stores, which a write-back of the L2 has made visible.
    pub full: Others,
    /// Their stores that go through the L2 by themselves, atomics, and loads.
    pub through: Others,
}

impl Foreign {
    /// Raises this; whether that changed anything.
    pub fn join(&mut self, from: &Foreign) -> bool {
        join_others(&mut self.full, &from.full) | join_others(&mut self.through, &from.through)
    }

    /// Whether `from` has news.
    pub fn lacks(&self, from: &Foreign) -> bool {
        self.clone().join(from)
    }
}

/// One wave, as the order of accesses goes.
#[derive(Default)]
pub(super) struct Party {
    pub progress: Progress,
    pub view: View,
    /// What `s_dcache_inv` has let the scalar cache see of the workgroup.
    pub scalar_view: Clocks,
    /// A `buffer_wbl2 sc1` that is under way: its time, and what it writes back.
    pub writing_back: Option<(u32, Clocks)>,
    /// What such instructions have written back.
    pub written_back: Clocks,
    /// Learned from flags, good for accesses that bypass the L1.
    pub learned: Foreign,
    /// Time of the load or atomic that last learned something.
    pub learned_at: u32,
    /// Good for plain loads: `buffer_inv sc1` came since.
    pub acquired: Foreign,
    /// Good for scalar loads: `s_dcache_inv` came since.
    pub acquired_by_scalar: Foreign,
}
