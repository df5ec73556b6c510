//! Segments of the fused path that the gates choose.
//!
//! Gates that forget soon let a fused prefill start its segments early, without summaries. It is then faster than the
//! split path, or than the fused path without cuts, and otherwise slower. So `prefill_fused` runs first, with segments of
//! its own, and samples the gates (`hip/prefill/by_gates.h`). If they do not forget, it prepares the chunks of the split
//! path, or walks whole sequences if that is the plan. If they do, it leaves no work to the kernels after it.
//!
//! Final states that overwrite initial ones wait, because another segment may still read these. `prefill_scan` stores
//! them: its list then has an item without chunks for each sequence that is cut.
//!
//! Whether there is a choice, and between which lists, follows from the lengths in integers, on the host or on the device
//! (`hip/prefill/uneven.h`).

use std::ffi::c_void;
use std::ptr;

use super::CHUNK;
use super::plan::{self, Counts, Partition, Uneven};
use super::shape::Shape;
use crate::abi::{dwk_prefill_by_gates, dwk_prefill_item};
use crate::workspace::WORKSPACE_ALIGN;

/// Segments of the fused path, in a plan of the split path or of whole sequences.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByGates {
    /// Segments, none of which has a summary.
    pub(super) counts: Counts,
    /// Whether the plan is one of whole sequences on the fused path.
    pub(super) or_whole: bool,
    /// Sequences that are cut.
    pub(super) cut: usize,
    /// Whether that is worth it although final states wait.
    pub(super) in_place: bool,
    /// First word of the segments in the tables of the plan. The samples are after them.
    first_word: usize,
}

/// Tables of a launch.
pub(super) struct Lists {
    /// Items of the split path that the host made: the begin of the plan's tables.
    pub(super) items: *const dwk_prefill_item,
    pub(super) chains: *const i32,
    pub(super) counts: Counts,
    /// Workspace for what `prefill_fused` leaves of them.
    pub(super) workspace: *mut c_void,
}

fn aligned(words: usize) -> usize {
    (words * size_of::<i32>()).next_multiple_of(WORKSPACE_ALIGN)
}

impl ByGates {
    /// Appends the items of a fused partition to the tables of a plan.
    pub(super) fn append(
        fused: &Partition,
        [or_whole, in_place]: [bool; 2],
        cu_seqlens: &[i32],
        tables: &mut Vec<i32>,
    ) -> ByGates {
        // Kernels read an item in one access.
        tables.resize(tables.len().next_multiple_of(plan::ITEM_WORDS), 0);
        let first_word = tables.len();
        tables.extend(fused.item_words());
        tables.extend(plan::samples(&fused.items, !or_whole, cu_seqlens));
        let cut = fused.items.iter().map(|item| item.summary).max();
        ByGates {
            counts: fused.counts(),
            or_whole,
            cut: cut.unwrap_or(0) as usize,
            in_place,
            first_word,
        }
    }

    /// Items and chains that `prefill_fused` leaves to the kernels after it. `planned`: those of the plan.
    fn left(&self, planned: Counts) -> [usize; 2] {
        match self.or_whole {
            true => [self.cut, 0],
            false => [planned.items, planned.chains as usize],
        }
    }

    /// Bytes of workspace for the lists that `prefill_fused` leaves.
    pub(super) fn bytes(&self, planned: Counts) -> usize {
        let [items, chains] = self.left(planned);
        aligned(items * plan::ITEM_WORDS) + aligned(chains * plan::CHAIN_WORDS)
    }

    /// The segments.
    pub(super) fn items(&self, tables: *const i32) -> *const dwk_prefill_item {
        tables.wrapping_add(self.first_word).cast()
    }

    /// Kernel arguments. `tables`: of the plan. `soon`: chunks within which gates must forget. `waits`: whether final states
    /// wait. Without that, and without a split path, no kernel reads lists.
    pub(super) fn lower(
        &self,
        tables: *const i32,
        lists: &Lists,
        soon: i32,
        waits: bool,
    ) -> dwk_prefill_by_gates {
        let [items_count, chains_count] = self.left(lists.counts);
        let items = lists.workspace;
        let chains = items.wrapping_byte_add(aligned(items_count * plan::ITEM_WORDS));
        let [given_items, given_chains] = match self.or_whole {
            true => [ptr::null(), ptr::null()],
            false => [lists.items.cast(), lists.chains],
        };
        dwk_prefill_by_gates {
            items: given_items.cast(),
            chains: given_chains,
            split_items: match self.or_whole && !waits {
                true => ptr::null_mut(),
                false => items.cast(),
            },
            split_chains: chains.cast(),
            samples: self.items(tables).wrapping_add(self.counts.items).cast(),
            items_count: items_count as i32,
            chains_count: chains_count as i32,
            soon,
            pad0: 0,
        }
    }
}

impl Shape {
    /// Rule by which the segments are cut that the gates may choose. `None`: they have no choice, whatever the lengths of
    /// so many sequences in so many tokens.
    pub(super) fn uneven(&self) -> Option<Uneven> {
        let rows = self.batch.rows();
        if !self.may_be_fused || self.sequences > Uneven::MOST_SEQUENCES {
            return None;
        }
        let costs = &self.target.fused_costs;
        let uneven = Uneven {
            workgroups: (self.spec.heads.value * self.fused_slabs()) as i32,
            compute_units: self.compute_units.min(1 << 24) as i32,
            least_chunks: costs.least_chunks,
            start: costs.start_by_gates,
            warm_up: costs.warm_up,
        };
        // Otherwise workgroups may walk several units, and have no registers for more.
        let mean = rows.div_ceil(self.sequences).div_ceil(CHUNK);
        let long = mean > costs.units_chunks as usize;
        let one = [rows.div_ceil(CHUNK)];
        let (_, kernels) = self.machine().planned(&one);
        let may = long
            && kernels + self.choice().prepare(&one) >= i64::from(plan::LEAST_TIME)
            && uneven.room() > 0
            && (self.fused_whole())
                .check_grids(self.of_uneven(&uneven))
                .is_ok();
        may.then_some(uneven)
    }

    /// Counts of the segments that the gates may choose, at most.
    pub(super) fn of_uneven(&self, uneven: &Uneven) -> Counts {
        let whole = self.whole();
        Counts {
            items: whole.items + uneven.room(),
            ..whole
        }
    }

    /// Most sequences that are cut where gates choose.
    pub(super) fn most_cut(&self, uneven: &Uneven) -> usize {
        let of_chunks = self.chunk_entries() / uneven.least_chunks.max(1) as usize;
        self.sequences.min(uneven.room()).min(of_chunks)
    }

    /// Modelled nanoseconds for final states of this batch that wait: `prefill_scan` reads and writes them once more.
    pub(super) fn wait_time(&self) -> i32 {
        const START: usize = 3500;
        const BYTES_PER_NS: usize = 3000;
        let heads = &self.spec.heads;
        let state = heads.value * heads.key_dim * heads.value_dim * size_of::<f32>();
        (START + 2 * self.sequences * state / BYTES_PER_NS).min(i32::MAX as usize) as i32
    }

    /// Segments that the gates may choose, as a partition of a plan, and whether they may although final states wait.
    pub(super) fn partition_by_gates(&self, cu_seqlens: &[i32]) -> Option<(Partition, bool)> {
        let (segments, in_place) = plan::segments_by_gates(
            &self.uneven()?,
            &self.choice(),
            &self.machine(),
            &plan::chunks_of(cu_seqlens),
            self.wait_time(),
        )?;
        let partition = Partition {
            items: segments.items,
            ..Partition::default()
        };
        Some((partition, in_place))
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::tests::{cu_seqlens, shape};

    /// Whether the plan has the fused path, and how many segments the gates may choose in its place.
    fn plan(heads: [usize; 2], lengths: &[usize]) -> (bool, Option<usize>) {
        let cu_seqlens = cu_seqlens(lengths);
        let shape = shape(heads, lengths).of_lengths(&cu_seqlens);
        let segments = shape.partition_by_gates(&cu_seqlens);
        (shape.is_fused(), segments.map(|(s, _)| s.items.len()))
    }

    /// Segments beside the split path where one sequence, or a few, leave compute units idle; beside whole sequences on
    /// the fused path where these do not fill the last round.
    #[test]
    fn gates_choose_where_whole_sequences_do_not_fill_the_device() {
        for (heads, lengths, fused, segments) in [
            ([16, 32], vec![8192], false, Some(9)),
            ([16, 32], vec![4096; 7], true, Some(14)),
            ([16, 32], vec![4096; 10], false, Some(17)),
            ([2, 8], vec![32768], false, Some(37)),
            ([16, 32], vec![4096; 8], true, Some(16)),
            // Full rounds.
            ([16, 32], vec![4096; 9], true, None),
            ([16, 32], vec![4096; 19], true, None),
            // Too short.
            ([2, 8], vec![8192], false, None),
            ([16, 32], vec![128; 120], true, None),
        ] {
            let name = format!("{heads:?}, {} x {}", lengths.len(), lengths[0]);
            assert_eq!(plan(heads, &lengths), (fused, segments), "{name}");
        }
        // A workgroup that walks several units does not look for starts: no segment is so short.
        let costs = &shape([16, 32], &[8192]).target.fused_costs;
        assert!(costs.least_chunks as u32 > costs.units_chunks + 1);
    }
}
