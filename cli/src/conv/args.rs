//! What the command line says of a convolution.

use clap::{ArgGroup, Args, ValueEnum};
use deltawave::conv::{Activation, ConvStateLayout};
use deltawave::types::Dtype;
use deltawave_sim::gpu::Gpu;

use crate::args::{BackendArg, INPUTS, OPERATION, RESULTS, RUN, SHAPE, gpu, heads, length, words};
use crate::models::{self, Model};

/// What `--help` ends with.
pub const EXAMPLES: &str = "\
Examples:
  One layer of a model, a batch of sequences of mixed lengths, checked:
    deltawave conv --model qwen3.5-35b-a3b --seqlens 1,3,64,500 --initial-state --check

  All that comes before a prefill in one launch, the norms of q and k and the gates, too:
    deltawave conv --model qwen3.5-35b-a3b --l2norm --gates --check

  The bytes that are moved, and how long that would take, modelled:
    deltawave conv --heads 16,32 --seqlens 8192 --count mi300x --json

Exit status: 0 success, 1 failure (a check that does not pass, too), 2 wrong usage.";

/// `deltawave conv`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("shape").required(true).args(["model", "heads"]))]
pub struct ConvArgs {
    /// Heads and dimensions of a model's Gated DeltaNet layer
    #[arg(long, value_name = "NAME", value_parser = models::parser(), ignore_case = true, help_heading = SHAPE)]
    pub model: Option<&'static Model>,
    /// Number of devices that share the model's heads (tensor parallelism): run the part of one
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "heads", help_heading = SHAPE)]
    pub tp: usize,
    /// Key heads and value heads; HV is a multiple of HK
    #[arg(long, value_name = "HK,HV", value_parser = heads, help_heading = SHAPE)]
    pub heads: Option<[usize; 2]>,
    /// Head dimensions of keys and of values
    #[arg(long, value_name = "K,V", value_parser = any_dims, default_value = "128,128", conflicts_with = "model", help_heading = SHAPE)]
    pub dims: [usize; 2],
    /// Lengths of the sequences of a packed batch, 0 allowed [default: 1024]
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', value_parser = length, help_heading = SHAPE)]
    pub seqlens: Vec<usize>,
    /// Rows of the projections: q | k | v | z, or that of each key head and its value heads
    #[arg(long, value_enum, default_value_t = LayoutArg::Flat, help_heading = SHAPE)]
    pub layout: LayoutArg,

    /// Element type of x, q, k, v, the weights and the states
    #[arg(long, value_parser = words::<Dtype>(&["bf16", "fp16"]), default_value = "bf16", help_heading = INPUTS)]
    pub dtype: Dtype,
    /// Seed of the drawn inputs
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = INPUTS)]
    pub seed: u64,
    /// With a bias for each channel
    #[arg(long, help_heading = INPUTS)]
    pub bias: bool,
    /// Sequences start from drawn states, not from zeros
    #[arg(long, help_heading = INPUTS)]
    pub initial_state: bool,

    /// Tokens that an output depends on
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=4), default_value_t = 4, help_heading = OPERATION)]
    pub width: u8,
    /// What is done with the sums
    #[arg(long, value_enum, default_value_t = ActivationArg::Silu, help_heading = OPERATION)]
    pub activation: ActivationArg,
    /// Normalise the rows of q and k, of K up to 256: x / sqrt(sum(x^2) + 1e-6)
    #[arg(long, help_heading = OPERATION)]
    pub l2norm: bool,
    /// Compute g and beta in the same launch, of rows b | a, or those of each key head and its value heads
    #[arg(long, help_heading = OPERATION)]
    pub gates: bool,
    /// Order of the states' dimensions in memory: [slots, channels, width - 1], or [slots, width - 1, channels]
    #[arg(long, value_name = "LAYOUT", value_enum, default_value_t = StateLayoutArg::ChannelMajor, help_heading = OPERATION)]
    pub state_layout: StateLayoutArg,

    /// Where to run; hip is a GPU, NVIDIA's too; auto takes one where there is one, else the simulator
    #[arg(long, value_enum, default_value_t = BackendArg::Auto, help_heading = RUN)]
    pub backend: BackendArg,
    /// The device, where the HIP runtime has several
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = RUN)]
    pub device: usize,
    /// Host threads at most: simulator, oracle, inputs [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), help_heading = RUN)]
    pub threads: Option<u16>,
    /// Run the kernel N times; the fastest run counts, and all have to give the same bits
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = RUN)]
    pub repeat: u32,
    /// Measure N runs on a GPU: replays of a graph, caches flushed before each; the median counts
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000), help_heading = RUN)]
    pub time: Option<u32>,
    /// Count on the simulator what the kernel does, set against a GPU's units; only times are modelled
    #[arg(long, value_name = "GPU", value_parser = gpu, conflicts_with_all = ["time", "repeat"], help_heading = RUN)]
    pub count: Option<Gpu>,

    /// Compare with the reference; fail if the outputs differ more than allowed, or the states at all
    #[arg(long, help_heading = RESULTS)]
    pub check: bool,
    /// Print one JSON object
    #[arg(long, help_heading = RESULTS)]
    pub json: bool,
}

/// `--layout`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LayoutArg {
    Flat,
    Interleaved,
}

impl LayoutArg {
    /// The column that holds a channel of q, k, v and z, in this order, of so many heads and dimensions.
    pub fn column(self, heads: [usize; 2], dims: [usize; 2], channel: usize) -> usize {
        if self == LayoutArg::Flat {
            return channel;
        }
        let [hk, hv] = heads;
        // Of a key head.
        let sizes = [dims[0], dims[0], hv / hk * dims[1], hv / hk * dims[1]];
        let group: usize = sizes.iter().sum();
        let (mut c, mut offset) = (channel, 0);
        for size in sizes {
            if c < hk * size {
                return c / size * group + offset + c % size;
            }
            c -= hk * size;
            offset += size;
        }
        channel
    }

    /// Its name here.
    pub fn name(self) -> &'static str {
        match self {
            LayoutArg::Flat => "flat",
            LayoutArg::Interleaved => "interleaved",
        }
    }
}

/// `--activation`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum ActivationArg {
    Silu,
    None,
}

impl From<ActivationArg> for Activation {
    fn from(x: ActivationArg) -> Self {
        match x {
            ActivationArg::Silu => Activation::Silu,
            ActivationArg::None => Activation::None,
        }
    }
}

/// `--state-layout`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum StateLayoutArg {
    ChannelMajor,
    TokenMajor,
}

impl From<StateLayoutArg> for ConvStateLayout {
    fn from(x: StateLayoutArg) -> Self {
        match x {
            StateLayoutArg::ChannelMajor => ConvStateLayout::ChannelMajor,
            StateLayoutArg::TokenMajor => ConvStateLayout::TokenMajor,
        }
    }
}

fn any_dims(text: &str) -> Result<[usize; 2], String> {
    let dims = crate::args::pair(text, "K,V")?;
    if dims.iter().any(|d| !(1..1 << 20).contains(d)) {
        return Err("K and V must be at least 1 and below 2^20".to_owned());
    }
    Ok(dims)
}
