//! Results beside their references: how far they are off, and how far they may be.

use deltawave::conv::Activation;
use deltawave::norm::OutputGate;
use deltawave::types::Dtype;

use crate::inputs::{Gates, Keys, Tensor};
use crate::metrics::{
    self, Comparison, HeadComparison, UlpComparison, compare, compare_outputs, compare_states,
    compare_ulps, rounding_ratio, worst,
};
use crate::oracle::conv::{ConvProblem, RowNorms, conv as conv_oracle};
use crate::oracle::layer::{LayerProblem, layer as layer_oracle, unfused_layer};
use crate::oracle::{self, Problem, ProblemError, Solution, gates};
use crate::safetensors_io::PrefillFile;
use crate::workload::{ConvData, ConvGates, Draw, LayerData, columns};

/// An rms error relative to the reference, and the largest that is allowed.
#[derive(Clone, Copy, Debug)]
pub struct Error {
    /// The error.
    pub ratio: f64,
    /// The largest that is allowed.
    pub limit: f64,
}

impl Error {
    /// Whether it is allowed; a NaN is not.
    pub fn passed(self) -> bool {
        self.ratio <= self.limit
    }
}

/// How much larger the error of one sequence and head may be than the pooled one, or than the unfused form's worst: a
/// defect of one head shows here long before it shows in pooled figures.
const PART_SLACK: f64 = 4.0;
/// Error that sums in f32 may have, beside that of rounding.
const SUMS_ERROR: f64 = 3e-6;
/// A state after a few tokens has no error to speak of in the chain of kernels either.
const LEAST_STATE_LIMIT: f64 = 1e-5;

/// How far one tensor of a prefill is from the reference, and how far it may be.
#[derive(Clone, Copy, Debug)]
pub struct Judged {
    /// The tensor.
    pub name: &'static str,
    /// All elements pooled.
    pub pooled: Comparison,
    /// The sequence and value head with the largest rms ratio.
    pub worst: Option<HeadComparison>,
    /// The unfused form, all elements pooled.
    pub unfused: Comparison,
    /// The largest pooled rms ratio that is allowed.
    pub limit: f64,
    /// The largest rms ratio of a sequence and head that is allowed.
    pub worst_limit: f64,
}

impl Judged {
    /// Why it is not allowed, where it is not.
    pub fn objection(&self) -> Option<String> {
        let (name, found, limit) = (self.name, &self.pooled, self.limit);
        if !found.finite() {
            return Some(format!(
                "{name}: {} of {} elements are NaN or infinite",
                found.non_finite, found.elements
            ));
        }
        if found.rms_ratio > limit {
            let ratio = found.rms_ratio;
            return Some(format!(
                "{name}: rms ratio {ratio:.2e} is above {limit:.2e}"
            ));
        }
        let above = |w: &HeadComparison| w.comparison.rms_ratio > self.worst_limit;
        let worst = self.worst.filter(above)?;
        Some(format!(
            "{name}: rms ratio {:.2e} of sequence {}, head {} is above {:.2e}",
            worst.comparison.rms_ratio, worst.sequence, worst.head, self.worst_limit
        ))
    }
}

/// Judges o and the final state of a prefill by the oracle's solution and that of the unfused form. `drawn` is how the
/// tensors were drawn, unless they are from a file.
pub fn prefill(
    data: &PrefillFile,
    drawn: Option<&Draw>,
    [o, state]: [&Tensor; 2],
    exact: &Solution,
    unfused: &Solution,
) -> [Judged; 2] {
    let found = Solution {
        o: widened(&o.values),
        final_state: widened(&state.values),
    };
    let [found, unfused] = [&found, unfused].map(|s| compared(data, s, exact));
    let rounding = match state.dtype {
        Dtype::Bf16 => [0.0, metrics::BF16_STATE_ROUNDING],
        Dtype::F16 => [0.0, metrics::F16_STATE_ROUNDING],
        Dtype::F32 => [0.0; 2],
    };
    let limits = limits(data, drawn, unfused.map(|(pooled, _)| pooled.rms_ratio));
    [0, 1].map(|i| {
        let limit = limits[i] + rounding[i];
        let ((pooled, worst), (yardstick, worst_unfused)) = (found[i], unfused[i]);
        let unfused = worst_unfused.map_or(0.0, |w| w.comparison.rms_ratio);
        Judged {
            name: ["o", "final_state"][i],
            pooled,
            worst,
            unfused: yardstick,
            limit,
            worst_limit: PART_SLACK * limit.max(unfused),
        }
    })
}

/// o and the final state: the error of all elements, and the largest of a sequence and head.
fn compared(
    d: &PrefillFile,
    x: &Solution,
    exact: &Solution,
) -> [(Comparison, Option<HeadComparison>); 2] {
    let (heads, end) = (d.value_heads, output_end(d));
    let outputs = compare_outputs(&x.o, &exact.o, &d.cu_seqlens, heads, d.value_dim);
    let each = d.key_dim * d.value_dim;
    let states = compare_states(&x.final_state, &exact.final_state, heads, each);
    [
        (compare(&x.o[..end], &exact.o[..end]), worst(&outputs)),
        (compare(&x.final_state, &exact.final_state), worst(&states)),
    ]
}

/// Elements of o before the end of the last sequence.
pub fn output_end(d: &PrefillFile) -> usize {
    d.cu_seqlens.last().map_or(0, |&n| n as usize) * d.value_heads * d.value_dim
}

/// The largest pooled rms ratios of o and the final state that are allowed, given those of the unfused form.
///
/// On inputs like those that the bar was measured on: the bar, and hardly more than the unfused form. On others, which
/// have no bar of their own and few samples: a little more than the larger of the two.
fn limits(data: &PrefillFile, drawn: Option<&Draw>, unfused: [f64; 2]) -> [f64; 2] {
    let large = data.value_heads >= 8 && data.tokens >= 1024;
    let standard = drawn.filter(|d| {
        large
            && (data.key_dim, data.value_dim) == (128, 128)
            && d.input.keys == Keys::Normal
            && !d.raw_gates
            && !d.neg_eigval
            && d.initial_state.is_none()
    });
    let dtype = data.q.dtype;
    match standard {
        Some(draw) => {
            let (o, state) = metrics::bar(dtype, draw.input.gates);
            let unfused = unfused.map(|x| metrics::UNFUSED_SLACK * x);
            [o.min(unfused[0]), state.min(unfused[1])]
        }
        None => {
            let (o, state) = metrics::bar(dtype, Gates::Mixed);
            [o.max(unfused[0]), state.max(unfused[1])].map(|x| metrics::SMALL_SHAPE_SLACK * x)
        }
    }
}

fn widened(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// Judges o and the last states of a decode by the oracle, and by the error of rounding alone.
pub fn decode(problem: &Problem, o: &Tensor, state: &Tensor) -> Result<[Error; 2], ProblemError> {
    let exact = oracle::prefill(problem)?;
    let error = |found: &Tensor, reference: &[f64]| Error {
        ratio: compare(&found.values, reference).rms_ratio,
        limit: 1.02 * rounding_ratio(reference, found.dtype) + SUMS_ERROR,
    };
    Ok([error(o, &exact.o), error(state, &exact.final_state)])
}

/// Outputs of a convolution.
pub struct ConvFound<'a> {
    /// q, k and v.
    pub out: [&'a Tensor; 3],
    /// `[N, channels, width - 1]`.
    pub state: &'a Tensor,
    /// g and beta, `[T, HV]`.
    pub gates: Option<[&'a Tensor; 2]>,
}

/// How far a convolution is from its reference.
#[derive(Clone, Copy, Debug)]
pub struct ConvJudged {
    /// q, k and v.
    pub out: UlpComparison,
    /// Elements of the states that have other bits.
    pub wrong_states: usize,
    /// The largest relative error of g and beta, where they are computed.
    pub gate_error: Option<f64>,
}

impl ConvJudged {
    /// Elements of at least this share must be the reference rounded once.
    pub const LEAST_EQUAL_SHARE: f64 = 0.999;
    /// Largest distance of the others from it, in units in the last place.
    pub const MOST_ULPS: u32 = 1;
    /// Relative error that an element of g or beta may have.
    pub const GATE_LIMIT: f64 = 2e-6;

    /// Whether all of it is allowed.
    pub fn passed(&self) -> bool {
        // A single element is more than its share of few.
        (self.out.equal_share() >= Self::LEAST_EQUAL_SHARE || self.out.different <= 2)
            && self.out.max_ulps <= Self::MOST_ULPS
            && self.wrong_states == 0
            && self.gate_error.is_none_or(|e| e <= Self::GATE_LIMIT)
    }
}

/// Judges a convolution by its reference.
pub fn conv(data: &ConvData, found: &ConvFound) -> Result<ConvJudged, ProblemError> {
    let s = &data.spec;
    let channels = s.total_channels();
    let column = (0..channels).map(|c| data.layout.column(&s.heads, c));
    let column: Vec<usize> = column.collect();
    let rows = data.x.values.chunks_exact(columns(s));
    let x = rows.flat_map(|row| column.iter().map(|c| row[*c]));
    let reference = conv_oracle(&ConvProblem {
        tokens: data.tokens(),
        channels,
        width: s.width,
        x: &x.collect::<Vec<f32>>(),
        weight: &data.weight.values,
        bias: data.bias.as_ref().map(|b| &b.values[..]),
        silu: s.activation == Activation::Silu,
        norms: s.qk_l2norm.then_some(RowNorms {
            channels: 2 * s.heads.key * s.heads.key_dim,
            dim: s.heads.key_dim,
        }),
        cu_seqlens: &data.cu_seqlens,
        state: data.state.as_ref().map(|t| &t.values[..]),
        columns: s.width - 1,
        has_initial_state: None,
        padding: None,
    })?;
    let mut out = UlpComparison::default();
    let mut before = 0;
    for (t, n) in found.out.iter().zip(s.channels()) {
        let rows = reference.y.chunks_exact(channels);
        let part = rows.flat_map(|row| &row[before..before + n]).copied();
        out = out.and(compare_ulps(t, &part.collect::<Vec<f64>>()));
        before += n;
    }
    let states = Tensor::new(s.dtype, reference.state);
    let gates = data.gates.as_ref().zip(found.gates);
    Ok(ConvJudged {
        out,
        wrong_states: wrong_states(&states, found.state, &data.cu_seqlens),
        gate_error: gates.map(|(inputs, found)| gate_error(data, inputs, found)),
    })
}

/// The largest relative error of g and beta.
fn gate_error(data: &ConvData, inputs: &ConvGates, [g, beta]: [&Tensor; 2]) -> f64 {
    let heads = data.spec.heads.value;
    let relative = |found: f32, exact: f64| {
        let error = (f64::from(found) - exact).abs() / exact.abs();
        if error.is_nan() { f64::INFINITY } else { error }
    };
    let errors = (0..g.values.len()).map(|i| {
        let (row, h) = (i / heads * 2 * heads, i % heads);
        let columns = data.layout.gate_columns(&data.spec.heads, h);
        let [b, a] = columns.map(|c| inputs.ba.values[row + c]);
        // The kernel adds them in f32.
        let sum = f64::from(a + inputs.dt_bias.values[h]);
        let gate = gates::log_gate(sum, inputs.a_log.values[h].into(), 0.0);
        relative(g.values[i], gate).max(relative(beta.values[i], gates::beta(b.into(), false)))
    });
    errors.fold(0.0, f64::max)
}

/// Elements of conv states that have other bits than the reference. An empty sequence leaves its slot as it was.
pub fn wrong_states(reference: &Tensor, found: &Tensor, cu_seqlens: &[i32]) -> usize {
    let each = reference.values.len() / (cu_seqlens.len() - 1).max(1);
    let empty = |n: usize| cu_seqlens[n] == cu_seqlens[n + 1];
    let [wanted, found] = [reference, found].map(|t| t.bytes.chunks_exact(reference.dtype.size()));
    let pairs = wanted.zip(found).enumerate();
    let wrong = pairs.filter(|(i, (a, b))| a != b && !empty(i / each));
    wrong.count()
}

/// How far a layer is from the f64 layer; the limits are those of the chain of kernels that others use.
#[derive(Clone, Copy, Debug)]
pub struct LayerJudged {
    /// `[T, HV, V]`.
    pub y: Error,
    /// The recurrent states.
    pub state: Error,
    /// Elements of the conv states that have other bits.
    pub wrong_states: usize,
}

/// Judges y, the conv states and the recurrent states `[N, HV, K, V]` of a layer.
pub fn layer(
    data: &LayerData,
    [y, conv_state, state]: [&Tensor; 3],
) -> Result<LayerJudged, ProblemError> {
    let s = &data.spec;
    let channels = s.conv().total_channels();
    let rows = data.projections.values.chunks_exact(columns(&s.conv()));
    let (x, z): (Vec<_>, Vec<_>) = rows.map(|row| row.split_at(channels)).unzip();
    let [initial_conv, initial] = match &data.states {
        Some(states) => states.each_ref().map(|t| Some(&t.values[..])),
        None => [None; 2],
    };
    let problem = LayerProblem {
        dtype: s.dtype,
        tokens: x.len(),
        key_heads: s.heads.key,
        value_heads: s.heads.value,
        key_dim: s.heads.key_dim,
        value_dim: s.heads.value_dim,
        width: s.width,
        x: &x.concat(),
        z: &z.concat(),
        a: &data.a.values,
        b: &data.b.values,
        conv_weight: &data.conv_weight.values,
        conv_bias: None,
        a_log: &data.a_log.values,
        dt_bias: Some(&data.dt_bias.values),
        norm_weight: Some(&data.norm_weight.values),
        allow_neg_eigval: s.allow_neg_eigval,
        l2_norm: s.qk_l2norm,
        head_map: s.heads.map,
        eps: s.eps.into(),
        silu: s.gate == OutputGate::Silu,
        cu_seqlens: &data.cu_seqlens,
        conv_state: initial_conv,
        state: initial,
        has_initial_state: None,
        padding: None,
    };
    let (exact, chain) = (layer_oracle(&problem)?, unfused_layer(&problem)?);
    let error = |found: &[f32], dtype: Dtype, unfused: &[f64], exact: &[f64]| {
        let rounded = unfused.iter().map(|x| dtype.round(*x as f32));
        let allowed = compare(&rounded.collect::<Vec<f32>>(), exact).rms_ratio;
        Error {
            ratio: compare(found, exact).rms_ratio,
            limit: metrics::SMALL_SHAPE_SLACK * allowed,
        }
    };
    // A sequence without tokens writes nothing: without a state to start from, its slot may hold anything.
    let mut found = state.values.clone();
    let size = s.heads.value * s.heads.key_dim * s.heads.value_dim;
    for (ends, found) in data.cu_seqlens.windows(2).zip(found.chunks_exact_mut(size)) {
        if ends[0] == ends[1] && data.states.is_none() {
            found.fill(0.0);
        }
    }
    let mut judged = LayerJudged {
        y: error(&y.values, y.dtype, &chain.y, &exact.y),
        state: error(&found, state.dtype, &chain.state, &exact.state),
        wrong_states: wrong_states(
            &Tensor::new(s.dtype, exact.conv_state),
            conv_state,
            &data.cu_seqlens,
        ),
    };
    judged.state.limit = judged.state.limit.max(LEAST_STATE_LIMIT);
    Ok(judged)
}

#[cfg(test)]
mod tests {
    use deltawave::conv::ConvSpec;
    use deltawave::model::Heads;

    use super::*;
    use crate::workload::{RowLayout, inputs_of};

    fn drawn() -> (Draw, PrefillFile) {
        let draw = Draw {
            input: inputs_of(Dtype::Bf16, 80, &Heads::new(1, 2, 16, 16)),
            raw_gates: false,
            neg_eigval: false,
            initial_state: None,
        };
        let data = draw.tensors(&[0, 78, 80]);
        (draw, data)
    }

    fn rounded(x: &[f64], dtype: Dtype) -> Tensor {
        Tensor::new(dtype, x.iter().map(|x| *x as f32).collect())
    }

    #[test]
    fn a_defect_of_one_head_is_an_objection() {
        let (draw, data) = drawn();
        let exact = oracle::prefill(&data.problem()).unwrap();
        let unfused = oracle::unfused(&data.problem(), Dtype::Bf16).unwrap();
        let state = rounded(&exact.final_state, Dtype::F32);
        let objections = |o: &Tensor| {
            let judged = prefill(&data, Some(&draw), [o, &state], &exact, &unfused);
            judged.map(|j| j.objection())
        };
        let o = rounded(&exact.o, Dtype::Bf16);
        assert_eq!(objections(&o), [None, None]);
        // Head 1 of the second sequence, little beside all elements.
        let mut values = o.values.clone();
        for row in values.chunks_exact_mut(32).skip(78) {
            row[16..].iter_mut().for_each(|x| *x *= 1.03);
        }
        let [found, none] = objections(&Tensor::new(Dtype::F32, values.clone()));
        let found = found.expect("an objection");
        assert!(found.contains("of sequence 1, head 1 is above"), "{found}");
        assert_eq!(none, None);
        values[3] = f32::NAN;
        let [found, _] = objections(&Tensor::new(Dtype::F32, values));
        assert!(
            found
                .expect("an objection")
                .contains("1 of 2560 elements are NaN")
        );
    }

    #[test]
    fn decodes_may_round_and_no_more() {
        let (_, data) = drawn();
        let problem = data.problem();
        let exact = oracle::prefill(&problem).unwrap();
        let o = rounded(&exact.o, Dtype::Bf16);
        let state = rounded(&exact.final_state, Dtype::F32);
        let passed = |o: &Tensor| decode(&problem, o, &state).unwrap().map(Error::passed);
        assert_eq!(passed(&o), [true, true]);
        let off = o.values.iter().map(|x| x * 1.01);
        assert_eq!(
            passed(&Tensor::new(Dtype::Bf16, off.collect())),
            [false, true]
        );
        let nan = Error {
            ratio: f64::NAN,
            limit: 1.0,
        };
        assert!(!nan.passed());
    }

    #[test]
    fn convolutions_must_be_rounded_once() {
        let spec = ConvSpec::new(1, 2, 4, 4);
        let data = ConvData::draw(spec, RowLayout::Flat, &[0, 9], 0);
        let out = spec
            .channels()
            .map(|n| Tensor::new(spec.dtype, vec![0.0; 9 * n]));
        let state = Tensor::new(spec.dtype, vec![0.0; data.state_elements()]);
        let found = ConvFound {
            out: out.each_ref(),
            state: &state,
            gates: None,
        };
        let judged = conv(&data, &found).unwrap();
        assert!(!judged.passed() && judged.out.different > 2, "{judged:?}");
        assert!(judged.wrong_states > 0 && judged.gate_error.is_none());
        // An empty sequence leaves its slot as it was.
        let ones = Tensor::new(spec.dtype, vec![1.0; 4]);
        let zeros = Tensor::new(spec.dtype, vec![0.0; 4]);
        assert_eq!(wrong_states(&ones, &zeros, &[0, 0, 5]), 2);
    }
}
