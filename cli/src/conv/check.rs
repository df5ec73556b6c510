//! A convolution against its reference.

use deltawave::conv::Activation;
use deltawave_lab::inputs::Tensor as HostTensor;
use deltawave_lab::metrics::{UlpComparison, compare_ulps};
use deltawave_lab::oracle::conv::{ConvProblem, RowNorms, conv};
use deltawave_lab::oracle::gates;

use super::device::Output;
use super::{GateInputs, Workload, columns};
use crate::failure::Failure;
use crate::report::{Verdict, figures};

/// Elements of at least this share must be the reference rounded once.
const LEAST_EQUAL_SHARE: f64 = 0.999;
/// Largest distance of the others from it, in units in the last place.
const MOST_ULPS: u32 = 1;
/// Relative error that an element of g or beta may have.
const GATE_LIMIT: f64 = 2e-6;

impl Workload<'_> {
    pub(super) fn judge(&self, output: &Output) -> Result<Verdict, Failure> {
        let s = &self.spec;
        let channels = s.total_channels();
        let column: Vec<usize> = (0..channels).map(|c| self.column(c)).collect();
        let rows = self.x.values.chunks_exact(columns(s));
        let x: Vec<f32> = rows
            .flat_map(|row| column.iter().map(|c| row[*c]))
            .collect();
        let reference = conv(&ConvProblem {
            tokens: self.tokens,
            channels,
            width: s.width,
            x: &x,
            weight: &self.weight.values,
            bias: self.bias.as_ref().map(|b| &b.values[..]),
            silu: s.activation == Activation::Silu,
            norms: s.qk_l2norm.then_some(RowNorms {
                channels: 2 * s.heads.key * s.heads.key_dim,
                dim: s.heads.key_dim,
            }),
            cu_seqlens: &self.cu_seqlens,
            state: self.state.as_ref().map(|t| &t.values[..]),
            columns: s.width - 1,
            has_initial_state: None,
            padding: None,
        })?;
        let mut out = UlpComparison::default();
        let mut before = 0;
        for (t, n) in output.out.iter().zip(s.channels()) {
            let rows = reference.y.chunks_exact(channels);
            let part: Vec<f64> = rows
                .flat_map(|row| &row[before..before + n])
                .copied()
                .collect();
            out = out.and(compare_ulps(t, &part));
            before += n;
        }
        let states = HostTensor::new(s.dtype, reference.state);
        let wrong = wrong_states(&states, &output.state, &self.cu_seqlens);
        let gates = (self.gates.as_ref().zip(output.gates.as_ref()))
            .map(|(inputs, found)| self.gate_error(inputs, found));
        Ok(verdict(&out, wrong, gates))
    }

    /// The largest relative error of g and beta.
    fn gate_error(&self, inputs: &GateInputs, [g, beta]: &[HostTensor; 2]) -> f64 {
        let heads = self.spec.heads.value;
        let each = heads / self.args.layout.groups(self.spec.heads.key);
        let relative = |found: f32, exact: f64| {
            let error = (f64::from(found) - exact).abs() / exact.abs();
            if error.is_nan() { f64::INFINITY } else { error }
        };
        let errors = (0..g.values.len()).map(|i| {
            let h = i % heads;
            let at = i / heads * 2 * heads + h / each * 2 * each + h % each;
            let (b, a) = (inputs.ba.values[at], inputs.ba.values[at + each]);
            // The kernel adds them in f32.
            let sum = f64::from(a + inputs.dt_bias.values[h]);
            let gate = gates::log_gate(sum, inputs.a_log.values[h].into(), 0.0);
            relative(g.values[i], gate).max(relative(beta.values[i], gates::beta(b.into(), false)))
        });
        errors.fold(0.0, f64::max)
    }
}

/// Elements of conv states that have other bits than the reference. An empty sequence leaves its slot as it was.
pub fn wrong_states(reference: &HostTensor, found: &HostTensor, cu_seqlens: &[i32]) -> usize {
    let each = reference.values.len() / (cu_seqlens.len() - 1).max(1);
    let empty = |n: usize| cu_seqlens[n] == cu_seqlens[n + 1];
    let size = reference.dtype.size();
    let pairs = reference
        .bytes
        .chunks_exact(size)
        .zip(found.bytes.chunks_exact(size));
    let wrong = pairs
        .enumerate()
        .filter(|(i, (a, b))| a != b && !empty(i / each));
    wrong.count()
}

fn verdict(out: &UlpComparison, wrong_states: usize, gates: Option<f64>) -> Verdict {
    let share = out.equal_share();
    // A single element is more than its share of few.
    let passed = (share >= LEAST_EQUAL_SHARE || out.different <= 2)
        && out.max_ulps <= MOST_ULPS
        && wrong_states == 0
        && gates.is_none_or(|error| error <= GATE_LIMIT);
    let percent = 100.0 * share;
    let mut figures = figures! {
        equal_share: share,
        equal_share_limit: LEAST_EQUAL_SHARE,
        max_ulps: out.max_ulps,
        max_ulps_limit: MOST_ULPS,
        wrong_states: wrong_states,
    };
    let mut text = format!(
        "  check  {percent:.4}% of the outputs are the reference rounded once, the others within {} ulp; {wrong_states} \
         elements of the states differ\n",
        out.max_ulps
    );
    let mut objection = format!(
        "{percent:.4}% of the outputs are the reference rounded once, at least {:.1}% must be; the largest distance is \
         {} ulp, at most {MOST_ULPS} is allowed; {wrong_states} elements of the states differ",
        100.0 * LEAST_EQUAL_SHARE,
        out.max_ulps
    );
    if let Some(error) = gates {
        figures
            .0
            .extend(figures! { gate_error: error, gate_error_limit: GATE_LIMIT }.0);
        text += &format!(
            "\n  check  g and beta are within {error:.1e} of the reference, relative to it\n"
        );
        objection +=
            &format!("; g and beta are {error:.1e} off, at most {GATE_LIMIT:.0e} is allowed");
    }
    Verdict {
        figures,
        text,
        objections: if passed { Vec::new() } else { vec![objection] },
    }
}
