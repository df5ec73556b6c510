//! A case's tensors and plan on the device: launched, poisoned, read.

use deltawave::gates::Gating;
use deltawave::prefill::{Part, Prefill, PrefillTensors};
use deltawave::runtime::{Context, Stream};
use deltawave::state::InitialState;
use deltawave::state::States;
use deltawave::state::{State, StateMut};
use deltawave::tensor::Buffer;
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::Tensor as HostTensor;

use super::case::state_shape;
use super::placement::{OnDevice, gather, spread, state_place};
use super::{
    Case, Data, Entry, GateKind, LoadedPool, LoadedSnapshots, Output, PoolCase, Repeats,
    SnapshotCase, StateKind, repeated,
};

/// The tensors of a case on the device.
pub struct Loaded {
    q: OnDevice,
    k: OnDevice,
    v: OnDevice,
    g: OnDevice,
    beta: OnDevice,
    a: OnDevice,
    b: OnDevice,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    o: OnDevice,
    initial: Option<(Buffer<u8>, StateKind, [usize; 4])>,
    has: Option<Buffer<u8>>,
    last: Option<(Buffer<u8>, StateKind, [usize; 4])>,
    workspace: Buffer<u8>,
    lengths: (Buffer<i32>, Buffer<i64>),
    pub(super) pool: Option<LoadedPool>,
    pub(super) snapshots: Option<LoadedSnapshots>,
    plan: Prefill,
    /// Lengths that launches read on the device; whether these are 64-bit.
    device_lengths: Option<bool>,
}

impl Loaded {
    pub fn new(context: &Context, case: &Case, data: &Data) -> Self {
        let s = &case.spec;
        let tokens = case.tokens();
        let key = [tokens, s.heads.key, s.heads.key_dim];
        let value = [tokens, s.heads.value, s.heads.value_dim];
        let scalar = [tokens, s.heads.value, 1];
        let plan = match case.entry {
            Entry::Packed => {
                Prefill::packed(context, *s, &data.cu_seqlens, tokens).expect("a plan")
            }
            Entry::Dense => {
                let n = case.lengths.first().copied().unwrap_or(0);
                assert!(
                    case.lengths.iter().all(|l| *l == n) && case.padding == 0,
                    "a dense case"
                );
                Prefill::dense(context, *s, case.lengths.len(), n).expect("a plan")
            }
            Entry::Device { .. } => {
                Prefill::device(context, *s, tokens, case.lengths.len()).expect("a plan")
            }
        };
        let device_lengths = match case.entry {
            Entry::Device { wide } => Some(wide),
            _ => None,
        };
        let bytes = plan.workspace_bytes();
        let initial = case.initial.zip(data.initial.as_ref()).map(|(kind, t)| {
            let shape = state_shape(case, kind.layout);
            let (rows, place) = state_place(kind, shape);
            let ordered = reorder(&t.values, kind.layout, s.heads.key_dim, s.heads.value_dim);
            let bytes = HostTensor::new(kind.dtype, ordered).bytes;
            (
                context
                    .upload(&spread(&bytes, kind.dtype.size(), rows, place))
                    .expect("memory"),
                kind,
                shape,
            )
        });
        let last = case.final_state.map(|kind| {
            let shape = state_shape(case, kind.layout);
            let (_, place) = state_place(kind, shape);
            (
                context
                    .upload(&vec![0xff; place.elements * kind.dtype.size()])
                    .expect("memory"),
                kind,
                shape,
            )
        });
        let wide: Vec<i64> = data.cu_seqlens.iter().map(|x| i64::from(*x)).collect();
        Loaded {
            device_lengths,
            q: OnDevice::new(context, case, &data.inputs.q, key),
            k: OnDevice::new(context, case, &data.inputs.k, key),
            v: OnDevice::new(context, case, &data.inputs.v, value),
            g: OnDevice::new(context, case, &f32_tensor(&data.inputs.g), scalar),
            beta: OnDevice::new(context, case, &f32_tensor(&data.inputs.beta), scalar),
            a: OnDevice::new(context, case, &data.gate_inputs.a, scalar),
            b: OnDevice::new(context, case, &data.gate_inputs.b, scalar),
            a_log: context.upload(&data.gate_inputs.a_log).expect("memory"),
            dt_bias: context.upload(&data.gate_inputs.dt_bias).expect("memory"),
            o: OnDevice::poisoned(context, case, s.dtype, value),
            initial,
            has: case
                .has_initial
                .as_ref()
                .map(|h| context.upload(h).expect("memory")),
            last,
            workspace: context.alloc(bytes).expect("memory"), // filled before each launch
            lengths: (
                context.upload(&data.cu_seqlens).expect("memory"),
                context.upload(&wide).expect("memory"),
            ),
            pool: None,
            snapshots: None,
            plan,
        }
    }

    /// With a pool instead of states of their own.
    pub fn on_pool(context: &Context, case: &Case, data: &Data, pool: &PoolCase) -> Self {
        let mut loaded = Loaded::new(context, case, data);
        (loaded.initial, loaded.last) = (None, None);
        loaded.pool = Some(LoadedPool::new(context, case, data, pool));
        if let (true, Some(slots), None) = (pool.planned, &pool.slots, loaded.device_lengths) {
            loaded
                .plan
                .set_slots(slots, pool.write_slots.as_deref())
                .expect("slots");
        }
        loaded
    }

    /// With states in the course of sequences.
    pub fn with_snapshots(
        mut self,
        context: &Context,
        case: &Case,
        snapshots: &SnapshotCase,
    ) -> Self {
        self.snapshots = Some(LoadedSnapshots::new(context, case, snapshots));
        if snapshots.planned && self.device_lengths.is_none() {
            self.plan.set_snapshots(&snapshots.list).expect("snapshots");
        }
        self
    }

    /// The launch gives no slots of snapshots.
    pub fn drop_snapshot_slots(&mut self) {
        self.snapshots.as_mut().expect("snapshots").slots = None;
    }

    /// The launch gives no snapshots.
    pub fn drop_snapshots(&mut self) {
        self.snapshots = None;
    }

    /// Pool and snapshots as before the launch.
    pub fn reset_states(&mut self) {
        let snapshots = self.snapshots.as_mut().and_then(|s| s.to.as_mut());
        for pool in self.pool.as_mut().into_iter().chain(snapshots) {
            pool.reset();
        }
    }

    /// Fills the pool with NaN.
    pub fn poison_pool(&mut self, stream: &Stream) {
        let pool = self.pool.as_mut().expect("a pool");
        pool.buffer.fill_bytes(0xff, stream).expect("a fill");
    }

    /// The state that each sequence left in the pool, NaN where it left none. No other byte may have changed.
    pub fn pool_states(&self, case: &Case, pool: &PoolCase, stream: &Stream) -> Vec<f32> {
        let loaded = self.pool.as_ref().expect("a pool");
        loaded.read(case, &pool.written(case), stream)
    }

    /// Replaces the lengths that a [`Prefill`] reads.
    pub fn set_lengths(&mut self, values: &[i32]) {
        self.lengths.0.write(values).expect("as many entries");
        let wide: Vec<i64> = values.iter().map(|x| i64::from(*x)).collect();
        self.lengths.1.write(&wide).expect("as many entries");
    }

    /// The same, with entries that only 64 bits hold.
    pub fn set_wide_lengths(&mut self, values: &[i64]) {
        self.lengths.1.write(values).expect("as many entries");
    }

    /// Replaces the inputs: the same tensors, other values.
    pub fn set_inputs(&mut self, data: &Data) {
        let rewrite = |t: &mut OnDevice, bytes: &[u8]| {
            let spread = spread(bytes, t.dtype.size(), t.shape, t.place);
            t.buffer.write(&spread).expect("as many bytes");
        };
        rewrite(&mut self.q, &data.inputs.q.bytes);
        rewrite(&mut self.k, &data.inputs.k.bytes);
        rewrite(&mut self.v, &data.inputs.v.bytes);
        rewrite(&mut self.g, &f32_tensor(&data.inputs.g).bytes);
        rewrite(&mut self.beta, &f32_tensor(&data.inputs.beta).bytes);
    }

    /// Fills everything that a launch writes with NaN.
    pub fn poison(&mut self, stream: &Stream) {
        self.o.buffer.fill_bytes(0xff, stream).expect("a fill");
        self.workspace.fill_bytes(0xff, stream).expect("a fill");
        if let Some((buffer, ..)) = &mut self.last {
            buffer.fill_bytes(0xff, stream).expect("a fill");
        }
    }

    /// Fills the workspace with any byte.
    pub fn fill_workspace(&mut self, byte: u8, stream: &Stream) {
        self.workspace.fill_bytes(byte, stream).expect("a fill");
    }

    /// Changes workspaces with another of the same shape.
    pub fn swap_workspaces(&mut self, other: &mut Loaded) {
        std::mem::swap(&mut self.workspace, &mut other.workspace);
    }

    pub fn launch(&mut self, case: &Case, stream: &Stream) -> deltawave::Result<()> {
        self.launch_part(case, stream, Part::Whole)
    }

    /// A part of a launch, where the host knows the lengths.
    pub fn launch_part(
        &mut self,
        case: &Case,
        stream: &Stream,
        part: Part,
    ) -> deltawave::Result<()> {
        let gating = match case.gate_kind {
            GateKind::Given => Gating::Given {
                g: Some(self.g.scalars()),
                beta: Some(self.beta.scalars()),
            },
            GateKind::NoDecay => Gating::Given {
                g: None,
                beta: Some(self.beta.scalars()),
            },
            GateKind::NoBeta => Gating::Given {
                g: Some(self.g.scalars()),
                beta: None,
            },
            GateKind::Raw {
                dt_bias,
                allow_neg_eigval,
                ..
            } => Gating::Raw {
                a: self.a.scalars(),
                b: self.b.scalars(),
                a_log: self.a_log.tensor([case.spec.heads.value])?,
                dt_bias: if dt_bias {
                    Some(self.dt_bias.tensor([case.spec.heads.value])?)
                } else {
                    None
                },
                allow_neg_eigval,
            },
        };
        let strides = |kind: &StateKind, [_, h, r, c]: [usize; 4]| {
            let row = c + kind.pad;
            [h * r * row, r * row, row, 1]
        };
        let initial_state = match &self.initial {
            Some((buffer, kind, shape)) => Some(State {
                tensor: buffer.tensor_of(kind.dtype, *shape, strides(kind, *shape), 0)?,
                layout: kind.layout,
            }),
            None => None,
        };
        let final_state = match &mut self.last {
            Some((buffer, kind, shape)) => Some(StateMut {
                tensor: buffer.tensor_of_mut(kind.dtype, *shape, strides(kind, *shape), 0)?,
                layout: kind.layout,
            }),
            None => None,
        };
        let has_initial_state = self.has.as_ref().map(Into::into);
        let states = match &mut self.pool {
            Some(pool) => States::Pool {
                pool: pool.view()?,
                has_initial_state,
            },
            None => States::Separate {
                initial: initial_state.map(|state| InitialState {
                    state,
                    has_initial_state,
                }),
                last: final_state,
            },
        };
        let snapshots = match &mut self.snapshots {
            Some(snapshots) => Some(snapshots.view()?),
            None => None,
        };
        let tensors = PrefillTensors {
            cu_seqlens: self.device_lengths.map(|wide| match wide {
                true => (&self.lengths.1).into(),
                false => (&self.lengths.0).into(),
            }),
            q: self.q.tokens(),
            k: self.k.tokens(),
            v: self.v.tokens(),
            gating,
            states,
            o: self.o.tokens_mut(),
            snapshots,
        };
        let workspace = Workspace::new(&mut self.workspace);
        self.plan.launch_part(stream, &tensors, workspace, part)
    }

    /// What a launch left in its workspace.
    pub fn workspace(&self, stream: &Stream) -> Vec<u8> {
        self.workspace.download(stream).expect("a copy")
    }

    /// The status word of a [`Prefill`].
    pub fn status(&self, stream: &Stream) -> u32 {
        let bytes = self.workspace(stream);
        u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }

    pub fn read(&self, case: &Case, stream: &Stream) -> Output {
        let s = &case.spec;
        let bytes = self.o.buffer.download(stream).expect("a copy");
        let o = gather("o", bytes, s.dtype.size(), self.o.shape, self.o.place);
        let state = self.last.as_ref().map(|(buffer, kind, shape)| {
            let (rows, place) = state_place(*kind, *shape);
            let bytes = gather(
                "final_state",
                buffer.download(stream).expect("a copy"),
                kind.dtype.size(),
                rows,
                place,
            );
            let values = HostTensor::from_bytes(kind.dtype, bytes).values;
            kind.layout
                .to_key_major(&values, s.heads.key_dim, s.heads.value_dim)
        });
        Output {
            o: HostTensor::from_bytes(s.dtype, o).values,
            state,
        }
    }
}

pub(super) fn reorder(
    values: &[f32],
    layout: StateLayout,
    key_dim: usize,
    value_dim: usize,
) -> Vec<f32> {
    if values.is_empty() {
        Vec::new()
    } else {
        layout.from_key_major(values, key_dim, value_dim)
    }
}

/// Runs a case, everything poisoned before, and returns the result.
pub fn run(context: &Context, case: &Case, data: &Data) -> Output {
    run_repeated(context, case, data, Repeats::OneSimulated)
}

/// Runs a case as often as `repeats` says, everything that a launch writes poisoned before each.
pub fn run_repeated(context: &Context, case: &Case, data: &Data, repeats: Repeats) -> Output {
    let stream = context.stream().expect("a stream");
    let mut loaded = Loaded::new(context, case, data);
    let once = || {
        loaded.poison(&stream);
        loaded.launch(case, &stream).expect("a launch");
        loaded.read(case, &stream)
    };
    let same = |a: &Output, b: &Output| assert_same_bits(a, b, "run to run");
    repeated(context, repeats, once, same)
}

/// The bits of numbers: NaN is equal to itself, and 0 not to -0.
pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

pub fn assert_same_bits(a: &Output, b: &Output, what: &str) {
    assert!(bits(&a.o) == bits(&b.o), "o differs: {what}");
    let state = |x: &Output| x.state.as_deref().map(bits);
    assert!(state(a) == state(b), "the final state differs: {what}");
}

fn f32_tensor(values: &[f32]) -> HostTensor {
    HostTensor::new(Dtype::F32, values.to_vec())
}
