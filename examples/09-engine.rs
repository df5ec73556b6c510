//! Steps of an engine, all of them replays of one graph. `cargo run --release --example 09-engine`
//!
//! A [`Layer`] reads its lengths on the device, so that what was captured once serves steps of varying lengths: a decode
//! that is not there has a negative slot, a prefill that is not there has no tokens. Two prompts are prefilled, then one
//! step decodes a token of each beside the prefill of a third; and a prompt with its next token, prefilled at once, has the
//! same output within the rounding of its type.

use std::error::Error;

use deltawave::conv::{ConvInput, ConvStateLayout};
use deltawave::layer::Layer;
use deltawave::layer::{LayerSpec, LayerStates, LayerTensors, LayerWeights};
use deltawave::runtime::{Backend, Context, Graph, Stream};
use deltawave::tensor::Buffer;
use deltawave::types::{Dtype, StateLayout};
use deltawave::workspace::Workspace;
use deltawave_lab::inputs::random_normal;
use deltawave_lab::metrics::compare;
use half::bf16;

/// What the graph holds at most: rows, and sequences, of which the first are decodes.
const ROWS: usize = 64;
const SEQUENCES: usize = 4;
const DECODES: usize = 2;
const SLOTS: usize = 4;

/// Some tokens of a prompt, from the first on; its states are in a slot.
#[derive(Clone, Copy)]
struct Sequence {
    prompt: u64,
    first: usize,
    tokens: usize,
    slot: i32,
}

/// A decode that is not there, and a prefill.
const NO_DECODE: Sequence = sequence(9, 0, 1, -1);
const NO_PREFILL: Sequence = sequence(9, 0, 0, -1);

const fn sequence(prompt: u64, first: usize, tokens: usize, slot: i32) -> Sequence {
    Sequence {
        prompt,
        first,
        tokens,
        slot,
    }
}

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::new(Backend::Auto, 0)?;
    let mut engine = Engine::new(&context, LayerSpec::new(1, 2, 32, 128))?;
    let graph = engine.capture()?;

    let [first, second] = [sequence(0, 0, 20, 2), sequence(1, 0, 33, 0)];
    engine.step(&graph, [NO_DECODE, NO_DECODE, first, second])?;
    let (decodes, third) = (
        [sequence(0, 20, 1, 2), sequence(1, 33, 1, 0)],
        sequence(2, 0, 17, 3),
    );
    let decoded = engine.step(&graph, [decodes[0], decodes[1], third, NO_PREFILL])?;
    let whole = sequence(0, 0, 21, 1);
    let prefilled = engine.step(&graph, [NO_DECODE, NO_DECODE, whole, NO_PREFILL])?;

    let row = engine.row();
    let last = &prefilled[(DECODES + 20) * row..][..row];
    let reference: Vec<f64> = last.iter().map(|x| f64::from(*x)).collect();
    let difference = compare(&decoded[..row], &reference).rms_ratio;
    println!("a decoded token beside a prefilled one: {difference:.1e} apart");
    assert!(difference < 6e-3);
    assert!(prefilled[..DECODES * row].iter().all(|y| *y == 0.0));
    Ok(())
}

/// A layer, and all memory that its steps use: allocated once.
struct Engine {
    stream: Stream,
    spec: LayerSpec,
    plan: Layer,
    conv: Buffer<u8>,
    a_log: Buffer<u8>,
    norm: Buffer<u8>,
    x: Buffer<u8>,
    a: Buffer<u8>,
    b: Buffer<u8>,
    cu_seqlens: Buffer<i32>,
    slots: Buffer<i32>,
    has_initial_state: Buffer<u8>,
    conv_pool: Buffer<bf16>,
    pool: Buffer<f32>,
    y: Buffer<bf16>,
    workspace: Buffer<u8>,
}

impl Engine {
    fn new(context: &Context, spec: LayerSpec) -> deltawave::Result<Self> {
        let (channels, heads) = (spec.conv().total_channels(), spec.heads.value);
        let weights = |dtype, name, n| context.upload(&random_normal(dtype, name, n, 0).bytes);
        let plan = Layer::device(context, spec, ROWS, SEQUENCES, DECODES)?;
        let values = heads * spec.heads.value_dim;
        Ok(Engine {
            stream: context.stream()?,
            spec,
            conv: weights(spec.dtype, "conv", channels * spec.width)?,
            a_log: weights(Dtype::F32, "a_log", heads)?,
            norm: weights(Dtype::F32, "norm", spec.heads.value_dim)?,
            x: context.alloc(2 * ROWS * (channels + values))?,
            a: context.alloc(2 * ROWS * heads)?,
            b: context.alloc(2 * ROWS * heads)?,
            cu_seqlens: context.alloc(SEQUENCES + 1)?,
            slots: context.alloc(SEQUENCES)?,
            has_initial_state: context.alloc(SEQUENCES)?,
            conv_pool: context.alloc(SLOTS * channels * (spec.width - 1))?,
            pool: context.alloc(SLOTS * values * spec.heads.key_dim)?,
            y: context.alloc(ROWS * values)?,
            workspace: context.alloc(plan.workspace_bytes())?,
            plan,
        })
    }

    /// Numbers of a row of y.
    fn row(&self) -> usize {
        self.spec.heads.value * self.spec.heads.value_dim
    }

    fn capture(&mut self) -> deltawave::Result<Graph> {
        let (s, channels) = (self.spec, self.spec.conv().total_channels());
        let (heads, columns) = (s.heads.value, channels + self.row());
        let x = (self.x).tensor_of(s.dtype, [ROWS, columns], [columns, 1], 0)?;
        let scalars = |b| Buffer::<u8>::tensor_of(b, s.dtype, [ROWS, heads], [heads, 1], 0);
        let conv_shape = [SLOTS, channels, s.width - 1];
        let tensors = LayerTensors {
            cu_seqlens: Some((&self.cu_seqlens).into()),
            x: ConvInput::flat(&x, &s.conv())?,
            z: ConvInput::flat_z(&x, &s.conv())?,
            a: scalars(&self.a)?.into(),
            b: scalars(&self.b)?.into(),
            weights: LayerWeights {
                conv: (self.conv).tensor_of(s.dtype, [channels, s.width], [s.width, 1], 0)?,
                conv_bias: None,
                a_log: self.a_log.tensor_of(Dtype::F32, [heads], [1], 0)?,
                dt_bias: None,
                norm: Some(
                    self.norm
                        .tensor_of(Dtype::F32, [s.heads.value_dim], [1], 0)?,
                ),
            },
            states: LayerStates {
                conv: self.conv_pool.tensor_mut(conv_shape)?,
                conv_layout: ConvStateLayout::ChannelMajor,
                recurrent: (self.pool).tensor_mut([
                    SLOTS,
                    heads,
                    s.heads.key_dim,
                    s.heads.value_dim,
                ])?,
                recurrent_layout: StateLayout::KeyMajor,
                slots: Some((&self.slots).into()),
                has_initial_state: Some((&self.has_initial_state).into()),
            },
            y: self.y.tensor_mut([ROWS, heads, s.heads.value_dim])?.into(),
        };
        let (plan, workspace) = (&self.plan, &mut self.workspace);
        (self.stream).capture(|stream| plan.launch(stream, &tensors, Workspace::new(workspace)))
    }

    /// Writes what a step takes to where the graph reads it, replays it, and returns y. In a model it is kernels before
    /// this one that write x, a and b.
    fn step(&mut self, graph: &Graph, batch: [Sequence; SEQUENCES]) -> deltawave::Result<Vec<f32>> {
        let (s, columns) = (self.spec, self.spec.conv().total_channels() + self.row());
        let rows = |name, size: usize| {
            let mut bytes = vec![0; 2 * ROWS * size];
            let mut at = 0;
            for q in batch {
                let all = random_normal(s.dtype, name, (q.first + q.tokens) * size, q.prompt);
                let wanted = &all.bytes[2 * q.first * size..];
                bytes[at..at + wanted.len()].copy_from_slice(wanted);
                at += wanted.len();
            }
            bytes
        };
        let mut cu_seqlens = [0; SEQUENCES + 1];
        for (n, q) in batch.iter().enumerate() {
            cu_seqlens[n + 1] = cu_seqlens[n] + q.tokens as i32;
        }
        self.x.write(&rows("x", columns))?;
        self.a.write(&rows("a", s.heads.value))?;
        self.b.write(&rows("b", s.heads.value))?;
        self.cu_seqlens.write(&cu_seqlens)?;
        self.slots.write(&batch.map(|q| q.slot))?;
        (self.has_initial_state).write(&batch.map(|q| u8::from(q.first > 0)))?;
        // SAFETY: the plan and all buffers that were captured are alive.
        unsafe { graph.launch(&self.stream)? };
        let y = self.y.download(&self.stream)?;
        Ok(y.iter().map(|x| x.to_f32()).collect())
    }
}
