//! Compiles the kernels ahead of time: one code object per source and architecture, embedded into the crate.
//!
//! Without a compiler the crate still builds; loading kernels then says what is missing. Environment:
//! `DELTAWAVE_ARCHS` (default `gfx942`; `sm_90a` becomes PTX), `DELTAWAVE_HIPCC` (compiler to use),
//! `DELTAWAVE_REQUIRE_KERNELS=1` (a missing code object fails the build).

#[path = "build/kernels.rs"]
mod kernels;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

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
        match kernels::build(arch, &sources, &out, env::var_os("DELTAWAVE_HIPCC")) {
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
