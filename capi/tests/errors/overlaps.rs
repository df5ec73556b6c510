//! Outputs that share memory with another argument: the text names both, as C does.

use deltawave_c::abi::{
    dw_commit_tensors, dw_conv, dw_conv_spec, dw_conv_tensors, dw_decode, dw_decode_spec,
    dw_decode_tensors, dw_layer, dw_layer_spec, dw_layer_tensors, dw_norm_tensors,
    dw_parallel_prefill_sizes, dw_rank_layout,
};

use super::*;

const CHANNELS: i64 = 2 * HK * K + HV * V;

#[track_caller]
fn overlaps(status: c_int, output: &str, other: &str) {
    refused(
        status,
        &format!("{output}: it overlaps {other}, between addresses 0x"),
    );
    let text = last_error();
    assert!(
        text.contains("; an output must have memory of its own"),
        "{text}"
    );
}

/// A tensor in part `i` of the memory.
fn part(x: &Launch, i: usize, dtype: u32, shape: &[i64]) -> dw_tensor {
    tensor(x.memory.wrapping_byte_add(i << 14), dtype, shape)
}

/// The same tensor at another address.
fn at(t: &dw_tensor, data: *mut c_void) -> dw_tensor {
    dw_tensor { data, ..*t }
}

#[test]
fn of_prefill() {
    let x = Launch::new(false);
    let mut plan = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_prefill_packed(x.context, &spec(), &lengths(), TOKENS, &mut plan) });
    let o_at = |data| {
        let o = at(&x.o, data);
        x.run(plan, |t| t.o = &o)
    };
    fine(o_at(x.v.data));
    overlaps(o_at(x.q.data), "o", "q");
    overlaps(o_at(x.k.data), "o", "k");
    overlaps(o_at(x.v.data.wrapping_byte_add(2)), "o", "v");
    assert!(last_error().ends_with("or be all of that: the same address, shape, strides and type"));
    overlaps(o_at(x.state.data), "o", "final_state");
    let workspace = x.tensors().workspace;
    overlaps(o_at(workspace.wrapping_byte_add(512)), "o", "workspace");
    // A pool of six slots, and then its second slot, as snapshots.
    let pool = part(&x, 5, abi::DW_F32, &[2, HV, K, V]);
    let entries = TOKENS / 64 + 2;
    let slots = part(&x, 7, abi::DW_F32, &[entries]);
    let run = |snapshots: &dw_tensor| {
        x.run(plan, |t| {
            t.final_state = null();
            (t.pool, t.snapshots) = (&pool, snapshots);
            t.snapshot_slots = slots.data.cast_const().cast();
        })
    };
    overlaps(run(&pool), "snapshots", "pool");
    // SAFETY: made above.
    unsafe { dw_prefill_destroy(plan) };
}

/// Summaries and gathered summaries of a prefill that ranks share, in memory of their own.
#[test]
fn of_parallel_prefill() {
    const ROWS: i64 = 96;
    const ROOM: usize = 1 << 18;
    let x = Launch::new(false);
    let lengths = [ROWS];
    let layout = dw_rank_layout {
        size: size_of::<dw_rank_layout>(),
        lengths: lengths.as_ptr(),
        sequences: 1,
        block: 64,
        ranks: 1,
        ..Default::default()
    };
    let mut plan = null_mut();
    let mut sizes = dw_parallel_prefill_sizes {
        size: size_of::<dw_parallel_prefill_sizes>(),
        ..Default::default()
    };
    let mut memory = null_mut();
    // SAFETY: the pointers are valid.
    unsafe {
        let spec = spec();
        let made = dw_parallel_prefill_create(x.context, &spec, &layout, 0, ROWS, &mut plan);
        fine(made);
        fine(dw_parallel_prefill_get_sizes(plan, &mut sizes));
        fine(dw_malloc(x.context, 10 * ROOM, &mut memory));
    }
    assert!(sizes.summary_bytes > 0 && sizes.workspace_bytes < ROOM);
    let at = |i: usize| memory.wrapping_byte_add(i * ROOM);
    let t = |i, dtype, shape: &[i64]| tensor(at(i), dtype, shape);
    let (q, k) = (
        t(0, abi::DW_BF16, &[ROWS, HK, K]),
        t(1, abi::DW_BF16, &[ROWS, HK, K]),
    );
    let (v, o) = (
        t(2, abi::DW_BF16, &[ROWS, HV, V]),
        t(3, abi::DW_BF16, &[ROWS, HV, V]),
    );
    let last = t(4, abi::DW_F32, &[1, HV, K, V]);
    let tensors = dw_prefill_tensors {
        size: size_of::<dw_prefill_tensors>(),
        q: &q,
        k: &k,
        v: &v,
        o: &o,
        final_state: &last,
        workspace: at(5),
        workspace_bytes: sizes.workspace_bytes,
        ..Default::default()
    };
    // SAFETY: the pointers are valid.
    let first = |summary| unsafe {
        let bytes = sizes.summary_bytes;
        dw_parallel_prefill_summarise_launch(plan, null_mut(), &tensors, summary, bytes)
    };
    // SAFETY: as above.
    let second = |gathered: *mut c_void, order: *mut c_void| unsafe {
        let bytes = sizes.gathered_bytes;
        let order = order.cast_const().cast();
        dw_parallel_prefill_finish_launch(plan, null_mut(), &tensors, gathered, bytes, order)
    };
    fine(first(at(6)));
    fine(second(at(6), null_mut()));
    overlaps(first(at(0)), "summary", "q");
    overlaps(first(at(2)), "summary", "v");
    for (i, name) in [(3, "o"), (4, "final_state"), (5, "workspace")] {
        refused(first(at(i)), &format!("{name}: it overlaps summary"));
        overlaps(second(at(i), null_mut()), name, "gathered");
        overlaps(second(at(6), at(i)), name, "order");
    }
    // SAFETY: made above, and nothing runs.
    unsafe {
        fine(dw_synchronize(x.context, null_mut()));
        dw_parallel_prefill_destroy(plan);
        fine(dw_free(x.context, memory));
    }
}

#[test]
fn of_conv() {
    let x = Launch::new(false);
    let conv_spec = dw_conv_spec {
        size: size_of::<dw_conv_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: HK as i32,
        value_heads: HV as i32,
        key_dim: K as i32,
        value_dim: V as i32,
        width: 4,
        ..Default::default()
    };
    let rows = part(&x, 10, abi::DW_BF16, &[TOKENS, CHANNELS]);
    let weight = part(&x, 11, abi::DW_BF16, &[CHANNELS, 4]);
    let state = part(&x, 12, abi::DW_BF16, &[2, CHANNELS, 3]);
    let (g, beta) = (
        part(&x, 13, abi::DW_F32, &[TOKENS, HV]),
        part(&x, 14, abi::DW_F32, &[TOKENS, HV]),
    );
    let mut plan: *mut dw_conv = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_conv_packed(x.context, &conv_spec, &lengths(), TOKENS, &mut plan) });
    let run = |change: &dyn Fn(&mut dw_conv_tensors)| {
        let mut tensors = dw_conv_tensors {
            size: size_of::<dw_conv_tensors>(),
            x: &rows,
            weight: &weight,
            state: &state,
            q: &x.q,
            k: &x.k,
            v: &x.v,
            a: &x.g,
            b: &x.g,
            a_log: &x.per_head,
            g: &g,
            beta: &beta,
            ..Default::default()
        };
        change(&mut tensors);
        // SAFETY: the pointers are valid.
        unsafe { dw_conv_launch(plan, null_mut(), &tensors) }
    };
    fine(run(&|_| {}));
    overlaps(run(&|t| t.q = t.k), "q", "k");
    let over_x = at(&x.q, rows.data);
    overlaps(run(&|t| t.q = &over_x), "q", "x.q");
    let over_x = at(&state, rows.data);
    overlaps(run(&|t| t.state = &over_x), "state", "x.q");
    overlaps(run(&|t| t.g = t.beta), "g", "beta");
    // SAFETY: made above.
    unsafe { dw_conv_destroy(plan) };
}

#[test]
fn of_norm_and_gate() {
    let x = Launch::new(false);
    let z = part(&x, 10, abi::DW_BF16, &[TOKENS, 1, HV * V]);
    let run = |y: &dw_tensor| {
        let tensors = dw_norm_tensors {
            size: size_of::<dw_norm_tensors>(),
            x: &x.v,
            z: &z,
            y,
            eps: 1e-6,
            ..Default::default()
        };
        // SAFETY: the pointers are valid.
        unsafe { dw_norm_launch(x.context, null_mut(), &tensors) }
    };
    fine(run(&x.o));
    fine(run(&x.v));
    overlaps(run(&at(&x.o, z.data)), "y", "z");
    let further = x.v.data.wrapping_byte_add(32);
    overlaps(run(&at(&x.o, further)), "y", "x");

    let beta = part(&x, 12, abi::DW_F32, &[TOKENS, HV]);
    let run = |g: &dw_tensor| {
        let tensors = dw_gate_tensors {
            size: size_of::<dw_gate_tensors>(),
            a: &x.g,
            b: &x.g,
            a_log: &x.per_head,
            g,
            beta: &beta,
            ..Default::default()
        };
        // SAFETY: the pointers are valid.
        unsafe { dw_gate_launch(x.context, null_mut(), &tensors) }
    };
    fine(run(&part(&x, 13, abi::DW_F32, &[TOKENS, HV])));
    overlaps(run(&beta), "g", "beta");
}

#[test]
fn of_decode_and_commit() {
    let x = Launch::new(false);
    let decode_spec = dw_decode_spec {
        size: size_of::<dw_decode_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: HK as i32,
        value_heads: HV as i32,
        key_dim: K as i32,
        value_dim: V as i32,
        tokens: 1,
        ..Default::default()
    };
    let row = |i, heads, dim| part(&x, i, abi::DW_BF16, &[1, heads, dim]);
    let (q, k, v, o) = (row(0, HK, K), row(1, HK, K), row(2, HV, V), row(3, HV, V));
    let pool = part(&x, 5, abi::DW_F32, &[1, HV, K, V]);
    let mut plan: *mut dw_decode = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_decode_create(x.context, &decode_spec, 1, &mut plan) });
    let run = |o: &dw_tensor| {
        let tensors = dw_decode_tensors {
            size: size_of::<dw_decode_tensors>(),
            q: &q,
            k: &k,
            v: &v,
            o,
            pool: &pool,
            ..Default::default()
        };
        // SAFETY: the pointers are valid.
        unsafe { dw_decode_launch(plan, null_mut(), &tensors) }
    };
    fine(run(&o));
    fine(run(&v));
    overlaps(run(&at(&o, q.data)), "o", "q");
    overlaps(run(&at(&o, k.data)), "o", "k");

    let states = part(&x, 12, abi::DW_F32, &[1, HV, K, V]);
    let rows = part(&x, 14, abi::DW_BF16, &[1, 1, CHANNELS]);
    let column = |from: i64, channels: i64| {
        let data = rows.data.wrapping_byte_add(2 * from as usize);
        let mut t = tensor(data, abi::DW_BF16, &[1, 1, channels]);
        t.strides[0] = CHANNELS;
        t
    };
    let keys = HK * K;
    let (x_q, x_k, x_v) = (
        column(0, keys),
        column(keys, keys),
        column(2 * keys, HV * V),
    );
    let conv_state = part(&x, 15, abi::DW_BF16, &[1, CHANNELS, 3]);
    let run = |change: &dyn Fn(&mut dw_commit_tensors)| {
        let mut tensors = dw_commit_tensors {
            size: size_of::<dw_commit_tensors>(),
            accepted: x.memory.cast_const().cast(),
            states: &states,
            pool: &pool,
            conv_state: &conv_state,
            x_q: &x_q,
            x_k: &x_k,
            x_v: &x_v,
            x_layout: abi::DW_CONV_SEPARATE as i32,
            ..Default::default()
        };
        change(&mut tensors);
        // SAFETY: the pointers are valid.
        unsafe { dw_commit_launch(plan, null_mut(), &tensors) }
    };
    fine(run(&|_| {}));
    overlaps(run(&|t| t.states = t.pool), "pool", "states");
    let over = at(&conv_state, pool.data);
    overlaps(run(&|t| t.conv_state = &over), "pool", "conv_state");
    let over = at(&conv_state, x_k.data);
    overlaps(run(&|t| t.conv_state = &over), "conv_state", "x_k");
    // SAFETY: made above.
    unsafe { dw_decode_destroy(plan) };
}

#[test]
fn of_layer() {
    let x = Launch::new(false);
    let layer_spec = dw_layer_spec {
        size: size_of::<dw_layer_spec>(),
        dtype: abi::DW_BF16 as i32,
        key_heads: HK as i32,
        value_heads: HV as i32,
        key_dim: K as i32,
        value_dim: V as i32,
        width: 4,
        eps: 1e-6,
        ..Default::default()
    };
    let rows = part(&x, 0, abi::DW_BF16, &[TOKENS, CHANNELS + HV * V]);
    let weight = part(&x, 3, abi::DW_BF16, &[CHANNELS, 4]);
    let conv_state = part(&x, 4, abi::DW_BF16, &[2, CHANNELS, 3]);
    let y = part(&x, 6, abi::DW_BF16, &[TOKENS, HV, V]);
    let a = part(&x, 2, abi::DW_F32, &[TOKENS, HV]);
    let mut plan: *mut dw_layer = null_mut();
    // SAFETY: the pointers are valid.
    fine(unsafe { dw_layer_packed(x.context, &layer_spec, &lengths(), TOKENS, 0, &mut plan) });
    let run = |change: &dyn Fn(&mut dw_layer_tensors)| {
        let mut tensors = dw_layer_tensors {
            size: size_of::<dw_layer_tensors>(),
            x: &rows,
            a: &a,
            b: &a,
            conv_weight: &weight,
            a_log: &x.per_head,
            conv_state: &conv_state,
            pool: &x.state,
            y: &y,
            workspace: x.tensors().workspace,
            workspace_bytes: x.bytes,
            ..Default::default()
        };
        change(&mut tensors);
        // SAFETY: the pointers are valid.
        unsafe { dw_layer_launch(plan, null_mut(), &tensors) }
    };
    fine(run(&|_| {}));
    let y_at = |data| {
        let y = at(&y, data);
        run(&|t| t.y = &y)
    };
    overlaps(y_at(rows.data), "y", "x.q");
    overlaps(y_at(conv_state.data), "y", "conv_state");
    overlaps(y_at(x.state.data), "y", "pool");
    overlaps(y_at(x.tensors().workspace), "y", "workspace");
    let over = at(&weight, conv_state.data);
    overlaps(run(&|t| t.conv_weight = &over), "conv_state", "conv_weight");
    let over = at(&conv_state, x.state.data);
    overlaps(run(&|t| t.conv_state = &over), "conv_state", "pool");
    // SAFETY: made above.
    unsafe { dw_layer_destroy(plan) };
}
