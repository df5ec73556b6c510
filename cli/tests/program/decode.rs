//! `deltawave decode`.

use super::{deltawave, json, kernels, refused, text};

#[test]
fn decodes_are_checked_and_counted() {
    if !kernels() {
        return;
    }
    for arguments in [
        &[
            "--model",
            "qwen3.5-27b",
            "--tp",
            "16",
            "--batch",
            "3",
            "--raw-gates",
        ][..],
        &[
            "--heads", "1,2", "--dims", "96,48", "--tokens", "3", "--verify", "--l2norm",
        ],
        &[
            "--heads",
            "1,2",
            "--state-layout",
            "value-major",
            "--state-dtype",
            "bf16",
            "--dtype",
            "fp16",
        ],
        &[
            "--heads",
            "1,2",
            "--tokens",
            "2",
            "--verify",
            "--state-dtype",
            "fp16",
        ],
    ] {
        let output = deltawave(&[&["decode", "--check", "--json"], arguments].concat());
        assert!(
            output.status.success(),
            "{arguments:?}\n{}",
            text(&output.stderr)
        );
        let report = json(&output);
        assert_eq!(report["passed"], true, "{report}");
        assert_eq!(report["kernels"][0]["launches"], 1, "{report}");
    }
    let output = deltawave(&["decode", "--heads", "2,8", "--count", "mi308x", "--json"]);
    let counts = &json(&output)["counts"];
    assert_eq!(
        (&counts["gpu"], &counts["workgroups"]),
        (&"mi308x".into(), &32.into())
    );
    let ratio = counts["hbm_ratio"].as_f64().unwrap_or_default();
    assert!((0.99..1.05).contains(&ratio), "{ratio}");
    refused(&["decode"], 2, &["--model", "--heads"]);
    refused(
        &["decode", "--heads", "1,1", "--tokens", "17"],
        2,
        &["--tokens"],
    );
    refused(
        &["decode", "--heads", "1,1", "--dims", "24,16"],
        2,
        &["--dims"],
    );
}
