//! A layer on the device.

use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::gate::Gate;
use deltawave::layer::{Layer, LayerStates, LayerTensors, LayerWeights};
use deltawave::prefill::Part;
use deltawave::runtime::{Context, Stream};
use deltawave::tensor::Buffer;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::Tensor as HostTensor;

use super::Workload;
use crate::conv::args::RowLayout;
use crate::device::{DeviceTensor, Fallible};
use crate::driver::Launch;

/// The tensors of a layer.
pub(super) struct Device {
    projections: DeviceTensor,
    /// Rows `b | a`, for each group of heads.
    ba: DeviceTensor,
    conv_weight: DeviceTensor,
    a_log: DeviceTensor,
    dt_bias: DeviceTensor,
    norm_weight: DeviceTensor,
    conv_state: DeviceTensor,
    state: DeviceTensor,
    /// Both before a run.
    before: [Vec<u8>; 2],
    has_initial_state: Buffer<u8>,
    y: DeviceTensor,
    workspace: Buffer<u8>,
}

/// Results of a layer.
pub(super) struct Output {
    /// `[T, HV, V]`.
    pub y: HostTensor,
    /// `[N, channels, width - 1]`.
    pub conv_state: HostTensor,
    /// `[N, HV, K, V]`.
    pub state: HostTensor,
}

impl Launch for Workload<'_> {
    type Plan = Layer;
    type Device = Device;
    type Output = Output;

    fn kernels(plan: &Layer) -> Vec<&'static str> {
        plan.kernels()
    }

    fn upload(&self, context: &Context, plan: &Layer) -> Fallible<Device> {
        let (s, states) = (&self.spec, self.states());
        let conv_states = self.sequences() * s.conv().total_channels() * (s.width - 1);
        let state_dtype = self.args.state.state_dtype;
        let conv_state = DeviceTensor::empty(context, s.dtype, conv_states)?;
        let state = DeviceTensor::empty(context, state_dtype, states.count * states.each())?;
        let before = match &self.states {
            Some([conv, state]) => [
                conv.bytes.clone(),
                states.laid_out(state, state_dtype).bytes,
            ],
            None => [&conv_state, &state].map(|t| vec![0xff; t.buffer.len()]),
        };
        let copy = |t: &HostTensor| DeviceTensor::copy(context, t);
        let starts = vec![u8::from(self.states.is_some()); self.sequences()];
        let outputs = self.tokens * s.heads.value * s.heads.value_dim;
        Ok(Device {
            projections: copy(&self.rows())?,
            ba: copy(&self.gate_rows())?,
            conv_weight: copy(&self.conv_weight)?,
            a_log: copy(&self.a_log)?,
            dt_bias: copy(&self.dt_bias)?,
            norm_weight: copy(&self.norm_weight)?,
            conv_state,
            state,
            before,
            has_initial_state: context.upload(&starts)?,
            y: DeviceTensor::empty(context, s.dtype, outputs)?,
            workspace: context.alloc(plan.workspace_bytes())?,
        })
    }

    fn reset(&self, device: &mut Device, stream: &Stream) -> Fallible<()> {
        device.workspace.fill_bytes(0xff, stream)?;
        device.y.poison(stream)?;
        stream.synchronize()?;
        device.conv_state.buffer.write(&device.before[0])?;
        device.state.buffer.write(&device.before[1])
    }

    fn launch(&self, device: &mut Device, stream: &Stream, plan: &Layer, _: Part) -> Fallible<()> {
        let (s, conv) = (&self.spec, self.spec.conv());
        let (channels, heads) = (conv.total_channels(), s.heads.value);
        let row = channels + heads * s.heads.value_dim;
        let rows = device.projections.view([self.tokens, row])?;
        let ba = device.ba.view([self.tokens, 2 * heads])?;
        let [a, b] = Gate::interleaved(&ba, self.args.layout.groups(s.heads.key), heads)?;
        let (x, z) = match self.args.layout {
            RowLayout::Flat => (
                ConvInput::flat(&rows, &conv)?,
                ConvInput::flat_z(&rows, &conv)?,
            ),
            RowLayout::Interleaved => (
                ConvInput::interleaved(&rows, &conv)?,
                ConvInput::interleaved_z(&rows, &conv)?,
            ),
        };
        let conv_states = [self.sequences(), channels, s.width - 1];
        let tensors = LayerTensors {
            cu_seqlens: None,
            x,
            z,
            a,
            b,
            weights: LayerWeights {
                conv: device.conv_weight.view([channels, s.width])?,
                conv_bias: None,
                a_log: device.a_log.view([heads])?,
                dt_bias: Some(device.dt_bias.view([heads])?),
                norm: Some(device.norm_weight.view([s.heads.value_dim])?),
            },
            states: LayerStates {
                conv: device.conv_state.view_mut(conv_states)?,
                conv_layout: ConvStateLayout::ChannelMajor,
                recurrent: device.state.view_mut(self.states().shape())?,
                recurrent_layout: self.args.state.state_layout,
                slots: None,
                has_initial_state: Some((&device.has_initial_state).into()),
            },
            y: (device.y.view_mut([self.tokens, heads, s.heads.value_dim])?).into(),
        };
        plan.launch(stream, &tensors, Workspace::new(&mut device.workspace))
    }

    fn read(&self, device: &Device, stream: &Stream) -> Fallible<Output> {
        Ok(Output {
            y: device.y.read(stream)?,
            conv_state: device.conv_state.read(stream)?,
            state: self.states().key_major(&device.state.read(stream)?),
        })
    }

    fn results(output: &Output) -> Vec<&HostTensor> {
        vec![&output.y, &output.conv_state, &output.state]
    }
}

impl Workload<'_> {
    /// Rows of q, k, v and z as they lie on the device.
    fn rows(&self) -> HostTensor {
        let s = &self.spec;
        let row = s.conv().total_channels() + s.heads.value * s.heads.value_dim;
        let (heads, dims) = (
            [s.heads.key, s.heads.value],
            [s.heads.key_dim, s.heads.value_dim],
        );
        let column = |c| self.args.layout.column(heads, dims, c);
        placed(&self.projections, row, column)
    }

    /// Rows of b and a as they lie on the device.
    fn gate_rows(&self) -> HostTensor {
        let heads = self.spec.heads.value;
        let each = heads / self.args.layout.groups(self.spec.heads.key);
        let b = self.b.values.chunks_exact(heads);
        let rows = b.zip(self.a.values.chunks_exact(heads));
        let flat: Vec<f32> = rows.flat_map(|(b, a)| [b, a].concat()).collect();
        let column = |i: usize| {
            let (of_a, h) = (i / heads, i % heads);
            h / each * 2 * each + of_a * each + h % each
        };
        placed(&HostTensor::new(self.spec.dtype, flat), 2 * heads, column)
    }
}

/// Rows of so many elements, of which `i` goes to column `column(i)`.
fn placed(t: &HostTensor, row: usize, column: impl Fn(usize) -> usize) -> HostTensor {
    let mut out = vec![0.0; t.values.len()];
    for (from, to) in t.values.chunks_exact(row).zip(out.chunks_exact_mut(row)) {
        for (i, element) in from.iter().enumerate() {
            to[column(i)] = *element;
        }
    }
    HostTensor::new(t.dtype, out)
}
