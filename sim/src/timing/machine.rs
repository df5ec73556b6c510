//! Constants of the machine: sizes, latencies and rates, each with its source.
//!
//! | source | values |
//! |---|---|
//! | LLVM 19, `SISchedule.td`, `SIDPGFX942FullSpeedModel` | rates, passes, latencies of arithmetic, branches |
//! | AMD, CDNA3 white paper | compute units, caches, 16 L2 channels of 128 bytes a clock in each die |
//! | [MT4G], a published report of an MI300X | L1 116, scalar cache 48, L2 288, beyond L2 209 more, HBM 900 clocks; reads from HBM 3.96 TB/s |
//! | [PyHIP], `mem_latency.md`, measured on MI308X | LDS: 52 clocks for 4 bytes a lane, 64 for 16; 64 bytes a clock for a wave; loads from HBM: 32 bytes a clock for a compute unit, 500 to 800 clocks |
//! | [Chips and Cheese] on MI300X | Infinity Cache: 11.9 TB/s; transcendental functions: 4 a clock |
//!
//! [MT4G]: https://github.com/caps-tum/mt4g
//! [PyHIP]: https://github.com/tingqli/pyhip
//! [Chips and Cheese]: https://chipsandcheese.com/p/testing-amds-giant-mi300x

use crate::gpu::Gpu;

impl Gpu {
    /// Converts a time in nanoseconds to clocks.
    pub(super) fn clocks(&self, ns: f64) -> u64 {
        (ns * self.ghz).round() as u64
    }
}

/// Clocks of a SIMD's turn: 64 lanes on 16, and the distance of two instructions of a wave.
pub(super) const TURN: u64 = 4;
/// Clocks after the last pass of a matrix product until its result can be read; LLVM: passes + 4 turns in all.
pub(super) const MATRIX_TAIL: u64 = 4 * TURN;
/// Clocks until a transcendental function's result; LLVM: 4 turns.
pub(super) const TRANS_LATENCY: u64 = 4 * TURN;
/// Clocks of a taken branch; LLVM: 8 turns.
pub(super) const BRANCH: u64 = 8 * TURN;
/// Clocks of a scalar load that hits.
pub(super) const SCALAR_HIT: u64 = 48;
/// Clocks from the last wave's arrival at a barrier until the first goes on: one turn each for the message and the next
/// issue.
pub(super) const BARRIER: u64 = 2 * TURN;
/// Clocks of LDS from issue to data, without the clocks of the data. In all 52 for 4 bytes a lane, 64 for 16.
pub(super) const LDS_LATENCY: u64 = 48;
/// LDS data for a pair of SIMDs, in bytes a clock.
pub(super) const LDS_PORT: u64 = 64;
/// Data of the vector L1, in bytes a clock.
pub(super) const L1_WIDTH: u64 = 64;
/// Cache line of L1 and L2, in bytes.
pub(super) const LINE: u64 = 128;
/// Vector L1 of a compute unit, in lines.
pub(super) const L1_LINES: u64 = (32 << 10) / LINE;
/// L2 of a die, in lines.
pub(super) const L2_LINES: u64 = (4 << 20) / LINE;
/// L2 of a die, in bytes a clock: 16 channels of a line.
pub(super) const L2_WIDTH: f64 = 2048.0;
/// Maximum rate of one compute unit from L2, in bytes a clock.
pub(super) const L2_PORT: f64 = 64.0;
/// Maximum rate of one compute unit from behind L2, in bytes a clock.
pub(super) const FABRIC_PORT: f64 = 32.0;
/// Clocks of a vector load that hits L1, without the clocks of its data.
pub(super) const L1_LATENCY: u64 = 116 - TURN;
/// Clocks of an L2 hit, in the compute units' clock.
pub(super) const L2_LATENCY: u64 = 288;
/// Additional latency of the Infinity Cache over L2, in ns: 209 clocks at 2.1 GHz.
pub(super) const INFINITY_NS: f64 = 99.5;
/// Additional latency of HBM over L2, in ns: 900 - 288 clocks at 2.1 GHz.
pub(super) const HBM_NS: f64 = 291.4;
/// Share of HBM's data-sheet bandwidth that loads reach: 3.96 of 5.3 TB/s.
pub(super) const HBM_YIELD: f64 = 0.75;
/// Infinity Cache, in bytes.
pub(super) const INFINITY_BYTES: u64 = 256 << 20;
/// Bandwidth of the Infinity Cache, measured on MI300X, in bytes per second.
pub(super) const INFINITY_BANDWIDTH: f64 = 11.9e12;
/// Maximum number of outstanding loads and stores of a wave (`vmcnt`).
pub(super) const VM_MOST: usize = 63;
/// Maximum number of outstanding LDS and scalar accesses of a wave (`lgkmcnt`).
pub(super) const LGKM_MOST: usize = 15;
