//! The result against the f64 recurrence, beside the unfused chunk form.

use deltawave::types::Dtype;
use deltawave_lab::inputs::{Gates, Keys};
use deltawave_lab::metrics::{
    self, Comparison, HeadComparison, compare, compare_outputs, compare_states, worst,
};
use deltawave_lab::oracle::{self, Solution};

use crate::failure::Failure;
use crate::progress::Progress;
use crate::run::Outcome;
use crate::states::Resumed;
use crate::workload::Workload;

/// How far one tensor is from the reference, and how far it may be.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    /// The tensor.
    pub name: &'static str,
    /// All elements pooled.
    pub pooled: Comparison,
    /// The sequence and value head with the largest rms ratio.
    pub worst: Option<HeadComparison>,
    /// The unfused form, all elements pooled.
    pub unfused: Comparison,
    /// The largest pooled rms ratio that is allowed.
    pub limit: f64,
    /// The largest rms ratio of a sequence and head that is allowed.
    pub worst_limit: f64,
}

impl Judged {
    /// Why it is not allowed, where it is not.
    pub fn objection(&self) -> Option<String> {
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

/// The verdict on a result.
pub struct Verdict {
    /// `o`, then `final_state`.
    pub tensors: [Judged; 2],
    /// Why the result does not pass; empty where it does.
    pub objections: Vec<String>,
}

/// How much larger the error of one sequence and head may be than the pooled one, or than the unfused form's worst: a
/// defect of one head shows here long before it shows in pooled figures.
const PART_SLACK: f64 = 4.0;

/// Compares a result with the reference.
pub fn check(
    workload: &Workload,
    outcome: &Outcome,
    resumed: Option<Resumed>,
    progress: &mut Progress,
) -> Result<Verdict, Failure> {
    let problem = workload.problem();
    let reference = progress.step("oracle", || oracle::prefill(&problem))?;
    let unfused = progress.step("unfused form", || {
        oracle::unfused(&problem, workload.spec.dtype)
    })?;
    let d = &workload.data;
    let end = d.cu_seqlens.last().map_or(0, |&n| n as usize) * d.value_heads * d.value_dim;
    let state_size = d.key_dim * d.value_dim;
    let outputs = |x: &[f64]| {
        worst(&compare_outputs(
            x,
            &reference.o,
            &d.cu_seqlens,
            d.value_heads,
            d.value_dim,
        ))
    };
    let states = |x: &[f64]| {
        worst(&compare_states(
            x,
            &reference.final_state,
            d.value_heads,
            state_size,
        ))
    };
    let parts = Solution {
        o: widened(&outcome.o.values),
        final_state: widened(&outcome.final_state.values),
    };
    let pooled = [
        compare(&parts.o[..end], &reference.o[..end]),
        compare(&parts.final_state, &reference.final_state),
    ];
    let yardstick = [
        compare(&unfused.o[..end], &reference.o[..end]),
        compare(&unfused.final_state, &reference.final_state),
    ];
    let worst_parts = [outputs(&parts.o), states(&parts.final_state)];
    let worst_unfused = [outputs(&unfused.o), states(&unfused.final_state)];
    let rounding = [
        0.0,
        match outcome.final_state.dtype {
            Dtype::Bf16 => metrics::BF16_STATE_ROUNDING,
            _ => 0.0,
        },
    ];
    let limits = limits(workload, yardstick.map(|c| c.rms_ratio));
    let tensors = [0, 1].map(|i| {
        let limit = limits[i] + rounding[i];
        let unfused = worst_unfused[i].map_or(0.0, |w| w.comparison.rms_ratio);
        Judged {
            name: ["o", "final_state"][i],
            pooled: pooled[i],
            worst: worst_parts[i],
            unfused: yardstick[i],
            limit,
            worst_limit: PART_SLACK * limit.max(unfused),
        }
    });
    let mut objections: Vec<String> = tensors.iter().filter_map(Judged::objection).collect();
    if outcome.o.values[end..].iter().any(|x| x.to_bits() != 0) {
        objections.push("o: rows past the last sequence are not zeros".to_owned());
    }
    if let Some(others) = outcome.others.filter(|others| others.changed > 0) {
        objections.push(format!(
            "pool: {} of {} slots of no sequence have changed",
            others.changed, others.slots
        ));
    }
    if let Some(resumed) = resumed {
        let limit = tensors[0].limit;
        if resumed.must && !resumed.same_bits {
            objections
                .push("snapshots: what is continued has other bits than the whole".to_owned());
        } else if resumed.rms_ratio > limit || resumed.rms_ratio.is_nan() {
            objections.push(format!(
                "snapshots: what is continued is {:.2e} off the whole, above {limit:.2e}",
                resumed.rms_ratio
            ));
        }
    }
    Ok(Verdict {
        tensors,
        objections,
    })
}

/// The largest pooled rms ratios of o and the final state that are allowed, given those of the unfused form.
///
/// On inputs like those that the bar was measured on: the bar, and hardly more than the unfused form. On others, which
/// have no bar of their own and few samples: a little more than the larger of the two.
fn limits(w: &Workload, unfused: [f64; 2]) -> [f64; 2] {
    let s = &w.spec;
    let large = s.value_heads >= 8 && w.data.tokens >= 1024;
    let standard = w.drawn.filter(|d| {
        large
            && (s.key_dim, s.value_dim) == (128, 128)
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
