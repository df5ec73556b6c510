//! Sets of dwords in a page.

/// Dwords per page.
pub(super) const DWORDS: usize = 256;
/// Bytes per page.
pub(super) const PAGE: u64 = 4 * DWORDS as u64;

/// A set of dwords in a page, one bit each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Dwords([u64; DWORDS / 64]);

impl Dwords {
    /// Adds the dwords `first..=last`.
    #[inline(always)]
    pub fn insert(&mut self, first: usize, last: usize) {
        let (from, to) = (first / 64, last / 64);
        let low = !0 << (first % 64);
        let high = !0 >> (63 - last % 64);
        if from == to {
            self.0[from] |= low & high;
            return;
        }
        self.0[from] |= low;
        self.0[from + 1..to].fill(!0);
        self.0[to] |= high;
    }

    #[inline(always)]
    pub fn contains(&self, dword: usize) -> bool {
        self.0[dword / 64] >> (dword % 64) & 1 != 0
    }

    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.0.iter().fold(0, |any, x| any | x) == 0
    }

    /// The lowest dword.
    pub fn first(&self) -> Option<usize> {
        let word = self.0.iter().position(|x| *x != 0)?;
        Some(64 * word + self.0[word].trailing_zeros() as usize)
    }

    /// Iterates from the lowest to the highest dword.
    pub fn iter(mut self) -> impl Iterator<Item = usize> {
        std::iter::from_fn(move || {
            let dword = self.first()?;
            self.0[dword / 64] &= self.0[dword / 64] - 1;
            Some(dword)
        })
    }

    #[inline(always)]
    pub fn or(mut self, other: &Self) -> Self {
        for (x, y) in self.0.iter_mut().zip(&other.0) {
            *x |= y;
        }
        self
    }

    #[inline(always)]
    pub fn and(mut self, other: &Self) -> Self {
        for (x, y) in self.0.iter_mut().zip(&other.0) {
            *x &= y;
        }
        self
    }

    #[inline(always)]
    pub fn without(mut self, other: &Self) -> Self {
        for (x, y) in self.0.iter_mut().zip(&other.0) {
            *x &= !y;
        }
        self
    }

    #[inline(always)]
    pub fn intersects(&self, other: &Self) -> bool {
        !self.and(other).is_empty()
    }
}
