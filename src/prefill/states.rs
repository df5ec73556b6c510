//! Where prefill reads states and writes them: tensors of their own, or a pool.

use std::collections::{HashMap, HashSet};

use super::PrefillTensors;
use super::lower::Shape;
use crate::abi::{self, dwk_prefill_scan_args};
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind, Result};
use crate::runtime::Context;
use crate::sequences::PerSequence;
use crate::tensor::{Buffer, Tensor, TensorMut};
use crate::types::StateLayout;

/// States of all sequences and value heads.
#[derive(Clone, Debug)]
pub struct State<'a> {
    /// f32 or bf16, `[N, HV, K, V]` or `[N, HV, V, K]`.
    pub tensor: Tensor<'a, 4>,
    /// Which of the two.
    pub layout: StateLayout,
}

/// [`State`], to be written to.
#[derive(Debug)]
pub struct StateMut<'a> {
    /// f32 or bf16, `[N, HV, K, V]` or `[N, HV, V, K]`.
    pub tensor: TensorMut<'a, 4>,
    /// Which of the two.
    pub layout: StateLayout,
}

/// A pool of states, of which a launch reads some and writes some.
///
/// A slot that is negative is none, and so is one on the device that is beyond the pool. A sequence that has none to read
/// starts from zeros, one that has none to write leaves no state behind, and one that has neither is padding: its outputs
/// become zeros. A sequence without tokens leaves behind what it starts from. Slots that no sequence writes keep their bits.
///
/// No two sequences may write one slot, and none may read what another one writes. Of slots on the device that is up to
/// the caller. Those that the host knows are checked: [`Prefill::set_slots`](super::Prefill::set_slots) and
/// [`Decode::set_slots`](crate::decode::Decode::set_slots) refuse such conflicts, and a launch refuses slots beyond its pool.
#[derive(Debug)]
pub struct StatePool<'a> {
    /// f32 or bf16, `[slots, HV, K, V]` or `[slots, HV, V, K]`.
    pub tensor: TensorMut<'a, 4>,
    /// Which of the two.
    pub layout: StateLayout,
    /// The slot that each sequence starts from; absent: those of the plan or, where it has none, slot n for sequence n.
    pub slots: Option<PerSequence<'a, i32>>,
    /// The slot that each sequence leaves its state in; absent: the one that it starts from.
    pub write_slots: Option<PerSequence<'a, i32>>,
}

fn refuse(argument: &str, kind: ArgumentKind, was: &str, allowed: &str) -> ArgumentError {
    ArgumentError::new(argument, kind, was, allowed)
}

/// The slots that a plan has, for every launch.
#[derive(Debug, Default)]
pub(super) struct PlanSlots {
    /// Of the pool.
    pub(super) pool: Option<HostSlots>,
    /// All of these.
    pub(super) of_sequences: HashSet<i32>,
    /// Of the state after each chunk.
    pub(super) snapshots: Option<Buffer<i32>>,
    /// Those that are wanted.
    pub(super) of_snapshots: Vec<i32>,
}

impl PlanSlots {
    /// A snapshot's slot that a tensor of so many does not have or, if the tensor is the pool, that a sequence uses: one
    /// of the plan, or of the first `own`, which sequences without slots have.
    pub(super) fn snapshot_conflict(&self, slots: usize, in_pool: bool, own: usize) -> Option<i32> {
        let used = |slot: i32| (slot as usize) < own || self.of_sequences.contains(&slot);
        let conflicts = |slot: &&i32| **slot as usize >= slots || (in_pool && used(**slot));
        self.of_snapshots.iter().find(conflicts).copied()
    }
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

impl Shape {
    /// Checks states and slots, and makes the arguments of `prefill_scan` that are of them. Returns its flags.
    pub(super) fn lower_states(
        &self,
        x: &PrefillTensors<'_>,
        plan: &PlanSlots,
        scan: &mut dwk_prefill_scan_args,
    ) -> Checked<u32> {
        use ArgumentKind::Presence;
        let mut flags = 0;
        if let Some(state) = &x.initial_state {
            let shape = self.state_shape(self.sequences, state.layout);
            scan.initial_strides = check::state("initial_state", &state.tensor, shape, false)?;
            scan.initial_state = state.tensor.address;
            scan.initial_type = check::type_code(state.tensor.dtype);
            flags |= initial_flag(state.layout);
        }
        if let Some(state) = &x.final_state {
            let shape = self.state_shape(self.sequences, state.layout);
            scan.final_strides = check::state("final_state", &state.tensor.0, shape, true)?;
            scan.final_state = state.tensor.0.address;
            scan.final_type = check::type_code(state.tensor.0.dtype);
            flags |= final_flag(state.layout);
        }
        if let Some(pool) = &x.pool {
            check::ensure(x.initial_state.is_none() && x.final_state.is_none(), || {
                let was = "given with an initial_state or a final_state";
                refuse("pool", Presence, was, "it takes the place of both")
            })?;
            flags |= self.lower_pool(pool, plan, scan)?;
        } else {
            check::ensure(plan.pool.is_none(), || {
                refuse("pool", Presence, "absent", "the plan has slots of one")
            })?;
        }
        if let Some(has) = &x.has_initial_state {
            check::ensure(x.initial_state.is_some() || x.pool.is_some(), || {
                let was = "given without an initial_state";
                let allowed = "it is for batches with an initial_state or a pool";
                refuse("has_initial_state", Presence, was, allowed)
            })?;
            scan.has_initial_state = has.checked("has_initial_state", self.sequences)?;
        }
        Ok(flags)
    }

    fn lower_pool(
        &self,
        pool: &StatePool<'_>,
        plan: &PlanSlots,
        scan: &mut dwk_prefill_scan_args,
    ) -> Checked<u32> {
        let tensor = &pool.tensor.0;
        let slots = tensor.shape[0];
        scan.final_strides =
            check::state("pool", tensor, self.state_shape(slots, pool.layout), true)?;
        scan.initial_strides = scan.final_strides;
        scan.final_state = tensor.address;
        scan.initial_state = tensor.address;
        scan.final_type = check::type_code(tensor.dtype);
        scan.initial_type = scan.final_type;
        if let Some(slots) = &plan.pool {
            [scan.read_slots, scan.write_slots] = slots.lower(pool)?;
        } else {
            if let Some(slots) = &pool.slots {
                scan.read_slots = slots.checked("slots", self.sequences)?;
            }
            scan.write_slots = match &pool.write_slots {
                Some(slots) => slots.checked("write_slots", self.sequences)?,
                None => scan.read_slots,
            };
        }
        // Where one of them is absent, every sequence has a slot of its own.
        let all_have = scan.read_slots.is_null() || scan.write_slots.is_null();
        let least = if all_have { self.sequences } else { 0 };
        check::ensure((least..1 << 31).contains(&slots), || {
            let was = format!("{slots} slots");
            let allowed = format!("at least {least} slots and fewer than 2^31");
            refuse("pool", ArgumentKind::Shape, &was, &allowed)
        })?;
        scan.slots = slots as i32;
        Ok(initial_flag(pool.layout) | final_flag(pool.layout))
    }

    /// The shape of a tensor of `slots` states of every value head.
    pub(super) fn state_shape(&self, slots: usize, layout: StateLayout) -> [usize; 4] {
        let (heads, keys, values) = (
            self.spec.value_heads,
            self.spec.key_dim,
            self.spec.value_dim,
        );
        match layout {
            StateLayout::KeyMajor => [slots, heads, keys, values],
            StateLayout::ValueMajor => [slots, heads, values, keys],
        }
    }
}

fn initial_flag(layout: StateLayout) -> u32 {
    match layout {
        StateLayout::KeyMajor => 0,
        StateLayout::ValueMajor => abi::DWK_INITIAL_VALUE_MAJOR,
    }
}

fn final_flag(layout: StateLayout) -> u32 {
    match layout {
        StateLayout::KeyMajor => 0,
        StateLayout::ValueMajor => abi::DWK_FINAL_VALUE_MAJOR,
    }
}

/// States, flags and slots whose context is known must be of `context`.
pub(super) fn check_devices(x: &PrefillTensors<'_>, context: &Context) -> Checked<()> {
    let pool = x.pool.as_ref();
    let snapshots = x.snapshots.as_ref();
    let owners = [
        (
            "initial_state",
            x.initial_state.as_ref().map(|s| &s.tensor.owner),
        ),
        (
            "has_initial_state",
            x.has_initial_state.as_ref().map(|has| has.owner()),
        ),
        (
            "final_state",
            x.final_state.as_ref().map(|s| &s.tensor.0.owner),
        ),
        ("pool", pool.map(|p| &p.tensor.0.owner)),
        ("slots", pool.and_then(|p| Some(p.slots.as_ref()?.owner()))),
        (
            "write_slots",
            pool.and_then(|p| Some(p.write_slots.as_ref()?.owner())),
        ),
        (
            "snapshots",
            snapshots.and_then(|s| Some(&s.to.as_ref()?.tensor.0.owner)),
        ),
        (
            "snapshot_slots",
            snapshots.and_then(|s| Some(s.slots.as_ref()?.owner())),
        ),
    ];
    let mut known = owners
        .into_iter()
        .filter_map(|(name, owner)| Some((name, owner?)));
    known.try_for_each(|(name, owner)| check::device(name, owner, context))
}
