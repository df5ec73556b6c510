//! Communicators through the C interface, with a library of collectives that a C compiler makes here: ranks are threads.

#[path = "../../tests/fake_collectives/mod.rs"]
mod fake_collectives;

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::thread;

use deltawave_c::abi::{
    self, DW_ERROR_ARGUMENT, DW_ERROR_RANKS, DW_OK, dw_communicator, dw_context,
    dw_parallel_prefill, dw_prefill_spec, dw_rank_layout,
};
use deltawave_c::*;

fn last_error() -> String {
    // SAFETY: the text is this thread's, and nothing fails in between.
    let text = unsafe { CStr::from_ptr(dw_last_error()) };
    text.to_str().expect("UTF-8").to_owned()
}

#[track_caller]
fn is(status: c_int, wanted: u32, words: &str) {
    let text = last_error();
    assert_eq!(status, wanted as c_int, "{text}");
    assert!(text.contains(words), "{words}: {text}");
}

#[track_caller]
fn fine(status: c_int) {
    assert_eq!(status, DW_OK as c_int, "{}", last_error());
}

/// Path of the library.
fn library() -> Option<&'static CStr> {
    static LIBRARY: OnceLock<Option<CString>> = OnceLock::new();
    let made = LIBRARY.get_or_init(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("communicator");
        let path = fake_collectives::compile(&root, &folder, "libranks.so", "-O1")?;
        Some(CString::new(path.into_os_string().into_encoded_bytes()).expect("a path"))
    });
    made.as_deref()
}

fn simulator() -> *mut dw_context {
    let mut context = null_mut();
    // SAFETY: the pointer is valid.
    fine(unsafe { dw_context_create(abi::DW_BACKEND_SIMULATOR as c_int, 0, &mut context) });
    context
}

type Id = [u8; 128];

fn unique_id(context: *const dw_context, library: &CStr) -> Id {
    let mut id = [0; 128];
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_communicator_unique_id(context, library.as_ptr(), id.as_mut_ptr().cast()) });
    id
}

fn create(
    context: *const dw_context,
    library: *const c_char,
    id: &Id,
    [rank, ranks]: [i32; 2],
    ms: i64,
) -> (c_int, *mut dw_communicator) {
    let mut made = std::ptr::dangling_mut();
    // SAFETY: the pointers are valid.
    let status = unsafe {
        let id = id.as_ptr().cast();
        dw_communicator_create(context, library, id, rank, ranks, ms, &mut made)
    };
    (status, made)
}

fn plan(context: *const dw_context, kind: u32, rank: i32, ranks: i32) -> *mut dw_parallel_prefill {
    let spec = dw_prefill_spec {
        size: size_of::<dw_prefill_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: 1,
        value_heads: 2,
        key_dim: 16,
        value_dim: 32,
        ..Default::default()
    };
    let lengths = [330, 64];
    let layout = dw_rank_layout {
        size: size_of::<dw_rank_layout>(),
        lengths: lengths.as_ptr(),
        sequences: 2,
        block: 64,
        ranks,
        kind: kind as i32,
        ..Default::default()
    };
    let mut plan = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_parallel_prefill_create(context, &spec, &layout, rank, 394, &mut plan) });
    plan
}

/// All-gathers, agreements, and layouts that differ.
#[test]
fn ranks_agree_and_gather() {
    let Some(library) = library() else { return };
    let id = unique_id(simulator(), library);
    let run = |rank: i32| {
        let context = simulator();
        let (status, made) = create(context, library.as_ptr(), &id, [rank, 3], 60_000);
        fine(status);
        let kind = match rank {
            1 => abi::DW_RANKS_PACKED,
            _ => abi::DW_RANKS_CONTIGUOUS,
        };
        let [first, again] = [kind, abi::DW_RANKS_ZIGZAG].map(|kind| plan(context, kind, rank, 3));
        let mut memory = null_mut();
        let mut found = [0u8; 3 * 256];
        // SAFETY: the pointers are valid, and made above.
        unsafe {
            let status = dw_communicator_agree(made, first);
            is(
                status,
                DW_ERROR_RANKS,
                "ranks differ in fragments of the ranks: hash ",
            );
            fine(dw_communicator_agree(made, again));
            fine(dw_malloc(context, 4 * 256, &mut memory));
            let own = [rank as u8 + 1; 256];
            let [there, back] = [abi::DW_TO_DEVICE, abi::DW_TO_HOST].map(|d| d as c_int);
            let receive = memory.wrapping_byte_add(256);
            fine(dw_copy(context, memory, own.as_ptr().cast(), 256, there));
            fine(dw_communicator_all_gather(
                made,
                null_mut(),
                memory,
                receive,
                256,
            ));
            fine(dw_communicator_synchronize(made, null_mut()));
            fine(dw_copy(
                context,
                found.as_mut_ptr().cast(),
                receive,
                768,
                back,
            ));
            for (i, of_rank) in found.chunks(256).enumerate() {
                assert!(of_rank.iter().all(|byte| *byte == i as u8 + 1));
            }
            // In place, at this rank's place alone.
            let place = |n: usize| receive.wrapping_byte_add(256 * n);
            let own = rank as usize;
            let wrong = place((own + 1) % 3);
            let gather = |from| dw_communicator_all_gather(made, null_mut(), from, receive, 256);
            is(gather(wrong), DW_ERROR_ARGUMENT, "send: address 0x");
            fine(gather(place(own)));
            fine(dw_communicator_synchronize(made, null_mut()));
            let gather =
                |bytes| dw_communicator_all_gather(made, null_mut(), memory, receive, bytes);
            is(gather(usize::MAX), DW_ERROR_ARGUMENT, "");
            // A plan of another rank, and arguments that are missing.
            let other = plan(context, abi::DW_RANKS_ZIGZAG, (rank + 1) % 3, 3);
            is(
                dw_communicator_agree(made, other),
                DW_ERROR_ARGUMENT,
                "plan: rank ",
            );
            is(
                dw_communicator_agree(made, null()),
                DW_ERROR_ARGUMENT,
                "plan: a null pointer",
            );
            is(
                dw_communicator_agree(null(), first),
                DW_ERROR_ARGUMENT,
                "communicator: a null",
            );
            for plan in [first, again, other] {
                dw_parallel_prefill_destroy(plan);
            }
            fine(dw_free(context, memory));
            dw_communicator_destroy(made);
            dw_context_destroy(context);
        }
    };
    thread::scope(|scope| {
        let run = &run;
        for rank in 0..3 {
            scope.spawn(move || run(rank));
        }
    });
}

/// A rank that does not come; arguments that are refused.
#[test]
fn ranks_that_do_not_come() {
    let Some(library) = library() else { return };
    let context = simulator();
    let id = unique_id(context, library);
    let name = library.as_ptr();
    let (status, made) = create(context, name, &id, [0, 2], 100);
    is(
        status,
        DW_ERROR_RANKS,
        "ncclCommInitRankConfig was not complete after 100 ms",
    );
    assert!(made.is_null());
    for (rank, ranks, ms, words) in [
        (2, 2, 100, "rank: 2"),
        (-1, 2, 100, "rank: -1"),
        (0, 0, 100, "rank: 0"),
        (0, 1, 0, "timeout_ms: 0; it must be at least 1"),
        (0, 1, -1, "timeout_ms: -1"),
    ] {
        let (status, made) = create(context, name, &id, [rank, ranks], ms);
        is(status, DW_ERROR_ARGUMENT, words);
        assert!(made.is_null());
    }
    let (status, _) = create(context, c"".as_ptr(), &id, [0, 1], 100);
    is(status, DW_ERROR_ARGUMENT, "library: an empty name");
    // Arguments come before the library.
    let (status, _) = create(context, c"/nowhere/libnccl.so".as_ptr(), &id, [2, 2], 100);
    is(status, DW_ERROR_ARGUMENT, "rank: 2");
    let (status, _) = create(context, c"/nowhere/libnccl.so".as_ptr(), &id, [0, 1], 100);
    is(status, DW_ERROR_RANKS, "/nowhere/libnccl.so (");
    let (status, _) = create(context, name, &[0; 128], [0, 1], 100);
    is(status, DW_ERROR_RANKS, "ncclCommInitRankConfig failed with");
    // SAFETY: pointers are valid, or null.
    unsafe {
        let null_id = dw_communicator_unique_id(context, name, null_mut());
        is(null_id, DW_ERROR_ARGUMENT, "id: a null pointer");
        dw_communicator_destroy(null_mut());
        let status = dw_communicator_synchronize(null(), null_mut());
        is(status, DW_ERROR_ARGUMENT, "communicator: a null pointer");
        let status = dw_communicator_create(context, name, null(), 0, 1, 100, null_mut());
        is(status, DW_ERROR_ARGUMENT, "communicator: a null pointer");
        dw_context_destroy(context);
    }
}

/// Agreements and tails, for an engine with a communicator of its own.
#[test]
fn agreements_and_tails() {
    let context = simulator();
    let plans = [0, 1].map(|rank| plan(context, abi::DW_RANKS_CONTIGUOUS, rank, 2));
    let other = plan(context, abi::DW_RANKS_ZIGZAG, 1, 2);
    let agreement = |plan| {
        let mut bytes = [0u8; 128];
        // SAFETY: the pointers are valid.
        fine(unsafe { dw_parallel_prefill_agreement(plan, bytes.as_mut_ptr().cast()) });
        bytes
    };
    let check = |all: &[u8]| {
        let address: *const c_void = all.as_ptr().cast();
        // SAFETY: as above.
        unsafe { dw_parallel_prefill_check_agreement(plans[0], address, all.len()) }
    };
    let [a, b] = plans.map(|plan| agreement(plan));
    fine(check(&[a, b].concat()));
    let wrong = check(&[a, agreement(other)].concat());
    is(wrong, DW_ERROR_RANKS, "fragments of the ranks: hash ");
    is(check(&a), DW_ERROR_ARGUMENT, "agreements: 128 bytes");
    // Rank 0 has four blocks of the first sequence, rank 1 the rest and the second.
    for (plan, wanted_sent, wanted_before) in [
        (plans[0], vec![0], vec![-1]),
        (plans[1], vec![-1, -1], vec![0, -1]),
    ] {
        let (mut slots, count) = (0, wanted_sent.len());
        let (mut sent, mut before) = (vec![7; count], vec![7; count]);
        // SAFETY: the arrays have as many elements as the plan has fragments.
        unsafe {
            let count = count as i64;
            let [to_sent, to_before] = [&mut sent, &mut before].map(Vec::as_mut_ptr);
            fine(dw_parallel_prefill_tails(
                plan, &mut slots, to_sent, to_before, count,
            ));
            let wrong = dw_parallel_prefill_tails(plan, &mut slots, to_sent, null_mut(), 9);
            is(wrong, DW_ERROR_ARGUMENT, "sent: 9 elements");
            let wrong = dw_parallel_prefill_tails(plan, null_mut(), to_sent, to_before, count);
            is(wrong, DW_ERROR_ARGUMENT, "slots: a null pointer");
        }
        assert_eq!((slots, sent, before), (1, wanted_sent, wanted_before));
    }
    // SAFETY: made above.
    unsafe {
        for plan in [plans[0], plans[1], other] {
            dw_parallel_prefill_destroy(plan);
        }
        dw_context_destroy(context);
    }
}
