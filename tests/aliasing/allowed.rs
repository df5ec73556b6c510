//! Memory that arguments may share: the bits are those of separate memory.

use deltawave_sim::launch::{Options, WaveOrder};

use super::common::{View, simulated};
use super::operations::*;

/// The bytes of a launch in every order in which the simulator may run waves.
fn in_every_order(
    device: &deltawave::runtime::Context,
    mut launch: impl FnMut() -> Vec<u8>,
) -> Vec<u8> {
    let first = launch();
    if simulated(device) {
        let usual = deltawave_sim::hip::options();
        for order in [
            WaveOrder::InStep,
            WaveOrder::Seeded(1),
            WaveOrder::Seeded(2),
        ] {
            deltawave_sim::hip::set_options(Options { order, ..usual });
            let other = launch();
            deltawave_sim::hip::set_options(usual);
            assert!(other == first, "{order:?}");
        }
    }
    first
}

/// A view in columns of rows of so many elements, from a column on.
fn in_rows(v: View<3>, at: usize, row: usize, column: usize) -> View<3> {
    View {
        at: Some(at + 2 * column),
        strides: [row, v.strides[1], 1],
        ..v
    }
}

const ROOM: usize = 5 << 20;

#[test]
fn o_in_the_place_of_v_in_prefill() {
    for segments in [1, 3] {
        for device in [false, true] {
            if device && segments > 1 {
                continue;
            }
            let (mut arena, mut separate) = prefill();
            separate.segments = segments;
            let expected = separate.launch(&mut arena, device).expect("a launch");
            let mut shared = separate;
            shared.o = shared.v;
            // v past the last sequence becomes zeros, as o does.
            let context = arena.context.clone();
            let found = in_every_order(&context, || {
                shared.launch(&mut arena, device).expect("o may be v")
            });
            let of = |bytes: &[u8], r: &PrefillRequest| (taken(bytes, &r.o), taken(bytes, &r.last));
            assert!(
                of(&found, &shared) == of(&expected, &separate),
                "{segments} segments"
            );
        }
    }
}

#[test]
fn prefill_in_rows_side_by_side() {
    let (mut arena, mut separate) = prefill();
    separate.segments = 2;
    let expected = separate.launch(&mut arena, false).expect("a launch");
    let (keys, values) = (HK * K, HV * V);
    // q | k | v | o, and o between the others.
    let row = 2 * keys + 2 * values;
    for [q, k, v, o] in [
        [0, keys, 2 * keys, 2 * keys + values],
        [0, keys + values, 2 * keys + values, keys],
    ] {
        let mut packed = separate;
        packed.q = in_rows(packed.q, ROOM, row, q);
        packed.k = in_rows(packed.k, ROOM, row, k);
        packed.v = in_rows(packed.v, ROOM, row, v);
        packed.o = in_rows(packed.o, ROOM, row, o);
        packed.fill(&mut arena);
        let found = packed.launch(&mut arena, false).expect("rows side by side");
        assert!(taken(&found, &packed.o) == taken(&expected, &separate.o));
    }
    // The heads of v and o take turns.
    let mut interleaved = separate;
    let strides = [2 * values, 2 * V, 1];
    (interleaved.v, interleaved.o) = (
        moved(interleaved.v, ROOM),
        moved(interleaved.o, ROOM + 2 * V),
    );
    (interleaved.v.strides, interleaved.o.strides) = (strides, strides);
    interleaved.fill(&mut arena);
    let found = interleaved
        .launch(&mut arena, false)
        .expect("heads that take turns");
    assert!(taken(&found, &interleaved.o) == taken(&expected, &separate.o));
    interleaved.o = moved(interleaved.o, ROOM + 2 * (V - 1));
    assert!(interleaved.launch(&mut arena, false).is_err());
}

#[test]
fn final_states_in_the_place_of_initial_ones() {
    for segments in [1, 3] {
        let (mut arena, mut separate) = prefill();
        separate.segments = segments;
        let expected = separate.launch(&mut arena, false).expect("a launch");
        let mut shared = separate;
        shared.last = shared.initial;
        let context = arena.context.clone();
        let found = in_every_order(&context, || {
            shared.launch(&mut arena, false).expect("both may be one")
        });
        assert!(taken(&found, &shared.last) == taken(&expected, &separate.last));
        assert!(taken(&found, &shared.o) == taken(&expected, &separate.o));
    }
}

#[test]
fn snapshots_behind_the_pool() {
    let (mut arena, valid) = prefill();
    let mut request = valid.on_pool(ROOM);
    // Further slots of the same memory, none of them the pool's.
    let pool = request.pool.expect("a pool");
    request.snapshots = Some(over(pool, &pool, SLOTS * 4 * HV * K * V));
    request.launch(&mut arena, false).expect("they lie apart");
}

#[test]
fn o_in_the_place_of_v_in_decode() {
    for packed in [false, true] {
        for states in [false, true] {
            let (mut arena, mut separate) = decode();
            if !states {
                separate.states = None;
            }
            let expected = separate.launch(&mut arena).expect("a launch");
            let mut shared = separate;
            // Described in another way than v where it is packed.
            (shared.o, shared.packed) = (shared.v, packed);
            let context = arena.context.clone();
            let found = in_every_order(&context, || shared.launch(&mut arena).expect("o may be v"));
            assert!(taken(&found, &shared.o) == taken(&expected, &separate.o));
            assert!(taken(&found, &shared.pool) == taken(&expected, &separate.pool));
        }
    }
}

#[test]
fn norm_in_place() {
    let (mut arena, separate) = norm();
    let expected = separate.launch(&mut arena).expect("a launch");
    let mut shared = separate;
    shared.y = separate.x.expect("x");
    for x in [separate.x, None] {
        shared.x = x;
        let context = arena.context.clone();
        let found = in_every_order(&context, || shared.launch(&mut arena).expect("y may be x"));
        assert!(taken(&found, &shared.y) == taken(&expected, &separate.y));
    }
}

#[test]
fn gates_in_place() {
    let (mut arena, separate) = gate();
    let expected = separate.launch(&mut arena).expect("a launch");
    let shared = GateRequest {
        g: separate.a,
        beta: separate.b,
        ..separate
    };
    let context = arena.context.clone();
    let found = in_every_order(&context, || shared.launch(&mut arena).expect("g may be a"));
    assert!(taken(&found, &shared.g) == taken(&expected, &separate.g));
    assert!(taken(&found, &shared.beta) == taken(&expected, &separate.beta));

    let (mut arena, separate) = conv();
    let expected = separate.launch(&mut arena, false).expect("a launch");
    let mut shared = separate;
    (shared.gate.g, shared.gate.beta) = (shared.gate.a, shared.gate.b);
    let found = in_every_order(&context, || {
        shared.launch(&mut arena, false).expect("g may be a")
    });
    assert!(taken(&found, &shared.gate.g) == taken(&expected, &separate.gate.g));
    assert!(taken(&found, &shared.gate.beta) == taken(&expected, &separate.gate.beta));
}

#[test]
fn conv_writes_rows_side_by_side() {
    let (mut arena, separate) = conv();
    let expected = separate.launch(&mut arena, false).expect("a launch");
    let mut packed = separate;
    packed.q = in_rows(packed.q, ROOM, CHANNELS, 0);
    packed.k = in_rows(packed.k, ROOM, CHANNELS, HK * K);
    packed.v = in_rows(packed.v, ROOM, CHANNELS, 2 * HK * K);
    let found = packed.launch(&mut arena, false).expect("rows side by side");
    for (to, from) in [
        (packed.q, separate.q),
        (packed.k, separate.k),
        (packed.v, separate.v),
    ] {
        assert!(taken(&found, &to) == taken(&expected, &from));
    }
    packed.k = in_rows(packed.k, ROOM, CHANNELS, HK * K - 1);
    assert!(packed.launch(&mut arena, false).is_err());
}

/// Bytes of a conv state, of a recurrent state, and of a page of both.
const CONV_BYTES: usize = 2 * 3 * CHANNELS;
const PAGE: usize = CONV_BYTES + 4 * HV * K * V;

#[test]
fn pools_in_the_pages_of_one_memory() {
    let (mut arena, separate) = commit();
    let expected = separate.launch(&mut arena).expect("a launch");
    let mut paged = separate;
    (paged.conv, paged.pool) = (
        moved(paged.conv, ROOM),
        moved(paged.pool, ROOM + CONV_BYTES),
    );
    (paged.conv.strides[0], paged.pool.strides[0]) = (PAGE / 2, PAGE / 4);
    paged.fill(&mut arena);
    let found = paged.launch(&mut arena).expect("states apart");
    assert!(taken(&found, &paged.conv) == taken(&expected, &separate.conv));
    assert!(taken(&found, &paged.pool) == taken(&expected, &separate.pool));
    paged.pool = moved(paged.pool, ROOM + CONV_BYTES - 4);
    assert!(paged.launch(&mut arena).is_err());

    let (mut arena, separate) = layer();
    let expected = separate.launch(&mut arena, false).expect("a launch");
    let mut paged = separate;
    paged.conv = moved(paged.conv, ROOM);
    paged.recurrent = moved(paged.recurrent, ROOM + CONV_BYTES);
    (paged.conv.strides[0], paged.recurrent.strides[0]) = (PAGE / 2, PAGE / 4);
    paged.fill(&mut arena);
    let found = paged.launch(&mut arena, false).expect("states apart");
    assert!(taken(&found, &paged.y) == taken(&expected, &separate.y));
    assert!(taken(&found, &paged.conv) == taken(&expected, &separate.conv));
    assert!(taken(&found, &paged.recurrent) == taken(&expected, &separate.recurrent));
}

#[test]
fn nothing_overlaps_what_has_no_elements() {
    let (mut arena, valid) = norm();
    let mut request = valid;
    let empty = |v: View<3>| View {
        shape: [0, v.shape[1], v.shape[2]],
        ..v
    };
    request.x = valid.x.map(empty);
    (request.z, request.y) = (empty(valid.z), empty(over(valid.y, &valid.z, 0)));
    request.launch(&mut arena).expect("nothing to write");
}
