//! Words and figures of a prefill and of its check, and its results as a file.

use deltawave::types::Dtype;
use deltawave_lab::judge::Judged;
use deltawave_lab::safetensors_io::{self, FileBeta, FileGate, Named, PrefillFile};
use serde::Serialize;
use serde_json::{Value, json};

use super::{Outcome, PrefillRun};
use crate::args::{HEAD_MAPS, STATE_LAYOUTS, word};
use crate::device::Results;
use crate::failure::Failure;
use crate::report::{Description, Figures, Verdict, figures, head_figures, mfma_mode};
use crate::table::{Table, bytes};

/// A tensor of the operation.
#[derive(Serialize)]
struct Line {
    name: &'static str,
    shape: Vec<usize>,
    dtype: &'static str,
}

impl PrefillRun<'_> {
    /// Title, figures and notes for the report.
    pub(super) fn description(&self, workspace_bytes: usize, d: &PrefillFile) -> Description {
        let (s, args) = (&self.spec, self.args);
        let input = args.input.as_ref().map(|path| path.display().to_string());
        let of = input
            .as_ref()
            .map_or(String::new(), |path| format!(" of {path}"));
        let lines = self.tensors(d);
        let scale = s.scale.unwrap_or_else(|| s.heads.default_scale());
        // As f32 is printed, not as the f64 that has its value.
        let scale: Option<f64> = scale.to_string().parse().ok();
        let mut figures = figures! {
            mfma_mode: self.outcome.simulated.then(mfma_mode),
            input: input,
            tokens: d.tokens,
            sequences: self.sequences(),
            batch: if self.dense.is_some() { "dense" } else { "packed" },
        }
        .and(head_figures(s.dtype, &s.heads))
        .and(figures! {
            head_map: word(HEAD_MAPS, &s.heads.map),
            qk_l2norm: s.qk_l2norm,
            scale: scale,
            neg_eigval: self.neg_eigval,
            state_layout: word(STATE_LAYOUTS, &args.state.state_layout),
        });
        let mut notes = Vec::new();
        for (name, part) in [
            ("pool", self.pool_figures()),
            ("snapshots", self.snapshot_figures()),
        ] {
            if let Some((value, text)) = part {
                figures.add(name, Some(value));
                notes.push(format!("  {name}  {text}\n"));
            }
        }
        let memory = figures! { tensors: lines, workspace_bytes: workspace_bytes };
        Description {
            title: [format!("Gated DeltaNet prefill{of}"), self.lengths()],
            tensors: format!("{}\n", table(&lines, workspace_bytes)),
            figures: figures.and(memory),
            notes,
        }
    }

    fn tensors(&self, d: &PrefillFile) -> Vec<Line> {
        let mut lines = Vec::new();
        let mut line = |name, shape: &[usize], dtype: Dtype| {
            lines.push(Line {
                name,
                shape: shape.to_vec(),
                dtype: dtype.name(),
            });
        };
        let rows: Vec<usize> = self.dense.map_or(vec![d.tokens], |dense| dense.to_vec());
        let over = |tail: &[usize]| [&rows[..], tail].concat();
        let keys = over(&[d.key_heads, d.key_dim]);
        let values = over(&[d.value_heads, d.value_dim]);
        let scalars = over(&[d.value_heads]);
        let states = self.states(self.sequences()).shape();
        line("q", &keys, d.q.dtype);
        line("k", &keys, d.k.dtype);
        line("v", &values, d.v.dtype);
        line("o", &values, self.spec.dtype);
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
        line("final_state", &states, self.args.state.state_dtype);
        lines
    }

    /// How many tokens in which sequences.
    fn lengths(&self) -> String {
        const SHOWN: usize = 12;
        let all = match self.tokens {
            1 => "1 token".to_owned(),
            n => format!("{n} tokens"),
        };
        let pairs = self.cu_seqlens.windows(2).take(SHOWN);
        let shown: Vec<String> = pairs.map(|w| (w[1] - w[0]).to_string()).collect();
        let shown = shown.join(", ");
        match (self.dense, self.sequences()) {
            (Some([b, n]), _) => format!("{all}, dense, {b} sequences of {n}"),
            (None, 1) => format!("{all}, one sequence"),
            (None, n) if n <= SHOWN => format!("{all}, {n} sequences of {shown}"),
            (None, n) => format!("{all}, {n} sequences of {shown}, ..."),
        }
    }

    /// Writes the results to the file of `--output`.
    pub(super) fn write_output(&self, results: &Results) -> Result<(), Failure> {
        let Some(path) = &self.args.output else {
            return Ok(());
        };
        let h = &self.spec.heads;
        let (o, state) = (&results["o"], &results["states"]);
        let shapes = (
            [self.tokens, h.value, h.value_dim],
            [self.sequences(), h.value, h.key_dim, h.value_dim],
        );
        let tensors = [("o", &shapes.0[..], o), ("final_state", &shapes.1, state)];
        let tensors = tensors.map(|(name, shape, t)| Named {
            name,
            shape,
            dtype: t.dtype,
            bytes: &t.bytes,
        });
        safetensors_io::write(path, &tensors).map_err(Failure::file("--output", path))
    }
}

/// Tensors; neighbours that look alike share a row.
fn table(lines: &[Line], workspace_bytes: usize) -> Table {
    let mut table = Table::new(3, &["tensor", "shape", "dtype"]);
    for alike in lines.chunk_by(|a, b| (&a.shape, a.dtype) == (&b.shape, b.dtype)) {
        let names: Vec<&str> = alike.iter().map(|line| line.name).collect();
        let (shape, dtype) = (&alike[0].shape, alike[0].dtype);
        table.row([names.join(", "), format!("{shape:?}"), dtype.to_string()]);
    }
    let size = bytes(workspace_bytes as u64);
    table.row(["workspace".to_owned(), size, String::new()]);
    table
}

/// The verdict on o and the final state, and on what else was found; `past` is o past the last sequence.
pub(super) fn verdict(judged: &[Judged; 2], past: &[f32], outcome: &Outcome) -> Verdict {
    Verdict {
        figures: error_figures(judged),
        text: error_table(judged).to_string(),
        objections: objections(judged, past, outcome),
    }
}

fn objections(judged: &[Judged; 2], past: &[f32], outcome: &Outcome) -> Vec<String> {
    let mut objections: Vec<String> = judged.iter().filter_map(Judged::objection).collect();
    if past.iter().any(|x| x.to_bits() != 0) {
        objections.push("o: rows past the last sequence are not zeros".to_owned());
    }
    if let Some(others) = outcome.others.filter(|others| others.changed > 0) {
        objections.push(format!(
            "pool: {} slots that no sequence writes have changed",
            others.changed
        ));
    }
    if let Some(resumed) = outcome.resumed {
        let limit = judged[0].limit;
        if resumed.must && !resumed.same_bits {
            objections.push("snapshots: continued sequences differ from the whole ones".to_owned());
        } else if resumed.rms_ratio > limit || resumed.rms_ratio.is_nan() {
            objections.push(format!(
                "snapshots: the error of continued sequences, {:.2e}, is above {limit:.2e}",
                resumed.rms_ratio
            ));
        }
    }
    objections
}

fn error_figures(judged: &[Judged; 2]) -> Figures {
    let [o, state] = judged;
    let worst = |j: &Judged| {
        j.worst.map_or(Value::Null, |w| {
            json!({
                "sequence": w.sequence,
                "head": w.head,
                "rms_ratio": w.comparison.rms_ratio,
                "max_abs": w.comparison.max_abs,
            })
        })
    };
    figures! {
        o_rms_ratio: o.pooled.rms_ratio,
        o_max_abs: o.pooled.max_abs,
        state_rms_ratio: state.pooled.rms_ratio,
        state_max_abs: state.pooled.max_abs,
        unfused_o_rms_ratio: o.unfused.rms_ratio,
        unfused_state_rms_ratio: state.unfused.rms_ratio,
        o_rms_ratio_limit: o.limit,
        state_rms_ratio_limit: state.limit,
        o_worst: worst(o),
        state_worst: worst(state),
        non_finite: o.pooled.non_finite + state.pooled.non_finite,
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
        let worst = j.worst.map(|w| {
            let ratio = number(w.comparison.rms_ratio);
            (ratio, format!("{}, {}", w.sequence, w.head))
        });
        let (ratio, place) = worst.unwrap_or_default();
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
