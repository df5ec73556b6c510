//! Backward of a prefill that several ranks share: plans and the launches of both stages.

use std::ffi::{c_int, c_void};
use std::ptr;

use deltawave::error::{ArgumentKind, Result};
use deltawave::prefill::{BackwardTensors, ParallelPrefillBackward};
use deltawave::runtime::{Context, Stream};
use deltawave::workspace::Workspace;

use crate::abi::{
    dw_parallel_prefill, dw_parallel_prefill_backward, dw_parallel_prefill_backward_sizes,
    dw_prefill_backward_tensors,
};
use crate::backward;
use crate::parallel;
use crate::read;
use crate::status::{guard, guard_silent, refuse};

/// Value behind a `dw_parallel_prefill_backward` handle.
pub(crate) struct Plan {
    context: Context,
    fragments: usize,
    block: usize,
    pub(crate) plan: ParallelPrefillBackward,
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_backward_create(
    plan: *const dw_parallel_prefill,
    backward: *mut *mut dw_parallel_prefill_backward,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("backward", backward) }?;
        *out = ptr::null_mut();
        // SAFETY: as above.
        let forward = unsafe { read::reference("plan", plan.cast::<parallel::Plan>()) }?;
        let made = Plan {
            context: forward.context.clone(),
            fragments: forward.fragments.len(),
            block: forward.block,
            plan: ParallelPrefillBackward::of(&forward.plan)?,
        };
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_backward_destroy(
    backward: *mut dw_parallel_prefill_backward,
) {
    guard_silent(|| {
        if !backward.is_null() {
            // SAFETY: `create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(backward.cast::<Plan>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_backward_get_sizes(
    backward: *const dw_parallel_prefill_backward,
    sizes: *mut dw_parallel_prefill_backward_sizes,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (plan, size) = unsafe {
            (
                read::reference("backward", backward.cast::<Plan>())?,
                read::size_of_caller("sizes", sizes)?,
            )
        };
        let x = &plan.plan;
        let filled = dw_parallel_prefill_backward_sizes {
            size,
            summary_bytes: x.summary_bytes(),
            gathered_bytes: x.gathered_bytes(),
            workspace_bytes: x.workspace_bytes(),
            fragments: plan.fragments as i64,
            block: plan.block as i64,
        };
        // SAFETY: the caller's struct has `size` bytes.
        unsafe { parallel::fill(&filled, sizes, size) };
        Ok(())
    })
}

/// Common body of both stages, and of all steps in one call.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
pub(crate) unsafe fn launch(
    backward: *const dw_parallel_prefill_backward,
    stream: *mut c_void,
    tensors: *const dw_prefill_backward_tensors,
    stage: impl FnOnce(&Plan, &Stream, &BackwardTensors<'_>, Workspace<'_>) -> Result<()>,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("backward", backward.cast::<Plan>()) }?;
        // SAFETY: as above.
        let t = unsafe { read::structure("tensors", tensors) }?;
        if !t.context.is_null() {
            let allowed = "it must be NULL: a prefill over ranks saves no context";
            return Err(refuse("context", ArgumentKind::Presence, "given", allowed).into());
        }
        // SAFETY: as above; the caller passes tensors in valid memory.
        let arguments = unsafe { backward::tensors(&t, plan.fragments) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { plan.context.borrow_stream(stream) };
        // SAFETY: the caller passes device memory that nothing else uses.
        let workspace = unsafe { Workspace::from_raw(t.workspace, t.workspace_bytes) };
        stage(plan, &stream, &arguments, workspace)
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_backward_summarise_launch(
    backward: *const dw_parallel_prefill_backward,
    stream: *mut c_void,
    tensors: *const dw_prefill_backward_tensors,
    summary: *mut c_void,
    summary_bytes: usize,
) -> c_int {
    let stage =
        |plan: &Plan, stream: &Stream, t: &BackwardTensors<'_>, workspace: Workspace<'_>| {
            // SAFETY: the caller passes device memory that nothing else uses.
            let summary = unsafe { Workspace::from_raw(summary, summary_bytes) };
            plan.plan.summarise_launch(stream, t, summary, workspace)
        };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { launch(backward, stream, tensors, stage) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_backward_finish_launch(
    backward: *const dw_parallel_prefill_backward,
    stream: *mut c_void,
    tensors: *const dw_prefill_backward_tensors,
    gathered: *const c_void,
    gathered_bytes: usize,
) -> c_int {
    let stage =
        |plan: &Plan, stream: &Stream, t: &BackwardTensors<'_>, workspace: Workspace<'_>| {
            // SAFETY: the caller passes device memory that nothing else writes.
            let gathered = unsafe { Workspace::from_raw(gathered.cast_mut(), gathered_bytes) };
            plan.plan.finish_launch(stream, t, gathered, workspace)
        };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { launch(backward, stream, tensors, stage) }
}
