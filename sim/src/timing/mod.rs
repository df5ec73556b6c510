//! A model of how long a launch takes, and why. Everything it says is modelled, not measured.
//!
//! A few workgroups of the launch are recorded while they are simulated ([`trace::Recording`]), and replayed on a model
//! of one compute unit, as many at a time as fit on it. What that compute unit needs for its share of the workgroups is
//! the launch's time. `docs/results/timing-model.md` says how it is calibrated, and how far it is off.
//!
//! | what | file |
//! |---|---|
//! | latencies, bandwidths, with their sources | `machine.rs` |
//! | what waves executed | `trace.rs` |
//! | what an instruction needs | `program.rs` |
//! | a compute unit | `cu.rs` |
//! | its caches, and the memory behind | `memory.rs` |
//! | a compute unit's waves for Perfetto | `perfetto.rs` |

mod cu;
mod machine;
mod memory;
mod perfetto;
mod program;
pub mod trace;

pub use cu::{Event, Site, Stall};
pub use perfetto::perfetto;
pub use trace::{Recording, Trace};

use crate::code_object::{CodeObject, Kernel};
use crate::gpu::Gpu;
use crate::occupancy::Occupancy;
use cu::Work;
use memory::{Path, Sharing};

/// Workgroups to record: enough for what neighbours share in L2 to show.
pub const SAMPLE: u32 = 8;

/// The free parameters, fitted to published times (`docs/results/timing-model.md`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// What a compute unit's clocks are multiplied with: what the model leaves out.
    pub scale: f64,
    /// Time of a launch beside its work, in microseconds.
    pub launch_us: f64,
}

impl Fit {
    /// No correction.
    pub const NONE: Fit = Fit {
        scale: 1.0,
        launch_us: 0.0,
    };
    /// As calibrated.
    pub const CALIBRATED: Fit = Fit {
        scale: 1.248,
        launch_us: 6.19,
    };
}

/// The shape of a launch, as far as it matters here.
#[derive(Clone, Copy, Debug)]
pub struct Shape<'a> {
    /// The code object.
    pub code: &'a CodeObject,
    /// The kernel.
    pub kernel: &'a Kernel,
    /// Workgroups.
    pub workgroups: u64,
    /// Waves of a workgroup.
    pub waves: u32,
    /// LDS of a workgroup, the kernel's own included.
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

/// What the model says of a launch.
#[derive(Clone, Debug)]
pub struct Estimate {
    /// The GPU.
    pub gpu: Gpu,
    /// The launch's time in microseconds.
    pub modelled_us: f64,
    /// Clocks of the busiest compute unit, before [`Fit`].
    pub clocks: f64,
    /// Workgroups of that compute unit, and how many it has at a time.
    pub share: u64,
    /// Workgroups at a time.
    pub resident: u32,
    /// Workgroups that the compute unit was modelled with; the rest is extrapolated.
    pub modelled_workgroups: u64,
    /// Bytes that each of these brought into L1, on average.
    pub l2_bytes: f64,
    /// Bytes that each brought into L2, on average.
    pub far_bytes: f64,
    /// For each instruction of the program, what the modelled workgroups did there.
    pub sites: Vec<Site>,
    /// The first events of the compute unit.
    pub events: Vec<Event>,
}

impl Model {
    /// Of a GPU, as calibrated.
    pub fn new(gpu: Gpu) -> Self {
        Model {
            gpu,
            fit: Fit::CALIBRATED,
            events: 0,
        }
    }

    /// With other free parameters.
    pub fn with(mut self, fit: Fit) -> Self {
        self.fit = fit;
        self
    }

    /// Keeping the first `events` events, for [`perfetto`].
    pub fn keep(mut self, events: usize) -> Self {
        self.events = events;
        self
    }

    fn resident(&self, shape: &Shape) -> u32 {
        Occupancy::of(shape.kernel, shape.waves, shape.lds)
            .workgroups
            .max(1)
    }

    /// The time of a launch of which `traces` were recorded; `None` if there are none.
    pub fn estimate(&self, shape: &Shape, traces: &[Trace]) -> Option<Estimate> {
        if traces.is_empty() {
            return None;
        }
        let gpu = self.gpu;
        let offset = shape.kernel.descriptor.accum_offset() as u16;
        let code = program::prepare(shape.code, offset);
        // The busiest compute unit has the long ones, where some end at once.
        let mut traces: Vec<&Trace> = traces.iter().collect();
        traces.sort_by_key(|t| std::cmp::Reverse(t.wave_instructions()));
        let traces = &traces;
        let sharing = Sharing::of(traces);
        let active = u64::from(gpu.cus).min(shape.workgroups) as u32;
        let share = shape.workgroups.div_ceil(u64::from(gpu.cus));
        let resident = self.resident(shape);
        let work = |workgroups, events| Work {
            code: &code,
            traces,
            sharing: &sharing,
            path: Path::new(&gpu, active, shape.footprint),
            workgroups,
            resident,
            events,
        };
        // Beyond this, a workgroup more costs what the last ones did.
        let (short, long) = (2 * u64::from(resident), 4 * u64::from(resident));
        let modelled = share.min(long);
        let run = cu::run(&work(modelled, self.events));
        let mut clocks = run.clocks as f64;
        if share > long {
            let less = cu::run(&work(short, 0)).clocks;
            let marginal = run.clocks.saturating_sub(less) as f64 / (long - short) as f64;
            clocks += marginal * (share - long) as f64;
        }
        let per = |lines: u64| (lines * machine::LINE) as f64 / modelled as f64;
        Some(Estimate {
            gpu,
            modelled_us: clocks * self.fit.scale / (gpu.ghz * 1e3) + self.fit.launch_us,
            clocks,
            share,
            resident,
            modelled_workgroups: modelled,
            l2_bytes: per(run.traffic.l2_lines),
            far_bytes: per(run.traffic.far_lines),
            sites: run.sites,
            events: run.events,
        })
    }
}
