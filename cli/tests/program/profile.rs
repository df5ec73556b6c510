//! `deltawave profile`.

use std::fs;

use serde_json::Value;

use super::{deltawave, file, json, kernels, prefill, refused, text};

#[test]
fn profile_counts_what_the_kernels_do() {
    if !kernels() {
        return;
    }
    let shape = ["--heads", "2,4", "--seqlens", "64,65,128"];
    let ran = prefill(&shape);
    let output = deltawave(&[&["profile", "--json"], &shape[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let profile = json(&output);
    let total = &profile["total"];
    let number = |v: &Value| v.as_f64().unwrap_or_else(|| panic!("no number: {v}"));
    assert_eq!(total["wave_instructions"], ran["wave_instructions"]);
    let kernels = profile["kernels"].as_array().expect("a list");
    for name in [
        "wave_instructions",
        "mfma_clk",
        "valu_clk",
        "trans_clk",
        "accvgpr_moves",
        "lds_clk",
        "lds_conflict_clk",
        "hbm_unique_bytes",
        "l2_fill_bytes",
        "modelled_us",
    ] {
        let sum: f64 = kernels.iter().map(|k| number(&k[name])).sum();
        assert!(
            (sum / number(&total[name]).max(1.0) - 1.0).abs() < 1e-12 || sum == 0.0,
            "{name}"
        );
    }
    for kernel in kernels {
        let waves = number(&kernel["waves_per_simd"]);
        assert!(waves > 0.0 && waves <= 8.0, "{waves}");
        assert!(number(&kernel["lds_conflict_clk"]) < number(&kernel["lds_clk"]).max(1.0));
        let least = kernel["busy_us"].as_object().expect("units").values();
        let least = least.map(number).fold(0.0, f64::max);
        assert!(number(&kernel["modelled_us"]) > least);
        assert!(number(&kernel["l2_fill_bytes"]) >= number(&kernel["hbm_unique_bytes"]));
    }
    // Chunks of 64; 64; 64, 1; 64, 64 tokens for 4 heads.
    assert_eq!(profile["chunk_heads"], 5 * 4);
    let share = &profile["per_chunk_head"];
    for name in ["wave_instructions", "mfma_clk", "valu_clk"] {
        assert_eq!(number(&share[name]) * 20.0, number(&total[name]), "{name}");
    }
    // q, k; v, o; g, beta; the final state.
    let tokens = 64 + 65 + 128;
    let bytes = tokens * (2 * 2 * 256 + 2 * 2 * 512 + 2 * 4 * 4) + 3 * 4 * 128 * 128 * 4;
    assert_eq!(number(&profile["minimal_bytes"]), f64::from(bytes));
    let flops = |n: f64| {
        let key = 4.0 * n * n * 128.0;
        2.0 * key + 4.0 * (n * n * n / 3.0 + key + 6.0 * n * 128.0 * 128.0)
    };
    let flops = 4.0 * flops(64.0) + flops(1.0);
    assert!((number(&profile["t_form_flops"]) / flops - 1.0).abs() < 1e-12);
    let roofline = f64::from(bytes) / 5.3e6;
    assert!((number(&profile["roofline_us"]) / roofline - 1.0).abs() < 1e-12);
    // The kernels do at least the products that the operation has.
    assert!(number(&total["mfma_flops"]) > flops);

    let diagram = file("roofline.svg");
    let path = diagram.to_str().expect("UTF-8");
    let few = ["profile", "--gpu", "mi308x", "--roofline", path];
    let output = deltawave(&[&few, &shape[..]].concat());
    for words in ["counted for mi308x", "L2 fill", "roofline", "20 chunks"] {
        assert!(text(&output.stdout).contains(words), "no {words}");
    }
    assert!(fs::read_to_string(&diagram).is_ok_and(|svg| svg.starts_with("<svg")));
    refused(
        &["profile", "--heads", "1,1", "--backend", "hip"],
        2,
        &["--backend"],
    );
    refused(
        &["profile", "--heads", "1,1", "--gpu", "h100"],
        2,
        &["mi308x"],
    );
}

/// Segments that forget the state before them cost their last chunks alone, and are not combined.
#[test]
fn segments_that_forget_cost_little() {
    if !kernels() {
        return;
    }
    let counts = |gates: &str| {
        let output = deltawave(&[
            "profile",
            "--json",
            "--heads",
            "1,2",
            "--seqlens",
            "10240",
            "--segments",
            "10", // nine summaries, more than scan chains
            "--gates",
            gates,
        ]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let profile = json(&output);
        let kernels = profile["kernels"].as_array().expect("a list");
        let count = |i: usize| kernels[i]["wave_instructions"].as_f64().expect("a number");
        assert_eq!(kernels.len(), 4);
        [1, 2].map(count)
    };
    let [summarise, combine] = counts("normal");
    let [of_all, combining_all] = counts("zero");
    assert!(summarise < 0.2 * of_all, "{summarise} of {of_all}");
    assert!(
        combine < 0.3 * combining_all,
        "{combine} of {combining_all}"
    );
}

#[test]
fn profile_counts_a_backward() {
    if !kernels() {
        return;
    }
    let shape = [
        "--backward",
        "--heads",
        "2,4",
        "--seqlens",
        "64,65,128",
        "--initial-state",
        "f32",
    ];
    let ran = prefill(&shape);
    let output = deltawave(&[&["profile", "--json", "--check"], &shape[..]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let profile = json(&output);
    let number = |v: &Value| v.as_f64().unwrap_or_else(|| panic!("no number: {v}"));
    assert_eq!(profile["operation"], "backward");
    assert_eq!(
        profile["total"]["wave_instructions"],
        ran["wave_instructions"]
    );
    let kernels = profile["kernels"].as_array().expect("a list");
    for (kernel, part) in kernels.iter().zip(["prepare", "walk", "gradients"]) {
        let name = kernel["name"].as_str().expect("text");
        let expected = format!("dw_prefill_backward_{part}");
        assert!(name.starts_with(&expected), "{name}");
        assert!(number(&kernel["modelled_us"]) > 0.0, "{name}");
    }
    assert_eq!(kernels.len(), 3);
    assert_eq!(profile["chunk_heads"], 5 * 4);
    // q, k, v, dq, dk, dv; dO; g, beta, dg, dbeta; S0, dS_T, dS0.
    let tokens = 64 + 65 + 128;
    let rows = tokens * (2 * (2 * 2 * 256 + 4 * 256) + 4 * 256 + 4 * 4 * 4);
    let bytes = rows + 3 * 3 * 4 * 128 * 128 * 4;
    assert_eq!(number(&profile["minimal_bytes"]), f64::from(bytes));
    let flops = |n: f64| {
        let key = 4.0 * n * n * 128.0;
        2.0 * key + 4.0 * (n * n * n / 3.0 + 16.0 * n * n * 128.0 + 16.0 * n * 128.0 * 128.0)
    };
    let flops = 4.0 * flops(64.0) + flops(1.0);
    assert!((number(&profile["t_form_flops"]) / flops - 1.0).abs() < 1e-12);
    // The kernels do at least the products that the operation has.
    assert!(number(&profile["total"]["mfma_flops"]) > flops);
}

#[test]
fn a_profile_of_no_tokens() {
    if !kernels() {
        return;
    }
    let shape = ["--heads", "1,1", "--dims", "16,16", "--seqlens", "0"];
    for more in [&[][..], &["--backward"]] {
        let output = deltawave(&[&["profile"], &shape[..], more].concat());
        let shown = text(&output.stdout);
        assert!(output.status.success(), "{shown}");
        assert!(shown.contains("0 tokens in 1 sequences"), "{shown}");
        assert!(!shown.contains("for each of 0 chunks"), "{shown}");
        assert!(shown.contains(", 0.0 GFLOP of the T-form"), "{shown}");
        assert!(!shown.contains("-0"), "{shown}");
    }
}
