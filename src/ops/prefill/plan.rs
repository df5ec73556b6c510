//! Planner of segments: decides which sequences are cut, and where, from the lengths, the heads and the device.
//!
//! A workgroup walks the chunks of a sequence one after the other. If few workgroups have many chunks, most of the
//! device idles. Long sequences are then cut into segments of the same number of chunks, and shorter sequences stay
//! whole. Two more kernels compute the state at the start of each segment.

mod balance;
mod by_gates;
mod choice;
mod machine;
mod uneven;

use super::{CHUNK, PATH_VARIABLE, PrefillPath, SEGMENTS_VARIABLE};
use crate::abi::{DWK_SHORT_TOKENS, dwk_prefill_item};
use crate::check::Checked;
use crate::error::{ArgumentError, ArgumentKind};
pub(crate) use balance::Balance;
pub(crate) use by_gates::{LEAST_TIME, SAMPLE_WORDS, WITHOUT_WORK, samples, segments_by_gates};
pub(crate) use choice::{Choice, WalkTime};
pub(crate) use machine::{Machine, two_in_one};
pub(crate) use uneven::Uneven;

/// Numbers of segments (`items`), of summaries, of sequences with several summaries (`chains`), and of chunks of the longest
/// segment. A segment that another follows has `pieces` summaries. `even`: whether all segments are known to have equally many
/// chunks, and none has a summary. `short`: sequences that `prefill_short` computes, which are no items; if only the
/// device knows the lengths, all sequences are both, and each kernel picks its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) items: usize,
    pub(super) summaries: usize,
    pub(super) pieces: u32,
    pub(super) chains: u32,
    pub(super) longest_chunks: u32,
    pub(super) even: bool,
    pub(super) short: usize,
}

impl Counts {
    /// Whether `prefill_short` computes all sequences.
    pub(super) fn only_short(self) -> bool {
        self.items == 0 && self.short > 0
    }
}

/// Division of a batch into segments.
#[derive(Clone, Debug)]
pub(super) struct Partition {
    /// Segments: first those that another follows, sequence by sequence, then the others, the longest first.
    pub(super) items: Vec<dwk_prefill_item>,
    /// Number of summaries. Number i of the segments that another follows has `pieces` of them, from i * `pieces` on.
    pub(super) summaries: usize,
    /// Summaries of a segment that another follows.
    pub(super) pieces: u32,
    /// First summary and number of summaries, for each sequence with several.
    pub(super) chains: Vec<[i32; 2]>,
    /// Sequences that `prefill_short` computes. They have no items.
    pub(super) short: Vec<i32>,
}

/// Most bytes for all summaries of a batch that the planner chooses, as if each were in two pieces on targets that have
/// such.
pub(super) const MOST_SUMMARY_BYTES: usize = 1 << 30;

/// Most tokens of a sequence that `prefill_short` computes.
pub(super) const SHORT_TOKENS: usize = DWK_SHORT_TOKENS as usize;

/// Words of an item and of a chain.
pub(super) const ITEM_WORDS: usize = size_of::<dwk_prefill_item>() / size_of::<i32>();
pub(super) const CHAIN_WORDS: usize = 2;

impl Default for Partition {
    fn default() -> Partition {
        Partition {
            items: Vec::new(),
            summaries: 0,
            pieces: 1,
            chains: Vec::new(),
            short: Vec::new(),
        }
    }
}

impl Partition {
    pub(super) fn counts(&self) -> Counts {
        let chunks = || self.items.iter().map(|i| i.chunks as u32);
        let longest_chunks = chunks().max();
        Counts {
            items: self.items.len(),
            summaries: self.summaries,
            pieces: self.pieces,
            chains: self.chains.len() as u32,
            longest_chunks: longest_chunks.unwrap_or(0),
            even: self.summaries == 0 && chunks().min() == longest_chunks,
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
pub(super) fn counts(chunks: &[usize], cut: Cut, pieces: usize) -> Counts {
    let (mut summaries, mut chains, mut longest_chunks) = (0, 0, 0);
    for &n in chunks {
        let segment = cut.segment(n);
        let followed = followed(n, segment);
        summaries += followed * pieces;
        chains += u32::from(followed * pieces > 1);
        longest_chunks = longest_chunks.max(n.min(segment));
    }
    Counts {
        items: chunks.len() + summaries / pieces,
        summaries,
        pieces: pieces as u32,
        chains,
        longest_chunks: longest_chunks as u32,
        even: summaries == 0 && chunks.iter().all(|&n| n == chunks[0]),
        short: 0,
    }
}

/// Cuts sequences of `chunks[n]` chunks into segments, with `pieces` summaries of each that another follows.
pub(super) fn cut(chunks: &[usize], cut: Cut, pieces: usize) -> Partition {
    let counts = counts(chunks, cut, pieces);
    let mut out = Partition {
        items: Vec::with_capacity(counts.items),
        summaries: counts.summaries,
        pieces: counts.pieces,
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
            summary: ((first + i) * pieces) as i32,
        };
        out.items.extend((0..followed).map(|i| item(i, segment)));
        last.push(item(followed, n - followed * segment));
        if followed * pieces > 1 {
            out.chains
                .push([first, followed].map(|n| (n * pieces) as i32));
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

#[cfg(test)]
mod tests;
