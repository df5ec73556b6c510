//! `deltawave prefill`: a chunked prefill of drawn tensors or of a file's, run and checked.

pub mod args;
mod check;
mod describe;
mod device;
pub mod profile;
mod states;

use std::path::PathBuf;

use deltawave::model::Heads;
use deltawave::prefill::{Prefill, PrefillSpec, Snapshot};
use deltawave::runtime::Context;
use deltawave::types::Dtype;
use deltawave_lab::inputs::{GateInputs, Gates, InputSpec, Inputs, Keys, Tensor, random_state};
use deltawave_lab::oracle::{Beta, Problem};
use deltawave_lab::safetensors_io::{FileBeta, FileGate, PrefillFile};
use deltawave_sim::gpu::Gpu;

use self::args::PrefillArgs;
use crate::args::cu_seqlens;
use crate::device::States;
use crate::driver::{self, Options, Request, limit_threads};
use crate::failure::Failure;
use crate::report::Report;
use crate::{files, memory};

/// A prefill whose shape is known, and whose tensors may still have to be drawn.
struct Planned<'a> {
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
}

enum Source {
    Drawn(Draw),
    File(Box<PrefillFile>),
}

/// Drawn tensors.
#[derive(Clone, Copy, Debug)]
struct Draw {
    /// Distributions and seed.
    input: InputSpec,
    /// a, b, A_log and dt_bias instead of g and beta.
    raw_gates: bool,
    /// Element type of the initial states, where there are any.
    initial_state: Option<Dtype>,
}

/// A prefill with its tensors.
struct Workload<'a> {
    args: &'a PrefillArgs,
    spec: PrefillSpec,
    dense: Option<[usize; 2]>,
    neg_eigval: bool,
    /// How the tensors were drawn, unless they are from a file.
    drawn: Option<Draw>,
    /// The tensors, as a file would hold them.
    data: PrefillFile,
    /// Slots of the pool that has the states, where there is one.
    pool: Option<usize>,
    /// States in the course of sequences.
    snapshots: Option<Vec<Snapshot>>,
}

/// Runs what the arguments ask for.
pub fn run(args: &PrefillArgs) -> Result<Report, Failure> {
    refuse_overwriting(args, None)?;
    limit_threads(&args.run);
    driver::run(Planned::new(args)?, &options(args, None))
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

impl<'a> Planned<'a> {
    /// Reads the arguments, and the file of `--input`.
    fn new(args: &'a PrefillArgs) -> Result<Self, Failure> {
        let request = match &args.input {
            Some(path) => {
                let file = PrefillFile::read(path).map_err(Failure::file("--input", path))?;
                Self::of_file(args, file)?
            }
            None => Self::of_arguments(args)?,
        };
        request.check_memory()?;
        Ok(request)
    }

    fn of_file(args: &'a PrefillArgs, file: PrefillFile) -> Result<Self, Failure> {
        if args.neg_eigval && !matches!(file.beta, FileBeta::Logits(_)) {
            let why = "--neg-eigval doubles the sigmoid of b, and the file has no tensor `b`";
            return Err(Failure::wrong(why));
        }
        let heads = [file.key_heads, file.value_heads];
        Ok(Planned {
            args,
            spec: spec(args, file.q.dtype, heads, [file.key_dim, file.value_dim]),
            cu_seqlens: file.cu_seqlens.clone(),
            tokens: file.tokens,
            dense: None,
            neg_eigval: args.neg_eigval,
            source: Source::File(Box::new(file)),
        })
    }

    fn of_arguments(args: &'a PrefillArgs) -> Result<Self, Failure> {
        let (heads, dims) = args.shape.shape(args.dims.dims)?;
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
        let input = InputSpec {
            dtype,
            tokens,
            key_heads: heads[0],
            value_heads: heads[1],
            key_dim: dims[0],
            value_dim: dims[1],
            gates: args.gates.unwrap_or(Gates::Normal),
            keys: args.keys.unwrap_or(Keys::Normal),
            unit_rows: !args.scale.l2norm,
            seed: args.seed.unwrap_or(0),
        };
        Ok(Planned {
            args,
            spec: spec(args, dtype, heads, dims),
            cu_seqlens,
            tokens,
            dense,
            neg_eigval: args.neg_eigval || doubled,
            source: Source::Drawn(Draw {
                input,
                raw_gates: args.raw_gates || (doubled && args.gates.is_none()),
                initial_state: args.initial_state.and_then(|initial| initial.0),
            }),
        })
    }

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

    /// The host must hold the tensors, their copies on the simulated device and, if there is one, the reference.
    fn check_memory(&self) -> Result<(), Failure> {
        // Bytes of each element: its bits twice, its value, and what the reference keeps in f64.
        let each = if self.args.check { 24 } else { 12 };
        let s = &self.spec;
        let tokens = self.tokens as u128;
        let keys = 2 * tokens * (s.heads.key * s.heads.key_dim) as u128;
        let values = 2 * tokens * (s.heads.value * s.heads.value_dim) as u128;
        let sequences = self.cu_seqlens.len() as u128;
        let states =
            sequences * s.heads.value as u128 * (s.heads.key_dim * s.heads.value_dim) as u128;
        let records = (tokens / 64 + sequences) * s.heads.value as u128;
        // The planner chooses segments of four chunks or more.
        let chunks = tokens / 64;
        let followed = (s.segments).map_or(chunks / 4, |n| sequences * (n as u128 - 1));
        let summary = s.heads.value
            * (s.heads.value_dim + s.heads.key_dim.max(s.heads.value_dim))
            * s.heads.key_dim
            * 4;
        let summaries = followed.min(chunks) * summary as u128;
        let workspace = records * u128::from(deltawave::abi::DWK_RECORD_BYTES) + summaries;
        memory::check(each * (keys + values + states) + workspace)
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
        plan.set_slots(&states::slots(sequences, slots), None)
            .map_err(Failure::during("the slots are refused"))
    }
}

impl<'a> Request for Planned<'a> {
    type Workload = Workload<'a>;

    fn plan(&self, context: &Context) -> Result<Prefill, Failure> {
        let plan = match self.dense {
            Some([batch, len]) => Prefill::dense(context, self.spec, batch, len),
            None => Prefill::packed(context, self.spec, &self.cu_seqlens, self.tokens),
        };
        let mut plan = plan.map_err(Failure::during("planning the prefill failed"))?;
        if let Some(slots) = self.args.pool {
            self.plan_pool(&mut plan, slots as usize)?;
        }
        if let Some(tokens) = self.args.snapshots {
            (plan
                .snapshots_every(tokens)
                .and_then(|all| plan.set_snapshots(&all)))
            .map_err(Failure::during("the snapshots are refused"))?;
        }
        Ok(plan)
    }

    fn load(self, plan: &Prefill) -> Result<Workload<'a>, Failure> {
        let (drawn, data) = match self.source {
            Source::File(file) => (None, *file),
            Source::Drawn(draw) => {
                let data = draw_inputs(draw, self.neg_eigval, &self.cu_seqlens);
                (Some(draw), data)
            }
        };
        if let Some(path) = &self.args.save_input {
            data.write(path)
                .map_err(Failure::file("--save-input", path))?;
        }
        let snapshots = (self.args.snapshots).map(|tokens| plan.snapshots_every(tokens));
        Ok(Workload {
            args: self.args,
            spec: self.spec,
            dense: self.dense,
            neg_eigval: self.neg_eigval,
            drawn,
            data,
            pool: self.args.pool.map(|slots| slots as usize),
            snapshots: (snapshots.transpose())
                .map_err(Failure::during("the snapshots are refused"))?,
        })
    }
}

impl Workload<'_> {
    /// The same prefill for the reference.
    fn problem(&self) -> Problem<'_> {
        let mut problem = self.data.problem();
        problem.scale = self.spec.scale.map(f64::from);
        problem.head_map = self.spec.heads.map;
        problem.l2_norm = self.spec.qk_l2norm;
        if let Beta::Logits {
            allow_neg_eigval, ..
        } = &mut problem.beta
        {
            *allow_neg_eigval = self.neg_eigval;
        }
        problem
    }

    /// `N`.
    fn sequences(&self) -> usize {
        self.data.cu_seqlens.len() - 1
    }

    /// So many states as they lie on the device.
    fn states(&self, count: usize) -> States {
        States {
            count,
            heads: self.spec.heads.value,
            key_dim: self.spec.heads.key_dim,
            value_dim: self.spec.heads.value_dim,
            layout: self.args.state.state_layout,
        }
    }
}

/// Operation options, the same for drawn tensors and a file's.
fn spec(args: &PrefillArgs, dtype: Dtype, [hk, hv]: [usize; 2], [k, v]: [usize; 2]) -> PrefillSpec {
    PrefillSpec {
        dtype,
        heads: Heads {
            map: args.head_map,
            ..Heads::new(hk, hv, k, v)
        },
        qk_l2norm: args.scale.l2norm,
        scale: args.scale.scale(),
        segments: args.segments.map(|n| n as usize),
        ..PrefillSpec::new(hk, hv, k, v)
    }
}

fn draw_inputs(draw: Draw, neg_eigval: bool, cu_seqlens: &[i32]) -> PrefillFile {
    let s = draw.input;
    let f32s = |values| Tensor::new(Dtype::F32, values);
    let mut inputs = Inputs::new(s);
    let (gate, beta) = if draw.raw_gates {
        let raw = GateInputs::new(s);
        let gate = FileGate::Raw {
            a: raw.a,
            a_log: f32s(raw.a_log),
            dt_bias: Some(f32s(raw.dt_bias)),
        };
        (gate, FileBeta::Logits(raw.b))
    } else {
        if neg_eigval {
            inputs.beta.iter_mut().for_each(|b| *b *= 2.0);
        }
        (
            FileGate::Log(f32s(inputs.g)),
            FileBeta::Given(f32s(inputs.beta)),
        )
    };
    let states = (cu_seqlens.len() - 1) * s.value_heads * s.key_dim * s.value_dim;
    PrefillFile {
        tokens: s.tokens,
        key_heads: s.key_heads,
        value_heads: s.value_heads,
        key_dim: s.key_dim,
        value_dim: s.value_dim,
        q: inputs.q,
        k: inputs.k,
        v: inputs.v,
        gate,
        beta,
        cu_seqlens: cu_seqlens.to_vec(),
        initial_state: (draw.initial_state).map(|dtype| random_state(dtype, states, s.seed)),
    }
}
