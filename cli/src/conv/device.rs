//! A convolution on the device.

use deltawave::conv::{Conv, ConvInput, ConvState, ConvStateLayout, ConvTensors};
use deltawave::gate::Gate;
use deltawave::prefill::Part;
use deltawave::runtime::{Context, Stream};
use deltawave::tensor::Buffer;
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;

use super::args::RowLayout;
use super::{GateInputs, Workload, columns};
use crate::device::{DeviceTensor, Fallible};
use crate::driver::Launch;

/// The tensors of a convolution.
pub(super) struct Device {
    x: DeviceTensor,
    weight: DeviceTensor,
    bias: Option<DeviceTensor>,
    state: DeviceTensor,
    /// The pool before a run, in its layout.
    before: Vec<u8>,
    has_initial_state: Buffer<u8>,
    out: [DeviceTensor; 3],
    gates: Option<Gates>,
}

/// Inputs of g and beta, and they themselves.
struct Gates {
    ba: DeviceTensor,
    a_log: DeviceTensor,
    dt_bias: DeviceTensor,
    out: [DeviceTensor; 2],
}

/// Results of a convolution.
pub(super) struct Output {
    /// q, k and v.
    pub out: [HostTensor; 3],
    /// `[N, channels, width - 1]`.
    pub state: HostTensor,
    /// g and beta, `[T, HV]`.
    pub gates: Option<[HostTensor; 2]>,
}

impl Launch for Workload<'_> {
    type Plan = Conv;
    type Device = Device;
    type Output = Output;

    fn kernels(plan: &Conv) -> Vec<&'static str> {
        vec![plan.kernel()]
    }

    fn upload(&self, context: &Context, _: &Conv) -> Fallible<Device> {
        let dtype = self.spec.dtype;
        let states = self.sequences() * self.spec.total_channels() * (self.spec.width - 1);
        let before = match &self.state {
            Some(state) => self.reordered(&state.bytes, true),
            None => vec![0xff; states * dtype.size()],
        };
        let out = self.spec.channels();
        let [q, k, v] = out.map(|n| DeviceTensor::empty(context, dtype, self.tokens * n));
        let starts = vec![u8::from(self.state.is_some()); self.sequences()];
        Ok(Device {
            x: DeviceTensor::copy(context, &self.x)?,
            weight: DeviceTensor::copy(context, &self.weight)?,
            bias: DeviceTensor::copy_some(context, self.bias.as_ref())?,
            state: DeviceTensor::empty(context, dtype, states)?,
            before,
            has_initial_state: context.upload(&starts)?,
            out: [q?, k?, v?],
            gates: (self.gates.as_ref())
                .map(|inputs| Gates::new(context, inputs))
                .transpose()?,
        })
    }

    fn reset(&self, device: &mut Device, stream: &Stream) -> Fallible<()> {
        let gates = device.gates.iter_mut().flat_map(|gates| &mut gates.out);
        for out in device.out.iter_mut().chain(gates) {
            out.poison(stream)?;
        }
        stream.synchronize()?;
        device.state.buffer.write(&device.before)
    }

    fn launch(&self, device: &mut Device, stream: &Stream, plan: &Conv, _: Part) -> Fallible<()> {
        let s = &self.spec;
        let (channels, columns) = (s.total_channels(), columns(s));
        let x = device.x.view([self.tokens, columns])?;
        let states = match self.args.state_layout {
            ConvStateLayout::ChannelMajor => [self.sequences(), channels, s.width - 1],
            ConvStateLayout::TokenMajor => [self.sequences(), s.width - 1, channels],
        };
        let keys = [self.tokens, s.heads.key, s.heads.key_dim];
        let [q, k, v] = &mut device.out;
        let tensors = ConvTensors {
            cu_seqlens: None,
            x: match self.args.layout {
                RowLayout::Flat => ConvInput::flat(&x, s)?,
                RowLayout::Interleaved => ConvInput::interleaved(&x, s)?,
            },
            weight: device.weight.view([channels, s.width])?,
            bias: (device.bias.as_ref())
                .map(|bias| bias.view([channels]))
                .transpose()?,
            state: Some(ConvState {
                tensor: device.state.view_mut(states)?,
                layout: self.args.state_layout,
                has_initial_state: Some((&device.has_initial_state).into()),
            }),
            slots: None,
            q: q.view_mut(keys)?.into(),
            k: k.view_mut(keys)?.into(),
            v: (v.view_mut([self.tokens, s.heads.value, s.heads.value_dim])?).into(),
            gates: match &mut device.gates {
                Some(gates) => Some(gates.view(self)?),
                None => None,
            },
        };
        plan.launch(stream, &tensors)
    }

    fn read(&self, device: &Device, stream: &Stream) -> Fallible<Output> {
        let [q, k, v] = &device.out;
        let states = self.reordered(&device.state.buffer.download(stream)?, false);
        Ok(Output {
            out: [q.read(stream)?, k.read(stream)?, v.read(stream)?],
            state: HostTensor::from_bytes(self.spec.dtype, states),
            gates: match &device.gates {
                Some(Gates { out: [g, beta], .. }) => Some([g.read(stream)?, beta.read(stream)?]),
                None => None,
            },
        })
    }

    fn results(output: &Output) -> Vec<&HostTensor> {
        let gates = output.gates.iter().flatten();
        output
            .out
            .iter()
            .chain([&output.state])
            .chain(gates)
            .collect()
    }
}

impl Gates {
    fn new(context: &Context, inputs: &GateInputs) -> Fallible<Self> {
        let elements = inputs.ba.values.len() / 2;
        let out = || DeviceTensor::empty(context, Dtype::F32, elements);
        Ok(Gates {
            ba: DeviceTensor::copy(context, &inputs.ba)?,
            a_log: DeviceTensor::copy(context, &inputs.a_log)?,
            dt_bias: DeviceTensor::copy(context, &inputs.dt_bias)?,
            out: [out()?, out()?],
        })
    }

    fn view(&mut self, w: &Workload) -> Fallible<Gate<'_>> {
        let heads = w.spec.heads.value;
        let ba = self.ba.view([w.tokens, 2 * heads])?;
        let [a, b] = Gate::interleaved(&ba, w.args.layout.groups(w.spec.heads.key), heads)?;
        let [g, beta] = &mut self.out;
        Ok(Gate {
            a,
            b,
            a_log: self.a_log.view([heads])?,
            dt_bias: Some(self.dt_bias.view([heads])?),
            allow_neg_eigval: false,
            g: g.view_mut([w.tokens, heads])?.into(),
            beta: beta.view_mut([w.tokens, heads])?.into(),
        })
    }
}

impl Workload<'_> {
    /// Bytes of states `[N, channels, width - 1]` in the layout of the pool, or the other way.
    pub(super) fn reordered(&self, bytes: &[u8], to_pool: bool) -> Vec<u8> {
        let (channels, columns) = (self.spec.total_channels(), self.spec.width - 1);
        if self.args.state_layout == ConvStateLayout::ChannelMajor {
            return bytes.to_vec();
        }
        let (rows, size) = (if to_pool { columns } else { channels }, channels * columns);
        let from =
            |i: usize| i / size * size + i % size % (size / rows) * rows + i % size / (size / rows);
        let elements = (0..bytes.len() / 2).map(from);
        elements
            .flat_map(|i| [bytes[2 * i], bytes[2 * i + 1]])
            .collect()
    }
}
