//! Speculative decoding without a commit: every draft has its own slot.

use std::ptr;

use super::DecodeTensors;
use super::lower::Shape;
use crate::abi::{dwk_decode_args, dwk_decode_draft_args};
use crate::alias::{self, Span};
use crate::batch::{CuSeqlens, PerSequence};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::runtime::Context;

/// Slots, counts and lengths of a step of speculative decoding, all on the device.
///
/// A step stores the state after each draft to a slot of its own. The next step starts from the slot of the last accepted
/// draft, so nothing is copied when drafts are accepted. `read_slots` and `draft_slots` may be one table: a sequence reads
/// its state before it writes any.
#[derive(Clone, Debug, Default)]
pub struct Drafts<'a> {
    /// `[B, T]`: slot of the state after each token of each sequence. Negative, beyond the pool, or `null_slot`: the
    /// state is not stored. Takes the place of [`StatePool::write_slots`](crate::state::StatePool::write_slots).
    /// They are slots of [`DecodeTensors::states`] if that is given, which is then `[slots, 1, HV, ...]`, of any number of
    /// slots; the pool is not written. Absent: one state per sequence is stored, after its last token.
    pub draft_slots: Option<PerSequence<'a, i32>>,
    /// `[B, columns]`: slots of the states that the step before stored, of any number of columns. Takes the place of
    /// [`StatePool::slots`](crate::state::StatePool::slots). Given with `accepted`.
    pub read_slots: Option<PerSequence<'a, i32>>,
    /// `[B]`: tokens of the step before that were accepted, counted from 1. Sequence n reads the slot in column
    /// `accepted[n] - 1`. Counts outside are clamped to the columns.
    pub accepted: Option<PerSequence<'a, i32>>,
    /// `[B + 1]`: sequence n has rows `cu_seqlens[n]..cu_seqlens[n + 1]`, at most `T`. Tensors over tokens are then
    /// `[rows, ...]`, of any number of rows. A sequence without rows reads and writes nothing. Entries that decrease or
    /// exceed the rows never lead out of bounds, but outputs of the affected sequences are then unspecified. Rows beyond
    /// the first `T` of a sequence, and rows of no sequence, are left as they were. Absent: every sequence has `T`
    /// tokens.
    pub cu_seqlens: Option<CuSeqlens<'a>>,
    /// A slot that means no slot, besides negative ones and those beyond the pool.
    pub null_slot: Option<i32>,
}

impl Drafts<'_> {
    /// Rows of the tensors over tokens, if lengths are on the device.
    pub(super) fn rows(&self, x: &DecodeTensors<'_>) -> Option<usize> {
        self.cu_seqlens.as_ref().map(|_| x.q.0.shape[1])
    }

    /// Checks the drafts and returns the kernel's arguments. `decode`: arguments of a decode of the same tensors.
    pub(super) fn lower(
        &self,
        shape: &Shape,
        x: &DecodeTensors<'_>,
        decode: dwk_decode_args,
    ) -> Checked<dwk_decode_draft_args> {
        let (batch, tokens) = (shape.batch, shape.tokens());
        let mut out = dwk_decode_draft_args {
            decode,
            rows: (batch * tokens) as i32,
            read_columns: 1,
            null_slot: self.null_slot.unwrap_or(-1),
            ..Default::default()
        };
        if let Some(slots) = &self.draft_slots {
            absent("write_slots", x.pool.write_slots.is_some(), "draft_slots")?;
            out.states_slots = x.states.as_ref().map_or(0, |t| t.0.shape[0]) as i32;
            out.decode.write_slots = slots.checked("draft_slots", batch * tokens)?;
            out.write_columns = tokens as i32;
        }
        match (&self.read_slots, &self.accepted) {
            (Some(slots), Some(accepted)) => {
                absent("slots", x.pool.slots.is_some(), "read_slots")?;
                let columns = columns(slots, batch)?;
                out.decode.slots = slots.checked("read_slots", batch * columns)?;
                out.accepted = accepted.checked("accepted", batch)?;
                out.read_columns = columns as i32;
            }
            (None, None) => {}
            (Some(_), None) => return Err(missing("accepted", "read_slots")),
            (None, Some(_)) => return Err(missing("read_slots", "accepted")),
        }
        if let Some(lengths) = &self.cu_seqlens {
            let rows = x.q.0.shape[1];
            check::ensure(rows < 1 << 30, || {
                let allowed = "fewer than 2^30 rows";
                ArgumentError::new("q", ArgumentKind::Shape, format!("{rows} rows"), allowed)
            })?;
            let (address, wide) = lengths.checked(batch)?;
            (out.cu_seqlens, out.wide_lengths) = (address, wide.into());
            out.rows = rows as i32;
        } else {
            out.cu_seqlens = ptr::null();
        }
        Ok(out)
    }

    /// Checks that no output shares memory with the drafts.
    pub(super) fn check_overlaps(&self, outputs: &[Span<'_>; 3]) -> Checked<()> {
        let inputs = [
            Span::numbers("draft_slots", self.draft_slots.as_ref()),
            Span::numbers("read_slots", self.read_slots.as_ref()),
            Span::numbers("accepted", self.accepted.as_ref()),
            Span::lengths(self.cu_seqlens.as_ref()),
        ];
        alias::check(outputs, &inputs, &[])
    }

    /// Checks that all memory with a known context belongs to `context`.
    pub(super) fn check_devices(&self, context: &Context) -> Checked<()> {
        let known = [
            ("draft_slots", self.draft_slots.as_ref().map(|s| s.owner())),
            ("read_slots", self.read_slots.as_ref().map(|s| s.owner())),
            ("accepted", self.accepted.as_ref().map(|s| s.owner())),
            ("cu_seqlens", self.cu_seqlens.as_ref().map(|s| s.owner())),
        ];
        let mut known = known.into_iter().filter_map(|(n, o)| Some((n, o?)));
        known.try_for_each(|(name, owner)| check::device(name, owner, context))
    }
}

/// Columns of a table of slots, a row per sequence.
fn columns(slots: &PerSequence<'_, i32>, batch: usize) -> Checked<usize> {
    let entries = slots.len();
    let columns = entries.checked_div(batch).unwrap_or(1);
    check::ensure(
        columns * batch == entries && (1..=1 << 16).contains(&columns),
        || {
            let allowed = format!("1 to 2^16 for each of the {batch} sequences");
            let was = format!("{entries} elements");
            ArgumentError::new("read_slots", ArgumentKind::Shape, was, allowed)
        },
    )?;
    Ok(columns)
}

fn absent(argument: &str, given: bool, with: &str) -> Checked<()> {
    check::ensure(!given, || {
        let was = format!("given with {with}");
        ArgumentError::new(argument, ArgumentKind::Presence, was, "it must be absent")
    })
}

fn missing(argument: &str, with: &str) -> ArgumentError {
    let allowed = format!("{with} needs it");
    ArgumentError::new(argument, ArgumentKind::Presence, "absent", allowed)
}
