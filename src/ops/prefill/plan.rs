//! Planner of segments: decides which sequences are cut, and where, from the lengths, the heads and the device.
//!
//! A workgroup walks the chunks of a sequence one after the other. If few workgroups have many chunks, most of the
//! device idles. Long sequences are then cut into segments of the same number of chunks, and shorter sequences stay
//! whole. Two more kernels compute the state at the start of each segment.

mod balance;
mod choice;
mod uneven;

use super::{CHUNK, PATH_VARIABLE, PrefillPath, SEGMENTS_VARIABLE};
use crate::abi::{DWK_SHORT_TOKENS, dwk_prefill_item};
use crate::check::Checked;
use crate::error::{ArgumentError, ArgumentKind};
use crate::kernels::{Costs, KernelCost};
pub(crate) use balance::Balance;
pub(crate) use choice::{Choice, WalkTime};
pub(super) use uneven::Uneven;

/// Model of the device for the planner: workgroups of each kernel per unit of its work, compute units, costs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine {
    pub(super) compute_units: usize,
    pub(super) costs: &'static Costs,
    /// Workgroups of `prefill_scan` for a segment: value heads times slabs.
    pub(super) scan: usize,
    /// Workgroups of `prefill_summarise` for a segment that another follows. First segments have as many, though they
    /// need no M.
    pub(super) summarise: usize,
    /// Workgroups of `prefill_combine` for a sequence.
    pub(super) combine: usize,
    /// Bytes of workspace for a segment that another follows.
    pub(super) summary_bytes: usize,
}

/// Numbers of segments (`items`), of segments that another follows (`summaries`), of sequences of more than two
/// segments (`chains`), and of chunks of the longest segment. `short`: sequences that `prefill_short` computes, which are
/// no items; if only the device knows the lengths, all sequences are both, and each kernel picks its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) items: usize,
    pub(super) summaries: usize,
    pub(super) chains: u32,
    pub(super) longest_chunks: u32,
    pub(super) short: usize,
}

impl Counts {
    /// Whether `prefill_short` computes all sequences.
    pub(super) fn only_short(self) -> bool {
        self.items == 0 && self.short > 0
    }
}

/// Division of a batch into segments.
#[derive(Clone, Debug, Default)]
pub(super) struct Partition {
    /// Segments: first those that another follows, sequence by sequence, then the others, the longest first.
    pub(super) items: Vec<dwk_prefill_item>,
    /// Number of segments that are not the last of their sequence. Number i of them has summary i.
    pub(super) summaries: usize,
    /// First summary and number of summaries, for each sequence of more than two segments.
    pub(super) chains: Vec<[i32; 2]>,
    /// Sequences that `prefill_short` computes. They have no items.
    pub(super) short: Vec<i32>,
}

/// Least chunks of a segment that the planner chooses. In shorter segments the start and end of kernels dominate.
const LEAST_CHUNKS: usize = 4;

/// Most bytes for all summaries of a batch that the planner chooses.
pub(super) const MOST_SUMMARY_BYTES: usize = 1 << 30;

/// Most tokens of a sequence that `prefill_short` computes.
pub(super) const SHORT_TOKENS: usize = DWK_SHORT_TOKENS as usize;

/// Words of an item and of a chain.
pub(super) const ITEM_WORDS: usize = size_of::<dwk_prefill_item>() / size_of::<i32>();
pub(super) const CHAIN_WORDS: usize = 2;

impl Partition {
    pub(super) fn counts(&self) -> Counts {
        let longest_chunks = self.items.iter().map(|i| i.chunks as u32).max();
        Counts {
            items: self.items.len(),
            summaries: self.summaries,
            chains: self.chains.len() as u32,
            longest_chunks: longest_chunks.unwrap_or(0),
            short: self.short.len(),
        }
    }

    /// Leaves short sequences to `prefill_short`. They are at most a chunk long, so no segment follows their only one.
    pub(super) fn leave_short(&mut self, cu_seqlens: &[i32]) {
        let tokens = |n: i32| cu_seqlens[n as usize + 1] - cu_seqlens[n as usize];
        let is_short = |n: &i32| tokens(*n) as usize <= SHORT_TOKENS;
        self.items.retain(|item| !is_short(&item.sequence));
        self.short = (0..cu_seqlens.len() as i32 - 1).filter(is_short).collect();
    }

    /// Words of the items.
    pub(super) fn item_words(&self) -> impl Iterator<Item = i32> {
        let words = |i: &dwk_prefill_item| [i.sequence, i.first_chunk, i.chunks, i.summary];
        self.items.iter().flat_map(words)
    }

    /// Words to upload: items, chains, `cu_seqlens`, short sequences.
    pub(super) fn table(&self, cu_seqlens: &[i32]) -> Vec<i32> {
        let mut words = Vec::with_capacity(
            self.items.len() * ITEM_WORDS
                + self.chains.len() * CHAIN_WORDS
                + cu_seqlens.len()
                + self.short.len(),
        );
        words.extend(self.item_words());
        words.extend(self.chains.as_flattened());
        words.extend(cu_seqlens);
        words.extend(&self.short);
        words
    }
}

/// How sequences are cut into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Segments of so many chunks; the last of a sequence may be shorter.
    Chunks(usize),
    /// So many segments of each sequence, or one for each chunk.
    Segments(usize),
    /// Segments of at most so many chunks, of equal length in a sequence; its last may be shorter.
    AtMost(usize),
}

impl Cut {
    /// Chunks of the segments of a sequence, at least 1.
    pub(crate) fn segment(self, chunks: usize) -> usize {
        match self {
            Cut::Chunks(segment) => segment.max(1),
            Cut::Segments(segments) => chunks.div_ceil(segments.max(1)).max(1),
            Cut::AtMost(most) => chunks.div_ceil(chunks.div_ceil(most.max(1)).max(1)).max(1),
        }
    }
}

/// Chunks of each sequence.
pub(super) fn chunks_of(cu_seqlens: &[i32]) -> Vec<usize> {
    let lengths = cu_seqlens.windows(2).map(|c| (c[1] - c[0]) as usize);
    lengths.map(|n| n.div_ceil(CHUNK)).collect()
}

/// Chunks of a segment if the longest sequence has `segments` segments.
pub(super) fn segment_chunks(chunks: &[usize], segments: usize) -> usize {
    let longest_chunks = chunks.iter().copied().max().unwrap_or(0);
    longest_chunks.div_ceil(segments).max(1)
}

/// Number of segments that another follows, in a sequence of `chunks` chunks with `segment` chunks a segment.
fn followed(chunks: usize, segment: usize) -> usize {
    // Avoids the division for the many sequences that are no longer than a segment.
    match chunks > segment {
        true => (chunks - 1) / segment,
        false => 0,
    }
}

/// Counts of the result of [`cut`], without allocation.
pub(super) fn counts(chunks: &[usize], cut: Cut) -> Counts {
    let (mut summaries, mut chains, mut longest_chunks) = (0, 0, 0);
    for &n in chunks {
        let segment = cut.segment(n);
        let followed = followed(n, segment);
        summaries += followed;
        chains += u32::from(followed > 1);
        longest_chunks = longest_chunks.max(n.min(segment));
    }
    Counts {
        items: chunks.len() + summaries,
        summaries,
        chains,
        longest_chunks: longest_chunks as u32,
        short: 0,
    }
}

/// Cuts sequences of `chunks[n]` chunks into segments.
pub(super) fn cut(chunks: &[usize], cut: Cut) -> Partition {
    let counts = counts(chunks, cut);
    let mut out = Partition {
        items: Vec::with_capacity(counts.items),
        summaries: counts.summaries,
        chains: Vec::with_capacity(counts.chains as usize),
        short: Vec::new(),
    };
    let mut last = Vec::with_capacity(chunks.len());
    for (sequence, &n) in chunks.iter().enumerate() {
        let first = out.items.len();
        let segment = cut.segment(n);
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
    // Longest first, otherwise in order. Sorting numbers is faster than sorting items.
    let key = |i: &dwk_prefill_item| u64::from(!(i.chunks as u32)) << 32 | i.sequence as u64;
    let mut order: Vec<u64> = last.iter().map(key).collect();
    order.sort_unstable();
    let ordered = order.iter().map(|&key| last[key as u32 as usize]);
    out.items.extend(ordered);
    out
}

/// Value of [`SEGMENTS_VARIABLE`], if it is set.
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

/// Value of [`PATH_VARIABLE`], if it is set.
pub(super) fn path_of_environment() -> Checked<Option<PrefillPath>> {
    let Some(given) = std::env::var_os(PATH_VARIABLE).filter(|given| !given.is_empty()) else {
        return Ok(None);
    };
    let known = PrefillPath::ALL.iter().find(|path| given == path.name());
    let names = || PrefillPath::ALL.map(PrefillPath::name).join(", ");
    known.copied().map(Some).ok_or_else(|| {
        ArgumentError::new(
            PATH_VARIABLE,
            ArgumentKind::Value,
            format!("`{}`", given.display()),
            format!("it must be one of {}", names()),
        )
    })
}

/// Whether `prefill_short` computes the short sequences of a batch: where many are to be expected, because sequences have
/// at most a chunk on average. A few sequences must be short on average, because a mixed batch takes one more launch. A
/// pure function of what a plan with lengths on the device knows, so that it chooses as a plan with lengths on the host
/// does.
pub(super) fn uses_short(rows: usize, sequences: usize) -> bool {
    /// Sequences from which on the short ones among them are worth a launch.
    const MANY: usize = 16;
    let most = if sequences < MANY {
        SHORT_TOKENS
    } else {
        CHUNK
    };
    sequences > 0 && rows <= most * sequences
}

/// Number of segments of the longest sequence: the least number within `costs.fewer` of the fastest. 1 unless segments
/// are worthwhile and the summaries take at most [`MOST_SUMMARY_BYTES`].
pub(super) fn choose(chunks: &[usize], machine: &Machine) -> usize {
    let longest_chunks = chunks.iter().copied().max().unwrap_or(0);
    let walked_chunks = chunks.iter().sum();
    let costs = machine.costs;
    let whole = Profile::of(chunks.iter().map(|&n| (n, 1)), longest_chunks);
    let worthwhile = costs.worthwhile * machine.scan(chunks.len(), &whole, walked_chunks);
    if machine.at_best(walked_chunks, &[], longest_chunks) > worthwhile {
        return 1;
    }
    // Longest first. Sequences that are no longer than a segment are counted only.
    let mut long: Vec<usize> = chunks
        .iter()
        .copied()
        .filter(|&n| n > LEAST_CHUNKS)
        .collect();
    long.sort_unstable_by(|a, b| b.cmp(a));
    // 2, 3, 4, 6, 8, 12, 16, ..., and the number that fills the device.
    let filling = machine.filling(chunks.len());
    let ladder = (1..).flat_map(|power| [1usize << power, 3 << (power - 1)]);
    let candidates = ladder.scan(1, |before, n| {
        let between = (*before < filling && filling < n).then_some(filling);
        *before = n;
        Some(between.into_iter().chain([n]))
    });
    let candidates = candidates.flatten();
    let mut short = Short::default();
    for &n in chunks.iter().filter(|&&n| n <= LEAST_CHUNKS) {
        short[n] += 1;
    }
    let mut affordable = Vec::new();
    let mut most = worthwhile;
    for segments in candidates.take_while(|s| s * LEAST_CHUNKS <= longest_chunks) {
        let segment = longest_chunks.div_ceil(segments);
        let cut = &long[..long.partition_point(|&n| n > segment)];
        // Even more segments would mean more work, more steps and more memory.
        if machine.at_best(walked_chunks, cut, segment) > most {
            break;
        }
        let cost = machine.cost(&long, &short, walked_chunks, segment);
        if cost.summaries.saturating_mul(machine.summary_bytes) > MOST_SUMMARY_BYTES {
            break;
        }
        affordable.push((segments, cost.us));
        most = most.min(costs.fewer * cost.us);
    }
    let chosen = affordable.into_iter().find(|&(_, us)| us <= most);
    chosen.map_or(1, |(segments, _)| segments)
}

/// Modelled time in microseconds of the kernels after `prefill_prepare`, in segments as [`choose`] chooses them.
pub(super) fn time(chunks: &[usize], machine: &Machine) -> f64 {
    let segment = segment_chunks(chunks, choose(chunks, machine));
    let mut long = chunks.to_vec();
    long.sort_unstable_by(|a, b| b.cmp(a));
    machine
        .cost(&long, &Short::default(), chunks.iter().sum(), segment)
        .us
}

/// Lengths of segments: how many have at least 1/8, 2/8, .. 8/8 of the chunks of the longest. Shorter ones do not count.
struct Profile {
    longest_chunks: usize,
    at_least: [usize; 8],
}

impl Profile {
    /// Of segments by their chunks and numbers.
    fn of(segments: impl Iterator<Item = (usize, usize)>, longest_chunks: usize) -> Profile {
        let mut at_least = [0; 8];
        for (chunks, number) in segments {
            if let Some(share) = (8 * chunks)
                .checked_div(longest_chunks)
                .unwrap_or(0)
                .checked_sub(1)
            {
                at_least[share.min(7)] += number;
            }
        }
        for share in (0..7).rev() {
            at_least[share] += at_least[share + 1];
        }
        Profile {
            longest_chunks,
            at_least,
        }
    }

    /// Of segments that are all equally long.
    fn even(segments: usize, longest_chunks: usize) -> Profile {
        Profile {
            longest_chunks,
            at_least: [segments; 8],
        }
    }
}

/// Steps of prefill_combine for the first, longest sequence of `cut`.
fn steps(cut: &[usize], segment: usize) -> usize {
    cut.first().map_or(0, |&n| followed(n, segment) - 1)
}

/// Numbers of sequences by their chunks, of those that are never cut.
type Short = [usize; LEAST_CHUNKS + 1];

/// Modelled cost of a division into segments.
struct Cost {
    us: f64,
    summaries: usize,
}

impl Machine {
    /// Modelled scan time in microseconds of so many segments. `walked_chunks`: total chunks.
    fn scan(&self, segments: usize, lengths: &Profile, walked_chunks: usize) -> f64 {
        walk(
            &self.costs.scan,
            self.compute_units,
            (segments, self.scan),
            lengths,
            walked_chunks * self.scan,
        )
    }

    /// Number of segments of the longest of so many sequences with which all workgroups of scan run at once and leave no
    /// room for one segment more, if the others are not cut. 0: not asked for.
    fn filling(&self, sequences: usize) -> usize {
        let at_once = self.compute_units * self.costs.scan.residency / self.scan.max(1);
        let filling = (at_once + 1).saturating_sub(sequences);
        if self.costs.fills { filling } else { 0 }
    }

    /// Lower bound of the time of all kernels, as if no compute unit were idle. `walked_chunks`: total chunks. `cut`:
    /// chunks of the sequences that are cut, longest first. The bound never decreases with shorter segments.
    fn at_best(&self, walked_chunks: usize, cut: &[usize], segment: usize) -> f64 {
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
        // At least all chunks except one segment of each sequence.
        let summarised = cut.iter().sum::<usize>() - cut.len() * segment;
        launch
            + work(scan, walked_chunks * self.scan)
            + self.costs.summarised * work(summarise, summarised * self.summarise)
            + steps(cut, segment) as f64 * combine
    }

    /// Modelled time of scan and, if sequences are cut, summarise and combine. `long`: chunks of sequences, longest first.
    /// `short`: the others. `walked_chunks`: total chunks. `segment`: chunks of the longest segment.
    fn cost(&self, long: &[usize], short: &Short, walked_chunks: usize, segment: usize) -> Cost {
        let (cut, whole) = long.split_at(long.partition_point(|&n| n > segment));
        let (mut summaries, mut chained) = (0, 0);
        for &n in cut {
            let followed = followed(n, segment);
            summaries += followed;
            chained += usize::from(followed > 1);
        }
        let lasts = cut.iter().map(|&n| (n - followed(n, segment) * segment, 1));
        let whole = whole.iter().map(|&n| (n, 1));
        let whole = whole.chain(short.iter().copied().enumerate());
        let lengths = Profile::of(whole.chain(lasts).chain([(segment, summaries)]), segment);
        let segments = long.len() + short.iter().sum::<usize>() + summaries;
        let mut us = self.scan(segments, &lengths, walked_chunks);
        if summaries > 0 {
            us += self.costs.launch;
            let walked = walk(
                &self.costs.summarise,
                self.compute_units,
                (summaries, self.summarise),
                &Profile::even(summaries, segment),
                summaries * self.summarise * segment,
            );
            us += self.costs.summarised * walked;
        }
        if chained > 0 {
            let rounds = (chained * self.combine).div_ceil(self.compute_units);
            let steps = steps(cut, segment) * rounds;
            us += self.costs.launch + steps as f64 * self.costs.combine;
        }
        Cost { us, summaries }
    }
}

/// Whether wide workgroups are faster than narrow ones, each with a compute unit to itself. `narrow`, `wide`:
/// workgroups of a segment. `longest_chunks`: chunks of the longest segment. `walked_chunks`: total chunks.
pub(super) fn two_in_one(
    cost: &KernelCost,
    compute_units: usize,
    segments: usize,
    [narrow, wide]: [usize; 2],
    longest_chunks: usize,
    walked_chunks: usize,
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
            (segments, each),
            &Profile::even(segments, longest_chunks),
            walked_chunks * each,
        )
    };
    us(cost.chunk_shared, wide) < us(cost.chunk, narrow)
}

/// Modelled time in microseconds of `each` workgroups of every one of so many segments. `walked_chunks`: total chunks of
/// all workgroups. Up to `residency` workgroups share a compute unit; the rest wait for further rounds. The longest segment
/// has its compute unit for itself when the others have ended.
fn walk(
    cost: &KernelCost,
    compute_units: usize,
    (segments, each): (usize, usize),
    lengths: &Profile,
    walked_chunks: usize,
) -> f64 {
    let each_more =
        (cost.chunk_shared - cost.chunk) / cost.residency.saturating_sub(1).max(1) as f64;
    let chunk = |workgroups: usize| {
        let sharing = workgroups.div_ceil(compute_units).clamp(1, cost.residency);
        cost.chunk + (sharing - 1) as f64 * each_more
    };
    let workgroups = segments * each;
    let at_once = compute_units * cost.residency;
    let (rounds, rest) = (workgroups / at_once, workgroups % at_once);
    let mut a_round_each = rounds as f64 * chunk(at_once);
    if rest > 0 {
        a_round_each += chunk(rest);
    }
    let mean = walked_chunks as f64 / workgroups.max(1) as f64;
    let eighths = lengths.at_least.map(|n| chunk(n * each));
    let longest = eighths.iter().sum::<f64>() / 8.0 * lengths.longest_chunks as f64;
    (a_round_each * mean).max(longest)
}

#[cfg(test)]
mod tests;
