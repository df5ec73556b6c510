//! `capi/examples/`, compiled by a C compiler and linked with the shared and with the static library.

#[path = "../../tests/fake_collectives/mod.rs"]
mod fake_collectives;
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

/// The example with a process for each rank, on a library of collectives that this test makes.
#[test]
fn ranks_have_the_bits_of_one() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ranks");
    let Some(collectives) = fake_collectives::compile(&root, &folder, "libranks.so", "-O1") else {
        return;
    };
    let library = format!("{}/libdeltawave_c.a", libraries());
    let program = folder.join("ranks");
    let mut cc = Command::new("cc");
    cc.args([
        "-std=c99",
        "-O2",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-pedantic",
        "-I",
    ])
    .arg(root.join("include"))
    .arg(root.join("capi/examples/ranks.c"))
    .args([&library, "-lpthread", "-ldl", "-lm", "-o"])
    .arg(&program);
    run(&mut cc);
    let start = |ranks: &str| {
        let mut command = Command::new(&program);
        command.args([ranks, "1"]);
        command.env("DELTAWAVE_BACKEND", "simulator");
        command.env("DELTAWAVE_CCL_LIBRARY", &collectives);
        command
    };
    for (ranks, count) in [("1", 1), ("2", 2), ("5", 5), ("13", 13)] {
        let said = run(&mut start(ranks));
        let same = said.matches("the bits of one rank").count();
        assert_eq!(same, count, "{said}");
    }
    // A rank dies at its start, while plans are compared, and in the exchange: the other says so in time.
    for (dies, call) in [
        (
            "1:0",
            "dw_communicator_create: status 5: ncclCommInitRankConfig",
        ),
        ("1:1", "dw_communicator_agree: status 5: ncclAllGather"),
        ("1:2", "dw_communicator_prefill: status 5: ncclAllGather"),
    ] {
        let mut command = start("2");
        command.env("FAKE_COLLECTIVES_DIES", dies);
        command.env("RANKS_TIMEOUT_MS", "700");
        let output = command.output().expect("the program starts");
        assert_eq!(output.status.code(), Some(1), "{dies}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let wanted = format!("{call} was not complete after 700 ms");
        assert!(said.contains(&wanted), "{dies}: {said}");
    }
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
