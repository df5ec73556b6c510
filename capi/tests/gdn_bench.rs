//! The benchmark in C++ with `--library`: the C library on the program's own memory, streams and runtime.
#![cfg(unix)]

#[allow(dead_code, reason = "shared with the tests of the kernels themselves")]
#[path = "../../tests/cpp_bench/mod.rs"]
mod cpp_bench;

use std::path::Path;

use cpp_bench::{Program, beside_this_test};

#[test]
fn the_benchmark_runs_through_the_library() {
    let Some(program) = Program::build("gdn_bench_library") else {
        return;
    };
    let run = |library: &Path, arguments: &[&str]| {
        program
            .command()
            .arg("--library")
            .arg(library)
            .args(arguments)
            .output()
            .expect("the program starts")
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let library = beside_this_test("libdeltawave_c.so");
    let output = run(&library, &["--small", "--json"]);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert_eq!(said.matches("\"passed\": true").count(), 4, "{said}");
    let through = format!("\"through\": \"{} ", library.display());
    assert_eq!(said.matches(&through).count(), 4, "{said}");

    let cut = ["--segments", "3", "--shape", "1,2,260", "--json"];
    let output = run(&library, &cut);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert!(said.contains("\"passed\": true"), "{said}");
    assert!(said.contains(", 3 segments\""), "{said}");

    let output = run(Path::new("/nonexistent/libdeltawave_c.so"), &["--small"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("cargo build --release -p deltawave-c"),
        "{said}"
    );
}
