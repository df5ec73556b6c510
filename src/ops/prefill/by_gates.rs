//! Choice between the fused path and the split path by the gates, where a plan with lengths on the host cuts sequences.
//!
//! Gates that forget soon let a fused prefill start its segments early, without summaries. It is then faster than the
//! split path, and otherwise slower. So `prefill_fused` runs first, with segments of its own. It samples the gates, and
//! prepares the chunks of the split path or leaves no work to the kernels after it (`hip/prefill/by_gates.h`).

use std::ffi::c_void;

use super::CHUNK;
use super::plan::{self, Counts, Partition, Uneven};
use super::shape::Shape;
use crate::abi::{dwk_prefill_by_gates, dwk_prefill_item};
use crate::workspace::WORKSPACE_ALIGN;

/// Segments of the fused path, in a plan of the split path.
#[derive(Clone, Copy, Debug)]
pub(super) struct ByGates {
    /// Segments, none of which has a summary.
    pub(super) counts: Counts,
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
    pub(super) fn append(fused: &Partition, cu_seqlens: &[i32], tables: &mut Vec<i32>) -> ByGates {
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

    /// Kernel arguments.
    pub(super) fn lower(&self, lists: &Lists, soon: i32) -> dwk_prefill_by_gates {
        let own = self.items(lists.items.cast());
        let items = lists.workspace;
        let chains = items.wrapping_byte_add(aligned(lists.counts.items * plan::ITEM_WORDS));
        dwk_prefill_by_gates {
            items: lists.items,
            chains: lists.chains,
            split_items: items.cast(),
            split_chains: chains.cast(),
            items_count: lists.counts.items as i32,
            chains_count: lists.counts.chains as i32,
            samples: own.wrapping_add(self.counts.items).cast(),
            samples_count: self.samples as i32,
            soon,
        }
    }
}

impl Shape {
    /// Segments of the fused path, if [`PrefillPath::Auto`](super::PrefillPath::Auto) leaves the choice to the gates:
    /// where it is modelled faster with gates that forget, and finding that they do not costs next to nothing.
    /// `split`: segments of the split path.
    pub(super) fn partition_by_gates(
        &self,
        cu_seqlens: &[i32],
        split: Counts,
    ) -> Option<Partition> {
        /// Least time of the split path in microseconds: finding the choice takes 2 to 3 of them.
        const LEAST: f64 = 80.0;
        /// Most of the split path's time that the fused path may take: a prefill of 0.98 was modelled slower.
        const MOST: f64 = 0.95;
        /// Microseconds for a kernel of the split path without work.
        const WITHOUT_WORK: f64 = 7.4;
        if !self.leaves_choice() {
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
        let heads = self.spec.heads.value as f64;
        let all = chunks.iter().sum::<usize>() as f64 * heads;
        let split_us = self.machine().time(&chunks)
            + costs.prepare_start
            + costs.prepare * all / self.compute_units as f64;
        if split_us < LEAST {
            return None;
        }
        let (items, cost) = uneven.cut(&chunks)?;
        let kernels = 1 + i32::from(split.summaries > 0) + i32::from(split.chains > 0);
        let fused_us = cost as f64 / 16.0 * costs.chunk + f64::from(kernels) * WITHOUT_WORK;
        if fused_us > MOST * split_us {
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
