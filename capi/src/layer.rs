//! Layer: plans and launches.

use std::ffi::{c_int, c_void};
use std::ptr;

use deltawave::conv::ConvInput;
use deltawave::error::{ArgumentError, ArgumentKind, Error, Result};
use deltawave::layer::{Layer, LayerSpec, LayerStates, LayerTensors, LayerWeights};
use deltawave::model::Heads;
use deltawave::runtime::Context;
use deltawave::tensor::Tensor;
use deltawave::workspace::Workspace;

use crate::abi::{self, dw_context, dw_layer, dw_layer_spec, dw_layer_tensors, dw_lengths};
use crate::context::context;
use crate::conv::{self, Projections};
use crate::lengths::Lengths;
use crate::norm::output_gate;
use crate::prefill::{heads_map, path};
use crate::read::{self, Argument, Checked, numbers};
use crate::status::{self, guard, guard_silent, refuse};

/// Value behind a `dw_layer` handle.
pub(crate) struct Plan {
    pub(crate) context: Context,
    pub(crate) spec: LayerSpec,
    pub(crate) sequences: usize,
    pub(crate) plan: Layer,
}

fn spec(s: &dw_layer_spec) -> Checked<LayerSpec> {
    let segments = read::natural("segments", s.segments)?;
    Ok(LayerSpec {
        dtype: read::dtype("dtype", s.dtype)?,
        heads: Heads {
            key: read::natural("key_heads", s.key_heads)?,
            value: read::natural("value_heads", s.value_heads)?,
            key_dim: read::natural("key_dim", s.key_dim)?,
            value_dim: read::natural("value_dim", s.value_dim)?,
            map: heads_map(s.head_map)?,
        },
        width: read::natural("width", s.width)?,
        qk_l2norm: read::flag("qk_l2norm", s.qk_l2norm)?,
        scale: (s.scale != 0.0).then_some(s.scale),
        allow_neg_eigval: read::flag("allow_neg_eigval", s.allow_neg_eigval)?,
        eps: s.eps,
        gate: output_gate("gate", s.gate)?,
        segments: (segments > 0).then_some(segments),
        path: path(s.path)?,
    })
}

/// Makes a plan: the common body of its constructors.
///
/// # Safety
/// The pointers are null or valid.
unsafe fn create(
    context: *const dw_context,
    spec: *const dw_layer_spec,
    plan: *mut *mut dw_layer,
    make: impl FnOnce(&Context, LayerSpec) -> Result<(usize, Layer)>,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("plan", plan) }?;
        *out = ptr::null_mut();
        // SAFETY: as above.
        let (context, given) = unsafe { (self::context(context)?, read::structure("spec", spec)?) };
        let spec = self::spec(&given)?;
        let (sequences, plan) = make(context, spec)?;
        let made = Plan {
            context: context.clone(),
            spec,
            sequences,
            plan,
        };
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_layer_packed(
    context: *const dw_context,
    spec: *const dw_layer_spec,
    cu_seqlens: *const dw_lengths,
    tokens: i64,
    decodes: i64,
    plan: *mut *mut dw_layer,
) -> c_int {
    let make = |context: &Context, spec| {
        // SAFETY: the caller passes a null or valid pointer.
        let lengths = unsafe { Lengths::read(cu_seqlens) }?;
        let tokens = read::natural("tokens", tokens)?;
        let decodes = read::natural("decodes", decodes)?;
        // SAFETY: the caller passes an array of that many entries.
        let entries = unsafe { lengths.host() }?;
        let plan = Layer::packed(context, spec, &entries, tokens, decodes)?;
        Ok((lengths.sequences(), plan))
    };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { create(context, spec, plan, make) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_layer_device(
    context: *const dw_context,
    spec: *const dw_layer_spec,
    tokens: i64,
    sequences: i64,
    decodes: i64,
    plan: *mut *mut dw_layer,
) -> c_int {
    let make = |context: &Context, spec| {
        let tokens = read::natural("tokens", tokens)?;
        let sequences = read::natural("sequences", sequences)?;
        let decodes = read::natural("decodes", decodes)?;
        let plan = Layer::device(context, spec, tokens, sequences, decodes)?;
        Ok((sequences, plan))
    };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { create(context, spec, plan, make) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_layer_destroy(plan: *mut dw_layer) {
    guard_silent(|| {
        if !plan.is_null() {
            // SAFETY: `create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(plan.cast::<Plan>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_layer_workspace_bytes(
    plan: *const dw_layer,
    bytes: *mut usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (plan, out) = unsafe {
            (
                read::reference("plan", plan.cast::<Plan>())?,
                read::output("bytes", bytes)?,
            )
        };
        *out = plan.plan.workspace_bytes();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_layer_launch(
    plan: *const dw_layer,
    stream: *mut c_void,
    tensors: *const dw_layer_tensors,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        // SAFETY: as above.
        let t = unsafe { read::structure("tensors", tensors) }?;
        // SAFETY: as above; the caller passes tensors in valid memory.
        let arguments = unsafe { self::tensors(&t, plan) }?;
        // SAFETY: as above.
        let o = unsafe { Argument::new("o", t.o) }.optional();
        let o = o.map(Argument::tokens_mut).transpose()?;
        // SAFETY: the caller passes a stream of the device, or null, and a workspace that nothing else uses.
        let (stream, workspace) = unsafe {
            (
                plan.context.borrow_stream(stream),
                Workspace::from_raw(t.workspace, t.workspace_bytes),
            )
        };
        let outcome = match &o {
            Some(o) => (plan.plan).launch_saving(&stream, &arguments, o, workspace),
            None => plan.plan.launch(&stream, &arguments, workspace),
        };
        outcome.map_err(|error| conv::renamed(renamed(error), t.x_layout))
    })
}

/// Tensors of a launch, from the caller's struct.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
unsafe fn tensors(t: &dw_layer_tensors, plan: &Plan) -> Result<LayerTensors<'static>> {
    // SAFETY: the caller passes a null or valid pointer.
    let argument = |name, pointer| unsafe { Argument::new(name, pointer) };
    let vector = |name, pointer| -> Checked<_> {
        argument(name, pointer)
            .optional()
            .map(Argument::vector)
            .transpose()
    };
    let projections = Projections {
        layout: t.x_layout,
        x: t.x,
        separate: [t.x_q, t.x_k, t.x_v],
    };
    // SAFETY: the caller passes tensors in the device's memory.
    let (slots, has_initial_state) = unsafe {
        (
            numbers(t.slots, plan.sequences),
            numbers(t.has_initial_state, plan.sequences),
        )
    };
    Ok(LayerTensors {
        // SAFETY: as above.
        cu_seqlens: unsafe { Lengths::given(t.cu_seqlens) }?,
        x: conv::input(&projections, &plan.spec.conv(), argument)?,
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
        states: LayerStates {
            conv: argument("conv_state", t.conv_state).states_mut()?,
            conv_layout: conv::state_layout("conv_layout", t.conv_layout)?,
            recurrent: argument("pool", t.pool).state_mut()?,
            recurrent_layout: read::layout("pool_layout", t.pool_layout)?,
            slots,
            has_initial_state,
        },
        y: argument("y", t.y).tokens_mut()?,
    })
}

/// z, from its own tensor or from the rows of x.
pub(crate) fn z(
    [own, packed]: [*const abi::dw_tensor; 2],
    x_layout: i32,
    spec: &LayerSpec,
    argument: impl Fn(&'static str, *const abi::dw_tensor) -> Argument,
) -> Result<Tensor<'static, 3>> {
    if let Some(z) = argument("z", own).optional() {
        return Ok(z.blocks()?);
    }
    if packed.is_null() {
        let allowed = "give z: only an x of layout flat or interleaved contains it";
        return Err(refuse("z", ArgumentKind::Presence, "absent", allowed).into());
    }
    let (x, spec) = (argument("x", packed).matrix()?, spec.conv());
    match i64::from(x_layout) == i64::from(abi::DW_CONV_INTERLEAVED) {
        true => ConvInput::interleaved_z(&x, &spec),
        false => ConvInput::flat_z(&x, &spec),
    }
}

/// Renames the argument of an error to its name in C.
pub(crate) fn renamed(error: Error) -> Error {
    let names = [
        ("d_weights.conv", "d_conv_weight"),
        ("d_weights.conv_bias", "d_conv_bias"),
        ("d_weights.a_log", "d_a_log"),
        ("d_weights.dt_bias", "d_dt_bias"),
        ("d_weights.norm", "d_norm_weight"),
        ("initial.conv", "initial_conv_state"),
        ("initial.recurrent", "initial_state"),
        ("initial.has_initial_state", "has_initial_state"),
        ("d_final_conv", "d_final_conv_state"),
        ("d_final_recurrent", "d_final_state"),
        ("d_initial_conv", "d_initial_conv_state"),
        ("d_initial_recurrent", "d_initial_state"),
        ("weights.conv", "conv_weight"),
        ("weights.conv_bias", "conv_bias"),
        ("weights.a_log", "a_log"),
        ("weights.dt_bias", "dt_bias"),
        ("weights.norm", "norm_weight"),
        ("states.conv", "conv_state"),
        ("states.recurrent", "pool"),
        ("states.slots", "slots"),
        ("states.has_initial_state", "has_initial_state"),
    ];
    match error {
        Error::Argument(error) => {
            let c_name = |name: &str| Some(names.iter().find(|(rust, _)| *rust == name)?.1);
            let error = status::renamed(error, c_name);
            Error::Argument(ArgumentError {
                allowed: error.allowed.replace("states.recurrent", "pool"),
                ..error
            })
        }
        other => other,
    }
}
