//! Arguments of a convolution.

use clap::{ArgGroup, Args};
use deltawave::conv::{Activation, ConvStateLayout};
use deltawave::types::Dtype;
use deltawave_lab::workload::RowLayout;

use crate::args::{
    Choices, CountArgs, INPUTS, ModelArgs, OPERATION, RESULTS, ROW_LAYOUTS, RunArgs, SHAPE, choice,
    length, pair, words,
};

/// `deltawave conv`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("shape").required(true).args(["model", "heads"]))]
pub struct ConvArgs {
    #[command(flatten)]
    pub shape: ModelArgs,
    /// Head dimensions of keys and of values
    #[arg(long, value_name = "K,V", value_parser = any_dims, default_value = "128,128", conflicts_with = "model", help_heading = SHAPE)]
    pub dims: [usize; 2],
    /// Lengths of the sequences of a packed batch, 0 allowed [default: 1024]
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', value_parser = length, help_heading = SHAPE)]
    pub seqlens: Vec<usize>,
    /// Order of a projection row. flat: q | k | v | z; interleaved: the same for each key head and its value heads
    #[arg(long, value_parser = choice(ROW_LAYOUTS), default_value = "flat", help_heading = SHAPE)]
    pub layout: RowLayout,

    /// Element type of x, q, k, v, the weights and the states
    #[arg(long, value_parser = words::<Dtype>(&["bf16", "fp16"]), default_value = "bf16", help_heading = INPUTS)]
    pub dtype: Dtype,
    /// Seed of the drawn inputs
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = INPUTS)]
    pub seed: u64,
    /// Add a bias to each channel
    #[arg(long, help_heading = INPUTS)]
    pub bias: bool,
    /// Start sequences from drawn states instead of zeros
    #[arg(long, help_heading = INPUTS)]
    pub initial_state: bool,

    /// Width of the convolution's window, in tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=4), default_value_t = 4, help_heading = OPERATION)]
    pub width: u8,
    /// Activation of the sums
    #[arg(long, value_parser = choice(ACTIVATIONS), default_value = "silu", help_heading = OPERATION)]
    pub activation: Activation,
    /// Normalise the rows of q and k (K at most 256): x / sqrt(sum(x^2) + 1e-6)
    #[arg(long, help_heading = OPERATION)]
    pub l2norm: bool,
    /// Compute g and beta in the same launch, from rows b | a in the order of --layout
    #[arg(long, help_heading = OPERATION)]
    pub gates: bool,
    /// Order of the states' dimensions in memory: [slots, channels, width - 1], or [slots, width - 1, channels]
    #[arg(long, value_name = "LAYOUT", value_parser = choice(CONV_STATE_LAYOUTS), default_value = "channel-major", help_heading = OPERATION)]
    pub state_layout: ConvStateLayout,

    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub count: CountArgs,

    /// Compare with the reference; fail if outputs exceed their error limit or any state differs
    #[arg(long, help_heading = RESULTS)]
    pub check: bool,
    /// Print one JSON object
    #[arg(long, help_heading = RESULTS)]
    pub json: bool,
}

/// `--activation`.
pub const ACTIVATIONS: Choices<Activation> =
    &[("silu", Activation::Silu), ("none", Activation::None)];

/// `--state-layout`.
pub const CONV_STATE_LAYOUTS: Choices<ConvStateLayout> = &[
    ("channel-major", ConvStateLayout::ChannelMajor),
    ("token-major", ConvStateLayout::TokenMajor),
];

fn any_dims(text: &str) -> Result<[usize; 2], String> {
    let dims = pair(text, "K,V")?;
    if dims.iter().any(|d| !(1..1 << 20).contains(d)) {
        return Err("K and V must be at least 1 and below 2^20".to_owned());
    }
    Ok(dims)
}
