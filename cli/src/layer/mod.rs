//! `deltawave layer`: a layer of drawn projections and weights, run and checked.

pub mod args;
mod check;
mod device;

use deltawave::layer::{Layer, LayerSpec};
use deltawave::prefill::Part;
use deltawave::runtime::Context;
use deltawave::types::Dtype;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};

use self::args::{LayerArgs, OUTPUT_GATES};
use self::device::Output;
use crate::args::{STATE_LAYOUTS, cu_seqlens, word};
use crate::conv::args::ROW_LAYOUTS;
use crate::device::States;
use crate::driver::{self, Options, Request, limit_threads};
use crate::failure::Failure;
use crate::memory;
use crate::progress::Progress;
use crate::report::{Description, Report, Verdict, figures};

/// A layer whose tensors do not exist yet.
struct Planned<'a> {
    args: &'a LayerArgs,
    spec: LayerSpec,
    cu_seqlens: Vec<i32>,
}

/// A layer with its tensors on the host.
struct Workload<'a> {
    args: &'a LayerArgs,
    spec: LayerSpec,
    cu_seqlens: Vec<i32>,
    /// `T`.
    tokens: usize,
    /// `[T, columns]`: rows `q | k | v | z`.
    projections: HostTensor,
    /// `[T, HV]`.
    a: HostTensor,
    b: HostTensor,
    conv_weight: HostTensor,
    a_log: HostTensor,
    dt_bias: HostTensor,
    norm_weight: HostTensor,
    /// `[N, channels, width - 1]` and `[N, HV, K, V]`.
    states: Option<[HostTensor; 2]>,
}

/// Runs what the arguments ask for.
pub fn run(args: &LayerArgs) -> Result<Report, Failure> {
    limit_threads(&args.run);
    let options = Options::new(&args.run, &args.shape, &args.count, args.check);
    driver::run(Planned::new(args)?, &options)
}

impl<'a> Planned<'a> {
    fn new(args: &'a LayerArgs) -> Result<Self, Failure> {
        let ([hk, hv], [k, v]) = args.shape.shape(args.dims.dims)?;
        let spec = LayerSpec {
            dtype: args.dtype,
            width: args.width.into(),
            allow_neg_eigval: args.neg_eigval || args.shape.neg_eigval(),
            gate: args.output_gate,
            segments: args.segments.map(|n| n as usize),
            ..LayerSpec::new(hk, hv, k, v)
        };
        let prefills = match (&args.seqlens[..], args.decodes) {
            ([], 0) => &[1024],
            (lengths, _) => lengths,
        };
        let lengths = [&vec![1; args.decodes][..], prefills].concat();
        let request = Planned {
            args,
            spec,
            cu_seqlens: cu_seqlens("--seqlens", &lengths)?,
        };
        request.check_memory()?;
        Ok(request)
    }

    fn tokens(&self) -> usize {
        self.cu_seqlens[self.cu_seqlens.len() - 1] as usize
    }

    /// Tensors, states and what the check makes of them must fit into the host's memory, roughly.
    fn check_memory(&self) -> Result<(), Failure> {
        let s = &self.spec;
        let sequences = self.cu_seqlens.len() as u128 - 1;
        let values = (s.heads.value * s.heads.value_dim) as u128;
        let channels = s.conv().total_channels() as u128;
        let state = values * s.heads.key_dim as u128 + channels * s.width as u128;
        let each = if self.args.check { 32 } else { 16 };
        let rows = self.tokens() as u128;
        memory::check(each * (rows * (channels + 2 * values) + sequences * state))
    }
}

impl<'a> Request for Planned<'a> {
    type Workload = Workload<'a>;

    fn plan(&self, context: &Context) -> Result<Layer, Failure> {
        let decodes = self.args.decodes;
        Layer::packed(context, self.spec, &self.cu_seqlens, self.tokens(), decodes)
            .map_err(Failure::during("planning the layer failed"))
    }

    fn load(self, _: &Layer) -> Result<Workload<'a>, Failure> {
        let (args, spec, tokens) = (self.args, self.spec, self.tokens());
        let sequences = self.cu_seqlens.len() - 1;
        let (channels, heads) = (spec.conv().total_channels(), spec.heads.value);
        let values = heads * spec.heads.value_dim;
        let draw = |name: &str, n: usize| random_normal(spec.dtype, name, n, args.seed);
        // Gates as models begin with: A from 1 to 16, softplus(dt_bias) from 0.001 to 0.1.
        let a_log = (0..heads).map(|h| ((h % 16 + 1) as f32).ln());
        let dt_bias = (0..heads).map(|h| (0.001 * 100f32.powf(h as f32 / heads as f32)).ln());
        let states = || {
            let conv = sequences * channels * (spec.width - 1);
            let recurrent = sequences * values * spec.heads.key_dim;
            let recurrent = random_normal(args.state.state_dtype, "state", recurrent, args.seed);
            [draw("conv_state", conv), recurrent]
        };
        Ok(Workload {
            args,
            spec,
            tokens,
            projections: draw("x", tokens * (channels + values)),
            a: draw("a", tokens * heads),
            b: draw("b", tokens * heads),
            conv_weight: draw("weight", channels * spec.width),
            a_log: HostTensor::new(Dtype::F32, a_log.collect()),
            dt_bias: HostTensor::new(Dtype::F32, dt_bias.collect()),
            norm_weight: random_normal(Dtype::F32, "norm_weight", spec.heads.value_dim, args.seed),
            states: args.initial_state.then(states),
            cu_seqlens: self.cu_seqlens,
        })
    }
}

impl Workload<'_> {
    /// The recurrent states of all sequences.
    fn states(&self) -> States {
        States {
            count: self.sequences(),
            heads: self.spec.heads.value,
            key_dim: self.spec.heads.key_dim,
            value_dim: self.spec.heads.value_dim,
            layout: self.args.state.state_layout,
        }
    }

    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }
}

impl driver::Workload for Workload<'_> {
    const NAME: &'static str = "layer";
    const CHECKED: &'static [&'static str] = &[
        "y_rms_ratio",
        "y_rms_ratio_limit",
        "state_rms_ratio",
        "state_rms_ratio_limit",
        "wrong_states",
    ];

    fn parts(_: &Layer) -> Vec<(&'static str, Part)> {
        vec![("layer", Part::Whole)]
    }

    /// Rows of the projections, a, b and y; states that there are; weights: each once.
    fn minimal_bytes(&self) -> usize {
        let s = &self.spec;
        let (channels, values) = (s.conv().total_channels(), s.heads.value * s.heads.value_dim);
        let row = channels + 2 * values + 2 * s.heads.value;
        let state = values * s.heads.key_dim * self.args.state.state_dtype.size()
            + channels * (s.width - 1) * s.dtype.size();
        let accesses = 1 + usize::from(self.states.is_some());
        let vectors = [&self.a_log, &self.dt_bias, &self.norm_weight];
        let weights = vectors.into_iter().chain([&self.conv_weight]);
        let weights: usize = weights.map(|t| t.bytes.len()).sum();
        self.tokens * row * s.dtype.size() + self.sequences() * accesses * state + weights
    }

    fn check(&self, output: &Output, progress: &mut Progress) -> Result<Verdict, Failure> {
        progress.step("reference", || self.judge(output))
    }

    fn describe(&self, plan: &Layer, _: &Output) -> Description {
        let (s, args) = (&self.spec, self.args);
        let title = format!(
            "{} decodes, {} prefills, {} tokens in all, {} and {} heads of {} and {}, {}",
            args.decodes,
            self.sequences() - args.decodes,
            self.tokens,
            s.heads.key,
            s.heads.value,
            s.heads.key_dim,
            s.heads.value_dim,
            s.dtype
        );
        Description {
            title: ["Layer".to_owned(), title],
            tensors: String::new(),
            figures: figures! {
                tokens: self.tokens,
                sequences: self.sequences(),
                decodes: args.decodes,
                dtype: s.dtype.name(),
                key_heads: s.heads.key,
                value_heads: s.heads.value,
                key_dim: s.heads.key_dim,
                value_dim: s.heads.value_dim,
                channels: s.conv().total_channels(),
                width: s.width,
                neg_eigval: s.allow_neg_eigval,
                output_gate: word(OUTPUT_GATES, &s.gate),
                layout: word(ROW_LAYOUTS, &args.layout),
                initial_state: args.initial_state,
                state_layout: word(STATE_LAYOUTS, &args.state.state_layout),
                state_dtype: args.state.state_dtype.name(),
                workspace_bytes: plan.workspace_bytes(),
            },
            notes: Vec::new(),
        }
    }
}
