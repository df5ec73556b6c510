//! `deltawave conv`: a convolution of drawn projections, run and checked.

pub mod args;

use deltawave::conv::{Conv, ConvInput, ConvSpec, ConvState, ConvStateLayout, ConvTensors};
use deltawave::gate::Gate;
use deltawave::prefill::Part;
use deltawave::runtime::{Context, Stream};
use deltawave::types::Dtype;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::judge::{self, ConvFound, ConvJudged};
use deltawave_lab::memory as needed;
use deltawave_lab::workload::{ConvData, RowLayout, columns, transposed};

use self::args::{ACTIVATIONS, CONV_STATE_LAYOUTS, ConvArgs};
use crate::args::{ROW_LAYOUTS, cu_seqlens, word};
use crate::device::{Fallible, Results, Rows, Slots, Views};
use crate::driver::{self, Operation, Options, limit_threads};
use crate::failure::Failure;
use crate::memory;
use crate::progress::Progress;
use crate::report::{Checked, Description, Report, Verdict, figures, head_figures};

/// A convolution of a packed batch.
struct ConvRun<'a> {
    args: &'a ConvArgs,
    spec: ConvSpec,
    cu_seqlens: Vec<i32>,
    /// `T`.
    tokens: usize,
}

/// Runs what the arguments ask for.
pub fn run(args: &ConvArgs) -> Result<Report, Failure> {
    limit_threads(&args.run);
    let ([hk, hv], [k, v]) = args.shape.shape(args.dims)?;
    let lengths = match &args.seqlens[..] {
        [] => &[1024],
        lengths => lengths,
    };
    let operation = ConvRun {
        args,
        spec: ConvSpec {
            dtype: args.dtype,
            width: args.width.into(),
            activation: args.activation,
            qk_l2norm: args.l2norm,
            ..ConvSpec::new(hk, hv, k, v)
        },
        cu_seqlens: cu_seqlens("--seqlens", lengths)?,
        tokens: lengths.iter().sum(),
    };
    let options = Options::new(&args.run, &args.shape, &args.count, args.check);
    driver::run(operation, &options)
}

impl ConvRun<'_> {
    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// Channels and columns of a state.
    fn state(&self) -> [usize; 2] {
        [self.spec.total_channels(), self.spec.width - 1]
    }

    /// States of so many rows and columns in the other order, if `--state-layout` asks for it.
    fn reordered(&self, bytes: &[u8], shape: [usize; 2]) -> Vec<u8> {
        match self.args.state_layout {
            ConvStateLayout::ChannelMajor => bytes.to_vec(),
            ConvStateLayout::TokenMajor => transposed(bytes, shape),
        }
    }

    /// g and beta, and what they are computed from.
    fn gate<'a>(&self, views: &mut Views<'a>) -> Fallible<Gate<'a>> {
        let heads = self.spec.heads.value;
        let ba = views.get("ba", [self.tokens, 2 * heads])?;
        let [a, b] = Gate::interleaved(&ba, self.args.layout.groups(&self.spec.heads), heads)?;
        Ok(Gate {
            a,
            b,
            a_log: views.get("a_log", [heads])?,
            dt_bias: Some(views.get("dt_bias", [heads])?),
            allow_neg_eigval: false,
            g: views.get_mut("g", [self.tokens, heads])?.into(),
            beta: views.get_mut("beta", [self.tokens, heads])?.into(),
        })
    }
}

impl Operation for ConvRun<'_> {
    type Plan = Conv;
    type Data = ConvData;

    const NAME: &'static str = "convolution";
    const CHECKED: &'static str =
        "equal_share equal_share_limit max_ulps max_ulps_limit wrong_states";

    fn plan(&self, context: &Context) -> Result<Conv, Failure> {
        let plan = Conv::packed(context, self.spec, &self.cu_seqlens, self.tokens)
            .map_err(Failure::during("planning the convolution failed"))?;
        let (sequences, check) = (self.sequences(), self.args.check);
        memory::check(needed::conv(&self.spec, self.tokens, sequences, check))?;
        Ok(plan)
    }

    fn draw(&mut self, _: &Conv) -> Result<ConvData, Failure> {
        let (args, seed) = (self.args, self.args.seed);
        let mut data = ConvData::draw(self.spec, args.layout, &self.cu_seqlens, seed);
        if args.bias {
            data.draw_bias(seed);
        }
        if args.initial_state {
            data.draw_state(seed);
        }
        if args.gates {
            data.draw_gates(seed);
        }
        Ok(data)
    }

    fn slots<'a>(&self, _: &Conv, data: &'a ConvData) -> Slots<'a> {
        let (dtype, [q, k, v]) = (self.spec.dtype, self.spec.channels());
        let before = match &data.state {
            Some(state) => self.reordered(&state.bytes, self.state()),
            None => vec![0xff; data.state_elements() * dtype.size()],
        };
        let slots = Slots::new(0)
            .starts(self.sequences(), data.state.is_some())
            .input("x", &data.x)
            .input("weight", &data.weight)
            .input_some("bias", data.bias.as_ref())
            .in_place("state", dtype, before)
            .output("q", dtype, self.tokens * q)
            .output("k", dtype, self.tokens * k)
            .output("v", dtype, self.tokens * v);
        let Some(gates) = &data.gates else {
            return slots;
        };
        let heads = self.tokens * self.spec.heads.value;
        slots
            .input("ba", &gates.ba)
            .input("a_log", &gates.a_log)
            .input("dt_bias", &gates.dt_bias)
            .output("g", Dtype::F32, heads)
            .output("beta", Dtype::F32, heads)
    }

    fn kernels(&self, plan: &Conv) -> Vec<&'static str> {
        vec![plan.kernel()]
    }

    fn launch(&self, mut views: Views, stream: &Stream, plan: &Conv, _: Part) -> Fallible<()> {
        let s = &self.spec;
        let (rows, [channels, width]) = (Rows::Packed(self.tokens), self.state());
        let x = views.get("x", [self.tokens, columns(s)])?;
        let states = match self.args.state_layout {
            ConvStateLayout::ChannelMajor => [self.sequences(), channels, width],
            ConvStateLayout::TokenMajor => [self.sequences(), width, channels],
        };
        let (keys, values) = (
            [s.heads.key, s.heads.key_dim],
            [s.heads.value, s.heads.value_dim],
        );
        let gates = self.args.gates.then(|| self.gate(&mut views));
        let tensors = ConvTensors {
            cu_seqlens: None,
            x: match self.args.layout {
                RowLayout::Flat => ConvInput::flat(&x, s)?,
                RowLayout::Interleaved => ConvInput::interleaved(&x, s)?,
            },
            weight: views.get("weight", [channels, s.width])?,
            bias: views.get_some("bias", [channels])?,
            state: Some(ConvState {
                tensor: views.get_mut("state", states)?,
                layout: self.args.state_layout,
                has_initial_state: Some(views.starts.into()),
            }),
            slots: None,
            q: views.tokens_mut("q", rows, keys)?,
            k: views.tokens_mut("k", rows, keys)?,
            v: views.tokens_mut("v", rows, values)?,
            gates: gates.transpose()?,
        };
        plan.launch(stream, &tensors)
    }

    fn parts(_: &Conv) -> Vec<(&'static str, Part)> {
        vec![("conv", Part::Whole)]
    }

    fn minimal_bytes(&self, data: &ConvData) -> usize {
        data.minimal_bytes()
    }

    fn check(&self, data: &ConvData, results: &Results, progress: &mut Progress) -> Checked {
        let [channels, columns] = self.state();
        let state = &results["state"];
        let channel_major = self.reordered(&state.bytes, [columns, channels]);
        let found = ConvFound {
            out: ["q", "k", "v"].map(|name| &results[name]),
            state: &HostTensor::from_bytes(state.dtype, channel_major),
            gates: results
                .get("g")
                .zip(results.get("beta"))
                .map(<[_; 2]>::from),
        };
        let judged = progress.step("reference", || judge::conv(data, &found))?;
        Ok(verdict(&judged))
    }

    fn describe(&self, _: &Conv, _: &ConvData) -> Description {
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
            figures: figures! {
                tokens: self.tokens,
                sequences: self.sequences(),
            }
            .and(head_figures(s.dtype, &s.heads))
            .and(figures! {
                channels: s.total_channels(),
                width: s.width,
                bias: args.bias,
                activation: word(ACTIVATIONS, &args.activation),
                qk_l2norm: s.qk_l2norm,
                gates: args.gates,
                layout: layout,
                initial_state: args.initial_state,
                state_layout: word(CONV_STATE_LAYOUTS, &args.state_layout),
            }),
            ..Default::default()
        }
    }
}

fn verdict(judged: &ConvJudged) -> Verdict {
    use ConvJudged as Limits;
    let (share, ulps) = (judged.out.equal_share(), judged.out.max_ulps);
    let (wrong, most) = (judged.wrong_states, Limits::MOST_ULPS);
    let percent = 100.0 * share;
    let mut figures = figures! {
        equal_share: share,
        equal_share_limit: Limits::LEAST_EQUAL_SHARE,
        max_ulps: ulps,
        max_ulps_limit: most,
        wrong_states: wrong,
    };
    let mut text = format!(
        "  check  {percent:.4}% of the outputs are the reference rounded once, the others within {ulps} ulp; {wrong} \
         elements of the states differ\n"
    );
    let mut objection = format!(
        "{percent:.4}% of the outputs are the reference rounded once, at least {:.1}% must be; the largest distance is \
         {ulps} ulp, at most {most} is allowed; {wrong} elements of the states differ",
        100.0 * Limits::LEAST_EQUAL_SHARE
    );
    if let Some(error) = judged.gate_error {
        let limit = Limits::GATE_LIMIT;
        figures = figures.and(figures! { gate_error: error, gate_error_limit: limit });
        text += &format!(
            "\n  check  g and beta are within {error:.1e} of the reference, relative to it\n"
        );
        objection += &format!("; g and beta are {error:.1e} off, at most {limit:.0e} is allowed");
    }
    Verdict {
        figures,
        text,
        objections: (!judged.passed())
            .then_some(objection)
            .into_iter()
            .collect(),
    }
}
