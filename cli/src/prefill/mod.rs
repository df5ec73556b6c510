//! `deltawave prefill`: a chunked prefill of drawn tensors or of a file's, run and checked.

pub mod args;
mod backward;
mod backward_ranks;
mod describe;
mod operation;
pub mod profile;
mod ranks;
mod states;

use std::path::PathBuf;
use std::rc::Rc;

use deltawave::model::Heads;
use deltawave::prefill::{Prefill, PrefillSpec, Snapshot};
use deltawave::types::Dtype;
use deltawave_lab::inputs::{Gates, InputSpec, Keys};
use deltawave_lab::memory as needed;
use deltawave_lab::oracle::Problem;
use deltawave_lab::safetensors_io::{FileBeta, PrefillFile};
use deltawave_lab::workload::{Draw, Others, Pool, inputs_of};
use deltawave_sim::gpu::Gpu;

use self::args::PrefillArgs;
use self::states::Resumed;
use crate::args::cu_seqlens;
use crate::device::{Rows, States};
use crate::driver::{self, Options, limit_threads};
use crate::failure::Failure;
use crate::report::Report;
use crate::{files, memory, recurrence};

/// A prefill.
struct PrefillRun<'a> {
    args: &'a PrefillArgs,
    spec: PrefillSpec,
    /// `[N + 1]`.
    cu_seqlens: Vec<i32>,
    /// `T`.
    tokens: usize,
    /// `B` and `T` of a dense batch.
    dense: Option<[usize; 2]>,
    /// beta up to 2.
    neg_eigval: bool,
    source: Source,
    /// Slots of the pool that has the states, where there is one.
    pool: Option<usize>,
    /// States in the course of sequences, once they are planned.
    snapshots: Option<Vec<Snapshot>>,
    outcome: Outcome,
}

/// The origin of the tensors.
enum Source {
    Drawn(Draw),
    File(Rc<PrefillFile>),
}

/// Findings about results, beside their errors.
#[derive(Default)]
struct Outcome {
    /// Whether the simulator computed them.
    simulated: bool,
    /// Slots without a sequence, if the states are in a pool.
    others: Option<Others>,
    /// Sequences that were continued from their last snapshot.
    resumed: Option<Resumed>,
}

/// Runs what the arguments ask for.
pub fn run(args: &PrefillArgs) -> Result<Report, Failure> {
    refuse_overwriting(args, None)?;
    limit_threads(&args.run);
    let run = PrefillRun::new(args)?;
    if args.backward {
        backward::refuse(&run)?;
    }
    if args.ranks.ranks.is_some() {
        return ranks::run(run, &options(args, None));
    }
    if args.backward {
        return driver::run(backward::BackwardRun(run), &options(args, None));
    }
    driver::run(run, &options(args, None))
}

fn options(args: &PrefillArgs, count: Option<Gpu>) -> Options<'_> {
    Options {
        run: &args.run,
        model: &args.shape,
        mfma: args.mfma,
        count,
        check: args.check,
    }
}

/// No file may be written over another one that this run reads or writes.
fn refuse_overwriting(args: &PrefillArgs, roofline: Option<&PathBuf>) -> Result<(), Failure> {
    let files = [
        ("--input", args.input.as_ref()),
        ("--save-input", args.save_input.as_ref()),
        ("--output", args.output.as_ref()),
        ("--roofline", roofline),
    ];
    for (i, (first, a)) in files.iter().enumerate() {
        for (second, b) in &files[i + 1..] {
            if let (Some(a), Some(b)) = (a, b)
                && files::same(a, b)
            {
                let path = b.display();
                let why = format!("{second} {path} would overwrite the file of {first}");
                return Err(Failure::wrong(why));
            }
        }
    }
    Ok(())
}

impl<'a> PrefillRun<'a> {
    /// Reads the arguments, and the file of `--input`.
    fn new(args: &'a PrefillArgs) -> Result<Self, Failure> {
        let run = match &args.input {
            Some(path) => {
                let file = PrefillFile::read(path).map_err(Failure::file("--input", path))?;
                if args.neg_eigval && !matches!(file.beta, FileBeta::Logits(_)) {
                    let why =
                        "--neg-eigval doubles the sigmoid of b, and the file has no tensor `b`";
                    return Err(Failure::wrong(why));
                }
                Self::of_file(args, Rc::new(file))
            }
            None => Self::of_arguments(args)?,
        };
        let (sequences, checked) = (run.sequences(), args.check);
        memory::check(needed::prefill(&run.spec, run.tokens, sequences, checked))?;
        Ok(run)
    }

    fn of_file(args: &'a PrefillArgs, file: Rc<PrefillFile>) -> Self {
        let heads = Heads::new(
            file.key_heads,
            file.value_heads,
            file.key_dim,
            file.value_dim,
        );
        let (dtype, cu_seqlens, tokens) = (file.q.dtype, file.cu_seqlens.clone(), file.tokens);
        Self::of_source(args, (dtype, heads), cu_seqlens, tokens, Source::File(file))
    }

    fn of_arguments(args: &'a PrefillArgs) -> Result<Self, Failure> {
        let ([hk, hv], [k, v]) = args.shape.shape(args.dims.dims)?;
        let heads = Heads::new(hk, hv, k, v);
        let dense = (args.batch.zip(args.len)).map(|(batch, len)| [batch as usize, len]);
        let (flag, lengths) = match dense {
            Some([batch, len]) => ("--batch", vec![len; batch]),
            None if args.seqlens.is_empty() => ("--seqlens", vec![1024]),
            None => ("--seqlens", args.seqlens.clone()),
        };
        let cu_seqlens = cu_seqlens(flag, &lengths)?;
        let tokens = lengths.iter().sum();
        // OLMo-Hybrid's beta goes up to 2, and its gates are computed from the projections.
        let doubled = args.shape.neg_eigval();
        let dtype = args.dtype.unwrap_or(Dtype::Bf16);
        let source = Source::Drawn(Draw {
            input: InputSpec {
                gates: args.gates.unwrap_or(Gates::Normal),
                keys: args.keys.unwrap_or(Keys::Normal),
                unit_rows: !args.scale.l2norm,
                seed: args.seed.unwrap_or(0),
                ..inputs_of(dtype, tokens, &heads)
            },
            raw_gates: args.raw_gates || (doubled && args.gates.is_none()),
            neg_eigval: args.neg_eigval || doubled,
            initial_state: args.initial_state.and_then(|initial| initial.0),
        });
        Ok(PrefillRun {
            dense,
            ..Self::of_source(args, (dtype, heads), cu_seqlens, tokens, source)
        })
    }

    fn of_source(
        args: &'a PrefillArgs,
        (dtype, heads): (Dtype, Heads),
        cu_seqlens: Vec<i32>,
        tokens: usize,
        source: Source,
    ) -> Self {
        PrefillRun {
            args,
            spec: PrefillSpec {
                dtype,
                heads: Heads {
                    map: args.head_map,
                    ..heads
                },
                qk_l2norm: args.scale.l2norm,
                scale: args.scale.scale(),
                segments: args.segments.map(|n| n as usize),
                path: args.path,
                ..PrefillSpec::new(heads.key, heads.value, heads.key_dim, heads.value_dim)
            },
            cu_seqlens,
            tokens,
            dense: None,
            neg_eigval: args.neg_eigval || args.shape.neg_eigval(),
            source,
            pool: args.pool.map(|slots| slots as usize),
            snapshots: None,
            outcome: Outcome::default(),
        }
    }

    /// `N`.
    fn sequences(&self) -> usize {
        self.cu_seqlens.len() - 1
    }

    /// Element type of the initial states, where there are any.
    fn initial_state(&self) -> Option<Dtype> {
        match &self.source {
            Source::Drawn(draw) => draw.initial_state,
            Source::File(file) => file.initial_state.as_ref().map(|t| t.dtype),
        }
    }

    /// Gives the plan the slots of `--pool`.
    fn plan_pool(&self, plan: &mut Prefill, slots: usize) -> Result<(), Failure> {
        let sequences = self.sequences();
        if slots < sequences {
            return Err(Failure::wrong(format!(
                "invalid value '{slots}' for '--pool <SLOTS>': {sequences} sequences need as many slots"
            )));
        }
        let dtype = self.args.state.state_dtype;
        if let Some(initial) = self.initial_state().filter(|initial| *initial != dtype) {
            return Err(Failure::wrong(format!(
                "a pool has states of one type, and --initial-state is {initial}, --state-dtype {dtype}"
            )));
        }
        plan.set_slots(&Pool::own(slots, sequences), None)
            .map_err(Failure::during("the slots are refused"))
    }
    /// The same prefill for the reference.
    fn problem<'d>(&self, data: &'d PrefillFile) -> Problem<'d> {
        let s = &self.spec;
        recurrence::problem(data, s.heads.map, s.scale, s.qk_l2norm, self.neg_eigval)
    }

    /// So many states as they lie on the device.
    fn states(&self, count: usize) -> States {
        States {
            count,
            heads: self.spec.heads,
            layout: self.args.state.state_layout,
        }
    }

    fn rows(&self) -> Rows {
        self.dense.map_or(Rows::Packed(self.tokens), Rows::Dense)
    }
}
