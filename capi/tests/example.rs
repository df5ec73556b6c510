//! `capi/examples/`, compiled by a C compiler and linked with the shared and with the static library.

#[path = "example/install.rs"]
mod install;

use std::path::Path;
use std::process::Command;
use std::{env, fs};

fn run(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    text(&output.stdout)
}

/// Compiles an example with what links it to the library, and runs it on the simulator.
fn build_and_run(example: &str, says: &str, name: &str, link: &[&str]) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&folder).expect("the folder can be made");
    let program = folder.join(example);
    let mut cc = Command::new("cc");
    cc.args([
        "-std=c99",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
    ])
    .arg("-I")
    .arg(root.join("include"))
    .arg(root.join(format!("capi/examples/{example}.c")))
    .args(link)
    .args(["-lm", "-o"])
    .arg(&program);
    run(&mut cc);
    let said = run(Command::new(&program).env("DELTAWAVE_BACKEND", "simulator"));
    assert!(said.contains(says), "{said}");
}

/// The folder of this test, where cargo puts the libraries too.
fn libraries() -> String {
    let test = env::current_exe().expect("this test's path");
    let folder = test.parent().expect("it lies in a folder");
    folder.to_str().expect("the path is UTF-8").to_owned()
}

const PREFILL: &str = "(simulator): 150 tokens";
const LAYER: &str = "(simulator): a decoded token beside a prefilled one";

#[test]
fn the_examples_run_with_the_shared_library() {
    let folder = libraries();
    let link = [
        &format!("-L{folder}"),
        "-ldeltawave_c",
        &format!("-Wl,-rpath,{folder}"),
    ];
    build_and_run("prefill", PREFILL, "shared", &link);
    build_and_run("layer", LAYER, "shared", &link);
}

#[test]
fn the_examples_run_with_the_static_library() {
    let library = format!("{}/libdeltawave_c.a", libraries());
    let link = [&library, "-lpthread", "-ldl"];
    build_and_run("prefill", PREFILL, "static", &link);
    build_and_run("layer", LAYER, "static", &link);
}
