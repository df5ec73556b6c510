//! Results beside the oracle.

use deltawave::runtime::Context;
use deltawave::types::Dtype;
use deltawave_lab::inputs::Gates;
pub use deltawave_lab::metrics::bar;
use deltawave_lab::metrics::{BF16_STATE_ROUNDING, Comparison, F16_STATE_ROUNDING, compare};
use deltawave_lab::oracle::{self, Solution};

use super::{Case, Data, Output, run};

/// Distances of a result from the oracle, and of the unfused form from it.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    pub o: Comparison,
    pub state: Comparison,
    pub unfused_o: Comparison,
    pub unfused_state: Comparison,
    /// Root mean square and largest magnitude of the reference.
    pub o_size: (f64, f64),
    pub state_size: (f64, f64),
}

fn size(x: &[f64]) -> (f64, f64) {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64;
    (mean.sqrt(), x.iter().fold(0.0, |m, x| m.max(x.abs())))
}

pub fn judge(case: &Case, data: &Data, output: &Output) -> Judged {
    let problem = data.problem(case);
    let Solution { o, final_state } = oracle::prefill(&problem).expect("a problem");
    let unfused = oracle::unfused(&problem, case.spec.dtype).expect("a problem");
    let end = *data.cu_seqlens.last().expect("not empty") as usize
        * case.spec.heads.value
        * case.spec.heads.value_dim;
    assert!(
        output.o[end..].iter().all(|x| x.to_bits() == 0),
        "rows past the last sequence must be zeros"
    );
    let empty: Vec<f32> = Vec::new();
    let state = output.state.as_ref().unwrap_or(&empty);
    let reference = if output.state.is_some() {
        &final_state[..]
    } else {
        &[]
    };
    Judged {
        o: compare(&output.o[..end], &o[..end]),
        state: compare(state, reference),
        unfused_o: compare(&unfused.o[..end], &o[..end]),
        unfused_state: compare(&unfused.final_state, &final_state),
        o_size: size(&o[..end]),
        state_size: size(&final_state),
    }
}

/// Runs a case and holds it to the accuracy of the unfused form, with room for what small samples scatter.
pub fn check(context: &Context, case: &Case) -> Judged {
    check_data(context, case, &case.data())
}

/// [`check`] with inputs that were changed.
pub fn check_data(context: &Context, case: &Case, data: &Data) -> Judged {
    let output = run(context, case, data);
    check_output(case, data, &output, 1.15)
}

/// Holds a result to `slack` times the accuracy of the unfused form: root mean square and largest error.
pub fn check_output(case: &Case, data: &Data, output: &Output, slack: f64) -> Judged {
    let j = judge(case, data, output);
    let bars = bar(case.spec.dtype, Gates::Mixed);
    // A state of 16 bits is rounded once more, in bf16 by 1.7e-3 in the mean.
    let (rounding, bf16_state) = match case.final_state.map(|k| k.dtype) {
        Some(Dtype::Bf16) => (BF16_STATE_ROUNDING, true),
        Some(Dtype::F16) => (F16_STATE_ROUNDING, false),
        _ => (0.0, false),
    };
    let parts = [
        ("o", j.o, j.unfused_o, j.o_size, bars.0, 0.0),
        (
            "final state",
            j.state,
            j.unfused_state,
            j.state_size,
            bars.1,
            rounding,
        ),
    ];
    for (name, error, unfused, (reference, peak), bar, rounding) in parts {
        // Where the unfused form breaks down it is no measure.
        let (ratio, largest) = if unfused.finite() {
            (unfused.rms_ratio.max(bar), unfused.max_abs)
        } else {
            (bar, 0.0)
        };
        let limit = slack * ratio + rounding;
        assert!(
            error.rms_ratio <= limit,
            "{name}: {error:?}, limit {limit:.2e}\n{}",
            case.expression()
        );
        // Half a unit of the largest element is what rounding the result alone may cost.
        let half_unit = if (rounding == 0.0 || !bf16_state) && case.spec.dtype == Dtype::F16 {
            f64::powi(2.0, -11)
        } else {
            f64::powi(2.0, -8)
        };
        let limit = slack * (2.0 * largest).max(12.0 * ratio * reference) + half_unit * peak;
        assert!(
            error.max_abs <= limit,
            "{name}: {error:?}, limit of the largest error {limit:.2e}\n{}",
            case.expression()
        );
    }
    j
}
