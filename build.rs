//! Compiles the kernels ahead of time: one code object per source and architecture, embedded into the crate.
//!
//! Without a compiler the crate still builds; loading kernels then says what is missing. Environment:
//! `DELTAWAVE_ARCHS` (default `gfx942`), `DELTAWAVE_HIPCC` (compiler to use), `DELTAWAVE_REQUIRE_KERNELS=1` (a missing
//! code object fails the build).

#[path = "build/kernels.rs"]
mod kernels;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

use kernels::Compiler;

fn main() {
    for path in ["hip", "build", "build.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    for variable in [
        "DELTAWAVE_ARCHS",
        "DELTAWAVE_HIPCC",
        "DELTAWAVE_REQUIRE_KERNELS",
        "ROCM_PATH",
        "PATH",
    ] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let archs = env::var("DELTAWAVE_ARCHS").unwrap_or_else(|_| "gfx942".to_owned());
    let required = env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
    let sources = kernels::sources(&root).expect("hip/kernels can be read");

    let mut embedded = String::from("&[\n");
    let mut missing = String::from("&[\n");
    for arch in archs.split(',').map(str::trim).filter(|a| !a.is_empty()) {
        match build(arch, &sources, &out) {
            Ok((compiler, objects)) => {
                for (name, path) in objects {
                    let compiler = compiler.0.display().to_string();
                    let _ = writeln!(
                        embedded,
                        "    CodeObject {{ arch: {arch:?}, name: {name:?}, compiler: {compiler:?}, \
                         bytes: &Aligned(*include_bytes!({path:?})).0 }},"
                    );
                }
            }
            Err(reason) if required => {
                panic!("DELTAWAVE_REQUIRE_KERNELS=1, and there are no kernels for {arch}: {reason}")
            }
            Err(reason) => {
                println!(
                    "cargo::warning=no kernels for {arch}: {}",
                    reason.lines().next().unwrap_or_default()
                );
                let _ = writeln!(missing, "    ({arch:?}, {reason:?}),");
            }
        }
    }
    let text = format!(
        "/// The code objects compiled into this build.\n\
         pub static CODE_OBJECTS: &[CodeObject] = {embedded}];\n\
         /// Architectures that were asked for and could not be compiled, and why.\n\
         pub static MISSING: &[(&str, &str)] = {missing}];\n"
    );
    fs::write(out.join("code_objects.rs"), text).expect("OUT_DIR can be written");
}

/// Compiles all sources for one architecture.
fn build(
    arch: &str,
    sources: &[PathBuf],
    out: &Path,
) -> Result<(Compiler, Vec<(String, PathBuf)>), String> {
    let compiler = Compiler::for_arch(arch, out).ok_or_else(|| {
        format!(
            "no compiler for it was found; install ROCm, or clang and lld of version 17 or newer \
             (Debian, Ubuntu: apt-get install clang-19 lld-19), or set DELTAWAVE_HIPCC to one that accepts \
             --offload-arch={arch}"
        )
    })?;
    let objects: Vec<(String, PathBuf)> = sources
        .iter()
        .map(|source| {
            let name = source
                .file_stem()
                .expect("a .hip file has a stem")
                .to_string_lossy()
                .into_owned();
            let object = out.join(format!("{name}.{arch}.co"));
            (name, object)
        })
        .collect();
    kernels::in_parallel(sources.len(), |i| {
        compiler.compile(&sources[i], arch, &objects[i].1)
    })
    .map_err(|e| e.to_string())?;
    Ok((compiler, objects))
}
