//! What is said about a decode: one JSON object, or tables.

use std::fmt::Write as _;

use deltawave::code_objects::is_ptx;
use deltawave::decode::Decode;
use deltawave::runtime::{Backend, Context};
use deltawave::types::StateLayout;
use serde::Serialize;

use super::args::DecodeArgs;
use super::{Outcome, Verdict, Workload};
use crate::resources::{self, Resources, cell};
use crate::simulator::time_line;
use crate::table::{Table, bytes, count};
use crate::time::Times;

/// Everything that is known about a decode that ran.
#[derive(Serialize)]
pub struct Report {
    backend: &'static str,
    library: String,
    runtime: String,
    device: String,
    arch: String,
    model: Option<&'static str>,
    tp: Option<usize>,
    tokens: usize,
    sequences: usize,
    dtype: &'static str,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    raw_gates: bool,
    l2norm: bool,
    state_layout: &'static str,
    state_dtype: &'static str,
    verify: bool,
    minimal_bytes: usize,
    checked: bool,
    passed: Option<bool>,
    o_rms_ratio: Option<f64>,
    o_rms_ratio_limit: Option<f64>,
    state_rms_ratio: Option<f64>,
    state_rms_ratio_limit: Option<f64>,
    repeat: u32,
    kernel_seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    times: Option<Times>,
    wave_instructions: Option<u64>,
    kernels: Vec<Kernel>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counts: Option<Counts>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    causes: Vec<String>,
    #[serde(skip)]
    nvidia: bool,
}

#[derive(Serialize)]
struct Kernel {
    launches: u64,
    wave_instructions: Option<u64>,
    seconds: Option<f64>,
    #[serde(flatten)]
    resources: Resources,
}

/// What the simulator counted, set against a GPU.
#[derive(Serialize)]
struct Counts {
    gpu: &'static str,
    workgroups: u64,
    hbm_read_bytes: u64,
    hbm_write_bytes: u64,
    l2_fill_bytes: u64,
    /// What is read and what is written, times [`Report::minimal_bytes`].
    hbm_ratio: f64,
    valu_clk: u64,
    modelled_us: f64,
    /// The minimal bytes at the GPU's bandwidth.
    least_us: f64,
}

const FAILED: &str = "the result is further from the reference than allowed";

impl Report {
    pub(super) fn new(
        args: &DecodeArgs,
        context: &Context,
        plan: &Decode,
        w: &Workload,
        outcome: &Outcome,
        verdict: Option<Verdict>,
    ) -> Self {
        let (s, device) = (&w.spec, context.device());
        let known = resources::of_context(context);
        let simulated = context.backend() == Backend::Simulator;
        let kernel = Kernel {
            launches: outcome.simulated.map_or(1, |s| s.launches),
            wave_instructions: outcome.simulated.map(|s| s.wave_instructions),
            seconds: outcome.simulated.map(|s| s.seconds),
            resources: (known.into_iter().find(|r| r.name == plan.kernel()))
                .unwrap_or_else(|| Resources::unknown(plan.kernel())),
        };
        let minimal_bytes = w.minimal_bytes();
        let ratio = |n: u64| n as f64 / minimal_bytes.max(1) as f64;
        let counts = args.count.zip(outcome.counted.as_ref());
        let counts = counts.map(|(gpu, launch)| {
            let totals = launch.totals();
            Counts {
                gpu: gpu.name,
                workgroups: launch.stats.workgroups,
                hbm_read_bytes: totals.traffic.read_bytes,
                hbm_write_bytes: totals.traffic.write_bytes,
                l2_fill_bytes: totals.traffic.l2_fill_bytes,
                hbm_ratio: ratio(totals.traffic.read_bytes + totals.traffic.write_bytes),
                valu_clk: totals.valu_clk,
                modelled_us: launch.estimate(gpu).map_or(0.0, |e| e.modelled_us),
                least_us: minimal_bytes as f64 / gpu.hbm * 1e6,
            }
        });
        let passed = verdict.map(|v| v.passed());
        let failed = verdict.filter(|v| !v.passed());
        Report {
            backend: context.backend().name(),
            library: context.hip().library().to_owned(),
            runtime: context.runtime(),
            device: device.name.clone(),
            arch: device.arch.clone(),
            model: args.model.map(|m| m.name),
            tp: args.model.map(|_| args.tp),
            tokens: w.rows(),
            sequences: w.batch,
            dtype: s.dtype.name(),
            key_heads: s.key_heads,
            value_heads: s.value_heads,
            key_dim: s.key_dim,
            value_dim: s.value_dim,
            raw_gates: w.gate_inputs.is_some(),
            l2norm: s.qk_l2norm,
            state_layout: match w.layout {
                StateLayout::KeyMajor => "key-major",
                StateLayout::ValueMajor => "value-major",
            },
            state_dtype: w.state_dtype.name(),
            verify: w.verifies,
            minimal_bytes,
            checked: verdict.is_some(),
            passed,
            o_rms_ratio: verdict.map(|v| v.o),
            o_rms_ratio_limit: verdict.map(|v| v.o_limit),
            state_rms_ratio: verdict.map(|v| v.state),
            state_rms_ratio_limit: verdict.map(|v| v.state_limit),
            repeat: args.repeat,
            kernel_seconds: outcome.seconds,
            times: outcome.times.clone(),
            wave_instructions: kernel.wave_instructions.filter(|_| simulated),
            kernels: vec![kernel],
            counts,
            error: failed.map(|_| FAILED),
            causes: failed.map(|v| vec![judgement(&v)]).unwrap_or_default(),
            nvidia: is_ptx(&device.arch),
        }
    }

    /// Whether nothing was found wrong.
    pub fn passed(&self) -> bool {
        self.passed != Some(false)
    }

    /// What was found wrong, then how.
    pub fn objections(&self) -> Vec<String> {
        let error = self.error.iter().map(|e| (*e).to_owned());
        error.chain(self.causes.iter().cloned()).collect()
    }

    /// The tables.
    pub fn text(&self) -> String {
        let mut out = String::new();
        let of = self.model.map(|m| format!(" of {m}")).unwrap_or_default();
        let _ = writeln!(
            out,
            "Decode{of}: {} sequences of {} tokens, {} and {} heads of {} and {}, {}, states {} {}\n",
            self.sequences,
            self.tokens / self.sequences,
            self.key_heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
            self.dtype,
            self.state_dtype,
            self.state_layout
        );
        let mut place = Table::new(2, &[]);
        place.row(["runtime".to_owned(), self.runtime.clone()]);
        place.row(["device".to_owned(), self.device.clone()]);
        place.row(["arch".to_owned(), self.arch.clone()]);
        let _ = writeln!(out, "{place}");
        let registers = if self.nvidia { "registers" } else { "VGPRs" };
        let titles = [
            "kernel",
            "launches",
            registers,
            "spills",
            "wave instructions",
        ];
        let mut table = Table::new(1, &titles);
        for k in &self.kernels {
            let r = &k.resources;
            let instructions = k.wave_instructions.map_or("-".to_owned(), count);
            let launches = k.launches.to_string();
            table.row([
                r.name.clone(),
                launches,
                cell(r.vgprs),
                cell(r.spills),
                instructions,
            ]);
        }
        let _ = writeln!(out, "{table}");
        if let Some(counts) = &self.counts {
            let _ = writeln!(out, "{}", counts.text(self.minimal_bytes));
        }
        if let (Some(o), Some(o_limit), Some(state), Some(state_limit)) = (
            self.o_rms_ratio,
            self.o_rms_ratio_limit,
            self.state_rms_ratio,
            self.state_rms_ratio_limit,
        ) {
            let _ = writeln!(
                out,
                "  check  o {o:.2e} off (at most {o_limit:.2e}), states {state:.2e} (at most {state_limit:.2e})\n"
            );
        }
        let _ = writeln!(out, "{}", time_line(self.backend, self.kernel_seconds));
        if let Some(times) = &self.times {
            let _ = write!(out, "\n{}", times.text());
        }
        out
    }
}

fn judgement(v: &Verdict) -> String {
    format!(
        "o is {:.2e} off, at most {:.2e} is allowed; the states are {:.2e} off, at most {:.2e} is allowed",
        v.o, v.o_limit, v.state, v.state_limit
    )
}

impl Counts {
    fn text(&self, minimal_bytes: usize) -> String {
        format!(
            "  counted for {}: {} workgroups; {} read and {} written, {:.4} of the minimal {}\n  modelled, not measured: {:.1} us; \
             the minimal bytes alone take {:.1} us\n",
            self.gpu,
            self.workgroups,
            bytes(self.hbm_read_bytes),
            bytes(self.hbm_write_bytes),
            self.hbm_ratio,
            bytes(minimal_bytes as u64),
            self.modelled_us,
            self.least_us
        )
    }
}
