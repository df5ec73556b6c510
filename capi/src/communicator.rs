//! Ranks that exchange through RCCL or NCCL.

use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::path::Path;
use std::ptr;
use std::time::Duration;

use deltawave::error::{ArgumentKind, Result};
use deltawave::parallel::{Collectives, Communicator, UniqueId};
use deltawave::prefill::{BackwardTensors, PrefillTensors};
use deltawave::runtime::{Context, Stream};
use deltawave::workspace::Workspace;

use crate::abi::{
    dw_communicator, dw_context, dw_parallel_prefill, dw_parallel_prefill_backward,
    dw_prefill_backward_tensors, dw_prefill_tensors,
};
use crate::context::context;
use crate::parallel::{self, Plan};
use crate::parallel_backward;
use crate::read;
use crate::status::{guard, guard_silent, refuse};

/// Value behind a `dw_communicator` handle.
struct Joined {
    context: Context,
    communicator: Communicator,
}

/// The library of collectives of this name, or the default one.
///
/// # Safety
/// The name is null or a string.
unsafe fn library(context: &Context, name: *const c_char) -> Result<Collectives> {
    if name.is_null() {
        return Collectives::load(context, None);
    }
    // SAFETY: the caller passes a string.
    let name = unsafe { CStr::from_ptr(name) };
    let Ok(name) = name.to_str() else {
        let allowed = "a name or path in UTF-8";
        return Err(refuse("library", ArgumentKind::Value, "other bytes", allowed).into());
    };
    if name.is_empty() {
        let allowed = "the name or path of a library, or a null pointer";
        return Err(refuse("library", ArgumentKind::Value, "an empty name", allowed).into());
    }
    Collectives::load(context, Some(Path::new(OsStr::new(name))))
}

/// # Safety
/// The handle is null, or [`dw_communicator_create`] made it and it was not destroyed.
unsafe fn joined<'a>(handle: *const dw_communicator) -> read::Checked<&'a Joined> {
    // SAFETY: the caller keeps the promise under `# Safety`.
    unsafe { read::reference("communicator", handle.cast::<Joined>()) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_communicator_unique_id(
    context: *const dw_context,
    library: *const c_char,
    id: *mut c_void,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers, and room for an id.
        let (context, to) = unsafe {
            (
                self::context(context)?,
                read::output("id", id.cast::<[u8; 128]>())?,
            )
        };
        // SAFETY: the caller passes null or a string.
        let library = unsafe { self::library(context, library) }?;
        *to = library.unique_id()?.0;
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_communicator_create(
    context: *const dw_context,
    library: *const c_char,
    id: *const c_void,
    rank: i32,
    ranks: i32,
    timeout_ms: i64,
    communicator: *mut *mut dw_communicator,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes a null or valid pointer.
        let out = unsafe { read::output("communicator", communicator) }?;
        *out = ptr::null_mut();
        // SAFETY: the caller passes null or valid pointers.
        let (context, id) = unsafe {
            (
                self::context(context)?,
                read::reference("id", id.cast::<[u8; 128]>())?,
            )
        };
        let (rank, ranks) = (read::natural("rank", rank)?, read::natural("ranks", ranks)?);
        // Before the library: a machine that lacks it can still learn what is wrong.
        if rank >= ranks {
            let allowed = format!("it must be below the number of ranks, {ranks}");
            return Err(refuse("rank", ArgumentKind::Value, rank, allowed).into());
        }
        let timeout = read::natural("timeout_ms", timeout_ms)?;
        if timeout == 0 {
            let allowed = "it must be at least 1";
            return Err(refuse("timeout_ms", ArgumentKind::Value, 0, allowed).into());
        }
        // SAFETY: the caller passes null or a string.
        let library = unsafe { self::library(context, library) }?;
        let timeout = Duration::from_millis(timeout as u64);
        let made = Joined {
            context: context.clone(),
            communicator: Communicator::new(
                context,
                &library,
                UniqueId(*id),
                rank,
                ranks,
                timeout,
            )?,
        };
        *out = Box::into_raw(Box::new(made)).cast();
        Ok(())
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_communicator_destroy(communicator: *mut dw_communicator) {
    guard_silent(|| {
        if !communicator.is_null() {
            // SAFETY: `dw_communicator_create` made the handle from a box, and the caller destroys it once.
            drop(unsafe { Box::from_raw(communicator.cast::<Joined>()) });
        }
    });
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_communicator_agree(
    communicator: *const dw_communicator,
    plan: *const dw_parallel_prefill,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let (joined, plan) = unsafe {
            (
                self::joined(communicator)?,
                read::reference("plan", plan.cast::<Plan>())?,
            )
        };
        joined.communicator.agree(&plan.plan)
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_communicator_prefill(
    communicator: *const dw_communicator,
    plan: *const dw_parallel_prefill,
    stream: *mut c_void,
    tensors: *const dw_prefill_tensors,
    summary: *mut c_void,
    summary_bytes: usize,
    gathered: *mut c_void,
    gathered_bytes: usize,
) -> c_int {
    let all = |plan: &Plan, stream: &Stream, t: &PrefillTensors<'_>, workspace: Workspace<'_>| {
        // SAFETY: the caller passes null or valid pointers, and device memory that nothing else uses.
        let (joined, memory) = unsafe {
            (
                self::joined(communicator)?,
                [
                    Workspace::from_raw(summary, summary_bytes),
                    Workspace::from_raw(gathered, gathered_bytes),
                ],
            )
        };
        (joined.communicator).prefill(&plan.plan, stream, t, memory, workspace)
    };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { parallel::launch(plan, stream, tensors, all) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_communicator_prefill_backward(
    communicator: *const dw_communicator,
    backward: *const dw_parallel_prefill_backward,
    stream: *mut c_void,
    tensors: *const dw_prefill_backward_tensors,
    summary: *mut c_void,
    summary_bytes: usize,
    gathered: *mut c_void,
    gathered_bytes: usize,
) -> c_int {
    let all = |plan: &parallel_backward::Plan,
               stream: &Stream,
               t: &BackwardTensors<'_>,
               workspace: Workspace<'_>| {
        // SAFETY: the caller passes null or valid pointers, and device memory that nothing else uses.
        let (joined, memory) = unsafe {
            (
                self::joined(communicator)?,
                [
                    Workspace::from_raw(summary, summary_bytes),
                    Workspace::from_raw(gathered, gathered_bytes),
                ],
            )
        };
        (joined.communicator).prefill_backward(&plan.plan, stream, t, memory, workspace)
    };
    // SAFETY: the caller passes null or valid pointers.
    unsafe { parallel_backward::launch(backward, stream, tensors, all) }
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_communicator_all_gather(
    communicator: *const dw_communicator,
    stream: *mut c_void,
    send: *const c_void,
    receive: *mut c_void,
    bytes: usize,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let joined = unsafe { self::joined(communicator) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { joined.context.borrow_stream(stream) };
        let all = bytes.saturating_mul(joined.communicator.ranks());
        // SAFETY: the caller passes device memory of that many bytes.
        let (send, receive) = unsafe {
            (
                Workspace::from_raw(send.cast_mut(), bytes),
                Workspace::from_raw(receive, all),
            )
        };
        (joined.communicator).all_gather(&stream, &send, &receive, bytes)
    })
}

/// See `include/deltawave.h`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dw_communicator_synchronize(
    communicator: *const dw_communicator,
    stream: *mut c_void,
) -> c_int {
    guard(|| {
        // SAFETY: the caller passes null or valid pointers.
        let joined = unsafe { self::joined(communicator) }?;
        // SAFETY: the caller passes a stream of the device, or null.
        let stream = unsafe { joined.context.borrow_stream(stream) };
        joined.communicator.synchronize(&stream)
    })
}
