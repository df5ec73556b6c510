//! A prefill on the device.

use deltawave::prefill::{
    Gating, Part, Prefill, PrefillTensors, Snapshot, Snapshots, State, StateMut, Workspace,
};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::tensor::{Buffer, Tensor, TokenScalars, Tokens, TokensMut, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::oracle::gates;
use deltawave_lab::safetensors_io::{FileBeta, FileGate};
use deltawave_sim::hip::KernelStatistics;

use crate::failure::Failure;
use crate::repeat::fastest;
use crate::states::{Others, Pool, Taken};
use crate::time::{self, Times};
use crate::workload::Workload;

/// What the device computed, and how long it took.
pub struct Outcome {
    /// `[T, HV, V]`.
    pub o: HostTensor,
    /// `[N, HV, K, V]`.
    pub final_state: HostTensor,
    /// What became of slots of no sequence, where states are in a pool.
    pub others: Option<Others>,
    /// What the states in the course of sequences are of, and they themselves, `[snapshots, HV, K, V]`.
    pub snapshots: Option<(Vec<Snapshot>, HostTensor)>,
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

/// What is wanted of a prefill besides its result.
pub struct Wanted {
    /// Of the final states.
    pub state: StateFormat,
    /// Runs.
    pub repeat: u32,
    /// Replays that are measured after them.
    pub replays: Option<u32>,
    /// Slots of the pool that has the states; the plan has those of the sequences.
    pub pool: Option<usize>,
    /// States in the course of sequences; the plan has them.
    pub snapshots: Option<Vec<Snapshot>>,
}

impl Wanted {
    /// One run.
    pub fn new(state: StateFormat) -> Self {
        Wanted {
            state,
            repeat: 1,
            replays: None,
            pool: None,
            snapshots: None,
        }
    }
}

/// Runs a planned prefill. Everything that the kernels write is NaN before each run.
pub fn run(
    context: &Context,
    plan: &Prefill,
    workload: &Workload,
    wanted: &Wanted,
) -> Result<Outcome, Failure> {
    let upload = Failure::during("the tensors cannot be brought to the device");
    let failed = Failure::during("the prefill failed");
    let mut device = Device::new(context, plan, workload, wanted).map_err(&upload)?;
    let stream = context.stream().map_err(&upload)?;
    let bits = |x: &Outcome| {
        let snapshots = x.snapshots.as_ref().map(|(_, states)| states.bytes.clone());
        (x.o.bytes.clone(), x.final_state.bytes.clone(), snapshots)
    };
    let mut best = fastest(
        wanted.repeat,
        || {
            let launched = device.measure(&stream, plan, workload).map_err(&failed)?;
            (device.read(&stream, plan, workload, launched)).map_err(&failed)
        },
        |a, b| bits(a) == bits(b),
        |outcome| outcome.seconds,
    )?;
    if let Some(replays) = wanted.replays {
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
    pool: Option<Pool>,
    snapshots: Option<Taken>,
    /// One byte per sequence, for pools.
    has_initial_state: Buffer<u8>,
    format: StateFormat,
    workspace: Buffer<u8>,
}

type Fallible<T> = deltawave::Result<T>;

impl Device {
    fn new(context: &Context, plan: &Prefill, w: &Workload, wanted: &Wanted) -> Fallible<Self> {
        let format = wanted.state;
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
        let states = match wanted.pool {
            Some(_) => 0,
            None => w.sequences() * d.value_heads * d.key_dim * d.value_dim,
        };
        Ok(Device {
            q: copy(&d.q)?,
            k: copy(&d.k)?,
            v: copy(&d.v)?,
            gating,
            initial,
            o: empty(w.spec.dtype, d.tokens * d.value_heads * d.value_dim)?,
            last: empty(format.dtype, states)?,
            pool: (wanted.pool)
                .map(|slots| Pool::new(context, w, format, slots))
                .transpose()?,
            snapshots: (wanted.snapshots.as_ref())
                .map(|wanted| Taken::new(context, w, format.layout, wanted))
                .transpose()?,
            has_initial_state: context
                .upload(&vec![u8::from(d.initial_state.is_some()); w.sequences()])?,
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
        if let Some(pool) = &mut self.pool {
            pool.reset()?;
        }
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
        let in_pool = self.pool.is_some();
        let initial_state = match &self.initial {
            Some(t) if !in_pool => Some(State {
                tensor: t.buffer.tensor_of(t.dtype, shape, strides, 0)?,
                layout,
            }),
            _ => None,
        };
        let last = &mut self.last;
        let final_state = match in_pool {
            true => None,
            false => Some(StateMut {
                tensor: last.buffer.tensor_of_mut(last.dtype, shape, strides, 0)?,
                layout,
            }),
        };
        let tensors = PrefillTensors {
            q: tokens(&self.q, dense, keys)?,
            k: tokens(&self.k, dense, keys)?,
            v: tokens(&self.v, dense, values)?,
            gating,
            initial_state,
            has_initial_state: in_pool.then(|| (&self.has_initial_state).into()),
            o: tokens_mut(&mut self.o, dense, values)?,
            final_state,
            pool: match &mut self.pool {
                Some(pool) => Some(pool.view(w)?),
                None => None,
            },
            snapshots: match &mut self.snapshots {
                Some(taken) => Some(Snapshots {
                    to: Some(taken.view(w)?),
                    slots: None,
                }),
                None => None,
            },
        };
        let workspace = Workspace::new(&mut self.workspace);
        plan.launch_part(stream, &tensors, workspace, part)
    }

    /// What a run left behind, given its seconds and kernels.
    fn read(
        &self,
        stream: &Stream,
        plan: &Prefill,
        w: &Workload,
        (seconds, kernels): (f64, Vec<Launched>),
    ) -> Fallible<Outcome> {
        let (final_state, others) = match &self.pool {
            Some(pool) => {
                let (states, others) = pool.read(stream, w)?;
                (states, Some(others))
            }
            None => (self.read_last(stream, w)?, None),
        };
        Ok(Outcome {
            o: HostTensor::from_bytes(self.o.dtype, self.o.buffer.download(stream)?),
            final_state,
            others,
            snapshots: (self.snapshots.as_ref())
                .map(|taken| taken.read(stream, w))
                .transpose()?,
            workspace_bytes: plan.workspace_bytes(),
            seconds,
            kernels,
            times: None,
        })
    }

    /// The final states, `[N, HV, K, V]`, where they have a tensor of their own.
    fn read_last(&self, stream: &Stream, w: &Workload) -> Fallible<HostTensor> {
        let states = HostTensor::from_bytes(self.last.dtype, self.last.buffer.download(stream)?);
        Ok(match self.format.layout {
            StateLayout::KeyMajor => states,
            StateLayout::ValueMajor => {
                let (k, v) = (w.data.key_dim, w.data.value_dim);
                let values = self.format.layout.to_key_major(&states.values, k, v);
                HostTensor::new(states.dtype, values)
            }
        })
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
