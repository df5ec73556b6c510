//! The benchmark in C++, `benches/gdn_bench.cpp`: compiled, and run on the simulator behind the HIP runtime's name.
#![cfg(unix)]

mod cpp_bench;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;

use serde_json::Value;

use cpp_bench::Program;

/// The program, and the kernels as it takes them.
struct Bench {
    program: Program,
    kernels: PathBuf,
}

impl Bench {
    /// None where it cannot be compiled.
    fn get() -> Option<&'static Bench> {
        static BENCH: OnceLock<Option<Bench>> = OnceLock::new();
        let build = || {
            let program = Program::build("gdn_bench")?;
            let kernels = program.folder().join("kernels");
            deltawave::code_objects::save(&kernels).expect("the kernels are written");
            Some(Bench { program, kernels })
        };
        BENCH.get_or_init(build).as_ref()
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.run_with(&self.kernels, arguments)
    }

    fn run_with(&self, kernels: &Path, arguments: &[&str]) -> Output {
        self.program
            .command()
            .arg("--kernels")
            .arg(kernels)
            .args(arguments)
            .output()
            .expect("the program starts")
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// One object from each line.
fn lines(output: &Output) -> Vec<Value> {
    let parse = |line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"));
    text(&output.stdout).lines().map(parse).collect()
}

#[test]
fn the_small_set_is_right_and_simulated_time_is_no_figure() {
    let Some(bench) = Bench::get() else { return };
    let output = bench.run(&["--small", "--json"]);
    assert!(output.status.success(), "{output:?}");
    let lines = lines(&output);
    assert_eq!(lines.len(), 4);
    for line in lines {
        assert_eq!(line["passed"], true, "{line}");
        for error in ["error_o", "error_state"] {
            let error = line[error].as_f64().expect("a number");
            assert!(error > 1e-6 && error < 5e-3, "{line}");
        }
        assert_eq!(line["clock"], "simulated: wall time of the host");
        assert!(line["prefill"]["median_us"].as_f64() > Some(0.0), "{line}");
        for derived in ["tflops_per_s", "gbytes_per_s", "roofline_fraction"] {
            assert_eq!(line[derived], Value::Null, "{line}");
        }
    }
}

#[test]
fn what_a_shape_needs_is_what_a_count_by_hand_gives() {
    let Some(bench) = Bench::get() else { return };
    let output = bench.run(&["--shape", "2,4,65+1", "--json", "--runs", "3"]);
    let line = &lines(&output)[0];
    // 66 tokens: q, k of 2 heads, v, o of 4, 16 bits each; g, beta; two states for each of the two sequences.
    let bytes = 66 * (2 * 2 * 128 + 2 * 4 * 128) * 2 + 2 * 66 * 4 * 4 + 2 * 2 * 4 * 128 * 128 * 4;
    assert_eq!(line["bytes"], f64::from(bytes), "{line}");
    let chunk = |n: f64| {
        2.0 * 4.0 * n * n * 128.0
            + 4.0 * (n * n * n / 3.0 + 4.0 * n * n * 128.0 + 6.0 * n * 128.0 * 128.0)
    };
    let flops = line["flops"].as_f64().expect("a number");
    let wanted = chunk(64.0) + 2.0 * chunk(1.0);
    assert!((flops / wanted - 1.0).abs() < 1e-6, "{flops}, {wanted}");
    assert_eq!(line["lengths"], serde_json::json!([65, 1]));
    assert_eq!(line["runs"], 3);
}

#[test]
fn a_wrong_result_is_not_timed() {
    let Some(bench) = Bench::get() else { return };
    // A scan without the waves that make the outputs, which remain unwritten.
    let wrong = bench.kernels.with_file_name("wrong");
    deltawave::code_objects::save(&wrong).expect("the kernels are written");
    let list = wrong.join("gfx942/kernels.txt");
    let right = fs::read_to_string(&list).expect("the list");
    let scan = "prefill_scan.co 512 ";
    assert!(right.contains(scan), "{right}");
    fs::write(&list, right.replace(scan, "prefill_scan.co 256 ")).expect("the list");
    let output = bench.run_with(&wrong, &["--shape", "1,1,64", "--json"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let line = &lines(&output)[0];
    assert_eq!(line["passed"], false, "{line}");
    assert_eq!(line["prefill"], Value::Null, "{line}");
    let objection = line["objection"].as_str().expect("a text");
    assert!(
        objection.contains("not finite, or was not written"),
        "{line}"
    );
    let table = bench.run_with(&wrong, &["--shape", "1,1,64"]);
    let table = text(&table.stdout);
    assert!(
        table.contains("SIMULATED") && table.contains("WRONG, not timed"),
        "{table}"
    );
}

#[test]
fn kernels_of_another_version_are_not_launched() {
    let Some(bench) = Bench::get() else { return };
    let old = bench.kernels.with_file_name("old");
    deltawave::code_objects::save(&old).expect("the kernels are written");
    let list = old.join("gfx942/kernels.txt");
    let lines = fs::read_to_string(&list).expect("the list");
    let (format, kernels) = lines.split_once('\n').expect("lines");
    let with = |line: &str, number: usize, to: &str| {
        let mut words: Vec<_> = line.split(' ').collect();
        words[number] = to;
        words.join(" ") + "\n"
    };
    let changed =
        |number, to| -> String { kernels.lines().map(|line| with(line, number, to)).collect() };
    let other = [
        // Another argument struct, a larger second argument, and another format of the list.
        format!("{format}\n{}", changed(5, "16")),
        format!("{format}\n{}", changed(6, "1024")),
        format!("format 1\n{kernels}"),
        kernels.to_owned(),
    ];
    for list_of_another_version in other {
        fs::write(&list, &list_of_another_version).expect("the list");
        let output = bench.run_with(&old, &["--shape", "1,1,64"]);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = text(&output.stdout) + &text(&output.stderr);
        assert!(said.contains("of different versions"), "{said}");
    }
}

#[test]
fn refusals_say_what_is_wrong() {
    let Some(bench) = Bench::get() else { return };
    let usage = [
        (&["--set", "S9"][..], "there are S1, S2, S3, small"),
        (&["--shape", "2,3,64"], "HV is not a multiple of HK"),
        (
            &["--shape", "2,4,64+"],
            "expected the length of a sequence at character 8",
        ),
        (&["--shape", "2,4,0"], "is 0"),
        (&["--shape", "1,1,99999999999999999999"], "exceeds"),
        (&["--shape", "1,1,2147480000x2"], "more than"),
        (&["--dims", "128"], "two numbers"),
        (&["--dims", "24,128"], "multiples of 16"),
        (&["--runs", "0"], "from 1 to"),
        (&["--runs", "1.5"], "whole number"),
        (&["--runs"], "its value is missing"),
        (&["--fast"], "no such option"),
        (&["--segments", "4"], "it is for --library"),
    ];
    for (arguments, words) in usage {
        let output = bench.run(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert!(said.contains(words), "{arguments:?}: {said}");
    }
    let nowhere = bench.run_with(Path::new("/nonexistent"), &["--small"]);
    assert_eq!(nowhere.status.code(), Some(1));
    let said = text(&nowhere.stderr);
    assert!(said.contains("deltawave info --save-kernels"), "{said}");
    let device = bench.run(&["--device", "7"]);
    assert_eq!(device.status.code(), Some(3), "{device:?}");
    let help = bench.run(&["--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("--shape HK,HV,LENGTHS"));
}

#[test]
fn the_sets_are_those_of_the_survey() {
    let Some(bench) = Bench::get() else { return };
    let list = text(&bench.run(&["--list"]).stdout);
    for words in [
        "S1: 171 shapes", // 9 pairs of heads, 19 batches
        "S2: 176 shapes", // 8 pairs of heads, 7 dense and 15 packed batches
        "S3: 31 shapes",
        "    16,64,32768\n",
        "    8,24,24576+8192\n",
        "    2,4,4096x16\n",
        "    2,8,8192x8\n",
        "    12,12,1024x8\n",
    ] {
        assert!(list.contains(words), "{words}:\n{list}");
    }
}
