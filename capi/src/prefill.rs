//! Prefill: plans and launches.

use std::ffi::{c_int, c_void};
use std::ptr;

use deltawave::batch::PerSequence;
use deltawave::error::{ArgumentKind, Result};
use deltawave::gates::Gating;
use deltawave::model::Heads;
use deltawave::prefill::{Prefill, PrefillPath, PrefillSpec, PrefillTensors, Save, Snapshot};
use deltawave::runtime::Context;
use deltawave::state::{InitialState, State, StateMut, States};
use deltawave::types::HeadMap;
use deltawave::workspace::Workspace;

use crate::abi::{
    self, dw_context, dw_lengths, dw_prefill, dw_prefill_spec, dw_prefill_tensors, dw_snapshot,
};
use crate::context::context;
use crate::lengths::{Lengths, host_slice};
use crate::read::{self, Argument, Checked};
use crate::states;
use crate::status::{guard, guard_silent, refuse};

/// Value behind a `dw_prefill` handle.
pub(crate) struct Plan {
    pub(crate) context: Context,
    pub(crate) sequences: usize,
    /// Whether `dw_prefill_set_snapshots` gave the plan snapshots.
    snapshots: bool,
    pub(crate) plan: Prefill,
}

pub(crate) fn heads_map(map: i32) -> Checked<HeadMap> {
    let maps = [
        (abi::DW_HEADS_GROUPED, "DW_HEADS_GROUPED", HeadMap::Grouped),
        (abi::DW_HEADS_TILED, "DW_HEADS_TILED", HeadMap::Tiled),
    ];
    read::choice("head_map", map, &maps)
}

pub(crate) fn path(path: i32) -> Checked<PrefillPath> {
    let paths = [
        (abi::DW_PATH_AUTO, "DW_PATH_AUTO", PrefillPath::Auto),
        (abi::DW_PATH_FUSED, "DW_PATH_FUSED", PrefillPath::Fused),
        (abi::DW_PATH_SPLIT, "DW_PATH_SPLIT", PrefillPath::Split),
        (abi::DW_PATH_SHORT, "DW_PATH_SHORT", PrefillPath::Short),
    ];
    read::choice("path", path, &paths)
}

fn save(save: i32) -> Checked<Save> {
    Ok(match read::natural("save", save)? {
        n if n == abi::DW_SAVE_NOTHING as usize => Save::Nothing,
        n if n == abi::DW_SAVE_BOUNDARIES as usize => Save::Boundaries,
        tokens => Save::BoundariesEvery(tokens),
    })
}

pub(crate) fn spec(s: &dw_prefill_spec) -> Checked<PrefillSpec> {
    Ok(PrefillSpec {
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
        segments: Some(read::natural("segments", s.segments)?).filter(|&n| n != 0),
        compute_units: Some(read::natural("compute_units", s.compute_units)? as u32)
            .filter(|&n| n != 0),
        path: path(s.path)?,
        save: save(s.save)?,
    })
}

/// Makes a plan: the common body of its constructors.
///
/// # Safety
/// The pointers are null or valid.
unsafe fn create(
    context: *const dw_context,
    spec: *const dw_prefill_spec,
    plan: *mut *mut dw_prefill,
    make: impl FnOnce(&Context, PrefillSpec) -> Result<(usize, Prefill)>,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("plan", plan) }?;
        *out = ptr::null_mut();
        // SAFETY: as above.
        let (context, given) = unsafe { (self::context(context)?, read::structure("spec", spec)?) };
        let (sequences, plan) = make(context, self::spec(&given)?)?;
        let context = context.clone();
        let made = Plan {
            context,
            sequences,
            snapshots: false,
            plan,
        };
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_packed(
    context: *const dw_context,
    spec: *const dw_prefill_spec,
    cu_seqlens: *const dw_lengths,
    tokens: i64,
    plan: *mut *mut dw_prefill,
) -> c_int {
    let make = |context: &Context, spec| {
        // SAFETY: the caller passes a null or valid pointer.
        let lengths = unsafe { Lengths::read(cu_seqlens) }?;
        let tokens = read::natural("tokens", tokens)?;
        // SAFETY: the caller passes an array of that many entries.
        let plan = Prefill::packed(context, spec, &unsafe { lengths.host() }?, tokens)?;
        Ok((lengths.sequences(), plan))
    };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { create(context, spec, plan, make) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_dense(
    context: *const dw_context,
    spec: *const dw_prefill_spec,
    batch: i64,
    tokens: i64,
    plan: *mut *mut dw_prefill,
) -> c_int {
    let make = |context: &Context, spec| {
        let batch = read::natural("batch", batch)?;
        let tokens = read::natural("tokens", tokens)?;
        let plan = Prefill::dense(context, spec, batch, tokens)?;
        Ok((batch, plan))
    };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { create(context, spec, plan, make) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_device(
    context: *const dw_context,
    spec: *const dw_prefill_spec,
    tokens: i64,
    sequences: i64,
    plan: *mut *mut dw_prefill,
) -> c_int {
    let make = |context: &Context, spec| {
        let tokens = read::natural("tokens", tokens)?;
        let sequences = read::natural("sequences", sequences)?;
        let plan = Prefill::device(context, spec, tokens, sequences)?;
        Ok((sequences, plan))
    };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { create(context, spec, plan, make) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_destroy(plan: *mut dw_prefill) {
    guard_silent(|| {
        if !plan.is_null() {
            // SAFETY: `create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(plan.cast::<Plan>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_workspace_bytes(
    plan: *const dw_prefill,
    bytes: *mut usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("bytes", bytes) }?;
        // SAFETY: as above.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        *out = plan.plan.workspace_bytes();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_round_tokens(
    spec: *const dw_prefill_spec,
    tokens: *mut i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("tokens", tokens) }?;
        // SAFETY: as above.
        let given = unsafe { read::structure("spec", spec) }?;
        *out = self::spec(&given)?.round_tokens()?.unwrap_or_default() as i64;
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_context_bytes(
    plan: *const dw_prefill,
    bytes: *mut usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("bytes", bytes) }?;
        // SAFETY: as above.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        *out = plan.plan.context_bytes();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_launch(
    plan: *const dw_prefill,
    stream: *mut c_void,
    tensors: *const dw_prefill_tensors,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        // SAFETY: as above.
        let t = unsafe { read::structure("tensors", tensors) }?;
        let entries = plan.plan.chunk_entries();
        // SAFETY: as above; the caller passes tensors in valid memory.
        let arguments = unsafe { self::tensors(&t, plan.sequences, entries, plan.snapshots) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { plan.context.borrow_stream(stream) };
        // SAFETY: the caller passes device memory that nothing else uses.
        let workspace = unsafe { Workspace::from_raw(t.workspace, t.workspace_bytes) };
        if t.context.is_null() {
            return plan.plan.launch(&stream, &arguments, workspace);
        }
        // SAFETY: as above.
        let context = unsafe { Workspace::from_raw(t.context, t.context_bytes) };
        (plan.plan).launch_saving(&stream, &arguments, context, workspace)
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_chunk_entries(
    plan: *const dw_prefill,
    entries: *mut i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("entries", entries) }?;
        // SAFETY: as above.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        *out = plan.plan.chunk_entries() as i64;
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_set_slots(
    plan: *mut dw_prefill,
    slots: *const i32,
    write_slots: *const i32,
    count: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller lets nothing else use the plan.
        let plan = unsafe { read::output("plan", plan.cast::<Plan>()) }?;
        let count = read::natural("count", count)?;
        // SAFETY: the caller passes an array of `count` elements.
        let slots = unsafe { host_slice("slots", slots, count) }?;
        let write_slots = match write_slots.is_null() {
            true => None,
            // SAFETY: as above.
            false => Some(unsafe { host_slice("write_slots", write_slots, count) }?),
        };
        plan.plan.set_slots(slots, write_slots)
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_prefill_set_snapshots(
    plan: *mut dw_prefill,
    snapshots: *const dw_snapshot,
    count: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller lets nothing else use the plan.
        let plan = unsafe { read::output("plan", plan.cast::<Plan>()) }?;
        let count = read::natural("count", count)?;
        // SAFETY: the caller passes an array of `count` elements.
        let list = unsafe { self::snapshots(snapshots, count) }?;
        plan.plan.set_snapshots(&list)?;
        plan.snapshots = true;
        Ok(())
    })
}

/// Snapshots from the caller's array.
///
/// # Safety
/// The address is null or has `count` elements.
pub(crate) unsafe fn snapshots(
    snapshots: *const dw_snapshot,
    count: usize,
) -> Checked<Vec<Snapshot>> {
    // SAFETY: the caller keeps the promise under `# Safety`.
    let given = unsafe { host_slice("snapshots", snapshots, count) }?;
    let list = given.iter().map(|s| {
        Ok(Snapshot {
            sequence: read::natural("snapshots.sequence", s.sequence)?,
            tokens: read::natural("snapshots.tokens", s.tokens)?,
            slot: read::natural("snapshots.slot", s.slot)?,
        })
    });
    list.collect()
}

/// Tensors of a launch, from the caller's struct. `entries`: of snapshot slots. `planned`: the plan has snapshots.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
pub(crate) unsafe fn tensors(
    t: &dw_prefill_tensors,
    sequences: usize,
    entries: usize,
    planned: bool,
) -> Checked<PrefillTensors<'static>> {
    // SAFETY: the caller passes a null or valid pointer.
    let argument = |name, pointer| unsafe { Argument::new(name, pointer) };
    let state = |name, pointer, layout_name: &str, layout| -> Checked<Option<_>> {
        let layout = read::layout(layout_name, layout)?;
        Ok(argument(name, pointer).optional().map(|a| (a, layout)))
    };
    let initial = state(
        "initial_state",
        t.initial_state,
        "initial_layout",
        t.initial_layout,
    )?;
    let last = state("final_state", t.final_state, "final_layout", t.final_layout)?;
    // SAFETY: as above.
    let has = unsafe { PerSequence::from_raw(t.has_initial_state, sequences) };
    let has_initial_state = (!t.has_initial_state.is_null()).then_some(has);
    let presence = |name, was, allowed| Err(refuse(name, ArgumentKind::Presence, was, allowed));
    // SAFETY: as above.
    let pool = unsafe { states::pool(t, sequences) }?;
    if pool.is_some() && (initial.is_some() || last.is_some()) {
        let was = "given with an initial_state or a final_state";
        return presence(
            "pool",
            was,
            "give either a pool, or initial_state and final_state",
        );
    }
    if has_initial_state.is_some() && pool.is_none() && initial.is_none() {
        let allowed = "it needs an initial_state or a pool";
        return presence(
            "has_initial_state",
            "given without an initial_state",
            allowed,
        );
    }
    let states = match pool {
        Some(pool) => States::Pool {
            pool,
            has_initial_state,
        },
        None => {
            let initial = initial.map(|(argument, layout)| {
                let tensor = argument.state()?;
                Ok(InitialState {
                    state: State { tensor, layout },
                    has_initial_state,
                })
            });
            let last = last.map(|(argument, layout)| {
                let tensor = argument.state_mut()?;
                Ok(StateMut { tensor, layout })
            });
            States::Separate {
                initial: initial.transpose()?,
                last: last.transpose()?,
            }
        }
    };
    Ok(PrefillTensors {
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
        states,
        o: argument("o", t.o).tokens_mut()?,
        // SAFETY: as above.
        snapshots: unsafe { states::snapshots(t, entries, planned) }?,
    })
}

/// Gates of a prefill or decode, from the caller's struct.
pub(crate) struct Gates {
    pub(crate) g: *const abi::dw_tensor,
    pub(crate) beta: *const abi::dw_tensor,
    pub(crate) a: *const abi::dw_tensor,
    pub(crate) b: *const abi::dw_tensor,
    pub(crate) a_log: *const abi::dw_tensor,
    pub(crate) dt_bias: *const abi::dw_tensor,
    pub(crate) allow_neg_eigval: i32,
}

/// Raw gates if any of a, b, a_log and dt_bias is given, else g and beta.
pub(crate) fn gating(
    t: &Gates,
    argument: impl Fn(&'static str, *const abi::dw_tensor) -> Argument,
) -> Checked<Gating<'static>> {
    let allow_neg_eigval = read::flag("allow_neg_eigval", t.allow_neg_eigval)?;
    let [a, b, a_log, dt_bias] = [
        argument("a", t.a),
        argument("b", t.b),
        argument("a_log", t.a_log),
        argument("dt_bias", t.dt_bias),
    ];
    let given = [("g", t.g), ("beta", t.beta)].map(|(name, p)| argument(name, p).optional());
    let raw = [a, b, a_log, dt_bias]
        .iter()
        .any(|x| x.optional().is_some());
    let refuse_presence = |name, was| {
        let allowed = "give g and beta, or a, b and a_log";
        Err(refuse(name, ArgumentKind::Presence, was, allowed))
    };
    if raw {
        for (name, pointer) in [("g", t.g), ("beta", t.beta)] {
            if !pointer.is_null() {
                return refuse_presence(name, "given together with raw gates");
            }
        }
        return Ok(Gating::Raw {
            a: a.scalars()?,
            b: b.scalars()?,
            a_log: a_log.per_head()?,
            dt_bias: dt_bias.optional().map(Argument::per_head).transpose()?,
            allow_neg_eigval,
        });
    }
    if allow_neg_eigval {
        return refuse_presence("allow_neg_eigval", "set without raw gates");
    }
    let [g, beta] = given.map(|x| x.map(Argument::scalars).transpose());
    Ok(Gating::Given { g: g?, beta: beta? })
}
