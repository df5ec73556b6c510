//! `deltawave decode`: a decode of drawn tensors, run and checked.

pub mod args;

use deltawave::decode::{Decode, DecodeSpec, DecodeTensors};
use deltawave::model::Heads;
use deltawave::prefill::Part;
use deltawave::runtime::{Context, Stream};
use deltawave::state::StatePool;
use deltawave_lab::inputs::{InputSpec, Tensor as HostTensor, random_state};
use deltawave_lab::judge;
use deltawave_lab::memory as needed;
use deltawave_lab::safetensors_io::PrefillFile;
use deltawave_lab::workload::{Draw, inputs_of};

use self::args::DecodeArgs;
use crate::args::{STATE_LAYOUTS, cu_seqlens, word};
use crate::device::{Fallible, Results, Rows, Slots, States, Views};
use crate::driver::{self, Operation, Options, limit_threads};
use crate::failure::Failure;
use crate::progress::Progress;
use crate::report::{Checked, Description, Report, figures, head_figures};
use crate::verdict::of_errors;
use crate::{memory, recurrence};

/// A decode of sequences of the same length.
struct DecodeRun<'a> {
    args: &'a DecodeArgs,
    spec: DecodeSpec,
    batch: usize,
    /// Tokens of all sequences.
    rows: usize,
}

/// Runs what the arguments ask for.
pub fn run(args: &DecodeArgs) -> Result<Report, Failure> {
    limit_threads(&args.run);
    let ([hk, hv], [k, v]) = args.shape.shape(args.dims.dims)?;
    let operation = DecodeRun {
        args,
        spec: DecodeSpec {
            dtype: args.dtype,
            heads: Heads {
                map: args.head_map,
                ..Heads::new(hk, hv, k, v)
            },
            qk_l2norm: args.scale.l2norm,
            scale: args.scale.scale(),
            tokens: args.tokens.into(),
            ..DecodeSpec::new(hk, hv, k, v)
        },
        batch: args.batch as usize,
        rows: args.batch as usize * usize::from(args.tokens),
    };
    let options = Options::new(&args.run, &args.shape, &args.count, args.check);
    driver::run(operation, &options)
}

impl DecodeRun<'_> {
    /// So many states in the pool's layout.
    fn states(&self, count: usize) -> States {
        States {
            count,
            heads: self.spec.heads,
            layout: self.args.state.state_layout,
        }
    }

    /// The states after the last tokens, `[B, HV, K, V]`.
    fn last_states(&self, results: &Results) -> HostTensor {
        let last = match results.get("states") {
            Some(all) => {
                let each = all.bytes.len() / self.rows.max(1);
                let sequences = all.bytes.chunks_exact(self.spec.tokens * each);
                let last = sequences.flat_map(|s| &s[s.len() - each..]);
                &HostTensor::from_bytes(all.dtype, last.copied().collect())
            }
            None => &results["pool"],
        };
        self.states(self.batch).key_major(last)
    }
}

impl Operation for DecodeRun<'_> {
    type Plan = Decode;
    /// All sequences start from the same state.
    type Data = PrefillFile;

    const NAME: &'static str = "decode";
    const CHECKED: &'static str =
        "o_rms_ratio o_rms_ratio_limit state_rms_ratio state_rms_ratio_limit";

    fn plan(&self, context: &Context) -> Result<Decode, Failure> {
        let plan = Decode::new(context, self.spec, self.batch)
            .map_err(Failure::during("planning the decode failed"))?;
        let (verify, check) = (self.args.verify, self.args.check);
        memory::check(needed::decode(&self.spec, self.batch, verify, check))?;
        Ok(plan)
    }

    fn draw(&mut self, _: &Decode) -> Result<PrefillFile, Failure> {
        let (args, s) = (self.args, &self.spec);
        let draw = Draw {
            input: InputSpec {
                gates: args.gates,
                unit_rows: !s.qk_l2norm,
                seed: args.seed,
                ..inputs_of(s.dtype, self.rows, &s.heads)
            },
            raw_gates: args.raw_gates,
            neg_eigval: args.neg_eigval,
            initial_state: None,
        };
        let dtype = args.state.state_dtype;
        let state = random_state(dtype, self.states(1).elements(), args.seed);
        let states = HostTensor::from_bytes(dtype, state.bytes.repeat(self.batch));
        Ok(PrefillFile {
            initial_state: Some(states),
            ..draw.tensors(&cu_seqlens("--batch", &vec![s.tokens; self.batch])?)
        })
    }

    fn slots<'a>(&self, _: &Decode, data: &'a PrefillFile) -> Slots<'a> {
        let dtype = self.args.state.state_dtype;
        let before = (data.initial_state.as_ref())
            .map(|states| self.states(self.batch).laid_out(states, dtype).bytes);
        let slots = recurrence::inputs(Slots::new(0), data, self.args.neg_eigval)
            .in_place("pool", dtype, before.unwrap_or_default())
            .output("o", self.spec.dtype, data.v.values.len());
        match self.args.verify {
            true => slots.output("states", dtype, self.states(self.rows).elements()),
            false => slots,
        }
    }

    fn kernels(&self, plan: &Decode) -> Vec<&'static str> {
        vec![plan.kernel(self.args.state.state_dtype, self.args.state.state_layout)]
    }

    fn launch(&self, mut views: Views, stream: &Stream, plan: &Decode, _: Part) -> Fallible<()> {
        let (h, rows) = (&self.spec.heads, Rows::Packed(self.rows));
        let (keys, values) = ([h.key, h.key_dim], [h.value, h.value_dim]);
        let pool = self.states(self.batch).shape();
        let [batch, heads, a, b] = pool;
        let states = [batch, self.spec.tokens, heads, a, b];
        let tensors = DecodeTensors {
            q: views.tokens("q", rows, keys)?,
            k: views.tokens("k", rows, keys)?,
            v: views.tokens("v", rows, values)?,
            gating: recurrence::gating(&mut views, rows, heads, self.args.neg_eigval)?,
            pool: StatePool {
                tensor: views.get_mut("pool", pool)?,
                layout: self.args.state.state_layout,
                slots: None,
                write_slots: None,
            },
            has_initial_state: None,
            states: views.get_some_mut("states", states)?,
            o: views.tokens_mut("o", rows, values)?,
        };
        plan.launch(stream, &tensors)
    }

    /// q, k, v, o and gates, the states in, and out after the last token or every one: each once.
    fn minimal_bytes(&self, data: &PrefillFile) -> usize {
        let written = match self.args.verify {
            true => self.rows,
            false => self.batch,
        };
        data.minimal_bytes(written, self.args.state.state_dtype)
    }

    fn check(&self, data: &PrefillFile, results: &Results, progress: &mut Progress) -> Checked {
        let (s, neg_eigval) = (&self.spec, self.args.neg_eigval);
        let problem = recurrence::problem(data, s.heads.map, s.scale, s.qk_l2norm, neg_eigval);
        let state = self.last_states(results);
        let judged = || judge::decode(&problem, &results["o"], &state);
        let [o, state] = progress.step("reference", judged)?;
        Ok(of_errors("o", o, state, None))
    }

    fn describe(&self, _: &Decode, _: &PrefillFile) -> Description {
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
            figures: figures! {
                tokens: self.rows,
                sequences: self.batch,
            }
            .and(head_figures(s.dtype, &s.heads))
            .and(figures! {
                raw_gates: args.raw_gates,
                l2norm: s.qk_l2norm,
                state_layout: layout,
                state_dtype: args.state.state_dtype.name(),
                verify: args.verify,
            }),
            ..Default::default()
        }
    }
}
