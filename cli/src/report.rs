//! What is said about a prefill: one JSON object, or tables.

use std::fmt::Write as _;

use deltawave::runtime::{Backend, Context};
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave_lab::metrics::{Comparison, HeadComparison};
use deltawave_lab::safetensors_io::{FileBeta, FileGate};
use serde::Serialize;

use crate::args::PrefillArgs;
use crate::check::{Judged, Verdict};
use crate::reported::Reported;
use crate::resources::{self, Resources, cell};
use crate::run::{Outcome, StateFormat};
use crate::states::{PoolLine, Resumed, SnapshotLine};
use crate::table::{Table, bytes, count};
use crate::time::Times;
use crate::workload::Workload;

/// Everything that is known about a prefill that ran.
#[derive(Serialize)]
pub struct Report {
    backend: &'static str,
    library: String,
    runtime: String,
    device: String,
    arch: String,
    mfma_mode: Option<&'static str>,
    model: Option<&'static str>,
    tp: Option<usize>,
    input: Option<String>,
    tokens: usize,
    sequences: usize,
    batch: &'static str,
    dtype: &'static str,
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
    head_map: &'static str,
    qk_l2norm: bool,
    scale: f32,
    neg_eigval: bool,
    state_layout: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pool: Option<PoolLine>,
    #[serde(skip_serializing_if = "Option::is_none")]
    snapshots: Option<SnapshotLine>,
    tensors: Vec<TensorLine>,
    workspace_bytes: usize,
    checked: bool,
    passed: Option<bool>,
    o_rms_ratio: Option<f64>,
    o_max_abs: Option<f64>,
    state_rms_ratio: Option<f64>,
    state_max_abs: Option<f64>,
    unfused_o_rms_ratio: Option<f64>,
    unfused_state_rms_ratio: Option<f64>,
    o_rms_ratio_limit: Option<f64>,
    state_rms_ratio_limit: Option<f64>,
    o_worst: Option<Worst>,
    state_worst: Option<Worst>,
    non_finite: Option<usize>,
    repeat: u32,
    kernel_seconds: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    times: Option<Times>,
    wave_instructions: Option<u64>,
    kernels: Vec<Kernel>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    causes: Vec<String>,
    #[serde(skip)]
    judged: Option<[Judged; 2]>,
    #[serde(skip)]
    lengths: String,
}

#[derive(Serialize)]
struct TensorLine {
    name: &'static str,
    shape: Vec<usize>,
    dtype: &'static str,
}

#[derive(Serialize)]
struct Worst {
    sequence: usize,
    head: usize,
    rms_ratio: f64,
    max_abs: f64,
}

impl From<HeadComparison> for Worst {
    fn from(h: HeadComparison) -> Self {
        Worst {
            sequence: h.sequence,
            head: h.head,
            rms_ratio: h.comparison.rms_ratio,
            max_abs: h.comparison.max_abs,
        }
    }
}

#[derive(Serialize)]
struct Kernel {
    launches: u64,
    wave_instructions: Option<u64>,
    seconds: Option<f64>,
    #[serde(flatten)]
    resources: Resources,
}

const FAILED: &str = "the result is further from the reference than allowed";

impl Report {
    /// Collects it.
    pub fn new(
        args: &PrefillArgs,
        context: &Context,
        workload: &Workload,
        format: StateFormat,
        outcome: &Outcome,
        resumed: Option<Resumed>,
        verdict: Option<&Verdict>,
    ) -> Self {
        let (d, s) = (&workload.data, &workload.spec);
        let device = context.device();
        let simulated = context.backend() == Backend::Simulator;
        let known = resources::of_context(context);
        let kernels: Vec<Kernel> = (outcome.kernels.iter())
            .map(|k| Kernel {
                launches: k.launches,
                wave_instructions: k.simulated.map(|s| s.wave_instructions),
                seconds: k.simulated.map(|s| s.seconds),
                resources: (known.iter().find(|r| r.name == k.name).cloned())
                    .unwrap_or_else(|| Resources::unknown(k.name)),
            })
            .collect();
        let judged = verdict.map(|v| v.tensors);
        let passed = verdict.map(|v| v.objections.is_empty());
        let pooled = |i: usize, f: fn(&Comparison) -> f64| judged.map(|t| f(&t[i].pooled));
        let unfused = |i: usize| judged.map(|t| t[i].unfused.rms_ratio);
        Report {
            backend: context.backend().name(),
            library: context.hip().library().to_owned(),
            runtime: context.runtime(),
            device: device.name.clone(),
            arch: device.arch.clone(),
            mfma_mode: simulated.then(mfma_mode),
            model: args.model.map(|m| m.name),
            tp: args.model.map(|_| args.tp),
            input: args.input.as_ref().map(|p| p.display().to_string()),
            tokens: d.tokens,
            sequences: workload.sequences(),
            batch: if workload.dense.is_some() {
                "dense"
            } else {
                "packed"
            },
            dtype: s.dtype.name(),
            key_heads: d.key_heads,
            value_heads: d.value_heads,
            key_dim: d.key_dim,
            value_dim: d.value_dim,
            head_map: match s.head_map {
                HeadMap::Grouped => "grouped",
                HeadMap::Tiled => "tiled",
            },
            qk_l2norm: s.qk_l2norm,
            scale: s.scale.unwrap_or_else(|| (s.key_dim as f32).powf(-0.5)),
            neg_eigval: workload.neg_eigval,
            state_layout: match format.layout {
                StateLayout::KeyMajor => "key-major",
                StateLayout::ValueMajor => "value-major",
            },
            pool: PoolLine::new(args, outcome),
            snapshots: SnapshotLine::new(args, outcome, resumed),
            tensors: tensor_lines(workload, format),
            workspace_bytes: outcome.workspace_bytes,
            checked: verdict.is_some(),
            passed,
            o_rms_ratio: pooled(0, |c| c.rms_ratio),
            o_max_abs: pooled(0, |c| c.max_abs),
            state_rms_ratio: pooled(1, |c| c.rms_ratio),
            state_max_abs: pooled(1, |c| c.max_abs),
            unfused_o_rms_ratio: unfused(0),
            unfused_state_rms_ratio: unfused(1),
            o_rms_ratio_limit: judged.map(|t| t[0].limit),
            state_rms_ratio_limit: judged.map(|t| t[1].limit),
            o_worst: judged.and_then(|t| t[0].worst).map(Worst::from),
            state_worst: judged.and_then(|t| t[1].worst).map(Worst::from),
            non_finite: judged.map(|t| t.iter().map(|j| j.pooled.non_finite).sum()),
            repeat: args.repeat,
            kernel_seconds: outcome.seconds,
            times: outcome.times.clone(),
            wave_instructions: kernels.iter().map(|k| k.wave_instructions).sum(),
            kernels,
            error: (passed == Some(false)).then_some(FAILED),
            causes: verdict.map(|v| v.objections.clone()).unwrap_or_default(),
            judged,
            lengths: lengths(workload),
        }
    }

    fn tensor_table(&self) -> Table {
        let mut table = Table::new(3, &["tensor", "shape", "dtype"]);
        // Tensors that look alike share a line.
        let mut lines: Vec<(String, &TensorLine)> = Vec::new();
        for t in &self.tensors {
            match lines.last_mut() {
                Some((names, last)) if (&last.shape, last.dtype) == (&t.shape, t.dtype) => {
                    *names += ", ";
                    *names += t.name;
                }
                _ => lines.push((t.name.to_owned(), t)),
            }
        }
        for (names, t) in lines {
            table.row([names, format!("{:?}", t.shape), t.dtype.to_owned()]);
        }
        table.row([
            "workspace".to_owned(),
            bytes(self.workspace_bytes as u64),
            String::new(),
        ]);
        table
    }

    fn backend_text(&self) -> String {
        match self.mfma_mode {
            Some(mode) => format!(
                "simulator: the {} code objects, executed on this host; MFMA mode {mode}",
                self.arch
            ),
            None => self.runtime.clone(),
        }
    }

    fn kernel_table(&self) -> Table {
        let simulated = self.mfma_mode.is_some();
        let nvidia = deltawave::code_objects::is_ptx(&self.arch);
        let mut titles = vec!["kernel", "launches"];
        titles.extend(match nvidia {
            true => &["registers", "shared", "local"][..],
            false => &["VGPRs", "AGPRs", "SGPRs", "LDS", "spills"],
        });
        if simulated {
            titles.extend(["wave instructions", "seconds"]);
        }
        let mut table = Table::new(1, &titles);
        for k in &self.kernels {
            let r = &k.resources;
            let lds = r.lds_bytes.map_or("-".to_owned(), |n| bytes(n.into()));
            let mut row = vec![r.name.clone(), k.launches.to_string()];
            row.extend(match nvidia {
                true => vec![cell(r.vgprs), lds, cell(r.private_bytes)],
                false => vec![
                    cell(r.vgprs),
                    cell(r.agprs),
                    cell(r.sgprs),
                    lds,
                    cell(r.spills),
                ],
            });
            row.extend(k.wave_instructions.map(count));
            row.extend(k.seconds.map(|s| format!("{s:.3}")));
            table.row(row);
        }
        table
    }

    fn time_text(&self) -> String {
        let runs = match self.repeat {
            1 => String::new(),
            n => format!(", fastest of {n} runs"),
        };
        let Some(instructions) = self.wave_instructions else {
            let us = self.kernel_seconds * 1e6;
            return format!("  time  {us:.1} us on the device{runs}");
        };
        let rate = instructions as f64 / self.kernel_seconds.max(1e-9) / 1e6;
        format!(
            "  time  {:.2} s{runs}: simulated on this host, not a GPU time ({rate:.1} million wave-instructions/s)",
            self.kernel_seconds
        )
    }
}

fn error_table(judged: &[Judged; 2]) -> Table {
    let titles = [
        "error against f64",
        "rms ratio",
        "unfused form",
        "limit",
        "max abs",
        "worst head",
        "of sequence, head",
        "",
    ];
    let mut table = Table::new(1, &titles);
    let number = |x: f64| format!("{x:.2e}");
    for j in judged {
        let (ratio, place) = match j.worst {
            Some(w) => (
                number(w.comparison.rms_ratio),
                format!("{}, {}", w.sequence, w.head),
            ),
            None => Default::default(),
        };
        let verdict = if j.objection().is_some() {
            "FAILED"
        } else {
            "ok"
        };
        table.row([
            j.name.to_owned(),
            number(j.pooled.rms_ratio),
            number(j.unfused.rms_ratio),
            number(j.limit),
            number(j.pooled.max_abs),
            ratio,
            place,
            verdict.to_owned(),
        ]);
    }
    table
}

fn tensor_lines(w: &Workload, format: StateFormat) -> Vec<TensorLine> {
    let d = &w.data;
    let mut lines = Vec::new();
    let mut line = |name, shape: &[usize], dtype: Dtype| {
        lines.push(TensorLine {
            name,
            shape: shape.to_vec(),
            dtype: dtype.name(),
        });
    };
    let rows: Vec<usize> = w.dense.map_or(vec![d.tokens], |dense| dense.to_vec());
    let over = |tail: &[usize]| [&rows[..], tail].concat();
    let keys = over(&[d.key_heads, d.key_dim]);
    let values = over(&[d.value_heads, d.value_dim]);
    let scalars = over(&[d.value_heads]);
    let states = match format.layout {
        StateLayout::KeyMajor => [w.sequences(), d.value_heads, d.key_dim, d.value_dim],
        StateLayout::ValueMajor => [w.sequences(), d.value_heads, d.value_dim, d.key_dim],
    };
    line("q", &keys, d.q.dtype);
    line("k", &keys, d.k.dtype);
    line("v", &values, d.v.dtype);
    line("o", &values, w.spec.dtype);
    match &d.gate {
        FileGate::None => {}
        FileGate::Log(g) => line("g", &scalars, g.dtype),
        FileGate::Raw { a, a_log, dt_bias } => {
            line("A_log", &[d.value_heads], a_log.dtype);
            if let Some(dt_bias) = dt_bias {
                line("dt_bias", &[d.value_heads], dt_bias.dtype);
            }
            line("a", &scalars, a.dtype);
        }
    }
    match &d.beta {
        FileBeta::One => {}
        FileBeta::Given(beta) => line("beta", &scalars, beta.dtype),
        FileBeta::Logits(b) => line("b", &scalars, b.dtype),
    }
    if let Some(initial) = &d.initial_state {
        line("initial_state", &states, initial.dtype);
    }
    line("final_state", &states, format.dtype);
    lines
}

/// How many tokens in which sequences.
fn lengths(w: &Workload) -> String {
    const SHOWN: usize = 12;
    let tokens = w.data.tokens;
    let tokens_text = match tokens {
        1 => "1 token".to_owned(),
        n => format!("{n} tokens"),
    };
    let lengths: Vec<String> = (w.data.cu_seqlens.windows(2))
        .take(SHOWN + 1)
        .map(|w| (w[1] - w[0]).to_string())
        .collect();
    match (w.dense, w.sequences()) {
        (Some([b, n]), _) => format!("{tokens_text}, dense, {b} sequences of {n}"),
        (None, 1) => format!("{tokens_text}, one sequence"),
        (None, n) if n <= SHOWN => {
            format!("{tokens_text}, {n} sequences of {}", lengths.join(", "))
        }
        (None, n) => format!(
            "{tokens_text}, {n} sequences of {}, ...",
            lengths[..SHOWN].join(", ")
        ),
    }
}

/// The simulator's matrix arithmetic.
pub fn mfma_mode() -> &'static str {
    match deltawave_sim::hip::options().mfma {
        deltawave_sim::exec::MfmaMode::Fast => "fast",
        deltawave_sim::exec::MfmaMode::Exact => "exact",
    }
}

impl Reported for Report {
    fn found(&self) -> (Option<&str>, &[String]) {
        (self.error, &self.causes)
    }

    fn text(&self) -> String {
        let mut out = String::new();
        let title = match (&self.model, &self.input) {
            (Some(model), _) if self.tp == Some(1) => format!(" of {model}"),
            (Some(model), _) => format!(" of {model}, one of {} devices", self.tp.unwrap_or(1)),
            (None, Some(path)) => format!(" of {path}"),
            (None, None) => String::new(),
        };
        let _ = writeln!(out, "Gated DeltaNet prefill{title}: {}\n", self.lengths);
        let _ = writeln!(out, "{}", self.tensor_table());
        let mut place = Table::new(2, &[]);
        place.row(["backend".to_owned(), self.backend_text()]);
        place.row(["device".to_owned(), self.device.clone()]);
        place.row(["arch".to_owned(), self.arch.clone()]);
        let _ = writeln!(out, "{place}");
        let _ = writeln!(out, "{}", self.kernel_table());
        if let Some(judged) = &self.judged {
            let _ = writeln!(out, "{}", error_table(judged));
        }
        if let Some(pool) = &self.pool {
            let _ = writeln!(out, "  pool  {}\n", pool.text());
        }
        if let Some(snapshots) = &self.snapshots {
            let _ = writeln!(out, "  snapshots  {}\n", snapshots.text());
        }
        let _ = writeln!(out, "{}", self.time_text());
        if let Some(times) = &self.times {
            let _ = write!(out, "\n{}", times.text());
        }
        out
    }
}
