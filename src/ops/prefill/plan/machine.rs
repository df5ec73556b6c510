//! Segments of a prefill of several kernels: `prefill_scan` walks them after `prefill_summarise` and `prefill_combine`.
//! `hip/prefill/machine.h` computes the same on the device, so everything is an integer: host and device must cut alike.
//!
//! A candidate is a number of segments of the longest sequence: 2, 3, 4, 6, 8, 12, .. 192, and the number that fills the
//! device. Its segments have the chunks of the longest sequence over that number, and shorter sequences stay whole. Its
//! cost is the modelled time of all kernels. Of the candidates within `fewer` of the fastest, the one with the fewest
//! segments is chosen.

use super::{CHUNK, followed};
use crate::abi::{dwk_kernel_time, dwk_prefill_machine};
use crate::kernels::{Costs, KernelCost};

/// Least chunks of a segment that the planner chooses. In shorter segments the start and end of kernels dominate.
pub(super) const LEAST_CHUNKS: usize = 4;

/// Powers of two among the candidates, each with 3/2 of it: 2, 3, 4, 6, .. 192.
const POWERS: usize = 7;

/// Denominator of fractions: [`Machine::summarised`], [`Machine::worthwhile`] and [`Machine::fewer`].
const ONE: i64 = 1024;

/// Modelled time of a kernel that walks chunks, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KernelTime {
    /// Workgroups of a segment.
    pub(crate) workgroups: i32,
    /// Time of a chunk, with one workgroup on a compute unit.
    pub(crate) chunk: i32,
    /// The same for each further workgroup on the compute unit.
    pub(crate) each_more: i32,
    /// Most workgroups on a compute unit.
    pub(crate) residency: i32,
}

/// Model of the device for the planner: workgroups of each kernel, compute units, costs. Times are in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Machine {
    pub(crate) compute_units: i32,
    pub(crate) scan: KernelTime,
    /// First segments have as many workgroups, though they need no M.
    pub(crate) summarise: KernelTime,
    /// Workgroups of `prefill_combine` for a sequence.
    pub(crate) combine_workgroups: i32,
    /// Time of `prefill_combine` for a segment.
    pub(crate) combine: i32,
    /// Time of the launch of one more kernel.
    pub(crate) launch: i32,
    /// Time of the launch of `prefill_combine`.
    pub(crate) combine_launch: i32,
    /// Time of the start of `prefill_scan`, if workgroups share compute units. A further round takes eight times as long.
    pub(crate) shared_start: i32,
    /// Share of the chunks that `prefill_summarise` is expected to walk, in parts of [`ONE`].
    pub(crate) summarised: i32,
    /// Sequences are cut at most at this share of the time of whole ones, in parts of [`ONE`].
    pub(crate) worthwhile: i32,
    /// Fewer segments may take this much of the least time, in parts of [`ONE`].
    pub(crate) fewer: i32,
    /// Whether the number of segments that fills the device is a candidate.
    pub(crate) fills: bool,
    /// Most segments that another follows.
    pub(crate) most_summaries: i32,
}

fn parts(share: f64) -> i32 {
    (share * ONE as f64).round() as i32
}

fn ns(us: f64) -> i32 {
    (1e3 * us).round() as i32
}

impl KernelTime {
    pub(super) fn new(cost: &KernelCost, workgroups: usize) -> KernelTime {
        let shared = ns(cost.chunk_shared) - ns(cost.chunk);
        KernelTime {
            workgroups: workgroups as i32,
            chunk: ns(cost.chunk),
            each_more: shared / (cost.residency as i32 - 1).max(1),
            residency: cost.residency as i32,
        }
    }

    /// Time of a chunk with so many workgroups, of which each compute unit has its share.
    fn chunk(&self, workgroups: i64, compute_units: i64) -> i64 {
        let more = (1..i64::from(self.residency)).filter(|n| workgroups > n * compute_units);
        i64::from(self.chunk) + more.count() as i64 * i64::from(self.each_more)
    }

    /// Time of a chunk of each workgroup, where the workgroups of so many segments take turns.
    fn rounds(&self, segments: usize, compute_units: i64) -> i64 {
        let workgroups = segments as i64 * i64::from(self.workgroups);
        let at_once = compute_units * i64::from(self.residency);
        let (rounds, rest) = (workgroups / at_once, workgroups % at_once);
        let of_rest = if rest > 0 {
            self.chunk(rest, compute_units)
        } else {
            0
        };
        rounds * self.chunk(at_once, compute_units) + of_rest
    }

    /// Modelled time of so many segments. `walked_chunks`: of all. Up to `residency` workgroups share a compute unit; the
    /// rest wait for further rounds. The longest segment has its compute unit for itself when the others have ended.
    pub(super) fn walk(
        &self,
        compute_units: i64,
        segments: usize,
        lengths: &Profile,
        walked_chunks: usize,
    ) -> i64 {
        let each = i64::from(self.workgroups);
        let mean = (walked_chunks * CHUNK).div_ceil(segments.max(1)) as i64;
        let eighths = (lengths.at_least).map(|n| self.chunk(n as i64 * each, compute_units));
        let longest = eighths.iter().sum::<i64>() * lengths.longest_chunks as i64 / 8;
        let turns = self.rounds(segments, compute_units).saturating_mul(mean);
        longest.max(turns / CHUNK as i64)
    }

    /// Lower bound of the time of so many chunks, as if no compute unit were idle.
    fn at_best(&self, compute_units: i64, chunks: usize) -> i64 {
        let shares = i64::from(self.residency);
        let together = i64::from(self.chunk) + (shares - 1) * i64::from(self.each_more);
        let chunk = (i64::from(self.chunk) * shares).min(together);
        let work = (chunks as i64 * i64::from(self.workgroups)).saturating_mul(chunk);
        work / (shares * compute_units)
    }
}

/// Lengths of segments: how many have at least 1/8, 2/8, .. 8/8 of the chunks of the longest. Shorter ones do not count.
pub(super) struct Profile {
    longest_chunks: usize,
    at_least: [usize; 8],
}

impl Profile {
    /// Of segments by their chunks and numbers.
    pub(super) fn of(
        segments: impl Iterator<Item = (usize, usize)>,
        longest_chunks: usize,
    ) -> Profile {
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

/// Numbers of sequences by their chunks, of those that are never cut.
pub(super) type Short = [usize; LEAST_CHUNKS + 1];

/// Modelled cost of a division into segments.
pub(super) struct Cost {
    pub(super) ns: i64,
    pub(super) summaries: usize,
}

/// Steps of `prefill_combine` for the first, longest sequence of `cut`.
fn steps(cut: &[usize], segment: usize) -> usize {
    cut.first().map_or(0, |&n| followed(n, segment) - 1)
}

impl Machine {
    /// `scan`, `summarise`: workgroups of a segment. `combine`: workgroups of a sequence.
    pub(crate) fn new(
        compute_units: usize,
        costs: &Costs,
        [scan, summarise, combine]: [usize; 3],
        most_summaries: usize,
    ) -> Machine {
        Machine {
            compute_units: compute_units.min(1 << 24) as i32,
            scan: KernelTime::new(&costs.scan, scan),
            summarise: KernelTime::new(&costs.summarise, summarise),
            combine_workgroups: combine as i32,
            combine: ns(costs.combine),
            launch: ns(costs.launch),
            combine_launch: ns(costs.combine_launch),
            shared_start: ns(costs.shared_start),
            summarised: parts(costs.summarised),
            worthwhile: parts(costs.worthwhile),
            fewer: parts(costs.fewer),
            fills: costs.fills,
            most_summaries: most_summaries.min(i32::MAX as usize) as i32,
        }
    }

    /// With few enough summaries for lists that the device makes, whatever the lengths of so many sequences in so many
    /// chunks: those of two rounds of the device. None if it does not pay to cut one sequence of all chunks.
    pub(crate) fn bounded(self, chunks: usize, sequences: usize) -> Machine {
        /// Most workgroups of a grid.
        const GRID: i32 = (1 << 23) - 1;
        let each = i64::from(self.scan.workgroups.max(1));
        let two_rounds = 2 * self.units() * i64::from(self.scan.residency);
        let most = (two_rounds + each - 1) / each;
        let of_grid = |workgroups: i32| (GRID / workgroups.max(1)) as usize;
        let most = [
            most as usize,
            chunks / LEAST_CHUNKS,
            of_grid(self.scan.workgroups).saturating_sub(sequences),
            of_grid(self.summarise.workgroups),
            of_grid(self.combine_workgroups),
        ]
        .into_iter()
        .fold(self.most_summaries.max(0) as usize, usize::min);
        Machine {
            most_summaries: if self.choose(&[chunks]) > 1 {
                most as i32
            } else {
                0
            },
            ..self
        }
    }

    /// Kernel arguments.
    pub(crate) fn lower(&self) -> dwk_prefill_machine {
        let time = |kernel: &KernelTime| dwk_kernel_time {
            workgroups: kernel.workgroups,
            chunk: kernel.chunk,
            each_more: kernel.each_more,
            residency: kernel.residency,
        };
        dwk_prefill_machine {
            scan: time(&self.scan),
            summarise: time(&self.summarise),
            compute_units: self.compute_units,
            combine_workgroups: self.combine_workgroups,
            combine: self.combine,
            launch: self.launch,
            combine_launch: self.combine_launch,
            shared_start: self.shared_start,
            summarised: self.summarised,
            worthwhile: self.worthwhile,
            fewer: self.fewer,
            filling: self.filling(0).min(i32::MAX as usize) as i32,
            most_summaries: self.most_summaries,
            halves: 0,
        }
    }

    fn units(&self) -> i64 {
        i64::from(self.compute_units)
    }

    /// Number of segments of the longest sequence: the least number within `fewer` of the fastest. 1 unless segments
    /// are worthwhile and few enough.
    pub(crate) fn choose(&self, chunks: &[usize]) -> usize {
        let longest_chunks = chunks.iter().copied().max().unwrap_or(0);
        let walked_chunks = chunks.iter().sum();
        let whole = Profile::of(chunks.iter().map(|&n| (n, 1)), longest_chunks);
        let of_whole = self.scan(chunks.len(), &whole, walked_chunks);
        let worthwhile = of_whole.saturating_mul(i64::from(self.worthwhile));
        let above = |ns: i64, most| ns.saturating_mul(ONE) > most;
        if above(self.at_best(walked_chunks, &[], longest_chunks), worthwhile) {
            return 1;
        }
        // Longest first. Sequences that are no longer than a segment are counted only.
        let mut long: Vec<usize> = (chunks.iter().copied())
            .filter(|&n| n > LEAST_CHUNKS)
            .collect();
        long.sort_unstable_by(|a, b| b.cmp(a));
        let mut short = Short::default();
        for &n in chunks.iter().filter(|&&n| n <= LEAST_CHUNKS) {
            short[n] += 1;
        }
        let mut affordable = Vec::new();
        let mut most = worthwhile;
        for segments in self.candidates(chunks.len(), longest_chunks) {
            let segment = longest_chunks.div_ceil(segments);
            let cut = &long[..long.partition_point(|&n| n > segment)];
            // Even more segments would mean more work, more steps and more memory.
            if above(self.at_best(walked_chunks, cut, segment), most) {
                break;
            }
            let cost = self.cost(&long, &short, walked_chunks, segment);
            if cost.summaries > self.most_summaries.max(0) as usize {
                break;
            }
            affordable.push((segments, cost.ns));
            most = most.min(cost.ns.saturating_mul(i64::from(self.fewer)));
        }
        let chosen = (affordable.into_iter()).find(|&(_, ns)| !above(ns, most));
        chosen.map_or(1, |(segments, _)| segments)
    }

    /// Summaries of each segment of one sequence of so many chunks that another follows: two if a segment has at least
    /// `per_segment` chunks for each segment, and `per_round` for each round of workgroups of `prefill_summarise`.
    pub(crate) fn pieces(&self, chunks: usize, [per_segment, per_round]: [f64; 2]) -> usize {
        let segments = self.choose(&[chunks]);
        // Two segments need no combining, if a summary is in one piece.
        if segments < 3 {
            return 1;
        }
        // Workgroups of one piece count as narrow; those of two pieces are wide, so half as many each.
        let workgroups = (segments - 1) as f64 * f64::from(self.summarise.workgroups);
        let rounds = workgroups / f64::from(self.compute_units);
        let least = per_segment * segments as f64 + per_round * rounds;
        match chunks.div_ceil(segments) as f64 >= least {
            true => 2,
            false => 1,
        }
    }

    /// Numbers of segments of the longest of so many sequences that are tried, in ascending order.
    pub(super) fn candidates(
        &self,
        sequences: usize,
        longest_chunks: usize,
    ) -> impl Iterator<Item = usize> {
        let ladder = (1..=POWERS).flat_map(|power| [1usize << power, 3 << (power - 1)]);
        let mut candidates: Vec<usize> = ladder.chain([self.filling(sequences)]).collect();
        candidates.sort_unstable();
        let most = longest_chunks / LEAST_CHUNKS;
        candidates.into_iter().filter(move |&n| 1 < n && n <= most)
    }

    /// Chunks of the longest segment as [`Machine::choose`] chooses them, and the modelled time of the kernels after
    /// `prefill_prepare`.
    pub(crate) fn planned(&self, chunks: &[usize]) -> (usize, i64) {
        let segment = super::segment_chunks(chunks, self.choose(chunks));
        let mut long = chunks.to_vec();
        long.sort_unstable_by(|a, b| b.cmp(a));
        let cost = self.cost(&long, &Short::default(), chunks.iter().sum(), segment);
        (segment, cost.ns)
    }

    /// Modelled scan time of so many segments. `walked_chunks`: total chunks.
    pub(super) fn scan(&self, segments: usize, lengths: &Profile, walked_chunks: usize) -> i64 {
        let workgroups = segments as i64 * i64::from(self.scan.workgroups);
        let at_once = self.units() * i64::from(self.scan.residency);
        let rounds = (workgroups + at_once - 1) / at_once;
        // Measured on an H200: a further round takes 20 us more than its chunks.
        let starts = match workgroups > self.units() {
            true => 8 * rounds - 7,
            false => 0,
        };
        (self.scan).walk(self.units(), segments, lengths, walked_chunks)
            + starts * i64::from(self.shared_start)
    }

    /// Number of segments of the longest of so many sequences with which all workgroups of scan run at once and leave no
    /// room for one segment more, if the others are not cut. 0: not asked for.
    pub(super) fn filling(&self, sequences: usize) -> usize {
        let at_once = self.units() * i64::from(self.scan.residency);
        let at_once = at_once / i64::from(self.scan.workgroups.max(1));
        let filling = (at_once as usize + 1).saturating_sub(sequences);
        if self.fills { filling } else { 0 }
    }

    /// Lower bound of the time of all kernels, as if no compute unit were idle. `walked_chunks`: total chunks. `cut`:
    /// chunks of the sequences that are cut, longest first. The bound never decreases with shorter segments.
    fn at_best(&self, walked_chunks: usize, cut: &[usize], segment: usize) -> i64 {
        // At least all chunks except one segment of each sequence.
        let summarised = cut.iter().sum::<usize>() - cut.len() * segment;
        let summaries = self.summarise.at_best(self.units(), summarised);
        i64::from(self.launch)
            + self.scan.at_best(self.units(), walked_chunks)
            + i64::from(self.summarised) * summaries / ONE
            + steps(cut, segment) as i64 * i64::from(self.combine)
    }

    /// Modelled time of scan and, if sequences are cut, summarise and combine. `long`: chunks of sequences, longest first.
    /// `short`: the others. `walked_chunks`: total chunks. `segment`: chunks of the longest segment.
    pub(super) fn cost(
        &self,
        long: &[usize],
        short: &Short,
        walked_chunks: usize,
        segment: usize,
    ) -> Cost {
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
        let mut ns = self.scan(segments, &lengths, walked_chunks);
        if summaries > 0 {
            // All are equally long.
            let walked = self.summarise.rounds(summaries, self.units()) * segment as i64;
            ns += i64::from(self.launch) + i64::from(self.summarised) * walked / ONE;
        }
        if chained > 0 {
            let workgroups = chained as i64 * i64::from(self.combine_workgroups);
            let rounds = (workgroups + self.units() - 1) / self.units();
            ns += i64::from(self.combine_launch)
                + steps(cut, segment) as i64 * rounds * i64::from(self.combine);
        }
        Cost { ns, summaries }
    }
}

/// Whether wide workgroups are faster than narrow ones, each with a compute unit to itself. `narrow`, `wide`:
/// workgroups of a segment. `longest_chunks`: chunks of the longest segment. `walked_chunks`: total chunks.
pub(crate) fn two_in_one(
    cost: &KernelCost,
    compute_units: usize,
    segments: usize,
    [narrow, wide]: [usize; 2],
    longest_chunks: usize,
    walked_chunks: usize,
) -> bool {
    let time = |chunk, workgroups: usize| {
        let alone = KernelTime {
            workgroups: workgroups as i32,
            chunk: ns(chunk),
            each_more: 0,
            residency: 1,
        };
        let lengths = Profile::even(segments, longest_chunks);
        alone.walk(compute_units as i64, segments, &lengths, walked_chunks)
    };
    time(cost.chunk_shared, wide) < time(cost.chunk, narrow)
}
