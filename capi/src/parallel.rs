//! Prefill of sequences that several ranks share: plans and the launches of both stages.

use std::ffi::{c_int, c_void};
use std::{ptr, slice};

use deltawave::batch::PerSequence;
use deltawave::error::{ArgumentKind, Result};
use deltawave::prefill::{
    AGREEMENT_BYTES, Fragment, ParallelPrefill, PrefillTensors, RankLayout, Tail,
};
use deltawave::runtime::{Context, Stream};
use deltawave::workspace::Workspace;

use crate::abi::{
    self, dw_context, dw_fragment, dw_parallel_prefill, dw_parallel_prefill_sizes, dw_prefill_spec,
    dw_prefill_tensors, dw_rank_layout, dw_snapshot,
};
use crate::context::context;
use crate::lengths::host_slice;
use crate::prefill;
use crate::read::{self, Checked};
use crate::status::{guard, guard_silent, refuse};

/// Value behind a `dw_parallel_prefill` handle.
pub(crate) struct Plan {
    pub(crate) context: Context,
    pub(crate) fragments: Vec<Fragment>,
    /// Tokens of a block.
    pub(crate) block: usize,
    tails: Vec<Tail>,
    tail_slots: usize,
    /// Whether `dw_parallel_prefill_set_snapshots` gave the plan snapshots.
    snapshots: bool,
    pub(crate) plan: ParallelPrefill,
}

/// Layout from the caller's struct.
///
/// # Safety
/// The pointer is null or valid, and its arrays have as many elements as it says.
unsafe fn layout(given: *const dw_rank_layout, value_heads: usize) -> Result<RankLayout> {
    // SAFETY: the caller passes a null or valid pointer.
    let x = unsafe { read::structure("layout", given) }?;
    let sequences = read::natural("sequences", x.sequences)?;
    // SAFETY: the caller passes an array of that many elements.
    let lengths = unsafe { host_slice("lengths", x.lengths, sequences) }?;
    let lengths = lengths.iter().map(|&n| read::natural("lengths", n));
    let lengths: Vec<usize> = lengths.collect::<Checked<_>>()?;
    let ranks = read::natural("ranks", x.ranks)?;
    let block = match read::natural("block", x.block)? {
        0 => RankLayout::default_block(&lengths, value_heads),
        block => block,
    };
    let kinds = [
        (abi::DW_RANKS_CONTIGUOUS, "DW_RANKS_CONTIGUOUS", 0),
        (abi::DW_RANKS_ZIGZAG, "DW_RANKS_ZIGZAG", 1),
        (abi::DW_RANKS_FRAGMENTS, "DW_RANKS_FRAGMENTS", 2),
        (abi::DW_RANKS_PACKED, "DW_RANKS_PACKED", 3),
    ];
    let kind = read::choice("kind", x.kind, &kinds)?;
    if kind != 2 && !(x.fragments.is_null() && x.fragment_counts.is_null()) {
        let allowed = "they must be NULL, or kind DW_RANKS_FRAGMENTS";
        return Err(refuse("fragments", ArgumentKind::Presence, "given", allowed).into());
    }
    match kind {
        0 => RankLayout::contiguous(&lengths, block, ranks),
        1 => RankLayout::zigzag(&lengths, block, ranks),
        3 => RankLayout::packed(&lengths, block, ranks),
        _ => {
            // SAFETY: the caller passes an array of that many elements.
            let counts = unsafe { host_slice("fragment_counts", x.fragment_counts, ranks) }?;
            let counts = counts.iter().map(|&n| read::natural("fragment_counts", n));
            let counts: Vec<usize> = counts.collect::<Checked<_>>()?;
            let all = counts.iter().try_fold(0usize, |sum, &n| sum.checked_add(n));
            // SAFETY: as above.
            let all = unsafe { host_slice("fragments", x.fragments, all.unwrap_or(usize::MAX)) }?;
            let all = all.iter().map(|f| {
                Ok(Fragment {
                    sequence: read::natural("fragments.sequence", f.sequence)?,
                    begin: read::natural("fragments.begin", f.begin)?,
                    tokens: read::natural("fragments.tokens", f.tokens)?,
                })
            });
            let all: Vec<Fragment> = all.collect::<Checked<_>>()?;
            let mut rest = &all[..];
            let of_ranks = counts.into_iter().map(|n| {
                let (of_rank, others) = rest.split_at(n);
                rest = others;
                of_rank.to_vec()
            });
            RankLayout::new(&lengths, block, of_ranks.collect())
        }
    }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_create(
    context: *const dw_context,
    spec: *const dw_prefill_spec,
    layout: *const dw_rank_layout,
    rank: i32,
    tokens: i64,
    plan: *mut *mut dw_parallel_prefill,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let out = unsafe { read::output("plan", plan) }?;
        *out = ptr::null_mut();
        // SAFETY: as above.
        let (context, spec) = unsafe { (self::context(context)?, read::structure("spec", spec)?) };
        let spec = prefill::spec(&spec)?;
        // SAFETY: as above.
        let layout = unsafe { self::layout(layout, spec.heads.value) }?;
        let (rank, tokens) = (
            read::natural("rank", rank)?,
            read::natural("tokens", tokens)?,
        );
        let plan = ParallelPrefill::new(context, spec, &layout, rank, tokens)?;
        let made = Plan {
            context: context.clone(),
            fragments: layout.fragments(rank).to_vec(),
            block: layout.block_tokens(),
            tails: layout.tails(rank),
            tail_slots: layout.tail_slots(),
            snapshots: false,
            plan,
        };
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_destroy(plan: *mut dw_parallel_prefill) {
    guard_silent(|| {
        if !plan.is_null() {
            // SAFETY: `dw_parallel_prefill_create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(plan.cast::<Plan>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_get_sizes(
    plan: *const dw_parallel_prefill,
    sizes: *mut dw_parallel_prefill_sizes,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (plan, size) = unsafe {
            (
                read::reference("plan", plan.cast::<Plan>())?,
                read::size_of_caller("sizes", sizes)?,
            )
        };
        let x = &plan.plan;
        let filled = dw_parallel_prefill_sizes {
            size,
            summary_bytes: x.summary_bytes(),
            gathered_bytes: x.gathered_bytes(),
            workspace_bytes: x.workspace_bytes(),
            fragments: plan.fragments.len() as i64,
            order_entries: x.order().len() as i64,
            chunk_entries: x.chunk_entries() as i64,
            block: plan.block as i64,
        };
        // SAFETY: the caller's struct has `size` bytes.
        unsafe { fill(&filled, sizes, size) };
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_tables(
    plan: *const dw_parallel_prefill,
    fragments: *mut dw_fragment,
    count: i64,
    order: *mut i32,
    entries: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        let all = plan.fragments.iter().map(|f| dw_fragment {
            sequence: f.sequence as i64,
            begin: f.begin as i64,
            tokens: f.tokens as i64,
        });
        let all: Vec<_> = all.collect();
        // SAFETY: the caller passes arrays of that many elements.
        unsafe {
            copy("fragments", &all, fragments, count)?;
            copy("order", plan.plan.order(), order, entries)?;
        }
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_agreement(
    plan: *const dw_parallel_prefill,
    bytes: *mut c_void,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        // SAFETY: the caller passes memory of that many bytes.
        let to = unsafe { read::output("bytes", bytes.cast::<[u8; AGREEMENT_BYTES]>()) }?;
        *to = plan.plan.agreement();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_check_agreement(
    plan: *const dw_parallel_prefill,
    all: *const c_void,
    bytes: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        // SAFETY: the caller passes an array of that many bytes.
        let all = unsafe { host_slice("all", all.cast::<u8>(), bytes) }?;
        plan.plan.check_agreement(all)
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_tails(
    plan: *const dw_parallel_prefill,
    slots: *mut i64,
    sent: *mut i32,
    before: *mut i32,
    count: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        // Slots fit: there are fewer than blocks, which fit.
        let number = |slot: Option<usize>| slot.map_or(-1, |slot| slot as i32);
        let sent_of: Vec<_> = plan.tails.iter().map(|t| number(t.sent)).collect();
        let before_of: Vec<_> = plan.tails.iter().map(|t| number(t.before)).collect();
        // SAFETY: the caller passes a valid pointer, and arrays of that many elements.
        unsafe {
            *read::output("slots", slots)? = plan.tail_slots as i64;
            copy("sent", &sent_of, sent, count)?;
            copy("before", &before_of, before, count)?;
        }
        Ok(())
    })
}

/// Copies as much of a struct as the caller's, of `size` bytes, has room for.
///
/// # Safety
/// The caller's struct is valid for writes of `size` bytes.
pub(crate) unsafe fn fill<T>(filled: &T, to: *mut T, size: usize) {
    let bytes = ptr::from_ref(filled).cast::<u8>();
    // SAFETY: both have that many bytes.
    unsafe { bytes.copy_to_nonoverlapping(to.cast(), size.min(size_of::<T>())) };
}

/// Copies values to the caller's array, unless it is null.
///
/// # Safety
/// The address is null or has `count` elements.
unsafe fn copy<T: Copy>(name: &'static str, values: &[T], to: *mut T, count: i64) -> Checked<()> {
    if to.is_null() {
        return Ok(());
    }
    if usize::try_from(count) != Ok(values.len()) {
        let (was, allowed) = (
            format!("{count} elements"),
            format!("exactly {}", values.len()),
        );
        return Err(refuse(name, ArgumentKind::Shape, was, allowed));
    }
    // SAFETY: the caller passes an array of that many elements, as `host_slice` would check it.
    unsafe {
        host_slice(name, to.cast_const(), values.len())?;
        slice::from_raw_parts_mut(to, values.len()).copy_from_slice(values);
    }
    Ok(())
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_set_snapshots(
    plan: *mut dw_parallel_prefill,
    snapshots: *const dw_snapshot,
    count: i64,
) -> c_int {
    guard(|| {
        // SAFETY: the caller lets nothing else use the plan.
        let plan = unsafe { read::output("plan", plan.cast::<Plan>()) }?;
        let count = read::natural("count", count)?;
        // SAFETY: the caller passes an array of `count` elements.
        let list = unsafe { prefill::snapshots(snapshots, count) }?;
        plan.plan.set_snapshots(&list)?;
        plan.snapshots = true;
        Ok(())
    })
}

/// Common body of both stages, and of all steps in one call.
///
/// # Safety
/// The pointers are null or valid, and their tensors lie in valid memory.
pub(crate) unsafe fn launch(
    plan: *const dw_parallel_prefill,
    stream: *mut c_void,
    tensors: *const dw_prefill_tensors,
    stage: impl FnOnce(&Plan, &Stream, &PrefillTensors<'_>, Workspace<'_>) -> Result<()>,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let plan = unsafe { read::reference("plan", plan.cast::<Plan>()) }?;
        // SAFETY: as above.
        let t = unsafe { read::structure("tensors", tensors) }?;
        if !t.context.is_null() {
            let allowed = "it must be NULL: a prefill over ranks saves no context";
            return Err(refuse("context", ArgumentKind::Presence, "given", allowed).into());
        }
        let entries = plan.plan.chunk_entries();
        // SAFETY: as above; the caller passes tensors in valid memory.
        let arguments =
            unsafe { prefill::tensors(&t, plan.fragments.len(), entries, plan.snapshots) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { plan.context.borrow_stream(stream) };
        // SAFETY: the caller passes device memory that nothing else uses.
        let workspace = unsafe { Workspace::from_raw(t.workspace, t.workspace_bytes) };
        stage(plan, &stream, &arguments, workspace)
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_summarise_launch(
    plan: *const dw_parallel_prefill,
    stream: *mut c_void,
    tensors: *const dw_prefill_tensors,
    summary: *mut c_void,
    summary_bytes: usize,
) -> c_int {
    let stage =
        |plan: &Plan, stream: &Stream, tensors: &PrefillTensors<'_>, workspace: Workspace<'_>| {
            // SAFETY: the caller passes device memory that nothing else uses.
            let summary = unsafe { Workspace::from_raw(summary, summary_bytes) };
            (plan.plan).summarise_launch(stream, tensors, summary, workspace)
        };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { launch(plan, stream, tensors, stage) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_parallel_prefill_finish_launch(
    plan: *const dw_parallel_prefill,
    stream: *mut c_void,
    tensors: *const dw_prefill_tensors,
    gathered: *const c_void,
    gathered_bytes: usize,
    order: *const i32,
) -> c_int {
    let stage =
        |plan: &Plan, stream: &Stream, tensors: &PrefillTensors<'_>, workspace: Workspace<'_>| {
            // SAFETY: the caller passes device memory that nothing else writes.
            let gathered = unsafe { Workspace::from_raw(gathered.cast_mut(), gathered_bytes) };
            // SAFETY: the caller passes null, or as many elements as the order has.
            let order: Option<PerSequence<'_, i32>> =
                unsafe { read::numbers(order, plan.plan.order().len()) };
            (plan.plan).finish_launch(stream, tensors, gathered, order, workspace)
        };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { launch(plan, stream, tensors, stage) }
}
