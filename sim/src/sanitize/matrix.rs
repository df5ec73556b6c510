//! Latencies of matrix products' results.
//!
//! The wait states depend on the passes, as in LLVM's `GCNHazardRecognizer.cpp` (`checkMAIHazards90A`,
//! `checkMAIVALUHazards`) for gfx940. Narrow types and sparse products ("XDL") of p passes need p + 3 before the result
//! is used, and p + 1 before another product adds to a part of it. f32 needs one less. f64 has its own numbers.

use super::class::Unit;

/// A matrix product: its result registers and their latency.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub unit: Unit,
    pub passes: u32,
    pub first: u16,
    pub count: u16,
}

impl Matrix {
    /// Wait states until a vector instruction or a memory access may use the result.
    pub fn to_use(self, memory: bool, write: bool) -> u32 {
        match (self.unit, self.passes) {
            (Unit::Double, 4) => {
                if memory && !write {
                    9
                } else {
                    6
                }
            }
            (Unit::Double, _) => {
                if memory && !write {
                    18
                } else {
                    11
                }
            }
            (Unit::Xdl, p) => p + 3,
            (Unit::Single, p) => p + 2,
        }
    }

    /// Wait states until another product may read the result as A or B.
    pub fn to_factor(self) -> u32 {
        self.to_use(false, false)
    }

    /// Wait states until another product may read the result as C. `same`: it reads exactly the same registers.
    pub fn to_addend(self, unit: Unit, passes: u32, same: bool) -> u32 {
        let double4 = |u: Unit, p: u32| u == Unit::Double && p == 4;
        if same {
            return match self.passes {
                2 => 2,
                p if double4(self.unit, p) && double4(unit, passes) => 4,
                _ => 0,
            };
        }
        match (self.unit, unit) {
            (Unit::Double | Unit::Single, Unit::Xdl) => 0,
            (Unit::Double, _) => {
                if self.passes == 4 {
                    4
                } else {
                    9
                }
            }
            (Unit::Xdl, _) => self.passes + 1,
            (Unit::Single, _) => self.passes,
        }
    }

    /// Wait states until a vector instruction or load may overwrite C.
    pub fn to_overwrite_addend(self) -> u32 {
        if self.unit == Unit::Xdl {
            self.passes - 1
        } else {
            0
        }
    }
}
