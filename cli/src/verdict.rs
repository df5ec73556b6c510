//! The verdict on outputs and states by their rms errors.

use crate::report::{Verdict, figures};

/// An rms error relative to the reference, and the largest that is allowed.
#[derive(Clone, Copy)]
pub struct Error {
    pub ratio: f64,
    pub limit: f64,
}

impl Error {
    fn passed(self) -> bool {
        self.ratio <= self.limit
    }
}

/// Judges the output `name`, the recurrent states and, if there are conv states, how many elements of those are wrong.
pub fn of_errors(name: &str, output: Error, state: Error, wrong: Option<usize>) -> Verdict {
    let passed = output.passed() && state.passed() && wrong.unwrap_or(0) == 0;
    let conv = wrong.map_or(String::new(), |n| {
        format!("; {n} elements of the conv states differ")
    });
    let (o, s) = (output, state);
    let objection = || {
        format!(
            "{name} is {:.2e} off, at most {:.2e} is allowed; the states are {:.2e} off, at most {:.2e} is allowed{conv}",
            o.ratio, o.limit, s.ratio, s.limit
        )
    };
    let mut figures = match name {
        "o" => figures! { o_rms_ratio: o.ratio, o_rms_ratio_limit: o.limit },
        _ => figures! { y_rms_ratio: o.ratio, y_rms_ratio_limit: o.limit },
    };
    figures
        .0
        .extend(figures! { state_rms_ratio: s.ratio, state_rms_ratio_limit: s.limit }.0);
    figures.0.extend(wrong.map(|n| ("wrong_states", n.into())));
    Verdict {
        figures,
        text: format!(
            "  check  {name} {:.2e} off (at most {:.2e}), states {:.2e} (at most {:.2e}){conv}\n",
            o.ratio, o.limit, s.ratio, s.limit
        ),
        objections: if passed {
            Vec::new()
        } else {
            vec![objection()]
        },
    }
}
