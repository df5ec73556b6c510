//! Segments of different lengths, for walks that start early and need no summaries: long ones, and the rests of sequences
//! in shorter ones. Compute units take them in order, longest first, so that all end at about the same time.
//!
//! Equal segments fill the device only where their number divides by that of the compute units: 512 chunks of 64 value
//! heads have 4.75 of the 304 compute units of an MI300X for each head.

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

/// Most sequences for which plans are worth their time on the host.
const MOST_SEQUENCES: usize = 256;
/// The same of segments, of which a device has few.
const MOST_SEGMENTS: usize = 4096;
/// Numbers of parts of a long segment that make a short one.
const PARTS: [usize; 4] = [1, 2, 3, 4];
/// Lengths of long segments that are tried: each is longer by a sixty-fourth of the first one.
const STEPS: usize = 20;

/// About how many chunks long segments have, and segments of a rest. Both differ from it where a rest is to be shared.
#[derive(Clone, Copy)]
struct Lengths {
    long: usize,
    short: usize,
}

impl Uneven {
    /// Items, longest first, and their cost. `None` if no sequence is cut.
    pub(crate) fn cut(&self, chunks: &[usize]) -> Option<(Vec<dwk_prefill_item>, usize)> {
        let all: usize = chunks.iter().sum();
        let longest = chunks.iter().copied().max().unwrap_or(0);
        let least = (all * self.workgroups).div_ceil(self.compute_units);
        let least = least.max(self.least_chunks);
        if chunks.len() > MOST_SEQUENCES || all / least > MOST_SEGMENTS {
            return None;
        }
        let longs = (0..STEPS).map(|step| least + step * least / 64);
        let candidates = longs.flat_map(|long| {
            PARTS.map(|parts| Lengths {
                long,
                short: (long / parts).max(self.least_chunks),
            })
        });
        let cutting = candidates.filter(|lengths| lengths.long < longest);
        let best = cutting.min_by_key(|lengths| self.cost(&items(chunks, *lengths)))?;
        let items = items(chunks, best);
        let cost = self.cost(&items);
        // A rest may have been too short for a segment.
        let is_cut = items.iter().any(|item| item.first_chunk > 0);
        is_cut.then_some((items, cost))
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

/// Cuts sequences, longest segments first. A rest that is too short for a segment lengthens the long ones.
fn items(chunks: &[usize], lengths: Lengths) -> Vec<dwk_prefill_item> {
    let mut items = Vec::new();
    for (sequence, &n) in chunks.iter().enumerate() {
        let mut first = 0;
        let mut put = |chunks: usize| {
            items.push(dwk_prefill_item {
                sequence: sequence as i32,
                first_chunk: first as i32,
                chunks: chunks as i32,
                summary: 0,
            });
            first += chunks;
        };
        let (longs, rest) = (n / lengths.long, n % lengths.long);
        if longs == 0 {
            put(n);
            continue;
        }
        let shorts = rest / lengths.short + usize::from(rest % lengths.short > lengths.short / 2);
        if shorts == 0 {
            even(n, longs).for_each(&mut put);
        } else {
            even(n - rest, longs).for_each(&mut put);
            even(rest, shorts).for_each(&mut put);
        }
    }
    items.sort_by_key(|item| std::cmp::Reverse(item.chunks));
    items
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

    #[test]
    fn nothing_is_cut_that_fills_the_device() {
        assert!(on_an_mi300x(32).cut(&[64; 10]).is_none());
        assert!(on_an_mi300x(32).cut(&[512; 9]).is_none());
        assert!(on_an_mi300x(96).cut(&[1024; 3]).is_none());
        assert!(on_an_mi300x(32).cut(&[]).is_none());
        assert!(on_an_mi300x(1).cut(&[9; 257]).is_none());
        let mut huge = on_an_mi300x(1);
        huge.compute_units = u32::MAX as usize;
        assert!(huge.cut(&[1 << 25]).is_none());
    }
}
