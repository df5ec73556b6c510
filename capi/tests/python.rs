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

/// A HIP runtime whose GPU is a gfx1100, for which nobody has kernels: the simulator's, but for the name.
const OTHER_CARD: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

int hipGetDevicePropertiesR0600(char *properties, int device) {
    int (*theirs)(char *, int) = (int (*)(char *, int))dlsym(RTLD_NEXT, "hipGetDevicePropertiesR0600");
    int status = theirs(properties, device);
    for (int i = 0; i + 8 < 1472; ++i) /* the bytes of hipDeviceProp_tR0600 */
        if (memcmp(properties + i, "gfx942", 6) == 0 && (properties[i + 6] == ':' || !properties[i + 6]))
            memcpy(properties + i, "gfx1100", 8);
    return status;
}
"#;

#[test]
fn a_card_without_kernels_is_refused_with_the_architectures_that_there_are() {
    let Some(interpreter) = python_with("ctypes") else {
        return skip("no python3");
    };
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("other-card");
    fs::create_dir_all(&folder).expect("a folder");
    let (source, library) = (folder.join("card.c"), folder.join("libamdhip64.so.7"));
    fs::write(&source, OTHER_CARD).expect("the source can be written");
    let beside = env::current_exe().expect("this test's path");
    let simulator = beside.with_file_name("libhip_on_simulator.so");
    let mut cc = Command::new("cc");
    cc.args([
        "-shared",
        "-fPIC",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wl,--no-as-needed",
        "-o",
    ])
    .args([&library, &source, &simulator])
    .arg(format!(
        "-Wl,-rpath,{}",
        beside.with_file_name("").display()
    ))
    .arg("-ldl");
    run(&mut cc);
    let program = |body: &str| {
        let mut command = python(interpreter);
        let lines = format!(
            "import sys, warnings; sys.path.insert(0, 'python')\nimport deltawave as dw\n{body}"
        );
        command
            .args(["-c", &lines])
            .env_remove("DELTAWAVE_BACKEND")
            .env_remove("DELTAWAVE_HIP_LIBRARY");
        command
    };
    let archs = deltawave::code_objects::archs();
    let refused = run(program(
        "try: dw.Context('hip')\nexcept dw.DeviceError as e: print(e, dw.Library().archs())",
    )
    .env("DELTAWAVE_HIP_LIBRARY", &library));
    let expected = format!("this build has kernels for {};", archs.join(", "));
    for part in [
        "no kernels for gfx1100",
        &expected,
        "DELTAWAVE_ARCHS=gfx1100",
    ] {
        assert!(refused.contains(part), "{part:?} is not in: {refused}");
    }
    for arch in archs {
        assert!(refused.contains(&format!("'{arch}'")), "{refused}");
    }
    // With a runtime that nobody names, as on a machine with that card: the simulator, with a warning.
    let warned = "with warnings.catch_warnings(record=True) as all:\n    warnings.simplefilter('always')\n    \
                  print(dw.Context().backend, *(w.category.__name__ + ' ' + str(w.message) for w in all))";
    let said = run(program(warned).env("LD_LIBRARY_PATH", &folder));
    for part in [
        "simulator RuntimeWarning there are no kernels for gfx1100",
        &expected,
    ] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
    let said = run(program(warned)
        .env("LD_LIBRARY_PATH", &folder)
        .env("DELTAWAVE_BACKEND", "simulator"));
    assert_eq!(said.trim(), "simulator");
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
