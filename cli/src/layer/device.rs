//! A layer on the device.

use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::gate::Gate;
use deltawave::layer::{Layer, LayerStates, LayerTensors, LayerWeights};
use deltawave::prefill::Workspace;
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::tensor::{Buffer, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::Tensor as HostTensor;

use super::{Outcome, Workload};
use crate::conv::args::LayoutArg;

type Fallible<T> = deltawave::Result<T>;

/// The workload on the device.
pub(super) struct Device {
    projections: Buffer<u8>,
    /// Rows `b | a`, or such of each key head.
    ba: Buffer<u8>,
    conv_weight: Buffer<u8>,
    a_log: Buffer<u8>,
    dt_bias: Buffer<u8>,
    norm_weight: Buffer<u8>,
    conv_state: Buffer<u8>,
    state: Buffer<u8>,
    /// Both before a run.
    before: [Vec<u8>; 2],
    has_initial_state: Buffer<u8>,
    y: Buffer<u8>,
    workspace: Buffer<u8>,
}

impl Device {
    pub(super) fn new(context: &Context, plan: &Layer, w: &Workload) -> Fallible<Self> {
        let s = &w.spec;
        let (channels, values) = (s.conv().total_channels(), s.value_heads * s.value_dim);
        let garbage = |elements: usize, dtype: Dtype| vec![0xff; elements * dtype.size()];
        let before = match &w.states {
            Some([conv_state, state]) => [conv_state.bytes.clone(), w.laid_out(state).bytes],
            None => [
                garbage(w.sequences() * channels * (s.width - 1), s.dtype),
                garbage(w.sequences() * values * s.key_dim, w.state_dtype),
            ],
        };
        let upload = |t: &HostTensor| context.upload(&t.bytes);
        Ok(Device {
            projections: context.upload(&w.rows())?,
            ba: context.upload(&w.gate_rows())?,
            conv_weight: upload(&w.conv_weight)?,
            a_log: upload(&w.a_log)?,
            dt_bias: upload(&w.dt_bias)?,
            norm_weight: upload(&w.norm_weight)?,
            conv_state: context.alloc(before[0].len())?,
            state: context.alloc(before[1].len())?,
            before,
            has_initial_state: context
                .upload(&vec![u8::from(w.states.is_some()); w.sequences()])?,
            y: context.alloc(w.tokens * values * s.dtype.size())?,
            workspace: context.alloc(plan.workspace_bytes())?,
        })
    }

    pub(super) fn run(&mut self, stream: &Stream, plan: &Layer, w: &Workload) -> Fallible<Outcome> {
        self.workspace.fill_bytes(0xff, stream)?;
        self.y.fill_bytes(0xff, stream)?;
        stream.synchronize()?;
        self.conv_state.write(&self.before[0])?;
        self.state.write(&self.before[1])?;
        let simulated = stream.context().backend() == Backend::Simulator;
        deltawave_sim::hip::reset_statistics();
        deltawave_sim::hip::take_counted_launches();
        let start = stream.record()?;
        self.launch(stream, plan, w)?;
        let end = stream.record()?;
        end.synchronize()?;
        let all = deltawave_sim::hip::statistics();
        let statistics = plan.kernels().into_iter();
        let statistics: Vec<_> = statistics.map(|name| all.get(name).copied()).collect();
        let seconds = match simulated {
            true => statistics.iter().flatten().map(|s| s.seconds).sum(),
            false => f64::from(end.milliseconds_since(&start)?) / 1e3,
        };
        let tensor = |b: &Buffer<u8>, dtype| -> Fallible<HostTensor> {
            Ok(HostTensor::from_bytes(dtype, b.download(stream)?))
        };
        Ok(Outcome {
            y: tensor(&self.y, w.spec.dtype)?,
            conv_state: tensor(&self.conv_state, w.spec.dtype)?,
            state: w.key_major(tensor(&self.state, w.state_dtype)?),
            seconds,
            simulated: statistics,
            counted: deltawave_sim::hip::take_counted_launches(),
            times: None,
        })
    }

    pub(super) fn launch(&mut self, stream: &Stream, plan: &Layer, w: &Workload) -> Fallible<()> {
        let (s, dtype, conv) = (&w.spec, w.spec.dtype, w.spec.conv());
        let (channels, heads) = (conv.total_channels(), s.value_heads);
        let row = channels + heads * s.value_dim;
        let rows = self
            .projections
            .tensor_of(dtype, [w.tokens, row], [row, 1], 0)?;
        let ba = (self.ba).tensor_of(dtype, [w.tokens, 2 * heads], [2 * heads, 1], 0)?;
        let [a, b] = Gate::interleaved(&ba, w.groups(), heads)?;
        let (x, z) = match w.layout {
            LayoutArg::Flat => (
                ConvInput::flat(&rows, &conv)?,
                ConvInput::flat_z(&rows, &conv)?,
            ),
            LayoutArg::Interleaved => (
                ConvInput::interleaved(&rows, &conv)?,
                ConvInput::interleaved_z(&rows, &conv)?,
            ),
        };
        let conv_state = [w.sequences(), channels, s.width - 1];
        let [rows_of_state, columns] = match w.state_layout {
            StateLayout::KeyMajor => [s.key_dim, s.value_dim],
            StateLayout::ValueMajor => [s.value_dim, s.key_dim],
        };
        let state = [w.sequences(), heads, rows_of_state, columns];
        let y = [w.tokens, heads, s.value_dim];
        let f32 = Dtype::F32;
        let tensors = LayerTensors {
            x,
            z,
            a,
            b,
            weights: LayerWeights {
                conv: (self.conv_weight).tensor_of(dtype, [channels, s.width], [s.width, 1], 0)?,
                conv_bias: None,
                a_log: self.a_log.tensor_of(f32, [heads], [1], 0)?,
                dt_bias: Some(self.dt_bias.tensor_of(f32, [heads], [1], 0)?),
                norm: Some(self.norm_weight.tensor_of(f32, [s.value_dim], [1], 0)?),
            },
            states: LayerStates {
                conv: (self.conv_state).tensor_of_mut(
                    dtype,
                    conv_state,
                    dense_strides(conv_state),
                    0,
                )?,
                conv_layout: ConvStateLayout::ChannelMajor,
                recurrent: (self.state).tensor_of_mut(
                    w.state_dtype,
                    state,
                    dense_strides(state),
                    0,
                )?,
                recurrent_layout: w.state_layout,
                slots: None,
                has_initial_state: Some((&self.has_initial_state).into()),
            },
            y: self.y.tensor_of_mut(dtype, y, dense_strides(y), 0)?.into(),
        };
        plan.launch(stream, &tensors, Workspace::new(&mut self.workspace))
    }
}

impl Workload {
    /// Key heads whose projections lie together.
    fn groups(&self) -> usize {
        match self.layout {
            LayoutArg::Flat => 1,
            LayoutArg::Interleaved => self.spec.key_heads,
        }
    }

    /// The bytes of rows whose element `i` goes to column `column(i)`.
    fn placed(&self, t: &HostTensor, row: usize, column: impl Fn(usize) -> usize) -> Vec<u8> {
        let size = t.dtype.size();
        let mut out = vec![0; t.bytes.len()];
        let rows = t.bytes.chunks_exact(row * size);
        for (from, to) in rows.zip(out.chunks_exact_mut(row * size)) {
            for (i, element) in from.chunks_exact(size).enumerate() {
                to[column(i) * size..][..size].copy_from_slice(element);
            }
        }
        out
    }

    /// Rows of q, k, v and z.
    fn rows(&self) -> Vec<u8> {
        let s = &self.spec;
        let row = s.conv().total_channels() + s.value_heads * s.value_dim;
        let (heads, dims) = ([s.key_heads, s.value_heads], [s.key_dim, s.value_dim]);
        self.placed(&self.projections, row, |c| {
            self.layout.column(heads, dims, c)
        })
    }

    /// Rows of b and a.
    fn gate_rows(&self) -> Vec<u8> {
        let heads = self.spec.value_heads;
        let each = heads / self.groups();
        let rows = self
            .b
            .values
            .chunks_exact(heads)
            .zip(self.a.values.chunks_exact(heads));
        let flat: Vec<f32> = rows.flat_map(|(b, a)| [b, a].concat()).collect();
        self.placed(&HostTensor::new(self.spec.dtype, flat), 2 * heads, |i| {
            let (of_a, h) = (i / heads, i % heads);
            h / each * 2 * each + of_a * each + h % each
        })
    }

    /// States `[N, HV, K, V]` as they lie on the device.
    fn laid_out(&self, t: &HostTensor) -> HostTensor {
        let (k, v) = (self.spec.key_dim, self.spec.value_dim);
        HostTensor::new(t.dtype, self.state_layout.from_key_major(&t.values, k, v))
    }

    /// The other way.
    fn key_major(&self, t: HostTensor) -> HostTensor {
        let (k, v) = (self.spec.key_dim, self.spec.value_dim);
        HostTensor::new(t.dtype, self.state_layout.to_key_major(&t.values, k, v))
    }
}
