//! A prefill on the device.

use deltawave::gates::Gating;
use deltawave::prefill::{Part, Prefill, PrefillTensors, Snapshots};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::state::{InitialState, State, StateMut, StatePool, States};
use deltawave::tensor::{Buffer, TokenScalars, Tokens, TokensMut};
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::oracle::gates;
use deltawave_lab::safetensors_io::{FileBeta, FileGate};

use super::Workload;
use super::states::{Others, Resumed};
use crate::device::{DeviceTensor, Fallible};
use crate::driver::Launch;

/// The tensors of a prefill.
pub(super) struct Device {
    q: DeviceTensor,
    k: DeviceTensor,
    v: DeviceTensor,
    gating: DeviceGating,
    initial: Option<DeviceTensor>,
    o: DeviceTensor,
    /// The final states, or the pool.
    states: DeviceTensor,
    /// The pool before a run: initial states in their slots, NaN elsewhere.
    before: Option<Vec<u8>>,
    snapshots: Option<DeviceTensor>,
    /// One byte per sequence, for pools.
    has_initial_state: Buffer<u8>,
    workspace: Buffer<u8>,
}

enum DeviceGating {
    Given {
        g: Option<DeviceTensor>,
        beta: Option<DeviceTensor>,
    },
    Raw {
        a: DeviceTensor,
        b: DeviceTensor,
        a_log: DeviceTensor,
        dt_bias: Option<DeviceTensor>,
    },
}

/// Results of a prefill.
pub(super) struct Output {
    /// `[T, HV, V]`.
    pub o: HostTensor,
    /// `[N, HV, K, V]`.
    pub final_state: HostTensor,
    /// Slots without a sequence, if the states are in a pool.
    pub others: Option<Others>,
    /// States in the course of sequences, `[snapshots, HV, K, V]`.
    pub snapshots: Option<HostTensor>,
    /// Sequences that were continued from their last snapshot.
    pub resumed: Option<Resumed>,
    pub workspace_bytes: usize,
    /// Whether the simulator computed this.
    pub simulated: bool,
}

impl Launch for Workload<'_> {
    type Plan = Prefill;
    type Device = Device;
    type Output = Output;

    fn kernels(plan: &Prefill) -> Vec<&'static str> {
        plan.kernels()
    }

    fn upload(&self, context: &Context, plan: &Prefill) -> Fallible<Device> {
        let (d, dtype) = (&self.data, self.args.state.state_dtype);
        let copy = |t: &HostTensor| DeviceTensor::copy(context, t);
        let empty = |dtype, elements| DeviceTensor::empty(context, dtype, elements);
        let states = self.states(self.pool.unwrap_or(self.sequences()));
        let initial = (d.initial_state.as_ref()).map(|t| states.laid_out(t, t.dtype));
        let starts = vec![u8::from(initial.is_some()); self.sequences()];
        let snapshots = self.snapshots.as_ref();
        Ok(Device {
            q: copy(&d.q)?,
            k: copy(&d.k)?,
            v: copy(&d.v)?,
            gating: self.upload_gating(context)?,
            initial: DeviceTensor::copy_some(context, initial.as_ref())?,
            o: empty(self.spec.dtype, d.tokens * d.value_heads * d.value_dim)?,
            states: empty(dtype, states.count * states.each())?,
            before: self.pool.map(|_| self.pool_before(initial.as_ref())),
            snapshots: snapshots
                .map(|all| empty(Dtype::F32, all.len() * states.each()))
                .transpose()?,
            has_initial_state: context.upload(&starts)?,
            workspace: context.alloc(plan.workspace_bytes())?,
        })
    }

    fn reset(&self, device: &mut Device, stream: &Stream) -> Fallible<()> {
        let outputs = [&mut device.o, &mut device.states];
        for out in outputs.into_iter().chain(&mut device.snapshots) {
            out.poison(stream)?;
        }
        device.workspace.fill_bytes(0xff, stream)?;
        stream.synchronize()?;
        match &device.before {
            Some(before) => device.states.buffer.write(before),
            None => Ok(()),
        }
    }

    fn launch(
        &self,
        device: &mut Device,
        stream: &Stream,
        plan: &Prefill,
        part: Part,
    ) -> Fallible<()> {
        let (d, layout) = (&self.data, self.args.state.state_layout);
        let keys = [d.key_heads, d.key_dim];
        let values = [d.value_heads, d.value_dim];
        let shape = self.states(self.sequences()).shape();
        let states = match self.pool {
            Some(slots) => States::Pool {
                pool: StatePool {
                    tensor: device.states.view_mut(self.states(slots).shape())?,
                    layout,
                    slots: None,
                    write_slots: None,
                },
                has_initial_state: Some((&device.has_initial_state).into()),
            },
            None => States::Separate {
                initial: match &device.initial {
                    Some(t) => Some(InitialState {
                        state: State {
                            tensor: t.view(shape)?,
                            layout,
                        },
                        has_initial_state: None,
                    }),
                    None => None,
                },
                last: Some(StateMut {
                    tensor: device.states.view_mut(shape)?,
                    layout,
                }),
            },
        };
        let tensors = PrefillTensors {
            cu_seqlens: None,
            q: self.tokens(&device.q, keys)?,
            k: self.tokens(&device.k, keys)?,
            v: self.tokens(&device.v, values)?,
            gating: self.gating(&device.gating)?,
            states,
            o: self.tokens_mut(&mut device.o, values)?,
            snapshots: match (&mut device.snapshots, &self.snapshots) {
                (Some(t), Some(all)) => Some(Snapshots {
                    to: Some(StateMut {
                        tensor: t.view_mut(self.states(all.len()).shape())?,
                        layout,
                    }),
                    slots: None,
                }),
                _ => None,
            },
        };
        let workspace = Workspace::new(&mut device.workspace);
        plan.launch_part(stream, &tensors, workspace, part)
    }

    fn read(&self, device: &Device, stream: &Stream) -> Fallible<Output> {
        let key_major = |t: &HostTensor| self.states(0).key_major(t);
        let states = device.states.read(stream)?;
        let (final_state, others) = match &device.before {
            Some(before) => self.of_pool(&states, before),
            None => (states, None),
        };
        Ok(Output {
            o: device.o.read(stream)?,
            final_state: key_major(&final_state),
            others,
            snapshots: match &device.snapshots {
                Some(t) => Some(key_major(&t.read(stream)?)),
                None => None,
            },
            resumed: None,
            workspace_bytes: device.workspace.len(),
            simulated: stream.context().backend() == Backend::Simulator,
        })
    }

    fn results(output: &Output) -> Vec<&HostTensor> {
        let results = [&output.o, &output.final_state];
        results.into_iter().chain(&output.snapshots).collect()
    }
}

impl Workload<'_> {
    /// The kernels take both gates raw or neither: a raw one beside one that is not becomes f32 here.
    fn upload_gating(&self, context: &Context) -> Fallible<DeviceGating> {
        let copy = |t: &HostTensor| DeviceTensor::copy(context, t);
        let narrowed = |x: &[f64]| {
            let values = x.iter().map(|&x| x as f32).collect();
            copy(&HostTensor::new(Dtype::F32, values)).map(Some)
        };
        let (gate, beta) = (&self.data.gate, &self.data.beta);
        if let (FileGate::Raw { a, a_log, dt_bias }, FileBeta::Logits(b)) = (gate, beta) {
            return Ok(DeviceGating::Raw {
                a: copy(a)?,
                b: copy(b)?,
                a_log: copy(a_log)?,
                dt_bias: DeviceTensor::copy_some(context, dt_bias.as_ref())?,
            });
        }
        Ok(DeviceGating::Given {
            g: match gate {
                FileGate::None => None,
                FileGate::Log(g) => Some(copy(g)?),
                FileGate::Raw { .. } => narrowed(&self.problem().log_gates())?,
            },
            beta: match beta {
                FileBeta::One => None,
                FileBeta::Given(beta) => Some(copy(beta)?),
                FileBeta::Logits(b) => {
                    let beta = |&b: &f32| gates::beta(f64::from(b), self.neg_eigval);
                    narrowed(&b.values.iter().map(beta).collect::<Vec<_>>())?
                }
            },
        })
    }

    fn gating<'a>(&self, gating: &'a DeviceGating) -> Fallible<Gating<'a>> {
        let heads = self.data.value_heads;
        let scalars = |t: &'a DeviceTensor| self.scalars(t);
        Ok(match gating {
            DeviceGating::Given { g, beta } => Gating::Given {
                g: g.as_ref().map(scalars).transpose()?,
                beta: beta.as_ref().map(scalars).transpose()?,
            },
            DeviceGating::Raw {
                a,
                b,
                a_log,
                dt_bias,
            } => Gating::Raw {
                a: scalars(a)?,
                b: scalars(b)?,
                a_log: a_log.view([heads])?,
                dt_bias: (dt_bias.as_ref()).map(|t| t.view([heads])).transpose()?,
                allow_neg_eigval: self.neg_eigval,
            },
        })
    }

    fn tokens<'a>(&self, t: &'a DeviceTensor, [h, d]: [usize; 2]) -> Fallible<Tokens<'a>> {
        Ok(match self.dense {
            Some([b, len]) => t.view([b, len, h, d])?.into(),
            None => t.view([self.data.tokens, h, d])?.into(),
        })
    }

    fn tokens_mut<'a>(
        &self,
        t: &'a mut DeviceTensor,
        [h, d]: [usize; 2],
    ) -> Fallible<TokensMut<'a>> {
        Ok(match self.dense {
            Some([b, len]) => t.view_mut([b, len, h, d])?.into(),
            None => t.view_mut([self.data.tokens, h, d])?.into(),
        })
    }

    fn scalars<'a>(&self, t: &'a DeviceTensor) -> Fallible<TokenScalars<'a>> {
        let heads = self.data.value_heads;
        Ok(match self.dense {
            Some([b, len]) => t.view([b, len, heads])?.into(),
            None => t.view([self.data.tokens, heads])?.into(),
        })
    }
}
