//! Batches of sequences of any lengths, and sequences that go on later. `cargo run --release --example 02-varlen`
//!
//! Rows of all sequences are packed behind one another; `cu_seqlens` says where each starts. A prompt of which half is
//! prefilled now and half later, from the state that the first half left, has the outputs of one prefilled at once.

use std::error::Error;

use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillSpec, PrefillTensors};
use deltawave::runtime::{Backend, Context};
use deltawave::state::InitialState;
use deltawave::state::States;
use deltawave::state::{State, StateMut};
use deltawave::tensor::Buffer;
use deltawave::types::StateLayout;
use deltawave::workspace::Workspace;
use half::bf16;

const HEADS: usize = 2;
const DIM: usize = 32;
/// Floats of a state of a sequence.
const STATE: usize = HEADS * DIM * DIM;

/// Inputs of so many tokens.
struct Inputs {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    g: Vec<f32>,
}

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::new(Backend::Auto, 0)?;
    // Sequences of 100, 0 and 70 tokens. Empty ones are allowed.
    let inputs = Inputs::of(170);
    let (whole, states) = prefill(&context, &inputs, &[0, 100, 100, 170], None)?;

    // The same in two steps: the first 64 and 13 tokens, then the rest, each from where it was.
    let (first, rest) = (
        inputs.rows(&[0..64, 100..113]),
        inputs.rows(&[64..100, 113..170]),
    );
    let (early, between) = prefill(&context, &first, &[0, 64, 64, 77], None)?;
    let (late, end) = prefill(&context, &rest, &[0, 36, 36, 93], Some(&between))?;

    let row = HEADS * DIM;
    let pieces = [
        &early[..64 * row],
        &late[..36 * row],
        &early[64 * row..],
        &late[36 * row..],
    ];
    let difference = largest_difference(&whole, &pieces.concat());
    println!("outputs, at once and in two steps: at most {difference:.1e} apart");
    assert!(difference < 0.01);
    let difference = largest_difference(&states, &end);
    println!("states: at most {difference:.1e} apart");
    assert!(difference < 0.01);
    println!("the empty sequence's state: {}", states[STATE]);
    assert!(states[STATE..2 * STATE].iter().all(|x| *x == 0.0));
    Ok(())
}

/// Outputs and final states.
fn prefill(
    context: &Context,
    inputs: &Inputs,
    cu_seqlens: &[i64],
    initial: Option<&[f32]>,
) -> Result<(Vec<f32>, Vec<f32>), Box<dyn Error>> {
    let (stream, tokens, sequences) = (
        context.stream()?,
        inputs.g.len() / HEADS,
        cu_seqlens.len() - 1,
    );
    let spec = PrefillSpec {
        qk_l2norm: true, // rows of q and k are normalised inside
        ..PrefillSpec::new(HEADS, HEADS, DIM, DIM)
    };
    let plan = Prefill::packed(context, spec, cu_seqlens, tokens)?;
    let [q, k, v] = [&inputs.q, &inputs.k, &inputs.v].map(|x| context.upload(x));
    let (q, k, v, g) = (q?, k?, v?, context.upload(&inputs.g)?);
    let initial: Option<Buffer<f32>> = initial.map(|x| context.upload(x)).transpose()?;
    let mut o = context.alloc::<bf16>(tokens * HEADS * DIM)?;
    let mut states = context.alloc::<f32>(sequences * STATE)?;
    let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;
    let (rows, shape) = ([tokens, HEADS, DIM], [sequences, HEADS, DIM, DIM]);
    let layout = StateLayout::KeyMajor;
    let tensors = PrefillTensors {
        cu_seqlens: None,
        q: q.tensor(rows)?.into(),
        k: k.tensor(rows)?.into(),
        v: v.tensor(rows)?.into(),
        gating: Gating::Given {
            g: Some(g.tensor([tokens, HEADS])?.into()),
            beta: None, // 1
        },
        states: States::Separate {
            initial: (match &initial {
                Some(x) => Some(State {
                    tensor: x.tensor(shape)?,
                    layout,
                }),
                None => None,
            })
            .map(|state| InitialState {
                state,
                has_initial_state: None,
            }),
            last: Some(StateMut {
                tensor: states.tensor_mut(shape)?,
                layout,
            }),
        },
        // all have one, if any has
        o: o.tensor_mut(rows)?.into(),
        snapshots: None,
    };
    plan.launch(&stream, &tensors, Workspace::new(&mut workspace))?;
    let o = o.download(&stream)?;
    Ok((
        o.iter().map(|x| x.to_f32()).collect(),
        states.download(&stream)?,
    ))
}

impl Inputs {
    /// Numbers that look random enough.
    fn of(tokens: usize) -> Self {
        let wave = |n: usize, pace: f32| (0..n).map(move |i| (i as f32 * pace).sin());
        let rows = |pace| {
            let numbers = wave(tokens * HEADS * DIM, pace);
            numbers.map(bf16::from_f32).collect()
        };
        Inputs {
            q: rows(1.7),
            k: rows(2.3),
            v: rows(3.1),
            g: wave(tokens * HEADS, 1.1).map(|x| 0.1 * (x - 1.0)).collect(),
        }
    }

    /// Some of the tokens.
    fn rows(&self, ranges: &[std::ops::Range<usize>]) -> Self {
        fn pick<T: Copy>(x: &[T], row: usize, ranges: &[std::ops::Range<usize>]) -> Vec<T> {
            let rows = ranges.iter().map(|r| &x[r.start * row..r.end * row]);
            rows.flatten().copied().collect()
        }
        let row = HEADS * DIM;
        Inputs {
            q: pick(&self.q, row, ranges),
            k: pick(&self.k, row, ranges),
            v: pick(&self.v, row, ranges),
            g: pick(&self.g, HEADS, ranges),
        }
    }
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}
