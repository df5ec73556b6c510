//! Vector ALU instructions.

pub(crate) mod float;
pub(crate) mod math;
pub(crate) mod operand;
pub(crate) mod shape;

mod carry;
mod cmp;
mod cvt;
mod div;
mod f16;
mod f32;
mod f64;
mod int;
mod lane;
mod packed;

use super::{Exec, Level};
use crate::inst::Inst;
use shape::ops;

pub(crate) fn handler(inst: &Inst, level: Level) -> Option<Exec> {
    int::handler(inst, level)
        .or_else(|| f32::handler(inst, level))
        .or_else(|| packed::handler(inst, level))
        .or_else(|| cvt::handler(inst, level))
        .or_else(|| f64::handler(inst, level))
        .or_else(|| f16::handler(inst, level))
        .or_else(|| div::handler(inst, level))
        .or_else(|| cmp::handler(inst, level))
        .or_else(|| carry::handler(inst, level))
        .or_else(|| lane::handler(inst, level))
}

#[cfg(test)]
mod scalar_tests;
#[cfg(test)]
mod tests;
