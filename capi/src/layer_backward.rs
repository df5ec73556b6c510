//! Gradients of a layer: plans and launches.

use std::ffi::{c_int, c_void};
use std::ptr;

use deltawave::conv::{ConvInputMut, ConvStates, ConvStatesMut};
use deltawave::error::{ArgumentKind, Result};
use deltawave::layer::{
    LayerBackward, LayerBackwardTensors, LayerInitial, LayerSpec, LayerWeightGradients,
    LayerWeights,
};
use deltawave::runtime::Context;
use deltawave::state::{State, StateMut};
use deltawave::workspace::Workspace;

use crate::abi::{dw_layer, dw_layer_backward, dw_layer_backward_tensors};
use crate::conv::{self, Layout, Projections};
use crate::conv_backward::gradient;
use crate::layer::{self, renamed, z};
use crate::lengths::Lengths;
use crate::read::{self, Argument, Checked, numbers};
use crate::status::{guard, guard_silent, refuse};

/// Value behind a `dw_layer_backward` handle.
struct Plan {
    context: Context,
    spec: LayerSpec,
    sequences: usize,
    plan: LayerBackward,
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_layer_backward_create(
    plan: *const dw_layer,
    backward: *mut *mut dw_layer_backward,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("backward", backward) }?;
        *out = ptr::null_mut();
        // SAFETY: as above.
        let forward = unsafe { read::reference("plan", plan.cast::<layer::Plan>()) }?;
        let made = Plan {
            context: forward.context.clone(),
            spec: forward.spec,
            sequences: forward.sequences,
            plan: LayerBackward::of(&forward.plan)?,
        };
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_layer_backward_destroy(backward: *mut dw_layer_backward) {
    guard_silent(|| {
        if !backward.is_null() {
            // SAFETY: `create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(backward.cast::<Plan>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_layer_backward_workspace_bytes(
    backward: *const dw_layer_backward,
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
pub unsafe extern "C" fn dw_layer_backward_launch(
    backward: *const dw_layer_backward,
    stream: *mut c_void,
    tensors: *const dw_layer_backward_tensors,
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
        outcome.map_err(|error| conv::renamed(renamed(error), t.x_layout))
    })
}

/// Tensors of a launch, from the caller's struct.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
unsafe fn tensors(
    t: &dw_layer_backward_tensors,
    plan: &Plan,
) -> Result<LayerBackwardTensors<'static>> {
    // SAFETY: the caller passes a null or valid pointer.
    let argument = |name, pointer| unsafe { Argument::new(name, pointer) };
    let given = |name, pointer| argument(name, pointer).optional();
    let vector = |name, pointer| given(name, pointer).map(Argument::vector).transpose();
    let sums = |name, pointer| given(name, pointer).map(Argument::vector_mut).transpose();
    let conv_layout = conv::state_layout("conv_layout", t.conv_layout)?;
    let layout = read::layout("pool_layout", t.pool_layout)?;
    let spec = plan.spec.conv();
    let conv_states = |name, pointer| {
        let found = given(name, pointer).map(|argument| {
            let tensor = argument.conv_states()?;
            Checked::Ok(ConvStates {
                tensor,
                layout: conv_layout,
            })
        });
        found.transpose()
    };
    let states = |name, pointer| {
        let found = given(name, pointer).map(|argument| {
            let tensor = argument.state()?;
            Checked::Ok(State { tensor, layout })
        });
        found.transpose()
    };
    // SAFETY: the caller passes an array in the device's memory.
    let has_initial_state = unsafe { numbers(t.has_initial_state, plan.sequences) };
    let initial = match (
        conv_states("initial_conv_state", t.initial_conv_state)?,
        states("initial_state", t.initial_state)?,
    ) {
        (Some(conv), Some(recurrent)) => Some(LayerInitial {
            conv,
            recurrent,
            has_initial_state,
        }),
        (None, None) if has_initial_state.is_some() => {
            let was = "given without initial states";
            let allowed = "it needs initial_conv_state and initial_state";
            return Err(refuse("has_initial_state", ArgumentKind::Presence, was, allowed).into());
        }
        (None, None) => None,
        (conv, _) => {
            let names = ["initial_conv_state", "initial_state"];
            let [missing, other] = match conv {
                None => names,
                Some(_) => [names[1], names[0]],
            };
            let allowed = format!("it must be given with {other}");
            return Err(refuse(missing, ArgumentKind::Presence, "absent", allowed).into());
        }
    };
    let separate = [t.d_x_q, t.d_x_k, t.d_x_v];
    let d_x = gradient(t.x_layout, t.d_x, separate, &spec, argument)?;
    let d_z = match given("d_z", t.d_z) {
        Some(d_z) => Some(d_z.blocks_mut()?),
        None if t.z.is_null() && !t.d_x.is_null() => {
            let rows = argument("d_x", t.d_x).matrix_mut()?;
            Some(match conv::x_layout(t.x_layout)? {
                Layout::Interleaved => ConvInputMut::interleaved_z(rows, &spec)?,
                _ => ConvInputMut::flat_z(rows, &spec)?,
            })
        }
        None => None,
    };
    let scalars = |name, pointer| {
        given(name, pointer)
            .map(Argument::scalars_in_blocks_mut)
            .transpose()
    };
    let d_initial_conv = given("d_initial_conv_state", t.d_initial_conv_state).map(|argument| {
        let tensor = argument.states_mut()?;
        Checked::Ok(ConvStatesMut {
            tensor,
            layout: conv_layout,
        })
    });
    let d_initial = given("d_initial_state", t.d_initial_state).map(|argument| {
        let tensor = argument.state_mut()?;
        Checked::Ok(StateMut { tensor, layout })
    });
    let conv_weight = given("d_conv_weight", t.d_conv_weight);
    Ok(LayerBackwardTensors {
        // SAFETY: as above.
        cu_seqlens: unsafe { Lengths::given(t.cu_seqlens) }?,
        x: conv::input(
            &Projections {
                layout: t.x_layout,
                x: t.x,
                separate: [t.x_q, t.x_k, t.x_v],
            },
            &spec,
            argument,
        )?,
        z: z([t.z, t.x], t.x_layout, &plan.spec, argument)?,
        a: argument("a", t.a).scalars_in_blocks()?,
        b: argument("b", t.b).scalars_in_blocks()?,
        weights: LayerWeights {
            conv: argument("conv_weight", t.conv_weight).matrix()?,
            conv_bias: vector("conv_bias", t.conv_bias)?,
            a_log: argument("a_log", t.a_log).per_head()?,
            dt_bias: vector("dt_bias", t.dt_bias)?,
            norm: vector("norm_weight", t.norm_weight)?,
        },
        initial,
        o: argument("o", t.o).tokens()?,
        d_y: argument("d_y", t.d_y).tokens()?,
        d_final_conv: conv_states("d_final_conv_state", t.d_final_conv_state)?,
        d_final_recurrent: states("d_final_state", t.d_final_state)?,
        d_x,
        d_z,
        d_a: scalars("d_a", t.d_a)?,
        d_b: scalars("d_b", t.d_b)?,
        d_weights: LayerWeightGradients {
            conv: conv_weight.map(Argument::matrix_mut).transpose()?,
            conv_bias: sums("d_conv_bias", t.d_conv_bias)?,
            a_log: sums("d_a_log", t.d_a_log)?,
            dt_bias: sums("d_dt_bias", t.d_dt_bias)?,
            norm: sums("d_norm_weight", t.d_norm_weight)?,
        },
        d_initial_conv: d_initial_conv.transpose()?,
        d_initial_recurrent: d_initial.transpose()?,
    })
}
