//! Prefill: a plan, tensors, a launch. `cargo run --release --example 01-prefill`
//!
//! A head of Gated DeltaNet is a memory. With keys of length 1, beta = 1 and no decay, `v` replaces what was stored under
//! its key, and a query reads it back. So five tokens of one head show all of the recurrence, in numbers that are exact.

use std::error::Error;

use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillSpec, PrefillTensors};
use deltawave::runtime::{Backend, Context};
use deltawave::state::StateMut;
use deltawave::state::States;
use deltawave::types::StateLayout;
use deltawave::workspace::Workspace;
use half::bf16;

/// Keys and values of 16 numbers, the fewest that there can be.
const DIM: usize = 16;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    // What each token does: its key and query, what it writes, how strongly, and what the state is multiplied by before.
    let tokens = [
        ("store 1 under key 0", 0, 1.0, 1.0, 1.0),
        ("store 2 under key 1", 1, 2.0, 1.0, 1.0),
        ("store 3 under key 0", 0, 3.0, 1.0, 1.0),
        ("only read key 1", 1, 0.0, 0.0, 1.0),
        ("halve, then read key 0", 0, 0.0, 0.0, 0.5f32),
    ];
    let n = tokens.len();
    let key = |k: usize| (0..DIM).map(move |i| bf16::from_f32(if i == k { 1.0 } else { 0.0 }));
    let keys: Vec<bf16> = tokens.iter().flat_map(|t| key(t.1)).collect();
    let values = tokens.iter().flat_map(|t| [bf16::from_f32(t.2); DIM]);
    let values: Vec<bf16> = values.collect();
    let betas: Vec<f32> = tokens.iter().map(|t| t.3).collect();
    let gates: Vec<f32> = tokens.iter().map(|t| t.4.ln()).collect();

    // A GPU where there is one, else the simulator. The context has all kernels loaded; nothing later loads or compiles.
    let context = Context::new(Backend::Auto, 0)?;
    let stream = context.stream()?;

    // A plan is made once for a batch of given lengths: here one sequence, rows 0 to n of packed tensors.
    let spec = PrefillSpec {
        scale: Some(1.0), // instead of 1 / sqrt(K)
        ..PrefillSpec::new(1, 1, DIM, DIM)
    };
    let plan = Prefill::packed(&context, spec, &[0, n as i64], n)?;

    // Memory is the caller's: tensors, outputs, and a workspace that launches on one stream may share.
    let k = context.upload(&keys)?;
    let v = context.upload(&values)?;
    let g = context.upload(&gates)?;
    let beta = context.upload(&betas)?;
    let mut o = context.alloc::<bf16>(n * DIM)?;
    let mut state = context.alloc::<f32>(DIM * DIM)?;
    let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;

    let tensors = PrefillTensors {
        cu_seqlens: None,
        q: k.tensor([n, 1, DIM])?.into(),
        // [tokens, key heads, K]
        k: k.tensor([n, 1, DIM])?.into(),
        v: v.tensor([n, 1, DIM])?.into(),
        // [tokens, value heads, V]
        gating: Gating::Given {
            g: Some(g.tensor([n, 1])?.into()), // natural logarithms
            beta: Some(beta.tensor([n, 1])?.into()),
        },
        states: States::Separate {
            initial: None,
            last: Some(StateMut {
                tensor: state.tensor_mut([1, 1, DIM, DIM])?,
                layout: StateLayout::KeyMajor,
            }),
        },
        o: o.tensor_mut([n, 1, DIM])?.into(),
        snapshots: None,
    };
    plan.launch(&stream, &tensors, Workspace::new(&mut workspace))?;

    // The launch was only enqueued. Downloading waits for the stream.
    let o = o.download(&stream)?;
    println!("{} ({})", context.device().name, context.backend().name());
    for (token, row) in tokens.iter().zip(o.chunks_exact(DIM)) {
        println!("{:24} reads {}", token.0, row[0]);
    }
    let read: Vec<f32> = o.iter().step_by(DIM).map(|x| x.to_f32()).collect();
    assert_eq!(read, [1.0, 2.0, 3.0, 2.0, 1.5]);

    let state = state.download(&stream)?;
    println!("left under keys 0 and 1: {} and {}", state[0], state[DIM]);
    assert_eq!([state[0], state[DIM]], [1.5, 1.0]);
    Ok(())
}
