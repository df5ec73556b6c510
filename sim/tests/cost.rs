//! Compares the passes of matrix products with LLVM's scheduling model.

#[allow(dead_code)]
mod llvm;

use deltawave_sim::cost::mfma_passes;
use deltawave_sim::decode::{decode, opcodes};
use deltawave_sim::disasm;
use deltawave_sim::inst::Format;

#[test]
fn passes_are_those_of_llvm() {
    let Some(mca) = llvm::tool("llvm-mca") else {
        return;
    };
    let mut products = Vec::new();
    for (_, code, op) in opcodes().filter(|(format, ..)| *format == Format::Mai) {
        let passes = mfma_passes(op);
        if passes > 0 {
            // Registers 0, 64, 96 and 128, far enough from each other.
            let registers = [256 + 64, 256 + 96, 256 + 128u32];
            let w0 = 0x1a7 << 23 | u32::from(code) << 16;
            let w1 = registers[0] | registers[1] << 9 | registers[2] << 18;
            let inst = decode(&[w0, w1]);
            assert_eq!(inst.op, op);
            products.push((disasm::text(&inst, 0), passes));
        }
    }
    assert_eq!(products.len(), 46);
    let input: String = products
        .iter()
        .map(|(text, _)| format!("{text}\n"))
        .collect();
    let arguments = [
        "-mtriple=amdgcn-amd-amdhsa",
        "-mcpu=gfx942",
        "-instruction-info",
        "-iterations=1",
    ];
    let (out, err) = llvm::pipe(&mca, &arguments, &input).expect("installed");
    let lines = || {
        out.lines()
            .map(|l| l.split_whitespace().collect::<Vec<_>>())
    };
    for (text, passes) in products {
        let words: Vec<&str> = text.split_whitespace().collect();
        let line = lines().find(|l| l.ends_with(&words));
        let line = line.unwrap_or_else(|| panic!("{text} in {out} {err}"));
        let throughput: f64 = line[2].parse().expect("a number");
        assert_eq!(throughput, f64::from(passes), "{text}");
    }
}
