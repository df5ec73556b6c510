//! Recurrent states: where a launch reads and writes them, as tensors of their own or as slots of a pool.

use std::collections::HashMap;

use crate::batch::PerSequence;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::model::Heads;
use crate::runtime::Context;
use crate::tensor::{Buffer, Tensor, TensorMut};
use crate::types::StateLayout;

/// States of all sequences and value heads.
#[derive(Clone, Debug)]
pub struct State<'a> {
    /// f32 or bf16, `[N, HV, K, V]` or `[N, HV, V, K]`.
    pub tensor: Tensor<'a, 4>,
    /// Order of the last two dimensions.
    pub layout: StateLayout,
}

/// [`State`], to be written to.
#[derive(Debug)]
pub struct StateMut<'a> {
    /// f32 or bf16, `[N, HV, K, V]` or `[N, HV, V, K]`.
    pub tensor: TensorMut<'a, 4>,
    /// Order of the last two dimensions.
    pub layout: StateLayout,
}

/// A pool of states, of which a launch reads some and writes some.
///
/// A slot that is negative is none, and so is one on the device that is beyond the pool. A sequence that has none to read
/// starts from zeros, one that has none to write leaves no state behind, and one that has neither is padding: its outputs
/// become zeros. A sequence without tokens writes nothing, whatever it starts from. Slots that no sequence writes keep their
/// bits.
///
/// No two sequences may write one slot, and none may read what another one writes. Of slots on the device that is up to
/// the caller. Those that the host knows are checked: [`Prefill::set_slots`](crate::prefill::Prefill::set_slots) and
/// [`Decode::set_slots`](crate::decode::Decode::set_slots) refuse such conflicts, and a launch refuses slots beyond its pool.
#[derive(Debug)]
pub struct StatePool<'a> {
    /// f32 or bf16, `[slots, HV, K, V]` or `[slots, HV, V, K]`.
    pub tensor: TensorMut<'a, 4>,
    /// Order of the last two dimensions.
    pub layout: StateLayout,
    /// The slot that each sequence starts from; absent: those of the plan or, where it has none, slot n for sequence n.
    pub slots: Option<PerSequence<'a, i32>>,
    /// The slot that each sequence leaves its state in; absent: the one that it starts from.
    pub write_slots: Option<PerSequence<'a, i32>>,
}

/// The states that sequences start from.
#[derive(Clone, Debug)]
pub struct InitialState<'a> {
    /// A state per sequence.
    pub state: State<'a>,
    /// One byte per sequence, 0: it starts from zeros whatever `state` holds; absent: every sequence has a state.
    pub has_initial_state: Option<PerSequence<'a, u8>>,
}

/// Where a prefill reads and writes states.
#[derive(Debug)]
pub enum States<'a> {
    /// Sequences start from zeros, and their final states are dropped.
    None,
    /// A state per sequence, in tensors of their own.
    Separate {
        /// Absent: sequences start from zeros.
        initial: Option<InitialState<'a>>,
        /// The states after the last token; absent: not wanted. For a sequence without tokens its
        /// initial state, or zeros. It may be
        /// the memory of `initial`, where both have the same type, layout and strides.
        last: Option<StateMut<'a>>,
    },
    /// Slots of a pool, updated in place.
    Pool {
        /// The pool, and the slots of the sequences.
        pool: StatePool<'a>,
        /// One byte per sequence, 0: it starts from zeros whatever its slot holds; absent: every sequence has a state.
        has_initial_state: Option<PerSequence<'a, u8>>,
    },
}

impl<'a> States<'a> {
    /// The pool, where states lie in one.
    pub fn pool(&self) -> Option<&StatePool<'a>> {
        match self {
            States::Pool { pool, .. } => Some(pool),
            _ => None,
        }
    }
}

/// The shape of `slots` states of every value head.
pub(crate) fn state_shape(heads: &Heads, slots: usize, layout: StateLayout) -> [usize; 4] {
    match layout {
        StateLayout::KeyMajor => [slots, heads.value, heads.key_dim, heads.value_dim],
        StateLayout::ValueMajor => [slots, heads.value, heads.value_dim, heads.key_dim],
    }
}

fn refuse(argument: &str, kind: ArgumentKind, was: &str, allowed: &str) -> ArgumentError {
    ArgumentError::new(argument, kind, was, allowed)
}

/// Slots of a pool that the host knows, uploaded once for all launches of a plan.
#[derive(Debug)]
pub(crate) struct HostSlots {
    /// Those that are read, then those that are written.
    both: Buffer<i32>,
    /// The largest of each.
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

    /// The slots that are read and those that are written, on the device, for a pool that has all of them and none of its
    /// own.
    pub(crate) fn lower(&self, pool: &StatePool<'_>) -> Checked<[*const i32; 2]> {
        let given = [&pool.slots, &pool.write_slots].map(Option::is_some);
        self.check(given, pool.tensor.0.shape[0])?;
        let read: *const i32 = self.both.address().cast_const().cast();
        Ok([read, read.wrapping_add(self.both.len() / 2)])
    }

    /// Whether a launch was given slots for reading and for writing, and how many slots its pool has.
    pub(crate) fn check(&self, given: [bool; 2], slots: usize) -> Checked<()> {
        let names = ["slots", "write_slots"];
        for ((name, given), largest) in names.into_iter().zip(given).zip(self.largest) {
            check::ensure(!given, || {
                let was = "given to a plan that has its slots";
                refuse(name, ArgumentKind::Presence, was, "it must be absent")
            })?;
            check::ensure(largest < 0 || (largest as usize) < slots, || {
                let was = format!("slot {largest}");
                let allowed = format!("the pool has {slots} slots; a negative one is none");
                refuse(name, ArgumentKind::Value, &was, &allowed)
            })?;
        }
        Ok(())
    }

    /// Those that are read.
    pub(crate) fn read(&self) -> PerSequence<'_, i32> {
        PerSequence::from(&self.both).part(0..self.both.len() / 2)
    }
}

/// Checks slots that the host knows, and returns those that are written.
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
            "a slot that is written must be of one sequence",
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
