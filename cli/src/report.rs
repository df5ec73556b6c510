//! Reports of operations: JSON with the same frame for all, and tables.

use std::fmt::Write as _;

use deltawave::code_objects::is_nvidia;
use deltawave::model::Heads;
use deltawave::runtime::{Backend, Context};
use deltawave::types::Dtype;
use deltawave_sim::count::Totals;
use deltawave_sim::exec::MfmaMode;
use deltawave_sim::gpu::Gpu;
use deltawave_sim::hip::CountedLaunch;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

use crate::args::word;
use crate::driver::{Done, Operation, Options, Ran};
use crate::failure::Failure;
use crate::prefill::args::MFMA_MODES;
use crate::resources::{self, Resources, cell};
use crate::table::{Table, bytes, count};
use crate::time;

/// The cause that a check reports first.
const FAILED: &str = "the result is further from the reference than allowed";

/// Named values in the order in which they are printed.
#[derive(Default)]
pub struct Figures(pub Vec<(&'static str, Value)>);

impl Figures {
    /// Adds a value, unless there is none.
    pub fn add(&mut self, name: &'static str, value: Option<impl Serialize>) {
        self.0.extend(value.map(|value| (name, json!(value))));
    }

    /// These, then others.
    pub fn and(mut self, others: Figures) -> Self {
        self.0.extend(others.0);
        self
    }
}

impl<T: Serialize> FromIterator<(&'static str, T)> for Figures {
    fn from_iter<I: IntoIterator<Item = (&'static str, T)>>(pairs: I) -> Self {
        let figures = pairs.into_iter().map(|(name, value)| (name, json!(value)));
        Figures(figures.collect())
    }
}

impl Serialize for Figures {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

/// Makes [`Figures`] of `name: value` pairs.
macro_rules! figures {
    ($($name:ident: $value:expr),* $(,)?) => {
        $crate::report::Figures(vec![$((stringify!($name), serde_json::json!($value))),*])
    };
}
pub(crate) use figures;

/// The output of a command.
pub struct Report {
    /// One JSON object.
    pub json: String,
    /// Tables, for people.
    pub text: String,
    /// Failed checks, a summary first; empty if the command succeeded.
    pub objections: Vec<String>,
}

/// An operation's part of a report.
#[derive(Default)]
pub struct Description {
    /// The headline, without its first word and the model's name.
    pub title: [String; 2],
    /// Paragraphs before the kernels.
    pub tensors: String,
    pub figures: Figures,
    /// Paragraphs after the check.
    pub notes: Vec<String>,
}

/// The result of a check.
pub struct Verdict {
    /// Figures named by [`Operation::CHECKED`], and maybe more.
    pub figures: Figures,
    /// A paragraph, or a table.
    pub text: String,
    /// Reasons to fail; empty if the check passed.
    pub objections: Vec<String>,
}

/// Figures of an operation's heads.
pub fn head_figures(dtype: Dtype, heads: &Heads) -> Figures {
    figures! {
        dtype: dtype.name(),
        key_heads: heads.key,
        value_heads: heads.value,
        key_dim: heads.key_dim,
        value_dim: heads.value_dim,
    }
}

/// The outcome of a check.
pub type Checked = Result<Verdict, Failure>;

/// A value as text.
pub fn pretty(value: &impl Serialize) -> String {
    let mut text = serde_json::to_string_pretty(value).expect("reports have string keys");
    text.push('\n');
    text
}

/// One kernel of an operation.
#[derive(Serialize)]
struct Kernel {
    launches: u64,
    wave_instructions: Option<u64>,
    seconds: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    modelled_us: Option<f64>,
    #[serde(flatten)]
    resources: Resources,
}

impl Report {
    /// The report of an operation that ran.
    pub fn of<O: Operation>(done: &Done<O>, options: &Options) -> Self {
        let (context, ran, verdict) = (&done.context, &done.ran, done.verdict.as_ref());
        let description = done.operation.describe(&done.plan, &done.data);
        let kernels = kernels(context, ran, options.count);
        let minimal_bytes = done.operation.minimal_bytes(&done.data);
        let counts = (options.count).map(|gpu| counts(gpu, &ran.counted, minimal_bytes));
        let instructions: Option<u64> = kernels.iter().map(|k| k.wave_instructions).sum();
        let mut objections = verdict.map_or(Vec::new(), |v| v.objections.clone());
        let failed = !objections.is_empty();
        let device = context.device();
        let model = options.model.model;

        let head = figures! {
            backend: context.backend().name(),
            library: context.hip().library(),
            runtime: context.runtime(),
            device: device.name,
            arch: device.arch,
            model: model.map(|m| m.name),
            tp: model.map(|_| options.model.tp),
        };
        let mut all = head.and(description.figures).and(figures! {
            minimal_bytes: minimal_bytes,
            checked: verdict.is_some(),
            passed: verdict.map(|_| !failed),
        });
        match verdict {
            Some(verdict) => all.0.extend(verdict.figures.0.iter().cloned()),
            None => {
                all = all.and(
                    O::CHECKED
                        .split(' ')
                        .map(|name| (name, Value::Null))
                        .collect(),
                )
            }
        }
        all.add("repeat", Some(options.run.repeat));
        all.add("kernel_seconds", Some(ran.seconds));
        all.add("times", ran.times.as_ref());
        all.add("wave_instructions", Some(instructions));
        all.add("kernels", Some(&kernels));
        all.add("counts", counts.as_ref().map(|(figures, _)| figures));
        all.add("error", failed.then_some(FAILED));
        all.add("causes", failed.then_some(&objections));

        let mut text = String::new();
        let [operation, rest] = &description.title;
        let of = match (model, options.model.tp) {
            (None, _) => String::new(),
            (Some(model), 1) => format!(" of {}", model.name),
            (Some(model), tp) => format!(" of {}, one of {tp} devices", model.name),
        };
        let _ = writeln!(text, "{operation}{of}: {rest}\n");
        text += &description.tensors;
        let _ = writeln!(
            text,
            "{}\n{}",
            place(context),
            kernel_table(context, &kernels)
        );
        let counted = counts.map(|(_, text)| text);
        let checked = verdict.map(|verdict| verdict.text.clone());
        for paragraph in counted.into_iter().chain(checked).chain(description.notes) {
            let _ = writeln!(text, "{paragraph}");
        }
        text += &time_line(ran, options.run.repeat, instructions);
        if let Some(times) = &ran.times {
            let _ = write!(text, "\n{}", time::text(times));
        }
        if failed {
            objections.insert(0, FAILED.to_owned());
        }
        Report {
            json: pretty(&all),
            text,
            objections,
        }
    }
}

/// The kernels of a run. Where all launches were counted, launch `i` is of kernel `i`.
fn kernels(context: &Context, ran: &Ran, gpu: Option<Gpu>) -> Vec<Kernel> {
    let known = resources::of_context(context);
    let modelled = |i: usize| Some(ran.counted.get(i)?.estimate(gpu?)?.modelled_us);
    let kernels = ran.kernels.iter().enumerate();
    let kernel = |(i, (name, simulated)): (usize, &(&'static str, Option<_>))| {
        let resources = known.iter().find(|r| r.name == *name).cloned();
        let simulated: Option<deltawave_sim::hip::KernelStatistics> = *simulated;
        Kernel {
            launches: simulated.map_or(1, |s| s.launches),
            wave_instructions: simulated.map(|s| s.wave_instructions),
            seconds: simulated.map(|s| s.seconds),
            modelled_us: modelled(i),
            resources: resources.unwrap_or_else(|| Resources::unknown(name)),
        }
    };
    kernels.map(kernel).collect()
}

/// Figures and words of all launches, set against a GPU.
///
/// Unique bytes are lines that a launch touches, each once whether read or written, summed over the launches. Ratios are
/// multiples of the minimal bytes; `hbm_ratio` is of what is read and written. Times are sums over the kernels, without
/// gaps between them.
fn counts(gpu: Gpu, launches: &[CountedLaunch], minimal_bytes: usize) -> (Figures, String) {
    let mut totals = Totals::default();
    for launch in launches {
        totals += &launch.totals();
    }
    let t = &totals.traffic;
    let ratio = |n: u64| n as f64 / minimal_bytes.max(1) as f64;
    let hbm_ratio = ratio(t.read_bytes + t.write_bytes);
    let workgroups: u64 = launches.iter().map(|l| l.stats.workgroups).sum();
    let modelled = launches.iter().filter_map(|launch| launch.estimate(gpu));
    let modelled_us: f64 = modelled.map(|e| e.modelled_us).sum();
    let least_us = minimal_bytes as f64 / gpu.hbm * 1e6;
    let figures = figures! {
        gpu: gpu.name,
        workgroups: workgroups,
        hbm_unique_bytes: t.unique_bytes,
        hbm_read_bytes: t.read_bytes,
        hbm_write_bytes: t.write_bytes,
        l2_fill_bytes: t.l2_fill_bytes,
        hbm_unique_ratio: ratio(t.unique_bytes),
        hbm_ratio: hbm_ratio,
        l2_fill_ratio: ratio(t.l2_fill_bytes),
        valu_clk: totals.valu_clk,
        modelled_us: modelled_us,
        least_us: least_us,
    };
    let text = format!(
        "  counted for {}: {workgroups} workgroups; {} read and {} written, {hbm_ratio:.3} of the minimal {}; {} into \
         the dies\n  modelled, not measured: {modelled_us:.1} us; the minimal bytes alone take {least_us:.1} us\n",
        gpu.name,
        bytes(t.read_bytes),
        bytes(t.write_bytes),
        bytes(minimal_bytes as u64),
        bytes(t.l2_fill_bytes),
    );
    (figures, text)
}

/// Where an operation ran.
fn place(context: &Context) -> Table {
    let device = context.device();
    let backend = match context.backend() {
        Backend::Simulator => format!(
            "simulator: the {} code objects, executed on this host; MFMA mode {}",
            device.arch,
            mfma_mode()
        ),
        _ => context.runtime(),
    };
    let mut table = Table::new(2, &[]);
    table.row(["backend".to_owned(), backend]);
    table.row(["device".to_owned(), device.name.clone()]);
    table.row(["arch".to_owned(), device.arch.clone()]);
    table
}

fn kernel_table(context: &Context, kernels: &[Kernel]) -> Table {
    let nvidia = is_nvidia(&context.device().arch);
    let simulated = context.backend() == Backend::Simulator;
    let modelled = kernels.iter().any(|k| k.modelled_us.is_some());
    let mut titles = vec!["kernel", "launches"];
    titles.extend(match nvidia {
        true => &["registers", "shared", "local"][..],
        false => &["VGPRs", "AGPRs", "SGPRs", "LDS", "spills"],
    });
    if simulated {
        titles.extend(["wave instructions", "seconds"]);
    }
    titles.extend(modelled.then_some("modelled us"));
    let mut table = Table::new(1, &titles);
    for k in kernels {
        let r = &k.resources;
        let lds = r.lds_bytes.map_or("-".to_owned(), |n| bytes(n.into()));
        let mut row = vec![r.name.clone(), k.launches.to_string(), cell(r.vgprs)];
        row.extend(match nvidia {
            true => vec![lds, cell(r.private_bytes)],
            false => vec![cell(r.agprs), cell(r.sgprs), lds, cell(r.spills)],
        });
        row.extend(k.wave_instructions.map(count));
        row.extend(k.seconds.map(|s| format!("{s:.3}")));
        row.extend(k.modelled_us.map(|us| format!("{us:.1}")));
        table.row(row);
    }
    table
}

/// How long the kernels took.
fn time_line(ran: &Ran, repeat: u32, instructions: Option<u64>) -> String {
    let runs = match repeat {
        1 => String::new(),
        n => format!(", fastest of {n} runs"),
    };
    let Some(instructions) = instructions else {
        return format!("  time  {:.1} us on the device{runs}\n", ran.seconds * 1e6);
    };
    let rate = instructions as f64 / ran.seconds.max(1e-9) / 1e6;
    format!(
        "  time  {:.2} s{runs}: simulated on this host, not a GPU time ({rate:.1} million wave-instructions/s)\n",
        ran.seconds
    )
}

/// The simulator's matrix arithmetic.
pub fn mfma_mode() -> &'static str {
    let mode: MfmaMode = deltawave_sim::hip::options().mfma;
    word(MFMA_MODES, &mode)
}
