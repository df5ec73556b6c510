//! Records an executed instruction's writes, for the hazard rules of later instructions.

use super::{Hazards, LOG, Matrix, Recent, vectors};
use crate::inst::{Format, Inst, M0, flag};
use crate::op::Op::{self, *};
use crate::sanitize::class::Class;
use crate::sanitize::uses::{Role, Uses};
use crate::wave::Wave;

impl Hazards {
    pub(super) fn remember(&mut self, w: &Wave, inst: &Inst, uses: &Uses) {
        let now = self.now;
        match uses.class {
            Class::Scalar => {
                if uses.writes().iter().any(|u| u.first == M0) {
                    self.m0 = now;
                }
                if matches!(inst.op, S_SETREG_B32 | S_SETREG_IMM32_B32) {
                    self.setreg = [self.setreg[1], (now, inst.imm as u32 & 63)];
                }
            }
            Class::Vector => self.remember_vector(w, inst, uses),
            Class::Matrix { unit, passes } => {
                for (first, count) in vectors(w, uses.writes()) {
                    self.matrices[now as usize % LOG] = Some(Matrix {
                        unit,
                        passes: passes.into(),
                        first: first as u16,
                        count: count as u16,
                    });
                    self.result[first..first + count].fill(now);
                }
                self.last_matrix = now;
                let sparse = uses.role(Role::Accumulator);
                if let Some(u) = sparse.or(uses.role(Role::Source2))
                    && let Some(v) = u.vector(w.accum_offset)
                {
                    let end = (v + usize::from(u.count)).min(512);
                    self.addend[v..end].fill(now);
                }
            }
            Class::Memory | Class::Flat => {
                let register_offset = inst.format == Format::Mubuf && inst.src[2] < 128;
                if let Some(u) = uses.role(Role::Data)
                    && u.count > 2
                    && !register_offset
                    && let Some(v) = u.vector(w.accum_offset)
                {
                    self.stores = [self.stores[1], self.recent(v, u.count.into(), inst.op)];
                }
            }
            _ => {}
        }
    }

    fn remember_vector(&mut self, w: &Wave, inst: &Inst, uses: &Uses) {
        let now = self.now;
        for u in uses.writes() {
            if let Some(v) = u.vector(w.accum_offset) {
                let end = (v + usize::from(u.count)).min(512);
                if uses.dot {
                    let [_, a, b] = self.dots;
                    self.dots = [a, b, self.recent(v, end - v, inst.op)];
                    continue;
                }
                self.vector[v..end].fill(now);
                if uses.transcendental {
                    self.transcendental = self.recent(v, end - v, inst.op);
                }
                if writes_part(inst) {
                    self.part = self.recent(v, end - v, inst.op);
                }
            } else if u.first < 128 {
                let first = usize::from(u.first);
                self.scalar[first..(first + usize::from(u.count)).min(128)].fill(now);
            }
        }
    }

    fn recent(&self, first: usize, count: usize, op: Op) -> Recent {
        Recent {
            time: self.now,
            first: first as u16,
            count: count as u16,
            op: Some(op),
        }
    }
}

/// Whether the result is moved within the destination, so that it cannot be forwarded.
fn writes_part(inst: &Inst) -> bool {
    if inst.has(flag::SDWA) {
        return inst.format != Format::Vopc && inst.ctrl >> 8 & 7 != 6;
    }
    let stochastic = matches!(inst.op, V_CVT_SR_FP8_F32 | V_CVT_SR_BF8_F32);
    inst.format == Format::Vop3 && (inst.op_sel & 8 != 0 || stochastic && inst.op_sel & 4 != 0)
}
