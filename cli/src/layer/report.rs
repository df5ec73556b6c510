//! What is said about a layer: one JSON object, or tables.

use std::fmt::Write as _;

use deltawave::layer::Layer;
use deltawave::norm::OutputGate;
use deltawave::runtime::{Backend, Context};
use deltawave::types::StateLayout;
use serde::Serialize;

use super::args::LayerArgs;
use super::{Outcome, Verdict, Workload};
use crate::reported::{Kernel, Reported, end, place_and_kernels};
use crate::resources;
use crate::table::bytes;
use crate::time::Times;

/// Everything that is known about a layer that ran.
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
    decodes: usize,
    dtype: &'static str,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    channels: usize,
    width: usize,
    neg_eigval: bool,
    output_gate: &'static str,
    layout: &'static str,
    initial_state: bool,
    state_layout: &'static str,
    state_dtype: &'static str,
    minimal_bytes: usize,
    workspace_bytes: usize,
    checked: bool,
    passed: Option<bool>,
    y_rms_ratio: Option<f64>,
    y_rms_ratio_limit: Option<f64>,
    state_rms_ratio: Option<f64>,
    state_rms_ratio_limit: Option<f64>,
    wrong_states: Option<usize>,
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

/// What the simulator counted in all launches, set against a GPU.
#[derive(Serialize)]
struct Counts {
    gpu: &'static str,
    /// Lines that a launch touches, once whether read or written, summed over the launches.
    hbm_unique_bytes: u64,
    l2_fill_bytes: u64,
    /// Of the kernels, one after the other, without what lies between them.
    modelled_us: f64,
    /// The minimal bytes at the GPU's bandwidth.
    least_us: f64,
}

const FAILED: &str = "the result is further from the reference than allowed";

impl Report {
    pub(super) fn new(
        args: &LayerArgs,
        context: &Context,
        plan: &Layer,
        w: &Workload,
        outcome: &Outcome,
        verdict: Option<Verdict>,
    ) -> Self {
        let (s, device) = (&w.spec, context.device());
        let known = resources::of_context(context);
        let simulated = context.backend() == Backend::Simulator;
        let modelled = |i: usize| {
            let launch = outcome.counted.get(i)?;
            Some(launch.estimate(args.count?)?.modelled_us)
        };
        let named = plan.kernels().into_iter().enumerate();
        let kernels: Vec<Kernel> = named
            .map(|(i, name)| {
                let statistics = outcome.simulated[i].filter(|_| simulated);
                Kernel {
                    modelled_us: modelled(i),
                    ..Kernel::new(&known, name, statistics)
                }
            })
            .collect();
        let minimal_bytes = w.minimal_bytes();
        let counts = args.count.map(|gpu| {
            let totals = outcome.counted.iter().map(|launch| launch.totals().traffic);
            let (unique, filled) = totals.fold((0, 0), |(unique, filled), t| {
                (unique + t.unique_bytes, filled + t.l2_fill_bytes)
            });
            Counts {
                gpu: gpu.name,
                hbm_unique_bytes: unique,
                l2_fill_bytes: filled,
                modelled_us: kernels.iter().filter_map(|k| k.modelled_us).sum(),
                least_us: minimal_bytes as f64 / gpu.hbm * 1e6,
            }
        });
        let failed = verdict.filter(|v| !v.passed());
        let instructions = kernels.iter().map(|k| k.wave_instructions);
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
            decodes: w.decodes,
            dtype: s.dtype.name(),
            key_heads: s.key_heads,
            value_heads: s.value_heads,
            key_dim: s.key_dim,
            value_dim: s.value_dim,
            channels: s.conv().total_channels(),
            width: s.width,
            neg_eigval: s.allow_neg_eigval,
            output_gate: match s.gate {
                OutputGate::Silu => "silu",
                OutputGate::Sigmoid => "sigmoid",
            },
            layout: w.layout.name(),
            initial_state: w.states.is_some(),
            state_layout: match w.state_layout {
                StateLayout::KeyMajor => "key-major",
                StateLayout::ValueMajor => "value-major",
            },
            state_dtype: w.state_dtype.name(),
            minimal_bytes,
            workspace_bytes: plan.workspace_bytes(),
            checked: verdict.is_some(),
            passed: verdict.map(|v| v.passed()),
            y_rms_ratio: verdict.map(|v| v.y),
            y_rms_ratio_limit: verdict.map(|v| v.y_limit),
            state_rms_ratio: verdict.map(|v| v.state),
            state_rms_ratio_limit: verdict.map(|v| v.state_limit),
            wrong_states: verdict.map(|v| v.wrong_states),
            repeat: args.repeat,
            kernel_seconds: outcome.seconds,
            times: outcome.times.clone(),
            wave_instructions: instructions.sum::<Option<u64>>().filter(|_| simulated),
            kernels,
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
            "Layer{of}: {} decodes, {} prefills, {} tokens in all, {} and {} heads of {} and {}, {}\n",
            self.decodes,
            self.sequences - self.decodes,
            self.tokens,
            self.key_heads,
            self.value_heads,
            self.key_dim,
            self.value_dim,
            self.dtype
        );
        out += &place_and_kernels(&self.runtime, &self.device, &self.arch, &self.kernels);
        if let Some(counts) = &self.counts {
            let _ = writeln!(
                out,
                "  counted for {}: {} of memory touched, summed over the kernels, {} into the dies\n  modelled, not measured: {:.1} us; the minimal {} \
                 alone take {:.1} us\n",
                counts.gpu,
                bytes(counts.hbm_unique_bytes),
                bytes(counts.l2_fill_bytes),
                counts.modelled_us,
                bytes(self.minimal_bytes as u64),
                counts.least_us
            );
        }
        if let (Some(y), Some(y_limit), Some(state), Some(state_limit), Some(wrong)) = (
            self.y_rms_ratio,
            self.y_rms_ratio_limit,
            self.state_rms_ratio,
            self.state_rms_ratio_limit,
            self.wrong_states,
        ) {
            let _ = writeln!(
                out,
                "  check  y {y:.2e} off (at most {y_limit:.2e}), states {state:.2e} (at most {state_limit:.2e}); {wrong} \
                 elements of the conv states differ\n"
            );
        }
        out + &end(self.backend, self.kernel_seconds, self.times.as_ref())
    }
}

fn judgement(v: &Verdict) -> String {
    format!(
        "y is {:.2e} off, at most {:.2e} is allowed; the states are {:.2e} off, at most {:.2e} is allowed; {} elements \
         of the conv states differ",
        v.y, v.y_limit, v.state, v.state_limit, v.wrong_states
    )
}
