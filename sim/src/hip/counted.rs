//! Launches with counters ([`Options::count`](crate::launch::Options::count)). They are kept for this program, or
//! written to a file for users of programs that do not know the simulator.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::code_object::{CodeObject, Kernel};
use crate::count::{self, Totals};
use crate::gpu::Gpu;
use crate::launch::Stats;
use crate::timing::{Estimate, Model, Shape};

/// A launch with counters.
#[derive(Clone, Debug)]
pub struct CountedLaunch {
    /// The code object.
    pub code: Arc<CodeObject>,
    /// Index of the kernel in `code`.
    pub index: usize,
    /// Number of workgroups in x, y, z.
    pub grid: [u32; 3],
    /// Work-items per workgroup in x, y, z.
    pub block: [u32; 3],
    /// LDS per workgroup in bytes.
    pub lds: u32,
    /// Results and counters.
    pub stats: Stats,
    /// Host time in seconds.
    pub seconds: f64,
}

impl CountedLaunch {
    /// The kernel.
    pub fn kernel(&self) -> &Kernel {
        &self.code.kernels()[self.index]
    }

    /// Counters, summed over all instructions.
    pub fn totals(&self) -> Totals {
        match &self.stats.counts {
            Some(counts) => Totals::new(counts, self.code.program()),
            None => Totals::default(),
        }
    }

    /// Modelled time on `gpu`. `None` unless workgroups were recorded for a GPU with the same number of dies.
    pub fn estimate(&self, gpu: Gpu) -> Option<Estimate> {
        let counts = self.stats.counts.as_ref()?;
        let shape = Shape {
            code: &self.code,
            kernel: self.kernel(),
            workgroups: self.stats.workgroups,
            waves: counts.occupancy.waves,
            lds: self.lds,
            footprint: counts.traffic.unique_bytes,
        };
        Model::new(gpu).estimate(&shape, &self.stats.recorded)
    }

    /// The launch as one JSON object on one line, with the modelled time if `gpu` is given.
    pub fn json(&self, gpu: Option<Gpu>) -> String {
        let modelled = gpu.and_then(|gpu| self.estimate(gpu));
        count::json(
            self.kernel(),
            self.grid,
            self.block,
            &self.stats,
            &self.totals(),
            modelled.map(|e| (e.gpu.name, e.modelled_us)),
        )
    }
}

/// Destination of counted launches.
pub(super) enum Counted {
    /// Kept for [`super::take_counted_launches`].
    Kept(Vec<CountedLaunch>),
    /// Appended to this file as a line of JSON each, with modelled times if a GPU is given.
    Written(PathBuf, Option<Gpu>),
}

impl Counted {
    /// Reads the environment: `DELTAWAVE_SIM_PROFILE` names a file, `DELTAWAVE_SIM_GPU` a GPU.
    pub fn from_environment() -> Self {
        let gpu = || Gpu::named(&std::env::var("DELTAWAVE_SIM_GPU").ok()?);
        match std::env::var_os("DELTAWAVE_SIM_PROFILE") {
            Some(path) if !path.is_empty() => Counted::Written(path.into(), gpu()),
            _ => Counted::Kept(Vec::new()),
        }
    }

    pub fn add(&mut self, launch: CountedLaunch) {
        match self {
            Counted::Kept(launches) => launches.push(launch),
            Counted::Written(path, gpu) => {
                if let Err(error) = append(path, &launch.json(*gpu)) {
                    eprintln!("gfx942 simulator: {}: {error}", path.display());
                }
            }
        }
    }

    pub fn take(&mut self) -> Vec<CountedLaunch> {
        match self {
            Counted::Kept(launches) => std::mem::take(launches),
            Counted::Written(..) => Vec::new(),
        }
    }
}

fn append(path: &Path, line: &str) -> std::io::Result<()> {
    let mut options = std::fs::OpenOptions::new();
    let mut file = options.create(true).append(true).open(path)?;
    file.write_all(format!("{line}\n").as_bytes())
}
