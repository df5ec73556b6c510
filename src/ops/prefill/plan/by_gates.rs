//! Whether the gates may choose segments of the fused path, and where gates are sampled. `hip/prefill/plan.h` and
//! `hip/prefill/uneven.h` compute the same on the device, so everything is an integer.

use super::super::CHUNK;
use super::uneven::Segments;
use super::{Choice, Machine, Uneven};
use crate::abi::dwk_prefill_item;

/// Most samples of gates: segments before whose begin gates are read.
const MOST_SAMPLES: usize = 8;
/// Words of samples: their number, whether the split path has items, and two of each.
pub(crate) const SAMPLE_WORDS: usize = 2 + 2 * MOST_SAMPLES;

/// Least nanoseconds of a plan that leaves a choice to the gates: finding it takes 2000 to 3000 of them.
pub(crate) const LEAST_TIME: i32 = 80_000;
/// Nanoseconds of a kernel of the split path without work.
pub(crate) const WITHOUT_WORK: i32 = 7400;

/// Words of the samples of gates before segments, counted in the order of their tokens. `or_split`: whether the split path
/// has items.
pub(crate) fn samples(items: &[dwk_prefill_item], or_split: bool, cu_seqlens: &[i32]) -> Vec<i32> {
    let mut early: Vec<_> = items.iter().filter(|item| item.first_chunk > 0).collect();
    early.sort_unstable_by_key(|item| (item.sequence, item.first_chunk));
    let count = early.len().min(MOST_SAMPLES);
    let mut words = vec![count as i32, i32::from(or_split)];
    for i in 0..count {
        // In the chunk before a segment, all of whose tokens exist.
        let item = early[i * early.len() / count];
        let chunk = (item.first_chunk - 1) * CHUNK as i32;
        words.extend([item.sequence, cu_seqlens[item.sequence as usize] + chunk]);
    }
    words
}

/// Segments of the fused path that the gates may choose: where they are modelled faster with gates that forget, and
/// finding that these do not costs next to nothing. And whether that is so, too, if final states wait for `wait_time`
/// nanoseconds.
pub(crate) fn segments_by_gates(
    uneven: &Uneven,
    choice: &Choice,
    machine: &Machine,
    chunks: &[usize],
    wait_time: i32,
) -> Option<(Segments, bool)> {
    // Time, kernels after `prefill_fused`, and time of a chunk of that.
    let takes_fused = choice.takes_fused(chunks);
    let (planned, others, of_chunk) = if takes_fused {
        (choice.walk(&choice.fused, chunks), 0, choice.fused.chunk)
    } else {
        let (segment, kernels) = machine.planned(chunks);
        let is_cut = chunks.iter().any(|&n| n > segment);
        let planned = kernels + choice.prepare(chunks);
        (planned, 1 + i64::from(is_cut), choice.cut_chunk)
    };
    let segments = uneven.cut(chunks)?;
    let walk = segments.cost * i64::from(of_chunk) / 16;
    // A prefill of 0.98 was modelled slower.
    let faster = |others: i64, wait_time: i32| {
        let time = walk + others * i64::from(WITHOUT_WORK) + i64::from(wait_time);
        20 * time <= 19 * planned
    };
    let worth = planned >= i64::from(LEAST_TIME) && faster(others, 0);
    // States that wait need `prefill_scan`.
    worth.then(|| (segments, faster(others + i64::from(takes_fused), wait_time)))
}
