//! Busy times of a GPU's units, if the work is spread evenly and nothing waits.

use super::Totals;
use crate::gpu::{Gpu, SIMDS};

/// Busy time of each kind of unit, in microseconds. No launch takes less than the longest of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Busy {
    /// Matrix units.
    pub matrix_us: f64,
    /// Vector units.
    pub vector_us: f64,
    /// LDS.
    pub lds_us: f64,
    /// HBM, if each line is moved once.
    pub memory_us: f64,
}

impl Busy {
    /// Computes the busy times of launches with these counters on `gpu`.
    pub fn new(totals: &Totals, gpu: &Gpu) -> Self {
        let us = |clocks: u64, units: u32| clocks as f64 / f64::from(units) / (gpu.ghz * 1e3);
        Busy {
            matrix_us: us(totals.mfma_clk, gpu.cus * SIMDS),
            vector_us: us(totals.valu_clk, gpu.cus * SIMDS),
            lds_us: us(totals.vector.lds_clk, gpu.cus),
            memory_us: totals.traffic.unique_bytes as f64 / gpu.hbm * 1e6,
        }
    }

    /// Busy times by the units' names.
    pub fn units(&self) -> [(&'static str, f64); 4] {
        [
            ("matrix", self.matrix_us),
            ("vector", self.vector_us),
            ("lds", self.lds_us),
            ("memory", self.memory_us),
        ]
    }

    /// The unit that is busy longest.
    pub fn most(&self) -> (&'static str, f64) {
        let units = self.units();
        units
            .into_iter()
            .fold(units[0], |a, b| if b.1 > a.1 { b } else { a })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::MI300X;

    #[test]
    fn a_second_of_every_unit() {
        let clocks = 2_100_000_000;
        let mut totals = Totals {
            mfma_clk: 304 * 4 * clocks,
            valu_clk: 304 * 4 * clocks / 2,
            ..Totals::default()
        };
        totals.vector.lds_clk = 304 * clocks / 4;
        totals.traffic.unique_bytes = 5_300_000_000_000 / 8;
        let busy = Busy::new(&totals, &MI300X);
        let us = busy.units().map(|u| u.1.round());
        assert_eq!(us, [1e6, 5e5, 2.5e5, 1.25e5]);
        assert_eq!(busy.most().0, "matrix");
        assert_eq!((MI300X.bf16() / 1e12).round(), 1307.0);
    }
}
