//! Segments of the fused path that the gates choose, where a plan with lengths on the host may cut sequences.
//!
//! Gates that forget soon let a fused prefill start its segments early, without summaries. It is then faster than the
//! split path, or than the fused path without cuts, and otherwise slower. So `prefill_fused` runs first, with segments of
//! its own, and samples the gates (`hip/prefill/by_gates.h`). If they do not forget, it prepares the chunks of the split
//! path, or walks whole sequences if that is the plan. If they do, it leaves no work to the kernels after it.

use std::ffi::c_void;

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
    /// Samples of gates.
    samples: usize,
    /// First word of the segments in the tables of the plan. The samples are after them.
    first_word: usize,
}

/// Most samples of gates: segments before whose begin gates are read.
const MOST_SAMPLES: usize = 8;

/// Tables of both paths, for one launch.
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
        or_whole: bool,
        cu_seqlens: &[i32],
        tables: &mut Vec<i32>,
    ) -> ByGates {
        // Kernels read an item in one access.
        tables.resize(tables.len().next_multiple_of(plan::ITEM_WORDS), 0);
        let first_word = tables.len();
        tables.extend(fused.item_words());
        let early: Vec<_> = fused.items.iter().filter(|i| i.first_chunk > 0).collect();
        let samples = early.len().min(MOST_SAMPLES);
        for i in 0..samples {
            // In the chunk before a segment, all of whose tokens exist.
            let item = early[i * early.len() / samples];
            let chunk = (item.first_chunk - 1) * CHUNK as i32;
            tables.extend([item.sequence, cu_seqlens[item.sequence as usize] + chunk]);
        }
        ByGates {
            counts: fused.counts(),
            or_whole,
            samples,
            first_word,
        }
    }

    /// Bytes of workspace for lists of the split path with these counts.
    pub(super) fn bytes(split: Counts) -> usize {
        aligned(split.items * plan::ITEM_WORDS) + aligned(split.chains as usize * plan::CHAIN_WORDS)
    }

    /// The segments.
    pub(super) fn items(&self, tables: *const i32) -> *const dwk_prefill_item {
        tables.wrapping_add(self.first_word).cast()
    }

    /// Kernel arguments of a plan with these tables that would otherwise walk whole sequences.
    pub(super) fn lower(&self, tables: *const i32, soon: i32) -> dwk_prefill_by_gates {
        dwk_prefill_by_gates {
            samples: self.items(tables).wrapping_add(self.counts.items).cast(),
            samples_count: self.samples as i32,
            soon,
            ..Default::default()
        }
    }

    /// Kernel arguments of a plan that would otherwise take the split path.
    pub(super) fn lower_or_split(&self, lists: &Lists, soon: i32) -> dwk_prefill_by_gates {
        let items = lists.workspace;
        let chains = items.wrapping_byte_add(aligned(lists.counts.items * plan::ITEM_WORDS));
        dwk_prefill_by_gates {
            items: lists.items,
            chains: lists.chains,
            split_items: items.cast(),
            split_chains: chains.cast(),
            items_count: lists.counts.items as i32,
            chains_count: lists.counts.chains as i32,
            ..self.lower(lists.items.cast(), soon)
        }
    }
}

impl Shape {
    /// Segments of the fused path, if [`PrefillPath::Auto`](super::PrefillPath::Auto) leaves the choice to the gates:
    /// where it is modelled faster with gates that forget, and finding that they do not costs next to nothing.
    /// `split`: segments of the split path; not read if the plan has the fused one.
    pub(super) fn partition_by_gates(
        &self,
        cu_seqlens: &[i32],
        split: Counts,
    ) -> Option<Partition> {
        /// Least time of the plan in microseconds: finding the choice takes 2 to 3 of them.
        const LEAST: f64 = 80.0;
        /// Most of the plan's time that the fused path may take: a prefill of 0.98 was modelled slower.
        const MOST: f64 = 0.95;
        /// Microseconds for a kernel of the split path without work.
        const WITHOUT_WORK: f64 = 7.4;
        if !self.may_be_fused || self.sequences > Uneven::MOST_SEQUENCES {
            return None;
        }
        let costs = &self.target.fused_costs;
        let chunks = plan::chunks_of(cu_seqlens);
        let uneven = Uneven {
            workgroups: self.spec.heads.value * self.fused_slabs(),
            compute_units: self.compute_units,
            least_chunks: costs.least_chunks as usize,
            start: costs.start_by_gates as usize,
            warm_up: costs.warm_up as usize,
        };
        let fused_us = |cost: usize| cost as f64 / 16.0 * costs.chunk;
        let (planned_us, others) = if self.is_fused() {
            let start = costs.start as usize;
            (
                fused_us(Uneven { start, ..uneven }.cost_of_whole(&chunks)),
                0,
            )
        } else {
            let all = chunks.iter().sum::<usize>() as f64 * self.spec.heads.value as f64;
            let [_, prepare] = self.split_us();
            let prepare_us = costs.prepare_start + prepare * all / self.compute_units as f64;
            let combines = split.chains > 0 && !self.scan_chains(split);
            let others = 1 + i32::from(split.summaries > 0) + i32::from(combines);
            (self.machine().time(&chunks) + prepare_us, others)
        };
        if planned_us < LEAST {
            return None;
        }
        let (items, cost) = uneven.cut(&chunks)?;
        if fused_us(cost) + f64::from(others) * WITHOUT_WORK > MOST * planned_us {
            return None;
        }
        let mut partition = Partition {
            items,
            ..Partition::default()
        };
        if self.fused_whole().check_grids(partition.counts()).is_err() {
            return None;
        }
        self.leave_short(&mut partition, cu_seqlens);
        Some(partition)
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::tests::{cu_seqlens, shape};

    /// Whether the plan has the fused path, and how many segments the gates may choose in its place.
    fn plan(heads: [usize; 2], lengths: &[usize]) -> (bool, Option<usize>) {
        let cu_seqlens = cu_seqlens(lengths);
        let shape = shape(heads, lengths).of_lengths(&cu_seqlens);
        let partition = shape.partition(&cu_seqlens).expect("a plan");
        let segments = shape.partition_by_gates(&cu_seqlens, partition.counts());
        (shape.is_fused(), segments.map(|s| s.items.len()))
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
