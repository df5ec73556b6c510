//! Snapshots: states after some chunks of a sequence, for prefix caches.

use std::collections::HashSet;

use super::shape::Shape;
use super::states::PlanSlots;
use super::{CHUNK, PrefillTensors};
use crate::abi::{self, dwk_prefill_scan_args};
use crate::batch::PerSequence;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::state::{StateMut, state_shape};
use crate::types::StateLayout;

/// A state after some tokens of a sequence, and the slot to store it in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Snapshot {
    /// Index of the sequence in the batch.
    pub sequence: usize,
    /// Tokens before the snapshot: a positive multiple of [`CHUNK`], at most the sequence's tokens.
    pub tokens: usize,
    /// Slot; no two snapshots share one.
    pub slot: usize,
}

/// Destination of snapshots.
///
/// Continuing a sequence from an f32 snapshot gives the same bits as one run over the whole, if neither plan cuts it
/// into segments. After the last chunk a snapshot is the final state. Snapshots in bf16 or of cut sequences have their
/// usual accuracy.
#[derive(Debug)]
pub struct Snapshots<'a> {
    /// f32, bf16 or fp16, `[slots, HV, K, V]` or `[slots, HV, V, K]`. Absent: slots of the pool that no sequence of the batch
    /// reads or writes.
    pub to: Option<StateMut<'a>>,
    /// Slot of the state after each chunk; negative or beyond the tensor: not stored. No slot may occur twice. Chunk c
    /// of sequence n has entry `cu_seqlens[n] / 64 + n + c` of
    /// [`Prefill::chunk_entries`](super::Prefill::chunk_entries) entries. Absent: the plan has the slots.
    pub slots: Option<PerSequence<'a, i32>>,
}

fn refuse(argument: &str, kind: ArgumentKind, was: &str, allowed: &str) -> ArgumentError {
    ArgumentError::new(argument, kind, was, allowed)
}

/// Snapshots after every `tokens` tokens, sequence by sequence, in consecutive slots.
pub(super) fn every(cu_seqlens: &[i32], tokens: usize) -> Checked<Vec<Snapshot>> {
    check_tokens(tokens)?;
    let lengths = cu_seqlens.windows(2).map(|c| (c[1] - c[0]) as usize);
    let places = lengths
        .enumerate()
        .flat_map(|(sequence, length)| (1..=length / tokens).map(move |i| (sequence, i * tokens)));
    let numbered = places.enumerate();
    Ok(numbered
        .map(|(slot, (sequence, tokens))| Snapshot {
            sequence,
            tokens,
            slot,
        })
        .collect())
}

fn check_tokens(tokens: usize) -> Checked<()> {
    check::ensure(tokens > 0 && tokens.is_multiple_of(CHUNK), || {
        let was = format!("a state after {tokens} tokens");
        let allowed = format!("a positive multiple of {CHUNK}");
        refuse("snapshots", ArgumentKind::Value, &was, &allowed)
    })
}

/// Slot of the state after each chunk; -1: not stored.
pub(super) fn table(
    cu_seqlens: &[i32],
    entries: usize,
    snapshots: &[Snapshot],
) -> Checked<Vec<i32>> {
    let value =
        |was: String, allowed: &str| refuse("snapshots", ArgumentKind::Value, &was, allowed);
    let mut table = vec![-1; entries];
    let mut used = HashSet::with_capacity(snapshots.len());
    for &Snapshot {
        sequence,
        tokens,
        slot,
    } in snapshots
    {
        check_tokens(tokens)?;
        let bounds = sequence
            .checked_add(2)
            .and_then(|end| cu_seqlens.get(sequence..end));
        let Some(&[begin, end]) = bounds else {
            let allowed = format!("the batch has {} sequences", cu_seqlens.len() - 1);
            return Err(value(format!("sequence {sequence}"), &allowed));
        };
        check::ensure(tokens <= (end - begin) as usize, || {
            let was = format!("a state after {tokens} tokens of sequence {sequence}");
            value(was, &format!("it has {} tokens", end - begin))
        })?;
        check::ensure(slot < i32::MAX as usize && used.insert(slot), || {
            value(
                format!("slot {slot}"),
                "each slot must be used once, and below 2^31 - 1",
            )
        })?;
        let entry = &mut table[begin as usize / CHUNK + sequence + tokens / CHUNK - 1];
        check::ensure(*entry < 0, || {
            let was = format!("two slots after {tokens} tokens of sequence {sequence}");
            value(was, "each state may go to one slot only")
        })?;
        *entry = slot as i32;
    }
    Ok(table)
}

/// Checks snapshots and sets their arguments of `prefill_scan`. Returns the kernel's flags.
pub(super) fn lower(
    batch: &Shape,
    x: &PrefillTensors<'_>,
    plan: &PlanSlots,
    scan: &mut dwk_prefill_scan_args,
) -> Checked<u32> {
    use ArgumentKind::{Presence, Value};
    let Some(snapshots) = &x.snapshots else {
        check::ensure(plan.snapshots.is_none(), || {
            let allowed = "it must be given: the plan has snapshot slots";
            refuse("snapshots", Presence, "absent", allowed)
        })?;
        return Ok(0);
    };
    scan.snapshot_slots = match (&snapshots.slots, &plan.snapshots) {
        (Some(slots), None) => slots.checked("snapshot_slots", batch.chunk_entries())?,
        (None, Some(table)) => table.address().cast_const().cast(),
        (given, _) => {
            let (was, allowed) = match given {
                Some(_) => (
                    "given to a plan that has snapshot slots",
                    "it must be absent",
                ),
                None => ("absent", "the plan has none"),
            };
            return Err(refuse("snapshot_slots", Presence, was, allowed));
        }
    };
    let (name, to, layout) = match (&snapshots.to, x.states.pool()) {
        (Some(to), _) => ("snapshots", &to.tensor.0, to.layout),
        (None, Some(pool)) => ("pool", &pool.tensor.0, pool.layout),
        (None, None) => {
            let was = "given without a tensor";
            return Err(refuse(
                "snapshots",
                Presence,
                was,
                "it needs a tensor, unless the states are in a pool",
            ));
        }
    };
    let slots = to.shape[0];
    scan.snapshot_strides = check::state(
        name,
        to,
        state_shape(&batch.spec.heads, slots, layout),
        true,
    )?;
    check::ensure(slots <= i32::MAX as usize, || {
        let was = format!("{slots} slots");
        refuse(name, ArgumentKind::Shape, &was, "fewer than 2^31 slots")
    })?;
    let own = match scan.read_slots.is_null() {
        true => batch.sequences,
        false => 0,
    };
    let conflict = plan.snapshot_conflict(slots, snapshots.to.is_none(), own);
    check::ensure(conflict.is_none(), || {
        let was = format!("slot {}", conflict.unwrap_or_default());
        let allowed = format!("it must be below {slots}, and no slot of a sequence");
        refuse("snapshots", Value, &was, &allowed)
    })?;
    scan.snapshots = to.address;
    scan.snapshot_type = check::type_code(to.dtype);
    scan.snapshot_count = slots as i32;
    Ok(match layout {
        StateLayout::KeyMajor => 0,
        StateLayout::ValueMajor => abi::DWK_SNAPSHOT_VALUE_MAJOR,
    })
}
