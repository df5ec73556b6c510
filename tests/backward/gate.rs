//! Gradients of the gates.

use deltawave::error::{ArgumentKind, Error};
use deltawave::gate::GateBackward;
use deltawave::norm::GatedNormBackward;
use deltawave::runtime::Context;
use deltawave::tensor::{Buffer, TokenScalars, TokenScalarsMut};
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::oracle::gate_backward::{GateProblem, gate_backward};

use crate::common::context;
use crate::placed::{Placed, assert_close, padded};

struct Case {
    tokens: usize,
    /// Blocks, and heads of each.
    heads: [usize; 2],
    dtype: Dtype,
    of_output: Dtype,
    per_head: Dtype,
    dt_bias: bool,
    allow_neg_eigval: bool,
    /// Elements between rows and blocks.
    pad: usize,
}

/// Gradients of a, b, A_log and dt_bias.
type Found = [Option<HostTensor>; 4];

struct Data {
    a: HostTensor,
    b: HostTensor,
    a_log: HostTensor,
    dt_bias: Option<HostTensor>,
    d_g: HostTensor,
    d_beta: HostTensor,
}

impl Data {
    fn new(case: &Case) -> Self {
        let heads = case.heads[0] * case.heads[1];
        let n = case.tokens * heads;
        let draw = |name, dtype, n, scale: f32| {
            let drawn = random_normal(Dtype::F32, name, n, 3).values;
            HostTensor::new(dtype, drawn.iter().map(|x| scale * x).collect())
        };
        Data {
            a: draw("a", case.dtype, n, 4.0),
            b: draw("b", case.dtype, n, 8.0),
            a_log: draw("a_log", case.per_head, heads, 1.0),
            dt_bias: case.dt_bias.then(|| draw("dt", case.per_head, heads, 2.0)),
            d_g: draw("d_g", Dtype::F32, n, 1.0),
            d_beta: draw("d_beta", Dtype::F32, n, 1.0),
        }
    }
}

fn run(context: &Context, case: &Case, data: &Data, wanted: u32) -> Found {
    let stream = context.stream().unwrap();
    let [blocks, of_block] = case.heads;
    let (heads, tokens) = (blocks * of_block, case.tokens);
    let shape = [tokens, blocks, of_block];
    let strides = padded(shape, case.pad);
    let place = |t: &HostTensor| Placed::new(context, t, shape, strides, 1);
    let (a, b) = (place(&data.a), place(&data.b));
    let [d_g, d_beta] = [&data.d_g, &data.d_beta].map(|t| {
        let shape = [tokens, heads];
        Placed::new(context, t, shape, [heads + case.pad, 1], 0)
    });
    let vector = |t: &HostTensor| Placed::new(context, t, [heads], [2], 0);
    let a_log = vector(&data.a_log);
    let dt_bias = data.dt_bias.as_ref().map(vector);
    let output = || Placed::poisoned(context, case.of_output, shape, strides, 2);
    let (mut d_a, mut d_b) = (output(), output());
    let sums = || Placed::poisoned(context, Dtype::F32, [heads], [3], 0);
    let (mut d_a_log, mut d_dt_bias) = (sums(), sums());
    let bytes = GateBackward::workspace_bytes(context, tokens, heads).unwrap();
    let mut workspace: Buffer<u8> = context.alloc(bytes).unwrap();
    let mut once = || {
        for t in [&mut d_a, &mut d_b] {
            t.poison(&stream);
        }
        for t in [&mut d_a_log, &mut d_dt_bias] {
            t.poison(&stream);
        }
        workspace.fill_bytes(0xff, &stream).unwrap();
        let wants = |i: u32| wanted >> i & 1 == 1;
        let backward = GateBackward {
            a: TokenScalars::in_blocks(a.tensor()),
            b: TokenScalars::in_blocks(b.tensor()),
            a_log: a_log.tensor(),
            dt_bias: dt_bias.as_ref().map(Placed::tensor),
            allow_neg_eigval: case.allow_neg_eigval,
            d_g: Some(d_g.tensor().into()),
            d_beta: Some(d_beta.tensor().into()),
            d_a: wants(0).then(|| TokenScalarsMut::in_blocks(d_a.tensor_mut())),
            d_b: wants(1).then(|| TokenScalarsMut::in_blocks(d_b.tensor_mut())),
            d_a_log: wants(2).then(|| d_a_log.tensor_mut()),
            d_dt_bias: wants(3).then(|| d_dt_bias.tensor_mut()),
        };
        let scratch = Workspace::new(&mut workspace);
        backward.launch(context, &stream, scratch).unwrap();
        let mut index = 0;
        let all = [
            d_a.read(&stream),
            d_b.read(&stream),
            d_a_log.read(&stream),
            d_dt_bias.read(&stream),
        ];
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
    assert!(bits(&first) == bits(&second), "two runs differ");
    first
}

fn check(context: &Context, case: &Case) {
    let data = Data::new(case);
    let found = run(context, case, &data, 0b1111);
    let problem = GateProblem {
        heads: case.heads[0] * case.heads[1],
        a: &data.a.values,
        b: &data.b.values,
        a_log: &data.a_log.values,
        dt_bias: data.dt_bias.as_ref().map(|t| &t.values[..]),
        allow_neg_eigval: case.allow_neg_eigval,
    };
    let exact = gate_backward(&problem, &data.d_g.values, &data.d_beta.values);
    let all = [&exact.a, &exact.b, &exact.a_log, &exact.dt_bias];
    let names = ["da", "db", "da_log", "ddt_bias"];
    for ((name, found), exact) in names.iter().zip(&found).zip(all) {
        let what = || format!("{} tokens, {:?} heads", case.tokens, case.heads);
        assert_close(name, found.as_ref().unwrap(), exact, 2e-6, &what);
    }
    for i in 0..4 {
        let alone = run(context, case, &data, 1 << i);
        assert!(alone[i].as_ref().unwrap().bytes == found[i].as_ref().unwrap().bytes);
    }
}

/// Heads in blocks and not, more heads than threads, all types, tokens of several workgroups.
#[test]
fn gates_of_every_shape() {
    let context = context();
    let types = [Dtype::F32, Dtype::Bf16, Dtype::F16];
    let shapes = [
        (1, [1, 1]),
        (0, [1, 3]),
        (130, [1, 32]),
        (77, [2, 3]),
        (9, [3, 100]),
        (3000, [1, 4]),
    ];
    for (i, (tokens, heads)) in shapes.into_iter().enumerate() {
        let case = Case {
            tokens,
            heads,
            dtype: types[i % 3],
            of_output: types[(i + 1) % 3],
            per_head: types[i / 2 % 3],
            dt_bias: i % 2 == 0,
            allow_neg_eigval: i % 3 == 1,
            pad: [0, 5][i % 2],
        };
        check(&context, &case);
    }
}

/// Logits far outside: small gradients stay accurate. A gate without gradient gives none, even where exp(A_log) is infinite.
#[test]
fn gates_at_the_edges() {
    let context = context();
    let case = Case {
        tokens: 81,
        heads: [1, 2],
        dtype: Dtype::F32,
        of_output: Dtype::F32,
        per_head: Dtype::F32,
        dt_bias: false,
        allow_neg_eigval: true,
        pad: 0,
    };
    let mut data = Data::new(&case);
    let logits: Vec<f32> = (0..162).map(|i| (i / 2) as f32 - 40.0).collect();
    data.a = HostTensor::new(Dtype::F32, logits.clone());
    data.b = HostTensor::new(Dtype::F32, logits.clone());
    data.a_log = HostTensor::new(Dtype::F32, vec![0.5, 100.0]);
    let mut d_g = data.d_g.values.clone();
    d_g.iter_mut().skip(1).step_by(2).for_each(|d| *d = 0.0);
    data.d_g = HostTensor::new(Dtype::F32, d_g);
    let found = run(&context, &case, &data, 0b1111);
    let problem = GateProblem {
        heads: 2,
        a: &logits,
        b: &logits,
        a_log: &data.a_log.values,
        dt_bias: None,
        allow_neg_eigval: true,
    };
    let exact = gate_backward(&problem, &data.d_g.values, &data.d_beta.values);
    for (found, exact) in found
        .iter()
        .zip([&exact.a, &exact.b, &exact.a_log, &exact.dt_bias])
    {
        for (found, exact) in found.as_ref().unwrap().values.iter().zip(exact) {
            let close = (f64::from(*found) - exact).abs() <= 2e-6 * exact.abs();
            assert!(close, "{found} {exact}");
        }
    }
}

#[test]
fn gates_refuse_what_they_cannot_do() {
    let context = context();
    let stream = context.stream().unwrap();
    let memory: Buffer<f32> = context.upload(&[0.5f32; 64]).unwrap();
    let [mut x, mut y]: [Buffer<f32>; 2] = [(); 2].map(|()| context.alloc(64).unwrap());
    let mut scratch: Buffer<u8> = context.alloc(1 << 12).unwrap();
    let mut refused = |wide: bool, rows: usize, bytes: usize, overlaps: bool| {
        let address = x.address();
        let backward = GateBackward {
            a: memory.tensor([8, 2]).unwrap().into(),
            b: memory.tensor([rows, 2]).unwrap().into(),
            a_log: memory.tensor([2]).unwrap(),
            dt_bias: None,
            allow_neg_eigval: false,
            d_g: None,
            d_beta: Some(match overlaps {
                // SAFETY: it lies in the buffer.
                true => unsafe {
                    let t =
                        deltawave::tensor::Tensor::from_raw(address, Dtype::F32, [8, 2], [2, 1]);
                    t.into()
                },
                false => memory.tensor([8, 2]).unwrap().into(),
            }),
            d_a: Some(x.tensor_mut([8, 2]).unwrap().into()),
            d_b: None,
            d_a_log: Some(y.tensor_mut([if wide { 3 } else { 2 }]).unwrap()),
            d_dt_bias: None,
        };
        // SAFETY: it lies in the buffer.
        let workspace = unsafe { Workspace::from_raw(scratch.address(), bytes) };
        let outcome = backward.launch(&context, &stream, workspace);
        scratch.fill_bytes(0, &stream).unwrap();
        match outcome {
            Ok(()) => None,
            Err(Error::Argument(error)) => Some((error.argument.clone(), error.kind)),
            Err(other) => panic!("{other}"),
        }
    };
    let name = |name: &str, kind| Some((name.to_owned(), kind));
    assert_eq!(refused(false, 8, 1 << 12, false), None);
    assert_eq!(
        refused(true, 8, 1 << 12, false),
        name("d_a_log", ArgumentKind::Shape)
    );
    assert_eq!(
        refused(false, 7, 1 << 12, false),
        name("b", ArgumentKind::Shape)
    );
    assert_eq!(
        refused(false, 8, 4, false),
        name("workspace", ArgumentKind::Size)
    );
    assert_eq!(
        refused(false, 8, 1 << 12, true),
        name("d_a", ArgumentKind::Overlap)
    );
}

#[test]
fn workspaces_of_impossible_sizes_are_refused() {
    let context = context();
    let refused = |outcome: Result<usize, Error>| match outcome {
        Err(Error::Argument(error)) => (error.argument, error.kind),
        other => panic!("{other:?}"),
    };
    let huge = [1 << 31, 1 << 61, usize::MAX];
    for n in huge {
        let found = [
            (GateBackward::workspace_bytes(&context, n, 1), "tokens"),
            (GateBackward::workspace_bytes(&context, 1, n), "value_heads"),
            (
                GatedNormBackward::workspace_bytes(&context, n, 1, 16),
                "tokens",
            ),
            (
                GatedNormBackward::workspace_bytes(&context, 1, n, 16),
                "value_heads",
            ),
            (
                GatedNormBackward::workspace_bytes(&context, 1, 1, n),
                "value_dim",
            ),
        ];
        for (outcome, argument) in found {
            assert_eq!(refused(outcome), (argument.to_owned(), ArgumentKind::Value));
        }
    }
    // No sizes that are allowed overflow.
    let most = GateBackward::workspace_bytes(&context, (1 << 31) - 1, (1 << 24) - 1).unwrap();
    assert!(most.is_multiple_of(256));
}
