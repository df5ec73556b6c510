//! A whole layer of three models, with random weights, as an engine runs it. `cargo run --release --example 06-layer`
//!
//! One call takes a batch from the input projections to what the output projection reads: convolution, gates, recurrence
//! and gated norm, in place on the pools of conv states and of recurrent states. The first call prefills a prompt; the
//! second one decodes its next token and prefills another prompt beside it. The f64 oracle has both sequences at once.

use std::error::Error;

use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::layer::{Layer, LayerSpec, LayerStates, LayerTensors, LayerWeights};
use deltawave::runtime::{Backend, Context, Stream};
use deltawave::tensor::Buffer;
use deltawave::types::{Dtype, HeadMap, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::{Tensor as HostTensor, random_normal};
use deltawave_lab::metrics::compare;
use deltawave_lab::oracle::layer::{LayerProblem, layer};
use half::bf16;

/// Tokens of the first prompt, to which one is added, and of the second.
const PROMPTS: [usize; 2] = [40, 20];
const SLOTS: usize = 4;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::new(Backend::Auto, 0)?;
    let models = [
        ("Qwen3.5-35B-A3B", LayerSpec::new(16, 32, 128, 128)),
        ("Qwen3.5-27B", LayerSpec::new(16, 48, 128, 128)),
        (
            "OLMo-Hybrid-7B",
            LayerSpec {
                allow_neg_eigval: true, // beta up to 2
                ..LayerSpec::new(30, 30, 96, 192)
            },
        ),
    ];
    for (name, spec) in models {
        let model = Model::new(&context, spec)?;
        let mut pools = Pools::new(&context, &spec)?;
        let [first, second] = PROMPTS;
        let all = first + 1 + second;
        let inputs = Inputs::new(&spec, all);

        // Sequences have the slots 2 and 0, and no states yet.
        let prompt = Layer::packed(&context, spec, &[0, first as i64], first, 0)?;
        let mut y = pools.run(&context, &model, &prompt, &inputs.rows(0, first), &[(2, 0)])?;
        let lengths = [0, 1, 1 + second as i64];
        let mixed = Layer::packed(&context, spec, &lengths, 1 + second, 1)?;
        let rest = inputs.rows(first, all);
        y.extend(pools.run(&context, &model, &mixed, &rest, &[(2, 1), (0, 0)])?);

        let error = compare(&y, &model.oracle(&inputs)).rms_ratio;
        println!(
            "{name}: {error:.1e} off, in {:?}",
            mixed.kernels(Dtype::F32, StateLayout::KeyMajor)
        );
        assert!(error < 6e-3);
    }
    Ok(())
}

/// Weights, on the host and on the device.
struct Model {
    spec: LayerSpec,
    host: [HostTensor; 3],
    conv: Buffer<u8>,
    a_log: Buffer<u8>,
    norm: Buffer<u8>,
}

impl Model {
    fn new(context: &Context, spec: LayerSpec) -> deltawave::Result<Self> {
        let channels = spec.conv().total_channels();
        let conv = random_normal(spec.dtype, "conv", channels * spec.width, 0);
        let a_log = random_normal(Dtype::F32, "a_log", spec.heads.value, 0);
        let norm = random_normal(Dtype::F32, "norm", spec.heads.value_dim, 0);
        Ok(Model {
            spec,
            conv: context.upload(&conv.bytes)?,
            a_log: context.upload(&a_log.bytes)?,
            norm: context.upload(&norm.bytes)?,
            host: [conv, a_log, norm],
        })
    }

    fn weights(&self) -> deltawave::Result<LayerWeights<'_>> {
        let (s, channels) = (&self.spec, self.spec.conv().total_channels());
        let shape = [channels, s.width];
        Ok(LayerWeights {
            conv: self.conv.tensor_of(s.dtype, shape, [s.width, 1], 0)?,
            conv_bias: None,
            a_log: self.a_log.tensor_of(Dtype::F32, [s.heads.value], [1], 0)?,
            dt_bias: None,
            norm: Some(
                self.norm
                    .tensor_of(Dtype::F32, [s.heads.value_dim], [1], 0)?,
            ),
        })
    }

    /// y of both sequences, whole.
    fn oracle(&self, inputs: &Inputs) -> Vec<f64> {
        let (s, [conv, a_log, norm]) = (&self.spec, &self.host);
        let channels = s.conv().total_channels();
        let rows = inputs.projections.values.chunks_exact(inputs.columns);
        let (x, z): (Vec<_>, Vec<_>) = rows.map(|row| row.split_at(channels)).unzip();
        let first = PROMPTS[0] as i32 + 1;
        let problem = LayerProblem {
            dtype: s.dtype,
            tokens: inputs.tokens(),
            key_heads: s.heads.key,
            value_heads: s.heads.value,
            key_dim: s.heads.key_dim,
            value_dim: s.heads.value_dim,
            width: s.width,
            x: &x.concat(),
            z: &z.concat(),
            a: &inputs.a.values,
            b: &inputs.b.values,
            conv_weight: &conv.values,
            conv_bias: None,
            a_log: &a_log.values,
            dt_bias: None,
            norm_weight: Some(&norm.values),
            allow_neg_eigval: s.allow_neg_eigval,
            l2_norm: s.qk_l2norm,
            head_map: HeadMap::Grouped,
            eps: s.eps.into(),
            silu: true,
            cu_seqlens: &[0, first, first + PROMPTS[1] as i32],
            conv_state: None,
            state: None,
            has_initial_state: None,
            padding: None,
        };
        layer(&problem).expect("the shapes are right").y
    }
}

/// What the input projections give: rows `q | k | v | z`, a and b.
struct Inputs {
    columns: usize,
    heads: usize,
    projections: HostTensor,
    a: HostTensor,
    b: HostTensor,
}

impl Inputs {
    fn new(spec: &LayerSpec, tokens: usize) -> Self {
        let heads = spec.heads.value;
        let columns = spec.conv().total_channels() + heads * spec.heads.value_dim;
        let draw = |name, n| random_normal(spec.dtype, name, n, 0);
        Inputs {
            columns,
            heads,
            projections: draw("projections", tokens * columns),
            a: draw("a", tokens * heads),
            b: draw("b", tokens * heads),
        }
    }

    fn tokens(&self) -> usize {
        self.a.values.len() / self.heads
    }

    fn rows(&self, first: usize, last: usize) -> Self {
        let pick = |t: &HostTensor, row: usize| {
            HostTensor::new(t.dtype, t.values[first * row..last * row].to_vec())
        };
        Inputs {
            projections: pick(&self.projections, self.columns),
            a: pick(&self.a, self.heads),
            b: pick(&self.b, self.heads),
            ..*self
        }
    }
}

/// The memory of an engine: states of all sequences, whatever batch they are in.
struct Pools {
    conv: Buffer<bf16>,
    recurrent: Buffer<f32>,
    stream: Stream,
}

impl Pools {
    fn new(context: &Context, spec: &LayerSpec) -> deltawave::Result<Self> {
        let channels = spec.conv().total_channels();
        let state = spec.heads.value * spec.heads.key_dim * spec.heads.value_dim;
        Ok(Pools {
            conv: context.alloc(SLOTS * channels * (spec.width - 1))?,
            recurrent: context.alloc(SLOTS * state)?,
            stream: context.stream()?,
        })
    }

    /// y of a batch whose sequences have these slots, and 1 where they have a state there.
    fn run(
        &mut self,
        context: &Context,
        model: &Model,
        plan: &Layer,
        inputs: &Inputs,
        sequences: &[(i32, u8)],
    ) -> deltawave::Result<Vec<f32>> {
        let (s, tokens) = (&model.spec, inputs.tokens());
        let (slots, has): (Vec<i32>, Vec<u8>) = sequences.iter().copied().unzip();
        let (slots, has) = (context.upload(&slots)?, context.upload(&has)?);
        let rows = context.upload(&inputs.projections.bytes)?;
        let rows = rows.tensor_of(s.dtype, [tokens, inputs.columns], [inputs.columns, 1], 0)?;
        let (a, b) = (
            context.upload(&inputs.a.bytes)?,
            context.upload(&inputs.b.bytes)?,
        );
        let scalars = [tokens, inputs.heads];
        let mut y = context.alloc::<bf16>(tokens * s.heads.value * s.heads.value_dim)?;
        let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;
        let (channels, columns) = (s.conv().total_channels(), s.width - 1);
        let tensors = LayerTensors {
            cu_seqlens: None,
            x: ConvInput::flat(&rows, &s.conv())?,
            z: ConvInput::flat_z(&rows, &s.conv())?,
            a: a.tensor_of(s.dtype, scalars, [inputs.heads, 1], 0)?.into(),
            b: b.tensor_of(s.dtype, scalars, [inputs.heads, 1], 0)?.into(),
            weights: model.weights()?,
            states: LayerStates {
                conv: self.conv.tensor_mut([SLOTS, channels, columns])?,
                conv_layout: ConvStateLayout::ChannelMajor,
                recurrent: (self.recurrent).tensor_mut([
                    SLOTS,
                    s.heads.value,
                    s.heads.key_dim,
                    s.heads.value_dim,
                ])?,
                recurrent_layout: StateLayout::KeyMajor,
                slots: Some((&slots).into()),
                has_initial_state: Some((&has).into()),
            },
            y: y.tensor_mut([tokens, s.heads.value, s.heads.value_dim])?
                .into(),
        };
        plan.launch(&self.stream, &tensors, Workspace::new(&mut workspace))?;
        let y = y.download(&self.stream)?;
        Ok(y.iter().map(|x| x.to_f32()).collect())
    }
}
