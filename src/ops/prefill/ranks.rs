//! Layout of sequences over ranks: which rank has which tokens, and where the summaries of blocks lie once gathered.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::{CHUNK, PrefillSpec};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, RankMismatch, Result};

/// A run of tokens of one sequence that a rank has, as one sequence of its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fragment {
    /// Index of the sequence in the layout.
    pub sequence: usize,
    /// Tokens of the sequence before it: a multiple of the block.
    pub begin: usize,
    /// A multiple of the block, unless the sequence ends with it. 0 for a sequence without tokens only.
    pub tokens: usize,
}

/// A fragment's part in the exchange of a convolution's tails.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tail {
    /// Place of its last rows among the tails that its rank sends; none if its sequence ends with it.
    pub sent: Option<usize>,
    /// Slot, among the tails of all ranks, of the rows before it; none if its sequence begins with it.
    pub before: Option<usize>,
}

/// Sequences over ranks. All ranks make the same layout, from the lengths of all sequences.
///
/// Each sequence is cut into *blocks* of the same number of tokens; its last block may be shorter. A rank sends a summary of
/// each of its blocks that another block follows. Every rank folds the blocks of a sequence one by one, so that outputs and
/// states depend on the block, and not on the number of ranks or on who has which block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankLayout {
    block: usize,
    lengths: Vec<usize>,
    ranks: Vec<Vec<Fragment>>,
    rank_slots: usize,
    /// Slot of each block that another follows, sequence by sequence.
    slots: Vec<Vec<i32>>,
}

fn refuse(argument: &str, was: String, allowed: String) -> ArgumentError {
    ArgumentError::new(argument, ArgumentKind::Lengths, was, allowed)
}

impl RankLayout {
    /// Fragments of each rank, in the order in which its batch has them. `lengths`: tokens of each sequence.
    /// `block_tokens`: tokens of a block, a positive multiple of [`CHUNK`].
    ///
    /// # Errors
    /// No rank; a block that is not allowed; fragments that do not divide every sequence, or that begin or end within a
    /// block.
    pub fn new(
        lengths: &[usize],
        block_tokens: usize,
        fragments: Vec<Vec<Fragment>>,
    ) -> Result<Self> {
        check_block(block_tokens)?;
        check_ranks(fragments.len())?;
        check_lengths(lengths, block_tokens)?;
        check_fragments(lengths, block_tokens, &fragments)?;
        let mut layout = RankLayout {
            block: block_tokens / CHUNK,
            lengths: lengths.to_vec(),
            ranks: fragments,
            rank_slots: 0,
            slots: Vec::new(),
        };
        layout.number_slots()?;
        Ok(layout)
    }

    /// Blocks in the order of the packed sequences, in runs of equal length: rank 0 has the first.
    ///
    /// # Errors
    /// No rank; a block that is not allowed.
    pub fn contiguous(lengths: &[usize], block_tokens: usize, ranks: usize) -> Result<Self> {
        check_block(block_tokens)?;
        check_ranks(ranks)?;
        check_lengths(lengths, block_tokens)?;
        let blocks: usize = lengths.iter().map(|n| n.div_ceil(block_tokens)).sum();
        let mut first = 0;
        Self::of_blocks(lengths, block_tokens, ranks, |_, block, of_sequence| {
            if block == 0 {
                first += of_sequence;
            }
            let index = first - of_sequence + block;
            (index as u128 * ranks as u128 / blocks.max(1) as u128) as usize
        })
    }

    /// Each sequence in twice as many pieces as there are ranks: rank r has piece r from the begin, and piece r from the
    /// end. Attention layers with a causal mask then have equal work.
    ///
    /// # Errors
    /// No rank; a block that is not allowed.
    pub fn zigzag(lengths: &[usize], block_tokens: usize, ranks: usize) -> Result<Self> {
        check_block(block_tokens)?;
        check_ranks(ranks)?;
        check_lengths(lengths, block_tokens)?;
        Self::of_blocks(lengths, block_tokens, ranks, |_, block, of_sequence| {
            let pieces = 2 * ranks as u128;
            let piece = (block as u128 * pieces / of_sequence.max(1) as u128) as usize;
            piece.min(2 * ranks - 1 - piece)
        })
    }

    /// Whole sequences where possible, the longest first, each on the rank with the fewest blocks so far. A sequence with more
    /// blocks than an equal share is cut into runs of that share, and each run is placed like a sequence.
    ///
    /// # Errors
    /// No rank; a block that is not allowed.
    pub fn packed(lengths: &[usize], block_tokens: usize, ranks: usize) -> Result<Self> {
        check_block(block_tokens)?;
        check_ranks(ranks)?;
        check_lengths(lengths, block_tokens)?;
        let blocks_of = |n: &usize| n.div_ceil(block_tokens);
        let all: usize = lengths.iter().map(blocks_of).sum();
        let share = all.div_ceil(ranks).max(1);
        let mut runs = Vec::new();
        let mut rank_of_run: Vec<Vec<usize>> = Vec::new();
        for (sequence, tokens) in lengths.iter().enumerate() {
            let blocks = blocks_of(tokens);
            let count = blocks.div_ceil(share).max(1);
            runs.extend((0..count).map(|run| (share.min(blocks - run * share), sequence, run)));
            rank_of_run.push(vec![0; count]);
        }
        runs.sort_by_key(|&(blocks, sequence, run)| (Reverse(blocks), sequence, run));
        let mut loads: BinaryHeap<_> = (0..ranks).map(|rank| Reverse((0usize, rank))).collect();
        for (blocks, sequence, run) in runs {
            if let Some(mut least) = loads.peek_mut() {
                rank_of_run[sequence][run] = least.0.1;
                least.0.0 += blocks;
            }
        }
        Self::of_blocks(lengths, block_tokens, ranks, |sequence, block, _| {
            rank_of_run[sequence][block / share]
        })
    }

    /// Tokens of a block for sequences of these lengths, if the caller has no other wish: 16 to 64 blocks of the longest
    /// sequence, fewer for more value heads: with 8 to 32 of them, all summaries have about 64 MiB at `K = V = 128`. Depends
    /// on nothing else, so that all ranks, and any number of them, choose alike.
    pub fn default_block(lengths: &[usize], value_heads: usize) -> usize {
        let longest_chunks = lengths.iter().max().map_or(0, |n| n.div_ceil(CHUNK));
        let blocks = (512 / value_heads.max(1)).clamp(16, 64);
        longest_chunks.div_ceil(blocks).clamp(4, 1 << 24) * CHUNK
    }

    /// Layout in which `rank_of(sequence, block, blocks of the sequence)` has a block.
    fn of_blocks(
        lengths: &[usize],
        block_tokens: usize,
        ranks: usize,
        mut rank_of: impl FnMut(usize, usize, usize) -> usize,
    ) -> Result<Self> {
        let mut fragments = vec![Vec::<Fragment>::new(); ranks];
        for (sequence, &tokens) in lengths.iter().enumerate() {
            let blocks = tokens.div_ceil(block_tokens);
            for block in 0..blocks.max(1) {
                let begin = block * block_tokens;
                let of_block = block_tokens.min(tokens - begin);
                let rank = &mut fragments[rank_of(sequence, block, blocks).min(ranks - 1)];
                match rank.last_mut() {
                    Some(f) if f.sequence == sequence && f.begin + f.tokens == begin => {
                        f.tokens += of_block;
                    }
                    _ => rank.push(Fragment {
                        sequence,
                        begin,
                        tokens: of_block,
                    }),
                }
            }
        }
        Self::new(lengths, block_tokens, fragments)
    }

    fn number_slots(&mut self) -> Checked<()> {
        let followed = |f: &Fragment| {
            let blocks = self.blocks(f.sequence).saturating_sub(1);
            let end = (f.begin + f.tokens).div_ceil(self.block_tokens());
            f.begin / self.block_tokens()..end.min(blocks)
        };
        let sizes = self.ranks.iter().map(|of_rank| {
            let counts = of_rank.iter().map(|f| followed(f).len());
            counts.sum::<usize>()
        });
        let rank_slots = sizes.max().unwrap_or(0);
        let all = rank_slots.checked_mul(self.ranks.len());
        check::ensure(all.is_some_and(|n| n <= i32::MAX as usize), || {
            let was = format!("{rank_slots} blocks on each of {} ranks", self.ranks.len());
            refuse("block", was, "fewer than 2^31 blocks".to_owned())
        })?;
        let mut slots: Vec<Vec<i32>> = (0..self.lengths.len())
            .map(|n| vec![0; self.blocks(n).saturating_sub(1)])
            .collect();
        for (rank, of_rank) in self.ranks.iter().enumerate() {
            let blocks = of_rank
                .iter()
                .flat_map(|f| followed(f).map(move |block| (f.sequence, block)));
            for (i, (sequence, block)) in blocks.enumerate() {
                slots[sequence][block] = (rank * rank_slots + i) as i32;
            }
        }
        (self.rank_slots, self.slots) = (rank_slots, slots);
        Ok(())
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> usize {
        self.block * CHUNK
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Tokens of each sequence.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Fragments of a rank, the sequences of its batch; none for a rank that does not exist.
    pub fn fragments(&self, rank: usize) -> &[Fragment] {
        self.ranks.get(rank).map_or(&[], Vec::as_slice)
    }

    /// Summaries that each rank sends: the most that any has. 0: no rank sends or waits for anything. Equal on all ranks, so
    /// that either all take part in a collective, or none.
    pub fn rank_slots(&self) -> usize {
        self.rank_slots
    }

    /// Tails that each rank sends for a convolution: the most fragments that another follows that any rank has. 0: no rank
    /// sends or waits for anything.
    pub fn tail_slots(&self) -> usize {
        let counts = self.ranks.iter().map(|of_rank| {
            let followed = of_rank.iter().filter(|f| self.is_followed(f));
            followed.count()
        });
        counts.max().unwrap_or(0)
    }

    /// Exchange of a convolution's tails, for each fragment of a rank. A tail is the last `width - 1` rows of a fragment that
    /// another follows, which has at least a block of rows. Tails of all ranks are gathered rank by rank, with
    /// [`RankLayout::tail_slots`] of each.
    pub fn tails(&self, rank: usize) -> Vec<Tail> {
        let slots = self.tail_slots();
        let mut at = std::collections::HashMap::new();
        for (rank, of_rank) in self.ranks.iter().enumerate() {
            let followed = of_rank.iter().filter(|f| self.is_followed(f));
            for (i, f) in followed.enumerate() {
                at.insert((f.sequence, f.begin + f.tokens), rank * slots + i);
            }
        }
        let fragments = self.fragments(rank).iter();
        let tail = |f: &Fragment| Tail {
            sent: (at.get(&(f.sequence, f.begin + f.tokens))).map(|slot| slot - rank * slots),
            before: at.get(&(f.sequence, f.begin)).copied(),
        };
        fragments.map(tail).collect()
    }

    fn is_followed(&self, f: &Fragment) -> bool {
        f.begin + f.tokens < self.lengths[f.sequence]
    }

    /// Chunks of a block.
    pub(super) fn block_chunks(&self) -> usize {
        self.block
    }

    /// Blocks of a sequence.
    pub(super) fn blocks(&self, sequence: usize) -> usize {
        self.lengths[sequence].div_ceil(self.block_tokens())
    }

    /// Slot, among those of all ranks, of a block that another follows.
    pub(super) fn slot(&self, sequence: usize, block: usize) -> i32 {
        self.slots[sequence][block]
    }
}

/// Bytes of a rank's [`ParallelPrefill::agreement`](super::ParallelPrefill::agreement).
pub const AGREEMENT_BYTES: usize = 128;

/// Words of an agreement, and the names of what they must agree in. Numbers first, then hashes.
const AGREED: [&str; 11] = [
    "version of the library",
    "number of ranks",
    "number of sequences",
    "tokens of all sequences",
    "tokens of a block",
    "value heads",
    "key dimension",
    "value dimension",
    "lengths of the sequences",
    "fragments of the ranks",
    "element type, head map, scale or norm of the spec",
];
const FIRST_HASH: usize = 8;

/// What ranks must agree in, as [`AGREED`] names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Agreement([u64; AGREED.len()]);

/// A hash that is equal on all hosts and builds: FNV-1a over words, with a finaliser.
fn hash(words: impl IntoIterator<Item = u64>) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for word in words {
        hash = (hash ^ word).wrapping_mul(0x0000_0100_0000_01b3);
        hash ^= hash >> 29;
    }
    hash ^= hash >> 32;
    hash.wrapping_mul(0xd6e8_feb8_6659_fd93)
}

impl Agreement {
    pub(super) fn new(layout: &RankLayout, spec: &PrefillSpec) -> Self {
        let h = &spec.heads;
        let fragments = layout.ranks.iter().flat_map(|of_rank| {
            let each = of_rank.iter().flat_map(|f| [f.sequence, f.begin, f.tokens]);
            [of_rank.len()].into_iter().chain(each)
        });
        let scale = spec.scale.unwrap_or_else(|| h.default_scale());
        let others = [
            spec.dtype as u64,
            h.key as u64,
            h.map as u64,
            scale.to_bits().into(),
            spec.qk_l2norm.into(),
        ];
        Agreement([
            1,
            layout.ranks() as u64,
            layout.lengths.len() as u64,
            layout.lengths.iter().map(|&n| n as u64).sum(),
            layout.block_tokens() as u64,
            h.value as u64,
            h.key_dim as u64,
            h.value_dim as u64,
            hash(layout.lengths.iter().map(|&n| n as u64)),
            hash(fragments.map(|n| n as u64)),
            hash(others),
        ])
    }

    /// Little-endian words, then zeros.
    pub(super) fn bytes(&self) -> [u8; AGREEMENT_BYTES] {
        let mut bytes = [0; AGREEMENT_BYTES];
        for (to, word) in bytes.chunks_exact_mut(8).zip(self.0) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Checks the bytes of all ranks, rank by rank.
    pub(super) fn check(&self, own: usize, all: &[u8]) -> Result<()> {
        let ranks = self.0[1] as usize;
        check::ensure(all.len() == ranks * AGREEMENT_BYTES, || {
            let was = format!("{} bytes", all.len());
            let allowed = format!("{AGREEMENT_BYTES} of each of {ranks} ranks");
            ArgumentError::new("agreements", ArgumentKind::Size, was, allowed)
        })?;
        for (rank, bytes) in all.chunks_exact(AGREEMENT_BYTES).enumerate() {
            let words = bytes
                .as_chunks::<8>()
                .0
                .iter()
                .map(|b| u64::from_le_bytes(*b));
            for (i, (theirs, ours)) in words.zip(self.0).enumerate() {
                if theirs != ours {
                    let shown = |word: u64| match i < FIRST_HASH {
                        true => word.to_string(),
                        false => format!("hash {word:016x}"),
                    };
                    let (theirs, ours) = (shown(theirs), shown(ours));
                    let what = AGREED[i];
                    return Err(RankMismatch {
                        what,
                        rank,
                        theirs,
                        own,
                        ours,
                    }
                    .into());
                }
            }
        }
        Ok(())
    }
}

fn check_block(tokens: usize) -> Checked<()> {
    let allowed = tokens > 0 && tokens.is_multiple_of(CHUNK) && tokens <= i32::MAX as usize;
    check::ensure(allowed, || {
        let allowed = format!("a positive multiple of {CHUNK} below 2^31");
        ArgumentError::new(
            "block",
            ArgumentKind::Value,
            format!("{tokens} tokens"),
            allowed,
        )
    })
}

/// Checks that there are fewer than 2^24 blocks, which also bounds the memory of a layout.
fn check_lengths(lengths: &[usize], block_tokens: usize) -> Checked<()> {
    let blocks = lengths.iter().map(|n| n.div_ceil(block_tokens));
    let all = blocks.fold(0usize, usize::saturating_add);
    check::ensure(all < 1 << 24, || {
        let was = format!("{all} blocks of {block_tokens} tokens");
        refuse("lengths", was, "fewer than 2^24 blocks".to_owned())
    })
}

fn check_ranks(ranks: usize) -> Checked<()> {
    check::ensure((1..1 << 20).contains(&ranks), || {
        let allowed = "it must be at least 1 and less than 2^20";
        ArgumentError::new("ranks", ArgumentKind::Value, ranks, allowed)
    })
}

/// Checks that fragments divide all sequences, at blocks.
fn check_fragments(lengths: &[usize], block: usize, ranks: &[Vec<Fragment>]) -> Checked<()> {
    let mut all: Vec<(Fragment, usize)> = Vec::new();
    for (rank, fragments) in ranks.iter().enumerate() {
        all.extend(fragments.iter().map(|&f| (f, rank)));
    }
    all.sort_by_key(|(f, _)| (f.sequence, f.begin));
    let mut rest = all.iter().peekable();
    for (sequence, &tokens) in lengths.iter().enumerate() {
        let mut end = 0;
        let mut any = false;
        while let Some((f, rank)) = rest.next_if(|(f, _)| f.sequence == sequence) {
            let was = || {
                let Fragment { begin, tokens, .. } = f;
                format!(
                    "{tokens} tokens from {begin} of sequence {sequence}, which rank {rank} has"
                )
            };
            check::ensure(f.begin == end && !(any && tokens == 0), || {
                let allowed = format!("the next fragment of the sequence must begin at {end}");
                refuse("fragments", was(), allowed)
            })?;
            let left = tokens - end;
            let whole = f.tokens == left || (f.tokens > 0 && f.tokens.is_multiple_of(block));
            check::ensure(f.tokens <= left && whole, || {
                let allowed =
                    format!("a positive multiple of the block of {block}, or all {left} left");
                refuse("fragments", was(), allowed)
            })?;
            check::ensure(tokens == 0 || f.tokens > 0, || {
                refuse("fragments", was(), "at least one token".to_owned())
            })?;
            (end, any) = (end + f.tokens, true);
        }
        check::ensure(any && end == tokens, || {
            let was = format!("sequence {sequence} has {tokens} tokens, and ranks have {end}");
            refuse(
                "fragments",
                was,
                "ranks must have all tokens once".to_owned(),
            )
        })?;
    }
    match rest.next() {
        None => Ok(()),
        Some((f, rank)) => Err(refuse(
            "fragments",
            format!("rank {rank} has tokens of sequence {}", f.sequence),
            format!("there are {} sequences", lengths.len()),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fragment(sequence: usize, begin: usize, tokens: usize) -> Fragment {
        Fragment {
            sequence,
            begin,
            tokens,
        }
    }

    #[test]
    fn blocks_are_dealt_in_runs() {
        let x = RankLayout::contiguous(&[300, 0, 70], 128, 2).expect("a layout");
        assert_eq!(x.fragments(0), [fragment(0, 0, 256)]);
        let of_last = [fragment(0, 256, 44), fragment(1, 0, 0), fragment(2, 0, 70)];
        assert_eq!(x.fragments(1), of_last);
        // Blocks 0 and 1 of sequence 0 are followed.
        assert_eq!((x.rank_slots(), x.slot(0, 0), x.slot(0, 1)), (2, 0, 1));
        let none = RankLayout::contiguous(&[64, 64], 128, 5).expect("a layout");
        assert_eq!(none.rank_slots(), 0);
        assert_eq!(none.fragments(7), []);
    }

    #[test]
    fn zigzag_pairs_the_ends() {
        let x = RankLayout::zigzag(&[64 * 8], 64, 2).expect("a layout");
        assert_eq!(x.fragments(0), [fragment(0, 0, 128), fragment(0, 384, 128)]);
        assert_eq!(x.fragments(1), [fragment(0, 128, 256)]);
        // Rank 0 has blocks 0, 1, 6 and 7, of which 7 is the last.
        assert_eq!(x.rank_slots(), 4);
        assert_eq!((x.slot(0, 6), x.slot(0, 2)), (2, 4));
    }

    #[test]
    fn blocks_are_chosen_by_lengths_and_heads() {
        let block = |tokens: usize, heads| RankLayout::default_block(&[5, tokens], heads);
        assert_eq!(block(1 << 17, 32), 8192);
        assert_eq!(block(1 << 17, 8), 2048);
        assert_eq!(block(1 << 17, 64), 8192);
        assert_eq!(block(100, 64), 256);
        assert_eq!(RankLayout::default_block(&[], 0), 256);
        assert!(RankLayout::contiguous(&[usize::MAX], block(usize::MAX, 1), 1).is_err());
    }

    #[test]
    fn wrong_layouts_are_refused() {
        let of = |fragments: Vec<Vec<Fragment>>| RankLayout::new(&[200, 0], 64, fragments);
        let good = vec![
            vec![fragment(0, 64, 136)],
            vec![fragment(1, 0, 0), fragment(0, 0, 64)],
        ];
        assert!(of(good).is_ok());
        for (wrong, words) in [
            (vec![], "ranks: 0"),
            (vec![vec![fragment(0, 0, 200)]], "sequence 1 has 0 tokens"),
            (
                vec![vec![fragment(0, 0, 100), fragment(0, 100, 100)]],
                "a positive multiple of the block",
            ),
            (
                vec![vec![fragment(0, 0, 64), fragment(0, 0, 200)]],
                "must begin at 64",
            ),
            (
                vec![vec![fragment(0, 0, 64), fragment(0, 64, 0)]],
                "a positive multiple of the block",
            ),
            (
                vec![vec![
                    fragment(0, 0, 200),
                    fragment(0, 200, 0),
                    fragment(1, 0, 0),
                ]],
                "at least one token",
            ),
            (
                vec![vec![
                    fragment(0, 0, 200),
                    fragment(1, 0, 0),
                    fragment(1, 0, 0),
                ]],
                "must begin at 0",
            ),
            (
                vec![vec![
                    fragment(0, 0, 200),
                    fragment(1, 0, 0),
                    fragment(2, 0, 64),
                ]],
                "there are 2 sequences",
            ),
            (vec![vec![fragment(0, 0, usize::MAX)]], "or all 200 left"),
        ] {
            let error = of(wrong).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
        for block in [0, 63, 1 << 40] {
            assert!(RankLayout::contiguous(&[1], block, 1).is_err());
        }
    }
}
