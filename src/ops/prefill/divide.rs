//! How the kernels that walk chunks divide columns among workgroups: slabs of a workgroup's columns or, where that takes
//! longer because not all of them fit on the device at once, of twice as many, which share what is copied of K, Q, T and P.

use super::lower::Shape;
use super::plan::{self, Counts};
use crate::kernels::{KernelCost, Walk, bucket_index};

/// The columns of a segment and head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    /// Workgroups.
    pub(super) slabs: usize,
    /// Of each.
    pub(super) threads: u32,
}

impl Shape {
    /// Slabs of so many columns, or of twice as many if that is done sooner. Slabs of several matrices are not mixed.
    fn divide(
        &self,
        walk: &Walk,
        cost: &KernelCost,
        matrices: &[usize],
        (items, longest, chunks): (usize, usize, usize),
    ) -> Division {
        let slabs = |columns: usize| matrices.iter().map(|n| n.div_ceil(columns)).sum::<usize>();
        let [narrow, wide] = [walk.columns, 2 * walk.columns].map(slabs);
        if walk.wide_threads > walk.threads
            && narrow > wide
            && plan::two_in_one(
                cost,
                self.compute_units,
                items,
                [narrow, wide].map(|slabs| self.spec.heads.value * slabs),
                longest,
                chunks,
            )
        {
            return Division {
                slabs: wide,
                threads: walk.wide_threads,
            };
        }
        Division {
            slabs: narrow,
            threads: walk.threads,
        }
    }

    /// Of scan: of the columns of V.
    pub(super) fn scan_division(&self, counts: Counts) -> Division {
        self.divide(
            self.target.scan(bucket_index(self.spec.heads.key_dim)),
            &self.target.costs.scan,
            &[self.spec.heads.value_dim],
            (counts.items, counts.longest as usize, self.slots()),
        )
    }

    /// Of summarise: of the columns of N and of M.
    pub(super) fn summarise_division(&self, counts: Counts) -> Division {
        let longest = counts.longest as usize;
        self.divide(
            self.target.summarise(bucket_index(self.spec.heads.key_dim)),
            &self.target.costs.summarise,
            &[self.spec.heads.value_dim, self.spec.heads.key_dim],
            (counts.summaries, longest, counts.summaries * longest),
        )
    }

    /// The most workgroups that scan and summarise have for a segment and head.
    pub(super) fn most_slabs(&self) -> (usize, usize) {
        let bucket = bucket_index(self.spec.heads.key_dim);
        let slabs = |n: usize, walk: &Walk| n.div_ceil(walk.columns);
        let (scan, summarise) = (self.target.scan(bucket), self.target.summarise(bucket));
        let of_m = slabs(self.spec.heads.key_dim, summarise);
        (
            slabs(self.spec.heads.value_dim, scan),
            slabs(self.spec.heads.value_dim, summarise) + of_m,
        )
    }
}
