//! Uninitialized values: finds values that nothing wrote and that decide something.
//!
//! Every register has a shadow that says whether its value is defined: one bit per lane for vector registers, one bit
//! per bit for scalar ones. LDS and device memory have a shadow for each byte, scratch for each dword of a lane. An
//! operation on an undefined value gives an undefined value. Copying one is no fault: compilers save, pad and merge
//! registers without a value. It is a fault if such a value decides an address, a branch, EXEC, or data that is stored
//! to device memory.
//!
//! A dword counts as defined once any of its bytes is: padding in structures and halves of registers are no faults.

mod matrix;
mod memory;
mod registers;
mod scalar;
mod vector;

use super::accesses::Accesses;
use super::class::Class;
use super::report;
use super::uses::{Role, SCC, Use, Uses};
use crate::exec::Env;
use crate::fault::FaultKind;
use crate::inst::{EXEC, Inst, VCC};
use crate::op::Op::*;
use crate::wave::Wave;
pub(super) use memory::Lds;
pub(super) use registers::Registers;
use registers::{Origin, Undefined};

/// Shadows of one wave while it executes one instruction.
struct Step<'a> {
    w: &'a Wave,
    at: u32,
    inst: &'a Inst,
    uses: &'a Uses,
    shadow: &'a mut Registers,
}

/// Checks an instruction that is about to be executed, and propagates the shadows.
pub(super) fn step(
    shadow: &mut Registers,
    lds: &mut Lds,
    (w, at, inst, uses): (&Wave, u32, &Inst, &Uses),
    accesses: &Accesses,
    env: &Env,
) -> Result<(), FaultKind> {
    let mut step = Step {
        w,
        at,
        inst,
        uses,
        shadow,
    };
    let done = match uses.class {
        Class::Scalar => step.scalar(),
        Class::Vector => step.vector(),
        Class::Matrix { .. } => {
            step.matrix();
            Ok(())
        }
        Class::ScalarMemory | Class::Memory | Class::Flat | Class::Local => {
            step.memory(lds, accesses, env)
        }
        Class::Other => Ok(()),
    };
    done.map_err(|u| fault(w, u, env))
}

impl Step<'_> {
    /// Faults if a register of a use is undefined. For vector registers, only `lanes` count.
    fn undefined(&self, u: &Use, lanes: u64, decides: &'static str) -> Result<(), Undefined> {
        let count = usize::from(u.count);
        if let Some(v) = u.vector(self.w.accum_offset) {
            for v in v..(v + count).min(512) {
                let bad = lanes & !self.shadow.vector[v];
                if bad != 0 {
                    return Err(Undefined {
                        operand: u.first,
                        place: v,
                        lane: Some(bad.trailing_zeros()),
                        decides,
                        origin: self.shadow.origin[v],
                    });
                }
            }
            return Ok(());
        }
        if u.first == SCC {
            if !self.shadow.scc {
                return Err(self.bad_scalar(SCC, decides));
            }
            return Ok(());
        }
        for s in u.first..(u.first + u16::from(u.count)).min(128) {
            if self.shadow.scalar[usize::from(s)] != !0 {
                return Err(self.bad_scalar(s, decides));
            }
        }
        Ok(())
    }

    #[cold]
    fn bad_scalar(&self, operand: u16, decides: &'static str) -> Undefined {
        let place = registers::scalar_place(operand);
        Undefined {
            operand,
            place,
            lane: None,
            decides,
            origin: self.shadow.origin[place],
        }
    }

    /// Origin of the first source that is not defined.
    fn source_origin(&self) -> Origin {
        for u in self.uses.reads() {
            let count = usize::from(u.count);
            match u.vector(self.w.accum_offset) {
                Some(v) => {
                    for v in v..(v + count).min(512) {
                        if self.shadow.vector[v] & self.w.exec() != self.w.exec() {
                            return self.shadow.origin[v];
                        }
                    }
                }
                None if u.first == SCC => {
                    if !self.shadow.scc {
                        return self.shadow.origin[registers::scalar_place(SCC)];
                    }
                }
                None => {
                    for s in usize::from(u.first)..(usize::from(u.first) + count).min(128) {
                        if self.shadow.scalar[s] != !0 {
                            return self.shadow.origin[registers::scalar_place(s as u16)];
                        }
                    }
                }
            }
        }
        Origin::Unknown
    }

    /// Faults if EXEC is undefined.
    fn exec_is_defined(&self) -> Result<(), Undefined> {
        let exec = Use {
            first: EXEC,
            count: 2,
            role: Role::Lanes,
        };
        self.undefined(&exec, 0, "the active lanes")
    }

    /// Handles the instructions of the scalar unit.
    fn scalar(&mut self) -> Result<(), Undefined> {
        match self.inst.op {
            S_CBRANCH_SCC0 | S_CBRANCH_SCC1 | S_SETPC_B64 | S_SWAPPC_B64 => {
                for u in self.uses.reads() {
                    self.undefined(u, 0, "the next instruction")?;
                }
            }
            S_CBRANCH_VCCZ | S_CBRANCH_VCCNZ => {
                let defined = self.shadow.pair(VCC);
                // One defined bit that is set decides the result, whatever the others are.
                if self.w.vcc() & defined == 0 {
                    for u in self.uses.reads() {
                        self.undefined(u, 0, "the next instruction")?;
                    }
                }
            }
            S_MOVRELS_B32 | S_MOVRELS_B64 | S_MOVRELD_B32 | S_MOVRELD_B64 => {
                if let Some(u) = self.uses.role(Role::Index) {
                    self.undefined(u, 0, "the register that is used")?;
                }
            }
            _ => {}
        }
        if !self.uses.writes().is_empty() {
            self.propagate_scalar();
            if self.uses.writes().iter().any(|u| u.first | 1 == EXEC | 1) {
                self.exec_is_defined()?;
            }
        }
        Ok(())
    }
}

#[cold]
fn fault(w: &Wave, u: Undefined, env: &Env) -> FaultKind {
    let register = if u.place < 512 {
        report::vector(w, u.place)
    } else {
        report::scalar(u.operand)
    };
    let origin = match u.origin {
        Origin::Unwritten { place } => {
            let name = if usize::from(place) < 512 {
                report::vector(w, place.into())
            } else {
                report::scalar(registers::scalar_operand(place.into()))
            };
            format!("nothing wrote {name}")
        }
        Origin::Loaded {
            at,
            space,
            address,
            lane,
            stored,
        } => {
            let why = if stored {
                "where an undefined value was stored"
            } else {
                "which nothing wrote"
            };
            format!(
                "loaded at {} by lane {lane} from {space} {address:#x}, {why}",
                report::instruction(env, at)
            )
        }
        Origin::Unknown => "nothing wrote it".to_string(),
    };
    FaultKind::Undefined {
        register,
        lane: u.lane,
        decides: u.decides,
        origin,
    }
}
