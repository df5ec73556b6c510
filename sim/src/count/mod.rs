//! Exact counters of a launch: executions of each instruction, and their traffic to LDS and memory.
//!
//! Most instructions cost one addition when they are executed. Figures that follow from the instruction alone
//! ([`crate::cost`]) are computed afterwards ([`Totals`]). Instructions that access memory are examined lane by lane
//! before they are executed.
//!
//! | content | file |
//! |---|---|
//! | sums over instructions and launches | `totals.rs` |
//! | busy times of a GPU's units | `busy.rs` |
//! | JSON, roofline diagrams | `json.rs`, `roofline.rs` |
//! | clocks of the LDS, bank conflicts | `banks.rs` |
//! | caches that make counting fast | `cache.rs` |
//! | lines of memory, per launch and per die | `lines.rs` |

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

/// Traffic of all executions of one instruction. A flat access counts as the memory that its lanes address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Site {
    /// Accesses to LDS, counted per wave; two for an instruction with two addresses. Permutations count.
    pub lds_accesses: u64,
    /// Bytes that lanes moved from or to LDS.
    pub lds_bytes: u64,
    /// Clocks of the LDS, bank conflicts included.
    pub lds_clk: u64,
    /// Clocks of the LDS in which lanes waited for each other's banks.
    pub lds_conflict_clk: u64,
    /// Bytes loaded from global memory by lanes or scalar instructions.
    pub load_bytes: u64,
    /// Bytes stored to global memory; atomics count here.
    pub store_bytes: u64,
    /// Different half lines (64 bytes) of each execution, summed.
    pub lines_64: u64,
    /// Different lines (128 bytes) of each execution, summed.
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

/// Counters of one launch that ran to its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Executions of each instruction of the program, counted per wave.
    pub hits: Vec<u64>,
    /// Traffic of the instructions that access LDS or memory, with their index in the program.
    pub sites: Vec<(u32, Site)>,
    /// Lines of global memory, including arguments and constants, without instructions and scratch.
    pub traffic: Traffic,
    /// Occupancy of a compute unit by this launch.
    pub occupancy: Occupancy,
}

impl Counts {
    /// Traffic of instruction `at` of the program; `None` if it accesses no LDS and no memory.
    pub fn site(&self, at: usize) -> Option<&Site> {
        let key = |s: &(u32, Site)| s.0 as usize;
        let i = self.sites.binary_search_by_key(&at, key).ok()?;
        Some(&self.sites[i].1)
    }
}

/// Counters of a launch, shared by its threads.
pub(crate) struct Counting {
    /// For each instruction, its index in `sites`, or [`NOWHERE`].
    places: Vec<u32>,
    /// The instructions that access memory.
    sites: Vec<u32>,
    lines: Lines,
    sum: Mutex<(Vec<u64>, Vec<Site>)>,
}

const NOWHERE: u32 = u32::MAX;

impl Counting {
    /// Creates counters for a program and the allocations that the launch may touch.
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

    /// Creates the counters of one thread.
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

    /// Sums up all threads.
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
    /// For each site, the last access to LDS, and the last second access of a two-address instruction.
    memos: Vec<[Memo; 2]>,
    /// The allocation that was accessed last.
    hint: usize,
}

impl Counter<'_> {
    /// Counts instruction `at` of a wave on die `die`; called before it is executed.
    #[inline(always)]
    pub fn before(&mut self, w: &Wave, at: u32, inst: &Inst, die: u32) {
        // Both were created for the program that runs.
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
    /// Adds this thread's counters to the launch's.
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
