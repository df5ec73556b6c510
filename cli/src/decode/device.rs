//! A decode on the device.

use deltawave::decode::{Decode, DecodeTensors};
use deltawave::gates::Gating;
use deltawave::prefill::Part;
use deltawave::runtime::{Context, Stream};
use deltawave::state::StatePool;
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;

use super::Workload;
use crate::device::{DeviceTensor, Fallible};
use crate::driver::Launch;

/// The tensors of a decode.
pub(super) struct Device {
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    /// g or a, beta or b.
    gates: [DeviceTensor; 2],
    /// `A_log` and `dt_bias` of raw gates.
    per_head: Option<[DeviceTensor; 2]>,
    pool: DeviceTensor,
    /// The pool before a run.
    before: Vec<u8>,
    /// The states after every token, where they are verified.
    states: Option<DeviceTensor>,
    o: DeviceTensor,
}

/// Results of a decode.
pub(super) struct Output {
    /// `[B T, HV, V]`.
    pub o: HostTensor,
    /// `[B, HV, K, V]`, after the last token.
    pub state: HostTensor,
}

impl Launch for Workload<'_> {
    type Plan = Decode;
    type Device = Device;
    type Output = Output;

    fn kernels(plan: &Decode) -> Vec<&'static str> {
        vec![plan.kernel()]
    }

    fn upload(&self, context: &Context, _: &Decode) -> Fallible<Device> {
        let (s, inputs) = (&self.spec, &self.inputs);
        let copy = |t: &HostTensor| DeviceTensor::copy(context, t);
        let f32s = |x: &[f32]| copy(&HostTensor::new(Dtype::F32, x.to_vec()));
        let (gates, per_head) = match &self.gate_inputs {
            Some(raw) => (
                [copy(&raw.a)?, copy(&raw.b)?],
                Some([f32s(&raw.a_log)?, f32s(&raw.dt_bias)?]),
            ),
            None => ([f32s(&inputs.g)?, f32s(&inputs.beta)?], None),
        };
        let dtype = self.args.state.state_dtype;
        let state = self.states(1).laid_out(&self.state, dtype);
        let each = self.state.values.len();
        let states = || DeviceTensor::empty(context, dtype, self.rows() * each);
        Ok(Device {
            q: copy(&inputs.q)?,
            k: copy(&inputs.k)?,
            v: copy(&inputs.v)?,
            gates,
            per_head,
            pool: DeviceTensor::empty(context, dtype, self.batch * each)?,
            before: state.bytes.repeat(self.batch),
            states: self.args.verify.then(states).transpose()?,
            o: DeviceTensor::empty(context, s.dtype, inputs.v.values.len())?,
        })
    }

    fn reset(&self, device: &mut Device, stream: &Stream) -> Fallible<()> {
        device.o.poison(stream)?;
        if let Some(states) = &mut device.states {
            states.poison(stream)?;
        }
        stream.synchronize()?;
        device.pool.buffer.write(&device.before)
    }

    fn launch(&self, device: &mut Device, stream: &Stream, plan: &Decode, _: Part) -> Fallible<()> {
        let (s, rows, heads) = (&self.spec, self.rows(), self.spec.heads.value);
        let keys = [rows, s.heads.key, s.heads.key_dim];
        let values = [rows, heads, s.heads.value_dim];
        let pool = self.states(self.batch).shape();
        let [batch, hv, a, b] = pool;
        let [g, beta] = &device.gates;
        let (g, beta) = (g.view([rows, heads])?, beta.view([rows, heads])?);
        let tensors = DecodeTensors {
            q: device.q.view(keys)?.into(),
            k: device.k.view(keys)?.into(),
            v: device.v.view(values)?.into(),
            gating: match &device.per_head {
                Some([a_log, dt_bias]) => Gating::Raw {
                    a: g.into(),
                    b: beta.into(),
                    a_log: a_log.view([heads])?,
                    dt_bias: Some(dt_bias.view([heads])?),
                    allow_neg_eigval: self.args.neg_eigval,
                },
                None => Gating::Given {
                    g: Some(g.into()),
                    beta: Some(beta.into()),
                },
            },
            pool: StatePool {
                tensor: device.pool.view_mut(pool)?,
                layout: self.args.state.state_layout,
                slots: None,
                write_slots: None,
            },
            has_initial_state: None,
            states: (device.states.as_mut())
                .map(|states| states.view_mut([batch, s.tokens, hv, a, b]))
                .transpose()?,
            o: device.o.view_mut(values)?.into(),
        };
        plan.launch(stream, &tensors)
    }

    fn read(&self, device: &Device, stream: &Stream) -> Fallible<Output> {
        let states = match &device.states {
            Some(states) => {
                let all = states.read(stream)?;
                // The state after the last token of each sequence.
                let each = all.bytes.len() / self.rows().max(1);
                let sequences = all.bytes.chunks_exact(self.spec.tokens * each);
                let last = sequences.flat_map(|s| &s[s.len() - each..]);
                HostTensor::from_bytes(all.dtype, last.copied().collect())
            }
            None => device.pool.read(stream)?,
        };
        Ok(Output {
            o: device.o.read(stream)?,
            state: self.states(self.batch).key_major(&states),
        })
    }

    fn results(output: &Output) -> Vec<&HostTensor> {
        vec![&output.o, &output.state]
    }
}
