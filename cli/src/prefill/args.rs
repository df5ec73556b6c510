//! Arguments of a prefill, and of its profile.

use std::fmt;
use std::path::PathBuf;

use clap::{ArgGroup, Args};
use deltawave::prefill::PrefillPath;
use deltawave::types::{Dtype, HeadMap};
use deltawave_lab::inputs::{Gates, Keys};
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::gpu::Gpu;

use crate::args::{
    Choices, DimsArgs, HEAD_MAPS, INPUTS, ModelArgs, OPERATION, PATHS, RANKS, RESULTS, RUN,
    RunArgs, SHAPE, ScaleArgs, StateArgs, choice, gpu, length, snapshot_interval, words,
};

/// `deltawave profile`.
#[derive(Debug, Args)]
pub struct ProfileArgs {
    /// The prefill that is counted, or the backward of it.
    #[command(flatten)]
    pub prefill: PrefillArgs,
    /// GPU whose dies and units the model assumes
    #[arg(long, value_name = "GPU", value_parser = gpu, default_value = "mi300x", help_heading = RUN)]
    pub gpu: Gpu,
    /// Write a roofline diagram to FILE, as SVG
    #[arg(long, value_name = "FILE", help_heading = RESULTS)]
    pub roofline: Option<PathBuf>,
}

/// `deltawave prefill`.
#[derive(Debug, Args)]
#[command(group = ArgGroup::new("shape").required(true).args(["model", "heads", "input"]))]
pub struct PrefillArgs {
    #[command(flatten)]
    pub shape: ModelArgs,
    #[command(flatten)]
    pub dims: DimsArgs,
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
    #[arg(long, value_name = "MAP", value_parser = choice(HEAD_MAPS), default_value = "grouped", help_heading = SHAPE)]
    pub head_map: HeadMap,

    /// Element type of q, k, v and o [default: bf16]
    #[arg(long, value_parser = words::<Dtype>(&["bf16", "fp16"]), help_heading = INPUTS)]
    pub dtype: Option<Dtype>,
    /// Seed of the drawn inputs [default: 0]
    #[arg(long, value_name = "N", help_heading = INPUTS)]
    pub seed: Option<u64>,
    /// Log gates. normal: logsigmoid(N(0,1)); mixed: a sixteenth of that, 0 in every fourth head; zero: 0; strong: about
    /// -22 per token; model: -A softplus(N(0,1) + dt_bias), with A and dt_bias of each head as models are initialised
    /// [default: normal]
    #[arg(long, value_parser = words::<Gates>(&["normal", "mixed", "zero", "strong", "model"]), conflicts_with = "raw_gates", help_heading = INPUTS)]
    pub gates: Option<Gates>,
    /// Rows of q and k before their norm. normal: N(0,1); silu: silu(N(0,1)) [default: normal]
    #[arg(long, value_parser = words::<Keys>(&["normal", "silu"]), help_heading = INPUTS)]
    pub keys: Option<Keys>,
    /// Pass a, b, A_log and dt_bias; the kernels compute g and beta
    #[arg(long, help_heading = INPUTS)]
    pub raw_gates: bool,
    /// Double beta, up to 2 (negative eigenvalues)
    #[arg(long, help_heading = INPUTS)]
    pub neg_eigval: bool,
    /// Element type of drawn initial states; none: sequences start from zeros
    #[arg(long, value_name = "DTYPE", value_parser = choice(INITIAL_STATES), help_heading = INPUTS)]
    pub initial_state: Option<InitialState>,
    /// Take the inputs from a safetensors file
    ///
    /// It holds q, k [T, HK, K] and v [T, HV, V] in bf16 or fp16, and optionally g and beta [T, HV] in f32 (or a, b [T,
    /// HV], A_log, dt_bias [HV]), cu_seqlens [N + 1] in i32 or i64, and initial_state [N, HV, K, V] in f32, bf16 or fp16.
    #[arg(long, value_name = "FILE", help_heading = INPUTS,
        conflicts_with_all = ["seqlens", "batch", "len", "dtype", "seed", "gates", "keys", "raw_gates", "initial_state", "tp", "dims"])]
    pub input: Option<PathBuf>,
    /// Write the inputs to a safetensors file, for --input
    #[arg(long, value_name = "FILE", help_heading = INPUTS)]
    pub save_input: Option<PathBuf>,

    #[command(flatten)]
    pub scale: ScaleArgs,
    #[command(flatten)]
    pub state: StateArgs,
    /// Keep the states in place, in a pool of SLOTS states; --check: unused slots must not change
    #[arg(long, value_name = "SLOTS", value_parser = clap::value_parser!(u32).range(1..1 << 24), help_heading = OPERATION)]
    pub pool: Option<u32>,
    /// Keep the state after every N tokens (a multiple of 64); --check continues each sequence from its last snapshot
    ///
    /// Snapshots are f32. A continued sequence has the same bits as the whole one if that was not cut into segments
    /// (--segments 1); otherwise it may differ by rounding.
    #[arg(long, value_name = "N", value_parser = snapshot_interval, help_heading = OPERATION)]
    pub snapshots: Option<usize>,

    /// Compute the gradients of all inputs instead, from drawn gradients of o and of the final states
    ///
    /// --check compares them with the reverse recurrence in f64: dq_rms_ratio, dk, dv, dg, dbeta and ds0 in JSON, or da, db,
    /// da_log and ddt_bias with raw gates. Gradients of gates and states are f32. Limits follow the error of an unfused form,
    /// and are wider for few tokens and heads. A limit is null where the exact gradient is 0: then a gradient must be finite.
    #[arg(long, conflicts_with_all = ["pool", "snapshots"], help_heading = OPERATION)]
    pub backward: bool,

    /// Number of segments of each sequence, computed in parallel; 1 cuts no sequence [default: the fastest numbers]
    ///
    /// A sequence has at most a segment for each chunk of 64 tokens. The environment variable DELTAWAVE_SEGMENTS overrides
    /// this.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = OPERATION)]
    pub segments: Option<u32>,
    /// Kernels. fused: one, for K up to 128; split: one for the chunks, one for the walk; auto: the faster, as estimated
    ///
    /// short: as auto, with a kernel of its own for sequences of at most 16 tokens. The environment variable DELTAWAVE_PREFILL overrides this.
    #[arg(long, value_parser = choice(PATHS), default_value = "auto", help_heading = OPERATION)]
    pub path: PrefillPath,

    #[command(flatten)]
    pub ranks: RanksArgs,
    #[command(flatten)]
    pub run: RunArgs,
    /// Matrix arithmetic of the simulator. fast: f32 chains; exact: the published model of the rounding [default: fast]
    #[arg(long, value_parser = choice(MFMA_MODES), help_heading = RUN)]
    pub mfma: Option<MfmaMode>,

    /// Compare with the f64 recurrence; fail if the error exceeds its limit
    #[arg(long, help_heading = RESULTS)]
    pub check: bool,
    /// Write o and final_state ([N, HV, K, V], whatever --state-layout) to a safetensors file
    ///
    /// With --backward: the gradients d_q, d_k, d_v, d_g, d_beta (or d_a, d_b, d_A_log, d_dt_bias) and d_initial_state,
    /// and d_o and d_final_state that they follow from.
    #[arg(long, value_name = "FILE", help_heading = RESULTS)]
    pub output: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long, help_heading = RESULTS)]
    pub json: bool,
}

/// A prefill that ranks share.
#[derive(Debug, Args)]
pub struct RanksArgs {
    /// Share the sequences among N ranks, which exchange summaries of blocks of tokens
    ///
    /// --check also compares outputs and final states, bit for bit, with those of one rank: bits_equal_one_rank in JSON. They
    /// depend on the block, and neither on N nor on the layout. With --backward it compares all gradients but those of A_log
    /// and dt_bias, which are sums of the ranks' sums.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024), help_heading = RANKS,
        conflicts_with_all = ["batch", "pool", "snapshots", "segments", "time"])]
    pub ranks: Option<u32>,
    /// Which rank has which blocks. contiguous: equal runs of the packed sequences, rank after rank; zigzag: rank r has the
    /// pieces r and 2 N - 1 - r of each sequence, of 2 N pieces; packed: whole sequences, the longest first, on the rank with
    /// the fewest tokens
    #[arg(long, value_name = "LAYOUT", value_parser = choice(RANK_LAYOUTS), default_value = "contiguous", requires = "ranks", help_heading = RANKS)]
    pub rank_layout: RankLayoutKind,
    /// Tokens of a block, a multiple of 64 [default: a sixteenth to a sixty-fourth of the longest sequence]
    #[arg(long, value_name = "TOKENS", value_parser = block_tokens, requires = "ranks", help_heading = RANKS)]
    pub rank_block: Option<usize>,
    /// How ranks exchange summaries. local: all ranks in this process, on one device, through the host; processes: a process
    /// and a device for each, through RCCL or NCCL; auto: local on the simulator, else processes
    #[arg(long, value_parser = choice(EXCHANGES), default_value = "auto", requires = "ranks", help_heading = RANKS)]
    pub exchange: Exchange,
    /// Longest wait for another rank; then this rank fails
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..), requires = "ranks", help_heading = RANKS)]
    pub rank_timeout: u32,
    /// Rank, device and id of a process that another one started
    #[arg(long, hide = true, requires = "ranks", value_parser = join)]
    pub join: Option<Join>,
}

/// `--rank-layout`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum RankLayoutKind {
    Contiguous,
    Zigzag,
    Packed,
}

pub const RANK_LAYOUTS: Choices<RankLayoutKind> = &[
    ("contiguous", RankLayoutKind::Contiguous),
    ("zigzag", RankLayoutKind::Zigzag),
    ("packed", RankLayoutKind::Packed),
];

/// `--exchange`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Exchange {
    Auto,
    Local,
    Processes,
}

pub const EXCHANGES: Choices<Exchange> = &[
    ("auto", Exchange::Auto),
    ("local", Exchange::Local),
    ("processes", Exchange::Processes),
];

/// A process of a rank: `RANK:DEVICE:ID`, with the id in hexadecimal digits.
#[derive(Clone, Copy, Debug)]
pub struct Join {
    pub rank: usize,
    pub device: usize,
    pub id: [u8; 128],
}

impl fmt::Display for Join {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:", self.rank, self.device)?;
        self.id.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

fn join(text: &str) -> Result<Join, &'static str> {
    let read = || {
        let mut parts = text.split(':');
        let (rank, device, digits) = (parts.next()?, parts.next()?, parts.next()?);
        let mut id = [0; 128];
        if digits.len() != 2 * id.len() || !digits.is_ascii() {
            return None;
        }
        for (i, byte) in id.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&digits[2 * i..2 * i + 2], 16).ok()?;
        }
        let (rank, device) = (rank.parse().ok()?, device.parse().ok()?);
        Some(Join { rank, device, id })
    };
    read().ok_or("it must be RANK:DEVICE:ID")
}

/// Tokens of a block.
fn block_tokens(text: &str) -> Result<usize, String> {
    snapshot_interval(text)
}

/// `--initial-state`: the element type, unless there is none.
#[derive(Clone, Copy, Debug)]
pub struct InitialState(pub Option<Dtype>);

const INITIAL_STATES: Choices<InitialState> = &[
    ("none", InitialState(None)),
    ("f32", InitialState(Some(Dtype::F32))),
    ("bf16", InitialState(Some(Dtype::Bf16))),
    ("fp16", InitialState(Some(Dtype::F16))),
];

/// `--mfma`.
pub const MFMA_MODES: Choices<MfmaMode> = &[("fast", MfmaMode::Fast), ("exact", MfmaMode::Exact)];
