//! `deltawave layer`.

use super::{deltawave, json, kernels, refused, text};

#[test]
fn layers_are_checked_and_counted() {
    if !kernels() {
        return;
    }
    let small = ["--heads", "2,4", "--dims", "32,48"];
    for (arguments, kernels) in [
        (&["--seqlens", "70,0,3", "--output-gate", "sigmoid"][..], 3),
        (&["--decodes", "3", "--initial-state"], 3),
        (
            &[
                "--decodes",
                "2",
                "--seqlens",
                "20",
                "--dtype",
                "fp16",
                "--state-dtype",
                "bf16",
                "--neg-eigval",
                "--width",
                "3",
            ],
            4,
        ),
        (
            &[
                "--decodes",
                "3",
                "--seqlens",
                "70",
                "--initial-state",
                "--layout",
                "interleaved",
                "--state-layout",
                "value-major",
                "--state-dtype",
                "fp16",
                "--repeat",
                "2",
            ],
            4,
        ),
    ] {
        let output = deltawave(&[&["layer", "--check", "--json"], &small[..], arguments].concat());
        assert!(
            output.status.success(),
            "{arguments:?}\n{}",
            text(&output.stderr)
        );
        let report = json(&output);
        assert_eq!(report["passed"], true, "{report}");
        assert_eq!(report["wrong_states"], 0, "{report}");
        assert!(
            (report["y_rms_ratio"].as_f64()).is_some_and(|x| 0.0 < x && x < 6e-3),
            "{report}"
        );
        let run = report["kernels"].as_array().expect("kernels");
        assert_eq!(run.len(), kernels, "{report}");
        assert!(run.iter().all(|k| k["launches"] == 1), "{report}");
    }
    let counted = ["layer", "--decodes", "1", "--count", "mi308x"];
    let output = deltawave(&[&counted, &small[..]].concat());
    let shown = text(&output.stdout);
    for words in ["1 decodes, 0 prefills", "dw_norm_bf16", "modelled, not"] {
        assert!(shown.contains(words), "{words}\n{shown}");
    }
    refused(&["layer"], 2, &["--model", "--heads"]);
    refused(
        &["layer", "--heads", "1,1", "--dims", "5,16"],
        2,
        &["--dims <K,V>", "multiple of 16"],
    );
    refused(
        &[
            "layer",
            "--heads",
            "1,1",
            "--count",
            "mi300x",
            "--backend",
            "hip",
        ],
        2,
        &["--count", "--backend"],
    );
}
