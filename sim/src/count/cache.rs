//! Caches that make counting fast. An access to LDS is mostly like the last one of the same instruction. The lines of
//! an access to memory are mostly near each other.

use super::banks::Clocks;
use super::lines::SECTOR_BITS;
use crate::sanitize::accesses::Access;
use crate::wave::LANES;

/// The last LDS access of an instruction, and its clocks.
pub(super) struct Memo {
    lanes: u64,
    addresses: [u64; LANES],
    clocks: Clocks,
}

impl Default for Memo {
    fn default() -> Self {
        Memo {
            lanes: 0,
            addresses: [0; LANES],
            clocks: Clocks::default(),
        }
    }
}

impl Memo {
    /// Clocks of an access. Reuses the last ones if the access is the same, or shifted by whole rounds of the banks.
    /// Otherwise calls `find`.
    pub fn clocks(
        &mut self,
        lanes: u64,
        addresses: &[u64; LANES],
        find: impl FnOnce(&[u64; LANES]) -> Clocks,
    ) -> Clocks {
        const ROUND: u64 = 128;
        let distance = addresses[0].wrapping_sub(self.addresses[0]);
        let moved = (addresses.iter().zip(&self.addresses))
            .fold(0, |d, (a, b)| d | (a.wrapping_sub(*b) ^ distance));
        if lanes != self.lanes || moved != 0 || !distance.is_multiple_of(ROUND) {
            (self.lanes, self.addresses) = (lanes, *addresses);
            self.clocks = find(addresses);
        }
        self.clocks
    }
}

/// Number of half lines (64 bytes) that the bitmap covers.
const NEAR: u64 = 4096;

/// The different half lines (64 bytes) of an access.
pub(super) struct Sectors {
    /// Half lines, ascending.
    pub found: Vec<u64>,
    map: [u64; NEAR as usize / 64],
}

impl Default for Sectors {
    fn default() -> Self {
        Sectors {
            found: Vec::with_capacity(2 * LANES),
            map: [0; NEAR as usize / 64],
        }
    }
}

impl Sectors {
    /// Finds the half lines of `access`.
    pub fn find(&mut self, access: &Access) {
        self.found.clear();
        let last_byte = u64::from(access.size) - 1;
        let mut bounds = (u64::MAX, 0);
        for lane in lanes(access.lanes) {
            let address = access.addresses[lane];
            bounds = (bounds.0.min(address), bounds.1.max(address));
        }
        let first = bounds.0 >> SECTOR_BITS;
        let end = bounds.1.saturating_add(last_byte) >> SECTOR_BITS;
        let sectors = |lane: usize| {
            let address = access.addresses[lane];
            (address >> SECTOR_BITS)..=(address.saturating_add(last_byte) >> SECTOR_BITS)
        };
        if end.saturating_sub(first) < NEAR {
            for sector in lanes(access.lanes).flat_map(sectors) {
                let at = sector - first;
                self.map[at as usize / 64] |= 1 << (at % 64);
            }
            let used = (end.saturating_sub(first) / 64) as usize;
            for (i, word) in self.map[..=used].iter_mut().enumerate() {
                let bits = lanes(std::mem::take(word));
                self.found.extend(bits.map(|b| first + (64 * i + b) as u64));
            }
        } else {
            self.found.extend(lanes(access.lanes).flat_map(sectors));
            self.found.sort_unstable();
            self.found.dedup();
        }
    }
}

/// Indices of the bits that are set in `mask`.
fn lanes(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let lane = mask.trailing_zeros() as usize;
        mask &= mask.wrapping_sub(1);
        (lane < 64).then_some(lane)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sanitize::accesses::{Action, Space};

    #[test]
    fn near_and_far_lines_are_found() {
        let mut sectors = Sectors::default();
        for (stride, expected) in [
            (4, (100..=104).collect::<Vec<u64>>()),
            (0, vec![100]),
            (1 << 12, (0..64).map(|i| 100 + 64 * i).collect()),
            (1 << 20, (0..64).map(|i| 100 + (i << 14)).collect()),
        ] {
            // The lanes in a permuted order.
            let addresses = std::array::from_fn(|lane| 6400 + stride * (lane as u64 * 37 % 64));
            sectors.find(&Access {
                space: Space::Global,
                action: Action::Load,
                scalar: false,
                size: 16,
                lanes: !0,
                addresses,
                register: None,
            });
            assert_eq!(sectors.found, expected, "{stride}");
        }
    }

    #[test]
    fn an_access_like_the_last_is_not_worked_out_again() {
        let mut memo = Memo::default();
        let mut calls = 0;
        let row = |at: u64, stride: u64| std::array::from_fn(|lane| at + stride * lane as u64);
        for (lanes, addresses) in [
            (!0, row(0, 4)),
            (!0, row(0, 4)),
            (!0, row(256, 4)),
            (1, row(256, 4)),
            (1, row(260, 4)),
            (1, row(260, 8)),
        ] {
            memo.clocks(lanes, &addresses, |_| {
                calls += 1;
                Clocks::default()
            });
        }
        assert_eq!(calls, 4);
    }
}
