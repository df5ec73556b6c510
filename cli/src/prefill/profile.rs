//! `deltawave profile`: counters of the kernels of a prefill or of its backward on the simulator, and modelled times.

use std::fmt::Write as _;

use deltawave::prefill::CHUNK;
use deltawave::runtime::Backend;
use deltawave_lab::safetensors_io::PrefillFile;
use deltawave_sim::cost::Class;
use deltawave_sim::count::roofline::{self, Point};
use deltawave_sim::count::{Busy, Totals};
use deltawave_sim::gpu::Gpu;
use deltawave_sim::occupancy::Occupancy;

use super::args::ProfileArgs;
use super::backward::{BackwardRun, refuse};
use super::{PrefillRun, options, refuse_overwriting};
use crate::driver::{self, Done, Operation, limit_threads};
use crate::failure::Failure;
use crate::report::{Figures, Report, figures, pretty};
use crate::table::{Table, bytes, count};

/// Runs what the arguments ask for.
pub fn run(args: &ProfileArgs) -> Result<Report, Failure> {
    let prefill = &args.prefill;
    if prefill.run.backend == Backend::Hip || prefill.run.repeat > 1 {
        let why =
            "profile counts one run on the simulator; --backend hip and --repeat cannot be used";
        return Err(Failure::wrong(why));
    }
    if prefill.ranks.ranks.is_some() {
        let why = "profile counts the prefill of one device; --ranks cannot be used";
        return Err(Failure::wrong(why));
    }
    refuse_overwriting(prefill, args.roofline.as_ref())?;
    limit_threads(&prefill.run);
    let run = PrefillRun::new(prefill)?;
    if prefill.backward {
        refuse(&run)?;
        return count_one(BackwardRun(run), args);
    }
    count_one(run, args)
}

/// An operation that is counted.
trait Counted: Operation {
    /// The operation's name in the title.
    const TITLE: &'static str;
    /// The inputs of the prefill.
    fn inputs(data: &Self::Data) -> &PrefillFile;
    /// Operations of the dense products.
    fn flops(inputs: &PrefillFile) -> f64;
}

impl Counted for PrefillRun<'_> {
    const TITLE: &'static str = "prefill";

    fn inputs(data: &Self::Data) -> &PrefillFile {
        data
    }

    fn flops(inputs: &PrefillFile) -> f64 {
        inputs.t_form_flops(CHUNK)
    }
}

impl Counted for BackwardRun<'_> {
    const TITLE: &'static str = "backward of prefill";

    fn inputs(data: &Self::Data) -> &PrefillFile {
        data.inputs()
    }

    fn flops(inputs: &PrefillFile) -> f64 {
        inputs.backward_flops(CHUNK)
    }
}

/// Runs an operation and reports its counters.
fn count_one<O: Counted>(operation: O, args: &ProfileArgs) -> Result<Report, Failure> {
    let done = driver::execute(operation, &options(&args.prefill, Some(args.gpu)))?;
    let profile = Profile::new(args.gpu, &done);
    if let Some(path) = &args.roofline {
        let written = std::fs::write(path, profile.roofline());
        written.map_err(Failure::io("--roofline", path))?;
    }
    Ok(Report {
        json: pretty(&profile.figures()),
        text: profile.text(),
        objections: done.verdict.map(|v| v.objections).unwrap_or_default(),
    })
}

/// The counters of an operation, kernel by kernel.
struct Profile<'a> {
    gpu: Gpu,
    name: &'static str,
    title: &'static str,
    data: &'a PrefillFile,
    /// Pairs of a chunk and a value head.
    chunk_heads: u64,
    /// Inputs, outputs and states, each once.
    minimal_bytes: f64,
    /// Products of the T-form.
    t_form_flops: f64,
    kernels: Vec<Kernel>,
    total: Totals,
}

#[derive(Default)]
struct Kernel {
    name: String,
    workgroups: u64,
    waves: u64,
    vgprs: u32,
    occupancy: Option<Occupancy>,
    totals: Totals,
    modelled_us: f64,
}

impl<'a> Profile<'a> {
    /// Sums the launches of one run by kernel.
    fn new<O: Counted>(gpu: Gpu, done: &'a Done<O>) -> Self {
        let data = O::inputs(&done.data);
        let mut kernels: Vec<Kernel> = Vec::new();
        let mut total = Totals::default();
        for launch in &done.ran.counted {
            let (name, stats) = (launch.kernel().name(), &launch.stats);
            let known = kernels.iter().position(|k| k.name == name);
            let at = known.unwrap_or(kernels.len());
            if known.is_none() {
                kernels.push(Kernel {
                    name: name.to_owned(),
                    vgprs: launch.kernel().descriptor.vgprs(),
                    occupancy: stats.counts.as_ref().map(|c| c.occupancy),
                    ..Default::default()
                });
            }
            let kernel = &mut kernels[at];
            kernel.totals += &launch.totals();
            kernel.workgroups += stats.workgroups;
            kernel.waves += stats.waves;
            kernel.modelled_us += launch.estimate(gpu).map_or(0.0, |e| e.modelled_us);
            total += &launch.totals();
        }
        Profile {
            gpu,
            name: O::NAME,
            title: O::TITLE,
            data,
            chunk_heads: (data.chunks(CHUNK).count() * data.value_heads) as u64,
            minimal_bytes: done.operation.minimal_bytes(&done.data) as f64,
            t_form_flops: O::flops(data),
            kernels,
            total,
        }
    }

    /// The least time that any implementation needs.
    fn roofline_us(&self) -> f64 {
        let memory = self.minimal_bytes / self.gpu.hbm;
        memory.max(self.t_form_flops / self.gpu.bf16()) * 1e6
    }

    /// Modelled microseconds of all kernels.
    fn modelled_us(&self) -> f64 {
        self.kernels.iter().map(|k| k.modelled_us).sum()
    }

    /// Figures for each pair of a chunk and a value head.
    fn per_chunk_head(&self) -> [(&'static str, f64); 3] {
        let share = |n: u64| n as f64 / self.chunk_heads.max(1) as f64;
        let t = &self.total;
        [
            ("wave_instructions", share(t.wave_instructions)),
            ("mfma_clk", share(t.mfma_clk)),
            ("valu_clk", share(t.valu_clk)),
        ]
    }

    fn figures(&self) -> Figures {
        let d = self.data;
        let kernels: Vec<Figures> = self.kernels.iter().map(|k| k.figures(&self.gpu)).collect();
        figures! {
            operation: self.name,
            gpu: self.gpu.name,
            tokens: d.tokens,
            sequences: d.sequences(),
            key_heads: d.key_heads,
            value_heads: d.value_heads,
            chunk_heads: self.chunk_heads,
            kernels: kernels,
            total: counters(&self.total, self.modelled_us(), &self.gpu),
            per_chunk_head: Figures::from_iter(self.per_chunk_head()),
            minimal_bytes: self.minimal_bytes,
            t_form_flops: self.t_form_flops,
            roofline_us: self.roofline_us(),
        }
    }

    /// The tables.
    fn text(&self) -> String {
        let d = self.data;
        let sequences = d.sequences();
        let mut out = format!(
            "Gated DeltaNet {}, {} tokens in {sequences} sequences, heads {}/{}: counted for {}\n\n",
            self.title, d.tokens, d.key_heads, d.value_heads, self.gpu.name
        );
        let mut table = Table::new(
            1,
            &[
                "kernel",
                "workgroups",
                "waves/SIMD",
                "limit",
                "wave instr.",
                "MFMA clk",
                "VALU clk",
                "acc moves",
                "LDS clk",
                "conflicts",
                "HBM unique",
                "L2 fill",
            ],
        );
        for k in &self.kernels {
            let (waves, limit) = match k.occupancy {
                Some(o) => (o.waves_per_simd().to_string(), o.limit.name()),
                None => Default::default(),
            };
            let head = [k.name.clone(), count(k.workgroups), waves, limit.to_owned()];
            table.row(head.into_iter().chain(cells(&k.totals)));
        }
        if self.kernels.len() > 1 {
            let head = ["total", "", "", ""].map(str::to_owned);
            table.row(head.into_iter().chain(cells(&self.total)));
        }
        let _ = writeln!(out, "{table}");
        let [instructions, matrix, vector] = self.per_chunk_head().map(|(_, n)| count(n as u64));
        let _ = writeln!(
            out,
            "  for each of {} chunks x value heads: {instructions} wave instructions, {matrix} MFMA clocks, {vector} VALU \
             clocks",
            count(self.chunk_heads)
        );
        let titles = ["us", "modelled", "matrix", "vector", "LDS", "HBM"];
        let mut times = Table::new(1, &titles);
        let rows = (self.kernels.iter()).map(|k| (k.name.as_str(), k.modelled_us, &k.totals));
        for (name, us, totals) in rows.chain([("total", self.modelled_us(), &self.total)]) {
            let units = Busy::new(totals, &self.gpu).units().map(|(_, us)| us);
            let cells = [us].into_iter().chain(units).map(|us| format!("{us:.1}"));
            times.row([name.to_owned()].into_iter().chain(cells));
        }
        let _ = writeln!(
            out,
            "\n{times}\n  modelled is not measured; the other columns are how long each kind of unit is busy, without waiting."
        );
        let _ = writeln!(
            out,
            "  roofline {:.1} us, {:.0}% of the modelled time: {} at least at {:.1} TB/s, {:.1} GFLOP of the T-form at {:.0} TFLOP/s",
            self.roofline_us(),
            100.0 * self.roofline_us() / self.modelled_us().max(1e-9),
            bytes(self.minimal_bytes as u64),
            self.gpu.hbm / 1e12,
            self.t_form_flops / 1e9,
            self.gpu.bf16() / 1e12
        );
        out
    }

    /// A diagram as SVG.
    fn roofline(&self) -> String {
        let point = |k: &Kernel| Point {
            name: k.name.clone(),
            flops: k.totals.mfma_flops as f64,
            bytes: k.totals.traffic.unique_bytes as f64,
            least_us: Busy::new(&k.totals, &self.gpu).most().1,
            modelled_us: Some(k.modelled_us),
        };
        let points: Vec<Point> = self.kernels.iter().map(point).collect();
        roofline::svg(&self.gpu, &points)
    }
}

impl Kernel {
    fn figures(&self, gpu: &Gpu) -> Figures {
        let mut figures = figures! {
            name: self.name,
            launches: self.totals.launches,
            workgroups: self.workgroups,
            waves: self.waves,
            vgprs: self.vgprs,
        };
        let o = self.occupancy;
        figures.add("workgroups_per_cu", o.map(|o| o.workgroups));
        figures.add("waves_per_simd", o.map(|o| o.waves_per_simd()));
        figures.add("occupancy_limit", o.map(|o| o.limit.name()));
        figures.and(counters(&self.totals, self.modelled_us, gpu))
    }
}

/// The counters, and how long the units are busy.
fn counters(totals: &Totals, modelled_us: f64, gpu: &Gpu) -> Figures {
    let classes = Class::ALL.map(|c| (c.name(), totals.of_class(c)));
    Figures::from_iter(totals.figures()).and(figures! {
        classes: Figures::from_iter(classes),
        modelled_us: modelled_us,
        busy_us: Figures::from_iter(Busy::new(totals, gpu).units()),
    })
}

/// The columns that kernels and their sum share.
fn cells(t: &Totals) -> [String; 8] {
    let v = &t.vector;
    let conflicts = 100.0 * v.lds_conflict_clk as f64 / v.lds_clk.max(1) as f64;
    [
        count(t.wave_instructions),
        count(t.mfma_clk),
        count(t.valu_clk),
        count(t.of_class(Class::Accvgpr)),
        count(v.lds_clk),
        format!("{conflicts:.1}%"),
        bytes(t.traffic.unique_bytes),
        bytes(t.traffic.l2_fill_bytes),
    ]
}
