//! Running one prefill on the device under hostile conditions, and judging it by the oracle.
#![allow(dead_code)]

use std::sync::OnceLock;

use deltawave::inputs::{
    GateInputs, Gates, InputSpec, Inputs, Keys, Tensor as HostTensor, random_state,
};
use deltawave::metrics::{Comparison, compare};
use deltawave::oracle::{self, Beta, Gate, Problem, Solution};
use deltawave::prefill::{
    DeviceLengths, DevicePrefill, Flags, Gating, Part, Prefill, PrefillSpec, PrefillTensors, State,
    StateMut, Workspace,
};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::tensor::{Buffer, TokenScalars, Tokens, TokensMut, dense_strides};
use deltawave::types::{Dtype, HeadMap, StateLayout};

/// The device of the tests: a card where there is one, else the simulator.
pub fn context() -> Context {
    static CONTEXT: OnceLock<Context> = OnceLock::new();
    let make = || {
        // The simulator makes every check that it knows, unless the environment says otherwise.
        if std::env::var_os("DELTAWAVE_SIM_CHECKS").is_none() {
            let options = deltawave_sim::hip::options();
            deltawave_sim::hip::set_options(deltawave_sim::launch::Options {
                checks: deltawave_sim::sanitize::Checks::ALL,
                ..options
            });
        }
        Context::new(Backend::Auto, 0).expect("a device with kernels")
    };
    CONTEXT.get_or_init(make).clone()
}

/// Whether the device is the simulator.
pub fn simulated(context: &Context) -> bool {
    context.backend() == Backend::Simulator
}

/// Whether so many bytes can be allocated, of which few are touched: the simulator commits no more than those.
pub fn has_room(context: &Context, bytes: usize) -> bool {
    if simulated(context) {
        return true;
    }
    let (mut free, mut total) = (0, 0);
    // SAFETY: both are valid for a write.
    unsafe { context.hip().hipMemGetInfo(&mut free, &mut total) }.expect("sizes");
    if free < bytes {
        println!("skipped: it takes {bytes} bytes, and {free} are free");
    }
    free >= bytes
}

/// Where the lengths come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Entry {
    Packed,
    Dense,
    Device { wide: bool },
}

/// Where gates come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum GateKind {
    Given,
    NoDecay,
    NoBeta,
    Raw {
        dtype: Dtype,
        dt_bias: bool,
        allow_neg_eigval: bool,
    },
}

/// How tensors lie in memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Layout {
    /// Dense.
    Dense,
    /// Rows padded, an offset in front: `(elements between heads, between tokens, in front)`.
    Padded(usize, usize, usize),
    /// `[H, T, D]` in memory.
    HeadMajor,
}

/// A state tensor's type and order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StateKind {
    pub dtype: Dtype,
    pub layout: StateLayout,
    /// Elements between rows.
    pub pad: usize,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub spec: PrefillSpec,
    pub lengths: Vec<usize>,
    /// Rows past the last sequence.
    pub padding: usize,
    pub gates: Gates,
    pub keys: Keys,
    pub gate_kind: GateKind,
    pub layout: Layout,
    /// Elements between the sequences of a dense batch.
    pub batch_gap: usize,
    pub initial: Option<StateKind>,
    pub has_initial: Option<Vec<u8>>,
    pub final_state: Option<StateKind>,
    pub entry: Entry,
    pub seed: u64,
}

impl Case {
    pub fn new(spec: PrefillSpec, lengths: &[usize]) -> Self {
        Case {
            spec,
            lengths: lengths.to_vec(),
            padding: 0,
            gates: Gates::Normal,
            keys: Keys::Normal,
            gate_kind: GateKind::Given,
            layout: Layout::Dense,
            batch_gap: 0,
            initial: None,
            has_initial: None,
            final_state: Some(StateKind {
                dtype: Dtype::F32,
                layout: StateLayout::KeyMajor,
                pad: 0,
            }),
            entry: Entry::Packed,
            seed: 1,
        }
    }

    /// The case as a Rust expression in one line, to be put into a test.
    pub fn expression(&self) -> String {
        let s = &self.spec;
        let paths = |text: String| {
            text.replace("dtype: ", "dtype: Dtype::")
                .replace("layout: ", "layout: StateLayout::")
                .replace("Some(StateKind", "Some(common::StateKind")
        };
        let has = self.has_initial.as_ref();
        let has = has.map_or("None".to_owned(), |h| format!("Some(vec!{h:?})"));
        format!(
            "common::check(&common::context(), &Case {{ spec: PrefillSpec {{ head_map: HeadMap::{:?}, qk_l2norm: {}, \
             scale: {:?}, ..common::spec(Dtype::{:?}, {}, {}, {}, {}) }}, padding: {}, gates: Gates::{:?}, \
             keys: Keys::{:?}, gate_kind: GateKind::{}, layout: Layout::{:?}, batch_gap: {}, initial: {}, \
             has_initial: {has}, final_state: {}, entry: Entry::{:?}, seed: {}, \
             ..Case::new(common::spec(Dtype::Bf16, 1, 1, 16, 16), &{:?}) }});",
            s.head_map,
            s.qk_l2norm,
            s.scale,
            s.dtype,
            s.key_heads,
            s.value_heads,
            s.key_dim,
            s.value_dim,
            self.padding,
            self.gates,
            self.keys,
            paths(format!("{:?}", self.gate_kind)),
            self.layout,
            self.batch_gap,
            paths(format!("{:?}", self.initial)),
            paths(format!("{:?}", self.final_state)),
            self.entry,
            self.seed,
            self.lengths
        )
    }

    pub fn tokens(&self) -> usize {
        self.lengths.iter().sum::<usize>() + self.padding
    }

    pub fn cu_seqlens(&self) -> Vec<i32> {
        let mut cu = vec![0];
        for n in &self.lengths {
            cu.push(cu.last().expect("not empty") + *n as i32);
        }
        cu
    }

    /// The host's side of it.
    pub fn data(&self) -> Data {
        let s = &self.spec;
        let input = InputSpec {
            dtype: s.dtype,
            tokens: self.tokens(),
            key_heads: s.key_heads,
            value_heads: s.value_heads,
            key_dim: s.key_dim,
            value_dim: s.value_dim,
            gates: self.gates,
            keys: self.keys,
            unit_rows: !s.qk_l2norm,
            seed: self.seed,
        };
        let gate_dtype = match self.gate_kind {
            GateKind::Raw { dtype, .. } => dtype,
            _ => s.dtype,
        };
        let states = self.lengths.len() * s.value_heads * s.key_dim * s.value_dim;
        Data {
            inputs: Inputs::new(input),
            gate_inputs: GateInputs::new(InputSpec {
                dtype: gate_dtype,
                ..input
            }),
            cu_seqlens: self.cu_seqlens(),
            initial: self
                .initial
                .map(|k| random_state(k.dtype, states, self.seed)),
            has: self
                .has_initial
                .as_ref()
                .map(|h| h.iter().map(|x| *x != 0).collect()),
        }
    }
}

pub struct Data {
    pub inputs: Inputs,
    pub gate_inputs: GateInputs,
    pub cu_seqlens: Vec<i32>,
    pub initial: Option<HostTensor>,
    pub has: Option<Vec<bool>>,
}

impl Data {
    pub fn problem(&self, case: &Case) -> Problem<'_> {
        let mut p = self.inputs.problem(&self.cu_seqlens);
        match case.gate_kind {
            GateKind::Given => {}
            GateKind::NoDecay => p.gate = Gate::None,
            GateKind::NoBeta => p.beta = Beta::One,
            GateKind::Raw {
                dt_bias,
                allow_neg_eigval,
                ..
            } => {
                p.gate = Gate::Raw {
                    a: &self.gate_inputs.a.values,
                    a_log: &self.gate_inputs.a_log,
                    dt_bias: dt_bias.then_some(&self.gate_inputs.dt_bias),
                };
                p.beta = Beta::Logits {
                    b: &self.gate_inputs.b.values,
                    allow_neg_eigval,
                };
            }
        }
        p.initial_state = self.initial.as_ref().map(|t| &t.values[..]);
        p.has_initial_state = self.has.as_deref();
        p.scale = case.spec.scale.map(f64::from);
        p.head_map = case.spec.head_map;
        p
    }
}

/// What a device computed.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// `[T, HV, V]`.
    pub o: Vec<f32>,
    /// `[N, HV, K, V]`.
    pub state: Option<Vec<f32>>,
}

/// Where the elements of `[T, H, D]` lie.
#[derive(Clone, Copy, Debug)]
struct Placement {
    strides: [usize; 3],
    offset: usize,
    elements: usize,
    /// Rows of a sequence of a dense batch, and elements between such sequences.
    batch: (usize, usize),
}

impl Placement {
    fn at(&self, token: usize, head: usize) -> usize {
        let (rows, gap) = self.batch;
        self.offset + token * self.strides[0] + token / rows * gap + head * self.strides[1]
    }
}

fn place(case: &Case, [t, h, d]: [usize; 3]) -> Placement {
    let batch = dense_of(case).map_or((usize::MAX, 0), |[_, n]| (n.max(1), case.batch_gap));
    let gaps = t / batch.0 * batch.1;
    let (strides, offset) = match case.layout {
        Layout::Dense => ([h * d, d, 1], 0),
        Layout::Padded(head, token, front) => ([h * (d + head) + token, d + head, 1], front),
        Layout::HeadMajor => ([d, t * d + gaps, 1], 0),
    };
    let mut out = Placement {
        strides,
        offset,
        elements: offset + 7,
        batch,
    };
    if t * h * d > 0 {
        out.elements = out.at(t - 1, h - 1) + d + 7;
    }
    out
}

/// Spreads dense elements over a buffer that is NaN everywhere else.
fn spread(dense: &[u8], size: usize, [t, h, d]: [usize; 3], p: Placement) -> Vec<u8> {
    let mut out = vec![0xff; p.elements * size];
    for i in 0..t {
        for j in 0..h {
            let from = (i * h + j) * d * size;
            let to = p.at(i, j) * size;
            out[to..to + d * size].copy_from_slice(&dense[from..from + d * size]);
        }
    }
    out
}

/// The reverse of [`spread`]; what lies between must still be 0xff.
fn gather(
    name: &str,
    mut bytes: Vec<u8>,
    size: usize,
    [t, h, d]: [usize; 3],
    p: Placement,
) -> Vec<u8> {
    let mut out = vec![0; t * h * d * size];
    for i in 0..t {
        for j in 0..h {
            let to = (i * h + j) * d * size;
            let from = p.at(i, j) * size;
            out[to..to + d * size].copy_from_slice(&bytes[from..from + d * size]);
            bytes[from..from + d * size].fill(0xff);
        }
    }
    assert!(
        bytes.iter().all(|b| *b == 0xff),
        "{name}: bytes outside of the tensor were written"
    );
    out
}

struct OnDevice {
    buffer: Buffer<u8>,
    dtype: Dtype,
    shape: [usize; 3],
    place: Placement,
    dense: Option<[usize; 2]>,
}

impl OnDevice {
    fn new(context: &Context, case: &Case, tensor: &HostTensor, shape: [usize; 3]) -> Self {
        let place = place(case, shape);
        let buffer = context
            .upload(&spread(&tensor.bytes, tensor.dtype.size(), shape, place))
            .expect("memory");
        OnDevice {
            buffer,
            dtype: tensor.dtype,
            shape,
            place,
            dense: dense_of(case),
        }
    }

    fn poisoned(context: &Context, case: &Case, dtype: Dtype, shape: [usize; 3]) -> Self {
        let place = place(case, shape);
        let buffer = context
            .upload(&vec![0xff; place.elements * dtype.size()])
            .expect("memory");
        OnDevice {
            buffer,
            dtype,
            shape,
            place,
            dense: dense_of(case),
        }
    }

    fn rank4(&self) -> ([usize; 4], [usize; 4]) {
        let ([_, h, d], [st, sh, sd]) = (self.shape, self.place.strides);
        let [b, n] = self.dense.expect("a dense batch");
        ([b, n, h, d], [n * st + self.place.batch.1, st, sh, sd])
    }

    fn tokens(&self) -> Tokens<'_> {
        let p = self.place;
        if self.dense.is_some() {
            let (shape, strides) = self.rank4();
            return self
                .buffer
                .tensor_of(self.dtype, shape, strides, p.offset)
                .expect("in range")
                .into();
        }
        self.buffer
            .tensor_of(self.dtype, self.shape, p.strides, p.offset)
            .expect("in range")
            .into()
    }

    fn tokens_mut(&mut self) -> TokensMut<'_> {
        let p = self.place;
        if self.dense.is_some() {
            let (shape, strides) = self.rank4();
            return self
                .buffer
                .tensor_of_mut(self.dtype, shape, strides, p.offset)
                .expect("in range")
                .into();
        }
        self.buffer
            .tensor_of_mut(self.dtype, self.shape, p.strides, p.offset)
            .expect("in range")
            .into()
    }

    fn scalars(&self) -> TokenScalars<'_> {
        let ([t, h, _], [st, sh, _]) = (self.shape, self.place.strides);
        if let Some([b, n]) = self.dense {
            let strides = [n * st + self.place.batch.1, st, sh];
            return self
                .buffer
                .tensor_of(self.dtype, [b, n, h], strides, self.place.offset)
                .expect("in range")
                .into();
        }
        self.buffer
            .tensor_of(self.dtype, [t, h], [st, sh], self.place.offset)
            .expect("in range")
            .into()
    }
}

fn dense_of(case: &Case) -> Option<[usize; 2]> {
    (case.entry == Entry::Dense).then(|| {
        [
            case.lengths.len(),
            case.lengths.first().copied().unwrap_or(0),
        ]
    })
}

fn f32_tensor(values: &[f32]) -> HostTensor {
    HostTensor::new(Dtype::F32, values.to_vec())
}

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
    plan: Plan,
}

enum Plan {
    Host(Prefill),
    Device(DevicePrefill, bool),
}

fn state_shape(case: &Case, layout: StateLayout) -> [usize; 4] {
    let s = &case.spec;
    let n = case.lengths.len();
    match layout {
        StateLayout::KeyMajor => [n, s.value_heads, s.key_dim, s.value_dim],
        StateLayout::ValueMajor => [n, s.value_heads, s.value_dim, s.key_dim],
    }
}

fn state_place(kind: StateKind, [n, h, r, c]: [usize; 4]) -> ([usize; 3], Placement) {
    let row = c + kind.pad;
    let strides = [row, c, 1];
    (
        [n * h * r, 1, c],
        Placement {
            strides,
            offset: 0,
            elements: n * h * r * row + 5,
            batch: (usize::MAX, 0),
        },
    )
}

impl Loaded {
    pub fn new(context: &Context, case: &Case, data: &Data) -> Self {
        let s = &case.spec;
        let tokens = case.tokens();
        let key = [tokens, s.key_heads, s.key_dim];
        let value = [tokens, s.value_heads, s.value_dim];
        let scalar = [tokens, s.value_heads, 1];
        let plan = match case.entry {
            Entry::Packed => {
                Plan::Host(Prefill::packed(context, *s, &data.cu_seqlens, tokens).expect("a plan"))
            }
            Entry::Dense => {
                let n = case.lengths.first().copied().unwrap_or(0);
                assert!(
                    case.lengths.iter().all(|l| *l == n) && case.padding == 0,
                    "a dense case"
                );
                Plan::Host(Prefill::dense(context, *s, case.lengths.len(), n).expect("a plan"))
            }
            Entry::Device { wide } => Plan::Device(
                DevicePrefill::new(context, *s, tokens, case.lengths.len()).expect("a plan"),
                wide,
            ),
        };
        let bytes = match &plan {
            Plan::Host(p) => p.workspace_bytes(),
            Plan::Device(p, _) => p.workspace_bytes(),
        };
        let initial = case.initial.zip(data.initial.as_ref()).map(|(kind, t)| {
            let shape = state_shape(case, kind.layout);
            let (rows, place) = state_place(kind, shape);
            let ordered = reorder(&t.values, kind.layout, s.key_dim, s.value_dim);
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
            workspace: context.upload(&vec![0xff; bytes]).expect("memory"),
            lengths: (
                context.upload(&data.cu_seqlens).expect("memory"),
                context.upload(&wide).expect("memory"),
            ),
            plan,
        }
    }

    /// Replaces the lengths that a [`DevicePrefill`] reads.
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
                a_log: self.a_log.tensor([case.spec.value_heads])?,
                dt_bias: if dt_bias {
                    Some(self.dt_bias.tensor([case.spec.value_heads])?)
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
        let tensors = PrefillTensors {
            q: self.q.tokens(),
            k: self.k.tokens(),
            v: self.v.tokens(),
            gating,
            initial_state,
            has_initial_state: self.has.as_ref().map(Flags::from),
            o: self.o.tokens_mut(),
            final_state,
        };
        let workspace = Workspace::new(&mut self.workspace);
        match &self.plan {
            Plan::Host(plan) => plan.launch_part(stream, &tensors, workspace, part),
            Plan::Device(plan, true) => plan.launch(
                stream,
                DeviceLengths::I64(&self.lengths.1),
                &tensors,
                workspace,
            ),
            Plan::Device(plan, false) => plan.launch(
                stream,
                DeviceLengths::I32(&self.lengths.0),
                &tensors,
                workspace,
            ),
        }
    }

    /// The status word of a [`DevicePrefill`].
    pub fn status(&self, stream: &Stream) -> u32 {
        let bytes = self.workspace.download(stream).expect("a copy");
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
            kind.layout.to_key_major(&values, s.key_dim, s.value_dim)
        });
        Output {
            o: HostTensor::from_bytes(s.dtype, o).values,
            state,
        }
    }
}

fn reorder(values: &[f32], layout: StateLayout, key_dim: usize, value_dim: usize) -> Vec<f32> {
    if values.is_empty() {
        Vec::new()
    } else {
        layout.from_key_major(values, key_dim, value_dim)
    }
}

/// Runs a case twice, everything poisoned before each, and returns the result, the same bits both times.
pub fn run(context: &Context, case: &Case, data: &Data) -> Output {
    let stream = context.stream().expect("a stream");
    let mut loaded = Loaded::new(context, case, data);
    let mut once = || {
        loaded.poison(&stream);
        loaded.launch(case, &stream).expect("a launch");
        loaded.read(case, &stream)
    };
    let (first, second) = (once(), once());
    assert_same_bits(&first, &second, "run to run");
    first
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

/// Distances of a result from the oracle, and of the unfused form from it.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    pub o: Comparison,
    pub state: Comparison,
    pub unfused_o: Comparison,
    pub unfused_state: Comparison,
    /// Root mean square and largest magnitude of the reference.
    pub o_size: (f64, f64),
    pub state_size: (f64, f64),
}

fn size(x: &[f64]) -> (f64, f64) {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64;
    (mean.sqrt(), x.iter().fold(0.0, |m, x| m.max(x.abs())))
}

pub fn judge(case: &Case, data: &Data, output: &Output) -> Judged {
    let problem = data.problem(case);
    let Solution { o, final_state } = oracle::prefill(&problem).expect("a problem");
    let unfused = oracle::unfused(&problem, case.spec.dtype).expect("a problem");
    let end = *data.cu_seqlens.last().expect("not empty") as usize
        * case.spec.value_heads
        * case.spec.value_dim;
    assert!(
        output.o[end..].iter().all(|x| x.to_bits() == 0),
        "rows past the last sequence must be zeros"
    );
    let empty: Vec<f32> = Vec::new();
    let state = output.state.as_ref().unwrap_or(&empty);
    let reference = if output.state.is_some() {
        &final_state[..]
    } else {
        &[]
    };
    Judged {
        o: compare(&output.o[..end], &o[..end]),
        state: compare(state, reference),
        unfused_o: compare(&unfused.o[..end], &o[..end]),
        unfused_state: compare(&unfused.final_state, &final_state),
        o_size: size(&o[..end]),
        state_size: size(&final_state),
    }
}

pub use deltawave::metrics::bar;

/// Runs a case and holds it to the accuracy of the unfused form, with room for what small samples scatter.
pub fn check(context: &Context, case: &Case) -> Judged {
    check_data(context, case, &case.data())
}

/// [`check`] with inputs that were changed.
pub fn check_data(context: &Context, case: &Case, data: &Data) -> Judged {
    let output = run(context, case, data);
    check_output(case, data, &output, 1.15)
}

/// Holds a result to `slack` times the accuracy of the unfused form: root mean square and largest error.
pub fn check_output(case: &Case, data: &Data, output: &Output, slack: f64) -> Judged {
    let j = judge(case, data, output);
    let bars = bar(case.spec.dtype, Gates::Mixed);
    // A bf16 state is rounded once more, by 1.7e-3 in the mean.
    let bf16_state = case.final_state.is_some_and(|k| k.dtype == Dtype::Bf16);
    let rounding = if bf16_state { 1.8e-3 } else { 0.0 };
    let parts = [
        ("o", j.o, j.unfused_o, j.o_size, bars.0, 0.0),
        (
            "final state",
            j.state,
            j.unfused_state,
            j.state_size,
            bars.1,
            rounding,
        ),
    ];
    for (name, error, unfused, (reference, peak), bar, rounding) in parts {
        // Where the unfused form breaks down it is no measure.
        let (ratio, largest) = if unfused.finite() {
            (unfused.rms_ratio.max(bar), unfused.max_abs)
        } else {
            (bar, 0.0)
        };
        let limit = slack * ratio + rounding;
        assert!(
            error.rms_ratio <= limit,
            "{name}: {error:?}, limit {limit:.2e}\n{}",
            case.expression()
        );
        // Half a unit of the largest element is what rounding the result alone may cost.
        let half_unit = if rounding == 0.0 && case.spec.dtype == Dtype::F16 {
            f64::powi(2.0, -11)
        } else {
            f64::powi(2.0, -8)
        };
        let limit = slack * (2.0 * largest).max(12.0 * ratio * reference) + half_unit * peak;
        assert!(
            error.max_abs <= limit,
            "{name}: {error:?}, limit of the largest error {limit:.2e}\n{}",
            case.expression()
        );
    }
    j
}

pub fn spec(
    dtype: Dtype,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
) -> PrefillSpec {
    PrefillSpec {
        dtype,
        head_map: HeadMap::Grouped,
        ..PrefillSpec::new(key_heads, value_heads, key_dim, value_dim)
    }
}

/// Token tensors of one's own making.
pub struct Views<'a> {
    pub q: Tokens<'a>,
    pub k: Tokens<'a>,
    pub v: Tokens<'a>,
    pub g: Option<TokenScalars<'a>>,
    pub beta: Option<TokenScalars<'a>>,
}

/// Launches a packed batch on views, with a dense poisoned output and an f32 final state.
pub fn run_views(context: &Context, case: &Case, views: Views<'_>) -> Output {
    let s = &case.spec;
    let stream = context.stream().expect("a stream");
    let plan = Prefill::packed(context, *s, &case.cu_seqlens(), case.tokens()).expect("a plan");
    let shape = [case.tokens(), s.value_heads, s.value_dim];
    let elements: usize = shape.iter().product();
    let poison = |bytes: usize| context.upload(&vec![0xffu8; bytes]).expect("memory");
    let mut o = poison(elements * s.dtype.size());
    let states = state_shape(case, StateLayout::KeyMajor);
    let mut last = poison(states.iter().product::<usize>() * 4);
    let mut workspace = poison(plan.workspace_bytes());
    let tensors = PrefillTensors {
        q: views.q,
        k: views.k,
        v: views.v,
        gating: Gating::Given {
            g: views.g,
            beta: views.beta,
        },
        initial_state: None,
        has_initial_state: None,
        o: o.tensor_of_mut(s.dtype, shape, dense_strides(shape), 0)
            .expect("in range")
            .into(),
        final_state: Some(StateMut {
            tensor: last
                .tensor_of_mut(Dtype::F32, states, dense_strides(states), 0)
                .expect("in range"),
            layout: StateLayout::KeyMajor,
        }),
    };
    plan.launch(&stream, &tensors, Workspace::new(&mut workspace))
        .expect("a launch");
    let o = o.download(&stream).expect("a copy");
    let last = last.download(&stream).expect("a copy");
    Output {
        o: HostTensor::from_bytes(s.dtype, o).values,
        state: Some(HostTensor::from_bytes(Dtype::F32, last).values),
    }
}
