//! Convolution: plans and launches.

use std::ffi::{c_int, c_void};
use std::ptr;

use deltawave::batch::PerSequence;
use deltawave::conv::{
    Activation, Conv, ConvDrafts, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors,
};
use deltawave::error::{ArgumentKind, Error, Result};
use deltawave::gate::Gate;
use deltawave::model::Heads;
use deltawave::runtime::Context;

use crate::abi::{
    self, dw_context, dw_conv, dw_conv_spec, dw_conv_tensors, dw_gate_tensors, dw_lengths,
};
use crate::context::context;
use crate::gate::gate;
use crate::lengths::Lengths;
use crate::read::{self, Argument, Checked};
use crate::status::{self, guard, guard_silent, refuse};

/// Value behind a `dw_conv` handle.
pub(crate) struct Plan {
    pub(crate) context: Context,
    pub(crate) spec: ConvSpec,
    pub(crate) sequences: usize,
    pub(crate) plan: Conv,
}

/// Projections of a convolution or commit, from the caller's struct.
pub(crate) struct Projections {
    pub(crate) layout: i32,
    /// One packed tensor, for `DW_CONV_FLAT` and `DW_CONV_INTERLEAVED`.
    pub(crate) x: *const abi::dw_tensor,
    /// Tensors of q, k and v, for `DW_CONV_SEPARATE`.
    pub(crate) separate: [*const abi::dw_tensor; 3],
}

fn spec(s: &dw_conv_spec) -> Checked<ConvSpec> {
    let activations = [
        (
            abi::DW_ACTIVATION_SILU,
            "DW_ACTIVATION_SILU",
            Activation::Silu,
        ),
        (
            abi::DW_ACTIVATION_NONE,
            "DW_ACTIVATION_NONE",
            Activation::None,
        ),
    ];
    Ok(ConvSpec {
        dtype: read::dtype("dtype", s.dtype)?,
        heads: Heads::new(
            read::natural("key_heads", s.key_heads)?,
            read::natural("value_heads", s.value_heads)?,
            read::natural("key_dim", s.key_dim)?,
            read::natural("value_dim", s.value_dim)?,
        ),
        width: read::natural("width", s.width)?,
        activation: read::choice("activation", s.activation, &activations)?,
        qk_l2norm: read::flag("qk_l2norm", s.qk_l2norm)?,
    })
}

/// Makes a plan: the common body of its constructors.
///
/// # Safety
/// The pointers are null or valid.
unsafe fn create(
    context: *const dw_context,
    spec: *const dw_conv_spec,
    plan: *mut *mut dw_conv,
    make: impl FnOnce(&Context, ConvSpec, bool) -> Result<(usize, Conv)>,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("plan", plan) }?;
        *out = ptr::null_mut();
        // SAFETY: as above.
        let (context, given) = unsafe { (self::context(context)?, read::structure("spec", spec)?) };
        let spec = self::spec(&given)?;
        let keeps = read::flag("keep_states", given.keep_states)?;
        let (sequences, plan) = make(context, spec, keeps)?;
        let context = context.clone();
        let made = Plan {
            context,
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
pub unsafe extern "C" fn dw_conv_packed(
    context: *const dw_context,
    spec: *const dw_conv_spec,
    cu_seqlens: *const dw_lengths,
    tokens: i64,
    plan: *mut *mut dw_conv,
) -> c_int {
    let make = |context: &Context, spec, keeps| {
        // SAFETY: the caller passes a null or valid pointer.
        let lengths = unsafe { Lengths::read(cu_seqlens) }?;
        let tokens = read::natural("tokens", tokens)?;
        // SAFETY: the caller passes an array of that many entries.
        let mut plan = Conv::packed(context, spec, &unsafe { lengths.host() }?, tokens)?;
        if keeps {
            plan = plan.keeping_states();
        }
        Ok((lengths.sequences(), plan))
    };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { create(context, spec, plan, make) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_conv_device(
    context: *const dw_context,
    spec: *const dw_conv_spec,
    tokens: i64,
    sequences: i64,
    plan: *mut *mut dw_conv,
) -> c_int {
    let make = |context: &Context, spec, keeps| {
        let tokens = read::natural("tokens", tokens)?;
        let sequences = read::natural("sequences", sequences)?;
        let mut plan = Conv::device(context, spec, tokens, sequences)?;
        if keeps {
            plan = plan.keeping_states();
        }
        Ok((sequences, plan))
    };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { create(context, spec, plan, make) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_conv_destroy(plan: *mut dw_conv) {
    guard_silent(|| {
        if !plan.is_null() {
            // SAFETY: `create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(plan.cast::<Plan>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_conv_launch(
    plan: *const dw_conv,
    stream: *mut c_void,
    tensors: *const dw_conv_tensors,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        // SAFETY: as above.
        let t = unsafe { read::structure("tensors", tensors) }?;
        // SAFETY: as above; the caller passes tensors in valid memory.
        let arguments = unsafe { self::tensors(&t, plan) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { plan.context.borrow_stream(stream) };
        // SAFETY: the caller passes arrays in the device's memory.
        let outcome = match unsafe { drafts(&t, plan) }? {
            Some(drafts) => plan.plan.launch_drafts(&stream, &arguments, &drafts),
            None => plan.plan.launch(&stream, &arguments),
        };
        outcome.map_err(|error| renamed(error, t.x_layout))
    })
}

/// Tensors of a launch, from the caller's struct.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
unsafe fn tensors(t: &dw_conv_tensors, plan: &Plan) -> Result<ConvTensors<'static>> {
    // SAFETY: the caller passes a null or valid pointer.
    let argument = |name, pointer| unsafe { Argument::new(name, pointer) };
    let columns = read::natural("slot_columns", t.slot_columns)?.max(1);
    // SAFETY: the caller passes tensors in the device's memory.
    let (slots, has) = unsafe {
        (
            PerSequence::from_raw(t.slots, plan.sequences.saturating_mul(columns)),
            PerSequence::from_raw(t.has_initial_state, plan.sequences),
        )
    };
    let layout = state_layout("state_layout", t.state_layout)?;
    let state = argument("state", t.state).optional();
    let has = (!t.has_initial_state.is_null()).then_some(has);
    if has.is_some() && state.is_none() {
        let was = "given without a state";
        let allowed = "it needs a state";
        return Err(refuse("has_initial_state", ArgumentKind::Presence, was, allowed).into());
    }
    Ok(ConvTensors {
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
        bias: (argument("bias", t.bias).optional())
            .map(Argument::vector)
            .transpose()?,
        state: match state {
            Some(state) => Some(ConvState {
                tensor: state.states_mut()?,
                layout,
                has_initial_state: has,
            }),
            None => None,
        },
        slots: (!t.slots.is_null()).then_some(slots),
        q: argument("q", t.q).tokens_mut()?,
        k: argument("k", t.k).tokens_mut()?,
        v: argument("v", t.v).tokens_mut()?,
        // SAFETY: as above.
        gates: unsafe { gates(t) }?,
    })
}

/// Drafts of a launch; absent if the caller gives nothing of them.
///
/// # Safety
/// As [`tensors`].
unsafe fn drafts(t: &dw_conv_tensors, plan: &Plan) -> Checked<Option<ConvDrafts<'static>>> {
    let null_slot = read::null_slot(t.has_null_slot, t.null_slot)?;
    let slot_columns = match read::natural("slot_columns", t.slot_columns)? {
        0 => None,
        columns => Some(columns),
    };
    // SAFETY: the caller passes an array in the device's memory.
    let accepted = unsafe { read::numbers(t.accepted, plan.sequences) };
    let wanted = accepted.is_some() || null_slot.is_some() || slot_columns.is_some();
    Ok(wanted.then_some(ConvDrafts {
        accepted,
        slot_columns,
        null_slot,
    }))
}

/// Gates of a launch, if the caller gives any.
///
/// # Safety
/// As [`tensors`].
unsafe fn gates(t: &dw_conv_tensors) -> Result<Option<Gate<'static>>> {
    let all = [t.a, t.b, t.a_log, t.dt_bias, t.g, t.beta];
    if all.iter().all(|pointer| pointer.is_null()) {
        return match read::flag("allow_neg_eigval", t.allow_neg_eigval)? {
            false => Ok(None),
            true => {
                let (was, allowed) = ("set without gates", "it needs g and beta");
                Err(refuse("allow_neg_eigval", ArgumentKind::Presence, was, allowed).into())
            }
        };
    }
    let tensors = dw_gate_tensors {
        a: t.a,
        b: t.b,
        a_log: t.a_log,
        dt_bias: t.dt_bias,
        g: t.g,
        beta: t.beta,
        allow_neg_eigval: t.allow_neg_eigval,
        ..Default::default()
    };
    // SAFETY: the caller keeps the promise under `# Safety`.
    Ok(Some(unsafe { gate(&tensors) }?))
}

/// Layout of conv states.
pub(crate) fn state_layout(argument: &str, layout: i32) -> Checked<ConvStateLayout> {
    let layouts = [
        (
            abi::DW_CONV_CHANNEL_MAJOR,
            "DW_CONV_CHANNEL_MAJOR",
            ConvStateLayout::ChannelMajor,
        ),
        (
            abi::DW_CONV_TOKEN_MAJOR,
            "DW_CONV_TOKEN_MAJOR",
            ConvStateLayout::TokenMajor,
        ),
    ];
    read::choice(argument, layout, &layouts)
}

/// Renames the argument of an error to its name in C: separate projections, and the conv state of a commit.
pub(crate) fn renamed(error: Error, x_layout: i32) -> Error {
    let separate = i64::from(x_layout) == i64::from(abi::DW_CONV_SEPARATE);
    match error {
        Error::Argument(error) => {
            let c_name = |name: &str| match name {
                "x.q" if separate => Some("x_q"),
                "x.k" if separate => Some("x_k"),
                "x.v" if separate => Some("x_v"),
                "d_x.q" if separate => Some("d_x_q"),
                "d_x.k" if separate => Some("d_x_k"),
                "d_x.v" if separate => Some("d_x_v"),
                "conv.state" => Some("conv_state"),
                _ => None,
            };
            Error::Argument(status::renamed(error, c_name))
        }
        other => other,
    }
}

/// Where q, k and v lie in the projections.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Layout {
    Flat,
    Interleaved,
    Separate,
}

pub(crate) fn x_layout(layout: i32) -> Checked<Layout> {
    let layouts = [
        (abi::DW_CONV_FLAT, "DW_CONV_FLAT", Layout::Flat),
        (
            abi::DW_CONV_INTERLEAVED,
            "DW_CONV_INTERLEAVED",
            Layout::Interleaved,
        ),
        (abi::DW_CONV_SEPARATE, "DW_CONV_SEPARATE", Layout::Separate),
    ];
    read::choice("x_layout", layout, &layouts)
}

/// Input of the convolution: one packed tensor, or three.
pub(crate) fn input(
    t: &Projections,
    spec: &ConvSpec,
    argument: impl Fn(&'static str, *const abi::dw_tensor) -> Argument,
) -> Result<ConvInput<'static>> {
    let layout = x_layout(t.layout)?;
    let [q, k, v] = t.separate;
    let separate = [("x_q", q), ("x_k", k), ("x_v", v)];
    let unused = match layout {
        Layout::Separate => &[("x", t.x)][..],
        _ => &separate,
    };
    if let Some((name, _)) = unused.iter().find(|(_, pointer)| !pointer.is_null()) {
        let was = "given with an x_layout that does not read it";
        return Err(refuse(name, ArgumentKind::Presence, was, "it must be null").into());
    }
    let [q, k, v] = separate.map(|(name, pointer)| argument(name, pointer));
    let x = argument("x", t.x);
    match layout {
        Layout::Flat => ConvInput::flat(&x.matrix()?, spec),
        Layout::Interleaved => ConvInput::interleaved(&x.matrix()?, spec),
        Layout::Separate => Ok(ConvInput {
            q: q.blocks()?,
            k: k.blocks()?,
            v: v.blocks()?,
        }),
    }
}
