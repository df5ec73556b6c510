//! `deltawave conv`: a convolution of drawn projections, run and checked.

pub mod args;
mod device;
mod report;

use deltawave::conv::{Activation, Conv, ConvSpec, ConvStateLayout};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::types::Dtype;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::metrics::{UlpComparison, compare_ulps};
use deltawave_lab::oracle::conv::{ConvProblem, RowNorms, conv};
use deltawave_lab::oracle::gates;
use deltawave_sim::hip::{CountedLaunch, KernelStatistics};

use self::args::{ConvArgs, LayoutArg};
use self::device::Device;
pub use self::report::Report;
use crate::args::BackendArg;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::repeat::fastest;
use crate::simulator::{self, Wanted};
use crate::time::{self, Times};
use crate::workload::{check_host_memory, cu_seqlens, of_model, usage_of};

/// Elements of at least this share must be the reference rounded once.
const LEAST_EQUAL_SHARE: f64 = 0.999;
/// The others may be further from it by so many units in the last place.
const MOST_ULPS: u32 = 1;
/// Relative error that an element of g or beta may have.
const GATE_LIMIT: f64 = 2e-6;

/// A convolution with its tensors on the host.
struct Workload {
    spec: ConvSpec,
    layout: LayoutArg,
    state_layout: ConvStateLayout,
    cu_seqlens: Vec<i32>,
    /// `T`.
    tokens: usize,
    /// `[T, columns]`, z included.
    x: HostTensor,
    /// `[channels, width]`.
    weight: HostTensor,
    /// `[channels]`.
    bias: Option<HostTensor>,
    /// `[N, channels, width - 1]`.
    state: Option<HostTensor>,
    gates: Option<GateInputs>,
}

/// What g and beta are made of.
struct GateInputs {
    /// `[T, 2 HV]`: rows `b | a`, or such of each key head.
    ba: HostTensor,
    /// `[HV]`.
    a_log: HostTensor,
    dt_bias: HostTensor,
}

/// What the device computed.
struct Outcome {
    /// q, k and v.
    out: [HostTensor; 3],
    /// `[N, channels, width - 1]`.
    state: HostTensor,
    /// g and beta, `[T, HV]`.
    gates: Option<[Vec<f32>; 2]>,
    /// Seconds of the fastest run: of this host on the simulator, else between events of the device.
    seconds: f64,
    simulated: Option<KernelStatistics>,
    counted: Option<CountedLaunch>,
    times: Option<Times>,
}

impl Outcome {
    fn has_bits_of(&self, other: &Outcome) -> bool {
        let bits = |gates: &Option<[Vec<f32>; 2]>| {
            let all = gates.iter().flatten().flatten();
            all.map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let mut outs = self.out.iter().zip(&other.out);
        outs.all(|(a, b)| a.bytes == b.bytes)
            && self.state.bytes == other.state.bytes
            && bits(&self.gates) == bits(&other.gates)
    }
}

/// How far that is from the reference.
#[derive(Clone, Copy)]
struct Verdict {
    out: UlpComparison,
    /// Elements of the states that have other bits.
    wrong_states: usize,
    /// Largest relative error of g and beta.
    gates: Option<f64>,
}

impl Verdict {
    fn passed(&self) -> bool {
        let out = &self.out;
        // A single element is more than its share of few.
        (out.equal_share() >= LEAST_EQUAL_SHARE || out.different <= 2)
            && out.max_ulps <= MOST_ULPS
            && self.wrong_states == 0
            && self.gates.is_none_or(|error| error <= GATE_LIMIT)
    }
}

/// Runs what the arguments ask for.
pub fn run(args: &ConvArgs) -> Result<Report, Failure> {
    if let Some(threads) = args.threads {
        // A second pool would be refused, and there is none yet.
        let _ = rayon::ThreadPoolBuilder::new()
            .num_threads(threads.into())
            .build_global();
    }
    let backend = match (args.count, args.backend) {
        (Some(_), BackendArg::Hip) => {
            let why = "--count counts on the simulator: --backend hip is not for it";
            return Err(usage_of("conv", why.to_owned()));
        }
        (Some(_), _) => Backend::Simulator,
        (None, backend) => backend.into(),
    };
    let mut progress = Progress::new(if args.check { 3 } else { 2 });
    let (spec, lengths) = request(args)?;
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
    simulator::configure("conv", &context, &wanted)?;
    let tokens = lengths[lengths.len() - 1] as usize;
    let plan = Conv::packed(&context, spec, &lengths, tokens)
        .map_err(Failure::during("the convolution is refused"))?;
    check_memory(args, &spec, lengths.len(), tokens)?;
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

/// What is computed, and `cu_seqlens`.
fn request(args: &ConvArgs) -> Result<(ConvSpec, Vec<i32>), Failure> {
    let ([hk, hv], [k, v]) = match (args.model, args.heads) {
        (Some(model), _) => of_model("conv", model, args.tp)?,
        (None, Some(heads)) => (heads, args.dims),
        (None, None) => {
            let why = "one of --model and --heads is needed";
            return Err(usage_of("conv", why.to_owned()));
        }
    };
    let spec = ConvSpec {
        dtype: args.dtype,
        width: args.width.into(),
        activation: args.activation.into(),
        qk_l2norm: args.l2norm,
        ..ConvSpec::new(hk, hv, k, v)
    };
    let default = [1024];
    let lengths = match args.seqlens.is_empty() {
        true => &default[..],
        false => &args.seqlens,
    };
    let cu_seqlens = cu_seqlens(lengths).map_err(|tokens| {
        let why = format!("{tokens} tokens in all, they must be below 2^31");
        usage_of("conv", format!("invalid value for '--seqlens': {why}"))
    })?;
    Ok((spec, cu_seqlens))
}

/// Fails where the host cannot hold the tensors, their copies on the simulated device, and the reference.
fn check_memory(
    args: &ConvArgs,
    spec: &ConvSpec,
    sequences: usize,
    tokens: usize,
) -> Result<(), Failure> {
    let each = if args.check { 32 } else { 16 };
    let rows = tokens + sequences * spec.width;
    check_host_memory(each * rows as u128 * columns(spec) as u128)
}

impl Workload {
    fn draw(args: &ConvArgs, spec: ConvSpec, cu_seqlens: Vec<i32>) -> Self {
        let tokens = cu_seqlens[cu_seqlens.len() - 1] as usize;
        let channels = spec.total_channels();
        let draw = |name: &str, n: usize| random_normal(spec.dtype, name, n, args.seed);
        let states = (cu_seqlens.len() - 1) * channels * (spec.width - 1);
        let columns = columns(&spec);
        Workload {
            spec,
            layout: args.layout,
            state_layout: args.state_layout.into(),
            cu_seqlens,
            tokens,
            x: draw("x", tokens * columns),
            weight: draw("weight", channels * spec.width),
            bias: args.bias.then(|| draw("bias", channels)),
            state: args.initial_state.then(|| draw("conv_state", states)),
            gates: args.gates.then(|| GateInputs {
                ba: draw("ba", 2 * tokens * spec.value_heads),
                a_log: random_normal(Dtype::F32, "a_log", spec.value_heads, args.seed),
                dt_bias: random_normal(Dtype::F32, "dt_bias", spec.value_heads, args.seed),
            }),
        }
    }

    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// Bytes that any implementation moves: channels of x and outputs, weights, states, gates.
    fn minimal_bytes(&self) -> usize {
        let channels = self.spec.total_channels();
        let states = self.sequences() * channels * (self.spec.width - 1);
        let read = if self.state.is_some() { states } else { 0 };
        let weights = self.weight.values.len() + self.bias.as_ref().map_or(0, |b| b.values.len());
        let size = self.spec.dtype.size();
        let of_gates = match &self.gates {
            Some(_) => 2 * self.tokens * self.spec.value_heads * (size + 4),
            None => 0,
        };
        (2 * self.tokens * channels + weights + states + read) * size + of_gates
    }

    /// Key heads whose a and b lie together.
    fn gate_groups(&self) -> usize {
        match self.layout {
            LayoutArg::Flat => 1,
            LayoutArg::Interleaved => self.spec.key_heads,
        }
    }

    /// The largest relative error of g and beta.
    fn gate_error(&self, inputs: &GateInputs, [g, beta]: &[Vec<f32>; 2]) -> f64 {
        let heads = self.spec.value_heads;
        let each = heads / self.gate_groups();
        let relative = |found: f32, exact: f64| {
            let error = (f64::from(found) - exact).abs() / exact.abs();
            if error.is_nan() { f64::INFINITY } else { error }
        };
        let errors = (0..g.len()).map(|i| {
            let h = i % heads;
            let at = i / heads * 2 * heads + h / each * 2 * each + h % each;
            let (b, a) = (inputs.ba.values[at], inputs.ba.values[at + each]);
            // Their sum is one of f32.
            let sum = f64::from(a + inputs.dt_bias.values[h]);
            let gate = gates::log_gate(sum, inputs.a_log.values[h].into(), 0.0);
            relative(g[i], gate).max(relative(beta[i], gates::beta(b.into(), false)))
        });
        errors.fold(0.0, f64::max)
    }

    /// The column of x that holds a channel.
    fn column(&self, channel: usize) -> usize {
        let s = &self.spec;
        let (heads, dims) = ([s.key_heads, s.value_heads], [s.key_dim, s.value_dim]);
        self.layout.column(heads, dims, channel)
    }

    fn check(&self, outcome: &Outcome) -> Result<Verdict, Failure> {
        let s = &self.spec;
        let channels = s.total_channels();
        let of_channel: Vec<usize> = (0..channels).map(|c| self.column(c)).collect();
        let rows = self.x.values.chunks_exact(columns(s));
        let x: Vec<f32> = rows
            .flat_map(|row| of_channel.iter().map(|c| row[*c]))
            .collect();
        let solution = conv(&ConvProblem {
            tokens: self.tokens,
            channels,
            width: s.width,
            x: &x,
            weight: &self.weight.values,
            bias: self.bias.as_ref().map(|b| &b.values[..]),
            silu: s.activation == Activation::Silu,
            norms: s.qk_l2norm.then_some(RowNorms {
                channels: 2 * s.key_heads * s.key_dim,
                dim: s.key_dim,
            }),
            cu_seqlens: &self.cu_seqlens,
            state: self.state.as_ref().map(|t| &t.values[..]),
            columns: s.width - 1,
            has_initial_state: None,
            padding: None,
        })?;
        let mut out = UlpComparison::default();
        let mut before = 0;
        for (t, n) in outcome.out.iter().zip(s.channels()) {
            let rows = solution.y.chunks_exact(channels);
            let reference: Vec<f64> = rows
                .flat_map(|row| &row[before..before + n])
                .copied()
                .collect();
            out = out.and(compare_ulps(t, &reference));
            before += n;
        }
        let states = HostTensor::new(s.dtype, solution.state);
        let pairs = states
            .bytes
            .chunks_exact(2)
            .zip(outcome.state.bytes.chunks_exact(2));
        // An empty sequence leaves its slot as it was.
        let size = channels * (s.width - 1);
        let empty = |n: usize| self.cu_seqlens[n] == self.cu_seqlens[n + 1];
        let wrong = pairs
            .enumerate()
            .filter(|(i, (a, b))| a != b && !empty(i / size));
        Ok(Verdict {
            out,
            wrong_states: wrong.count(),
            gates: (self.gates.as_ref().zip(outcome.gates.as_ref()))
                .map(|(inputs, found)| self.gate_error(inputs, found)),
        })
    }
}

/// Columns of a row of x: q, k, v and z.
fn columns(spec: &ConvSpec) -> usize {
    let [q, k, v] = spec.channels();
    q + k + 2 * v
}

fn measure(
    context: &Context,
    plan: &Conv,
    w: &Workload,
    args: &ConvArgs,
) -> Result<Outcome, Failure> {
    let failed = Failure::during("the convolution failed");
    let mut device = Device::new(context, w).map_err(Failure::during(
        "the tensors cannot be brought to the device",
    ))?;
    let stream = context.stream().map_err(&failed)?;
    let mut best = fastest(
        args.repeat,
        || device.run(&stream, plan, w).map_err(&failed),
        Outcome::has_bits_of,
        |outcome| outcome.seconds,
    )?;
    if let Some(replays) = args.time {
        let parts = [("conv", ())];
        let launch = |stream: &Stream, ()| device.launch(stream, plan, w);
        best.times = Some(time::measure(context, replays, &parts, launch).map_err(&failed)?);
    }
    Ok(best)
}

impl Workload {
    /// Bytes of states `[N, channels, width - 1]` in the layout of the pool, or the other way.
    fn reordered(&self, bytes: &[u8], to_pool: bool) -> Vec<u8> {
        let (channels, columns) = (self.spec.total_channels(), self.spec.width - 1);
        if self.state_layout == ConvStateLayout::ChannelMajor {
            return bytes.to_vec();
        }
        let (rows, size) = (if to_pool { columns } else { channels }, channels * columns);
        let from =
            |i: usize| i / size * size + i % size % (size / rows) * rows + i % size / (size / rows);
        let elements = (0..bytes.len() / 2).map(from);
        elements
            .flat_map(|i| [bytes[2 * i], bytes[2 * i + 1]])
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};

    fn parsed(arguments: &[&str]) -> Workload {
        let all = ["deltawave", "conv", "--heads", "1,2", "--dims", "2,3"];
        let cli = Cli::try_parse_from(all.iter().chain(arguments)).unwrap();
        let Command::Conv(args) = cli.command else {
            panic!("another command")
        };
        let (spec, lengths) = request(&args).unwrap();
        Workload::draw(&args, spec, lengths)
    }

    #[test]
    fn states_go_to_their_layout_and_back() {
        let w = parsed(&[
            "--state-layout",
            "token-major",
            "--seqlens",
            "1,2",
            "--width",
            "3",
        ]);
        // Two sequences, ten channels, two columns.
        let states: Vec<u8> = (0..40).flat_map(|i| [i, 0]).collect();
        let pool = w.reordered(&states, true);
        assert_eq!(pool[2 * 20..2 * 23], [20, 0, 22, 0, 24, 0]);
        assert_eq!(pool[2 * 10], 1);
        assert_eq!(w.reordered(&pool, false), states);
    }

    #[test]
    fn columns_of_channels() {
        let flat = parsed(&["--seqlens", "2"]);
        assert_eq!(flat.column(9), 9);
        assert_eq!(flat.minimal_bytes(), 2 * (2 * 2 * 10 + 40 + 30));
        let mut grouped = parsed(&["--seqlens", "2", "--layout", "interleaved"]);
        (grouped.spec.key_heads, grouped.spec.value_heads) = (2, 4);
        // Groups of 2 + 2 + 6 + 6 columns.
        let columns = [0, 3, 4, 7, 8, 13, 14].map(|c| grouped.column(c));
        assert_eq!(columns, [0, 17, 2, 19, 4, 9, 20]);
    }
}
