//! Arguments of a layer.

use clap::{ArgGroup, Args};
use deltawave::norm::OutputGate;
use deltawave::prefill::PrefillPath;
use deltawave::types::Dtype;
use deltawave_lab::workload::RowLayout;

use crate::args::{
    Choices, CountArgs, DimsArgs, INPUTS, ModelArgs, OPERATION, PATHS, RESULTS, ROW_LAYOUTS,
    RunArgs, SHAPE, StateArgs, choice, length, words,
};

/// `deltawave layer`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("shape").required(true).args(["model", "heads"]))]
pub struct LayerArgs {
    #[command(flatten)]
    pub shape: ModelArgs,
    #[command(flatten)]
    pub dims: DimsArgs,
    /// Number of sequences of one token, which are decoded; they come before the sequences of --seqlens
    #[arg(long, value_name = "N", value_parser = length, default_value_t = 0, help_heading = SHAPE)]
    pub decodes: usize,
    /// Lengths of prefilled sequences, 0 allowed [default: 1024 without --decodes]
    #[arg(long, value_name = "LENGTHS", value_delimiter = ',', value_parser = length, help_heading = SHAPE)]
    pub seqlens: Vec<usize>,
    /// Order of projection rows. flat: q | k | v | z and b | a; interleaved: the same for each key head and its value heads
    #[arg(long, value_parser = choice(ROW_LAYOUTS), default_value = "flat", help_heading = SHAPE)]
    pub layout: RowLayout,

    /// Element type of the projections, y, the weights of the convolution and its states
    #[arg(long, value_parser = words::<Dtype>(&["bf16", "fp16"]), default_value = "bf16", help_heading = INPUTS)]
    pub dtype: Dtype,
    /// Seed of the drawn inputs
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = INPUTS)]
    pub seed: u64,
    /// Start sequences from drawn states instead of zeros
    #[arg(long, help_heading = INPUTS)]
    pub initial_state: bool,

    /// Width of the convolution's window, in tokens
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(2..=4), default_value_t = 4, help_heading = OPERATION)]
    pub width: u8,
    /// Double beta, up to 2 (negative eigenvalues)
    #[arg(long, help_heading = OPERATION)]
    pub neg_eigval: bool,
    /// Activation of z, the gate of the norm
    #[arg(long, value_parser = choice(OUTPUT_GATES), default_value = "silu", help_heading = OPERATION)]
    pub output_gate: OutputGate,
    #[command(flatten)]
    pub state: StateArgs,
    /// Number of segments of each prefilled sequence [default: the fastest numbers]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = OPERATION)]
    pub segments: Option<u32>,
    /// Kernels of the prefill, as of `deltawave prefill`
    #[arg(long, value_parser = choice(PATHS), default_value = "auto", help_heading = OPERATION)]
    pub path: PrefillPath,

    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub count: CountArgs,

    /// Compare with the f64 layer; fail if the error exceeds the unfused chunk form's
    #[arg(long, help_heading = RESULTS)]
    pub check: bool,
    /// Print one JSON object
    #[arg(long, help_heading = RESULTS)]
    pub json: bool,
}

/// `--output-gate`.
pub const OUTPUT_GATES: Choices<OutputGate> =
    &[("silu", OutputGate::Silu), ("sigmoid", OutputGate::Sigmoid)];
