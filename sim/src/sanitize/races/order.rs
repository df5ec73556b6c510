//! Happens-before order of accesses: vector clocks.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::progress::Progress;
use super::shadow::WAVES;

/// For each wave of a workgroup: the time up to which its accesses happened before.
pub(super) type Clocks = [u32; WAVES];

/// Raises `to` to the maximum of both clocks.
pub(super) fn join(to: &mut Clocks, from: &Clocks) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = (*to).max(*from);
    }
}

/// Clocks by the counter that has to be waited for. The vector L1 of a compute unit keeps a workgroup's accesses to
/// global memory in order. The queues of LDS, of loads to LDS and of the scalar cache do not.
#[derive(Clone, Copy, Default)]
pub(super) struct View {
    /// Global memory: accesses that were issued.
    pub vector: Clocks,
    /// LDS: accesses that lgkmcnt shows as done.
    pub lds: Clocks,
    /// Loads to LDS, and global memory as the scalar cache sees it: accesses that vmcnt shows as done.
    pub drained: Clocks,
}

impl View {
    pub fn join(&mut self, from: &View) {
        join(&mut self.vector, &from.vector);
        join(&mut self.lds, &from.lds);
        join(&mut self.drained, &from.drained);
    }

    /// The part of a wave's `progress` that others see when they synchronise with it.
    pub fn of(&self, wave: usize, progress: &Progress) -> View {
        let mut view = *self;
        view.vector[wave] = progress.now;
        view.lds[wave] = progress.lgkm_done();
        view.drained[wave] = progress.vm_done();
        view
    }
}

/// Clocks of other workgroups, by number.
pub(super) type Others = Arc<BTreeMap<u64, Clocks>>;

/// Raises `to` to the maximum of both. Returns whether that changed anything.
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

/// Knowledge of one party about other workgroups.
#[derive(Clone, Default)]
pub(super) struct Foreign {
    /// Plain stores that a write-back of the L2 has made visible.
    pub full: Others,
    /// Stores that are written through the L2 by themselves, atomics, and loads.
    pub through: Others,
}

impl Foreign {
    /// Raises this to the maximum of both. Returns whether that changed anything.
    pub fn join(&mut self, from: &Foreign) -> bool {
        join_others(&mut self.full, &from.full) | join_others(&mut self.through, &from.through)
    }

    /// Whether `from` holds anything that is new here.
    pub fn lacks(&self, from: &Foreign) -> bool {
        self.clone().join(from)
    }
}

/// State of one wave in the order of accesses.
#[derive(Default)]
pub(super) struct Party {
    pub progress: Progress,
    pub view: View,
    /// The workgroup's accesses that `s_dcache_inv` has made visible to the scalar cache.
    pub scalar_view: Clocks,
    /// A `buffer_wbl2 sc1` in progress: its time, and the accesses that it writes back.
    pub writing_back: Option<(u32, Clocks)>,
    /// Accesses that completed `buffer_wbl2 sc1` have written back.
    pub written_back: Clocks,
    /// Knowledge from flags, valid for accesses that bypass the L1.
    pub learned: Foreign,
    /// Time of the load or atomic that last learned something.
    pub learned_at: u32,
    /// Knowledge valid for plain loads, because `buffer_inv sc1` came since.
    pub acquired: Foreign,
    /// Knowledge valid for scalar loads, because `s_dcache_inv` came since.
    pub acquired_by_scalar: Foreign,
}
