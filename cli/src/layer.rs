//! `deltawave layer`: a layer of drawn projections and weights, run and checked.

pub mod args;
mod device;
mod report;

use deltawave::layer::{Layer, LayerSpec};
use deltawave::norm::OutputGate;
use deltawave::runtime::{Backend, Context};
use deltawave::types::{Dtype, StateLayout};
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::metrics::{SMALL_SHAPE_SLACK, compare};
use deltawave_lab::oracle::layer::{LayerProblem, layer, unfused_layer};
use deltawave_sim::hip::{CountedLaunch, KernelStatistics};

use self::args::LayerArgs;
use self::device::Device;
pub use self::report::Report;
use crate::args::BackendArg;
use crate::conv::args::LayoutArg;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::repeat::fastest;
use crate::simulator::{self, Wanted};
use crate::time::{self, Times};
use crate::workload::{check_host_memory, cu_seqlens, of_model, usage_of};

/// A state after a few tokens has no error to speak of in the chain of kernels either.
const LEAST_STATE_LIMIT: f64 = 1e-5;

/// A layer with its tensors on the host.
struct Workload {
    spec: LayerSpec,
    state_dtype: Dtype,
    /// Of the rows on the device.
    layout: LayoutArg,
    /// Of the recurrent states on the device.
    state_layout: StateLayout,
    cu_seqlens: Vec<i32>,
    decodes: usize,
    /// `T`.
    tokens: usize,
    /// `[T, columns]`: rows `q | k | v | z`.
    projections: HostTensor,
    /// `[T, HV]`.
    a: HostTensor,
    b: HostTensor,
    conv_weight: HostTensor,
    a_log: HostTensor,
    dt_bias: HostTensor,
    norm_weight: HostTensor,
    /// `[N, channels, width - 1]` and `[N, HV, K, V]`.
    states: Option<[HostTensor; 2]>,
}

/// What the device computed.
struct Outcome {
    y: HostTensor,
    conv_state: HostTensor,
    state: HostTensor,
    /// Of this host on the simulator, else between events of the device.
    seconds: f64,
    simulated: Vec<Option<KernelStatistics>>,
    counted: Vec<CountedLaunch>,
    times: Option<Times>,
}

/// How far that is from the reference, and how far it may be.
#[derive(Clone, Copy)]
struct Verdict {
    y: f64,
    y_limit: f64,
    state: f64,
    state_limit: f64,
    /// Elements of the conv states that have other bits.
    wrong_states: usize,
}

impl Verdict {
    fn passed(&self) -> bool {
        self.y <= self.y_limit && self.state <= self.state_limit && self.wrong_states == 0
    }
}

/// Runs what the arguments ask for.
pub fn run(args: &LayerArgs) -> Result<Report, Failure> {
    if let Some(threads) = args.threads {
        // A second pool would be refused, and there is none yet.
        let _ = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.into())
            .build_global();
    }
    let backend = match (args.count, args.backend) {
        (Some(_), BackendArg::Hip) => {
            let why = "--count counts on the simulator: --backend hip is not for it";
            return Err(usage_of("layer", why.to_owned()));
        }
        (Some(_), _) => Backend::Simulator,
        (None, backend) => backend.into(),
    };
    let mut progress = Progress::new(if args.check { 3 } else { 2 });
    let (spec, lengths) = request(args)?;
    check_memory(&spec, &lengths, args.check)?;
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
    simulator::configure("layer", &context, &wanted)?;
    let tokens = lengths[lengths.len() - 1] as usize;
    let plan = Layer::packed(&context, spec, &lengths, tokens, args.decodes)
        .map_err(Failure::during("the layer is refused"))?;
    let workload = progress.step("inputs", || Workload::draw(args, spec, lengths));
    let outcome = progress.step("kernels", || measure(&context, &plan, &workload, args))?;
    let verdict = match args.check {
        true => Some(progress.step("reference", || workload.check(&outcome))?),
        false => None,
    };
    Ok(Report::new(
        args, &context, &plan, &workload, &outcome, verdict,
    ))
}

/// Tensors, states and what the check makes of them fit into the host's memory, roughly.
fn check_memory(s: &LayerSpec, cu_seqlens: &[i32], checks: bool) -> Result<(), Failure> {
    let sequences = cu_seqlens.len() as u128 - 1;
    let rows = cu_seqlens.last().map_or(0, |n| *n as u128);
    let values = (s.value_heads * s.value_dim) as u128;
    let channels = s.conv().total_channels() as u128;
    let state = values * s.key_dim as u128 + channels * s.width as u128;
    let each = if checks { 32 } else { 16 };
    check_host_memory(each * (rows * (channels + 2 * values) + sequences * state))
}

/// What is computed, and `cu_seqlens`.
fn request(args: &LayerArgs) -> Result<(LayerSpec, Vec<i32>), Failure> {
    let ([hk, hv], [k, v]) = match (args.model, args.heads) {
        (Some(model), _) => of_model("layer", model, args.tp)?,
        (None, Some(heads)) => (heads, args.dims),
        (None, None) => {
            let why = "one of --model and --heads is needed";
            return Err(usage_of("layer", why.to_owned()));
        }
    };
    let spec = LayerSpec {
        dtype: args.dtype,
        width: args.width.into(),
        allow_neg_eigval: args.neg_eigval || args.model.is_some_and(|m| m.neg_eigval),
        gate: args.output_gate.into(),
        segments: args.segments.map(|n| n as usize),
        ..LayerSpec::new(hk, hv, k, v)
    };
    let default = [1024];
    let prefills = match args.seqlens.is_empty() && args.decodes == 0 {
        true => &default[..],
        false => &args.seqlens,
    };
    let lengths = [&vec![1; args.decodes][..], prefills].concat();
    let cu_seqlens = cu_seqlens(&lengths).map_err(|tokens| {
        let why = format!("{tokens} tokens in all, they must be below 2^31");
        usage_of("layer", format!("invalid value for '--seqlens': {why}"))
    })?;
    Ok((spec, cu_seqlens))
}

impl Workload {
    fn draw(args: &LayerArgs, spec: LayerSpec, cu_seqlens: Vec<i32>) -> Self {
        let tokens = cu_seqlens[cu_seqlens.len() - 1] as usize;
        let sequences = cu_seqlens.len() - 1;
        let (channels, heads) = (spec.conv().total_channels(), spec.value_heads);
        let values = heads * spec.value_dim;
        let draw = |dtype, name: &str, n: usize| random_normal(dtype, name, n, args.seed);
        // Gates as models begin with: A from 1 to 16, softplus(dt_bias) from 0.001 to 0.1.
        let a_log = (0..heads).map(|h| ((h % 16 + 1) as f32).ln());
        let dt_bias = (0..heads).map(|h| (0.001 * 100f32.powf(h as f32 / heads as f32)).ln());
        Workload {
            spec,
            state_dtype: args.state_dtype,
            layout: args.layout,
            state_layout: args.state_layout.into(),
            cu_seqlens,
            decodes: args.decodes,
            tokens,
            projections: draw(spec.dtype, "x", tokens * (channels + values)),
            a: draw(spec.dtype, "a", tokens * heads),
            b: draw(spec.dtype, "b", tokens * heads),
            conv_weight: draw(spec.dtype, "weight", channels * spec.width),
            a_log: HostTensor::new(Dtype::F32, a_log.collect()),
            dt_bias: HostTensor::new(Dtype::F32, dt_bias.collect()),
            norm_weight: draw(Dtype::F32, "norm_weight", spec.value_dim),
            states: args.initial_state.then(|| {
                [
                    draw(
                        spec.dtype,
                        "conv_state",
                        sequences * channels * (spec.width - 1),
                    ),
                    draw(args.state_dtype, "state", sequences * values * spec.key_dim),
                ]
            }),
        }
    }

    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// Bytes that any implementation moves: rows of the projections, a, b and y; states that there are; weights.
    fn minimal_bytes(&self) -> usize {
        let s = &self.spec;
        let (channels, values) = (s.conv().total_channels(), s.value_heads * s.value_dim);
        let row = channels + 2 * values + 2 * s.value_heads;
        let state = values * s.key_dim * self.state_dtype.size()
            + channels * (s.width - 1) * s.dtype.size();
        let accesses = 1 + usize::from(self.states.is_some());
        let weights = [
            &self.conv_weight,
            &self.a_log,
            &self.dt_bias,
            &self.norm_weight,
        ];
        let weights: usize = weights.iter().map(|t| t.bytes.len()).sum();
        self.tokens * row * s.dtype.size() + self.sequences() * accesses * state + weights
    }

    fn check(&self, outcome: &Outcome) -> Result<Verdict, Failure> {
        let s = &self.spec;
        let (channels, values) = (s.conv().total_channels(), s.value_heads * s.value_dim);
        let rows = self.projections.values.chunks_exact(channels + values);
        let (x, z): (Vec<_>, Vec<_>) = rows.map(|row| row.split_at(channels)).unzip();
        let [conv_state, state] = match &self.states {
            Some(states) => states.each_ref().map(|t| Some(&t.values[..])),
            None => [None; 2],
        };
        let problem = LayerProblem {
            dtype: s.dtype,
            tokens: self.tokens,
            key_heads: s.key_heads,
            value_heads: s.value_heads,
            key_dim: s.key_dim,
            value_dim: s.value_dim,
            width: s.width,
            x: &x.concat(),
            z: &z.concat(),
            a: &self.a.values,
            b: &self.b.values,
            conv_weight: &self.conv_weight.values,
            conv_bias: None,
            a_log: &self.a_log.values,
            dt_bias: Some(&self.dt_bias.values),
            norm_weight: Some(&self.norm_weight.values),
            allow_neg_eigval: s.allow_neg_eigval,
            l2_norm: s.qk_l2norm,
            head_map: s.head_map,
            eps: s.eps.into(),
            silu: s.gate == OutputGate::Silu,
            cu_seqlens: &self.cu_seqlens,
            conv_state,
            state,
            has_initial_state: None,
            padding: None,
        };
        let (exact, chain) = (layer(&problem)?, unfused_layer(&problem)?);
        let rounded = |values: &[f64], dtype: Dtype| -> Vec<f32> {
            values.iter().map(|x| dtype.round(*x as f32)).collect()
        };
        let limit = |values: &[f64], reference: &[f64], dtype| {
            SMALL_SHAPE_SLACK * compare(&rounded(values, dtype), reference).rms_ratio
        };
        let conv_states = HostTensor::new(s.dtype, exact.conv_state);
        let pairs =
            (conv_states.bytes.chunks_exact(2)).zip(outcome.conv_state.bytes.chunks_exact(2));
        // An empty sequence leaves its slots as they were.
        let empty = |n: usize| self.cu_seqlens[n] == self.cu_seqlens[n + 1];
        let size = channels * (s.width - 1);
        let wrong = pairs
            .enumerate()
            .filter(|(i, (a, b))| a != b && !empty(i / size));
        let state_limit = limit(&chain.state, &exact.state, self.state_dtype);
        Ok(Verdict {
            y: compare(&outcome.y.values, &exact.y).rms_ratio,
            y_limit: limit(&chain.y, &exact.y, s.dtype),
            state: compare(&outcome.state.values, &exact.state).rms_ratio,
            state_limit: state_limit.max(LEAST_STATE_LIMIT),
            wrong_states: wrong.count(),
        })
    }
}

fn measure(
    context: &Context,
    plan: &Layer,
    w: &Workload,
    args: &LayerArgs,
) -> Result<Outcome, Failure> {
    let failed = Failure::during("the layer failed");
    let mut device = Device::new(context, plan, w).map_err(Failure::during(
        "the tensors cannot be brought to the device",
    ))?;
    let stream = context.stream().map_err(&failed)?;
    let mut outcome = fastest(
        args.repeat,
        || device.run(&stream, plan, w).map_err(&failed),
        |a, b| {
            let bits = |x: &Outcome| [&x.y, &x.conv_state, &x.state].map(|t| t.bytes.clone());
            bits(a) == bits(b)
        },
        |outcome| outcome.seconds,
    )?;
    if let Some(runs) = args.time {
        let times = time::measure(context, runs, &[("layer", ())], |stream, ()| {
            device.launch(stream, plan, w)
        });
        outcome.times = Some(times.map_err(&failed)?);
    }
    Ok(outcome)
}
