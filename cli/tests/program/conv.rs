//! `deltawave conv`.

use super::{deltawave, json, kernels, refused, text};

#[test]
fn convolutions_are_checked_and_counted() {
    if !kernels() {
        return;
    }
    for arguments in [
        &[
            "--model",
            "qwen3.5-27b",
            "--tp",
            "16",
            "--seqlens",
            "1,0,70",
            "--initial-state",
        ][..],
        &[
            "--heads",
            "1,2",
            "--dims",
            "96,5",
            "--seqlens",
            "3,9",
            "--layout",
            "interleaved",
            "--bias",
        ],
        &[
            "--heads",
            "2,2",
            "--dtype",
            "fp16",
            "--width",
            "2",
            "--activation",
            "none",
            "--repeat",
            "2",
        ],
        &[
            "--heads",
            "1,1",
            "--seqlens",
            "2,1",
            "--state-layout",
            "token-major",
            "--initial-state",
        ],
        &[
            "--heads",
            "2,6",
            "--dims",
            "96,8",
            "--seqlens",
            "37,2",
            "--layout",
            "interleaved",
            "--l2norm",
            "--gates",
            "--repeat",
            "2",
        ],
    ] {
        let output = deltawave(&[&["conv", "--check", "--json"], arguments].concat());
        assert!(
            output.status.success(),
            "{arguments:?}\n{}",
            text(&output.stderr)
        );
        let report = json(&output);
        assert_eq!(report["passed"], true, "{report}");
        assert_eq!(report["wrong_states"], 0, "{report}");
        assert!(
            report["equal_share"].as_f64().is_some_and(|x| x > 0.99),
            "{report}"
        );
        assert_eq!(report["kernels"][0]["launches"], 1, "{report}");
    }
    for more in [&[][..], &["--l2norm", "--gates"]] {
        let counted = ["conv", "--heads", "2,4", "--count", "mi308x", "--json"];
        let output = deltawave(&[&counted, more].concat());
        let counts = &json(&output)["counts"];
        assert_eq!(counts["gpu"], "mi308x");
        for name in ["hbm_unique_ratio", "l2_fill_ratio"] {
            let ratio = counts[name].as_f64().unwrap_or_default();
            assert!((0.99..1.1).contains(&ratio), "{name}: {ratio}, {more:?}");
        }
    }
    let output = deltawave(&["conv", "--heads", "1,1", "--seqlens", "9", "--check"]);
    let shown = text(&output.stdout);
    for words in [
        "384 channels",
        "dw_conv_bf16",
        "rounded once",
        "not a GPU time",
    ] {
        assert!(shown.contains(words), "{words}\n{shown}");
    }
    let gated = [
        "conv",
        "--heads",
        "1,1",
        "--seqlens",
        "9",
        "--check",
        "--l2norm",
        "--gates",
    ];
    let output = deltawave(&gated);
    let shown = text(&output.stdout);
    for words in [", norms, gates,", "g and beta are within"] {
        assert!(shown.contains(words), "{words}\n{shown}");
    }
    refused(&["conv"], 2, &["--model", "--heads"]);
    let wide = ["conv", "--heads", "1,1", "--dims", "257,8", "--l2norm"];
    refused(&wide, 1, &["key_dim", "at most 256"]);
    refused(
        &["conv", "--heads", "2,3"],
        2,
        &["--heads <HK,HV>", "multiple of HK"],
    );
    refused(
        &["conv", "--heads", "1,1", "--dims", "0,4"],
        2,
        &["--dims <K,V>", "at least 1"],
    );
    refused(&["conv", "--heads", "1,1", "--width", "5"], 2, &["--width"]);
    refused(
        &["conv", "--model", "qwen3.5-27b", "--tp", "3"],
        2,
        &["--tp <N>", "1, 2, 4, 8, 16"],
    );
    refused(
        &[
            "conv",
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
