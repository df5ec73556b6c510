//! Words and figures of a prefill, and its results as a file.

use deltawave::prefill::{Part, Prefill};
use deltawave::runtime::Context;
use deltawave::types::Dtype;
use deltawave_lab::safetensors_io::{self, FileBeta, FileGate, Named};
use serde_json::{Value, json};

use super::Workload;
use super::device::Output;
use crate::args::{HEAD_MAPS, STATE_LAYOUTS, word};
use crate::driver::{self, Options, Ran};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::report::{Description, Verdict, figures, mfma_mode};
use crate::table::{Table, bytes};

/// A tensor of the operation.
struct Line {
    name: &'static str,
    shape: Vec<usize>,
    dtype: Dtype,
}

impl driver::Workload for Workload<'_> {
    const NAME: &'static str = "prefill";
    const CHECKED: &'static [&'static str] = &[
        "o_rms_ratio",
        "o_max_abs",
        "state_rms_ratio",
        "state_max_abs",
        "unfused_o_rms_ratio",
        "unfused_state_rms_ratio",
        "o_rms_ratio_limit",
        "state_rms_ratio_limit",
        "o_worst",
        "state_worst",
        "non_finite",
    ];
    const CHECK_STEPS: usize = 2;

    fn parts(plan: &Prefill) -> Vec<(&'static str, Part)> {
        (plan.parts().into_iter().map(|part| (part.name(), part))).collect()
    }

    /// Inputs, outputs and states: each once.
    fn minimal_bytes(&self) -> usize {
        let d = &self.data;
        let keys = d.tokens * d.key_heads * d.key_dim;
        let values = d.tokens * d.value_heads * d.value_dim;
        let scalars = d.tokens * d.value_heads;
        let states = self.sequences() * self.states(1).each();
        let gate = match &d.gate {
            FileGate::None => 0,
            FileGate::Log(g) => g.dtype.size(),
            FileGate::Raw { a, .. } => a.dtype.size(),
        };
        let beta = match &d.beta {
            FileBeta::One => 0,
            FileBeta::Given(beta) | FileBeta::Logits(beta) => beta.dtype.size(),
        };
        let initial = (d.initial_state.as_ref()).map_or(0, |t| t.dtype.size());
        2 * keys * d.q.dtype.size()
            + values * (d.v.dtype.size() + self.spec.dtype.size())
            + scalars * (gate + beta)
            + states * (self.args.state.state_dtype.size() + initial)
    }

    fn follow_up(
        &self,
        context: &Context,
        plan: &Prefill,
        ran: &mut Ran<Output>,
        options: &Options,
    ) -> Result<(), Failure> {
        self.write_output(&ran.output)?;
        // A profile counts the launches of the whole alone.
        if options.check && options.count.is_none() {
            ran.output.resumed = self.resume(context, plan, &ran.output)?;
        }
        Ok(())
    }

    fn check(&self, output: &Output, progress: &mut Progress) -> Result<Verdict, Failure> {
        self.judge(output, progress)
    }

    fn describe(&self, _: &Prefill, output: &Output) -> Description {
        let (d, s, args) = (&self.data, &self.spec, self.args);
        let input = args.input.as_ref().map(|path| path.display().to_string());
        let of = input
            .as_ref()
            .map_or(String::new(), |path| format!(" of {path}"));
        let lines = self.tensors();
        let json = |line: &Line| json!({"name": line.name, "shape": line.shape, "dtype": line.dtype.name()});
        let json: Vec<Value> = lines.iter().map(json).collect();
        let scale = s
            .scale
            .unwrap_or_else(|| (s.heads.key_dim as f32).powf(-0.5));
        // As f32 is printed, not as the f64 that has its value.
        let scale: Option<f64> = scale.to_string().parse().ok();
        let mut figures = figures! {
            mfma_mode: (output.simulated).then(mfma_mode),
            input: input,
            tokens: d.tokens,
            sequences: self.sequences(),
            batch: if self.dense.is_some() { "dense" } else { "packed" },
            dtype: s.dtype.name(),
            key_heads: d.key_heads,
            value_heads: d.value_heads,
            key_dim: d.key_dim,
            value_dim: d.value_dim,
            head_map: word(HEAD_MAPS, &s.heads.map),
            qk_l2norm: s.qk_l2norm,
            scale: scale,
            neg_eigval: self.neg_eigval,
            state_layout: word(STATE_LAYOUTS, &args.state.state_layout),
        };
        let mut notes = Vec::new();
        for (name, part) in ["pool", "snapshots"]
            .into_iter()
            .zip(self.state_figures(output))
        {
            if let Some((value, text)) = part {
                figures.0.push((name, value));
                notes.push(format!("  {name}  {text}\n"));
            }
        }
        figures
            .0
            .extend(figures! { tensors: json, workspace_bytes: output.workspace_bytes }.0);
        Description {
            title: [format!("Gated DeltaNet prefill{of}"), self.lengths()],
            tensors: format!("{}\n", table(&lines, output.workspace_bytes)),
            figures,
            notes,
        }
    }
}

impl Workload<'_> {
    fn tensors(&self) -> Vec<Line> {
        let d = &self.data;
        let mut lines = Vec::new();
        let mut line = |name, shape: &[usize], dtype| {
            lines.push(Line {
                name,
                shape: shape.to_vec(),
                dtype,
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
        let all = match self.data.tokens {
            1 => "1 token".to_owned(),
            n => format!("{n} tokens"),
        };
        let pairs = self.data.cu_seqlens.windows(2).take(SHOWN);
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
    fn write_output(&self, output: &Output) -> Result<(), Failure> {
        let (d, Some(path)) = (&self.data, &self.args.output) else {
            return Ok(());
        };
        let tensors = [
            Named {
                name: "o",
                shape: &[d.tokens, d.value_heads, d.value_dim],
                dtype: output.o.dtype,
                bytes: &output.o.bytes,
            },
            Named {
                name: "final_state",
                shape: &[self.sequences(), d.value_heads, d.key_dim, d.value_dim],
                dtype: output.final_state.dtype,
                bytes: &output.final_state.bytes,
            },
        ];
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
