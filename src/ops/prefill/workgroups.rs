//! Workgroups of each kernel of a batch: how chunks, heads and columns are divided among them. Pure: uses no device.
//!
//! Kernels that walk chunks divide value columns into slabs, one per workgroup. If not all workgroups fit on the device
//! at once, slabs of twice the columns may be faster: they share the copies of K, Q, T and P.

use super::CHUNK;
use super::plan::{self, Counts};
use super::shape::Shape;
use crate::check::{self, Checked};
use crate::error::{ArgumentError, ArgumentKind};
use crate::kernels::{self, FUSED_BUCKETS, KernelCost, Walk, bucket_index};
use crate::model::Heads;

/// Division of the columns of a segment and value head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Division {
    /// Workgroups.
    pub(super) slabs: usize,
    /// Threads of each workgroup.
    pub(super) threads: u32,
}

impl Shape {
    /// Checks that no grid has more threads than a launch can have.
    pub(super) fn check_grids(&self, counts: Counts) -> Checked<()> {
        let [prepare, summarise, combine, scan] = self.grids(counts);
        let fit = prepare < 1 << 26 && summarise.max(scan) < 1 << 24 && combine < 1 << 23;
        check::ensure(fit, || {
            let was = format!(
                "{} tokens, {} sequences in {} segments, {} value heads",
                self.batch.rows(),
                self.sequences,
                counts.items,
                self.spec.heads.value
            );
            ArgumentError::new(
                "tokens, sequences, segments and heads",
                ArgumentKind::Shape,
                was,
                "a launch must have fewer than 2^32 threads",
            )
        })
    }

    pub(super) fn combine_slabs(&self) -> usize {
        let bucket = bucket_index(self.spec.heads.key_dim);
        (self.spec.heads.value_dim).div_ceil(self.target.combine(bucket).columns)
    }

    /// Workgroups of prepare (one more chunk index for rows past the last sequence), summarise, combine and scan.
    pub(super) fn grids(&self, counts: Counts) -> [u64; 4] {
        let of_heads =
            |items: usize, slabs: usize| items as u64 * self.spec.heads.value as u64 * slabs as u64;
        [
            match self.is_fused() {
                true => 0,
                false => {
                    (self.chunk_entries() as u64 + 1)
                        * (self.spec.heads.key * self.prepare_head_groups()) as u64
                }
            },
            of_heads(counts.summaries, self.summarise_slabs(counts)),
            match self.scan_chains(counts) {
                true => 0,
                false => of_heads(counts.chains as usize, self.combine_slabs()),
            },
            of_heads(counts.items, self.walk_slabs(counts)),
        ]
    }

    /// Workgroups of scan, of `threads` threads, that are launched for `units` of work: fewer where each walks several.
    /// Units are dealt before anyone knows when they end, so a workgroup may have one long unit more than others. Long
    /// segments are walked so only where the host knows the lengths, and where each workgroup has many units or all are
    /// equal. The host does not know which sequences are padding, so padding may make units unequal.
    pub(super) fn scan_workgroups(&self, counts: Counts, threads: u32, units: u32) -> u32 {
        let key_dim = self.spec.heads.key_dim;
        // Only these are compiled for that (`walks_units`).
        let wide = threads > self.target.scan(bucket_index(key_dim)).threads
            && (65..=128).contains(&key_dim);
        let short = self.target.units_chunks;
        let groups = units.min(self.compute_units as u32);
        let of_each = units.div_ceil(groups.max(1));
        let most = match self.guess {
            // With 64 chunks, twice as many, it saves 0.5% of a prefill, and padding costs most.
            None if counts.even => 8 * short,
            None => short.max(of_each.saturating_mul(2).min(4 * short)),
            // The mean length decides then.
            Some(_) => short,
        };
        let early = counts.summaries > 0 && self.starts_soon();
        match wide && short > 0 && !early && counts.longest_chunks <= most {
            true => groups,
            false => units,
        }
    }

    /// Workgroups of summarise and of combine that are launched for so many units of work. Lists that the device makes
    /// often have fewer units, and a workgroup that finds none takes time to start. So fewer workgroups are launched, and
    /// each takes several units.
    pub(super) fn summary_workgroups(&self, [summarise, combine]: [u32; 2]) -> [u32; 2] {
        /// Workgroups for each compute unit: several, so that a compute unit with long walks gets fewer of them.
        const OF_SUMMARISE: usize = 3;
        let at_most = |units: u32, groups: usize| (units as usize).min(groups) as u32;
        if self.guess.is_none() || self.target.units_chunks == 0 {
            return [summarise, combine];
        }
        // Only these are compiled for that (`walks_units`).
        let walks_units = (65..=128).contains(&self.spec.heads.key_dim);
        [
            match walks_units {
                true => at_most(summarise, self.compute_units.saturating_mul(OF_SUMMARISE)),
                false => summarise,
            },
            at_most(combine, self.compute_units),
        ]
    }

    /// Whether `prefill_scan` chains summaries, and `prefill_combine` does not run: the bits are the same. Each workgroup
    /// then takes all steps before its segment, so they must be few.
    pub(super) fn scan_chains(&self, counts: Counts) -> bool {
        counts.chains > 0
            && !self.is_fused()
            && counts.summaries <= self.target.scan_chains
            && self.spec.heads.key_dim <= 128
    }

    /// Workgroups of `prefill_fused` that share `units` of work, where each walks several. 0: each has one.
    pub(super) fn fused_walkers(&self, counts: Counts, units: u32) -> u32 {
        let most = self.target.fused_costs.units_chunks;
        // If only the device knows the lengths, that of the longest sequence is a guess, and the mean decides. It also does
        // where the longest sequence happens to be as long as the guess.
        let guess = self.whole().longest_chunks;
        let mean = (self.batch.rows().div_ceil(self.sequences.max(1))).div_ceil(CHUNK) as u32;
        // Without any chunks, too, some targets have one unit in a workgroup.
        let few = |chunks: u32| most > 0 && chunks <= most;
        let walks = self.is_fused()
            && counts.summaries == 0
            && counts.items <= self.sequences
            && self.fused_slabs() == 1
            && (few(counts.longest_chunks) || counts.longest_chunks == guess && few(mean))
            && units > self.compute_units as u32;
        if walks { self.compute_units as u32 } else { 0 }
    }

    /// Value heads per workgroup of prepare: all heads that read its key head, or fewer if the device has room for more
    /// workgroups. Each workgroup computes the products of q and k.
    pub(super) fn prepare_heads(&self) -> usize {
        let group = self.spec.heads.value / self.spec.heads.key;
        let room = self.compute_units * self.target.prepare_room;
        let parts = room / (self.chunk_entries() * self.spec.heads.key).max(1);
        group.div_ceil(parts.max(1))
    }

    /// Workgroups of prepare per (chunk, key head).
    pub(super) fn prepare_head_groups(&self) -> usize {
        (self.spec.heads.value / self.spec.heads.key).div_ceil(self.prepare_heads())
    }

    /// Workgroups of scan or of fused per item and value head.
    pub(super) fn walk_slabs(&self, counts: Counts) -> usize {
        match self.is_fused() {
            true => self.fused_slabs(),
            false => self.scan_division(counts).slabs,
        }
    }

    /// Workgroups of summarise or of fused_summarise per item and value head.
    pub(super) fn summarise_slabs(&self, counts: Counts) -> usize {
        match self.is_fused() {
            true => self.fused_summarise_slabs(),
            false => self.summarise_division(counts).slabs,
        }
    }

    /// Workgroups of fused_summarise per item and value head.
    fn fused_summarise_slabs(&self) -> usize {
        let Heads {
            key_dim, value_dim, ..
        } = self.spec.heads;
        let bucket = bucket_index(key_dim).min(FUSED_BUCKETS - 1);
        let columns = self.target.fused_summarise(bucket).columns;
        value_dim.div_ceil(columns) + key_dim.div_ceil(columns)
    }

    /// Workgroups of fused per item and value head.
    pub(super) fn fused_slabs(&self) -> usize {
        let bucket = bucket_index(self.spec.heads.key_dim).min(FUSED_BUCKETS - 1);
        let columns = self.target.fused(bucket).columns;
        self.spec.heads.value_dim.div_ceil(columns)
    }

    /// Workgroups of short per sequence and value head.
    pub(super) fn short_slabs(&self) -> usize {
        (self.spec.heads.value_dim).div_ceil(self.target.short_columns)
    }

    /// Divides the columns of `matrices` into slabs, of twice the columns if that is faster. A slab belongs to one
    /// matrix.
    fn divide(
        &self,
        walk: &Walk,
        cost: &KernelCost,
        matrices: &[usize],
        (items, longest_chunks, chunks): (usize, usize, usize),
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
                longest_chunks,
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

    /// Division of the columns of V in scan.
    pub(super) fn scan_division(&self, counts: Counts) -> Division {
        let counts = self.guess.unwrap_or(counts);
        self.divide(
            self.target.scan(bucket_index(self.spec.heads.key_dim)),
            &self.target.costs.scan,
            &[self.spec.heads.value_dim],
            (
                counts.items,
                counts.longest_chunks as usize,
                self.chunk_entries(),
            ),
        )
    }

    /// Division of the columns of N and M in summarise.
    pub(super) fn summarise_division(&self, counts: Counts) -> Division {
        let counts = self.guess.unwrap_or(counts);
        let longest_chunks = (counts.longest_chunks as usize).div_ceil(counts.pieces as usize);
        self.divide(
            self.target.summarise(bucket_index(self.spec.heads.key_dim)),
            &self.target.costs.summarise,
            &[self.spec.heads.value_dim, self.spec.heads.key_dim],
            (
                counts.summaries,
                longest_chunks,
                counts.summaries * longest_chunks,
            ),
        )
    }

    /// Most workgroups of scan and of summarise for a segment and value head.
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

    /// Workgroups of the backward's walks and summaries.
    pub(super) fn backward_walk(&self) -> &'static Walk {
        (self.target).backward_walk(kernels::backward_index(self.spec.heads.key_dim))
    }

    /// Workgroups of `prefill_backward_gradients` for so many chunks of key heads.
    pub(super) fn gradient_groups(&self, chunks: u64) -> u64 {
        let index = kernels::backward_index(self.spec.heads.key_dim);
        match self.target.backward_gradients(index).persistent {
            true => chunks.min(self.compute_units as u64),
            false => chunks,
        }
    }

    /// Division of the columns of V in the backward's walks, of each direction.
    pub(super) fn backward_division(&self, counts: Counts) -> Division {
        let heads = &self.spec.heads;
        let costs = (self.target).backward_costs(kernels::backward_index(heads.key_dim));
        let longest = counts.longest_chunks as usize;
        // Both directions are matrices of their own.
        let both = self.divide(
            self.backward_walk(),
            &costs.scan,
            &[heads.value_dim; 2],
            (counts.items, longest, self.chunk_entries()),
        );
        Division {
            slabs: both.slabs / 2,
            ..both
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::shape::tests::{cu_seqlens, on_an_h200, shape};
    use super::*;

    /// One workgroup for each multiprocessor where segments are short, or many and not long, or equal, as measured on an H200.
    #[test]
    fn workgroups_of_scan_walk_several_segments() {
        // `equal`: workgroups if all segments have equally many chunks.
        for (sequences, tokens, groups, equal) in [
            (256, 128_usize, 132, 132),
            (1024, 64, 132, 132),
            (128, 256, 132, 132),
            (2, 128, 64, 64),
            (128, 257, 132, 132),
            (16, 512, 132, 132),
            (15, 512, 132, 132),
            (12, 512, 384, 132),
            (32, 1024, 132, 132),
            (24, 1024, 768, 132),
            (128, 1025, 4096, 132),
            (8, 2048, 256, 132),
            (8, 2049, 256, 256),
        ] {
            let mut counts = Counts {
                items: sequences,
                summaries: 0,
                pieces: 1,
                chains: 0,
                longest_chunks: tokens.div_ceil(64) as u32,
                even: false,
                short: 0,
            };
            let units = 32 * sequences as u32;
            let lengths = vec![tokens; sequences];
            let shape_of = on_an_h200([16, 32], &lengths);
            assert_eq!(shape_of.scan_workgroups(counts, 384, units), groups);
            assert_eq!(shape_of.scan_workgroups(counts, 256, units), units);
            counts.even = true;
            assert_eq!(shape_of.scan_workgroups(counts, 384, units), equal);
            assert_eq!(shape_of.scan_workgroups(counts, 256, units), units);
            // Mean lengths say less.
            let of_device = shape_of.of_device().expect("a plan");
            let few = counts.longest_chunks <= 4;
            let expected = if few { groups } else { units };
            assert_eq!(of_device.scan_workgroups(counts, 384, units), expected);
            let cdna = shape([16, 32], &lengths);
            assert_eq!(cdna.scan_workgroups(counts, 512, units), units);
        }
    }

    /// Some workgroups for each multiprocessor, where the device makes the list of segments.
    #[test]
    fn workgroups_of_summaries_take_several_units_of_lists_of_the_device() {
        let known = on_an_h200([16, 32], &[8192; 4]);
        let of_device = known.of_device().expect("a plan");
        assert_eq!(known.summary_workgroups([4096, 1024]), [4096, 1024]);
        assert_eq!(of_device.summary_workgroups([4096, 1024]), [396, 132]);
        assert_eq!(of_device.summary_workgroups([128, 32]), [128, 32]);
        assert_eq!(of_device.summary_workgroups([0, 0]), [0, 0]);
        for keys in [64, 192] {
            let mut other = of_device;
            other.spec.heads.key_dim = keys;
            assert_eq!(other.summary_workgroups([4096, 1024]), [4096, 132]);
        }
        let mut huge = of_device;
        huge.compute_units = u32::MAX as usize;
        assert_eq!(huge.summary_workgroups([4096, 1024]), [4096, 1024]);
        let cdna = shape([16, 32], &[8192; 4]).of_device().expect("a plan");
        assert_eq!(cdna.summary_workgroups([4096, 1024]), [4096, 1024]);
    }

    /// As many workgroups as compute units where there are more units of few chunks, whoever knows the lengths.
    #[test]
    fn workgroups_of_fused_walk_several_units_of_few_chunks() {
        let ragged: Vec<usize> = (0..60).map(|i| 17 + i * 53 % 112).collect();
        let one_long = [vec![17; 59], vec![700]].concat();
        for (lengths, host, device) in [
            (vec![128; 120], 304, 304),
            (vec![64; 256], 304, 304),
            (vec![128; 9], 0, 0),
            (vec![256; 64], 304, 304),
            (vec![257; 120], 0, 0),
            (vec![1024; 64], 0, 0),
            (ragged, 304, 304),
            (one_long, 0, 304),
            (vec![0; 40], 304, 304),
        ] {
            let fused = shape([16, 32], &lengths).fused_whole();
            let partition = fused.partition(&cu_seqlens(&lengths)).expect("a plan");
            let units = 32 * lengths.len() as u32;
            let name = format!("{} x {}", lengths.len(), lengths[0]);
            let walkers = |counts| fused.fused_walkers(counts, units);
            assert_eq!(walkers(partition.counts()), host, "{name}");
            assert_eq!(walkers(fused.whole()), device, "{name}");
            // More value columns than a slab has.
            let mut wide = fused;
            wide.spec.heads.value_dim = 144;
            assert_eq!(wide.fused_walkers(fused.whole(), 2 * units), 0, "{name}");
            // Another target, which has one unit in a workgroup.
            let sm90 = on_an_h200([16, 32], &lengths).fused_whole();
            assert_eq!(sm90.fused_walkers(sm90.whole(), units), 0, "{name}");
            // Sequences are cut.
            let mut cut = partition.counts();
            cut.summaries = 1;
            assert_eq!(walkers(cut), 0, "{name}");
        }
        let split = shape([16, 32], &[128; 120]);
        assert_eq!(split.fused_walkers(split.whole(), 3840), 0);
    }
}
