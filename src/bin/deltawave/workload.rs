//! A prefill on the host: what the arguments or a file ask for, and its tensors.

use clap::CommandFactory;
use clap::error::ErrorKind;
use deltawave::inputs::{GateInputs, Gates, InputSpec, Inputs, Keys, Tensor, random_state};
use deltawave::oracle::{Beta, Problem};
use deltawave::prefill::{Prefill, PrefillSpec};
use deltawave::runtime::Context;
use deltawave::safetensors_io::{FileBeta, FileGate, PrefillFile};
use deltawave::types::Dtype;

use crate::args::{Cli, InitialState, PrefillArgs};
use crate::failure::Failure;
use crate::models::Model;
use crate::table;

/// A prefill whose shape is known, and whose tensors may still have to be drawn.
pub struct Request {
    /// What is computed.
    pub spec: PrefillSpec,
    /// `[N + 1]`.
    pub cu_seqlens: Vec<i32>,
    /// `T`.
    pub tokens: usize,
    /// `B` and `T` of a dense batch.
    pub dense: Option<[usize; 2]>,
    /// beta up to 2.
    pub neg_eigval: bool,
    source: Source,
}

enum Source {
    Drawn(Draw),
    File(Box<PrefillFile>),
}

/// What is drawn.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// Distributions and seed.
    pub input: InputSpec,
    /// a, b, A_log and dt_bias instead of g and beta.
    pub raw_gates: bool,
    /// Element type of the initial states, where there are any.
    pub initial_state: Option<Dtype>,
}

/// A prefill with its tensors.
pub struct Workload {
    /// What is computed.
    pub spec: PrefillSpec,
    /// `B` and `T` of a dense batch.
    pub dense: Option<[usize; 2]>,
    /// beta up to 2.
    pub neg_eigval: bool,
    /// How the tensors were drawn, unless they are from a file.
    pub drawn: Option<Draw>,
    /// The tensors, as a file would hold them.
    pub data: PrefillFile,
}

impl Request {
    /// What the arguments ask for; a file is read and checked here.
    pub fn new(args: &PrefillArgs) -> Result<Self, Failure> {
        match &args.input {
            Some(path) => {
                let file = PrefillFile::read(path).map_err(|source| Failure::File {
                    argument: "--input",
                    path: path.clone(),
                    source: source.into(),
                })?;
                Self::of_file(args, file)
            }
            None => Self::of_arguments(args),
        }
    }

    fn of_file(args: &PrefillArgs, file: PrefillFile) -> Result<Self, Failure> {
        if args.neg_eigval && !matches!(file.beta, FileBeta::Logits(_)) {
            let why = "--neg-eigval doubles the sigmoid of b, and the file has no tensor `b`";
            return Err(usage(why.to_owned()));
        }
        Ok(Request {
            spec: PrefillSpec {
                dtype: file.q.dtype,
                ..spec(
                    args,
                    [file.key_heads, file.value_heads],
                    [file.key_dim, file.value_dim],
                )
            },
            cu_seqlens: file.cu_seqlens.clone(),
            tokens: file.tokens,
            dense: None,
            neg_eigval: args.neg_eigval,
            source: Source::File(Box::new(file)),
        })
    }

    fn of_arguments(args: &PrefillArgs) -> Result<Self, Failure> {
        let (heads, dims) = match (args.model, args.heads) {
            (Some(model), _) => of_model("prefill", model, args.tp)?,
            (None, Some(heads)) => (heads, args.dims),
            (None, None) => {
                return Err(usage(
                    "one of --model, --heads and --input is needed".into(),
                ));
            }
        };
        let dense = (args.batch.zip(args.len)).map(|(batch, len)| [batch as usize, len]);
        let lengths = match dense {
            Some([batch, len]) => vec![len; batch],
            None if args.seqlens.is_empty() => vec![1024],
            None => args.seqlens.clone(),
        };
        let tokens: usize = lengths.iter().sum();
        let cu_seqlens = cu_seqlens(&lengths).map_err(|tokens| {
            let name = if dense.is_some() { "batch" } else { "seqlens" };
            usage(format!(
                "invalid value for '--{name}': {tokens} tokens in all, they must be below 2^31"
            ))
        })?;
        // OLMo-Hybrid's beta goes up to 2, and its gates are computed from the projections.
        let neg_eigval = args.neg_eigval || args.model.is_some_and(|m| m.neg_eigval);
        let raw_gates =
            args.raw_gates || (args.model.is_some_and(|m| m.neg_eigval) && args.gates.is_none());
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
            unit_rows: !args.l2norm,
            seed: args.seed.unwrap_or(0),
        };
        Ok(Request {
            spec: PrefillSpec {
                dtype,
                ..spec(args, heads, dims)
            },
            cu_seqlens,
            tokens,
            dense,
            neg_eigval,
            source: Source::Drawn(Draw {
                input,
                raw_gates,
                initial_state: args.initial_state.and_then(InitialState::dtype),
            }),
        })
    }

    /// Element type of the initial states, where there are any.
    pub fn initial_state(&self) -> Option<Dtype> {
        match &self.source {
            Source::Drawn(draw) => draw.initial_state,
            Source::File(file) => file.initial_state.as_ref().map(|t| t.dtype),
        }
    }

    /// The plan; a shape that the library does not take is refused here, before anything is drawn.
    pub fn plan(&self, context: &Context) -> Result<Prefill, Failure> {
        match self.dense {
            Some([batch, len]) => Prefill::dense(context, self.spec, batch, len),
            None => Prefill::packed(context, self.spec, &self.cu_seqlens, self.tokens),
        }
        .map_err(Failure::during("the prefill cannot be planned"))
    }

    /// Fails where the host's memory cannot hold the tensors, their copies on the simulated device and, if there is one,
    /// the reference.
    pub fn check_memory(&self, reference: bool) -> Result<(), Failure> {
        // Of each element: its bits twice, its value, and what the reference keeps in f64.
        let each = if reference { 24 } else { 12 };
        let s = &self.spec;
        let keys = 2 * self.tokens as u128 * (s.key_heads * s.key_dim) as u128;
        let values = 2 * self.tokens as u128 * (s.value_heads * s.value_dim) as u128;
        let sequences = self.cu_seqlens.len() as u128;
        let states = sequences * s.value_heads as u128 * (s.key_dim * s.value_dim) as u128;
        let records = (self.tokens as u128 / 64 + sequences) * s.value_heads as u128;
        // As many segments as there may be: those that the planner chooses have four chunks or more.
        let chunks = self.tokens as u128 / 64;
        let followed = s
            .segments
            .map_or(chunks / 4, |n| sequences * (n as u128).saturating_sub(1));
        let summary = s.value_heads * (s.value_dim + s.key_dim.max(s.value_dim)) * s.key_dim * 4;
        let summaries = followed.min(chunks) * summary as u128;
        let workspace = records * u128::from(deltawave::abi::DWK_RECORD_BYTES) + summaries;
        let needed = each * (keys + values + states) + workspace;
        check_host_memory(needed)
    }

    /// Draws the tensors, unless they were read.
    pub fn load(self) -> Workload {
        let (drawn, data) = match self.source {
            Source::File(file) => (None, *file),
            Source::Drawn(draw) => (
                Some(draw),
                draw_inputs(draw, self.neg_eigval, &self.cu_seqlens),
            ),
        };
        Workload {
            spec: self.spec,
            dense: self.dense,
            neg_eigval: self.neg_eigval,
            drawn,
            data,
        }
    }
}

impl Workload {
    /// The same prefill for the reference.
    pub fn problem(&self) -> Problem<'_> {
        let mut problem = self.data.problem();
        problem.scale = self.spec.scale.map(f64::from);
        problem.head_map = self.spec.head_map;
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
    pub fn sequences(&self) -> usize {
        self.data.cu_seqlens.len() - 1
    }
}

/// What the arguments say about the operation, whatever the source of the tensors.
fn spec(args: &PrefillArgs, [hk, hv]: [usize; 2], [k, v]: [usize; 2]) -> PrefillSpec {
    PrefillSpec {
        head_map: args.head_map.into(),
        qk_l2norm: args.l2norm,
        scale: args.scale,
        segments: args.segments.map(|n| n as usize),
        ..PrefillSpec::new(hk, hv, k, v)
    }
}

fn draw_inputs(draw: Draw, neg_eigval: bool, cu_seqlens: &[i32]) -> PrefillFile {
    let s = draw.input;
    let Inputs {
        q,
        k,
        v,
        g,
        mut beta,
        ..
    } = Inputs::new(s);
    let (gate, beta) = if draw.raw_gates {
        let raw = GateInputs::new(s);
        let gate = FileGate::Raw {
            a: raw.a,
            a_log: Tensor::new(Dtype::F32, raw.a_log),
            dt_bias: Some(Tensor::new(Dtype::F32, raw.dt_bias)),
        };
        (gate, FileBeta::Logits(raw.b))
    } else {
        if neg_eigval {
            beta.iter_mut().for_each(|b| *b *= 2.0);
        }
        (
            FileGate::Log(Tensor::new(Dtype::F32, g)),
            FileBeta::Given(Tensor::new(Dtype::F32, beta)),
        )
    };
    let states = (cu_seqlens.len() - 1) * s.value_heads * s.key_dim * s.value_dim;
    PrefillFile {
        tokens: s.tokens,
        key_heads: s.key_heads,
        value_heads: s.value_heads,
        key_dim: s.key_dim,
        value_dim: s.value_dim,
        q,
        k,
        v,
        gate,
        beta,
        cu_seqlens: cu_seqlens.to_vec(),
        initial_state: (draw.initial_state).map(|dtype| random_state(dtype, states, s.seed)),
    }
}

/// Heads and dimensions of the part of a model's layer that one of `tp` devices has.
pub fn of_model(
    subcommand: &str,
    model: &Model,
    tp: usize,
) -> Result<([usize; 2], [usize; 2]), Failure> {
    let (hk, hv) = model.heads_per_rank(tp).ok_or_else(|| {
        let ranks: Vec<_> = model.ranks().iter().map(usize::to_string).collect();
        let message = format!(
            "invalid value '{tp}' for '--tp <N>': the {} key and {} value heads of {} can be shared out to {} devices",
            model.key_heads,
            model.value_heads,
            model.name,
            ranks.join(", ")
        );
        usage_of(subcommand, message)
    })?;
    Ok(([hk, hv], [model.key_dim, model.value_dim]))
}

/// Where sequences of these lengths start, and the end of the last one. The error is their number of tokens, which 31
/// bits do not hold.
pub fn cu_seqlens(lengths: &[usize]) -> Result<Vec<i32>, usize> {
    let ends = lengths.iter().scan(0usize, |end, n| {
        *end += n;
        Some(*end)
    });
    std::iter::once(0)
        .chain(ends)
        .map(|end| i32::try_from(end).map_err(|_| lengths.iter().sum()))
        .collect()
}

/// A refusal of a prefill's arguments that fit their types, but not each other.
pub fn usage(message: String) -> Failure {
    usage_of("prefill", message)
}

/// The same of another subcommand.
pub fn usage_of(subcommand: &str, message: String) -> Failure {
    let mut command = Cli::command();
    command.build();
    let command = command
        .find_subcommand_mut(subcommand)
        .expect("every operation is a subcommand");
    command.error(ErrorKind::ValueValidation, message).into()
}

/// Fails where so many bytes are more than the host has.
pub fn check_host_memory(needed: u128) -> Result<(), Failure> {
    match host_memory() {
        Some(available) if needed > available => {
            let text = |n: u128| table::bytes(u64::try_from(n).unwrap_or(u64::MAX));
            Err(Failure::Memory {
                needed: text(needed),
                available: text(available),
            })
        }
        _ => Ok(()),
    }
}

/// Bytes of the host's memory, where the system says.
fn host_memory() -> Option<u128> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    let kib: u128 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib << 10)
}
