//! Decode and commit: plans and launches.

use std::ffi::{c_int, c_void};
use std::ptr;

use deltawave::batch::PerSequence;
use deltawave::commit::{Commit, CommitConv, CommitTensors};
use deltawave::conv::ConvSpec;
use deltawave::decode::{Decode, DecodeSpec, DecodeTensors, Draft, Drafts, OutputNorm};
use deltawave::error::{ArgumentKind, Result};
use deltawave::model::Heads;
use deltawave::runtime::Context;
use deltawave::state::StatePool;

use crate::abi::{
    self, dw_commit_tensors, dw_context, dw_decode, dw_decode_spec, dw_decode_tensors, dw_tensor,
};
use crate::context::context;
use crate::conv::{self, Projections};
use crate::lengths::Lengths;
use crate::norm::output_gate;
use crate::prefill::{Gates, gating, heads_map};
use crate::read::{self, Argument, Checked, numbers};
use crate::status::{guard, guard_silent, refuse};

/// Value behind a `dw_decode` handle.
struct Plan {
    context: Context,
    spec: DecodeSpec,
    batch: usize,
    decode: Decode,
    commit: Commit,
}

fn spec(s: &dw_decode_spec) -> Checked<DecodeSpec> {
    let drafts = [
        (abi::DW_DRAFT_CHAIN, "DW_DRAFT_CHAIN", Draft::Chain),
        (abi::DW_DRAFT_TREE, "DW_DRAFT_TREE", Draft::Tree),
    ];
    Ok(DecodeSpec {
        dtype: read::dtype("dtype", s.dtype)?,
        heads: Heads {
            key: read::natural("key_heads", s.key_heads)?,
            value: read::natural("value_heads", s.value_heads)?,
            key_dim: read::natural("key_dim", s.key_dim)?,
            value_dim: read::natural("value_dim", s.value_dim)?,
            map: heads_map(s.head_map)?,
        },
        qk_l2norm: read::flag("qk_l2norm", s.qk_l2norm)?,
        scale: (s.scale != 0.0).then_some(s.scale),
        tokens: read::natural("tokens", s.tokens)?,
        draft: read::choice("draft", s.draft, &drafts)?,
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_decode_create(
    context: *const dw_context,
    spec: *const dw_decode_spec,
    batch: i64,
    plan: *mut *mut dw_decode,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("plan", plan) }?;
        *out = ptr::null_mut();
        // SAFETY: as above.
        let (context, given) = unsafe { (self::context(context)?, read::structure("spec", spec)?) };
        let spec = self::spec(&given)?;
        let batch = read::natural("batch", batch)?;
        let made = Plan {
            context: context.clone(),
            spec,
            batch,
            decode: Decode::new(context, spec, batch)?,
            commit: Commit::new(context, spec, batch)?,
        };
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_decode_destroy(plan: *mut dw_decode) {
    guard_silent(|| {
        if !plan.is_null() {
            // SAFETY: `dw_decode_create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(plan.cast::<Plan>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_decode_launch(
    plan: *const dw_decode,
    stream: *mut c_void,
    tensors: *const dw_decode_tensors,
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
        let drafts = unsafe { drafts(&t, plan) }?;
        // SAFETY: as above; the caller passes tensors in valid memory.
        match (unsafe { output_norm(&t) }?, drafts) {
            (Some(norm), drafts) => {
                (plan.decode).launch_normed(&stream, &arguments, drafts.as_ref(), &norm)
            }
            (None, Some(drafts)) => plan.decode.launch_drafts(&stream, &arguments, &drafts),
            (None, None) => plan.decode.launch(&stream, &arguments),
        }
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_commit_launch(
    plan: *const dw_decode,
    stream: *mut c_void,
    tensors: *const dw_commit_tensors,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        // SAFETY: as above.
        let t = unsafe { read::structure("tensors", tensors) }?;
        // SAFETY: as above; the caller passes tensors in valid memory.
        let arguments = unsafe { commit_tensors(&t, plan) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { plan.context.borrow_stream(stream) };
        let outcome = plan.commit.launch(&stream, &arguments);
        outcome.map_err(|error| conv::renamed(error, t.x_layout))
    })
}

/// Tensors of a launch, from the caller's struct.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
unsafe fn tensors(t: &dw_decode_tensors, plan: &Plan) -> Checked<DecodeTensors<'static>> {
    // SAFETY: the caller passes a null or valid pointer.
    let argument = |name, pointer| unsafe { Argument::new(name, pointer) };
    // SAFETY: the caller passes tensors in the device's memory.
    let (slots, write_slots, has_initial_state) = unsafe {
        (
            numbers(t.slots, plan.batch),
            numbers(t.write_slots, plan.batch),
            numbers(t.has_initial_state, plan.batch),
        )
    };
    let gates = Gates {
        g: t.g,
        beta: t.beta,
        a: t.a,
        b: t.b,
        a_log: t.a_log,
        dt_bias: t.dt_bias,
        allow_neg_eigval: t.allow_neg_eigval,
    };
    // With draft_slots, states are a pool.
    let tokens = match t.draft_slots.is_null() {
        true => plan.spec.tokens,
        false => 1,
    };
    Ok(DecodeTensors {
        q: argument("q", t.q).tokens()?,
        k: argument("k", t.k).tokens()?,
        v: argument("v", t.v).tokens()?,
        gating: gating(&gates, argument)?,
        pool: StatePool {
            tensor: argument("pool", t.pool).state_mut()?,
            layout: read::layout("pool_layout", t.pool_layout)?,
            slots,
            write_slots,
        },
        has_initial_state,
        states: (argument("states", t.states).optional())
            .map(|states| states.states_of_tokens_mut(tokens))
            .transpose()?,
        o: argument("o", t.o).tokens_mut()?,
    })
}

/// Drafts of a launch; absent if the caller gives nothing of them.
///
/// # Safety
/// As [`tensors`].
unsafe fn drafts(t: &dw_decode_tensors, plan: &Plan) -> Checked<Option<Drafts<'static>>> {
    let null_slot = read::null_slot(t.has_null_slot, t.null_slot)?;
    let columns = match read::natural("read_columns", t.read_columns)? {
        0 => plan.spec.tokens,
        columns => columns,
    };
    // SAFETY: the caller passes arrays in the device's memory.
    let drafts = unsafe {
        Drafts {
            draft_slots: numbers(t.draft_slots, plan.batch * plan.spec.tokens),
            read_slots: numbers(t.read_slots, plan.batch.saturating_mul(columns)),
            accepted: numbers(t.accepted, plan.batch),
            cu_seqlens: Lengths::given(t.cu_seqlens)?,
            null_slot,
        }
    };
    let wanted = drafts.draft_slots.is_some()
        || drafts.read_slots.is_some()
        || drafts.accepted.is_some()
        || drafts.cu_seqlens.is_some()
        || null_slot.is_some();
    Ok(wanted.then_some(drafts))
}

/// Norm of the outputs; absent if the caller gives no z.
///
/// # Safety
/// As [`tensors`].
unsafe fn output_norm(t: &dw_decode_tensors) -> Checked<Option<OutputNorm<'static>>> {
    // SAFETY: the caller passes null or valid pointers.
    let argument = |name, pointer| unsafe { Argument::new(name, pointer) };
    let weight = argument("norm_weight", t.norm_weight).optional();
    let Some(z) = argument("z", t.z).optional() else {
        if weight.is_some() {
            let (was, allowed) = ("given without z", "a norm needs z");
            return Err(refuse("norm_weight", ArgumentKind::Presence, was, allowed));
        }
        return Ok(None);
    };
    Ok(Some(OutputNorm {
        z: z.blocks()?,
        weight: weight.map(Argument::vector).transpose()?,
        eps: t.norm_eps,
        gate: output_gate("norm_gate", t.norm_gate)?,
    }))
}

/// Tensors of a commit, from the caller's struct.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
unsafe fn commit_tensors(t: &dw_commit_tensors, plan: &Plan) -> Result<CommitTensors<'static>> {
    // SAFETY: the caller passes a null or valid pointer.
    let argument = |name, pointer: *const dw_tensor| unsafe { Argument::new(name, pointer) };
    // SAFETY: the caller passes tensors in the device's memory.
    let (accepted, slots, has_initial_state) = unsafe {
        (
            PerSequence::from_raw(t.accepted, plan.batch),
            numbers(t.slots, plan.batch),
            numbers(t.has_initial_state, plan.batch),
        )
    };
    let s = &plan.spec;
    let conv = match argument("conv_state", t.conv_state).optional() {
        Some(state) => {
            let projections = Projections {
                layout: t.x_layout,
                x: t.x,
                separate: [t.x_q, t.x_k, t.x_v],
            };
            let spec = ConvSpec::new(
                s.heads.key,
                s.heads.value,
                s.heads.key_dim,
                s.heads.value_dim,
            );
            Some(CommitConv {
                x: conv::input(&projections, &spec, argument)?,
                state: state.states_mut()?,
                layout: conv::state_layout("conv_layout", t.conv_layout)?,
                has_initial_state,
            })
        }
        None if has_initial_state.is_some() => {
            let was = "given without a conv_state";
            let allowed = "it needs a conv_state";
            return Err(refuse("has_initial_state", ArgumentKind::Presence, was, allowed).into());
        }
        None => None,
    };
    Ok(CommitTensors {
        accepted,
        slots,
        states: argument("states", t.states).states_of_tokens(s.tokens)?,
        pool: argument("pool", t.pool).state_mut()?,
        layout: read::layout("pool_layout", t.pool_layout)?,
        conv,
    })
}
