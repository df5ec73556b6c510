//! `scripts/compare-models`, with this program in the place of both commits' programs.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::{json, kernels, text};

/// The script and the simulator's library, or `None`, said aloud, where there is no Python.
fn run(arguments: &[&str]) -> Option<Output> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let test = std::env::current_exe().expect("this test's path");
    let library: PathBuf = test.with_file_name("libhip_on_simulator.so");
    let program = env!("CARGO_BIN_EXE_deltawave");
    let output = Command::new("python3")
        .arg(root.join("scripts/compare-models"))
        .args(["--base-program", program, "--program", program])
        .arg("--library")
        .arg(library)
        .args(arguments)
        .env("CARGO_TARGET_DIR", env!("CARGO_TARGET_TMPDIR"))
        .output();
    let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
    match output {
        Ok(output) => Some(output),
        Err(error) => {
            assert!(!required, "python3: {error}");
            println!("skipped: python3: {error}");
            None
        }
    }
}

#[test]
fn a_commit_is_as_fast_as_itself() {
    if !kernels() {
        return;
    }
    let rows = ["--rows", "2x4x3x65,1x1x64", "--gates", "normal,zero"];
    let Some(output) = run(&[&rows[..], &["--json"]].concat()) else {
        return;
    };
    assert!(output.status.success(), "{}", text(&output.stderr));
    let found = json(&output);
    let list = found["rows"].as_array().expect("rows");
    assert_eq!(list.len(), 4);
    for row in list {
        assert_eq!(row["times_as_fast"], 1.0, "{row}");
        let [base, here] = ["base", "here"].map(|side| &row[side]);
        assert_eq!(base, here);
        let launches = here["launches"].as_array().expect("launches");
        let us = |v: &serde_json::Value| v["modelled_us"].as_f64().expect("a time");
        let sum: f64 = launches.iter().map(us).sum();
        assert!((sum / us(here) - 1.0).abs() < 1e-9 && sum > 1.0);
        assert!(row["floor_us"].as_f64() < Some(sum));
    }
    // q, k, v, o, g, beta and the state of one chunk of one head.
    assert_eq!(list[2]["minimal_bytes"], 64 * (4 * 256 + 8) + 65536);
    // The profile of the same prefill models the same.
    let shape = ["--heads", "1,1", "--seqlens", "64", "--gates", "normal"];
    let profile = super::deltawave(&[&["profile", "--json"], &shape[..]].concat());
    let us = |v: &serde_json::Value| v["modelled_us"].as_f64().expect("a time");
    let [same, here] = [us(&json(&profile)["total"]), us(&list[2]["here"])];
    assert!((same / here - 1.0).abs() < 1e-9, "{same}, {here}");
    let Some(output) = run(&rows) else { return };
    assert!(text(&output.stdout).contains("| (2,4) | 3 x 65 | zero |"));
}

#[test]
fn wrong_rows_and_gates_are_named() {
    if !kernels() {
        return;
    }
    for (arguments, words) in [
        (
            ["--rows", "16x32", "--gates", "normal"],
            "row '16x32' is not HKxHVxT",
        ),
        (
            ["--rows", "1x1x64", "--gates", "wrong"],
            "does not take wrong",
        ),
    ] {
        let Some(output) = run(&arguments) else {
            return;
        };
        assert!(!output.status.success());
        let stderr = text(&output.stderr);
        assert!(stderr.contains(words), "{stderr}");
    }
}
