//! LLVM's disassembler as the reference.

use std::io::Write;
use std::process::{Command, Stdio};

/// Runs `program` with `input` on its standard input; `None` if it is not installed.
pub fn pipe(program: &str, arguments: &[&str], input: &str) -> Option<(String, String)> {
    let mut child = Command::new(program)
        .args(arguments)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .ok()?;
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_owned();
    let writer = std::thread::spawn(move || {
        // A program that dies early closes the pipe; its output tells.
        let _ = stdin.write_all(input.as_bytes());
    });
    let output = child.wait_with_output().expect("program runs");
    writer.join().expect("writer");
    Some((
        String::from_utf8_lossy(&output.stdout).into_owned(),
        String::from_utf8_lossy(&output.stderr).into_owned(),
    ))
}

/// The first of some programs that starts; skips (or fails, if `DELTAWAVE_REQUIRE_KERNELS=1`) without one.
pub fn tool(names: &[&str]) -> Option<String> {
    let found = names
        .iter()
        .find(|name| Command::new(name).arg("--version").output().is_ok());
    if found.is_none() {
        let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").as_deref() == Ok("1");
        assert!(!required, "none of {names:?} is installed");
        println!("skipped: none of {names:?} is installed");
    }
    found.map(|name| name.to_string())
}

/// What LLVM makes of two dwords.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// An instruction and its length in bytes.
    Text(String, u8),
    /// No instruction.
    Invalid,
    /// LLVM itself fails, or says that its text is not an instruction of the target.
    Unclear,
}

const MARKER: &str = "s_nop 0x1234";

fn bytes(dwords: &[u32]) -> String {
    let bytes: Vec<String> = dwords
        .iter()
        .flat_map(|d| d.to_le_bytes())
        .map(|b| format!("{b:#04x}"))
        .collect();
    format!("[{}]\n", bytes.join(","))
}

/// Disassembles each pair of dwords on its own.
pub fn disassemble(mc: &str, pairs: &[[u32; 2]]) -> Vec<Verdict> {
    let mut input = String::new();
    for pair in pairs {
        input += &bytes(pair);
        input += &bytes(&[0xbf80_1234]);
    }
    let arguments = ["--disassemble", "-triple=amdgcn-amd-amdhsa", "-mcpu=gfx942"];
    let (out, err) = pipe(mc, &arguments, &input).expect("installed");
    let mut groups = vec![Vec::new()];
    for line in out.lines().map(str::trim).filter(|l| !l.is_empty()) {
        if line == MARKER {
            groups.push(Vec::new());
        } else if !line.starts_with('.') {
            let text = line.split_whitespace().collect::<Vec<_>>().join(" ");
            groups.last_mut().expect("one").push(text);
        }
    }
    groups.pop();
    if groups.len() != pairs.len() {
        if pairs.len() == 1 {
            return vec![Verdict::Unclear];
        }
        let (a, b) = pairs.split_at(pairs.len() / 2);
        return [disassemble(mc, a), disassemble(mc, b)].concat();
    }
    // Warnings name the line and column of the bytes that are no instruction.
    let mut bad = vec![[false; 2]; pairs.len()];
    for line in err
        .lines()
        .filter(|l| l.contains("invalid instruction encoding"))
    {
        let mut fields = line.split(':').skip(1);
        let mut number = || {
            fields
                .next()
                .and_then(|f| f.parse::<usize>().ok())
                .unwrap_or(0)
        };
        let (line, column) = (number(), number());
        bad[(line - 1) / 2][usize::from(column > 2)] = true;
    }
    groups
        .into_iter()
        .zip(bad)
        .map(|(texts, [first, second])| match texts.first() {
            _ if first => Verdict::Invalid,
            None => Verdict::Invalid,
            Some(text) if text.contains("/*") => Verdict::Unclear,
            Some(text) => {
                let alone = texts.len() == 1 && !second;
                Verdict::Text(text.clone(), if alone { 8 } else { 4 })
            }
        })
        .collect()
}
