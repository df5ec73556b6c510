//! Sums over the instructions of launches.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use super::{Counts, Site, Traffic};
use crate::cost::{self, Class};
use crate::inst::Program;

/// Totals of one or several launches. Clocks are sums over all waves, of SIMDs or, for LDS, of compute units. They are
/// lower bounds of the units' busy time, without any waiting.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of launches.
    pub launches: u64,
    /// Instructions executed, counted once per wave.
    pub wave_instructions: u64,
    /// Instructions executed by [`Class`].
    pub classes: [u64; Class::ALL.len()],
    /// Instructions executed by mnemonic.
    pub opcodes: BTreeMap<&'static str, u64>,
    /// Clocks of the matrix units.
    pub mfma_clk: u64,
    /// Operations of the matrix products, with a multiplication and an addition counted as two. Sparse products count
    /// as dense ones.
    pub mfma_flops: u64,
    /// Clocks in which vector instructions are issued, including transcendental functions, without matrix products.
    pub valu_clk: u64,
    /// Clocks in which transcendental functions are issued.
    pub trans_clk: u64,
    /// Clocks in which scalar arithmetic is issued.
    pub salu_clk: u64,
    /// Traffic of vector instructions to LDS and memory.
    pub vector: Site,
    /// Bytes loaded by scalar instructions.
    pub scalar_bytes: u64,
    /// Lines of memory; for several launches the sum.
    pub traffic: Traffic,
}

impl Totals {
    /// Totals of one launch of a kernel in `program`.
    pub fn new(counts: &Counts, program: &Program) -> Self {
        let mut t = Totals {
            launches: 1,
            traffic: counts.traffic,
            ..Totals::default()
        };
        for (inst, &hits) in program.insts.iter().zip(&counts.hits) {
            if hits == 0 {
                continue;
            }
            let cost = cost::of(inst);
            t.wave_instructions += hits;
            t.classes[cost.class as usize] += hits;
            *t.opcodes.entry(inst.op.mnemonic()).or_default() += hits;
            t.mfma_clk += hits * u64::from(cost.mfma_clk);
            t.mfma_flops += hits * cost::mfma_flops(inst.op);
            t.valu_clk += hits * u64::from(cost.valu_clk);
            t.salu_clk += hits * u64::from(cost.salu_clk);
            if cost.class == Class::Trans {
                t.trans_clk += hits * u64::from(cost.valu_clk);
            }
        }
        for (at, site) in &counts.sites {
            let class = program.insts.get(*at as usize).map(|i| cost::of(i).class);
            match class {
                Some(Class::Smem) => t.scalar_bytes += site.load_bytes,
                _ => t.vector += *site,
            }
        }
        t
    }

    /// The figures by their names in JSON, without the counts by class and by opcode.
    pub fn figures(&self) -> [(&'static str, u64); 21] {
        let (v, t) = (&self.vector, &self.traffic);
        [
            ("wave_instructions", self.wave_instructions),
            ("mfma_clk", self.mfma_clk),
            ("mfma_flops", self.mfma_flops),
            ("valu_clk", self.valu_clk),
            ("trans_clk", self.trans_clk),
            ("salu_clk", self.salu_clk),
            ("accvgpr_moves", self.of_class(Class::Accvgpr)),
            ("lds_accesses", v.lds_accesses),
            ("lds_bytes", v.lds_bytes),
            ("lds_clk", v.lds_clk),
            ("lds_conflict_clk", v.lds_conflict_clk),
            ("load_bytes", v.load_bytes),
            ("store_bytes", v.store_bytes),
            ("scalar_bytes", self.scalar_bytes),
            ("scratch_bytes", v.scratch_bytes),
            ("lines_64", v.lines_64),
            ("lines_128", v.lines_128),
            ("hbm_read_bytes", t.read_bytes),
            ("hbm_write_bytes", t.write_bytes),
            ("hbm_unique_bytes", t.unique_bytes),
            ("l2_fill_bytes", t.l2_fill_bytes),
        ]
    }

    /// Instructions executed of one class.
    pub fn of_class(&self, class: Class) -> u64 {
        self.classes[class as usize]
    }
}

impl AddAssign<&Totals> for Totals {
    fn add_assign(&mut self, other: &Totals) {
        self.launches += other.launches;
        self.wave_instructions += other.wave_instructions;
        let classes = self.classes.iter_mut().zip(&other.classes);
        classes.for_each(|(a, b)| *a += b);
        for (mnemonic, n) in &other.opcodes {
            *self.opcodes.entry(mnemonic).or_default() += n;
        }
        self.mfma_clk += other.mfma_clk;
        self.mfma_flops += other.mfma_flops;
        self.valu_clk += other.valu_clk;
        self.trans_clk += other.trans_clk;
        self.salu_clk += other.salu_clk;
        self.vector += other.vector;
        self.scalar_bytes += other.scalar_bytes;
        self.traffic += other.traffic;
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Traffic) {
        self.read_bytes += other.read_bytes;
        self.write_bytes += other.write_bytes;
        self.unique_bytes += other.unique_bytes;
        self.l2_fill_bytes += other.l2_fill_bytes;
    }
}
