//! Segments of different lengths, for walks that start early and need no summaries. Compute units take them in order,
//! longest first, so that all end at about the same time. `hip/prefill/uneven.h` computes the same on the device, so
//! everything is an integer: host and device must cut alike.
//!
//! Two ways to cut are tried ([`Candidate`]):
//! - long segments, and the rests of sequences in shorter ones. Equal segments fill the device only where their number
//!   divides by that of the compute units: 512 chunks of 64 value heads have 4.75 of the 304 compute units of an MI300X for
//!   each head;
//! - as many of the longest sequences whole as the device runs in some number of rounds, and the others in short segments.
//!
//! The cost of a candidate counts its long segments as if all were as long as the longest, and its short ones likewise
//! ([`Tally`]).

use crate::abi::dwk_prefill_item;

/// Device and costs. Costs are in sixteenths of the time of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Uneven {
    /// Workgroups of an item.
    pub(crate) workgroups: i32,
    /// Workgroups that run at a time.
    pub(crate) compute_units: i32,
    /// About the least chunks of a segment.
    pub(crate) least_chunks: i32,
    /// Cost of an item's start.
    pub(crate) start: i32,
    /// Cost of the chunks that a segment begins early.
    pub(crate) warm_up: i32,
}

/// Numbers of parts of a long segment that make a short one.
const PARTS: [i64; 5] = [1, 2, 3, 4, 8];
/// Candidates with long and short segments. Each number of parts has lengths that differ by a sixty-fourth of the first.
const WITH_RESTS: i64 = 96;
/// Candidates: each further round of whole sequences has four lengths of short segments.
const CANDIDATES: i64 = 128;
const SHORTS: i64 = 4;
/// More chunks are not cut.
const MOST_CHUNKS: i64 = 1 << 22;
/// No cost is greater.
const MOST_COST: i64 = 1 << 30;

/// A way to cut: the `whole` longest sequences not at all, the others into segments of about `long` chunks, and what is left
/// of each into segments of about `short`. 0: it lengthens the long ones.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    whole: i64,
    long: i64,
    short: i64,
}

/// Segments of a sequence: `longs` of the same length but for a chunk, then `shorts` likewise. No longs: it is whole.
#[derive(Clone, Copy, Debug)]
struct Pieces {
    chunks: i64,
    /// Chunks of all short ones.
    rest: i64,
    longs: i64,
    shorts: i64,
}

fn up(a: i64, b: i64) -> i64 {
    (a + b - 1) / b
}

impl Candidate {
    fn pieces(&self, chunks: i64, rank: i64) -> Pieces {
        let whole = Pieces {
            chunks,
            rest: 0,
            longs: 0,
            shorts: 0,
        };
        if rank < self.whole {
            return whole;
        }
        let (longs, rest) = (chunks / self.long, chunks % self.long);
        let shorts = match self.short {
            0 => 0,
            short => rest / short + i64::from(rest % short > short / 2),
        };
        match (longs, shorts) {
            (0, _) => whole,
            (_, 0) => Pieces { longs, ..whole },
            _ => Pieces {
                rest,
                longs,
                shorts,
                ..whole
            },
        }
    }
}

impl Pieces {
    fn count(&self) -> i64 {
        (self.longs + self.shorts).max(1)
    }

    /// First chunk and chunks of a segment.
    fn segment(&self, index: i64) -> [i64; 2] {
        let of_longs = self.chunks - self.rest;
        // Of `parts` lengths of the sum `sum` that differ by at most one, the longer ones last.
        let even = |sum: i64, parts: i64, i: i64| {
            let (each, longer) = (sum / parts, sum % parts);
            let before = parts - longer;
            [
                i * each + (i - before).max(0),
                each + i64::from(i >= before),
            ]
        };
        if index < self.longs.max(1) {
            return even(of_longs, self.longs.max(1), index);
        }
        let [first, chunks] = even(self.rest, self.shorts, index - self.longs);
        [of_longs + first, chunks]
    }
}

/// Segments of a candidate: numbers, and costs of the longest long one and of the longest short one.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    items: i64,
    longs: i64,
    long: i64,
    shorts: i64,
    short: i64,
    /// Cost of all sequences that are too short for a cut, and of the longest.
    small: i64,
    longest_small: i64,
}

/// Division of a batch: items, longest first, and their cost.
#[derive(Clone, Debug)]
pub(crate) struct Segments {
    pub(crate) items: Vec<dwk_prefill_item>,
    pub(crate) cost: i64,
}

impl Uneven {
    /// Most sequences of a batch that is cut: lanes of the device have them all.
    pub(crate) const MOST_SEQUENCES: usize = 32;

    /// Most items, beside one for each sequence: of two rounds of the device.
    pub(crate) fn room(&self) -> usize {
        (2 * i64::from(self.compute_units) / i64::from(self.workgroups)) as usize
    }

    /// Items, longest first, and their cost. `None` if no sequence is cut. The last item of a sequence that is cut has
    /// one more than the number of such sequences before it as its summary: its final state may have to wait there.
    pub(crate) fn cut(&self, chunks: &[usize]) -> Option<Segments> {
        let chunks: Vec<i64> = chunks.iter().map(|&n| n as i64).collect();
        if chunks.len() > Self::MOST_SEQUENCES || chunks.iter().sum::<i64>() > MOST_CHUNKS {
            return None;
        }
        let ranks = ranks(&chunks);
        let candidates = (0..CANDIDATES).filter_map(|i| self.candidate(&chunks, i));
        let (cost, candidate) = candidates
            .filter_map(|candidate| Some((self.cost(&chunks, &ranks, candidate)?, candidate)))
            .min_by_key(|(cost, _)| *cost)?;
        Some(Segments {
            items: items(&chunks, &ranks, candidate),
            cost,
        })
    }

    /// Candidate of a number, if there is one.
    fn candidate(&self, chunks: &[i64], index: i64) -> Option<Candidate> {
        let all: i64 = chunks.iter().sum();
        let longest = chunks.iter().copied().max().unwrap_or(0);
        let least = i64::from(self.least_chunks);
        if index < WITH_RESTS {
            let first = up(all * i64::from(self.workgroups), self.compute_units.into()).max(least);
            let parts = PARTS.len() as i64;
            let long = first + index / parts * first / 64;
            let short = (long / PARTS[(index % parts) as usize]).max(least);
            let candidate = Candidate {
                whole: 0,
                long,
                short,
            };
            return Some(candidate).filter(|_| long < longest);
        }
        let (round, multiple) = (
            (index - WITH_RESTS) / SHORTS,
            (index - WITH_RESTS) % SHORTS + 1,
        );
        let candidate = Candidate {
            whole: round * i64::from(self.compute_units) / i64::from(self.workgroups),
            long: multiple * least,
            short: 0,
        };
        Some(candidate).filter(|candidate| candidate.whole < chunks.len() as i64)
    }

    /// Cost of a candidate, if it cuts a sequence and has few enough items.
    fn cost(&self, chunks: &[i64], ranks: &[i64], candidate: Candidate) -> Option<i64> {
        let cost = |chunks: i64| 16 * chunks + i64::from(self.start);
        let early = |chunks: i64| cost(chunks) + i64::from(self.warm_up);
        let mut all = Tally::default();
        for (&n, &rank) in chunks.iter().zip(ranks) {
            let pieces = candidate.pieces(n, rank);
            all.items += pieces.count();
            if rank < candidate.whole {
                all.longs += 1;
                all.long = all.long.max(cost(n));
            } else if pieces.longs == 0 {
                all.small += cost(n);
                all.longest_small = all.longest_small.max(cost(n));
            } else {
                let each = up(n - pieces.rest, pieces.longs);
                let each = match pieces.longs {
                    1 => cost(each),
                    _ => early(each),
                };
                if candidate.whole > 0 {
                    all.shorts += pieces.longs;
                    all.short = all.short.max(each);
                } else {
                    all.longs += pieces.longs;
                    all.long = all.long.max(each);
                }
            }
            if pieces.shorts > 0 {
                all.shorts += pieces.shorts;
                all.short = all.short.max(early(up(pieces.rest, pieces.shorts)));
            }
        }
        let most = chunks.len() + self.room();
        (all.items > chunks.len() as i64 && all.items <= most as i64).then(|| self.time(all))
    }

    /// Time after which all compute units have ended: first they walk the long segments, then the short ones.
    fn time(&self, all: Tally) -> i64 {
        let (units, workgroups) = (i64::from(self.compute_units), i64::from(self.workgroups));
        let short = all.short.max(all.longest_small).max(1);
        let shorts = (all.shorts + up(all.small, short)) * workgroups;
        let (rounds, busy) = (
            all.longs * workgroups / units,
            all.longs * workgroups % units,
        );
        let (begin, end) = (rounds * all.long, (rounds + 1) * all.long);
        // Compute units without a long segment in the last round begin short ones before the others.
        let (fit, idle) = match busy {
            0 => (0, units),
            _ => (all.long / short, units - busy),
        };
        let left = shorts - fit * idle;
        let time = if busy > 0 && left <= 0 {
            end
        } else if busy == 0 {
            begin + up(shorts, units) * short
        } else {
            let (full, rest) = (left / units, left % units);
            let others = match full + i64::from(rest > idle) {
                0 => end,
                more => end + more * short,
            };
            let first = begin + (fit + full + i64::from(rest > 0)) * short;
            others.max(first)
        };
        time.min(MOST_COST)
    }
}

/// Place of each sequence, longest first, otherwise in order.
fn ranks(chunks: &[i64]) -> Vec<i64> {
    let before = |i: usize| {
        let n = chunks[i];
        let longer = |&(j, &m): &(usize, &i64)| m > n || (m == n && j < i);
        chunks.iter().enumerate().filter(longer).count() as i64
    };
    (0..chunks.len()).map(before).collect()
}

/// Items of a candidate, longest first.
fn items(chunks: &[i64], ranks: &[i64], candidate: Candidate) -> Vec<dwk_prefill_item> {
    let mut items = Vec::new();
    let mut cut = 0;
    for (sequence, (&n, &rank)) in chunks.iter().zip(ranks).enumerate() {
        let pieces = candidate.pieces(n, rank);
        let count = pieces.count();
        cut += i32::from(count > 1);
        for i in 0..count {
            let [first_chunk, chunks] = pieces.segment(i);
            items.push(dwk_prefill_item {
                sequence: sequence as i32,
                first_chunk: first_chunk as i32,
                chunks: chunks as i32,
                summary: if count > 1 && i + 1 == count { cut } else { 0 },
            });
        }
    }
    items.sort_by_key(|item| std::cmp::Reverse(item.chunks));
    items
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn on_an_mi300x(heads: i32) -> Uneven {
        Uneven {
            workgroups: heads,
            compute_units: 304,
            least_chunks: 8,
            start: 53,
            warm_up: 20,
        }
    }

    /// Time after which all compute units have ended, each taking the next item when it is free.
    fn simulated(device: &Uneven, items: &[dwk_prefill_item]) -> i64 {
        let mut free = BTreeMap::new();
        free.insert(0, i64::from(device.compute_units));
        for item in items {
            let early = if item.first_chunk > 0 {
                device.warm_up
            } else {
                0
            };
            let cost = i64::from(16 * item.chunks + device.start + early);
            let mut left = i64::from(device.workgroups);
            while left > 0 {
                let (at, units) = free.pop_first().expect("a compute unit");
                let taken = units.min(left);
                *free.entry(at + cost).or_default() += taken;
                if taken < units {
                    free.insert(at, units - taken);
                }
                left -= taken;
            }
        }
        *free.last_key_value().expect("a compute unit").0
    }

    /// The least simulated time of all candidates.
    fn best(device: &Uneven, chunks: &[usize]) -> Option<i64> {
        let chunks: Vec<i64> = chunks.iter().map(|&n| n as i64).collect();
        let ranks = ranks(&chunks);
        (0..CANDIDATES)
            .filter_map(|i| device.candidate(&chunks, i))
            .filter(|candidate| device.cost(&chunks, &ranks, *candidate).is_some())
            .map(|candidate| simulated(device, &items(&chunks, &ranks, candidate)))
            .min()
    }

    /// Items if no sequence is cut.
    fn whole(chunks: &[usize]) -> Vec<dwk_prefill_item> {
        let chunks: Vec<i64> = chunks.iter().map(|&n| n as i64).collect();
        let candidate = Candidate {
            whole: chunks.len() as i64,
            long: 1,
            short: 0,
        };
        items(&chunks, &ranks(&chunks), candidate)
    }

    /// Chunks of the items.
    fn lengths(items: &[dwk_prefill_item]) -> Vec<i32> {
        items.iter().map(|item| item.chunks).collect()
    }

    #[test]
    fn long_segments_and_rests_fill_the_device() {
        let found = on_an_mi300x(64).cut(&[512]).expect("a cut");
        assert_eq!(lengths(&found.items), [111, 111, 111, 111, 23, 23, 22]);
        // 4.75 compute units a head cannot take less than 512 / 4.75 chunks and one start.
        assert!(
            found.cost < 16 * 122 && found.cost > 16 * 108 + 67,
            "{found:?}"
        );
        let found = on_an_mi300x(32).cut(&[512]).expect("a cut");
        assert_eq!(lengths(&found.items), [vec![55; 9], vec![17]].concat());
    }

    /// 10 sequences of 32 value heads have 320 walks of 64 chunks for 304 compute units: nine stay whole.
    #[test]
    fn whole_sequences_of_a_round_and_short_segments_of_the_others() {
        let device = on_an_mi300x(32);
        let found = device.cut(&[64; 10]).expect("a cut");
        let whole = lengths(&found.items).iter().filter(|n| **n == 64).count();
        assert_eq!(whole, 9, "{found:?}");
        // One round, its start, and what is left of a tenth sequence.
        assert!(found.cost < 16 * 64 + 53 + 16 * 20, "{found:?}");
        // Two rounds, and one sequence in short segments.
        let found = device.cut(&[64; 20]).expect("a cut");
        let whole = lengths(&found.items).iter().filter(|n| **n == 64).count();
        assert_eq!(whole, 19, "{found:?}");
    }

    #[test]
    fn what_is_not_cut() {
        let device = on_an_mi300x(32);
        // Full rounds: a cut would take longer.
        for (lengths, rounds) in [(vec![512; 9], 1), (vec![64; 9], 1), (vec![64; 19], 2)] {
            let whole = rounds * i64::from(16 * lengths[0] as i32 + device.start);
            let found = device.cut(&lengths);
            assert!(found.is_none_or(|found| 100 * found.cost > 95 * whole));
        }
        assert!(device.cut(&[]).is_none());
        assert!(on_an_mi300x(1).cut(&[9; 33]).is_none());
        assert!(on_an_mi300x(1).cut(&[1 << 25]).is_none());
        // More workgroups than two rounds have.
        assert!(on_an_mi300x(700).cut(&[4096]).is_none());
        let mut huge = on_an_mi300x(1);
        huge.compute_units = 1 << 24;
        assert!(huge.cut(&[1 << 22]).is_some());
    }

    proptest! {
        /// Every chunk is in one item, in order, and the last item of each sequence that is cut has a number of its own.
        #[test]
        fn items_cover_their_sequences(
            chunks in vec(prop_oneof![0usize..40, 0usize..2000], 1..33), heads in 1i32..80,
        ) {
            let device = on_an_mi300x(heads);
            let Some(Segments { mut items, .. }) = device.cut(&chunks) else {
                return Ok(());
            };
            prop_assert!(items.len() <= chunks.len() + device.room());
            prop_assert!(items.is_sorted_by_key(|item| std::cmp::Reverse(item.chunks)));
            items.sort_by_key(|item| (item.sequence, item.first_chunk));
            let (mut found, mut cut) = (vec![0; chunks.len()], 0);
            for item in &items {
                let sequence = &mut found[item.sequence as usize];
                prop_assert_eq!(item.first_chunk, *sequence);
                *sequence += item.chunks;
                let last = *sequence as usize == chunks[item.sequence as usize];
                cut += i32::from(last && item.first_chunk > 0);
                prop_assert_eq!(item.summary, if last && item.first_chunk > 0 { cut } else { 0 });
            }
            prop_assert!(cut > 0);
            prop_assert_eq!(found, chunks.iter().map(|n| *n as i32).collect::<Vec<_>>());
        }

        /// The chosen segments, or whole sequences, are nearly as fast as the best candidate when simulated.
        #[test]
        fn estimates_find_good_candidates(
            n in 1usize..13, longest in 64usize..600, spread in 0usize..20,
            heads in prop_oneof![Just(4i32), Just(8), Just(16), Just(24), Just(32), Just(48), Just(64)],
        ) {
            let device = on_an_mi300x(heads);
            let chunks: Vec<usize> = (0..n).map(|i| longest - longest * (i * spread % 20) / 100).collect();
            let Some(found) = device.cut(&chunks) else {
                return Ok(());
            };
            let whole = simulated(&device, &whole(&chunks));
            let best = best(&device, &chunks).expect("a candidate").min(whole);
            let own = match 20 * found.cost <= 19 * whole {
                true => simulated(&device, &found.items),
                false => whole,
            };
            prop_assert!(100 * own <= 125 * best, "{own}, at best {best}, estimate {}", found.cost);
        }
    }
}
