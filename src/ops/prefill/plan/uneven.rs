//! Segments of different lengths, for walks that start early and need no summaries. Compute units take them in order,
//! longest first, so that all end at about the same time. Two ways to cut are tried:
//! - long segments, and the rests of sequences in shorter ones. Equal segments fill the device only where their number
//!   divides by that of the compute units: 512 chunks of 64 value heads have 4.75 of the 304 compute units of an MI300X for
//!   each head;
//! - as many of the longest sequences whole as the device runs in some number of rounds, and the others in short segments.

use std::collections::BTreeMap;

use crate::abi::dwk_prefill_item;

/// Device and costs. Costs are in sixteenths of the time of a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uneven {
    /// Workgroups of an item.
    pub(crate) workgroups: usize,
    /// Workgroups that run at a time.
    pub(crate) compute_units: usize,
    /// About the least chunks of a segment.
    pub(crate) least_chunks: usize,
    /// Cost of an item's start.
    pub(crate) start: usize,
    /// Cost of the chunks that a segment begins early.
    pub(crate) warm_up: usize,
}

/// Most segments for which plans are worth their time on the host: a device has few.
const MOST_SEGMENTS: usize = 4096;
/// Numbers of parts of a long segment that make a short one.
const PARTS: [usize; 5] = [1, 2, 3, 4, 8];
/// Lengths of long segments that are tried: each is longer by a sixty-fourth of the first one.
const STEPS: usize = 20;
/// Most segments if all sequences are cut into short ones.
const MOST_SHORT: usize = 512;
/// Most rounds of whole sequences before others in short segments.
const MOST_ROUNDS: usize = 8;
/// Lengths of these segments, as multiples of the least.
const MULTIPLES: [usize; 4] = [1, 2, 3, 4];

/// About how many chunks long segments have, and segments of a rest. Both differ from it where a rest is to be shared.
#[derive(Clone, Copy)]
struct Lengths {
    long: usize,
    short: usize,
}

impl Uneven {
    /// Most sequences for which plans are worth their time on the host.
    pub(crate) const MOST_SEQUENCES: usize = 256;

    /// Items, longest first, and their cost. `None` if no sequence is cut.
    pub(crate) fn cut(&self, chunks: &[usize]) -> Option<(Vec<dwk_prefill_item>, usize)> {
        let all: usize = chunks.iter().sum();
        let longest = chunks.iter().copied().max().unwrap_or(0);
        let least = (all * self.workgroups).div_ceil(self.compute_units);
        let least = least.max(self.least_chunks);
        if chunks.len() > Self::MOST_SEQUENCES || all / least > MOST_SEGMENTS {
            return None;
        }
        let longs = (0..STEPS).map(|step| least + step * least / 64);
        let candidates = longs.flat_map(|long| {
            PARTS.map(|parts| Lengths {
                long,
                short: (long / parts).max(self.least_chunks),
            })
        });
        let of_lengths = (candidates.filter(|lengths| lengths.long < longest))
            .map(|lengths| items(chunks, lengths));
        let in_rounds = |rounds: usize| rounds.saturating_mul(self.compute_units) / self.workgroups;
        let shorts = MULTIPLES.map(|n| n * self.least_chunks);
        let shorts = shorts.map(|short| Some(short).filter(|short| all / short <= MOST_SHORT));
        let some_whole = (0..=MOST_ROUNDS)
            .map(in_rounds)
            .filter(|&whole| whole < chunks.len())
            .flat_map(|whole| {
                let shorts = shorts.into_iter().flatten();
                shorts.map(move |short| others_cut(chunks, whole, short))
            });
        // A rest may have been too short for a segment, or a sequence for a cut.
        let is_cut = |items: &Vec<dwk_prefill_item>| items.iter().any(|item| item.first_chunk > 0);
        (of_lengths.chain(some_whole).filter(is_cut))
            .map(|items| (self.cost(&items), items))
            .min_by_key(|(cost, _)| *cost)
            .map(|(cost, items)| (items, cost))
    }

    /// Cost if no sequence is cut.
    pub(crate) fn cost_of_whole(&self, chunks: &[usize]) -> usize {
        let long = chunks.iter().copied().max().unwrap_or(0) + 1;
        self.cost(&items(chunks, Lengths { long, short: long }))
    }

    /// Time after which all compute units have ended.
    fn cost(&self, items: &[dwk_prefill_item]) -> usize {
        // Compute units by the time at which they are free.
        // Not `BTreeMap::from`, in which memcheck sees a key that is compared although there is none.
        let mut free = BTreeMap::new();
        free.insert(0, self.compute_units);
        for item in items {
            let early = if item.first_chunk > 0 {
                self.warm_up
            } else {
                0
            };
            let cost = 16 * item.chunks as usize + self.start + early;
            let mut left = self.workgroups;
            while let Some((at, units)) = free.pop_first() {
                let taken = units.min(left);
                *free.entry(at + cost).or_default() += taken;
                if taken < units {
                    free.insert(at, units - taken);
                }
                left -= taken;
                if left == 0 {
                    break;
                }
            }
        }
        free.last_key_value().map_or(0, |(&at, _)| at)
    }
}

#[derive(Default)]
struct Items(Vec<dwk_prefill_item>);

impl Items {
    /// Adds the segments of a sequence, of so many chunks each.
    fn put(&mut self, sequence: usize, lengths: impl Iterator<Item = usize>) {
        let mut first_chunk = 0;
        for chunks in lengths {
            self.0.push(dwk_prefill_item {
                sequence: sequence as i32,
                first_chunk,
                chunks: chunks as i32,
                summary: 0,
            });
            first_chunk += chunks as i32;
        }
    }

    fn longest_first(mut self) -> Vec<dwk_prefill_item> {
        self.0.sort_by_key(|item| std::cmp::Reverse(item.chunks));
        self.0
    }
}

/// Cuts sequences. A rest that is too short for a segment lengthens the long ones.
fn items(chunks: &[usize], lengths: Lengths) -> Vec<dwk_prefill_item> {
    let mut items = Items::default();
    for (sequence, &n) in chunks.iter().enumerate() {
        let (longs, rest) = (n / lengths.long, n % lengths.long);
        let shorts = rest / lengths.short + usize::from(rest % lengths.short > lengths.short / 2);
        if longs == 0 {
            items.put(sequence, even(n, 1));
        } else if shorts == 0 {
            items.put(sequence, even(n, longs));
        } else {
            items.put(sequence, even(n - rest, longs).chain(even(rest, shorts)));
        }
    }
    items.longest_first()
}

/// Leaves the longest sequences whole, `whole` of them, and cuts the others into segments of about `short` chunks.
fn others_cut(chunks: &[usize], whole: usize, short: usize) -> Vec<dwk_prefill_item> {
    let mut order: Vec<usize> = (0..chunks.len()).collect();
    order.sort_by_key(|&sequence| std::cmp::Reverse(chunks[sequence]));
    let mut items = Items::default();
    for (place, &sequence) in order.iter().enumerate() {
        let n = chunks[sequence];
        let parts = if place < whole { 1 } else { (n / short).max(1) };
        items.put(sequence, even(n, parts));
    }
    items.longest_first()
}

/// `parts` lengths of the sum `n` that differ by at most one.
fn even(n: usize, parts: usize) -> impl Iterator<Item = usize> {
    (0..parts).map(move |i| (n + i) / parts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_an_mi300x(heads: usize) -> Uneven {
        Uneven {
            workgroups: heads,
            compute_units: 304,
            least_chunks: 8,
            start: 53,
            warm_up: 20,
        }
    }

    /// Chunks of the items.
    fn lengths(items: &[dwk_prefill_item]) -> Vec<i32> {
        items.iter().map(|item| item.chunks).collect()
    }

    #[test]
    fn long_segments_and_rests_fill_the_device() {
        let (items, cost) = on_an_mi300x(64).cut(&[512]).expect("a cut");
        assert_eq!(lengths(&items), [111, 111, 111, 111, 23, 23, 22]);
        // 4.75 compute units a head cannot take less than 512 / 4.75 chunks and one start.
        assert!(cost < 16 * 122 && cost > 16 * 108 + 67, "{cost}");
        let (items, _) = on_an_mi300x(32).cut(&[512]).expect("a cut");
        assert_eq!(lengths(&items), [vec![55; 9], vec![17]].concat());
    }

    /// Every chunk is in one item, in order, whatever the lengths.
    #[test]
    fn items_cover_their_sequences() {
        for chunks in [vec![300, 0, 7, 290, 1], vec![150], vec![1000, 999, 40]] {
            let (mut items, _) = on_an_mi300x(4).cut(&chunks).expect("a cut");
            assert!(items.is_sorted_by_key(|item| std::cmp::Reverse(item.chunks)));
            items.sort_by_key(|item| (item.sequence, item.first_chunk));
            let mut found = vec![0; chunks.len()];
            for item in &items {
                let sequence = &mut found[item.sequence as usize];
                assert_eq!(item.first_chunk, *sequence, "{items:?}");
                *sequence += item.chunks;
            }
            assert_eq!(found, chunks.iter().map(|n| *n as i32).collect::<Vec<_>>());
        }
    }

    /// 10 sequences of 32 value heads have 320 walks of 64 chunks for 304 compute units: nine stay whole.
    #[test]
    fn whole_sequences_of_a_round_and_short_segments_of_the_others() {
        let device = on_an_mi300x(32);
        let (items, cost) = device.cut(&[64; 10]).expect("a cut");
        let whole = lengths(&items).iter().filter(|n| **n == 64).count();
        assert_eq!(whole, 9, "{items:?}");
        // One round, its start, and what is left of a tenth sequence.
        assert!(cost < 16 * 64 + 53 + 16 * 20, "{cost}");
        assert_eq!(device.cost_of_whole(&[64; 10]), 2 * (16 * 64 + 53));
        // Two rounds, and one sequence in short segments.
        let (items, _) = device.cut(&[64; 20]).expect("a cut");
        assert_eq!(
            lengths(&items).iter().filter(|n| **n == 64).count(),
            19,
            "{items:?}"
        );
    }

    #[test]
    fn what_fills_the_device_is_not_worth_a_cut() {
        for lengths in [vec![512; 9], vec![64; 9], vec![64; 19], vec![16; 28]] {
            let device = on_an_mi300x(32);
            let whole = device.cost_of_whole(&lengths);
            assert!(
                device
                    .cut(&lengths)
                    .is_none_or(|(_, cost)| 100 * cost > 95 * whole)
            );
        }
        assert!(on_an_mi300x(32).cut(&[]).is_none());
        assert!(on_an_mi300x(1).cut(&[9; 257]).is_none());
        let mut huge = on_an_mi300x(1);
        huge.compute_units = u32::MAX as usize;
        assert!(huge.cut(&[1 << 25]).is_none());
    }
}
