//! Gradients of whole layers, beside those of the f64 layer and of unfused kernels.

use deltawave::conv::{ConvInput, ConvInputMut, ConvStateLayout, ConvStates, ConvStatesMut};
use deltawave::error::{ArgumentKind, Error};
use deltawave::gate::Gate;
use deltawave::layer::{
    Layer, LayerBackward, LayerBackwardTensors, LayerInitial, LayerSpec, LayerStates, LayerTensors,
    LayerWeightGradients, LayerWeights,
};
use deltawave::model::Heads;
use deltawave::norm::OutputGate;
use deltawave::runtime::Context;
use deltawave::state::{State, StateMut};
use deltawave::tensor::{Buffer, Tensor, TokenScalars, TokenScalarsMut};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::metrics::compare;
use deltawave_lab::oracle::layer::LayerProblem;
use deltawave_lab::oracle::layer_backward::{
    LayerGradients, LayerUpstream, layer_backward, unfused_layer_backward,
};
use deltawave_sim::launch::{Options, WaveOrder};

use crate::common::{context, simulated};
use crate::placed::{Placed, padded};

#[derive(Clone, Debug)]
struct Case {
    spec: LayerSpec,
    lengths: Vec<usize>,
    /// Rows past the last sequence; d_y is NaN there.
    tail: usize,
    /// q, k, v and z of each key head, and a and b in blocks.
    interleaved: bool,
    on_device: bool,
    /// Initial states, and gradients of final ones.
    states: [bool; 2],
    pad: usize,
    weights: Dtype,
    biases: bool,
}

impl Case {
    fn new(dtype: Dtype, heads: [usize; 2], dims: [usize; 2], lengths: &[usize]) -> Self {
        Case {
            spec: LayerSpec {
                dtype,
                ..LayerSpec::new(heads[0], heads[1], dims[0], dims[1])
            },
            lengths: lengths.to_vec(),
            tail: 0,
            interleaved: false,
            on_device: false,
            states: [true, true],
            pad: 0,
            weights: Dtype::F32,
            biases: true,
        }
    }

    fn tokens(&self) -> usize {
        self.lengths.iter().sum::<usize>() + self.tail
    }

    fn cu_seqlens(&self) -> Vec<i32> {
        let ends = self.lengths.iter().scan(0, |end, n| {
            *end += *n as i32;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }

    fn channels(&self) -> usize {
        self.spec.conv().total_channels()
    }

    fn values(&self) -> usize {
        self.spec.heads.value * self.spec.heads.value_dim
    }

    /// Columns of x: channels of q, k and v, then z.
    fn columns(&self) -> Vec<usize> {
        let Heads {
            key,
            value,
            key_dim,
            value_dim,
            ..
        } = self.spec.heads;
        let all = self.channels() + self.values();
        if !self.interleaved {
            return (0..all).collect();
        }
        let (own, group) = (
            value / key * value_dim,
            2 * (key_dim + value / key * value_dim),
        );
        let part = |first: usize, size: usize| {
            (0..key).flat_map(move |h| (0..size).map(move |i| h * group + first + i))
        };
        (part(0, key_dim))
            .chain(part(key_dim, key_dim))
            .chain(part(2 * key_dim, own))
            .chain(part(2 * key_dim + own, own))
            .collect()
    }

    /// Columns of ba: a, then b.
    fn gate_columns(&self) -> Vec<usize> {
        let (key, value) = (self.spec.heads.key, self.spec.heads.value);
        let blocks = if self.interleaved { key } else { 1 };
        let own = value / blocks;
        let part = |first: usize| (0..value).map(move |h| h / own * 2 * own + first + h % own);
        part(own).chain(part(0)).collect()
    }
}

/// Gradients in the order of [`NAMES`].
type Found = Vec<HostTensor>;

const NAMES: [&str; 11] = [
    "x",
    "z",
    "a",
    "b",
    "conv_weight",
    "conv_bias",
    "a_log",
    "dt_bias",
    "norm",
    "conv_state",
    "state",
];

struct Data {
    x: HostTensor,
    z: HostTensor,
    a: HostTensor,
    b: HostTensor,
    conv_weight: HostTensor,
    conv_bias: HostTensor,
    a_log: HostTensor,
    dt_bias: HostTensor,
    norm: HostTensor,
    conv_state: HostTensor,
    state: HostTensor,
    d_y: HostTensor,
    d_conv_state: HostTensor,
    d_state: HostTensor,
}

impl Data {
    fn new(case: &Case) -> Self {
        let (s, tokens, n) = (&case.spec, case.tokens(), case.lengths.len());
        let (channels, heads) = (case.channels(), s.heads.value);
        let draw = |name, dtype, n, scale: f32| {
            let drawn = random_normal(Dtype::F32, name, n, 11).values;
            HostTensor::new(dtype, drawn.iter().map(|x| scale * x).collect())
        };
        let columns = n * channels * (s.width - 1);
        let states = n * heads * s.heads.key_dim * s.heads.value_dim;
        let mut d_y = draw("d_y", s.dtype, tokens * case.values(), 1.0);
        let end = (tokens - case.tail) * case.values();
        let mut values = d_y.values.clone();
        values[end..].fill(f32::NAN);
        d_y = HostTensor::new(s.dtype, values);
        Data {
            x: draw("x", s.dtype, tokens * channels, 1.0),
            z: draw("z", s.dtype, tokens * case.values(), 1.0),
            a: draw("a", Dtype::Bf16, tokens * heads, 1.0),
            b: draw("b", Dtype::Bf16, tokens * heads, 1.0),
            conv_weight: draw("w", case.weights, channels * s.width, 0.5),
            conv_bias: draw("bias", case.weights, channels, 0.5),
            a_log: draw("a_log", Dtype::F32, heads, 0.5),
            dt_bias: draw("dt", Dtype::F32, heads, 1.0),
            norm: draw("norm", case.weights, s.heads.value_dim, 1.0),
            conv_state: draw("conv_state", s.dtype, columns, 1.0),
            state: draw("state", Dtype::F32, states, 0.25),
            d_y,
            d_conv_state: draw("d_conv_state", s.dtype, columns, 1.0),
            d_state: draw("d_state", Dtype::F32, states, 0.25),
        }
    }
}

/// The columns of rows, each at its place.
fn packed(parts: &[&HostTensor], columns: &[usize], tokens: usize) -> HostTensor {
    let row = columns.len();
    let mut values = vec![0.0; tokens * row];
    let mut first = 0;
    for part in parts {
        let own = part.values.len() / tokens.max(1);
        for (i, x) in part.values.iter().enumerate() {
            values[i / own * row + columns[first + i % own]] = *x;
        }
        first += own;
    }
    HostTensor::new(parts[0].dtype, values)
}

fn unpacked(rows: &HostTensor, columns: &[usize]) -> Vec<f32> {
    let row = columns.len();
    let all = rows.values.chunks_exact(row.max(1));
    all.flat_map(|own| columns.iter().map(|c| own[*c]))
        .collect()
}

/// Runs the forward in place and keeping o: the same y. Then the backward, twice, everything poisoned before. Returns o and
/// all gradients.
fn run(context: &Context, case: &Case, data: &Data) -> (HostTensor, Found) {
    let stream = context.stream().unwrap();
    let (s, tokens, n) = (case.spec, case.tokens(), case.lengths.len());
    let Heads {
        key,
        value,
        key_dim,
        value_dim,
        ..
    } = s.heads;
    let (channels, conv) = (case.channels(), s.conv());
    let columns = case.columns();
    let rows = [tokens, columns.len()];
    let strides = padded(rows, case.pad);
    let x = Placed::new(
        context,
        &packed(&[&data.x, &data.z], &columns, tokens),
        rows,
        strides,
        0,
    );
    let gate_columns = case.gate_columns();
    let gate_rows = [tokens, 2 * value];
    let ba = Placed::new(
        context,
        &packed(&[&data.a, &data.b], &gate_columns, tokens),
        gate_rows,
        padded(gate_rows, case.pad),
        0,
    );
    let vector = |t: &HostTensor| Placed::new(context, t, [t.values.len()], [1], 0);
    let conv_weight = Placed::new(
        context,
        &data.conv_weight,
        [channels, s.width],
        [s.width, 1],
        0,
    );
    let [conv_bias, a_log, dt_bias, norm] =
        [&data.conv_bias, &data.a_log, &data.dt_bias, &data.norm].map(vector);
    let conv_shape = [n, channels, s.width - 1];
    let state_shape = [n, value, key_dim, value_dim];
    let y_shape = [tokens, value, value_dim];
    let lengths = context.upload(&case.cu_seqlens()).unwrap();
    let layer = match case.on_device {
        false => Layer::packed(context, s, &case.cu_seqlens(), tokens, 0),
        true => Layer::device(context, s, tokens, n, 0),
    };
    let layer = layer.unwrap();
    let cu_seqlens = || case.on_device.then(|| (&lengths).into());
    let input = || match case.interleaved {
        true => ConvInput::interleaved(&x.tensor(), &conv).unwrap(),
        false => ConvInput::flat(&x.tensor(), &conv).unwrap(),
    };
    let z = || match case.interleaved {
        true => ConvInput::interleaved_z(&x.tensor(), &conv).unwrap(),
        false => ConvInput::flat_z(&x.tensor(), &conv).unwrap(),
    };
    let gates = || match case.interleaved {
        true => Gate::interleaved(&ba.tensor(), key, value).unwrap(),
        false => Gate::flat(&ba.tensor(), value).unwrap(),
    };
    let weights = || LayerWeights {
        conv: conv_weight.tensor(),
        conv_bias: case.biases.then(|| conv_bias.tensor()),
        a_log: a_log.tensor(),
        dt_bias: case.biases.then(|| dt_bias.tensor()),
        norm: case.biases.then(|| norm.tensor()),
    };

    // The forward, in place and not.
    let has: Vec<u8> = vec![u8::from(case.states[0]); n];
    let has = context.upload(&has).unwrap();
    let mut forward_workspace: Buffer<u8> = context.alloc(layer.workspace_bytes()).unwrap();
    let mut o = Placed::poisoned(context, s.dtype, y_shape, padded(y_shape, case.pad), 3);
    let mut once = |keeps: bool| {
        let mut conv_pool = Placed::new(
            context,
            &data.conv_state,
            conv_shape,
            padded(conv_shape, 0),
            0,
        );
        let mut pool = Placed::new(context, &data.state, state_shape, padded(state_shape, 0), 0);
        let mut y = Placed::poisoned(context, s.dtype, y_shape, padded(y_shape, 0), 0);
        let [a, b] = gates();
        let tensors = LayerTensors {
            cu_seqlens: cu_seqlens(),
            x: input(),
            z: z(),
            a,
            b,
            weights: weights(),
            states: LayerStates {
                conv: conv_pool.tensor_mut(),
                conv_layout: ConvStateLayout::ChannelMajor,
                recurrent: pool.tensor_mut(),
                recurrent_layout: StateLayout::KeyMajor,
                slots: None,
                has_initial_state: Some((&has).into()),
            },
            y: y.tensor_mut().into(),
        };
        let scratch = Workspace::new(&mut forward_workspace);
        match keeps {
            true => layer.launch_saving(&stream, &tensors, &o.tensor_mut().into(), scratch),
            false => layer.launch(&stream, &tensors, scratch),
        }
        .unwrap();
        drop(tensors);
        [
            y.read(&stream).bytes,
            pool.read(&stream).bytes,
            conv_pool.read(&stream).bytes,
        ]
    };
    let (in_place, kept) = (once(false), once(true));
    assert!(
        in_place == kept,
        "keeping o changes what the forward gives: {case:?}"
    );

    // The backward.
    let kept = o.read(&stream);
    let o = Placed::new(context, &kept, y_shape, padded(y_shape, case.pad), 3);
    let d_y = Placed::new(context, &data.d_y, y_shape, padded(y_shape, case.pad), 0);
    let conv_state = Placed::new(
        context,
        &data.conv_state,
        conv_shape,
        padded(conv_shape, 0),
        0,
    );
    let state = Placed::new(context, &data.state, state_shape, padded(state_shape, 0), 0);
    let d_conv_state = Placed::new(
        context,
        &data.d_conv_state,
        conv_shape,
        padded(conv_shape, 0),
        0,
    );
    let d_state = Placed::new(
        context,
        &data.d_state,
        state_shape,
        padded(state_shape, 0),
        0,
    );
    let mut d_x = Placed::poisoned(context, s.dtype, rows, strides, 0);
    let mut d_ba = Placed::poisoned(
        context,
        Dtype::F32,
        gate_rows,
        padded(gate_rows, case.pad),
        0,
    );
    let mut d_conv = Placed::poisoned(context, Dtype::F32, [channels, s.width], [s.width, 1], 0);
    let mut d_vectors = [channels, value, value, value_dim]
        .map(|n| Placed::poisoned(context, Dtype::F32, [n], [1], 0));
    let mut d_initial_conv =
        Placed::poisoned(context, s.dtype, conv_shape, padded(conv_shape, 0), 0);
    let mut d_initial =
        Placed::poisoned(context, Dtype::F32, state_shape, padded(state_shape, 0), 0);
    let plan = LayerBackward::of(&layer).unwrap();
    let mut workspace: Buffer<u8> = context.alloc(plan.workspace_bytes()).unwrap();
    let channel_major = ConvStateLayout::ChannelMajor;
    let key_major = StateLayout::KeyMajor;
    let mut backward = || {
        d_x.poison(&stream);
        d_ba.poison(&stream);
        d_conv.poison(&stream);
        d_vectors.iter_mut().for_each(|t| t.poison(&stream));
        d_initial_conv.poison(&stream);
        d_initial.poison(&stream);
        workspace.fill_bytes(0xff, &stream).unwrap();
        // z's gradient lies in the rows of x's, and those of a and b in one tensor: views that share memory.
        let rows_of = |t: &Placed<2>| {
            let strides = t.strides;
            // SAFETY: the buffers outlive the launch, and the views lie apart.
            unsafe {
                deltawave::tensor::TensorMut::from_raw(
                    t.buffer.address(),
                    t.dtype,
                    t.shape,
                    strides,
                )
            }
        };
        let raw = |t: Tensor<'_, 3>| {
            let (shape, strides) = (t.shape(), t.strides());
            (t.dtype(), shape, strides)
        };
        // Views of outputs have the layout of the inputs' views.
        let view = |t: &Placed<2>, of: Tensor<'_, 3>, base: &Placed<2>| {
            let (_, shape, strides) = raw(of.clone());
            let offset = of_address(&of) - base.buffer.address().addr();
            let at = t
                .buffer
                .address()
                .wrapping_byte_add(offset / base.dtype.size() * t.dtype.size());
            // SAFETY: as above.
            unsafe { deltawave::tensor::TensorMut::<3>::from_raw(at, t.dtype, shape, strides) }
        };
        let d_z = view(&d_x, z(), &x);
        let blocks = |first: usize| {
            let own = if case.interleaved { value / key } else { value };
            let count = value / own;
            let [row, _] = d_ba.strides;
            let at = d_ba.buffer.address().wrapping_byte_add(4 * first * own);
            // SAFETY: as above.
            let t = unsafe {
                deltawave::tensor::TensorMut::<3>::from_raw(
                    at,
                    Dtype::F32,
                    [tokens, count, own],
                    [row, 2 * own, 1],
                )
            };
            TokenScalarsMut::in_blocks(t)
        };
        let [a, b]: [TokenScalars<'_>; 2] = gates();
        let [d_bias, d_a_log, d_dt_bias, d_norm] =
            d_vectors.each_mut().map(|t| Some(t.tensor_mut()));
        let of_x = rows_of(&d_x);
        let tensors = LayerBackwardTensors {
            cu_seqlens: cu_seqlens(),
            x: input(),
            z: z(),
            a,
            b,
            weights: weights(),
            initial: case.states[0].then(|| LayerInitial {
                conv: ConvStates {
                    tensor: conv_state.tensor(),
                    layout: channel_major,
                },
                recurrent: State {
                    tensor: state.tensor(),
                    layout: key_major,
                },
                has_initial_state: None,
            }),
            o: o.tensor().into(),
            d_y: d_y.tensor().into(),
            d_final_conv: case.states[1].then(|| ConvStates {
                tensor: d_conv_state.tensor(),
                layout: channel_major,
            }),
            d_final_recurrent: case.states[1].then(|| State {
                tensor: d_state.tensor(),
                layout: key_major,
            }),
            d_x: Some(match case.interleaved {
                true => ConvInputMut::interleaved(of_x, &conv).unwrap(),
                false => ConvInputMut::flat(of_x, &conv).unwrap(),
            }),
            d_z: Some(d_z),
            d_a: Some(blocks(1)),
            d_b: Some(blocks(0)),
            d_weights: LayerWeightGradients {
                conv: Some(d_conv.tensor_mut()),
                conv_bias: d_bias,
                a_log: d_a_log,
                dt_bias: d_dt_bias,
                norm: d_norm,
            },
            d_initial_conv: Some(ConvStatesMut {
                tensor: d_initial_conv.tensor_mut(),
                layout: channel_major,
            }),
            d_initial_recurrent: Some(StateMut {
                tensor: d_initial.tensor_mut(),
                layout: key_major,
            }),
        };
        plan.launch(&stream, &tensors, Workspace::new(&mut workspace))
            .unwrap();
        drop(tensors);
        x.assert_same("x", &stream);
        o.assert_same("o", &stream);
        let of_x = unpacked(&d_x.read(&stream), &columns);
        let of_ba = unpacked(&d_ba.read(&stream), &gate_columns);
        let split = |all: &[f32], dtype, row: usize, first: usize, own: usize| {
            let rows = all.chunks_exact(row.max(1));
            HostTensor::new(
                dtype,
                rows.flat_map(|r| r[first..first + own].to_vec()).collect(),
            )
        };
        let values = case.values();
        let mut found = vec![
            split(&of_x, s.dtype, channels + values, 0, channels),
            split(&of_x, s.dtype, channels + values, channels, values),
            split(&of_ba, Dtype::F32, 2 * value, 0, value),
            split(&of_ba, Dtype::F32, 2 * value, value, value),
            d_conv.read(&stream),
        ];
        found.extend(d_vectors.iter().map(|t| t.read(&stream)));
        found.push(d_initial_conv.read(&stream));
        found.push(d_initial.read(&stream));
        found
    };
    let (first, second) = (backward(), backward());
    for ((a, b), name) in first.iter().zip(&second).zip(NAMES) {
        assert!(
            a.bytes == b.bytes,
            "{name} differs from run to run: {case:?}"
        );
    }
    (kept, first)
}

/// Address of a view. Views do not say it, but print it.
fn of_address(t: &Tensor<'_, 3>) -> usize {
    let text = format!("{t:?}");
    let at = text.find("address: 0x").expect("an address") + "address: 0x".len();
    let end = text[at..].find(',').expect("an end") + at;
    usize::from_str_radix(&text[at..end], 16).expect("a number")
}

#[track_caller]
fn check(context: &Context, case: &Case) {
    let data = Data::new(case);
    let (o, found) = run(context, case, &data);
    let (s, cu_seqlens) = (&case.spec, case.cu_seqlens());
    let problem = LayerProblem {
        dtype: s.dtype,
        tokens: case.tokens(),
        key_heads: s.heads.key,
        value_heads: s.heads.value,
        key_dim: s.heads.key_dim,
        value_dim: s.heads.value_dim,
        width: s.width,
        x: &data.x.values,
        z: &data.z.values,
        a: &data.a.values,
        b: &data.b.values,
        conv_weight: &data.conv_weight.values,
        conv_bias: case.biases.then_some(&data.conv_bias.values),
        a_log: &data.a_log.values,
        dt_bias: case.biases.then_some(&data.dt_bias.values),
        norm_weight: case.biases.then_some(&data.norm.values),
        allow_neg_eigval: s.allow_neg_eigval,
        l2_norm: s.qk_l2norm,
        head_map: s.heads.map,
        eps: s.eps.into(),
        silu: s.gate == OutputGate::Silu,
        cu_seqlens: &cu_seqlens,
        conv_state: case.states[0].then_some(&data.conv_state.values),
        state: case.states[0].then_some(&data.state.values),
        has_initial_state: None,
        padding: None,
    };
    let upstream = LayerUpstream {
        d_y: &data.d_y.values,
        d_conv_state: case.states[1].then_some(&data.d_conv_state.values),
        d_state: case.states[1].then_some(&data.d_state.values),
    };
    let exact = list(layer_backward(&problem, &o.values, &upstream).unwrap());
    let chain = list(unfused_layer_backward(&problem, &o.values, &upstream).unwrap());
    for (i, name) in NAMES.iter().enumerate() {
        let error = compare(&found[i].values, &exact[i]).rms_ratio;
        let unfused = compare(&chain[i], &exact[i]).rms_ratio;
        if std::env::var_os("DELTAWAVE_PRINT").is_some() {
            println!("{name}: {error:.2e}, unfused {unfused:.2e}");
        }
        // Errors of few numbers scatter: those of A_log and dt_bias, sums that cancel, and all of a batch of one token.
        let few = found[i].values.len() < 16;
        let floor = if few { 4.0 } else { 1.0 } * if s.dtype == Dtype::F16 { 1.5e-3 } else { 6e-3 };
        let limit = (1.2 * unfused).max(floor);
        assert!(
            error <= limit,
            "{name}: {error:.2e} above {limit:.2e}: {case:?}"
        );
    }
    let rows = |t: &HostTensor| t.values.len() / case.tokens().max(1);
    for (t, name) in found[..4].iter().zip(NAMES) {
        let rest = &t.values[(case.tokens() - case.tail) * rows(t)..];
        assert!(
            rest.iter().all(|x| *x == 0.0),
            "{name}: rows past the last sequence"
        );
    }
}

fn list(g: LayerGradients) -> [Vec<f64>; 11] {
    [
        g.x,
        g.z,
        g.a,
        g.b,
        g.conv_weight,
        g.conv_bias,
        g.a_log,
        g.dt_bias,
        g.norm_weight,
        g.conv_state,
        g.state,
    ]
}

#[test]
fn layer_of_every_layout() {
    let context = context();
    for interleaved in [false, true] {
        for (i, dtype) in [Dtype::Bf16, Dtype::F16].into_iter().enumerate() {
            let case = Case {
                interleaved,
                on_device: i == 0,
                tail: 3,
                pad: 8 * i,
                weights: [Dtype::F32, Dtype::Bf16][i],
                ..Case::new(dtype, [2, 4], [32, 48], &[70, 0, 2, 65])
            };
            check(&context, &case);
        }
    }
}

#[test]
fn layer_of_every_option() {
    let context = context();
    let mut case = Case {
        states: [false, false],
        biases: false,
        ..Case::new(Dtype::Bf16, [1, 2], [64, 64], &[100])
    };
    check(&context, &case);
    case.spec.gate = OutputGate::Sigmoid;
    case.spec.allow_neg_eigval = true;
    case.spec.heads.map = HeadMap::Tiled;
    case.states = [false, true];
    check(&context, &case);
    case.spec.qk_l2norm = false;
    case.spec.scale = Some(0.125);
    case.spec.width = 2;
    case.states = [true, false];
    case.biases = true;
    // Without norms keys of this size make the recurrence diverge.
    let lengths = [5, 9];
    case.lengths = lengths.to_vec();
    case.spec.scale = None;
    check(&context, &case);
    for lengths in [&[][..], &[0], &[1], &[0, 3]] {
        let mut case = Case::new(Dtype::Bf16, [1, 1], [16, 16], lengths);
        case.tail = 2;
        check(&context, &case);
    }
}

#[test]
fn layer_of_128() {
    let context = context();
    let case = Case::new(Dtype::Bf16, [2, 4], [128, 128], &[130, 62]);
    check(&context, &case);
}

#[test]
fn layer_refuses_decodes_and_overlaps() {
    let context = context();
    let s = LayerSpec::new(1, 2, 16, 32);
    let layer = Layer::packed(&context, s, &[0, 1, 9], 9, 1).unwrap();
    match LayerBackward::of(&layer) {
        Err(Error::Argument(error)) => {
            assert_eq!(
                (error.argument.as_str(), error.kind),
                ("decodes", ArgumentKind::Lengths)
            );
        }
        other => panic!("{other:?}"),
    }
    let tokens = 9;
    let layer = Layer::packed(&context, s, &[0, 9], tokens, 0).unwrap();
    let plan = LayerBackward::of(&layer).unwrap();
    assert_eq!(plan.kernels().len(), 9);
    let stream = context.stream().unwrap();
    let (conv, channels) = (s.conv(), s.conv().total_channels());
    let bf16 = |n: usize| context.upload(&vec![half::bf16::ZERO; n]).unwrap();
    let (x, mut out, mut other) = (bf16(1 << 13), bf16(1 << 13), bf16(1 << 13));
    let gates = context.upload(&vec![0.0f32; 64]).unwrap();
    let mut weights = context.alloc::<f32>(64).unwrap();
    let mut workspace: Buffer<u8> = context.alloc(plan.workspace_bytes()).unwrap();
    let bytes = workspace.len();
    let mut launch = |wrong: usize, bytes: usize| {
        let rows = |n: usize| x.tensor([tokens, 2, n]).unwrap();
        let address = x.address();
        let tensors = LayerBackwardTensors {
            cu_seqlens: None,
            x: ConvInput::flat(&x.tensor([tokens, channels]).unwrap(), &conv).unwrap(),
            z: rows(32),
            a: gates.tensor([tokens, 2]).unwrap().into(),
            b: gates.tensor([tokens, 2]).unwrap().into(),
            weights: LayerWeights {
                conv: x.tensor([channels, 4]).unwrap(),
                conv_bias: None,
                a_log: gates.tensor([if wrong == 1 { 3 } else { 2 }]).unwrap(),
                dt_bias: None,
                norm: None,
            },
            initial: None,
            o: rows(if wrong == 2 { 16 } else { 32 }).into(),
            d_y: rows(32).into(),
            d_final_conv: None,
            d_final_recurrent: None,
            d_x: Some(
                ConvInputMut::flat(out.tensor_mut([tokens, channels]).unwrap(), &conv).unwrap(),
            ),
            d_z: Some(match wrong {
                // SAFETY: nothing is enqueued.
                3 => unsafe {
                    deltawave::tensor::TensorMut::from_raw(
                        address,
                        Dtype::Bf16,
                        [tokens, 2, 32],
                        [64, 32, 1],
                    )
                },
                _ => other.tensor_mut([tokens, 2, 32]).unwrap(),
            }),
            d_a: None,
            d_b: None,
            d_weights: LayerWeightGradients {
                norm: Some(
                    weights
                        .tensor_mut([if wrong == 4 { 16 } else { 32 }])
                        .unwrap(),
                ),
                ..Default::default()
            },
            d_initial_conv: None,
            d_initial_recurrent: None,
        };
        // SAFETY: it lies in the buffer.
        let scratch = unsafe { Workspace::from_raw(workspace.address(), bytes) };
        let outcome = plan.launch(&stream, &tensors, scratch);
        workspace.fill_bytes(0, &stream).unwrap();
        match outcome {
            Ok(()) => None,
            Err(Error::Argument(error)) => Some((error.argument.clone(), error.kind)),
            Err(other) => panic!("{other}"),
        }
    };
    let name = |name: &str, kind| Some((name.to_owned(), kind));
    assert_eq!(launch(0, bytes), None);
    assert_eq!(launch(1, bytes), name("weights.a_log", ArgumentKind::Shape));
    assert_eq!(launch(2, bytes), name("o", ArgumentKind::Shape));
    assert_eq!(launch(3, bytes), name("d_z", ArgumentKind::Overlap));
    assert_eq!(
        launch(4, bytes),
        name("d_weights.norm", ArgumentKind::Shape)
    );
    assert_eq!(launch(0, bytes - 1), name("workspace", ArgumentKind::Size));
}

/// The same bits, and no finding, in every order of waves.
#[test]
fn layer_in_every_order() {
    let context = context();
    if !simulated(&context) {
        println!("skipped: a card executes in one way");
        return;
    }
    let usual = deltawave_sim::hip::options();
    let case = Case {
        interleaved: true,
        ..Case::new(Dtype::Bf16, [1, 2], [32, 32], &[67, 5])
    };
    let data = Data::new(&case);
    let (_, expected) = run(&context, &case, &data);
    for order in [WaveOrder::InStep, WaveOrder::Seeded(1)] {
        deltawave_sim::hip::set_options(Options { order, ..usual });
        let (_, other) = run(&context, &case, &data);
        deltawave_sim::hip::set_options(usual);
        for ((a, b), name) in expected.iter().zip(&other).zip(NAMES) {
            assert!(a.bytes == b.bytes, "{name} {order:?}");
        }
    }
}
