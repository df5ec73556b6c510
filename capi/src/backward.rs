//! Backward of a prefill: plans and launches.

use std::ffi::{c_int, c_void};
use std::ptr;

use deltawave::batch::PerSequence;
use deltawave::error::ArgumentKind;
use deltawave::prefill::{BackwardTensors, PrefillBackward};
use deltawave::runtime::Context;
use deltawave::state::{InitialState, State, StateMut};
use deltawave::workspace::Workspace;

use crate::abi::{dw_prefill, dw_prefill_backward, dw_prefill_backward_tensors};
use crate::lengths::Lengths;
use crate::prefill::{self, Gates, gating};
use crate::read::{self, Argument, Checked};
use crate::status::{guard, guard_silent, refuse};

/// Value behind a `dw_prefill_backward` handle.
struct Plan {
    context: Context,
    sequences: usize,
    plan: PrefillBackward,
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_backward_create(
    plan: *const dw_prefill,
    backward: *mut *mut dw_prefill_backward,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("backward", backward) }?;
        *out = ptr::null_mut();
        // SAFETY: as above.
        let forward = unsafe { read::reference("plan", plan.cast::<prefill::Plan>()) }?;
        let made = Plan {
            context: forward.context.clone(),
            sequences: forward.sequences,
            plan: PrefillBackward::of(&forward.plan)?,
        };
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_backward_destroy(backward: *mut dw_prefill_backward) {
    guard_silent(|| {
        if !backward.is_null() {
            // SAFETY: `create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(backward.cast::<Plan>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_backward_workspace_bytes(
    backward: *const dw_prefill_backward,
    bytes: *mut usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("bytes", bytes) }?;
        // SAFETY: as above.
        let plan = unsafe { read::reference("backward", backward.cast::<Plan>()) }?;
        *out = plan.plan.workspace_bytes();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_backward_launch(
    backward: *const dw_prefill_backward,
    stream: *mut c_void,
    tensors: *const dw_prefill_backward_tensors,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("backward", backward.cast::<Plan>()) }?;
        // SAFETY: as above.
        let t = unsafe { read::structure("tensors", tensors) }?;
        // SAFETY: as above; the caller passes tensors in valid memory.
        let arguments = unsafe { self::tensors(&t, plan.sequences) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { plan.context.borrow_stream(stream) };
        // SAFETY: the caller passes device memory that nothing else uses.
        let workspace = unsafe { Workspace::from_raw(t.workspace, t.workspace_bytes) };
        if t.context.is_null() {
            return plan.plan.launch(&stream, &arguments, workspace);
        }
        // SAFETY: as above.
        let context = unsafe { Workspace::from_raw(t.context, t.context_bytes) };
        (plan.plan).launch_saved(&stream, &arguments, context, workspace)
    })
}

/// Tensors of a launch, from the caller's struct.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
pub(crate) unsafe fn tensors(
    t: &dw_prefill_backward_tensors,
    sequences: usize,
) -> Checked<BackwardTensors<'static>> {
    // SAFETY: the caller passes a null or valid pointer.
    let argument = |name, pointer| unsafe { Argument::new(name, pointer) };
    let given = |name, pointer| argument(name, pointer).optional();
    let initial_layout = read::layout("initial_layout", t.initial_layout)?;
    let d_final_layout = read::layout("d_final_layout", t.d_final_layout)?;
    let d_initial_layout = read::layout("d_initial_layout", t.d_initial_layout)?;
    // SAFETY: as above.
    let has = unsafe { PerSequence::from_raw(t.has_initial_state, sequences) };
    let has_initial_state = (!t.has_initial_state.is_null()).then_some(has);
    if has_initial_state.is_some() && t.initial_state.is_null() {
        return Err(refuse(
            "has_initial_state",
            ArgumentKind::Presence,
            "given without an initial_state",
            "it needs an initial_state",
        ));
    }
    let initial = given("initial_state", t.initial_state).map(|argument| {
        let tensor = argument.state()?;
        Checked::Ok(InitialState {
            state: State {
                tensor,
                layout: initial_layout,
            },
            has_initial_state,
        })
    });
    let d_final = given("d_final_state", t.d_final_state).map(|argument| {
        let tensor = argument.state()?;
        Checked::Ok(State {
            tensor,
            layout: d_final_layout,
        })
    });
    let d_initial = given("d_initial_state", t.d_initial_state).map(|argument| {
        let tensor = argument.state_mut()?;
        Checked::Ok(StateMut {
            tensor,
            layout: d_initial_layout,
        })
    });
    let tokens = |name, pointer| given(name, pointer).map(Argument::tokens_mut).transpose();
    let scalars = |name, pointer| given(name, pointer).map(Argument::scalars_mut).transpose();
    let per_head = |name, pointer| given(name, pointer).map(Argument::per_head_mut).transpose();
    Ok(BackwardTensors {
        // SAFETY: as above.
        cu_seqlens: unsafe { Lengths::given(t.cu_seqlens) }?,
        q: argument("q", t.q).tokens()?,
        k: argument("k", t.k).tokens()?,
        v: argument("v", t.v).tokens()?,
        gating: gating(
            &Gates {
                g: t.g,
                beta: t.beta,
                a: t.a,
                b: t.b,
                a_log: t.a_log,
                dt_bias: t.dt_bias,
                allow_neg_eigval: t.allow_neg_eigval,
            },
            argument,
        )?,
        initial: initial.transpose()?,
        d_o: argument("d_o", t.d_o).tokens()?,
        d_final: d_final.transpose()?,
        d_q: tokens("d_q", t.d_q)?,
        d_k: tokens("d_k", t.d_k)?,
        d_v: tokens("d_v", t.d_v)?,
        d_g: scalars("d_g", t.d_g)?,
        d_beta: scalars("d_beta", t.d_beta)?,
        d_a_log: per_head("d_a_log", t.d_a_log)?,
        d_dt_bias: per_head("d_dt_bias", t.d_dt_bias)?,
        d_initial: d_initial.transpose()?,
    })
}
