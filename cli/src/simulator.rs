//! The simulator, where it is what commands run on.

use deltawave::runtime::{Backend, Context};
use deltawave_sim::launch::Record;
use deltawave_sim::timing::SAMPLE;

use crate::failure::Failure;
use crate::workload::usage_of;

/// What a command's flags ask of it.
pub struct Wanted {
    /// `--threads`.
    pub threads: Option<u16>,
    /// `--time`, which it refuses.
    pub times: bool,
    /// `--count`.
    pub counts: bool,
}

/// Sets it up for a command, if the context is on it.
pub fn configure(command: &str, context: &Context, wanted: &Wanted) -> Result<(), Failure> {
    if context.backend() != Backend::Simulator {
        return Ok(());
    }
    if wanted.times {
        let why = "--time measures a GPU, and this runs on the simulator, whose times are those of this host";
        return Err(usage_of(command, why.to_owned()));
    }
    let mut options = deltawave_sim::hip::options();
    options.threads = wanted.threads.map(usize::from).or(options.threads);
    if wanted.counts {
        options.count = true;
        options.record = Record::Some(SAMPLE);
    }
    deltawave_sim::hip::set_options(options);
    Ok(())
}

/// The line of a report that says how long the kernels took.
pub fn time_line(backend: &str, seconds: f64) -> String {
    match backend == Backend::Simulator.name() {
        true => format!("  time  {seconds:.2} s: simulated on this host, not a GPU time"),
        false => format!("  time  {:.1} us on the device", seconds * 1e6),
    }
}
