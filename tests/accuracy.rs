//! The accuracy that the project promises, on its standard inputs: 16 heads of 128 by 128, 1024 tokens, in both
//! models of the matrix unit's arithmetic. `--nocapture` prints the table.

mod common;

use common::{Case, bar, context, judge, run, simulated, spec};
use deltawave::types::Dtype;
use deltawave_lab::inputs::{Gates, Keys};
use deltawave_sim::exec::MfmaMode;

const HEADS: usize = 16;
const TOKENS: usize = 1024;
/// How much worse than the unfused form on the same input.
const AGAINST_UNFUSED: f64 = 1.05;

/// One test, because the arithmetic is an option of the whole process.
#[test]
fn bars() {
    let context = context();
    let modes: &[_] = if simulated(&context) {
        &[Some(MfmaMode::Fast), Some(MfmaMode::Exact)]
    } else {
        &[None]
    };
    println!("| MFMA | dtype | gates | keys | o | bar | unfused | state | bar | unfused |");
    println!("|---|---|---|---|---|---|---|---|---|---|");
    let mut failures = Vec::new();
    for dtype in [Dtype::Bf16, Dtype::F16] {
        for gates in [
            Gates::Normal,
            Gates::Mixed,
            Gates::Zero,
            Gates::Strong,
            Gates::Model,
        ] {
            for keys in [Keys::Normal, Keys::Silu] {
                let mut case = Case::new(spec(dtype, HEADS, HEADS, 128, 128), &[TOKENS]);
                case.gates = gates;
                case.keys = keys;
                let data = case.data();
                for mode in modes {
                    if let Some(mfma) = *mode {
                        deltawave_sim::hip::set_options(deltawave_sim::launch::Options {
                            mfma,
                            ..deltawave_sim::hip::options()
                        });
                    }
                    let j = judge(&case, &data, &run(&context, &case, &data));
                    let (o_bar, state_bar) = bar(dtype, gates);
                    let mode =
                        mode.map_or("device".to_owned(), |m| format!("{m:?}").to_lowercase());
                    let line = format!(
                        "| {mode} | {dtype} | {gates:?} | {keys:?} | {:.2e} | {o_bar:.1e} | {:.2e} | {:.2e} | \
                         {state_bar:.1e} | {:.2e} |",
                        j.o.rms_ratio,
                        j.unfused_o.rms_ratio,
                        j.state.rms_ratio,
                        j.unfused_state.rms_ratio
                    );
                    println!("{line}");
                    let o_limit = o_bar.min(AGAINST_UNFUSED * j.unfused_o.rms_ratio);
                    let state_limit = state_bar.min(AGAINST_UNFUSED * j.unfused_state.rms_ratio);
                    let finite = j.o.finite() && j.state.finite();
                    if !finite || j.o.rms_ratio > o_limit || j.state.rms_ratio > state_limit {
                        failures.push(line);
                    }
                }
            }
        }
    }
    assert!(failures.is_empty(), "\n{}", failures.join("\n"));
}
