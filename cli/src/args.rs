//! What the command line says.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};
use deltawave::prefill::{CHUNK, MAX_HEAD_DIM};
use deltawave::runtime::Backend;
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::inputs::{Gates, Keys};
use deltawave_sim::gpu::Gpu;

use crate::conv;
use crate::conv::args::ConvArgs;
use crate::decode;
use crate::decode::args::DecodeArgs;
use crate::layer;
use crate::layer::args::LayerArgs;
use crate::models::{self, Model};

/// Gated DeltaNet kernels for AMD Instinct MI300 (gfx942), run and checked.
///
/// Where there is a GPU that this program has kernels for (through the HIP runtime, or the CUDA driver), they run there;
/// elsewhere the machine code for gfx942 runs on a simulator, on this machine's CPU.
#[derive(Debug, Parser)]
#[command(name = "deltawave", version, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show the runtime, the device and the kernels in this program
    ///
    /// Says which HIP runtime or CUDA driver was found, or what was tried; the device that kernels would run on; and the
    /// registers, LDS and spills of every kernel, as its code object states them. Works without a GPU.
    Info(InfoArgs),
    /// Run a chunked prefill and check it against an f64 recurrence
    ///
    /// Draws the inputs (or reads them from a file), runs the kernels, and reports time and, with --check, the error
    /// against the token recurrence in f64 beside the error of the unfused chunk form that other implementations use.
    #[command(after_long_help = PREFILL_EXAMPLES)]
    Prefill(Box<PrefillArgs>),
    /// Run the convolution before a prefill and check it against its reference
    ///
    /// Draws the projections, runs the causal depthwise convolution with SiLU that splits them into q, k and v and updates
    /// the conv states, and reports time and, with --check, how many outputs are the reference rounded once.
    #[command(after_long_help = conv::args::EXAMPLES)]
    Conv(Box<ConvArgs>),
    /// Run a decode, one or a few tokens of each sequence, and check it against an f64 recurrence
    ///
    /// Draws q, k, v, gates and states, runs the kernel in place on the states, and reports time and, with --check, the
    /// error against the token recurrence in f64 beside the error that rounding alone has.
    #[command(after_long_help = decode::args::EXAMPLES)]
    Decode(Box<DecodeArgs>),
    /// Run a whole layer, from the input projections to the output projection, and check it against an f64 layer
    ///
    /// Draws projections, weights and states, runs convolution, decode, prefill and gated norm in place on the states, and
    /// reports time and, with --check, the error against the layer in f64 beside the error that it may have: 1.15 times
    /// that of the same layer with the unfused chunk form that other implementations use.
    #[command(after_long_help = layer::args::EXAMPLES)]
    Layer(Box<LayerArgs>),
    /// Count what a prefill's kernels do: instructions, unit clocks, bank conflicts, memory lines, occupancy
    ///
    /// Runs the kernels on the simulator, whatever devices there are, and counts, exactly; only times are modelled.
    /// Clocks are sums over all waves of the time that a SIMD's matrix and vector units, and a compute unit's LDS, are
    /// busy, without any waiting; vector clocks include transcendental functions. Memory is counted in lines of 128
    /// bytes, each once for a launch (HBM unique) and once for each die (L2 fill), instructions left out.
    #[command(after_long_help = PROFILE_EXAMPLES)]
    Profile(Box<ProfileArgs>),
}

const PREFILL_EXAMPLES: &str = "\
Examples:
  One layer of a model, a batch of sequences of mixed lengths, checked:
    deltawave prefill --model qwen3.5-35b-a3b --seqlens 1,63,64,65,500 --check

  In place on a pool of states, with snapshots for a prefix cache:
    deltawave prefill --heads 2,4 --seqlens 300,100 --pool 8 --initial-state f32 --snapshots 128 --segments 1 --check

  Your own tensors (safetensors with q, k, v and g, beta or a, A_log, b), the results to a file, figures as JSON:
    deltawave prefill --input layer.safetensors --output result.safetensors --check --json

Exit status: 0 success, 1 failure (a check that does not pass, too), 2 wrong usage.";

const PROFILE_EXAMPLES: &str = "\
Examples:
  Where the clocks of a layer's prefill go:
    deltawave profile --heads 16,32 --seqlens 8192

  For a GPU of 80 compute units on 4 dies, as JSON, and a roofline diagram:
    deltawave profile --model qwen3.5-35b-a3b --seqlens 8192 --gpu mi308x --json --roofline prefill.svg

Exit status: 0 success, 1 failure (a check that does not pass, too), 2 wrong usage.";

/// `deltawave profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// What is run.
    #[command(flatten)]
    pub prefill: PrefillArgs,
    /// The GPU whose dies and units the counts are set against
    #[arg(long, value_name = "GPU", value_parser = gpu, default_value = "mi300x", help_heading = RUN)]
    pub gpu: Gpu,
    /// Write a roofline diagram to FILE, as SVG
    #[arg(long, value_name = "FILE", help_heading = RESULTS)]
    pub roofline: Option<PathBuf>,
}

pub fn gpu(name: &str) -> Result<Gpu, String> {
    Gpu::named(name).ok_or_else(|| {
        let names: Vec<&str> = Gpu::ALL.iter().map(|g| g.name).collect();
        format!("known are {}", names.join(", "))
    })
}

/// `deltawave info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// The device, where the HIP runtime has several
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Write the kernels to DIR/ARCH, with a list of how they are launched, for programs that load them themselves
    #[arg(long, value_name = "DIR")]
    pub save_kernels: Option<PathBuf>,
}

/// `deltawave prefill`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("shape").required(true).args(["model", "heads", "input"]))]
pub struct PrefillArgs {
    /// Heads and dimensions of a model's Gated DeltaNet layer
    #[arg(long, value_name = "NAME", value_parser = models::parser(), ignore_case = true, help_heading = SHAPE)]
    pub model: Option<&'static Model>,
    /// Number of devices that share the model's heads (tensor parallelism): run the part of one
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with_all = ["heads", "input"], help_heading = SHAPE)]
    pub tp: usize,
    /// Key heads and value heads; HV is a multiple of HK
    #[arg(long, value_name = "HK,HV", value_parser = heads, help_heading = SHAPE)]
    pub heads: Option<[usize; 2]>,
    /// Head dimensions of keys and of values: multiples of 16 up to 256
    #[arg(long, value_name = "K,V", value_parser = dims, default_value = "128,128", conflicts_with_all = ["model", "input"], help_heading = SHAPE)]
    pub dims: [usize; 2],
    /// Lengths of the sequences of a packed batch, 0 allowed [default: 1024]
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', value_parser = length, help_heading = SHAPE)]
    pub seqlens: Vec<usize>,
    /// Number of sequences of a dense batch, all of --len tokens
    #[arg(long, value_name = "B", requires = "len", conflicts_with = "seqlens",
        value_parser = clap::value_parser!(u32).range(1..1 << 24), help_heading = SHAPE)]
    pub batch: Option<u32>,
    /// Tokens of each sequence of a dense batch
    #[arg(long, value_name = "T", requires = "batch", value_parser = length, help_heading = SHAPE)]
    pub len: Option<usize>,
    /// Which key head a value head reads: h / (HV / HK), or h % HK
    #[arg(long, value_name = "MAP", value_enum, default_value_t = HeadMapArg::Grouped, help_heading = SHAPE)]
    pub head_map: HeadMapArg,

    /// Element type of q, k, v and o [default: bf16]
    #[arg(long, value_parser = words::<Dtype>(&["bf16", "fp16"]), help_heading = INPUTS)]
    pub dtype: Option<Dtype>,
    /// Seed of the drawn inputs [default: 0]
    #[arg(long, value_name = "N", help_heading = INPUTS)]
    pub seed: Option<u64>,
    /// Log gates: logsigmoid(N(0,1)); a sixteenth of that, and 0 on every fourth head; 0; about -22 per token [default:
    /// normal]
    #[arg(long, value_parser = words::<Gates>(&["normal", "mixed", "zero", "strong"]), conflicts_with = "raw_gates", help_heading = INPUTS)]
    pub gates: Option<Gates>,
    /// Rows of q and k before their norm: N(0,1), or silu(N(0,1)) [default: normal]
    #[arg(long, value_parser = words::<Keys>(&["normal", "silu"]), help_heading = INPUTS)]
    pub keys: Option<Keys>,
    /// Hand over a, b, A_log and dt_bias; the kernels compute g and beta
    #[arg(long, help_heading = INPUTS)]
    pub raw_gates: bool,
    /// beta up to 2: twice the sigmoid of b
    #[arg(long, help_heading = INPUTS)]
    pub neg_eigval: bool,
    /// The states that sequences start from: zeros, or drawn
    #[arg(long, value_name = "DTYPE", value_enum, help_heading = INPUTS)]
    pub initial_state: Option<InitialState>,
    /// Take the inputs from a safetensors file
    ///
    /// It holds q, k [T, HK, K] and v [T, HV, V] in bf16 or fp16, and optionally g and beta [T, HV] in f32 (or a, b [T,
    /// HV], A_log, dt_bias [HV]), cu_seqlens [N + 1] in i32 or i64, and initial_state [N, HV, K, V] in f32 or bf16.
    #[arg(long, value_name = "FILE", help_heading = INPUTS,
        conflicts_with_all = ["seqlens", "batch", "len", "dtype", "seed", "gates", "keys", "raw_gates", "initial_state"])]
    pub input: Option<PathBuf>,
    /// Write the inputs to a safetensors file, for --input
    #[arg(long, value_name = "FILE", help_heading = INPUTS)]
    pub save_input: Option<PathBuf>,

    /// Normalise q and k inside: x / sqrt(sum(x^2) + 1e-6)
    #[arg(long, help_heading = OPERATION)]
    pub l2norm: bool,
    /// Factor of the output; 0 is K^-0.5 [default: K^-0.5]
    #[arg(long, value_name = "X", value_parser = finite, allow_hyphen_values = true, help_heading = OPERATION)]
    pub scale: Option<f32>,
    /// Order of the states' dimensions in memory: [N, HV, K, V], or [N, HV, V, K]
    #[arg(long, value_name = "LAYOUT", value_enum, default_value_t = StateLayoutArg::KeyMajor, help_heading = OPERATION)]
    pub state_layout: StateLayoutArg,
    /// Element type of the final state
    #[arg(long, value_name = "DTYPE", value_parser = words::<Dtype>(&["f32", "bf16"]), default_value = "f32", help_heading = OPERATION)]
    pub state_dtype: Dtype,
    /// Keep the states in a pool of so many slots, in place; --check: those of no sequence stay as they are
    #[arg(long, value_name = "SLOTS", value_parser = clap::value_parser!(u32).range(1..1 << 24), help_heading = OPERATION)]
    pub pool: Option<u32>,
    /// Keep the state after every N tokens, a multiple of 64; --check: sequences are continued from their last one
    ///
    /// Continued from a state in f32, which these are, a sequence has the bits of the whole where that was not cut into
    /// segments (--segments 1); cut ones may differ by rounding.
    #[arg(long, value_name = "N", value_parser = snapshot_interval, help_heading = OPERATION)]
    pub snapshots: Option<usize>,

    /// Segments of the longest sequence, walked in parallel; 1: no sequence is cut [default: as many as take least time]
    ///
    /// Shorter sequences are cut into segments as long, and stay whole where they are not longer than that. The
    /// environment variable DELTAWAVE_SEGMENTS overrides this.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = OPERATION)]
    pub segments: Option<u32>,

    /// Where to run; hip is a GPU, NVIDIA's too; auto takes one where there is one, else the simulator
    #[arg(long, value_enum, default_value_t = BackendArg::Auto, help_heading = RUN)]
    pub backend: BackendArg,
    /// The device, where the HIP runtime has several
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = RUN)]
    pub device: usize,
    /// Matrix arithmetic of the simulator: f32 chains, or the published model of the hardware's rounding [default: fast]
    #[arg(long, value_enum, help_heading = RUN)]
    pub mfma: Option<MfmaArg>,
    /// Host threads at most: simulator, oracle, inputs [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), help_heading = RUN)]
    pub threads: Option<u16>,
    /// Run the kernels N times; the fastest run counts, and all have to give the same bits
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = RUN)]
    pub repeat: u32,

    /// Measure N runs on a GPU: replays of a graph, caches flushed before each; the median counts
    ///
    /// Each kernel is measured alone, too. A run is the time between two events of the device around one launch of the
    /// graph; before it a buffer larger than the last-level cache is filled. Replays before the first measured one
    /// bring the clocks up.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000), help_heading = RUN)]
    pub time: Option<u32>,

    /// Compare with the f64 recurrence; fail if the error is larger than allowed
    #[arg(long, help_heading = RESULTS)]
    pub check: bool,
    /// Write o and final_state ([N, HV, K, V], whatever --state-layout) to a safetensors file
    #[arg(long, value_name = "FILE", help_heading = RESULTS)]
    pub output: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long, help_heading = RESULTS)]
    pub json: bool,
}

pub const SHAPE: &str = "Shape";
pub const INPUTS: &str = "Inputs";
pub const OPERATION: &str = "Operation";
pub const RUN: &str = "Running";
pub const RESULTS: &str = "Results";

/// `--head-map`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum HeadMapArg {
    Grouped,
    Tiled,
}

impl From<HeadMapArg> for HeadMap {
    fn from(x: HeadMapArg) -> Self {
        match x {
            HeadMapArg::Grouped => HeadMap::Grouped,
            HeadMapArg::Tiled => HeadMap::Tiled,
        }
    }
}

/// `--state-layout`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum StateLayoutArg {
    KeyMajor,
    ValueMajor,
}

impl From<StateLayoutArg> for StateLayout {
    fn from(x: StateLayoutArg) -> Self {
        match x {
            StateLayoutArg::KeyMajor => StateLayout::KeyMajor,
            StateLayoutArg::ValueMajor => StateLayout::ValueMajor,
        }
    }
}

/// `--initial-state`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum InitialState {
    None,
    F32,
    Bf16,
}

impl InitialState {
    /// The element type, unless there is no initial state.
    pub fn dtype(self) -> Option<Dtype> {
        match self {
            InitialState::None => None,
            InitialState::F32 => Some(Dtype::F32),
            InitialState::Bf16 => Some(Dtype::Bf16),
        }
    }
}

/// `--backend`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum BackendArg {
    Auto,
    Hip,
    Simulator,
}

impl From<BackendArg> for Backend {
    fn from(x: BackendArg) -> Self {
        match x {
            BackendArg::Auto => Backend::Auto,
            BackendArg::Hip => Backend::Hip,
            BackendArg::Simulator => Backend::Simulator,
        }
    }
}

/// `--mfma`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum MfmaArg {
    Fast,
    Exact,
}

/// Words that the library parses, of which some are allowed here.
pub fn words<T>(allowed: &'static [&'static str]) -> impl TypedValueParser<Value = T>
where
    T: std::str::FromStr + Clone + Send + Sync + 'static,
    T::Err: std::error::Error + Send + Sync + 'static,
{
    PossibleValuesParser::new(allowed.iter().copied()).try_map(|word| word.parse())
}

pub fn pair(text: &str, names: &str) -> Result<[usize; 2], String> {
    let wrong = || format!("it must be two numbers, {names}");
    let (first, second) = text.split_once(',').ok_or_else(wrong)?;
    let number = |x: &str| x.trim().parse::<usize>().map_err(|_| wrong());
    Ok([number(first)?, number(second)?])
}

pub fn heads(text: &str) -> Result<[usize; 2], String> {
    let [hk, hv] = pair(text, "HK,HV")?;
    if hk == 0 {
        return Err("HK must be at least 1".to_owned());
    }
    if hv == 0 || !hv.is_multiple_of(hk) {
        return Err(format!("HV must be a multiple of HK: {hv} is none of {hk}"));
    }
    if hv >= 1 << 20 {
        return Err("HV must be below 2^20".to_owned());
    }
    Ok([hk, hv])
}

pub fn dims(text: &str) -> Result<[usize; 2], String> {
    let dims = pair(text, "K,V")?;
    for (name, dim) in ["K", "V"].into_iter().zip(dims) {
        if dim == 0 || dim > MAX_HEAD_DIM || !dim.is_multiple_of(16) {
            return Err(format!(
                "{name} must be a multiple of 16 from 16 to {MAX_HEAD_DIM}, and is {dim}"
            ));
        }
    }
    Ok(dims)
}

pub fn length(text: &str) -> Result<usize, String> {
    let n: usize = text
        .trim()
        .parse()
        .map_err(|_| "a length must be a whole number, at least 0".to_owned())?;
    if n > i32::MAX as usize {
        return Err("a length must be below 2^31".to_owned());
    }
    Ok(n)
}

/// Tokens from one snapshot to the next.
pub fn snapshot_interval(text: &str) -> Result<usize, String> {
    match length(text)? {
        n if n > 0 && n.is_multiple_of(CHUNK) => Ok(n),
        n => Err(format!(
            "it must be a multiple of {CHUNK} above 0, and is {n}"
        )),
    }
}

pub fn finite(text: &str) -> Result<f32, String> {
    match text.parse::<f32>() {
        Ok(x) if x.is_finite() => Ok(x),
        _ => Err("it must be a finite number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
