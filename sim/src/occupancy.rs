//! Occupancy: the waves of a kernel that a compute unit holds, and the resource that limits them.
//!
//! The limits are those of LLVM's `AMDGPUBaseInfo.cpp` for gfx90a and gfx942: 512 vector registers for each lane of a
//! SIMD in steps of 8, 800 scalar registers in steps of 16, 8 waves on a SIMD, 16 workgroups of more than one wave, and
//! 64 KiB of LDS.

use crate::code_object::Kernel;
use crate::launch::LDS_LIMIT;

const SIMDS: u32 = 4;
const WAVES_PER_SIMD: u32 = 8;
const VECTOR_REGISTERS: u32 = 512;
const SCALAR_REGISTERS: u32 = 800;
/// Barriers of a compute unit. A workgroup of several waves needs one.
const BARRIERS: u32 = 16;
/// Granularity of LDS allocation in bytes.
const LDS_STEP: u32 = 512;

/// Resource that limits the occupancy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// The maximum number of waves on a SIMD.
    Waves,
    /// The maximum number of workgroups on a compute unit.
    Workgroups,
    /// Vector registers.
    Vgprs,
    /// Scalar registers.
    Sgprs,
    /// LDS.
    Lds,
}

impl Limit {
    /// Name in tables and JSON.
    pub fn name(self) -> &'static str {
        match self {
            Limit::Waves => "waves",
            Limit::Workgroups => "workgroups",
            Limit::Vgprs => "VGPRs",
            Limit::Sgprs => "SGPRs",
            Limit::Lds => "LDS",
        }
    }
}

/// Occupancy of a compute unit by one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Occupancy {
    /// Workgroups on a compute unit; 0 if not even one fits.
    pub workgroups: u32,
    /// Waves per workgroup.
    pub waves: u32,
    /// Limiting resource; the first in the order of [`Limit`] if there are several.
    pub limit: Limit,
}

impl Occupancy {
    /// Computes the occupancy of a kernel with `waves` waves and `lds` bytes per workgroup. `lds` includes the kernel's
    /// static LDS.
    pub fn of(kernel: &Kernel, waves: u32, lds: u32) -> Self {
        let d = &kernel.descriptor;
        Self::new(d.vgprs(), d.sgprs(), waves, lds)
    }

    /// Computes the occupancy of workgroups of `waves` waves with `vgprs` and `sgprs` registers per wave and `lds`
    /// bytes of LDS.
    pub fn new(vgprs: u32, sgprs: u32, waves: u32, lds: u32) -> Self {
        let waves = waves.max(1);
        // Waves of a workgroup may be on any SIMD.
        let by_waves = |per_simd: u32| per_simd * SIMDS / waves;
        let vgprs = vgprs.max(1).next_multiple_of(8);
        let sgprs = sgprs.max(1).next_multiple_of(16);
        let lds = lds.next_multiple_of(LDS_STEP);
        let limits = [
            (Limit::Waves, by_waves(WAVES_PER_SIMD)),
            (
                Limit::Workgroups,
                if waves > 1 { BARRIERS } else { u32::MAX },
            ),
            (Limit::Vgprs, by_waves(VECTOR_REGISTERS / vgprs)),
            (Limit::Sgprs, by_waves(SCALAR_REGISTERS / sgprs)),
            (Limit::Lds, LDS_LIMIT.checked_div(lds).unwrap_or(u32::MAX)),
        ];
        let (limit, workgroups) = limits
            .into_iter()
            .min_by_key(|l| l.1)
            .unwrap_or((Limit::Waves, 0));
        Occupancy {
            workgroups,
            waves,
            limit,
        }
    }

    /// Average number of waves on each SIMD.
    pub fn waves_per_simd(&self) -> f64 {
        f64::from(self.workgroups * self.waves) / f64::from(SIMDS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_limit_counts() {
        for (vgprs, sgprs, waves, lds, workgroups, limit) in [
            (64, 32, 4, 0, 8, Limit::Waves),
            (128, 32, 4, 0, 4, Limit::Vgprs),
            (256, 32, 4, 0, 2, Limit::Vgprs),
            (257, 32, 4, 0, 1, Limit::Vgprs),
            (512, 32, 8, 0, 0, Limit::Vgprs),
            (32, 112, 4, 0, 7, Limit::Sgprs),
            (32, 32, 1, 0, 32, Limit::Waves),
            (32, 32, 2, 0, 16, Limit::Waves),
            (32, 32, 4, 40 << 10, 1, Limit::Lds),
            (32, 32, 4, 8 << 10, 8, Limit::Waves),
            (32, 32, 4, 65 << 10, 0, Limit::Lds),
        ] {
            let o = Occupancy::new(vgprs, sgprs, waves, lds);
            assert_eq!(
                (o.workgroups, o.limit),
                (workgroups, limit),
                "{vgprs} {lds}"
            );
        }
        assert_eq!(Occupancy::new(215, 106, 2, 34816).waves_per_simd(), 0.5);
    }
}
