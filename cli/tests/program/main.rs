//! The program `deltawave`, as a user runs it.

mod compare_models;
mod conv;
mod decode;
mod files;
mod golden;
mod info;
mod layer;
mod prefill;
mod profile;
mod ranks;
mod states;
mod usage;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// Runs the program on the simulator, whatever the machine has.
fn deltawave(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_deltawave"))
        .args(arguments)
        .env("DELTAWAVE_BACKEND", "simulator")
        .output()
        .expect("the program starts")
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).expect("UTF-8")
}

/// The one JSON object on stdout.
fn json(output: &Output) -> Value {
    serde_json::from_str(text(&output.stdout))
        .unwrap_or_else(|e| panic!("{e}\n{}\n{}", text(&output.stdout), text(&output.stderr)))
}

/// Whether this program has kernels to run; a build without a compiler has none.
fn kernels() -> bool {
    let built = deltawave::code_objects::for_arch("gfx942").next().is_some();
    if !built {
        assert_ne!(
            std::env::var("DELTAWAVE_REQUIRE_KERNELS").as_deref(),
            Ok("1"),
            "no kernels"
        );
        println!(
            "skipped: {}",
            deltawave::code_objects::why_missing("gfx942")
        );
    }
    built
}

/// A prefill that succeeds, as JSON.
fn prefill(arguments: &[&str]) -> Value {
    let all = [&["prefill", "--json"], arguments].concat();
    let output = deltawave(&all);
    assert!(
        output.status.success(),
        "{arguments:?}\n{}\n{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    json(&output)
}

/// A run that fails with this status and these words on stderr, and says the same as JSON.
fn refused(arguments: &[&str], status: i32, words: &[&str]) {
    let output = deltawave(arguments);
    let stderr = text(&output.stderr);
    assert_eq!(
        output.status.code(),
        Some(status),
        "{arguments:?}\n{stderr}"
    );
    assert!(output.stdout.is_empty(), "{arguments:?}");
    assert!(stderr.starts_with("error: "), "{arguments:?}\n{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{arguments:?}: no {word}\n{stderr}");
    }
    let output = deltawave(&[arguments, &["--json"]].concat());
    assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    let error = json(&output)["error"].as_str().map(str::to_owned);
    assert!(
        error.is_some_and(|e| !e.is_empty() && !e.starts_with("error")),
        "{arguments:?}"
    );
}

/// A file of this test's own.
fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cli-{name}.safetensors"))
}
