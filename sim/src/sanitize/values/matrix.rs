//! Undefined elements in matrix products. An undefined row of A makes a row of the result undefined, a column of B a
//! column.

use super::Step;
use crate::inst::{Operand, VGPR0};
use crate::sanitize::uses::{Role, Use};

/// Lane layout of a product's blocks; see `exec/mfma/mod.rs`.
#[derive(Clone, Copy)]
struct Layout {
    /// Rows and columns of a block.
    size: usize,
    blocks: usize,
    double: bool,
}

impl Layout {
    fn of(name: &str) -> Layout {
        let size = match () {
            _ if name.contains("_32x32x") => 32,
            _ if name.contains("_16x16x") => 16,
            _ => 4,
        };
        let blocks = [("_2b_", 2), ("_4b_", 4), ("_16b_", 16)]
            .iter()
            .find(|(part, _)| name.contains(part))
            .map_or(1, |(_, n)| *n);
        Layout {
            size,
            blocks,
            double: name.contains("_f64_"),
        }
    }

    /// Distance of lanes that hold the same row and block of A for different k.
    fn period(self) -> usize {
        self.size * self.blocks
    }

    /// Block, row and column of a lane of a register of the result.
    fn element(self, register: usize, lane: usize) -> (usize, usize, usize) {
        match (self.size, self.double) {
            (32, _) => {
                let (block, i) = (register / 16, register % 16);
                (block, 8 * (i / 4) + 4 * (lane / 32) + i % 4, lane % 32)
            }
            (16, false) => (register / 4, 4 * (lane / 16) + register % 4, lane % 16),
            (16, true) => (0, 4 * (register / 2) + lane / 16, lane % 16),
            (_, false) => (lane / 4, register, lane % 4),
            (_, true) => (lane / 4 % 4, lane / 16, lane % 4),
        }
    }
}

impl Step<'_> {
    /// Propagates the shadow of A, B and C to the result. MFMA works in all lanes, whatever EXEC is.
    pub(super) fn matrix(&mut self) {
        let reads = self.uses.reads().iter().filter_map(|u| self.file(u));
        let all = reads.fold(!0, |m, (v, n)| {
            self.shadow.vector[v..v + n].iter().fold(m, |m, x| m & x)
        });
        let Some((d, count)) = self.uses.writes().first().and_then(|u| self.file(u)) else {
            return;
        };
        if all == !0 {
            self.shadow.vector[d..d + count].fill(!0);
            return;
        }
        self.undefined_matrix(d, count);
    }

    fn file(&self, u: &Use) -> Option<(usize, usize)> {
        let first = u.vector(self.w.accum_offset)?;
        Some((first, usize::from(u.count).min(512 - first)))
    }

    #[cold]
    fn undefined_matrix(&mut self, d: usize, count: usize) {
        let layout = Layout::of(self.inst.op.mnemonic());
        let sparse = self.uses.role(Role::Accumulator);
        let lanes = |role| {
            let place = self.uses.role(role).and_then(|u| self.file(u));
            place.map_or(!0, |(v, n)| {
                self.shadow.vector[v..v + n].iter().fold(!0, |m, x| m & x)
            })
        };
        let mut a: u64 = lanes(Role::Source0);
        let mut b: u64 = lanes(Role::Source1);
        if sparse.is_some() {
            a &= lanes(Role::Source2);
        }
        let (cbsz, abid) = (self.inst.ctrl & 7, (self.inst.ctrl >> 4 & 15) as usize);
        let blgp = (self.inst.ctrl >> 8 & 7) as usize;
        if !layout.double && blgp != 0 {
            b = rearranged(b, blgp);
        }
        let fold = |x: u64| {
            (layout.period()..64)
                .step_by(layout.period())
                .fold(x, |m, shift| m & x >> shift)
        };
        let (a, b) = (fold(a), fold(b));
        // A sparse product uses CBSZ and ABID for its indices.
        let group = if sparse.is_some() || layout.double {
            0
        } else {
            (1usize << cbsz) - 1
        };
        let c: Vec<u64> = (0..count)
            .map(|r| match sparse {
                Some(_) => self.shadow.vector[d + r],
                None => self.addend(self.inst.src[2], r),
            })
            .collect();
        let origin = self.matrix_origin();
        for (r, c) in c.into_iter().enumerate() {
            let mut product = 0u64;
            for lane in 0..64 {
                let (block, row, column) = layout.element(r, lane);
                let from = ((block & !group) + (abid & group)) % layout.blocks;
                let defined =
                    a >> (layout.size * from + row) & b >> (layout.size * block + column) & 1;
                product |= defined << lane;
            }
            self.shadow.write_vector(d + r, !0, product & c, origin);
        }
    }

    /// Lanes in which a register of C is defined.
    fn addend(&self, operand: Operand, register: usize) -> u64 {
        if operand < VGPR0 {
            return !0;
        }
        self.shadow.vector[(self.w.vreg(operand) + register) & 511]
    }

    fn matrix_origin(&self) -> super::Origin {
        let places = self.uses.reads().iter().filter_map(|u| self.file(u));
        for (v, n) in places {
            for v in v..v + n {
                if self.shadow.vector[v] != !0 {
                    return self.shadow.origin[v];
                }
            }
        }
        super::Origin::Unknown
    }
}

/// Lanes of B as BLGP rearranges them.
fn rearranged(b: u64, blgp: usize) -> u64 {
    (0..4).fold(0, |m, group| {
        let from = match blgp {
            1 => group & 1,
            2 => (group & 1) + 2,
            3 => (group + 1) & 3,
            n => n - 4,
        };
        m | (b >> (16 * from) & 0xffff) << (16 * group)
    })
}
