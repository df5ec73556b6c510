// Compiles the kernels ahead of time into a folder for `DELTAWAVE_CODE_OBJECTS`: `make code-objects`.
//
//     archive FOLDER VERSION ARCH...     in the repository's root; rustc alone compiles this program
//
// A folder that is of these sources, architectures and compilers already stays as it is.

mod kernels;
mod prebuilt;
mod sha256;

use std::path::Path;
use std::process::{Command, ExitCode};
use std::{env, fs};

use kernels::{Assembler, Compiler};
use prebuilt::OfArch;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [folder, version, archs @ ..] = &arguments[..] else {
        eprintln!("usage: archive FOLDER VERSION ARCH...");
        return ExitCode::from(2);
    };
    match make(Path::new(folder), version, archs) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("{reason}");
            ExitCode::FAILURE
        }
    }
}

fn make(folder: &Path, version: &str, archs: &[String]) -> Result<(), String> {
    let root = Path::new(".");
    // Beside the folder, whose time of change makes cargo build anew.
    let scratch = folder.with_extension("scratch");
    fs::create_dir_all(&scratch).map_err(|e| format!("{}: {e}", scratch.display()))?;
    let named = env::var_os("DELTAWAVE_HIPCC");
    let assembler = Assembler::from_environment();
    let mut compilers = Vec::new();
    for arch in archs {
        let compiler = Compiler::for_arch(arch, &scratch, named.clone())
            .map_err(|reason| format!("no code objects for {arch}: {reason}"))?;
        let mut description = described(&compiler.0, |said| said.lines().next());
        if let Some(Assembler(program)) = assembler.as_ref().filter(|_| kernels::is_ptx(arch)) {
            let build = described(program, |said| said.lines().last());
            description = format!("{description}, {build}");
        }
        compilers.push((compiler, description));
    }
    let there = prebuilt::open(folder, root, version, None).unwrap_or_default();
    let is_current = |(arch, (_, compiler)): (&String, &(Compiler, String))| {
        let same = |one: &OfArch| one.arch == *arch && one.compiler == *compiler;
        there.iter().any(same)
    };
    fs::remove_dir_all(&scratch).map_err(|e| format!("{}: {e}", scratch.display()))?;
    if there.len() == archs.len() && archs.iter().zip(&compilers).all(is_current) {
        println!("{}: up to date", folder.display());
        return Ok(());
    }
    if folder.exists() {
        fs::remove_dir_all(folder).map_err(|e| format!("{}: {e}", folder.display()))?;
    }
    let sources = kernels::sources(root).map_err(|e| format!("hip/kernels: {e}"))?;
    let mut made = Vec::new();
    for (arch, (compiler, description)) in archs.iter().zip(compilers) {
        let out = folder.join(arch);
        fs::create_dir_all(&out).map_err(|e| format!("{}: {e}", out.display()))?;
        let named = Some(compiler.0.into());
        let (_, objects) = kernels::build(arch, &sources, &out, named, assembler.as_ref())
            .map_err(|reason| format!("no code objects for {arch}: {reason}"))?;
        // What the compiler was tried with.
        for probe in [
            format!("probe-{arch}.hip"),
            kernels::object_name("probe", arch),
        ] {
            fs::remove_file(out.join(&probe)).map_err(|e| format!("{probe}: {e}"))?;
        }
        println!(
            "{}: {} code objects by {description}",
            out.display(),
            objects.len()
        );
        made.push(OfArch {
            arch: arch.clone(),
            compiler: description,
            objects,
        });
    }
    prebuilt::write_manifest(folder, root, version, &made).map_err(|e| e.to_string())
}

/// A program's file name and the line of what it says about itself that `line` picks.
fn described(program: &Path, line: impl Fn(&str) -> Option<&str>) -> String {
    let name = program.file_name().unwrap_or_default().display();
    let said = Command::new(program).arg("--version").output();
    let said = said.map(|o| String::from_utf8_lossy(&o.stdout).into_owned());
    match line(&said.unwrap_or_default()) {
        Some(line) => format!("{name}, {}", line.trim()),
        None => name.to_string(),
    }
}
