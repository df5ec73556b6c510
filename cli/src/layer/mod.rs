//! `deltawave layer`: a layer of drawn projections and weights, run and checked.

pub mod args;

use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::gate::Gate;
use deltawave::layer::{Layer, LayerSpec, LayerStates, LayerTensors, LayerWeights};
use deltawave::prefill::Part;
use deltawave::runtime::{Context, Stream};
use deltawave::workspace::Workspace;
use deltawave_lab::judge;
use deltawave_lab::memory as needed;
use deltawave_lab::workload::{LayerData, RowLayout, columns};

use self::args::{LayerArgs, OUTPUT_GATES};
use crate::args::{ROW_LAYOUTS, STATE_LAYOUTS, cu_seqlens, word};
use crate::device::{Fallible, Results, Rows, Slots, States, Views};
use crate::driver::{self, Operation, Options, limit_threads};
use crate::failure::Failure;
use crate::memory;
use crate::progress::Progress;
use crate::report::{Checked, Description, Report, figures, head_figures};
use crate::verdict::of_errors;

/// A layer's step: decodes, then prefills.
struct LayerRun<'a> {
    args: &'a LayerArgs,
    spec: LayerSpec,
    cu_seqlens: Vec<i32>,
    /// `T`.
    tokens: usize,
}

/// Runs what the arguments ask for.
pub fn run(args: &LayerArgs) -> Result<Report, Failure> {
    limit_threads(&args.run);
    let ([hk, hv], [k, v]) = args.shape.shape(args.dims.dims)?;
    let prefills = match (&args.seqlens[..], args.decodes) {
        ([], 0) => &[1024],
        (lengths, _) => lengths,
    };
    let lengths = [&vec![1; args.decodes][..], prefills].concat();
    let operation = LayerRun {
        args,
        spec: LayerSpec {
            dtype: args.dtype,
            width: args.width.into(),
            allow_neg_eigval: args.neg_eigval || args.shape.neg_eigval(),
            gate: args.output_gate,
            segments: args.segments.map(|n| n as usize),
            path: args.path,
            ..LayerSpec::new(hk, hv, k, v)
        },
        cu_seqlens: cu_seqlens("--seqlens", &lengths)?,
        tokens: lengths.iter().sum(),
    };
    let (sequences, check) = (operation.sequences(), args.check);
    memory::check(needed::layer(
        &operation.spec,
        operation.tokens,
        sequences,
        check,
    ))?;
    let options = Options::new(&args.run, &args.shape, &args.count, args.check);
    driver::run(operation, &options)
}

impl LayerRun<'_> {
    /// The recurrent states of all sequences.
    fn states(&self) -> States {
        States {
            count: self.sequences(),
            heads: self.spec.heads,
            layout: self.args.state.state_layout,
        }
    }

    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }
}

impl Operation for LayerRun<'_> {
    type Plan = Layer;
    type Data = LayerData;

    const NAME: &'static str = "layer";
    const CHECKED: &'static str =
        "y_rms_ratio y_rms_ratio_limit state_rms_ratio state_rms_ratio_limit wrong_states";

    fn plan(&self, context: &Context) -> Result<Layer, Failure> {
        let decodes = self.args.decodes;
        Layer::packed(context, self.spec, &self.cu_seqlens, self.tokens, decodes)
            .map_err(Failure::during("planning the layer failed"))
    }

    fn draw(&mut self, _: &Layer) -> Result<LayerData, Failure> {
        let args = self.args;
        let mut data = LayerData::draw(self.spec, &self.cu_seqlens, args.seed);
        if args.initial_state {
            data.draw_states(args.state.state_dtype, args.seed);
        }
        Ok(data)
    }

    fn slots<'a>(&self, plan: &Layer, data: &'a LayerData) -> Slots<'a> {
        let (s, layout, state_dtype) = (&self.spec, self.args.layout, self.args.state.state_dtype);
        let [conv, state] = match &data.states {
            Some([conv, state]) => {
                let state = self.states().laid_out(state, state_dtype);
                [conv.bytes.clone(), state.bytes]
            }
            None => {
                let [conv, state] = data.state_elements();
                [conv * s.dtype.size(), state * state_dtype.size()].map(|n| vec![0xff; n])
            }
        };
        let outputs = self.tokens * s.heads.value * s.heads.value_dim;
        Slots::new(plan.workspace_bytes())
            .starts(self.sequences(), data.states.is_some())
            .made("projections", data.projection_rows(layout))
            .made("ba", data.gate_rows(layout))
            .input("conv_weight", &data.conv_weight)
            .input("a_log", &data.a_log)
            .input("dt_bias", &data.dt_bias)
            .input("norm_weight", &data.norm_weight)
            .in_place("conv_state", s.dtype, conv)
            .in_place("state", state_dtype, state)
            .output("y", s.dtype, outputs)
    }

    fn kernels(&self, plan: &Layer) -> Vec<&'static str> {
        plan.kernels(self.args.state.state_dtype, self.args.state.state_layout)
    }

    fn launch(&self, mut views: Views, stream: &Stream, plan: &Layer, _: Part) -> Fallible<()> {
        let (s, conv, h) = (&self.spec, self.spec.conv(), &self.spec.heads);
        let channels = conv.total_channels();
        let rows = views.get("projections", [self.tokens, columns(&conv)])?;
        let ba = views.get("ba", [self.tokens, 2 * h.value])?;
        let [a, b] = Gate::interleaved(&ba, self.args.layout.groups(h), h.value)?;
        let (x, z) = match self.args.layout {
            RowLayout::Flat => (
                ConvInput::flat(&rows, &conv)?,
                ConvInput::flat_z(&rows, &conv)?,
            ),
            RowLayout::Interleaved => (
                ConvInput::interleaved(&rows, &conv)?,
                ConvInput::interleaved_z(&rows, &conv)?,
            ),
        };
        let conv_states = [self.sequences(), channels, s.width - 1];
        let tensors = LayerTensors {
            cu_seqlens: None,
            x,
            z,
            a,
            b,
            weights: LayerWeights {
                conv: views.get("conv_weight", [channels, s.width])?,
                conv_bias: None,
                a_log: views.get("a_log", [h.value])?,
                dt_bias: Some(views.get("dt_bias", [h.value])?),
                norm: Some(views.get("norm_weight", [h.value_dim])?),
            },
            states: LayerStates {
                conv: views.get_mut("conv_state", conv_states)?,
                conv_layout: ConvStateLayout::ChannelMajor,
                recurrent: views.get_mut("state", self.states().shape())?,
                recurrent_layout: self.args.state.state_layout,
                slots: None,
                has_initial_state: Some(views.starts.into()),
            },
            y: views.tokens_mut("y", Rows::Packed(self.tokens), [h.value, h.value_dim])?,
        };
        plan.launch(stream, &tensors, Workspace::new(views.workspace))
    }

    fn minimal_bytes(&self, data: &LayerData) -> usize {
        data.minimal_bytes(self.args.state.state_dtype)
    }

    fn check(&self, data: &LayerData, results: &Results, progress: &mut Progress) -> Checked {
        let state = self.states().key_major(&results["state"]);
        let found = [&results["y"], &results["conv_state"], &state];
        let judged = progress.step("reference", || judge::layer(data, found))?;
        Ok(of_errors(
            "y",
            judged.y,
            judged.state,
            Some(judged.wrong_states),
        ))
    }

    fn describe(&self, plan: &Layer, _: &LayerData) -> Description {
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
            figures: figures! {
                tokens: self.tokens,
                sequences: self.sequences(),
                decodes: args.decodes,
            }
            .and(head_figures(s.dtype, &s.heads))
            .and(figures! {
                channels: s.conv().total_channels(),
                width: s.width,
                neg_eigval: s.allow_neg_eigval,
                output_gate: word(OUTPUT_GATES, &s.gate),
                layout: word(ROW_LAYOUTS, &args.layout),
                initial_state: args.initial_state,
                state_layout: word(STATE_LAYOUTS, &args.state.state_layout),
                state_dtype: args.state.state_dtype.name(),
                workspace_bytes: plan.workspace_bytes(),
            }),
            ..Default::default()
        }
    }
}
