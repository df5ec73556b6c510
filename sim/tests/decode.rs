//! The decoder and the disassembler against LLVM.

use deltawave_sim::{decode, disasm, op::Op};

/// Text of the instruction that starts with these dwords, and its size.
fn text(dwords: &[u32]) -> (String, u8) {
    let inst = decode::decode(dwords);
    (disasm::text(&inst, 0), inst.size)
}

#[test]
fn operand_forms_print_as_llvm_prints_them() {
    let mut wrong = Vec::new();
    for line in include_str!("data/gfx942-forms.txt").lines() {
        if line.starts_with('#') {
            continue;
        }
        let (hex, expected) = line.split_once(' ').expect("two columns");
        let bytes: Vec<u8> = (0..hex.len() / 2)
            .map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).expect("hex"))
            .collect();
        let dwords: Vec<u32> = bytes
            .chunks(4)
            .map(|b| u32::from_le_bytes(b.try_into().expect("whole dwords")))
            .collect();
        let (text, size) = text(&dwords);
        if text != expected.trim() || usize::from(size) != bytes.len() {
            wrong.push(format!("{hex}: {text:?}, not {:?}", expected.trim()));
        }
    }
    assert!(
        wrong.is_empty(),
        "{}\n{} wrong",
        wrong.join("\n"),
        wrong.len()
    );
}

#[test]
fn mnemonics_are_the_names() {
    assert_eq!(Op::INVALID.mnemonic(), "invalid");
    assert_eq!(Op::V_XOR_B32.mnemonic(), "v_xor_b32");
    assert_eq!(Op::V_XOR_B32 as usize + 1, Op::COUNT);
}
