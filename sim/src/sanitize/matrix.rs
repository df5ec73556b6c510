//! How long the results of matrix products take.
//!
//! Wait states by passes, from LLVM's `GCNHazardRecognizer.cpp` (`checkMAIHazards90A`, `checkMAIVALUHazards`) for gfx940.
//! Narrow types and sparse products ("XDL") of p passes: p + 3 until the result is used, p + 1 until another product adds
//! to a part of it; f32 one less. f64 has its own numbers.

use super::class::Unit;

/// A matrix product: what it writes and how long its results take.
#[derive(Clone, Copy)]
pub(super) struct Matrix {
    pub unit: Unit,
    pub passes: u32,
    pub first: u16,
    pub count: u16,
}

impl Matrix {
    /// Until a vector instruction or a memory access may use the result.
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

    /// Until another product may take the result as A or B.
    pub fn to_factor(self) -> u32 {
        self.to_use(false, false)
    }

    /// Until another product may take the result as C. `same`: exactly the same registers.
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

    /// Until a vector instruction or load may overwrite C.
    pub fn to_overwrite_addend(self) -> u32 {
        if self.unit == Unit::Xdl {
            self.passes - 1
        } else {
            0
        }
    }
}
