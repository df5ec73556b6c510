//! Gradients of the gated norm.

use deltawave::error::{ArgumentKind, Error};
use deltawave::norm::{GatedNormBackward, OutputGate};
use deltawave::runtime::Context;
use deltawave::tensor::Buffer;
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::oracle::norm::NormProblem;
use deltawave_lab::oracle::norm_backward::{NormGradients, gated_norm_backward};
use deltawave_sim::launch::{Options, WaveOrder};

use crate::common::{context, simulated};
use crate::placed::{Placed, assert_close, padded};

#[derive(Clone, Debug)]
struct Case {
    dtype: Dtype,
    shape: [usize; 3],
    /// Blocks of z and of its gradient.
    blocks: [usize; 2],
    gate: OutputGate,
    weight: Option<(Dtype, usize)>,
    eps: f32,
    pad: usize,
    offset: usize,
    /// d_y is one row for all tokens.
    expanded: bool,
    seed: u64,
}

impl Case {
    fn new(dtype: Dtype, tokens: usize, heads: usize, dim: usize) -> Self {
        Case {
            dtype,
            shape: [tokens, heads, dim],
            blocks: [heads, heads],
            gate: OutputGate::Silu,
            weight: Some((Dtype::F32, 1)),
            eps: 1e-6,
            pad: 0,
            offset: 0,
            expanded: false,
            seed: 1,
        }
    }

    fn in_blocks(&self, blocks: usize) -> [usize; 3] {
        let [tokens, heads, dim] = self.shape;
        [tokens, blocks, heads / blocks * dim]
    }
}

struct Data {
    x: HostTensor,
    z: HostTensor,
    weight: Option<HostTensor>,
    d_y: HostTensor,
}

impl Data {
    fn new(case: &Case) -> Self {
        let n = case.shape.iter().product();
        let draw = |name, dtype, n| random_normal(dtype, name, n, case.seed);
        let mut d_y = draw("d_y", case.dtype, n);
        if case.expanded {
            let row = case.shape[1] * case.shape[2];
            d_y = HostTensor::new(case.dtype, d_y.values[..row].repeat(case.shape[0]));
        }
        Data {
            x: draw("x", case.dtype, n),
            z: draw("z", case.dtype, n),
            weight: case.weight.map(|(d, _)| draw("weight", d, case.shape[2])),
            d_y,
        }
    }

    fn exact(&self, case: &Case) -> NormGradients {
        let problem = NormProblem {
            value_dim: case.shape[2],
            x: &self.x.values,
            z: &self.z.values,
            weight: self.weight.as_ref().map(|w| &w.values[..]),
            eps: case.eps.into(),
            silu: case.gate == OutputGate::Silu,
        };
        gated_norm_backward(&problem, &self.d_y.values).unwrap()
    }
}

/// Gradients of x, z and the weight.
type Found = [Option<HostTensor>; 3];

const ALL: u32 = 0b111;

/// Runs the backward twice, everything that it writes poisoned before: the same bits.
fn run(context: &Context, case: &Case, data: &Data, wanted: u32) -> Found {
    let stream = context.stream().unwrap();
    let (shape, [tokens, heads, dim]) = (case.shape, case.shape);
    let strides = padded(shape, case.pad);
    let x = Placed::new(context, &data.x, shape, strides, case.offset);
    let mut of_y = strides;
    if case.expanded {
        of_y[0] = 0;
    }
    let d_y = Placed::new(context, &data.d_y, shape, of_y, case.offset);
    let [of_z, of_d_z] = case.blocks.map(|blocks| case.in_blocks(blocks));
    let z = Placed::new(context, &data.z, of_z, padded(of_z, case.pad), case.offset);
    let weight = (data.weight.as_ref().zip(case.weight))
        .map(|(w, (_, stride))| Placed::new(context, w, [dim], [stride], 0));
    let mut d_x = Placed::poisoned(context, case.dtype, shape, strides, case.offset);
    let mut d_z = Placed::poisoned(context, case.dtype, of_d_z, padded(of_d_z, case.pad), 0);
    let mut d_weight = Placed::poisoned(context, Dtype::F32, [dim], [1 + case.pad], 3);
    let bytes = GatedNormBackward::workspace_bytes(context, tokens, heads, dim).unwrap();
    let mut workspace: Buffer<u8> = context.alloc(bytes).unwrap();
    let mut once = || {
        d_x.poison(&stream);
        d_z.poison(&stream);
        d_weight.poison(&stream);
        workspace.fill_bytes(0xff, &stream).unwrap();
        let wants = |i: u32| wanted >> i & 1 == 1;
        let backward = GatedNormBackward {
            x: x.tensor().into(),
            z: z.tensor(),
            weight: weight.as_ref().map(Placed::tensor),
            eps: case.eps,
            gate: case.gate,
            d_y: d_y.tensor().into(),
            d_x: wants(0).then(|| d_x.tensor_mut().into()),
            d_z: wants(1).then(|| d_z.tensor_mut()),
            d_weight: wants(2).then(|| d_weight.tensor_mut()),
        };
        assert_eq!(backward.kernels().len(), 1 + usize::from(wants(2)));
        let scratch = Workspace::new(&mut workspace);
        backward.launch(context, &stream, scratch).unwrap();
        for (name, t) in [("x", &x), ("d_y", &d_y), ("z", &z)] {
            t.assert_same(name, &stream);
        }
        let mut index = 0;
        let all = [d_x.read(&stream), d_z.read(&stream), d_weight.read(&stream)];
        all.map(|t| {
            index += 1;
            let there = wants(index - 1);
            assert!(
                there || t.bytes.iter().all(|b| *b == 0xff),
                "written unasked"
            );
            there.then_some(t)
        })
    };
    let (first, second) = (once(), once());
    let bits = |found: &Found| {
        found
            .each_ref()
            .map(|t| t.as_ref().map(|t| t.bytes.clone()))
    };
    assert!(bits(&first) == bits(&second), "two runs differ: {case:?}");
    first
}

#[track_caller]
fn judge(case: &Case, exact: &NormGradients, found: &Found) {
    let all = [&exact.x, &exact.z, &exact.weight];
    for ((name, found), exact) in ["dx", "dz", "dweight"].iter().zip(found).zip(all) {
        if let Some(found) = found {
            assert_close(name, found, exact, 2e-6, &|| format!("{case:?}"));
        }
    }
}

#[track_caller]
fn check(context: &Context, case: &Case) {
    let data = Data::new(case);
    judge(case, &data.exact(case), &run(context, case, &data, ALL));
}

/// Every V, both gates, weights of every type and stride and none, odd addresses, z in blocks, d_y of stride 0.
#[test]
fn norm_of_every_dimension() {
    let context = context();
    let weights = [
        Some((Dtype::F32, 1)),
        Some((Dtype::Bf16, 2)),
        Some((Dtype::F16, 1)),
        None,
    ];
    for (i, dim) in (16..=256).step_by(16).enumerate() {
        let case = Case {
            blocks: [[4, 1], [2, 4], [1, 2]][i % 3],
            gate: [OutputGate::Silu, OutputGate::Sigmoid][i / 2 % 2],
            weight: weights[i % 4],
            pad: [0, 5, 8][i % 3],
            offset: [0, 3, 8][i % 3],
            expanded: i % 4 == 1,
            ..Case::new([Dtype::Bf16, Dtype::F16][i % 2], 3 + i, 4, dim)
        };
        check(&context, &case);
    }
}

/// Enough rows that a row of lanes computes several, and shapes of models.
#[test]
fn norm_of_many_rows() {
    let context = context();
    let rows = 16 * 4 * context.device().compute_units as usize;
    for (tokens, heads, dim) in [(rows / 2 + 3, 5, 16), (65, 32, 128), (33, 3, 192)] {
        check(&context, &Case::new(Dtype::Bf16, tokens, heads, dim));
    }
    for tokens in [0, 1] {
        check(&context, &Case::new(Dtype::F16, tokens, 2, 48));
    }
}

/// Each gradient alone has the bits that it has among all, and nothing else is written.
#[test]
fn norm_of_each_gradient_alone() {
    let context = context();
    let case = Case::new(Dtype::Bf16, 37, 3, 64);
    let data = Data::new(&case);
    let all = run(&context, &case, &data, ALL);
    for i in 0..3 {
        let alone = run(&context, &case, &data, 1 << i);
        assert!(
            alone[i].as_ref().unwrap().bytes == all[i].as_ref().unwrap().bytes,
            "{i}"
        );
    }
    run(&context, &case, &data, 0);
}

/// Gates over the whole range, rows of zeros and of tiny numbers, eps of any size. Scaling d_y by a power of two scales
/// every gradient exactly.
#[test]
fn norm_over_the_whole_range() {
    let context = context();
    for gate in [OutputGate::Silu, OutputGate::Sigmoid] {
        for eps in [1e-5, 1e-20, 3.0] {
            let case = Case {
                gate,
                eps,
                ..Case::new(Dtype::Bf16, 8, 5, 128)
            };
            let mut data = Data::new(&case);
            let n = data.z.values.len();
            let z = (0..n).map(|i| -80.0 + 160.0 * i as f32 / n as f32);
            data.z = HostTensor::new(Dtype::Bf16, z.collect());
            let row = |i: usize| [1.0, 0.0, 1e-2, 1e-3, 300.0][i / 128 % 5];
            let x = data.x.values.iter().enumerate();
            data.x = HostTensor::new(Dtype::Bf16, x.map(|(i, x)| x * row(i)).collect());
            let found = run(&context, &case, &data, ALL);
            judge(&case, &data.exact(&case), &found);
            // Each element of dz by itself: the derivative is accurate where it is small.
            let exact = data.exact(&case);
            for (found, exact) in found[1].as_ref().unwrap().values.iter().zip(&exact.z) {
                let size = exact.abs().max(1e-30);
                assert!(
                    (f64::from(*found) - exact).abs() <= 4e-3 * size + 1e-7,
                    "{found} {exact}"
                );
            }
            let less = data.d_y.values.iter().map(|x| 0.25 * x).collect();
            data.d_y = HostTensor::new(Dtype::Bf16, less);
            let part = run(&context, &case, &data, ALL);
            for (a, b) in found.iter().zip(&part) {
                let (a, b) = (a.as_ref().unwrap(), b.as_ref().unwrap());
                let same = a
                    .values
                    .iter()
                    .zip(&b.values)
                    .all(|(a, b)| 0.25 * a == *b || b.abs() < 1e-37);
                assert!(same, "{case:?}");
            }
        }
    }
}

/// Rows of padding, zeros with any z: no NaN reaches the weight's gradient, nor another row. The recomputed output is
/// gated: a weight's gradient without the gate would differ by more than its error.
#[test]
fn norm_of_padding() {
    let context = context();
    let case = Case::new(Dtype::Bf16, 20, 2, 32);
    let mut data = Data::new(&case);
    let row = 2 * 32;
    for t in 15..20 {
        for i in t * row..(t + 1) * row {
            for (t, value) in [
                (&mut data.x, 0.0),
                (&mut data.d_y, 0.0),
                (
                    &mut data.z,
                    [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3],
                ),
            ] {
                t.values[i] = value;
            }
        }
    }
    for t in [&mut data.x, &mut data.d_y, &mut data.z] {
        *t = HostTensor::new(Dtype::Bf16, t.values.clone());
    }
    let found = run(&context, &case, &data, ALL);
    judge(&case, &data.exact(&case), &found);
    for found in &found[..2] {
        let rest = &found.as_ref().unwrap().values[15 * row..];
        assert!(rest.iter().all(|x| *x == 0.0), "gradients of padding");
    }
}

#[test]
fn norm_refuses_what_it_cannot_do() {
    let context = context();
    let stream = context.stream().unwrap();
    let memory = context.upload(&vec![0u8; 1 << 16]).unwrap();
    let mut workspace: Buffer<u8> = context.alloc(1 << 16).unwrap();
    let at = |dtype, offset: usize, shape: [usize; 3], token: usize| {
        let address = memory.address().wrapping_byte_add(offset);
        let strides = [token, shape[2], 1];
        // SAFETY: it lies in the buffer, or is refused.
        unsafe { deltawave::tensor::TensorMut::from_raw(address, dtype, shape, strides) }
    };
    let read = |dtype, offset: usize, shape: [usize; 3]| {
        let address = memory.address().wrapping_byte_add(offset);
        let strides = [shape[1] * shape[2], shape[2], 1];
        // SAFETY: as above.
        unsafe { deltawave::tensor::Tensor::from_raw(address, dtype, shape, strides) }
    };
    let (bf16, shape) = (Dtype::Bf16, [4, 2, 32]);
    let mut launch = |change: &dyn Fn(&mut GatedNormBackward<'_>), bytes: usize| {
        let mut backward = GatedNormBackward {
            x: read(bf16, 0, shape).into(),
            z: read(bf16, 1024, shape),
            weight: None,
            eps: 1e-6,
            gate: OutputGate::Silu,
            d_y: read(bf16, 2048, shape).into(),
            d_x: Some(at(bf16, 4096, shape, 64).into()),
            d_z: Some(at(bf16, 8192, shape, 64)),
            d_weight: None,
        };
        change(&mut backward);
        // SAFETY: it lies in the buffer.
        let scratch = unsafe { Workspace::from_raw(workspace.address(), bytes) };
        let outcome = backward.launch(&context, &stream, scratch);
        drop(backward);
        workspace.fill_bytes(0, &stream).unwrap();
        outcome
    };
    launch(&|_| (), 1 << 16).unwrap();
    let mut refused =
        |change: &dyn Fn(&mut GatedNormBackward<'_>), bytes, name: &str, kind| match launch(
            change, bytes,
        ) {
            Err(Error::Argument(error)) => {
                assert_eq!(
                    (error.argument.as_str(), error.kind),
                    (name, kind),
                    "{error}"
                );
            }
            other => panic!("{name}: {other:?}"),
        };
    let many = 1 << 16;
    refused(
        &|b| b.x = read(Dtype::F32, 0, shape).into(),
        many,
        "x",
        ArgumentKind::Dtype,
    );
    refused(
        &|b| b.x = read(bf16, 0, [4, 2, 24]).into(),
        many,
        "x",
        ArgumentKind::Shape,
    );
    refused(
        &|b| b.d_y = read(bf16, 0, [3, 2, 32]).into(),
        many,
        "d_y",
        ArgumentKind::Shape,
    );
    refused(
        &|b| b.d_z = Some(at(bf16, 8192, [4, 1, 32], 64)),
        many,
        "d_z",
        ArgumentKind::Shape,
    );
    refused(
        &|b| b.d_x = Some(at(bf16, 4096, shape, 0).into()),
        many,
        "d_x",
        ArgumentKind::Stride,
    );
    refused(&|b| b.eps = 0.0, many, "eps", ArgumentKind::Value);
    refused(&|_| (), 16, "workspace", ArgumentKind::Size);
    // Not in place: neither over x, which a norm in place has overwritten, nor over d_y.
    refused(
        &|b| b.d_x = Some(at(bf16, 0, shape, 64).into()),
        many,
        "d_x",
        ArgumentKind::Overlap,
    );
    refused(
        &|b| b.d_x = Some(at(bf16, 2048, shape, 64).into()),
        many,
        "d_x",
        ArgumentKind::Overlap,
    );
    refused(
        &|b| b.d_z = Some(at(bf16, 4224, shape, 64)),
        many,
        "d_x",
        ArgumentKind::Overlap,
    );
}

/// The same bits, and no finding, in every order of waves.
#[test]
fn norm_in_every_order() {
    let context = context();
    if !simulated(&context) {
        println!("skipped: a card executes in one way");
        return;
    }
    let usual = deltawave_sim::hip::options();
    for dim in [128, 192] {
        let case = Case::new(Dtype::Bf16, 40, 8, dim);
        let data = Data::new(&case);
        let expected = run(&context, &case, &data, ALL);
        for order in [
            WaveOrder::InStep,
            WaveOrder::Seeded(1),
            WaveOrder::Seeded(2),
        ] {
            deltawave_sim::hip::set_options(Options { order, ..usual });
            let other = run(&context, &case, &data, ALL);
            deltawave_sim::hip::set_options(usual);
            for (a, b) in expected.iter().zip(&other) {
                assert!(
                    a.as_ref().unwrap().bytes == b.as_ref().unwrap().bytes,
                    "{order:?}"
                );
            }
        }
    }
}
