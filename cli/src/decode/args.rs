//! Arguments of a decode.

use clap::{ArgGroup, Args};
use deltawave::types::{Dtype, HeadMap};
use deltawave_lab::inputs::Gates;

use crate::args::{
    CountArgs, DimsArgs, HEAD_MAPS, INPUTS, ModelArgs, OPERATION, RESULTS, RunArgs, SHAPE,
    ScaleArgs, StateArgs, choice, words,
};

/// `deltawave decode`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("shape").required(true).args(["model", "heads"]))]
pub struct DecodeArgs {
    #[command(flatten)]
    pub shape: ModelArgs,
    #[command(flatten)]
    pub dims: DimsArgs,
    /// Number of sequences
    #[arg(long, value_name = "B", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..1 << 24), help_heading = SHAPE)]
    pub batch: u32,
    /// Number of tokens of each sequence
    #[arg(long, value_name = "T", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=16), help_heading = SHAPE)]
    pub tokens: u8,
    /// Which key head a value head reads: h / (HV / HK), or h % HK
    #[arg(long, value_name = "MAP", value_parser = choice(HEAD_MAPS), default_value = "grouped", help_heading = SHAPE)]
    pub head_map: HeadMap,

    /// Element type of q, k, v and o
    #[arg(long, value_parser = words::<Dtype>(&["bf16", "fp16"]), default_value = "bf16", help_heading = INPUTS)]
    pub dtype: Dtype,
    /// Seed of the drawn inputs
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = INPUTS)]
    pub seed: u64,
    /// Log gates. normal: logsigmoid(N(0,1)); mixed: a sixteenth of that, 0 in every fourth head; zero: 0; strong: about
    /// -22 per token; model: -A softplus(N(0,1) + dt_bias), with A and dt_bias of each head as models are initialised
    #[arg(long, value_parser = words::<Gates>(&["normal", "mixed", "zero", "strong", "model"]), default_value = "normal", conflicts_with = "raw_gates", help_heading = INPUTS)]
    pub gates: Gates,
    /// Pass a, b, A_log and dt_bias; the kernel computes g and beta
    #[arg(long, help_heading = INPUTS)]
    pub raw_gates: bool,
    /// Double beta, up to 2 (negative eigenvalues)
    #[arg(long, requires = "raw_gates", help_heading = INPUTS)]
    pub neg_eigval: bool,

    #[command(flatten)]
    pub scale: ScaleArgs,
    #[command(flatten)]
    pub state: StateArgs,
    /// Write the state after every token to its own tensor, for a later commit; the pool stays unchanged
    #[arg(long, help_heading = OPERATION)]
    pub verify: bool,

    #[command(flatten)]
    pub run: RunArgs,
    #[command(flatten)]
    pub count: CountArgs,

    /// Compare with the f64 recurrence; fail if the error of outputs or states exceeds rounding
    #[arg(long, help_heading = RESULTS)]
    pub check: bool,
    /// Print one JSON object
    #[arg(long, help_heading = RESULTS)]
    pub json: bool,
}
