//! Finds the compiler that tests use, and the tools of the same LLVM. Tools of another version may not read its output.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A clang that compiles for the simulated device: what `DELTAWAVE_CLANG` names, else the first of those that are
/// installed.
pub fn compiler() -> Option<String> {
    let named = std::env::var("DELTAWAVE_CLANG").ok();
    let mut names: Vec<String> = named.filter(|name| !name.is_empty()).into_iter().collect();
    names.extend((19..=24).map(|v| format!("clang++-{v}")));
    names.push("clang++".into());
    names.push("/opt/rocm/llvm/bin/clang++".into());
    names.into_iter().find(|name| {
        let targets = Command::new(name).arg("--print-targets").output();
        targets.is_ok_and(|o| String::from_utf8_lossy(&o.stdout).contains("amdgcn"))
    })
}

/// A program as the shell would find it.
fn which(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // A name with a folder in it stands for itself.
    let folders = std::env::split_paths(&path);
    let places = folders.map(|folder| folder.join(name));
    let alone = name.contains('/').then(|| PathBuf::from(name));
    alone.into_iter().chain(places).find(|p| p.is_file())
}

/// A tool of a compiler's own LLVM: beside the compiler itself, or with its version in its name. `-print-prog-name` is
/// not asked, because it goes on to any program of that name in PATH.
pub fn tool_of(compiler: &str, tool: &str) -> Option<PathBuf> {
    let program = which(compiler)?;
    let installed = std::fs::canonicalize(&program).ok()?;
    let beside = |program: &Path, name: &str| {
        let path = program.parent()?.join(name);
        path.is_file().then_some(path)
    };
    if let Some(path) = beside(&installed, tool) {
        return Some(path);
    }
    let version = Command::new(&program).arg("-dumpversion").output().ok()?;
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let name = format!("{tool}-{}", version.split('.').next()?.trim());
    beside(&program, &name).or_else(|| which(&name))
}
