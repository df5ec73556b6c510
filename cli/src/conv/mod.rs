//! `deltawave conv`: a convolution of drawn projections, run and checked.

pub mod args;
mod check;
mod device;

pub use self::check::wrong_states;

use deltawave::conv::{Conv, ConvSpec};
use deltawave::prefill::Part;
use deltawave::runtime::Context;
use deltawave::types::Dtype;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};

use self::args::{ACTIVATIONS, CONV_STATE_LAYOUTS, ConvArgs, ROW_LAYOUTS};
use self::device::Output;
use crate::args::{cu_seqlens, word};
use crate::driver::{self, Options, Request, limit_threads};
use crate::failure::Failure;
use crate::memory;
use crate::progress::Progress;
use crate::report::{Description, Report, Verdict, figures};

/// A convolution whose tensors do not exist yet.
struct Planned<'a> {
    args: &'a ConvArgs,
    spec: ConvSpec,
    cu_seqlens: Vec<i32>,
}

/// A convolution with its tensors on the host.
struct Workload<'a> {
    args: &'a ConvArgs,
    spec: ConvSpec,
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

/// Inputs of g and beta.
struct GateInputs {
    /// `[T, 2 HV]`: rows `b | a`, for each group of heads.
    ba: HostTensor,
    /// `[HV]`.
    a_log: HostTensor,
    dt_bias: HostTensor,
}

/// Runs what the arguments ask for.
pub fn run(args: &ConvArgs) -> Result<Report, Failure> {
    limit_threads(&args.run);
    let options = Options::new(&args.run, &args.shape, &args.count, args.check);
    driver::run(Planned::new(args)?, &options)
}

impl<'a> Planned<'a> {
    fn new(args: &'a ConvArgs) -> Result<Self, Failure> {
        let ([hk, hv], [k, v]) = args.shape.shape(args.dims)?;
        let spec = ConvSpec {
            dtype: args.dtype,
            width: args.width.into(),
            activation: args.activation,
            qk_l2norm: args.l2norm,
            ..ConvSpec::new(hk, hv, k, v)
        };
        let lengths = match &args.seqlens[..] {
            [] => &[1024],
            lengths => lengths,
        };
        Ok(Planned {
            args,
            spec,
            cu_seqlens: cu_seqlens("--seqlens", lengths)?,
        })
    }

    fn tokens(&self) -> usize {
        self.cu_seqlens[self.cu_seqlens.len() - 1] as usize
    }
}

impl<'a> Request for Planned<'a> {
    type Workload = Workload<'a>;

    fn plan(&self, context: &Context) -> Result<Conv, Failure> {
        let plan = Conv::packed(context, self.spec, &self.cu_seqlens, self.tokens())
            .map_err(Failure::during("planning the convolution failed"))?;
        let each = if self.args.check { 32 } else { 16 };
        let rows = self.tokens() + self.cu_seqlens.len() * self.spec.width;
        memory::check(each * rows as u128 * columns(&self.spec) as u128)?;
        Ok(plan)
    }

    fn load(self, _: &Conv) -> Result<Workload<'a>, Failure> {
        Ok(self.draw())
    }
}

impl<'a> Planned<'a> {
    fn draw(self) -> Workload<'a> {
        let (args, spec, tokens) = (self.args, self.spec, self.tokens());
        let channels = spec.total_channels();
        let draw = |name: &str, n: usize| random_normal(spec.dtype, name, n, args.seed);
        let heads = |name: &str| random_normal(Dtype::F32, name, spec.heads.value, args.seed);
        let states = (self.cu_seqlens.len() - 1) * channels * (spec.width - 1);
        Workload {
            args,
            spec,
            tokens,
            x: draw("x", tokens * columns(&spec)),
            weight: draw("weight", channels * spec.width),
            bias: args.bias.then(|| draw("bias", channels)),
            state: args.initial_state.then(|| draw("conv_state", states)),
            gates: args.gates.then(|| GateInputs {
                ba: draw("ba", 2 * tokens * spec.heads.value),
                a_log: heads("a_log"),
                dt_bias: heads("dt_bias"),
            }),
            cu_seqlens: self.cu_seqlens,
        }
    }
}

impl Workload<'_> {
    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// The column of x that holds a channel.
    fn column(&self, channel: usize) -> usize {
        let s = &self.spec;
        let (heads, dims) = (
            [s.heads.key, s.heads.value],
            [s.heads.key_dim, s.heads.value_dim],
        );
        self.args.layout.column(heads, dims, channel)
    }
}

impl driver::Workload for Workload<'_> {
    const NAME: &'static str = "convolution";
    const CHECKED: &'static [&'static str] = &[
        "equal_share",
        "equal_share_limit",
        "max_ulps",
        "max_ulps_limit",
        "wrong_states",
    ];

    fn parts(_: &Conv) -> Vec<(&'static str, Part)> {
        vec![("conv", Part::Whole)]
    }

    /// Channels of x and outputs, weights, states, gates: each once.
    fn minimal_bytes(&self) -> usize {
        let channels = self.spec.total_channels();
        let states = self.sequences() * channels * (self.spec.width - 1);
        let read = if self.state.is_some() { states } else { 0 };
        let weights = self.weight.values.len() + self.bias.as_ref().map_or(0, |b| b.values.len());
        let size = self.spec.dtype.size();
        let gates = match &self.gates {
            Some(_) => 2 * self.tokens * self.spec.heads.value * (size + 4),
            None => 0,
        };
        (2 * self.tokens * channels + weights + states + read) * size + gates
    }

    fn check(&self, output: &Output, progress: &mut Progress) -> Result<Verdict, Failure> {
        progress.step("reference", || self.judge(output))
    }

    fn describe(&self, _: &Conv, _: &Output) -> Description {
        let (s, args) = (&self.spec, self.args);
        let layout = word(ROW_LAYOUTS, &args.layout);
        let title = format!(
            "{} tokens in {} sequences, {} channels, width {}{}{}, {layout} rows, {}",
            self.tokens,
            self.sequences(),
            s.total_channels(),
            s.width,
            if s.qk_l2norm { ", norms" } else { "" },
            if args.gates { ", gates" } else { "" },
            s.dtype
        );
        Description {
            title: ["Convolution".to_owned(), title],
            tensors: String::new(),
            figures: figures! {
                tokens: self.tokens,
                sequences: self.sequences(),
                dtype: s.dtype.name(),
                key_heads: s.heads.key,
                value_heads: s.heads.value,
                key_dim: s.heads.key_dim,
                value_dim: s.heads.value_dim,
                channels: s.total_channels(),
                width: s.width,
                bias: args.bias,
                activation: word(ACTIVATIONS, &args.activation),
                qk_l2norm: s.qk_l2norm,
                gates: args.gates,
                layout: layout,
                initial_state: args.initial_state,
                state_layout: word(CONV_STATE_LAYOUTS, &args.state_layout),
            },
            notes: Vec::new(),
        }
    }
}

/// Columns of a row of x: q, k, v and z.
fn columns(spec: &ConvSpec) -> usize {
    let [q, k, v] = spec.channels();
    q + k + 2 * v
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::driver::Workload as _;

    fn parsed(arguments: &[&str]) -> Workload<'static> {
        let all = ["deltawave", "conv", "--heads", "1,2", "--dims", "2,3"];
        let cli = Cli::try_parse_from(all.iter().chain(arguments)).unwrap();
        let Command::Conv(args) = cli.command else {
            panic!("another command")
        };
        Planned::new(Box::leak(args)).unwrap().draw()
    }

    #[test]
    fn states_go_to_their_layout_and_back() {
        let layout = ["--state-layout", "token-major"];
        let w = parsed(&[&layout[..], &["--seqlens", "1,2", "--width", "3"]].concat());
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
        (grouped.spec.heads.key, grouped.spec.heads.value) = (2, 4);
        // Groups of 2 + 2 + 6 + 6 columns.
        let columns = [0, 3, 4, 7, 8, 13, 14].map(|c| grouped.column(c));
        assert_eq!(columns, [0, 17, 2, 19, 4, 9, 20]);
    }
}
