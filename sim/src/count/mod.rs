//! Exact counters of a launch: how often each instruction was executed, and what it did to LDS and memory.
//!
//! One addition for each executed instruction is all that most of them cost; what follows from the instruction alone
//! ([`crate::cost`]) is worked out afterwards ([`Totals`]). Instructions that access memory are looked at lane by lane
//! before they are executed.
//!
//! | what | file |
//! |---|---|
//! | sums over instructions and launches | `totals.rs` |
//! | how long the units of a GPU are busy with it | `busy.rs` |
//! | JSON, roofline diagrams | `json.rs`, `roofline.rs` |
//! | clocks of the LDS, bank conflicts | `banks.rs` |
//! | what makes the two fast | `cache.rs` |
//! | lines of memory, once for a launch and once for a die | `lines.rs` |

pub(crate) mod banks;
mod busy;
mod cache;
mod json;
mod lines;
pub mod roofline;
mod totals;

pub use busy::Busy;
pub use json::json;
pub use lines::Traffic;
pub use totals::Totals;

use std::sync::Mutex;

use crate::inst::{Format, Inst, Program, flag};
use crate::memory::Memory;
use crate::occupancy::Occupancy;
use crate::sanitize::accesses::{Access, Accesses, Action, Space};
use crate::wave::Wave;
use banks::{Banks, Clocks, PERMUTE_CLK, Use};
use cache::{Memo, Sectors};
use lines::{LINE_BITS, Lines, SECTOR_BITS};

/// What the executions of one instruction did to LDS and memory. A flat access counts where its lanes lead it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// Accesses to LDS, of a wave each; two for an instruction with two addresses. Permutations count.
    pub lds_accesses: u64,
    /// Bytes that lanes moved from or to LDS.
    pub lds_bytes: u64,
    /// Clocks of the LDS.
    pub lds_clk: u64,
    /// Those of them in which lanes waited for each other's banks.
    pub lds_conflict_clk: u64,
    /// Bytes that lanes, or scalar instructions, loaded from global memory.
    pub load_bytes: u64,
    /// Bytes that they stored there; atomics count here.
    pub store_bytes: u64,
    /// Different half lines of 64 bytes, in the executions one by one.
    pub lines_64: u64,
    /// Different lines of 128 bytes.
    pub lines_128: u64,
    /// Bytes of scratch that lanes loaded or stored.
    pub scratch_bytes: u64,
}

impl std::ops::AddAssign for Site {
    fn add_assign(&mut self, other: Site) {
        self.lds_accesses += other.lds_accesses;
        self.lds_bytes += other.lds_bytes;
        self.lds_clk += other.lds_clk;
        self.lds_conflict_clk += other.lds_conflict_clk;
        self.load_bytes += other.load_bytes;
        self.store_bytes += other.store_bytes;
        self.lines_64 += other.lines_64;
        self.lines_128 += other.lines_128;
        self.scratch_bytes += other.scratch_bytes;
    }
}

/// The counters of one launch that came to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// How often waves executed each instruction of the program.
    pub hits: Vec<u64>,
    /// What instructions that access LDS or memory did, by their index in the program.
    pub sites: Vec<(u32, Site)>,
    /// Lines of global memory, arguments and constants included; instructions and scratch are not.
    pub traffic: Traffic,
    /// What a compute unit holds of this launch.
    pub occupancy: Occupancy,
}

impl Counts {
    /// What an instruction did to LDS and memory.
    pub fn site(&self, at: usize) -> Option<&Site> {
        let key = |s: &(u32, Site)| s.0 as usize;
        let i = self.sites.binary_search_by_key(&at, key).ok()?;
        Some(&self.sites[i].1)
    }
}

/// The counters of a launch, for all of its threads.
pub(crate) struct Counting {
    /// For each instruction its place among those that access memory, or [`NOWHERE`].
    places: Vec<u32>,
    /// The instructions that access memory.
    sites: Vec<u32>,
    lines: Lines,
    sum: Mutex<(Vec<u64>, Vec<Site>)>,
}

const NOWHERE: u32 = u32::MAX;

impl Counting {
    /// For a program and the allocations that the launch may touch.
    pub fn new(program: &Program, memory: &Memory) -> Self {
        let mut sites = Vec::new();
        let place = |(at, inst): (usize, &Inst)| {
            if !accesses_memory(inst) {
                return NOWHERE;
            }
            sites.push(at as u32);
            sites.len() as u32 - 1
        };
        let places: Vec<u32> = program.insts.iter().enumerate().map(place).collect();
        let sum = Mutex::new((vec![0; places.len()], vec![Site::default(); sites.len()]));
        Counting {
            places,
            sites,
            lines: Lines::new(memory),
            sum,
        }
    }

    /// Counters for one thread.
    pub fn counter(&self) -> Counter<'_> {
        Counter {
            counting: self,
            hits: vec![0; self.places.len()],
            sites: vec![Site::default(); self.sites.len()],
            accesses: Accesses::default(),
            banks: Box::default(),
            sectors: Sectors::default(),
            memos: self.sites.iter().map(|_| Default::default()).collect(),
            hint: 0,
        }
    }

    /// The sum over all threads.
    pub fn finish(self, occupancy: Occupancy) -> Counts {
        let (hits, sites) = self.sum.into_inner().unwrap_or_else(|e| e.into_inner());
        Counts {
            hits,
            sites: self.sites.into_iter().zip(sites).collect(),
            traffic: self.lines.traffic(),
            occupancy,
        }
    }
}

fn accesses_memory(inst: &Inst) -> bool {
    match inst.format {
        Format::Ds => !inst.has(flag::GDS),
        Format::Flat | Format::Global | Format::Scratch | Format::Mubuf | Format::Smem => true,
        _ => false,
    }
}

/// The counters of one thread.
pub(crate) struct Counter<'a> {
    counting: &'a Counting,
    hits: Vec<u64>,
    sites: Vec<Site>,
    accesses: Accesses,
    banks: Box<Banks>,
    sectors: Sectors,
    /// For each place the last access to LDS, and the last second one of two.
    memos: Vec<[Memo; 2]>,
    /// The allocation that was touched last.
    hint: usize,
}

impl Counter<'_> {
    /// Before instruction `at` of a wave on die `die`.
    #[inline(always)]
    pub fn before(&mut self, w: &Wave, at: u32, inst: &Inst, die: u32) {
        // Both were made for the program that runs.
        self.hits[at as usize] += 1;
        let place = self.counting.places[at as usize];
        if place != NOWHERE {
            self.memory(place as usize, w, inst, die);
        }
    }

    #[inline(never)]
    fn memory(&mut self, place: usize, w: &Wave, inst: &Inst, die: u32) {
        let mut site = Site::default();
        if crate::cost::is_permute(inst.op) {
            let lanes = u64::from(w.exec().count_ones());
            site.lds_accesses = 1;
            site.lds_bytes = 4 * lanes;
            site.lds_clk = PERMUTE_CLK.into();
        }
        let mut accesses = std::mem::take(&mut self.accesses);
        accesses.find(w, inst);
        for access in accesses.iter() {
            let bytes = u64::from(access.lanes.count_ones() * access.size);
            match access.space {
                Space::Lds => {
                    let kind = match access.action {
                        Action::Load => Use::Load,
                        Action::Store => Use::Store,
                        Action::Atomic { .. } => Use::Atomic,
                    };
                    let memo = &mut self.memos[place][site.lds_accesses as usize & 1];
                    let banks = &mut self.banks;
                    let Clocks { total, conflict } =
                        memo.clocks(access.lanes, &access.addresses, |addresses| {
                            banks.clocks(kind, access.size, access.lanes, addresses)
                        });
                    site.lds_accesses += 1;
                    site.lds_bytes += bytes;
                    site.lds_clk += u64::from(total);
                    site.lds_conflict_clk += u64::from(conflict);
                }
                Space::Scratch => site.scratch_bytes += bytes,
                Space::Global => {
                    match access.action {
                        Action::Load => site.load_bytes += bytes,
                        _ => site.store_bytes += bytes,
                    }
                    self.global(access, die, &mut site);
                }
            }
        }
        self.accesses = accesses;
        self.sites[place] += site;
    }

    fn global(&mut self, access: &Access, die: u32, site: &mut Site) {
        self.sectors.find(access);
        let sectors = &self.sectors.found;
        site.lines_64 += sectors.len() as u64;
        let (read, written) = match access.action {
            Action::Load => (true, false),
            Action::Store => (false, true),
            Action::Atomic { .. } => (true, true),
        };
        let mut previous = None;
        for &sector in sectors {
            let line = sector >> (LINE_BITS - SECTOR_BITS);
            if previous == Some(line) {
                continue;
            }
            previous = Some(line);
            site.lines_128 += 1;
            let lines = &self.counting.lines;
            if read {
                lines.mark(&mut self.hint, line, die, false);
            }
            if written {
                lines.mark(&mut self.hint, line, die, true);
            }
        }
    }
}

impl Drop for Counter<'_> {
    /// Adds this thread's counters to those of the launch.
    fn drop(&mut self) {
        let mut sum = self.counting.sum.lock().unwrap_or_else(|e| e.into_inner());
        let (hits, sites) = &mut *sum;
        hits.iter_mut().zip(&self.hits).for_each(|(a, b)| *a += b);
        sites
            .iter_mut()
            .zip(&self.sites)
            .for_each(|(a, b)| *a += *b);
    }
}
