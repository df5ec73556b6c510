//! What the command line says of a layer.

use clap::{ArgGroup, Args, ValueEnum};
use deltawave::norm::OutputGate;
use deltawave::types::Dtype;
use deltawave_sim::gpu::Gpu;

use crate::args::{
    BackendArg, INPUTS, OPERATION, RESULTS, RUN, SHAPE, StateLayoutArg, dims, gpu, heads, length,
    words,
};
use crate::conv::args::LayoutArg;
use crate::models::{self, Model};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  One layer of a model: two sequences that are decoded, two that are prefilled, checked:
    deltawave layer --model qwen3.5-35b-a3b --decodes 2 --seqlens 64,100 --initial-state --check

  Decoding a batch of 32, its bytes and how long it would take, modelled:
    deltawave layer --heads 16,32 --decodes 32 --initial-state --count mi300x --json

Exit status: 0 success, 1 failure (a check that does not pass, too), 2 wrong usage.";

/// `deltawave layer`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("shape").required(true).args(["model", "heads"]))]
pub struct LayerArgs {
    /// Heads and dimensions of a model's Gated DeltaNet layer
    #[arg(long, value_name = "NAME", value_parser = models::parser(), ignore_case = true, help_heading = SHAPE)]
    pub model: Option<&'static Model>,
    /// Number of devices that share the model's heads (tensor parallelism): run the part of one
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "heads", help_heading = SHAPE)]
    pub tp: usize,
    /// Key heads and value heads; HV is a multiple of HK
    #[arg(long, value_name = "HK,HV", value_parser = heads, help_heading = SHAPE)]
    pub heads: Option<[usize; 2]>,
    /// Head dimensions of keys and of values, multiples of 16 up to 256
    #[arg(long, value_name = "K,V", value_parser = dims, default_value = "128,128", conflicts_with = "model", help_heading = SHAPE)]
    pub dims: [usize; 2],
    /// Sequences of one token each, which are decoded, before those of --seqlens
    #[arg(long, value_name = "N", value_parser = length, default_value_t = 0, help_heading = SHAPE)]
    pub decodes: usize,
    /// Lengths of the sequences that are prefilled, 0 allowed [default: 1024 without --decodes]
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', value_parser = length, help_heading = SHAPE)]
    pub seqlens: Vec<usize>,
    /// Rows of the projections: q | k | v | z and b | a, or those of each key head and its value heads
    #[arg(long, value_enum, default_value_t = LayoutArg::Flat, help_heading = SHAPE)]
    pub layout: LayoutArg,

    /// Element type of the projections, y, the weights of the convolution and its states
    #[arg(long, value_parser = words::<Dtype>(&["bf16", "fp16"]), default_value = "bf16", help_heading = INPUTS)]
    pub dtype: Dtype,
    /// Seed of the drawn inputs
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = INPUTS)]
    pub seed: u64,
    /// Sequences start from drawn states, not from zeros
    #[arg(long, help_heading = INPUTS)]
    pub initial_state: bool,

    /// Tokens that an output of the convolution depends on
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=4), default_value_t = 4, help_heading = OPERATION)]
    pub width: u8,
    /// Double beta, as OLMo-Hybrid does
    #[arg(long, help_heading = OPERATION)]
    pub neg_eigval: bool,
    /// What the norm makes of z
    #[arg(long, value_enum, default_value_t = GateArg::Silu, help_heading = OPERATION)]
    pub output_gate: GateArg,
    /// Order of the recurrent states' dimensions in memory: [slots, HV, K, V], or [slots, HV, V, K]
    #[arg(long, value_name = "LAYOUT", value_enum, default_value_t = StateLayoutArg::KeyMajor, help_heading = OPERATION)]
    pub state_layout: StateLayoutArg,
    /// Element type of the recurrent states
    #[arg(long, value_parser = words::<Dtype>(&["f32", "bf16"]), default_value = "f32", help_heading = OPERATION)]
    pub state_dtype: Dtype,
    /// Segments of the longest sequence that is prefilled [default: as many as take least time]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = OPERATION)]
    pub segments: Option<u32>,

    /// Where to run; hip is a GPU, NVIDIA's too; auto takes one where there is one, else the simulator
    #[arg(long, value_enum, default_value_t = BackendArg::Auto, help_heading = RUN)]
    pub backend: BackendArg,
    /// The device, where the HIP runtime has several
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = RUN)]
    pub device: usize,
    /// Host threads at most: simulator, oracle, inputs [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), help_heading = RUN)]
    pub threads: Option<u16>,
    /// Run the kernels N times, each from the same states; the fastest run counts, and all have to give the same bits
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = RUN)]
    pub repeat: u32,
    /// Measure N runs on a GPU: replays of a graph, caches flushed before each; the median counts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000), help_heading = RUN)]
    pub time: Option<u32>,
    /// Count on the simulator what the kernels do, set against a GPU's units; only times are modelled
    #[arg(long, value_name = "GPU", value_parser = gpu, conflicts_with_all = ["time", "repeat"], help_heading = RUN)]
    pub count: Option<Gpu>,

    /// Compare with the f64 layer; fail if the error is above that of the chain of kernels that others use
    #[arg(long, help_heading = RESULTS)]
    pub check: bool,
    /// Print one JSON object
    #[arg(long, help_heading = RESULTS)]
    pub json: bool,
}

/// `--output-gate`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum GateArg {
    Silu,
    Sigmoid,
}

impl From<GateArg> for OutputGate {
    fn from(x: GateArg) -> Self {
        match x {
            GateArg::Silu => OutputGate::Silu,
            GateArg::Sigmoid => OutputGate::Sigmoid,
        }
    }
}
