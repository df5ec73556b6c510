//! The Python package and the benchmark beside the peers, which stands on it: their own tests, on the simulator.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// A Python in the repository that finds this build's library and leaves nothing behind.
fn python(interpreter: &str) -> Command {
    let test = env::current_exe().expect("this test's path");
    let mut command = Command::new(interpreter);
    command
        .current_dir(root())
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .env(
            "DELTAWAVE_C_LIBRARY",
            test.with_file_name("libdeltawave_c.so"),
        );
    command
}

/// The first Python 3 that can import a package. The system's may have packages that another one before it lacks.
fn python_with(package: &str) -> Option<&'static str> {
    ["python3", "/usr/bin/python3"].into_iter().find(|name| {
        let mut probe = python(name);
        let output = probe.args(["-c", &format!("import {package}")]).output();
        output.is_ok_and(|o| o.status.success())
    })
}

/// Says that a test cannot run, or fails where none may be skipped.
fn skip(reason: &str) {
    let required = env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
    assert!(!required, "{reason}");
    println!("skipped: {reason}");
}

/// What a successful run says: Python's tests report on the error stream.
#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().expect("Python starts");
    let text = [output.stdout, output.stderr].map(|t| String::from_utf8_lossy(&t).into_owned());
    let text = text.concat();
    assert!(output.status.success(), "{text}");
    text
}

#[test]
fn the_package_tests_itself() {
    let package = if python_with("numpy").is_some() {
        "numpy"
    } else {
        skip("no python3 that has NumPy: scripts/setup test installs it on Debian and Ubuntu");
        "ctypes"
    };
    let Some(interpreter) = python_with(package) else {
        return skip("no python3");
    };
    let tests = ["-m", "unittest", "discover", "-v", "-t", "python"];
    let text = run(python(interpreter).args(tests).args(["-s", "python/tests"]));
    assert!(!text.contains("Ran 0 tests"), "{text}");
    // Without torch its tests are skipped, with words.
    for line in text.lines().filter(|line| line.contains("skipped")) {
        println!("{line}");
    }
}

#[test]
fn the_benchmark_beside_the_peers_tests_itself() {
    match python_with("ctypes") {
        Some(interpreter) => drop(run(python(interpreter).arg("benches/peers/selftest.py"))),
        None => skip("no python3"),
    }
}

/// As for the bindings in Rust: `DELTAWAVE_BLESS=1` rewrites it.
#[test]
fn the_declarations_in_ctypes_are_current() {
    let Some(interpreter) = python_with("ctypes") else {
        return skip("no python3");
    };
    let made = run(python(interpreter).arg("python/generate_abi.py"));
    let module = root().join("python/deltawave/_abi.py");
    if env::var_os("DELTAWAVE_BLESS").is_some() {
        fs::write(&module, &made).expect("the declarations can be written");
    }
    let committed = fs::read_to_string(&module).expect("they are committed");
    assert!(
        committed == made,
        "{} is stale: run `DELTAWAVE_BLESS=1 cargo test -p deltawave-c`",
        module.display()
    );
}
