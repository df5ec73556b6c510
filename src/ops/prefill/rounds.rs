//! Rounds of the backward: parts of a batch that share the workspace one after the other, and the states between them
//! that a forward saves.

use super::lower::LoweredSave;
use super::shape::{BACKWARD_COLUMNS, Shape};
use super::{CHUNK, Lengths, Part, Prefill, PrefillSpec, PrefillTensors, Snapshot, snapshots};
use crate::abi::{self, dwk_state_strides};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::kernels;
use crate::model::Heads;
use crate::runtime::{Context, Stream};
use crate::tensor::Buffer;
use crate::workspace::{Workspace, check_memory};

/// Context that a forward saves for its backward.
///
/// A backward computes the states of its forward again, chunk by chunk, and keeps them and the gradients of states in its
/// workspace. With boundaries it does so in rounds, from the last one to the first: each starts from a saved state, and
/// its workspace is that of the longest round.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Save {
    /// Nothing. The backward is one round, and its workspace grows with the tokens.
    #[default]
    Nothing,
    /// The f32 states between rounds. Whole sequences share a round; a sequence is cut only if its backward alone needs
    /// more than about 1 GiB of workspace. Nothing is saved where no sequence is cut.
    Boundaries,
    /// [`Save::Boundaries`] with rounds of at most so many tokens, a positive multiple of [`CHUNK`].
    BoundariesEvery(usize),
}

/// Bytes of 16 rows of a slab, in 16-bit numbers.
pub(super) const SLAB_ROWS_BYTES: usize = 1024;
/// Row tiles of a chunk.
pub(super) const TILES: usize = CHUNK / 16;

/// Bytes that the intermediate tensors of a round may take.
const ROUND_BYTES: usize = 1 << 30;

impl Save {
    pub(super) fn validate(self) -> Checked<()> {
        let Save::BoundariesEvery(tokens) = self else {
            return Ok(());
        };
        check::ensure(tokens > 0 && tokens.is_multiple_of(CHUNK), || {
            let was = format!("boundaries every {tokens} tokens");
            let allowed = format!("tokens must be a positive multiple of {CHUNK}");
            ArgumentError::new("save", ArgumentKind::Value, was, allowed)
        })
    }

    /// Refuses to save where `reason` says why nothing can be.
    pub(super) fn refuse(self, reason: &str) -> Checked<()> {
        check::ensure(self == Save::Nothing, || {
            ArgumentError::new("save", ArgumentKind::Value, "boundaries", reason)
        })
    }
}

/// Part of a batch that one round of the backward computes: whole sequences, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Round {
    /// First sequence, and how many.
    pub(super) first: usize,
    pub(super) count: usize,
    /// First row of the batch, and how many rows: those past the last sequence belong to the last round.
    pub(super) begin: usize,
    pub(super) rows: usize,
    /// Rows of its sequence before it; not 0 only for a part of a sequence.
    pub(super) skipped: usize,
    /// Slot of the saved state that it starts from, unless it is the beginning of its sequence.
    pub(super) boundary: Option<usize>,
    /// Slot of the saved state that it ends with, unless its sequence ends.
    pub(super) next: Option<usize>,
}

impl Round {
    /// All of a batch.
    pub(super) fn whole(count: usize, rows: usize) -> Self {
        Round {
            first: 0,
            count,
            begin: 0,
            rows,
            skipped: 0,
            boundary: None,
            next: None,
        }
    }
}

/// Rounds of at most `most` chunk indices, at least 2, and of so many full chunks but one, in the order of rows. Parts of
/// one sequence are about equally long. `None`: one round.
pub(super) fn rounds(cu_seqlens: &[i32], rows: usize, most: Option<usize>) -> Vec<Round> {
    let sequences = cu_seqlens.len() - 1;
    let at = |n: usize| cu_seqlens[n] as usize;
    let whole = |first: usize, count: usize| Round {
        first,
        begin: at(first),
        ..Round::whole(count, at(first + count) - at(first))
    };
    let mut out: Vec<Round> = Vec::new();
    let mut boundaries = 0;
    let mut open = 0; // first sequence that has no round yet
    let most = most.unwrap_or(usize::MAX);
    let tokens = (most - 1).saturating_mul(CHUNK);
    let fits = |first: usize, end: usize| {
        let rows = at(end) - at(first);
        rows <= tokens && rows / CHUNK + (end - first) <= most
    };
    for n in 0..sequences {
        if fits(open, n + 1) {
            continue;
        }
        if open < n {
            out.push(whole(open, n - open));
            open = n;
        }
        if fits(n, n + 1) {
            continue;
        }
        let (begin, length) = (at(n), at(n + 1) - at(n));
        let chunks = length.div_ceil(CHUNK);
        let each = chunks.div_ceil(chunks.div_ceil(most - 1)) * CHUNK;
        for skipped in (0..length).step_by(each) {
            let boundary = (skipped > 0).then(|| boundaries - 1);
            let next = (skipped + each < length).then_some(boundaries);
            boundaries += usize::from(next.is_some());
            out.push(Round {
                first: n,
                count: 1,
                begin: begin + skipped,
                rows: each.min(length - skipped),
                skipped,
                boundary,
                next,
            });
        }
        open = n + 1;
    }
    if open < sequences || out.is_empty() {
        out.push(whole(open, sequences - open));
    }
    let last = out.len() - 1;
    out[last].rows = rows - out[last].begin;
    out
}

impl PrefillSpec {
    /// Most tokens of a round of the backward, a multiple of [`CHUNK`]; absent: all of the batch, since nothing is saved. A
    /// sequence of no more tokens is not cut.
    ///
    /// # Errors
    /// A spec that is not allowed.
    pub fn round_tokens(&self) -> Result<Option<usize>> {
        self.validate()?;
        Ok(self.most_tokens())
    }

    fn most_tokens(&self) -> Option<usize> {
        match self.save {
            Save::Nothing => None,
            Save::Boundaries => {
                let chunk = self
                    .heads
                    .value
                    .max(1)
                    .saturating_mul(self.backward_bytes());
                Some((ROUND_BYTES / chunk).saturating_sub(1).max(1) * CHUNK)
            }
            Save::BoundariesEvery(tokens) => Some(tokens),
        }
    }

    /// Bytes of the backward's workspace for a chunk and value head, sums aside, and without the columns that some targets
    /// add (`RoundPlan::layout`): rounds are the same on all targets.
    fn backward_bytes(&self) -> usize {
        let Heads {
            key_dim, value_dim, ..
        } = self.heads;
        let blocks = value_dim.div_ceil(BACKWARD_COLUMNS) * SLAB_ROWS_BYTES;
        let state = kernels::backward_bucket(key_dim) / 16 * blocks;
        abi::DWK_BACKWARD_RECORD_BYTES as usize + 2 * state + 3 * TILES * blocks
    }
}

impl Shape {
    /// Rounds of the backward of a batch.
    pub(super) fn rounds(&self, cu_seqlens: &[i32]) -> Vec<Round> {
        let most = self.spec.most_tokens().map(|tokens| tokens / CHUNK + 1);
        rounds(cu_seqlens, self.batch.rows(), most)
    }

    /// Bytes of a saved state.
    pub(super) fn boundary_bytes(&self) -> usize {
        let heads = &self.spec.heads;
        heads.value * heads.key_dim * heads.value_dim * size_of::<f32>()
    }

    /// Strides of saved states, `[slots, HV, K, V]` f32.
    pub(super) fn boundary_strides(&self) -> dwk_state_strides {
        let heads = &self.spec.heads;
        let head = (heads.key_dim * heads.value_dim) as i64;
        dwk_state_strides {
            sequence: heads.value as i64 * head,
            head,
            row: heads.value_dim as i64,
        }
    }
}

/// The states that a plan saves.
#[derive(Debug)]
pub(super) struct Boundaries {
    count: usize,
    /// Slot of the state after each chunk; -1: not saved.
    table: Buffer<i32>,
}

impl Boundaries {
    /// Those of a batch, or nothing if none of its sequences is cut.
    pub(super) fn of(
        context: &Context,
        shape: &Shape,
        cu_seqlens: &[i32],
    ) -> Result<Option<Boundaries>> {
        let saved: Vec<Snapshot> = (shape.rounds(cu_seqlens).iter())
            .filter_map(|round| {
                round.boundary.map(|slot| Snapshot {
                    sequence: round.first,
                    tokens: round.skipped,
                    slot,
                })
            })
            .collect();
        if saved.is_empty() {
            return Ok(None);
        }
        let table = snapshots::table(cu_seqlens, shape.chunk_entries(), &saved)?;
        Ok(Some(Boundaries {
            count: saved.len(),
            table: context.upload(&table)?,
        }))
    }
}

impl Prefill {
    fn boundaries(&self) -> Option<&Boundaries> {
        match &self.lengths {
            Lengths::Host { boundaries, .. } => boundaries.as_ref(),
            Lengths::Device(_) => None,
        }
    }

    /// Bytes that [`Prefill::launch_saving`] writes, and [`PrefillBackward::launch_saved`](super::PrefillBackward::launch_saved)
    /// reads: a state of all value heads in f32 for each boundary between rounds within a sequence. 0: there is none.
    pub fn context_bytes(&self) -> usize {
        (self.boundaries()).map_or(0, |b| b.count * self.shape.boundary_bytes())
    }

    /// [`Prefill::launch`] that also saves the context of [`PrefillSpec::save`](super::PrefillSpec::save) for the backward.
    /// Its outputs have the same bits. `context` has [`Prefill::context_bytes`] bytes, aligned to 256.
    ///
    /// # Errors
    /// As [`Prefill::launch`]; a context that is too small or shares memory with another argument. Where there is a
    /// boundary, also a pool of states, and snapshots: the backward does not differentiate a pool.
    pub fn launch_saving(
        &self,
        stream: &Stream,
        tensors: &PrefillTensors<'_>,
        context: Workspace<'_>,
        workspace: Workspace<'_>,
    ) -> Result<()> {
        let save = self.lower_save(tensors, &context)?;
        self.launch_with(stream, tensors, workspace, Part::Whole, save)
    }

    fn lower_save(
        &self,
        tensors: &PrefillTensors<'_>,
        context: &Workspace<'_>,
    ) -> Checked<Option<LoweredSave>> {
        check_memory("context", context, self.context_bytes(), &self.context)?;
        let Some(boundaries) = self.boundaries() else {
            return Ok(None);
        };
        let absent = |argument, there: bool| {
            check::ensure(!there, || {
                let allowed = "it must be absent: the launch saves context for a backward";
                ArgumentError::new(argument, ArgumentKind::Presence, "given", allowed)
            })
        };
        absent("pool", tensors.states.pool().is_some())?;
        absent(
            "snapshots",
            tensors.snapshots.is_some() || self.slots.snapshots.is_some(),
        )?;
        Ok(Some(LoweredSave {
            to: context.address(),
            slots: boundaries.table.address().cast_const().cast(),
            strides: self.shape.boundary_strides(),
            count: boundaries.count as i32,
            span: context.span_of("context"),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rounds cover all rows in order, within the bound; only a sequence that does not fit is cut, at chunks.
    #[test]
    fn rounds_cover_a_batch() {
        let lengths = [[0, 5, 64, 65, 700, 64], [1000, 1, 1, 0, 129, 1], [64; 6]];
        for (lengths, most) in lengths
            .iter()
            .flat_map(|l| [2, 3, 5, 1000].map(|most| (l, most)))
        {
            let mut cu_seqlens = vec![0];
            for n in lengths {
                cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + n);
            }
            let rows = cu_seqlens[6] as usize + 7;
            let found = rounds(&cu_seqlens, rows, Some(most));
            let mut at = 0;
            for (i, r) in found.iter().enumerate() {
                assert_eq!(r.begin, at);
                at += r.rows;
                let past = if i + 1 == found.len() { 7 } else { 0 };
                assert!((r.rows - past) / CHUNK + r.count <= most, "{r:?}");
                assert!(r.rows - past <= (most - 1) * CHUNK, "{r:?}");
                assert_eq!(r.begin, cu_seqlens[r.first] as usize + r.skipped);
                assert_eq!(r.boundary.is_some(), r.skipped > 0);
                assert!(r.skipped.is_multiple_of(CHUNK));
                let end = cu_seqlens[r.first + r.count] as usize;
                let ends = r.begin + r.rows - past == end;
                assert_eq!(r.next.is_none(), ends, "{r:?}");
                assert!(ends || r.count == 1 && found[i + 1].boundary == r.next);
            }
            assert_eq!(at, rows);
            let slots: Vec<_> = found.iter().filter_map(|r| r.boundary).collect();
            assert_eq!(slots, (0..slots.len()).collect::<Vec<_>>());
        }
        for cu_seqlens in [&[0][..], &[0, 0], &[0, 500, 500]] {
            let one = rounds(cu_seqlens, 600, None);
            assert_eq!((one.len(), one[0].rows), (1, 600));
        }
        assert_eq!(rounds(&[0], 600, Some(2))[0].rows, 600);
    }
}
