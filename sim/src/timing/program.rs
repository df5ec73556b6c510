//! Timing data of each instruction of a program: unit, clocks, registers. Computed once.

use super::machine::*;
use crate::code_object::CodeObject;
use crate::cost::{self, Class};
use crate::inst::Inst;
use crate::op::Op::*;
use crate::sanitize::uses::{Role, SCC, Use, Uses};

/// Registers as the model counts them: 512 vector registers, 128 scalar ones, SCC.
pub(super) const REGISTERS: usize = 512 + 128 + 1;

/// Unit that an instruction is issued to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    Vector,
    Matrix,
    Scalar,
    ScalarMemory,
    Memory,
    Local,
    Branch,
    Barrier,
    Wait,
    End,
    /// No unit: `s_nop` and similar instructions only take time.
    Idle,
}

/// A range of registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub first: u16,
    pub count: u8,
}

#[derive(Clone, Debug)]
pub(super) struct Static {
    pub unit: Unit,
    /// Clocks until the wave's next instruction.
    pub next: u64,
    /// Clocks for which the unit takes nothing else.
    pub busy: u64,
    /// Clocks until the results can be used.
    pub latency: u64,
    /// Limits of `s_waitcnt` for the counters: vm, lgkm.
    pub wait: Option<(usize, usize)>,
    /// Priority of the wave from here on.
    pub priority: Option<u8>,
    pub reads: Vec<Span>,
    pub writes: Vec<Span>,
    /// Accumulator of a matrix product, which may be forwarded from the product before.
    pub accumulator: Option<Span>,
}

/// Computes the data of all instructions of a program. Accumulation registers of the kernel begin at `accum_offset`.
pub(super) fn prepare(code: &CodeObject, accum_offset: u16) -> Vec<Static> {
    let insts = code.program().insts.iter().zip(code.uses());
    insts
        .map(|(inst, uses)| instruction(inst, uses, accum_offset))
        .collect()
}

fn instruction(inst: &Inst, uses: &Uses, accum_offset: u16) -> Static {
    let cost = cost::of(inst);
    let unit = match cost.class {
        Class::Mfma => Unit::Matrix,
        Class::Accvgpr | Class::Valu | Class::Trans => Unit::Vector,
        Class::Xlane if cost::is_permute(inst.op) => Unit::Local,
        Class::Xlane => Unit::Vector,
        Class::Salu => Unit::Scalar,
        Class::Smem => Unit::ScalarMemory,
        Class::VmemLoad | Class::VmemStore => Unit::Memory,
        Class::LdsLoad | Class::LdsStore => Unit::Local,
        Class::Barrier => Unit::Barrier,
        Class::Waitcnt => Unit::Wait,
        Class::Branch => Unit::Branch,
        Class::Other if inst.op == S_ENDPGM => Unit::End,
        Class::Nop | Class::Other => Unit::Idle,
    };
    let imm = inst.imm as u16;
    let next = match inst.op {
        S_NOP => TURN * (u64::from(imm & 15) + 1),
        S_SLEEP => 64 * u64::from(imm & 127),
        _ => TURN,
    };
    let spans = |uses: &[Use]| uses.iter().filter_map(|u| span(u, accum_offset)).collect();
    let reads: Vec<Span> = spans(uses.reads());
    let mut writes: Vec<Span> = spans(uses.writes());
    // The third source of sparse products holds indices.
    let addend = uses.role(Role::Accumulator).or(uses.role(Role::Source2));
    let accumulator = addend
        .filter(|_| unit == Unit::Matrix)
        .and_then(|u| span(u, accum_offset))
        .filter(|a| writes.first() == Some(a));
    if matches!(unit, Unit::Memory | Unit::Local | Unit::ScalarMemory) {
        // `s_waitcnt` waits for these.
        writes.clear();
    }
    Static {
        unit,
        next,
        busy: match unit {
            Unit::Matrix => u64::from(cost.mfma_clk),
            Unit::Vector => u64::from(cost.valu_clk),
            _ => TURN,
        },
        latency: match (unit, cost.class) {
            (Unit::Matrix, _) => u64::from(cost.mfma_clk) + MATRIX_TAIL,
            (_, Class::Trans) => TRANS_LATENCY,
            _ => TURN,
        },
        wait: (inst.op == S_WAITCNT).then(|| {
            let vm = usize::from(imm & 15 | imm >> 10 & 0x30);
            (vm, usize::from(imm >> 8 & 15))
        }),
        priority: (inst.op == S_SETPRIO).then_some(imm as u8 & 3),
        reads,
        writes,
        accumulator,
    }
}

fn span(u: &Use, accum_offset: u16) -> Option<Span> {
    let first = match u.vector(accum_offset) {
        Some(i) => i as u16,
        None if u.first == SCC => 640,
        None if u.first < 128 => 512 + u.first,
        None => return None,
    };
    let end = if first < 512 { 512 } else { REGISTERS as u16 };
    let count = u.count.min((end - first).min(255) as u8);
    Some(Span { first, count })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inst::{Format, NONE, Operand, VGPR0};

    fn product(op: crate::op::Op, addend: Operand) -> Static {
        let inst = Inst {
            op,
            format: Format::Mai,
            size: 8,
            flags: 0,
            vdst: VGPR0 + 8,
            sdst: NONE,
            src: [VGPR0, VGPR0 + 4, addend],
            imm: 0,
            literal: 0,
            ctrl: 0,
            target: u32::MAX,
            neg: 0,
            abs: 0,
            op_sel: 0,
            op_sel_hi: 0,
            omod: 0,
        };
        instruction(&inst, &Uses::of(&inst), 256)
    }

    #[test]
    fn matrix_products_wait_for_both_factors() {
        let first = |spans: &[Span]| spans.iter().map(|s| s.first).collect::<Vec<_>>();
        let zero = product(V_MFMA_F32_16X16X16_F16, 128);
        assert_eq!((first(&zero.reads), zero.accumulator), (vec![0, 4], None));
        let chained = product(V_MFMA_F32_16X16X16_F16, VGPR0 + 8);
        assert_eq!(first(&chained.reads), [0, 4, 8]);
        assert_eq!(chained.accumulator.map(|s| s.first), Some(8));
        let other = product(V_MFMA_F32_16X16X16_F16, VGPR0 + 16);
        assert_eq!(
            (first(&other.reads), other.accumulator),
            (vec![0, 4, 16], None)
        );
        let sparse = product(V_SMFMAC_F32_16X16X32_F16, VGPR0 + 16);
        assert_eq!(first(&sparse.reads), [0, 4, 16, 8]);
        assert_eq!(sparse.accumulator.map(|s| s.first), Some(8));
    }
}
