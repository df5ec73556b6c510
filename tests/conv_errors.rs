//! Convolutions that are refused: each by the name of the argument, before anything is enqueued.

mod common;

use common::{Memory, View, context, expect, view};
use deltawave::batch::{CuSeqlens, PerSequence};
use deltawave::conv::{
    Conv, ConvDrafts, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors,
};
use deltawave::error::ArgumentKind::{
    self, Device, Dtype as WrongDtype, Lengths, Pointer, Presence, Shape, Stride,
};
use deltawave::runtime::{Backend, Context};
use deltawave::tensor::TokensMut;
use deltawave::types::Dtype;

const TOKENS: usize = 9;
const LENGTHS: [i32; 3] = [0, 5, 9];

/// Two key heads of 6 and four value heads of 10: 64 channels.
fn spec() -> ConvSpec {
    ConvSpec::new(2, 4, 6, 10)
}

/// A valid request, of which a test changes one thing.
struct Request {
    x: [View<3>; 3],
    weight: View<2>,
    bias: View<1>,
    state: View<3>,
    layout: ConvStateLayout,
    has_initial_state: usize,
    slots: Option<usize>,
    out: [View<3>; 3],
}

fn valid() -> Request {
    Request {
        x: [[2, 6], [1, 12], [4, 10]].map(|[blocks, size]| view([TOKENS, blocks, size])),
        weight: view([64, 4]),
        bias: view([64]),
        state: view([3, 64, 3]),
        layout: ConvStateLayout::ChannelMajor,
        has_initial_state: 2,
        slots: Some(2),
        out: [[2, 6], [2, 6], [4, 10]].map(|[heads, dim]| view([TOKENS, heads, dim])),
    }
}

fn tensors<'a>(r: &Request, memory: &'a Memory) -> ConvTensors<'a> {
    let slots = r.slots.map(|n| memory.per_sequence::<i32>(n));
    let has = memory.per_sequence(r.has_initial_state);
    let [q, k, v] = r.out.map(|v| TokensMut::from(memory.tensor_mut(v)));
    ConvTensors {
        cu_seqlens: None,
        x: ConvInput {
            q: memory.tensor(r.x[0]),
            k: memory.tensor(r.x[1]),
            v: memory.tensor(r.x[2]),
        },
        weight: memory.tensor(r.weight),
        bias: Some(memory.tensor(r.bias)),
        state: Some(ConvState {
            tensor: memory.tensor_mut(r.state),
            layout: r.layout,
            has_initial_state: Some(has),
        }),
        slots,
        q,
        k,
        v,
        gates: None,
    }
}

#[test]
fn tensors_are_refused_by_name() {
    let (context, other) = (context(), Context::new(Backend::Auto, 0).unwrap());
    let memory = Memory::new(&context);
    let stream = context.stream().unwrap();
    let plan = Conv::packed(&context, spec(), &LENGTHS, TOKENS).unwrap();
    type Change = fn(&mut Request);
    let changes: [(&str, ArgumentKind, Change); 34] = [
        ("x.q", WrongDtype, |r| r.x[0].dtype = Dtype::F16),
        ("x.q", Shape, |r| r.x[0].shape[0] += 1),
        ("x.k", Shape, |r| r.x[1].shape[2] += 1),
        ("x.v", Shape, |r| r.x[2].shape = [TOKENS, usize::MAX, 2]),
        ("x.v", Stride, |r| r.x[2].strides[2] = 2),
        ("x.v", Stride, |r| r.x[2].strides[1] = 1 << 41),
        ("x.k", Stride, |r| r.x[1].strides[0] = 1 << 41),
        ("x.q", Pointer, |r| r.x[0].at = None),
        ("x.q", Pointer, |r| r.x[0].at = Some(1)),
        ("x.q", Device, |r| r.x[0].foreign = true),
        ("weight", Shape, |r| r.weight.shape = [4, 64]),
        ("weight", Shape, |r| r.weight.shape = [64, 3]),
        ("weight", Pointer, |r| r.weight.at = None),
        ("weight", Pointer, |r| {
            (r.weight.dtype, r.weight.at) = (Dtype::F32, Some(2));
        }),
        ("weight", Stride, |r| r.weight.strides[1] = 1 << 41),
        ("weight", Device, |r| r.weight.foreign = true),
        ("bias", Shape, |r| r.bias.shape = [63]),
        ("bias", Pointer, |r| r.bias.at = None),
        ("bias", Stride, |r| r.bias.strides = [1 << 41]),
        ("bias", Device, |r| r.bias.foreign = true),
        ("state", WrongDtype, |r| r.state.dtype = Dtype::F32),
        ("state", Shape, |r| r.state.shape = [3, 63, 3]),
        ("state", Shape, |r| r.state.shape = [3, 64, 2]),
        ("state", Shape, |r| r.layout = ConvStateLayout::TokenMajor),
        ("state", Shape, |r| r.state.shape = [0, 64, 3]),
        ("state", Shape, |r| {
            (r.slots, r.state.shape) = (None, [1, 64, 3]);
        }),
        ("state", Stride, |r| r.state.strides = [64, 1, 1]),
        ("state", Stride, |r| r.state.strides[0] = 1 << 41),
        ("state", Pointer, |r| r.state.at = None),
        ("has_initial_state", Shape, |r| r.has_initial_state = 3),
        ("slots", Shape, |r| r.slots = Some(1)),
        ("q", Shape, |r| r.out[0].shape = [TOKENS, 1, 12]),
        ("k", WrongDtype, |r| r.out[1].dtype = Dtype::F32),
        ("v", Stride, |r| r.out[2].strides = [10, 10, 1]),
    ];
    for (argument, kind, change) in changes {
        let mut request = valid();
        change(&mut request);
        let outcome = plan.launch(&stream, &tensors(&request, &memory));
        expect(outcome, argument, kind);
    }
    let foreign = other.stream().unwrap();
    let outcome = plan.launch(&foreign, &tensors(&valid(), &memory));
    expect(outcome, "stream", Device);
    // A dense batch is a packed one of equal lengths, and is handed over so.
    let mut request = tensors(&valid(), &memory);
    let dense = memory.tensor_mut(view([1, 9, 2, 6]));
    request.q = dense.into();
    expect(plan.launch(&stream, &request), "q", Shape);

    let plan = Conv::device(&context, spec(), TOKENS, 2).unwrap();
    let two = context.upload(&[0i32, 9]).unwrap();
    let given = |lengths| ConvTensors {
        cu_seqlens: Some(CuSeqlens::from(lengths)),
        ..tensors(&valid(), &memory)
    };
    let foreign = other.upload(&[0i32, 5, 9]).unwrap();
    expect(plan.launch(&stream, &given(&two)), "cu_seqlens", Lengths);
    expect(plan.launch(&stream, &given(&foreign)), "cu_seqlens", Device);
    // SAFETY: as above.
    let null = unsafe { PerSequence::from_raw(std::ptr::null(), 3) };
    let null = ConvTensors {
        cu_seqlens: Some(CuSeqlens::I32(null)),
        ..tensors(&valid(), &memory)
    };
    expect(plan.launch(&stream, &null), "cu_seqlens", Pointer);
    let absent = tensors(&valid(), &memory);
    expect(plan.launch(&stream, &absent), "cu_seqlens", Presence);
}

#[test]
fn specs_and_lengths_are_refused_by_name() {
    let context = context();
    let make = |spec: ConvSpec| Conv::packed(&context, spec, &LENGTHS, TOKENS);
    let s = spec();
    let dtype = Dtype::F32;
    expect(make(ConvSpec { dtype, ..s }), "dtype", WrongDtype);
    for width in [0, 1, 5] {
        expect(make(ConvSpec { width, ..s }), "width", Shape);
    }
    expect(make(ConvSpec::new(0, 4, 6, 10)), "key_heads", Shape);
    expect(make(ConvSpec::new(2, 0, 6, 10)), "value_heads", Shape);
    expect(make(ConvSpec::new(2, 5, 6, 10)), "value_heads", Shape);
    expect(make(ConvSpec::new(2, 4, 0, 10)), "key_dim", Shape);
    expect(make(ConvSpec::new(2, 4, 6, 0)), "value_dim", Shape);
    let huge = ConvSpec::new(1 << 40, 1 << 40, 1 << 40, 1 << 40);
    expect(make(huge), "heads and dims", Shape);
    let lengths = |cu_seqlens: &[i64], tokens| Conv::packed(&context, s, cu_seqlens, tokens);
    expect(lengths(&[], 9), "cu_seqlens", Lengths);
    expect(lengths(&[1, 9], 9), "cu_seqlens", Lengths);
    expect(lengths(&[0, 5, 4], 9), "cu_seqlens", Lengths);
    expect(lengths(&[0, 10], 9), "cu_seqlens", Lengths);
    expect(lengths(&[0], usize::MAX), "tokens", Shape);
    expect(lengths(&[0], i32::MAX as usize), "tokens", Shape);
    let many = Conv::device(&context, s, 9, 1 << 24);
    expect(many, "sequences", Lengths);
    let wide = ConvSpec::new(64, 64, 4096, 4096);
    let many = Conv::device(&context, wide, 1 << 30, 1);
    expect(many, "tokens, sequences and heads", Shape);

    let x = context.alloc::<half::bf16>(1 << 12).unwrap();
    let flat = |shape, strides| {
        let x = x.tensor_strided::<2>(shape, strides, 0).unwrap();
        ConvInput::flat(&x, &s)
    };
    expect(flat([9, 63], [63, 1]), "x", Shape);
    expect(flat([9, 64], [1, 9]), "x", Stride);
    let interleaved = |columns, spec: ConvSpec| {
        let x = x.tensor([9, columns]).unwrap();
        ConvInput::interleaved(&x, &spec)
    };
    expect(interleaved(103, s), "x", Shape);
    assert!(interleaved(104, s).is_ok());
    let odd = ConvSpec::new(2, 5, 6, 10);
    expect(interleaved(200, odd), "value_heads", Shape);
}

/// Nothing to do is no error.
#[test]
fn empty_batches() {
    let context = context();
    let memory = Memory::new(&context);
    let stream = context.stream().unwrap();
    let plan = Conv::packed(&context, spec(), &[0i64, 0, 0], 0).unwrap();
    let mut request = valid();
    for v in request.x.iter_mut().chain(&mut request.out) {
        (v.shape[0], v.at) = (0, None);
    }
    plan.launch(&stream, &tensors(&request, &memory)).unwrap();
    let none = Conv::packed(&context, spec(), &[0i32], TOKENS).unwrap();
    let mut request = valid();
    (request.slots, request.has_initial_state) = (Some(0), 0);
    // Outputs lie apart.
    for (i, v) in request.out.iter_mut().enumerate() {
        v.at = Some((i + 1) << 14);
    }
    request.state.at = Some(1 << 16);
    none.launch(&stream, &tensors(&request, &memory)).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn drafts_are_refused_by_name() {
    let context = context();
    let memory = Memory::new(&context);
    let stream = context.stream().unwrap();
    let plan = Conv::packed(&context, spec(), &LENGTHS, TOKENS).unwrap();
    let longest = LENGTHS.windows(2).map(|pair| pair[1] - pair[0]).max();
    let columns = longest.unwrap() as usize + 2;
    let accepted = |n: usize| ConvDrafts {
        accepted: Some(memory.per_sequence(n)),
        ..Default::default()
    };
    let wide = || {
        let mut request = valid();
        request.state = view([3, 64, columns]);
        request
    };
    let launch = |request: &Request, drafts: &ConvDrafts<'_>| {
        plan.launch_drafts(&stream, &tensors(request, &memory), drafts)
    };
    expect(launch(&wide(), &accepted(1)), "accepted", Shape);
    let mut narrow = wide();
    narrow.state = view([3, 64, columns - 1]);
    expect(launch(&narrow, &accepted(2)), "state", Shape);
    let mut stateless = tensors(&valid(), &memory);
    stateless.state = None;
    let outcome = plan.launch_drafts(&stream, &stateless, &accepted(2));
    expect(outcome, "accepted", Presence);
    for slot_columns in [0, (1 << 16) + 1] {
        let drafts = ConvDrafts {
            slot_columns: Some(slot_columns),
            ..accepted(2)
        };
        expect(launch(&wide(), &drafts), "slot_columns", Shape);
    }
    let drafts = ConvDrafts {
        slot_columns: Some(2),
        ..accepted(2)
    };
    expect(launch(&wide(), &drafts), "slots", Shape);
}
