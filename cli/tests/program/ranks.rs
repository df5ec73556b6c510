//! `deltawave prefill --ranks N`: all layouts have the bits of one rank, in one process and in a process for each rank.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

use super::{fake_collectives, file, json, kernels, prefill, refused, text};

const SHARED: [&str; 6] = [
    "--heads",
    "1,2",
    "--dims",
    "16,32",
    "--seqlens",
    "330,0,64,150",
];

/// Options, then more.
fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&SHARED[..], more].concat()
}

#[test]
fn ranks_have_the_bits_of_one() {
    if !kernels() {
        return;
    }
    let outputs: Vec<(PathBuf, Vec<u8>)> = [
        &["--ranks", "1"][..],
        &["--ranks", "2"],
        &["--ranks", "3", "--rank-layout", "zigzag"],
        &["--ranks", "4", "--rank-layout", "packed"],
        &["--ranks", "9", "--initial-state", "bf16"],
        &[
            "--ranks",
            "5",
            "--raw-gates",
            "--state-layout",
            "value-major",
        ],
    ]
    .iter()
    .enumerate()
    .map(|(i, extra)| {
        let path = file(&format!("ranks-{i}"));
        let to = path.to_str().expect("a path in UTF-8");
        let more = ["--rank-block", "64", "--check", "--output", to];
        let found = prefill(&[&with(&more)[..], extra].concat());
        assert_eq!(found["bits_equal_one_rank"], true, "{extra:?}");
        assert_eq!(found["passed"], true, "{extra:?}");
        assert_eq!(found["ranks"]["exchange"], "local");
        let bytes = std::fs::read(&path).expect("the results");
        (path, bytes)
    })
    .collect();
    // The same inputs: the files are equal, too.
    assert!(outputs[1].1 == outputs[0].1 && outputs[2].1 == outputs[0].1);
    assert!(outputs[3].1 == outputs[0].1 && outputs[4].1 != outputs[0].1);
    for (path, _) in outputs {
        std::fs::remove_file(path).expect("the file was written");
    }
    let unchecked = prefill(&with(&["--ranks", "2"]));
    assert!(unchecked["bits_equal_one_rank"].is_null());
    let alone = prefill(&SHARED);
    assert!(alone.get("ranks").is_none());
}

/// A library of collectives for processes on the simulator; nothing without a C compiler.
fn library() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    fake_collectives::compile(&root, folder, "libranks.so", "-O1")
}

fn processes(library: &Path, extra: &[&str], dies: Option<&str>) -> Output {
    let more = ["--rank-block", "64", "--exchange", "processes", "--json"];
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltawave"));
    command.arg("prefill").args(with(&more)).args(extra);
    command.env("DELTAWAVE_BACKEND", "simulator");
    command.env("DELTAWAVE_CCL_LIBRARY", library);
    if let Some(dies) = dies {
        command.env("FAKE_COLLECTIVES_DIES", dies);
    }
    command.output().expect("the program starts")
}

/// A process for each rank: the bits of one rank. A process that dies: a failure in time, which names the call.
#[test]
fn processes_have_the_bits_of_one() {
    let Some(library) = library().filter(|_| kernels()) else {
        return;
    };
    for extra in [
        &["--ranks", "2"][..],
        &["--ranks", "3", "--rank-layout", "zigzag", "--repeat", "2"],
        &[
            "--ranks",
            "8",
            "--rank-layout",
            "packed",
            "--initial-state",
            "f32",
        ],
    ] {
        let output = processes(&library, &[extra, &["--check"]].concat(), None);
        let found = json(&output);
        assert!(
            output.status.success(),
            "{extra:?}: {}",
            text(&output.stderr)
        );
        assert_eq!(found["bits_equal_one_rank"], true, "{extra:?}");
        assert_eq!(found["ranks"]["exchange"], "processes");
        assert_eq!(found["passed"], true, "{extra:?}");
    }
    // It dies at its start, when plans are compared, and in the exchange of summaries.
    for (dies, call) in [
        ("1:0", "ncclCommInitRankConfig"),
        ("1:1", "ncclAllGather"),
        ("1:2", "ncclAllGather"),
    ] {
        let begin = Instant::now();
        let ranks = ["--ranks", "2", "--rank-timeout", "1"];
        let output = processes(&library, &ranks, Some(dies));
        assert_eq!(output.status.code(), Some(1), "{dies}");
        let found = json(&output).to_string();
        let why = format!("{call} was not complete after 1000 ms");
        assert!(found.contains(&why), "{dies}: {found}");
        assert!(begin.elapsed() < Duration::from_secs(30));
    }
}

/// The backward over ranks: gradients have the bits of one rank, in one process and in a process for each rank.
#[test]
fn gradients_have_the_bits_of_one() {
    if !kernels() {
        return;
    }
    let base = ["--rank-block", "64", "--backward", "--check"];
    let raw = ["--raw-gates", "--initial-state", "bf16", "--state-layout"];
    let outputs: Vec<Vec<u8>> = [
        &["--ranks", "1"][..],
        &["--ranks", "2"],
        &["--ranks", "4", "--rank-layout", "zigzag"],
        &["--ranks", "9", "--rank-layout", "packed"],
        &[&["--ranks", "3"], &raw[..], &["value-major"]].concat(),
    ]
    .iter()
    .enumerate()
    .map(|(i, extra)| {
        let path = file(&format!("ranks-backward-{i}"));
        let to = ["--output", path.to_str().expect("a path in UTF-8")];
        let found = prefill(&[&with(&base)[..], &to, extra].concat());
        assert_eq!(found["bits_equal_one_rank"], true, "{extra:?}");
        assert_eq!(found["passed"], true, "{extra:?}");
        assert_eq!(found["ranks"]["exchange"], "local");
        let names = match extra.contains(&"--raw-gates") {
            true => &["dq", "dk", "dv", "da", "db", "da_log", "ddt_bias", "ds0"][..],
            false => &["dq", "dk", "dv", "dg", "dbeta", "ds0"],
        };
        for name in names {
            let [error, limit] = ["rms_ratio", "rms_ratio_limit"]
                .map(|word| found[format!("{name}_{word}")].as_f64().expect("a number"));
            assert!(
                error > 0.0 && error <= limit && limit < 0.5,
                "{name}: {error} of {limit}"
            );
        }
        let bytes = std::fs::read(&path).expect("the results");
        std::fs::remove_file(path).expect("the file was written");
        bytes
    })
    .collect();
    assert!(outputs[1..4].iter().all(|bytes| *bytes == outputs[0]));
    assert!(outputs[4] != outputs[0]);
    // Another block gives other bits: the files could differ.
    let path = file("ranks-backward-block");
    let to = path.to_str().expect("a path in UTF-8");
    prefill(&with(&[
        "--ranks",
        "2",
        "--rank-block",
        "128",
        "--backward",
        "--output",
        to,
    ]));
    assert!(std::fs::read(&path).expect("the results") != outputs[0]);
    std::fs::remove_file(path).expect("the file was written");
    let unchecked = prefill(&with(&["--ranks", "2", "--backward"]));
    assert!(unchecked["bits_equal_one_rank"].is_null() && unchecked["dq_rms_ratio"].is_null());
    let Some(library) = library() else { return };
    for extra in [
        &["--ranks", "2"][..],
        &["--ranks", "5", "--rank-layout", "zigzag", "--raw-gates"],
    ] {
        let extra = [extra, &["--backward", "--check"]].concat();
        let output = processes(&library, &extra, None);
        let found = json(&output);
        assert!(
            output.status.success(),
            "{extra:?}: {}",
            text(&output.stderr)
        );
        assert_eq!(found["bits_equal_one_rank"], true, "{extra:?}");
        assert_eq!(found["ranks"]["exchange"], "processes");
        assert_eq!(found["passed"], true, "{extra:?}");
    }
    let ranks = ["--ranks", "2", "--rank-timeout", "1", "--backward"];
    let output = processes(&library, &ranks, Some("1:2"));
    assert_eq!(output.status.code(), Some(1));
    let why = "ncclAllGather was not complete after 1000 ms";
    assert!(json(&output).to_string().contains(why));
}

#[test]
fn what_ranks_do_not_take() {
    if !kernels() {
        return;
    }
    let ranks = |more: &[&'static str]| [&["prefill"], &with(&["--ranks", "2"])[..], more].concat();
    refused(&ranks(&["--path", "fused"]), 1, &["path", "split"]);
    refused(&ranks(&["--snapshots", "64"]), 2, &["--snapshots"]);
    refused(&ranks(&["--join", "1:0:zz"]), 2, &["--join"]);
    for none in [&["--ranks", "0"][..], &["--ranks", "0", "--backward"]] {
        let given = [&["prefill"], &SHARED[..], none].concat();
        refused(&given, 2, &["--ranks", "1..=1024"]);
    }
    let nowhere = ["--exchange", "processes"];
    let output = Command::new(env!("CARGO_BIN_EXE_deltawave"))
        .args(ranks(&nowhere))
        .env("DELTAWAVE_BACKEND", "simulator")
        .env("DELTAWAVE_CCL_LIBRARY", "/nowhere/libnccl.so")
        .output()
        .expect("the program starts");
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("/nowhere/libnccl.so"));
}
