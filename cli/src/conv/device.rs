//! A convolution on the device.

use deltawave::conv::{Conv, ConvInput, ConvState, ConvStateLayout, ConvTensors};
use deltawave::gate::Gate;
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::tensor::{Buffer, dense_strides};
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;

use super::args::LayoutArg;
use super::{GateInputs, Outcome, Workload, columns};

type Fallible<T> = deltawave::Result<T>;

/// The workload on the device.
pub(super) struct Device {
    x: Buffer<u8>,
    weight: Buffer<u8>,
    bias: Option<Buffer<u8>>,
    state: Buffer<u8>,
    /// The pool before a run, in its layout.
    before: Vec<u8>,
    has_initial_state: Buffer<u8>,
    out: [Buffer<u8>; 3],
    gates: Option<Gates>,
}

/// What g and beta are made of, and they themselves.
struct Gates {
    ba: Buffer<u8>,
    a_log: Buffer<u8>,
    dt_bias: Buffer<u8>,
    out: [Buffer<f32>; 2],
}

impl Device {
    pub(super) fn new(context: &Context, w: &Workload) -> Fallible<Self> {
        let (size, rows) = (w.spec.dtype.size(), w.tokens);
        let states = w.sequences() * w.spec.total_channels() * (w.spec.width - 1);
        let before = match &w.state {
            Some(state) => w.reordered(&state.bytes, true),
            None => vec![0xff; states * size],
        };
        let [q, k, v] = w
            .spec
            .channels()
            .map(|n| context.alloc::<u8>(rows * n * size));
        Ok(Device {
            x: context.upload(&w.x.bytes)?,
            weight: context.upload(&w.weight.bytes)?,
            bias: (w.bias.as_ref())
                .map(|b| context.upload(&b.bytes))
                .transpose()?,
            state: context.alloc(before.len())?,
            before,
            has_initial_state: context.upload(&vec![u8::from(w.state.is_some()); w.sequences()])?,
            out: [q?, k?, v?],
            gates: (w.gates.as_ref())
                .map(|inputs| Gates::new(context, inputs))
                .transpose()?,
        })
    }

    pub(super) fn run(&mut self, stream: &Stream, plan: &Conv, w: &Workload) -> Fallible<Outcome> {
        for out in &mut self.out {
            out.fill_bytes(0xff, stream)?;
        }
        for out in self.gates.iter_mut().flat_map(|gates| &mut gates.out) {
            out.fill_bytes(0xff, stream)?;
        }
        stream.synchronize()?;
        self.state.write(&self.before)?;
        let simulated = stream.context().backend() == Backend::Simulator;
        deltawave_sim::hip::reset_statistics();
        deltawave_sim::hip::take_counted_launches();
        let start = stream.record()?;
        self.launch(stream, plan, w)?;
        let end = stream.record()?;
        end.synchronize()?;
        let statistics = deltawave_sim::hip::statistics();
        let statistics = statistics.get(plan.kernel()).copied().unwrap_or_default();
        let seconds = match simulated {
            true => statistics.seconds,
            false => f64::from(end.milliseconds_since(&start)?) / 1e3,
        };
        let tensor = |b: &Buffer<u8>| -> Fallible<HostTensor> {
            Ok(HostTensor::from_bytes(w.spec.dtype, b.download(stream)?))
        };
        let [q, k, v] = &self.out;
        let states = w.reordered(&self.state.download(stream)?, false);
        Ok(Outcome {
            out: [tensor(q)?, tensor(k)?, tensor(v)?],
            state: HostTensor::from_bytes(w.spec.dtype, states),
            gates: match &self.gates {
                Some(Gates { out: [g, beta], .. }) => {
                    Some([g.download(stream)?, beta.download(stream)?])
                }
                None => None,
            },
            seconds,
            simulated: simulated.then_some(statistics),
            counted: deltawave_sim::hip::take_counted_launches().pop(),
            times: None,
        })
    }

    pub(super) fn launch(&mut self, stream: &Stream, plan: &Conv, w: &Workload) -> Fallible<()> {
        let (s, dtype) = (&w.spec, w.spec.dtype);
        let (channels, columns) = (s.total_channels(), columns(s));
        let x = self
            .x
            .tensor_of(dtype, [w.tokens, columns], [columns, 1], 0)?;
        let shape = match w.state_layout {
            ConvStateLayout::ChannelMajor => [w.sequences(), channels, s.width - 1],
            ConvStateLayout::TokenMajor => [w.sequences(), s.width - 1, channels],
        };
        let keys = [w.tokens, s.key_heads, s.key_dim];
        let values = [w.tokens, s.value_heads, s.value_dim];
        let [q, k, v] = &mut self.out;
        let bias = self.bias.as_ref();
        let tensors = ConvTensors {
            x: match w.layout {
                LayoutArg::Flat => ConvInput::flat(&x, s)?,
                LayoutArg::Interleaved => ConvInput::interleaved(&x, s)?,
            },
            weight: self
                .weight
                .tensor_of(dtype, [channels, s.width], [s.width, 1], 0)?,
            bias: bias
                .map(|b| b.tensor_of(dtype, [channels], [1], 0))
                .transpose()?,
            state: Some(ConvState {
                tensor: self
                    .state
                    .tensor_of_mut(dtype, shape, dense_strides(shape), 0)?,
                layout: w.state_layout,
                has_initial_state: Some((&self.has_initial_state).into()),
            }),
            slots: None,
            q: q.tensor_of_mut(dtype, keys, dense_strides(keys), 0)?.into(),
            k: k.tensor_of_mut(dtype, keys, dense_strides(keys), 0)?.into(),
            v: v.tensor_of_mut(dtype, values, dense_strides(values), 0)?
                .into(),
            gates: match &mut self.gates {
                Some(gates) => Some(gates.view(w)?),
                None => None,
            },
        };
        plan.launch(stream, &tensors)
    }
}

impl Gates {
    fn new(context: &Context, inputs: &GateInputs) -> Fallible<Self> {
        let elements = inputs.ba.values.len() / 2;
        Ok(Gates {
            ba: context.upload(&inputs.ba.bytes)?,
            a_log: context.upload(&inputs.a_log.bytes)?,
            dt_bias: context.upload(&inputs.dt_bias.bytes)?,
            out: [context.alloc(elements)?, context.alloc(elements)?],
        })
    }

    fn view(&mut self, w: &Workload) -> Fallible<Gate<'_>> {
        let heads = w.spec.value_heads;
        let row = 2 * heads;
        let ba = (self.ba).tensor_of(w.spec.dtype, [w.tokens, row], [row, 1], 0)?;
        let [a, b] = Gate::interleaved(&ba, w.gate_groups(), heads)?;
        let [g, beta] = &mut self.out;
        Ok(Gate {
            a,
            b,
            a_log: self.a_log.tensor_of(Dtype::F32, [heads], [1], 0)?,
            dt_bias: Some(self.dt_bias.tensor_of(Dtype::F32, [heads], [1], 0)?),
            allow_neg_eigval: false,
            g: g.tensor_mut([w.tokens, heads])?.into(),
            beta: beta.tensor_mut([w.tokens, heads])?.into(),
        })
    }
}
