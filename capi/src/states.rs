//! Prefill's pools of states, and snapshots.

use deltawave::error::ArgumentKind;
use deltawave::prefill::Snapshots;
use deltawave::state::{StateMut, StatePool};

use crate::abi::dw_prefill_tensors;
use crate::read::{self, Argument, Checked, numbers};
use crate::status::refuse;

/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
pub(crate) unsafe fn pool(
    t: &dw_prefill_tensors,
    sequences: usize,
) -> Checked<Option<StatePool<'static>>> {
    let layout = read::layout("pool_layout", t.pool_layout)?;
    // SAFETY: the caller passes null or valid pointers.
    let (pool, slots, write_slots) = unsafe {
        (
            Argument::new("pool", t.pool).optional(),
            numbers(t.slots, sequences),
            numbers(t.write_slots, sequences),
        )
    };
    let Some(pool) = pool else {
        for (name, given) in [("slots", slots), ("write_slots", write_slots)] {
            if given.is_some() {
                let (was, allowed) = ("given without a pool", "it needs a pool");
                return Err(refuse(name, ArgumentKind::Presence, was, allowed));
            }
        }
        return Ok(None);
    };
    Ok(Some(StatePool {
        tensor: pool.state_mut()?,
        layout,
        slots,
        write_slots,
    }))
}

/// Snapshots of a launch. `planned`: the plan has snapshots, so that the launch may give none.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
pub(crate) unsafe fn snapshots(
    t: &dw_prefill_tensors,
    entries: usize,
    planned: bool,
) -> Checked<Option<Snapshots<'static>>> {
    let layout = read::layout("snapshot_layout", t.snapshot_layout)?;
    // SAFETY: the caller passes null or valid pointers.
    let (to, slots) = unsafe {
        (
            Argument::new("snapshots", t.snapshots).optional(),
            numbers(t.snapshot_slots, entries),
        )
    };
    let to = match to {
        Some(to) => Some(StateMut {
            tensor: to.state_mut()?,
            layout,
        }),
        None => None,
    };
    let wanted = planned || to.is_some() || slots.is_some();
    Ok(wanted.then_some(Snapshots { to, slots }))
}
