//! What is said about a convolution: one JSON object, or tables.

use std::fmt::Write as _;

use deltawave::conv::{Activation, Conv, ConvStateLayout};
use deltawave::runtime::{Backend, Context};
use serde::Serialize;

use super::args::ConvArgs;
use super::{GATE_LIMIT, LEAST_EQUAL_SHARE, MOST_ULPS, Outcome, Verdict, Workload};
use crate::reported::{Kernel, Reported, end, place_and_kernels};
use crate::resources;
use crate::table::bytes;
use crate::time::Times;

/// Everything that is known about a convolution that ran.
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
    channels: usize,
    width: usize,
    bias: bool,
    activation: &'static str,
    qk_l2norm: bool,
    gates: bool,
    layout: &'static str,
    initial_state: bool,
    state_layout: &'static str,
    minimal_bytes: usize,
    checked: bool,
    passed: Option<bool>,
    equal_share: Option<f64>,
    equal_share_limit: Option<f64>,
    max_ulps: Option<u32>,
    max_ulps_limit: Option<u32>,
    wrong_states: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gate_error: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    gate_error_limit: Option<f64>,
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
    hbm_unique_bytes: u64,
    l2_fill_bytes: u64,
    /// Times [`Report::minimal_bytes`].
    hbm_unique_ratio: f64,
    l2_fill_ratio: f64,
    valu_clk: u64,
    modelled_us: f64,
    /// The minimal bytes at the GPU's bandwidth.
    least_us: f64,
}

const FAILED: &str = "the result is further from the reference than allowed";

impl Report {
    pub(super) fn new(
        args: &ConvArgs,
        context: &Context,
        plan: &Conv,
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
                hbm_unique_bytes: totals.traffic.unique_bytes,
                l2_fill_bytes: totals.traffic.l2_fill_bytes,
                hbm_unique_ratio: ratio(totals.traffic.unique_bytes),
                l2_fill_ratio: ratio(totals.traffic.l2_fill_bytes),
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
            tokens: w.tokens,
            sequences: w.sequences(),
            dtype: s.dtype.name(),
            key_heads: s.key_heads,
            value_heads: s.value_heads,
            key_dim: s.key_dim,
            value_dim: s.value_dim,
            channels: s.total_channels(),
            width: s.width,
            bias: w.bias.is_some(),
            activation: match s.activation {
                Activation::None => "none",
                Activation::Silu => "silu",
            },
            qk_l2norm: s.qk_l2norm,
            gates: w.gates.is_some(),
            layout: w.layout.name(),
            initial_state: w.state.is_some(),
            state_layout: match w.state_layout {
                ConvStateLayout::ChannelMajor => "channel-major",
                ConvStateLayout::TokenMajor => "token-major",
            },
            minimal_bytes,
            checked: verdict.is_some(),
            passed,
            equal_share: verdict.map(|v| v.out.equal_share()),
            equal_share_limit: verdict.map(|_| LEAST_EQUAL_SHARE),
            max_ulps: verdict.map(|v| v.out.max_ulps),
            max_ulps_limit: verdict.map(|_| MOST_ULPS),
            wrong_states: verdict.map(|v| v.wrong_states),
            gate_error: verdict.and_then(|v| v.gates),
            gate_error_limit: verdict.and_then(|v| v.gates).map(|_| GATE_LIMIT),
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
            "Convolution{of}: {} tokens in {} sequences, {} channels, width {}{}{}, {} rows, {}\n",
            self.tokens,
            self.sequences,
            self.channels,
            self.width,
            if self.qk_l2norm { ", norms" } else { "" },
            if self.gates { ", gates" } else { "" },
            self.layout,
            self.dtype
        );
        out += &place_and_kernels(&self.runtime, &self.device, &self.arch, &self.kernels);
        if let Some(counts) = &self.counts {
            let _ = writeln!(out, "{}", counts.text(self.minimal_bytes));
        }
        if let (Some(equal), Some(ulps), Some(wrong)) =
            (self.equal_share, self.max_ulps, self.wrong_states)
        {
            let _ = writeln!(
                out,
                "  check  {:.4}% of the outputs are the reference rounded once, the others within {ulps} ulp; {wrong} \
                 elements of the states differ\n",
                100.0 * equal
            );
        }
        if let Some(error) = self.gate_error {
            let _ = writeln!(
                out,
                "  check  g and beta are within {error:.1e} of the reference, relative to it\n"
            );
        }
        out + &end(self.backend, self.kernel_seconds, self.times.as_ref())
    }
}

fn judgement(v: &Verdict) -> String {
    let gates = v.gates.map_or(String::new(), |error| {
        format!("; g and beta are {error:.1e} off, at most {GATE_LIMIT:.0e} is allowed")
    });
    format!(
        "{:.4}% of the outputs are the reference rounded once, at least {:.1}% must be; the largest distance is {} ulp, \
         at most {MOST_ULPS} is allowed; {} elements of the states differ{gates}",
        100.0 * v.out.equal_share(),
        100.0 * LEAST_EQUAL_SHARE,
        v.out.max_ulps,
        v.wrong_states
    )
}

impl Counts {
    fn text(&self, minimal_bytes: usize) -> String {
        format!(
            "  counted for {}: {} moved ({:.3} of the minimal {}), {} into the dies ({:.3})\n  modelled, not measured: \
             {:.1} us; the minimal bytes alone take {:.1} us\n",
            self.gpu,
            bytes(self.hbm_unique_bytes),
            self.hbm_unique_ratio,
            bytes(minimal_bytes as u64),
            bytes(self.l2_fill_bytes),
            self.l2_fill_ratio,
            self.modelled_us,
            self.least_us
        )
    }
}
