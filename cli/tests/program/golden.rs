//! Whole outputs of the program, as files.
//!
//! A file of `tests/golden/` is a list of commands (`$ deltawave ...`), each followed by its exit status and output. To add a
//! case, add its `$` line and run the tests with `DELTAWAVE_BLESS=1`, which writes the files anew; read the difference.
//! Numbers that come from the compiler, the kernels or the clock are masked.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use serde_json::Value;

use super::{kernels, text};

/// JSON numbers that are compared; all others are masked by their type.
const COMPARED: &[&str] = &[
    "changed_slots",
    "block_tokens",
    "channels",
    "chunk_heads",
    "count",
    "decodes",
    "equal_share_limit",
    "every",
    "gate_error_limit",
    "key_dim",
    "key_heads",
    "launches",
    "max_ulps_limit",
    "minimal_bytes",
    "non_finite",
    "other_slots",
    "rank_tokens",
    "repeat",
    "resumed_sequences",
    "resumed_tokens",
    "scale",
    "sequences",
    "shape",
    "slots",
    "states",
    "summary_bytes",
    "tokens",
    "tp",
    "value_dim",
    "value_heads",
    "width",
    "wrong_states",
];

/// A JSON value with one line for each leaf, `path: value`.
fn leaves(path: &str, key: &str, value: &Value, out: &mut String) {
    let compared = COMPARED.contains(&key);
    let leaf = match value {
        Value::Object(all) => {
            for (key, value) in all {
                leaves(&format!("{path}.{key}"), key, value, out);
            }
            return;
        }
        Value::Array(all) if !all.is_empty() && !compared => {
            for (i, value) in all.iter().enumerate() {
                leaves(&format!("{path}[{i}]"), key, value, out);
            }
            return;
        }
        Value::Number(n) if !compared && n.is_f64() => "<float>".to_owned(),
        Value::Number(_) if !compared => "<integer>".to_owned(),
        other => other.to_string(),
    };
    *out += &format!("{path}: {leaf}\n");
}

/// The types of a JSON value; of a list, those of its first element.
fn types(path: &str, value: &Value, out: &mut String) {
    let kind = match value {
        Value::Object(all) => {
            for (key, value) in all {
                types(&format!("{path}.{key}"), value, out);
            }
            return;
        }
        Value::Array(all) if !all.is_empty() => {
            return types(&format!("{path}[]"), &all[0], out);
        }
        Value::Array(_) => "<list>",
        Value::Number(n) if n.is_f64() => "<float>",
        Value::Number(_) => "<integer>",
        Value::String(_) => "<text>",
        Value::Bool(_) => "<bool>",
        Value::Null => "null",
    };
    *out += &format!("{path}: {kind}\n");
}

/// Tables: the first line and tensor shapes as they are, elsewhere single spaces and `#` for numbers.
fn tables(shown: &str) -> String {
    let mut out = String::new();
    for (i, line) in shown.lines().enumerate() {
        if i == 0 || line.contains('[') {
            out += line.trim_end();
        } else {
            let mut last = "";
            for word in line.split_whitespace() {
                let bare = word.trim_matches(|c: char| "(),:;%".contains(c));
                let number = bare.parse::<f64>().is_ok();
                let word = if number { "#" } else { word };
                if !(number && last == "#") {
                    out += if last.is_empty() { "  " } else { " " };
                    out += word;
                }
                last = word;
            }
        }
        out.push('\n');
    }
    out
}

/// What this machine has is not what others have.
fn anywhere(stderr: &str) -> String {
    match stderr.split_once("and this machine has ") {
        Some((before, _)) => format!("{before}and this machine has ...\n"),
        None => stderr.to_owned(),
    }
}

/// Runs a command line, and says what came of it.
fn ran(line: &str) -> String {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("golden");
    fs::create_dir_all(&folder).expect("a folder");
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltawave"));
    command.args(line.split_whitespace()).current_dir(folder);
    for (name, _) in env::vars_os() {
        if name.to_string_lossy().starts_with("DELTAWAVE_") {
            command.env_remove(name);
        }
    }
    let command = command.env("DELTAWAVE_BACKEND", "simulator");
    let output = command.env("COLUMNS", "100").output().expect("a program");
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    let stdout = match serde_json::from_str::<Value>(stdout) {
        Ok(value) => {
            let mut out = String::new();
            match line.starts_with("info") {
                true => types("", &value, &mut out),
                false => leaves("", "", &anywhere_in(value), &mut out),
            }
            out
        }
        Err(_) if line.contains("--help") => stdout.to_owned(),
        Err(_) => tables(stdout),
    };
    let status = output.status.code().unwrap_or(-1);
    let mut out = format!("$ deltawave {line}\nexit status {status}\n");
    for (name, shown) in [("stdout", stdout), ("stderr", anywhere(stderr))] {
        if !shown.is_empty() {
            out += &format!("--- {name}\n{shown}");
        }
    }
    out
}

/// As [`anywhere`], of a failure in JSON.
fn anywhere_in(mut value: Value) -> Value {
    if let Some(Value::String(error)) = value.get_mut("error") {
        *error = anywhere(error).trim_end().to_owned();
    }
    value
}

/// Runs the commands of a file, and compares or writes it.
fn golden(name: &str) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.txt"));
    let wanted = fs::read_to_string(&path).expect("a file of commands");
    let lines = wanted.lines().filter_map(|l| l.strip_prefix("$ deltawave"));
    let found: Vec<String> = lines.map(|line| ran(line.trim())).collect();
    let found = found.join("\n");
    if env::var("DELTAWAVE_BLESS").as_deref() == Ok("1") {
        fs::write(&path, found).expect("the file can be written");
        return;
    }
    if found == wanted {
        return;
    }
    let mut command = "";
    for (i, (now, before)) in found.lines().zip(wanted.lines()).enumerate() {
        if before.starts_with("$ ") {
            command = before;
        }
        assert!(
            now == before,
            "{}:{}: {command}\n  now: {now}\n  was: {before}\n(DELTAWAVE_BLESS=1 writes the files anew)",
            path.display(),
            i + 1
        );
    }
    panic!("{}: more or fewer lines than before", path.display());
}

#[test]
fn help() {
    golden("help");
}

#[test]
fn usage() {
    golden("usage");
}

macro_rules! with_kernels {
    ($($name:ident)*) => {$(
        #[test]
        fn $name() {
            if kernels() {
                golden(stringify!($name));
            }
        }
    )*};
}

with_kernels!(info prefill files failures profile conv decode layer);
