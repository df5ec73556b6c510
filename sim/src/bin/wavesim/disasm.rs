//! `wavesim disasm`: prints machine code as text.

use std::fmt::Write as _;
use std::path::PathBuf;

use deltawave_sim::code_object::{CodeObject, Function};
use deltawave_sim::disasm;
use serde_json::{Value, json};

use crate::failure::Failure;

/// Command line of `disasm`.
#[derive(clap::Args)]
pub struct Args {
    /// Code object, or an offload bundle that has one for gfx942
    file: PathBuf,
    /// Print this kernel only
    #[arg(long)]
    kernel: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A function: instructions `first..end` of the program.
struct Section<'a> {
    name: Option<&'a str>,
    first: usize,
    end: usize,
}

/// Returns the listing. Addresses are byte offsets in `.text`, the same as in the faults of `wavesim run`.
pub fn text(args: &Args) -> Result<String, Failure> {
    let code = crate::load(&args.file)?;
    let mut sections = sections(&code);
    if let Some(name) = &args.kernel {
        crate::find(&code, name)?;
        sections.retain(|s| s.name == Some(name));
    }
    let program = code.program();
    // The image is linked at 0.
    let text = program.base - code.extent().start;
    if args.json {
        let functions: Vec<Value> = sections.iter().map(|s| object(&code, s)).collect();
        return Ok(crate::json(&json!({
            "arch": "gfx942",
            "text_address": text,
            "functions": functions,
        })));
    }
    let mut out = format!("; gfx942, .text at {text:#x}, pc relative to it\n");
    for section in &sections {
        let _ = write!(out, "\n{}:\n", section.name.unwrap_or(".text"));
        for i in section.first..section.end {
            let [pc, next] = [i, i + 1].map(|i| offset(&code, i));
            let words: Vec<String> = dwords(&code, pc, next)
                .map(|w| format!("{w:08x}"))
                .collect();
            let inst = &program.insts[i];
            let line = format!(
                "{pc:#08x}  {:<17}  {}",
                words.join(" "),
                disasm::text(inst, u64::from(pc))
            );
            out.push_str(&line);
            if inst.target != u32::MAX {
                let _ = write!(out, "  ; to {:#x}", offset(&code, inst.target as usize));
            }
            out.push('\n');
        }
    }
    Ok(out)
}

/// Byte offset of instruction `index`, or of the end of `.text`.
fn offset(code: &CodeObject, index: usize) -> u32 {
    let program = code.program();
    let end = program.index_of_dword.len() as u32 * 4;
    program.offsets.get(index).copied().unwrap_or(end)
}

/// Dwords of the code from byte offset `from` to `to`.
fn dwords(code: &CodeObject, from: u32, to: u32) -> impl Iterator<Item = u32> {
    let text = code.text();
    text[from as usize..to as usize]
        .chunks_exact(4)
        .map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

/// Functions in order of address, and the code between them that is not padding.
fn sections(code: &CodeObject) -> Vec<Section<'_>> {
    let program = code.program();
    let index = |offset: u32| program.offsets.partition_point(|o| *o < offset);
    let mut found: Vec<Section> = Vec::new();
    let functions: Vec<&Function> = code.functions().iter().collect();
    let mut covered = 0;
    for (i, f) in functions.iter().enumerate() {
        let next = functions[i + 1..].iter().find(|n| n.offset > f.offset);
        let limit = next.map_or(program.insts.len(), |n| index(n.offset));
        let end = match f.size {
            0 => limit,
            size => index(f.offset + size),
        };
        let first = index(f.offset);
        found.push(Section {
            name: Some(&f.name),
            first,
            end,
        });
        covered = covered.max(end);
    }
    if functions.is_empty() {
        found.push(Section {
            name: None,
            first: covered,
            end: program.insts.len(),
        });
    }
    found
}

fn object(code: &CodeObject, section: &Section) -> Value {
    let program = code.program();
    let instructions: Vec<Value> = (section.first..section.end)
        .map(|i| {
            let inst = &program.insts[i];
            let [pc, next] = [i, i + 1].map(|i| offset(code, i));
            let mut value = json!({
                "pc": pc,
                "dwords": dwords(code, pc, next).collect::<Vec<u32>>(),
                "text": disasm::text(inst, u64::from(pc)),
            });
            if inst.target != u32::MAX {
                value["target"] = offset(code, inst.target as usize).into();
            }
            value
        })
        .collect();
    json!({ "name": section.name, "instructions": instructions })
}
