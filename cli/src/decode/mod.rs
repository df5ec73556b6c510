//! `deltawave decode`: a decode of drawn tensors, run and checked.

pub mod args;
mod device;

use deltawave::decode::{Decode, DecodeSpec};
use deltawave::model::Heads;
use deltawave::prefill::Part;
use deltawave::runtime::Context;
use deltawave_lab::inputs::{GateInputs, InputSpec, Inputs, Tensor as HostTensor, random_state};
use deltawave_lab::metrics::{compare, rounding_ratio};
use deltawave_lab::oracle::{self, Beta, Gate};

use self::args::DecodeArgs;
use self::device::Output;
use crate::args::{STATE_LAYOUTS, word};
use crate::device::States;
use crate::driver::{self, Options, Request, limit_threads};
use crate::failure::Failure;
use crate::memory;
use crate::progress::Progress;
use crate::report::{Description, Report, Verdict, figures};
use crate::verdict::{Error, of_errors};

/// Error that sums in f32 may have, beside that of rounding.
const SUMS_ERROR: f64 = 3e-6;

/// A decode whose tensors do not exist yet.
struct Planned<'a> {
    args: &'a DecodeArgs,
    spec: DecodeSpec,
}

/// A decode with its tensors on the host.
struct Workload<'a> {
    args: &'a DecodeArgs,
    spec: DecodeSpec,
    batch: usize,
    inputs: Inputs,
    /// Raw gates, where they are handed over.
    gate_inputs: Option<GateInputs>,
    /// `[HV, K, V]`, the same of every sequence.
    state: HostTensor,
}

/// Runs what the arguments ask for.
pub fn run(args: &DecodeArgs) -> Result<Report, Failure> {
    limit_threads(&args.run);
    let ([hk, hv], [k, v]) = args.shape.shape(args.dims.dims)?;
    let spec = DecodeSpec {
        dtype: args.dtype,
        heads: Heads {
            map: args.head_map,
            ..Heads::new(hk, hv, k, v)
        },
        qk_l2norm: args.scale.l2norm,
        scale: args.scale.scale(),
        tokens: args.tokens.into(),
        ..DecodeSpec::new(hk, hv, k, v)
    };
    let options = Options::new(&args.run, &args.shape, &args.count, args.check);
    driver::run(Planned { args, spec }, &options)
}

impl<'a> Request for Planned<'a> {
    type Workload = Workload<'a>;

    fn plan(&self, context: &Context) -> Result<Decode, Failure> {
        let (args, s) = (self.args, &self.spec);
        let plan = Decode::new(context, *s, args.batch as usize)
            .map_err(Failure::during("planning the decode failed"))?;
        let rows = u128::from(args.batch) * u128::from(args.tokens);
        let (keys, values) = (
            s.heads.key * s.heads.key_dim,
            s.heads.value * s.heads.value_dim,
        );
        let state = (s.heads.value * s.heads.key_dim * s.heads.value_dim) as u128;
        let after_tokens = if args.verify { rows } else { 0 };
        let each = if args.check { 24 } else { 12 };
        let elements = rows * 2 * (keys + values) as u128 + u128::from(args.batch) * state;
        memory::check(each * elements + 8 * after_tokens * state)?;
        Ok(plan)
    }

    fn load(self, _: &Decode) -> Result<Workload<'a>, Failure> {
        let (args, spec) = (self.args, self.spec);
        let input = InputSpec {
            dtype: spec.dtype,
            tokens: args.batch as usize * spec.tokens,
            key_heads: spec.heads.key,
            value_heads: spec.heads.value,
            key_dim: spec.heads.key_dim,
            value_dim: spec.heads.value_dim,
            gates: args.gates,
            unit_rows: !spec.qk_l2norm,
            seed: args.seed,
            ..Default::default()
        };
        let each = spec.heads.value * spec.heads.key_dim * spec.heads.value_dim;
        Ok(Workload {
            args,
            spec,
            batch: args.batch as usize,
            inputs: Inputs::new(input),
            gate_inputs: args.raw_gates.then(|| GateInputs::new(input)),
            state: random_state(args.state.state_dtype, each, args.seed),
        })
    }
}

impl Workload<'_> {
    /// Tokens of all sequences.
    fn rows(&self) -> usize {
        self.batch * self.spec.tokens
    }

    /// So many states in the pool's layout.
    fn states(&self, count: usize) -> States {
        States {
            count,
            heads: self.spec.heads.value,
            key_dim: self.spec.heads.key_dim,
            value_dim: self.spec.heads.value_dim,
            layout: self.args.state.state_layout,
        }
    }

    fn judge(&self, output: &Output) -> Result<Verdict, Failure> {
        let s = &self.spec;
        let cu_seqlens: Vec<i32> = (0..=self.batch).map(|n| (n * s.tokens) as i32).collect();
        let initial = self.state.values.repeat(self.batch);
        let mut problem = self.inputs.problem(&cu_seqlens);
        if let Some(raw) = &self.gate_inputs {
            problem.gate = Gate::Raw {
                a: &raw.a.values,
                a_log: &raw.a_log,
                dt_bias: Some(&raw.dt_bias),
            };
            problem.beta = Beta::Logits {
                b: &raw.b.values,
                allow_neg_eigval: self.args.neg_eigval,
            };
        }
        problem.initial_state = Some(&initial);
        problem.scale = s.scale.map(f64::from);
        problem.head_map = s.heads.map;
        let exact = oracle::prefill(&problem)?;
        let error = |found: &HostTensor, reference: &[f64]| Error {
            ratio: compare(&found.values, reference).rms_ratio,
            limit: 1.02 * rounding_ratio(reference, found.dtype) + SUMS_ERROR,
        };
        let state = error(&output.state, &exact.final_state);
        Ok(of_errors("o", error(&output.o, &exact.o), state, None))
    }
}

impl driver::Workload for Workload<'_> {
    const NAME: &'static str = "decode";
    const CHECKED: &'static [&'static str] = &[
        "o_rms_ratio",
        "o_rms_ratio_limit",
        "state_rms_ratio",
        "state_rms_ratio_limit",
    ];

    fn parts(_: &Decode) -> Vec<(&'static str, Part)> {
        vec![("decode", Part::Whole)]
    }

    /// q, k, v, o and gates, the states in, and out after the last token or every one: each once.
    fn minimal_bytes(&self) -> usize {
        let s = &self.spec;
        let elements = 2 * s.heads.key * s.heads.key_dim + 2 * s.heads.value * s.heads.value_dim;
        let gate = (self.gate_inputs.as_ref()).map_or(4, |raw| raw.a.dtype.size());
        let token = elements * s.dtype.size() + 2 * s.heads.value * gate;
        let written = if self.args.verify {
            self.rows()
        } else {
            self.batch
        };
        let states = (self.batch + written) * self.state.values.len();
        self.rows() * token + states * self.args.state.state_dtype.size()
    }

    fn check(&self, output: &Output, progress: &mut Progress) -> Result<Verdict, Failure> {
        progress.step("reference", || self.judge(output))
    }

    fn describe(&self, _: &Decode, _: &Output) -> Description {
        let (s, args) = (&self.spec, self.args);
        let layout = word(STATE_LAYOUTS, &args.state.state_layout);
        let title = format!(
            "{} sequences of {} tokens, {} and {} heads of {} and {}, {}, states {} {layout}",
            self.batch,
            s.tokens,
            s.heads.key,
            s.heads.value,
            s.heads.key_dim,
            s.heads.value_dim,
            s.dtype,
            args.state.state_dtype
        );
        Description {
            title: ["Decode".to_owned(), title],
            tensors: String::new(),
            figures: figures! {
                tokens: self.rows(),
                sequences: self.batch,
                dtype: s.dtype.name(),
                key_heads: s.heads.key,
                value_heads: s.heads.value,
                key_dim: s.heads.key_dim,
                value_dim: s.heads.value_dim,
                raw_gates: args.raw_gates,
                l2norm: s.qk_l2norm,
                state_layout: layout,
                state_dtype: args.state.state_dtype.name(),
                verify: args.verify,
            },
            notes: Vec::new(),
        }
    }
}
