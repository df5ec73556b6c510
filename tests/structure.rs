//! The structure of the sources: modules depend on one another in one direction only.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Modules of `src/` and what each of them imports from the crate. Operations count one by one: `ops::prefill` is `prefill`.
fn imports() -> BTreeMap<String, BTreeSet<String>> {
    let mut graph: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).expect("the sources are there") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = fs::read_to_string(&path).expect("a source file");
                let found = graph.entry(module(&path)).or_default();
                for (at, _) in text.match_indices("crate::") {
                    let line = text[..at].rsplit('\n').next().unwrap_or_default();
                    if line.trim_start().starts_with("//") {
                        continue;
                    }
                    let rest = &text[at + "crate::".len()..];
                    let rest = rest.strip_prefix("ops::").unwrap_or(rest);
                    let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_');
                    found.insert(rest[..end.unwrap_or(rest.len())].to_owned());
                }
            }
        }
    }
    graph
}

/// The module of the crate that a file belongs to.
fn module(path: &Path) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let inside = path.strip_prefix(root).expect("below src");
    let mut parts = inside.iter().map(|part| part.to_string_lossy());
    let first = parts.next().expect("a name");
    let name = match (first.as_ref(), parts.next()) {
        ("ops", Some(operation)) => operation,
        _ => first,
    };
    name.trim_end_matches(".rs").to_owned()
}

/// The files of a folder below `src`, and which of their neighbours each imports by `use super::`.
fn submodule_imports(folder: &str) -> BTreeMap<String, BTreeSet<String>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("src")
        .join(folder);
    let mut graph = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let name = path
            .file_stem()
            .expect("a name")
            .to_string_lossy()
            .into_owned();
        if path.is_dir() || name == "mod" {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source file");
        let found = text.lines().filter_map(|line| {
            let rest = line.trim_start().strip_prefix("use super::")?;
            let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_')?;
            Some(rest[..end].to_owned())
        });
        graph.insert(name, found.collect());
    }
    graph
}

/// A way from a module back to itself.
fn cycle(graph: &BTreeMap<String, BTreeSet<String>>) -> Option<Vec<String>> {
    fn walk(
        at: &str,
        graph: &BTreeMap<String, BTreeSet<String>>,
        way: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> bool {
        if way.iter().any(|m| m == at) {
            way.push(at.to_owned());
            return true;
        }
        if !done.insert(at.to_owned()) {
            return false;
        }
        way.push(at.to_owned());
        let next = graph.get(at).into_iter().flatten().filter(|m| *m != at);
        for module in next.filter(|m| graph.contains_key(*m)) {
            if walk(module, graph, way, done) {
                return true;
            }
        }
        way.pop();
        false
    }
    let mut done = BTreeSet::new();
    graph.keys().find_map(|start| {
        let mut way = Vec::new();
        walk(start, graph, &mut way, &mut done).then_some(way)
    })
}

#[test]
fn modules_do_not_import_one_another_in_a_circle() {
    let graph = imports();
    assert!(graph["prefill"].contains("kernels"), "{graph:?}");
    assert_eq!(cycle(&graph), None);
}

#[test]
fn files_of_an_operation_do_not_import_one_another_in_a_circle() {
    for operation in ["prefill", "decode", "conv", "layer"] {
        let graph = submodule_imports(&format!("ops/{operation}"));
        assert!(graph.contains_key("lower"), "{graph:?}");
        assert_eq!(cycle(&graph), None, "{operation}");
    }
}

#[test]
fn files_of_the_runtime_do_not_import_one_another_in_a_circle() {
    let graph = submodule_imports("runtime");
    assert!(graph["stream"].contains("context"), "{graph:?}");
    assert_eq!(cycle(&graph), None);
}

#[test]
fn a_circle_is_found() {
    let edges = [("a", "b"), ("b", "c"), ("c", "b")];
    let graph = edges.map(|(from, to)| (from.to_owned(), BTreeSet::from([to.to_owned()])));
    let way = cycle(&BTreeMap::from(graph)).expect("a circle");
    assert_eq!(way, ["a", "b", "c", "b"]);
}
