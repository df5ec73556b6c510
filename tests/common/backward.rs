//! The backward of a case on the device, and its gradients beside the oracle's.

use deltawave::gates::Gating;
use deltawave::prefill::{BackwardTensors, Prefill, PrefillBackward, PrefillTensors};
use deltawave::runtime::{Context, Stream};
use deltawave::state::{InitialState, State, StateMut, States as PrefillStates};
use deltawave::tensor::{Buffer, Tensor, TokenScalarsMut};
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Tensor as HostTensor, random_state};
use deltawave_lab::metrics::compare;
use deltawave_lab::oracle::{self, Upstream};

use super::case::state_shape;
use super::loaded::reorder;
use super::placement::{OnDevice, gather, spread, state_place};
use super::{Case, Data, Entry, GateKind, Repeats, StateKind, bits, is_cdna, repeated};

/// Names of the gradients, in the order of [`Gradients`].
pub const NAMES: [&str; 8] = ["dq", "dk", "dv", "dg", "dbeta", "da_log", "ddt_bias", "ds0"];

/// Gradients by [`NAMES`]; absent ones were not asked for.
pub type Gradients = [Option<Vec<f32>>; 8];

/// Gradients of outputs and final states.
pub struct Given {
    pub d_o: HostTensor,
    /// `[N, HV, K, V]`, for cases with a final state.
    pub d_final: Option<HostTensor>,
}

impl Given {
    pub fn new(case: &Case) -> Self {
        let s = &case.spec.heads;
        let size = case.tokens() * s.value * s.value_dim;
        let states = case.lengths.len() * s.value * s.key_dim * s.value_dim;
        Given {
            d_o: random_state(case.spec.dtype, size, case.seed + 100),
            d_final: case
                .final_state
                .map(|kind| random_state(kind.dtype, states, case.seed + 101)),
        }
    }

    pub fn upstream(&self) -> Upstream<'_> {
        Upstream {
            d_o: &self.d_o.values,
            d_final: self.d_final.as_ref().map(|t| &t.values[..]),
        }
    }
}

/// Breaks an argument of a launch.
pub type Break = fn(&mut LoadedBackward);

type States = (Buffer<u8>, StateKind, [usize; 4]);

/// The tensors of a backward on the device.
pub struct LoadedBackward {
    q: OnDevice,
    k: OnDevice,
    v: OnDevice,
    g: OnDevice,
    beta: OnDevice,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    d_o: OnDevice,
    initial: Option<States>,
    has: Option<Buffer<u8>>,
    d_final: Option<States>,
    d_q: OnDevice,
    d_k: OnDevice,
    d_v: OnDevice,
    d_g: OnDevice,
    d_beta: OnDevice,
    d_a_log: Buffer<f32>,
    d_dt_bias: Buffer<f32>,
    d_initial: States,
    workspace: Buffer<u8>,
    lengths: Buffer<i32>,
    /// Context of the forward, if the backward has rounds.
    pub saved: Option<Buffer<u8>>,
    pub plan: PrefillBackward,
}

fn f32_tensor(values: &[f32]) -> HostTensor {
    HostTensor::new(Dtype::F32, values.to_vec())
}

fn load_states(context: &Context, case: &Case, kind: StateKind, t: &HostTensor) -> States {
    let s = &case.spec.heads;
    let shape = state_shape(case, kind.layout);
    let (rows, place) = state_place(kind, shape);
    let ordered = reorder(&t.values, kind.layout, s.key_dim, s.value_dim);
    let bytes = HostTensor::new(kind.dtype, ordered).bytes;
    let spread = spread(&bytes, kind.dtype.size(), rows, place);
    (context.upload(&spread).expect("memory"), kind, shape)
}

fn strides(kind: &StateKind, [_, h, r, c]: [usize; 4]) -> [usize; 4] {
    let row = c + kind.pad;
    [h * r * row, r * row, row, 1]
}

impl LoadedBackward {
    pub fn new(context: &Context, case: &Case, data: &Data, given: &Given) -> Self {
        let s = &case.spec;
        let tokens = case.tokens();
        let key = [tokens, s.heads.key, s.heads.key_dim];
        let value = [tokens, s.heads.value, s.heads.value_dim];
        let scalar = [tokens, s.heads.value, 1];
        let n = case.lengths.first().copied().unwrap_or(0);
        let forward = match case.entry {
            Entry::Packed => Prefill::packed(context, *s, &data.cu_seqlens, tokens),
            Entry::Dense => Prefill::dense(context, *s, case.lengths.len(), n),
            Entry::Device { .. } => Prefill::device(context, *s, tokens, case.lengths.len()),
        };
        let forward = forward.expect("a plan");
        let plan = PrefillBackward::of(&forward).expect("a plan");
        let raw = matches!(case.gate_kind, GateKind::Raw { .. });
        let (g, beta) = match raw {
            true => (data.gate_inputs.a.clone(), data.gate_inputs.b.clone()),
            false => (f32_tensor(&data.inputs.g), f32_tensor(&data.inputs.beta)),
        };
        let load = |t: &HostTensor, shape| OnDevice::new(context, case, t, shape);
        let poisoned = |dtype, shape| OnDevice::poisoned(context, case, dtype, shape);
        let nans = vec![f32::NAN; s.heads.value];
        // The gradient of initial states is f32, in the layout of the initial states.
        let kind = StateKind {
            dtype: Dtype::F32,
            ..case.initial.unwrap_or(StateKind {
                dtype: Dtype::F32,
                layout: StateLayout::ValueMajor,
                pad: 0,
            })
        };
        let shape = state_shape(case, kind.layout);
        let (_, place) = state_place(kind, shape);
        let states = case.initial.zip(data.initial.as_ref());
        let d_final = case.final_state.zip(given.d_final.as_ref());
        let mut loaded = LoadedBackward {
            q: load(&data.inputs.q, key),
            k: load(&data.inputs.k, key),
            v: load(&data.inputs.v, value),
            g: load(&g, scalar),
            beta: load(&beta, scalar),
            a_log: context.upload(&data.gate_inputs.a_log).expect("memory"),
            dt_bias: context.upload(&data.gate_inputs.dt_bias).expect("memory"),
            d_o: load(&given.d_o, value),
            initial: states.map(|(kind, t)| load_states(context, case, kind, t)),
            has: (case.has_initial.as_ref()).map(|h| context.upload(h).expect("memory")),
            d_final: d_final.map(|(kind, t)| load_states(context, case, kind, t)),
            d_q: poisoned(s.dtype, key),
            d_k: poisoned(s.dtype, key),
            d_v: poisoned(s.dtype, value),
            d_g: poisoned(Dtype::F32, scalar),
            d_beta: poisoned(Dtype::F32, scalar),
            d_a_log: context.upload(&nans).expect("memory"),
            d_dt_bias: context.upload(&nans).expect("memory"),
            d_initial: (
                context
                    .upload(&vec![0xff; place.elements * 4])
                    .expect("memory"),
                kind,
                shape,
            ),
            workspace: context
                .upload(&vec![0xff; plan.workspace_bytes()])
                .expect("memory"),
            lengths: context.upload(&data.cu_seqlens).expect("memory"),
            saved: None,
            plan,
        };
        if forward.context_bytes() > 0 {
            loaded.save(context, case, &forward);
        }
        loaded
    }

    /// Ways to break a launch's arguments, and the error that each gives.
    pub const BROKEN: &[(&'static str, Break)] = &[
        ("d_o: shape [20, 2, 16]; it must be [20, 2, 32]", |x| {
            x.d_o.shape[2] = 16
        }),
        ("d_q: dtype fp16; it must be bf16", |x| {
            x.d_q.dtype = Dtype::F16
        }),
        (
            "d_k: strides [0, 0, 64, 1] for shape [1, 20, 1, 64]; no two elements of an output may overlap",
            |x| x.d_k.place.strides[0] = 0,
        ),
        ("workspace: 0 bytes; at least 75520 bytes are needed", |x| {
            x.workspace = x.q.buffer.context().alloc(0).expect("memory")
        }),
    ];

    /// Fills everything that a launch writes with NaN.
    pub fn poison(&mut self, stream: &Stream) {
        for buffer in [
            &mut self.d_q.buffer,
            &mut self.d_k.buffer,
            &mut self.d_v.buffer,
            &mut self.d_g.buffer,
            &mut self.d_beta.buffer,
            &mut self.d_initial.0,
            &mut self.workspace,
        ] {
            buffer.fill_bytes(0xff, stream).expect("a fill");
        }
        for buffer in [&mut self.d_a_log, &mut self.d_dt_bias] {
            buffer.fill_bytes(0xff, stream).expect("a fill");
        }
    }

    /// Launches for the gradients of which `wanted` has the bit. The others are absent.
    pub fn launch(&mut self, case: &Case, wanted: u32, stream: &Stream) -> deltawave::Result<()> {
        let heads = case.spec.heads.value;
        let raw = matches!(case.gate_kind, GateKind::Raw { .. });
        let wants = |i: u32| wanted >> i & 1 == 1;
        let (gating, initial) = (
            gating(case, [&self.g, &self.beta], [&self.a_log, &self.dt_bias])?,
            initial(&self.initial, &self.has)?,
        );
        let d_final = match &self.d_final {
            Some(s) => {
                let (tensor, layout) = view(s)?;
                Some(State { tensor, layout })
            }
            None => None,
        };
        let d_initial = match wants(7) {
            true => {
                let (buffer, kind, shape) = &mut self.d_initial;
                Some(StateMut {
                    tensor: buffer.tensor_of_mut(kind.dtype, *shape, strides(kind, *shape), 0)?,
                    layout: kind.layout,
                })
            }
            false => None,
        };
        let d_a_log = match wants(5) && raw {
            true => Some(self.d_a_log.tensor_mut([heads])?),
            false => None,
        };
        let d_dt_bias = match wants(6) && raw {
            true => Some(self.d_dt_bias.tensor_mut([heads])?),
            false => None,
        };
        let device = matches!(case.entry, Entry::Device { .. });
        let tensors = BackwardTensors {
            cu_seqlens: device.then(|| (&self.lengths).into()),
            q: self.q.tokens(),
            k: self.k.tokens(),
            v: self.v.tokens(),
            gating,
            initial,
            d_o: self.d_o.tokens(),
            d_final,
            d_q: wants(0).then(|| self.d_q.tokens_mut()),
            d_k: wants(1).then(|| self.d_k.tokens_mut()),
            d_v: wants(2).then(|| self.d_v.tokens_mut()),
            d_g: wants(3).then(|| scalars_mut(&mut self.d_g)),
            d_beta: wants(4).then(|| scalars_mut(&mut self.d_beta)),
            d_a_log,
            d_dt_bias,
            d_initial,
        };
        let workspace = Workspace::new(&mut self.workspace);
        match &mut self.saved {
            Some(saved) => {
                let context = Workspace::new(saved);
                self.plan.launch_saved(stream, &tensors, context, workspace)
            }
            None => self.plan.launch(stream, &tensors, workspace),
        }
    }

    pub fn plan_context(&self) -> &Context {
        self.workspace.context()
    }

    /// Launches the forward on the inputs, and keeps the context that it saves.
    fn save(&mut self, context: &Context, case: &Case, forward: &Prefill) {
        let stream = context.stream().expect("a stream");
        let alloc = |bytes| context.upload(&vec![0xff_u8; bytes]).expect("memory");
        let mut saved = alloc(forward.context_bytes());
        let mut workspace = alloc(forward.workspace_bytes());
        let tensors = PrefillTensors {
            cu_seqlens: None,
            q: self.q.tokens(),
            k: self.k.tokens(),
            v: self.v.tokens(),
            gating: gating(case, [&self.g, &self.beta], [&self.a_log, &self.dt_bias])
                .expect("gates"),
            states: PrefillStates::Separate {
                initial: initial(&self.initial, &self.has).expect("states"),
                last: None,
            },
            o: self.d_v.tokens_mut(), // of the shape of o, and poisoned before each backward
            snapshots: None,
        };
        let [to, scratch] = [&mut saved, &mut workspace].map(Workspace::new);
        (forward.launch_saving(&stream, &tensors, to, scratch)).expect("a launch");
        stream.synchronize().expect("a launch");
        self.saved = Some(saved);
    }

    /// Gradients in the oracle's order, of those that were wanted. The others must not have been written.
    pub fn read(&self, case: &Case, wanted: u32, stream: &Stream) -> Gradients {
        let s = &case.spec;
        let raw = matches!(case.gate_kind, GateKind::Raw { .. });
        let tokens = |name, t: &OnDevice| {
            let bytes = t.buffer.download(stream).expect("a copy");
            let bytes = gather(name, bytes, t.dtype.size(), t.shape, t.place);
            HostTensor::from_bytes(t.dtype, bytes).values
        };
        let (buffer, kind, shape) = &self.d_initial;
        let (rows, place) = state_place(*kind, *shape);
        let bytes = buffer.download(stream).expect("a copy");
        let state = HostTensor::from_bytes(kind.dtype, gather("ds0", bytes, 4, rows, place)).values;
        let state = (kind.layout).to_key_major(&state, s.heads.key_dim, s.heads.value_dim);
        let all = [
            tokens("dq", &self.d_q),
            tokens("dk", &self.d_k),
            tokens("dv", &self.d_v),
            tokens("dg", &self.d_g),
            tokens("dbeta", &self.d_beta),
            self.d_a_log.download(stream).expect("a copy"),
            self.d_dt_bias.download(stream).expect("a copy"),
            state,
        ];
        let mut index = 0;
        all.map(|values| {
            let i = index;
            index += 1;
            let there = wanted >> i & 1 == 1 && (raw || !(5..7).contains(&i));
            if !there {
                let untouched = values.iter().all(|x| x.is_nan());
                assert!(untouched, "{} was written unasked", NAMES[i]);
            }
            there.then_some(values)
        })
    }
}

fn gating<'a>(
    case: &Case,
    [g, beta]: [&'a OnDevice; 2],
    [a_log, dt_bias]: [&'a Buffer<f32>; 2],
) -> deltawave::Result<Gating<'a>> {
    let heads = case.spec.heads.value;
    Ok(match case.gate_kind {
        GateKind::Raw {
            dt_bias: biased,
            allow_neg_eigval,
            ..
        } => Gating::Raw {
            a: g.scalars(),
            b: beta.scalars(),
            a_log: a_log.tensor([heads])?,
            dt_bias: match biased {
                true => Some(dt_bias.tensor([heads])?),
                false => None,
            },
            allow_neg_eigval,
        },
        kind => Gating::Given {
            g: (kind != GateKind::NoDecay).then(|| g.scalars()),
            beta: (kind != GateKind::NoBeta).then(|| beta.scalars()),
        },
    })
}

fn initial<'a>(
    states: &'a Option<States>,
    has: &'a Option<Buffer<u8>>,
) -> deltawave::Result<Option<InitialState<'a>>> {
    let Some(s) = states else { return Ok(None) };
    let (tensor, layout) = view(s)?;
    Ok(Some(InitialState {
        state: State { tensor, layout },
        has_initial_state: has.as_ref().map(Into::into),
    }))
}

fn view((buffer, kind, shape): &States) -> deltawave::Result<(Tensor<'_, 4>, StateLayout)> {
    let tensor = buffer.tensor_of(kind.dtype, *shape, strides(kind, *shape), 0)?;
    Ok((tensor, kind.layout))
}

fn scalars_mut(t: &mut OnDevice) -> TokenScalarsMut<'_> {
    let ([n, h, _], [st, sh, _]) = (t.shape, t.place.strides);
    if let Some([b, n]) = t.dense {
        let strides = [t.place.batch.1, st, sh];
        let view = t
            .buffer
            .tensor_of_mut(t.dtype, [b, n, h], strides, t.place.offset);
        return view.expect("in range").into();
    }
    let view = t
        .buffer
        .tensor_of_mut(t.dtype, [n, h], [st, sh], t.place.offset);
    view.expect("in range").into()
}

/// Every gradient.
pub const ALL: u32 = 0xff;

/// Runs the backward of a case, everything poisoned before.
pub fn run_backward(
    context: &Context,
    case: &Case,
    data: &Data,
    given: &Given,
    wanted: u32,
) -> Gradients {
    let stream = context.stream().expect("a stream");
    let mut loaded = LoadedBackward::new(context, case, data, given);
    let once = || {
        loaded.poison(&stream);
        loaded.launch(case, wanted, &stream).expect("a launch");
        loaded.read(case, wanted, &stream)
    };
    repeated(
        context,
        Repeats::OneSimulated,
        once,
        |first: &Gradients, second| {
            for ((a, b), name) in first.iter().zip(second).zip(NAMES) {
                let same = a.as_deref().map(bits) == b.as_deref().map(bits);
                assert!(same, "{name} differs from run to run");
            }
        },
    )
}

/// Rms of gradients below which errors are no longer relative: 2^-100. f32 has full precision from 2^-126 on, and
/// factors of a chunk are smaller than its gradients.
const LEAST: f64 = 1.0 / (1u128 << 100) as f64;

/// Rms errors of gradients relative to the oracle's, and those of FLA's chain.
pub fn judge_backward(
    case: &Case,
    data: &Data,
    given: &Given,
    found: &Gradients,
) -> Vec<(&'static str, f64, f64)> {
    let mut problem = data.problem(case);
    problem.l2_norm = case.spec.qk_l2norm;
    let up = given.upstream();
    let exact = oracle::backward(&problem, &up).expect("a problem");
    let chain = oracle::unfused_backward(&problem, &up, case.spec.dtype).expect("a problem");
    let list = |g: oracle::Gradients| {
        [
            g.q,
            g.k,
            g.v,
            g.gate,
            g.beta,
            g.a_log,
            g.dt_bias,
            g.initial_state,
        ]
    };
    let (exact, chain) = (list(exact), list(chain));
    let end = *data.cu_seqlens.last().expect("not empty") as usize;
    let mut out = Vec::new();
    for i in 0..NAMES.len() {
        let Some(x) = &found[i] else { continue };
        let per_token = x.len() / case.tokens().max(1);
        if i < 5 {
            let rest = &x[end * per_token..];
            let zeros = rest.iter().all(|x| x.to_bits() == 0);
            assert!(zeros, "{}: rows past the last sequence must be 0", NAMES[i]);
        }
        // Gates that forget leave gradients near the least f32. Their errors are relative to 2^-100 at least.
        let size =
            (exact[i].iter().map(|x| x * x).sum::<f64>() / exact[i].len().max(1) as f64).sqrt();
        // Gradients of A_log and dt_bias are sums over all tokens, in which terms may cancel. Errors are relative to the
        // root of the sum of squared terms, if that is greater. Terms of A_log are at least as great as those of dt_bias.
        let terms = match i {
            5 | 6 => exact[3].iter().map(|x| x * x).sum::<f64>() / exact[i].len().max(1) as f64,
            _ => 0.0,
        };
        let share = if size > 0.0 {
            (size / terms.sqrt().max(LEAST)).min(1.0)
        } else {
            1.0
        };
        let error = share * compare(x, &exact[i]).rms_ratio;
        let chain = share * compare(&chain[i], &exact[i]).rms_ratio;
        out.push((NAMES[i], error, chain));
    }
    out
}

/// Runs and judges a case: no gradient may be further from the oracle than `slack` times FLA's chain, or than `floor`.
/// Where the chain is further than a `floor` that is given, keys are so long that errors grow from token to token: single
/// cases then say little, and the limit is 4 `slack` times the chain's error. A `floor` of 0 is none: the limit is the chain's.
pub fn check_backward(context: &Context, case: &Case, slack: f64, floor: f64) {
    let data = case.data();
    let given = Given::new(case);
    let found = run_backward(context, case, &data, &given, ALL);
    let judged = judge_backward(case, &data, &given, &found);
    if std::env::var_os("DELTAWAVE_PRINT").is_some() {
        println!("{:?} {:?}: {judged:?}", case.spec.dtype, case.gates);
    }
    for (name, error, chain) in judged {
        let grown = floor > 0.0 && chain > floor;
        // The emulated chain adds exactly. Tensor cores truncate sums.
        let slack = if is_cdna(context) { slack } else { 1.1 * slack };
        let slack = if grown { 4.0 * slack } else { slack };
        let limit = (slack * chain).max(floor);
        assert!(
            error <= limit,
            "{name}: rms ratio {error:.2e} above {limit:.2e}; FLA's chain has {chain:.2e}\n{}",
            case.expression()
        );
    }
}
