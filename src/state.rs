//! Recurrent states that a launch reads and writes: separate tensors, or slots of a pool.

use std::collections::HashMap;

use crate::batch::PerSequence;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::model::Heads;
use crate::runtime::Context;
use crate::tensor::{Buffer, Tensor, TensorMut};
use crate::types::StateLayout;

/// States of all sequences and value heads, one per sequence.
#[derive(Clone, Debug)]
pub struct State<'a> {
    /// f32, bf16 or fp16, `[N, HV, K, V]` or `[N, HV, V, K]`.
    pub tensor: Tensor<'a, 4>,
    /// Order of the last two dimensions.
    pub layout: StateLayout,
}

/// Mutable [`State`].
#[derive(Debug)]
pub struct StateMut<'a> {
    /// f32, bf16 or fp16, `[N, HV, K, V]` or `[N, HV, V, K]`.
    pub tensor: TensorMut<'a, 4>,
    /// Order of the last two dimensions.
    pub layout: StateLayout,
}

/// A pool of states. A launch reads some slots and writes some.
///
/// A negative slot means no slot, and so does a slot on the device beyond the pool. A sequence without a slot to read
/// starts from zeros. A sequence without a slot to write stores no state. A sequence with neither is padding: its
/// outputs become zeros. A sequence without tokens writes nothing. Slots that no sequence writes keep their bits.
///
/// No two sequences may write the same slot, and no sequence may read a slot that another one writes. The caller
/// ensures this for slots on the device. Slots on the host are checked:
/// [`Prefill::set_slots`](crate::prefill::Prefill::set_slots) and
/// [`Decode::set_slots`](crate::decode::Decode::set_slots) refuse such conflicts, and a launch refuses slots beyond its
/// pool.
#[derive(Debug)]
pub struct StatePool<'a> {
    /// f32, bf16 or fp16, `[slots, HV, K, V]` or `[slots, HV, V, K]`.
    pub tensor: TensorMut<'a, 4>,
    /// Order of the last two dimensions.
    pub layout: StateLayout,
    /// Slot that each sequence reads. Absent: the plan's slots or, if it has none, slot n for sequence n.
    pub slots: Option<PerSequence<'a, i32>>,
    /// Slot that each sequence writes. Absent: the slot that it reads.
    pub write_slots: Option<PerSequence<'a, i32>>,
}

/// Initial states of sequences.
#[derive(Clone, Debug)]
pub struct InitialState<'a> {
    /// A state per sequence.
    pub state: State<'a>,
    /// One byte per sequence. 0: the sequence starts from zeros and `state` is not read. Absent: every sequence has a
    /// state.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
}

/// States that a prefill reads and writes.
#[derive(Debug)]
pub enum States<'a> {
    /// Sequences start from zeros, and their final states are dropped.
    None,
    /// A state per sequence, in separate tensors.
    Separate {
        /// Absent: sequences start from zeros.
        initial: Option<InitialState<'a>>,
        /// States after the last token; for a sequence without tokens its initial state, or zeros. Absent: not stored.
        /// May be the memory of `initial` if type, layout and strides are equal.
        last: Option<StateMut<'a>>,
    },
    /// Slots of a pool, updated in place.
    Pool {
        /// The pool, and the slots of the sequences.
        pool: StatePool<'a>,
        /// One byte per sequence. 0: the sequence starts from zeros instead of its slot's contents. Absent: every
        /// sequence has a state.
        has_initial_state: Option<PerSequence<'a, u8>>,
    },
}

impl<'a> States<'a> {
    /// The pool, if states are in a pool.
    pub fn pool(&self) -> Option<&StatePool<'a>> {
        match self {
            States::Pool { pool, .. } => Some(pool),
            _ => None,
        }
    }
}

/// Shape of `slots` states of every value head.
pub(crate) fn state_shape(heads: &Heads, slots: usize, layout: StateLayout) -> [usize; 4] {
    match layout {
        StateLayout::KeyMajor => [slots, heads.value, heads.key_dim, heads.value_dim],
        StateLayout::ValueMajor => [slots, heads.value, heads.value_dim, heads.key_dim],
    }
}

fn refuse(argument: &str, kind: ArgumentKind, was: &str, allowed: &str) -> ArgumentError {
    ArgumentError::new(argument, kind, was, allowed)
}

/// Slots that the host knows, uploaded once for all launches of a plan.
#[derive(Debug)]
pub(crate) struct HostSlots {
    /// Slots to read, then slots to write.
    both: Buffer<i32>,
    /// Largest slot to read, and to write.
    largest: [i32; 2],
}

impl HostSlots {
    pub(crate) fn new(
        context: &Context,
        sequences: usize,
        read: &[i32],
        write: Option<&[i32]>,
    ) -> Result<Self> {
        let written = check_slots(sequences, read, write)?;
        Ok(HostSlots {
            both: context.upload(&[read, written].concat())?,
            largest: [read, written].map(|slots| slots.iter().copied().max().unwrap_or(-1)),
        })
    }

    /// Device addresses of the slots to read and to write. Checks that `pool` has all of them and was given no slots
    /// itself.
    pub(crate) fn lower(&self, pool: &StatePool<'_>) -> Checked<[*const i32; 2]> {
        let given = [&pool.slots, &pool.write_slots].map(Option::is_some);
        self.check(given, pool.tensor.0.shape[0])?;
        let read: *const i32 = self.both.address().cast_const().cast();
        Ok([read, read.wrapping_add(self.both.len() / 2)])
    }

    /// Checks that a launch was given no slots (`given`: to read, to write) and that its pool of `slots` slots has all
    /// of them.
    pub(crate) fn check(&self, given: [bool; 2], slots: usize) -> Checked<()> {
        let names = ["slots", "write_slots"];
        for ((name, given), largest) in names.into_iter().zip(given).zip(self.largest) {
            check::ensure(!given, || {
                let was = "given to a plan that already has slots";
                refuse(name, ArgumentKind::Presence, was, "it must be absent")
            })?;
            check::ensure(largest < 0 || (largest as usize) < slots, || {
                let was = format!("slot {largest}");
                let allowed =
                    format!("it must be below the pool's {slots} slots; negative: no slot");
                refuse(name, ArgumentKind::Value, &was, &allowed)
            })?;
        }
        Ok(())
    }

    /// Slots to read.
    pub(crate) fn read(&self) -> PerSequence<'_, i32> {
        PerSequence::from(&self.both).part(0..self.both.len() / 2)
    }
}

/// Checks slots that the host knows. Returns the slots to write.
fn check_slots<'a>(
    sequences: usize,
    read: &'a [i32],
    write: Option<&'a [i32]>,
) -> Checked<&'a [i32]> {
    let (name, written) = write.map_or(("slots", read), |write| ("write_slots", write));
    for (name, slots) in [("slots", read), (name, written)] {
        check::ensure(slots.len() == sequences, || {
            let was = format!("{} slots", slots.len());
            let allowed = format!("one for each of the {sequences} sequences");
            ArgumentError::new(name, ArgumentKind::Shape, was, allowed)
        })?;
    }
    let conflict = |slot: i32, was: String| {
        let was = format!("slot {slot}, {was}");
        refuse(
            name,
            ArgumentKind::Value,
            &was,
            "a slot that is written must belong to one sequence",
        )
    };
    let mut writers = HashMap::with_capacity(sequences);
    for (n, &slot) in written.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
        if let Some(other) = writers.insert(slot, n) {
            return Err(conflict(
                slot,
                format!("written by the sequences {other} and {n}"),
            ));
        }
    }
    for (n, slot) in read.iter().enumerate() {
        if let Some(&other) = writers.get(slot).filter(|other| **other != n) {
            return Err(conflict(
                *slot,
                format!("read by sequence {n} and written by sequence {other}"),
            ));
        }
    }
    Ok(written)
}
