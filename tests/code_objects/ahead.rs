//! `DELTAWAVE_CODE_OBJECTS`: the build script embeds code objects built ahead where there is no compiler, and refuses a
//! folder that does not fit with a message that says why. The script is compiled here and run as cargo runs it.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

use deltawave::code_objects::{self, VERIFIED_ARCHS};

#[path = "../../build/prebuilt.rs"]
mod prebuilt;
#[path = "../../build/sha256.rs"]
mod sha256;

use super::build as kernels;
use super::{folder, root, skip};
use prebuilt::{MANIFEST, OfArch, PrebuiltError, object_path, open, write_manifest};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// A folder of the code objects that this crate embeds, as `make code-objects` writes it.
fn made(name: &str) -> Option<PathBuf> {
    let arch = VERIFIED_ARCHS[0];
    let folder = folder(name);
    fs::create_dir(folder.join(arch)).expect("the target folder can be written");
    let mut objects = Vec::new();
    for code in code_objects::for_arch(arch) {
        let path = object_path(&folder, arch, code.name);
        fs::write(&path, code.bytes).expect("the target folder can be written");
        objects.push((code.name.to_owned(), path));
    }
    if objects.is_empty() {
        skip(&code_objects::why_missing(arch));
        return None;
    }
    let of_arch = OfArch {
        arch: arch.to_owned(),
        compiler: "a compiler elsewhere".to_owned(),
        objects,
    };
    write_manifest(&folder, root(), VERSION, &[of_arch]).expect("the manifest can be written");
    Some(folder)
}

/// The build script, as a program in a folder of its own.
fn script(name: &str) -> PathBuf {
    let program = folder(name).join("build-script");
    let compiled = Command::new(env::var_os("RUSTC").unwrap_or_else(|| "rustc".into()))
        .args(["--edition", "2024", "--crate-name", "build_script", "-o"])
        .arg(&program)
        .arg(root().join("build.rs"))
        .output()
        .expect("rustc starts");
    let text = String::from_utf8_lossy(&compiled.stderr);
    assert!(compiled.status.success(), "{text}");
    program
}

/// Runs the build script with a PATH on which there is nothing. Returns what it says and the table that it writes.
fn run(script: &Path, objects: &Path, archs: Option<&str>) -> (Output, String) {
    let out = script.with_file_name("out");
    let _ = fs::remove_dir_all(&out);
    fs::create_dir(&out).expect("the target folder can be written");
    let mut command = Command::new(script);
    command
        .env("PATH", &out)
        .env("ROCM_PATH", &out)
        .env("DELTAWAVE_HIPCC", "/nonexistent/hipcc")
        .env("OUT_DIR", &out)
        .env("CARGO_MANIFEST_DIR", root())
        .env("CARGO_PKG_VERSION", VERSION)
        .env("DELTAWAVE_REQUIRE_KERNELS", "1")
        .env("DELTAWAVE_CODE_OBJECTS", objects)
        .env_remove("DELTAWAVE_ARCHS");
    if let Some(archs) = archs {
        command.env("DELTAWAVE_ARCHS", archs);
    }
    let output = command.output().expect("the build script starts");
    let table = fs::read_to_string(out.join("code_objects.rs")).unwrap_or_default();
    (output, table)
}

#[test]
fn a_build_without_a_compiler_embeds_code_objects_built_ahead() {
    let Some(objects) = made("ahead") else { return };
    let script = script("script-ahead");
    for archs in [None, Some("gfx942"), Some(" gfx942 ,")] {
        let (output, table) = run(&script, &objects, archs);
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{said}");
        assert!(!said.contains("cargo::error"), "{said}");
        assert!(said.contains("rerun-if-env-changed=DELTAWAVE_CODE_OBJECTS"));
        assert!(table.contains("a compiler elsewhere"), "{table}");
        for code in code_objects::for_arch(VERIFIED_ARCHS[0]) {
            let path = object_path(&objects, code.arch, code.name);
            assert!(table.contains(path.to_str().expect("UTF-8")), "{table}");
        }
        assert!(
            table.contains("MISSING: &[(&str, &str)] = &[\n]"),
            "{table}"
        );
    }
    let (output, table) = run(&script, &objects, Some(""));
    assert!(
        output.status.success() && !table.contains("gfx942"),
        "{table}"
    );
}

#[test]
fn code_objects_that_do_not_fit_stop_the_build_and_say_why() {
    let Some(objects) = made("wrong") else { return };
    let script = script("script-wrong");
    let refused = |objects: &Path, archs: Option<&str>, parts: &[&str]| {
        let (output, table) = run(&script, objects, archs);
        let said = String::from_utf8_lossy(&output.stdout);
        let errors: Vec<_> = said
            .lines()
            .filter(|l| l.contains("cargo::error="))
            .collect();
        assert_eq!(errors.len(), 1, "{said}");
        assert!(table.is_empty(), "{table}");
        for part in ["DELTAWAVE_CODE_OBJECTS: "].iter().chain(parts) {
            assert!(
                errors[0].contains(part),
                "{part:?} is not in: {}",
                errors[0]
            );
        }
    };
    refused(
        Path::new("/nonexistent"),
        None,
        &["/nonexistent/manifest.txt", "make code-objects"],
    );
    let asked = Some("gfx942,gfx90a");
    refused(
        &objects,
        asked,
        &["no code objects for gfx90a", "may ask for gfx942"],
    );

    let commit = object_path(&objects, "gfx942", "commit");
    let bytes = fs::read(&commit).expect("it was written");
    let mut other = bytes.clone();
    other[100] ^= 1;
    fs::write(&commit, other).expect("it can be written");
    refused(&objects, None, &["commit.gfx942.co", "SHA-256"]);
    fs::remove_file(&commit).expect("it can be removed");
    refused(&objects, None, &["commit.gfx942.co", "cannot be read"]);
    fs::write(&commit, bytes).expect("it can be written");

    let path = objects.join(MANIFEST);
    let manifest = fs::read_to_string(&path).expect("it was written");
    let with = |from: &str, to: &str| {
        assert!(manifest.contains(from), "{manifest}");
        fs::write(&path, manifest.replace(from, to)).expect("it can be written");
    };
    with("sources ", "sources 0");
    refused(
        &objects,
        None,
        &["for deltawave", "sources 0", "this crate"],
    );
    with(&format!("version {VERSION}"), "version 0.0.1");
    refused(&objects, None, &["for deltawave 0.0.1", VERSION]);
    with("format 1", "format 2");
    refused(&objects, None, &["manifest.txt line 1", "format 1"]);
    with("arch gfx942", "arc gfx942");
    refused(&objects, None, &["manifest.txt line 4", "arc gfx942"]);
    with("gfx942/commit.", "gfx942/omit.");
    refused(&objects, None, &["commit.gfx942.co", "not in the manifest"]);
    fs::write(&path, &manifest).expect("it can be written");
    let (output, _) = run(&script, &objects, None);
    assert!(output.status.success());
}

/// The digest that decides whether code objects fit follows every source.
#[test]
fn code_objects_of_other_sources_are_refused() {
    let Some(objects) = made("other-sources") else {
        return;
    };
    let copy = folder("copy");
    let copied = Command::new("cp")
        .arg("-r")
        .arg(root().join("hip"))
        .arg(&copy)
        .status();
    assert!(copied.expect("cp starts").success());
    assert!(open(&objects, &copy, VERSION, None).is_ok());
    let header = copy.join("hip/kernel_args.h");
    let text = fs::read_to_string(&header).expect("a header");
    fs::write(&header, text + "\n").expect("the target folder can be written");
    match open(&objects, &copy, VERSION, None) {
        Err(PrebuiltError::Sources { theirs, ours, .. }) => assert_ne!(theirs.1, ours.1),
        other => panic!("{other:?}"),
    }
}

/// Examples of FIPS 180-4, and lengths about the end of a block.
#[test]
fn digests_are_those_of_sha256() {
    let hex = |text: &str| sha256::hex(text.as_bytes());
    assert_eq!(
        hex("abc"),
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    );
    assert_eq!(
        hex(""),
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    );
    let two = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
    assert_eq!(
        hex(two),
        "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"
    );
    assert_eq!(
        hex(&"a".repeat(1_000_000)),
        "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"
    );
    let digests: Vec<_> = (50..140).map(|n| hex(&"x".repeat(n))).collect();
    assert!((1..digests.len()).all(|i| digests[i] != digests[i - 1]));
}
