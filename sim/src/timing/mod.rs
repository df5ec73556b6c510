//! Timing model: how long a launch takes, and why. All results are modelled, not measured.
//!
//! A few workgroups of each kind are recorded during simulation ([`trace::Recording`]). They are replayed on a model
//! of one compute unit, as many at a time as fit on it. The launch's time is the time that the busiest compute unit
//! needs for its share of the workgroups. `docs/results/timing-model.md` describes the calibration and the error.
//!
//! | content | file |
//! |---|---|
//! | latencies and bandwidths, with sources | `machine.rs` |
//! | recorded instructions of waves | `trace.rs` |
//! | kinds of workgroups, and those of the busiest compute unit | `kinds.rs` |
//! | units, clocks and registers of an instruction | `program.rs` |
//! | model of a compute unit | `cu.rs` |
//! | model of its caches, and of the memory behind | `memory.rs` |
//! | trace of a compute unit's waves for Perfetto | `perfetto.rs` |

mod cu;
mod kinds;
mod machine;
mod memory;
mod perfetto;
mod program;
pub mod trace;

pub use cu::{Event, Site, Stall};
pub use perfetto::perfetto;
pub use trace::{Recorded, Recording, Trace};

use crate::code_object::{CodeObject, Kernel};
use crate::gpu::Gpu;
use crate::occupancy::Occupancy;
use cu::Work;
use memory::Path;

/// Number of workgroups of a kind to record: enough to show the sharing of lines between neighbours in L2.
pub const SAMPLE: u32 = 8;

/// The free parameters, fitted to published times (`docs/results/timing-model.md`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// Factor on a compute unit's clocks, for effects that the model leaves out. The bandwidth of HBM and Infinity Cache
    /// is not scaled: figures of it are measured ones.
    pub scale: f64,
    /// Constant time of a launch in microseconds, in addition to its work.
    pub launch_us: f64,
}

impl Fit {
    /// No correction.
    pub const NONE: Fit = Fit {
        scale: 1.0,
        launch_us: 0.0,
    };
    /// Calibrated on published times.
    pub const CALIBRATED: Fit = Fit {
        scale: 1.248,
        launch_us: 6.19,
    };
}

/// Dimensions and kernel of a launch, as the model needs them.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// The code object.
    pub code: &'a CodeObject,
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Number of workgroups.
    pub workgroups: u64,
    /// Waves per workgroup.
    pub waves: u32,
    /// LDS per workgroup in bytes, the kernel's static LDS included.
    pub lds: u32,
    /// Bytes of memory that the launch touches: `hbm_unique` of the counters, or the size of its buffers.
    pub footprint: u64,
}

/// The model of a launch on a GPU.
#[derive(Clone, Copy, Debug)]
pub struct Model {
    gpu: Gpu,
    fit: Fit,
    events: usize,
}

/// Modelled time of a launch, and its reasons.
#[derive(Clone, Debug)]
pub struct Estimate {
    /// The GPU.
    pub gpu: Gpu,
    /// Time of the launch in microseconds.
    pub modelled_us: f64,
    /// Clocks of the busiest compute unit, not yet multiplied by [`Fit::scale`].
    pub clocks: f64,
    /// Number of workgroups of that compute unit.
    pub share: u64,
    /// Number of workgroups that it runs at a time.
    pub resident: u32,
    /// Number of workgroups that were modelled; the others are extrapolated.
    pub modelled_workgroups: u64,
    /// Average number of bytes that each modelled workgroup brought into L1.
    pub l2_bytes: f64,
    /// Average number of bytes that each modelled workgroup brought into L2.
    pub far_bytes: f64,
    /// Issues and stalls at each instruction of the program, in the modelled workgroups.
    pub sites: Vec<Site>,
    /// The first events of the compute unit.
    pub events: Vec<Event>,
}

impl Model {
    /// Creates the calibrated model of a GPU.
    pub fn new(gpu: Gpu) -> Self {
        Model {
            gpu,
            fit: Fit::CALIBRATED,
            events: 0,
        }
    }

    /// Replaces the free parameters.
    pub fn with(mut self, fit: Fit) -> Self {
        self.fit = fit;
        self
    }

    /// Keeps the first `events` events, for [`perfetto()`].
    pub fn keep(mut self, events: usize) -> Self {
        self.events = events;
        self
    }

    fn resident(&self, shape: &Shape) -> u32 {
        Occupancy::of(shape.kernel, shape.waves, shape.lds)
            .workgroups
            .max(1)
    }

    /// Models a launch from its recorded workgroups; `None` if there are none.
    pub fn estimate(&self, shape: &Shape, recorded: &Recorded) -> Option<Estimate> {
        if recorded.traces.is_empty() {
            return None;
        }
        let gpu = self.gpu;
        let offset = shape.kernel.descriptor.accum_offset() as u16;
        let code = program::prepare(shape.code, offset);
        let kinds = kinds::kinds(recorded);
        let dispatch = kinds::dispatch(&gpu, shape.workgroups, &kinds, recorded);
        let resident = self.resident(shape);
        let estimate = |share: &kinds::Share| {
            let (active, part) = (dispatch.active, share.part);
            let path = Path::new(&gpu, active, part, shape.footprint, self.fit.scale);
            let run = |end: usize, events| {
                cu::run(&Work {
                    code: &code,
                    kinds: &kinds,
                    path,
                    workgroups: &share.workgroups[..end],
                    resident,
                    events,
                })
            };
            // Beyond this, further workgroups cost as much for their work as the last ones.
            let short = share.prefix(2 * u64::from(resident));
            let long = share.prefix(4 * u64::from(resident));
            let end = share.workgroups.len();
            let full = run(long, self.events);
            let mut clocks = full.clocks as f64;
            if end > long {
                let less = run(short, 0).clocks;
                let marginal = full.clocks.saturating_sub(less) as f64 / share.work(short, long);
                clocks += marginal * share.work(long, end);
            }
            let per = |lines: u64| (lines * machine::LINE) as f64 / long as f64;
            Estimate {
                gpu,
                modelled_us: clocks * self.fit.scale / (gpu.ghz * 1e3) + self.fit.launch_us,
                clocks,
                share: end as u64,
                resident,
                modelled_workgroups: long as u64,
                l2_bytes: per(full.traffic.l2_lines),
                far_bytes: per(full.traffic.far_lines),
                sites: full.sites,
                events: full.events,
            }
        };
        let estimates = dispatch.shares.iter().map(estimate);
        estimates.max_by(|a, b| a.clocks.total_cmp(&b.clocks))
    }
}
