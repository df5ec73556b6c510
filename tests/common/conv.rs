//! Running one convolution on the device under hostile conditions, and judging it by the oracle.
#![allow(dead_code)]

use deltawave::conv::{
    Activation, Conv, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors,
};
use deltawave::runtime::Context;
use deltawave::tensor::Buffer;
use deltawave::types::Dtype;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::metrics::{UlpComparison, compare_ulps};
use deltawave_lab::oracle::conv::{ConvProblem, RowNorms, conv};

/// Where q, k and v lie in a row of x.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    Flat,
    Interleaved,
}

/// Where the lengths come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Entry {
    Host,
    Device,
    DeviceWide,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub spec: ConvSpec,
    pub lengths: Vec<usize>,
    /// Rows past the last sequence.
    pub tail: usize,
    pub layout: Layout,
    /// Elements before x, and more of them in each row than the projections have.
    pub x_offset: usize,
    pub x_pad: usize,
    /// More elements in each row of q, k and v, between their heads, and before them.
    pub out_pad: usize,
    pub head_pad: usize,
    pub out_offset: usize,
    pub weight_dtype: Dtype,
    /// Weights as [width, channels] in memory.
    pub weight_transposed: bool,
    pub bias: Option<Dtype>,
    /// Columns more than width - 1; none: no state.
    pub more_columns: Option<usize>,
    pub state_layout: ConvStateLayout,
    /// Elements between slots.
    pub slot_pad: usize,
    /// Which sequences have an initial state, and which are padding: bit n % 8.
    pub has_initial: u8,
    pub padding: u8,
    pub has_slots: bool,
    pub entry: Entry,
    pub seed: u64,
}

impl Case {
    pub fn new(spec: ConvSpec, lengths: &[usize]) -> Self {
        Case {
            spec,
            lengths: lengths.to_vec(),
            tail: 0,
            layout: Layout::Flat,
            x_offset: 0,
            x_pad: 0,
            out_pad: 0,
            head_pad: 0,
            out_offset: 0,
            weight_dtype: spec.dtype,
            weight_transposed: false,
            bias: None,
            more_columns: Some(0),
            state_layout: ConvStateLayout::ChannelMajor,
            slot_pad: 0,
            has_initial: 0b1011_0101,
            padding: 0,
            has_slots: true,
            entry: Entry::Host,
            seed: 1,
        }
    }

    pub fn sequences(&self) -> usize {
        self.lengths.len()
    }

    pub fn cu_seqlens(&self) -> Vec<i32> {
        let ends = self.lengths.iter().scan(0, |end, n| {
            *end += *n as i32;
            Some(*end)
        });
        std::iter::once(0).chain(ends).collect()
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum::<usize>() + self.tail
    }

    pub fn norms(&self) -> Option<RowNorms> {
        let s = &self.spec;
        let norms = RowNorms {
            channels: 2 * s.heads.key * s.heads.key_dim,
            dim: s.heads.key_dim,
        };
        s.qk_l2norm.then_some(norms)
    }

    pub fn columns(&self) -> usize {
        self.more_columns
            .map_or(0, |more| self.spec.width - 1 + more)
    }

    pub fn has_initial(&self) -> Vec<bool> {
        let all = 0..self.sequences();
        all.map(|n| self.has_initial >> (n % 8) & 1 == 1).collect()
    }

    pub fn padding(&self) -> Vec<bool> {
        let all = 0..self.sequences();
        all.map(|n| self.has_slots && self.padding >> (n % 8) & 1 == 1)
            .collect()
    }

    /// Two slots for each sequence, so that half of them belong to nobody.
    pub fn pool(&self) -> usize {
        2 * self.sequences() + 1
    }

    pub fn slot(&self, n: usize) -> usize {
        if self.has_slots {
            2 * (self.sequences() - n)
        } else {
            n
        }
    }

    /// Column of x that channel `c` of (q, k, v) is read from, and columns in all.
    pub fn column(&self, c: usize) -> usize {
        let s = &self.spec;
        let keys = s.heads.key * s.heads.key_dim;
        match self.layout {
            Layout::Flat => c,
            Layout::Interleaved => {
                let values = s.heads.value / s.heads.key * s.heads.value_dim;
                let group = 2 * s.heads.key_dim + 2 * values;
                if c < keys {
                    c / s.heads.key_dim * group + c % s.heads.key_dim
                } else if c < 2 * keys {
                    let c = c - keys;
                    c / s.heads.key_dim * group + s.heads.key_dim + c % s.heads.key_dim
                } else {
                    let c = c - 2 * keys;
                    c / values * group + 2 * s.heads.key_dim + c % values
                }
            }
        }
    }

    /// Columns of x: those of z, too.
    pub fn columns_of_x(&self) -> usize {
        let s = &self.spec;
        2 * s.heads.key * s.heads.key_dim + 2 * s.heads.value * s.heads.value_dim
    }

    /// Strides of a pool `[slots, channels, columns]`, in this order whatever the layout.
    pub fn state_strides(&self) -> [usize; 3] {
        let (channels, columns) = (self.spec.total_channels(), self.columns());
        let slot = channels * columns + self.slot_pad;
        match self.state_layout {
            ConvStateLayout::ChannelMajor => [slot, columns, 1],
            ConvStateLayout::TokenMajor => [slot, 1, channels],
        }
    }
}

/// What a convolution left behind.
pub struct Output {
    /// `[T, channels]`.
    pub y: HostTensor,
    /// The pool's bytes.
    pub pool: Vec<u8>,
}

/// Bits of a NaN that no kernel makes.
pub const POISON: [u8; 2] = [0xa5, 0xff];

pub fn poison(elements: usize) -> Vec<u8> {
    POISON.repeat(elements)
}

/// Inputs of a case, dense.
pub struct Data {
    pub x: HostTensor,
    pub weight: HostTensor,
    pub bias: Option<HostTensor>,
    /// `[N, channels, columns]`.
    pub state: HostTensor,
}

impl Data {
    pub fn new(case: &Case) -> Data {
        let s = &case.spec;
        let channels = s.total_channels();
        let draw = |name, dtype, n| random_normal(dtype, name, n, case.seed);
        let states = case.sequences() * channels * case.columns();
        Data {
            x: draw("x", s.dtype, case.tokens() * channels),
            weight: draw("weight", case.weight_dtype, channels * s.width),
            bias: case.bias.map(|dtype| draw("bias", dtype, channels)),
            state: draw("conv_state", s.dtype, states),
        }
    }
}

pub fn run(context: &Context, case: &Case, data: &Data) -> Output {
    let stream = context.stream().unwrap();
    let s = case.spec;
    let (tokens, channels) = (case.tokens(), s.total_channels());

    // x, with everything between its channels poisoned.
    let row = case.columns_of_x() + case.x_pad;
    let mut bytes = poison(case.x_offset + tokens * row);
    for t in 0..tokens {
        for c in 0..channels {
            let at = 2 * (case.x_offset + t * row + case.column(c));
            let from = 2 * (t * channels + c);
            bytes[at..at + 2].copy_from_slice(&data.x.bytes[from..from + 2]);
        }
    }
    let x_before = bytes.clone();
    let x = context.upload(&bytes).unwrap();
    let size = case.weight_dtype.size();
    let mut weights = data.weight.bytes.clone();
    let mut weight_strides = [s.width, 1];
    if case.weight_transposed {
        weight_strides = [1, channels];
        for c in 0..channels {
            for j in 0..s.width {
                let (from, to) = ((c * s.width + j) * size, (j * channels + c) * size);
                weights[to..to + size].copy_from_slice(&data.weight.bytes[from..from + size]);
            }
        }
    }
    let weight = context.upload(&weights).unwrap();
    let bias = data
        .bias
        .as_ref()
        .map(|b| (context.upload(&b.bytes).unwrap(), b.dtype));

    // The pool: states in their slots, the rest poisoned.
    let [slot_stride, channel_stride, column_stride] = case.state_strides();
    let mut pool_bytes = poison(case.pool() * slot_stride);
    for n in 0..case.sequences() {
        for c in 0..channels {
            for j in 0..case.columns() {
                let at = case.slot(n) * slot_stride + c * channel_stride + j * column_stride;
                let from = (n * channels + c) * case.columns() + j;
                let value = &data.state.bytes[2 * from..2 * from + 2];
                pool_bytes[2 * at..2 * at + 2].copy_from_slice(value);
            }
        }
    }
    // A slot without an initial state holds garbage.
    for (n, has) in case.has_initial().iter().enumerate() {
        if !has && case.more_columns.is_some() && case.lengths[n] > 0 && !case.padding()[n] {
            let at = 2 * case.slot(n) * slot_stride;
            let len = 2 * channels * case.columns();
            pool_bytes[at..at + len].copy_from_slice(&poison(channels * case.columns()));
        }
    }
    let mut pool = context.upload(&pool_bytes).unwrap();
    let slots: Vec<i32> = (0..case.sequences())
        .map(|n| match case.padding()[n] {
            true if n % 2 == 0 => -1,
            true => i32::MAX,
            false => case.slot(n) as i32,
        })
        .collect();
    let slots = context.upload(&slots).unwrap();
    let has: Vec<u8> = case.has_initial().iter().map(|x| u8::from(*x)).collect();
    let has = context.upload(&has).unwrap();

    // Outputs, each in a buffer of its own.
    let outs = [
        (s.heads.key, s.heads.key_dim),
        (s.heads.key, s.heads.key_dim),
        (s.heads.value, s.heads.value_dim),
    ];
    let strides = outs.map(|(heads, dim)| {
        let head = dim + case.head_pad;
        [heads * head + case.out_pad, head, 1]
    });
    let mut buffers: [Buffer<u8>; 3] = strides.map(|[token, ..]| {
        context
            .upload(&poison(case.out_offset + tokens * token + 3))
            .unwrap()
    });

    {
        let x = x
            .tensor_of(
                s.dtype,
                [tokens, case.columns_of_x()],
                [row, 1],
                case.x_offset,
            )
            .unwrap();
        let [q, k, v] = &mut buffers;
        let out = |buffer, i: usize| {
            let (heads, dim) = outs[i];
            let buffer: &mut Buffer<u8> = buffer;
            buffer
                .tensor_of_mut(s.dtype, [tokens, heads, dim], strides[i], case.out_offset)
                .unwrap()
        };
        let (channel_major, token_major) = (
            [case.pool(), channels, case.columns()],
            [case.pool(), case.columns(), channels],
        );
        let state = case.more_columns.map(|_| {
            let (shape, strides) = match case.state_layout {
                ConvStateLayout::ChannelMajor => {
                    (channel_major, [slot_stride, channel_stride, column_stride])
                }
                ConvStateLayout::TokenMajor => {
                    (token_major, [slot_stride, column_stride, channel_stride])
                }
            };
            ConvState {
                tensor: pool.tensor_of_mut(s.dtype, shape, strides, 0).unwrap(),
                layout: case.state_layout,
                has_initial_state: Some((&has).into()),
            }
        });
        let lengths = device_lengths(context, case);
        let tensors = ConvTensors {
            cu_seqlens: lengths.as_ref().map(|lengths| match lengths {
                DeviceLengths::Narrow(x) => x.into(),
                DeviceLengths::Wide(x) => x.into(),
            }),
            x: match case.layout {
                Layout::Flat => ConvInput::flat(&x, &s).unwrap(),
                Layout::Interleaved => ConvInput::interleaved(&x, &s).unwrap(),
            },
            weight: weight
                .tensor_of(case.weight_dtype, [channels, s.width], weight_strides, 0)
                .unwrap(),
            bias: bias
                .as_ref()
                .map(|(b, dtype)| b.tensor_of(*dtype, [channels], [1], 0).unwrap()),
            state,
            slots: case.has_slots.then(|| (&slots).into()),
            q: out(q, 0).into(),
            k: out(k, 1).into(),
            v: out(v, 2).into(),
            gates: None,
        };
        let plan = match case.entry {
            Entry::Host => Conv::packed(context, s, &case.cu_seqlens(), tokens),
            _ => Conv::device(context, s, tokens, case.sequences()),
        };
        plan.unwrap().launch(&stream, &tensors).unwrap();
        stream.synchronize().unwrap();
    }

    assert!(x.download(&stream).unwrap() == x_before, "x was written to");
    // Gathered as [T, channels]; what lies between the elements must be as it was.
    let mut y = vec![0u8; 2 * tokens * channels];
    let mut before = 0;
    for (i, (heads, dim)) in outs.into_iter().enumerate() {
        let mut bytes = buffers[i].download(&stream).unwrap();
        for t in 0..tokens {
            for h in 0..heads {
                for d in 0..dim {
                    let at = 2 * (case.out_offset + t * strides[i][0] + h * strides[i][1] + d);
                    let to = 2 * (t * channels + before + h * dim + d);
                    y[to..to + 2].copy_from_slice(&bytes[at..at + 2]);
                    bytes[at..at + 2].copy_from_slice(&POISON);
                }
            }
        }
        assert!(
            bytes.chunks_exact(2).all(|b| b == POISON),
            "written outside of output {i}"
        );
        before += heads * dim;
    }
    Output {
        y: HostTensor::from_bytes(s.dtype, y),
        pool: pool.download(&stream).unwrap(),
    }
}

/// `cu_seqlens` on the device, with 32 or 64 bits, for plans that read them there.
enum DeviceLengths {
    Narrow(Buffer<i32>),
    Wide(Buffer<i64>),
}

fn device_lengths(context: &Context, case: &Case) -> Option<DeviceLengths> {
    let lengths = case.cu_seqlens();
    match case.entry {
        Entry::Host => None,
        Entry::Device => Some(DeviceLengths::Narrow(context.upload(&lengths).unwrap())),
        Entry::DeviceWide => {
            let wide: Vec<i64> = lengths.iter().map(|n| i64::from(*n)).collect();
            Some(DeviceLengths::Wide(context.upload(&wide).unwrap()))
        }
    }
}

/// Runs a case and compares it with the oracle.
#[track_caller]
pub fn check(context: &Context, case: &Case) -> UlpComparison {
    let data = Data::new(case);
    let output = run(context, case, &data);
    check_output(case, &data, &output)
}

#[track_caller]
pub fn check_output(case: &Case, data: &Data, output: &Output) -> UlpComparison {
    let (has_initial, padding) = (case.has_initial(), case.padding());
    let solution = conv(&ConvProblem {
        tokens: case.tokens(),
        channels: case.spec.total_channels(),
        width: case.spec.width,
        x: &data.x.values,
        weight: &data.weight.values,
        bias: data.bias.as_ref().map(|b| &b.values[..]),
        silu: case.spec.activation == Activation::Silu,
        norms: case.norms(),
        cu_seqlens: &case.cu_seqlens(),
        state: case.more_columns.map(|_| &data.state.values[..]),
        columns: case.columns(),
        has_initial_state: Some(&has_initial),
        padding: Some(&padding),
    })
    .unwrap();
    let found = compare_ulps(&output.y, &solution.y);
    assert!(found.max_ulps <= 1, "{found:?}: {case:?}");
    // Small cases scatter: one element of a few hundred may lie beside a tie.
    assert!(
        found.equal_share() >= 0.999 || found.different <= 2,
        "{found:?}: {case:?}"
    );

    // The pool: new states in their slots, everything else as it was.
    let mut pool = output.pool.clone();
    let [slot_stride, channel_stride, column_stride] = case.state_strides();
    let states = HostTensor::new(case.spec.dtype, solution.state);
    let channels = case.spec.total_channels();
    for n in 0..case.sequences() {
        for c in 0..channels {
            for j in 0..case.columns() {
                let at = 2 * (case.slot(n) * slot_stride + c * channel_stride + j * column_stride);
                let from = 2 * ((n * channels + c) * case.columns() + j);
                assert_eq!(
                    pool[at..at + 2],
                    states.bytes[from..from + 2],
                    "state of sequence {n}, channel {c}, column {j}: {case:?}"
                );
                pool[at..at + 2].copy_from_slice(&POISON);
            }
        }
    }
    assert!(
        pool.chunks_exact(2).all(|b| b == POISON),
        "written outside of the states: {case:?}"
    );
    found
}

pub fn spec(dtype: Dtype, heads: [usize; 2], dims: [usize; 2], width: usize) -> ConvSpec {
    ConvSpec {
        dtype,
        width,
        ..ConvSpec::new(heads[0], heads[1], dims[0], dims[1])
    }
}
