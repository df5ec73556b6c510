//! A pool of states, updated in place, and a prefix cache. `cargo run --release --example 07-prefix-cache`
//!
//! An engine keeps the states of all its sequences in one tensor and says which slot is whose: nothing is gathered before
//! a prefill, nothing scattered after it. While a prompt is walked, states at multiples of 64 tokens can be written to
//! further slots. A prompt that begins with the same tokens then starts there, and has the bits of a prefill of all of it.

use std::error::Error;

use deltawave::gates::Gating;
use deltawave::prefill::{Prefill, PrefillSpec, PrefillTensors, Snapshot, Snapshots};
use deltawave::runtime::{Backend, Context};
use deltawave::state::StatePool;
use deltawave::state::States;
use deltawave::tensor::Buffer;
use deltawave::types::StateLayout;
use deltawave::workspace::Workspace;
use half::bf16;

const HEADS: usize = 2;
const DIM: usize = 32;
const SLOTS: usize = 4;
const TOKENS: usize = 200;
/// Elements of a token's row.
const ROW: usize = HEADS * DIM;
/// Floats of a state.
const STATE: usize = HEADS * DIM * DIM;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let context = Context::new(Backend::Auto, 0)?;
    let rows: Vec<bf16> = (0..TOKENS * ROW)
        .map(|i| bf16::from_f32(((i * i + 7 * i) % 61) as f32 / 30.0 - 1.0))
        .collect();
    let mut pool = context.upload(&[0f32; SLOTS * STATE])?;
    let spec = PrefillSpec {
        qk_l2norm: true,
        // The bits are the same where no sequence is cut; the accuracy is in any case.
        segments: Some(1),
        ..PrefillSpec::new(HEADS, HEADS, DIM, DIM)
    };

    // A new sequence in slot 2. The state after 128 of its tokens goes to slot 0.
    let mut plan = Prefill::packed(&context, spec, &[0, TOKENS as i64], TOKENS)?;
    plan.set_slots(&[2], None)?;
    plan.set_snapshots(&[Snapshot {
        sequence: 0,
        tokens: 128,
        slot: 0,
    }])?;
    let snapshots = Snapshots {
        to: None,    // the pool
        slots: None, // those of the plan
    };
    let whole = launch(&context, &plan, &rows, &mut pool, Some(snapshots))?;

    // Another one that begins alike: only its other tokens are computed, from slot 0, and its state goes to slot 3.
    let rest = TOKENS - 128;
    let mut plan = Prefill::packed(&context, spec, &[0, rest as i64], rest)?;
    plan.set_slots(&[0], Some(&[3]))?;
    let outputs = launch(&context, &plan, &rows[128 * ROW..], &mut pool, None)?;

    let same = outputs == whole[128 * ROW..];
    println!(
        "outputs after the cached prefix: {}",
        if same { "the same bits" } else { "others" }
    );
    assert!(same);
    let states = pool.download(&context.stream()?)?;
    let slot = |n: usize| &states[n * STATE..(n + 1) * STATE];
    let same = slot(2) == slot(3);
    println!("states: {}", if same { "the same bits" } else { "others" });
    assert!(same && slot(0) != slot(2));
    println!("slot 1, which nobody has: {}", slot(1)[0]);
    assert!(slot(1).iter().all(|&x| x == 0.0));
    Ok(())
}

/// A prefill of rows that are q, k and v at once, in place on the pool. Returns the outputs.
fn launch(
    context: &Context,
    plan: &Prefill,
    rows: &[bf16],
    pool: &mut Buffer<f32>,
    snapshots: Option<Snapshots<'_>>,
) -> Result<Vec<bf16>, Box<dyn Error>> {
    let stream = context.stream()?;
    let shape = [rows.len() / ROW, HEADS, DIM];
    let x = context.upload(rows)?;
    let mut o = context.alloc::<bf16>(rows.len())?;
    let mut workspace = context.alloc::<u8>(plan.workspace_bytes())?;
    let tensors = PrefillTensors {
        cu_seqlens: None,
        q: x.tensor(shape)?.into(),
        k: x.tensor(shape)?.into(),
        v: x.tensor(shape)?.into(),
        gating: Gating::Given {
            g: None,
            beta: None,
        },
        states: States::Pool {
            pool: StatePool {
                tensor: pool.tensor_mut([SLOTS, HEADS, DIM, DIM])?,
                layout: StateLayout::KeyMajor,
                slots: None,
                write_slots: None,
            },
            has_initial_state: None,
        },
        o: o.tensor_mut(shape)?.into(),
        snapshots,
    };
    plan.launch(&stream, &tensors, Workspace::new(&mut workspace))?;
    Ok(o.download(&stream)?)
}
