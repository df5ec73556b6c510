//! Summaries in pieces, on the simulator. gfx942's kernels compute them, though only plans of sm_90a ask for them.

use std::cell::Cell;

use half::bf16;

use super::*;
use crate::runtime::Context;
use crate::state::{InitialState, State, StateMut};
use crate::types::StateLayout;

thread_local! {
    /// Pieces of the plans that this thread makes.
    pub(super) static PIECES: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Numbers in -1..1.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = (self.0)
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    fn bf16s(&mut self, count: usize) -> Vec<bf16> {
        (0..count).map(|_| bf16::from_f32(self.next())).collect()
    }
}

/// How a launch is cut.
#[derive(Clone, Copy)]
struct Way {
    segments: Option<usize>,
    pieces: usize,
    on_device: bool,
}

const HEADS: [usize; 2] = [1, 3];
const KEYS: usize = 64;
const VALUES: usize = 48;

/// o and the final states, and how many segments there were. Gates by value head: soon forgotten, forgotten within a
/// segment, never.
fn outputs(lengths: &[usize], way: Way) -> Result<(Vec<f32>, Vec<f32>, usize)> {
    let [key_heads, value_heads] = HEADS;
    let (tokens, sequences) = (lengths.iter().sum::<usize>(), lengths.len());
    let mut numbers = Numbers(7);
    let context = Context::simulator()?;
    let stream = context.stream()?;
    let mut spec = PrefillSpec::new(key_heads, value_heads, KEYS, VALUES);
    spec.qk_l2norm = true;
    spec.segments = way.segments;
    spec.path = PrefillPath::Split;
    spec.compute_units = Some(24);
    PIECES.set(Some(way.pieces));
    let mut cu_seqlens = vec![0];
    for n in lengths {
        cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + *n as i32);
    }
    let plan = match way.on_device {
        true => Prefill::device(&context, spec, tokens, sequences)?,
        false => Prefill::packed(&context, spec, &cu_seqlens, tokens)?,
    };
    PIECES.set(None);
    let q = context.upload(&numbers.bf16s(tokens * key_heads * KEYS))?;
    let k = context.upload(&numbers.bf16s(tokens * key_heads * KEYS))?;
    let v = context.upload(&numbers.bf16s(tokens * value_heads * VALUES))?;
    let gates: Vec<f32> = (0..tokens * value_heads)
        .map(|i| [-1.0, -0.1, -1e-4][i % value_heads] * (1.0 + numbers.next()))
        .collect();
    let beta: Vec<f32> = (0..tokens * value_heads)
        .map(|_| 0.5 + 0.5 * numbers.next())
        .collect();
    let (g, beta) = (context.upload(&gates)?, context.upload(&beta)?);
    let words = sequences * value_heads * KEYS * VALUES;
    let initial: Vec<f32> = (0..words).map(|_| numbers.next()).collect();
    let mut o = context.alloc::<bf16>(tokens * value_heads * VALUES)?;
    let mut states = context.upload(&initial)?;
    let given = context.upload(&initial)?;
    let lengths_there = context.upload(&cu_seqlens)?;
    let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;
    let shape = [sequences, value_heads, KEYS, VALUES];
    let layout = StateLayout::KeyMajor;
    plan.launch(
        &stream,
        &PrefillTensors {
            q: q.tensor([tokens, key_heads, KEYS])?.into(),
            k: k.tensor([tokens, key_heads, KEYS])?.into(),
            v: v.tensor([tokens, value_heads, VALUES])?.into(),
            o: o.tensor_mut([tokens, value_heads, VALUES])?.into(),
            gating: Gating::Given {
                g: Some(g.tensor([tokens, value_heads])?.into()),
                beta: Some(beta.tensor([tokens, value_heads])?.into()),
            },
            cu_seqlens: way.on_device.then(|| (&lengths_there).into()),
            states: States::Separate {
                initial: Some(InitialState {
                    state: State {
                        tensor: given.tensor(shape)?,
                        layout,
                    },
                    has_initial_state: None,
                }),
                last: Some(StateMut {
                    tensor: states.tensor_mut(shape)?,
                    layout,
                }),
            },
            snapshots: None,
        },
        Workspace::new(&mut workspace),
    )?;
    let o = o.download(&stream)?.into_iter().map(f32::from).collect();
    Ok((o, states.download(&stream)?, plan.segments()))
}

/// rms of the difference over the rms of what is wanted. Either has an error of 3e-3.
fn error(found: &[f32], wanted: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let difference: f64 = found.iter().zip(wanted).map(|(a, b)| square(a - b)).sum();
    let total: f64 = wanted.iter().map(|&b| square(b)).sum();
    (difference / total).sqrt()
}

#[test]
fn pieces_are_summarised_and_chained() {
    for lengths in [
        vec![64 * 40],
        vec![64 * 60 + 5, 300, 64 * 13 + 63, 0],
        vec![64 * 37 + 1, 64 * 36],
    ] {
        let way = |segments, pieces, on_device| Way {
            segments,
            pieces,
            on_device,
        };
        let whole = outputs(&lengths, way(Some(1), 1, false)).expect("a launch");
        for pieces in 1..=3 {
            let cut = outputs(&lengths, way(None, pieces, false)).expect("a launch");
            let name = format!("{lengths:?}, {pieces} pieces");
            assert!(cut.2 > lengths.len(), "{name}: {} segments", cut.2);
            let errors = [error(&cut.0, &whole.0), error(&cut.1, &whole.1)];
            assert!(errors.iter().all(|&e| e < 6e-3), "{name}: {errors:?}");
            if pieces > 1 {
                let device = outputs(&lengths, way(None, pieces, true)).expect("a launch");
                assert!(device.0 == cut.0 && device.1 == cut.1, "{name}");
            }
        }
    }
}
