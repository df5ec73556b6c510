//! The verdict on outputs and states by their rms errors.

use deltawave_lab::judge::Error;

use crate::report::{Verdict, figures};

/// The verdict on the output `name`, the recurrent states and, if there are conv states, how many elements of those are
/// wrong.
pub fn of_errors(name: &str, o: Error, s: Error, wrong: Option<usize>) -> Verdict {
    let passed = o.passed() && s.passed() && wrong.unwrap_or(0) == 0;
    let conv = wrong.map_or(String::new(), |n| {
        format!("; {n} elements of the conv states differ")
    });
    let objection = || {
        format!(
            "{name} is {:.2e} off, at most {:.2e} is allowed; the states are {:.2e} off, at most {:.2e} is allowed{conv}",
            o.ratio, o.limit, s.ratio, s.limit
        )
    };
    let output = match name {
        "o" => figures! { o_rms_ratio: o.ratio, o_rms_ratio_limit: o.limit },
        _ => figures! { y_rms_ratio: o.ratio, y_rms_ratio_limit: o.limit },
    };
    let states = figures! { state_rms_ratio: s.ratio, state_rms_ratio_limit: s.limit };
    let mut figures = output.and(states);
    figures.add("wrong_states", wrong);
    Verdict {
        figures,
        text: format!(
            "  check  {name} {:.2e} off (at most {:.2e}), states {:.2e} (at most {:.2e}){conv}\n",
            o.ratio, o.limit, s.ratio, s.limit
        ),
        objections: (!passed).then(objection).into_iter().collect(),
    }
}
