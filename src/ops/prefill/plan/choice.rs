//! Choice between the fused path and the split path by the lengths of a batch. `hip/prefill/plan.h` computes the same on
//! the device, so everything is an integer: results must not depend on whether the host or the device knows the lengths.
//!
//! Sequences are not cut here: only then gates do not matter. The modelled time of a kernel that walks chunks is the
//! greatest of
//! - the mean of the workgroups' times over the compute units;
//! - for each of 4/8, 5/8, .. 8/8 of the longest sequence: the rounds of the sequences that are at least as long, times
//!   their time.

use crate::abi::dwk_prefill_choice;

const SHARES: std::ops::RangeInclusive<i64> = 4..=8;

/// Modelled times of a kernel that walks chunks, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WalkTime {
    /// Workgroups of a sequence. One at a time is on a compute unit.
    pub(crate) workgroups: i32,
    /// Time of a chunk.
    pub(crate) chunk: i32,
    /// Time of a workgroup without chunks.
    pub(crate) start: i32,
}

/// Device and modelled times of both paths, in nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice {
    pub(crate) compute_units: i32,
    /// `prefill_fused`.
    pub(crate) fused: WalkTime,
    /// Time of a chunk of `prefill_fused` in segments that the gates may choose in place of the split path.
    pub(crate) cut_chunk: i32,
    /// `prefill_scan`.
    pub(crate) scan: WalkTime,
    /// `prefill_prepare` and the launch of one more kernel, without chunks.
    pub(crate) prepare_start: i32,
    /// `prefill_prepare` on one compute unit, for a chunk of all heads.
    pub(crate) prepare_chunk: i32,
}

impl Choice {
    /// Whether the fused path takes less time. It must save 3%.
    pub(crate) fn takes_fused(&self, chunks: &[usize]) -> bool {
        let split = self.walk(&self.scan, chunks) + self.prepare(chunks);
        100 * self.walk(&self.fused, chunks) < 97 * split
    }

    /// Time of `prefill_prepare`, with the launch of one more kernel.
    pub(crate) fn prepare(&self, chunks: &[usize]) -> i64 {
        let total: i64 = chunks.iter().map(|&n| n as i64).sum();
        let units = i64::from(self.compute_units);
        i64::from(self.prepare_start) + (i64::from(self.prepare_chunk) * total + units - 1) / units
    }

    /// Time of a kernel that walks whole sequences.
    pub(crate) fn walk(&self, walk: &WalkTime, chunks: &[usize]) -> i64 {
        let lengths = || chunks.iter().filter(|&&n| n > 0).map(|&n| n as i64);
        let longest = lengths().max().unwrap_or(0);
        let total: i64 = lengths().sum();
        let units = i64::from(self.compute_units);
        let [workgroups, chunk, start] = [walk.workgroups, walk.chunk, walk.start].map(i64::from);
        let rounds = |work: i64| (work * workgroups + units - 1) / units;
        let mut time = rounds(chunk * total + start * lengths().count() as i64);
        for share in SHARES {
            let count = lengths().filter(|n| 8 * n >= share * longest).count() as i64;
            time = time.max(rounds(count) * (share * longest * chunk / 8 + start));
        }
        time
    }

    /// Kernel arguments without addresses.
    pub(crate) fn lower(&self) -> dwk_prefill_choice {
        dwk_prefill_choice {
            compute_units: self.compute_units,
            fused_workgroups: self.fused.workgroups,
            fused_chunk: self.fused.chunk,
            fused_start: self.fused.start,
            scan_workgroups: self.scan.workgroups,
            scan_chunk: self.scan.chunk,
            scan_start: self.scan.start,
            prepare_start: self.prepare_start,
            prepare_chunk: self.prepare_chunk,
            cut_chunk: self.cut_chunk,
            ..Default::default()
        }
    }
}
