//! Gradients of a convolution: plans and launches.

use std::ffi::{c_int, c_void};
use std::ptr;

use deltawave::conv::{
    ConvBackward, ConvBackwardTensors, ConvInputMut, ConvSpec, ConvStates, ConvStatesMut,
};
use deltawave::error::{ArgumentKind, Result};
use deltawave::runtime::Context;
use deltawave::workspace::Workspace;

use crate::abi::{dw_conv, dw_conv_backward, dw_conv_backward_tensors, dw_tensor};
use crate::conv::{self, Layout, Projections, input, renamed, state_layout, x_layout};
use crate::lengths::Lengths;
use crate::read::{self, Argument};
use crate::status::{guard, guard_silent, refuse};

/// Value behind a `dw_conv_backward` handle.
struct Plan {
    context: Context,
    spec: ConvSpec,
    sequences: usize,
    plan: ConvBackward,
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_conv_backward_create(
    plan: *const dw_conv,
    backward: *mut *mut dw_conv_backward,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("backward", backward) }?;
        *out = ptr::null_mut();
        // SAFETY: as above.
        let forward = unsafe { read::reference("plan", plan.cast::<conv::Plan>()) }?;
        let made = Plan {
            context: forward.context.clone(),
            spec: forward.spec,
            sequences: forward.sequences,
            plan: ConvBackward::of(&forward.plan)?,
        };
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_conv_backward_destroy(backward: *mut dw_conv_backward) {
    guard_silent(|| {
        if !backward.is_null() {
            // SAFETY: `create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(backward.cast::<Plan>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_conv_backward_workspace_bytes(
    backward: *const dw_conv_backward,
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
pub unsafe extern "C" fn dw_conv_backward_launch(
    backward: *const dw_conv_backward,
    stream: *mut c_void,
    tensors: *const dw_conv_backward_tensors,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("backward", backward.cast::<Plan>()) }?;
        // SAFETY: as above.
        let t = unsafe { read::structure("tensors", tensors) }?;
        // SAFETY: as above; the caller passes tensors in valid memory.
        let arguments = unsafe { self::tensors(&t, plan) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { plan.context.borrow_stream(stream) };
        // SAFETY: the caller passes device memory that nothing else uses.
        let workspace = unsafe { Workspace::from_raw(t.workspace, t.workspace_bytes) };
        let outcome = plan.plan.launch(&stream, &arguments, workspace);
        outcome.map_err(|error| renamed(error, t.x_layout))
    })
}

/// Gradient of the projections: one packed tensor, or three; absent if all are null.
pub(crate) fn gradient(
    layout: i32,
    packed: *const dw_tensor,
    separate: [*const dw_tensor; 3],
    spec: &ConvSpec,
    argument: impl Fn(&'static str, *const dw_tensor) -> Argument,
) -> Result<Option<ConvInputMut<'static>>> {
    let layout = x_layout(layout)?;
    let [q, k, v] = separate;
    let separate = [("d_x_q", q), ("d_x_k", k), ("d_x_v", v)];
    if packed.is_null() && separate.iter().all(|(_, pointer)| pointer.is_null()) {
        return Ok(None);
    }
    let unused = match layout {
        Layout::Separate => &[("d_x", packed)][..],
        _ => &separate,
    };
    if let Some((name, _)) = unused.iter().find(|(_, pointer)| !pointer.is_null()) {
        let was = "given with an x_layout that does not write it";
        return Err(refuse(name, ArgumentKind::Presence, was, "it must be null").into());
    }
    let x = argument("d_x", packed);
    let [q, k, v] = separate.map(|(name, pointer)| argument(name, pointer));
    Ok(Some(match layout {
        Layout::Flat => ConvInputMut::flat(x.matrix_mut()?, spec)?,
        Layout::Interleaved => ConvInputMut::interleaved(x.matrix_mut()?, spec)?,
        Layout::Separate => ConvInputMut {
            q: q.blocks_mut()?,
            k: k.blocks_mut()?,
            v: v.blocks_mut()?,
        },
    }))
}

/// Tensors of a launch, from the caller's struct.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
unsafe fn tensors(
    t: &dw_conv_backward_tensors,
    plan: &Plan,
) -> Result<ConvBackwardTensors<'static>> {
    // SAFETY: the caller passes a null or valid pointer.
    let argument = |name, pointer| unsafe { Argument::new(name, pointer) };
    let given = |name, pointer| argument(name, pointer).optional();
    // SAFETY: the caller passes an array in the device's memory.
    let has = unsafe { read::numbers(t.has_initial_state, plan.sequences) };
    if has.is_some() && t.initial_state.is_null() {
        let was = "given without an initial_state";
        let allowed = "it needs an initial_state";
        return Err(refuse("has_initial_state", ArgumentKind::Presence, was, allowed).into());
    }
    let states = |name, pointer, layout_name, layout| {
        let layout = state_layout(layout_name, layout)?;
        let found = given(name, pointer).map(|argument| {
            let tensor = argument.conv_states()?;
            read::Checked::Ok(ConvStates { tensor, layout })
        });
        found.transpose()
    };
    let d_initial_layout = state_layout("d_initial_layout", t.d_initial_layout)?;
    let d_initial = given("d_initial_state", t.d_initial_state).map(|argument| {
        let tensor = argument.states_mut()?;
        read::Checked::Ok(ConvStatesMut {
            tensor,
            layout: d_initial_layout,
        })
    });
    Ok(ConvBackwardTensors {
        // SAFETY: as above.
        cu_seqlens: unsafe { Lengths::given(t.cu_seqlens) }?,
        x: input(
            &Projections {
                layout: t.x_layout,
                x: t.x,
                separate: [t.x_q, t.x_k, t.x_v],
            },
            &plan.spec,
            argument,
        )?,
        weight: argument("weight", t.weight).matrix()?,
        bias: given("bias", t.bias).map(Argument::vector).transpose()?,
        initial: states(
            "initial_state",
            t.initial_state,
            "initial_layout",
            t.initial_layout,
        )?,
        has_initial_state: has,
        d_q: argument("d_q", t.d_q).tokens()?,
        d_k: argument("d_k", t.d_k).tokens()?,
        d_v: argument("d_v", t.d_v).tokens()?,
        d_final: states(
            "d_final_state",
            t.d_final_state,
            "d_final_layout",
            t.d_final_layout,
        )?,
        d_x: gradient(
            t.x_layout,
            t.d_x,
            [t.d_x_q, t.d_x_k, t.d_x_v],
            &plan.spec,
            argument,
        )?,
        d_weight: given("d_weight", t.d_weight)
            .map(Argument::matrix_mut)
            .transpose()?,
        d_bias: given("d_bias", t.d_bias)
            .map(Argument::vector_mut)
            .transpose()?,
        d_initial: d_initial.transpose()?,
    })
}
