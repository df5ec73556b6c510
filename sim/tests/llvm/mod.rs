//! Runs LLVM's disassembler, the reference.

#[allow(dead_code)]
pub mod compiler;

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

/// A tool of the compiler's LLVM; skips (or fails, if `DELTAWAVE_REQUIRE_KERNELS=1`) without one.
pub fn tool(name: &str) -> Option<String> {
    let compiler = compiler::compiler();
    let found = compiler.as_deref().and_then(|c| compiler::tool_of(c, name));
    if found.is_none() {
        let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").as_deref() == Ok("1");
        let compiler = compiler.as_deref().unwrap_or("no compiler");
        assert!(
            !required,
            "{name} of the LLVM of {compiler} is not installed"
        );
        println!("skipped: {name} of the LLVM of {compiler} is not installed");
    }
    found.map(|path| path.display().to_string())
}

/// A tool of LLVM 19, whatever the compiler: about bits that no compiler emits versions of LLVM disagree, and the tests
/// know what this one says.
pub fn reference(name: &str) -> Option<String> {
    let found = compiler::tool_of("clang++-19", name).map(|path| path.display().to_string());
    let versioned = format!("{name}-19");
    let found = found.or_else(|| {
        let starts = Command::new(&versioned).arg("--version").output().is_ok();
        starts.then_some(versioned)
    });
    if found.is_none() {
        let required = std::env::var("DELTAWAVE_REQUIRE_KERNELS").as_deref() == Ok("1");
        assert!(!required, "{name} of LLVM 19 is not installed");
        println!("skipped: {name} of LLVM 19 is not installed");
    }
    found
}

/// LLVM's disassembly of two dwords.
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
