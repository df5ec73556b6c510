//! `deltawave prefill --backward`: gradients of the inputs of a prefill, from drawn gradients of its outputs and final
//! states.

use std::rc::Rc;

use deltawave::prefill::{BackwardTensors, Part, Prefill, PrefillBackward};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::state::{InitialState, State, StateMut};
use deltawave::tensor::TokenScalarsMut;
use deltawave::types::Dtype;
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Tensor as HostTensor, random_state};
use deltawave_lab::metrics::{Comparison, compare};
use deltawave_lab::oracle::{self, Upstream};
use deltawave_lab::safetensors_io::{self, FileBeta, FileGate, Named, PrefillFile};
use serde_json::json;

use super::{PrefillRun, Source};
use crate::device::{Fallible, Results, Rows, Slots, Views};
use crate::driver::{Operation, Options};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::recurrence;
use crate::report::{Checked, Description, Figures, Verdict};
use crate::table::Table;

/// The backward of a prefill.
pub(super) struct BackwardRun<'a>(pub(super) PrefillRun<'a>);

/// The plan, and whether gates are raw.
pub(super) struct Plan {
    forward: Prefill,
    backward: PrefillBackward,
    raw: bool,
}

/// Inputs of the prefill, and gradients of what it returns.
pub(super) struct Data {
    file: Rc<PrefillFile>,
    d_o: HostTensor,
    /// `[N, HV, K, V]`.
    d_final: HostTensor,
}

impl Data {
    /// The inputs of the prefill.
    pub(super) fn inputs(&self) -> &PrefillFile {
        &self.file
    }
}

/// A gradient: its tensor, figure of its error and of the limit, with given gates and with raw ones.
struct Gradient {
    tensor: &'static str,
    given: Option<[&'static str; 3]>,
    raw: [&'static str; 3],
}

macro_rules! names {
    ($stem:literal) => {
        [
            $stem,
            concat!($stem, "_rms_ratio"),
            concat!($stem, "_rms_ratio_limit"),
        ]
    };
}

const GRADIENTS: [Gradient; 8] = {
    const fn same(tensor: &'static str, names: [&'static str; 3]) -> Gradient {
        Gradient {
            tensor,
            given: Some(names),
            raw: names,
        }
    }
    const fn of(
        tensor: &'static str,
        given: Option<[&'static str; 3]>,
        raw: [&'static str; 3],
    ) -> Gradient {
        Gradient { tensor, given, raw }
    }
    [
        same("d_q", names!("dq")),
        same("d_k", names!("dk")),
        same("d_v", names!("dv")),
        of("d_g", Some(names!("dg")), names!("da")),
        of("d_beta", Some(names!("dbeta")), names!("db")),
        of("d_a_log", None, names!("da_log")),
        of("d_dt_bias", None, names!("ddt_bias")),
        same("d_initial", names!("ds0")),
    ]
};

/// Factor on the error of FLA's chain that a gradient may have: errors of single batches scatter.
const SLACK: f64 = 1.15;
/// Gradients of gates of fewer numbers than this scatter more: they may have the error `SMALL`, times the type's epsilon.
const FEW: usize = 8192;
const SMALL: f64 = 4.0;

impl BackwardRun<'_> {
    fn is_raw(&self) -> bool {
        match &self.0.source {
            Source::Drawn(draw) => draw.raw_gates,
            Source::File(file) => {
                matches!(file.gate, FileGate::Raw { .. })
                    && matches!(file.beta, FileBeta::Logits(_))
            }
        }
    }

    /// Refuses what a backward does not take.
    pub(super) fn refuse(&self) -> Result<(), Failure> {
        if let Source::File(file) = &self.0.source {
            let raw = [
                matches!(file.gate, FileGate::Raw { .. }),
                matches!(file.beta, FileBeta::Logits(_)),
            ];
            if raw[0] != raw[1] {
                let why =
                    "--backward takes both gates raw, or neither: the file has one of a and b";
                return Err(Failure::wrong(why));
            }
        }
        Ok(())
    }

    /// Writes the gradients, and what they follow from, to the file of `--output`.
    fn write_output(&self, data: &Data, results: &Results) -> Result<(), Failure> {
        let Some(path) = &self.0.args.output else {
            return Ok(());
        };
        let (h, tokens) = (&self.0.spec.heads, self.0.tokens);
        let states = self.0.states(self.0.sequences());
        let d_initial = states.key_major(&results["d_initial"]);
        let (keys, values) = ([tokens, h.key, h.key_dim], [tokens, h.value, h.value_dim]);
        let state_shape = [states.count, h.value, h.key_dim, h.value_dim];
        let (scalars, per_head) = ([tokens, h.value], [h.value]);
        let raw = self.is_raw();
        let of_gates = if raw {
            ["d_a", "d_b"]
        } else {
            ["d_g", "d_beta"]
        };
        let mut tensors: Vec<(&str, &[usize], &HostTensor)> = vec![
            ("d_o", &values, &data.d_o),
            ("d_final_state", &state_shape, &data.d_final),
            ("d_q", &keys, &results["d_q"]),
            ("d_k", &keys, &results["d_k"]),
            ("d_v", &values, &results["d_v"]),
            (of_gates[0], &scalars, &results["d_g"]),
            (of_gates[1], &scalars, &results["d_beta"]),
            ("d_initial_state", &state_shape, &d_initial),
        ];
        if raw {
            tensors.push(("d_A_log", &per_head, &results["d_a_log"]));
            tensors.push(("d_dt_bias", &per_head, &results["d_dt_bias"]));
        }
        let tensors: Vec<Named> = (tensors.into_iter())
            .map(|(name, shape, t)| Named {
                name,
                shape,
                dtype: t.dtype,
                bytes: &t.bytes,
            })
            .collect();
        safetensors_io::write(path, &tensors).map_err(Failure::file("--output", path))
    }

    fn limit(&self, chain: f64, numbers: usize, of_gates: bool) -> f64 {
        let epsilon = match self.0.spec.dtype {
            Dtype::F16 => f64::from(f32::EPSILON) * 8192.0 / 4.0,
            _ => f64::from(f32::EPSILON) * 65536.0 / 4.0,
        };
        match of_gates && numbers < FEW {
            true => (SLACK * chain).max(SMALL * epsilon),
            false => SLACK * chain,
        }
    }
}

impl Operation for BackwardRun<'_> {
    type Plan = Plan;
    type Data = Data;

    const NAME: &'static str = "backward";
    const CHECKED: &'static str =
        "dq_rms_ratio dk_rms_ratio dv_rms_ratio dg_rms_ratio dbeta_rms_ratio ds0_rms_ratio";
    const CHECK_STEPS: usize = 2;

    fn plan(&self, context: &Context) -> Result<Plan, Failure> {
        let forward = self.0.plan(context)?;
        let backward = PrefillBackward::of(&forward)
            .map_err(Failure::during("planning the backward failed"))?;
        Ok(Plan {
            forward,
            backward,
            raw: self.is_raw(),
        })
    }

    fn draw(&mut self, plan: &Plan) -> Result<Data, Failure> {
        let file = self.0.draw(&plan.forward)?;
        let seed = self.0.args.seed.unwrap_or(0);
        let h = &self.0.spec.heads;
        let states = self.0.sequences() * h.value * h.key_dim * h.value_dim;
        Ok(Data {
            d_o: random_state(self.0.spec.dtype, file.v.values.len(), seed + 1),
            d_final: random_state(Dtype::F32, states, seed + 2),
            file,
        })
    }

    fn slots<'a>(&self, plan: &Plan, data: &'a Data) -> Slots<'a> {
        let (run, file) = (&self.0, &data.file);
        let (h, dtype) = (&run.spec.heads, run.spec.dtype);
        let states = run.states(run.sequences());
        let scalars = run.tokens * h.value;
        let slots = Slots::new(plan.backward.workspace_bytes()).starts(run.sequences(), true);
        let slots = recurrence::inputs(slots, file, run.neg_eigval)
            .made_some("initial", run.initial(file))
            .input("d_o", &data.d_o)
            .made("d_final", states.laid_out(&data.d_final, Dtype::F32))
            .output("d_q", dtype, file.q.values.len())
            .output("d_k", dtype, file.k.values.len())
            .output("d_v", dtype, file.v.values.len())
            .output("d_g", Dtype::F32, scalars)
            .output("d_beta", Dtype::F32, scalars)
            .output("d_initial", Dtype::F32, states.elements());
        match plan.raw {
            true => slots.output("d_a_log", Dtype::F32, h.value).output(
                "d_dt_bias",
                Dtype::F32,
                h.value,
            ),
            false => slots,
        }
    }

    fn kernels(plan: &Plan) -> Vec<&'static str> {
        plan.backward.kernels(plan.raw)
    }

    fn launch(&self, mut views: Views, stream: &Stream, plan: &Plan, _: Part) -> Fallible<()> {
        let run = &self.0;
        let (h, layout, rows) = (&run.spec.heads, run.args.state.state_layout, run.rows());
        let (keys, values) = ([h.key, h.key_dim], [h.value, h.value_dim]);
        let shape = run.states(run.sequences()).shape();
        let mut scalars = |name| -> Fallible<Option<TokenScalarsMut>> {
            Ok(Some(match rows {
                Rows::Packed(n) => views.get_mut(name, [n, h.value])?.into(),
                Rows::Dense([b, n]) => views.get_mut(name, [b, n, h.value])?.into(),
            }))
        };
        let (d_g, d_beta) = (scalars("d_g")?, scalars("d_beta")?);
        let initial = views.get_some("initial", shape)?;
        let tensors = BackwardTensors {
            cu_seqlens: None,
            q: views.tokens("q", rows, keys)?,
            k: views.tokens("k", rows, keys)?,
            v: views.tokens("v", rows, values)?,
            gating: recurrence::gating(&mut views, rows, h.value, run.neg_eigval)?,
            initial: initial.map(|tensor| InitialState {
                state: State { tensor, layout },
                has_initial_state: None,
            }),
            d_o: views.tokens("d_o", rows, values)?,
            d_final: Some(State {
                tensor: views.get("d_final", shape)?,
                layout,
            }),
            d_q: Some(views.tokens_mut("d_q", rows, keys)?),
            d_k: Some(views.tokens_mut("d_k", rows, keys)?),
            d_v: Some(views.tokens_mut("d_v", rows, values)?),
            d_g,
            d_beta,
            d_a_log: views.get_some_mut("d_a_log", [h.value])?,
            d_dt_bias: views.get_some_mut("d_dt_bias", [h.value])?,
            d_initial: Some(StateMut {
                tensor: views.get_mut("d_initial", shape)?,
                layout,
            }),
        };
        (plan.backward).launch(stream, &tensors, Workspace::new(views.workspace))
    }

    /// Inputs, gradients that come in and gradients that go out: each once.
    fn minimal_bytes(&self, data: &Data) -> usize {
        let f = &data.file;
        let rows = 2 * (f.q.bytes.len() + f.k.bytes.len() + f.v.bytes.len()) + data.d_o.bytes.len();
        let states = if f.initial_state.is_some() { 3 } else { 2 };
        let gates = 4 * size_of::<f32>() * self.0.tokens * self.0.spec.heads.value;
        rows + gates + states * data.d_final.bytes.len()
    }

    fn finish(
        &mut self,
        context: &Context,
        _: &Plan,
        data: &Data,
        results: &mut Results,
        _: &Options,
    ) -> Result<(), Failure> {
        self.0.outcome.simulated = context.backend() == Backend::Simulator;
        self.write_output(data, results)
    }

    fn check(&self, data: &Data, results: &Results, progress: &mut Progress) -> Checked {
        let problem = self.0.problem(&data.file);
        let up = Upstream {
            d_o: &data.d_o.values,
            d_final: Some(&data.d_final.values),
        };
        let list = |g: oracle::Gradients| {
            [
                g.q,
                g.k,
                g.v,
                g.gate,
                g.beta,
                g.a_log,
                g.dt_bias,
                g.initial_state,
            ]
        };
        let exact = list(progress.step("oracle", || oracle::backward(&problem, &up))?);
        let unfused = || oracle::unfused_backward(&problem, &up, self.0.spec.dtype);
        let unfused = list(progress.step("unfused form", unfused)?);
        let raw = self.is_raw();
        let states = self.0.states(self.0.sequences());
        let mut figures = Figures::default();
        let mut objections = Vec::new();
        let titles = [
            "error against f64",
            "rms ratio",
            "unfused form",
            "limit",
            "",
        ];
        let mut table = Table::new(1, &titles);
        for (i, gradient) in GRADIENTS.iter().enumerate() {
            let names = match raw {
                true => Some(gradient.raw),
                false => gradient.given,
            };
            let Some([name, ratio, limit]) = names else {
                continue;
            };
            let found = match gradient.tensor {
                "d_initial" => states.key_major(&results[gradient.tensor]),
                tensor => results[tensor].clone(),
            };
            let error: Comparison = compare(&found.values, &exact[i]);
            let chain = compare(&unfused[i], &exact[i]).rms_ratio;
            let most = self.limit(chain, exact[i].len(), (3..7).contains(&i));
            let passed = error.rms_ratio <= most;
            figures.0.push((ratio, json!(error.rms_ratio)));
            figures.0.push((limit, json!(most)));
            if !passed {
                let was = error.rms_ratio;
                objections.push(format!("{name}: rms ratio {was:.2e} is above {most:.2e}"));
            }
            table.row([
                name.to_owned(),
                format!("{:.2e}", error.rms_ratio),
                format!("{chain:.2e}"),
                format!("{most:.2e}"),
                if passed { "ok" } else { "FAILED" }.to_owned(),
            ]);
        }
        Ok(Verdict {
            figures,
            text: table.to_string(),
            objections,
        })
    }

    fn describe(&self, plan: &Plan, data: &Data) -> Description {
        let mut description = (self.0).description(plan.backward.workspace_bytes(), &data.file);
        description.title[0] = description.title[0].replace("prefill", "backward of prefill");
        description
    }
}
