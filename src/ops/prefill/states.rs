//! Arguments of `prefill_scan` for states: separate tensors, or slots of a pool.

use std::collections::HashSet;

use super::PrefillTensors;
use super::shape::Shape;
use crate::abi::{self, dwk_prefill_scan_args};
use crate::batch::PerSequence;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::runtime::Context;
use crate::state::{HostSlots, InitialState, StatePool, States, state_shape};
use crate::tensor::Buffer;
use crate::types::StateLayout;

/// Slots that a plan holds for all launches.
#[derive(Debug, Default)]
pub(super) struct PlanSlots {
    /// Slots of the sequences in the pool.
    pub(super) pool: Option<HostSlots>,
    /// Set of all slots in `pool`.
    pub(super) sequence_slots: HashSet<i32>,
    /// Snapshot slot of each chunk; -1: none.
    pub(super) snapshots: Option<Buffer<i32>>,
    /// Snapshot slots that are not -1.
    pub(super) snapshot_slots: Vec<i32>,
}

impl PlanSlots {
    /// Finds a snapshot slot that is not below `slots` or, if snapshots go to the pool (`in_pool`), that a sequence
    /// uses: a slot of the plan, or one below `own`, the slots of sequences without given slots.
    pub(super) fn snapshot_conflict(&self, slots: usize, in_pool: bool, own: usize) -> Option<i32> {
        let used = |slot: i32| (slot as usize) < own || self.sequence_slots.contains(&slot);
        let conflicts = |slot: &&i32| **slot as usize >= slots || (in_pool && used(**slot));
        self.snapshot_slots.iter().find(conflicts).copied()
    }
}

/// Checks states and slots and sets their arguments of `prefill_scan`. Returns the kernel's flags.
pub(super) fn lower(
    batch: &Shape,
    x: &PrefillTensors<'_>,
    plan: &PlanSlots,
    scan: &mut dwk_prefill_scan_args,
) -> Checked<u32> {
    let mut flags = 0;
    let mut has_initial_state = None;
    match &x.states {
        States::None => {}
        States::Separate { initial, last } => {
            if let Some(InitialState {
                state,
                has_initial_state: has,
            }) = initial
            {
                let shape = state_shape(&batch.spec.heads, batch.sequences, state.layout);
                scan.initial_strides = check::state("initial_state", &state.tensor, shape, false)?;
                scan.initial_state = state.tensor.address;
                scan.initial_type = check::type_code(state.tensor.dtype);
                flags |= initial_flag(state.layout);
                has_initial_state = has.as_ref();
            }
            if let Some(state) = last {
                let shape = state_shape(&batch.spec.heads, batch.sequences, state.layout);
                scan.final_strides = check::state("final_state", &state.tensor.0, shape, true)?;
                scan.final_state = state.tensor.0.address;
                scan.final_type = check::type_code(state.tensor.0.dtype);
                flags |= final_flag(state.layout);
            }
        }
        States::Pool {
            pool,
            has_initial_state: has,
        } => {
            flags |= lower_pool(batch, pool, plan, scan)?;
            has_initial_state = has.as_ref();
        }
    }
    if x.states.pool().is_none() {
        check::ensure(plan.pool.is_none(), || {
            let allowed = "it must be given: the plan has slots of a pool";
            ArgumentError::new("pool", ArgumentKind::Presence, "absent", allowed)
        })?;
    }
    if let Some(has) = has_initial_state {
        scan.has_initial_state = has.checked("has_initial_state", batch.sequences)?;
    }
    Ok(flags)
}

fn lower_pool(
    batch: &Shape,
    pool: &StatePool<'_>,
    plan: &PlanSlots,
    scan: &mut dwk_prefill_scan_args,
) -> Checked<u32> {
    let tensor = &pool.tensor.0;
    let slots = tensor.shape[0];
    scan.final_strides = check::state(
        "pool",
        tensor,
        state_shape(&batch.spec.heads, slots, pool.layout),
        true,
    )?;
    scan.initial_strides = scan.final_strides;
    scan.final_state = tensor.address;
    scan.initial_state = tensor.address;
    scan.final_type = check::type_code(tensor.dtype);
    scan.initial_type = scan.final_type;
    if let Some(slots) = &plan.pool {
        [scan.read_slots, scan.write_slots] = slots.lower(pool)?;
    } else {
        if let Some(slots) = &pool.slots {
            scan.read_slots = slots.checked("slots", batch.sequences)?;
        }
        scan.write_slots = match &pool.write_slots {
            Some(slots) => slots.checked("write_slots", batch.sequences)?,
            None => scan.read_slots,
        };
    }
    // If one of them is absent, sequence n has slot n.
    let all_have = scan.read_slots.is_null() || scan.write_slots.is_null();
    let least = if all_have { batch.sequences } else { 0 };
    check::ensure((least..1 << 31).contains(&slots), || {
        let was = format!("{slots} slots");
        let allowed = format!("at least {least} slots and fewer than 2^31");
        ArgumentError::new("pool", ArgumentKind::Shape, was, allowed)
    })?;
    scan.slots = slots as i32;
    Ok(initial_flag(pool.layout) | final_flag(pool.layout))
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

/// Checks that states, flags and slots with a known context belong to `context`.
pub(super) fn check_devices(x: &PrefillTensors<'_>, context: &Context) -> Checked<()> {
    let has = |has: &Option<PerSequence<'_, u8>>| match has {
        Some(has) => check::device("has_initial_state", has.owner(), context),
        None => Ok(()),
    };
    match &x.states {
        States::None => {}
        States::Separate { initial, last } => {
            if let Some(initial) = initial {
                check::device("initial_state", &initial.state.tensor.owner, context)?;
                has(&initial.has_initial_state)?;
            }
            if let Some(last) = last {
                check::device("final_state", &last.tensor.0.owner, context)?;
            }
        }
        States::Pool {
            pool,
            has_initial_state,
        } => {
            check::device("pool", &pool.tensor.0.owner, context)?;
            for (name, slots) in [("slots", &pool.slots), ("write_slots", &pool.write_slots)] {
                if let Some(slots) = slots {
                    check::device(name, slots.owner(), context)?;
                }
            }
            has(has_initial_state)?;
        }
    }
    if let Some(snapshots) = &x.snapshots {
        if let Some(to) = &snapshots.to {
            check::device("snapshots", &to.tensor.0.owner, context)?;
        }
        if let Some(slots) = &snapshots.slots {
            check::device("snapshot_slots", slots.owner(), context)?;
        }
    }
    Ok(())
}
