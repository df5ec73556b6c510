//! Propagates undefined bits through scalar instructions.

use super::Step;
use super::registers::Origin;
use crate::exec::{Ty, scalar32, scalar64};
use crate::inst::{EXEC, Operand, VGPR0};
use crate::op::Op::*;
use crate::sanitize::uses::SCC;

/// A 64-bit operand: its bits, and the mask of its defined bits.
#[derive(Clone, Copy)]
struct Bits {
    value: u64,
    defined: u64,
}

impl Bits {
    fn and(self, b: Bits) -> Bits {
        // A defined 0 decides the result.
        let zero = self.defined & !self.value | b.defined & !b.value;
        Bits {
            value: self.value & b.value,
            defined: self.defined & b.defined | zero,
        }
    }

    fn not(self) -> Bits {
        Bits {
            value: !self.value,
            ..self
        }
    }

    fn or(self, b: Bits) -> Bits {
        self.not().and(b.not()).not()
    }

    fn xor(self, b: Bits) -> Bits {
        Bits {
            value: self.value ^ b.value,
            defined: self.defined & b.defined,
        }
    }

    /// Whether the defined bits decide if the masked value is zero.
    fn zero_is_known(self, mask: u64) -> bool {
        self.defined & mask == mask || self.value & self.defined & mask != 0
    }
}

impl Step<'_> {
    /// Propagates the shadow of a scalar instruction's sources to its results.
    pub(super) fn propagate_scalar(&mut self) {
        let all = self.uses.reads().iter().all(|u| {
            if u.first == SCC {
                return self.shadow.scc;
            }
            (0..usize::from(u.count))
                .all(|k| self.shadow.scalar[(usize::from(u.first) + k) & 127] == !0)
        });
        if all {
            for u in self.uses.writes() {
                if u.first == SCC {
                    self.shadow.scc = true;
                    continue;
                }
                for k in 0..usize::from(u.count) {
                    self.shadow.scalar[(usize::from(u.first) + k) & 127] = !0;
                }
            }
            return;
        }
        self.undefined_scalar();
    }

    fn operand(&self, n: usize, wide: bool) -> Bits {
        let operand = self.inst.src[n];
        if operand >= VGPR0 {
            let (value, defined) = (0, !0);
            return Bits { value, defined };
        }
        let defined = match operand {
            0..=127 if wide => self.shadow.pair(operand),
            0..=127 => u64::from(self.shadow.scalar[usize::from(operand)]) | !0 << 32,
            _ => !0,
        };
        let value = if wide {
            scalar64(self.w, self.inst, operand, Ty::B64)
        } else {
            scalar32(self.w, self.inst, operand).into()
        };
        Bits { value, defined }
    }

    #[cold]
    fn undefined_scalar(&mut self) {
        let origin = self.source_origin();
        let width = self.uses.writes().iter().find(|u| u.first != SCC);
        let wide = width.is_some_and(|u| u.count > 1);
        let mask = if wide { !0 } else { 0xffff_ffff };
        let same = self.inst.src[0] == self.inst.src[1];
        let (a, b) = (self.operand(0, wide), self.operand(1, wide));
        let exec = Bits {
            value: self.w.exec(),
            defined: self.shadow.pair(EXEC),
        };
        let logic = match self.inst.op {
            S_MOV_B32 | S_MOV_B64 => a,
            S_NOT_B32 | S_NOT_B64 => a.not(),
            S_XOR_B32 | S_XOR_B64 | S_SUB_U32 | S_SUB_I32 if same => Bits {
                value: 0,
                defined: !0,
            },
            S_AND_B32 | S_AND_B64 => a.and(b),
            S_OR_B32 | S_OR_B64 => a.or(b),
            S_XOR_B32 | S_XOR_B64 => a.xor(b),
            S_ANDN2_B32 | S_ANDN2_B64 => a.and(b.not()),
            S_ORN2_B32 | S_ORN2_B64 => a.or(b.not()),
            S_NAND_B32 | S_NAND_B64 => a.and(b).not(),
            S_NOR_B32 | S_NOR_B64 => a.or(b).not(),
            S_XNOR_B32 | S_XNOR_B64 => a.xor(b).not(),
            // A conditional move that does not move.
            S_CMOV_B32 | S_CMOV_B64 | S_CMOVK_I32 if self.shadow.scc && !self.w.scc => return,
            S_CMOV_B32 | S_CMOV_B64 if self.shadow.scc => a,
            S_CSELECT_B32 | S_CSELECT_B64 if self.shadow.scc => {
                if self.w.scc {
                    a
                } else {
                    b
                }
            }
            S_PACK_LL_B32_B16 => halves(a.defined, b.defined << 16),
            S_PACK_LH_B32_B16 => halves(a.defined, b.defined),
            S_PACK_HH_B32_B16 => halves(a.defined >> 16, b.defined),
            S_LSHL_B32 | S_LSHR_B32 | S_LSHL_B64 | S_LSHR_B64 => {
                let by = self.operand(1, false);
                if by.defined == !0 {
                    shifted(a, by.value, self.inst.op, mask)
                } else {
                    return self.spread(origin);
                }
            }
            S_AND_SAVEEXEC_B64 => return self.save_exec(exec, a.and(exec), origin),
            S_OR_SAVEEXEC_B64 => return self.save_exec(exec, a.or(exec), origin),
            S_XOR_SAVEEXEC_B64 => return self.save_exec(exec, a.xor(exec), origin),
            S_ANDN2_SAVEEXEC_B64 => return self.save_exec(exec, a.and(exec.not()), origin),
            S_ANDN1_SAVEEXEC_B64 => return self.save_exec(exec, a.not().and(exec), origin),
            S_CMP_EQ_U32 | S_CMP_LG_U32 | S_CMP_EQ_I32 | S_CMP_LG_I32 | S_CMP_EQ_U64
            | S_CMP_LG_U64 => return self.compare(origin),
            _ => return self.spread(origin),
        };
        for u in self.uses.writes() {
            if u.first == SCC {
                self.shadow.write_scc(logic.zero_is_known(mask), origin);
            } else {
                self.write(u.first, u.count, logic.defined, origin);
            }
        }
    }

    fn write(&mut self, first: Operand, count: u8, defined: u64, origin: Origin) {
        self.shadow.write_scalar(first, defined as u32, origin);
        if count > 1 {
            self.shadow
                .write_scalar(first + 1, (defined >> 32) as u32, origin);
        }
    }

    /// Makes every result undefined.
    fn spread(&mut self, origin: Origin) {
        for u in self.uses.writes() {
            if u.first == SCC {
                self.shadow.write_scc(false, origin);
                continue;
            }
            for k in 0..u16::from(u.count) {
                self.shadow.write_scalar(u.first + k, 0, origin);
            }
        }
    }

    fn save_exec(&mut self, old: Bits, new: Bits, origin: Origin) {
        self.write(self.inst.sdst, 2, old.defined, origin);
        self.write(EXEC, 2, new.defined, origin);
        self.shadow.write_scc(new.zero_is_known(!0), origin);
    }

    fn compare(&mut self, origin: Origin) {
        let wide = matches!(self.inst.op, S_CMP_EQ_U64 | S_CMP_LG_U64);
        let (a, b) = (self.operand(0, wide), self.operand(1, wide));
        let both = a.defined & b.defined;
        // Defined bits that differ decide the result.
        let known = both == !0 || (a.value ^ b.value) & both != 0;
        self.shadow.write_scc(known, origin);
    }
}

/// Defined bits of a low and a high half. The value is not used.
fn halves(low: u64, high: u64) -> Bits {
    let defined = low & 0xffff | high & 0xffff_0000 | !0 << 32;
    Bits { value: 0, defined }
}

fn shifted(a: Bits, by: u64, op: crate::op::Op, mask: u64) -> Bits {
    let wide = mask == !0;
    let by = (by & if wide { 63 } else { 31 }) as u32;
    let (value, undefined) = (a.value & mask, !a.defined & mask);
    let (value, undefined) = match op {
        S_LSHL_B32 | S_LSHL_B64 => (value << by, undefined << by),
        _ => (value >> by, undefined >> by),
    };
    Bits {
        value: value & mask,
        defined: !(undefined & mask),
    }
}
