//! The result against the f64 recurrence, beside the unfused chunk form.

use deltawave_lab::judge::Judged;
use serde_json::{Value, json};

use super::Outcome;
use crate::report::{Figures, Verdict, figures};
use crate::table::Table;

/// The verdict on o and the final state, and on what else was found; `past` is o past the last sequence.
pub(super) fn verdict(judged: &[Judged; 2], past: &[f32], outcome: &Outcome) -> Verdict {
    Verdict {
        figures: error_figures(judged),
        text: error_table(judged).to_string(),
        objections: objections(judged, past, outcome),
    }
}

fn objections(judged: &[Judged; 2], past: &[f32], outcome: &Outcome) -> Vec<String> {
    let mut objections: Vec<String> = judged.iter().filter_map(Judged::objection).collect();
    if past.iter().any(|x| x.to_bits() != 0) {
        objections.push("o: rows past the last sequence are not zeros".to_owned());
    }
    if let Some(others) = outcome.others.filter(|others| others.changed > 0) {
        objections.push(format!(
            "pool: {} slots that no sequence writes have changed",
            others.changed
        ));
    }
    if let Some(resumed) = outcome.resumed {
        let limit = judged[0].limit;
        if resumed.must && !resumed.same_bits {
            objections.push("snapshots: continued sequences differ from the whole ones".to_owned());
        } else if resumed.rms_ratio > limit || resumed.rms_ratio.is_nan() {
            objections.push(format!(
                "snapshots: the error of continued sequences, {:.2e}, is above {limit:.2e}",
                resumed.rms_ratio
            ));
        }
    }
    objections
}

fn error_figures(judged: &[Judged; 2]) -> Figures {
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
