//! The Python binding of the benchmark beside the peers, on the simulator, and the rest of it that needs no GPU.

use std::env;
use std::path::Path;
use std::process::Command;

#[test]
fn the_benchmark_tests_itself() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let test = env::current_exe().expect("this test's path");
    let mut python = Command::new("python3");
    python
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .arg(root.join("benches/peers/selftest.py"))
        .arg(test.with_file_name("libdeltawave_c.so"));
    match python.output() {
        Err(error) => {
            let required = env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
            assert!(!required, "python3: {error}");
            println!("skipped: python3: {error}");
        }
        Ok(output) => assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        ),
    }
}
