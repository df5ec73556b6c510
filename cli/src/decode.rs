//! `deltawave decode`: a decode of drawn tensors, run and checked.

pub mod args;
mod report;

use deltawave::decode::{Decode, DecodeSpec, DecodeTensors};
use deltawave::prefill::{Gating, StatePool};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::tensor::{Buffer, dense_strides};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{GateInputs, InputSpec, Inputs, Tensor as HostTensor, random_state};
use deltawave_lab::metrics::{compare, rounding_ratio};
use deltawave_lab::oracle::{self, Beta, Gate};
use deltawave_sim::hip::{CountedLaunch, KernelStatistics};

use self::args::DecodeArgs;
pub use self::report::Report;
use crate::args::BackendArg;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::repeat::fastest;
use crate::simulator::{self, Wanted};
use crate::time::{self, Times};
use crate::workload::{check_host_memory, of_model, usage_of};

/// Beside what rounding costs, sums in f32 may be off by so much.
const OF_SUMS: f64 = 3e-6;

/// A decode with its tensors on the host.
struct Workload {
    spec: DecodeSpec,
    batch: usize,
    layout: StateLayout,
    state_dtype: Dtype,
    verifies: bool,
    neg_eigval: bool,
    inputs: Inputs,
    /// Of raw gates.
    gate_inputs: Option<GateInputs>,
    /// `[HV, K, V]`, the same of every sequence.
    state: HostTensor,
}

/// What the device computed.
struct Outcome {
    /// `[B T, HV, V]`.
    o: HostTensor,
    /// `[B, HV, K, V]`, after the last token.
    state: HostTensor,
    /// Seconds of the fastest run: of this host on the simulator, else between events of the device.
    seconds: f64,
    simulated: Option<KernelStatistics>,
    counted: Option<CountedLaunch>,
    times: Option<Times>,
}

/// How far that is from the reference, and how far it may be.
#[derive(Clone, Copy)]
struct Verdict {
    o: f64,
    o_limit: f64,
    state: f64,
    state_limit: f64,
}

impl Verdict {
    fn passed(&self) -> bool {
        self.o <= self.o_limit && self.state <= self.state_limit
    }
}

/// Runs what the arguments ask for.
pub fn run(args: &DecodeArgs) -> Result<Report, Failure> {
    if let Some(threads) = args.threads {
        // A second pool would be refused, and there is none yet.
        let _ = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.into())
            .build_global();
    }
    let backend = match (args.count, args.backend) {
        (Some(_), BackendArg::Hip) => {
            let why = "--count counts on the simulator: --backend hip is not for it";
            return Err(usage_of("decode", why.to_owned()));
        }
        (Some(_), _) => Backend::Simulator,
        (None, backend) => backend.into(),
    };
    let mut progress = Progress::new(if args.check { 3 } else { 2 });
    let spec = request(args)?;
    if let Some(gpu) = args.count {
        deltawave_sim::hip::set_gpu(gpu);
    }
    let context = Context::new(backend, args.device)
        .map_err(Failure::during("there is nothing to run on"))?;
    let wanted = Wanted {
        threads: args.threads,
        times: args.time.is_some(),
        counts: args.count.is_some(),
    };
    simulator::configure("decode", &context, &wanted)?;
    let plan = Decode::new(&context, spec, args.batch as usize)
        .map_err(Failure::during("the decode is refused"))?;
    check_memory(args, &spec)?;
    let workload = progress.step("inputs", || Workload::draw(args, spec));
    let outcome = progress.step("kernels", || measure(&context, &plan, &workload, args))?;
    let verdict = match args.check {
        true => Some(progress.step("reference", || workload.check(&outcome))?),
        false => None,
    };
    Ok(Report::new(
        args, &context, &plan, &workload, &outcome, verdict,
    ))
}

fn request(args: &DecodeArgs) -> Result<DecodeSpec, Failure> {
    let ([hk, hv], [k, v]) = match (args.model, args.heads) {
        (Some(model), _) => of_model("decode", model, args.tp)?,
        (None, Some(heads)) => (heads, args.dims),
        (None, None) => {
            let why = "one of --model and --heads is needed";
            return Err(usage_of("decode", why.to_owned()));
        }
    };
    Ok(DecodeSpec {
        dtype: args.dtype,
        head_map: args.head_map.into(),
        qk_l2norm: args.l2norm,
        scale: args.scale.filter(|x| *x != 0.0),
        tokens: args.tokens.into(),
        ..DecodeSpec::new(hk, hv, k, v)
    })
}

/// Fails where the host cannot hold the tensors, their copies on the simulated device, and the reference.
fn check_memory(args: &DecodeArgs, s: &DecodeSpec) -> Result<(), Failure> {
    let rows = u128::from(args.batch) * u128::from(args.tokens);
    let (keys, values) = (s.key_heads * s.key_dim, s.value_heads * s.value_dim);
    let state = (s.value_heads * s.key_dim * s.value_dim) as u128;
    let after_tokens = if args.verify { rows } else { 0 };
    let each = if args.check { 24 } else { 12 };
    check_host_memory(
        each * (rows * 2 * (keys + values) as u128 + u128::from(args.batch) * state)
            + 8 * after_tokens * state,
    )
}

impl Workload {
    fn draw(args: &DecodeArgs, spec: DecodeSpec) -> Self {
        let input = InputSpec {
            dtype: spec.dtype,
            tokens: args.batch as usize * spec.tokens,
            key_heads: spec.key_heads,
            value_heads: spec.value_heads,
            key_dim: spec.key_dim,
            value_dim: spec.value_dim,
            gates: args.gates,
            unit_rows: !spec.qk_l2norm,
            seed: args.seed,
            ..Default::default()
        };
        let each = spec.value_heads * spec.key_dim * spec.value_dim;
        Workload {
            spec,
            batch: args.batch as usize,
            layout: args.state_layout.into(),
            state_dtype: args.state_dtype,
            verifies: args.verify,
            neg_eigval: args.neg_eigval,
            inputs: Inputs::new(input),
            gate_inputs: args.raw_gates.then(|| GateInputs::new(input)),
            state: random_state(args.state_dtype, each, args.seed),
        }
    }

    fn rows(&self) -> usize {
        self.batch * self.spec.tokens
    }

    /// Elements of the states of a sequence.
    fn of_sequence(&self) -> usize {
        self.state.values.len()
    }

    /// Bytes that any implementation moves: q, k, v, o and gates, the states in, and out after the last token or every.
    fn minimal_bytes(&self) -> usize {
        let s = &self.spec;
        let elements = 2 * s.key_heads * s.key_dim + 2 * s.value_heads * s.value_dim;
        let gate = match &self.gate_inputs {
            Some(raw) => raw.a.dtype.size(),
            None => 4,
        };
        let of_token = elements * s.dtype.size() + 2 * s.value_heads * gate;
        let written = if self.verifies {
            self.rows()
        } else {
            self.batch
        };
        let states = (self.batch + written) * self.of_sequence();
        self.rows() * of_token + states * self.state_dtype.size()
    }

    fn check(&self, outcome: &Outcome) -> Result<Verdict, Failure> {
        let s = &self.spec;
        let cu_seqlens: Vec<i32> = (0..=self.batch).map(|n| (n * s.tokens) as i32).collect();
        let initial = self.state.values.repeat(self.batch);
        let mut problem = self.inputs.problem(&cu_seqlens);
        if let Some(raw) = &self.gate_inputs {
            problem.gate = Gate::Raw {
                a: &raw.a.values,
                a_log: &raw.a_log,
                dt_bias: Some(&raw.dt_bias),
            };
            problem.beta = Beta::Logits {
                b: &raw.b.values,
                allow_neg_eigval: self.neg_eigval,
            };
        }
        problem.initial_state = Some(&initial);
        problem.scale = s.scale.map(f64::from);
        problem.head_map = s.head_map;
        let solution = oracle::prefill(&problem)?;
        let limit = |reference: &[f64], dtype| 1.02 * rounding_ratio(reference, dtype) + OF_SUMS;
        Ok(Verdict {
            o: compare(&outcome.o.values, &solution.o).rms_ratio,
            o_limit: limit(&solution.o, s.dtype),
            state: compare(&outcome.state.values, &solution.final_state).rms_ratio,
            state_limit: limit(&solution.final_state, self.state_dtype),
        })
    }
}

/// The workload on the device.
struct Device {
    q: Buffer<u8>,
    k: Buffer<u8>,
    v: Buffer<u8>,
    /// g or a, beta or b.
    gates: [(Buffer<u8>, Dtype); 2],
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    pool: Buffer<u8>,
    /// The pool before a run.
    before: Vec<u8>,
    states: Option<Buffer<u8>>,
    o: Buffer<u8>,
}

type Fallible<T> = deltawave::Result<T>;

fn measure(
    context: &Context,
    plan: &Decode,
    w: &Workload,
    args: &DecodeArgs,
) -> Result<Outcome, Failure> {
    let failed = Failure::during("the decode failed");
    let mut device = Device::new(context, w).map_err(Failure::during(
        "the tensors cannot be brought to the device",
    ))?;
    let stream = context.stream().map_err(&failed)?;
    let mut best = fastest(
        args.repeat,
        || device.run(&stream, plan, w).map_err(&failed),
        |a, b| a.o.bytes == b.o.bytes && a.state.bytes == b.state.bytes,
        |outcome| outcome.seconds,
    )?;
    if let Some(replays) = args.time {
        let parts = [("decode", ())];
        let launch = |stream: &Stream, ()| device.launch(stream, plan, w);
        best.times = Some(time::measure(context, replays, &parts, launch).map_err(&failed)?);
    }
    Ok(best)
}

impl Device {
    fn new(context: &Context, w: &Workload) -> Fallible<Self> {
        let s = &w.spec;
        let inputs = &w.inputs;
        let f32s = |x: &[f32]| HostTensor::new(Dtype::F32, x.to_vec());
        let gates = match &w.gate_inputs {
            Some(raw) => [raw.a.clone(), raw.b.clone()],
            None => [f32s(&inputs.g), f32s(&inputs.beta)],
        };
        let upload = |t: HostTensor| -> Fallible<_> { Ok((context.upload(&t.bytes)?, t.dtype)) };
        let [g, beta] = gates.map(upload);
        let per_head = vec![0.0; s.value_heads];
        let raw = w.gate_inputs.as_ref();
        let ordered = (w.layout).from_key_major(&w.state.values, s.key_dim, s.value_dim);
        let before = HostTensor::new(w.state_dtype, ordered)
            .bytes
            .repeat(w.batch);
        let after_tokens = w.rows() * w.of_sequence() * w.state_dtype.size();
        Ok(Device {
            q: context.upload(&inputs.q.bytes)?,
            k: context.upload(&inputs.k.bytes)?,
            v: context.upload(&inputs.v.bytes)?,
            gates: [g?, beta?],
            a_log: context.upload(raw.map_or(&per_head, |r| &r.a_log))?,
            dt_bias: context.upload(raw.map_or(&per_head, |r| &r.dt_bias))?,
            pool: context.alloc(before.len())?,
            before,
            states: (w.verifies.then(|| context.alloc(after_tokens))).transpose()?,
            o: context.alloc(w.rows() * s.value_heads * s.value_dim * s.dtype.size())?,
        })
    }

    fn run(&mut self, stream: &Stream, plan: &Decode, w: &Workload) -> Fallible<Outcome> {
        self.o.fill_bytes(0xff, stream)?;
        if let Some(states) = &mut self.states {
            states.fill_bytes(0xff, stream)?;
        }
        stream.synchronize()?;
        self.pool.write(&self.before)?;
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
        let s = &w.spec;
        let states = match &self.states {
            Some(states) => {
                // Of the last token of each sequence.
                let all = states.download(stream)?;
                let each = w.of_sequence() * w.state_dtype.size();
                let last = all.chunks_exact(s.tokens * each);
                last.flat_map(|of| &of[(s.tokens - 1) * each..])
                    .copied()
                    .collect()
            }
            None => self.pool.download(stream)?,
        };
        let states = HostTensor::from_bytes(w.state_dtype, states).values;
        let states = w.layout.to_key_major(&states, s.key_dim, s.value_dim);
        Ok(Outcome {
            o: HostTensor::from_bytes(s.dtype, self.o.download(stream)?),
            state: HostTensor::new(w.state_dtype, states),
            seconds,
            simulated: simulated.then_some(statistics),
            counted: deltawave_sim::hip::take_counted_launches().pop(),
            times: None,
        })
    }

    fn launch(&mut self, stream: &Stream, plan: &Decode, w: &Workload) -> Fallible<()> {
        let (s, rows) = (&w.spec, w.rows());
        let (hv, state) = (s.value_heads, w.state_dtype);
        let [a, b] = match w.layout {
            StateLayout::KeyMajor => [s.key_dim, s.value_dim],
            StateLayout::ValueMajor => [s.value_dim, s.key_dim],
        };
        let keys = [rows, s.key_heads, s.key_dim];
        let values = [rows, hv, s.value_dim];
        let pool = [w.batch, hv, a, b];
        let states = [w.batch, s.tokens, hv, a, b];
        let [g, beta] = &self.gates;
        let g = g.0.tensor_of(g.1, [rows, hv], [hv, 1], 0)?;
        let beta = beta.0.tensor_of(beta.1, [rows, hv], [hv, 1], 0)?;
        let tensors = DecodeTensors {
            q: (self.q.tensor_of(s.dtype, keys, dense_strides(keys), 0)?).into(),
            k: (self.k.tensor_of(s.dtype, keys, dense_strides(keys), 0)?).into(),
            v: (self
                .v
                .tensor_of(s.dtype, values, dense_strides(values), 0)?)
            .into(),
            gating: match w.gate_inputs {
                Some(_) => Gating::Raw {
                    a: g.into(),
                    b: beta.into(),
                    a_log: self.a_log.tensor([hv])?,
                    dt_bias: Some(self.dt_bias.tensor([hv])?),
                    allow_neg_eigval: w.neg_eigval,
                },
                None => Gating::Given {
                    g: Some(g.into()),
                    beta: Some(beta.into()),
                },
            },
            pool: StatePool {
                tensor: (self.pool).tensor_of_mut(state, pool, dense_strides(pool), 0)?,
                layout: w.layout,
                slots: None,
                write_slots: None,
            },
            has_initial_state: None,
            states: match &mut self.states {
                Some(to) => Some(to.tensor_of_mut(state, states, dense_strides(states), 0)?),
                None => None,
            },
            o: (self
                .o
                .tensor_of_mut(s.dtype, values, dense_strides(values), 0)?)
            .into(),
        };
        plan.launch(stream, &tensors)
    }
}
