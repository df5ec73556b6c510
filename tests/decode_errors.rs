//! Decodes and commits that are refused: each by the name of the argument, before anything is enqueued.

mod common;

use common::{Memory, View, context, expect, view};
use deltawave::batch::{CuSeqlens, PerSequence};
use deltawave::commit::{Commit, CommitConv, CommitTensors};
use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::decode::{Decode, DecodeSpec, DecodeTensors, Draft, Drafts};
use deltawave::error::ArgumentKind::{
    self, Device, Dtype as WrongDtype, Lengths, Pointer, Presence, Shape, Stride, Value,
};
use deltawave::gates::Gating;
use deltawave::state::StatePool;
use deltawave::tensor::TensorMut;
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
    let changes: [(&str, ArgumentKind, Change); 27] = [
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
    let changes: [(&str, ArgumentKind, Change); 16] = [
        ("accepted", Shape, |r| r.accepted = 1),
        ("slots", Shape, |r| r.slots = Some(9)),
        ("states", Shape, |r| r.states.shape[0] = 2),
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

/// Drafts, of which a test changes one thing.
struct DraftRequest {
    decode: Request,
    draft_slots: Option<usize>,
    read_slots: Option<usize>,
    accepted: Option<usize>,
    entries: usize,
}

fn valid_drafts() -> DraftRequest {
    let rows = 5;
    let mut decode = valid();
    // Packed rows: the first dimension of a view is 1.
    for tensor in [&mut decode.q, &mut decode.k, &mut decode.v, &mut decode.o] {
        *tensor = typed(tensor.dtype, [1, rows, tensor.shape[2], tensor.shape[3]]);
    }
    decode.g = typed(Dtype::F32, [1, rows, 4]);
    (decode.slots, decode.write_slots) = (None, None);
    DraftRequest {
        decode,
        draft_slots: Some(BATCH * TOKENS),
        read_slots: Some(BATCH * 4),
        accepted: Some(BATCH),
        entries: BATCH + 1,
    }
}

#[test]
fn drafts_are_refused_by_name() {
    let context = context();
    let memory = Memory::new(&context);
    let stream = context.stream().unwrap();
    let mut plan = Decode::new(&context, spec(), BATCH).unwrap();
    let packed = |v: View<4>| View {
        shape: [v.shape[1], v.shape[2], v.shape[3]],
        strides: [v.strides[1], v.strides[2], v.strides[3]],
        dtype: v.dtype,
        ..view([1, 1, 1])
    };
    let launch = |plan: &Decode, r: &DraftRequest| {
        let g = r.decode.g;
        let mut x = tensors(&r.decode, &memory);
        x.q = memory.tensor(packed(r.decode.q)).into();
        x.k = memory.tensor(packed(r.decode.k)).into();
        x.v = memory.tensor(packed(r.decode.v)).into();
        x.o = memory.tensor_mut(packed(r.decode.o)).into();
        x.gating = Gating::Given {
            g: Some(
                memory
                    .tensor(typed(g.dtype, [g.shape[1], g.shape[2]]))
                    .into(),
            ),
            beta: None,
        };
        x.states = None;
        let drafts = Drafts {
            draft_slots: r.draft_slots.map(|n| memory.per_sequence(n)),
            read_slots: r.read_slots.map(|n| memory.per_sequence(n)),
            accepted: r.accepted.map(|n| memory.per_sequence(n)),
            cu_seqlens: Some(CuSeqlens::I32(memory.per_sequence(r.entries))),
            null_slot: Some(0),
        };
        plan.launch_drafts(&stream, &x, &drafts)
    };
    type Change = fn(&mut DraftRequest);
    let changes: [(&str, ArgumentKind, Change); 14] = [
        ("draft_slots", Shape, |r| r.draft_slots = Some(BATCH)),
        ("read_slots", Shape, |r| r.read_slots = Some(BATCH * 4 + 1)),
        ("read_slots", Shape, |r| r.read_slots = Some(0)),
        ("read_slots", Presence, |r| r.read_slots = None),
        ("accepted", Presence, |r| r.accepted = None),
        ("accepted", Shape, |r| r.accepted = Some(BATCH + 1)),
        ("slots", Presence, |r| r.decode.slots = Some(BATCH)),
        ("write_slots", Presence, |r| {
            r.decode.write_slots = Some(BATCH)
        }),
        ("cu_seqlens", Lengths, |r| r.entries = BATCH),
        ("k", Shape, |r| r.decode.k.shape[1] = 6),
        ("o", Shape, |r| r.decode.o.shape[1] = 4),
        ("g", Shape, |r| r.decode.g.shape[1] = 6),
        // Without slots, sequence n has slot n.
        ("pool", Shape, |r| {
            (r.read_slots, r.accepted) = (None, None);
            r.decode.pool.shape[0] = BATCH - 1;
        }),
        ("has_initial_state", Shape, |r| {
            r.decode.has_initial_state = 1
        }),
    ];
    for (argument, kind, change) in changes {
        let mut request = valid_drafts();
        change(&mut request);
        expect(launch(&plan, &request), argument, kind);
    }
    plan.set_slots(&[0, 1, 2], None).unwrap();
    expect(launch(&plan, &valid_drafts()), "slots", Presence);
    // With slots of drafts the states are `[slots, 1, HV, ...]`; dense tensors have no lengths.
    let plan = Decode::new(&context, spec(), BATCH).unwrap();
    let mut request = valid();
    request.write_slots = None;
    let drafts = Drafts {
        draft_slots: Some(memory.per_sequence(BATCH * TOKENS)),
        ..Default::default()
    };
    let outcome = plan.launch_drafts(&stream, &tensors(&request, &memory), &drafts);
    expect(outcome, "states", Shape);
    let drafts = Drafts {
        cu_seqlens: Some(CuSeqlens::I32(memory.per_sequence(BATCH + 1))),
        ..Default::default()
    };
    let outcome = plan.launch_drafts(&stream, &tensors(&valid(), &memory), &drafts);
    expect(outcome, "q", Shape);
    // An output over the counts.
    let accepted = context.upload(&[1i32; 64]).unwrap();
    let mut request = tensors(&valid(), &memory);
    (request.states, request.pool.slots, request.pool.write_slots) = (None, None, None);
    // SAFETY: what is refused is never written.
    request.o = unsafe {
        let shape = [BATCH, TOKENS, 4, 16];
        let strides = [TOKENS * 64, 64, 16, 1];
        TensorMut::from_raw(accepted.address(), Dtype::Bf16, shape, strides).into()
    };
    let drafts = Drafts {
        read_slots: Some(memory.per_sequence(BATCH)),
        accepted: Some(PerSequence::from(&accepted)),
        ..Default::default()
    };
    let outcome = plan.launch_drafts(&stream, &request, &drafts);
    assert!(outcome.is_err(), "o is where the counts are");
}
