//! The result against the f64 recurrence, beside the unfused chunk form.

use deltawave::types::Dtype;
use deltawave_lab::inputs::{Gates, Keys};
use deltawave_lab::metrics::{
    self, Comparison, HeadComparison, compare, compare_outputs, compare_states, worst,
};
use deltawave_lab::oracle::{self, Solution};

use serde_json::{Value, json};

use super::Workload;
use super::device::Output;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::report::{Verdict, figures};
use crate::table::Table;

/// How far one tensor is from the reference, and how far it may be.
#[derive(Clone, Copy, Debug)]
struct Judged {
    /// The tensor.
    name: &'static str,
    /// All elements pooled.
    pooled: Comparison,
    /// The sequence and value head with the largest rms ratio.
    worst: Option<HeadComparison>,
    /// The unfused form, all elements pooled.
    unfused: Comparison,
    /// The largest pooled rms ratio that is allowed.
    limit: f64,
    /// The largest rms ratio of a sequence and head that is allowed.
    worst_limit: f64,
}

impl Judged {
    /// Why it is not allowed, where it is not.
    fn objection(&self) -> Option<String> {
        let Judged {
            name,
            pooled,
            limit,
            ..
        } = self;
        if !pooled.finite() {
            return Some(format!(
                "{name}: {} of {} elements are NaN or infinite",
                pooled.non_finite, pooled.elements
            ));
        }
        if pooled.rms_ratio > *limit {
            return Some(format!(
                "{name}: rms ratio {:.2e} is above {limit:.2e}",
                pooled.rms_ratio
            ));
        }
        let worst = self
            .worst
            .filter(|w| w.comparison.rms_ratio > self.worst_limit)?;
        Some(format!(
            "{name}: rms ratio {:.2e} of sequence {}, head {} is above {:.2e}",
            worst.comparison.rms_ratio, worst.sequence, worst.head, self.worst_limit
        ))
    }
}

/// How much larger the error of one sequence and head may be than the pooled one, or than the unfused form's worst: a
/// defect of one head shows here long before it shows in pooled figures.
const PART_SLACK: f64 = 4.0;

impl Workload<'_> {
    /// Compares results with the reference.
    pub(super) fn judge(
        &self,
        output: &Output,
        progress: &mut Progress,
    ) -> Result<Verdict, Failure> {
        let problem = self.problem();
        let reference = progress.step("oracle", || oracle::prefill(&problem))?;
        let unfused = progress.step("unfused form", || {
            oracle::unfused(&problem, self.spec.dtype)
        })?;
        let found = Solution {
            o: widened(&output.o.values),
            final_state: widened(&output.final_state.values),
        };
        let [found, unfused] = [found, unfused].map(|s| self.compared(&s, &reference));
        let rounding = match output.final_state.dtype {
            Dtype::Bf16 => [0.0, metrics::BF16_STATE_ROUNDING],
            _ => [0.0; 2],
        };
        let limits = limits(self, unfused.map(|(pooled, _)| pooled.rms_ratio));
        let judged = [0, 1].map(|i| {
            let limit = limits[i] + rounding[i];
            let ((pooled, worst), (yardstick, worst_unfused)) = (found[i], unfused[i]);
            let unfused = worst_unfused.map_or(0.0, |w| w.comparison.rms_ratio);
            Judged {
                name: ["o", "final_state"][i],
                pooled,
                worst,
                unfused: yardstick,
                limit,
                worst_limit: PART_SLACK * limit.max(unfused),
            }
        });
        Ok(Verdict {
            figures: error_figures(&judged),
            text: error_table(&judged).to_string(),
            objections: self.objections(output, &judged),
        })
    }

    /// o and the final state: the error of all elements, and the largest of a sequence and head.
    fn compared(
        &self,
        x: &Solution,
        exact: &Solution,
    ) -> [(Comparison, Option<HeadComparison>); 2] {
        let d = &self.data;
        let (heads, end) = (d.value_heads, self.end());
        let outputs = compare_outputs(&x.o, &exact.o, &d.cu_seqlens, heads, d.value_dim);
        let each = d.key_dim * d.value_dim;
        let states = compare_states(&x.final_state, &exact.final_state, heads, each);
        [
            (compare(&x.o[..end], &exact.o[..end]), worst(&outputs)),
            (compare(&x.final_state, &exact.final_state), worst(&states)),
        ]
    }

    /// Elements of o before the end of the last sequence.
    fn end(&self) -> usize {
        let d = &self.data;
        d.cu_seqlens.last().map_or(0, |&n| n as usize) * d.value_heads * d.value_dim
    }

    fn objections(&self, output: &Output, judged: &[Judged; 2]) -> Vec<String> {
        let mut objections: Vec<String> = judged.iter().filter_map(Judged::objection).collect();
        if output.o.values[self.end()..]
            .iter()
            .any(|x| x.to_bits() != 0)
        {
            objections.push("o: rows past the last sequence are not zeros".to_owned());
        }
        if let Some(others) = output.others.filter(|others| others.changed > 0) {
            objections.push(format!(
                "pool: {} slots that no sequence writes have changed",
                others.changed
            ));
        }
        if let Some(resumed) = output.resumed {
            let limit = judged[0].limit;
            if resumed.must && !resumed.same_bits {
                objections
                    .push("snapshots: continued sequences differ from the whole ones".to_owned());
            } else if resumed.rms_ratio > limit || resumed.rms_ratio.is_nan() {
                objections.push(format!(
                    "snapshots: the error of continued sequences, {:.2e}, is above {limit:.2e}",
                    resumed.rms_ratio
                ));
            }
        }
        objections
    }
}

fn error_figures(judged: &[Judged; 2]) -> crate::report::Figures {
    let [o, state] = judged;
    let worst = |j: &Judged| {
        j.worst.map_or(Value::Null, |w| {
            json!({
                "sequence": w.sequence,
                "head": w.head,
                "rms_ratio": w.comparison.rms_ratio,
                "max_abs": w.comparison.max_abs,
            })
        })
    };
    figures! {
        o_rms_ratio: o.pooled.rms_ratio,
        o_max_abs: o.pooled.max_abs,
        state_rms_ratio: state.pooled.rms_ratio,
        state_max_abs: state.pooled.max_abs,
        unfused_o_rms_ratio: o.unfused.rms_ratio,
        unfused_state_rms_ratio: state.unfused.rms_ratio,
        o_rms_ratio_limit: o.limit,
        state_rms_ratio_limit: state.limit,
        o_worst: worst(o),
        state_worst: worst(state),
        non_finite: o.pooled.non_finite + state.pooled.non_finite,
    }
}

fn error_table(judged: &[Judged; 2]) -> Table {
    let titles = [
        "error against f64",
        "rms ratio",
        "unfused form",
        "limit",
        "max abs",
        "worst head",
        "of sequence, head",
        "",
    ];
    let mut table = Table::new(1, &titles);
    let number = |x: f64| format!("{x:.2e}");
    for j in judged {
        let worst = j.worst.map(|w| {
            let ratio = number(w.comparison.rms_ratio);
            (ratio, format!("{}, {}", w.sequence, w.head))
        });
        let (ratio, place) = worst.unwrap_or_default();
        let verdict = if j.objection().is_some() {
            "FAILED"
        } else {
            "ok"
        };
        table.row([
            j.name.to_owned(),
            number(j.pooled.rms_ratio),
            number(j.unfused.rms_ratio),
            number(j.limit),
            number(j.pooled.max_abs),
            ratio,
            place,
            verdict.to_owned(),
        ]);
    }
    table
}

/// The largest pooled rms ratios of o and the final state that are allowed, given those of the unfused form.
///
/// On inputs like those that the bar was measured on: the bar, and hardly more than the unfused form. On others, which
/// have no bar of their own and few samples: a little more than the larger of the two.
fn limits(w: &Workload, unfused: [f64; 2]) -> [f64; 2] {
    let s = &w.spec;
    let large = s.heads.value >= 8 && w.data.tokens >= 1024;
    let standard = w.drawn.filter(|d| {
        large
            && (s.heads.key_dim, s.heads.value_dim) == (128, 128)
            && d.input.keys == Keys::Normal
            && !d.raw_gates
            && !w.neg_eigval
            && d.initial_state.is_none()
    });
    match standard {
        Some(draw) => {
            let (o, state) = metrics::bar(s.dtype, draw.input.gates);
            [
                o.min(metrics::UNFUSED_SLACK * unfused[0]),
                state.min(metrics::UNFUSED_SLACK * unfused[1]),
            ]
        }
        None => {
            let (o, state) = metrics::bar(s.dtype, Gates::Mixed);
            [o.max(unfused[0]), state.max(unfused[1])].map(|x| metrics::SMALL_SHAPE_SLACK * x)
        }
    }
}

fn widened(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}
