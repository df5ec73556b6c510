//! What the reports of commands have in common.

use std::fmt::Write as _;

use deltawave::code_objects::is_ptx;
use deltawave_sim::hip::KernelStatistics;
use serde::Serialize;

use crate::resources::{Resources, cell};
use crate::simulator::time_line;
use crate::table::{Table, count};
use crate::time::Times;

/// What a command says in the end: one JSON object, or tables.
pub trait Reported: Serialize {
    /// The tables.
    fn text(&self) -> String;

    /// What was found wrong, and how; neither where nothing was.
    fn found(&self) -> (Option<&str>, &[String]);

    /// [`Reported::found`] as lines.
    fn objections(&self) -> Vec<String> {
        let (error, causes) = self.found();
        let error = error.into_iter().map(str::to_owned);
        error.chain(causes.iter().cloned()).collect()
    }
}

/// A kernel of an operation.
#[derive(Serialize)]
pub struct Kernel {
    pub launches: u64,
    pub wave_instructions: Option<u64>,
    pub seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modelled_us: Option<f64>,
    #[serde(flatten)]
    pub resources: Resources,
}

impl Kernel {
    /// One of those that are `known`, with what the simulator says of it, if it ran there.
    pub fn new(known: &[Resources], name: &str, simulated: Option<KernelStatistics>) -> Self {
        let resources = known.iter().find(|r| r.name == name).cloned();
        Kernel {
            launches: simulated.map_or(1, |s| s.launches),
            wave_instructions: simulated.map(|s| s.wave_instructions),
            seconds: simulated.map(|s| s.seconds),
            modelled_us: None,
            resources: resources.unwrap_or_else(|| Resources::unknown(name)),
        }
    }
}

/// The tables of where an operation ran and of its kernels.
pub fn place_and_kernels(runtime: &str, device: &str, arch: &str, kernels: &[Kernel]) -> String {
    let mut place = Table::new(2, &[]);
    for (what, which) in [("runtime", runtime), ("device", device), ("arch", arch)] {
        place.row([what.to_owned(), which.to_owned()]);
    }
    let registers = if is_ptx(arch) { "registers" } else { "VGPRs" };
    let modelled = kernels.iter().any(|k| k.modelled_us.is_some());
    let titles = [
        "kernel",
        "launches",
        registers,
        "spills",
        "wave instructions",
        "modelled us",
    ];
    let mut table = Table::new(1, &titles[..titles.len() - usize::from(!modelled)]);
    for k in kernels {
        let mut row = vec![
            k.resources.name.clone(),
            k.launches.to_string(),
            cell(k.resources.vgprs),
            cell(k.resources.spills),
            k.wave_instructions.map_or("-".to_owned(), count),
        ];
        if modelled {
            row.push(
                k.modelled_us
                    .map_or("-".to_owned(), |us| format!("{us:.1}")),
            );
        }
        table.row(row);
    }
    format!("{place}\n{table}\n")
}

/// How long the kernels took, and what was measured.
pub fn end(backend: &str, seconds: f64, times: Option<&Times>) -> String {
    let mut out = time_line(backend, seconds) + "\n";
    if let Some(times) = times {
        let _ = write!(out, "\n{}", times.text());
    }
    out
}
