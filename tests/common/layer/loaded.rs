//! A layer on the device: its memory, poisoned where it is written, and what a launch left there.

use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::layer::{Layer, LayerStates, LayerTensors, LayerWeights};
use deltawave::runtime::{Context, Stream};
use deltawave::tensor::{Buffer, Tensor, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::Tensor as HostTensor;

use super::{Case, Data};

/// What a layer left behind: y `[T, HV, V]`, and the pools, dense and in the layouts of the oracle.
pub struct Output {
    pub y: HostTensor,
    /// `[slots, channels, width - 1]`.
    pub conv_states: HostTensor,
    /// `[slots, HV, K, V]`.
    pub states: HostTensor,
    /// The bytes of both pools, in the layouts of the case.
    pub pools: [Vec<u8>; 2],
}

impl PartialEq for Output {
    fn eq(&self, other: &Self) -> bool {
        self.y.bytes == other.y.bytes
            && self.conv_states.bytes == other.conv_states.bytes
            && self.states.bytes == other.states.bytes
    }
}

/// A case on the device.
pub struct Loaded {
    plan: Layer,
    /// Lengths that launches read on the device.
    lengths: Option<Buffer<i32>>,
    projections: Buffer<u8>,
    a: Buffer<u8>,
    b: Buffer<u8>,
    weights: [Buffer<u8>; 5],
    conv_states: Buffer<u8>,
    states: Buffer<u8>,
    slots: Buffer<i32>,
    has_initial_state: Buffer<u8>,
    y: Buffer<u8>,
    workspace: Buffer<u8>,
    /// What the pools hold before a launch.
    before: [Vec<u8>; 2],
}

/// Elements before y, and behind each of its rows.
const Y_OFFSET: usize = 3;
const Y_PAD: usize = 5;

fn poison(dtype: Dtype, elements: usize) -> Vec<u8> {
    match dtype.size() {
        2 => [0xa5, 0xff].repeat(elements),
        _ => [0xa5, 0xa5, 0xff, 0xff].repeat(elements),
    }
}

impl Loaded {
    pub fn new(context: &Context, case: &Case, data: &Data) -> Self {
        let (s, tokens) = (&case.spec, case.tokens());
        let upload = |bytes: &[u8]| context.upload(bytes).unwrap();
        let before = pools(case, data);
        let lengths = case.cu_seqlens();
        let (plan, device_lengths) = match case.device {
            false => (
                Layer::packed(context, *s, &lengths, tokens, case.decodes),
                None,
            ),
            true => (
                Layer::device(context, *s, tokens, case.sequences(), case.decodes),
                Some(context.upload(&lengths).unwrap()),
            ),
        };
        let plan = plan.unwrap();
        let y = poison(s.dtype, Y_OFFSET + tokens * (case.values() + Y_PAD));
        let workspace = vec![0xff; plan.workspace_bytes()];
        Loaded {
            lengths: device_lengths,
            projections: upload(&projections(case, data)),
            a: upload(&data.a.bytes),
            b: upload(&data.b.bytes),
            weights: weights(data).map(|t| upload(&t.bytes)),
            conv_states: upload(&before[0]),
            states: upload(&before[1]),
            slots: context.upload(&slots(case)).unwrap(),
            has_initial_state: upload(&has_initial(case)),
            y: upload(&y),
            workspace: upload(&workspace),
            before,
            plan,
        }
    }

    /// Puts another case of the same sizes in the place of this one, at the same addresses.
    pub fn replace(&mut self, case: &Case, data: &Data) {
        self.projections.write(&projections(case, data)).unwrap();
        self.a.write(&data.a.bytes).unwrap();
        self.b.write(&data.b.bytes).unwrap();
        for (buffer, tensor) in self.weights.iter_mut().zip(weights(data)) {
            buffer.write(&tensor.bytes).unwrap();
        }
        self.slots.write(&slots(case)).unwrap();
        self.has_initial_state.write(&has_initial(case)).unwrap();
        self.before = pools(case, data);
        self.set_lengths(&case.cu_seqlens());
    }

    /// Writes the `cu_seqlens` that a [`Layer`] reads on the device.
    pub fn set_lengths(&mut self, cu_seqlens: &[i32]) {
        if let Some(lengths) = &mut self.lengths {
            lengths.write(cu_seqlens).unwrap();
        }
    }

    /// The status word that a [`Layer`] leaves for its lengths.
    pub fn status(&self, stream: &Stream) -> u32 {
        let bytes = self.workspace.download(stream).unwrap();
        u32::from_le_bytes(bytes[..4].try_into().unwrap())
    }

    /// Poisons what a launch writes, and puts the states back.
    pub fn reset(&mut self, stream: &Stream) {
        stream.synchronize().unwrap();
        self.conv_states.write(&self.before[0]).unwrap();
        self.states.write(&self.before[1]).unwrap();
        let y = poison(Dtype::Bf16, self.y.len() / 2);
        self.y.write(&y).unwrap();
        self.workspace.fill_bytes(0xff, stream).unwrap();
    }

    pub fn launch(&mut self, case: &Case, stream: &Stream) -> deltawave::Result<()> {
        self.launch_changed(case, stream, |_| ())
    }

    /// A launch of what `change` makes of the tensors.
    pub fn launch_changed(
        &mut self,
        case: &Case,
        stream: &Stream,
        change: impl FnOnce(&mut LayerTensors<'_>),
    ) -> deltawave::Result<()> {
        let s = case.spec;
        let (tokens, heads, channels) = (case.tokens(), s.heads.value, case.channels());
        let row = channels + case.values();
        let projections = self
            .projections
            .tensor_of(s.dtype, [tokens, row], [row, 1], 0)?;
        let [conv, conv_bias, a_log, dt_bias, norm] = &self.weights;
        let vector = |buffer: &Buffer<u8>, n: usize| {
            // SAFETY: the buffer outlives the launch.
            unsafe { Tensor::<1>::from_raw(buffer.address(), Dtype::F32, [n], [1]) }
        };
        let (slots, columns) = (case.pool(), case.columns());
        let (shape, layout) = match case.token_major {
            true => ([slots, columns, channels], ConvStateLayout::TokenMajor),
            false => ([slots, channels, columns], ConvStateLayout::ChannelMajor),
        };
        let conv_strides = dense_strides(shape);
        let matrix = match case.value_major {
            true => [slots, heads, s.heads.value_dim, s.heads.key_dim],
            false => [slots, heads, s.heads.key_dim, s.heads.value_dim],
        };
        let strides = dense_strides(matrix);
        let (z, x) = match case.interleaved {
            true => (
                ConvInput::interleaved_z(&projections, &s.conv())?,
                ConvInput::interleaved(&projections, &s.conv())?,
            ),
            false => (
                ConvInput::flat_z(&projections, &s.conv())?,
                ConvInput::flat(&projections, &s.conv())?,
            ),
        };
        let mut tensors = LayerTensors {
            cu_seqlens: self.lengths.as_ref().map(Into::into),
            x,
            z,
            a: (self.a.tensor_of(s.dtype, [tokens, heads], [heads, 1], 0)?).into(),
            b: (self.b.tensor_of(s.dtype, [tokens, heads], [heads, 1], 0)?).into(),
            weights: LayerWeights {
                conv: conv.tensor_of(s.dtype, [channels, s.width], [s.width, 1], 0)?,
                conv_bias: Some(vector(conv_bias, channels)),
                a_log: vector(a_log, heads),
                dt_bias: Some(vector(dt_bias, heads)),
                norm: Some(vector(norm, s.heads.value_dim)),
            },
            states: LayerStates {
                conv: self
                    .conv_states
                    .tensor_of_mut(s.dtype, shape, conv_strides, 0)?,
                conv_layout: layout,
                recurrent: self
                    .states
                    .tensor_of_mut(case.state_dtype, matrix, strides, 0)?,
                recurrent_layout: case.layout(),
                slots: case.has_slots.then(|| (&self.slots).into()),
                has_initial_state: Some((&self.has_initial_state).into()),
            },
            y: self
                .y
                .tensor_of_mut(
                    s.dtype,
                    [tokens, heads, s.heads.value_dim],
                    [case.values() + Y_PAD, s.heads.value_dim, 1],
                    Y_OFFSET,
                )?
                .into(),
        };
        change(&mut tensors);
        let workspace = Workspace::new(&mut self.workspace);
        self.plan.launch(stream, &tensors, workspace)
    }

    pub fn output(&self, case: &Case, stream: &Stream) -> Output {
        let s = &case.spec;
        let mut bytes = self.y.download(stream).unwrap();
        let (row, values) = (case.values() + Y_PAD, case.values());
        let mut y = Vec::with_capacity(2 * case.tokens() * values);
        for t in 0..case.tokens() {
            let at = 2 * (Y_OFFSET + t * row)..2 * (Y_OFFSET + t * row + values);
            y.extend_from_slice(&bytes[at.clone()]);
            bytes[at].copy_from_slice(&poison(s.dtype, values));
        }
        assert!(
            bytes == poison(s.dtype, bytes.len() / 2),
            "written outside of y"
        );
        let pools = [&self.conv_states, &self.states].map(|b| b.download(stream).unwrap());
        let conv = HostTensor::from_bytes(s.dtype, pools[0].clone());
        let states = HostTensor::from_bytes(case.state_dtype, pools[1].clone());
        let transposed = |t: HostTensor, rows, columns| {
            let layout = StateLayout::ValueMajor;
            let values = layout.to_key_major(&t.values, rows, columns);
            HostTensor::new(t.dtype, values)
        };
        Output {
            y: HostTensor::from_bytes(s.dtype, y),
            conv_states: match case.token_major && !conv.values.is_empty() {
                true => transposed(conv, case.channels(), case.columns()),
                false => conv,
            },
            states: match case.value_major && !states.values.is_empty() {
                true => transposed(states, s.heads.key_dim, s.heads.value_dim),
                false => states,
            },
            pools,
        }
    }
}

/// Rows of q, k, v and z, in the order of the case.
pub fn projections(case: &Case, data: &Data) -> Vec<u8> {
    let (tokens, channels) = (case.tokens(), case.channels());
    let row = channels + case.values();
    let mut projections = poison(case.spec.dtype, tokens * row);
    for t in 0..tokens {
        for c in 0..row {
            let at = 2 * (t * row + case.column(c));
            let value = match c < channels {
                true => &data.x.bytes[2 * (t * channels + c)..],
                false => &data.z.bytes[2 * (t * case.values() + c - channels)..],
            };
            projections[at..at + 2].copy_from_slice(&value[..2]);
        }
    }
    projections
}

pub fn weights(data: &Data) -> [&HostTensor; 5] {
    [
        &data.conv_weight,
        &data.conv_bias,
        &data.a_log,
        &data.dt_bias,
        &data.norm_weight,
    ]
}

pub fn slots(case: &Case) -> Vec<i32> {
    let padding = case.padding();
    let none = [-1, case.pool() as i32, i32::MIN, i32::MAX];
    let slot = |n: usize| match padding[n] {
        true => none[n % none.len()],
        false => case.slot(n) as i32,
    };
    (0..case.sequences()).map(slot).collect()
}

pub fn has_initial(case: &Case) -> Vec<u8> {
    case.has_initial().iter().map(|x| u8::from(*x)).collect()
}

/// The bytes of both pools: states in their slots, the rest poisoned, and so are states that do not count.
pub fn pools(case: &Case, data: &Data) -> [Vec<u8>; 2] {
    let (conv, state) = case.sizes();
    let s = &case.spec;
    let place = |t: &HostTensor, size: usize, [rows, columns]: [usize; 2], transposed: bool| {
        let element = t.dtype.size();
        let mut bytes = poison(t.dtype, case.pool() * size);
        let kept = |n: usize| case.has_initial()[n] || case.lengths[n] == 0 || case.padding()[n];
        for n in (0..case.sequences()).filter(|n| kept(*n)) {
            for i in 0..size {
                let (matrix, r, c) = (i / (rows * columns), i / columns % rows, i % columns);
                let at = match transposed {
                    true => (matrix * columns + c) * rows + r,
                    false => i,
                };
                let (to, from) = (case.slot(n) * size + at, n * size + i);
                bytes[to * element..(to + 1) * element]
                    .copy_from_slice(&t.bytes[from * element..(from + 1) * element]);
            }
        }
        bytes
    };
    let conv_matrix = [case.channels(), case.columns()];
    [
        place(&data.conv_state, conv, conv_matrix, case.token_major),
        place(
            &data.state,
            state,
            [s.heads.key_dim, s.heads.value_dim],
            case.value_major,
        ),
    ]
}
