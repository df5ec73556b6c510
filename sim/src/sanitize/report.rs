//! Names of registers and instructions in messages of faults.

use crate::disasm;
use crate::exec::Env;
use crate::inst::{AGPR0, Operand, VGPR0};
use crate::wave::Wave;

/// Name of a vector register, from its index in the unified file.
pub(super) fn vector(w: &Wave, place: usize) -> String {
    let accum = usize::from(w.accum_offset);
    let operand = if place >= accum {
        AGPR0 as usize + place - accum
    } else {
        VGPR0 as usize + place
    };
    disasm::register(operand as Operand)
}

/// Name of a scalar register, including `scc`.
pub(super) fn scalar(operand: Operand) -> String {
    if operand == super::uses::SCC {
        return "scc".to_string();
    }
    disasm::register(operand)
}

/// An instruction of the program: its pc and text.
pub(super) fn instruction(env: &Env, at: u32) -> String {
    let i = at as usize;
    match (env.program.insts.get(i), env.program.offsets.get(i)) {
        (Some(inst), Some(&offset)) => {
            let text = disasm::text(inst, u64::from(offset));
            format!("pc {offset:#x} ({})", text.trim())
        }
        _ => format!("instruction {at}"),
    }
}
