//! The structure of `hip/`: headers compile alone, include each other without loops, and only the contracts know the
//! targets.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use super::build::{self, Compiler};
use super::{compiler, folder, root, skip};

const TARGETS: [(&str, &str); 2] = [("gfx9", "gfx942"), ("sm90", "sm_90a")];

/// The files that choose between targets: the contracts.
const CONTRACTS: [&str; 11] = [
    "arch/contract.h",
    "prefill/backward/schedule.h",
    "prefill/chain.h",
    "prefill/fused.h",
    "prefill/layout.h",
    "prefill/parts.h",
    "prefill/prepare.h",
    "prefill/short.h",
    "prefill/state_window.h",
    "prefill/walk.h",
    "prefill/warm_up.h",
];

/// Every source below `hip/`, by its path from there.
fn texts() -> BTreeMap<PathBuf, String> {
    let hip = root().join("hip");
    let mut found = BTreeMap::new();
    let mut folders = vec![hip.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("hip can be read") {
            let path = entry.expect("hip can be read").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let name = path.strip_prefix(&hip).expect("it is below hip").to_owned();
                found.insert(name, fs::read_to_string(&path).expect("sources are text"));
            }
        }
    }
    assert!(found.len() > 40, "hip/ has {} files", found.len());
    found
}

/// The files that a file includes, by their paths from `hip/`.
fn includes(file: &Path, text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for line in text.lines() {
        let Some(rest) = line.trim().strip_prefix("#include \"") else {
            continue;
        };
        let mut path = file.parent().expect("a file is in a folder").to_owned();
        for part in Path::new(rest.trim_end_matches('"')).components() {
            match part {
                Component::ParentDir => assert!(path.pop(), "{}: {line}", file.display()),
                other => path.push(other),
            }
        }
        found.push(path);
    }
    found
}

/// Target folder that a file is in, if it is in one.
fn target_of(file: &Path) -> Option<&'static str> {
    let within = |target: &&str| file.iter().any(|part| part == *target);
    TARGETS.iter().map(|(target, _)| *target).find(within)
}

/// A loop among `edges` that is reached from `file`: the files on it.
fn loop_from(
    file: &Path,
    edges: &BTreeMap<PathBuf, Vec<PathBuf>>,
    path: &mut Vec<PathBuf>,
    done: &mut Vec<PathBuf>,
) -> Option<Vec<PathBuf>> {
    if let Some(begin) = path.iter().position(|p| p == file) {
        return Some(path[begin..].to_vec());
    }
    if done.iter().any(|p| p == file) {
        return None;
    }
    path.push(file.to_owned());
    for next in &edges[file] {
        if let Some(found) = loop_from(next, edges, path, done) {
            return Some(found);
        }
    }
    done.extend(path.pop());
    None
}

#[test]
fn includes_have_no_loops() {
    let texts = texts();
    let edges: BTreeMap<PathBuf, Vec<PathBuf>> = texts
        .iter()
        .map(|(file, text)| (file.clone(), includes(file, text)))
        .collect();
    let mut done = Vec::new();
    for (file, included) in &edges {
        for other in included {
            assert!(
                edges.contains_key(other),
                "{} includes {}, which is not in hip/",
                file.display(),
                other.display()
            );
        }
        if let Some(found) = loop_from(file, &edges, &mut Vec::new(), &mut done) {
            panic!("an include loop: {found:?}");
        }
    }
}

#[test]
fn a_loop_is_found() {
    let edge = |from: &str, to: &[&str]| (from.into(), to.iter().map(PathBuf::from).collect());
    let edges = BTreeMap::from([
        edge("a", &["b", "c"]),
        edge("b", &["c"]),
        edge("c", &["d"]),
        edge("d", &["b"]),
    ]);
    let found = loop_from(Path::new("a"), &edges, &mut Vec::new(), &mut Vec::new());
    assert_eq!(found, Some(vec!["b".into(), "c".into(), "d".into()]));
}

#[test]
fn only_contracts_know_the_targets() {
    for (file, text) in texts() {
        let name = file.to_string_lossy();
        let own = target_of(&file);
        let contract = CONTRACTS.contains(&&*name);
        for included in includes(&file, &text) {
            let other = target_of(&included);
            assert!(
                other.is_none() || other == own || contract,
                "{name} includes {}: only {CONTRACTS:?} choose a target",
                included.display()
            );
        }
        for (number, line) in text.lines().enumerate() {
            let code = line.split("//").next().unwrap_or_default();
            assert!(
                contract || !code.contains("__NVPTX__") && !code.contains("__AMDGCN__"),
                "{name}:{}: asks for the target",
                number + 1
            );
            let asks = ["lanes ==", "lanes !=", "lanes <", "lanes >"]
                .iter()
                .any(|pattern| {
                    code.match_indices(pattern).any(|(at, _)| {
                        let before = code[..at].chars().next_back();
                        !before.is_some_and(|c| c.is_alphanumeric() || c == '_')
                    })
                });
            assert!(
                own.is_some() || contract || !asks,
                "{name}:{}: asks how many lanes a wave has; let the target's contract say what differs",
                number + 1
            );
        }
    }
}

/// The names in the first column of the table at the head of `arch/contract.h`.
fn names_of_the_contract(text: &str) -> Vec<String> {
    let rows = text
        .lines()
        .take_while(|line| line.starts_with("//"))
        .filter_map(|line| line.strip_prefix("//   "))
        .filter(|row| !row.starts_with([' ', '-']));
    let mut names = Vec::new();
    for row in rows {
        let mut depth = 0;
        // Arguments, and what stands behind two spaces, are not names.
        let column: String = row
            .split("  ")
            .next()
            .unwrap_or_default()
            .chars()
            .map(|c| {
                depth += i32::from("(<".contains(c)) - i32::from(")>".contains(c));
                if depth > 0 || ")>,.".contains(c) {
                    ' '
                } else {
                    c
                }
            })
            .collect();
        names.extend(column.split_whitespace().map(str::to_owned));
    }
    names
}

#[test]
fn targets_supply_the_names_of_the_contract() {
    let texts = texts();
    let names = names_of_the_contract(&texts[Path::new("arch/contract.h")]);
    assert!(names.len() > 50, "{names:?}");
    for (target, _) in TARGETS {
        let supplied: String = texts
            .iter()
            .filter(|(file, _)| file.starts_with(Path::new("arch").join(target)))
            .flat_map(|(_, text)| text.lines())
            .map(|line| line.split("//").next().unwrap_or_default())
            .collect::<Vec<_>>()
            .join("\n");
        let words: Vec<&str> = supplied
            .split(|c: char| !c.is_alphanumeric() && c != '_')
            .collect();
        for name in &names {
            assert!(
                words.contains(&name.as_str()),
                "arch/{target} lacks {name} of arch/contract.h"
            );
        }
    }
}

#[test]
fn headers_compile_alone() {
    let texts = texts();
    for (target, arch) in TARGETS {
        let out = folder(&format!("headers-{target}"));
        let found = if build::is_ptx(arch) {
            Compiler::for_arch(arch, &out, std::env::var_os("DELTAWAVE_HIPCC")).ok()
        } else {
            compiler(arch)
        };
        let Some(compiler) = found else {
            skip(&format!("no compiler for {arch}"));
            continue;
        };
        let headers: Vec<&PathBuf> = texts
            .keys()
            .filter(|file| file.extension().is_some_and(|e| e == "h"))
            .filter(|file| target_of(file).is_none_or(|own| own == target))
            .collect();
        let failed = build::in_parallel(headers.len(), |i| {
            let header = root().join("hip").join(headers[i]);
            let output = Command::new(&compiler.0)
                .args(build::arguments(&header, arch, &out.join("none")))
                // A header has what its includers use.
                .args(["-fsyntax-only", "-w"])
                .output()
                .expect("the compiler starts");
            if output.status.success() {
                return Ok(());
            }
            let message = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(format!(
                "{} does not compile alone for {arch}: it must include what it uses\n{message}",
                headers[i].display()
            ))
        });
        if let Err(message) = failed {
            panic!("{message}");
        }
    }
}
