//! Memory behind a compute unit: L1, its share of L2, and the memory behind L2.

use std::collections::HashMap;

use super::kinds::Next;
use super::machine::*;
use super::trace::{Access, Trace};
use crate::gpu::Gpu;

/// A compute unit's share of the memory system.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Path {
    /// Share of L2, in lines.
    pub l2_lines: u64,
    /// Rate from L2, in bytes a clock.
    pub l2_width: f64,
    pub l2_latency: u64,
    /// Rate from behind L2, in bytes a clock.
    pub far_width: f64,
    pub far_latency: u64,
}

impl Path {
    /// Share of one of `active` compute units that does `part` of the work of a launch that touches `footprint` bytes.
    /// Bytes that fit in the Infinity Cache are assumed to be there, as they are from the second of several like
    /// launches on.
    ///
    /// The bandwidth of HBM and Infinity Cache was measured, in bytes per second: a clock that lasts `scale` times as long
    /// moves `scale` times as many bytes. Rates in bytes a clock are those of a compute unit, which are scaled with it.
    pub fn new(gpu: &Gpu, active: u32, part: f64, footprint: u64, scale: f64) -> Self {
        let in_die = f64::from(active) / f64::from(gpu.xcds);
        let (ns, bandwidth) = if footprint <= INFINITY_BYTES {
            (INFINITY_NS, INFINITY_BANDWIDTH)
        } else {
            (HBM_NS, HBM_YIELD * gpu.hbm)
        };
        Path {
            l2_lines: (L2_LINES as f64 / in_die.max(1.0)) as u64,
            l2_width: L2_PORT.min(L2_WIDTH / in_die.max(1.0)),
            l2_latency: L2_LATENCY,
            far_width: FABRIC_PORT.min(scale * part * bandwidth / (gpu.ghz * 1e9)),
            far_latency: L2_LATENCY + gpu.clocks(ns),
        }
    }
}

/// A cache with least-recently-used replacement.
#[derive(Default)]
struct Cache {
    fills: u64,
    lines: HashMap<u64, Line>,
}

#[derive(Clone, Copy, Default)]
struct Line {
    /// Number of fills before its last use.
    used: u64,
    /// Clock of its arrival.
    arrival: u64,
}

impl Cache {
    /// Clock of a line's arrival, if the cache has it.
    fn find(&mut self, line: u64, capacity: u64) -> Option<u64> {
        let l = self.lines.get_mut(&line)?;
        if self.fills - l.used > capacity {
            return None;
        }
        l.used = self.fills;
        Some(l.arrival)
    }

    fn fill(&mut self, line: u64, arrival: u64) {
        self.fills += 1;
        let used = self.fills;
        self.lines.insert(line, Line { used, arrival });
    }
}

/// The recorded workgroups of a kind that touch each line.
pub(super) struct Sharing {
    touched: HashMap<u64, Touched>,
    samples: u32,
}

struct Touched {
    /// Number of workgroups that touch the line.
    by: u32,
    /// Number of the line in the order of first touches. Unlike addresses, it is the same in every run.
    order: u64,
    /// The last workgroup that touches the line.
    last: usize,
}

impl Sharing {
    /// Finds shared lines in traces of workgroups that run at the same time on one die.
    pub fn of(traces: &[&Trace]) -> Self {
        let mut touched: HashMap<u64, Touched> = HashMap::new();
        for (sample, trace) in traces.iter().enumerate() {
            for &line in &trace.lines {
                let order = touched.len() as u64;
                let t = touched.entry(line).or_insert(Touched {
                    by: 1,
                    order,
                    last: sample,
                });
                if t.last != sample {
                    t.last = sample;
                    t.by += 1;
                }
            }
        }
        touched.retain(|_, t| t.by > 1);
        Sharing {
            touched,
            samples: traces.len() as u32,
        }
    }

    /// Whether all workgroups touch a line.
    fn by_all(&self, line: u64) -> bool {
        self.samples > 1
            && self
                .touched
                .get(&line)
                .is_some_and(|t| t.by == self.samples)
    }

    /// Whether another workgroup brings a line into L2 before workgroup `sample` needs it. All workgroups but one find
    /// it there.
    fn brought(&self, line: u64, sample: u32) -> bool {
        (self.touched.get(&line))
            .is_some_and(|t| !(t.order + u64::from(sample)).is_multiple_of(u64::from(t.by)))
    }
}

/// Lines that were fetched from L2, and from behind L2.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Traffic {
    pub l2_lines: u64,
    pub far_lines: u64,
}

pub(super) struct Memory {
    path: Path,
    l1: Cache,
    scalar: Cache,
    l2: Cache,
    l1_free: u64,
    l2_free: f64,
    far_free: f64,
    pub traffic: Traffic,
}

impl Memory {
    pub fn new(path: Path) -> Self {
        Memory {
            path,
            l1: Cache::default(),
            scalar: Cache::default(),
            l2: Cache::default(),
            l1_free: 0,
            l2_free: 0.0,
            far_free: 0.0,
            traffic: Traffic::default(),
        }
    }

    /// Models an access of workgroup `next`, whose kind has `sharing`. Returns the clock when it is done.
    pub fn access(
        &mut self,
        now: u64,
        a: &Access,
        lines: &[u64],
        sharing: &Sharing,
        next: Next,
    ) -> u64 {
        let start = if a.scalar { now } else { now.max(self.l1_free) };
        let l1 = if a.scalar { SCALAR_HIT } else { L1_LATENCY };
        let mut done = start + l1;
        if !a.scalar {
            self.l1_free = start + u64::from(a.l1_clocks);
            done += u64::from(a.l1_clocks);
        }
        for &line in lines {
            // Workgroups of different turns have their own data, except lines that all share.
            let own = if sharing.by_all(line) {
                line
            } else {
                line | (next.turn + 1) << 48
            };
            let (cache, capacity) = if a.scalar {
                (&mut self.scalar, L1_LINES / 2)
            } else {
                (&mut self.l1, L1_LINES)
            };
            // Stores are written through.
            if !a.store
                && let Some(arrival) = cache.find(own, capacity)
            {
                done = done.max(arrival);
                continue;
            }
            self.traffic.l2_lines += 1;
            self.l2_free = self.l2_free.max(start as f64) + LINE as f64 / self.path.l2_width;
            let mut end = self.l2_free as u64 + self.path.l2_latency;
            if let Some(arrival) = self.l2.find(own, self.path.l2_lines) {
                end = end.max(arrival);
            } else {
                if !sharing.brought(line, next.sample as u32) {
                    self.traffic.far_lines += 1;
                    let clocks = LINE as f64 / self.path.far_width;
                    self.far_free = self.far_free.max(start as f64) + clocks;
                    // A store is done when L2 has it; the line is written back later.
                    if !a.store {
                        end = end.max(self.far_free as u64 + self.path.far_latency);
                    }
                }
                self.l2.fill(own, end);
            }
            cache.fill(own, end);
            done = done.max(end);
        }
        done
    }
}

/// Lines of an access.
pub(super) fn lines_of<'t>(trace: &'t Trace, a: &Access) -> &'t [u64] {
    &trace.lines[a.first as usize..][..usize::from(a.lines)]
}
