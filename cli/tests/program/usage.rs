//! Help, and what is said where something is wrong.

use super::{deltawave, json, kernels, refused, text};

#[test]
fn help_teaches() {
    let output = deltawave(&["prefill", "--help"]);
    assert!(output.status.success());
    let help = text(&output.stdout);
    for words in [
        "Examples:",
        "--model qwen3.5-35b-a3b",
        "olmo-hybrid-7b",
        "--seqlens",
        "Exit status:",
    ] {
        assert!(help.contains(words), "{words}\n{help}");
    }
    assert!(deltawave(&["--version"]).status.success());
}

#[test]
fn wrong_usage_names_the_argument() {
    let base: &[&str] = &["prefill", "--seqlens", "5"];
    for (arguments, words) in [
        (
            &["--heads", "4,2"][..],
            &["--heads <HK,HV>", "multiple of HK"][..],
        ),
        (&["--heads", "2,5"], &["--heads <HK,HV>", "multiple of HK"]),
        (&["--heads", "0,4"], &["--heads <HK,HV>", "at least 1"]),
        (&["--heads", "4"], &["--heads <HK,HV>", "two numbers"]),
        (
            &["--heads", "1,1", "--segments", "0"],
            &["--segments <N>", "0"],
        ),
        (
            &["--heads", "1,1", "--dims", "100,128"],
            &["--dims <K,V>", "multiple of 16"],
        ),
        (
            &["--heads", "1,1", "--dims", "128,512"],
            &["--dims <K,V>", "V must be"],
        ),
        (
            &["--model", "qwen9-1b"],
            &["--model <NAME>", "qwen3.5-35b-a3b"],
        ),
        (
            &["--model", "qwen3.5-27b", "--tp", "3"],
            &["--tp <N>", "1, 2, 4, 8, 16"],
        ),
        (&["--model", "qwen3.5-27b", "--tp", "0"], &["--tp <N>"]),
        (
            &["--model", "qwen3.5-27b", "--heads", "1,1"],
            &["--model <NAME>", "--heads"],
        ),
        (&["--model", "qwen3.5-27b", "--dims", "64,64"], &["--heads"]),
        (&["--heads", "1,1", "--tp", "2"], &["--model"]),
        (&[], &["--model", "--heads", "--input"]),
        (&["--heads", "1,1", "--batch", "2"], &["--batch"]),
        (
            &["--heads", "1,1", "--dtype", "f32"],
            &["--dtype", "bf16, fp16"],
        ),
        (
            &["--heads", "1,1", "--gates", "odd"],
            &["--gates", "normal, mixed, zero, strong, model"],
        ),
        (
            &["--heads", "1,1", "--gates", "zero", "--raw-gates"],
            &["--gates", "--raw-gates"],
        ),
        (
            &["--heads", "1,1", "--scale", "inf"],
            &["--scale", "finite"],
        ),
        (
            &["--heads", "1,1", "--state-dtype", "fp8"],
            &["--state-dtype", "f32, bf16, fp16"],
        ),
        (&["--heads", "1,1", "--repeat", "0"], &["--repeat"]),
        (&["--heads", "1,1", "--threads", "0"], &["--threads"]),
        (&["--heads", "1,1", "--frobnicate"], &["--frobnicate"]),
        (&["--input", "x.safetensors"], &["--input", "--seqlens"]),
    ] {
        refused(&[base, arguments].concat(), 2, words);
    }
    for lengths in ["", "1,,2", "5,-1", "x", "2147483648"] {
        let arguments = ["prefill", "--heads", "1,1", "--seqlens", lengths];
        refused(&arguments, 2, &["--seqlens", "length"]);
    }
    let sum = "2147483647,2147483647";
    let arguments = ["prefill", "--heads", "1,1", "--seqlens", sum];
    refused(&arguments, 2, &["--seqlens", "2^31"]);
    refused(&["flash"], 2, &["flash"]);
}

#[test]
fn failures_say_why() {
    let none = ["prefill", "--input", "/nonexistent/x.safetensors"];
    refused(
        &none,
        1,
        &[
            "--input /nonexistent/x.safetensors",
            "because: ",
            "No such file",
        ],
    );
    let huge = ["prefill", "--heads", "1024,1024", "--seqlens", "2000000000"];
    refused(&huge, 1, &["host memory"]);
    if kernels() {
        let shape = [
            "prefill",
            "--heads",
            "1,1",
            "--dims",
            "16,16",
            "--seqlens",
            "1",
        ];
        let unwritable = ["--output", "/nonexistent/y.safetensors"];
        refused(
            &[&shape[..], &unwritable].concat(),
            1,
            &["--output", "because: "],
        );
        refused(
            &[&shape[..], &["--backend", "hip", "--device", "99"]].concat(),
            1,
            &["because: "],
        );
    }
}

/// 0 is the default, as in C and Python.
#[test]
fn a_scale_of_0_is_the_default() {
    if !kernels() {
        return;
    }
    for command in ["prefill", "decode"] {
        let shape = [
            command, "--heads", "1,1", "--dims", "16,16", "--check", "--json",
        ];
        let [default, zero] = [&[][..], &["--scale", "0"]].map(|more| {
            let mut report = json(&deltawave(&[&shape[..], more].concat()));
            assert_eq!(report["passed"], true, "{report}");
            [report["scale"].take(), report["o_rms_ratio"].take()]
        });
        assert_eq!(default, zero, "{command}");
    }
}

/// The simulator has one device; another one that is asked for is not silently replaced by it.
#[test]
fn devices_that_do_not_exist() {
    if kernels() {
        refused(
            &["prefill", "--heads", "1,1", "--device", "7"],
            1,
            &["device 7 does not exist"],
        );
    }
}
