//! The benchmark in C++ with `--library`: the C library on the program's own memory, streams and runtime.
#![cfg(unix)]

use std::path::Path;
use std::process::Command;
use std::{env, fs};

#[test]
fn the_benchmark_runs_through_the_library() {
    let skip = |why: &str| {
        let required = env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
        assert!(!required, "{why}");
        println!("skipped: {why}");
    };
    if deltawave::code_objects::for_arch("gfx942").next().is_none() {
        return skip(&deltawave::code_objects::why_missing("gfx942"));
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("gdn_bench_library");
    fs::create_dir_all(&folder).expect("a folder");
    let program = folder.join("gdn_bench");
    // Cargo puts the library and the simulator as libamdhip64.so beside this test.
    let test = env::current_exe().expect("this test's path");
    let libraries = test.parent().expect("it lies in a folder");
    let built = Command::new(root.join("benches/gdn_bench/build"))
        .arg(&program)
        .arg(format!("-L{}", libraries.display()))
        .output()
        .expect("a shell");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if built.status.code() == Some(3) {
        return skip(&text(&built.stderr));
    }
    assert!(built.status.success(), "{}", text(&built.stderr));

    let run = |library: &Path| {
        Command::new(&program)
            .env("LD_LIBRARY_PATH", libraries)
            .env_remove("DELTAWAVE_HIP_LIBRARY")
            .arg("--library")
            .arg(library)
            .args(["--small", "--json"])
            .output()
            .expect("the program starts")
    };
    let library = libraries.join("libdeltawave_c.so");
    let output = run(&library);
    let said = text(&output.stdout);
    assert!(output.status.success(), "{said}{}", text(&output.stderr));
    assert_eq!(said.matches("\"passed\": true").count(), 4, "{said}");
    let through = format!("\"through\": \"{} ", library.display());
    assert_eq!(said.matches(&through).count(), 4, "{said}");

    let output = run(Path::new("/nonexistent/libdeltawave_c.so"));
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(
        said.contains("cargo build --release -p deltawave-c"),
        "{said}"
    );
}
