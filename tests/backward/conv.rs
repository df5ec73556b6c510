//! Gradients of the convolution.

use deltawave::conv::{
    Activation, Conv, ConvBackward, ConvBackwardTensors, ConvInput, ConvInputMut, ConvSpec,
    ConvStateLayout, ConvStates, ConvStatesMut,
};
use deltawave::error::{ArgumentKind, Error};
use deltawave::model::Heads;
use deltawave::runtime::Context;
use deltawave::tensor::Buffer;
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::oracle::conv::{ConvProblem, RowNorms, conv};
use deltawave_lab::oracle::conv_backward::{ConvGradients, conv_backward};
use deltawave_sim::launch::{Options, WaveOrder};
use proptest::prelude::*;

use crate::common::{context, simulated};
use crate::placed::{Placed, assert_close, padded};

#[derive(Clone, Debug)]
struct Case {
    spec: ConvSpec,
    lengths: Vec<usize>,
    /// Rows past the last sequence.
    tail: usize,
    interleaved: bool,
    on_device: bool,
    pad: usize,
    offset: usize,
    weight: Dtype,
    bias: Option<Dtype>,
    /// Columns of states more than width - 1.
    more: usize,
    /// Whether there are initial states, gradients of final states, and flags of initial states.
    states: [bool; 3],
    layout: ConvStateLayout,
    /// Gradients of q, k and v are one row for all tokens.
    expanded: bool,
    seed: u64,
}

fn spec(dtype: Dtype, heads: [usize; 2], dims: [usize; 2], width: usize) -> ConvSpec {
    ConvSpec {
        dtype,
        heads: Heads::new(heads[0], heads[1], dims[0], dims[1]),
        width,
        activation: Activation::Silu,
        qk_l2norm: false,
    }
}

impl Case {
    fn new(spec: ConvSpec, lengths: &[usize]) -> Self {
        Case {
            spec,
            lengths: lengths.to_vec(),
            tail: 0,
            interleaved: false,
            on_device: false,
            pad: 0,
            offset: 0,
            weight: Dtype::F32,
            bias: None,
            more: 0,
            states: [true, true, false],
            layout: ConvStateLayout::ChannelMajor,
            expanded: false,
            seed: 1,
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

    fn columns(&self) -> usize {
        self.spec.width - 1 + self.more
    }

    fn has(&self) -> Vec<bool> {
        (0..self.lengths.len())
            .map(|n| !self.states[2] || n % 3 != 1)
            .collect()
    }

    /// Column of x that channel `c` is read from.
    fn column(&self, c: usize) -> usize {
        let heads = self.spec.heads;
        let (keys, dim) = (heads.key * heads.key_dim, heads.key_dim);
        let values = heads.value / heads.key * heads.value_dim;
        let group = 2 * dim + 2 * values;
        match (self.interleaved, c < keys, c < 2 * keys) {
            (false, ..) => c,
            (_, true, _) => c / dim * group + c % dim,
            (_, _, true) => (c - keys) / dim * group + dim + (c - keys) % dim,
            _ => (c - 2 * keys) / values * group + 2 * dim + (c - 2 * keys) % values,
        }
    }

    /// Columns of x, z among them.
    fn row(&self) -> usize {
        self.spec.total_channels() + self.spec.heads.value * self.spec.heads.value_dim
    }

    /// Dense `[T, channels]` as rows of x; `fill` between them.
    fn packed(&self, t: &HostTensor, fill: f32) -> HostTensor {
        let channels = self.spec.total_channels();
        let mut values = vec![fill; self.tokens() * self.row()];
        for (i, x) in t.values.iter().enumerate() {
            values[i / channels * self.row() + self.column(i % channels)] = *x;
        }
        HostTensor::new(t.dtype, values)
    }

    fn unpacked(&self, t: &HostTensor) -> HostTensor {
        let channels = self.spec.total_channels();
        let at = |i: usize| i / channels * self.row() + self.column(i % channels);
        let size = t.dtype.size();
        let mut all = t.bytes.clone();
        let mut bytes = Vec::new();
        for i in 0..self.tokens() * channels {
            let element = &mut all[at(i) * size..(at(i) + 1) * size];
            bytes.extend_from_slice(element);
            element.fill(0xff);
        }
        assert!(all.iter().all(|b| *b == 0xff), "columns of z were written");
        HostTensor::from_bytes(t.dtype, bytes)
    }
}

struct Data {
    x: HostTensor,
    weight: HostTensor,
    bias: Option<HostTensor>,
    state: HostTensor,
    d_y: HostTensor,
    d_state: HostTensor,
}

impl Data {
    fn new(case: &Case) -> Self {
        let s = &case.spec;
        let channels = s.total_channels();
        let draw = |name, dtype, n| random_normal(dtype, name, n, case.seed);
        let states = case.lengths.len() * channels * case.columns();
        let mut d_y = draw("d_y", s.dtype, case.tokens() * channels);
        if case.expanded {
            let rows = d_y.values[..channels.min(d_y.values.len())].repeat(case.tokens());
            d_y = HostTensor::new(s.dtype, rows);
        }
        Data {
            x: draw("x", s.dtype, case.tokens() * channels),
            weight: draw("weight", case.weight, channels * s.width),
            bias: case.bias.map(|dtype| draw("bias", dtype, channels)),
            state: draw("state", s.dtype, states),
            d_y,
            d_state: draw("d_state", s.dtype, states),
        }
    }

    fn exact(&self, case: &Case) -> ConvGradients {
        self.problem(case, |problem, d_state| {
            conv_backward(problem, &self.d_y.values, d_state).unwrap()
        })
    }

    /// Gradients without the part that norms of q and k remove: a norm of x with the factor r passes on `r (d - y (y.d))`, and
    /// this has `r d`. Where d is nearly along y the difference cancels, and the rounding of f32 is of the size of `r d`.
    fn uncancelled(&self, case: &Case) -> ConvGradients {
        self.problem(case, |problem, d_state| {
            let norms = problem.norms.expect("a case with norms");
            let plain = ConvProblem {
                norms: None,
                ..*problem
            };
            let y = conv(&plain).unwrap().y;
            let mut d_y = self.d_y.values.clone();
            for (y, d_y) in y
                .chunks_exact(problem.channels)
                .zip(d_y.chunks_exact_mut(problem.channels))
            {
                let rows = y[..norms.channels].chunks_exact(norms.dim);
                for (y, d_y) in rows.zip(d_y.chunks_exact_mut(norms.dim)) {
                    let squares: f64 = y.iter().map(|y| y * y).sum();
                    let factor = 1.0 / (squares + 1e-6).sqrt();
                    for d in d_y {
                        *d = (f64::from(*d) * factor) as f32;
                    }
                }
            }
            conv_backward(&plain, &d_y, d_state).unwrap()
        })
    }

    fn problem<R>(
        &self,
        case: &Case,
        run: impl FnOnce(&ConvProblem<'_>, Option<&[f32]>) -> R,
    ) -> R {
        let (s, cu_seqlens, has) = (&case.spec, case.cu_seqlens(), case.has());
        let norms = RowNorms {
            channels: 2 * s.heads.key * s.heads.key_dim,
            dim: s.heads.key_dim,
        };
        let problem = ConvProblem {
            tokens: case.tokens(),
            channels: s.total_channels(),
            width: s.width,
            x: &self.x.values,
            weight: &self.weight.values,
            bias: self.bias.as_ref().map(|b| &b.values[..]),
            silu: s.activation == Activation::Silu,
            norms: s.qk_l2norm.then_some(norms),
            cu_seqlens: &cu_seqlens,
            state: case.states[0].then_some(&self.state.values),
            columns: case.columns(),
            has_initial_state: Some(&has),
            padding: None,
        };
        let d_state = case.states[1].then_some(&self.d_state.values[..]);
        run(&problem, d_state)
    }
}

/// Root of the mean square.
fn rms(x: &[f64]) -> f64 {
    (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt()
}

/// Gradients of x, weight, bias and initial states.
type Found = [Option<HostTensor>; 4];

const NAMES: [&str; 4] = ["dx", "dweight", "dbias", "dstate"];
const ALL: u32 = 0b1111;

/// `[N, channels, columns]` in a layout, and strides of `[N, channels, columns]` in memory.
fn states(case: &Case) -> ([usize; 3], [usize; 3]) {
    let (n, channels, columns) = (
        case.lengths.len(),
        case.spec.total_channels(),
        case.columns(),
    );
    match case.layout {
        ConvStateLayout::ChannelMajor => {
            let strides = padded([n, channels, columns], case.pad);
            ([n, channels, columns], strides)
        }
        ConvStateLayout::TokenMajor => {
            let [slot, column, channel] = padded([n, columns, channels], case.pad);
            ([n, channels, columns], [slot, channel, column])
        }
    }
}

/// A placed `[N, channels, columns]` as the layout has its dimensions.
fn in_layout(case: &Case, x: [usize; 3]) -> [usize; 3] {
    match case.layout {
        ConvStateLayout::ChannelMajor => x,
        ConvStateLayout::TokenMajor => [x[0], x[2], x[1]],
    }
}

/// Runs the backward twice, everything that it writes poisoned before: the same bits.
fn run(context: &Context, case: &Case, data: &Data, wanted: u32) -> Found {
    let stream = context.stream().unwrap();
    let (s, tokens) = (case.spec, case.tokens());
    let channels = s.total_channels();
    let rows = [tokens, case.row()];
    let row_strides = padded(rows, case.pad);
    let x = Placed::new(
        context,
        &case.packed(&data.x, f32::NAN),
        rows,
        row_strides,
        case.offset,
    );
    let weight = Placed::new(
        context,
        &data.weight,
        [channels, s.width],
        padded([channels, s.width], case.pad),
        0,
    );
    let bias = data
        .bias
        .as_ref()
        .map(|b| Placed::new(context, b, [channels], [1], 0));
    let (state_shape, state_strides) = states(case);
    let state = Placed::new(
        context,
        &data.state,
        state_shape,
        state_strides,
        case.offset,
    );
    let d_final = Placed::new(context, &data.d_state, state_shape, state_strides, 0);
    let parts = [
        (0, [tokens, s.heads.key, s.heads.key_dim]),
        (s.channels()[0], [tokens, s.heads.key, s.heads.key_dim]),
        (
            2 * s.channels()[0],
            [tokens, s.heads.value, s.heads.value_dim],
        ),
    ];
    let d_y = parts.map(|(first, shape)| {
        let row = shape[1] * shape[2];
        let values = (0..tokens).flat_map(|t| &data.d_y.values[t * channels + first..][..row]);
        let mut strides = padded(shape, case.pad);
        if case.expanded {
            strides[0] = 0;
        }
        let t = HostTensor::new(s.dtype, values.copied().collect());
        Placed::new(context, &t, shape, strides, case.offset)
    });
    let mut d_x = Placed::poisoned(context, s.dtype, rows, row_strides, case.offset);
    let mut d_weight = Placed::poisoned(
        context,
        Dtype::F32,
        [channels, s.width],
        padded([channels, s.width], case.pad),
        1,
    );
    let mut d_bias = Placed::poisoned(context, Dtype::F32, [channels], [2], 0);
    let mut d_initial = Placed::poisoned(context, s.dtype, state_shape, state_strides, 0);
    let has: Vec<u8> = case.has().into_iter().map(u8::from).collect();
    let has = context.upload(&has).unwrap();
    let cu_seqlens = context.upload(&case.cu_seqlens()).unwrap();
    let forward = match case.on_device {
        false => Conv::packed(context, s, &case.cu_seqlens(), tokens),
        true => Conv::device(context, s, tokens, case.lengths.len()),
    };
    let plan = ConvBackward::of(&forward.unwrap()).unwrap();
    let mut workspace: Buffer<u8> = context.alloc(plan.workspace_bytes()).unwrap();
    let layout = case.layout;
    let mut once = || {
        d_x.poison(&stream);
        d_weight.poison(&stream);
        d_bias.poison(&stream);
        d_initial.poison(&stream);
        workspace.fill_bytes(0xff, &stream).unwrap();
        let wants = |i: u32| wanted >> i & 1 == 1;
        let [d_q, d_k, d_v] = d_y.each_ref().map(|t| t.tensor().into());
        let view = |t: &Placed<3>| {
            let (shape, strides) = (in_layout(case, t.shape), in_layout(case, t.strides));
            let tensor = t
                .buffer
                .tensor_of(t.dtype, shape, strides, t.offset)
                .unwrap();
            // SAFETY: the buffers outlive the launch.
            let tensor = unsafe {
                let address = t
                    .buffer
                    .address()
                    .wrapping_byte_add(t.offset * t.dtype.size());
                deltawave::tensor::Tensor::from_raw(address, tensor.dtype(), shape, strides)
            };
            ConvStates { tensor, layout }
        };
        let d_initial_state = wants(3).then(|| {
            let (shape, strides) = (
                in_layout(case, d_initial.shape),
                in_layout(case, d_initial.strides),
            );
            let tensor = d_initial
                .buffer
                .tensor_of_mut(s.dtype, shape, strides, 0)
                .unwrap();
            ConvStatesMut { tensor, layout }
        });
        let tensors = ConvBackwardTensors {
            cu_seqlens: case.on_device.then(|| (&cu_seqlens).into()),
            x: match case.interleaved {
                true => ConvInput::interleaved(&x.tensor(), &s).unwrap(),
                false => ConvInput::flat(&x.tensor(), &s).unwrap(),
            },
            weight: weight.tensor(),
            bias: bias.as_ref().map(Placed::tensor),
            initial: case.states[0].then(|| view(&state)),
            has_initial_state: case.states[2].then(|| (&has).into()),
            d_q,
            d_k,
            d_v,
            d_final: case.states[1].then(|| view(&d_final)),
            d_x: wants(0).then(|| match case.interleaved {
                true => ConvInputMut::interleaved(d_x.tensor_mut(), &s).unwrap(),
                false => ConvInputMut::flat(d_x.tensor_mut(), &s).unwrap(),
            }),
            d_weight: wants(1).then(|| d_weight.tensor_mut()),
            d_bias: wants(2).then(|| d_bias.tensor_mut()),
            d_initial: d_initial_state,
        };
        plan.launch(&stream, &tensors, Workspace::new(&mut workspace))
            .unwrap();
        x.assert_same("x", &stream);
        state.assert_same("state", &stream);
        let d_rows = d_x.read(&stream);
        let mut index = 0;
        let all = [
            match wants(0) {
                true => case.unpacked(&d_rows),
                false => d_rows,
            },
            d_weight.read(&stream),
            d_bias.read(&stream),
            d_initial.read(&stream),
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
    assert!(bits(&first) == bits(&second), "two runs differ: {case:?}");
    first
}

#[track_caller]
fn check(context: &Context, case: &Case) -> Found {
    let data = Data::new(case);
    let found = run(context, case, &data, ALL);
    let exact = data.exact(case);
    let all = |g: ConvGradients| [g.x, g.weight, g.bias, g.state];
    let uncancelled = case.spec.qk_l2norm.then(|| all(data.uncancelled(case)));
    for (i, exact) in all(exact).iter().enumerate() {
        let found = found[i].as_ref().unwrap();
        let cancels = match &uncancelled {
            Some(parts) if rms(exact) > 0.0 => (rms(&parts[i]) / rms(exact)).max(1.0),
            _ => 1.0,
        };
        assert_close(NAMES[i], found, exact, 5e-6 * cancels, &|| {
            format!("{case:?}")
        });
    }
    found
}

/// Every width, sequences shorter than it and empty ones, rows past the last sequence, with states and without.
#[test]
fn conv_of_short_and_long_sequences() {
    let context = context();
    let lengths = [0, 1, 2, 3, 0, 4, 15, 16, 17, 40, 0];
    for (i, width) in [2, 3, 4].into_iter().enumerate() {
        for (j, states) in [
            [true, true, true],
            [true, false, false],
            [false, true, false],
            [false, false, false],
        ]
        .into_iter()
        .enumerate()
        {
            let case = Case {
                states,
                tail: 5 * j,
                on_device: j % 2 == 0,
                more: [0, 2, 20][(i + j) % 3],
                bias: [Some(Dtype::F32), None][j % 2],
                layout: [ConvStateLayout::ChannelMajor, ConvStateLayout::TokenMajor][j % 2],
                ..Case::new(
                    spec([Dtype::Bf16, Dtype::F16][i % 2], [1, 2], [16, 24], width),
                    &lengths,
                )
            };
            check(&context, &case);
        }
    }
    for lengths in [&[][..], &[0], &[0, 0, 3], &[5, 0]] {
        check(
            &context,
            &Case::new(spec(Dtype::Bf16, [1, 1], [8, 8], 4), lengths),
        );
        let case = Case {
            tail: 3,
            ..Case::new(spec(Dtype::Bf16, [1, 1], [8, 8], 4), lengths)
        };
        check(&context, &case);
    }
}

/// Dimensions that are no multiples of eight, odd addresses and strides, gradients of stride 0, packed layouts, types of
/// weights, no activation.
#[test]
fn conv_of_every_layout() {
    let context = context();
    let shapes = [
        ([1, 1], [3, 5]),
        ([2, 4], [20, 12]),
        ([2, 2], [64, 48]),
        ([3, 3], [7, 33]),
        ([1, 4], [128, 16]),
    ];
    for (i, (heads, dims)) in shapes.into_iter().enumerate() {
        for interleaved in [false, true] {
            let mut s = spec([Dtype::Bf16, Dtype::F16][i % 2], heads, dims, 2 + i % 3);
            if i % 3 == 2 {
                s.activation = Activation::None;
            }
            let case = Case {
                interleaved,
                pad: [0, 3, 8][i % 3],
                offset: [0, 1, 8][i % 3],
                expanded: i % 2 == 1,
                weight: [Dtype::F32, Dtype::Bf16, Dtype::F16][i % 3],
                bias: [Some(Dtype::Bf16), None, Some(Dtype::F16)][i % 3],
                ..Case::new(s, &[33, 70])
            };
            check(&context, &case);
        }
    }
}

/// With the norms of q and k: dimensions up to 256, octets that are not whole, rows of zeros.
#[test]
fn conv_with_norms() {
    let context = context();
    for (i, key_dim) in [16, 20, 64, 128, 136, 256].into_iter().enumerate() {
        let mut s = spec(
            [Dtype::Bf16, Dtype::F16][i % 2],
            [2, 2],
            [key_dim, 24],
            2 + i % 3,
        );
        s.qk_l2norm = true;
        let case = Case {
            interleaved: i % 2 == 0,
            pad: [0, 3][i % 2],
            bias: [Some(Dtype::F32), None][i % 2],
            tail: 2,
            ..Case::new(s, &[19, 0, 2, 37])
        };
        check(&context, &case);
    }
}

/// Zero rows under the norm have the factor 1000, in the gradient too.
#[test]
fn conv_with_norms_of_zeros() {
    let context = context();
    let mut s = spec(Dtype::Bf16, [1, 1], [32, 16], 4);
    s.qk_l2norm = true;
    let case = Case {
        states: [false, false, false],
        ..Case::new(s, &[12])
    };
    let mut data = Data::new(&case);
    let values = data.x.values.iter().enumerate();
    let zeros = values.map(|(i, x)| if (2..8).contains(&(i / 80)) { 0.0 } else { *x });
    data.x = HostTensor::new(Dtype::Bf16, zeros.collect());
    let (found, exact) = (run(&context, &case, &data, ALL), data.exact(&case));
    let all = [&exact.x, &exact.weight, &exact.bias, &exact.state];
    for ((name, found), exact) in NAMES.iter().zip(&found).zip(all) {
        assert_close(name, found.as_ref().unwrap(), exact, 5e-6, &|| {
            "zeros".to_owned()
        });
    }
    let largest = found[0]
        .as_ref()
        .unwrap()
        .values
        .iter()
        .fold(0.0f32, |m, x| m.max(x.abs()));
    assert!(largest > 100.0, "{largest}");
}

/// More blocks of tokens than walkers: sums of weights go over several blocks, of several sequences.
#[test]
fn conv_of_more_blocks_than_walkers() {
    let context = context();
    let lengths: Vec<usize> = (0..90).map(|n| n % 4).collect();
    let case = Case::new(spec(Dtype::Bf16, [32, 64], [128, 128], 4), &lengths);
    check(&context, &case);
}

/// Each gradient alone has the bits that it has among all; a sequence's dx does not depend on its batch.
#[test]
fn conv_of_each_gradient_alone() {
    let context = context();
    let case = Case {
        bias: Some(Dtype::F32),
        ..Case::new(spec(Dtype::Bf16, [1, 2], [16, 16], 4), &[21, 2, 50])
    };
    let data = Data::new(&case);
    let all = run(&context, &case, &data, ALL);
    for i in 0..4 {
        let alone = run(&context, &case, &data, 1 << i);
        let bytes = |found: &Found| found[i].as_ref().unwrap().bytes.clone();
        assert!(bytes(&alone) == bytes(&all), "{}", NAMES[i]);
    }
    run(&context, &case, &data, 0);
    let channels = case.spec.total_channels();
    let first = Case {
        lengths: vec![21],
        states: [true, true, false],
        ..case.clone()
    };
    let part = |t: &HostTensor, n: usize| HostTensor::new(t.dtype, t.values[..n].to_vec());
    let columns = channels * case.columns();
    let own = Data {
        x: part(&data.x, 21 * channels),
        weight: data.weight.clone(),
        bias: data.bias.clone(),
        state: part(&data.state, columns),
        d_y: part(&data.d_y, 21 * channels),
        d_state: part(&data.d_state, columns),
    };
    let alone = run(&context, &first, &own, ALL);
    for (i, n) in [(0, 21 * channels), (3, columns)] {
        let [a, b] = [&alone, &all].map(|found| found[i].as_ref().unwrap().bytes[..2 * n].to_vec());
        assert!(a == b, "{}", NAMES[i]);
    }
}

/// Rows past the last sequence hold NaN in x and in the gradients of y: none reaches a gradient.
#[test]
fn conv_of_poisoned_tails() {
    let context = context();
    let case = Case {
        tail: 40,
        bias: Some(Dtype::F32),
        ..Case::new(spec(Dtype::Bf16, [1, 2], [16, 16], 4), &[21, 0, 30])
    };
    let mut data = Data::new(&case);
    let exact = data.exact(&case);
    let from = 51 * case.spec.total_channels();
    for t in [&mut data.x, &mut data.d_y] {
        t.values[from..].fill(f32::NAN);
        *t = HostTensor::new(t.dtype, t.values.clone());
    }
    let found = run(&context, &case, &data, ALL);
    let all = [&exact.x, &exact.weight, &exact.bias, &exact.state];
    for ((name, found), exact) in NAMES.iter().zip(&found).zip(all) {
        assert_close(name, found.as_ref().unwrap(), exact, 5e-6, &|| {
            "tails".to_owned()
        });
    }
}

/// Lengths on the device that make no sense lead nowhere: the sanitizer would find an access outside.
#[test]
fn conv_of_wrong_lengths() {
    let context = context();
    let stream = context.stream().unwrap();
    let s = spec(Dtype::Bf16, [1, 1], [16, 16], 4);
    let (tokens, channels) = (40, s.total_channels());
    let plan = ConvBackward::of(&Conv::device(&context, s, tokens, 3).unwrap()).unwrap();
    let memory = |n: usize| context.upload(&vec![half::bf16::ZERO; n]).unwrap();
    let (x, d_y, mut d_x) = (
        memory(tokens * channels),
        memory(tokens * 16),
        memory(tokens * channels),
    );
    let mut d_initial = memory(3 * channels * 3);
    let mut d_weight = context.alloc::<f32>(channels * 4).unwrap();
    let mut workspace: Buffer<u8> = context.alloc(plan.workspace_bytes()).unwrap();
    for lengths in [
        [0, 30, 20, 40],
        [5, -7, 1000, 3],
        [i32::MAX, 0, i32::MIN, 9],
    ] {
        let lengths = context.upload(&lengths).unwrap();
        let d = || d_y.tensor([tokens, 1, 16]).unwrap().into();
        let tensors = ConvBackwardTensors {
            cu_seqlens: Some((&lengths).into()),
            x: ConvInput::flat(&x.tensor([tokens, channels]).unwrap(), &s).unwrap(),
            weight: x.tensor([channels, 4]).unwrap(),
            bias: None,
            initial: None,
            has_initial_state: None,
            d_q: d(),
            d_k: d(),
            d_v: d(),
            d_final: None,
            d_x: Some(ConvInputMut::flat(d_x.tensor_mut([tokens, channels]).unwrap(), &s).unwrap()),
            d_weight: Some(d_weight.tensor_mut([channels, 4]).unwrap()),
            d_bias: None,
            d_initial: Some(ConvStatesMut {
                tensor: d_initial.tensor_mut([3, channels, 3]).unwrap(),
                layout: ConvStateLayout::ChannelMajor,
            }),
        };
        plan.launch(&stream, &tensors, Workspace::new(&mut workspace))
            .unwrap();
        stream.synchronize().unwrap();
    }
}

#[test]
fn conv_refuses_what_it_cannot_do() {
    let context = context();
    let stream = context.stream().unwrap();
    let s = spec(Dtype::Bf16, [1, 1], [16, 16], 4);
    let (tokens, channels) = (10, s.total_channels());
    let plan = ConvBackward::of(&Conv::packed(&context, s, &[0, 10], tokens).unwrap()).unwrap();
    assert_eq!(
        (plan.kernels(false).len(), plan.kernels(true).len()),
        (1, 2)
    );
    let x = context.upload(&vec![half::bf16::ZERO; 1 << 12]).unwrap();
    let mut out = context.upload(&vec![half::bf16::ZERO; 1 << 12]).unwrap();
    let mut weights = context.alloc::<f32>(1 << 10).unwrap();
    let workspace: Buffer<u8> = context.alloc(plan.workspace_bytes()).unwrap();
    type Change<'a> = &'a dyn Fn(&mut ConvBackwardTensors<'_>);
    let mut launch = |change: Change<'_>, bytes: usize| {
        let address = x.address();
        let d = || x.tensor([tokens, 1, 16]).unwrap().into();
        let mut tensors = ConvBackwardTensors {
            cu_seqlens: None,
            x: ConvInput::flat(&x.tensor([tokens, channels]).unwrap(), &s).unwrap(),
            weight: x.tensor([channels, 4]).unwrap(),
            bias: None,
            initial: None,
            has_initial_state: None,
            d_q: d(),
            d_k: d(),
            d_v: d(),
            d_final: None,
            d_x: Some(ConvInputMut::flat(out.tensor_mut([tokens, channels]).unwrap(), &s).unwrap()),
            d_weight: Some(weights.tensor_mut([channels, 4]).unwrap()),
            d_bias: None,
            d_initial: None,
        };
        change(&mut tensors);
        let _ = address;
        // SAFETY: it lies in the buffer.
        let scratch = unsafe { Workspace::from_raw(workspace.address(), bytes) };
        plan.launch(&stream, &tensors, scratch)
    };
    let bytes = plan.workspace_bytes();
    launch(&|_| (), bytes).unwrap();
    // SAFETY: nothing is enqueued.
    let raw = |dtype, address: *mut std::ffi::c_void, shape: [usize; 3], strides| unsafe {
        deltawave::tensor::TensorMut::<3>::from_raw(address, dtype, shape, strides)
    };
    let own = context.alloc::<u8>(1 << 14).unwrap();
    let at = own.address();
    let bf16 = Dtype::Bf16;
    let rows = |rows, columns| ConvStates {
        // SAFETY: as above.
        tensor: unsafe {
            deltawave::tensor::Tensor::from_raw(
                at,
                bf16,
                [rows, channels, columns],
                [channels * columns, columns, 1],
            )
        },
        layout: ConvStateLayout::ChannelMajor,
    };
    let states = |columns| rows(1, columns);
    let refusals: &[(Change<'_>, &str, ArgumentKind)] = &[
        (
            &|t| t.d_x.as_mut().unwrap().k = raw(bf16, at, [tokens, 1, 15], [48, 16, 1]),
            "d_x.k",
            ArgumentKind::Shape,
        ),
        (
            &|t| t.d_x.as_mut().unwrap().q = raw(Dtype::F16, at, [tokens, 1, 16], [48, 16, 1]),
            "d_x.q",
            ArgumentKind::Dtype,
        ),
        (
            &|t| t.d_x.as_mut().unwrap().v = raw(bf16, at, [tokens, 1, 16], [0, 16, 1]),
            "d_x.v",
            ArgumentKind::Stride,
        ),
        (
            &|t| t.d_x.as_mut().unwrap().v = raw(bf16, x.address(), [tokens, 1, 16], [48, 16, 1]),
            "d_x.v",
            ArgumentKind::Overlap,
        ),
        (
            &|t| t.initial = Some(states(2)),
            "initial_state",
            ArgumentKind::Shape,
        ),
        // A row beyond the sequences would have no gradient.
        (
            &|t| t.initial = Some(rows(2, 3)),
            "initial_state",
            ArgumentKind::Shape,
        ),
        (
            &|t| t.d_final = Some(rows(2, 3)),
            "d_final_state",
            ArgumentKind::Shape,
        ),
        (
            &|t| {
                t.initial = Some(states(3));
                t.d_final = Some(states(4));
            },
            "d_final_state",
            ArgumentKind::Shape,
        ),
        (
            &|t| {
                t.initial = Some(states(3));
                t.d_initial = Some(ConvStatesMut {
                    tensor: raw(bf16, at, [1, channels, 3], [channels * 3, 3, 1]),
                    layout: ConvStateLayout::ChannelMajor,
                });
            },
            "d_initial_state",
            ArgumentKind::Overlap,
        ),
    ];
    for (change, name, kind) in refusals {
        match launch(change, bytes) {
            Err(Error::Argument(error)) => {
                assert_eq!(
                    (error.argument.as_str(), error.kind),
                    (*name, *kind),
                    "{error}"
                );
            }
            other => panic!("{name}: {other:?}"),
        }
    }
    let Err(Error::Argument(error)) = launch(&|_| (), bytes - 1) else {
        panic!("a small workspace")
    };
    assert_eq!(
        (error.argument.as_str(), error.kind),
        ("workspace", ArgumentKind::Size)
    );
}

/// The same bits, and no finding, in every order of waves.
#[test]
fn conv_in_every_order() {
    let context = context();
    if !simulated(&context) {
        println!("skipped: a card executes in one way");
        return;
    }
    let usual = deltawave_sim::hip::options();
    for qk_l2norm in [false, true] {
        let s = ConvSpec {
            qk_l2norm,
            ..spec(Dtype::Bf16, [1, 2], [64, 32], 4)
        };
        let case = Case::new(s, &[70, 3, 20]);
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

fn any_case() -> impl Strategy<Value = Case> {
    let shape = (
        any::<bool>(),
        [1usize..3, 1usize..3],
        [1usize..40, 1usize..40],
        2usize..=4,
        prop::collection::vec(0usize..30, 0..5),
        0usize..9,
    );
    let options = (
        any::<[bool; 7]>(),
        any::<[bool; 3]>(),
        0usize..9,
        0usize..4,
        0usize..4,
        0u64..1 << 32,
    );
    (shape, options).prop_map(|(shape, options)| {
        let (f16, [keys, group], dims, width, lengths, tail) = shape;
        let (flags, states, pad, offset, more, seed) = options;
        let [
            interleaved,
            on_device,
            norm,
            silu,
            bias,
            token_major,
            expanded,
        ] = flags;
        let dtype = if f16 { Dtype::F16 } else { Dtype::Bf16 };
        let spec = ConvSpec {
            activation: if silu {
                Activation::Silu
            } else {
                Activation::None
            },
            qk_l2norm: norm,
            ..spec(dtype, [keys, keys * group], dims, width)
        };
        Case {
            tail,
            interleaved,
            on_device,
            pad,
            offset,
            bias: bias.then_some(Dtype::Bf16),
            more,
            states,
            layout: match token_major {
                true => ConvStateLayout::TokenMajor,
                false => ConvStateLayout::ChannelMajor,
            },
            expanded,
            seed,
            ..Case::new(spec, &lengths)
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn conv_random(case in any_case()) {
        check(&context(), &case);
    }
}

/// Heads of one channel with norms: a norm's gradient is nearly 0, a difference of two numbers that are not.
#[test]
fn conv_of_norms_that_cancel() {
    for (width, lengths) in [(2, 13), (2, 16), (4, 40)] {
        let mut s = spec(Dtype::Bf16, [2, 4], [1, 15], width);
        (s.activation, s.qk_l2norm) = (Activation::None, true);
        for seed in [1_107_108_169, 1, 2] {
            let case = Case {
                states: [true, true, false],
                seed,
                ..Case::new(s, &[lengths])
            };
            check(&context(), &case);
        }
    }
}
