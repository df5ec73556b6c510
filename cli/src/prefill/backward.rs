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
use deltawave_lab::oracle::{self, Problem, Upstream};
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
    pub(super) file: Rc<PrefillFile>,
    pub(super) d_o: HostTensor,
    /// `[N, HV, K, V]`.
    pub(super) d_final: HostTensor,
}

impl Data {
    /// Draws the gradients that come in.
    pub(super) fn draw(run: &PrefillRun<'_>, file: Rc<PrefillFile>) -> Self {
        let seed = run.args.seed.unwrap_or(0);
        let h = &run.spec.heads;
        let states = run.sequences() * h.value * h.key_dim * h.value_dim;
        Data {
            d_o: random_state(run.spec.dtype, file.v.values.len(), seed + 1),
            d_final: random_state(Dtype::F32, states, seed + 2),
            file,
        }
    }

    /// The inputs of the prefill.
    pub(super) fn inputs(&self) -> &PrefillFile {
        &self.file
    }

    /// Inputs, gradients that come in and gradients that go out: each once.
    pub(super) fn minimal_bytes(&self, run: &PrefillRun<'_>) -> usize {
        let f = &self.file;
        let rows = 2 * (f.q.bytes.len() + f.k.bytes.len() + f.v.bytes.len()) + self.d_o.bytes.len();
        let states = if f.initial_state.is_some() { 3 } else { 2 };
        let gates = 4 * size_of::<f32>() * run.tokens * run.spec.heads.value;
        rows + gates + states * self.d_final.bytes.len()
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

/// Figures that are `null` without a check.
pub(super) const CHECKED: &str =
    "dq_rms_ratio dk_rms_ratio dv_rms_ratio dg_rms_ratio dbeta_rms_ratio ds0_rms_ratio";

/// Factor on the error of FLA's chain that a gradient may have.
const SLACK: f64 = 1.15;
/// The errors of a gradient and of the chain scatter by the first over sqrt(m), plus the second over m, for m independent rows.
/// Chosen so that none of thousands of small random batches fails.
const SCATTER: [f64; 2] = [2.0, 2.0];
/// The same for gradients of g or a, whose numbers within a chunk are sums of the same terms.
const SCATTER_OF_G: [f64; 2] = [10.0, 2.0];
/// Fewer gates than this are few: chunks are too, and the sensitivity of gradients to rounded inputs is estimated.
const FEW: usize = 8192;
/// Draws of such an estimate.
const DRAWS: u64 = 4;

/// Half of the largest relative error of rounding to a type.
fn epsilon(dtype: Dtype) -> f64 {
    match dtype {
        Dtype::F16 => f64::from(f32::EPSILON) * 8192.0 / 4.0,
        _ => f64::from(f32::EPSILON) * 65536.0 / 4.0,
    }
}

/// Independent rows of a gradient: equal rows count one each, and fewer where some of them hold most of the sum of squares.
fn independent(x: &[f64], row: usize) -> f64 {
    let squares = x
        .chunks(row.max(1))
        .map(|row| row.iter().map(|x| x * x).sum::<f64>());
    let (sum, of_squares) = squares.fold((0.0, 0.0), |(sum, of_squares), x| {
        (sum + x, of_squares + x * x)
    });
    match of_squares > 0.0 {
        true => sum * sum / of_squares,
        false => 1.0,
    }
}

/// The rms ratio that a gradient may have. `chain`: that of FLA's chain. `sensitivity`: of exact gradients of rounded inputs.
/// A gradient that is a difference of large terms has a large sensitivity, and may be far from the chain's by chance.
fn limit(dtype: Dtype, scatter: [f64; 2], chain: f64, sensitivity: f64, rows: f64) -> f64 {
    let scatter = scatter[0] / rows.sqrt() + scatter[1] / rows;
    SLACK * chain + scatter * chain.max(sensitivity).max(epsilon(dtype))
}

/// A gradient in f64, and the rms ratios of FLA's chain and of the limit. The limit is infinite where the gradient is 0.
struct Bar {
    exact: Vec<f64>,
    chain: f64,
    limit: f64,
}

/// The bars of all gradients, in the order of [`GRADIENTS`].
fn bars(
    problem: &Problem<'_>,
    up: &Upstream<'_>,
    dtype: Dtype,
    progress: &mut Progress,
) -> Result<Vec<Bar>, Failure> {
    let exact = list(progress.step("oracle", || oracle::backward(problem, up))?);
    let unfused = || oracle::unfused_backward(problem, up, dtype);
    let unfused = list(progress.step("unfused form", unfused)?);
    let few = problem.tokens * problem.value_heads < FEW;
    let sensitivities = match few {
        true => sensitivities(problem, up, dtype, &exact)?,
        false => [0.0; 8],
    };
    let (keys, values) = (problem.key_dim, problem.value_dim);
    // Numbers of a row share the factors of their token and head.
    let rows = [keys, keys, values, 1, 1, 1, 1, values];
    let all = exact.into_iter().zip(unfused).enumerate();
    let bar = |(i, (exact, unfused)): (usize, (Vec<f64>, Vec<f64>))| {
        let chain = compare(&unfused, &exact).rms_ratio;
        let scatter = if i == 3 && few { SCATTER_OF_G } else { SCATTER };
        let rows = independent(&exact, rows[i]);
        Bar {
            limit: limit(dtype, scatter, chain, sensitivities[i], rows),
            exact,
            chain,
        }
    };
    Ok(all.map(bar).collect())
}

/// Whether a gradient is as good as its bar says. One whose exact values are 0 has no ratio: it must be finite.
fn passes(error: &Comparison, limit: f64) -> bool {
    error.finite() && error.rms_ratio <= limit
}

/// Rms ratios of exact gradients whose inputs were moved by up to one rounding, against those of the inputs themselves.
fn sensitivities(
    problem: &Problem<'_>,
    up: &Upstream<'_>,
    dtype: Dtype,
    exact: &[Vec<f64>; 8],
) -> Result<[f64; 8], Failure> {
    let mut errors = [0.0; 8];
    for draw in 0..DRAWS {
        let mut state = draw + 1;
        let mut moved = |x: &[f32]| -> Vec<f32> {
            let each = x.iter().map(|x| {
                // The upper bits of a linear congruential generator of Knuth's.
                state = (state.wrapping_mul(6_364_136_223_846_793_005))
                    .wrapping_add(1_442_695_040_888_963_407);
                let unit = (state >> 40) as f64 / f64::from(1 << 23) - 1.0;
                (f64::from(*x) * (1.0 + 2.0 * epsilon(dtype) * unit)) as f32
            });
            each.collect()
        };
        let [q, k, v, d_o] = [problem.q, problem.k, problem.v, up.d_o].map(&mut moved);
        let problem = Problem {
            q: &q,
            k: &k,
            v: &v,
            ..*problem
        };
        let found = list(oracle::backward(&problem, &Upstream { d_o: &d_o, ..*up })?);
        for ((error, found), exact) in errors.iter_mut().zip(&found).zip(exact) {
            let ratio = compare(found, exact).rms_ratio;
            if ratio.is_finite() {
                *error += ratio * ratio / DRAWS as f64;
            }
        }
    }
    Ok(errors.map(f64::sqrt))
}

/// Gradients in the order of [`GRADIENTS`].
fn list(g: oracle::Gradients) -> [Vec<f64>; 8] {
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
}

/// Whether the kernels get raw gates.
pub(super) fn is_raw(run: &PrefillRun<'_>) -> bool {
    match &run.source {
        Source::Drawn(draw) => draw.raw_gates,
        Source::File(file) => {
            matches!(file.gate, FileGate::Raw { .. }) && matches!(file.beta, FileBeta::Logits(_))
        }
    }
}

/// Refuses what a backward does not take.
pub(super) fn refuse(run: &PrefillRun<'_>) -> Result<(), Failure> {
    if let Source::File(file) = &run.source {
        let raw = [
            matches!(file.gate, FileGate::Raw { .. }),
            matches!(file.beta, FileBeta::Logits(_)),
        ];
        if raw[0] != raw[1] {
            let why = "--backward takes both gates raw, or neither: the file has one of a and b";
            return Err(Failure::wrong(why));
        }
    }
    Ok(())
}

/// Writes the gradients, and what they follow from, to the file of `--output`.
pub(super) fn write_output(
    run: &PrefillRun<'_>,
    data: &Data,
    results: &Results,
) -> Result<(), Failure> {
    let Some(path) = &run.args.output else {
        return Ok(());
    };
    let (h, tokens) = (&run.spec.heads, run.tokens);
    let states = run.states(run.sequences());
    let d_initial = states.key_major(&results["d_initial"]);
    let (keys, values) = ([tokens, h.key, h.key_dim], [tokens, h.value, h.value_dim]);
    let state_shape = [states.count, h.value, h.key_dim, h.value_dim];
    let (scalars, per_head) = ([tokens, h.value], [h.value]);
    let raw = is_raw(run);
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

/// The title of a backward, by that of its prefill.
pub(super) fn title(of_prefill: &str) -> String {
    of_prefill.replace("prefill", "backward of prefill")
}

impl Operation for BackwardRun<'_> {
    type Plan = Plan;
    type Data = Data;

    const NAME: &'static str = "backward";
    const CHECKED: &'static str = CHECKED;
    const CHECK_STEPS: usize = 2;

    fn plan(&self, context: &Context) -> Result<Plan, Failure> {
        let forward = self.0.plan(context)?;
        let backward = PrefillBackward::of(&forward)
            .map_err(Failure::during("planning the backward failed"))?;
        Ok(Plan {
            forward,
            backward,
            raw: is_raw(&self.0),
        })
    }

    fn draw(&mut self, plan: &Plan) -> Result<Data, Failure> {
        let file = self.0.draw(&plan.forward)?;
        Ok(Data::draw(&self.0, file))
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

    fn kernels(&self, plan: &Plan) -> Vec<&'static str> {
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

    fn minimal_bytes(&self, data: &Data) -> usize {
        data.minimal_bytes(&self.0)
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
        write_output(&self.0, data, results)
    }

    fn check(&self, data: &Data, results: &Results, progress: &mut Progress) -> Checked {
        check(&self.0, data, results, progress)
    }

    fn describe(&self, plan: &Plan, data: &Data) -> Description {
        let mut description = (self.0).description(plan.backward.workspace_bytes(), &data.file);
        description.title[0] = title(&description.title[0]);
        description
    }
}

/// Compares gradients with the reverse recurrence in f64.
pub(super) fn check(
    run: &PrefillRun<'_>,
    data: &Data,
    results: &Results,
    progress: &mut Progress,
) -> Checked {
    let problem = run.problem(&data.file);
    let up = Upstream {
        d_o: &data.d_o.values,
        d_final: Some(&data.d_final.values),
    };
    let bars = bars(&problem, &up, run.spec.dtype, progress)?;
    let raw = is_raw(run);
    let states = run.states(run.sequences());
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
    for (gradient, bar) in GRADIENTS.iter().zip(bars) {
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
        let error: Comparison = compare(&found.values, &bar.exact);
        let (chain, most) = (bar.chain, bar.limit);
        let passed = passes(&error, most);
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

#[cfg(test)]
mod tests {
    use deltawave::types::HeadMap;
    use deltawave_lab::oracle::{Beta, Gate};

    use super::*;

    /// Inputs of one sequence: q, k, v, d_o, g and beta.
    fn drawn(tokens: usize, [key_dim, value_dim]: [usize; 2], seed: u64) -> [Vec<f32>; 6] {
        let normal = |n: usize, seed| random_state(Dtype::Bf16, n, seed).values;
        let unit = |n: usize, seed| -> Vec<f32> {
            let gates = random_state(Dtype::F32, n, seed).values;
            gates.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect()
        };
        let scale = 1.0 / (key_dim as f32).sqrt();
        let keys = |seed| -> Vec<f32> {
            let rows = normal(tokens * key_dim, seed);
            let scaled = rows.iter().map(|x| x * scale).collect();
            HostTensor::new(Dtype::Bf16, scaled).values
        };
        [
            keys(seed),
            keys(seed + 1),
            normal(tokens * value_dim, seed + 2),
            normal(tokens * value_dim, seed + 3),
            unit(tokens, seed + 4).iter().map(|x| x.ln()).collect(),
            unit(tokens, seed + 5),
        ]
    }

    /// Gradients as good as rounding allows pass, those with a planted error do not: of one token and of many.
    #[test]
    fn planted_errors_fail() {
        for (tokens, dims, seed) in [
            (1, [16, 16], 1),
            (2, [16, 32], 11),
            (5, [32, 16], 21),
            (150, [16, 16], 31),
        ] {
            let [q, k, v, d_o, g, beta] = drawn(tokens, dims, seed);
            let problem = Problem {
                tokens,
                key_heads: 1,
                value_heads: 1,
                key_dim: dims[0],
                value_dim: dims[1],
                q: &q,
                k: &k,
                v: &v,
                gate: Gate::Log(&g),
                beta: Beta::Given(&beta),
                cu_seqlens: &[0, tokens as i32],
                initial_state: None,
                has_initial_state: None,
                scale: None,
                head_map: HeadMap::Grouped,
                l2_norm: false,
            };
            let up = Upstream {
                d_o: &d_o,
                d_final: None,
            };
            let dtype = Dtype::Bf16;
            let mut progress = Progress::new(2);
            let bars = bars(&problem, &up, dtype, &mut progress).expect("a problem");
            for (gradient, bar) in GRADIENTS.iter().zip(bars) {
                let Some([name, ..]) = gradient.given else {
                    continue;
                };
                let what = format!("{name} of {tokens} tokens, limit {:.1e}", bar.limit);
                let exact: Vec<f32> = bar.exact.iter().map(|x| *x as f32).collect();
                let passed = |found: &[f32]| passes(&compare(found, &bar.exact), bar.limit);
                assert!(
                    passed(&HostTensor::new(dtype, exact.clone()).values),
                    "{what}"
                );
                if exact.iter().all(|x| *x == 0.0) {
                    assert!(!passed(&vec![f32::NAN; exact.len()]), "{what}");
                    continue;
                }
                assert!(bar.limit < 0.2, "{what}");
                // A factor that is wrong, a sign, a row that is missing, and a number that was never written.
                let scaled: Vec<f32> = exact.iter().map(|x| 1.25 * x).collect();
                let negative: Vec<f32> = exact.iter().map(|x| -x).collect();
                assert!(!passed(&scaled) && !passed(&negative), "{what}");
                let mut missing = exact.clone();
                let largest =
                    (0..missing.len()).max_by(|i, j| exact[*i].abs().total_cmp(&exact[*j].abs()));
                missing[largest.expect("not empty")] = 0.0;
                if tokens <= 5 && name != "ds0" {
                    assert!(!passed(&missing), "{what}");
                }
                missing[0] = f32::NAN;
                assert!(!passed(&missing), "{what}");
            }
        }
    }

    #[test]
    fn limits_follow_the_independent_rows() {
        assert_eq!(independent(&[1.0; 64], 1), 64.0);
        assert_eq!(independent(&[1.0; 64], 16), 4.0);
        assert_eq!(independent(&[0.0; 64], 16), 1.0);
        assert!(independent(&[100.0, 1.0, 1.0, 1.0], 1) < 1.01);
        let at = |rows| limit(Dtype::Bf16, SCATTER, 3e-3, 0.0, rows);
        assert!(at(1.0) > 4.0 * at(1000.0) && at(1e6) < 3e-3 * 1.16);
    }
}
