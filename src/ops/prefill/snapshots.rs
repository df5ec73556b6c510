//! States in the course of sequences, for prefix caches.

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

/// A state in the course of a sequence, and the slot that it goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Snapshot {
    /// Of the batch.
    pub sequence: usize,
    /// Tokens of the sequence that the state is of: a multiple of [`CHUNK`], at least that.
    pub tokens: usize,
    /// No other snapshot's.
    pub slot: usize,
}

/// Where states in the course of sequences are written.
///
/// A sequence that is continued from such a state in f32, by a plan that cuts neither run into segments, has the bits of
/// the whole: the state is the one that the walk goes on with. After a sequence's last chunk it is the final state. Cut
/// sequences and bf16 have their usual accuracy.
#[derive(Debug)]
pub struct Snapshots<'a> {
    /// f32 or bf16, `[slots, HV, K, V]` or `[slots, HV, V, K]`; absent: slots of the pool, none of which a sequence of the
    /// batch reads or writes.
    pub to: Option<StateMut<'a>>,
    /// The slot of the state after each chunk, negative or beyond the tensor where it is not wanted, none twice: chunk c
    /// of sequence n is entry `cu_seqlens[n] / 64 + n + c` of [`Prefill::chunk_entries`](super::Prefill::chunk_entries).
    /// Absent: the plan has them.
    pub slots: Option<PerSequence<'a, i32>>,
}

fn refuse(argument: &str, kind: ArgumentKind, was: &str, allowed: &str) -> ArgumentError {
    ArgumentError::new(argument, kind, was, allowed)
}

/// The snapshots after every so many tokens, sequence by sequence, in consecutive slots.
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
        let allowed = format!("a multiple of {CHUNK}, at least that");
        refuse("snapshots", ArgumentKind::Value, &was, &allowed)
    })
}

/// The slot of the state after each chunk, -1 where it is not wanted.
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
            value(was, "a state goes to one slot")
        })?;
        *entry = slot as i32;
    }
    Ok(table)
}

/// Checks snapshots, and makes the arguments of `prefill_scan` that are of them. Returns its flags.
pub(super) fn lower(
    batch: &Shape,
    x: &PrefillTensors<'_>,
    plan: &PlanSlots,
    scan: &mut dwk_prefill_scan_args,
) -> Checked<u32> {
    use ArgumentKind::{Presence, Value};
    let Some(snapshots) = &x.snapshots else {
        check::ensure(plan.snapshots.is_none(), || {
            let allowed = "the plan has slots of them";
            refuse("snapshots", Presence, "absent", allowed)
        })?;
        return Ok(0);
    };
    scan.snapshot_slots = match (&snapshots.slots, &plan.snapshots) {
        (Some(slots), None) => slots.checked("snapshot_slots", batch.chunk_entries())?,
        (None, Some(table)) => table.address().cast_const().cast(),
        (given, _) => {
            let (was, allowed) = match given {
                Some(_) => ("given to a plan that has them", "they must be absent"),
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
                "only a pool takes its place",
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
        let allowed = format!("a slot of the {slots}, and of no sequence");
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
