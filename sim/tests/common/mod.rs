//! Compiles test kernels with the clang that is installed.
#![allow(dead_code)]

use std::path::{Path, PathBuf};
use std::process::Command;

pub mod asm;
#[path = "../llvm/compiler.rs"]
mod found;

pub use found::compiler;

/// The code object of a `.hip` or `.s` file of `tests/kernels`, or `None`, said aloud, if no compiler
/// for gfx942 is installed. With `DELTAWAVE_REQUIRE_KERNELS=1` that is a failure.
pub fn compile(source: &str, flags: &[&str]) -> Option<Vec<u8>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/kernels")
        .join(source);
    compile_file(&path, flags)
}

/// As [`compile`], for the text of an assembly file.
pub fn assemble(text: &str) -> Option<Vec<u8>> {
    let path = output(text, &[]).with_extension("s");
    std::fs::write(&path, text).expect("the directory for tests can be written");
    let bytes = compile_file(&path, &[]);
    let _ = std::fs::remove_file(&path);
    bytes
}

fn compile_file(path: &Path, flags: &[&str]) -> Option<Vec<u8>> {
    let Some(compiler) = compiler() else {
        assert!(
            std::env::var("DELTAWAVE_REQUIRE_KERNELS").as_deref() != Ok("1"),
            "no clang with the AMDGPU target"
        );
        println!("skipped: no clang with the AMDGPU target");
        return None;
    };
    let source = path.to_string_lossy();
    let out = output(&source, flags);
    let mut command = Command::new(compiler);
    if source.ends_with(".s") {
        command.args(["--target=amdgcn-amd-amdhsa", "-mcpu=gfx942"]);
    } else {
        command.args(["-x", "hip", "-nogpuinc", "-nogpulib", "-O3"]);
        command.args(["--offload-arch=gfx942", "--offload-device-only"]);
        command.arg("--no-gpu-bundle-output");
    }
    let status = command.args(flags).arg("-o").arg(&out).arg(path).status();
    assert!(
        status.is_ok_and(|s| s.success()),
        "{source} does not compile"
    );
    let bytes = std::fs::read(&out).expect("the compiler's output");
    let _ = std::fs::remove_file(&out);
    Some(bytes)
}

/// A code object in an offload bundle behind an empty entry for the host, as clang's bundler lays it out (which
/// distributions package apart from clang).
pub fn bundle(code: &[u8]) -> Vec<u8> {
    let entries: [(&[u8], &[u8]); 2] = [
        (b"host-x86_64-unknown-linux--", b""),
        (b"hipv4-amdgcn-amd-amdhsa--gfx942", code),
    ];
    let mut out = b"__CLANG_OFFLOAD_BUNDLE__".to_vec();
    out.extend((entries.len() as u64).to_le_bytes());
    const PAGE: usize = 4096;
    for (target, data) in entries {
        for field in [PAGE, data.len(), target.len()] {
            out.extend((field as u64).to_le_bytes());
        }
        out.extend(target);
    }
    out.resize(PAGE, 0);
    out.extend(code);
    out
}

fn output(source: &str, flags: &[&str]) -> PathBuf {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hash = DefaultHasher::new();
    (source, flags, std::thread::current().id()).hash(&mut hash);
    let name = format!("{}-{:x}.co", std::process::id(), hash.finish());
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(name)
}
