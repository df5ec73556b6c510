//! What is said about a decode: one JSON object, or tables.

use std::fmt::Write as _;

use deltawave::decode::Decode;
use deltawave::runtime::{Backend, Context};
use deltawave::types::StateLayout;
use serde::Serialize;

use super::args::DecodeArgs;
use super::{Outcome, Verdict, Workload};
use crate::reported::{Kernel, Reported, end, place_and_kernels};
use crate::resources;
use crate::table::bytes;
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
        let kernel = Kernel::new(&known, plan.kernel(), outcome.simulated);
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
        }
    }
}

impl Reported for Report {
    fn found(&self) -> (Option<&str>, &[String]) {
        (self.error, &self.causes)
    }

    fn text(&self) -> String {
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
        out += &place_and_kernels(&self.runtime, &self.device, &self.arch, &self.kernels);
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
        out + &end(self.backend, self.kernel_seconds, self.times.as_ref())
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
