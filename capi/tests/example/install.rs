//! `make install`: what scripts/install-c installs is found by pkg-config and by CMake, has a soname, and works.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use super::{PREFILL, libraries, run};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Whether a program is there. It must be where nothing may be skipped, as in .ci/run: scripts/setup test installs it.
fn has(program: &str) -> bool {
    let found = Command::new(program).arg("--version").output().is_ok();
    let required = env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
    assert!(
        found || !required,
        "no {program}: scripts/setup test installs it"
    );
    if !found {
        println!("skipped: no {program}; scripts/setup test installs it on Debian and Ubuntu");
    }
    found
}

/// An empty folder of this test.
fn folder(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).expect("the folder can be made");
    path
}

/// Installs this build's library into an empty folder.
fn installed(name: &str) -> PathBuf {
    let prefix = folder(name);
    let said = run(Command::new(root().join("scripts/install-c"))
        .arg(format!("{}/libdeltawave_c.a", libraries()))
        .env("PREFIX", &prefix)
        .env_remove("DESTDIR")
        .env_remove("LIBDIR")
        .env_remove("INCLUDEDIR")
        .env_remove("GLIBC"));
    assert!(said.contains("libdeltawave_c.so.1"), "{said}");
    prefix
}

/// Runs a program on the simulator without a path to libraries.
fn simulated(program: &Path) -> String {
    run(Command::new(program)
        .env("DELTAWAVE_BACKEND", "simulator")
        .env_remove("LD_LIBRARY_PATH"))
}

#[test]
fn an_installed_library_is_found_by_pkg_config() {
    if !has("pkg-config") || !has("readelf") {
        return;
    }
    let prefix = installed("install-pkg-config");
    let library = prefix.join("lib/libdeltawave_c.so");
    let dynamic = run(Command::new("readelf").arg("-dW").arg(&library));
    assert!(
        dynamic.contains("soname: [libdeltawave_c.so.1]"),
        "{dynamic}"
    );
    // Functions of the header and nothing else.
    let symbols = run(Command::new("readelf")
        .args(["-W", "--dyn-syms"])
        .arg(&library));
    let exported = symbols
        .lines()
        .filter(|l| l.contains(" DEFAULT ") && !l.contains(" UND "))
        .filter_map(|l| l.split_whitespace().last());
    let exported: Vec<_> = exported.collect();
    assert!(exported.contains(&"dw_prefill_launch"), "{symbols}");
    for name in exported {
        assert!(name.starts_with("dw_"), "{name} is exported");
    }

    let asked = run(Command::new("pkg-config")
        .args(["--cflags", "--libs", "deltawave"])
        .env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig")));
    let program = prefix.join("prefill");
    run(Command::new("cc")
        .arg(root().join("capi/examples/prefill.c"))
        .args(asked.split_whitespace())
        .arg(format!("-Wl,-rpath,{}", prefix.join("lib").display()))
        .args(["-lm", "-o"])
        .arg(&program));
    let needed = run(Command::new("readelf").arg("-dW").arg(&program));
    assert!(needed.contains("[libdeltawave_c.so.1]"), "{needed}");
    let said = simulated(&program);
    assert!(said.contains(PREFILL), "{said}");
}

#[test]
fn an_installed_library_is_found_by_cmake() {
    if !has("cmake") {
        return;
    }
    let prefix = installed("install-cmake");
    let build = folder("install-cmake-build");
    let configure = |version: &str| {
        let source = folder("install-cmake-source");
        let text = fs::read_to_string(root().join("capi/examples/cmake/CMakeLists.txt"));
        let text = text
            .expect("the example")
            .replace("deltawave 0.1 ", version);
        assert!(text.contains(version), "{text}");
        let examples = root().join("capi/examples").canonicalize();
        let examples = examples.expect("the examples").display().to_string();
        fs::write(
            source.join("CMakeLists.txt"),
            text.replace("../prefill.c", &format!("{examples}/prefill.c")),
        )
        .expect("the folder can be written");
        let mut cmake = Command::new("cmake");
        cmake
            .arg("-S")
            .arg(source)
            .arg("-B")
            .arg(folder("install-cmake-other"))
            .arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display()));
        let output = cmake.output().expect("cmake starts");
        let said = [output.stdout, output.stderr].map(|t| String::from_utf8_lossy(&t).into_owned());
        // CMake breaks its lines where paths get long.
        let said = said.concat();
        let words: Vec<&str> = said.split_whitespace().collect();
        (output.status.success(), words.join(" "))
    };
    run(Command::new("cmake")
        .arg("-S")
        .arg(root().join("capi/examples/cmake"))
        .arg("-B")
        .arg(&build)
        .arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())));
    run(Command::new("cmake").arg("--build").arg(&build));
    for program in ["prefill", "prefill-static"] {
        let said = simulated(&build.join(program));
        assert!(said.contains(PREFILL), "{said}");
    }
    // Versions that fit, and that do not.
    for (version, fits) in [
        ("deltawave 0.1.0 EXACT ", true),
        ("deltawave 0.2 ", false),
        ("deltawave 0.0.9 ", false),
        ("deltawave 1 ", false),
    ] {
        let (found, said) = configure(version);
        assert_eq!(found, fits, "{version}: {said}");
        assert!(fits || said.contains("0.1.0"), "{said}");
    }
    // A broken installation says so.
    fs::remove_file(prefix.join("include/deltawave.h")).expect("it was installed");
    let (found, said) = configure("deltawave 0.1 ");
    assert!(
        !found && said.contains("deltawave.h does not exist"),
        "{said}"
    );
}

#[test]
fn packagers_install_below_destdir() {
    let destination = folder("install-destdir");
    let said = run(Command::new(root().join("scripts/install-c"))
        .arg(format!("{}/libdeltawave_c.a", libraries()))
        .env("DESTDIR", &destination)
        .env("PREFIX", "/opt/deltawave")
        .env("LIBDIR", "/opt/deltawave/lib64")
        .env_remove("INCLUDEDIR")
        .env_remove("GLIBC"));
    assert!(said.contains("/opt/deltawave/lib64"), "{said}");
    let lib = destination.join("opt/deltawave/lib64");
    assert!(lib.join("libdeltawave_c.so").exists());
    let header = destination.join("opt/deltawave/include/deltawave.h");
    assert!(header.is_file());
    for file in [
        "pkgconfig/deltawave.pc",
        "cmake/deltawave/deltawave-config.cmake",
    ] {
        let text = fs::read_to_string(lib.join(file)).expect("it is installed");
        assert!(text.contains("/opt/deltawave/lib64"), "{text}");
        assert!(
            !text.contains('@') && !text.contains("install-destdir"),
            "{text}"
        );
    }
    let refused = Command::new(root().join("scripts/install-c"))
        .arg("unused.a")
        .env("PREFIX", "relative")
        .output()
        .expect("a shell");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert!(
        !refused.status.success() && said.contains("relative; it must be an absolute path"),
        "{said}"
    );
}
