//! `wavesim model`: models the time of a launch on a GPU.

use std::fmt::Write as _;
use std::path::PathBuf;

use deltawave_sim::disasm;
use deltawave_sim::gpu::Gpu;
use deltawave_sim::launch::{Launch, Record};
use deltawave_sim::sanitize::Checks;
use deltawave_sim::timing::{Estimate, Fit, Model, SAMPLE, Shape, Stall, perfetto};
use serde_json::json;

use crate::failure::Failure;
use crate::run;

/// Command line of `model`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    run: run::Args,
    /// GPU to model: mi300x, mi325x or mi308x
    #[arg(long, default_value = "mi300x", value_parser = gpu)]
    gpu: Gpu,
    /// Leave out the parameters that were fitted to published times
    #[arg(long)]
    unfitted: bool,
    /// Write the waves of one compute unit to FILE, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
    /// Print at most N instructions, those that waves waited for most
    #[arg(long, value_name = "N", default_value_t = 10)]
    top: usize,
}

/// Finds the GPU that `--gpu` names.
pub fn gpu(name: &str) -> Result<Gpu, String> {
    Gpu::named(name).ok_or_else(|| {
        let names: Vec<&str> = Gpu::ALL.iter().map(|g| g.name).collect();
        format!("known are {}", names.join(", "))
    })
}

/// Maximum number of events in a trace for Perfetto.
const EVENTS: usize = 200_000;

/// Records a few workgroups and models the launch.
pub fn text(args: &Args) -> Result<String, Failure> {
    let mut model = Model::new(args.gpu);
    if args.unfitted {
        model = model.with(Fit::NONE);
    }
    if args.perfetto.is_some() {
        model = model.keep(EVENTS);
    }
    let mut options = args.run.options(Checks::NONE);
    options.xccs = args.gpu.xcds;
    options.record = Record::Only(SAMPLE);
    run::launch(&args.run, options, |launch, done| {
        let shape = shape(launch);
        let Some(estimate) = model.estimate(&shape, &done.stats.recorded) else {
            return Err(Failure::NoWorkgroup);
        };
        if let Some(path) = &args.perfetto {
            std::fs::write(path, perfetto(&estimate, launch.code.program())).map_err(|source| {
                Failure::Write {
                    path: path.clone(),
                    source,
                }
            })?;
        }
        Ok(if args.run.json() {
            crate::json(&figures(launch, &estimate))
        } else {
            report(launch, &estimate, args.top)
        })
    })
}

/// Dimensions of a launch, as the model needs them.
pub fn shape<'a>(launch: &Launch<'a>) -> Shape<'a> {
    Shape {
        code: launch.code,
        kernel: launch.kernel,
        workgroups: launch.grid.iter().map(|n| u64::from(*n)).product(),
        waves: launch.block.iter().product::<u32>().div_ceil(64),
        lds: launch.kernel.descriptor.group_segment_fixed_size + launch.dynamic_lds,
        footprint: launch
            .memory
            .extents()
            .iter()
            .map(|e| e.end - e.start)
            .sum(),
    }
}

fn figures(launch: &Launch, e: &Estimate) -> serde_json::Value {
    json!({
        "kernel": launch.kernel.name(),
        "gpu": e.gpu.name,
        "modelled_us": e.modelled_us,
        "clocks": e.clocks,
        "workgroups_of_a_cu": e.share,
        "resident_workgroups": e.resident,
        "modelled_workgroups": e.modelled_workgroups,
        "l2_bytes_of_a_workgroup": e.l2_bytes,
        "far_bytes_of_a_workgroup": e.far_bytes,
        "stall_clocks": stalls(e).into_iter().collect::<serde_json::Map<_, _>>(),
    })
}

fn stalls(e: &Estimate) -> Vec<(String, serde_json::Value)> {
    let sum = |s: Stall| {
        e.sites
            .iter()
            .map(|site| site.stalls[s as usize])
            .sum::<u64>()
    };
    Stall::ALL
        .into_iter()
        .map(|s| (s.name().into(), sum(s).into()))
        .collect()
}

fn report(launch: &Launch, e: &Estimate, top: usize) -> String {
    let mut out = format!(
        "{}: {:.1} us on {}, modelled: {:.0} clocks for {} workgroups of a compute unit, {} at a time\n",
        launch.kernel.name(),
        e.modelled_us,
        e.gpu.name,
        e.clocks,
        e.share,
        e.resident
    );
    let _ = writeln!(
        out,
        "a workgroup brings {:.0} bytes into L1 and {:.0} into L2",
        e.l2_bytes, e.far_bytes
    );
    let program = launch.code.program();
    let mut order: Vec<usize> = (0..e.sites.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(e.sites[*at].stalls.iter().sum::<u64>()));
    let total: u64 = e.sites.iter().flat_map(|s| s.stalls).sum();
    let _ = writeln!(out, "\n  waited       hits  why         instruction");
    for at in order.into_iter().take(top) {
        let site = &e.sites[at];
        let waited: u64 = site.stalls.iter().sum();
        let (Some(inst), Some(&offset)) = (program.insts.get(at), program.offsets.get(at)) else {
            continue;
        };
        let why = Stall::ALL
            .into_iter()
            .max_by_key(|s| site.stalls[*s as usize]);
        let _ = writeln!(
            out,
            "  {:5.1}% {:10}  {:10}  {:#06x} {}",
            100.0 * waited as f64 / total.max(1) as f64,
            site.hits,
            why.map_or("", Stall::name),
            offset,
            disasm::text(inst, u64::from(offset))
        );
    }
    out
}
