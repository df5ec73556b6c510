//! A launch through the C interface allocates nothing either, and calls nothing but the runtime's launches.

#[path = "../../tests/allocations/mod.rs"]
mod allocations;
#[allow(dead_code, reason = "shared with the tests of the Rust API")]
#[path = "../../tests/null_runtime/mod.rs"]
mod null_runtime;

use std::ffi::c_void;
use std::ptr::{null_mut, without_provenance_mut};
use std::sync::atomic::{AtomicUsize, Ordering};

use deltawave_c::abi::{
    DW_BF16, DW_F32, DW_I32, DW_OK, dw_context, dw_layer_spec, dw_layer_tensors, dw_lengths,
    dw_parallel_prefill_backward_sizes, dw_prefill_backward_tensors, dw_prefill_spec,
    dw_prefill_tensors, dw_rank_layout, dw_tensor,
};
use deltawave_c::*;

use allocations::allocations;
use null_runtime::{assert_only_launches, take_calls};

const TOKENS: i64 = 4096;

/// An address of its own, which nobody follows: outputs that overlap other arguments are refused.
fn address() -> *mut c_void {
    static NEXT: AtomicUsize = AtomicUsize::new(1 << 40);
    without_provenance_mut(NEXT.fetch_add(1 << 32, Ordering::Relaxed))
}

/// A dense tensor at an address of its own.
fn tensor(dtype: u32, shape: &[i64]) -> dw_tensor {
    let mut t = dw_tensor {
        size: size_of::<dw_tensor>(),
        data: address(),
        dtype: dtype as i32,
        rank: shape.len() as i32,
        ..Default::default()
    };
    let mut stride = 1;
    for (i, &n) in shape.iter().enumerate().rev() {
        (t.shape[i], t.strides[i]) = (n, stride);
        stride *= n;
    }
    t
}

#[test]
fn a_launch_allocates_nothing() -> deltawave::Result<()> {
    if deltawave::code_objects::for_arch("gfx942").next().is_none() {
        let why = deltawave::code_objects::why_missing("gfx942");
        let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
        assert!(!required, "{why}");
        println!("skipped: {why}");
        return Ok(());
    }
    // What `dw_context_create` makes, of a runtime that it cannot find.
    let context: *mut dw_context = Box::into_raw(Box::new(null_runtime::context()?)).cast();
    let spec = dw_prefill_spec {
        size: size_of::<dw_prefill_spec>(),
        dtype: DW_BF16 as i32,
        key_heads: 2,
        value_heads: 8,
        key_dim: 128,
        value_dim: 128,
        ..Default::default()
    };
    let entries = [0, 1000, TOKENS as i32];
    let lengths = dw_lengths {
        size: size_of::<dw_lengths>(),
        data: entries.as_ptr().cast(),
        entries: 3,
        dtype: DW_I32 as i32,
        pad0: 0,
    };
    let [q, k] = [(); 2].map(|()| tensor(DW_BF16, &[TOKENS, 2, 128]));
    let [v, o] = [(); 2].map(|()| tensor(DW_BF16, &[TOKENS, 8, 128]));
    let [g, beta] = [(); 2].map(|()| tensor(DW_F32, &[TOKENS, 8]));
    let [initial, last] = [(); 2].map(|()| tensor(DW_F32, &[2, 8, 128, 128]));
    let mut tensors = dw_prefill_tensors {
        size: size_of::<dw_prefill_tensors>(),
        q: &q,
        k: &k,
        v: &v,
        o: &o,
        g: &g,
        beta: &beta,
        initial_state: &initial,
        final_state: &last,
        workspace: address(),
        ..Default::default()
    };
    let mut plan = null_mut();
    // SAFETY: all pointers are to locals that outlive the calls; device memory is not followed.
    unsafe {
        let ok = DW_OK as i32;
        assert_eq!(
            dw_prefill_packed(context, &spec, &lengths, TOKENS, &mut plan),
            ok
        );
        assert_eq!(
            dw_prefill_workspace_bytes(plan, &mut tensors.workspace_bytes),
            ok
        );
        assert_eq!(dw_prefill_launch(plan, null_mut(), &tensors), ok);
        take_calls();
        let count = allocations(|| {
            assert_eq!(dw_prefill_launch(plan, null_mut(), &tensors), ok);
        });
        assert_eq!(count, 0);
        assert_only_launches(5, "dw_prefill_launch");
        dw_prefill_destroy(plan);
        parallel_backward(context, &spec, &tensors);
        layer(context);
        dw_context_destroy(context);
    }
    Ok(())
}

/// Both stages of the backward of a prefill that ranks share.
///
/// # Safety
/// The context is one, and the tensors of a prefill of `spec` are valid.
unsafe fn parallel_backward(
    context: *const dw_context,
    spec: &dw_prefill_spec,
    forward: &dw_prefill_tensors,
) {
    let lengths = [1000, TOKENS - 1000];
    let layout = dw_rank_layout {
        size: size_of::<dw_rank_layout>(),
        lengths: lengths.as_ptr(),
        sequences: 2,
        block: 64,
        ranks: 1,
        ..Default::default()
    };
    let d_o = tensor(DW_BF16, &[TOKENS, 8, 128]);
    let [d_q, d_k] = [(); 2].map(|()| tensor(DW_BF16, &[TOKENS, 2, 128]));
    let d_v = tensor(DW_BF16, &[TOKENS, 8, 128]);
    let [d_g, d_beta] = [(); 2].map(|()| tensor(DW_F32, &[TOKENS, 8]));
    let d_initial = tensor(DW_F32, &[2, 8, 128, 128]);
    let mut tensors = dw_prefill_backward_tensors {
        size: size_of::<dw_prefill_backward_tensors>(),
        q: forward.q,
        k: forward.k,
        v: forward.v,
        g: forward.g,
        beta: forward.beta,
        initial_state: forward.initial_state,
        d_final_state: forward.final_state,
        d_o: &d_o,
        d_q: &d_q,
        d_k: &d_k,
        d_v: &d_v,
        d_g: &d_g,
        d_beta: &d_beta,
        d_initial_state: &d_initial,
        workspace: address(),
        ..Default::default()
    };
    let mut sizes = dw_parallel_prefill_backward_sizes {
        size: size_of::<dw_parallel_prefill_backward_sizes>(),
        ..Default::default()
    };
    let (mut plan, mut backward, ok) = (null_mut(), null_mut(), DW_OK as i32);
    // SAFETY: as in the test.
    unsafe {
        let made = dw_parallel_prefill_create(context, spec, &layout, 0, TOKENS, &mut plan);
        assert_eq!(made, ok);
        let made = dw_parallel_prefill_backward_create(plan, &mut backward);
        assert_eq!(made, ok);
        dw_parallel_prefill_destroy(plan);
        let filled = dw_parallel_prefill_backward_get_sizes(backward, &mut sizes);
        assert_eq!(filled, ok);
        tensors.workspace_bytes = sizes.workspace_bytes;
        let (summary, bytes) = (address(), sizes.summary_bytes);
        take_calls();
        let count = allocations(|| {
            let launched = dw_parallel_prefill_backward_summarise_launch(
                backward,
                null_mut(),
                &tensors,
                summary,
                bytes,
            );
            assert_eq!(launched, ok);
        });
        assert_eq!(count, 0);
        assert_only_launches(2, "the first stage of the backward");
        let count = allocations(|| {
            let launched = dw_parallel_prefill_backward_finish_launch(
                backward,
                null_mut(),
                &tensors,
                summary,
                bytes,
            );
            assert_eq!(launched, ok);
        });
        assert_eq!(count, 0);
        assert_only_launches(4, "the second stage of the backward");
        dw_parallel_prefill_backward_destroy(backward);
    }
}

/// Decodes and prefills in one launch.
///
/// # Safety
/// The context is one.
unsafe fn layer(context: *const dw_context) {
    let spec = dw_layer_spec {
        size: size_of::<dw_layer_spec>(),
        dtype: DW_BF16 as i32,
        key_heads: 2,
        value_heads: 8,
        key_dim: 128,
        value_dim: 128,
        width: 4,
        eps: 1e-6,
        ..Default::default()
    };
    let channels = (2 * 2 + 8) * 128;
    let x = tensor(DW_BF16, &[TOKENS, channels + 8 * 128]);
    let a = tensor(DW_BF16, &[TOKENS, 8]);
    let weight = tensor(DW_BF16, &[channels, 4]);
    let a_log = tensor(DW_F32, &[8]);
    let conv_state = tensor(DW_BF16, &[5, channels, 3]);
    let pool = tensor(DW_F32, &[5, 8, 128, 128]);
    let y = tensor(DW_BF16, &[TOKENS, 8, 128]);
    let entries = [0, 1, 2, TOKENS as i32];
    let lengths = dw_lengths {
        size: size_of::<dw_lengths>(),
        data: entries.as_ptr().cast(),
        entries: 4,
        dtype: DW_I32 as i32,
        pad0: 0,
    };
    for device in [false, true] {
        let mut tensors = dw_layer_tensors {
            size: size_of::<dw_layer_tensors>(),
            x: &x,
            a: &a,
            b: &a,
            conv_weight: &weight,
            a_log: &a_log,
            conv_state: &conv_state,
            pool: &pool,
            slots: without_provenance_mut::<i32>(1 << 40),
            y: &y,
            workspace: address(),
            ..Default::default()
        };
        let (mut plan, ok) = (null_mut(), DW_OK as i32);
        // SAFETY: as in the test.
        unsafe {
            let made = match device {
                false => dw_layer_packed(context, &spec, &lengths, TOKENS, 2, &mut plan),
                true => dw_layer_device(context, &spec, TOKENS, 3, 2, &mut plan),
            };
            assert_eq!(made, ok);
            let bytes = &mut tensors.workspace_bytes;
            assert_eq!(dw_layer_workspace_bytes(plan, bytes), ok);
            if device {
                tensors.cu_seqlens = &lengths;
            }
            take_calls();
            let count = allocations(|| {
                assert_eq!(dw_layer_launch(plan, null_mut(), &tensors), ok);
            });
            assert_eq!(count, 0, "device: {device}");
            assert_only_launches(7, "dw_layer_launch");
            dw_layer_destroy(plan);
        }
    }
}
