//! `wavesim profile`: counts a launch, and models its time.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use deltawave_sim::code_object::Kernel;
use deltawave_sim::cost::Class;
use deltawave_sim::count::roofline::{self, Point};
use deltawave_sim::count::{self, Busy, Counts, Totals};
use deltawave_sim::disasm;
use deltawave_sim::gpu::Gpu;
use deltawave_sim::inst::Program;
use deltawave_sim::launch::{Launch, Record, Stats};
use deltawave_sim::sanitize::Checks;
use deltawave_sim::timing::{Estimate, Model, SAMPLE, Shape, Stall, perfetto};
use serde_json::{Value, json};

use crate::failure::Failure;
use crate::{model, run};

/// Text of `profile --help` after the options.
pub const EXAMPLES: &str = "\
Arguments and outputs are those of wavesim run; see its help.

Clocks are sums over all waves: busy clocks of a SIMD's matrix, vector and scalar
unit, or of a compute unit's LDS, without any waiting.
'at least' spreads them evenly over the GPU. Memory counts lines of 128 bytes,
each once for the launch (HBM) and once for each die (L2 fill). Modelled figures
say so: see wavesim model, and docs/results/timing-model.md for their error.

Examples:
  wavesim profile saxpy.co --grid 4 --block 256 --arg zeros:4096 \\
    --arg in:x.bin --arg f32:2.5 --arg i32:1000
  wavesim profile gemm.co --kernel gemm --gpu mi308x --annotate \\
    --roofline gemm.svg --grid 8,8 --block 256 --arg ...";

/// Command line of `profile`.
#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    run: run::Args,
    /// GPU to compare the counts with: mi300x, mi325x or mi308x
    #[arg(long, default_value = "mi300x", value_parser = model::gpu)]
    gpu: Gpu,
    /// Print the executed functions with the number of executions of each instruction
    #[arg(long)]
    annotate: bool,
    /// Write a roofline diagram to FILE, as SVG
    #[arg(long, value_name = "FILE")]
    roofline: Option<PathBuf>,
    /// Write the modelled waves of one compute unit to FILE, for ui.perfetto.dev
    #[arg(long, value_name = "FILE")]
    perfetto: Option<PathBuf>,
}

/// Maximum number of events in a trace for Perfetto.
const EVENTS: usize = 200_000;

/// Runs the launch and returns the report.
pub fn text(args: &Args) -> Result<String, Failure> {
    let mut options = args.run.options(Checks::NONE);
    options.count = true;
    options.record = Record::Some(SAMPLE);
    options.xccs = args.gpu.xcds;
    run::launch(&args.run, options, |launch, done| {
        done.write()?;
        let (Some(counts), stats) = (done.stats.counts.as_deref(), &done.stats) else {
            return Ok(String::new());
        };
        let program = launch.code.program();
        let totals = Totals::new(counts, program);
        let busy = Busy::new(&totals, &args.gpu);
        let mut model = Model::new(args.gpu);
        if args.perfetto.is_some() {
            model = model.keep(EVENTS);
        }
        let shape = Shape {
            footprint: totals.traffic.unique_bytes,
            ..model::shape(launch)
        };
        let Some(estimate) = model.estimate(&shape, &stats.recorded) else {
            return Err(Failure::NoWorkgroup);
        };
        if let Some(path) = &args.roofline {
            let point = Point {
                name: launch.kernel.name().into(),
                flops: totals.mfma_flops as f64,
                bytes: totals.traffic.unique_bytes as f64,
                least_us: busy.most().1,
                modelled_us: Some(estimate.modelled_us),
            };
            write(path, &roofline::svg(&args.gpu, &[point]))?;
        }
        if let Some(path) = &args.perfetto {
            write(path, &perfetto(&estimate, program))?;
        }
        if args.run.json() {
            let modelled = Some((args.gpu.name, estimate.modelled_us));
            let (grid, block) = (launch.grid, launch.block);
            let text = count::json(launch.kernel, grid, block, stats, &totals, modelled);
            let mut value: Value = serde_json::from_str(&text).unwrap_or_default();
            value["seconds"] = done.seconds.into();
            value["busy_us"] = (busy.units().into_iter())
                .map(|(k, v)| (k, json!(v)))
                .collect();
            value["instructions"] = instructions(program, counts, &estimate);
            return Ok(crate::json(&value));
        }
        let mut out = table(launch.kernel, stats, counts, &totals);
        times(&mut out, &busy, &estimate);
        if args.annotate {
            annotate(&mut out, launch, counts, &estimate);
        }
        Ok(out)
    })
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    std::fs::write(path, text).map_err(|source| Failure::Write {
        path: path.into(),
        source,
    })
}

/// Modelled clocks that a wave waits for an instruction, on average, and the most frequent reason.
fn waiting(estimate: &Estimate, at: usize) -> Option<(f64, Stall)> {
    let site = estimate.sites.get(at).filter(|s| s.hits > 0)?;
    let waited: u64 = site.stalls.iter().sum();
    let why = (Stall::ALL.into_iter()).max_by_key(|s| site.stalls[*s as usize])?;
    (waited > 0).then(|| (waited as f64 / site.hits as f64, why))
}

/// The executed instructions as JSON.
fn instructions(program: &Program, counts: &Counts, estimate: &Estimate) -> Value {
    let executed = (program.insts.iter().zip(&program.offsets).zip(&counts.hits)).enumerate();
    let executed = executed.filter(|(_, (_, hits))| **hits > 0);
    executed
        .map(|(at, ((inst, &pc), &hits))| {
            let mut value = json!({
                "pc": pc,
                "text": disasm::text(inst, pc.into()),
                "hits": hits,
            });
            if let Some(site) = estimate.sites.get(at).filter(|s| s.hits > 0) {
                let share = |s: Stall| site.stalls[s as usize] as f64 / site.hits as f64;
                let stalls = Stall::ALL.into_iter().filter(|s| share(*s) > 0.0);
                value["modelled_stall_clk"] = stalls.map(|s| (s.name(), json!(share(s)))).collect();
            }
            if let Some(s) = counts.site(at) {
                for (name, n) in [
                    ("lds_clk", s.lds_clk),
                    ("lds_conflict_clk", s.lds_conflict_clk),
                    ("lds_bytes", s.lds_bytes),
                    ("load_bytes", s.load_bytes),
                    ("store_bytes", s.store_bytes),
                    ("lines_64", s.lines_64),
                    ("lines_128", s.lines_128),
                    ("scratch_bytes", s.scratch_bytes),
                ] {
                    if n > 0 {
                        value[name] = n.into();
                    }
                }
            }
            value
        })
        .collect()
}

fn table(kernel: &Kernel, stats: &Stats, counts: &Counts, t: &Totals) -> String {
    let o = &counts.occupancy;
    let mut out = format!(
        "{}: {} workgroups, {} waves; a compute unit holds {} workgroups, {} waves on a SIMD: limited by {}\n\n",
        kernel.name(),
        stats.workgroups,
        stats.waves,
        o.workgroups,
        o.waves_per_simd(),
        o.limit.name()
    );
    let mut line = |name: &str, n: u64, more: String| {
        let _ = writeln!(out, "{}", format!("{name:<22} {n:>16}  {more}").trim_end());
    };
    line("wave-instructions", t.wave_instructions, String::new());
    for class in Class::ALL {
        let n = t.of_class(class);
        if n > 0 {
            let share = percent(n, t.wave_instructions);
            line(&format!("  {}", class.name()), n, share);
        }
    }
    line("matrix clocks", t.mfma_clk, String::new());
    let trans = format!("of these {} transcendental", t.trans_clk);
    line("vector clocks", t.valu_clk, trans);
    line("scalar clocks", t.salu_clk, String::new());
    let v = &t.vector;
    line("LDS clocks", v.lds_clk, String::new());
    let share = percent(v.lds_conflict_clk, v.lds_clk);
    line("  bank conflicts", v.lds_conflict_clk, share);
    let bytes = format!("{} bytes", v.lds_bytes);
    line("LDS accesses", v.lds_accesses, bytes);
    line("bytes loaded", v.load_bytes, String::new());
    line("bytes stored", v.store_bytes, String::new());
    if v.scratch_bytes > 0 {
        line("bytes of scratch", v.scratch_bytes, String::new());
    }
    line("64-byte lines", v.lines_64, "each access on its own".into());
    line("128-byte lines", v.lines_128, String::new());
    let m = &t.traffic;
    let parts = format!("{} read, {} written", m.read_bytes, m.write_bytes);
    line("HBM unique bytes", m.unique_bytes, parts);
    line("L2 fill bytes", m.l2_fill_bytes, String::new());
    out
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1}%", 100.0 * part as f64 / whole.max(1) as f64)
}

fn times(out: &mut String, busy: &Busy, e: &Estimate) {
    let units: Vec<String> = (busy.units().iter())
        .map(|(name, us)| format!("{name} {us:.3}"))
        .collect();
    let (name, us) = busy.most();
    let gpu = e.gpu.name;
    let _ = writeln!(
        out,
        "\nat least {us:.3} us on {gpu} (its {name} units are busy, nothing waits): {} us",
        units.join(", ")
    );
    let _ = writeln!(
        out,
        "{:.1} us on {gpu}, modelled: {} workgroups on the busiest compute unit, {} at a time",
        e.modelled_us, e.share, e.resident
    );
}

/// Prints the functions that were executed, with counts for each instruction.
fn annotate(out: &mut String, launch: &Launch, counts: &Counts, estimate: &Estimate) {
    let program = launch.code.program();
    let _ = writeln!(
        out,
        "\nLDS clocks, those in conflicts, and 128-byte lines: of an access. Clocks that a wave waits, and why: modelled.\n\
         {:>12} {:>6} {:>6} {:>6} {:>8} {:<10}  pc        instruction",
        "hits", "LDS", "confl", "lines", "waits", ""
    );
    let mut functions: Vec<_> = launch.code.functions().iter().collect();
    functions.sort_by_key(|f| f.offset);
    let index = |offset: u32| program.offsets.partition_point(|o| *o < offset);
    for (i, f) in functions.iter().enumerate() {
        let next = functions.get(i + 1).map_or(u32::MAX, |n| n.offset);
        let end = if f.size > 0 { f.offset + f.size } else { next };
        let range = index(f.offset)..index(end);
        if counts.hits[range.clone()].iter().all(|h| *h == 0) {
            continue;
        }
        let _ = writeln!(out, "{}:", f.name);
        for at in range {
            let (pc, hits) = (program.offsets[at], counts.hits[at]);
            let mut columns = [String::new(), String::new(), String::new()];
            if let Some(s) = counts.site(at).filter(|_| hits > 0) {
                let each = |n: u64| format!("{:.1}", n as f64 / hits as f64);
                if s.lds_clk > 0 {
                    columns[0] = each(s.lds_clk);
                    columns[1] = percent(s.lds_conflict_clk, s.lds_clk);
                }
                if s.lines_128 > 0 {
                    columns[2] = each(s.lines_128);
                }
            }
            let [lds, conflicts, lines] = columns;
            let (waits, why) = match waiting(estimate, at) {
                Some((clocks, why)) => (format!("{clocks:.1}"), why.name()),
                None => Default::default(),
            };
            let text = disasm::text(&program.insts[at], pc.into());
            let hits = if hits > 0 {
                hits.to_string()
            } else {
                ".".into()
            };
            let _ = writeln!(
                out,
                "{hits:>12} {lds:>6} {conflicts:>6} {lines:>6} {waits:>8} {why:<10}  {pc:#08x}  {text}"
            );
        }
    }
}
