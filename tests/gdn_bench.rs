//! The benchmark in C++, `benches/gdn_bench.cpp`: compiled, and run on the simulator behind the HIP runtime's name.
#![cfg(unix)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;
use std::{env, fs};

use serde_json::Value;

/// The program, and the kernels as it takes them. Both lie in a folder of this test.
struct Bench {
    program: PathBuf,
    kernels: PathBuf,
    /// Where cargo puts the drop-in library: beside the test.
    libraries: PathBuf,
}

impl Bench {
    /// None, and a line that says why, where it cannot be compiled or has no kernels.
    fn get() -> Option<&'static Bench> {
        static BENCH: OnceLock<Result<Bench, String>> = OnceLock::new();
        match BENCH.get_or_init(Bench::build) {
            Ok(bench) => Some(bench),
            Err(why) => {
                let required = env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
                assert!(!required, "{why}");
                println!("skipped: {why}");
                None
            }
        }
    }

    fn build() -> Result<Bench, String> {
        if deltawave::code_objects::for_arch("gfx942").next().is_none() {
            return Err(deltawave::code_objects::why_missing("gfx942"));
        }
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gdn_bench");
        let test = env::current_exe().expect("this test's path");
        let bench = Bench {
            program: folder.join("gdn_bench"),
            kernels: folder.join("kernels"),
            libraries: test.parent().expect("it lies in a folder").to_owned(),
        };
        deltawave::code_objects::save(&bench.kernels).expect("the kernels are written");
        let compiled = Command::new("benches/gdn_bench/build")
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .arg(&bench.program)
            .arg(format!("-L{}", bench.libraries.display()))
            .output()
            .expect("a shell");
        match compiled.status.code() {
            Some(0) => Ok(bench),
            Some(3) => Err(text(&compiled.stderr)),
            _ => panic!("it does not compile:\n{}", text(&compiled.stderr)),
        }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.run_with(&self.kernels, arguments)
    }

    fn run_with(&self, kernels: &Path, arguments: &[&str]) -> Output {
        Command::new(&self.program)
            .env("LD_LIBRARY_PATH", &self.libraries)
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
fn what_a_shape_needs_is_what_the_profile_says() {
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
    // A scan of one wave leaves the columns of the other three unwritten.
    let wrong = bench.kernels.with_file_name("wrong");
    deltawave::code_objects::save(&wrong).expect("the kernels are written");
    let list = wrong.join("gfx942/kernels.txt");
    let right = fs::read_to_string(&list).expect("the list");
    let scan = "prefill_scan.co 256 ";
    assert!(right.contains(scan), "{right}");
    fs::write(&list, right.replace(scan, "prefill_scan.co 64 ")).expect("the list");
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
    let grown: String = lines.lines().map(|line| format!("{line}6\n")).collect();
    fs::write(&list, grown).expect("the list");
    let output = bench.run_with(&old, &["--shape", "1,1,64"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = text(&output.stdout);
    assert!(said.contains("of different versions"), "{said}");
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
