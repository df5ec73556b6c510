//! A prefill on the device.

use deltawave::inputs::Tensor as HostTensor;
use deltawave::oracle::gates;
use deltawave::prefill::{Gating, Part, Prefill, PrefillTensors, State, StateMut, Workspace};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::safetensors_io::{FileBeta, FileGate};
use deltawave::tensor::{Buffer, Tensor, TokenScalars, Tokens, TokensMut, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave_sim::hip::KernelStatistics;

use crate::failure::Failure;
use crate::time::{self, Times};
use crate::workload::Workload;

/// What the device computed, and how long it took.
pub struct Outcome {
    /// `[T, HV, V]`.
    pub o: HostTensor,
    /// `[N, HV, K, V]`.
    pub final_state: HostTensor,
    /// Bytes of workspace.
    pub workspace_bytes: usize,
    /// Seconds of the kernels in the fastest run: of this host on the simulator, else between events of the device.
    pub seconds: f64,
    /// The kernels of the fastest run, in order.
    pub kernels: Vec<Launched>,
    /// Times of replays, where they were asked for.
    pub times: Option<Times>,
}

/// One kernel of a run.
pub struct Launched {
    /// Its name.
    pub name: &'static str,
    /// Launches.
    pub launches: u64,
    /// What the simulator counted.
    pub simulated: Option<KernelStatistics>,
}

/// How the final state lies in memory.
#[derive(Clone, Copy)]
pub struct StateFormat {
    /// The order of its dimensions; also that of the initial state.
    pub layout: StateLayout,
    /// Its element type.
    pub dtype: Dtype,
}

/// Runs a planned prefill `repeat` times, and measures `replays` more, if any. Everything that the kernels write is NaN
/// before each run.
pub fn run(
    context: &Context,
    plan: &Prefill,
    workload: &Workload,
    state: StateFormat,
    repeat: u32,
    replays: Option<u32>,
) -> Result<Outcome, Failure> {
    let upload = Failure::during("the tensors cannot be brought to the device");
    let failed = Failure::during("the prefill failed");
    let mut device = Device::new(context, plan, workload, state).map_err(&upload)?;
    let stream = context.stream().map_err(&upload)?;
    let mut best: Option<Outcome> = None;
    for n in 1..=repeat {
        let (seconds, kernels) = device.measure(&stream, plan, workload).map_err(&failed)?;
        let (o, final_state) = device.read(&stream, workload).map_err(&failed)?;
        match &mut best {
            None => {
                best = Some(Outcome {
                    o,
                    final_state,
                    workspace_bytes: plan.workspace_bytes(),
                    seconds,
                    kernels,
                    times: None,
                });
            }
            Some(best) => {
                if best.o.bytes != o.bytes || best.final_state.bytes != final_state.bytes {
                    return Err(Failure::Unsteady { run: n });
                }
                if seconds < best.seconds {
                    (best.seconds, best.kernels) = (seconds, kernels);
                }
            }
        }
    }
    let mut best = best.expect("there is at least one run");
    if let Some(replays) = replays {
        let parts: Vec<_> = (plan.parts().into_iter().map(|part| (part.name(), part))).collect();
        let launch = |stream: &Stream, part| device.launch(stream, plan, workload, part);
        let times = time::measure(context, replays, &parts, launch);
        best.times = Some(times.map_err(failed)?);
    }
    Ok(best)
}

/// A host tensor's copy on the device.
struct Copied {
    buffer: Buffer<u8>,
    dtype: Dtype,
}

enum DeviceGating {
    Given {
        g: Option<Copied>,
        beta: Option<Copied>,
    },
    Raw {
        a: Copied,
        b: Copied,
        a_log: Copied,
        dt_bias: Option<Copied>,
    },
}

struct Device {
    q: Copied,
    k: Copied,
    v: Copied,
    gating: DeviceGating,
    initial: Option<Copied>,
    o: Copied,
    last: Copied,
    format: StateFormat,
    workspace: Buffer<u8>,
}

type Fallible<T> = deltawave::Result<T>;

impl Device {
    fn new(context: &Context, plan: &Prefill, w: &Workload, format: StateFormat) -> Fallible<Self> {
        let copy = |t: &HostTensor| -> Fallible<Copied> {
            Ok(Copied {
                buffer: context.upload(&t.bytes)?,
                dtype: t.dtype,
            })
        };
        let empty = |dtype: Dtype, elements: usize| -> Fallible<Copied> {
            Ok(Copied {
                buffer: context.alloc(elements * dtype.size())?,
                dtype,
            })
        };
        let d = &w.data;
        let gating = match (&d.gate, &d.beta) {
            (FileGate::Raw { a, a_log, dt_bias }, FileBeta::Logits(b)) => DeviceGating::Raw {
                a: copy(a)?,
                b: copy(b)?,
                a_log: copy(a_log)?,
                dt_bias: dt_bias.as_ref().map(copy).transpose()?,
            },
            // The kernels take both gates raw or both as they are: what is raw beside one that is not becomes f32 here.
            (gate, beta) => DeviceGating::Given {
                g: match gate {
                    FileGate::None => None,
                    FileGate::Log(g) => Some(copy(g)?),
                    FileGate::Raw { .. } => Some(copy(&narrowed(&w.problem().log_gates()))?),
                },
                beta: match beta {
                    FileBeta::One => None,
                    FileBeta::Given(beta) => Some(copy(beta)?),
                    FileBeta::Logits(b) => {
                        let beta = |&b: &f32| gates::beta(f64::from(b), w.neg_eigval);
                        let beta: Vec<f64> = b.values.iter().map(beta).collect();
                        Some(copy(&narrowed(&beta))?)
                    }
                },
            },
        };
        let initial = (d.initial_state.as_ref())
            .map(|t| match format.layout {
                StateLayout::KeyMajor => copy(t),
                StateLayout::ValueMajor => {
                    let values = format
                        .layout
                        .from_key_major(&t.values, d.key_dim, d.value_dim);
                    copy(&HostTensor::new(t.dtype, values))
                }
            })
            .transpose()?;
        let states = w.sequences() * d.value_heads * d.key_dim * d.value_dim;
        Ok(Device {
            q: copy(&d.q)?,
            k: copy(&d.k)?,
            v: copy(&d.v)?,
            gating,
            initial,
            o: empty(w.spec.dtype, d.tokens * d.value_heads * d.value_dim)?,
            last: empty(format.dtype, states)?,
            format,
            workspace: context.alloc(plan.workspace_bytes())?,
        })
    }

    /// One run: its seconds, and its kernels.
    fn measure(
        &mut self,
        stream: &Stream,
        plan: &Prefill,
        w: &Workload,
    ) -> Fallible<(f64, Vec<Launched>)> {
        for buffer in [
            &mut self.o.buffer,
            &mut self.last.buffer,
            &mut self.workspace,
        ] {
            buffer.fill_bytes(0xff, stream)?;
        }
        stream.synchronize()?;
        let simulated = stream.context().backend() == Backend::Simulator;
        deltawave_sim::hip::reset_statistics();
        let start = stream.record()?;
        self.launch(stream, plan, w, Part::Whole)?;
        let end = stream.record()?;
        end.synchronize()?;
        let statistics = deltawave_sim::hip::statistics();
        let kernels = plan.kernels().into_iter().map(|name| {
            let counted = statistics.get(name).copied().unwrap_or_default();
            Launched {
                name,
                launches: if simulated { counted.launches } else { 1 },
                simulated: simulated.then_some(counted),
            }
        });
        let kernels: Vec<_> = kernels.collect();
        let seconds = if simulated {
            kernels
                .iter()
                .filter_map(|k| Some(k.simulated?.seconds))
                .sum()
        } else {
            f64::from(end.milliseconds_since(&start)?) / 1e3
        };
        Ok((seconds, kernels))
    }

    fn launch(
        &mut self,
        stream: &Stream,
        plan: &Prefill,
        w: &Workload,
        part: Part,
    ) -> Fallible<()> {
        let d = &w.data;
        let keys = [d.tokens, d.key_heads, d.key_dim];
        let values = [d.tokens, d.value_heads, d.value_dim];
        let dense = w.dense;
        let scalar = |t| scalars(t, dense, [d.tokens, d.value_heads]);
        let gating = match &self.gating {
            DeviceGating::Given { g, beta } => Gating::Given {
                g: g.as_ref().map(scalar).transpose()?,
                beta: beta.as_ref().map(scalar).transpose()?,
            },
            DeviceGating::Raw {
                a,
                b,
                a_log,
                dt_bias,
            } => Gating::Raw {
                a: scalar(a)?,
                b: scalar(b)?,
                a_log: per_head(a_log, d.value_heads)?,
                dt_bias: (dt_bias.as_ref())
                    .map(|t| per_head(t, d.value_heads))
                    .transpose()?,
                allow_neg_eigval: w.neg_eigval,
            },
        };
        let layout = self.format.layout;
        let shape = match layout {
            StateLayout::KeyMajor => [w.sequences(), d.value_heads, d.key_dim, d.value_dim],
            StateLayout::ValueMajor => [w.sequences(), d.value_heads, d.value_dim, d.key_dim],
        };
        let strides = dense_strides(shape);
        let initial_state = match &self.initial {
            Some(t) => Some(State {
                tensor: t.buffer.tensor_of(t.dtype, shape, strides, 0)?,
                layout,
            }),
            None => None,
        };
        let last = &mut self.last;
        let tensors = PrefillTensors {
            q: tokens(&self.q, dense, keys)?,
            k: tokens(&self.k, dense, keys)?,
            v: tokens(&self.v, dense, values)?,
            gating,
            initial_state,
            has_initial_state: None,
            o: tokens_mut(&mut self.o, dense, values)?,
            final_state: Some(StateMut {
                tensor: last.buffer.tensor_of_mut(last.dtype, shape, strides, 0)?,
                layout,
            }),
            pool: None,
            snapshots: None,
        };
        let workspace = Workspace::new(&mut self.workspace);
        plan.launch_part(stream, &tensors, workspace, part)
    }

    /// o and the final states, `[N, HV, K, V]`.
    fn read(&self, stream: &Stream, w: &Workload) -> Fallible<(HostTensor, HostTensor)> {
        let o = HostTensor::from_bytes(self.o.dtype, self.o.buffer.download(stream)?);
        let states = HostTensor::from_bytes(self.last.dtype, self.last.buffer.download(stream)?);
        let states = match self.format.layout {
            StateLayout::KeyMajor => states,
            StateLayout::ValueMajor => {
                let (k, v) = (w.data.key_dim, w.data.value_dim);
                let values = self.format.layout.to_key_major(&states.values, k, v);
                HostTensor::new(states.dtype, values)
            }
        };
        Ok((o, states))
    }
}

fn narrowed(x: &[f64]) -> HostTensor {
    HostTensor::new(Dtype::F32, x.iter().map(|&x| x as f32).collect())
}

fn tokens(t: &Copied, dense: Option<[usize; 2]>, [n, h, d]: [usize; 3]) -> Fallible<Tokens<'_>> {
    Ok(match dense {
        Some([b, len]) => {
            let shape = [b, len, h, d];
            (t.buffer)
                .tensor_of(t.dtype, shape, dense_strides(shape), 0)?
                .into()
        }
        None => (t.buffer)
            .tensor_of(t.dtype, [n, h, d], dense_strides([n, h, d]), 0)?
            .into(),
    })
}

fn tokens_mut(
    t: &mut Copied,
    dense: Option<[usize; 2]>,
    [n, h, d]: [usize; 3],
) -> Fallible<TokensMut<'_>> {
    Ok(match dense {
        Some([b, len]) => {
            let shape = [b, len, h, d];
            (t.buffer)
                .tensor_of_mut(t.dtype, shape, dense_strides(shape), 0)?
                .into()
        }
        None => (t.buffer)
            .tensor_of_mut(t.dtype, [n, h, d], dense_strides([n, h, d]), 0)?
            .into(),
    })
}

fn scalars(
    t: &Copied,
    dense: Option<[usize; 2]>,
    [n, h]: [usize; 2],
) -> Fallible<TokenScalars<'_>> {
    Ok(match dense {
        Some([b, len]) => {
            let shape = [b, len, h];
            (t.buffer)
                .tensor_of(t.dtype, shape, dense_strides(shape), 0)?
                .into()
        }
        None => (t.buffer)
            .tensor_of(t.dtype, [n, h], dense_strides([n, h]), 0)?
            .into(),
    })
}

fn per_head(t: &Copied, heads: usize) -> Fallible<Tensor<'_, 1>> {
    t.buffer.tensor_of(t.dtype, [heads], [1], 0)
}
