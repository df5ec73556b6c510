//! Through the C interface: contexts, plans and graphs leave nothing behind, threads share a workspace on one stream, a
//! fault is that of one context, and sequences without tokens keep their slots.
#![cfg(target_os = "linux")]

use std::ffi::{CStr, c_int, c_void};
use std::ptr::{null, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use deltawave::runtime::Context;
use deltawave_c::abi::{
    self, DW_OK, dw_context, dw_lengths, dw_norm_tensors, dw_prefill, dw_prefill_spec,
    dw_prefill_tensors, dw_tensor,
};
use deltawave_c::*;
use deltawave_lab::memory::least_growth;
use hip_sys::{hipGraph_t, hipGraphExec_t, hipStream_t, hipStreamCaptureMode};

/// Memory of the process is counted, so the tests take turns.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn last_error() -> String {
    // SAFETY: the text is this thread's, and nothing fails in between.
    let text = unsafe { CStr::from_ptr(dw_last_error()) };
    text.to_string_lossy().into_owned()
}

#[track_caller]
fn fine(status: c_int) {
    assert_eq!(status, DW_OK as c_int, "{}", last_error());
}

const TOKENS: i64 = 130;
const DIM: i64 = 32;
/// Bytes of each tensor's room.
const ROOM: usize = 1 << 15;

fn tensor(data: *mut c_void, dtype: u32, shape: &[i64]) -> dw_tensor {
    let mut t = dw_tensor {
        size: size_of::<dw_tensor>(),
        data,
        dtype: dtype as i32,
        rank: shape.len() as i32,
        ..Default::default()
    };
    let mut stride = 1;
    for (i, n) in shape.iter().enumerate().rev() {
        (t.shape[i], t.strides[i]) = (*n, stride);
        stride *= *n;
    }
    t
}

fn simulator() -> *mut dw_context {
    let mut context = null_mut();
    // SAFETY: the pointer is valid.
    fine(unsafe { dw_context_create(abi::DW_BACKEND_SIMULATOR as c_int, 0, &mut context) });
    context
}

fn plan(context: *const dw_context, lengths: &[i32]) -> *mut dw_prefill {
    let spec = dw_prefill_spec {
        size: size_of::<dw_prefill_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: 1,
        value_heads: 1,
        key_dim: DIM as i32,
        value_dim: DIM as i32,
        qk_l2norm: 1,
        segments: 2,
        ..Default::default()
    };
    let lengths = dw_lengths {
        size: size_of::<dw_lengths>(),
        data: lengths.as_ptr().cast(),
        entries: lengths.len() as i64,
        dtype: abi::DW_I32 as i32,
        ..Default::default()
    };
    let mut plan = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_packed(context, &spec, &lengths, TOKENS, &mut plan) });
    plan
}

/// Memory of the device, filled with a pattern of small bf16 numbers.
fn memory(context: *const dw_context, bytes: usize, seed: usize) -> *mut c_void {
    let mut memory = null_mut();
    let values: Vec<u16> = (0..bytes / 2)
        .map(|i| 0x3f00 | ((i * (7 + 2 * seed)) % 61) as u16 | ((i % 3 == 0) as u16) << 15)
        .collect();
    // SAFETY: both sides have that many bytes.
    unsafe {
        fine(dw_malloc(context, bytes, &mut memory));
        let direction = abi::DW_TO_DEVICE as c_int;
        fine(dw_copy(
            context,
            memory,
            values.as_ptr().cast(),
            bytes & !1,
            direction,
        ));
    }
    memory
}

fn read(context: *const dw_context, from: *const c_void, bytes: usize) -> Vec<u8> {
    let mut out = vec![0; bytes];
    // SAFETY: both sides have that many bytes.
    unsafe {
        let direction = abi::DW_TO_HOST as c_int;
        fine(dw_copy(
            context,
            out.as_mut_ptr().cast(),
            from,
            bytes,
            direction,
        ));
    }
    out
}

/// A norm in place; `broken`: of memory that there is not.
fn norm(context: *const dw_context, stream: *mut c_void, y: *mut c_void, broken: bool) -> c_int {
    let (y, nowhere) = (
        tensor(y, abi::DW_BF16, &[2, 1, DIM]),
        tensor(
            std::ptr::without_provenance_mut(4096),
            abi::DW_BF16,
            &[2, 1, DIM],
        ),
    );
    let z = dw_tensor {
        data: y.data.wrapping_byte_add(4096),
        ..y
    };
    let tensors = dw_norm_tensors {
        size: size_of::<dw_norm_tensors>(),
        z: if broken { &nowhere } else { &z },
        y: &y,
        eps: 1e-6,
        ..Default::default()
    };
    // SAFETY: the pointers are valid, or the simulator finds out.
    unsafe { dw_norm_launch(context, stream, &tensors) }
}

#[test]
fn contexts_leave_nothing_behind() {
    let _alone = alone();
    let engine = Context::simulator().expect("a context");
    let hip = engine.hip();
    let life = || {
        let context = simulator();
        let plan = plan(context, &[0, 130]);
        let memory = memory(context, ROOM, 0);
        // SAFETY: handles are alive, pointers valid.
        unsafe {
            let (mut stream, mut graph, mut replay) =
                (hipStream_t::NULL, hipGraph_t::NULL, hipGraphExec_t::NULL);
            let mode = hipStreamCaptureMode::hipStreamCaptureModeThreadLocal;
            hip.hipStreamCreateWithFlags(&mut stream, hip_sys::HIP_STREAM_NON_BLOCKING)
                .unwrap();
            hip.hipStreamBeginCapture(stream, mode).unwrap();
            fine(norm(context, stream.0, memory, false));
            hip.hipStreamEndCapture(stream, &mut graph).unwrap();
            hip.hipGraphInstantiate(&mut replay, graph, null_mut(), null_mut(), 0)
                .unwrap();
            hip.hipGraphDestroy(graph).unwrap();
            hip.hipGraphLaunch(replay, stream).unwrap();
            hip.hipGraphExecDestroy(replay).unwrap();
            hip.hipStreamDestroy(stream).unwrap();
            fine(dw_free(context, memory));
            dw_context_destroy(context);
            dw_prefill_destroy(plan);
        }
    };
    let grown = least_growth(50, life);
    assert!(grown < 200 << 10, "50 contexts leave {grown} bytes");
}

#[test]
fn a_fault_is_one_contexts() {
    let _alone = alone();
    let lost = simulator();
    let memory_of_lost = memory(lost, ROOM, 0);
    // SAFETY: the handles are alive.
    unsafe {
        fine(norm(lost, null_mut(), memory_of_lost, true));
        assert_ne!(dw_synchronize(lost, null_mut()), DW_OK as c_int);
        let new = simulator();
        let own = memory(new, ROOM, 0);
        fine(norm(new, null_mut(), own, false));
        fine(dw_synchronize(new, null_mut()));
        assert_ne!(dw_synchronize(lost, null_mut()), DW_OK as c_int);
        assert_ne!(
            norm(lost, null_mut(), memory_of_lost, false),
            DW_OK as c_int
        );
        fine(dw_synchronize(new, null_mut()));
        dw_free(lost, memory_of_lost);
        fine(dw_free(new, own));
        dw_context_destroy(lost);
        dw_context_destroy(new);
    }
}

/// As the header allows: two threads, one plan, one stream, one workspace.
#[test]
fn threads_share_a_workspace_on_one_stream() {
    let _alone = alone();
    let context = simulator();
    let plan = plan(context, &[0, 130]);
    let mut bytes = 0;
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_workspace_bytes(plan, &mut bytes) });
    let workspace = memory(context, bytes, 0);
    let handles = [plan.addr(), context.addr(), workspace.addr()];
    std::thread::scope(|scope| {
        for thread in 0..2 {
            scope.spawn(move || {
                let [plan, context, workspace] = handles;
                let plan: *const dw_prefill = std::ptr::with_exposed_provenance(plan);
                let context: *const dw_context = std::ptr::with_exposed_provenance(context);
                let memory = memory(context, 2 * ROOM, thread);
                let x = tensor(memory, abi::DW_BF16, &[TOKENS, 1, DIM]);
                let o = dw_tensor {
                    data: memory.wrapping_byte_add(ROOM),
                    ..x
                };
                let launch = |workspace: *mut c_void| {
                    let tensors = dw_prefill_tensors {
                        size: size_of::<dw_prefill_tensors>(),
                        q: &x,
                        k: &x,
                        v: &x,
                        o: &o,
                        workspace,
                        workspace_bytes: bytes,
                        ..Default::default()
                    };
                    // SAFETY: the pointers are valid.
                    fine(unsafe { dw_prefill_launch(plan, null_mut(), &tensors) });
                    read(context, o.data, (TOKENS * DIM * 2) as usize)
                };
                let own = self::memory(context, bytes, 0);
                let wanted = launch(own);
                for round in 0..100 {
                    let found = launch(std::ptr::with_exposed_provenance_mut(workspace));
                    assert!(found == wanted, "thread {thread}, round {round}");
                }
                // SAFETY: allocated above, and used no more.
                unsafe {
                    fine(dw_free(context, own));
                    fine(dw_free(context, memory));
                }
            });
        }
    });
    // SAFETY: made above, and used no more.
    unsafe {
        fine(dw_free(context, workspace));
        dw_prefill_destroy(plan);
        dw_context_destroy(context);
    }
}

/// An engine's captured batch whose buffers hold zeros: every sequence is new, has slot 0 and no tokens.
#[test]
fn sequences_without_tokens_keep_their_slots() {
    let _alone = alone();
    let context = simulator();
    let plan = plan(context, &[0, 0, 70]);
    let mut bytes = 0;
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_workspace_bytes(plan, &mut bytes) });
    let workspace = memory(context, bytes, 0);
    let memory = memory(context, 4 * ROOM, 0);
    let part = |n: usize| memory.wrapping_byte_add(n * ROOM);
    let x = tensor(part(0), abi::DW_BF16, &[TOKENS, 1, DIM]);
    let o = dw_tensor { data: part(1), ..x };
    let pool = tensor(part(2), abi::DW_F32, &[3, 1, DIM, DIM]);
    let state = (DIM * DIM * 4) as usize;
    let numbers = [0i32, 2, 1, -1, 0];
    let before = read(context, pool.data, 3 * state);
    for (write_slots, untouched) in [
        (null(), [true, true, false]),
        (
            part(3).cast_const().cast::<i32>().wrapping_add(2),
            [true; 3],
        ),
    ] {
        // SAFETY: both sides have that many bytes.
        unsafe {
            let direction = abi::DW_TO_DEVICE as c_int;
            fine(dw_copy(
                context,
                part(3),
                numbers.as_ptr().cast(),
                20,
                direction,
            ));
        }
        let tensors = dw_prefill_tensors {
            size: size_of::<dw_prefill_tensors>(),
            q: &x,
            k: &x,
            v: &x,
            o: &o,
            pool: &pool,
            slots: part(3).cast(),
            write_slots,
            has_initial_state: part(3).wrapping_byte_add(16).cast(),
            workspace,
            workspace_bytes: bytes,
            ..Default::default()
        };
        // SAFETY: the pointers are valid.
        fine(unsafe { dw_prefill_launch(plan, null_mut(), &tensors) });
        let after = read(context, pool.data, 3 * state);
        for (slot, kept) in untouched.into_iter().enumerate() {
            let bytes = slot * state..(slot + 1) * state;
            assert_eq!(before[bytes.clone()] == after[bytes], kept, "slot {slot}");
        }
        // SAFETY: both sides have that many bytes.
        unsafe {
            let direction = abi::DW_TO_DEVICE as c_int;
            fine(dw_copy(
                context,
                pool.data,
                before.as_ptr().cast(),
                before.len(),
                direction,
            ));
        }
    }
    // SAFETY: made above, and used no more.
    unsafe {
        fine(dw_free(context, memory));
        fine(dw_free(context, workspace));
        dw_prefill_destroy(plan);
        dw_context_destroy(context);
    }
}
