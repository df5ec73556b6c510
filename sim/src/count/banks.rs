//! LDS bank conflicts: clocks that the LDS needs for an access of a wave.
//!
//! There are 32 banks of 4 bytes. In each clock a bank reads or writes one dword, which any number of lanes may share.
//! Lanes are served in groups of at most 128 bytes. A group takes as many clocks as there are different dwords in its
//! busiest bank. Which lanes form a group depends on the width:
//!
//! | bytes per lane | group | source |
//! |---|---|---|
//! | 1, 2, 4 | 32 lanes in order | strides measured on MI300: [pyhip] |
//! | 8 | 16 lanes in order | reads measured on MI300: [pyhip]; writes on MI355: [HipKittens] |
//! | 12, 16, stores | 8 lanes in order | AMD's [blog] and [documentation] on CK-Tile (16 bytes) |
//! | 12, 16, loads | 8 lanes: 0-3 and 20-23, 4-7 and 16-19, 8-11 and 28-31, 12-15 and 24-27; the same from 32 on | the [blog], measured on MI300: [pyhip]; 12 bytes on MI355: [HipKittens] |
//!
//! Assumed, because no public source says it:
//!
//! - Stores of 12 bytes are grouped like stores of 16.
//! - An access with two addresses is two accesses.
//! - Lanes of an atomic that access the same dword wait for each other.
//! - A group takes its clock even if none of its lanes is active: AMD's profiler counts bandwidth whatever lanes are
//!   active.
//! - A permutation moves 32 lanes in a clock.
//!
//! [pyhip]: https://github.com/tingqli/pyhip
//! [HipKittens]: https://github.com/HazyResearch/HipKittens/tree/main/analysis/paper_experiments/phases
//! [blog]: https://rocm.blogs.amd.com/software-tools-optimization/lds-bank-conflict/README.html
//! [documentation]: https://rocm.docs.amd.com/projects/composable_kernel/en/latest/conceptual/ck_tile/hardware/lds_bank_conflicts.html

use crate::wave::LANES;

const BANKS: usize = 32;
/// Maximum number of dwords in a group: 32, and one more for each of 16 lanes at addresses that are no multiples of 4.
const DWORDS: usize = 64;

/// Kind of access, as it matters to the banks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Load,
    Store,
    Atomic,
}

/// Clocks of one access.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Clocks {
    /// All clocks.
    pub total: u32,
    /// Clocks in which lanes wait for each other's banks.
    pub conflict: u32,
}

/// Clocks of a permutation.
pub(crate) const PERMUTE_CLK: u32 = 2;

/// Bank usage of one group.
pub(crate) struct Banks {
    /// The different dwords of each bank.
    dwords: [[u32; DWORDS]; BANKS],
    count: [u8; BANKS],
}

impl Default for Banks {
    fn default() -> Self {
        Banks {
            dwords: [[0; DWORDS]; BANKS],
            count: [0; BANKS],
        }
    }
}

impl Banks {
    /// Clocks of an access of `size` bytes by each of `lanes`, at `addresses`.
    pub fn clocks(&mut self, kind: Use, size: u32, lanes: u64, addresses: &[u64; LANES]) -> Clocks {
        let groups = groups(kind, size);
        let base = groups.len() as u32;
        let total = groups
            .iter()
            .map(|group| self.group(kind, size, group & lanes, addresses).max(1))
            .sum();
        Clocks {
            total,
            conflict: total - base,
        }
    }

    /// Clocks of one group: the number of different dwords in its busiest bank.
    fn group(&mut self, kind: Use, size: u32, lanes: u64, addresses: &[u64; LANES]) -> u32 {
        self.count = [0; BANKS];
        let mut most = 0;
        let mut left = lanes;
        while left != 0 {
            let lane = left.trailing_zeros() as usize;
            left &= left - 1;
            let address = addresses[lane] as u32;
            let (first, last) = (address / 4, address.wrapping_add(size - 1) / 4);
            for dword in first..=last {
                let bank = dword as usize % BANKS;
                let n = usize::from(self.count[bank]);
                let known = &mut self.dwords[bank];
                if kind != Use::Atomic && known[..n].contains(&dword) {
                    continue;
                }
                known[n] = dword;
                self.count[bank] = n as u8 + 1;
                most = most.max(n as u32 + 1);
            }
        }
        most
    }
}

/// Masks of the lanes that are served together.
fn groups(kind: Use, size: u32) -> &'static [u64] {
    const HALVES: [u64; 2] = in_order(32);
    const QUARTERS: [u64; 4] = in_order(16);
    const EIGHTHS: [u64; 8] = in_order(8);
    const LOADS: [u64; 8] = {
        let low = [
            0xf | 0xf << 20u64,
            0xf << 4 | 0xf << 16,
            0xf << 8 | 0xf << 28,
            0xf << 12 | 0xf << 24,
        ];
        let mut groups = [0; 8];
        let mut i = 0;
        while i < 4 {
            groups[i] = low[i];
            groups[i + 4] = low[i] << 32;
            i += 1;
        }
        groups
    };
    match (size, kind) {
        (..=4, _) => &HALVES,
        (5..=8, _) => &QUARTERS,
        (_, Use::Load) => &LOADS,
        _ => &EIGHTHS,
    }
}

/// Groups of `size` neighbouring lanes.
const fn in_order<const N: usize>(size: u32) -> [u64; N] {
    let mut groups = [0; N];
    let mut i = 0;
    while i < N {
        groups[i] = ((1 << size) - 1) << (i as u32 * size);
        i += 1;
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clocks(kind: Use, size: u32, address: impl Fn(u64) -> u64) -> (u32, u32) {
        let addresses = std::array::from_fn(|lane| address(lane as u64));
        let c = Banks::default().clocks(kind, size, !0, &addresses);
        (c.total, c.conflict)
    }

    #[test]
    fn strides_of_dwords() {
        // Published for MI300: 32 and its multiples are 32 times as slow as 1, odd strides as fast.
        for (stride, total) in [
            (0, 2),
            (1, 2),
            (2, 4),
            (3, 2),
            (4, 8),
            (8, 16),
            (16, 32),
            (17, 2),
            (32, 64),
            (33, 2),
            (64, 64),
        ] {
            for kind in [Use::Load, Use::Store] {
                let found = clocks(kind, 4, |lane| 4 * stride * lane);
                assert_eq!(found, (total, total - 2), "{stride}");
            }
        }
        // Halves of a dword share it.
        assert_eq!(clocks(Use::Load, 2, |lane| 2 * lane), (2, 0));
        assert_eq!(clocks(Use::Load, 2, |lane| 64 * lane), (32, 30));
    }

    #[test]
    fn contiguous_accesses_are_free_of_conflicts() {
        for (size, total) in [(1, 2), (2, 2), (4, 2), (8, 4), (12, 8), (16, 8)] {
            let found = [Use::Load, Use::Store].map(|k| clocks(k, size, |l| u64::from(size) * l));
            // With 12 bytes, lanes 20 to 23 come back to banks of lanes 0 to 3.
            let load = if size == 12 { (16, 8) } else { (total, 0) };
            assert_eq!(found, [load, (total, 0)], "{size}");
        }
    }

    #[test]
    fn loads_of_16_bytes_have_groups_of_their_own() {
        // A lane for each row of 64 bytes: every second one starts at the same bank.
        assert_eq!(clocks(Use::Store, 16, |lane| 64 * lane), (32, 24));
        assert_eq!(clocks(Use::Load, 16, |lane| 64 * lane), (32, 24));
        // Rows of 128 bytes, in them 8 columns of 16 bytes: 8 lanes are free if their columns differ.
        let in_order = |lane: u64| 128 * lane + 16 * (lane % 8);
        assert_eq!(clocks(Use::Store, 16, in_order), (8, 0));
        // Lanes 0-3 and 20-23 have columns 0-3 and 4-7.
        assert_eq!(clocks(Use::Load, 16, in_order), (8, 0));
        let apart = |lane: u64| 128 * lane + 16 * (lane % 4 + lane / 16 % 2 * 4);
        assert_eq!(clocks(Use::Load, 16, apart), (8, 0));
        assert_eq!(clocks(Use::Store, 16, apart), (16, 8));
        // Fragments of 16 rows by 4 columns, as matrix products take them.
        let fragment = |lane: u64| 128 * (lane % 16) + 16 * (lane / 16);
        assert_eq!(clocks(Use::Load, 16, fragment), (32, 24));
        let swizzled = |lane: u64| 128 * (lane % 16) + 16 * ((lane / 16) ^ (lane % 8));
        assert_eq!(clocks(Use::Load, 16, swizzled), (8, 0));
    }

    #[test]
    fn lanes_of_an_atomic_wait_for_each_other() {
        assert_eq!(clocks(Use::Load, 4, |_| 0), (2, 0));
        assert_eq!(clocks(Use::Atomic, 4, |_| 0), (64, 62));
        assert_eq!(clocks(Use::Atomic, 8, |lane| 8 * lane), (4, 0));
    }

    #[test]
    fn lanes_that_are_off_do_not_conflict() {
        let one = Banks::default().clocks(Use::Atomic, 4, 1, &[0; LANES]);
        assert_eq!((one.total, one.conflict), (2, 0));
    }
}
