//! Segments of a fused prefill, balanced over the compute units. `hip/prefill/plan.h` computes the same on the device, so
//! everything is an integer: host and device must cut alike.
//!
//! A candidate is the chunks of the longest segment. Candidates are chosen so that all items fit into 1 to 8 rounds of
//! workgroups, once counting as if every sequence ended in a segment of its own, once in half a segment. The cost of a
//! candidate is the greatest of
//! - the mean of the workgroups' costs over the compute units;
//! - for each of 4/8, 5/8, .. 8/8 of the candidate: the rounds of the items that are at least as long, times their cost;
//!
//! and the summaries if anything is cut.

use super::Cut;
use crate::abi::dwk_prefill_plan;

/// Candidates, of which the first cuts nothing.
const CANDIDATES: i64 = 16;
const SHARES: std::ops::RangeInclusive<i64> = 4..=8;

/// Device and costs. Costs are in sixteenths of the time of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Balance {
    /// Workgroups of an item.
    pub(crate) workgroups: i32,
    /// Workgroups that run at a time.
    pub(crate) compute_units: i32,
    /// Most segments that another follows.
    pub(crate) most_summaries: i32,
    /// Least chunks of a segment.
    pub(crate) least_chunks: i32,
    /// Cost of an item's start.
    pub(crate) start: i32,
    /// Cost of the chunks that a segment begins early.
    pub(crate) warm_up: i32,
    /// Cost of one more launch.
    pub(crate) summaries: i32,
    /// Sequences are cut below so many sixteenths of the time of whole ones.
    pub(crate) worthwhile: i32,
}

/// Totals of a batch.
struct Totals {
    chunks: i64,
    longest: i64,
    nonempty: i64,
}

impl Balance {
    /// The chunks of the longest segment with the least cost, and the cost.
    pub(crate) fn choose(&self, chunks: &[usize]) -> (usize, i64) {
        let lengths = || chunks.iter().map(|&n| n as i64);
        let totals = Totals {
            chunks: lengths().sum(),
            longest: lengths().max().unwrap_or(0),
            nonempty: lengths().filter(|&n| n > 0).count() as i64,
        };
        let whole = totals.longest.max(1);
        let of_whole = self.cost(chunks, &totals, whole);
        let (mut chosen, mut least) = (whole, of_whole);
        let mut most = of_whole * i64::from(self.worthwhile) / 16;
        for i in 1..CANDIDATES {
            let Some(candidate) = self.candidate(&totals, i) else {
                continue;
            };
            let cost = self.cost(chunks, &totals, candidate);
            if cost < most {
                (chosen, least, most) = (candidate, cost, cost);
            }
        }
        (chosen as usize, least)
    }

    fn candidate(&self, totals: &Totals, i: i64) -> Option<i64> {
        let ends = (totals.nonempty - 1).max(0);
        let slack = if i % 2 == 1 { ends } else { ends / 2 };
        let rounds = (i + 1) / 2;
        let room = i64::from(self.compute_units) * rounds / i64::from(self.workgroups) - slack;
        if room <= 0 || self.most_summaries <= 0 {
            return None;
        }
        let least =
            (ceil(totals.chunks, i64::from(self.most_summaries))).max(i64::from(self.least_chunks));
        let candidate = ceil(totals.chunks, room).max(least);
        (candidate < totals.longest).then_some(candidate)
    }

    fn cost(&self, chunks: &[usize], totals: &Totals, candidate: i64) -> i64 {
        let cut = Cut::AtMost(candidate as usize);
        let (mut items, mut early) = (0, 0);
        let mut at_least = [0; 5];
        for &n in chunks.iter().filter(|&&n| n > 0) {
            let each = cut.segment(n);
            let count = n.div_ceil(each) as i64;
            items += count;
            early += count - 1;
            for (share, of_share) in SHARES.zip(&mut at_least) {
                if 8 * each as i64 >= share * candidate {
                    *of_share += count;
                }
            }
        }
        let (units, workgroups) = (i64::from(self.compute_units), i64::from(self.workgroups));
        let rounds = |work: i64| ceil(work * workgroups, units);
        let (start, warm_up) = (i64::from(self.start), i64::from(self.warm_up));
        let each = start + if early > 0 { warm_up } else { 0 };
        let mut cost = rounds(16 * totals.chunks + start * items + warm_up * early);
        for (share, count) in SHARES.zip(at_least) {
            cost = cost.max(rounds(count) * (2 * share * candidate + each));
        }
        cost + if early > 0 {
            i64::from(self.summaries)
        } else {
            0
        }
    }

    /// Kernel arguments without lists.
    pub(crate) fn lower(&self) -> dwk_prefill_plan {
        dwk_prefill_plan {
            workgroups: self.workgroups,
            compute_units: self.compute_units,
            most_summaries: self.most_summaries,
            least_chunks: self.least_chunks,
            start: self.start,
            warm_up: self.warm_up,
            summaries: self.summaries,
            worthwhile: self.worthwhile,
            ..Default::default()
        }
    }

    /// Most segments that another follows, whatever the lengths of `sequences` sequences in `tokens` tokens.
    pub(crate) fn most_summaries(&self, tokens: usize) -> usize {
        // Less than the chunks over the shortest candidate: a sequence of c chunks has at most (c - 1) / candidate.
        let rounds = i64::from(self.compute_units) * CANDIDATES / 2 / i64::from(self.workgroups);
        let most = rounds.min(i64::from(self.most_summaries)).max(0) as usize;
        most.min(tokens / (super::CHUNK * self.least_chunks.max(1) as usize))
    }
}

fn ceil(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}
