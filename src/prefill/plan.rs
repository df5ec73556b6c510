//! Which sequences are cut into segments, and where: a pure function of the lengths, the heads and the device.
//!
//! A workgroup walks the chunks of a sequence one after the other. Where few workgroups have many chunks, most of the
//! device idles; then sequences are cut into segments of the same number of chunks, shorter sequences stay whole, and
//! two more kernels find the state that each segment starts from.

use super::SEGMENTS_VARIABLE;
use super::lower::Counts;
use crate::abi::dw_prefill_item;
use crate::check::Checked;
use crate::error::{ArgumentError, ArgumentKind};
use crate::launch::{Costs, KernelCost};

/// The numbers of workgroups that a kernel has for a unit of its work, and the device that shares them out.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) compute_units: usize,
    pub(super) costs: &'static Costs,
    /// Workgroups of `prefill_scan` for a segment: value heads times slabs.
    pub(super) scan: usize,
    /// Of `prefill_summarise` for a segment that another follows. First segments have no M to walk for, but as many.
    pub(super) summarise: usize,
    /// Of `prefill_combine` for a sequence.
    pub(super) combine: usize,
    /// Bytes of workspace of a segment that another follows.
    pub(super) summary_bytes: usize,
}

/// How a batch is cut.
#[derive(Clone, Debug, Default)]
pub(super) struct Partition {
    /// The segments: those that another follows, sequence by sequence, then the others, long ones first.
    pub(super) items: Vec<dw_prefill_item>,
    /// Segments that another follows: each has a summary, of its own number.
    pub(super) summaries: usize,
    /// First summary and number of summaries of each sequence of more than two segments.
    pub(super) chains: Vec<[i32; 2]>,
}

/// Chunks of a segment, at least, where the planner chooses: below that the kernels' beginnings and ends prevail.
const LEAST_CHUNKS: usize = 4;

/// Bytes that all summaries of a batch take, at most, where the planner chooses.
pub(super) const MOST_SUMMARY_BYTES: usize = 1 << 30;

/// Words of an item and of a chain.
pub(super) const ITEM_WORDS: usize = size_of::<dw_prefill_item>() / size_of::<i32>();
pub(super) const CHAIN_WORDS: usize = 2;

impl Partition {
    pub(super) fn counts(&self) -> Counts {
        let longest = self.items.iter().map(|i| i.chunks as u32).max();
        Counts {
            items: self.items.len(),
            summaries: self.summaries,
            chains: self.chains.len() as u32,
            longest: longest.unwrap_or(0),
        }
    }

    /// What is uploaded: items, chains, `cu_seqlens`.
    pub(super) fn table(&self, cu_seqlens: &[i32]) -> Vec<i32> {
        let mut words = Vec::with_capacity(
            self.items.len() * ITEM_WORDS + self.chains.len() * CHAIN_WORDS + cu_seqlens.len(),
        );
        for i in &self.items {
            words.extend([i.sequence, i.first_chunk, i.chunks, i.summary]);
        }
        words.extend(self.chains.as_flattened());
        words.extend(cu_seqlens);
        words
    }
}

/// Chunks of a segment where the longest sequence is to have so many segments.
pub(super) fn segment_chunks(chunks: &[usize], segments: usize) -> usize {
    let longest = chunks.iter().copied().max().unwrap_or(0);
    longest.div_ceil(segments).max(1)
}

/// What [`cut`] will make, before anything is allocated.
pub(super) fn counts(chunks: &[usize], segment: usize) -> Counts {
    let followed = || (chunks.iter()).map(|n| n.div_ceil(segment).saturating_sub(1));
    let summaries = followed().sum();
    Counts {
        items: chunks.len() + summaries,
        summaries,
        chains: followed().filter(|&n| n > 1).count() as u32,
        longest: chunks.iter().copied().max().unwrap_or(0).min(segment) as u32,
    }
}

/// Cuts sequences of so many chunks into segments of at most `segment` chunks.
pub(super) fn cut(chunks: &[usize], segment: usize) -> Partition {
    let mut out = Partition::default();
    let mut last = Vec::with_capacity(chunks.len());
    for (sequence, &n) in chunks.iter().enumerate() {
        let first = out.items.len();
        let followed = n.div_ceil(segment).saturating_sub(1);
        let item = |i: usize, chunks: usize| dw_prefill_item {
            sequence: sequence as i32,
            first_chunk: (i * segment) as i32,
            chunks: chunks as i32,
            summary: (first + i) as i32,
        };
        out.items.extend((0..followed).map(|i| item(i, segment)));
        last.push(item(followed, n - followed * segment));
        if followed > 1 {
            out.chains.push([first as i32, followed as i32]);
        }
    }
    out.summaries = out.items.len();
    last.sort_by_key(|item| std::cmp::Reverse(item.chunks));
    out.items.append(&mut last);
    out
}

/// What [`SEGMENTS_VARIABLE`] says, if it is set.
pub(super) fn segments_of_environment() -> Checked<Option<usize>> {
    let Some(given) = std::env::var_os(SEGMENTS_VARIABLE).filter(|given| !given.is_empty()) else {
        return Ok(None);
    };
    match given.to_str().and_then(|text| text.parse().ok()) {
        Some(segments @ 1..) => Ok(Some(segments)),
        _ => Err(ArgumentError::new(
            SEGMENTS_VARIABLE,
            ArgumentKind::Value,
            format!("`{}`", given.display()),
            "it must be a number of segments, at least 1",
        )),
    }
}

/// The least number of segments of the longest sequence that costs about as little as any: 1, unless another one is
/// worthwhile and its summaries take no more than [`MOST_SUMMARY_BYTES`].
pub(super) fn choose(chunks: &[usize], machine: &Machine) -> usize {
    // Long ones first: what is shorter than a segment is counted, not looked at.
    let mut sorted = chunks.to_vec();
    sorted.sort_unstable_by(|a, b| b.cmp(a));
    let longest = sorted.first().copied().unwrap_or(0);
    let walked = sorted.iter().sum();
    let cost = |segments: usize| machine.cost(&sorted, walked, longest.div_ceil(segments).max(1));
    // 2, 3, 4, 6, 8, 12, 16, ...
    let candidates = (1..).flat_map(|power| [1usize << power, 3 << (power - 1)]);
    let affordable: Vec<(usize, f64)> = candidates
        .take_while(|s| s * LEAST_CHUNKS <= longest)
        .map(|segments| (segments, cost(segments)))
        .filter(|(_, c)| c.summaries.saturating_mul(machine.summary_bytes) <= MOST_SUMMARY_BYTES)
        .map(|(segments, c)| (segments, c.us))
        .collect();
    let least = affordable.iter().map(|&(_, us)| us);
    let least = least.fold(f64::INFINITY, f64::min);
    let most = (machine.costs.worthwhile * cost(1).us).min(machine.costs.fewer * least);
    let chosen = affordable.into_iter().find(|&(_, us)| us <= most);
    chosen.map_or(1, |(segments, _)| segments)
}

/// What a way to cut a batch takes.
struct Cost {
    us: f64,
    summaries: usize,
}

impl Machine {
    /// What scan and, where sequences are cut, the two kernels before it take, modelled, for sequences of so many chunks,
    /// long ones first, `walked` in all.
    fn cost(&self, chunks: &[usize], walked: usize, segment: usize) -> Cost {
        let longest = segment.min(chunks.first().copied().unwrap_or(0));
        let (long, short) = chunks.split_at(chunks.partition_point(|&n| n >= longest));
        let mut segments = short.len();
        let (mut followed, mut chained, mut chain) = (0, 0, 0);
        for &n in long {
            let of_this = n.div_ceil(segment).max(1);
            segments += of_this;
            followed += of_this - 1;
            chained += usize::from(of_this > 2);
            chain = chain.max(of_this - 1);
        }
        let mut us = walk(
            &self.costs.scan,
            self.compute_units,
            segments * self.scan,
            longest,
            walked * self.scan,
        );
        if followed > 0 {
            let workgroups = followed * self.summarise;
            us += self.costs.launch;
            us += walk(
                &self.costs.summarise,
                self.compute_units,
                workgroups,
                segment,
                workgroups * segment,
            );
        }
        if chained > 0 {
            let rounds = (chained * self.combine).div_ceil(self.compute_units);
            us += self.costs.launch + ((chain - 1) * rounds) as f64 * self.costs.combine;
        }
        Cost {
            us,
            summaries: followed,
        }
    }
}

/// Whether segments that walk so many chunks in all, `longest` at most, are done sooner by wide workgroups, alone on their
/// compute units, than by narrow ones: so many of either for each segment.
pub(super) fn two_in_one(
    cost: &KernelCost,
    compute_units: usize,
    segments: usize,
    [narrow, wide]: [usize; 2],
    longest: usize,
    chunks: usize,
) -> bool {
    let us = |chunk, each: usize| {
        let cost = KernelCost {
            chunk,
            chunk_shared: chunk,
            residency: 1,
        };
        walk(
            &cost,
            compute_units,
            segments * each,
            longest,
            chunks * each,
        )
    };
    us(cost.chunk_shared, wide) < us(cost.chunk, narrow)
}

/// Workgroups that walk so many chunks in all, `longest` at most. As many share a compute unit as it holds, if need be;
/// those that find no place wait for a round of their own.
fn walk(
    cost: &KernelCost,
    compute_units: usize,
    workgroups: usize,
    longest: usize,
    chunks: usize,
) -> f64 {
    let each_more =
        (cost.chunk_shared - cost.chunk) / cost.residency.saturating_sub(1).max(1) as f64;
    let chunk = |workgroups: usize| {
        let sharing = workgroups.div_ceil(compute_units).clamp(1, cost.residency);
        cost.chunk + (sharing - 1) as f64 * each_more
    };
    let at_once = compute_units * cost.residency;
    let (rounds, rest) = (workgroups / at_once, workgroups % at_once);
    let mut a_round_each = rounds as f64 * chunk(at_once);
    if rest > 0 {
        a_round_each += chunk(rest);
    }
    let mean = chunks as f64 / workgroups.max(1) as f64;
    (a_round_each * mean).max(chunk(workgroups.min(at_once)) * longest as f64)
}

#[cfg(test)]
mod tests;
