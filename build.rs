//! Compiles the kernels ahead of time: one code object per source and architecture, embedded into the crate.
//!
//! Without a compiler the crate still builds; loading kernels then says what is missing. Environment:
//! `DELTAWAVE_ARCHS` (default `gfx942`; `sm_90a` becomes PTX), `DELTAWAVE_HIPCC` (compiler to use),
//! `DELTAWAVE_ASSEMBLE=1` (PTX becomes machine code, by `DELTAWAVE_PTXAS` or `ptxas`), `DELTAWAVE_REQUIRE_KERNELS=1` (a missing code object fails the build), `DELTAWAVE_CODE_OBJECTS` (a folder of
//! code objects built ahead, by `make code-objects`: no compiler runs, and a folder that does not fit fails the build).

#[path = "build/kernels.rs"]
mod kernels;
#[path = "build/prebuilt.rs"]
#[allow(dead_code, reason = "shared with the program that makes such folders")]
mod prebuilt;
#[path = "build/sha256.rs"]
mod sha256;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

fn main() {
    for path in ["hip", "build", "build.rs"] {
        println!("cargo::rerun-if-changed={path}");
    }
    for variable in [
        "DELTAWAVE_ARCHS",
        "DELTAWAVE_ASSEMBLE",
        "DELTAWAVE_CODE_OBJECTS",
        "DELTAWAVE_HIPCC",
        "DELTAWAVE_PTXAS",
        "DELTAWAVE_REQUIRE_KERNELS",
        "ROCM_PATH",
        "PATH",
    ] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let root = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let named = env::var("DELTAWAVE_ARCHS").ok();
    let archs = named.as_deref().map(listed);

    let mut embedded = String::from("&[\n");
    let mut missing = String::from("&[\n");
    let ahead = env::var_os("DELTAWAVE_CODE_OBJECTS").filter(|folder| !folder.is_empty());
    if let Some(folder) = ahead {
        let folder = root.join(folder);
        println!("cargo::rerun-if-changed={}", folder.display());
        let version = env::var("CARGO_PKG_VERSION").expect("cargo sets it");
        match prebuilt::open(&folder, &root, &version, archs.as_deref()) {
            Ok(found) => {
                for of_arch in found {
                    embed(
                        &mut embedded,
                        &of_arch.arch,
                        &of_arch.compiler,
                        of_arch.objects,
                    );
                }
            }
            Err(reason) => {
                println!("cargo::error=DELTAWAVE_CODE_OBJECTS: {reason}");
                return;
            }
        }
    } else {
        let sources = kernels::sources(&root).expect("hip/kernels can be read");
        let assembler = kernels::Assembler::from_environment();
        // Machine code that was asked for by name is not left out either.
        let required = env::var("DELTAWAVE_REQUIRE_KERNELS").is_ok_and(|v| v == "1");
        let required = |arch| required || assembler.is_some() && kernels::is_ptx(arch);
        for arch in archs.unwrap_or_else(|| vec!["gfx942"]) {
            let named = env::var_os("DELTAWAVE_HIPCC");
            match kernels::build(arch, &sources, &out, named, assembler.as_ref()) {
                Ok((compiler, objects)) => {
                    let compiler = compiler.0.display().to_string();
                    embed(&mut embedded, arch, &compiler, objects);
                }
                Err(reason) if required(arch) => {
                    panic!(
                        "DELTAWAVE_REQUIRE_KERNELS or DELTAWAVE_ASSEMBLE is 1, and there are no kernels for {arch}: \
                         {reason}"
                    )
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
    }
    let text = format!(
        "/// The code objects compiled into this build.\n\
         pub static CODE_OBJECTS: &[CodeObject] = {embedded}];\n\
         /// Architectures that were asked for and could not be compiled, and why.\n\
         pub static MISSING: &[(&str, &str)] = {missing}];\n"
    );
    fs::write(out.join("code_objects.rs"), text).expect("OUT_DIR can be written");
}

/// Names separated by commas.
fn listed(text: &str) -> Vec<&str> {
    let names = text.split(',').map(str::trim);
    names.filter(|name| !name.is_empty()).collect()
}

/// Adds the code objects of an architecture to the table that the crate includes.
fn embed(table: &mut String, arch: &str, compiler: &str, objects: Vec<(String, PathBuf)>) {
    for (name, path) in objects {
        let _ = writeln!(
            table,
            "    CodeObject {{ arch: {arch:?}, name: {name:?}, compiler: {compiler:?}, \
             bytes: &Aligned(*include_bytes!({path:?})).0 }},"
        );
    }
}
