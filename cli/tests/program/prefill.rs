//! `deltawave prefill`: results and what is said of them.

use std::process::Command;

use super::{deltawave, json, kernels, prefill, refused, text};

#[test]
fn json_has_every_figure() {
    if !kernels() {
        return;
    }
    let base = [
        "--heads",
        "1,2",
        "--dims",
        "64,32",
        "--seqlens",
        "1,70",
        "--path",
        "split",
    ];
    let unchecked = prefill(&base);
    let checked = prefill(&[&base[..], &["--check", "--repeat", "2"]].concat());
    for (figures, has_errors) in [(&unchecked, false), (&checked, true)] {
        let object = figures.as_object().unwrap();
        for key in ["tokens", "sequences", "kernel_seconds", "wave_instructions"] {
            assert!(object[key].as_f64() > Some(0.0), "{key}");
        }
        for key in [
            "o_rms_ratio",
            "o_max_abs",
            "state_rms_ratio",
            "state_max_abs",
            "unfused_o_rms_ratio",
            "unfused_state_rms_ratio",
        ] {
            assert_eq!(object[key].is_f64(), has_errors, "{key}");
            assert_eq!(object[key].is_null(), !has_errors, "{key}");
        }
        assert_eq!(object["backend"], "simulator");
        assert_eq!(object["mfma_mode"], "fast");
        assert_eq!(object["dtype"], "bf16");
        assert!(object["device"].is_string());
        assert_eq!(
            (&object["tokens"], &object["sequences"]),
            (&71.into(), &2.into())
        );
        let kernels = object["kernels"].as_array().unwrap();
        assert_eq!(kernels.len(), 2);
        for kernel in kernels {
            assert_eq!(
                (&kernel["launches"], &kernel["spills"]),
                (&1.into(), &0.into())
            );
            for key in ["vgprs", "sgprs", "wave_instructions", "seconds"] {
                assert!(kernel[key].as_f64() > Some(0.0), "{key}");
            }
            for key in ["agprs", "lds_bytes"] {
                assert!(kernel[key].is_u64(), "{key}");
            }
        }
    }
    assert_eq!(checked["passed"], true);
    assert!(checked["o_worst"]["head"].is_u64());
}

#[test]
fn checks_pass_for_every_kind_of_prefill() {
    if !kernels() {
        return;
    }
    let small: &[&str] = &["--heads", "2,4", "--seqlens", "1,0,63,65,130", "--check"];
    for extra in [
        &["--dtype", "bf16"][..],
        &["--dtype", "fp16"],
        &["--dtype", "fp16", "--mfma", "exact", "--gates", "mixed"],
        &["--gates", "strong", "--keys", "silu", "--dims", "96,192"],
        &["--gates", "zero", "--l2norm", "--head-map", "tiled"],
        &["--gates", "model", "--keys", "silu"],
        &["--raw-gates", "--neg-eigval", "--scale", "-0.5"],
        &[
            "--initial-state",
            "bf16",
            "--state-layout",
            "value-major",
            "--state-dtype",
            "bf16",
        ],
        &[
            "--initial-state",
            "f32",
            "--dims",
            "64,256",
            "--threads",
            "1",
        ],
    ] {
        let report = prefill(&[small, extra].concat());
        assert_eq!(report["passed"], true, "{extra:?}");
        let exact = extra.contains(&"exact");
        assert_eq!(report["mfma_mode"], if exact { "exact" } else { "fast" });
    }
    for dense in [
        &[
            "--model",
            "OLMo-Hybrid-7B",
            "--tp",
            "15",
            "--batch",
            "2",
            "--len",
            "66",
        ][..],
        &[
            "--model",
            "qwen3.6-27b",
            "--tp",
            "16",
            "--batch",
            "1",
            "--len",
            "100",
        ],
    ] {
        let report = prefill(&[dense, &["--check"]].concat());
        assert_eq!(
            (&report["passed"], &report["batch"]),
            (&true.into(), &"dense".into())
        );
    }
}

#[test]
fn segments_are_forced_and_switched_off() {
    if !kernels() {
        return;
    }
    let run = |extra: &[&str], variable: &str| {
        let shape = ["prefill", "--json", "--check", "--heads", "1,1"];
        Command::new(env!("CARGO_BIN_EXE_deltawave"))
            .args(shape)
            .args(["--dims", "32,16", "--seqlens", "700,64"])
            .args(extra)
            .env("DELTAWAVE_BACKEND", "simulator")
            .env("DELTAWAVE_SEGMENTS", variable)
            .output()
            .expect("the program starts")
    };
    for (extra, variable, count) in [
        (&[][..], "", 2),
        (&["--segments", "1"], "", 2),
        (&["--segments", "2"], "", 3),
        (&["--segments", "4"], "", 3), // scan chains few summaries
        (&["--segments", "11"], "", 4),
        (&["--segments", "4"], "1", 2),
        (&[], "3", 3),
    ] {
        let report = json(&run(extra, variable));
        assert_eq!(report["passed"], true, "{extra:?} {variable}");
        let kernels = report["kernels"].as_array().expect("kernels");
        assert_eq!(kernels.len(), count, "{extra:?} {variable}");
    }
    for nonsense in ["0", "-1", "many", "1.5"] {
        let output = run(&[], nonsense);
        assert_eq!(output.status.code(), Some(1), "{nonsense}");
        let words = text(&output.stderr);
        assert!(words.contains("DELTAWAVE_SEGMENTS"), "{words}");
        assert!(words.contains(nonsense), "{words}");
    }
}

#[test]
fn paths_are_forced() {
    if !kernels() {
        return;
    }
    let run = |extra: &[&str], variable: &str| {
        let shape = ["prefill", "--json", "--check", "--heads", "1,1"];
        Command::new(env!("CARGO_BIN_EXE_deltawave"))
            .args(shape)
            .args(["--seqlens", "400,64"])
            .args(extra)
            .env("DELTAWAVE_BACKEND", "simulator")
            .env("DELTAWAVE_PREFILL", variable)
            .output()
            .expect("the program starts")
    };
    let small = ["--dims", "32,16"];
    for (extra, variable, names) in [
        (&["--path", "fused"][..], "", &["fused"][..]),
        (&["--path", "split"], "", &["prepare", "scan"]),
        (&["--path", "split"], "fused", &["fused"]),
        (&[], "split", &["prepare", "scan"]),
        (
            &["--path", "fused", "--segments", "4"],
            // The planner's choice, which need not be the option's.
            "auto",
            &[],
        ),
        (
            &["--path", "fused", "--segments", "4"],
            "",
            &["fused_summarise", "combine", "fused"],
        ),
        (
            &["--path", "fused", "--segments", "2", "--snapshots", "64"],
            "",
            &["fused_summarise", "fused"],
        ),
    ] {
        let report = json(&run(&[&small[..], extra].concat(), variable));
        assert_eq!(report["passed"], true, "{extra:?} {variable}");
        if variable == "auto" {
            continue;
        }
        let kernels = report["kernels"].as_array().expect("kernels").iter();
        let found: Vec<&str> = kernels.filter_map(|k| k["name"].as_str()).collect();
        assert_eq!(found.len(), names.len(), "{found:?}");
        for (found, name) in found.iter().zip(names) {
            assert!(found.starts_with(&format!("dw_prefill_{name}_")), "{found}");
        }
    }
    for (extra, variable, words) in [
        (
            &["--dims", "144,16"][..],
            "fused",
            "DELTAWAVE_PREFILL: fused with K = 144",
        ),
        (
            &["--dims", "144,16", "--path", "fused"],
            "",
            "path: fused with K = 144",
        ),
        (&small, "both", "it must be one of auto, fused, split"),
    ] {
        let output = run(extra, variable);
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(
            text(&output.stderr).contains(words),
            "{}",
            text(&output.stderr)
        );
    }
}

#[test]
fn tables_show_kernels_errors_and_where_the_time_was_spent() {
    if !kernels() {
        return;
    }
    let output = deltawave(&["prefill", "--heads", "1,1", "--seqlens", "64", "--check"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    for words in [
        "final_state",
        "[64, 1, 128]",
        "simulator",
        "dw_prefill_fused_bf16_k128",
        "unfused form",
        "not a GPU time",
    ] {
        assert!(shown.contains(words), "{words}\n{shown}");
    }
    // Progress is for terminals.
    assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
}

/// A simulated time means nothing.
#[test]
fn only_gpus_are_measured() {
    if kernels() {
        let shape = ["prefill", "--heads", "1,1", "--seqlens", "5"];
        let words = ["--time", "the simulator"];
        refused(&[&shape[..], &["--time", "3"]].concat(), 2, &words);
        refused(&[&shape[..], &["--time", "0"]].concat(), 2, &["--time"]);
    }
}

#[test]
fn gradients_are_checked() {
    if !kernels() {
        return;
    }
    let base = [
        "--heads",
        "1,2",
        "--dims",
        "64,32",
        "--seqlens",
        "1,70",
        "--backward",
    ];
    let more = [
        (&[][..], &["dq", "dk", "dv", "dg", "dbeta", "ds0"][..]),
        (
            &["--raw-gates", "--l2norm", "--initial-state", "f32"],
            &["dq", "dk", "dv", "da", "db", "da_log", "ddt_bias", "ds0"],
        ),
    ];
    for (flags, names) in more {
        let unchecked = prefill(&[&base[..], flags].concat());
        assert!(unchecked["dq_rms_ratio"].is_null());
        let checked = prefill(&[&base[..], flags, &["--check"]].concat());
        assert_eq!(checked["passed"], true);
        for name in names {
            let [found, limit] = ["rms_ratio", "rms_ratio_limit"]
                .map(|word| checked[format!("{name}_{word}")].as_f64().unwrap());
            assert!(found > 0.0 && found <= limit, "{name}: {found} of {limit}");
        }
        let kernels = checked["kernels"].as_array().unwrap();
        assert_eq!(kernels.len(), if names.contains(&"da") { 4 } else { 3 });
    }
    refused(
        &["prefill", "--heads", "1,2", "--backward", "--pool", "4"],
        2,
        &["cannot be used with", "--pool"],
    );
}
