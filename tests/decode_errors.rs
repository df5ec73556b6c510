//! Decodes and commits that are refused: each by the name of the argument, before anything is enqueued.

mod common;

use common::{Memory, View, context, expect, view};
use deltawave::commit::{Commit, CommitConv, CommitTensors};
use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::decode::{Decode, DecodeSpec, DecodeTensors, Draft};
use deltawave::error::ArgumentKind::{
    self, Device, Dtype as WrongDtype, Pointer, Presence, Shape, Stride, Value,
};
use deltawave::gates::Gating;
use deltawave::state::StatePool;
use deltawave::types::{Dtype, StateLayout};

const BATCH: usize = 3;
const TOKENS: usize = 2;

/// Two key heads and four value heads, 32 by 16.
fn spec() -> DecodeSpec {
    DecodeSpec {
        tokens: TOKENS,
        ..DecodeSpec::new(2, 4, 32, 16)
    }
}

fn typed<const R: usize>(dtype: Dtype, shape: [usize; R]) -> View<R> {
    View {
        dtype,
        ..view(shape)
    }
}

/// A valid request, of which a test changes one thing.
struct Request {
    q: View<4>,
    k: View<4>,
    v: View<4>,
    g: View<3>,
    pool: View<4>,
    layout: StateLayout,
    slots: Option<usize>,
    write_slots: Option<usize>,
    has_initial_state: usize,
    states: View<5>,
    o: View<4>,
}

fn valid() -> Request {
    let bf16 = |heads, dim| typed(Dtype::Bf16, [BATCH, TOKENS, heads, dim]);
    Request {
        q: bf16(2, 32),
        k: bf16(2, 32),
        v: bf16(4, 16),
        g: typed(Dtype::F32, [BATCH, TOKENS, 4]),
        pool: typed(Dtype::F32, [5, 4, 32, 16]),
        layout: StateLayout::KeyMajor,
        slots: Some(BATCH),
        write_slots: Some(BATCH),
        has_initial_state: BATCH,
        states: typed(Dtype::F32, [BATCH, TOKENS, 4, 32, 16]),
        o: bf16(4, 16),
    }
}

fn tensors<'a>(r: &Request, memory: &'a Memory) -> DecodeTensors<'a> {
    DecodeTensors {
        q: memory.tensor(r.q).into(),
        k: memory.tensor(r.k).into(),
        v: memory.tensor(r.v).into(),
        gating: Gating::Given {
            g: Some(memory.tensor(r.g).into()),
            beta: None,
        },
        pool: StatePool {
            tensor: memory.tensor_mut(r.pool),
            layout: r.layout,
            slots: r.slots.map(|n| memory.per_sequence(n)),
            write_slots: r.write_slots.map(|n| memory.per_sequence(n)),
        },
        has_initial_state: Some(memory.per_sequence(r.has_initial_state)),
        states: Some(memory.tensor_mut(r.states)),
        o: memory.tensor_mut(r.o).into(),
    }
}

#[test]
fn tensors_are_refused_by_name() {
    let context = context();
    let memory = Memory::new(&context);
    let stream = context.stream().unwrap();
    let plan = Decode::new(&context, spec(), BATCH).unwrap();
    type Change = fn(&mut Request);
    let changes: [(&str, ArgumentKind, Change); 29] = [
        ("q", WrongDtype, |r| r.q.dtype = Dtype::F16),
        ("q", Shape, |r| r.q.shape[0] += 1),
        ("q", Shape, |r| r.q.shape[1] += 1),
        ("q", Pointer, |r| r.q.at = Some(1)),
        ("q", Device, |r| r.q.foreign = true),
        ("k", Stride, |r| r.k.strides[3] = 2),
        ("k", Shape, |r| r.k.shape[2] = 4),
        ("v", Stride, |r| r.v.strides[1] = 1 << 24),
        ("v", Pointer, |r| r.v.at = None),
        ("g", WrongDtype, |r| r.g.dtype = Dtype::Bf16),
        ("g", Shape, |r| r.g.shape[2] = 2),
        ("g", Device, |r| r.g.foreign = true),
        ("pool", WrongDtype, |r| r.pool.dtype = Dtype::F16),
        ("pool", Shape, |r| r.layout = StateLayout::ValueMajor),
        ("pool", Shape, |r| r.pool.shape[0] = 0),
        ("pool", Shape, |r| {
            (r.slots, r.pool.shape[0]) = (None, BATCH - 1);
        }),
        ("pool", Stride, |r| r.pool.strides[3] = 2),
        ("pool", Stride, |r| r.pool.strides[2] = 8),
        ("pool", Stride, |r| {
            r.pool.strides = [1 << 30, 1 << 28, (1 << 21) + 1, 1];
        }),
        ("pool", Pointer, |r| r.pool.at = None),
        ("slots", Shape, |r| r.slots = Some(BATCH + 1)),
        ("write_slots", Shape, |r| r.write_slots = Some(1)),
        ("has_initial_state", Shape, |r| r.has_initial_state = 1),
        ("states", WrongDtype, |r| r.states.dtype = Dtype::F16),
        ("states", Shape, |r| r.states.shape[1] = 1),
        ("states", Stride, |r| r.states.strides[1] = 0),
        ("states", Stride, |r| r.states.strides[2] = 1 << 41),
        ("o", Stride, |r| r.o.strides[2] = 8),
        ("o", WrongDtype, |r| r.o.dtype = Dtype::F32),
    ];
    for (argument, kind, change) in changes {
        let mut request = valid();
        change(&mut request);
        let outcome = plan.launch(&stream, &tensors(&request, &memory));
        expect(outcome, argument, kind);
    }
    let foreign = memory.foreign.context().stream().unwrap();
    let outcome = plan.launch(&foreign, &tensors(&valid(), &memory));
    expect(outcome, "stream", Device);
}

#[test]
fn specs_are_refused_by_name() {
    let context = context();
    let make = |spec: DecodeSpec| Decode::new(&context, spec, BATCH);
    let s = spec();
    let dtype = Dtype::F32;
    expect(make(DecodeSpec { dtype, ..s }), "dtype", WrongDtype);
    expect(make(DecodeSpec::new(0, 4, 32, 16)), "key_heads", Shape);
    expect(make(DecodeSpec::new(2, 5, 32, 16)), "value_heads", Shape);
    expect(make(DecodeSpec::new(2, 4, 24, 16)), "key_dim", Shape);
    expect(make(DecodeSpec::new(2, 4, 32, 272)), "value_dim", Shape);
    for tokens in [0, 17, usize::MAX] {
        expect(make(DecodeSpec { tokens, ..s }), "tokens", Shape);
    }
    let scale = Some(f32::NAN);
    expect(make(DecodeSpec { scale, ..s }), "scale", Value);
    let draft = Draft::Tree;
    let refused = make(DecodeSpec { draft, ..s });
    let words = refused.as_ref().expect_err("a tree").to_string();
    assert!(words.contains("chains only"), "{words}");
    expect(refused, "draft", Value);
    for batch in [1 << 24, usize::MAX] {
        expect(Decode::new(&context, s, batch), "batch", Shape);
    }
    let many = DecodeSpec::new(1, 1 << 19, 16, 256);
    expect(Decode::new(&context, many, 1 << 10), "batch", Shape);
}

/// Slots that the host knows are checked when the plan is made.
#[test]
fn slots_of_a_plan() {
    let context = context();
    let memory = Memory::new(&context);
    let make = |slots: &[i32], write: Option<&[i32]>| {
        let mut plan = Decode::new(&context, spec(), BATCH).unwrap();
        plan.set_slots(slots, write).map(|()| plan)
    };
    expect(make(&[1, 2], None), "slots", Shape);
    expect(make(&[1, 2, 1], None), "slots", Value);
    expect(make(&[1, 2, 3], Some(&[4, 5])), "write_slots", Shape);
    expect(make(&[1, 2, 3], Some(&[4, 5, 4])), "write_slots", Value);
    expect(make(&[1, 2, 3], Some(&[4, 1, 5])), "write_slots", Value);
    assert!(make(&[1, 1, -1], Some(&[-1, 4, -1])).is_ok());
    let plan = make(&[4, 2, 0], None).unwrap();
    let stream = context.stream().unwrap();
    let mut request = valid();
    let outcome = plan.launch(&stream, &tensors(&request, &memory));
    expect(outcome, "slots", Presence);
    (request.slots, request.write_slots) = (None, None);
    request.pool.shape[0] = 0;
    let outcome = plan.launch(&stream, &tensors(&request, &memory));
    expect(outcome, "pool", Shape);
    // Slots beyond the pool, too: 4 is the last that it has.
    request.pool = valid().pool;
    let launch = |plan: Decode| plan.launch(&stream, &tensors(&request, &memory));
    expect(launch(make(&[4, 5, 0], None).unwrap()), "slots", Value);
    let plan = make(&[4, 2, 0], Some(&[5, 2, -1])).unwrap();
    expect(launch(plan), "write_slots", Value);
}

/// A valid commit, of which a test changes one thing.
struct CommitRequest {
    accepted: usize,
    slots: Option<usize>,
    states: View<5>,
    pool: View<4>,
    x: [View<3>; 3],
    conv_state: View<3>,
    has_initial_state: usize,
}

fn valid_commit() -> CommitRequest {
    let rows = BATCH * TOKENS;
    CommitRequest {
        accepted: BATCH,
        slots: Some(BATCH),
        states: typed(Dtype::F32, [BATCH, TOKENS, 4, 32, 16]),
        pool: typed(Dtype::Bf16, [5, 4, 32, 16]),
        x: [[1, 64], [2, 32], [4, 16]].map(|[n, size]| typed(Dtype::Bf16, [rows, n, size])),
        conv_state: typed(Dtype::Bf16, [5, 192, 3]),
        has_initial_state: BATCH,
    }
}

fn commit_tensors<'a>(r: &CommitRequest, memory: &'a Memory) -> CommitTensors<'a> {
    CommitTensors {
        accepted: memory.per_sequence(r.accepted),
        slots: r.slots.map(|n| memory.per_sequence(n)),
        states: memory.tensor(r.states),
        pool: memory.tensor_mut(r.pool),
        layout: StateLayout::KeyMajor,
        conv: Some(CommitConv {
            x: ConvInput {
                q: memory.tensor(r.x[0]),
                k: memory.tensor(r.x[1]),
                v: memory.tensor(r.x[2]),
            },
            state: memory.tensor_mut(r.conv_state),
            layout: ConvStateLayout::ChannelMajor,
            has_initial_state: Some(memory.per_sequence(r.has_initial_state)),
        }),
    }
}

#[test]
fn commits_are_refused_by_name() {
    let context = context();
    let memory = Memory::new(&context);
    let stream = context.stream().unwrap();
    let plan = Commit::new(&context, spec(), BATCH).unwrap();
    type Change = fn(&mut CommitRequest);
    let changes: [(&str, ArgumentKind, Change); 17] = [
        ("accepted", Shape, |r| r.accepted = 1),
        ("slots", Shape, |r| r.slots = Some(9)),
        ("states", Shape, |r| r.states.shape[0] = 2),
        ("states", WrongDtype, |r| r.states.dtype = Dtype::F16),
        ("states", Pointer, |r| r.states.at = None),
        ("states", Device, |r| r.states.foreign = true),
        ("pool", Shape, |r| {
            (r.slots, r.pool.shape[0]) = (None, BATCH - 1);
        }),
        ("pool", Stride, |r| r.pool.strides[1] = 1),
        ("x.q", WrongDtype, |r| r.x[0].dtype = Dtype::F16),
        ("x.k", Shape, |r| r.x[1].shape[0] = BATCH),
        ("x.v", Stride, |r| r.x[2].strides[2] = 2),
        ("x.v", Device, |r| r.x[2].foreign = true),
        ("conv.state", Shape, |r| r.conv_state.shape[1] = 191),
        ("conv.state", Shape, |r| r.conv_state.shape[2] = 0),
        ("conv.state", WrongDtype, |r| {
            r.conv_state.dtype = Dtype::F32
        }),
        ("conv.state", Stride, |r| r.conv_state.strides[2] = 0),
        ("has_initial_state", Shape, |r| r.has_initial_state = 4),
    ];
    for (argument, kind, change) in changes {
        let mut request = valid_commit();
        change(&mut request);
        let outcome = plan.launch(&stream, &commit_tensors(&request, &memory));
        expect(outcome, argument, kind);
    }
    let tokens = 17;
    let wrong = Commit::new(&context, DecodeSpec { tokens, ..spec() }, BATCH);
    expect(wrong, "tokens", Shape);
}
