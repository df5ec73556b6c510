//! Which sequences are cut into segments, and where: a pure function of the lengths, the heads and the device.
//!
//! A workgroup walks the chunks of a sequence one after the other. Where few workgroups have many chunks, most of the
//! device idles; then sequences are cut into segments of the same number of chunks, shorter sequences stay whole, and
//! two more kernels find the state that each segment starts from.

use super::SEGMENTS_VARIABLE;
use crate::abi::dwk_prefill_item;
use crate::check::Checked;
use crate::error::{ArgumentError, ArgumentKind};
use crate::kernels::{Costs, KernelCost};

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

/// How many segments there are, how many of them another follows, and how many sequences are of more than two; the
/// chunks of the longest segment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) items: usize,
    pub(super) summaries: usize,
    pub(super) chains: u32,
    pub(super) longest: u32,
}

/// How a batch is cut.
#[derive(Clone, Debug, Default)]
pub(super) struct Partition {
    /// The segments: those that another follows, sequence by sequence, then the others, long ones first.
    pub(super) items: Vec<dwk_prefill_item>,
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
pub(super) const ITEM_WORDS: usize = size_of::<dwk_prefill_item>() / size_of::<i32>();
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

/// Segments of a sequence of so many chunks that another follows.
fn followed(chunks: usize, segment: usize) -> usize {
    // Most sequences are no longer than a segment, and need no division.
    match chunks > segment {
        true => (chunks - 1) / segment,
        false => 0,
    }
}

/// What [`cut`] will make, before anything is allocated.
pub(super) fn counts(chunks: &[usize], segment: usize) -> Counts {
    let (mut summaries, mut chains, mut longest) = (0, 0, 0);
    for &n in chunks {
        let followed = followed(n, segment);
        summaries += followed;
        chains += u32::from(followed > 1);
        longest = longest.max(n);
    }
    Counts {
        items: chunks.len() + summaries,
        summaries,
        chains,
        longest: longest.min(segment) as u32,
    }
}

/// Cuts sequences of so many chunks into segments of at most `segment` chunks.
pub(super) fn cut(chunks: &[usize], segment: usize) -> Partition {
    let counts = counts(chunks, segment);
    let mut out = Partition {
        items: Vec::with_capacity(counts.items),
        summaries: counts.summaries,
        chains: Vec::with_capacity(counts.chains as usize),
    };
    let mut last = Vec::with_capacity(chunks.len());
    for (sequence, &n) in chunks.iter().enumerate() {
        let first = out.items.len();
        let followed = followed(n, segment);
        let item = |i: usize, chunks: usize| dwk_prefill_item {
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
    // Long ones first, else in order: numbers are sorted sooner than items.
    let key = |i: &dwk_prefill_item| u64::from(!(i.chunks as u32)) << 32 | i.sequence as u64;
    let mut order: Vec<u64> = last.iter().map(key).collect();
    order.sort_unstable();
    let ordered = order.iter().map(|&key| last[key as u32 as usize]);
    out.items.extend(ordered);
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
    let longest = chunks.iter().copied().max().unwrap_or(0);
    let walked = chunks.iter().sum();
    let costs = machine.costs;
    let worthwhile = costs.worthwhile * machine.scan(chunks.len(), longest, walked);
    if machine.at_best(walked, &[], longest) > worthwhile {
        return 1;
    }
    // Long ones first: what is no longer than a segment is counted, not looked at.
    let mut long: Vec<usize> = chunks
        .iter()
        .copied()
        .filter(|&n| n > LEAST_CHUNKS)
        .collect();
    long.sort_unstable_by(|a, b| b.cmp(a));
    // 2, 3, 4, 6, 8, 12, 16, ...
    let candidates = (1..).flat_map(|power| [1usize << power, 3 << (power - 1)]);
    let mut affordable = Vec::new();
    let mut most = worthwhile;
    for segments in candidates.take_while(|s| s * LEAST_CHUNKS <= longest) {
        let segment = longest.div_ceil(segments);
        let cut = &long[..long.partition_point(|&n| n > segment)];
        // More segments take more work, more steps and more memory.
        if machine.at_best(walked, cut, segment) > most {
            break;
        }
        let cost = machine.cost(chunks.len(), walked, cut, segment);
        if cost.summaries.saturating_mul(machine.summary_bytes) > MOST_SUMMARY_BYTES {
            break;
        }
        affordable.push((segments, cost.us));
        most = most.min(costs.fewer * cost.us);
    }
    let chosen = affordable.into_iter().find(|&(_, us)| us <= most);
    chosen.map_or(1, |(segments, _)| segments)
}

/// Steps of combining the segments of the first sequence that is cut, the longest.
fn steps(cut: &[usize], segment: usize) -> usize {
    cut.first().map_or(0, |&n| followed(n, segment) - 1)
}

/// What a way to cut a batch takes.
struct Cost {
    us: f64,
    summaries: usize,
}

impl Machine {
    /// What scan takes, modelled, for so many segments of so many chunks, in all and at most.
    fn scan(&self, segments: usize, longest: usize, walked: usize) -> f64 {
        walk(
            &self.costs.scan,
            self.compute_units,
            segments * self.scan,
            longest,
            walked * self.scan,
        )
    }

    /// What all kernels take at least, as if no compute unit were ever idle: for sequences of `walked` chunks in all, some
    /// of which are cut, long ones first. Shorter segments never take less.
    fn at_best(&self, walked: usize, cut: &[usize], segment: usize) -> f64 {
        let Costs {
            scan,
            summarise,
            combine,
            launch,
            ..
        } = self.costs;
        let work = |cost: &KernelCost, chunks: usize| {
            let chunk = cost.chunk.min(cost.chunk_shared / cost.residency as f64);
            chunks as f64 * chunk / self.compute_units as f64
        };
        // All but a segment of each, or more.
        let summarised = cut.iter().sum::<usize>() - cut.len() * segment;
        launch
            + work(scan, walked * self.scan)
            + work(summarise, summarised * self.summarise)
            + steps(cut, segment) as f64 * combine
    }

    /// What scan and, where sequences are cut, the two kernels before it take, modelled, for so many sequences of `walked`
    /// chunks in all, some of which are cut, long ones first, and the longest segment.
    fn cost(&self, sequences: usize, walked: usize, cut: &[usize], segment: usize) -> Cost {
        let (mut summaries, mut chained) = (0, 0);
        for &n in cut {
            let followed = followed(n, segment);
            summaries += followed;
            chained += usize::from(followed > 1);
        }
        let mut us = self.scan(sequences + summaries, segment, walked);
        if summaries > 0 {
            let workgroups = summaries * self.summarise;
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
            let steps = steps(cut, segment) * rounds;
            us += self.costs.launch + steps as f64 * self.costs.combine;
        }
        Cost { us, summaries }
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
