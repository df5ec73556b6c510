//! The command line: subcommands, the options that they share, and the parsers of values.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use deltawave::model::MAX_HEAD_DIM;
use deltawave::prefill::{CHUNK, PrefillPath};
use deltawave::runtime::Backend;
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::models::{MODELS, Model};
use deltawave_lab::workload::RowLayout;
use deltawave_sim::gpu::Gpu;

use crate::conv::args::ConvArgs;
use crate::decode::args::DecodeArgs;
use crate::failure::Failure;
use crate::layer::args::LayerArgs;
use crate::prefill::args::{PrefillArgs, ProfileArgs};

/// Gated DeltaNet kernels for AMD Instinct MI300 (gfx942), run and checked.
///
/// Where there is a GPU that this program has kernels for (through the HIP runtime, or the CUDA driver), they run there;
/// elsewhere the machine code for gfx942 runs on a simulator, on this machine's CPU.
#[derive(Debug, Parser)]
#[command(name = "deltawave", version, max_term_width = 110)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// Subcommands.
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
    #[command(after_long_help = include_str!("../help/prefill.txt"))]
    Prefill(Box<PrefillArgs>),
    /// Run the convolution before a prefill and check it against its reference
    ///
    /// Draws the projections, runs the causal depthwise convolution with SiLU that splits them into q, k and v and updates
    /// the conv states, and reports time and, with --check, how many outputs equal the reference rounded once.
    #[command(after_long_help = include_str!("../help/conv.txt"))]
    Conv(Box<ConvArgs>),
    /// Run a decode, one or a few tokens of each sequence, and check it against an f64 recurrence
    ///
    /// Draws q, k, v, gates and states, runs the kernel in place on the states, and reports time and, with --check, the
    /// error against the token recurrence in f64 beside the error of rounding alone.
    #[command(after_long_help = include_str!("../help/decode.txt"))]
    Decode(Box<DecodeArgs>),
    /// Run a whole layer, from the input projections to the output projection, and check it against an f64 layer
    ///
    /// Draws projections, weights and states, runs convolution, decode, prefill and gated norm in place on the states, and
    /// reports time and, with --check, the error against the layer in f64. The limit is 1.15 times the error of the same
    /// layer with the unfused chunk form that other implementations use.
    #[command(after_long_help = include_str!("../help/layer.txt"))]
    Layer(Box<LayerArgs>),
    /// Count what the kernels of a prefill or its backward do: instructions, unit clocks, bank conflicts, memory lines
    ///
    /// Runs the kernels on the simulator, whatever devices there are, and counts, exactly; only times are modelled.
    /// Clocks are sums over all waves of the time that a SIMD's matrix and vector units, and a compute unit's LDS, are
    /// busy, without any waiting; vector clocks include transcendental functions. Memory is counted in lines of 128
    /// bytes, each once for a launch (HBM unique) and once for each die (L2 fill), instructions left out.
    #[command(after_long_help = include_str!("../help/profile.txt"))]
    Profile(Box<ProfileArgs>),
}

/// `deltawave info`.
#[derive(Debug, Args)]
pub struct InfoArgs {
    /// Number of the device, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub device: usize,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    /// Write the kernels and a list of their launch parameters to DIR/ARCH, for programs that load them
    #[arg(long, value_name = "DIR")]
    pub save_kernels: Option<PathBuf>,
}

pub const SHAPE: &str = "Shape";
pub const INPUTS: &str = "Inputs";
pub const OPERATION: &str = "Operation";
pub const RANKS: &str = "Ranks";
pub const RUN: &str = "Running";
pub const RESULTS: &str = "Results";

/// Heads, by themselves or a model's.
#[derive(Debug, Args)]
pub struct ModelArgs {
    /// Heads and dimensions of a model's Gated DeltaNet layer
    #[arg(long, value_name = "NAME", value_parser = model(), ignore_case = true, help_heading = SHAPE)]
    pub model: Option<&'static Model>,
    /// Number of devices that share the model's heads (tensor parallelism); one device's heads run
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "heads", help_heading = SHAPE)]
    pub tp: usize,
    /// Key heads and value heads; HV is a multiple of HK
    #[arg(long, value_name = "HK,HV", value_parser = heads, help_heading = SHAPE)]
    pub heads: Option<[usize; 2]>,
}

impl ModelArgs {
    /// Heads and dimensions; `dims` are those of `--dims`.
    pub fn shape(&self, dims: [usize; 2]) -> Result<([usize; 2], [usize; 2]), Failure> {
        let Some(model) = self.model else {
            let missing = || Failure::wrong("one of --model and --heads is needed");
            return Ok((self.heads.ok_or_else(missing)?, dims));
        };
        let (hk, hv) = model.heads_per_rank(self.tp).ok_or_else(|| {
            let ranks: Vec<_> = model.ranks().iter().map(usize::to_string).collect();
            Failure::wrong(format!(
                "invalid value '{}' for '--tp <N>': the {} key and {} value heads of {} can be divided among {} devices",
                self.tp,
                model.key_heads,
                model.value_heads,
                model.name,
                ranks.join(", ")
            ))
        })?;
        Ok(([hk, hv], [model.key_dim, model.value_dim]))
    }

    /// Whether the model's beta goes up to 2.
    pub fn neg_eigval(&self) -> bool {
        self.model.is_some_and(|m| m.neg_eigval)
    }
}

/// Head dimensions of the recurrence.
#[derive(Debug, Args)]
pub struct DimsArgs {
    /// Head dimensions of keys and of values: multiples of 16 up to 256
    #[arg(long, value_name = "K,V", value_parser = dims, default_value = "128,128", conflicts_with = "model", help_heading = SHAPE)]
    pub dims: [usize; 2],
}

/// Scale and norm of the recurrence's inputs.
#[derive(Debug, Args)]
pub struct ScaleArgs {
    /// Normalise q and k in the kernels: x / sqrt(sum(x^2) + 1e-6)
    #[arg(long, help_heading = OPERATION)]
    pub l2norm: bool,
    /// Factor of the output; 0 is K^-0.5 [default: K^-0.5]
    #[arg(long, value_name = "X", value_parser = scale, allow_hyphen_values = true, help_heading = OPERATION)]
    scale: Option<f32>,
}

impl ScaleArgs {
    /// The scale, unless it is the default one.
    pub fn scale(&self) -> Option<f32> {
        self.scale.filter(|x| *x != 0.0)
    }
}

/// Recurrent states in memory.
#[derive(Debug, Args)]
pub struct StateArgs {
    /// Order of the states' dimensions in memory. key-major: [.., HV, K, V]; value-major: [.., HV, V, K]
    #[arg(long, value_name = "LAYOUT", value_parser = choice(STATE_LAYOUTS), default_value = "key-major", help_heading = OPERATION)]
    pub state_layout: StateLayout,
    /// Element type of the states that are written
    #[arg(long, value_name = "DTYPE", value_parser = words::<Dtype>(&["f32", "bf16", "fp16"]), default_value = "f32", help_heading = OPERATION)]
    pub state_dtype: Dtype,
}

/// Where and how often an operation runs.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Where to run. hip: a GPU, AMD's or NVIDIA's; auto: a GPU if there is one, else the simulator
    #[arg(long, value_parser = choice(BACKENDS), default_value = "auto", help_heading = RUN)]
    pub backend: Backend,
    /// Number of the device, counted from 0
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = RUN)]
    pub device: usize,
    /// Maximum number of host threads for simulator, oracle and inputs [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..), help_heading = RUN)]
    pub threads: Option<u16>,
    /// Run N times from the same states and report the fastest run; all runs must give the same bits
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..), help_heading = RUN)]
    pub repeat: u32,
    /// Measure N replays of a graph on a GPU, with flushed caches before each, and report the median
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000), help_heading = RUN)]
    pub time: Option<u32>,
}

/// Counters of the simulator.
#[derive(Debug, Args)]
pub struct CountArgs {
    /// Count instructions, clocks and bytes on the simulator, for the units of GPU; times are modelled
    #[arg(long, value_name = "GPU", value_parser = gpu, conflicts_with_all = ["time", "repeat"], help_heading = RUN)]
    pub count: Option<Gpu>,
}

/// `--backend`.
const BACKENDS: Choices<Backend> = &[
    ("auto", Backend::Auto),
    ("hip", Backend::Hip),
    ("simulator", Backend::Simulator),
];

/// `--path`.
pub const PATHS: Choices<PrefillPath> = &[
    ("auto", PrefillPath::Auto),
    ("fused", PrefillPath::Fused),
    ("split", PrefillPath::Split),
    ("short", PrefillPath::Short),
];

/// `--head-map`.
pub const HEAD_MAPS: Choices<HeadMap> = &[("grouped", HeadMap::Grouped), ("tiled", HeadMap::Tiled)];

/// `--layout` of a row of projections.
pub const ROW_LAYOUTS: Choices<RowLayout> = &[
    ("flat", RowLayout::Flat),
    ("interleaved", RowLayout::Interleaved),
];

/// `--state-layout` of recurrent states.
pub const STATE_LAYOUTS: Choices<StateLayout> = &[
    ("key-major", StateLayout::KeyMajor),
    ("value-major", StateLayout::ValueMajor),
];

/// Words and what they stand for.
pub type Choices<T> = &'static [(&'static str, T)];

/// The parser of one of several words.
pub fn choice<T: Clone + Send + Sync>(choices: Choices<T>) -> impl TypedValueParser<Value = T> {
    let words = choices.iter().map(|(word, _)| *word);
    PossibleValuesParser::new(words).try_map(|given| {
        let found = choices.iter().find(|(word, _)| *word == given);
        found.map(|(_, value)| value.clone()).ok_or("no such word")
    })
}

/// The word for a value.
pub fn word<T: PartialEq>(choices: Choices<T>, value: &T) -> &'static str {
    let found = choices.iter().find(|(_, other)| other == value);
    found.map_or("", |(word, _)| word)
}

/// Offsets of the sequences of a packed batch; `flag` is what gave their lengths.
pub fn cu_seqlens(flag: &str, lengths: &[usize]) -> Result<Vec<i32>, Failure> {
    let ends = lengths.iter().scan(0usize, |end, n| {
        *end += n;
        Some(*end)
    });
    let offsets = std::iter::once(0).chain(ends).map(i32::try_from);
    offsets.collect::<Result<_, _>>().map_err(|_| {
        let tokens: usize = lengths.iter().sum();
        Failure::wrong(format!(
            "invalid value for '{flag}': {tokens} tokens in total, which must be below 2^31"
        ))
    })
}

pub fn gpu(name: &str) -> Result<Gpu, String> {
    Gpu::named(name).ok_or_else(|| {
        let names: Vec<&str> = Gpu::ALL.iter().map(|g| g.name).collect();
        format!("known are {}", names.join(", "))
    })
}

/// The parser of `--model`.
fn model() -> impl TypedValueParser<Value = &'static Model> {
    let values = MODELS.iter().map(|m| {
        let (hk, hv, k, v) = (m.key_heads, m.value_heads, m.key_dim, m.value_dim);
        let beta = if m.neg_eigval { ", beta up to 2" } else { "" };
        PossibleValue::new(m.name)
            .aliases(m.aliases)
            .help(format!("HK={hk} HV={hv} K={k} V={v}{beta}"))
    });
    PossibleValuesParser::new(values).try_map(|name| {
        let found = MODELS.iter().find(|m| m.is_called(&name));
        found.ok_or("no such model")
    })
}

/// The parser of words of the library; only `allowed` ones pass.
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
        return Err(format!(
            "HV must be a multiple of HK, and {hv} is not a multiple of {hk}"
        ));
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

/// The factor of the output. 0 stands for the default one, so that no other number may become it.
fn scale(text: &str) -> Result<f32, String> {
    let digits = text.split(['e', 'E']).next().unwrap_or_default();
    match text.parse::<f32>() {
        Ok(0.0) if digits.contains(|c| matches!(c, '1'..='9')) => {
            Err("it must not vanish in f32, where 0 stands for K^-0.5".to_owned())
        }
        Ok(x) if x.is_finite() => Ok(x),
        _ => Err("it must be a finite number".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_scale_that_vanishes_is_not_the_default() {
        for zero in ["0", "-0.0", "0e9", ".0"] {
            assert_eq!(scale(zero), Ok(0.0), "{zero}");
        }
        for wrong in ["1e-60", "-1E-400", "0.0001e-60", "inf", "NaN", "1e39", "x"] {
            assert!(scale(wrong).is_err(), "{wrong}");
        }
        assert_eq!(scale("1e-30"), Ok(1e-30));
    }
}
