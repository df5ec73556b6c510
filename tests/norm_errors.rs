//! Gated norms that are refused: each by the name of the argument, before anything is enqueued.

mod common;

use common::{Memory, View, context, expect, view};
use deltawave::conv::{ConvInput, ConvSpec};
use deltawave::error::ArgumentKind::{
    self, Device, Dtype as WrongDtype, Pointer, Shape, Stride, Value,
};
use deltawave::norm::{GatedNorm, OutputGate};
use deltawave::runtime::{Backend, Context};
use deltawave::tensor::{TensorMut, TokensMut};
use deltawave::types::Dtype;

/// A valid request, of which a test changes one thing.
struct Request {
    x: View<3>,
    z: View<3>,
    weight: View<1>,
    y: View<3>,
    eps: f32,
}

fn valid() -> Request {
    Request {
        x: view([3, 4, 32]),
        z: view([3, 2, 64]),
        weight: view([32]),
        y: view([3, 4, 32]),
        eps: 1e-6,
    }
}

#[test]
fn tensors_that_are_refused() {
    let context = context();
    let other = Context::new(Backend::Auto, 0).unwrap();
    let stream = context.stream().unwrap();
    let memory = Memory::new(&context);
    let y = context.alloc::<u8>(1 << 20).unwrap();
    let mut foreign_y = other.alloc::<u8>(1 << 20).unwrap();
    let mut launch = |change: &dyn Fn(&mut Request)| {
        let mut r = valid();
        change(&mut r);
        let y: TokensMut<'_> = if r.y.foreign {
            let y = foreign_y.tensor_of_mut(r.y.dtype, r.y.shape, r.y.strides, 0);
            y.unwrap().into()
        } else {
            let base = y.address();
            let address =
                r.y.at
                    .map_or(std::ptr::null_mut(), |at| base.wrapping_byte_add(at));
            // SAFETY: what is refused is never written.
            unsafe { TensorMut::from_raw(address, r.y.dtype, r.y.shape, r.y.strides) }.into()
        };
        let norm = GatedNorm {
            x: Some(memory.tensor(r.x).into()),
            z: memory.tensor(r.z),
            weight: Some(memory.tensor(r.weight)),
            eps: r.eps,
            gate: OutputGate::Silu,
            y,
        };
        norm.launch(&context, &stream)
    };
    launch(&|_| ()).expect("the request is valid");
    type Change = fn(&mut Request);
    let cases: &[(&str, ArgumentKind, Change)] = &[
        ("y", WrongDtype, |r| r.y.dtype = Dtype::F32),
        ("y", Shape, |r| r.y = view([3, 4, 24])),
        ("y", Shape, |r| r.y = view([3, 4, 0])),
        ("y", Shape, |r| r.y = view([3, 4, 272])),
        ("y", Shape, |r| r.y = view([3, 0, 32])),
        ("y", Shape, |r| r.y = view([3, 1 << 20, 32])),
        ("y", Stride, |r| r.y.strides[2] = 2),
        ("y", Stride, |r| r.y.strides = [128, 16, 1]),
        ("y", Stride, |r| r.y.strides[0] = 1 << 24),
        ("y", Pointer, |r| r.y.at = None),
        ("y", Pointer, |r| r.y.at = Some(1)),
        ("y", Device, |r| r.y.foreign = true),
        ("y", Shape, |r| {
            // Not even their number fits into 64 bits.
            r.y.shape = [1 << 62, 1 << 19, 16];
            r.y.strides = [1 << 23, 16, 1];
            r.x = r.y;
            (r.z.shape, r.z.strides) = ([1 << 62, 1, 1 << 23], [0, 0, 1]);
            r.weight = view([16]);
        }),
        ("x", Shape, |r| r.x = view([4, 4, 32])),
        ("x", Shape, |r| r.x = view([3, 4, 16])),
        ("x", WrongDtype, |r| r.x.dtype = Dtype::F16),
        ("x", Stride, |r| r.x.strides[2] = 2),
        ("x", Pointer, |r| r.x.at = None),
        ("x", Device, |r| r.x.foreign = true),
        ("z", Shape, |r| r.z = view([3, 2, 32])),
        ("z", Shape, |r| r.z = view([2, 2, 64])),
        ("z", Shape, |r| r.z = view([3, 8, 16])),
        ("z", Shape, |r| r.z = view([3, usize::MAX, 64])),
        ("z", WrongDtype, |r| r.z.dtype = Dtype::F16),
        ("z", Stride, |r| r.z.strides[2] = 2),
        ("z", Stride, |r| r.z.strides[0] = 1 << 24),
        ("z", Stride, |r| r.z.strides[1] = 1 << 40),
        ("z", Pointer, |r| r.z.at = None),
        ("z", Device, |r| r.z.foreign = true),
        ("weight", Shape, |r| r.weight = view([31])),
        ("weight", Pointer, |r| r.weight.at = None),
        ("weight", Device, |r| r.weight.foreign = true),
        ("eps", Value, |r| r.eps = 0.0),
        ("eps", Value, |r| r.eps = -1.0),
        ("eps", Value, |r| r.eps = 1e-40),
        ("eps", Value, |r| r.eps = f32::INFINITY),
        ("eps", Value, |r| r.eps = f32::NAN),
    ];
    for (argument, kind, change) in cases {
        expect(launch(change), argument, *kind);
    }
}

/// Dense batches are refused, empty ones do nothing, and another context's stream is not used.
#[test]
fn batches_and_streams() {
    let context = context();
    let other = Context::new(Backend::Auto, 0).unwrap();
    let buffer = context.upload(&vec![0u8; 1 << 12]).unwrap();
    let mut y = context.upload(&vec![0u8; 1 << 12]).unwrap();
    let mut launch = |dense: bool, tokens: usize, stream| {
        let z = buffer.tensor_of(Dtype::Bf16, [tokens, 1, 16], [16, 16, 1], 0);
        let y = match dense {
            true => y
                .tensor_of_mut(Dtype::Bf16, [1, tokens, 1, 16], [0, 16, 16, 1], 0)
                .unwrap()
                .into(),
            false => y
                .tensor_of_mut(Dtype::Bf16, [tokens, 1, 16], [16, 16, 1], 0)
                .unwrap()
                .into(),
        };
        let norm = GatedNorm {
            x: None,
            z: z.unwrap(),
            weight: None,
            eps: 1e-6,
            gate: OutputGate::Sigmoid,
            y,
        };
        norm.launch(&context, stream)
    };
    let (stream, foreign) = (context.stream().unwrap(), other.stream().unwrap());
    expect(launch(true, 2, &stream), "y", Shape);
    expect(launch(false, 2, &foreign), "stream", Device);
    launch(false, 0, &stream).expect("no rows are no work");
    launch(false, 2, &stream).expect("it is valid");
}

/// Projections that are too narrow for z.
#[test]
fn views_of_z() {
    let context = context();
    let buffer = context.alloc::<u8>(1 << 12).unwrap();
    let spec = ConvSpec::new(1, 2, 4, 16);
    let rows = |columns: usize, stride| {
        buffer.tensor_of(Dtype::Bf16, [2, columns], [2 * columns, stride], 0)
    };
    // q and k have 4 columns each, v and z 32.
    for make in [ConvInput::flat_z, ConvInput::interleaved_z] {
        assert_eq!(make(&rows(72, 1).unwrap(), &spec).unwrap().shape()[0], 2);
        expect(make(&rows(71, 1).unwrap(), &spec), "x", Shape);
        expect(make(&rows(72, 2).unwrap(), &spec), "x", Stride);
    }
}

/// A dimension of length 1 has no second element: its stride leads nowhere, and may be any.
#[test]
fn strides_that_lead_nowhere() {
    let context = context();
    let stream = context.stream().unwrap();
    let ones = context.upload(&[0x80u8; 64]).unwrap();
    for wild in [usize::MAX, 1 << 41, 1 << 24, 7, 0] {
        let mut y = context.upload(&[0xffu8; 32]).unwrap();
        let z = ones
            .tensor_of(Dtype::Bf16, [1, 1, 16], [wild, wild, 1], 0)
            .unwrap();
        let to = y.tensor_of_mut(Dtype::Bf16, [1, 1, 16], [wild, wild, 1], 0);
        let norm = GatedNorm {
            x: Some(z.clone().into()),
            z,
            weight: None,
            eps: 1e-6,
            gate: OutputGate::Silu,
            y: to.unwrap().into(),
        };
        norm.launch(&context, &stream).unwrap();
        let found = y.download(&stream).unwrap();
        assert!(!found.contains(&0xff), "a stride of {wild}: {found:?}");
        // Column after column, where there is one row.
        let column = ones.tensor_of::<2>(Dtype::Bf16, [16, 1], [1, wild], 0);
        assert_eq!(column.unwrap().strides(), [1, 1]);
    }
}
