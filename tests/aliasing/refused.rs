//! Overlaps that are refused: the error is the output's, and says which argument it overlaps.

use deltawave::Error;
use deltawave::error::ArgumentKind;
use deltawave::types::StateLayout;

use super::common::View;
use super::operations::*;

#[track_caller]
fn refused(outcome: Result<Vec<u8>, Error>, output: &str, other: &str) {
    match outcome {
        Err(Error::Argument(error)) => {
            let found = (error.argument.as_str(), error.kind);
            assert_eq!(found, (output, ArgumentKind::Overlap), "{other}: {error}");
            let wanted = format!("it overlaps {other}, between addresses 0x");
            assert!(error.was.starts_with(&wanted), "{other}: {error}");
            let allowed = "an output must have memory of its own";
            assert!(error.allowed.starts_with(allowed), "{error}");
        }
        Err(other) => panic!("{output}: {other}"),
        Ok(_) => panic!("{output} over {other}: accepted"),
    }
}

fn at<const R: usize>(v: &View<R>) -> usize {
    v.at.expect("an address")
}

#[test]
fn prefill_refuses() {
    let (mut arena, valid) = prefill();
    valid.launch(&mut arena, false).expect("it is valid");
    valid.launch(&mut arena, true).expect("it is valid");
    let pool = valid.on_pool(7 << 20);
    pool.launch(&mut arena, false).expect("it is valid");
    let raw = PrefillRequest {
        a_log: Some(View {
            shape: [HV],
            strides: [1],
            ..over(valid_vector(), &valid.initial, 4096)
        }),
        ..valid
    };
    type Change = fn(&mut PrefillRequest);
    let changes: &[(&PrefillRequest, &str, &str, Change)] = &[
        (&valid, "o", "q", |r| r.o = over(r.o, &r.q, 0)),
        (&valid, "o", "k", |r| r.o = over(r.o, &r.k, 2 * K)),
        // Not all of v: a row further, or a row fewer.
        (&valid, "o", "v", |r| r.o = over(r.o, &r.v, 2 * HV * V)),
        (&valid, "o", "v", |r| {
            r.o = over(r.o, &r.v, 0);
            r.o.strides = [V, TOKENS * V, 1];
        }),
        (&valid, "o", "g", |r| r.o = over(r.o, &r.g, 0)),
        (&valid, "o", "beta", |r| r.o = over(r.o, &r.beta, 4)),
        (&raw, "o", "a", |r| r.g = over(r.g, &r.o, 4)),
        (&raw, "o", "a_log", |r| {
            r.a_log = Some(over(r.a_log.unwrap(), &r.o, 64))
        }),
        (&valid, "o", "initial_state", |r| {
            r.initial = over(r.initial, &r.o, 0)
        }),
        (&valid, "o", "final_state", |r| r.o = over(r.o, &r.last, 0)),
        (&valid, "o", "has_initial_state", |r| r.has = at(&r.o) + 9),
        (&valid, "o", "workspace", |r| {
            r.o = moved(r.o, r.workspace + 4096)
        }),
        (&valid, "final_state", "v", |r| {
            r.last = over(r.last, &r.v, 0)
        }),
        (&valid, "final_state", "initial_state", |r| {
            r.last = over(r.last, &r.initial, 4 * K * V);
        }),
        (&valid, "final_state", "initial_state", |r| {
            r.last = over(r.last, &r.initial, 0);
            (r.last.shape, r.last.strides) = ([2, HV, V, K], [HV * K * V, K * V, K, 1]);
            r.last_layout = StateLayout::ValueMajor;
        }),
        (&valid, "final_state", "workspace", |r| {
            r.last = moved(r.last, r.workspace)
        }),
        (&valid, "workspace", "q", |r| {
            r.q = moved(r.q, r.workspace + 256)
        }),
        (&pool, "o", "pool", |r| r.o = over(r.o, &r.pool.unwrap(), 0)),
        (&pool, "o", "slots", |r| r.slots = at(&r.o)),
        (&pool, "o", "write_slots", |r| r.write_slots = at(&r.o) + 4),
        (&pool, "pool", "k", |r| {
            r.pool = Some(over(r.pool.unwrap(), &r.k, 0))
        }),
        (&pool, "pool", "workspace", |r| {
            r.pool = Some(moved(r.pool.unwrap(), r.workspace))
        }),
        (&pool, "pool", "slots", |r| r.slots = at(&r.pool.unwrap())),
        (&pool, "snapshots", "pool", |r| r.snapshots = r.pool),
        (&pool, "snapshots", "pool", |r| {
            r.snapshots = Some(over(r.pool.unwrap(), &r.pool.unwrap(), 4 * HV * K * V));
        }),
        (&pool, "snapshots", "snapshot_slots", |r| {
            r.snapshots = Some(moved(r.pool.unwrap(), 6 << 20));
            r.snapshot_slots = 6 << 20;
        }),
    ];
    for (base, output, other, change) in changes {
        let mut request = **base;
        change(&mut request);
        for device in [false, true] {
            refused(request.launch(&mut arena, device), output, other);
        }
    }
    let mut request = valid;
    request.lengths = at(&valid.o) + 128;
    refused(request.launch(&mut arena, true), "o", "cu_seqlens");
    request.lengths = valid.workspace;
    refused(request.launch(&mut arena, true), "workspace", "cu_seqlens");
}

fn valid_vector() -> View<1> {
    View {
        dtype: deltawave::types::Dtype::F32,
        ..super::common::view([HV])
    }
}

#[test]
fn decode_refuses() {
    let (mut arena, valid) = decode();
    valid.launch(&mut arena).expect("it is valid");
    type Change = fn(&mut DecodeRequest);
    let changes: &[(&str, &str, Change)] = &[
        ("o", "q", |r| r.o = over(r.o, &r.q, 0)),
        ("o", "k", |r| r.o = over(r.o, &r.k, 16)),
        ("o", "v", |r| r.o = over(r.o, &r.v, 2)),
        ("o", "g", |r| r.g = over(r.g, &r.o, 0)),
        ("o", "beta", |r| r.beta = over(r.beta, &r.o, 0)),
        ("o", "pool", |r| r.o = over(r.o, &r.pool, 4 * K * V)),
        ("o", "states", |r| r.o = over(r.o, &r.states.unwrap(), 0)),
        ("o", "slots", |r| r.slots = at(&r.o) + 8),
        ("o", "write_slots", |r| r.write_slots = at(&r.o)),
        ("o", "has_initial_state", |r| r.has = at(&r.o) + 1),
        ("states", "pool", |r| {
            r.states = Some(over(r.states.unwrap(), &r.pool, 0))
        }),
        ("states", "v", |r| r.v = over(r.v, &r.states.unwrap(), 0)),
        ("pool", "q", |r| r.q = over(r.q, &r.pool, 128)),
        ("pool", "slots", |r| r.slots = at(&r.pool)),
    ];
    for (output, other, change) in changes {
        let mut request = valid;
        change(&mut request);
        refused(request.launch(&mut arena), output, other);
    }
}

#[test]
fn commit_refuses() {
    let (mut arena, valid) = commit();
    valid.launch(&mut arena).expect("it is valid");
    type Change = fn(&mut CommitRequest);
    let changes: &[(&str, &str, Change)] = &[
        ("pool", "states", |r| r.states = over(r.states, &r.pool, 0)),
        ("pool", "conv.state", |r| r.conv = over(r.conv, &r.pool, 64)),
        ("pool", "accepted", |r| r.accepted = at(&r.pool) + 8),
        ("pool", "slots", |r| r.slots = at(&r.pool)),
        ("pool", "x.v", |r| r.x[2] = over(r.x[2], &r.pool, 0)),
        ("conv.state", "x.q", |r| r.x[0] = over(r.x[0], &r.conv, 0)),
        ("conv.state", "x.k", |r| r.x[1] = over(r.x[1], &r.conv, 0)),
        ("conv.state", "states", |r| {
            r.conv = over(r.conv, &r.states, 0)
        }),
        ("conv.state", "has_initial_state", |r| r.has = at(&r.conv)),
    ];
    for (output, other, change) in changes {
        let mut request = valid;
        change(&mut request);
        refused(request.launch(&mut arena), output, other);
    }
}

#[test]
fn conv_refuses() {
    let (mut arena, valid) = conv();
    valid.launch(&mut arena, false).expect("it is valid");
    valid.launch(&mut arena, true).expect("it is valid");
    type Change = fn(&mut ConvRequest);
    let changes: &[(&str, &str, Change)] = &[
        ("q", "k", |r| r.q = over(r.q, &r.k, 0)),
        ("k", "v", |r| r.v = over(r.v, &r.k, 2 * K)),
        ("q", "x.q", |r| r.q = over(r.q, &r.x[0], 0)),
        // Exactly where it is read: tokens that follow read it, too.
        ("q", "x.q", |r| {
            r.q = over(r.q, &r.x[0], 0);
            r.q.strides[0] = CHANNELS;
        }),
        ("v", "x.v", |r| r.x[2] = over(r.x[2], &r.v, 0)),
        ("k", "weight", |r| r.weight = over(r.weight, &r.k, 0)),
        ("k", "bias", |r| r.bias = over(r.bias, &r.k, 0)),
        ("v", "state", |r| r.state = over(r.state, &r.v, 0)),
        ("v", "slots", |r| r.slots = at(&r.v)),
        ("v", "has_initial_state", |r| r.has = at(&r.v)),
        ("state", "x.q", |r| r.state = over(r.state, &r.x[0], 0)),
        ("state", "slots", |r| r.slots = at(&r.state)),
        ("q", "g", |r| r.gate.g = over(r.gate.g, &r.q, 0)),
        ("g", "beta", |r| r.gate.g = r.gate.beta),
        ("g", "b", |r| r.gate.g = r.gate.b),
        ("beta", "a_log", |r| {
            r.gate.a_log = over(r.gate.a_log, &r.gate.beta, 8)
        }),
        ("beta", "dt_bias", |r| {
            r.gate.dt_bias = over(r.gate.dt_bias, &r.gate.beta, 8)
        }),
    ];
    for (output, other, change) in changes {
        let mut request = valid;
        change(&mut request);
        for device in [false, true] {
            refused(request.launch(&mut arena, device), output, other);
        }
    }
    let mut request = valid;
    request.lengths = at(&valid.q);
    refused(request.launch(&mut arena, true), "q", "cu_seqlens");
    // States that are only read are an input.
    let mut request = valid;
    request.keeps_states = true;
    request.state = over(valid.state, &valid.x[0], 0);
    request.launch(&mut arena, false).expect("two inputs");
    request.state = over(valid.state, &valid.q, 0);
    refused(request.launch(&mut arena, false), "q", "state");
}

#[test]
fn norm_refuses() {
    let (mut arena, valid) = norm();
    valid.launch(&mut arena).expect("it is valid");
    type Change = fn(&mut NormRequest);
    let changes: &[(&str, Change)] = &[
        ("z", |r| r.y = over(r.y, &r.z, 0)),
        ("x", |r| r.y = over(r.y, &r.x.unwrap(), 2 * V)),
        ("weight", |r| r.weight = over(r.weight, &r.y, 32)),
        ("z", |r| (r.x, r.z) = (None, over(r.z, &r.y, 64))),
    ];
    for (other, change) in changes {
        let mut request = valid;
        change(&mut request);
        refused(request.launch(&mut arena), "y", other);
    }
}

#[test]
fn gate_refuses() {
    let (mut arena, valid) = gate();
    valid.launch(&mut arena).expect("it is valid");
    type Change = fn(&mut GateRequest);
    let changes: &[(&str, &str, Change)] = &[
        ("g", "beta", |r| r.g = r.beta),
        ("g", "a", |r| r.g = over(r.g, &r.a, 4)),
        ("g", "b", |r| r.g = r.b),
        ("beta", "a", |r| r.beta = r.a),
        ("beta", "a_log", |r| r.a_log = over(r.a_log, &r.beta, 0)),
        ("g", "dt_bias", |r| r.dt_bias = over(r.dt_bias, &r.g, 16)),
    ];
    for (output, other, change) in changes {
        let mut request = valid;
        change(&mut request);
        refused(request.launch(&mut arena), output, other);
    }
}

#[test]
fn layer_refuses() {
    let (mut arena, valid) = layer();
    valid.launch(&mut arena, false).expect("it is valid");
    valid.launch(&mut arena, true).expect("it is valid");
    type Change = fn(&mut LayerRequest);
    let changes: &[(&str, &str, Change)] = &[
        ("y", "x.q", |r| r.y = over(r.y, &r.x[0], 0)),
        ("y", "z", |r| {
            r.y = over(r.y, &r.z, 0);
            r.y.strides[0] = CHANNELS + HV * V;
        }),
        ("y", "a", |r| r.a = over(r.a, &r.y, 0)),
        ("y", "b", |r| r.b = over(r.b, &r.y, 0)),
        ("y", "states.conv", |r| r.y = over(r.y, &r.conv, 0)),
        ("y", "states.recurrent", |r| {
            r.y = over(r.y, &r.recurrent, 0)
        }),
        ("y", "workspace", |r| r.y = moved(r.y, r.workspace + 512)),
        ("y", "weights.norm", |r| r.norm = over(r.norm, &r.y, 0)),
        ("y", "states.slots", |r| r.slots = at(&r.y)),
        ("states.conv", "states.recurrent", |r| {
            r.conv = over(r.conv, &r.recurrent, 0)
        }),
        ("states.conv", "x.q", |r| r.conv = over(r.conv, &r.x[0], 0)),
        ("states.conv", "weights.conv", |r| {
            r.conv_weight = over(r.conv_weight, &r.conv, 0);
        }),
        ("states.conv", "weights.conv_bias", |r| {
            r.conv_bias = over(r.conv_bias, &r.conv, 0);
        }),
        ("states.recurrent", "weights.a_log", |r| {
            r.a_log = over(r.a_log, &r.recurrent, 0)
        }),
        ("states.recurrent", "weights.dt_bias", |r| {
            r.dt_bias = over(r.dt_bias, &r.recurrent, 0);
        }),
        ("states.recurrent", "states.has_initial_state", |r| {
            r.has = at(&r.recurrent)
        }),
        ("states.recurrent", "workspace", |r| {
            r.recurrent = moved(r.recurrent, r.workspace);
        }),
        ("workspace", "x.q", |r| r.x[0] = moved(r.x[0], r.workspace)),
    ];
    for (output, other, change) in changes {
        let mut request = valid;
        change(&mut request);
        for device in [false, true] {
            refused(request.launch(&mut arena, device), output, other);
        }
    }
    let mut request = valid;
    request.lengths = at(&valid.y);
    refused(request.launch(&mut arena, true), "y", "cu_seqlens");
}
